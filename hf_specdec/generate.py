"""Generate: the way in. What `model.generate` is given, checked, and what it gives back."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import (
    CandidateGenerator,
    GenerateDecoderOnlyOutput,
    GenerationMode,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_specdec.decode import Text, decode
from hf_specdec.generator import SpecGenerator
from hf_specdec.record import Record
from hf_specdec.stats import SpecStats
from hf_specdec.target import TREE_ATTENTION, Target

logger = logging.getLogger(__name__)

OTHER_SPECULATION = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type")  # options
OTHER_LOOPS = ("assistant_model", "assistant_tokenizer", "custom_generate")  # arguments, kept from custom callables

HOOKS: dict[Callable, Callable] = {}  # our wrapper of `generate`, while it is on, and what it wraps


def speculate(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    *,
    candidate_generator: SpecGenerator,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    **model_kwargs,
) -> GenerateDecoderOnlyOutput | torch.LongTensor:
    """Decodes like `model.generate` would, and the same text, with drafts of `candidate_generator` verified in blocks.

    For `model.generate(..., custom_generate=speculate, candidate_generator=G)`, which needs no hook. transformers keeps
    `streamer=` and `tokenizer=` (stop strings) from custom callables: bind a streamer by
    `functools.partial(speculate, streamer=...)` and pass it to `generate` as well, which shows it the prompt; pass stop
    strings as a `StopStringCriteria`. After `import hf_specdec`,
    `model.generate(..., candidate_generator=G)` takes care of both.

    Raises:
        ValueError: before any forward, if the call, the model or its cache cannot be decoded this way.
    """
    check_call(model, input_ids, candidate_generator, generation_config, model_kwargs)
    if model_kwargs.get("cache") is None:  # a config saved with caching off; an explicit request was refused above
        generation_config.use_cache = model_kwargs["use_cache"] = True
        model._prepare_cache_for_generation(generation_config, model_kwargs, None, 1, generation_config.max_length - 1)
    generator = candidate_generator
    generator.bind(model)
    generator.stats = SpecStats(synchronize=generator.stats.synchronize)
    target = Target(
        model,
        input_ids,
        generation_config=generation_config,
        model_kwargs=model_kwargs,
        max_nodes=generator.max_nodes,
        prompt_logits=generator.prompt_logits,
        hidden_layers=generator.hidden_layers,
    )
    text = Text(input_ids, criteria=stopping_criteria, max_length=generation_config.max_length, streamer=streamer)
    target.check_rotation(text.max_length)
    generator.share(target)
    if not (generator.chain_only or target.tree_capable):
        generator.stats.notes.append("drafts are cut to chains: the target's cache or positions cannot hold a tree")
    record = Record(generation_config)
    try:
        decode(
            target,
            generator,
            text,
            processors=logits_processor,
            do_sample=generation_config.do_sample,
            record=record,
        )
    finally:
        generator.end()
    target.close()
    if streamer is not None:
        streamer.end()
    return record.output(text.ids, target.stock_cache)


def check_call(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    generator: SpecGenerator,
    config: GenerationConfig,
    model_kwargs: dict,
) -> None:
    """Raises, before any forward, for what speculative decoding does not do."""
    if not isinstance(generator, SpecGenerator):
        base = " It is a plain CandidateGenerator:" if isinstance(generator, CandidateGenerator) else ""
        raise ValueError(
            f"candidate_generator must be an object made from a hf_specdec generator class, such as PLDGen(), but is "
            f"{generator!r}.{base} subclass hf_specdec.SpecGenerator to write a method of your own."
        )
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder; speculative decoding needs a decoder-only model."
        )
    if config.num_beams > 1:  # before the batch, which beams make larger
        raise ValueError(
            f"Speculative decoding does not search beams, but num_beams={config.num_beams}: set num_beams=1."
        )
    if input_ids.shape[0] > 1 or config.num_return_sequences > 1:
        raise ValueError(
            f"Speculative decoding runs one sequence at a time, but got a batch of {input_ids.shape[0]} with "
            f"num_return_sequences={config.num_return_sequences}: call generate once per sequence."
        )
    others = [name for name in OTHER_SPECULATION if getattr(config, name, None)]
    if others:
        raise ValueError(
            f"{', '.join(others)} selects another way to speculate: leave it out with candidate_generator."
        )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"Speculative decoding is greedy or samples, but the options of this call (penalty_alpha, dola_layers, ...) ask "
            f"for {mode.value}: leave them out, or generate without candidate_generator."
        )
    if config.use_cache is False and model.generation_config.use_cache is not False:
        raise ValueError(
            "Speculative decoding needs the key-value cache, but use_cache=False was passed: leave it out."
        )
    if not model._supports_default_dynamic_cache() or model._is_stateful:
        raise ValueError(
            f"{type(model).__name__} keeps a recurrent state, from which rejected tokens cannot be taken out again: "
            "generate without candidate_generator."
        )
    implementation = model.config.get_text_config(decoder=True)._attn_implementation
    if not generator.chain_only and implementation not in TREE_ATTENTION:
        raise ValueError(
            f"{type(generator).__name__} drafts trees, and attn_implementation={implementation!r} ignores the mask that "
            f"keeps their branches apart: load the model with attn_implementation='sdpa', or draft chains."
        )
    position_ids = model_kwargs.get("position_ids")
    sequence_long = [
        name
        for name, value in model_kwargs.items()
        if value is not None and (name in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL or name.endswith("token_type_ids"))
    ]
    if sequence_long or (position_ids is not None and position_ids.dim() > 2):
        raise NotImplementedError(
            f"{type(model).__name__} was called with {', '.join(sequence_long) or 'multi-axis position_ids'}, which would "
            "have to grow with every draft; only text inputs are supported: generate without candidate_generator."
        )


def install() -> None:
    """Makes `model.generate(candidate_generator=...)` work; without that argument nothing changes."""
    stock = GenerationMixin.generate
    if stock in HOOKS:
        return

    @functools.wraps(stock)
    def generate(self, *args, candidate_generator: SpecGenerator | None = None, **kwargs):
        if candidate_generator is None:
            return stock(self, *args, **kwargs)
        call = inspect.signature(stock).bind_partial(self, *args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        extra = given["kwargs"]
        others = [name for name in OTHER_LOOPS if (given | extra).get(name) is not None]
        if others:
            raise ValueError(
                f"candidate_generator= and {', '.join(others)}= are different ways to decode: pass one of them."
            )
        if given["synced_gpus"]:
            raise ValueError(
                "synced_gpus=True runs all ranks in step, which speculative decoding cannot: leave it out."
            )
        if option("token_healing", self, given):
            raise ValueError(
                "token_healing=True rewrites the prompt by a tokenizer that transformers keeps from custom loops: call "
                "model.heal_tokens(input_ids, tokenizer) first, and leave it out."
            )
        bind_stop_strings(self, given, extra)
        given["custom_generate"] = functools.partial(
            speculate, candidate_generator=candidate_generator, streamer=given["streamer"]
        )
        return stock(*call.args, **call.kwargs)

    HOOKS[generate] = stock
    GenerationMixin.generate = generate


def uninstall() -> None:
    """Takes the hook off again: `generate` is what it was before `import hf_specdec`.

    Raises:
        RuntimeError: if somebody wrapped `generate` after us; their wrapper would go with ours.
    """
    hook = GenerationMixin.generate
    if hook in HOOKS:
        GenerationMixin.generate = HOOKS.pop(hook)
    elif HOOKS:
        raise RuntimeError(f"{hook.__module__} wrapped generate after hf_specdec did: take that wrapper off first.")


def option(name: str, model: PreTrainedModel, given: dict) -> Any:
    """The value of a generation option as `generate` takes it: the call's, else its config's, else the model's."""
    if name in given["kwargs"]:
        return given["kwargs"][name]
    value = getattr(given["generation_config"], name, None)
    return getattr(model.generation_config, name) if value is None else value


def bind_stop_strings(model: PreTrainedModel, given: dict, extra: dict) -> None:
    """Turns stop strings into a criterion here, since transformers takes `tokenizer=` away from custom callables."""
    config, stop_strings = given["generation_config"], option("stop_strings", model, given)
    tokenizer = extra.pop("tokenizer", None)
    if not stop_strings:
        return
    if tokenizer is None:
        raise ValueError(
            f"stop_strings={stop_strings!r} need the model's tokenizer: pass tokenizer= to generate as well."
        )
    criteria = StoppingCriteriaList(given["stopping_criteria"] or [])
    criteria.append(StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer))
    given["stopping_criteria"] = criteria
    if config is not None and config.stop_strings and not model.generation_config.stop_strings:
        given["generation_config"] = copy.deepcopy(config)
        given["generation_config"].stop_strings = None
        extra.pop("stop_strings", None)
    else:
        extra["stop_strings"] = None

"""Generate: the way in behaves as plain decoding, changes nothing else, and refuses by name what it cannot do."""

from __future__ import annotations

import copy
import functools
import gc
import threading
from contextlib import contextmanager, suppress
from functools import lru_cache
from inspect import signature

import pytest
import torch
from tiny import (
    CHAIN_TARGETS,
    CONFIGS,
    GENERATORS,
    SHAPE,
    SHORT,
    Oracle,
    dealt,
    generate,
    make,
    noisy,
    prompt,
    shared,
    tiny,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    FalconConfig,
    GenerationConfig,
    GenerationMixin,
    GPT2Config,
    GPTNeoConfig,
    OpenAIGPTConfig,
    OPTConfig,
    PhimoeConfig,
    PreTrainedModel,
    T5Config,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.cache_utils import DynamicCache
from transformers.generation import MaxLengthCriteria, PromptLookupCandidateGenerator, StoppingCriteriaList

import hf_specdec
from hf_specdec import METHODS, PLDGen, SpecGenerator, SpSGen
from hf_specdec.cache import TreeCache


@pytest.fixture
def without_hook():
    hf_specdec.uninstall()
    yield
    hf_specdec.install()


# the hook


def test_the_call_of_the_readme_works_verbatim():
    model, input_ids = shared(), prompt(9)
    generator = PLDGen()
    outputs = model.generate(input_ids, candidate_generator=generator, max_new_tokens=24, do_sample=False)
    assert torch.equal(outputs, generate(model, input_ids))


def test_without_the_argument_generate_is_transformers_own(without_hook):
    models = [shared(), shared("gemma2"), AutoModelForSeq2SeqLM.from_config(T5Config(**T5))]
    calls = [dict(), dict(do_sample=True), dict(num_beams=2), dict(prompt_lookup_num_tokens=3)]
    before = [generate(model, prompt(9), **call) for model in models for call in calls]
    hf_specdec.install()
    after = [generate(model, prompt(9), **call) for model in models for call in calls]
    none = [generate(model, prompt(9), candidate_generator=None, **call) for model in models for call in calls]
    assert all(torch.equal(*texts) for texts in zip(before, after, strict=True))
    assert all(torch.equal(*texts) for texts in zip(before, none, strict=True))


def test_uninstall_gives_generate_back_and_install_is_idempotent(without_hook):
    stock = GenerationMixin.generate
    with pytest.raises(ValueError, match="candidate_generator"):
        generate(shared(), prompt(9), PLDGen())
    hf_specdec.install()
    hooked = GenerationMixin.generate
    hf_specdec.install()
    assert GenerationMixin.generate is hooked is not stock
    hf_specdec.uninstall()
    hf_specdec.uninstall()
    assert GenerationMixin.generate is stock


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("do_sample", [False, True])
def test_custom_generate_needs_no_hook(do_sample, name, without_hook):
    model = shared()
    expected = generate(model, prompt(9), do_sample=do_sample)
    generator = make(name, model, expected)
    made = generate(model, prompt(9), generator, do_sample=do_sample, custom_generate=hf_specdec.speculate)
    assert torch.equal(made, expected)


class Recorder:
    """A streamer that notes what it gets."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        self.puts.append(value)

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("name", SHORT)
def test_a_streamer_bound_to_custom_generate(name, without_hook):
    """It gets the new tokens; given to `generate` as well, it also gets the prompt, as in plain decoding."""
    model, plain, bound, both = shared(), Recorder(), Recorder(), Recorder()
    expected = generate(model, prompt(9), streamer=plain)
    for streamer, options in ((bound, {}), (both, dict(streamer=both))):
        speculate = functools.partial(hf_specdec.speculate, streamer=streamer)
        generate(model, prompt(9), make(name, model, expected), custom_generate=speculate, **options)
    assert [put.tolist() for put in bound.puts] == [put.tolist() for put in plain.puts[1:]]
    assert [put.tolist() for put in both.puts] == [put.tolist() for put in plain.puts]
    assert bound.ends == both.ends == 1


# transformers' own assisted loop


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_greedy_chains_in_transformers_own_loop(family, name, monkeypatch):
    model = shared(family)
    expected = generate(model, prompt(9), max_new_tokens=40)
    generator = make(name, model, expected)
    generator.bind(model)
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **call: generator, raising=False)
    assert torch.equal(generate(model, prompt(9), prompt_lookup_num_tokens=3, max_new_tokens=40), expected)


@pytest.mark.parametrize("name", METHODS)
def test_sampled_texts_in_transformers_own_loop_are_possible(name, monkeypatch):
    model = shared()
    generator = make(name, model)
    generator.bind(model)
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **call: generator, raising=False)
    for max_new_tokens in (1, 2, 3, 20):
        options = dict(prompt_lookup_num_tokens=3, do_sample=True, top_k=5, max_new_tokens=max_new_tokens)
        made = generate(model, prompt(9), **options)
        assert made.shape[1] == 9 + max_new_tokens
        with torch.no_grad():
            logits = model(made).logits[0, 8:-1]
        assert all(token in row.topk(5).indices for token, row in zip(made[0, 9:], logits, strict=True))


def test_sampled_drafts_in_transformers_own_loop(monkeypatch):
    """With its q reported there, a drafter that is the target has all its drafts accepted."""
    model, matches = shared(), []
    generator = SpSGen(model, num_draft_tokens=3, draft_sampling=True)
    generator.bind(model)
    generator.begin = functools.partial(SpSGen.begin, generator, do_sample=True)
    generator.update_candidate_strategy = lambda ids, scores, num_matches: matches.append(int(num_matches))
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **call: generator, raising=False)
    generate(model, prompt(9), prompt_lookup_num_tokens=3, do_sample=True, top_k=0, max_new_tokens=24)
    assert matches == [3] * 6


def test_one_object_serves_both_loops_in_turn(monkeypatch):
    model = shared(scale=4)
    for name in GENERATORS:
        texts = [generate(model, prompt(n, seed=n), max_new_tokens=20) for n in (9, 12)]
        for text, n in zip(texts, (9, 12), strict=True):
            generator = make(name, model, text)
            for _ in range(2):
                assert torch.equal(generate(model, prompt(n, seed=n), generator, max_new_tokens=20), text)
                with monkeypatch.context() as patch:
                    patch.setattr(model, "_get_candidate_generator", lambda g=generator, **call: g, raising=False)
                    made = generate(model, prompt(n, seed=n), prompt_lookup_num_tokens=3, max_new_tokens=20)
                    assert torch.equal(made, text)
                    more = torch.cat(
                        [text, prompt(5)], dim=-1
                    )  # goes on where the last call ended, but was not drafted
                    generate(model, more, prompt_lookup_num_tokens=3, max_new_tokens=2)


def test_a_step_told_by_transformers_own_loop_is_one_that_was_drafted():
    """A text that goes on otherwise than drafted is a new text, not a step."""
    text = generate(shared(), prompt(9))
    generator = Oracle(text[0].tolist(), 4)
    generator.get_candidates(text[:, :9])
    generator.get_candidates(text[:, :14])
    assert [step.path for step in generator.steps] == [[0, 1, 2, 3, 4]]
    generator.get_candidates(torch.cat([text[:, :14], prompt(8)], dim=-1))
    assert generator.steps == []


# streamers


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("do_sample", [False, True])
def test_streamers_get_what_they_get_in_plain_decoding(do_sample, name):
    model, plain, drafted = shared(), Recorder(), Recorder()
    expected = generate(model, prompt(9), streamer=plain, do_sample=do_sample)
    generate(model, prompt(9), make(name, model, expected), streamer=drafted, do_sample=do_sample)
    assert [put.tolist() for put in drafted.puts] == [put.tolist() for put in plain.puts]
    assert all(put.shape == (1,) for put in drafted.puts[1:])
    assert drafted.ends == 1


def words():
    from test_stopping import letters

    return letters()


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer(skip_prompt, capsys):
    model, shown = shared(), []
    expected = generate(model, prompt(9))
    for generator in (None, make("oracle-some", model, expected)):
        generate(model, prompt(9), generator, streamer=TextStreamer(words(), skip_prompt=skip_prompt))
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and len(shown[0]) > 20


def test_text_iterator_streamer():
    model = shared()
    expected = generate(model, prompt(9))
    streamer = TextIteratorStreamer(words(), skip_prompt=True, timeout=20)
    options = dict(streamer=streamer)
    thread = threading.Thread(
        target=generate, args=(model, prompt(9), make("oracle-tree", model, expected)), kwargs=options
    )
    thread.start()
    assert "".join(streamer) == words().decode(expected[0, 9:])
    thread.join()


# what is returned


def assert_same_entries(made, expected, path: str = "") -> None:
    """Nested tuples of tensors agree in length, shape, dtype and value."""
    if isinstance(expected, torch.Tensor):
        assert made.shape == expected.shape and made.dtype == expected.dtype, path
        assert torch.allclose(made.double(), expected.double(), atol=1e-4), path
        return
    assert type(made) is type(expected) and (expected is None or len(made) == len(expected)), path
    for i, both in enumerate(zip(made or (), expected or (), strict=True)):
        assert_same_entries(*both, path=f"{path}[{i}]")


@pytest.mark.parametrize(
    ("target", "do_sample", "name"),
    dealt([("llama", "eager"), ("gemma", "sdpa"), ("sliding", "eager"), ("gemma2", "eager")], [False, True]),
)
def test_returned_scores_logits_states_and_attentions_are_plain_decodings(target, do_sample, name):
    attention = target[1]
    model, options = shared(*target), dict(return_dict_in_generate=True, do_sample=do_sample, top_k=9)
    asked = dict(output_scores=True, output_logits=True, output_hidden_states=True)
    asked |= dict(output_attentions=True) if attention == "eager" else {}
    expected = generate(model, prompt(9), max_new_tokens=14, **options, **asked)
    made = generate(model, prompt(9), make(name, model, expected.sequences), max_new_tokens=14, **options, **asked)
    assert type(made) is type(expected) and list(made.keys()) == list(expected.keys())
    assert torch.equal(made.sequences, expected.sequences)
    for item in ("scores", "logits", "hidden_states", "attentions"):
        assert_same_entries(made.get(item), expected.get(item), item)


@pytest.mark.parametrize(
    "asked", ["output_scores", "output_logits", "output_hidden_states", "output_attentions", None]
)
def test_only_what_is_asked_for_is_returned(asked):
    model = shared("llama", "eager")
    options = dict(return_dict_in_generate=True) | ({asked: True} if asked else {})
    expected = generate(model, prompt(9), **options)
    made = generate(model, prompt(9), make("oracle-tree", model, expected.sequences), **options)
    assert list(made.keys()) == list(expected.keys())


@pytest.mark.parametrize("name", ["pld", "eagle", "medusa", "kangaroo", "oracle-tree"])
@pytest.mark.parametrize("layers", [[1], [0, -1], 2])
def test_some_hidden_states_alone(layers, name):
    """The others are None, also where the generator reads them."""
    model = shared(scale=4)
    options = dict(return_dict_in_generate=True, output_hidden_states=layers)
    expected = generate(model, prompt(9), **options)
    made = generate(model, prompt(9), make(name, model, expected.sequences), **options)
    assert torch.equal(made.sequences, expected.sequences) and len(made.hidden_states) == len(expected.hidden_states)
    for ours, plain in zip(made.hidden_states, expected.hidden_states, strict=True):
        for state, wanted in zip(ours, plain, strict=True):
            assert (state is None) == (wanted is None)
            if state is not None:
                torch.testing.assert_close(state, wanted)


def test_outputs_asked_for_without_a_dict_are_ignored_as_in_plain_decoding():
    model = shared("llama", "eager")
    options = dict(output_scores=True, output_hidden_states=True, output_attentions=True)
    expected = generate(model, prompt(9), **options)
    assert torch.equal(generate(model, prompt(9), make("oracle-tree", model, expected), **options), expected)


# inputs


@pytest.mark.parametrize(("family", "attention", "name"), dealt(["llama", "sliding"], ["eager", "sdpa"], each=2))
def test_left_padded_row(family, attention, name):
    # eager attention turns an fp64 mask into fp32, where a row of padding alone becomes nan, in plain decoding too
    model = shared(family) if attention == "sdpa" else tiny(family, attention="eager", dtype=torch.float32)
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt(9)], dim=-1)
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    expected = generate(model, ids, attention_mask=mask)
    assert torch.equal(expected[:, 13:], generate(model, prompt(9))[:, 9:])
    assert torch.equal(generate(model, ids, make(name, model, expected), attention_mask=mask), expected)


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("family", ["llama", "sliding"])
def test_explicit_positions(family, name):
    model, positions = shared(family), torch.tensor([[0, 1, 2, 3, 7, 8, 9, 10, 20]])
    expected = generate(model, prompt(9), position_ids=positions)
    assert not torch.equal(expected, generate(model, prompt(9)))
    assert torch.equal(generate(model, prompt(9), make(name, model, expected), position_ids=positions), expected)


@pytest.mark.parametrize(("family", "do_sample", "name"), dealt(["gemma", "sliding"], [False, True], each=2))
def test_prompts_given_as_embeddings(do_sample, family, name):
    """Only the new tokens are returned then, unless the ids are given as well."""
    model, options = shared(family), dict(do_sample=do_sample)
    embeddings = model.get_input_embeddings()(prompt(9)).detach() * 1.1
    expected = generate(model, None, inputs_embeds=embeddings, **options)
    assert expected.shape == (1, 24)
    made = generate(model, None, make(name, model, expected), inputs_embeds=embeddings, **options)
    assert torch.equal(made, expected)
    both = dict(input_ids=prompt(9), inputs_embeds=embeddings) | options
    expected = generate(model, None, **both)
    assert torch.equal(generate(model, None, make(name, model, expected), **both), expected)


def test_prompt_from_the_beginning_of_text_token():
    model = shared()
    expected = generate(model, None)
    for name in GENERATORS:
        assert torch.equal(generate(model, None, make(name, model, expected)), expected)


@pytest.mark.parametrize("name", SHORT)
def test_prefill_in_chunks(name):
    model = shared()
    expected = generate(model, prompt(50), prefill_chunk_size=16)
    assert torch.equal(generate(model, prompt(50), make(name, model, expected), prefill_chunk_size=16), expected)


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("where", ["config", "generation_config"])
def test_models_saved_with_caching_off_decode_with_a_cache(where, name):
    model = tiny()
    expected = generate(model, prompt(9))
    getattr(model, where).use_cache = False
    assert torch.equal(generate(model, prompt(9), make(name, model, expected)), expected)
    assert getattr(model, where).use_cache is False


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=97, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=None),
        OPTConfig(
            vocab_size=97, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
            word_embed_proj_dim=32, max_position_embeddings=128, bos_token_id=1, eos_token_id=None, pad_token_id=0,
        ),
        GPTNeoConfig(
            vocab_size=97, hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4,
            window_size=4, max_position_embeddings=128, bos_token_id=1, eos_token_id=None,
        ),
        FalconConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, bos_token_id=1,
            eos_token_id=None,
        ),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
@pytest.mark.parametrize("name", SHORT)
def test_models_with_positions_of_their_own_kind(config, name):
    """Learned ones, windows by the mask's rows, and distances (alibi)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt(9)], dim=-1)
    for options in ({}, dict(attention_mask=(torch.arange(13) > 3).long()[None])):
        expected = generate(model, ids, **options)
        assert torch.equal(generate(model, ids, make(name, model, expected), **options), expected)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [5.0] * 4}


@lru_cache
def stretched(kind: str) -> PreTrainedModel:
    """A model that rotates texts of more than 16 tokens by other frequencies."""
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        return tiny(rope_parameters=rope, max_position_embeddings=16)
    if kind == "phi3":
        return tiny("phi3", rope_parameters=LONGROPE, original_max_position_embeddings=16)
    torch.manual_seed(0)
    scales = {"short_mscale": 1.0, "long_mscale": 1.1, "original_max_position_embeddings": 16}
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    config = PhimoeConfig(**shape, rope_parameters=LONGROPE | scales, num_local_experts=2, num_experts_per_tok=1)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    return model


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("kind", ["phi3", "phimoe"])
def test_prompts_beyond_the_original_length(kind, name):
    """Such a model encodes the text anew, in a cache of its own: also where one with an earlier turn was passed."""
    model, ids = stretched(kind), prompt(25)
    expected = generate(model, ids, return_dict_in_generate=True)
    made = generate(model, ids, make(name, model, expected.sequences), return_dict_in_generate=True)
    assert torch.equal(made.sequences, expected.sequences)
    assert made.cache.get_seq_length() == expected.cache.get_seq_length() == 48
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :9], cache=cache)
    generator = make(name, model, expected.sequences)
    assert torch.equal(generate(model, ids, generator, cache=cache), expected.sequences)


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("kind", ["phi3", "phimoe", "dynamic"])
def test_texts_within_the_original_length(kind, name):
    """The last token may stand behind it: it is never run."""
    expected = generate(stretched(kind), prompt(9), max_new_tokens=8)
    generator = make(name, stretched(kind), expected)
    assert torch.equal(generate(stretched(kind), prompt(9), generator, max_new_tokens=8), expected)


# refused before any forward


T5 = dict(
    vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, eos_token_id=None,
    pad_token_id=0,
)  # fmt: skip


def refused(model, pattern, *, error=ValueError, generator=None, ids=None, **options) -> None:
    """`generate` raises an error that says `pattern`, before the model runs."""
    forwards = []
    handle = model.register_forward_pre_hook(lambda module, args: forwards.append(1))
    try:
        with pytest.raises(error, match=pattern):
            generate(model, prompt(9) if ids is None else ids, generator or PLDGen(), **options)
    finally:
        handle.remove()
    assert not forwards


REFUSED = {
    "batch": ("batch of 2", dict(ids=torch.ones(2, 5, dtype=torch.long))),
    "several answers": ("num_return_sequences=2", dict(num_return_sequences=2, do_sample=True)),
    "beams": ("num_beams=3", dict(num_beams=3)),
    "lookup": ("prompt_lookup_num_tokens", dict(prompt_lookup_num_tokens=3)),
    "early exit": ("assistant_early_exit", dict(assistant_early_exit=1)),
    "no cache": ("use_cache=False", dict(use_cache=False)),
    "tokens to come": ("use_mtp", dict(use_mtp=True)),
    "contrast": ("contrastive_search", dict(penalty_alpha=0.6)),
    "contrast of layers": ("dola_generation", dict(dola_layers="low")),
    "several ranks": ("synced_gpus", dict(synced_gpus=True)),
    "class": ("PLDGen", dict(generator=PLDGen)),
    "string": ("'pld'", dict(generator="pld")),
    "stock generator": ("SpecGenerator", dict(generator=PromptLookupCandidateGenerator())),
    "custom loop": ("custom_generate", dict(custom_generate=lambda *args, **kwargs: None)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_cannot_be_drafted_are_refused_by_name(case):
    pattern, options = REFUSED[case]
    refused(shared(), pattern, **options)


@pytest.mark.parametrize("case", [case for case in REFUSED if case not in ("several ranks", "custom loop", "class")])
def test_they_are_refused_without_the_hook_too(case, without_hook):
    pattern, options = REFUSED[case]
    refused(shared(), pattern, custom_generate=hf_specdec.speculate, **options)


def test_options_of_another_loop_in_a_generation_config_are_refused():
    config = GenerationConfig(prompt_lookup_num_tokens=3, max_new_tokens=5)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens"):
        shared().generate(prompt(9), generation_config=config, candidate_generator=PLDGen())


def test_assistant_models_are_refused():
    refused(shared(), "assistant_model", assistant_model=noisy(shared()))
    refused(shared(), "assistant_tokenizer", assistant_tokenizer=words())


def test_token_healing_is_refused_by_name():
    refused(shared(), "token_healing=True", token_healing=True, tokenizer=words())
    refused(shared(), "token_healing=True", generation_config=GenerationConfig(token_healing=True), tokenizer=words())


@pytest.mark.parametrize("name", SHORT)
def test_the_model_is_made_ready_to_decode_behind_the_prefill(name, monkeypatch):
    """As in plain decoding, where a mixture of experts has another implementation for each."""
    model, ready, forwards = shared(), [], []

    @contextmanager
    def note():
        ready.append(True)
        yield
        ready.clear()

    monkeypatch.setattr(model, "_optimize_model_for_decode", note, raising=False)
    handle = model.register_forward_pre_hook(lambda module, args: forwards.append(bool(ready)))
    try:
        for generator in (None, make(name, model, generate(model, prompt(9)))):
            forwards.clear()
            generate(model, prompt(9), generator)
            assert forwards[0] is False and all(forwards[1:]) and len(forwards) > 1
    finally:
        handle.remove()
    assert not ready


@pytest.mark.parametrize(("kind", "length"), [("phi3", 9), ("phimoe", 16), ("dynamic", 9), ("dynamic", 25)])
def test_drafts_across_a_length_that_changes_the_positions_are_refused(kind, length):
    pattern = f"more than 16 tokens, and this one of {length} may grow to {length + 9}"
    refused(stretched(kind), pattern, ids=prompt(length), max_new_tokens=9)
    longer = StoppingCriteriaList([MaxLengthCriteria(length + 9)])
    refused(stretched(kind), pattern, ids=prompt(length), max_new_tokens=2, stopping_criteria=longer)


def test_models_that_keep_no_keys_and_values_are_refused():
    config = OpenAIGPTConfig(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    with pytest.raises(ValueError, match="OpenAIGPT.* keeps no keys and values"):
        generate(AutoModelForCausalLM.from_config(config), prompt(9), PLDGen())


def test_encoder_decoders_are_refused():
    refused(AutoModelForSeq2SeqLM.from_config(T5Config(**T5)), "encoder-decoder")


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_trees_are_refused_where_attention_ignores_their_mask(implementation):
    model = tiny()
    model.config._attn_implementation_internal = implementation
    refused(model, implementation)


def test_multimodal_inputs_are_refused():
    class Seeing(type(shared())):
        """A Llama that takes pictures."""

        def forward(self, *args, pixel_values=None, token_type_ids=None, **kwargs):
            return super().forward(*args, **kwargs)

        def prepare_inputs_for_generation(self, *args, pixel_values=None, token_type_ids=None, **kwargs):
            return super().prepare_inputs_for_generation(*args, **kwargs)

    model = Seeing(shared().config).double()
    refused(model, "pixel_values", error=NotImplementedError, pixel_values=torch.ones(1, 3, 4, 4))
    refused(model, "token_type_ids", error=NotImplementedError, token_type_ids=torch.ones(1, 9, dtype=torch.long))
    expected = generate(model, prompt(9), pixel_values=None)
    assert torch.equal(generate(model, prompt(9), PLDGen(), pixel_values=None), expected)


@pytest.mark.parametrize("name", METHODS)
def test_misspelt_options_of_a_method_are_type_errors(name):
    with pytest.raises(TypeError, match="num_draft_tokns"):
        METHODS[name](*([None] if METHODS[name].drafter_argument else []), num_draft_tokns=3)


def test_misspelt_options_of_generate_are_still_refused():
    refused(shared(), "max_new_tokns", max_new_tokns=3)


def test_a_method_without_draft_says_what_is_missing():
    class Empty(SpecGenerator):
        pass

    with pytest.raises(NotImplementedError, match="Empty must implement draft"):
        generate(shared(), prompt(9), Empty())


# state


@pytest.mark.parametrize("name", SHORT)
def test_one_generator_serves_many_prompts(name):
    model = shared()
    texts = [generate(model, prompt(n, seed=n), max_new_tokens=20) for n in (9, 1, 30, 9)]
    generator = make(name, model, texts[0])
    for text, n in zip(texts, (9, 1, 30, 9), strict=True):
        if isinstance(generator, Oracle):
            generator.text = text[0].tolist()
        assert torch.equal(generate(model, prompt(n, seed=n), generator, max_new_tokens=20), text)
        assert generator.stats.emitted == 20


@pytest.mark.parametrize("name", METHODS)
def test_one_generator_serves_one_model_after_another(name):
    first, second = shared(), tiny(seed=5)
    generator = make(name, first)
    for model in (first, second, first):
        assert torch.equal(generate(model, prompt(9), generator), generate(model, prompt(9)))


@pytest.mark.parametrize("name", [*METHODS, "sps-head"])
def test_a_model_that_was_refused_leaves_the_generator_as_it_was(name):
    first, other = shared(), tiny("qwen3", dtype=torch.bfloat16, hidden_size=64, vocab_size=50)
    generator = make(name, first)
    generate(first, prompt(9), generator)
    head = getattr(generator, "head", None)
    weights = {} if head is None else {key: value.clone() for key, value in head.state_dict().items()}
    with suppress(ValueError):
        generator.bind(other)
    assert torch.equal(generate(first, prompt(9), generator), generate(first, prompt(9)))
    assert all(torch.equal(head.state_dict()[key], value) for key, value in weights.items())


@pytest.mark.parametrize("name", [name for name in METHODS if "max_nodes" in signature(METHODS[name]).parameters])
def test_a_tree_of_one_node_drafts_nothing(name):
    model, generator = shared(), make(name, shared())
    drafter = [getattr(generator, own) for own in ("head", "datastore") if hasattr(generator, own)]
    generator = METHODS[name](*drafter, max_nodes=1)
    assert torch.equal(generate(model, prompt(9), generator), generate(model, prompt(9)))
    assert generator.stats.drafted == 0


class Narrow(TorchDispatchMode):
    """Fails where anything is computed in float64, which some accelerators (MPS) have not."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        assert getattr(made, "dtype", None) != torch.float64, operation
        return made


@pytest.mark.parametrize("name", METHODS)
def test_no_method_needs_float64(name):
    model = tiny(dtype=torch.float32)
    generator = make(name, model)
    with Narrow():
        assert torch.equal(generate(model, prompt(9), generator), generate(model, prompt(9)))


class Breaking:
    """A streamer that raises at its n-th token."""

    def __init__(self, error: type[BaseException], place: int):
        self.error, self.left = error, place + 1

    def put(self, value):
        self.left -= 1
        if not self.left:
            raise self.error

    def end(self):
        raise AssertionError("the stream did not end")


@pytest.mark.parametrize(
    ("place", "error", "family", "name"), dealt([1, 6], [KeyboardInterrupt, RuntimeError], ["llama", "sliding"])
)
def test_an_interrupted_stream_leaves_model_and_generator_usable(place, error, family, name):
    model = shared(family)
    expected = generate(model, prompt(9))
    generator = make(name, model, expected)
    before = model.config.to_dict(), model.generation_config.to_dict()
    with pytest.raises(error):
        generate(model, prompt(9), generator, streamer=Breaking(error, place))
    assert (model.config.to_dict(), model.generation_config.to_dict()) == before
    assert torch.equal(generate(model, prompt(9)), expected)
    assert torch.equal(generate(model, prompt(9), generator), expected)


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("do_sample", [False, True])
def test_model_and_configurations_stay_as_they_were(do_sample, name):
    model = tiny()
    config = GenerationConfig(max_new_tokens=20, do_sample=do_sample, eos_token_id=96)
    items = (model.config, model.generation_config, config)
    before = [copy.deepcopy(item.to_dict()) for item in items]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = set(vars(model))
    expected = model.generate(prompt(9), generation_config=config)
    model.generate(prompt(9), generation_config=config, candidate_generator=make(name, model, expected))
    assert [item.to_dict() for item in items] == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert set(vars(model)) == attributes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_prompt_is_left_as_it_was():
    model, ids = shared(), prompt(9)
    made = generate(model, ids, make("oracle-tree", model, generate(model, ids)))
    made.zero_()
    assert torch.equal(ids, prompt(9))


# features


class Feeling(Oracle):
    """An oracle that asks for hidden states."""

    def __init__(self, *args, layers, **kwargs):
        super().__init__(*args, **kwargs)
        self.hidden_layers = layers


@pytest.mark.parametrize(("decoys", "returned"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("layers", [(1,), (3, 0, -2)])
@pytest.mark.parametrize("family", CONFIGS)
def test_observed_features_are_those_of_a_fresh_forward(family, layers, decoys, returned):
    model = shared(family)
    text = generate(model, prompt(9), max_new_tokens=16)
    generator = Feeling(text[0].tolist(), 3, decoys=decoys, layers=layers)
    options = dict(return_dict_in_generate=True, output_hidden_states=True) if returned else {}
    generate(model, prompt(9), generator, max_new_tokens=16, **options)
    with torch.no_grad():
        states = model(text, output_hidden_states=True).hidden_states
        logits = model(text).logits[0]
    row, atol = 0, 1e-9 if model.config._attn_implementation == "sdpa" else 1e-4
    for step in generator.steps:
        nodes = step.path if row else range(9)  # the prefill brings all prompt positions
        assert len(step.hidden) == len(layers)
        for layer, features in zip(layers, step.hidden, strict=True):
            assert torch.allclose(features[list(nodes)], states[layer][0, row : row + len(nodes)], atol=atol)
        row += len(nodes)
        assert torch.allclose(step.logits[step.path[-1]], logits[row - 1], atol=atol)
        assert step.tokens == text[0, row + 1 - len(step.path) : row + 1].tolist()


def test_features_are_not_delivered_where_nobody_asked():
    model = shared()
    generator = make("oracle-all", model, generate(model, prompt(9)))
    generate(model, prompt(9), generator)
    assert all(step.hidden is None for step in generator.steps)


def test_chain_targets_are_the_families_with_a_window():
    assert {family for family in CONFIGS if getattr(shared(family).config, "sliding_window", None)} == set(
        CHAIN_TARGETS
    )
    assert SHAPE["vocab_size"] == 97


def test_uninstall_does_not_take_somebody_elses_wrapper_off():
    ours = GenerationMixin.generate

    @functools.wraps(ours)
    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    GenerationMixin.generate = theirs
    try:
        with pytest.raises(RuntimeError, match="wrapped generate"):
            hf_specdec.uninstall()
        assert GenerationMixin.generate is theirs
    finally:
        GenerationMixin.generate = ours


@pytest.mark.parametrize("name", METHODS)
def test_no_method_keeps_the_targets_cache_after_a_call(name):
    model, ids = shared(), prompt(9)
    generator = make(name, model)
    generate(model, ids, generator)
    gc.collect()
    kept = [item for item in gc.get_objects() if type(item) is TreeCache and item.length > 1]
    assert not kept

"""Live: one method after the other on one prompt, followed while it writes, as plain dicts for a page to show."""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import torch
from huggingface_hub import HfApi
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specdec.columns import Pieces, judge, new_column, read_drafts
from hf_specdec.compare import PLAIN, conditions, encode, synchronize
from hf_specdec.generator import SpecGenerator, make_generator
from hf_specdec.methods.sps import SpSGen
from hf_specdec.models import EMBEDDED, HUB_TIMEOUT, SHIPPED, load_model

ZERO_GPU = bool(os.environ.get("SPACES_ZERO_GPU"))  # a Space whose GPU is lent to one call at a time
MODELS = os.environ.get("HF_SPECDEC_MODELS", f"{EMBEDDED},HuggingFaceTB/SmolLM2-360M-Instruct").split(",")
MAX_PARAMETERS = float(os.environ.get("HF_SPECDEC_MAX_PARAMETERS", 8e9))  # of what is given by its Hub id
BYTES = 2  # of a parameter
UPDATE_SECONDS = 0.15
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
PARTS = re.compile(r"\w+(\+\w+)+")  # of a hybrid
OPTIONS = re.compile(r"(\w+=([a-z]+|\d{1,3}(\.\d{1,4})?)(&(?!$)|$))*")

running = tempfile.TemporaryDirectory(prefix="hf_specdec-runs-")
"""A run goes on while its file is in this folder: files can be seen from a ZeroGPU process, and name no session."""
one_at_a_time = threading.Lock()


class Tokens(BaseStreamer):
    """Collects the new tokens, and for each whether it was drafted."""

    def __init__(self, generator: SpecGenerator | None):
        self.generator, self.is_prompt = generator, True
        self.tokens: list[tuple[int, bool]] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.is_prompt:
            drafted = self.generator is not None and self.generator.stats.from_draft[-1]
            self.tokens += [(token, drafted) for token in value.flatten().tolist()]
        self.is_prompt = False

    def end(self) -> None:
        pass


class Stop(StoppingCriteria):
    """Ends a generation whose run's file is gone."""

    def __init__(self, run: str):
        self.run = run

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), not goes_on(self.run), device=input_ids.device)


def goes_on(run: str) -> bool:
    return os.path.exists(os.path.join(running.name, run))


def start_run() -> str:
    run = uuid.uuid4().hex
    Path(running.name, run).touch()
    return run


def stop_run(run: str | None) -> None:
    if run:
        Path(running.name, run).unlink(missing_ok=True)


def check_size(repo_id: str, repo_type: str = "model") -> None:
    """Raises ValueError for what is no Hub id, or for a repository larger than a visitor may load."""
    if not HUB_ID.fullmatch(repo_id):
        raise ValueError(f"{repo_id!r} is no Hub id: write owner/name, or choose from the list.")
    try:
        about = HfApi().repo_info(repo_id, repo_type=repo_type, timeout=HUB_TIMEOUT, files_metadata=True)
    except Exception:  # what loads it says better than this what is wrong
        return
    size = sum(file.size or 0 for file in about.siblings)
    if weights := getattr(about, "safetensors", None):  # a repository may hold more than is loaded
        size = BYTES * weights.total
    if size > BYTES * MAX_PARAMETERS:
        limit = f"{MAX_PARAMETERS:.2g} parameters, or {BYTES * MAX_PARAMETERS / 1e9:.3g} GB"
        raise ValueError(f"{repo_id} is as large as {size / BYTES:.2g} parameters; this page takes up to {limit}.")


@lru_cache(maxsize=2)
def load(name: str, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer; on ZeroGPU on the CPU, from where the lent GPU takes a copy."""
    if name not in MODELS:
        check_size(name)
    if not ZERO_GPU:
        return load_model(name, dtype)
    return load_model(name, "bfloat16" if dtype == "auto" else dtype, device="cpu")


def make(spec: str, dtype: str) -> SpecGenerator | None:
    """The generator of a column; ValueError or OSError for one that cannot be made."""
    if spec == PLAIN:
        return None
    head, _, options = spec.partition("?")
    name, _, drafter = head.partition(":")
    if not OPTIONS.fullmatch(options):
        raise ValueError(f"options {options!r}: write name=value&name=value, with numbers below 1000 or words.")
    if drafter and drafter not in MODELS and SHIPPED.get(drafter) != name and not PARTS.fullmatch(drafter):
        check_size(drafter, "dataset" if name == "rest" else "model")
    generator = make_generator(spec)
    if isinstance(generator, SpSGen) and drafter in MODELS:
        generator.drafter = load(drafter, dtype)[0]
        if ZERO_GPU:
            generator.drafter = generator.drafter.to("cuda")
    return generator


def settings_of(model: str | None, dtype: str, max_new_tokens: float, temperature: float, seed: float | None) -> dict:
    """The settings of a run, from fields that may be empty."""
    return {
        "model": (model or "").strip(),
        "dtype": dtype,
        "max_new_tokens": int(max_new_tokens),
        "temperature": float(temperature),
        "seed": int(seed or 0),
    }


def read_chat(tokenizer: PreTrainedTokenizerBase, messages: list[dict], *, device: torch.device | str) -> torch.Tensor:
    """Token ids `(1, t)` of a conversation that awaits its next answer."""
    if not tokenizer.chat_template:
        return encode(tokenizer, "\n\n".join(message["content"] for message in messages), device=device)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.to(device)


def decode(column: dict, model, tokenizer, input_ids, *, run: str, settings: dict) -> Iterator[None]:
    """Fills a column while its method writes; yields whenever there is something to show."""
    streamer, outcome, drafts = Tokens(None), {}, []
    sampling = {"do_sample": True, "temperature": settings["temperature"]} if settings["temperature"] else {}

    def work() -> None:
        try:
            generator = make(column["method"], settings["dtype"])
            with one_at_a_time:
                call = {"candidate_generator": generator, **(sampling or {"do_sample": False})}
                model.generate(input_ids[:, -8:], max_new_tokens=4, **call)  # warms up, and binds the drafter
                streamer.generator = generator
                if generator is not None:
                    generator.stats.synchronize = True  # each stage its own time, also on a GPU
                    record_drafts(generator, drafts)
                torch.manual_seed(settings["seed"])
                synchronize(model.device)
                outcome["start"] = time.perf_counter()
                model.generate(
                    input_ids,
                    max_new_tokens=settings["max_new_tokens"],
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([Stop(run)]),
                    **call,
                )
                synchronize(model.device)
                outcome["seconds"] = time.perf_counter() - outcome["start"]
            outcome["generator"] = generator
        except Exception as error:  # shown in the column; the others go on
            outcome["error"] = str(error) or type(error).__name__

    column["state"] = "preparing"
    pieces, thread = Pieces(tokenizer), threading.Thread(target=work, daemon=True)
    thread.start()
    while True:
        thread.join(UPDATE_SECONDS)
        ended = not thread.is_alive()
        for token, drafted in streamer.tokens[len(column["ids"]) :]:
            column["ids"].append(token)
            column["pieces"].append([pieces.add(token), drafted])
        if column["ids"]:
            column["tokens"], column["state"] = len(column["ids"]), "writing"
            seconds = outcome.get("seconds") or time.perf_counter() - outcome["start"]
            column["tokens_per_second"] = column["tokens"] / seconds
        if ended:
            break
        yield
    column["state"] = "failed" if "error" in outcome else "done" if goes_on(run) else "stopped"
    column["message"] = outcome.get("error", "")
    generator = outcome.get("generator")
    if generator is not None:
        stats = generator.stats
        column.update(tokens_per_step=stats.tokens_per_step, seconds=stats.seconds, notes=stats.notes)
        column.update(
            accepted_lengths=stats.accepted_lengths, steps=list(read_drafts(drafts, column["ids"], tokenizer))
        )
        column["promises"] = generator.lossless and (generator.seed_exact or not sampling)


def record_drafts(generator: SpecGenerator, drafts: list) -> None:
    """Notes each tree that the generator drafts, and how many tokens were written before it."""
    draft = generator.draft

    def recorded(input_ids, *, max_depth):
        tree = draft(input_ids, max_depth=max_depth)
        drafts.append((generator.stats.emitted, tree))
        return tree

    generator.draft = recorded


def decode_all(run: str, messages: list[dict], specs: list[str], settings: dict) -> Iterator[dict]:
    """Yields the state of all columns while one after the other writes; what it takes and yields can be pickled."""
    model, tokenizer = load(settings["model"], settings["dtype"])
    if ZERO_GPU:
        model = model.to("cuda")
    input_ids = read_chat(tokenizer, messages, device=model.device)
    columns = [new_column(spec) for spec in specs]
    chosen = {name: value for name, value in settings.items() if name not in ("model", "dtype")}
    about = {name: value for name, value in conditions(model, **chosen).items() if value is not None}
    for column in columns:
        if not goes_on(run):
            column["state"] = "stopped"
            continue
        for _ in decode(column, model, tokenizer, input_ids, run=run, settings=settings):
            yield {"columns": columns, "conditions": about, "done": False}
        judge(column, columns[0], model, input_ids)
    yield {"columns": columns, "conditions": about, "done": True}


def run_methods(
    prompt: str,
    specs: list[str],
    settings: dict,
    *,
    history: list[dict] | None = None,
    run: str | None = None,
    decode_all: Callable[..., Iterator[dict]] = decode_all,
) -> Iterator[dict]:
    """Yields `{"status": ...}`, then either `{"error": ...}` or the columns again and again.

    Args:
        specs (`list[str]`): "plain" first, then methods as `make_generator` reads them.
        settings (`dict`): as `settings_of` returns them.
        history (`list[dict]`, *optional*): the conversation before the prompt.
        run (`str`, *optional*): what `start_run` returned; `stop_run` ends it within a step.
        decode_all (`Callable`): `decode_all`, or what runs it on a GPU lent for the call.
    """
    run = run or start_run()
    try:
        if not prompt.strip():
            yield {"error": "The prompt is empty: write something, or choose an example."}
            return
        yield {"status": f"Loading {settings['model']} …"}
        model, tokenizer = load(settings["model"], settings["dtype"])
        messages = [*(history or []), {"role": "user", "content": prompt}]
        length = read_chat(tokenizer, messages, device="cpu").shape[1]
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit and length + settings["max_new_tokens"] > limit:
            new = settings["max_new_tokens"]
            message = (
                f"{length} tokens of text and {new} new ones are more than the {limit} that {settings['model']} reads"
            )
            yield {"error": f"{message}: shorten the prompt, start a new conversation, or ask for fewer new tokens."}
            return
        yield from decode_all(run, messages, specs, settings)
    except Exception as error:
        yield {"error": str(error) or type(error).__name__}
    finally:  # also when the tab was closed, which closes this generator
        stop_run(run)

"""Compare: plain decoding and each method on the same prompts, in turn, in one process."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.generator import SpecGenerator
from hf_specdec.prompts import Prompt
from hf_specdec.stats import STAGES, SpecStats

PLAIN = "plain"


@dataclass
class Difference:
    """Where two texts part: the new token's index, and how near to a tie the target was there, in logits.

    The margin is None where one text is the other's beginning, which no near tie explains.
    """

    index: int
    margin: float | None

    def to_dict(self) -> dict[str, Any]:
        return {"token": self.index, "margin": self.margin}


def tie(margin: float | None) -> str:
    """A difference's margin in words."""
    return "one is the other's beginning" if margin is None else f"margin {margin:.3g}"


@dataclass
class Run:
    """One answer: who wrote it, to what, and in what time.

    Args:
        method (`str`): the method as the caller names it, or "plain".
        kind (`str`): the prompt's kind.
        prompt (`int`): the prompt's number.
        repeat (`int`): the round.
        tokens (`list[int]`): new tokens.
        seconds (`float`): wall time of `generate`, prefill included.
        stats (`SpecStats`, *optional*): None for plain decoding.
        difference (`Difference`, *optional*): from plain decoding's answer of the same round; None where identical.
    """

    method: str
    kind: str
    prompt: int
    repeat: int
    tokens: list[int]
    seconds: float
    stats: SpecStats | None = None
    difference: Difference | None = None

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, device: torch.device) -> torch.Tensor:
    """Token ids `(1, t)` of a user message, in the tokenizer's chat template where it has one."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.to(device)
    return tokenizer(text, return_tensors="pt").input_ids.to(device)


def race(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    generators: dict[str, SpecGenerator],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    repeats: int = 1,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[Run]:
    """Yields one run for each prompt, round and method; plain decoding among them, methods taking turns to go first.

    Args:
        generators (`dict[str, SpecGenerator]`): by the name to report.
        temperature (`float`): 0 decodes greedily.
        seed (`int`): of every single run, so that sampling gives the same text with and without drafts.
    """
    sampling = {"do_sample": temperature > 0} | ({"temperature": temperature} if temperature > 0 else {})
    contestants: dict[str, SpecGenerator | None] = {PLAIN: None, **generators}
    order = list(contestants)
    warm_up = encode(tokenizer, prompts[0].text, device=model.device)
    for generator in contestants.values():
        model.generate(warm_up, candidate_generator=generator, max_new_tokens=8, **sampling)
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            input_ids = encode(tokenizer, prompt.text, device=model.device)
            turn = (repeat + number) % len(order)
            runs = {}
            for name in order[turn:] + order[:turn]:
                torch.manual_seed(seed)
                synchronize(model.device)
                start = time.perf_counter()
                output = model.generate(
                    input_ids, candidate_generator=contestants[name], max_new_tokens=max_new_tokens, **sampling
                )
                synchronize(model.device)
                seconds = time.perf_counter() - start
                tokens = output[0, input_ids.shape[1] :].tolist()
                stats = None if contestants[name] is None else contestants[name].stats
                runs[name] = Run(name, prompt.kind, number, repeat, tokens, seconds, stats)
            for name in order:
                runs[name].difference = first_difference(model, input_ids, runs[PLAIN].tokens, runs[name].tokens)
                yield runs[name]


def synchronize(device: torch.device) -> None:
    """Waits for what the device was told to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@torch.no_grad()
def first_difference(
    model: PreTrainedModel, input_ids: torch.Tensor, plain: list[int], other: list[int]
) -> Difference | None:
    """Where `other` leaves `plain`, with the target's own margin between the two tokens there; None if it does not."""
    if plain == other:
        return None
    shared = [a == b for a, b in zip(plain, other, strict=False)]
    index = shared.index(False) if False in shared else len(shared)
    if index == len(shared):
        return Difference(index, None)
    prefix = torch.cat([input_ids, input_ids.new_tensor([plain[:index]])], dim=-1)
    logits = model(prefix).logits[0, -1].float()  # [v]
    return Difference(index, abs(float(logits[plain[index]] - logits[other[index]])))


def summarize(runs: Sequence[Run], *, by: Callable[[Run], bool] = lambda run: True) -> list[dict]:
    """One row per method: speed, acceptance, time per stage and identity, over the runs that `by` selects.

    The speed-up is the median over prompts and rounds of the ratio to plain decoding in the same round.
    """
    runs = [run for run in runs if by(run)]
    plain = {(run.prompt, run.repeat): run for run in runs if run.method == PLAIN}
    rows = []
    for method in dict.fromkeys(run.method for run in runs):
        own = [run for run in runs if run.method == method]
        ratios = [run.tokens_per_second / plain[run.prompt, run.repeat].tokens_per_second for run in own]
        row = {
            "method": method,
            "tokens_per_second": median(run.tokens_per_second for run in own),
            "speedup": median(ratios),
            "identical": sum(run.difference is None for run in own),
            "answers": len(own),
            "differences": [
                {"kind": run.kind, "prompt": run.prompt, "repeat": run.repeat} | run.difference.to_dict()
                for run in own
                if run.difference is not None
            ],
        }
        if method != PLAIN:
            stats = [run.stats for run in own]
            steps = sum(item.steps for item in stats) or 1
            parts = sorted({part for item in stats for part in item.draft_parts})
            row |= {
                "tokens_per_step": sum(item.emitted - 1 for item in stats) / steps,
                "accepted_per_step": sum(item.accepted for item in stats) / steps,
                "drafted_per_step": sum(item.drafted for item in stats) / steps,
                "seconds": {stage: sum(item.seconds[stage] for item in stats) / len(own) for stage in STAGES},
                "draft_parts": {
                    part: sum(item.draft_parts.get(part, 0.0) for item in stats) / len(own) for part in parts
                },
                "notes": sorted({note for item in stats for note in item.notes}),
            }
        rows.append(row)
    return rows


def conditions(model: PreTrainedModel, **settings) -> dict:
    """What a figure needs beside it: model, dtype, hardware, threads, versions, commit, and `settings`."""
    device = model.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    packages = ("torch", "transformers", "hf-specdec")
    return {
        "model": model.name_or_path,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "device": device.type,
        "hardware": hardware,
        "threads": torch.get_num_threads(),
        "batch": 1,
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "commit": commit(),
        **settings,
    }


def cpu_name() -> str:
    """The processor's name and number of cores."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        name = names[0] if names else name
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str | None:
    """The commit this package runs from, with a mark if files were changed; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

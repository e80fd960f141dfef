"""GPU: what the study's methods cost on a large GPU, without any download: real shapes, random weights, replayed acceptance.

`python -m eval.gpu --output gpu.json [--traces DIR]` takes under 8 minutes on an H200; `--tiny` runs anywhere, for the tests.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer

try:
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

    from eval.answers import read_folder
    from hf_specdec.bench import random_ids, random_target, verify_curve
    from hf_specdec.compare import PLAIN, conditions, synchronize
    from hf_specdec.datastore import Datastore
    from hf_specdec.generator import METHODS, SpecGenerator, make_generator
    from hf_specdec.tree import DraftTree
except ImportError as error:
    raise SystemExit(
        f"{error}. A GPU machine often has an older transformers and no network. Elsewhere, with the same Python:\n"
        "  pip download --dest wheels --only-binary :all: 'transformers>=5.24' accelerate gguf typer evaluate setuptools\n"
        "then bring the folder and, there:\n"
        "  pip install --no-index --find-links wheels 'transformers>=5.24' accelerate gguf typer setuptools\n"
        "  pip install --no-deps --no-index --no-build-isolation -e ."
    ) from error


@dataclass(frozen=True)
class Shape:
    """What a model's cost depends on."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    tie_word_embeddings: bool = True
    qwen: bool = False


TARGETS = {  # the study's targets, and the drafters of their families
    "Qwen2.5-1.5B": (Shape(1536, 8960, 28, 12, 2, 151936, qwen=True), Shape(896, 4864, 24, 14, 2, 151936, qwen=True)),
    "SmolLM2-1.7B": (Shape(2048, 8192, 24, 32, 32, 49152), Shape(576, 1536, 30, 9, 3, 49152)),
    "Llama-3.2-1B": (Shape(2048, 8192, 16, 32, 8, 128256), None),
    "Vicuna-7B": (Shape(4096, 11008, 32, 32, 32, 32000, False), Shape(768, 3072, 2, 12, 12, 32000, False)),
}
TINY = {"tiny": (Shape(32, 64, 4, 4, 2, 97), Shape(16, 32, 1, 2, 2, 97))}
HEADS = {  # options of heads at their authors' sizes; any other method with a head runs at its own defaults
    "eagle": ("top_k=10&depth=5&max_nodes=60&min_probability=0", "top_k=1&depth=5&max_nodes=6&min_probability=0"),
}
CONTEXT = 512
ACCEPTANCE = (0.5, 0.6, 0.7, 0.8, 0.9)
TOKENS = 48  # per measurement of a method


def random_model(shape: Shape, *, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model of this shape that knows nothing."""
    sizes = asdict(shape)
    family = Qwen2Config if sizes.pop("qwen") else LlamaConfig
    config = family(**sizes, max_position_embeddings=4096, bos_token_id=1, eos_token_id=None, pad_token_id=None)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


@torch.no_grad()
def graph_curve(model: PreTrainedModel, blocks: list[int], *, rounds: int = 20) -> dict[int, float]:
    """Milliseconds of the same forwards as the verify curve's, each captured as one CUDA graph: without launches."""
    times = {}
    for n in blocks:
        target = random_target(model, CONTEXT, max_new_tokens=max(blocks))
        target.prefill()
        target.keep([0])
        tree = DraftTree.chain(random_ids(model, n)[0].tolist(), device=model.device)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                target.verify(tree)
                target.keep([])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            target.verify(tree)
        target.keep([])
        times[n] = timed(graph.replay, model.device, rounds=rounds)
    return times


def timed(call: Callable[[], object], device: torch.device, *, rounds: int) -> float:
    """Median milliseconds of a call, the device's work included."""
    laps = []
    for _ in range(rounds + 2):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        laps.append((time.perf_counter() - start) * 1e3)
    return median(laps[2:])


def makers(model: PreTrainedModel, drafter: PreTrainedModel | None) -> dict[str, Callable[[], SpecGenerator]]:
    """How to make every method here: heads and datastores of random contents, at the target's shape."""
    found: dict[str, Callable[[], SpecGenerator]] = {}
    for name, method in METHODS.items():
        if name == "sps":
            if drafter is not None:
                found["sps?num_draft_tokens=2"] = partial(method, drafter, num_draft_tokens=2)
        elif name == "rest":
            found[name] = partial(random_rest, model)
        elif method.head_class is not None:
            for options in HEADS.get(name, ("",)):
                found[f"{name}?{options}".rstrip("?")] = partial(random_head, model, method, options)
        elif method.drafter_optional or not method.drafter_argument:
            found[name] = partial(make_generator, name)
    return found


def random_head(model: PreTrainedModel, method: type[SpecGenerator], options: str) -> SpecGenerator:
    """A method with an untrained head; `options` as in a spec."""
    head = method.head_class.for_target(model).to(device=model.device, dtype=model.dtype)
    pairs = (option.split("=") for option in options.split("&") if option)
    return method(head, **{key: json.loads(value) for key, value in pairs})


def random_rest(model: PreTrainedModel) -> SpecGenerator:
    """REST over a thousand random texts."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    texts = torch.randint(vocab_size // 2, (1000, CONTEXT)).tolist()
    folder = tempfile.mkdtemp(prefix="hf_specdec-eval-")
    return METHODS["rest"](Datastore.build(texts, folder, vocab_size=vocab_size, tokenizer_hash="random"))


def measure(model: PreTrainedModel, generator: SpecGenerator) -> dict:
    """Milliseconds of each stage per step and the peak of memory, while the method drafts behind a text that repeats."""
    generator.stats.synchronize = True
    ids = random_ids(model, CONTEXT // 4).repeat(1, 4)
    for _ in range(2):  # the first round warms up
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(model.device)
        options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
        model.generate(ids, candidate_generator=generator, **options)
    stats = generator.stats
    row = {f"{stage}_ms": 1e3 * seconds / max(1, stats.steps) for stage, seconds in stats.seconds.items()}
    row["prefill_ms"] = 1e3 * stats.seconds["prefill"]
    row |= {"drafted_per_step": stats.drafted / max(1, stats.steps)}
    row["depth_per_step"] = sum(stats.draft_depths) / max(1, stats.steps)
    if model.device.type == "cuda":
        row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(model.device)
    return row


def speedup(row: dict, curve: dict[int, float], accepted: np.ndarray, drafted: np.ndarray) -> float:
    """Speed-up of decoding when steps accept and draft these lengths, and cost what was measured here."""
    verify = np.interp(drafted + 1, list(curve), list(curve.values()))  # [steps]
    outside = row["draft_ms"] + row["accept_ms"] + row["compact_ms"] + row["other_ms"]
    return float((accepted + 1).sum() * curve[1] / (verify + outside).sum())


def at_acceptance(row: dict, curve: dict[int, float]) -> dict[str, float]:
    """Speed-up where each drafted level is accepted at a given rate, given that the one above it was."""
    depth, drafted = row["depth_per_step"], np.array([row["drafted_per_step"]])
    expected = {rate: sum(rate**level for level in range(1, round(depth) + 1)) for rate in ACCEPTANCE}
    return {str(rate): speedup(row, curve, np.array([accepted]), drafted) for rate, accepted in expected.items()}


def read_traces(folders: list[Path]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Accepted and drafted lengths of all steps of each method, from outputs of `python -m eval run`."""
    lengths: dict[str, tuple[list[int], list[int]]] = {}
    for folder in folders:
        _, rows, _ = read_folder(folder)
        for row in rows:
            if row["method"] != PLAIN and not row["failed"]:
                accepted, drafted = lengths.setdefault(row["method"].partition(":")[0].partition("?")[0], ([], []))
                for turn in row["turns"]:
                    accepted += turn["stats"]["accepted_lengths"]
                    drafted += turn["stats"]["drafted_lengths"]
    return {name: (np.array(accepted), np.array(drafted)) for name, (accepted, drafted) in lengths.items()}


def measure_target(
    shapes: tuple[Shape, Shape | None], *, device: str, dtype: torch.dtype, traces: dict, say: Callable[[str], None]
) -> dict:
    """The report on one target."""
    model = random_model(shapes[0], device=device, dtype=dtype)
    drafter = None if shapes[1] is None else random_model(shapes[1], device=device, dtype=dtype)
    result = {"parameters": model.num_parameters(), "curves": {"eager": None, "graph": None}, "methods": {}}
    say("verify curve")
    curves = result["curves"]
    curves["eager"] = verify_curve(model, CONTEXT, on_progress=lambda *_: None)
    if model.device.type == "cuda":
        curves["graph"] = graph_curve(model, list(curves["eager"]))
    for name, make in makers(model, drafter).items():
        say(name)
        try:
            row = measure(model, make())
        except Exception as error:  # one method's trouble leaves the others measured
            result["methods"][name] = {"failed": f"{type(error).__name__}: {error}"}
            continue
        replayed = traces.get(name.partition("?")[0])
        for mode, curve in curves.items():
            if curve:
                row[f"speedup_at_acceptance_{mode}"] = at_acceptance(row, curve)
                row[f"speedup_replayed_{mode}"] = speedup(row, curve, *replayed) if replayed else None
        result["methods"][name] = row
    return result | {"conditions": conditions(model, context=CONTEXT, weights="random")}


def main(
    output: Annotated[Path, typer.Option("--output", help="The JSON file to write.")],
    traces: Annotated[list[Path] | None, typer.Option("--traces", help="Outputs of `python -m eval run`.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny target, on any device.")] = False,
    only: Annotated[str | None, typer.Option("--only", help="One of the targets.")] = None,
) -> None:
    """Measure block costs, draft costs and memory at the study's shapes, and the speed-up at given acceptances."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        raise typer.BadParameter("no GPU here; --tiny runs the same on a CPU.", param_hint="--tiny")
    targets = TINY if tiny else TARGETS
    recorded = read_traces(traces or [])
    note = "graph: the target's forward as one CUDA graph, in plain decoding as well; drafts stay eager in both"
    report: dict = {"note": note, "targets": {}}
    output.parent.mkdir(parents=True, exist_ok=True)
    for name in [only] if only else targets:
        result = measure_target(
            targets[name],
            device=device,
            dtype=torch.bfloat16 if device == "cuda" else torch.float32,
            traces=recorded,
            say=lambda what, name=name: typer.echo(f"{name}: {what}", err=True),
        )
        result["conditions"]["model"] = f"{name}, random weights"
        report["targets"][name] = result
        output.write_text(json.dumps(report, indent=1))  # what is measured is kept, whatever comes after
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)

"""GPU: what the study's methods cost on a large GPU, without any download: real shapes, random weights, replayed acceptance.

`python -m eval.gpu --output gpu.json` takes 8 minutes at most (`--minutes`); `--tiny` runs anywhere, for the tests.
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

WHEELS = """A GPU machine often has torch, an older transformers and no network. Elsewhere, with the same Python:
  pip download --dest wheels --only-binary :all: 'transformers>=5.24' typer rich jinja2 psutil pydivsufsort 'setuptools>=77'
  pip download --dest wheels --only-binary :all: --no-deps accelerate
then bring the folder and this checkout, and there:
  pip install --no-index --find-links wheels 'transformers>=5.24' typer rich jinja2 psutil pydivsufsort 'setuptools>=77'
  pip install --no-index --find-links wheels --no-deps accelerate
  pip install --no-index --no-deps --no-build-isolation -e ."""

try:
    import numpy as np
    import torch
    import typer
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

    from eval.traces import TRACES, read_traces
    from hf_specdec.bench import NoDraft, random_ids, random_target, verify_curve
    from hf_specdec.compare import conditions, synchronize
    from hf_specdec.datastore import Datastore
    from hf_specdec.generator import METHODS, SpecGenerator, make_generator
    from hf_specdec.tree import DraftTree
except ImportError as error:
    raise SystemExit(f"{error}. {WHEELS}") from error


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
    "Llama-3.2-1B": (Shape(2048, 8192, 16, 32, 8, 128256), None),
    "SmolLM2-1.7B": (Shape(2048, 8192, 24, 32, 32, 49152), Shape(576, 1536, 30, 9, 3, 49152)),
    "Qwen2.5-1.5B": (Shape(1536, 8960, 28, 12, 2, 151936, qwen=True), Shape(896, 4864, 24, 14, 2, 151936, qwen=True)),
    "Vicuna-7B": (Shape(4096, 11008, 32, 32, 32, 32000, False), Shape(768, 3072, 2, 12, 12, 32000, False)),
}
TINY = {"tiny": (Shape(32, 64, 4, 4, 2, 97), Shape(16, 32, 1, 2, 2, 97))}
VARIANTS = {  # named like the methods of the traces, what is behind ":" by its folder's name; any other runs as it is
    "eagle": ("eagle", "eagle?top_k=1", "eagle?top_k=10&depth=5&max_nodes=60", "eagle:eagle3", "eagle:eagle3?top_k=1"),
    "kangaroo": ("kangaroo:kangaroo?width=1", "kangaroo:kangaroo?width=3"),
    "layerskip": ("layerskip?num_draft_tokens=2",),
    "lookahead": ("lookahead", "lookahead?window=7&ngram=5&guesses=7"),
    "medusa": ("medusa:medusa", "medusa:medusa?top_k=1"),
    "sps": ("sps:family?num_draft_tokens=2", "sps:sps"),
}
HEADS = {"eagle3": {"fused": True}, "medusa": {"output": "own"}}  # as their authors' heads are; others as ours
EAGLE3_VOCABULARY = 32000
# random heads are never sure: they draft their whole trees, and real ones, which stop earlier, cost no more than that
WHOLE = {
    "eagle": {"min_probability": 0, "min_level_probability": 0},
    "kangaroo": {"threshold": 0, "min_probability": 0},
    "medusa": {"min_probability": 0},
    "sps:sps": {"num_draft_tokens": 4},
}
PER_TOKEN = ("sps", "layerskip")  # whose draft costs by the token; of the others by the tree
CONTEXT = 512
ACCEPTANCE = (0.5, 0.6, 0.7, 0.8, 0.9)
TOKENS = 32  # per measurement of a method
COMPILING = 120  # seconds to leave for the compilation of a target


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
        stream.wait_stream(torch.cuda.current_stream())
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


def curves(model: PreTrainedModel, name: str) -> dict[str, dict]:
    """The verify curve as it is, under `name`, and on a GPU as CUDA graphs as well; or why one could not be measured."""
    ways = {name: lambda: verify_curve(model, CONTEXT, rounds=8, on_progress=lambda *_: None)}
    if model.device.type == "cuda":
        ways[f"{name}, graph"] = lambda: graph_curve(model, list(found[name]))
    found: dict[str, dict] = {}
    for way, measured in ways.items():
        try:
            found[way] = measured()
        except Exception as error:  # capture and compilation break in many ways, and the rest stays measured
            found[way] = {"failed": f"{type(error).__name__}: {error}"}
    return found


def makers(model: PreTrainedModel, drafter: PreTrainedModel | None) -> dict[str, Callable[[], SpecGenerator]]:
    """How to make every method here: heads, drafters and datastores of random contents, at the target's shape."""
    found: dict[str, Callable[[], SpecGenerator]] = {}
    for name, method in METHODS.items():
        for spec in VARIANTS.get(name, (name,)):
            if spec.startswith("sps:family"):
                if drafter is not None:
                    found[spec] = partial(method, drafter, **options_of(spec))
            elif name == "rest":
                found[spec] = partial(random_rest, model)
            elif method.head_class is not None:
                found[spec] = partial(random_head, model, method, spec)
            elif method.drafter_optional or not method.drafter_argument:
                found[spec] = partial(make_generator, spec)
    return found


def options_of(spec: str) -> dict:
    """The options in a spec, and those that let a random head draft in full."""
    head, _, tail = spec.partition("?")
    pairs = (option.split("=") for option in tail.split("&") if option)
    return WHOLE.get(head.partition(":")[0], WHOLE.get(head, {})) | {key: json.loads(value) for key, value in pairs}


def random_head(model: PreTrainedModel, method: type[SpecGenerator], spec: str) -> SpecGenerator:
    """A method with an untrained head."""
    kind = spec.partition("?")[0].partition(":")[2]
    fields = dict(HEADS.get(kind, {}))
    if kind == "eagle3":
        fields["draft_ids"] = torch.arange(min(EAGLE3_VOCABULARY, model.config.vocab_size))
    head = method.head_class.for_target(model, **fields).to(device=model.device, dtype=model.dtype)
    return method(head, **options_of(spec))


def random_rest(model: PreTrainedModel) -> SpecGenerator:
    """REST over a thousand random texts and one that the target is about to write, so that drafts are found."""
    vocab_size = model.config.vocab_size
    texts = torch.randint(vocab_size // 2, (1000, CONTEXT)).tolist()
    texts += model.generate(repeated(model), **limits(2 * TOKENS)).tolist()
    folder = tempfile.mkdtemp(prefix="hf_specdec-eval-")
    return METHODS["rest"](Datastore.build(texts, folder, vocab_size=vocab_size, tokenizer_hash="random"))


def repeated(model: PreTrainedModel) -> torch.Tensor:
    """A prompt that repeats itself, always the same one."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size // 2, (1, CONTEXT // 4), generator=generator)
    return ids.repeat(1, 4).to(model.device)


def limits(tokens: int) -> dict:
    return {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}


def measure(model: PreTrainedModel, generator: SpecGenerator) -> dict:
    """Milliseconds of each stage per step and the peak of memory, while the method drafts behind a text that repeats."""
    generator.stats.synchronize = True
    ids = repeated(model)
    for _ in range(2):  # the first round warms up
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(model.device)
        model.generate(ids, candidate_generator=generator, **limits(TOKENS))
    stats = generator.stats
    steps = max(1, stats.steps)
    row = {f"{stage}_ms": 1e3 * seconds / steps for stage, seconds in stats.seconds.items()}
    row["prefill_ms"] = 1e3 * stats.seconds["prefill"]
    row |= {f"draft/{part}_ms": 1e3 * seconds / steps for part, seconds in stats.draft_parts.items()}
    row |= {"drafted_per_step": stats.drafted / steps, "depth_per_step": sum(stats.draft_depths) / steps}
    row["levels"] = levels(generator) or row["depth_per_step"]
    if model.device.type == "cuda":
        row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(model.device)
    return row


def levels(generator: SpecGenerator) -> int | None:
    """Levels that a head drafts; of a random one's tree, all nodes are near the root."""
    return next(
        (own.depth for own in (generator, getattr(generator, "candidates", None)) if hasattr(own, "depth")), None
    )


def outside(row: dict) -> float:
    """Milliseconds of a step outside drafting and the target's forward."""
    return row["accept_ms"] + row["compact_ms"] + row["other_ms"]


def speedup(name: str, row: dict, curve: dict[int, float], steps: np.ndarray, *, plain: dict) -> float:
    """Speed-up over plain decoding in the same loop, when steps draft and accept so much, and cost what was measured.

    Args:
        steps (`np.ndarray` of shape `(m, 3)`): drafted, accepted, and how many such steps there are.
        plain (`dict`): the row of a method that drafts nothing.
    """
    drafted, accepted, count = steps.T
    verify = np.interp(drafted + 1, list(curve), list(curve.values()))  # [m]
    by_token = name.startswith(PER_TOKEN) and row["drafted_per_step"]
    draft = row["draft_ms"] * (drafted / row["drafted_per_step"] if by_token else 1)
    spent = ((verify + draft + outside(row)) * count).sum()
    return float(((accepted + 1) * count).sum() * (curve[1] + outside(plain)) / spent)


def at_acceptance(row: dict, rate: float) -> np.ndarray:
    """The average step `(1, 3)` where each drafted level is accepted at a given rate, given that the one above it was."""
    accepted = sum(rate**level for level in range(1, round(row["levels"]) + 1))
    return np.array([[row["drafted_per_step"], accepted, 1]])


def add_speedups(result: dict, traces: dict[str, list]) -> None:
    """Puts into each method's row, for each way to run the target, the speed-ups at given acceptances and replayed."""
    for name, row in result["methods"].items():
        if "failed" in row or name == "plain":
            continue
        row["speedup_at_acceptance"], row["speedup_replayed"] = {}, {}
        for way, curve in result["verify_curves"].items():
            if "failed" in curve:
                continue
            speed = partial(speedup, name, row, curve, plain=result["methods"]["plain"])
            rates = {str(rate): speed(at_acceptance(row, rate)) for rate in ACCEPTANCE}
            row["speedup_at_acceptance"][way] = rates
            if name in traces:
                row["speedup_replayed"][way] = speed(np.array(traces[name]))


def measure_target(
    shapes: tuple[Shape, Shape | None], *, device: str, dtype: torch.dtype, say: Callable[[str], None]
) -> dict:
    """Curves and methods of one target."""
    model = random_model(shapes[0], device=device, dtype=dtype)
    drafter = None if shapes[1] is None else random_model(shapes[1], device=device, dtype=dtype)
    result = {"conditions": conditions(model, context=CONTEXT, weights="random", tokens=TOKENS)}
    result |= {"parameters": model.num_parameters()}
    say("verify curve")
    result |= {"verify_curves": curves(model, "eager"), "methods": {"plain": measure(model, NoDraft())}}
    for name, make in makers(model, drafter).items():
        say(name)
        try:
            result["methods"][name] = measure(model, make())
        except Exception as error:  # one method's trouble leaves the others measured
            result["methods"][name] = {"failed": f"{type(error).__name__}: {error}"}
    return result


def compiled_curves(shape: Shape, *, device: str, dtype: torch.dtype) -> dict[str, dict]:
    """The verify curves of a compiled target: one compilation for single tokens, one for blocks of any size."""
    model = random_model(shape, device=device, dtype=dtype)
    # a CPU, which only the tests have, would compile for minutes: there the graph is made, and run as it is
    model.compile(dynamic=True, backend="inductor" if device == "cuda" else "eager")
    return curves(model, "compiled")


def main(
    output: Annotated[Path, typer.Option("--output", help="The JSON file to write.")],
    traces: Annotated[
        list[Path] | None, typer.Option("--traces", help="Outputs of `python -m eval run`, in place of traces.json.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny target, on any device.")] = False,
    only: Annotated[str | None, typer.Option("--only", help="One of the targets.")] = None,
    minutes: Annotated[float, typer.Option("--minutes", help="What does not fit is left out, compilation first.")] = 8,
) -> None:
    """Measure block costs, draft costs and memory at the study's shapes, and the speed-up at given acceptances."""
    start, device = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not tiny:
        raise typer.BadParameter("no GPU here; --tiny runs the same on a CPU.", param_hint="--tiny")
    targets = TINY if tiny else TARGETS
    if only is not None and only not in targets:
        raise typer.BadParameter(f"{only!r} is none of {', '.join(targets)}.", param_hint="--only")
    targets = {name: shapes for name, shapes in targets.items() if only in (None, name)}
    recorded = read_traces(traces) if traces else json.loads(TRACES.read_text(encoding="utf-8"))
    where = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    report: dict = {"note": NOTE, "traces": recorded["conditions"], "targets": {}}
    output.parent.mkdir(parents=True, exist_ok=True)

    def keep(name: str) -> None:  # what is measured is kept, whatever comes after
        add_speedups(report["targets"][name], recorded["methods"])
        report["seconds"] = time.monotonic() - start
        output.write_text(json.dumps(report, indent=1), encoding="utf-8")
        if device == "cuda":
            torch.cuda.empty_cache()

    for name, shapes in targets.items():
        say = partial(print_progress, name)
        report["targets"][name] = measure_target(shapes, **where, say=say)
        report["targets"][name]["conditions"]["model"] = f"{name}, random weights"
        keep(name)
    for name, shapes in targets.items():
        if time.monotonic() - start < 60 * minutes - COMPILING:
            print_progress(name, "compiling")
            found = compiled_curves(shapes[0], **where)
        else:
            found = {"compiled": {"failed": f"left out: too little of {minutes:g} minutes was left"}}
        report["targets"][name]["verify_curves"] |= found
        keep(name)


NOTE = (
    "Milliseconds per step, device synchronised. Curves: the target's forward over a block; 'graph' replays it as one CUDA "
    "graph. Drafts are eager throughout, those of heads whole trees, which real heads cut short. Speed-ups are worked out "
    "from these costs over plain decoding in the same loop: at an acceptance given for every level, or for the steps of "
    "recorded runs on another target (traces), whose acceptance this one need not have."
)


def print_progress(name: str, what: str) -> None:
    typer.echo(f"{name}: {what}", err=True)


if __name__ == "__main__":
    typer.run(main)

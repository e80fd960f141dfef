"""What a level of EAGLE drafting costs, in one-token forwards of the target: medians, measured in turn in one process.

    python benchmarks/eagle_level.py [--head HEAD] [--model MODEL] [--dtype bfloat16] [--context 256] [--output FILE.json]

A level expands `top_k` nodes: the head's forward over them, and the choice of the next ones. Its cost is that of drafts of
all levels less that of drafts of one, by the levels between them.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch

from hf_specdec import EagleGen
from hf_specdec.bench import random_ids, random_target
from hf_specdec.compare import conditions, synchronize
from hf_specdec.generator import Step
from hf_specdec.models import load_model
from hf_specdec.tree import DraftTree


@torch.no_grad()
def level_cost(model, generator: EagleGen, *, context: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a one-token forward and of drafts by their number of levels, and a level's share of the forward."""
    generator.bind(model)
    generator.min_level_probability = -1  # so that no draft ends early
    ids = random_ids(model, context)
    hidden = model(ids, output_hidden_states=True).hidden_states
    features = [hidden[layer][0] for layer in generator.hidden_layers]
    root = DraftTree.chain(ids[0, -1:].tolist(), device=model.device)
    generator.begin(ids)
    generator.observe(Step(root, [0], [0], hidden=features))
    generator.draft(ids, max_depth=1)
    generator.observe(Step(root, [0], [0], hidden=[layer[-1:] for layer in features]))
    new, num_text_rows = generator.new, generator.num_text_rows

    def draft(depth: int) -> None:
        generator.new, generator.num_text_rows = new, num_text_rows
        generator.draft(ids, max_depth=depth)

    target = random_target(model, context, max_new_tokens=1)
    target.prefill()
    target.keep([0])

    def forward() -> None:
        target.verify(root)
        target.keep([])

    parts = {"forward": forward, "one_level": lambda: draft(1), "all_levels": lambda: draft(generator.depth)}
    times: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(rounds + 5):
        for name, part in parts.items():
            forward()  # so that all begin with the same caches of the processor
            synchronize(model.device)
            start = time.perf_counter()
            part()
            synchronize(model.device)
            if turn >= 5:  # the first rounds warm up
                times[name].append((time.perf_counter() - start) * 1e3)
    report = {name: median(values) for name, values in times.items()}
    report["level"] = (report["all_levels"] - report["one_level"]) / (generator.depth - 1)
    return report | {"level_share": report["level"] / report["forward"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", help="a folder or Hub id; None is the one that ships for the embedded model")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    model, _ = load_model(options.model, options.dtype)
    generator = EagleGen(options.head)
    report = level_cost(model, generator, context=options.context, rounds=options.rounds)
    about = conditions(model, context=options.context, rounds=options.rounds, head=options.head or "eagle3")
    report = {"conditions": about, "levels": generator.depth, "top_k": generator.top_k} | report
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")

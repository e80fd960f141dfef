"""Traces: how many tokens each step of real runs drafted and accepted, for `eval.gpu` to replay where no weights are.

`python -m eval.traces eval/results/embedded --output eval/traces.json` writes them from outputs of `python -m eval run`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from eval.answers import read_folder
from hf_specdec.compare import PLAIN

TRACES = Path(__file__).with_name("traces.json")
SAID = ("model", "dtype", "hardware", "threads", "torch", "transformers", "commit", "temperature", "max_new_tokens")


def read_traces(folders: list[Path]) -> dict:
    """For each method, its steps as [drafted, accepted, how many such], and the conditions of each folder."""
    counts: dict[str, Counter] = {}
    runs = []
    for folder in folders:
        conditions, rows, _ = read_folder(folder)
        runs.append({key: conditions[key] for key in SAID})
        own: dict[str, Counter] = {}
        for row in rows:
            if row["method"] != PLAIN and not row["failed"]:
                for turn in row["turns"]:
                    pairs = zip(turn["stats"]["drafted_lengths"], turn["stats"]["accepted_lengths"], strict=True)
                    own.setdefault(short(row["method"]), Counter()).update(pairs)
        counts |= own  # of a method in several folders, the last one counts
    methods = {name: [[*pair, count] for pair, count in sorted(own.items())] for name, own in sorted(counts.items())}
    return {"conditions": runs, "methods": methods}


def short(spec: str) -> str:
    """A method's spec, its drafter without the folders above it."""
    return re.sub(r":[^?]*/", ":", spec)


def main(
    folders: Annotated[list[Path], typer.Argument(help="Outputs of `python -m eval run`.")],
    output: Annotated[Path, typer.Option("--output")] = TRACES,
) -> None:
    """Write the traces of runs to a small file."""
    traces = read_traces(folders)
    lines = [f'  "{name}": {json.dumps(steps)}' for name, steps in traces["methods"].items()]
    text = f'{{"conditions": {json.dumps(traces["conditions"])},\n "methods": {{\n' + ",\n".join(lines) + "\n}}\n"
    output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

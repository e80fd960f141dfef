"""Results: rows of evaluation reports, from a folder or a dataset on the Hub, filtered and drawn for the Space."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from huggingface_hub import snapshot_download

from hf_specdec.drawing import bars

FILTERS = ("model", "method", "task", "hardware")
FIGURES = ("dtype", "speedup", "tokens_per_step", "tokens_per_second")
HEADERS = [*FILTERS, "dtype", "speed-up", "tokens/step", "tokens/s"]
OVERALL = "overall"  # the task of rows over all tasks


def read_dataset(repo_id: str) -> list[dict]:
    """Rows of all reports in a dataset; ValueError for what is no id, the Hub's errors for one that cannot be read."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo_id):
        raise ValueError(f"{repo_id!r} is no dataset id: write owner/name.")
    return read_folder(Path(snapshot_download(repo_id, repo_type="dataset", allow_patterns="*.json")))


def read_folder(folder: Path) -> list[dict]:
    """Rows of all reports under a folder: JSON files with "rows", each with a method and a speed-up at least.

    What a row does not say itself (hardware, dtype, ...) is taken from its file's "conditions".
    """
    rows = []
    for path in sorted(folder.rglob("*.json")):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            rows += [flat(row, report.get("conditions") or {}) for row in report["rows"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # another kind of file
            continue
    return [row for row in rows if row["method"] and isinstance(row["speedup"], int | float)]


def flat(row: Mapping, conditions: Mapping) -> dict:
    """A report's row with what its file says of all rows, under the names of `FILTERS` and `FIGURES`."""
    known = {**conditions, **row}
    known["task"] = known.get("task") or known.get("kind") or OVERALL
    return {name: known.get(name) for name in (*FILTERS, *FIGURES)}


def select(rows: Sequence[dict], wanted: Mapping[str, Sequence[str]]) -> list[dict]:
    """The rows whose values are wanted; nothing wanted of a name means that all are."""
    return [row for row in rows if all(not values or str(row[name]) in values for name, values in wanted.items())]


def charts(rows: Sequence[dict]) -> str:
    """Speed-up and tokens per step by method: medians of the rows over all tasks, or of all rows where none is."""
    counted = [row for row in rows if row["task"] == OVERALL] or rows
    note = f"Medians over {len(counted)} of the rows below, whose conditions stand beside them."
    drawn = ""
    for figure, title in (("speedup", "Speed-up over plain decoding"), ("tokens_per_step", "Tokens per step")):
        by_method: dict[str, list[float]] = {}
        for row in counted:
            if isinstance(row[figure], int | float):
                by_method.setdefault(row["method"], []).append(row[figure])
        lines = [(name, median(values), f"{median(values):.2f}") for name, values in by_method.items()]
        if lines:
            drawn += bars(title, sorted(lines, key=lambda line: -line[1]), note=note)
    return drawn


def table(rows: Sequence[dict]) -> list[list]:
    """The rows as lists, figures rounded."""
    return [
        [round(row[name], 3) if isinstance(row[name], float) else row[name] for name in (*FILTERS, *FIGURES)]
        for row in rows
    ]

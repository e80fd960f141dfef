"""Results: rows of evaluation reports, from a folder or a dataset on the Hub, filtered and drawn for the Space."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from huggingface_hub import snapshot_download

from hf_specdec.drawing import bars

FILTERS = ("report", "model", "method", "task", "hardware")
COLUMNS = {  # of the table: name in a row, heading
    "method": "method",
    "task": "task",
    "speedup": "speed-up",
    "tokens_per_step": "tokens/step",
    "tokens_per_second": "tokens/s",
    "model": "model",
    "dtype": "dtype",
    "hardware": "hardware",
    "report": "report",
}
COSTS = (  # what `advice` reads besides
    "speedup_low",
    "speedup_high",
    "answers",
    "temperature",
    "drafted_per_step",
    "ms_per_step",
    "draft_ms",
    "plain_ms_per_token",
)
OVERALL = "overall"  # the task of rows over all tasks


def read_dataset(repo_id: str) -> list[dict]:
    """Rows of all reports in a dataset; ValueError for what is no id, the Hub's errors for one that cannot be read."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo_id):
        raise ValueError(f"{repo_id!r} is no dataset id: write owner/name.")
    return read_folder(Path(snapshot_download(repo_id, repo_type="dataset", allow_patterns="*.json")))


def read_folder(folder: Path) -> list[dict]:
    """Rows of all reports under a folder: JSON files with "rows", each with a method and a speed-up at least."""
    rows = []
    for path in sorted(folder.rglob("*.json")):
        place = path.relative_to(folder).parts
        try:
            rows += read_report(json.loads(path.read_text(encoding="utf-8")), name=place[0].removesuffix(".json"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # another kind of file
            continue
    return rows


def read_report(report: Mapping, *, name: str) -> list[dict]:
    """A report's rows; what one does not say itself (hardware, dtype, ...) is taken from the report's conditions.

    `block_16` is what the forward over a block of 16 tokens cost in the run, in forwards over one; None if not measured.
    """
    rows, runs = [], {row.get("run", 0) for row in report["rows"]}
    for row in report["rows"]:
        known = {**(report.get("conditions") or {}), **row}
        run = row.get("run", 0)
        known["task"] = known.get("task") or known.get("kind") or OVERALL
        known["report"] = f"{name}, run {run + 1}" if len(runs) > 1 else name
        known["block_16"] = block_16((report.get("verify_curves") or {run: {}})[run])
        if known.get("method") and isinstance(known.get("speedup"), int | float):
            rows.append({key: known.get(key) for key in (*COLUMNS, *COSTS, "block_16")})
    return rows


def block_16(curves: Mapping[str, Mapping[str, float]]) -> float | None:
    """What a block of 16 tokens costs in single tokens, behind the longest context measured."""
    if not curves:
        return None
    curve = curves[max(curves, key=int)]
    return curve["16"] / curve["1"]


def select(rows: Sequence[dict], wanted: Mapping[str, Sequence[str]]) -> list[dict]:
    """The rows whose values are wanted; nothing wanted of a name means that all are."""
    return [row for row in rows if all(not values or str(row[name]) in values for name, values in wanted.items())]


def choices(rows: Sequence[dict]) -> Iterator[list[str]]:
    """What each of `FILTERS` can choose from."""
    for name in FILTERS:
        yield sorted({str(row[name]) for row in rows})


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
    return [[round(row[name], 2) if isinstance(row[name], float) else row[name] for name in COLUMNS] for row in rows]

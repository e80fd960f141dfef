"""Answers: the files of a run. One line of conditions, then one line for each question, method and run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

REQUIRED = (
    *("model", "dtype", "hardware", "threads", "torch", "transformers", "commit"),
    *("template", "temperature", "max_new_tokens"),
)


class AnswerFile:
    """What one process appends to, and what it and the others have answered before.

    Args:
        folder (`Path`): of the run; made where there is none.
        conditions (`dict`): of this run. A run that was interrupted goes on only under the very same ones.
        process (`int`): this process's number.
        processes (`int`): how many share the questions.

    Raises:
        ValueError: if the folder holds answers that were given under other conditions, or a condition is missing that a
            report of them would need.
    """

    def __init__(self, folder: Path, conditions: dict, *, process: int = 0, processes: int = 1):
        self.path = folder / f"answers-{process:02d}-of-{processes:02d}.jsonl"
        check_conditions(self.path, conditions)
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict] = []
        for path in sorted(folder.glob("answers-*.jsonl")):
            before, rows, _ = read_file(path)
            if before is not None:
                check_same(path, before, conditions)
                self.rows += rows
        if self.path.exists():  # an interruption may have left half a line
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)
        if not self.path.exists() or not self.path.stat().st_size:
            self.write([{"conditions": conditions | {"date": datetime.now(UTC).date().isoformat()}}])

    def write(self, lines: Iterable[dict]) -> None:
        """Appends lines, all at once."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    def done(self, num_methods: int) -> set[tuple]:
        """The questions and runs that every method has answered, or failed to."""
        answered: dict[tuple, set[str]] = {}
        for row in self.rows:
            answered.setdefault((row["question_id"], row["run"]), set()).add(row["method"])
        return {key for key, methods in answered.items() if len(methods) == num_methods}


def check_same(path: Path, before: dict, now: dict) -> None:
    """Raises ValueError where answers were given under other conditions than `now`."""
    keys = (before.keys() | now.keys()) - {"date"}  # a run may go on the next day
    changed = [key for key in keys if before.get(key) != now.get(key)]
    if changed:
        changes = "; ".join(f"{key}: {before.get(key)!r} then, {now.get(key)!r} now" for key in sorted(changed))
        raise ValueError(f"{path} holds answers from other conditions ({changes}): give another --output.")


def read_file(path: Path) -> tuple[dict | None, list[dict], list[dict]]:
    """A file's conditions, its answers and its other lines (the verify curve); half a line at its end is left out."""
    conditions, rows, others = None, [], []
    whole = path.read_bytes().rpartition(b"\n")[0]  # an interruption may have cut a line, or a character, in two
    for line in filter(None, whole.decode("utf-8").split("\n")):
        item = json.loads(line)
        if "conditions" in item:
            conditions = item["conditions"]
        elif "method" in item:
            rows.append(item)
        else:
            others.append(item)
    return conditions, rows, others


def read_folder(folder: Path) -> tuple[dict, list[dict], dict]:
    """A run's conditions, its answers (each once: a repeated one counts as last given) and its verify curve.

    Raises:
        ValueError: if there are none, or figures would stand without their conditions.
    """
    paths = sorted(folder.glob("answers-*.jsonl"))
    if not paths:
        raise ValueError(f"no answers-*.jsonl in {folder}: give the --output of `python -m eval run`.")
    shared, answers, curve = None, {}, {}
    for path in paths:
        conditions, rows, others = read_file(path)
        check_conditions(path, conditions)
        if shared is not None:
            check_same(path, shared, conditions)
        shared = conditions
        answers |= {(row["question_id"], row["run"], row["method"]): row for row in rows}
        for item in others:
            curve |= item.get("verify_curve", {})
    return shared, list(answers.values()), curve


def check_conditions(path: Path, conditions: dict | None) -> None:
    """Raises ValueError for answers without everything a reader must know about them."""
    missing = [key for key in REQUIRED if (conditions or {}).get(key) in (None, "")]
    if missing:
        raise ValueError(
            f"{path}: a figure needs its conditions beside it, and these are missing: {', '.join(missing)}. "
            "Rows without them are not reported; run from a git checkout, which gives the commit."
        )

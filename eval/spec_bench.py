"""Spec-Bench's answer files: ours written as its speed.py and equal.py read them, its read as ours, counted its way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from eval.answers import check_conditions
from eval.questions import task_of
from eval.score import OVERALL, Answers, num_tokens
from hf_specdec.compare import PLAIN


def write_folder(folder: Path, model: str, rows: Sequence[dict]) -> list[Path]:
    """One file per method and run, sorted by question.

    Spec-Bench's scripts pair lines by their place, so that a question that one method failed on is left out for all.
    """
    failed = {(row["question_id"], row["run"]) for row in rows if row["failed"]}
    by_file: dict[tuple[str, int], list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["question_id"]):
        if (row["question_id"], row["run"]) not in failed:
            by_file.setdefault((row["method"], row["run"]), []).append(row)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for (method, run), own in by_file.items():
        paths.append(folder / f"{re.sub(r'[^A-Za-z0-9.=]+', '-', method).strip('-')}-run-{run + 1}.jsonl")
        lines = (json.dumps(to_line(row, f"{model} {method}"), ensure_ascii=False) + "\n" for row in own)
        paths[-1].write_text("".join(lines), encoding="utf-8")
    return paths


def to_line(row: dict, model_id: str) -> dict:
    """A row as Spec-Bench writes it. Its accept lengths count the bonus token; a plain step has length 1."""
    lengths = []
    for turn in row["turns"]:
        accepted = turn["stats"]["accepted_lengths"] if turn["stats"] else [0] * (num_tokens(turn) - 1)
        lengths.append([number + 1 for number in accepted])
    choice = {
        "index": 0,
        "turns": [turn["text"] for turn in row["turns"]],
        "decoding_steps": [len(own) for own in lengths],
        "new_tokens": [num_tokens(turn) for turn in row["turns"]],
        "wall_time": [turn["seconds"] for turn in row["turns"]],
        "accept_lengths": sum(lengths, []),
    }
    named = {"question_id": row["question_id"], "category": row["category"], "model_id": model_id}
    return named | {"choices": [choice]}


def read_folder(folder: Path) -> tuple[dict, list[dict], dict]:
    """Answers that Spec-Bench wrote, with the conditions that it does not write down.

    `conditions.json` beside them holds those of `run` (model, dtype, hardware, ...) and `files`, which names the method of
    each file, "plain" for the baseline: {"plain": "vanilla.jsonl", "pld": ["pld-1.jsonl", "pld-2.jsonl"]}.
    """
    about = folder / "conditions.json"
    if not about.is_file():
        raise ValueError(
            f"{folder} holds neither answers-*.jsonl nor a conditions.json with `files`: give the --output of "
            "`python -m eval run`, or write the conditions of Spec-Bench's answers down beside them."
        )
    conditions = json.loads(about.read_text(encoding="utf-8"))
    files = conditions.pop("files", {})
    check_conditions(about, conditions)
    rows = []
    for method, names in files.items():
        for run, name in enumerate([names] if isinstance(names, str) else names):
            lines = (folder / name).read_text(encoding="utf-8").split("\n")  # texts may hold other line separators
            rows += [from_line(json.loads(line), method, run) for line in lines if line.strip()]
    if PLAIN not in files:
        raise ValueError(f"{about}: `files` names no {PLAIN!r} among {list(files)}; a speed-up needs the baseline.")
    return conditions, rows, {}


def from_line(line: dict, method: str, run: int) -> dict:
    """A line of Spec-Bench's as a row. Its accept lengths are not told apart by turn: all stand with the first one."""
    choice = line["choices"][0]
    turns = []
    for text, tokens, seconds in zip(choice["turns"], choice["new_tokens"], choice["wall_time"], strict=True):
        turn = {"tokens": None, "text": text, "new_tokens": tokens, "seconds": seconds}
        turns.append(turn | {"prefill_seconds": None, "stats": None})
    if method != PLAIN:
        accepted = [length - 1 for length in choice["accept_lengths"]]
        steps = {"steps": len(accepted), "accepted": sum(accepted), "emitted": sum(accepted) + len(accepted) + 1}
        steps |= {"accepted_lengths": accepted, "drafted_lengths": [], "draft_depths": [], "seconds": {}, "notes": []}
        turns[0]["stats"] = steps
    failed = "Spec-Bench recorded an error" if "ERROR" in choice["turns"] else None
    named = {"question_id": line["question_id"], "category": line["category"], "task": task_of(line["category"])}
    return named | {"method": method, "run": run, "turns": turns, "failed": failed}


def count(answers: Answers, rows: list[dict], retokenize: Callable[[str], int] | None) -> None:
    """Replaces the speed-ups and tokens per step of `rows` by those that Spec-Bench's speed.py gives on the same answers.

    There the baseline's tokens are those of its text, tokenised again, less one for a BOS token, whether the tokenizer
    writes one or not; methods' are their own. Of several runs, speeds and speed-ups are averaged. Each file counts all its
    questions, also those that another file lacks, but for the failed ones, which `write_folder` leaves out everywhere.

    Args:
        retokenize (*optional*): tokens of a text in the model's tokenizer less one; needed for Spec-Bench's own files.
    """
    failed = {(row["question_id"], row["run"]) for row in answers.failed}
    files: dict[tuple, list[list[dict]]] = {}  # (method, task, run) -> the turns of each question
    for (method, question, run), turns in answers.turns.items():
        if (question, run) not in failed:
            for task in (answers.task[question], OVERALL):
                files.setdefault((method, task, run), []).append(turns)
    for row in rows:
        own = {
            run: file for (method, task, run), file in files.items() if (method, task) == (row["method"], row["task"])
        }
        own = {run: file for run, file in own.items() if (PLAIN, row["task"], run) in files}
        for key in [key for key in row if key.startswith(("speedup", "decode", "break_even"))]:
            del row[key]
        if not own:
            continue
        speeds = [np.mean([sum(map(num_tokens, turns)) / seconds(turns) for turns in file]) for file in own.values()]
        base = [
            np.mean([sum(spec_bench_tokens(turn, retokenize) for turn in turns) / seconds(turns) for turns in file])
            for file in (files[PLAIN, row["task"], run] for run in own)
        ]
        lengths = [
            number + 1
            for file in own.values()
            for turn in chain.from_iterable(file)
            for number in (turn["stats"]["accepted_lengths"] if turn["stats"] else [0] * (row["method"] == PLAIN))
        ]
        row["tokens_per_second"] = float(np.mean(speeds))
        row["speedup"] = float(np.mean(np.divide(speeds, base)))
        row["tokens_per_step"] = float(np.mean(lengths))


def seconds(turns: Sequence[dict]) -> float:
    return sum(turn["seconds"] for turn in turns)


def spec_bench_tokens(turn: dict, retokenize: Callable[[str], int] | None) -> int:
    """The baseline's tokens of a turn as speed.py counts them."""
    if "spec_bench_tokens" in turn:
        return turn["spec_bench_tokens"]
    if retokenize is None:
        raise ValueError("Spec-Bench counts the baseline's text: give the model's tokenizer with --tokenizer.")
    return retokenize(turn["text"])

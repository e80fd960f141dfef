"""Questions: Spec-Bench's file, or any like it, from a path or a dataset on the Hub."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi

TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
SOURCE = "Spec-Bench's is data/spec_bench/question.jsonl of https://github.com/hemingkx/Spec-Bench"


@dataclass(frozen=True)
class Question:
    """One conversation to hold: the user's turns, and the reference answers where there are any.

    Args:
        question_id (`int` or `str`): names it in the answers.
        category (`str`): as in the file.
        turns (`tuple[str]`): what the user says, one after the other.
        reference (`tuple[str]`): may be empty.
    """

    question_id: int | str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        """Spec-Bench's task: MT-Bench's eight categories are one."""
        return task_of(self.category)


def task_of(category: str) -> str:
    """The task of a category: MT-Bench's eight categories are one."""
    return category if category in TASKS else "mt_bench"


def read_questions(source: str) -> tuple[list[Question], dict]:
    """All questions of a JSON-lines file or a dataset on the Hub, and the conditions that name them.

    Raises:
        ValueError: if there is no such file or dataset, or it holds something else; says what to do.
    """
    path = Path(source)
    if path.is_file():
        lines = path.read_text(encoding="utf-8").split("\n")  # texts may hold other line separators
        rows = [parse(source, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        name = path.name
    elif path.is_dir() or source.startswith(("/", ".", "~")) or source.count("/") != 1 or path.suffix:
        raise ValueError(f"no file of questions at {source!r}. {SOURCE}: download it and give its path.")
    else:
        rows, name = read_hub(source), source
    questions = [to_question(source, number, row) for number, row in enumerate(rows, start=1)]
    if not questions:
        raise ValueError(f"{source!r} holds no question. {SOURCE}.")
    if len({question.question_id for question in questions}) < len(questions):
        raise ValueError(f"{source!r} gives one question_id to several questions: make them distinct.")
    digest = hashlib.sha256("\n".join(map(repr, questions)).encode()).hexdigest()
    return questions, {"questions": name, "questions_sha256": digest[:16]}


def parse(source: str, number: int, line: str) -> dict:
    """The object on one line of the file."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}, line {number} is not JSON ({error}). {SOURCE}.") from error


def read_hub(name: str) -> list[dict]:
    """The rows of a Hub dataset's test split, else of its first one."""
    try:
        HfApi().dataset_info(name, timeout=5)  # one quick question: a download's own retries take long
        from datasets import load_dataset

        splits = load_dataset(name)
        return list(splits["test"] if "test" in splits else next(iter(splits.values())))
    except Exception as error:  # the Hub client's HTTP errors are of many kinds
        raise ValueError(
            f"cannot read questions from {name!r}, which is no file here and no dataset in reach on the Hub "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]}). {SOURCE}: download it and give its path."
        ) from error


def to_question(source: str, number: int, row: dict) -> Question:
    """The question in a row that has `turns` (or one `prompt`) and perhaps question_id, category and reference."""
    turns = row.get("turns", row.get("prompt")) if isinstance(row, dict) else None
    turns = [turns] if isinstance(turns, str) else turns
    if not turns or not all(isinstance(turn, str) and turn for turn in turns):
        keys = list(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{source}, question {number} has no `turns`, a list of texts, but {keys}. {SOURCE}.")
    reference = row.get("reference") or []
    reference = [reference] if isinstance(reference, str) else reference
    category = row.get("category") or "mt_bench"
    return Question(row.get("question_id", number), category, tuple(turns), tuple(map(str, reference)))


def select(questions: list[Question], limit: int | None) -> list[Question]:
    """Up to `limit` questions of each task, spread evenly over it, the tasks in turn.

    MT-Bench's file is sorted by category, so its first questions would all be of one kind.
    """
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(question.task, []).append(question)
    ranked = []
    for own in by_task.values():
        taken = len(own) if limit is None else min(limit, len(own))
        ranked += [(i, own[i * len(own) // taken]) for i in range(taken)]
    return [question for _, question in sorted(ranked, key=lambda item: item[0])]  # stable: file order within a rank

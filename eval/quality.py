"""Quality: scores of the answers themselves, which must not move: exact match for math, ROUGE for summaries."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import evaluate

from eval.questions import Question
from eval.score import Answers
from hf_specdec.compare import PLAIN

METRICS = {"math_reasoning": "exact_match", "summarization": "rouge_l"}  # modules in metrics/, which need no network
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def load_metric(name: str) -> evaluate.Metric:
    """The metric of this name beside this file."""
    return evaluate.load(str(Path(__file__).parent / "metrics" / name))


def quality(
    answers: Answers, questions: list[Question], *, load: Callable[[str], evaluate.Metric] = load_metric
) -> tuple[dict, str]:
    """Scores by (task, method), and a note of what they are held against or could not be loaded.

    Answers are held against the questions' references where these are given, else against plain decoding's answers. A
    math answer counts by the last number in it, which is where a worked solution ends.
    """
    references = {question.question_id: question.reference[0] for question in questions if question.reference}
    against = "references" if references else "plain decoding's answers"
    scores: dict[tuple[str, str], dict] = {}
    said = []
    for task, name in METRICS.items():
        if task not in answers.tasks:
            continue
        try:
            metric = load(name)
        except Exception as error:  # evaluate's, of many kinds; a report without a score is better than none
            said.append(f"{name} left out, evaluate cannot load it ({type(error).__name__}: {error})")
            continue
        said.append(f"{name} against {against}")
        reduced = last_number if task == "math_reasoning" else str
        for method in answers.methods:
            if references:
                sides = [(own[0]["text"], references[question])
                         for question, (own, _) in answers.pairs(method, task).items() if question in references]  # fmt: skip
            elif method == PLAIN:
                continue
            else:
                pairs = answers.pairs(method, task).values()
                sides = [(one["text"], two["text"]) for own, base in pairs for one, two in zip(own, base, strict=True)]
            if sides:
                predictions, wanted = ([reduced(text) for text in side] for side in zip(*sides, strict=True))
                value = float(metric.compute(predictions=predictions, references=wanted)[name])
                scores[task, method] = {"quality": {f"{name} against {against}": value}}
    return scores, "; ".join(said)


def last_number(text: str) -> str:
    """The last number in a text; the whole text where there is none."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "").rstrip(".") if numbers else text

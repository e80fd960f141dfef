"""ROUGE-L (Lin 2004): how much of a reference's word order an answer keeps. Needs no package and no network."""

import re

import datasets
import evaluate

DESCRIPTION = "F-measure of the longest common subsequence of words, the mean over answers; as rouge_score, unstemmed."
INPUTS = """
Args:
    predictions (list of str): answers.
    references (list of str): one for each.
Returns:
    rouge_l (float): from 0 to 1.
"""


class RougeL(evaluate.Metric):
    """Mean ROUGE-L F-measure."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="https://aclanthology.org/W04-1013",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        scores = [f_measure(words(one), words(two)) for one, two in zip(predictions, references, strict=True)]
        return {"rouge_l": sum(scores) / len(scores)}


def words(text: str) -> list[str]:
    """Runs of letters and digits, in lower case."""
    return re.findall("[a-z0-9]+", text.lower())


def f_measure(prediction: list[str], reference: list[str]) -> float:
    """Harmonic mean of the common subsequence's share of both texts, 2 LCS / (m + n)."""
    longest = [0] * (len(reference) + 1)  # common subsequence of what was read and each beginning of the reference
    for word in prediction:
        before = 0
        for i, other in enumerate(reference, start=1):
            before, longest[i] = longest[i], before + 1 if word == other else max(longest[i], longest[i - 1])
    return 2 * longest[-1] / (len(prediction) + len(reference)) if longest[-1] else 0.0

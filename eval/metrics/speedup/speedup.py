"""Speed-up of one way to decode over another, on the same questions."""

import datasets
import evaluate

DESCRIPTION = "How much faster one way to decode answers questions than another (plain decoding, as a rule)."
INPUTS = """
Args:
    predictions (list of dict): the faster way's `tokens` (emitted) and `seconds` (wall time), one dict per question.
    references (list of dict): the same of the baseline, the same questions in the same order.
Returns:
    speedup (float): ratio of the mean speeds over questions, as Spec-Bench reports it.
    speedup_total (float): ratio of all tokens over all seconds, which does not overweight short answers.
"""
SIDE = {"tokens": datasets.Value("int64"), "seconds": datasets.Value("float64")}


class Speedup(evaluate.Metric):
    """Ratio of speeds, of means and of totals."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": SIDE, "references": SIDE}),
        )

    def _compute(self, predictions: list[dict], references: list[dict]) -> dict[str, float]:
        means, totals = [], []
        for side in (predictions, references):
            means.append(sum(item["tokens"] / item["seconds"] for item in side) / len(side))
            totals.append(sum(item["tokens"] for item in side) / sum(item["seconds"] for item in side))
        return {"speedup": means[0] / means[1], "speedup_total": totals[0] / totals[1]}

"""Share of answers that are the reference, character for character."""

import datasets
import evaluate

DESCRIPTION = "How many answers are the reference itself."
INPUTS = """
Args:
    predictions (list of str): answers.
    references (list of str): one for each.
Returns:
    exact_match (float): share of answers that equal their reference.
"""


class ExactMatch(evaluate.Metric):
    """Share of answers that equal their reference."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        same = [prediction == reference for prediction, reference in zip(predictions, references, strict=True)]
        return {"exact_match": sum(same) / len(same)}

"""Tokens per step of speculative decoding, the target's own bonus token included."""

import datasets
import evaluate

DESCRIPTION = "Tokens that one forward of the target emits on average; plain decoding emits one."
INPUTS = """
Args:
    predictions (list of int): drafted tokens that each step accepted.
Returns:
    tokens_per_step (float): with the token of the target's own that ends each step (the papers' mean accepted length).
    accepted_per_step (float): without it.
"""


class TokensPerStep(evaluate.Metric):
    """Mean accepted tokens of a step, with and without the bonus token."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": datasets.Value("int64")}),
        )

    def _compute(self, predictions: list[int]) -> dict[str, float]:
        accepted = sum(predictions) / len(predictions)
        return {"tokens_per_step": accepted + 1, "accepted_per_step": accepted}

"""Acceptance of drafts, in all and at each depth given that the depth was reached."""

import datasets
import evaluate

DESCRIPTION = "How often drafted tokens are accepted."
INPUTS = """
Args:
    predictions (list of int): drafted tokens that each step accepted.
    references (list of int): longest path that each step drafted, or the one that it accepted to its end or to the text's.
Returns:
    acceptance (float): accepted tokens over drafted depth.
    conditional_acceptance (list of float): at depth 1, 2, ...: how often accepted, where drafted and all before accepted.
"""


class Acceptance(evaluate.Metric):
    """Share of the drafted depth that is accepted, in all and by depth."""

    def _info(self) -> evaluate.MetricInfo:
        count = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": count, "references": count}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict:
        rates = []
        for depth in range(1, max(references) + 1):
            reached = [
                accepted >= depth
                for accepted, drafted in zip(predictions, references, strict=True)
                if drafted >= depth and accepted >= depth - 1
            ]
            if not reached:
                break
            rates.append(sum(reached) / len(reached))
        drafted = sum(references)
        acceptance = sum(predictions) / drafted if drafted else 0.0
        return {"acceptance": acceptance, "conditional_acceptance": rates}

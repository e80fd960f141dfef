"""Advice: which method pays for a kind of text, reckoned from what its steps wrote and cost where they were measured.

speed-up = tokens per step / (verification + draft), both costs in steps of plain decoding. This is the study's cost model
with every cost of a step in it: what is neither draft nor forward counts as verification.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_specdec.generator import METHODS
from hf_specdec.methods.hybrid import HybridGen
from hf_specdec.results import OVERALL

WORKLOADS = {  # a Spec-Bench task: what it is
    OVERALL: "A mix of all these",
    "summarization": "Summaries: the answer repeats its prompt",
    "rag": "Answers from given passages (RAG)",
    "mt_bench": "Chat, writing and code, over two turns",
    "math_reasoning": "Math and reasoning",
    "translation": "Translation",
    "qa": "Short questions",
}
NUM_RECOMMENDED = 3


@dataclass
class Estimate:
    """A method's speed-up, and what it is reckoned from.

    Args:
        method (`str`): its spec.
        tokens_per_step (`float`): measured.
        verify (`float`): a step without its draft, in steps of plain decoding.
        draft (`float`): its draft, in steps of plain decoding.
        measured (`tuple[float, float, float]`): speed-up with the prompt's reading, and its 95% interval.
        answers (`int`): how many were measured.
        needs (`list[str]`): methods whose drafter must be at hand.
    """

    method: str
    tokens_per_step: float
    verify: float
    draft: float
    measured: tuple[float, float | None, float | None]
    answers: int | None
    needs: list[str]

    @property
    def cost(self) -> float:
        """A step in steps of plain decoding: from so many tokens per step on the method pays."""
        return self.verify + self.draft

    @property
    def speedup(self) -> float:
        return self.tokens_per_step / self.cost

    @property
    def about(self) -> str:
        """What the method does, in one sentence; nothing for one that is not among ours."""
        method = METHODS.get(self.method.partition("?")[0].partition(":")[0])
        return (method.__doc__ or "").strip().partition("\n")[0] if method else ""

    @property
    def reason(self) -> str:
        """The formula with the method's figures in it."""
        return (
            f"{self.tokens_per_step:.2f} tokens a step / (verification {self.verify:.2f} + draft {self.draft:.2f}) = "
            f"{self.speedup:.2f}×"
        )

    @property
    def evidence(self) -> str:
        """What was measured, with its 95% interval, and on how much."""
        speedup, low, high = self.measured
        interval = f" ({low:.2f}–{high:.2f})" if low is not None and high is not None else ""
        return f"{speedup:.2f}×{interval}" + (f", {self.answers} answers" if self.answers else "")

    def to_dict(self) -> dict:
        """All of it, as plain JSON types."""
        speedup, low, high = self.measured
        return {
            "method": self.method,
            "speedup": self.speedup,
            "tokens_per_step": self.tokens_per_step,
            "verify": self.verify,
            "draft": self.draft,
            "break_even_tokens_per_step": self.cost,
            "measured_speedup": speedup,
            "measured_low": low,
            "measured_high": high,
            "answers": self.answers,
            "needs": self.needs,
        }


def drafters_needed() -> dict[str, str]:
    """The methods that need something made or trained for the model, and what that is."""
    needy = {name: method.drafter_argument for name, method in METHODS.items() if method is not HybridGen}
    return {name: argument.partition(":")[0].partition(",")[0] for name, argument in needy.items() if argument}


def needs(spec: str) -> list[str]:
    """The methods of a spec that need a drafter: its own, and those of the parts of a hybrid."""
    name, _, parts = spec.partition("?")[0].partition(":")
    return [part for part in dict.fromkeys([name, *parts.split("+")]) if part in drafters_needed()]


def runs(rows: Iterable[dict]) -> dict[str, str]:
    """The reports that tell what steps cost, by name, with their conditions; the one of most methods first."""
    methods: dict[tuple[str, str], set[str]] = {}
    for row in filter(is_costed, rows):
        model = str(row["model"]).partition(" (")[0].rpartition("/")[2]
        conditions = [
            row["dtype"],
            row["hardware"],
            f"temperature {row['temperature']:g}" if row["temperature"] else "",
        ]
        label = " · ".join(filter(None, [model, *conditions]))
        methods.setdefault((row["report"], label), set()).add(row["method"])
    ordered = sorted(methods, key=lambda run: -len(methods[run]))
    return {name: f"{label} · {len(methods[name, label])} methods ({name})" for name, label in ordered}


def is_costed(row: dict) -> bool:
    """Whether a row tells what a method's steps cost; plain decoding's does not."""
    costs = (row["ms_per_step"], row["draft_ms"], row["plain_ms_per_token"], row["tokens_per_step"])
    return all(isinstance(cost, int | float) for cost in costs)


def estimates(
    rows: Iterable[dict], *, run: str, task: str, draft_scale: float = 1.0, block_16: float | None = None
) -> list[Estimate]:
    """The methods of a run on a task, fastest first.

    Args:
        run (`str`): a key of `runs`.
        task (`str`): a key of `WORKLOADS`.
        draft_scale (`float`): what if a draft cost so many times what was measured, against a step?
        block_16 (`float`, *optional*):
            What if a block of 16 tokens cost so many single ones? The forward over a block of n is then taken to cost
            (n - 1) / 15 of the difference more. None leaves it as measured.
    """
    found = []
    for row in rows:
        if row["report"] == run and row["task"] == task and is_costed(row):
            step, draft = (row[name] / row["plain_ms_per_token"] for name in ("ms_per_step", "draft_ms"))
            wider = (block_16 - row["block_16"]) / 15 * row["drafted_per_step"] if block_16 and row["block_16"] else 0
            measured = (row["speedup"], row["speedup_low"], row["speedup_high"])
            figures = row["tokens_per_step"], step - draft + wider, draft * draft_scale, measured, row["answers"]
            found.append(Estimate(row["method"], *figures, needs(row["method"])))
    return sorted(found, key=lambda estimate: -estimate.speedup)


def recommend(found: Sequence[Estimate], *, at_hand: Iterable[str]) -> tuple[list[Estimate], list[str]]:
    """The methods to take, best first, and what else must be said.

    Args:
        found (`Sequence[Estimate]`): as `estimates` returns them.
        at_hand (`Iterable[str]`): methods whose drafter is at hand, keys of `drafters_needed`.
    """
    at_hand, shown, said = set(at_hand), {}, []
    for estimate in found:
        drafts_and_pays = estimate.tokens_per_step > 1 and estimate.speedup > 1
        if drafts_and_pays and at_hand.issuperset(estimate.needs):
            shown.setdefault(estimate.method.partition("?")[0], estimate)  # one set of options for each method
    best = list(shown.values())[:NUM_RECOMMENDED]
    if not best:
        said.append("Plain decoding: no method that you can take writes more tokens in a step than the step costs.")
    for estimate in best:
        if (estimate.measured[1] or 0) <= 1:
            said.append(f"{estimate.method}: no gain is certain, its measured interval does not lie above 1.")
    if len(best) > 1 and (best[1].measured[2] or 0) >= (best[0].measured[1] or 0):
        said.append("The intervals of the first two overlap: their order is not certain.")
    faster = [
        item for item in found if not at_hand.issuperset(item.needs) and (not best or item.speedup > best[0].speedup)
    ]
    if faster and faster[0].speedup > 1:
        wanted = " and ".join(drafters_needed()[name] for name in faster[0].needs if name not in at_hand)
        said.append(f"{faster[0].method} would reach {faster[0].speedup:.2f}×: it takes {wanted}.")
    return best, said


def advise(
    rows: Sequence[dict], *, task: str, at_hand: Iterable[str] | None = None, run: str | None = None, **what_if
) -> dict:
    """Recommendation and figures as plain JSON types; without a run, by the one of most methods.

    Args:
        what_if: `draft_scale` and `block_16`, as `estimates` takes them.
    """
    known = runs(rows)
    run = run or next(iter(known), None)
    found = estimates(rows, run=run, task=task, **what_if)
    best, said = recommend(found, at_hand=at_hand or [])
    return {
        "measured_on": known.get(run),
        "recommended": [estimate.method for estimate in best],
        "notes": said if found else ["Nothing was measured on this."],
        "methods": [estimate.to_dict() for estimate in found],
    }

"""Stats: what each step drafted and accepted, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import ClassVar

import torch

from hf_specdec.tree import DraftTree

STAGES = ("prefill", "draft", "verify", "accept", "compact", "other")


@dataclass
class SpecStats:
    """Counts and seconds of one `generate` call.

    A *step* is one forward of the target over a draft. It emits the drafted tokens it accepts and then one token of the
    target's own, the *bonus*. The prefill is not a step; it emits the first token.

    Args:
        steps (`int`): forwards after the prefill.
        drafted (`int`): drafted tokens that were verified.
        accepted (`int`): drafted tokens that were emitted.
        emitted (`int`): new tokens in all.
        drafted_lengths (`list[int]`): drafted tokens of each step.
        draft_depths (`list[int]`):
            Longest path of each step's draft; where a shorter one was accepted to its end, or to the text's, that one's
            length, as nothing was drafted behind it or refused.
        accepted_lengths (`list[int]`): accepted tokens of each step.
        from_draft (`list[bool]`): for each emitted token, whether it was drafted.
        seconds (`dict[str, float]`):
            Wall time by stage. Forwards run asynchronously on a GPU: unless `synchronize` is set, their time shows where
            their result is read, in "accept".
        draft_parts (`dict[str, float]`):
            Seconds within "draft" by what was done (head, tree, retrieval, ...), where a method tells; the rest of "draft"
            is none of them. Nothing waits for the device at their ends: on a GPU a part shows the time to launch its work,
            and the work itself shows in the part that reads its result, else in the rest.
        notes (`list[str]`): what a reader of the figures must know (drafts cut to chains, warm state, lossy options).
        synchronize (`bool`): wait for the device at the end of each stage, so that each shows its own time.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted_lengths: list[int] = field(default_factory=list)
    draft_depths: list[int] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    draft_parts: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    synchronize: bool = False

    drafter: ClassVar[str] = ""  # of a hybrid, whose part drafts now

    def __post_init__(self):
        self._last_part = time.perf_counter()  # transformers' own loop starts no clock

    def start(self, device: torch.device) -> None:
        """Starts the clock. Stages are timed from one `lap` to the next, so together they cover all the time."""
        self._device = device if self.synchronize and device.type != "cpu" else None
        self._last = self._last_part = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Books the time since the last lap on `stage`."""
        if self._device is not None:
            torch.accelerator.synchronize(self._device)
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = self._last_part = now

    def part(self, name: str) -> None:
        """Books the time since the last lap or part on a part of drafting; the stage "draft" holds it as well."""
        now = time.perf_counter()
        name = f"{self.drafter} {name}".strip()
        self.draft_parts[name] = self.draft_parts.get(name, 0.0) + now - self._last_part
        self._last_part = now

    def emit(self, *, from_draft: bool) -> None:
        """Counts one emitted token."""
        self.emitted += 1
        self.from_draft.append(from_draft)

    def record(self, tree: DraftTree, path: Sequence[int], *, accepted: int, cut: bool = False) -> None:
        """Counts one step, which went along the nodes of `path` and emitted `accepted` of the tree's drafted tokens.

        `cut`: the text ended with a drafted token, so that what was drafted behind it was not refused.
        """
        self.steps += 1
        self.drafted += len(tree) - 1
        self.accepted += accepted
        self.drafted_lengths.append(len(tree) - 1)
        self.draft_depths.append(tree.depth if path[-1] in tree.host[1] and not cut else accepted)
        self.accepted_lengths.append(accepted)

    @property
    def tokens_per_step(self) -> float:
        """Tokens a step emits on average, the bonus token included (the papers' mean accepted length; plain is 1)."""
        return (self.emitted - 1) / self.steps if self.steps else 1.0

    @property
    def accepted_per_step(self) -> float:
        """Drafted tokens a step accepts on average: tokens per step without the bonus token."""
        return self.accepted / self.steps if self.steps else 0.0

    @property
    def conditional_acceptance(self) -> list[float]:
        """For each draft position i: how often it was accepted, given that it was drafted and position i-1 accepted.

        In a tree it was drafted where the node accepted at i-1 has children. What stood behind a text's end was not refused.
        """
        steps = list(zip(self.accepted_lengths, self.draft_depths, strict=True))
        rates = []
        for position in range(1, max(self.draft_depths, default=0) + 1):
            reached = [
                accepted >= position for accepted, depth in steps if accepted >= position - 1 and depth >= position
            ]
            if not reached:
                break
            rates.append(sum(reached) / len(reached))
        return rates

    @property
    def total_seconds(self) -> float:
        """Wall time of the call."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens emitted after the prefill, per second spent after the prefill."""
        decoding = self.total_seconds - self.seconds["prefill"]
        return (self.emitted - 1) / decoding if decoding > 0 and self.emitted > 1 else 0.0

    def to_dict(self) -> dict:
        """Counts, seconds and the rates derived from them, as plain JSON types."""
        derived = (
            "tokens_per_step",
            "accepted_per_step",
            "conditional_acceptance",
            "total_seconds",
            "tokens_per_second",
        )
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @classmethod
    def from_dict(cls, data: dict) -> SpecStats:
        """The stats that `to_dict` wrote; derived rates are computed afresh."""
        return cls(**{item.name: data[item.name] for item in fields(cls)})

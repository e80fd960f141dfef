"""Hybrid: several drafters at once, as in SAM-Decoding (Hu et al. 2024) and the Spec-Bench leaderboard's first place.

Each part's tree carries its own estimate of what will be accepted; the likeliest nodes of all are verified together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from hf_specdec.generator import SpecGenerator, Step, make_generator
from hf_specdec.tree import DraftTree


class HybridGen(SpecGenerator):
    """Merges the drafts of its parts into one tree by estimated probability.

    Parts are asked in order, cheap ones first. Once one promises `enough` accepted tokens, the others are not asked.

    Args:
        parts (`Sequence[SpecGenerator]` or `str`): the drafters, or their specs joined by "+", as in "sam+recycling".
        max_nodes (`int`): largest merged tree, the root included.
        min_probability (`float`): least estimated probability of a node.
        enough (`float`): expected accepted tokens of a draft that is verified alone.

    Raises:
        ValueError: with fewer than two parts, or one whose drafts cannot be mixed with others.
    """

    name = "hybrid"
    drafter_argument = "methods joined by +, such as sam+recycling"
    drafter_optional = True

    def __init__(
        self,
        parts: Sequence[SpecGenerator] | str = "sam+recycling",
        *,
        max_nodes: int = 32,
        min_probability: float = 0.025,
        enough: float = 2.0,
    ):
        super().__init__()
        self.parts = [make_generator(spec) for spec in parts.split("+")] if isinstance(parts, str) else list(parts)
        if len(self.parts) < 2:
            raise ValueError(f"HybridGen needs at least two parts, but got {len(self.parts)}: {parts!r}.")
        self.check_counts(max_nodes=max_nodes)
        if not 0 <= min_probability <= 1:
            raise ValueError(f"HybridGen(min_probability={min_probability}): a probability is from 0 to 1.")
        for part in self.parts:
            if part.whole_draft_only or not part.seed_exact:
                reason = "must be verified whole" if part.whole_draft_only else "are sampled and verified by rejection"
                raise ValueError(f"{type(part).__name__}'s drafts {reason}: leave it out of HybridGen.")
        self.max_nodes = max_nodes
        self.min_probability = min_probability
        self.enough = enough
        self.prompt_logits = max(part.prompt_logits for part in self.parts)
        self.lossless = all(part.lossless for part in self.parts)
        self.lossy_choice = next((part.lossy_choice for part in self.parts if not part.lossless), None)

    def bind(self, model: PreTrainedModel) -> None:
        for part in self.parts:
            part.bind(model)
        self.hidden_layers = tuple(sorted({layer for part in self.parts for layer in part.hidden_layers}))

    def begin(self, input_ids: torch.Tensor, **call) -> None:
        for part in self.parts:
            part.stats = self.stats
            part.begin(input_ids, **call)

    def end(self) -> None:
        for part in self.parts:
            part.end()

    def observe(self, step: Step) -> None:
        for part in self.parts:
            hidden = step.hidden and tuple(step.hidden[self.hidden_layers.index(i)] for i in part.hidden_layers)
            self.stats.drafter = part.name
            part.observe(replace(step, hidden=hidden))
            self.stats.part("")
        self.stats.drafter = ""

    def draft(self, input_ids: torch.Tensor, *, max_depth: int) -> DraftTree:
        trees: list[DraftTree] = []
        for part in self.parts:
            self.stats.drafter = part.name
            trees.append(part.draft(input_ids, max_depth=max_depth))
            self.stats.part("")
            if sum(trees[-1].estimates[1:]) >= self.enough:
                break
        self.stats.drafter = ""
        merged = DraftTree.merged(
            trees, max_nodes=self.max_nodes, min_probability=self.min_probability, device=input_ids.device
        )
        self.stats.part("merge")
        return merged

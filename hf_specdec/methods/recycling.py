"""Token Recycling (Luo et al. 2024). The target's own runner-up tokens, seen at each token before, are drafted behind it again.

One row of successors per token id; a path through the rows is a draft. Costs a top-k of logits that are there anyway.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from hf_specdec.generator import SpecGenerator, Step
from hf_specdec.tree import DraftTree

TRUST = 0.75  # how much of a distribution carries over to the next place where its token stands
FLATTEN = 0.6  # exponent that flattens it, for the other context there


class RecyclingGen(SpecGenerator):
    """Drafts from a table of successors: for each token id, the target's top-k when it last stood at that token.

    The published method grows one fixed tree of 80 nodes; here the nodes most likely to be accepted are taken, by the
    probabilities the target gave them, so that the tree can be as small as the device's block costs make it pay.

    Args:
        max_nodes (`int`): largest tree, the root included.
        max_depth (`int`): longest path.
        min_probability (`float`): least estimated probability of a node.
        top_k (`int`): successors kept per token.
        read_prompt (`int`): prompt tokens, from the end, whose successors the prefill notes as well.
        keep_table (`bool`):
            Keep the table from one call to the next with the same model (as published), which favours later prompts.

    Raises:
        ValueError: if a count is below 1.
    """

    name = "recycling"

    def __init__(
        self,
        *,
        max_nodes: int = 32,
        max_depth: int = 6,
        min_probability: float = 0.012,
        top_k: int = 8,
        read_prompt: int = 512,
        keep_table: bool = False,
    ):
        super().__init__()
        self.check_counts(max_nodes=max_nodes, max_depth=max_depth, top_k=top_k, read_prompt=read_prompt)
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.min_probability = min_probability
        self.top_k = top_k
        self.prompt_logits = read_prompt
        self.keep_table = keep_table
        self.successors: dict[int, tuple[list[int], list[float]]] = {}

    def attach(self, model: PreTrainedModel) -> None:
        self.successors = {}  # another model's ids may mean other tokens, or be none of this one's

    def begin(self, input_ids: torch.Tensor, **call) -> None:
        if self.keep_table and self.successors:
            self.stats.notes.append(f"successor table kept warm: {len(self.successors)} tokens from earlier calls")
        if not self.keep_table:
            self.successors = {}
        self.prompt: list[int] | None = input_ids[0, -self.prompt_logits :].tolist()

    def observe(self, step: Step) -> None:
        if step.logits is not None:
            tokens = step.tree.host[0] if self.prompt is None else self.prompt[-len(step.logits) :]
            self.note(tokens, step.logits[-len(tokens) :] if tokens else step.logits[:0])
        self.prompt = None
        self.stats.part("table")

    def note(self, tokens: list[int], logits: torch.Tensor) -> None:
        """Writes the successors of tokens, given the logits `(n, v)` behind them; later ones replace earlier ones."""
        # shares among the k alone, in which the rest of the distribution cancels
        best, ids = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)  # [n, k]
        shares = TRUST * (FLATTEN * best.float()).softmax(dim=-1)
        for token, row, share in zip(tokens, ids.tolist(), shares.tolist(), strict=True):
            self.successors[token] = (row, share)

    def draft(self, input_ids: torch.Tensor, *, max_depth: int) -> DraftTree:
        root = int(input_ids[0, -1])
        tree = DraftTree.best_first(
            root,
            root,
            self.following,
            max_nodes=self.max_nodes,
            max_depth=min(self.max_depth, max_depth),
            min_probability=self.min_probability,
            device=input_ids.device,
        )
        self.stats.part("tree")
        return tree

    def following(self, token: int) -> Iterator[tuple[int, float, int]]:
        """The noted successors of a token; each is its own state."""
        for successor, share in zip(*self.successors.get(token, ((), ())), strict=True):
            yield successor, share, successor

"""PLD: prompt lookup decoding (Saxena 2023). What followed the last words when they stood in the text before is drafted.

Costs next to nothing, and pays wherever the answer quotes: summaries, retrieval, code, translations of lists.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from itertools import accumulate

import torch

from hf_specdec.generator import SpecGenerator, Step
from hf_specdec.tree import DraftTree

# how often what followed a match of so many tokens follows again, measured on the embedded model's answers to training
# prompts; longer matches count like the last
REPEATS = (0.0, 0.3, 0.5, 0.6, 0.68, 0.75, 0.8, 0.84, 0.88, 0.91, 0.93)


class PLDGen(SpecGenerator):
    """Looks the text's last n-gram up in the text itself, longest first, and drafts what followed it there.

    Several matches are merged into one tree, the most recent first. The longer the match, the more is drafted behind it:
    4 tokens for a match of one token, doubling with every further token matched. The published method is
    `PLDGen(max_ngram=3, num_draft_tokens=10, num_matches=1, most_recent=False, length_by_match=False)`.

    Args:
        max_ngram (`int`): longest n-gram to look up.
        num_draft_tokens (`int`): longest continuation to draft.
        num_matches (`int`): matches to merge into the tree; 1 drafts chains.
        most_recent (`bool`): prefer the latest match, and draft on a text that repeats itself; else the earliest.
        length_by_match (`bool`): draft less behind short matches; else always `num_draft_tokens`.

    Raises:
        ValueError: if a count is below 1.
    """

    name = "pld"

    def __init__(
        self,
        *,
        max_ngram: int = 3,
        num_draft_tokens: int = 20,
        num_matches: int = 2,
        most_recent: bool = True,
        length_by_match: bool = True,
    ):
        super().__init__()
        self.check_counts(max_ngram=max_ngram, num_draft_tokens=num_draft_tokens, num_matches=num_matches)
        self.max_ngram = max_ngram
        self.num_draft_tokens = num_draft_tokens
        self.num_matches = num_matches
        self.most_recent = most_recent
        self.length_by_match = length_by_match
        self.chain_only = num_matches == 1
        self.max_nodes = 1 + num_draft_tokens

    def begin(self, input_ids: torch.Tensor, **call) -> None:
        self.text: list[int] = []
        self.ends: dict[tuple[int, ...], list[int]] = defaultdict(
            list
        )  # n-gram -> where it ended before, in text order
        self.read(input_ids[0].tolist())

    def observe(self, step: Step) -> None:
        self.read(step.tokens)

    def read(self, tokens: list[int]) -> None:
        """Appends tokens to the text and indexes the n-grams that end before each of them."""
        for token in tokens:
            end = len(self.text)
            for n in range(1, min(self.max_ngram, end) + 1):
                self.ends[tuple(self.text[end - n :])].append(end)
            self.text.append(token)

    def draft(self, input_ids: torch.Tensor, *, max_depth: int) -> DraftTree:
        paths, probabilities = [], []
        for end, matched in self.matches():
            length = min(2 ** (matched + 1), self.num_draft_tokens) if self.length_by_match else self.num_draft_tokens
            paths.append(self.continuation(end, min(length, max_depth), matched=matched))
            trust = (REPEATS[min(matched + i, len(REPEATS) - 1)] for i in range(len(paths[-1])))
            probabilities.append(list(accumulate(trust, operator.mul)))
        return DraftTree.from_paths(
            self.text[-1], paths, max_nodes=self.max_nodes, device=input_ids.device, probabilities=probabilities
        )

    def matches(self) -> list[tuple[int, int]]:
        """Where the text's last n-grams ended before, and how many tokens match there, best first."""
        found: dict[int, int] = {}
        for n in range(min(self.max_ngram, len(self.text) - 1), 0, -1):
            ends = self.ends.get(tuple(self.text[-n:]), [])
            for end in reversed(ends) if self.most_recent else ends:
                if len(found) == self.num_matches:
                    return list(found.items())
                if end not in found:
                    found[end] = self.matched(end, n)
        return list(found.items())

    def continuation(self, end: int, length: int, *, matched: int) -> list[int]:
        """What followed `end`. A text whose last tokens repeat up to its end is drafted on, however short their period."""
        tokens = self.text[end : end + length]
        if self.most_recent and len(tokens) < length and len(tokens) <= matched:
            tokens = (tokens * (length // len(tokens) + 1))[:length]
        return tokens

    def matched(self, end: int, n: int) -> int:
        """Length of the match that ends at `end`, known to be at least `n`; counted only as far as it matters."""
        period = len(self.text) - end
        matters = period if self.most_recent and period < self.num_draft_tokens else 0
        while n < matters or 2 ** (n + 1) < self.num_draft_tokens:
            if n == end or self.text[end - n - 1] != self.text[-n - 1]:
                break
            n += 1
        return n

"""SAM: suffix-automaton decoding (Hu et al. 2024). The longest suffix of the text that stood in it before leads the draft.

The automaton knows every earlier context of any length with its count, so the tree holds what followed most often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from hf_specdec.datastore import Datastore
from hf_specdec.generator import SpecGenerator, Step
from hf_specdec.methods.pld import REPEATS
from hf_specdec.methods.rest import RESTGen
from hf_specdec.tree import DraftTree

COUNTED_LINKS = 32  # suffixes of the text whose counts one token updates, longest first


class SuffixAutomaton:
    """All substrings of a growing token sequence, with how often each occurred; amortised O(1) per token.

    A state stands for the substrings that end at the same places; its link, for the longest suffix that ends at more.
    """

    def __init__(self):
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.count: list[int] = [0]
        self.last = 0  # the state of the whole sequence

    def extend(self, token: int) -> None:
        """Appends a token (Blumer et al. 1985)."""
        new, state = self.add({}, 0, self.length[self.last] + 1, 0), self.last
        while state != -1 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state != -1:
            old = self.next[state][token]
            if self.length[old] == self.length[state] + 1:
                self.link[new] = old
            else:  # the shorter substrings of `old` now end at one place more: they get a state of their own
                split = self.add(dict(self.next[old]), self.link[old], self.length[state] + 1, self.count[old])
                while state != -1 and self.next[state].get(token) == old:
                    self.next[state][token] = split
                    state = self.link[state]
                self.link[old] = self.link[new] = split
        self.last = state = new
        for _ in range(COUNTED_LINKS):
            if state == 0:
                break
            self.count[state] += 1
            state = self.link[state]

    def add(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1

    def suffixes(self, state: int, matched: int, *, limit: int) -> list[tuple[int, int]]:
        """The longest matched suffix that ends at `state` and shorter ones, as (state, length)."""
        found = []
        while state > 0 and len(found) < limit:
            found.append((state, matched))
            state = self.link[state]
            matched = self.length[state]
        return found


class SAMGen(SpecGenerator):
    """Drafts what most often followed the longest earlier occurrences of the text's end, as a tree.

    A token's probability mixes the counts behind the longest match with those behind its shorter suffixes, each trusted as
    far as matches of its length were seen to repeat. Drafts therefore grow with the match, and are empty without one.

    Args:
        max_nodes (`int`): largest tree, the root included.
        max_depth (`int`): longest path.
        min_probability (`float`): least estimated probability of a node.
        num_suffixes (`int`): how many match lengths to mix.
        corpus (`Datastore` or `str`, *optional*):
            Texts to search as well: a datastore, its folder or Hub id, or "embedded", the one that ships. What it drafts is
            merged in by estimated probability.

    Raises:
        ValueError: if a count is below 1; at `bind`, if the corpus was built with another tokenizer.
    """

    name = "sam"

    def __init__(
        self,
        *,
        max_nodes: int = 24,
        max_depth: int = 20,
        min_probability: float = 0.04,
        num_suffixes: int = 4,
        corpus: Datastore | str | None = None,
    ):
        super().__init__()
        self.check_counts(max_nodes=max_nodes, max_depth=max_depth, num_suffixes=num_suffixes)
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.min_probability = min_probability
        self.num_suffixes = num_suffixes
        self.corpus = None
        if corpus is not None:
            sizes = dict(max_nodes=max_nodes, min_probability=min_probability, min_match=1)
            self.corpus = RESTGen(None if corpus == "embedded" else corpus, **sizes)

    def bind(self, model: PreTrainedModel) -> None:
        if self.corpus is not None:
            self.corpus.bind(model)

    def begin(self, input_ids: torch.Tensor, **call) -> None:
        self.text = SuffixAutomaton()
        self.read(input_ids[0].tolist())
        if self.corpus is not None:
            self.corpus.stats = self.stats
            self.corpus.begin(input_ids)

    def observe(self, step: Step) -> None:
        self.read(step.tokens)
        if self.corpus is not None:
            self.corpus.observe(step)

    def read(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text."""
        for token in tokens:
            self.text.extend(token)
            self.root = token

    def draft(self, input_ids: torch.Tensor, *, max_depth: int) -> DraftTree:
        state = self.text.link[self.text.last]  # the longest suffix that also ends somewhere else
        sizes = dict(max_nodes=self.max_nodes, min_probability=self.min_probability, device=input_ids.device)
        tree = DraftTree.best_first(
            self.root,
            self.text.suffixes(state, self.text.length[state], limit=self.num_suffixes),
            lambda suffixes: following(self.text, suffixes),
            max_depth=min(self.max_depth, max_depth),
            **sizes,
        )
        self.stats.part("automaton")
        if self.corpus is None:
            return tree
        tree = DraftTree.merged([tree, self.corpus.draft(input_ids, max_depth=max_depth)], **sizes)
        self.stats.part("merge")
        return tree


def following(
    automaton: SuffixAutomaton, suffixes: list[tuple[int, int]]
) -> Iterator[tuple[int, float, list[tuple[int, int]]]]:
    """Each token seen behind the suffixes, longest first: its mixed probability and the suffixes it continues."""
    probabilities: dict[int, float] = {}
    continued: dict[int, list[tuple[int, int]]] = {}
    left = 1.0  # probability not given to longer matches
    for state, matched in suffixes:
        total = sum(automaton.count[child] for child in automaton.next[state].values())
        if not total:
            continue
        trust = REPEATS[min(matched, len(REPEATS) - 1)]
        for token, child in automaton.next[state].items():
            share = left * trust * automaton.count[child] / total
            probabilities[token] = probabilities.get(token, 0.0) + share
            continued.setdefault(token, []).append((child, matched + 1))
        left *= 1 - trust
    for token, probability in probabilities.items():
        yield token, probability, continued[token]

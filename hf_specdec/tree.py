"""Tree: what a generator drafts. Tokens and parents; the ancestor matrix, depths and positions follow from them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TypeVar

import torch

State = TypeVar("State")


class DraftTree:
    """Drafted tokens as a tree whose node 0, the root, is the last committed token.

    The root is already in the text and never counts as drafted. Every other node comes after its parent, siblings carry
    different tokens, and among siblings the more likely one comes first. A chain is a tree of width one.

    Args:
        tokens (`torch.Tensor` of shape `(n,)`, int64): token of each node, the root's included.
        parents (`torch.Tensor` of shape `(n,)`, int64): index of each node's parent, -1 for the root.
        q (`torch.Tensor` of shape `(n, v)`, *optional*):
            Only for drafts *sampled* from a distribution: row i is the distribution the children of node i were drawn
            from, without replacement and in their order. Deterministic drafts (top-k, lookup) leave it out: reporting a
            softmax they were not drawn from would bias the output.

    Attributes:
        probabilities (`list[float]` or `torch.Tensor` of shape `(n,)`, *optional*):
            The generator's estimate, for each node, that it will be accepted. It steers which drafts are kept, never what
            is accepted. A hybrid takes None for certainty.
    """

    probabilities: list[float] | torch.Tensor | None = None

    def __init__(self, tokens: torch.Tensor, parents: torch.Tensor, *, q: torch.Tensor | None = None):
        assert tokens.dim() == 1 and tokens.shape == parents.shape and len(tokens) > 0, (tokens.shape, parents.shape)
        self.tokens = tokens
        self.parents = parents
        self.q = q

    @classmethod
    def from_lists(cls, tokens: Sequence[int], parents: Sequence[int], *, device: torch.device | str) -> DraftTree:
        """The tree of nodes listed on the host, which then need not be read back from the device."""
        tree = cls(torch.tensor(tokens, device=device), torch.tensor(parents, device=device))
        tree.host = (list(tokens), list(parents))
        return tree

    @classmethod
    def chain(cls, tokens: Sequence[int], *, device: torch.device | str) -> DraftTree:
        """The tree of width one whose root is `tokens[0]`."""
        return cls.from_lists(tokens, range(-1, len(tokens) - 1), device=device)

    @classmethod
    def from_paths(
        cls,
        root: int,
        paths: Sequence[Sequence[int]],
        *,
        max_nodes: int,
        device: torch.device | str,
        probabilities: Sequence[Sequence[float]] | None = None,
    ) -> DraftTree:
        """The tree that holds `paths` (earlier ones are preferred) under `root`, shared prefixes merged.

        Args:
            max_nodes (`int`): size to stop at, the root included; what comes first in `paths` is kept.
            probabilities (*optional*): for each token of each path, that it will be accepted; the highest counts.
        """
        tokens, parents, likely, children = [root], [-1], [1.0], {}
        for number, path in enumerate(paths):
            node = 0
            for i, token in enumerate(path):
                child = children.get((node, token))
                if child is None:
                    if len(tokens) == max_nodes:
                        break
                    child = children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                    likely.append(0.0)
                if probabilities is not None:
                    likely[child] = max(likely[child], probabilities[number][i])
                node = child
        tree = cls.from_lists(tokens, parents, device=device)
        tree.probabilities = likely if probabilities is not None else None
        return tree

    @classmethod
    def merged(
        cls, trees: Sequence[DraftTree], *, max_nodes: int, min_probability: float, device: torch.device | str
    ) -> DraftTree:
        """The nodes of several trees with one root that are most likely to be accepted; the highest estimate counts."""
        tokens, parents, likely, depths, children = [trees[0].host[0][0]], [-1], [1.0], [0], {}
        for tree in trees:
            places = [0]
            for token, parent, probability in zip(*tree.host, tree.estimates, strict=True):
                if parent < 0:
                    continue
                place = children.setdefault((places[parent], token), len(tokens))
                if place == len(tokens):
                    tokens.append(token)
                    parents.append(places[parent])
                    likely.append(0.0)
                    depths.append(depths[places[parent]] + 1)
                likely[place] = max(likely[place], probability)
                places.append(place)
        # a parent is at least as likely as its child and less deep, so it comes first and is kept with it
        order = sorted(range(len(tokens)), key=lambda node: (-likely[node], depths[node], node))
        order = [node for node in order[:max_nodes] if likely[node] >= min_probability]
        place = {node: i for i, node in enumerate(order)}
        tree = cls.from_lists([tokens[i] for i in order], [place.get(parents[i], -1) for i in order], device=device)
        tree.probabilities = [likely[i] for i in order]
        return tree

    @classmethod
    def best_first(
        cls,
        root: int,
        state: State,
        expand: Callable[[State], Iterable[tuple[int, float, State]]],
        *,
        max_nodes: int,
        max_depth: int,
        min_probability: float,
        device: torch.device | str,
    ) -> DraftTree:
        """The tree of the nodes most likely to be accepted, a node's probability being the product along its path.

        Args:
            state: whatever `expand` needs to know at the root.
            expand (`Callable`): state -> (token, probability given the parent, state) of each child, tokens distinct.
            max_nodes (`int`): size to stop at, the root included.
            max_depth (`int`): longest path.
            min_probability (`float`): nodes less likely than this are left out.
        """
        tokens, parents, probabilities = [root], [-1], [1.0]
        heap: list[tuple[float, int, int, int, int, State]] = []  # -probability, order of arrival, parent, depth, ...
        arrived = 0
        node, depth, probability = 0, 0, 1.0
        while True:
            if depth < max_depth:
                for token, conditional, child in expand(state):
                    if probability * conditional >= min_probability:
                        arrived += 1
                        heapq.heappush(heap, (-probability * conditional, arrived, node, depth + 1, token, child))
            if not heap or len(tokens) == max_nodes:
                break
            negative, _, parent, depth, token, state = heapq.heappop(heap)
            node, probability = len(tokens), -negative
            tokens.append(token)
            parents.append(parent)
            probabilities.append(probability)
        tree = cls.from_lists(tokens, parents, device=device)
        tree.probabilities = probabilities
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def host(self) -> tuple[list[int], list[int]]:
        """Tokens and parents as Python lists (one read from the device, where they were not made on the host)."""
        tokens, parents = torch.stack([self.tokens, self.parents]).tolist()
        return tokens, parents

    @cached_property
    def estimates(self) -> list[float]:
        """`probabilities` as a list (one read from the device, where they were not made on the host); 1 without them."""
        if isinstance(self.probabilities, torch.Tensor):
            return self.probabilities.tolist()
        return self.probabilities or [1.0] * len(self)

    def read_with(self, choices: torch.Tensor) -> list[int]:
        """`choices` `(n,)` as a list, in one read from the device together with the nodes if those are there too."""
        if "host" in self.__dict__:
            return choices.tolist()
        tokens, parents, listed = torch.stack([self.tokens, self.parents, choices.to(self.tokens.device)]).tolist()
        self.host = (tokens, parents)
        return listed

    def move_to(self, device: torch.device) -> None:
        """Moves the nodes, and what was derived from them, to a device."""
        for name in ("tokens", "parents", "ancestors", "depths"):
            if name in vars(self):
                setattr(self, name, getattr(self, name).to(device))

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Nodes from the root along `tokens`, as far as they were drafted."""
        path = [0]
        for token in tokens:
            nodes = [i for i, parent in enumerate(self.host[1]) if parent == path[-1] and self.host[0][i] == token]
            if not nodes:
                break
            path.append(nodes[0])
        return path

    def children(self, node: int) -> list[int]:
        """Tokens of a node's children, in their order."""
        tokens, parents = self.host
        return [token for token, parent in zip(tokens, parents, strict=True) if parent == node]

    @property
    def depth(self) -> int:
        """Length of the longest path, the root not counted."""
        depths = [0]
        for parent in self.host[1][1:]:
            depths.append(depths[parent] + 1)
        return max(depths)

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """Boolean matrix `(n, n)`: entry (i, j) says whether node j is node i or lies above it."""
        n = len(self)
        if n == 1 or ("host" in self.__dict__ and self.is_chain):
            return torch.ones(n, n, dtype=torch.bool, device=self.tokens.device).tril()
        reach = torch.eye(n, device=self.tokens.device)  # [n, n]
        reach[torch.arange(1, n, device=self.tokens.device), self.parents[1:]] = 1
        for _ in range((n - 1).bit_length()):  # each squaring doubles how far up a row reaches
            reach = (reach @ reach).clamp_(max=1)
        return reach.bool()

    @cached_property
    def depths(self) -> torch.Tensor:
        """Number of drafted tokens from the root to each node, `(n,)` int64; 0 for the root."""
        return self.ancestors.sum(-1) - 1

    @property
    def is_chain(self) -> bool:
        """Whether every node's parent is the node before it."""
        return self.host[1] == list(range(-1, len(self) - 1))

    def first_path(self) -> list[int]:
        """Nodes of the preferred chain: from the root, always the first child."""
        path, parents = [0], self.host[1]
        for node, parent in enumerate(parents):
            if parent == path[-1]:
                path.append(node)
        return path

    def select(self, nodes: Sequence[int]) -> DraftTree:
        """The chain of `nodes`, each the parent of the next, with the draft distributions they were drawn from."""
        chain = DraftTree.chain([self.host[0][node] for node in nodes], device=self.tokens.device)
        chain.q = None if self.q is None else self.q[torch.tensor(nodes, device=self.q.device)]
        return chain

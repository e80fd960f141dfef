"""Tree: what a generator drafts. Tokens and parents; the ancestor matrix, depths and positions follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch


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
    """

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
        cls, root: int, paths: Sequence[Sequence[int]], *, max_nodes: int, device: torch.device | str
    ) -> DraftTree:
        """The tree that holds `paths` (earlier ones are preferred) under `root`, shared prefixes merged.

        Args:
            max_nodes (`int`): size to stop at, the root included; what comes first in `paths` is kept.
        """
        tokens, parents, children = [root], [-1], {}
        for path in paths:
            node = 0
            for token in path:
                child = children.get((node, token))
                if child is None:
                    if len(tokens) == max_nodes:
                        break
                    child = children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child
        return cls.from_lists(tokens, parents, device=device)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def host(self) -> tuple[list[int], list[int]]:
        """Tokens and parents as Python lists (one read from the device, where they were not made on the host)."""
        tokens, parents = torch.stack([self.tokens, self.parents]).tolist()
        return tokens, parents

    def read_with(self, choices: torch.Tensor) -> list[int]:
        """`choices` `(n,)` as a list, in one read from the device together with the nodes if those are there too."""
        if "host" in self.__dict__:
            return choices.tolist()
        tokens, parents, listed = torch.stack([self.tokens, self.parents, choices.to(self.tokens.device)]).tolist()
        self.host = (tokens, parents)
        return listed

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
        if n == 1:
            return torch.ones(1, 1, dtype=torch.bool, device=self.tokens.device)
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

"""Draft stage, retrieval: the tree of the continuations that occur most often."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Retrieved(NamedTuple):
    """A drafted tree without its root, the heaviest node first, so that every beginning of it is a tree as well.

    Args:
        tokens (`list[int]`): token of each node.
        parents (`list[int]`): index of each node's parent, -1 where that is the context's last token.
        counts (`list[int]`): continuations that run through each node; siblings come by falling count.
        match_length (`int`): last tokens of the context that were found, 0 for none.
        num_continuations (`int`): continuations counted; `counts[i] / num_continuations` estimates a probability.
    """

    tokens: list[int]
    parents: list[int]
    counts: list[int]
    match_length: int
    num_continuations: int


def heaviest(
    continuations: np.ndarray, *, length: int, separator: bytes, max_nodes: int
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and counts of the heaviest nodes in the trie of the sorted byte strings `continuations` [m].

    In sorted order the continuations through one node are one run of rows. So a node is a (depth, first row), its
    count is the length of the run, and one pass over the matrix counts every node of every depth. Ties go to the
    shallower node, then to the lower ids.
    """
    m, dtype = len(continuations), np.dtype(f"u{len(separator)}")
    ids = np.ascontiguousarray(continuations.view(dtype).reshape(m, length).T)  # [length, m], bytes as they are stored
    begins = np.ones(ids.shape, bool)  # where a row differs from the one before it, at this depth or above
    np.logical_or.accumulate(ids[:, 1:] != ids[:, :-1], axis=0, out=begins[:, 1:])
    ended = np.logical_or.accumulate(ids == np.frombuffer(separator, dtype), axis=0)

    nodes = np.flatnonzero(begins)  # depth * m + first row
    counts = np.diff(nodes, append=ids.size)
    alive = ~ended.ravel()[nodes]
    nodes, counts = nodes[alive], counts[alive]
    order = nodes - counts * ids.size  # ascending: by falling count, then depth, then ids; no two are equal
    if len(order) > max_nodes:
        best = np.argpartition(order, max_nodes - 1)[:max_nodes]
        nodes, counts, order = nodes[best], counts[best], order[best]
    order = np.argsort(order)
    nodes, counts = nodes[order], counts[order]

    # A parent counts no less than its child, so it was kept: the last node to begin at or before the child's row.
    by_place = np.argsort(nodes)
    parents = by_place[np.searchsorted(nodes[by_place], nodes - m, side="right") - 1]
    parents[nodes < m] = -1
    tokens = ids.ravel()[nodes].view(dtype.newbyteorder(">"))
    return tokens.tolist(), parents.tolist(), counts.tolist()

"""The tree: how drafts are put together, and what follows from tokens and parents."""

import operator
import random
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from hf_specdec import DraftTree
from hf_specdec.target import Target


def random_parents(n, seed):
    draw = random.Random(seed)
    return [-1, *(draw.randrange(i) for i in range(1, n))]


@pytest.mark.parametrize("n", [1, 2, 5, 17, 33, 64])
def test_ancestors_and_depths_are_those_of_the_parents(n):
    parents = random_parents(n, seed=n)
    tree = DraftTree(torch.arange(n), torch.tensor(parents))
    for node in range(n):
        above, i = set(), node
        while i != -1:
            above.add(i)
            i = parents[i]
        assert set(tree.ancestors[node].nonzero().flatten().tolist()) == above
        assert tree.depths[node] == len(above) - 1
    assert tree.depth == tree.depths.max()


def test_a_deep_chain_sees_all_of_itself():
    tree = DraftTree.chain(range(64), device="cpu")
    assert tree.is_chain
    assert torch.equal(tree.ancestors, torch.ones(64, 64).tril().bool())


def test_paths_share_prefixes_and_siblings_differ():
    tree = DraftTree.from_paths(9, [[1, 2, 3], [1, 2, 4], [5], [1, 2, 3]], max_nodes=20, device="cpu")
    assert tree.host == ([9, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 2, 0])
    assert tree.first_path() == [0, 1, 2, 3]
    assert tree.follow([1, 2, 4, 7]) == [0, 1, 2, 4]


def test_moved_trees_take_along_what_was_derived_from_them():
    tree = DraftTree.from_paths(9, [[1, 2], [3]], max_nodes=9, device="cpu")
    assert tree.depths.tolist() == [0, 1, 2, 1]
    tree.move_to(torch.device("meta"))
    assert {item.device.type for item in (tree.tokens, tree.parents, tree.ancestors, tree.depths)} == {"meta"}
    assert tree.host == ([9, 1, 2, 3], [-1, 0, 1, 0])


@pytest.mark.parametrize("tree_capable", [True, False])
@pytest.mark.parametrize("paths", [[[1, 2]], [[1, 2], [3]]])
def test_what_is_verified_lies_where_the_target_is(paths, tree_capable):
    """A draft made where the prompt is, which may be elsewhere, is moved; its object stays the one that was drafted."""
    target = SimpleNamespace(tree_capable=tree_capable, model=SimpleNamespace(device=torch.device("meta")))
    tree = DraftTree.from_paths(9, paths, max_nodes=9, device="cpu")
    fitted = Target.fit(target, tree)
    assert fitted.tokens.device.type == fitted.parents.device.type == "meta"
    assert (fitted is tree) == (tree_capable or len(paths) == 1) and fitted.host[0][:3] == [9, 1, 2]


def test_estimates_are_the_probabilities_wherever_they_are_and_without_them_certainty():
    for probabilities, estimates in ((None, [1, 1]), ([1.0, 0.1], [1.0, 0.1]), (torch.tensor([1, 0.5]), [1, 0.5])):
        tree = DraftTree.chain([9, 1], device="cpu")
        tree.probabilities = probabilities
        assert tree.estimates == estimates


def test_paths_stop_at_the_size_asked_for():
    assert len(DraftTree.from_paths(9, [[1, 2, 3], [4, 5, 6]], max_nodes=5, device="cpu")) == 5


def best_by_enumeration(law, depth, count):
    """The `count` likeliest paths of a table token -> {token: probability}, by listing all."""
    paths, layer = [], [((0,), 1.0)]
    for _ in range(depth):
        layer = [((*path, t), p * q) for path, p in layer for t, q in law[path[-1]].items()]
        paths += layer
    return sorted(p for _, p in sorted(paths, key=lambda item: -item[1])[:count])


def test_best_first_takes_the_likeliest_nodes():
    draw = random.Random(0)
    law = {}
    for token in range(6):
        weights = [draw.random() for _ in range(6)]
        law[token] = {t: w / sum(weights) for t, w in enumerate(weights)}
    tree = DraftTree.best_first(
        0,
        0,
        lambda token: [(t, p, t) for t, p in law[token].items()],
        max_nodes=15,
        max_depth=3,
        min_probability=0.0,
        device="cpu",
    )
    assert sorted(tree.probabilities[1:]) == pytest.approx(best_by_enumeration(law, 3, 14))
    assert tree.depth <= 3
    assert all(tree.probabilities[i] <= tree.probabilities[p] for i, p in enumerate(tree.host[1]) if p >= 0)


def test_merging_keeps_the_likeliest_nodes_of_both_with_their_parents():
    one = DraftTree.from_paths(9, [[1, 2]], max_nodes=9, device="cpu", probabilities=[[0.9, 0.5]])
    two = DraftTree.from_paths(9, [[1, 3], [4]], max_nodes=9, device="cpu", probabilities=[[0.6, 0.55], [0.1]])
    merged = DraftTree.merged([one, two], max_nodes=4, min_probability=0.0, device="cpu")
    assert merged.host == ([9, 1, 3, 2], [-1, 0, 1, 1])
    assert merged.probabilities == [1.0, 0.9, 0.55, 0.5]
    pruned = DraftTree.merged([one, two], max_nodes=9, min_probability=0.2, device="cpu")
    assert 4 not in pruned.host[0]


@pytest.mark.parametrize("seed", range(20))
def test_merged_trees_hold_parents_before_children(seed):
    draw = random.Random(seed)
    trees = []
    for _ in range(3):
        paths = [[draw.randrange(3) for _ in range(draw.randrange(1, 5))] for _ in range(4)]
        likely = [list(accumulate((draw.choice([1.0, 0.9, 0.5]) for _ in path), operator.mul)) for path in paths]
        trees.append(DraftTree.from_paths(7, paths, max_nodes=12, device="cpu", probabilities=likely))
    merged = DraftTree.merged(trees, max_nodes=6, min_probability=0.05, device="cpu")
    tokens, parents = merged.host
    assert parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert len({(parent, token) for parent, token in zip(parents, tokens, strict=True)}) == len(tokens)


def test_selecting_a_path_keeps_its_draft_distributions():
    tree = DraftTree(torch.tensor([9, 1, 2]), torch.tensor([-1, 0, 1]), q=torch.eye(3))
    chain = tree.select([0, 1])
    assert chain.host == ([9, 1], [-1, 0]) and torch.equal(chain.q, torch.eye(3)[:2])

"""PLD: drafts are what followed the text's last words before, by the rules its docstring states."""

from __future__ import annotations

import pytest
import torch
from tiny import generate, prompt, shared

from hf_specdec import PLDGen, Step
from hf_specdec.methods.pld import PLDGen as Published
from hf_specdec.tree import DraftTree


def drafted(text: list[int], *, max_depth: int = 50, **options) -> DraftTree:
    """The draft for a text read at once."""
    generator = PLDGen(**options)
    generator.begin(torch.tensor([text]))
    return generator.draft(torch.tensor([text]), max_depth=max_depth)


def chain(text: list[int], **options) -> list[int]:
    """The draft of one match, at full length."""
    return drafted(text, num_matches=1, length_by_match=False, **options).host[0][1:]


def reference(text: list[int], *, max_ngram, num_draft_tokens, num_matches, most_recent, length_by_match, max_depth):
    """The same draft, by comparing every place of the text: paths in order of preference."""
    places: list[int] = []
    for n in range(max_ngram, 0, -1):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[len(text) - n :]]
        for end in reversed(ends) if most_recent else ends:
            if end not in places:
                places.append(end)
    paths = []
    for end in places[:num_matches]:
        matched = 0
        while matched < end and text[end - 1 - matched] == text[-1 - matched]:
            matched += 1
        length = min(2 ** (matched + 1), num_draft_tokens) if length_by_match else num_draft_tokens
        path = text[end : end + min(length, max_depth)]
        while most_recent and matched >= len(text) - end and len(path) < min(length, max_depth):
            path.append([*text, *path][end + len(path)])
        paths.append(path)
    return DraftTree.from_paths(text[-1], paths, max_nodes=1 + num_draft_tokens, device="cpu")


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("length_by_match", [False, True])
@pytest.mark.parametrize(
    ("max_ngram", "num_draft_tokens", "num_matches"), [(3, 10, 1), (3, 20, 2), (5, 8, 4), (1, 1, 1)]
)
@pytest.mark.parametrize("max_depth", [1, 4, 50])
def test_drafts_equal_a_brute_force_reference(
    max_depth, max_ngram, num_draft_tokens, num_matches, most_recent, length_by_match
):
    """Over random texts of few tokens, read in pieces as the loop reads them."""
    options = dict(
        max_ngram=max_ngram,
        num_draft_tokens=num_draft_tokens,
        num_matches=num_matches,
        most_recent=most_recent,
        length_by_match=length_by_match,
    )
    source, drafts = torch.Generator().manual_seed(0), 0
    for vocab_size in (2, 3, 8):
        text = torch.randint(0, vocab_size, (60,), generator=source).tolist()
        generator = PLDGen(**options)
        generator.begin(torch.tensor([text[:7]]))
        for length in range(7, 60):
            tree = generator.draft(torch.tensor([text[:length]]), max_depth=max_depth)
            right = reference(text[:length], **options, max_depth=max_depth)
            assert tree.host == right.host
            assert len(tree) <= generator.max_nodes and tree.depth <= max_depth
            drafts += len(tree) > 1
            generator.observe(Step(tree, [0], [text[length]]))
    assert drafts > 100


def test_the_longest_match_comes_first():
    text = [1, 2, 3, 50, 60, 3, 70, 80, 9, 1, 2, 3]  # "1 2 3" was followed by 50, the later "3" by 70
    assert chain(text, num_draft_tokens=2) == [50, 60]
    assert chain(text, num_draft_tokens=2, max_ngram=1) == [70, 80]


def test_the_most_recent_match_comes_first():
    text = [1, 2, 50, 51, 1, 2, 60, 61, 1, 2]
    assert chain(text, num_draft_tokens=2) == [60, 61]
    assert chain(text, num_draft_tokens=2, most_recent=False) == [50, 51]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_text_that_repeats_itself_is_drafted_at_full_length_whatever_its_period(period):
    """Where all of a period was seen twice; one token that came again is no sign of it."""
    source = list(range(40, 40 + period))
    text = [1, 2, 3, *source * 4]
    assert chain(text, num_draft_tokens=12) == (source * 12)[:12]
    assert len(drafted(text)) > 12
    assert chain(text[-period - 1 :], num_draft_tokens=12) == (source * 12)[: period if period > 1 else 12]


def test_several_matches_share_one_tree():
    tree = drafted([1, 2, 7, 50, 1, 2, 7, 60, 9, 1, 2], num_matches=2, num_draft_tokens=10)
    tokens, parents = tree.host
    assert tokens[:2] == [2, 7] and tree.children(1) == [
        60,
        50,
    ]  # 7 once, what followed it twice, the recent one first
    assert parents[0] == -1


def test_longer_matches_draft_more():
    one = drafted([5, 1, 50, 51, 52, 53, 54, 55, 56, 57, 58, *range(60, 70), 6, 1], num_matches=1)
    two = drafted([5, 1, 50, 51, 52, 53, 54, 55, 56, 57, 58, *range(60, 70), 5, 1], num_matches=1)
    three = drafted([4, 5, 1, 50, 51, 52, 53, 54, 55, 56, 57, 58, *range(60, 70), 4, 5, 1], num_matches=1)
    assert [len(tree) - 1 for tree in (one, two, three)] == [4, 8, 16]


@pytest.mark.parametrize("text", [[1], [1, 2, 3, 4], [5, 6]])
def test_nothing_is_drafted_without_a_match(text):
    assert len(drafted(text)) == 1


def test_published_defaults_are_reachable():
    """PLD as published: n-grams of 3, 10 tokens, one match, the earliest; transformers' own lookup drafts the same."""
    from transformers.generation import PromptLookupCandidateGenerator

    published = dict(max_ngram=3, num_draft_tokens=10, num_matches=1, most_recent=False, length_by_match=False)
    stock = PromptLookupCandidateGenerator(
        num_output_tokens=10, max_matching_ngram_size=3, max_length=1000, vocab_size=97
    )
    source = torch.Generator().manual_seed(1)
    for _ in range(50):
        ids = torch.randint(0, 5, (1, 40), generator=source)
        candidates = stock.get_candidates(ids)[0][0, 40:].tolist()
        assert drafted(ids[0].tolist(), **published).host[0][1:] == candidates
    assert PLDGen(**published).chain_only and not PLDGen().chain_only


@pytest.mark.parametrize("option", ["max_ngram", "num_draft_tokens", "num_matches"])
@pytest.mark.parametrize("value", [0, -1])
def test_bad_options_are_named(option, value):
    with pytest.raises(ValueError, match=rf"{option}={value}"):
        PLDGen(**{option: value})


def test_no_more_than_the_set_number_is_drafted():
    model = shared(scale=4)
    ids = generate(model, prompt(9), max_new_tokens=100)
    for num_draft_tokens in (1, 2, 5):
        generator = Published(num_draft_tokens=num_draft_tokens)
        generate(model, ids, generator, max_new_tokens=30)
        assert max(generator.stats.drafted_lengths) == num_draft_tokens


def test_the_text_read_is_the_text_emitted():
    model, generator = shared(scale=4), PLDGen()
    text = generate(model, prompt(9), generator, max_new_tokens=60)
    assert (
        generator.text == text[0, : len(generator.text)].tolist() and len(generator.text) >= 68 - generator.max_nodes
    )

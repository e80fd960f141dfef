"""The training-free methods' own laws: what the automaton knows, what tables and windows hold, what hybrids merge."""

import random

import pytest
import torch
from tiny import generate, noisy, prompt, shared, stored_texts, tiny

from hf_specdec import (
    Datastore,
    HybridGen,
    LookaheadGen,
    PLDGen,
    RecyclingGen,
    RESTGen,
    SAMGen,
    SpecGenerator,
    SpSGen,
    make_generator,
)
from hf_specdec.generator import Step
from hf_specdec.methods.sam import SuffixAutomaton
from hf_specdec.tree import DraftTree


def longest_repeated_suffix(text):
    """Length of the longest end of a text that also ends earlier, by trying all."""
    for length in range(len(text) - 1, 0, -1):
        if any(text[i - length : i] == text[-length:] for i in range(length, len(text))):
            return length
    return 0


@pytest.mark.parametrize("seed", range(5))
def test_the_automaton_finds_the_longest_earlier_match_and_counts_what_follows(seed):
    draw = random.Random(seed)
    text, automaton = [], SuffixAutomaton()
    for _ in range(120):
        text.append(draw.randrange(3))
        automaton.extend(text[-1])
        state = automaton.link[automaton.last]
        length = automaton.length[state]
        assert length == longest_repeated_suffix(text)
        if length:
            ends = [i for i in range(length, len(text)) if text[i - length : i] == text[-length:]]
            seen = {token: sum(text[i] == token for i in ends) for token in {text[i] for i in ends}}
            counted = {token: automaton.count[child] for token, child in automaton.next[state].items()}
            assert counted == seen


def test_the_automaton_grows_linearly():
    automaton, draw = SuffixAutomaton(), random.Random(0)
    for _ in range(2000):
        automaton.extend(draw.randrange(20))
    assert len(automaton.next) < 2 * 2000


def test_a_corpus_drafts_beside_the_text_by_estimated_probability(tmp_path):
    texts = [[5, 6, 7, 8, 9, 10, 11]] * 3
    datastore = Datastore.build(texts, tmp_path / "texts", vocab_size=97, tokenizer_hash="tiny")
    ids = torch.tensor([[8, 50, 1, 2, 5, 6, 7, 8]])
    generator = SAMGen(corpus=datastore)
    generator.begin(ids)
    tree = generator.draft(ids, max_depth=3)
    assert len(tree.follow([9, 10, 11, 0])) == 4 and len(tree.follow([50, 0])) == 2
    assert tree.host[0][1] == 9, "four tokens matched in the corpus, one in the text"


def test_no_match_drafts_nothing():
    for generator in (PLDGen(), SAMGen(), RecyclingGen(), LookaheadGen(pool_from_prompt=False)):
        ids = torch.tensor([[1, 2, 3, 4]])
        generator.begin(ids)
        drafted = generator.draft(ids, max_depth=2)  # too near the end for a lookahead window
        assert len(drafted) == 1, type(generator).__name__


def test_recycling_notes_the_targets_runner_ups_and_drafts_them():
    generator = RecyclingGen(top_k=2, max_nodes=4, min_probability=0.0)
    generator.begin(torch.tensor([[3, 4]]))
    logits = torch.full((2, 10), -9.0)
    logits[0, [4, 5]] = torch.tensor([3.0, 2.0])  # behind 3
    logits[1, [3, 7]] = torch.tensor([3.0, 1.0])  # behind 4
    generator.observe(Step(DraftTree.chain([4], device="cpu"), [0], [3], logits=logits))
    tree = generator.draft(torch.tensor([[3, 4, 3]]), max_depth=4)
    assert tree.host[0][:2] == [3, 4] and set(tree.host[0]) <= {3, 4, 5, 7}
    assert generator.successors[4][0] == [3, 7]


def test_recycling_starts_cold_unless_told_and_says_so():
    model = shared()
    cold, warm = RecyclingGen(), RecyclingGen(keep_table=True)
    for generator in (cold, warm):
        generate(model, prompt(9), generator)
        first, noted = generator.stats, len(generator.successors)
        generate(model, prompt(9), generator)
        if generator is cold:
            assert generator.stats.drafted_lengths == first.drafted_lengths and not generator.stats.notes
        else:
            assert generator.stats.notes == [f"successor table kept warm: {noted} tokens from earlier calls"]
        generator.begin(prompt(9))
        assert bool(generator.successors) == (generator is warm)


def test_a_kept_table_is_not_taken_to_another_model():
    generator, other = RecyclingGen(keep_table=True), tiny(vocab_size=50)
    generate(shared(), prompt(9), generator)
    assert max(generator.successors) >= 50
    for notes in ([], ["successor table kept warm"]):
        ids = prompt(9, vocab_size=50)
        assert torch.equal(generate(other, ids, generator), generate(other, ids))
        assert [note[: len("successor table kept warm")] for note in generator.stats.notes] == notes
        assert max(generator.successors) < 50


def test_lookahead_cells_see_their_row_zero_and_their_column():
    """The window is a tree: cell (l, i) has i + l tokens of row 0 and column i above it (Fu et al. 2024, figure 5)."""
    generator = LookaheadGen(window=4, ngram=4, guesses=2, pool_from_prompt=False)
    generator.begin(torch.arange(20)[None])
    generator.rows = [[31, 32, 33], [41, 42, 43, 44], [51, 52, 53, 54]]
    tree = generator.draft(torch.tensor([[30]]), max_depth=50)
    tokens = tree.host[0]
    above = {
        tokens[node]: [tokens[i] for i in tree.ancestors[node].nonzero().flatten().tolist()]
        for node in range(len(tree))
    }
    assert above[33] == [30, 31, 32, 33]
    assert above[43] == [30, 31, 32, 43]
    assert above[54] == [30, 31, 32, 33, 44, 54]
    assert int(tree.depths[tokens.index(54)]) == 5


def test_lookahead_pools_the_columns_and_shifts_by_one():
    generator = LookaheadGen(window=3, ngram=3, guesses=2, pool_from_prompt=False)
    generator.begin(torch.arange(20)[None])
    generator.rows = [[31, 32], [41, 42, 43]]
    tree = generator.draft(torch.tensor([[30]]), max_depth=50)
    logits = torch.zeros(len(tree), 100)
    for cell, token in zip(generator.cells[-1], (61, 62, 63), strict=True):
        logits[cell, token] = 9
    generator.observe(Step(tree, [0], [70], logits=logits))
    assert {key: [list(rest) for rest in rests] for key, rests in generator.pool.items()} == {
        30: [[41, 61]],
        31: [[42, 62]],
        32: [[43, 63]],
    }
    assert generator.rows == [[42, 43], [61, 62, 63]]


def test_lookahead_keeps_the_youngest_guesses():
    generator = LookaheadGen(guesses=2)
    generator.begin(torch.tensor([[1]]))
    for ngram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7]):
        generator.add(ngram)
    assert list(generator.pool[1]) == [(2, 3), (6, 7)]


def test_rest_drafts_what_the_datastore_holds():
    model = shared()
    generator = RESTGen(stored_texts(model))
    text = generate(model, prompt(9, seed=1), max_new_tokens=30)
    assert torch.equal(generate(model, prompt(9, seed=1), generator, max_new_tokens=30), text)
    assert generator.stats.tokens_per_step > 1.5  # it holds this very text


def test_rest_refuses_a_smaller_vocabulary():
    store = stored_texts(shared())
    store.vocab_size, model = 120, shared()
    try:
        with pytest.raises(ValueError, match="120.*97|97.*120"):
            generate(model, prompt(9), RESTGen(store))
    finally:
        store.vocab_size = 97


def test_a_hybrid_accepts_what_either_part_would():
    model = shared()
    parts = [PLDGen(), SpSGen(noisy(model), num_draft_tokens=4)]
    both = HybridGen(parts, max_nodes=40, min_probability=0.0, enough=1e9)
    text = generate(model, prompt(9), max_new_tokens=60)
    assert torch.equal(generate(model, prompt(9), both, max_new_tokens=60), text)
    for part in parts:
        generate(model, prompt(9), part, max_new_tokens=60)
        assert both.stats.tokens_per_step >= part.stats.tokens_per_step - 0.05


class Sure(SpecGenerator):
    """Drafts that the last token comes once more, and says nothing of how likely that is."""

    max_nodes = 2

    def draft(self, input_ids, *, max_depth):
        last = int(input_ids[0, -1])
        return DraftTree.chain([last, last], device=input_ids.device)


def test_a_hybrid_takes_parts_that_estimate_nothing_to_be_sure():
    model, hybrid = shared(), HybridGen([SAMGen(), Sure()])
    assert torch.equal(generate(model, prompt(9), hybrid), generate(model, prompt(9)))
    assert min(hybrid.stats.drafted_lengths[:-1]) >= 1


def test_a_hybrid_refuses_parts_that_cannot_be_mixed():
    with pytest.raises(ValueError, match="at least two"):
        HybridGen([PLDGen()])
    with pytest.raises(ValueError, match="whole"):
        HybridGen([PLDGen(), LookaheadGen()])
    with pytest.raises(ValueError, match="rejection"):
        HybridGen([PLDGen(), SpSGen(shared(), draft_sampling=True)])


@pytest.mark.parametrize("make", [SAMGen, RecyclingGen, RESTGen, HybridGen])
def test_options_below_one_are_refused(make):
    with pytest.raises(ValueError, match=rf"{make.__name__}\(max_nodes=0\): it must be at least 1"):
        make(max_nodes=0)


@pytest.mark.parametrize(("option", "least"), [("window", 1), ("guesses", 1), ("ngram", 3)])
def test_sizes_of_a_lookahead_have_their_least(option, least):
    with pytest.raises(ValueError, match=rf"LookaheadGen\({option}={least - 1}\): it must be at least {least}"):
        LookaheadGen(**{option: least - 1})


@pytest.mark.parametrize("options", [{"max_depth": 65}, {"max_match": 1}, {"max_match": 3, "min_match": 4}])
def test_lengths_that_no_lookup_can_have_are_refused(options):
    with pytest.raises(ValueError, match="RESTGen.*at most"):
        RESTGen(**options)


@pytest.mark.parametrize("word", ["False", "false", "FALSE", "True", "true"])
def test_switches_of_a_spec_are_true_or_false_in_any_case(word):
    assert make_generator(f"recycling?keep_table={word}").keep_table is (word.lower() == "true")


@pytest.mark.parametrize("word", ["no", "off", "Fals", ""])
def test_what_is_neither_true_nor_false_is_refused(word):
    with pytest.raises(ValueError, match=f"keep_table={word} is neither true nor false"):
        make_generator(f"recycling?keep_table={word}")

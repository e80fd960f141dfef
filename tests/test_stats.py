"""Stats: exact where the draft is known, and always tied to the ids that were emitted."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import GENERATORS, Oracle, dealt, generate, make, prompt, shared

from hf_specdec import METHODS, DraftTree, SpecStats
from hf_specdec.stats import STAGES


def test_four_accepted_drafts_a_step_over_21_tokens():
    """The prefill emits 1 token; 4 steps emit 4 drafted tokens and a bonus token each."""
    text = generate(shared(), prompt(9), max_new_tokens=21)
    generator = Oracle(text[0].tolist(), 4)
    generate(shared(), prompt(9), generator, max_new_tokens=21)
    stats = generator.stats
    assert (stats.emitted, stats.steps, stats.drafted, stats.accepted) == (21, 4, 16, 16)
    assert stats.tokens_per_step == 5.0 and stats.accepted_per_step == 4.0
    assert stats.drafted_lengths == stats.draft_depths == stats.accepted_lengths == [4, 4, 4, 4]
    assert stats.conditional_acceptance == [1.0, 1.0, 1.0, 1.0]
    assert stats.from_draft == [False] + [True, True, True, True, False] * 4


def test_a_wrong_third_token():
    """2 of 4 drafted tokens are accepted: 3 tokens a step, 7 steps for 21 after the prefill's."""
    text = generate(shared(), prompt(9), max_new_tokens=22)
    generator = Oracle(text[0].tolist(), 4, wrong_at=2)
    generate(shared(), prompt(9), generator, max_new_tokens=22)
    stats = generator.stats
    assert (stats.emitted, stats.steps, stats.accepted) == (22, 7, 14)
    assert stats.tokens_per_step == 3.0 and stats.accepted_per_step == 2.0
    assert stats.drafted_lengths == [4, 4, 4, 4, 4, 4, 2]  # at the end no more is drafted than can be emitted
    assert stats.conditional_acceptance == [1.0, 1.0, 0.0]


def test_plain_decoding_counts_one_token_a_step():
    generator = Oracle([], 4)
    generate(shared(), prompt(9), generator, max_new_tokens=10)
    assert (generator.stats.emitted, generator.stats.steps, generator.stats.drafted) == (10, 9, 0)
    assert generator.stats.tokens_per_step == 1.0 and generator.stats.accepted_per_step == 0.0
    assert generator.stats.conditional_acceptance == []


def test_a_single_token_needs_no_step():
    generator = Oracle([], 4)
    generate(shared(), prompt(9), generator, max_new_tokens=1)
    assert (generator.stats.emitted, generator.stats.steps) == (1, 0)
    assert generator.stats.tokens_per_step == 1.0 and generator.stats.tokens_per_second == 0.0


def test_a_tree_counts_all_its_nodes_as_drafted_and_its_depth_as_positions():
    text = generate(shared(), prompt(9), max_new_tokens=21)
    generator = Oracle(text[0].tolist(), 4, decoys=2)
    generate(shared(), prompt(9), generator, max_new_tokens=21)
    stats = generator.stats
    assert stats.drafted_lengths == [12] * 4 and stats.draft_depths == stats.accepted_lengths == [4] * 4
    assert (stats.drafted, stats.accepted) == (48, 16)


@pytest.mark.parametrize(("eos_after", "do_sample", "name"), dealt([None, 6], [False, True], each=2))
def test_totals_tie_with_the_ids(eos_after, do_sample, name):
    model = shared()
    text = generate(model, prompt(9), do_sample=do_sample, max_new_tokens=30)
    eos = None if eos_after is None else int(text[0, 9 + eos_after])
    generator = make(name, model, text)
    made = generate(model, prompt(9), generator, do_sample=do_sample, max_new_tokens=30, eos_token_id=eos)
    stats = generator.stats
    assert stats.emitted == made.shape[1] - 9 == len(stats.from_draft)
    assert stats.accepted == sum(stats.from_draft) == sum(stats.accepted_lengths)
    assert stats.drafted == sum(stats.drafted_lengths)
    assert stats.steps == len(stats.drafted_lengths) == len(stats.accepted_lengths) == len(stats.draft_depths)
    ended_in_draft = stats.from_draft[-1]  # then the last step has no bonus token
    assert stats.emitted == 1 + stats.accepted + stats.steps - ended_in_draft
    for drafted, depth, accepted in zip(
        stats.drafted_lengths, stats.draft_depths, stats.accepted_lengths, strict=True
    ):
        assert 0 <= accepted <= depth <= drafted
    assert all(0 <= rate <= 1 for rate in stats.conditional_acceptance)


def test_drafted_tokens_are_marked_where_they_stand():
    text = generate(shared(), prompt(9), max_new_tokens=30)
    generator = Oracle(text[0].tolist(), 6, wrong_at=3)
    generate(shared(), prompt(9), generator, max_new_tokens=30)
    assert generator.stats.from_draft == [False] + [True, True, True, False] * 7 + [False]


def test_conditional_acceptance_of_a_trace_by_hand():
    """Ten steps with drafts of 3 (two of them of 1): position 1 accepted 7 of 10, then 4 of 6, then 1 of 4."""
    stats = SpecStats()
    for depth, accepted in [(3, 0), (3, 1), (3, 2), (3, 3), (3, 2), (3, 0), (1, 1), (1, 0), (3, 2), (3, 1)]:
        stats.record(DraftTree.chain(range(depth + 1), device="cpu"), range(accepted + 1), accepted=accepted)
    assert stats.conditional_acceptance == [7 / 10, 4 / 6, 1 / 4]
    assert stats.accepted == 12 and stats.drafted == 26 and stats.accepted_per_step == 1.2


def test_conditional_acceptance_ends_where_nothing_was_reached():
    stats = SpecStats()
    stats.record(DraftTree.chain(range(5), device="cpu"), [0, 1], accepted=1)
    assert stats.conditional_acceptance == [1.0, 0.0]


def test_in_a_tree_a_position_was_drafted_where_the_accepted_node_has_children():
    stats, tree = SpecStats(), DraftTree.from_paths(9, [[1, 2, 3], [4]], max_nodes=9, device="cpu")
    stats.record(tree, [0, 4], accepted=1)  # the short branch to its end: nothing was refused
    assert stats.conditional_acceptance == [1.0] and stats.draft_depths == [1]
    stats.record(tree, [0, 1], accepted=1)
    assert stats.conditional_acceptance == [1.0, 0.0] and stats.draft_depths == [1, 3]


@pytest.mark.parametrize("decoys", [0, 2])
def test_what_stands_behind_the_end_of_the_text_was_not_refused(decoys):
    text = generate(shared(), prompt(9), max_new_tokens=21)
    generator = Oracle(text[0].tolist(), 6, decoys=decoys)
    generate(shared(), prompt(9), generator, max_new_tokens=21, eos_token_id=int(text[0, 9 + 3]))
    assert generator.stats.accepted_lengths == generator.stats.draft_depths == [3]  # so pooled stats are right as well
    assert generator.stats.conditional_acceptance == [1.0] * 3


@pytest.mark.parametrize("name", GENERATORS)
def test_stats_round_trip_through_json(name):
    text = generate(shared(), prompt(9))
    generator = make(name, shared(), text)
    generate(shared(), prompt(9), generator)
    written = generator.stats.to_dict()
    read = SpecStats.from_dict(json.loads(json.dumps(written)))
    assert read == generator.stats and read.to_dict() == written
    assert {"tokens_per_step", "accepted_per_step", "conditional_acceptance", "tokens_per_second"} <= set(written)


def test_seconds_cover_the_whole_call():
    text = generate(shared(), prompt(9), max_new_tokens=100)
    generator = Oracle(text[0].tolist(), 4)
    generate(shared(), prompt(9), generator, max_new_tokens=100)
    stats = generator.stats
    assert set(stats.seconds) == set(STAGES) and all(second >= 0 for second in stats.seconds.values())
    assert stats.seconds["verify"] > 0 and stats.seconds["prefill"] > 0
    assert stats.total_seconds == pytest.approx(sum(stats.seconds.values()))
    assert stats.tokens_per_second == pytest.approx(99 / (stats.total_seconds - stats.seconds["prefill"]))


PARTS = {
    "eagle": {"head", "tree"},
    "medusa": {"head", "tree"},
    "kangaroo": {"layers", "head", "tree"},
    "sps": {"model"},
    "rest": {"retrieval", "tree"},
    "recycling": {"table", "tree"},
    "hybrid": {"sam", "recycling table", "recycling tree", "recycling", "merge"},
}


@pytest.mark.parametrize("name", METHODS)
def test_the_parts_of_drafting_are_parts_of_its_time(name):
    generator = make(name, shared())
    generate(shared(), prompt(9), generator)
    stats = generator.stats
    assert set(stats.seconds) == set(STAGES) and stats.seconds["draft"] > 0
    assert PARTS.get(name, set()) <= set(stats.draft_parts)
    assert all(seconds >= 0 for seconds in stats.draft_parts.values())
    assert sum(stats.draft_parts.values()) <= stats.seconds["draft"] * (1 + 1e-9)


def test_parts_wait_for_no_device(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    stats = SpecStats(synchronize=True)
    stats.start(torch.device("meta"))  # any that is no CPU
    for _ in range(5):
        stats.part("head")
    stats.lap("draft")
    assert len(waits) == 1 and set(stats.draft_parts) == {"head"}


def test_each_call_has_its_own_stats():
    text = generate(shared(), prompt(9))
    generator = Oracle(text[0].tolist(), 4)
    generator.stats.synchronize = True
    generate(shared(), prompt(9), generator)
    first = generator.stats
    generate(shared(), prompt(9), generator, max_new_tokens=3)
    assert first.emitted == 24 and generator.stats.emitted == 3
    assert generator.stats.synchronize  # a setting of the user, not a count
    assert torch.equal(text, generate(shared(), prompt(9)))

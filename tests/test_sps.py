"""SpS: any smaller model of the same tokenizer drafts; its own cache follows the text, its length what pays."""

from __future__ import annotations

import pytest
import torch
from test_cache import assert_same_rows
from tiny import generate, noisy, prompt, shared, tiny
from transformers import AutoModelForCausalLM, FalconConfig, MambaConfig

from hf_specdec import HybridGen, SAMGen, SpSGen
from hf_specdec.methods.sps import Acceptance


@pytest.mark.parametrize("vocab_size", [90, 97, 104])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("draft_sampling", [False, True])
def test_padded_vocabularies(draft_sampling, do_sample, vocab_size):
    """A drafter padded to another size drafts only the target's ids, and reads ids it does not know."""
    model, drafter = shared(), tiny(seed=7, vocab_size=vocab_size)
    generator = SpSGen(drafter, num_draft_tokens=3, draft_sampling=draft_sampling)
    drafts = []
    draft = generator.draft

    def noting(*args, **kwargs):
        drafts.append(draft(*args, **kwargs))
        return drafts[-1]

    generator.draft = noting
    options = dict(do_sample=do_sample, max_new_tokens=60, temperature=2.0)
    expected = generate(model, prompt(9), **options)
    assert (expected >= 90).any()
    made = generate(model, prompt(9), generator, **options)
    if not (do_sample and draft_sampling):
        assert torch.equal(made, expected)
    assert made.shape == expected.shape and all(tree.tokens.max() < 97 for tree in drafts)
    for tree in drafts:
        if tree.q is not None:
            assert tree.q.shape == (len(tree), 97)
            assert torch.allclose(tree.q.sum(-1), torch.ones(len(tree)), atol=1e-5)


def test_other_vocabularies_are_refused_before_any_forward():
    model, forwards = shared(), []
    handle = model.register_forward_pre_hook(lambda module, args: forwards.append(1))
    try:
        with pytest.raises(ValueError, match="97 token ids.*50"):
            generate(model, prompt(9), SpSGen(tiny(vocab_size=50)))
    finally:
        handle.remove()
    assert not forwards


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
def test_a_fixed_length_is_kept(num_draft_tokens):
    model = shared()
    generator = SpSGen(noisy(model), num_draft_tokens=num_draft_tokens)
    generate(model, prompt(9), generator, max_new_tokens=40)
    lengths = generator.stats.drafted_lengths
    left = 40 - 1
    for drafted, accepted in zip(lengths, generator.stats.accepted_lengths, strict=True):
        assert drafted == min(num_draft_tokens, left - 1)
        left -= accepted + 1


@pytest.mark.parametrize("max_draft_tokens", [1, 3])
def test_an_adaptive_length_has_its_limit(max_draft_tokens):
    model = shared()
    generator = SpSGen(model, max_draft_tokens=max_draft_tokens)
    generate(model, prompt(9), generator, max_new_tokens=40)
    assert 1 <= max(generator.stats.drafted_lengths) <= max_draft_tokens


def test_a_useless_drafter_is_soon_asked_for_nothing():
    """But now and then, to see whether it has become better."""
    generator = SpSGen(tiny(seed=11))
    generate(shared(), prompt(9), generator, max_new_tokens=200)
    lengths = generator.stats.drafted_lengths
    assert sum(lengths[20:]) <= 0.15 * len(lengths[20:])
    assert sum(lengths[20:]) > 0


def test_best_length_follows_acceptance_and_cost():
    """The formula of Leviathan et al. 2023, at its ends."""
    acceptance = Acceptance()
    for rate, cost, length in [(0.0, 0.01, 0), (1.0, 0.01, 8), (0.5, 0.6, 0), (0.8, 0.05, 8), (0.5, 0.25, 1)]:
        acceptance.accepted, acceptance.tried, acceptance.cost = rate, 1.0, cost
        assert acceptance.best_length(8) == length, (rate, cost)


def test_acceptance_counts_nothing_behind_the_first_refusal():
    acceptance = Acceptance()
    acceptance.accepted, acceptance.tried = 0.0, 0.0
    acceptance.update(drafted=5, accepted=2)
    assert acceptance.rate == 2 / 3


@pytest.mark.parametrize("bad", [dict(num_draft_tokens=0), dict(max_draft_tokens=0)])
def test_bad_lengths_are_named(bad):
    with pytest.raises(ValueError, match="=0"):
        SpSGen(shared(), **bad)


def test_misspelt_options_are_type_errors():
    with pytest.raises(TypeError, match="num_draft_token"):
        SpSGen(shared(), num_draft_token=3)


@pytest.mark.parametrize("family", ["llama", "sliding", "gemma2", "qwen3"])
@pytest.mark.parametrize("num_draft_tokens", [None, 1, 4])
@pytest.mark.parametrize("draft_sampling", [False, True])
def test_the_drafters_cache_equals_a_fresh_prefill_after_every_step(draft_sampling, num_draft_tokens, family):
    target = shared(family)
    drafter = noisy(target)
    generator = SpSGen(drafter, num_draft_tokens=num_draft_tokens, draft_sampling=draft_sampling)
    draft, checked = generator.draft, []

    def checking(input_ids, *, max_depth):
        held = generator.cache.length
        assert held < input_ids.shape[1]
        if held:
            assert_same_rows(generator.cache.cache.layers, drafter, input_ids[:, :held])
            checked.append(input_ids.shape[1] - held)
        return draft(input_ids, max_depth=max_depth)

    generator.draft = checking
    generate(target, prompt(9), generator, max_new_tokens=40, do_sample=draft_sampling)
    assert len(checked) >= 5
    if num_draft_tokens:
        assert set(checked) <= {1, 2}  # it reads again only what it has not read: the bonus token, and a last draft


@pytest.mark.parametrize("drafter", ["sliding", "gemma2", "phi", "llama"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_drafters_of_other_families(do_sample, drafter):
    model, options = shared(), dict(do_sample=do_sample, max_new_tokens=40)
    expected = generate(model, prompt(30), **options)
    assert torch.equal(generate(model, prompt(30), SpSGen(shared(drafter), num_draft_tokens=3), **options), expected)


def test_the_drafter_may_be_a_folder(tmp_path):
    model = shared()
    noisy(model).save_pretrained(tmp_path)
    generator = SpSGen(str(tmp_path), num_draft_tokens=3)
    assert torch.equal(generate(model, prompt(9), generator), generate(model, prompt(9)))
    assert generator.stats.accepted > 0
    assert generator.drafter.dtype == model.dtype and not generator.drafter.training


def test_a_drafter_of_its_own_moves_with_the_target_and_that_of_the_user_stays(tmp_path):
    model = tiny()
    noisy(model).save_pretrained(tmp_path)
    own, given = SpSGen(str(tmp_path)), SpSGen(noisy(model))
    for device in ("cpu", "meta"):
        model.to(device)
        for generator in (own, given):
            generator.bind(model)
        assert own.drafter.device.type == own.device.type == device and given.drafter.device.type == "cpu"


@pytest.mark.parametrize("options", [{}, {"num_branches": 2}])
def test_a_drafter_that_takes_no_masks_makes_its_own(options):
    config = FalconConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, eos_token_id=None
    )
    generator = SpSGen(AutoModelForCausalLM.from_config(config).double().eval(), num_draft_tokens=3, **options)
    assert torch.equal(generate(shared(), prompt(9), generator), generate(shared(), prompt(9)))


def test_a_folder_that_is_not_there_says_so(tmp_path):
    with pytest.raises((OSError, ValueError), match="nothing-here"):
        generate(shared(), prompt(9), SpSGen(str(tmp_path / "nothing-here")))


def test_a_drafter_that_cannot_roll_back_is_refused_before_any_forward():
    config = MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0)
    drafter, forwards = AutoModelForCausalLM.from_config(config), []
    handle = shared().register_forward_pre_hook(lambda module, args: forwards.append(1))
    try:
        with pytest.raises(ValueError, match="Mamba|layers cannot do that"):
            generate(shared(), prompt(9), SpSGen(drafter))
    finally:
        handle.remove()
    assert not forwards


def test_the_drafter_is_left_as_it_was():
    drafter = noisy(shared())
    before = {key: value.clone() for key, value in drafter.state_dict().items()}, drafter.config.to_dict()
    generate(shared(), prompt(9), SpSGen(drafter))
    assert all(torch.equal(value, before[0][key]) for key, value in drafter.state_dict().items())
    assert drafter.config.to_dict() == before[1]


@pytest.mark.parametrize("draft_sampling", [False, True])
def test_the_same_seed_gives_the_same_text(draft_sampling):
    model = shared()
    generator = SpSGen(noisy(model), draft_sampling=draft_sampling)
    runs = [generate(model, prompt(9), generator, do_sample=True, max_new_tokens=60) for _ in range(3)]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[1], runs[2])
    assert generator.seed_exact is not draft_sampling


def test_in_a_hybrid_its_cache_stays_through_the_steps_it_is_not_asked_in():
    model = shared(scale=4)
    part = SpSGen(noisy(model), num_draft_tokens=8)
    hybrid = HybridGen([SAMGen(), part], enough=0.3)
    observe, lengths = part.observe, []

    def watched(step):
        observe(step)
        lengths.append(part.cache.length)

    part.observe = watched
    text = generate(model, prompt(9), max_new_tokens=90)
    assert torch.equal(generate(model, prompt(9), hybrid, max_new_tokens=90), text)
    assert lengths == sorted(lengths) and len(set(lengths)) < len(lengths)  # nothing of the text is forgotten

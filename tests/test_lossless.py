"""The law: the text is plain decoding's own, token for token, whatever drafts it, greedy and sampled."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pytest
import torch
from tiny import (
    ATTENTION,
    CHAIN_TARGETS,
    CONFIGS,
    GENERATORS,
    SHORT,
    Oracle,
    dealt,
    generate,
    make,
    noisy,
    prompt,
    shared,
    tiny,
)
from transformers import LogitsProcessor, LogitsProcessorList, WatermarkingConfig
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_specdec import METHODS, DraftTree, PLDGen, SpecGenerator
from hf_specdec.verify import POSITION_FREE

EAGER = [(family, "eager", 9) for family in CONFIGS]
OTHERS = [(family, "sdpa", 9) for family in CONFIGS if "sdpa" in ATTENTION[family]]
OTHERS += [(family, ATTENTION[family][-1], length) for family in CONFIGS for length in (1, 100)]


@lru_cache
def plain(family: str, attention: str, length: int) -> torch.Tensor:
    return generate(shared(family, attention), prompt(length), max_new_tokens=40)


@pytest.mark.parametrize(("target", "name"), [*product(EAGER, GENERATORS), *dealt(OTHERS, each=6)])
def test_greedy_text_is_plain_decodings(target, name):
    family, attention, length = target
    model, expected = shared(family, attention), plain(family, attention, length)
    generator = make(name, model, expected)
    assert torch.equal(generate(model, prompt(length), generator, max_new_tokens=40), expected)
    assert generator.stats.emitted == 40


@pytest.mark.parametrize("family", CONFIGS)
def test_tiny_texts_vary(family):
    """A constant text would let any wrong cache or position pass."""
    assert len(set(plain(family, "eager", 9)[0, 9:].tolist())) >= 10


@pytest.mark.parametrize("name", [name for name in METHODS if getattr(METHODS[name], "head_class", None) is None])
def test_every_method_has_drafts_accepted_on_a_repetitive_text(name):
    """A method that gets nothing accepted would pass every other law. (Heads would have to be trained first.)"""
    model = shared(scale=6)
    ids = generate(model, prompt(9), max_new_tokens=100)
    generator = make(name, model)
    assert torch.equal(generate(model, ids, generator, max_new_tokens=60), generate(model, ids, max_new_tokens=60))
    assert generator.stats.accepted > 0


@pytest.mark.parametrize("family", [family for family in CONFIGS if family not in CHAIN_TARGETS])
def test_accepted_branch_behind_decoys(family):
    """All of the oracle's tokens are accepted though each stands behind two wrong siblings: rows are gathered."""
    model, expected = shared(family, "eager"), plain(family, "eager", 9)
    generator = make("oracle-tree", model, expected)
    assert torch.equal(generate(model, prompt(9), generator, max_new_tokens=40), expected)
    assert generator.stats.accepted_lengths == [4] * 7 + [3]


@pytest.mark.parametrize("family", CHAIN_TARGETS)
def test_trees_become_chains_where_the_cache_holds_no_tree(family):
    model, expected = shared(family), plain(family, "eager", 9)
    generator = make("oracle-tree", model, expected)
    assert torch.equal(generate(model, prompt(9), generator, max_new_tokens=40), expected)
    assert max(generator.stats.drafted_lengths) == 1  # the decoy in front has no children
    assert any("chain" in note for note in generator.stats.notes)


class Shaped(SpecGenerator):
    """Drafts trees of a given shape from the true continuation, tokens shifted by their place among siblings."""

    def __init__(self, text, *, width: int, depth: int, right: int = 0, duplicates: bool = False):
        super().__init__()
        self.text, self.width, self.depth, self.right, self.duplicates = text, width, depth, right, duplicates
        self.max_nodes = 1 + width**depth * depth * 2

    def draft(self, input_ids, *, max_depth):
        continuation = self.text[input_ids.shape[1] :][: min(self.depth, max_depth)]
        tokens, parents, level = [int(input_ids[0, -1])], [-1], [0]
        for token in continuation:
            below = []
            for parent in level:
                for place in range(self.width):
                    for _ in range(2 if self.duplicates else 1):
                        tokens.append((token + place - self.right) % 97)
                        parents.append(parent)
                        below.append(len(tokens) - 1)
            level = below[-16:]
        return DraftTree.from_lists(tokens, parents, device=input_ids.device)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize(("width", "depth", "right"), [(1, 8, 0), (8, 1, 5), (2, 3, 1), (3, 2, 2), (1, 1, 0)])
def test_tree_shape_never_changes_the_text(width, depth, right, duplicates, do_sample):
    model = shared()
    options = dict(do_sample=do_sample, temperature=0.8, max_new_tokens=30)
    expected = generate(model, prompt(9), **options)
    generator = Shaped(expected[0].tolist(), width=width, depth=depth, right=right, duplicates=duplicates)
    assert torch.equal(generate(model, prompt(9), generator, **options), expected)
    assert generator.stats.accepted > 10


SAMPLING = {
    "plain": dict(top_k=0),
    "default": {},
    "temperature": dict(temperature=0.5, top_k=0),
    "hot": dict(temperature=3.0, top_k=0),
    "top-k": dict(top_k=5, temperature=1.5),
    "top-p": dict(top_p=0.7, top_k=0),
    "min-p": dict(min_p=0.1, top_k=0),
    "typical": dict(typical_p=0.8, top_k=0),
    "epsilon": dict(epsilon_cutoff=0.01, top_k=0),
    "eta": dict(eta_cutoff=0.01, top_k=0),
    "all": dict(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, renormalize_logits=True),
}


@pytest.mark.parametrize(("law", "name"), dealt(SAMPLING, each=3))
def test_sampled_text_is_that_of_the_same_seed(law, name):
    model, options = shared(), dict(do_sample=True, max_new_tokens=40, seed=3) | SAMPLING[law]
    expected = generate(model, prompt(9), **options)
    assert torch.equal(generate(model, prompt(9), make(name, model, expected), **options), expected)


@pytest.mark.parametrize(("family", "name"), dealt(CONFIGS, each=4))
def test_sampled_text_is_that_of_the_same_seed_in_every_family(family, name):
    model, options = shared(family), dict(do_sample=True, max_new_tokens=30, temperature=0.7, seed=1)
    expected = generate(model, prompt(5), **options)
    assert torch.equal(generate(model, prompt(5), make(name, model, expected), **options), expected)


@pytest.mark.parametrize("name", GENERATORS)
def test_sampling_draws_as_often_as_plain_decoding(name):
    """After the call the generator of random numbers stands where plain decoding leaves it."""
    model, options = shared(), dict(do_sample=True, max_new_tokens=20)
    expected = generate(model, prompt(9), **options)
    state = torch.get_rng_state()
    generate(model, prompt(9), make(name, model, expected), **options)
    assert torch.equal(torch.get_rng_state(), state)


def allowed(batch: int, ids: torch.Tensor) -> list[int]:
    """A grammar: which tokens may follow depends on the last two."""
    return list(range(3 + int(ids[-1]) % 3, 97, 1 + int(ids[-2:].sum()) % 3))


PROCESSORS = {
    "repetition_penalty": dict(repetition_penalty=1.7),
    "no_repeat_ngram_size": dict(no_repeat_ngram_size=2),
    "min_new_tokens": dict(min_new_tokens=15, eos_token_id=[95, 40, 31]),
    "min_length": dict(min_length=20, eos_token_id=[95, 40, 31]),
    "bad_words_ids": dict(bad_words_ids=[[19], [95, 78], [40]]),
    "suppress_tokens": dict(suppress_tokens=[19, 40]),
    "begin_suppress_tokens": dict(begin_suppress_tokens=[15, 38]),
    "forced_eos_token_id": dict(forced_eos_token_id=5, max_length=40, max_new_tokens=None),
    "exponential_decay": dict(exponential_decay_length_penalty=(5, 1.3), eos_token_id=7),
    "prefix_allowed_tokens_fn": dict(prefix_allowed_tokens_fn=allowed),
    "sequence_bias": dict(sequence_bias=[[[95, 78], -9.0], [[14], 5.0]]),
    "guidance_scale": dict(guidance_scale=1.6),
    "encoder_repetition_penalty": dict(encoder_repetition_penalty=1.5),
    "encoder_no_repeat_ngram_size": dict(encoder_no_repeat_ngram_size=1),
    "watermark": dict(watermarking_config=WatermarkingConfig(bias=3.0)),
    "renormalize_logits": dict(renormalize_logits=True),
    "remove_invalid_values": dict(remove_invalid_values=True),
}


FORBIDDEN = prompt(9)
FORBIDDEN[0, ::2], FORBIDDEN[0, 3] = 19, 95  # the prompt is full of what some of them forbid


@pytest.mark.parametrize("processor", [name for name in PROCESSORS if not name.startswith("re") or "rep" in name])
def test_each_of_these_processors_changes_the_text(processor):
    """Else the law that follows would not see it."""
    options = dict(max_new_tokens=30) | PROCESSORS[processor]
    lengths = {key: value for key, value in options.items() if key in ("max_new_tokens", "max_length", "eos_token_id")}
    changed, unchanged = generate(shared(), FORBIDDEN, **options), generate(shared(), FORBIDDEN, **lengths)
    assert changed.shape != unchanged.shape or not torch.equal(changed, unchanged)


@pytest.mark.parametrize(("processor", "do_sample", "name"), dealt(PROCESSORS, [False, True], each=4))
def test_every_standard_processor_acts_as_in_plain_decoding(processor, do_sample, name):
    model, ids = shared(), FORBIDDEN
    options = dict(do_sample=do_sample, max_new_tokens=30) | PROCESSORS[processor]
    expected = generate(model, ids, **options)
    assert torch.equal(generate(model, ids, make(name, model, expected), **options), expected)


@pytest.mark.parametrize("processor", ["bad_words_ids", "suppress_tokens"])
def test_forbidden_tokens_stay_absent_though_the_prompt_is_full_of_them(processor):
    ids = torch.tensor([[19, 40, 40, 19, 40, 40, 19]])
    text = generate(shared(), ids, PLDGen(), max_new_tokens=30, **PROCESSORS[processor])
    assert 19 not in text[0, 7:].tolist()


class Listening(LogitsProcessor):
    """Notes each call and bans what depends on their number: right only if called once per token, in order."""

    def __init__(self):
        self.calls: list[list[int]] = []

    def __call__(self, input_ids, scores):
        assert scores.shape == (1, 97) and scores.dtype == torch.float32
        scores = scores.clone()
        scores[:, len(self.calls) % 7 :: 7] = -torch.inf
        self.calls.append(input_ids[0].tolist())
        return scores


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("do_sample", [False, True])
def test_stateful_processors_see_the_calls_of_plain_decoding(do_sample, name):
    model, first, second = shared(), Listening(), Listening()
    options = dict(do_sample=do_sample, max_new_tokens=30)
    expected = generate(model, prompt(9), logits_processor=LogitsProcessorList([first]), **options)
    generator = make(name, model, expected)
    text = generate(model, prompt(9), generator, logits_processor=LogitsProcessorList([second]), **options)
    assert torch.equal(text, expected)
    assert second.calls == first.calls


WARPERS = [
    EpsilonLogitsWarper(0.02),
    EtaLogitsWarper(0.02),
    InfNanRemoveLogitsProcessor(),
    LogitNormalization(),
    MinPLogitsWarper(0.1),
    SuppressTokensLogitsProcessor([3, 5]),
    TemperatureLogitsWarper(0.7),
    TopKLogitsWarper(4),
    TopPLogitsWarper(0.8),
    TypicalLogitsWarper(0.8),
]


def test_position_free_processors_serve_all_nodes_at_once():
    """As on an accelerator: each row comes out as it would alone, whatever the text."""
    assert {type(warper) for warper in WARPERS} == POSITION_FREE
    scores = torch.randn(6, 97, generator=torch.Generator().manual_seed(0)) * 3
    for warper in WARPERS:
        together = warper(prompt(9), scores.clone())
        for i, row in enumerate(scores):
            assert torch.equal(together[i], warper(prompt(5, seed=i), row[None].clone())[0]), warper


@pytest.mark.parametrize("name", SHORT)
def test_position_free_processors_of_the_user_act_in_greedy_decoding_too(name):
    model = shared()
    own = LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)])
    expected = generate(model, prompt(9), logits_processor=own, max_new_tokens=30)
    text = generate(model, prompt(9), make(name, model, expected), logits_processor=own, max_new_tokens=30)
    assert torch.equal(text, expected)


class Cooling(TemperatureLogitsWarper):
    """A subclass of a position-free processor that is not: it adds to the last token."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, (int(input_ids[0, -1]) + 1) % 97] += 100
        return scores


@pytest.mark.parametrize("name", SHORT)
def test_subclasses_of_position_free_processors_are_not_trusted_to_be(name):
    model, own = shared(), LogitsProcessorList([Cooling(1.0)])
    expected = generate(model, prompt(9), logits_processor=own)
    assert torch.equal(generate(model, prompt(9), make(name, model, expected), logits_processor=own), expected)


class Confident(Oracle):
    """Drafts the target's second choice with a near-certain q, which greedy decoding must not look at."""

    def draft(self, input_ids, *, max_depth):
        tree = super().draft(input_ids, max_depth=max_depth)
        tree.q = torch.full((len(tree), 97), 1e-6)
        tree.q[torch.arange(len(tree) - 1), tree.tokens[1:]] = 1.0
        return tree


def test_greedy_decoding_never_looks_at_q():
    model = shared()
    expected = generate(model, prompt(9))
    for wrong_at in (None, 0, 2):
        generator = Confident(expected[0].tolist(), 4, wrong_at=wrong_at)
        assert torch.equal(generate(model, prompt(9), generator), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SHORT)
def test_greedy_text_of_a_second_model_in_either_precision(dtype, name):
    model = tiny(dtype=dtype, seed=5)
    expected = generate(model, prompt(9, seed=4), max_new_tokens=60)
    assert torch.equal(generate(model, prompt(9, seed=4), make(name, model, expected), max_new_tokens=60), expected)


@pytest.mark.parametrize("name", SHORT)
def test_half_precision_emits_the_verifiers_own_choices(name):
    """A block rounds differently from single tokens, so bf16 may part from plain decoding, but only at a near-tie."""
    model, exact = tiny(dtype=torch.bfloat16), shared()
    expected = generate(model, prompt(9))
    text = generate(model, prompt(9), make(name, model, expected))
    differ = (text != expected).nonzero()
    if len(differ):
        at = int(differ[0, 1])
        with torch.no_grad():
            logits = exact(text[:, :at]).logits[0, -1]
        spread = logits.std()
        assert abs(logits[text[0, at]] - logits[expected[0, at]]) < 0.5 * spread
    assert text.shape == expected.shape


@pytest.mark.parametrize("name", SHORT)
def test_two_runs_are_equal(name):
    model = shared()
    expected = generate(model, prompt(9), do_sample=True)
    runs = [generate(model, prompt(9), make(name, model, expected), do_sample=True) for _ in range(2)]
    assert torch.equal(*runs)


def test_the_noisy_drafter_is_right_in_part():
    """Else the laws over `sps` would see no partial acceptance."""
    model = shared()
    generator = METHODS["sps"](noisy(model), num_draft_tokens=4)
    generate(model, prompt(9), generator, max_new_tokens=60)
    assert 0.2 < generator.stats.accepted / generator.stats.drafted < 0.95

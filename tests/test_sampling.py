"""Rejection sampling keeps the target's distribution: counted, against the exact law."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from tiny import generate, noisy, shared, tiny
from transformers import LogitsProcessorList
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_specdec import DraftTree, SpecGenerator, SpSGen
from hf_specdec.verify import choose_rejecting

VOCAB = 8


def surprise(counts: torch.Tensor, law: torch.Tensor) -> float:
    """How far counts `(..., v)` lie from their law, in standard deviations of chi-square (usually < 3)."""
    expected = law.double() * counts.sum(-1, keepdim=True)
    assert counts[law == 0].sum() == 0, "a token that the law excludes was drawn"
    often = expected >= 5
    square = ((counts - expected) ** 2 / expected.clamp(min=1e-9))[often].sum()
    degrees = int(often.sum() - often.any(-1).sum())
    return float((square - degrees) / math.sqrt(2 * degrees))


def markov(*, seed: int = 0, dtype=torch.float32):
    """A target whose next token depends on the last one alone, so that one long text holds many draws of each law."""
    model = tiny(vocab_size=VOCAB, dtype=dtype, seed=seed, scale=4, num_hidden_layers=1, max_position_embeddings=4096)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.lm_head.weight.mul_(3)
    return model


def transitions(model, options: dict) -> torch.Tensor:
    """The exact law of the token after each token, `(v, v)`, under the sampling options."""
    with torch.no_grad():
        scores = model(torch.arange(VOCAB)[:, None]).logits[:, -1].float()
    warpers = LogitsProcessorList()
    for name, warper in (
        ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if options.get(name):
            warpers.append(warper(options[name]))
    return warpers(None, scores).softmax(-1)


def count(model, generator, options: dict, *, num_runs: int = 4, length: int = 500) -> torch.Tensor:
    """How often each token followed each, by its place in the step: `(places, v, v)`."""
    counts = torch.zeros(12, VOCAB, VOCAB)
    for run in range(num_runs):
        ids = torch.tensor([[run % VOCAB]])
        text = generate(model, ids, generator, seed=run, do_sample=True, max_new_tokens=length, **options)[0].tolist()
        places = [0]
        for accepted in generator.stats.accepted_lengths:
            places += range(accepted + 1)
        for place, last, token in zip(places, text, text[1:], strict=False):
            counts[place, last, token] += 1
    return counts


LAWS = {
    "plain": dict(top_k=0),
    "temperature": dict(temperature=2.0, top_k=0),
    "top-k": dict(top_k=3),
    "top-p": dict(top_p=0.7, top_k=0),
    "min-p": dict(min_p=0.15, top_k=0),
    "all": dict(temperature=1.5, top_k=5, top_p=0.9),
}


@pytest.mark.parametrize("law", LAWS)
def test_sampled_drafts_keep_the_law_at_every_place_of_the_step(law):
    """First token, second token given the first, bonus and residual: each follows the target's law given its past."""
    model, options = markov(), LAWS[law]
    drafter = noisy(model, scale=0.4)
    generator = SpSGen(drafter, num_draft_tokens=3, draft_sampling=True)
    counts = count(model, generator, options)
    assert 0.2 < generator.stats.accepted / generator.stats.drafted < 0.95
    exact = transitions(model, options)
    for place in range(4):
        assert surprise(counts[place], exact) < 4, place
    assert surprise(counts.sum(0), exact) < 4


@pytest.mark.parametrize("law", ["plain", "top-k", "top-p"])
def test_these_counts_tell_the_drafters_law_from_the_targets(law):
    """Negative control: the same counts against the drafter's law, and against the unprocessed one, are far off."""
    model, options = markov(), LAWS[law]
    drafter = noisy(model, scale=0.4)
    counts = count(model, SpSGen(drafter, num_draft_tokens=3, draft_sampling=True), options, num_runs=2)
    assert surprise(counts.sum(0), transitions(drafter, LAWS["temperature"])) > 10


class Table(SpecGenerator):
    """Drafts trees from a table of laws `(v, v)`: siblings sampled without replacement, or the top ones.

    Reporting the table as q is right for sampled siblings and wrong for the top ones.
    """

    def __init__(self, table: torch.Tensor, *, width: int, depth: int, sampled: bool):
        super().__init__()
        self.table, self.width, self.depth, self.sampled = table, width, depth, sampled
        self.max_nodes = 1 + sum(width**level for level in range(1, depth + 1))

    def draft(self, input_ids, *, max_depth):
        tokens, parents, level = [int(input_ids[0, -1])], [-1], [0]
        for _ in range(min(self.depth, max_depth)):
            below = []
            for parent in level:
                law = self.table[tokens[parent]]
                drawn = torch.multinomial(law, self.width) if self.sampled else law.topk(self.width).indices
                for token in drawn.tolist():
                    tokens.append(token)
                    parents.append(parent)
                    below.append(len(tokens) - 1)
            level = below
        return DraftTree(torch.tensor(tokens), torch.tensor(parents), q=self.table[tokens])


@pytest.mark.parametrize(("width", "depth"), [(1, 3), (2, 2), (3, 2)])
def test_sampled_trees_keep_the_law_at_every_place_of_the_step(width, depth):
    model, options = markov(), LAWS["plain"]
    generator = Table(transitions(noisy(model, scale=0.5), LAWS["plain"]), width=width, depth=depth, sampled=True)
    counts, exact = count(model, generator, options), transitions(model, options)
    for place in range(depth + 1):
        assert surprise(counts[place], exact) < 4, place


def test_argmax_drafts_with_a_softmax_q_are_caught():
    """Negative control: the bias that reporting a softmax for argmax drafts brings shows in these counts."""
    model = markov()
    table = transitions(noisy(model, scale=0.5), LAWS["plain"])
    counts = count(model, Table(table, width=1, depth=3, sampled=False), LAWS["plain"], num_runs=2)
    assert surprise(counts[1], transitions(model, LAWS["plain"])) > 10


def test_a_drafter_equal_to_the_target_is_always_accepted():
    model = shared()
    for options in (LAWS["plain"], LAWS["all"]):
        generator = SpSGen(model, num_draft_tokens=3, draft_sampling=True)
        generate(model, torch.tensor([[5]]), generator, do_sample=True, max_new_tokens=41, **options)
        assert generator.stats.accepted == generator.stats.drafted == 30


LAW_PAIRS = {
    "near": ([0.4, 0.3, 0.15, 0.1, 0.05], [0.35, 0.25, 0.2, 0.15, 0.05]),
    "far": ([0.05, 0.1, 0.15, 0.3, 0.4], [0.5, 0.3, 0.1, 0.05, 0.05]),
    "disjoint in part": ([0.0, 0.5, 0.5, 0.0, 0.0], [0.4, 0.3, 0.1, 0.1, 0.1]),
    "equal": ([0.2, 0.3, 0.1, 0.1, 0.3], [0.2, 0.3, 0.1, 0.1, 0.3]),
    "drafter of one token": ([0.3, 0.3, 0.2, 0.1, 0.1], [1.0, 0.0, 0.0, 0.0, 0.0]),
    "drafter of two tokens": ([0.3, 0.3, 0.2, 0.1, 0.1], [0.5, 0.5, 0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("num_siblings", [0, 1, 2, 3])
@pytest.mark.parametrize("pair", LAW_PAIRS)
def test_choose_rejecting_has_the_targets_law(pair, num_siblings):
    torch.manual_seed(0)
    p, q = map(torch.tensor, LAW_PAIRS[pair])
    num_siblings = min(num_siblings, int((q > 0).sum()))
    counts = torch.zeros(5)
    num_draws = 2500
    drafts = [[]] * num_draws
    if num_siblings:
        drafts = torch.multinomial(q.expand(num_draws, -1), num_siblings).tolist()
    for drafted in drafts:
        counts[choose_rejecting(p.log()[None], drafted, q)] += 1
    assert surprise(counts, p) < 4


def accepting_law(p: torch.Tensor, drafted: tuple[int, ...], q: torch.Tensor, monkeypatch) -> torch.Tensor:
    """The exact law of `choose_rejecting` given its draft: its draws replaced by every case, weighted.

    A uniform draw that must fall below p/q to accept is bisected for the threshold at which the outcome changes.
    """
    law = torch.zeros(len(p), dtype=torch.float64)
    final: list[torch.Tensor] = []
    uniforms: list[float] = []
    used = 0

    def rand(*args, **kwargs):
        nonlocal used
        used += 1
        return torch.tensor(uniforms[used - 1] if used <= len(uniforms) else 1 - 1e-7)

    def multinomial(weights, **kwargs):
        final.append(weights / weights.sum())
        return torch.tensor([0])

    monkeypatch.setattr(torch, "rand", rand)
    monkeypatch.setattr(torch, "multinomial", multinomial)

    def outcome(*given: float) -> bool:
        """Whether the sibling after as many refusals as values given less one is accepted."""
        nonlocal used
        uniforms[:], used = given, 0
        final.clear()
        choose_rejecting(p.log()[None], drafted, q)
        return not final and used == len(given)

    reach = 1.0
    for place, token in enumerate(drafted):
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            if outcome(*[1 - 1e-7] * place, middle):
                low = middle
            else:
                high = middle
        law[token] += reach * low
        reach *= 1 - low
    outcome()
    if final:
        law += reach * final[0].double()
    monkeypatch.undo()
    return law


@pytest.mark.parametrize("num_siblings", [1, 2, 3])
@pytest.mark.parametrize("pair", ["near", "far", "disjoint in part"])
def test_choose_rejecting_is_exact_by_enumeration(pair, num_siblings, monkeypatch):
    """Over all ordered draws without replacement, weighted by how likely q draws them, the mixture is p itself."""
    p, q = (torch.tensor(law, dtype=torch.float32) for law in LAW_PAIRS[pair])
    law = torch.zeros(5, dtype=torch.float64)
    for drafted in permutations(range(5), num_siblings):
        weight, left = 1.0, 1.0
        for token in drafted:
            weight *= float(q[token]) / left
            left -= float(q[token])
        law += weight * accepting_law(p, drafted, q, monkeypatch)
    assert torch.allclose(law, p.double(), atol=1e-5)


def test_enumeration_catches_a_softmax_q_on_argmax_drafts(monkeypatch):
    """Negative control: the top token drafted for certain, q reported as the softmax: total variation far from 0."""
    p, q = map(torch.tensor, LAW_PAIRS["far"])
    law = accepting_law(p, (0,), q, monkeypatch)
    assert (law - p).abs().sum() / 2 > 0.05

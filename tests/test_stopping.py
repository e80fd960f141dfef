"""Stopping: each rule ends the text where plain decoding ends it, also in the middle of an accepted block."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from tiny import SHORT, Oracle, dealt, generate, make, prompt, shared, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_specdec import PLDGen
from hf_specdec.target import Target


class Recorder:
    """A streamer that notes what it gets."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert not self.ends
        self.puts.append(value)

    def end(self):
        self.ends += 1


def same_as_plain(model, ids, name, **options):
    """Asserts that ids and stream end as in plain decoding; returns the ids."""
    plain, drafted = Recorder(), Recorder()
    longest = generate(model, ids, max_new_tokens=40, do_sample=options.get("do_sample", False))
    expected = generate(model, ids, streamer=plain, **options)
    made = generate(model, ids, generator := make(name, model, longest), streamer=drafted, **options)
    assert torch.equal(made, expected)
    assert [put.tolist() for put in drafted.puts] == [put.tolist() for put in plain.puts]
    assert [put.shape for put in drafted.puts] == [put.shape for put in plain.puts]
    assert drafted.ends == plain.ends == 1
    assert generator.stats.emitted == made.shape[1] - ids.shape[1]
    return made


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("place", [0, 1, 4, 7])
def test_end_token_inside_a_block(place, name):
    """The token at each place of the greedy text is declared to be the end; nothing comes after it."""
    model = shared()
    eos = int(generate(model, prompt(9))[0, 9 + place])
    made = same_as_plain(model, prompt(9), name, eos_token_id=eos)
    assert made[0, -1] == eos and made.shape[1] <= 9 + place + 1


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("do_sample", [False, True])
def test_several_end_tokens(do_sample, name):
    model = shared()
    text = generate(model, prompt(9), do_sample=do_sample)[0, 9:].tolist()
    made = same_as_plain(model, prompt(9), name, eos_token_id=[text[9], text[5], 2], do_sample=do_sample)
    assert made.shape[1] <= 9 + 6


@pytest.mark.parametrize("name", SHORT)
def test_end_tokens_of_the_models_own_generation_config(name):
    model = copy.deepcopy(shared())
    text = generate(model, prompt(9))[0, 9:].tolist()
    model.generation_config.eos_token_id = [text[6], text[10]]
    assert same_as_plain(model, prompt(9), name).shape[1] <= 9 + 7


@pytest.mark.parametrize("name", SHORT)
def test_end_tokens_in_the_prompt_do_not_end_the_text(name):
    model = shared()
    text = generate(model, prompt(9))[0, 9:].tolist()
    ids = torch.cat([prompt(9), torch.tensor([[96, 5, 96, 7, 96, 5, 96]])], dim=-1)
    made = same_as_plain(model, ids, name, eos_token_id=96, suppress_tokens=[96])
    assert made.shape[1] == 16 + 24
    assert text


@pytest.mark.parametrize(("max_new_tokens", "name"), dealt(range(1, 11), each=5))
def test_max_new_tokens_is_exact(max_new_tokens, name):
    made = same_as_plain(
        shared(),
        torch.tensor([[5, 6, 7, 8] * 5]),
        name,
        max_new_tokens=max_new_tokens,
        do_sample=max_new_tokens % 2 == 0,
    )
    assert made.shape[1] == 20 + max_new_tokens


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("max_length", [10, 11, 17])
def test_max_length_is_exact(max_length, name):
    made = same_as_plain(shared(), prompt(9), name, max_length=max_length, max_new_tokens=None)
    assert made.shape[1] == max_length


@pytest.mark.parametrize("name", SHORT)
def test_lengths_given_in_a_generation_config(name):
    model, config = shared(), GenerationConfig(max_new_tokens=13, do_sample=False)
    expected = model.generate(prompt(9), generation_config=config)
    made = model.generate(prompt(9), generation_config=config, candidate_generator=make(name, model, expected))
    assert torch.equal(made, expected) and made.shape[1] == 22


@pytest.mark.parametrize(
    ("minimum", "do_sample", "name"), dealt([dict(min_new_tokens=14), dict(min_length=20)], [False, True], each=2)
)
def test_minimum_lengths_hold_the_end_token_back(minimum, do_sample, name):
    model = shared()
    eos = generate(model, prompt(9), do_sample=do_sample)[0, 9:15].tolist()
    made = same_as_plain(model, prompt(9), name, eos_token_id=eos, do_sample=do_sample, **minimum)
    assert made.shape[1] >= 20


class StopAt(StoppingCriteria):
    """Ends the text at the `place`-th call; notes the ids it sees."""

    def __init__(self, place: int):
        self.place, self.seen = place, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids[0].tolist())
        return torch.full((1,), len(self.seen) == self.place, dtype=torch.bool)


@pytest.mark.parametrize(("place", "do_sample", "name"), dealt([1, 5, 8, 99], [False, True]))
def test_custom_criteria_see_every_emitted_token_once_and_in_order(place, do_sample, name):
    model, first, second = shared(), StopAt(place), StopAt(place)
    expected = generate(model, prompt(9), stopping_criteria=StoppingCriteriaList([first]), do_sample=do_sample)
    text = generate(model, prompt(9), do_sample=do_sample)
    generator = make(name, model, text)
    criteria = StoppingCriteriaList([second])
    made = generate(model, prompt(9), generator, stopping_criteria=criteria, do_sample=do_sample)
    assert torch.equal(made, expected)
    assert made.shape[1] == 9 + min(place, 24)
    assert second.seen == first.seen
    assert len(criteria) == 1  # the list of the user stays his own


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("max_length", [5, 13, 60])
def test_a_length_criterion_of_the_callers_takes_the_place_of_max_new_tokens(max_length, name):
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length)])
    made = same_as_plain(shared(), prompt(9), name, stopping_criteria=criteria)
    assert made.shape[1] == max(max_length, 10)  # one token comes before the first look


@pytest.mark.parametrize("name", SHORT)
def test_criteria_see_the_scores_where_they_are_returned(name):
    class ByScore(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((1,), len(scores) == 7 and scores[-1].shape == (1, 97), dtype=torch.bool)

    model, options = shared(), dict(return_dict_in_generate=True, output_scores=True)
    text = generate(model, prompt(9))
    made = generate(model, prompt(9), make(name, model, text), stopping_criteria=[ByScore()], **options)
    assert torch.equal(made.sequences, text[:, :16]) and len(made.scores) == 7
    assert made.cache.get_seq_length() == 15


@pytest.mark.parametrize("name", SHORT)
def test_max_time_ends_the_text(name):
    model = shared()
    text = generate(model, prompt(9), max_new_tokens=60)
    generator = make(name, model, text)
    begin = time.perf_counter()
    made = generate(model, prompt(9), generator, max_new_tokens=60, max_time=0.001)
    assert time.perf_counter() - begin < 5
    assert made.shape[1] == 10 and torch.equal(made, text[:, :10])


# stop strings


def letters() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 97 tokens, one letter each but for the last two."""
    words = ["\u0120", *map(chr, range(33, 127)), "ab", "cd"]
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [("a", "b"), ("c", "d")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def stop_string(place: int) -> str:
    """The last two letters (or the only one) of the greedy text after `place` tokens."""
    text = generate(shared(), prompt(9))[0, 9 : 9 + place]
    return letters().decode(text)[-2:]


@pytest.mark.parametrize(("place", "several", "name"), dealt([1, 2, 5, 8], [False, True]))
def test_stop_strings_inside_a_block(place, several, name):
    stop = stop_string(place)
    options = dict(stop_strings=["never", stop] if several else stop, tokenizer=letters())
    made = same_as_plain(shared(), prompt(9), name, **options)
    assert made.shape[1] <= 9 + place


@pytest.mark.parametrize(("where", "name"), dealt(["config", "model", "both", "argument over model"], each=1))
def test_stop_strings_given_elsewhere(where, name):
    model, text = copy.deepcopy(shared()), generate(shared(), prompt(9))
    options = dict(tokenizer=letters())
    model.generation_config.max_new_tokens = 24
    config = GenerationConfig(max_new_tokens=24, do_sample=False)
    if where in ("model", "both", "argument over model"):
        model.generation_config.stop_strings = "never" if where != "model" else [stop_string(5)]
    if where in ("config", "both"):
        config.stop_strings = [stop_string(5)]
        options["generation_config"] = config
    if where == "argument over model":
        options |= dict(stop_strings=stop_string(5), max_new_tokens=24, do_sample=False)
    before = copy.deepcopy(model.generation_config.to_dict()), copy.deepcopy(config.to_dict())
    expected = model.generate(prompt(9), **options)
    made = model.generate(prompt(9), candidate_generator=make(name, model, text), **options)
    assert torch.equal(made, expected) and made.shape[1] <= 14
    assert (model.generation_config.to_dict(), config.to_dict()) == before


def test_stop_strings_without_a_tokenizer_say_so():
    with pytest.raises(ValueError, match="tokenizer"):
        generate(shared(), prompt(9), PLDGen(), stop_strings="abc")


@pytest.mark.parametrize("name", SHORT)
def test_a_tokenizer_without_stop_strings_is_welcome(name):
    model = shared()
    expected = generate(model, prompt(9), tokenizer=letters())
    assert torch.equal(generate(model, prompt(9), make(name, model, expected), tokenizer=letters()), expected)


# no work past the end


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("max_new_tokens", [2, 5, 16])
def test_drafts_are_never_deeper_than_what_can_be_emitted(max_new_tokens, name, monkeypatch):
    model, blocks = tiny(scale=4), []
    ids = generate(model, prompt(9), max_new_tokens=60)
    text = generate(model, ids, max_new_tokens=max_new_tokens)
    verify = Target.verify

    def noting(self, tree):
        blocks.append((self.root_position + 1 + tree.depth, self.root_position + 1))
        return verify(self, tree)

    monkeypatch.setattr(Target, "verify", noting)
    assert torch.equal(generate(model, ids, make(name, model, text), max_new_tokens=max_new_tokens), text)
    for deepest, length in blocks:
        assert deepest <= text.shape[1] - 1 or deepest == length


def test_the_depth_asked_for_is_what_can_be_emitted():
    """One token is always the target's own: what is left less one is asked for, and nothing when that is none."""
    model = shared()
    text = generate(model, prompt(9), max_new_tokens=8)
    generator = Oracle(text[0].tolist(), 3, wrong_at=0)
    generate(model, prompt(9), generator, max_new_tokens=8)
    assert generator.allowed == [6, 5, 4, 3, 2, 1]

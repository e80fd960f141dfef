"""The real model: long chat prompts, stop strings, several turns, and what 16 bits may change."""

import pytest
import torch
from tiny import Oracle

from hf_specdec import METHODS, HybridGen, PLDGen, embedded_drafter
from hf_specdec.compare import encode, first_difference
from hf_specdec.models import load_embedded
from hf_specdec.prompts import PROMPTS

METHODS_ALONE = [name for name, method in METHODS.items() if method.drafter_optional or not method.drafter_argument]
LONG = next(prompt.text for prompt in PROMPTS if prompt.kind == "rag")


@pytest.fixture(scope="module")
def answer(smollm):
    """A chat prompt of more than 300 tokens, and 40 tokens of plain decoding."""
    model, tokenizer = smollm
    ids = encode(tokenizer, LONG, device=model.device)
    assert ids.shape[1] > 300
    return ids, model.generate(ids, max_new_tokens=40, do_sample=False)


@pytest.mark.parametrize("name", METHODS_ALONE)
def test_a_long_chat_prompt_is_answered_as_in_plain_decoding(smollm, answer, name):
    ids, text = answer
    generator = METHODS[name]()
    assert torch.equal(
        smollm[0].generate(ids, candidate_generator=generator, max_new_tokens=40, do_sample=False), text
    )
    assert generator.stats.emitted == text.shape[1] - ids.shape[1]


def test_partly_accepted_drafts_behind_a_long_prompt(smollm, answer):
    ids, text = answer
    oracle = Oracle(text[0].tolist(), 6, wrong_at=3, decoys=1, vocab_size=49152)
    assert torch.equal(smollm[0].generate(ids, candidate_generator=oracle, max_new_tokens=40, do_sample=False), text)
    assert oracle.stats.tokens_per_step > 3


def test_sampling_writes_the_text_of_the_same_seed(smollm):
    model, tokenizer = smollm
    ids = encode(tokenizer, "Tell me a story about a lighthouse.", device=model.device)
    options = dict(max_new_tokens=32, do_sample=True, temperature=0.8, top_p=0.95, repetition_penalty=1.1)
    torch.manual_seed(7)
    plain = model.generate(ids, **options)
    torch.manual_seed(7)
    assert torch.equal(model.generate(ids, candidate_generator=HybridGen(), **options), plain)


def test_a_stop_string_inside_a_draft_ends_the_text(smollm, answer):
    model, tokenizer = smollm
    ids, text = answer
    word = tokenizer.decode(text[0, ids.shape[1] + 8 : ids.shape[1] + 11])
    stop = dict(stop_strings=[word], tokenizer=tokenizer, max_new_tokens=40, do_sample=False)
    plain = model.generate(ids, **stop)
    assert plain.shape[1] < text.shape[1]
    oracle = Oracle(text[0].tolist(), 7, vocab_size=49152)
    assert torch.equal(model.generate(ids, candidate_generator=oracle, **stop), plain)


def test_turns_end_in_the_prompt_does_not_end_the_answer(smollm):
    model, tokenizer = smollm
    chat = [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "hi"}] * 3
    chat.append({"role": "user", "content": "Count from one to twenty in words."})
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    assert (ids == tokenizer.eos_token_id).sum() >= 7
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(model.generate(ids, candidate_generator=PLDGen(), max_new_tokens=24, do_sample=False), plain)


def test_in_bfloat16_texts_part_only_where_the_target_is_near_a_tie():
    model, tokenizer = load_embedded("bfloat16", device="cpu")
    for prompt in PROMPTS[::4]:
        ids = encode(tokenizer, prompt.text, device=model.device)
        plain = model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :].tolist()
        ours = model.generate(ids, candidate_generator=PLDGen(), max_new_tokens=32, do_sample=False)
        difference = first_difference(model, ids, plain, ours[0, ids.shape[1] :].tolist())
        assert difference is None or difference.margin <= 0.5, prompt.kind


def test_the_head_that_ships_drafts_well_enough_to_pay(smollm):
    """1.98 tokens per step on held-out answers; math is its best kind."""
    model, tokenizer = smollm
    generator = embedded_drafter("eagle2")
    emitted = steps = 0
    for prompt in (prompt for prompt in PROMPTS if prompt.kind == "math_reasoning"):
        ids = encode(tokenizer, prompt.text, device=model.device)
        model.generate(ids, candidate_generator=generator, max_new_tokens=48, do_sample=False)
        emitted, steps = emitted + generator.stats.emitted - 1, steps + generator.stats.steps
    assert emitted / steps > 1.5
    with pytest.raises(ValueError, match="eagle2"):
        embedded_drafter("eagle9")

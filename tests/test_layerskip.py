"""Layer skipping: the draft is the target without some layers, and the search keeps what it found."""

import pytest
import torch
from tiny import generate, prompt, shared, tiny

from hf_specdec import LayerSkipGen
from hf_specdec.methods.layerskip import Skipped, found_skip, skippable


def test_skipping_nothing_drafts_what_the_target_says():
    model = shared()
    generator = LayerSkipGen(skip=[], num_draft_tokens=4)
    text = generate(model, prompt(9), max_new_tokens=26)
    assert torch.equal(generate(model, prompt(9), generator, max_new_tokens=26), text)
    assert generator.stats.conditional_acceptance == [1.0] * 4


def test_the_draft_is_the_model_without_the_layers():
    model = tiny("llama", num_hidden_layers=4)
    generator = LayerSkipGen(skip=[1])
    generator.bind(model)
    without = tiny("llama", num_hidden_layers=4)
    del without.model.layers[1]
    without.config.num_hidden_layers = 3
    ids = prompt(12)
    torch.testing.assert_close(generator.drafter(ids, use_cache=False).logits, without(ids, use_cache=False).logits)
    assert generator.drafter.model.layers[0] is model.model.layers[0]


@pytest.mark.parametrize("skip", [[0], [2], [7]])
def test_only_inner_layers_can_be_skipped(skip):
    with pytest.raises(ValueError, match="can be skipped"):
        generate(shared(), prompt(9), LayerSkipGen(skip=skip))


def test_the_search_keeps_what_it_found_for_the_model(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path))
    model = tiny("llama", num_hidden_layers=4)
    assert found_skip(model) is None
    skip, promised = LayerSkipGen.search(model, [prompt(9), prompt(5)], trials=4, max_new_tokens=12)
    assert set(skip) <= {1, 2} and promised > 0
    assert found_skip(model) == skip
    generator = LayerSkipGen(num_draft_tokens=2)
    generator.bind(model)
    assert [isinstance(layer, Skipped) for layer in generator.drafter.model.layers] == [i in skip for i in range(4)]
    assert found_skip(tiny("llama", num_hidden_layers=5)) is None


def test_the_first_layer_of_each_attention_type_always_runs():
    assert skippable(tiny("llama", num_hidden_layers=5)) == [1, 2, 3]
    assert skippable(tiny("gemma2", num_hidden_layers=6, attention="eager")) == [2, 3, 4]  # sliding and full in turn


@pytest.mark.parametrize("family", ["sliding", "gemma2"])
def test_targets_with_sliding_windows_skip_layers_too(family):
    model = tiny(family, num_hidden_layers=6, attention="eager")
    generator = LayerSkipGen(num_draft_tokens=3)
    text = generate(model, prompt(9), max_new_tokens=40)
    assert torch.equal(generate(model, prompt(9), generator, max_new_tokens=40), text)
    assert generator.stats.drafted > 0

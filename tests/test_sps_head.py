"""The wide-shallow draft model: the target's own layers, few of them; what it drafts, learns and stores."""

import copy
import json
from functools import lru_cache

import pytest
import torch
from safetensors.torch import load_file
from test_cache import assert_same_rows
from test_sampling import LAWS, VOCAB, count, surprise, transitions
from test_train import quantised
from tiny import ATTENTION, CONFIGS, generate, prompt, shared, tiny

from hf_specdec import EagleGen, SpSGen
from hf_specdec.methods.layerskip import Skipped
from hf_specdec.methods.sps import Acceptance, SpSHead
from hf_specdec.split import with_layers

IDS = torch.arange(0, 97, 2)


@lru_cache
def rounded(family):
    """A tiny model whose weights are float32's numbers, as those of new heads are."""
    return tiny(family, attention=ATTENTION[family][-1]).float().double()


def head_for(model, **options):
    torch.manual_seed(0)
    return SpSHead.for_target(model, **options).to(model.dtype)


def logits_of(head, ids):
    with torch.no_grad():
        return head(ids, use_cache=False)[0]


def noisy_head(model, *, scale=0.05, **options):
    """A head of most of the target's layers, whose drafts are accepted in part."""
    head = head_for(model, **options)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(scale * parameter.std() * torch.randn(parameter.shape, generator=noise).to(parameter))
    return head


@pytest.mark.parametrize("layers", [[0, 2], [2], [0]])
@pytest.mark.parametrize("family", CONFIGS)
def test_it_begins_as_the_target_without_its_other_layers(family, layers):
    """Through the target's own code: scaled embeddings, layer types, windows and biases are as they were."""
    model, ids = rounded(family), prompt(20)
    skipped = with_layers(
        model, 1, lambda own: [layer if i in layers else Skipped() for i, layer in enumerate(own)]
    ).get_decoder()
    head = head_for(model, init_layers=layers)
    with torch.no_grad():
        expected = model.get_output_embeddings()(skipped(ids, use_cache=False).last_hidden_state[0, -1])
    torch.testing.assert_close(logits_of(head, ids), expected)
    reduced = head_for(model, init_layers=layers, draft_ids=IDS)
    torch.testing.assert_close(logits_of(reduced, ids), expected[IDS])


@pytest.mark.parametrize("options", [{}, {"num_branches": 3, "min_probability": 0}, {"num_draft_tokens": 3}])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_its_drafts_never_change_the_text(family, do_sample, options):
    model, call = shared(family), dict(do_sample=do_sample, max_new_tokens=30)
    expected = generate(model, prompt(9), **call)
    for draft_ids in (None, IDS):
        generator = SpSGen(noisy_head(model, draft_ids=draft_ids), **options)
        assert torch.equal(generate(model, prompt(9), generator, **call), expected)
        assert generator.stats.drafted > 0


@pytest.mark.parametrize("num_branches", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_its_cache_equals_a_fresh_prefill_after_every_step(family, num_branches):
    """Also where a sibling of the chain was accepted, whose keys and values it never made."""
    model = tiny(family, attention="eager" if family == "gemma2" else "sdpa", num_hidden_layers=6)
    head = noisy_head(model, init_layers=[0, 1, 2, 3, 4], scale=0.01)
    generator = SpSGen(head, num_draft_tokens=4, num_branches=num_branches, min_probability=0)
    draft, checked, siblings = generator.draft, [], []

    def checking(input_ids, *, max_depth):
        held = generator.cache.length
        if held:
            assert_same_rows(generator.cache.cache.layers, head.decoder, input_ids[:, :held])
            checked.append(input_ids.shape[1] - held)
        return draft(input_ids, max_depth=max_depth)

    def noting(step):
        siblings.extend(node for node in generator.tree.follow(step.tokens[:-1]) if node not in generator.chain)
        SpSGen.observe(generator, step)

    generator.draft, generator.observe = checking, noting
    generate(model, prompt(9), generator, max_new_tokens=60)
    assert len(checked) >= 5 and set(checked) <= {1, 2}
    assert bool(siblings) == (num_branches > 1 and family == "llama")  # a sliding window's cache holds no tree


def test_siblings_are_the_next_likeliest_and_stand_beside_the_chain():
    model, ids = shared(), prompt(12)
    generator = SpSGen(head_for(model, draft_ids=IDS), num_draft_tokens=3, num_branches=3, min_probability=0)
    generator.bind(model)
    generator.begin(ids)
    with torch.no_grad():
        tree = generator.draft(ids, max_depth=3)
    text = ids
    for level in range(3):
        scores = logits_of(generator.head, text).softmax(-1)
        top = scores.topk(3)
        nodes = range(1 + 3 * level, 4 + 3 * level)
        assert [tree.host[0][node] for node in nodes] == IDS[top.indices].tolist()
        assert {tree.host[1][node] for node in nodes} == {max(0, 3 * level - 2)}
        text = torch.cat([text, IDS[top.indices[:1]][None]], dim=-1)
    assert tree.first_path() == [0, 1, 4, 7] and len(tree) == generator.max_nodes


@pytest.mark.parametrize("law", ["plain", "top-k", "all"])
def test_sampled_drafts_of_a_reduced_vocabulary_keep_the_law(law):
    model = tiny(
        vocab_size=VOCAB, dtype=torch.float32, seed=0, scale=4, num_hidden_layers=2, max_position_embeddings=4096
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()  # the next token depends on the last one alone
        model.lm_head.weight.mul_(3)
    head = noisy_head(model, num_layers=1, draft_ids=torch.tensor([0, 2, 3, 5, 6]))
    generator = SpSGen(head, num_draft_tokens=3, draft_sampling=True)
    counts = count(model, generator, LAWS[law])
    assert 0.1 < generator.stats.accepted / generator.stats.drafted < 0.95
    for place in range(4):
        assert surprise(counts[place], transitions(model, LAWS[law])) < 4, place


def test_the_loss_is_on_the_answers_tokens_and_asks_for_the_targets_distribution():
    model, ids = shared(), prompt(10)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, 6:] = True
    for draft_ids in (None, IDS):
        head = head_for(model, draft_ids=draft_ids)
        with torch.no_grad():
            outputs = model(ids, output_hidden_states=True)
            loss, metrics = head.loss(ids, [outputs.hidden_states[-1]], mask)
            chosen = torch.arange(97) if draft_ids is None else draft_ids
            p = outputs.logits[0, 5:9][:, chosen].softmax(-1)  # of tokens 6 to 9
            logits = torch.stack([logits_of(head, ids[:, : t + 1]) for t in range(5, 9)])
        torch.testing.assert_close(
            loss, -(p * logits.log_softmax(-1)).sum(-1).mean(), check_dtype=False, rtol=1e-4, atol=0
        )
        assert float(metrics["top1"]) == float((logits.argmax(-1) == p.argmax(-1)).double().mean())


@pytest.mark.parametrize("draft_ids", [None, IDS])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3"])
def test_saving_and_loading_keeps_config_and_logits_and_none_of_the_target(family, draft_ids, tmp_path):
    model, ids = shared(family), prompt(12)
    head = noisy_head(model, draft_ids=draft_ids)
    head.save_pretrained(tmp_path)
    assert not any("embed" in name or "lm_head" in name for name in load_file(tmp_path / "model.safetensors"))
    generator = SpSGen(str(tmp_path), num_draft_tokens=3)
    text = generate(model, prompt(9), generator)
    again = generator.head
    assert again.config.to_diff_dict() == head.config.to_diff_dict()
    torch.testing.assert_close(logits_of(again, ids), logits_of(head, ids), rtol=0, atol=0)
    assert torch.equal(text, generate(model, prompt(9)))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own call
def test_adapters_and_quantised_weights_are_read_off_what_they_do():
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    for model in (adapted.to(torch.float64).eval(), quantised(tiny()).double()):
        skipped = with_layers(model, 1, lambda own: [own[0], Skipped(), own[2]]).get_decoder()
        with torch.no_grad():
            states = skipped(prompt(9), use_cache=False).last_hidden_state[0, -1]
            expected = model.get_output_embeddings()(states)
        torch.testing.assert_close(logits_of(head_for(model), prompt(9)), expected, rtol=1e-4, atol=1e-4)


def test_its_mlps_may_be_narrower():
    model = rounded("llama")
    head = head_for(model, intermediate_size=24)
    own, whole = head.layers[1].mlp, model.model.layers[2].mlp
    assert torch.equal(own.up_proj.weight, whole.up_proj.weight[:24])
    assert torch.equal(own.down_proj.weight, whole.down_proj.weight[:, :24])
    assert torch.equal(generate(model, prompt(9), SpSGen(head)), generate(model, prompt(9)))


def test_the_target_is_left_as_it_was():
    model = tiny(attention="eager")
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    generate(model, prompt(9), SpSGen(noisy_head(model, draft_ids=IDS)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.to_dict() == config and len(model.model.layers) == 3


@pytest.mark.parametrize("bad", [{"num_layers": 3}, {"num_layers": 0}, {"init_layers": [0, 3]}, {"init_layers": [-1]}])
def test_layers_that_the_target_has_not_to_spare_are_refused(bad):
    with pytest.raises(ValueError, match=r"which has 3: give at least one of them, and fewer than all"):
        head_for(shared(), **bad)


def test_heads_of_other_targets_and_methods_are_refused_before_any_forward(tmp_path):
    model = shared()
    head_for(model).save_pretrained(tmp_path / "head")
    with pytest.raises(ValueError, match="hidden size 32, but .* 16"):
        generate(tiny(hidden_size=16), prompt(9), SpSGen(str(tmp_path / "head")))
    with pytest.raises(ValueError, match="has llama layers, but the target is of the kind qwen3"):
        generate(shared("qwen3"), prompt(9), SpSGen(str(tmp_path / "head")))
    EagleGen.head_class.for_target(model).save_pretrained(tmp_path / "eagle")
    with pytest.raises(ValueError, match="specdec_eagle"):
        generate(model, prompt(9), SpSGen(str(tmp_path / "eagle")))
    with pytest.raises(ValueError, match="num_branches=1"):
        SpSGen(head_for(model), num_branches=2, draft_sampling=True)


def test_a_chain_ends_where_a_further_token_is_not_worth_its_cost():
    model, ids = shared(), prompt(9)
    generator = SpSGen(head_for(model), max_draft_tokens=6)
    generator.bind(model)
    lengths = []
    for cost in (1e-9, 0.3, 0.7):
        generator.begin(ids)
        generator.acceptance = Acceptance()
        generator.acceptance.cost = cost
        with torch.no_grad():
            tree = generator.draft(ids, max_depth=9)
        lengths.append(len(tree) - 1)
        chances = [chance < generator.acceptance.least_chance for chance in tree.probabilities[1:]]
        assert not any(chances[:-1])
    assert lengths[0] == 6 and lengths == sorted(lengths, reverse=True) and lengths[1] < 6


def test_the_config_says_what_its_layers_are(tmp_path):
    head_for(shared("gemma2"), draft_ids=IDS).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"]["layer_types"] == ["sliding_attention", "sliding_attention"]
    assert config["architecture"]["num_hidden_layers"] == 2 and config["draft_vocab_size"] == len(IDS)

"""Kangaroo: part of the target runs by itself and the rest resumes, the adapter's rows, what it learns, whose files load."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny import ATTENTION, CHAIN_TARGETS, CONFIGS, generate, prompt, shared, tiny
from torch import nn

from hf_specdec import HybridGen, PLDGen
from hf_specdec.cache import TreeCache
from hf_specdec.checkpoints import load_published
from hf_specdec.methods.kangaroo import KangarooGen, KangarooHead
from hf_specdec.split import Stored, with_layers

IDS = torch.arange(0, 97, 2)
SHAPES = {"chain": dict(), "tree": dict(width=3), "wide": dict(width=8, max_draft_tokens=2)}


def random_head(model, *, seed: int = 0, scale: float = 0.1, **options) -> KangarooHead:
    torch.manual_seed(seed)
    head = KangarooHead.for_target(model, **dict(exit_layer=1) | options).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    head.attach(model)
    return head


def states_of(model, ids: torch.Tensor, head: KangarooHead) -> list[torch.Tensor]:
    """The target's hidden states that the loss takes."""
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    return [states[layer] for layer in head.hidden_layers]


def teacher_forced(model, head: KangarooHead, ids: torch.Tensor) -> torch.Tensor:
    """Draft logits `(t, w)` behind every token of a text, in one pass."""
    t, rows = ids.shape[1], TreeCache(1, capacity=64)
    with torch.no_grad():
        states = states_of(model, ids, head)[0][0]
        return head(states, torch.arange(t), rows, seen=torch.ones(t, t, dtype=torch.bool).tril())


# the target in two parts


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("exit_layer", [1, 2])
def test_two_parts_are_the_whole_model_to_the_bit(exit_layer, family):
    model, ids, stored = shared(family), prompt(11), Stored()
    lower = with_layers(model, exit_layer, lambda layers: [*layers[:exit_layer], stored]).get_decoder()
    upper = with_layers(model, exit_layer, lambda layers: [stored] * exit_layer + layers[exit_layer:])
    with torch.no_grad():
        whole = model(ids, output_hidden_states=True)
        lower(ids)
        assert torch.equal(stored.states, whole.hidden_states[exit_layer])
        assert torch.equal(upper(torch.zeros_like(ids)).logits, whole.logits)  # from what was stored, not from the ids
    assert isinstance(model.get_decoder().layers, nn.ModuleList) and len(model.get_decoder().layers) == 3


def rows_run(model, generator, **options) -> tuple[list[int], torch.Tensor]:
    """How many rows each layer ran after the prefill, and the text."""
    counts, hooks = [0] * 3, []
    for i, layer in enumerate(model.get_decoder().layers):

        def count(module, args, kwargs, i=i):
            counts[i] += args[0].shape[1]

        hooks.append(layer.register_forward_pre_hook(count, with_kwargs=True))
    try:
        text = generate(model, prompt(9), generator, **options)
    finally:
        for hook in hooks:
            hook.remove()
    return [count - 9 for count in counts], text


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("exit_layer", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "phi"])
def test_no_layer_runs_twice_for_a_token(family, exit_layer, shape):
    model = shared(family)
    generator = KangarooGen(random_head(model, exit_layer=exit_layer), threshold=0, min_probability=0, **SHAPES[shape])
    counts, text = rows_run(model, generator)
    assert torch.equal(text, generate(model, prompt(9)))
    assert counts == [generator.stats.drafted + generator.stats.steps] * 3


@pytest.mark.parametrize("family", CHAIN_TARGETS)
def test_where_the_cache_holds_no_tree_chains_are_verified_by_all_layers(family):
    model = shared(family)
    generator = KangarooGen(random_head(model), threshold=0, width=3)
    counts, text = rows_run(model, generator, max_new_tokens=40)
    assert torch.equal(text, generate(model, prompt(9), max_new_tokens=40))
    verified = generator.stats.drafted + generator.stats.steps
    assert counts[1:] == [verified] * 2 and counts[0] > verified
    assert max(generator.stats.drafted_lengths) == 6


def test_outputs_that_are_asked_for_are_those_of_all_layers():
    model = shared("llama", "eager")
    options = dict(return_dict_in_generate=True, output_hidden_states=True, output_attentions=True)
    expected = generate(model, prompt(9), **options)
    made = generate(model, prompt(9), KangarooGen(random_head(model), threshold=0, width=2), **options)
    for item in ("hidden_states", "attentions"):
        assert len(made[item]) == len(expected[item])
        for states, right in zip(made[item], expected[item], strict=True):
            assert len(states) == len(right)
            assert all(torch.allclose(*both, atol=1e-4) for both in zip(states, right, strict=True))


# the text


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("family", "attention"), [(family, way) for family in CONFIGS for way in ATTENTION[family]])
def test_neither_exit_nor_shape_nor_threshold_changes_the_text(family, attention, do_sample):
    model, options = shared(family, attention, scale=4), dict(do_sample=do_sample, max_new_tokens=24)
    expected, drafted = generate(model, prompt(9), **options), []
    for exit_layer, shape, threshold in ((1, "chain", 0), (1, "tree", 0.028), (2, "chain", 0.028), (2, "wide", 0)):
        head = random_head(model, exit_layer=exit_layer)
        generator = KangarooGen(head, threshold=threshold, min_probability=0, **SHAPES[shape])
        assert torch.equal(generate(model, prompt(9), generator, **options), expected)
        drafted.append((generator.stats.accepted_lengths, generator.stats.drafted_lengths))
    assert len(set(map(str, drafted))) >= 3  # they did draft otherwise


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draft_ids", [None, IDS])
def test_drafts_are_the_adapters_likeliest_continuations(draft_ids, shape):
    """Each node's probability and its place among its siblings are those of a pass over the text and the node's path."""
    model = shared()
    head = random_head(model, exit_layer=2, draft_ids=draft_ids)
    trees = []

    class Probe(KangarooGen):
        name = ""

        def draft(self, input_ids, *, max_depth):
            trees.append((input_ids.clone(), super().draft(input_ids, max_depth=max_depth)))
            return trees[-1][1]

    generator = Probe(head, threshold=0, min_probability=0, **SHAPES[shape])
    generate(model, prompt(9), generator, max_new_tokens=16)
    names = torch.arange(97) if draft_ids is None else draft_ids
    for ids, tree in trees[:4]:
        tokens, parents = tree.host
        texts, children = {0: ids}, {}
        for node, parent in enumerate(parents[1:], start=1):
            children.setdefault(parent, []).append(node)
            texts[node] = torch.cat([texts[parent], torch.tensor([[tokens[node]]])], dim=-1)
        assert generator.width == 1 or max(map(len, children.values())) > 1
        for parent, nodes in children.items():
            likely = teacher_forced(model, head, texts[parent])[-1].float().softmax(-1)
            best = names[likely.topk(len(nodes)).indices].tolist()
            assert [tokens[node] for node in nodes] == best
            expected = [tree.probabilities[parent] * p for p in likely.topk(len(nodes)).values.tolist()]
            assert [tree.probabilities[node] for node in nodes] == pytest.approx(expected, rel=1e-4)


def test_a_level_holds_the_likeliest_nodes_and_of_unlikely_ones_only_the_first():
    model = shared()
    for least, most in ((0, 3), (0.9999, 1)):
        generator = KangarooGen(random_head(model), threshold=0, width=3, min_probability=least)
        generate(model, prompt(9), generator, max_new_tokens=30)
        assert generator.stats.drafted_lengths[0] == 6 * most
        assert generator.stats.draft_depths[0] == 6


@pytest.mark.parametrize("width", [1, 3])
def test_drafting_stops_behind_the_first_unsure_token(width):
    model = shared()
    sure, depths = [], []

    class Probe(KangarooGen):
        name = ""

        def likeliest(self, *args, **kwargs):
            children, going_on = super().likeliest(*args, **kwargs)
            sure[-1].append(going_on)
            return children, going_on

        def draft(self, input_ids, *, max_depth):
            sure.append([])
            tree = super().draft(input_ids, max_depth=max_depth)
            depths.append(tree.depth)
            return tree

    generator = Probe(random_head(model), threshold=0.028, min_probability=0, width=width)
    generate(model, prompt(9), generator, max_new_tokens=60)
    assert [len(levels) for levels in sure] == depths
    assert all(all(levels[:-1]) for levels in sure)
    assert len({len(levels) for levels in sure}) > 1
    assert all(not levels[-1] or len(levels) == 6 for levels in sure[:-3])  # the last ones end with the text


# the head


@pytest.mark.parametrize("draft_ids", [None, IDS])
def test_the_loss_asks_at_each_token_for_what_the_target_says_there(draft_ids):
    """A prompt of 6 tokens, an answer of 4, padded: places 5 to 8 predict tokens 6 to 9, from the text up to there."""
    model, ids = shared(), prompt(12)
    head = random_head(model, draft_ids=draft_ids)
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[:, 6:10] = True
    hidden = states_of(model, ids, head)
    logits = teacher_forced(model, head, ids)
    expected = []
    for place in (5, 6, 7, 8):
        p = model.get_output_embeddings()(hidden[1][0, place])
        p = (p if draft_ids is None else p[draft_ids]).softmax(-1)
        expected.append(-(p * logits[place].log_softmax(-1)).sum())
    loss, metrics = head.loss(ids, hidden, mask)
    assert torch.allclose(loss.double(), torch.stack(expected).mean(), atol=1e-4)
    assert list(metrics) == ["top1"]
    garbage = [states.clone() for states in hidden]
    garbage[0][:, 9:] = garbage[1][:, 9:] = garbage[1][:, :5] = 7  # what no answer's token is predicted from
    assert torch.equal(head.loss(ids, garbage, mask)[0], loss)
    nothing, metrics = head.loss(ids, hidden, torch.zeros_like(mask))
    assert nothing == 0 and not metrics


@pytest.mark.parametrize("family", CONFIGS)
def test_a_new_adapter_begins_with_parts_of_the_target(family):
    model = shared(family)
    head = KangarooHead.for_target(model, exit_layer=1)
    attention = model.get_decoder().layers[1].self_attn
    alike = family in ("llama", "qwen2", "mistral", "sliding", "gemma", "gemma2")
    if alike:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            assert torch.allclose(getattr(head, name).weight.double(), getattr(attention, name).weight, atol=1e-5)
        assert (head.q_proj.bias is None) == (attention.q_proj.bias is None)
    else:  # normed, fused or partly rotated: x + 0 instead
        assert not head.o_proj.weight.any()
    if family != "phi":
        states = torch.randn(3, 32, dtype=torch.float64)
        assert torch.allclose(head.double().norm(states), model.get_decoder().norm(states), atol=1e-4)


@pytest.mark.parametrize("width", [1, 3])
def test_training_on_a_text_gets_it_accepted(width):
    model = tiny(scale=8)
    with torch.no_grad():
        model.lm_head.weight.mul_(3)  # a target that is sure of itself
    ids = generate(model, prompt(9), max_new_tokens=50)
    assert len(set(ids[0, 9:].tolist())) >= 10
    speed = []
    for num_steps in (0, 150):
        torch.manual_seed(0)
        head = KangarooHead.for_target(model, exit_layer=1).double()
        hidden, mask = states_of(model, ids, head), torch.ones_like(ids, dtype=torch.bool)
        optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
        for _ in range(num_steps):
            loss, _ = head.loss(ids, hidden, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        generator = KangarooGen(head, threshold=0, min_probability=0, width=width)
        assert torch.equal(generate(model, prompt(9), generator, max_new_tokens=50), ids)
        speed.append(generator.stats.tokens_per_step)
    assert speed[1] > max(3, 2 * speed[0])


# saved and published heads


@pytest.mark.parametrize("draft_ids", [None, IDS])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_saved_heads_come_back_bit_for_bit(family, draft_ids, tmp_path):
    model = shared(family)
    head = random_head(model, draft_ids=draft_ids)
    head.save_pretrained(tmp_path)
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "lm_head" in name or "embed" in name]
    again = load_published(str(tmp_path), KangarooHead, model).double()
    again.attach(model)
    assert {**again.config.to_dict(), "_name_or_path": None} == {**head.config.to_dict(), "_name_or_path": None}
    assert torch.equal(teacher_forced(model, again, prompt(9)), teacher_forced(model, head, prompt(9)))
    generator = KangarooGen(str(tmp_path), threshold=0, width=2)
    assert torch.equal(generate(model, prompt(9), generator), generate(model, prompt(9)))


def published(head: KangarooHead) -> dict[str, torch.Tensor]:
    """The tensors as the authors' files name them."""
    prefixes = {"q_proj": "layers.0.self_attn.", "k_proj": "layers.0.self_attn.", "v_proj": "layers.0.self_attn."}
    prefixes |= {"o_proj": "layers.0.self_attn.", "input_layernorm": "layers.0."}
    return {prefixes.get(name.split(".")[0], "") + name: tensor for name, tensor in head.state_dict().items()}


LLAMA = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=32, num_attention_heads=4, num_hidden_layers=1,
    vocab_size=97, rms_norm_eps=1e-6,
)  # fmt: skip


def test_published_adapters_give_equal_logits(tmp_path):
    model = shared()
    head = random_head(model, exit_layer=2, rope_theta=10000.0, head_dim=8)
    torch.save(published(head), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    again = load_published(str(tmp_path), KangarooHead, model)
    again.attach(model)
    assert again.config.exit_layer == 2 and again.config.rope_theta == 10000.0
    assert torch.equal(teacher_forced(model, again, prompt(9)), teacher_forced(model, head, prompt(9)))
    generator = KangarooGen(str(tmp_path), threshold=0)
    assert torch.equal(generate(model, prompt(9), generator), generate(model, prompt(9)))


def test_what_is_no_whole_adapter_is_refused_by_name(tmp_path):
    model = shared()
    tensors = published(random_head(model, exit_layer=2))
    cases = {
        "missing ..norm.weight": {name: tensor for name, tensor in tensors.items() if name != "norm.weight"},
        "unexpected ..layers.0.mlp.up_proj.weight": tensors | {"layers.0.mlp.up_proj.weight": torch.ones(2)},
        "misshapen ..layers.0.self_attn.o_proj": tensors | {"layers.0.self_attn.o_proj.weight": torch.ones(2, 2)},
        "no Kangaroo adapter": {"fc.weight": torch.ones(2, 2)},
    }
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for message, wrong in cases.items():
        torch.save(wrong, tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match=message):
            KangarooGen(str(tmp_path)).bind(model)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="a Llama config beside the tensors"):
        KangarooGen(str(tmp_path)).bind(model)


@pytest.mark.parametrize(("num_layers", "exit_layer"), [(1, 1), (3, 3), (3, 0), (3, 7), (3, -1)])
def test_an_exit_that_leaves_nothing_out_is_refused(num_layers, exit_layer):
    model = tiny(num_hidden_layers=num_layers)
    with pytest.raises(ValueError, match=f"exit after layer {exit_layer} .* has {num_layers}"):
        KangarooHead.for_target(model, exit_layer=exit_layer)
    if num_layers > 1:
        head = random_head(model)
        head.config.exit_layer = exit_layer
        with pytest.raises(ValueError, match=f"exit after layer {exit_layer} "):
            generate(model, prompt(9), KangarooGen(head))


def test_a_model_spread_over_devices_is_refused():
    model = tiny()
    head = random_head(model)
    model.forward = model.forward  # as accelerate's hooks leave it
    with pytest.raises(ValueError, match="spread over devices"):
        generate(model, prompt(9), KangarooGen(head))


def test_an_adapter_of_another_target_is_refused_with_both_values():
    with pytest.raises(ValueError, match="hidden size 32.*has hidden size 64"):
        KangarooGen(random_head(shared())).bind(tiny(hidden_size=64, head_dim=16))


def test_it_cannot_be_part_of_a_hybrid():
    with pytest.raises(ValueError, match="must be verified whole"):
        HybridGen([PLDGen(), KangarooGen(random_head(shared()))])


@pytest.mark.parametrize("options", [dict(max_draft_tokens=0), dict(width=0)])
def test_counts_below_one_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=0.*at least 1"):
        KangarooGen(None, **options)

"""Cache: after every step it holds exactly what plain decoding would have there, in every kind it can be given."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tiny import CHAIN_TARGETS, CONFIGS, GENERATORS, SHAPE, SHORT, Oracle, dealt, generate, make, prompt, shared, tiny
from transformers import AutoModelForCausalLM, DeepseekV3Config, Lfm2Config, MambaConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, QuantizedCache, QuantizedLayer, StaticCache

from hf_specdec import PLDGen
from hf_specdec.cache import ChainCache, TreeCache, open_cache
from hf_specdec.target import Target


def assert_same_rows(layers, model, ids: torch.Tensor) -> None:
    """The layers hold the keys and values of a fresh prefill of `ids`."""
    atol = 1e-9 if model.config._attn_implementation == "sdpa" else 1e-4  # eager attention rounds to fp32
    fresh = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=fresh)
    for layer, expected in zip(layers, fresh.layers, strict=True):
        for rows, right in ((layer.keys, expected.keys), (layer.values, expected.values)):
            assert rows.shape[-2] >= right.shape[-2] if expected.is_sliding else rows.shape == right.shape
            assert torch.allclose(rows[:, :, -right.shape[-2] :], right, atol=atol)


def watched(generator, model, monkeypatch) -> list[int]:
    """Makes the generator check the target's cache before each draft; returns the lengths it will have seen."""
    targets, lengths = [], []
    keep, draft = Target.keep, generator.draft

    def keep_and_note(self, path):
        keep(self, path)
        targets.append(self)

    def check_and_draft(input_ids, *, max_depth):
        cache = targets[-1].cache
        assert cache.length == input_ids.shape[1] - 1
        assert_same_rows(cache.cache.layers, model, input_ids[:, :-1])
        lengths.append(cache.length)
        return draft(input_ids, max_depth=max_depth)

    monkeypatch.setattr(Target, "keep", keep_and_note)
    generator.draft = check_and_draft
    return lengths


@pytest.mark.parametrize(
    ("family", "name"), [*dealt(CONFIGS, each=5), *product(["llama", "sliding"], ["oracle-all", "oracle-tree-some"])]
)
def test_cache_equals_a_fresh_prefill_after_every_step(family, name, monkeypatch):
    model = shared(family)
    expected = generate(model, prompt(9), max_new_tokens=30)
    generator = make(name, model, expected)
    lengths = watched(generator, model, monkeypatch)
    assert torch.equal(generate(model, prompt(9), generator, max_new_tokens=30), expected)
    assert len(lengths) >= 2


@pytest.mark.parametrize("family", [family for family in CONFIGS if family not in CHAIN_TARGETS])
def test_cache_is_gathered_where_the_accepted_branch_is_not_the_first(family, monkeypatch):
    model = shared(family)
    expected = generate(model, prompt(9), max_new_tokens=18)
    generator = Oracle(expected[0].tolist(), 3, decoys=3)
    lengths = watched(generator, model, monkeypatch)
    generate(model, prompt(9), generator, max_new_tokens=18)
    assert [step.path for step in generator.steps[1:]] == [[0, 4, 8, 12]] * 4
    assert lengths == [9, 13, 17, 21]


# the object


def rows(length: int, *, heads: int = 2, dim: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, heads, length, dim, generator=torch.Generator().manual_seed(seed))


def filled(lengths=(5, 6), *, capacity: int = 16, layers: int = 3) -> tuple[TreeCache, list[list[torch.Tensor]]]:
    """A cache to which blocks were appended, and what each layer must hold: keys, values."""
    cache, held = TreeCache(layers, capacity=capacity), [[] for _ in range(layers)]
    for block, length in enumerate(lengths):
        for layer in range(layers):
            states = [rows(length, seed=100 * block + 10 * layer + i) for i in range(2)]
            returned = cache.update(*states, layer)
            before = held[layer] or [rows(0), rows(0)]
            held[layer] = [torch.cat(both, dim=-2) for both in zip(before, states, strict=True)]
            assert all(torch.equal(*both) for both in zip(returned, held[layer], strict=True))
    return cache, held


@pytest.mark.parametrize("path", [[0], [0, 1, 2], [0, 2, 5], [0, 1, 4], [3], [], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("capacity", [1, 16, 64])
def test_keep_leaves_the_rows_of_the_path_in_its_order(path, capacity):
    cache, held = filled(capacity=capacity)
    cache.keep(5, path)
    index = [*range(5), *(5 + node for node in path)]
    assert cache.length == cache.get_seq_length() == len(index)
    for layer, (keys, values) in zip(cache.layers, held, strict=True):
        assert torch.equal(layer.keys, keys[:, :, index]) and torch.equal(layer.values, values[:, :, index])


def test_growing_keeps_what_was_written():
    cache, held = filled((5, 6, 40, 1, 100), capacity=1)
    for layer, (keys, values) in zip(cache.layers, held, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_appending_and_keeping_copy_nothing_that_lies_before():
    cache, _ = filled(capacity=64)
    places = [layer.keys.data_ptr() for layer in cache.layers]
    cache.keep(5, [0, 2, 5])
    for layer in range(3):
        cache.update(rows(7), rows(7), layer)
    assert [layer.keys.data_ptr() for layer in cache.layers] == places
    assert len(cache.buffers) == 1


def test_layers_of_different_shapes_each_get_their_own_rows():
    cache = TreeCache(4, capacity=20)
    shapes = [((2, 4), (2, 6)), ((1, 8), (1, 8)), ((2, 4), (2, 6)), ((4, 4), (4, 4))]
    blocks = []
    for block in range(2):
        blocks.append([])
        for layer, sides in enumerate(shapes):
            states = [rows(6, heads=heads, dim=dim, seed=10 * block + layer) for heads, dim in sides]
            cache.update(*states, layer)
            blocks[-1].append(states)
    cache.grow(100)
    cache.keep(6, [0, 3])
    for layer in range(4):
        for side, held in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
            right = torch.cat([blocks[0][layer][side], blocks[1][layer][side][:, :, [0, 3]]], dim=-2)
            assert torch.equal(held, right)


@pytest.mark.parametrize("with_config", [False, True])
def test_load_and_store_round_trip(with_config):
    model = shared()
    stock = DynamicCache(config=model.config) if with_config else DynamicCache()
    with torch.no_grad():
        model(prompt(9), cache=stock)
    cache = TreeCache(3, capacity=10)
    cache.load(stock)
    back = DynamicCache(config=model.config) if with_config else DynamicCache()
    cache.store(back)
    assert_same_rows(back.layers, model, prompt(9))
    assert back.get_seq_length() == 9


def test_heads_of_keys_and_values_may_differ():
    """DeepSeek's keys and values have different widths."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **SHAPE | dict(num_key_value_heads=4, head_dim=4), q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=6, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, moe_intermediate_size=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    expected = generate(model, prompt(9))
    for name in GENERATORS:
        assert torch.equal(generate(model, prompt(9), make(name, model, expected)), expected)


# kinds of caches


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_static_cache(family, name):
    model, options = shared(family), dict(cache_implementation="static", return_dict_in_generate=True)
    expected = generate(model, prompt(9), **options)
    made = generate(model, prompt(9), make(name, model, expected.sequences), **options)
    assert torch.equal(made.sequences, expected.sequences)
    assert type(made.cache) is type(expected.cache) is StaticCache
    assert int(made.cache.get_seq_length()) == int(expected.cache.get_seq_length()) == made.sequences.shape[1] - 1
    for layer, right in zip(made.cache.layers, expected.cache.layers, strict=True):
        length = made.sequences.shape[1] - 1
        assert torch.allclose(layer.keys[:, :, :length], right.keys[:, :, :length], atol=1e-9)


@pytest.mark.parametrize("name", SHORT)
def test_static_cache_of_the_user_filled_exactly(name):
    """The cache has as many rows as plain decoding needs, and no more: drafts may not need them either."""
    model = shared()
    expected = generate(model, prompt(9))
    cache = StaticCache(config=model.config, max_cache_len=9 + 24 - 1)
    assert torch.equal(generate(model, prompt(9), make(name, model, expected), cache=cache), expected)
    assert int(cache.get_seq_length()) == 32


KINDS = {
    "dynamic, no config": lambda model: DynamicCache(),
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=128),
}


def kinds(family: str) -> list[str]:
    return [kind for kind in KINDS if not (kind == "static" and family in CHAIN_TARGETS)]


@pytest.mark.parametrize(
    ("target", "new_ids_only", "name"),
    dealt([(family, kind) for family in ("llama", "sliding") for kind in kinds(family)], [False, True], each=4),
)
def test_second_turn_on_a_returned_cache(target, new_ids_only, name):
    """Turns by turn plain, drafted, drafted, plain on one cache: texts and rows are those of runs without it."""
    family, kind = target
    model, cache, text = shared(family), KINDS[kind](shared(family)), prompt(9)
    for turn, drafted in enumerate([False, True, True, False]):
        ids = torch.cat([text, prompt(3, seed=turn)], dim=-1)
        expected = generate(model, ids, max_new_tokens=12)
        generator = make(name, model, expected) if drafted else None
        options = dict(cache=cache, attention_mask=torch.ones_like(ids), max_new_tokens=12)
        held = int(cache.get_seq_length())
        if new_ids_only:
            if isinstance(generator, Oracle):
                generator.text = generator.text[held:]
            made = generate(model, ids[:, held:], generator, **options)
            assert torch.equal(made, expected[:, held:])
        else:
            assert torch.equal(generate(model, ids, generator, **options), expected)
        assert int(cache.get_seq_length()) == expected.shape[1] - 1
        text = expected
    if kind != "static":
        assert_same_rows(cache.layers, model, text[:, :-1])


def test_only_the_new_part_is_fed_on_a_filled_cache():
    model, seen = shared(), []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-1]))
    try:
        first = generate(model, prompt(9), return_dict_in_generate=True)
        ids = torch.cat([first.sequences, prompt(3)], dim=-1)
        seen.clear()
        expected = generate(model, ids)
        seen.clear()
        assert torch.equal(generate(model, ids, make("oracle-none", model, expected), cache=first.cache), expected)
    finally:
        handle.remove()
    assert seen[0] == 4  # the last token of turn 1, which no cache holds yet, and three new ones


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("family", ["llama", "sliding"])
def test_cache_returned_by_a_drafted_turn_equals_the_plain_one(family, name):
    model = shared(family)
    expected = generate(model, prompt(20), return_dict_in_generate=True)
    made = generate(model, prompt(20), make(name, model, expected.sequences), return_dict_in_generate=True)
    assert type(made.cache) is type(expected.cache)
    assert made.cache.get_seq_length() == expected.cache.get_seq_length() == made.sequences.shape[1] - 1
    assert [type(layer) for layer in made.cache.layers] == [type(layer) for layer in expected.cache.layers]
    assert not any(getattr(layer, "record_past", False) for layer in made.cache.layers)
    assert_same_rows(made.cache.layers, model, made.sequences[:, :-1])


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("length", [1, 12, 40])
def test_sliding_window_beyond_its_end(length, name):
    model = shared("sliding")
    expected = generate(model, prompt(length), max_new_tokens=50)
    assert torch.equal(generate(model, prompt(length), make(name, model, expected), max_new_tokens=50), expected)


def test_an_interrupted_call_leaves_the_users_cache_usable():
    """The full-attention cache of the user still holds the earlier turn, and only that."""
    model, cache = shared(), DynamicCache(config=shared().config)
    first = generate(model, prompt(9), cache=cache)
    ids = torch.cat([first, prompt(3)], dim=-1)
    expected = generate(model, ids)
    generator = make("oracle-some", model, expected)
    generator.observe = lambda step: 1 / (len(step.path) < 3)
    with pytest.raises(ZeroDivisionError):
        generate(model, ids, generator, cache=cache)
    assert_same_rows(cache.layers, model, first[:, :-1])
    assert torch.equal(generate(model, ids, make("oracle-some", model, expected), cache=cache), expected)


# refused by name, before any forward


def refused(model, error, pattern, **options) -> None:
    """`generate` with drafts raises an error that says `pattern`, before the model runs."""
    forwards = []
    handle = model.register_forward_pre_hook(lambda module, args: forwards.append(1))
    try:
        with pytest.raises(error, match=pattern):
            generate(model, prompt(9), PLDGen(), **options)
    finally:
        handle.remove()
    assert not forwards


class HalfLayer(QuantizedLayer):
    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def quantized(model) -> QuantizedCache:
    """A quantised cache without the packages that quantise."""
    cache = QuantizedCache.__new__(QuantizedCache)
    super(QuantizedCache, cache).__init__(layers=[HalfLayer() for _ in range(3)])
    return cache


def test_quantised_cache_is_refused_by_name():
    model = shared()
    refused(model, ValueError, "QuantizedCache with .*HalfLayer", cache=quantized(model))


def test_static_cache_of_a_sliding_window_is_refused_by_name():
    refused(shared("sliding"), ValueError, "StaticCache with .*Sliding", cache_implementation="static")


def test_caches_of_unknown_kind_are_refused_by_name():
    class OddLayer(DynamicLayer):
        pass

    class OddCache(DynamicCache):
        pass

    cache = DynamicCache()
    cache.layers = [OddLayer() for _ in range(3)]
    refused(shared(), ValueError, "OddLayer", cache=cache)
    refused(shared(), ValueError, "OddCache", cache=OddCache())


def test_linear_attention_is_refused_by_name():
    config = MambaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0, eos_token_id=None
    )
    refused(AutoModelForCausalLM.from_config(config), ValueError, "Mamba")


def test_hybrid_attention_is_refused_by_name():
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    config = Lfm2Config(**shape, layer_types=["conv", "full_attention", "conv"])
    refused(AutoModelForCausalLM.from_config(config), ValueError, "layers cannot do that|recurrent state")


def test_an_offloaded_cache_is_cropped_where_it_is_and_never_taken_over():
    """It lives on another device between two forwards, so that no rows of it can be gathered in place."""
    model = shared()
    cache = DynamicCache(config=model.config)
    cache.offloading = True  # its constructor needs an accelerator
    opened = open_cache(model, cache, capacity=32)
    assert type(opened) is ChainCache and opened.cache is cache and not opened.tree_capable


@pytest.mark.parametrize("name", SHORT)
def test_growth_beyond_the_reserved_rows(name, monkeypatch):
    """Decoding stays right where the cache must grow in the middle of it."""
    model = tiny()
    monkeypatch.setattr("hf_specdec.target.min", lambda *numbers: 1, raising=False)
    expected = generate(model, prompt(9), max_new_tokens=80)
    assert torch.equal(generate(model, prompt(9), make(name, model, expected), max_new_tokens=80), expected)

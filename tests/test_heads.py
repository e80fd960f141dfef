"""Heads of every method: what is not one of theirs, or not for this target, is a clear error before any forward."""

import logging
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from tiny import generate, prompt, shared, tiny
from tiny_chat import tiny_tokenizer
from typer.testing import CliRunner

import hf_specdec.train as training
from hf_specdec import METHODS, embedded_drafter
from hf_specdec.drafter import load_head, target_fields
from hf_specdec.generator import make_generator
from hf_specdec.methods.kangaroo import KangarooHead
from hf_specdec.models import EMBEDDED_HEADS, SHIPPED
from hf_specdec.vocabulary import check_tokenizer, hashes, template_digest, vocabulary_digest

HEADS = {name: method.head_class for name, method in METHODS.items() if method.head_class is not None}


def make_head(name, model, **options):
    torch.manual_seed(0)
    return HEADS[name].for_target(model, **({"exit_layer": 1} if name == "kangaroo" else {}) | options)


@pytest.fixture
def forwards():
    """Counts the target's forwards."""
    calls = []
    handle = shared().register_forward_pre_hook(lambda module, args: calls.append(1))
    yield calls
    handle.remove()


@pytest.mark.parametrize(("head", "method"), SHIPPED.items())
def test_a_head_that_ships_is_known_by_its_name_to_its_method_alone(head, method):
    assert (EMBEDDED_HEADS / head).is_dir()
    given = embedded_drafter(head)
    name = "drafter" if method == "sps" else "head"
    assert getattr(make_generator(f"{method}:{head}"), name) == getattr(given, name) == str(EMBEDDED_HEADS / head)
    assert make_generator("eagle:kangaroo").head == "kangaroo"


@pytest.mark.parametrize("other", HEADS)
@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_another_method_is_refused(tmp_path, forwards, name, other):
    make_head(other, shared()).save_pretrained(tmp_path)
    if name == other:
        generate(shared(), prompt(9), METHODS[name](str(tmp_path)))
        return
    with pytest.raises(ValueError, match="needs a draft model|no EAGLE head|not the tensors of|no Kangaroo"):
        generate(shared(), prompt(9), METHODS[name](str(tmp_path)))
    with pytest.raises(ValueError, match=f"specdec_{other}, not specdec_{name}"):
        load_head(str(tmp_path), HEADS[name])
    assert not forwards


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_another_target_is_refused_with_both_values(forwards, name):
    head = make_head(name, tiny(hidden_size=16))
    with pytest.raises(ValueError, match="hidden size 16, but .* 32"):
        generate(shared(), prompt(9), METHODS[name](head))
    assert not forwards


@pytest.mark.parametrize("name", HEADS)
def test_a_truncated_file_is_damaged(tmp_path, forwards, name):
    make_head(name, shared()).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        generate(shared(), prompt(9), METHODS[name](str(tmp_path)))
    assert not forwards


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", HEADS)
def test_shallow_targets_get_a_head_or_are_told_why_not(name, num_layers):
    model = tiny(num_hidden_layers=num_layers)
    kinds = {"eagle": [{}, {"fused": True}], "kangaroo": [{"exit_layer": 2}, {"exit_layer": 1}]}.get(name, [{}])
    for options in kinds:
        needed = {"kangaroo": options.get("exit_layer"), "sps": 2}.get(name, 0)
        if num_layers <= needed:
            with pytest.raises(ValueError, match=f"(which )?has {num_layers}"):
                make_head(name, model, **options)
        else:
            generator = METHODS[name](make_head(name, model, **options))
            assert torch.equal(generate(model, prompt(9), generator), generate(model, prompt(9)))


@pytest.mark.parametrize(("field", "message"), [("num_layrs", "no field num_layrs"), ("trained_on", "trained_on")])
@pytest.mark.parametrize("name", HEADS)
def test_a_misspelt_or_mistyped_field_of_a_head_is_named(name, field, message):
    with pytest.raises(ValueError, match=f"--set: .*{message}"):
        training.make_head(HEADS[name], shared(), tiny_tokenizer(), from_head=None, options={field: [2]})


def test_options_that_cannot_be_are_errors_before_the_target_writes_its_own_data(tmp_path, monkeypatch):
    model = tiny(dtype=torch.float32)
    monkeypatch.setattr(training, "load_model", lambda name, dtype, device: (model, tiny_tokenizer()))
    monkeypatch.setattr(training, "write_own", None)
    train = partial(training.train, "kangaroo", "self", tmp_path / "out", device="cpu")
    with pytest.raises(ValueError, match="an exit after layer 9 needs a target with more layers"):
        train(field=["exit_layer=9"])
    make_head("eagle", model).save_pretrained(tmp_path / "eagle")
    with pytest.raises(ValueError, match="specdec_eagle, not specdec_kangaroo"):
        train(from_head=str(tmp_path / "eagle"))
    assert not (tmp_path / "out").exists()


def test_errors_reach_the_command_line_as_one_message(tmp_path):
    app = typer.Typer()
    app.command()(training.train)
    result = CliRunner().invoke(app, ["pld", "--data", "none.jsonl", "-o", str(tmp_path)])
    assert isinstance(result.exception, ValueError) and "no head to train" in str(result.exception)


# the target's tokenizer


@pytest.fixture
def stored(tmp_path):
    """A target whose tokenizer lies in its folder, and that tokenizer."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path / "target")
    model = tiny()
    model.config.name_or_path = str(tmp_path / "target")
    return model, tokenizer


def test_the_files_give_the_hashes_of_the_tokenizer(stored):
    model, tokenizer = stored
    expected = hashes(tokenizer)
    assert expected.items() <= target_fields(model, tokenizer).items()
    path = Path(model.config.name_or_path, "tokenizer.json")
    assert vocabulary_digest(path, path.stat().st_mtime_ns) == expected["vocabulary_hash"]
    assert template_digest(model) == expected["chat_template_hash"]


@pytest.mark.parametrize("name", HEADS)
def test_another_vocabulary_of_the_same_size_is_refused_with_both_hashes(stored, name):
    model, tokenizer = stored
    head = make_head(name, model)
    found = hashes(tokenizer)["vocabulary_hash"]
    head.config.vocabulary_hash, head.config.target = "0123456789abcdef", "user/other"
    with pytest.raises(ValueError, match=f"0123456789abcdef of user/other, but that of .* {found}"):
        generate(model, prompt(9), METHODS[name](head))
    head.config.vocabulary_hash = found
    assert torch.equal(generate(model, prompt(9), METHODS[name](head)), generate(model, prompt(9)))


def test_another_chat_template_is_a_warning(stored, caplog):
    model, tokenizer = stored
    head = make_head("eagle", model)
    head.config.chat_template_hash = hashes(tokenizer)["chat_template_hash"]
    with caplog.at_level(logging.WARNING):
        head.attach(model)
    assert not caplog.records
    head.config.chat_template_hash = "0123456789abcdef"
    with caplog.at_level(logging.WARNING):
        head.attach(model)
    assert "0123456789abcdef of" in caplog.text and "chat template" in caplog.text


def test_nothing_is_read_twice_and_nothing_at_all_where_no_file_lies(stored, monkeypatch):
    model, tokenizer = stored
    vocabulary_digest.cache_clear()
    for _ in range(3):
        check_tokenizer(model, **hashes(tokenizer), made_for="it")
    assert vocabulary_digest.cache_info().misses == 1
    for name in ("", "user/nowhere", "no/such/name at all"):
        model.config.name_or_path = name
        check_tokenizer(model, vocabulary_hash="0", chat_template_hash="0", made_for="it")
    assert vocabulary_digest.cache_info().misses == 1


def test_an_exit_layer_beyond_the_model_is_refused():
    with pytest.raises(
        ValueError, match="an exit after layer 3 needs a target with more layers than that, but .* has 3"
    ):
        KangarooHead.for_target(shared(), exit_layer=3)

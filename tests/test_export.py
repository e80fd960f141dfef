"""Export: what `hf-specdec export` writes loads again with equal logits, and what a format cannot hold is said before."""

import json

import pytest
import torch
from safetensors.torch import load_file
from test_eagle import biased, head_for, teacher_forced
from tiny import generate, prompt, shared
from typer.testing import CliRunner

import hf_specdec.export as exporting
from hf_specdec import METHODS, EagleGen
from hf_specdec.cli import app
from hf_specdec.export import TOKEN_MAP, export, export_eagle


@pytest.fixture(autouse=True)
def tiny_target(monkeypatch):
    """The tiny target stands for whatever is asked for."""
    asked = []
    monkeypatch.setattr(exporting, "load_model", lambda name, dtype: asked.append((name, dtype)) or (shared(), None))
    return asked


def saved(folder, kind="eagle", **options):
    head = head_for(shared(), kind, **options)
    head.config.target = "user/target"
    head.save_pretrained(folder / "head")
    return head


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("eagle", "sglang"),
        ("eagle-reduced", "sglang"),
        ("eagle3", "sglang"),
        ("eagle3-reduced", "sglang"),
        ("eagle3", "speculators"),
        ("eagle3-reduced", "speculators"),
    ],
)
def test_exported_heads_draft_as_before(tmp_path, tiny_target, kind, format):
    model, ids = shared(), prompt(12)
    head = saved(tmp_path, kind)
    arguments = ["export", str(tmp_path / "head"), "--format", format, "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert tiny_target == [("user/target", torch.float64)]
    text, generator = generate(model, prompt(9)), EagleGen(str(tmp_path / "out"), min_probability=0)
    assert torch.equal(generate(model, prompt(9), generator), text)
    logits, again = teacher_forced(model, head, ids)[1], teacher_forced(model, generator.head, ids)[1]
    if kind == "eagle-reduced":  # the format has no map: the weights draft all ids, and the map lies beside them
        chosen = torch.load(tmp_path / "out" / TOKEN_MAP, weights_only=True)
        assert chosen == head.draft_ids.tolist() and TOKEN_MAP in result.output.replace("\n", "")
        again = again[..., chosen]
    torch.testing.assert_close(again, logits)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in tensors) == kind.startswith("eagle3") and "embed_tokens.weight" not in tensors


def test_what_servers_look_up_is_in_the_config(tmp_path):
    saved(tmp_path, "eagle3-reduced")
    export(str(tmp_path / "head"), "speculators", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "user/target"
    assert config["draft_vocab_size"] == 48 and config["speculators_model_type"] == "eagle3"
    export(str(tmp_path / "head"), "sglang", tmp_path / "sglang")
    config = json.loads((tmp_path / "sglang" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [
        0,
        1,
    ]  # of hidden states 1 and 2, their outputs


@pytest.mark.parametrize(
    ("kind", "options", "format", "message"),
    [
        ("eagle", {}, "speculators", "EAGLE-1 or -2 head.*sglang"),
        ("eagle", {}, "gguf", "unknown format 'gguf'"),
        ("eagle", {"own_lm_head": True}, "sglang", "sglang format cannot hold own_lm_head"),
        ("eagle", {"attention_bias": True}, "sglang", "sglang format cannot hold attention_bias"),
        ("eagle3", {"norm_before_residual": True}, "sglang", "cannot hold norm_before_residual.*speculators"),
        ("eagle3", {"norm_before_fc": True, "feed_back_normed": True}, "sglang", "feed_back_normed, norm_before_fc"),
        ("eagle3", {"norm_output": False}, "speculators", "speculators format cannot hold norm_output=False"),
    ],
)
def test_a_format_that_cannot_hold_a_head_says_what_it_lacks(tmp_path, tiny_target, kind, options, format, message):
    saved(tmp_path, kind, **options)
    with pytest.raises(ValueError, match=message):
        export(str(tmp_path / "head"), format, tmp_path / "out")
    assert not tiny_target and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "format"), [("eagle", "sglang"), ("eagle3", "sglang"), ("eagle3", "speculators")])
def test_a_bias_of_the_lm_head_is_not_dropped_in_silence(tmp_path, kind, format):
    with pytest.raises(ValueError, match="no place for the bias"):
        export_eagle(head_for(biased(), kind), tmp_path / "served", dialect=format, target="a/b")
    assert not (tmp_path / "served").exists()


def test_wrong_requests_are_errors_before_any_work(tmp_path, tiny_target):
    METHODS["kangaroo"].head_class.for_target(shared(), exit_layer=1).save_pretrained(tmp_path / "kangaroo")
    with pytest.raises(ValueError, match="specdec_kangaroo: vLLM and SGLang have a format for EAGLE heads alone"):
        export(str(tmp_path / "kangaroo"), "sglang", tmp_path / "out")
    head = saved(tmp_path)
    with pytest.raises(ValueError, match="not empty"):
        export(str(tmp_path / "head"), "sglang", tmp_path / "head")
    head.config.target = None
    head.save_pretrained(tmp_path / "head")
    with pytest.raises(ValueError, match="--target"):
        export(str(tmp_path / "head"), "sglang", tmp_path / "out")
    assert not tiny_target and not (tmp_path / "out").exists()

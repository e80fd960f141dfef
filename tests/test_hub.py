"""The Hub: what is pushed comes back and drafts as before, for whoever may have it; what may not, says why."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_client import environment, seed_embedded
from hub_server import READER, STRANGER, WRITER
from huggingface_hub import HfApi, constants
from test_eagle import official_eagle1
from test_kangaroo import LLAMA
from test_kangaroo import published as kangaroo_tensors
from test_medusa import published as medusa_tensors
from tiny import generate, make, noisy, prompt, shared, stored_texts, tiny
from transformers import AutoModel

import hf_specdec
from hf_specdec import METHODS, EagleGen, RESTGen, SpSGen
from hf_specdec.hub import push
from hf_specdec.methods import SHIPPED
from hf_specdec.models import EMBEDDED_HEADS

HEADS = [name for name, method in METHODS.items() if method.head_class]
ABOUT = {"base_model": "user/target"}


def new_head(method: str, **options):
    torch.manual_seed(1)
    options = {"exit_layer": 1} if method == "kangaroo" else {}
    return METHODS[method].head_class.for_target(shared(), **options).to(torch.float64)


@pytest.fixture
def pushed(hub):
    """The Hub with an EAGLE head at user/head, of which there are two versions."""
    head = new_head("eagle")
    head.push_to_hub("user/head", **ABOUT)
    HfApi().create_tag("user/head", tag="v1")
    with torch.no_grad():
        head.fc.weight.add_(1)
    head.push_to_hub("user/head", **ABOUT)
    return hub


def first_weight(generator) -> float:
    generator.bind(shared())
    return generator.head.fc.weight[0, 0].item()


def fresh(hub, home, code: str, **env):
    """What a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(hub, home, **env), capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("method", HEADS)
def test_a_pushed_head_comes_back_and_drafts_the_same(hub, method):
    model, head = shared(), new_head(method)
    before = METHODS[method](head)
    text = generate(model, prompt(9), before)
    head.push_to_hub("user/head", **ABOUT)
    assert hub.repos["model", "user/head"].messages == ["seed", f"Upload {method} head"]
    for again in (hf_specdec.load("user/head"), METHODS[method]("user/head")):
        assert type(again) is METHODS[method]
        assert torch.equal(generate(model, prompt(9), again), text)
        if method != "sps":  # whose draft lengths follow measured times
            assert again.stats.accepted_lengths == before.stats.accepted_lengths
    assert type(AutoModel.from_pretrained("user/head")) is type(head)


def test_shipped_heads_come_back_in_a_fresh_process_with_the_same_ids_and_tokens_per_step(hub, smollm, tmp_path):
    model, tokenizer = smollm
    ids = tokenizer("The planets of the solar system are", return_tensors="pt").input_ids
    code = f"""
import json, torch, hf_specdec
model, _ = hf_specdec.load_embedded("float32", device="cpu")
for name in {list(SHIPPED)}:
    generator = hf_specdec.load("user/" + name)
    generator.num_draft_tokens = 4  # of SpS, whose own length follows measured times
    output = model.generate(torch.tensor({ids.tolist()}), candidate_generator=generator, max_new_tokens=40, do_sample=False)
    print(json.dumps([output.tolist(), generator.stats.accepted_lengths, generator.stats.tokens_per_step]))
"""
    seed_embedded(hub)
    for name in SHIPPED:
        push(EMBEDDED_HEADS / name, f"user/{name}")
    lines = fresh(hub, tmp_path / "home", code).splitlines()
    for name, line in zip(SHIPPED, lines, strict=True):
        generator = hf_specdec.embedded_drafter(name)
        generator.num_draft_tokens = 4
        output = model.generate(ids, candidate_generator=generator, max_new_tokens=40, do_sample=False)
        stats = generator.stats
        assert json.loads(line) == [output.tolist(), stats.accepted_lengths, stats.tokens_per_step]


def test_files_of_other_projects_get_their_own_method(hub, tmp_path):
    model = shared()
    options = {"eagle": {}, "medusa": {"output": "own"}, "kangaroo": {"head_dim": 8, "exit_layer": 2}}
    heads = {method: METHODS[method].head_class.for_target(model, **options[method]) for method in options}
    official_eagle1(heads["eagle"], tmp_path)
    hub.seed("their/eagle", {name: (tmp_path / name).read_bytes() for name in ("config.json", "pytorch_model.bin")})
    medusa = {**medusa_tensors(heads["medusa"])}
    torch.save(medusa, tmp_path / "medusa_lm_head.pt")
    config = b'{"medusa_num_heads": 2, "base_model_name_or_path": "their/target"}'
    hub.seed(
        "their/medusa", {"config.json": config, "medusa_lm_head.pt": (tmp_path / "medusa_lm_head.pt").read_bytes()}
    )
    torch.save(kangaroo_tensors(heads["kangaroo"]), tmp_path / "kangaroo.bin")
    files = {"config.json": json.dumps(LLAMA).encode(), "pytorch_model.bin": (tmp_path / "kangaroo.bin").read_bytes()}
    hub.seed("their/kangaroo", files | {"optimizer.pt": b"gigabytes", "training_args.bin": b"more"})
    expected = generate(model, prompt(9))
    for method in heads:
        generator = hf_specdec.load(f"their/{method}")
        assert type(generator) is METHODS[method]
        assert torch.equal(generate(model, prompt(9), generator), expected)
    pulled = {path.name for path in Path(constants.HF_HUB_CACHE).rglob("*")}
    assert "pytorch_model.bin" in pulled and not pulled & {"optimizer.pt", "training_args.bin"}


class Arguments:
    """Stands for what a trainer pickles beside the weights."""


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt"])
def test_pickles_of_a_gpu_and_of_a_trainer_are_no_hindrance(tmp_path, monkeypatch, name):
    model = shared()
    with monkeypatch.context() as saved_there:
        saved_there.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        official_eagle1(METHODS["eagle"].head_class.for_target(model), tmp_path)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / name)
    for other in (
        "training_args.bin",
        "optimizer.pt",
        "optimizer.bin",
        "scheduler.pt",
        "scaler.pt",
        "rng_state_0.pth",
    ):
        torch.save(Arguments(), tmp_path / other)
    generator = hf_specdec.load(tmp_path)
    assert torch.equal(generate(model, prompt(9), generator), generate(model, prompt(9)))
    assert generator.head.fc.weight.device.type == "cpu"


def test_a_causal_model_drafts_by_sps_and_a_dataset_by_rest(hub, tmp_path):
    model = shared()
    noisy(model).save_pretrained(tmp_path / "small")
    hub.seed("their/small", {path.name: path.read_bytes() for path in (tmp_path / "small").iterdir()})
    store = stored_texts(model)
    push(store.folder, "user/store")
    generators = [hf_specdec.load("their/small"), SpSGen("their/small@main"), hf_specdec.load("user/store@main")]
    generators += [RESTGen("user/store"), hf_specdec.make_generator("rest:user/store?max_nodes=8")]
    assert [generator.name for generator in generators] == ["sps", "sps", "rest", "rest", "rest"]
    for generator in generators:
        assert torch.equal(generate(model, prompt(9), generator), generate(model, prompt(9)))
        assert generator.stats.drafted
    with pytest.raises(ValueError, match="no method drafts with their/picture"):
        hub.seed("their/picture", {"config.json": b'{"model_type": "vit"}'})
        hf_specdec.load("their/picture")


def test_branch_tag_commit_and_folder(pushed):
    repo = pushed.repos["model", "user/head"]
    old, new = first_weight(hf_specdec.load("user/head", revision="v1")), first_weight(hf_specdec.load("user/head"))
    assert new == old + 1
    commit = repo.refs["v1"]
    for generator in (
        EagleGen("user/head@v1"),
        EagleGen(f"user/head@{commit}"),
        hf_specdec.load("user/head", revision=commit),
    ):
        assert first_weight(generator) == old
    head = new_head("eagle")
    head.push_to_hub("user/head", revision="trial/one", commit_message="Another", **ABOUT)
    assert first_weight(EagleGen("user/head@trial/one")) == old and first_weight(EagleGen("user/head@main")) == new
    assert repo.messages[-1] == "Another"
    folder = hf_specdec.load("user/head@v1").head
    assert first_weight(hf_specdec.load(folder)) == old
    with pytest.raises(ValueError, match="has no revision"):
        hf_specdec.load(folder, revision="v1")
    with pytest.raises(ValueError, match="give one of them"):
        hf_specdec.load("user/head@v1", revision="main")


def test_offline_what_was_pulled_is_found_by_branch_tag_and_commit(pushed, monkeypatch, tmp_path):
    commit = pushed.repos["model", "user/head"].refs["v1"]
    old = first_weight(EagleGen("user/head@v1"))
    hf_specdec.load("user/head")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(pushed.log)
    assert first_weight(EagleGen("user/head")) == old + 1
    assert first_weight(EagleGen("user/head@v1")) == first_weight(EagleGen(f"user/head@{commit}")) == old
    for source in ("user/head@trial", "user/other"):
        with pytest.raises(
            OSError, match=f"(?s){source.split('@')[0]}.*in the cache .*HF_HUB_OFFLINE is set.*give a folder"
        ):
            hf_specdec.load(source)
    with pytest.raises(OSError, match=str(tmp_path / "elsewhere")):
        hf_specdec.load("user/head", cache_dir=tmp_path / "elsewhere")
    assert len(pushed.log) == asked


def test_without_a_network_what_was_pulled_still_loads(pushed, monkeypatch):
    hf_specdec.load("user/head")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert first_weight(EagleGen("user/head"))
    with pytest.raises(OSError, match="(?s)'user/other' is not, or not whole, in the cache .*127.0.0.1:9 says"):
        EagleGen("user/other").bind(shared())


def test_who_may_not_have_it_is_told_why(pushed, monkeypatch):
    pushed.repos["model", "user/head"].private = True
    assert hf_specdec.load("user/head", token=WRITER) and hf_specdec.load("user/head", token=READER)
    shutil.rmtree(constants.HF_HUB_CACHE)
    cases = [
        (STRANGER, "has no model 'user/head', or it is private.*hf auth login"),
        ("hf_bad", "no valid token is in use"),
    ]
    for token, message in cases:
        with pytest.raises(OSError, match=f"(?s){message}") as caught:
            hf_specdec.load("user/head", token=token)
        assert token not in str(caught.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError, match="or it is private"):
        hf_specdec.load("user/head")
    pushed.repos["model", "user/head"].private, pushed.repos["model", "user/head"].gated = False, True
    with pytest.raises(OSError, match="is gated: ask for access at http.*/user/head"):
        hf_specdec.load("user/head")


def test_what_is_not_there_is_said(pushed, tmp_path):
    for source, message in (
        ("user/none", "has no model 'user/none'.*nor is there a folder of this name"),
        ("user/head@v2", "user/head has no revision 'v2': give a branch, a tag"),
        ("./none", "no folder ./none, and a Hub repository is written user/name"),
        ("a/b/c", "no folder a/b/c"),
    ):
        for make_it in (hf_specdec.load, lambda source: EagleGen(source).bind(shared())):
            with pytest.raises(OSError, match=f"(?s){message}"):
                make_it(source)
    with pytest.raises(OSError, match="has no dataset 'user/none'"):
        RESTGen("user/none")
    push(stored_texts(shared()).folder, "user/store")
    with pytest.raises(OSError, match="user/store has no revision 'v2'"):
        hf_specdec.load("user/store", revision="v2")
    pushed.seed("user/empty", {"README.md": b"nothing"})
    with pytest.raises(ValueError, match="user/empty holds neither config.json nor datastore.json"):
        hf_specdec.load("user/empty")


def test_another_target_and_damaged_files_are_refused_by_name(pushed):
    generator = hf_specdec.load("user/head")
    weights = Path(generator.head, "model.safetensors").resolve()
    with pytest.raises(ValueError, match="user/target with hidden size 32, but .* has hidden size 64"):
        generate(tiny(hidden_size=64), prompt(9), generator)
    weights.write_bytes(weights.read_bytes()[:1000])
    for make_it in (hf_specdec.load, EagleGen):
        with pytest.raises(ValueError, match=f"damaged.*delete.*{weights}|{weights} is damaged.*delete"):
            make_it("user/head").bind(shared())
    weights.unlink()  # as the message says
    assert first_weight(hf_specdec.load("user/head"))


def test_only_listed_files_travel(hub, tmp_path):
    head = new_head("eagle")
    head.save_pretrained(tmp_path / "head")
    (tmp_path / "head" / "checkpoints").mkdir()
    for name in (
        "secret.env",
        "chats.jsonl",
        "notes.txt",
        "checkpoints/model.safetensors",
        "optimizer.pt",
        "README.md",
    ):
        (tmp_path / "head" / name).write_text("mine")
    push(tmp_path / "head", "user/head", custom_generate=True, **ABOUT)
    files = hub.repos["model", "user/head"].files()
    own = {
        "config.json",
        "model.safetensors",
        "README.md",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
    }
    assert set(files) == own | {".gitattributes"} and b"mine" not in files["README.md"]
    strange = {
        "evil.py": b"1",
        "onnx/model.safetensors": b"1",
        "pytorch_model.bin": b"1",
        "consolidated.safetensors": b"1",
    }
    hub.seed("their/head", files | strange)
    folder = Path(hf_specdec.load("their/head").head)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == own - {
        name for name in own if "/" in name or name == "README.md"
    }


def test_a_push_replaces_the_files_of_the_last_one_and_nothing_else(hub):
    head = new_head("eagle")
    shards = {f"model-0000{i}-of-00002.safetensors": b"old" for i in (1, 2)}
    hub.seed("user/head", {**shards, "model.safetensors.index.json": b"{}", "LICENSE": b"mine", "sub/x.bin": b"mine"})
    done = head.push_to_hub("user/head", **ABOUT)
    repo = hub.repos["model", "user/head"]
    assert set(repo.files()) == {"LICENSE", "sub/x.bin", "README.md", "config.json", "model.safetensors"}
    again = head.push_to_hub("user/head", **ABOUT)
    assert done.oid == again.oid and repo.messages == ["seed", "Upload eagle head"]


def test_private_repositories_and_pull_requests(hub, monkeypatch):
    head = new_head("eagle")
    head.push_to_hub("user/head", private=True, **ABOUT)
    assert hub.repos["model", "user/head"].private
    hub.repos["model", "user/head"].private = False
    with torch.no_grad():
        head.fc.weight.add_(1)
    with pytest.raises(OSError, match="answered 403; the token in use may not do this.*create_pr"):
        head.push_to_hub("user/head", token=STRANGER, **ABOUT)
    done = head.push_to_hub("user/head", token=STRANGER, create_pr=True, commit_message="Better", **ABOUT)
    assert done.pr_revision == "refs/pr/1" and HfApi().get_discussion_details("user/head", 1).title == "Better"
    old, new = first_weight(EagleGen("user/head")), first_weight(EagleGen("user/head@refs/pr/1"))
    assert new == old + 1
    HfApi().merge_pull_request("user/head", 1)
    assert first_weight(EagleGen("user/head")) == new


def test_what_is_not_whole_or_unknown_is_not_sent(hub, tmp_path):
    make("eagle", shared()).head.save_pretrained(tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    for change, message, about in (
        ({"target": "/home/me/model"}, "no Hub id: give its target's as base_model", {}),
        ({"model_type": "llama"}, "no head of hf_specdec: push a model with its own push_to_hub", ABOUT),
        ({"hidden_size": 16}, "mismatch|size", ABOUT),
    ):
        (tmp_path / "head" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises((ValueError, RuntimeError), match=message):
            push(tmp_path / "head", "user/head", **about)
    with pytest.raises(ValueError, match="neither config.json nor datastore.json nor report.json"):
        push(tmp_path, "user/head")
    with pytest.raises(ValueError, match="no folder"):
        push(tmp_path / "none", "user/head")
    with pytest.raises(ValueError, match="custom_generate is for heads"):
        push(stored_texts(shared()).folder, "user/store", custom_generate=True)
    assert not hub.log


def test_a_head_that_was_loaded_takes_its_records_along(hub, tmp_path, monkeypatch):
    head = new_head("eagle")
    head.save_pretrained(tmp_path / "head")
    (tmp_path / "training.json").write_text('{"command": "of another head"}')
    (tmp_path / "head" / "training.json").write_text('{"command": "hf-specdec train eagle"}')
    monkeypatch.chdir(tmp_path)
    head.push_to_hub("user/new", **ABOUT)
    type(head).from_pretrained(tmp_path / "head").push_to_hub("user/loaded", **ABOUT)
    assert "training.json" not in hub.repos["model", "user/new"].files()
    assert b"hf-specdec train eagle" in hub.repos["model", "user/loaded"].files()["README.md"]
    with pytest.raises(ValueError, match="call push_to_hub"):
        head.save_pretrained(tmp_path / "head", push_to_hub=True)

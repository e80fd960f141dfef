"""Cards and commands of the Hub: what a card says is checked, what it shows runs, and other projects' clients read it all."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from hub_client import environment
from hub_server import WRITER
from huggingface_hub import DatasetCard, ModelCard, SpaceCard
from test_hub import fresh, new_head
from tiny import prompt, shared, stored_texts, tiny
from trained import VOCAB_SIZE, byte_tokenizer
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import cards, cli, results
from hf_specdec.drafter import target_fields
from hf_specdec.hub import collect, push
from hf_specdec.models import EMBEDDED_HEADS

ROOT = Path(__file__).parent.parent
CONDITIONS = {"hardware": "a CPU", "dtype": "bfloat16", "temperature": 0.0, "date": "2026-11-30"}
REPORT = {
    "conditions": {},
    "runs": [CONDITIONS | {"model": "user/target", "questions": "question.jsonl", "counting": "ids"}],
    "rows": [
        {"run": 0, "task": task, "method": method, "answers": 12, "failed": 0, **figures}
        for task in ("overall", "qa")
        for method, figures in (
            ("plain", {}),
            (
                "eagle:DIR/head?top_k=1",
                {"tokens_per_step": 1.5, "speedup": 1.2, "speedup_low": 1.1, "speedup_high": 1.3},
            ),
            ("hybrid:sam+eagle", {"tokens_per_step": 2.5, "speedup": 2.2, "speedup_low": 2.1, "speedup_high": 2.3}),
        )
    ],
}


@pytest.fixture
def head_folder(tmp_path):
    """A head as training leaves it, with the records of its training, and a report about it."""
    head = new_head("eagle")
    head.config.target, head.config.trained_on = "user/target", "12 chats; 3 steps"
    head.config.chat_template_hash = "abc"
    folder = tmp_path / "head"
    head.save_pretrained(folder)
    final = {"eval_tokens_per_step": 1.75, "eval_acceptance_1": 0.5}
    command = "hf-specdec train eagle --data CHATS.jsonl"
    training = {"command": command, "dataset": "user/chats", "conditions": CONDITIONS, "final": final, "log": []}
    (folder / "training.json").write_text(json.dumps(training))
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    (tmp_path / "report.csv").write_text("run,task,method,speedup\n0,overall,eagle,1.2\n")
    return folder


def test_a_heads_card_says_what_it_is_for_how_it_was_trained_and_what_it_gives(head_folder):
    upload = collect(head_folder, "user/head", results=head_folder.parent, custom_generate=True)
    data, text = upload.card.data, upload.card.text
    assert (data.library_name, data.base_model, data.base_model_relation) == ("hf-specdec", "user/target", "adapter")
    assert data.license == "apache-2.0" and data.datasets == ["user/chats"] and data.pipeline_tag == "text-generation"
    assert data.tags == ["speculative-decoding", "hf-specdec", "eagle", "custom_generate"]
    shown = [
        (row.dataset_name, row.metric_type, row.metric_value, row.metric_args["method"]) for row in data.eval_results
    ]
    assert shown == [
        ("held-out answers", "tokens_per_step", 1.75, "eagle"),
        ("Spec-Bench", "tokens_per_step", 1.5, "eagle?top_k=1"),
        ("Spec-Bench", "speedup", 1.2, "eagle?top_k=1"),
    ]
    assert all(CONDITIONS.items() <= row.metric_args.items() for row in data.eval_results)
    for said in (
        "12 chats; 3 steps",
        "hf-specdec train eagle --data CHATS.jsonl",
        "the ids are those of plain `generate`",
    ):
        assert said in text
    assert "1.20x | 1.10–1.30" in text and "2.2" not in text and "arXiv:2401.15077" in text
    assert json.loads(upload.files["evaluation.json"]) == cards.report_figures(
        head_folder.parent, "eagle", head_folder
    )


def test_a_head_without_records_says_that_nothing_was_measured(hub):
    new_head("medusa").push_to_hub("user/head", base_model="user/target")
    card = ModelCard.load("user/head")
    assert card.data.eval_results is None and "Not measured yet" in card.text and "is not recorded" in card.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("license: apache-2.0\n", ""), "no license"),
        (
            lambda text: text.replace("base_model_relation: adapter", "base_model_relation: friend"),
            "is none of adapter",
        ),
        (lambda text: text.replace("base_model: user/target", "base_model: /home/me/target"), "base_model '/home/me"),
        (lambda text: text.replace("dtype: bfloat16\n", "threads: 2\n"), "stands without dtype"),
        (lambda text: text.replace("value: 1.75", "value: .nan"), "stands without a value"),
        (lambda text: text.replace("import hf_specdec\n", "import hf_specdec(\n"), "no Python"),
        (lambda text: text + "{{ more }}", "not filled in"),
        (lambda text: text + WRITER, "access token"),
    ],
)
def test_a_card_that_is_not_valid_is_refused(head_folder, change, message):
    card = collect(head_folder, "user/head").card
    cards.check_card(card, "model")
    assert change(str(card)) != str(card)
    with pytest.raises(ValueError, match=message):
        cards.check_card(ModelCard(change(str(card)), ignore_metadata_errors=True), "model")


def test_cards_of_datastores_results_and_the_space_are_valid(head_folder):
    uploads = [collect(stored_texts(shared()).folder, "user/store"), collect(head_folder.parent, "user/results")]
    for upload in uploads:
        assert upload.repo_type == "dataset" and upload.card.data.license
    assert "3 documents" in uploads[0].card.text and "1.20x" in uploads[1].card.text
    cards.check_card(cards.space_card(), "space")
    with pytest.raises(ValueError, match="short_description is longer"):
        cards.check_card(SpaceCard(str(cards.space_card()).replace("side by side, live", "side by side" * 9)), "space")


def test_of_several_heads_in_a_report_each_gets_its_own_figures(tmp_path):
    row = next(row for row in REPORT["rows"] if row["task"] == "overall" and row["method"].startswith("eagle"))
    rows = [
        row | {"method": spec, "speedup": i + 1.0} for i, spec in enumerate(["eagle", "eagle:a/b?top_k=1", "eagle:c"])
    ]
    (tmp_path / "report.json").write_text(json.dumps(REPORT | {"rows": rows}))
    for head, speedups in {Path("a/b"): [2.0], tmp_path / "c": [3.0], EMBEDDED_HEADS / "eagle2": [1.0]}.items():
        assert [figure["speedup"] for figure in cards.report_figures(tmp_path, "eagle", head)] == speedups
    for stranger in (tmp_path / "mine", tmp_path / "eagle2"):  # what ships has no say in it
        with pytest.raises(ValueError, match=f"no row of the head {stranger.name}"):
            cards.report_figures(tmp_path, "eagle", stranger)


@pytest.mark.parametrize("method", ["eagle", "kangaroo", "sps"])
def test_a_report_without_the_method_or_no_report_is_refused(tmp_path, method):
    (tmp_path / "report.json").write_text(json.dumps(REPORT if method != "sps" else {"rows": [1]}))
    if method == "eagle":
        assert cards.report_figures(tmp_path, method, tmp_path / "head")
    else:
        with pytest.raises(ValueError, match="no row of the head head|is not the report.json"):
            cards.report_figures(tmp_path, method, tmp_path / "head")


def test_the_card_command_asks_no_network(head_folder, hub):
    run = CliRunner().invoke(
        cli.app, ["card", str(head_folder), "--repo", "user/head", "--results", str(head_folder.parent), "--write"]
    )
    assert run.exit_code == 0, run.output
    said = " ".join(run.output.split())
    assert "card is valid; push would upload README.md, config.json, model.safetensors, training.json" in said
    card = ModelCard.load(head_folder / "README.md")
    assert card.data.base_model == "user/target" and 'load("user/head")' in card.text and not hub.log
    assert str(collect(head_folder, "user/head").card) == str(card)  # the figures are in the folder now


def test_the_commands_push_and_say_where(head_folder, hub):
    run = CliRunner().invoke(
        cli.app, ["push", str(head_folder), "user/head", "--private", "--message", "Mine", "--custom-generate"]
    )
    assert run.exit_code == 0, run.output
    repo = hub.repos["model", "user/head"]
    assert (
        repo.private
        and repo.messages[-1] == "Mine"
        and f"{hub.endpoint}/user/head/commit/{repo.refs['main']}" in run.output
    )
    head = collect(head_folder, "user/head", base_model="user/other")
    assert json.loads(head.files["config.json"])["target"] == "user/other"
    run = CliRunner().invoke(
        cli.app, ["push", str(head_folder), "user/head", "--create-pr", "--base-model", "user/other"]
    )
    assert run.exit_code == 0 and f"{hub.endpoint}/user/head/discussions/1" in run.output


def test_without_a_token_or_a_whole_name_it_is_said_what_is_missing(head_folder, hub, monkeypatch):
    with pytest.raises(ValueError, match="write it as user/head"):
        push(head_folder, "head")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError, match="answered 401; no valid token is in use: log in with `hf auth login`"):
        push(head_folder, "user/head")
    assert not hub.repos


def test_the_space_is_one_commit_with_what_it_needs(hub):
    run = CliRunner().invoke(cli.app, ["space", "user/demo"])
    assert run.exit_code == 0, run.output
    repo = hub.repos["space", "user/demo"]
    files = repo.files()
    assert len(repo.messages) == 2 and {"app.py", "requirements.txt", "README.md"} < set(files)
    assert files["app.py"] == (ROOT / "app.py").read_bytes()
    reports = {str(path.relative_to(ROOT)) for path in ROOT.glob("eval/results/*/report/report.json")}
    assert reports and reports < set(files), "what its other tabs show"
    assert files["requirements.txt"].decode() == f"hf-specdec[app]=={hf_specdec.__version__}\n"
    assert (ROOT / "requirements" / "space.txt").read_text() == files["requirements.txt"].decode()
    assert SpaceCard(files["README.md"].decode()).data.sdk == "gradio"


def test_a_datastore_is_pulled_into_a_folder_to_add_to(hub, tmp_path):
    store = stored_texts(shared())
    push(store.folder, "user/store")
    for _ in range(2):
        run = CliRunner().invoke(cli.app, ["datastore", "pull", "user/store@main", str(tmp_path / "store")])
    assert run.exit_code == 2 and "already: give a new folder" in " ".join(run.output.replace("│", "").split())
    again = hf_specdec.Datastore.open(tmp_path / "store")
    assert again.info() == store.info()
    assert again.add([[3, 4, 5]]).num_documents == store.num_documents + 1
    push(tmp_path / "store", "user/store")
    assert hf_specdec.load("user/store").datastore.num_documents == store.num_documents + 1


def test_what_the_card_shows_runs_as_pasted_in_a_fresh_process(hub, tmp_path):
    """Also `custom_generate`, for somebody who has hf-specdec installed and never imports it."""
    target, tokenizer = tiny(vocab_size=VOCAB_SIZE, scale=4, dtype=torch.float32), byte_tokenizer()
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    hub.seed("user/target", {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()})
    head = hf_specdec.EagleGen.head_class.for_target(target)
    for name, value in (target_fields(target, tokenizer) | {"target": "user/target"}).items():
        setattr(head.config, name, value)
    head.push_to_hub("user/head", custom_generate=True)
    blocks = cards.code_blocks(ModelCard.load("user/head").text)
    assert len(blocks) == 2 and "apply_chat_template" in blocks[0]
    stranger = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("user/target")
options = dict(inputs=torch.tensor({prompt(9).tolist()}), max_new_tokens=64, do_sample=False)
plain = model.generate(**options)
assert "hf_specdec" not in sys.modules
assert torch.equal(model.generate(custom_generate="user/head", trust_remote_code=True, **options), plain)
assert "hf_specdec" in sys.modules
"""
    code = [stranger, blocks[0], "pasted = output", blocks[1], "print(output.tolist() == pasted.tolist())"]
    printed = fresh(hub, tmp_path / "home", "\n".join(code)).splitlines()
    assert printed[-1] == "True" and re.fullmatch(r"\d\.\d\d tokens per step", printed[-2])


def test_other_clients_read_what_was_pushed(hub, head_folder, tmp_path):
    push(head_folder.parent, "user/results")
    push(head_folder, "user/head")
    assert DatasetCard.load("user/results").data.configs[0]["data_files"] == "report.csv"
    assert {row["speedup"] for row in results.read_dataset("user/results")} == {1.2, 2.2}
    code = """
import datasets
rows = datasets.load_dataset("user/results", split="train")
print(rows[0])
"""
    assert "'method': 'eagle'" in fresh(hub, tmp_path / "home", code)
    hf = Path(sys.executable).with_name("hf")
    done = subprocess.run(
        [hf, "download", "user/head", "--local-dir", tmp_path / "copy"],
        env=environment(hub, tmp_path / "home"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == (head_folder / "model.safetensors").read_bytes()


def test_the_shipped_heads_card_names_its_target_and_its_figures():
    for folder in EMBEDDED_HEADS.iterdir():
        upload = collect(folder, "user/head")
        assert upload.card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
        if (folder / "evaluation.json").exists():
            assert {row.metric_type for row in upload.card.data.eval_results} == {"tokens_per_step", "speedup"}


def test_a_wheel_has_the_templates_and_the_space(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in (
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "app.py",
        "hf_specdec",
        "hub_cards",
        "eval",
    ):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    done = subprocess.run([*command, tmp_path, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    code = "from hf_specdec import cards; print(*(str(path) for path in cards.TEMPLATES.iterdir()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    wanted = {path.name for path in cards.TEMPLATES.glob("*.*")} | {"app.py", "eval"}
    assert set(done.stdout.split()) == {str(site / "hf_specdec" / "hub_cards" / name) for name in wanted}, done.stderr
    assert {path.name for path in site.iterdir() if "dist-info" not in path.name} == {"hf_specdec"}

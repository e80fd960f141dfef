"""The command line, on a tiny model in a folder: what each command prints, and how bad input ends."""

import json

import pytest
import torch
from tiny import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_specdec import METHODS, PLDGen, cli
from hf_specdec.bench import NoDraft, dictated, races
from hf_specdec.compare import Difference


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer of 97 words."""
    path = tmp_path_factory.mktemp("tiny")
    words = {f"w{i}": i for i in range(96)} | {"<unk>": 96}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)
    tiny("llama", dtype=torch.float32).save_pretrained(path)
    return str(path)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("w1 w2 w3 w4\n\nw9 w8 w7 w9 w8\n")
    return str(path)


def run(*words, code=0):
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done


def run_main(monkeypatch, capsys, *words):
    """The console script itself, which turns errors into messages."""
    monkeypatch.setattr("sys.argv", ["hf-specdec", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, " ".join(capsys.readouterr().err.split())


def test_methods_lists_every_method():
    rows = json.loads(run("methods", "--json").stdout)
    assert [row["name"] for row in rows] == list(METHODS)
    assert all(row["about"].strip() for row in rows)


def test_compare_reports_each_method_with_its_conditions(folder, prompts):
    drafts = f"sps:{folder}?num_draft_tokens=2"  # an adaptive length may be 0, as the machine's load will have it
    report = json.loads(
        run("compare", "--model", folder, "--prompts", prompts, "-m", "pld", "-m", drafts, "--max-new-tokens", 12,
            "--dtype", "float32", "--repeats", 2, "--json").stdout
    )  # fmt: skip
    rows = {row["method"]: row for row in report["methods"]}
    assert list(rows) == ["plain", "pld", drafts]
    assert all(row["identical"] == row["answers"] == 4 for row in rows.values())
    assert rows["plain"]["speedup"] == 1.0 and rows[drafts]["tokens_per_step"] > 1
    assert rows["pld"]["tokens_per_step"] == pytest.approx(1 + rows["pld"]["accepted_per_step"], abs=0.2)
    about = report["conditions"]
    assert {"model", "dtype", "hardware", "threads", "torch", "transformers", "commit", "temperature"} <= set(about)


def test_compare_shows_tables(folder, prompts):
    shown = run("compare", "--model", folder, "--prompts", prompts, "-m", "pld", "--max-new-tokens", 8).stdout
    assert "speed-up" in shown and "prefill" in shown


def test_default_methods_that_do_not_fit_are_left_out_and_those_asked_for_are_not(
    folder, prompts, monkeypatch, capsys
):
    rows = json.loads(run("compare", "--model", folder, "--prompts", prompts, "--max-new-tokens", 4, "--json").stdout)[
        "methods"
    ]
    assert "rest" not in {row["method"] for row in rows}  # the datastore that ships is the embedded model's
    code, shown = run_main(monkeypatch, capsys, "compare", "--model", folder, "--prompts", prompts, "-m", "rest")
    assert code == 2 and "tokenizer" in shown and "Traceback" not in shown


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_verify_passes_where_texts_are_the_same(folder, prompts, temperature):
    report = json.loads(
        run("verify", "--model", folder, "--prompts", prompts, "-m", "pld", "-m", "sam", "--temperature", temperature,
            "--max-new-tokens", 16, "--json").stdout
    )  # fmt: skip
    assert report["passed"] and len(report["results"]) == 4
    assert report["conditions"]["dtype"] == "float32"


def test_verify_fails_in_float32_and_explains_in_16_bits(folder, prompts, monkeypatch):
    differ = lambda model, ids, plain, other: None if plain is other else Difference(3, 0.25)  # noqa: E731
    monkeypatch.setattr("hf_specdec.compare.first_difference", differ)
    words = ("verify", "--model", folder, "--prompts", prompts, "-m", "pld", "--max-new-tokens", 8)
    assert "FAILED" in run(*words, code=1).stdout
    shown = " ".join(run(*words, "--dtype", "bfloat16").stdout.split())
    assert "token 3" in shown and "0.25" in shown and "passed" in shown


def test_generate_streams_the_text_and_counts_it(folder):
    answer = json.loads(run("generate", "w1 w2 w3", "--model", folder, "--max-new-tokens", 10, "--json").stdout)
    assert len(answer["tokens"]) == answer["stats"]["emitted"] == 10
    shown = run("generate", "w1 w2 w3", "--model", folder, "--max-new-tokens", 10).stdout
    assert shown.split() == answer["text"].split()


def test_bench_measures_the_curve_and_the_races(folder, tmp_path):
    words = ("bench", "--model", folder, "--dtype", "float32", "--json")
    curve = json.loads(run(*words, "--verify-curve").stdout)["verify_curve"]
    assert set(curve) == {"128"} and set(curve["128"]) == {str(n) for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)}
    questions = tmp_path / "questions.jsonl"
    rows = [{"category": kind, "turns": ["w1 w2 w3"]} for kind in ("writing", "qa")]
    questions.write_text("\n".join(map(json.dumps, rows)))
    report = json.loads(
        run(
            *words,
            "--questions",
            questions,
            "--limit",
            1,
            "--repeats",
            1,
            "--max-new-tokens",
            12,
            "--output",
            tmp_path,
        ).stdout
    )
    assert set(report["races"]["ratios"]) >= {"our_plain / stock_plain", "our_pld / stock_pld"}
    assert set(report["races"]["ratios_by_kind"]["our_pld / stock_pld"]) == {"mt_bench", "qa"}
    assert all(ratio > 0 for ratio in report["races"]["ratios"].values())
    assert "PLD reached" in (tmp_path / "bench.md").read_text()


def test_bench_lets_every_loop_write_the_same_text(folder):
    model, tokenizer = cli.load_model(folder, "bfloat16")
    prompt = torch.arange(7, 19)[None].repeat(1, 2)
    text = torch.cat([prompt, torch.randint(96, (1, 20)), prompt[:, :12]], dim=-1)  # not what the model would write
    ways = (
        {},
        {"prompt_lookup_num_tokens": 10},
        {"candidate_generator": NoDraft()},
        {"candidate_generator": PLDGen()},
    )
    with dictated(model, text):
        for way in ways:
            assert torch.equal(model.generate(prompt, max_new_tokens=32, do_sample=False, **way), text), way
    assert ways[-1]["candidate_generator"].stats.accepted
    assert not torch.equal(model.generate(prompt, max_new_tokens=32, do_sample=False), text)

    prompts = [cli.Prompt("qa", "w1 w2 w3 w1 w2"), cli.Prompt("rag", "w9 w8 w9")]
    options = dict(max_new_tokens=24, repeats=2, same_text=True, on_progress=lambda *_: None)
    report = races(model, tokenizer, prompts, {128: {1: 1.0, 64: 2.0}}, **options)
    assert report["answers_as_stock_plain"] == {"stock_pld": 4, "our_pld": 4}
    assert report["our_pld / stock_pld where texts are the same"]["answers"] == report["answers"] == 4


def test_a_datastore_is_built_added_to_and_searched(folder, tmp_path, prompts):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": "w1 w2 w3 w4 w5 w6"}) for _ in range(3)))
    store = tmp_path / "store"
    run("datastore", "build", "--data", texts, "--tokenizer", folder, "-o", store)
    run("datastore", "add", store, "--data", texts, "--tokenizer", folder, "--limit", 2)
    about = json.loads(run("datastore", "info", store, "--json").stdout)
    assert about["documents"] == 5 and about["vocab_size"] == 97
    words = (
        "compare",
        "--model",
        folder,
        "--prompts",
        prompts,
        "-m",
        f"rest:{store}",
        "--max-new-tokens",
        8,
        "--json",
    )
    assert json.loads(run(*words).stdout)["methods"][1]["answers"] == 2


def test_bad_data_leaves_no_datastore_behind(folder, tmp_path, monkeypatch, capsys):
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"words": "w1"}))
    for data, said in ((texts, "has columns words"), (tmp_path / "nowhere.jsonl", "no such file")):
        words = ("datastore", "build", "--data", data, "--tokenizer", folder, "-o", tmp_path / "store")
        code, shown = run_main(monkeypatch, capsys, *words)
        assert code == 2 and said.replace(" ", "") in shown.replace(" ", "").replace("│", "")
        assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "-m", "pdl"], "unknown method 'pdl'"),
        (["compare", "-m", "pld?max_gram=2"], "no option 'max_gram'"),
        (["compare", "-m", "pld?max_ngram=0"], "at least 1"),
        (["compare", "-m", "sps"], "needs a smaller causal language model"),
        (["compare", "-m", "pld:user/repo"], "without a model"),
        (["generate", "hello", "--model", "no/such-model"], "no/such-model"),
        (["generate", "hello", "--dtype", "float12"], "float12"),
        (["compare", "--prompts", "nowhere.txt"], "nowhere.txt"),
        (["generate", "hello", "--device", "gpu"], "unknown device 'gpu'"),
        (["datastore", "info", "nowhere"], "nowhere"),
        (["datastore", "info", "no[where]"], "no[where] has"),  # not taken for markup
    ],
)
def test_bad_input_ends_with_a_message(words, said, monkeypatch, capsys):
    code, shown = run_main(monkeypatch, capsys, *words)
    assert code == 2
    assert said.replace(" ", "") in shown.replace(" ", "").replace("│", "")
    assert "Traceback" not in shown


def test_a_missing_extra_is_named(monkeypatch, capsys):
    assert cli.extra_hint("torch") == cli.extra_hint(None) == ""
    missing = ModuleNotFoundError("No module named 'optuna'", name="optuna")
    monkeypatch.setattr(cli, "load_model", lambda *_, **__: (_ for _ in ()).throw(missing))
    code, shown = run_main(monkeypatch, capsys, "skip-layers")
    assert code == 2 and "hf-specdec[search]" in shown

"""Evaluation's figures: small files made by hand, their figures worked out apart from the code."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import typer
from accelerate.commands.launch import launch_command_parser
from jinja2 import Template
from tiny_chat import tiny_tokenizer
from typer.main import get_command
from typer.testing import CliRunner

from eval.__main__ import app
from eval.findings import findings
from eval.prepare import main as prepare
from eval.quality import load_metric, quality
from eval.questions import Question
from eval.report import PUBLISHED, write_report
from eval.run import split_methods
from eval.score import Answers, interval, score
from eval.traces import TRACES, read_traces
from hf_specdec import METHODS, make_generator
from hf_specdec.cli import app as specdec
from hf_specdec.compare import PLAIN
from hf_specdec.stats import STAGES

EVAL = PUBLISHED.parent
CONDITIONS = {
    **{"model": "m", "dtype": "float32", "hardware": "h", "threads": 1, "torch": "2", "transformers": "5"},
    **{"commit": "c", "template": "none", "temperature": 0.0, "max_new_tokens": 9},
}
# question: category, then (tokens, seconds, prefill seconds) of plain and of pld, and pld's accepted lengths
TABLE = {
    81: ("writing", (4, 4.0, 1.0), (4, 2.0, 1.0), [2]),
    82: ("stem", (11, 6.0, 1.0), (11, 3.0, 1.0), [1, 0, 3, 2]),
    483: ("rag", (6, 3.0, 0.5), (6, 4.0, 0.5), [0, 0, 0, 1]),
}


def make_row(
    question: int, method: str, tokens: int, seconds: float, prefill: float, accepted=None, **changes
) -> dict:
    stats = None
    if accepted is not None:
        stats = {"steps": len(accepted), "drafted": 4 * len(accepted), "accepted": sum(accepted), "emitted": tokens}
        stats |= {"drafted_lengths": [4] * len(accepted), "draft_depths": [3] * len(accepted), "notes": []}
        stats |= {"accepted_lengths": accepted, "seconds": dict.fromkeys(STAGES, 0.0) | {"draft": 0.1, "verify": 0.8}}
        stats |= {"draft_parts": {"retrieval": 0.07, "tree": 0.02}}
    category = TABLE[question][0]
    turn = {"tokens": list(range(5, 5 + tokens)), "text": "abc" * tokens, "prompt_tokens": 3, "seconds": seconds}
    turn |= {"prefill_seconds": prefill, "stats": stats, "difference": None, "spec_bench_tokens": 3 * tokens - 1}
    row = {"question_id": question, "category": category, "task": "rag" if category == "rag" else "mt_bench", "run": 0}
    return row | {"method": method, "turns": [turn], "failed": None, "peak_memory_bytes": 1} | changes


def made_rows() -> list[dict]:
    rows = []
    for question, (_, plain, pld, accepted) in TABLE.items():
        rows += [make_row(question, PLAIN, *plain), make_row(question, "pld", *pld, accepted)]
    return rows


def write_answers(folder: Path, rows: list[dict], conditions=CONDITIONS) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [{"conditions": conditions}, *rows]
    (folder / "answers-00-of-01.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_table_follows_from_the_answers():
    rows = {(row["task"], row["method"]): row for row in score(Answers(made_rows()))}
    row = rows["mt_bench", "pld"]
    assert row["speedup"] == pytest.approx(((4 / 2 + 11 / 3) / 2) / ((4 / 4 + 11 / 6) / 2))
    assert row["speedup_total"] == pytest.approx((15 / 5) / (15 / 10))
    assert row["decode_speedup"] == pytest.approx((13 / 3) / (13 / 8))
    assert row["tokens_per_step"] == pytest.approx(13 / 5) and row["accepted_per_step"] == pytest.approx(8 / 5)
    assert row["draft_ms"] == pytest.approx(1e3 * 0.2 / 5) and row["verify_ms"] == pytest.approx(1e3 * 1.6 / 5)
    parts = {part: row[f"draft/{part}_ms"] for part in ("retrieval", "tree", "rest")}
    assert parts == pytest.approx({"retrieval": 1e3 * 0.14 / 5, "tree": 1e3 * 0.04 / 5, "rest": 1e3 * 0.02 / 5})
    assert sum(parts.values()) == pytest.approx(row["draft_ms"])
    assert sum(row["draft_per_token"].values()) == pytest.approx(row["stages_per_token"]["draft"])
    assert row["acceptance"] == pytest.approx((8 / 5) / 3)
    step, token = 3.0 / 5, 8.0 / 13  # seconds of a step, and of a token in plain decoding
    assert row["break_even_acceptance"] == pytest.approx((step / token - 1) / 3)
    assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
    overall = rows["overall", "pld"]
    assert overall["questions"] == 3 and overall["speedup_total"] == pytest.approx((21 / 9) / (21 / 13))
    assert rows["rag", "pld"]["speedup_low"] is None  # one question tells no spread
    assert rows["overall", PLAIN]["speedup"] == 1


def test_the_decode_rate_does_not_hold_the_prefill():
    """R78: the same decoding behind a long prompt and a short one has the same rate."""
    short = score(Answers([make_row(81, PLAIN, 11, 2.0, 1.0)]))[0]
    long = score(Answers([make_row(81, PLAIN, 11, 9.0, 8.0)]))[0]
    assert short["decode_tokens_per_second"] == pytest.approx(long["decode_tokens_per_second"])
    assert short["tokens_per_second"] > 4 * long["tokens_per_second"]


def test_the_interval_covers_the_ratio_and_shrinks_with_more_questions():
    random = np.random.default_rng(1)
    plain = random.uniform(1, 2, size=400)
    own = plain * random.uniform(1.2, 1.8, size=400)
    few, many = interval(own[:20], plain[:20]), interval(own, plain)
    assert many[0] < own.mean() / plain.mean() < many[1]
    assert many[1] - many[0] < few[1] - few[0]


def test_answers_without_conditions_are_refused(tmp_path):
    for missing in ("commit", "hardware", "dtype", "template", "transformers"):
        folder = write_answers(tmp_path / missing, made_rows(), CONDITIONS | {missing: None})
        with pytest.raises(ValueError, match=f"missing: {missing}"):
            write_report([folder], tmp_path / "out", pictures=False)
    result = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere"), "--output", str(tmp_path / "out")])
    assert result.exit_code == 2 and "no folder" in result.output


def test_the_report_is_written_in_all_forms(tmp_path):
    failed = make_row(82, "sam", 3, 1.0, 0.5, failed="RuntimeError: no", turns=[])
    first = write_answers(tmp_path / "one", [*made_rows(), failed])
    second = write_answers(tmp_path / "two", made_rows(), CONDITIONS | {"model": "other"})
    text = write_report([first, second], tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["conditions"]["hardware"] == "h" and [run["model"] for run in report["runs"]] == ["m", "other"]
    row = next(row for row in report["rows"] if row["method"] == "pld" and row["task"] == "overall")
    for key in ("model", "hardware", "dtype", "temperature", "speedup_low", "draft_ms", "answers", "failed"):
        assert key in row
    assert next(row for row in report["rows"] if row["method"] == "sam")["failed"] == 1
    assert (tmp_path / "out" / "report.csv").read_text().count("\n") == 1 + len(report["rows"])
    for picture in ("speedup-0", "time_per_token-0", "tokens_and_cost-0", "speedup-1"):
        assert (tmp_path / "out" / f"{picture}.png").stat().st_size > 5000
    assert [claims[2]["verdict"] for claims in report["findings"]] == ["Undecided: no interval without 1"] * 2
    card = Template((EVAL.parent / "hub_cards" / "results.md").read_text()).render(pretty_name="Results", **report)
    assert card.count("| pld | ") == 2 and "commit=c" in card
    assert "hardware=h" in text and "1.25–1.52x" in text  # conditions, and what was published
    assert "| pld | trees of 4.0, 3.0 deep | 33.33 | retrieval 23.33, tree 6.67, rest 3.33 |" in text


def spec_bench_speed(own: Path, base: Path, tokens_of) -> tuple[float, float]:
    """Speed-up and mean accepted tokens as Spec-Bench defines them, computed here by itself."""
    choices = [[json.loads(line)["choices"][0] for line in path.read_text().splitlines()] for path in (own, base)]
    speed = mean(sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices[0])
    plain = mean(sum(map(tokens_of, choice["turns"])) / sum(choice["wall_time"]) for choice in choices[1])
    return speed / plain, mean(length for choice in choices[0] for length in choice["accept_lengths"])


def test_our_answers_read_as_spec_bench_reads_them(tmp_path):
    folder = write_answers(tmp_path / "run", made_rows())
    write_report([folder], tmp_path / "out", spec_bench_counting=True, pictures=False)
    files = tmp_path / "out" / "spec_bench" / "0-run"
    speedup, accepted = spec_bench_speed(
        files / "pld-run-1.jsonl", files / "plain-run-1.jsonl", lambda text: len(text) - 1
    )
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    row = next(row for row in rows if row["method"] == "pld" and row["task"] == "overall")
    assert (row["speedup"], row["tokens_per_step"]) == pytest.approx((speedup, accepted))
    assert speedup == pytest.approx(((2 + 11 / 3 + 6 / 4) / 3) / ((11 / 4 + 32 / 6 + 17 / 3) / 3))
    lines = [json.loads(line) for line in (files / "plain-run-1.jsonl").read_text().splitlines()]
    assert [line["question_id"] for line in lines] == [81, 82, 483] and lines[1]["category"] == "stem"
    assert lines[0]["choices"][0]["turns"] == ["abc" * 4] and lines[0]["choices"][0]["new_tokens"] == [4]
    assert lines[0]["choices"][0]["accept_lengths"] == [1, 1, 1] and lines[0]["choices"][0]["decoding_steps"] == [3]


def counted_like_spec_bench(folder: Path, rows: list[dict]) -> tuple[dict, Path]:
    """pld's overall row under Spec-Bench's counting, and the folder of the answer files written beside."""
    write_report([write_answers(folder / "run", rows)], folder / "out", spec_bench_counting=True, pictures=False)
    found = json.loads((folder / "out" / "report.json").read_text())["rows"]
    row = next(row for row in found if row["method"] == "pld" and row["task"] == "overall")
    return row, folder / "out" / "spec_bench" / "0-run"


def test_a_question_that_failed_once_is_in_none_of_spec_benchs_files_nor_figures(tmp_path):
    rows = made_rows()
    rows[3]["failed"] = "RuntimeError: no"
    row, files = counted_like_spec_bench(tmp_path, rows)
    for path in files.iterdir():
        assert [json.loads(line)["question_id"] for line in path.read_text().splitlines()] == [81, 483]
    theirs = spec_bench_speed(files / "pld-run-1.jsonl", files / "plain-run-1.jsonl", lambda text: len(text) - 1)
    assert (row["speedup"], row["tokens_per_step"]) == pytest.approx(theirs)


def test_several_runs_are_averaged_as_spec_bench_averages_them(tmp_path):
    rows = made_rows() + [row | {"run": 1} for row in made_rows()]
    for row in rows[6:]:
        slower = {PLAIN: 1.5, "pld": 3.0}[row["method"]]
        row["turns"] = [row["turns"][0] | {"seconds": row["turns"][0]["seconds"] * slower}]
    row, files = counted_like_spec_bench(tmp_path, rows)
    runs = [
        spec_bench_speed(files / f"pld-run-{i}.jsonl", files / f"plain-run-{i}.jsonl", lambda text: len(text) - 1)
        for i in (1, 2)
    ]
    assert row["speedup"] == pytest.approx(mean(speedup for speedup, _ in runs))
    assert row["tokens_per_step"] == pytest.approx(mean(accepted for _, accepted in runs))


def test_spec_benchs_answers_are_read_and_counted_either_way(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    plain = [
        (81, "writing", ["abcdef", "gh"], [7, 3], [2.0, 1.0], [1] * 10),
        (481, "rag", ["ijkl"], [5], [1.0], [1] * 5),
    ]
    pld = [(81, "writing", ["abcdef", "gh"], [7, 3], [1.0, 0.5], [3, 4, 3]), (481, "rag", ["ijkl"], [5], [1.0], [5])]
    for name, lines in (("vanilla", plain), ("lookup", pld)):
        keys = ("turns", "new_tokens", "wall_time", "accept_lengths")
        made = [
            {"question_id": question, "category": category, "choices": [dict(zip(keys, rest, strict=True))]}
            for question, category, *rest in lines
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    files = {"plain": "vanilla.jsonl", "pld": "lookup.jsonl"}
    (folder / "conditions.json").write_text(json.dumps(CONDITIONS | {"files": files}))
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    found = {}
    for counting in (False, True):
        options = {"spec_bench_counting": counting, "tokenizer": str(tmp_path / "tokenizer"), "pictures": False}
        write_report([folder], tmp_path / "out", **options)
        rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
        found[counting] = next(row for row in rows if row["method"] == "pld" and row["task"] == "overall")
    assert found[False]["speedup"] == pytest.approx(((10 / 1.5 + 5) / 2) / ((10 / 3 + 5) / 2))
    retokenized = ((6 - 1 + 2 - 1) / 3 + (4 - 1) / 1) / 2  # a tokenizer without BOS, which is taken off all the same
    assert found[True]["speedup"] == pytest.approx(((10 / 1.5 + 5) / 2) / retokenized)
    assert found[True]["tokens_per_step"] == pytest.approx(15 / 4)
    theirs = spec_bench_speed(folder / "lookup.jsonl", folder / "vanilla.jsonl", lambda text: len(text) - 1)
    assert theirs == pytest.approx((found[True]["speedup"], found[True]["tokens_per_step"]))


def test_metrics_load_offline_and_agree_with_the_report():
    load = {name: load_metric(name) for name in ("speedup", "tokens_per_step", "acceptance")}
    row = next(row for row in score(Answers(made_rows())) if (row["task"], row["method"]) == ("overall", "pld"))
    sides = [[{"tokens": item[i][0], "seconds": item[i][1]} for item in TABLE.values()] for i in (2, 1)]
    found = load["speedup"].compute(predictions=sides[0], references=sides[1])
    assert (found["speedup"], found["speedup_total"]) == pytest.approx((row["speedup"], row["speedup_total"]))
    accepted = [length for item in TABLE.values() for length in item[3]]
    found = load["tokens_per_step"].compute(predictions=accepted)
    assert found["accepted_per_step"] == pytest.approx(row["accepted_per_step"])
    assert found["tokens_per_step"] == pytest.approx(row["tokens_per_step"])
    found = load["acceptance"].compute(predictions=accepted, references=[3] * len(accepted))
    assert found["acceptance"] == pytest.approx(row["acceptance"])
    assert found["conditional_acceptance"] == pytest.approx([5 / 9, 3 / 5, 1 / 3])


def test_rouge_l_is_the_f_measure_of_the_common_subsequence():
    """By hand; the figures are rouge_score's (0.1.2, unstemmed) as well."""
    metric = load_metric("rouge_l")
    pairs = {
        ("the cat sat on the mat", "the cat lay on a mat"): 2 * 4 / 12,
        ("Police killed the gunman.", "the gunman police killed"): 2 * 2 / 8,
        ("U.S. sales: 3.5", "us sales 3,5"): 2 * 3 / 9,
        ("", "nothing"): 0,
    }
    for (prediction, reference), wanted in pairs.items():
        found = metric.compute(predictions=[prediction], references=[reference])["rouge_l"]
        assert found == pytest.approx(wanted)
    predictions, references = zip(*pairs, strict=True)
    assert metric.compute(predictions=predictions, references=references)["rouge_l"] == pytest.approx(
        mean(pairs.values())
    )


def test_quality_is_scored_where_metrics_load_and_left_out_with_a_note_where_not():
    texts = {(1, PLAIN): "so 1,000", (1, "pld"): "it is 1000.", (2, PLAIN): "3", (2, "pld"): "4"}
    rows = []
    for (question, method), text in texts.items():
        row = make_row(81, method, 4, 1.0, 0.5)
        row["turns"][0]["text"] = text
        rows.append(row | {"question_id": question, "task": "math_reasoning"})
    scores, note = quality(Answers(rows), [])
    assert scores["math_reasoning", "pld"]["quality"] == {"exact_match against plain decoding's answers": 0.5}
    asked = [Question(1, "math_reasoning", ("?",), ("#### 1000",)), Question(2, "math_reasoning", ("?",), ("#### 4",))]
    scores, note = quality(Answers(rows), asked)
    assert [
        scores["math_reasoning", name]["quality"]["exact_match against references"] for name in (PLAIN, "pld")
    ] == [0.5, 1]

    def refuse(name):
        raise ImportError("no module named numpy")

    assert quality(Answers(rows), [], load=refuse) == (
        {},
        "exact_match left out, evaluate cannot load it (ImportError: no module named numpy)",
    )


def verdicts(speeds: dict[str, float], **changes) -> list[str]:
    """The verdicts on made answers: methods by their speed over plain decoding, alike on all questions."""
    rows = []
    for question, (_, plain, *_) in TABLE.items():
        rows.append(make_row(question, PLAIN, *plain))
        for method, speed in speeds.items():
            rows.append(make_row(question, method, plain[0], plain[1] / speed, plain[2] / speed, [1, 0]))
            stats = rows[-1]["turns"][0]["stats"]
            stats |= changes.get("stats", {}).get(method, {})
            stats["seconds"] = stats["seconds"] | changes.get("seconds", {}).get(method, {})
    answers = Answers(rows)
    return [claim["verdict"] for claim in findings(score(answers), answers, changes.get("drafters", {}))]


def test_findings_say_what_was_not_measured():
    answers = Answers(made_rows())
    claims = findings(score(answers), answers, {})
    assert [claim["verdict"] for claim in claims].count("Not measured here") == 4
    assert claims[2]["verdict"] == "Undecided: no interval without 1" and "rag: pld 0.75x" in claims[2]["figures"]


def test_an_external_drafter_is_judged_by_its_shape():
    shapes = {"sps:deep": {"layers": 30, "width": 576}, "sps:wide": {"layers": 2, "width": 576}}
    assert verdicts({"sps:deep": 0.8, "sps:wide": 1.2}, drafters=shapes)[0] == "Holds"
    assert verdicts({"sps:deep": 1.2, "sps:wide": 1.2}, drafters=shapes)[0] == "Does not hold for all"
    assert verdicts({"sps:deep": 1.2, "sps:wide": 0.8}, drafters=shapes)[0] == "Does not hold"
    assert verdicts({"sps:deep": 0.8}, drafters=shapes)[0] == "Holds, but no wide and shallow one was measured"
    idle = {"sps:wide": {"draft_depths": [0, 0], "drafted": 0}}  # an adaptive one that stops drafting has lost as well
    assert verdicts({"sps:wide": 1.01}, drafters=shapes, stats=idle)[0].startswith(
        "Does not hold, but none that is narrow"
    )


def test_self_drafting_is_judged_by_the_weight_of_its_draft():
    heavy = {"layerskip": {"draft": 0.7}}
    assert verdicts({"eagle": 1.3, "layerskip": 0.9}, seconds=heavy)[1] == "Holds; of 1 light ones 1 pay"
    assert verdicts({"eagle": 0.9, "layerskip": 1.2}, seconds=heavy)[1] == "Does not hold; of 1 light ones 0 pay"
    assert verdicts({"eagle": 1.3})[1].startswith("No heavy draft was measured")


def test_datastores_are_held_against_each_other_question_by_question():
    sizes = {"rest": {"tokens": 10**5}, "rest:big": {"tokens": 10**8}}
    assert verdicts({"rest": 1.2, "rest:big": 1.1}, drafters=sizes)[3] == "Holds"
    assert verdicts({"rest": 1.1, "rest:big": 1.2}, drafters=sizes)[3] == "Does not hold"
    assert verdicts({"rest": 1.1, "rest:big": 1.1}, drafters=sizes)[3] == "Undecided: no interval without 1"


def test_trees_are_held_against_chains_of_the_same_head():
    chain = {"drafted": 6}  # as many as its two steps are deep
    stats = {"eagle?top_k=1": chain, "eagle:three?top_k=1": chain}
    assert verdicts({"eagle": 1.5, "eagle?top_k=1": 1.2}, stats=stats)[4] == "Holds"
    assert "gain, but less" in verdicts({"eagle": 1.3, "eagle?top_k=1": 1.2}, stats=stats)[4]
    assert (
        "costs more"
        in verdicts({"eagle": 1.5, "eagle?top_k=1": 1.2}, stats=stats, seconds={"eagle": {"verify": 0.9}})[4]
    )
    assert verdicts({"eagle": 1.5, "eagle:three?top_k=1": 1.2}, stats=stats)[4] == "Not measured here"


def test_published_figures_have_a_source_and_a_grade():
    published = json.loads(PUBLISHED.read_text())
    for item in published["rows"]:
        assert item["source"] and item["hardware"] and item["grade"] in published["grades"]
        assert ("speedup" in item) != ("speedup_range" in item)


def check_options(command, words: list[str]) -> dict:
    """The parameters of a command line, which must be one that the command knows, down to its subcommand."""
    if hasattr(command, "commands"):
        return check_options(command.commands[words[0]], words[1:])
    return command.make_context(command.name, list(words)).params


def parse(program: str, *words: str) -> dict:
    """The parameters of a recipe's command, which is not run."""
    if program == "accelerate":
        launched = launch_command_parser().parse_args(words[1:])
        assert words[0] == "launch" and launched.module and launched.training_script == "eval"
        return check_options(get_command(app), launched.training_script_args)
    if program == "hf-specdec":
        return check_options(get_command(specdec), words)
    assert words[0] == "-m"
    if words[1] == "eval.prepare":
        alone = typer.Typer()
        alone.command()(prepare)
        return check_options(get_command(alone), words[2:])
    if words[1] == "eval.own_prompts":
        return {}
    assert words[1] == "eval"
    return check_options(get_command(app), words[2:])


@pytest.mark.parametrize("recipe", sorted(path.name for path in (EVAL / "recipes").iterdir()))
def test_recipes_run_commands_that_parse(recipe, tmp_path):
    """Each recipe runs to its end, its programs replaced by one that writes its arguments down."""
    for program in ("python", "accelerate", "hf-specdec"):
        stand_in = tmp_path / "bin" / program
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(f'#!/bin/sh\nfor word in {program} "$@" END; do echo "$word"; done >> {tmp_path}/log\n')
        stand_in.chmod(0o755)
    (tmp_path / "question.jsonl").touch()
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "WORK": str(tmp_path / "work")}
    arguments = {
        "embedded": [f"{tmp_path}/question.jsonl", f"{tmp_path}/out", "--limit", "1"],
        "heads": [f"{tmp_path}/question.jsonl", f"{tmp_path}/out"],
        "study": ["a/b", "c/d"],
    }
    (tmp_path / "out").mkdir()
    for name in ("short", "long", "own-answers"):  # what the stand-ins do not write
        (tmp_path / "out" / f"{name}.jsonl").touch()
    environment["QUESTIONS"] = f"{tmp_path}/question.jsonl"
    subprocess.run([EVAL / "recipes" / recipe, *arguments.get(recipe, [])], env=environment, check=True)
    lines = (tmp_path / "log").read_text().removesuffix("\nEND\n").split("\nEND\n")
    parsed = [parse(*line.split("\n")) for line in lines]
    assert len(parsed) >= 3
    for spec in split_methods(next((params["methods"] for params in parsed if "methods" in params), "")):
        name, _, options = spec.partition("?")
        make_generator(f"rest?{options}" if name.startswith("rest:") else spec)  # its datastore is not built


@pytest.fixture(scope="module")
def tiny_gpu_report(tmp_path_factory) -> dict:
    """What the GPU script writes for the tiny target, on whatever device is here."""
    from eval.gpu import main

    folder = tmp_path_factory.mktemp("gpu")
    main(output=folder / "gpu.json", tiny=True, traces=None, only=None, minutes=8)
    return json.loads((folder / "gpu.json").read_text())


def test_the_gpu_script_measures_every_method_on_a_tiny_target(tiny_gpu_report):
    target = tiny_gpu_report["targets"]["tiny"]
    assert target["conditions"]["weights"] == "random" and tiny_gpu_report["traces"][0]["commit"]
    assert {"eager", "compiled"} <= set(target["verify_curves"])
    for curve in target["verify_curves"].values():
        assert "failed" not in curve and len(curve) > 5
    names = {name.partition("?")[0].partition(":")[0] for name in target["methods"]}
    assert names == {*METHODS, PLAIN}
    for name, row in target["methods"].items():
        assert "failed" not in row, (name, row)
        if name != PLAIN:
            assert row["drafted_per_step"] > 1, (name, row)  # costs are those of full drafts
            for rates in row["speedup_at_acceptance"].values():
                assert rates["0.9"] >= rates["0.5"] > 0
    assert (target["methods"]["eagle"]["levels"], target["methods"]["medusa:medusa"]["levels"]) == (6, 4)
    assert target["methods"]["pld"]["speedup_replayed"]["compiled"] > 0


def test_the_traces_name_methods_that_the_gpu_script_measures(tiny_gpu_report):
    recorded = json.loads(TRACES.read_text())
    assert all(run["commit"] and run["hardware"] for run in recorded["conditions"])
    replayed = {
        name for name, row in tiny_gpu_report["targets"]["tiny"]["methods"].items() if row.get("speedup_replayed")
    }
    assert {"eagle", "eagle?top_k=1", "hybrid", "lookahead", "pld", "recycling", "rest", "sam"} <= replayed
    for steps in recorded["methods"].values():
        assert all(0 <= accepted <= drafted and count > 0 for drafted, accepted, count in steps)


def test_traces_hold_the_steps_of_a_run(tmp_path):
    rows = [
        row | {"method": "sps:work/small?num_draft_tokens=4"} if row["method"] == "pld" else row for row in made_rows()
    ]
    found = read_traces([write_answers(tmp_path / "run", rows)])
    assert found["methods"] == {"sps:small?num_draft_tokens=4": [[4, 0, 4], [4, 1, 2], [4, 2, 2], [4, 3, 1]]}
    assert found["conditions"][0]["commit"] == "c"


def test_a_replayed_speedup_by_hand():
    from eval.gpu import at_acceptance, speedup

    plain = {"accept_ms": 1, "compact_ms": 0, "other_ms": 1}
    row = plain | {"draft_ms": 2, "drafted_per_step": 2.0, "levels": 2}
    curve, steps = {1: 8.0, 3: 10.0, 5: 12.0}, np.array([[2, 1, 3], [4, 0, 1]])  # drafted, accepted, how many
    # 3 steps of 2 tokens and one of 1; a step costs its block, its draft and 2 ms, a plain one 8 + 2
    assert speedup("eagle", row, curve, steps, plain=plain) == pytest.approx(
        7 * 10 / (3 * (10 + 2 + 2) + (12 + 2 + 2))
    )
    # a chain of 4 costs twice as much to draft as one of 2
    assert speedup("sps:x", row, curve, steps, plain=plain) == pytest.approx(
        7 * 10 / (3 * (10 + 2 + 2) + (12 + 4 + 2))
    )
    assert at_acceptance(row, 0.5).tolist() == [[2.0, 0.75, 1]]


def test_without_a_new_transformers_the_gpu_script_says_what_to_bring(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('too old')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "eval.gpu", "--output", "gpu.json"]
    done = subprocess.run(command, cwd=EVAL.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "pip download" in done.stderr and "Traceback" not in done.stderr

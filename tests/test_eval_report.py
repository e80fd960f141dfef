"""Evaluation's figures: small files made by hand, their figures worked out apart from the code."""

import json
from pathlib import Path
from statistics import mean

import evaluate
import pytest
from jinja2 import Template
from tiny_chat import tiny_tokenizer
from typer.testing import CliRunner

from eval.__main__ import app
from eval.findings import findings
from eval.quality import quality
from eval.questions import Question
from eval.report import PUBLISHED, write_report
from eval.score import Answers, interval, score
from hf_specdec import METHODS, make_generator
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
    import numpy as np

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
    assert [claims[2]["verdict"] for claims in report["findings"]] == ["Holds overall, not in every task"] * 2
    card = Template((EVAL.parent / "hub_cards" / "results.md").read_text()).render(pretty_name="Results", **report)
    assert card.count("| pld | ") == 2 and "commit=c" in card
    assert "hardware=h" in text and "1.25–1.52x" in text  # conditions, and what was published


def spec_bench_speed(own: Path, base: Path, tokens_of) -> tuple[float, float]:
    """Speed-up and mean accepted tokens as Spec-Bench defines them, computed here by itself."""
    choices = [[json.loads(line)["choices"][0] for line in path.read_text().splitlines()] for path in (own, base)]
    speed = mean(sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices[0])
    plain = mean(sum(map(tokens_of, choice["turns"])) / sum(choice["wall_time"]) for choice in choices[1])
    return speed / plain, mean(length for choice in choices[0] for length in choice["accept_lengths"])


def test_our_answers_read_as_spec_bench_reads_them(tmp_path):
    folder = write_answers(tmp_path / "run", made_rows())
    write_report([folder], tmp_path / "out", spec_bench_counting=True, pictures=False)
    files = tmp_path / "out" / "spec_bench" / "run"
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


def test_a_question_that_failed_once_is_in_none_of_spec_benchs_files(tmp_path):
    rows = made_rows()
    rows[3]["failed"] = "RuntimeError: no"
    write_report([write_answers(tmp_path / "run", rows)], tmp_path / "out", pictures=False)
    for path in (tmp_path / "out" / "spec_bench" / "run").iterdir():
        assert [json.loads(line)["question_id"] for line in path.read_text().splitlines()] == [81, 483]


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
    load = {name: evaluate.load(str(EVAL / "metrics" / name)) for name in ("speedup", "tokens_per_step", "acceptance")}
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


class ExactMatch:
    """Stands in for the Hub's metric."""

    def compute(self, *, predictions, references):
        return {"exact_match": mean(a == b for a, b in zip(predictions, references, strict=True))}


def test_quality_is_scored_where_metrics_load_and_left_out_with_a_note_where_not():
    texts = {(1, PLAIN): "so 1,000", (1, "pld"): "it is 1000.", (2, PLAIN): "3", (2, "pld"): "4"}
    rows = []
    for (question, method), text in texts.items():
        row = make_row(81, method, 4, 1.0, 0.5)
        row["turns"][0]["text"] = text
        rows.append(row | {"question_id": question, "task": "math_reasoning"})
    scores, note = quality(Answers(rows), [], load=lambda name: ExactMatch())
    assert scores["math_reasoning", "pld"]["quality"] == {"exact_match against plain decoding's answers": 0.5}
    asked = [Question(1, "math_reasoning", ("?",), ("#### 1000",)), Question(2, "math_reasoning", ("?",), ("#### 4",))]
    scores, note = quality(Answers(rows), asked, load=lambda name: ExactMatch())
    assert [
        scores["math_reasoning", name]["quality"]["exact_match against references"] for name in (PLAIN, "pld")
    ] == [0.5, 1]

    def refuse(name):
        raise ConnectionError(name)

    assert quality(Answers(rows), [], load=refuse) == (
        {},
        "exact_match left out, evaluate cannot load it (ConnectionError)",
    )


def test_findings_say_what_was_not_measured():
    claims = findings(score(Answers(made_rows())))
    assert [claim["verdict"] for claim in claims].count("Not measured here") == 4
    assert claims[2]["verdict"].startswith("Holds") and "rag: pld 0.75x" in claims[2]["figures"]


def test_published_figures_have_a_source_and_a_grade():
    published = json.loads(PUBLISHED.read_text())
    for item in published["rows"]:
        assert item["source"] and item["hardware"] and item["grade"] in published["grades"]
        assert ("speedup" in item) != ("speedup_range" in item)


def test_recipes_name_methods_and_options_that_exist():
    for recipe in ("embedded", "study"):
        text = (EVAL / "recipes" / recipe).read_text()
        quoted = [line.split('"')[1] for line in text.splitlines() if line.startswith(('methods="', 'methods+="'))]
        for spec in ",".join(item.strip(",") for item in quoted).split(","):
            name, _, options = spec.partition("?")
            name, _, drafter = name.partition(":")
            assert name in METHODS
            if not drafter:
                make_generator(spec)


def test_the_gpu_script_runs_on_a_tiny_target(tmp_path):
    from eval.gpu import main

    folder = write_answers(tmp_path / "run", made_rows())
    main(output=tmp_path / "gpu.json", traces=[folder], tiny=True, only=None)
    target = json.loads((tmp_path / "gpu.json").read_text())["targets"]["tiny"]
    assert len(target["curves"]["eager"]) > 5 and target["conditions"]["weights"] == "random"
    assert {name.partition("?")[0] for name in target["methods"]} == set(METHODS)
    for name, row in target["methods"].items():
        assert "failed" not in row, (name, row)
        assert row["speedup_at_acceptance_eager"]["0.9"] >= row["speedup_at_acceptance_eager"]["0.5"]
    assert target["methods"]["pld"]["speedup_replayed_eager"] > 0

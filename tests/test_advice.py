"""Advice: it is reckoned from the measured rows, and another row gives another advice."""

import re
from pathlib import Path

import pytest

from hf_specdec import METHODS, advice, diagrams, results

ROOT = Path(__file__).parent.parent
CURVES = {"128": {"1": 10.0, "16": 12.0}, "512": {"1": 10.0, "16": 15.0}}


def row(
    method: str, tokens: float, *, step: float, draft: float, measured=(2.0, 1.5, 2.5), task="overall", **more
) -> dict:
    """A report's row, plain decoding taking 10 ms a token."""
    speedup, low, high = measured
    costs = {"tokens_per_step": tokens, "ms_per_step": step, "draft_ms": draft, "plain_ms_per_token": 10.0}
    spread = {"speedup": speedup, "speedup_low": low, "speedup_high": high, "answers": 9, "drafted_per_step": 15.0}
    return {"run": 0, "method": method, "task": task} | costs | spread | more


def read(*rows: dict, **report) -> list[dict]:
    conditions = {"model": "owner/model (a copy)", "dtype": "bfloat16", "hardware": "a GPU", "temperature": 0.0}
    report = {"conditions": conditions, "rows": list(rows), "verify_curves": [CURVES]} | report
    return results.read_report(report, name="measured")


def recommend(rows: list[dict], *at_hand: str, task: str = "overall", **what_if):
    found = advice.estimates(rows, run="measured", task=task, **what_if)
    return found, *advice.recommend(found, at_hand=at_hand)


def test_the_speedup_is_tokens_per_step_over_what_a_step_costs():
    found, best, _ = recommend(read(row("pld", 2.4, step=12, draft=1), row("sam", 2, step=20, draft=1)))
    assert [estimate.method for estimate in found] == ["pld", "sam"] and [item.method for item in best] == ["pld"]
    pld = found[0]
    assert (pld.verify, pld.draft) == (pytest.approx(1.1), pytest.approx(0.1))
    assert pld.speedup == pytest.approx(2.4 / 1.2) and pld.cost == pytest.approx(1.2)
    assert pld.reason == "2.40 tokens a step / (verification 1.10 + draft 0.10) = 2.00×"


def test_a_method_that_needs_a_drafter_is_named_but_only_recommended_where_it_is_at_hand():
    rows = read(row("hybrid:sam+eagle?max_nodes=9", 4, step=15, draft=4), row("pld", 2, step=11, draft=0))
    _, best, said = recommend(rows)
    assert [item.method for item in best] == ["pld"]
    assert said[-1] == "hybrid:sam+eagle?max_nodes=9 would reach 2.67×: it takes an EAGLE head."
    _, best, said = recommend(rows, "eagle")
    assert [item.method for item in best] == ["hybrid:sam+eagle?max_nodes=9", "pld"] and "takes" not in " ".join(said)


def test_where_nothing_pays_plain_decoding_is_the_advice():
    rows = read(row("pld", 1.1, step=12, draft=0), row("layerskip", 1, step=9, draft=1))
    found, best, said = recommend(rows)
    assert best == [] and said == [
        "Plain decoding: no method that you can take writes more tokens in a step than the step costs."
    ]
    assert "Plain decoding" in diagrams.advice(found, best, said)


def test_doubt_is_said_where_the_measured_intervals_leave_it():
    clear, doubtful = (1.9, 1.7, 2.1), (1.2, 0.9, 1.5)
    _, _, said = recommend(
        read(row("pld", 2, step=10, draft=0, measured=clear), row("sam", 1.2, step=10, draft=0, measured=doubtful))
    )
    assert said == ["sam: no gain is certain, its measured interval does not lie above 1."]
    _, _, said = recommend(read(row("pld", 2, step=10, draft=0), row("sam", 1.9, step=10, draft=0)))
    assert said == ["The intervals of the first two overlap: their order is not certain."]


def test_other_options_of_a_method_do_not_fill_the_list():
    names = ("pld", "pld?num_matches=1", "sam", "recycling", "lookahead")
    _, best, _ = recommend(read(*(row(name, 3 - i / 10, step=10, draft=0) for i, name in enumerate(names))))
    assert [item.method for item in best] == ["pld", "sam", "recycling"]


def test_what_if_moves_the_costs_and_nothing_moves_where_nothing_is_changed():
    rows = read(row("eagle", 3, step=20, draft=8))
    (measured,), *_ = recommend(rows)
    assert rows[0]["block_16"] == 1.5  # behind the longest context
    (same,), *_ = recommend(rows, draft_scale=1, block_16=1.5)
    assert same.speedup == pytest.approx(measured.speedup)
    (light,), *_ = recommend(rows, draft_scale=0.25)
    assert light.draft == pytest.approx(0.2) and light.verify == pytest.approx(1.2)
    (flat,), *_ = recommend(rows, block_16=1.0)  # 15 drafted: a block of 16
    assert flat.verify == pytest.approx(1.2 - 0.5) and flat.draft == pytest.approx(0.8)


def test_rows_without_costs_and_other_runs_stay_out():
    counted = {"run": 1, "method": "pld", "speedup": 2.0, "task": "overall", "tokens_per_step": 2.0}
    rows = read(row("sam", 2, step=11, draft=0), counted, verify_curves=[{}, CURVES])
    assert list(advice.runs(rows)) == ["measured, run 1"]
    assert advice.runs(rows)["measured, run 1"].startswith("model · bfloat16 · a GPU · 1 methods")
    assert rows[0]["block_16"] is None and advice.estimates(rows, run="measured, run 1", task="qa") == []


def test_every_method_is_known_to_need_a_drafter_or_not():
    needy = {name for name, method in METHODS.items() if method.drafter_argument and name != "hybrid"}
    assert set(advice.drafters_needed()) == needy
    assert advice.needs("hybrid") == [] and advice.needs("hybrid:sam+rest+medusa") == ["rest", "medusa"]
    assert advice.needs("eagle:owner/head?top_k=1") == ["eagle"] and advice.needs("not_ours") == []


def test_points_lie_where_their_figures_say_on_lines_of_equal_speedup():
    found, best, said = recommend(read(row("pld", 2.4, step=12, draft=1), row("a<b>{x}", 1.1, step=16, draft=4)))
    picture = diagrams.advice(found, best, said)
    assert "<b>{" not in picture and "{x}" not in picture and "a&lt;b&gt;" in picture
    place = re.compile(r'<i style="left:([\d.]+)%;top:([\d.]+)%">(\d)')
    (x_2, y_2, _), (x_1, y_1, _) = place.findall(picture)  # the best comes last, on top
    even = re.search(r'class="even" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', picture)
    x0, y0, x1, y1 = map(float, even.groups())
    at = lambda x: y0 + (y1 - y0) * (x - x0) / (x1 - x0)  # noqa: E731
    assert float(y_1) < at(float(x_1)) and float(y_2) > at(float(x_2))  # above the line is faster than plain
    assert float(x_1) < float(x_2)


def test_the_committed_reports_give_an_advice_that_their_own_figures_bear_out():
    rows = results.read_folder(ROOT / "eval" / "results")
    known = advice.runs(rows)
    assert known
    for run in known:
        advised = advice.advise(rows, task="overall", run=run)
        assert advised["measured_on"] == known[run] and 1 <= len(advised["recommended"]) <= 3
        speedups = {item["method"]: item["speedup"] for item in advised["methods"]}
        for own in rows:  # what the report has as the speed-up without the prompt's reading
            if own["report"] == run and own["task"] == "overall" and own["method"] in speedups:
                decoded = own["tokens_per_step"] * own["plain_ms_per_token"] / own["ms_per_step"]
                assert speedups[own["method"]] == pytest.approx(decoded)
    assert advice.advise([], task="overall")["notes"] == ["Nothing was measured on this."]

"""Report: the study's table as Markdown, CSV, JSON and pictures, conditions beside every figure."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

from eval import answers as answer_files
from eval import spec_bench
from eval.findings import findings, name_of
from eval.quality import quality
from eval.questions import read_questions
from eval.score import OVERALL, Answers, score
from hf_specdec.compare import PLAIN

PUBLISHED = Path(__file__).parent / "published.json"
COLUMNS = {  # column of a task's table: key of the row, format
    "method": ("method", "{}"),
    "speed-up": ("speedup", "{:.2f}x"),
    "95% interval": ("interval", "{}"),
    "of totals": ("speedup_total", "{:.2f}x"),
    "without prefill": ("decode_speedup", "{:.2f}x"),
    "tokens/s": ("tokens_per_second", "{:.1f}"),
    "tokens per step": ("tokens_per_step", "{:.2f}"),
    "without bonus": ("accepted_per_step", "{:.2f}"),
    "acceptance": ("acceptance", "{:.0%}"),
    "break-even": ("break_even_acceptance", "{:.0%}"),
    "draft ms": ("draft_ms", "{:.2f}"),
    "verify ms": ("verify_ms", "{:.2f}"),
    "identical": ("identity", "{}"),
    "failed": ("failed", "{}"),
}


def write_report(
    folders: list[Path],
    output: Path,
    *,
    spec_bench_counting: bool = False,
    tokenizer: str | None = None,
    questions: str | None = None,
    pictures: bool = True,
) -> str:
    """Writes report.md, report.csv, report.json, Spec-Bench's answer files and the pictures; returns the Markdown.

    Args:
        tokenizer (`str`, *optional*): the model's, to count Spec-Bench's own answers its way.
        questions (`str`, *optional*): the questions, for their reference answers.

    Raises:
        ValueError: for a folder without answers, or answers without their conditions.
    """
    output.mkdir(parents=True, exist_ok=True)
    retokenize = tokenizer and counter(tokenizer)
    asked = read_questions(questions)[0] if questions else []
    runs, rows, curves, claims = [], [], [], []
    for number, folder in enumerate(folders):
        conditions, found, curve = read(folder)
        answers = Answers(found)
        scored = score(answers)
        if spec_bench_counting:
            spec_bench.count(answers, scored, retokenize)
        qualities, note = quality(answers, asked)
        for row in scored:
            row |= qualities.get((row["task"], row["method"]), {})
        own = [describe(row, conditions, number) for row in scored]
        counting = "Spec-Bench's (speed.py)" if spec_bench_counting else "emitted ids on both sides"
        claims.append(findings(scored, answers, conditions.get("drafters") or {}))
        runs.append(conditions | {"counting": counting, "quality": note, "folder": folder.name})
        rows += own
        curves.append(curve)
        spec_bench.write_folder(output / "spec_bench" / f"{number}-{folder.name}", str(conditions["model"]), found)
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    text = markdown(runs, rows, published, claims, counted=spec_bench_counting)
    if pictures:
        text += draw(output, runs, rows, curves)
    shared = {key: value for key, value in runs[0].items() if all(run.get(key) == value for run in runs)}
    report = {"conditions": shared, "runs": runs, "rows": rows, "findings": claims, "verify_curves": curves}
    (output / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (output / "report.md").write_text(text, encoding="utf-8")
    write_csv(output / "report.csv", rows)
    return text


def read(folder: Path) -> tuple[dict, list[dict], dict]:
    """A run's output, or a folder of Spec-Bench's answers."""
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}: give the --output of `python -m eval run`.")
    if any(folder.glob("answers-*.jsonl")):
        return answer_files.read_folder(folder)
    return spec_bench.read_folder(folder)


def counter(tokenizer: str) -> Callable[[str], int]:
    """How Spec-Bench counts a text's tokens: all of them, less one."""
    loaded = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    return lambda text: len(loaded(text).input_ids) - 1


def describe(row: dict, conditions: dict, number: int) -> dict:
    """A row as the report gives it: with the conditions that tell it from those of other runs."""
    named = {key: conditions[key] for key in ("model", "hardware", "dtype", "temperature")}
    return {"run": number} | named | row


def markdown(runs: list[dict], rows: list[dict], published: dict, claims: list[list[dict]], *, counted: bool) -> str:
    """The report's text."""
    lines = ["# Evaluation", ""]
    for number, conditions in enumerate(runs):
        own = [row for row in rows if row["run"] == number]
        lines += [f"## {conditions['model']}, {conditions['dtype']}, {conditions['hardware']}", ""]
        said = {key: value for key, value in conditions.items() if key != "drafters"}
        lines += ["  ".join(f"{key}={value}" for key, value in said.items()), "", explain(counted=counted), ""]
        lines += ["### Speed-up by task", "", *by_task(own), ""]
        for task in (OVERALL, *dict.fromkeys(row["task"] for row in own if row["task"] != OVERALL)):
            lines += [f"### {task}", "", *table([row for row in own if row["task"] == task]), ""]
        lines += ["### What a draft costs and yields (overall)", "", *draft_table(own), ""]
        lines += drafter_table(conditions.get("drafters") or {})
        lines += ["### Where the time of a step goes, ms (overall)", "", *stage_table(own), ""]
        lines += ["The peak of memory counts the weights of all drafters of the run, which are loaded together.", ""]
        lines += quality_table(own) + notes(own)
        lines += ["### Beside published figures", "", *published_table(own, published), ""]
        lines += ["### The study's findings, here", ""]
        lines += [f"- **{claim['finding']}** {claim['verdict']}. {claim['figures']}" for claim in claims[number]] + [
            ""
        ]
    return "\n".join(lines) + "\n"


def explain(*, counted: bool) -> str:
    """How to read the table."""
    if counted:
        return (
            "Counted as Spec-Bench's speed.py counts: the baseline's tokens are its text tokenised again, less one; "
            "tokens per step are its mean accepted tokens."
        )
    return (
        "Speed-up: ratio of mean speeds over questions, prefill included, with its 95% bootstrap interval over questions; "
        "'of totals': all tokens over all seconds. Tokens per step count the target's own bonus token, 'without bonus' "
        "does not. Acceptance: accepted tokens over the draft's depth; above its break-even a method pays. Milliseconds "
        "are per step, device synchronised. Failed answers are in no other figure."
    )


def cell(row: dict, key: str, form: str) -> str:
    """One entry of a table."""
    if key == "interval":
        return "" if row.get("speedup_low") is None else f"{row['speedup_low']:.2f}–{row['speedup_high']:.2f}"
    if key == "identity":
        if "identical" not in row or row["method"] == PLAIN:
            return ""
        widest = row["widest_margin"]
        margin = ", one is the other's beginning" if widest is None else f", margin ≤ {widest:.2g}"
        return f"{row['identical']} of {row['answers']}{margin if row['identical'] < row['answers'] else ''}"
    return "" if row.get(key) is None else form.format(row[key])


def grid(header: list[str], body: list[list[str]]) -> list[str]:
    """A Markdown table; the first column is text, the others are figures."""
    cells = [[str(item).replace("|", "\\|") for item in line] for line in [header, *body]]
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return [lines[0], "|---" + "|---:" * (len(header) - 1) + "|", *lines[1:]]


def table(rows: list[dict]) -> list[str]:
    """A task's table, one line per method."""
    return grid(list(COLUMNS), [[cell(row, *column) for column in COLUMNS.values()] for row in rows])


def by_task(rows: list[dict]) -> list[str]:
    """Speed-up of each method in each task, with intervals."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    body = []
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != PLAIN):
        own = {row["task"]: row for row in rows if row["method"] == method}
        intervals = [cell(own[task], "interval", "") for task in tasks]
        speeds = [cell(own[task], "speedup", "{:.2f}") for task in tasks]
        body.append([method, *(f"{one} ({two})" if two else one for one, two in zip(speeds, intervals, strict=True))])
    return grid(["method", *tasks], body)


def stage_table(rows: list[dict]) -> list[str]:
    """Milliseconds of each stage per step, per emitted token, and of the prefill per answer."""
    rows = [row for row in rows if row["task"] == OVERALL and "ms_per_token" in row]
    parts = list(dict.fromkeys(key for row in rows for key in row.get("stages_per_token", {})))
    header = ["method", "prefill, per answer", *parts, "whole step", "whole token"]
    header += [f"{part}, per token" for part in parts] + ["peak memory, MB"]
    body = []
    for row in rows:
        per_token = row.get("stages_per_token", {})
        cells = [f"{row['prefill_ms']:.1f}", *(cell(row, f"{part}_ms", "{:.2f}") for part in parts)]
        cells += [cell(row, "ms_per_step", "{:.1f}"), f"{row['ms_per_token']:.1f}"]
        cells += [f"{per_token[part]:.2f}" if part in per_token else "" for part in parts]
        memory = row["peak_memory_bytes"]
        body.append([row["method"], *cells, f"{memory / 1e6:.0f}" if memory else ""])
    return grid(header, body)


def draft_table(rows: list[dict]) -> list[str]:
    """Milliseconds of drafting, in all and by its parts, beside those of verification and what they yield."""
    header = ["method", "drafts", "draft ms", "of it", "verify ms", "tokens per step", "speed-up"]
    body = []
    for row in rows:
        if row["task"] != OVERALL or "depth_per_step" not in row:
            continue
        parts = {key.removeprefix("draft/").removesuffix("_ms"): row[key] for key in row if key.startswith("draft/")}
        of_it = ", ".join(f"{part} {spent:.2f}" for part, spent in parts.items())
        cells = [cell(row, f"{key}_ms", "{:.2f}") for key in ("draft", "verify")]
        cells += [cell(row, "tokens_per_step", "{:.2f}"), cell(row, "speedup", "{:.2f}x")]
        body.append([row["method"], shape(row), cells[0], of_it, *cells[1:]])
    return grid(header, body)


def shape(row: dict) -> str:
    """What a method's drafts are: trees where a step drafts more tokens than its longest path has."""
    nodes, depth = row["drafted_per_step"], row["depth_per_step"]
    kind = "trees" if nodes > depth * 1.001 else "chains"
    return f"{kind} of {nodes:.1f}" + (f", {depth:.1f} deep" if kind == "trees" else "")


def drafter_table(drafters: dict[str, dict]) -> list[str]:
    """What the methods draft with."""
    body = [[spec, ", ".join(f"{key} {value:,}" for key, value in own.items())] for spec, own in drafters.items()]
    return ["### What they draft with", "", *grid(["method", "drafter"], body), ""] if body else []


def quality_table(rows: list[dict]) -> list[str]:
    """Quality of each method beside plain decoding's, where it could be measured."""
    scores: dict[str, dict[str, str]] = {}  # method -> score's name -> value
    for row in rows:
        for key, value in row.get("quality", {}).items():
            scores.setdefault(row["method"], {})[f"{row['task']}: {key}"] = f"{value:.3f}"
    names = list(dict.fromkeys(name for own in scores.values() for name in own))
    body = [[method, *(own.get(name, "") for name in names)] for method, own in scores.items()]
    return ["### Quality", "", *grid(["method", *names], body), ""] if body else []


def notes(rows: list[dict]) -> list[str]:
    """What a reader of the figures must know."""
    said = {row["method"]: row["notes"] for row in rows if row["task"] == OVERALL and row.get("notes")}
    return [f"- {method}: {note}" for method, own in said.items() for note in own] + ([""] if said else [])


def published_table(rows: list[dict], published: dict) -> list[str]:
    """Our overall figures beside published ones of the same method, the same model's first; conditions differ."""
    body = []
    own = [row for row in rows if row["task"] == OVERALL and row["method"] != PLAIN and "speedup" in row]
    for name in dict.fromkeys(map(name_of, own)):
        theirs = [item for item in published["rows"] if item["task"] == OVERALL and item["method"].startswith(name)]
        theirs.sort(key=lambda item: item["model"] not in own[0]["model"])
        ours = [
            f"{row['method']} {row['speedup']:.2f}x, {row['tokens_per_step']:.2f}"
            for row in own
            if name_of(row) == name
        ]
        heads = ["; ".join(ours), *[""] * len(theirs)]  # said once, beside the first of theirs
        cells = [published_cells(item) for item in theirs] or [["none found", *[""] * 5]]
        body += [[head, *line] for head, line in zip(heads, cells, strict=False)]
    header = ["here: speed-up, tokens per step", "published", "as", "model", "hardware", "grade", "source"]
    legend = "Grades: " + "; ".join(f"{key}: {value}" for key, value in published["grades"].items()) + "."
    return [*grid(header, body), "", legend]


def published_cells(item: dict) -> list[str]:
    """A published figure with where it is from."""
    low, high = item.get("speedup_range", (item.get("speedup"), None))
    figure = f"{low:.2f}–{high:.2f}x" if high else f"{low:.2f}x"
    figure += f", {item['tokens_per_step']:.2f}" if "tokens_per_step" in item else ""
    source = item["source"] + (f" ({item['note']})" if "note" in item else "")
    return [figure, item["method"], item["model"], item["hardware"], item["grade"], source]


def write_csv(path: Path, rows: list[dict]) -> None:
    """All rows, one column for each figure that any of them has."""
    flat = [{key: value for key, value in row.items() if not isinstance(value, dict | list)} for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in flat for key in row)))
        writer.writeheader()
        writer.writerows(flat)


def draw(output: Path, runs: list[dict], rows: list[dict], curves: list[dict]) -> str:
    """Draws the pictures of each run and returns the Markdown that shows them."""
    from eval.pictures import draw_all

    lines = ["", "## Pictures", ""]
    for number, conditions in enumerate(runs):
        own = [row for row in rows if row["run"] == number]
        for path in draw_all(output, number, conditions, own, curves[number]):
            lines.append(f"![{path.stem}]({path.name})")
    return "\n".join(lines) + "\n"

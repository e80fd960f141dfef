"""Cards: the README of a Hub repository, rendered from a template of `hub_cards/` and checked without a network."""

from __future__ import annotations

import ast
import json
import math
import os
import re
from datetime import UTC, datetime
from pathlib import Path

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult, ModelCard, ModelCardData, RepoCard, SpaceCard
from huggingface_hub.utils import validate_repo_id

from hf_specdec.datastore import Datastore
from hf_specdec.drafter import Drafter
from hf_specdec.models import EMBEDDED_HEADS

PACKAGE = Path(__file__).parent
TEMPLATES = next(place / "hub_cards" for place in (PACKAGE, PACKAGE.parent) if (place / "hub_cards").is_dir())
LIBRARY = "hf-specdec"
TAGS = ("speculative-decoding", LIBRARY)
CARDS = {"model": ModelCard, "dataset": DatasetCard, "space": SpaceCard}
REQUIRED = {
    "model": ("license", "library_name", "pipeline_tag", "base_model", "base_model_relation", "tags"),
    "dataset": ("license", "pretty_name", "tags"),
    "space": ("license", "title", "emoji", "colorFrom", "colorTo", "sdk", "sdk_version", "app_file", "tags"),
}
RELATIONS = ("adapter", "finetune", "merge", "quantized")
COLORS = ("red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray")
CONDITIONS = ("hardware", "dtype", "temperature", "date")  # without which no figure is shown
PAPERS = {
    "eagle": ["2401.15077", "2406.16858", "2503.01840"],
    "kangaroo": ["2404.18911"],
    "medusa": ["2401.10774"],
    "sps": ["2211.17192", "2302.01318"],
}
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")


def drafter_card(
    head: Drafter,
    method: str,
    repo_id: str,
    *,
    base_model: str,
    license: str,
    training: dict,
    figures: list[dict],
    custom_generate: bool = False,
) -> ModelCard:
    """The card of a head.

    Args:
        method (`str`): its generator's name in METHODS.
        base_model (`str`): Hub id of its target.
        training (`dict`): what `training.json` holds; empty where there is none.
        figures (`list[dict]`): from [`held_out_figures`] and [`report_figures`].
    """
    name = f"{method.capitalize()} head for {base_model.split('/')[-1]}"
    data = ModelCardData(
        library_name=LIBRARY,
        pipeline_tag="text-generation",
        base_model=base_model,
        base_model_relation="adapter",
        license=license,
        datasets=[training["dataset"]] if training.get("dataset") else None,
        tags=[*TAGS, method, *(["custom_generate"] if custom_generate else [])],
        model_name=name,
        eval_results=[result for row in figures for result in eval_results(row)] or None,
    )
    return ModelCard.from_template(
        data,
        template_path=TEMPLATES / "drafter.md",
        title=name,
        method=method,
        repo_id=repo_id,
        parameters=f"{sum(parameter.numel() for parameter in head.parameters()) / 1e6:.2f} M",
        dtype=str(head.dtype).removeprefix("torch."),
        config=head.config,
        training=training,
        figures=figures,
        papers=PAPERS.get(method),
        custom_generate=custom_generate,
    )


def eval_results(row: dict) -> list[EvalResult]:
    """A row's figures as the card's metadata gives them: tokens per step, and the speed-up where it was measured."""
    metrics = {"tokens_per_step": "Tokens per step", "speedup": "Speed-up over plain decoding"}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=row["dataset"],
            dataset_name=row["dataset_name"],
            metric_type=key,
            metric_name=name,
            metric_value=round(row[key], 4),
            metric_args={"method": row["method"], **row["conditions"]},
        )
        for key, name in metrics.items()
        if row.get(key) is not None
    ]


def held_out_figures(training: dict, method: str) -> list[dict]:
    """The tokens per step that a training ended with, on the answers it kept for that; none without their conditions."""
    conditions = training.get("conditions") or {}
    if "eval_tokens_per_step" not in (training.get("final") or {}) or not all(key in conditions for key in CONDITIONS):
        return []
    return [
        {
            "dataset": "held-out",
            "dataset_name": "held-out answers",
            "method": method,
            "tokens_per_step": training["final"]["eval_tokens_per_step"],
            "conditions": chosen(conditions),
        }
    ]


def report_figures(path: Path, method: str, head: Path) -> list[dict]:
    """What the `report.json` of `hf-specdec eval report` says of a head, over all tasks of each run.

    Args:
        head (`Path`): the head's folder. Those rows count whose method names a folder or repository called like it, and
            for a head that ships, if there are none, those that name none.

    Raises:
        ValueError: if it says nothing of the head, or is no report.
    """
    path = path / "report.json" if path.is_dir() else path
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
    figures = []
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in report["rows"] if row["task"] == "overall" and row.get("speedup")]
        rows = [row for row in rows if re.split("[:?]", row["method"])[0] == method]
        heads = [Path(row["method"].partition("?")[0].partition(":")[2]).name for row in rows]
        name = "" if head.parent.resolve() == EMBEDDED_HEADS and head.name not in heads else head.name
        for row in (row for row, its_head in zip(rows, heads, strict=True) if its_head == name):
            conditions = {"date": written, **report["runs"][row["run"]], "answers": row["answers"]}
            questions = conditions.get("questions") or "question.jsonl"
            known = questions == "question.jsonl"  # the name that Spec-Bench gives its own
            figures.append(
                {
                    "dataset": "spec-bench" if known else questions,
                    "dataset_name": "Spec-Bench" if known else questions,
                    "method": re.sub(r":[^?]*", "", row["method"]),  # without the head's folder
                    **{key: row.get(key) for key in ("tokens_per_step", "speedup", "speedup_low", "speedup_high")},
                    "conditions": chosen(conditions),
                }
            )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is not the report.json of `hf-specdec eval report`: {error!r}.") from error
    if not figures:
        raise ValueError(
            f"{path} has no row of the head {head.name} over all tasks: evaluate {method}:{head}, or give another report."
        )
    return figures


def chosen(conditions: dict) -> dict:
    """The conditions that stand beside a figure."""
    names = (*CONDITIONS, "max_new_tokens", "answers", "threads", "transformers", "commit")
    return {name: conditions[name] for name in names if conditions.get(name) is not None}


def datastore_card(store: Datastore, repo_id: str, *, license: str) -> DatasetCard:
    """The card of a datastore."""
    title = f"REST datastore for {store.header['tokenizer_name'].partition(' ')[0] or 'a tokenizer'}"
    data = DatasetCardData(license=license, pretty_name=title, tags=[*TAGS, "rest", "datastore"], viewer=False)
    template = TEMPLATES / "datastore.md"
    return DatasetCard.from_template(data, template_path=template, title=title, repo_id=repo_id, **store.info())


def results_card(report: dict, pretty_name: str) -> DatasetCard:
    """The card of evaluation results, from what their `report.json` holds."""
    return DatasetCard.from_template(
        DatasetCardData(), template_path=TEMPLATES / "results.md", pretty_name=pretty_name, **report
    )


def space_card() -> SpaceCard:
    """The card of the Space."""
    return SpaceCard.load(TEMPLATES / "space.md")


def check_card(card: RepoCard, repo_type: str) -> None:
    """Raises ValueError, naming all that is wrong with a card's metadata, its code or its text; asks no network."""
    text, data = str(card), CARDS[repo_type](str(card)).data.to_dict()  # read again, as the Hub will
    wrong = [f"no {key}" for key in REQUIRED[repo_type] if not data.get(key)]
    for key in ("base_model", "datasets", "models"):
        given = data.get(key) or []
        for name in [given] if isinstance(given, str) else given:
            try:
                validate_repo_id(name)
            except ValueError as error:
                wrong.append(f"{key} {name!r}: {error}")
    for key, known in (("base_model_relation", RELATIONS), ("colorFrom", COLORS), ("colorTo", COLORS)):
        if data.get(key, known[0]) not in known:
            wrong.append(f"{key} {data[key]!r} is none of {', '.join(known)}")
    if not re.fullmatch(r"[a-z0-9.+-]*", str(data.get("license", ""))):
        wrong.append(f"license {data['license']!r} is no identifier such as apache-2.0")
    if len(data.get("short_description", "")) > 60:
        wrong.append("short_description is longer than 60 characters")
    for entry in data.get("model-index", []):
        for metric in (metric for result in entry["results"] for metric in result["metrics"]):
            missing = [key for key in CONDITIONS if (metric.get("args") or {}).get(key) is None]
            if missing or not math.isfinite(metric["value"]):
                wrong.append(f"{metric['type']} {metric['value']} stands without {', '.join(missing) or 'a value'}")
    for code in code_blocks(text):
        try:
            ast.parse(code)
        except SyntaxError as error:
            wrong.append(f"a code block is no Python: {error}")
    if "{{" in text or "{%" in text:
        wrong.append("a part of the template is not filled in")
    if TOKEN.search(text):
        wrong.append("it holds what looks like an access token")
    if wrong:
        raise ValueError(f"the card is not valid: {'; '.join(wrong)}.")


def code_blocks(text: str) -> list[str]:
    """The Python blocks of a card."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def hub_id(name: str | None) -> str | None:
    """The Hub id in a model's name, None where that is a folder's."""
    name = (name or "").partition(" ")[0]  # the embedded model's says behind it which conversion it is
    return name if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not os.path.exists(name) else None

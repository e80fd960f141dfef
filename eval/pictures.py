"""Pictures: speed-up by task, time per token, tokens per step against their cost, and the verify curve."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from eval.score import OVERALL
from hf_specdec.compare import PLAIN

DRAFT_PARTS = ("automaton", "head", "layers", "model", "retrieval", "table", "tree")  # drawn apart; others are "draft"
ISO = (0.8, 1.0, 1.25, 1.5, 2.0, 3.0)  # speed-ups drawn as lines


def draw_all(output: Path, number: int, conditions: dict, rows: list[dict], curve: dict) -> list[Path]:
    """Draws what the rows of one run can show, and returns the files."""
    overall = [row for row in rows if row["task"] == OVERALL and "speedup" in row]
    staged = [row for row in overall if "stages_per_token" in row]
    about = f"{conditions['model']}, {conditions['dtype']}, T={conditions['temperature']}\n{conditions['hardware']}"
    pictures = {"speedup": lambda axes: speedup_by_task(axes, rows)}
    if staged:
        pictures["time_per_token"] = lambda axes: time_per_token(axes, overall)
        pictures["tokens_and_cost"] = lambda axes: tokens_and_cost(axes, staged)
    if curve:
        pictures["verify_curve"] = lambda axes: verify_curve(axes, curve)
    paths = []
    for name, picture in pictures.items():
        height = 4 + 0.12 * len(overall) if name != "time_per_token" else 2 + 0.3 * len(overall)
        figure, axes = plt.subplots(figsize=(9, max(5, height)), layout="constrained")
        axes.set_prop_cycle(color=plt.get_cmap("tab20").colors)
        picture(axes)
        axes.set_title(about, fontsize=9)
        handles, labels = axes.get_legend_handles_labels()
        labels = [textwrap.fill(label.replace("&", " &"), 40) for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
        paths.append(output / f"{name}-{number}.png")
        figure.savefig(paths[-1], dpi=110)
        plt.close(figure)
    return paths


def speedup_by_task(axes: plt.Axes, rows: list[dict]) -> None:
    """Bars of each method in each task, with intervals."""
    methods = list(dict.fromkeys(row["method"] for row in rows if row["method"] != PLAIN))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    width = 0.8 / max(1, len(methods))
    for i, method in enumerate(methods):
        own = {row["task"]: row for row in rows if row["method"] == method and "speedup" in row}
        places = [tasks.index(task) + (i - (len(methods) - 1) / 2) * width for task in own]
        heights = [row["speedup"] for row in own.values()]
        low, high = (
            [row.get(end) or row["speedup"] for row in own.values()] for end in ("speedup_low", "speedup_high")
        )
        errors = np.abs(np.array([low, high]) - heights)  # [2, tasks]
        axes.bar(places, heights, width, yerr=errors, label=method, error_kw={"elinewidth": 0.8})
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("speed-up over plain decoding")


def time_per_token(axes: plt.Axes, rows: list[dict]) -> None:
    """Stacked milliseconds of each stage per emitted token; plain decoding is one bar."""
    rows = [row for row in rows if "ms_per_token" in row]
    names = [textwrap.fill(row["method"].replace("&", " &"), 60) for row in rows]
    left = np.zeros(len(names))
    stages = [split_draft(row) for row in rows]
    shown = list(dict.fromkeys(stage for own in stages for stage in own))
    drafts = sorted(stage for stage in shown if stage.startswith("draft"))
    shades = plt.get_cmap("Blues")(np.linspace(0.9, 0.25, len(drafts)))  # what drafting costs, in one colour
    others = [stage for stage in shown if stage not in drafts]
    colors = [*shades, *plt.get_cmap("Set2").colors]
    for stage, color in zip(drafts + others, colors, strict=False):
        widths = np.array([own.get(stage, 0.0) for own in stages])
        axes.barh(names, widths, left=left, label=stage, color=color)
        left += widths
    whole = np.array([row["ms_per_token"] for row in rows])
    axes.barh(
        names, (whole - left).clip(0), left=left, label="plain decoding, or outside the stages", color="lightgray"
    )
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("ms per token after the first")


def split_draft(row: dict) -> dict[str, float]:
    """A row's milliseconds per token by stage, drafting by its parts where the method tells them apart."""
    stages, parts = dict(row.get("stages_per_token", {})), row.get("draft_per_token")
    if not parts:
        return stages
    del stages["draft"]
    split: dict[str, float] = {}
    for part, spent in parts.items():  # a hybrid's "eagle head" is drawn like eagle's own
        name = part.rpartition(" ")[2]
        key = f"draft/{name}" if name in DRAFT_PARTS else "draft"
        split[key] = split.get(key, 0.0) + spent
    return split | stages


def tokens_and_cost(axes: plt.Axes, rows: list[dict]) -> None:
    """Each method by what a step costs beyond a plain one and what it emits; on a line the speed-up is the same."""
    costs = [row["ms_per_step"] / row["plain_ms_per_token"] - 1 for row in rows]
    tokens = [row["tokens_per_step"] for row in rows]
    span = np.array([min(0.0, *costs), max(0.5, *costs) * 1.15])
    top = max(2.0, *tokens) * 1.15
    for ratio in ISO:
        axes.plot(span, ratio * (1 + span), color="gray", linewidth=0.7)
        end = min(span[1], top / ratio - 1)  # where the line leaves the picture
        axes.annotate(f"{ratio:g}x", (end, ratio * (1 + end)), fontsize=8, color="gray", annotation_clip=False)
    for row, cost, number in zip(rows, costs, tokens, strict=True):
        axes.plot(cost, number, "o", label=row["method"])
    axes.set_ylim(0.9, top)
    axes.set_xlabel("cost of a step beyond a plain step: draft, wider verification, the rest (in plain steps)")
    axes.set_ylabel("tokens per step, bonus included")


def verify_curve(axes: plt.Axes, curve: dict) -> None:
    """Milliseconds of the target's forward by the size of the block."""
    for context, times in curve.items():
        axes.plot([int(n) for n in times], list(times.values()), "o-", label=f"behind {context} tokens")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the block")
    axes.set_ylabel("ms per forward")

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
        figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
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
    names = [textwrap.fill(row["method"].replace("&", " &"), 30) for row in rows]
    left = np.zeros(len(names))
    for stage in dict.fromkeys(stage for row in rows for stage in row.get("stages_per_token", {})):
        widths = np.array([row.get("stages_per_token", {}).get(stage, 0.0) for row in rows])
        axes.barh(names, widths, left=left, label=stage)
        left += widths
    whole = np.array([row["ms_per_token"] for row in rows])
    axes.barh(
        names, (whole - left).clip(0), left=left, label="plain decoding, or outside the stages", color="lightgray"
    )
    axes.invert_yaxis()
    axes.set_xlabel("ms per token after the first")


def tokens_and_cost(axes: plt.Axes, rows: list[dict]) -> None:
    """Each method by what a step costs beyond a plain one and what it emits; on a line the speed-up is the same."""
    costs = [row["ms_per_step"] / row["plain_ms_per_token"] - 1 for row in rows]
    tokens = [row["tokens_per_step"] for row in rows]
    span = np.array([min(0.0, *costs), max(0.5, *costs) * 1.15])
    for ratio in ISO:
        axes.plot(span, ratio * (1 + span), color="gray", linewidth=0.7)
        axes.annotate(f"{ratio:g}x", (span[1], ratio * (1 + span[1])), fontsize=8, color="gray", annotation_clip=True)
    for row, cost, number in zip(rows, costs, tokens, strict=True):
        axes.plot(cost, number, "o", label=row["method"])
    axes.set_ylim(0.9, max(2.0, *tokens) * 1.15)
    axes.set_xlabel("cost of a step beyond a plain step: draft, wider verification, the rest (in plain steps)")
    axes.set_ylabel("tokens per step, bonus included")


def verify_curve(axes: plt.Axes, curve: dict) -> None:
    """Milliseconds of the target's forward by the size of the block."""
    for context, times in curve.items():
        axes.plot([int(n) for n in times], list(times.values()), "o-", label=f"behind {context} tokens")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the block")
    axes.set_ylabel("ms per forward")

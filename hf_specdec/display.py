"""Display: what the command line shows, with rich."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_specdec.compare import tie
from hf_specdec.generator import SpecGenerator
from hf_specdec.stats import STAGES

out = Console()
err = Console(stderr=True)


def identity(difference: dict[str, Any] | None) -> str:
    """The words for where an answer leaves plain decoding's."""
    if difference is None:
        return "yes"
    return f"first difference at token {difference['token']}, {tie(difference['margin'])}"


def speed_table(rows: list[dict]) -> Table:
    table = Table(title="Speed")
    for column in ("method", "tokens/s", "speed-up", "tokens per step", "without bonus", "identical to plain"):
        table.add_column(column, justify="left" if column in ("method", "identical to plain") else "right")
    for row in rows:
        same = "yes"
        if row["differences"]:
            margins = [item["margin"] for item in row["differences"]]
            widest = tie(None) if None in margins else f"margin ≤ {max(margins):.3g}"
            same = f"{row['identical']} of {row['answers']}, {widest}"
        steps = [f"{row[key]:.2f}" for key in ("tokens_per_step", "accepted_per_step") if key in row] or [
            "1.00",
            "0.00",
        ]
        table.add_row(row["method"], f"{row['tokens_per_second']:.1f}", f"{row['speedup']:.2f}x", *steps, same)
    return table


def stage_table(rows: list[dict]) -> Table:
    table = Table(title="Seconds per answer, by stage")
    table.add_column("method")
    for stage in STAGES:
        table.add_column(stage, justify="right")
    for row in rows:
        if "seconds" in row:
            table.add_row(row["method"], *(f"{row['seconds'][stage]:.3f}" for stage in STAGES))
    return table


def progress_bar(*, quiet: bool) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=err, transient=True, disable=quiet)


class OriginStreamer(BaseStreamer):
    """Prints tokens as they are emitted, those that were drafted in green.

    Text is decoded line by line, and a token that ends inside a character waits for the rest of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, generator: SpecGenerator):
        self.tokenizer = tokenizer
        self.generator = generator
        self.line: list[int] = []
        self.printed = ""
        self.is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self.is_prompt:
            self.is_prompt = False
            return
        self.line += value.flatten().tolist()
        text = self.tokenizer.decode(self.line, skip_special_tokens=True)
        if text.endswith("\ufffd"):
            return
        style = "green" if self.generator.stats.from_draft[-1] else None
        out.print(Text(text[len(self.printed) :], style=style or ""), end="", soft_wrap=True)
        self.printed = text
        if text.endswith("\n"):
            self.line, self.printed = [], ""

    def end(self) -> None:
        out.print()

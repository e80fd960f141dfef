"""The command line: `python -m eval run | report`, from the checkout; `hf-specdec eval` is the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:  # the commands import what they need, so that --help answers at once
    from eval.run import Decoding, Plan

app = typer.Typer(
    help="Spec-Bench on any model and method: run, then report.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def run(
    methods: Annotated[str, typer.Option("--methods", help="pld,sam,rest:DIR,...: name[:drafter][?option=value]")],
    questions: Annotated[str, typer.Option("--questions", help="Spec-Bench's question.jsonl, or a Hub dataset.")],
    output: Annotated[Path, typer.Option("--output", help="Folder of the answers; an interrupted run goes on.")],
    model: Annotated[str, typer.Option("--model", help="Hub id or folder; 'embedded' is SmolLM2-135M.")] = "embedded",
    dtype: Annotated[str, typer.Option("--dtype")] = "auto",
    device: Annotated[str | None, typer.Option("--device")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Questions of each task.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 decodes greedily.")] = 0.0,
    runs: Annotated[int, typer.Option("--runs", min=1)] = 1,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Per turn.")] = 1024,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    check_lossless: Annotated[
        bool, typer.Option("--check-lossless", help="Exit code 1 if a method's tokens are not plain decoding's.")
    ] = False,
    verify_curve: Annotated[bool, typer.Option(help="Measure what a block costs by its size.")] = True,
) -> None:
    """Let plain decoding and each method answer the questions in turn; under `accelerate launch` processes share them."""
    from eval.run import Decoding

    try:
        plan = make_plan(
            model,
            methods,
            questions,
            output,
            dtype=dtype,
            device=device,
            limit=limit,
            decoding=Decoding(max_new_tokens, temperature, seed),
            runs=runs,
            curve=verify_curve,
        )
    except (ValueError, OSError) as error:
        refuse(error)
    follow(plan, check=check_lossless)


def refuse(error: Exception) -> NoReturn:
    """Says what cannot work, and how to install what is missing; exit code 2."""
    from hf_specdec.cli import extra_hint
    from hf_specdec.display import err

    hint = extra_hint(error.name) if isinstance(error, ImportError) else ""
    err.print(f"error: {error}{hint}", style="red", highlight=False, markup=False)
    raise typer.Exit(code=2) from error


def make_plan(
    model: str,
    methods: str,
    questions: str,
    output: Path,
    *,
    dtype: str,
    device: str | None,
    limit: int | None,
    decoding: Decoding,
    runs: int,
    curve: bool,
) -> Plan:
    """The run that the options describe; what cannot work fails here, before the first answer."""
    import torch
    from transformers.utils import logging

    from eval.answers import AnswerFile
    from eval.chat import Chat
    from eval.questions import read_questions, select
    from eval.run import Plan, describe, make_contestants, split_methods
    from hf_specdec.compare import conditions
    from hf_specdec.models import load_model

    # `accelerate launch` tells each process its place; nothing passes between them, so that none waits for another
    process, processes, local = (
        int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    if device is None and processes > 1 and torch.cuda.is_available():
        device = f"cuda:{local}"
    logging.set_verbosity_error()
    chosen, source = read_questions(questions)
    target, tokenizer = load_model(model, dtype, device=device)
    contestants = make_contestants(split_methods(methods), target)
    chat = Chat(tokenizer, model_name=target.name_or_path)
    about = conditions(
        target,
        temperature=decoding.temperature,
        max_new_tokens=decoding.max_new_tokens,
        seed=decoding.seed,
        methods=list(contestants)[1:],
        drafters={spec: described for spec in list(contestants)[1:] if (described := describe(contestants[spec]))},
        processes=processes,
        **chat.conditions(),
        **source,
    )
    file = AnswerFile(output, about, process=process, processes=processes)
    return Plan(
        target, chat, contestants, select(chosen, limit), file, decoding, runs, process, processes, curve=curve
    )


def follow(plan: Plan, *, check: bool) -> None:
    """Runs a plan under a progress bar, and says how it went."""
    import torch

    from eval.run import broken_promise
    from eval.run import run as run_plan
    from hf_specdec.compare import PLAIN
    from hf_specdec.display import err, progress_bar

    exact = plan.model.dtype in (torch.float32, torch.float64)
    sampled = plan.decoding.temperature > 0
    broken, failed, margins = [], 0, []
    with progress_bar(quiet=plan.process > 0) as progress:
        task = progress.add_task("warming up", total=plan.runs * len(plan.own))
        for rows in run_plan(plan):
            for row in rows:
                if row["failed"]:
                    failed += 1
                    err.print(f"{row['question_id']} {row['method']}: {row['failed']}", style="yellow", markup=False)
                elif row["method"] != PLAIN:
                    differences = [turn["difference"] for turn in row["turns"] if turn.get("difference")]
                    margins += [(item["margin"], row) for item in differences if item.get("margin") is not None]
                    promise = broken_promise(row, plan.contestants[row["method"]], exact=exact, sampled=sampled)
                    broken += [(row, promise)] if promise else []
            progress.update(task, advance=1, description=f"{rows[0]['task']} {rows[0]['question_id']}")
    finish(err, plan.file.path, failed=failed, margins=margins, broken=broken, check=check)


def finish(err, path: Path, *, failed: int, margins: list, broken: list, check: bool) -> None:
    """Says what was written, what failed and where texts differ; exit code 1 for a difference that was to be checked."""
    from hf_specdec.compare import tie

    err.print(f"{path}: {failed} failed answers, which the report leaves out", highlight=False, markup=False)
    if check:
        for row, difference in broken:
            place = f"question {row['question_id']}, {row['method']}: token {difference['token']}"
            err.print(f"NOT LOSSLESS: {place}, {tie(difference['margin'])}", style="red", markup=False)
        if margins and not broken:
            margin, row = max(margins, key=lambda item: item[0])
            place = f"question {row['question_id']}, {row['method']}"
            err.print(f"{len(margins)} answers differ at near ties; the widest margin is {margin:.3g} logits, {place}")
        if not broken and not margins:
            err.print("lossless: every answer is plain decoding's")
        raise typer.Exit(code=int(bool(broken)))


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Outputs of `run`, or folders of Spec-Bench's answers.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for report.md, .csv, .json and pictures.")],
    spec_bench_counting: Annotated[
        bool, typer.Option("--spec-bench-counting", help="Count as Spec-Bench's speed.py does.")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="For --spec-bench-counting of Spec-Bench's own answers.")
    ] = None,
    questions: Annotated[
        str | None, typer.Option("--questions", help="The questions, to score answers against their references.")
    ] = None,
    pictures: Annotated[bool, typer.Option(help="Draw the pictures (needs matplotlib).")] = True,
) -> None:
    """Make the study's table of one or more runs, with confidence intervals, beside the published figures."""
    from hf_specdec.display import out

    try:
        from eval.report import write_report

        text = write_report(
            folders,
            output,
            spec_bench_counting=spec_bench_counting,
            tokenizer=tokenizer,
            questions=questions,
            pictures=pictures,
        )
    except (ValueError, OSError, ImportError) as error:
        refuse(error)
    out.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app(prog_name="python -m eval")

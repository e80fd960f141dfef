"""The command line: `hf-specdec compare | generate | verify | methods | bench | datastore | train | data | push | ...`."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from hf_specdec import hub_cli
from hf_specdec.bench import bench as run_bench
from hf_specdec.bench import to_markdown
from hf_specdec.compare import PLAIN, conditions, encode, race, summarize
from hf_specdec.datastore_cli import app as datastore_app
from hf_specdec.display import OriginStreamer, err, identity, out, progress_bar, speed_table, stage_table
from hf_specdec.export import export
from hf_specdec.generator import METHODS, SpecGenerator, make_generator
from hf_specdec.methods.layerskip import LayerSkipGen
from hf_specdec.models import EMBEDDED, load_model
from hf_specdec.prompts import PROMPTS, Prompt
from hf_specdec.regenerate import app as data_app
from hf_specdec.train import train

app = typer.Typer(
    help="Speculative decoding for transformers: faster text, the same text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(datastore_app, name="datastore")
CHECKOUT = Path(__file__).parents[1]
if (CHECKOUT / "eval" / "__main__.py").is_file():  # part of the checkout, not of the wheel
    sys.path.append(str(CHECKOUT))
    from eval.__main__ import app as eval_app

    app.add_typer(eval_app, name="eval")
app.add_typer(data_app, name="data")
app.command()(train)
app.command()(export)
for command in (hub_cli.push, hub_cli.card, hub_cli.space):
    app.command()(command)

ModelOption = Annotated[
    str, typer.Option("--model", help="Hub id or folder of the target; 'embedded' is SmolLM2-135M.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, bfloat16, float16, float32 or float64.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu, cuda, ...; the GPU where there is one.")]
MethodOption = Annotated[
    list[str] | None,
    typer.Option("--method", "-m", help="name[:drafter][?option=value&...]; may be given several times."),
]
PromptsOption = Annotated[
    Path | None, typer.Option("--prompts", help="A text file, one prompt a line, in place of the built-in prompts.")
]
LimitOption = Annotated[
    int | None,
    typer.Option("--limit", min=1, help="Prompts of each kind; else all of --prompts, one of those built in."),
]
TokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1)]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0.0, help="0 decodes greedily.")]
SeedOption = Annotated[int, typer.Option("--seed")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def compare(
    method: MethodOption = None,
    model: ModelOption = EMBEDDED,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 128,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds over the prompts.")] = 1,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Time plain decoding and each method on the same prompts, in turn, and check that the texts are the same.

    By default those that need no drafter.
    """
    generators = make_all(method)
    target, tokenizer = load_model(model, dtype, device=device)
    keep_fitting(generators, target, asked_for=method)
    chosen = select(prompts, limit)
    total = len(chosen) * repeats * (len(generators) + 1)
    runs = []
    with progress_bar(quiet=as_json) as progress:
        task = progress.add_task("warming up", total=total)
        for run in race(
            target,
            tokenizer,
            generators,
            chosen,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            temperature=temperature,
            seed=seed,
        ):
            runs.append(run)
            progress.update(
                task, advance=1, description=f"{run.kind}: {run.method} {run.tokens_per_second:.0f} tokens/s"
            )
    rows = summarize(runs)
    about = conditions(
        target, temperature=temperature, max_new_tokens=max_new_tokens, prompts=len(chosen), repeats=repeats
    )
    if as_json:
        print(json.dumps({"conditions": about, "methods": rows}))
        return
    out.print(speed_table(rows))
    out.print(stage_table(rows))
    for row in rows:
        for note in row.get("notes", []):
            out.print(f"{row['method']}: {note}", style="yellow")
    if PLAIN in (row["method"] for row in rows) and about["dtype"] in ("bfloat16", "float16"):
        out.print(
            f"In {about['dtype']} a block of tokens rounds differently from single tokens, so near-ties may flip; every "
            "token is still the target's own choice. `hf-specdec verify` checks identity in float32.",
            style="dim",
        )
    out.print("  ".join(f"{key}={value}" for key, value in about.items()), style="dim", highlight=False)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; '-' reads standard input.")],
    method: Annotated[str, typer.Option("--method", "-m", help="name[:drafter][?option=value&...]")] = "pld",
    model: ModelOption = EMBEDDED,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    max_new_tokens: TokensOption = 256,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Stream one answer; the tokens that were drafted and accepted are green."""
    generator = make(method)
    target, tokenizer = load_model(model, dtype, device=device)
    input_ids = encode(tokenizer, sys.stdin.read() if prompt == "-" else prompt, device=target.device)
    torch.manual_seed(seed)
    output = target.generate(
        input_ids,
        candidate_generator=generator,
        max_new_tokens=max_new_tokens,
        streamer=None if as_json else OriginStreamer(tokenizer, generator),
        do_sample=temperature > 0,
        **({"temperature": temperature} if temperature > 0 else {}),
    )
    tokens = output[0, input_ids.shape[1] :]
    stats = generator.stats
    if as_json:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        about = conditions(target, temperature=temperature, seed=seed)
        print(json.dumps({"text": text, "tokens": tokens.tolist(), "stats": stats.to_dict(), "conditions": about}))
        return
    drafted = sum(stats.from_draft) / max(1, stats.emitted)
    err.print(
        f"\n{stats.emitted} tokens, {drafted:.0%} of them drafted; {stats.tokens_per_step:.2f} tokens per step, "
        f"{stats.tokens_per_second:.1f} tokens/s",
        style="dim",
        highlight=False,
    )


@app.command()
def verify(
    method: MethodOption = None,
    model: ModelOption = EMBEDDED,
    dtype: DtypeOption = "float32",
    device: DeviceOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 64,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Check that each method writes exactly what plain decoding writes; exit code 1 if not (in 16 bits near-ties may flip).

    Give a temperature to check sampling as well: the same seed must give the same text.
    """
    generators = make_all(method)
    target, tokenizer = load_model(model, dtype, device=device)
    keep_fitting(generators, target, asked_for=method)
    chosen = select(prompts, limit)
    exact = target.dtype in (torch.float32, torch.float64)
    results = []
    with progress_bar(quiet=as_json) as progress:
        task = progress.add_task("verifying", total=len(chosen) * (len(generators) + 1))
        for run in race(
            target, tokenizer, generators, chosen, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
        ):
            progress.advance(task)
            if run.method == PLAIN:
                continue
            generator = generators[run.method]
            promised = generator.lossless and (temperature == 0 or generator.seed_exact)
            explained = not exact and run.difference and run.difference.margin is not None  # by a near tie
            results.append(
                {
                    "method": run.method,
                    "kind": run.kind,
                    "prompt": run.prompt,
                    "tokens": len(run.tokens),
                    "difference": run.difference and run.difference.to_dict(),
                    "failed": bool(run.difference and promised and not explained),
                }
            )
    failed = any(result["failed"] for result in results)
    if as_json:
        about = conditions(target, temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
        print(json.dumps({"passed": not failed, "results": results, "conditions": about}))
    else:
        table = Table("method", "prompt", "new tokens", "identical to plain")
        for result in results:
            verdict = identity(result["difference"])
            style = "red" if result["failed"] else "green" if result["difference"] is None else "yellow"
            table.add_row(result["method"], result["kind"], str(result["tokens"]), Text(verdict, style=style))
        out.print(table)
        reason = "" if exact else f" ({target.dtype} promises each token to be the target's choice, not identity)"
        out.print("FAILED: the texts differ" if failed else f"passed{reason}", style="red" if failed else "green")
    raise typer.Exit(code=int(failed))


@app.command()
def methods(as_json: JsonOption = False) -> None:
    """List the drafting methods and what each needs."""
    rows = []
    for name, method in METHODS.items():
        lines = (sys.modules[method.__module__].__doc__ or "").strip().splitlines()
        rows.append(
            {"name": name, "class": method.__name__, "about": lines[0], "takes": method.drafter_argument or "nothing"}
        )
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("name", "class", "about", "takes")
    for row in rows:
        table.add_row(*row.values())
    out.print(table)


@app.command()
def skip_layers(
    model: ModelOption = EMBEDDED,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Sets of layers to try.")] = 40,
    as_json: JsonOption = False,
) -> None:
    """Search, on sample prompts, which layers the method `layerskip` leaves out of this model, and keep them for it."""
    target, tokenizer = load_model(model, dtype, device=device)
    ids = [encode(tokenizer, prompt.text, device=target.device) for prompt in select(prompts, limit)]
    with progress_bar(quiet=as_json) as progress:
        task = progress.add_task("searching", total=trials)
        skip, promised = LayerSkipGen.search(
            target,
            ids,
            trials=trials,
            on_trial=lambda number, best: progress.update(
                task, completed=number + 1, description=f"best so far promises {best:.2f}x"
            ),
        )
    if as_json:
        print(json.dumps({"skip": skip, "promised_speedup": promised, "conditions": conditions(target)}))
    else:
        out.print(f"layers {skip} left out promise {promised:.2f}x; `layerskip` now uses them for this model")


@app.command()
def bench(
    model: ModelOption = EMBEDDED,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    questions: Annotated[
        Path | None, typer.Option("--questions", help="Spec-Bench's question.jsonl, in place of the built-in prompts.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Prompts of each kind.")] = 2,
    max_new_tokens: TokensOption = 128,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 3,
    same_text: Annotated[
        bool,
        typer.Option("--same-text", help="Let all write the text of stock plain decoding: none gets an easier one."),
    ] = False,
    verify_curve: Annotated[
        bool, typer.Option("--verify-curve", help="Only the cost of a block by its size.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", help="Folder for bench.json and bench.md.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure where the time goes: block cost, cost of a step outside the target, plain loops and PLD against stock."""
    target, tokenizer = load_model(model, dtype, device=device)
    with progress_bar(quiet=as_json) as progress:
        task = progress.add_task("verify curve", total=None)
        report = run_bench(
            target,
            tokenizer,
            read_questions(questions, limit) if questions else select(None, limit),
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            same_text=same_text,
            only_curve=verify_curve,
            on_progress=lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
        )
    text = to_markdown(report)
    if output:
        output.mkdir(parents=True, exist_ok=True)
        (output / "bench.json").write_text(json.dumps(report, indent=1))
        (output / "bench.md").write_text(text)
    print(json.dumps(report) if as_json else text)


def make(spec: str) -> SpecGenerator:
    """The generator of one `--method`, or an error at the option."""
    try:
        return make_generator(spec)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--method") from error


def make_all(specs: list[str] | None) -> dict[str, SpecGenerator]:
    """The generators of all `--method` options; without any, all methods that can do without a drafter."""
    specs = specs or [
        name for name, method in METHODS.items() if method.drafter_optional or not method.drafter_argument
    ]
    return {spec: make(spec) for spec in specs}


def keep_fitting(
    generators: dict[str, SpecGenerator], target: PreTrainedModel, *, asked_for: list[str] | None
) -> None:
    """Drops those of the default methods that cannot draft for this target; of those asked for, none may be left out."""
    for name, generator in list(generators.items()):
        try:
            generator.bind(target)
        except ValueError as error:
            if asked_for:
                raise
            err.print(f"{name} is left out: {error}", style="yellow", highlight=False, markup=False)
            del generators[name]


def select(path: Path | None, limit: int | None) -> list[Prompt]:
    """The prompts of a file, or the built-in ones: the first `limit` of each kind."""
    chosen = PROMPTS
    if path is not None:
        if not path.is_file():
            raise typer.BadParameter(f"no such file: {path}", param_hint="--prompts")
        lines = path.read_text(encoding="utf-8").split("\n")
        chosen = [Prompt(path.stem, line.strip()) for line in lines if line.strip()]
        if not chosen:
            raise typer.BadParameter(f"{path} holds no prompt: write one a line", param_hint="--prompts")
    return take(chosen, limit or (1 if path is None else None))


def read_questions(path: Path, limit: int | None) -> list[Prompt]:
    """The first turns of a Spec-Bench question file; MT-Bench's eight categories count as one kind."""
    tasks = ("translation", "summarization", "qa", "math_reasoning", "rag")
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        chosen = [Prompt(row["category"] if row["category"] in tasks else "mt_bench", row["turns"][0]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise typer.BadParameter(
            f"{path} is not a Spec-Bench question file (JSON lines with category and turns): {error!r}",
            param_hint="--questions",
        ) from error
    return take(chosen, limit)


def take(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of each kind."""
    counts: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        counts[prompt.kind] = counts.get(prompt.kind, 0) + 1
        if limit is None or counts[prompt.kind] <= limit:
            chosen.append(prompt)
    return chosen


def main() -> None:
    """The console script: bad input ends with its message and exit code 2, not with a traceback."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        hint = extra_hint(error.name) if isinstance(error, ImportError) else ""
        err.print(f"error: {error}{hint}", style="red", highlight=False, markup=False)
        raise SystemExit(2) from None


def extra_hint(package: str | None) -> str:
    """How to install a missing package, where an extra of ours brings it; else nothing."""
    for line in requires("hf-specdec") or ():
        needed, _, condition = line.partition(";")
        extra = re.search(r"extra == [\"']([\w-]+)", condition)
        if package and extra and re.match(r"[\w.-]+", needed)[0] == package:
            return f"; it comes with pip install 'hf-specdec[{extra[1]}]'"
    return ""


if __name__ == "__main__":
    main()

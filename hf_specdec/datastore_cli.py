"""The command line of datastores: `hf-specdec datastore build | add | info | pull`; `hf-specdec push` uploads one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hf_specdec.datastore import SHARD_TOKENS, Datastore, encode
from hf_specdec.display import out, progress_bar
from hf_specdec.models import EMBEDDED, load_tokenizer
from hf_specdec.repository import DATASTORE_FILES, folder_of

app = typer.Typer(help="Build and inspect datastores for the method `rest`.", no_args_is_help=True)

DataOption = Annotated[
    str, typer.Option("--data", help="A Hub dataset, or a local .jsonl, .parquet, .csv or .txt file.")
]
TokenizerOption = Annotated[str, typer.Option("--tokenizer", help="Hub id or folder of the model it is for.")]
SplitOption = Annotated[str, typer.Option("--split", help="Of a Hub dataset.")]
ColumnOption = Annotated[str, typer.Option("--column", help="Texts, or chats as lists of role and content.")]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Take only so many rows.")]


@app.command()
def build(
    data: DataOption,
    output: Annotated[Path, typer.Option("--output", "-o", help="The datastore's folder.")],
    tokenizer: TokenizerOption = EMBEDDED,
    split: SplitOption = "train",
    column: ColumnOption = "text",
    limit: LimitOption = None,
    shard_tokens: Annotated[int, typer.Option("--shard-tokens", min=1)] = SHARD_TOKENS,
) -> None:
    """Index texts for the method `rest`. Called again after an interruption, it carries on."""
    reader = load_tokenizer(tokenizer)
    with progress_bar(quiet=False) as progress:
        task = progress.add_task("tokens stored", total=None)
        store = Datastore.from_texts(
            read_texts(data, split=split, column=column, limit=limit),
            output,
            tokenizer=reader,
            shard_tokens=shard_tokens,
            progress=lambda tokens: progress.advance(task, tokens),
        )
    print_rows(store.info())


@app.command()
def add(
    folder: Annotated[Path, typer.Argument(help="The datastore.")],
    data: DataOption,
    tokenizer: TokenizerOption = EMBEDDED,
    split: SplitOption = "train",
    column: ColumnOption = "text",
    limit: LimitOption = None,
) -> None:
    """Add texts to a datastore, as new shards."""
    reader = load_tokenizer(tokenizer)
    store = Datastore.open(folder)
    store.check(reader)
    store.add(encode(read_texts(data, split=split, column=column, limit=limit), reader))
    print_rows(store.info())


@app.command()
def info(folder: Path, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Say what a datastore holds."""
    about = Datastore.open(folder).info()
    print(json.dumps(about)) if as_json else print_rows(about)


@app.command()
def pull(
    repository: Annotated[str, typer.Argument(help="user/name, or user/name@revision.")],
    folder: Annotated[Path, typer.Argument(help="A new folder for it.")],
) -> None:
    """Copy a datastore from the Hub into a folder, to add texts to it; `rest:user/name` drafts with it without that."""
    if folder.exists():
        raise typer.BadParameter(f"{folder} is there already: give a new folder", param_hint="FOLDER")
    store = Datastore.open(folder_of(repository, files=DATASTORE_FILES, repo_type="dataset"))
    beside = folder.with_name(f"{folder.name}.part")  # no half-copied folder carries the name
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for pattern in DATASTORE_FILES:
        for file in store.folder.glob(pattern):
            shutil.copyfile(file, beside / file.name)
    os.replace(beside, folder)
    print_rows(Datastore.open(folder).info())


def print_rows(about: dict) -> None:
    table = Table(show_header=False)
    for key, value in about.items():
        table.add_row(key, str(value))
    out.print(table)


def read_texts(data: str, *, split: str, column: str, limit: int | None) -> Iterator[str | list[dict]]:
    """One column of a dataset, streamed; its first row is read at once, so that bad data is said before anything is written."""
    kinds = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
    path = Path(data)
    if path.suffix in kinds and not path.is_file():  # the Hub would be asked for it, several times
        raise typer.BadParameter(f"no such file: {path}", param_hint="--data")
    from datasets import load_dataset  # an extra of this package

    if path.is_file() and path.suffix in kinds:
        rows = load_dataset(kinds[path.suffix], data_files=str(path), split="train", streaming=True)
    else:
        rows = load_dataset(data, split=split, streaming=True)
    first = next(iter(rows), None)
    if first is not None and column not in first:
        raise typer.BadParameter(f"{data} has columns {', '.join(first)}, not {column!r}", param_hint="--column")
    return (row[column] for row in islice(rows, limit))

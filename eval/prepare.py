"""Prepare: what the embedded recipe needs beside what ships. A large datastore, and a drafter that is narrow and deep.

`python -m eval.prepare FOLDER`; what is there already stays.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from hf_specdec.datastore import Datastore
from hf_specdec.methods.rest import EMBEDDED_DATASTORE
from hf_specdec.models import load_embedded, no_progress_bars

ALTERED = 0.1  # of the tokens of each copy


def documents_of(store: Datastore) -> list[np.ndarray]:
    """The ids of each document."""
    shards = [np.load(path) for path in sorted(store.folder.glob("tokens-*.npy"))]
    ids = np.concatenate(shards).astype(np.int64)
    ends = np.flatnonzero(ids == store.vocab_size)
    return [part[part < store.vocab_size] for part in np.split(ids, ends) if len(part) > 1]


def altered_copies(documents: list[np.ndarray], *, num_tokens: int) -> Iterator[np.ndarray]:
    """Copies of the documents, `num_tokens` in all, a tenth of whose tokens give way to others, as frequent as they are."""
    generator, ids = np.random.default_rng(0), np.concatenate(documents)
    while num_tokens > 0:
        for document in documents:
            replaced = generator.random(len(document)) < ALTERED
            yield np.where(replaced, generator.choice(ids, len(document)), document)
            num_tokens -= len(document)
            if num_tokens <= 0:
                return


def is_whole(folder: Path) -> bool:
    """Whether a finished datastore is there."""
    try:
        return bool(Datastore.open(folder))
    except ValueError:
        return False


def main(
    folder: Annotated[Path, typer.Argument(help="Where to put them.")],
    millions: Annotated[int, typer.Option("--millions", min=1, help="Tokens of the large datastore.")] = 30,
) -> None:
    """Make a datastore of the embedded one's texts and altered copies of them, and save the embedded model as a drafter."""
    large, deep = folder / "rest-large", folder / "SmolLM2-135M-Instruct"
    if not is_whole(large):
        store = Datastore.open(EMBEDDED_DATASTORE)
        documents = documents_of(store)
        num_tokens = millions * 10**6 - sum(map(len, documents))
        header = {key: store.header[key] for key in ("vocab_size", "tokenizer_hash", "tokenizer_name")}
        Datastore.build(chain(documents, altered_copies(documents, num_tokens=num_tokens)), large, **header)
    if not (deep / "model.safetensors").exists():
        model, tokenizer = load_embedded("bfloat16", device="cpu")
        beside = folder / f"{deep.name}.part"  # no half-written folder carries the name
        with no_progress_bars():
            tokenizer.save_pretrained(beside)
            model.save_pretrained(beside)
        shutil.rmtree(deep, ignore_errors=True)
        beside.rename(deep)


if __name__ == "__main__":
    typer.run(main)

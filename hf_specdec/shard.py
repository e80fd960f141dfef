"""Draft stage, retrieval: one part of a datastore, two memory-mapped arrays that a byte search can be run over.

`tokens-00000.npy` holds the documents' ids, each document closed by a separator (the id `vocab_size`), big-endian so
that comparing bytes compares ids. `suffixes-00000.npy` holds the position of every token, ordered by the text that
starts there. The separator is larger than every id: a query never holds it, so no match crosses a document, and the
hits that end a document come last among the hits of a query.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

import numpy as np

MAX_LENGTH = 64  # tokens in a continuation: as many separators close each shard, so that none is read past the end


class Shard:
    """One pair of arrays: ids and the order of their suffixes.

    Args:
        folder (`Path`), index (`int`): where the two files are.
        entry (`dict`): what the datastore's header says of them: documents, tokens and the files' sizes.
        separator (`bytes`): the id that closes a document; its length is the width of an id.
    """

    def __init__(self, folder: Path, index: int, *, entry: dict, separator: bytes):
        tokens_path, suffixes_path = _paths(folder, index)
        num_ids = entry["tokens"] + entry["documents"] + MAX_LENGTH
        tokens = _open_array(tokens_path, f">u{len(separator)}", length=num_ids, num_bytes=entry["tokens_bytes"])
        suffixes = _open_array(suffixes_path, "<i4", length=entry["tokens"], num_bytes=entry["suffixes_bytes"])
        self.data, self.offset, self.num_ids = tokens.base, tokens.offset, num_ids
        self.suffixes = np.asarray(suffixes)  # [entry["tokens"]]
        self.order = memoryview(self.suffixes)  # its items are plain ints, which a search reads faster
        self.separator, self.width = separator, len(separator)

    def row(self, key: bytes, *, low: int = 0) -> int:
        """First row, from `low` on, whose suffix does not sort before `key`."""
        data, offset, width, size = self.data, self.offset, self.width, len(key)
        return bisect_left(self.order, key, low, key=lambda token: data[(at := offset + width * token) : at + size])

    def first_match(self, key: bytes) -> int | None:
        """First row whose suffix starts with `key` and goes on in the same document."""
        low = self.row(key)
        if low == len(self.order):
            return None
        at = self.offset + self.width * self.order[low]
        text = self.data[at : at + len(key) + self.width]
        return low if text.startswith(key) and not text.endswith(self.separator) else None

    def matches(self, key: bytes, first: int | None) -> range:
        """All such rows, given the first of them."""
        return range(0) if first is None else range(first, self.row(key + self.separator, low=first))

    def continuations(self, rows: np.ndarray, *, skip: int, length: int) -> np.ndarray:
        """The `length` ids that come `skip` tokens after the start of each row's suffix, as byte strings [m]."""
        shape, item = (self.num_ids - length + 1,), f"S{length * self.width}"
        every = np.ndarray(shape, item, buffer=self.data, offset=self.offset, strides=(self.width,))
        return every[self.suffixes[rows] + skip]


def write_shard(
    ids: bytearray, folder: Path, index: int, *, num_documents: int, separator: bytes, divsufsort: Callable
) -> dict:
    """Sorts and writes `ids` (documents, each with its separator); returns the header's entry for the files."""
    num_tokens = len(ids) // len(separator) - num_documents
    ids += separator * MAX_LENGTH
    tokens = np.frombuffer(ids, f">u{len(separator)}")
    suffixes = _sorted_suffixes(tokens, divsufsort)[:num_tokens]  # those that start with a separator are last
    sizes = [_write_array(path, array) for path, array in zip(_paths(folder, index), (tokens, suffixes), strict=True)]
    return {"documents": num_documents, "tokens": num_tokens, "tokens_bytes": sizes[0], "suffixes_bytes": sizes[1]}


def _sorted_suffixes(tokens: np.ndarray, divsufsort: Callable) -> np.ndarray:
    """Positions of `tokens` (big-endian) ordered by the text that starts at each."""
    keys = tokens.view(np.uint8).reshape(len(tokens), -1)[:, -3:]  # ids stay below 2^24: a fourth byte is zero
    width = keys.shape[1]
    order = divsufsort(np.ascontiguousarray(keys).ravel())  # positions of bytes, int32
    filled = 0
    for start in range(0, len(order), 2**20):  # kept in place: those where a token starts
        block = order[start : start + 2**20]
        block = block[block % width == 0] // width
        order[filled : filled + len(block)] = block
        filled += len(block)
    return order[:filled]


def _paths(folder: Path, index: int) -> tuple[Path, Path]:
    return folder / f"tokens-{index:05d}.npy", folder / f"suffixes-{index:05d}.npy"


def _write_array(path: Path, array: np.ndarray) -> int:
    """Writes beside, then renames, so that no half-written file carries the name; returns the file's size."""
    beside = path.with_suffix(".part")
    with open(beside, "wb") as file:
        np.save(file, array)
    os.replace(beside, path)
    return path.stat().st_size


def _open_array(path: Path, dtype: str, *, length: int, num_bytes: int) -> np.memmap:
    if not path.exists():
        raise ValueError(f"{path} is missing: copy or download the whole folder again")
    if path.stat().st_size != num_bytes:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, its datastore.json says {num_bytes}: the file was cut off or "
            "replaced; copy or download it again"
        )
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path} is not a numpy array ({error}): copy or download it again") from error
    if array.dtype != np.dtype(dtype) or array.shape != (length,):
        raise ValueError(
            f"{path} holds {array.dtype.str}{list(array.shape)}, its datastore.json asks for {dtype}[{length}]: the "
            "file belongs to another datastore; copy or download the whole folder again"
        )
    return array

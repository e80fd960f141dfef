"""Draft stage, retrieval: what followed the same tokens in stored documents (REST, He et al. 2023, arXiv:2311.08252).

A folder holds `datastore.json` and the two arrays of each shard (shard.py): ids and their suffix array.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

import hf_specdec
from hf_specdec.data import Unusable, render
from hf_specdec.retrieved import Retrieved, heaviest
from hf_specdec.shard import MAX_LENGTH, Shard, write_shard

logger = logging.getLogger(__name__)

HEADER = "datastore.json"
FORMAT = "hf_specdec.datastore"
FORMAT_VERSION = 1
SHARD_TOKENS = 2**27  # one draft searches every shard, so few and large; a build takes 10 to 19 bytes for each


class Datastore:
    """Token documents on disk that can be asked what followed the end of a context.

    Made by [`~Datastore.build`], [`~Datastore.from_texts`] or [`~Datastore.open`]; reading needs numpy alone.
    """

    def __init__(self, folder: Path, header: dict):
        self.folder, self.header = folder, header
        self.vocab_size, self.width = header["vocab_size"], header["width"]
        self.dtype = np.dtype(f">u{self.width}")
        self.separator = self.vocab_size.to_bytes(self.width, "big")
        self.shards = [
            Shard(folder, index, entry=entry, separator=self.separator) for index, entry in enumerate(header["shards"])
        ]

    # Building

    @classmethod
    def build(
        cls,
        documents: Iterable[Sequence[int]],
        folder: str | Path,
        *,
        vocab_size: int,
        tokenizer_hash: str,
        tokenizer_name: str = "",
        shard_tokens: int = SHARD_TOKENS,
        progress: Callable[[int], object] | None = None,
    ) -> Datastore:
        """Stores `documents` in `folder`; called again with the same ones after an interruption, it carries on.

        Args:
            documents: ids of one document each, streamed; one shard of them is held in memory.
            vocab_size (`int`): every id is below it. Ids take 16 bits where `vocab_size < 65536`, else 32.
            tokenizer_hash (`str`): from [`tokenizer_hash`]; the datastore serves no other tokenizer.
            shard_tokens (`int`): most tokens in a shard, one separator per document included.
            progress: called with the number of tokens of each document taken (the `update` of a tqdm bar).
        """
        store = cls._begin(folder, vocab_size, tokenizer_hash, tokenizer_name, shard_tokens)
        return store._append(islice(documents, store.num_documents, None), progress)

    @classmethod
    def from_texts(
        cls,
        texts: Iterable[str | list[dict]],
        folder: str | Path,
        *,
        tokenizer,
        shard_tokens: int = SHARD_TOKENS,
        progress: Callable[[int], object] | None = None,
    ) -> Datastore:
        """[`~Datastore.build`] of texts or chats (see [`encode`]); carrying on, it encodes only what is missing."""
        hashed = tokenizer_hash(tokenizer)
        store = cls._begin(folder, len(tokenizer), hashed, tokenizer.name_or_path, shard_tokens)
        return store._append(encode(islice(texts, store.num_documents, None), tokenizer), progress)

    def add(self, documents: Iterable[Sequence[int]], *, progress: Callable[[int], object] | None = None) -> Datastore:
        """Appends `documents` as new shards; called again with the same ones after an interruption, it carries on."""
        if self.header["unfinished_from"] is None:
            self.header["unfinished_from"] = self.num_documents
        return self._append(islice(documents, self.num_documents - self.header["unfinished_from"], None), progress)

    @classmethod
    def _begin(cls, folder, vocab_size, tokenizer_hash, tokenizer_name, shard_tokens) -> Datastore:
        """A new datastore without documents, or the one whose build was interrupted."""
        width = 2 if vocab_size < 2**16 else 4
        largest = (2**31 - 1) // min(width, 3) - MAX_LENGTH
        if not 1 <= vocab_size < 2**24 or not 2 <= shard_tokens <= largest:
            raise ValueError(
                f"vocab_size is {vocab_size} and shard_tokens {shard_tokens}; needed are a vocab_size of 1 to "
                f"{2**24 - 1} and shard_tokens of 2 to {largest}"
            )
        settings = dict(
            vocab_size=vocab_size, width=width, tokenizer_hash=tokenizer_hash, tokenizer_name=tokenizer_name,
            shard_tokens=shard_tokens,
        )  # fmt: skip
        folder = Path(folder)
        if (folder / HEADER).exists():
            header = _read_header(folder)
            if header["unfinished_from"] != 0:
                raise ValueError(f"{folder} holds a finished datastore already: use Datastore.add, or another folder")
            differ = [f"{name}={header[name]!r}" for name, given in settings.items() if header[name] != given]
            if differ:
                raise ValueError(
                    f"{folder} holds an interrupted build with {', '.join(differ)}: "
                    "continue it with the same settings, or delete the folder"
                )
            return cls(folder, header)
        folder.mkdir(parents=True, exist_ok=True)
        # unfinished_from: documents stored before the build or add that is under way, None when none is
        header = dict(format=FORMAT, format_version=FORMAT_VERSION, created_by=f"hf-specdec {hf_specdec.__version__}")
        header |= dict(**settings, unfinished_from=0, shards=[])
        _write_header(folder, header)
        return cls(folder, header)

    def _append(self, documents: Iterable[Sequence[int]], progress) -> Datastore:
        try:
            from pydivsufsort import divsufsort
        except ImportError as error:
            raise ImportError("Building a datastore needs pydivsufsort: pip install 'hf-specdec[rest]'") from error
        ids, held = bytearray(), 0
        for document in documents:
            document = self._to_bytes(document, number=self.num_documents + held)
            if len(ids) + len(document) > self.header["shard_tokens"] * self.width:
                self._write_shard(ids, held, divsufsort)
                ids, held = bytearray(), 0
            ids += document
            held += 1
            if progress is not None:
                progress(len(document) // self.width - 1)
        if held:
            self._write_shard(ids, held, divsufsort)
        self.header["unfinished_from"] = None
        _write_header(self.folder, self.header)
        return self

    def _to_bytes(self, document: Sequence[int], *, number: int) -> bytes:
        """A document and its separator as stored, after checking the ids."""
        ids = np.asarray(document, dtype=np.int64)  # [t]
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(
                f"document {number} holds ids from {ids.min()} to {ids.max()}; needed are ids from 0 to "
                f"{self.vocab_size - 1}: encode it with the datastore's tokenizer, or give its full vocab_size"
            )
        if len(ids) >= self.header["shard_tokens"]:
            raise ValueError(
                f"document {number} has {len(ids)} tokens and a shard holds {self.header['shard_tokens']} with the "
                "separator: split the document, or build with larger shard_tokens"
            )
        return ids.astype(self.dtype).tobytes() + self.separator

    def _write_shard(self, ids: bytearray, num_documents: int, divsufsort) -> None:
        """Writes one shard. The header comes last: what it does not list does not exist."""
        index, separator = len(self.shards), self.separator
        entry = write_shard(
            ids, self.folder, index, num_documents=num_documents, separator=separator, divsufsort=divsufsort
        )
        self.header["shards"].append(entry)
        _write_header(self.folder, self.header)
        self.shards.append(Shard(self.folder, index, entry=entry, separator=separator))

    # Reading

    @classmethod
    def open(cls, folder: str | Path) -> Datastore:
        """The datastore in `folder`, memory-mapped; `ValueError` for files that are not whole or not its own."""
        folder = Path(folder)
        header = _read_header(folder)
        if header["unfinished_from"] == 0:
            raise ValueError(f"{folder} holds an interrupted build: call build again with the same documents")
        return cls(folder, header)

    @property
    def num_documents(self) -> int:
        """Documents in the finished shards."""
        return sum(entry["documents"] for entry in self.header["shards"])

    def info(self) -> dict:
        """What the datastore holds: counts, bytes on disk, id width in bytes, tokenizer, who made it."""
        entries = self.header["shards"]
        names = ("vocab_size", "width", "tokenizer_name", "tokenizer_hash", "created_by", "format_version")
        return {
            "documents": self.num_documents,
            "tokens": sum(entry["tokens"] for entry in entries),
            "shards": len(entries),
            "bytes": sum(entry["tokens_bytes"] + entry["suffixes_bytes"] for entry in entries),
            "finished": self.header["unfinished_from"] is None,
        } | {name: self.header[name] for name in names}

    def check(self, tokenizer, vocab_size: int | None = None) -> None:
        """Raises `ValueError` unless the ids are those of `tokenizer` (or of its hash) and of a model's vocabulary."""
        given = tokenizer if isinstance(tokenizer, str) else tokenizer_hash(tokenizer)
        if given != self.header["tokenizer_hash"]:
            raise ValueError(
                f"the datastore in {self.folder} was built with the tokenizer {self.header['tokenizer_name']!r}, hash "
                f"{self.header['tokenizer_hash']}; the one given has hash {given}: build a datastore with this one"
            )
        if vocab_size is not None and vocab_size < self.vocab_size:
            raise ValueError(
                f"the datastore in {self.folder} holds ids below {self.vocab_size}; the model's vocabulary is "
                f"{vocab_size}: resize the model's embeddings, or build a datastore with its tokenizer"
            )

    # Asking

    def continuations(
        self, context: Sequence[int], *, max_match: int = 16, min_match: int = 2, length: int = 10, limit: int = 5000
    ) -> tuple[int, np.ndarray]:
        """Length of the longest end of `context` that occurs and goes on somewhere, and what follows it there.

        Args:
            max_match, min_match (`int`): longest and shortest end to look for.
            length (`int`): tokens of a continuation, at most 64.
            limit (`int`): continuations taken; of more hits, evenly spaced ones in suffix order.

        Returns:
            The match length (0 for none) and continuations [m, length] in suffix order, -1 after a document's end.
        """
        match_length, found = self._retrieve(context, max_match, min_match, length, limit)
        ids = found.view(self.dtype).reshape(-1, length).astype(np.int64)
        ids[np.logical_or.accumulate(ids == self.vocab_size, axis=1)] = -1
        return match_length, ids

    def draft(
        self,
        context: Sequence[int],
        *,
        max_nodes: int = 64,
        max_match: int = 16,
        min_match: int = 2,
        length: int = 10,
        limit: int = 5000,
    ) -> Retrieved:
        """The `max_nodes` prefixes most continuations share, as a tree; ties go to the shallower, then the lower ids.

        Arguments as for [`~Datastore.continuations`]. A context that was not found gives a tree without nodes.
        """
        match_length, found = self._retrieve(context, max_match, min_match, length, limit)
        if not len(found):
            return Retrieved([], [], [], 0, 0)
        tree = heaviest(found, length=length, separator=self.separator, max_nodes=max_nodes)
        return Retrieved(*tree, match_length, len(found))

    def _retrieve(self, context, max_match, min_match, length, limit) -> tuple[int, np.ndarray]:
        """Match length and continuations as sorted byte strings [m]."""
        if not 1 <= length <= MAX_LENGTH or not 1 <= min_match <= max_match or limit < 1:
            raise ValueError(
                f"length={length}, min_match={min_match}, max_match={max_match}, limit={limit}: needed are "
                f"1 <= length <= {MAX_LENGTH}, 1 <= min_match <= max_match and 1 <= limit"
            )
        match_length, ranges = self._longest_match(context[-max_match:], min_match)
        num_hits = sum(map(len, ranges))
        hits = np.arange(min(num_hits, limit)) * num_hits // max(min(num_hits, limit), 1)
        found = [np.empty(0, f"S{length * self.width}")]
        for shard, rows in zip(self.shards, ranges, strict=False):
            here, hits = hits[hits < len(rows)], hits[hits >= len(rows)] - len(rows)
            if len(here):
                found.append(shard.continuations(rows.start + here, skip=match_length, length=length))
        if len(found) <= 2:  # suffix order is sorted order
            return match_length, found[-1]
        return match_length, np.sort(np.concatenate(found), kind="stable")  # timsort: the runs are only merged

    def _longest_match(self, context: Sequence[int], min_match: int) -> tuple[int, list[range]]:
        """If the last k tokens occur, so do the last k-1: a search by halves for the largest such k."""
        key = b""
        for token in map(int, context):
            key = key + token.to_bytes(self.width, "big") if 0 <= token < self.vocab_size else b""  # foreign: no match
        low, high, firsts = min_match - 1, len(key) // self.width, None
        while low < high:
            middle = (low + high + 1) // 2
            probe = [shard.first_match(key[-middle * self.width :]) for shard in self.shards]
            if any(first is not None for first in probe):
                low, firsts = middle, probe
            else:
                high = middle - 1
        if firsts is None:
            return 0, []
        key = key[-low * self.width :]
        return low, [shard.matches(key, first) for shard, first in zip(self.shards, firsts, strict=True)]


def tokenizer_hash(tokenizer) -> str:
    """Hash of the tokenizer's ids and their tokens, added ones included: equal however the tokenizer was loaded."""
    entries = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def encode(texts: Iterable[str | list[dict]], tokenizer) -> Iterator[list[int]]:
    """Yields the ids of each text, or of each chat (a list of `{"role", "content"}`) in the tokenizer's template.

    A chat that the template refuses gives no ids, so that an interrupted build still counts right; a warning counts them.
    """
    texts, dropped = iter(texts), Counter()

    def text_of(item: str | list[dict]) -> str:
        try:
            return item if isinstance(item, str) else render(tokenizer, item)
        except Unusable as reason:
            dropped[str(reason)] += 1
            return ""

    while batch := list(islice(texts, 256)):
        yield from tokenizer(list(map(text_of, batch)), add_special_tokens=False, verbose=False)["input_ids"]
    for reason, count in dropped.items():
        logger.warning("hf_specdec: %d chats dropped (%s)", count, reason)


def _write_header(folder: Path, header: dict) -> None:
    beside = folder / f"{HEADER}.part"
    beside.write_text(json.dumps(header, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, folder / HEADER)


def _read_header(folder: Path) -> dict:
    path = folder / HEADER
    if not path.exists():
        raise ValueError(f"{folder} has no {HEADER}: give a datastore's folder, or make one with Datastore.build")
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        known = header["format"] == FORMAT
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a whole datastore header ({error!r}): copy or download it again") from error
    if not known:
        raise ValueError(f"{path} has the format {header['format']!r}, not {FORMAT!r}: give a datastore's folder")
    if header["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {header['format_version']} (by {header.get('created_by')}), this hf-specdec "
            f"reads {FORMAT_VERSION}: upgrade hf-specdec, or build the datastore again"
        )
    return header

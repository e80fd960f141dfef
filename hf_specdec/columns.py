"""Columns: what the Space shows of one method, from the choices made for it to the verdict on its text. Plain types only."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.compare import first_difference, tie
from hf_specdec.generator import METHODS
from hf_specdec.models import SHIPPED


def spec_of(method: str, drafter: str | None, options: str | None) -> str:
    """A column's choices in one line, as the command line and `make_generator` take them."""
    drafter = (drafter or "").strip() if METHODS[method].drafter_argument else ""
    options = "".join((options or "").split())
    return method + (f":{drafter}" if drafter else "") + (f"?{options}" if options else "")


def drafters(method: str, models: list[str]) -> list[str]:
    """What may draft for a method: the heads that ship for it, and `models` where it takes a language model."""
    shipped = [name for name, owner in SHIPPED.items() if owner == method]
    return shipped + (models if "model" in (METHODS[method].drafter_argument or "") else [])


def known_options(method: str) -> str:
    """The options of a method and their defaults, as an options field takes them."""
    parameters = inspect.signature(METHODS[method]).parameters.values()
    known = [f"{item.name}={json.dumps(item.default)}" for item in parameters if item.kind is item.KEYWORD_ONLY]
    return f"Joined by &. Defaults: {', '.join(known)}" if known else "This method has none."


def new_column(spec: str) -> dict:
    """A column before its turn: what crosses processes and goes out as JSON."""
    figures = dict.fromkeys(("tokens_per_second", "speedup", "tokens_per_step", "seconds", "badge"))
    lists = {name: [] for name in ("ids", "pieces", "accepted_lengths", "notes", "steps")}
    return {"method": spec, "state": "waiting", "message": "", "tokens": 0} | figures | lists


def figures_of(column: dict) -> dict:
    """A column as JSON for people: its text whole, without the trees."""
    text = "".join(text for text, _ in column["pieces"])
    return {"text": text} | {name: value for name, value in column.items() if name not in ("pieces", "steps")}


class Pieces:
    """Turns tokens into the text each adds; one that ends inside a character waits for the rest of it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer, self.line, self.shown = tokenizer, [], ""

    def add(self, token: int, *, last: bool = False) -> str:
        self.line.append(token)
        text = self.tokenizer.decode(self.line, skip_special_tokens=True)
        if text.endswith("\ufffd") and not last:
            return ""
        piece, self.shown = text[len(self.shown) :], text
        if text.endswith("\n"):
            self.line, self.shown = [], ""
        return piece


def read_drafts(drafts: list, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict]:
    """The verifications to step through: what was drafted, what of it was accepted, and the model's own token after it.

    Args:
        drafts (`list[tuple[int, DraftTree]]`): each draft, with the number of tokens written before it.
    """
    ends = [emitted for emitted, _ in drafts[1:]] + [len(ids)]
    for (start, tree), end in zip(drafts, ends, strict=True):
        written = ids[start:end]
        path = tree.follow(written[:-1])[1:]
        if len(tree) > 1 and len(path) < len(written):
            words = tokenizer.batch_decode([[token] for token in tree.host[0]])
            own = tokenizer.decode(written[len(path)])
            yield {"token": start, "words": words, "parents": tree.host[1], "accepted": path, "own": own}


def judge(column: dict, plain: dict, model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    """Sets the speed-up over plain decoding, and says whether the text is plain decoding's."""
    if column["state"] == "failed" or not (column["ids"] and plain["ids"]):
        return
    if column is plain:
        column["badge"] = ("reference", "plain decoding: the text and the time to compare with")
        return
    column["speedup"] = column["tokens_per_second"] / plain["tokens_per_second"]
    texts = [plain["ids"], column["ids"]]
    if "stopped" in (column["state"], plain["state"]):
        texts = [text[: min(map(len, texts))] for text in texts]
    difference = first_difference(model, input_ids, *texts)
    if difference is None:
        so_far = "" if len(texts[0]) == len(plain["ids"]) == len(column["ids"]) else ", as far as it got"
        column["badge"] = ("same", f"✓ identical to plain decoding{so_far}")
        return
    place = f"from token {difference.index + 1} on ({tie(difference.margin)})"
    if not column["promises"]:
        column["badge"] = ("near", f"another text than plain decoding {place}, as this method's options allow")
    elif model.dtype in (torch.float32, torch.float64):
        column["badge"] = ("differs", f"✗ differs from plain decoding {place}")
    else:
        dtype = str(model.dtype).removeprefix("torch.")
        column["badge"] = ("near", f"≈ leaves plain decoding {place}: in {dtype} near-ties may flip")

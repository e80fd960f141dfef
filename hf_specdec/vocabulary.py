"""Vocabulary: whether a target reads tokens and chats as the one that a head was trained for, seen from its stored files."""

from __future__ import annotations

import hashlib
import json
import logging
from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.models import stored_file, stored_tokenizer

logger = logging.getLogger(__name__)


def digest(value) -> str:
    """Short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def hashes(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The fields of a head's config that say which tokenizer its target has."""
    vocabulary, template = sorted(tokenizer.get_vocab().items()), tokenizer.chat_template
    return {"vocabulary_hash": digest(vocabulary), "chat_template_hash": digest(template)}


def check_tokenizer(
    model: PreTrainedModel, *, vocabulary_hash: str | None, chat_template_hash: str | None, made_for: str
) -> None:
    """Compares the target's vocabulary and chat template with a head's, where they are stored here; nothing is downloaded.

    A chat template that differs is a warning: the head was trained on texts of another form, and drafts less well.

    Raises:
        ValueError: if the vocabularies differ; names both hashes.
    """
    name, path = model.config.name_or_path or type(model).__name__, stored_file(model, "tokenizer.json")
    if vocabulary_hash and path:
        found = vocabulary_digest(path, path.stat().st_mtime_ns)
        if found != vocabulary_hash and (tokenizer := stored_tokenizer(model)):  # which may add to what is in the file
            found = hashes(tokenizer)["vocabulary_hash"]
        if found not in (vocabulary_hash, None):
            raise ValueError(
                f"this head was trained for the vocabulary {vocabulary_hash} of {made_for}, but that of {name} has the hash "
                f"{found}, its tokens mean other texts: take the head's own target, or train a head for this one."
            )
    found = template_digest(model) if chat_template_hash else None
    if found not in (chat_template_hash, None):
        logger.warning(
            "hf_specdec: this head was trained with the chat template %s of %s, but that of %s is %s: drafts of chats will be "
            "accepted less often",
            chat_template_hash,
            made_for,
            name,
            found,
        )


@lru_cache(maxsize=8)
def vocabulary_digest(path: Path, modified: int) -> str | None:
    """The hash of the vocabulary in a `tokenizer.json`, None for a kind without one; the time makes it that of the file now."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = stored["model"].get("vocab")
    if isinstance(vocabulary, list):  # of a unigram model, with scores
        vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
    if vocabulary is None:
        return None
    added = {token["content"]: token["id"] for token in stored.get("added_tokens") or ()}
    return digest(sorted((vocabulary | added).items()))


def template_digest(model: PreTrainedModel) -> str | None:
    """The hash of the target's chat template, None where there is not just one of it."""
    if path := stored_file(model, "chat_template.jinja"):
        return digest(path.read_text(encoding="utf-8"))
    path = stored_file(model, "tokenizer_config.json")
    template = json.loads(path.read_text(encoding="utf-8")).get("chat_template") if path else None
    return digest(template) if isinstance(template, str) else None

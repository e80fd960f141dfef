"""Data: chats from the Hub, a file or the target itself, as token ids with a mask on the answers."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SCAFFOLD = 200  # most characters a template may put between its generation prompt and the answer


class Unusable(Exception):
    """A conversation that cannot be trained on; the message is the reason under which it is counted."""


@dataclass
class Example:
    """One text to train on.

    Args:
        index (`int`): of its record in the data, for messages.
        input_ids (`list[int]`): the whole conversation.
        loss_mask (`list[bool]`): True at the tokens of answers, end of turn included.
    """

    index: int
    input_ids: list[int]
    loss_mask: list[bool]

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens in front of the first answer."""
        return self.input_ids[: self.loss_mask.index(True)]


@dataclass
class Chats:
    """All examples of a data set, and what happened to the records that are not among them.

    Args:
        source (`str`): where they are from.
        examples (`list[Example]`): in the order of the data.
        truncated (`int`): examples cut at the longest length.
        dropped (`Counter`): records left out, by reason.
    """

    source: str
    examples: list[Example] = field(default_factory=list)
    truncated: int = 0
    dropped: Counter = field(default_factory=Counter)

    @property
    def num_tokens(self) -> int:
        return sum(len(example.input_ids) for example in self.examples)

    @property
    def num_trained(self) -> int:
        """Tokens of answers."""
        return sum(sum(example.loss_mask) for example in self.examples)

    def describe(self) -> str:
        """One line: sizes, the share of trained tokens, and what was cut or dropped."""
        share = self.num_trained / max(1, self.num_tokens)
        dropped = "".join(f", {count} dropped ({reason})" for reason, count in self.dropped.items())
        return (
            f"{len(self.examples)} examples of {self.source}: {self.num_tokens} tokens, {self.num_trained} trained "
            f"({share:.0%}), {self.truncated} truncated{dropped}"
        )

    def split(self, num_held_out: int, *, seed: int = 0) -> tuple[list[Example], list[Example]]:
        """Examples to train on, and as many held out as asked for, at most a tenth; the choice depends on the seed."""
        order = list(range(len(self.examples)))
        random.Random(seed).shuffle(order)
        held_out = set(order[: min(num_held_out, len(order) // 10)])
        return (
            [example for i, example in enumerate(self.examples) if i not in held_out],
            [self.examples[i] for i in order if i in held_out],
        )


def read_records(source: str, *, split: str = "train") -> list[dict]:
    """The records of a local .jsonl file, or of a data set of the Hub.

    Raises:
        ValueError: for a line that is no JSON object, or a data set that cannot be loaded.
    """
    path = Path(source)
    if path.suffix == ".jsonl" or path.is_file():
        if not path.is_file():
            raise ValueError(f"no such file: {path}")
        records = []
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
            if not line.strip():
                continue
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(records[-1], dict):
                raise ValueError(f"{path}, line {number} is not a JSON object but {type(records[-1]).__name__}")
        return records
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError("data of the Hub needs `pip install hf-specdec[train]` (the package datasets)") from error
    try:
        return list(load_dataset(source, split=split))
    except Exception as error:  # datasets raises errors of many packages
        raise ValueError(f"cannot load the data set {source!r}, split {split!r}: {error}") from error


def read_messages(record: dict, *, index: int) -> list[dict]:
    """The conversation of a record, whatever its layout, as messages {role, content}.

    A message of the assistant may also have "tokens", the ids that were generated (without the end of turn), and
    "finished", False where its end was cut off.

    Raises:
        ValueError: for a layout that is none of those known.
        Unusable: for roles that are neither system, user nor assistant.
    """
    turns = next(
        (record[name] for name in ("messages", "conversations", "data") if record.get(name) is not None), None
    )
    if turns == []:
        raise Unusable("no messages")
    if (
        isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)
    ):  # UltraChat as first published
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    elif isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        messages = [read_turn(turn) for turn in turns]
    elif isinstance(record.get("prompt"), str):
        messages = [{"role": "user", "content": record["prompt"]}]
        if isinstance(record.get("answer"), str) or record.get("answer_tokens") is not None:
            answer = {
                "role": "assistant",
                "content": record.get("answer") or "",
                "finished": record.get("finished", True),
            }
            messages.append(answer | {"tokens": record.get("answer_tokens")})
    else:
        raise ValueError(
            f"record {index} has the fields {', '.join(record)}: it needs messages ([{{role, content}}]), conversations "
            "([{from, value}]), data ([text, ...]), or prompt and answer."
        )
    while messages and messages[0]["role"] == "assistant":  # ShareGPT has conversations cut at the front
        messages = messages[1:]
    return messages


def read_turn(turn: dict) -> dict:
    """One message of a list of {role, content} or {from, value}."""
    role = ROLES.get(turn.get("role", turn.get("from")))
    content = turn.get("content", turn.get("value"))
    if role is None or not isinstance(content, str):
        raise Unusable("a message that is not text of system, user or assistant")
    return {"role": role, "content": content, "tokens": turn.get("tokens"), "finished": turn.get("finished", True)}


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict], **options) -> str:
    """The text of a conversation in the tokenizer's chat template.

    Raises:
        Unusable: for one without messages, or that the template refuses.
    """
    if not messages:
        raise Unusable("no messages")
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except (TemplateError, TypeError) as error:  # TypeError: of a content that is no text
        raise Unusable(f"refused by the chat template: {error}") from error


class ChatFormat:
    """Turns conversations into token ids and a mask on the answers, by rendering the chat template turn by turn.

    No generation markers are needed: an answer begins where the template's generation prompt ends, and ends with the
    first special token behind its content, which the model must learn to emit.

    Raises:
        ValueError: for a chat template whose answers cannot be found that way.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= set(tokenizer.all_special_tokens)
        longest_first = sorted(special, key=len, reverse=True)
        self.end_of_turn = re.compile(r"\s*(?:" + "|".join(map(re.escape, longest_first)) + ")") if special else None
        probe = [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "Yes."}]
        try:
            self.end_id = self.encode(probe)[0][-1]
        except Unusable as why:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path or 'this tokenizer'} cannot be parsed for answers: {why}. "
                'Give data of token ids, {"prompt_tokens": [...], "answer_tokens": [...]}, or another tokenizer.'
            ) from why

    def render(self, messages: Sequence[dict], *, add_generation_prompt: bool = False) -> str:
        """The template's text; Unusable if it refuses the messages."""
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        return render(self.tokenizer, plain, add_generation_prompt=add_generation_prompt)

    def encode_prompt(self, messages: Sequence[dict]) -> list[int]:
        """The ids of a conversation that the model is to answer; Unusable if the template refuses it."""
        if not self.tokenizer.chat_template:
            return self.tokenizer(messages[-1]["content"]).input_ids
        text = self.render(messages, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def encode(self, messages: Sequence[dict]) -> tuple[list[int], list[bool]]:
        """The ids of a conversation and the mask on its answers; nothing behind the last answer.

        Raises:
            Unusable: for a conversation that has no answer, that the template refuses, or whose answers it changes.
        """
        ids, mask = [], []
        for piece, is_answer in self.pieces(messages):
            tokens = self.tokenizer(piece, add_special_tokens=False).input_ids if isinstance(piece, str) else piece
            ids += tokens
            mask += [is_answer] * len(tokens)
        return ids, mask

    def pieces(self, messages: Sequence[dict]) -> Iterator[tuple[str | list[int], bool]]:
        """The conversation cut at the ends of its answers, and whether each piece is an answer."""
        if not any(message["role"] == "assistant" for message in messages):
            raise Unusable("no answer")
        if not self.tokenizer.chat_template:
            yield from self.plain_pieces(messages)
            return
        text, position = self.render(messages), 0
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                start = len(prompt := self.render(messages[:i], add_generation_prompt=True))
                if not text.startswith(prompt) or start < position:
                    raise Unusable("the generation prompt is not what stands in front of an answer")
                content_end, end = self.find(text, message["content"].strip(), start=start)
                yield text[position:start], False
                yield self.answer(message, text=text[start:content_end], end=text[content_end:end]), True
                position = end
                if not message.get("finished", True):
                    return  # nothing can follow an answer that was cut off

    def find(self, text: str, content: str, *, start: int) -> tuple[int, int]:
        """Where the content behind `start` ends, and where the special token behind it does."""
        found = text.find(content, start, start + SCAFFOLD + len(content))
        if found < 0:
            raise Unusable("the template changes the text of an answer")
        end = self.end_of_turn and self.end_of_turn.match(text, found + len(content))
        if not end:
            raise Unusable("no special token ends the answer, so nothing tells the model to stop")
        return found + len(content), end.end()

    def answer(self, message: dict, *, text: str, end: str) -> str | list[int]:
        """An answer's text, or the ids that were generated, with the end of turn unless it was cut off."""
        tokens, finished = message.get("tokens"), message.get("finished", True)
        if not message["content"].strip() and not tokens:
            raise Unusable("an empty answer")
        if tokens is None:
            return text + end if finished else text
        closing = self.tokenizer(end.strip(), add_special_tokens=False).input_ids if finished else []
        return [*tokens, *closing]

    def plain_pieces(self, messages: Sequence[dict]) -> Iterator[tuple[list[int], bool]]:
        """Prompt and answer of a tokenizer without a chat template, written one after the other."""
        if [message["role"] for message in messages] != ["user", "assistant"]:
            raise Unusable("more than a prompt and an answer, without a chat template")
        prompt, answer = messages
        yield self.tokenizer(prompt["content"]).input_ids, False
        tokens = answer.get("tokens")
        if tokens is None:
            tokens = self.tokenizer(answer["content"], add_special_tokens=False).input_ids
        closing = [self.tokenizer.eos_token_id] if answer.get("finished", True) else []
        yield [*tokens, *closing], True


def read_chats(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str = "train",
    max_length: int = 2048,
    limit: int | None = None,
) -> Chats:
    """The examples of a data set.

    Args:
        source (`str`): a .jsonl file or a data set of the Hub.
        split (`str`): of the data set.
        max_length (`int`): tokens at which an example is cut.
        limit (`int`, *optional*): take only so many records.

    Raises:
        ValueError: for data without any answer, an unknown layout, or a chat template that cannot be parsed.
    """
    records = read_records(source, split=split)[:limit]
    name = Path(source).name if Path(source).exists() else source
    return encode_records(records, tokenizer, source=name, max_length=max_length)


def encode_records(
    records: Iterable[dict], tokenizer: PreTrainedTokenizerBase, *, source: str, max_length: int
) -> Chats:
    """The examples of records of any known layout, those of token ids among them."""
    chats, chat_format = Chats(source), None
    for index, record in enumerate(records):
        try:
            if "prompt_tokens" in record:
                ids = [*record["prompt_tokens"], *record["answer_tokens"]]
                mask = [i >= len(record["prompt_tokens"]) for i in range(len(ids))]
            else:
                chat_format = chat_format or ChatFormat(tokenizer)
                ids, mask = chat_format.encode(read_messages(record, index=index))
        except Unusable as reason:
            chats.dropped[str(reason)] += 1
            continue
        chats.truncated += len(ids) > max_length
        ids, mask = ids[:max_length], mask[:max_length]
        if any(mask):
            chats.examples.append(Example(index, ids, mask))
        else:
            chats.dropped["no answer within the length"] += 1
    if not chats.examples:
        reasons = ", ".join(f"{count} records: {reason}" for reason, count in chats.dropped.items()) or "it is empty"
        raise ValueError(
            f"{source} has nothing to train on ({reasons}). `hf-specdec data regenerate` writes answers to prompts."
        )
    return chats


def frequent_ids(examples: Iterable[Example], size: int, *, always: Iterable[int] = ()) -> list[int]:
    """The `size` ids most frequent in answers, sorted; those in `always` (ends of turn) are among them."""
    counts = Counter()
    for example in examples:
        counts.update(token for token, trained in zip(example.input_ids, example.loss_mask, strict=True) if trained)
    chosen = dict.fromkeys(always)
    for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(chosen) >= size:
            break
        chosen.setdefault(token)
    return sorted(chosen)

"""Regenerate: `hf-specdec data regenerate`: the target writes the answers of a data set, or prompts and answers of its own."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.data import ChatFormat, Unusable, read_messages, read_records
from hf_specdec.display import progress_bar
from hf_specdec.models import EMBEDDED, load_model

WINDOW = 16  # batches among which prompts of one length are looked for

app = typer.Typer(help="Prepare data to train heads on.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Prepare data to train heads on."""


@app.command("regenerate")
def regenerate_command(
    source: Annotated[str, typer.Argument(metavar="DATA", help="A Hub data set or .jsonl file, or 'self'.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A .jsonl file; what it has already is not written again.")
    ],
    target: Annotated[str, typer.Option("--target", help="Hub id or folder; 'embedded' is SmolLM2-135M.")] = EMBEDDED,
    split: Annotated[str, typer.Option("--split", help="Of a Hub data set.")] = "train",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Take only so many records.")] = None,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Prompts to write for 'self'.")] = 2000,
    quote: Annotated[
        int, typer.Option("--quote", min=0, help="Records whose prompts stand before each one's own: long contexts.")
    ] = 0,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1)] = 32,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 512,
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", min=1, help="Longer ones are left out.")
    ] = 1536,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 answers greedily.")] = 0.0,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, ...; the GPU where there is one.")] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
) -> None:
    """Rewrite the answers of a data set with the target, or let it write prompts and answers of its own ('self')."""
    model, tokenizer = load_model(target, dtype, device=device)
    limits = dict(
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        temperature=temperature,
        seed=seed,
    )
    if source == "self":
        counts = write_own(model, tokenizer, output, num_prompts=num_prompts, **limits)
    else:
        records = read_records(source, split=split)
        records = (quoting(records, quote, seed=seed) if quote else records)[:limit]
        counts = regenerate(model, tokenizer, records, output, **limits)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))


def regenerate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Sequence[dict],
    output: Path,
    *,
    batch_size: int = 32,
    max_new_tokens: int = 512,
    max_prompt_tokens: int = 1536,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, int]:
    """Appends each record's conversation with the target's answers to `output`, and returns counts, of dropped ones by reason.

    Records already in the file are not written again, so an interrupted run carries on where it was. An answer that was cut
    at `max_new_tokens` has "finished" false: its end is not trained.

    Args:
        records (`Sequence[dict]`): of any known layout; answers they have are replaced, prompts alone are answered.
        batch_size (`int`): answers written at a time, of prompts of similar length.
        temperature (`float`): 0 answers greedily, as drafts are verified most often.

    Raises:
        ValueError: if the file was written with other settings, or for other records.
    """
    counts = Counter({"written": 0, "done before": 0})
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    done = {row["index"]: prompts_of(row["messages"]) for row in read_done(output, model, settings)}
    conversations = {}
    for index, record in enumerate(records):
        try:
            conversations[index] = prompts_of(read_messages(record, index=index))
        except Unusable as reason:
            counts[f"dropped ({reason})"] += 1
    for index in done.keys() & conversations.keys():
        counts["done before"] += 1
        asked = conversations.pop(index)[: len(done[index])]  # an answer that was cut off has ended the conversation
        if asked != done[index]:
            found, given = next(pair for pair in zip_longest(done[index], asked) if pair[0] != pair[1])
            raise ValueError(
                f"{output} was written for other data: its record {index} has {str(found)[:80]}, that of the data (its --split "
                f"and --quote) {str(given)[:80]}: give another --output."
            )
    chat_format = ChatFormat(tokenizer)
    pending = list(conversations)
    with output.open("a", encoding="utf-8") as file, progress_bar(quiet=False) as progress:
        task = progress.add_task("answers", total=len(pending))
        for start in range(0, len(pending), batch_size * WINDOW):
            window = sorted(pending[start : start + batch_size * WINDOW], key=lambda i: size(conversations[i]))
            for at in range(0, len(window), batch_size):
                batch = window[at : at + batch_size]
                torch.manual_seed(seed + batch[0])
                chats = [conversations[i] for i in batch]
                written, reasons = converse(
                    model,
                    chat_format,
                    chats,
                    max_new_tokens=max_new_tokens,
                    max_prompt_tokens=max_prompt_tokens,
                    temperature=temperature,
                )
                for index, messages, reason in zip(batch, written, reasons, strict=True):
                    if messages:
                        file.write(json.dumps({"index": index, "messages": messages}) + "\n")
                    counts["written" if messages else f"dropped ({reason})"] += 1
                file.flush()
                progress.advance(task, len(batch))
    return counts


def quoting(records: Sequence[dict], num_quoted: int, *, seed: int = 0) -> list[dict]:
    """The records' prompts, each behind those of `num_quoted` others: texts as long as with documents in them."""
    conversations = []
    for index, record in enumerate(records):
        with suppress(Unusable):
            conversations.append(prompts_of(read_messages(record, index=index)))
    asked, drawn = [messages[-1]["content"] for messages in conversations], random.Random(seed)
    for messages in conversations:
        content = "\n\n".join([*drawn.sample(asked, num_quoted), messages[-1]["content"]])
        messages[-1] = messages[-1] | {"content": content}
    return [{"messages": messages} for messages in conversations]


def read_done(output: Path, model: PreTrainedModel, settings: dict) -> list[dict]:
    """The rows of a file to go on with; a last line that was cut off by an interruption is taken out.

    A file without rows is made, and what it is written with is noted beside it.

    Raises:
        ValueError: if the rows were written with another target or other settings.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    output.touch()
    os.truncate(output, output.read_bytes().rfind(b"\n") + 1)
    rows, note = read_records(str(output)), output.with_suffix(".settings.json")
    about = {"target": model.config.name_or_path, **settings}
    if not rows:
        note.write_text(json.dumps(about), encoding="utf-8")
        return []
    found = json.loads(note.read_text(encoding="utf-8")) if note.exists() else f"settings that no {note.name} tells"
    if found != about:
        raise ValueError(f"{output} was written with {found}, not with {about}: give another --output.")
    return rows


def size(messages: Sequence[dict]) -> int:
    return sum(len(message["content"]) for message in messages)


def prompts_of(messages: Sequence[dict]) -> list[dict]:
    """The conversation without its answers; it ends with a message of the user."""
    prompts = [message for message in messages if message["role"] != "assistant"]
    if not prompts or prompts[-1]["role"] != "user" or not prompts[-1]["content"].strip():
        raise Unusable("no message of the user")
    return [{"role": message["role"], "content": message["content"]} for message in prompts]


def converse(
    model: PreTrainedModel,
    chat_format: ChatFormat,
    chats: Sequence[list[dict]],
    *,
    max_new_tokens: int,
    max_prompt_tokens: int,
    temperature: float,
) -> tuple[list[list[dict]], list[str]]:
    """The conversations with the target's answer behind each message of the user, and why each ended early.

    They end before a prompt that is too long or that the template refuses: one without any answer is [].
    """
    texts: list[list[dict]] = [[] for _ in chats]
    reasons = [""] * len(chats)
    waiting = [list(chat) for chat in chats]
    while any(waiting):
        prompts = {}
        for i, messages in enumerate(waiting):
            while messages and (not texts[i] or texts[i][-1]["role"] != "user"):
                texts[i].append(messages.pop(0))
            if texts[i] and texts[i][-1]["role"] == "user":
                try:
                    prompts[i] = fitting(chat_format.encode_prompt(texts[i]), max_prompt_tokens)
                except Unusable as reason:
                    texts[i].pop()
                    waiting[i], reasons[i] = [], str(reason)
        answers = write(model, list(prompts.values()), max_new_tokens=max_new_tokens, temperature=temperature)
        for i, (tokens, finished) in zip(prompts, answers, strict=True):
            content = chat_format.tokenizer.decode(tokens, skip_special_tokens=True)
            texts[i].append({"role": "assistant", "content": content, "tokens": tokens, "finished": finished})
            if not finished or not content.strip():
                waiting[i] = []
    return [messages if any(m["role"] == "assistant" for m in messages) else [] for messages in texts], reasons


def fitting(prompt: list[int], max_tokens: int) -> list[int]:
    """The prompt; Unusable if it is longer than that."""
    if len(prompt) > max_tokens:
        raise Unusable("a prompt that is too long")
    return prompt


@torch.inference_mode()
def write(
    model: PreTrainedModel, prompts: Sequence[list[int]], *, max_new_tokens: int, temperature: float
) -> list[tuple[list[int], bool]]:
    """The target's continuation of each prompt, without the token that ended it, and whether one did."""
    if not prompts:
        return []
    stops = model.generation_config.eos_token_id
    stops = set(stops if isinstance(stops, list) else [stops])
    longest = max(map(len, prompts))
    pad = next(iter(stops)) if None not in stops else 0
    input_ids = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts], device=model.device)
    attention_mask = torch.tensor(
        [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=model.device
    )
    output = model.generate(
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        do_sample=temperature > 0,
        **({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}),
    )
    answers = []
    for row in output[:, longest:].tolist():
        end = next((i for i, token in enumerate(row) if token in stops), None)
        answers.append((row[:end], end is not None))
    return answers


def write_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    *,
    num_prompts: int,
    batch_size: int = 32,
    max_new_tokens: int = 256,
    seed: int = 0,
) -> None:
    """Appends prompts that the target writes after the bare user header of its chat template, until there are enough.

    Raises:
        ValueError: if the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError("--data self needs a target with a chat template: its user header is what prompts grow from.")
    mark = "\u2063mark\u2063"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    header = tokenizer(text.partition(mark)[0], add_special_tokens=False).input_ids
    done = len(read_done(output, model, {"max_new_tokens": max_new_tokens, "seed": seed}))
    with output.open("a", encoding="utf-8") as file, progress_bar(quiet=False) as progress:
        task = progress.add_task("prompts", total=num_prompts, completed=done)
        while done < num_prompts:
            torch.manual_seed(seed + done)
            count = min(batch_size, num_prompts - done)
            for tokens, finished in write(model, [header] * count, max_new_tokens=max_new_tokens, temperature=1.0):
                content = tokenizer.decode(tokens, skip_special_tokens=True).strip() if finished else ""
                file.write(json.dumps({"index": done, "prompt": content}) + "\n")
                done += 1
            file.flush()
            progress.update(task, completed=done)


def write_own(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    *,
    num_prompts: int,
    batch_size: int = 32,
    max_new_tokens: int = 512,
    max_prompt_tokens: int = 1536,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, int]:
    """Writes a file of prompts and answers that are the target's own, on from where it was interrupted; returns counts.

    The prompts are in a file beside it; they are sampled at temperature 1, the answers as `temperature` says.
    """
    prompts = output.with_suffix(".prompts.jsonl")
    write_prompts(model, tokenizer, prompts, num_prompts=num_prompts, batch_size=batch_size, seed=seed)
    return regenerate(
        model,
        tokenizer,
        read_records(str(prompts))[:num_prompts],
        output,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        max_prompt_tokens=max_prompt_tokens,
        temperature=temperature,
        seed=seed,
    )

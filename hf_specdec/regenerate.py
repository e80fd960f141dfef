"""Regenerate: `hf-specdec data regenerate`: the target writes the answers of a data set, or prompts and answers of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
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
    """Appends each record's conversation with the target's answers to `output`, and returns counts.

    Records already in the file are not written again, so an interrupted run carries on where it was. An answer that was cut
    at `max_new_tokens` has "finished" false: its end is not trained.

    Args:
        records (`Sequence[dict]`): of any known layout; answers they have are replaced, prompts alone are answered.
        batch_size (`int`): answers written at a time, of prompts of similar length.
        temperature (`float`): 0 answers greedily, as drafts are verified most often.
    """
    counts = {"written": 0, "done before": 0, "too long": 0, "unusable": 0}
    done = read_done(output)
    conversations = {}
    for index, record in enumerate(records):
        if index in done:
            counts["done before"] += 1
            continue
        try:
            conversations[index] = prompts_of(read_messages(record, index=index))
        except Unusable:
            counts["unusable"] += 1
    chat_format = ChatFormat(tokenizer)
    pending = list(conversations)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a") as file, progress_bar(quiet=False) as progress:
        task = progress.add_task("answers", total=len(pending))
        for start in range(0, len(pending), batch_size * WINDOW):
            window = sorted(pending[start : start + batch_size * WINDOW], key=lambda i: size(conversations[i]))
            for at in range(0, len(window), batch_size):
                batch = window[at : at + batch_size]
                torch.manual_seed(seed + batch[0])
                chats = [conversations[i] for i in batch]
                written = converse(
                    model,
                    chat_format,
                    chats,
                    max_new_tokens=max_new_tokens,
                    max_prompt_tokens=max_prompt_tokens,
                    temperature=temperature,
                )
                for index, messages in zip(batch, written, strict=True):
                    counts["written" if messages else "too long"] += 1
                    file.write(json.dumps({"index": index, "messages": messages}) + "\n")
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


def read_done(output: Path) -> set[int]:
    """Indices of the records in the file; a last line that was cut off by an interruption is taken out."""
    if not output.exists():
        return set()
    whole, _, rest = output.read_text().rpartition("\n")
    if rest:
        output.write_text(whole + "\n" if whole else "")
    return {json.loads(line)["index"] for line in whole.splitlines() if line}


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
) -> list[list[dict]]:
    """The conversations with the target's answer behind each message of the user; [] for a prompt that is too long."""
    texts: list[list[dict]] = [[] for _ in chats]
    waiting = [list(chat) for chat in chats]
    while any(waiting):
        active = []
        for i, messages in enumerate(waiting):
            while messages and (not texts[i] or texts[i][-1]["role"] != "user"):
                texts[i].append(messages.pop(0))
            if texts[i] and texts[i][-1]["role"] == "user":
                active.append(i)
        prompts = {i: chat_format.encode_prompt(texts[i]) for i in active}
        for i in [i for i in active if len(prompts[i]) > max_prompt_tokens]:
            texts[i].pop()
            waiting[i], active = [], [j for j in active if j != i]
        answers = write(model, [prompts[i] for i in active], max_new_tokens=max_new_tokens, temperature=temperature)
        for i, (tokens, finished) in zip(active, answers, strict=True):
            content = chat_format.tokenizer.decode(tokens, skip_special_tokens=True)
            texts[i].append({"role": "assistant", "content": content, "tokens": tokens, "finished": finished})
            if not finished or not content.strip():
                waiting[i] = []
    return [messages if any(m["role"] == "assistant" for m in messages) else [] for messages in texts]


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
    done = len(read_done(output))
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a") as file, progress_bar(quiet=False) as progress:
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

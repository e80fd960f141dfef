"""Run: plain decoding and each method answer the same questions, in turn, in one process; every answer is written down."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from eval.answers import AnswerFile
from eval.chat import Chat
from eval.questions import Question
from hf_specdec.bench import BLOCKS, verify_curve
from hf_specdec.compare import PLAIN, first_difference, synchronize
from hf_specdec.generator import METHODS, SpecGenerator, make_generator
from hf_specdec.stats import SpecStats

CURVE_CONTEXTS = (128, 512)
WARM_UP_TOKENS = 32
KEPT = ("steps", "drafted", "accepted", "emitted", "drafted_lengths", "draft_depths", "accepted_lengths", "notes")


@dataclass(frozen=True)
class Decoding:
    """How every answer is decoded.

    Args:
        max_new_tokens (`int`): per turn; less where the model's context ends before.
        temperature (`float`): 0 decodes greedily.
        seed (`int`): of run 0, for every single answer; run r has seed + r.
    """

    max_new_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0

    def options(self) -> dict:
        """Arguments for `generate`: the scores as they are, whatever processors the model's own configuration asks for."""
        plain = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
        if self.temperature == 0:
            return {"do_sample": False} | plain
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0} | plain


@dataclass
class Plan:
    """A run: who answers what, how, and where it is written.

    Args:
        contestants (`dict[str, SpecGenerator | None]`): by the name to report; None decodes plainly.
        runs (`int`): how often every question is answered.
        process, processes (`int`): this process, and how many share the questions.
        curve (`bool`): whether to measure the verify curve.
    """

    model: PreTrainedModel
    chat: Chat
    contestants: dict[str, SpecGenerator | None]
    questions: list[Question]
    file: AnswerFile
    decoding: Decoding
    runs: int = 1
    process: int = 0
    processes: int = 1
    curve: bool = True

    @property
    def own(self) -> range:
        """Indices of this process's questions."""
        return range(self.process, len(self.questions), self.processes)


class FirstToken(BaseStreamer):
    """Notes when the first token came, so that the prefill is timed alike in plain decoding and in ours."""

    def __init__(self):
        self.puts = 0
        self.time = 0.0

    def put(self, value: torch.Tensor) -> None:
        if self.puts == 1:  # the prompt comes first
            self.time = time.perf_counter()
        self.puts += 1

    def end(self) -> None:
        pass


def split_methods(text: str) -> list[str]:
    """The specs in a comma-separated list; a comma inside a spec's options stays."""
    names = "|".join(map(re.escape, METHODS))
    return [spec for spec in re.split(rf",(?=(?:{names})(?:[:?,]|$))", text.strip().strip(",")) if spec]


def make_contestants(specs: list[str], model: PreTrainedModel) -> dict[str, SpecGenerator | None]:
    """Plain decoding and the methods by their specs, each bound to the model, so that what cannot work fails here.

    Raises:
        ValueError: for an unknown method or option, or a drafter that does not fit the model.
    """
    contestants: dict[str, SpecGenerator | None] = {PLAIN: None}
    for spec in specs:
        generator = make_generator(spec)
        generator.bind(model)
        generator.stats.synchronize = True
        contestants[spec] = generator
    return contestants


def describe(generator: SpecGenerator) -> dict[str, int]:
    """What a method drafts with, in numbers: a head's parameters, a model's layers and width, a datastore's tokens."""
    described: dict[str, int] = {}
    for part in getattr(generator, "parts", [generator]):
        head, drafter, datastore = (getattr(part, name, None) for name in ("head", "drafter", "datastore"))
        if drafter is not None:
            layers = [
                layer for layer in drafter.modules() if hasattr(layer, "self_attn")
            ]  # those that are skipped have none
            described |= {"layers": len(layers), "width": drafter.config.get_text_config(decoder=True).hidden_size}
        if (trained := head or drafter) is not None:
            described["parameters"] = trained.num_parameters()
        if datastore is not None:
            described["tokens"] = datastore.info()["tokens"]
    return described


def run(plan: Plan) -> Iterator[list[dict]]:
    """Yields, for each question and run of this process, the rows of all contestants, once they are written.

    What is in the file already is yielded as it is. A question whose rows are incomplete is answered again by all, since
    only answers given side by side are compared.
    """
    done = plan.file.done(len(plan.contestants))
    earlier: dict[tuple, dict[str, dict]] = {}
    for row in plan.file.rows:
        earlier.setdefault((row["question_id"], row["run"]), {})[row["method"]] = row
    order, warm = list(plan.contestants), False
    for number in range(plan.runs):
        for index in plan.own:
            question = plan.questions[index]
            if (question.question_id, number) in done:
                yield list(earlier[question.question_id, number].values())
                continue
            if not warm:
                prepare(plan)
                warm = True
            turn = (index + number) % len(order)  # methods take turns to go first
            rows = {}
            for name in order[turn:] + order[:turn]:
                row = answer(
                    plan.model, plan.chat, question, plan.contestants[name], decoding=plan.decoding, run=number
                )
                rows[name] = {"method": name, "process": plan.process} | row
            compare_answers(plan.model, plan.chat, question, rows)
            plan.file.write(rows[name] for name in order)
            yield [rows[name] for name in order]


def prepare(plan: Plan) -> None:
    """Warms up: every contestant answers the first question shortly. Then the first process measures the verify curve."""
    short = replace(plan.decoding, max_new_tokens=min(WARM_UP_TOKENS, plan.decoding.max_new_tokens))
    for generator in plan.contestants.values():
        answer(plan.model, plan.chat, plan.questions[plan.process], generator, decoding=short, run=0)
    room = plan.model.config.get_text_config(decoder=True).max_position_embeddings - max(BLOCKS)
    contexts = [context for context in CURVE_CONTEXTS if context < room]
    if plan.curve and plan.process == 0 and contexts:
        curves = {
            context: verify_curve(plan.model, context, rounds=6, on_progress=lambda *_: None) for context in contexts
        }
        plan.file.write([{"verify_curve": curves}])


def answer(
    model: PreTrainedModel,
    chat: Chat,
    question: Question,
    generator: SpecGenerator | None,
    *,
    decoding: Decoding,
    run: int,
) -> dict:
    """One contestant's row: its answer to every turn, the earlier ones in the conversation, or why it failed."""
    row = {"question_id": question.question_id, "category": question.category, "task": question.task, "run": run}
    row |= {"turns": [], "failed": None}
    reset_peak_memory(model.device)
    messages: list[dict] = []
    try:
        for text in question.turns:
            messages.append({"role": "user", "content": text})
            input_ids = chat.encode(messages).to(model.device)
            row["turns"].append(answer_turn(model, chat, input_ids, generator, decoding=decoding, run=run))
            messages.append({"role": "assistant", "content": row["turns"][-1]["text"]})
    except Exception as error:  # whatever it is, the other questions go on
        row["failed"] = f"{type(error).__name__}: {error}"
    return row | {"peak_memory_bytes": peak_memory(model.device)}


def answer_turn(
    model: PreTrainedModel,
    chat: Chat,
    input_ids: torch.Tensor,
    generator: SpecGenerator | None,
    *,
    decoding: Decoding,
    run: int,
) -> dict:
    """The answer to one turn: its tokens, its times (`seconds` in all, the prefill's among them) and its stats."""
    room = model.config.get_text_config(decoder=True).max_position_embeddings - input_ids.shape[1]
    max_new_tokens = min(decoding.max_new_tokens, room)
    if max_new_tokens < 1:
        raise ValueError(f"the prompt has {input_ids.shape[1]} tokens, and the model's context ends {-room} before")
    first = FirstToken()
    torch.manual_seed(decoding.seed + run)
    synchronize(model.device)
    start = time.perf_counter()
    output = model.generate(
        input_ids,
        candidate_generator=generator,
        streamer=first,
        max_new_tokens=max_new_tokens,
        **decoding.options(),
    )
    synchronize(model.device)
    seconds = time.perf_counter() - start
    tokens = output[0, input_ids.shape[1] :].tolist()
    text = chat.decode(tokens)
    return {
        "tokens": tokens,
        "text": text,
        "prompt_tokens": input_ids.shape[1],
        "max_new_tokens": max_new_tokens,
        "seconds": seconds,
        "prefill_seconds": first.time - start,
        "spec_bench_tokens": chat.spec_bench_tokens(text),
        "stats": None if generator is None else kept(generator.stats),
    }


def kept(stats: SpecStats) -> dict:
    """The stats that the report needs."""
    return {name: getattr(stats, name) for name in KEPT} | {
        "seconds": dict(stats.seconds),
        "draft_parts": dict(stats.draft_parts),
    }


def compare_answers(model: PreTrainedModel, chat: Chat, question: Question, rows: dict[str, dict]) -> None:
    """Notes for each turn of each method where its tokens leave plain decoding's, and by what margin of the target's."""
    plain = rows[PLAIN]
    for name, row in rows.items():
        if name == PLAIN or plain["failed"] or row["failed"]:
            continue
        messages, same = [], True
        for text, turn, base in zip(question.turns, row["turns"], plain["turns"], strict=True):
            messages.append({"role": "user", "content": text})
            turn["difference"] = None
            if not same:
                turn["difference"] = {"earlier_turn": True}  # another conversation by now
            elif turn["tokens"] != base["tokens"]:
                input_ids = chat.encode(messages).to(model.device)
                found = first_difference(model, input_ids, base["tokens"], turn["tokens"])
                turn["difference"] = found.to_dict()
                same = turn["text"] == base["text"]
            messages.append({"role": "assistant", "content": base["text"]})


def broken_promise(row: dict, generator: SpecGenerator, *, exact: bool, sampled: bool) -> dict | None:
    """The first difference that lossless decoding does not allow: any in fp32, and in 16 bits one that no tie explains."""
    if not generator.lossless or (sampled and not generator.seed_exact):
        return None
    for turn in row["turns"]:
        difference = turn.get("difference")
        if difference and "margin" in difference and (exact or difference["margin"] is None):
            return difference
    return None


def reset_peak_memory(device: torch.device) -> None:
    """Starts measuring the peak of what a GPU allocates, or of what this process holds."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """Bytes at the peak, weights included; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None

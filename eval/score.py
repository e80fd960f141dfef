"""Score: the rows of the study's table, one for each task and method, from the answers of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval.questions import TASKS
from hf_specdec.compare import PLAIN
from hf_specdec.stats import STAGES

OVERALL = "overall"
RESAMPLES = 2000
STEP_STAGES = [stage for stage in STAGES if stage != "prefill"]


class Answers:
    """A run's answers by method and question, failed ones kept apart; several runs of a question are put together."""

    def __init__(self, rows: Sequence[dict]):
        self.methods = list(dict.fromkeys([PLAIN, *(row["method"] for row in rows)]))
        self.turns: dict[tuple, list[dict]] = {}  # (method, question, run) -> turns
        self.peaks: dict[str, list[int]] = {}
        self.failed: list[dict] = [row for row in rows if row["failed"]]
        self.task = {row["question_id"]: row["task"] for row in rows}
        for row in rows:
            if not row["failed"]:
                self.turns[row["method"], row["question_id"], row["run"]] = row["turns"]
                self.peaks.setdefault(row["method"], []).append(row.get("peak_memory_bytes") or 0)

    @property
    def tasks(self) -> list[str]:
        """The tasks asked, in Spec-Bench's order, and all of them together."""
        asked = set(self.task.values())
        return [task for task in TASKS if task in asked] + [OVERALL]

    def pairs(self, method: str, task: str, *, other: str = PLAIN) -> dict[int | str, tuple[list[dict], list[dict]]]:
        """For each question of a task that both answered in the same run: the method's turns and the other's."""
        found: dict[int | str, tuple[list[dict], list[dict]]] = {}
        for (name, question, run), turns in self.turns.items():
            beside = self.turns.get((other, question, run))
            if name == method and beside is not None and task in (OVERALL, self.task[question]):
                own, theirs = found.setdefault(question, ([], []))
                own += turns
                theirs += beside
        return found

    def num_failed(self, method: str, task: str) -> int:
        """Answers of a method that are not in its figures because they failed."""
        return sum(row["method"] == method and task in (OVERALL, row["task"]) for row in self.failed)


def score(answers: Answers) -> list[dict]:
    """One row per task and method, plain decoding among them; a method without any answer has no row."""
    rows = []
    for task in answers.tasks:
        for method in answers.methods:
            pairs = answers.pairs(method, task)
            row = {"task": task, "method": method, "failed": answers.num_failed(method, task)}
            if pairs:
                row |= speed(pairs) | steps(pairs) | identity(pairs)
                row["peak_memory_bytes"] = max(answers.peaks[method]) or None
            rows.append(row | {"questions": len(pairs), "answers": sum(len(own) for own, _ in pairs.values())})
    return rows


def totals(turns: Sequence[dict]) -> tuple[float, float, float, float]:
    """Tokens, seconds, and both without the prefill and its token."""
    tokens, seconds = sum(num_tokens(turn) for turn in turns), sum(turn["seconds"] for turn in turns)
    timed = [turn for turn in turns if turn["prefill_seconds"] is not None]  # Spec-Bench's own files do not tell it
    decoded = sum(num_tokens(turn) - 1 for turn in timed)
    decoding = sum(turn["seconds"] - turn["prefill_seconds"] for turn in timed)
    return tokens, seconds, decoded, decoding


def num_tokens(turn: dict) -> int:
    """Emitted tokens of a turn, the end-of-text token included, counted alike for all methods."""
    return turn["new_tokens"] if turn.get("tokens") is None else len(turn["tokens"])


def speed(pairs: dict) -> dict:
    """Speeds and speed-ups of a method over the questions that it and plain decoding answered.

    `speedup` is the ratio of the mean speeds over questions, as Spec-Bench has it, with a 95% bootstrap interval over
    questions; `speedup_total` the ratio of all tokens over all seconds, which does not overweight short answers. Both count
    the prefill. `decode_speedup` is the ratio of totals without it.
    """
    own = np.array([totals(turns) for turns, _ in pairs.values()])  # [q, 4]
    plain = np.array([totals(turns) for _, turns in pairs.values()])
    own_speed, plain_speed = own[:, 0] / own[:, 1], plain[:, 0] / plain[:, 1]
    low, high = interval(own_speed, plain_speed)
    all_own, all_plain = own.sum(0), plain.sum(0)
    row = {
        "tokens_per_second": own_speed.mean(),
        "speedup": own_speed.mean() / plain_speed.mean(),
        "speedup_low": low,
        "speedup_high": high,
        "speedup_total": (all_own[0] / all_own[1]) / (all_plain[0] / all_plain[1]),
    }
    if all_own[2] and all_plain[2]:
        own_rate, plain_rate = all_own[2] / all_own[3], all_plain[2] / all_plain[3]
        row |= {"decode_speedup": own_rate / plain_rate, "decode_tokens_per_second": own_rate}
        row |= {"plain_ms_per_token": 1e3 / plain_rate, "ms_per_token": 1e3 / own_rate}
        row["prefill_ms"] = 1e3 * (all_own[1] - all_own[3]) / sum(len(turns) for turns, _ in pairs.values())
    return {key: None if value is None else float(value) for key, value in row.items()}


def interval(own: np.ndarray, plain: np.ndarray, *, seed: int = 0) -> tuple[float | None, float | None]:
    """The 95% percentile bootstrap of the ratio of means, questions `(q,)` resampled in pairs; one tells no spread."""
    if len(own) < 2:
        return None, None
    drawn = np.random.default_rng(seed).integers(len(own), size=(RESAMPLES, len(own)))  # [r, q]
    ratios = own[drawn].mean(1) / plain[drawn].mean(1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def steps(pairs: dict) -> dict:
    """What a step emits and costs, and the acceptance from which on it pays.

    A step costs `ms_per_step`; plain decoding would emit ms_per_step / plain_ms_per_token tokens in that time. One of them
    is the bonus; the others, over the depth of the draft, are the acceptance at which the method breaks even. For a chain
    this is the study's C_draft / (C_verify n), with every other cost of a step in it.
    """
    stats = [turn["stats"] for own, _ in pairs.values() for turn in own if turn["stats"]]
    if not stats:  # plain decoding: each step is one token
        return {"tokens_per_step": 1.0, "accepted_per_step": 0.0}
    num_steps = sum(item["steps"] for item in stats) or 1
    row = {
        "tokens_per_step": sum(item["emitted"] - 1 for item in stats) / num_steps,
        "accepted_per_step": sum(item["accepted"] for item in stats) / num_steps,
    }
    if any(item["drafted_lengths"] for item in stats):
        depth = sum(sum(item["draft_depths"]) for item in stats) / num_steps
        row |= {"drafted_per_step": sum(item["drafted"] for item in stats) / num_steps, "depth_per_step": depth}
        row["acceptance"] = row["accepted_per_step"] / depth if depth else None
    if any(item["seconds"] for item in stats):
        spent = {stage: sum(item["seconds"].get(stage, 0.0) for item in stats) for stage in STEP_STAGES}
        row |= {f"{stage}_ms": 1e3 * seconds / num_steps for stage, seconds in spent.items()}
        row |= {f"draft/{part}_ms": 1e3 * seconds / num_steps for part, seconds in draft_parts(stats).items()}
        _, _, decoded, decoding = totals([turn for own, _ in pairs.values() for turn in own])
        _, _, plain_decoded, plain_decoding = totals([turn for _, plain in pairs.values() for turn in plain])
        row["ms_per_step"] = 1e3 * decoding / num_steps
        row["stages_per_token"] = {stage: 1e3 * seconds / max(decoded, 1) for stage, seconds in spent.items()}
        row["draft_per_token"] = {
            part: 1e3 * seconds / max(decoded, 1) for part, seconds in draft_parts(stats).items()
        }
        if plain_decoded and plain_decoding:
            row["break_even_accepted"] = row["ms_per_step"] / (1e3 * plain_decoding / plain_decoded) - 1
            row["break_even_acceptance"] = row["break_even_accepted"] / depth if depth else None
    row["notes"] = sorted({note for item in stats for note in item["notes"]})
    return row


def draft_parts(stats: Sequence[dict]) -> dict[str, float]:
    """Seconds of the parts of drafting that a method tells apart, and of the rest of it; together they are the stage."""
    told = [item.get("draft_parts", {}) for item in stats]
    parts = {part: sum(item.get(part, 0.0) for item in told) for item in told for part in item}
    return parts | {"rest": sum(item["seconds"]["draft"] for item in stats) - sum(parts.values())} if parts else {}


def identity(pairs: dict) -> dict:
    """How many answers are plain decoding's, token for token, and the widest margin at a first difference.

    The margin is None where an answer is the beginning of plain decoding's, or the other way round.
    """
    same, margins = 0, [0.0]
    for own, plain in pairs.values():
        for turn, base in zip(own, plain, strict=True):
            key = "text" if turn.get("tokens") is None else "tokens"
            same += turn[key] == base[key]
            margins.append((turn.get("difference") or {}).get("margin", 0.0))
    return {"identical": same, "widest_margin": None if None in margins else max(margins)}

"""Bench: what a step costs, measured in one process and in turn; medians of paired ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from hf_specdec.compare import conditions, encode, synchronize
from hf_specdec.generator import SpecGenerator
from hf_specdec.methods.pld import PLDGen
from hf_specdec.prompts import Prompt
from hf_specdec.target import Target
from hf_specdec.tree import DraftTree

BLOCKS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (128, 512, 1024)
Progress = Callable[[str, int, int], None]


class NoDraft(SpecGenerator):
    """Drafts nothing: plain decoding through our loop."""

    chain_only = True

    def draft(self, input_ids: torch.Tensor, *, max_depth: int) -> DraftTree:
        return DraftTree(input_ids[0, -1:], input_ids.new_tensor([-1]))


def bench(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    repeats: int,
    same_text: bool = False,
    only_curve: bool,
    on_progress: Progress,
) -> dict:
    """The report, as plain JSON types: conditions, verify curve, step overhead, and the paired races."""
    contexts = [
        length
        for length in CONTEXTS
        if length + max(BLOCKS) < model.config.get_text_config(decoder=True).max_position_embeddings
    ]
    report = {
        "conditions": conditions(
            model,
            temperature=0,
            max_new_tokens=max_new_tokens,
            prompts=len(prompts),
            repeats=repeats,
            same_text=same_text,
        ),
        "verify_curve": {length: verify_curve(model, length, on_progress=on_progress) for length in contexts},
    }
    if not only_curve:
        report["overhead"] = [overhead(model, length, on_progress=on_progress) for length in contexts]
        report["races"] = races(
            model,
            tokenizer,
            prompts,
            report["verify_curve"],
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            same_text=same_text,
            on_progress=on_progress,
        )
    return report


@torch.no_grad()
def verify_curve(model: PreTrainedModel, context: int, *, rounds: int = 12, on_progress: Progress) -> dict[int, float]:
    """Milliseconds of the target's forward over a chain of n nodes behind `context` tokens: the median, by n."""
    target = random_target(model, context, max_new_tokens=max(BLOCKS))
    target.prefill()
    target.keep([0])
    times: dict[int, list[float]] = {n: [] for n in BLOCKS}
    for turn in range(rounds + 2):
        on_progress(f"verify curve at {context} tokens", turn, rounds + 2)
        for n in BLOCKS:
            tree = DraftTree.chain(random_ids(model, n)[0].tolist(), device=model.device)
            synchronize(model.device)
            start = time.perf_counter()
            target.verify(tree)
            synchronize(model.device)
            if turn >= 2:  # the first rounds warm up
                times[n].append((time.perf_counter() - start) * 1e3)
            target.keep([])
    return {n: median(values) for n, values in times.items()}


def overhead(model: PreTrainedModel, context: int, *, on_progress: Progress) -> dict:
    """Milliseconds per step spent outside the target's forward while PLD drafts behind `context` tokens."""
    on_progress(f"step overhead at {context} tokens", 0, 1)
    ids = random_ids(model, context // 4).repeat(1, 4)  # a text that repeats itself, so that drafts are full
    generator = PLDGen()
    never = (
        model.config.get_text_config(decoder=True).vocab_size - 1
    )  # no end before 100 tokens, and no processor for it
    model.generate(ids, candidate_generator=generator, max_new_tokens=100, do_sample=False, eos_token_id=never)
    stats = generator.stats
    outside = {stage: stats.seconds[stage] / stats.steps * 1e3 for stage in ("draft", "accept", "compact", "other")}
    return {
        "context": context,
        "drafted_per_step": stats.drafted / stats.steps,
        "ms_per_step": sum(outside.values()),
    } | outside


def races(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    curves: dict[int, dict[int, float]],
    *,
    max_new_tokens: int,
    repeats: int,
    same_text: bool,
    on_progress: Progress,
) -> dict:
    """Paired ratios, per prompt and round, of four ways to decode the same prompts greedily, to the same text if asked."""
    no_draft, pld = NoDraft(), PLDGen()
    ways = {
        "stock_plain": {},
        "stock_pld": {"prompt_lookup_num_tokens": 10},
        "our_plain": {"candidate_generator": no_draft},
        "our_pld": {"candidate_generator": pld},
    }
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    limits, order, alike, as_plain = [], list(ways), [], {"stock_pld": [], "our_pld": []}
    turns = range(repeats * len(prompts) + 1)  # the first warms up; the last is its prompt's in its place
    for turn in turns:
        prompt = prompts[turn % len(prompts)]
        on_progress(f"plain and PLD, stock and ours: {prompt.kind}", turn, len(turns))
        ids = encode(tokenizer, prompt.text, device=model.device)
        shift, texts = turn % len(order), {}
        plain = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False) if same_text else None
        with nullcontext() if plain is None else dictated(model, plain):
            for way in order[shift:] + order[:shift]:
                synchronize(model.device)
                start = time.perf_counter()
                output = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, **ways[way])
                synchronize(model.device)
                seconds = time.perf_counter() - start
                texts[way] = output
                if turn:
                    speeds[way].append((output.shape[1] - ids.shape[1]) / seconds)
        if turn:
            limits.append(of_limit(pld, no_draft, curves, ids.shape[1]))
            alike.append(torch.equal(texts["our_pld"], texts["stock_pld"]))
            for way, agreed in as_plain.items():
                agreed.append(torch.equal(texts[way], texts["stock_plain"]))
    kinds = [prompts[turn % len(prompts)].kind for turn in turns[1:]]
    pairs = {
        "our_plain / stock_plain": ("our_plain", "stock_plain"),
        "stock_pld / stock_plain": ("stock_pld", "stock_plain"),
        "our_pld / stock_plain": ("our_pld", "stock_plain"),
        "our_pld / stock_pld": ("our_pld", "stock_pld"),
    }
    ratios = {name: np.array(speeds[over]) / np.array(speeds[under]) for name, (over, under) in pairs.items()}
    return {
        "answers": len(kinds),
        "ratios": {name: median(values.tolist()) for name, values in ratios.items()},
        "ratios_by_kind": {
            name: {kind: median(values[np.array(kinds) == kind].tolist()) for kind in dict.fromkeys(kinds)}
            for name, values in ratios.items()
        },
        # in 16 bits the two may write different texts, and one of them may be easier to draft
        "our_pld / stock_pld where texts are the same": {
            "answers": sum(alike),
            "ratio": median(ratios["our_pld / stock_pld"][np.array(alike)].tolist() or [float("nan")]),
        },
        "answers_as_stock_plain": {way: sum(agreed) for way, agreed in as_plain.items()},
        "our_pld_of_its_limit": median(limits),
        "tokens_per_second": {way: median(values) for way, values in speeds.items()},
    }


@contextmanager
def dictated(model: PreTrainedModel, text: torch.Tensor) -> Iterator[None]:
    """Within it the model's greedy text is `text` `(1, t)`, prompt included, whatever loop decodes it.

    In 16 bits a loop's blocks round in their own way, so that two loops soon write different texts, and the one whose text
    repeats itself more looks faster. Here the most likely token is always `text`'s, at the same small cost to each of them.
    """
    following = torch.cat([text[0, 1:], text[0, -1:]])  # [t], by position

    def prefer(module, args, kwargs, output):
        logits = output.logits[0]  # [m, v], of the block's last m tokens
        positions = kwargs["position_ids"][0, -len(logits) :].clamp(max=len(following) - 1)
        logits.scatter_(1, following[positions, None], torch.finfo(logits.dtype).max)

    hook = model.register_forward_hook(prefer, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def of_limit(pld: PLDGen, no_draft: NoDraft, curves: dict[int, dict[int, float]], prompt_length: int) -> float:
    """How much of the speed-up that its steps and the verify curve allow PLD reached while decoding; 1 is all of it."""
    stats = pld.stats
    context = prompt_length + stats.emitted / 2
    cost = [at(curves, context, n) for n in range(1, pld.max_nodes + 1)]
    limit = stats.tokens_per_step * cost[0] / np.mean([cost[drafted] for drafted in stats.drafted_lengths])
    return stats.tokens_per_second / no_draft.stats.tokens_per_second / limit


def at(curves: dict[int, dict[int, float]], context: float, n: int) -> float:
    """The verify curve's milliseconds for n nodes, interpolated between measured contexts and sizes."""
    by_context = [np.interp(n, list(curve), list(curve.values())) for curve in curves.values()]
    return float(np.interp(context, list(curves), by_context))


def random_ids(model: PreTrainedModel, length: int) -> torch.Tensor:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocab_size // 2, (1, length), device=model.device)


def random_target(model: PreTrainedModel, context: int, *, max_new_tokens: int) -> Target:
    ids = random_ids(model, context)
    return Target(
        model,
        ids,
        generation_config=GenerationConfig(max_length=context + max_new_tokens),
        model_kwargs={
            "cache": DynamicCache(config=model.config),
            "position_ids": torch.arange(context, device=model.device)[None],
            "use_cache": True,
            "logits_to_keep": 1,
        },
        max_nodes=max(BLOCKS),
    )


def to_markdown(report: dict) -> str:
    """The report as tables."""
    lines = ["## Bench", "", "  ".join(f"{key}={value}" for key, value in report["conditions"].items()), ""]
    lines += ["| block of n tokens | " + " | ".join(f"at {length}, ms" for length in report["verify_curve"]) + " |"]
    lines += ["|---" * (1 + len(report["verify_curve"])) + "|"]
    for n in BLOCKS:
        cells = [f"{curve[n]:.1f} ({curve[n] / curve[1]:.2f}x)" for curve in report["verify_curve"].values()]
        lines.append(f"| {n} | " + " | ".join(cells) + " |")
    if "overhead" in report:
        stages = ("draft", "accept", "compact", "other")
        lines += ["", "| context | outside the forward, ms per step | " + " | ".join(stages) + " |", "|---" * 6 + "|"]
        for row in report["overhead"]:
            cells = [f"{row[stage]:.2f}" for stage in stages]
            lines.append(f"| {row['context']} | {row['ms_per_step']:.2f} | " + " | ".join(cells) + " |")
        races = report["races"]
        kinds = list(next(iter(races["ratios_by_kind"].values())))
        lines += ["", "| ratio of tokens/s | median | " + " | ".join(kinds) + " |", "|---" * (2 + len(kinds)) + "|"]
        for name, value in races["ratios"].items():
            cells = [f"{races['ratios_by_kind'][name][kind]:.2f}" for kind in kinds]
            lines.append(f"| {name} | {value:.3f} | " + " | ".join(cells) + " |")
        same, as_plain = races["our_pld / stock_pld where texts are the same"], races["answers_as_stock_plain"]
        lines += [
            "",
            f"On the {same['answers']} answers that our and the stock PLD wrote alike, the ratio is {same['ratio']:.3f}. "
            f"Of {races['answers']} answers, repeats counted, stock plain decoding wrote {as_plain['our_pld']} as our PLD did "
            f"and {as_plain['stock_pld']} as stock PLD did.",
            "",
            f"PLD reached {races['our_pld_of_its_limit']:.1%} of what its steps and the curve allow (median).",
        ]
    return "\n".join(lines) + "\n"

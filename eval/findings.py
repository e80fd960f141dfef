"""Findings: what the study concluded, held against the rows of a report."""

from __future__ import annotations

from eval.score import OVERALL, Answers, speed
from hf_specdec.compare import PLAIN

RETRIEVAL = ("pld", "sam", "rest", "recycling")
SELF_DRAFTING = ("eagle", "medusa", "kangaroo", "layerskip", "hydra", "dflash", "mtp")
LIGHT_DRAFT = 0.5  # of a verification: a draft that costs more is not light
WIDE = 100  # width over layers: vicuna-68m has 384, Qwen2.5-0.5B 37, SmolLM2-135M 19
DRAFTS = 0.1  # tokens per step: an adaptive method below it has decided not to draft
TREE_GAIN, FREE = 0.22, 0.05  # the study's least gain of trees; a cost below the other counts as none


def findings(rows: list[dict], answers: Answers, drafters: dict[str, dict]) -> list[dict]:
    """Each finding of the study, whether it holds in these rows, and the figures that say so.

    A speed-up counts as one, or as a loss, only where its interval does not hold 1.

    Args:
        answers (`Answers`): what the rows were made of, to compare methods question by question.
        drafters (`dict[str, dict]`): what each method drafts with, from the conditions.
    """
    measured = [row for row in rows if row["method"] != PLAIN and row.get("speedup") is not None]
    overall = [row for row in measured if row["task"] == OVERALL]
    checks = (
        ("An external drafter loses unless it is wide and shallow.", external(overall, drafters)),
        ("Self-drafting pays only when its draft is light.", self_drafting(overall)),
        ("Retrieval gives steady gains.", retrieval(measured)),
        ("A large datastore costs.", datastores(overall, answers, drafters)),
        ("Tree verification adds 22–29% to EAGLE-2 at no extra cost of verification.", trees(overall, answers)),
    )
    return [{"finding": finding, "verdict": verdict, "figures": figures} for finding, (verdict, figures) in checks]


def name_of(row: dict) -> str:
    """The method's name in METHODS."""
    return row["method"].partition(":")[0].partition("?")[0]


def figure(row: dict) -> str:
    """A method's speed-up with its interval."""
    if row.get("speedup_low") is None:
        return f"{row['method']} {row['speedup']:.2f}x"
    return f"{row['method']} {row['speedup']:.2f}x ({row['speedup_low']:.2f}–{row['speedup_high']:.2f})"


def side(row: dict) -> int:
    """1 where a method is faster than what it is held against, -1 where it is slower, 0 where that is not certain."""
    if row.get("speedup_low") is None:
        return 0
    return (row["speedup_low"] > 1) - (row["speedup_high"] < 1)


def judge(agreements: list[int]) -> str:
    """The verdict on what each row says: 1 agrees, -1 contradicts, 0 cannot tell."""
    if -1 in agreements:
        return "Does not hold" if set(agreements) == {-1} else "Does not hold for all"
    return "Holds" if 0 not in agreements else "Undecided: no interval without 1"


def unmeasured(what: str) -> tuple[str, str]:
    return "Not measured here", f"It takes {what} among the methods."


def external(rows: list[dict], drafters: dict[str, dict]) -> tuple[str, str]:
    own = [row for row in rows if name_of(row) == "sps"]
    if not own:
        return unmeasured("sps with a smaller model of the target's tokenizer")
    agreements, figures, kinds = [], [], set()
    for row in own:
        about = drafters.get(row["method"], {})
        wide = about.get("width", 0) >= WIDE * about.get("layers", 1)
        text = f"{figure(row)}, {'wide and shallow' if wide else 'narrow and deep'}"
        text += f" ({about['layers']} layers of {about['width']})" if about else ""
        if row.get("depth_per_step", 1) < DRAFTS:
            text += ", which measured that drafting does not pay and drafted nothing"
            agreements.append(-1 if wide else 1)
        else:
            agreements.append(side(row) if wide else -side(row))
        kinds.add(wide)
        figures.append(text)
    verdict = judge(agreements)
    if len(kinds) == 1:
        verdict += f", but {'none that is narrow and deep' if wide else 'no wide and shallow one'} was measured"
    return verdict, "; ".join(figures) + "."


def self_drafting(rows: list[dict]) -> tuple[str, str]:
    own = [row for row in rows if name_of(row) in SELF_DRAFTING and row.get("verify_ms")]
    own = [row for row in own if row["depth_per_step"] >= DRAFTS]
    if not own:
        return unmeasured("a method that drafts by itself (eagle, medusa, kangaroo, layerskip)")
    light = [row for row in own if row["draft_ms"] < LIGHT_DRAFT * row["verify_ms"]]
    heavy = [row for row in own if row not in light]
    verdict = judge([-side(row) for row in heavy]) if heavy else "No heavy draft was measured"
    paying = sum(side(row) == 1 for row in light)
    verdict += f"; of {len(light)} light ones {paying} pay"
    figures = []
    for kind, chosen in (("Light", light), ("Heavy", heavy)):
        shares = [f"{figure(row)} at {row['draft_ms'] / row['verify_ms']:.2f} of a verification" for row in chosen]
        figures += [f"{kind} drafts: {'; '.join(shares)}"] if shares else []
    return verdict, ". ".join(figures) + "."


def retrieval(rows: list[dict]) -> tuple[str, str]:
    own = [row for row in rows if name_of(row) in RETRIEVAL]
    if not own:
        return unmeasured("pld, sam, recycling or rest")
    overall = [row for row in own if row["task"] == OVERALL]
    losing = [row for row in own if row["task"] != OVERALL and row["speedup"] < 1]
    figures = "; ".join(map(figure, overall))
    figures += f". Below 1x in {len(losing)} of {len(own) - len(overall)} pairs of task and method"
    figures += "".join(f"; {row['task']}: {figure(row)}" for row in losing) + "."
    verdict = judge([side(row) for row in overall])
    if verdict == "Holds":
        return ("Holds in every task" if not losing else "Holds overall, not in every task"), figures
    return verdict, figures


def datastores(rows: list[dict], answers: Answers, drafters: dict[str, dict]) -> tuple[str, str]:
    own = [row for row in rows if name_of(row) == "rest" and "draft_ms" in row and row["method"] in drafters]
    own.sort(key=lambda row: drafters[row["method"]]["tokens"])
    if len(own) < 2 or drafters[own[0]["method"]]["tokens"] == drafters[own[-1]["method"]]["tokens"]:
        return unmeasured("rest with a small and a large datastore")
    small, large = own[0], own[-1]
    figures = [
        f"{figure(row)}, {drafters[row['method']]['tokens']:,} tokens, draft {row['draft_ms']:.2f} ms, "
        f"{row['tokens_per_step']:.2f} tokens per step"
        for row in (small, large)
    ]
    change = against(answers, large, small)
    figures.append(f"the large one beside the small one, question by question: {ratio(change)}")
    return judge([-side(change)]), "; ".join(figures) + "."


def trees(rows: list[dict], answers: Answers) -> tuple[str, str]:
    pairs, agreements, figures = [], [], []
    for tree in rows:
        if (
            name_of(tree) in ("eagle", "kangaroo", "medusa")
            and tree.get("drafted_per_step", 0) > 1.001 * tree["depth_per_step"]
        ):
            chains = [row for row in rows if head_of(row) == head_of(tree) and is_chain(row)]
            pairs += [(tree, chain) for chain in chains]
    if not any(name_of(tree) == "eagle" for tree, _ in pairs):
        return unmeasured("eagle with trees and with chains of one head")
    for tree, chain in pairs:
        gain, cost = against(answers, tree, chain), tree["verify_ms"] / chain["verify_ms"] - 1
        figures.append(
            f"{figure(tree)} against {figure(chain)}: {ratio(gain)} as fast, {cost:+.0%} verification time, "
            f"{tree['tokens_per_step']:.2f} against {chain['tokens_per_step']:.2f} tokens per step"
        )
        if name_of(tree) == "eagle":
            agreements.append((gain["speedup"] >= 1 + TREE_GAIN, side(gain) == 1, cost < FREE))
    gains, pays, free = (all(column) for column in zip(*agreements, strict=True))
    verdict = "Holds" if gains and free else "Does not hold as it stands"
    if not (gains and free):
        parts = ["trees gain as much" if gains else "trees gain, but less" if pays else "trees do not gain reliably"]
        verdict += f": {parts[0]}, and verification costs {'no more' if free else 'more'}"
    return verdict, "; ".join(figures) + "."


def head_of(row: dict) -> str:
    """The method and its drafter, without options."""
    return row["method"].partition("?")[0]


def is_chain(row: dict) -> bool:
    return 0 < row.get("drafted_per_step", 0) <= 1.001 * row["depth_per_step"]


def against(answers: Answers, row: dict, other: dict) -> dict:
    """The speed of one method over another's, on the questions that both answered, with its interval."""
    return speed(answers.pairs(row["method"], OVERALL, other=other["method"]))


def ratio(change: dict) -> str:
    """A ratio of speeds with its interval."""
    interval = "" if change["speedup_low"] is None else f" ({change['speedup_low']:.2f}–{change['speedup_high']:.2f})"
    return f"{change['speedup']:.2f}x{interval}"

"""Findings: what the study concluded, held against the rows of a report."""

from __future__ import annotations

from eval.score import OVERALL
from hf_specdec.compare import PLAIN

RETRIEVAL = ("pld", "sam", "rest", "recycling")
SELF_DRAFTING = ("eagle", "eagle3", "kangaroo", "medusa", "hydra", "dflash", "mtp")
LIGHT_DRAFT = 0.5  # of a verification: a draft that costs more is not light


def findings(rows: list[dict]) -> list[dict]:
    """Each finding of the study, whether it holds in these rows, and the figures that say so."""
    measured = [row for row in rows if row["method"] != PLAIN and row.get("speedup") is not None]
    overall = [row for row in measured if row["task"] == OVERALL]
    checks = (
        ("An external drafter loses unless it is wide and shallow.", external(overall)),
        ("Self-drafting pays only when its draft is light.", self_drafting(overall)),
        ("Retrieval gives steady gains.", retrieval(measured)),
        ("A large datastore costs.", datastores(overall)),
        ("Tree verification adds 22–29% to EAGLE-2 at no extra cost of verification.", trees(overall)),
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


def unmeasured(what: str) -> tuple[str, str]:
    return "Not measured here", f"It takes {what} among the methods."


def external(rows: list[dict]) -> tuple[str, str]:
    own = [row for row in rows if name_of(row) == "sps"]
    if not own:
        return unmeasured("sps with a drafter of the target's family")
    lost = all(row["speedup"] < 1 for row in own)
    return "Holds" if lost else "Does not hold for all drafters", "; ".join(map(figure, own)) + "."


def self_drafting(rows: list[dict]) -> tuple[str, str]:
    own = [row for row in rows if name_of(row) in SELF_DRAFTING and row.get("verify_ms")]
    if not own:
        return unmeasured("a trained head (eagle, kangaroo, ...)")
    agree = [(row["speedup"] > 1) == (row["draft_ms"] < LIGHT_DRAFT * row["verify_ms"]) for row in own]
    figures = [
        f"{figure(row)} with a draft of {row['draft_ms'] / row['verify_ms']:.2f} of verification" for row in own
    ]
    return "Holds" if all(agree) else "Does not hold for all heads", "; ".join(figures) + "."


def retrieval(rows: list[dict]) -> tuple[str, str]:
    own = [row for row in rows if name_of(row) in RETRIEVAL]
    if not own:
        return unmeasured("pld, sam, recycling or rest")
    overall = [row for row in own if row["task"] == OVERALL]
    losing = [row for row in own if row["task"] != OVERALL and row["speedup"] < 1]
    figures = "; ".join(map(figure, overall))
    figures += f". Below 1x in {len(losing)} of {len(own) - len(overall)} pairs of task and method"
    figures += "".join(f"; {row['task']}: {figure(row)}" for row in losing) + "."
    if all(row["speedup"] > 1 for row in overall):
        return ("Holds in every task" if not losing else "Holds overall, not in every task"), figures
    return "Does not hold for all methods", figures


def datastores(rows: list[dict]) -> tuple[str, str]:
    own = sorted(
        (row for row in rows if name_of(row) == "rest" and "draft_ms" in row), key=lambda row: row["draft_ms"]
    )
    if len(own) < 2:
        return unmeasured("rest with a small and a large datastore")
    cheap, dear = own[0], own[-1]
    figures = "; ".join(f"{figure(row)}, draft {row['draft_ms']:.2f} ms" for row in (cheap, dear))
    return "Holds" if dear["speedup"] < cheap["speedup"] else "Does not hold", figures + "."


def trees(rows: list[dict]) -> tuple[str, str]:
    own = [row for row in rows if name_of(row) == "eagle" and "depth_per_step" in row]
    chains = [row for row in own if row["drafted_per_step"] <= row["depth_per_step"] * 1.001]
    wide = [row for row in own if row not in chains]
    if not chains or not wide:
        return unmeasured("eagle with trees and with chains")
    chain, tree = (max(group, key=lambda row: row["speedup"]) for group in (chains, wide))
    gain, cost = tree["speedup"] / chain["speedup"] - 1, tree["verify_ms"] / chain["verify_ms"] - 1
    figures = f"{figure(tree)} against {figure(chain)}: {gain:+.0%} speed, {cost:+.0%} verification time."
    return "Holds" if gain >= 0.22 and cost < 0.05 else "Does not hold as it stands", figures

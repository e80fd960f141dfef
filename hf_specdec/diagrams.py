"""Diagrams: draft trees, and tokens per step over what a step costs, as HTML and SVG for the Space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_specdec.advice import Estimate, drafters_needed
from hf_specdec.drawing import safe, visible

NODE_WIDTH, NODE_HEIGHT, COLUMN_WIDTH, ROW_HEIGHT = 92, 26, 118, 34  # of the tree, in pixels
SPEEDUPS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)  # that have a line in the plane


def tree(step: Mapping) -> str:
    """One verification as SVG: the draft tree, its accepted nodes and the model's own token after them.

    Args:
        step (`Mapping`): words (of each node, the root's first), parents, accepted (node indices), own (the bonus token).
    """
    words, parents = [*step["words"], step["own"]], [*step["parents"], ([0, *step["accepted"]])[-1]]
    own, accepted = len(words) - 1, set(step["accepted"])
    x, y = places(parents, first={own, *accepted})
    lines, nodes = [], []
    for node, word in enumerate(words):
        kind = "root" if node == 0 else "target" if node == own else "accepted" if node in accepted else "refused"
        left, top = 6 + x[node] * COLUMN_WIDTH, 6 + y[node] * ROW_HEIGHT
        if node:
            start = 6 + x[parents[node]] * COLUMN_WIDTH + NODE_WIDTH
            above, middle = (6 + y[i] * ROW_HEIGHT + NODE_HEIGHT / 2 for i in (parents[node], node))
            bend = (start + left) / 2
            kept = ' class="kept"' if kind == "accepted" else ""
            lines.append(f'<path{kept} d="M{start} {above}C{bend} {above} {bend} {middle} {left} {middle}"/>')
        shown = visible(word)
        shown = ("✓ " if kind == "accepted" else "") + (shown if len(shown) < 11 else f"{shown[:9]}…")
        nodes.append(
            f'<g class="{kind}"><title>{safe(visible(word))}: {NODE_KINDS[kind]}</title><rect x="{left}" y="{top}" '
            f'width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="6"/><text x="{left + NODE_WIDTH / 2}" y="{top + 17}" '
            f'text-anchor="middle">{safe(shown)}</text></g>'
        )
    width, height = 12 + max(x) * COLUMN_WIDTH + NODE_WIDTH, 12 + max(y) * ROW_HEIGHT + NODE_HEIGHT
    drafted = len(words) - 2
    path = " → ".join(visible(words[node]) for node in step["accepted"]) or "none"
    summary = f"{drafted} drafted, {len(accepted)} accepted: {path}; then the model's own {visible(step['own'])}"
    return (
        f'<section class="sd"><p>{safe(summary)}</p><div class="sd-tree" tabindex="0" role="region" aria-label="draft '
        f'tree"><svg width="{width}" height="{height}" role="img" aria-label="{safe(summary)}">'
        f'{"".join(lines + nodes)}</svg></div><p class="sd-note">✓ solid: drafted and accepted. Dashed: drafted and '
        "refused. Dotted: the model's own token. Left: the last token before the step.</p></section>"
    )


NODE_KINDS = {
    "root": "last token of the text",
    "target": "the model's own token",
    "accepted": "drafted and accepted",
    "refused": "drafted and refused",
}


def places(parents: Sequence[int], *, first: set[int]) -> tuple[list[int], list[float]]:
    """Column and row of each node: the nodes in `first` run along the top, and no two nodes share a place."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    x, y, rows = [0] * len(parents), [0.0] * len(parents), 0
    stack = [0]
    while stack:  # depth first; a node's first child stays in its row, each other one opens a new row
        node = stack.pop()
        below = sorted(children[node], key=lambda child: (child not in first, child))
        for i, child in reversed(list(enumerate(below))):
            x[child] = x[node] + 1
            y[child] = -1 if i else 0  # -1: a new row, given when its turn comes
            stack.append(child)
        if y[node] < 0:
            rows += 1
            y[node] = rows
        elif node:
            y[node] = y[parents[node]]
    return x, y


def advice(found: Sequence[Estimate], best: Sequence[Estimate], said: Sequence[str]) -> str:
    """What to take and why, and where every method stands."""
    cards = "".join(
        f'<li><article class="sd-card"><header><h3>{place}. {safe(item.method)}</h3></header><dl class="sd-facts"><div>'
        f"<dd>{item.speedup:.2f}×</dd><dt>over plain decoding</dt></div></dl><p>{safe(item.about)}</p>"
        f'<p class="sd-note">{safe(item.reason)}</p><p class="sd-note">Measured with the prompt\'s reading: '
        f"{safe(item.evidence)}</p></article></li>"
        for place, item in enumerate(best, start=1)
    )
    notes = "".join(f"<p>{safe(note)}</p>" for note in said)
    return f'<section class="sd sd-advice"><ol>{cards}</ol>{notes}{plane(found, best)}{ranking(found, best)}</section>'


def plane(found: Sequence[Estimate], best: Sequence[Estimate]) -> str:
    """Tokens per step over what a step costs more than one of plain decoding; lines of equal speed-up run through it."""
    left, right = (
        min(0.0, *(item.cost - 1.03 for item in found)),
        max([0.5, *(item.cost * 1.05 - 1 for item in found)]),
    )
    low, high = 0.75, max([2.0, *(item.tokens_per_step * 1.08 for item in found)])

    def place(extra: float, tokens: float) -> tuple[float, float]:
        """Percent from the left and from the top."""
        return 100 * (extra - left) / (right - left), 100 * (high - tokens) / (high - low)

    lines, labels = [], []
    for speedup in SPEEDUPS:
        end = min(right, high / speedup - 1)  # at the right edge, else at the top
        if end <= left:
            continue
        (x0, y0), (x1, y1) = place(left, speedup * (1 + left)), place(end, speedup * (1 + end))
        kind = ' class="even"' if speedup == 1 else ""
        lines.append(f'<path{kind} d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}"/>')
        side = "side" if end == right else "top"
        labels.append(f'<span class="{side}" style="left:{x1:.1f}%;top:{y1:.1f}%">{speedup:g}×</span>')
        if speedup == 1:
            lines.insert(0, f'<path class="loss" d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}V100H0Z"/>')
    step = 0.5 if high < 4 else 1
    for number in range(round(1 / step), int(high / step) + 1):
        labels.append(f'<span class="y" style="top:{place(0, number * step)[1]:.1f}%">{number * step:g}</span>')
    step = next((step for step in (0.1, 0.2, 0.5, 1, 2, 5) if right <= 7 * step), 10)
    for number in range(int(right / step) + 1):
        labels.append(f'<span class="x" style="left:{place(number * step, 0)[0]:.1f}%">{number * step:g}</span>')
    points = []
    for number, item in reversed(list(enumerate(found, start=1))):  # the best lie on top
        x, y = place(item.cost - 1, item.tokens_per_step)
        about = safe(f"{number}. {item.method}: {item.reason}")
        kind = "best" if item in best else "needy" if item.needs else ""
        points.append(
            f'<span tabindex="0" role="img" aria-label="{about}" class="{kind}"><i style="left:{x:.1f}%;top:{y:.1f}%">'
            f"{number}</i><em>{about}</em></span>"
        )
    return (
        '<h4>Tokens per step, over what a step costs</h4><div class="sd-plane" role="group" aria-label="Tokens per step over '
        'cost"><svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">'
        f'{"".join(lines)}</svg><b>slower than plain</b>{"".join(labels + points)}</div><p class="sd-note sd-axis">what draft '
        'and wider verification add to a step, in steps of plain decoding →</p><p class="sd-note">Up: tokens per step. On a '
        "line the speed-up is the same; on the thick one a method breaks even. Numbers are those of the table; point at one, "
        "or move to it with Tab. Filled: recommended. Dashed: needs a drafter.</p>"
    )


def ranking(found: Sequence[Estimate], best: Sequence[Estimate]) -> str:
    """Every method in a table, by speed-up."""
    heads = ("", "method", "speed-up", "tokens per step", "pays from", "verification", "draft", "measured", "takes")
    lines = []
    for number, item in enumerate(found, start=1):
        takes = ", ".join(drafters_needed()[name] for name in item.needs)
        figures = (item.tokens_per_step, item.cost, item.verify, item.draft)
        cells = [item.method, f"{item.speedup:.2f}×", *(f"{figure:.2f}" for figure in figures), item.evidence, takes]
        kind = ' class="best"' if item in best else ""
        lines.append(
            f'<tr{kind}><th scope="row">{number}</th>{"".join(f"<td>{safe(cell)}</td>" for cell in cells)}</tr>'
        )
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return (
        '<h4>All methods measured</h4><div class="sd-scroll" tabindex="0" role="region" aria-label="all methods measured">'
        f'<table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div><p class="sd-note">'
        "Verification, draft and the tokens from which on a method pays are in steps of plain decoding. Speed-ups leave the "
        "prompt's reading out; measured ones have it in.</p>"
    )

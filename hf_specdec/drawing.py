"""Drawing: messages, answers and bars as HTML for the Space; no script, no font and no network in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

from hf_specdec.stats import STAGES

STYLE = """
.sd, .sd-head { --drafted: #c5ebdd; --accent: #0b6b5f; --own: #a34a06; --muted: #556070; --near: #8a5a00; --bad: #b42318;
  --prefill: #64748b; --draft: #e08a00; --verify: #0d8a7d; --accept: #5b5bd6; --compact: #c83e8c; --other: #a8b3c2; }
.dark .sd, .dark .sd-head { --drafted: #0f5247; --accent: #5fe0c9; --own: #f5b04c; --muted: #a9b5c6; --near: #f2c265;
  --bad: #ff9a8f; --prefill: #94a3b8; --draft: #f5a623; --verify: #2bb8a6; --accept: #9a9af5;
  --compact: #ef7db8; --other: #64748b; }
.dark { --color-accent: #2bb8a6; }
.sd, .sd * { box-sizing: border-box; }
.sd { color: var(--body-text-color); font-size: 14px; line-height: 1.5; }
.sd h2 { font-size: 18px; font-weight: 600; margin: 0 0 4px; color: var(--body-text-color); }
.sd-head h1 { font-size: clamp(21px, 5vw, 26px); font-weight: 700; margin: 0 0 4px; }
.gradio-container .sd-head p { margin: 0; max-width: 78ch; color: var(--muted); }
#columns { flex-wrap: wrap; } #columns > * { flex: 1 1 260px; min-width: min(100%, 260px) !important; }
#columns > *, #columns > * > * { padding: 0; }
#columns .html-container, #columns .html-container > div, #columns .sd { height: 100%; }
#status:not(:has(.sd)), #columns:not(:has(.sd)), #summary:not(:has(.sd)) { display: none; }
@media (max-width: 480px) { .tab-container button { padding-inline: 7px; font-size: 13px; } }
.sd-card { border: 1px solid var(--border-color-primary); border-radius: 10px; padding: 14px;
  background: var(--background-fill-primary); min-height: 150px; height: 100%; }
.sd-card header { display: flex; justify-content: space-between; align-items: baseline; gap: 8px; flex-wrap: wrap; }
.sd-card h3, .sd h4 { margin: 0; font-weight: 600; color: var(--body-text-color); }
.sd-card h3 { font-size: 16px; overflow-wrap: anywhere; }
.sd h4 { font-size: 13px; margin: 14px 0 6px; }
.sd-state { font-size: 12px; color: var(--muted); }
.sd-facts { display: grid; grid-template-columns: repeat(3, 1fr); gap: 6px; margin: 10px 0; }
.sd-facts div { display: flex; flex-direction: column-reverse; }
.sd-facts dd { margin: 0; font-size: 19px; font-weight: 650; font-variant-numeric: tabular-nums; }
.sd-facts dt { font-size: 12px; color: var(--muted); }
.sd-badge { display: block; padding: 4px 9px; border-radius: 6px; border: 1px solid currentColor; font-size: 13px;
  margin: 8px 0; color: var(--muted); }
.sd-badge.same { color: var(--accent); font-weight: 600; } .sd-badge.near { color: var(--near); }
.sd-badge.differs, .sd-error { color: var(--bad); }
.sd-error { border-left: 4px solid currentColor; padding: 4px 10px; white-space: pre-line; overflow-wrap: anywhere; }
.sd-text { display: flex; flex-direction: column-reverse; max-height: 340px; overflow-y: auto; margin-top: 8px;
  border-top: 1px solid var(--border-color-primary); padding: 8px 2px 0; }
.sd-text p { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.sd mark { background: var(--drafted); color: inherit; border-bottom: 2px solid var(--accent); border-radius: 3px 3px 0 0; }
.sd p[role] { margin: 0; }
.sd-bars { display: grid; grid-template-columns: minmax(70px, max-content) 1fr max-content; gap: 5px 10px;
  align-items: center; max-width: 860px; font-variant-numeric: tabular-nums; }
.sd-bars > span:nth-child(3n+1) { max-width: min(36vw, 34ch); overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.sd-track { background: var(--background-fill-secondary); border-radius: 4px; height: 16px; }
.sd-track i { display: block; height: 100%; border-radius: 4px; background: var(--verify); min-width: 2px; }
.sd-track i.reference { background: var(--prefill); }
.sd-stages { display: flex; height: 14px; border-radius: 4px; overflow: hidden; }
.sd-stages i { display: block; }
.sd-legend { display: flex; flex-wrap: wrap; gap: 2px 14px; padding: 0; margin: 6px 0 0; list-style: none; font-size: 12px; }
.sd-legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
.sd-hist { display: flex; align-items: flex-end; gap: 3px; font-size: 11px; text-align: center; }
.sd-hist div { flex: 0 1 34px; min-width: 0; font-variant-numeric: tabular-nums; }
.sd-hist i { display: block; background: var(--verify); border-radius: 3px 3px 0 0; min-height: 1px; }
.sd-hist b { display: block; font-weight: 400; border-top: 1px solid var(--border-color-primary); }
.sd-note { font-size: 12px; color: var(--muted); margin: 8px 0 0; overflow-wrap: anywhere; }
.sd-tree { overflow: auto; max-height: 480px; border: 1px solid var(--border-color-primary); border-radius: 10px;
  padding: 8px; }
.sd-tree svg { display: block; }
.sd-tree text { font: 12px ui-monospace, monospace; fill: var(--body-text-color); }
.sd-tree rect { fill: var(--background-fill-primary); stroke: var(--muted); stroke-dasharray: 4 3; }
.sd-tree .refused text { fill: var(--muted); }
.sd-tree .accepted rect { fill: var(--drafted); stroke: var(--accent); stroke-width: 2; stroke-dasharray: none; }
.sd-tree .root rect { fill: var(--background-fill-secondary); stroke-dasharray: none; }
.sd-tree .target rect { stroke: var(--own); stroke-width: 2; stroke-dasharray: 2 2; }
.sd-tree path { fill: none; stroke: var(--muted); }
.sd-tree path.kept { stroke: var(--accent); stroke-width: 2.5; }
.sd-advice ol { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 250px), 1fr)); gap: 12px;
  list-style: none; margin: 0 0 12px; padding: 0; }
.sd-advice .sd-card { min-height: 0; } .sd-advice .sd-facts { grid-template-columns: 1fr; }
.sd-advice dd { font-size: 26px; color: var(--accent); }
.sd-advice article p { margin: 0 0 6px; }
.sd-plane { position: relative; height: min(420px, 80vw); max-width: 860px; margin: 26px 44px 24px 30px;
  border: solid var(--muted); border-width: 0 0 1px 1px; font-size: 12px; font-variant-numeric: tabular-nums; }
.sd-plane svg { position: absolute; width: 100%; height: 100%; }
.sd-plane path { fill: none; stroke: var(--other); stroke-width: 1; vector-effect: non-scaling-stroke; }
.sd-plane path.even { stroke: var(--muted); stroke-width: 2.5; }
.sd-plane path.loss { fill: var(--other); opacity: 0.18; stroke: none; }
.sd-plane > span:not([tabindex]) { position: absolute; color: var(--muted); white-space: nowrap; }
.sd-plane .side { transform: translate(6px, -50%); } .sd-plane .top { transform: translate(-50%, -120%); }
.sd-plane .y { left: 0; transform: translate(calc(-100% - 6px), -50%); }
.sd-plane .x { top: 100%; transform: translate(-50%, 4px); }
.sd-plane b { position: absolute; right: 8px; bottom: 6px; font-weight: 400; color: var(--muted); }
.sd-plane i { position: absolute; width: 22px; height: 22px; margin: -11px 0 0 -11px; border-radius: 50%; text-align: center;
  font-style: normal; line-height: 19px; border: 1.5px solid var(--muted); color: var(--body-text-color);
  background: var(--background-fill-primary); cursor: default; }
.sd-plane .needy i { border-style: dashed; }
.sd-plane .best i { background: var(--accent); border-color: var(--accent); color: var(--background-fill-primary);
  font-weight: 700; }
.sd-plane em { display: none; position: absolute; z-index: 3; left: 8px; top: 8px; max-width: 80%; padding: 5px 9px;
  font-style: normal; border-radius: 6px; color: var(--body-text-color); background: var(--background-fill-secondary);
  border: 1px solid var(--border-color-primary); overflow-wrap: anywhere; pointer-events: none; }
.sd-plane [tabindex]:hover em, .sd-plane [tabindex]:focus em { display: block; }
.sd-plane [tabindex]:hover i, .sd-plane [tabindex]:focus i { z-index: 2; outline: 3px solid var(--drafted); }
.sd-plane [tabindex] { outline: none; }
.sd-axis { text-align: right; max-width: 890px; padding-right: 44px; }
.sd-scroll { overflow-x: auto; }
.sd-scroll table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
.sd-scroll th, .sd-scroll td { padding: 5px 12px 5px 0; text-align: left; vertical-align: top; font-weight: 400;
  border-bottom: 1px solid var(--border-color-primary); }
.sd-scroll thead th { color: var(--muted); white-space: nowrap; }
.sd-scroll td:nth-child(2) { min-width: 130px; max-width: 280px; overflow-wrap: anywhere; }
.sd-scroll td:nth-child(8) { min-width: 230px; } .sd-scroll td:nth-child(9) { min-width: 130px; }
.sd-scroll .best { color: var(--accent); font-weight: 600; }
"""

LEGEND = (
    '<div class="sd"><ul class="sd-legend"><li><mark>&nbsp;word&nbsp;</mark> drafted, and accepted by the model</li>'
    "<li>unmarked: the model's own tokens</li>"
    "<li>Point at a word to see its step.</li></ul></div>"
)


def alert(message: str) -> str:
    """A message that screen readers announce."""
    return f'<div class="sd"><p class="sd-error" role="alert">{safe(message)}</p></div>'


def status(message: str) -> str:
    """What the page is doing, announced politely."""
    return f'<div class="sd"><p role="status">{safe(message)}</p></div>'


def progress(outcome: Mapping) -> str:
    """The line above the columns, of what `run_methods` yields; with a legend once there are columns."""
    if "error" in outcome:
        return alert(outcome["error"])
    if "status" in outcome:
        return status(outcome["status"])
    states = [f"{column['method']}: {column['state']}" for column in outcome["columns"]]
    return status(("Finished. " if outcome["done"] else "") + " · ".join(states)) + LEGEND


def summary(outcome: Mapping) -> str:
    """The columns' speeds as bars, with the conditions they hold under."""
    rows = []
    for column in outcome["columns"]:
        if column["tokens"]:
            words = f"{column['tokens_per_second']:.1f} tokens/s"
            words += f" · {column['speedup']:.2f}×" if column["speedup"] is not None else ""
            rows.append((column["method"], column["tokens_per_second"], words))
    note = " · ".join(f"{key} {value}" for key, value in outcome["conditions"].items())
    return bars("Tokens per second, the prompt's reading included", rows, note=f"One run: {note}")


def column(run: Mapping) -> str:
    """One method's answer, its figures and its charts.

    Args:
        run (`Mapping`): as `new_column` makes it and `decode` fills it.
    """
    parts = [f'<header><h3>{safe(run["method"])}</h3><span class="sd-state">{safe(run["state"])}</span></header>']
    if run["message"]:
        parts.append(f'<p class="sd-error" role="alert">{safe(run["message"])}</p>')
    if run["tokens"]:
        facts = {"tokens/s": f"{run['tokens_per_second']:.1f}"}
        if run["speedup"] is not None:
            facts["over plain"] = f"{run['speedup']:.2f}×"
        if run["tokens_per_step"] is not None:
            facts["tokens per step"] = f"{run['tokens_per_step']:.2f}"
        items = (f"<div><dd>{value}</dd><dt>{name}</dt></div>" for name, value in facts.items())
        parts.append(f'<dl class="sd-facts">{"".join(items)}</dl>')
    if run["badge"]:
        kind, words = run["badge"]
        parts.append(f'<span class="sd-badge {kind}">{safe(words)}</span>')
    if run["pieces"]:
        label = safe(f"answer of {run['method']}")
        text = "".join(spans(run["pieces"], colour=run["method"] != "plain"))
        parts.append(f'<div class="sd-text" tabindex="0" role="region" aria-label="{label}"><p>{text}</p></div>')
    if run["seconds"]:
        parts.append(f"<h4>Time by stage</h4>{stages(run['seconds'])}")
    if run["accepted_lengths"]:
        parts.append(f"<h4>Drafted tokens accepted in a step</h4>{histogram(run['accepted_lengths'])}")
    parts += [f'<p class="sd-note">{safe(note)}</p>' for note in run["notes"]]
    return f'<section class="sd"><article class="sd-card">{"".join(parts)}</article></section>'


def spans(pieces: Sequence[tuple[str, bool]], *, colour: bool) -> Iterator[str]:
    """The text in spans by origin; drafted tokens that were accepted together share one."""
    if not colour:
        yield safe("".join(text for text, _ in pieces))
        return
    step = 0
    for drafted, group in groupby(pieces, key=lambda piece: piece[1]):
        words = [text for text, _ in group]
        if drafted:
            title = f"step {step}: {len(words)} drafted token{'s' * (len(words) > 1)}, accepted"
            yield f'<mark title="{title}">{safe("".join(words))}</mark>'
        else:
            for word in words:
                title = f"step {step}: the model's own token" if step else "the model's own token, from the prefill"
                yield f'<span title="{title}">{safe(word)}</span>'
                step += 1


def stages(seconds: Mapping[str, float]) -> str:
    """One bar of the time by stage, with a legend that gives the figures."""
    total = sum(seconds.values()) or 1
    bar = "".join(f'<i style="width:{seconds[name] / total:.2%};background:var(--{name})"></i>' for name in STAGES)
    legend = "".join(
        f'<li><i style="background:var(--{name})"></i>{name} {seconds[name]:.2f} s ({seconds[name] / total:.0%})</li>'
        for name in STAGES
    )
    return f'<div class="sd-stages" aria-hidden="true">{bar}</div><ul class="sd-legend">{legend}</ul>'


def histogram(lengths: Sequence[int]) -> str:
    """How many steps accepted 0, 1, 2, ... drafted tokens."""
    counts = Counter(lengths)
    most = max(counts.values())
    words = ", ".join(f"{counts[length]} steps accepted {length}" for length in sorted(counts))
    bars = "".join(
        f'<div>{counts[length] or ""}<i style="height:{56 * counts[length] / most:.0f}px"></i><b>{length}</b></div>'
        for length in range(max(counts) + 1)
    )
    return f'<div class="sd-hist" role="img" aria-label="{words}">{bars}</div>'


def bars(title: str, rows: Sequence[tuple[str, float, str]], *, note: str, reference: str = "plain") -> str:
    """Labelled horizontal bars.

    Args:
        rows (`Sequence[tuple[str, float, str]]`): of each bar the label, the length and the words behind it.
        note (`str`): the conditions under which the figures were measured.
        reference (`str`): label of the bar that the others are compared with.
    """
    longest = max((value for _, value, _ in rows), default=0) or 1
    lines = ""
    for label, value, words in rows:
        kind = ' class="reference"' if label == reference else ""
        lines += (
            f'<span title="{safe(label)}">{safe(label)}</span><div class="sd-track" aria-hidden="true">'
            f'<i style="width:{value / longest:.1%}"{kind}></i></div><span>{safe(words)}</span>'
        )
    return (
        f'<section class="sd"><h4>{safe(title)}</h4><div class="sd-bars">{lines}</div>'
        f'<p class="sd-note">{safe(note)}</p></section>'
    )


def visible(word: str) -> str:
    """A token's text with its blanks made visible."""
    return word.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥") or "∅"


def safe(text: str) -> str:
    """The text as HTML, also for `gr.HTML`, whose templates would read its braces and dollars."""
    return escape(text).replace("{", "&#123;").replace("$", "&#36;")

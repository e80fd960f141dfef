"""The Space: methods side by side, live. The page only: what it shows comes from `hf_specdec` as plain values and HTML.

python app.py           # on the embedded model, as make app does
"""

import importlib.util

if importlib.util.find_spec("spaces"):  # ZeroGPU lends its GPU to decorated functions, and wants this before torch
    import spaces
else:
    spaces = None

from collections.abc import Iterator
from pathlib import Path

import gradio as gr

from hf_specdec import METHODS, advice, columns, diagrams, drawing, live, results
from hf_specdec.compare import PLAIN
from hf_specdec.prompts import KINDS, PROMPTS

RESULTS = Path(__file__).parent / "eval" / "results"
MAX_METHODS, MAX_PROMPT = 3, 20_000
MAX_WAITING = 16  # runs in the queue, of all visitors
INTRODUCTION = """<header class="sd sd-head"><h1>Speculative decoding, side by side</h1>
<p>Each method drafts tokens, and the model checks a whole draft in one forward. The text stays the model's own, only the
time changes. Columns run <strong>one after the other</strong>: they share this machine, and a race at the same time would
lie.</p></header>"""
FORMULA = """<div class="sd"><h2>Which method for me?</h2><p>A method pays when a step writes more tokens than it costs:
<strong>speed-up = tokens per step / (verification + draft)</strong>, both costs in steps of plain decoding. How many tokens
a step writes depends on the text, what it costs on the model and the machine; both were measured.</p></div>"""
QUIET = {"queue": False, "show_progress": "hidden"}

decode_all = spaces.GPU(duration=120)(live.decode_all) if spaces else live.decode_all


def html(value: str = "", **options) -> gr.HTML:
    """A place for HTML of ours, styled by `drawing.STYLE` alone."""
    return gr.HTML(value, apply_default_css=False, **options)


# Side by side


def begin(run: str | None) -> tuple[str, str]:
    """Ends the session's run, if there is one, and opens the next, which `stop` can end."""
    live.stop_run(run)
    return live.start_run(), drawing.status("Waiting for its turn: runs go one after the other …")


def stop(run: str | None) -> str:
    """Ends the session's run within a step."""
    if not (run and live.goes_on(run)):
        return drawing.status("Nothing is running.")
    live.stop_run(run)
    return drawing.status("Stopping …")


def refused(run: str | None) -> str:
    """What to say when a run could not be queued."""
    live.stop_run(run)
    return drawing.alert(
        f"This run was not taken: {MAX_WAITING} wait already, or a field is empty. Try again in a minute."
    )


def race(
    prompt: str,
    model: str,
    dtype: str,
    methods: int,
    method_1: str,
    drafter_1: str | None,
    options_1: str,
    method_2: str,
    drafter_2: str | None,
    options_2: str,
    method_3: str,
    drafter_3: str | None,
    options_3: str,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    follow_up: bool,
    history: list[dict],
    run: str | None,
) -> Iterator[tuple]:
    """Runs plain decoding and then each method; yields status, columns, summary, figures, steps, history and chat."""
    choices = [
        (method_1, drafter_1, options_1),
        (method_2, drafter_2, options_2),
        (method_3, drafter_3, options_3),
    ][: int(methods)]
    specs = [PLAIN, *(columns.spec_of(*choice) for choice in choices)]
    settings = live.settings_of(model, dtype, max_new_tokens, temperature, seed)
    history = history if follow_up else []
    empty = [gr.HTML("", visible=i < len(specs)) for i in range(MAX_METHODS + 1)]
    yield drawing.status("Waiting …"), *empty, "", {}, [], gr.skip(), gr.skip()
    shown, outcome = [""] * (MAX_METHODS + 1), {}
    runs = live.run_methods(prompt, specs, settings, history=history, run=run, decode_all=decode_all)
    try:
        for outcome in runs:
            now = [drawing.column(column) for column in outcome.get("columns", [])]
            now += [""] * (MAX_METHODS + 1 - len(now))
            changed = [gr.skip() if old == new else new for old, new in zip(shown, now, strict=True)]
            shown = now
            yield drawing.progress(outcome), *changed, *[gr.skip()] * 5
    finally:  # a closed tab closes this generator
        runs.close()
    if "columns" in outcome:
        steps = [{"method": item["method"], "steps": item["steps"]} for item in outcome["columns"] if item["steps"]]
        report = {**outcome, "columns": [columns.figures_of(column) for column in outcome["columns"]]}
        answer = report["columns"][0]["text"]
        if answer:
            history = [*history, {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        unchanged = [gr.skip()] * (MAX_METHODS + 1)
        yield drawing.progress(outcome), *unchanged, drawing.summary(outcome), report, steps, history, history


def compare(
    prompt: str,
    methods: list[str],
    model: str = "embedded",
    dtype: str = "auto",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[dict]:
    """Runs plain decoding and then up to three methods (name[:drafter][?option=value&...]); yields their state so far."""
    settings = live.settings_of(model, dtype, min(max_new_tokens, 1024), temperature, seed)
    specs = [PLAIN, *methods[:MAX_METHODS]]
    for outcome in live.run_methods(prompt[:MAX_PROMPT], specs, settings, decode_all=decode_all):
        yield {**outcome, "columns": [columns.figures_of(column) for column in outcome.get("columns", [])]}


def describe(method: str) -> tuple[gr.Dropdown, gr.Textbox]:
    """The fields for the drafter and the options, fitted to a method."""
    takes, offered = METHODS[method].drafter_argument, columns.drafters(method, live.MODELS)
    chosen = "" if METHODS[method].drafter_optional or not offered else offered[0]
    return (
        gr.Dropdown(offered, value=chosen, visible=bool(takes), info=takes, allow_custom_value=True),
        gr.Textbox("", info=columns.known_options(method)),
    )


def offer_steps(steps: list[dict]) -> tuple:
    """Opens the step view at the first method's fullest acceptance."""
    names = [f"{i + 1}. {item['method']}" for i, item in enumerate(steps)]
    return gr.Column(visible=bool(steps)), gr.Radio(choices=names, value=names[0] if names else None)


def fullest_step(steps: list[dict], which: str | None) -> tuple[dict, str]:
    """The step slider for a method, set to the step that accepted most, and that step's drawing."""
    if not (steps and which):
        return gr.skip(), ""
    own = steps[int(which.split(".")[0]) - 1]["steps"]
    best = max(range(len(own)), key=lambda i: len(own[i]["accepted"])) + 1
    return gr.Slider(maximum=max(2, len(own)), value=best), draw_step(steps, which, best)


def draw_step(steps: list[dict], which: str | None, number: float) -> str:
    """One verification: the draft tree with its accepted nodes."""
    if not (steps and which):
        return ""
    own = steps[int(which.split(".")[0]) - 1]["steps"]
    return diagrams.tree(own[min(int(number), len(own)) - 1])


# Results


def read_results(source: str) -> tuple[list[dict], str]:
    """Rows of all reports in a results dataset, or beside this page, and a message."""
    place = (source or "").strip() or "eval/results"
    try:
        rows = results.read_dataset(place) if source else results.read_folder(RESULTS)
    except Exception as error:
        return [], drawing.alert(f"Cannot read {place}: {str(error).strip().splitlines()[0]}")
    return rows, drawing.status(f"{len(rows)} rows from {place}" if rows else f"There are no results in {place} yet.")


def filter_choices(rows: list[dict]) -> list[gr.Dropdown]:
    """What each filter offers for these rows."""
    return [gr.Dropdown(choices=values, value=[]) for values in results.choices(rows)]


def show_results(rows: list[dict], *chosen: list[str]) -> tuple[str, list[list]]:
    """Charts and table of the rows that pass the filters."""
    rows = results.select(rows, dict(zip(results.FILTERS, chosen, strict=True)))
    return results.charts(rows), results.table(rows)


# Which method for me


def offer_runs(rows: list[dict]) -> gr.Dropdown:
    """The measured runs to choose from."""
    names = [(label, name) for name, label in advice.runs(rows).items()]
    return gr.Dropdown(names, value=names[0][1] if names else None)


def choose_run(rows: list[dict], run: str | None, task: str, at_hand: list[str]) -> tuple[float, gr.Slider, str]:
    """The costs as this run measured them, and the advice for it."""
    block = next((row["block_16"] for row in rows if row["report"] == run), None)
    return 1, gr.Slider(value=round(block or 1, 2), visible=block is not None), show_advice(rows, run, task, at_hand)


def show_advice(
    rows: list[dict], run: str | None, task: str, at_hand: list[str], draft_scale: float = 1, block_16: float = 0
) -> str:
    """What to take and why, and where every method stands."""
    found = advice.estimates(rows, run=run, task=task, draft_scale=draft_scale, block_16=block_16)
    if not found:
        return drawing.status("Nothing was measured on this: choose another run or text, or read other results.")
    return diagrams.advice(found, *advice.recommend(found, at_hand=at_hand))


def advise(
    task: str = results.OVERALL,
    at_hand: list[str] | None = None,
    run: str | None = None,
    draft_scale: float = 1.0,
    block_16: float = 0.0,
) -> dict:
    """The methods to take for a Spec-Bench task, of those whose drafter is at hand, from the results of this page."""
    rows = results.read_folder(RESULTS)
    return advice.advise(rows, task=task, at_hand=at_hand, run=run, draft_scale=draft_scale, block_16=block_16)


# The page


def method_fields(number: int, method: str) -> tuple:
    """The column of fields for one method: the column, then its fields."""
    with gr.Column(min_width=260, visible=number < 3) as box:
        chosen = gr.Dropdown(list(METHODS), value=method, label=f"Method {number}", elem_id=f"method-{number}")
        drafter = gr.Dropdown(value="", label=f"Drafter {number}", allow_custom_value=True, visible=False)
        with gr.Accordion(f"Options of method {number}", open=False):
            known = columns.known_options(method)
            options = gr.Textbox(label=f"Options {number}", max_length=200, value="", info=known)
        chosen.change(describe, chosen, [drafter, options], api_name=f"describe_{number}", queue=False)
    return box, chosen, drafter, options


def side_by_side() -> None:
    """The first tab."""
    run, history, steps = gr.State(None), gr.State([]), gr.State([])
    with gr.Row():
        with gr.Column(scale=3, min_width=320):
            prompt = gr.Textbox(label="Prompt", lines=5, max_lines=10, max_length=MAX_PROMPT, elem_id="prompt")
            names = [kind.upper() if len(kind) < 4 else kind.replace("_", " ").capitalize() for kind in KINDS]
            texts = [[item.text] for item in PROMPTS[::2]]
            gr.Examples(texts, prompt, label="Examples, one for each kind of Spec-Bench", example_labels=names)
            follow_up = gr.Checkbox(label="Follow up: the prompt continues the conversation below")
        with gr.Column(scale=2, min_width=300):
            model = gr.Dropdown(live.MODELS, label="Model", info="from the list, or a Hub id", allow_custom_value=True)
            with gr.Row():
                dtype = gr.Dropdown(["auto", "float32", "bfloat16"], label="Precision", min_width=130)
                seed = gr.Number(0, label="Seed", precision=0, minimum=0, min_width=110)
            max_new_tokens = gr.Slider(8, 1024, 128, step=8, label="New tokens, at most")
            temperature = gr.Slider(0, 2, 0, step=0.1, label="Temperature (0 is greedy)")
    count = gr.Radio([1, 2, 3], value=2, label="Methods beside plain decoding")
    with gr.Row():
        choices = [method_fields(i, name) for i, name in enumerate(("pld", "recycling", "sam"), start=1)]
    with gr.Row():
        run_button = gr.Button("Run", variant="primary", elem_id="run", scale=3, min_width=200)
        stop_button = gr.Button("Stop", variant="stop", elem_id="stop", min_width=120)
        new_button = gr.Button("New chat", elem_id="new", min_width=120)
    status = html(elem_id="status")
    with gr.Row(equal_height=True, elem_id="columns"):
        cards = [html(elem_id=f"column-{i}", min_width=260, visible=i < 3) for i in range(MAX_METHODS + 1)]
    chart = html(elem_id="summary")
    with gr.Column(visible=False, elem_id="steps") as step_view:
        which = gr.Radio([], label="Step through the verifications of", elem_id="which")
        number = gr.Slider(1, 2, 1, step=1, label="Verification", elem_id="step")
        with gr.Row():
            back = gr.Button("Previous step", size="sm", min_width=120)
            forward = gr.Button("Next step", size="sm", min_width=120)
        tree = html(elem_id="tree")
    with gr.Accordion("Conversation", open=False):
        chat = gr.Chatbot(label="Conversation, as plain decoding wrote it", height=320)
    with gr.Accordion("Figures as JSON", open=False):
        figures = gr.JSON(label="Figures of all columns", elem_id="figures")

    boxes = [box for box, *_ in choices]
    show_boxes = lambda n: [gr.Column(visible=i < n) for i in range(MAX_METHODS)]  # noqa: E731
    count.change(show_boxes, count, boxes, api_name="count", queue=False)
    fields = [field for _, *column in choices for field in column]
    inputs = [prompt, model, dtype, count, *fields, max_new_tokens, temperature, seed, follow_up, history, run]
    outputs = [status, *cards, chart, figures, steps, history, chat]
    clicked = gr.on([run_button.click, prompt.submit], begin, run, [run, status], api_name="begin", **QUIET)
    turn = {"concurrency_id": "machine", "concurrency_limit": 1}
    raced = clicked.then(
        race, inputs, outputs, api_name="race", trigger_mode="multiple", show_progress="hidden", **turn
    )
    gr.api(compare, api_name="compare", **turn)
    raced.failure(refused, run, status, api_name="refused", **QUIET)
    stop_button.click(stop, run, status, api_name="stop", **QUIET)
    new_button.click(lambda: ([], []), None, [history, chat], api_name="new_conversation", queue=False)
    offered = raced.success(offer_steps, steps, [step_view, which], api_name="offer_steps", **QUIET)
    offered.then(fullest_step, [steps, which], [number, tree], api_name="fullest_step", **QUIET)
    which.input(fullest_step, [steps, which], [number, tree], api_name="choose_steps", **QUIET)
    number.change(draw_step, [steps, which, number], tree, api_name="draw_step", **QUIET)
    back.click(lambda n: max(1, n - 1), number, number, api_name="previous_step", **QUIET)
    forward.click(lambda n: n + 1, number, number, api_name="next_step", **QUIET)


def results_tab(rows: gr.State) -> gr.events.Dependency:
    """The second tab; returns the event after which there are rows."""
    with gr.Row(equal_height=True):
        about = "owner/name; empty for the results of this page"
        source = gr.Textbox(label="Results dataset on the Hub", placeholder=about, min_width=260, scale=4)
        read = gr.Button("Read results", min_width=140)
    message = html(elem_id="results-status")
    with gr.Row():
        filters = [
            gr.Dropdown([], label=name.capitalize(), multiselect=True, min_width=200) for name in results.FILTERS
        ]
    charts = html(elem_id="results-charts")
    widths = [230, 130, 90, 110, 90, 330, 100, 180, 140]
    headers = list(results.COLUMNS.values())
    table = gr.Dataframe(headers=headers, label="Results", interactive=False, wrap=True, column_widths=widths)
    read_when = [demo.load, read.click]
    loaded = gr.on(read_when, read_results, source, [rows, message], api_name="read_results", queue=False)
    offered = loaded.then(filter_choices, rows, filters, api_name="filter_choices", **QUIET)
    offered.then(show_results, [rows, *filters], [charts, table], api_name="show_results", **QUIET)
    for item in filters:
        name = f"filter_{item.label.lower()}"
        item.input(show_results, [rows, *filters], [charts, table], api_name=name, **QUIET)
    return loaded


def advice_tab(rows: gr.State, loaded: gr.events.Dependency) -> None:
    """The third tab."""
    html(FORMULA)
    with gr.Row():
        run = gr.Dropdown([], label="Measured on", info="the run nearest to your model and machine", scale=2)
        tasks = [(label, task) for task, label in advice.WORKLOADS.items()]
        task = gr.Dropdown(tasks, label="What is written", info="does the answer repeat its prompt?", min_width=300)
    takes = [(f"{what} ({name})", name) for name, what in advice.drafters_needed().items()]
    at_hand = gr.CheckboxGroup(takes, label="At hand for your model, or worth making", elem_id="at-hand")
    with gr.Accordion("What if your machine differs?", open=False):
        about = "0.25: a model four times slower, drafted for as fast as here"
        draft_scale = gr.Slider(0.05, 4, 1, step=0.05, label="A draft costs, times what was measured", info=about)
        about = "hf-specdec bench --verify-curve measures yours"
        block_16 = gr.Slider(1, 8, 1, step=0.01, label="A block of 16 tokens costs, in single ones", info=about)
    view = html(elem_id="advice")
    asked = [rows, run, task, at_hand]
    chosen = loaded.then(offer_runs, rows, run, api_name="offer_runs", **QUIET)
    shown = [draft_scale, block_16, view]
    chosen.then(choose_run, asked, shown, api_name="first_run", **QUIET)
    run.input(choose_run, asked, shown, api_name="choose_run", **QUIET)
    for name, item in {"task": task, "at_hand": at_hand, "draft_scale": draft_scale, "block_16": block_16}.items():
        item.input(show_advice, [*asked, draft_scale, block_16], view, api_name=f"advice_{name}", **QUIET)
    gr.api(advise, api_name="advise")


with gr.Blocks(title="Speculative decoding, side by side", analytics_enabled=False) as demo:
    measured = gr.State([])
    html(INTRODUCTION)
    with gr.Tab("Side by side"):
        side_by_side()
    with gr.Tab("Results"):
        loaded = results_tab(measured)
    with gr.Tab("Which method?"):
        advice_tab(measured, loaded)

demo.queue(max_size=MAX_WAITING, default_concurrency_limit=1)


def launch(**options) -> tuple:
    """Starts the page; `options` are those of `Blocks.launch`."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # none from the network
    theme = gr.themes.Default(primary_hue="teal", neutral_hue="slate", **fonts).set(
        color_accent="#0d8a7d",  # as in `drawing.STYLE`: teal that can be read on white
        button_primary_background_fill="#0b6b5f",
        button_primary_background_fill_hover="#0d8a7d",
        button_cancel_background_fill="#b42318",
    )
    return demo.launch(theme=theme, css=drawing.STYLE, footer_links=["api"], ssr_mode=False, **options)


if __name__ == "__main__":
    launch()

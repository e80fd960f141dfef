"""The Space: methods side by side, live. The page only: what it shows comes from `hf_specdec.live` as plain dicts.

python app.py           # on the embedded model, as make app does
"""

import importlib.util

if importlib.util.find_spec("spaces"):  # ZeroGPU lends its GPU to decorated functions, and wants this before torch
    import spaces
else:
    spaces = None

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import gradio as gr

from hf_specdec import METHODS, drawing, live, results
from hf_specdec.compare import PLAIN
from hf_specdec.prompts import KINDS, PROMPTS

RESULTS = Path(__file__).parent / "eval" / "results"
MAX_METHODS, MAX_PROMPT = 3, 20_000
INTRODUCTION = """<header class="sd-head"><h1>Speculative decoding, side by side</h1>
<p>Each method drafts tokens, and the model checks a whole draft in one forward. The text stays the model's own, only the
time changes. Columns run <strong>one after the other</strong>: they share this machine, and a race at the same time would
lie.</p></header>"""

decode_all = spaces.GPU(duration=120)(live.decode_all) if spaces else live.decode_all


# Side by side


def begin(run: str | None) -> str:
    """Ends the session's run, if there is one, and opens the next, which `stop` can end."""
    live.stop_run(run)
    return live.start_run()


def stop(run: str | None) -> str:
    """Ends the session's run within a step."""
    if not (run and live.goes_on(run)):
        return drawing.status("Nothing is running.")
    live.stop_run(run)
    return drawing.status("Stopping …")


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
    specs = [PLAIN, *(spec_of(*choice) for choice in choices)]
    settings = settings_of(model, dtype, max_new_tokens, temperature, seed)
    history = history if follow_up else []
    empty = [gr.HTML("", visible=i < len(specs)) for i in range(MAX_METHODS + 1)]
    yield drawing.status("Waiting …"), *empty, "", {}, [], gr.skip(), gr.skip()
    shown, outcome = [""] * (MAX_METHODS + 1), {}
    runs = live.run_methods(prompt, specs, settings, history=history, run=run, decode_all=decode_all)
    try:
        for outcome in runs:
            now = [drawing.column(column) for column in outcome.get("columns", [])]
            now += [""] * (MAX_METHODS + 1 - len(now))
            columns = [gr.skip() if old == new else new for old, new in zip(shown, now, strict=True)]
            shown = now
            yield say(outcome), *columns, *[gr.skip()] * 5
    finally:  # a closed tab closes this generator
        runs.close()
    if "columns" in outcome:
        steps = [
            {name: column[name] for name in ("method", "steps")} for column in outcome["columns"] if column["steps"]
        ]
        report = {**outcome, "columns": [figures_of(column) for column in outcome["columns"]]}
        answer = report["columns"][0]["text"]
        if answer:
            history = [*history, {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        columns = [gr.skip()] * (MAX_METHODS + 1)
        yield say(outcome), *columns, summary(outcome), report, steps, history, history


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
    settings = settings_of(model, dtype, min(max_new_tokens, 1024), temperature, seed)
    specs = [PLAIN, *methods[:MAX_METHODS]]
    for outcome in live.run_methods(prompt[:MAX_PROMPT], specs, settings, decode_all=decode_all):
        yield {**outcome, "columns": [figures_of(column) for column in outcome.get("columns", [])]}


def figures_of(column: dict) -> dict:
    """A column as JSON for people: its text whole, without the trees."""
    text = "".join(text for text, _ in column["pieces"])
    return {"text": text} | {name: value for name, value in column.items() if name not in ("pieces", "steps")}


def settings_of(model: str, dtype: str, max_new_tokens: float, temperature: float, seed: float) -> dict:
    return {
        "model": (model or "").strip(),
        "dtype": dtype,
        "max_new_tokens": int(max_new_tokens),
        "temperature": float(temperature),
        "seed": int(seed or 0),
    }


def spec_of(method: str, drafter: str | None, options: str) -> str:
    """A column's choices in one line, as the command line and `make_generator` take them."""
    drafter = (drafter or "").strip() if METHODS[method].drafter_argument else ""
    options = "".join((options or "").split())
    return method + (f":{drafter}" if drafter else "") + (f"?{options}" if options else "")


def say(outcome: dict) -> str:
    """The line above the columns."""
    if "error" in outcome:
        return drawing.alert(outcome["error"])
    if "status" in outcome:
        return drawing.status(outcome["status"])
    states = [f"{column['method']}: {column['state']}" for column in outcome["columns"]]
    return drawing.status(("Finished. " if outcome["done"] else "") + " · ".join(states))


def summary(outcome: dict) -> str:
    """The columns' speeds as bars, with the conditions they hold under."""
    rows = [
        (
            column["method"],
            column["tokens_per_second"],
            f"{column['tokens_per_second']:.1f} tokens/s"
            + (f" · {column['speedup']:.2f}×" if column["speedup"] is not None else ""),
        )
        for column in outcome["columns"]
        if column["tokens"]
    ]
    note = " · ".join(f"{key} {value}" for key, value in outcome["conditions"].items())
    return drawing.bars("Tokens per second, the prompt's reading included", rows, note=f"One run: {note}")


def known_options(method: str) -> str:
    """The options of a method and their defaults, as an options field takes them."""
    parameters = inspect.signature(METHODS[method]).parameters.values()
    known = [f"{item.name}={json.dumps(item.default)}" for item in parameters if item.kind is item.KEYWORD_ONLY]
    return f"Joined by &. Defaults: {', '.join(known)}" if known else "This method has none."


def describe(method: str) -> tuple[gr.Dropdown, gr.Textbox]:
    """The fields for the drafter and the options, fitted to a method."""
    takes = METHODS[method].drafter_argument
    models = live.MODELS if "model" in (takes or "") else []
    return gr.Dropdown(models, value="", visible=bool(takes), info=takes), gr.Textbox(
        info=known_options(method), value=""
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
    return drawing.tree(own[min(int(number), len(own)) - 1])


def move(number: float, by: int) -> float:
    return max(1, number + by)


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
    return [gr.Dropdown(choices=sorted({str(row[name]) for row in rows}), value=[]) for name in results.FILTERS]


def show_results(rows: list[dict], *chosen: list[str]) -> tuple[str, list[list]]:
    """Charts and table of the rows that pass the filters."""
    rows = results.select(rows, dict(zip(results.FILTERS, chosen, strict=True)))
    return results.charts(rows), results.table(rows)


# The page

with gr.Blocks(title="Speculative decoding, side by side", analytics_enabled=False) as demo:
    gr.HTML(INTRODUCTION, apply_default_css=False)
    with gr.Tab("Side by side"):
        run, history, steps = gr.State(None), gr.State([]), gr.State([])
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                prompt = gr.Textbox(label="Prompt", lines=5, max_lines=10, max_length=MAX_PROMPT, elem_id="prompt")
                gr.Examples(
                    [[item.text] for item in PROMPTS[::2]],
                    prompt,
                    label="Examples, one for each kind of Spec-Bench",
                    example_labels=[
                        kind.upper() if len(kind) < 4 else kind.replace("_", " ").capitalize() for kind in KINDS
                    ],
                )
                follow_up = gr.Checkbox(label="Follow up: the prompt continues the conversation below")
            with gr.Column(scale=2, min_width=300):
                model = gr.Dropdown(
                    live.MODELS, label="Model", info="from the list, or a Hub id", allow_custom_value=True
                )
                with gr.Row():
                    dtype = gr.Dropdown(["auto", "float32", "bfloat16"], label="Precision", min_width=130)
                    seed = gr.Number(0, label="Seed", precision=0, minimum=0, min_width=110)
                max_new_tokens = gr.Slider(8, 1024, 128, step=8, label="New tokens, at most")
                temperature = gr.Slider(0, 2, 0, step=0.1, label="Temperature (0 is greedy)")
        count = gr.Radio([1, 2, 3], value=2, label="Methods beside plain decoding")
        choices = []
        with gr.Row():
            for number, default in enumerate(("pld", "recycling", "sam"), start=1):
                with gr.Column(min_width=260, visible=number < 3) as box:
                    method = gr.Dropdown(
                        list(METHODS), value=default, label=f"Method {number}", elem_id=f"method-{number}"
                    )
                    drafter = gr.Dropdown(
                        live.MODELS, value="", label=f"Drafter {number}", allow_custom_value=True, visible=False
                    )
                    with gr.Accordion(f"Options of method {number}", open=False):
                        options = gr.Textbox(
                            label=f"Options {number}", max_length=200, value="", info=known_options(default)
                        )
                    method.change(describe, method, [drafter, options], api_name=f"describe_{number}", queue=False)
                    choices.append((box, method, drafter, options))
        with gr.Row():
            run_button = gr.Button("Run", variant="primary", elem_id="run")
            stop_button = gr.Button("Stop", variant="stop", elem_id="stop")
            new_button = gr.Button("New conversation", elem_id="new")
        status = gr.HTML(elem_id="status", apply_default_css=False)
        gr.HTML(drawing.LEGEND, apply_default_css=False)
        with gr.Row(equal_height=True, elem_id="columns"):
            columns = [
                gr.HTML(elem_id=f"column-{i}", min_width=260, visible=i < 3, apply_default_css=False)
                for i in range(MAX_METHODS + 1)
            ]
        chart = gr.HTML(elem_id="summary", apply_default_css=False)
        with gr.Column(visible=False, elem_id="steps") as step_view:
            which = gr.Radio([], label="Step through the verifications of", elem_id="which")
            with gr.Row():
                back = gr.Button("Previous step", size="sm", min_width=120)
                number = gr.Slider(1, 2, 1, step=1, label="Verification", elem_id="step", scale=4, min_width=260)
                forward = gr.Button("Next step", size="sm", min_width=120)
            tree = gr.HTML(elem_id="tree", apply_default_css=False)
        with gr.Accordion("Conversation", open=False):
            chat = gr.Chatbot(label="Conversation, as plain decoding wrote it", height=320)
        with gr.Accordion("Figures as JSON", open=False):
            figures = gr.JSON(label="Figures of all columns", elem_id="figures")

        count.change(
            lambda n: [gr.Column(visible=i < n) for i in range(MAX_METHODS)],
            count,
            [box for box, *_ in choices],
            api_name="count",
            queue=False,
        )
        fields = [field for _, *column in choices for field in column]
        inputs = [prompt, model, dtype, count, *fields, max_new_tokens, temperature, seed, follow_up, history, run]
        outputs = [status, *columns, chart, figures, steps, history, chat]
        clicked = gr.on([run_button.click, prompt.submit], begin, run, run, api_name="begin", queue=False)
        raced = clicked.then(
            race,
            inputs,
            outputs,
            api_name="race",
            concurrency_id="machine",
            trigger_mode="multiple",
            show_progress="hidden",
        )
        stop_button.click(stop, run, status, api_name="stop", queue=False, show_progress="hidden")
        new_button.click(lambda: ([], []), None, [history, chat], api_name="new_conversation", queue=False)
        offered = raced.then(offer_steps, steps, [step_view, which], api_name="offer_steps", show_progress="hidden")
        quiet = {"queue": False, "show_progress": "hidden"}
        offered.then(fullest_step, [steps, which], [number, tree], api_name="fullest_step", **quiet)
        which.input(fullest_step, [steps, which], [number, tree], api_name="choose_steps", **quiet)
        number.change(draw_step, [steps, which, number], tree, api_name="draw_step", **quiet)
        back.click(lambda n: move(n, -1), number, number, api_name="previous_step", **quiet)
        forward.click(lambda n: move(n, 1), number, number, api_name="next_step", **quiet)
        gr.api(compare, api_name="compare", concurrency_id="machine", concurrency_limit=1)

    with gr.Tab("Results"):
        rows = gr.State([])
        with gr.Row():
            source = gr.Textbox(
                label="Results dataset on the Hub",
                placeholder="owner/name; empty for the results of this page",
                min_width=260,
                scale=4,
            )
            read = gr.Button("Read results", min_width=140)
        message = gr.HTML(elem_id="results-status", apply_default_css=False)
        with gr.Row():
            filters = [
                gr.Dropdown([], label=name.capitalize(), multiselect=True, min_width=200) for name in results.FILTERS
            ]
        charts = gr.HTML(elem_id="results-charts", apply_default_css=False)
        table = gr.Dataframe(headers=results.HEADERS, label="Results", interactive=False)
        loaded = gr.on([demo.load, read.click], read_results, source, [rows, message], api_name="read_results")
        offered = loaded.then(filter_choices, rows, filters, api_name="filter_choices")
        offered.then(show_results, [rows, *filters], [charts, table], api_name="show_results")
        for item in filters:
            item.input(show_results, [rows, *filters], [charts, table], api_name=f"filter_{item.label.lower()}")

demo.queue(max_size=16, default_concurrency_limit=1)


def launch(**options) -> tuple:
    """Starts the page; `options` are those of `Blocks.launch`."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # none from the network
    theme = gr.themes.Default(primary_hue="teal", neutral_hue="slate", **fonts)
    return demo.launch(theme=theme, css=drawing.STYLE, footer_links=["api"], ssr_mode=False, **options)


if __name__ == "__main__":
    launch()

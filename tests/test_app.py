"""The Space: what a column says is true, and nothing a visitor does harms another or the next run."""

import itertools
import json
import os
import pickle
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from hub_server import Fault
from huggingface_hub import ModelCard
from tiny import generate, tiny
from tiny_chat import tiny_tokenizer

import hf_specdec
from hf_specdec import METHODS, DraftTree, SpecGenerator, columns, diagrams

os.environ["GRADIO_ANALYTICS_ENABLED"] = "0"
sys.path.insert(0, str(Path(__file__).parent.parent))  # app.py is no part of the package
from gradio_client import Client  # noqa: E402
from gradio_client.utils import QueueError  # noqa: E402

import app  # noqa: E402
from hf_specdec import live  # noqa: E402

PROMPT = "a<b>{{7*7}}${1} a<b>{{7*7}}${1} a<b>{{7*7}}"
SETTINGS = {"model": "embedded", "dtype": "float32", "max_new_tokens": 24, "temperature": 0.0, "seed": 0}
# of gradio's own doing: its queue sets an option that pandas 3.1 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.mark.parametrize(("kind", "file"), [("model", "pytorch_model.bin"), ("dataset", "ids.bin")])
def test_a_repository_larger_than_a_visitor_may_load_is_refused_before_it_is_loaded(hub, monkeypatch, kind, file):
    hub.seed("user/large", {file: b"x" * 300}, type=kind)
    live.check_size("user/large", kind)
    monkeypatch.setattr(live, "MAX_PARAMETERS", 100)
    with pytest.raises(ValueError, match="as large as 1.5e\\+02 parameters"):
        live.check_size("user/large", kind)
    with pytest.raises(ValueError, match="as large as"):
        live.make("rest:user/large" if kind == "dataset" else "eagle:user/large", "auto")


class Broken(SpecGenerator):
    """Drafts nothing a few times, and then fails."""

    def draft(self, input_ids, *, max_depth):
        if self.stats.steps > 4:
            raise RuntimeError("the drafter broke <down>")
        return DraftTree.chain(input_ids[0, -1:].tolist(), device="cpu")


class Lossy(SpecGenerator):
    """Has the fifth drafted token accepted, whatever it is; it says that it does, or not."""

    max_nodes, honest = 2, True

    def __init__(self):
        super().__init__()
        self.lossless = not self.honest
        self.lossy_choice = lambda scores, drafted: drafted[0] if drafted and self.stats.steps == 4 else None

    def draft(self, input_ids, *, max_depth):
        return DraftTree.chain([int(input_ids[0, -1]), 3 + len(input_ids[0]) % 90], device="cpu")


class Lying(Lossy):
    honest = False


BROKEN = {"broken": Broken, "lossy": Lossy, "lying": Lying}


@pytest.fixture(scope="module")
def models():
    """Tiny models under the names that the page offers: "embedded", and "slow", which takes 20 ms for a forward."""
    slow = tiny(dtype=torch.float32, scale=4, max_position_embeddings=4096)
    slow.steps = itertools.count()

    def wait(*_) -> None:
        next(slow.steps)
        time.sleep(0.02)

    slow.register_forward_pre_hook(wait)
    return {"embedded": tiny(dtype=torch.float32, scale=4), "slow": slow}


@pytest.fixture(scope="module")
def url(models):
    """The page, served, on the tiny models."""
    stock, tokenizer = live.load, tiny_tokenizer()
    live.load = lambda name, dtype: (models[name], tokenizer) if name in models else stock(name, dtype)
    METHODS.update(BROKEN)
    _, address, _ = app.launch(prevent_thread_lock=True, quiet=True)
    yield address
    app.demo.close()
    for name in BROKEN:
        del METHODS[name]
    live.load = stock


@pytest.fixture
def client(url):
    return Client(url, verbose=False)


@pytest.fixture(scope="module")
def browser(url):
    assert CHROMIUM, "no chromium, which the tests of the Space drive: on Debian, sudo apt install chromium"
    from playwright import sync_api as playwright

    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser, url):
    """Opens the page at a width and theme; fails the test if the page logs an error."""
    pages, errors = [], []

    def open_page(width: int = 1280, theme: str = "light"):
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{url}?__theme={theme}")
        page.locator("#prompt textarea").wait_for()
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert errors == []


def compare(client: Client, prompt: str, methods: list[str], **changes) -> dict:
    settings = SETTINGS | changes
    return client.predict(prompt, methods, *settings.values(), api_name="/compare")


def fill(page, prompt: str) -> None:
    page.locator("#prompt textarea").fill(prompt)


def is_free(*, within: float) -> bool:
    """Whether no generation is running, at the latest after so many seconds."""
    free = live.one_at_a_time.acquire(timeout=within)
    if free:
        live.one_at_a_time.release()
    return free


# Through the API


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_method_shows_plain_decodings_own_text_and_true_counts(client, models, temperature):
    names = [name for name, method in METHODS.items() if not method.drafter_argument and name not in BROKEN][:3]
    report = compare(client, PROMPT, names, temperature=temperature, seed=3)
    ids = live.read_chat(tiny_tokenizer(), [{"role": "user", "content": PROMPT}], device="cpu")
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
    expected = generate(models["embedded"], ids, seed=3, **sampling)[0, ids.shape[1] :].tolist()
    assert [column["method"] for column in report["columns"]] == ["plain", *names]
    for column in report["columns"]:
        assert column["state"] == "done" and column["ids"] == expected
        assert column["text"] == tiny_tokenizer().decode(expected, skip_special_tokens=True)
    for column in report["columns"][1:]:
        assert column["badge"][0] == "same" and column["speedup"] > 0
        assert sum(column["accepted_lengths"]) + len(column["accepted_lengths"]) + 1 >= column["tokens"]
    assert report["conditions"]["dtype"] == "float32"


@pytest.mark.parametrize(
    "prompt, changes, message",
    [
        (" \n", {}, "empty"),
        ("a" * 600, {}, "more than the 512"),
        ("a", {"model": "nobody/nothing"}, "nobody/nothing"),
        ("a", {"model": "/etc"}, "no Hub id"),
    ],
)
def test_what_cannot_be_run_is_said_and_the_next_run_works(client, prompt, changes, message):
    assert message in compare(client, prompt, ["pld"], **changes)["error"]
    assert compare(client, "abc", ["pld"])["columns"][1]["state"] == "done"


@pytest.mark.parametrize(
    "spec, message",
    [
        ("broken", "the drafter broke <down>"),
        ("nothing", "unknown method"),
        ("pld?nothing=1", "no option"),
        ("pld?num_matches=100000", "below 1000"),
        ("sps:/etc", "no Hub id"),
        ("sps:nobody/nothing", "nobody/nothing"),
        ("rest:../../etc", "no Hub id"),
    ],
)
def test_a_failing_column_says_why_and_the_others_go_on(client, spec, message):
    plain, failed, other = compare(client, PROMPT, [spec, "sam"])["columns"]
    assert failed["state"] == "failed" and message in failed["message"] and failed["badge"] is None
    assert plain["state"] == other["state"] == "done" and other["badge"][0] == "same"


@pytest.mark.parametrize("method, kind", [("lossy", "near"), ("lying", "differs")])
def test_a_text_that_differs_says_where_and_by_what_margin(client, models, method, kind):
    plain, other, pld = compare(client, PROMPT, [method, "pld"])["columns"]
    index = [a == b for a, b in zip(plain["ids"], other["ids"], strict=True)].index(False)
    ids = live.read_chat(tiny_tokenizer(), [{"role": "user", "content": PROMPT}], device="cpu")
    text = torch.cat([ids, torch.tensor([plain["ids"][:index]], dtype=torch.long)], dim=-1)
    logits = models["embedded"](text).logits[0, -1].detach()
    margin = float(logits[plain["ids"][index]] - logits[other["ids"][index]])
    assert margin > 0 and pld["badge"][0] == "same"
    assert other["badge"][0] == kind
    assert f"from token {index + 1} on (margin {margin:.3g})" in other["badge"][1]
    assert ("options allow" in other["badge"][1]) == (method == "lossy")


def test_in_16_bits_a_difference_is_put_down_to_rounding():
    model, ids = tiny(dtype=torch.bfloat16), torch.tensor([[1, 5, 9]])
    plain = columns.new_column("plain") | {"state": "done", "ids": [4, 5, 6], "tokens_per_second": 1.0}
    other = plain | {"method": "pld", "ids": [4, 7, 6], "promises": True}
    columns.judge(other, plain, model, ids)
    kind, words = other["badge"]
    assert kind == "near" and "from token 2 on" in words and "in bfloat16 near-ties may flip" in words


def test_medusas_typical_acceptance_is_shown_as_another_text(client, models, tmp_path, monkeypatch):
    torch.manual_seed(0)
    METHODS["medusa"].head_class.for_target(models["embedded"]).save_pretrained(tmp_path)
    monkeypatch.setattr("hf_specdec.generator.EMBEDDED_HEADS", tmp_path.parent)
    monkeypatch.setitem(columns.SHIPPED, tmp_path.name, "medusa")
    spec = f"medusa:{tmp_path.name}?min_probability=0&lossy_typical="
    options = "true&epsilon=0.001&alpha=0.001"
    exact, lossy = compare(client, PROMPT, [f"{spec}false", f"{spec}{options}"], max_new_tokens=48)["columns"][1:]
    assert exact["badge"][0] == "same"
    assert lossy["badge"][0] == "near" and "as this method's options allow" in lossy["badge"][1]
    assert any("lossy" in note for note in lossy["notes"])


def test_every_head_that_ships_is_offered_and_named_as_a_drafter():
    for name, method in columns.SHIPPED.items():
        assert name in columns.drafters(method, live.MODELS)
        field, _ = app.describe(method)
        assert name in [value for _, value in field.choices]
        assert type(live.make(f"{method}:{name}", "float32")) is METHODS[method]
    assert not columns.drafters("pld", live.MODELS)


def test_a_drafter_that_the_hub_does_not_give_is_a_message_in_its_column(url, hub):
    hub.seed("stranger/gated", {"config.json": b"{}"}, gated=True)
    hub.faults.append(Fault("HEAD", "no/network", "drop", times=1000))
    hub.faults.append(Fault("GET", "no/network", "drop", times=1000))
    specs = ["plain", "eagle:nobody/nothing", "medusa:stranger/gated", "sps:no/network", "pld"]
    *_, outcome = live.run_methods(PROMPT, specs, SETTINGS)
    plain, *failed, pld = outcome["columns"]
    assert plain["state"] == "done" and pld["badge"][0] == "same"
    for column, repository in zip(failed, ("nobody/nothing", "stranger/gated", "no/network"), strict=True):
        assert column["state"] == "failed" and repository in column["message"], column["message"]
    *_, outcome = live.run_methods(PROMPT, ["plain"], SETTINGS | {"model": "stranger/gated"})
    assert "stranger/gated" in outcome["error"] and "gated" in outcome["error"]


def test_the_api_needs_only_a_prompt_and_methods(client):
    report = client.predict("abc", ["pld"], api_name="/compare")
    assert report["done"] and report["columns"][1]["tokens"] == 128


def test_a_drafter_from_the_list_is_accepted_whole(client):
    column = compare(client, PROMPT, ["sps:embedded?num_draft_tokens=3"])["columns"][1]
    assert column["badge"][0] == "same" and set(column["accepted_lengths"][:-1]) == {3}


def test_stop_ends_a_run_within_a_step(client):
    client.predict(api_name="/begin")
    job = client.submit("abc abc", "slow", "float32", max_new_tokens=1024, api_name="/race")
    while len(job.outputs()) < 6:
        time.sleep(0.05)
    client.predict(api_name="/stop")
    figures = job.result(timeout=30)[6]
    assert [column["state"] for column in figures["columns"]] == ["stopped"] * 3
    assert 0 < figures["columns"][0]["tokens"] < 200


def test_a_new_run_of_a_session_ends_the_one_before(client):
    client.predict(api_name="/begin")
    first = client.submit("abc abc", "slow", "float32", max_new_tokens=1024, api_name="/race")
    while len(first.outputs()) < 6:
        time.sleep(0.05)
    client.predict(api_name="/begin")
    second = client.submit("abc abc", "embedded", "float32", max_new_tokens=16, api_name="/race")
    assert first.result(timeout=30)[6]["columns"][0]["state"] == "stopped"
    assert second.result(timeout=20)[6]["columns"][1]["badge"][0] == "same"


def test_two_visitors_at_once_get_their_own_results_and_histories(url):
    clients = [Client(url, verbose=False) for _ in range(2)]
    prompts = ["first first first", "second second second"]
    jobs = [
        client.submit(prompt, "embedded", "float32", max_new_tokens=16, follow_up=True, api_name="/race")
        for client, prompt in zip(clients, prompts, strict=True)
    ]
    for client, prompt, job in zip(clients, prompts, jobs, strict=True):
        chat = job.result(timeout=30)[-1]
        again = client.submit("more", "embedded", "float32", max_new_tokens=8, follow_up=True, api_name="/race")
        assert [message["role"] for message in chat] == ["user", "assistant"] and prompt in json.dumps(chat)
        chat = again.result(timeout=30)[-1]
        assert len(chat) == 4 and prompt in json.dumps(chat[:1]) and "more" in json.dumps(chat[2])


def test_more_runs_than_may_wait_are_refused_with_a_message_and_the_others_stay(client, open_page):
    page = open_page()
    run = ("abc abc", ["pld", "sam", "recycling"], "slow", "float32", 1024)
    jobs = [client.submit(*run, api_name="/compare")]
    while len(jobs[0].outputs()) < 3:  # it has its turn, and the others wait
        time.sleep(0.05)
    jobs += [client.submit(*run, api_name="/compare") for _ in range(app.MAX_WAITING)]
    while len(app.demo._queue) < app.MAX_WAITING:
        time.sleep(0.05)
    with pytest.raises(QueueError, match="Queue is full"):
        client.predict("abc", ["pld"], api_name="/compare")
    fill(page, "abc")
    page.locator("#run").click()
    page.locator("#status [role=alert]", has_text="16 wait already").wait_for()
    assert jobs[0].status().code.name == "ITERATING"
    for job in reversed(jobs):
        job.cancel()
    assert is_free(within=20)


def test_a_closed_generator_frees_the_machine_and_all_it_yields_can_be_pickled(url):
    runs = live.run_methods("abc", ["plain", "pld"], SETTINGS | {"model": "slow", "max_new_tokens": 1000})
    for outcome in runs:
        assert pickle.loads(pickle.dumps(outcome)) == outcome
        if outcome.get("columns") and outcome["columns"][0]["tokens"]:
            break
    assert not is_free(within=0)
    runs.close()
    assert is_free(within=20)


def test_the_advice_is_there_for_programs_too(client):
    advised = client.predict("summarization", ["eagle"], api_name="/advise")
    assert advised["recommended"] and advised["measured_on"]
    best = {item["method"]: item for item in advised["methods"]}[advised["recommended"][0]]
    assert best["speedup"] == pytest.approx(best["tokens_per_step"] / (best["verify"] + best["draft"]))
    assert client.predict("no task", api_name="/advise")["methods"] == []


def test_every_action_has_an_api_name():
    names = [fn.api_name for fn in app.demo.fns.values() if fn.api_visibility != "private"]
    assert {"race", "compare", "begin", "stop", "read_results", "draw_step", "advise"} <= set(names)
    assert not [name for name in names if not name or name.startswith(("lambda", "fn"))]


# Results


def test_results_are_read_filtered_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "RESULTS", tmp_path)
    assert app.read_results("")[0] == [] and "no results" in app.read_results("")[1]
    assert "no dataset id" in app.read_results("../../etc")[1] and "Cannot read" in app.read_results("nobody/none")[1]
    rows = [
        {"model": "m", "method": name, "task": task, "speedup": speed, "tokens_per_step": 2.0}
        for name, task, speed in (("pld", "qa", 1.0), ("pld", "overall", 1.5), ("sam", "overall", 2.5))
    ]
    (tmp_path / "run").mkdir()
    report = {"conditions": {"hardware": "cpu", "dtype": "float32"}, "rows": [*rows, {"model": "m"}, 3]}
    (tmp_path / "run" / "report.json").write_text(json.dumps(report | {"rows": report["rows"][:-1]}))
    (tmp_path / "other.json").write_text("[1, 2]")
    (tmp_path / "half.json").write_text('{"rows": [')
    found, message = app.read_results("")
    assert len(found) == 3 and "3 rows" in message and found[0]["hardware"] == "cpu"
    charts, table = app.show_results(found, [], [], ["pld"], [], [])
    assert [row[0] for row in table] == ["pld", "pld"] and "1.50" in charts and "2.50" not in charts


def test_the_spaces_card_is_complete_and_pins_what_the_page_is_tested_with():
    root = Path(app.__file__).parent
    card = ModelCard((root / "hub_cards" / "space.md").read_text(encoding="utf-8"), ignore_metadata_errors=False).data
    wanted = "title emoji sdk sdk_version python_version app_file license short_description models tags"
    for name in [*wanted.split(), "suggested_hardware", "preload_from_hub"]:
        assert card.to_dict()[name], name
    assert len(card.short_description) <= 60
    assert f"gradio=={card.sdk_version}" in (root / "requirements" / "constraints.txt").read_text().split()
    assert (root / "requirements" / "space.txt").read_text() == f"hf-specdec[app]=={hf_specdec.__version__}\n"


# Drawings


def test_a_tree_marks_what_was_accepted_and_no_two_nodes_share_a_place():
    parents = [-1, 0, 1, 2, 0, 1, 5, 0, 4]
    words = ["root", "a", "b", "<script>", "d", "{{e}}", "${f}", "g", "\n"]
    picture = diagrams.tree({"words": words, "parents": parents, "accepted": [4, 8], "own": "own"})
    assert picture.count('class="accepted"') == 2 and picture.count('class="kept"') == 2
    assert picture.count('class="refused"') == 6 and picture.count('class="target"') == 1
    assert "<script>" not in picture and "{" not in picture and "$" not in picture
    columns, lines = diagrams.places(parents, first={4, 8})
    assert len(set(zip(columns, lines, strict=True))) == len(parents) and lines[4] == lines[8] == 0


# In a browser


def test_the_page_streams_three_columns_with_badges_charts_and_steps(open_page):
    page = open_page()
    fill(page, PROMPT)
    page.get_by_label("number input for New tokens, at most").fill("48")
    page.locator("#run").click()
    page.locator("#status", has_text="Finished").wait_for()
    for i in range(3):
        card = page.locator(f"#column-{i}")
        assert card.locator(".sd-text p").inner_text().strip()
    for i in (1, 2):
        assert "identical to plain decoding" in page.locator(f"#column-{i} .sd-badge").inner_text()
        assert page.locator(f"#column-{i} .sd-stages i").count() == 6
        assert page.locator(f"#column-{i} .sd-hist div").count() >= 1
    assert page.locator("#column-1 mark").first.get_attribute("title").endswith("accepted")
    assert page.locator("#summary .sd-track").count() == 3
    page.locator("#tree svg .accepted").first.wait_for()
    before = page.locator("#tree").inner_text()
    page.get_by_role("button", name="Previous step").click()
    page.wait_for_function("before => document.querySelector('#tree').innerText !== before", arg=before)
    plain, method = (page.locator(f"#column-{i} .sd-text").inner_text() for i in (0, 1))
    assert plain == method  # also where the text has braces, dollars and angles in it


def test_text_streams_stop_ends_it_and_a_bad_option_shows_in_its_column(open_page):
    page = open_page()
    page.get_by_label("Model", exact=True).fill("slow")
    fill(page, "abc abc abc")
    page.get_by_label("number input for New tokens, at most").fill("1024")
    page.locator("#run").click()
    lengths = []
    for _ in range(3):
        page.wait_for_function(
            "n => (document.querySelector('#column-0 .sd-text')?.innerText.length ?? 0) > n", arg=max([0, *lengths])
        )
        lengths.append(len(page.locator("#column-0 .sd-text").inner_text()))
    page.locator("#stop").click()
    page.locator("#column-0", has_text="stopped").wait_for()
    assert is_free(within=20)
    page.get_by_label("Model", exact=True).fill("embedded")
    page.get_by_label("number input for New tokens, at most").fill("16")
    page.get_by_role("button", name="Options of method 2").click()
    page.get_by_label("Options 2").fill("nothing=1")
    page.locator("#run").click()
    page.locator("#status", has_text="Finished").wait_for()
    assert "no option 'nothing'" in page.locator("#column-2 [role=alert]").inner_text()
    assert "identical" in page.locator("#column-1 .sd-badge").inner_text()
    fill(page, " ")
    page.locator("#run").click()
    page.locator("#status [role=alert]", has_text="empty").wait_for()


def test_a_closed_tab_ends_the_run(open_page, models):
    page = open_page()
    page.get_by_label("Model", exact=True).fill("slow")
    fill(page, "abc abc abc")
    page.get_by_label("number input for New tokens, at most").fill("1024")
    page.locator("#run").click()
    page.locator("#column-0 .sd-text").wait_for()
    steps = models["slow"].steps
    page.goto("about:blank")
    before = next(steps)
    assert is_free(within=30)
    assert next(steps) - before < 100  # of the 3,000 that the run would take


def test_two_tabs_at_once_show_each_its_own_text(open_page):
    pages, texts = [open_page(), open_page(theme="dark")], ["first first first", "second second"]
    for page, text in zip(pages, texts, strict=True):
        fill(page, text)
        page.get_by_label("number input for New tokens, at most").fill("40")
        page.locator("#run").click()
    answers = []
    for page, text in zip(pages, texts, strict=True):
        page.locator("#status", has_text="Finished").wait_for()
        answers.append(page.locator("#column-0 .sd-text").inner_text())
        page.get_by_role("button", name="Conversation").click()
        page.get_by_text(text, exact=True).last.wait_for()
        assert page.locator("#column-1 .sd-badge").inner_text().endswith("identical to plain decoding")
    assert answers[0] != answers[1]


def test_the_advice_follows_what_is_asked_and_its_points_answer_the_keyboard(open_page):
    page = open_page()
    page.get_by_role("tab", name="Which method?").click()
    view = page.locator("#advice")
    view.locator(".sd-card").first.wait_for()
    before = view.inner_text()
    page.get_by_label("What is written").click()
    page.get_by_role("option", name="Short questions").click()
    page.wait_for_function("before => document.querySelector('#advice').innerText !== before", arg=before)
    point = view.locator(".sd-plane [tabindex]").last
    point.focus()
    assert point.locator("em").is_visible() and point.get_attribute("aria-label").startswith("1. ")
    before = view.inner_text()
    page.get_by_role("button", name="What if your machine differs?").click()
    page.get_by_label("number input for A draft costs, times what was measured").fill("4")
    page.keyboard.press("Tab")
    page.wait_for_function("before => document.querySelector('#advice').innerText !== before", arg=before)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_narrow_page_fits_and_everything_has_a_label(open_page, theme):
    page = open_page(390, theme)
    fill(page, "abc abc abc")
    page.get_by_label("number input for New tokens, at most").fill("24")
    page.locator("#run").click()
    page.locator("#tree svg").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    widths = [page.locator(f"#column-{i}").bounding_box()["width"] for i in range(3)]
    assert min(widths) > 300  # one below the other
    unlabelled = page.evaluate(
        """[...document.querySelectorAll('input, textarea, button, select, svg[role=img]:not([aria-hidden])')].filter(e =>
        e.checkVisibility() && !(e.ariaLabel || e.labels?.length || e.innerText?.trim() || e.title ||
        e.getAttribute('aria-labelledby'))).map(e => e.outerHTML.slice(0, 200))"""
    )
    assert unlabelled == []
    for name in ("Results", "Which method?"):
        page.get_by_role("tab", name=name).click()
        page.locator("#results-charts .sd-bars, #advice .sd-plane").locator("visible=true").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


# On the embedded model


def test_the_embedded_model_writes_the_same_text_in_every_column(smollm, monkeypatch):
    monkeypatch.setattr(live, "load", lambda name, dtype: smollm)
    *_, outcome = live.run_methods("Count to ten: one, two,", ["plain", "pld"], SETTINGS | {"max_new_tokens": 16})
    plain, pld = outcome["columns"]
    assert pld["badge"][0] == "same" and "".join(text for text, _ in plain["pieces"]).strip()

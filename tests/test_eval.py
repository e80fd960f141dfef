"""Evaluation: what a run writes down, and that the report's figures follow from it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import Oracle, tiny
from tiny_chat import tiny_tokenizer
from typer.testing import CliRunner

from eval.__main__ import app
from eval.answers import REQUIRED, AnswerFile, read_folder
from eval.chat import Chat
from eval.questions import TASKS, Question, read_questions, select
from eval.run import Decoding, Plan, broken_promise, make_contestants, run, split_methods
from hf_specdec import METHODS
from hf_specdec.compare import PLAIN

ROOT = Path(__file__).parents[1]
METHODS_RUN = "pld,pld?num_matches=1&max_ngram=2"
TEMPLATE = "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + ' ' }}{% endfor %}a:"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    """A tiny model with a tokenizer of single characters and a chat template."""
    folder = tmp_path_factory.mktemp("tiny-chat")
    tiny(dtype=torch.float32, scale=4, eos_token_id=2).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def questions_file(tmp_path_factory) -> str:
    """Two questions of each task, MT-Bench's with two turns."""
    path = tmp_path_factory.mktemp("questions") / "question.jsonl"
    lines = []
    for i, category in enumerate(("writing", "stem", *(task for task in TASKS[1:] for _ in range(2)))):
        turns = [f"say {category} {i} now", "and again"][: 2 if i < 2 else 1]
        lines.append({"question_id": 81 + i, "category": category, "turns": turns, "reference": ["so #### 7"]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def evaluate_run(model: str, questions: str, output: Path, *more: str, methods: str = METHODS_RUN):
    """`python -m eval run`, in this process."""
    options = ["--model", model, "--questions", questions, "--output", str(output), "--dtype", "fp32"]
    options += ["--methods", methods, "--max-new-tokens", "12", "--no-verify-curve", *more]
    return CliRunner().invoke(app, ["run", *options])


@pytest.fixture(scope="module")
def answered(model_folder, questions_file, tmp_path_factory) -> Path:
    """The output of a whole run: two rounds over all questions."""
    output = tmp_path_factory.mktemp("answers")
    result = evaluate_run(model_folder, questions_file, output, "--runs", "2", "--check-lossless")
    assert result.exit_code == 0, result.output
    return output


def test_every_question_method_and_run_is_one_row(answered):
    conditions, rows, _ = read_folder(answered)
    keys = {(row["question_id"], row["method"], row["run"]) for row in rows}
    assert len(keys) == len(rows) == 12 * 3 * 2
    assert {row["task"] for row in rows} == set(TASKS)
    assert conditions["methods"] == split_methods(METHODS_RUN) and conditions["template"] == "the model's own"
    for row in rows:
        assert row["failed"] is None and row["peak_memory_bytes"] > 0
        assert len(row["turns"]) == (2 if row["task"] == "mt_bench" else 1)
        for turn in row["turns"]:
            assert 0 < turn["prefill_seconds"] < turn["seconds"]
            if row["method"] != PLAIN:
                assert turn["difference"] is None
                assert turn["stats"]["emitted"] == len(turn["tokens"])  # R81: totals tie with the ids
                assert sum(turn["stats"]["seconds"].values()) <= turn["seconds"]


def test_the_second_turn_follows_the_methods_own_first_answer(answered, model_folder):
    chat = Chat(tiny_tokenizer(), model_name="tiny")
    chat.template = TEMPLATE
    chat.source = "the model's own"
    row = next(row for row in read_folder(answered)[1] if row["question_id"] == 81)
    first = {"role": "assistant", "content": row["turns"][0]["text"]}
    messages = [{"role": "user", "content": "say writing 0 now"}, first, {"role": "user", "content": "and again"}]
    assert row["turns"][1]["prompt_tokens"] == chat.encode(messages).shape[1]


def test_methods_take_turns_to_go_first_and_an_interrupted_run_goes_on(
    answered, model_folder, questions_file, tmp_path
):
    (whole,) = answered.glob("*.jsonl")
    lines = whole.read_text().splitlines(keepends=True)
    cut = tmp_path / whole.name
    # seven questions whole, one in part, and half a line that ends inside a character
    cut.write_bytes("".join(lines[:24]).encode() + lines[24][:40].encode() + "é".encode()[:1])
    result = evaluate_run(model_folder, questions_file, tmp_path, "--runs", "2")
    assert result.exit_code == 0, result.output
    assert cut.read_text().startswith("".join(lines[:24]))  # what was answered stays as it was
    before, after = (
        {(row["question_id"], row["method"], row["run"]): [turn["tokens"] for turn in row["turns"]] for row in rows}
        for rows in (read_folder(answered)[1], read_folder(tmp_path)[1])
    )
    assert before == after


def test_other_conditions_are_refused(answered, model_folder, questions_file):
    result = evaluate_run(model_folder, questions_file, answered, "--temperature", "1")
    assert result.exit_code == 2 and "temperature: 0.0 then, 1.0 now" in " ".join(result.output.split())


def test_sampling_with_the_same_seed_is_lossless_too(model_folder, questions_file, tmp_path):
    more = ("--temperature", "1", "--limit", "1", "--check-lossless")
    result = evaluate_run(model_folder, questions_file, tmp_path, *more)
    assert result.exit_code == 0 and "lossless" in result.output, result.output


class Failing(Oracle):
    """Breaks down on one prompt."""

    def begin(self, input_ids, **call):
        super().begin(input_ids, **call)
        if input_ids.shape[1] == 8:
            raise RuntimeError("no drafts today")


def test_a_failing_question_is_recorded_and_not_averaged_in(tmp_path):
    from eval.score import Answers, score

    model = tiny(scale=4)
    model.config.max_position_embeddings = 100
    questions = [Question(i, "qa", ("x" * length,)) for i, length in enumerate((5, 6, 120))]
    file = AnswerFile(tmp_path, dict.fromkeys(REQUIRED, 1))
    contestants = {PLAIN: None, "failing": Failing([0] * 200, 2)}
    chat = Chat(tiny_tokenizer(), model_name="tiny")
    plan = Plan(model, chat, contestants, questions, file, Decoding(8), curve=False)
    rows = [row for group in run(plan) for row in group]
    failed = {(row["question_id"], row["method"]): row["failed"] for row in rows if row["failed"]}
    assert set(failed) == {(1, "failing"), (2, PLAIN), (2, "failing")}
    assert failed[1, "failing"] == "RuntimeError: no drafts today" and "context ends" in failed[2, PLAIN]
    assert file.path.read_text().count("\n") == 1 + 6
    by_method = {row["method"]: row for row in score(Answers(rows)) if row["task"] == "qa"}
    assert (by_method["failing"]["questions"], by_method["failing"]["failed"]) == (1, 2)
    assert (by_method[PLAIN]["questions"], by_method[PLAIN]["failed"]) == (2, 1)


@pytest.mark.parametrize(
    ("margin", "exact", "sampled", "broken"),
    [(0.01, True, False, True), (0.01, False, False, False), (None, False, False, True), (0.01, True, True, False)],
)
def test_a_difference_breaks_the_promise_only_where_one_was_made(margin, exact, sampled, broken):
    generator = METHODS["pld"]()
    generator.seed_exact = False  # as of drafts that are sampled
    row = {"turns": [{"difference": None}, {"difference": {"token": 3, "margin": margin}}]}
    assert bool(broken_promise(row, generator, exact=exact, sampled=sampled)) is broken


def test_a_real_difference_ends_with_exit_code_1(answered, model_folder, questions_file, tmp_path):
    (whole,) = answered.glob("*.jsonl")
    altered = whole.read_text().replace('"difference": null', '"difference": {"token": 3, "margin": 0.5}', 1)
    (tmp_path / whole.name).write_text(altered)
    arguments = (model_folder, questions_file, tmp_path, "--runs", "2")
    assert evaluate_run(*arguments).exit_code == 0
    result = evaluate_run(*arguments, "--check-lossless")
    assert result.exit_code == 1 and "NOT LOSSLESS" in result.output


def test_two_processes_share_the_questions(answered, model_folder, questions_file, tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [*launch, "-m", "eval", "run", "--model", model_folder, "--questions", questions_file, "--dtype", "fp32"]
    command += ["--output", str(tmp_path), "--methods", "pld", "--max-new-tokens", "12", "--no-verify-curve"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers-00-of-02.jsonl", "answers-01-of-02.jsonl"]
    conditions, rows, _ = read_folder(tmp_path)
    assert conditions["processes"] == 2 and {row["process"] for row in rows} == {0, 1}
    alone = {
        row["question_id"]: row["turns"][0]["tokens"] for row in read_folder(answered)[1] if row["method"] == PLAIN
    }
    shared = {row["question_id"]: row["turns"][0]["tokens"] for row in rows if row["method"] == PLAIN}
    assert shared == alone


def test_questions_are_spread_over_a_task_and_the_tasks_alternate():
    questions = [Question(i, "writing" if i < 8 else "qa", ("x",)) for i in range(12)]
    assert [question.question_id for question in select(questions, 2)] == [0, 8, 4, 10]
    assert len(select(questions, None)) == 12


def test_lines_of_a_file_end_at_line_feeds_alone(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text('{"turns": ["one\u2028two\x85three"]}\n\n{"turns": ["four"]}\n')
    assert [question.turns[0] for question in read_questions(str(path))[0]] == ["one\u2028two\x85three", "four"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no file of questions"),
        ("", "holds no question"),
        ("{nonsense\n", "line 1 is not JSON"),
        ('{"question_id": 1, "category": "qa"}\n', "has no `turns`"),
        ('{"question_id": 1, "turns": ["a"]}\n' * 2, "one question_id to several"),
    ],
)
def test_a_file_without_questions_is_a_clear_error(content, message, tmp_path):
    path = tmp_path / "question.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_questions(str(path))


def test_a_dataset_out_of_reach_is_a_clear_error():
    with pytest.raises(ValueError, match="no dataset in reach"):
        read_questions("nobody/nothing")


def test_vicuna_speaks_its_own_template():
    chat = Chat(tiny_tokenizer(), model_name="lmsys/vicuna-7b-v1.3")
    messages = [
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "B."},
        {"role": "user", "content": "C?"},
    ]
    text = chat.tokenizer.decode(chat.encode(messages)[0])
    assert text.endswith("polite answers to the user's questions. USER: A? ASSISTANT: B.</s>USER: C? ASSISTANT:")


def test_specs_with_commas_in_their_options_stay_whole():
    assert split_methods("pld,sps:a/b?x=[1,2],rest:DIR") == ["pld", "sps:a/b?x=[1,2]", "rest:DIR"]
    with pytest.raises(ValueError, match="unknown method"):
        make_contestants(["nonsense"], tiny())

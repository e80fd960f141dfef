"""Data: every layout gives the same tokens, masks cover what the model must emit, and regeneration resumes."""

import json

import pytest
import torch
from tiny import tiny
from trained import CHATML, VOCAB_SIZE, byte_tokenizer

from eval.chat import Chat
from hf_specdec.data import ChatFormat, Example, encode_records, frequent_ids, read_chats, read_records
from hf_specdec.models import VICUNA, load_tokenizer
from hf_specdec.regenerate import quoting, regenerate, write, write_own
from hf_specdec.trainer import collate

CHAT = [("user", "Hi"), ("assistant", "Hello."), ("user", "Bye?"), ("assistant", "Yes, bye.")]
MESSAGES = [{"role": role, "content": content} for role, content in CHAT]
TEMPLATES = {
    "chatml": CHATML,
    "inst": "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>"
    "{% endif %}{% endfor %}",
    # like Qwen3's: the last answer has a scaffold in front, earlier ones lose it
    "think": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think></think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "vicuna": VICUNA,
}
# like Gemma's
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
SYSTEM = {"role": "system", "content": "Be brief."}


def encode(record, tokenizer=None, max_length=1000):
    return encode_records([record], tokenizer or byte_tokenizer(), source="test", max_length=max_length)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_mask_covers_answers_with_their_ends_and_nothing_else(name):
    tokenizer = byte_tokenizer(TEMPLATES[name])
    example = encode({"messages": MESSAGES}, tokenizer).examples[0]
    trained = [token for token, mask in zip(example.input_ids, example.loss_mask, strict=True) if mask]
    expected = {
        "chatml": "Hello.<|im_end|>Yes, bye.<|im_end|>",
        "inst": " Hello.</s> Yes, bye.</s>",
        "think": "Hello.<|im_end|><think></think>\n\nYes, bye.<|im_end|>",
        "vicuna": " Hello.<|im_end|> Yes, bye.<|im_end|>",
    }
    assert tokenizer.decode(trained) == expected[name]
    assert example.prompt_ids == ChatFormat(tokenizer).encode_prompt(MESSAGES[:1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_the_same_ids_in_training_and_evaluation(name):
    tokenizer = byte_tokenizer(TEMPLATES[name])
    evaluated = Chat(tokenizer, model_name=name).encode(MESSAGES[:3])[0].tolist()
    assert ChatFormat(tokenizer).encode_prompt(MESSAGES[:3]) == evaluated


def test_every_layout_of_a_chat_gives_the_same_example():
    names = {"user": "human", "assistant": "gpt"}
    layouts = [
        {"messages": MESSAGES},
        {"conversations": [{"from": names[role], "value": content} for role, content in CHAT]},
        {"data": [content for _, content in CHAT]},
        {"conversations": [{"from": "gpt", "value": "cut"}, *({"from": r, "value": c} for r, c in CHAT)]},
    ]
    first, *others = [encode(layout).examples[0] for layout in layouts]
    assert all(other == first for other in others)
    short = {"prompt": "Hi", "answer": "Hello."}
    assert encode(short).examples == encode({"messages": MESSAGES[:2]}).examples


def test_the_embedded_template_trains_the_answer_and_its_end():
    tokenizer = load_tokenizer()
    example = encode({"prompt": "What is 2 + 2?", "answer": "It is 4."}, tokenizer).examples[0]
    assert sum(example.loss_mask) == len(tokenizer("It is 4.").input_ids) + 1
    assert example.input_ids[-1] == tokenizer.eos_token_id


def test_generated_tokens_are_kept_and_a_cut_answer_has_no_end():
    tokens = [40, 41, 42]
    whole = encode({"prompt": "Hi", "answer": "abc", "answer_tokens": tokens}).examples[0]
    cut = encode({"prompt": "Hi", "answer": "abc", "answer_tokens": tokens, "finished": False}).examples[0]
    assert whole.input_ids[-4:-1] == tokens and whole.input_ids[-1] == byte_tokenizer().eos_token_id
    assert cut.input_ids == whole.input_ids[:-1]
    given = encode({"prompt_tokens": [1, 2], "answer_tokens": [3]}).examples[0]
    assert given == Example(0, [1, 2, 3], [False, False, True])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<|im_start|>{{ m.content | upper }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{{ messages | length }}{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}",
    ],
)
def test_a_template_that_cannot_be_parsed_is_an_error(template):
    with pytest.raises(ValueError, match="cannot be parsed"):
        encode({"messages": MESSAGES}, byte_tokenizer(template))


def test_what_is_cut_or_dropped_is_counted():
    records = [
        {"prompt": "Hi", "answer": "Hello " * 20},
        {"prompt": "x" * 200, "answer": "too far"},
        {"messages": [{"role": "tool", "content": "?"}]},
        {"prompt": "Hi", "answer": " "},
        {"messages": []},
    ]
    chats = encode_records(records, byte_tokenizer(), source="test", max_length=100)
    assert len(chats.examples) == 1 and chats.truncated == 2 and sum(chats.dropped.values()) == 4
    assert f"{chats.num_trained} trained" in chats.describe() and "1 dropped (an empty answer)" in chats.describe()


@pytest.mark.parametrize(
    "lines, message",
    [
        ('{"prompt": "Hi"}', "nothing to train on .*no answer"),
        ("", "it is empty"),
        ('{"text": "Hi"}', "record 0 has the fields text"),
        ('{"prompt": "Hi", "answer": "Ho"}\n{"prom', "line 2 is not JSON"),
    ],
)
def test_bad_data_is_an_error(tmp_path, lines, message):
    (tmp_path / "data.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=message):
        read_chats(str(tmp_path / "data.jsonl"), byte_tokenizer())


def test_only_a_newline_ends_a_record(tmp_path):
    records = [{"prompt": "a\u2028b\x85c\u2029d", "answer": "é"}, {"prompt": "e", "answer": "f"}]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (tmp_path / "data.jsonl").write_text("\r\n\n".join(lines), encoding="utf-8")
    assert read_records(str(tmp_path / "data.jsonl")) == records


def test_a_plain_tokenizer_takes_prompt_and_answer():
    tokenizer = byte_tokenizer(None)
    example = encode({"prompt": "1+1=", "answer": "2"}, tokenizer).examples[0]
    assert tokenizer.decode(example.input_ids) == "1+1=2<|im_end|>" and sum(example.loss_mask) == 2


def test_batches_are_padded_on_the_right():
    batch = collate([Example(7, [1, 2, 3], [False, True, True]), Example(9, [4, 5], [False, True])])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [False, True, False]]
    assert batch["index"].tolist() == [7, 9]


def test_frequent_ids_are_those_of_answers_and_always_the_ends():
    examples = [Example(0, [9, 9, 9, 5, 5, 3, 4], [False] * 3 + [True] * 4)]
    assert frequent_ids(examples, 3, always=[2]) == [2, 3, 5]
    assert frequent_ids(examples, 100, always=[2]) == [2, 3, 4, 5]


def target():
    model = tiny(vocab_size=VOCAB_SIZE)
    model.generation_config.eos_token_id = [17, 93]
    return model


def test_regenerated_answers_are_the_targets_and_an_interrupted_run_carries_on(tmp_path):
    model, tokenizer = target(), byte_tokenizer()
    records = [{"prompt": "word " * n} for n in (3, 1, 5, 2)] + [{"messages": MESSAGES}, {"prompt": "x" * 400}]
    options = dict(batch_size=2, max_new_tokens=8, max_prompt_tokens=300)
    counts = regenerate(model, tokenizer, records, tmp_path / "whole.jsonl", **options)
    assert counts == {"written": 5, "done before": 0, "dropped (a prompt that is too long)": 1}
    rows = {row["index"]: row for row in map(json.loads, (tmp_path / "whole.jsonl").read_text().splitlines())}
    for index in range(4):
        prompt = ChatFormat(tokenizer).encode_prompt([{"role": "user", "content": records[index]["prompt"]}])
        [(tokens, finished)] = write(model, [prompt], max_new_tokens=8, temperature=0)
        answer = rows[index]["messages"][-1]
        assert (answer["tokens"], answer["finished"]) == (tokens, finished)
    text = (tmp_path / "whole.jsonl").read_bytes()
    regenerate(model, tokenizer, records[:3], tmp_path / "cut.jsonl", **options)  # a limit may grow
    (tmp_path / "cut.jsonl").write_bytes(text[: len(text) // 2] + "é".encode()[:1])
    counts = regenerate(model, tokenizer, records, tmp_path / "cut.jsonl", **options)
    assert counts["done before"] > 0 and counts["written"] + counts["done before"] == 5
    again = {row["index"]: row for row in map(json.loads, (tmp_path / "cut.jsonl").read_text().splitlines())}
    assert again == rows
    assert len(read_chats(str(tmp_path / "cut.jsonl"), tokenizer).examples) >= 4


def other_target():
    model = target()
    model.config.name_or_path = "user/other"
    return model


@pytest.mark.parametrize(
    ("model", "prompts", "options", "message"),
    [
        (other_target(), "ab", {}, "'target': '', .*not with .*'target': 'user/other'"),
        (target(), "ab", {"seed": 5}, "'seed': 0}, not with .*'seed': 5}"),
        (target(), "ab", {"temperature": 0.5}, "'temperature': 0.0, .*not with .*'temperature': 0.5"),
        (target(), "ab", {"max_new_tokens": 6}, "'max_new_tokens': 4, .*not with .*'max_new_tokens': 6"),
        (target(), "ac", {}, "its record 1 has .*'b'.*, that of the data .*'c'"),
    ],
)
def test_answers_of_another_command_are_not_mixed(tmp_path, model, prompts, options, message):
    output, tokenizer = tmp_path / "out.jsonl", byte_tokenizer()
    regenerate(target(), tokenizer, [{"prompt": "a"}, {"prompt": "b"}], output, max_new_tokens=4)
    before = output.read_bytes()
    with pytest.raises(ValueError, match=message):
        records = [{"prompt": prompt} for prompt in prompts + "d"]
        regenerate(model, tokenizer, records, output, **{"max_new_tokens": 4} | options)
    (tmp_path / "out.settings.json").unlink()
    with pytest.raises(ValueError, match="settings that no out.settings.json tells"):
        regenerate(target(), tokenizer, [{"prompt": "a"}], output, max_new_tokens=4)
    assert output.read_bytes() == before


def test_conversations_without_a_prompt_the_template_takes_are_dropped_and_counted(tmp_path):
    tokenizer = byte_tokenizer(NO_SYSTEM)
    records = [{"messages": [SYSTEM, *MESSAGES]}, {"messages": []}, {"messages": MESSAGES[:2]}]
    refused = "dropped (refused by the chat template: no system role)"
    for done in (0, 1):
        counts = regenerate(target(), tokenizer, records, tmp_path / "out.jsonl", max_new_tokens=4)
        assert counts == {"written": 1 - done, "done before": done, refused: 1, "dropped (no messages)": 1}
    assert [row["index"] for row in read_records(str(tmp_path / "out.jsonl"))] == [2]
    chats = encode_records(records, tokenizer, source="test", max_length=1000)
    assert [example.index for example in chats.examples] == [2]
    assert chats.dropped == {"refused by the chat template: no system role": 1, "no messages": 1}


def test_quoting_puts_other_prompts_before_each_ones_own():
    records = [{"prompt": f"question {i}"} for i in range(6)] + [{"prompt": " "}]
    quoted = [record["messages"][-1]["content"].split("\n\n") for record in quoting(records, 2, seed=1)]
    assert [parts[-1] for parts in quoted] == [f"question {i}" for i in range(6)]
    assert all(len(parts) == 3 and set(parts) <= {f"question {i}" for i in range(6)} for parts in quoted)
    assert len({tuple(parts[:-1]) for parts in quoted}) > 1
    assert quoting(records, 2, seed=1) == quoting(records, 2, seed=1)


def test_the_target_writes_its_own_prompts_from_the_bare_user_header(tmp_path):
    model, tokenizer = target(), byte_tokenizer()
    counts = write_own(model, tokenizer, tmp_path / "own.jsonl", num_prompts=5, batch_size=3, max_new_tokens=6)
    prompts = [json.loads(line) for line in (tmp_path / "own.prompts.jsonl").read_text().splitlines()]
    assert [prompt["index"] for prompt in prompts] == list(range(5))
    assert sum(counts.values()) == 5
    again = write_own(model, tokenizer, tmp_path / "own.jsonl", num_prompts=5, batch_size=3, max_new_tokens=6)
    assert again["written"] == 0
    with pytest.raises(ValueError, match="own.prompts.jsonl was written with .*'seed': 0}, not with .*'seed': 1}"):
        write_own(model, tokenizer, tmp_path / "own.jsonl", num_prompts=5, seed=1)
    with pytest.raises(ValueError, match="chat template"):
        write_own(model, byte_tokenizer(None), tmp_path / "none.jsonl", num_prompts=1)


def test_sampled_prompts_depend_on_the_seed_alone():
    model = target()
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(write(model, [[5, 6]] * 4, max_new_tokens=6, temperature=1.0))
    assert runs[0] == runs[1] and len({tuple(tokens) for tokens, _ in runs[0]}) > 1

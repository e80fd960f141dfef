"""Laws of the datastore: it finds what a scan of the documents finds, and never reads a file it cannot trust."""

import json
import os
from collections import Counter

import numpy as np
import pytest
from safetensors.torch import load_file
from tiny import tiny
from tiny_chat import tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval import prepare
from hf_specdec.datastore import Datastore, encode, tokenizer_hash


def build(documents, folder, *, vocab_size=9, **options):
    return Datastore.build(documents, folder, vocab_size=vocab_size, tokenizer_hash="hash", **options)


def random_documents(generator, *, alphabet, num_documents=30, max_tokens=25):
    lengths = generator.integers(0, max_tokens, num_documents)
    return [generator.choice(alphabet, length).tolist() for length in lengths]


def scan(documents, context, *, max_match=16, min_match=2, length=10):
    """Longest match and sorted continuations, by looking at every position of every document."""
    for size in range(min(max_match, len(context)), min_match - 1, -1):
        key = context[-size:]
        found = [
            document[at + size : at + size + length]
            for document in documents
            for at in range(len(document) - size)
            if document[at : at + size] == key
        ]
        if found:
            return size, sorted(found)
    return 0, []


def heaviest_paths(continuations, *, max_nodes):
    """(count, path) of the heaviest prefixes, ordered by falling count, then depth, then path."""
    counts = Counter(tuple(path[:depth]) for path in continuations for depth in range(1, len(path) + 1))
    ordered = sorted((-count, len(path), path) for path, count in counts.items())
    return [(-count, path) for count, _, path in ordered[:max_nodes]]


def paths_of(drafted):
    paths = []
    for token, parent in zip(drafted.tokens, drafted.parents, strict=True):
        assert -1 <= parent < len(paths)
        paths.append((paths[parent] if parent >= 0 else ()) + (token,))
    return list(zip(drafted.counts, paths, strict=True))


# Ids whose bytes could be mistaken for each other at the wrong alignment, in both widths.
@pytest.mark.parametrize("shard_tokens", [10**6, 60])
@pytest.mark.parametrize(
    ("vocab_size", "alphabet"), [(3, [0, 1, 2]), (65535, [0, 1, 256, 65534]), (152000, [0, 1, 256, 65536, 151000])]
)
def test_finds_what_a_scan_finds(tmp_path, vocab_size, alphabet, shard_tokens):
    generator = np.random.default_rng(0)
    for trial in range(6):
        documents = random_documents(generator, alphabet=alphabet)
        store = build(documents, tmp_path / str(trial), vocab_size=vocab_size, shard_tokens=shard_tokens)
        for max_nodes in (1, 5, 17, 1000) * 8:
            context = generator.choice(alphabet, generator.integers(0, 12)).tolist()
            match_length, expected = scan(documents, context, length=6)
            found_length, found = store.continuations(context, length=6)
            assert found_length == match_length
            assert sorted([token for token in row if token >= 0] for row in found.tolist()) == expected
            drafted = store.draft(context, length=6, max_nodes=max_nodes)
            assert paths_of(drafted) == heaviest_paths(expected, max_nodes=max_nodes)
            assert (drafted.match_length, drafted.num_continuations) == (match_length, len(expected))


def test_longest_match_wins_between_the_bounds_asked_for(tmp_path):
    store = build([[1, 2, 3, 4, 5], [3, 4, 6]], tmp_path)
    assert store.continuations([1, 2, 3, 4])[0] == 4
    assert store.draft([1, 2, 3, 4]).tokens == [5]
    assert store.draft([1, 2, 3, 4], max_match=2).tokens == [5, 6]
    assert store.draft([8, 4], min_match=2) == ([], [], [], 0, 0)
    assert store.draft([8, 4], min_match=1).tokens == [5, 6]
    assert store.draft([]).tokens == store.draft([4]).tokens == []


def test_no_match_or_continuation_crosses_a_document(tmp_path):
    store = build([[1, 2], [3, 4], [5, 1, 2, 7]], tmp_path)
    assert store.draft([2, 3]).match_length == 0
    assert store.draft([1, 2]).tokens == [7]  # a hit that ends its document has nothing to add
    assert store.draft([3, 4]).match_length == 0
    assert store.draft([2, 9, 3]).match_length == store.draft([1, 9, 2]).match_length == 0  # 9: the separator's id
    assert store.draft([70000, -1, 1, 2]).tokens == [7]


def test_more_hits_than_the_limit_are_sampled_evenly(tmp_path):
    documents = [[1, 2, 3]] * 300 + [[1, 2, 4]] * 100
    for shard_tokens in (10**6, 400):
        store = build(documents, tmp_path / str(shard_tokens), shard_tokens=shard_tokens)
        drafted = store.draft([1, 2], limit=40)
        assert (drafted.tokens, drafted.counts, drafted.num_continuations) == ([3, 4], [30, 10], 40)


@pytest.mark.parametrize(
    ("vocab_size", "largest", "width"), [(65535, 65534, 2), (65536, 65535, 4), (70001, 70000, 4), (151936, 151000, 4)]
)
def test_ids_round_trip_in_the_width_they_need(tmp_path, vocab_size, largest, width):
    build([[1, 2, largest, 0, largest - 1]], tmp_path, vocab_size=vocab_size)
    store = Datastore.open(tmp_path)
    assert store.draft([1, 2]).tokens == [largest, 0, largest - 1]
    assert store.info()["width"] == width
    assert store.shards[0].width == width


def test_info_counts_what_is_stored(tmp_path):
    seen = []
    store = build([[1, 2, 3], [], [4, 5]], tmp_path, tokenizer_name="tiny", progress=seen.append)
    assert seen == [3, 0, 2]
    info = Datastore.open(tmp_path).info()
    assert info == store.info()
    expected = {"documents": 3, "tokens": 5, "shards": 1, "width": 2, "vocab_size": 9, "finished": True}
    assert expected.items() <= info.items()
    assert {"tokenizer_hash": "hash", "tokenizer_name": "tiny"}.items() <= info.items()
    assert info["bytes"] == sum(path.stat().st_size for path in tmp_path.glob("*.npy"))


def test_documents_without_tokens_are_found_nowhere(tmp_path):
    for number, documents in enumerate(([], [[], []], [[1]])):
        build(documents, tmp_path / str(number))
        assert Datastore.open(tmp_path / str(number)).draft([1, 1]).tokens == []


def test_added_documents_are_found_with_the_old_ones(tmp_path):
    build([[1, 2, 3]], tmp_path)
    Datastore.open(tmp_path).add([[1, 2, 4], [1, 2, 4]])
    store = Datastore.open(tmp_path)
    assert (store.draft([1, 2]).tokens, store.draft([1, 2]).counts) == ([4, 3], [2, 1])
    assert (store.info()["shards"], store.info()["documents"]) == (2, 3)


def interrupted(documents, *, after):
    yield from documents[:after]
    raise KeyboardInterrupt


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_interrupted_build_carries_on(tmp_path):
    documents = random_documents(np.random.default_rng(1), alphabet=range(9), num_documents=40)
    build(documents, tmp_path / "whole", shard_tokens=100)
    part = tmp_path / "part"
    with pytest.raises(KeyboardInterrupt):
        build(interrupted(documents, after=25), part, shard_tokens=100)
    num_finished = len(json.loads((part / "datastore.json").read_text())["shards"])
    assert num_finished >= 2
    with pytest.raises(ValueError, match="interrupted build.*call build again"):
        Datastore.open(part)
    with pytest.raises(ValueError, match="shard_tokens=100.*same settings"):
        build(documents, part, shard_tokens=200)
    written = {path: path.stat().st_mtime_ns for path in part.glob("*.npy")}
    # what a build killed while it wrote leaves behind
    (part / f"tokens-{num_finished:05d}.npy").write_bytes(b"half")
    (part / f"suffixes-{num_finished:05d}.part").write_bytes(b"half")

    build(iter(documents), part, shard_tokens=100)
    assert contents(part) == contents(tmp_path / "whole")
    assert all(path.stat().st_mtime_ns == time for path, time in written.items())
    with pytest.raises(ValueError, match="finished datastore already"):
        build(documents, part, shard_tokens=100)


def test_an_interrupted_add_carries_on(tmp_path):
    old, new = [[1, 2, 3]] * 20, [[1, 2, 4]] * 40
    build(old, tmp_path, shard_tokens=48)
    with pytest.raises(KeyboardInterrupt):
        Datastore.open(tmp_path).add(interrupted(new, after=30))
    assert not Datastore.open(tmp_path).info()["finished"]
    Datastore.open(tmp_path).add(new)
    drafted = Datastore.open(tmp_path).draft([1, 2])
    assert (drafted.tokens, drafted.counts) == ([4, 3], [40, 20])


def test_documents_that_cannot_be_stored_are_refused(tmp_path):
    with pytest.raises(ValueError, match="document 1 holds ids from 3 to 9; needed are ids from 0 to 8"):
        build([[1], [3, 9]], tmp_path / "large")
    with pytest.raises(ValueError, match="ids from -1 to 3"):
        build([[3, -1]], tmp_path / "negative")
    with pytest.raises(ValueError, match="document 0 has 5 tokens and a shard holds 5"):
        build([[1] * 5], tmp_path / "long", shard_tokens=5)
    with pytest.raises(ValueError, match="shard_tokens of 2 to"):
        build([[1]], tmp_path / "shard", shard_tokens=2**31)
    with pytest.raises(ValueError, match="1 <= length <= 64"):
        build([[1]], tmp_path / "short").draft([1], length=65)


def replace_header(folder, **fields):
    path = folder / "datastore.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_files_that_are_not_whole_or_not_its_own_are_refused(tmp_path):
    def damaged(name):
        build([[1, 2, 3, 4]], tmp_path / name)
        return tmp_path / name

    for file in ("tokens-00000.npy", "suffixes-00000.npy"):
        folder = damaged(f"cut {file}")
        os.truncate(folder / file, (folder / file).stat().st_size - 1)
        with pytest.raises(ValueError, match=rf"{file} has \d+ bytes, its datastore.json says \d+.*again"):
            Datastore.open(folder)
        (folder / file).unlink()
        with pytest.raises(ValueError, match=f"{file} is missing"):
            Datastore.open(folder)

    folder = damaged("dtype")
    tokens = np.load(folder / "tokens-00000.npy")
    np.save(folder / "tokens-00000.npy", tokens.astype("<u2"))
    with pytest.raises(ValueError, match=r"holds <u2\[69\], its datastore.json asks for >u2\[69\]"):
        Datastore.open(folder)

    folder = damaged("bytes")
    (folder / "tokens-00000.npy").write_bytes(b"x" * (folder / "tokens-00000.npy").stat().st_size)
    with pytest.raises(ValueError, match="tokens-00000.npy is not a numpy array"):
        Datastore.open(folder)


def test_headers_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no datastore.json"):
        Datastore.open(tmp_path)
    build([[1, 2, 3, 4]], tmp_path)
    replace_header(tmp_path, format_version=2)
    with pytest.raises(ValueError, match="format version 2.*reads 1: upgrade"):
        Datastore.open(tmp_path)
    replace_header(tmp_path, format="parquet")
    with pytest.raises(ValueError, match="format 'parquet'"):
        Datastore.open(tmp_path)
    for text in ('{"format"', "[]", "{}"):
        (tmp_path / "datastore.json").write_text(text)
        with pytest.raises(ValueError, match="not a whole datastore header"):
            Datastore.open(tmp_path)


def word_tokenizer(words):
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in words}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.role + ' ' + message.content + ' ' }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", chat_template=template)


def test_another_tokenizer_is_refused(tmp_path):
    words = list(enumerate(["?", "user", "a", "b", "c"]))
    tokenizer = word_tokenizer(words)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    hashed = tokenizer_hash(tokenizer)
    assert hashed == tokenizer_hash(loaded) == tokenizer_hash(word_tokenizer(words[::-1]))

    store = Datastore.from_texts(["a b c"], tmp_path / "store", tokenizer=tokenizer)
    store.check(loaded, vocab_size=8)  # a model may have more rows than its tokenizer has tokens
    store.check(hashed)
    loaded.add_tokens(["d"])
    with pytest.raises(ValueError, match=f"{hashed}; the one given has hash {tokenizer_hash(loaded)}"):
        store.check(loaded)
    with pytest.raises(ValueError, match="ids below 5; the model's vocabulary is 4"):
        store.check(hashed, vocab_size=4)


def test_texts_and_chats_are_encoded(tmp_path):
    tokenizer = word_tokenizer(list(enumerate(["?", "user", "a", "b", "c"])))
    texts = ["a b", [{"role": "user", "content": "a c"}], "c"]
    assert list(encode(texts, tokenizer)) == [[2, 3], [1, 2, 4], [4]]
    with pytest.raises(KeyboardInterrupt):
        Datastore.from_texts(interrupted(texts, after=2), tmp_path, tokenizer=tokenizer)
    store = Datastore.from_texts(texts, tmp_path, tokenizer=tokenizer)
    assert store.info()["documents"] == 3
    assert store.draft([1, 2]).tokens == [4]


def test_chats_that_the_template_refuses_are_no_texts_and_are_counted(tmp_path, caplog):
    tokenizer = word_tokenizer(list(enumerate(["?", "user", "a", "b", "c"])))
    tokenizer.chat_template += "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    refused = [[{"role": "system", "content": "b"}], [{"role": "user", "content": None}], []]
    texts = [*refused, [{"role": "user", "content": "a c"}], "b c"]
    with pytest.raises(KeyboardInterrupt):
        Datastore.from_texts(interrupted(texts, after=4), tmp_path, tokenizer=tokenizer, shard_tokens=4)
    store = Datastore.from_texts(texts, tmp_path, tokenizer=tokenizer, shard_tokens=4)
    assert store.info()["tokens"] == 5 and store.draft([1, 2]).tokens == [4]
    caplog.clear()
    assert list(encode(texts, tokenizer)) == [[], [], [], [1, 2, 4], [3, 4]]
    assert "1 chats dropped (refused by the chat template: no system)" in caplog.text
    assert "1 chats dropped (no messages)" in caplog.text and len(caplog.records) == 3


def test_an_interrupted_save_of_the_deep_drafter_is_made_again(tmp_path, monkeypatch):
    model, tokenizer = tiny(), tiny_tokenizer()
    monkeypatch.setattr(prepare, "is_whole", lambda folder: True)
    monkeypatch.setattr(prepare, "load_embedded", lambda *_, **__: (model, tokenizer))
    deep = tmp_path / "SmolLM2-135M-Instruct"

    def half(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(model, "save_pretrained", half)
        prepare.main(tmp_path)
    prepare.main(tmp_path)
    assert len(load_file(deep / "model.safetensors")) and (deep / "tokenizer.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == [deep.name]

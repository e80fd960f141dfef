"""Cost of one draft from a datastore as it grows, and of building it. Times are CPU seconds of one thread.

    python benchmarks/datastore.py --tokenizer HuggingFaceTB/SmolLM2-135M-Instruct --texts '/usr/lib/python3*/**/*.py'

Documents are whole files, encoded once and kept in --work. The last ones are held out: the contexts to draft for end
at random places in them. Sizes beyond the files' tokens repeat them with a tenth of the tokens replaced at random.
"""

import os

os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")}

import argparse
import glob
import json
import platform
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from hf_specdec.datastore import Datastore, encode, tokenizer_hash

NUM_HELD_OUT = 400  # documents
COLUMNS = {
    "tokens": "{:,}", "shards": "{}", "build_cpu_s": "{:.2f}", "build_peak_gb": "{:.2f}", "imports_peak_gb": "{:.2f}",
    "disk_gb": "{:.2f}", "draft_mean_ms": "{:.3f}", "draft_p50_ms": "{:.3f}", "draft_p95_ms": "{:.3f}",
    "draft_p99_ms": "{:.3f}", "match_mean": "{:.1f}", "found": "{:.0%}", "continuations_mean": "{:.0f}",
}  # fmt: skip


def peak_gb() -> float:
    """Largest resident size of this program so far (getrusage would count its parent's before exec as well)."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**20


def encode_corpus(pattern: str, tokenizer_name: str, *, work: Path, num_tokens: int) -> dict:
    """Writes `tokens.bin` (uint32), `lengths.npy` and `corpus.json` until `num_tokens` or the last file."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if 200 < os.path.getsize(path) < 300_000)
    random.Random(0).shuffle(paths)
    texts = (Path(path).read_text(encoding="utf-8", errors="ignore") for path in paths)
    lengths, cpu = [], time.process_time()
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "tokens.bin", "wb") as file:
        for ids in encode(texts, tokenizer):
            np.array(ids, dtype=np.uint32).tofile(file)
            lengths.append(len(ids))
            if sum(lengths) >= num_tokens:
                break
    np.save(work / "lengths.npy", lengths)
    corpus = dict(
        tokenizer=tokenizer_name, vocab_size=len(tokenizer), hash=tokenizer_hash(tokenizer), texts=pattern,
        tokens=sum(lengths), documents=len(lengths), encode_cpu_s=time.process_time() - cpu,
    )  # fmt: skip
    (work / "corpus.json").write_text(json.dumps(corpus))
    return corpus


def stored_documents(work: Path, lengths: np.ndarray, vocab_size: int, *, num_tokens: int):
    """Yields lists of ids as a tokenizer would, up to `num_tokens` in all."""
    generator, repeat = np.random.default_rng(0), 0
    while True:
        with open(work / "tokens.bin", "rb") as file:
            for length in lengths[:-NUM_HELD_OUT]:
                ids = np.fromfile(file, np.uint32, length)[:num_tokens]
                if repeat:
                    replaced = generator.random(len(ids)) < 0.1
                    ids[replaced] = generator.integers(0, vocab_size, replaced.sum())
                yield ids.tolist()
                num_tokens -= len(ids)
                if not num_tokens:
                    return
        repeat += 1


def held_out_contexts(work: Path, lengths: np.ndarray, *, num_contexts: int) -> list[list[int]]:
    ids = np.fromfile(work / "tokens.bin", np.uint32, offset=4 * int(lengths[:-NUM_HELD_OUT].sum())).tolist()
    ends = np.random.default_rng(1).integers(16, len(ids), num_contexts)
    return [ids[end - 16 : end] for end in ends]


def measure(work: Path, *, num_tokens: int, shard_tokens: int, num_contexts: int) -> dict:
    """One row of the table; run in a process of its own, so that the peak is this build's."""
    corpus, lengths = json.loads((work / "corpus.json").read_text()), np.load(work / "lengths.npy")
    folder, imports_peak_gb = work / "store", peak_gb()
    shutil.rmtree(folder, ignore_errors=True)
    cpu = time.process_time()
    store = Datastore.build(
        stored_documents(work, lengths, corpus["vocab_size"], num_tokens=num_tokens), folder,
        vocab_size=corpus["vocab_size"], tokenizer_hash=corpus["hash"], shard_tokens=shard_tokens,
    )  # fmt: skip
    build_cpu_s, build_peak_gb = time.process_time() - cpu, peak_gb()

    contexts = held_out_contexts(work, lengths, num_contexts=num_contexts)
    for context in contexts:  # so that no page of the files is read from the disk below
        store.draft(context)
    milliseconds, drafts = [], []
    for context in contexts:
        cpu = time.process_time_ns()
        drafts.append(store.draft(context))
        milliseconds.append((time.process_time_ns() - cpu) / 1e6)
    percentiles = dict(zip(("p50", "p95", "p99"), np.percentile(milliseconds, [50, 95, 99]).tolist(), strict=True))
    return dict(
        tokens=store.info()["tokens"], shards=store.info()["shards"], disk_gb=store.info()["bytes"] / 2**30,
        build_cpu_s=build_cpu_s, build_peak_gb=build_peak_gb, imports_peak_gb=imports_peak_gb,
        draft_mean_ms=np.mean(milliseconds).item(), match_mean=np.mean([d.match_length for d in drafts]).item(),
        found=np.mean([d.match_length > 0 for d in drafts]).item(),
        continuations_mean=np.mean([d.num_continuations for d in drafts]).item(),
    ) | {f"draft_{name}_ms": value for name, value in percentiles.items()}  # fmt: skip


def markdown(result: dict) -> str:
    rows = [[form.format(row[name]) for name, form in COLUMNS.items()] for row in result["rows"]]
    lines = [list(COLUMNS), ["---:"] * len(COLUMNS), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    first, last = result["rows"][0], result["rows"][-1]
    growth = last["draft_mean_ms"] / first["draft_mean_ms"]
    conditions = ", ".join(f"{name} {value}" for name, value in result["conditions"].items())
    return (
        f"{table}\n\nOne draft at {last['tokens']:,} tokens costs {growth:.2f} times one at {first['tokens']:,}. "
        f"CPU time, warm files, drafts with the default options. {conditions}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="name or folder")
    parser.add_argument("--texts", default="/usr/lib/python3*/**/*.py", help="pattern of the files to store")
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 3, 10, 30, 100], help="tokens to store")
    parser.add_argument("--shard-tokens", type=int, default=2**27)
    parser.add_argument("--contexts", type=int, default=3000, help="drafts measured per size")
    parser.add_argument("--work", type=Path, default=Path("/tmp/hf_specdec-datastore"), help="corpus and datastore")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)  # a child process: tokens of the one row to measure
    options = parser.parse_args()
    if options.one:
        sizes = dict(num_tokens=options.one, shard_tokens=options.shard_tokens, num_contexts=options.contexts)
        print(json.dumps(measure(options.work, **sizes)))
        return

    corpus_file = options.work / "corpus.json"
    corpus = json.loads(corpus_file.read_text()) if corpus_file.exists() else {}
    if (corpus.get("tokenizer"), corpus.get("texts")) != (options.tokenizer, options.texts):
        most = int(max(options.millions) * 1e6 * 1.05)
        corpus = encode_corpus(options.texts, options.tokenizer, work=options.work, num_tokens=most)
    rows = []
    for millions in options.millions:
        child = [sys.executable, __file__, *sys.argv[1:], "--one", str(int(millions * 1e6))]
        rows.append(json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True).stdout))
        print(f"{rows[-1]['tokens']:,} tokens: {rows[-1]['draft_mean_ms']:.3f} ms a draft", file=sys.stderr)
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    conditions = dict(
        processor=platform.processor() or platform.machine(), threads=1, python=platform.python_version(),
        numpy=np.__version__, commit=git.stdout.strip(), contexts=options.contexts, tokenizer=corpus["tokenizer"],
        texts=corpus["texts"], real_tokens=corpus["tokens"],
    )  # fmt: skip
    result = dict(conditions=conditions, rows=rows)
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(markdown(result))


if __name__ == "__main__":
    main()

"""ZeroGPU: the page touches CUDA only in the process that a GPU is lent to, and only plain values come back from it."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# As the package `spaces` 0.51 does it: each call runs in a forked process, and what it takes and yields is pickled.
SPACES = """
import multiprocessing, pickle
forked, durations, yielded = False, [], []

def GPU(duration):
    durations.append(duration)
    return lend

def lend(function):
    def lent(*args):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        stop = multiprocessing.Event()
        process = multiprocessing.get_context("fork").Process(
            target=work, args=(function, pickle.dumps(args), sender, stop), daemon=True
        )
        process.start()
        try:
            while (message := pickle.loads(receiver.recv_bytes())) is not None:
                yielded.append(message)
                yield message
        finally:
            stop.set()
            process.join(60)
            assert process.exitcode == 0
    return lent

def work(function, args, sender, stop):
    global forked
    forked = True
    values = function(*pickle.loads(args))
    for value in values:
        if stop.is_set():
            values.close()
            break
        sender.send_bytes(pickle.dumps(value))
    sender.send_bytes(pickle.dumps(None))
"""
SET_UP = """
import time
import torch
move = torch.nn.Module.to
asked = {name: getattr(torch.cuda, name) for name in ("is_available", "device_count", "current_device")}

def in_the_lent_process(name):
    def ask(*args, **kwargs):
        import spaces
        assert spaces.forked, f"torch.cuda.{name} outside of the process that has the GPU"
        return asked[name](*args, **kwargs)
    return ask

def refuse(*args, **kwargs):
    raise AssertionError("CUDA was initialised")

def to(module, *args, **kwargs):
    import spaces
    if args == ("cuda",):  # there is none here, so the module stays where it is
        assert spaces.forked, "a module moved to the GPU outside of the process that has it"
        return module
    return move(module, *args, **kwargs)

torch.cuda._lazy_init, torch.nn.Module.to = refuse, to
for name in asked:
    setattr(torch.cuda, name, in_the_lent_process(name))

import app, spaces
from tiny import tiny
from tiny_chat import tiny_tokenizer
from hf_specdec import live
assert spaces.durations == [120] and live.ZERO_GPU and not torch.cuda.is_initialized()
target = tiny(dtype=torch.float32, scale=4, max_position_embeddings=4096)

def load_model(name, dtype, *, device):
    assert device == "cpu" and dtype in ("float32", "bfloat16")
    return target, tiny_tokenizer()

live.load_model = load_model
"""


@pytest.fixture
def run(tmp_path):
    """Runs code after `SET_UP` in a fresh process in which the package `spaces` is present, as on a ZeroGPU Space."""
    (tmp_path / "spaces.py").write_text(SPACES)
    path = os.pathsep.join(map(str, (tmp_path, TESTS.parent, TESTS)))
    names = {"PYTHONPATH": path, "SPACES_ZERO_GPU": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

    def run(code: str) -> None:
        code = SET_UP + textwrap.dedent(code)
        result = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | names, capture_output=True, text=True, timeout=240
        )
        assert result.returncode == 0, result.stderr[-3000:]

    return run


def test_columns_are_decoded_in_the_lent_process_and_come_back_as_plain_values(run):
    run("""
        methods = ["pld", "pld?nothing=1", "sps:embedded"]
        *_, report = app.compare("abc abc abc", methods, dtype="float32", max_new_tokens=16)
        assert "error" not in report, report
        plain_column, pld, failed, sps = report["columns"]
        assert plain_column["state"] == "done" and pld["badge"][0] == sps["badge"][0] == "same", report
        assert failed["state"] == "failed" and "no option" in failed["message"]
        def plain(value):
            if isinstance(value, dict):
                return all(map(plain, value)) and all(map(plain, value.values()))
            if isinstance(value, list | tuple):
                return all(map(plain, value))
            return value is None or type(value) in (bool, int, float, str)
        assert spaces.yielded and all(map(plain, spaces.yielded))
        assert not spaces.forked and not torch.cuda.is_initialized()
    """)


def test_stop_and_a_closed_tab_reach_the_lent_process(run):
    run("""
        target.register_forward_pre_hook(lambda *_: time.sleep(0.02))
        settings = live.settings_of("embedded", "float32", 2000, 0, 0)
        def start(run):
            outcomes = live.run_methods("abc", ["plain", "pld"], settings, run=run, decode_all=app.decode_all)
            for outcome in outcomes:
                if outcome.get("columns") and outcome["columns"][0]["tokens"]:
                    return outcomes
        run = live.start_run()
        outcomes = start(run)
        live.stop_run(run)
        *_, last = outcomes
        assert [column["state"] for column in last["columns"]] == ["stopped"] * 2
        assert last["columns"][0]["tokens"] < 100
        closed = start(live.start_run())
        began = time.perf_counter()
        closed.close()  # as gradio does when the tab is closed; waits for the lent process
        assert time.perf_counter() - began < 20
    """)

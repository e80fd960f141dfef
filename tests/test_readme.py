"""Every code block of the README runs, in order, as a reader would paste it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hub_client import environment, seed_embedded
from hub_server import serve

from hf_specdec import METHODS
from hf_specdec.models import EMBEDDED_HEADS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def shipped_head() -> dict[str, bytes]:
    """Files of the repository that the README calls user/drafter."""
    return {path.name: path.read_bytes() for path in (EMBEDDED_HEADS / "eagle2").iterdir()}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with the files that the commands name, and a Hub."""
    folder = tmp_path_factory.mktemp("readme")
    chats = [{"prompt": f"What comes after {i}?", "answer": f"After {i} comes {i + 1}."} for i in range(4)]
    (folder / "CHATS.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (folder / "drafter").mkdir()  # so that each command can be tested alone
    for name, data in shipped_head().items():
        (folder / "drafter" / name).write_bytes(data)
    with serve() as hub:
        seed_embedded(hub)
        yield folder, environment(hub, folder / "home")


def test_python_blocks_run(capsys, hub):
    seed_embedded(hub)
    hub.seed("user/drafter", shipped_head())
    names: dict = {}
    try:
        for language, code in BLOCKS:
            if language == "python":
                exec(compile(code, "README.md", "exec"), names)
        assert "tokens per step" in capsys.readouterr().out
        assert names["same"].shape[1] > names["inputs"]["input_ids"].shape[1]
    finally:
        METHODS.pop("repeat", None)  # the example's method must not reach other tests


@pytest.mark.parametrize(
    "line", [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
)
def test_commands_run(line, workplace):
    folder, environment = workplace
    command = shlex.split(line)
    assert command[0] == "hf-specdec"
    done = subprocess.run(
        [sys.executable, "-m", "hf_specdec.cli", *command[1:]],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


def test_every_block_is_run_or_plain_text():
    assert {language for language, _ in BLOCKS} == {"python", "bash", "text"}


def test_every_file_it_names_exists():
    tree = next(code for language, code in BLOCKS if language == "text")
    named = re.findall(r"`([\w/]+\.(?:py|md))`", README) + re.findall(r"\b\w+\.py\b", tree)
    assert named
    for name in named:
        places = (ROOT / name, ROOT / "hf_specdec" / name)
        assert any(place.exists() for place in places), name


def test_every_method_is_in_the_table():
    missing = [name for name in METHODS if f"| `{name}" not in README]
    assert not missing
    assert os.path.getsize(ROOT / "README.md") < 20_000

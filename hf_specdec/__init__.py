"""Speculative decoding for transformers: `model.generate(..., candidate_generator=...)` works once this is imported."""

from hf_specdec import methods
from hf_specdec.datastore import Datastore
from hf_specdec.generate import install, speculate, uninstall
from hf_specdec.generator import METHODS, SpecGenerator, Step, make_generator
from hf_specdec.hub import load
from hf_specdec.methods import *  # noqa: F403
from hf_specdec.methods import embedded_drafter
from hf_specdec.models import load_embedded
from hf_specdec.stats import SpecStats
from hf_specdec.tree import DraftTree

__version__ = "0.1.0"
__all__ = [
    "METHODS",
    "Datastore",
    "DraftTree",
    "SpecGenerator",
    "SpecStats",
    "Step",
    "embedded_drafter",
    "install",
    "load",
    "load_embedded",
    "make_generator",
    "speculate",
    "uninstall",
]
__all__ += methods.__all__

install()

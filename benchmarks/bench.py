"""`python benchmarks/bench.py [--questions question.jsonl] [--output DIR]`: the same as `hf-specdec bench`."""

import sys

from hf_specdec.cli import app

app(["bench", *sys.argv[1:]])

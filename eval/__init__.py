"""Evaluation: Spec-Bench on any causal language model and any method. `python -m eval run`, then `python -m eval report`."""

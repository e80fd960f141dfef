"""Generation with the drafting head {{ repo_id }}: the text of plain `generate`, in fewer steps.

model.generate(**inputs, custom_generate="{{ repo_id }}", trust_remote_code=True)
"""

import functools

import hf_specdec


@functools.lru_cache(maxsize=1)
def drafter():
    """The generator of this repository's head, loaded once."""
    return hf_specdec.load("{{ repo_id }}")


def generate(model, **kwargs):
    """What `model.generate` returns for the same arguments."""
    return model.generate(candidate_generator=drafter(), **kwargs)

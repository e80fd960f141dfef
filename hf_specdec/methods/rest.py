"""REST: retrieval-based speculative decoding (He et al. 2023). What followed the last words in a datastore of texts is drafted.

The datastore is read only and memory-mapped; one lookup costs a fraction of a millisecond, whatever the datastore's size.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_specdec.datastore import Datastore
from hf_specdec.generator import SpecGenerator, Step
from hf_specdec.methods.pld import REPEATS
from hf_specdec.models import stored_tokenizer
from hf_specdec.tree import DraftTree

EMBEDDED_DATASTORE = Path(__file__).parent.parent / "datastores" / "embedded"


class RESTGen(SpecGenerator):
    """Drafts the tree of what most often followed the text's longest end that the datastore holds.

    The published sizes are `max_nodes=64, min_probability=0`.

    Args:
        datastore (`Datastore` or `str`, *optional*):
            What to search, or its folder. None is the small one that ships for the embedded model: 118k tokens of 920 answers
            that the model itself wrote to training prompts, greedily.
        max_nodes (`int`): largest tree, the root included.
        max_depth (`int`): tokens of a continuation, at most 64.
        min_probability (`float`): least estimated probability of a node.
        max_match (`int`): longest end of the text to look up.
        min_match (`int`): shortest one.

    Raises:
        ValueError: if a count is out of range; at `bind`, if the datastore was built with another tokenizer.
    """

    name = "rest"
    drafter_argument = "a datastore's folder, made by `hf-specdec datastore build`"
    drafter_optional = True

    def __init__(
        self,
        datastore: Datastore | str | None = None,
        *,
        max_nodes: int = 24,
        max_depth: int = 10,
        min_probability: float = 0.04,
        max_match: int = 16,
        min_match: int = 2,
    ):
        super().__init__()
        for argument, value in (("max_nodes", max_nodes), ("max_depth", max_depth), ("min_match", min_match)):
            if value < 1:
                raise ValueError(f"RESTGen({argument}={value}): it must be at least 1.")
        self.datastore = (
            datastore if isinstance(datastore, Datastore) else Datastore.open(datastore or EMBEDDED_DATASTORE)
        )
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.min_probability = min_probability
        self.max_match = max_match
        self.min_match = min_match
        self.bound: PreTrainedModel | None = None

    def bind(self, model: PreTrainedModel) -> None:
        if self.bound is not model:
            tokenizer = stored_tokenizer(model)
            vocab_size = model.config.get_text_config(decoder=True).vocab_size
            self.datastore.check(tokenizer or self.datastore.header["tokenizer_hash"], vocab_size)
        self.bound = model

    def begin(self, input_ids: torch.Tensor, **call) -> None:
        self.text: list[int] = input_ids[0, -self.max_match :].tolist()

    def observe(self, step: Step) -> None:
        self.text = (self.text + step.tokens)[-self.max_match :]

    def draft(self, input_ids: torch.Tensor, *, max_depth: int) -> DraftTree:
        found = self.datastore.draft(
            self.text,
            max_nodes=self.max_nodes - 1,
            max_match=self.max_match,
            min_match=self.min_match,
            length=min(self.max_depth, max_depth),
        )
        trust = REPEATS[min(found.match_length, len(REPEATS) - 1)]
        likely = [trust * count / found.num_continuations for count in found.counts]
        kept = len(list(takewhile(lambda probability: probability >= self.min_probability, likely)))  # heaviest first
        parents = [-1, *(parent + 1 for parent in found.parents[:kept])]
        tree = DraftTree.from_lists([self.text[-1], *found.tokens[:kept]], parents, device=input_ids.device)
        tree.probabilities = [1.0, *likely[:kept]]
        return tree

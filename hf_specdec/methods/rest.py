"""REST: retrieval-based speculative decoding (He et al. 2023). What followed the last words in a datastore of texts is drafted.

The datastore is read only and memory-mapped; one lookup costs a fraction of a millisecond, whatever the datastore's size.
"""

from __future__ import annotations

import operator
from itertools import accumulate
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_specdec.datastore import Datastore
from hf_specdec.generator import SpecGenerator, Step
from hf_specdec.models import stored_tokenizer
from hf_specdec.repository import DATASTORE_FILES, folder_of
from hf_specdec.shard import MAX_LENGTH
from hf_specdec.tree import DraftTree

# how often the next token is among those seen behind an end of so many tokens, measured with the embedded model on answers
# that the datastore does not hold; longer ends count like the last
TRUST = (0.0, 0.42, 0.44, 0.47, 0.52, 0.59, 0.6, 0.62, 0.66, 0.69, 0.7, 0.7, 0.72, 0.75, 0.75, 0.8, 0.9, *[0.9] * 48)

EMBEDDED_DATASTORE = Path(__file__).parent.parent / "datastores" / "embedded"


class RESTGen(SpecGenerator):
    """Drafts the tree of what most often followed the text's longest end that the datastore holds.

    The published sizes are `max_nodes=64, min_probability=0`.

    Args:
        datastore (`Datastore` or `str`, *optional*):
            What to search, or its folder or Hub id (a dataset repository). None is the small one that ships for the
            embedded model: 595k tokens of 4,321 answers that the model itself wrote to training prompts, greedily.
        max_nodes (`int`): largest tree, the root included.
        max_depth (`int`): tokens of a continuation, at most 64.
        min_probability (`float`): least estimated probability of a node.
        max_match (`int`): longest end of the text to look up.
        min_match (`int`): shortest one.

    Raises:
        ValueError: if a count is out of range; at `bind`, if the datastore was built with another tokenizer.
    """

    name = "rest"
    drafter_argument = "a datastore: a folder made by `hf-specdec datastore build`, or a Hub id"
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
        self.check_counts(max_nodes=max_nodes, max_depth=max_depth, min_match=min_match)
        if max_depth > MAX_LENGTH:
            raise ValueError(f"RESTGen(max_depth={max_depth}): it must be at most {MAX_LENGTH}.")
        if max_match < min_match:
            raise ValueError(f"RESTGen(min_match={min_match}): it must be at most max_match={max_match}.")
        if not isinstance(datastore, Datastore):
            source = datastore or EMBEDDED_DATASTORE
            datastore = Datastore.open(folder_of(source, files=DATASTORE_FILES, repo_type="dataset"))
        self.datastore = datastore
        self.max_nodes = max_nodes
        self.max_depth = max_depth
        self.min_probability = min_probability
        self.max_match = max_match
        self.min_match = min_match

    def attach(self, model: PreTrainedModel) -> None:
        tokenizer = stored_tokenizer(model)
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self.datastore.check(tokenizer or self.datastore.header["tokenizer_hash"], vocab_size)

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
        self.stats.part("retrieval")
        tokens, parents, likely, depths = [self.text[-1]], [-1], [1.0], [0]
        trust = list(accumulate(TRUST[min(found.match_length, len(TRUST) - 1) :], operator.mul))
        places = {-1: 0}
        for i, (token, parent, count) in enumerate(zip(found.tokens, found.parents, found.counts, strict=True)):
            if parent not in places:
                continue
            depth = depths[places[parent]] + 1
            probability = trust[min(depth, len(trust)) - 1] * count / found.num_continuations
            if probability >= self.min_probability:
                places[i] = len(tokens)
                tokens.append(token)
                parents.append(places[parent])
                likely.append(probability)
                depths.append(depth)
        tree = DraftTree.from_lists(tokens, parents, device=input_ids.device)
        tree.probabilities = likely
        self.stats.part("tree")
        return tree

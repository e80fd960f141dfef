"""Generator: what a method author subclasses. It drafts a tree for a text and learns which part was accepted."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator, LogitsProcessorList

from hf_specdec.models import EMBEDDED_HEADS, SHIPPED
from hf_specdec.stats import SpecStats
from hf_specdec.tree import DraftTree

if TYPE_CHECKING:
    from hf_specdec.target import Target

METHODS: dict[str, type[SpecGenerator]] = {}


@dataclass
class Step:
    """What the target made of one draft.

    Args:
        tree (`DraftTree`): the draft; for the prefill, the root alone.
        path (`list[int]`): nodes whose keys and values stay in the target's cache: the root, then the accepted nodes.
        tokens (`list[int]`): emitted tokens: those of the accepted nodes, then the target's own, the next draft's root.
        logits (`torch.Tensor` of shape `(n, v)`, *optional*):
            The target's raw logits at each node; in the prefill's step, at the last `prompt_logits` tokens of the prompt.
        hidden (`tuple[torch.Tensor]`, *optional*):
            For each index in `hidden_layers`, the target's hidden states `(n, h)` at the nodes; in the prefill's step,
            those of all prompt positions that were run.
    """

    tree: DraftTree
    path: list[int]
    tokens: list[int]
    logits: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None


class SpecGenerator(CandidateGenerator):
    """Base of all drafting methods; also a working `CandidateGenerator` for transformers' own assisted loop.

    A subclass sets `name`, which files it in `METHODS`, and implements `draft`; `attach`, `begin` and `observe` where it
    keeps state. One object serves any number of `generate` calls, one after the other. After a call `stats` tells what
    happened in it.

    Attributes:
        name (`str`): key in `METHODS`, on the command line and on cards.
        head_class (`type[Drafter]`, *optional*): the trained head it drafts with, for `hf-specdec train`.
        max_nodes (`int`): size of the largest tree it drafts, the root included.
        chain_only (`bool`): whether all its drafts are chains, which any attention implementation can verify.
        prompt_logits (`int`): how many of the prompt's last tokens it wants the target's logits at; at least 1 comes.
        hidden_layers (`tuple[int]`): target hidden states (`output_hidden_states` indices) it wants in `observe`.
        drafter_argument (`str`, *optional*): what its constructor takes first, where it takes anything.
        drafter_optional (`bool`): whether it has a default for that.
        whole_draft_only (`bool`): whether it learns only from drafts verified whole, and so cannot be part of a hybrid.
        lossless (`bool`): False only while an option that changes the output's distribution is on.
        lossy_choice (`Callable`, *optional*):
            Only set by an option that says lossy: picks, from processed scores `(1, v)` and a node's drafted tokens, the one
            to accept, or None to let the target choose.
        seed_exact (`bool`): False only where sampling keeps the distribution, but not the very tokens of a seed.
    """

    name: ClassVar[str] = ""
    drafter_argument: ClassVar[str | None] = None
    drafter_optional: ClassVar[bool] = False
    head_class: ClassVar[type | None] = None
    max_nodes: int = 1
    chain_only: bool = False
    prompt_logits: int = 1
    hidden_layers: tuple[int, ...] = ()
    whole_draft_only: bool = False
    lossless: bool = True
    lossy_choice: Callable[[torch.Tensor, list[int]], int | None] | None = None
    seed_exact: bool = True
    _bound: tuple | None = None  # to which model, and where that was

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if cls.__dict__.get("name"):  # a subclass of a method is no method unless it is named
            METHODS[cls.name] = cls

    def __init__(self):
        self.stats = SpecStats()
        self._seen: torch.Tensor | None = None  # the text as transformers' own loop last showed it

    def bind(self, model: PreTrainedModel) -> None:
        """Calls `attach`, unless this generator is attached to `model` already; where that fails it is attached to none."""
        if self._bound != (place := (model, model.device, model.dtype)):
            self._bound = None
            self.attach(model)
            self._bound = place

    def attach(self, model: PreTrainedModel) -> None:
        """Checks, before any forward, that this generator can draft for `model`, and takes from it what it shares.

        Raises:
            ValueError: if it cannot; names both sides' values.
        """

    def check_counts(self, *, least: int = 1, **counts: int | None) -> None:
        """Raises ValueError for an option of the constructor below `least`; None is no count."""
        for option, value in counts.items():
            if value is not None and value < least:
                raise ValueError(f"{type(self).__name__}({option}={value}): it must be at least {least}.")

    def share(self, target: Target) -> None:
        """Takes the call's target, before it runs: for a generator that runs some of its layers itself while drafting.

        Raises:
            ValueError: if the target cannot be run that way.
        """

    def begin(
        self, input_ids: torch.Tensor, *, processors: LogitsProcessorList | None = None, do_sample: bool = False
    ) -> None:
        """Forgets the last call and reads the prompt.

        Args:
            input_ids (`torch.Tensor` of shape `(1, t)`): may be empty (a prompt given as embeddings).
            processors (`LogitsProcessorList`, *optional*): those of the target that read the scores alone.
            do_sample (`bool`): whether the target samples.
        """

    def draft(self, input_ids: torch.Tensor, *, max_depth: int) -> DraftTree:
        """Drafts what may follow the text.

        Args:
            input_ids (`torch.Tensor` of shape `(1, t)`): all committed tokens; the last one is the tree's root.
            max_depth (`int`): longest path that can still be emitted, at least 1.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement draft(input_ids, *, max_depth)")

    def observe(self, step: Step) -> None:
        """Learns what came of the last draft (the first time: of the prompt)."""

    def end(self) -> None:
        """Lets go of what only the call needed, such as caches; called also when the call failed."""

    # transformers' own assisted loop

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """The text with the draft's preferred chain behind it, and the log-probabilities it was sampled from, if it was."""
        known = 0 if self._seen is None else self._seen.shape[1]
        new = input_ids[0, known:].tolist()
        goes_on = 0 < known < input_ids.shape[1] and torch.equal(self._seen, input_ids[:, :known])
        if goes_on and new[:-1] == self._chain.host[0][1 : len(new)]:  # drafted tokens, then one of the target's own
            self.observe(Step(self._chain, list(range(len(new))), new))
        else:
            self.begin(input_ids)
        tree = self.draft(input_ids, max_depth=self.max_nodes)
        self._seen, self._chain = input_ids, tree.select(tree.first_path())
        chain = self._chain
        if len(chain) == 1:
            return input_ids, None
        candidates = torch.cat([input_ids, chain.tokens[None, 1:].to(input_ids.device)], dim=-1)
        return candidates, None if chain.q is None else chain.q[None, :-1].log()

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to do: the next `get_candidates` sees what was accepted."""


def make_generator(spec: str) -> SpecGenerator:
    """A generator from one line of text, `name[:drafter][?option=value&option=value]`.

    For example `pld`, `pld?num_matches=1&max_ngram=2` or `sps:user/drafter?num_draft_tokens=4`. Heads that ship for the
    embedded model are known by their names: `eagle:eagle2`.

    Raises:
        ValueError: for an unknown method or option, or a drafter that is missing or not taken.
    """
    head, _, tail = spec.partition("?")
    name, _, drafter = head.partition(":")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}: the methods are {', '.join(METHODS)}.")
    method = METHODS[name]
    if method.drafter_argument and not method.drafter_optional and not drafter:
        raise ValueError(f"method {name!r} needs {method.drafter_argument}; write it as {name}:DRAFTER.")
    if drafter and not method.drafter_argument:
        raise ValueError(f"method {name!r} drafts without a model, but {drafter!r} was given: write {name} alone.")
    if SHIPPED.get(drafter) == name:
        drafter = str(EMBEDDED_HEADS / drafter)
    known = {
        key: option.default
        for key, option in inspect.signature(method).parameters.items()
        if option.kind is option.KEYWORD_ONLY
    }
    options = {}
    for item in filter(None, tail.split("&")):
        key, _, value = item.partition("=")
        if key not in known:
            raise ValueError(f"method {name!r} has no option {key!r}; it has {', '.join(known)}.")
        try:
            options[key] = json.loads(value.lower() if value.lower() in ("true", "false") else value)
        except json.JSONDecodeError:
            options[key] = value
        if isinstance(known[key], bool) and isinstance(options[key], str):
            raise ValueError(f"method {name!r}: {key}={value} is neither true nor false; write one of them.")
    try:
        return method(*filter(None, [drafter]), **options)
    except TypeError as error:
        raise ValueError(f"method {spec!r}: {error}") from error

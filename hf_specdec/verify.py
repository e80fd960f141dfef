"""Verify: which drafted tokens survive. Pure functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_specdec.tree import DraftTree

# these read the scores alone, never the text, so that one call serves all nodes
POSITION_FREE = {
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
}


def walk(tree: DraftTree, pick: Callable[[int], int]) -> Iterator[tuple[int, int, bool]]:
    """Yields each token the target emits: the node it was chosen at, the token, whether a child had drafted it.

    Starts at the root and descends while the target's choice is a child. With one choice per visited node, each made as
    plain decoding makes it, the emitted text is plain decoding's own, whatever the tree.

    Args:
        pick (`Callable[[int], int]`): the target's token after a node; called once per visited node, in text order.
    """
    tokens, parents = tree.host
    children: dict[tuple[int, int], int] = {}
    for child, key in enumerate(zip(parents, tokens, strict=True)):
        children.setdefault(key, child)
    node: int | None = 0
    while node is not None:
        token = pick(node)
        drafted = children.get((node, token))
        yield node, token, drafted is not None
        node = drafted


def position_free(processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors that read the scores alone, and not the text before them."""
    return LogitsProcessorList(processor for processor in processors if type(processor) in POSITION_FREE)


def choose(scores: torch.Tensor, *, do_sample: bool) -> int:
    """Chooses a token from processed scores `(1, v)` by the very calls of plain decoding, so that one seed gives one text."""
    if do_sample:
        return int(torch.multinomial(scores.softmax(dim=-1), num_samples=1))
    return int(scores.argmax(dim=-1))


def choose_typical(scores: torch.Tensor, drafted: Sequence[int], *, epsilon: float, alpha: float) -> int | None:
    """The likeliest of `drafted` that is typical for the target, None where there is none (lossy: Medusa, Cai et al. 2024).

    Args:
        scores (`torch.Tensor` of shape `(1, v)`): processed target scores.
        epsilon, alpha (`float`): typical is what has more than min(epsilon, alpha * exp(-entropy)) of the probability.
    """
    if not drafted:
        return None
    p = scores[0].softmax(dim=-1)  # [v]
    threshold = torch.exp(-torch.special.entr(p).sum()).mul(alpha).clamp(max=epsilon)
    likely, place = p[torch.tensor(drafted, device=p.device)].max(dim=0)
    return drafted[int(place)] if likely > threshold else None


def choose_rejecting(scores: torch.Tensor, drafted: Sequence[int], q: torch.Tensor) -> int:
    """Samples a token with the law of `scores`, and as often as possible one of `drafted`.

    Rejection sampling (Leviathan et al. 2023; Chen et al. 2023), for several siblings drawn without replacement as in
    Sequoia (Chen et al. 2024).

    Args:
        scores (`torch.Tensor` of shape `(1, v)`): processed target scores.
        drafted (`Sequence[int]`): tokens drawn from q, in the order drawn.
        q (`torch.Tensor` of shape `(v,)`): the distribution they were drawn from.
    """
    p = scores[0].softmax(dim=-1)  # [v], p: target, q: draft
    q = q.to(p)
    for token in drafted:
        # keep the token with probability min(1, p/q)
        if torch.rand((), device=p.device) * q[token] < p[token]:
            return token
        rest = (p - q).clamp_(min=0)
        if rest.sum() <= 0:  # p equals q but for rounding
            break
        p = rest / rest.sum()
        q = q.index_fill(0, torch.tensor(token, device=q.device), 0)
        q = q / q.sum().clamp(min=torch.finfo(q.dtype).tiny)
    return int(torch.multinomial(p, num_samples=1))

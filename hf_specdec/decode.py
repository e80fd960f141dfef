"""The loop: draft, verify, accept, compact, record. The page everyone reads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from transformers.generation import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specdec.generator import SpecGenerator, Step
from hf_specdec.record import Record
from hf_specdec.target import Target
from hf_specdec.tree import DraftTree
from hf_specdec.verify import choose, choose_rejecting, position_free, walk


def decode(
    target: Target,
    generator: SpecGenerator,
    text: Text,
    *,
    processors: LogitsProcessorList,
    do_sample: bool,
    record: Record,
) -> None:
    """Decodes until the text ends. Every token is the target's own choice, made as plain decoding makes it."""
    stats, device = generator.stats, target.model.device
    stats.start(device)
    generator.begin(text.ids, processors=position_free(processors), do_sample=do_sample)
    stats.lap("draft")
    outputs = target.prefill()
    tree = DraftTree.chain(text.ids[0, -1:].tolist() or [0], device=device)  # a root alone: the prompt's last token
    stats.lap("prefill")

    with target.model._optimize_model_for_decode():  # after the prefill, as in plain decoding
        for step in count():  # step 0 is the prefill's
            logits = outputs.logits[0].to(text.ids.device)  # [n, v]; the prefill's may begin before the root
            pick = picker(
                tree,
                logits[-len(tree) :],
                text,
                processors=processors,
                do_sample=do_sample,
                record=record,
                lossy_choice=generator.lossy_choice,
            )
            path, tokens, accepted, ended = [], [], 0, False
            for node, token, drafted in walk(tree, pick):
                path.append(node)
                tokens.append(token)
                accepted += drafted
                stats.emit(from_draft=drafted)
                ended = text.commit(token, record.scores)
                if ended:
                    break
            if step:
                stats.record(tree, path, accepted=accepted, cut=ended and drafted)
            stats.lap("accept")

            record.step(outputs, path, start=target.start, windows=target.windows, is_prefill=step == 0)
            stats.lap("other")
            target.keep(path)
            stats.lap("compact")
            if ended:
                return

            generator.observe(Step(tree, path, tokens, logits=logits, hidden=target.hidden(outputs)))
            outputs = logits = pick = None  # a prompt's logits are large
            max_depth = text.max_length - text.length - 1  # one token is always the target's own
            if max_depth > 0:
                tree = target.fit(generator.draft(text.ids, max_depth=max_depth))
            else:
                tree = DraftTree.chain(tokens[-1:], device=device)
            stats.lap("draft")
            outputs = target.verify(tree)
            stats.lap("verify")


def picker(
    tree: DraftTree,
    logits: torch.Tensor,
    text: Text,
    *,
    processors: LogitsProcessorList,
    do_sample: bool,
    record: Record,
    lossy_choice: Callable[[torch.Tensor, list[int]], int | None] | None = None,
) -> Callable[[int], int]:
    """How the target chooses its token after a node, given its logits `(n, v)` at all nodes.

    On an accelerator, greedy choices that do not read the text are made for all nodes at once, with one read from the
    device. All others are made one by one as the walk gets there: processors then see each prefix of the text once and in
    order, as they would in plain decoding, and sampling draws as often.
    """
    at_once = logits.device.type != "cpu" and len(position_free(processors)) == len(processors)
    if at_once and not do_sample and not record.per_token and lossy_choice is None:
        scores = logits.float()
        choices = (processors(text.ids, scores) if processors else scores).argmax(dim=-1)  # [n]
        return tree.read_with(choices).__getitem__

    def pick(node: int) -> int:
        raw = logits[node : node + 1].to(copy=True, dtype=torch.float32)  # [1, v]
        scores = processors(text.ids, raw)
        record.choice(raw, scores)
        accepted = lossy_choice(scores, tree.children(node)) if lossy_choice else None
        if accepted is not None:
            return accepted
        if do_sample and tree.q is not None:
            return choose_rejecting(scores, tree.children(node), tree.q[node])
        return choose(scores, do_sample=do_sample)

    return pick


class Text:
    """The committed tokens of one call, and the rules that end it.

    Args:
        prompt (`torch.Tensor` of shape `(1, t)`): may be empty.
        criteria (`StoppingCriteriaList`): as `generate` prepared them; each sees every emitted token, as in plain decoding.
        max_length (`int`): tokens the text may have, the prompt's included.
        streamer (`BaseStreamer`, *optional*): gets each token by itself, as in plain decoding.
    """

    def __init__(
        self, prompt: torch.Tensor, *, criteria: StoppingCriteriaList, max_length: int, streamer: BaseStreamer | None
    ):
        self.buffer = prompt
        self.length = prompt.shape[1]
        # a caller's own criterion of length has replaced that of `generate`, and may be longer
        lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        self.max_length = min(lengths, default=max_length)
        self.streamer = streamer
        self.eos_ids: set[int] = set()
        self.criteria = StoppingCriteriaList()
        for criterion in criteria:  # the two that every call has are answered without the device
            if type(criterion) is EosTokenCriteria:
                self.eos_ids.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is not MaxLengthCriteria:
                self.criteria.append(criterion)

    @property
    def ids(self) -> torch.Tensor:
        """All committed tokens, `(1, t)`."""
        return self.buffer[:, : self.length]

    def commit(self, token: int, scores: tuple[torch.Tensor, ...] | None) -> bool:
        """Appends a token and says whether the text ends with it."""
        if self.length == self.buffer.shape[1]:
            room = max(1, min(self.max_length - self.length, max(self.length, 256)))
            self.buffer = torch.cat([self.buffer, self.buffer.new_zeros(1, room)], dim=-1)
        self.buffer[0, self.length] = token
        self.length += 1
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        ended = token in self.eos_ids or self.length >= self.max_length
        if self.criteria:
            ended = bool(self.criteria(self.ids, scores).all()) or ended
        return ended

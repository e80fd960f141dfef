"""Record: the scores, logits, hidden states and attentions that `generate` was asked to return, one entry per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import ModelOutput
from transformers.utils.output_capturing import selected_hidden_states


class Record:
    """Collects what plain decoding would return beside the ids; each item is None unless it was asked for.

    Args:
        generation_config (`GenerationConfig`): says what to collect.
    """

    def __init__(self, generation_config: GenerationConfig):
        self.returns_dict = bool(generation_config.return_dict_in_generate)
        wanted = {
            "scores": generation_config.output_scores,
            "logits": generation_config.output_logits,
            "hidden_states": generation_config.output_hidden_states,
            "attentions": generation_config.output_attentions,
        }
        self.scores, self.logits, self.hidden_states, self.attentions = (
            () if self.returns_dict and flag else None for flag in wanted.values()
        )
        self.layers = selected_hidden_states(generation_config.output_hidden_states)  # None is all of them

    @property
    def per_token(self) -> bool:
        """Whether each token's own scores are needed."""
        return self.scores is not None or self.logits is not None

    def choice(self, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Adds the raw logits and the processed scores, each `(1, v)`, that a token is about to be chosen from."""
        if self.logits is not None:
            self.logits += (logits,)
        if self.scores is not None:
            self.scores += (scores,)

    def step(
        self,
        outputs: ModelOutput,
        path: Sequence[int],
        *,
        start: int,
        windows: Sequence[int | None],
        is_prefill: bool,
    ) -> None:
        """Adds the hidden states and attentions of each accepted node, cut to what it would have seen in plain decoding."""
        if self.hidden_states is not None:
            shown = self.shown(outputs.hidden_states)
            if is_prefill:
                self.hidden_states += (shown,)
            else:
                self.hidden_states += tuple(
                    tuple(None if layer is None else layer[:, node : node + 1] for layer in shown) for node in path
                )
        if self.attentions is not None:
            if is_prefill:
                self.attentions += (outputs.attentions,)
            else:
                self.attentions += tuple(
                    tuple(
                        None if layer is None else attended(layer, path[: i + 1], start=start, window=window)
                        for layer, window in zip(outputs.attentions, windows, strict=True)
                    )
                    for i in range(len(path))
                )

    def shown(self, hidden_states: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """The hidden states that were asked for, None in place of those that only the generator wanted."""
        if self.layers is None:
            return hidden_states
        asked = {layer % len(hidden_states) for layer in self.layers}
        return tuple(layer if i in asked else None for i, layer in enumerate(hidden_states))

    def output(self, sequences: torch.Tensor, cache: Cache) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """What `generate` returns."""
        if not self.returns_dict:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            cache=cache,
        )


def attended(attention: torch.Tensor, path: Sequence[int], *, start: int, window: int | None) -> torch.Tensor:
    """The row of `path`'s last node, over the text and `path` itself, as far as `window` reaches: `(1, heads, 1, seen)`."""
    first = start + attention.shape[-2] - attention.shape[-1]  # a window has only the last of the text's tokens
    columns = torch.cat([torch.arange(first, start), torch.tensor(path) + start]) - first
    columns = columns[-window:] if window else columns
    return attention[:, :, path[-1] : path[-1] + 1].index_select(-1, columns.to(attention.device))

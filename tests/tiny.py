"""Tiny targets built in code, and the generator that replays a known text."""

from __future__ import annotations

import torch
from transformers import (
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers import AutoModelForCausalLM

from hf_specdec import DraftTree, SpecGenerator

SHAPE = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=None,
)
CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": lambda **shape: Qwen2Config(tie_word_embeddings=True, **shape),
    "qwen3": Qwen3Config,
    "mistral": lambda **shape: MistralConfig(**shape | {"sliding_window": None}),
    "sliding": lambda **shape: MistralConfig(**shape | {"sliding_window": 12}),
    "gemma": GemmaConfig,
    "gemma2": lambda **shape: Gemma2Config(sliding_window=12, **shape),
    "phi": lambda **shape: PhiConfig(**{key: value for key, value in shape.items() if key != "head_dim"}),
    "phi3": lambda **shape: Phi3Config(**{key: value for key, value in shape.items() if key != "head_dim"}),
}


def tiny(family: str = "llama", *, dtype=torch.float64, attention: str = "sdpa", seed: int = 0, **changes) -> PreTrainedModel:
    """A random model whose weights are scaled up, so that its choices vary and its argmax is never near a tie."""
    torch.manual_seed(seed)
    config = CONFIGS[family](**SHAPE | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def prompt(length: int, *, seed: int = 0, vocab_size: int = 97) -> torch.Tensor:
    """Random token ids `(1, length)`."""
    return torch.randint(3, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


class Oracle(SpecGenerator):
    """Replays a known continuation, `k` tokens a step, the one at index `wrong_at` altered; optionally beside decoys.

    Args:
        text: prompt and continuation, ids.
        k: drafted tokens per step.
        wrong_at: index in each draft whose token is altered; None drafts only what will be accepted.
        decoys: wrong siblings in front of every right token, which makes the draft a tree.
    """

    def __init__(self, text: list[int], k: int, *, wrong_at: int | None = None, decoys: int = 0, vocab_size: int = 97):
        super().__init__()
        self.text, self.k, self.wrong_at, self.decoys, self.vocab_size = text, k, wrong_at, decoys, vocab_size
        self.max_nodes = 1 + k * (1 + decoys)
        self.chain_only = decoys == 0
        self.drafts: list[DraftTree] = []
        self.steps: list = []

    def begin(self, input_ids, **call) -> None:
        self.drafts, self.steps = [], []

    def observe(self, step) -> None:
        self.steps.append(step)

    def draft(self, input_ids, *, max_depth):
        right = self.text[input_ids.shape[1] :][: min(self.k, max_depth)]
        tokens, parents, parent = [int(input_ids[0, -1])], [-1], 0
        for i, token in enumerate(right):
            token = (token + 1) % self.vocab_size if i == self.wrong_at else token
            siblings = [(token + 2 + j) % self.vocab_size for j in range(self.decoys)] + [token]
            tokens += siblings
            parents += [parent] * len(siblings)
            parent = len(tokens) - 1
        self.drafts.append(DraftTree.from_lists(tokens, parents, device=input_ids.device))
        assert len(right) <= max_depth
        return self.drafts[-1]

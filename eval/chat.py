"""Chat: a conversation as the model's own chat template writes it, or joined by empty lines where there is none."""

from __future__ import annotations

import hashlib

import torch
from transformers import PreTrainedTokenizerBase

from hf_specdec.models import VICUNA, with_template

DATE = "26 Jul 2024"  # Llama 3's template writes today's date where none is given, and prompts would change by the day


class Chat:
    """Writes conversations for one model.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        model_name (`str`): tells Vicuna, whose tokenizer may lack its template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, model_name: str):
        self.tokenizer = with_template(tokenizer, model_name)
        self.template, self.source = tokenizer.chat_template, "the model's own"
        if self.template == VICUNA:
            self.source = "vicuna"
        elif not self.template:
            self.source = "none: turns are joined by empty lines"

    def conditions(self) -> dict:
        """Which template, and its hash."""
        digest = hashlib.sha256(str(self.template or "").encode()).hexdigest()
        return {"template": self.source, "template_sha256": digest[:16]}

    def encode(self, messages: list[dict]) -> torch.Tensor:
        """Token ids `(1, t)` of a conversation, up to where the assistant speaks next."""
        if self.template is None:
            text = "\n\n".join(message["content"] for message in messages) + "\n\n"
        else:
            text = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=True,
                date_string=DATE,
            )
        special = self.template is None  # a template writes them itself
        return self.tokenizer(text, return_tensors="pt", add_special_tokens=special).input_ids

    def decode(self, tokens: list[int]) -> str:
        """The answer's text."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def spec_bench_tokens(self, text: str) -> int:
        """Tokens Spec-Bench counts for the baseline's answer: those of its text, less one for a BOS token."""
        return len(self.tokenizer(text).input_ids) - 1

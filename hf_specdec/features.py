"""Features: the target's hidden states that heads are trained on, computed as generators see them, and kept if asked for."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_specdec.data import Example


@torch.no_grad()
def features(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    layers: Sequence[int] = (),
) -> tuple[torch.Tensor, ...]:
    """The target's hidden states `(b, t, h)` at `layers` (`output_hidden_states` indices), as generators see them.

    Only those layers are kept, and logits are computed at no more than the last position.
    """
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    wanted = sorted(set(layers))
    outputs = model(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False, output_hidden_states=wanted, **last_only
    )
    return tuple(outputs.hidden_states[layer] for layer in layers)


def finite(hidden: Sequence[torch.Tensor], attention_mask: torch.Tensor) -> torch.Tensor:
    """Which texts `(b,)` have finite features at all their tokens."""
    sums = sum(layer.sum(dim=-1, dtype=torch.float32) for layer in hidden)  # [b, t]; NaN and infinity survive sums
    return (sums.isfinite() | ~attention_mask).all(dim=-1)


class FeatureStore:
    """Features on disk, written when a text is first seen and read after that, by this run and by others on the same data.

    It pays where the target's forward takes longer than the head's and texts are seen several times: on a CPU.

    Args:
        folder (`Path`): may exist, with the features of other layers among it.
        examples (`list[Example]`): all texts of the data.
        model (`PreTrainedModel`): the target.
        also (`Sequence[int]`): layers to keep besides those asked for, so that heads trained later find them.

    Raises:
        ValueError: if the folder was written for other texts or another target.
    """

    def __init__(self, folder: Path, examples: Sequence[Example], model: PreTrainedModel, *, also: Sequence[int] = ()):
        self.folder, self.model, self.also = folder, model, tuple(also)
        self.width, self.dtype = model.config.get_text_config(decoder=True).hidden_size, model.dtype
        self.starts, self.rows, self.num_tokens = {}, {}, 0
        texts = sha256()
        for row, example in enumerate(examples):
            self.starts[example.index], self.rows[example.index] = self.num_tokens, row
            self.num_tokens += len(example.input_ids)
            texts.update(json.dumps(example.input_ids).encode())
        self.files: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        about = {"target": model.config.name_or_path, "dtype": str(self.dtype), "texts": texts.hexdigest()}
        note = folder / "features.json"
        if note.exists() and (found := json.loads(note.read_text())) != about:
            raise ValueError(f"{folder} holds the features of {found}, not of {about}: give another --feature-cache.")
        note.write_text(json.dumps(about))

    def open(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's features `(tokens, h)` and which texts `(n,)` it has, both mapped from their files."""
        if layer not in self.files:
            size = self.num_tokens * self.width
            flat = torch.from_file(str(self.folder / f"layer_{layer}.bin"), shared=True, size=size, dtype=self.dtype)
            done = torch.from_file(
                str(self.folder / f"layer_{layer}.done"), shared=True, size=len(self.rows), dtype=torch.uint8
            )
            self.files[layer] = flat.view(self.num_tokens, self.width), done
        return self.files[layer]

    def read(self, batch: dict[str, torch.Tensor], layers: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """The features `(b, t, h)` of a batch at `layers`; the target runs only for what is not there."""
        indices, lengths = batch["index"].tolist(), batch["attention_mask"].sum(dim=1).tolist()
        files = [self.open(layer) for layer in layers]
        rows = [self.rows[index] for index in indices]
        if not all(bool(done[rows].all()) for _, done in files):
            wanted = (*layers, *self.also)
            hidden = features(self.model, batch["input_ids"], None, wanted)
            for layer, states in zip(wanted, hidden, strict=True):
                stored, done = self.open(layer)
                for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
                    stored[self.starts[index] : self.starts[index] + length] = states[row, :length].cpu()
                done[rows] = 1
        spans = [slice(self.starts[index], self.starts[index] + n) for index, n in zip(indices, lengths, strict=True)]
        return tuple(
            pad_sequence([stored[span] for span in spans], batch_first=True).to(batch["input_ids"].device)
            for stored, _ in files
        )

"""Layer skipping: Draft & Verify (Zhang et al. 2024). The target drafts for itself, with some of its layers left out.

Nothing is trained; which layers to skip is searched on sample prompts. For small targets it rarely pays: a draft that keeps
half of the layers costs half a step per token, and skipping more loses acceptance faster than it saves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from huggingface_hub import constants
from torch import nn
from transformers import PreTrainedModel

from hf_specdec.methods.sps import SpSGen
from hf_specdec.split import with_layers
from hf_specdec.vocabulary import digest


class LayerSkipGen(SpSGen):
    """Drafts a chain with the target's own layers but for those it skips; weights are shared, the draft has its own cache.

    Args:
        skip (`Sequence[int]`, *optional*):
            Layers to leave out; the first of each attention type and the last always run. None takes the set that `search`
            found for this model on this machine, and where there is none every second layer.
        num_draft_tokens, max_draft_tokens, draft_sampling: as in [`SpSGen`].

    Raises:
        ValueError: at `bind`, if a layer to skip is not one of the target's inner layers.
    """

    name = "layerskip"
    drafter_argument = None
    head_class = None

    def __init__(
        self,
        *,
        skip: Sequence[int] | None = None,
        num_draft_tokens: int | None = None,
        max_draft_tokens: int = 8,
        draft_sampling: bool = False,
    ):
        super().__init__(
            None, num_draft_tokens=num_draft_tokens, max_draft_tokens=max_draft_tokens, draft_sampling=draft_sampling
        )
        self.skip = None if skip is None else sorted(set(skip))

    def attach(self, model: PreTrainedModel) -> None:
        inner = skippable(model)
        skip = next(choice for choice in (self.skip, found_skip(model), inner[::2]) if choice is not None)
        if not set(skip) <= set(inner):
            raise ValueError(
                f"LayerSkipGen(skip={skip}): of the layers of {model.config.name_or_path or type(model).__name__}, only "
                f"{inner} can be skipped."
            )
        self.drafter = with_layers(
            model, 1, lambda layers: [Skipped() if i in skip else layer for i, layer in enumerate(layers)]
        )
        super().attach(model)

    @classmethod
    def search(
        cls,
        model: PreTrainedModel,
        prompts: Sequence[torch.Tensor],
        *,
        trials: int = 40,
        max_new_tokens: int = 48,
        num_draft_tokens: int = 4,
        seed: int = 0,
        on_trial: Callable[[int, float], None] = lambda number, best: None,
    ) -> tuple[list[int], float]:
        """The set of layers whose omission promises most speed on `prompts`, kept for this model, and the speed-up promised.

        What counts is tokens per step over 1 + drafted tokens x the share of layers that run: no clock, so no noise.

        Args:
            prompts (`Sequence[torch.Tensor]`, each `(1, t)`): samples of what will be asked.
            trials (`int`): sets to try (optuna's TPE sampler; extra `search`).
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        num_layers, inner = model.config.get_text_config(decoder=True).num_hidden_layers, skippable(model)

        def promised(trial: optuna.Trial) -> float:
            skip = [i for i in inner if trial.suggest_categorical(f"skip_{i}", [False, True])]
            generator = cls(skip=skip, num_draft_tokens=num_draft_tokens)
            emitted = steps = drafted = 0
            for ids in prompts:
                model.generate(ids, candidate_generator=generator, max_new_tokens=max_new_tokens, do_sample=False)
                emitted += generator.stats.emitted - 1
                steps += generator.stats.steps
                drafted += generator.stats.drafted
            return emitted / max(1.0, steps + drafted * (num_layers - len(skip)) / num_layers)

        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        study.enqueue_trial({f"skip_{i}": i in inner[::2] for i in inner})
        study.optimize(
            promised, n_trials=trials, callbacks=[lambda study, trial: on_trial(trial.number, study.best_value)]
        )
        skip = sorted(int(name.removeprefix("skip_")) for name, skipped in study.best_params.items() if skipped)
        path = skip_file(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(
            json.dumps({"model": model.config.name_or_path, "skip": skip, "promised": study.best_value})
        )
        partial.rename(path)
        return skip, study.best_value


class Skipped(nn.Module):
    """Stands where a layer was, and passes its input on."""

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return hidden_states


def skippable(model: PreTrainedModel) -> list[int]:
    """Layers that a draft can do without: all but the last, and the first of each attention type, which masks are sized by."""
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [i for i in range(1, config.num_hidden_layers - 1) if types[i] in types[:i]]


def skip_file(model: PreTrainedModel) -> Path:
    """Where the set found for a model is kept; its name says which model and of what shape."""
    config = model.config.get_text_config(decoder=True)
    shape = [model.config.name_or_path, config.num_hidden_layers, config.hidden_size, config.vocab_size]
    root = os.environ.get("HF_SPECDEC_CACHE") or Path(constants.HF_HOME, "hf_specdec")
    return Path(root, "layerskip", f"{digest(shape)}.json")


def found_skip(model: PreTrainedModel) -> list[int] | None:
    """The set that `search` found for a model, or None."""
    try:
        return json.loads(skip_file(model).read_text())["skip"]
    except (OSError, ValueError, KeyError):
        return None

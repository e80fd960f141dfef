"""Split: a stock model run in two parts, without copied modelling code. For methods that leave the target early."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel


class Stored(nn.Module):
    """Stands where layers do not run: keeps the hidden states that come in, or gives back those stored before."""

    def __init__(self):
        super().__init__()
        self.states: torch.Tensor | None = None  # [1, n, h]

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if self.states is None:
            self.states = hidden_states
        return self.states


def with_layers(
    model: PreTrainedModel, exit_layer: int, choose: Callable[[list[nn.Module]], list[nn.Module]]
) -> PreTrainedModel:
    """A copy of `model` that shares all weights, and whose decoder has the layers that `choose` makes of its own.

    Layers keep their own index, and so their rows in the cache; everything around them (positions, masks, what is done to
    embeddings and logits) stays the model's own.

    Raises:
        ValueError: if there is no layer above `exit_layer`, or the layers cannot be told or run apart.
    """
    path = layers_path(model, exit_layer)
    layers = nn.ModuleList(choose(list(model.get_submodule(path))))
    return with_part(model, path.split("."), layers)


def layers_path(model: PreTrainedModel, exit_layer: int) -> str:
    """Where in `model` the list of its decoder layers is.

    Raises:
        ValueError: if there is no layer above `exit_layer`, or the layers cannot be told or run apart.
    """
    name, decoder = model.config.name_or_path or type(model).__name__, model.get_decoder()
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if not 0 < exit_layer < num_layers:
        raise ValueError(
            f"an exit after layer {exit_layer} needs a target with more layers than that, but {name} has {num_layers}: "
            "take a head with another exit_layer."
        )
    lists = [
        module for module in decoder.children() if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if len(lists) != 1:
        raise ValueError(
            f"{type(decoder).__name__} has no single list of {num_layers} layers that could be left early."
        )
    if "forward" in vars(model) or "forward" in vars(decoder):  # accelerate's hooks, bound to the whole model
        raise ValueError(
            f"{name} is spread over devices (device_map), so that its layers cannot be run apart: load it on one device."
        )
    return next(path for path, module in model.named_modules() if module is lists[0])


def with_part(module: nn.Module, path: list[str], part: nn.Module) -> nn.Module:
    """A shallow copy of `module` with `part` at `path`; all other parts are the very same objects."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin._compiled_call_impl = None  # it would call the original
    name, *rest = path
    twin._modules[name] = with_part(module._modules[name], rest, part) if rest else part
    return twin

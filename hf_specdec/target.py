"""Target: the model that verifies. One prefill, then one forward per draft tree, under the tree's own mask."""

from __future__ import annotations

import inspect
from functools import cached_property

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import ModelOutput
from transformers.utils.output_capturing import selected_hidden_states

from hf_specdec.cache import open_cache
from hf_specdec.split import Stored, with_layers
from hf_specdec.tree import DraftTree

SEQUENCE_LONG = ("cache", "position_ids", "attention_mask", "inputs_embeds", "logits_to_keep")
TREE_ATTENTION = ("sdpa", "eager")  # the implementations that add a float mask to the scores


def takes_masks(model: PreTrainedModel) -> bool:
    """Whether it can be told by an additive mask what each token sees, and by positions alone where each stands."""
    config = model.config.get_text_config(decoder=True)
    by_rows = config.model_type == "gpt_neo" or getattr(config, "alibi", False)  # local windows, and alibi's distances
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    return takes_positions and not by_rows and config._attn_implementation in TREE_ATTENTION


class Target:
    """Runs the target over the prompt and over drafts; owns its cache, positions and masks for one call.

    Args:
        model (`PreTrainedModel`): the target, used as it is.
        input_ids (`torch.Tensor` of shape `(1, t)`): the prompt, as `generate` prepared it.
        generation_config (`GenerationConfig`): prepared by `generate`.
        model_kwargs (`dict`): what `generate` would pass to the model, its cache among it.
        max_nodes (`int`): size of the largest tree to come.
        prompt_logits (`int`): how many of the prompt's last tokens to return logits of.
        hidden_layers (`tuple[int]`): hidden states the generator wants.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        *,
        generation_config: GenerationConfig,
        model_kwargs: dict,
        max_nodes: int,
        prompt_logits: int = 1,
        hidden_layers: tuple[int, ...] = (),
    ):
        self.model = model
        self.input_ids = input_ids
        self.generation_config = generation_config
        self.stock_cache = model_kwargs["cache"]
        self.attention_mask = model_kwargs.get("attention_mask")  # [1, prompt], None where nothing is padded
        self.padding = None  # [prompt], True where padded
        if self.attention_mask is not None:
            self.attention_mask = self.attention_mask.to(model.device)
            self.padding = self.attention_mask[0] == 0
        position_ids = model_kwargs.get("position_ids")  # [1, prompt]
        parameters = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in parameters and position_ids is not None
        self.keeps_logits = "logits_to_keep" in parameters
        self.root_position = int(position_ids[0, -1]) if self.takes_positions else 0
        prompt_length = position_ids.shape[-1] if self.takes_positions else input_ids.shape[1]
        max_new_tokens = generation_config.max_length - input_ids.shape[1]
        self.capacity = prompt_length + min(max_new_tokens, 4096) + max_nodes
        self.cache = open_cache(model, self.stock_cache, capacity=self.capacity)
        self.prefill_kwargs = model_kwargs | {"cache": self.cache.cache}
        if self.keeps_logits:
            self.prefill_kwargs["logits_to_keep"] = prompt_logits
        self.step_kwargs = {name: value for name, value in model_kwargs.items() if name not in SEQUENCE_LONG}
        self.shallow: list[torch.Tensor] = []  # hidden states [m, h] of draft nodes that `run_lower` ran
        self.hidden_layers = hidden_layers
        asked = generation_config.output_hidden_states  # of the caller: all, some or none
        if hidden_layers and asked is not True:
            wanted = {"output_hidden_states": [*(selected_hidden_states(asked) or ()), *hidden_layers]}
            self.step_kwargs |= wanted
            self.prefill_kwargs |= wanted

    @cached_property
    def tree_capable(self) -> bool:
        """Whether it can verify trees, not only chains."""
        return self.cache.tree_capable and self.takes_positions and takes_masks(self.model)

    def check_rotation(self, max_length: int) -> None:
        """Checks that no draft crosses a length at which rotary frequencies change: a block gets those of its last token.

        Args:
            max_length (`int`): tokens the text may have, the prompt's included.

        Raises:
            ValueError: naming that length.
        """
        config = self.model.config.get_text_config(decoder=True)
        rope, prompt = getattr(config, "rope_parameters", None) or {}, self.root_position + 1
        longest = prompt + max_length - self.input_ids.shape[1]
        for kind in (rope, *rope.values()):  # of all layers, or by their type
            match kind:
                case {"rope_type": "dynamic"}:
                    limit = config.max_position_embeddings  # and with every token beyond
                case {"rope_type": "longrope", "original_max_position_embeddings": limit} if prompt <= limit:
                    pass
                case _:
                    continue
            if longest - 1 > limit:  # the last token is never run
                raise ValueError(
                    f"{type(self.model).__name__} rotates by other frequencies in texts of more than {limit} tokens, and this "
                    f"one of {prompt} may grow to {longest}; a draft across that length would change the text: give fewer "
                    "max_new_tokens, or generate without candidate_generator."
                )

    def prefill(self) -> ModelOutput:
        """Runs what the cache does not hold yet of the prompt; the last logits are those after the prompt.

        Raises:
            ValueError: if the model keeps no keys and values.
        """
        outputs = self.model._prefill(self.input_ids, self.generation_config, self.prefill_kwargs)
        cache = outputs.get("cache")
        if cache is None:
            raise ValueError(
                f"{type(self.model).__name__} keeps no keys and values: generate without candidate_generator."
            )
        if cache is not self.cache.cache:  # Phi-3 encodes a long text anew, and goes on with what it then returns
            self.stock_cache, self.cache = cache, open_cache(self.model, cache, capacity=self.capacity)
        self.start = self.cache.length - 1  # the prompt's last token is the root of an empty draft
        return outputs

    def fit(self, tree: DraftTree) -> DraftTree:
        """The tree, or its preferred chain where the target can verify no more than that; moved to the target's device."""
        if not (self.tree_capable or tree.is_chain):
            tree = tree.select(tree.first_path())
        tree.move_to(self.model.device)
        return tree

    def split(self, exit_layer: int) -> None:
        """Lets a generator run the layers below `exit_layer` on its draft's nodes; `verify` then runs only the others.

        Raises:
            ValueError: if the model has no such layer, or its layers cannot be run apart.
        """
        self.exit = Stored()
        self.lower = with_layers(
            self.model, exit_layer, lambda layers: [*layers[:exit_layer], self.exit]
        ).get_decoder()
        self.upper = with_layers(self.model, exit_layer, lambda layers: [self.exit] * exit_layer + layers[exit_layer:])
        self.exit_layer = exit_layer

    def run_lower(self, tokens: torch.Tensor, *, depth: int, seen: torch.Tensor | None) -> torch.Tensor:
        """Hidden states `(m, h)`, at the exit, of the draft's next nodes, whose keys and values stay for `verify`.

        Args:
            tokens (`torch.Tensor` of shape `(m,)`): of nodes that follow those already run.
            depth (`int`): of all of them.
            seen (`torch.Tensor` of shape `(m, n)`, bool, *optional*):
                Which of the n nodes so far each of them sees; None where it is the only one, and sees all.
        """
        kwargs = self.step_kwargs | {"output_hidden_states": False, "output_attentions": False}
        if self.takes_positions:
            kwargs["position_ids"] = torch.full_like(tokens[None], self.root_position + depth)
        num_run = sum(map(len, self.shallow))
        self.start = self.cache.length - num_run
        if not self.tree_capable:
            if self.attention_mask is not None:
                kwargs["attention_mask"] = self.padding_mask(self.start + num_run + 1)
        elif seen is not None or self.padding is not None:
            seen = tokens.new_ones(1, num_run + 1, dtype=torch.bool) if seen is None else seen
            kwargs["attention_mask"] = self.mask(seen)
        self.exit.states = None
        self.lower(input_ids=tokens[None], cache=self.cache.cache, **kwargs)
        self.shallow.append(self.exit.states[0])
        return self.shallow[-1]

    def verify(self, tree: DraftTree) -> ModelOutput:
        """Runs the target over the tree's nodes, behind the rows the cache holds; logits `(1, n, v)`."""
        n, model, kwargs = len(tree), self.model, dict(self.step_kwargs)
        self.start = self.cache.length - sum(map(len, self.shallow))
        if self.shallow:
            model = self.resume(kwargs, num_nodes=n)
        if self.takes_positions:
            kwargs["position_ids"] = (tree.depths + self.root_position)[None]
        if self.keeps_logits:
            kwargs["logits_to_keep"] = n
        if self.tree_capable:
            kwargs["attention_mask"] = self.tree_mask(tree)
        elif self.attention_mask is not None:
            kwargs["attention_mask"] = self.padding_mask(self.start + n)
        return model(input_ids=tree.tokens[None], cache=self.cache.cache, return_dict=True, **kwargs)

    def resume(self, kwargs: dict, *, num_nodes: int) -> PreTrainedModel:
        """What verifies a tree that went through the lower layers: the upper ones, or all where more is to be returned."""
        states, self.shallow = torch.cat(self.shallow), []
        assert len(states) == num_nodes, "a draft that ran the target's first layers must be verified as it is"
        recorded = self.generation_config.output_hidden_states or self.generation_config.output_attentions
        if self.tree_capable and not recorded:
            self.exit.states = states[None]  # [1, n, h]
            kwargs |= {"output_hidden_states": False, "output_attentions": False}
            return self.upper
        for layer in self.cache.cache.layers[: self.exit_layer]:
            layer.crop(-len(states))
        return self.model

    def tree_mask(self, tree: DraftTree) -> torch.Tensor | None:
        """The mask under which nodes see the text, their ancestors and themselves. None where that is all there is."""
        # with a mask, sdpa on a CPU shares each key among its query heads: up to 1.4 times as fast for a single node
        needless = len(tree) == 1 and self.padding is None and self.model.device.type != "cpu"
        return None if needless else self.mask(tree.ancestors)

    def mask(self, seen: torch.Tensor) -> torch.Tensor:
        """Additive mask `(1, 1, m, start + n)` for nodes that see the text, and of the draft what `seen` `(m, n)` says."""
        m, n = seen.shape
        mask = torch.zeros(m, self.start + n, dtype=self.model.dtype, device=seen.device)
        mask[:, self.start :].masked_fill_(~seen, torch.finfo(mask.dtype).min)
        if self.padding is not None:
            mask[:, : len(self.padding)].masked_fill_(self.padding, torch.finfo(mask.dtype).min)
        return mask[None, None]

    def padding_mask(self, length: int) -> torch.Tensor:
        """The mask `(1, length)` of a padded prompt and what follows it."""
        seen = self.attention_mask.new_ones(1, length)
        seen[:, : self.attention_mask.shape[1]] = self.attention_mask
        return seen

    def hidden(self, outputs: ModelOutput) -> tuple[torch.Tensor, ...] | None:
        """The hidden states `(n, h)` that the generator wants, in its order."""
        if not self.hidden_layers or outputs.hidden_states is None:
            return None
        return tuple(outputs.hidden_states[layer][0] for layer in self.hidden_layers)

    @cached_property
    def windows(self) -> list[int | None]:
        """For each layer, how many tokens a token sees, itself included; None for all."""
        layers = self.cache.cache.layers  # fewer than the model has where some read the keys of others of their type
        types = getattr(self.model.config.get_text_config(decoder=True), "layer_types", None) or range(len(layers))
        by_type = {kind: getattr(layer, "sliding_window", None) for kind, layer in zip(types, layers, strict=False)}
        return [by_type.get(kind) for kind in types]

    def keep(self, path: list[int]) -> None:
        """Cuts the last block out of the cache but for the rows of `path`, and moves on behind them."""
        self.cache.keep(self.start, path)
        self.root_position += len(path)

    def close(self) -> None:
        """Leaves the stock cache as plain decoding would have left it."""
        self.cache.store(self.stock_cache)

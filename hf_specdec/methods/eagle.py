"""EAGLE-1, -2 and -3 (Li et al. 2024, 2024, 2025). One small layer drafts in the target's own feature space.

It reads the target's hidden states beside the next token's embedding, and feeds its own output back for the levels below.
"""

import math
from collections.abc import Sequence

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from hf_specdec.cache import TreeCache
from hf_specdec.checkpoints import load_eagle
from hf_specdec.drafter import Drafter, DrafterConfig, check_ids, copy_scale, narrowed, rotate, target_fields
from hf_specdec.generator import SpecGenerator, Step
from hf_specdec.models import EMBEDDED_HEADS
from hf_specdec.tree import DraftTree

# EAGLE-1's tree, 25 nodes: for each, the place of each token on its path among the likeliest children of the one before
EAGLE_1_TREE = [
    (0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (0, 0, 0), (0, 0, 1), (0, 0, 2),
    (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0),
    (0, 0, 0, 0, 1),
]  # fmt: skip


@strict
class EagleConfig(DrafterConfig):
    """What an EAGLE head's weights depend on.

    Args:
        fused (`bool`): EAGLE-3: features of several layers fused, inputs normed apart, output normed before the lm_head.
        fc_bias, attention_bias (`bool`): whether `fc`, and q, k and v, have biases.
        num_features (`int`): target layers that are fused.
        fc_norm, norm_before_fc (`bool`): whether the features are normed before `fc`: each by itself, or all joined.
        norm_before_residual (`bool`): whether the residual is the normed state.
        norm_output (`bool`): whether the output is normed before the lm_head.
        feed_back_normed (`bool`): whether the next level is fed the normed output.
        own_lm_head (`bool`): whether the output matrix is the head's own, or the target's rows are used.
        own_embeddings (`bool`): whether the head brings its own input embeddings.
    """

    model_type = "specdec_eagle"

    fused: bool = False
    hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    fc_bias: bool = True
    attention_bias: bool = False
    num_features: int = 1
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = True
    feed_back_normed: bool = False
    own_lm_head: bool = False
    own_embeddings: bool = False

    def validate_draft_vocabulary(self) -> None:
        """Raises ValueError for a draft vocabulary larger than the target's."""
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= max(self.target_vocab_size, 1):
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} of {self.target_vocab_size} target ids.")


class EagleLayer(nn.Module):
    """A decoder layer whose attention reads the embedding and the state: joined by `fc` before (EAGLE-1, -2) or here (-3)."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        h, d = config.hidden_size, config.head_dim
        width = 2 * h if config.fused else h
        self.q_proj = nn.Linear(width, config.num_attention_heads * d, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * d, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * d, bias=config.attention_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * d, h, bias=False)
        self.gate_proj = nn.Linear(h, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(h, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, h, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(h, eps=config.rms_norm_eps)
        if config.fused:
            self.input_layernorm = nn.RMSNorm(h, eps=config.rms_norm_eps)
            self.hidden_norm = nn.RMSNorm(h, eps=config.rms_norm_eps)
        self.act = ACT2FN[config.hidden_act]
        self._joined: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def join(self) -> None:
        """For drafting: queries, keys and values by one product, and so gates and ups, until the weights change."""
        self._joined = [joined(self.q_proj, self.k_proj, self.v_proj), joined(self.gate_proj, self.up_proj)]

    def _apply(self, *args, **kwargs):
        self._joined = []  # they do not move with the layer
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args, **kwargs):
        self._joined = []
        return super()._load_from_state_dict(*args, **kwargs)

    def project(self, embedded: torch.Tensor, state: torch.Tensor, positions: torch.Tensor):
        """Queries, keys, values `(b, heads, n, d)` and the residual, for inputs `(b, n, h)` at `positions` `(b, n)`."""
        if self.config.fused:
            normed = self.hidden_norm(state)
            inputs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
            residual = normed if self.config.norm_before_residual else state
        else:
            inputs = residual = state  # `fc` joined the embedding and the state
        d, heads, kv = self.config.head_dim, self.config.num_attention_heads, self.config.num_key_value_heads
        if torch.is_grad_enabled():
            self._joined = []
        if self._joined:
            rows = F.linear(inputs, *self._joined[0])
        else:
            rows = torch.cat([projection(inputs) for projection in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        rows = rows.view(*inputs.shape[:2], -1, d).transpose(1, 2)  # [b, heads + 2 kv, n, d]
        turned, values = rows.split([heads + kv, kv], dim=1)
        half = self.config.head_dim // 2
        inverse = self.config.rope_theta ** -(torch.arange(half, device=inputs.device).float() / half)
        angles = positions[:, None, :, None].float() * inverse  # [b, 1, n, d/2]
        cos, sin = angles.cos().to(inputs.dtype), angles.sin().to(inputs.dtype)
        queries, keys = rotate(turned, cos, sin).split([heads, kv], dim=1)
        return queries, keys, values, residual

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The layer's output `(b, n, h)` from the attention's `(b, heads, n, d)`."""
        hidden = residual + self.o_proj(attended.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(hidden)
        if self._joined:
            gate, up = F.linear(normed, *self._joined[1]).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(normed), self.up_proj(normed)
        return hidden + self.down_proj(self.act(gate) * up)


class EagleHead(Drafter):
    """The drafting layer of EAGLE-1 and -2 (`fused=False`) or EAGLE-3, with a full or a reduced draft vocabulary."""

    config_class = EagleConfig

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        h, features, eps = config.hidden_size, config.num_features * config.target_hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(features if config.fused else 2 * h, h, bias=config.fc_bias and not config.fused)
        self.layer = EagleLayer(config)
        if config.fused:
            self.norm = nn.RMSNorm(h, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in range(config.num_features)
            )
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(features, eps=eps)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.target_vocab_size, h)
        if config.own_lm_head:
            self.output = nn.Linear(h, config.draft_vocab_size or config.target_vocab_size, bias=False)
        self.post_init()

    @classmethod
    def for_target(
        cls, model: PreTrainedModel, *, draft_ids: torch.Tensor | None = None, fused: bool = False, **options
    ) -> "EagleHead":
        config = model.config.get_text_config(decoder=True)
        layers = config.num_hidden_layers
        heads = config.num_attention_heads
        fields = target_fields(model) | {
            "fused": fused,
            "feature_layers": fused_layers(layers) if fused else [layers],
            "num_features": len(fused_layers(layers)) if fused else 1,
            "draft_vocab_size": None if draft_ids is None else len(draft_ids),
            "hidden_size": config.hidden_size,
            "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        }
        head = cls(EagleConfig(**fields | options))
        if draft_ids is not None:
            head.draft_ids.copy_(draft_ids)
        head.begin_like(model)
        head.attach(model)
        return head

    @torch.no_grad()
    def begin_like(self, model: PreTrainedModel) -> None:
        """Starts by passing the last feature through: the target's last layer where shapes agree, its two outputs at zero."""
        h = self.config.hidden_size
        own, decoder = dict(self.layer.named_parameters()), model.get_decoder()
        layers = next(module for module in decoder.children() if isinstance(module, nn.ModuleList))
        for name, parameter in layers[-1].named_parameters():
            mine = own.get(".".join(name.split(".")[-2:]))
            if mine is not None:
                # of a fused input, the state's part
                mine = mine[:, -parameter.shape[1] :] if parameter.dim() == 2 else mine
                if mine.shape == parameter.shape:
                    mine.copy_(parameter)
        self.layer.o_proj.weight.zero_()
        self.layer.down_proj.weight.zero_()
        if h == self.config.target_hidden_size:
            if self.config.fused:
                self.fc.weight.zero_()
                copy_scale(self.norm, getattr(decoder, "norm", None))
            self.fc.weight[:, -h:].copy_(torch.eye(h))

    def attach(self, model: PreTrainedModel) -> None:
        super().attach(model)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self._num_target_layers = layers
        self.feature_layers = self.config.feature_layers or (fused_layers(layers) if self.config.fused else [layers])
        if len(self.feature_layers) != self.config.num_features or max(self.feature_layers) > layers:
            raise ValueError(
                f"this head reads {self.config.num_features} of the target's hidden states, {self.feature_layers}, but "
                f"{model.config.name_or_path or type(model).__name__} has {layers} layers: take the head's own target."
            )
        if self.draft_ids is not None:
            check_ids(self.draft_ids, self.config.target_vocab_size)
        output = self.output if self.config.own_lm_head else narrowed(self.lm_head, self.draft_ids)
        self._rows = [output.weight, output.bias]  # [w, h] and [w], a list so that borrowed rows are not saved

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (*self.feature_layers, self._num_target_layers)

    def states(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """The states `(b, n, h)` to begin with, from the target's features at `feature_layers`, each `(b, n, h)`."""
        if not self.config.fused:
            return features[0]
        if self.config.fc_norm:
            features = [norm(layer) for norm, layer in zip(self.fc_norm, features, strict=True)]
        joined = torch.cat(list(features), dim=-1)
        return self.fc(self.input_norm(joined) if self.config.norm_before_fc else joined)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Input embeddings of target ids, the target's or the head's own."""
        return self.embed_tokens(tokens) if self.config.own_embeddings else self.embeddings(tokens)

    def forward(
        self,
        tokens: torch.Tensor,
        state: torch.Tensor,
        positions: torch.Tensor,
        rows: TreeCache,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One block through the layer, its keys and values appended to `rows`.

        Args:
            tokens (`torch.Tensor` of shape `(n,)`): the token after each state.
            state (`torch.Tensor` of shape `(n, h)`): of the token before each.
            positions (`torch.Tensor` of shape `(n,)`).
            mask (`torch.Tensor` of shape `(n, rows)`, *optional*):
                Additive. None for the text's tokens: only what is behind the last one is computed, which sees all rows.

        Returns:
            The states `(n, h)` to feed back, and the draft logits `(n, w)`; n is 1 without a mask.
        """
        embedded, state = self.embed(tokens)[None], state[None]
        if not self.config.fused:
            state = self.fc(torch.cat([embedded, state], dim=-1))
        queries, keys, values, residual = self.layer.project(embedded, state, positions[None])
        keys, values = rows.update(keys, values, 0)
        if mask is None:
            queries, residual = queries[:, :, -1:], residual[:, -1:]
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        output = self.layer.finish(attended, residual)[0]
        return self.fed_back(output), self.logits(output)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Draft logits `(..., w)` of the layer's outputs `(..., h)`."""
        normed = self.norm(output) if self.config.fused and self.config.norm_output else output
        return linear(normed, *self._rows)

    def fed_back(self, output: torch.Tensor) -> torch.Tensor:
        """The state that the next level begins with."""
        return self.norm(output) if self.config.feed_back_normed else output

    def loss(
        self,
        input_ids: torch.Tensor,
        hidden: Sequence[torch.Tensor],
        loss_mask: torch.Tensor,
        *,
        unroll: int = 3,
        decay: float = 0.8,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Soft cross-entropy to the target's distribution, over `unroll` levels (EAGLE-3's training-time test).

        Index t holds the feature of token t and the token t+1; level i reads token t+1+i and the state of level i-1, and
        predicts what the target says after it. It attends to the true rows up to t and to its own levels at t. What stands
        before the batch's first answer is only attended to: there keys and values are all that is computed.
        """
        dtype = self.fc.weight.dtype
        state = self.states([layer[:, :-1].to(dtype) for layer in hidden[:-1]])  # [b, t-1, h]
        length = state.shape[1]
        positions = torch.arange(length, device=state.device).expand(len(state), -1)
        causal = torch.ones(length, length, dtype=torch.bool, device=state.device).tril()
        trained = F.pad(loss_mask[:, 1:], (0, 1))  # [b, t], is what follows the token to be predicted
        start = max(0, int(trained[:, 1:].any(dim=0).long().argmax()) + 1 - unroll)  # the first index that predicts
        with torch.no_grad():
            lm_head = narrowed(self.lm_head, self.draft_ids)
            p = linear(hidden[-1][trained], lm_head.weight, lm_head.bias).float().softmax(dim=-1)  # [m, w]
            best = p.argmax(dim=-1)
        numbers = trained.flatten().cumsum(0).view_as(trained) - 1  # [b, t], rows of p
        level_keys, level_values, total, metrics = [], [], 0.0, {}
        for level in range(min(unroll, length - 1)):
            begin = start if level else 0  # the state begins there from the second level on
            tokens = F.pad(input_ids[:, 1 + level + begin :], (0, level))  # the end wraps into masked places
            embedded = self.embed(tokens).detach().to(dtype)
            inputs = state if self.config.fused else self.fc(torch.cat([embedded, state], dim=-1))
            queries, keys, values, residual = self.layer.project(embedded, inputs, positions[:, begin:] + level)
            level_keys.append(keys)
            level_values.append(values)
            queries, residual = queries[:, :, start - begin :], residual[:, start - begin :]
            output = self.layer.finish(attend_levels(queries, level_keys, level_values, causal[start:]), residual)
            state = self.fed_back(output)  # [b, t-1-start, h]
            wanted = F.pad(trained[:, 1 + level + start :], (0, level))  # [b, t-1-start], is token t+2+level trained
            if not wanted.any():
                continue
            rows = F.pad(numbers[:, 1 + level + start :], (0, level))[wanted]
            log_q = self.logits(output[wanted]).float().log_softmax(dim=-1)  # [m', w]
            total = total + decay**level * -(p[rows] * log_q).sum(-1).mean()
            metrics[f"top1_{level + 1}"] = (log_q.argmax(-1) == best[rows]).float().mean()
        return total, metrics


def joined(*maps: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of one linear map in place of several of the same inputs."""
    weight = torch.cat([each.weight.detach() for each in maps])
    return weight, None if maps[0].bias is None else torch.cat([each.bias.detach() for each in maps])


def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`states` through a linear map, in their dtype."""
    return F.linear(states, weight.to(states.dtype), None if bias is None else bias.to(states.dtype))


def fused_layers(num_layers: int) -> list[int]:
    """The target hidden states that EAGLE-3 fuses: low, middle, high."""
    return sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 1)})


def attend_levels(
    queries: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], causal: torch.Tensor
) -> torch.Tensor:
    """Attention of one level: causal over level 0's rows, and at its own index over the levels after it."""
    groups = queries.shape[1] // keys[0].shape[1]
    keys = [rows.repeat_interleave(groups, dim=1) for rows in keys]
    values = [rows.repeat_interleave(groups, dim=1) for rows in values]
    scale = queries.shape[-1] ** -0.5
    scores = (queries @ keys[0].transpose(2, 3) * scale).masked_fill(~causal, -torch.inf)  # [b, heads, t, t]
    own = [(queries * rows).sum(-1, keepdim=True) * scale for rows in keys[1:]]  # each [b, heads, t, 1]
    weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1)
    attended = weights[..., : scores.shape[-1]] @ values[0]
    for i, rows in enumerate(values[1:]):
        attended = attended + weights[..., scores.shape[-1] + i, None] * rows
    return attended


def static_levels(paths: Sequence[tuple[int, ...]], *, top_k: int) -> list[tuple[list[int], list[int]]]:
    """For each level of a static tree: which of its candidates, `top_k` of each expanded node, are nodes, and are expanded."""
    nodes, parents, levels, frontier = set(paths), {path[:-1] for path in paths}, [], [()]
    while frontier:
        candidates = [(*path, place) for path in frontier for place in range(top_k)]
        kept = [i for i, path in enumerate(candidates) if path in nodes]
        expanded = [i for i in kept if candidates[i] in parents]
        levels.append((kept, expanded))
        frontier = [candidates[i] for i in expanded]
    return levels


class EagleGen(SpecGenerator):
    """Drafts a tree level by level (EAGLE-2): the likeliest nodes are expanded, and the likeliest of all are verified.

    Args:
        head (`EagleHead` or `str`, *optional*):
            The head, or its folder or Hub id. None is the one that ships for the embedded model.
        top_k (`int`): nodes expanded per level, and children considered of each; 1 drafts chains.
        depth (`int`): levels.
        max_nodes (`int`): nodes verified, the root included.
        min_probability (`float`): on a CPU, nodes estimated less likely than this are not verified.
        min_level_probability (`float`):
            On a CPU, a further level is drafted only where the nodes it would expand are together at least this likely. It
            pays above about 2 T c: T tokens per step, and c what a level costs in target steps.
        tree (`str`): "dynamic", or "static" for EAGLE-1's tree of 25 nodes, whose shape the options above do not change.

    Raises:
        ValueError: if a count is below 1, or for another tree; at `bind`, if the head was made for another target.
    """

    name = "eagle"
    drafter_argument = "an EAGLE head: a folder or a Hub id"
    drafter_optional = True
    head_class = EagleHead

    def __init__(
        self,
        head: EagleHead | str | None = None,
        *,
        top_k: int = 8,
        depth: int = 6,
        max_nodes: int = 32,
        min_probability: float = 0.015,
        min_level_probability: float = 0.25,
        tree: str = "dynamic",
    ):
        super().__init__()
        self.check_counts(top_k=top_k, depth=depth, max_nodes=max_nodes)
        if tree not in ("dynamic", "static"):
            raise ValueError(f"EagleGen(tree={tree!r}): it must be 'dynamic' or 'static'.")
        self.levels: list[tuple[list[int], list[int]]] | None = None  # of a static tree
        if tree == "static":
            top_k = 1 + max(map(max, EAGLE_1_TREE))
            self.levels = static_levels(EAGLE_1_TREE, top_k=top_k)
            depth, max_nodes = len(self.levels), 1 + len(EAGLE_1_TREE)
        self.head = head if head is not None else str(EMBEDDED_HEADS / "eagle3")
        self.top_k = top_k
        self.depth = depth
        self.max_nodes = max_nodes
        self.least_score = math.log(min_probability) if min_probability > 0 else -math.inf
        self.min_level_probability = min_level_probability
        self.chain_only = top_k == 1

    def attach(self, model: PreTrainedModel) -> None:
        if isinstance(self.head, str):
            self.head = load_eagle(self.head, EagleHead)
        self.head.attach(model)
        self.head.to(device=model.device, dtype=model.dtype).eval()
        self.head.layer.join()
        self.hidden_layers = tuple(self.head.feature_layers)

    def begin(self, input_ids: torch.Tensor, **call) -> None:
        self.rows = TreeCache(1, capacity=input_ids.shape[1] + 1024)  # of the text, and of the draft in the making
        self.num_text_rows = 0
        self.prompt: torch.Tensor | None = input_ids[0]
        self.new: tuple[torch.Tensor, torch.Tensor] | None = None

    def end(self) -> None:
        self.rows = self.new = None

    def observe(self, step: Step) -> None:
        """Keeps the accepted tokens' true features, each with the token that came after it."""
        if step.hidden is None:
            return
        after = torch.tensor(step.tokens, device=self.head.device)
        features = step.hidden
        if (
            self.prompt is not None
        ):  # the prefill's features: of the prompt's last tokens, or of embeddings without ids
            known = self.prompt.to(self.head.device)[-len(features[0]) :]
            after = torch.cat([known[1:], after])
            features = [layer[-len(after) :] for layer in features]
            self.prompt = None
        else:
            path = torch.tensor(step.path, device=self.head.device)
            features = [layer[path] for layer in features]
        new = (after, self.head.states([layer[None] for layer in features])[0])
        # a hybrid may not have asked since the last step: then its tokens wait as well
        self.new = new if self.new is None else tuple(map(torch.cat, zip(self.new, new, strict=True)))

    def draft(self, input_ids: torch.Tensor, *, max_depth: int) -> DraftTree:
        root = input_ids[0, -1:].to(self.head.device)
        if self.new is None:  # transformers' own loop shows no features
            return DraftTree(root, root.new_tensor([-1]))
        tokens, state = self.new
        n, start = len(tokens), self.num_text_rows
        self.rows.keep(start, [])  # the last draft's rows go, and the text's new rows come with their true features
        positions = torch.arange(start, start + n, device=root.device)
        state, logits = self.head(tokens, state, positions, self.rows, None)
        self.stats.part("head")
        self.num_text_rows, self.new = start + n, None
        return self.grow(root, state, logits, depth=min(self.depth, max_depth))

    def grow(self, root: torch.Tensor, state: torch.Tensor, logits: torch.Tensor, *, depth: int) -> DraftTree:
        """The tree under `root`, from the state `(1, h)` and the logits `(1, w)` behind it; built on the device."""
        k, device = min(self.top_k, logits.shape[-1]), root.device
        scores = torch.zeros(1, device=device)  # [f] log-probability of each expanded node
        frontier = torch.full((1,), -1, device=device)  # [f] their numbers among all candidates; -1 is the root
        above = torch.zeros(1, 0, dtype=torch.bool, device=device)  # [f, drafted rows] which of them lie above
        all_tokens, all_scores, all_parents, created, kept = [], [], [], 0, []
        for level in range(depth):
            likely, ids = logits.float().log_softmax(dim=-1).topk(k, dim=-1)  # [f, k]
            candidates = (scores[:, None] + likely).flatten()  # [f * k]
            all_tokens.append(self.head.target_ids(ids).flatten())
            all_scores.append(candidates)
            all_parents.append(frontier.repeat_interleave(k))
            if self.levels is None:
                scores, best = candidates.topk(min(k, len(candidates)))
                # on an accelerator the host's look would cost more than the level
                enough = device.type == "cpu" and not self.worth_a_level(scores)
            else:
                kept += [created + i for i in self.levels[level][0]]
                best = torch.tensor(self.levels[level][1], dtype=torch.int64, device=device)
                scores, enough = candidates[best], False
            if level + 1 == depth or enough:
                break
            parent = best // k
            frontier, created = created + best, created + len(candidates)
            own = torch.eye(len(best), dtype=torch.bool, device=device)
            above = torch.cat([above[parent], own], dim=-1)
            mask = state.new_zeros(len(best), self.num_text_rows + above.shape[-1])
            mask[:, self.num_text_rows :].masked_fill_(~above, -torch.inf)
            positions = torch.full((len(best),), self.num_text_rows + level, device=device)
            self.stats.part("tree")
            state, logits = self.head(all_tokens[-1][best], state[parent], positions, self.rows, mask)
            self.stats.part("head")
        scores = torch.cat(all_scores)
        kept = torch.tensor(kept, device=device) if kept else self.likeliest(scores)
        return self.select(root, torch.cat(all_tokens), scores, torch.cat(all_parents), kept)

    def worth_a_level(self, scores: torch.Tensor) -> bool:
        """Whether nodes of these log-probabilities are together likely enough to be expanded."""
        return float(scores[scores >= self.least_score].exp().sum()) >= self.min_level_probability

    def likeliest(self, scores: torch.Tensor) -> torch.Tensor:
        """The likeliest candidates `(m,)`: a parent is never less likely than its child and was made before it."""
        order = scores.sort(descending=True, stable=True).indices[: self.max_nodes - 1]
        if order.device.type == "cpu":  # an accelerator would have to tell the host how many there are
            order = order[scores[order] >= self.least_score]
        return order.sort().values

    def select(
        self,
        root: torch.Tensor,
        tokens: torch.Tensor,
        scores: torch.Tensor,
        parents: torch.Tensor,
        kept: torch.Tensor,
    ) -> DraftTree:
        """The tree of the `kept` candidates, in the order they were made."""
        places = torch.zeros(len(scores) + 1, dtype=torch.int64, device=root.device)  # the root's, -1, is the last one
        places[kept] = torch.arange(1, len(kept) + 1, device=root.device)
        tree = DraftTree(torch.cat([root, tokens[kept]]), torch.cat([root.new_tensor([-1]), places[parents[kept]]]))
        tree.probabilities = torch.cat([scores.new_zeros(1), scores[kept]]).exp()
        self.stats.part("tree")
        return tree

"""Kangaroo (Liu et al. 2024). The target's own first layers draft, with one small adapter in place of all the others.

What they compute for a draft stays for its verification, which runs only the layers above. Drafting stops early where the
adapter is unsure.
"""

import math
from collections.abc import Sequence

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_specdec.cache import TreeCache
from hf_specdec.checkpoints import convert, load_published
from hf_specdec.drafter import Drafter, DrafterConfig, copy_scale, narrowed, rotate, target_fields
from hf_specdec.generator import SpecGenerator, Step
from hf_specdec.split import layers_path
from hf_specdec.target import Target
from hf_specdec.tree import DraftTree


@strict
class KangarooConfig(DrafterConfig):
    """What an adapter's weights depend on.

    Args:
        exit_layer (`int`): target layers that run before the adapter, at least 1 and fewer than all.
        num_attention_heads, num_key_value_heads, head_dim (`int`): of the adapter's attention.
        attention_bias (`bool`): whether q, k and v have biases.
    """

    model_type = "specdec_kangaroo"

    exit_layer: int = 2
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


class KangarooHead(Drafter):
    """The adapter, x + MHA(norm(x)) and a last norm, on the hidden states x at the exit; logits by the target's lm_head."""

    config_class = KangarooConfig

    def __init__(self, config: KangarooConfig):
        super().__init__(config)
        h, d = config.target_hidden_size, config.head_dim
        self.input_layernorm = nn.RMSNorm(h, eps=config.rms_norm_eps)
        self.q_proj = nn.Linear(h, config.num_attention_heads * d, bias=config.attention_bias)
        self.k_proj = nn.Linear(h, config.num_key_value_heads * d, bias=config.attention_bias)
        self.v_proj = nn.Linear(h, config.num_key_value_heads * d, bias=config.attention_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * d, h, bias=False)
        self.norm = nn.RMSNorm(h, eps=config.rms_norm_eps)
        self.post_init()

    @classmethod
    def for_target(
        cls,
        model: PreTrainedModel,
        *,
        draft_ids: torch.Tensor | None = None,
        exit_layer: int = 2,
        init_layer: int | None = None,
        **options,
    ) -> "KangarooHead":
        """A new adapter for `model`, its attention that of the target's layer `init_layer` where it has the same parts.

        Args:
            init_layer (`int`, *optional*): None is the first layer after the exit.

        Raises:
            ValueError: if the target has no layer after the exit.
        """
        config = model.config.get_text_config(decoder=True)
        layers = model.get_submodule(layers_path(model, exit_layer))
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        fields = target_fields(model) | {
            "exit_layer": exit_layer,
            "feature_layers": [exit_layer],
            "draft_vocab_size": None if draft_ids is None else len(draft_ids),
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
        }
        layer = layers[exit_layer if init_layer is None else init_layer]
        tensors = {name.partition(".")[2]: tensor for name, tensor in layer.state_dict().items() if "_attn." in name}
        fields["attention_bias"] = "q_proj.bias" in tensors
        head = cls(KangarooConfig(**fields | options)).to(model.device)
        if draft_ids is not None:
            head.draft_ids.copy_(draft_ids)
        head.attach(model)
        own = {name: tensor.shape for name, tensor in head.state_dict().items() if "_proj" in name}
        if own == {name: tensor.shape for name, tensor in tensors.items()}:
            head.load_state_dict(tensors, strict=False)
        else:  # another kind of attention: begin with none at all
            nn.init.zeros_(head.o_proj.weight)
        copy_scale(head.input_layernorm, getattr(layer, "input_layernorm", None))
        norms = [module for module in model.get_decoder().children() if "RMSNorm" in type(module).__name__]
        copy_scale(head.norm, norms[-1] if norms else None)
        return head

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor], config: dict, model: PreTrainedModel) -> "KangarooHead":
        """The adapter of the authors' files, a Llama config with one layer.

        They choose the exit by the target's name, 3 for their 13B model and 2 for 7B; `exit_layer` in the config overrides.
        """
        names = {f"{name}_proj.weight": f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"}
        names |= {"input_layernorm.weight": "layers.0.input_layernorm.weight", "norm.weight": "norm.weight"}
        heads, hidden_size = config.get("num_attention_heads"), config.get("hidden_size")
        if not heads or not hidden_size or names["k_proj.weight"] not in tensors:
            raise ValueError(
                f"this is no Kangaroo adapter, a Llama config beside the tensors {', '.join(names.values())}; it holds "
                f"{', '.join(sorted(tensors)[:8])} ..."
            )
        head_dim = config.get("head_dim") or hidden_size // heads
        exit_layer = config.get("exit_layer", 3 if hidden_size == 5120 else 2)
        config = KangarooConfig(
            target_hidden_size=hidden_size,
            target_num_layers=model.config.get_text_config(decoder=True).num_hidden_layers,
            target_vocab_size=config.get("vocab_size", 0),
            exit_layer=exit_layer,
            feature_layers=[exit_layer],
            num_attention_heads=heads,
            num_key_value_heads=len(tensors[names["k_proj.weight"]]) // head_dim,
            head_dim=head_dim,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=config.get("rope_theta") or 10000.0,
        )
        return convert(cls(config), tensors, names)

    def attach(self, model: PreTrainedModel) -> None:
        super().attach(model)
        layers_path(model, self.config.exit_layer)
        self._narrowed = [narrowed(self.lm_head, self.draft_ids)]  # in a list, so that it is not saved with the head

    def project(
        self, states: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values `(b, heads, n, d)` of states `(b, n, h)` at positions `(n,)`."""
        normed, d = self.input_layernorm(states), self.config.head_dim
        inverse = self.config.rope_theta ** -(torch.arange(0, d, 2, device=states.device).float() / d)
        angles = positions[:, None].float() * inverse  # [n, d/2]
        cos, sin = angles.cos().to(normed.dtype), angles.sin().to(normed.dtype)
        queries, keys, values = (
            projection(normed).unflatten(-1, (-1, d)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(queries, cos, sin), rotate(keys, cos, sin), values

    def adapt(self, states: torch.Tensor, queries: torch.Tensor, *rows: torch.Tensor, **attention) -> torch.Tensor:
        """What the adapter gives in place of the target's last hidden states, `(b, n, h)`."""
        attended = F.scaled_dot_product_attention(queries, *rows, enable_gqa=True, **attention)
        return self.norm(states + self.o_proj(attended.transpose(1, 2).flatten(2)))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits `(..., w)` of last hidden states, the adapter's or the target's own: by the target's lm_head."""
        return self._narrowed[0](states.to(self._narrowed[0].weight.dtype))

    def forward(
        self, states: torch.Tensor, positions: torch.Tensor, rows: TreeCache, *, seen: torch.Tensor | None
    ) -> torch.Tensor:
        """Draft logits `(n, w)` behind nodes with states `(n, h)` at the exit, whose keys and values are appended to `rows`.

        Args:
            seen (`torch.Tensor` of shape `(n, rows)`, bool, *optional*): rows each node sees; None is all.
        """
        states = states[None].to(self.norm.weight.dtype)
        queries, keys, values = self.project(states, positions)
        keys, values = rows.update(keys, values, 0)
        return self.logits(self.adapt(states, queries, keys, values, attn_mask=seen)[0])

    def read(self, states: torch.Tensor, positions: torch.Tensor, rows: TreeCache) -> None:
        """Appends to `rows` the keys and values of tokens behind which nothing is to be drafted."""
        _, keys, values = self.project(states[None].to(self.norm.weight.dtype), positions)
        rows.update(keys, values, 0)

    def loss(
        self, input_ids: torch.Tensor, hidden: Sequence[torch.Tensor], loss_mask: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Soft cross-entropy to the target's own distribution after each token whose successor is one of an answer."""
        states = hidden[0][:, :-1].to(self.norm.weight.dtype)  # [b, t-1, h], at the exit
        wanted = loss_mask[:, 1:]  # [b, t-1], is the token after this one to be predicted
        if not wanted.any():
            return states.new_zeros((), dtype=torch.float32), {}
        with torch.no_grad():
            p = self.logits(hidden[-1][:, :-1][wanted]).float().softmax(dim=-1)  # [m, w]
        queries, keys, values = self.project(states, torch.arange(states.shape[1], device=states.device))
        adapted = self.adapt(states, queries, keys, values, is_causal=True)
        logits = self.logits(adapted[wanted]).float()  # [m, w]
        loss = -(p * logits.log_softmax(dim=-1)).sum(-1).mean()
        return loss, {"top1": (logits.argmax(-1) == p.argmax(-1)).float().mean()}


class KangarooGen(SpecGenerator):
    """Drafts with the target's first layers and an adapter, until it is unsure (double early exit); chains or trees.

    The text does not depend on the exit layer, the adapter or the tree: the whole target verifies every token.

    Args:
        head (`KangarooHead` or `str`): the adapter, or its folder or Hub id (the authors' files as well).
        max_draft_tokens (`int`): longest path.
        threshold (`float`): drafting stops behind the first level whose likeliest token has less than this probability.
        width (`int`): most nodes of a level; 1 drafts chains, as published.
        min_probability (`float`): in a level only the likeliest node may be estimated less likely than this.

    Raises:
        ValueError: if a count is below 1; at `bind`, if the adapter was made for another target.
    """

    name = "kangaroo"
    drafter_argument = "a Kangaroo adapter: a folder or a Hub id"
    head_class = KangarooHead
    whole_draft_only = True  # the rows that it leaves in the target's cache are those of its own draft

    def __init__(
        self,
        head: KangarooHead | str,
        *,
        max_draft_tokens: int = 6,
        threshold: float = 0.6,
        width: int = 1,
        min_probability: float = 0.05,
    ):
        super().__init__()
        self.check_counts(max_draft_tokens=max_draft_tokens, width=width)
        self.head = head
        self.max_draft_tokens = max_draft_tokens
        self.width = width
        self.least_confidence, self.least_score = (
            math.log(probability) if probability > 0 else -math.inf for probability in (threshold, min_probability)
        )
        self.chain_only = width == 1
        self.max_nodes = 1 + width * max_draft_tokens

    def attach(self, model: PreTrainedModel) -> None:
        if isinstance(self.head, str):
            self.head = load_published(self.head, KangarooHead, model).to(model.dtype)
        self.head.attach(model)
        self.head.to(model.device).eval()
        self.hidden_layers = (self.head.config.exit_layer,)

    def share(self, target: Target) -> None:
        target.split(self.head.config.exit_layer)
        self.target = target

    def begin(self, input_ids: torch.Tensor, **call) -> None:
        self.rows = TreeCache(1, capacity=input_ids.shape[1] + 1024)  # the adapter's
        self.knows_text = False

    def end(self) -> None:
        self.target = self.rows = None

    def observe(self, step: Step) -> None:
        """Cuts the adapter's rows back to the text; they need no rebuilding, being made from the target's own states."""
        if self.knows_text:
            self.rows.keep(self.num_text_rows, step.path)
        elif step.hidden is not None:  # the prefill's; transformers' own loop shows none
            states = step.hidden[0]
            self.head.read(states, torch.arange(len(states), device=states.device), self.rows)
            self.knows_text = True
        self.num_text_rows = self.rows.length

    def draft(self, input_ids: torch.Tensor, *, max_depth: int) -> DraftTree:
        device = self.head.device  # the target's, where the prompt need not be
        tokens, parents, scores = [int(input_ids[0, -1])], [-1], [0.0]  # scores: log-probabilities
        if not self.knows_text:
            return DraftTree.chain(tokens, device=device)
        max_depth = min(max_depth, self.max_draft_tokens)
        width = self.width if self.target.tree_capable else 1
        above = torch.eye(
            1 + width * max_depth, dtype=torch.bool, device=device
        )  # [n, n], is node j node i or above it
        first, sure = 0, True
        for depth in range(max_depth + 1):
            ids = torch.tensor(tokens[first:], device=device)
            seen = above[first : len(tokens), : len(tokens)]
            logits = self.run(ids, depth=depth, seen=None if width == 1 else seen, drafting=sure and depth < max_depth)
            if logits is None:
                break
            children, sure = self.likeliest(logits, scores, first, width=width)
            first = len(tokens)
            for score, parent, token in children:
                tokens.append(token)
                parents.append(parent)
                scores.append(score)
            above[first : len(tokens)] |= above[torch.tensor(parents[first:], device=device)]
        tree = DraftTree.from_lists(tokens, parents, device=device)
        tree.ancestors = above[: len(tokens), : len(tokens)]
        tree.probabilities = [math.exp(score) for score in scores]
        self.stats.part("tree")
        return tree

    def run(
        self, tokens: torch.Tensor, *, depth: int, seen: torch.Tensor | None, drafting: bool
    ) -> torch.Tensor | None:
        """Draft logits `(m, w)` behind a level's nodes, None if not `drafting`; their rows stay for the verification."""
        self.stats.part("tree")
        states = self.target.run_lower(tokens, depth=depth, seen=seen)  # [m, h]
        self.stats.part("layers")
        positions = torch.full_like(tokens, self.num_text_rows + depth)
        if not drafting:
            return self.head.read(states, positions, self.rows)
        if seen is not None:
            seen = F.pad(seen, (self.num_text_rows, 0), value=True)
        logits = self.head(states, positions, self.rows, seen=seen)
        self.stats.part("head")
        return logits

    def likeliest(
        self, logits: torch.Tensor, scores: list[float], first: int, *, width: int
    ) -> tuple[list[tuple[float, int, int]], bool]:
        """The next level: score, parent and token of each node, likeliest first, and whether to go on behind it.

        Args:
            logits (`torch.Tensor` of shape `(m, w)`): behind the last level, whose nodes begin with number `first`.
            scores (`list[float]`): of all nodes.
        """
        likely, ids = logits.float().log_softmax(dim=-1).topk(min(width, logits.shape[-1]), dim=-1)  # [m, k]
        # a read per level, to see whether to stop; ids are exact in float32 up to 2^24
        likely, ids = torch.stack([likely, self.head.target_ids(ids).float()]).tolist()
        children = [
            (scores[first + i] + score, first + i, int(token), score)
            for i in range(len(ids))
            for score, token in zip(likely[i], ids[i], strict=True)
        ]
        children.sort(key=lambda child: -child[0])
        best, sure = children[0], children[0][3] >= self.least_confidence
        return [child[:3] for child in children[:width] if child is best or child[0] >= self.least_score], sure

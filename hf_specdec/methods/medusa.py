"""Medusa (Cai et al. 2024). Several small heads on the target's last hidden state each predict one of the tokens to come.

All heads run at once, so a draft costs one small forward; what the heads do not know is each other's choice.
"""

import logging
from collections.abc import Sequence
from functools import partial

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_specdec.checkpoints import convert, load_published
from hf_specdec.drafter import Drafter, DrafterConfig, narrowed, target_fields
from hf_specdec.generator import SpecGenerator, Step
from hf_specdec.tree import DraftTree
from hf_specdec.verify import choose_typical

logger = logging.getLogger(__name__)

# the authors' tree for vicuna-7b: for each node, the place of each token on its path among its head's likeliest
MC_SIM_7B_63 = [
    (0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (2,), (0, 2), (0, 0, 1), (0, 3), (3,), (0, 1, 0), (2, 0), (4,),
    (0, 0, 2), (0, 4), (1, 1), (1, 0, 0), (0, 0, 0, 0), (5,), (0, 0, 3), (0, 5), (0, 2, 0), (3, 0), (0, 1, 1), (0, 6),
    (6,), (0, 7), (0, 0, 4), (4, 0), (1, 2), (0, 8), (7,), (0, 3, 0), (0, 0, 0, 1), (0, 0, 5), (2, 1), (0, 0, 6),
    (1, 0, 1), (0, 0, 1, 0), (2, 0, 0), (5, 0), (0, 9), (0, 1, 2), (8,), (0, 4, 0), (0, 2, 1), (1, 3), (0, 0, 7),
    (0, 0, 0, 2), (0, 0, 8), (1, 1, 0), (0, 1, 0, 0), (6, 0), (9,), (0, 1, 3), (0, 0, 0, 3), (1, 0, 2), (0, 5, 0),
    (3, 1), (0, 0, 2, 0), (7, 0), (1, 4),
]  # fmt: skip


@strict
class MedusaConfig(DrafterConfig):
    """What Medusa heads' weights depend on.

    Args:
        num_heads (`int`): tokens predicted beyond the target's own next one.
        num_layers (`int`): residual blocks per head.
        output (`str`):
            The matrix that gives logits: "own" of each head (as published), one "shared" by all heads, or the "target"'s
            lm_head, which is not stored.
        output_bias (`bool`): whether a stored matrix has a bias.
    """

    model_type = "specdec_medusa"

    num_heads: int = 4
    num_layers: int = 1
    output: str = "shared"
    output_bias: bool = False

    def validate_output(self) -> None:
        """Raises ValueError for an unknown kind of output, or counts below 1."""
        if self.output not in ("own", "shared", "target"):
            raise ValueError(f"output={self.output!r}: it must be 'own', 'shared' or 'target'.")
        if self.num_heads < 1 or self.num_layers < 1:
            raise ValueError(f"num_heads={self.num_heads}, num_layers={self.num_layers}: both must be at least 1.")


class ResBlock(nn.Module):
    """x + SiLU(Wx + b): the identity while W and b are zero."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + F.silu(self.linear(states))


class MedusaHead(Drafter):
    """Medusa's heads: head i predicts, from the target's state at token t, the token t+2+i."""

    config_class = MedusaConfig

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        h, w = config.target_hidden_size, config.draft_vocab_size or config.target_vocab_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResBlock(h) for _ in range(config.num_layers))) for _ in range(config.num_heads)
        )
        num_outputs = {"own": config.num_heads, "shared": 1, "target": 0}[config.output]
        self.outputs = nn.ModuleList(nn.Linear(h, w, bias=config.output_bias) for _ in range(num_outputs))
        self.post_init()

    @classmethod
    def for_target(cls, model: PreTrainedModel, *, draft_ids: torch.Tensor | None = None, **options) -> "MedusaHead":
        """New heads for `model`, each predicting what the target's own head does: zero blocks, the lm_head's rows."""
        lm_head = model.get_output_embeddings()
        fields = target_fields(model) | {
            "draft_vocab_size": None if draft_ids is None else len(draft_ids),
            "output_bias": lm_head.bias is not None and options.get("output") != "target",
        }
        head = cls(MedusaConfig(**fields | options)).to(model.device)
        if draft_ids is not None:
            head.draft_ids.copy_(draft_ids)
        head.attach(model)
        with torch.no_grad():
            for parameter in head.blocks.parameters():
                parameter.zero_()
            for output in head.outputs:
                output.load_state_dict(head.target_output.state_dict())
        return head

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor], config: dict, model: PreTrainedModel) -> "MedusaHead":
        """The heads of a published `medusa_lm_head` file: `{i}.{j}.linear.weight`, and `{i}.{layers}.weight` or no own output.

        Heads and layers are counted from the keys: published configs are known to say other numbers.
        """
        tensors = {key.removeprefix("medusa_head."): tensor for key, tensor in tensors.items()}
        blocks = [key.split(".") for key in tensors if key.endswith(".linear.weight")]
        if not blocks or not all(len(key) == 4 and key[0].isdigit() and key[1].isdigit() for key in blocks):
            raise ValueError(
                f"not the tensors of Medusa heads, which are called like '0.0.linear.weight', but {sorted(tensors)[:5]}."
            )
        num_heads, num_layers = (1 + max(int(key[place]) for key in blocks) for place in (0, 1))
        own = f"0.{num_layers}.weight" in tensors
        names = {}  # of ours: theirs
        for i in range(num_heads):
            for j in range(num_layers):
                names |= {f"blocks.{i}.{j}.linear.{part}": f"{i}.{j}.linear.{part}" for part in ("weight", "bias")}
            if own:
                names[f"outputs.{i}.weight"] = f"{i}.{num_layers}.weight"
        config = MedusaConfig(
            target=config.get("base_model_name_or_path"),
            target_hidden_size=len(tensors["0.0.linear.weight"]),
            target_num_layers=model.config.get_text_config(decoder=True).num_hidden_layers,
            target_vocab_size=len(tensors[f"0.{num_layers}.weight"] if own else model.get_output_embeddings().weight),
            num_heads=num_heads,
            num_layers=num_layers,
            output="own" if own else "target",
        )
        return convert(cls(config), tensors, names)

    def attach(self, model: PreTrainedModel) -> None:
        super().attach(model)
        self._narrowed = [narrowed(self.lm_head, self.draft_ids)]  # in a list, so that it is not saved with the head

    @property
    def target_output(self) -> nn.Module:
        """The target's lm_head, cut to the draft vocabulary."""
        return self._narrowed[0]

    def output(self, i: int) -> nn.Module:
        """What turns head i's states into logits over the draft vocabulary."""
        if self.config.output == "target":
            return self.target_output
        return self.outputs[i if self.config.output == "own" else 0]

    def predict(self, i: int, states: torch.Tensor) -> torch.Tensor:
        """Draft logits `(n, w)` of head i, from the target's last hidden states `(n, h)`."""
        states = self.blocks[i](states.to(self.blocks[i][0].linear.weight.dtype))  # [n, h]
        return self.output(i)(states.to(self.output(i).weight.dtype))

    def forward(self, state: torch.Tensor, *, num_heads: int) -> torch.Tensor:
        """Draft logits `(num_heads, w)` of the first heads, from the target's last hidden state `(h,)`."""
        if self.config.output == "own":
            return torch.stack([self.predict(i, state) for i in range(num_heads)])
        state = state.to(self.blocks[0][0].linear.weight.dtype)
        states = torch.stack([self.blocks[i](state) for i in range(num_heads)])  # [heads, h]
        return self.output(0)(states.to(self.output(0).weight.dtype))

    def loss(
        self, input_ids: torch.Tensor, hidden: Sequence[torch.Tensor], loss_mask: torch.Tensor, *, decay: float = 0.8
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Soft cross-entropy of each head to the target's distribution of its token, weighted by `decay` to the head's power.

        The state of token t is paired, for head i, with the target's distribution of token t+2+i, which is the one at token
        t+1+i; both t+1 (the root of a draft) and t+2+i must be tokens of answers.
        """
        states = hidden[-1][:, :-1]  # [b, t-1, h]
        wanted = loss_mask[:, 1:]  # [b, t-1], is the token after this one to be predicted
        numbers = wanted.flatten().cumsum(0).view(wanted.shape) - 1  # of each wanted place among all of them
        with torch.no_grad():
            p = self.target_output(states[wanted].to(self.target_output.weight.dtype)).float().softmax(-1)  # [m, w]
        total, metrics = states.new_zeros((), dtype=torch.float32), {}
        for i in range(self.config.num_heads):
            ahead = i + 1
            paired = wanted[:, :-ahead] & wanted[:, ahead:]  # [b, t-1-ahead]
            if not paired.any():
                continue
            target = p[numbers[:, ahead:][paired]]  # [m, w]
            logits = self.predict(i, states[:, :-ahead][paired]).float()  # [m, w]
            total = total + decay**i * -(target * logits.log_softmax(dim=-1)).sum(-1).mean()
            metrics[f"top1_{ahead}"] = (logits.argmax(-1) == target.argmax(-1)).float().mean()
        return total, metrics


class Candidates:
    """The nodes a draft may have: paths of places among the heads' likeliest tokens, parents before their children.

    Args:
        paths (`Sequence[Sequence[int]]`): each node's path.
        depth (`int`): heads there are; longer paths are left out.
        width (`int`): tokens considered of each head; paths with later places are left out.

    Raises:
        ValueError: if a path is there without its beginning.
    """

    def __init__(self, paths: Sequence[Sequence[int]], *, depth: int, width: int, device: torch.device):
        self.depth, self.width = depth, width
        paths = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        paths = [path for path in paths if 0 < len(path) <= depth and max(path) < width]
        number = {(): -1} | {path: i for i, path in enumerate(paths)}
        orphans = [path for path in paths if path[:-1] not in number]
        if orphans:
            raise ValueError(f"the tree has the path {orphans[0]}, but not {orphans[0][:-1]}, on which it goes on.")
        nothing = depth * width  # the place behind all (head, token) places
        places = [[i * width + place for i, place in enumerate(path)] for path in paths]
        padded = [row + [nothing] * (depth - len(row)) for row in places]
        whole = partial(torch.tensor, dtype=torch.int64, device=device)  # also where there is no path at all
        self.places = whole(padded).view(-1, depth)  # [c, depth]
        self.last = whole([row[-1] for row in places])  # [c]
        self.parents = whole([number[path[:-1]] for path in paths])  # [c]
        self.depths = whole([len(path) for path in paths])  # [c]


def combinations(depth: int, *, width: int, max_nodes: int) -> list[tuple[int, ...]]:
    """All paths that can be among the `max_nodes` likeliest, whatever the probabilities.

    A path is never likelier than those whose places all are at or before its own: if these are too many, it is out.
    """
    paths, level = [], [((), 1, 0)]  # path, paths at or before it of its length, and of all lengths
    for _ in range(depth):
        level = [
            (path + (place,), same * (place + 1), all_lengths + same * (place + 1))
            for path, same, all_lengths in level
            for place in range(width)
            if all_lengths + same * (place + 1) < max_nodes
        ]
        paths += [path for path, *_ in level]
    return paths


class MedusaGen(SpecGenerator):
    """Drafts the likeliest combinations of the heads' likeliest tokens, or a fixed tree of them, as published.

    `MedusaGen(head, tree=MC_SIM_7B_63, min_probability=0)` is the published method.

    Args:
        head (`MedusaHead` or `str`): the heads, or their folder or Hub id (a published `medusa_lm_head.pt` as well).
        max_nodes (`int`): largest tree, the root included.
        top_k (`int`): tokens considered of each head.
        min_probability (`float`): nodes estimated less likely than this are not verified.
        max_depth (`int`, *optional*): heads used; None is all of them.
        tree (`Sequence[Sequence[int]]`, *optional*):
            A fixed tree: each node as the places, among its heads' likeliest, of the tokens on its path.
        lossy_typical (`bool`):
            Accept every drafted token that is typical for the target (Medusa's typical acceptance), although the target
            chose another: more tokens per step, but **another text** than plain decoding's.
        epsilon, alpha (`float`):
            A token is typical where the target gives it more than min(epsilon, alpha * exp(-entropy)).

    Raises:
        ValueError: if a count is below 1; at `bind`, if the heads were made for another target.
    """

    name = "medusa"
    drafter_argument = "Medusa heads: a folder or a Hub id"
    head_class = MedusaHead

    def __init__(
        self,
        head: MedusaHead | str,
        *,
        max_nodes: int = 20,
        top_k: int = 10,
        min_probability: float = 0.03,
        max_depth: int | None = None,
        tree: Sequence[Sequence[int]] | None = None,
        lossy_typical: bool = False,
        epsilon: float = 0.09,
        alpha: float = 0.3,
    ):
        super().__init__()
        self.check_counts(max_nodes=max_nodes, top_k=top_k, max_depth=max_depth)
        self.head = head
        self.top_k = top_k if tree is None else 1 + max((place for path in tree for place in path), default=0)
        self.max_nodes = max_nodes if tree is None else 1 + len(tree)
        self.min_probability = min_probability
        self.max_depth = max_depth
        self.tree = tree
        self.chain_only = self.top_k == 1
        if lossy_typical:
            self.lossless = False
            self.lossy_choice = partial(choose_typical, epsilon=epsilon, alpha=alpha)
            self.lossy_note = f"lossy: typical acceptance (epsilon={epsilon}, alpha={alpha}) changes the text"
            logger.warning("hf_specdec: MedusaGen(lossy_typical=True) gives another text than plain decoding.")

    def attach(self, model: PreTrainedModel) -> None:
        if isinstance(self.head, str):
            self.head = load_published(self.head, MedusaHead, model).to(model.dtype)
        self.head.attach(model)
        self.head.to(model.device).eval()
        config = self.head.config
        self.hidden_layers = (config.target_num_layers,)
        depth = min(self.max_depth or config.num_heads, config.num_heads)
        width = min(self.top_k, config.draft_vocab_size or config.target_vocab_size)
        paths = combinations(depth, width=width, max_nodes=self.max_nodes) if self.tree is None else self.tree
        self.candidates = Candidates(paths, depth=depth, width=width, device=model.device)

    def begin(self, input_ids: torch.Tensor, **call) -> None:
        self.state: torch.Tensor | None = None  # [h], the target's, of the token before the root
        if not self.lossless:
            self.stats.notes.append(self.lossy_note)

    def observe(self, step: Step) -> None:
        if step.hidden is not None:
            nodes = step.hidden[0][-len(step.tree) :]  # the prefill's hold the prompt before the root
            self.state = nodes[step.path[-1]]

    def draft(self, input_ids: torch.Tensor, *, max_depth: int) -> DraftTree:
        root = input_ids[0, -1:].to(self.head.device)
        if self.state is None:  # transformers' own loop shows no states
            return DraftTree.chain(root.tolist(), device=root.device)
        chosen = self.candidates
        logits = self.head(self.state, num_heads=chosen.depth)  # [depth, w]
        self.stats.part("head")
        likely, ids = logits.float().log_softmax(dim=-1).topk(chosen.width, dim=-1)  # [depth, k]
        ids = self.head.target_ids(ids)
        scores = F.pad(likely.flatten(), (0, 1))[chosen.places].sum(-1)  # [c], log-probability of each candidate
        scores = scores.masked_fill(chosen.depths > max_depth, -torch.inf)
        # a candidate is never likelier than its parent and comes after it, so in this order parents come first
        order = scores.sort(descending=True, stable=True).indices[: self.max_nodes - 1]  # [m]
        numbers = torch.zeros(len(scores) + 1, dtype=torch.int64, device=root.device)  # the last one is the root's
        numbers[order] = torch.arange(1, len(order) + 1, device=root.device)
        tokens = ids.flatten()[chosen.last[order]]
        nodes = torch.stack([tokens, numbers[chosen.parents[order]], scores[order].exp()])
        nodes = F.pad(nodes, (1, 0))
        nodes[0, 0] = root[0]  # ids are exact in float32 up to 2^24
        tokens, parents, probabilities = nodes.tolist()  # the one read from the device
        num_nodes = 1 + sum(likely > 0 and likely >= self.min_probability for likely in probabilities[1:])
        tokens, parents = [int(token) for token in tokens[:num_nodes]], [-1, *map(int, parents[1:num_nodes])]
        tree = DraftTree.from_lists(tokens, parents, device=root.device)
        tree.probabilities = [1.0, *probabilities[1:num_nodes]]
        self.stats.part("tree")
        return tree

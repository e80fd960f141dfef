"""SpS: speculative sampling with a separate draft model (Leviathan et al. 2023; Chen et al. 2023).

A smaller model of the same vocabulary drafts token by token. The EACL 2026 study finds that this pays only if that model is
shallow: what a drafted token costs decides, so the chain's length follows measured cost and acceptance. The draft model that
is trained here is wide and shallow: a few of the target's own layers, between its embeddings and its lm_head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import LogitsProcessorList

from hf_specdec.cache import open_cache
from hf_specdec.drafter import Drafter, DrafterConfig, load_head, narrowed, target_fields
from hf_specdec.generator import SpecGenerator, Step
from hf_specdec.models import stored_tokenizer
from hf_specdec.repository import MODEL_FILES, folder_of
from hf_specdec.split import layers_path, with_part
from hf_specdec.target import takes_masks
from hf_specdec.tree import DraftTree

NOTHING = DraftTree.chain([0], device="cpu")  # no draft to count
PROBE_EVERY = 16  # steps between one-token drafts while drafting does not pay
NOT_OF_LAYERS = ("quantization_config", "transformers_version", "_name_or_path", "architectures", "dtype")


@strict
class SpSConfig(DrafterConfig):
    """What a wide-shallow draft model's weights depend on.

    Args:
        architecture (`dict`): the config of its layers, of the target's own kind but with few of them.
    """

    model_type = "specdec_sps"

    architecture: dict | None = None


class SpSHead(Drafter):
    """A wide-shallow draft model: a few decoder layers of the target's own class, with everything around them borrowed."""

    config_class = SpSConfig

    def __init__(self, config: SpSConfig):
        super().__init__(config)
        # only the layers are kept of it, so it needs no embeddings
        fields = (
            config.architecture | {"vocab_size": 1} | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        )
        decoder = AutoModel.from_config(AutoConfig.for_model(**fields))
        self.layers = next(part for part in decoder.children() if isinstance(part, nn.ModuleList))
        self._layers_config = decoder.config  # the one that the layers look into
        self._layers_config.vocab_size = config.target_vocab_size
        self.post_init()

    @classmethod
    def for_target(
        cls,
        model: PreTrainedModel,
        *,
        draft_ids: torch.Tensor | None = None,
        num_layers: int = 2,
        init_layers: Sequence[int] | None = None,
        intermediate_size: int | None = None,
        **options,
    ) -> SpSHead:
        """A new draft model for `model`, made of copies of its layers.

        Args:
            num_layers (`int`): layers to have.
            init_layers (`Sequence[int]`, *optional*): which of the target's to begin with; None spreads them evenly.
            intermediate_size (`int`, *optional*): width of the layers' MLPs, at most the target's, which None takes.

        Raises:
            ValueError: if the target has no such layers, or no more layers than the draft model.
        """
        config = model.config.get_text_config(decoder=True)
        total = config.num_hidden_layers
        chosen = list(init_layers) if init_layers is not None else spread(num_layers, total)
        if not 0 < len(chosen) < total or not all(0 <= i < total for i in chosen):
            raise ValueError(
                f"a draft model of layers {chosen} of {model.config.name_or_path or type(model).__name__}, which has {total}: "
                "give at least one of them, and fewer than all."
            )
        layers = model.get_submodule(layers_path(model, len(chosen)))
        usual = PreTrainedConfig().to_dict()
        architecture = {
            name: value
            for name, value in config.to_dict().items()
            if name not in NOT_OF_LAYERS and (name not in usual or value != usual[name])
        }
        for name, value in architecture.items():  # such as layer_types
            if isinstance(value, list) and "layer" in name and len(value) == total:
                architecture[name] = [value[i] for i in chosen]
        architecture["num_hidden_layers"] = len(chosen)
        if intermediate_size is not None:
            architecture["intermediate_size"] = intermediate_size
        w = None if draft_ids is None else len(draft_ids)
        fields = target_fields(model) | {"architecture": architecture, "draft_vocab_size": w}
        head = cls(SpSConfig(**fields | options)).to(model.device)
        if draft_ids is not None:
            head.draft_ids.copy_(draft_ids)
        for place, i in enumerate(chosen):
            if {name for name, _ in head.layers[place].named_modules()} - {
                name for name, _ in layers[i].named_modules()
            }:
                raise ValueError(
                    f"the target's layer {i} is not built as its layer {place} is: choose other init_layers."
                )
            copy_weights(head.layers[place], layers[i], dtype=model.dtype)
        head.attach(model)
        return head

    def attach(self, model: PreTrainedModel) -> None:
        super().attach(model)
        config, kind = model.config.get_text_config(decoder=True), self.config.architecture["model_type"]
        if config.model_type != kind:
            raise ValueError(f"this draft model has {kind} layers, but the target is of the kind {config.model_type}.")
        for kernels in ("_attn_implementation", "_experts_implementation"):
            setattr(self._layers_config, kernels, getattr(config, kernels))
        path, _, name = layers_path(model, len(self.layers)).rpartition(".")
        decoder = with_part(model.get_submodule(path), [name], self.layers)
        decoder.config = self._layers_config
        # in a list, so that they are not saved with the head
        self._lent = [decoder, narrowed(self.lm_head, self.draft_ids)]

    @property
    def decoder(self) -> PreTrainedModel:
        """The target's decoder, with this head's layers for its own."""
        return self._lent[0]

    @property
    def output(self) -> nn.Module:
        """The target's lm_head, cut to the draft vocabulary."""
        return self._lent[1]

    def forward(self, tokens: torch.Tensor, **kwargs) -> torch.Tensor:
        """Draft logits `(1, w)` behind `tokens` `(1, n)`; `kwargs` are the decoder's."""
        return self.output(self.decoder(input_ids=tokens, **kwargs).last_hidden_state[:, -1])

    def loss(
        self, input_ids: torch.Tensor, hidden: Sequence[torch.Tensor], loss_mask: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Soft cross-entropy to the target's own distribution of each token of an answer."""
        wanted, output = loss_mask[:, 1:], self.output  # [b, t-1], is the token after this one to be predicted
        if not wanted.any():
            return hidden[-1].new_zeros((), dtype=torch.float32), {}
        states = self.decoder(input_ids=input_ids[:, :-1], use_cache=False).last_hidden_state  # [b, t-1, h]
        with torch.no_grad():
            p = output(hidden[-1][:, :-1][wanted]).float().softmax(dim=-1)  # [m, w]
        logits = output(states[wanted].to(output.weight.dtype)).float()  # [m, w]
        loss = -(p * logits.log_softmax(dim=-1)).sum(-1).mean()
        return loss, {"top1": (logits.argmax(-1) == p.argmax(-1)).float().mean()}


def spread(num_layers: int, total: int) -> list[int]:
    """`num_layers` of `total` layers, the first and the last among them."""
    return torch.linspace(0, total - 1, num_layers).round().int().tolist()


@torch.no_grad()
def copy_weights(own: nn.Module, source: nn.Module, *, dtype: torch.dtype) -> None:
    """Gives a layer the weights of another of its kind, of a wider one the first rows and columns.

    Where those of a linear map are quantised or have adapters, they are read off what it makes of unit vectors.
    """
    for name, part in own.named_modules():
        twin = source.get_submodule(name)
        weights = {kind: getattr(twin, kind, None) for kind, _ in part.named_parameters(recurse=False)}
        if isinstance(part, nn.Linear) and not (type(twin) is nn.Linear and type(twin.weight) is nn.Parameter):
            width = getattr(twin, "in_features", part.in_features)
            units = torch.eye(width, dtype=dtype, device=part.weight.device)
            weights["bias"] = twin(torch.zeros_like(units[:1]))[0]
            weights["weight"] = (twin(units) - weights["bias"]).T
        for kind, parameter in part.named_parameters(recurse=False):
            parameter.copy_(weights[kind][tuple(map(slice, parameter.shape))])


class SpSGen(SpecGenerator):
    """Drafts with a smaller causal language model of the same tokenizer: a chain, optionally with siblings beside it.

    Args:
        drafter (`SpSHead`, `PreTrainedModel` or `str`):
            A trained wide-shallow head, or any causal model; or the Hub id or folder of either, loaded in the target's dtype.
        num_draft_tokens (`int`, *optional*):
            Tokens to draft each step. None adapts to what drafting costs and how much is accepted, and drafts nothing
            where that would be slower than plain decoding.
        max_draft_tokens (`int`): most tokens an adaptive step drafts.
        num_branches (`int`):
            Children of each node of the chain. The first goes on; the others are the next likeliest in logits that are there
            anyway, so they cost only their place in the verification. Needs a target that verifies trees; 1 drafts chains.
        min_probability (`float`): siblings estimated less likely than this are left out.
        draft_sampling (`bool`):
            When the target samples, sample the drafts too and verify them by rejection. The output then has the target's
            distribution, but not the very tokens that plain decoding would sample from the same seed.

    Raises:
        ValueError: at `bind`, if the drafter's vocabulary is not the target's, or the head was made for another target.
    """

    name = "sps"
    drafter_argument = "a smaller causal language model of the same tokenizer: a Hub id or a folder"
    head_class = SpSHead

    def __init__(
        self,
        drafter: SpSHead | PreTrainedModel | str,
        *,
        num_draft_tokens: int | None = None,
        max_draft_tokens: int = 8,
        num_branches: int = 1,
        min_probability: float = 0.05,
        draft_sampling: bool = False,
    ):
        super().__init__()
        self.check_counts(
            num_draft_tokens=num_draft_tokens, max_draft_tokens=max_draft_tokens, num_branches=num_branches
        )
        if draft_sampling and num_branches > 1:
            raise ValueError(f"SpSGen(num_branches={num_branches}): sampled drafts are chains, give num_branches=1.")
        if draft_sampling and num_draft_tokens is None:
            num_draft_tokens = (
                5  # a length that follows measured times would draw differently from one run to the next
            )
        self.drafter = drafter
        self.loaded = False  # whether the drafter is this generator's own, to move with the target
        self.num_draft_tokens = num_draft_tokens
        self.max_draft_tokens = max_draft_tokens
        self.num_branches = num_branches
        self.min_probability = min_probability
        self.draft_sampling = draft_sampling
        self.seed_exact = not draft_sampling
        self.chain_only = num_branches == 1
        self.max_nodes = 1 + (num_draft_tokens or max_draft_tokens) * num_branches
        self.acceptance = Acceptance()
        self.head = drafter if isinstance(drafter, SpSHead) else None

    def attach(self, model: PreTrainedModel) -> None:
        if isinstance(self.drafter, str):
            self.drafter, self.loaded = load_drafter(self.drafter, model), True
            self.head = self.drafter if isinstance(self.drafter, SpSHead) else None
        if self.head is not None:
            self.head.attach(model)
            self.head.to(device=model.device, dtype=model.dtype).eval()
            self.drafter = self.head.decoder
        else:
            check_vocabulary(model, self.drafter)
            if self.loaded:
                self.drafter.to(model.device)
        self.vocab_size = model.config.get_text_config(decoder=True).vocab_size
        config = self.drafter.config.get_text_config(decoder=True)
        self.largest_id = config.vocab_size - 1
        self.takes_masks = takes_masks(self.drafter)
        self.device, self.dtype = self.drafter.device, self.drafter.dtype

    def begin(
        self, input_ids: torch.Tensor, *, processors: LogitsProcessorList | None = None, do_sample: bool = False
    ) -> None:
        self.processors = processors or LogitsProcessorList()
        self.samples = do_sample and self.draft_sampling
        stock = DynamicCache(config=self.drafter.config.get_text_config(decoder=True))
        self.cache = open_cache(self.drafter, stock, capacity=input_ids.shape[1] + 1024)
        self.cache.keep(0, [])
        self.idle_steps, self.levels, self.first = 0, 0, None
        self.tree, self.chain, self.hopes = NOTHING, [0], []  # hopes: what the drafter gave each token of the chain

    def draft(self, input_ids: torch.Tensor, *, max_depth: int) -> DraftTree:
        num_tokens = min(self.num_draft_tokens or self.adapted_length(), max_depth)
        # committed tokens the drafter has not read; ids that only the target's padding has are read as its last one
        block = input_ids[:, self.cache.length :].clamp(max=self.largest_id)
        if self.samples:
            self.tree = self.sampled_chain(input_ids, block, num_tokens=num_tokens)
        else:
            self.tree = self.likeliest(input_ids[0, -1:].to(self.device), block, num_tokens=num_tokens)
        self.chain = self.tree.first_path()
        self.levels += len(self.chain) - 1
        self.stats.part("model")
        return self.tree

    def sampled_chain(self, input_ids: torch.Tensor, block: torch.Tensor, *, num_tokens: int) -> DraftTree:
        """A chain of tokens drawn from the drafter's processed distributions, which it keeps."""
        tokens, rows = [input_ids[0, -1:]], []
        for _ in range(num_tokens):
            scores = self.fit_width(self.logits(block).float()).to(input_ids.device)  # where processors expect them
            rows.append(self.processors(input_ids, scores).softmax(dim=-1))  # [1, v]
            block = torch.multinomial(rows[-1], num_samples=1)
            tokens.append(block[0])
        tree = DraftTree(torch.cat(tokens), torch.arange(-1, num_tokens, device=input_ids.device))
        if rows:
            tree.q = torch.cat([*rows, rows[-1]])  # the last node has no children
        tree.probabilities = [self.acceptance.rate**depth for depth in range(num_tokens + 1)]
        return tree

    def likeliest(self, root: torch.Tensor, block: torch.Tensor, *, num_tokens: int) -> DraftTree:
        """The chain of likeliest tokens under `root` `(1,)`, and beside each the next likeliest; read from the device once.

        An adaptive chain ends where it is so unlikely to be accepted that a further token is not worth its cost, which takes
        another read per token.
        """
        k, adaptive = self.num_branches, self.num_draft_tokens is None
        trust, least = self.acceptance.trust, self.acceptance.least_chance
        ids, likely, chance = [root], [], 1.0  # likely: what the drafter gives each token
        for _ in range(num_tokens):
            scores = self.logits(block).float().softmax(dim=-1)  # [1, w]
            top, places = scores.topk(min(k, scores.shape[-1]), dim=-1)  # [1, k]
            block = places if self.head is None else self.head.target_ids(places)
            ids.append(block[0])
            likely.append(top[0])
            block = block[:, :1]
            if adaptive:
                chance *= min(1.0, float(top[0, 0]) * trust)
                if chance < least:
                    break
        # ids are exact in float32 up to 2^24
        ids, likely = torch.stack([torch.cat(ids), torch.cat([torch.ones_like(root), *likely])]).tolist()
        self.hopes = likely[1::k]
        tokens, parents, chances, node = [int(ids[0])], [-1], [1.0], 0
        for place in range(1, len(ids), k):
            below = [min(1.0, p * trust) * chances[node] for p in likely[place : place + k]]
            parent, node = node, len(tokens)
            for i, chance in enumerate(below):
                if i == 0 or chance >= self.min_probability:
                    tokens.append(int(ids[place + i]))
                    parents.append(parent)
                    chances.append(chance)
        tree = DraftTree.from_lists(tokens, parents, device=root.device)
        tree.probabilities = chances
        return tree

    def logits(self, block: torch.Tensor) -> torch.Tensor:
        """Draft logits `(1, w)` behind the text and `block` `(1, n)`, whose keys and values stay in the cache."""
        n, start = block.shape[1], self.cache.length
        given = {"input_ids": block.to(self.device), "cache": self.cache.cache, "use_cache": True}
        if (
            start and self.takes_masks and self.cache.tree_capable
        ):  # to make its own takes the model longer than a layer
            mask = torch.zeros(1, 1, n, start + n, dtype=self.dtype, device=self.device)
            if n > 1:
                mask[..., start:] = mask.new_full((n, n), torch.finfo(self.dtype).min).triu(1)
            positions = torch.arange(start, start + n, device=self.device)[None]
            given |= {"attention_mask": mask, "position_ids": positions}
        if self.head is not None:
            return self.head(given.pop("input_ids"), **given)
        return self.drafter(**given, logits_to_keep=1).logits[:, -1, : self.vocab_size]

    def observe(self, step: Step) -> None:
        drafted = len(self.chain) - 1
        if drafted:
            path = self.tree.follow(
                step.tokens[:-1]
            )  # the last one is to be read yet, though a hybrid may have left it out
            accepted = sum(node in self.chain for node in path) - 1  # a sibling's rows are not there
            self.acceptance.update(drafted=drafted, accepted=accepted, hopes=self.hopes)
            # rows read beyond the text: the chain's tokens but the last; those accepted stay
            read = self.cache.length - (drafted - 1)
            self.cache.keep(read, list(range(min(accepted, drafted - 1))))
            self.tree, self.chain = NOTHING, [0]  # counted; a hybrid may not ask again before the next step

    def end(self) -> None:
        self.cache = None

    def fit_width(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores over exactly the target's vocabulary: padding of either model is never drafted, nor what is not in its own."""
        if self.head is not None and self.head.draft_ids is not None:
            return scores.new_full((1, self.vocab_size), -torch.inf).index_copy_(1, self.head.draft_ids, scores)
        missing = self.vocab_size - scores.shape[-1]
        return nn.functional.pad(scores, (0, missing), value=-torch.inf) if missing else scores

    def adapted_length(self) -> int:
        """Most tokens to draft where that promises more tokens per second than none; now and then 1 where it does not."""
        stats = self.stats
        now = (stats.seconds["draft"], self.levels, stats.seconds["verify"] + stats.seconds["accept"], stats.steps)
        if self.levels and self.first is None:
            self.first = now  # the first draft read the prompt, so costs count from here
        elif self.first and self.levels > self.first[1] and stats.steps > self.first[3]:
            draft, levels, verify, steps = (new - old for new, old in zip(now, self.first, strict=True))
            self.acceptance.cost = (draft / levels) / (verify / steps)
        length = self.max_draft_tokens if self.acceptance.best_length(self.max_draft_tokens) else 0
        self.idle_steps = 0 if length else self.idle_steps + 1
        return 1 if self.idle_steps % PROBE_EVERY == PROBE_EVERY - 1 else length


def load_drafter(source: str, model: PreTrainedModel) -> SpSHead | PreTrainedModel:
    """The draft model in a folder or Hub repository, a head of ours or any causal model; code in it is never run.

    Raises:
        ValueError: for a head of another method.
    """
    source = str(folder_of(source, files=MODEL_FILES))
    kind = PreTrainedConfig.get_config_dict(source)[0].get("model_type", "")
    if kind == SpSConfig.model_type:
        return load_head(source, SpSHead)
    if kind.startswith("specdec_"):
        raise ValueError(
            f"SpSGen needs a draft model, but {source} is a head of the kind {kind}: take its own generator."
        )
    return AutoModelForCausalLM.from_pretrained(source, dtype=model.dtype, trust_remote_code=False).eval()


class Acceptance:
    """Running estimate of how likely a drafted token is accepted, and of what drafting one costs in target steps.

    Attributes:
        rate (`float`): alpha of Leviathan et al. 2023, averaged over about the last 50 drafted tokens.
        trust (`float`): that over the mean probability the drafter gave them.
        cost (`float`): c of the same paper, one draft step over one target step.
    """

    def __init__(self):
        self.accepted, self.tried, self.hoped = 3.0, 4.0, 3.0  # a hopeful start, soon outweighed
        self.cost = 0.2

    @property
    def rate(self) -> float:
        return self.accepted / self.tried

    @property
    def trust(self) -> float:
        return self.accepted / max(self.hoped, 1e-9)

    @property
    def least_chance(self) -> float:
        """How likely a chain must be accepted for one more token behind it to be worth its cost: alpha times that is c."""
        return self.cost / max(self.rate, 1e-9)

    def update(self, *, drafted: int, accepted: int, hopes: Sequence[float] = ()) -> None:
        """Counts a chain of which `accepted` tokens survived; what came after the first refused one says nothing.

        Args:
            hopes (`Sequence[float]`): what the drafter gave each of its tokens.
        """
        tried = min(accepted + 1, drafted)
        decay = 0.98**tried
        self.accepted = self.accepted * decay + accepted
        self.tried = self.tried * decay + tried
        self.hoped = self.hoped * decay + sum(hopes[:tried])

    def best_length(self, longest: int) -> int:
        """The chain length with the most tokens per second, (1 - alpha^(n+1)) / (1 - alpha) / (1 + n c)."""
        alpha = min(self.rate, 0.99)
        gain = [(1 - alpha ** (n + 1)) / (1 - alpha) / (1 + n * self.cost) for n in range(longest + 1)]
        return max(range(longest + 1), key=gain.__getitem__)


def check_vocabulary(model: PreTrainedModel, drafter: PreTrainedModel) -> None:
    """Raises ValueError unless both models read the same token ids; a vocabulary padded to another size is the same."""
    names = [item.config.name_or_path or type(item).__name__ for item in (model, drafter)]
    sizes = [item.config.get_text_config(decoder=True).vocab_size for item in (model, drafter)]
    tokenizers = [stored_tokenizer(item) for item in (model, drafter)]
    differ = None not in tokenizers and tokenizers[0].get_vocab() != tokenizers[1].get_vocab()
    if differ or abs(sizes[0] - sizes[1]) > min(1024, 0.1 * max(sizes)):
        raise ValueError(
            f"SpSGen needs a drafter with the target's tokenizer, but the target {names[0]!r} has {sizes[0]} token ids and "
            f"the drafter {names[1]!r} {sizes[1]}{' that mean other tokens' if differ else ''}: take a smaller model of the "
            "same family."
        )

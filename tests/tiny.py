"""Tiny targets built in code, generators that replay a known text, and one of every method."""

from __future__ import annotations

import atexit
import copy
import shutil
import tempfile
from functools import lru_cache
from itertools import product

import torch
from transformers import (
    AutoModelForCausalLM,
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

from hf_specdec import METHODS, DraftTree, SpecGenerator
from hf_specdec.datastore import Datastore

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
ATTENTION = {family: ("eager",) if family == "gemma2" else ("eager", "sdpa") for family in CONFIGS}
CHAIN_TARGETS = ("sliding", "gemma2")  # their caches cannot hold trees


def tiny(
    family: str = "llama", *, dtype=torch.float64, attention: str = "sdpa", seed: int = 2, scale: float = 12, **changes
) -> PreTrainedModel:
    """A random model whose layers are scaled up, so that its choices depend on the whole text and never near a tie.

    Args:
        scale: of the layers' weights: at 12 greedy texts vary, at 4 they fall into loops, which lookup needs.
    """
    torch.manual_seed(seed)
    config = CONFIGS[family](**SHAPE | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale if "layers" in name else 4)
        if config.tie_word_embeddings:  # else every token would repeat itself: random signs on the last norm
            signs = torch.randint(0, 2, (config.hidden_size,)) * 2 - 1
            model.model.norm.weight.copy_(signs - 1 if family.startswith("gemma") else signs)
    return model


@lru_cache(maxsize=64)
def shared(family: str = "llama", attention: str = "sdpa", *, scale: float = 12) -> PreTrainedModel:
    """The tiny model that tests share; they leave it as it was."""
    attention = attention if attention in ATTENTION[family] else "eager"
    return tiny(family, attention=attention, scale=scale)


def noisy(model: PreTrainedModel, *, scale: float = 0.02, seed: int = 1) -> PreTrainedModel:
    """A copy of the model that mostly agrees with it: a drafter whose drafts are accepted in part."""
    twin = copy.deepcopy(model)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(scale * parameter.std() * torch.randn(parameter.shape, generator=noise).to(parameter))
    return twin


def prompt(length: int, *, seed: int = 0, vocab_size: int = 97) -> torch.Tensor:
    """Random token ids `(1, length)`."""
    return torch.randint(3, vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(model: PreTrainedModel, ids: torch.Tensor | None, generator=None, *, seed: int = 0, **options):
    """`model.generate` from a fixed seed, greedy and of 24 tokens unless `options` say otherwise."""
    torch.manual_seed(seed)
    options = dict(do_sample=False, max_new_tokens=24) | options
    if ids is not None:
        options["inputs"] = ids
    if generator is not None:
        options["candidate_generator"] = generator
    return model.generate(**options)


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
        self.allowed: list[int] = []  # max_depth of each draft

    def begin(self, input_ids, **call) -> None:
        self.drafts, self.steps, self.allowed = [], [], []

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
        self.allowed.append(max_depth)
        return self.drafts[-1]


ORACLES = {
    "oracle-all": dict(k=6),
    "oracle-none": dict(k=6, wrong_at=0),
    "oracle-some": dict(k=6, wrong_at=3),
    "oracle-long": dict(k=20),
    "oracle-tree": dict(k=4, decoys=2),
    "oracle-tree-some": dict(k=4, wrong_at=2, decoys=2),
}


@lru_cache(maxsize=8)
def stored_texts(target: PreTrainedModel) -> Datastore:
    """A datastore of a few texts of the target's own, which it will partly write again."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    prompts = [prompt(9, seed=i, vocab_size=vocab_size) for i in range(3)]
    texts = [generate(target, ids, max_new_tokens=30, stop_strings=None)[0].tolist() for ids in prompts]
    folder = tempfile.mkdtemp(prefix="hf_specdec-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Datastore.build(texts, folder, vocab_size=vocab_size, tokenizer_hash="tiny")


MAKERS = {
    "sps": lambda target: METHODS["sps"](noisy(target)),
    "rest": lambda target: METHODS["rest"](stored_texts(target)),
    "sam-corpus": lambda target: METHODS["sam"](corpus=stored_texts(target)),
    "sps-head": lambda target: METHODS["sps"](
        noisy(METHODS["sps"].head_class.for_target(target).to(target.dtype)), num_branches=2, min_probability=0
    ),
    "eagle-static": lambda target: METHODS["eagle"](METHODS["eagle"].head_class.for_target(target), tree="static"),
    "eagle": lambda target: METHODS["eagle"](METHODS["eagle"].head_class.for_target(target), min_probability=0),
    "medusa": lambda target: METHODS["medusa"](METHODS["medusa"].head_class.for_target(target), min_probability=0),
    "kangaroo": lambda target: METHODS["kangaroo"](
        METHODS["kangaroo"].head_class.for_target(target, exit_layer=1), threshold=0, width=2, min_probability=0
    ),
}
"""How to make a method, or a variant of one, that needs a drafter of its own kind; the others are made without arguments."""
GENERATORS = [*METHODS, "sam-corpus", "sps-head", "eagle-static", *ORACLES]
"""Every name `make` knows: a law about what is verified is tested over this list."""
SHORT = [*METHODS, "oracle-some", "oracle-tree"]
"""Every method, one oracle chain and one oracle tree: for laws with many cases of their own."""


def dealt(*axes, each: int = 3) -> list[tuple]:
    """All combinations of the axes, each with both oracles of `SHORT`; every method gets `each` of them, in turn."""
    cases = list(product(*axes))
    pairs = [(*case, name) for case in cases for name in SHORT[len(METHODS) :]]
    for number, name in enumerate(METHODS):
        turns = {(number * each + i) % len(cases) for i in range(each)}
        pairs += [(*cases[turn], name) for turn in sorted(turns)]
    return pairs


def make(name: str, target: PreTrainedModel, text=None) -> SpecGenerator:
    """A generator for `target` by its name in `GENERATORS`; `text` (ids `(1, t)`) is what an oracle replays."""
    if name in ORACLES:
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        return Oracle(text[0].tolist(), **ORACLES[name], vocab_size=vocab_size)
    if name in MAKERS:
        torch.manual_seed(0)
        return MAKERS[name](target)
    if getattr(METHODS[name], "head_class", None) is not None:
        torch.manual_seed(0)
        return METHODS[name](METHODS[name].head_class.for_target(target))
    needs = METHODS[name].drafter_argument and not METHODS[name].drafter_optional
    assert not needs, f"tests/tiny.py: add a maker for the method {name!r}, whose drafter must be made first"
    return METHODS[name]()

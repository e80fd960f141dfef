"""SpS: speculative sampling with a separate draft model (Leviathan et al. 2023; Chen et al. 2023).

A smaller model of the same vocabulary drafts a chain token by token. The EACL 2026 study finds that this pays only if that
model is shallow: what a drafted token costs decides, so the chain's length follows measured cost and acceptance.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import LogitsProcessorList

from hf_specdec.cache import open_cache
from hf_specdec.generator import SpecGenerator, Step
from hf_specdec.models import stored_tokenizer
from hf_specdec.tree import DraftTree

NOTHING = DraftTree.chain([0], device="cpu")  # no draft to count
PROBE_EVERY = 16  # steps between one-token drafts while drafting does not pay


class SpSGen(SpecGenerator):
    """Drafts a chain with a smaller causal language model of the same tokenizer.

    Args:
        drafter (`PreTrainedModel` or `str`): the draft model, or its Hub id or folder, loaded in the target's dtype.
        num_draft_tokens (`int`, *optional*):
            Tokens to draft each step. None adapts to what drafting costs and how much is accepted, and drafts nothing
            where that would be slower than plain decoding.
        max_draft_tokens (`int`): most tokens an adaptive step drafts.
        draft_sampling (`bool`):
            When the target samples, sample the drafts too and verify them by rejection. The output then has the target's
            distribution, but not the very tokens that plain decoding would sample from the same seed.

    Raises:
        ValueError: at `bind`, if the drafter's vocabulary is not the target's.
    """

    name = "sps"
    drafter_argument = "a smaller causal language model of the same tokenizer: a Hub id or a folder"
    chain_only = True

    def __init__(
        self,
        drafter: PreTrainedModel | str,
        *,
        num_draft_tokens: int | None = None,
        max_draft_tokens: int = 8,
        draft_sampling: bool = False,
    ):
        super().__init__()
        for argument, value in (("num_draft_tokens", num_draft_tokens), ("max_draft_tokens", max_draft_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"SpSGen({argument}={value}): it must be at least 1.")
        if draft_sampling and num_draft_tokens is None:
            num_draft_tokens = (
                5  # a length that follows measured times would draw differently from one run to the next
            )
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens
        self.max_draft_tokens = max_draft_tokens
        self.draft_sampling = draft_sampling
        self.seed_exact = not draft_sampling
        self.max_nodes = 1 + (num_draft_tokens or max_draft_tokens)
        self.acceptance = Acceptance()
        self.checked: PreTrainedModel | None = None

    def bind(self, model: PreTrainedModel) -> None:
        if isinstance(self.drafter, str):
            # code from a repository is never run, nor asked for
            drafter = AutoModelForCausalLM.from_pretrained(self.drafter, dtype=model.dtype, trust_remote_code=False)
            self.drafter = drafter.to(model.device).eval()
        if self.checked is not model:
            check_vocabulary(model, self.drafter)
        self.checked = model
        self.vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self.largest_id = self.drafter.config.get_text_config(decoder=True).vocab_size - 1

    def begin(
        self, input_ids: torch.Tensor, *, processors: LogitsProcessorList | None = None, do_sample: bool = False
    ) -> None:
        self.processors = processors or LogitsProcessorList()
        self.samples = do_sample and self.draft_sampling
        stock = DynamicCache(config=self.drafter.config.get_text_config(decoder=True))
        self.cache = open_cache(self.drafter, stock, capacity=input_ids.shape[1] + 1024)
        self.cache.keep(0, [])
        self.idle_steps, self.first = 0, None
        self.chain = NOTHING

    def draft(self, input_ids: torch.Tensor, *, max_depth: int) -> DraftTree:
        num_tokens = min(self.num_draft_tokens or self.adapted_length(), max_depth)
        tokens, rows = [input_ids[0, -1:].to(self.drafter.device)], []
        # committed tokens the drafter has not read; ids that only the target's padding has are read as its last one
        block = input_ids[:, self.cache.length :].to(self.drafter.device).clamp(max=self.largest_id)
        for _ in range(num_tokens):
            outputs = self.drafter(input_ids=block, cache=self.cache.cache, use_cache=True, logits_to_keep=1)
            scores = self.fit_width(outputs.logits[:, -1].float())  # [1, v]
            if self.samples:
                q = self.processors(input_ids, scores).softmax(dim=-1)
                rows.append(q[0])
                block = torch.multinomial(q, num_samples=1)
            else:
                block = scores.argmax(dim=-1, keepdim=True)
            tokens.append(block[0])
        chain = torch.cat(tokens).to(input_ids.device)
        parents = torch.arange(-1, num_tokens, device=chain.device)
        q = torch.stack([*rows, rows[-1]]).to(chain.device) if rows else None  # the last node has no children
        self.chain = DraftTree(chain, parents, q=q)
        self.chain.probabilities = [self.acceptance.rate**depth for depth in range(num_tokens + 1)]
        return self.chain

    def observe(self, step: Step) -> None:
        drafted = len(self.chain) - 1
        if drafted:
            accepted = len(self.chain.follow(step.tokens)) - 1
            self.acceptance.update(drafted=drafted, accepted=accepted)
            # rows read beyond the text: drafted tokens but the last; those accepted stay
            read = self.cache.length - (drafted - 1)
            self.cache.keep(read, list(range(min(accepted, drafted - 1))))
            self.chain = NOTHING  # counted; a hybrid may not ask again before the next step

    def end(self) -> None:
        self.cache = None

    def fit_width(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores over exactly the target's vocabulary: padding of either model is never drafted."""
        missing = self.vocab_size - scores.shape[-1]
        return torch.nn.functional.pad(scores, (0, missing), value=-torch.inf) if missing else scores

    def adapted_length(self) -> int:
        """The length that promises most tokens per second; now and then 1 where that is none, to see if it changed."""
        stats = self.stats
        draft, verify = stats.seconds["draft"], stats.seconds["verify"] + stats.seconds["accept"]
        now = (draft, stats.drafted, verify, stats.steps)
        if stats.drafted and self.first is None:
            self.first = now  # the first draft read the prompt, so costs count from here
        elif stats.drafted > self.first[1] if self.first else False:
            draft, drafted, verify, steps = (new - old for new, old in zip(now, self.first, strict=True))
            self.acceptance.cost = (draft / drafted) / (verify / steps)
        length = self.acceptance.best_length(self.max_draft_tokens)
        self.idle_steps = 0 if length else self.idle_steps + 1
        return 1 if self.idle_steps % PROBE_EVERY == PROBE_EVERY - 1 else length


class Acceptance:
    """Running estimate of how likely a drafted token is accepted, and of what drafting one costs in target steps.

    Attributes:
        rate (`float`): alpha of Leviathan et al. 2023, averaged over about the last 50 drafted tokens.
        cost (`float`): c of the same paper, one draft step over one target step.
    """

    def __init__(self):
        self.accepted, self.tried = 3.0, 4.0  # a hopeful start, soon outweighed
        self.cost = 0.2

    @property
    def rate(self) -> float:
        return self.accepted / self.tried

    def update(self, *, drafted: int, accepted: int) -> None:
        """Counts a chain of which `accepted` tokens survived; what came after the first refused one says nothing."""
        tried = min(accepted + 1, drafted)
        decay = 0.98**tried
        self.accepted = self.accepted * decay + accepted
        self.tried = self.tried * decay + tried

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

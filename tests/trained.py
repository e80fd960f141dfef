"""A byte tokenizer with a chat template, a head of one linear layer, and its generator: what training is tested with."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from hf_specdec import DraftTree, SpecGenerator
from hf_specdec.drafter import Drafter, DrafterConfig, load_head, target_fields

VOCAB_SIZE = 264
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a byte, and four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<s>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "</s>"]})
    fast.chat_template = template
    return fast


class LinearConfig(DrafterConfig):
    model_type = "specdec_test_linear"


class LinearHead(Drafter):
    """Predicts the token after next from the feature and the next token's embedding, by one matrix and the target's head."""

    config_class = LinearConfig

    def __init__(self, config):
        super().__init__(config)
        self.fc = nn.Linear(2 * config.target_hidden_size, config.target_hidden_size)
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size or config.target_vocab_size))
        self.post_init()

    @classmethod
    def for_target(cls, model, *, draft_ids=None, **options):
        fields = target_fields(model) | {"feature_layers": [2]} | options
        head = cls(LinearConfig(**fields, draft_vocab_size=None if draft_ids is None else len(draft_ids)))
        if draft_ids is not None:
            head.draft_ids.copy_(draft_ids)
        head.attach(model)
        return head

    def logits(self, state, tokens):
        inputs = torch.cat([self.embeddings(tokens).to(state.dtype), state], dim=-1)
        return nn.functional.linear(self.fc(inputs), self.lm_head.weight[self.draft_ids].to(state.dtype))

    def loss(self, input_ids, hidden, loss_mask):
        wanted = loss_mask[:, 2:]
        logits = self.logits(hidden[0][:, :-2][wanted].to(self.fc.weight.dtype), input_ids[:, 1:-1][wanted])
        labels = torch.searchsorted(self.draft_ids, input_ids[:, 2:][wanted]).clamp(max=len(self.draft_ids) - 1)
        loss = nn.functional.cross_entropy(logits, labels)
        return loss, {"top1": (logits.argmax(-1) == labels).float().mean()}


class LinearGen(SpecGenerator):
    """Drafts one token."""

    name = ""  # not filed: the laws for all methods are not for it
    head_class = LinearHead
    max_nodes = 2

    def __init__(self, head):
        super().__init__()
        self.head = head

    def bind(self, model):
        if isinstance(self.head, str):
            self.head = load_head(self.head, LinearHead)
        self.head.to(model.dtype).attach(model)
        self.hidden_layers = (2,)

    def observe(self, step):
        self.feature = step.hidden[0][step.path[-1] if len(step.hidden[0]) == len(step.tree) else -1]

    @torch.no_grad()
    def draft(self, input_ids, *, max_depth):
        logits = self.head.logits(self.feature[None], input_ids[0, -1:])
        token = self.head.draft_ids[logits.argmax(-1)]
        return DraftTree.chain([int(input_ids[0, -1]), int(token)], device=input_ids.device)

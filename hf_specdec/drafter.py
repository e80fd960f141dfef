"""Drafter: base of trained heads, which read the target's hidden states, borrow its embeddings and are saved alone."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import CommitInfo
from huggingface_hub.dataclasses import strict
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.models import no_progress_bars
from hf_specdec.repository import RECORDS, folder_of
from hf_specdec.vocabulary import check_tokenizer, hashes


@strict
class DrafterConfig(PreTrainedConfig):
    """What a head's weights depend on, and which target they belong to.

    Args:
        target (`str`, *optional*): Hub id or folder of the target.
        target_revision (`str`, *optional*): its revision.
        target_hidden_size, target_num_layers, target_vocab_size (`int`): its sizes; `check` compares them.
        vocabulary_hash, chat_template_hash (`str`, *optional*): of the target's tokenizer.
        feature_layers (`list[int]`): target hidden states (`output_hidden_states` indices) the head reads.
        draft_vocab_size (`int`, *optional*): ids the head can draft; None is all of the target's.
        trained_on (`str`, *optional*): what data, in words.
    """

    model_type = "specdec_drafter"

    target: str | None = None
    target_revision: str | None = None
    target_hidden_size: int = 0
    target_num_layers: int = 0
    target_vocab_size: int = 0
    vocabulary_hash: str | None = None
    chat_template_hash: str | None = None
    feature_layers: list[int] | None = None
    draft_vocab_size: int | None = None
    trained_on: str | None = None

    def validate_known(self) -> None:
        """Raises ValueError for a field that neither transformers nor the head knows, which is a misspelt one."""
        unknown = set(self.__dict__) - set(PreTrainedConfig().__dict__) - set(type(self).__dataclass_fields__)
        unknown = {name for name in unknown if not name.startswith("_")}
        if unknown:
            raise ValueError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}.")


class Drafter(PreTrainedModel):
    """Base of trained heads.

    A subclass names its `config_class` and implements `for_target`, `loss` and whatever its generator calls. `attach` must
    come before any use: it lends the head the target's embeddings and lm_head, which are never saved with it.
    """

    config_class = DrafterConfig
    base_model_prefix = ""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        w = config.draft_vocab_size
        self.register_buffer("draft_ids", None if w is None else torch.arange(w))  # [w] target id of each draft id

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "config_class" in cls.__dict__:  # so that AutoConfig and AutoModel know it
            AutoConfig.register(cls.config_class.model_type, cls.config_class, exist_ok=True)
            AutoModel.register(cls.config_class, cls, exist_ok=True)

    @classmethod
    def for_target(cls, model: PreTrainedModel, **options) -> "Drafter":
        """A new head for `model`, built from its config, attached to it; `options` are fields of the head's config."""
        raise NotImplementedError(f"{cls.__name__} must implement for_target(model, **options)")

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's hidden states that `loss` takes, in order: the features, and the last one (after the final norm)."""
        return (*(self.config.feature_layers or ()), self.config.target_num_layers)

    def save_pretrained(self, save_directory: str | os.PathLike, *, push_to_hub: bool = False, **options) -> None:
        """Writes weights and config; ValueError for `push_to_hub=True`, by which transformers blanks the card."""
        if push_to_hub:
            raise ValueError("save_pretrained(push_to_hub=True) knows no card: call push_to_hub('user/name').")
        super().save_pretrained(save_directory, **options)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        create_pr: bool = False,
        commit_message: str | None = None,
        revision: str | None = None,
        token: str | None = None,
        **about,
    ) -> CommitInfo:
        """Uploads weights, config, card, and the records of training and evaluation that lie where the head was loaded from.

        All in one commit. Arguments as of [`hf_specdec.hub.push`].
        """
        from hf_specdec.hub import push  # which knows all methods, made of this class

        name = Path(self.config.name_or_path or repo_id).name  # by which reports know the head
        with tempfile.TemporaryDirectory() as parent:
            self.save_pretrained(folder := Path(parent, name))
            for record in RECORDS if self.config.name_or_path else ():
                if (path := Path(self.config.name_or_path, record)).is_file():
                    shutil.copyfile(path, folder / record)
            where = dict(private=private, create_pr=create_pr, revision=revision, token=token)
            return push(folder, repo_id, commit_message=commit_message, **where, **about)

    def loss(
        self, input_ids: torch.Tensor, hidden: Sequence[torch.Tensor], loss_mask: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The training loss and detached metrics (sums and counts are the caller's business: each metric is a mean).

        Args:
            input_ids (`torch.Tensor` of shape `(b, t)`): texts, padded on the right.
            hidden (`Sequence[torch.Tensor]`, each `(b, t, h)`): the target's hidden states at `hidden_layers`.
            loss_mask (`torch.Tensor` of shape `(b, t)`, bool): True at tokens of answers, which are to be predicted.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement loss(input_ids, hidden, loss_mask)")

    def attach(self, model: PreTrainedModel) -> None:
        """Checks that this head was made for `model`, and borrows its embeddings and lm_head.

        Raises:
            ValueError: naming both sides' values, if it was made for another model, or one with another vocabulary.
        """
        config = model.config.get_text_config(decoder=True)
        pairs = {
            "hidden size": (self.config.target_hidden_size, config.hidden_size),
            "number of layers": (self.config.target_num_layers, config.num_hidden_layers),
            "vocabulary size": (self.config.target_vocab_size, config.vocab_size),
        }
        for what, (needed, found) in pairs.items():
            if needed and needed != found:  # other projects' heads do not say all of it
                raise ValueError(
                    f"this {type(self).__name__} was made for {self.config.target or 'a target'} with {what} {needed}, but "
                    f"{model.config.name_or_path or type(model).__name__} has {what} {found}: take the head's own target, "
                    "or train a head for this one."
                )
        trained_with = {name: getattr(self.config, name) for name in ("vocabulary_hash", "chat_template_hash")}
        check_tokenizer(model, made_for=self.config.target or "its target", **trained_with)
        # in a list, so that they are neither parameters of the head nor saved with it
        self._borrowed = [model.get_input_embeddings(), model.get_output_embeddings()]

    @property
    def embeddings(self) -> nn.Module:
        """The target's input embeddings, borrowed."""
        return self._borrowed[0]

    @property
    def lm_head(self) -> nn.Module:
        """The target's output embeddings, borrowed."""
        return self._borrowed[1]

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids."""
        return draft_ids if self.draft_ids is None else self.draft_ids[draft_ids]


def target_fields(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> dict:
    """The fields of a `DrafterConfig` that say which target it is for."""
    config = model.config.get_text_config(decoder=True)
    fields = {
        "target": model.config.name_or_path or None,
        "target_revision": getattr(model.config, "_commit_hash", None),
        "target_hidden_size": config.hidden_size,
        "target_num_layers": config.num_hidden_layers,
        "target_vocab_size": config.vocab_size,
    }
    if tokenizer is not None:
        fields |= hashes(tokenizer)
    return fields


def load_head(source: str, head_class: type[Drafter]) -> Drafter:
    """The head in a folder or Hub repository, every tensor accounted for.

    Raises:
        ValueError: for a head of another kind; naming the tensors that are missing or unexpected, or the damaged file.
    """
    folder, kind = folder_of(source), head_class.config_class.model_type
    found = PreTrainedConfig.get_config_dict(folder)[0].get("model_type")
    if found != kind:
        raise ValueError(f"{source} is of the kind {found}, not {kind}, which a {head_class.__name__} is.")
    try:
        with no_progress_bars():
            head, report = head_class.from_pretrained(folder, output_loading_info=True)
    except SafetensorError as error:
        files = ", ".join(str(path.resolve()) for path in sorted(folder.glob("*.safetensors")))  # not links to them
        raise ValueError(f"damaged weights ({error}): delete {files} and fetch them again.") from error
    wrong = {
        kind: sorted(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if report[kind]
    }
    if wrong:
        raise ValueError(f"{source} is not a whole {head_class.__name__}: {wrong}.")
    for parameter in head.parameters():  # the mapped file's rows are not aligned, which costs time and the last bit
        parameter.data = parameter.data.clone()
    return head


def check_ids(draft_ids: torch.Tensor, vocab_size: int) -> None:
    """Raises ValueError unless the map from draft to target ids is increasing and within the target's vocabulary."""
    if bool((draft_ids.diff() <= 0).any()) or int(draft_ids[0]) < 0 or int(draft_ids[-1]) >= vocab_size:
        raise ValueError(
            f"the head's draft vocabulary maps {len(draft_ids)} ids to {int(draft_ids.min())}..{int(draft_ids.max())}; they "
            f"must be increasing and below the target's {vocab_size}: the file is damaged, or belongs to another target."
        )


def narrowed(lm_head: nn.Linear, draft_ids: torch.Tensor | None) -> nn.Linear:
    """The target's lm_head, or a frozen one with its rows for `draft_ids` alone; ValueError if these are not ids of it."""
    if draft_ids is None:
        return lm_head
    check_ids(draft_ids, len(lm_head.weight))
    rows = lm_head.weight.detach()[draft_ids.to(lm_head.weight.device)]  # [w, h]
    cut = nn.Linear(*rows.T.shape, bias=lm_head.bias is not None, device="meta")
    cut.weight = nn.Parameter(rows, requires_grad=False)
    if lm_head.bias is not None:
        cut.bias = nn.Parameter(lm_head.bias.detach()[draft_ids.to(rows.device)], requires_grad=False)
    return cut


def rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rows `(b, heads, n, d)` turned by their positions (RoPE, halves paired)."""
    left, right = rows.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def copy_scale(norm: nn.RMSNorm, source: nn.Module | None) -> None:
    """Gives `norm` the scale of another RMS norm, read off what it makes of ones (Gemma's adds 1 to its weight)."""
    if "RMSNorm" in type(source).__name__:
        with torch.no_grad():
            norm.weight.copy_(
                source(torch.ones_like(norm.weight, dtype=source.weight.dtype, device=source.weight.device))
            )

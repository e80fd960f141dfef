"""Export: `hf-specdec export HEAD --format speculators|sglang`: EAGLE heads, written for the servers that run them at scale.

vLLM reads the speculators library's EAGLE-3; SGLang reads SpecForge's EAGLE-3 and SafeAILab's EAGLE-1 and -2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from hf_specdec.cards import hub_id
from hf_specdec.checkpoints import NORMS, PARTS, load_eagle, read_config
from hf_specdec.drafter import Drafter, DrafterConfig
from hf_specdec.methods.eagle import EagleHead
from hf_specdec.models import EMBEDDED, HUB_ID, load_model
from hf_specdec.repository import folder_of

FORMATS = ("speculators", "sglang")
TOKEN_MAP = "token_map.pt"


def export(
    head: Annotated[str, typer.Argument(help="An EAGLE head: a folder or a Hub id.")],
    format: Annotated[str, typer.Option("--format", help="speculators (vLLM) or sglang.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    target: Annotated[
        str | None, typer.Option("--target", help="Hub id or folder of its target, if not the one in its config.")
    ] = None,
) -> None:
    """Write an EAGLE head in the format of a server: speculators for vLLM, or sglang."""
    kind = read_config(folder_of(head)).get("model_type", "")
    if kind.startswith("specdec_") and kind != EagleHead.config_class.model_type:
        raise ValueError(f"{head} is a head of the kind {kind}: vLLM and SGLang have a format for EAGLE heads alone.")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty: give a new folder.")
    loaded = load_eagle(head, EagleHead)
    check_format(loaded.config, format)
    source = target or loaded.config.target
    if source is None:
        raise ValueError(f"{head} does not say what its target is: give it with --target.")
    name = hub_id(source) or source  # the embedded model's name says which conversion it is
    model, _ = load_model(EMBEDDED if source in (EMBEDDED, HUB_ID) or name == HUB_ID else source, loaded.dtype)
    loaded.to(model.device).attach(model)
    export_eagle(loaded, output, dialect=format, target=HUB_ID if name == EMBEDDED else name)
    print(f"wrote {output}, {format}")
    if (output / TOKEN_MAP).exists():
        print(f"for its reduced draft vocabulary, start SGLang with --speculative-token-map {output / TOKEN_MAP}")


def check_format(config: DrafterConfig, dialect: str) -> None:
    """Raises ValueError, naming the option, for a head that `dialect` cannot hold."""
    if dialect not in FORMATS:
        raise ValueError(f"unknown format {dialect!r}: give speculators (vLLM) or sglang.")
    if not config.fused and dialect == "speculators":
        raise ValueError(
            "this is an EAGLE-1 or -2 head, and vLLM's speculators format is for EAGLE-3: export it as sglang."
        )
    if config.fused:
        lacks = {
            "speculators": {"norm_output=False": not config.norm_output},
            "sglang": {
                "norm_before_residual": config.norm_before_residual,
                "feed_back_normed": config.feed_back_normed,
                "norm_before_fc": config.norm_before_fc,
            },
        }[dialect]
    else:
        lacks = {"own_lm_head": config.own_lm_head, "attention_bias": config.attention_bias}
    found = [option for option, is_set in lacks.items() if is_set]
    if found:
        other = ", or as speculators" if config.fused and dialect == "sglang" else ""
        raise ValueError(f"the {dialect} format cannot hold {', '.join(found)}: export a head trained without{other}.")


def export_eagle(head: Drafter, folder: str | Path, *, dialect: str, target: str) -> None:
    """Writes an attached EAGLE head as `dialect` "speculators" (vLLM; EAGLE-3) or "sglang".

    Where the format has no place for a reduced draft vocabulary, EAGLE-1's and -2's, it comes as a file beside the weights.

    Args:
        target (`str`): Hub id of the target, for the servers that look it up.

    Raises:
        ValueError: for a head that the format cannot hold.
    """
    config = head.config
    check_format(config, dialect)
    if head._rows[1] is not None:
        raise ValueError(
            f"the {dialect} format has no place for the bias of the target's lm_head, which this head drafts with."
        )
    prefix = "midlayer." if config.fused and dialect == "sglang" else "layers.0."
    places = {part.split(".")[-1]: f"{prefix}{part}" for part in PARTS} | {norm: f"{prefix}{norm}" for norm in NORMS}
    tensors = {}
    for name, tensor in head.state_dict().items():
        part, _, kind = name.removeprefix("layer.").rpartition(".")
        if name not in ("draft_ids", "output.weight"):
            tensors[f"{places[part]}.{kind}" if name.startswith("layer.") else name] = tensor
    if config.fused:
        tensors |= output_tensors(head)
    else:
        tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))  # which SGLang always has
    layer = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": config.attention_bias,
        "num_hidden_layers": 1,
        "vocab_size": config.target_vocab_size,
    }
    written = speculators_config(head, layer, target) if dialect == "speculators" else sglang_config(head, layer)
    Path(folder).mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    (Path(folder) / "config.json").write_text(json.dumps(written, indent=2))
    if not config.fused and config.draft_vocab_size is not None:
        torch.save(head.draft_ids.tolist(), Path(folder) / TOKEN_MAP)


def output_tensors(head: Drafter) -> dict[str, torch.Tensor]:
    """EAGLE-3's output matrix, the target's rows where it has none of its own, and the maps of its draft vocabulary."""
    tensors, w = {"lm_head.weight": head._rows[0]}, head.config.draft_vocab_size
    if w is not None:
        ids = head.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(w)
        tensors["t2d"] = torch.zeros(head.config.target_vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def speculators_config(head: Drafter, layer: dict[str, Any], target: str) -> dict[str, Any]:
    """The config that the speculators library and vLLM read."""
    config = head.config
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size or config.target_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.feed_back_normed,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "eagle_aux_hidden_state_layer_ids": list(head.feature_layers),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target},
        },
    }


def sglang_config(head: Drafter, layer: dict[str, Any]) -> dict[str, Any]:
    """The config that SGLang reads; for EAGLE-3 it is SpecForge's."""
    config = head.config
    if not config.fused:
        return layer | {"architectures": ["LlamaForCausalLMEagle"], "tie_word_embeddings": False}
    return layer | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size or config.target_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_output": config.norm_output,
        "fc_norm": config.fc_norm,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in head.feature_layers],
            "use_aux_hidden_state": True,
        },
    }

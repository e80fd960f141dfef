"""Checkpoints: heads of other projects, read into ours; `export.py` writes the other way.

What a file is follows from its tensors and its config, never from its name. SafeAILab's EAGLE-1, -2 and -3, SpecForge's
EAGLE-3 and the speculators library's EAGLE-3 are known.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_specdec.drafter import Drafter, load_head
from hf_specdec.repository import NOT_WEIGHTS, PICKLES, folder_of

PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
PARTS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = ("post_attention_layernorm", "input_layernorm", "hidden_norm")


def load_eagle(source: str, head_class: type[Drafter]) -> Drafter:
    """The EAGLE head in a folder or Hub repository, of whatever dialect, every tensor accounted for.

    Raises:
        ValueError: if the file is damaged, of no known dialect, or a tensor is missing or unexpected; names it.
    """
    folder = folder_of(source)
    config = read_config(folder)
    if config.get("model_type") == head_class.config_class.model_type:
        return load_head(str(folder), head_class)
    tensors = read_tensors(folder)
    fields, tensors = eagle3(config, tensors) if is_eagle3(tensors) else eagle1(config, tensors)
    head = head_class(head_class.config_class(**fields))
    report = head.load_state_dict(tensors, strict=False)
    if report.missing_keys or report.unexpected_keys:
        raise ValueError(
            f"{source} is not a whole EAGLE head: missing {report.missing_keys}, unexpected {report.unexpected_keys}."
        )
    return head.to(next(iter(tensors.values())).dtype)


def load_published(source: str, head_class: type[Drafter], model: PreTrainedModel) -> Drafter:
    """The head in a folder or Hub repository, ours or the authors' own, which `head_class.from_tensors` reads.

    Raises:
        ValueError: if the file is damaged, of no known dialect, or a tensor is missing or unexpected; names it.
    """
    folder = folder_of(source)
    config = read_config(folder)
    if config.get("model_type") == head_class.config_class.model_type:
        return load_head(str(folder), head_class)
    return head_class.from_tensors(read_tensors(folder), config, model)


def convert(head: Drafter, tensors: dict[str, torch.Tensor], names: dict[str, str]) -> Drafter:
    """The head with another project's tensors in it; `names` has theirs for each of ours.

    Raises:
        ValueError: naming the tensors that are missing, unexpected or of another shape.
    """
    missing, unexpected = sorted(set(names.values()) - set(tensors)), sorted(set(tensors) - set(names.values()))
    own = head.state_dict()
    shapes = [name for ours, name in names.items() if name in tensors and tensors[name].shape != own[ours].shape]
    if missing or unexpected or shapes:
        raise ValueError(
            f"this is not a whole {type(head).__name__}: missing {missing}, unexpected {unexpected}, misshapen {shapes}."
        )
    head.to(next(iter(tensors.values())).dtype).load_state_dict(
        {ours: tensors[theirs] for ours, theirs in names.items()}
    )
    return head


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json; ValueError where there is none."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no readable config.json, so it is no head: {error}") from error


def read_tensors(folder: Path, *, device: str = "cpu") -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint: safetensors, which are mapped, else pickles of nothing but tensors, read to `device`."""
    kinds = ("*.safetensors", *PICKLES)
    found = ([file for file in sorted(folder.glob(kind)) if not file.name.startswith(NOT_WEIGHTS)] for kind in kinds)
    tensors: dict[str, torch.Tensor] = {}
    for file in next(filter(None, found), ()):
        try:
            if file.suffix == ".safetensors":
                tensors |= load_file(file)
            else:
                tensors |= torch.load(file, map_location=device, weights_only=True)
        except (SafetensorError, OSError, RuntimeError, EOFError, ValueError, TypeError) as error:
            raise ValueError(f"{file.resolve()} is damaged ({error}): delete it and fetch it again.") from error
        except Exception as error:  # pickle.UnpicklingError and what a truncated archive raises
            raise ValueError(f"{file} is damaged, or holds more than tensors, which is never run: {error}") from error
    return tensors


def is_eagle3(names: Iterable[str]) -> bool:
    """Whether the layer norms its inputs apart and reads both at once, which only EAGLE-3's does."""
    return any(name.endswith("hidden_norm.weight") for name in names)


def shared_fields(config: dict[str, Any], tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, Any]:
    """What the layer's own config and tensors say in every dialect."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": len(tensors[f"{prefix}self_attn.k_proj.weight"]) // head_dim,
        "head_dim": head_dim,
        "hidden_act": config.get("hidden_act", "silu"),
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        # a config without it was trained with 10000, whatever its target has
        "rope_theta": config.get("rope_theta") or rope.get("rope_theta") or 10000.0,
        "attention_bias": f"{prefix}self_attn.q_proj.bias" in tensors,
        "target_vocab_size": config["vocab_size"],
    }


def layer_tensors(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The layer's tensors under our names; they leave `tensors`."""
    names = {f"{prefix}{part}.{kind}": part.split(".")[-1] for part in PARTS for kind in ("weight", "bias")}
    names |= {f"{prefix}{norm}.weight": norm for norm in NORMS}
    return {f"layer.{name}.{key.split('.')[-1]}": tensors.pop(key) for key, name in names.items() if key in tensors}


def eagle1(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config fields and tensors of SafeAILab's EAGLE-1 or -2."""
    prefix, tensors = "layers.0.", dict(tensors)
    if "fc.weight" not in tensors or f"{prefix}self_attn.k_proj.weight" not in tensors:
        raise ValueError(f"this is no EAGLE head of a known dialect; it holds {', '.join(sorted(tensors)[:8])} ...")
    fields = shared_fields(config, tensors, prefix) | {
        "target_hidden_size": config["hidden_size"],
        "fc_bias": "fc.bias" in tensors,
        "own_embeddings": "embed_tokens.weight" in tensors,
    }
    return fields, layer_tensors(tensors, prefix) | tensors


def eagle3(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config fields and tensors of EAGLE-3, of SafeAILab, SpecForge or speculators."""
    tensors = dict(tensors)
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    speculators = "speculators_model_type" in config
    layer_config = config.get("transformer_layer_config", config)
    fields = shared_fields(layer_config, tensors, prefix)
    h, features = tensors["fc.weight"].shape
    target_hidden_size = config.get("target_hidden_size") or layer_config.get("target_hidden_size") or h
    num_features = features // target_hidden_size
    aux = config.get("eagle_aux_hidden_state_layer_ids") if speculators else None
    outputs_of = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if outputs_of:  # SpecForge counts layer outputs, hidden states begin with the embeddings
        aux = [layer + 1 for layer in outputs_of]
    fields |= {
        "fused": True,
        "fc_bias": False,
        "target_hidden_size": target_hidden_size,
        "num_features": num_features,
        "feature_layers": aux,
        "fc_norm": "fc_norm.0.weight" in tensors,
        "norm_before_fc": "input_norm.weight" in tensors,
        # speculators' own default, where an older config of theirs does not say
        "norm_before_residual": config.get("norm_before_residual", True) if speculators else False,
        # one name, two meanings: speculators feed the normed state back, SpecForge norm before the lm_head
        "norm_output": True if speculators else config.get("norm_output", True),
        "feed_back_normed": bool(config.get("norm_output", False)) if speculators else False,
        "own_lm_head": True,
        "own_embeddings": "embed_tokens.weight" in tensors,
    }
    converted = layer_tensors(tensors, prefix)
    converted["output.weight"] = tensors.pop("lm_head.weight")
    offsets, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    w = len(converted["output.weight"])
    if offsets is not None or w < fields["target_vocab_size"]:
        if offsets is None:
            raise ValueError(f"this EAGLE-3 head drafts {w} of {fields['target_vocab_size']} ids, but has no map d2t.")
        fields["draft_vocab_size"] = w
        converted["draft_ids"] = torch.arange(w) + offsets
    return fields, converted | tensors

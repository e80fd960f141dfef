"""Hub: `load` makes the right generator of any repository; `push` uploads heads, datastores and results, each in one commit."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, RepoCard
from huggingface_hub.errors import RepositoryNotFoundError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_specdec
from hf_specdec import cards
from hf_specdec.checkpoints import is_eagle3, read_config, read_tensors
from hf_specdec.datastore import HEADER, Datastore
from hf_specdec.drafter import load_head
from hf_specdec.generator import METHODS, SpecGenerator
from hf_specdec.repository import (
    DATASTORE_FILES,
    EVALUATION,
    HEAD_FILES,
    MODEL_FILES,
    PICKLES,
    TRAINING,
    explained,
    folder_of,
    parse,
)

RESULT_FILES = ("report.md", "report.csv", "report.json", "*.png", "answers-*.jsonl")


def load(
    source: str | os.PathLike,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> SpecGenerator:
    """The generator that drafts with a repository's or folder's contents; its files are fetched now, read when it is bound.

    Heads of ours and of other projects (EAGLE, Medusa, Kangaroo), causal language models (for `SpSGen`) and datastores are
    told apart by their config and their tensors' names. What is in the cache is used without a network.

    Args:
        source (`str`): `user/repo`, `user/repo@revision`, or a folder.
        revision (`str`, *optional*): branch, tag or commit.
        token (`str`, *optional*): for private and gated repositories, where not the one that is logged in.
        cache_dir (`str`, *optional*): in place of the Hub client's own cache.

    Raises:
        OSError: no such repository or folder, no access to it, no such revision, or neither a network nor a cached copy.
        ValueError: if no method can draft with what it holds; when `generate` is called, if it is for another target.
    """
    call = dict(revision=revision, token=token, cache_dir=cache_dir)
    try:
        folder = folder_of(source, files=MODEL_FILES, **call)
    except OSError as error:  # no model, so perhaps a datastore
        try:
            folder = folder_of(source, files=DATASTORE_FILES, repo_type="dataset", **call)
        except OSError as other:
            nothing = [type(failed.__cause__) is RepositoryNotFoundError for failed in (error, other)]
            raise other if nothing == [True, False] else error from None
    return METHODS[method_of(folder, str(source))](str(folder))


def method_of(folder: Path, source: str) -> str:
    """The name of the method that drafts with what a folder holds; ValueError, naming `source`, if there is none."""
    if (folder / HEADER).exists():
        return "rest"
    if not (folder / "config.json").exists():
        raise ValueError(f"{source} holds neither config.json nor {HEADER}: it is no head, model or datastore.")
    config = read_config(folder)
    if method := method_of_head(config):
        return method
    names = read_tensors(folder, device="meta").keys()
    attention = "layers.0.self_attn.k_proj.weight" in names
    if is_eagle3(names) or (attention and "fc.weight" in names):
        return "eagle"
    if any(re.fullmatch(r"(medusa_head\.)?\d+\.\d+\.linear\.weight", name) for name in names):
        return "medusa"
    if attention and not any(".mlp." in name for name in names):
        return "kangaroo"
    if config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "sps"
    raise ValueError(
        f"no method drafts with {source}, model_type {config.get('model_type')!r} with tensors such as "
        f"{', '.join(sorted(names)[:4])}: give an EAGLE, Medusa or Kangaroo head, a causal language model or a datastore."
    )


def method_of_head(config: dict) -> str | None:
    """The method whose heads have this config, None if it is not one of ours."""
    kinds = {method.head_class.config_class.model_type: name for name, method in METHODS.items() if method.head_class}
    return kinds.get(config.get("model_type"))


@dataclass
class Upload:
    """What one commit brings: files by their names in the repository, the card, and which old files it replaces."""

    kind: str
    repo_type: str
    files: dict[str, Path | bytes]
    card: RepoCard
    replaced: tuple[str, ...]


def push(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    **about,
) -> CommitInfo:
    """Uploads a head, a datastore or evaluation results, with a card, in one commit; may be run again after a failure.

    Args:
        private (`bool`, *optional*): for a repository that is new.
        create_pr (`bool`): open a pull request instead of committing.
        revision (`str`, *optional*): branch to commit to, made where it is not there yet.
        about: of the card, see [`collect`].

    Returns:
        The commit; nothing is committed where the repository holds all of it already.

    Raises:
        OSError: the repository may not be written, or the connection broke; nothing is half-written.
        ValueError: if the folder holds nothing known or is not whole; before anything is sent.
    """
    repo_id, revision = own_repo(repo_id, revision)
    upload = collect(folder, repo_id, **about)
    return commit(
        upload,
        repo_id,
        private=private,
        create_pr=create_pr,
        message=commit_message or f"Upload {upload.kind}",
        revision=revision,
        token=token,
    )


def own_repo(repo_id: str, revision: str | None = None) -> tuple[str, str | None]:
    """Id and revision of a repository to write to; ValueError where the owner is not named."""
    repo_id, revision = parse(repo_id, revision)
    if "/" not in repo_id:
        raise ValueError(f"whose repository is {repo_id!r}? write it as user/{repo_id}.")
    return repo_id, revision


def collect(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    results: str | os.PathLike | None = None,
    base_model: str | None = None,
    license: str = "apache-2.0",
    custom_generate: bool = False,
) -> Upload:
    """What would be uploaded of a folder, its card rendered and checked.

    Args:
        results (`str`, *optional*): the report of `hf-specdec eval report` for the head's card.
        base_model (`str`, *optional*): Hub id of the head's target, where its config names a folder.
        license (`str`): of the head's weights or the datastore's texts.
        custom_generate (`bool`): add what `model.generate(custom_generate=repo_id)` runs.

    Raises:
        ValueError: if the folder holds nothing known, is not whole, or the card would not be valid.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}: give that of a head, a datastore or an evaluation's report.")
    of_head = {"results": results, "base_model": base_model, "custom_generate": custom_generate or None}
    if (folder / "config.json").exists():
        upload = head_upload(folder, repo_id, license=license, **of_head)
    elif unfit := [name for name, value in of_head.items() if value is not None]:
        raise ValueError(f"{', '.join(unfit)} is for heads, and {folder} holds no config.json of one.")
    elif (folder / HEADER).exists():
        store = Datastore.open(folder)
        if not store.info()["finished"]:
            raise ValueError(f"{folder} holds an unfinished datastore: run its `add` again first.")
        files = found(folder, DATASTORE_FILES)
        upload = Upload(
            "datastore", "dataset", files, cards.datastore_card(store, repo_id, license=license), DATASTORE_FILES
        )
    elif report := next((path for path in (folder, folder / "report") if (path / "report.json").exists()), None):
        card = cards.results_card(json.loads((report / "report.json").read_text("utf-8")), repo_id.split("/")[-1])
        upload = Upload(
            "results", "dataset", found(folder, RESULT_FILES) | found(report, RESULT_FILES), card, RESULT_FILES
        )
    else:
        raise ValueError(
            f"{folder} holds neither config.json nor {HEADER} nor report.json: there is nothing to upload."
        )
    refuse_tokens(upload)
    cards.check_card(upload.card, upload.repo_type)
    return upload


def head_upload(
    folder: Path,
    repo_id: str,
    *,
    license: str,
    results: str | os.PathLike | None,
    base_model: str | None,
    custom_generate: bool | None,
) -> Upload:
    """The upload of a head of ours, which is loaded to see that it is whole."""
    config = read_config(folder)
    method = method_of_head(config)
    if method is None:
        raise ValueError(
            f"{folder} holds a {config.get('model_type')!r}, no head of hf_specdec: push a model with its own push_to_hub."
        )
    target = cards.hub_id(base_model or config.get("target"))
    if target is None:
        raise ValueError(
            f"the head in {folder} is for {base_model or config.get('target')!r}, which is no Hub id: give its target's as "
            "base_model (--base-model), else nobody can use it."
        )
    files = found(folder, HEAD_FILES)
    if base_model and base_model != config.get("target"):
        files["config.json"] = json.dumps(config | {"target": base_model}, indent=2).encode() + b"\n"
    training = read_json(folder / TRAINING) or {}
    figures = (
        cards.report_figures(Path(results), method, folder.resolve())
        if results
        else read_json(folder / EVALUATION) or []
    )
    if results:
        files[EVALUATION] = json.dumps(figures, indent=1).encode() + b"\n"
    card = cards.drafter_card(
        load_head(str(folder), METHODS[method].head_class),
        method,
        repo_id,
        base_model=target,
        license=license,
        training=training,
        figures=cards.held_out_figures(training, method) + figures,
        custom_generate=bool(custom_generate),
    )
    if custom_generate:
        template = (cards.TEMPLATES / "custom_generate.py").read_text("utf-8")
        files["custom_generate/generate.py"] = template.replace("{{ repo_id }}", repo_id).encode()
        files["custom_generate/requirements.txt"] = f"hf-specdec>={hf_specdec.__version__}\n".encode()
    return Upload(f"{method} head", "model", files, card, (*HEAD_FILES, *PICKLES, "custom_generate/*"))


def read_json(path: Path):
    """What a JSON file holds, None where there is no such file; ValueError if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def found(folder: Path, patterns: tuple[str, ...]) -> dict[str, Path | bytes]:
    """The files in a folder that a pattern allows, by name."""
    return {path.name: path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()}


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a file of a repository is one of `patterns`, in the same folder."""
    return any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)


def refuse_tokens(upload: Upload) -> None:
    """Raises ValueError if a text file to be uploaded holds what looks like an access token."""
    for name, file in upload.files.items():
        if name.endswith((".json", ".jsonl", ".md", ".csv", ".py", ".txt")):
            text = file.decode() if isinstance(file, bytes) else file.read_text(encoding="utf-8", errors="replace")
            if cards.TOKEN.search(text):
                raise ValueError(f"{name} holds what looks like an access token: nothing was uploaded.")


def commit(
    upload: Upload,
    repo_id: str,
    *,
    private: bool | None,
    create_pr: bool,
    message: str,
    revision: str | None,
    token: str | None,
    **space,
) -> CommitInfo:
    """Makes the repository where there is none, and one commit with all files of an upload."""
    hub = HfApi(token=token, library_name="hf-specdec", library_version=hf_specdec.__version__)
    where = dict(repo_id=repo_id, repo_type=upload.repo_type)
    files = {"README.md": str(upload.card).encode(), **upload.files}
    with explained(repo_id, revision, repo_type=upload.repo_type):
        hub.create_repo(**where, private=private, exist_ok=True, **space)
        if revision and not create_pr and not revision.startswith("refs/"):
            hub.create_branch(repo_id, branch=revision, repo_type=upload.repo_type, exist_ok=True)
        there = hub.repo_info(**where, revision=None if create_pr else revision)
        names = [file.rfilename for file in there.siblings]
        old = [name for name in names if name not in files and matches(name, upload.replaced)]
        operations = [CommitOperationAdd(name, file) for name, file in files.items()]
        operations += [CommitOperationDelete(name) for name in old]
        return hub.create_commit(
            **where,
            operations=operations,
            commit_message=message,
            revision=revision,
            create_pr=create_pr,
            parent_commit=there.sha,  # else what somebody commits now would be lost
        )


def push_space(
    repo_id: str, *, private: bool | None = None, create_pr: bool = False, token: str | None = None
) -> CommitInfo:
    """Uploads the Space in one commit: its page, the evaluation reports it shows, what it requires, and its card."""
    repo_id, _ = own_repo(repo_id)
    inside = cards.TEMPLATES  # where a wheel has them
    root = inside if (inside / "app.py").exists() else inside.parent
    files = {
        "app.py": root / "app.py",
        **{str(path.relative_to(root)): path for path in root.glob("eval/results/*/report/report.json")},
        "requirements.txt": f"hf-specdec[app]=={hf_specdec.__version__}\n".encode(),
    }
    upload = Upload("space", "space", files, cards.space_card(), ())
    cards.check_card(upload.card, "space")
    options = dict(message="Upload the Space", revision=None, token=token, space_sdk="gradio")
    return commit(upload, repo_id, private=private, create_pr=create_pr, **options)

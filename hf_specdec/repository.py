"""Repository: the folder with a Hub repository's files, or a folder as it is; errors say what was asked and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

RECORDS = TRAINING, EVALUATION = "training.json", "evaluation.json"
HEAD_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", *RECORDS)
MODEL_FILES = (*HEAD_FILES, "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json")
MODEL_FILES += ("vocab.*", "merges.txt", "*.model", "chat_template.*")
PICKLES = ("*.bin", "*.pt")  # only where there are no safetensors
# what a trainer leaves beside them
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "sampler", "rng_state")
DATASTORE_FILES = ("datastore.json", "tokens-*.npy", "suffixes-*.npy")
UNREAD = ("*/*", "consolidated*", *(f"{name}*" for name in NOT_WEIGHTS))  # the first two: other formats of the weights
LOG_IN = "log in with `hf auth login`, set HF_TOKEN, or give token="


def folder_of(
    source: str | os.PathLike,
    *,
    files: Sequence[str] = HEAD_FILES,
    repo_type: str = "model",
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike | None = None,
) -> Path:
    """The folder `source`, or that of a repository's files in the cache, downloaded where they are not there yet.

    Args:
        source (`str`): a folder, or `user/repo`, or `user/repo@revision`.
        files (`Sequence[str]`): patterns of the files to download; pickled weights come only where no others are.
        revision (`str`, *optional*): branch, tag or commit.

    Raises:
        OSError: no such folder or repository, no access to it, no such revision, or neither a network nor a cached copy.
    """
    if os.path.isdir(source):
        if revision:
            raise ValueError(f"{source} is a folder, which has no revision {revision!r}: leave the revision out.")
        return Path(source)
    repo_id, revision = parse(source, revision)
    call = dict(repo_type=repo_type, token=token, cache_dir=cache_dir, ignore_patterns=[*UNREAD])
    with explained(repo_id, revision, repo_type=repo_type, cache_dir=cache_dir):
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=[*files], **call))
        if repo_type == "model" and not any(folder.glob("*.safetensors")):
            snapshot_download(repo_id, revision=folder.name, allow_patterns=[*files, *PICKLES], **call)
    return folder


def parse(source: str | os.PathLike, revision: str | None = None) -> tuple[str, str | None]:
    """Repository id and revision of `user/repo` or `user/repo@revision`; OSError for what can be neither that nor a folder."""
    repo_id, _, pinned = os.fspath(source).partition("@")
    if pinned and revision and pinned != revision:
        raise ValueError(
            f"{source} names the revision {pinned!r} and revision={revision!r} another: give one of them."
        )
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise FileNotFoundError(
            f"no folder {source}, and a Hub repository is written user/name or user/name@revision."
        ) from error
    return repo_id, revision or pinned or None


@contextmanager
def explained(
    repo_id: str, revision: str | None = None, *, repo_type: str = "model", cache_dir: str | os.PathLike | None = None
) -> Iterator[None]:
    """Raises what goes wrong at the Hub as an OSError that says what was asked, of whom, and what to do."""
    try:
        yield
    except ValueError as error:
        if not isinstance(error, HfHubHTTPError):  # BadRequestError is both
            raise
        raise OSError(said(error, repo_id, revision, repo_type, cache_dir)) from error
    except Exception as error:  # also those of the Hub client's HTTP library, which are no OSErrors
        raise OSError(said(error, repo_id, revision, repo_type, cache_dir)) from error


def said(error: Exception, repo_id: str, revision: str | None, repo_type: str, cache_dir) -> str:
    """The message of an error at the Hub."""
    hub = constants.ENDPOINT
    what = f"the {repo_type} {repo_id!r}" + (f" at {revision!r}" if revision else "")
    page = f"{hub}/{'' if repo_type == 'model' else repo_type + 's/'}{repo_id}"
    if isinstance(error, GatedRepoError):
        return f"{what} is gated: ask for access at {page}, then {LOG_IN}."
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{hub} has no {repo_type} {repo_id!r}, or it is private and you may not see it (nor is there a folder of this "
            f"name): check the spelling; for a private one, {LOG_IN}."
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no revision {revision or 'main'!r}: give a branch, a tag or a whole commit hash; see {page}."
    if isinstance(error, LocalEntryNotFoundError):
        cache = Path(cache_dir or constants.HF_HUB_CACHE)
        answer = first_line(error.__cause__ or error)
        state = "was not asked, since HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"says: {answer}"
        return (
            f"{what} is not, or not whole, in the cache {cache}, and the Hub {hub} {state}. Run once with a network, copy "
            "the cache from a machine that has it, or give a folder."
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        advice = {
            401: f"no valid token is in use: {LOG_IN}",
            403: "the token in use may not do this: take one with the role write, and a name space that is yours, or "
            "open a pull request (create_pr=True)",
            409: "another commit came in between and nothing of this one was written: run it again",
            412: "another commit came in between and nothing of this one was written: run it again",
        }.get(status, "run it again, what is there already is not sent twice" if status >= 500 else first_line(error))
        return f"{what}: the Hub {hub} answered {status}; {advice}."
    if isinstance(error, EntryNotFoundError):
        return f"{what} lacks a file: {first_line(error)}"
    reason = f"{type(error).__name__}: {first_line(error)}"
    return f"{what}: the connection to {hub} broke ({reason}); run it again, it goes on where it stopped."


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind where it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__

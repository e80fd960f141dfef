"""The command line of the Hub: `hf-specdec push | card | space`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.display import err, out
from hf_specdec.repository import EVALUATION

FolderArgument = Annotated[Path, typer.Argument(help="A head, a datastore, or the report of an evaluation.")]
RepositoryArgument = Annotated[str, typer.Argument(help="user/name; it is made where it is not there yet.")]
PrivateOption = Annotated[bool | None, typer.Option("--private/--public", help="For a new repository.")]
PullOption = Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")]
ResultsOption = Annotated[
    Path | None, typer.Option("--results", help="For a head's card: the report of `hf-specdec eval report`.")
]
BaseOption = Annotated[
    str | None, typer.Option("--base-model", help="Hub id of a head's target, where it was trained for a folder.")
]
LicenseOption = Annotated[str, typer.Option("--license", help="Of the head's weights or the datastore's texts.")]
CustomOption = Annotated[
    bool, typer.Option("--custom-generate", help="Also for model.generate(custom_generate='user/name').")
]


def push(
    folder: FolderArgument,
    repository: RepositoryArgument,
    private: PrivateOption = None,
    create_pr: PullOption = False,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Of the commit.")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch to commit to.")] = None,
    results: ResultsOption = None,
    base_model: BaseOption = None,
    license: LicenseOption = "apache-2.0",
    custom_generate: CustomOption = False,
) -> None:
    """Upload a head, a datastore or evaluation results, with a card, in one commit. Log in with `hf auth login` first."""
    from hf_specdec import hub

    done = hub.push(
        folder,
        repository,
        private=private,
        create_pr=create_pr,
        commit_message=message,
        revision=revision,
        results=results,
        base_model=base_model,
        license=license,
        custom_generate=custom_generate,
    )
    say(done)


def card(
    folder: FolderArgument,
    repository: Annotated[str, typer.Option("--repo", help="The repository it is for.")] = "user/name",
    results: ResultsOption = None,
    base_model: BaseOption = None,
    license: LicenseOption = "apache-2.0",
    custom_generate: CustomOption = False,
    write: Annotated[
        bool, typer.Option("--write", help="Put it, and the figures of --results, into the folder.")
    ] = False,
) -> None:
    """Render and check the card that `push` would upload; asks no network."""
    from hf_specdec import hub

    upload = hub.collect(
        folder,
        repository,
        results=results,
        base_model=base_model,
        license=license,
        custom_generate=custom_generate,
    )
    if write:
        made = {name: data for name, data in upload.files.items() if name == EVALUATION and isinstance(data, bytes)}
        for name, data in {"README.md": str(upload.card).encode(), **made}.items():
            (folder / name).write_bytes(data)
    else:
        out.print(str(upload.card), markup=False, highlight=False, soft_wrap=True)
    err.print(f"the card is valid; push would upload README.md, {', '.join(upload.files)}", markup=False)


def space(repository: RepositoryArgument, private: PrivateOption = None, create_pr: PullOption = False) -> None:
    """Upload the Space: the page that compares methods side by side."""
    from hf_specdec import hub

    say(hub.push_space(repository, private=private, create_pr=create_pr))


def say(done) -> None:
    """Prints where the commit or the pull request is."""
    out.print(done.pr_url or done.commit_url, markup=False, highlight=False, soft_wrap=True)

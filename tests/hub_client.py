"""Pointing Hub clients at the server of the tests: this process's, and those of fresh processes."""

import os

from hub_server import WRITER, Hub
from huggingface_hub import constants

from hf_specdec.models import HUB_ID, _converted_folder, _embedded_folder


def point_at(hub: Hub, monkeypatch, cache) -> None:
    """Makes the Hub clients of this process, which were imported without a network in mind, talk to `hub`."""
    url = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # it keeps the address it was made with
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setenv("HF_TOKEN", WRITER)


def environment(hub: Hub, home, **more: str) -> dict[str, str]:
    """Of a fresh process that talks to `hub`, with `home` for its Hugging Face home folder."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_HUB")}
    kept["HF_SPECDEC_CACHE"] = str(_converted_folder().parent)  # the embedded model is not converted once more
    return kept | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_TOKEN": WRITER} | more


def seed_embedded(hub: Hub) -> None:
    """Puts the embedded model's own repository there, where this machine has the model from the Hub."""
    folder, name = _embedded_folder()
    if name == HUB_ID:
        hub.seed(HUB_ID, {path.name: path.read_bytes() for path in folder.iterdir()})

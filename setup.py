"""Puts the card templates and the Space's page, which a checkout has at its top, into the package of a wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithCards(build_py):
    """`build_py`, and behind it the files that `hf-specdec push` and `space` upload."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "hf_specdec", "hub_cards")
            folder.mkdir(parents=True, exist_ok=True)
            for path in [*Path("hub_cards").glob("*.*"), Path("app.py")]:
                shutil.copyfile(path, folder / path.name)
            for path in Path().glob("eval/results/*/report/report.json"):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / path)


setup(cmdclass={"build_py": BuildWithCards})

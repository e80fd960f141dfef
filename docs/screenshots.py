"""Pictures of the Space on the embedded model: each tab at 1280 and 390 pixels, light and dark.

python docs/screenshots.py FOLDER     # FOLDER/side-by-side-1280-light.png is docs/space.png, where the machine is quiet
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parent.parent))  # app.py is no part of the package
import app  # noqa: E402

TABS = {"side-by-side": "Side by side", "results": "Results", "which-method": "Which method?"}


def run_methods(page: Page) -> None:
    """Runs three columns on the example whose answer repeats its prompt."""
    page.get_by_role("button", name="RAG", exact=True).click()
    page.get_by_label("Method 1", exact=True).click()
    page.get_by_role("option", name="hybrid").click()
    page.get_by_label("Precision").click()
    page.get_by_role("option", name="float32").click()
    page.get_by_label("number input for New tokens, at most").fill("96")
    page.locator("#run").click()
    page.locator("#status", has_text="Finished").wait_for()
    page.locator("#tree svg").wait_for()


def shoot(address: str, folder: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width, theme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.set_default_timeout(600_000)  # machines are slow at times
            page.goto(f"{address}?__theme={theme}")
            page.locator("#prompt textarea").wait_for()
            run_methods(page)
            for name, label in TABS.items():
                page.get_by_role("tab", name=label).click()
                page.wait_for_timeout(1000)  # for what moves as a tab opens
                page.screenshot(path=folder / f"{name}-{width}-{theme}.png", full_page=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    _, address, _ = app.launch(prevent_thread_lock=True, quiet=True)
    shoot(address, folder)
    app.demo.close()

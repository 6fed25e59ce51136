"""Takes the pictures of the report that the documentation shows, of the shipped data.

python tools/report_pictures.py            # writes docs/pictures/report*.png; needs Chromium

Look at them before they are committed. A run of another day shows other data, so nothing compares them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
SCREEN = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


@dataclass(frozen=True)
class Picture:
    """One picture: where the page is opened, what is scrolled to, and on what kind of screen."""

    name: str
    address: str
    above: str
    screen: dict[str, int]
    dark: bool = False


ALL = (
    Picture("report", "#q=rope_neox_backward", "#kernels", SCREEN),
    Picture("report-phone", "", "h1", PHONE, dark=True),
    Picture("report-gpus", "#q=norm", "#gpus", SCREEN),
    Picture("report-latency", "#q=rms_norm_fp32", "#latency", SCREEN),
    Picture("report-roofline", "", "#roofline", SCREEN, dark=True),
    Picture("report-coverage", "", "#coverage", SCREEN),
    Picture("report-models", "", "#models", SCREEN),
    Picture("report-kernel", "#kernel=softmax_triton", "h1", SCREEN),
)


def take(page: Path, chromium: str) -> None:
    """Take every picture of a report."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for picture in ALL:
            scheme = "dark" if picture.dark else "light"
            tab = browser.new_context(offline=True, viewport=picture.screen, color_scheme=scheme).new_page()
            tab.goto(f"{page.as_uri()}{picture.address}")
            tab.evaluate("where => document.querySelector(where).scrollIntoView({block: 'start'})", picture.above)
            tab.screenshot(path=PICTURES / f"{picture.name}.png")
            print(PICTURES / f"{picture.name}.png")
        browser.close()


def main() -> int:
    """Write the report of the shipped data and take its pictures; 1 where there is no browser."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("there is no Chromium. Try: apt-get install -y --no-install-recommends chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        environment = {**os.environ, "TILEGYM_DB_HOME": str(Path(folder) / "home")}
        subprocess.run([sys.executable, "-m", "tilegym_db", "report", "-o", str(page)], check=True, env=environment)
        take(page, chromium)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A headless Chromium without a network, for tests of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = '</script><script>alert("x")</script><!--<img src=x onerror=alert(1)>'
MISSING = "there is no Chromium. Try: apt-get install -y --no-install-recommends chromium"
needs_chromium = pytest.mark.skipif(CHROMIUM is None and "CI" not in os.environ, reason=MISSING)
"""Left out where there is no browser; continuous integration, which sets CI, must have one."""


@contextmanager
def chromium_page(**context: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield an empty page of an offline browser, and the list of its errors and requests."""
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, MISSING
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            page = browser.new_context(offline=True, **context).new_page()
            page.set_default_timeout(60_000)
            wrong: list[str] = []
            page.on(
                "console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None
            )
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.on(
                "request",
                lambda request: (
                    None if request.url.startswith("file:") or request.url == "data:," else wrong.append(request.url)
                ),
            )
            yield page, wrong
        finally:
            browser.close()

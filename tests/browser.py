"""Chromium and a running `ambiseg view`, for the tests of its page."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE, DESK = (390, 844), (1440, 900)
SHIFTS = """
window.shifts = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifts += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""
_PATIENCE = 120  # seconds until the command has told its address


@contextmanager
def viewing(*arguments: str, cwd: Path) -> Iterator[str]:
    """The address that ``ambiseg view`` tells; it is ended by Ctrl-C, as a user would, and must end well."""
    command = [sys.executable, "-m", "ambiseg", "view", *arguments, "--no-browser", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=cwd, env=environment
    )
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], _PATIENCE)
        told = process.stdout.readline().decode() if ready else ""
        assert told.startswith("http://127.0.0.1:"), (told, process.poll())
        yield told.strip()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()[-2000:]
        assert b"Traceback" not in errors, errors.decode()[-2000:]
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@contextmanager
def browsing() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, address: str, size: tuple[int, int] = DESK, theme: str = "light") -> Iterator[Any]:
    """The page at an address, ready. At the end: nothing went wrong in it, and nothing was asked of elsewhere."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=theme, has_touch=size[0] < 500
    )
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    own = address.partition("/?")[0]
    foreign = (own + "/", "data:", "blob:")
    page.on("request", lambda request: None if request.url.startswith(foreign) else wrong.append(request.url))
    page.add_init_script(SHIFTS)
    page.goto(address)
    page.wait_for_selector("body[data-ready=yes]")
    try:
        yield page
        assert not wrong, wrong
        assert page.evaluate("window.shifts") < 0.02
        assert page.evaluate("localStorage.length + sessionStorage.length") == 0
    finally:
        context.close()


def settled(page: Any) -> None:
    """Two frames later: what was asked for is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def wait_open(page: Any, name: str, seconds: float = 60) -> None:
    """Until an image of that name is on the page."""
    page.wait_for_function(
        "(name) => !document.querySelector('.busy') && document.querySelector('#about b')?.textContent === name",
        arg=name,
        timeout=1000 * seconds,
    )
    settled(page)


def overlapping(boxes: Sequence[tuple[str, dict[str, float]]]) -> list[tuple[str, str]]:
    """Pairs of boxes that share more than a pixel."""
    found = []
    for i, (one, a) in enumerate(boxes):
        for other, b in boxes[i + 1 :]:
            wide = min(a["x"] + a["width"], b["x"] + b["width"]) - max(a["x"], b["x"])
            tall = min(a["y"] + a["height"], b["y"] + b["height"]) - max(a["y"], b["y"])
            if wide > 1 and tall > 1:
                found.append((one, other))
    return found


def pixels(page: Any, number: int = 0) -> list[int]:
    """A coarse copy of what a panel shows: 32 × 32 grey values."""
    script = """(number) => {
      const from = document.querySelectorAll(".panel canvas")[number];
      const small = document.createElement("canvas");
      small.width = small.height = 32;
      const to = small.getContext("2d");
      to.drawImage(from, 0, 0, 32, 32);
      const { data } = to.getImageData(0, 0, 32, 32);
      return Array.from({ length: 1024 }, (_, i) => data[4 * i] + data[4 * i + 1] + data[4 * i + 2]);
    }"""
    settled(page)
    return page.evaluate(script, number)


def until(check: Any, seconds: float = 20) -> None:
    """Until a function returns something true."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.05)

"""Where things are on the page of `ambiseg view`: inside of their place at every width, and as large as pixels are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser import CHROMIUM, DESK, PHONE, browsing, opened, overlapping, pixels, settled, viewing, wait_open
from tests.files import save

pytest.importorskip("playwright", reason="Playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

CONTROLS = "button, input:not([type=file]), select, summary, .panel"
VISIBLE = """(selector) => [...document.querySelectorAll(selector)].flatMap((one, i) => {
  let { left, top, right, bottom } = one.getBoundingClientRect();
  for (let up = one.parentElement; up; up = up.parentElement) {  // what scrolls or clips
    if (getComputedStyle(up).overflow === "visible") continue;
    const box = up.getBoundingClientRect();
    [left, top] = [Math.max(left, box.left), Math.max(top, box.top)];
    [right, bottom] = [Math.min(right, box.right), Math.min(bottom, box.bottom)];
  }
  if (right - left < 2 || bottom - top < 2 || !one.checkVisibility()) return [];
  const name = `${i} ${one.id || one.ariaLabel || one.textContent}`.trim().slice(0, 40);
  return [[name, { x: left, y: top, width: right - left, height: bottom - top }]];
})"""
SIZES = [PHONE, (768, 1024), (1200, 720), (1280, 800), (1920, 1080)]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with viewing("demo", "sample", cwd=tmp_path_factory.mktemp("view")) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as found:
        yield found


def box(page: Any, selector: str) -> dict[str, float]:
    found = page.locator(selector).bounding_box()
    return {**found, "right": found["x"] + found["width"], "bottom": found["y"] + found["height"]}


def volume(path: Path, tall: float) -> Path:
    """A sphere in millimetres, of pixels that are so many times as tall as wide."""
    nibabel = pytest.importorskip("nibabel")
    x, y, z = np.mgrid[:64, :32, :4].astype(float)
    inside = np.hypot(x - 32, tall * (y - 16)) < 9
    values = np.where(inside, 30, -850).astype(np.int16) + 0 * z.astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([0.5, 0.5 * tall, 2, 1])), path)
    return path


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, (820, 1180), PHONE], ids=["desk", "tablet", "phone"])
def test_nothing_overlaps_and_nothing_moves(browser, address, size, theme):
    with opened(browser, address, size, theme) as page:
        wait_open(page, "sample")
        boxes = page.evaluate(VISIBLE, CONTROLS)
        assert len(boxes) > 20
        assert overlapping(boxes) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall(r"\d+", ground)[0]) < 60) == (theme == "dark")
        assert len(set(pixels(page))) > 50


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_in_decide_can_be_read(browser, address, size):
    with opened(browser, address, size) as page:
        wait_open(page, "sample")
        page.locator("#decide summary").click()
        page.wait_for_selector("#measured tbody")
        keep, place = box(page, "#keep"), box(page, "#decide")
        assert keep["width"] >= 50
        assert keep["right"] <= place["right"] + 1
        room = page.locator("#rule").evaluate("e => e.clientWidth - 34")  # without padding and arrow
        wide = page.locator("#rule").evaluate("""(e) => {
          const to = document.createElement("canvas").getContext("2d");
          to.font = getComputedStyle(e).font;
          return Math.max(...[...e.options].map((one) => to.measureText(one.text).width));
        }""")
        assert wide <= room
        presence = page.locator("#measured tbody tr").first.locator("td")
        assert presence.count() == 1  # under both columns: it is no median


@pytest.mark.filterwarnings("ignore:.*its masks may mean nothing")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_row_of_masks_is_on_the_screen(browser, tmp_path, size):
    """With a list of several columns as well, which leaves the toolbar less room."""
    from ambiseg.prediction import predict

    for name in ("one", "two"):
        predict("demo", volume(tmp_path / f"{name}.nii.gz", 1), tmp_path / "masks")
    with viewing("masks", cwd=tmp_path) as found, opened(browser, found, size) as page:
        wait_open(page, "one")
        if size != PHONE and size[0] > 1000:
            assert box(page, "#strip")["bottom"] <= size[1]
        largest, slider = box(page, "#largest"), box(page, "#slices")
        assert abs((largest["y"] + largest["bottom"]) - (slider["y"] + slider["bottom"])) < 8  # in one row


def test_pixels_that_are_not_square(browser, address, tmp_path):
    with opened(browser, address, (1280, 800)) as page:
        wait_open(page, "sample")
        page.set_input_files("#file", volume(tmp_path / "scan.nii.gz", 2))
        wait_open(page, "scan")
        with page.expect_download() as download:
            page.keyboard.press("v")
        text = download.value.path().read_text()
        width, height = re.findall(r'<image width="(\d+)" height="(\d+)"', text)[0]
        assert (int(width), int(height)) == (64, 64)  # for 32 rows of 64
        for steps in re.findall(r'<path d="([^"]+)"', text):
            ys = [int(y) for y in re.findall(r"M\d+ (\d+)", steps)]
            assert all(y % 2 == 0 for y in ys)
        canvas = page.locator(".panel canvas").first
        at = canvas.bounding_box()
        side = min(at["width"], at["height"])
        page.mouse.move(at["x"] + at["width"] / 2, at["y"] + at["height"] / 2 + 0.48 * side)
        settled(page)
        assert "y 31" in page.inner_text("#readout")  # the last row but one step of the screen


def test_messages_on_a_phone(browser, address, tmp_path):
    with opened(browser, address, PHONE) as page:
        wait_open(page, "sample")
        big = save(tmp_path / "a_picture_with_a_name_that_is_long.tif", np.full((200, 300), -700, np.int16))
        page.set_input_files("#file", big)
        wait_open(page, "a_picture_with_a_name_that_is_long")
        page.locator("#notes summary").click()
        notes = box(page, "#notes ul")
        assert notes["x"] >= 0
        assert notes["right"] <= PHONE[0]
        assert notes["width"] > 250
        (tmp_path / "bad.png").write_text("no picture, whatever its name says")
        page.set_input_files("#file", tmp_path / "bad.png")
        page.wait_for_selector("#error:not([hidden])")
        error = box(page, "#error")
        assert error["x"] >= 0
        assert error["right"] <= PHONE[0]
        assert error["height"] < 80


def test_whole_numbers_have_all_their_digits(browser, address):
    with opened(browser, address) as page:
        told = page.evaluate("""async () => {
          const { number } = await import("/static/state.js");
          return [-1024, 1767, 40123.4, 0.12345, 12.345, 0].map((one) => number(one));
        }""")
        assert told == ["−1024", "1767", "40123", "0.123", "12.3", "0"]

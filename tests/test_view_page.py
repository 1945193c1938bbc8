"""The page of `ambiseg view` in a browser: every control, by mouse, by touch and by keyboard alone."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ambiseg.data import Nodules
from ambiseg.masks import MaskDistribution
from tests.browser import CHROMIUM, PHONE, browsing, opened, pixels, settled, viewing, wait_open
from tests.conftest import SHARED

pytest.importorskip("playwright", reason="Playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("view")


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    with viewing("demo", "sample", cwd=place) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as found:
        yield found


def test_masks_are_previewed_and_pinned(browser, address):
    with opened(browser, address) as page:
        wait_open(page, "sample")
        tiles = page.locator(".tile")
        shares = [float(text.split()[-2]) for text in page.locator("section[data-kind=centre] b").all_inner_texts()]
        assert sum(shares) == pytest.approx(100, abs=2)
        before = pixels(page)
        tiles.nth(0).hover()
        assert pixels(page) != before
        page.mouse.move(5, 5)
        assert pixels(page) == before
        tiles.nth(0).click()
        tiles.nth(2).click()
        settled(page)
        pinned = page.locator(".tile[aria-pressed=true]")
        assert pinned.count() == 2
        colours = {one.evaluate("e => e.style.getPropertyValue('--pin')") for one in pinned.all()}
        assert len(colours) == 2
        page.mouse.move(5, 5)
        assert page.locator("#sizes .mark").count() == 2
        tiles.nth(0).click()
        settled(page)
        assert pinned.count() == 1
        page.locator("#unpin").click()
        settled(page)
        assert pinned.count() == 0
        assert page.locator("#unpin").is_disabled()


def test_every_control_does_something(browser, address):
    with opened(browser, address) as page:
        wait_open(page, "sample")
        for kind, count in (("entropy", 3), ("disagreement", 4)):
            page.check(f"#show-{kind}")
            settled(page)
            assert page.locator(".panel").count() == count
        for number, kind in enumerate(("marginal", "entropy", "disagreement"), 1):
            before = pixels(page, number)
            page.fill(f"#opacity-{kind}", "10")
            assert pixels(page, number) != before, kind
        for kind in ("marginal", "entropy", "disagreement"):
            page.uncheck(f"#show-{kind}")
        settled(page)
        assert page.locator(".panel").count() == 1
        page.uncheck("#contours-strata")
        bare = pixels(page)
        page.fill("#coverage", "50")
        settled(page)
        assert page.is_checked("#contours-masks")
        few = page.inner_text("#coverage-count")
        assert pixels(page) != bare
        page.fill("#coverage", "100")
        settled(page)
        assert page.inner_text("#coverage-count") == "10 of 10 masks, 100 %"
        assert int(few.split()[0]) < 10
        page.uncheck("#contours-masks")
        assert pixels(page) == bare
        assert page.input_value("#low") == "-1000"
        page.select_option("#preset", label="Bone (−500 to 1300)")
        assert pixels(page) != bare
        assert page.input_value("#low") == "-500"
        page.fill("#low", "-1200")
        page.press("#low", "Enter")
        page.locator("#high").focus()
        settled(page)
        assert page.input_value("#preset") == ""
        for button in ("#zoom-in", "#zoom-fit", "#zoom-masks", "#zoom-out"):
            before = pixels(page)
            page.click(button)
            assert pixels(page) != before, button
        page.click("#zoom-fit")
        page.select_option("#class", "0")
        settled(page)
        area = page.inner_text("#sizes")
        page.select_option("#class", "1")
        settled(page)
        assert page.inner_text("#sizes") != area
        box = page.locator(".panel canvas").first.bounding_box()
        middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(*middle)
        settled(page)
        assert re.search(r"x 3\d, y 3\d · −?\d+ · p\(nodule\) [01]\.\d\d", page.inner_text("#readout"))
        for mode in ("window", "pan"):
            page.click(f"#drag-{mode}")
            before = pixels(page)
            page.mouse.move(*middle)
            page.mouse.down()
            page.mouse.move(middle[0] + 60, middle[1] + 40, steps=3)
            page.mouse.up()
            assert pixels(page) != before, mode
        page.mouse.wheel(0, -200)
        before = pixels(page)
        page.dblclick(".panel canvas")
        assert pixels(page) != before
        page.click("#theme")
        assert page.get_attribute("html", "data-theme") == "light"
        page.click("#prediction summary")
        page.fill("#option-draws", "1")
        page.fill("#option-seed", "3")
        page.select_option("#option-symmetries", "2")
        page.click("#again")
        page.wait_for_function("() => document.querySelectorAll('section[data-kind=mask] .tile').length <= 4")


def test_what_is_on_the_screen_is_saved(browser, address, tmp_path):
    from PIL import Image

    def saved(button: str) -> bytes:
        page.click("#save > summary")
        with page.expect_download() as waiting:
            page.click(f"[data-save={button}]")
        path = tmp_path / waiting.value.suggested_filename
        waiting.value.save_as(path)
        return path.read_bytes()

    with opened(browser, address) as page:
        wait_open(page, "sample")
        page.locator(".tile").nth(0).click()
        picture = Image.open(io.BytesIO(saved("png")))
        assert picture.width > 800
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 100
        drawing = ET.fromstring(saved("svg"))
        spaces = {"s": "http://www.w3.org/2000/svg"}
        assert len(drawing.findall(".//s:image", spaces)) == 3  # two panels, one with a map over it
        outlines = [path.get("d", "") for path in drawing.findall(".//s:path", spaces)]
        assert len(outlines) >= 4  # the strata that drew something, and a pinned mask on both panels
        assert all(re.fullmatch(r"(M\d+ \d+([hv]-?\d+)+z)+", one) for one in outlines)
        text = " ".join(one.text or "" for one in drawing.findall(".//s:text", spaces))
        assert "sample" in text
        assert "expert 1" in text
        (tmp_path / "masks.npz").write_bytes(saved("masks-npz"))
        masks = MaskDistribution.load(tmp_path / "masks.npz")
        assert tuple(masks.spatial) == (64, 64)
        assert masks.count == 10
        for kind in ("png", "nifti"):
            assert saved(f"masks-{kind}")[:2] == b"PK"


def test_cases_are_sorted_filtered_and_opened(browser, address):
    with opened(browser, address) as page:
        wait_open(page, "sample")
        names = page.locator("#cases tbody button.open")
        assert names.first.inner_text() == "sample"
        page.click("#cases th[data-key=name] button")
        page.click("#cases th[data-key=name] button")
        settled(page)
        assert page.get_attribute("#cases th[data-key=name]", "aria-sort") == "descending"
        listed = names.all_inner_texts()
        assert listed == sorted(listed, reverse=True)
        page.fill("#filter", "nodule-0047")
        settled(page)
        assert names.all_inner_texts() == ["nodule-0047"]
        assert page.inner_text("#cases-count") == "1 of 496 entries"
        names.first.click()
        wait_open(page, "nodule-0047")
        assert page.locator("section[data-kind=reader] .tile").count() == 4
        with_readers = pixels(page)
        page.uncheck("#contours-readers")
        assert pixels(page) != with_readers
        assert page.locator("#sizes .reader").count() == 4
        page.click("#cases-close")
        assert not page.is_visible("#cases")
        page.click("#list")
        assert page.is_visible("#cases")


def test_the_keyboard_is_enough(browser, address):
    """From the start to a saved picture, with pins and panels, without a pointer."""
    with opened(browser, address) as page:
        wait_open(page, "sample")
        press = page.keyboard.press
        press("n")
        wait_open(page, "nodule-0019")
        press("ArrowRight")
        press("ArrowRight")
        settled(page)
        assert page.evaluate("document.activeElement.className") == "tile"
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"  # where the focus is can be seen
        press("p")
        press("ArrowRight")
        press("Enter")
        settled(page)
        assert page.locator(".tile[aria-pressed=true]").count() == 2
        for key, panels in (("3", 3), ("4", 4), ("2", 3), ("2", 4)):
            press(key)
            settled(page)
            assert page.locator(".panel").count() == panels, key
        for key in ("+", "l", "j", "z", "-", "w", ".", ">"):
            before = pixels(page)
            press(key)
            assert pixels(page) != before, key
        press("0")
        press("]")
        settled(page)
        assert page.inner_text("#coverage-share") == "95 %"
        for key, box in (("e", "strata"), ("r", "readers"), ("m", "masks")):
            before = page.is_checked(f"#contours-{box}")
            press(key)
            settled(page)
            assert page.is_checked(f"#contours-{box}") != before
        press("c")
        settled(page)
        assert page.input_value("#class") == "0"
        press("?")
        assert page.is_visible("#help-panel")
        keys = page.locator("#keys dd").count()
        assert keys >= 20
        press("Escape")
        assert not page.is_visible("#help-panel")
        press("Escape")  # no preview
        press("Escape")  # no pins
        settled(page)
        assert page.locator(".tile[aria-pressed=true]").count() == 0
        press("t")
        assert page.get_attribute("html", "data-theme") == "light"
        press("/")
        assert page.evaluate("document.activeElement.id") == "filter"
        press("Escape")
        with page.expect_download() as waiting:
            press("s")
        assert waiting.value.suggested_filename.endswith(".png")
        unnamed = "(e) => e.filter((one) => !(one.ariaLabel || one.labels?.length || one.textContent.trim())).length"
        assert page.locator("button, input:not([type=file]), select").evaluate_all(unnamed) == 0


def test_a_volume_is_scrolled(browser, address, tmp_path):
    nibabel = pytest.importorskip("nibabel")
    from ambiseg.prediction import predict

    slice_ = predict("demo", "sample", per_stratum=1)[0].source.read(0)[0].astype(np.int16)
    volume = np.stack([slice_, np.roll(slice_, 6, 0), np.full_like(slice_, -800)], 2)
    nibabel.save(nibabel.Nifti1Image(volume, np.diag([0.5, 0.5, 2, 1])), tmp_path / "scan.nii.gz")
    with opened(browser, address) as page:
        wait_open(page, "sample")
        page.set_input_files("#file", tmp_path / "scan.nii.gz")
        wait_open(page, "scan")
        assert "2 × 0.5 × 0.5 mm" in page.inner_text("#about")
        assert page.inner_text("#slice-number") == "slice 2 of 3"
        middle = pixels(page)
        page.keyboard.press("ArrowDown")
        page.wait_for_function("() => document.querySelector('#slice-number').textContent === 'slice 3 of 3'")
        assert pixels(page) != middle
        box = page.locator(".panel canvas").first.bounding_box()
        page.mouse.move(box["x"] + 50, box["y"] + 50)
        page.mouse.wheel(0, -120)
        page.wait_for_function("() => document.querySelector('#slice-number').textContent === 'slice 2 of 3'")
        page.fill("#slice", "0")
        page.wait_for_function("() => document.querySelector('#slice-number').textContent === 'slice 1 of 3'")
        page.wait_for_selector("#largest:not([disabled])")
        page.keyboard.press("g")
        page.wait_for_function("() => !document.querySelector('#slice-number').textContent.includes('slice 3')")
        page.click("#largest")
        assert page.locator("#profile path").count() == 1
        assert "ml" in page.inner_text("#sizes")
        assert page.inner_text("#sizes-title") == "Volume and presence"


def test_what_cannot_be_opened_is_said(browser, address, tmp_path):
    (tmp_path / "notes.png").write_bytes(b"no picture")
    with opened(browser, address, PHONE) as page:
        wait_open(page, "sample")
        page.set_input_files("#file", tmp_path / "notes.png")
        page.wait_for_selector("#error:not([hidden])")
        said = page.inner_text("#error-text")
        assert said.startswith("notes.png: expected")
        assert str(tmp_path) not in said
        assert page.inner_text("#about b") == "sample"  # what was open still is
        page.click("#error-close")
        assert not page.is_visible("#error")


DROP = """([name, bytes]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([Uint8Array.from(bytes)], name));
  const events = { dataTransfer: transfer, bubbles: true, cancelable: true };
  const seen = [];
  for (const kind of ["dragenter", "dragover", "drop"]) {
    const event = new DragEvent(kind, events);
    document.body.dispatchEvent(event);
    seen.push([kind, event.defaultPrevented, document.body.classList.contains("dropping")]);
  }
  return seen;
}"""


def test_files_are_dropped(browser, address, tmp_path):
    slice_ = np.full((48, 40), -800, np.int16)
    slice_[20:30, 12:24] = 40
    np.save(tmp_path / "dropped.npy", slice_)
    with opened(browser, address) as page:
        wait_open(page, "sample")
        seen = page.evaluate(DROP, ["dropped.npy", list((tmp_path / "dropped.npy").read_bytes())])
        assert seen == [["dragenter", False, True], ["dragover", True, True], ["drop", True, False]]
        wait_open(page, "dropped")
        assert "48 × 40" in page.inner_text("#about")
        page.evaluate(DROP, ["notes.png", [1, 2, 3]])
        page.wait_for_selector("#error:not([hidden])")
        assert page.inner_text("#error-text").startswith("notes.png: expected")
        text = """() => {
          const transfer = new DataTransfer();
          transfer.setData("text/plain", "words");
          document.body.dispatchEvent(new DragEvent("dragenter", { dataTransfer: transfer, bubbles: true }));
          return document.body.classList.contains("dropping");
        }"""
        assert not page.evaluate(text)  # words are no files


def test_masks_that_no_model_made_are_saved(browser, place):
    """Of readers alone, and of saved predictions."""
    from ambiseg.prediction import predict

    predict("demo", "sample", place / "made", per_stratum=1, overview=False)
    for arguments, name in ((["made"], "sample"), (["--data", "nodules"], Nodules().names[0])):
        with viewing(*arguments, cwd=place) as other, opened(browser, other) as page:
            wait_open(page, name)
            assert not page.is_visible("#choose")
            page.click("#save > summary")
            with page.expect_download() as waiting:
                page.click("[data-save=masks-png]")
            assert waiting.value.suggested_filename == f"{name}.zip"
            assert Path(waiting.value.path()).read_bytes()[:2] == b"PK"


def test_a_real_scan(browser, address, tmp_path):
    path = SHARED / "data" / "lidc71" / "lidc71.npz"
    if not path.exists():
        pytest.skip("real CT absent: set AMBISEG_SHARED to the folder that holds data/lidc71")
    with np.load(path) as data:
        np.save(tmp_path / "real.npy", data["image"][0])
    with opened(browser, address, PHONE, "dark") as page:
        wait_open(page, "sample")
        page.set_input_files("#file", tmp_path / "real.npy")
        wait_open(page, "real")
        assert "71 × 71" in page.inner_text("#about")
        assert page.locator(".tile").count() >= 5
        page.locator(".tile").nth(0).tap()
        settled(page)
        assert page.locator(".tile[aria-pressed=true]").count() == 1


def test_the_arithmetic_of_the_page(browser, address):
    """Outlines, coverage and disagreement against slow references."""
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 3, (4, 9, 7))
    weights = np.array([0.4, 0.3, 0.2, 0.1])
    script = """async ([masks, weights]) => {
      const { outline, disagreement, coverage, boxOf } = await import("/static/raster.js");
      const labels = masks.map((one) => Uint8Array.from(one.flat()));
      return {
        outlines: labels.map((one) => outline(one, 9, 7, 1)),
        disagreement: [...disagreement(labels, weights, 3)],
        coverage: [0, 0.4, 0.41, 0.7, 1].map((share) => coverage(weights, share).count),
        box: boxOf([Uint8Array.from([0, 0, 0, 0, 1, 0, 0, 0, 0])], 3, 3),
        none: outline(new Uint8Array(63), 9, 7, 1),
      };
    }"""
    with opened(browser, address) as page:
        wait_open(page, "sample")
        found = page.evaluate(script, [masks.tolist(), weights.tolist()])
    assert found["coverage"] == [0, 1, 2, 2, 4]
    assert found["box"] == [1, 1, 1, 1]
    assert found["none"] == ""
    for one, path in zip(masks, found["outlines"], strict=True):
        assert area(path) == (one == 1).sum()
    shares = np.stack([(weights[:, None, None] * (masks == c)).sum(0) for c in range(3)])
    expected = np.round((1 - (shares**2).sum(0)) * 255 / (1 - 1 / 3)).reshape(-1)
    assert np.abs(np.array(found["disagreement"]) - expected).max() <= 1


def area(path: str) -> float:
    """What closed outlines enclose, by the shoelace formula: x dy summed along them; holes run the other way."""
    total, x, y = 0.0, 0, 0
    for command, numbers in re.findall(r"([Mhvz])([^Mhvz]*)", path):
        if command == "M":
            x, y = map(int, numbers.split())
        elif command == "h":
            x += int(numbers)
        elif command == "v":
            total += x * int(numbers)
            y += int(numbers)
    return total


def test_two_runs_are_side_by_side(browser, place):
    with viewing("demo", "nodule-ct", "--data", "nodules", cwd=place) as two, opened(browser, two) as page:
        first = page.locator("#cases tbody button.open").first.inner_text()
        wait_open(page, first)
        titles = page.locator(".panel .what").all_inner_texts()
        assert titles[:2] == ["demo: contours", "nodule-ct: contours"]
        assert page.locator(".run").count() == 2
        assert page.locator("#sizes .sizes").count() == 2
        boxes = [page.locator(".panel").nth(i).bounding_box() for i in range(2)]
        assert boxes[0]["y"] == boxes[1]["y"]
        before = pixels(page, 0), pixels(page, 1)
        page.keyboard.press("+")
        assert pixels(page, 0) != before[0]
        assert pixels(page, 1) != before[1]  # together

"""What `ambiseg view` says of the masks of an image as a whole: one mask, fewer masks, measurements, guarantees."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ambiseg.decisions.calibration import Calibration, ClassThresholds
from ambiseg.decisions.compaction import compact
from ambiseg.decisions.consensus import consensus
from ambiseg.decisions.measure import measure
from ambiseg.prediction import Options, Predictor, predict
from ambiseg.runs import open_run
from ambiseg.serving.scene import PredictionScene
from ambiseg.serving.view.choosing import choose
from ambiseg.serving.view.deciding import BOUNDS, RULES, Decisions
from ambiseg.serving.worker import _Model
from tests.browser import (
    CHROMIUM,
    DESK,
    PHONE,
    browsing,
    opened,
    overlapping,
    pixels,
    settled,
    until,
    viewing,
    wait_open,
)
from tests.test_view import Client, arrays
from tests.test_view_layout import CONTROLS, VISIBLE


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the package as a run with a calibration."""
    folder = tmp_path_factory.mktemp("view") / "mine"
    shutil.copytree(open_run("demo").folder, folder)
    one = ClassThresholds(
        id=1, name="nodule", patients=9, readings=36, outer=0.05, inner=0.4, found=0.2, sure=0.6, area=0.5
    )
    about: dict[str, Any] = {"weights": open_run(folder).digest(), "which": "best", "data": "nodules", "part": "val"}
    about |= {"patients": 9, "images": 9, "per_stratum": 4, "size": ((64, 64), (64, 64)), "classes": [one]}
    Calibration(alpha=0.1, **about).save(folder / "calibration.json")
    return folder


def test_decisions_are_those_of_the_library(calibrated):
    [found] = predict(calibrated, "sample")
    decisions = Decisions(PredictionScene(found), (1,))
    told = decisions.about(keep=2, of=1)
    packed = arrays(decisions.packed(0, 2))[1]
    assert [one["how"] for one in told["consensus"]] == list(RULES)
    for i, one in enumerate(told["consensus"]):
        expected = consensus(found.masks, one["how"])
        assert one["expected_dice"] == pytest.approx(float(expected.expected_dice))
        assert one["pixels"][1] == int((expected.labels == 1).sum())
        assert (packed["consensus"][i] == expected.labels[0].numpy()).all()
    kept = compact(found.masks, 2, classes=(1,))
    assert told["kept"]["weights"] == pytest.approx(kept.masks.mass[0].tolist())
    assert (packed["kept"] == kept.masks.labels[0].numpy()).all()
    assert told["kept"]["pixels"] == [[int((one == c).sum()) for c in (0, 1)] for one in kept.masks.labels[0]]
    assert told["measurements"] == [measure(found.masks, name).summary() for name in (
        "presence", "size", "diameter", "width", "components")]  # fmt: skip
    assert found.guaranteed is not None
    [bound] = found.guaranteed.classes
    for name, labels in zip(BOUNDS, packed["bounds"], strict=True):
        assert (labels == getattr(bound, name)).all()
    [listed] = told["bounds"]["classes"]
    assert listed == {"class": 1, "name": "nodule", "area": list(bound.area), "pixels": [
        int(bound.outer.sum()), int(bound.inner.sum())]}  # fmt: skip
    assert bound.outer.sum() > bound.inner.sum() > 0


@pytest.mark.filterwarnings("ignore:scan. the calibration is of single images")
def test_of_a_volume_every_slice_has_its_own(calibrated, tmp_path):
    sample = predict("demo", "sample", per_stratum=1)[0].source.read(0)[0]
    np.save(tmp_path / "scan.npy", np.stack([sample, np.roll(sample, 6, 0)]))
    with pytest.warns(UserWarning, match="nothing is guaranteed for a volume"):
        [found] = predict(calibrated, tmp_path / "scan.npy", per_stratum=1, axes="DHW")
    decisions = Decisions(PredictionScene(found), (1,))
    whole = consensus(found.masks, "dice").labels[0].numpy()
    for k in range(2):
        header, packed = arrays(decisions.packed(k, 3))
        assert header["slice"] == k
        assert (packed["consensus"][0] == whole[k]).all()
        assert packed["kept"].shape[1:] == (64, 64)
        assert "bounds" not in packed
    assert decisions.about(3, 1)["bounds"] is None


def test_the_worker_knows_the_calibration_of_a_run(calibrated, tmp_path, capsys):
    found = _Model.load(str(calibrated), "best", "cpu").predictor(Options())
    expected = Predictor(calibrated)
    assert found.calibration == expected.calibration
    assert found.calibration is not None
    shutil.copytree(calibrated, tmp_path / "other")
    place = tmp_path / "other" / "calibration.json"
    place.write_text(place.read_text().replace(found.calibration.weights, "0" * 32))
    (tmp_path / "other" / "look.npz").write_bytes(b"damaged")
    other = _Model.load(str(tmp_path / "other"), "best", "cpu").predictor(Options())
    assert (other.calibration, other.lookout.familiarity) == (None, None)
    told = capsys.readouterr().err.splitlines()
    assert [line.startswith("ambiseg: warning: ") for line in told] == [True, True]


def test_what_the_page_may_ask_of_readers(tmp_path):
    asked = Client(choose([], data="nodules"), tmp_path)
    job = asked.post("/v1/cases/7/open", json={}).json()["id"]
    told = asked.get(f"/v1/predictions/{job}/decisions?keep=2&of=1").json()
    assert (len(told["kept"]["weights"]), told["look"], told["bounds"]) == (2, None, None)
    assert arrays(asked.get(f"/v1/predictions/{job}/decisions/0?keep=2").content)[1]["kept"].shape == (2, 64, 64)
    for path, status in {
        f"{job}/decisions?keep=0": 422,
        f"{job}/decisions?keep=65": 422,
        f"{job}/decisions?of=2": 422,
        f"{job}/decisions?of=-1": 422,
        f"{job}/decisions/1": 404,
        f"{job}/decisions/x": 422,
        "none/decisions": 404,
        "none/decisions/0": 404,
    }.items():
        assert asked.get(f"/v1/predictions/{path}").status_code == status, path


# -- in the browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page_of(calibrated: Path) -> Iterator[Any]:
    """Opens the page of a calibrated run in Chromium."""
    pytest.importorskip("playwright", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with viewing(str(calibrated), "sample", cwd=calibrated.parent) as address, browsing() as browser:
        yield lambda *form: opened(browser, address, *form)


def test_decide_is_asked_for_when_it_is_opened_and_everything_has_a_key(page_of):
    with page_of(DESK) as page:
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        wait_open(page, "sample")
        assert not any("decisions" in url for url in requests)
        plain, tiles = pixels(page), page.locator(".tile").count()
        page.keyboard.press("a")
        page.wait_for_selector("#measured tbody tr")
        names = [text.partition(",")[0] for text in page.locator("#measured tbody th").all_inner_texts()]
        assert names == ["Presence", "Size", "Diameter", "Width", "Objects"]
        assert re.fullmatch(r"\d+ %", page.locator("#measured td").first.inner_text())
        assert pixels(page) == plain
        page.keyboard.press("q")
        page.wait_for_selector("section[data-kind=consensus] .tile")
        until(lambda: pixels(page) != plain)  # the mask comes after its numbers
        one = pixels(page)
        assert page.input_value("#rule") == "dice"
        assert re.match(r"expected Dice 0\.\d\d, \d+ pixels", page.inner_text("#rule-told"))
        page.select_option("#rule", "union")
        assert pixels(page) != one
        page.keyboard.press("x")
        page.wait_for_selector("section[data-kind=kept] .tile")
        assert page.locator("section[data-kind=kept] .tile").count() == 3
        page.fill("#keep", "2")
        page.wait_for_function("() => document.querySelectorAll('section[data-kind=kept] .tile').length === 2")
        assert page.inner_text("#kept-told").startswith("instead of ")
        page.locator("section[data-kind=kept] .tile").first.click()
        page.mouse.move(5, 5)
        settled(page)
        assert page.locator("#sizes .mark").count() == 1
        page.keyboard.press("i")
        page.wait_for_selector("section[data-kind=bound] .tile")
        assert page.locator("section[data-kind=bound] .tile").count() == 2
        assert "with probability 90 %" in page.inner_text("#bounds-told")
        page.keyboard.press("c")
        page.wait_for_function("() => document.querySelector('#bounds-told').textContent === 'not for this class'")
        page.keyboard.press("c")
        for box in ("#show-kept", "#show-bounds"):
            page.uncheck(box)
        page.select_option("#rule", "")
        settled(page)
        assert page.locator(".tile").count() == tiles
        assert page.locator(".tile[aria-pressed=true]").count() == 0  # its pin went with it
        page.mouse.move(5, 5)
        assert pixels(page) == plain


@pytest.mark.parametrize("size", [DESK, (1280, 800), PHONE], ids=["desk", "laptop", "phone"])
def test_decide_overlaps_nothing(page_of, size):
    with page_of(size, "dark") as page:
        wait_open(page, "sample")
        page.keyboard.press("a")
        page.wait_for_selector("#measured tbody tr")
        for key in "qxi":
            page.keyboard.press(key)
        page.wait_for_selector("section[data-kind=bound] .tile")
        settled(page)
        assert overlapping(page.evaluate(VISIBLE, CONTROLS)) == []
        for part in ("#measured table", "#bounds-told", "#look"):
            inside = "e => e.scrollWidth <= e.clientWidth + 1 && e.getBoundingClientRect().right <= innerWidth"
            assert page.locator(part).evaluate(inside), part
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]

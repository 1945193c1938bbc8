"""The page of a prediction says in words what the functions of ``ambiseg.decisions`` compute."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from ambiseg import MaskDistribution, MoSE, consensus, measure, predict
from ambiseg.cli import main
from ambiseg.decisions.calibration import Calibration, ClassThresholds, apply
from ambiseg.decisions.compaction import compact
from ambiseg.decisions.measure import MEASURES, measure_all
from ambiseg.prediction import decisions, write
from ambiseg.prediction.exchange import Exchange
from ambiseg.prediction.page import page
from ambiseg.prediction.result import Look, Prediction
from tests.pages import Reader


@cache
def sample() -> Prediction:
    (found,) = predict("demo", "sample")
    return found


def words(prediction: Prediction) -> str:
    return Reader(page(prediction)).text


def test_numbers_are_those_of_the_functions():
    text, masks = words(sample()), sample().masks
    present = float(measure(masks, "presence").mean)
    area = measure(masks, "size", spacing=sample().source.spacing)
    there = replace(area, values=torch.where(area.values > 0, area.values, torch.nan))
    middle, (low, high) = float(there.quantile(0.5)), there.interval(0.9)[0].tolist()
    unit = area.unit
    assert f"Present in {round(100 * present)} of 100 readings" in text
    shown = [f"{x:,.0f}" if x == round(x) or x >= 100 else f"{x:.1f}" for x in (middle, low, high)]
    assert f"{shown[0]} {unit} ; 9 of 10 of these readings are between {shown[1]} and {shown[2]} {unit}" in text
    assert f"{round(100 * float(consensus(masks, 'dice').expected_dice))} % on average." in text
    for weight in compact(masks, 3).masks.mass[0].tolist():
        assert f"{round(100 * weight)} of 100 :" in text
    assert text.count(" of 100 :") == 3


def test_it_needs_no_network_and_every_picture_is_described():
    html = page(sample())
    assert "http:" not in html
    assert "https:" not in html
    assert "<script" not in html
    pictures = Reader(html).all("img")
    assert len(pictures) == 4  # one outline, three readings
    assert all(one["src"].startswith("data:image/") and one["alt"] for one in pictures)


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (None, "Whether this image needs a second look is not known"),
        (Look(0.4), "ambiseg look does that"),
        (Look(0.4, 0.93, 0.2, False, True), "Its readings are expected to differ more than those of 93 of 100"),
        (Look(0.1, 0.31, 0.2, False, False), "Nothing suggests that this image needs a second look"),
        (Look(0.1, 0.31, 1.0, True, True), "It is unlike the images that the model has learned from"),
    ],
)  # fmt: skip
def test_whether_to_look_is_said_first(look, expected):
    text = words(replace(sample(), look=look))
    assert expected in text
    assert text.index(expected) < text.index("Readings that matter")


def test_warnings_and_names_are_text():
    found = words(replace(sample(), name="<b>a & b</b>", notes=("far <i>values</i>",)))
    assert "<b>a & b</b>" in found
    assert "Warning: far <i>values</i>." in found


def test_a_class_that_nobody_marks():
    empty = MaskDistribution(
        torch.zeros(1, 2, 64, 64, dtype=torch.uint8), marginal=torch.eye(2)[:1].view(1, 2, 1, 1).expand(1, 2, 64, 64)
    )
    text = words(replace(sample(), masks=empty))
    assert "In none of the readings" in text
    assert "marks nothing" in text


def test_volumes_show_the_slice_with_most_of_the_outline():
    bare = MoSE(in_channels=1, classes=3, backbone="unet-light")
    (found,) = predict(bare, np.random.default_rng(0).random((3, 1, 32, 32), np.float32), samples=4)
    outline = consensus(found.masks, "dice").labels[0]
    shown = int((outline > 0).flatten(1).sum(1).argmax())
    assert f"3 slices, {shown + 1} is shown" in words(found)


def test_what_a_calibration_guarantees_is_shown():
    level = ClassThresholds(
        id=1, name="nodule", patients=40, readings=160, outer=0.05, inner=0.95, found=0.2, sure=0.8, area=0.5
    )
    about = Calibration(
        alpha=0.1,
        weights="",
        which="best",
        data="d",
        part="val",
        patients=40,
        images=60,
        size=((64, 64), (64, 64)),
        classes=[level],
    )
    bound = apply(about, sample().masks, None)
    html = page(replace(sample(), guaranteed=bound))
    text = Reader(html).text
    assert "What is sure" in text
    assert "Area, checked on 40 patients" in text
    assert "For at least 90 of 100 readers" in text
    [one] = bound.classes
    assert one.outer.any()
    assert "lies within the outer outline" in text
    assert len(Reader(html).all("img")) == 5
    everything = replace(one, outer=np.ones_like(one.outer), inner=np.zeros_like(one.inner))
    html = page(replace(sample(), guaranteed=replace(bound, classes=(everything,))))
    assert "nothing is ruled out in much of the image; no part is marked by all." in Reader(html).text
    assert len(Reader(html).all("img")) == 4


def test_nothing_is_computed_twice(tmp_path, monkeypatch):
    """Files and page ask for the same mask, and for measurements of the same masks."""
    (found,) = predict("demo", "sample", consensus=["dice", "union"], measure=True)
    calls = []
    for name in ("consensus_each", "measure_all", "compact"):
        made = getattr(decisions, name)
        monkeypatch.setattr(decisions, name, lambda *a, made=made, name=name, **k: calls.append(name) or made(*a, **k))
    folder = write(found, tmp_path, exchange=Exchange(page=True))
    page(found)
    assert sorted(calls) == ["compact", "consensus_each", "measure_all"]
    listed = json.loads((folder / "measurements.json").read_text())["measurements"]
    assert [one["what"] for one in listed] == list(MEASURES)
    for one, other in zip(listed, measure_all(found.masks, spacing=found.source.spacing), strict=True):
        assert one["values"] == other.values[0].tolist()
        assert one["unit"] == other.unit


def test_the_command_writes_it(tmp_path, capsys):
    assert main(["predict", "demo", "sample", "--out", str(tmp_path / "p"), "--page", "--quiet"]) == 0
    folder = tmp_path / "p" / "sample"
    assert "Readings that matter" in Reader((folder / "page.html").read_text()).text
    assert json.loads((folder / "weights.json").read_text())["page"] == "page.html"

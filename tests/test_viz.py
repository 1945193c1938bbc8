"""Colours and pictures: what is drawn is what was asked for, and can be told apart."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from ambiseg.masks import MaskDistribution
from ambiseg.prediction.overview import _mask_rows, _strata_rows, draw_overview
from ambiseg.prediction.result import Draw, Options, Prediction, Strata
from ambiseg.viz import pictures
from ambiseg.viz.colours import VOID, class_colours, distinct, heat_colours, label_colours, palette, rgb


@pytest.mark.parametrize("colours", [2, 5, 3000])
@pytest.mark.parametrize("depth", [3, 4])
def test_pictures_in_the_page_are_what_was_drawn(colours, depth):
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (colours, depth), np.uint8)[rng.integers(0, colours, (60, 70))]
    content = base64.b64decode(pictures.data_uri(picture).removeprefix("data:image/png;base64,"))
    with Image.open(io.BytesIO(content)) as image:
        assert image.convert("RGB" if depth == 3 else "RGBA").size == (70, 60)
        assert np.array_equal(np.asarray(image.convert("RGB" if depth == 3 else "RGBA")), picture)


def test_masks_have_the_colours_of_their_classes():
    labels = np.array([[0, 1], [2, 1]])
    shown = pictures.mask(labels, ["#000000", "#ff0000", "#00ff00"], np.array([[True, True], [True, False]]))
    step = len(shown) // 2
    assert shown[0, 0].tolist() == [0, 0, 0]
    assert shown[0, -1].tolist() == [255, 0, 0]
    assert shown[step, 0].tolist() == [0, 255, 0]
    assert shown[-1, -1].tolist() == list(rgb(VOID))
    probs = np.stack([np.full((2, 2), 0.25), np.full((2, 2), 0.75)])
    assert pictures.probability(probs, ["#000000", "#ff0000"])[:, 0, 0].tolist() == [255, 0, 0, 191]
    mixed = pictures.probability(probs, ["#000000", "#ff0000"], ground=False)
    assert mixed[0, 0, 0] == 191  # with class 0
    assert pictures.soft(mixed)[0, 0].tolist() == [190, 0, 0, 215]


def test_outlines_that_coincide_take_turns():
    mask = np.zeros((16, 16), int)
    mask[4:12, 4:12] = 1
    lines = pictures.outlines([mask, mask, np.zeros_like(mask)], ["#ff0000", "#00ff00", "#0000ff"])
    drawn = lines[lines[..., 3] > 0][:, :3]
    assert {tuple(colour) for colour in drawn.tolist()} == {(255, 0, 0), (0, 255, 0)}
    assert 0.4 < (drawn[:, 0] > 0).mean() < 0.6
    assert not lines[0, 0, 3]
    assert not lines[len(lines) // 2, len(lines) // 2, 3]


def test_thin_structures_are_drawn_themselves_and_not_as_two_edges():
    mask = np.zeros((432, 432), np.uint8)
    mask[100, 50:300] = 1
    lines = pictures.outlines([mask], ["#ff0000"], 4)
    assert (lines[..., 3] > 0).sum() == 250
    mask[200:300, 200:300] = 1
    assert not pictures.outlines([mask], ["#ff0000"], 4)[250, 250, 3]  # the inside of what is not thin
    values = np.zeros((864, 864))
    values[500] = 0.6
    assert (pictures.heat(values, 0.6) == pictures.heat(np.full((9, 9), 0.6), 0.6)[0, 0]).all(-1).any(1).sum() == 1


def test_large_images_are_thinned_and_small_ones_are_not():
    for smaller, kind in ((pictures.thinned, int), (pictures.shrunk, float)):
        assert smaller(np.zeros((3, 1024, 2048), kind), 288).shape == (3, 147, 293)
        assert smaller(np.zeros((64, 64), kind), 288).shape == (64, 64)


@given(
    st.lists(st.tuples(st.integers(0, 199), st.integers(0, 149)), min_size=2, max_size=5),
    st.sampled_from([11, 30, 64, 90]),
)
def test_a_line_of_one_pixel_stays_whole_when_it_is_scaled_down(corners, side):
    """Also through blocks that are not full, and beside a large structure."""
    from scipy.ndimage import label

    drawn = Image.new("L", (150, 200))
    ImageDraw.Draw(drawn).line([(x, y) for y, x in corners], fill=1)
    labels = np.asarray(drawn)
    for pixels in (pictures.scaled(labels, side), pictures.laid(labels, ["#000000", "#ff0000"], side=side)[..., 3]):
        parts: Any = label(pixels > 0, np.ones((3, 3)))
        assert parts[1] == 1
    assert (pictures.laid(labels, ["#000000", "#ff0000"], side=side)[..., 3] > 200).any()


def test_of_a_block_the_rarest_class_is_kept_and_the_ground_is_left_over():
    labels = np.ones((40, 40), np.uint8)
    labels[:, 20:] = 0
    labels[10, :] = 3
    labels[:, 5] = 2
    labels[12, 5] = 1
    small = pictures.scaled(labels, 10)
    assert small.dtype == np.uint8
    assert (small[2] == 3).sum() == 9  # the row, but for the block of the column, which is rarer
    assert (small[:, 1] == 2).all()
    assert set(np.unique(small[5:, 5:])) == {0}
    assert pictures.scaled(labels, 10, last=True)[2, 1] == 3


def test_values_are_averaged_and_photographs_are_smooth():
    values = np.zeros((1, 40, 40))
    values[0, ::2] = 100
    assert (pictures.scaled_values(values, 10) == 50).all()
    assert (pictures.photograph(values, (0, 100), side=10) == 128).all()
    steps = pictures.photograph(np.arange(4.0)[None, None].repeat(4, 1), (0, 3), side=40)
    assert len(np.unique(steps)) > 10
    assert steps.shape == (40, 40, 3)
    assert pictures.photo_uri(steps).startswith("data:image/jpeg;base64,")


def test_masks_laid_over_an_image_leave_the_ground_clear():
    labels = np.zeros((64, 64), np.uint8)
    labels[16:48, 16:48] = 1
    void = np.ones((64, 64), bool)
    void[:8] = False
    shown = pictures.laid(labels, ["#000000", "#00ff00"], void, fill=0.4)
    size = len(shown)
    assert shown[size // 2, size // 2].tolist() == [0, 255, 0, 102]
    assert shown[size // 4 + 1, size // 2].tolist() == [0, 255, 0, 255]
    assert shown[size - 2, 2, 3] == 0
    assert tuple(shown[2, 2, :3]) == rgb(VOID)
    image = np.full((size, size, 3), 100, np.uint8)
    assert pictures.over(image, shown)[size // 2, size // 2].tolist() == [60, 162, 60]
    everything = pictures.laid(labels, ["#0000ff", "#00ff00"], ground=False)
    assert everything[size - 2, 2, 2] == 255


def test_overlay_tints_and_outlines_each_class_in_its_colour():
    labels = np.zeros((20, 20), np.uint8)
    labels[4:16, 4:16] = 2
    colours = label_colours(3)
    shown = pictures.overlay(np.full((20, 20, 3), 100, np.uint8), labels, colours)
    assert (shown[0, 0] == 85).all()
    assert shown[4, 8].tolist() == list(rgb(colours[2]))
    assert np.array_equal(shown[10, 10], (0.68 * 85 + 0.32 * np.array(rgb(colours[2]))).astype(np.uint8))
    labels[:] = 1  # nothing changes anywhere, so there is no outline, not at the border either
    assert (
        len(np.unique(pictures.overlay(np.full((20, 20, 3), 9, np.uint8), labels, colours).reshape(-1, 3), axis=0)) == 1
    )


def test_colours_can_be_told_apart():
    assert len(set(distinct(40))) == 40
    assert distinct(40)[:9] == distinct(9)
    assert label_colours(256)[0] == "#000000"
    assert palette(label_colours(256)).shape == (256, 3)
    classes = [f"class {i}" for i in range(8)]
    flipped = class_colours(classes, range(1, 8), [(1, 6), (2, 7)])
    assert len(set(flipped)) == 8
    assert class_colours(classes, range(1, 8))[0] != class_colours(classes, range(8))[0]
    bright = heat_colours(np.linspace(0, 1, 256)).astype(int) @ (299, 587, 114)
    assert (np.diff(bright) >= 0).all()  # lighter is more, in print as well


@pytest.mark.parametrize(("dtype", "shown"), [(np.uint8, [0, 100, 200]), (np.int16, [0, 128, 255])])
def test_bytes_are_shown_as_they_are_and_other_values_are_stretched(dtype, shown):
    image = np.repeat(np.array([[[0, 100, 200]]], dtype), 3, 1)
    picture = pictures.photograph(image, side=3)
    assert picture[0, :, 0].tolist() == shown
    assert (picture == picture[..., :1]).all()
    assert pictures.photograph(image, (0, 400), side=3)[0, 1].tolist() == [64] * 3


# -- the overview of a prediction -------------------------------------------------------------------------------------


def prediction(strata: int, masks: int, slices: int = 1, classes: int = 2) -> Prediction:
    """Strata of weights that fall, or none; masks of equal weight, of which the last is empty."""
    shape = (slices, 12, 20) if slices > 1 else (12, 20)
    labels = torch.randint(1, classes, (1, masks, *shape), dtype=torch.uint8)
    labels[:, -1] = 0
    weights = torch.arange(strata, 0, -1) / sum(range(1, strata + 1))
    found = (
        Strata("head", weights, labels[0, :1].expand(strata, *shape), weights.expand(slices, -1)) if strata else None
    )
    source: Any = SimpleNamespace(slices=slices, size=(12, 20), form="12×20", read=lambda k: np.ones((1, 12, 20)) * k)
    entropy = torch.zeros(shape)
    entropy[-1] = 0.1
    draws = tuple(Draw(i % strata if strata else None, 1 / masks, i) for i in range(masks))
    names = tuple(f"class {c}" for c in range(classes))
    masses = MaskDistribution(labels)
    return Prediction("an image", masses, draws, found, entropy, names, source, "run", "best", Options())


def test_the_overview_has_a_row_per_stratum():
    rows, hidden = _strata_rows(prediction(strata=3, masks=18))
    assert [(row.label, row.weight, row.note) for row in rows] == [
        ("head 1", pytest.approx(3 / 6), "4 of 6 shown"),
        ("head 2", pytest.approx(2 / 6), "4 of 6 shown"),
        ("head 3", pytest.approx(1 / 6), "4 of 6 shown"),
    ]
    assert [title for _, title in rows[0].panels] == ["", *["5.6 %"] * 4]  # the centre, then samples
    assert hidden == ""
    assert _strata_rows(prediction(strata=11, masks=11))[1] == "3 heads more, together 9.1 %"


def test_the_overview_of_a_method_without_strata_has_its_masks():
    rows, hidden = _mask_rows(prediction(strata=0, masks=7))
    assert [len(row.panels) for row in rows] == [5, 2]
    assert (rows[0].label, rows[0].weight, rows[0].panels[0][1], hidden) == ("", None, "14 %", "")
    rows, hidden = _mask_rows(prediction(strata=0, masks=40))
    assert [len(row.panels) for row in rows] == [5, 5, 5, 5]
    assert hidden == "20 masks more, together 50 %"


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize(("strata", "masks", "classes"), [(0, 1, 2), (0, 30, 14), (1, 1, 2), (11, 22, 14)])
def test_the_overview_is_drawn(slices, strata, masks, classes):
    file = io.BytesIO()
    draw_overview(prediction(strata, masks, slices, classes), file)
    assert np.asarray(Image.open(file)).std() > 5

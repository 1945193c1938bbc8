"""Measurements of masks: against corners, hulls and floods that are computed one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from ambiseg._util.errors import ConfigError
from ambiseg.decisions.measure import MEASURES, Measurement, measure, measure_all, table
from ambiseg.masks import MaskDistribution


@st.composite
def stacks(draw):
    """``[N, *spatial]`` bool and a spacing."""
    spatial = draw(st.sampled_from([(1, 6), (6, 1), (4, 5), (7, 3), (2, 3, 4)]))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    masks = rng.random((draw(st.integers(1, 4)), *spatial)) < draw(st.sampled_from([0.0, 0.1, 0.3, 0.7]))
    spacing = tuple(rng.choice([0.5, 0.7, 1.0, 2.5], len(spatial)).tolist()) if draw(st.booleans()) else None
    return masks, spacing


def flood(mask):
    """The objects, which touch nowhere, as masks."""
    left, objects = {tuple(p) for p in np.argwhere(mask)}, []
    while left:
        front, one = [left.pop()], np.zeros_like(mask)
        while front:
            p = front.pop()
            one[p] = True
            near = {tuple(np.add(p, step)) for step in itertools.product((-1, 0, 1), repeat=mask.ndim)} & left
            left -= near
            front += near
        objects.append(one)
    return objects


def corners(mask, step):
    return np.array([(np.add(p, d)) * step for p in np.argwhere(mask) for d in itertools.product((0, 1), repeat=2)])


def chord(points, direction):
    """The longest chord of the hull in a direction: through each corner of the hull, clipped by each of its edges."""
    hull = ConvexHull(points)
    best = 0.0
    for corner in points[hull.vertices]:
        low, high = -math.inf, math.inf
        for a, b, c in hull.equations:  # a x + b y + c ≤ 0 inside
            speed, room = np.dot((a, b), direction), -(np.dot((a, b), corner) + c)
            if speed > 1e-12:
                high = min(high, room / speed)
            elif speed < -1e-12:
                low = max(low, room / speed)
        best = max(best, high - low)
    return best


def axes(mask, spacing):
    """All longest diameters, and the widths that go with them: there may be several equally long ones."""
    step = np.ones(mask.ndim) if spacing is None else np.array(spacing)
    slices = mask if mask.ndim == 3 else mask[None]
    found = []
    for one in (part for single in slices for part in flood(single)):
        points = corners(one, step[-2:])
        for a, b in itertools.combinations(points, 2):
            found.append((float(np.linalg.norm(b - a)), a, b, points))
    if not found:
        return 0.0, {0.0}
    longest = max(length for length, *_ in found)
    widths = set()
    for length, a, b, points in found:
        if length > longest - 1e-9:
            along = (b - a) / length
            widths.add(chord(points, np.array([-along[1], along[0]])))
    return longest, widths


def test_hand_case():
    """A bar of 2 × 3 pixels of 0.5 mm: area 1.5 mm², and its diagonal √(1² + 1.5²)."""
    masks = torch.zeros(1, 2, 6, 6, dtype=torch.long)
    masks[0, 0, 1:3, 2:5] = 1
    found = {one.what: one for one in measure_all(masks, spacing=(0.5, 0.5))}
    assert found["presence"].mean.tolist() == [0.5]
    assert found["size"].values.tolist() == [[1.5, 0]]
    assert found["size"].unit == "mm²"
    assert found["diameter"].values[0].tolist() == pytest.approx([math.hypot(1, 1.5), 0])
    # A chord at a right angle to the diagonal of a rectangle a × b, a < b, is a · diagonal / b long.
    assert found["width"].values[0].tolist() == pytest.approx([1 * math.hypot(1, 1.5) / 1.5, 0])
    assert found["components"].values.tolist() == [[1, 0]]


def test_a_volume_is_in_millilitres_and_its_diameter_in_a_slice():
    masks = torch.zeros(1, 1, 10, 10, 10, dtype=torch.long)
    masks[0, 0, :, 4, 4] = 1  # a rod along the slices
    masks[0, 0, 3, 4, 2:8] = 1
    assert measure(masks, "size", spacing=(2, 1, 1)).values.tolist() == [[15 * 2 / 1000]]
    assert measure(masks, "diameter", spacing=(2, 1, 1)).values[0].tolist() == pytest.approx([math.hypot(6, 1)])
    assert measure(masks, "size").unit == "pixels"


@settings(max_examples=80, deadline=None)
@given(stacks())
def test_every_measure_is_its_definition(case):
    masks, spacing = case
    found = {one.what: one.values[0] for one in measure_all(masks[None], spacing=spacing)}
    assert set(found) == set(MEASURES)
    for i, mask in enumerate(masks):
        assert bool(found["presence"][i]) == mask.any()
        unit = 1 if spacing is None else math.prod(spacing) / (1000 if mask.ndim == 3 else 1)
        assert float(found["size"][i]) == pytest.approx(mask.sum() * unit)
        assert int(found["components"][i]) == len(flood(mask))
        diameter, widths = axes(mask, spacing)
        assert float(found["diameter"][i]) == pytest.approx(diameter)
        assert min(abs(float(found["width"][i]) - width) for width in widths) < 1e-6


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_diameters_of_large_shapes_turn_with_them(seed):
    """Blobs of some hundred pixels; a quarter turn and a mirror change nothing, and width ≤ diameter."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:40, :50]
    masks = np.stack(
        [
            ((y - a) * np.cos(w) + (x - b) * np.sin(w)) ** 2 / r**2
            + ((x - b) * np.cos(w) - (y - a) * np.sin(w)) ** 2 / 9
            <= 1
            for a, b, w, r in rng.uniform((10, 10, 0, 3), (30, 40, 3.1, 12), (3, 4))
        ]
    )
    for what in ("diameter", "width"):
        values = measure(masks[None], what).values
        for other in (np.rot90(masks, axes=(1, 2)), masks[:, ::-1], np.pad(masks, ((0, 0), (3, 9), (2, 0)))):
            again = measure(np.ascontiguousarray(other)[None], what).values
            if what == "diameter":  # of equally long diameters another one may be taken, with another width
                assert torch.allclose(values, again)
        assert (measure(masks[None], "width").values <= measure(masks[None], "diameter").values + 1e-9).all()
    points = [corners(mask, 1.0) for mask in masks]
    hulls = [one[ConvexHull(one).vertices] for one in points]
    longest = [max(np.linalg.norm(a - b) for a, b in itertools.combinations(hull, 2)) for hull in hulls]
    assert measure(masks[None], "diameter").values[0].tolist() == pytest.approx(longest)


def test_objects_in_groups_and_equal_masks_measure_the_same(monkeypatch):
    """Ragged shapes of several objects, with outlines whose corners are few among many."""
    rng = np.random.default_rng(1)
    rough = (rng.random((6, 24, 30)) < 0.35) & (np.hypot(*(np.mgrid[:24, :30] - np.array([[[12]], [[15]]]))) < 11)
    masks = np.concatenate([rough, rough[::2]])
    found = measure_all(masks[None], spacing=(0.7, 0.5))
    for one in found:
        assert one.values[0, :6:2].tolist() == one.values[0, 6:].tolist()
    for i, mask in enumerate(rough):
        diameter, widths = axes(mask, (0.7, 0.5))
        values = {one.what: float(one.values[0, i]) for one in found}
        assert values["diameter"] == pytest.approx(diameter)
        assert min(abs(values["width"] - width) for width in widths) < 1e-6
    monkeypatch.setattr("ambiseg.decisions.objects._AT_ONCE", 200)
    for one, other in zip(found, measure_all(masks[None], spacing=(0.7, 0.5)), strict=True):
        assert torch.allclose(one.values, other.values, rtol=1e-12)


def test_void_pixels_and_absent_readers_do_not_count():
    labels = torch.tensor([[[[1, 1, 2]], [[1, 2, 2]], [[1, 1, 1]]]])
    masks = MaskDistribution(labels, torch.tensor([[0.25, 0.75, 0.0]]), torch.tensor([[[True, False, True]]]))
    assert measure(masks, "size", 1).values[0, :2].tolist() == [1, 1]
    assert measure(masks, "size", 2).mean.tolist() == [1]
    assert measure(masks, "components", 2).values[0, :2].tolist() == [1, 1]
    everywhere = MaskDistribution(labels, valid=torch.zeros(1, 1, 3, dtype=torch.bool))
    assert not any(one.values.any() for one in measure_all(everywhere, (1, 2)))


def test_any_function_of_the_masks():
    def rows(masks, spacing):
        return masks.any(-1).sum(-1) * spacing[0]

    def wrong(masks, spacing):
        return np.zeros(3)

    masks = torch.tensor([[[[1], [0], [1]], [[0], [0], [1]]]] * 2)
    found = measure(masks, rows, spacing=(3.0, 1.0))
    assert (found.what, found.values.tolist()) == ("rows", [[6, 3], [6, 3]])
    with pytest.raises(ValueError, match=r"wrong must return \[2\] numbers, found shape \[3\]"):
        measure(masks, wrong)


def test_statistics_by_hand():
    nan = math.nan
    one = Measurement(
        "size", 1, "", torch.tensor([[1.0, nan, 3.0], [nan, nan, nan]]), torch.tensor([[0.3, 0.4, 0.3]] * 2)
    )
    assert one.mean.tolist()[0] == 2
    assert one.sd.tolist()[0] == 1
    assert one.quantile([0.0, 0.5, 0.51, 1.0])[0].tolist() == [1, 1, 3, 3]
    assert one.probability(above=2).tolist()[0] == 0.5
    assert all(math.isnan(x) for x in (one.mean[1], one.sd[1], one.quantile(0.5)[1], one.probability()[1]))
    assert one.summary(0)["low"] == 1
    assert one.summary(1) == {
        "what": "size", "unit": "", "mean": None, "sd": None, "median": None, "low": None, "high": None, "level": 0.9,
    }  # fmt: skip
    edges, mass = one.histogram(2)
    assert (edges.tolist(), mass.tolist()) == ([1, 2, 3], [0.5, 0.5])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 4)), min_size=1, max_size=8), st.floats(0, 1))
def test_statistics_are_those_of_repeated_values(pairs, q):
    """Weights are counts: everything is as of so many equal values."""
    pairs = [*pairs, (1, 1)]
    values, counts = (np.array(part) for part in zip(*pairs, strict=True))
    one = Measurement("x", 1, "", torch.tensor(values[None]), torch.tensor(counts[None] / counts.sum()))
    plain = np.repeat(values, counts).astype(float)
    assert float(one.mean) == pytest.approx(plain.mean(), abs=1e-9)
    assert float(one.sd) == pytest.approx(plain.std(), abs=1e-6)
    assert float(one.quantile(q)) in {
        np.quantile(plain, x, method="inverted_cdf") for x in (max(q - 1e-6, 0), max(q - 2e-6, 0), q)
    }
    _, mass = one.histogram(5)
    assert float(mass.sum()) == pytest.approx(1)


def test_table_has_a_row_for_each_mask():
    masks = MaskDistribution(torch.tensor([[[[0, 1]], [[2, 2]]]]), torch.tensor([[0.25, 0.75]]))
    text = table(measure_all(masks, (1, 2), (1, 1), ("presence", "size")), ["none", "a", "b"])
    assert text.splitlines() == [
        "mask,weight,a presence,a size (mm²),b presence,b size (mm²)",
        "0,0.25,1.0,1.0,0.0,0.0",
        "1,0.75,0.0,0.0,1.0,2.0",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"what": "weight"}, "measure: expected some of presence, .*, found 'weight'"),
        ({"spacing": (1.0,)}, "spacing: expected 2 positive numbers, found 1.0"),
        ({"spacing": (1.0, 0.0)}, "spacing: expected 2 positive numbers, found 1.0, 0.0"),
        ({"spacing": (1.0, math.nan)}, "spacing: expected 2 positive numbers, found 1.0, nan"),
    ],
)
def test_bad_arguments_are_one_line(arguments, said):
    with pytest.raises(ConfigError, match=said):
        measure(torch.ones(1, 1, 2, 2, dtype=torch.long), **arguments)

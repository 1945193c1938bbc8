"""Scores of large images, whose pixels are taken in bands: the same numbers as of all pixels at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ambiseg import MaskDistribution, bits, masks, overlap, regions
from ambiseg._util import bands as module
from ambiseg._util.bands import bands
from ambiseg._util.errors import DataError
from ambiseg.data import case as cases
from ambiseg.data import loader
from ambiseg.data.case import Case, partition
from ambiseg.data.check.check import check
from ambiseg.data.intensity import Intensity
from ambiseg.data.loader import annotations_of
from ambiseg.evaluation.scoring import ScoringRules, score_masks
from ambiseg.metrics import PROTOCOLS, matched_iou, sample_diversity
from ambiseg.overlap import occurring


@pytest.fixture
def _small(monkeypatch):
    """Bands of a few pixels everywhere."""
    monkeypatch.setattr(bands, "__defaults__", (50,))
    for where in (module, cases):
        monkeypatch.setattr(where, "PIXELS", 50)
    monkeypatch.setattr(MaskDistribution.bands, "__defaults__", (64,))
    for where in (masks, regions):
        monkeypatch.setattr(where, "_AT_ONCE", 64)
    for where in (bits, overlap):
        monkeypatch.setattr(where, "PIXELS", 64)
    monkeypatch.setattr(loader, "_LARGE", 10)


def made(void: bool) -> tuple[Case, MaskDistribution]:
    rng = np.random.default_rng(5)
    smooth = rng.normal(size=(7, 5, 6)).repeat(5, 1).repeat(4, 2)  # [7, 25, 24]
    labels = np.digitize(smooth, (0.2, 1.1)).astype(np.uint8)
    valid = rng.random((25, 24)) < 0.9 if void else None
    case = Case.of(np.zeros((1, 25, 24)), labels[:3], name="a", weights=np.array([1.0, 2.0, 1.0]), valid=valid)
    return case, MaskDistribution(torch.from_numpy(labels[None, 3:]))


def scores(case: Case, drawn: MaskDistribution, protocol: str) -> tuple[dict, list[float]]:
    constant = np.random.default_rng(1).integers(0, 3, (9, 11))
    rules = ScoringRules(protocol, (1, 2), 3, constant=constant)
    annotations = annotations_of([case], torch.from_numpy(case.regions.astype(np.int32))[None])
    found = score_masks(drawn, annotations, "a", "a", rules, "files-4")
    assert found.anchors is not None
    anchors = [value for pair in found.anchors.scores.values() for value in pair]
    return found.scores.scores["files-4"], [found.anchors.spread, *anchors, *occurring(drawn, annotations)]


@pytest.mark.parametrize("void", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_scores_do_not_depend_on_the_bands(void, protocol, request):
    if protocol == "rectangular":
        pytest.skip("has no weighted form")
    case, drawn = made(void)
    whole, anchors = scores(case, drawn, protocol)
    others = matched_iou(drawn, drawn), sample_diversity(drawn)
    request.getfixturevalue("_small")
    again, banded = scores(*made(void), protocol)
    assert banded == anchors  # of whole numbers of pixels
    for name, value in whole.items():
        exact = name in ("ged", "ged_unbiased", "ged_unbiased_both", "matched_iou", "diversity", "empty_mass")
        assert again[name] == (value if exact else pytest.approx(value, rel=1e-12)), name
    assert torch.equal(torch.stack((matched_iou(drawn, drawn), sample_diversity(drawn))), torch.stack(others))


def test_marginals_and_labels_do_not_depend_on_the_bands(request):
    (case, drawn), hidden = made(True), made(True)[0]
    labels, valid, marginal = case.labels, case.valid, drawn.marginal_probs(3)
    annotations = annotations_of([case], torch.from_numpy(case.regions)[None])
    truth, said = annotations.marginal_probs(3), annotations.labels
    request.getfixturevalue("_small")
    assert np.array_equal(hidden.labels, labels)
    assert np.array_equal(hidden.valid, valid)  # type: ignore[arg-type]
    assert torch.equal(drawn.marginal_probs(3), marginal)
    small = annotations_of([hidden], torch.from_numpy(hidden.regions)[None])
    assert small.regions is not None
    assert small.regions.index.dtype == torch.int32  # half the memory
    assert torch.equal(small.regions.size, annotations.regions.size)  # type: ignore[union-attr]
    assert torch.equal(small.marginal_probs(3), truth)
    assert torch.equal(small.labels, said)
    with pytest.raises(ValueError, match=r"class ids must be below classes=2, found 2"):
        drawn.check_classes(2)


@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.float32])
def test_regions_do_not_depend_on_the_bands(kind, request):
    maps = np.random.default_rng(2).integers(0, 3, (4, 13, 17)).astype(kind)
    whole = partition(maps)
    request.getfixturevalue("_small")
    for mine, theirs in zip(partition(maps), whole, strict=True):
        assert np.array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype


def test_masks_of_noise_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(cases, "_REGIONS", 300)
    noise = np.random.default_rng(3).integers(0, 256, (3, 40, 40)).astype(np.uint8)
    expected = r"^a: expected masks whose labels combine in at most 300 ways in one image, found 1,\d\d\d or more"
    with pytest.raises(DataError, match=expected):
        Case.of(np.zeros((1, 40, 40)), noise, name="a")


def test_a_check_goes_on_after_masks_of_noise(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "_REGIONS", 300)
    rng = np.random.default_rng(4)
    for name, most in (("noise", 256), ("discs", 2)):
        for part in ("images", "masks/Ann", "masks/Bob"):
            (tmp_path / part).mkdir(parents=True, exist_ok=True)
            values = np.resize(np.arange(256), (40, 40)) if part == "images" else rng.integers(0, most, (40, 40))
            np.save(tmp_path / part / f"{name}.npy", values.astype(np.uint8))
    found = check(tmp_path, quiet=True)
    assert [case.name for case in found.statistics.cases] == ["discs"]
    assert any(p.file == "noise" and p.message.startswith("expected masks whose labels") for p in found.problems)


def test_intensity_of_some_pixels_in_the_range_of_all():
    image = torch.rand(1, 2, 30, 40)
    own = Intensity(per_image=True)
    assert torch.equal(own(image)[..., ::3], own(image[..., ::3], own.ranges(image)))

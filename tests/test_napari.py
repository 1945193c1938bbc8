"""Layers of a prediction, in a viewer that takes what napari's takes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ambiseg
from ambiseg._util.extras import MissingExtra
from ambiseg.napari import show
from tests.dicom_fakes import enhanced, series
from tests.files import save
from tests.test_dicom_seg_writing import VOLUME, WEIGHTS, prediction


class Viewer:
    """Keeps layers as napari 0.5 and 0.9 would; unknown options are a TypeError there as well."""

    def __init__(self, title: str = "") -> None:
        self.title, self.layers = title, []

    def add_image(
        self, data, *, blending="translucent_no_depth", colormap=None, contrast_limits=None, metadata=None, name=None,
        opacity=1.0, rgb=None, scale=None, units=None, visible=True,
    ) -> Any:  # fmt: skip
        assert np.isfinite(data).all()
        return self._add("image", data, {**locals()})

    def add_labels(
        self, data, *, blending="translucent", colormap=None, metadata=None, name=None, opacity=0.7, scale=None,
        units=None, visible=True,
    ) -> Any:  # fmt: skip
        assert data.dtype.kind in "iu"  # napari refuses others
        assert colormap is None or None in colormap  # a direct colormap needs a colour for all other labels
        return self._add("labels", data, {**locals()})

    def _add(self, kind, data, options):
        assert len(options["scale"]) == data.ndim - bool(options.get("rgb"))
        layer = SimpleNamespace(kind=kind, **{k: v for k, v in options.items() if k != "self"})
        self.layers.append(layer)
        return layer

    def __getitem__(self, name):
        (found,) = [layer for layer in self.layers if layer.name == name]
        return found


@pytest.fixture
def scan(tmp_path):
    return series(tmp_path / "ct", VOLUME)


def test_names_weights_and_order(scan):
    viewer = Viewer()
    assert show(prediction(scan), viewer) is viewer
    names = [layer.name for layer in viewer.layers]
    top = ["way 2, 25 %", "way 1, 75 %", "mask 2, 20 %, empty", "mask 1, 30 %", "mask 0, 50 %"]
    assert names == ["scan", "probability of nodule", "entropy", *top]
    assert [layer.name for layer in viewer.layers if layer.visible] == ["scan", "mask 0, 50 %"]
    assert viewer["mask 0, 50 %"].metadata == {
        "mask": 0, "weight": pytest.approx(0.5), "classes": ["background", "nodule"], "strata": [1],
    }  # fmt: skip
    assert viewer["way 1, 75 %"].metadata["way"] == 1


def test_pixels_are_those_of_the_prediction(scan):
    made, viewer = prediction(scan), Viewer()
    show(made, viewer)
    np.testing.assert_array_equal(viewer["scan"].data, VOLUME)
    for i, weight in enumerate(WEIGHTS):
        np.testing.assert_array_equal(
            viewer[f"mask {i}, {100 * weight:.0f} %{', empty' * (i == 2)}"].data, made.masks.labels[0, i]
        )
    assert made.strata is not None
    np.testing.assert_array_equal(viewer["way 2, 25 %"].data, made.strata.centres[1])
    shares = viewer["probability of nodule"]
    np.testing.assert_allclose(shares.data, made.masks.marginal_probs(2)[0, 1])
    assert shares.contrast_limits == (0, 1)
    assert viewer["entropy"].contrast_limits[1] == pytest.approx(np.log(2))


def test_colours_of_masks_or_of_classes(scan):
    viewer = Viewer()
    show(prediction(scan), viewer)
    tables = [layer.colormap for layer in viewer.layers if layer.kind == "labels" and layer.name.startswith("mask")]
    assert len({table[1] for table in tables}) == 3
    assert all(table[0] == table[None] == "transparent" for table in tables)
    viewer = Viewer()
    show(prediction(scan, ("none", "liver", "lesion")), viewer)
    tables = [layer.colormap for layer in viewer.layers if layer.kind == "labels"]
    assert all(table == tables[0] for table in tables)
    assert set(tables[0]) == {None, 0, 1, 2}
    assert [layer.name for layer in viewer.layers][1:3] == ["probability of liver", "probability of lesion"]


@pytest.mark.parametrize(
    ("make", "scale"),
    [
        (lambda place: series(place / "ct", VOLUME), (2, 0.5, 0.75)),
        (lambda place: series(place / "ct", VOLUME, (0.8, 0.6, 0, 0, 0, -1)), (2, 0.5, 0.75)),
        (lambda place: series(place / "one", VOLUME[:1]), (0.5, 0.75)),
        (lambda place: enhanced(place / "e.dcm", VOLUME, (0, 2, 1, 3)), (2, 0.5, 0.75)),
        (lambda place: save(place / "a.png", VOLUME[0].astype(np.uint8)), (1, 1)),
    ],
)
def test_millimetres(tmp_path, make, scale):
    viewer = Viewer()
    show(prediction(make(tmp_path)), viewer)
    assert all(layer.scale == pytest.approx(scale) for layer in viewer.layers)
    units = None if scale == (1, 1) else "mm"  # napari's scale bar says "pixel" without
    assert all(layer.units == units for layer in viewer.layers)


def test_colour_pictures_and_other_channels(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3), np.uint8)
    viewer = Viewer()
    show(prediction(save(tmp_path / "a.png", pixels)), viewer)
    assert viewer["scan"].rgb is True
    np.testing.assert_array_equal(viewer["scan"].data, pixels)
    viewer, image = Viewer(), np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)
    model = ambiseg.MoSE(in_channels=2, classes=2, backbone="unet-light")
    [made] = ambiseg.predict(model, image, samples=2)
    show(made, viewer)
    np.testing.assert_array_equal(viewer["image_0, channel 1"].data, image[1])
    assert not viewer["image_0, channel 1"].visible


def test_the_most_likely_masks_alone_and_methods_without_strata(scan):
    viewer = Viewer()
    show(prediction(scan, strata=0), viewer, masks=2)
    assert [layer.name for layer in viewer.layers][3:] == ["mask 1, 30 %", "mask 0, 50 %"]


def test_napari_itself_is_imported_when_no_viewer_is_given(scan, monkeypatch):
    monkeypatch.setitem(sys.modules, "napari", SimpleNamespace(Viewer=Viewer, __spec__=SimpleNamespace()))
    viewer = show(prediction(scan))
    assert (viewer.title, len(viewer.layers)) == ("ambiseg: scan", 8)
    monkeypatch.delitem(sys.modules, "napari")
    monkeypatch.setattr("ambiseg._util.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"expected the package napari, .* pip install 'ambiseg\[napari\]'"):
        show(prediction(scan))

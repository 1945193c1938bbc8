"""Prediction with any method: with samples only, and with strata of another kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ambiseg._util.errors import DataError
from ambiseg.methods.base import Method
from ambiseg.methods.drawing import draw as draw_masks
from ambiseg.prediction import Options, Predictor, predict, slices
from ambiseg.prediction.inputs import array_source
from ambiseg.prediction.slices import held_bytes
from tests.drop_ins import Latent, TwoHeads
from tests.test_prediction import dropped_in, fresh, noise


@pytest.mark.parametrize("method", [Latent, TwoHeads])
@pytest.mark.parametrize("options", [{}, {"samples": 5, "seed": 2}])
def test_any_method_predicts_images_and_volumes(method, options):
    model, volume = dropped_in(method), noise(4, 1, 18, 22)
    volume[1:3] = volume[0]
    strata = method is TwoHeads
    [image], [one] = (predict(model, pixels, merge=False, **options) for pixels in (volume[0], volume))
    form = "compact" if strata and not options else "standard"
    assert (image.form, len(image.draws)) == (form, options.get("samples", 8 if strata else 16))
    assert (image.strata is not None, one.strata is not None) == (strata, strata)
    truth = model.predict(model.card.prepare(torch.from_numpy(volume[:1])))
    generator = torch.Generator().manual_seed(options.get("seed", 0))
    theirs = draw_masks(truth, form, len(image.draws), generator).masks
    assert torch.equal(image.masks.labels[0, [draw.mask for draw in image.draws]], theirs.labels[0])
    assert torch.allclose(image.masks.marginal, theirs.marginal, atol=1e-6)  # type: ignore[arg-type]
    labels = one.masks.labels[0, [draw.mask for draw in one.draws]]  # [N, D, H, W]
    assert torch.equal(labels[:, 1], labels[:, 0])  # one noise for all slices
    assert torch.equal(labels[:, 2], labels[:, 0])
    if not strata or form == "compact":  # strata are drawn by the weights of the volume, which are others
        assert torch.equal(labels[:, 0], theirs.labels[0])
    assert not torch.equal(labels[:, 3], labels[:, 0])
    assert len(labels[:, 0].unique(dim=0)) > 1
    if one.strata is None:
        assert {draw.stratum for draw in one.draws} == {None}
        assert one.strata_of(0) == []
    else:
        assert one.strata.name == "head"
        assert torch.allclose(one.strata.slice_weights[0], truth.weights[0])  # type: ignore[attr-defined]
        assert torch.equal(one.strata.centres[:, 0], truth.centres()[0])  # type: ignore[attr-defined]


def test_progress_is_exact_and_no_slice_is_computed_without_need(monkeypatch):
    monkeypatch.setattr(slices, "_KEPT", 0)

    def steps(method: type[Method], pixels: np.ndarray, **options) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        made = Predictor(dropped_in(method), Options(**options))
        made(array_source(pixels, "a"), progress=lambda done, total: found.append((done, total)))
        return found

    volume, image = noise(3, 1, 8, 8), noise(1, 16, 40)
    assert steps(Latent, volume) == [(1, 3), (2, 3), (3, 3)]
    assert steps(TwoHeads, volume) == [(1, 3), (2, 3), (3, 3), (4, 6), (5, 6), (6, 6)]  # weights, then masks
    assert steps(Latent, image, window=16, overlap=0) == [(1, 3), (2, 3), (3, 3)]
    # Every window for the weights, and for draws and centres together
    assert steps(TwoHeads, image, window=16, overlap=0) == [
        *((i, 3) for i in (1, 2, 3)),
        *((i, 6) for i in (4, 5, 6)),
    ]


def test_a_method_whose_draws_differ_between_windows_says_so(monkeypatch):
    model = dropped_in(Latent)
    monkeypatch.setattr(Latent, "incoherent", "its noise depends on the size of the image")
    predict(model, noise(1, 24, 40))
    with pytest.raises(
        DataError, match=r"image_0: expected one image taken whole, found 2 slices of 8×8: its noise dep"
    ):
        predict(model, noise(2, 1, 8, 8))
    with pytest.raises(
        DataError, match=r"found 24×40 in windows \(window=0 takes it whole\): its noise depends on the size"
    ):
        predict(model, noise(1, 24, 40), window=16)


def test_memory_of_a_predictive_is_that_of_its_features():
    model = fresh()
    features = 4 * (4 * 16 * 16 + 8 * 8 * 8)  # dense, and what the gate reads
    assert features <= held_bytes(model.predict(torch.rand(1, 1, 16, 16))) <= features + 4 * 3
    tensor = torch.zeros(6)
    assert held_bytes([tensor, tensor[:2], {"again": tensor}]) == 24

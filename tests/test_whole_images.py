"""What is scored: whole images of any size as new images are predicted, or their middle, and that it is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg import MaskDistribution
from ambiseg._util.errors import ConfigError
from ambiseg.cli import main
from ambiseg.config import parse
from ambiseg.data import loader
from ambiseg.data.loader import WHOLE, BatchSampler
from ambiseg.data.module import DataModule
from ambiseg.evaluation import evaluate
from ambiseg.evaluation.results import CaseScores, Evaluation, Region
from ambiseg.methods.base import Stratified
from ambiseg.nn import windows
from ambiseg.nn.config import BackboneConfig
from ambiseg.prediction import Predictor
from ambiseg.runs import Run
from ambiseg.training import train
from tests.conftest import TINY
from tests.drop_ins import Latent
from tests.files import save

SIZES = [(40, 40), (48, 36), (33, 50)]
CPU = {"accelerator": "cpu", "quiet": True}


@pytest.fixture(scope="module")
def scans(tmp_path_factory) -> Path:
    """Discs in pictures of three sizes."""
    root, rng = tmp_path_factory.mktemp("unequal") / "scans", np.random.default_rng(0)
    for i in range(18):
        height, width = SIZES[i % 3]
        y, x = np.mgrid[:height, :width]
        distance = np.hypot(y - rng.integers(12, height - 12), x - rng.integers(12, width - 12))
        picture = 60 + 100 * (distance < 7) + rng.normal(0, 15, (height, width))
        part = root / ("train" if i < 6 else "val" if i < 12 else "test")
        save(part / f"images/c{i:02d}.png", picture.clip(0, 255).astype(np.uint8))
        for reader, radius in (("Ann", 6), ("Bob", 8)):
            save(part / f"masks/{reader}/c{i:02d}.png", ((distance < radius) * 255).astype(np.uint8))
    return root


@pytest.fixture(scope="module")
def run(scans, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unequal") / "run"
    options = ["--data.name=folder", f"--data.root={scans}", "--data.size=32", "--data.options={}"]
    train(parse([*TINY, *options, "--trainer.epochs=1"]), folder, quiet=True)
    return folder


# -- batches ----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([(8, 8), (8, 9), (700, 700), (2000, 2000)]), min_size=1, max_size=30),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_batches_are_of_one_size_and_bounded(sizes, most, processes):
    def batches(processes: int) -> list[tuple[int, ...]]:
        parts = [
            BatchSampler(range(len(sizes)), most, shuffle=False, rank=rank, processes=processes, sizes=sizes)
            for rank in range(processes)
        ]
        assert all(len(part) == len(list(part)) for part in parts)
        return [spec.indices for part in parts for spec in part]

    found = batches(1)
    assert sorted(i for batch in found for i in batch) == list(range(len(sizes)))
    for batch in found:
        (size,) = {sizes[i] for i in batch}
        assert len(batch) == 1 or len(batch) * size[0] * size[1] <= WHOLE
        assert len(batch) <= most
    assert sorted(batches(processes)) == sorted(found)  # whatever the number of processes


# -- the same as a new image ------------------------------------------------------------------------------------------


def _short(case: CaseScores) -> str:
    return case.name.split("/")[-1]


def _size(case: CaseScores) -> tuple[int, int]:
    return SIZES[int(_short(case)[1:]) % 3]


def _is_that_of_new_images(found: Evaluation, run: Path, scans: Path) -> None:
    predictor = Predictor(run)
    for case in found.cases:
        strata = predictor(scans / f"test/images/{_short(case)}.png").strata
        assert strata is not None
        assert case.strata_weights == pytest.approx(strata.weights.tolist(), abs=2e-6)


def test_each_image_is_scored_as_if_it_were_alone(run, scans):
    """Padding to a common size would change what the gate sees."""
    found = evaluate(run, samples=(4,), **CPU)
    assert found.region == Region(kind="whole")
    assert [case.name for case in found.cases] == list(Run(run).split.parts["test"])
    assert len({_size(case) for case in found.cases}) == 3
    _is_that_of_new_images(found, run, scans)


def test_large_images_are_scored_by_windows_as_they_are_predicted(run, scans, monkeypatch):
    for place, limit in ((windows, 1500), (loader, 1500)):
        monkeypatch.setattr(place, "WHOLE", limit)
    monkeypatch.setattr(windows, "WINDOW", 32)
    found = evaluate(run, samples=(4,), **CPU)
    assert found.region is not None
    assert found.region.text == "whole images, by up to 4 windows"
    _is_that_of_new_images(found, run, scans)


def test_features_in_a_batch_are_those_of_the_image_alone(run):
    opened = Run(run)
    data = DataModule(opened.config.data, split=opened.split)
    data.setup()
    method, several = opened.model().method, 0
    for batch in data.val_dataloader():
        together = method.predict_whole(batch.images)
        assert isinstance(together, Stratified)
        assert batch.annotations.valid is None
        several += len(batch) > 1
        for i in range(len(batch)):
            alone = method.predict_whole(batch.images[i : i + 1])
            assert isinstance(alone, Stratified)
            assert torch.allclose(alone.weights, together.weights[i : i + 1], atol=1e-6)
            noise = together.centre_noise()
            assert torch.allclose(alone.probs(alone.centre_noise())[0], together.probs(noise)[i], atol=1e-5)
    assert several


def test_methods_whose_draws_do_not_hold_for_all_windows_say_so(monkeypatch):
    method = Latent.build(Latent.Config(), BackboneConfig(channels=[8, 16]), 1, 2)
    monkeypatch.setattr(Latent, "incoherent", "every pixel is drawn by itself")
    assert isinstance(method.predict_whole(torch.zeros(2, 1, 32, 32)).sample(2), MaskDistribution)
    monkeypatch.setattr(windows, "WHOLE", 1000)
    monkeypatch.setattr(windows, "WINDOW", 16)
    with pytest.raises(ConfigError, match=r"32×32, which is taken by windows: every pixel .* data.eval_size"):
        method.predict_whole(torch.zeros(1, 1, 32, 32))


# -- the region is said -----------------------------------------------------------------------------------------------


def test_region_in_words():
    assert Region(kind="whole").text == "whole images"
    assert Region(kind="whole", windows=12).text == "whole images, by up to 12 windows"
    middle = Region(kind="middle", size=(64, 64), share=0.004)
    assert middle.text == "the middle 64×64 pixels of each image, 0.4 % of their pixels"


def test_the_middle_is_told_and_can_be_overruled(run, tmp_path, capsys):
    run = shutil.copytree(run, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    assert "eval_size: null" in config
    (run / "config.yaml").write_text(config.replace("eval_size: null", "eval_size: 24"))
    assert main(["evaluate", str(run), "--samples", "4", "--accelerator", "cpu"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    written = Evaluation.load(run / "evaluation-test.json")
    assert written.region is not None
    numbers = [_size(case) for case in written.cases]
    share = 24 * 24 * len(numbers) / sum(height * width for height, width in numbers)
    assert written.region.share == pytest.approx(share)
    assert f"scored: {written.region.text}" in text
    assert "warning: what lies outside of the middle is not scored; evaluate with --whole" in text
    assert main(["evaluate", str(run), "--samples", "4", "--accelerator", "cpu", "--whole"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "scored: whole images" in text
    assert "warning" not in text
    assert Evaluation.load(run / "evaluation-test.json").region == Region(kind="whole")


def test_a_window_of_the_images_own_size_is_the_whole_image(tiny_run):
    found = evaluate(tiny_run, samples=(4,), data={"eval_size": 32}, **CPU)
    assert found.region == Region(kind="whole")


# -- the verdict and the anchors are first ----------------------------------------------------------------------------


def test_the_verdict_comes_first_and_the_model_stands_among_the_anchors(tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "e.json"
    assert main(["evaluate", str(tiny_run), "--samples", "8", "--accelerator", "cpu", "--out", str(out)]) == 0
    text, found = capsys.readouterr().out, Evaluation.load(out)
    assert found.verdict in " ".join(text.split())
    assert [one.key for one in found.anchors] == ["perfect", "reader", "consensus", "constant", "empty"]
    for anchor in found.anchors:
        assert anchor.ged.mean is not None
        assert f"{anchor.ged.mean:.3f} [" in text
        assert anchor.title in text
    assert text.index(found.verdict[:20]) < text.index("▶ this model") < text.index("GED unbiased")
    assert "  of pixels" in text
    perfect = found.anchor("perfect", 8)
    assert perfect is not None
    assert found.anchor("perfect", 9) is None
    assert found.anchor("empty", 9) is not None

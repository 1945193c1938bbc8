"""``ambiseg calibrate`` and what ``predict`` makes of it: files, numbers that agree, calibrations that do not fit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ambiseg import predict
from ambiseg._util.errors import ConfigError
from ambiseg.cli import main
from ambiseg.config import Config
from ambiseg.data.module import DataModule
from ambiseg.decisions.calibration import FILE, Calibration, Rules, held, thresholds
from ambiseg.io.source import Source
from ambiseg.prediction import Options, Predictor, write
from ambiseg.prediction.calibrating import calibrate, score_part
from ambiseg.prediction.inputs import array_source
from ambiseg.runs import Run, load, open_run

ALPHA = ["--alpha", "0.5"]  # which 3 patients are enough for


@pytest.fixture(scope="module")
def calibrated(tiny_run, tmp_path_factory):
    """A copy of the tiny run, with its calibration."""
    folder = tmp_path_factory.mktemp("calibrated") / "run"
    shutil.copytree(tiny_run, folder)
    assert main(["calibrate", str(folder), *ALPHA, "--check", "test", "--quiet"]) == 0
    return folder


def images_of(run: Run, part: str) -> list[tuple[np.ndarray, torch.Tensor]]:
    module = DataModule(run.config.data, split=run.split)
    module.setup()
    cases = [module.cases[i] for i in module.indices(part)]
    return [(case.image, torch.from_numpy(case.labels)) for case in cases]


def test_the_file_says_what_is_guaranteed(calibrated):
    found = json.loads((calibrated / FILE).read_text())
    run = Run(calibrated)
    assert found["format"] == "ambiseg.Calibration/1"
    assert found["weights"] == run.digest("best")
    assert (found["alpha"], found["part"], found["per_stratum"], found["samples"]) == (0.5, "val", 4, None)
    assert found["images"] == len(run.split.parts["val"])
    assert found["checked"]["part"] == "test"
    assert {"inner and outer", "found", "sure", "area", "strata"} <= found["checked"]["statements"].keys()
    assert found["guarantees"][0].startswith(f"calibrated on {found['images']} images")
    assert found == json.loads(Calibration.load(calibrated / FILE).model_dump_json())


def test_what_predict_writes_holds_as_often_as_the_scores_say(calibrated):
    """The statements, checked on the masks that are predicted for the calibration's own images."""
    run, rules = Run(calibrated), Rules(0.5)
    predictor = Predictor(run)
    assert predictor.calibration is not None
    scores, how = score_part(run, predictor, "val", rules, quiet=True)
    assert how == {"per_stratum": 4}
    found = thresholds(scores, rules)
    for score, (image, readers) in zip(scores, images_of(run, "val"), strict=True):
        one = predictor(array_source(image, "x"))
        assert one.guaranteed is not None
        said = held(score, found, rules)
        share = 1 / len(readers)
        for bounds in one.guaranteed.classes:
            mine = (readers == bounds.id).numpy()
            inside = [not (mask & ~bounds.outer).any() for mask in mine]
            around = [not (bounds.inner & ~mask).any() for mask in mine]
            assert said["outer"][bounds.id] == pytest.approx(sum(inside) * share)
            assert said["inner"][bounds.id] == pytest.approx(sum(around) * share)
            missed = [(mask & ~bounds.found).sum() / max(1, mask.sum()) for mask in mine]
            assert said["found"][bounds.id] == pytest.approx(np.mean(missed))
            low, high = bounds.area
            assert said["area"][bounds.id] == pytest.approx(
                np.mean([low - 1e-9 <= mask.sum() <= high + 1e-9 for mask in mine])
            )
        assert one.guaranteed.strata is not None
        assert one.strata is not None
        assert len(one.guaranteed.strata) <= len(one.strata.weights)


def test_it_does_not_depend_on_the_masks_that_are_asked_for(calibrated, tmp_path):
    image = images_of(Run(calibrated), "test")[0][0]
    different: list[dict[str, Any]] = [{}, {"samples": 7}, {"keep": 2}, {"seed": 5}, {"per_stratum": 1, "merge": False}]
    first, *others = (predict(calibrated, image, **changes)[0] for changes in different)
    assert first.guaranteed is not None
    for other in others:
        assert other.guaranteed is not None
        for one, same in zip(first.guaranteed.classes, other.guaranteed.classes, strict=True):
            assert np.array_equal(one.outer, same.outer)
            assert np.array_equal(one.sure, same.sure)
            assert one.area == same.area
        assert other.guaranteed.strata == first.guaranteed.strata
    [none] = predict(calibrated, image, calibration=False)
    assert none.guaranteed is None
    with pytest.warns(UserWarning, match="symmetries=1, and this is with 2"):
        [turned] = predict(calibrated, image, tmp_path, symmetries=2)
    assert turned.guaranteed is None
    with pytest.warns(UserWarning, match="nothing is guaranteed for a volume: the calibration is of single images"):
        [volume] = predict(calibrated, np.stack([image, image]), tmp_path / "volume")
    assert volume.guaranteed is None
    about = json.loads((tmp_path / "volume" / volume.name / "weights.json").read_text())
    assert "guaranteed" not in about
    assert any(note.startswith("nothing is guaranteed for a volume") for note in about["notes"])
    with pytest.warns(UserWarning, match="nothing is guaranteed for 16×32"):
        [small] = predict(calibrated, image[:, :16])
    assert small.guaranteed is not None


def test_files_and_json(calibrated, tmp_path, capsys):
    image = images_of(Run(calibrated), "test")[0][0]
    np.save(tmp_path / "a.npy", image[0])
    command = ["predict", str(calibrated), str(tmp_path / "a.npy"), "--out", str(tmp_path / "out"), "--quiet", "--json"]
    assert main([*command, "--axes", "HW"]) == 0
    [row] = json.loads(capsys.readouterr().out)["predictions"]
    about = json.loads((tmp_path / "out" / "a" / "weights.json").read_text())
    assert row["guaranteed"] == about["guaranteed"]
    assert about["guaranteed"]["alpha"] == 0.5
    ids = Run(calibrated).card.evaluated
    for name, said in about["guaranteed"]["classes"].items():
        for mask in ("outer", "inner", "found", "sure"):
            written = np.load(tmp_path / "out" / "a" / said[mask]["file"])
            assert written.shape == image.shape[1:]
            assert set(np.unique(written)) <= {0, *ids}
            assert np.count_nonzero(written) == said[mask]["pixels"], name
        low, high = said["area"]["pixels"]
        assert 0 <= low <= high
    assert main([*command, "--axes", "HW", "--overwrite", "--no-calibration"]) == 0
    [row] = json.loads(capsys.readouterr().out)["predictions"]
    assert row["guaranteed"] is None
    assert not (tmp_path / "out" / "a" / "outer.npy").exists()


def test_a_calibration_of_other_weights_is_refused(calibrated, tiny_run, tmp_path, capsys):
    other = tmp_path / "run"
    shutil.copytree(tiny_run, other)
    found = Calibration.load(calibrated / FILE).model_copy(update={"weights": "0" * 32})
    found.save(other / FILE)
    assert main(["predict", str(other), "sample", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "calibration.json: expected a calibration of the weights of" in error
    assert "--no-calibration goes on without" in error
    assert not (tmp_path / "out").exists()
    assert predict(other, images_of(Run(other), "test")[0][0], calibration=False)
    with pytest.raises(ConfigError, match="expected a calibration of the weights"):
        Predictor(other, calibration=found)
    with pytest.raises(ConfigError, match=r"no-such\.json: expected a calibration, found no such file"):
        Predictor(other, calibration=tmp_path / "no-such.json")
    with pytest.raises(ConfigError, match="calibration: expected None beside a model from memory"):
        Predictor(load(tiny_run), calibration=calibrated / FILE)
    (other / FILE).write_text("{")
    assert main(["predict", str(other), "sample", "--out", str(tmp_path / "out")]) == 2
    assert "calibration.json: expected a calibration as JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "part val: alpha 0.1: expected at least 19 patients, found"),
        (["--split", "train"], "expected a part that was not trained on (val, test), found train"),
        (["--split", "tset"], "expected part 'tset', found train, val, test"),
        ([*ALPHA, "--check", "val"], "expected another part to check on than val, found the same"),
        (["--alpha", "0"], "--alpha: expected at least 0.001, found 0"),
        (["--alpha", "nan"], "--alpha: expected a number, found 'nan'"),
        (["--slack", "-1"], "--slack: expected at least 0, found -1"),
        (["--out", "no/such/folder.json"], "expected a folder to write into"),
    ],
)
def test_what_cannot_be_calibrated_is_one_line(tiny_run, tmp_path, capsys, more, said):
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    assert main(["calibrate", str(folder), "--quiet", *more]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (folder / FILE).exists()


def test_shipped_models_are_not_written_into(capsys):
    assert main(["calibrate", "demo"]) == 2
    assert "--out FILE, which ambiseg predict demo --calibration FILE takes" in capsys.readouterr().err


def test_a_method_without_strata_draws_samples(tiny_run, tmp_path):
    found = calibrate(tiny_run, 0.5, "test", options=Options(samples=6, seed=3), quiet=True)
    assert (found.samples, found.per_stratum, found.seed) == (6, None, 3)
    assert found.strata is not None  # draws are of strata even so
    image = images_of(open_run(tiny_run), "test")[0][0]
    predictor = Predictor(tiny_run, calibration=found)
    source = array_source(image, "x")
    assert isinstance(source, Source)
    assert predictor(source).guaranteed is not None
    assert isinstance(open_run(tiny_run).config, Config)


def test_several_classes_and_millimetres(calibrated, tmp_path):
    predictor = Predictor(calibrated)
    source = replace(array_source(images_of(Run(calibrated), "test")[0][0], "x"), affine=np.diag([3.0, 0.5, 4.0, 1.0]))
    one = predictor(source)
    assert one.guaranteed is not None
    [first] = one.guaranteed.classes
    both = replace(one.guaranteed, classes=(first, replace(first, id=2, name="other", outer=~first.outer)))
    folder = write(replace(one, guaranteed=both), tmp_path)
    said = json.loads((folder / "weights.json").read_text())["guaranteed"]["classes"]
    files = [said[name][mask]["file"] for name in said for mask in ("outer", "inner", "found", "sure")]
    kinds = ("outer", "inner", "found", "sure")
    assert {file.split(".")[0] for file in files} == {f"{kind}_{c}" for kind in kinds for c in (1, 2)}
    assert all((folder / file).is_file() for file in files)
    assert said["other"]["outer"]["pixels"] == first.outer.size - said[first.name]["outer"]["pixels"]
    for name in said:
        assert said[name]["area"]["mm2"] == pytest.approx([2 * side for side in said[name]["area"]["pixels"]])

"""Evaluations of earlier versions, and what is refused: other files, damaged runs, unknown options."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ambiseg._util.errors import ConfigError, DataError
from ambiseg.cli import main
from ambiseg.evaluation import Evaluation, evaluate
from ambiseg.evaluation.records import Interval

# What version 0.1 wrote for one image of two modes and two experts.
OLD = """
{"format": "ambiseg.Evaluation/1", "run": "runs/a", "split": "test", "protocol": "mose", "which": "best", "weights":
"0f", "seed": 0, "data": "listed cases, 2 modes", "threads": 1, "batch_size": 1, "images": 1, "patients": 1,
"classes": ["class 0", "class 1", "other"], "evaluated": [1, 2], "annotations": {"diversity": {"mean": 0.375, "low":
null, "high": null, "count": 1}, "entropy": {"mean": 0.28116756677627563, "low": null, "high": null, "count": 1},
"empty_share": {"mean": 0.0, "low": null, "high": null, "count": 1}}, "settings": [{"form": "compact", "samples": 4,
"metrics": {"ged": {"mean": 0.0, "low": null, "high": null, "count": 1}, "ged_unbiased": {"mean": 0.0, "low": null,
"high": null, "count": 1}, "matched_iou": {"mean": 1.0, "low": null, "high": null, "count": 1}, "diversity": {"mean":
0.375, "low": null, "high": null, "count": 1}, "entropy": {"mean": 0.28116756677627563, "low": null, "high": null,
"count": 1}, "empty_mass": {"mean": 0.0, "low": null, "high": null, "count": 1}}, "ece": {"value": 0.0, "low": null,
"high": null}, "reliability": {"edges": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0], "confidence": [null,
null, null, null, null, null, null, 0.75, null, null], "accuracy": [null, null, null, null, null, null, null, 0.75,
null, null], "weight": [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0]}, "empty": {"correlation": null, "error":
0.0}, "buckets": [{"readers": 2, "images": 1, "metrics": {"ged": {"mean": 0.0, "low": null, "high": null, "count": 1},
"ged_unbiased": {"mean": 0.0, "low": null, "high": null, "count": 1}, "matched_iou": {"mean": 1.0, "low": null,
"high": null, "count": 1}, "diversity": {"mean": 0.375, "low": null, "high": null, "count": 1}, "entropy": {"mean":
0.28116756677627563, "low": null, "high": null, "count": 1}, "empty_mass": {"mean": 0.0, "low": null, "high": null,
"count": 1}}, "ece": {"value": 0.0, "low": null, "high": null}}]}], "experts": {"count": 2, "mean": [0.75, 0.25],
"low": [null, null], "high": [null, null], "setting": "compact-4", "by_bucket": [{"readers": 2, "images": 1, "mean":
[0.75, 0.25], "empty_mass": 0.0, "empty_share": 0.0}]}, "modes": {"setting": "compact-4", "images": 1, "names": ["0",
"1"], "probability": [0.75, 0.25], "ratio": [0.75, 0.25], "distance": 0.0, "flips": [{"class": "class 1", "to":
"other", "probability": 0.25, "truth": 0.25, "predicted": 0.25}], "experts": [[1.0, 0.0], [0.0, 1.0]], "by_setting":
{"compact-4": {"ratio": [0.75, 0.25], "distance": 0.0}}, "nearest": [[1.0, 0.0], [0.0, 1.0]], "weights": [0.75, 0.25],
"matching": [0, 1], "found": 2, "correlation": 1.0}, "cases": [{"name": "a", "patient": "a", "readers": 2,
"readers_total": 2, "empty_share": 0.0, "annotations": {"diversity": 0.375, "entropy": 0.28116756677627563},
"expert_weights": [0.75, 0.25], "scores": {"compact-4": {"ged": 0.0, "ged_unbiased": 0.0, "matched_iou": 1.0,
"diversity": 0.375, "entropy": 0.28116756677627563, "ece": 0.0, "empty_mass": 0.0}}}]}
"""


def _old(**changes: Any) -> str:
    return json.dumps(json.loads(OLD) | changes)


def test_evaluations_of_format_1_are_read(tmp_path):
    path = tmp_path / "e.json"
    path.write_text(OLD)
    found = Evaluation.load(path, "test")
    assert found.strata is not None
    assert (found.strata.name, found.strata.count, found.strata.setting) == ("expert", 2, "compact-4")
    assert found.strata.mean == found.strata.by_bucket[0].mean == found.cases[0].strata_weights == [0.75, 0.25]
    assert found.settings[0].ece == found.settings[0].buckets[0].ece == Interval(mean=0.0, low=None, high=None)
    assert found.settings[0].metrics["entropy"].mean == found.cases[0].scores["compact-4"]["entropy"]
    assert found.modes is not None
    assert found.modes.strata_iou == [[1.0, 0.0], [0.0, 1.0]]
    assert (found.modes.matching, found.modes.flips[0].name, found.flipped) == ([0, 1], "class 1", [(1, 2)])
    found.save(path)
    assert Evaluation.load(path) == found
    assert json.loads(path.read_text())["format"] == "ambiseg.Evaluation/3"
    first = json.loads(_old(experts=None))  # the first evaluations had no modes; methods without experts had null
    del first["modes"]
    first["cases"][0]["expert_weights"] = None
    path.write_text(json.dumps(first))
    found = Evaluation.load(path)
    assert (found.modes, found.strata, found.cases[0].strata_weights) == (None, None, None)


def test_evaluations_of_format_2_are_read(tmp_path):
    """They have no region, anchors and verdict; what ECE rests on follows from its curve. Here of modes."""
    path = tmp_path / "e.json"
    path.write_text(OLD)
    content = json.loads(Evaluation.load(path).to_json())
    content["format"] = "ambiseg.Evaluation/2"
    for name in ("unit", "annotator", "region", "anchors", "verdict"):
        del content[name]
    (setting,), (case,) = content["settings"], content["cases"]
    del setting["ece_share"], setting["empty"]["calibration"], case["scores"]["compact-4"]["ged_unbiased_both"]
    for part in (setting, *setting["buckets"]):
        del part["metrics"]["ged_unbiased_both"]
    bins = len(setting["reliability"]["weight"])
    setting["reliability"]["weight"] = [0.25] + [0.0] * (bins - 1)
    path.write_text(json.dumps(content))
    found = Evaluation.load(path)
    assert (found.region, found.anchors, found.verdict) == (None, [], "")
    assert (found.unit, found.annotator, found.settings[0].ece_share) == ("patient", "mode", 0.25)
    assert found.cases[0].scores["compact-4"]["ged_unbiased_both"] is None
    assert found.settings[0].ece.mean == 0
    setting["reliability"]["weight"] = [0.0] * bins  # nothing was measured, whatever was written
    path.write_text(json.dumps(content))
    found = Evaluation.load(path)
    assert (found.settings[0].ece_share, found.settings[0].ece.mean) == (0, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected an evaluation as JSON, found a mistake: EOF"),
        ("[]", r"expected an evaluation, found \[\]"),
        ('{"format": "other/1"}', "expected an evaluation of format ambiseg.Evaluation/3, found other/1"),
        ('{"format": "ambiseg.Evaluation/1"}', "run: expected a value in an evaluation, found none"),
        ('{"format": "ambiseg.Evaluation/2"}', "run: expected a value in an evaluation, found none"),
        (_old(experts=3, settings={}), "settings: expected a list, found {}"),
        (_old(settings=[]), r"settings: expected a length of at least 1, found \[\]"),
        (_old(seed="x"), "seed: expected a whole number, found 'x'"),
        (
            _old(cases=[{**json.loads(OLD)["cases"][0], "scores": {}}]),
            "expected all scores of 'a' in compact-4, found others",
        ),
        (_old(split="val"), "expected an evaluation of split test, found val"),
    ],
)
def test_other_files_are_refused_by_name(text, message, tmp_path):
    path = tmp_path / "e.json"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"e\.json: {message}") as caught:
        Evaluation.load(path, "test")
    assert len(str(caught.value).splitlines()) == 1


def _no_weights(run: Path) -> None:
    (run / "best.safetensors").unlink()


def _half_the_weights(run: Path) -> None:
    path = run / "best.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _no_split(run: Path) -> None:
    (run / "split.json").unlink()


def _other_data(old: str, new: str):
    def change(run: Path) -> None:
        path = run / "config.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (_no_weights, [], "best.safetensors: expected the weights of a finished epoch, found no such file"),
        (_half_the_weights, [], "best.safetensors: expected weights as safetensors, found"),
        (_no_split, [], "split.json: No such file"),
        (_other_data("count: 60", "count: 62"), [], "the data must be those that the run began with: shapes: expected"),
        (_other_data("count: 60", "count: 50"), [], "the data must be those that the run began with: shapes: expected"),
        (_other_data("size: 32", "size: 16"), [], "the data must be those that the run began with: shapes: the cases"),
        (None, ["--split", "tset"], "split.json: expected part 'tset', found train, val, test"),
        (None, ["--protocol", "moose"], "protocol: expected one of mose, kohl2018"),
        (None, ["--form", "short"], "form: expected one of standard, compact, found 'short'"),
        (None, ["--samples", "0"], "--samples: expected at least 1, found 0"),
        (None, ["--threads", "0"], "threads: expected at least 1, found 0"),
        (None, ["--accelerator", "zpu"], "expected devices that are there, found accelerator zpu"),
        (None, ["--protocol", "rectangular", "--form", "compact"], "'rectangular' has no weighted form"),
        (None, ["--predictions", "x", "--truth", "y"], "expected RUN, or --predictions and --truth, found both"),
    ],
)
def test_one_line_names_what_is_wrong(damage, options, message, tiny_run, tmp_path, capsys):
    run = shutil.copytree(tiny_run, tmp_path / "run")
    if damage:
        damage(run)
    assert main(["evaluate", str(run), "--quiet", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (run / "evaluation-test.json").exists()


def test_unknown_settings_of_the_data_are_named(tiny_run):
    with pytest.raises(ConfigError, match=r"data\.rot: no such setting; did you mean data\.root\?"):
        evaluate(tiny_run, data={"rot": "x"})

"""Evaluation of a run: numbers against direct calls of the metrics, intervals, buckets, files, faults."""

from __future__ import annotations

import csv
import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from ambiseg import MaskDistribution, bootstrap, ece, ged, matched_iou, pixel_entropy, sample_diversity
from ambiseg._util.errors import ConfigError
from ambiseg.cli import main
from ambiseg.cli.evaluate import show
from ambiseg.data.config import DATASETS, DataConfig
from ambiseg.data.loader import seed_of
from ambiseg.data.module import DataModule
from ambiseg.data.sets.shapes import Shapes
from ambiseg.evaluation import METRICS, Evaluation, evaluate, evaluation_path, saved_evaluation
from ambiseg.evaluation.records import Interval, Mean
from ambiseg.evaluation.scoring import ScoredCase, ScoringRules, score_batch, score_masks
from ambiseg.evaluation.summary import mean_of, summarise
from ambiseg.methods.base import Stratified
from ambiseg.methods.drawing import per_stratum, unbiased_ged
from ambiseg.metrics import compare
from ambiseg.nn.config import BackboneConfig
from ambiseg.runs import Run
from tests.conftest import TINY
from tests.drop_ins import Latent, TwoHeads

BATCH = {"eval_batch_size": 4}


@pytest.fixture(scope="module")
def found(tiny_run) -> Evaluation:
    return evaluate(tiny_run, samples=(5, 8), data=BATCH, accelerator="cpu", quiet=True)


def drawn(run: Path):
    """The same masks once more, straight from the model: (batch, key, masks) of every batch and setting."""
    opened = Run(run)
    opened.config.data.eval_batch_size = BATCH["eval_batch_size"]
    data = DataModule(opened.config.data, split=opened.split)
    data.setup()
    model = opened.model()
    for batch in data.test_dataloader():
        predictive = model.predict(batch.images)
        for form, n in (("standard", 5), ("standard", 8), ("compact", 4), ("compact", 8)):
            g = torch.Generator().manual_seed(seed_of(0, "evaluate", form, n, batch.names[0]))
            assert isinstance(predictive, Stratified)
            masks = predictive.sample(n, g) if form == "standard" else predictive.compact(n // 4, g)
            yield batch, predictive, f"{form}-{n}", masks


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_every_score_is_that_of_the_metric_on_the_same_draws(tiny_run, found):
    cases = {case.name: case for case in found.cases}
    assert [s.key for s in found.settings] == ["standard-5", "standard-8", "compact-4", "compact-8"]
    seen = set()
    for batch, predictive, key, masks in drawn(tiny_run):
        expected = {
            "ged": ged(masks, batch.annotations),
            "matched_iou": matched_iou(masks, batch.annotations),
            "diversity": sample_diversity(masks),
            "entropy": pixel_entropy(masks, 2),
        }
        for i, name in enumerate(batch.names):
            scores = cases[name].scores[key]
            assert {metric: scores[metric] for metric in expected} == {k: v[i].item() for k, v in expected.items()}
            alone = ece(masks[i].marginal_probs(2).contiguous(), batch.annotations[i].marginal_probs(2))
            assert scores["ece"] == pytest.approx(alone, abs=1e-12)
            assert cases[name].strata_weights == predictive.weights[i].double().tolist()
            assert cases[name].patient == batch.patients[i]
            seen.add(name)
        if key.startswith("standard"):
            unbiased = ged(masks, batch.annotations, unbiased=True)
            got = [cases[name].scores[key]["ged_unbiased"] for name in batch.names]
            assert got == pytest.approx(unbiased.tolist(), abs=1e-12)
    assert seen == set(cases) == set(Run(tiny_run).split.parts["test"])


def test_pooled_calibration_is_that_of_all_pixels_at_once(tiny_run, found):
    pairs = [(m, b.annotations) for b, _, key, m in drawn(tiny_run) if key == "standard-8"]
    predicted, true = (torch.cat([pair[k].marginal_probs(2) for pair in pairs]).contiguous() for k in (0, 1))
    setting = found.setting("standard", 8)
    assert setting.ece.mean == pytest.approx(ece(predicted, true), abs=1e-12)
    curve = setting.reliability
    assert curve.edges == [i / 10 for i in range(11)]
    gaps = [
        (weight or 0) * abs((p or 0) - (a or 0))
        for p, a, weight in zip(curve.confidence, curve.accuracy, curve.weight, strict=True)
    ]
    assert sum(gaps) == pytest.approx(ece(predicted, true), abs=1e-9)


def test_averages_are_over_images_and_intervals_over_patients(found):
    patients = [case.patient for case in found.cases]
    assert (found.images, found.patients) == (len(patients), len(set(patients)))
    assert found.patients < found.images  # or the next lines would say nothing
    for setting in found.settings:
        values = [case.scores[setting.key]["ged"] for case in found.cases]
        clustered, alone = bootstrap(values, patients), bootstrap(values)
        mean = setting.metrics["ged"]
        assert (mean.mean, mean.low, mean.high) == (clustered.mean, clustered.low, clustered.high)
        assert mean.mean == pytest.approx(np.mean(values))
        assert mean.low != alone.low


def test_buckets_hold_every_image_once_and_their_own_means(found):
    for setting in found.settings:
        assert sum(bucket.images for bucket in setting.buckets) == found.images
        for bucket in setting.buckets:
            chosen = [case for case in found.cases if case.readers == bucket.readers]
            for metric, mean in bucket.metrics.items():
                values = [v for case in chosen if (v := case.scores[setting.key][metric]) is not None]
                assert mean.count == len(values)
                assert mean.mean == (pytest.approx(np.mean(values)) if values else None)
    shapes = Shapes(count=60, size=32)
    for case in found.cases:
        masks = shapes[shapes.names.index(case.name)]
        drew = np.asarray(masks.labels.astype(bool).any((1, 2)))
        assert (case.readers, case.readers_total) == (drew.sum(), len(drew))
        assert case.empty_share == pytest.approx(masks.mass[~drew].sum(), abs=1e-6)


def test_weights_of_strata(found):
    strata = found.strata
    assert strata is not None
    assert (strata.name, strata.count, strata.setting) == ("expert", 4, "compact-8")
    weights = np.array([case.strata_weights for case in found.cases])
    assert strata.mean == pytest.approx(weights.mean(0).tolist())
    assert sum(strata.mean) == pytest.approx(1, abs=1e-5)
    clustered = bootstrap(weights[:, 1], [case.patient for case in found.cases])
    assert strata.intervals[1] == Interval(mean=clustered.mean, low=clustered.low, high=clustered.high)
    for bucket in strata.by_bucket:
        chosen = [case.readers == bucket.readers for case in found.cases]
        assert bucket.images == sum(chosen)
        assert bucket.mean == pytest.approx(weights[chosen].mean(0).tolist())
        empty = [case.scores["compact-8"]["empty_mass"] for case in found.cases if case.readers == bucket.readers]
        assert bucket.empty_mass == pytest.approx(np.mean(empty))


def test_compact_form_comes_as_close_as_strata_allow():
    for n, strata in itertools.product(range(1, 40), range(1, 9)):
        best = min(range(1, 50), key=lambda s: (abs(s * strata - n), s))
        assert per_stratum(n, strata) == best


@pytest.mark.parametrize(("method", "keys", "stratum"), [(Latent, ["standard-5"], ""), (TwoHeads, None, "head")])
def test_methods_with_strata_and_with_samples_only(method, keys, stratum):
    """Methods that are not in the package: their words in the tables, nothing of strata where there are none."""
    data = DataModule(DataConfig(name="shapes", options={"count": 40, "size": 32}, eval_batch_size=4))
    data.setup()
    model = method.build(method.Config(), BackboneConfig(channels=[8, 16]), 1, 2)
    batch, rules = next(iter(data.val_dataloader())), ScoringRules("mose", (1,), 2)
    predictive, settings = model.predict(batch.images), keys or ["standard-5", "compact-4"]
    scored = score_batch(predictive, batch, rules, ["standard", "compact"], [5])
    assert [list(one.scores.scores) for one in scored] == [settings] * 4
    drawn = predictive.sample(5, torch.Generator().manual_seed(seed_of(0, "evaluate", "standard", 5, batch.names[0])))
    assert [one.scores.scores["standard-5"]["ged"] for one in scored] == ged(drawn, batch.annotations).tolist()
    found = summary(scored, stratum=model.stratum)
    head, *rows = csv.reader(found.to_csv().splitlines())
    console = Console(width=100, record=True)
    show(found, console)
    text = console.export_text()
    assert "expert" not in text
    if stratum:
        assert found.strata is not None
        assert (found.strata.name, found.strata.count) == (stratum, 2)
        assert head[-2:] == ["head_1", "head_2"]
        assert [float(cell) for cell in rows[0][-2:]] == predictive.weights[0].double().tolist()
        assert "weight of each head" in text
    else:
        assert found.strata is None
        assert head[-1] == METRICS[-1]
        assert "weight of" not in text
        with pytest.raises(ConfigError, match="form: expected one that the method has, found compact"):
            score_batch(predictive, batch, rules, ["compact"], [5])


def test_unbiased_distance_of_stratified_draws_is_right_on_average():
    """Two strata of two equally likely masks each, every outcome of two draws from either gone through."""
    g = torch.Generator().manual_seed(3)
    support = torch.randint(2, (2, 2, 5, 5), generator=g)
    truth = torch.randint(2, (1, 3, 5, 5), generator=g)
    share = torch.tensor([0.3, 0.7])
    limit = ged(MaskDistribution(support.flatten(0, 1)[None], (share / 2).repeat_interleave(2)[None]), truth).item()
    weights = (share / 2).repeat_interleave(2)[None]
    plain, corrected = [], []
    for a, b, c, d in itertools.product(range(2), repeat=4):
        masks = MaskDistribution(
            torch.stack([support[0, a], support[0, b], support[1, c], support[1, d]])[None], weights
        )
        plain.append(ged(masks, truth).item())
        corrected.append(unbiased_ged(compare(masks, truth), strata=2).item())
    assert np.mean(corrected) == pytest.approx(limit, abs=1e-7)
    assert np.mean(plain) > limit + 0.01


def test_interval_of_pooled_calibration_draws_whole_patients():
    """With two patients there are three outcomes: the first twice, both, the second twice."""
    g = torch.Generator().manual_seed(0)
    truth = torch.randint(2, (4, 3, 6, 6), generator=g)
    predicted = torch.randint(2, (4, 5, 6, 6), generator=g)
    predicted[2:] = 1
    scored = [scored_case(predicted[i], truth[i], f"case {i}", "ab"[i // 2]) for i in range(4)]
    found = summary(scored).settings[0].ece

    def pooled(images: slice) -> float:
        one, other = (MaskDistribution(x[images]).marginal_probs(2) for x in (predicted, truth))
        return ece(one, other)

    outcomes = [pooled(slice(0, 2)), pooled(slice(0, 4)), pooled(slice(2, 4))]
    assert [found.mean, found.low, found.high] == pytest.approx([outcomes[1], min(outcomes), max(outcomes)])


# -- what has no value ------------------------------------------------------------------------------------------------


def scored_case(predicted, truth, name: str, patient: str, protocol: str = "mose", valid=None) -> ScoredCase:
    masks = MaskDistribution(predicted[None])  # a model has no void pixels
    return score_masks(
        masks, MaskDistribution(truth[None], valid=valid), name, patient, ScoringRules(protocol, (1,), 2), "files-5"
    )


def summary(scored: list[ScoredCase], protocol: str = "mose", **options: Any) -> Evaluation:
    about = {"run": "x", "split": "all", "which": "files", "weights": "", "seed": 0, "data": "x"}
    about |= {"threads": 1, "batch_size": 1, "evaluated": [1], "protocol": protocol}
    return summarise(scored, ["no", "yes"], **about, **options)


def test_images_without_a_value_are_counted_and_left_out(tmp_path):
    empty, full = torch.zeros(5, 4, 4, dtype=torch.long), torch.ones(5, 4, 4, dtype=torch.long)
    scored = [
        scored_case(full, full, "both", "ann", "kohl2018"),
        scored_case(full, empty, "one", "bob", "kohl2018"),
        scored_case(empty, empty, "none", "cem", "kohl2018"),
        scored_case(full, full, "void", "dora", "kohl2018", valid=torch.zeros(1, 4, 4, dtype=torch.bool)),
    ]
    found = summary(scored, "kohl2018")
    scores = {case.name: case.scores["files-5"] for case in found.cases}
    assert scores["both"]["ged"] == 0
    assert scores["none"]["ged"] is scores["none"]["matched_iou"] is None
    assert all(scores["void"][metric] is None for metric in METRICS)
    assert [case.readers for case in found.cases] == [5, 0, 0, 0]
    mean = found.settings[0].metrics
    assert (mean["ged"].count, mean["matched_iou"].count, mean["entropy"].count) == (1, 2, 3)
    assert mean["matched_iou"].mean == 0.5
    assert (mean["ged"].low, mean["ged"].high) == (None, None)  # of one patient
    found.save(tmp_path / "e.json")
    assert Evaluation.load(tmp_path / "e.json") == found


def test_void_pixels_count_nowhere():
    g = torch.Generator().manual_seed(1)
    predicted, truth = torch.randint(2, (5, 6, 6), generator=g), torch.randint(2, (3, 6, 6), generator=g)
    valid = torch.ones(1, 6, 6, dtype=torch.bool)
    valid[:, 3:] = False
    cut = scored_case(predicted[:, :3], truth[:, :3], "a", "a")
    assert scored_case(predicted, truth, "a", "a", valid=valid).scores == cut.scores
    assert scored_case(predicted, truth, "a", "a").scores != cut.scores


def test_a_mean_of_nothing():
    assert mean_of([None, None], ["ann", "bob"]) == Mean(mean=None, low=None, high=None, count=0)


def test_one_mask_has_no_unbiased_distance(tiny_run):
    found = evaluate(tiny_run, samples=(1,), data=BATCH, accelerator="cpu", quiet=True)
    assert [setting.key for setting in found.settings] == ["standard-1", "compact-4"]
    for setting in found.settings:
        assert setting.metrics["ged_unbiased"].mean is None
        assert setting.metrics["ged"].count == found.images


# -- what must not matter ---------------------------------------------------------------------------------------------


class Backwards(Shapes):
    """The same cases, listed the other way round."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__(count, size)
        self._right = Shapes(count, size)
        self.names, self.patients = self._right.names[::-1], self._right.patients[::-1]

    def __getitem__(self, index):
        return self._right[-1 - index]

    def digest(self, index, case=None):
        return self._right.digest(len(self) - 1 - index)

    def image_digest(self, index, case=None):
        return self._right.image_digest(len(self) - 1 - index)


def test_order_of_the_data_does_not_matter(tiny_run, found, monkeypatch):
    monkeypatch.setitem(DATASETS, "shapes", Backwards)
    assert evaluate(tiny_run, samples=(5, 8), data=BATCH, accelerator="cpu", quiet=True) == found


def test_another_seed_makes_other_draws_of_the_same_features(tiny_run, found):
    other = evaluate(tiny_run, samples=(8,), forms=["standard"], seed=1, data=BATCH, accelerator="cpu", quiet=True)
    assert [case.strata_weights for case in other.cases] == [case.strata_weights for case in found.cases]
    assert other.setting("standard", 8) != found.setting("standard", 8)
    assert torch.get_num_threads() == 1


# -- files ------------------------------------------------------------------------------------------------------------


def test_json_and_csv_hold_every_number(found, tmp_path):
    path = tmp_path / "evaluation.json"
    found.save(path)
    assert Evaluation.load(path) == found
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content["format"] == "ambiseg.Evaluation/3"
    assert {"run", "split", "protocol", "which", "seed", "images", "patients", "classes", "evaluated"} <= set(content)
    rows = list(csv.DictReader((tmp_path / "evaluation.csv").read_text().splitlines()))
    assert len(rows) == found.images * len(found.settings)
    scores = {(case.name, key): values for case in found.cases for key, values in case.scores.items()}
    weights = {case.name: case.strata_weights for case in found.cases}
    for row in rows:
        for metric in METRICS:
            value = scores[row["name"], f"{row['form']}-{row['samples']}"][metric]
            assert (float(row[metric]) if row[metric] else None) == value
        assert [float(row[f"expert_{k}"]) for k in (1, 2, 3, 4)] == weights[row["name"]]


def test_settings_by_form_and_the_one_that_models_are_compared_by(found):
    assert found.headline(8).key == "standard-8"
    assert found.headline(50).key == "standard-5"
    compact = found.model_copy(update={"settings": found.settings[:1:-1]})
    assert compact.headline(8).key == "compact-8"
    assert {form: [s.samples for s in settings] for form, settings in compact.forms.items()} == {"compact": [4, 8]}
    assert list(found.forms) == ["standard", "compact"]
    assert found.setting("compact", 4).score("ece") == found.settings[2].ece
    with pytest.raises(KeyError, match=r"expected one of standard-5, .*, found compact-5"):
        found.setting("compact", 5)


def test_a_saved_evaluation_is_that_of_the_present_weights(tiny_run, found, tmp_path):
    folder = shutil.copytree(tiny_run, tmp_path / "run")
    run = Run(folder)
    assert saved_evaluation(run) is None
    found.save(evaluation_path(run))
    assert saved_evaluation(run) == found
    assert saved_evaluation(run, "val") is None
    shutil.copy(folder / "last.safetensors", folder / "best.safetensors")
    assert run.digest("best") != found.weights
    assert saved_evaluation(run) is None
    (folder / "best.safetensors").unlink()  # the numbers are still those of the weights that were there
    assert saved_evaluation(run) == found


# -- the command ------------------------------------------------------------------------------------------------------


def test_command_prints_tables_and_writes_files(tiny_run, found, tmp_path, capsys, monkeypatch):
    run = shutil.copytree(tiny_run, tmp_path / "a run")
    options = ["--samples", "5", "8", "--batch-size", "4", "--accelerator", "cpu"]
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["evaluate", str(run), *options]) == 0
        text = capsys.readouterr().out
        assert all(len(line) <= width for line in text.splitlines() if str(run) not in line)
        assert "…" not in text
    mean = found.setting("compact", 8).metrics["ged"]
    assert f"{mean.mean:.3f} [{mean.low:.3f}, {mean.high:.3f}]" in text
    assert "by how many readers drew anything" in text
    assert "weight of each expert" in text
    assert "█" in text
    written = Evaluation.load(run / "evaluation-test.json")
    assert (written.cases, written.settings) == (found.cases, found.settings)
    assert (run / "evaluation-test.csv").is_file()


def test_command_prints_json_or_nothing(tiny_run, found, tmp_path, capsys):
    options = ["--samples", "8", "--form", "standard", "--batch-size", "4", "--accelerator", "cpu"]
    out = tmp_path / "x.json"
    assert main(["evaluate", str(tiny_run), *options, "--json", "--quiet", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == out.read_text()
    assert json.loads(printed.out)["settings"] == [found.setting("standard", 8).model_dump()]
    assert printed.err == ""
    assert not (tiny_run / "evaluation-test.json").exists()


def test_demo_goes_on_from_an_evaluation_of_other_settings(tiny_run, tmp_path, capsys):
    run = shutil.copytree(tiny_run, tmp_path / "run")
    compact = evaluate(run, samples=(8,), forms=["compact"], data=BATCH, accelerator="cpu", quiet=True)
    compact.save(evaluation_path(Run(run)))
    assert main(["demo", "--out", str(run), "--trainer.epochs", "1"]) == 0
    printed, mean = capsys.readouterr(), compact.settings[0].metrics["ged"]
    assert printed.err.count("done before") == 2
    assert f"GED(8) on {compact.images} test nodules of {compact.patients} patients: {mean.mean:.3f} [" in printed.out
    assert (run / "report.html").is_file()


def test_evaluation_does_not_touch_the_run(tiny_run, found):
    assert {path.name for path in tiny_run.iterdir()} == {
        "config.yaml", "run.json", "split.json", "metrics.csv", "cost.json",
        "best.safetensors", "last.safetensors", "best.ckpt", "last.ckpt",
    }  # fmt: skip
    assert len(TINY) > 0
    assert all(math.isfinite(case.scores["standard-8"]["ged"] or 0) for case in found.cases)

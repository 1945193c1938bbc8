"""The folds of a cross-validation, pooled: the images of all, and one line for what cannot be pooled."""

from __future__ import annotations

import shutil

import pytest

from ambiseg import config as configuration
from ambiseg import evaluate
from ambiseg._util.errors import ConfigError
from ambiseg.cli import main
from ambiseg.data.config import open_cases, open_split
from ambiseg.evaluation.results import Evaluation, Folds
from ambiseg.runs import open_run

pytest.importorskip("lightning")
OPTIONS = {"samples": (4,), "accelerator": "cpu", "quiet": True}


@pytest.fixture(scope="module")
def folds(tiny_run, tmp_path_factory):
    """Three folds that share the weights of one run: what is trained does not matter here."""
    folder = tmp_path_factory.mktemp("folds")
    made = []
    for k in (1, 2, 3):
        out = folder / f"f{k}"
        shutil.copytree(tiny_run, out)
        refold(out, f"{k}/3")
        made.append(out)
    return made


def refold(out, fold, **changes):
    config = open_run(out).config.model_copy(deep=True)
    config.data = config.data.changed(fold=fold, split="hash" if fold else None, **changes)
    (out / "config.yaml").write_text(configuration.dump(config))
    open_split(open_cases(config.data), config.data).save(out / "split.json")


@pytest.fixture
def copies(folds, tmp_path):
    return [shutil.copytree(fold, tmp_path / fold.name) for fold in folds]


def test_the_pool_is_all_images_once(folds):
    alone = [evaluate(fold, **OPTIONS) for fold in folds]
    pooled = evaluate(folds, **OPTIONS)
    split = open_run(folds[0]).split
    assert sorted(case.name for case in pooled.cases) == sorted(
        name for names in split.parts.values() for name in names
    )
    cases = [case for one in alone for case in one.cases]
    assert [case.scores["standard-4"] for case in pooled.cases] == [case.scores["standard-4"] for case in cases]
    ged = [case.scores["standard-4"]["ged"] or 0.0 for case in cases]
    assert pooled.setting("standard", 4).metrics["ged"].mean == pytest.approx(sum(ged) / len(ged))
    assert pooled.strata is None
    assert pooled.folds == Folds(count=3, folds=[1, 2, 3], runs=list(map(str, folds)))
    assert str(pooled.folds) == "all 3 folds"


def test_missing_folds_are_named_and_the_file_keeps_them(folds, tmp_path, capsys):
    out = tmp_path / "folds.json"
    models = [str(folds[2]), str(folds[0])]
    assert main(["evaluate", *models, "--samples", "4", "--accelerator", "cpu", "--quiet", "--out", str(out)]) == 0
    found = Evaluation.load(out)
    assert found.folds is not None
    assert (found.folds.folds, found.folds.missing) == ([1, 3], [2])
    assert found.folds.runs == models[::-1]
    assert out.with_suffix(".csv").is_file()
    assert not (folds[0] / "evaluation-test.json").exists()
    from rich.console import Console

    from ambiseg.cli.evaluate import show

    show(found, Console(width=120))
    assert "folds 1 and 3 of 3; missing: 2" in capsys.readouterr().out


def test_what_cannot_be_pooled_is_one_line(copies, tiny_run):
    def refused(*runs, **options) -> str:
        with pytest.raises(ConfigError) as error:
            evaluate(runs, **OPTIONS | options)
        return str(error.value)

    assert "found fold 1 in" in refused(copies[0], copies[0])
    assert "expected a fold, trained with --data.fold K/N, found a split by" in refused(copies[0], tiny_run)
    assert "expected --split test for several folds, found 'val'" in refused(*copies, split="val")
    assert "expected one device for several folds" in refused(*copies, devices=2)
    assert "expected a run or the folds of a cross-validation, found none" in refused()
    refold(copies[1], "2/4")
    assert "expected one of 3 folds as" in refused(*copies)
    refold(copies[1], "2/3", split_seed=5)
    assert "expected a fold of the data and the split seed of" in refused(*copies)


def test_settings_that_differ_are_listed(copies):
    config = open_run(copies[1]).config.model_copy(deep=True)
    config.trainer = config.trainer.changed(epochs=config.trainer.epochs + 1)
    (copies[1] / "config.yaml").write_text(configuration.dump(config))
    pooled = evaluate(copies[:2], **OPTIONS)
    assert pooled.folds is not None
    assert pooled.folds.differing == ["trainer.epochs"]


def test_a_run_without_a_test_part_says_what_to_do(copies):
    split = copies[0] / "split.json"
    from ambiseg.data.splits import Split

    whole = Split.load(split)
    parts = {"train": (*whole.parts["train"], *whole.parts["test"]), "val": whole.parts["val"]}
    Split(parts, whole.fingerprint, whole.rule).save(split)
    with pytest.raises(
        ConfigError, match="expected part 'test', found train, val; the data have no test part: --split val"
    ):
        evaluate(copies[0], **OPTIONS)

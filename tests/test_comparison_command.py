"""``ambiseg compare`` from runs to files: evaluations are made, kept and never overwritten; a name stays a name."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

import ambiseg.comparison.sources as sources
from ambiseg import compare
from ambiseg._util.errors import ConfigError
from ambiseg.cli import main
from ambiseg.comparison.record import Comparison, comparison_of
from ambiseg.comparison.scores import Entry
from ambiseg.comparison.sources import Scored, sources_of
from ambiseg.comparison.timing import measure
from ambiseg.comparison.views import choose_cases
from ambiseg.comparison.writing import rows_of, to_csv, to_latex, to_markdown
from ambiseg.config import parse
from ambiseg.evaluation import evaluate
from ambiseg.evaluation.results import METRICS, Evaluation
from ambiseg.runs import Run
from ambiseg.training import train
from tests.conftest import TINY
from tests.test_comparison import entry, numbers, scored

HOSTILE = '=a|b*c_d<script>alert(1)</script>&%$#{x}"~^\\[y]\n'


@pytest.fixture(scope="module")
def runs(tiny_run, tmp_path_factory) -> Path:
    """A folder with two seeds of a method with strata and a method without."""
    folder = tmp_path_factory.mktemp("compared")
    shutil.copytree(tiny_run, folder / "s0")
    train(parse([*TINY, "--trainer.epochs=1", "--seed=1"]), folder / "s1", quiet=True)
    train(parse([*TINY, "--trainer.epochs=1", "--model.method=unet"]), folder / "plain", quiet=True)
    return folder


@pytest.fixture(scope="module")
def found(runs) -> Comparison:
    listed = [f"both={runs / 's0'},{runs / 's1'}", str(runs / "plain")]
    return compare(listed, "plain", samples=(4,), out=runs / "out", cases=3, quiet=True)


def refused(capsys, *words: str) -> str:
    assert main(["compare", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err.removeprefix("ambiseg: ").rstrip("\n")


# -- from runs to files -----------------------------------------------------------------------------------------------


def test_all_files_are_written_and_say_the_same(runs, found):
    out = runs / "out"
    assert {path.name for path in out.iterdir()} == {
        "index.html", "comparison.json", "comparison.md", "comparison.csv", "comparison.tex"
    }  # fmt: skip
    assert Comparison.load(out / "comparison.json") == found
    assert found.baseline == "plain"
    assert [(one.name, one.seeds, one.method) for one in found.methods] == [("both", 2, "mose"), ("plain", 1, "unet")]
    keys = {(one.method, one.form, one.samples, one.metric) for one in found.scores}
    forms = [("both", "standard"), ("both", "compact"), ("plain", "standard")]
    assert keys == {(method, form, 4, metric) for method, form in forms for metric in METRICS}
    rows = list(csv.DictReader(io.StringIO((out / "comparison.csv").read_text())))
    assert len(rows) == len(found.scores)
    score = found.score("both", "compact", 4, "ged")
    assert score is not None
    assert score.difference is not None
    row = next(row for row in rows if (row["method"], row["form"], row["metric"]) == ("both", "compact", "ged"))
    assert float(row["mean"]) == score.value.mean
    assert float(row["difference_low"]) == score.difference.low
    assert (row["baseline"], row["baseline_form"]) == ("plain", "standard")


def test_means_are_those_of_the_evaluations(runs, found):
    """The mean over images and seeds; of one seed, number and interval are the evaluation's own."""
    own = [Evaluation.load(runs / name / "evaluation-test.json") for name in ("s0", "s1", "plain")]
    for metric in METRICS:
        means = [one.setting("standard", 4).score(metric).mean for one in own]
        both, plain = (found.score(name, "standard", 4, metric) for name in ("both", "plain"))
        assert both is not None
        assert plain is not None
        assert plain.value.mean == means[2]
        assert plain.value.low == own[2].setting("standard", 4).score(metric).low
        if None not in means:
            assert both.value.mean == pytest.approx((means[0] + means[1]) / 2)  # type: ignore[operator]
            assert both.difference is not None
            assert both.difference.mean == pytest.approx((means[0] + means[1]) / 2 - means[2])  # type: ignore[operator]
    case = found.cases[0]
    expected = [one.cases[0].scores["standard-4"]["ged"] for one in own]
    assert case.name == own[0].cases[0].name
    assert case.ged == pytest.approx([(expected[0] + expected[1]) / 2, expected[2]])  # type: ignore[operator]


def test_costs_are_measured_and_read(runs, found):
    both, plain = found.methods
    minutes = [Run(runs / name).cost.cpu_seconds / 60 for name in ("s0", "s1", "plain")]  # type: ignore[union-attr]
    assert both.training_minutes == pytest.approx((minutes[0] + minutes[1]) / 2)
    assert plain.training_minutes == pytest.approx(minutes[2])
    parameters = sum(one.numel() for one in Run(runs / "plain").model().method.parameters())
    assert plain.parameters == parameters
    for one in found.methods:
        assert one.mask_seconds is not None
        assert one.mask_seconds > 0
        assert one.mask_ratio is not None
    assert plain.mask_seconds is not None
    assert both.mask_seconds is not None
    assert both.mask_ratio is not None
    assert plain.mask_ratio is not None
    assert both.mask_ratio / plain.mask_ratio == pytest.approx(both.mask_seconds / plain.mask_seconds)
    assert measure({}, "best") == {}


def test_unknown_costs_are_dashes(runs, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(runs / "plain", folder)
    (folder / "cost.json").unlink()
    one = compare([folder], samples=(4,), out=tmp_path / "out", cases=0, timing=False, quiet=True).methods[0]
    assert (one.training_minutes, one.parameters, one.mask_seconds, one.mask_ratio) == (None, None, None, None)
    assert "| old | unet | – | – | – | – |" in (tmp_path / "out" / "comparison.md").read_text()


def test_a_run_with_itself_differs_by_exactly_nothing(runs, tmp_path, capsys, found):
    run, out = str(runs / "s0"), str(tmp_path / "out")
    assert main(["compare", run, run, "--samples", "4", "--out", out, "--cases", "1"]) == 0
    printed = capsys.readouterr().out
    assert "0.000 [0.000, 0.000]" in printed
    assert "better" not in printed.replace("is better", "")
    assert "…" not in printed  # nothing is cut off, however narrow the terminal is
    same = Comparison.load(tmp_path / "out" / "comparison.json")
    assert [one.name for one in same.methods] == [run, f"{run} (2)"]
    for score in same.scores:
        assert score.difference is not None
        assert score.difference.mean in (0, None)
        assert score.difference.low in (0, None)
        assert score.difference.high in (0, None)
    assert all(case.ged[0] == case.ged[1] for case in same.cases)


# -- evaluations ------------------------------------------------------------------------------------------------------


def test_evaluations_are_kept_and_never_overwritten(runs, tmp_path, monkeypatch):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(runs / "plain", run)
    for path in run.glob("evaluation*"):
        path.unlink()
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(sources, "evaluate", lambda *words, **more: made.append(words[2]) or evaluate(*words, **more))
    options = {"out": out, "cases": 0, "timing": False, "quiet": True}
    compare([run], samples=(4,), **options)
    first = (run / "evaluation-test.json").read_bytes()  # there was none
    compare([run], samples=(4,), **options)
    assert made == [(4,)]
    for _ in range(2):  # other settings: beside the comparison, and not made twice
        again = compare([run], samples=(2, 3), **options)
        assert again.samples == [2, 3]
        assert (run / "evaluation-test.json").read_bytes() == first
    assert made == [(4,), (2, 3)]
    compare([run], samples=(4,), which="last", **options)
    compare([run], samples=(4,), symmetries=2, **options)
    assert made[2:] == [(4,), (4,)]
    assert (run / "evaluation-test.json").read_bytes() == first
    assert len(list((out / "evaluations").glob("*.json"))) == 3


def as_files(path: Path, name: str, target: Path) -> None:
    """An evaluation of a run as one of mask files would be."""
    content = json.loads(path.read_text())
    content |= {"which": "files", "weights": "", "data": "truth", "split": "all", "strata": None, "run": name}
    content["settings"] = [one for one in content["settings"] if one["form"] == "standard"]
    for setting in content["settings"]:
        setting["form"] = "files"
    for part in ("looking", "decided"):
        content[part]["setting"] = "files-4"
    for case in content["cases"]:
        case["strata_weights"] = None
        case["scores"] = {"files-4": case["scores"]["standard-4"]}
    target.write_text(json.dumps(content))


def test_mask_files_of_other_tools_are_compared(runs, found, tmp_path, capsys):
    as_files(runs / "s0" / "evaluation-test.json", "masks/", tmp_path / "theirs.json")
    result = compare([runs / "s0", tmp_path / "theirs.json"], samples=(4,), out=tmp_path / "out", cases=1, quiet=True)
    theirs = result.score("theirs", "standard", 4, "matched_iou")
    assert theirs is not None
    assert theirs.difference is not None
    assert (theirs.difference.mean, theirs.difference.low) == (0, 0)
    assert result.methods[1].training_minutes is None
    assert (result.data, result.split) == ("shapes", "test")
    only = compare({"a": tmp_path / "theirs.json"}, samples=(4,), out=tmp_path / "out", quiet=True)
    assert only.methods[0].method == ""
    words = [str(runs / "s0"), str(tmp_path / "theirs.json"), "--samples", "8", "--out", str(tmp_path / "o")]
    said = "theirs.json: expected 8 masks per image as for the others, found 4; --samples 4 compares at equal numbers"
    assert refused(capsys, *words).endswith(said)
    assert not (tmp_path / "o").exists()


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_cannot_be_compared_is_one_line(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sources, "evaluate", lambda *_, **__: pytest.fail("nothing is computed first"))
    other = tmp_path / "other"
    shutil.copytree(runs / "plain", other)
    split = json.loads((other / "split.json").read_text())
    gone = split["parts"]["test"].pop()
    split["parts"]["train"].append(gone)
    (other / "split.json").write_text(json.dumps(split))
    a, out = str(runs / "s0"), ["--out", str(tmp_path / "out")]
    said = refused(capsys, a, str(other), *out)
    images = len(split["parts"]["test"]) + 1
    assert said == f"{other}: expected the {images} images of {a} in part test, found no {gone!r}"
    assert refused(capsys, a, "--baseline", "s1", *out) == "--baseline: expected one of s0, found 's1'"
    assert refused(capsys, a, "--metrics", "dice", *out).startswith("metrics: expected some of ged, ")
    assert refused(capsys, "x=", *out) == "compare: expected RUN or NAME=RUN,RUN, found 'x='"
    assert "expected the folder of a run, found none" in refused(capsys, str(tmp_path / "nowhere"), *out)
    assert "expected part 'train2', found" in refused(capsys, a, "--split", "train2", *out)
    (tmp_path / "file").write_text("")
    assert "expected a folder to write into, found a file" in refused(capsys, a, "--out", str(tmp_path / "file"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("somebody's own")
    assert "found other files in it" in refused(capsys, a, "--out", str(tmp_path / "mine"))
    assert refused(capsys, a, "--json", "x.json", "--out", "x.json").startswith("--json: expected another name than")
    assert "expected each name once" in refused(capsys, f"x={a}", f"x={runs / 's1'}", "--samples", "4", *out)
    assert refused(capsys, a, "--json", str(tmp_path / "no" / "x.json")).count("expected a folder to write into") == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="expected at least one run"):
        compare([])


def test_names_are_short_where_they_can_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a=b,c").mkdir()
    listed = ["a=b,c", "old=a=b,c", "runs/x/", "y/evaluation-test.json", "theirs.json", Path("deep/run"), "other/run"]
    names = [(one.name, one.places) for one in sources_of(listed)]
    assert names == [
        ("a=b,c", ("a=b,c",)),
        ("old", ("a=b,c",)),
        ("x", ("runs/x/",)),
        ("y", ("y/evaluation-test.json",)),
        ("theirs", ("theirs.json",)),
        ("deep/run", ("deep/run",)),
        ("other/run", ("other/run",)),
    ]
    table = sources_of({"ours": [Path("a"), "b"], "theirs": "c"})
    assert [(one.name, one.places) for one in table] == [("ours", ("a", "b")), ("theirs", ("c",))]


# -- tables and cases -------------------------------------------------------------------------------------------------


def made_by_hand(*entries: Entry) -> Comparison:
    listed = [Scored(one, (None,) * len(one.evaluations)) for one in entries]
    return comparison_of(listed, entries[0].name, [16], quiet=True)


def test_no_name_becomes_more_than_a_name():
    comparison = made_by_hand(entry("plain", numbers(0)), entry(HOSTILE, numbers(1)))
    text = to_markdown(comparison)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(line.replace("\\|", "").split("|")) in (9, 8, 7) for line in lines)
    assert "<script>" not in text
    rows = list(csv.reader(io.StringIO(to_csv(comparison))))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert {row[0] for row in rows[1:]} == {"plain", "'" + HOSTILE}
    tex = to_latex(comparison)
    for line in tex.splitlines()[1:-1]:
        bare = line.replace("\\\\", "").replace("\\&", "")
        assert bare.count("&") in (0, 9)
        assert "<" not in line
        assert "\\$\\#\\{x\\}" in line or "x" not in line.partition("&")[0]
    assert tex.splitlines()[-1].startswith("% ")
    assert tex.count("{") - tex.count("\\{") == tex.count("}") - tex.count("\\}")


def test_marks_follow_the_interval_and_the_direction():
    base = entry("base", numbers(0))
    better, worse = entry("better", numbers(0, -0.2)), entry("worse", numbers(0, 0.2))
    unclear = entry("unclear", [v + (-1) ** i / 10 for i, v in enumerate(numbers(0))])  # type: ignore[operator]
    comparison = made_by_hand(base, better, worse, unclear)
    marks = {row[0]: row[-1] for row in rows_of(comparison, "ged") if row[1] == "standard"}
    assert marks == {"base": "", "better": "better", "worse": "worse", "unclear": ""}
    cells = {row[0]: row[5] for row in rows_of(comparison, "ged") if row[1] == "standard"}
    assert cells["base"] == "baseline"
    assert cells["better"] == "−0.200 [−0.200, −0.200]"
    assert cells["worse"] == "+0.200 [+0.200, +0.200]"
    assert "0.00000" not in cells["unclear"]


def test_cases_of_every_kind_are_chosen():
    """One other method: the largest difference, the most disagreement, best, median, worst; then the second of each."""
    base: list[float | None] = [i / 10 for i in range(8)]
    other: list[float | None] = [i / 10 + (0.5 if i == 3 else 0) for i in range(8)]
    comparison = made_by_hand(
        Entry("a", (scored({"standard-16": base}, "a"),)), Entry("b", (scored({"standard-16": other}, "b"),))
    )
    # 7 × i modulo 10 are tenths of disagreement: case 7 has .9 and is the worst as well
    assert set(choose_cases(comparison, 4)) == {"case 3", "case 7", "case 0", "case 4"}
    assert choose_cases(comparison, 99) == [case.name for case in comparison.cases]
    assert choose_cases(comparison, 0) == []
    assert choose_cases(comparison, 1) == ["case 3"]

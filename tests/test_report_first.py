"""The head of the report, and that nothing on the page is shown that was not measured."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambiseg.data.splits import Split
from ambiseg.evaluation.results import CaseScores, Evaluation
from ambiseg.reporting import curves, figures
from ambiseg.reporting.crop import Crop, crop_around
from ambiseg.reporting.gallery import CaseView, Samples, choose_example, make_gallery, steadiest
from ambiseg.reporting.page import page
from ambiseg.reporting.terms import METRICS, purpose, standings
from ambiseg.runs import Run
from tests.pages import Reader, evaluation, known_modes, mean, parsed, without_figures

ANCHORS = [
    ("empty", "an empty mask", 1.0, None),
    ("perfect", "a perfect model", 0.15, 16),
    ("perfect", "a perfect model", 0.11, 50),
    ("reader", "one reader", 0.34, None),
    ("constant", "one constant mask", 0.8, None),
]


def anchored(names: list[str], **changes: Any) -> dict[str, Any]:
    """A hand-made evaluation with anchors and a verdict."""
    anchors = [
        {"key": key, "title": title, "explanation": f"why {title}", "ged": mean(ged), "samples": samples}
        for key, title, ged, samples in ANCHORS
    ]
    about = {"anchors": anchors, "verdict": "Better than one reader.", "region": {"kind": "whole"}}
    return evaluation(names, **about, **changes)


@pytest.fixture(scope="module")
def original(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first") / "run"
    shutil.copytree(tiny_run, folder)
    names = list(Split.load(folder / "split.json").parts["test"])
    (folder / "evaluation-test.json").write_text(json.dumps(anchored(names, weights=Run(folder).digest())))
    return folder


@pytest.fixture(scope="module")
def html(original: Path) -> str:
    run, found = Run(original), Evaluation.load(original / "evaluation-test.json")
    with pytest.MonkeyPatch.context() as patch:
        without_figures(patch)
        return page(run, found, make_gallery(run, found, 1, 1, None, quiet=True), None)


@pytest.fixture
def words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    without_figures(monkeypatch)


# -- the first screen -------------------------------------------------------------------------------------------------


def test_the_first_screen_says_what_it_does_shows_it_and_places_it(html):
    head = html[html.index("<header>") : html.index("<nav")]
    reader = Reader(head)
    assert "this model predicts the outlines that different readers may draw (shape), and how likely each is" in head
    assert "Better than one reader." in reader.text
    titles = re.findall(r'class="name">(.*?)</span>', head)
    assert titles == ["a perfect model", "this model", "one reader", "one constant mask", "an empty mask"]
    assert re.findall(r'class="value">(.*?)<', head) == ["0.150", "0.213", "0.340", "0.800", "1.000"]
    assert head.count("why one reader") == 2  # beside it, and to unfold on a phone
    assert "12 images of 7 patients, whole images, 16 masks per image" in reader.text
    alternatives = [image["alt"] for image in reader.all("img")]
    assert sum("the image" in alt for alt in alternatives) >= 2
    shares = [int(share) for share in re.findall(r"predicted mask \d, probability (\d+) %", " ".join(alternatives))]
    assert 1 <= len(shares) <= 4
    assert shares == sorted(shares, reverse=True)
    rest = re.search(r"Other masks: (\d+) %", reader.text)
    assert abs(sum(shares) + (int(rest[1]) if rest else 0) - 100) <= 3
    assert re.findall("<img", html.split("<table")[0])  # pictures come before tables


def test_the_scale_is_drawn_for_papers():
    from matplotlib.figure import Figure

    found, figure = parsed(anchored(["a"])), Figure()
    figures.anchors(figure, *standings(found, found.settings[0]))
    [axes] = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()][1] == "this model"
    assert [text.get_text() for text in axes.texts] == ["0.150", "0.213", "0.340", "0.800", "1.000"]


def test_the_scale_is_one_axis_with_everything_on_it():
    found = parsed(anchored(["a"]))
    rows, end = standings(found, found.setting("standard", 16))
    places = [row.place for row in rows]
    assert places == sorted(places)
    assert all(0 <= place <= 100 for place in places)
    assert places[-1] * end / 100 == pytest.approx(1.0)
    assert [row.title for row in rows if row.model] == ["this model"]
    assert "0.203 to 0.223" in next(row.explanation for row in rows if row.model)
    other = standings(found, found.setting("standard", 50))[0]
    assert other[0].value == "0.110"  # of a perfect model with as many masks
    old = parsed(evaluation(["a"]))
    assert standings(old, old.settings[0]) == ([], 0.0)


@pytest.mark.usefixtures("words_only")
def test_an_evaluation_without_anchors_has_its_summary_at_the_head(original):
    found = parsed(evaluation(["a"]))
    head = page(Run(original), found, None, None).split("</header>")[0]
    assert "On 1 image of 7 patients, 16 masks drawn" in head
    assert "this model</span>" not in head


def test_what_the_model_does_in_the_words_of_the_data():
    assert "outlines that different graders may draw (shape)" in purpose(parsed(evaluation(["a"], annotator="grader")))
    assert "every way in which it may be labelled" in purpose(parsed(evaluation(["a"], modes=known_modes())))
    many = evaluation(["a"], classes=[str(i) for i in range(9)], evaluated=list(range(1, 9)))
    assert "every way in which it may be labelled" in purpose(parsed(many))


def test_the_example_is_the_best_of_those_in_which_readers_differ():
    def case(name: str, ged: float | None, diversity: float | None, readers: int = 2) -> CaseScores:
        about: dict[str, Any] = {"name": name, "patient": name, "readers": readers, "readers_total": 4}
        spread: dict[str, Any] = {"annotations": {"diversity": diversity}, "scores": {"k": {"ged": ged}}}
        return CaseScores(**about, **spread, empty_share=0, strata_weights=None)

    cases = [case(str(i), 0.1 * i, 0.1 * i) for i in range(8)]  # the quarter of "7" and "6"
    assert choose_example(cases, "k") == "6"
    assert choose_example([*cases, case("one", 0.0, 0.9, readers=1), case("none", None, 0.9)], "k") == "6"
    assert choose_example([case("one", 0.3, 0.1, readers=1)], "k") == "one"
    assert choose_example([case("none", None, None)], "k") is None


def test_cases_are_chosen_by_the_scores_that_depend_least_on_chance():
    assert steadiest(parsed(evaluation(["a"]))).key == "compact-16"
    content = evaluation(["a"])
    _no_strata(content)
    assert steadiest(parsed(content)).key == "standard-50"


def test_masks_that_are_equal_are_one_option():
    a, b = np.zeros((4, 4), np.uint8), np.ones((4, 4), np.uint8)
    nothing = np.zeros((4, 4, 4), np.uint8)
    rows = [Samples(k, w, np.stack([m]), m, nothing) for k, w, m in ((0, 0.4, b), (1, 0.3, a), (2, 0.3, a))]
    view = CaseView(None, Crop.of((4, 4)), a, a, [], rows, (0, 0.0), a, a, None, True)  # type: ignore[arg-type]
    options, rest = view.options(4)
    assert [(round(one.weight, 3), one.stratum, int(one.mask.sum())) for one in options] == [
        (0.6, None, 0),
        (0.4, 0, 16),
    ]
    assert rest == pytest.approx(0)
    assert view.options(1)[1] == pytest.approx(0.4)
    samples = CaseView(
        None, Crop.of((4, 4)), a, a, [], [Samples(None, 1.0, np.stack([a, b, a, a]), a, nothing)],  # type: ignore[arg-type]
        (0, 0.0), a, a, None, True,
    )  # fmt: skip
    assert [one.weight for one in samples.options(4)[0]] == [0.75, 0.25]


# -- the part that is shown -------------------------------------------------------------------------------------------


@given(
    st.tuples(st.integers(20, 200), st.integers(20, 200)),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)), max_size=5),
)
def test_a_crop_holds_all_that_is_marked_and_lies_in_the_image(size, points):
    marked = np.zeros(size, bool)
    for y, x in points:
        marked[int(y * size[0]), int(x * size[1])] = True
    crop = crop_around(marked)
    assert 0 <= crop.top < crop.bottom <= size[0]
    assert 0 <= crop.left < crop.right <= size[1]
    assert crop(marked).sum() == marked.sum()
    assert crop.whole or min(crop(marked).shape) >= min(24, *size)
    if not points:
        assert crop.whole
    left, top, width, height = crop.frame
    assert left + width <= 100.001
    assert top + height <= 100.001


def test_a_small_structure_fills_the_picture():
    marked = np.zeros((500, 400), bool)
    marked[100:140, 200:220] = True
    crop = crop_around(marked)
    assert crop(marked).shape == (64, 64)
    assert crop(marked)[:12].sum() == 0  # a margin
    marked[:] = True
    assert crop_around(marked).whole


# -- what was not measured --------------------------------------------------------------------------------------------


def _no_value(content: dict[str, Any]) -> None:
    nothing = {"mean": None, "low": None, "high": None}
    for setting in content["settings"]:
        setting["metrics"] = {key: {**nothing, "count": 0} for key in setting["metrics"]}
        setting |= {"ece": nothing, "ece_share": 0.0, "buckets": [], "empty": {"correlation": None, "error": None}}
        setting["reliability"] = {key: [None, None] for key in setting["reliability"]} | {"edges": [0, 0.5, 1]}
    for case in content["cases"]:
        case["scores"] = {key: dict.fromkeys(scores) for key, scores in case["scores"].items()}


def _no_strata(content: dict[str, Any]) -> None:
    content["strata"] = None
    content["settings"] = [one for one in content["settings"] if one["form"] == "standard"]
    for case in content["cases"]:
        case["strata_weights"] = None


def _modes(content: dict[str, Any]) -> None:
    content |= {"modes": known_modes(), "annotator": "mode", "unit": "sequence"}
    for setting in content["settings"]:
        setting["buckets"] = setting["buckets"][:1]
    content["strata"]["by_bucket"] = content["strata"]["by_bucket"][:1]


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("edit", [_no_value, _no_strata, _modes])
def test_a_page_never_shows_a_number_that_there_is_not(original, tmp_path, edit: Callable[..., None], validated: bool):
    run = Path(shutil.copytree(original, tmp_path / "run"))
    if not validated:
        lines = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
        for row in lines[1:]:
            row[:] = ["" if name.startswith("val_") else cell for name, cell in zip(lines[0], row, strict=True)]
        (run / "metrics.csv").write_text("\n".join(map(",".join, lines)) + "\n")
    content = anchored(["a", "b"])
    edit(content)
    text = Reader(page(Run(run), parsed(content), None, None)).text
    shown = text.split(" Configuration data ")[0]
    assert not re.search(r"\b(nan|None|inf|null|undefined)\b", shown)
    assert ("No validation ran: no validation image has a score." in text) == (not validated)
    if edit is _modes:
        assert "On 2 images of 7 sequences" in shown
        assert not re.search(r"\b(readers?|patients?)\b", shown.replace("one reader", ""))
    if edit is _no_value:
        assert "not measured" in shown
        assert "0.000" not in shown.split(" Training ")[0]


@pytest.mark.usefixtures("words_only")
def test_why_no_validation_ran(original, tmp_path):
    run = Run(Path(shutil.copytree(original, tmp_path / "run")))
    run.config.trainer.check_every = 50
    lines = (run.folder / "metrics.csv").read_text().splitlines()
    keep = [i for i, name in enumerate(lines[0].split(",")) if not name.startswith("val_")]
    kept = [",".join(line.split(",")[i] for i in keep) for line in lines[:2]]
    (run.folder / "metrics.csv").write_text("\n".join(kept) + "\n")
    text = Reader(page(run, parsed(anchored(["a"])), None, None)).text
    assert "No validation ran: it comes every 50 epochs, and the run has 1." in text
    assert "whose weights were kept" not in text


@pytest.mark.usefixtures("words_only")
def test_every_table_says_what_was_scored(original):
    region = {"kind": "middle", "size": [64, 64], "share": 0.004}
    content = {**anchored(["a"]), "region": region, "modes": known_modes()}
    html = page(Run(original), parsed(content), None, None)
    captions = re.findall(r"<caption>(.*?)</caption>", html)
    assert len(captions) >= 5
    unsaid = [caption for caption in captions if "the middle 64×64 pixels of each image" not in caption]
    assert unsaid == ["Software"]
    assert "the middle 64×64 pixels of each image, 0.4 % of their pixels" in html.split("</header>")[0]


@pytest.mark.usefixtures("words_only")
def test_warnings_of_the_training_are_shown(original):
    run = Run(original)
    run.about["warnings"] = ["12 steps are fewer than the warm-up of 100: <train> longer"]
    html = page(run, parsed(anchored(["a"])), None, None)
    assert "Warnings of the training 12 steps are fewer than the warm-up of 100: <train> longer" in Reader(html).text
    run.about["warnings"] = []
    assert "Warnings of the training" not in page(run, parsed(anchored(["a"])), None, None)


@pytest.mark.usefixtures("words_only")
def test_every_metric_is_explained_beside_its_number(original):
    text = Reader(page(Run(original), parsed(anchored(["a"])), None, None)).text
    for metric in METRICS.values():
        worded = metric.worded(annotator="reader", unit="patient")
        assert worded.meaning in text
        assert "{" not in worded.meaning + worded.better


# -- curves -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("words_only")
def test_where_a_setting_changed_the_curves_are_marked(original, tmp_path):
    from matplotlib.figure import Figure

    history = [{"epoch": float(e), "loss": 1.0, "capacity": c} for e, c in enumerate((0.5, 0.5, 1.0, 1.0), 1)]
    [change] = curves.changes(history, ["capacity", "other"])
    assert (change.label, change.when) == ("capacity 0.5 → 1", "at epoch 3")
    figure = Figure()
    curves.curves(figure, history, ["loss"], "loss", [change])
    [axes] = figure.axes
    assert [text.get_text() for text in axes.texts] == ["capacity 0.5 → 1"]
    assert any(np.allclose(np.asarray(line.get_xdata()), 2.5) for line in axes.lines)
    slow = curves.changes([{"epoch": float(e), "a": e} for e in range(1, 5)], ["a"])
    assert [(one.first, one.last, one.when) for one in slow] == [(2, 4, "in epochs 2 to 4")]

    run = Path(shutil.copytree(original, tmp_path / "run"))
    rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()][:3]
    place = rows[0].index("capacity") if "capacity" in rows[0] else None
    for row, value in zip(rows, ("capacity", "0.5", "1"), strict=True):
        if place is None:
            row.append(value)
        else:
            row[place] = value
    (run / "metrics.csv").write_text("\n".join(map(",".join, rows)) + "\n")
    html = page(Run(run), Evaluation.load(run / "evaluation-test.json"), None, None)
    assert html.count("capacity 0.5 → 1 at epoch 2; the loss is another one from there on") == 2  # caption, description

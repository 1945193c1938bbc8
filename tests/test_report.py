"""The report: what is on the page, that it is whole, and that it says so when it cannot be made."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from ambiseg import MaskDistribution
from ambiseg._util.errors import DataError
from ambiseg.cli import Help
from ambiseg.cli import report as command
from ambiseg.data.case import Case
from ambiseg.data.sets.shapes import Shapes
from ambiseg.data.splits import Split
from ambiseg.evaluation.results import FORMAT, Evaluation
from ambiseg.methods.base import Noise, Predictive
from ambiseg.reporting import curves, figures, report
from ambiseg.reporting.gallery import Gallery, choose_cases, draw_samples, view_case
from ambiseg.reporting.page import page, summary
from ambiseg.runs import Run
from ambiseg.viz.colours import class_colours
from tests.pages import Reader, evaluation, known_modes, parsed, without_figures


@pytest.fixture(scope="module")
def original(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny run with a hand-made evaluation."""
    folder = tmp_path_factory.mktemp("reports") / "run <script>alert(1)"
    shutil.copytree(tiny_run, folder)
    names = list(Split.load(folder / "split.json").parts["test"])
    (folder / "evaluation-test.json").write_text(json.dumps(evaluation(names, weights=Run(folder).digest())))
    return folder


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(original, tmp_path / "run", ignore=shutil.ignore_patterns("report*", "figures")))


@pytest.fixture(scope="module")
def written(original: Path) -> Path:
    """The report of the hand-made evaluation, with pictures."""
    return report(original, cases=2, samples=2, quiet=True)


@pytest.fixture(scope="module")
def html(written: Path) -> str:
    return written.read_text(encoding="utf-8")


@pytest.fixture
def blank(monkeypatch: pytest.MonkeyPatch) -> None:
    without_figures(monkeypatch)


def change(run: Path, edit: Callable[[dict[str, Any]], Any]) -> Evaluation:
    """Edit the evaluation of a run and read it again."""
    path = run / "evaluation-test.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return Evaluation.load(path, "test")


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_asks_nobody(html):
    reader = Reader(html)
    ids = [attributes["id"] for _, attributes in reader.found if "id" in attributes]
    assert len(ids) == len(set(ids)) > 20
    linked = [a["href"] for a in reader.all("a", "use", "image") if "href" in a]
    assert linked
    assert all(link[1:] in ids if link.startswith("#") else link.startswith("data:image/") for link in linked)
    assert all(
        image["src"].startswith(("data:image/png;base64,", "data:image/jpeg;base64,")) for image in reader.all("img")
    )
    assert set(re.findall(r"url\((.)", html)) <= {"#", "d"}  # parts of the page, and data
    for forbidden in ("http:", "https:", "//www", "<script", "<link", "@import", "nan"):
        assert forbidden not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", html), forbidden


def test_who_cannot_see_the_page_is_told(html):
    reader = Reader(html)
    assert all(image["alt"].strip() for image in reader.all("img"))
    assert len(reader.all("img")) > 20
    described = reader.all("svg")
    assert len(described) == 8
    ids = {attributes.get("id") for _, attributes in reader.found}
    for svg in described:
        assert svg["role"] == "img"
        assert set(svg["aria-labelledby"].split()) <= ids
    assert len(reader.all("caption")) == len(reader.all("table")) >= 4
    assert all("scope" in cell for cell in reader.all("th"))
    levels = [int(tag[1]) for tag, _ in reader.found if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert reader.all("html")[0]["lang"] == "en"
    assert "width=device-width" in html
    assert "prefers-color-scheme: dark" in html


def test_the_numbers_of_the_evaluation_are_on_it(html):
    text = Reader(html).text
    for number in ("0.213", "0.203 to 0.223", "0.188", "0.176", "0.654", "0.432", "0.0876", "0.041 %", "0.700"):
        assert number in text, number
    assert "On 12 images of 7 patients, 16 masks drawn for each image are at a distance (GED) of 0.213" in text
    assert "rests on 40 % of the scored pixels" in text
    assert "(95 % interval 0.203 to 0.223)" in text
    assert "Where 1 reader drew something, 70 % of the predicted weight is on empty masks; where 3 readers did" in text
    assert "Gao et al., ICLR 2023" in text
    assert "fingerprint" in text
    assert "ambiseg train tiny" in text
    assert "batch_size: 8" in text


def test_names_are_text_whatever_they_are(html, original, written):
    text = Reader(html).text
    assert "run <script>alert(1)" in text
    nasty = '"><img src=x onerror=alert(1)>$\\frac$'
    opened = Run(original)
    opened.about |= {"git": nasty, "command": [nasty, nasty], "versions": {nasty: nasty}}
    flip = {"name": nasty, "to": "b", "probability": 0.4, "truth": 0.4, "predicted": 0.5}
    modes = known_modes(names=[nasty, "b"], flips=[flip])
    content = evaluation([nasty], classes=["ground", nasty], modes=modes, protocol=nasty)
    content["strata"]["name"] = nasty
    made = page(opened, parsed(content), None, None)
    assert "<img" not in made
    assert made.count("&lt;img src=x onerror=alert(1)&gt;") >= 18
    Reader(made)


def test_pictures_show_readers_and_every_expert(html, original):
    reader = Reader(html)
    names = [f"{case}:" for case in Split.load(original / "split.json").parts["test"]]
    alternatives = [image["alt"] for image in reader.all("img")]
    assert all(alt.startswith(tuple(names)) for alt in alternatives)
    first = names[0]
    own = [alt for alt in alternatives if alt.startswith(first)]
    for expert in range(1, 5):
        found = [alt for alt in own if f"expert {expert}, weight " in alt]
        assert len(found) == 4  # outline, two samples, mean
        weight = re.search(r"weight (\d+) %", found[0])
        assert weight is not None
    shown = [int(n) for n in re.findall(r"most likely outline of expert \d, weight (\d+) %", " ".join(own))]
    assert shown == sorted(shown, reverse=True)
    assert abs(sum(shown) - 100) <= 2
    assert sum("mask of" in alt for alt in own) >= 1
    assert {f"{first} entropy of readers", f"{first} entropy of prediction"} <= set(own)


def test_galleries_hold_the_cases_they_promise(html, original):
    names = list(Split.load(original / "split.json").parts["test"])  # of GED 0, 0.1, 0.2 …
    place: dict[str, list[str]] = {}
    for title, text in re.findall(r"<h3>(.*?)</h3>(.*?)(?=<h3>|</section>)", html, re.DOTALL):
        found = re.findall(r'-name">(\S+) <span>|class="again"><b>(\S+)</b>', text)
        place[title] = [one or other for one, other in found]
    assert place["Best"] == names[:2]
    assert place["Worst"] == names[::-1][:2]
    middle = (len(names) - 2) // 2
    assert place["Median"] == names[middle : middle + 2]
    spread = {name: (7 * i % 10) / 10 for i, name in enumerate(names)}
    assert place["Most ambiguous"] == sorted(names, key=lambda name: (-spread[name], name))[:2]


def test_the_same_run_gives_the_same_bytes(html, original, written, tmp_path):
    again = report(original, out=tmp_path / "again.html", cases=2, samples=2, quiet=True)
    assert again.read_bytes() == written.read_bytes()
    assert written == original / "report.html"
    first, second = (sorted(folder.iterdir()) for folder in (original / "figures", tmp_path / "again-figures"))
    assert [path.name for path in first] == [path.name for path in second]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))


def test_figures_are_saved_for_papers(written):
    from PIL import Image

    folder = written.parent / "figures"
    names = {
        "ged",
        "reliability",
        "looking",
        "experts",
        "empty",
        "training-loss",
        "training-validation",
        "training-schedules",
    }
    names |= {"case-example", "case-ambiguous", "case-best", "case-median", "case-worst"}
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    for name in names:
        with Image.open(folder / f"{name}.png") as image:
            assert min(image.size) > 700
            assert round(image.info["dpi"][0]) == 300
            pixels = np.asarray(image.convert("RGB"))
        assert pixels[0, 0].tolist() == [255, 255, 255]
        assert len(np.unique(pixels @ np.array([1, 256, 65536]))) > 8
        assert ElementTree.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")


def test_it_is_evaluated_first_if_need_be(run, blank):
    (run / "evaluation-test.json").unlink()
    made = report(run, cases=0, quiet=True)
    content = json.loads((run / "evaluation-test.json").read_text())
    assert {(s["form"], s["samples"]) for s in content["settings"]} >= {("standard", 16), ("compact", 100)}
    assert f"{content['settings'][0]['metrics']['ged']['mean']:.3f}" in made.read_text()
    (run / "evaluation-test.json").write_text(json.dumps({**content, "patients": 777}))
    assert "of 777 patients" in report(run, cases=0, quiet=True).read_text()  # kept: its weights are there
    shutil.copy(run / "last.safetensors", run / "best.safetensors")
    (run / "evaluation-test.json").write_text(json.dumps({**content, "patients": 777, "weights": "of another epoch"}))
    assert "of 777 patients" not in report(run, cases=0, quiet=True).read_text()  # made again: it was of other weights


# -- what may be missing ----------------------------------------------------------------------------------------------


def without_strata(content: dict[str, Any]) -> None:
    content["strata"] = None
    content["settings"] = [setting for setting in content["settings"] if setting["form"] == "standard"]
    for case in content["cases"]:
        case["strata_weights"] = None


def test_a_method_without_strata(run, blank):
    found = change(run, without_strata)
    text = Reader(page(Run(run), found, None, None)).text
    assert "By how many readers drew something" in text
    assert "Readers" in text
    assert "empty masks" not in summary(found, found.settings[0])
    assert "expert" not in text.split("Configuration")[0].lower()


def test_words_for_strata_come_from_the_evaluation(run, tmp_path, blank):
    found = change(run, lambda content: content["strata"].update(name="ensemble member"))
    text = Reader(page(Run(run), found, None, tmp_path)).text
    for words in ("Ensemble members", "weighted masks of every ensemble member", "Weights of the ensemble members"):
        assert words in text
    assert "expert" not in text.split("Configuration Result")[-1].split("To reproduce it")[0].lower()
    assert (tmp_path / "ensemble-members.png").is_file()


class Constant(Predictive):
    """The prediction of a method that only draws samples: two masks in turn."""

    classes, size = 2, (32, 32)

    def noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        return Noise(torch.arange(n)[None, :, None])

    def probs(self, noise: Noise) -> torch.Tensor:
        upper = torch.zeros(1, noise.count, *self.size)
        upper[:, noise.codes[0, :, 0] % 2 == 0, :16] = 1
        return torch.stack([1 - upper, upper], 2)


def test_a_method_that_only_samples_has_one_row_of_masks(run, blank):
    [(stratum, weight, masks)] = draw_samples(Constant(), 2, torch.Generator())
    assert (stratum, weight, masks.count) == (None, 1.0, 4)
    assert masks.marginal_probs(2)[0, 1, 0, 0] == 0.5
    found = change(run, without_strata)
    labels = torch.zeros(1, 4, 32, 32, dtype=torch.uint8)
    labels[:, 0, 8:24, 8:24] = 1
    batch: Any = argparse.Namespace(annotations=MaskDistribution(labels))
    case = found.cases[0]
    tones = class_colours(["ground", "shape"], [1])
    view = view_case(Constant(), batch, np.zeros((1, 32, 32)), case, 2, 0, tones)
    chosen = {kind: [case.name] for kind in ("ambiguous", "best", "median", "worst")}
    gallery = Gallery(chosen, {case.name: view}, tones)
    reader = Reader(page(Run(run), found, gallery, None))
    alternatives = [image["alt"] for image in reader.all("img")]
    assert sum("of the model" in alt for alt in alternatives) == 6  # outline, four samples, mean
    assert "Samples all samples nothing marked most likely sample 1" in reader.text
    assert "shown under Most ambiguous" in reader.text
    assert {"3 of 4", "1 of 4"} <= {alt.split("mask of ")[-1].removesuffix(", empty") for alt in alternatives}
    assert "expert" not in reader.text.split("To reproduce it")[0].lower()


def test_numbers_without_a_value_are_dashes(run, blank):
    def edit(content):
        for setting in content["settings"]:
            setting["metrics"]["ged"] = {"mean": None, "low": None, "high": None, "count": 0}
            setting["metrics"]["matched_iou"] |= {"low": None, "high": None}
            setting["ece"] = dict.fromkeys(("mean", "low", "high"))
        for case in content["cases"][1:]:
            case["scores"] = {key: dict.fromkeys(scores) for key, scores in case["scores"].items()}

    found = change(run, edit)
    html = page(Run(run), found, None, None)
    text = Reader(html).text
    assert "–" in text
    assert "nan" not in text.lower()
    assert "On 12 images of 7 patients nothing could be scored" in text
    assert "GED was not measured: no image has a value." in text
    assert "Calibration (ECE) was not measured" in text
    assert not [svg for svg in Reader(html).all("svg") if "ged" in svg["aria-labelledby"]]  # no empty axes
    assert choose_cases(found.cases, "standard-16", 2)["best"] == [found.cases[0].name]


@pytest.mark.parametrize("rows", [0, 1])
def test_a_short_training(run, rows, blank):
    lines = (run / "metrics.csv").read_text().splitlines()
    (run / "metrics.csv").write_text("\n".join(lines[: rows + 1]) + "\n")
    text = Reader(page(Run(run), Evaluation.load(run / "evaluation-test.json"), None, None)).text
    assert ("1 epoch, " in text) == bool(rows)
    assert ("Dashed: epoch 1" in text) == bool(rows)


def test_known_modes_have_a_section(run, blank):
    found = change(run, lambda content: content.update(modes=known_modes()))
    reader = Reader(page(Run(run), found, None, None))
    for number in ("0.712", "0.451", "0.470", "Known modes"):
        assert number in reader.text
    figure_ids = {svg["aria-labelledby"].split()[0] for svg in reader.all("svg")}
    assert {"figure-modes-title", "figure-flips-title", "figure-mode-experts-title"} <= figure_ids


def test_many_strata_share_a_colour():
    weights = [0.01] * 35
    weights[20] = 0.66
    assert figures.coloured_strata(weights) == [0, 1, 2, 3, 4, 5, 20]


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_errors_are_one_line_that_names_the_file(run, tmp_path):
    with pytest.raises(DataError, match=r"nowhere: expected the folder of a run, found none"):
        report(tmp_path / "nowhere")
    path = run / "evaluation-test.json"
    good = path.read_text()
    content = json.loads(good)
    for text, expected in (
        (good[:-20], "expected an evaluation"),
        ("[]", "expected an evaluation"),
        (good.replace(FORMAT, "other/2"), f"expected an evaluation of format {FORMAT}, found other/2"),
        (json.dumps({**content, "split": "val"}), "expected an evaluation of split test, found val"),
        (json.dumps({**content, "settings": []}), "settings"),
        (json.dumps({k: v for k, v in content.items() if k != "cases"}), "cases"),
        (json.dumps({**content, "settings": [1]}), "settings"),
        (json.dumps({**content, "images": "many"}), "images"),
    ):
        path.write_text(text)
        with pytest.raises(DataError) as caught:
            report(run, quiet=True)
        assert str(caught.value).startswith(str(path)), text[:40]
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (run / "report.html").exists()


def test_only_the_cases_that_are_drawn_are_read(run, tmp_path, monkeypatch, blank):
    """Without a cache of decoded data, too; and no such cache is made."""
    read: list[str] = []
    original = Shapes.__getitem__

    def reading(self: Shapes, index: int) -> Case:
        read.append(self.names[index])
        return original(self, index)

    monkeypatch.setattr(Shapes, "__getitem__", reading)
    monkeypatch.setenv("AMBISEG_CACHE", str(tmp_path / "cache"))
    made = report(run, cases=1, samples=1, quiet=True)
    drawn = {image["alt"].split(":")[0] for image in Reader(made.read_text()).all("img")}
    assert set(read) == drawn
    assert len(drawn) <= 5 < len(Split.load(run / "split.json").parts["test"])
    assert not list(tmp_path.glob("cache/**/*.bin"))
    read.clear()
    report(run, cases=0, quiet=True)
    assert not read


def test_pictures_are_of_the_cases_that_were_scored(run):
    with pytest.raises(DataError, match="expected 0 or more cases"):
        report(run, cases=-1)
    with pytest.raises(DataError, match=r"pictures need the run's data: .*; 0 cases make a page without pictures"):
        report(run, data={"options": {"count": 60, "size": 32, "seed": 1}}, quiet=True)
    change(run, lambda content: content["cases"][0].update(name="somebody else"))
    with pytest.raises(DataError, match="found 'somebody else' in it; evaluate the run again"):
        report(run, quiet=True)


def test_the_command_says_where_the_page_is(run, capsys, tmp_path):
    for name in ("best.safetensors", "split.json"):
        (run / name).unlink()  # a page without pictures needs neither weights nor data
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers(), Help)
    arguments = parser.parse_args(["report", str(run), "--cases", "0", "--out", str(tmp_path / "there.html")])
    assert arguments.run(arguments) == 0
    assert capsys.readouterr().out == f"the report is in {tmp_path / 'there.html'}\n"
    assert not Reader((tmp_path / "there.html").read_text()).all("img")
    assert (tmp_path / "there-figures" / "ged.png").stat().st_size > 1000


def test_neither_a_display_nor_a_home_is_needed(tmp_path):
    """A configuration folder that cannot be made: matplotlib takes a temporary one, and nobody hears of it."""
    code = (
        "from ambiseg.reporting import figures, curves\n"
        "history = [{'epoch': 1.0, 'loss': 2.0, 'val_ged': 0.3}]\n"
        "with figures.drawing():\n"
        "    plot = figures.Figures(None).plot('a', curves.curves, history, ['loss'], 'loss')\n"
        "    print('<path' in plot.svg)"
    )
    (tmp_path / "file").write_text("")
    keep = {key: os.environ[key] for key in ("PATH", "PYTHONPATH", "SYSTEMROOT") if key in os.environ}
    environment = {**keep, "HOME": str(tmp_path / "file" / "home"), "MPLCONFIGDIR": str(tmp_path / "file" / "cache")}
    environment |= {"TMPDIR": str(tmp_path), "MPLBACKEND": "QtAgg"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_curves_are_of_the_columns_that_the_method_logged(run, monkeypatch):
    """Also where a term of the loss is named like a setting, and where a setting could have moved and did not."""
    lines = (run / "metrics.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines]
    rows[0] += ["capacity", "dice"]
    for row in rows[1:]:
        row += ["0.5", "0.25"]
    (run / "metrics.csv").write_text("\n".join(map(",".join, rows)) + "\n")
    drawn: dict[str, list[str]] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda figure, history, keys, *label: drawn.update({name + "".join(label[:1]): keys})

    monkeypatch.setattr(curves, "curves", note(""))
    monkeypatch.setattr(curves, "schedules", note("schedules"))
    page(Run(run), Evaluation.load(run / "evaluation-test.json"), None, None)
    assert drawn["score"] == ["val_ged", "val_ged_unbiased", "val_matched_iou"]
    assert drawn["loss"] == ["loss", "transport", "kl", "dice"]
    assert drawn["schedules"][0] == "lr"
    assert "capacity" in drawn["schedules"]

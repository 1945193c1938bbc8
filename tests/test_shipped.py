"""The models that come with the package: small, made as they say, and of use on patients that they have not seen."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import ambiseg
from ambiseg import familiarity
from ambiseg._util import shipped as registry
from ambiseg._util.errors import ConfigError
from ambiseg._util.shipped import shipped
from ambiseg.cli import main
from ambiseg.config import parse
from ambiseg.data.sets.nodules.cases import Nodules
from ambiseg.evaluation import Evaluation, evaluate
from ambiseg.familiarity import saved_familiarity
from ambiseg.methods.base import Stratified
from ambiseg.prediction import predict
from ambiseg.runs import load, open_run
from tests.conftest import REPOSITORY
from tests.tools import tool

MODELS = [*shipped()]
PLACE = re.compile(r"""(?:^|[\s"'=:\[,(])(?:/|~/|[A-Z]:\\)[\w.-]+""", re.MULTILINE)
NUMBER = r"\d+\.\d+"


# -- every model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_small_and_names_no_place(name):
    run = open_run(name)
    assert sum(path.stat().st_size for path in run.folder.iterdir()) <= 2_500_000
    assert run.config.data.root is None
    assert saved_familiarity(run) is not None  # predictions say when a person must look
    for path in run.folder.iterdir():
        if path.suffix not in (".safetensors", ".npz"):
            found = PLACE.search(path.read_text(encoding="utf-8"))
            assert found is None, (path.name, found)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_a_card_with_attribution_and_scores(name):
    run = open_run(name)
    card = (run.folder / "card.md").read_text(encoding="utf-8")
    for words in ("CC BY 3.0", "10.7937/K9/TCIA.2015.LO9QL9SX", "Armato", "medical device", "## Limits", "## Input"):
        assert words in card
    assert "{" not in card  # everything is filled in
    scores = run.about["scores"]
    assert {"standard-16", "compact-16"} <= scores.keys()
    assert scores["images"] == len(run.split.parts[scores["split"]])
    for metric in ("ged", "ged_unbiased", "matched_iou"):
        value = scores["compact-16"][metric]
        assert f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]" in card
    assert " ".join(run.about["command"]) in card
    assert run.about["command"][:2] == ["ambiseg", "train"]
    assert run.about["seed"] == run.config.seed


@pytest.mark.parametrize("name", MODELS)
def test_a_model_sees_simulated_nodules_as_their_readers_do(name):
    """Those of real CT too, which have seen no simulated one."""
    model, nodules = load(name), Nodules(size=64)
    assert model.card.units == "HU"
    empty, distances = {}, {}
    for readers in (1, 4):
        cases = [nodules[i] for i in range(0, len(nodules), 7) if nodules.marked(i) == readers][:16]
        images = model.card.prepare(torch.stack([torch.from_numpy(case.image) for case in cases]))
        truth = torch.stack([torch.from_numpy(case.labels) for case in cases])
        predicted = model.predict(images)
        assert isinstance(predicted, Stratified)
        masks = predicted.compact(4, torch.Generator().manual_seed(0))
        empty[readers] = float((masks.mass * (masks.labels == 0).flatten(2).all(2)).sum(1).mean())
        nothing = torch.zeros_like(truth[:, :1])
        distances[readers] = [float(ambiseg.ged(one, truth).mean()) for one in (masks, nothing)]
    assert empty[1] > empty[4] + 0.1
    own, nothing = distances[4]
    assert own < nothing / 3


def test_names_that_are_wrong_are_met_with_those_that_are_right(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^dmeo: expected the folder of a run, or a model of the package \(demo"):
        load("dmeo")
    with pytest.raises(ConfigError, match=r"did you mean demo\?"):
        open_run("dmeo")
    with pytest.raises(ConfigError, match="runs/mine: expected the folder of a run, found none"):
        load("runs/mine")
    assert main(["predict", "dmeo", "sample"]) == 2
    assert "did you mean demo?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["predict", "--help"])
    assert re.search(r"RUN\s+the folder of a run, or a shipped model \(demo", capsys.readouterr().out)


# -- how a model is put there ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(tiny_run, tmp_path_factory) -> Path:
    """A run whose data were in a place of this machine, as far as its files tell."""
    run = tmp_path_factory.mktemp("shipping") / "run"
    shutil.copytree(tiny_run, run)
    found = evaluate(run, samples=(4,), accelerator="cpu", quiet=True)
    (run / "evaluation-test.json").write_text(found.to_json())
    about = json.loads((run / "run.json").read_text())
    about["command"] = ["/home/me/bin/ambiseg", "train", "tiny", "--data.split", "/home/me/split.json", "--out", "/x/y"]
    (run / "run.json").write_text(json.dumps(about))
    return run


@pytest.fixture
def ship(tmp_path, monkeypatch):
    module = tool("ship_model")
    cards = tmp_path / "cards"
    cards.mkdir()
    (cards / "toy.md").write_text("CT {images} {split} {command} {scores} {scored} {epoch} {stored} {elsewhere}\n")
    monkeypatch.setattr(module, "CARDS", cards)
    monkeypatch.setattr(familiarity, "FEWEST", 2)  # the tiny set has few validation images
    return module


@pytest.mark.parametrize("half", [False, True])
def test_a_run_becomes_a_model(evaluated, ship, tmp_path, monkeypatch, half):
    assets = tmp_path / "assets"
    assets.mkdir()
    ship.ship(evaluated, "toy", assets, half=half)
    monkeypatch.setattr(registry, "ASSETS", assets)
    monkeypatch.chdir(tmp_path)
    assert [*shipped()] == ["toy"]
    assert registry.in_words() == "a shipped model (toy)"
    assert {path.name for path in assets.iterdir()} == {"toy"}  # no draft
    run, model, old = open_run("toy"), load("toy"), load(evaluated)
    assert saved_familiarity(run) is not None
    assert run.about["command"] == ["ambiseg", "train", "tiny", "--data.split", "split.json", "--out", "runs/toy"]
    card = (run.folder / "card.md").read_text()
    value = run.about["scores"]["compact-4"]["ged"]
    assert f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]" in card
    assert ("stored in half precision" in card) == half
    images = torch.rand(2, 1, 32, 32)
    one, two = (m.predict(images).sample(4, torch.Generator().manual_seed(0)) for m in (model, old))
    assert model.method.state_dict()["experts.mean"].dtype == torch.float32
    if half:
        sizes = [(folder / "best.safetensors").stat().st_size for folder in (run.folder, evaluated)]
        assert sizes[0] < 0.6 * sizes[1]
        assert torch.allclose(one.marginal_probs(2), two.marginal_probs(2), atol=0.01)
        before = Evaluation.load(evaluated / "evaluation-test.json").settings[0].metrics["ged"].mean
        assert before is not None
        assert run.about["scores"]["standard-4"]["ged"]["mean"] == pytest.approx(before, abs=0.02)
    else:
        assert torch.equal(one.labels, two.labels)


def test_a_model_that_names_a_place_is_refused(evaluated, ship, tmp_path):
    (tmp_path / "cards" / "toy.md").write_text("made in /home/me {scores}\n")
    with pytest.raises(SystemExit, match=r"toy/card\.md: expected no place of this machine, found ' /home'"):
        ship.ship(evaluated, "toy", tmp_path)
    assert not (tmp_path / "toy").exists()
    with pytest.raises(SystemExit, match="expected a template of the card, found none"):
        ship.ship(evaluated, "other", tmp_path)


def test_a_model_of_other_weights_than_those_evaluated_is_refused(evaluated, ship, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(evaluated, other)
    shutil.copy(other / "last.safetensors", other / "best.safetensors")
    state = other / "best.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + bytes([state.read_bytes()[-1] ^ 1]))
    with pytest.raises(SystemExit, match="expected an evaluation of its best weights, found one of others"):
        ship.ship(other, "toy", tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_the_card_is_what_the_tool_writes_today(name, tmp_path):
    copy = tmp_path / name
    shutil.copytree(open_run(name).folder, copy)
    tool("ship_model").write_card(copy)
    texts = [(folder / "card.md").read_text(encoding="utf-8") for folder in (copy, open_run(name).folder)]
    assert re.sub(NUMBER, "", texts[0]) == re.sub(NUMBER, "", texts[1])
    again, written = ([float(number) for number in re.findall(NUMBER, text)] for text in texts)
    assert again == pytest.approx(written, abs=0.02)  # machines differ in the last digit


# -- the demo ----------------------------------------------------------------------------------------------------------


def test_the_demo_is_made_by_its_recipe():
    run = open_run("demo")
    command = run.about["command"]
    assert command[:3] == ["ambiseg", "train", "demo"]
    settings = [word for word in command[3:] if word not in ("--out", "runs/demo")]
    assert run.config == parse(settings, "demo")  # the recipe of today makes it again


def test_its_weights_follow_the_readers_on_patients_it_has_not_seen():
    run, nodules = open_run("demo"), Nodules(size=64)
    model, unseen = run.model(), set(run.split.parts["test"])
    by_readers: dict[int, list[int]] = {1: [], 4: []}
    for i, name in enumerate(nodules.names):
        chosen = by_readers.get(nodules.marked(i))
        if name in unseen and chosen is not None and len(chosen) < 24:
            chosen.append(i)
    empty, distances = {}, []
    for readers, chosen in by_readers.items():
        cases = [nodules[i] for i in chosen]
        images = run.card.prepare(torch.stack([torch.from_numpy(case.image) for case in cases]))
        truth = torch.stack([torch.from_numpy(case.labels) for case in cases])
        masks = model.predict(images).compact(4, torch.Generator().manual_seed(0))  # type: ignore[attr-defined]
        blank = (masks.labels == 0).flatten(2).all(2)
        empty[readers] = float((masks.mass * blank).sum(1).mean())
        # Beside the model: nothing at all, and the first reader's mask, which the model does not know.
        rivals = masks, torch.zeros_like(truth[:, :1]), truth[:, :1]
        distances.append([float(ambiseg.ged(rival, truth).mean()) for rival in rivals])
    assert empty[1] > empty[4] + 0.2
    own, nothing, first = (sum(column) / len(by_readers) for column in zip(*distances, strict=True))
    assert own < min(nothing, first) / 2


def test_it_predicts_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    hounsfield = Nodules()[7].image[0]
    Image.fromarray((hounsfield + 1024).clip(0).astype("uint16")).save("scan.png")
    assert main(["predict", "demo", "scan.png", "--out", "masks"]) == 0
    assert (tmp_path / "masks" / "scan" / "overview.png").stat().st_size > 10_000
    assert "1 predicted" in capsys.readouterr().out


def test_the_page_shows_what_the_shipped_model_predicts_of_the_sample():
    """``python tools/draw_prediction.py`` writes sample, picture and JSON again when the model has changed."""
    page = (REPOSITORY / "docs" / "predict.md").read_text(encoding="utf-8")
    shown = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    [found] = predict("demo", "sample")
    assert found.strata is not None
    assert found.notes == ()
    assert found.strata.weights.tolist() == pytest.approx(shown["strata"]["weights"], abs=0.02)
    assert found.masks.mass[0, 0].item() == pytest.approx(shown["masks"][0]["weight"], abs=0.05)


def test_a_model_without_its_data_asks_for_them(capsys):
    assert main(["evaluate", "nodule-ct", "--quiet"]) == 2
    told = capsys.readouterr().err
    assert "expected the place of its data (LIDC nodules, 71 × 71), found none; give --root" in told
    assert told.count("\n") == 1

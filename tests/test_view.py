"""What `ambiseg view` shows, and who may see it: without a browser."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
import zipfile
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ambiseg._util.errors import ConfigError, DataError
from ambiseg.cli import main
from ambiseg.data import Nodules
from ambiseg.masks import MaskDistribution
from ambiseg.prediction import Prediction, predict
from ambiseg.runs import Run
from ambiseg.serving.app import create_app
from ambiseg.serving.scene import PredictionScene, packed
from ambiseg.serving.view.choosing import choose, is_run
from ambiseg.serving.view.listing import case_values
from ambiseg.serving.view.page import POLICY, page, palette, palette_css, static_files
from ambiseg.serving.view.routes import View, expected_pixels, view_router
from ambiseg.serving.view.scenes import ReadersScene, SavedScene, WithReaders
from ambiseg.serving.view.shelf import Shelf
from tests.pages import evaluation, parsed

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Prediction]:
    """A folder of one prediction of the image of the package, and the prediction."""
    out = tmp_path_factory.mktemp("saved")
    return out, predict("demo", "sample", out, per_stratum=2, overview=False)[0]


class Client:
    """Requests to an application without a socket, with the token unless other headers are given."""

    def __init__(self, view: View, root: Path) -> None:
        self.app = create_app(view.models, token=TOKEN, extra=[view_router(view)], jobs=Shelf(), hosts=["testserver"])
        self.app.state.root = root

    def ask(self, method: str, path: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        async def answer() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as asked:
                sent = {"Authorization": f"Bearer {TOKEN}", **(headers or {})}
                return await asked.request(method, path, headers=sent, **more)

        return asyncio.run(answer())

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        return self.ask("GET", path, headers)

    def post(self, path: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        return self.ask("POST", path, headers, **more)


def arrays(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A slice as a browser reads it."""
    assert content[:4] == b"AMB1"
    length = int(np.frombuffer(content, "<u4", 1, 4)[0])
    header, found = json.loads(content[8 : 8 + length]), {}
    for about, offset in zip(header["arrays"], header["offsets"], strict=True):
        size = int(np.prod(about["shape"]))
        values = np.frombuffer(content, np.dtype(about["dtype"]).newbyteorder("<"), size, 8 + length + offset)
        found[about["name"]] = values.reshape(about["shape"])
    return header, found


# -- scenes -----------------------------------------------------------------------------------------------------------


def test_a_saved_prediction_is_what_was_predicted(saved):
    out, prediction = saved
    scene, fresh = SavedScene(out / "sample"), PredictionScene(prediction)
    for name, values in fresh.slice(0).items():
        found = scene.slice(0)[name]
        assert np.abs(found.astype(float) - values).max() <= (1 if name in ("entropy", "marginal") else 0), name
    same = ("name", "form", "size", "slices", "spacing", "range", "classes", "seed")
    assert {key: scene.summary()[key] for key in same} == {key: fresh.summary()[key] for key in same}
    for mine, theirs in zip(scene.summary()["masks"], fresh.summary()["masks"], strict=True):
        assert mine["weight"] == pytest.approx(theirs["weight"])
        assert (mine["strata"], mine["pixels"]) == (theirs["strata"], theirs["pixels"])
    assert scene.summary()["strata"]["weights"] == pytest.approx(fresh.summary()["strata"]["weights"])


def test_a_saved_prediction_without_its_arrays_and_image(saved, tmp_path):
    out, _ = saved
    shutil.copytree(out / "sample", tmp_path / "moved")
    (tmp_path / "moved" / "masks.npz").unlink()
    about = json.loads((tmp_path / "moved" / "weights.json").read_text())
    (tmp_path / "moved" / "weights.json").write_text(json.dumps(about | {"image": "/nowhere/scan.png"}))
    scene, whole = SavedScene(tmp_path / "moved"), SavedScene(out / "sample")
    assert "image" not in scene.slice(0)
    assert "not there any more" in scene.summary()["notes"][-1]
    assert (scene.slice(0)["masks"] == whole.slice(0)["masks"]).all()
    header, found = arrays(packed(scene, 0))
    assert header["size"] == [64, 64]
    shares = np.zeros((64, 64))
    for mask, labels in zip(scene.summary()["masks"], found["masks"], strict=True):
        shares += mask["weight"] * (labels == 1)
    assert np.abs(found["marginal"][1] / 255 - shares).max() < 0.003


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"size": [64, 63]}, "expected 8 masks of 64×63"),
        ({"masks": []}, "masks"),
        ({"format": "other"}, "expected a prediction of format"),
        ({"classes": ["one"]}, "class"),
    ],
)
def test_a_damaged_prediction_is_one_line(saved, tmp_path, change, expected):
    out, prediction = saved
    shutil.copytree(out / "sample", tmp_path / "damaged")
    path = tmp_path / "damaged" / "weights.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=expected.replace("8 masks", f"{prediction.masks.count} masks")) as error:
        SavedScene(tmp_path / "damaged")
    assert "\n" not in str(error.value)
    assert str(tmp_path / "damaged") in str(error.value)


def test_no_file_outside_of_its_folder_is_read(saved, tmp_path):
    out, _ = saved
    shutil.copytree(out / "sample", tmp_path / "p")
    (tmp_path / "p" / "masks.npz").unlink()
    path = tmp_path / "p" / "weights.json"
    about = json.loads(path.read_text())
    about["masks"][0]["file"] = "../mask.png"
    path.write_text(json.dumps(about))
    with pytest.raises(DataError, match="file"):
        SavedScene(tmp_path / "p")


def test_readers_are_masks_of_their_weights():
    data = Nodules()
    case = data[7]
    found = arrays(packed(ReadersScene(case, data), 0))[1]
    assert (found["image"] == case.image).all()
    assert sorted(map(bytes, found["masks"])) == sorted(map(bytes, case.labels.astype(np.uint8)))
    share = (case.labels == 1).mean(0)
    assert np.abs(found["marginal"][1] / 255 - share).max() < 0.003
    entropy = -(np.where(share > 0, share * np.log2(np.clip(share, 1e-9, 1)), 0))
    entropy -= np.where(share < 1, (1 - share) * np.log2(np.clip(1 - share, 1e-9, 1)), 0)
    assert np.abs(found["entropy"] / 255 - entropy).max() < 0.003


def test_predictions_carry_their_readers(saved):
    data = Nodules()
    case = data[7]
    _, prediction = saved
    scene = WithReaders(PredictionScene(prediction), case, data)
    header, found = arrays(packed(scene, 0))
    assert header["readers"] == list(case.readers)
    assert (found["readers"] == case.labels).all()
    told = scene.summary()["readers"]
    assert [one["pixels"][1] for one in told] == [(labels == 1).sum() for labels in case.labels]


def test_masks_that_no_model_made_are_saved(saved, tmp_path):
    """Of a saved prediction, with its image and without, and of readers."""
    out, prediction = saved
    shutil.copytree(out / "sample", tmp_path / "p" / "moved")
    path = tmp_path / "p" / "moved" / "weights.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image": "/nowhere/scan.png"}))
    data = Nodules()
    readers = ReadersScene(data[7], data)
    kept = [
        (choose([str(out)]), 0, prediction),
        (choose([str(tmp_path / "p")]), 0, prediction),
        (choose([], data="nodules"), 7, readers.prediction),
    ]
    for view, index, made in kept:
        asked, expected = Client(view, tmp_path), made.masks.labels[0]
        job = asked.post(f"/v1/cases/{index}/open", json={}).json()
        answer = asked.get(f"/v1/predictions/{job['id']}/files?format=npz")
        (tmp_path / "masks.npz").write_bytes(answer.content)
        found = MaskDistribution.load(tmp_path / "masks.npz")
        assert (found.labels[0] == expected).all()
        for form, suffix in (("png", ".png"), ("nifti", ".nii.gz"), ("files", ".")):
            answer = asked.get(f"/v1/predictions/{job['id']}/files?format={form}")
            with zipfile.ZipFile(io.BytesIO(answer.content)) as files:
                named = [one for one in files.namelist() if one.startswith("mask_") and suffix in one]
                assert len(named) == len(expected), (index, form)


# -- what is chosen ---------------------------------------------------------------------------------------------------


def test_words_of_the_command(tiny_run, saved, tmp_path, monkeypatch):
    out, _ = saved
    assert is_run(str(tiny_run))
    assert not is_run(str(out))
    view = choose([str(tiny_run)])
    assert (view.kind, view.opened) == ("models", None)
    assert [entry.kind for entry in view.entries] == ["case"] * len(view.entries)
    view = choose([str(tiny_run), "sample"])
    assert (view.opened, view.entries[0].kind, view.entries[0].name) == (0, "image", "sample")
    view = choose(["demo", "nodule-ct"])
    assert [model.name for model in view.models] == ["demo", "nodule-ct"]
    assert [model.name for model in choose(["demo"], other="demo").models] == ["demo (1)", "demo (2)"]
    view = choose([str(out)])
    assert (view.kind, [entry.name for entry in view.entries]) == ("predictions", ["sample"])
    view = choose([], data="nodules")
    assert (view.kind, view.entries[0].kind) == ("data", "readers")
    monkeypatch.chdir(tmp_path)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"places": []}, "expected a run"),
        ({"places": [], "other": "demo"}, "--data|first run"),
        ({"places": ["dmeo"]}, "did you mean"),
        ({"places": [str(tmp_path)]}, "expected a run .* or predictions"),
        ({"places": ["demo", "none.png"]}, "found nothing of that name"),
        ({"places": ["demo", str(tmp_path)]}, "expected images"),
        ({"places": [], "data": "none"}, "found nothing of that name"),
    ]
    for given, expected in refused:
        with pytest.raises((ConfigError, DataError), match=expected) as error:
            choose(**given)
        assert "\n" not in str(error.value)


def test_scores_of_an_evaluated_run_are_listed():
    one, other = parsed(evaluation(["a", "b"])), parsed(evaluation(["b"]))
    found = case_values([one, other])
    assert found["b"] == {
        "ged": 0.1, "readers": 3, "patient": "p0", "disagreement": 0.7, "iou": 0.5, "ged_other": 0.0
    }  # fmt: skip
    assert "ged_other" not in found["a"]


def test_an_evaluation_in_the_folder_of_a_run_is_found(tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "run")
    run = Run(tmp_path / "run")
    names = list(run.split.parts["test"])
    parsed(evaluation(names, weights=run.digest())).save(tmp_path / "run" / "evaluation-test.json")
    view = choose([str(tmp_path / "run")])
    assert [entry.name for entry in view.entries] == names
    assert [entry.values["ged"] for entry in view.entries] == [i / 10 for i in range(len(names))]
    titles = [column["title"] for column in view.list()["columns"]]
    assert titles == ["Readers", "GED", "IoU", "Disagreement", "Patient"]
    view = choose([str(tmp_path / "run")], data="shapes")  # of which the evaluated are a part
    assert len(view.entries) > len(names)


def test_expected_pixels_of_slices():
    data = Nodules()
    scene = ReadersScene(data[7], data)
    [found] = expected_pixels(scene)
    assert found[1] == pytest.approx((data[7].labels == 1).sum() / 4, abs=1)


def test_runs_that_do_not_fit_together(tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "other")
    about = json.loads((tmp_path / "other" / "run.json").read_text())
    about["data"]["classes"] = ["ground", "one", "two"]
    (tmp_path / "other" / "run.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="expected a run for 1 channel and 2 classes"):
        choose([str(tiny_run), str(tmp_path / "other")])


def test_the_command_refuses_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["view", str(tmp_path), "--no-browser"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["view", "--no-browser"]) == 2


# -- who may ask ------------------------------------------------------------------------------------------------------


def test_the_page_is_complete_and_closed(saved, tmp_path):
    out, _ = saved
    asked = Client(choose([str(out)]), tmp_path)
    answer = asked.get("/")
    assert answer.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    for name in static_files():
        answer = asked.get(f"/static/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"] == POLICY
    for name in ("../page.py", "..%2fpage.py", "index.html", "%2e%2e/routes.py", "none.js"):
        assert asked.get(f"/static/{name}").status_code == 404
    listed = asked.get("/v1/cases").json()
    assert [column["key"] for column in listed["columns"]] == ["masks", "top"]
    job = asked.post("/v1/cases/0/open", json={"model": 0}).json()
    told = asked.get(f"/v1/predictions/{job['id']}").json()
    assert told["state"] == "done"
    assert told["prediction"]["name"] == "sample"
    assert arrays(asked.get(f"/v1/predictions/{job['id']}/slices/0").content)[0]["size"] == [64, 64]
    for index in (-1, 1, 10**9):
        assert asked.post(f"/v1/cases/{index}/open", json={}).status_code == 404
    assert asked.post("/v1/cases/x/open", json={}).status_code == 422
    assert asked.post("/v1/cases/0/open", json={"path": "/etc/passwd"}).status_code == 422
    assert asked.post("/v1/predictions", json={"array": [[0, 1], [1, 0]]}).status_code == 422


def test_nobody_else_reads_it(saved, tmp_path):
    out, _ = saved
    asked = Client(choose([str(out)]), tmp_path)
    other = {"Origin": "http://evil.example"}
    assert asked.post("/v1/cases/0/open", json={}, headers=other).status_code == 403
    assert asked.get("/v1/cases", headers=other).status_code == 403
    assert asked.get("/", headers={"Host": "evil.example"}).status_code in (400, 421)
    assert asked.get("/v1/cases", headers={"Authorization": ""}).status_code == 401
    assert asked.get("/static/main.js", headers={"Authorization": ""}).status_code == 401
    answer = asked.get(f"/?token={TOKEN}", headers={"Authorization": ""})
    assert answer.status_code == 303
    assert "HttpOnly" in answer.headers["set-cookie"]


def test_names_are_escaped():
    text = page({**dict.fromkeys(_names(), ""), "title": "<script>alert(1)</script>"})
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def _names() -> set[str]:
    text = (resources.files("ambiseg.serving.view") / "static" / "index.html").read_text(encoding="utf-8")
    return set(re.findall(r"\$([a-z]+)", text))


def test_the_modules_load_nothing_from_elsewhere():
    for name, (content, _) in static_files().items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, name
        assert "https:" not in text, name
        assert not any(word in text for word in ("localStorage", "eval(", "innerHTML", "@import")), name


def test_colours():
    colours = palette()
    assert not set(colours["pins"]) & (set(colours["strata"]) | set(colours["readers"][:8]))
    assert palette_css().count("--paper") == 3
    assert all(len(set(values)) == len(values) for values in colours.values())

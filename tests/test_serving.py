"""What `ambiseg serve` answers is what `ambiseg.predict` gives, in every form; and what it is asked for is checked."""

from __future__ import annotations

import base64
import io
import json
import struct
import warnings
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import ambiseg
from ambiseg.masks import MaskDistribution
from ambiseg.prediction import Prediction
from ambiseg.serving.answers import runs
from tests.lidc_fakes import write_scan
from tests.services import Service, picture, serving, until

TOKEN = "t0ken-of-tests"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving(("demo", "nodule-ct"), token=TOKEN) as found:
        yield found


def predicted(path: Path, **options: Any) -> Prediction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ambiseg.predict("demo", path, **options)[0]


def posted(service: Service, content: bytes, name: str = "scan.tif", **fields: Any) -> Any:
    data = {key: str(value) for key, value in fields.items()}
    return service.client.post("/v1/predict", files={"image": (name, content)}, data=data)


def decoded(mask: dict[str, Any], size: tuple[int, ...]) -> np.ndarray:
    pairs = np.array(mask["runs"]).reshape(-1, 2)
    return np.repeat(pairs[:, 0], pairs[:, 1]).reshape(size)


@pytest.mark.parametrize(
    "options", [{}, {"samples": 5, "seed": 3}, {"per_stratum": 2, "symmetries": 2, "merge": False}]
)
def test_masks_are_those_of_predict(service, tmp_path, options):
    (tmp_path / "scan.tif").write_bytes(content := picture(64))
    expected = predicted(tmp_path / "scan.tif", **options)
    answer = posted(service, content, **options)
    assert answer.status_code == 200
    found = answer.json()
    assert found["form"] == expected.form
    assert np.allclose([mask["weight"] for mask in found["masks"]], expected.masks.mass[0])
    assert expected.strata is not None
    assert np.allclose(found["strata"]["weights"], expected.strata.weights, atol=1e-6)
    for i, (mask, labels) in enumerate(zip(found["masks"], expected.masks.labels[0].numpy(), strict=True)):
        assert np.array_equal(decoded(mask, (64, 64)), labels)
        assert mask["strata"] == [k + 1 for k in expected.strata_of(i)]
        assert mask["pixels"] == [int((labels == c).sum()) for c in (0, 1)]
    assert found["notes"] == list(expected.notes)  # none of them names an option


def test_npz_and_files_are_those_of_predict(service, tmp_path):
    (tmp_path / "scan.tif").write_bytes(content := picture(64))
    expected = predicted(tmp_path / "scan.tif", out=tmp_path / "out", seed=1)
    answer = posted(service, content, seed=1, format="npz")
    (tmp_path / "masks.npz").write_bytes(answer.content)
    found = MaskDistribution.load(tmp_path / "masks.npz")
    assert torch.equal(found.labels, expected.masks.labels)
    assert torch.allclose(found.mass, expected.masks.mass)
    answer = posted(service, content, seed=1, format="files")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    written = {path.name: path.read_bytes() for path in (tmp_path / "out" / "scan").iterdir()}
    assert set(files) == set(written)
    same = [name for name in files if files[name] == written[name]]
    assert {name for name in files if name.endswith(".tif")} <= {*same}  # bytes of every mask


@pytest.mark.parametrize("form", ["npy", "none", "runs"])
def test_arrays_in_json(service, form):
    pixels = np.random.default_rng(0).integers(-1000, 400, (40, 48)).astype(np.int16)
    file = io.BytesIO()
    np.save(file, pixels)
    given = [{"npy": base64.b64encode(file.getvalue()).decode()}, pixels.tolist(), pixels[None].tolist()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = ambiseg.predict("demo", pixels, samples=3)[0]
    for array in given:
        answer = service.client.post("/v1/predict", json={"array": array, "samples": 3, "masks": form})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        labels = expected.masks.labels[0].numpy()
        if form == "npy":
            assert np.array_equal(np.load(io.BytesIO(base64.b64decode(found["npy"]))), labels)
        elif form == "runs":
            assert np.array_equal([decoded(mask, (40, 48)) for mask in found["masks"]], labels)
        else:
            assert "runs" not in found["masks"][0]


def test_a_volume_keeps_its_place_in_space(service, tmp_path):
    import nibabel

    rng = np.random.default_rng(0)
    affine = np.array([[0.0, 0, 2.5, 7], [-0.7, 0, 0, 3], [0, 0.8, 0, -20], [0, 0, 0, 1]])
    volume = nibabel.Nifti1Image(rng.integers(-1000, 400, (24, 32, 3)).astype(np.int16), affine)
    volume.to_filename(tmp_path / "ct.nii.gz")
    expected = predicted(tmp_path / "ct.nii.gz", out=tmp_path / "out", per_stratum=1)
    content = (tmp_path / "ct.nii.gz").read_bytes()
    answer = posted(service, content, "../../CT.nii.gz", per_stratum=1, format="files")
    assert answer.status_code == 200, answer.text
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        archive.extractall(tmp_path / "got")
    for path in sorted((tmp_path / "out" / "ct").glob("*.nii.gz")):
        one, other = (nibabel.Nifti1Image.load(where) for where in (path, tmp_path / "got" / path.name))
        assert one.affine is not None
        assert other.affine is not None
        assert np.array_equal(one.affine, other.affine)
        assert np.array_equal(np.asarray(one.dataobj), np.asarray(other.dataobj))
    about = json.loads((tmp_path / "got" / "weights.json").read_text())
    assert about["image"] == "CT"  # what the client called it, without a path
    found = posted(service, content, "ct.nii.gz", per_stratum=1).json()
    assert (found["slices"], found["size"]) == (expected.source.slices, list(expected.source.size))
    assert np.allclose(sorted(found["spacing"]), [0.7, 0.8, 2.5])


def test_nifti_and_png_of_any_image(service):
    import nibabel
    from PIL import Image

    for form, suffix in (("nifti", ".nii.gz"), ("png", ".png")):
        answer = posted(service, picture(40), samples=2, merge=False, format=form)
        with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
            content = archive.read(f"mask_00{suffix}")
        if form == "png":
            assert Image.open(io.BytesIO(content)).size == (40, 40)
        else:
            import gzip

            image = nibabel.Nifti1Image.from_bytes(gzip.decompress(content))
            assert image.shape[:2] == (40, 40)


def test_a_dicom_series_is_several_files(service, tmp_path):
    volume = np.random.default_rng(0).integers(-1000, 400, (3, 32, 40)).astype(np.int16)
    write_scan(tmp_path / "scan", "P1", "1.2.3", volume, [0.0, 2.0, 4.0])
    paths = sorted(path for path in (tmp_path / "scan").rglob("*") if path.is_file())
    expected = predicted(tmp_path / "scan", per_stratum=1, merge=False)
    files = [("image", (f"IM{i}", path.read_bytes())) for i, path in enumerate(reversed(paths))]
    answer = service.client.post("/v1/predict", files=files, data={"per_stratum": "1", "merge": "false"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["slices"], found["size"], found["name"], found["units"]) == (3, [32, 40], "series", "HU")
    for mask, labels in zip(found["masks"], expected.masks.labels[0].numpy(), strict=True):
        assert np.array_equal(decoded(mask, (3, 32, 40)), labels)
    answer = service.client.post("/v1/predict", files=[*files, ("image", ("a.png", b"x"))])
    assert answer.status_code == 422
    assert "one file, or the DICOM files of one series" in answer.json()["error"]
    answer = service.client.post("/v1/predict", files=[*files, files[0]])
    assert answer.status_code == 422
    assert "expected one slice per position" in answer.json()["error"]


def test_jobs_and_slices(service, tmp_path):
    (tmp_path / "scan.tif").write_bytes(content := picture(48))
    expected = predicted(tmp_path / "scan.tif")
    answer = service.client.post("/v1/predictions", files={"image": ("scan.tif", content)})
    assert answer.status_code == 202
    place = f"/v1/predictions/{answer.json()['id']}"
    until(lambda: service.client.get(place).json()["state"] == "done")
    about = service.client.get(place).json()
    assert (about["done"], about["total"], about["error"]) == (1, 1, None)
    assert about["prediction"]["name"] == "scan"
    got = service.client.get(f"{place}/slices/0")
    arrays, header = unpacked(got.content)
    assert header["size"] == [48, 48]
    assert np.array_equal(arrays["masks"], expected.masks.labels[0])
    assert expected.strata is not None
    assert expected.masks.marginal is not None
    assert np.array_equal(arrays["centres"], expected.strata.centres)
    assert np.abs(arrays["marginal"] / 255 - expected.masks.marginal[0].numpy()).max() <= 0.5 / 255 + 1e-6
    assert np.abs(arrays["entropy"] / 255 - expected.entropy.numpy() / np.log(2)).max() <= 0.5 / 255 + 1e-6
    assert np.array_equal(arrays["image"], expected.source.read(0))
    plain = service.client.get(f"{place}/slices/0", headers={"Accept-Encoding": "identity"})
    assert plain.content == got.content
    assert "content-encoding" not in plain.headers
    assert got.headers["content-encoding"] == "gzip"
    assert service.client.get(f"{place}/slices/1").status_code == 404
    assert service.client.get(f"{place}/files?format=png").headers["content-type"] == "application/zip"
    assert service.client.delete(place).status_code == 200
    assert service.client.get(place).status_code == 404


def unpacked(content: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A slice as a client reads it."""
    assert content[:4] == b"AMB1"
    (length,) = struct.unpack("<I", content[4:8])
    assert (8 + length) % 8 == 0
    header, found = json.loads(content[8 : 8 + length]), {}
    for about, offset in zip(header["arrays"], header["offsets"], strict=True):
        assert offset % 8 == 0
        dtype, count = np.dtype(about["dtype"]).newbyteorder("<"), int(np.prod(about["shape"]))
        found[about["name"]] = np.frombuffer(content, dtype, count, 8 + length + offset).reshape(about["shape"])
    return found, header


def test_requests_at_the_same_time_get_what_each_gets_alone(service, tmp_path):
    """They go through the network together; sums are then made in another order."""
    contents = [picture(32, seed) for seed in range(10)]
    expected = []
    for i, content in enumerate(contents):
        (tmp_path / f"{i}.tif").write_bytes(content)
        expected.append(predicted(tmp_path / f"{i}.tif"))
    found = list[Any]()
    with ThreadPoolExecutor(10) as pool:
        for _ in range(2):  # the first time a batch of a length is compared with its images alone
            found = list(pool.map(lambda content: posted(service, content, masks="npy").json(), contents))
    for one, other in zip(found, expected, strict=True):
        labels = np.load(io.BytesIO(base64.b64decode(one["npy"])))
        weights = np.array([mask["weight"] for mask in one["masks"]])
        assert np.isclose(weights.sum(), 1)
        marginal = np.tensordot(weights, labels == 1, 1)
        wanted = np.tensordot(other.masks.mass[0].numpy(), other.masks.labels[0].numpy() == 1, 1)
        assert np.abs(marginal - wanted).mean() < 1e-4


def test_two_models(service):
    models = service.client.get("/v1/models").json()["models"]
    assert [(one["index"], one["name"]) for one in models] == [(0, "demo"), (1, "nodule-ct")]
    assert models[0]["classes"] == ["background", "nodule"]
    content = picture(32)
    answers = [posted(service, content, model=model).json() for model in ("0", "demo", "nodule-ct", 1)]
    assert [one["model"] for one in answers] == [0, 0, 1, 1]
    assert answers[0]["strata"] == answers[1]["strata"] != answers[2]["strata"]


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"samples": 0}, 422, "samples: expected at least 1, found '0'"),
        ({"samples": "many"}, 422, "samples: expected a whole number, found 'many'"),
        ({"samples": 3, "per_stratum": 3}, 422, "samples: expected None beside per_stratum=3"),
        ({"colour": "red"}, 422, "colour: expected a key of a request"),
        ({"model": "other"}, 422, "model: expected one of demo, nodule-ct or its index, found other"),
        ({"model": 7}, 422, "found 7"),
        ({"model": "-1"}, 422, "found -1"),
        ({"symmetries": 3}, 422, "symmetries: expected"),
        ({"assume_low": 3}, 422, "expected both"),
        ({"assume_low": 3, "assume_high": 2}, 422, "low < high"),
        ({"format": "exe"}, 422, "format: expected"),
        ({"window": 64, "overlap": 60}, 422, "overlap: expected 0 to 32"),
    ],
)
def test_fields_are_checked(service, fields, status, said):
    answer = posted(service, picture(32), **fields)
    assert answer.status_code == status
    assert said in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize(
    ("content", "name", "status", "said"),
    [
        (b"no picture", "../../../etc/x.png", 422, "x.png: expected PNG, found text"),
        (b"", "x.png", 422, "x.png: expected PNG, found an empty file"),
        (b"MZ", "setup.exe", 415, "expected a name that ends in one of"),
        (b"x", "a.nrrd", 415, "found NRRD"),
        (picture(16)[:100], "x.tif", 422, "x.tif: expected TIFF"),
        (picture(16), "", 415, "expected a name"),
    ],
)
def test_files_that_cannot_be_read(service, content, name, status, said):
    answer = posted(service, content, name)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]
    assert "/tmp" not in answer.text
    assert str(service.app.state.root) not in answer.text


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"{}", b'{"array": 3}', b'{"array": []}', b'{"array": [[1, 2], [3]]}',
        b'{"array": [["a"]]}', b'{"array": [[null]]}', b'{"array": {"npy": "%%"}}', b'{"array": {"npy": "AAAA"}}',
        b'{"array": {"npy": 3}}', b'{"array": [[1e999]]}', b'{"array": [[1]], "array": [[2]]}', b"\xff\xfe",
        b'{"array": [[1]], "seed": -1}', b'{"array": [[1]], "seed": 1.5}', b"[" * 100_000, b'{"array": [[[[[1]]]]]}',
        b'{"array": [[1, 2]], "name": 3}', b'{"array": [[[1]], [[2]]]}',
    ],
)  # fmt: skip
def test_json_that_is_no_request(service, body):
    answer = service.client.post("/v1/predict", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    assert set(answer.json()) == {"error"}
    assert "expected" in answer.json()["error"]


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("multipart/form-data", b"", 400),
        ("multipart/form-data; boundary=x", b"", 400),
        ("multipart/form-data; boundary=x", b"--x--\r\n", 422),
        ("multipart/form-data; boundary=x", b"--y\r\n\r\n", 400),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\na\r\n--x--\r\n", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"A: b\r\n" * 100 + b"\r\n", 400),
        ("multipart/form-data; boundary=" + "x" * 300, b"--x--", 400),
        ("text/plain", b"hello", 415),
        ("", b"hello", 415),
        ("application/x-www-form-urlencoded", b"a=b", 415),
    ],
)
def test_bodies_that_are_no_form(service, kind, body, status):
    answer = service.client.post("/v1/predict", content=body, headers={"Content-Type": kind} if kind else {})
    assert answer.status_code == status, answer.text
    assert "expected" in answer.json()["error"]


def test_other_paths_and_methods(service):
    get = service.client.get
    assert get("/nowhere").json() == {"error": "expected a path of this service, found another"}
    assert service.client.put("/v1/models").status_code == 405
    assert get("/v1/predictions/../../etc/passwd").status_code == 404
    assert get("/v1/predictions/none").status_code == get("/v1/predictions/none/slices/0").status_code == 404
    assert get("/v1/predictions/none/slices/x").status_code == 422
    assert get("/").json()["description"] == "/openapi.json"
    assert get("/openapi.json").json()["paths"].keys() >= {"/v1/predict", "/healthz", "/metrics"}


def test_health_and_metrics(service):
    assert service.client.get("/healthz").json()["status"] == "ok"
    posted(service, picture(32))
    text = service.client.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['ambiseg_requests_total{method="POST",path="/v1/predict",status="200"}']) >= 1
    assert float(lines['ambiseg_predictions_total{state="done"}']) >= 1
    assert lines["ambiseg_worker_up"] == "1"
    buckets = [int(lines[key]) for key in lines if key.startswith('ambiseg_request_seconds_bucket{path="/v1/predict"')]
    assert buckets == sorted(buckets)
    assert buckets[-1] == int(lines['ambiseg_request_seconds_count{path="/v1/predict"}'])


def test_nothing_stays_in_the_folder_of_uploads(service):
    posted(service, picture(32), format="files")
    posted(service, b"no picture", "x.png")
    assert list(service.app.state.root.iterdir()) == []
    assert service.app.state.root.stat().st_mode & 0o077 == 0


@given(arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.integers(0, 3)))
def test_runs_say_every_pixel(labels):
    pairs = np.array(runs(labels)).reshape(-1, 2)
    assert np.array_equal(np.repeat(pairs[:, 0], pairs[:, 1]), labels.reshape(-1))
    assert (pairs[1:, 0] != pairs[:-1, 0]).all()

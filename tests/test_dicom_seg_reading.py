"""DICOM SEG as readers' masks: placed on slices, as classes, in data sets; and files that are wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydicom import dcmread, uid

from ambiseg._util.errors import DataError
from ambiseg.data.check.check import check
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.evaluation.files import evaluate_files
from ambiseg.io import dicom_seg as module
from ambiseg.io.dicom_files import modality_of
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions
from tests.dicom_fakes import contour, enhanced, rtstruct, seg, series, sorted_slices
from tests.files import RNG, save
from tests.mutations import survives

SIZE = (5, 7)  # 35 pixels: frames of one bit per pixel do not begin at whole bytes
VOLUME = RNG.integers(-900, 300, (4, *SIZE)).astype(np.int16)
MASKS = RNG.random((4, *SIZE)) < 0.4
TWO = np.stack([MASKS, ~MASKS & (RNG.random(MASKS.shape) < 0.5)], -1)  # apart from each other


@pytest.fixture
def scan(tmp_path):
    folder = series(tmp_path / "ct", VOLUME)
    return open_source(folder), sorted_slices(folder), tmp_path


def masks(path, image, **options):
    source = open_source(path, ReadOptions(mask=True, image=image, like=image, **options))
    assert (source.slices, source.size, source.ids) == (image.slices, image.size, True)
    return np.concatenate([source.read(k) for k in range(source.slices)])


def refused(path, image, **options):
    with pytest.raises(DataError) as caught:
        masks(path, image, **options)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


# -- kinds -------------------------------------------------------------------------------------------------------------


def test_binary(scan):
    image, slices, place = scan
    found = masks(seg(place / "a.dcm", slices, MASKS), image)
    assert found.dtype == bool
    np.testing.assert_array_equal(found, MASKS)
    one = np.where(np.arange(4)[:, None, None] == 2, MASKS, False)  # frames that are empty are left out
    np.testing.assert_array_equal(masks(seg(place / "b.dcm", slices, one), image), one)
    np.testing.assert_array_equal(masks(seg(place / "c.dcm", slices[::-1], MASKS[::-1]), image), MASKS)


@pytest.mark.parametrize("syntax", [uid.ExplicitVRLittleEndian, uid.RLELossless])
@pytest.mark.parametrize("form", ["PROBABILITY", "OCCUPANCY"])
def test_fractions_count_from_one_half_on(scan, syntax, form):
    image, slices, place = scan
    values = RNG.choice([0, 0.2, 0.49, 0.5, 0.7, 1.0], (4, *SIZE))
    options = {"fractional_type": form, "max_fractional_value": 200, "transfer_syntax_uid": syntax}
    path = seg(place / "a.dcm", slices, values, kind="FRACTIONAL", **options)
    np.testing.assert_array_equal(masks(path, image), np.round(values * 200) >= 100)


def test_label_map(scan):
    image, slices, place = scan
    ids = RNG.integers(0, 3, (4, *SIZE)).astype(np.uint8)
    path = seg(place / "a.dcm", slices, ids, ("liver", "lesion"), "LABELMAP")
    np.testing.assert_array_equal(masks(path, image, segments={"lesion": 1}), ids == 2)
    np.testing.assert_array_equal(masks(path, image, segments={"2": 2, "1": 1}), ids)
    np.testing.assert_array_equal(masks(path, image, classes=("none", "Lesion", "Liver")), np.array([0, 2, 1])[ids])


def test_several_segments_are_classes(scan):
    image, slices, place = scan
    path = seg(place / "a.dcm", slices, TWO, ("liver", "lesion"))
    np.testing.assert_array_equal(masks(path, image, classes=("none", "liver", "lesion")), TWO @ [1, 2])
    np.testing.assert_array_equal(masks(path, image, segments={"liver": 1, "lesion": 1}), TWO.any(-1))
    message = refused(path, image)
    assert message == "expected one segment, found 2 segments: 'liver', 'lesion'"
    assert refused(path, image, segments={"spleen": 1}).startswith("expected one of the declared segments 'spleen'")
    wanted = "expected segments named as the classes ('none', 'liver', 'x'), found 2 segments: 'liver', 'lesion'"
    assert refused(path, image, classes=("none", "liver", "x")) == wanted.replace(
        "'none', 'liver', 'x'", "none, liver, x"
    )


def test_segments_that_overlap_need_an_order(scan):
    image, slices, place = scan
    both = np.stack([MASKS, MASKS & (VOLUME > -500)], -1)
    path = seg(place / "a.dcm", slices, both, ("liver", "lesion"))
    np.testing.assert_array_equal(
        masks(path, image, segments={"liver": 1, "lesion": 2}), np.where(both[..., 1], 2, MASKS)
    )
    np.testing.assert_array_equal(masks(path, image, segments={"lesion": 2, "liver": 1}), MASKS)
    assert "in both" in refused(path, image, classes=("none", "liver", "lesion"))


# -- where frames lie --------------------------------------------------------------------------------------------------


def unnamed(data):
    """Without references to the slices."""
    for group in data.PerFrameFunctionalGroupsSequence:
        del group.DerivationImageSequence


def unplaced(data):
    for group in data.PerFrameFunctionalGroupsSequence:
        if "PlanePositionSequence" in group:
            del group.PlanePositionSequence
    del data.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence


def test_by_reference_or_by_place(scan):
    image, slices, place = scan
    for k, change in enumerate((unnamed, unplaced)):
        np.testing.assert_array_equal(masks(seg(place / f"{k}.dcm", slices, MASKS, change=change), image), MASKS)

    def neither(data):
        unnamed(data)
        unplaced(data)

    message = refused(seg(place / "n.dcm", slices, MASKS, change=neither), image)
    assert message == "expected frame 1 on a slice of ct, found no reference to its slices and no position"


def test_a_copy_of_the_series_with_other_uids(scan):
    image, _, place = scan
    other = sorted_slices(series(place / "copy", VOLUME))  # the same frame of reference
    np.testing.assert_array_equal(masks(seg(place / "a.dcm", other, MASKS), image), MASKS)
    foreign = sorted_slices(series(place / "foreign", VOLUME, FrameOfReferenceUID="8.8"))
    message = refused(seg(place / "b.dcm", foreign, MASKS), image)
    assert message == "expected frame 1 on a slice of ct, found another frame of reference"
    longer = sorted_slices(series(place / "longer", np.concatenate([VOLUME, VOLUME])))
    beyond = seg(place / "c.dcm", longer, np.concatenate([MASKS, MASKS]))
    assert refused(beyond, image).endswith("on a slice of ct, found it beside all of them")
    wide = sorted_slices(series(place / "wide", np.zeros((2, 5, 8), np.int16)))
    assert (
        refused(seg(place / "d.dcm", wide, np.ones((2, 5, 8), bool)), image)
        == "expected 5×7 as its image ct, found 5×8"
    )


@pytest.mark.parametrize("k", range(8))
def test_turned_frames(scan, k):
    """Another program stored the same masks with rows or columns reversed or exchanged, and says so."""
    from highdicom import PixelMeasuresSequence, PlaneOrientationSequence, PlanePositionSequence

    image, slices, place = scan
    transposed, rows, columns = k & 4, k & 2, k & 1
    down, across = np.array([0, 1.0, 0]), np.array([1.0, 0, 0])
    turned, spacing, shift = MASKS, [0.5, 0.75], np.zeros(3)
    if rows:
        turned, shift, down = turned[:, ::-1], shift + 4 * 0.5 * down, -down
    if columns:
        turned, shift, across = turned[:, :, ::-1], shift + 6 * 0.75 * across, -across
    if transposed:
        turned, spacing, down, across = turned.swapaxes(1, 2), spacing[::-1], across, down
    corners = [np.array(one.ImagePositionPatient, float) + shift for one in slices]
    about = {
        "pixel_measures": PixelMeasuresSequence(spacing, 2.0),
        "plane_orientation": PlaneOrientationSequence("PATIENT", [*across, *down]),
        "plane_positions": [PlanePositionSequence("PATIENT", corner.tolist()) for corner in corners],
    }
    path = seg(place / "a.dcm", slices, np.ascontiguousarray(turned), **about)
    np.testing.assert_array_equal(masks(path, image), MASKS)


def test_a_frame_that_lies_elsewhere_than_it_says(scan):
    image, slices, place = scan

    def exchange(data):
        groups = data.PerFrameFunctionalGroupsSequence
        first, second = groups[0].PlanePositionSequence, groups[1].PlanePositionSequence
        groups[0].PlanePositionSequence, groups[1].PlanePositionSequence = second, first

    message = refused(seg(place / "a.dcm", slices, MASKS, change=exchange), image)
    assert message == "expected frame 1 on a slice of ct, which it refers to by UID, found it elsewhere"


def test_frames_of_one_file_one_slice_and_pictures_without_a_place(tmp_path):
    path = enhanced(tmp_path / "e.dcm", VOLUME, (1, 0, 2, 3))
    image = open_source(path)
    stored = MASKS[[1, 0, 2, 3]]
    assert image.affine is None  # the frames lie anyhow
    np.testing.assert_array_equal(masks(seg(tmp_path / "a.dcm", [dcmread(path)], stored), image), stored)
    single = series(tmp_path / "one", VOLUME[:1])
    np.testing.assert_array_equal(
        masks(seg(tmp_path / "b.dcm", sorted_slices(single), MASKS[:1]), open_source(single)), MASKS[:1]
    )


def test_frames_of_one_file_in_even_steps_have_a_place(tmp_path):
    image, folder = open_source(enhanced(tmp_path / "e.dcm", VOLUME)), open_source(series(tmp_path / "ct", VOLUME))
    assert image.affine is not None
    assert folder.affine is not None
    np.testing.assert_allclose(image.affine, folder.affine)
    back = open_source(enhanced(tmp_path / "b.dcm", VOLUME, (3, 2, 1, 0)))
    assert back.affine is not None
    np.testing.assert_allclose(back.affine[:, 0], -folder.affine[:, 0])


# -- data sets ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    """Two scans, two readers: one saved segmentations, the other contours."""
    for name, size in (("p1", 4), ("p2", 3)):
        folder = series(tmp_path / "images" / name, VOLUME[:size], FrameOfReferenceUID=f"1.{size}")
        slices = sorted_slices(folder)
        seg(tmp_path / "masks" / "Ann" / f"{name}.dcm", slices, MASKS[:size])
        square = [(0.5, 0.5), (0.5, 3.5), (2.5, 3.5), (2.5, 0.5)]
        rtstruct(tmp_path / "masks" / "Bob" / f"{name}.dcm", {"GTV": [(contour(square, 1), "")]}, reference=f"1.{size}")
    return tmp_path


def test_readers_of_a_folder(data):
    cases = Folder(data, quiet=True)
    assert cases.classes == ("background", "foreground")
    assert (len(cases), cases[0].readers) == (7, ("Ann", "Bob"))
    for k in range(4):
        np.testing.assert_array_equal(cases[k].labels[0], MASKS[k])
        assert cases[k].labels[1].sum() == 6 * (k == 1)
    learnt = [one.case.labels.tolist() for one in Folder(data, quiet=True).decode()]
    assert learnt == [case.labels.tolist() for case in cases]


def test_the_check_and_the_scores(data):
    result = check(data, quiet=True)
    assert result.exit_code == 0, [problem.line for problem in result.problems]
    mine = data / "mine"
    for name in ("p1", "p2"):
        (mine / name).mkdir(parents=True)
        for reader in ("Ann", "Bob"):  # a prediction that is the two readers
            (mine / name / f"{reader}.dcm").write_bytes((data / "masks" / reader / f"{name}.dcm").read_bytes())
    found = evaluate_files(mine, data, quiet=True)
    assert found.setting("files", 2).metrics["ged"].mean == pytest.approx(0)
    assert len(found.cases) == 7


def test_beside_masks_of_other_formats_and_in_folders_of_their_own(data):
    for name, size in (("p1", 4), ("p2", 3)):
        path = data / "masks" / "Cid" / f"{name}.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, MASKS[:size].astype(np.uint8) * 255)
        moved = data / "masks" / "Ann" / name / "SEG0001.dcm"
        moved.parent.mkdir()
        (data / "masks" / "Ann" / f"{name}.dcm").rename(moved)
    case = Folder(data, quiet=True)[0]
    assert case.readers == ("Ann", "Bob", "Cid")
    np.testing.assert_array_equal(case.labels[0], case.labels[2])
    again = data / "masks" / "Ann" / "p1" / "SEG0002.dcm"
    again.write_bytes(moved.read_bytes())
    with pytest.raises(DataError, match="expected one SEG for each reader and image, found 2 files"):
        Folder(data, quiet=True)[0]


def test_classes_and_void_of_segments(data):
    for path in (data / "masks" / "Ann").glob("*.dcm"):
        slices = sorted_slices(data / "images" / path.stem)
        seg(path, slices, TWO[: len(slices)], ("liver", "lesion"))
    assert "E313" in [problem.code for problem in check(data, quiet=True).problems]
    said = {"segments": {"liver": 1, "lesion": 2, "GTV": 2}}
    (data / "ambiseg.json").write_text(json.dumps(said))
    cases = Folder(data, quiet=True)
    assert cases.classes == ("background", "class 1", "class 2")
    np.testing.assert_array_equal(cases[1].labels[0], TWO[1] @ [1, 2])
    assert set(np.unique(cases[1].labels[1])) == {0, 2}
    void = Folder(data, segments={"liver": 1, "lesion": "void", "GTV": 1}, quiet=True)[1]
    assert void.valid is not None
    np.testing.assert_array_equal(void.valid, ~TWO[1, ..., 1])
    with pytest.raises(DataError, match="segments: expected a class id below 2"):
        Folder(data, segments={"liver": 2}, classes=2, quiet=True)


def test_segmentations_without_their_images(data):
    (data / "images").rename(data / "elsewhere")
    with pytest.raises(DataError, match=r"p1\.dcm: expected an image, found a DICOM SEG object"):
        evaluate_files(data / "masks", data / "masks", quiet=True)
    for name in ("p1", "p2"):
        save(data / "images" / f"{name}.png", np.zeros(SIZE, np.uint8))
    with pytest.raises(DataError, match="expected an image in DICOM or NIfTI beside a SEG, found another format"):
        Folder(data, quiet=True)[0]


# -- files that are wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SegmentationType": "ODD"}, "expected a SEG that is BINARY or FRACTIONAL or LABELMAP, found 'ODD'"),
        ({"Rows": 60000, "Columns": 60000}, "expected at most 67,108,864 pixels per slice"),
        ({"NumberOfFrames": 100000}, "expected at most 65,536 frames, found 100,000"),
        ({"NumberOfFrames": 4000}, "the file ends too early"),
        ({"NumberOfFrames": 3}, "expected a group of attributes for each of 3 frames, found 4"),
        ({"Rows": 0}, "expected DICOM with Rows, found '0'"),
        ({"BitsAllocated": 32}, "expected bits of a BINARY SEG, found BitsAllocated '32'"),
        (
            {"SegmentationType": "FRACTIONAL", "BitsAllocated": 8, "NumberOfFrames": 1},
            "expected MaximumFractionalValue",
        ),
        ({"TotalPixelMatrixRows": 5}, "expected a SEG of slices, found one of the tiles of a slide"),
        ({"SegmentSequence": []}, "expected at least one segment, found none"),
        ({"PerFrameFunctionalGroupsSequence": []}, "expected a group of attributes for each of 4 frames, found 0"),
    ],
)
def test_headers_that_claim_too_much_or_nothing(scan, changes, said):
    image, slices, place = scan

    def change(data):
        for name, value in changes.items():
            setattr(data, name, value)

    assert said in refused(seg(place / "a.dcm", slices, MASKS, change=change), image)


def test_segments_that_are_not_described(scan):
    image, slices, place = scan

    def change(data):
        data.SegmentSequence[-1].SegmentNumber = 3

    said = "expected segments that the file describes, found number 1"
    assert refused(seg(place / "a.dcm", slices, MASKS, change=change), image) == said
    ids = np.ones((4, *SIZE), np.uint8)
    assert refused(seg(place / "b.dcm", slices, ids, ("liver",), "LABELMAP", change=change), image) == said


def test_more_segments_than_the_limit(scan, monkeypatch):
    image, slices, place = scan
    monkeypatch.setattr(module, "_SEGMENTS", 1)
    path = seg(place / "a.dcm", slices, TWO, ("liver", "lesion"))
    assert refused(path, image) == "expected at most 1 segments, found 2"


@pytest.mark.parametrize("kind", ["SEG", "RTSTRUCT"])
def test_damaged_bytes_are_one_line(scan, kind):
    image, slices, place = scan
    square = [(0.5, 0.5), (0.5, 3.5), (2.5, 3.5), (2.5, 0.5)]
    good = (
        seg(place / "a.dcm", slices, MASKS)
        if kind == "SEG"
        else rtstruct(place / "a.dcm", {"G": [(contour(square, 1), "")]})
    )

    def read():
        if modality_of(good) == kind:  # the damage did not make it another kind of object
            masks(good, image)

    assert survives(good, read, 60) > 10

"""Contours in millimetres as pixels: hand cases, a slow reference, whole structure sets, and files that are wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambiseg._util.errors import DataError
from ambiseg.io import rtstruct as module
from ambiseg.io.open import open_source
from ambiseg.io.rtstruct import rasterise
from ambiseg.io.source import ReadOptions
from tests.dicom_fakes import contour, enhanced, rtstruct, series, sorted_slices

SIZE = (9, 8)
VOLUME = np.zeros((3, *SIZE), np.int16)
BOX = [(1.5, 2.5), (1.5, 5.5), (4.5, 5.5), (4.5, 2.5)]  # rows 2 … 4, columns 3 … 5
HOLE = [(2.5, 3.5), (2.5, 4.5), (3.5, 4.5), (3.5, 3.5)]  # the pixel (3, 4)


def box(top, left, bottom, right):
    found = np.zeros(SIZE, bool)
    found[top : bottom + 1, left : right + 1] = True
    return found


def drawn(*contours, size=SIZE):
    return rasterise([np.array(one, float) for one in contours], size)


# -- from contours to pixels -------------------------------------------------------------------------------------------


def test_a_square_between_pixel_centres():
    np.testing.assert_array_equal(drawn(BOX), box(2, 3, 4, 5))
    np.testing.assert_array_equal(drawn(BOX[::-1]), box(2, 3, 4, 5))  # in either sense of rotation


def test_centres_on_a_contour_belong_to_what_lies_below_or_right():
    np.testing.assert_array_equal(drawn([(1, 2), (1, 5), (4, 5), (4, 2)]), box(1, 2, 3, 4))
    left, right = drawn([(1, 2), (1, 5), (4, 5), (4, 2)]), drawn([(1, 5), (1, 7), (4, 7), (4, 5)])
    assert not (left & right).any()
    np.testing.assert_array_equal(left | right, box(1, 2, 3, 6))


def test_a_triangle_by_hand():
    found = drawn([(0.5, 0.5), (0.5, 4.5), (4.5, 0.5)])  # inside: column + row < 5, from (1, 1) on
    expected = np.zeros(SIZE, bool)
    for row, columns in ((1, (1, 2, 3)), (2, (1, 2)), (3, (1,))):
        expected[row, list(columns)] = True
    np.testing.assert_array_equal(found, expected)


def test_holes_as_contours_and_by_a_keyhole_are_the_same():
    ring = box(2, 3, 4, 5) & ~box(3, 4, 3, 4)
    keyhole = [BOX[0], BOX[1], BOX[2], BOX[3], BOX[0], *HOLE, HOLE[0]]  # in and out on one line
    np.testing.assert_array_equal(drawn(BOX, HOLE), ring)
    np.testing.assert_array_equal(drawn(keyhole), ring)


def test_several_contours_and_those_that_leave_the_image():
    np.testing.assert_array_equal(
        drawn(BOX, [(5.5, 0.5), (5.5, 1.5), (6.5, 1.5), (6.5, 0.5)]), box(2, 3, 4, 5) | box(6, 1, 6, 1)
    )
    np.testing.assert_array_equal(drawn([(-50, -50), (-50, 2.5), (3.5, 2.5), (3.5, -50)]), box(0, 0, 3, 2))
    np.testing.assert_array_equal(drawn([(-9, -9), (-9, 99), (99, 99), (99, -9)]), np.ones(SIZE, bool))
    assert not drawn([(-9, -9), (-9, -3), (-3, -3)]).any()
    assert not drawn().any()
    assert not drawn([(2, 2), (2, 2), (2, 2)]).any()


def slow(contours, size):
    """The even-odd rule for one pixel after the other."""
    found = np.zeros(size, bool)
    for row in range(size[0]):
        for column in range(size[1]):
            for points in contours:
                for (y, x), (v, u) in zip(points, np.roll(points, -1, 0), strict=True):
                    if (y <= row) != (v <= row) and round(x + (row - y) * (u - x) / (v - y), 4) <= column:
                        found[row, column] ^= True
    return found


COORDINATE = st.integers(-8, 48).map(lambda n: n / 4)
POLYGON = st.lists(st.tuples(COORDINATE, COORDINATE), min_size=3, max_size=7)


@given(st.lists(POLYGON, min_size=1, max_size=3))
def test_polygons_of_any_form_are_those_of_the_slow_rule(polygons):
    points = [np.array(one, float) for one in polygons]
    np.testing.assert_array_equal(rasterise(points, SIZE), slow(points, SIZE))


def test_many_edges_in_parts_are_the_same(monkeypatch):
    points = np.random.default_rng(0).uniform(-3, 12, (300, 2))
    whole = rasterise([points], SIZE)
    monkeypatch.setattr(module, "_AT_ONCE", 50)
    np.testing.assert_array_equal(rasterise([points], SIZE), whole)
    np.testing.assert_array_equal(whole, slow([np.round(points, 4)], SIZE))


def test_area_of_a_large_circle():
    turn = np.linspace(0, 2 * np.pi, 2000, endpoint=False)
    found = rasterise([100 + 80.3 * np.stack([np.sin(turn), np.cos(turn)], 1)], (200, 200))
    assert abs(found.sum() / (np.pi * 80.3**2) - 1) < 1e-3


# -- structure sets ----------------------------------------------------------------------------------------------------


@pytest.fixture
def scan(tmp_path):
    folder = series(tmp_path / "ct", VOLUME)
    return open_source(folder), [str(one.SOPInstanceUID) for one in sorted_slices(folder)], tmp_path


def masks(path, image, **options):
    source = open_source(path, ReadOptions(mask=True, image=image, **options))
    assert (source.slices, source.size, source.ids) == (image.slices, image.size, True)
    return np.concatenate([source.read(k) for k in range(source.slices)])


def refused(path, image, **options):
    with pytest.raises(DataError) as caught:
        masks(path, image, **options)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


def test_contours_lie_on_the_slice_they_refer_to_or_on_the_nearest(scan):
    image, uids, place = scan
    for instance in (uids[2], "", "9.9.9"):
        found = masks(rtstruct(place / "a.dcm", {"GTV": [(contour(BOX, 2), instance)]}), image)
        assert found.dtype == bool
        np.testing.assert_array_equal(found, np.stack([0 * box(0, 0, 0, 0), 0 * box(0, 0, 0, 0), box(2, 3, 4, 5)]) > 0)


def test_holes_of_both_kinds_and_copies(scan):
    image, uids, place = scan
    ring = box(2, 3, 4, 5) & ~box(3, 4, 3, 4)
    both = {"GTV": [(contour(BOX, 1), uids[1]), (contour(HOLE, 1), uids[1])]}
    for kind in ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR"):
        np.testing.assert_array_equal(masks(rtstruct(place / "a.dcm", both, kind), image)[1], ring)
    twice = {"GTV": [(contour(BOX, 1), uids[1])] * 2}
    np.testing.assert_array_equal(masks(rtstruct(place / "b.dcm", twice), image)[1], box(2, 3, 4, 5))
    assert not masks(rtstruct(place / "c.dcm", twice, "CLOSEDPLANAR_XOR"), image).any()


def test_names_become_classes_and_the_last_lies_on_top(scan):
    image, _, place = scan
    structures = {"PTV": [(contour(BOX, 0), "")], "GTV": [(contour(HOLE, 0), "")], "Body": [(contour(BOX, 1), "")]}
    path = rtstruct(place / "a.dcm", structures)
    found = masks(path, image, segments={"ptv": 1, "2": 2})  # by name in any capitals, and by number
    np.testing.assert_array_equal(found[0], box(2, 3, 4, 5) + box(3, 4, 3, 4).astype(int))
    assert not found[1].any()  # the body was not declared
    np.testing.assert_array_equal(masks(path, image, segments={"GTV": 2, "PTV": 1})[0], box(2, 3, 4, 5))
    void = masks(path, image, segments={"PTV": "void", "GTV": 1})
    assert sorted(np.unique(void)) == [0, 1, 65535]
    assert refused(path, image).startswith("expected one structure, found 3 structures: 'PTV', 'GTV', 'Body'")
    assert refused(path, image, segments={"CTV": 1}).startswith("expected one of the declared segments 'CTV', found")
    named = refused(path, image, classes=("background", "GTV", "PTV", "body"))
    assert "1 pixel of one slice in both 'PTV' and 'GTV'" in named


def test_points_beside_areas_are_passed_over_unless_they_are_asked_for(scan):
    image, _, place = scan
    path = rtstruct(place / "a.dcm", {"GTV": [(contour(BOX, 0), "")], "iso": [(contour(BOX, 0)[:3], "")]})
    from pydicom import dcmread

    data = dcmread(path)
    data.ROIContourSequence[1].ContourSequence[0].ContourGeometricType = "POINT"
    data.save_as(path)
    np.testing.assert_array_equal(masks(path, image)[0], box(2, 3, 4, 5))
    assert refused(path, image, segments={"iso": 1}).startswith("expected closed contours of 'iso', found 'POINT'")


def test_contours_between_slices_are_named(scan):
    image, uids, place = scan
    path = rtstruct(place / "a.dcm", {"GTV": [(contour(BOX, 0), ""), (contour(BOX, 1.5), "")]})
    message = refused(path, image)
    assert message.startswith("expected contours of 'GTV' on slices of ct, found a contour 1 mm away from the nearest")
    assert message.endswith("around (-7.0, -18.5, 8.0) mm")
    wrong = rtstruct(place / "b.dcm", {"GTV": [(contour(BOX, 1), uids[2])]})  # the reference and the place differ
    assert "a contour 2 mm away" in refused(wrong, image)
    beyond = rtstruct(place / "c.dcm", {"GTV": [(contour(BOX, 7), "")]})
    assert "a contour 10 mm away" in refused(beyond, image)
    near = rtstruct(place / "d.dcm", {"GTV": [(contour(BOX, 1.04), "")]})  # rounded positions
    assert masks(near, image)[1].any()


def test_another_frame_of_reference(scan):
    image, uids, place = scan
    path = rtstruct(place / "a.dcm", {"GTV": [(contour(BOX, 0), "")]}, reference="7.7")
    assert refused(path, image) == "expected 'GTV' on slices of ct, found another frame of reference"
    path = rtstruct(place / "b.dcm", {"GTV": [(contour(BOX, 0), uids[0])]}, reference="7.7")
    assert masks(path, image)[0].any()  # the slices are named


@pytest.mark.parametrize("orientation", [(0, 1, 0, 0, 0, -1), (0.8, 0.6, 0, 0, 0, -1), (1, 0, 0, 0, 0.6, 0.8)])
def test_oblique_slices(tmp_path, orientation):
    folder = series(tmp_path / "ct", VOLUME, orientation)
    slices = sorted_slices(folder)
    across, down = np.array(orientation, float).reshape(2, 3)
    corner = np.array(slices[1].ImagePositionPatient, float)
    points = np.array([corner + r * 0.5 * down + c * 0.75 * across for r, c in BOX])
    found = masks(rtstruct(tmp_path / "a.dcm", {"GTV": [(points, "")]}), open_source(folder))
    np.testing.assert_array_equal(found[1], box(2, 3, 4, 5))
    assert not found[[0, 2]].any()


def test_frames_of_one_file_and_nifti(scan):
    _, _, place = scan
    path = rtstruct(place / "a.dcm", {"GTV": [(contour(BOX, 2), "")]})
    image = open_source(enhanced(place / "e.dcm", VOLUME, (2, 0, 1)))
    found = masks(path, image)
    np.testing.assert_array_equal(found[0], box(2, 3, 4, 5))  # the first frame is the last slice
    assert not found[1:].any()
    import nibabel

    affine = np.array([[-0.75, 0, 0, 10], [0, -0.5, 0, 20], [0, 0, 2, 5], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(VOLUME.transpose(2, 1, 0), affine), place / "n.nii")
    nifti = open_source(place / "n.nii")
    found = masks(path, nifti)
    assert found.sum() == 9
    assert nifti.affine is not None
    row, column = np.argwhere(found[2]).mean(0)
    centre = nifti.affine @ [2, row, column, 1]
    np.testing.assert_allclose(centre[:3], [-1, -1, 1] * contour([(3, 4)], 2)[0], atol=1e-5)


def test_images_without_a_place(scan):
    _, _, place = scan
    path = rtstruct(place / "a.dcm", {"GTV": [(contour(BOX, 2), "")]})
    message = refused(path, None)
    assert message == "expected an image in DICOM or NIfTI beside a RTSTRUCT, found another format, or none"
    bare = open_source(series(place / "bare", VOLUME[:1], FrameOfReferenceUID=None))
    assert refused(path, bare) == "expected positions in space in its image bare, found none"


def test_files_beyond_the_limits(scan, monkeypatch):
    image, _, place = scan
    path = rtstruct(place / "a.dcm", {"GTV": [(contour(BOX, 0), "")] * 3 + [(contour(HOLE, 1), "")]})
    monkeypatch.setattr(module, "_CONTOURS", 3)
    assert refused(path, image) == "expected at most 3 contours, found more"
    monkeypatch.setattr(module, "_CONTOURS", 4)
    monkeypatch.setattr(module, "_POINTS", 7)
    assert refused(path, image) == "expected at most 7 points of contours, found 8"
    monkeypatch.setattr(module, "_POINTS", 8)
    monkeypatch.setattr(module, "_CROSSINGS", 5)
    assert refused(path, image) == "expected contours that cross at most 5 rows, found more"
    monkeypatch.setattr(module, "_BYTES", 100)
    assert refused(path, image).startswith("expected at most 100 bytes, found")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (["1", "2", "3", "4", "5", "6"], "found 6 numbers"),
        (["1"] * 10, "found 10 numbers"),
        (["nan"] * 9, "found 9 numbers or nan"),
        (["x"] * 9, "found damage"),
        ([], "found 0 numbers"),
    ],
)
def test_contours_that_are_none(scan, data, said):
    from pydicom import dcmread
    from pydicom.dataelem import RawDataElement
    from pydicom.tag import Tag

    image, _, place = scan
    path = rtstruct(place / "a.dcm", {"GTV": [(contour(BOX, 0), "")]})
    whole, text = dcmread(path), "\\".join(data).encode()
    item = whole.ROIContourSequence[0].ContourSequence[0]
    item._dict[Tag("ContourData")] = RawDataElement(Tag("ContourData"), "DS", len(text), text, 0, False, True)
    whole.save_as(path)
    assert said in refused(path, image)

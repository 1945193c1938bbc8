"""Images to predict: files, folders and DICOM series with their names, arrays from memory, and their pixels."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.errors import DataError
from ambiseg._util.text import count, some
from ambiseg._util.walking import walk
from ambiseg.data.case import Extra
from ambiseg.data.sets.folder.layout import hidden
from ambiseg.data.sets.street.labelled import read_extra
from ambiseg.io.errors import FileError
from ambiseg.io.formats import FORMATS, UNREAD, format_of, stem_of, suffix_of
from ambiseg.io.source import Source

SAMPLE = "sample"  # the image that comes with the package
_CITYSCAPES = "_leftImg8bit"  # ends the names of its frames, not those of predictions of them


class Input(NamedTuple):
    """One image to predict; its results go into a folder of its name."""

    name: str
    path: Path


def find_inputs(
    paths: Sequence[str | os.PathLike[str]], dicom: str = "series", skip: str | os.PathLike[str] | None = None
) -> list[Input]:
    """Every image in ``paths``, folders with all that is below them.

    A file is named by its stem, one inside of a given folder by its path from there. Where two would share a name they
    keep their suffix, and where that is not enough the name of their folder as well. ``sample`` is the image that
    comes with the package, unless something in the present folder has that name.

    Args:
        dicom: the DICOM files of a folder are the slices of one ``"series"``, or separate ``"files"``.
        skip: a folder that is left out, because it holds earlier results.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("a.png", "a.tif", "notes.txt", "b/c.nii.gz"):
    ...     (folder / name).parent.mkdir(exist_ok=True)
    ...     _ = (folder / name).write_bytes(b"")
    >>> [one.name for one in find_inputs([folder])]
    ['a.png', 'a.tif', 'b/c']
    """
    found: dict[str, tuple[Path, Path]] = {}  # real path -> path, and the folder that its name counts from
    for given in map(_sample, paths):
        if not given.exists():
            raise FileError.of("E001", given, "expected an image or a folder of images, found nothing of that name")
        top = Path(os.path.abspath(given))
        inside = list(_walk(given, dicom, skip)) if given.is_dir() else [given]
        if not inside:
            held = some(sorted(p.name for p in given.iterdir())) or "an empty folder"
            raise FileError.of("E003", given, f"expected images ({' '.join(FORMATS)}), found {held}")
        for path in inside:
            found.setdefault(os.path.realpath(path), (path, top.parent if path == given else top))
    return [Input(name, path) for name, (path, _) in zip(_names(found.values()), found.values(), strict=True)]


def _sample(given: str | os.PathLike[str]) -> Path:
    if os.fspath(given) == SAMPLE and not Path(SAMPLE).exists():
        return Path(str(resources.files("ambiseg") / "assets" / f"{SAMPLE}.tif"))
    return Path(given)


def _walk(top: Path, dicom: str, skip: str | os.PathLike[str] | None) -> Iterator[Path]:
    if (top / "images").is_dir() and (top / "masks").is_dir():
        raise FileError.of("E003", top, f"expected images alone, found masks/ as well; name {top / 'images'} instead")
    been = set() if skip is None else {os.path.realpath(skip)}
    for folder, files in walk(top, hidden, _refuse, been=been):
        kinds = {path: format_of(path) for path in (folder / name for name in files)}
        series = dicom == "series" and "DICOM" in kinds.values()
        if series:
            yield folder
        for path, kind in kinds.items():  # formats that cannot be read as well: opening them reports it
            if (kind or suffix_of(path) in UNREAD) and not (series and kind == "DICOM"):
                yield path


def _refuse(error: OSError) -> None:
    """For ``os.walk``, which would leave out folders that may not be read."""
    message = f"expected a folder that may be read, found: {error.strerror}"
    raise FileError.of("E201", str(error.filename), message, "change the folder's permissions")


def _names(pairs: Iterable[tuple[Path, Path]]) -> list[str]:
    """The shortest names that are unique, also on file systems that ignore case."""
    choices = []
    for path, top in pairs:
        whole = Path(os.path.abspath(path))
        inside = whole.relative_to(top).parent
        stem = whole.name if path.is_dir() else stem_of(whole)
        forms = (inside / stem).as_posix(), (inside / whole.name).as_posix(), "/".join(whole.parts[-2:])
        choices.append([unicodedata.normalize("NFC", form).lstrip("./") or "image" for form in forms])
    names = [choice[0] for choice in choices]
    for longer in (1, 2):
        for i in _clashing(names):
            names[i] = choices[i][longer]
    for number, i in enumerate(_clashing(names), 1):  # the same folder and file name in two places
        names[i] += f"-{number}"
    return names


def _clashing(names: list[str]) -> list[int]:
    """Names that another image has too, or that are the folder of another."""
    folded = [name.casefold() for name in names]
    times = Counter(folded)
    above = {parent.as_posix() for name in folded for parent in Path(name).parents}
    return [i for i, name in enumerate(folded) if times[name] > 1 or name in above]


def array_source(array: np.ndarray | Tensor, name: str) -> Source:
    """An image ``[H, W]`` or ``[C, H, W]`` or a volume ``[D, C, H, W]`` from memory, as if it were a file.

    >>> array_source(np.zeros((5, 1, 4, 6)), "a").form
    '5 slices of 4×6'
    """
    pixels = array.detach().cpu().numpy() if isinstance(array, Tensor) else array
    if pixels.ndim not in (2, 3, 4) or pixels.dtype.kind not in "buif" or 0 in pixels.shape:
        found = f"{pixels.dtype} {list(pixels.shape)}"
        raise DataError(f"{name}: expected an array of numbers [H, W], [C, H, W] or [D, C, H, W], found {found}")
    slices, channels, height, width = (1, 1, *pixels.shape)[-4:]
    read = pixels.reshape(slices, channels, height, width).__getitem__
    return Source(Path(name), "array", slices, (height, width), channels, pixels.dtype, read)


def with_extra(source: Source, folder: Path, extra: Extra) -> Source:
    """The image with another model's prediction of it as further channels.

    The prediction is the file of the image's stem in ``folder``, or below it; of a frame of Cityscapes, the one that
    starts with city, sequence and number.
    """
    if not folder.is_dir():
        raise DataError(f"extra: expected a folder of another model's predictions, found {folder}")
    if source.slices > 1:
        raise DataError(f"{source.path}: expected one image beside its prediction, found {source.form}")
    stem = stem_of(source.path)
    name = stem.removesuffix(_CITYSCAPES)
    files = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in (".png", ".npy", ".tif", ".tiff")]
    found = [path for path in files if path.stem in (stem, name) or (name != stem and path.stem.startswith(f"{name}_"))]
    if len(found) != 1:
        names = some([path.name for path in found]) or "none"
        raise DataError(f"{source.path}: expected one file {name}.png or .npy in {folder}, found {names}")

    def read(k: int) -> np.ndarray:
        image = source.read(k)
        return np.concatenate([image, read_extra(found[0], extra, source.size).astype(image.dtype, copy=False)])

    return replace(source, channels=source.channels + extra.classes, read=read)


def windowed_back(raw: np.ndarray, window: tuple[float, float], source: Source) -> np.ndarray:
    """Values of a picture for the screen as they were before: 0 was ``low``, and the largest number ``high``."""
    if raw.dtype not in (np.uint8, np.uint16):
        message = f"expected an image of 8 or 16 bits for assume_window, found {raw.dtype}"
        raise DataError(f"{source.path}: {message}, whose values are taken as they are without it")
    low, high = window
    return low + raw.astype(np.float32) * ((high - low) / np.iinfo(raw.dtype).max)


def read_pixels(
    source: Source, k: int, channels: int, convert: bool, window: tuple[float, float] | None = None
) -> Tensor:
    """Slice ``k`` in its own units, ``[1, channels, H, W]`` float32.

    Args:
        channels: that the model was trained on.
        convert: repeat a grey image in three channels, and take one of three equal ones.
        window: see ``Options.assume_window``.
    """
    raw = source.read(k)
    way = len(raw), channels
    if convert and way == (1, 3):
        raw = raw.repeat(3, 0)
    elif convert and way == (3, 1) and (raw == raw[0]).all():
        raw = raw[:1]
    if len(raw) != channels:
        ways = {(1, 3): "grey as colour", (3, 1): "three equal channels as one"}
        hint = f"; convert=True reads {ways[way]}" if way in ways and not convert else ""
        expected = f"expected {count(channels, 'channel')}, as the model was trained on"
        raise DataError(
            f"{source.path}: {expected}, found {source.channels}{hint}"
        )  # the fix of E308 is about data sets
    if raw.dtype.kind == "f" and (wrong := int((~np.isfinite(raw)).sum())):
        message = f"expected finite values, found {count(wrong, 'value')} nan or infinite"
        raise FileError.of("E206", source.path, message)
    if window is not None:
        raw = windowed_back(raw, window, source)
    return torch.from_numpy(np.array(raw, np.float32))[None]

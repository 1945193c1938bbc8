"""Segments of DICOM SEG and structures of RTSTRUCT as class ids: which of them count, and what they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ambiseg._util.text import count, some
from ambiseg.io.errors import FileError
from ambiseg.io.planes import Planes, from_affine
from ambiseg.io.source import ReadOptions, Source

VOID_ID = 65535  # in a mask of class ids: a pixel that counts nowhere
_SHOWN = 8  # names in a message


@dataclass(frozen=True, eq=False)
class Chosen:
    """The segments of a file that count.

    Args:
        path: of the file.
        names: by the segment's number.
        rank: by its number: 1, 2 …; where two overlap, the higher one is drawn over the other.
        ids: class id of each rank; 0 for rank 0, which is background.
        ordered: the ranks were declared. If not, different classes must not overlap.
    """

    path: Path
    names: Mapping[int, str]
    rank: Mapping[int, int]
    ids: np.ndarray
    ordered: bool

    @property
    def dtype(self) -> np.dtype:
        """Of masks: bool where there is one class, which is 0 and 1 under every convention."""
        return np.dtype(np.bool_) if self.ids.max() <= 1 else self.ids.dtype

    @property
    def ranks(self) -> np.dtype:
        """A type for maps of ranks."""
        return np.min_scalar_type(len(self.ids))

    def paint(self, plane: np.ndarray, mask: np.ndarray, number: int) -> None:
        """Draw one segment ``mask`` ``[H, W]`` into the ranks of a slice."""
        rank = self.rank[number]
        if not self.ordered and (both := mask & (self.ids[plane] != self.ids[rank]) & (plane > 0)).any():
            other = self._named(int(plane[both][0]))
            message = f"expected segments apart from each other, found {count(int(both.sum()), 'pixel')} of one slice"
            raise FileError.of("E314", self.path, f"{message} in both {other!r} and {self.names[number]!r}")
        np.maximum(plane, rank, where=mask, out=plane)

    def _named(self, rank: int) -> str:
        return next(self.names[number] for number, other in self.rank.items() if other == rank)

    def classes(self, plane: np.ndarray) -> np.ndarray:
        """Ranks of a slice ``[H, W]`` as a mask ``[1, H, W]``."""
        return self.ids[plane][None].astype(self.dtype)


def choose(path: Path, what: str, found: Mapping[int, str], options: ReadOptions) -> Chosen:
    """Which segments of a file are read, and the class of each.

    Those that ``segments`` declares, by name or number, in its order; else those that bear the names of classes; else,
    of two classes, the only one there is.

    Args:
        what: a segment, as users know it: ``"segment"`` or ``"structure"``.
        found: the name of each segment by its number.

    >>> chosen = choose(Path("a.dcm"), "segment", {1: "GTV", 2: "PTV"}, ReadOptions(segments={"ptv": 1, "GTV": 2}))
    >>> chosen.rank, chosen.ids.tolist()
    ({1: 2, 2: 1}, [0, 1, 2])
    """
    shown = some([repr(name) for name in found.values()], _SHOWN) or "none"
    if not found:
        raise FileError.of("E313", path, f"expected at least one {what}, found none")
    classes = options.classes or ()
    if options.segments is not None:
        keys, targets = list(options.segments), list(options.segments.values())
        rank = {number: at for number, name in found.items() if (at := _place(number, name, keys))}
        if not rank:
            expected = f"expected one of the declared segments {some([repr(key) for key in keys], _SHOWN)}"
            raise FileError.of("E313", path, f"{expected}, found {shown}")
        ids = [0, *(VOID_ID if isinstance(target, str) else target for target in targets)]
        return Chosen(path, found, rank, _small(ids), True)
    if len(found) == 1 and len(classes) <= 2:
        return Chosen(path, found, dict.fromkeys(found, 1), _small([0, 1]), False)
    names = [name.casefold().strip() for name in classes]
    unknown = [name for name in found.values() if name.casefold().strip() not in names]
    table = ", ".join(f'"{name}": {i}' for i, name in enumerate(dict.fromkeys(found.values()), 1))
    if unknown:
        wanted = f"{what}s named as the classes ({some(list(classes), _SHOWN)})" if len(classes) > 2 else f"one {what}"
        message = f"expected {wanted}, found {count(len(found), what)}: {shown}"
        raise FileError.of("E313", path, message, f'declare what each is: "segments": {{{table}}}')
    ranks = {number: i for i, number in enumerate(found, 1)}
    return Chosen(path, found, ranks, _small([0, *(names.index(n.casefold().strip()) for n in found.values())]), False)


def _place(number: int, name: str, keys: Sequence[str]) -> int:
    """From 1, the declared key that a segment fits: its name, then its name in other capitals, then its number."""
    folded = [key.casefold().strip() for key in keys]
    for mine, theirs in ((name, list(keys)), (name.casefold().strip(), folded), (str(number), list(keys))):
        if mine in theirs:
            return theirs.index(mine) + 1
    return 0


def _small(ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, np.min_scalar_type(max(ids)))


def planes_of(path: Path, what: str, image: Source | None, placed: bool = False) -> Planes:
    """The slices that a file without a grid of its own is drawn on.

    Args:
        placed: their positions must be known.
    """
    if image is None:
        message = f"expected an image in DICOM or NIfTI beside a {what}, found another format, or none"
        raise FileError.of("E302", path, message, "put the series that it was drawn on into images/")
    planes = image.planes
    if planes is None and image.affine is not None:
        planes = from_affine(image.affine, image.slices, image.size)
    if planes is None or (placed and not planes.placed):
        message = f"expected positions in space in its image {image.path.name}, found none"
        raise FileError.of("E302", path, message, "export the mask as label maps of the image's size")
    return planes


def mask_source(path: Path, image: Source, chosen: Chosen, read: Callable[[int], np.ndarray]) -> Source:
    """The mask as an opened file on the grid of its image."""
    dtype = chosen.dtype
    return Source(path, "DICOM", image.slices, image.size, 1, dtype, read, image.affine, planes=image.planes, ids=True)

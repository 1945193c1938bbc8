"""Where the slices of an image lie in the patient, and which DICOM instance each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_TOLERANCE = 0.1  # of a pixel, or of the step between slices: files round positions
_RAS = np.array([-1.0, -1.0, 1.0])  # NIfTI counts millimetres to the right and front, DICOM to the left and back


class Turn(NamedTuple):
    """How a grid becomes the one of an image: exchange its axes, then reverse rows, then columns."""

    transposed: bool
    rows: bool
    columns: bool

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        turned = pixels.T if self.transposed else pixels
        return turned[:: -1 if self.rows else 1, :: -1 if self.columns else 1]


_TURNS = [Turn(*map(bool, (k & 4, k & 2, k & 1))) for k in range(8)]


@dataclass(frozen=True, eq=False)
class Planes:
    """The slices of an image in the patient: pixel (r, c) of slice k has its centre at ``corner[k] + r down[k] + c
    across[k]``, in millimetres to the left, back and up, as in DICOM.

    Args:
        size: height and width of a slice.
        corner, down, across: ``[D, 3]``; no rows if positions are not known.
        thickness: of a slice, in millimetres; 0 if it is not known.
        files, instances, frames: of each slice its file, its SOPInstanceUID and its number among the frames of that
            file (from 1; 0 if there is one alone). Empty for other formats than DICOM.
        reference: UID of the frame of reference; ``""`` if there is none.

    >>> grid = Planes((4, 6), *(np.array([[0.0, 0, z] for z in (0, 5)]), np.array([[0, 1.0, 0]] * 2),
    ...               np.array([[1.0, 0, 0]] * 2)))
    >>> grid.find(np.array([5.0, 0, 5]), np.array([0, 1.0, 0]), np.array([-1.0, 0, 0]), (4, 6))
    (1, Turn(transposed=False, rows=False, columns=True))
    """

    size: tuple[int, int]
    corner: np.ndarray
    down: np.ndarray
    across: np.ndarray
    thickness: float = 0.0
    files: tuple[Path, ...] = ()
    instances: tuple[str, ...] = ()
    frames: tuple[int, ...] = ()
    reference: str = ""

    @property
    def placed(self) -> bool:
        """Whether positions are known."""
        return len(self.corner) > 0

    @property
    def step(self) -> float:
        """Millimetres between slices; of one slice, its thickness."""
        if len(self.corner) < 2:
            return self.thickness or float(np.linalg.norm(self.down[0]))
        places: np.ndarray = np.sort(self.corner @ self.normals[0])  # frames may lie in any order
        return float(np.median(places[1:] - places[:-1]))

    @property
    def normals(self) -> np.ndarray:
        """``[D, 3]`` unit vectors across the slices."""
        crossed = np.cross(self.across, self.down)
        return crossed / np.linalg.norm(crossed, axis=1, keepdims=True)

    def named(self, instance: str, frame: int = 0) -> list[int]:
        """The slices of an instance, or of one of its frames."""
        both = zip(self.instances, self.frames, strict=True)
        return [k for k, (name, number) in enumerate(both) if name == instance and frame in (0, number or 1)]

    def find(
        self, corner: np.ndarray, down: np.ndarray, across: np.ndarray, size: tuple[int, int]
    ) -> tuple[int, Turn] | None:
        """The slice on whose pixels a grid lies, and how it is turned; ``None`` if there is none."""
        pixel = min(np.linalg.norm(self.down[0]), np.linalg.norm(self.across[0]))
        for turn in _TURNS:
            start, rows, columns = corner, *((across, down) if turn.transposed else (down, across))
            height, width = size[::-1] if turn.transposed else size
            if (height, width) != self.size:
                continue
            if turn.rows:
                start, rows = start + (height - 1) * rows, -rows
            if turn.columns:
                start, columns = start + (width - 1) * columns, -columns
            away = np.linalg.norm(self.corner - start, axis=1)
            away += np.linalg.norm(self.down - rows, axis=1) * (height - 1)
            away += np.linalg.norm(self.across - columns, axis=1) * (width - 1)
            if away[k := int(away.argmin())] <= _TOLERANCE * pixel:
                return k, turn
        return None

    def beside(self, points: np.ndarray, among: Sequence[int]) -> tuple[int, float]:
        """The one of some slices that points ``[N, 3]`` are nearest to, and how far the farthest of them is from it."""
        away = np.abs(np.einsum("knj,kj->kn", points[None] - self.corner[among, None], self.normals[among])).max(1)
        return among[k := int(away.argmin())], float(away[k])

    def on_slice(self, distance: float) -> bool:
        """Whether a distance from a slice is no more than rounding makes."""
        return distance <= _TOLERANCE * self.step

    def pixels(self, points: np.ndarray, k: int) -> np.ndarray:
        """Points ``[N, 3]`` as ``[N, 2]`` (row, column) of slice ``k``; the centre of the first pixel is (0, 0)."""
        axes = np.stack([self.down[k], self.across[k]])
        return (points - self.corner[k]) @ (axes / (axes**2).sum(1, keepdims=True)).T


def from_affine(affine: np.ndarray, slices: int, size: tuple[int, int]) -> Planes:
    """The planes of a volume with an affine from (slice, row, column) to millimetres right, front and up.

    >>> from_affine(np.diag([2.0, 1, 1, 1]), 2, (4, 6)).corner[1].tolist()
    [-2.0, -0.0, 0.0]
    """
    across_slices, down, across, origin = (affine[:3, axis] * _RAS for axis in range(4))
    corner = origin + np.arange(slices)[:, None] * across_slices
    alike = np.ones((slices, 1))
    thickness = float(np.linalg.norm(across_slices))
    return Planes(size, corner, alike * down, alike * across, thickness)


def from_headers(headers: Sequence[Any], frames: int) -> Planes:
    """Of the sorted files of a series, or of the frames of one file, by their headers."""
    first = headers[0]
    slices = [(header, 0) for header in headers] if len(headers) > 1 else [(first, k) for k in range(frames)]
    found = []
    with suppress(ValueError, TypeError, IndexError, AttributeError):  # positions that are damaged are not known
        found = [_placed(header, k, frames) for header, k in slices]
    found = found if all(one is not None for one in found) and np.isfinite(np.array(found, float)).all() else []
    corner, down, across = np.array(found, float).reshape(-1, 3, 3).swapaxes(0, 1)
    thickness = 0.0
    with suppress(ValueError, TypeError):
        thickness = float(_value(first, 0, "PixelMeasuresSequence", "SliceThickness") or 0)
    instances = tuple(str(header.get("SOPInstanceUID", "")) for header, _ in slices)
    numbers = tuple(k + 1 if frames > 1 else 0 for _, k in slices)
    reference = str(first.get("FrameOfReferenceUID") or "")
    files = tuple(Path(header.filename) for header, _ in slices)
    size = int(first.Rows), int(first.Columns)
    return Planes(size, corner, down, across, thickness, files, instances, numbers, reference)


def _value(header: Any, frame: int, sequence: str, name: str) -> Any:
    """An attribute of a frame: in its own group, in the one that all frames share, or in the header itself."""
    own, shared = (header.get(f"{kind}FunctionalGroupsSequence") or [] for kind in ("PerFrame", "Shared"))
    for group in (*own[frame : frame + 1], *shared[:1]):
        for item in group.get(sequence) or []:
            if item.get(name) is not None:
                return item.get(name)
    return header.get(name)


def _placed(header: Any, frame: int, frames: int) -> np.ndarray | None:
    """``[3, 3]``: corner, step from row to row, step from column to column; ``None`` if the file does not say."""
    grouped = bool(header.get("PerFrameFunctionalGroupsSequence"))
    names = (("PlanePosition", "ImagePositionPatient"), ("PlaneOrientation", "ImageOrientationPatient"))
    found = [_value(header, frame, f"{sequence}Sequence", name) for sequence, name in names]
    spacing = _value(header, frame, "PixelMeasuresSequence", "PixelSpacing")
    if spacing is None or any(one is None for one in found) or (frames > 1 and not grouped):
        return None
    corner, (across, down) = np.array(found[0], float), np.array(found[1], float).reshape(2, 3)
    between_rows, between_columns = map(float, spacing)
    if min(between_rows, between_columns) <= 0 or not np.linalg.norm(np.cross(across, down)) > 0.5:
        return None
    return np.stack([corner, down * between_rows, across * between_columns])


def frame_planes(header: Any, frame: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Corner and steps of one frame of a segmentation; ``None`` if it does not say."""
    found = _placed(header, frame, 1)
    return None if found is None else (found[0], found[1], found[2])

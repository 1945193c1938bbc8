"""DICOM SEG as the mask of one reader: BINARY, FRACTIONAL and LABELMAP, placed on the slices of its image."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ambiseg._util.text import shape_text
from ambiseg.io.dicom_files import DECODE, judge_boxes, read_header
from ambiseg.io.errors import FileError
from ambiseg.io.planes import Planes, Turn, frame_planes
from ambiseg.io.rois import Chosen, choose, mask_source, planes_of
from ambiseg.io.source import ReadOptions, Source, decoding_at_most, guard, judge

_TAGS: list[Any] = [
    *("SpecificCharacterSet", "Modality", "Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "BitsAllocated"),
    *("BitsStored", "PixelRepresentation", "PhotometricInterpretation", "SegmentationType", "MaximumFractionalValue"),
    *("SegmentSequence", "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence", "FrameOfReferenceUID"),
    *("TotalPixelMatrixRows", "PixelSpacing", "ImageOrientationPatient", "ImagePositionPatient"),
]
_HEADER = 48 << 20  # bytes of a header: a frame takes half a kilobyte of it
_FRAMES, _SEGMENTS = 1 << 16, 1 << 12
_KINDS = ("BINARY", "FRACTIONAL", "LABELMAP")


class _Frame(NamedTuple):
    """Where one frame belongs."""

    number: int  # in the file, from 0
    segment: int  # 0 in a label map, which holds many
    slice: int
    turn: Turn


def open_seg(path: Path, options: ReadOptions) -> Source:
    """The segments of one file as class ids, on the grid of ``options.image``.

    A frame lies on the slice that it was derived from, by the UID of that instance, or else on the one at its place in
    space. A fraction counts from one half of the largest on.
    """
    with guard(path):
        header = read_header(path, _TAGS, _HEADER)
        kind, size, frames = _judged(path, header)
        planes = planes_of(path, "SEG", options.image)
        assert options.image is not None
        chosen = choose(path, "segment", _segments(path, header), options)
        judge(path, options.image.size, options.image.slices, 1, chosen.ranks)
        placed = _placed(path, header, frames, size, planes, options.image, chosen if kind != "LABELMAP" else None)

    @cache
    def ranks() -> np.ndarray:
        assert options.image is not None
        volume = np.zeros((options.image.slices, *options.image.size), chosen.ranks)
        least = max(1, math.ceil(int(header.MaximumFractionalValue) / 2)) if kind == "FRACTIONAL" else 1
        wanted = {frame.number: frame for frame in placed}
        for number, pixels in zip(sorted(wanted), _decoded(path, header, sorted(wanted)), strict=True):
            frame = wanted[number]
            turned = frame.turn(pixels)
            if kind != "LABELMAP":
                chosen.paint(volume[frame.slice], turned >= least, frame.segment)
                continue
            for segment in np.unique(turned).tolist():
                _known(path, segment, {0: "", **chosen.names})
                if segment in chosen.rank:
                    chosen.paint(volume[frame.slice], turned == segment, segment)
        return volume

    return mask_source(path, options.image, chosen, lambda k: chosen.classes(ranks()[k]))


def _judged(path: Path, header: Any) -> tuple[str, tuple[int, int], int]:
    """Kind, size and number of frames, which are there and within the limits."""
    kind = str(header.get("SegmentationType", ""))
    if kind not in _KINDS:
        raise FileError.of("E201", path, f"expected a SEG that is {' or '.join(_KINDS)}, found {kind[:40]!r}")
    if "TotalPixelMatrixRows" in header:
        fix = "export it as a label map of its image's size"
        raise FileError.of("E105", path, "expected a SEG of slices, found one of the tiles of a slide", fix)
    numbers = {}
    for name, most in (("Rows", 1 << 16), ("Columns", 1 << 16), ("NumberOfFrames", 1 << 31)):
        value = header.get(name)
        if not isinstance(value, int) or not 0 < value < most:  # IS is an int
            raise FileError.of("E201", path, f"expected DICOM with {name}, found {str(value)[:40]!r}")
        numbers[name] = int(value)
    bits, frames = header.get("BitsAllocated"), numbers["NumberOfFrames"]
    if bits not in ((1, 8) if kind == "BINARY" else (8,) if kind == "FRACTIONAL" else (8, 16)):
        raise FileError.of("E201", path, f"expected bits of a {kind} SEG, found BitsAllocated {str(bits)[:40]!r}")
    if kind == "FRACTIONAL" and not 0 < int(header.get("MaximumFractionalValue") or 0) < 256:
        raise FileError.of("E201", path, "expected MaximumFractionalValue of 1 to 255, found another or none")
    if int(header.get("SamplesPerPixel", 1)) != 1:
        raise FileError.of("E201", path, "expected one value per pixel, found several")
    size = numbers["Rows"], numbers["Columns"]
    judge(path, size, frames, 1, np.dtype(f"u{max(bits // 8, 1)}"))
    if frames > _FRAMES:
        raise FileError.of("E210", path, f"expected at most {_FRAMES:,} frames, found {frames:,}")
    syntax = getattr(header, "file_meta", {}).get("TransferSyntaxUID")
    needed = size[0] * size[1] * frames * bits // 8
    if (syntax is None or not syntax.is_encapsulated) and needed > (there := path.stat().st_size):
        found = f"found {there:,}: the file ends too early"
        raise FileError.of("E201", path, f"expected DICOM of more than {needed:,} bytes, {found}")
    return kind, size, frames


def _segments(path: Path, header: Any) -> dict[int, str]:
    """The label of each segment by its number; 0 is the background of a label map."""
    items = header.get("SegmentSequence") or []
    if len(items) > _SEGMENTS:
        raise FileError.of("E210", path, f"expected at most {_SEGMENTS:,} segments, found {len(items):,}")
    found = {int(item.SegmentNumber): str(item.get("SegmentLabel") or item.SegmentNumber) for item in items}
    return {number: name for number, name in found.items() if number > 0}


def _placed(
    path: Path, header: Any, frames: int, size: tuple[int, int], planes: Planes, image: Source, chosen: Chosen | None
) -> list[_Frame]:
    """The frames that hold chosen segments, with their slices."""
    groups = header.get("PerFrameFunctionalGroupsSequence") or []
    if len(groups) != frames:
        raise FileError.of(
            "E201", path, f"expected a group of attributes for each of {frames} frames, found {len(groups)}"
        )
    shared: Any = (header.get("SharedFunctionalGroupsSequence") or [{}])[0]
    slices = {name: planes.named(name) for name in set(planes.instances)}
    mine = str(header.get("FrameOfReferenceUID") or "")
    same = not (mine and planes.reference) or mine == planes.reference
    found: list[_Frame] = []
    for number, group in enumerate(groups):
        segment = 0
        if chosen is not None:
            items = group.get("SegmentIdentificationSequence") or shared.get("SegmentIdentificationSequence")
            if not items:
                raise FileError.of("E201", path, f"expected the segment of frame {number + 1}, found none")
            segment = int(items[0].ReferencedSegmentNumber)
            _known(path, segment, chosen.names)
            if segment not in chosen.rank:
                continue
        named = _sources(group, shared, slices, planes)
        place = frame_planes(header, number) if planes.placed and (same or named) else None
        at, turn = named[0] if len(named) == 1 else None, Turn(False, False, False)
        if place is not None:
            where = planes.find(*place, size)
            if where is None or (named and where[0] not in named):
                raise _off(path, number, size, planes, image, bool(named))
            at, turn = where
        if at is None:
            known = "another frame of reference" if not same else "no reference to its slices and no position"
            message = f"expected frame {number + 1} on a slice of {image.path.name}, found {known}"
            raise FileError.of("E302", path, message, "give the mask of this image, or the image of this mask")
        if size != planes.size and turn == Turn(False, False, False):
            raise _off(path, number, size, planes, image, bool(named))
        found.append(_Frame(number, segment, at, turn))
    return found


def _known(path: Path, segment: int, names: Mapping[int, str]) -> None:
    if segment not in names:
        raise FileError.of("E201", path, f"expected segments that the file describes, found number {segment}")


def _off(path: Path, number: int, size: tuple[int, int], planes: Planes, image: Source, named: bool) -> FileError:
    if size != planes.size and size != planes.size[::-1]:
        message = f"expected {shape_text(planes.size)} as its image {image.path.name}, found {shape_text(size)}"
        return FileError.of("E301", path, message)
    refers = "which it refers to by UID, found it elsewhere" if named else "found it beside all of them"
    return FileError.of("E302", path, f"expected frame {number + 1} on a slice of {image.path.name}, {refers}")


def _sources(group: Any, shared: Any, slices: dict[str, list[int]], planes: Planes) -> list[int]:
    """The slices that a frame says it was derived from."""
    found: list[int] = []
    for derived in group.get("DerivationImageSequence") or shared.get("DerivationImageSequence") or []:
        for source in derived.get("SourceImageSequence") or []:
            name, frames = str(source.get("ReferencedSOPInstanceUID", "")), source.get("ReferencedFrameNumber")
            if name not in slices:
                continue
            wanted = {int(f) for f in ([frames] if isinstance(frames, int | str) else frames or [])}
            found += [k for k in slices[name] if not wanted or (planes.frames[k] or 1) in wanted]
    return sorted(set(found))


def _decoded(path: Path, header: Any, numbers: Sequence[int]) -> Iterator[np.ndarray]:
    """The pixels ``[H, W]`` of some frames, as stored."""
    from pydicom import dcmread
    from pydicom.encaps import generate_frames
    from pydicom.pixels.utils import iter_pixels
    from pydicom.uid import JPEG2000TransferSyntaxes

    if not numbers:
        return
    rows, columns, frames = int(header.Rows), int(header.Columns), int(header.NumberOfFrames)
    syntax = header.file_meta.get("TransferSyntaxUID")
    if int(header.BitsAllocated) == 1 and not syntax.is_encapsulated:  # frames do not begin at whole bytes
        stored = np.frombuffer(dcmread(path, specific_tags=["PixelData"]).PixelData, np.uint8)
        area = rows * columns
        if len(stored) * 8 < frames * area:
            raise ValueError("the file ends too early")
        for number in numbers:
            start = number * area
            bits = np.unpackbits(stored[start // 8 : -(-(start + area) // 8)], bitorder="little")
            yield bits[start % 8 : start % 8 + area].reshape(rows, columns)
        return
    if syntax in JPEG2000TransferSyntaxes:
        for content in generate_frames(dcmread(path, specific_tags=["PixelData"]).PixelData, number_of_frames=frames):
            judge_boxes(content)
    try:
        with decoding_at_most(rows * columns):
            for pixels in iter_pixels(path, indices=list(numbers)):
                if pixels.shape != (rows, columns):
                    raise ValueError(f"pixels of {shape_text(pixels.shape)} where the header says {rows}×{columns}")
                yield pixels
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and "plugin" not in str(error):
            raise
        message = f"expected a DICOM that can be decoded, found {syntax.name}"
        raise FileError.of("E202", path, message, DECODE) from None

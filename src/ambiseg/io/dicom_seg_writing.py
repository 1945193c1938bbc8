"""Write DICOM SEG, by highdicom: masks and probabilities on the slices of a DICOM image, which they refer to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ambiseg import __version__
from ambiseg._util.errors import DataError
from ambiseg._util.extras import require
from ambiseg._util.limits import OPTION, most_bytes
from ambiseg._util.text import printable
from ambiseg.io.formats import format_of
from ambiseg.io.source import Source, guard
from ambiseg.viz.colours import rgb

_NEEDED = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "SOPClassUID", "Rows", "Columns")
_EMPTY = (  # must be there, but may be empty; programs that remove names often remove the attributes
    *("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID", "StudyDate"),
    *("StudyTime", "ReferringPhysicianName"),
)
_STEPS = 255  # of a probability
_LABEL, _TEXT = 64, 1024  # characters of LO and ST


@dataclass(frozen=True)
class Segment:
    """What is said about one segment.

    Args:
        label: its name, at most 64 characters.
        description: in a sentence.
        class_id, class_name: what its pixels are.
        colour: ``#rrggbb`` that viewers show it in.
        parameters: of the algorithm, such as the probability of the mask.
    """

    label: str
    description: str
    class_id: int
    class_name: str
    colour: str
    parameters: Mapping[str, str] = field(default_factory=dict)


def check_sources(path: Path) -> None:
    """A ``DataError`` if a SEG cannot refer to an image: it is no DICOM, or lacks what identifies it."""
    require("medical")
    first = path
    if path.is_dir():
        first = next((p for p in sorted(path.iterdir()) if p.is_file() and format_of(p) == "DICOM"), path)
    if format_of(first) != "DICOM":
        found = "a folder without any" if path.is_dir() else format_of(path) or path.suffix or "no suffix"
        raise DataError(f"{path}: expected a DICOM file or series for DICOM SEG, found {found}")
    with guard(first):
        _source(first)


def write_seg(
    path: Path,
    source: Source,
    pixels: np.ndarray,
    segments: Sequence[Segment],
    kind: Literal["BINARY", "FRACTIONAL"],
    *,
    title: str,
    number: int,
    algorithm: str,
) -> None:
    """One SEG of all slices of an image.

    Args:
        pixels: ``[D, H, W, S]`` of bool, or of uint8 0 and 1; or probabilities of a ``FRACTIONAL`` one.
        segments: S of them.
        title: of the new series.
        number: of the new series.
        algorithm: its name.
    """
    planes = source.planes
    if planes is None or not planes.files:
        raise DataError(f"{source.path}: expected a DICOM file or series for DICOM SEG, found {source.format}")
    takes = pixels.nbytes + 8 * pixels[..., 0].size
    if takes > most_bytes():
        message = f"expected segments of at most {most_bytes():,} bytes ({OPTION}), found {takes:,}"
        raise DataError(f"{source.path}: {message}; fewer masks take less")
    if kind == "FRACTIONAL":  # as it is stored: what rounds to nothing is no mark
        pixels = np.round(pixels * np.float32(_STEPS)) / np.float32(_STEPS)
    files = list(dict.fromkeys(planes.files))
    if len(files) > 1 and not pixels.any():
        files, pixels = files[:1], pixels[:1]  # of a file without any mark all frames are written
    with guard(source.path):
        sources = [_source(file) for file in files]
        try:
            made = _segmentation(sources, pixels, segments, kind, title, number, algorithm)
        except (DataError, ModuleNotFoundError, MemoryError):
            raise
        except Exception as error:  # highdicom's, about the image
            said = " ".join(str(error).split()).removesuffix(".")[:200]
            found = f"found {type(error).__name__}: {said}"
            raise DataError(f"{source.path}: expected DICOM that a SEG can be made of, {found}") from None
        made.save_as(path)


def _source(file: Path) -> Any:
    """The attributes of an image file, with those that must be there but may be empty."""
    from pydicom import dcmread

    data: Any = dcmread(file, stop_before_pixels=True)
    for name in _NEEDED:
        if not data.get(name):
            raise DataError(f"{file}: expected DICOM with {name}, which a SEG refers to, found none")
    for name in _EMPTY:
        if name not in data:
            setattr(data, name, "")
    if data.PatientSex not in ("M", "F", "O"):
        data.PatientSex = ""
    return data


def _segmentation(
    sources: list[Any],
    pixels: np.ndarray,
    segments: Sequence[Segment],
    kind: str,
    title: str,
    number: int,
    algorithm: str,
) -> Any:
    from highdicom import UID
    from highdicom.seg import Segmentation

    made = Segmentation(
        source_images=sources,
        pixel_array=pixels,
        segmentation_type=kind,
        segment_descriptions=[_described(i, one, algorithm) for i, one in enumerate(segments, 1)],
        series_instance_uid=UID(),
        series_number=number,
        sop_instance_uid=UID(),
        instance_number=1,
        manufacturer="ambiseg",
        manufacturer_model_name=_short(algorithm),
        software_versions=__version__,
        device_serial_number="0",
        fractional_type="PROBABILITY",
        max_fractional_value=_STEPS,
        omit_empty_frames=bool(pixels.any()),  # there must be one
        content_label="AMBISEG",
        content_description=_short(title),
        series_description=_short(title),
        specific_character_set="ISO_IR 192",
    )
    # The scanner's item has the names of the institution and of its staff, which no reader of a SEG needs.
    with suppress(AttributeError):
        made.ContributingEquipmentSequence = made.ContributingEquipmentSequence[-1:]
    if kind == "BINARY":
        _fill_even_bytes(made)
    return made


def _fill_even_bytes(made: Any) -> None:
    """Add frames without a mark until the bits of all frames come to an even number of bytes.

    An odd number is padded with a byte, as the standard says. dcmjs, which OHIF reads with, takes the pad for an error
    and never ends loading. Where every segment has a frame on every slice there is no place for one more.
    """
    pixels, frames = made.Rows * made.Columns, made.PerFrameFunctionalGroupsSequence
    numbers = range(1, len(made.SegmentSequence) + 1)
    places, taken = dict[tuple[int, ...], Any](), set[tuple[int, ...]]()
    for frame in frames:
        index = tuple(np.atleast_1d(frame.FrameContentSequence[0].DimensionIndexValues).tolist())
        places.setdefault(index[1:], frame)  # the first index is that of the segment
        taken.add(index)
    free = [(number, *place) for number in numbers for place in places if (number, *place) not in taken]
    for more in range(len(free) + 1):
        filled = -(-pixels * (len(frames) + more) // 8)
        if filled % 2 == 0:
            break
    else:
        return
    packed = made.PixelData[: -(-pixels * len(frames) // 8)]  # without the pad
    for index in free[:more]:
        frame = deepcopy(places[index[1:]])
        frame.FrameContentSequence[0].DimensionIndexValues = list(index)
        frame.SegmentIdentificationSequence[0].ReferencedSegmentNumber = index[0]
        frames.append(frame)
    made.NumberOfFrames = len(frames)
    made.PixelData = packed.ljust(filled, b"\0")


def _described(number: int, segment: Segment, algorithm: str) -> Any:
    from highdicom import UID, AlgorithmIdentificationSequence
    from highdicom.color import CIELabColor
    from highdicom.seg import SegmentDescription
    from pydicom.sr.coding import Code

    intelligence = Code("123109", "DCM", "Artificial Intelligence")
    region = Code("309825002", "SCT", "Spatial and Relational Concept")
    own = Code(f"class_{segment.class_id}", "99AMBISEG", _short(segment.class_name))
    about = AlgorithmIdentificationSequence(
        _short(algorithm), intelligence, __version__, "ambiseg", dict(segment.parameters) or None
    )
    label = _short(segment.label)
    ids: dict[str, Any] = {"tracking_uid": UID(), "tracking_id": label}
    colour = CIELabColor.from_rgb(*rgb(segment.colour))
    made: Any = SegmentDescription(number, label, region, own, "AUTOMATIC", about, display_color=colour, **ids)
    made.SegmentDescription = printable(segment.description)[:_TEXT]
    return made


def _short(text: str) -> str:
    """Text for an attribute of 64 characters, in which a backslash would part two values.

    >>> _short("a" * 70)[60:], _short("a\\\\b")
    ('aaa…', 'a/b')
    """
    plain = printable(text).replace("\\", "/").strip() or "-"
    return plain if len(plain) <= _LABEL else f"{plain[: _LABEL - 1]}…"

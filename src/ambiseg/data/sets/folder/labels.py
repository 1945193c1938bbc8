"""What the numbers or colours in mask files mean: one convention per data set, from file to class ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ambiseg._util.bands import counted, looked_up
from ambiseg._util.text import count, some
from ambiseg.data.case import ranked
from ambiseg.data.sets.folder.settings import FolderSettings, Target, colour_code, plain_names
from ambiseg.io.errors import FileError

_GREYS = 16  # values beyond these cannot be classes that happen to be at the ends
MOST = 64  # classes that a data set may have without declaring them; soft edges of a drawing make up to 256 values
_NONE = 1 << 16  # in a table of targets: a value that has no meaning
_VOID = _NONE + 1


Numbers = Mapping[int, int] | None  # of one mask: pixels of each number; None for one bit per pixel, which has 0 and 1


class Observed(NamedTuple):
    """What one mask holds: how many pixels have each number, and the rank ``[H, W]`` of each pixel's number."""

    pixels: dict[int, int]  # numbers in order
    ranks: np.ndarray
    bits: bool  # stored with one bit per pixel

    @property
    def numbers(self) -> Numbers:
        return None if self.bits else self.pixels


def observe(mask: np.ndarray, path: Path, colours: bool = False) -> Observed:
    """Look at one mask ``[C, H, W]`` as its file has it; ``colours``: numbers are 24-bit colours.

    Raises ``DataError`` if the mask cannot hold class ids, or is not in colour.
    """
    if colours and (len(mask) != 3 or mask.dtype != np.uint8):
        found = f"{count(len(mask), 'channel')} of {mask.dtype}"
        raise FileError.of("E304", path, f"expected a mask in 8-bit colour, found {found}", "save all masks in colour")
    if colours:
        red, green, blue = mask.astype(np.uint32)
        numbers = red << 16 | green << 8 | blue
    else:
        numbers = _whole(_one_channel(mask, path), path)
    values, ranks = ranked(numbers.reshape(-1))
    pixels = dict(zip(values.tolist(), counted(ranks).tolist(), strict=True))
    return Observed(pixels, ranks.reshape(numbers.shape), numbers.dtype == np.bool_)


@dataclass
class Values:
    """What is in the mask files of a data set: which numbers, and a file that holds each.

    >>> seen = Values()
    >>> seen.add(np.array([[[0, 255]]], np.uint8), Path("a.png"))
    >>> sorted(seen.numbers), seen.bits
    ([0, 255], False)
    """

    numbers: dict[int, Path] = field(default_factory=dict)
    masks: Counter[int] = field(default_factory=Counter)  # that hold each number
    pixels: Counter[int] = field(default_factory=Counter)  # of each number
    total: int = 0  # masks
    grey: int = 0  # masks of more than two numbers
    bits: bool = False  # some files have one bit per pixel, which is 0 and 1 under every convention
    colours: Counter[int] = field(default_factory=Counter)  # pixels of each 24-bit colour, of masks that are not grey

    def add(self, mask: np.ndarray, path: Path) -> None:
        """Look at one mask ``[C, H, W]`` as its file has it. Raises ``DataError`` if it cannot hold class ids."""
        try:
            self.count(observe(mask, path).numbers, path)
        except FileError:
            if len(mask) == 3 and mask.dtype == np.uint8 and len(self.colours) <= MOST:
                self.colours.update(observe(mask, path, colours=True).pixels)
            raise

    def count(self, numbers: Numbers, path: Path) -> None:
        """Add one mask by its numbers."""
        self.bits |= numbers is None
        self.total += 1
        self.grey += len(numbers or ()) > 2
        for number, pixels in (numbers or {}).items():
            self.numbers.setdefault(number, path)
            self.masks[number] += 1
            self.pixels[number] += pixels

    @property
    def soft(self) -> bool:
        """Whether the numbers look like two classes with a soft edge: many, and most pixels near the ends.

        Numbers of objects, of which there may be as many, are spread over the whole range instead.
        """
        top = max(self.numbers, default=0)
        if len(self.numbers) <= _GREYS or top < 128 or self.bits:
            return False
        inner = sum(pixels for number, pixels in self.pixels.items() if number > 0.1 * top)
        high = sum(pixels for number, pixels in self.pixels.items() if number >= 0.9 * top)
        low = sum(pixels for number, pixels in self.pixels.items() if number <= 0.1 * top)
        return low > 0 and high >= 0.25 * inner

    def colour_table(self) -> dict[str, int]:
        """A class for each colour, the commonest first: what ``colours`` may say if all masks are in colour."""
        if not 0 < len(self.colours) <= MOST or self.bits or set(self.numbers) - {0}:
            return {}
        return {f"#{code:06x}": i for i, (code, _) in enumerate(self.colours.most_common())}


@dataclass(frozen=True)
class Convention:
    """From mask files to class ids, the same for every mask of a data set.

    Args:
        kind: ``ids``, ``binary``, ``table``, ``threshold`` or ``colours``.
        classes: names of the class ids.
        void: the value that marks void pixels, for ``ids`` and ``binary``.
        table: for each value or 24-bit colour a class id or "void"; not for ``ids`` and ``threshold``.
        threshold: the smallest value of class 1.

    >>> drawn = Convention("binary", ("background", "disc"))
    >>> ids, void = drawn(np.array([[[0, 255, 255]]], np.uint8), Path("a.png"))
    >>> ids, void
    (array([[0, 1, 1]], dtype=uint8), None)
    """

    kind: Literal["ids", "binary", "table", "threshold", "colours"]
    classes: tuple[str, ...]
    void: int | None = None
    table: Mapping[int, Target] = field(default_factory=lambda: {0: 0, 255: 1})
    threshold: int = 0

    def __call__(self, mask: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray | None]:
        """One mask ``[C, H, W]`` as its file has it -> class ids ``[H, W]`` and where it is void, if anywhere."""
        if self.kind == "threshold":
            grey = _one_channel(mask, path)
            return (grey if grey.dtype == np.bool_ else grey >= self.threshold).astype(np.uint8), None
        seen = observe(mask, path, self.kind == "colours")
        if seen.bits and self.kind != "table":
            return looked_up(np.array(list(seen.pixels), np.uint8), seen.ranks), None
        self.check(seen.pixels, path)
        targets = self.targets(seen.pixels)
        void, kind = targets == _VOID, np.min_scalar_type(max(len(self.classes) - 1, 1))
        ids = looked_up(np.where(void, 0, targets).astype(kind), seen.ranks)
        return ids, looked_up(void, seen.ranks) if void.any() else None

    def targets(self, numbers: Iterable[int]) -> np.ndarray:
        """The class id of each number; two numbers above all class ids stand for void and for no meaning."""
        return np.array([self._target(int(number)) for number in numbers])

    def _target(self, value: int) -> int:
        if value == self.void:
            return _VOID
        if self.kind == "ids":
            return value if value < len(self.classes) else _NONE
        target = self.table.get(value, _NONE)
        return target if isinstance(target, int) else _VOID

    def check(self, numbers: Numbers, path: Path) -> None:
        """Raise ``DataError`` if a mask holds a number that has no meaning under this convention."""
        wrong = {number: pixels for number, pixels in (numbers or {}).items() if self._target(number) == _NONE}
        if wrong and self.kind == "colours":
            common = sorted(((pixels, code) for code, pixels in wrong.items()), reverse=True)
            colours = some([f"#{code:06x} ({pixels:,} px)" for pixels, code in common], 4)
            raise FileError.of("E304", path, f"expected the {len(self.table)} declared colours, found {colours}")
        if wrong:
            kinds = {"ids": f"class ids 0 … {len(self.classes) - 1}", "binary": "0 and 255"}
            expected = kinds.get(self.kind) or f"the declared values {some(sorted(self.table), 12)}"
            expected += "" if self.void is None else f" or {self.void} (void)"
            noun = "value" if len(wrong) == 1 else "values"
            found = f"{noun} {some(sorted(wrong))} in {count(sum(wrong.values()), 'pixel')}"
            raise FileError.of("E303", path, f"expected {expected}, found {found}", self._advice(set(wrong)))

    def _advice(self, wrong: set[int]) -> str:
        if self.kind == "binary" and wrong == {1}:
            return 'masks of 0 and 1 need no table: "labels": "ids"; but all masks must be alike'
        if self.kind == "binary":
            return 'remove soft edges, or cut them: "labels": {"threshold": 128}'
        if wrong == {255} and self.void is None:
            return 'if 255 marks pixels that do not count, declare "void": 255'
        return ""


def declared_convention(settings: FolderSettings) -> Convention | None:
    """The convention that follows from the settings alone; ``None`` if masks must be looked at to know it."""
    names, labels = settings.class_names, settings.labels
    if settings.colours is not None:
        table = {colour_code(colour): target for colour, target in settings.colours.items()}
        return Convention("colours", names or _named(table.values()), table=table)
    if isinstance(labels, Mapping):
        if "threshold" in labels:
            return Convention("threshold", names or plain_names(2), threshold=int(labels["threshold"]))
        mapped = {int(value): target for value, target in labels.items()}
        return Convention("table", names or _named(mapped.values()), settings.void, mapped)
    if labels == "binary":
        return Convention("binary", names or plain_names(2), settings.void)
    segments = max((target for target in (settings.segments or {}).values() if isinstance(target, int)), default=0)
    if names is None and segments > 1:
        names = plain_names(segments + 1)
    if names is not None and (labels == "ids" or len(names) > 2):
        return Convention("ids", names, settings.void)
    return None


def observed_convention(seen: Values, settings: FolderSettings) -> Convention:
    """The convention of masks that hold the values ``seen``, all masks of the data set together.

    Binary if there is 255 and nothing but 0 besides; class ids otherwise, up to the largest. Class ids are refused
    where they are unlikely: more than ``MOST`` classes, or most of them never marked.

    >>> seen = Values({0: Path("a.png"), 255: Path("b.png")})
    >>> observed_convention(seen, FolderSettings()).kind
    'binary'
    """
    numbers = sorted(set(seen.numbers) - {settings.void})
    names = settings.class_names
    if settings.labels != "ids" and 255 in numbers and set(numbers) <= {0, 255}:
        return Convention("binary", names or plain_names(2), settings.void)
    if seen.soft and settings.labels != "ids" and (names is None or len(names) == 2):
        raise soft_edges(seen)
    if names is not None:
        return Convention("ids", names, settings.void)
    largest = max([*numbers, 1])
    present = len(set(numbers) | {0})
    if (largest >= MOST or present * 2 < largest + 1) and settings.labels != "ids":
        # The rarest value is the likeliest slip, and its mask the one to look at; the largest, if all are alike.
        odd = min((n for n in numbers if n), key=lambda n: (seen.masks[n], -n))
        numbers = _with_bits(seen, numbers)
        message = f"expected class ids 0, 1, 2 … or 0 and 255 in all masks, found values {some(numbers, 8)} in them"
        alone = seen.masks[odd] == 1 and (seen.bits or max(seen.masks.values()) > 1)
        message += f", {odd} in {'this mask alone' if alone else count(seen.masks[odd], 'mask')}"
        slip = f"correct the mask if {odd} is a slip, or " if alone and len(numbers) <= 8 else ""
        raise FileError.of("E306", seen.numbers[odd], message, slip + _clarify(numbers))
    return Convention("ids", plain_names(largest + 1), settings.void)


def soft_edges(seen: Values) -> FileError:
    """One problem of all masks together, with the threshold that would cut them."""
    top = max(seen.numbers)
    first = next(path for number, path in seen.numbers.items() if 0 < number < top)
    found = (
        f"found soft edges in {seen.grey:,} of {count(seen.total, 'mask')}: {len(seen.numbers)} values from 0 to {top}"
    )
    fix = f'cut the values: "labels": {{"threshold": {middle(seen)}}}; or export masks without smoothing'
    return FileError.of("E312", first, f"expected class ids 0, 1, 2 … or 0 and 255 in all masks, {found}", fix)


def middle(seen: Values) -> int:
    """The threshold half-way to the largest value: 128 for 255."""
    return (max(seen.numbers) + 1) // 2


def by_value(seen: Values) -> Convention:
    """Each value a class of its own, or soft edges cut: for looking at masks whose meaning is not clear."""
    if seen.soft:
        return Convention("threshold", plain_names(2), threshold=middle(seen))
    numbers = _with_bits(seen, sorted(seen.numbers))[: 1 << 15]
    return Convention("table", tuple(f"value {n}" for n in numbers), table={n: i for i, n in enumerate(numbers)})


def _with_bits(seen: Values, numbers: list[int]) -> list[int]:
    return sorted({0, 1, *numbers}) if seen.bits else numbers


def _clarify(numbers: list[int]) -> str:
    """Lines for ambiseg.json that would settle what the values mean."""
    rest = [n for n in numbers if n != 255]
    if 255 in numbers and rest and rest[-1] < MOST and len(rest) * 2 > rest[-1]:
        mixed = ", or save all masks alike if 1 and 255 mean the same" if set(rest) <= {0, 1} else ""
        return f'if 255 marks pixels that do not count, declare "void": 255{mixed}'
    if len(numbers) <= 8:
        table = ", ".join(f'"{value}": {i}' for i, value in enumerate(numbers))
        return f'declare what each value means: "labels": {{{table}}}'
    return 'declare "classes" if these are class ids, or cut soft edges: "labels": {"threshold": 128}'


def _named(targets: Iterable[Target]) -> tuple[str, ...]:
    return plain_names(max([*(t for t in targets if isinstance(t, int)), 1]) + 1)


def _one_channel(mask: np.ndarray, path: Path) -> np.ndarray:
    """``[H, W]``; a picture in colour counts as grey only if every pixel of it is."""
    if mask.shape[0] == 1:
        return mask[0]
    if mask.shape[0] == 3:
        tinted = (mask[0] != mask[1]) | (mask[0] != mask[2])
        if not tinted.any():
            return mask[0]
        red, green, blue = mask[:, tinted].astype(np.int64)
        codes, pixels = np.unique(red << 32 | green << 16 | blue, return_counts=True)
        common = codes[np.argsort(-pixels, kind="stable")].tolist()
        colours = [f"#{code >> 32:02x}{code >> 16 & 0xFFFF:02x}{code & 0xFFFF:02x}" for code in common]
        found = f"found {count(int(tinted.sum()), 'pixel')} in colour: {some(colours, 4)}"
        raise FileError.of("E307", path, f"expected one number per pixel, {found}")
    raise FileError.of("E305", path, f"expected one number per pixel, found {mask.shape[0]}")


def _whole(values: np.ndarray, path: Path) -> np.ndarray:
    """Non-negative integers; fractions are not rounded."""
    if values.dtype.kind == "f":
        wrong = values[(values != np.rint(values)) | np.isinf(values)]  # nan is not equal to itself
        if wrong.size:
            example = f"{count(wrong.size, 'pixel')} such as {wrong.flat[0]:.4g}"
            raise FileError.of("E305", path, f"expected whole numbers, found {example}")
    if values.dtype.kind in "if":
        if values.size and (low := values.min()) < 0:
            raise FileError.of("E305", path, f"expected class ids of 0 or more, found {int(low)}")
        if values.size and (high := values.max()) >= 2**63:
            raise FileError.of("E305", path, f"expected class ids below 2⁶³, found {float(high):.4g}")
        values = values.astype(np.int64)
    return values

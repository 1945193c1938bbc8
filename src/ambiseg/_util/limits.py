"""How large an image may be: one limit, judged from headers, before anything is allocated.

A file of a few bytes may claim any size. What a header says is compared with this limit before a decoder sees it:

- a slice has at most ``N`` pixels, N = 8192² unless ``--max-pixels N`` or ``AMBISEG_MAX_PIXELS`` says otherwise, and
  at most 16 N bytes when it is decoded (1 GiB);
- a file has at most 8 N pixels in all its slices (512 × 512 × 2048), and at most 32 N bytes (2 GiB).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from ambiseg._util.errors import ConfigError
from ambiseg._util.text import shape_text

OPTION, VARIABLE = "--max-pixels", "AMBISEG_MAX_PIXELS"
DEFAULT = 8192**2
SLICES = 8  # a file has as many pixels as this number of slices of the largest size
_SLICE_BYTES, _FILE_BYTES = 16, 32  # per pixel of the limit, when decoded
_MOST = 1 << 40  # a larger limit is a slip of the keyboard: no machine has the memory


def max_pixels() -> int:
    """Pixels that a slice may have. :class:`ConfigError` if the environment says nonsense.

    >>> max_pixels()
    67108864
    """
    return _parsed(os.environ.get(VARIABLE) or str(DEFAULT), VARIABLE)


def most_bytes() -> int:
    """Bytes that the arrays of one file may take when they are decoded."""
    return _FILE_BYTES * max_pixels()


@contextmanager
def limited(given: str | None) -> Iterator[None]:
    """Set the limit by an option, for this process and for those that it starts; ``None`` leaves it, but checks it.

    >>> with limited("100"):
    ...     max_pixels()
    100
    """
    if given is None:
        max_pixels()
        yield
        return
    number, before = _parsed(given, OPTION), os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(number)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def too_large(size: tuple[int, int], slices: int = 1, channels: int = 1, itemsize: int = 1) -> tuple[str, str] | None:
    """What a header claims against the limit: what was expected and found, and the remedy; ``None`` if it fits.

    Args:
        size: height and width of a slice.
        slices: of the file.
        channels: of a pixel.
        itemsize: bytes of one channel's value.

    >>> too_large((4096, 4096), slices=2), too_large((512, 512), slices=2000, itemsize=2)
    (None, None)
    >>> message, remedy = too_large((200000, 200000))
    >>> message
    'expected at most 67,108,864 pixels per slice (--max-pixels), found 200000×200000'
    >>> remedy
    'cut it into parts, or allow more: --max-pixels 40000000000 or AMBISEG_MAX_PIXELS=40000000000'
    """
    limit, pixels = max_pixels(), prod(size)
    of = f"{shape_text(size)}{f' of {slices:,} slices' * (slices > 1)}{f' of {channels:,} channels' * (channels > 1)}"
    value, total = channels * itemsize, pixels * slices
    rules = (
        (pixels, 1, "pixels per slice", shape_text(size)),
        (pixels * value, _SLICE_BYTES, "bytes per slice", f"{pixels * value:,} ({of})"),
        (total, SLICES, "pixels per file", f"{total:,} ({of})"),
        (total * value, _FILE_BYTES, "bytes per file", f"{total * value:,} ({of})"),
    )
    needed = max(-(-found // times) for found, times, _, _ in rules)
    for found, times, what, said in rules:
        if found > times * limit:
            return f"expected at most {times * limit:,} {what} ({OPTION}), found {said}", remedy(needed)
    return None


def remedy(needed: int) -> str:
    """What to do about a file that needs a limit of so many pixels."""
    if needed > _MOST:
        return "cut it into parts; if it should be smaller, copy or export it again"
    return f"cut it into parts, or allow more: {OPTION} {needed} or {VARIABLE}={needed}"


def _parsed(text: str, name: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else 0
    if not 1 <= number <= _MOST:
        raise ConfigError(f"{name}: expected a whole number of pixels, 1 to {_MOST}, found {text[:40]!r}")
    return number

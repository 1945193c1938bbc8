"""Whether the masks of an image fit into memory: judged before anything is computed, and said in one line if not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ambiseg._util.errors import DataError
from ambiseg._util.limits import OPTION, max_pixels
from ambiseg._util.memory import out_of_memory
from ambiseg.io.source import Source
from ambiseg.nn.pixelhead import label_dtype
from ambiseg.prediction.drawing import asked
from ambiseg.prediction.network import Network

_BYTES = 60  # of memory for each pixel of the limit, 4 GB: what one prediction takes at most
_SMALL, _ALWAYS = 1 << 22, 600_000_000  # pixels that always fit; bytes that every prediction takes


def check_memory(network: Network, source: Source) -> None:
    """A ``DataError`` for an image or a volume whose masks would take too much, before anything is computed."""
    area = math.prod(source.size)
    pixels, classes, options = source.slices * area, network.method.classes, network.options
    if pixels <= _SMALL:
        return
    channels, most = network.card.channels or source.channels, _BYTES * max_pixels()
    strata = network.strata(channels)
    by_strata = strata > 0 and options.samples is None
    count = asked(options, strata if by_strata else None)
    each = pixels * torch.empty(0, dtype=label_dtype(classes)).element_size()  # a mask
    fixed = _ALWAYS + source.nbytes + 4 * channels * area + 4 * (classes + 1) * pixels + each * strata
    times = strata if by_strata else 1
    takes, fits = fixed + each * count * times, (most - fixed) // each  # how many masks
    if takes <= most:
        return
    found = f"{source.form} with {count * times} masks, which take about {takes / 1e9:.1f} GB"
    fewer = f"per_stratum={fits // times}" if by_strata and fits >= times else f"samples={fits}"
    hint = f"{fewer} fits" if fits > 0 else "cut it into parts"
    hint = f"{hint}, or allow more: {OPTION} {-(-takes // _BYTES)}"
    raise DataError(f"{source.path}: expected masks that fit into {most / 1e9:.1f} GB, found {found}; {hint}")


@contextmanager
def fits(source: Source) -> Iterator[None]:
    """Turns errors of memory into one line that names the image."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DataError) or out_of_memory(error) is None:
            raise
        hint = "smaller windows (window=256) and fewer masks take less"
        message = f"expected an image that fits into memory, found {source.form}; {hint}"
        raise DataError(f"{source.path}: {message}") from None

"""Memory: recognising errors of it, whoever raises them, and how much of it there is."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

_WORDS = re.compile(
    r"out of memory"  # CUDA, MPS, HIP
    r"|not enough memory|can't allocate memory|cannot allocate memory"  # PyTorch on CPUs, the operating system
    r"|bad_alloc|bad allocation|unable to allocate"  # C++, NumPy
    r"|storage size calculation overflowed|multiplication overflow|invalid buffer size"  # sizes that no memory has
    r"|maximum allowed dimension exceeded|array is too big"
    r"|could not create a memory|could not create a primitive"  # oneDNN
    r"|can't start new thread",
    re.IGNORECASE,
)
_AMOUNT = re.compile(r"allocate (\d+) bytes|allocate ([\d.]+) ?([KMGTPE])i?B", re.IGNORECASE)
_REMEDIES = {  # what takes less, by command
    "train": "--data.batch_size, --data.size, --backbone.channels or --model.samples",
    "demo": "--data.batch_size, --data.size, --backbone.channels or --model.samples",
    "evaluate": "--batch-size or --samples",
    "predict": "--window, --samples or --per-stratum",
    "report": "--samples or --cases",
}


def out_of_memory(error: BaseException, command: str = "") -> str | None:
    """One line for an error of memory, whichever library raised it; ``None`` for every other error.

    Args:
        command: whose options to name, such as ``train``.

    >>> out_of_memory(RuntimeError("not enough memory: you tried to allocate 4000000000000 bytes."))
    'expected to have enough memory, found that 4,000.0 GB more are needed'
    >>> out_of_memory(MemoryError(), "predict")
    'expected to have enough memory, found too little: smaller --window, --samples or --per-stratum take less'
    >>> out_of_memory(ValueError("expected a number")) is None
    True
    """
    text = str(error)
    system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    told = isinstance(error, RuntimeError | ValueError | OSError) and _WORDS.search(text) is not None
    if not (isinstance(error, MemoryError) or system or told):
        return None
    found = "too little"
    if amount := _AMOUNT.search(text):
        power = 0 if amount[1] else 1 + "KMGTPE".index(amount[3].upper())
        gigabytes = float(amount[1] or amount[2]) * 1024**power / 1e9
        if gigabytes >= 0.1:
            found = f"that {gigabytes:,.1f} GB more are needed"
    remedy = f": smaller {_REMEDIES[command]} take less" if command in _REMEDIES else ""
    return f"expected to have enough memory, found {found}{remedy}"


def total() -> int:
    """Bytes of memory that this process may have at most: the machine's, or less if a container has less."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return 1 << 62
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found = min(found, int(Path(limit).read_text("ascii")))
        except (OSError, ValueError):  # not in a container, or "max"
            continue
    return found

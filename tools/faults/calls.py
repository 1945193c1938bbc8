"""The system calls of Linux on x86_64 that change files, and the filter by which the kernel stops a process at them."""

from __future__ import annotations

import os
import struct

# What the arguments of a call are: P a path, D the folder that the next path starts from, F an open file, - others.
CALLS = {
    1: ("write", "F"),
    2: ("open", "P"),
    18: ("pwrite", "F"),
    20: ("writev", "F"),
    40: ("sendfile", "F"),
    73: ("flock", "F"),
    74: ("fsync", "F"),
    75: ("fdatasync", "F"),
    76: ("truncate", "P"),
    77: ("ftruncate", "F"),
    82: ("rename", "PP"),
    83: ("mkdir", "P"),
    84: ("rmdir", "P"),
    85: ("creat", "P"),
    86: ("link", "PP"),
    87: ("unlink", "P"),
    88: ("symlink", "-P"),
    90: ("chmod", "P"),
    91: ("fchmod", "F"),
    257: ("open", "DP"),
    258: ("mkdir", "DP"),
    263: ("unlink", "DP"),
    264: ("rename", "DPDP"),
    265: ("link", "DPDP"),
    266: ("symlink", "-DP"),
    268: ("chmod", "DP"),
    280: ("utime", "DP"),
    285: ("fallocate", "F"),
    296: ("pwritev", "F"),
    316: ("rename", "DPDP"),
    326: ("copy", "--F"),
    328: ("pwritev", "F"),
    437: ("open", "DP"),
    452: ("chmod", "DP"),
}
_FLAGS = {2: 1, 257: 2}  # calls that open a file -> which argument says whether it may be changed
_CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_ALLOW, _TRACE, _X86_64 = 0x7FFF0000, 0x7FF00000, 0xC000003E  # linux/seccomp.h, linux/audit.h


def kernel_filter() -> bytes:
    """A program for seccomp: calls of ``CALLS`` stop, unless they only read, or write to the standard streams."""
    load, equal, above, any_bit, leave = 0x20, 0x15, 0x25, 0x45, 0x06
    # Instruction, value, and where to go on if a test holds and if not; None is the next line.
    lines: list[tuple[int, int, str | None, str | None]] = [
        (load, 4, None, None),  # offsets are those of struct seccomp_data: number, machine, address, arguments
        (equal, _X86_64, None, "allow"),
        (load, 0, None, None),
    ]
    names = dict[str, int]()
    special = {number: f"open {number}" for number in _FLAGS} | {1: "write"}
    lines += [(equal, number, special.get(number, "stop"), None) for number in sorted(CALLS)]
    names["allow"] = len(lines)
    lines.append((leave, _ALLOW, None, None))
    for number, argument in _FLAGS.items():
        names[special[number]] = len(lines)
        lines += [(load, 16 + 8 * argument, None, None), (any_bit, _CHANGING, "stop", "leave")]
    names["write"] = len(lines)
    lines += [(load, 16, None, None), (above, 2, "stop", "leave")]
    names["leave"] = len(lines)  # jumps only go forward
    lines.append((leave, _ALLOW, None, None))
    names["stop"] = len(lines)
    lines.append((leave, _TRACE, None, None))

    def skipped(at: int, name: str | None) -> int:
        return 0 if name is None else names[name] - at - 1

    return b"".join(
        struct.pack("HBBI", code, skipped(at, yes), skipped(at, no), value)
        for at, (code, value, yes, no) in enumerate(lines)
    )

"""Damage to files: any bytes, and texts that stay JSON, YAML or CSV with something else in them.

All functions take a generator of random numbers first, so that a number and a seed name one damage.
"""

from __future__ import annotations

import csv
import io
import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

from faults.judge import CANARY

Mutation = Callable[[Random, bytes], bytes]

INTEGERS = [0, 1, -1, 2, 7, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
INTEGERS += [2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63), 10**6, 10**9, 10**18]
NUMBERS = [0.5, -0.5, 1e-320, 1e308, 3.5e38, -1e308, float("nan"), float("inf"), float("-inf")]
TEXTS = [
    "", " ", "x", "a" * 3000, "[/b]", "[bold]x", "{name}", "{", "{0.__class__}", "%s%n", "\x00", "\x1b[2J", "\n",
    "ä\u0301",
    "\ud800", "\u202e", "..", "../../..", "/", "/dev/zero", "/dev/stdin", "/proc/self/mem", ".", "~", "null", "true",
    "1",
    "-1", "1e400", "nan", "0x10", "1:30", "2001-01-01", "(a+)+$", "(?P<x>", "\\", "os:mkdir", "subprocess:Popen",
    "canary:Thing", "torch.nn:Identity", "<b>", "&amp;", "</script>", "#ff0000", "<f8", "|O", "auto", "test", "cuda",
    "-",
]  # fmt: skip


def value(rng: Random, depth: int = 0) -> Any:
    """Something that was not expected."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 2:
        return rng.choice(INTEGERS)
    if kind == 2:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.choice([None, True, False])
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {str(rng.choice(TEXTS)): value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return rng.choice([10**400, [0] * 5000, {str(i): i for i in range(2000)}, [[[[[[]]]]]], -0.0])


# -- bytes ------------------------------------------------------------------------------------------------------------


def flip(rng: Random, content: bytes) -> bytes:
    """Some bits of some bytes."""
    changed = bytearray(content or b"\0")
    for _ in range(rng.choice([1, 1, 2, 4, 16, 64])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def start(rng: Random, content: bytes) -> bytes:
    """Bytes of the start, where headers are."""
    changed = bytearray(content or b"\0")
    for _ in range(rng.choice([1, 2, 4])):
        changed[rng.randrange(min(len(changed), 600))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
    return bytes(changed)


def cut(rng: Random, content: bytes) -> bytes:
    """The start of a file, its end, or nothing of it."""
    at = rng.choice([0, 1, len(content) // 2, max(0, len(content) - 1), rng.randrange(len(content) + 1)])
    return content[at:] if rng.random() < 0.2 else content[:at]


def insert(rng: Random, content: bytes) -> bytes:
    """Something in between."""
    at = rng.randrange(len(content) + 1)
    more = rng.choice([rng.randbytes(rng.randrange(1, 64)), b"\0" * 4096, content[: rng.randrange(len(content) + 1)]])
    return content[:at] + more + content[at:]


def swap(rng: Random, content: bytes) -> bytes:
    """Two blocks for each other, or one twice."""
    if len(content) < 4:
        return content * 2
    a, b, c = sorted(rng.randrange(len(content)) for _ in range(3))
    return content[:a] + content[b:c] + (content[a:b] if rng.random() < 0.7 else content[b:c]) + content[c:]


def integer(rng: Random, content: bytes) -> bytes:
    """An extreme number over some bytes, of any size and order; more often where headers are."""
    code = rng.choice("bBhHiIqQfd")
    order = rng.choice("<>")
    if code in "fd":
        packed = struct.pack(f"{order}{code}", rng.choice([0.0, -1.0, float("nan"), float("inf"), 1e30]))
    else:
        bits = 8 * struct.calcsize(order + code)
        number = rng.choice(INTEGERS) % 2**bits
        packed = number.to_bytes(bits // 8, "little" if order == "<" else "big")
    reach = len(content) if rng.random() < 0.5 else min(len(content), 600)
    at = rng.randrange(max(1, reach - len(packed)))
    return content[:at] + packed + content[at + len(packed) :]


def fill(rng: Random, content: bytes) -> bytes:
    """A block of equal bytes."""
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    return content[:a] + rng.choice([b"\0", b"\xff", b"\x80"]) * (b - a) + content[b:]


def other(rng: Random, content: bytes) -> bytes:
    """Something else altogether."""
    return rng.choice([b"", b"\0" * 100, rng.randbytes(500), b"\x89PNG\r\n\x1a\n", b"GIF89a", b"PK\3\4", b"[" * 50_000])


BYTES: list[Mutation] = [flip, flip, start, start, cut, insert, swap, integer, integer, fill, other]


def splice(rng: Random, content: bytes, second: bytes) -> bytes:
    """The start of one file and the end of another."""
    return content[: rng.randrange(len(content) + 1)] + second[rng.randrange(len(second) + 1) :]


def damaged(rng: Random, content: bytes) -> bytes:
    """One to three changes of bytes."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        content = rng.choice(BYTES)(rng, content)
    return content


# -- values in texts --------------------------------------------------------------------------------------------------


def changed(rng: Random, content: Any) -> Any:
    """Parsed JSON with one value, at any depth, replaced, removed, doubled or nested."""
    places = list(_places(content))
    if not places or rng.random() < 0.04:
        return value(rng)
    holder, key = rng.choice(places)
    what = rng.randrange(10)
    if what < 5:
        holder[key] = value(rng)
    elif what == 5:
        del holder[key]
    elif what == 6:
        holder[key] = rng.choice([[holder[key]], {"x": holder[key]}, [holder[key]] * 3])
    elif what == 7 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif what == 7:
        holder[rng.choice(TEXTS)] = holder[key]
    elif what == 8:
        _, second = rng.choice(places)
        holder[key] = rng.choice([second, str(holder[key])])
    elif isinstance(holder[key], int | float):
        holder[key] = rng.choice([-holder[key], holder[key] + 1, holder[key] * 1000, f"{holder[key]}.0"])
    else:
        holder[key] = value(rng)
    return content


def _places(content: Any) -> Any:
    keys = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield content, key
        yield from _places(content[key])


def _deep(rng: Random) -> str:
    """Texts that are small and ask for much."""
    depth = rng.choice([100, 2000, 100_000])
    return rng.choice(
        ["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "9" * depth, f'"{"a" * depth}"',
        "[1" + ",1" * depth + "]"]
    )  # fmt: skip


def as_json(rng: Random, content: bytes) -> bytes:
    """JSON with something else in it, or a text that is nearly JSON."""
    what = rng.random()
    if what < 0.1:
        return damaged(rng, content)
    if what < 0.15:
        return _deep(rng).encode()
    try:
        parsed = json.loads(content)
    except ValueError:
        return damaged(rng, content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        parsed = changed(rng, parsed)
    text = json.dumps(parsed, indent=rng.choice([None, 1]))
    if what < 0.2:
        return rng.choice(
            [text.encode("utf-16"), b"\xef\xbb\xbf" + text.encode(), (text + text).encode(), text.encode() + b"\0"]
        )
    if what < 0.25 and isinstance(parsed, dict) and parsed:  # keys twice
        return ("{" + text.strip()[1:-1] + ", " + text.strip()[1:]).encode()
    return text.encode()


def as_lines(rng: Random, content: bytes) -> bytes:
    """JSON lines: one of them changed, removed, doubled or exchanged."""
    lines = content.splitlines()
    if not lines or rng.random() < 0.1:
        return damaged(rng, content)
    at = rng.randrange(len(lines))
    what = rng.randrange(8)
    if what < 5:
        lines[at] = as_json(rng, lines[at]).replace(b"\n", b" ")
    elif what == 5:
        lines[at : at + 1] = rng.choice([[], [lines[at]] * 2, [b""], [b"null"]])
    else:
        rng.shuffle(lines)
    return b"\n".join(lines) + rng.choice([b"\n", b"\n", b""])


YAMLS = [
    f'!!python/object/apply:os.mkdir ["{CANARY}"]',
    f'!!python/object/new:os.mkdir ["{CANARY}"]',
    "!!python/name:os.system",
    f'!!python/object/apply:subprocess.Popen [["mkdir", "{CANARY}"]]',
    "&a [*a]",
    "&a {b: *a}",
    "{<<: {a: 1}}",
    "{? [1, 2] : 3}",
    "!!binary aGVsbG8=",
    "!!set {a, b}",
    "!!timestamp 9999-99-99",
    "2001-02-30",
    "1:30",
    "0o777",
    "!unknown x",
    "*missing",
    "{a: 1, a: 2}",
    "[" * 3000 + "]" * 3000,
    "9" * 5000,
    "=",
    "| \n  x",
    ".inf",
    ".nan",
]
LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 30))


def as_yaml(rng: Random, content: bytes) -> bytes:
    """YAML with something else in it: values, tags, anchors, depth."""
    import yaml

    what = rng.random()
    if what < 0.12:
        return damaged(rng, content)
    text = content.decode("utf-8", "replace")
    if what < 0.2:
        return rng.choice(
            [LAUGHS, LAUGHS + text, _deep(rng), "- " * 5000 + "x", "a: " * 5000, "? " * 3000, "%YAML 9.9\n---\n" + text]
        ).encode()
    if what < 0.45:  # a value of a line
        lines = text.splitlines() or [""]
        at = rng.randrange(len(lines))
        key, colon, _ = lines[at].partition(":")
        lines[at] = f"{key}{colon or ':'} {rng.choice(YAMLS)}"
        return "\n".join(lines).encode("utf-8", "surrogatepass")
    try:
        parsed = yaml.safe_load(text)
        for _ in range(rng.choice([1, 1, 2])):
            parsed = changed(rng, parsed)
        return yaml.safe_dump(parsed, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, RecursionError):
        return damaged(rng, content)


def as_csv(rng: Random, content: bytes) -> bytes:
    """A table with other cells, columns or rows."""
    what = rng.random()
    if what < 0.12:
        return damaged(rng, content)
    rows = list(csv.reader(io.StringIO(content.decode("utf-8", "replace"))))
    if not rows or not rows[0]:
        return damaged(rng, content)
    row, column = rng.randrange(len(rows)), rng.randrange(len(rows[0]))
    if what < 0.5:
        rows[row][column : column + 1] = [str(value(rng)).replace("\ud800", "\ufffd")]
    elif what < 0.6:
        rows[0][column] = rng.choice(TEXTS[:-1]).replace("\ud800", "?")
    elif what < 0.7:
        rows = [cells[:column] + cells[column + 1 :] for cells in rows]
    elif what < 0.8:
        rows = [[*cells, rng.choice([cells[0] if cells else "", "x"])] for cells in rows]
    elif what < 0.9:
        rows[row : row + 1] = rng.choice([[], [rows[row]] * 2, [[]], [[*rows[row], "more", "cells"]], [rows[row][:1]]])
    else:
        return content + rng.choice([b'"open', b"\0", b"x" * 200_000 + b"\n", b",,,,,,,,,\n", b"\xff\xfe\n"])
    made = io.StringIO()
    csv.writer(made, delimiter=rng.choice([",", ",", ",", ",", ";", "\t"])).writerows(rows)
    return made.getvalue().encode("utf-8", "surrogatepass")

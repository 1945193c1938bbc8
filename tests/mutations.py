"""Damaged files: seeded mutations of bytes and of JSON, for tests that ask what reads them for a value or one line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ambiseg._util.errors import DataError

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**62, 10**40, 0.5, -1e308, 1e308, float("nan"), float("inf"), "", "a",
    "[/b]", "\n", "\0", "\x1b[31m", "\ud800", "1", "../..", "/", "a" * 5000, [], [[]], [1, 2], [None], {}, {"": 0},
    {"a": {}}, [0] * 300, {"x": "y"},
]  # fmt: skip


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all values of a tree."""
    found = [way]
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            found += places(inner, (*way, key))
    return found


def mutated_tree(value: Any, rng: random.Random) -> Any:
    """One value replaced, removed, doubled, renamed, or exchanged with another."""
    value = json.loads(json.dumps(value))
    way = rng.choice(places(value))
    if not way:
        return rng.choice(ODD)
    inside = value
    for key in way[:-1]:
        inside = inside[key]
    key, action = way[-1], rng.randrange(8)
    if action == 0:
        del inside[key]
    elif action == 1 and isinstance(inside, list):
        inside.append(inside[key])
    elif action == 2 and isinstance(inside, dict):
        inside[rng.choice(["other", "", "\n", "0", *inside])] = inside.pop(key)
    elif action == 3:
        other = rng.choice(places(value)[1:])
        taken = value
        for step in other:
            taken = taken[step]
        inside[key] = json.loads(json.dumps(taken))
    elif action == 4 and isinstance(inside[key], int | float) and not isinstance(inside[key], bool):
        inside[key] = rng.choice([inside[key] + 1, inside[key] - 1, -inside[key], inside[key] * 1000, inside[key] / 2])
    else:
        inside[key] = rng.choice(ODD)
    return value


def mutated_bytes(original: bytes, rng: random.Random) -> bytes:
    """Cut, flipped, filled, doubled or exchanged bytes."""
    content = bytearray(original)
    for _ in range(rng.choice([1, 1, 1, 3, 10])):
        at = rng.randrange(len(content) + 1)
        action = rng.randrange(6)
        if action == 0:
            del content[at:]
        elif action == 1:
            del content[at : at + rng.randrange(20)]
        elif action == 2:
            content[at:at] = rng.randbytes(rng.randrange(1, 5))
        elif action == 3:
            content[at:at] = rng.choice(
                [b"[" * 500, b"\0", b"\xff", b'"', b"{", b"}", b",", b"9" * 400, b"NaN", b"null"]
            )
        elif action == 4:
            content[at : at + 8] = b"\xff" * len(content[at : at + 8])
        elif at < len(content):
            content[at] ^= 1 << rng.randrange(8)
    return bytes(content)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Another content of a file of ours: JSON, JSON lines, or bytes."""
    if rng.random() < 0.3:
        return mutated_bytes(content, rng)
    try:
        if len(lines := content.splitlines()) > 1 and all(line[:1] == b"{" and line[-1:] == b"}" for line in lines):
            at = rng.randrange(len(lines))
            lines[at] = json.dumps(mutated_tree(json.loads(lines[at]), rng)).encode()
            return b"\n".join(lines) + b"\n"
        return json.dumps(mutated_tree(json.loads(content), rng)).encode()
    except ValueError:
        return mutated_bytes(content, rng)


def survives(path: Path, read: Callable[[], object], count: int, seed: int = 0) -> int:
    """Mutate a file ``count`` times, and read it; anything but a value or a one-line DataError is raised. How many
    were refused."""
    rng, content, refused = random.Random(f"{seed} {path.name}"), path.read_bytes(), 0
    try:
        for number in range(count):
            path.write_bytes(changed := mutated(content, rng))
            try:
                read()
            except DataError as error:
                refused += 1
                lines = str(error).splitlines()
            except Exception as error:
                error.args = (f"{path.name}, mutation {number} of seed {seed}: {error}"[:500], changed[:2000])
                raise
            else:
                continue
            assert len(lines) == 1, (number, lines)
    finally:
        path.write_bytes(content)
    return refused

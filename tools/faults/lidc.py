"""Damage to the forms of LIDC, of which one is a program: pickles, HDF5, data bases, XML."""

from __future__ import annotations

import pickle
import pickletools
import sqlite3
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from faults.judge import CANARY
from faults.mutate import INTEGERS, NUMBERS, TEXTS, damaged, value

CALLS = [
    f"cos\nmkdir\n(V{CANARY}\ntR.".encode(),
    f"cposix\nmkdir\n(V{CANARY}\ntR.".encode(),
    f"cbuiltins\neval\n(V__import__('os').mkdir('{CANARY}')\ntR.".encode(),
    b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c" + bytes([len(CANARY)]) + CANARY.encode() + b"\x85R.",
    f"(V{CANARY}\nios\nmkdir\n.".encode(),
    f"ctorch._utils\n_rebuild_tensor_v2\n(cos\nmkdir\n(V{CANARY}\ntRtR.".encode(),
    f"cnumpy.core.multiarray\n_reconstruct\n(cos\nmkdir\n(V{CANARY}\ntRtR.".encode(),
    b"\x80\x02}(K\x01K\x02u" + b"0" * 20 + b".",
    b"})" + b"\x85" * 50_000 + b"K\x01s.",
    b"]" + b"2" * 60_000 + b"e" * 10 + b".",
    b"\x8b\xff\xff\xff\xff" + b"1" * 50,
    b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"I" + b"9" * 20_000 + b"\n.",
    b"(" * 100_000 + b".",
]


def pickled(rng: Random, content: bytes) -> bytes:
    """Steps of a pickle left out, doubled, exchanged, with other arguments, or calls put between them."""
    what = rng.randrange(10)
    if what == 0:
        return rng.choice(CALLS)
    if what == 1:
        return damaged(rng, content)
    places = list[int]()
    with suppress(Exception):
        for number, (_, _, at) in enumerate(pickletools.genops(content)):
            places.append(at or 0)
            if number > 20_000:
                break
    if len(places) < 4:
        return damaged(rng, content)
    at = rng.randrange(len(places) - 2)
    a, b, c = places[at], places[at + 1], places[at + 2]
    if what == 2:
        return content[:a] + content[b:]
    if what == 3:
        return content[:b] + content[a:b] * rng.choice([1, 2, 1000]) + content[b:]
    if what == 4:
        return content[:a] + content[b:c] + content[a:b] + content[c:]
    if what == 5:
        return content[:a] + rng.choice(CALLS)[:-1] + content[a:]
    if what == 6:
        ops = [code.code.encode("latin-1") for code in pickletools.opcodes]
        return content[:a] + rng.choice(ops) + content[a + rng.randrange(2) :]
    if what == 7:
        with suppress(Exception):
            return content[:a] + pickle.dumps(value(rng), rng.randrange(5))[rng.choice([0, 2]) : -1] + content[b:]
    return content[:a] + damaged(rng, content[a:b])[:100_000] + content[b:]


def hdf5(rng: Random, path: Path) -> None:
    import h5py
    import numpy as np

    with h5py.File(path, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        name = rng.choice(names)
        what = rng.randrange(8)
        if what == 0:
            del file[name]
        elif what == 1:
            del file[name]
            file[name] = rng.choice(
                [h5py.SoftLink("/missing"), h5py.SoftLink(f"/{name}"), h5py.ExternalLink("other.h5", "/x")]
            )
        elif what == 2:
            file.move(name, rng.choice(["x", "train/more", "a" * 200]))
        elif what < 6 and isinstance(found := file[name], h5py.Dataset):
            shape = [*found.shape]
            shape[rng.randrange(len(shape))] = rng.choice([0, 1, 3, 5])
            dtype: Any = rng.choice(["f4", "i8", "c16", "S5", h5py.string_dtype(), "u1", h5py.vlen_dtype("i4"), "bool"])
            del file[name]
            large = rng.random() < 0.3
            file.create_dataset(name, [*shape[:-1], 10**9] if large else shape, dtype, chunks=True if large else None)
        elif isinstance(found := file[name], h5py.Dataset) and found.dtype.kind == "f":
            found[...] = rng.choice([np.nan, np.inf, -1e30, 300.0])
        else:
            del file[name]
            file[name] = rng.choice([1, "text", [1.0, 2.0]])


def sqlite(rng: Random, path: Path) -> None:
    base = sqlite3.connect(path)
    try:
        table = rng.choice([row[0] for row in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")])
        columns = [row[1] for row in base.execute(f"PRAGMA table_info({table})")]
        column, what = rng.choice(columns), rng.randrange(6)
        if what == 0:
            base.execute(f"DROP TABLE {table}")
        elif what == 1:
            base.execute(f'ALTER TABLE {table} RENAME COLUMN "{column}" TO x')
        else:
            new = rng.choice([*INTEGERS, *NUMBERS, *TEXTS, None, b"\xff\xfe", "1,2\n3", "1,2,3", "1e9,1e9\n0,0\n5,5"])
            new = 0 if isinstance(new, int) and abs(new) >= 2**63 else new
            where = "" if what < 4 else " WHERE rowid = 1"
            base.execute(f'UPDATE {table} SET "{column}" = ?{where}', (new,))
        base.commit()
    finally:
        base.close()


def xml(rng: Random, content: bytes) -> bytes:
    """Other numbers, other tags, entities."""
    what = rng.random()
    if what < 0.15:
        return damaged(rng, content)
    if what < 0.3:
        laughs = "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 10))
        entity = rng.choice(
            [f'<!ENTITY a0 "x">{laughs}', '<!ENTITY a9 SYSTEM "file:///etc/passwd">', '<!ENTITY a9 SYSTEM "/dev/zero">']
        )
        return content.replace(b"<LidcReadMessage", f"<!DOCTYPE x [{entity}]><LidcReadMessage".encode()).replace(
            b"<xCoord>", b"<xCoord>&a9;", 1
        )
    if what < 0.4:
        return b"<LidcReadMessage>" + b"<a>" * rng.choice([500, 200_000])
    parts = content.split(b">")
    at = rng.randrange(len(parts))
    text, found, tag = parts[at].partition(b"<")
    if what < 0.8:
        text = str(rng.choice([*INTEGERS, *NUMBERS, *TEXTS[:10]])).encode("utf-8", "replace")
    else:
        tag = rng.choice([b"", b"x", tag[1:], b"!--", b"/" + tag])
    parts[at] = text + found + tag
    return b">".join(parts)

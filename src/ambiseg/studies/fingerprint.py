"""Which configurations give the same run: members are found again by a hash of their settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ambiseg.config import Config

DIGITS = 12
# What does not change the weights, or no more than another machine does. The seed is part of the folder's name.
_IGNORED = (
    "seed",
    "data.workers",
    "data.cache",
    "trainer.accelerator",
    "trainer.look",
    "trainer.strategy",
    "trainer.tensorboard",
)
_PATHS = ("data.root", "data.extra", "data.split")  # the same file has many names


def canonical(config: Config) -> dict[str, Any]:
    """Every setting that may change a result, by key, in the form in which it is compared.

    >>> a, b = Config(), Config(data={"workers": 4}, seed=7)
    >>> canonical(a) == canonical(b), canonical(a) == canonical(Config(data={"batch_size": 8}))
    (True, False)
    """
    found = dict(_flat(config.model_dump(mode="json")))
    for key in _PATHS:
        path = found.get(key)
        if isinstance(path, str) and os.path.exists(path):
            found[key] = os.path.realpath(path)
    return {key: value for key, value in found.items() if key not in _IGNORED}


def fingerprint(config: Config) -> str:
    """A hash of the settings that differ from their defaults: a setting that a later version adds does not change it.

    >>> fingerprint(Config()) == fingerprint(Config(seed=3)), len(fingerprint(Config()))
    (True, 12)
    """
    text = json.dumps(changes(config), sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(errors="backslashreplace")).hexdigest()[:DIGITS]


def changes(config: Config) -> dict[str, Any]:
    """The settings that differ from the defaults of the method, by key; method and data in any case."""
    default = canonical(Config(model={"method": config.model.method}))  # type: ignore[arg-type]
    keep = ("model.method", "data.name")
    return {k: v for k, v in canonical(config).items() if k in keep or k not in default or default[k] != v}


def differing(one: Config, other: Config) -> list[str]:
    """Keys of settings that differ between two configurations and may change a result."""
    first, second = canonical(one), canonical(other)
    return sorted(key for key in {*first, *second} if first.get(key) != second.get(key))


def _flat(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Sections as keys with dots; tables below a setting, such as a schedule, stay as they are.

    >>> _flat({"seed": 0, "data": {"augment": {"flip": None}, "options": {"size": 8}}})
    [('seed', 0), ('data.augment', {'flip': None}), ('data.options', {'size': 8})]
    """
    found = []
    for key, value in content.items():
        if isinstance(value, Mapping) and not prefix:
            found += _flat(value, f"{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two paths are the same folder or file."""
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)

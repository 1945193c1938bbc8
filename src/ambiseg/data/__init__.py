"""Data sets: the embedded nodules, shapes of known truth, your own folders; splits, augmentation, loading.

Everything is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ambiseg._util.errors import DataError
    from ambiseg.data.augment import Augment
    from ambiseg.data.case import Case, Cases
    from ambiseg.data.config import DATASETS, DataConfig, open_cases, open_split
    from ambiseg.data.export import export
    from ambiseg.data.intensity import Intensity
    from ambiseg.data.loader import Batch
    from ambiseg.data.module import DataModule
    from ambiseg.data.sets.arrays import Arrays
    from ambiseg.data.sets.folder.cases import Folder
    from ambiseg.data.sets.nodules.cases import Nodules
    from ambiseg.data.sets.shapes import Shapes
    from ambiseg.data.splits import LeakageError, Split, check_leakage
    from ambiseg.data.store import Store

_HOMES = {  # where each public name lives; `TYPE_CHECKING` above says the same to editors
    "_util.errors": ["DataError"],
    "data.augment": ["Augment"],
    "data.case": ["Case", "Cases"],
    "data.config": ["DATASETS", "DataConfig", "open_cases", "open_split"],
    "data.export": ["export"],
    "data.intensity": ["Intensity"],
    "data.loader": ["Batch"],
    "data.module": ["DataModule"],
    "data.sets.arrays": ["Arrays"],
    "data.sets.folder.cases": ["Folder"],
    "data.sets.nodules.cases": ["Nodules"],
    "data.sets.shapes": ["Shapes"],
    "data.splits": ["LeakageError", "Split", "check_leakage"],
    "data.store": ["Store"],
}

__all__ = [
    "DATASETS", "Arrays", "Augment", "Batch", "Case", "Cases", "DataConfig", "DataError", "DataModule", "Folder",
    "Intensity", "LeakageError", "Nodules", "Shapes", "Split", "Store", "check_leakage", "export", "open_cases",
    "open_split",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"ambiseg.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

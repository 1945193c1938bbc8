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
    "Arrays": "data.sets.arrays",
    "Augment": "data.augment",
    "Batch": "data.loader",
    "Case": "data.case",
    "Cases": "data.case",
    "DATASETS": "data.config",
    "DataConfig": "data.config",
    "DataError": "_util.errors",
    "DataModule": "data.module",
    "Folder": "data.sets.folder.cases",
    "Intensity": "data.intensity",
    "LeakageError": "data.splits",
    "Nodules": "data.sets.nodules.cases",
    "Shapes": "data.sets.shapes",
    "Split": "data.splits",
    "Store": "data.store",
    "check_leakage": "data.splits",
    "export": "data.export",
    "open_cases": "data.config",
    "open_split": "data.config",
}

__all__ = [
    "DATASETS",
    "Arrays",
    "Augment",
    "Batch",
    "Case",
    "Cases",
    "DataConfig",
    "DataError",
    "DataModule",
    "Folder",
    "Intensity",
    "LeakageError",
    "Nodules",
    "Shapes",
    "Split",
    "Store",
    "check_leakage",
    "export",
    "open_cases",
    "open_split",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ambiseg.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

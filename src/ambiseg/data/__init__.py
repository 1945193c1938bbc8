"""Data sets: the embedded nodules, shapes of known truth, your own folders; splits, augmentation, loading."""

from ambiseg._util.errors import DataError
from ambiseg.data.case import Case, Cases
from ambiseg.data.intensity import Intensity

__all__ = ["Case", "Cases", "DataError", "Intensity"]

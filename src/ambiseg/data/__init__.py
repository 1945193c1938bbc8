"""Data sets: the embedded nodules, shapes of known truth, your own folders; splits, augmentation, loading."""

from ambiseg.data.base import Case, Cases, DataError
from ambiseg.data.intensity import Intensity

__all__ = ["Case", "Cases", "DataError", "Intensity"]

"""Numbers with their intervals, as evaluations save them."""

from __future__ import annotations

from ambiseg._util.records import Number, Record


class Interval(Record):
    """A number with its 95 % interval over patients.

    >>> Interval(mean=0.812, low=0.79, high=0.8333).text
    '0.812 [0.790, 0.833]'
    """

    mean: Number
    low: Number
    high: Number

    @property
    def text(self) -> str:
        """As people read it; the mean alone where one patient gives no interval."""
        if self.mean is None:
            return "–"
        digits = 0 if abs(self.mean) >= 1000 else 1 if abs(self.mean) >= 100 else 3
        low, mean, high = (None if one is None else f"{one:.{digits}f}" for one in (self.low, self.mean, self.high))
        return f"{mean}" if low is None or high is None else f"{mean} [{low}, {high}]"


class Mean(Interval):
    """A mean over images, and how many images have a value."""

    count: int

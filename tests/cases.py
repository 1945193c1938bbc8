"""Small data sets for tests of what is common to all of them."""

from __future__ import annotations

import numpy as np

from ambiseg.data.case import Case, Cases
from ambiseg.data.intensity import Intensity


class Listed(Cases):
    """Cases from a list."""

    def __init__(self, cases: list[Case], classes: int = 2, declared: list[str] | None = None) -> None:
        self.title = "listed cases"
        self.classes = tuple(f"class {c}" for c in range(classes))
        self.evaluated = tuple(range(1, classes))
        self.channels = len(cases[0].image)
        self.intensity = Intensity()
        self.names = [case.name for case in cases]
        self.patients = [case.patient for case in cases]
        self.declared = declared
        self._cases = cases

    def __getitem__(self, index: int) -> Case:
        return self._cases[index]


def random_cases(
    count: int = 10,
    size: tuple[int, int] = (12, 10),
    readers: int | None = 3,
    classes: int = 3,
    channels: int = 1,
    void: bool = False,
    patients: int | None = None,
    seed: int = 0,
) -> Listed:
    """Noise with random masks; ``readers=None``: 1, 2, 3 … of them in turn; ``patients`` are shared out in turn."""
    rng = np.random.default_rng(seed)
    cases = []
    for i in range(count):
        M = readers if readers is not None else 1 + i % 4
        cases.append(
            Case.of(
                rng.integers(-1000, 400, (channels, *size)).astype(np.int16),
                rng.integers(0, classes, (M, *size)),
                name=f"case-{i}",
                patient=f"patient-{i % patients}" if patients else None,
                valid=rng.random(size) > 0.2 if void else None,
                weights=rng.integers(1, 5, M).astype(np.float32) if i % 2 else None,
            )
        )
    return Listed(cases, classes)

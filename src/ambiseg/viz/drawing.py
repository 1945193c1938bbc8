"""Pictures of cases for :mod:`ambiseg.data.check.page`, until it calls :mod:`ambiseg.viz.pictures` itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from ambiseg.viz import pictures
from ambiseg.viz.colours import HEAT, reader_colours
from ambiseg.viz.pictures import data_uri

__all__ = ["data_uri", "differences", "heat_gradient", "outlines", "reader_colours"]


def heat_gradient() -> str:
    return ", ".join(HEAT[1:])


def outlines(case: Any, colours: dict[str, str]) -> np.ndarray:
    masks = [case.table[:, m][case.regions] for m in range(len(case.readers))]
    lines = pictures.outlines(masks, [colours.get(reader, "#ffffff") for reader in case.readers])
    return pictures.over(pictures.photograph(case.image), lines)


def differences(case: Any) -> np.ndarray:
    return pictures.differences(case.image, case.table, case.regions, case.void)

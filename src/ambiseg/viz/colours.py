"""Every colour: of classes, readers, strata and values, and of figures and pages on light and dark screens."""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Sequence

import numpy as np

# Okabe and Ito's colours, which people with any kind of colour vision tell apart; their black is white here
OKABE_ITO = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#d55e00", "#cc79a7", "#0072b2", "#ffffff")
GROUND, VOID = "#0d1117", "#7d8590"  # the class that is not evaluated, and pixels that do not count
HEAT = (
    "#0d1117",
    "#3b1260",
    "#8c2369",
    "#d8434e",
    "#f98e3c",
    "#fbe08a",
)  # from 0 up; lighter is more, in print as well
_CLASSES = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#6a3d9a",
    "#b15928",
    "#33a02c",
)  # stand out from grey
_GOLDEN = 0.618034  # of a turn: hues that follow each other are far apart, however many there are

# Figures are drawn in the colours of the light page, and follow the page by the variables of the same place
INK, SOFT, LINE, PAPER, OTHERS = "#1c2530", "#5a6675", "#d3dae3", "#fefefe", "#9aa4b1"
SERIES = ("#2468b4", "#d2691e", "#14866a", "#ad3f78", "#a67c00", "#6a55b5", "#2288a6", "#7b6a57")
BRIGHT = ("#6ba8ea", "#f0975a", "#4cc3a2", "#e583b4", "#dcb840", "#a898f0", "#62c6e2", "#bfae98")  # the same on dark
VARIABLES = {INK: "--ink", SOFT: "--soft", LINE: "--line", PAPER: "--card", OTHERS: "--others"} | {
    colour: f"--e{i}" for i, colour in enumerate(SERIES, 1)
}
_LIGHT = {PAPER: "#ffffff"}  # not quite white in figures, so that it is told from white pixels
_DARK = dict(zip(VARIABLES, ("#e6ebf2", "#a3afbf", "#323c4a", "#181f29", "#6d7887", *BRIGHT), strict=True))


def page_variables() -> str:
    """CSS that gives :data:`VARIABLES` their values on light and on dark screens.

    >>> page_variables()[:24]
    ':root { --ink: #1c2530; '
    """
    light, dark = (
        " ".join(f"{variable}: {shown.get(colour, colour)};" for colour, variable in VARIABLES.items())
        for shown in (_LIGHT, _DARK)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def rgb(colour: str) -> tuple[int, int, int]:
    """The three bytes of ``#rrggbb``."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def palette(colours: Sequence[str]) -> np.ndarray:
    """``[N, 3]`` bytes."""
    return np.array([rgb(colour) for colour in colours], np.uint8).reshape(-1, 3)


def distinct(count: int) -> list[str]:
    """Colours that can be told apart: :data:`OKABE_ITO`, then a wheel of hues. More colours never change the first.

    >>> distinct(2)
    ['#e69f00', '#56b4e9']
    """
    wheel = [_hsv(i * _GOLDEN, 0.65, 0.95) for i in range(count - len(OKABE_ITO))]
    return [*OKABE_ITO[:count], *wheel]


def reader_colours(readers: Sequence[str]) -> dict[str, str]:
    """A colour for each reader, the same wherever the reader is drawn.

    >>> reader_colours(["Ann", "Bob"])
    {'Ann': '#e69f00', 'Bob': '#56b4e9'}
    """
    return dict(zip(readers, distinct(len(readers)), strict=True))


def label_colours(count: int) -> list[str]:
    """Colours of class ids where nothing else is known of them: black for class 0, then :func:`distinct` ones."""
    return ["#000000", *distinct(count - 1)]


def class_colours(
    classes: Sequence[str], evaluated: Sequence[int], flipped: Sequence[tuple[int, int]] = ()
) -> list[str]:
    """A colour for each class: white for the only one, else :func:`distinct` ones; an unevaluated class 0 is dark.

    Args:
        flipped: pairs of class ids, of which the first becomes the second in some modes: the first has a colour of its
            own, the second a tint of it, and all other classes are muted.

    >>> class_colours(["ground", "nodule"], [1])
    ['#0d1117', '#ffffff']
    >>> class_colours(["sky", "road", "road2"], [1, 2], [(1, 2)])
    ['#666666', '#0072b2', '#8cc0dc']
    """
    if len(classes) == 2:
        return [GROUND, "#ffffff"]
    if not flipped:
        shown = [i for i in range(len(classes)) if i or 0 in evaluated]
        chosen = dict(zip(shown, distinct(len(shown)), strict=True))
        return [chosen.get(i, GROUND) for i in range(len(classes))]
    own = dict(zip((source for source, _ in flipped), itertools.cycle(_CLASSES), strict=False))
    tints = {target: "#" + "".join(f"{round(0.45 * part + 140.25):02x}" for part in rgb(own[source]))
             for source, target in flipped}  # fmt: skip
    others = [i for i in range(len(classes)) if i not in own and i not in tints]
    muted = {
        i: _hsv(number / len(others), 0.25 if len(others) > 1 else 0, 0.4 + 0.25 * (number % 2))
        for number, i in enumerate(others)
    }
    chosen = tints | muted | own
    return [chosen[i] for i in range(len(classes))]


def heat_colours(values: np.ndarray) -> np.ndarray:
    """``[…]`` values from 0 to 1 as ``[…, 3]`` bytes, along :data:`HEAT`.

    >>> heat_colours(np.array([0, 1])).tolist()
    [[13, 17, 23], [251, 224, 138]]
    """
    stops = palette(HEAT).astype(float)
    at = np.clip(values, 0, 1) * (len(stops) - 1)
    below = np.minimum(at.astype(int), len(stops) - 2)
    return (stops[below] + (at - below)[..., None] * (stops[below + 1] - stops[below])).round().astype(np.uint8)


def _hsv(hue: float, saturation: float, value: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hsv_to_rgb(hue % 1, saturation, value))

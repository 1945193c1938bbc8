"""Draw the picture in docs/shapes.md: images, their modes with the probabilities, and how much readers disagree.

Run it from the repository: python tools/draw_shapes.py. It needs matplotlib, which the library does not.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

from ambiseg.data.sets.shapes import Shapes

TARGET = Path(__file__).resolve().parent.parent / "docs" / "_static" / "shapes.png"
INK, GREY = "#1d2630", "#4a5663"
COLOURS = ["#f4f6f8", "#e4572e", "#3aa76d", "#2e86de"]  # ground and up to three classes
ROWS = [(Shapes(), 0), (Shapes(), 9), (Shapes(classes=4), 2)]
COLUMNS = 9  # image, seven masks, disagreement


def main() -> None:
    plt.rcParams.update({"font.size": 8, "text.color": INK})
    figure, grid = plt.subplots(len(ROWS), COLUMNS, figsize=(12.4, 1.7 * len(ROWS)))
    for (shapes, index), axes in zip(ROWS, grid, strict=True):
        many, outcomes, distribution = len(shapes.classes) > 2, shapes.outcomes(index), shapes.distribution(index)
        panels = []  # title, mask
        for k, (mode, label, offset, _) in enumerate(outcomes):
            if offset == 0:
                share = sum(o.probability for o in outcomes if (o.mode, o.label) == (mode, label))
                panels.append((f"{mode}{f' {label}' if many and label else ''}  {share:.2f}", k))
        if not many:  # where there is room: the shifts of the first mode's boundary
            body = sum(o.probability for o in outcomes if o.mode == "body")
            panels += [(f"shift {o.offset:+d}  {o.probability / body:.2f}", k) for k, o in enumerate(outcomes[:3])]
        for axis in axes:
            axis.axis("off")
        axes[0].imshow(np.moveaxis(shapes[index].image, 0, -1).squeeze(), cmap="gray", vmin=0, vmax=255)
        axes[0].set_title("image", loc="left")
        for axis, (title, k) in zip(axes[1:-1], panels, strict=True):
            axis.imshow(distribution.labels[0, k], cmap=ListedColormap(COLOURS), vmin=0, vmax=3)
            axis.set_title(title, loc="left")
        axes[-1].imshow(distribution.entropy(len(shapes.classes))[0], cmap="magma", vmin=0, vmax=float(np.log(3)))
        axes[-1].set_title("disagreement", loc="left", color=GREY)
    figure.subplots_adjust(left=0.005, right=0.995, top=0.95, bottom=0.01, wspace=0.06, hspace=0.18)
    figure.savefig(TARGET, dpi=130, metadata={"Software": ""})


if __name__ == "__main__":
    main()

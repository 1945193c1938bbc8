"""Draw the pictures in docs/nodules.md: real and simulated CT of the same nodules, and what the readers drew.

    python tools/compare_nodules.py lidc71.npz

The archive holds real crops of LIDC-IDRI: `image [N, 71, 71]` in Hounsfield units, `masks [N, 4, 71, 71]`,
`series_uid`, `z` and `pixel_spacing`. A table of both, which is printed, says how alike they are. It needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy.ndimage import binary_dilation, distance_transform_edt, gaussian_filter, label

from ambiseg.data.sets.nodules.cases import Nodules

STATIC = Path(__file__).resolve().parent.parent / "docs" / "_static"
INK, REAL, SIMULATED = "#1d2630", "#2e86de", "#e4572e"
COLOURS = ["#e4572e", "#3aa76d", "#2e86de", "#f2b134"]  # one a reader
PIXELS = 71
NEEDED = ("image", "masks", "series_uid", "z", "pixel_spacing")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("crops", type=Path, help="npz of real crops")
    parser.add_argument("--count", type=int, default=700, help="nodules in the table (default: 700)")
    options = parser.parse_args()
    try:
        with np.load(options.crops, allow_pickle=False) as file:
            crops = {name: file[name] for name in NEEDED}
    except (OSError, ValueError, KeyError) as error:
        print(f"compare_nodules: {options.crops}: expected an npz with {', '.join(NEEDED)}: {error}", file=sys.stderr)
        return 2
    pairs = match(crops)
    pairs = [pairs[i] for i in np.random.default_rng(1).permutation(len(pairs))]
    side_by_side(crops, pairs[:24])
    readers()
    table(crops, pairs[: options.count])
    return 0


def match(crops: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """Numbers of crops and of nodules that show the same masks of the same slice."""
    nodules = Nodules()
    slices: dict[tuple[str, float], list[int]] = {}
    for i in range(len(nodules)):
        slices.setdefault((nodules.record(i).series, nodules.record(i).z), []).append(i)
    pairs = []
    for n, (series, z) in enumerate(zip(crops["series_uid"].tolist(), crops["z"].tolist(), strict=True)):
        areas = sorted(crops["masks"][n].sum((1, 2)).tolist())
        same = [i for i in slices.get((series, z), []) if sorted(nodules.native(i).masks.sum((1, 2)).tolist()) == areas]
        pairs += [(n, i) for i in same[:1]]
    return pairs


def simulated(i: int) -> tuple[np.ndarray, np.ndarray]:
    """Image and masks on the pixels of the scanner, as many as the real crop has."""
    case = Nodules(PIXELS, Nodules().record(i).spacing)[i]
    return case.image[0], case.labels


def side_by_side(crops: dict[str, np.ndarray], pairs: list[tuple[int, int]]) -> None:
    """Rows of real crops, each above the simulation of the same nodules; nothing was picked."""
    columns = 8
    figure, grid = plt.subplots(2 * len(pairs) // columns, columns, figsize=(8.2, 2.1 * len(pairs) // columns + 0.1))
    for k, (n, i) in enumerate(pairs):
        row, column = 2 * (k // columns), k % columns
        for axis, image in ((grid[row, column], crops["image"][n]), (grid[row + 1, column], simulated(i)[0])):
            axis.imshow(image, cmap="gray", vmin=-1000, vmax=400, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        if not column:
            for axis, text, colour in ((grid[row, 0], "real", REAL), (grid[row + 1, 0], "simulated", SIMULATED)):
                axis.set_ylabel(text, color=colour, fontsize=9)
    figure.subplots_adjust(left=0.03, right=0.998, top=0.998, bottom=0.002, wspace=0.03, hspace=0.03)
    save(figure, "nodules-real-simulated.png")


def readers() -> None:
    """Cases as the data set gives them, with the outlines of those who drew something: by number of readers."""
    nodules = Nodules()
    figure, grid = plt.subplots(2, 8, figsize=(8.2, 2.35))
    marked = np.array([nodules.marked(i) for i in range(len(nodules))])
    rng = np.random.default_rng(4)
    chosen = [int(i) for k in (1, 2, 3, 4) for i in rng.choice(np.flatnonzero(marked == k), 4, replace=False)]
    order = [chosen[4 * (c // 2) + 2 * r + c % 2] for r in range(2) for c in range(8)]
    for axis, i in zip(grid.flat, order, strict=True):
        case = nodules[i]
        axis.imshow(case.image[0], cmap="gray", vmin=-1000, vmax=400, interpolation="nearest")
        for mask, colour in zip(case.labels, COLOURS, strict=True):
            if mask.any():
                axis.contour(mask, [0.5], colors=[colour], linewidths=0.8)
        axis.axis("off")
    for column, text in ((0, "1 reader"), (2, "2 readers"), (4, "3 readers"), (6, "4 readers")):
        grid[0, column].set_title(text, loc="left", fontsize=8, color=INK, pad=3)
    figure.subplots_adjust(left=0.002, right=0.998, top=0.93, bottom=0.002, wspace=0.03, hspace=0.03)
    save(figure, "nodules-readers.png")


def save(figure: plt.Figure, name: str) -> None:  # pyright: ignore[reportPrivateImportUsage]
    figure.savefig(STATIC / name, dpi=120, metadata={"Software": ""})
    print(f"{STATIC / name}: {(STATIC / name).stat().st_size // 1024} kB")


def grow(mask: np.ndarray, pixels: int) -> np.ndarray:
    return np.asarray(binary_dilation(mask, iterations=pixels), bool)


def measure(image: np.ndarray, masks: np.ndarray, spacing: float) -> dict[str, float]:
    """Numbers by which two kinds of image can be compared; nan where there is too little of what is measured."""
    image, masks = image.astype(float), masks[masks.any((1, 2))].astype(bool)
    anyone, share = masks.any(0), masks.mean(0)
    soft = gaussian_filter(image, 0.7)
    parts = np.zeros(image.shape, np.int32)
    label((gaussian_filter(image, 1.4 / spacing) > -300) & ~anyone, output=parts)
    wall = (np.bincount(parts.ravel()) * spacing**2 > 60)[parts] & (parts > 0)
    away = np.asarray(distance_transform_edt(~anyone)) * spacing
    lung = (away > 3) & ~grow(wall, 4)
    quiet = lung & ~grow(soft > -720, 2)
    power = np.abs(np.fft.fft2((image - image.mean()) * np.outer(np.hanning(PIXELS), np.hanning(PIXELS)))) ** 2
    frequency = np.hypot(np.fft.fftfreq(PIXELS)[:, None], np.fft.fftfreq(PIXELS))
    bands = [power[(frequency >= a) & (frequency < 2 * a)].mean() for a in (0.06, 0.12, 0.24)]
    down, right = np.gradient(soft, spacing)
    edge = np.hypot(down, right)[(away <= spacing) & (np.asarray(distance_transform_edt(anyone)) <= 1.5)]

    def over(mask: np.ndarray, values: np.ndarray, least: int = 1) -> np.ndarray:
        return values[mask] if mask.sum() >= least else np.array([np.nan])

    return {
        "lung, median, HU": float(np.median(over(lung, image, 200))),
        "noise and mottle in quiet lung, SD, HU": float(over(quiet, image, 200).std()) or np.nan,
        "its fine part (above 1 pixel), SD, HU": float(over(quiet, image - gaussian_filter(image, 1), 200).std())
        or np.nan,
        "vessels: share of lung above -600 HU, %": 100 * float(over(lung, soft > -600.0, 400).mean()),
        "chest wall and mediastinum, % of the image": 100 * float(wall.mean()),
        "nodule to wall, mm (none: 60)": float(away[wall].min()) if wall.any() else 60.0,
        "nodule where all readers agree, HU": float(over(share == 1, image).mean()),
        "where a minority drew, HU": float(over((share > 0) & (share < 0.5), image).mean()),
        "ring of 2.5 to 6 mm around it, median, HU": float(np.median(over((away > 2.5) & (away < 6), image))),
        "gradient at the outline, HU/mm": float(edge.mean()),
        "spectrum: power at 0.06-0.12 / 0.12-0.24 cycles a pixel, log10": float(np.log10(bands[0] / bands[1])),
        "spectrum: power at 0.12-0.24 / 0.24-0.48 cycles a pixel, log10": float(np.log10(bands[1] / bands[2])),
        "1st percentile, HU": float(np.percentile(image, 1)),
        "99th percentile, HU": float(np.percentile(image, 99)),
    }


def table(crops: dict[str, np.ndarray], pairs: list[tuple[int, int]]) -> None:
    """Print quartiles over the same nodules, real and simulated, as Markdown; then contrast by number of readers."""
    real = [measure(crops["image"][n], crops["masks"][n], float(crops["pixel_spacing"][n])) for n, _ in pairs]
    made = [measure(*simulated(i), Nodules().record(i).spacing) for _, i in pairs]
    print(f"\n{len(pairs)} nodules; 25 %, median, 75 %\n\n| | real | simulated |\n|---|---|---|")
    for name in real[0]:
        cells = []
        for rows in (real, made):
            quartiles = np.nanpercentile([row[name] for row in rows], [25, 50, 75])
            digits = 0 if np.abs(quartiles).max() >= 20 else 1 if np.abs(quartiles).max() >= 2 else 2
            cells.append(" / ".join(f"{q:.{digits}f}" for q in quartiles))
        print(f"| {name} | {' | '.join(cells)} |")
    nodules = Nodules()
    print("\n| nodule minus ring, where all agree, mean, HU | real | simulated |\n|---|---|---|")
    names = "nodule where all readers agree, HU", "ring of 2.5 to 6 mm around it, median, HU"
    for k in (1, 2, 3, 4):
        chosen = [j for j, (_, i) in enumerate(pairs) if nodules.marked(i) == k]
        means = [np.nanmean([rows[j][names[0]] - rows[j][names[1]] for j in chosen]) for rows in (real, made)]
        print(f"| marked by {k} | {means[0]:.0f} | {means[1]:.0f} |")


if __name__ == "__main__":
    sys.exit(main())

"""Fakes of street data in their official layouts, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

LABEL_IDS = (7, 8, 11, 21, 23, 24, 26, 0, 3, 255)  # road, sidewalk, building, vegetation, sky, person, car; void


def picture(path: Path, pixels: np.ndarray) -> Path:
    """Write bytes as PNG, with all folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def scene(rng: np.random.Generator, size: tuple[int, int], ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """An RGB picture ``[H, W, 3]`` and a map of blocks of ``ids``; each id has about one colour."""
    blocks = rng.choice(ids, (size[0] // 8, size[1] // 8)).astype(np.uint8)
    labels = blocks.repeat(8, 0).repeat(8, 1)
    colours = np.random.default_rng(5).integers(0, 256, (256, 3))
    noise = rng.integers(-20, 20, (*labels.shape, 3))
    return np.clip(colours[labels] + noise, 0, 255).astype(np.uint8), labels


def cityscapes(root: Path, frames: dict[str, str], size: tuple[int, int] = (64, 128)) -> Path:
    """``{frame: official part}`` as leftImg8bit/ and gtFine/, with the colour files that come along."""
    rng = np.random.default_rng(0)
    for name, part in frames.items():
        city = name.split("_")[0]
        image, labels = scene(rng, size, LABEL_IDS)
        picture(root / "leftImg8bit" / part / city / f"{name}_leftImg8bit.png", image)
        folder = root / "gtFine" / part / city
        picture(folder / f"{name}_gtFine_labelIds.png", labels)
        picture(folder / f"{name}_gtFine_color.png", image)
        (folder / f"{name}_gtFine_polygons.json").write_text("{}")
    return root


def camvid(path: Path, train: int = 6, val: int = 3, size: tuple[int, int] = (24, 32)) -> Path:
    """An .npz of frames, a film sequence for every two of them."""
    rng = np.random.default_rng(1)
    arrays: dict[str, np.ndarray] = {}
    for part, count in (("train", train), ("val", val)):
        made = [scene(rng, size, tuple(range(12))) for _ in range(count)]
        arrays[f"{part}_image"] = np.stack([image for image, _ in made])
        arrays[f"{part}_label"] = np.stack([labels for _, labels in made])
        arrays[f"{part}_name"] = np.array([f"{part}{i // 2}_{30 * i:05d}" for i in range(count)])
    np.savez_compressed(path, allow_pickle=False, **arrays)
    return path

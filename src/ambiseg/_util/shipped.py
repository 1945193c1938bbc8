"""The trained models that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"


def shipped(assets: Path | None = None) -> dict[str, Path]:
    """The folder of every model: those of ``assets`` that hold a run.

    >>> "demo" in shipped()
    True
    """
    place = ASSETS if assets is None else assets
    return {about.parent.name: about.parent for about in sorted(place.glob("*/run.json"))}


def in_words() -> str:
    """The names as help has them, such as ``a shipped model (demo, nodule-ct)``."""
    return f"a shipped model ({', '.join(shipped())})"

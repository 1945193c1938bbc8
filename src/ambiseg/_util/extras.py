"""Which extra of the package brings a library that is missing."""

from __future__ import annotations

_BRINGS = {
    "train": (
        "lightning",
        "torchmetrics",
        "rich",
        "platformdirs",
        "filelock",
        "safetensors",
        "yaml",
        "PIL",
        "tifffile",
    ),
    "medical": ("nibabel", "pydicom", "h5py"),
    "report": ("matplotlib", "jinja2"),
    "tensorboard": ("tensorboard",),
}


class MissingExtra(ImportError):
    """A part of ambiseg was used whose libraries are not installed."""


def explained(error: ModuleNotFoundError) -> ImportError:
    """The same error in one line that says what to install, where a library of an extra is missing.

    >>> print(explained(ModuleNotFoundError("No module named 'nibabel'", name="nibabel")))
    expected the package nibabel, found none; install it with: pip install 'ambiseg[medical]'
    """
    missing = (error.name or "").split(".")[0]
    for extra, libraries in _BRINGS.items():
        if missing in libraries:
            text = f"expected the package {missing}, found none; install it with: pip install 'ambiseg[{extra}]'"
            return MissingExtra(text, name=missing)
    return error

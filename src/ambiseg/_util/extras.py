"""Which extra of the package brings a library that is missing."""

from __future__ import annotations

from importlib.util import find_spec

_BRINGS = {
    "train": ("lightning", "torchmetrics", "rich", "platformdirs", "filelock", "PIL", "tifffile"),
    "medical": ("nibabel", "pydicom", "h5py", "highdicom"),
    "report": ("matplotlib", "jinja2"),
    "serve": ("fastapi", "uvicorn", "python_multipart"),
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "staple": ("SimpleITK",),
    "surfaces": ("monai",),
    "napari": ("napari",),
    "tensorboard": ("tensorboard",),
}


class MissingExtra(ImportError):
    """A part of ambiseg was used whose libraries are not installed."""


def require(*extras: str) -> None:
    """Raise :class:`MissingExtra` unless the libraries of these extras are installed."""
    for library in (library for extra in extras for library in _BRINGS[extra]):
        if find_spec(library) is None:
            raise explained(ModuleNotFoundError(name=library))


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

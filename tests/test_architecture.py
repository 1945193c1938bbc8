"""The rules of CONTRIBUTING that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import ambiseg
from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "src" / "ambiseg"

# Lower layers first; a module may import only from layers below its own (or from its own folder).
LAYERS = [
    {"_util", "schema"},
    {"masks"},
    {"regions"},
    {"overlap"},
    {"transport"},
    {"metrics"},
    {"streaming"},
    {"nn"},
    {"methods"},
    {"viz"},
    {"io"},
    {"data"},
    {"config"},
    {"runs"},
    {"training", "evaluation", "prediction"},
    {"report"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports_of(path) -> set[str]:
    """The parts of ambiseg that a file imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "ambiseg":
            found |= {alias.name for alias in node.names if alias.name != "__version__"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ambiseg."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ambiseg.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own in ("__init__", "__main__"):
        return
    assert own in LEVEL, f"{own} has no layer: add it to LAYERS and to README's map"
    for other in imports_of(path) - {own}:
        assert other in LEVEL, f"{path.name} imports {other} from the package's front door; name its module instead"
        assert LEVEL[other] < LEVEL[own], f"{own} must not import {other}, which lies above it"


HEAVY = ("lightning", "torchmetrics", "ot", "scipy", "matplotlib", "monai", "nibabel", "pydicom", "PIL", "rich")


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import ambiseg", ("torch", "numpy", *HEAVY)),
        ("from ambiseg import *", HEAVY),
        ("import ambiseg.data", HEAVY),
        ("from ambiseg.cli import parser; parser()", ("torch", *HEAVY)),
    ],
)
def test_imports_are_light(code, heavy):
    code += "; import sys; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for package in heavy:
        assert f"'{package}'" not in loaded, package


def test_every_public_name_is_where_the_front_door_says():
    for name in ambiseg.__all__:
        assert getattr(ambiseg, name) is not None
    assert set(ambiseg._HOMES) | set(ambiseg._MODULES) >= set(ambiseg.__all__)
    with pytest.raises(AttributeError, match="no attribute 'gedd'"):
        _ = ambiseg.gedd  # type: ignore[attr-defined]


def test_no_file_grows_past_easy_reading():
    for path in (*PACKAGE.rglob("*.py"), *(REPOSITORY / "tests").rglob("*.py")):
        assert len(path.read_text().splitlines()) <= 450, path

"""The rules of CONTRIBUTING that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

import ambiseg
from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "src" / "ambiseg"

# Lower layers first; a module may import only from layers below its own (or from its own room).
LAYERS = [
    "_util",
    "settings",
    "masks",
    "bits",
    "regions",
    "overlap",
    "transport",
    "energy",
    "intervals",
    "metrics",
    "decisions",
    "streaming",
    "nn",
    "methods",
    "viz",
    "io",
    "data.intensity",
    "data.case",
    "data.values",
    "data.augment",
    "data.rules",
    "data.splits",
    "data.loader",
    "data.stored",
    "data.store",
    "data.cache",
    "data.sets",
    "data.config",
    "data.module",
    "data.check",
    "data.export",
    "trainer_settings",
    "config",
    "costs history weights",
    "runs",
    "ensembles familiarity planning",
    "pruning",
    "training evaluation prediction",
    "exporting napari",
    "reporting",
    "comparison",
    "studies",
    "serving",
    "cli",
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
FRONT = ("__init__", "__main__", "data.__init__")  # doors, which import lazily


def room(module: str) -> str:
    """``data.sets.lidc.crops`` is in the room ``data.sets``, ``runs`` in a room of its own."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "data" and len(parts) > 1 else parts[0]


def imports_of(path) -> set[str]:
    """The modules of ambiseg that a file imports, at any depth of its code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in ("ambiseg", "ambiseg.data"):
            base = node.module.removeprefix("ambiseg").lstrip(".")
            found |= {f"{base}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "__version__"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ambiseg."):
            found.add(str(node.module).removeprefix("ambiseg."))
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("ambiseg.") for a in node.names if a.name.startswith("ambiseg.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    if module in FRONT:
        return
    own = room(module)
    assert own in LEVEL, f"{own} has no layer: add it to LAYERS and to README's map"
    for other in map(room, imports_of(path)):
        assert other in LEVEL, f"{module} imports {other} from a front door; name its module instead"
        assert other == own or LEVEL[other] < LEVEL[own], f"{own} must not import {other}, which lies above it"


def test_no_import_cycles():
    """Between modules, not only between rooms; imports inside of functions count as well."""
    modules = {
        ".".join(p.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): p
        for p in PACKAGE.rglob("*.py")
    }
    graph = {
        name: {other for other in imports_of(path) if other in modules and other != name}
        for name, path in modules.items()
        if name not in FRONT
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " → ".join((*way[way.index(name) :], name))
        if name in done:
            return
        for other in graph.get(name, ()):
            visit(other, (*way, name))
        done.add(name)

    for name in graph:
        visit(name, ())


# The paper's protocol, its split and its equations have its name wherever they are used or explained.
PUBLISHED = {"config", "data", "metrics", "overlap", "streaming", "transport"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_method_is_named_outside_of_methods(path):
    """Training, evaluation, prediction, reports and commands know what a Predictive offers, not whose it is."""
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own in ("methods", "nn", "__init__"):
        return
    text = path.read_text()
    assert "ambiseg.methods.mose" not in text
    splits = own == "cli" and path.stem in ("data", "lidc")
    assert own in PUBLISHED or splits or not re.search("mose", text, re.IGNORECASE)
    assert own == "transport" or not re.search(r"expert", text, re.IGNORECASE)


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

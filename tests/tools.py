"""The scripts in tools/ as modules, for tests."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.conftest import REPOSITORY


def tool(name: str) -> ModuleType:
    """``tools/<name>.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module

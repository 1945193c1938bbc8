"""Fixtures shared by all tests."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("AMBISEG_SHARED", REPOSITORY.parent / "shared"))

os.environ["AMBISEG_CACHE"] = _CACHE = tempfile.mkdtemp(prefix="ambiseg-tests-")  # not the user's own
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)

# In the background of a shell or under nohup signals are ignored, also by the programs that tests start and stop.
for _number in (getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")):
    if _number is not None and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

torch.set_num_threads(1)  # the tests' tensors are small: a second thread would only wait for the first

TINY = [  # a configuration that trains in seconds
    "--data.name=shapes",
    "--data.options={count: 60, size: 32}",
    "--data.batch_size=8",
    "--backbone.channels=[8, 16]",
    "--backbone.momentum=0.1",
    "--optimizer.lr=0.003",
    "--trainer.epochs=2",
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",  # bits are compared, and not every CPU has bfloat16
]

settings.register_profile("ambiseg", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ambiseg")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run: a small MoSE after two epochs on shapes. Copy it before changing anything in it."""
    from ambiseg.config import parse
    from ambiseg.training import train

    folder = tmp_path_factory.mktemp("runs") / "tiny run"
    train(parse(TINY), folder, quiet=True, command=["ambiseg", "train", "tiny"])
    return folder


@pytest.fixture(scope="session")
def demo_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the package as ONNX, which takes seconds to write."""
    from ambiseg.exporting import export

    path = tmp_path_factory.mktemp("export") / "demo.onnx"
    found = export("demo", path)
    assert (found.path, found.size, found.difference < 1e-4) == (path, path.stat().st_size, True)
    return path


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Tensor]:
    """Numbers that the authors' released code produced, by key; the test skips where the file is absent."""
    path = SHARED / "golden" / "loss_and_metrics.npz"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/{path.name}")
    arrays = dict(np.load(path))
    return lambda key: torch.from_numpy(np.asarray(arrays[key]))

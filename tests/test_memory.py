"""Errors of memory, as libraries really raise them."""

import errno

import numpy as np
import pytest
import torch

from ambiseg._util.memory import out_of_memory, total


def _raised(action):
    with pytest.raises((MemoryError, RuntimeError, ValueError, OSError)) as found:
        action()
    return found.value


@pytest.mark.parametrize(
    "action",
    [
        lambda: torch.empty(1 << 50),
        lambda: torch.empty(1 << 40, 1 << 40),
        lambda: np.empty(1 << 50),
        lambda: np.zeros((1 << 40, 1 << 40)),
        lambda: bytearray(1 << 60),
    ],
    ids=["torch", "torch overflow", "numpy", "numpy overflow", "python"],
)
def test_errors_of_memory_are_recognised(action):
    line = out_of_memory(_raised(action), "train")
    assert line is not None
    assert line.startswith("expected to have enough memory, found ")
    assert "--data.batch_size" in line
    assert "\n" not in line


def test_the_amount_is_named_where_the_library_says_it():
    assert "4,503,599.6 GB" in (out_of_memory(_raised(lambda: torch.empty(1 << 50))) or "")
    assert "21.5 GB" in (out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB.")) or "")
    assert "21.5 GB" in (out_of_memory(MemoryError("Unable to allocate 20.0 GiB for an array")) or "")
    assert "too little" in (out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory")) or "")


@pytest.mark.parametrize(
    "error", [ValueError("expected 3"), RuntimeError("size mismatch"), KeyError("memory"), OSError(2, "")]
)
def test_other_errors_are_not(error):
    assert out_of_memory(error) is None


def test_a_machine_has_some_memory():
    assert total() > 1 << 20

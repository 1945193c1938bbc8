"""``trainer.precision: auto``: bfloat16 where the hardware computes with it faster than with 32 bits."""

from __future__ import annotations

import torch

AUTO, MIXED, FULL, HALF = "auto", "bf16-mixed", "32-true", "16-mixed"


def fast_bf16(accelerator: str = "auto") -> bool:
    """Whether the device that Lightning calls ``accelerator`` has instructions for bfloat16.

    PyTorch also emulates them, on a CPU many times slower than 32 bits: that does not count.
    """
    if accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available()):
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    if _on_cpu(accelerator):
        describe = getattr(torch.cpu, "get_capabilities", dict)  # absent before PyTorch 2.10
        found = describe()
        return bool(found.get("amx_bf16") or found.get("avx512_bf16"))
    return False


def _on_cpu(accelerator: str) -> bool:
    others = torch.cuda.is_available() or torch.backends.mps.is_available()
    return accelerator == "cpu" or (accelerator == "auto" and not others)


def resolve(asked: str, accelerator: str, begun: str | None = None) -> tuple[str, str]:
    """The precision that a training is run in, in Lightning's words, and why, in a few of ours.

    Args:
        asked: the setting; anything but ``auto`` is taken as it is.
        accelerator: the setting of that name.
        begun: the precision of a run that is resumed. ``auto`` keeps it, so that the run goes on as if it had not
            stopped.

    >>> resolve("32-true", "cpu")
    ('32-true', 'as asked')
    >>> resolve("16-mixed", "cpu")
    ('bf16-mixed', 'a CPU has it in place of 16-mixed')
    >>> resolve("auto", "cpu", begun="32-true")
    ('32-true', 'as the run began')
    """
    if asked == AUTO and begun is not None:
        slow = begun == MIXED and not fast_bf16(accelerator)
        emulated = (
            f"; this device has no instructions for it, and --trainer.precision {FULL} is faster but not the same"
        )
        return begun, "as the run began" + (emulated if slow else "")
    if asked == HALF and _on_cpu(accelerator):
        return MIXED, f"a CPU has it in place of {HALF}"
    if asked != AUTO:
        return asked, "as asked" if begun in (None, asked) else f"as asked; the run began with {begun}"
    if fast_bf16(accelerator):
        return MIXED, f"this device computes with bfloat16; --trainer.precision {FULL} for 32 bits"
    return FULL, "this device has no instructions for bfloat16"

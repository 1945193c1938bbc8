"""The ``trainer`` section: only what training, resuming, evaluating and predicting all can do."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from ambiseg._util.text import did_you_mean
from ambiseg.settings import EPOCHS, Settings, shown

# The precisions that methods are trained in, by all their names of Lightning's.
PRECISIONS = {
    "32-true": "32-true", "32": "32-true",
    "bf16-mixed": "bf16-mixed", "bf16": "bf16-mixed",
    "16-mixed": "16-mixed", "16": "16-mixed",
}  # fmt: skip
_DEVICES = re.compile(r"auto|-1|[1-9]\d{0,5}|\d{1,6}(,\d{1,6})*,?", re.ASCII)


class TrainerConfig(Settings):
    """How long, and on what."""

    epochs: int = Field(default=30, ge=1, le=EPOCHS, description="passes through the training set")
    accelerator: str = Field(default="auto", description="auto, cpu, gpu, mps and others that Lightning knows")
    devices: int | str = Field(default=1, description='how many devices, or which: 2, "0,3", auto')
    num_nodes: int = Field(default=1, ge=1, le=10_000, description="machines")
    strategy: Literal["auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false"] = Field(
        default="auto", description="how several processes train together; auto is ddp where there are several"
    )
    precision: str = Field(
        default="auto",
        examples=["auto", *dict.fromkeys(PRECISIONS.values())],
        description="auto: bf16-mixed on devices that have instructions for it, 32-true on others; or one of these, "
        "or 16-mixed, for GPUs without bfloat16",
    )
    accumulate: int = Field(default=1, ge=1, le=10**6, description="batches whose gradients are added before a step")
    channels_last: bool = Field(
        default=True,
        description="keep the features of a pixel side by side in memory: faster on CPUs and in mixed precision",
    )
    threads: int | None = Field(default=None, ge=1, le=1024, description="CPU threads of PyTorch; null: its own choice")
    check_every: int = Field(default=1, ge=1, le=EPOCHS, description="epochs from one validation to the next")
    look: bool = Field(
        default=True,
        description="when the training has ended, look at images of it, so that predictions say when a person must "
        "look (``look.npz``)",
    )
    tensorboard: bool = Field(default=False, description="also write TensorBoard logs; needs the package tensorboard")
    deterministic: bool = Field(
        default=False, description="only algorithms that repeat to the last bit, where a device has a choice"
    )

    @field_validator("precision")
    @classmethod
    def _computed_in(cls, name: str) -> str:
        """The whole name. Weights and losses are in 32 bits: ``16-true``, ``64-true`` and others are not trained in."""
        if name != "auto" and name not in PRECISIONS:
            known = ["auto", *dict.fromkeys(PRECISIONS.values())]
            raise ValueError(f"expected one of {', '.join(known)}, found {shown(name)}{did_you_mean(name, known)}")
        return PRECISIONS.get(name, name)

    @field_validator("devices")
    @classmethod
    def _countable(cls, devices: int | str) -> int | str:
        known = 1 <= devices <= 10**5 or devices == -1 if isinstance(devices, int) else _DEVICES.fullmatch(devices)
        if not known or len(str(devices)) > 1000:
            raise ValueError(f'expected how many, which ("0,3"), -1 for all, or auto, found {str(devices)[:40]!r}')
        return devices

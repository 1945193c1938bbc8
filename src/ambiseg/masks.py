"""The one currency: a distribution of masks, for annotations and for predictions alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.bands import bands
from ambiseg._util.errors import DataError
from ambiseg._util.files import atomic_write
from ambiseg._util.npz import open_npz
from ambiseg._util.reading import Unreadable, open_regular

T = TypeVar("T")
_FORMAT = "ambiseg.MaskDistribution/1"
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32)
_AT_ONCE = 1 << 24  # pixels, or labels of them, that are widened at a time
_TOLERANCE = 1e-4  # how far a row of weights may be from 1: float32 sums of thousands of samples stay well inside


@dataclass(frozen=True, eq=False)
class MaskDistribution:
    """Weighted masks of a batch of images:  μ_b = Σ_i weights[b, i] · δ(labels[b, i]).

    Annotations and predictions are both this type, so every metric takes two of them.

    Args:
        labels: ``[B, N, H, W]`` or ``[B, N, D, H, W]`` integer class ids (bool is read as 0/1).
        weights: ``[B, N]``, rows sum to 1; ``None`` means equal. 0 is an absent annotator (padding): its mask
            counts nowhere, whatever it holds.
        valid: ``[B, H, W]`` (``[B, D, H, W]``) bool. ``False`` is a void pixel: it counts nowhere, whatever
            label it holds. ``None`` means that every pixel counts.
        marginal: ``[B, C, H, W]`` weighted mean of soft predictions, when the producer has it.

    NumPy arrays are taken as they are. Ranks, shapes and dtypes are always checked; values (negative ids,
    weights that do not sum to 1) are checked on the CPU at construction, and on an accelerator only by an
    explicit :meth:`check_values`, because looking at a value there would wait for the device.

    >>> readers = MaskDistribution(torch.tensor([[[[0, 1]], [[1, 1]]]]))     # one image 1×2, two readers
    >>> readers
    MaskDistribution(1 image of 1×2, 2 masks, equal weights)
    >>> readers.marginal_probs(classes=2)[0, 1]
    tensor([[0.5000, 1.0000]])
    """

    labels: Tensor
    weights: Tensor | None = None
    valid: Tensor | None = None
    marginal: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _as_tensor(getattr(self, field.name), field.name))
        if self.labels.dtype == torch.bool:
            object.__setattr__(self, "labels", self.labels.to(torch.uint8))
        self._check_form()
        if self.labels.is_cpu:
            self.check_values()

    # -- shape ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of images."""
        return self.labels.shape[0]

    @property
    def count(self) -> int:
        """Number of masks per image, padding included."""
        return self.labels.shape[1]

    @property
    def spatial(self) -> torch.Size:
        """``(H, W)`` or ``(D, H, W)``."""
        return self.labels.shape[2:]

    @property
    def device(self) -> torch.device:
        """Where all its tensors are."""
        return self.labels.device

    @property
    def mass(self) -> Tensor:
        """The weights ``[B, N]``, written out when they are equal."""
        if self.weights is not None:
            return self.weights
        return torch.full(self.labels.shape[:2], 1 / self.count, device=self.device)

    # -- what it says about a pixel ------------------------------------------------------------------------

    def class_ids(self, classes: int) -> Tensor:
        """The labels as int64, 0 wherever they count nowhere (void, padding); ``ValueError`` from ``classes`` up."""
        labels = self._counted()
        if labels.is_cpu and (top := int(labels.max())) >= classes:
            image, mask = (labels.flatten(2).amax(2) == top).nonzero()[0].tolist()
            raise ValueError(
                f"class ids must be below classes={classes}, found {top} in mask {mask} of image {image} "
                "(mark pixels that do not count with `valid`)"
            )
        return labels

    def check_classes(self, classes: int) -> None:
        """``ValueError`` for class ids from ``classes`` up, and for a marginal of another number of classes."""
        for part in self.bands(max(1, _AT_ONCE // self.count)):
            part.class_ids(classes)
        self._check_marginal(classes)

    def _check_marginal(self, classes: int) -> None:
        if self.marginal is not None and self.marginal.shape[1] != classes:
            raise ValueError(f"expected a marginal of {classes} classes, found {self.marginal.shape[1]}")

    def bands(self, most: int = _AT_ONCE) -> Iterator[MaskDistribution]:
        """The same masks, at most ``most`` pixels of each image at a time, as images of one row; of small ones, itself.

        >>> [tuple(part.spatial) for part in MaskDistribution(torch.zeros(1, 2, 3, 5, dtype=torch.uint8)).bands(8)]
        [(1, 8), (1, 7)]
        """
        pixels = self.spatial.numel()
        return iter([self]) if pixels <= most else map(self._band, bands(pixels, most))

    def _band(self, band: slice) -> MaskDistribution:
        """Some of the pixels, in the order of rows; what was checked once is not checked again."""
        made, pixels = object.__new__(MaskDistribution), -len(self.spatial)
        flat = {k: v if k == "weights" else v.flatten(pixels)[..., None, band] for k, v in self._tensors().items()}
        vars(made).update({"weights": None, "valid": None, "marginal": None, **flat})
        return made

    def _counted(self) -> Tensor:
        labels = self.labels.long()
        if self.weights is not None:
            labels = labels * (self.weights > 0)[(...,) + (None,) * len(self.spatial)]
        return labels if self.valid is None else labels * self.valid[:, None]

    def marginal_probs(self, classes: int) -> Tensor:
        """Pixel-wise probability of each class ``[B, classes, *spatial]``; 0 at void pixels.

        p(c at pixel) = Σ_i weights[i] · [labels[i] = c], or the producer's own soft ``marginal`` where there is one.
        """
        if self.marginal is not None:
            self._check_marginal(classes)
            probs = self.marginal.clamp_min(0)  # rounding may leave a probability just below 0
        elif self.labels.numel() > 4 * _AT_ONCE:  # a number of 64 bits for each label would not fit
            parts = [part.marginal_probs(classes) for part in self.bands(max(1, _AT_ONCE // self.count))]
            return torch.cat(parts, 3).view(len(self), classes, *self.spatial)
        else:
            labels = self.class_ids(classes)
            mass = self.mass[(...,) + (None,) * len(self.spatial)].expand(labels.shape)
            probs = mass.new_zeros(len(self), classes, *self.spatial).scatter_add_(1, labels, mass)
        return probs if self.valid is None else probs * self.valid[:, None]

    def entropy(self, classes: int | None = None) -> Tensor:
        """Pixel entropy map ``[B, *spatial]`` in nats, −Σ_c p_c log p_c of the marginal; 0 at void pixels."""
        return torch.special.entr(self.marginal_probs(self.classes if classes is None else classes)).sum(1)

    @property
    def classes(self) -> int:
        """The number of classes of the marginal; without one, the largest id that counts and one more."""
        if self.marginal is not None:
            return self.marginal.shape[1]
        return 1 + max(int(part._counted().max()) for part in self.bands(max(1, _AT_ONCE // self.count)))

    def kept(self, what: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` computes of these masks, once. As their own tensors it is not changed in place."""
        made = vars(self).setdefault("_kept", {})
        if what not in made:
            made[what] = make()
        return made[what]

    # -- moving, slicing, joining --------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> MaskDistribution:
        """The same masks on another device."""
        return replace(self, **{k: v.to(device) for k, v in self._tensors().items()})

    def __getitem__(self, images: int | slice | Sequence[int] | Tensor | np.ndarray) -> MaskDistribution:
        """Some of the images, by number, slice, list of numbers or one bool per image; always a distribution."""
        if isinstance(images, slice):
            return replace(self, **{k: v[images] for k, v in self._tensors().items()})
        chosen = torch.as_tensor(images)
        if chosen.dtype == torch.bool and chosen.shape == (len(self),):
            chosen = chosen.nonzero().flatten()
        elif chosen.dtype in _INTEGERS and chosen.ndim <= 1:
            chosen = chosen.long().reshape(-1)
        else:
            raise IndexError(f"expected image numbers or {len(self)} bools, found {chosen.dtype} {list(chosen.shape)}")
        wrong = chosen[(chosen < -len(self)) | (chosen >= len(self))]
        if len(wrong):
            raise IndexError(f"image {int(wrong[0])} of a distribution of {len(self)}")
        chosen = chosen.to(self.device)
        return replace(self, **{k: v[chosen] for k, v in self._tensors().items()})

    def draw(self, count: int, generator: torch.Generator | None = None) -> MaskDistribution:
        """``count`` masks per image, drawn independently with the weights as probabilities: equally weighted.

        >>> one = MaskDistribution(torch.tensor([[[[0]], [[1]]]]), torch.tensor([[0.0, 1.0]])).draw(1)
        >>> one.labels.flatten().tolist(), one.weights
        ([1], None)
        """
        drawn = torch.multinomial(self.mass, count, replacement=True, generator=generator)
        image = torch.arange(len(self), device=self.device)[:, None]
        return MaskDistribution(self.labels[image, drawn], valid=self.valid)

    def __iter__(self) -> Iterator[MaskDistribution]:
        return (self[i] for i in range(len(self)))

    @staticmethod
    def concat(parts: Sequence[MaskDistribution]) -> MaskDistribution:
        """Join along the images. Fewer masks than the widest part are padded with masks of weight 0.

        >>> two, three = (MaskDistribution(torch.zeros(1, n, 4, 4, dtype=torch.uint8)) for n in (2, 3))
        >>> MaskDistribution.concat([two, three]).mass
        tensor([[0.5000, 0.5000, 0.0000],
                [0.3333, 0.3333, 0.3333]])
        """
        parts = [as_masks(part) for part in parts]
        if not parts:
            raise ValueError("expected at least one distribution to join, found none")
        if len(found := {tuple(part.spatial) for part in parts}) > 1:
            raise ValueError(f"expected masks of one size, found {' and '.join(map(_size, sorted(found)))}")
        if len({part.marginal is None for part in parts}) > 1:
            raise ValueError("expected a marginal in every part or in none, found some with and some without")
        if len(found := {part.marginal.shape[1] for part in parts if part.marginal is not None}) > 1:
            raise ValueError(
                f"expected marginals of one number of classes, found {' and '.join(map(str, sorted(found)))}"
            )
        widest = max(part.count for part in parts)
        weighted = any(part.weights is not None or part.count < widest for part in parts)
        masked = any(part.valid is not None for part in parts)

        def pad(x: Tensor) -> Tensor:
            return torch.cat([x, x.new_zeros(len(x), widest - x.shape[1], *x.shape[2:])], 1)

        def everywhere(part: MaskDistribution) -> Tensor:
            return torch.ones(len(part), *part.spatial, dtype=torch.bool, device=part.device)

        dtypes = {part.labels.dtype for part in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.int64
        marginals = [part.marginal for part in parts if part.marginal is not None]
        return MaskDistribution(
            labels=torch.cat([pad(part.labels).to(dtype) for part in parts]),
            weights=torch.cat([pad(part.mass) for part in parts]) if weighted else None,
            valid=torch.cat([everywhere(p) if p.valid is None else p.valid for p in parts]) if masked else None,
            marginal=torch.cat(marginals) if marginals else None,
        )

    # -- files ---------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an ``.npz`` of plain arrays. The file appears whole or not at all."""
        arrays = {k: v.detach().cpu() for k, v in self._tensors().items()}
        arrays = {k: (v.float() if v.dtype == torch.bfloat16 else v).numpy() for k, v in arrays.items()}
        arrays["format"] = np.array(_FORMAT)
        with atomic_write(path) as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> MaskDistribution:
        """Read what :meth:`save` wrote; :class:`~ambiseg._util.errors.DataError` for anything else.

        Nothing in the file is executed: pickled objects are refused. Sizes are judged by headers before anything is
        allocated, see :mod:`ambiseg._util.limits`.
        """
        known = [field.name for field in fields(MaskDistribution)]
        try:
            with open_regular(path) as handle, open_npz(handle) as file:
                found = str(file.read("format")) if "format" in file.names and not file.header("format").shape else ""
                if found != _FORMAT or "labels" not in file.names or not {*file.names} <= {*known, "format"}:
                    raise ValueError(f"expected an npz of {_FORMAT}, found another kind of file")
                arrays = {name: _as_tensor(file.read(name), name) for name in known if name in file.names}
            return MaskDistribution(**arrays)  # type: ignore[arg-type]
        except (FileNotFoundError, Unreadable):
            raise
        except Exception as error:  # a damaged archive fails in more ways than can be listed: zlib, zip, headers
            said = " ".join(str(error).split())
            raise DataError(f"{os.fspath(path)}: cannot be read as a MaskDistribution: {said}") from None

    # -- checks --------------------------------------------------------------------------------------------

    def check_values(self) -> None:
        """Raise ``ValueError`` for negative class ids, bad weights and marginals that are not probabilities."""
        if self.labels.dtype.is_signed and (low := int(self.labels.min())) < 0:
            raise ValueError(f"class ids must not be negative, found {low} (mark void pixels with `valid`)")
        if self.weights is not None:
            check_weights(self.weights)
        if self.marginal is not None:
            marginal = self.marginal.detach()
            low, high = (float(x) for x in torch.aminmax(marginal))
            if not (low >= -_TOLERANCE and high <= 1 + _TOLERANCE):  # also catches nan
                # A network whose weights or images are absurd predicts nan: that is no fault of the program's.
                raise DataError(f"marginal must hold probabilities in [0, 1], found {low:.4g} to {high:.4g}")
            parts = [torch.aminmax(part.float().sum(1)) for part in marginal.flatten(2).split(_AT_ONCE, 2)]
            low, high = float(min(part.min for part in parts)), float(max(part.max for part in parts))
            if not (low >= 0.99 and high <= 1.01):  # half precision is this coarse
                raise ValueError(f"marginal must sum to 1 over the classes, found sums of {low:.4g} to {high:.4g}")

    def _check_form(self) -> None:
        labels, spatial = self.labels, self.labels.shape[2:]
        if labels.dtype not in _INTEGERS:
            raise ValueError(f"labels must be integer class ids, found {labels.dtype}")
        if labels.ndim not in (4, 5):
            raise ValueError(f"labels must be [B, N, H, W] or [B, N, D, H, W], found shape {list(labels.shape)}")
        if 0 in labels.shape:
            raise ValueError(f"labels must hold at least one image, mask and pixel, found shape {list(labels.shape)}")
        B, N = labels.shape[:2]
        if self.weights is not None:
            _expect(self.weights, "weights", (B, N), floating=True)
        if self.valid is not None:
            _expect(self.valid, "valid", (B, *spatial), dtype=torch.bool)
        if self.marginal is not None:
            if self.marginal.ndim < 2 or self.marginal.shape[1] == 0:
                raise ValueError(f"marginal must be [B, C, *spatial], found shape {list(self.marginal.shape)}")
            _expect(self.marginal, "marginal", (B, self.marginal.shape[1], *spatial), floating=True)
        if len(devices := {str(x.device) for x in self._tensors().values()}) > 1:
            raise ValueError(f"expected all tensors on one device, found {' and '.join(sorted(devices))}")

    def _tensors(self) -> dict[str, Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def __repr__(self) -> str:
        plural = "" if len(self) == 1 else "s"
        text = f"{len(self)} image{plural} of {_size(self.spatial)}, {self.count} mask{'s' * (self.count != 1)}"
        text += ", equal weights" if self.weights is None else ", weighted"
        text += "" if self.valid is None else ", void pixels"
        return f"MaskDistribution({text}{'' if self.marginal is None else ', soft marginal'})"


Masks: TypeAlias = MaskDistribution | Tensor | np.ndarray
"""What every metric takes: a distribution, or a bare stack ``[B, N, *spatial]`` of equally likely masks."""


def as_masks(masks: Masks) -> MaskDistribution:
    """A distribution as it is; a bare stack of masks as equally likely ones."""
    return masks if isinstance(masks, MaskDistribution) else MaskDistribution(masks)  # type: ignore[arg-type]


def common_valid(a: MaskDistribution, b: MaskDistribution) -> Tensor | None:
    """Where both count a pixel, ``[B, *spatial]``; ``None`` when neither has void pixels."""
    if a.valid is None or b.valid is None:
        return b.valid if a.valid is None else a.valid
    return a.valid & b.valid


def check_weights(weights: Tensor, name: str = "weights") -> None:
    """Raise ``ValueError`` unless every row of ``weights [B, N]`` is a probability distribution."""
    weights = exact(weights.detach())
    sums = weights.sum(1)
    wrong = ~((weights >= 0).all(1) & ((sums - 1).abs() <= _TOLERANCE))  # `not ≤` so that nan is wrong too
    if wrong.any():
        row = int(wrong.nonzero()[0])
        low = float(weights[row].min())
        found = f"sum to {float(sums[row]):.6g}" if low >= 0 else f"hold {low:.4g}"
        raise ValueError(f"{name} must be non-negative and sum to 1 for each image, but those of image {row} {found}")


def exact(x: Tensor) -> Tensor:
    """``x`` in float64, or in float32 on the devices that have nothing better (Apple's)."""
    return x.float() if x.device.type == "mps" else x.double()


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` as it is, or in float32 where it is of half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _expect(x: Tensor, name: str, shape: tuple[int, ...], floating: bool = False, dtype: torch.dtype | None = None):
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)} to fit the labels, found {list(x.shape)}")
    if floating and not x.is_floating_point():
        raise ValueError(f"{name} must be floating point, found {x.dtype}")
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, found {x.dtype}")


def _as_tensor(x: object, name: str) -> Tensor | None:
    if x is None and name != "labels":
        return None
    if isinstance(x, Tensor):
        return x
    if isinstance(x, np.ndarray):
        if x.dtype.kind not in "buif":
            raise ValueError(f"{name} must be an array of numbers, found dtype {x.dtype}")
        if not x.flags.writeable or min(x.strides, default=0) < 0 or not x.dtype.isnative:
            x = np.array(x, dtype=x.dtype.newbyteorder("="))  # torch takes no such array as it is
        return torch.from_numpy(x)
    raise ValueError(f"{name} must be a torch tensor or a NumPy array, found {type(x).__name__}")


def _size(spatial: Sequence[int]) -> str:
    return "×".join(map(str, spatial))

"""The pixel head: latent noise modulates the features, three 1×1 convolutions follow.

A sample n adds a shift b_n to the dense features and multiplies a scale s_n, then runs a small network pixel by pixel:

    h₁ = relu(W₁ [(u + b_n) · s_n] + a₁),   h₂ = relu(W₂ h₁ + a₂),   logits = W₃ h₂ + a₃.

Nothing but its first layer knows the sample: shift and scale fold into W₁, which becomes one matrix a sample,
h₁ = relu((W₁ diag s_n) u + W₁(b_n · s_n) + a₁). A tile of pixels then runs through all samples as a few matrix products
``[pixels · N, channels]`` that stay in the cache, and the backward pass recomputes a tile instead of remembering it.

Training needs sums over regions (:mod:`ambiseg.regions`), not logits: :func:`region_sums` adds up each tile's softmax
or log-softmax and drops it, so that logits ``[N, C, P]`` never exist. :func:`draw_masks` does the same for label maps.

Under autocast to bfloat16 the matrix products of training are in bfloat16, whose products PyTorch adds up in float32.
From the logits on, everything is in float32 at least: softmax, sums over regions, and the gradients of the weights,
which are added up over tiles. Masks and marginals are always computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ambiseg.energy import add_apart, apart_gradient
from ambiseg.masks import at_least_float32, exact
from ambiseg.overlap import full_precision
from ambiseg.regions import Regions, add_rows


class Folded(NamedTuple):
    """A pixel head with its noise folded in: what the tiled functions run.

    Attributes:
        weight: ``[B, N, H, F]`` first layer of each sample; ``[B, 1, H, F]`` where samples differ by their bias alone.
        bias: ``[B, N, H]``.
        rest: (weight ``[out, in]``, bias ``[out]``) of the other layers, in order; the last one gives C logits.
    """

    weight: Tensor
    bias: Tensor
    rest: tuple[tuple[Tensor, Tensor], ...]

    @property
    def classes(self) -> int:
        return self.rest[-1][0].shape[0]

    def to(self, dtype: torch.dtype) -> Folded:
        rest = tuple((w.to(dtype), a.to(dtype)) for w, a in self.rest)
        return Folded(self.weight.to(dtype), self.bias.to(dtype), rest)


# -- what callers use ------------------------------------------------------------------------------------------


def as_rows(dense: Tensor) -> Tensor:
    """``[B, F, H, W] -> [B, P, F]``: one pixel a row, as the tiled functions read it."""
    return dense.flatten(2).transpose(1, 2).contiguous()


def pixel_logits(rows: Tensor, head: Folded, tile: int | None = None) -> Tensor:
    """Logits of every sample, remembering nothing but the inputs:  ``[B, P, F] -> [B, N, C, P]``."""
    return _apply(_PixelLogits, rows, head, None, tile)[0]


def plain_logits(dense: Tensor, head: Folded) -> Tensor:
    """The same in products of whole maps, which ``torch.export`` can follow:  ``[B, F, H, W] -> [B, N, C, H, W]``."""
    x = head.weight @ dense.flatten(2)[:, None] + head.bias[..., None]
    for weight, bias in head.rest:
        x = weight @ x.relu() + bias[:, None]
    return x.unflatten(3, dense.shape[2:])


class Sums(NamedTuple):
    """What :func:`region_sums` finds.

    Attributes:
        regions: R ``[B, N, C, U]``.
        modes: ``[B, K, P]`` the class that each expert's mean output finds most likely, without gradient.
        apart: ``[B, C - 1, N (N - 1) / 2]`` Σ_p |s_i − s_j| of each foreground class, of all pairs i < j of samples.
    """

    regions: Tensor
    modes: Tensor | None
    apart: Tensor | None


def region_sums(
    rows: Tensor,
    head: Folded,
    regions: Regions,
    log: bool = False,
    experts: int | None = None,
    pairs: bool = False,
    tile: int | None = None,
) -> Sums:
    """Sums of the softmax (or log-softmax) over regions without ever holding logits:

        R[b, n, c, u] = Σ_{p in u} softmax(logits_n[:, p])[c]        [B, N, C, U]

    Args:
        rows: dense features ``[B, P, F]``.
        head: samples folded into the first layer; those of one expert stand next to each other.
        log: sum log-probabilities (cross-entropy) instead of probabilities (IoU).
        experts: K. When given, ``modes`` are found: what soft gradients group experts by.
        pairs: find ``apart``; not with ``log``.
        tile: pixels at a time; chosen by device when ``None``.
    """
    if pairs and log:
        raise ValueError("pairs are of probabilities, found log=True")
    settings = (regions.index.long(), regions.size, log, experts, pairs)
    sums, labels, apart = _apply(_RegionSums, rows, head, settings, tile)
    return Sums(sums, labels if experts else None, apart if pairs else None)


@torch.no_grad()
def draw_masks(rows: Tensor, head: Folded, weights: Tensor, tile: int | None = None) -> tuple[Tensor, Tensor]:
    """Label maps ``[B, N, P]`` (uint8 up to 256 classes) and the weighted mean of the softmax ``[B, C, P]``."""
    with full_precision(rows):
        return _forward_only(rows, head, weights, tile, masks=True)


@torch.no_grad()
def mean_softmax(rows: Tensor, head: Folded, weights: Tensor, tile: int | None = None) -> Tensor:
    """The weighted mean over samples of the softmax, ``[B, C, P]``, holding one tile of logits at a time."""
    with full_precision(rows):
        return _forward_only(rows, head, weights, tile, masks=False)[1]


def _forward_only(rows: Tensor, head: Folded, weights: Tensor, tile: int | None, masks: bool) -> tuple[Tensor, Tensor]:
    rows, head = _unflatten(_arguments(rows, head))
    (B, P, _), N, dtype = rows.shape, head.bias.shape[1], label_dtype(head.classes)
    head, weights = _margin(head), weights.to(rows.dtype)
    (last, bias), C = head.rest[-1], head.classes
    labels = torch.empty(B, N if masks else 0, P, dtype=dtype, device=rows.device)
    marginal = rows.new_empty(B, C, P)
    for b, some, layers in _tiles(rows, head, tile):
        # One row a class, unlike in training: comparing and adding up classes then runs along many pixels.
        scores = torch.addmm(bias[:, None], last, layers(rows[b, some], False)[-1].t())  # [C, T·N]
        if masks:
            chosen = scores[0] > 0 if C == 1 else _first_of_greatest(scores)
            labels[b, :, some] = chosen.view(-1, N).t()
        marginal[b, :, some] = _probs(scores, 0).view(C, -1, N) @ weights[b]
    return labels, marginal if C > 1 else torch.cat([1 - marginal, marginal], 1)


def _first_of_greatest(scores: Tensor) -> Tensor:
    """``scores.argmax(0)`` of ``[C, R]``, whose own loop on the CPU takes as long as all matrix products before it."""
    C = len(scores)
    if not scores.is_cpu or C > 255:
        return scores.argmax(0)
    greatest = scores.numpy() == scores.amax(0).numpy()
    return torch.from_numpy(C - (greatest.view(np.uint8) * np.arange(C, 0, -1, dtype=np.uint8)[:, None]).max(0))


def label_dtype(classes: int) -> torch.dtype:
    """The smallest type that this project keeps label maps of so many classes in."""
    return torch.uint8 if classes <= 256 else torch.int64


# -- tiles -----------------------------------------------------------------------------------------------------

Layers = Callable[..., list[Tensor]]
Gradient = Callable[[slice, Tensor], Tensor]


def _tile_size(rows: Tensor, samples: int, hidden: int) -> int:
    """Pixels at a time: on the CPU hidden rows of all samples fill a megabyte, elsewhere a quarter gigabyte."""
    floats = 2**18 if rows.is_cpu else 2**26
    return max(16, floats // (samples * hidden))


def _tiles(rows: Tensor, head: Folded, tile: int | None) -> Iterator[tuple[int, slice, Layers]]:
    """Image, slice of pixels, and the layers of that image's samples."""
    N, H = head.bias.shape[1:]
    shared = head.weight.shape[1] < N  # the first layer: all samples have one product
    size = _tile_size(rows, N, H) if tile is None else tile
    for b in range(len(rows)):
        weight, bias = head.weight[b].flatten(0, 1).t(), head.bias[b].flatten()

        def layers(x: Tensor, last: bool = True, weight: Tensor = weight, bias: Tensor = bias) -> list[Tensor]:
            """[T, F] -> activations of every layer, [T·N, ·]; the last are logits, unless they are left out."""
            first = (x @ weight)[:, None] + bias.view(N, H) if shared else torch.addmm(bias, x, weight)
            values = [_relu_(first).view(-1, H)]
            for w, a in head.rest[:-1]:
                values.append(_relu_(torch.addmm(a, values[-1], w.t())))
            if last:
                w, a = head.rest[-1]
                values.append(torch.addmm(a, values[-1], w.t()))
            return values

        for start in range(0, rows.shape[1], size):
            yield b, slice(start, start + size), layers


def _relu_(x: Tensor) -> Tensor:
    """relu in place. On a CPU bfloat16 is clamped by its bits, six times as fast: what is negative is so as an integer.

    nan may become 0 in this way, so :func:`_arguments` looks for it.
    """
    if x.dtype != torch.bfloat16 or not x.is_cpu:
        return x.relu_()
    x.view(torch.int16).clamp_min_(0)
    return x


def _margin(head: Folded) -> Folded:
    """A head of two classes that gives the margin logit₁ − logit₀ alone: its softmax is a sigmoid, far cheaper."""
    if head.classes != 2:
        return head
    w, a = head.rest[-1]
    return head._replace(rest=(*head.rest[:-1], (w[1:] - w[:1], a[1:] - a[:1])))


def _probs(scores: Tensor, dim: int = 1) -> Tensor:
    """softmax of logits ``[·, C]``; of margins ``[·, 1]`` the probability of class 1 alone. ``dim`` is the classes'."""
    return scores.sigmoid() if scores.shape[dim] == 1 else scores.softmax(dim)


def _both(values: Tensor, whole: Tensor | float) -> Tensor:
    """Class 1 alone ``[…, 1]`` -> classes 0 and 1 ``[…, 2]``, which add up to ``whole``; otherwise as they are."""
    return torch.cat([whole - values, values], -1) if values.shape[-1] == 1 else values


# -- gradients -------------------------------------------------------------------------------------------------


class _Backward:
    """Accumulates the gradients of rows and layers, tile by tile."""

    def __init__(self, rows: Tensor, head: Folded) -> None:
        self.head = head.to(rows.dtype)
        self.rows = torch.zeros_like(rows)
        self.weight, self.bias = torch.zeros_like(head.weight), torch.zeros_like(head.bias)
        self.rest = [(torch.zeros_like(w), torch.zeros_like(a)) for w, a in head.rest]

    def image(self, b: int, x: Tensor, active: Tensor | None, gradient: Gradient, tile: int | None) -> None:
        """Take the gradient of one image's logits down through the layers, for the ``active`` samples alone.

        ``gradient(pixels, logits)`` is that of a tile's logits, ``[T·N, C]``. It may be called under autocast.
        Gradients of weights are added up over tiles in their own type, whatever that of the rows is.
        """
        with full_precision(x):
            self._image(b, x, active, gradient, tile)

    def _image(self, b: int, x: Tensor, active: Tensor | None, gradient: Gradient, tile: int | None) -> None:
        weight, bias = self.head.weight[b], self.head.bias[b]
        if active is not None:
            weight, bias = weight[active], bias[active]
        if len(weight) == 0:
            return
        head = self.head._replace(weight=weight[None], bias=bias[None])
        flat = weight.flatten(0, 1)
        into_weight, into_bias = self.weight.new_zeros(flat.shape), self.bias.new_zeros(len(flat))
        for _, some, layers in _tiles(x[None], head, tile):
            values = layers(x[some])
            grad = gradient(some, values[-1]).to(x.dtype)
            for (w, _), (gw, ga), h in zip(head.rest[::-1], self.rest[::-1], values[-2::-1], strict=True):
                _add_product(gw, grad, h)
                ga.add_(grad.sum(0))
                grad = torch.ops.aten.threshold_backward(grad @ w, h, 0)
            grad = grad.view(-1, len(flat))  # [T, N·H]
            _add_product(into_weight, grad, x[some])
            into_bias.add_(grad.sum(0))
            torch.mm(grad, flat, out=self.rows[b, some])
        where = slice(None) if active is None else active
        self.weight[b, where] = into_weight.view_as(weight)
        self.bias[b, where] = into_bias.view_as(bias)

    def gradients(self) -> tuple[Tensor, ...]:
        return (self.rows, self.weight, self.bias, *(g for pair in self.rest for g in pair))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += leftᵀ right, where ``total`` may be of a wider type."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
    else:
        total.add_(left.t() @ right)


def _active(grad: Tensor) -> Tensor | None:
    """The samples that any gradient reaches, ``[U, N, C] -> [n]``; ``None`` means all.

    A coupling moves M annotations onto at most as many samples, unless capacity forbids it: the others were looked at
    and are not to change. On an accelerator asking which they are would make it wait, so there all are taken.
    """
    return grad.abs().amax((0, 2)).nonzero().flatten() if grad.is_cpu else None


def _apply(function: Any, rows: Tensor, head: Folded, settings: Any, tile: int | None) -> Any:
    """Call an autograd function with the tensors flattened, outside autocast: what is summed needs full precision."""
    device = rows.device.type
    known = torch.amp.is_autocast_available(device)  # pyright: ignore[reportPrivateImportUsage]
    bf16 = known and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    head = head._replace(weight=head.weight.expand(-1, head.bias.shape[1], -1, -1))  # whose gradients are added up
    with full_precision(rows):
        return function.apply(settings, tile, *_arguments(rows, head, torch.bfloat16 if bf16 else None))


def _arguments(rows: Tensor, head: Folded, products: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """All tensors in one row, of one type, float32 at least; the rows in that of ``products`` where it is given."""
    rows = at_least_float32(rows)
    *rest, last = (t.to(rows.dtype) for t in (head.weight, head.bias, *(t for pair in head.rest for t in pair)))
    if products is not None:
        rows = rows.to(products)
        # What is not finite reaches the logits this way, if by no other: 0 · inf and 0 · nan are nan.
        last = last + 0 * sum(t.detach().sum() for t in (rows, *rest))
    return (rows, *rest, last)


def _unflatten(tensors: Sequence[Tensor]) -> tuple[Tensor, Folded]:
    """Rows, whose type is that of the matrix products, and the head, in which gradients are added up."""
    rows, weight, bias, *rest = tensors
    return rows, Folded(weight.contiguous(), bias, tuple(zip(rest[::2], rest[1::2], strict=True)))


class _PixelLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: None, tile: int | None, *tensors: Tensor) -> tuple[Tensor]:
        ctx.save_for_backward(*tensors)
        ctx.tile = tile
        rows, head = _unflatten(tensors)
        N, C = head.weight.shape[1], head.classes
        logits = head.weight.new_empty(len(rows), N, C, rows.shape[1])
        for b, some, layers in _tiles(rows, head.to(rows.dtype), tile):
            logits[b, :, :, some] = layers(rows[b, some])[-1].view(-1, N, C).permute(1, 2, 0)
        return (logits,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, head = _unflatten(ctx.saved_tensors)
        total = _Backward(rows, head)
        for b, x in enumerate(rows):

            def gradient(some: slice, logits: Tensor, grad: Tensor = grads[0][b]) -> Tensor:
                return grad[:, :, some].permute(2, 0, 1).reshape(logits.shape)

            total.image(b, x, None, gradient, ctx.tile)
        return (None, None, *total.gradients())


class _RegionSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Any, tile: int | None, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index, size, log, experts, pairs = settings
        ctx.save_for_backward(index, *tensors)
        ctx.settings = tile, log, size.shape[1]
        rows, head = _unflatten(tensors)
        B, U = size.shape
        N, dtype = head.weight.shape[1], label_dtype(head.classes)
        head = head if log else _margin(head)
        C = head.classes
        sums = exact(rows.new_zeros(B, U + 1, N * C))  # the last row takes void pixels
        labels = torch.empty(B, rows.shape[1], experts or 0, dtype=dtype, device=rows.device)
        apart = exact(rows.new_zeros(B, max(1, C - 1) if pairs else 0, N * (N - 1) // 2))
        for b, some, layers in _tiles(rows, head.to(rows.dtype), tile):
            scores = at_least_float32(layers(rows[b, some])[-1])
            values = scores.log_softmax(1) if log else _probs(scores)
            _add_tile(sums[b], index[b, some], values.view(-1, N * C))
            if experts:
                probs = (values.exp() if log else values).view(-1, experts, N // experts, C).mean(2)
                labels[b, some] = (probs[..., 0] > 0.5 if C == 1 else probs.argmax(2)).to(dtype)
            if pairs:
                for total, soft in zip(apart[b], _foreground(values, N, index[b, some] < U), strict=True):
                    add_apart(total, soft)
        labels = labels.transpose(1, 2)
        ctx.mark_non_differentiable(labels)
        kept = head.weight.dtype
        sums = _both(sums[:, :U].to(kept).view(B, U, N, C), size[:, :, None, None].to(kept))
        return sums.permute(0, 2, 3, 1), labels, apart.to(kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        index, *tensors = ctx.saved_tensors
        tile, log, U = ctx.settings
        rows, head = _unflatten(tensors)
        grad = F.pad(grads[0].permute(0, 3, 1, 2), (0, 0, 0, 0, 0, 1))  # [B, U + 1, N, C]: none at void pixels
        margin = head.classes == 2 and not log
        if margin:
            head, grad = _margin(head), grad[..., 1:] - grad[..., :1]
        total, N = _Backward(rows, head), head.weight.shape[1]
        for b, x in enumerate(rows):
            of_pairs = grads[2][b]  # [C - 1, N (N - 1) / 2]; of no class where pairs were not asked for
            active = None if len(of_pairs) else _active(grad[b])
            of_region = grad[b] if active is None else grad[b][:, active]  # [U + 1, n, C]
            of_sum = of_region.sum(2)  # Σ_c

            def gradient(
                some: slice,
                logits: Tensor,
                of_region: Tensor = of_region,
                of_sum: Tensor = of_sum,
                of_pairs: Tensor = of_pairs,
                b: int = b,
            ) -> Tensor:
                region, probs = index[b, some], _probs(at_least_float32(logits))
                pixel = of_region.flatten(1).index_select(0, region).view_as(probs)
                if len(of_pairs):
                    _add_pairs(pixel.view(-1, N, probs.shape[1]), _foreground(probs, N, region < U), of_pairs)
                if margin:  # d sigmoid: p (1 − p) g
                    return torch.ops.aten.sigmoid_backward(pixel, probs)
                if log:  # d log softmax: g − p Σ_c g
                    return pixel.addcmul_(probs, of_sum.index_select(0, region).view(-1, 1), value=-1)
                return pixel.sub_((probs * pixel).sum(1, keepdim=True)).mul_(probs)  # d softmax: p (g − Σ_c p g)

            total.image(b, x, active, gradient, tile)
        if margin:  # the margin was layer 1 − layer 0
            w, a = total.rest[-1]
            total.rest[-1] = torch.cat([-w, w]), torch.cat([-a, a])
        return (None, None, *total.gradients())


def _foreground(values: Tensor, samples: int, valid: Tensor) -> Tensor:
    """Probabilities ``[T·N, C]`` -> ``[C - 1, N, T]``, 0 at void pixels; of margins, class 1 is all there is."""
    soft = values if values.shape[1] == 1 else values[:, 1:]
    return (soft.view(-1, samples, soft.shape[1]) * valid[:, None, None]).permute(2, 1, 0).contiguous()


def _add_pairs(pixel: Tensor, soft: Tensor, of_pairs: Tensor) -> None:
    """Add the gradient of what pairs of samples are apart to that of the probabilities, ``[T, N, C]``."""
    for c, (part, grad) in enumerate(zip(soft, of_pairs, strict=True), int(pixel.shape[2] > 1)):
        pixel[..., c] += apart_gradient(part, grad).t()


def _add_tile(sums: Tensor, index: Tensor, rows: Tensor) -> None:
    """sums[index[i]] += rows[i], added up within the tile first, so that rounding does not add up with it."""
    if rows.is_cpu and len(sums) > len(rows):  # more regions than pixels: look only at those that occur here
        used, index = index.unique(return_inverse=True)
        part = rows.new_zeros(len(used), rows.shape[1])
        add_rows(part, index, rows)
        sums.index_add_(0, used, part.to(sums.dtype))
    else:
        part = torch.zeros_like(sums, dtype=rows.dtype)
        add_rows(part, index, rows)
        sums += part

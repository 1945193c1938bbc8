"""``ambiseg.prune``: fewer strata. Those that draw alike are merged, the rest is fitted, and their number is chosen.

    D²(g, h) = 2 E d(S_g, S_h) − E d(S_g, S_g′) − E d(S_h, S_h′),     d = 1 − IoU

is the energy distance between what two groups of strata draw of an image. Groups are merged one pair after the other,
that of the smallest mean of  w_g w_h / (w_g + w_h) · D²(g, h)  over training images, w the weights (Ward's rule, exact
because D is a distance between points of a Hilbert space). A stratum without weight costs nothing and goes first. Where
strata are and how likely they are is then fitted to the annotations of training images by the energy score, with the
weights of the full model as a guide; all else stays.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ambiseg._util.errors import ConfigError
from ambiseg._util.files import atomic_write, write_text
from ambiseg._util.progress import reporting
from ambiseg.data.loader import Batch, seed_of
from ambiseg.data.values import some_of
from ambiseg.familiarity import FILE as LOOK
from ambiseg.familiarity import data_of, look_at
from ambiseg.methods.base import Method, Stratified
from ambiseg.methods.drawing import bias, draw, unbiased_ged
from ambiseg.metrics import compare
from ambiseg.overlap import pairwise_iou
from ambiseg.runs import Run, Which, open_run
from ambiseg.weights import write_weights

if TYPE_CHECKING:
    from ambiseg.data.module import DataModule

FILE = "prune.json"
_FORMAT = "ambiseg.Pruned/1"
_COMPARED, _VALIDATED, _MASKS, _RATE = 256, 300, 48, 2e-3
_EMPTY = 1e-3  # mean weight below which a stratum is said to have none


class Trade(NamedTuple):
    """What a number of strata costs.

    Attributes:
        strata: K.
        kept: share of the weight whose masks are drawn as before: that of the most used stratum of every group.
        distance: energy distance to the full model's masks, the mean over validation images.
        ged: unbiased GED of the validation images.
        more: how much more GED that is than with the best number of strata.
        error: standard error of ``more``, by patient.
        groups: the strata of the full model that are one, from 1.
    """

    strata: int
    kept: float
    distance: float
    ged: float
    more: float
    error: float
    groups: tuple[tuple[int, ...], ...]


class Pruned(NamedTuple):
    """The new run, the table over K, what was chosen, and strata of the full model that had no weight (from 1)."""

    run: Run
    table: tuple[Trade, ...]
    chosen: int
    unused: tuple[int, ...]


def prune(
    run: str | os.PathLike[str] | Run,
    out: str | os.PathLike[str],
    strata: int | Literal["auto"] = "auto",
    *,
    which: Which = "best",
    steps: int = 60,
    data: Mapping[str, Any] | None = None,
    quiet: bool = False,
    command: list[str] | None = None,
) -> Pruned:
    """Merge strata that draw alike into one, fit what is left, and write the folder of a run with fewer of them.

    Args:
        run: the folder of a run, or a model of the package, whose method can merge its strata.
        out: the folder of the new run. It must be new or empty.
        strata: how many are left; ``"auto"``: the fewest whose validation GED is within one standard error, by patient,
            of the best.
        which: weights of the ``best`` epoch or of the ``last``.
        steps: of fitting, batches of training images for each number of strata that is tried; 0: none.
        data: settings of the run's data to change, such as ``{"root": …}`` for data that have moved.
        quiet: no progress.
        command: what the user typed, for the record.
    """
    opened = run if isinstance(run, Run) else open_run(run)
    Run.claim(out)
    full = opened.model(which).method
    if type(full).merged is Method.merged:
        found = f"method {opened.config.model.method}"
        raise ConfigError(f"{opened.folder}: expected a method whose strata can be merged, found {found}")
    module = data_of(opened, data, quiet)
    for part in ("train", "val"):
        if part not in module.split.parts or not module.indices(part):
            raise ConfigError(f"{opened.folder}: expected a part {part!r} to fit and choose by, found none")
    with reporting("comparing strata", quiet) as report:
        distances, weights = _apart(full, module, report)
    usage = weights.mean(0)
    K = len(usage)
    if strata != "auto" and not 1 <= strata <= K:
        raise ConfigError(f"--strata: expected auto or 1 to {K}, which {opened.folder} has, found {strata}")
    tree = merge_order(distances, weights)
    numbers = candidates(K) if strata == "auto" else [strata] if strata == K else [K, strata]
    models: dict[int, Method] = {}
    with reporting("fitting", quiet) as report:
        for done, number in enumerate(numbers):
            model = full if number == K else full.merged(tree[number], usage.tolist())
            assert model is not None
            if number < K and steps:
                fit(model, full, tree[number], _batches(module, steps), opened.config.seed)
            models[number] = model.eval()
            report(done + 1, len(numbers))
    with reporting("validating", quiet) as report:
        ged, apart, patients = _scores(models, full, module, report)
    kept = {number: float(sum(usage[list(group)].max() for group in tree[number])) for number in numbers}
    table = trade_offs({n: (kept[n], apart[n], ged[n], tree[n]) for n in numbers}, patients)
    chosen = pick(table) if strata == "auto" else strata
    typed, config = command if command is not None else sys.argv, opened.config
    config = config.model_copy(update={"model": models[chosen].config})  # type: ignore[arg-type]
    members = [{"run": str(opened.folder), which: opened.digest(which)}]
    how: dict[str, Any] = {"precision": opened.precision, "members": members}
    unused = tuple(k + 1 for k in range(K) if usage[k] < _EMPTY)
    record = {
        "format": _FORMAT, "of": str(opened.folder), "which": which, "strata": K, "chosen": chosen, "steps": steps,
        "asked": strata, "usage": usage.tolist(), "unused": list(unused), "table": [one._asdict() for one in table],
    }  # fmt: skip
    with (
        Run.begin(out, config, opened.card, opened.split, typed, **how),
        atomic_write(Path(out) / "best.safetensors") as file,
        atomic_write(Path(out) / "last.safetensors") as other,
    ):
        write_weights(models[chosen], file, {})
        write_weights(models[chosen], other, {})
    write_text(Path(out) / FILE, json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    pruned = Run(out)
    with suppress(ConfigError):  # too few images
        look_at(pruned, module, quiet=quiet).save(pruned.folder / LOOK)
    return Pruned(pruned, table, chosen, unused)


def candidates(strata: int) -> list[int]:
    """All numbers of up to 8 strata, and above that steps of about a fifth.

    >>> candidates(16)
    [16, 13, 10, 8, 7, 6, 5, 4, 3, 2, 1]
    """
    found = [strata]
    while found[-1] > 1:
        found.append(found[-1] - 1 if found[-1] <= 8 else max(8, round(found[-1] * 0.8)))
    return found


# -- which strata draw alike ------------------------------------------------------------------------------------------


def merge_order(distances: np.ndarray, weights: np.ndarray) -> dict[int, list[list[int]]]:
    """The groups of strata for every number of them, by Ward's rule.

    Args:
        distances: ``[B, K, K]`` E[1 − IoU] of a draw of each of two strata; on the diagonal of two draws of one.
        weights: ``[B, K]`` of every image.

    >>> apart = 1 - np.array([[[1.0, 0.9, 0.1], [0.9, 1.0, 0.1], [0.1, 0.1, 1.0]]])
    >>> merge_order(apart, np.array([[0.3, 0.3, 0.4]]))[2]
    [[0, 1], [2]]
    """
    A, w = distances.astype(np.float64), weights.astype(np.float64)
    groups = [[k] for k in range(A.shape[1])]
    found = {len(groups): [list(group) for group in groups]}
    while len(groups) > 1:
        own = np.einsum("bkk->bk", A)
        energy = np.maximum(2 * A - own[:, :, None] - own[:, None], 0)
        both = w[:, :, None] + w[:, None]
        cost = (np.divide(w[:, :, None] * w[:, None], both, out=np.zeros_like(both), where=both > 0) * energy).mean(0)
        cost[np.tril_indices(len(groups))] = np.inf
        g, h = np.unravel_index(cost.argmin(), cost.shape)
        share = np.divide(w[:, g], w[:, g] + w[:, h], out=np.full(len(w), 0.5), where=w[:, g] + w[:, h] > 0)[:, None]
        row = share * A[:, g] + (1 - share) * A[:, h]  # a draw of both against all others
        inside = share[:, 0] * row[:, g] + (1 - share[:, 0]) * row[:, h]
        A[:, g], A[:, :, g] = row, row
        A[:, g, g], w[:, g] = inside, w[:, g] + w[:, h]
        A, w = np.delete(np.delete(A, h, 1), h, 2), np.delete(w, h, 1)
        groups[g] = sorted(groups[g] + groups.pop(h))
        found[len(groups)] = [list(group) for group in groups]
    return found


def _apart(full: Method, module: DataModule, report: Any) -> tuple[np.ndarray, np.ndarray]:
    """What :func:`merge_order` takes, of training images."""
    found, weights = [], []
    indices = some_of(module.indices("train"))
    indices = indices[:: -(-len(indices) // _COMPARED)]
    for done, index in enumerate(indices):
        batch = module.batch_of(index)
        predictive = _stratified(full, batch.images)
        K = predictive.weights.shape[1]
        masks = predictive.compact(2, torch.Generator().manual_seed(seed_of(0, "prune", batch.names[0])))
        d = 1 - pairwise_iou(masks, masks, list(range(1, full.classes)), "agree")[0].double()
        blocks = d.view(K, 2, K, 2)
        between = blocks.mean((1, 3))
        between[range(K), range(K)] = blocks[range(K), 0, range(K), 1]  # of two different draws
        found.append(between.cpu().numpy())
        weights.append(predictive.weights[0].detach().cpu().numpy())
        report(done + 1, len(indices))
    return np.stack(found), np.stack(weights)


def _stratified(method: Method, images: Tensor) -> Stratified:
    predictive = method.predict_whole(images)
    if not isinstance(predictive, Stratified):
        raise ConfigError(f"expected a method with strata, found {type(method).__name__}")
    return predictive


# -- fitting ----------------------------------------------------------------------------------------------------------


def _batches(module: DataModule, steps: int) -> Iterator[Batch]:
    """So many batches of the training part, the same for every number of strata."""
    loader, epoch, left = module.train_dataloader(), 0, steps
    while left > 0:
        loader.sampler.set_epoch(epoch)  # type: ignore[union-attr]
        for batch in islice(loader, left):
            left -= 1
            yield batch
        epoch += 1


def fit(model: Method, full: Method, groups: Sequence[Sequence[int]], batches: Iterator[Batch], seed: int) -> None:
    """Fit where strata are, and how likely, to the annotations of some batches; features stay as they are.

    energy score of the annotations + cross-entropy of the weights with the sums of those of the full model
    """
    chosen = model.stratum_parameters()
    wanted = {id(parameter) for parameter in chosen}
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in wanted)
    optimizer = torch.optim.Adam(chosen, lr=_RATE)
    model.eval()
    for step, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(seed_of(seed, "prune", step))
        with torch.no_grad():
            guide = _summed(full(batch.images), groups)
        predictive = model(batch.images)
        assert isinstance(predictive, Stratified)
        energy = predictive.energy(batch.annotations, 2, generator).total.mean()
        weights = predictive.weights.clamp_min(torch.finfo(predictive.weights.dtype).tiny)
        loss = energy - (guide * weights.log()).sum(1).mean()
        optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
    for parameter, needed in before:
        parameter.requires_grad_(needed)


def _summed(predictive: Any, groups: Sequence[Sequence[int]]) -> Tensor:
    return torch.stack([predictive.weights[:, list(group)].sum(1) for group in groups], 1)


# -- the number of strata ---------------------------------------------------------------------------------------------


def _scores(
    models: Mapping[int, Method], full: Method, module: DataModule, report: Any
) -> tuple[dict[int, np.ndarray], dict[int, float], list[str]]:
    """Unbiased GED of every validation image, and mean energy distance to the full model, by number of strata."""
    ged: dict[int, list[float]] = {number: [] for number in models}
    apart: dict[int, list[float]] = {number: [] for number in models}
    patients: list[str] = []
    indices = some_of(module.indices("val"))
    indices = indices[:: -(-len(indices) // _VALIDATED)]
    evaluated = list(module.cases.evaluated)
    for done, index in enumerate(indices):
        batch = module.batch_of(index)
        patients += batch.patients
        seed = seed_of(1, "prune", batch.names[0])
        whole = draw(full.predict_whole(batch.images), "standard", _MASKS, torch.Generator().manual_seed(seed))
        for number, model in models.items():
            generator = torch.Generator().manual_seed(seed + 1)
            drawn = draw(model.predict_whole(batch.images), "compact", max(_MASKS, 2 * number), generator)
            pair = compare(drawn.masks, batch.annotations, evaluated)
            ged[number].append(float(unbiased_ged(pair, drawn.strata)))
            beside = compare(drawn.masks, whole.masks, evaluated)
            both = unbiased_ged(beside, drawn.strata) - bias(whole.masks, beside.truth_diversity())
            apart[number].append(float(both))
        report(done + 1, len(indices))
    means = {number: float(np.nanmean(values)) for number, values in apart.items()}
    return {number: np.array(values) for number, values in ged.items()}, means, patients


def trade_offs(
    found: Mapping[int, tuple[float, float, np.ndarray, Sequence[Sequence[int]]]], patients: Sequence[str]
) -> tuple[Trade, ...]:
    """The table over K, from weight kept, distance, GED of every image and groups; the most strata first."""
    scored = np.atleast_1d(~np.isnan(np.stack([ged for _, _, ged, _ in found.values()])).any(0))
    if not scored.any():
        raise ConfigError("prune: expected validation images with a GED, found none")
    best = min((ged[scored] for _, _, ged, _ in found.values()), key=lambda ged: ged.mean())
    names = [patient for patient, ok in zip(patients, scored.tolist(), strict=True) if ok]
    rows = []
    for number, (kept, distance, ged, groups) in sorted(found.items(), reverse=True):
        more = ged[scored] - best
        numbered = tuple(tuple(k + 1 for k in group) for group in groups)
        error = clustered_error(more, names)
        rows.append(Trade(number, kept, distance, float(ged[scored].mean()), float(more.mean()), error, numbered))
    return tuple(rows)


def clustered_error(values: np.ndarray, groups: Sequence[str]) -> float:
    """Standard error of a mean over images of which those of one group (patient) are alike:

        √(G / (G − 1) · Σ_g (Σ_{i∈g} (x_i − x̄))²) / n

    >>> round(clustered_error(np.array([1.0, 3.0]), ["a", "b"]), 6), clustered_error(np.ones(2), ["a", "a"])
    (1.0, 0.0)
    """
    place = np.unique(np.array(groups, object).astype(str), return_inverse=True)[1]
    sums = np.bincount(place, values - values.mean())
    G = len(sums)
    return float(np.sqrt(G / max(1, G - 1) * (sums**2).sum()) / len(values))


def pick(table: Sequence[Trade]) -> int:
    """The fewest strata whose GED is within one standard error of the best.

    >>> pick([Trade(3, 1, 0, 0.1, 0, 0, ()), Trade(2, 1, 0, 0.11, 0.01, 0.02, ()), Trade(1, 1, 0, 0.3, 0.2, 0.02, ())])
    2
    """
    return min(one.strata for one in table if one.more <= one.error)

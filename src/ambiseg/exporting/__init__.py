"""``ambiseg.export``: a trained model as one file that runs without ambiseg, compared with the model itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.extras import require
from ambiseg._util.files import atomic_write
from ambiseg._util.progress import reporting
from ambiseg.exporting.files import Runner, as_onnx, as_pt2, run_onnx, run_pt2
from ambiseg.exporting.graph import Graph, Inputs, described
from ambiseg.methods.predictive import Numbers, Stratified
from ambiseg.runs import Run, TrainedModel, Which, is_shipped, open_run

__all__ = ["FORMATS", "LIMIT", "PRECISIONS", "Exported", "Format", "Graph", "Inputs", "Precision", "export"]

Format: TypeAlias = Literal["onnx", "torch"]
FORMATS: tuple[Format, ...] = get_args(Format)
Precision: TypeAlias = Literal["32", "16", "8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

SUFFIX = {"onnx": ".onnx", "torch": ".pt2"}
LIMIT = 1e-4  # of the difference in a probability, of a graph in 32 bits
SIZES = ((64, 64), (51, 77))  # of the images that a graph is compared on


@dataclass(frozen=True)
class Exported:
    """A file that was written.

    Attributes:
        path: where.
        format: ``onnx`` or ``torch``.
        precision: bits of the weights.
        size: in bytes.
        difference: the largest one between a weight or a probability of the file and of the model, on random images.
        inputs: what the graph takes beside the image.
    """

    path: Path
    format: Format
    precision: Precision
    size: int
    difference: float
    inputs: Inputs


def export(
    run: str | os.PathLike[str] | Run | TrainedModel,
    out: str | os.PathLike[str] | None = None,
    *,
    format: Format = "onnx",
    precision: Precision = "32",
    which: Which = "best",
    quiet: bool = True,
) -> Exported:
    """Write a trained model as one graph from raw image and numbers to weights and masks; see ``docs/export.md``.

    What was written is run on random images of two sizes and compared with the model, before the file appears.

    Args:
        run: the folder of a run, ``"demo"``, an opened :class:`~ambiseg.runs.Run`, or what ``ambiseg.load`` returns.
        out: the file; None: ``model.onnx`` or ``model.pt2`` in the folder of the run, and ``demo.onnx`` here for
            ``"demo"``.
        format: ``onnx``, or ``torch`` for a ``.pt2`` of ``torch.export``.
        precision: bits in which ONNX keeps the weights of convolutions and matrices: 32, 16 or 8. It computes in 32.
        which: weights of the ``best`` epoch or of the ``last``; a model has its own.
        quiet: no progress.

    Raises:
        DataError: a file of 32 bits differs from the model by more than 1e-4. Nothing is written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     found = export("demo", Path(place, "demo.onnx"))
    >>> found.inputs, found.difference < 1e-4
    (Inputs(normals=1, seeds=False, strata=4), True)
    """
    require("export")
    if format not in FORMATS:
        raise ConfigError(f"format: expected one of {', '.join(FORMATS)}, found {format!r:.60}")
    if precision not in PRECISIONS:
        raise ConfigError(f"precision: expected one of {', '.join(PRECISIONS)}, found {precision!r:.60}")
    if precision != "32" and format != "onnx":
        raise ConfigError(f"precision: expected 32 with format {format}, found {precision}")
    model, path = _opened(run, which), _target(run, out, format)
    if not path.parent.is_dir():
        raise DataError(f"{path}: expected a file in a folder that exists, found no folder {path.parent}")
    with reporting("exporting", quiet) as report:
        graph = Graph(model)
        about = described(model, graph.inputs, precision)
        report(0, 3)
        if format == "onnx":
            from ambiseg.exporting.weights import kept_in

            content = kept_in(as_onnx(graph, about), precision).SerializeToString()
            report(1, 3)
            runner = run_onnx(content)
        else:
            content = as_pt2(graph, about)
            report(1, 3)
            runner = run_pt2(content)
        difference = compared(graph, runner)
        report(2, 3)
        if not difference <= (LIMIT if precision == "32" else 1.0):  # nan is no agreement
            expected = f"a file that gives the model's probabilities to {LIMIT:g}"
            raise DataError(
                f"{path}: expected {expected}, found differences of up to {difference:.2g}; nothing is written"
            )
        with atomic_write(path) as file:
            file.write(content)
        report(3, 3)
    return Exported(path, format, precision, len(content), difference, graph.inputs)


@torch.no_grad()
def compared(graph: Graph, runner: Runner) -> float:
    """The largest difference of a weight or a probability from the model's, on random images of two sizes."""
    largest = 0.0
    for seed, size in enumerate(SIZES):
        image, numbers = graph.example(images=1 + seed, draws=1 + 2 * seed, size=size, seed=seed)
        weights, probs = runner(image, numbers)
        predictive = graph.method.predict(graph.intensity(image))
        expected = predictive.probs(predictive.noise_of_numbers(Numbers(**numbers)))
        pairs = [(probs, expected)]
        if isinstance(predictive, Stratified):
            pairs.append((weights, predictive.weights))
        for found, known in pairs:
            if found.shape != known.shape:
                return torch.inf
            apart = float((found - known).abs().max())
            largest = apart if not apart <= largest else largest  # nan stays
    return largest


def _opened(run: str | os.PathLike[str] | Run | TrainedModel, which: Which) -> TrainedModel:
    if isinstance(run, TrainedModel):
        return run
    return (run if isinstance(run, Run) else open_run(run)).model(which)


def _target(run: str | os.PathLike[str] | Run | TrainedModel, out: str | os.PathLike[str] | None, format: str) -> Path:
    suffix = SUFFIX[format]
    if out is not None:
        if Path(out).suffix != suffix:
            raise ConfigError(f"{os.fspath(out)}: expected a file that ends in {suffix} for format {format}")
        return Path(out)
    if isinstance(run, TrainedModel):
        raise ConfigError("out: expected a file to write a model from memory to, found None")
    if isinstance(run, Run):
        return run.folder / f"model{suffix}"
    return Path(f"{os.fspath(run)}{suffix}") if is_shipped(run) else Path(run) / f"model{suffix}"

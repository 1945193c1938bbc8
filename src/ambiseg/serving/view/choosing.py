"""From the words of the command to what there is to look at."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.text import count
from ambiseg.io.source import ReadOptions
from ambiseg.prediction.inputs import find_inputs
from ambiseg.runs import Run, is_shipped, open_run
from ambiseg.serving.settings import Served
from ambiseg.serving.view.listing import (
    Data,
    Entry,
    data_case,
    new_image,
    run_cases,
    saved_prediction,
)
from ambiseg.serving.view.routes import View
from ambiseg.serving.view.scenes import find_predictions


def is_run(place: str) -> bool:
    """Whether a word of the command is a run: a model of the package, or a folder with ``run.json``.

    >>> is_run("demo"), is_run("sample")
    (True, False)
    """
    return is_shipped(place) or (Path(place) / "run.json").is_file()


def choose(
    places: Sequence[str],
    other: str | None = None,
    data: str | None = None,
    which: str = "best",
    dicom: str = "series",
    split: str = "test",
) -> View:
    """What ``ambiseg view`` shows.

    Args:
        places: a run and images; two runs; or a folder of predictions alone.
        other: a second run.
        data: annotated data; with a run, its cases are predicted as well.
        which: weights of the runs, ``best`` or ``last``.
        dicom: as of :func:`~ambiseg.prediction.inputs.find_inputs`.
        split: the part of the run's data that is listed.
    """
    if not places:
        if data is None:
            raise ConfigError("view: expected a run, a folder of predictions, or --data PATH, found none")
        if other is not None:
            raise ConfigError("--with: expected a first run before the second one, found none")
        return _of_data(data)
    first, rest = places[0], list(places[1:])
    if not is_run(first) and other is None and data is None and not rest and (found := _predictions(first)):
        return found
    runs = [open_run(first)]  # says what is wrong with it
    if other is None and rest and is_run(rest[0]) and not _is_image(rest[0]):
        other = rest.pop(0)
    names = [first]
    if other is not None:
        runs.append(open_run(other))
        names.append(other)
        _check_pair(runs)
    return _of_runs(runs, names, rest, data, which, dicom, split)


def _is_image(place: str) -> bool:
    return Path(place).is_file()


def _predictions(place: str) -> View | None:
    root = Path(place)
    if not root.is_dir():
        return None
    folders = find_predictions(root)
    if not folders:
        expected = "expected a run (run.json), or predictions (weights.json) below it"
        raise DataError(f"{root}: {expected}, found neither")
    entries = [saved_prediction(folder, root) for folder in folders]
    title = f"{count(len(entries), 'prediction')} in {root.resolve().name}"
    return View("predictions", title, (), entries, 0)


def _of_data(place: str) -> View:
    data = Data.at(place)
    entries = [data_case(name, data) for name in data.cases.names]
    if not entries:
        raise DataError(f"{place}: expected at least one case, found none")
    return View("data", data.cases.title, (), entries, 0)


def _of_runs(
    runs: Sequence[Run],
    names: Sequence[str],
    images: Sequence[str],
    data: str | None,
    which: str,
    dicom: str,
    split: str,
) -> View:
    labels = _labels(names)
    models = [Served.open(run, label, which) for run, label in zip(runs, labels, strict=True)]  # type: ignore[arg-type]
    for model in models:
        _check_weights(model, which)
    reading = runs[0].card.reading
    axis = 2 if reading.axis is None else reading.axis
    options = ReadOptions(axes=reading.axes, axis=axis)
    given = [new_image(found, options) for found in (find_inputs(images, dicom) if images else ())]
    entries: list[Entry] = [*given, *run_cases(runs, data, split)]
    opened = 0 if given or data is not None else None
    return View("models", " and ".join(labels), models, entries, opened)


def _labels(names: Sequence[str]) -> list[str]:
    """The last part of each path, or all of it where two share that."""
    short = [Path(os.path.abspath(name)).name for name in names]
    if len(set(short)) == len(short):
        return short
    if len(set(names)) == len(names):
        return list(names)
    return [f"{name} ({i})" for i, name in enumerate(names, 1)]


def _check_pair(runs: Sequence[Run]) -> None:
    one, other = (run.card for run in runs)
    if (one.channels, len(one.classes)) != (other.channels, len(other.classes)):
        found, expected = (
            f"{count(card.channels, 'channel')} and {len(card.classes)} classes" for card in (other, one)
        )
        raise ConfigError(f"{runs[1].folder}: expected a run for {expected}, as the first, found one for {found}")


def _check_weights(model: Served, which: str) -> None:
    path = open_run(model.run).folder / f"{which}.safetensors"
    if not path.is_file():
        raise ConfigError(f"{path}: expected the weights of a finished epoch, found no such file")

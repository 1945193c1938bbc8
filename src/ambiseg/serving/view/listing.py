"""What can be opened from the list of the page: images of the command line, cases of runs or of data, predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock

from ambiseg._util.errors import DataError
from ambiseg.data.case import Case, Cases
from ambiseg.data.config import DataConfig, dataset_at, open_cases
from ambiseg.evaluation import saved_evaluation
from ambiseg.evaluation.results import Evaluation
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions, Source
from ambiseg.prediction.inputs import Input, array_source
from ambiseg.prediction.result import Options, Prediction
from ambiseg.runs import Card, Run
from ambiseg.serving.jobs import Job, Jobs
from ambiseg.serving.scene import PredictionScene
from ambiseg.serving.view.scenes import ReadersScene, SavedScene, WithReaders, Written

HEADLINE = 16  # samples of the setting whose scores are listed
_EXPLAINED = {
    "readers": ("Readers", "who drew any evaluated class"),
    "ged": ("GED", "squared generalised energy distance between predicted and readers' masks; smaller is better"),
    "ged_other": ("GED 2", "the same of the second run"),
    "iou": ("IoU", "matched IoU of predicted and readers' masks; larger is better"),
    "disagreement": ("Disagreement", "of the readers: their masks' mean distance, 1 - IoU, between two of them"),
    "patient": ("Patient", "what is kept together in splits"),
    "masks": ("Masks", "distinct masks that were predicted"),
    "top": ("Top", "probability of the heaviest mask"),
    "present": ("Present", "probability that a mask holds anything"),
}


Values = Mapping[str, float | int | str | None]


@dataclass(frozen=True)
class Entry:
    """One line of the list.

    Args:
        name: of the image.
        kind: ``image``, ``case``, ``prediction`` or ``readers``.
        values: what is known of it before it is opened, by column.
        open: makes a job, whose scene is what is to be looked at, of the queue, the number of the model and options.
    """

    name: str
    kind: str
    values: Values
    open: Callable[[Jobs, int, Options], Job]


class Data:
    """A data set that is opened when its first case is asked for, which takes time for some."""

    def __init__(self, config: DataConfig) -> None:
        self.config, self._lock = config, Lock()

    @cached_property
    def cases(self) -> Cases:
        return open_cases(self.config)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.cases.names)}

    def case(self, name: str) -> Case:
        """Read a case; one at a time, because not every reader can be asked by two threads."""
        with self._lock:
            if name not in self._numbers:
                raise DataError(f"{self.cases.title}: expected a case {name!r}, found none of that name")
            return self.cases[self._numbers[name]]

    @staticmethod
    def at(path: str) -> Data:
        """Annotated data at a path: a folder, a store, arrays; or a data set of the package by its name."""
        packaged = path in ("nodules", "shapes") and not Path(path).exists()
        if not packaged and not Path(path).exists():
            raise DataError(f"{path}: expected annotated data, or nodules or shapes, found nothing of that name")
        return Data(DataConfig(name=path) if packaged else DataConfig(name=dataset_at(path), root=path))


def new_image(found: Input, reading: ReadOptions) -> Entry:
    """An image of the command line."""

    def opened(jobs: Jobs, model: int, options: Options) -> Job:
        def source() -> Source:
            axis = reading.axis if options.axis is None else options.axis
            return open_source(found.path, ReadOptions(axes=options.axes or reading.axes, axis=axis))

        return jobs.submit(source, found.name, model, options)

    return Entry(found.name, "image", {}, opened)


def run_case(name: str, data: Data, values: Values) -> Entry:
    """A case of a run's data, with its readers."""

    def opened(jobs: Jobs, model: int, options: Options) -> Job:
        read: list[Case] = []

        def image() -> Source:
            read.append(data.case(name))
            return array_source(read[0].image, name)

        def dressed(prediction: Prediction) -> WithReaders:
            return WithReaders(PredictionScene(prediction, model), read[0], data.cases)

        return jobs.submit(image, name, model, options, dressed)

    return Entry(name, "case", values, opened)


def data_case(name: str, data: Data) -> Entry:
    """A case of annotated data, without a model."""
    return Entry(name, "readers", {}, lambda jobs, *_: jobs.add(name, ReadersScene(data.case(name), data.cases)))


def saved_prediction(folder: Path, root: Path) -> Entry:
    """A folder below ``root`` that ``ambiseg predict`` wrote, by its place there."""
    about = Written.read(folder)
    name = folder.relative_to(root).as_posix() if folder != root else about.name
    present = sum(mask.weight for mask in about.masks)
    values = {"masks": len(about.masks), "top": about.masks[0].weight / (present or 1)}
    return Entry(name, "prediction", values, lambda jobs, *_: jobs.add(name, SavedScene(folder)))


def case_values(evaluations: Sequence[Evaluation | None]) -> dict[str, dict[str, float | int | str | None]]:
    """What evaluations say of their cases, by name: the first one's, and the GED of the second."""
    found: dict[str, dict[str, float | int | str | None]] = {}
    for column, evaluation in zip(("ged", "ged_other"), evaluations, strict=False):
        if evaluation is None:
            continue
        key = evaluation.headline(HEADLINE).key
        for case in evaluation.cases:
            scores, values = case.scores[key], found.setdefault(case.name, {})
            values[column] = scores.get("ged")
            if column == "ged":
                values["readers"], values["patient"] = case.readers, case.patient
                values["disagreement"], values["iou"] = case.annotations.get("diversity"), scores.get("matched_iou")
    return found


def run_cases(runs: Sequence[Run], data: str | None, split: str = "test") -> list[Entry]:
    """The cases to look at with these runs: of ``data`` if that is given, else the first run's part ``split``."""
    evaluations = [saved_evaluation(run, split) for run in runs]
    values = case_values(evaluations)
    if data is not None:
        opened = Data.at(data)
        _check_fit(opened.cases, runs[0].card, data)
        return [run_case(name, opened, values.get(name, {})) for name in opened.cases.names]
    own, first = Data(runs[0].config.data), evaluations[0]
    names = [case.name for case in first.cases] if first is not None else runs[0].split.parts.get(split, [])
    return [run_case(name, own, values.get(name, {})) for name in names]


def _check_fit(cases: Cases, card: Card, path: str) -> None:
    if cases.channels != card.channels:
        expected = f"expected images of {card.channels} channels, as the model was trained on"
        raise DataError(f"{path}: {expected}, found {cases.channels}")


def columns_of(entries: Sequence[Entry]) -> list[dict[str, str]]:
    """The columns that any entry has a value for, with their titles."""
    present = {key for entry in entries for key, value in entry.values.items() if value is not None}
    shown = [key for key in _EXPLAINED if key in present]
    if "patient" in shown and len({entry.values.get("patient") for entry in entries}) == len(entries):
        shown.remove("patient")  # as many as images
    return [{"key": key, "title": _EXPLAINED[key][0], "explanation": _EXPLAINED[key][1]} for key in shown]

"""Scores of mask files that any tool wrote, against the readers' masks."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field

from ambiseg._util.errors import DataError
from ambiseg._util.progress import progress
from ambiseg._util.reading import read_json
from ambiseg._util.text import count, shape_text, some
from ambiseg.config import EvaluationConfig
from ambiseg.data.case import Case
from ambiseg.data.intensity import Intensity
from ambiseg.data.loader import annotations_of
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.folder.layout import SPLITS
from ambiseg.data.sets.folder.manifest import find_manifest
from ambiseg.data.sets.folder.settings import FolderSettings
from ambiseg.data.splits import Split
from ambiseg.evaluation.deciding import decision_rules
from ambiseg.evaluation.results import Evaluation, Region
from ambiseg.evaluation.scoring import ScoringRules, score_masks
from ambiseg.evaluation.summary import summarise
from ambiseg.io.formats import format_of, stem_of
from ambiseg.masks import MaskDistribution

WEIGHTS = "weights.json"
PREDICTIONS = ("ambiseg.Prediction/1", "ambiseg.Prediction/2")  # formats of the weights.json of `ambiseg predict`


def evaluate_files(
    predictions: str | os.PathLike[str],
    truth: str | os.PathLike[str],
    protocol: str | None = None,
    split: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    partial: bool = False,
    consensus: Sequence[str] | None = None,
    surfaces: bool = False,
    spacing: Sequence[float] | None = None,
) -> Evaluation:
    """Score a folder of predicted masks.

    Args:
        predictions: masks of every case as ``<sample>/<case>.png`` or ``<case>/<sample>.png`` (or any other format of a
            data folder), as ``<case>.png`` for one mask per case, a :class:`~ambiseg.masks.MaskDistribution` as
            ``<case>.npz``, or what ``ambiseg predict`` wrote. Masks are equally likely unless ``weights.json`` has
            ``{case: {sample: weight}}``; masks of unequal weights have no unbiased GED. Files hold class ids; with two
            classes 255 means class 1 as well, unless it is the truth's void value. An ``ambiseg.json`` may change that.
        truth: a data folder, or its masks alone, ``<reader>/<case>.png``.
        protocol: a key of ``PROTOCOLS``; ``None``: the default of ``evaluation.protocol``.
        split: score only the cases that the truth declares to be of this part; or the file of a saved split (or the
            folder of a run), whose test part is scored, or with ``:val`` after it another; ``None``: all.
        quiet: no progress.
        partial: leave out cases without a prediction, which are otherwise an error; ``unpredicted`` counts them.
        consensus, surfaces, spacing: see :func:`ambiseg.evaluate`.

    >>> import numpy as np
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as place:
    ...     for folder, value in [("truth/Ann", 255), ("truth/Bob", 0), ("mine/1", 255), ("mine/2", 255)]:
    ...         Path(place, folder).mkdir(parents=True)
    ...         Image.fromarray(np.full((4, 4), value, np.uint8)).save(Path(place, folder, "a.png"))
    ...     found = evaluate_files(Path(place, "mine"), Path(place, "truth"))
    >>> found.setting("files", 2).metrics["ged"].mean, found.cases[0].readers
    (0.5, 1)
    """
    decisions = decision_rules(consensus, surfaces, spacing)
    source = Path(predictions)
    if not source.is_dir():
        found = "a file" if source.exists() else "no such folder"
        raise DataError(f"{source}: expected a folder of predicted masks, found {found}")
    readers = open_truth(truth, quiet)
    part, wanted = _part(readers, truth, split)
    protocol = EvaluationConfig().protocol if protocol is None else protocol
    rules = ScoringRules(protocol, readers.evaluated, len(readers.classes), decisions=decisions)
    predicted = PredictedMasks(source, readers, [readers.names[i] for i in wanted], partial)
    total, wanted = len(wanted), [i for i in wanted if readers.names[i] in predicted.names]
    scored, most = [], 0
    for i in progress(wanted, len(wanted), "scoring", quiet):
        case = readers[i]
        masks = predicted.of(case)
        annotations = annotations_of([case], torch.from_numpy(case.regions)[None])
        scored.append(score_masks(masks, annotations, case.name, case.patient, rules, "files"))
        most = max(most, masks.count)
    about = {"run": str(source), "split": part, "data": readers.title, "evaluated": list(readers.evaluated)}
    about["unpredicted"] = total - len(wanted)
    about |= {"unit": readers.unit, "annotator": readers.annotator, "region": Region(kind="whole")}
    about |= {"which": "files", "weights": "", "seed": 0, "threads": torch.get_num_threads(), "batch_size": 1}
    scored = [one.renamed("files", f"files-{most}") for one in scored]
    return summarise(scored, readers.classes, decisions=decisions, protocol=protocol, **about)


_Part = tuple[str, list[int]]


def _part(readers: Folder, truth: str | os.PathLike[str], split: str | os.PathLike[str] | None) -> _Part:
    """The name of the part that is scored, and the numbers of its cases."""
    everything, place = list(range(len(readers))), os.fspath(truth)
    if split is None:
        return "all", everything
    text = os.fspath(split)
    head, _, tail = text.rpartition(":")
    for file, part in ((text, "test"), (head, tail)):
        path = Path(file) / "split.json" if file and Path(file).is_dir() else Path(file)
        if file and path.is_file():
            saved = Split.load(path)
            if part not in saved.parts:
                raise DataError(f"{path}: expected part {part!r}, found {', '.join(saved.parts)}")
            number = {name: i for i, name in enumerate(readers.names)}
            if missing := [name for name in saved.parts[part] if name not in number]:
                found = f"found none of {len(missing)}: {some([repr(name) for name in missing])}"
                raise DataError(f"{place}: expected the {len(saved.parts[part])} cases of {part} in {path}, {found}")
            return part, sorted(number[name] for name in saved.parts[part])
    declared = readers.declared
    if declared is None:
        hint = "--split RUN/split.json takes the parts of a run"
        raise DataError(f"{place}: expected a folder that declares a split, found none; {hint}")
    if text not in declared:
        known = ", ".join(dict.fromkeys(declared))
        raise DataError(f"{place}: expected a part of the split ({known}) or the file of a split, found {text!r}")
    return text, [i for i in everything if declared[i] == text]


def _distribution(case: Case) -> MaskDistribution:
    return MaskDistribution(
        torch.from_numpy(case.labels)[None],
        None if case.weights is None else torch.from_numpy(case.mass)[None],
        None if case.valid is None else torch.from_numpy(case.valid)[None],
    )


# -- the readers' masks -----------------------------------------------------------------------------------------------


def open_truth(truth: str | os.PathLike[str], quiet: bool = False) -> Folder:
    """A data folder; or, where there are no images, masks alone: ``masks/<reader>/<case>`` or ``<reader>/<case>``."""
    root = Path(truth)
    if not root.exists():
        raise DataError(f"{root}: expected a folder of the readers' masks, found no such folder")
    settings = FolderSettings.load(root) if root.is_dir() else FolderSettings()
    images = settings.images or "images"
    if find_manifest(root) or any((root / part / images).is_dir() for part in ("", *SPLITS)):
        return Folder(root, quiet=quiet)
    masks = root / (settings.masks or "masks")
    cases: dict[str, dict[str, Path]] = {}
    for path, key in _files(masks if masks.is_dir() else root):
        reader, _, name = key.partition("/")
        if not name:
            raise DataError(f"{path}: expected images/ and masks/, or masks as READER/CASE.png, found it beside both")
        cases.setdefault(name, {})[reader] = path
    if not cases:
        raise DataError(f"{root}: expected images/ and masks/, or masks as READER/CASE.png, found no mask")
    nested = any("/" in name for name in cases)
    # The first mask takes the place of the image: all others must be of its size.
    entries = [
        {"image": next(iter(by.values())), "masks": by, "name": name, "patient": name.split("/")[0] if nested else None}
        for name, by in sorted(cases.items())
    ]
    return _from_entries(entries, settings.changed(title=settings.title or root.resolve().name), quiet)


def _from_entries(entries: list[dict[str, Any]], settings: FolderSettings, quiet: bool) -> Folder:
    """A data folder of files at any place, which a manifest names."""
    settings = settings.changed(intensity=settings.intensity or Intensity())  # unused: no image is read
    with tempfile.TemporaryDirectory() as place:
        manifest = Path(place, "manifest.json")
        manifest.write_text(json.dumps(entries, default=lambda path: str(path.resolve())), "utf-8")
        return Folder(manifest, settings=settings, quiet=quiet)


def _files(root: Path) -> Iterator[tuple[Path, str]]:
    """Every file of a known format, with its path in ``root`` without the suffix."""
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        if path.is_file() and not any(part.startswith(".") for part in inside.parts) and format_of(path):
            yield path, (inside.parent / stem_of(path)).as_posix()


# -- the predictions --------------------------------------------------------------------------------------------------


class PredictedMasks:
    """Which files hold the predicted masks of which case; they are read on demand.

    Args:
        root: the folder of the predictions.
        readers: the truth. A scan of several slices is one file and several cases.
        names: the cases that are scored.
        partial: leave out those without a mask; ``names`` has the others.
    """

    def __init__(self, root: Path, readers: Folder, names: list[str], partial: bool = False) -> None:
        self.root, self._classes = root, len(readers.classes)
        entry_of = {entry.image: entry for entry in readers.entries}
        scan_of = {name: entry_of[readers.file_of(i)] for i, name in enumerate(readers.names)}
        scans = {entry.name: entry for entry in scan_of.values()}
        self._cases, self._scans = _short_names(readers.names), _short_names(scans)
        self._npz: dict[str, Path] = {}  # by case
        self._samples: dict[str, dict[str, Path]] = {}  # by scan, then by sample
        self._weights: dict[str, dict[str, float]] = {}
        self._find_files(written := self._find_written())
        missing = [name for name in names if name not in self._npz and scan_of[name].name not in self._samples]
        if missing and (len(missing) == len(names) or not partial):
            expected = f"expected masks of {count(len(names), 'case')}"
            hint = "" if len(missing) == len(names) else "; --partial scores those that are there"
            listed = f"{len(missing)}: {some([repr(n) for n in missing])}"
            raise DataError(f"{root}: {expected}, found none of {listed}{hint}")
        names = [name for name in names if name not in missing]
        self.names = set(names)
        wanted = {scan_of[name].name for name in names if name not in self._npz}
        self._samples = {name: by for name, by in self._samples.items() if name in wanted}
        if (path := root / WEIGHTS).is_file() and root not in written:
            self._read_weights(path)
        entries: list[dict[str, Any]] = [
            {"image": scans[name].image, "masks": by, "name": name, "weights": self._weights.get(name)}
            for name, by in self._samples.items()
        ]
        self._folder = _from_entries(entries, _settings(root, readers), True) if entries else None
        self._number = {name: i for i, name in enumerate(self._folder.names)} if self._folder else {}

    def _find_written(self) -> set[Path]:
        """Folders that ``ambiseg predict`` wrote, one per scan, of which only what weights.json lists are masks.

        For a picture, ``masks.npz`` is read, which has the soft probabilities too. The slices of a volume are read from
        the masks, whose position in space is compared with the truth's.
        """
        folders: set[Path] = set()
        for path in sorted(self.root.rglob(WEIGHTS)):
            about = _read(Any, path, "weights")
            if not isinstance(about, dict) or about.get("format") not in PREDICTIONS:
                continue
            folder = path.parent
            key = folder.relative_to(self.root).as_posix() if folder != self.root else folder.resolve().name
            if key not in self._scans:
                raise DataError(f"{folder}: expected the prediction of a case of the truth, found {key!r}")
            folders.add(folder)
            prediction, name = _read(_Written, path, "a prediction"), self._scans[key]
            if prediction.slices == 1 and (folder / "masks.npz").is_file():
                self._npz[name] = folder / "masks.npz"
            else:
                self._samples[name] = {mask.file: folder / mask.file for mask in prediction.masks}
                self._weights[name] = {mask.file: mask.weight for mask in prediction.masks}
        return folders

    def _find_files(self, written: set[Path]) -> None:
        """``<case>.npz``, and samples in that one of three layouts which most files fit; all files must fit it."""
        paths: list[Path] = []
        layouts: list[dict[Path, tuple[str, str]]] = [{}, {}, {}]
        for path, key in _files(self.root):
            if path.parent in written:
                continue
            if path.suffix.lower() == ".npz" and key in self._cases:
                self._npz[self._cases[key]] = path
                continue
            paths.append(path)
            first, _, rest = key.partition("/")
            head, _, last = key.rpartition("/")
            readings = ((rest, first), (head, last), (key, "mask"))  # sample/case, case/sample, case
            for layout, (case, sample) in zip(layouts, readings, strict=True):
                if case in self._scans:
                    layout[path] = self._scans[case], sample
        found = max(layouts, key=len)
        if stray := [path for path in paths if path not in found]:
            layout = "SAMPLE/CASE.png, CASE/SAMPLE.png, CASE.png or CASE.npz with a case of the truth"
            more = f" and {len(stray) - 1:,} more" if len(stray) > 1 else ""
            raise DataError(f"{stray[0]}: expected masks as {layout}, found a name that is of none{more}")
        for path, (name, sample) in found.items():
            if (other := self._samples.setdefault(name, {}).setdefault(sample, path)) != path:
                raise DataError(f"{path}: expected one file for sample {sample!r} of {name!r}, found {other.name} too")

    def _read_weights(self, path: Path) -> None:
        for case, weights in _read(_Weights, path, "{case: {sample: weight}}").items():
            if case not in self._scans:
                raise DataError(f"{path}: expected cases of the truth, found {case!r}")
            samples = self._samples.get(self._scans[case])
            if samples is None:
                continue
            for sample in samples.keys() ^ weights.keys():
                lacking = "no weight" if sample in samples else "no mask"
                raise DataError(f"{path}: expected a weight for each mask of {case!r}, found {lacking} of {sample!r}")
            if not sum(weights.values()) > 0:
                raise DataError(f"{path}: expected a weight above 0 for {case!r}, found {list(weights.values())}")
            self._weights[self._scans[case]] = weights

    def of(self, case: Case) -> MaskDistribution:
        """The predicted masks of a case."""
        if case.name not in self._npz:
            assert self._folder is not None
            return _distribution(self._folder[self._number[case.name]])
        path = self._npz[case.name]
        masks = MaskDistribution.load(path)
        if len(masks) != 1 or tuple(masks.spatial) != case.size:
            expected = f"expected masks of 1 image of {shape_text(case.size)} as the truth's"
            raise DataError(f"{path}: {expected}, found {count(len(masks), 'image')} of {shape_text(masks.spatial)}")
        try:
            masks.check_classes(self._classes)
        except ValueError as error:
            raise DataError(f"{path}: {error}") from None
        return masks


_Weight = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
_NAME = r"[^/\\]*[^./\\][^/\\]*"  # neither . nor ..
_Weights = dict[str, dict[str, _Weight]]


class _WrittenMask(BaseModel):
    file: Annotated[str, Field(pattern=f"^{_NAME}(/{_NAME})*$", max_length=1000)]  # in the prediction's own folder
    weight: _Weight


class _Written(BaseModel):
    """The part of a prediction's ``weights.json`` that is needed here."""

    slices: int = 0
    masks: list[_WrittenMask]


def _read(kind: Any, path: Path, what: str) -> Any:
    return read_json(path, what, kind)


def _short_names(names: Iterable[str]) -> dict[str, str]:
    """How a file may be named: after its case, or after the last part of that if no other case has the same.

    >>> _short_names(["ann/1", "ann/2", "bob/1"])
    {'ann/1': 'ann/1', 'ann/2': 'ann/2', 'bob/1': 'bob/1', '2': 'ann/2'}
    """
    known = {name: name for name in names}
    last = Counter(name.split("/")[-1] for name in known)
    return known | {short: name for name in known if last[short := name.split("/")[-1]] == 1}


def _settings(root: Path, readers: Folder) -> FolderSettings:
    """How predicted masks are read: as the truth's, but by their own ``ambiseg.json`` or else as class ids."""
    own, theirs = FolderSettings.load(root), readers.settings
    labels, void = own.labels, theirs.void if own.void is None else own.void
    if labels is None and own.colours is None:
        labels = {"0": 0, "1": 1, "255": 1} if len(readers.classes) == 2 and void is None else "ids"
    changes = {"labels": labels, "colours": own.colours, "void": void, "slices": "all"}
    changes["segments"] = theirs.segments if own.segments is None else own.segments
    return theirs.changed(title=readers.title, classes=readers.classes, **changes)

"""Masks that any tool wrote, scored against those of the readers."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ambiseg._util.errors import DataError
from ambiseg._util.progress import progress
from ambiseg._util.text import count, shape_text, some
from ambiseg.data.case import Case
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.folder.cases import Folder
from ambiseg.data.sets.folder.layout import SPLITS
from ambiseg.data.sets.folder.manifest import find_manifest
from ambiseg.data.sets.folder.settings import FolderSettings
from ambiseg.evaluation.results import Evaluation, summarise
from ambiseg.evaluation.scoring import Rules, score_masks
from ambiseg.io.formats import format_of, stem_of
from ambiseg.masks import MaskDistribution

WEIGHTS = "weights.json"
PREDICTION = "ambiseg.Prediction/1"  # what the weights.json of `ambiseg predict` calls itself; it lies beside its masks


def evaluate_files(
    predictions: str | os.PathLike[str],
    truth: str | os.PathLike[str],
    protocol: str = "mose",
    split: str | None = None,
    quiet: bool = False,
) -> Evaluation:
    """Score a folder of predicted masks.

    Args:
        predictions: masks of every case as ``<sample>/<case>.png`` or ``<case>/<sample>.png`` (or any other format that
            a data folder may hold), as ``<case>.png`` where there is one a case, a
            :class:`~ambiseg.masks.MaskDistribution` as ``<case>.npz``, or what ``ambiseg predict`` wrote. Masks are
            equally likely unless ``weights.json`` says ``{case: {sample: weight}}``. They hold class ids; with two
            classes 255 means class 1 as well, unless it is the truth's void value. An ``ambiseg.json`` may say
            otherwise. Where masks differ in weight there is no unbiased GED, which supposes independent draws.
        truth: a data folder, or its masks alone, ``<reader>/<case>.png``.
        protocol: a key of ``PROTOCOLS``.
        split: score the cases that the truth declares to be of this part; ``None`` is all.
        quiet: no progress.

    >>> import numpy as np
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as place:
    ...     for folder, value in [("truth/Ann", 255), ("truth/Bob", 0), ("mine/1", 255), ("mine/2", 255)]:
    ...         Path(place, folder).mkdir(parents=True)
    ...         Image.fromarray(np.full((4, 4), value, np.uint8)).save(Path(place, folder, "a.png"))
    ...     found = evaluate_files(Path(place, "mine"), Path(place, "truth"))
    >>> found.setting("files", 2)["metrics"]["ged"]["mean"], found.cases[0]["readers"]
    (0.5, 1)
    """
    source = Path(predictions)
    if not source.is_dir():
        raise DataError(f"{source}: expected a folder of predicted masks, found {_kind(source)}")
    readers = open_truth(truth, quiet)
    wanted = _wanted(readers, truth, split)
    rules = Rules(protocol, readers.evaluated, len(readers.classes))
    found = Predictions(source, readers, [readers.names[i] for i in wanted])
    scored, most = [], 0
    for i in progress(wanted, len(wanted), "scoring", quiet):
        case = readers[i]
        masks, annotations = found.of(case), _distribution(case)
        one = score_masks(masks, annotations, case.name, case.patient, rules, "files")
        if masks.weights is not None and float(masks.weights.max() - masks.weights.min()) > 1e-6:
            one.case["scores"]["files"]["ged_unbiased"] = None  # that is for independent draws, which weigh the same
        scored.append(one)
        most = max(most, masks.count)
    for one in scored:  # by the largest number of masks, which is known now
        one.case["scores"] = {f"files-{most}": one.case["scores"]["files"]}
        one.curves[f"files-{most}"] = one.curves.pop("files")
    return summarise(
        scored,
        [("files", most)],
        run=str(source),
        split=split or "all",
        protocol=protocol,
        which="files",
        weights="",
        seed=0,
        data=readers.title,
        threads=torch.get_num_threads(),
        batch_size=1,
        classes=list(readers.classes),
        evaluated=list(readers.evaluated),
    )


def _kind(path: Path) -> str:
    return "a file" if path.exists() else "nothing of that name"


def _wanted(readers: Folder, truth: str | os.PathLike[str], split: str | None) -> list[int]:
    if split is None:
        return list(range(len(readers)))
    if readers.declared is None:
        raise DataError(f"{os.fspath(truth)}: expected a folder that declares a split, found none; leave out --split")
    if split not in readers.declared:
        known = ", ".join(dict.fromkeys(readers.declared))
        raise DataError(f"{os.fspath(truth)}: expected a part of the split ({known}), found {split!r}")
    return [i for i, part in enumerate(readers.declared) if part == split]


def _distribution(case: Case) -> MaskDistribution:
    return MaskDistribution(
        torch.from_numpy(case.labels)[None],
        None if case.weights is None else torch.from_numpy(case.mass)[None],
        None if case.valid is None else torch.from_numpy(case.valid)[None],
    )


# -- the readers' masks -----------------------------------------------------------------------------------------------


def open_truth(truth: str | os.PathLike[str], quiet: bool = False) -> Folder:
    """A data folder; or, where there are no images, masks alone: in ``masks/``, or each reader's at once."""
    root = Path(truth)
    if not root.exists():
        raise DataError(f"{root}: expected a folder of the readers' masks, found nothing of that name")
    settings = FolderSettings.load(root) if root.is_dir() else FolderSettings()
    images = settings.images or "images"
    parts = [root / images] + [root / name / images for name in SPLITS]
    if find_manifest(root) or any(part.is_dir() for part in parts):
        return Folder(root, quiet=quiet)
    masks = root / (settings.masks or "masks")
    files = {path: key for path, key in _files(masks if masks.is_dir() else root)}
    cases: dict[str, dict[str, Path]] = {}
    for path, key in files.items():
        reader, _, name = key.partition("/")
        if not name:
            raise DataError(f"{path}: expected images/ and masks/, or masks as READER/CASE.png, found it beside both")
        cases.setdefault(name, {})[reader] = path
    if not cases:
        raise DataError(f"{root}: expected images/ and masks/, or masks as READER/CASE.png, found no mask")
    # A mask stands for the image that is not there: its size is what others are compared with.
    entries = [
        {"image": next(iter(by.values())), "masks": by, "name": name, "patient": name.split("/")[0]}
        for name, by in sorted(cases.items())
    ]
    return _from_entries(entries, replace(settings, title=settings.title or root.resolve().name), quiet)


def _from_entries(entries: list[dict[str, Any]], settings: FolderSettings, quiet: bool) -> Folder:
    """A data folder of files that lie anywhere: a manifest is what names them."""
    settings = replace(settings, intensity=settings.intensity or Intensity())  # nobody looks at the pixels
    with tempfile.TemporaryDirectory() as place:
        manifest = Path(place, "manifest.json")
        manifest.write_text(json.dumps(entries, default=lambda path: str(path.resolve())), "utf-8")
        return Folder(manifest, settings=settings, quiet=quiet)


def _files(root: Path) -> Iterator[tuple[Path, str]]:
    """Every file of a known format, with its path in ``root`` without the suffix."""
    for path in sorted(root.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if path.is_file() and not hidden and format_of(path):
            yield path, (path.relative_to(root).parent / stem_of(path)).as_posix()


# -- the predictions --------------------------------------------------------------------------------------------------


class Predictions:
    """Which file is whose, and the masks of a case on demand."""

    def __init__(self, root: Path, readers: Folder, names: list[str]) -> None:
        self.root, self._classes = root, len(readers.classes)
        by_image = {entry.image: entry for entry in readers.entries}
        scan_of = {name: by_image[readers.file_of(i)] for i, name in enumerate(readers.names)}
        scans = {entry.name: entry for entry in scan_of.values()}  # a scan of several slices is one file and many cases
        self._whole: dict[str, Path] = {}
        self._said: dict[str, dict[str, float]] = {}  # weights that predictions brought with them
        self._samples = self._sort(_known(readers.names), _known(scans))
        missing = [n for n in names if n not in self._whole and scan_of[n].name not in self._samples]
        if missing:
            expected = f"expected masks of {count(len(names), 'case')}"
            raise DataError(f"{root}: {expected}, found none of {len(missing)}: {some([repr(n) for n in missing])}")
        wanted = {scan_of[n].name for n in names if n not in self._whole}
        self._samples = {name: by for name, by in self._samples.items() if name in wanted}
        weights = self._weights(_known(scans))
        entries = [
            {"image": scans[name].image, "masks": by, "name": name, **({"weights": w} if (w := weights[name]) else {})}
            for name, by in self._samples.items()
        ]
        self._folder = _from_entries(entries, _settings(root, readers), True) if entries else None
        self._number = {name: i for i, name in enumerate(self._folder.names)} if self._folder else {}

    def _sort(self, cases: dict[str, str], scans: dict[str, str]) -> dict[str, dict[str, Path]]:
        """``<case>.npz`` aside: samples by the scan they are of. Any order of folders, the same for all files."""
        samples = self._predicted(scans)
        found, inner, flat = [], [], []
        stray: list[Path] = []
        for path, key in _files(self.root):
            if path.parent in self._folders:
                continue
            if path.suffix.lower() == ".npz" and key in cases:
                self._whole[cases[key]] = path
                continue
            sample, _, rest = key.partition("/")
            head, _, last = key.rpartition("/")
            found += [(scans[rest], sample, path)] if rest in scans else []
            inner += [(scans[head], last, path)] if head in scans else []
            flat += [(scans[key], "mask", path)] if key in scans else []
            stray += [] if rest in scans or head in scans or key in scans else [path]
        found, *others = sorted((found, inner, flat), key=len, reverse=True)
        used = {path for _, _, path in found}
        stray += sorted({path for other in others for _, _, path in other} - used)
        if stray:
            message = (
                "expected masks as SAMPLE/CASE.png, CASE/SAMPLE.png, CASE.png or CASE.npz with a case of the truth"
            )
            more = f" and {len(stray) - 1:,} more" if len(stray) > 1 else ""
            raise DataError(f"{min(stray)}: {message}, found a name that is of none{more}")
        for name, sample, path in found:
            if (other := samples.setdefault(name, {}).setdefault(sample, path)) != path:
                raise DataError(f"{path}: expected one file for sample {sample!r} of {name!r}, found {other.name} too")
        return samples

    def _predicted(self, scans: dict[str, str]) -> dict[str, dict[str, Path]]:
        """What ``ambiseg predict`` wrote: a folder a case, of which only what its weights.json lists are masks.

        Of a picture all is in one file, soft probabilities included. The slices of a volume come from the masks, whose
        place in space is compared with the truth's.
        """
        self._folders: set[Path] = set()
        samples: dict[str, dict[str, Path]] = {}
        for path in sorted(self.root.rglob(WEIGHTS)):
            about = _json(path)
            if not isinstance(about, dict) or about.get("format") != PREDICTION:
                continue
            folder = path.parent
            key = folder.relative_to(self.root).as_posix() if folder != self.root else folder.resolve().name
            if key not in scans:
                raise DataError(f"{folder}: expected the prediction of a case of the truth, found {key!r}")
            self._folders.add(folder)
            name, whole = scans[key], folder / "masks.npz"
            if about.get("slices") == 1 and whole.is_file():
                self._whole[name] = whole
                continue
            try:
                masks = {str(mask["file"]): mask["weight"] for mask in about["masks"]}
            except (KeyError, TypeError):
                raise DataError(f"{path}: expected masks with a file and a weight each, found something else") from None
            samples[name] = {file: folder / file for file in masks}
            self._said[name] = masks
        return samples

    def _weights(self, scans: dict[str, str]) -> dict[str, dict[str, float] | None]:
        path = self.root / WEIGHTS
        weights: dict[str, dict[str, float] | None] = {name: self._said.get(name) for name in self._samples}
        if not path.is_file() or self.root in self._folders:
            return weights
        content = _json(path)
        if not isinstance(content, dict) or not all(isinstance(said, dict) for said in content.values()):
            raise DataError(f"{path}: expected {{case: {{sample: weight}}}}, found something else")
        for name, said in content.items():
            if name not in scans:
                raise DataError(f"{path}: expected cases of the truth, found {name!r}")
            if scans[name] not in self._samples:
                continue
            there = self._samples[scans[name]]
            for sample in there.keys() | said.keys():
                if sample not in said or sample not in there:
                    where = "no weight" if sample not in said else "no mask"
                    raise DataError(f"{path}: expected a weight for each mask of {name!r}, found {where} of {sample!r}")
            numbers = [_weight(value) for value in said.values()]
            if None in numbers or not math.fsum(n or 0 for n in numbers) > 0:
                raise DataError(
                    f"{path}: expected weights of 0 or more, one above 0, found {list(said.values())} for {name!r}"
                )
            weights[scans[name]] = said
        return weights

    def of(self, case: Case) -> MaskDistribution:
        """The masks that were predicted for a case."""
        if case.name in self._whole:
            return self._load(self._whole[case.name], case)
        assert self._folder is not None
        return _distribution(self._folder[self._number[case.name]])

    def _load(self, path: Path, case: Case) -> MaskDistribution:
        try:
            masks = MaskDistribution.load(path)
        except ValueError as error:
            raise DataError(str(error)) from None
        if len(masks) != 1 or tuple(masks.spatial) != case.size:
            found = f"{count(len(masks), 'image')} of {shape_text(masks.spatial)}"
            raise DataError(
                f"{path}: expected masks of 1 image of {shape_text(case.size)} as the truth's, found {found}"
            )
        try:
            masks.class_ids(self._classes)
            masks.marginal_probs(self._classes)
        except ValueError as error:
            raise DataError(f"{path}: {error}") from None
        return masks


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{path}: expected JSON, found {error}") from None


def _known(names: Iterable[str]) -> dict[str, str]:
    """What a file may be called: the case's name, or the last part of it where no other case has the same.

    >>> _known(["ann/1", "ann/2", "bob/1"])
    {'ann/1': 'ann/1', 'ann/2': 'ann/2', 'bob/1': 'bob/1', '2': 'ann/2'}
    """
    names = list(names)
    known = {name: name for name in names}
    last = Counter(name.split("/")[-1] for name in names)
    return known | {short: name for name in names if last[short := name.split("/")[-1]] == 1 and short not in known}


def _weight(value: Any) -> float | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and math.isfinite(value)
    return float(value) if fits else None


def _settings(root: Path, readers: Folder) -> FolderSettings:
    """How predicted masks are read: as the predictions' own ``ambiseg.json`` says, else as class ids."""
    own, theirs = FolderSettings.load(root), readers.settings
    labels: str | Mapping[str, int | str] | None = own.labels
    void = theirs.void if own.void is None else own.void
    if labels is None and own.colours is None:
        both = len(readers.classes) == 2 and void is None
        labels = {"0": 0, "1": 1, "255": 1} if both else "ids"
    return FolderSettings(
        title=readers.title,
        classes=readers.classes,
        labels=labels,
        colours=own.colours,
        void=void,
        channels=theirs.channels,
        axes=theirs.axes,
        axis=theirs.axis,
        geometry=theirs.geometry,
        dicom=theirs.dicom,
        slices="all",
    )

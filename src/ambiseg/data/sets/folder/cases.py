"""Your own data: a folder of images and masks, or a manifest that names them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ambiseg._util.bands import looked_up
from ambiseg._util.patterns import first_groups
from ambiseg._util.progress import progress
from ambiseg._util.text import count
from ambiseg.data.case import Case, Cases, Decoded, Reading, byte_units, digest, smallest_unsigned
from ambiseg.data.intensity import Intensity
from ambiseg.data.sets.folder.labels import (
    Convention,
    Numbers,
    Values,
    by_value,
    declared_convention,
    observe,
    observed_convention,
)
from ambiseg.data.sets.folder.layout import Entry, Listing, MaskFile, list_folder
from ambiseg.data.sets.folder.manifest import find_manifest, list_manifest
from ambiseg.data.sets.folder.paths import list_paths, suggest_paths
from ambiseg.data.sets.folder.persons import FOLDERS, Persons, find_persons
from ambiseg.data.sets.folder.reading import Files, Kind, may_be_stack
from ambiseg.data.sets.folder.settings import FILE, FolderSettings
from ambiseg.io.errors import FileError, Problem
from ambiseg.io.formats import format_of
from ambiseg.io.rois import VOID_ID
from ambiseg.io.source import Source
from ambiseg.settings import validate

_FIRST = 25  # images that tell the checker what is usual


class _Place(NamedTuple):
    """One case: a slice of an image."""

    entry: Entry
    slice: int
    name: str


class Folder(Cases):
    """Images and the masks of their readers, from files: PNG, JPEG, BMP, PPM, GIF, TIFF, npy, npz, NIfTI and DICOM.

        data/images/a.png   data/masks/Ann/a.png   data/masks/Bob/a.png   …

    A reader may be missing on some images. A volume's slices are cases of their own, with one patient. Void is a
    property of the pixel: it counts nowhere if any reader called it void.

    Files are listed at once; volumes are opened when the number of cases is needed, and pictures when a case is read.
    If neither ``labels`` nor ``classes`` says what the masks hold, all masks are looked through when that is first
    needed. :meth:`decode` learns all that on its way, so that it opens every file once.

    Args:
        root: a folder with ``images/`` and ``masks/``, one with a manifest, or the manifest.
        settings: how to read them; the folder's ``ambiseg.json`` says what these do not.
        quiet: no progress on the error stream.
        strict: False collects problems in ``problems`` instead of raising them: for the checker.
        given: any of :class:`~ambiseg.data.sets.folder.settings.FolderSettings` by name, over ``settings``.

    >>> import tempfile
    >>> from PIL import Image
    >>> root = Path(tempfile.mkdtemp())
    >>> for part, value in [("images", 90), ("masks/Ann", 255), ("masks/Bob", 0)]:
    ...     (root / part).mkdir(parents=True)
    ...     Image.fromarray(np.full((4, 4), value, np.uint8)).save(root / part / "a.png")
    >>> cases = Folder(root)
    >>> cases.names, cases.classes, cases[0].readers, cases[0].labels[:, 0, 0].tolist()
    (['a'], ('background', 'foreground'), ('Ann', 'Bob'), [1, 0])
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        settings: FolderSettings | None = None,
        *,
        quiet: bool = False,
        strict: bool = True,
        **given: Any,
    ) -> None:
        root = Path(root)
        if not root.exists():
            raise FileError.of("E001", root, "expected a folder or a manifest, found nothing of that name")
        manifest = find_manifest(root)
        self.root = manifest.parent if manifest else root
        said = validate(FolderSettings, given).over(settings or FolderSettings())
        self.settings = said.over(FolderSettings.load(self.root))
        self.title = self.settings.title or self.root.resolve().name
        self.problems: list[Problem] = []
        self.seen: Values | None = None  # in the masks, once they were looked through
        self._quiet, self._strict = quiet, strict
        self._tolerant = nullcontext() if strict else suppress(FileError)  # the checker reports it with the case
        listing = list_manifest(manifest) if manifest else self._listed()
        for problem in listing.problems:
            if not (self.settings.missing == "skip" and problem.code == "E101"):
                self._report(problem)
        self.entries = [entry for entry in listing.entries if entry.masks]
        if not self.entries and strict:
            raise FileError.of("E004", self.root, "expected at least one image with a mask, found none")
        bare = [entry for entry in self.entries if entry.split is None]
        if 0 < len(bare) < len(self.entries):
            found = f"found {count(len(bare), 'case')} without"
            self._report(Problem("E008", str(bare[0].image), f"expected a split for all cases or none, {found}"))
        self.reading = Reading(self.settings.axes, self.settings.axis, self.settings.channels is not None)
        lossy = [mask.path for entry in self.entries for mask in entry.masks if format_of(mask.path) == "JPEG"]
        masks = sum(len(entry.masks) for entry in self.entries)
        if not strict and len(lossy) == masks > 0 and declared_convention(self.settings) is None:
            message = (
                f"expected masks without loss, found {count(masks, 'mask')} as JPEG, whose values are not class ids"
            )
            self._report(Problem("E205", os.path.commonpath([path.parent for path in lossy]), message))
            self.settings = self.settings.changed(labels={"threshold": 128})  # so that the checker can go on
        self._files = Files(self.settings, 1 + max((len(entry.masks) for entry in self.entries), default=0))
        named = manifest is not None or "{patient}" in (self.settings.image_path or "")
        self._told = named and any(entry.patient for entry in self.entries)  # patients by their owner
        self.persons = self._assume() if self.settings.patient is None else None
        self.patients_assumed = self.persons.text if self.persons else ""
        names = [entry.name for entry in self.entries]
        declared = self.settings.patient
        self._found = {} if declared is None else dict(zip(names, first_groups(declared, names), strict=True))
        self._patient_of = {entry.name: self._patient(entry) for entry in self.entries}

    def _listed(self) -> Listing:
        if self.settings.image_path is not None:
            return list_paths(self.root, self.settings)
        try:
            return list_folder(self.root, self.settings)
        except FileError as refused:
            if (found := suggest_paths(self.root)) is None:
                raise
            fix = f"if this is right, write into {self.root / FILE}: {json.dumps(found)}"
            raise FileError(replace(refused.problem, fix=fix)) from None

    def _report(self, problem: Problem) -> None:
        if self._strict and problem.severity == "error":
            raise FileError(problem)
        self.problems.append(problem)

    def _assume(self) -> Persons | None:
        """How patients follow from the names, where neither settings nor a manifest nor several folders tell them."""
        folders = {entry.patient for entry in self.entries}
        if self._told or len(folders - {None}) > 1:
            return None if self._told else FOLDERS
        return find_persons([entry.name for entry in self.entries])

    def _patient(self, entry: Entry) -> str:
        if self.persons is not None and self.persons is not FOLDERS:
            fits = re.match(self.persons.pattern, entry.name)
            return fits[1] if fits else entry.name
        if self.settings.patient is not None:
            if (found := self._found.get(entry.name)) is not None:
                return found
            message = f"expected {self.settings.patient!r} to find the patient in {entry.name!r}, found nothing"
            self._report(Problem("E009", str(entry.image), message))
        alone = self.persons is None and not self._told  # all images in one folder: it is nobody's
        return entry.name if alone else entry.patient or entry.name

    def _slices(self, entry: Entry, image: Source | None) -> list[_Place]:
        """The cases of one entry: one for a picture (which need not be opened for this), one per slice of a volume."""
        if image is None or image.slices == 1:
            return [_Place(entry, 0, entry.name)]
        kept: Iterable[int] = range(image.slices)
        if self.settings.slices == "marked":
            masks = [self._files.open(mask.path, mask=True, like=image) for mask in entry.masks]
            kept = [k for k in kept if any(k < mask.slices and mask.read(k).any() for mask in masks)]
        digits = max(3, len(str(image.slices - 1)))
        return [_Place(entry, k, f"{entry.name}#{k:0{digits}}") for k in kept]

    # -- what is known after opening the volumes, one image, or all masks ----------------------------------------------

    @cached_property
    def _places(self) -> list[_Place]:
        found: list[_Place] = []
        for entry in progress(self.entries, len(self.entries), "listing", self._quiet):
            try:
                found += self._slices(entry, self._grid(entry))
            except FileError as refused:
                self._report(refused.problem)
        return found

    @cached_property
    def names(self) -> list[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [place.name for place in self._places]

    @cached_property
    def patients(self) -> list[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return [self._patient_of[place.entry.name] for place in self._places]

    @cached_property
    def declared(self) -> list[str] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        parts = [place.entry.split for place in self._places]
        return [part for part in parts if part] if all(parts) and parts else None

    @cached_property
    def convention(self) -> Convention:
        """What the values in the masks mean; looks through all masks if the settings do not say."""
        if (declared := declared_convention(self.settings)) is not None:
            return declared
        self.seen = seen = Values()
        for place in progress(self._places, len(self._places), "looking through the masks", self._quiet):
            for mask in place.entry.masks:
                with self._tolerant:
                    source = self._files.open(mask.path, mask=True, like=self._grid(place.entry))
                    values = source.read(min(place.slice, source.slices - 1))
                    if source.ids:
                        seen.count(None, mask.path)
                    else:
                        seen.add(values, mask.path)
        try:
            return observed_convention(seen, self.settings)
        except FileError as refused:
            self._report(refused.problem)
            return by_value(seen)  # so that the checker can go on

    def _grid(self, entry: Entry) -> Source | None:
        """The image, if it may hold several slices or have a place in space: those of its masks must be the same."""
        return self._files.open(entry.image) if may_be_stack(entry.image) else None

    @cached_property
    def classes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.convention.classes

    @cached_property
    def evaluated(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.settings.evaluated or tuple(range(1, len(self.classes)))

    @cached_property
    def _first(self) -> Kind:
        """The kind of the first image: the others must be like it. For the checker, the commonest among several."""
        kinds: list[Kind] = []
        for entry in self.entries[: 1 if self._strict else _FIRST]:
            with self._tolerant:
                kinds.append(Kind.of(self._files.open(entry.image)))
        alike = [[other for other in kinds if other[1:3] == kind[1:3]] for kind in kinds]
        return max(alike, key=len)[0] if kinds else Kind("", 1, np.dtype("u1"))

    @cached_property
    def channels(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.settings.channels or self._first.channels

    @cached_property
    def intensity(self) -> Intensity:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.settings.intensity or Intensity.for_dtype(self._first.dtype)

    @cached_property
    def units(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.settings.units or self._first.units or byte_units(self._first.dtype, self.channels)

    def state(self) -> str:
        """Of the settings, and of paths, sizes and times of all files; no file is opened."""
        said = self.settings.model_dump(mode="json", exclude_none=True)
        parts = [self.title, repr(sorted(said.items()))]
        for entry in self.entries:
            for path in (entry.image, *(mask.path for mask in entry.masks)):
                files = sorted(path.iterdir()) if path.is_dir() else [path]
                parts += [f"{file.absolute()} {(about := file.stat()).st_size} {about.st_mtime_ns}" for file in files]
            patient = self._patient_of[entry.name]
            parts += [entry.name, str(None if patient == entry.name else patient), str(entry.split)]
            parts += [f"{mask.reader} {mask.weight}" for mask in entry.masks]
        return digest(*parts)

    def file_of(self, index: int, reader: str | None = None) -> Path:
        """Where a case's image is, or the mask of one of its readers."""
        entry = self._places[index].entry
        return next((mask.path for mask in entry.masks if mask.reader == reader), entry.image)

    def readers_of(self, index: int) -> list[str]:
        """Who drew a mask of this case, readable or not."""
        return [mask.reader for mask in self._places[index].entry.masks]

    # -- reading -------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: int) -> Case:
        return _unless_errors(*self.read(index))

    def read(self, index: int) -> tuple[Case | None, list[Problem]]:
        """One case from as many of its files as can be read, and what is wrong with the others."""
        place = self._places[index]
        try:
            source = self._files.open(place.entry.image)
        except FileError as refused:
            return None, [refused.problem]
        return self._read(place, source, self.convention, [])

    @property
    def expected(self) -> int:
        return len(self.entries)

    def decode(self, start: int = 0) -> Iterator[Decoded]:
        """Every file is opened once. Tables hold the numbers of the masks until they are settled, unless declared."""
        convention = declared_convention(self.settings)
        number = 0
        for entry in self.entries:
            if number < start and not may_be_stack(entry.image):
                number += 1
                continue
            source = self._files.open(entry.image)
            if entry is self.entries[0]:
                self._first = Kind.of(source)
            places = self._slices(entry, source)
            for place in places[max(start - number, 0) :]:
                observed: list[Any] = []
                case = _unless_errors(*self._read(place, source, convention, observed))
                whole = "" if convention is None else case.digest
                yield Decoded(case, case.image_digest, whole, entry.split, observed=observed or None)
            number += len(places)

    def settle(self, observed: Sequence[Any]) -> bool:
        """The convention of all masks, from the numbers that :meth:`decode` found in each."""
        if declared_convention(self.settings) is not None:
            return False
        masks: list[tuple[Path, Numbers]] = [  # JSON has numbers as texts
            (Path(path), numbers and {int(number): pixels for number, pixels in numbers.items()})
            for case in observed
            for path, numbers in case
        ]
        seen = Values()
        for path, numbers in masks:
            seen.count(numbers, path)
        self.convention = observed_convention(seen, self.settings)
        for path, numbers in masks:
            self.convention.check(numbers, path)
        return True

    def settled(self, case: Case, observed: Any) -> Case:
        # A convention that was found out keeps the order of numbers, so that regions stay as they are numbered.
        table = case.table.astype(np.int64)
        rows = slice(None) if case.void is None else ~case.void
        for m, (_, numbers) in enumerate(observed):
            if numbers is not None:
                table[rows, m] = self.convention.targets(table[rows, m])
        return replace(case, table=table.astype(smallest_unsigned(table.max() + 1)))

    def _read(
        self, place: _Place, source: Source, convention: Convention | None, observed: list[Any]
    ) -> tuple[Case | None, list[Problem]]:
        """``observed`` takes path and numbers of each mask where there is no convention yet."""
        entry, k, name = place
        problems: list[Problem] = [*source.notes] if k == 0 else []
        try:
            image = self._files.image(source, k, self._first)
        except FileError as refused:
            return None, [*problems, refused.problem]
        masks: list[MaskFile] = []
        labels: list[np.ndarray] = []
        valid: np.ndarray | None = None
        for mask in entry.masks:
            try:
                values = self._files.mask(mask.path, source, k)
                if self._files.has_ids(mask.path):
                    outside = values[0] == VOID_ID if values.dtype == np.uint16 else np.zeros((), bool)
                    ids, void = values[0] * ~outside, outside if outside.any() else None
                    ids = ids.astype(np.uint8) if ids.dtype == np.bool_ else ids
                    if convention is None:
                        observed.append((str(mask.path), None))
                elif convention is not None:
                    ids, void = convention(values, mask.path)
                else:
                    seen = observe(values, mask.path)
                    numbers = np.array(list(seen.pixels))
                    small = smallest_unsigned(numbers.max() + 1) if numbers.min() >= 0 else numbers.dtype
                    ids = looked_up(numbers.astype(small), seen.ranks)
                    void = None if seen.bits or self.settings.void not in seen.pixels else ids == self.settings.void
                    observed.append((str(mask.path), seen.numbers))
            except FileError as refused:
                problems.append(refused.problem)
                continue
            masks.append(mask)
            labels.append(ids)
            if void is not None:
                valid = ~void if valid is None else valid & ~void
        if not masks:
            return None, problems
        stack = np.stack(labels)
        if valid is not None:
            stack = stack * valid  # what others called a void pixel makes no region of its own
            if not valid.any():
                message = "expected a pixel that counts, found that all are void"
                problems.append(Problem("W311", str(entry.image), message))
        weights = None
        if any(mask.weight is not None for mask in masks):
            weights = np.array([1.0 if mask.weight is None else mask.weight for mask in masks])
        patient, readers = self._patient_of[entry.name], [mask.reader for mask in masks]
        case = Case.of(image, stack, name=name, patient=patient, readers=readers, weights=weights, valid=valid)
        return case, problems


def _unless_errors(case: Case | None, problems: Iterable[Problem]) -> Case:
    for problem in problems:
        if problem.severity == "error":
            raise FileError(problem)
    assert case is not None
    return case

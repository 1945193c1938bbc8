"""Which file is whose: from a folder of images and masks to a list of images with the masks of each."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias

from ambiseg._util.text import count, printable, some
from ambiseg._util.walking import walk
from ambiseg.data.sets.folder.settings import FolderSettings
from ambiseg.io.errors import FileError, Problem
from ambiseg.io.formats import FORMATS, UNREAD, format_of, stem_of, suffix_of

IGNORED = {"thumbs.db", "desktop.ini", "__macosx"}  # left behind by operating systems
_SPLIT_WORDS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
SPLITS = {word: split for split, words in _SPLIT_WORDS.items() for word in words}
_LIKELY: dict[str, tuple[str, ...]] = {
    "images": ("images", "image", "img", "imgs", "scan", "scans", "picture", "pictures", "photo", "photos", "input"),
    "masks": ("masks", "mask", "label", "labels", "seg", "segs", "annotation", "annotations", "gt", "segmentations"),
}
_NEAR = 1000  # names that a stray one is compared with
Named: TypeAlias = dict[str, Path]  # files by the names of their cases


@dataclass(frozen=True)
class MaskFile:
    """One reader's mask of one image."""

    reader: str
    path: Path
    weight: float | None = None


@dataclass(frozen=True)
class Entry:
    """One image file (or volume) and the masks that belong to it."""

    name: str
    image: Path
    masks: tuple[MaskFile, ...]
    patient: str | None = None
    split: str | None = None


@dataclass
class Listing:
    """All that is known without opening a picture."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)  # names of pictures in formats that are not read

    def report(self, code: str, file: str | Path, message: str, fix: str = "") -> None:
        self.problems.append(Problem(code, str(file), message, fix))


def list_folder(root: Path, settings: FolderSettings) -> Listing:
    """``images/`` and ``masks/``, directly in ``root`` or in its ``train/``, ``val/`` and ``test/``.

    Raises ``DataError`` if there is nothing of the kind; anything less is a problem in the listing.
    """
    images, masks = settings.images or "images", settings.masks or "masks"
    below = [d for d in _folders(root) if (d / images).is_dir()]
    order = list(SPLITS)
    parts = sorted((d for d in below if d.name.lower() in SPLITS), key=lambda d: order.index(d.name.lower()))
    if (root / images).is_dir():
        parts = [root]
    elif not parts:
        found = some([*(f"{d.name}/" for d in _folders(root)), *(f.name for f in _files(root))]) or "an empty folder"
        message = f"expected {images}/ and {masks}/, or a manifest.csv, found {found}"
        raise FileError.of("E002", root, message, f"give the folder below, {below[0]}" if below else _rename(root))
    listing = Listing()
    for part in parts:
        _list_part(part, "" if part == root else part.name, settings, listing)
    return listing


def _rename(root: Path) -> str:
    """Where the data probably are: in the folder above, or in folders of other names."""
    if any(root.name in words and (root.resolve().parent / key).is_dir() for key, words in _LIKELY.items()):
        return f"give the folder above, {root.resolve().parent}"
    meant = {key: d.name for d in _folders(root) for key, words in _LIKELY.items() if d.name.lower() in words}
    if not meant:
        return ""
    return "write into ambiseg.json: {" + ", ".join(f'"{key}": "{name}"' for key, name in meant.items()) + "}"


def _list_part(part: Path, split: str, settings: FolderSettings, listing: Listing) -> None:
    images_at, masks_at = part / (settings.images or "images"), part / (settings.masks or "masks")
    images = _named(_collect(images_at, settings, listing), settings.image_name, listing)
    if not images:
        found = some([p.name for p in [*_folders(images_at), *_files(images_at)]]) or "nothing"
        listing.report("E003", images_at, f"expected pictures, found {found}")
        return
    readers = _readers(masks_at, images_at, listing)
    if not readers:
        return
    masks: dict[str, Named] = {}
    for reader, folder in readers.items():
        template = settings.mask_name
        template = template.get(reader) if isinstance(template, Mapping) else template
        files = _collect(folder, settings, listing)
        if template is not None and "{reader}" in template and folder == masks_at:
            masks |= _named_by_reader(files, template, listing)
        else:
            masks[reader] = _named(files, template and template.replace("{reader}", reader), listing)
        if not files and folder != masks_at:
            listing.report("H108", folder, "expected masks, found none in this reader's folder")
    _match(images, masks, masks_at, settings, listing)
    prefix, declared = (f"{split}/", SPLITS[split.lower()]) if split else ("", None)
    for key, path in images.items():
        drawn = tuple(MaskFile(reader, files[key]) for reader, files in masks.items() if key in files)
        patient = key.split("/")[0] if "/" in key else None
        listing.entries.append(Entry(prefix + key, path, drawn, patient, declared))


def _readers(masks_at: Path, images_at: Path, listing: Listing) -> dict[str, Path]:
    """Each reader's folder of masks. Masks without such folders are one reader's."""
    folders = _folders(masks_at)
    files = [file for file in _files(masks_at) if format_of(file)]
    apart = not {d.name for d in folders} <= {d.name for d in _folders(images_at)}  # by reader, not as the images are
    if apart and not files:
        return {folder.name: folder for folder in folders}
    if not apart and (files or folders):
        return {"reader_1": masks_at}
    if apart:
        beside = f"found {count(len(files), 'file')} beside {some([f'{d.name}/' for d in folders])}"
        listing.report("E005", masks_at, f"expected files or a folder for each reader, {beside}")
    elif masks_at.is_dir():
        found = some([p.name for p in _files(masks_at)]) or "an empty folder"
        listing.report("E004", masks_at, f"expected masks, found {found}")
    else:
        beside = some([f"{d.name}/" for d in _folders(masks_at.parent) if d != images_at])
        found = f"{beside} beside {images_at.name}/" if beside else "none"
        listing.report("E004", masks_at, f"expected a folder of masks, found {found}")
    return {}


def _collect(top: Path, settings: FolderSettings, listing: Listing) -> list[tuple[str, Path]]:
    """Every picture below ``top`` with its name: its path from there, without the suffix, in composed Unicode."""
    found: list[tuple[str, Path]] = []
    ignored: list[Path] = []
    closed: list[OSError] = []  # folders that may not be read, which a walk passes over in silence
    for folder, files in walk(top, hidden, closed.append):
        kinds = {path: format_of(path) for name in files if is_text(path := folder / name, listing)}
        if "DICOM" in kinds.values() and folder != top and settings.dicom != "files":
            found.append((_key(folder, top, folder.name), folder))
            kinds = {path: kind for path, kind in kinds.items() if kind != "DICOM"}
        for path, kind in kinds.items():
            key = _key(path, top, stem_of(path))
            if kind:
                found.append((key, path))
            elif suffix_of(path) in UNREAD:
                listing.report("E105", path, f"expected one of {' '.join(FORMATS)}, found {UNREAD[suffix_of(path)]}")
                listing.unread.add(key)
            else:
                ignored.append(path)
    for error in closed:
        message = f"expected a folder that may be read, found: {error.strerror}"
        listing.report("E201", error.filename, message, "change the folder's permissions")
    if ignored:
        names = some(sorted({suffix_of(p) or p.name for p in ignored}))
        message = f"{count(len(ignored), 'file')} ignored: {names} is no format of pictures"
        listing.report("H107", ignored[0] if len(ignored) == 1 else top, message)
    return found


def is_text(path: Path, listing: Listing) -> bool:
    """Whether a file's name is text, which a case is named after; bytes of another encoding are reported."""
    try:
        path.name.encode()
    except UnicodeEncodeError:
        message = "expected a name in UTF-8, found other bytes"
        listing.report("E201", printable(str(path)), message, "rename the file")
        return False
    return True


def _key(path: Path, top: Path, stem: str) -> str:
    return unicodedata.normalize("NFC", (path.relative_to(top).parent / stem).as_posix())


def _named(files: list[tuple[str, Path]], template: str | None, listing: Listing) -> Named:
    """By the case's name, which the template takes out of the file's."""
    named: Named = {}
    for key, path in files:
        fits = template and re.fullmatch(_pattern(template), key)
        name = fits["name"] if fits else key
        if (first := named.setdefault(name, path)) != path:
            listing.report("E104", path, f"expected one file named {name!r}, found {first.name} as well")
    return named


def _named_by_reader(files: list[tuple[str, Path]], template: str, listing: Listing) -> dict[str, Named]:
    """Masks of all readers in one folder, told apart by their names."""
    split: dict[str, list[tuple[str, Path]]] = {}
    for key, path in files:
        if fits := re.fullmatch(_pattern(template), key):
            split.setdefault(fits["reader"], []).append((fits["name"], path))
        else:
            listing.report("W102", path, f"expected a name like {template!r}, found {key!r}")
    return {reader: _named(split[reader], None, listing) for reader in sorted(split)}


def _pattern(template: str) -> str:
    pattern = re.escape(template).replace(r"\{name\}", "(?P<name>.+)")
    return pattern.replace(r"\{reader\}", "(?P<reader>[^/]+?)", 1)


def _match(images: Named, masks: dict[str, Named], masks_at: Path, settings: FolderSettings, listing: Listing) -> None:
    """Report masks without an image, and images that have no mask at all."""
    covered = {key for files in masks.values() for key in files}
    bare = [key for key in images if key not in covered]
    known = images.keys() | listing.unread  # that an image cannot be read has been said
    strays = {reader: [key for key in files if key not in known] for reader, files in masks.items()}
    suggested = {r: name for r, stray in strays.items() if (name := _suggest_name(stray, bare or list(images), r))}
    lost = {reader for reader, stray in strays.items() if stray and len(stray) == len(masks[reader])}
    for reader, files in masks.items():
        stray = strays[reader]
        together = lost if reader in lost else {reader}
        fix = _name_advice({r: name for r, name in suggested.items() if r in together}, settings)
        if reader in lost:
            folder = os.path.commonpath([path.parent for path in files.values()])
            example = f"such as {files[stray[0]].name}; the first image is {next(iter(images.values())).name}"
            message = f"expected masks named as the images, found {count(len(stray), 'mask')} that fit none, {example}"
            listing.report("E103", folder, message, fix)
            continue
        lacking = {image.casefold(): path.name for image, path in images.items() if image not in files}
        for number, key in enumerate(stray):
            compared = list(lacking)[:_NEAR] if number < _NEAR // 50 else []  # each with each would take all day
            near = get_close_matches(key.casefold(), compared, 1, 0.7)
            found = f"found none; the nearest is {lacking[near[0]]}" if near else "found none"
            listing.report("W102", files[key], f"expected an image named {key!r}, {found}", fix)
    if lost and all(reader in lost for reader, files in masks.items() if files):
        return  # said once for each reader, and not for each image again
    for key in bare:
        message = f"expected a mask of at least one reader in {masks_at.name}/, found none"
        listing.report("E101", images[key], message)


def _name_advice(suggested: dict[str, tuple[str, str]], settings: FolderSettings) -> str:
    """One line for ambiseg.json that serves all readers: they need not name their masks alike."""
    declared = settings.mask_name if isinstance(settings.mask_name, Mapping) else {}
    for key in ("mask_name", "image_name"):
        templates = {reader: template for reader, (setting, template) in suggested.items() if setting == key}
        if templates:
            alike = key == "image_name" or (len(set(templates.values())) == 1 and not declared)
            value = next(iter(templates.values())) if alike else {**declared, **templates}
            return f"write into ambiseg.json: {json.dumps({key: value}, ensure_ascii=False)}"
    return ""


def _suggest_name(stray: list[str], images: list[str], reader: str) -> tuple[str, str] | None:
    """The setting under which most of the stray masks would find an image, if there is one."""
    templates: Counter[tuple[str, str]] = Counter()
    for mask in stray[:200]:
        if inside := [image for image in images if image in mask] if len(images) <= 2000 else []:
            image = max(inside, key=len)
            templates["mask_name", mask.replace(image, "{name}", 1).replace(reader, "{reader}", 1)] += 1
        if around := [image for image in images[:2000] if mask in image]:
            templates["image_name", min(around, key=len).replace(mask, "{name}", 1)] += 1
    for setting, hits in templates.most_common(1):
        if hits * 2 >= min(len(stray), 200) and setting[1].count("{name}") == 1:
            return setting
    return None


def hidden(name: str) -> bool:
    """Whether a file or folder is none of the user's."""
    return name.startswith(".") or name.lower() in IGNORED


def _folders(path: Path) -> list[Path]:
    return sorted(d for d in path.iterdir() if d.is_dir() and not hidden(d.name)) if path.is_dir() else []


def _files(path: Path) -> list[Path]:
    return sorted(f for f in path.iterdir() if f.is_file() and not hidden(f.name)) if path.is_dir() else []

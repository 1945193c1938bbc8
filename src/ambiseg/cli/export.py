"""``ambiseg export``: a trained model as one file that runs without ambiseg."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from ambiseg._util.shipped import in_words
from ambiseg.cli.options import add_json, check_file, check_json, emit, path

# As ambiseg.exporting has them, which is not imported for --help.
FORMATS, PRECISIONS = ("onnx", "torch"), ("32", "16", "8")

EXAMPLES = """\
examples:
  ambiseg export runs/lung                          runs/lung/model.onnx
  ambiseg export demo --out demo.onnx --precision 16
  ambiseg export runs/lung --format torch           runs/lung/model.pt2, for torch.export.load
  python examples/onnx_masks.py runs/lung/model.onnx masks/ scans/*.tif     masks without ambiseg
"""


def add(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add ``export``."""
    export = commands.add_parser(
        "export",
        help="write a trained model as one ONNX file or PyTorch program",
        description="Write a trained model as one graph: raw image and random numbers in, the weights of strata and\n"
        "class probabilities of every draw out, for any batch, height and width. The file is run on random\n"
        "images and compared with the model; where a probability differs by more than 1e-4 nothing is written.",
        epilog=EXAMPLES,
        formatter_class=formatter,
    )
    export.set_defaults(run=_export)
    export.add_argument("model", type=path, metavar="RUN", help=f"the folder of a run, or {in_words()}")
    export.add_argument("--format", choices=FORMATS, default="onnx", help="onnx, or torch: a .pt2 (default: onnx)")
    export.add_argument("--out", type=path, metavar="FILE", help="the file (default: RUN/model.onnx, RUN/model.pt2)")
    bits = "bits in which ONNX keeps weights; it computes in 32 (default: 32)"
    export.add_argument("--precision", choices=PRECISIONS, default="32", help=bits)
    export.add_argument("--which", choices=("best", "last"), default="best", help="weights of which epoch")
    add_json(export)
    export.add_argument("--quiet", action="store_true", help="print nothing but errors")


def _export(arguments: argparse.Namespace) -> int:
    from ambiseg.exporting import export

    check_json(arguments)
    if arguments.out is not None:
        check_file(Path(arguments.out))
    options = {name: getattr(arguments, name) for name in ("format", "precision", "which", "quiet")}
    found = export(arguments.model, arguments.out, **options)
    about = {
        "file": str(found.path),
        "format": found.format,
        "precision": found.precision,
        "bytes": found.size,
        "difference": found.difference,
        "inputs": ["image", *found.inputs.names],
        "strata": found.inputs.strata,
    }
    if emit(arguments, about) and not arguments.quiet:
        print(f"{found.path}: {found.size / 1e6:.1f} MB, takes {', '.join(about['inputs'])}")
        print(f"largest difference from the model on random images of two sizes: {found.difference:.1g}")
        if found.format == "onnx":
            print(f"next: python examples/onnx_masks.py {shlex.quote(str(found.path))} masks/ IMAGES…")
    return 0

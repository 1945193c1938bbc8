"""The sample image in the package, and picture and JSON of docs/predict.md: ``python tools/draw_prediction.py``.

The sample is ``nodule-0462`` of the embedded nodules, in Hounsfield units: readers disagreed on it, and the shipped
model has not seen the patient.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

import tifffile

from ambiseg import predict
from ambiseg._util.files import write_text
from ambiseg.data import Nodules
from ambiseg.runs import open_run

ROOT = Path(__file__).parents[1]
NAME = "nodule-0462"
SHOWN = ("format", "name", "run", "form", "per_stratum", "seed", "classes", "strata", "masks", "notes")


def main() -> None:
    if NAME in open_run("demo").split.parts["train"]:
        raise SystemExit(f"{NAME}: expected a case that the shipped model was not trained on, found it in its split")
    nodules = Nodules()
    image = nodules[nodules.names.index(NAME)].image[0]
    tifffile.imwrite(ROOT / "src" / "ambiseg" / "assets" / "sample.tif", image, compression="zlib", software=False)
    with tempfile.TemporaryDirectory() as folder:
        predict("demo", "sample", folder)
        written = Path(folder) / "sample"
        shutil.copy(written / "overview.png", ROOT / "docs" / "_static" / "predict_overview.png")
        about = json.loads((written / "weights.json").read_text(encoding="utf-8"))
    page = ROOT / "docs" / "predict.md"
    text = page.read_text(encoding="utf-8")
    write_text(page, re.sub(r"```json\n.*?```", lambda _: f"```json\n{shortened(about)}\n```", text, flags=re.DOTALL))


def shortened(about: dict) -> str:
    """``weights.json`` with weights of three digits, and the first two masks."""
    about = json.loads(json.dumps(about), parse_float=lambda number: round(float(number), 3))
    lines = []
    for key in SHOWN:
        value = about[key]
        if key == "masks":
            masks = [json.dumps(mask) for mask in value[:2]]
            text = "[\n  " + ",\n  ".join(masks) + "\n ]"
        elif key == "strata":
            text = "{\n" + ",\n".join(f"  {json.dumps(part)}: {json.dumps(value[part])}" for part in value) + "\n }"
        else:
            text = json.dumps(value)
        lines.append(f' "{key}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}"


if __name__ == "__main__":
    main()

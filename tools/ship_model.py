"""Put a finished and evaluated run into the package as a model with a name and a card.

    ambiseg evaluate runs/mine --samples 16 50 100
    python tools/ship_model.py runs/mine nodule-ct [--half] [--to FOLDER]
    python tools/ship_model.py --card demo                    # its card again, from tools/cards/demo.md
    python tools/ship_model.py --look nodule-ct --root lidc71.npz      # its look.npz again

``--half`` stores convolutions and matrices in half precision, which halves the file. The scores on the card are then
those of the weights as they are stored: the test part is evaluated again. ``look.npz``, by which predictions say when
a person must look, is made of those weights and the run's data. No text of the model names a place of this machine. How
a model of another name is described is in tools/cards/NAME.md.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from ambiseg import config as configuration
from ambiseg import ged
from ambiseg._util.files import write_text
from ambiseg._util.shipped import ASSETS
from ambiseg.data.config import NEEDS_ROOT
from ambiseg.data.module import DataModule
from ambiseg.data.sets.nodules.cases import Nodules
from ambiseg.evaluation import Evaluation, evaluate
from ambiseg.familiarity import FILE as LOOK
from ambiseg.familiarity import data_of, look, look_at, saved_familiarity
from ambiseg.history import best_row, selected_by
from ambiseg.methods.drawing import draw
from ambiseg.runs import Card, Run, card_as_json
from ambiseg.weights import write_state

CARDS = Path(__file__).parent / "cards"
METRICS = {"ged": "GED", "ged_unbiased": "GED, unbiased", "matched_iou": "matched IoU"}
LARGEST = 2_500_000  # bytes of a model
UNITS = {"nodule-ct": "HU"}  # where the data did not say
TEXTS = ("config.yaml", "run.json", "split.json", "metrics.csv", "card.md")
PLACE = re.compile(r"""(?:^|[\s"'=:\[,(])(?:/|~/|[A-Z]:\\)[\w.-]+""", re.MULTILINE)  # the start of an absolute path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="the folder of a run that is trained and evaluated")
    parser.add_argument("name", help="of the model")
    parser.add_argument("--to", type=Path, default=ASSETS, help="the folder of models (default: that of the package)")
    parser.add_argument("--half", action="store_true", help="store weights in half precision")
    parser.add_argument("--card", action="store_true", help="only write the card again, of a model that is there")
    parser.add_argument("--look", action="store_true", help="only make look.npz again, of a model that is there")
    parser.add_argument("--root", help="where the data of that model are")
    given = parser.parse_args()
    if given.look:
        look(given.to / given.name, data={"root": given.root} if given.root else None)
        check(given.to / given.name)
    elif given.card:
        write_card(given.to / given.name)
    elif given.run is None:
        parser.error("expected RUN and NAME")
    else:
        ship(Path(given.run), given.name, given.to, half=given.half)


def ship(folder: Path, name: str, to: Path = ASSETS, half: bool = False) -> Path:
    """The folder of the model ``name`` in ``to``, made of a run."""
    run = Run(folder)
    found = Evaluation.load(run.folder / "evaluation-test.json")
    if found.weights != run.digest():
        raise SystemExit(f"{folder}: expected an evaluation of its best weights, found one of others")
    with tempfile.TemporaryDirectory(dir=to) as place:
        draft = Path(place) / name
        draft.mkdir()
        for file in ("best.safetensors", "split.json", "metrics.csv"):
            shutil.copy(run.folder / file, draft / file)
        about = {**run.about, "data": card_of(run, name), "command": command_of(run, name)}
        about.pop("reasons", None)
        if half:
            about["stored"] = "half precision"
            halve(draft / "best.safetensors")
            found = again(run, draft, found)
        about["scores"] = scores_of(run, found, name)
        write_text(draft / "config.yaml", configuration.dump(placeless(run)))
        write_text(draft / "run.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")
        look_at(Run(draft), data_of(run, None, quiet=False)).save(draft / LOOK)
        write_card(draft)
        check(draft)
        target = to / name
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
    print(f"{target}: {size(target):,} bytes")
    if name == "demo":
        print("python tools/draw_prediction.py draws what the docs show of it")
    return target


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def check(folder: Path) -> None:
    """The model is small, can be loaded, says when to look, and none of its texts names an absolute path."""
    if size(folder) > LARGEST:
        raise SystemExit(f"{folder.name}: expected at most {LARGEST:,} bytes, found {size(folder):,}; --half halves it")
    for file in TEXTS:
        if place := PLACE.search((folder / file).read_text(encoding="utf-8")):
            raise SystemExit(f"{folder.name}/{file}: expected no place of this machine, found {place[0]!r}")
    Run(folder).model()
    if saved_familiarity(Run(folder)) is None:
        raise SystemExit(f"{folder.name}: expected {LOOK} of its weights, found none; --look makes it")


# -- what is said of a run ---------------------------------------------------------------------------------------------


def placeless(run: Run) -> configuration.Config:
    """The settings without where the data and the split were."""
    data = run.config.data
    split = data.split if data.split in (None, "hash", "declared", "mose") else None
    return run.config.model_copy(
        update={"data": data.model_copy(update={"root": None, "split": split, "extra": None, "cache": "user"})}
    )


def command_of(run: Run, name: str) -> list[str]:
    """The command without the places of one machine: files by their names, and where it wrote to."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in run.about["command"][1:]]
    if "--out" in words:
        words[words.index("--out") + 1] = f"runs/{name}"
    return ["ambiseg", *words]


def card_of(run: Run, name: str) -> dict[str, Any]:
    """What ``run.json`` says of the data: of data in the package computed again, because an earlier run says less."""
    if run.config.data.name in NEEDS_ROOT or ":" in run.config.data.name:
        card = card_as_json(run.card)
        return {**card, "units": card["units"] or UNITS.get(name, "")}
    data = DataModule(run.config.data, split=run.split)
    data.setup()
    run.split.verify(data.cases)
    return card_as_json(Card.of(data.cases, run.card.intensity, type(run.model().method), *data.trained_on()))


def scores_of(run: Run, found: Evaluation, name: str) -> dict[str, Any]:
    samples = sorted({setting.samples for setting in found.settings if setting.form == "standard"})
    part = [case for case in found.cases if case.readers < case.readers_total]
    root = run.config.data.root
    data = "" if root is None else f" --root {shlex.quote(Path(root).name)}"
    return {
        "command": f"ambiseg evaluate {name}{data} --samples " + " ".join(map(str, samples)),
        "split": found.split,
        "images": found.images,
        "patients": found.patients,
        "not_all_drew": len(part) / len(found.cases) if found.cases else 0.0,
        **{setting.key: {key: setting.metrics[key].model_dump() for key in METRICS} for setting in found.settings},
    }


# -- half precision ----------------------------------------------------------------------------------------------------


def halve(path: Path) -> None:
    """Matrices and convolutions in 16 bits; biases, norms and statistics, which are few, stay as they are."""
    with safe_open(path, "pt") as file:
        about = {key: text for key, text in (file.metadata() or {}).items() if key != "format"}
    state = load(path.read_bytes())  # a file that is mapped into memory cannot be written
    with open(path, "wb") as file:
        write_state({name: _halved(tensor) for name, tensor in state.items()}, file, about)


def _halved(tensor: Tensor) -> Tensor:
    if tensor.ndim < 2 or tensor.dtype != torch.float32:
        return tensor
    half = tensor.half()
    return half if half.isfinite().all() else tensor


def again(run: Run, draft: Path, before: Evaluation) -> Evaluation:
    """The evaluation of weights that have changed, in the settings of the one before; the differences are printed."""
    with tempfile.TemporaryDirectory() as place:
        for file in ("config.yaml", "run.json", "split.json", "metrics.csv"):
            shutil.copy(run.folder / file, place)
        shutil.copy(draft / "best.safetensors", place)
        samples = sorted({setting.samples for setting in before.settings if setting.form == "standard"})
        found = evaluate(
            place, samples=samples, protocol=before.protocol, seed=before.seed, symmetries=before.symmetries
        )
    old = {setting.key: setting for setting in before.settings}
    for setting in found.settings:
        mean, was = (one.metrics["ged_unbiased"].mean for one in (setting, old[setting.key]))
        if mean is not None and was is not None:
            print(f"{setting.key}: unbiased GED {was:.5f} -> {mean:.5f} in half precision")
    return found


# -- the card ----------------------------------------------------------------------------------------------------------


def write_card(folder: Path) -> None:
    """``card.md`` of a model, from its files and the template of its name."""
    run, template = Run(folder), CARDS / f"{folder.name}.md"
    if not template.exists():
        raise SystemExit(f"{template}: expected a template of the card, found none")
    about, model, best = run.about, run.model(), best_row(run.history)
    by = {"val_ged": "GED", "val_ged_unbiased": "unbiased GED"}[selected_by(run.history)]
    scores, parts = about["scores"], run.split.parts
    filled = template.read_text(encoding="utf-8").format(
        images=f"{sum(map(len, parts.values())):,}",
        split=", ".join(f"{part} {len(names):,}" for part, names in parts.items()),
        command=shlex.join(about["command"]),
        precision=run.precision,
        seed=about["seed"],
        version=about["versions"]["ambiseg"],
        torch=about["versions"]["torch"],
        parameters=sum(one.numel() for one in model.method.parameters()),
        stored=f", stored in {about['stored']}" if "stored" in about else "",
        epoch="?" if best is None else int(best["epoch"]),
        epochs=len(run.history),
        by=by,
        scored=f"{scores['images']:,} images of {scores['patients']:,} patients of the {scores['split']} part",
        evaluate=scores["command"],
        scores=table(scores),
        not_all_drew=f"{100 * scores.get('not_all_drew', 0):.0f} %",
        elsewhere=elsewhere(run),
    )
    write_text(folder / "card.md", filled)


def table(scores: dict[str, Any]) -> str:
    """The scores in Markdown."""
    lines = [f"| masks | {' | '.join(METRICS.values())} |", "|---" * (1 + len(METRICS)) + "|"]
    for key, values in scores.items():
        if isinstance(values, dict):
            form, _, count = key.partition("-")
            lines.append(f"| {count}, {form} | {' | '.join(shown(values[metric]) for metric in METRICS)} |")
    return "\n".join(lines)


def shown(value: dict[str, Any]) -> str:
    """``.193 [.178, .208]``."""
    if value["mean"] is None:
        return "–"
    low, high = value.get("low"), value.get("high")
    bounds = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    return f"{value['mean']:.3f}{bounds}"


@torch.no_grad()
def elsewhere(run: Run) -> str:
    """What the model does with crops unlike those that it was trained on. Empty for other than CT."""
    if run.card.units != "HU" or run.card.channels != 1:
        return ""
    nodules = Nodules(size=64)
    unseen = [i for i in range(len(nodules)) if nodules.marked(i) == 4][:200]  # simulated CT, real outlines
    cases = [nodules[i] for i in unseen]
    pictures = torch.from_numpy(np.stack([case.image for case in cases]))
    truth = torch.from_numpy(np.stack([case.labels for case in cases]))
    noise = torch.Generator().manual_seed(0)
    lung = (-850 + 40 * torch.randn(16, 1, 64, 64, generator=noise)).round()
    uniform = {"Lung without anything (−850 HU and noise)": lung, "Soft tissue alone (40 HU and noise)": lung + 890}
    said = []
    for name, raw in uniform.items():
        weight = float(_empty(run, raw).mean())
        said.append(f"{name}: empty masks have a weight of {weight:.2f}")
    distance = float(ged(_drawn(run, pictures), truth).mean())
    nothing = float(ged(torch.zeros_like(truth[:, :1]), truth).mean())
    said.append(
        f"{len(cases)} nodules of simulated CT (`nodules`) that four radiologists outlined: GED of 16 masks is "
        f"{distance:.3f}; an empty mask has {nothing:.3f}"
    )
    return "\n".join(f"  - {line}." for line in said)


def _drawn(run: Run, raw: Tensor) -> Any:
    generator = torch.Generator().manual_seed(0)
    form = "compact" if run.card.stratum else "standard"
    return draw(run.model().predict(run.card.prepare(raw.float())), form, 16, generator).masks


def _empty(run: Run, raw: Tensor) -> Tensor:
    masks = _drawn(run, raw)
    return (masks.mass * (masks.labels == 0).flatten(2).all(2)).sum(1)


if __name__ == "__main__":
    main()

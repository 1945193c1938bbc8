"""``ambiseg.evaluate``: all scores of a run or of a folder of masks.

    images ─► Predictive ─► masks in every form ─► scores of each image ─► averages with intervals by patient

A run is scored by :func:`evaluate`, the masks of any other tool by :func:`evaluate_files`; both return an
:class:`Evaluation`, which is saved as JSON and CSV.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.extras import require
from ambiseg._util.processes import first_process
from ambiseg._util.progress import reporting
from ambiseg.config import Config
from ambiseg.data.config import NEEDS_ROOT
from ambiseg.evaluation.anchors import constant_mask
from ambiseg.evaluation.deciding import DecisionRules, decision_rules
from ambiseg.evaluation.files import evaluate_files
from ambiseg.evaluation.results import METRICS, Evaluation, Region
from ambiseg.evaluation.scoring import ScoredCase, ScoringRules, score_batch
from ambiseg.evaluation.summary import summarise
from ambiseg.methods.drawing import FORMS
from ambiseg.methods.symmetries import symmetric
from ambiseg.methods.symmetries import symmetries as turned
from ambiseg.metrics import PROTOCOLS
from ambiseg.nn.windows import plan
from ambiseg.runs import Run, Which, open_run
from ambiseg.settings import validate

if TYPE_CHECKING:
    from ambiseg.data.module import DataModule

__all__ = ["METRICS", "Evaluation", "evaluate", "evaluate_files", "evaluation_path", "saved_evaluation"]


def evaluate(
    run: str | os.PathLike[str] | Run | Sequence[str | os.PathLike[str] | Run],
    split: str = "test",
    samples: Sequence[int] = (16,),
    forms: Sequence[str] | None = None,
    protocol: str | None = None,
    which: Which = "best",
    seed: int = 0,
    *,
    symmetries: int = 1,
    consensus: Sequence[str] | None = None,
    surfaces: bool = False,
    spacing: Sequence[float] | None = None,
    data: Mapping[str, Any] | None = None,
    accelerator: str = "auto",
    devices: int | str = 1,
    num_nodes: int = 1,
    threads: int = 1,
    quiet: bool = False,
) -> Evaluation:
    """Score a trained model on a part of the data it was made with.

    Features are computed once per image, and all masks are drawn from them. Batches, draws and the order of sums are
    the same in any number of processes, so the numbers are too, to the last bit.

    Args:
        run: the folder of a run, or ``"demo"``; or several, the folds of one cross-validation (``data.fold``), whose
            test parts are pooled: see :func:`~ambiseg.evaluation.pooling.pool`.
        split: a part of the run's frozen split. The data must be those that were split.
        samples: numbers N of masks per image.
        forms: ``standard`` (N equally likely masks) and ``compact`` (the same number of every stratum, weighted;
            together as close to N as possible). ``None``: all that the method and the protocol have.
        protocol: a key of ``PROTOCOLS``; ``None``: the run's.
        which: ``best`` or ``last`` weights.
        seed: seed of the draws.
        symmetries: 2, 4 or 8: predictions are averaged over as many flips and quarter turns of each image.
        consensus: rules of :data:`~ambiseg.decisions.consensus.CONSENSUS` whose masks are scored; all but ``staple``
            unless given.
        surfaces: score them by the distances of outlines as well (HD95, ASSD), by MONAI.
        spacing: of the pixels in mm, down and across; without it lengths and areas are in pixels.
        data: settings of :class:`~ambiseg.data.config.DataConfig` to change, such as ``root`` for data that have moved.
            Another ``eval_batch_size`` makes other draws.
        accelerator, devices, num_nodes: of Lightning's ``Trainer``. With several CPU devices the calling program is
            started once per device.
        threads: PyTorch's threads per process. More are faster, but may change the last digit; devices do not.
        quiet: no progress.
    """
    require("train")
    options = {"split": split, "samples": samples, "forms": forms, "protocol": protocol, "which": which, "seed": seed}
    options |= {
        "symmetries": symmetries,
        "data": data,
        "accelerator": accelerator,
        "devices": devices,
        "num_nodes": num_nodes,
    }
    options |= {"threads": threads, "quiet": quiet, "decisions": decision_rules(consensus, surfaces, spacing)}
    runs = [run] if isinstance(run, (str, os.PathLike, Run)) else list(run)
    if len(runs) == 1:
        scored, about = _score_run(runs[0], **options)
        with reporting("computing intervals", quiet or not first_process()):
            return summarise(scored, **about)
    if not runs:
        raise ConfigError("evaluate: expected a run or the folds of a cross-validation, found none")
    if split != "test":
        raise ConfigError(f"evaluate: expected --split test for several folds, found {split!r}")
    if str(devices) != "1" or num_nodes != 1:
        raise ConfigError(f"evaluate: expected one device for several folds, found {devices} on {num_nodes} machines")

    from ambiseg.evaluation.pooling import check_folds, pool

    opened = [each if isinstance(each, Run) else open_run(each) for each in runs]
    folds = check_folds(opened)
    return pool(folds, {str(each.folder): _score_run(each, **options) for each in opened})


def _score_run(
    run: str | os.PathLike[str] | Run,
    split: str,
    samples: Sequence[int],
    forms: Sequence[str] | None,
    protocol: str | None,
    which: Which,
    seed: int,
    symmetries: int,
    data: Mapping[str, Any] | None,
    accelerator: str,
    devices: int | str,
    num_nodes: int,
    threads: int,
    quiet: bool,
    decisions: DecisionRules,
) -> tuple[list[ScoredCase], dict[str, Any]]:
    """Every image of a part with its scores, and the other arguments of :func:`summarise`."""
    opened = run if isinstance(run, Run) else open_run(run)
    card = opened.card
    protocol = opened.config.evaluation.protocol if protocol is None else protocol
    rules = ScoringRules(protocol, card.evaluated, len(card.classes), decisions=decisions)
    for form in forms or ():
        if form not in FORMS:
            raise ConfigError(f"form: expected one of {', '.join(FORMS)}, found {form!r}")
    if forms is None:
        forms = FORMS if PROTOCOLS[protocol].matching == "transport" else ("standard",)  # which has no weighted form
    if not samples or min(samples) < 1:
        raise ConfigError(f"samples: expected numbers of at least 1, found {', '.join(map(str, samples)) or 'none'}")
    turned(symmetries)  # an error before anything is loaded
    if threads < 1:
        raise ConfigError(f"threads: expected at least 1, found {threads}")
    # The intensity that the run was trained with, even if the data set now recommends another.
    changed = {**vars(opened.config.data), "intensity": card.intensity, **(data or {})}
    config = validate(Config, {**dict(opened.config), "data": changed}).data
    if config.name in NEEDS_ROOT and config.root is None:  # a model that was shipped without its data
        raise ConfigError(f"{opened.folder}: expected the place of its data ({card.title}), found none; give --root")
    parts = opened.split
    if split not in parts.parts:
        known = ", ".join(parts.parts)
        hint = "; the data have no test part: --split val scores the part that chose the weights, and training with "
        hint = f"{hint}--data.split hash divides the data anew" if split == "test" and "val" in parts.parts else ""
        raise ConfigError(f"{opened.folder / 'split.json'}: expected part {split!r}, found {known}{hint}")
    silent = quiet or not first_process()
    with reporting("loading the model", silent):
        model = opened.model(which)

        from ambiseg.evaluation.loop import PartData, ScoringModule, score_part

    with reporting("preparing data", silent) as report:
        module = PartData(config, split=parts, part=split, progress=report)
        try:
            module.prepare_data()
            module.setup()
            parts.verify(module.cases)
        except DataError as error:
            raise ConfigError(f"{opened.folder}: the data must be those that the run began with: {error}") from None
    if tuple(module.cases.classes) != card.classes:
        expected, found = (", ".join(names) for names in (card.classes, module.cases.classes))
        raise ConfigError(f"{opened.folder}: expected the classes {expected}, found {found} in {module.cases.title}")
    train = parts.indices(module.cases, "train") if "train" in parts.parts else []
    constant = constant_mask(module.cases, train, module.eval_window)
    rules = replace(rules, flips=module.cases.flips, constant=constant)
    with reporting("evaluating", silent) as report:
        score = partial(score_batch, rules=rules, forms=forms, samples=samples, seed=seed)
        scoring = ScoringModule(symmetric(model.method, symmetries), score, threads, report)
        scored = score_part(scoring, module, accelerator=accelerator, devices=devices, num_nodes=num_nodes)
    place = {module.cases.names[index]: i for i, index in enumerate(module.indices(split))}
    scored.sort(key=lambda one: place[one.scores.name])  # batches are of images of one size
    about = {"run": str(opened.folder), "split": split, "data": card.title, "evaluated": list(card.evaluated)}
    about["region"] = scored_region(module, split, model.method.multiple)
    about |= {"unit": module.cases.unit, "annotator": module.cases.annotator}
    about |= {"protocol": protocol, "which": which, "weights": opened.digest(which), "seed": seed, "threads": threads}
    about |= {
        "symmetries": symmetries,
        "classes": card.classes,
        "flips": rules.flips,
        "stratum": card.stratum or "stratum",
        "decisions": decisions,
    }
    return scored, {**about, "batch_size": config.eval_batch_size}


def scored_region(data: DataModule, part: str, multiple: int) -> Region:
    """Which pixels of a part's images are scored; ``multiple`` is that of the method's windows."""
    sizes, scored, window = data.sizes(part), data.scored_sizes(part), data.eval_window.size
    cut = [plan(size, multiple) for size in set(scored)]
    windows = max(len(one[0]) * len(one[1]) if one else 1 for one in cut)
    if scored == sizes:
        return Region(kind="whole", windows=windows)
    assert window is not None
    seen = sum(min(h, window[0]) * min(w, window[1]) for h, w in sizes)
    return Region(kind="middle", size=window, share=seen / sum(h * w for h, w in sizes), windows=windows)


def evaluation_path(run: Run, split: str = "test") -> Path:
    """Where the evaluation of a run is saved."""
    return run.folder / f"evaluation-{split}.json"


def saved_evaluation(run: Run, split: str = "test") -> Evaluation | None:
    """The evaluation in a run's folder; ``None`` if there is none, or if the weights have changed since."""
    path = evaluation_path(run, split)
    if not path.is_file():
        return None
    found = Evaluation.load(path, split)
    # An evaluation stays valid when the file of its weights has been deleted.
    if found.which == "files" or not (run.folder / f"{found.which}.safetensors").is_file():
        return found
    return found if found.weights == run.digest(found.which) else None

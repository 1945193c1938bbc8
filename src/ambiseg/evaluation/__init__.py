"""``ambiseg.evaluate``: a run or a folder of masks in, every number about it out.

    images ─► Predictive ─► masks in every form ─► scores of each image ─► averages with intervals by patient

A run is scored by :func:`evaluate`, the masks of any other tool by :func:`evaluate_files`; both return an
:class:`Evaluation`, which is saved as JSON and CSV.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.processes import first_process
from ambiseg._util.progress import reporting
from ambiseg.data.config import DataConfig
from ambiseg.evaluation.files import evaluate_files
from ambiseg.evaluation.modes import summarise_modes
from ambiseg.evaluation.results import Evaluation, summarise
from ambiseg.evaluation.scoring import FORMS, METRICS, Rules
from ambiseg.metrics import PROTOCOLS
from ambiseg.runs import Run, Which, open_run

__all__ = ["FORMS", "METRICS", "Evaluation", "evaluate", "evaluate_files", "saved"]


def evaluate(
    run: str | os.PathLike[str] | Run,
    split: str = "test",
    samples: Sequence[int] = (16,),
    forms: Sequence[str] | None = None,
    protocol: str | None = None,
    which: Which = "best",
    seed: int = 0,
    *,
    data: Mapping[str, Any] | None = None,
    accelerator: str = "auto",
    devices: int | str = 1,
    num_nodes: int = 1,
    threads: int = 1,
    quiet: bool = False,
) -> Evaluation:
    """Score a trained model on a part of the data it was made with.

    Features are computed once an image, and all masks are drawn from them. Batches, draws and the order of sums are
    the same in any number of processes, so the numbers are too, to the last bit.

    Args:
        run: the folder of a run, or ``"demo"``.
        split: a part of the run's frozen split. The data must be those that were split.
        samples: N, numbers of masks an image.
        forms: ``standard`` (N equally likely masks) and ``compact`` (the same number of every expert, weighted; as
            close to N as the number of experts allows). ``None``: all that the method and the protocol have.
        protocol: a key of ``PROTOCOLS``; ``None`` takes the run's.
        which: ``best`` or ``last`` weights.
        seed: of the draws.
        data: settings of :class:`~ambiseg.data.config.DataConfig` to change, such as ``root`` for data that have moved.
            Another ``eval_batch_size`` makes other draws.
        accelerator, devices, num_nodes: as Lightning has them. With several CPU devices the calling program is started
            once for each.
        threads: of PyTorch in each process. More are faster, but may change a last digit; devices do not.
        quiet: no progress.
    """
    rules, forms, opened = _asked(run, samples, forms, protocol)
    if threads < 1:
        raise ConfigError(f"threads: expected at least 1, found {threads}")
    config = _data_config(opened, data)
    part = opened.split
    if split not in part.parts:
        raise ConfigError(f"{opened.folder / 'split.json'}: expected part {split!r}, found {', '.join(part.parts)}")
    model = opened.model(which)

    from ambiseg.evaluation.running import Part, Scoring, score

    silent = quiet or not first_process()
    with reporting("preparing data", silent) as report:
        module = Part(config, split=part, part=split, progress=report)
        try:
            module.prepare_data()
            module.setup()
            part.verify(module.cases)
        except DataError as error:
            raise ConfigError(f"{opened.folder}: the data must be those that the run began with: {error}") from None
    if tuple(module.cases.classes) != opened.card.classes:
        expected, found = (", ".join(names) for names in (opened.card.classes, module.cases.classes))
        raise ConfigError(f"{opened.folder}: expected the classes {expected}, found {found} in {module.cases.title}")
    rules = replace(rules, flips=module.cases.flips)
    with reporting("evaluating", silent) as report:
        scoring = Scoring(model, rules, forms, samples, seed, threads, report)
        scored, settings = score(scoring, module, accelerator=accelerator, devices=devices, num_nodes=num_nodes)
    return summarise(
        scored,
        settings,
        run=str(opened.folder),
        split=split,
        protocol=rules.protocol,
        which=which,
        weights=opened.digest(which),
        seed=seed,
        data=opened.card.title,
        threads=threads,
        batch_size=config.eval_batch_size,
        classes=list(opened.card.classes),
        evaluated=list(opened.card.evaluated),
        modes=summarise_modes(
            [one.modes for one in scored if one.modes],
            [f"{form}-{samples}" for form, samples in settings],
            rules.flips,
            opened.card.classes,
            [one.case["expert_weights"] for one in scored if one.modes],
        ),
    )


def saved(run: Run, split: str = "test") -> Path | None:
    """The evaluation in a run's folder, unless it is of other weights than those that are there now."""
    path = run.folder / f"evaluation-{split}.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        return path  # whoever reads it says what is wrong with it
    if not isinstance(found, dict) or not found.get("weights"):
        return path
    which = found.get("which", "best")
    gone = not (run.folder / f"{which}.safetensors").is_file()  # numbers may outlive the weights they are of
    return path if gone or found["weights"] == run.digest(which) else None


def _asked(
    run: str | os.PathLike[str] | Run, samples: Sequence[int], forms: Sequence[str] | None, protocol: str | None
) -> tuple[Rules, Sequence[str], Run]:
    if not samples or min(samples) < 1:
        raise ConfigError(f"samples: expected numbers of at least 1, found {', '.join(map(str, samples)) or 'none'}")
    for form in forms or ():
        if form not in FORMS:
            raise ConfigError(f"form: expected one of {', '.join(FORMS)}, found {form!r}")
    opened = run if isinstance(run, Run) else open_run(run)
    protocol = opened.config.evaluation.protocol if protocol is None else protocol
    rules = Rules(protocol, opened.card.evaluated, len(opened.card.classes))
    if forms is None:
        weighted = PROTOCOLS[protocol].matching == "transport"
        forms = [form for form in FORMS if weighted or form != "compact"]
    return rules, forms, opened


def _data_config(run: Run, changes: Mapping[str, Any] | None) -> DataConfig:
    """The run's data, prepared as they were for training even if the data set now recommends something else."""
    known = [field.name for field in fields(DataConfig)]
    if unknown := [key for key in changes or {} if key not in known]:
        raise ConfigError(f"data: expected some of {', '.join(known)}, found {unknown[0]!r}")
    return replace(run.config.data, **{"intensity": run.card.intensity, **(changes or {})})

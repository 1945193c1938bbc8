"""What evaluation and prediction cost beside the backbone's forward passes on the same images."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ambiseg import MaskDistribution, MoSE
from ambiseg.data.case import Flip
from ambiseg.data.intensity import Intensity
from ambiseg.data.loader import Batch
from ambiseg.data.sets.street.flips import mode_weights
from ambiseg.evaluation.scoring import ScoringRules, score_batch
from ambiseg.prediction import Options, Predictor
from ambiseg.prediction.inputs import array_source
from ambiseg.regions import RegionMasks, partition
from ambiseg.runs import Card, TrainedModel
from benchmarks.harness import publish, table
from benchmarks.mathematics import disks, street
from benchmarks.mose import interleaved


def lidc() -> tuple[MoSE, Batch, ScoringRules]:
    """K=4, M=4, C=2, 128², batch 4, 7-level U-Net."""
    return MoSE(1, 2, experts=4), _batch(torch.randn(4, 1, 128, 128), disks(4, 4, 128, 0), 2), _rules((1,), 2)


def cityscapes() -> tuple[MoSE, Batch, ScoringRules]:
    """K=35, M=32 weighted modes of 5 flips, C=25 of which 10 are scored, 128×256, batch 2, 7-level U-Net."""
    flips = tuple(Flip(k, 19 + k, p) for k, p in enumerate((8 / 17, 7 / 17, 6 / 17, 5 / 17, 4 / 17)))
    labels = torch.cat([street((128, 256), 32, seed) for seed in range(2)])
    weights = torch.tensor(mode_weights(flips), dtype=torch.float32).expand(2, -1)
    batch = _batch(torch.randn(2, 3, 128, 256), labels, 25, weights)
    model = MoSE(3, 25, experts=35, latent=5, cost="ce")
    return model, batch, _rules((0, 1, 2, 3, 4, 19, 20, 21, 22, 23), 25, flips)


def _batch(images: torch.Tensor, labels: torch.Tensor, classes: int, weights: torch.Tensor | None = None) -> Batch:
    masks = MaskDistribution(labels, weights)
    names = tuple(f"{i}" for i in range(len(images)))
    return Batch(images, RegionMasks.of(partition(masks, classes), masks.spatial, weights), names, names)


def _rules(evaluated: tuple[int, ...], classes: int, flips: tuple[Flip, ...] = ()) -> ScoringRules:
    return ScoringRules("mose", evaluated, classes, flips)


def evaluation() -> None:
    rows, data = [], []
    for setting, make in {"LIDC": lidc, "Cityscapes": cityscapes}.items():
        model, batch, rules = make()
        model.eval()

        def score(*forms: str, model: MoSE = model, batch: Batch = batch, rules: ScoringRules = rules) -> None:
            score_batch(model.predict(batch.images), batch, rules, forms, [16])

        times = interleaved({
            "backbone": lambda model=model, batch=batch: _forward(model, batch.images),
            "standard form": lambda score=score: score("standard"),
            "both forms": lambda score=score: score("standard", "compact"),
        })  # fmt: skip
        masks = {"backbone": 0, "standard form": 16, "both forms": 32 if setting == "LIDC" else 51}
        for case, value in times.items():
            ratio = value / times["backbone"]
            rows.append([setting, case, str(masks[case]), f"{ratio:.2f}×", f"{value:.0f}"])
            data.append({"setting": setting, "case": case, "masks": masks[case], "ratio": ratio, "cpu_ms": value})
    headers = ["setting", "evaluation, 16 samples", "masks per image", "of the backbone's", "CPU ms"]
    publish("evaluation", "Evaluation against forward passes of the backbone", table(headers, rows), data)


def prediction() -> None:
    """All masks of one image in memory, without files."""
    rows, data = [], []
    for side in (64, 128, 256):
        card = Card(("ground", "shape"), (1,), 1, Intensity(0, 255, 127.5, 127.5), "noise", MoSE.stratum)
        model = MoSE(1, 2, experts=4).eval()
        predictor = Predictor(TrainedModel(model, card), Options(per_stratum=4))
        source = array_source(torch.randint(256, (1, side, side), dtype=torch.uint8), "image")
        image = torch.randn(1, 1, side, side)
        runs: dict[str, Callable[[], object]] = {
            "backbone": lambda model=model, image=image: _forward(model, image),
            "16 masks": lambda predictor=predictor, source=source: predictor(source),
        }
        times = interleaved(runs)
        ratio = times["16 masks"] / times["backbone"]
        rows.append([f"{side}²", f"{ratio:.2f}×", f"{times['16 masks']:.0f}", f"{times['backbone']:.0f}"])
        data.append({"side": side, "ratio": ratio, **times})
    headers = ["image", "prediction, of the backbone's", "prediction, CPU ms", "backbone, CPU ms"]
    publish(
        "prediction_memory",
        "Prediction without files against one forward pass of the backbone",
        table(headers, rows),
        data,
    )


def _forward(model: MoSE, images: torch.Tensor) -> None:
    with torch.no_grad():
        model.backbone(images)


def main() -> None:
    torch.manual_seed(0)
    evaluation()
    prediction()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

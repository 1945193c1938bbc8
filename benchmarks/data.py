"""Does loading keep up? Whole batches in plain torch against MONAI's transforms, and against a training step."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable

import torch

from ambiseg.config import parse
from ambiseg.data.augment import Augment
from ambiseg.data.loader import BatchSampler, Loader, Window
from ambiseg.data.sets.nodules.cases import Nodules
from ambiseg.data.store import Store
from ambiseg.regions import partition
from ambiseg.runs import build_model
from benchmarks.harness import compare, cpu_seconds, publish, publish_rows, table

BATCH = 16
CASES = 320
ARMS = {
    "flips": Augment(),
    "flips, turns to ±180°, scale 0.8–1.25": Augment(rotate=180, scale=(0.8, 1.25)),
}


def main() -> None:
    print("data: loading and augmenting")
    source = Nodules(size=96)
    source.names, source.patients = source.names[:CASES], source.patients[:CASES]  # enough to measure on
    folder = tempfile.TemporaryDirectory()
    store = Store.build(source, folder.name)
    specs = list(BatchSampler(range(CASES), BATCH, shuffle=True))
    rows, shares = [], []
    step = _step_seconds(store)
    for name, augment in ARMS.items():
        loader = Loader(store, source.intensity, Window((64, 64)), augment)

        def ours(loader: Loader = loader) -> None:
            for spec in specs:
                _ = loader[spec]

        def plain(augment: Augment = augment) -> None:
            _monai(store, specs, augment)

        row = compare(f"{name}: {len(specs)} batches of {BATCH} × 64²", ours, plain, repeats=3)
        rows.append(row)
        per_batch = row.ours_ms / len(specs)
        shares.append([name, f"{per_batch:.2f}", f"{step * 1e3:.0f}", f"{100 * per_batch / (step * 1e3):.1f} %"])
    publish_rows("data", "Loading a batch with its regions: whole batches against MONAI, one case at a time", rows)
    headers = ["augmentation", "loading, CPU ms", "step, CPU ms", "loading / step"]
    publish("data_share", "Loading against a training step of the demo recipe", table(headers, shares), shares)


def _step_seconds(store: Store) -> float:
    """One optimisation step of the demo recipe, minimum of several."""
    config = parse([], "demo")
    model = build_model(config, 1, 2).train()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.Adam(model.parameters())
    spec = next(iter(BatchSampler(range(CASES), BATCH, shuffle=True)))
    batch = Loader(store, store.intensity, Window((64, 64)))[spec]

    def step() -> None:
        optimiser.zero_grad()
        model.loss(batch.images, batch.annotations)["total"].backward()
        optimiser.step()

    step()
    return min(cpu_seconds(step) for _ in range(5))


def _monai(store: Store, specs: list, augment: Augment) -> None:
    from monai.data.utils import list_data_collate
    from monai.transforms.compose import Compose
    from monai.transforms.croppad.dictionary import RandSpatialCropd
    from monai.transforms.intensity.dictionary import ScaleIntensityRanged
    from monai.transforms.spatial.dictionary import RandAffined, RandFlipd

    keys, modes = ("image", "label"), ("bilinear", "nearest")
    steps: list[Callable] = [ScaleIntensityRanged("image", -1000, 400, -1, 1, clip=True)]
    if augment.warps:
        low, high = augment.scale
        angle = math.radians(augment.rotate)
        factors = (1 / high - 1, 1 / low - 1)
        steps.append(
            RandAffined(
                keys, (64, 64), 1.0, angle, scale_range=(factors, factors), mode=modes, padding_mode="reflection"
            )
        )
    else:
        steps.append(RandSpatialCropd(keys, (64, 64), random_size=False))
    steps += [RandFlipd(keys, 0.5, 0), RandFlipd(keys, 0.5, 1)]
    transform = Compose(steps)
    for spec in specs:
        cases = (store[i] for i in spec.indices)
        ready = [transform({"image": c.image.astype("float32"), "label": c.labels.astype("float32")}) for c in cases]
        batch = list_data_collate(ready)
        labels = batch["label"].as_tensor().long()  # type: ignore[index]
        _ = partition(labels, 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

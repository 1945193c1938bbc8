from __future__ import annotations

import pickle
import socket
from typing import Any

import pytest
import torch
from torch import Tensor

import ambiseg
from ambiseg import MaskDistribution
from ambiseg.streaming import ECE, GED, MatchedIoU, PixelEntropy, SampleDiversity


def images(count: int = 7) -> tuple[MaskDistribution, MaskDistribution]:
    g = torch.Generator().manual_seed(0)
    valid = torch.rand(count, 8, 8, generator=g) < 0.9
    valid[2] = False  # an image without a score: averages must leave it out
    pred = MaskDistribution(torch.randint(2, (count, 5, 8, 8), generator=g))
    return pred, MaskDistribution(torch.randint(2, (count, 4, 8, 8), generator=g), valid=valid)


def expected(pred: MaskDistribution, truth: MaskDistribution) -> dict[str, float]:
    return {
        "ged": ambiseg.ged(pred, truth).nanmean().item(),
        "unbiased": ambiseg.ged(pred, truth, unbiased=True).nanmean().item(),
        "matched_iou": ambiseg.matched_iou(pred, truth).nanmean().item(),
        "diversity": ambiseg.sample_diversity(truth).nanmean().item(),
        "entropy": ambiseg.pixel_entropy(truth).nanmean().item(),
        "ece": ambiseg.ece(pred.marginal_probs(2), truth.marginal_probs(2), valid=truth.valid),
    }


def stream(pred: MaskDistribution, truth: MaskDistribution, batch: int) -> dict[str, Tensor]:
    metrics = {
        "ged": GED(),
        "unbiased": GED(unbiased=True),
        "matched_iou": MatchedIoU(),
        "diversity": SampleDiversity(),
        "entropy": PixelEntropy(classes=2),
        "ece": ECE(),
    }
    for start in range(0, len(pred), batch):
        p, t = pred[start : start + batch], truth[start : start + batch]
        for name, metric in metrics.items():
            metric.update(t) if name in ("diversity", "entropy") else metric.update(p, t)
    return {name: metric.compute() for name, metric in metrics.items()}


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_any_batch_size_gives_the_average_over_images(batch):
    pred, truth = images()
    found = stream(pred, truth, batch)
    for name, value in expected(pred, truth).items():
        assert found[name].item() == pytest.approx(value, abs=1e-12), name


def test_reset_forward_and_casts():
    pred, truth = images()
    metric = GED()
    assert metric(pred[:1], truth[:1]).item() == pytest.approx(ambiseg.ged(pred, truth)[0].item())
    metric.reset()
    metric.half().update(pred, truth)
    assert metric._sum("total").dtype == torch.float64
    assert metric.compute().item() == pytest.approx(expected(pred, truth)["ged"])


def test_curve_of_everything_seen():
    pred, truth = images()
    metric = ECE()
    metric.update(pred, truth)
    assert truth.valid is not None
    assert metric.curve.total.item() == int(truth.valid.sum())


def test_settings_reach_the_functions():
    g = torch.Generator().manual_seed(1)
    pred, truth = (MaskDistribution(torch.randint(4, (3, n, 6, 6), generator=g)) for n in (4, 3))
    truth = MaskDistribution(truth.labels.clamp_max(2))  # class 3 is in predictions only
    pred = MaskDistribution(pred.labels, valid=torch.rand(3, 6, 6, generator=g) < 0.5)
    some: dict[str, Any] = {"classes": (2, 3), "protocol": "phiseg"}
    p, t, valid = pred.marginal_probs(4), truth.marginal_probs(4), pred.valid
    for metric, args, value in (
        (GED(**some), (pred, truth), ambiseg.ged(pred, truth, **some)),
        (GED(classes=(2, 3)), (pred, truth), ambiseg.ged(pred, truth, (2, 3))),
        (MatchedIoU(**some), (pred, truth), ambiseg.matched_iou(pred, truth, **some)),
        (SampleDiversity(unbiased=True, **some), (pred,), ambiseg.sample_diversity(pred, unbiased=True, **some)),
        (ECE(4, (0, 1), bins=3), (pred, truth), torch.tensor(ambiseg.ece(p, t, (0, 1), 3, valid))),
    ):
        metric.update(*args)
        assert metric.compute().item() == pytest.approx(value.double().mean().item(), rel=1e-6)


def test_metrics_of_a_collection_stay_apart_when_their_first_batches_agree():
    from torchmetrics import MetricCollection

    readers = torch.tensor([[[[0, 0, 1, 1]], [[0, 0, 0, 0]]]])
    together = MetricCollection([GED(), MatchedIoU()])
    batches = [(readers[:, :1], readers), (torch.tensor([[[[1, 1, 0, 0]]]]), readers)]
    for batch in batches:
        together.update(*batch)
    assert ambiseg.ged(*batches[0]).item() == ambiseg.matched_iou(*batches[0]).item()  # the trap
    for name, function in (("GED", ambiseg.ged), ("MatchedIoU", ambiseg.matched_iou)):
        expected = sum(function(*batch).item() for batch in batches) / 2
        assert together.compute()[name].item() == pytest.approx(expected)


def test_metrics_can_be_pickled():
    pred, truth = images()
    for metric in (GED(), MatchedIoU(), ECE()):
        metric.update(pred, truth)
        assert pickle.loads(pickle.dumps(metric)).compute() == metric.compute()


def _worker(rank: int, port: int, results) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    pred, truth = images()
    mine = list(range(rank, len(pred), 2))  # 4 images here, 3 there: processes need not hold the same number
    found = stream(pred[mine], truth[mine], batch=2)
    if rank == 0:
        results.put({name: value.item() for name, value in found.items()})
    torch.distributed.destroy_process_group()


def test_two_processes_give_the_numbers_of_one():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=_worker, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    found = results.get()
    for name, value in expected(*images()).items():
        assert found[name] == pytest.approx(value, abs=1e-12), name

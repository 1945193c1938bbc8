"""The three phases of a training step of CAR: what they share, when the discriminator is trained, at which rates."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from ambiseg.config import Config, parse
from ambiseg.methods.base import Method
from ambiseg.methods.car import CAR
from ambiseg.training import train
from ambiseg.training.module import TrainingModule
from tests.conftest import TINY
from tests.test_car import SMALL, batch, counted, losses, model


def test_a_step_runs_every_network_once():
    built = model()
    images, masks = batch()
    first, down, up = (
        counted(built.calibration),
        counted(built.refinement, "prepare"),
        counted(built.refinement, "decode"),
    )
    for step in range(1, 4):
        losses(built, images, masks, step)  # also when it is the same batch again
        assert len(first) == len(down) == len(up) == step


def test_what_phases_share_is_of_one_batch_and_has_no_graph():
    built = model().eval()
    one, two = batch(seed=0), batch(seed=1)
    alone = {phase: built.loss(*two, generator=torch.Generator().manual_seed(0), phase=phase)["total"]
             for phase in ("gen", "disc")}  # fmt: skip
    for phase in ("gen", "disc"):
        losses(built, *one)
        for before in ("cal", "gen"):
            built.loss(*one, phase=before)  # leaves something
        shared = built._shared
        assert shared is not None
        assert shared.calibrated is None  # the phase that it was left for has taken it
        assert shared.fake is not None
        assert not shared.fake.requires_grad
        again = built.loss(*two, generator=torch.Generator().manual_seed(0), phase=phase)["total"]
        built._shared = None
        expected = built.loss(*two, generator=torch.Generator().manual_seed(0), phase=phase)["total"]
        assert torch.equal(again, expected)
    assert alone["gen"].isfinite()
    assert alone["disc"].isfinite()


def test_a_batch_is_not_kept_by_what_phases_share():
    built = model()
    images, masks = batch()
    built.loss(images, masks, phase="cal")
    shared = built._shared
    assert shared is not None
    assert shared.calibrated is not None
    assert not shared.calibrated.requires_grad
    del images
    assert shared.batch[0]() is None
    assert copy.deepcopy(built)._shared is None
    assert pickle.loads(pickle.dumps(built))._shared is None


def test_weights_that_were_stepped_meet_the_values_of_before():
    """G is fitted to what F said before its step, and D to what G drew before its own."""
    built = model().eval()
    images, masks = batch()
    g = torch.Generator().manual_seed(0)
    built.loss(images, masks, generator=g, phase="cal")
    state = g.get_state()
    before = built.loss(images, masks, generator=g, phase="gen")["total"]
    built.loss(images, masks, generator=torch.Generator().manual_seed(0), phase="cal")
    for parameter in built.calibration.parameters():
        parameter.data += 1
    g.set_state(state)
    assert torch.equal(built.loss(images, masks, generator=g, phase="gen")["total"], before)


def test_the_discriminator_is_trained_at_the_beginning_of_a_cycle_while_it_is_weak():
    built = model()
    judged = [step for step in range(600) if "disc" in built.phases(step)]
    assert judged == [*range(50), *range(250, 300), *range(500, 550)]
    built.accuracy.fill_(0.84)
    assert built.phases(0) == ("cal", "gen", "disc")
    built.accuracy.fill_(0.86)
    assert built.phases(0) == ("cal", "gen")
    other = model()
    other.load_state_dict(built.state_dict())  # a checkpoint knows
    assert other.phases(0) == ("cal", "gen")


def test_the_accuracy_is_measured_when_the_discriminator_stands_still():
    """Or it would stand still for ever once it is good."""
    built = model(2)
    built.accuracy.fill_(1.0)
    nn.init.zeros_(built.discriminator.last.weight)
    nn.init.constant_(built.discriminator.last.bias, 3.0)  # all are real
    built.loss(*batch(2), phase="gen")
    assert built.accuracy.item() == 0.5


def test_processes_agree_on_the_accuracy(monkeypatch):
    """As two processes see it: DDP does not bring buffers together, and phases that differ would wait for ever."""
    built = model(2).eval()
    alone = built.loss(*batch(2), generator=torch.Generator().manual_seed(0), phase="gen")["accuracy"]
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda value: value.add_(0.125))  # of the other process
    terms = built.loss(*batch(2), generator=torch.Generator().manual_seed(0), phase="gen")
    assert torch.equal(terms["accuracy"], (alone + 0.125) / 2)
    assert torch.equal(built.accuracy, terms["accuracy"])


def test_batches_of_a_step_go_through_the_same_phases(tmp_path, monkeypatch):
    """A discriminator whose accuracy passes the bound between two batches of a step would keep half a gradient."""
    asked: list[int] = []
    plain = CAR.phases
    monkeypatch.setattr(CAR, "phases", lambda self, step: [asked.append(step), plain(self, step)][1])
    settings = ["--model.method=car", "--model.width=2", "--model.disc_width=2", "--data.options={count: 40, size: 32}"]
    more = ["--trainer.accumulate=2", "--trainer.epochs=1", "--data.batch_size=4"]
    train(parse([*TINY, *settings, *more]), tmp_path / "run", quiet=True)
    assert asked == list(range(len(asked)))
    assert len(asked) > 2


def test_learning_rates_are_the_authors():
    for published, at in ((False, 0), (True, 200)):
        config = parse(["--model.method=car", f"--model.published={str(published).lower()}", "--trainer.epochs=1000"])
        assert (config.optimizer.lr, config.optimizer.weight_decay) == (2e-4, 5e-4)
        with torch.device("meta"):
            built = CAR.build(config.model, SMALL, 1, 2)  # type: ignore[arg-type]
        rates = _rates(built, config, at)
        assert rates == pytest.approx(
            {"cal": 2e-4, "gen": (1e-4 if published else 2e-4), "disc": (5e-6 if published else 1e-5)}
        )
        assert all(group.betas == (0.5, 0.99) for group in built.parameter_groups().values())
        last = _rates(built, config, 999)
        shares = (1 / 4, 1 / 8, 1 / 8) if published else (1, 1, 1)
        assert list(last.values()) == pytest.approx([lr * s for lr, s in zip((2e-4, 2e-4, 1e-5), shares, strict=True)])


def _rates(built: Method, config: Config, epoch: int) -> dict[str, float]:
    module = TrainingModule(built, config, (1,))

    class Ten:
        num_training_batches = 10

    module._trainer = Ten()  # type: ignore[assignment]
    return {phase: module.rate_at(10 * epoch, phase) for phase in module.groups}

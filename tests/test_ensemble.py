"""The ensemble of deterministic U-Nets, trained together or put together from runs."""

from __future__ import annotations

import json

import pytest
import torch

import ambiseg
from ambiseg._util.errors import ConfigError
from ambiseg.cli import main
from ambiseg.config import parse
from ambiseg.evaluation import evaluate
from ambiseg.masks import MaskDistribution
from ambiseg.methods.ensemble import Ensemble, EnsembleConfig, EnsemblePredictive
from ambiseg.methods.unet import UNetMethod
from ambiseg.nn import windows as nn_windows
from ambiseg.nn.config import BackboneConfig
from ambiseg.runs import Run, load
from ambiseg.training import train
from tests.conftest import SHARED, TINY

SMALL = BackboneConfig(channels=[4, 8])


def model(members: int = 3, classes: int = 3) -> Ensemble:
    torch.manual_seed(0)
    return Ensemble.build(EnsembleConfig(members=members), SMALL, 1, classes)


def annotated(batch: int = 2, masks: int = 4) -> tuple[torch.Tensor, MaskDistribution]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(batch, 1, 8, 8, generator=g), MaskDistribution(
        torch.randint(3, (batch, masks, 8, 8), generator=g)
    )


def test_the_published_ensemble_has_the_golden_size():
    path = SHARED / "golden" / "zoo" / "param_counts.json"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    one = json.loads(path.read_text(encoding="utf-8"))["unet_deterministic"]["parameters"]
    with torch.device("meta"):
        built = Ensemble.build(EnsembleConfig(published=True), SMALL, 1, 2)
    assert sum(p.numel() for p in built.parameters()) == 5 * one


def test_masks_and_marginal_by_hand():
    probs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])[None, :, :, None, None]  # three members, one pixel
    predictive = EnsemblePredictive(probs, torch.full((1, 3), 1 / 3), (1, 1))
    masks = predictive.render(predictive.noise_of(torch.tensor([[2, 0, 0, 1]])))
    assert masks.labels.flatten().tolist() == [1, 0, 0, 1]
    assert masks.marginal is not None
    assert torch.allclose(masks.marginal.flatten(), torch.tensor([(0.4 + 0.9 + 0.9 + 0.2) / 4, 0.4]))
    compact = predictive.compact(1)
    assert compact.labels.flatten().tolist() == [0, 1, 1]
    assert torch.allclose(compact.mass, torch.full((1, 3), 1 / 3))
    assert torch.allclose(compact.marginal_probs(2).flatten(), torch.tensor([0.5, 0.5]))


def test_members_are_drawn_alike_and_repeat():
    predictive = model().predict(torch.randn(1, 1, 8, 8))
    noise = predictive.noise(3000, torch.Generator().manual_seed(0))
    assert noise.strata is not None
    shares = torch.bincount(noise.strata[0], minlength=3) / 3000
    assert torch.allclose(shares, torch.full((3,), 1 / 3), atol=0.03)  # three deviations are 0.026
    masks = predictive.render(noise[:64])
    assert len(masks.labels[0].unique(dim=0)) <= 3


def test_no_network_runs_for_a_draw(monkeypatch):
    built = model()
    predictive = built.predict(torch.randn(2, 1, 8, 8))

    def refuse(*_: object) -> None:
        raise AssertionError("a network ran")

    monkeypatch.setattr(UNetMethod, "forward", refuse)
    assert predictive.sample(50).labels.shape == (2, 50, 8, 8)
    assert predictive._labels is predictive._labels  # nor are soft masks compared again


def test_a_member_is_fitted_to_annotations_of_its_own():
    """Whose gradient reaches nobody else; and what it draws is not what the others do."""
    built, (images, annotations) = model(), annotated(8)
    g, alone = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    for k, (phase, group) in enumerate(built.parameter_groups().items()):
        built.zero_grad()
        total = built.loss(images, annotations, generator=g, phase=phase)["total"]
        member = built.members[k]
        assert isinstance(member, UNetMethod)
        assert torch.equal(total, member.loss(images, annotations, generator=alone)["total"])
        total.backward()
        reached = {id(p) for p in built.parameters() if p.grad is not None}
        assert reached == {id(p) for p in group.parameters}
    # Members of equal weights have equal losses only where they draw the same annotations.
    twins = model(2).eval()
    twins.members[1].load_state_dict(twins.members[0].state_dict())
    one, two = (twins.loss(images, annotations, generator=g, phase=phase)["total"] for phase in twins.phases(0))
    assert one != two
    same = annotations.labels[:, :1].expand(-1, 4, -1, -1)
    one, two = (twins.loss(images, same, generator=g, phase=phase)["total"] for phase in twins.phases(0))
    assert torch.equal(one, two)


def test_the_loss_of_all_is_the_sum():
    built, (images, annotations) = model().eval(), annotated()
    both = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    parts = [built.loss(images, annotations, generator=both[0], phase=phase)["total"] for phase in built.phases(0)]
    assert torch.allclose(built.loss(images, annotations, generator=both[1])["total"], torch.stack(parts).sum())


def test_an_ensemble_of_one_is_a_unet():
    built, (images, annotations) = model(1), annotated()
    assert tuple(built.parameter_groups()) == ("main",)
    built.loss(images, annotations)["total"].backward()
    member = built.members[0]
    assert isinstance(member, UNetMethod)
    assert torch.equal(built.predict(images).sample(2).labels[:, 1], member.predict(images).sample(1).labels[:, 0])


@pytest.mark.parametrize("kept", [True, False])
def test_large_images_have_the_masks_of_the_whole(kept, monkeypatch):
    """Whether the soft masks are kept for all of it, or made again for every rendering."""
    monkeypatch.setattr(nn_windows, "keeps", lambda backbone, size: kept)
    built, image = model(), torch.randn(1, 1, 45, 200)
    windows = nn_windows.plan((45, 200), built.multiple, window=128, overlap=64)
    assert windows is not None
    parts, whole = built.predict_windows(image, windows), built.predict(image)
    noise = whole.compact_noise(1)
    masks, expected = parts.render(noise), whole.render(noise)
    assert torch.equal(masks.labels, expected.labels)
    assert torch.allclose(masks.marginal_probs(3), expected.marginal_probs(3), atol=1e-5)
    assert torch.allclose(parts.probs(noise), whole.probs(noise), atol=1e-5)


# -- of runs -----------------------------------------------------------------------------------------------------------

UNET = [*TINY, "--data.options={count: 40, size: 16}", "--model.method=unet", "--trainer.epochs=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("members")
    for seed in (1, 2):
        train(parse([*UNET, f"--seed={seed}"]), folder / str(seed), quiet=True)
    return [folder / "1", folder / "2"]


def test_runs_are_put_together(runs, tmp_path, capsys):
    out = tmp_path / "both"
    assert main(["ensemble", *map(str, runs), "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [member["run"] for member in said["members"]] == [str(run) for run in runs]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["best.safetensors", "config.yaml", "last.safetensors", "run.json", "split.json"]
    )
    image = torch.rand(2, 1, 16, 16)
    together = load(out).predict(image)
    assert isinstance(together, EnsemblePredictive)
    for k, run in enumerate(runs):
        assert torch.equal(together.centres()[:, k], load(run).predict(image).sample(1).labels[:, 0])
    found = evaluate(out, samples=(4,), accelerator="cpu", quiet=True)
    assert found.strata is not None
    assert (found.strata.name, found.strata.count) == ("member", 2)
    assert Run(out).history == []
    with pytest.raises(ConfigError, match=r"expected a run that was trained, found one that was put together from 2 r"):
        train(Run(out).config, out, resume=True, quiet=True)


def test_runs_that_do_not_fit_together_are_refused_in_one_line(runs, tiny_run, tmp_path):
    other = tmp_path / "other"
    train(parse([*UNET, "--backbone.channels=[4, 8]"]), other, quiet=True)
    split = tmp_path / "split"
    train(parse([*UNET, "--data.split_seed=5"]), split, quiet=True)
    for given, why in (
        ([runs[0]], "expected at least two runs, found 1"),
        ([runs[0], runs[0]], "expected every run once, found it twice"),
        ([runs[0], tiny_run], "expected a run of unet, found mose"),
        ([runs[0], other], r"expected backbone.channels \[8, 16\] as in .*, found \[4, 8\]"),
        ([runs[0], split], "expected the data and the split of .*, found others"),
    ):
        with pytest.raises(ConfigError, match=why) as refused:
            ambiseg.ensemble(given, tmp_path / "out")
        assert "\n" not in str(refused.value)
        assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="found files in it"):
        ambiseg.ensemble(runs, other)

"""Calibrated adversarial refinement: golden numbers of its authors' code, its networks, losses and predictions."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ambiseg._util.errors import ConfigError
from ambiseg.masks import MaskDistribution
from ambiseg.methods.car import CAR, CARConfig, CARPredictive
from ambiseg.methods.car.losses import calibration_ce, calibration_kl
from ambiseg.methods.car.networks import Prepared, Refinement, SegNet
from ambiseg.methods.targets import Target
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.discriminator import Discriminator, fooled, grid_of, scored_with_r1, told_apart
from ambiseg.nn.injection import NoiseInjection
from ambiseg.nn.windows import plan
from tests.conftest import SHARED

SMALL = BackboneConfig(channels=[4, 8])
Golden = Callable[[str], Tensor]


def model(classes: int = 3, **settings: Any) -> CAR:
    return CAR.build(CARConfig(**{"width": 4, "disc_width": 4, **settings}), SMALL, 1, classes)


def batch(classes: int = 3, seed: int = 0) -> tuple[Tensor, MaskDistribution]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (2, 3, 32, 32), generator=g)
    return torch.randn(2, 1, 32, 32, generator=g), MaskDistribution(labels)


def counted(part: nn.Module, name: str = "forward") -> list[int]:
    calls: list[int] = []
    plain = getattr(part, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(*args, **kwargs)

    setattr(part, name, call)
    return calls


# -- golden numbers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def car() -> Golden:
    path = SHARED / "golden" / "zoo" / "car.npz"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    arrays = dict(np.load(path))
    return lambda key: torch.from_numpy(np.asarray(arrays[key]))


def test_golden_injection(car):
    weight = car("inject_w")
    injection = NoiseInjection(weight.shape[1], car("inject_z").shape[2], weight.shape[0])
    names = {"shift": ("A", "a"), "scale": ("B", "b"), "mix": ("w", "c")}
    for part, (w, b) in names.items():
        layer = getattr(injection, part)
        layer.weight.data, layer.bias.data = car(f"inject_{w}").view_as(layer.weight), car(f"inject_{b}")
    maps, codes, expected = car("inject_h"), car("inject_z").transpose(0, 1), car("inject_out").transpose(0, 1)
    for given in (maps, maps.repeat_interleave(codes.shape[1], 0)):  # one map for all draws, and one for each
        found = injection(given, codes).unflatten(0, codes.shape[:2])
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("prefix", ["lidc", "city"])
@pytest.mark.parametrize(("suffix", "rtol"), [("", 1e-5), ("_f64", 1e-10)])
def test_golden_calibration(car, prefix, suffix, rtol):
    logits, samples, labels = (car(f"{prefix}_{key}") for key in ("cal_logits", "samples", "target"))
    if suffix:
        logits, samples = logits.double(), samples.double()
    valid = labels != logits.shape[1] - 1 if prefix == "city" else None  # the last class is unlabelled
    target = Target(labels.long(), valid)
    ce, kl = car(f"{prefix}_cal_ce{suffix}"), car(f"{prefix}_calibration_kl{suffix}")
    assert torch.allclose(calibration_ce(logits, target), ce, rtol=rtol, atol=0)
    assert torch.allclose(calibration_kl(samples.mean(0), logits.softmax(1), valid), kl, rtol=rtol, atol=0)


def test_golden_cross_entropies_at_their_edges(car):
    scores = car("scores_edge")
    assert torch.allclose(fooled(scores), car("bce_generator_edge"), rtol=1e-5)
    assert torch.allclose(told_apart(scores.flip(0), scores), car("bce_discriminator_edge"), rtol=1e-5)


def golden_judge(car: Golden) -> Discriminator:
    images = car("step_images")
    grid = grid_of((images.shape[2], images.shape[3]))
    judge = Discriminator(car("disc_w0").shape[1], car("disc_w0").shape[0], grid)
    for k, layer in enumerate([*judge.fine, *judge.coarse, judge.last]):
        assert layer.weight.shape == car(f"disc_w{k}").shape
        layer.weight.data = car(f"disc_w{k}")  # type: ignore[union-attr]
        assert (layer.bias is None) == (k in (4, 5, 6))
        if layer.bias is not None:
            layer.bias.data = car(f"disc_b{k}")  # type: ignore[union-attr]
    return judge


@pytest.mark.parametrize(("suffix", "rtol"), [("", 1e-5), ("_f64", 1e-10)])
def test_golden_discriminator(car, suffix, rtol):
    dtype = torch.float64 if suffix else torch.float32
    judge = golden_judge(car).to(dtype)
    images, samples = car("step_images").expand(-1, 3, -1, -1).to(dtype), car("step_samples").to(dtype)
    real = torch.cat([images, F.one_hot(car("step_target").long(), samples.shape[2]).movedim(-1, 1).to(dtype)], 1)
    scores, r1 = scored_with_r1(judge, real)
    assert torch.allclose(scores, car(f"disc_real_scores{suffix}"), rtol=rtol)
    assert torch.allclose(r1, car(f"disc_r1{suffix}"), rtol=rtol)
    for fakes, expected in zip(samples, car(f"disc_fake_scores{suffix}"), strict=True):
        assert torch.allclose(judge(torch.cat([images, fakes], 1)), expected, rtol=rtol)
    given = real.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(judge(given).sum(), given)
    expected = car("disc_real_input_grad").to(dtype)
    assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


class Given(nn.Module):
    """A network that gives what it was given."""

    multiple, latent = 1, 1

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.logits

    def prepare(self, x: Tensor, generator: torch.Generator | None = None) -> Prepared:
        return Prepared(x, ())

    def decode(self, prepared: Prepared, codes: Tensor, generator: torch.Generator | None = None) -> Tensor:
        assert codes.shape[1] == self.logits.shape[1]
        return self.logits


def test_golden_step(car):
    """One iteration of the authors' training, through the loss of every phase."""
    images, samples, judge = car("step_images"), car("step_samples"), golden_judge(car)
    size, width = list(images.shape[2:]), car("disc_w0").shape[0]
    config = CARConfig(published=True, network="cityscapes", disc_size=size, disc_width=width, samples=len(samples))
    built = CAR.build(config, SMALL, 1, samples.shape[2])
    built.discriminator.load_state_dict(judge.state_dict())
    built.calibration, built.refinement = Given(car("step_cal_logits")), Given(samples.transpose(0, 1).log())  # type: ignore[assignment]
    masks = MaskDistribution(car("step_target").long()[:, None])
    found = {phase: built.loss(images, masks, phase=phase) for phase in ("cal", "gen", "disc")}
    expected = {
        ("cal", "total"): "loss_calibration_net", ("gen", "total"): "loss_generator",
        ("disc", "total"): "loss_discriminator", ("disc", "bce"): "disc_bce", ("disc", "r1"): "r1_mean",
        ("gen", "accuracy"): "disc_accuracy",
    }  # fmt: skip
    for (phase, term), key in expected.items():
        assert found[phase][term].item() == pytest.approx(car(f"step_{key}").item(), rel=1e-5), key
    assert 10 * found["gen"]["adversarial"].item() == pytest.approx(car("step_weighted_adversarial").item(), rel=1e-5)
    assert 5 * found["gen"]["calibration"].item() == pytest.approx(car("step_weighted_calibration").item(), rel=1e-5)
    assert found["gen"]["adversarial"].item() == pytest.approx(car("bce_generator").item(), rel=1e-5)
    assert built.accuracy.item() == pytest.approx(car("step_disc_accuracy").item())


@pytest.mark.parametrize(
    ("name", "channels", "classes", "settings"),
    [
        ("car_lidc", 1, 2, {}),
        (
            "car_cityscapes",
            28,  # colours, and the prediction of another network
            25,
            {"network": "cityscapes", "guides": 25, "latent": 32, "disc_size": [256, 512]},
        ),
    ],
)
def test_published_networks_have_the_golden_size(name, channels, classes, settings):
    path = SHARED / "golden" / "zoo" / "param_counts.json"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    expected = json.loads(path.read_text(encoding="utf-8"))[name]
    with torch.device("meta"):
        built = CAR.build(CARConfig(published=True, **settings), SMALL, channels, classes)
    counts = {
        part: sum(p.numel() for p in getattr(built, part).parameters())
        for part in ("calibration", "refinement", "discriminator")
    }
    assert counts == expected["parts"]
    assert sum(counts.values()) == expected["parameters"]


# -- networks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [2, 3, 4])
def test_what_is_shared_by_draws_changes_nothing(levels):
    """Against the networks as the paper draws them: every draw by itself, maps side by side."""
    net = Refinement(3, 2, latent=5, width=4, levels=levels).eval()
    x, codes = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 5)
    for norm in (part for part in net.modules() if isinstance(part, nn.BatchNorm2d)):
        norm.running_mean, norm.running_var = torch.randn_like(norm.bias), torch.rand_like(norm.bias) + 0.5
    found = net.decode(net.prepare(x), codes)

    def injected(injection: Any, h: Tensor, z: Tensor) -> Tensor:
        shift, scale = injection.shift(z)[..., None, None], injection.scale(z)[..., None, None]
        return F.conv2d((h + shift) * (scale + 1e-5), injection.mix.weight[..., None, None], injection.mix.bias)

    for n in range(3):
        maps, h = [], x
        for layer in net.down:
            h = layer(h)
            maps.append(h)
        h = maps.pop()
        for k, layer in enumerate(net.up):
            h = layer(h if k == 0 else torch.cat([h, maps.pop()], 1))
            if 1 <= k < levels - 1:
                h = F.leaky_relu(injected(net.inner[k - 1], h, codes[:, n]), 0.01)
        assert torch.allclose(found[:, n], injected(net.out, h, codes[:, n]), atol=1e-5)


def test_repeated_layers_of_the_decoder_are_one():
    with torch.device("meta"):
        net = SegNet(3, 2)
        calls: list[str] = []
        for name, part in net.named_modules():
            if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
                part.register_forward_hook(lambda *_, name=name: calls.append(name))
        assert net(torch.zeros(1, 3, 32, 64)).shape == (1, 2, 32, 64)
    times = [calls.count(name) for name in dict.fromkeys(calls)]
    assert times == [1] * 16 + [1, 4] + [1, 1, 2, 1] * 2 + [1] * 6 + [1]


def test_a_discriminator_takes_images_of_any_size():
    for grid in ((1, 1), grid_of((64, 40))):
        judge = Discriminator(3, 2, grid)
        for size in ((1, 1), (5, 70), (22, 23), (64, 40), (65, 47)):
            scores, r1 = scored_with_r1(judge, torch.randn(2, 3, *size))
            (scores.sum() + r1.sum()).backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in judge.parameters())
    assert grid_of((22, 23)) == (1, 1)
    assert {tuple(_last(judge, size)) for size in ((64, 40),)} == {grid_of((64, 40))}  # nothing is averaged there


def _last(judge: Discriminator, size: tuple[int, int]) -> torch.Size:
    seen: list[torch.Size] = []
    judge.coarse[-1].register_forward_hook(lambda *given: seen.append(given[2].shape[2:]))
    judge(torch.zeros(1, 3, *size))
    return seen[0]


def test_scores_of_certain_discriminators_have_gradients_that_are_numbers():
    for value in (1e4, -1e4):
        logits = torch.full((3,), value, requires_grad=True)
        scores = logits.sigmoid()
        (fooled(scores) + told_apart(scores, scores)).backward()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()
    judge = Discriminator(3, 2)
    nn.init.constant_(judge.last.bias, -1e4)
    assert judge(torch.zeros(1, 3, 32, 32)).item() == pytest.approx(1e-7)
    assert fooled(torch.zeros(2)).item() == 100
    assert fooled(torch.tensor([torch.nan])).isnan()  # and what is no number stays none


# -- losses ------------------------------------------------------------------------------------------------------------


def test_pixel_losses_by_hand():
    logits = torch.tensor([[0.0, 0.0], [0.0, 30.0]]).T.reshape(1, 2, 1, 2)  # of class 0 and 1 at two pixels
    target = Target(torch.zeros(1, 1, 2, dtype=torch.long), None)
    assert calibration_ce(logits, target).item() == pytest.approx((np.log(2) - np.log(1e-7)) / 2, rel=1e-6)
    half = Target(target.labels, torch.tensor([[[True, False]]]))
    assert calibration_ce(logits, half).item() == pytest.approx(np.log(2) / 2, rel=1e-6)  # void pixels count as 0
    mean, q = torch.tensor([0.5, 1.0]).view(1, 1, 1, 2), torch.tensor([0.25, 0.0]).view(1, 1, 1, 2)
    mean, q = torch.cat([mean, 1 - mean], 1), torch.cat([q, 1 - q], 1)
    first = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    second = 0.999 * np.log(0.999 / 0.001) + 0.001 * np.log(0.001 / 0.999)
    assert calibration_kl(mean, q).item() == pytest.approx((first + second) / 2, rel=1e-5)
    assert calibration_kl(mean, q, half.valid).item() == pytest.approx(first / 2, rel=1e-5)
    assert calibration_kl(q, q).item() == 0


def losses(built: CAR, images: Tensor, masks: MaskDistribution, seed: int = 3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {phase: built.loss(images, masks, generator=g, phase=phase)["total"] for phase in ("cal", "gen", "disc")}


def test_labels_of_void_pixels_do_not_matter():
    built = model().eval()
    images, masks = batch()
    valid = torch.rand(2, 32, 32) < 0.7
    labels = torch.where(valid[:, None], masks.labels, (masks.labels + 1) % 3)
    one, two = (losses(built, images, MaskDistribution(x, valid=valid)) for x in (masks.labels, labels))
    assert one == two
    other = losses(built, images, MaskDistribution(labels))
    assert all(other[phase] != one[phase] for phase in one)


def test_the_discriminator_sees_nothing_at_void_pixels():
    built = model()
    images, masks = batch()
    valid = torch.rand(2, 32, 32) < 0.7
    seen: list[Tensor] = []
    built.discriminator.register_forward_hook(lambda _, given, scores: seen.append(given[0]))
    losses(built, images, MaskDistribution(masks.labels, valid=valid))
    assert [len(pairs) for pairs in seen] == [10, 2, 2, 2]  # five draws, annotations; annotations, one draw
    for pairs in seen:
        drawn, kept = pairs[:, 1:], valid[:, None].repeat_interleave(len(pairs) // 2, 0)
        assert torch.allclose(drawn.sum(1, keepdim=True), kept.float())
    assert torch.equal(seen[3], seen[0][::5])  # the first draw of each image


def test_images_without_a_valid_pixel_give_numbers():
    built = model()
    images, masks = batch()
    for phase, total in losses(built, images, MaskDistribution(masks.labels, valid=torch.zeros(2, 32, 32) > 0)).items():
        assert total.isfinite(), phase
        built.zero_grad()
        total.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameter_groups()[phase].parameters)


def test_a_phase_moves_its_own_network():
    built = model()
    images, masks = batch()
    parts = {"cal": built.calibration, "gen": built.refinement, "disc": built.discriminator}
    for phase in parts:
        built.zero_grad()
        built.loss(images, masks, phase=phase)["total"].backward()
        for name, part in parts.items():
            moved = any(p.grad is not None for p in part.parameters())
            assert moved == (name == phase or (phase, name) == ("gen", "disc")), (phase, name)  # whoever is toggled off


def test_dropout_comes_from_the_generator():
    built = model(dropout=0.5)
    state = copy.deepcopy(built.state_dict())
    found = []
    for seed in range(2):
        built.load_state_dict(state)
        torch.manual_seed(seed)
        found.append({phase: total.item() for phase, total in losses(built, *batch()).items()})
    assert found[0] == found[1]


# -- prediction --------------------------------------------------------------------------------------------------------


def test_the_calibration_network_gives_the_exact_mean_and_one_mask():
    built = model()
    images, _ = batch()
    predictive = built.predict(images)
    assert isinstance(predictive, CARPredictive)
    with torch.no_grad():
        built.eval()
        assert torch.equal(predictive.calibrated, built.calibration(images).softmax(1))
    assert torch.equal(predictive.point(), predictive.calibrated.argmax(1))


def test_draws_in_chunks_are_the_same(monkeypatch):
    built = model()
    predictive = built.predict(batch()[0])
    noise = predictive.noise(5, torch.Generator().manual_seed(0))
    whole, probs = predictive.render(noise), predictive.probs(noise)
    monkeypatch.setattr("ambiseg.methods.car.predictive._PIXELS", 2 * 2 * 32 * 32)
    down = counted(built.refinement, "prepare")
    parts = predictive.render(noise)
    assert not down  # the encoders ran once
    assert torch.equal(parts.labels, whole.labels)
    assert torch.allclose(parts.marginal_probs(3), whole.marginal_probs(3), atol=1e-6)
    assert torch.allclose(predictive.probs(noise), probs, atol=1e-6)


def test_large_images_whose_probabilities_are_not_kept(monkeypatch):
    monkeypatch.setattr("ambiseg.nn.windows.keeps", lambda backbone, size: False)
    built = model(levels=2)
    image = torch.randn(1, 1, 40, 200)
    windows = plan((40, 200), built.multiple, window=128, overlap=64)
    assert windows is not None
    parts, whole = built.predict_windows(image, windows), built.predict(image)
    noise = whole.noise(2, torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(parts.probs(noise), whole.probs(noise), atol=0.05)  # windows see less than networks reach


def test_guides_are_read_by_the_calibration_network_alone():
    built = CAR.build(CARConfig(width=4, disc_width=4, guides=2), SMALL, 3, 2).eval()
    images = torch.randn(1, 3, 32, 32)
    other = torch.cat([images[:, :1], torch.randn(1, 2, 32, 32)], 1)
    one, two = built.predict(images), built.predict(other)
    assert not torch.allclose(one.calibrated, two.calibrated)  # type: ignore[attr-defined]
    with torch.no_grad():
        probs = torch.rand(1, 2, 32, 32)
        for a, b in zip(
            built.refined(images, probs).prepared.skips, built.refined(other, probs).prepared.skips, strict=True
        ):
            assert torch.equal(a, b)
    with pytest.raises(
        ConfigError, match=r"model\.guides: expected fewer than the channels of the images, found 3 of 3"
    ):
        CAR.build(CARConfig(guides=3), SMALL, 3, 2)


def test_networks_beside_the_backbone_are_as_wide_as_it():
    assert CARConfig().widths(BackboneConfig()) == (32, 64)  # the authors'
    assert CARConfig().widths(BackboneConfig(channels=[16, 32])) == (16, 32)
    assert CARConfig(published=True).widths(BackboneConfig(channels=[16, 32])) == (32, 64)
    assert CARConfig().widths(BackboneConfig(name="deeplabv3plus")) == (32, 64)
    assert CARConfig(width=8, disc_width=4).widths(BackboneConfig()) == (8, 4)

"""The diffusion of label maps, and the U-Net that undoes it."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ambiseg.nn.diffusion import CategoricalDiffusion, Convention, cosine, drawn, visited
from ambiseg.nn.diffusion_unet import Attention, DiffusionUNet, GroupNorm
from tests.conftest import SHARED

CONVENTIONS: list[Convention] = ["consistent", "released"]
ZOO = SHARED / "golden" / "zoo"


@pytest.fixture(scope="module")
def zoo() -> Callable[[str], Tensor]:
    path = ZOO / "ccdm.npz"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    arrays = dict(np.load(path))
    return lambda key: torch.from_numpy(np.asarray(arrays[key]))


def double(classes: int, timesteps: int = 250, convention: Convention = "consistent") -> CategoricalDiffusion:
    return CategoricalDiffusion(classes, cosine(timesteps, convention), torch.double)


def test_golden_schedules(zoo):
    kept, so_far = zoo("consistent_alpha"), zoo("consistent_alpha_bar")
    ours = torch.tensor(list(cosine(len(kept) - 1)), dtype=torch.double)
    assert torch.allclose(ours, torch.stack([kept, 1 - kept, so_far, 1 - so_far]), atol=1e-13, rtol=0)
    late = torch.tensor(list(cosine(len(kept) - 1, "released")), dtype=torch.double)[:, 1:]
    released = [zoo(f"released_{name}").double() for name in ("alphas", "betas", "cumalphas")]
    assert torch.allclose(late[:3], torch.stack(released), atol=1e-6, rtol=0)  # theirs are float32
    assert (late[2] - ours[2, 1:]).abs().max() > 1e-3  # one is not the other


@pytest.mark.parametrize("classes", ["c2", "c5"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_golden_kernel_and_loss(zoo, classes, convention):
    def ours(name: str) -> Tensor:
        return zoo(f"{classes}_{convention}_{name}")

    x0, xt, p0, weights = (zoo(f"{classes}_{name}") for name in ("x0", "xt", "p0", "class_weights"))
    t, p0 = zoo("t"), p0.double().requires_grad_()
    diffusion = double(p0.shape[1], len(zoo("released_alphas")), convention)
    step = diffusion.one_step(t)
    for name, found in (
        ("q_xt_given_x0", diffusion.forward_probs(x0, t)),
        ("posterior", diffusion.posterior(xt, x0, step)),
        ("reverse", diffusion.reverse(xt, p0, step)),
    ):
        assert torch.allclose(found.float(), ours(name), atol=1e-6, rtol=0), name  # kept as float32
    cost = diffusion.divergence(x0, xt, p0, t)
    assert torch.allclose(cost.sum((1, 2)), ours("loss_per_image_f64"), rtol=1e-10, atol=1e-10)
    loss = cost.sum() / len(cost)
    assert torch.allclose(loss, ours("loss_f64"), rtol=1e-10, atol=0)
    weighted = (cost * weights.double()[x0.long()]).sum() / len(cost)
    assert torch.allclose(weighted, ours("loss_weighted_f64"), rtol=1e-10, atol=0)
    (gradient,) = torch.autograd.grad(loss, p0)
    expected = ours("loss_grad_p0").double()
    assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("classes", ["c2", "c5"])
def test_golden_loss_in_the_precision_of_training(zoo, classes):
    x0, xt, p0 = (zoo(f"{classes}_{name}") for name in ("x0", "xt", "p0"))
    diffusion = CategoricalDiffusion(p0.shape[1], cosine(len(zoo("released_alphas"))))
    found = diffusion.divergence(x0, xt, p0, zoo("t")).sum((1, 2)).double()
    expected = zoo(f"{classes}_consistent_loss_per_image_f64")
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6 * x0[0].numel())  # at t = 250 nothing but rounding


def test_golden_last_step_and_steps_visited(zoo):
    for classes in ("c2", "c5"):
        xt, p0 = zoo(f"{classes}_xt"), zoo(f"{classes}_p0")
        diffusion = CategoricalDiffusion(p0.shape[1], cosine(250))
        found = diffusion.reverse(xt, p0, diffusion.jump(1, 0))
        assert torch.allclose(found, p0, atol=1e-6)
        assert torch.equal(found.argmax(1), zoo(f"{classes}_final_step_labels").long())
    for steps in (5, 10, 50):
        assert visited(len(zoo("released_alphas")), steps) == zoo(f"strided_t_{steps}").tolist()


@pytest.mark.parametrize(("name", "multipliers"), [("ccdm_default", (1, 1, 2, 3, 4)), ("ccdm_wide", (1, 2, 2, 4, 5))])
def test_golden_size_of_the_network(name, multipliers):
    path = ZOO / "param_counts.json"
    if not path.exists():
        pytest.skip(f"golden numbers absent: set AMBISEG_SHARED to the folder that holds golden/zoo/{path.name}")
    expected = json.loads(path.read_text(encoding="utf-8"))[name]["parameters"]
    with torch.device("meta"):
        unet = DiffusionUNet(3, 2, [32 * times for times in multipliers])
    assert sum(parameter.numel() for parameter in unet.parameters()) == expected


# -- the process -------------------------------------------------------------------------------------------------------


def test_by_hand():
    """0.5 of x_0 = 1 is kept until s, and 0.9 from s to t, where x_t = 0:  (0.95 · 0.25, 0.05 · 0.75)."""
    diffusion = double(2)
    jump = diffusion.jump(2, 1)._replace(kept=0.9, lost=0.1, kept_before=0.5, lost_before=0.5)
    xt, x0 = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    expected = torch.tensor([0.95 * 0.25, 0.05 * 0.75], dtype=torch.double)
    assert torch.allclose(diffusion.posterior(xt, x0, jump).flatten(), expected / expected.sum())


@given(classes=st.integers(2, 6), t=st.integers(1, 20), back=st.integers(1, 20), seed=st.integers(0, 99))
def test_any_jump_is_bayes_rule_of_all_single_steps(classes, t, back, seed):
    """Against products of transition matrices, written out."""
    s, diffusion = max(0, t - back), double(classes, 20)
    one = [
        kept * torch.eye(classes, dtype=torch.double) + (1 - kept) / classes for kept in cosine(20).kept
    ]  # [from, to]
    until, since = (torch.eye(classes, dtype=torch.double) for _ in range(2))
    for step in range(1, s + 1):
        until = until @ one[step]
    for step in range(s + 1, t + 1):
        since = since @ one[step]
    g = torch.Generator().manual_seed(seed)
    x0, xt = torch.randint(classes, (2, 1, 3, 3), generator=g)
    probs = torch.rand(1, classes, 3, 3, generator=g, dtype=torch.double).softmax(1)
    joint = until[x0] * since[:, xt].movedim(0, -1)  # [1, 3, 3, x_s]
    bayes = (joint / joint.sum(-1, keepdim=True)).movedim(-1, 1)
    jump = diffusion.jump(t, s)
    assert torch.allclose(diffusion.posterior(xt, x0, jump), bayes, atol=1e-12)
    mixed = sum(diffusion.posterior(xt, torch.full_like(xt, c), jump) * probs[:, c : c + 1] for c in range(classes))
    found = diffusion.reverse(xt, probs, jump)
    assert torch.allclose(found, torch.as_tensor(mixed), atol=1e-12)
    assert torch.allclose(found.sum(1), torch.ones(1, 3, 3, dtype=torch.double))
    if s == t - 1:
        single = diffusion.one_step(torch.tensor([t]))
        assert torch.allclose(diffusion.posterior(xt, x0, single), bayes, atol=1e-12)
        assert torch.allclose(diffusion.forward_probs(x0, torch.tensor([t])).movedim(1, -1), (until @ since)[x0])


def test_the_first_step_is_the_cross_entropy_and_no_step_is_below_zero():
    diffusion, g = double(3), torch.Generator().manual_seed(0)
    x0, xt = torch.randint(3, (2, 4, 5, 5), generator=g)
    p0 = torch.randn(4, 3, 5, 5, generator=g, dtype=torch.double).softmax(1)
    first = diffusion.divergence(x0, xt, p0, torch.ones(4, dtype=torch.long))
    assert torch.allclose(first, -p0.gather(1, x0[:, None])[:, 0].log())
    for t in (1, 2, 30, 250):
        assert diffusion.divergence(x0, xt, p0, torch.full((4,), t)).min() > -1e-12
        certain = diffusion.divergence(x0, xt, diffusion.one_hot(x0), torch.full((4,), t))
        assert torch.allclose(certain, torch.zeros_like(certain), atol=1e-10)


def test_a_wrong_certainty_is_finite_and_so_is_its_gradient():
    diffusion = CategoricalDiffusion(3, cosine(250))
    x0 = torch.zeros(3, 4, 4, dtype=torch.long)
    p0 = diffusion.one_hot(x0 + 1).requires_grad_()
    cost = diffusion.divergence(x0, x0 + 2, p0, torch.tensor([1, 2, 250]))
    cost.sum().backward()
    assert cost.isfinite().all()
    assert p0.grad is not None
    assert p0.grad.isfinite().all()


def test_draws_have_their_probabilities():
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])[None, :, None, None].expand(1, -1, 200, 100)
    labels = drawn(probs, torch.rand(1, 1, 200, 100, generator=torch.Generator().manual_seed(0)))
    counts = torch.bincount(labels.flatten(), minlength=4) / labels.numel()
    assert torch.allclose(counts, torch.tensor([0.1, 0.0, 0.6, 0.3]), atol=0.02)  # 20,000 pixels: 6 deviations


def test_steps_and_jumps_that_are_none_are_refused():
    assert visited(250, 1) == [250]
    assert visited(7, 7) == [7, 6, 5, 4, 3, 2, 1]
    for steps in (0, 8):
        with pytest.raises(ValueError, match="expected 1 to 7 steps"):
            visited(7, steps)
    for t, s in ((1, 1), (2, 3), (251, 3), (3, -1)):
        with pytest.raises(ValueError, match="expected 0 ≤ s < t ≤ 250"):
            double(2).jump(t, s)


# -- the network -------------------------------------------------------------------------------------------------------


def fresh(unet: DiffusionUNet) -> DiffusionUNet:
    """With weights everywhere, also where it starts with none."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in unet.parameters():
            if not parameter.count_nonzero():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=g))
    return unet


def test_it_starts_without_an_opinion_and_then_knows_the_step_and_every_channel():
    unet = DiffusionUNet(3, 2, (4, 8, 8, 8))
    maps, t = torch.randn(2, 3, 9, 17), torch.tensor([1, 200])
    assert not unet(maps, t).count_nonzero()
    fresh(unet)
    out = unet(maps, t)
    assert out.shape == (2, 2, 9, 17)
    assert not torch.allclose(unet(maps, t.flip(0)), out, atol=1e-3)
    for channel in range(3):
        other = maps.clone()
        other[:, channel] += torch.randn(9, 17)
        assert not torch.allclose(unet(other, t), out, atol=1e-3)
    assert torch.allclose(unet(maps[1:], t[1:]), out[1:], atol=1e-5)  # images know nothing of each other


def test_norms_of_single_channels_would_not_let_the_step_through():
    maps, t = torch.randn(2, 3, 16, 16), torch.tensor([1, 200])
    for each, knows in ((1, False), (4, True)):
        unet = fresh(DiffusionUNet(3, 2, (8, 16), each=each))
        assert torch.allclose(unet(maps, t.flip(0)), unet(maps, t), atol=1e-3) != knows
    published = DiffusionUNet(3, 2, (32, 64), each=1)
    assert {m.groups for m in published.modules() if isinstance(m, GroupNorm)} == {32}


@pytest.mark.parametrize(("levels", "expected"), [(2, 0), (3, 0), (4, 6), (5, 11), (7, 16)])
def test_attention_is_at_strides_8_16_and_32_and_in_the_middle_below(levels, expected):
    with torch.device("meta"):
        unet = DiffusionUNet(2, 2, [4] * levels)
    assert sum(isinstance(module, Attention) for module in unet.modules()) == expected


@pytest.mark.parametrize("channels", [(1, 1), (7, 5), (48, 3), (4, 8, 16, 32, 32)])
def test_any_width_and_the_smallest_image(channels):
    unet = fresh(DiffusionUNet(2, 3, channels))
    out = unet(torch.randn(1, 2, 1, 1), torch.tensor([3]))
    assert out.shape == (1, 3, 1, 1)
    assert out.isfinite().all()
    assert all(m.weight.numel() % m.groups == 0 for m in unet.modules() if isinstance(m, GroupNorm))


def test_a_coarser_network_gives_maps_of_the_images_size():
    unet = fresh(DiffusionUNet(2, 3, (4, 8), scale=3))
    assert unet.multiple == 6
    assert unet(torch.randn(1, 2, 20, 11), torch.tensor([3])).shape == (1, 3, 20, 11)

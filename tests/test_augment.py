"""One geometric operation for an image and for everything that its readers drew."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg.data.augment import Augment


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ramp(B: int, H: int, W: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose value at a pixel is the pixel's region number, so that both can be compared afterwards."""
    regions = torch.arange(H * W).view(1, H, W).expand(B, H, W).contiguous()
    return regions[:, None].float(), regions


def test_nothing_asked_for_is_nothing_done():
    images, regions = ramp(3, 5, 4)
    after, codes = Augment(flip="none")(images, regions, generator())
    assert torch.equal(after, images)
    assert torch.equal(codes, regions)


@pytest.mark.parametrize("flip", ["horizontal", "vertical", "both"])
def test_flips_are_the_flips_they_say(flip):
    images, regions = ramp(64, 3, 5)
    after, codes = Augment(flip=flip)(images, regions, generator())
    assert torch.equal(after[:, 0].long(), codes)
    axes = {"horizontal": [(), (-1,)], "vertical": [(), (-2,)], "both": [(), (-1,), (-2,), (-1, -2)]}[flip]
    seen = {next(a for a in axes if torch.equal(one, regions[0].flip(a))) for one in codes}
    assert seen == set(axes)  # each of them occurs among 64, and nothing else does


def test_quarter_turns_are_all_four_equally_often():
    images, regions = ramp(400, 4, 4)
    after, codes = Augment(flip="none", quarter_turns=True)(images, regions, generator())
    assert torch.equal(after[:, 0].long(), codes)
    turns = [regions[0].rot90(q) for q in range(4)]
    counts = [sum(torch.equal(one, turn) for one in codes) for turn in turns]
    assert sum(counts) == 400
    assert min(counts) > 70


def test_quarter_turns_need_squares():
    with pytest.raises(ValueError, match="square"):
        Augment(quarter_turns=True)(*ramp(1, 4, 5))


def test_rotation_turns_about_the_middle_and_does_not_stretch():
    """A straight line through the middle of a wide image stays straight, in the direction that both maps agree on."""
    H, W = 33, 65
    rows, columns = torch.meshgrid(torch.arange(H) - 16.0, torch.arange(W) - 32.0, indexing="ij")
    images = torch.stack([rows, columns])[None].repeat(50, 1, 1, 1)  # each pixel's own coordinates
    regions = torch.zeros(50, H, W, dtype=torch.long)
    after, _ = Augment(flip="none", rotate=30)(images, regions, generator(), size=(9, 9))
    y, x = after[:, 0], after[:, 1]
    assert y[:, 4, 4].abs().max() < 1e-4  # the middle is where it was
    assert x[:, 4, 4].abs().max() < 1e-4
    length = torch.hypot(y - y[:, 4:5, 4:5], x - x[:, 4:5, 4:5])  # distances are what they were
    plain = torch.hypot(*torch.meshgrid(torch.arange(9) - 4.0, torch.arange(9) - 4.0, indexing="ij"))
    torch.testing.assert_close(length, plain.expand(50, 9, 9), atol=1e-3, rtol=0)
    angles = torch.rad2deg(torch.atan2(y[:, 4, 8], x[:, 4, 8]))
    assert angles.abs().max() <= 30
    assert angles.max() > 20
    assert angles.min() < -20


def test_scale_magnifies_by_the_factor():
    columns = (torch.arange(41) - 20.0).expand(1, 1, 41, 41)
    for factor in (0.5, 2.0):
        after, _ = Augment(flip="none", scale=(factor, factor))(
            columns.contiguous(), torch.zeros(1, 41, 41).long(), generator(), size=(11, 11)
        )
        torch.testing.assert_close(after[0, 0, 5], (torch.arange(11) - 5.0) / factor, atol=1e-3, rtol=0)


@given(
    rotate=st.floats(0, 180),
    low=st.floats(0.5, 1.0),
    high=st.floats(1.0, 2.0),
    height=st.integers(1, 20),
    width=st.integers(1, 20),
    seed=st.integers(0, 2**31),
)
def test_source_window_holds_all_that_is_needed(rotate, low, high, height, width, seed):
    """Nothing of the result comes from beyond the source window: mirrored borders would show as repeated values."""
    augment = Augment(flip="none", rotate=rotate, scale=(low, high))
    source = augment.source((height, width))
    H, W = source
    inner = torch.zeros(1, 1, H + 40, W + 40)
    inner[..., 20 : 20 + H, 20 : 20 + W] = 1
    # The window alone, and the window within a larger image, must give the same result: all 1.
    regions = torch.zeros(1, H + 40, W + 40).long()
    after, _ = augment(inner, regions, generator(seed), size=(height, width))
    torch.testing.assert_close(after, torch.ones_like(after), atol=1e-4, rtol=0)


@given(
    seed=st.integers(0, 2**31),
    rotate=st.sampled_from([0.0, 15.0, 180.0]),
    scale=st.sampled_from([(1.0, 1.0), (0.7, 1.4)]),
    flip=st.sampled_from(["none", "horizontal", "vertical", "both"]),
    turns=st.booleans(),
    values=st.lists(st.integers(0, 70000), min_size=1, max_size=5, unique=True),
)
def test_labels_stay_labels_and_equal_masks_stay_equal(seed, rotate, scale, flip, turns, values):
    """Two annotators, the second with other names for the same regions: they agree afterwards where they agreed."""
    B, H, W = 3, 11, 11
    choose = generator(seed)
    regions = torch.tensor(values)[torch.randint(len(values), (B, H, W), generator=choose)]
    images = torch.randn(B, 2, H, W, generator=choose)
    augment = Augment(flip=flip, quarter_turns=turns, rotate=rotate, scale=scale)
    _, once = augment(images, regions, generator(seed + 1), size=(7, 7))
    renamed = 70000 - regions
    _, again = augment(images, renamed, generator(seed + 1), size=(7, 7))
    assert once.shape == (B, 7, 7)
    assert set(once.flatten().tolist()) <= set(values)
    assert torch.equal(again, 70000 - once)


def test_image_and_regions_meet_at_the_same_pixels():
    """Where the regions are two halves, the turned image has the values of the half that its pixel is said to be in."""
    regions = torch.zeros(40, 31, 31, dtype=torch.long)
    regions[:, :, 15:] = 1
    after, codes = Augment(rotate=180, scale=(0.8, 1.2))(regions[:, None].float(), regions, generator(), (21, 21))
    assert ((after[:, 0] > 0.5) != (codes == 1)).float().mean() < 1e-3  # a tie may fall either way
    assert 0.3 < codes.float().mean() < 0.7


def test_shading_leaves_geometry_alone_and_stays_in_bounds():
    images = torch.ones(200, 1, 4, 4)
    regions = torch.zeros(200, 4, 4, dtype=torch.long)
    after, codes = Augment(flip="none", brightness=0.5, contrast=math.log(2))(images, regions, generator())
    assert torch.equal(codes, regions)
    assert after.min() >= 0.5 - 0.5
    assert after.max() <= 2 + 0.5
    assert after.amax((1, 2, 3)).std() > 0.1  # one draw an image …
    assert torch.equal(after.amax((1, 2, 3)), after.amin((1, 2, 3)))  # … not one a pixel
    noisy, _ = Augment(flip="none", noise=0.3)(images, regions, generator())
    spread = noisy.std((1, 2, 3))
    assert spread.max() > 0.2
    assert spread.min() < 0.05


def test_same_generator_same_result():
    images, regions = torch.randn(4, 1, 20, 20), torch.randint(5, (4, 20, 20))
    augment = Augment(rotate=45, scale=(0.5, 2), noise=0.1, quarter_turns=True)
    one, two = (augment(images, regions, generator(3), (8, 8)) for _ in range(2))
    other = augment(images, regions, generator(4), (8, 8))
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": (0, 1)}, "scale"),
        ({"scale": (2, 1)}, "found 2 and 1"),
        ({"rotate": -1}, "rotate"),
        ({"noise": float("nan")}, "noise"),
        ({"flip": "sideways"}, "sideways"),
    ],
)
def test_wrong_settings_say_what_is_wrong(settings, message):
    with pytest.raises(ValueError, match=message):
        Augment(**settings)


def test_a_window_larger_than_the_image_is_refused():
    with pytest.raises(ValueError, match="at least"):
        Augment()(*ramp(1, 4, 4), generator(), size=(5, 5))

"""Several training windows per image, windows on marks, values in an image's own range, coarser networks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg.data.augment import Augment
from ambiseg.data.case import Case
from ambiseg.data.intensity import Intensity
from ambiseg.data.loader import BatchSampler, BatchSpec, Loader, Window, steps_per_epoch
from ambiseg.nn import UNet
from ambiseg.nn.unet import Scaled
from tests.cases import Listed

# -- windows per epoch -------------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_every_case_is_seen_as_often_as_asked(count, batch_size, windows, processes, epoch):
    samplers = [
        BatchSampler(range(count), batch_size, shuffle=True, rank=r, processes=processes, windows=windows)
        for r in range(processes)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    parts = [list(sampler) for sampler in samplers]
    assert {len(part) for part in parts} == {steps_per_epoch(count, batch_size, windows, processes)}
    seen = np.bincount([i for part in parts for spec in part for i in spec.indices], minlength=count)
    assert seen.min() >= windows
    assert seen.sum() - windows * count < processes
    assert [list(sampler) for sampler in samplers] == parts  # again, to the last seed


def test_one_window_per_case_is_what_it_was():
    plain = BatchSampler(range(7), 3, shuffle=True, seed=5)
    assert list(plain) == list(BatchSampler(range(7), 3, shuffle=True, seed=5, windows=1))
    rounds = [i for spec in BatchSampler(range(7), 7, shuffle=True, windows=3) for i in spec.indices]
    assert [sorted(rounds[i : i + 7]) for i in (0, 7, 14)] == [list(range(7))] * 3  # no case twice in a batch


# -- focus -------------------------------------------------------------------------------------------------------------


def with_marks(marks: list[tuple[int, int]], size: tuple[int, int] = (90, 70), classes: int = 2) -> Listed:
    """One image per mark: a single pixel, of the classes in turn."""
    cases = []
    for i, (y, x) in enumerate(marks):
        labels = np.zeros((2, *size), np.uint8)
        labels[1, y, x] = 1 + i % (classes - 1)
        image = np.arange(size[0] * size[1], dtype=np.float32).reshape(1, *size)
        cases.append(Case.of(image, labels, name=f"c{i}"))
    return Listed(cases, classes)


@given(st.integers(0, 89), st.integers(0, 69), st.integers(0, 10_000))
def test_a_window_on_a_mark_holds_it(y, x, seed):
    loader = Loader(with_marks([(y, x)]), Intensity(), Window((16, 24), focus=1.0), Augment(flip="none"))
    batch = loader[BatchSpec((0,), seed)]
    (found,) = np.argwhere(batch.annotations.labels[0, 1].numpy() == 1)
    middle = [(4, 11), (6, 17)]  # rows and columns of the middle half
    for at, place, length, (low, high), side in zip(found, (y, x), (90, 70), middle, (16, 24), strict=True):
        assert low <= at <= high or place < side or place >= length - side  # the border is near


def test_windows_are_in_the_share_that_is_asked_for():
    cases = with_marks([(45, 35)] * 40)
    count = 0
    for seed in range(10):
        loader = Loader(cases, Intensity(), Window((16, 16), focus=0.5), Augment(flip="none"))
        marked = loader[BatchSpec(tuple(range(40)), seed)].annotations.labels.flatten(2).any(2).any(1)
        count += int(marked.sum())
    assert 0.42 < count / 400 < 0.65  # half of them, and some of the others by chance (7 %)


def test_rare_classes_are_looked_at_as_often_as_common_ones():
    labels = np.zeros((1, 60, 60), np.uint8)
    labels[0, :30] = 1
    labels[0, 50, 50] = 2
    cases = Listed([Case.of(np.zeros((1, 60, 60)), labels, name="a")], 3)
    loader = Loader(cases, Intensity(), Window((8, 8), focus=1.0), Augment(flip="none"))
    rare = [bool((loader[BatchSpec((0,), seed)].annotations.labels == 2).any()) for seed in range(100)]
    assert 0.35 < np.mean(rare) < 0.65


def test_nothing_marked_or_nothing_to_choose():
    empty = Listed([Case.of(np.zeros((1, 20, 20)), np.zeros((2, 20, 20), np.uint8), name="a")])
    assert Loader(empty, Intensity(), Window((8, 8), focus=1.0), Augment())[BatchSpec((0,), 0)].images.shape[2] == 8
    one = with_marks([(3, 3)], (16, 16))
    plain, focused = (Loader(one, Intensity(), Window((16, 16), focus=f), Augment()) for f in (0.0, 1.0))
    assert torch.equal(plain[BatchSpec((0,), 4)].images, focused[BatchSpec((0,), 4)].images)  # whole images: no draw
    evaluated = Loader(with_marks([(0, 0)]), Intensity(), Window((16, 16), focus=1.0))
    assert not evaluated[BatchSpec((0,), 0)].annotations.labels.any()  # without augmentation: the middle
    with pytest.raises(ValueError, match="focus from 0 to 1"):
        Window((8, 8), focus=1.5)


def test_a_void_pixel_is_no_mark():
    labels, valid = np.zeros((1, 40, 40), np.uint8), np.ones((40, 40), bool)
    labels[0, 2, 2], labels[0, 30, 30] = 1, 1
    valid[2, 2] = False
    cases = Listed([Case.of(np.zeros((1, 40, 40)), labels, name="a", valid=valid)])
    loader = Loader(cases, Intensity(), Window((8, 8), focus=1.0), Augment(flip="none"))
    for seed in range(20):
        assert loader[BatchSpec((0,), seed)].annotations.labels[0, 0].any()


# -- an image's own range ----------------------------------------------------------------------------------------------


def test_the_gain_of_an_image_does_not_matter():
    rng = np.random.default_rng(0)
    image = rng.normal(100, 20, (2, 30, 30)).astype(np.float32)
    own = Intensity(mean=0.5, std=0.2, per_image=True)
    plain = own(torch.from_numpy(image)[None])
    torch.testing.assert_close(own(torch.from_numpy(image * 7 + 3)[None]), plain, rtol=1e-3, atol=1e-3)
    low, high = np.percentile(image[0], (0.5, 99.5))
    expected = ((image[0] - low) / (high - low) - 0.5) / 0.2
    np.testing.assert_allclose(plain[0, 0].numpy(), expected, atol=1e-3)
    assert own(torch.zeros(1, 2, 4, 4)).isfinite().all()  # one value everywhere


def test_a_window_has_the_range_of_its_image():
    image = np.linspace(0, 1000, 40 * 40, dtype=np.float32).reshape(1, 40, 40)
    cases = Listed([Case.of(image, np.zeros((1, 40, 40), np.uint8), name="a")])
    own = Intensity(per_image=True)
    whole = own(torch.from_numpy(image)[None])
    window = Loader(cases, own, Window((10, 10)))[BatchSpec((0,), 0)].images
    torch.testing.assert_close(window, whole[:, :, 15:25, 15:25])


# -- coarser networks --------------------------------------------------------------------------------------------------


def test_a_coarser_network_gives_features_of_the_images_size():
    torch.manual_seed(0)
    network = UNet(1, (4, 8)).eval()
    coarse = Scaled(network, 2)
    images = torch.rand(1, 1, 33, 46)
    features = coarse(images)
    assert features.dense.shape == (1, 4, 33, 46)
    pooled = torch.nn.functional.avg_pool2d(images[:, :, :32], 2)
    inner = network(torch.cat([pooled, images[:, :, 32:].unflatten(3, (-1, 2)).mean(4)], 2))
    fine = torch.nn.functional.interpolate(inner.dense, scale_factor=2, mode="bilinear")[:, :, :33]
    torch.testing.assert_close(features.dense, fine)
    assert (coarse.multiple, coarse.head_channels) == (4, 4)
    stops = Scaled(UNet(1, (4, 8, 16), inject_level=0.5), 2)
    early = stops(images)
    assert stops.finish(early.dense, early, (33, 46)).shape == (1, 4, 33, 46)
    with pytest.raises(ValueError, match="scale of at least 1"):
        Scaled(network, 0)

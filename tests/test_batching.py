"""From cases to batches: windows, padding, annotations, and an order that can be repeated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg._util.errors import DataError
from ambiseg.data.augment import Augment
from ambiseg.data.case import Case
from ambiseg.data.case import partition as partition_maps
from ambiseg.data.intensity import Intensity
from ambiseg.data.loader import BatchSampler, BatchSpec, Loader, Window
from ambiseg.regions import partition
from tests.cases import Listed, random_cases

PLAIN = Intensity()


# -- cases -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 5), st.booleans(), st.integers(0, 10**6))
def test_regions_and_table_say_what_the_masks_said(readers, classes, void, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, (readers, 7, 5)) * rng.integers(1, 300)
    valid = rng.random((7, 5)) > 0.3 if void else None
    case = Case.of(np.zeros((1, 7, 5)), labels, name="x", valid=valid)
    assert np.array_equal(case.labels, labels)
    assert (case.valid is None) == (not void)
    if valid is not None:
        assert case.valid is not None
        assert np.array_equal(case.valid, valid)
    tuples = {(*labels[:, y, x], void and bool(~valid[y, x])) for y in range(7) for x in range(5)}  # type: ignore[index]
    assert len(case.table) == len(tuples)  # no region is there twice, none is empty


def test_partition_uses_small_numbers():
    regions, table = partition_maps([np.arange(300).reshape(10, 30)])
    assert (regions.dtype, table.dtype) == (np.uint16, np.uint16)
    regions, table = partition_maps([np.zeros((4, 4), int), np.ones((4, 4), int)])
    assert (regions.dtype, table.tolist()) == (np.uint8, [[0, 1]])


def test_a_mask_of_another_size_is_refused_by_name():
    with pytest.raises(DataError, match=r"scan-7: expected .* found \[1, 4, 4\] and \[2, 4, 5\]"):
        Case.of(np.zeros((1, 4, 4)), np.zeros((2, 4, 5), int), name="scan-7")


def test_digest_sees_everything():
    image, labels = np.zeros((1, 2, 2), np.int16), np.zeros((2, 2, 2), int)
    other = labels.copy()
    other[1, 0, 0] = 1
    variants = [
        Case.of(image, labels, name="a"),
        Case.of(image + np.int16(1), labels, name="a"),
        Case.of(image, other, name="a"),
        Case.of(image, labels, name="b", patient="a"),
        Case.of(image, labels, name="a", patient="b"),
        Case.of(image, labels, name="a", readers=["x", "y"]),
        Case.of(image, labels, name="a", weights=np.array([1, 2])),
        Case.of(image, labels, name="a", valid=np.array([[True, True], [True, False]])),
    ]
    digests = [Listed([case]).digest(0) for case in variants]
    assert len(set(digests)) == len(variants)
    assert Listed([Case.of(image.copy(), labels.copy(), name="a")]).digest(0) == digests[0]
    assert Listed(variants).image_digest(2) == Listed(variants).image_digest(0) != Listed(variants).image_digest(1)


# -- the order of an epoch -------------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_training_sees_every_case_in_batches_of_almost_one_size(count, batch_size, processes, epoch):
    shares = []
    for rank in range(processes):
        tickets = BatchSampler(range(100, 100 + count), batch_size, shuffle=True, rank=rank, processes=processes)
        tickets.set_epoch(epoch)
        batches = [ticket.indices for ticket in tickets]
        sizes = [len(batch) for batch in batches]
        assert len(batches) == len(tickets)
        assert max(sizes) <= batch_size
        assert max(sizes) - min(sizes) <= 1
        shares.append(batches)
    assert len({len(share) for share in shares}) == 1  # all processes take the same number of steps
    seen = [i for share in shares for batch in share for i in batch]
    assert set(seen) == set(range(100, 100 + count))
    assert len(seen) < count + processes


@given(st.integers(1, 50), st.integers(1, 9), st.integers(1, 4))
def test_evaluation_sees_every_case_exactly_once(count, batch_size, processes):
    seen = []
    for rank in range(processes):
        tickets = BatchSampler(range(count), batch_size, shuffle=False, rank=rank, processes=processes)
        own = [ticket.indices for ticket in tickets]
        assert len(own) == len(tickets)
        seen += own
    alone = [ticket.indices for ticket in BatchSampler(range(count), batch_size, shuffle=False)]
    assert sorted(seen) == sorted(alone)  # whole batches, whatever the number of processes
    assert sorted(i for batch in seen for i in batch) == list(range(count))


def test_evaluation_batches_keep_their_seed_in_any_number_of_processes():
    alone = {ticket.indices: ticket.seed for ticket in BatchSampler(range(10), 3, shuffle=False)}
    for processes in (2, 3):
        shares = [BatchSampler(range(10), 3, shuffle=False, rank=r, processes=processes) for r in range(processes)]
        assert {ticket.indices: ticket.seed for share in shares for ticket in share} == alone
    assert len(set(alone.values())) == 4


def test_an_epoch_depends_on_seed_epoch_and_process_and_on_nothing_else():
    def order(seed=0, epoch=0, rank=0):
        tickets = BatchSampler(range(20), 4, shuffle=True, seed=seed, rank=rank, processes=2)
        tickets.set_epoch(epoch)
        torch.rand(3)  # the global generator has no say
        return list(tickets)

    assert order() == order()
    assert order() != order(seed=1)
    assert order() != order(epoch=1)
    assert {ticket.seed for ticket in order()}.isdisjoint(ticket.seed for ticket in order(rank=1))
    assert {ticket.seed for ticket in order()}.isdisjoint(ticket.seed for ticket in order(epoch=1))


def test_nothing_to_load_is_an_error():
    with pytest.raises(DataError, match="found none"):
        BatchSampler([], 4, shuffle=True)
    with pytest.raises(ValueError, match="at least 1"):
        BatchSampler([1], 0, shuffle=True)


# -- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_its_cases():
    cases = random_cases(6, readers=None, void=True)
    batch = Loader(cases, PLAIN)[BatchSpec((3, 0, 5), 7)]
    assert batch.names == ("case-3", "case-0", "case-5")
    for b, i in enumerate((3, 0, 5)):
        case, M = cases[i], cases[i].table.shape[1]
        assert torch.equal(batch.images[b], torch.from_numpy(case.image).float())
        assert batch.annotations.valid is not None
        assert case.valid is not None
        assert np.array_equal(batch.annotations.labels[b, :M], np.where(case.valid, case.labels, 0))  # nothing leaks
        assert np.array_equal(batch.annotations.valid[b], case.valid)
        assert batch.annotations.weights is not None
        np.testing.assert_allclose(batch.annotations.weights[b, :M], case.mass)
        assert batch.annotations.weights[b, M:].sum() == 0


@given(st.booleans(), st.sampled_from([None, 4]), st.integers(0, 1000), st.booleans())
def test_regions_are_those_of_the_annotations(void, readers, seed, augmented):
    cases = random_cases(5, (9, 8), readers, void=void, seed=seed)
    augment = Augment(rotate=90, scale=(0.8, 1.2)) if augmented else None
    batch = Loader(cases, PLAIN, Window((6, 5)), augment)[BatchSpec((0, 1, 2, 3, 4), seed)]
    ours, made = batch.annotations.regions, partition(batch.annotations, 3)
    assert ours is not None
    values = torch.rand(5, 2, 30)
    for b in range(5):  # what a sum over regions says of every reader's every class must be the same
        present = batch.annotations.mass[b] > 0
        for one, two in ((ours, made), (made, ours)):
            for m in present.nonzero().flatten().tolist():
                for c in range(3):
                    sums = [(r.sum(values)[b] * (r.labels[b, m] == c)).sum(-1) for r in (one, two)]
                    torch.testing.assert_close(*sums)
    assert torch.equal(ours.size.sum(1), made.size.sum(1))
    assert ours.labels.dtype == made.labels.dtype


def test_whole_images_of_unequal_sizes_are_padded_with_void():
    small, large = random_cases(1, (4, 6), seed=1)[0], random_cases(1, (5, 3), seed=2)[0]
    cases = Listed([small, Case(**{**large.__dict__, "name": "large"})], 3)
    batch = Loader(cases, PLAIN)[BatchSpec((0, 1), 0)]
    assert batch.images.shape == (2, 1, 5, 6)
    valid = batch.annotations.valid
    assert valid is not None
    assert valid[0].sum() == 24
    assert valid[0, :4].all()
    assert valid[1].sum() == 15
    assert valid[1, :, :3].all()


def test_evaluation_takes_the_middle_and_training_takes_all_places():
    pixels = np.arange(64).reshape(1, 8, 8)
    cases = Listed([Case.of(pixels, pixels % 2, name="x")])
    middle = Loader(cases, PLAIN, Window((4, 4)))[BatchSpec((0,), 0)]
    assert middle.images[0, 0, 0, 0] == 2 * 8 + 2
    loader = Loader(cases, PLAIN, Window((4, 4)), Augment(flip="none"))
    corners = {int(loader[BatchSpec((0,), seed)].images[0, 0, 0, 0]) for seed in range(400)}
    assert corners == {y * 8 + x for y in range(5) for x in range(5)}


def test_beyond_the_border_is_the_mirror_or_void():
    pixels = np.arange(3)[None, None].repeat(2, 1)
    cases = Listed([Case.of(pixels, pixels[0:1, :, :] % 2, name="x")])
    mirrored = Loader(cases, PLAIN, Window((2, 7)))[BatchSpec((0,), 0)]
    assert mirrored.images[0, 0, 0].tolist() == [2, 1, 0, 1, 2, 1, 0]
    assert mirrored.annotations.valid is None
    void = Loader(cases, PLAIN, Window((2, 7), "void"))[BatchSpec((0,), 0)]
    assert void.annotations.valid is not None
    assert void.annotations.valid[0, 0].tolist() == [False, False, True, True, True, False, False]


def test_mirroring_goes_on_beyond_one_image_width():
    cases = Listed([Case.of(np.array([[[5, 6]]]), np.zeros((1, 1, 2), int), name="x")])
    batch = Loader(cases, PLAIN, Window((3, 8)))[BatchSpec((0,), 0)]
    assert set(batch.images[0, 0].flatten().tolist()) == {5, 6}


def test_one_annotation_fixed_random_or_drawn_once():
    labels = np.stack([np.full((2, 2), m) for m in range(4)])
    case = Case.of(np.zeros((1, 2, 2)), labels, name="x", weights=np.array([0, 1, 1, 2]))
    cases = Listed([case], 4)

    def drawn(which, seeds=range(200), seed=0):
        loader = Loader(cases, PLAIN, annotations=which, seed=seed)
        found = [loader[BatchSpec((0,), s)].annotations for s in seeds]
        assert {masks.count for masks in found} == {1}
        return [int(masks.labels.max()) for masks in found]

    assert set(drawn(2)) == {2}
    random = drawn("random")
    assert set(random) == {1, 2, 3}  # by weight: the first has none
    assert 70 < random.count(3) < 130
    assert len(set(drawn("once"))) == 1
    assert len({drawn("once", range(1), seed)[0] for seed in range(50)}) == 3
    with pytest.raises(DataError, match="x: expected an annotation number 4, found 4"):
        drawn(4)
    with pytest.raises(ValueError, match="found 'first'"):
        Loader(cases, PLAIN, annotations="first")  # type: ignore[arg-type]


def test_a_ticket_is_all_that_a_batch_depends_on():
    cases = random_cases(4, (16, 16))
    loader = Loader(cases, PLAIN, Window((8, 8)), Augment(rotate=30, noise=0.1))
    one, two, other = (loader[BatchSpec((0, 1, 2), seed)] for seed in (5, 5, 6))
    assert torch.equal(one.images, two.images)
    assert torch.equal(one.annotations.labels, two.annotations.labels)
    assert not torch.equal(one.images, other.images)


def test_an_image_with_other_channels_is_named():
    cases = Listed([random_cases(1)[0], random_cases(1, channels=3)[0]])
    with pytest.raises(DataError, match="case-0: expected 1 channels, found 3"):
        Loader(cases, PLAIN)[BatchSpec((1,), 0)]


def test_rotation_of_whole_images_is_refused():
    with pytest.raises(ValueError, match="window size"):
        Loader(random_cases(1), PLAIN, augment=Augment(rotate=10))


def test_batches_move_as_one():
    batch = Loader(random_cases(2, void=True), PLAIN)[BatchSpec((0, 1), 0)]
    moved = batch.to("meta")
    regions = moved.annotations.regions
    assert regions is not None
    tensors = [moved.images, moved.annotations.labels, moved.annotations.valid, regions.index, regions.size]
    assert {str(x.device) for x in tensors if x is not None} == {"meta"}
    assert moved.names == batch.names


# -- intensity -------------------------------------------------------------------------------------------------------


def test_intensity_is_what_it_says():
    setting = Intensity(low=0, high=10, mean=(1.0, 2.0), std=(2.0, 4.0))
    images = torch.tensor([[[[-5.0, 5.0, 50.0]], [[-5.0, 6.0, 50.0]]]])
    expected = torch.tensor([[[[-0.5, 2.0, 4.5]], [[-0.5, 1.0, 2.0]]]])
    assert torch.equal(setting(images), expected)
    assert torch.equal(setting.undo(expected), images.clamp(0, 10))
    with pytest.raises(ValueError, match="expected 3 values, one per channel, found 2"):
        setting(torch.zeros(1, 3, 2, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"low": 1, "high": 1}, "low < high"), ({"std": 0}, "std > 0"), ({"std": (1.0, -1.0)}, "std > 0")],
)
def test_intensity_refuses_nonsense(settings, message):
    with pytest.raises(ValueError, match=message):
        Intensity(**settings)


def test_intensity_fitted_to_images_centres_them():
    rng = np.random.default_rng(0)
    images = [rng.normal(50, 20, (2, 30, 20)) * np.array([1, 3])[:, None, None] for _ in range(5)]
    setting = Intensity.fit(images, low=0)
    prepared = setting(torch.from_numpy(np.stack(images)))
    torch.testing.assert_close(prepared.mean((0, 2, 3)), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(prepared.std((0, 2, 3)), torch.ones(2), atol=1e-3, rtol=0)
    with pytest.raises(ValueError, match="expected 2 channels in every image, found 1"):
        Intensity.fit([images[0], images[0][:1]])

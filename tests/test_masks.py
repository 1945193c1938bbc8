from __future__ import annotations

import math
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ambiseg import MaskDistribution
from ambiseg.masks import as_masks


def labels(*shape: int, classes: int = 3) -> torch.Tensor:
    return torch.randint(classes, shape)


@pytest.mark.parametrize("spatial", [(4, 5), (3, 4, 5)])
def test_shape_properties_in_2d_and_3d(spatial):
    masks = MaskDistribution(labels(2, 6, *spatial))
    assert len(masks) == 2
    assert masks.count == 6
    assert masks.spatial == spatial
    assert torch.allclose(masks.mass, torch.full((2, 6), 1 / 6))


def test_marginal_is_the_weighted_share_of_masks():
    masks = MaskDistribution(torch.tensor([[[[0, 1]], [[2, 1]], [[2, 0]]]]), torch.tensor([[0.5, 0.25, 0.25]]))
    assert masks.marginal_probs(3)[0, :, 0].T.tolist() == [[0.5, 0.0, 0.5], [0.25, 0.75, 0.0]]


def test_void_pixels_and_padded_masks_count_nowhere_whatever_they_hold():
    drawn = torch.tensor([[[[1, 255]], [[77, 255]]]])
    masks = MaskDistribution(drawn, torch.tensor([[1.0, 0.0]]), valid=torch.tensor([[[True, False]]]))
    assert masks.marginal_probs(2)[0, :, 0].tolist() == [[0.0, 0.0], [1.0, 0.0]]
    assert masks.entropy(2).tolist() == [[[0.0, 0.0]]]


def test_entropy_of_an_even_split_is_log_2_nats():
    masks = MaskDistribution(torch.tensor([[[[0, 1]], [[1, 1]]]]))
    assert masks.entropy()[0, 0].tolist() == pytest.approx([math.log(2), 0.0])


def test_the_producers_soft_marginal_is_used_where_there_is_one():
    soft = torch.tensor([[[[0.9]], [[0.1]]]])
    masks = MaskDistribution(torch.zeros(1, 1, 1, 1, dtype=torch.long), marginal=soft)
    assert torch.equal(masks.marginal_probs(2), soft)
    assert masks.entropy().item() == pytest.approx(-(0.9 * math.log(0.9) + 0.1 * math.log(0.1)))
    with pytest.raises(ValueError, match="3 classes, found 2"):
        masks.marginal_probs(3)


def test_indexing_keeps_the_batch_dimension():
    masks = MaskDistribution(labels(5, 2, 3, 3), valid=torch.rand(5, 3, 3) > 0.5)
    assert masks.valid is not None
    chosen = [False, True, False, False, True]
    for key, expected in (
        (0, [0]),
        (-1, [4]),
        (np.int64(3), [3]),
        (torch.tensor(1), [1]),
        (slice(1, 3), [1, 2]),
        ([4, 0], [4, 0]),
        (torch.tensor([2]), [2]),
        (chosen, [1, 4]),
        (np.array(chosen), [1, 4]),
        (torch.tensor(chosen), [1, 4]),
    ):
        part = masks[key]  # type: ignore[index]
        assert torch.equal(part.labels, masks.labels[expected])
        assert part.valid is not None
        assert torch.equal(part.valid, masks.valid[expected])
    for key, message in (
        (5, "image 5 of a distribution of 5"),
        ([0, -6], "image -6 of a distribution of 5"),
        ([0.9, 1.2], "image numbers or 5 bools, found torch.float32"),
        ([True, False], r"image numbers or 5 bools, found torch.bool \[2\]"),
    ):
        with pytest.raises(IndexError, match=message):
            masks[key]  # type: ignore[index]
    assert [len(image) for image in masks] == [1] * 5


def test_concat_pads_missing_readers_with_weight_zero():
    two = MaskDistribution(labels(1, 2, 3, 3), torch.tensor([[0.25, 0.75]]))
    three = MaskDistribution(labels(2, 3, 3, 3), valid=torch.zeros(2, 3, 3, dtype=torch.bool))
    joined = MaskDistribution.concat([two, three])
    assert joined.mass[0].tolist() == [0.25, 0.75, 0.0]
    assert joined.valid is not None
    assert joined.valid.flatten(1).any(1).tolist() == [True, False, False]
    assert torch.equal(joined.labels[1:], three.labels)
    same = MaskDistribution.concat([three, three])
    assert same.weights is None
    mixed = MaskDistribution.concat([MaskDistribution(labels(1, 1, 2, 2).to(t)) for t in (torch.uint16, torch.int32)])
    assert mixed.labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "at least one distribution"),
        ([MaskDistribution(labels(1, 1, 2, 2)), MaskDistribution(labels(1, 1, 2, 3))], "found 2×2 and 2×3"),
        (
            [
                MaskDistribution(labels(1, 1, 2, 2), marginal=torch.full((1, 3, 2, 2), 1 / 3)),
                MaskDistribution(labels(1, 1, 2, 2)),
            ],
            "some with and some without",
        ),
        (
            [MaskDistribution(labels(1, 1, 2, 2), marginal=torch.full((1, c, 2, 2), 1 / c)) for c in (2, 4)],
            "one number of classes, found 2 and 4",
        ),
    ],
)
def test_concat_says_what_does_not_fit(parts, message):
    with pytest.raises(ValueError, match=message):
        MaskDistribution.concat(parts)


def test_save_and_load_return_the_same_arrays(tmp_path):
    path = tmp_path / "a folder" / "masks.npz"
    path.parent.mkdir()
    masks = MaskDistribution(
        labels(2, 3, 4, 4).to(torch.uint8),
        torch.full((2, 3), 1 / 3),
        torch.rand(2, 4, 4) > 0.5,
        torch.rand(2, 3, 4, 4).softmax(1),
    )
    masks.save(path)
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    back = MaskDistribution.load(path)
    for name in ("labels", "weights", "valid", "marginal"):
        assert torch.equal(getattr(back, name), getattr(masks, name))
        assert getattr(back, name).dtype == getattr(masks, name).dtype
    assert [p.name for p in path.parent.iterdir()] == ["masks.npz"]  # no draft left behind


def test_a_failed_save_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "masks.npz"
    MaskDistribution(labels(1, 1, 2, 2)).save(path)
    before = path.read_bytes()

    def full_disk(*args, **kwargs):
        args[0].write(b"half a file")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full_disk)
    with pytest.raises(OSError, match="No space left"):
        MaskDistribution(labels(1, 1, 2, 2)).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["masks.npz"]


def _umask() -> int:
    import os

    os.umask(mask := os.umask(0))
    return mask


def test_save_and_load_say_where_and_keep_half_precision(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder .*absent does not exist"):
        MaskDistribution(labels(1, 1, 2, 2)).save(tmp_path / "absent" / "masks.npz")
    MaskDistribution(labels(1, 2, 2, 2), torch.tensor([[0.5, 0.5]]).bfloat16()).save(tmp_path / "masks.npz")
    assert MaskDistribution.load(tmp_path / "masks.npz").mass.tolist() == [[0.5, 0.5]]


def test_a_damaged_file_is_named_wherever_the_damage_is(tmp_path):
    path = tmp_path / "masks.npz"
    MaskDistribution(labels(2, 3, 16, 16), torch.full((2, 3), 1 / 3)).save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            MaskDistribution.load(path)  # some bits are in fields that nobody reads
        except ValueError as error:
            assert "masks.npz: cannot be read as a MaskDistribution" in str(error)  # noqa: PT017
            refused += 1
    assert refused > 100


class _Exploit:
    def __reduce__(self):
        return (print, ("code from the file ran",))


def test_load_names_the_file_and_runs_nothing_in_it(tmp_path, capsys):
    path = tmp_path / "masks.npz"
    contents = {
        "text": lambda: path.write_text("not an archive"),
        "empty": lambda: path.write_bytes(b""),
        "other npz": lambda: np.savez(path, labels=np.zeros(3)),
        "pickle": lambda: np.savez(path, format=np.array("ambiseg.MaskDistribution/1"), labels=np.array([_Exploit()])),
        "unknown key": lambda: np.savez(path, format=np.array("ambiseg.MaskDistribution/1"), mystery=np.zeros(3)),
        "a bare npy": lambda: path.write_bytes(_npy_bytes(tmp_path)),
    }
    for name, write in contents.items():
        write()
        with pytest.raises(ValueError, match=r"masks\.npz: cannot be read as a MaskDistribution"):
            MaskDistribution.load(path)
        assert "ran" not in capsys.readouterr().out, name
    MaskDistribution(labels(1, 1, 8, 8)).save(path)
    path.write_bytes(path.read_bytes()[:-40])  # cut short
    with pytest.raises(ValueError, match=r"masks\.npz: cannot be read"):
        MaskDistribution.load(path)
    with pytest.raises(FileNotFoundError):
        MaskDistribution.load(tmp_path / "absent.npz")
    assert zipfile.is_zipfile(tmp_path / "masks.npz") is False


def _npy_bytes(folder):
    np.save(folder / "x.npy", np.zeros(3))
    return (folder / "x.npy").read_bytes()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"labels": torch.rand(1, 1, 2, 2)}, "integer class ids, found torch.float32"),
        ({"labels": torch.zeros(2, 2, dtype=torch.long)}, r"\[B, N, H, W\] or .* found shape \[2, 2\]"),
        ({"labels": torch.zeros(1, 2, 3, 4, 5, 6, dtype=torch.long)}, r"found shape \[1, 2, 3, 4, 5, 6\]"),
        ({"labels": torch.zeros(0, 2, 3, 3, dtype=torch.long)}, "at least one image, mask and pixel"),
        ({"labels": torch.zeros(1, 0, 3, 3, dtype=torch.long)}, "at least one image, mask and pixel"),
        ({"labels": torch.full((1, 1, 2, 2), -1)}, "must not be negative, found -1"),
        ({"labels": [[1]]}, "torch tensor or a NumPy array, found list"),
        ({"labels": None}, "torch tensor or a NumPy array, found NoneType"),
        ({"weights": torch.tensor([[0.5, 0.4]])}, "image 0 sum to 0.9"),
        ({"weights": torch.tensor([[1.5, -0.5]])}, "image 0 hold -0.5"),
        ({"weights": torch.tensor([[float("nan"), 1.0]])}, "image 0 sum to nan|image 0 hold nan"),
        ({"weights": torch.tensor([[1.0]])}, r"shape \[1, 2\] to fit the labels, found \[1, 1\]"),
        ({"weights": torch.tensor([[1, 0]])}, "floating point, found torch.int64"),
        ({"valid": torch.ones(1, 2, 2)}, "valid must be torch.bool, found torch.float32"),
        ({"valid": torch.ones(1, 2, 3, dtype=torch.bool)}, r"found \[1, 2, 3\]"),
        ({"marginal": torch.full((1, 2, 2, 3), 0.5)}, r"\[1, 2, 2, 2\] to fit the labels"),
        ({"marginal": torch.full((1, 2, 2, 2), 1.5)}, "probabilities in .* found 1.5 to 1.5"),
        ({"marginal": torch.full((1, 2, 2, 2), float("nan"))}, "probabilities"),
        ({"marginal": torch.tensor(0.5)}, r"found shape \[\]"),
        ({"marginal": torch.zeros(1, 0, 2, 2)}, r"found shape \[1, 0, 2, 2\]"),
        ({"marginal": torch.full((1, 3, 2, 2), 0.9)}, "sum to 1 over the classes, found sums of 2.7 to 2.7"),
        ({"labels": np.array([[[[None]]]])}, "array of numbers, found dtype object"),
    ],
)
def test_bad_input_is_refused_with_what_was_expected_and_found(kwargs, message):
    with pytest.raises(ValueError, match=message):
        MaskDistribution(**{"labels": torch.zeros(1, 2, 2, 2, dtype=torch.long), **kwargs})


def test_class_ids_beyond_the_declared_ones_are_named():
    drawn = torch.zeros(2, 3, 2, 2, dtype=torch.long)
    drawn[1, 2, 0, 0] = 9
    with pytest.raises(ValueError, match="below classes=4, found 9 in mask 2 of image 1"):
        MaskDistribution(drawn).marginal_probs(4)


def test_numpy_and_bool_masks_are_taken_as_they_are():
    array = np.array([[[[True, False]]]])
    masks = as_masks(array)
    assert masks.labels.tolist() == [[[[1, 0]]]]
    assert as_masks(masks) is masks
    assert MaskDistribution(np.zeros((1, 1, 2, 2), np.uint16)).labels.dtype == torch.uint16  # type: ignore[arg-type]


def test_any_memory_layout_is_read(recwarn):
    order = np.arange(24).reshape(1, 2, 3, 4) % 2
    for array in (
        np.asfortranarray(order),
        order[..., ::-1],
        np.broadcast_to(order[:, :1], (1, 2, 3, 4)),
        order.astype(">i4"),
        order.transpose(0, 1, 3, 2),
    ):
        assert as_masks(array).labels.tolist() == array.tolist()
    assert not recwarn.list


def test_entropy_ignores_ids_that_count_nowhere_and_rounding_below_zero():
    void = MaskDistribution(torch.tensor([[[[1, 65535]], [[0, 65535]]]]), valid=torch.tensor([[[True, False]]]))
    assert void.entropy()[0, 0].tolist() == pytest.approx([math.log(2), 0])
    assert MaskDistribution(labels(1, 2, 3, 3).to(torch.uint16)).entropy().shape == (1, 3, 3)
    rounded = MaskDistribution(labels(1, 1, 1, 1), marginal=torch.tensor([1.0000001, -1e-7]).view(1, 2, 1, 1))
    assert rounded.entropy().abs().item() < 1e-5


def test_draw_follows_the_weights():
    masks = MaskDistribution(torch.arange(3).view(1, 3, 1, 1), torch.tensor([[0.2, 0.0, 0.8]]))
    drawn = masks.draw(5000, torch.Generator().manual_seed(0)).labels.flatten()
    assert drawn.bincount(minlength=3).div(5000).tolist() == pytest.approx([0.2, 0, 0.8], abs=0.02)


def test_repr_is_one_readable_line():
    masks = MaskDistribution(labels(2, 1, 3, 4), torch.ones(2, 1), torch.ones(2, 3, 4, dtype=torch.bool))
    assert repr(masks) == "MaskDistribution(2 images of 3×4, 1 mask, weighted, void pixels)"


def test_moving_to_a_device_moves_everything():
    moved = MaskDistribution(labels(1, 2, 2, 2), torch.tensor([[0.5, 0.5]])).to("meta")
    assert moved.device.type == "meta"
    assert moved.weights is not None
    assert moved.weights.device.type == "meta"
    with pytest.raises(ValueError, match="one device, found cpu and meta"):
        MaskDistribution(labels(1, 2, 2, 2), torch.ones(1, 2, device="meta"))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_marginals_are_distributions_over_classes(images, count, classes, seed):
    g = torch.Generator().manual_seed(seed)
    drawn = torch.randint(classes, (images, count, 3, 3), generator=g)
    weights = torch.rand(images, count, generator=g).softmax(1)
    marginal = MaskDistribution(drawn, weights).marginal_probs(classes)
    assert torch.allclose(marginal.sum(1), torch.ones(images, 3, 3), atol=1e-5)
    assert (marginal >= 0).all()
    assert (MaskDistribution(drawn, weights).entropy(classes) <= math.log(classes) + 1e-5).all()

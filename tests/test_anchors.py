"""Anchors: against the metrics themselves, a simulated perfect sampler, and constant masks by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ambiseg import PROTOCOLS, MaskDistribution, ged, matched_iou, sample_diversity
from ambiseg.data.case import Case, Cases
from ambiseg.data.loader import Window
from ambiseg.evaluation.anchors import AnchorScores, anchor_scores, anchors_of, constant_mask, verdict
from ambiseg.evaluation.overlaps import region_iou
from ambiseg.evaluation.records import Mean
from ambiseg.evaluation.results import AnchorKey
from ambiseg.evaluation.summary import mean_of
from ambiseg.overlap import pairwise_iou


def _readers(seed: int, B: int = 3, M: int = 4, classes: int = 2, void: bool = False) -> MaskDistribution:
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (B, M, 5, 6), generator=g)
    labels[0, 0] = 0  # one saw nothing
    weights = torch.rand(B, M, generator=g)
    weights[1, 2] = 0  # absent
    valid = torch.rand(B, 5, 6, generator=g) > 0.2 if void else None
    return MaskDistribution(labels, weights / weights.sum(1, keepdim=True), valid)


def _one(readers: MaskDistribution, b: int, columns: list[int]) -> MaskDistribution:
    weights = readers.mass[b, columns]
    valid = None if readers.valid is None else readers.valid[b][None]
    return MaskDistribution(readers.labels[b, columns][None], (weights / weights.sum())[None], valid)


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "rectangular"])
@pytest.mark.parametrize(("classes", "evaluated", "void"), [(2, (1,), False), (4, (1, 3), True)])
def test_single_masks_score_what_the_metrics_say(protocol, classes, evaluated, void):
    readers = _readers(1, classes=classes, void=void)
    constant = torch.randint(classes, (5, 6), generator=torch.Generator().manual_seed(2))
    found = anchor_scores(readers, classes, evaluated, protocol, constant=constant.numpy())
    options = {"classes": evaluated, "protocol": protocol}

    def single(mask: MaskDistribution, others: MaskDistribution, everyone: MaskDistribution) -> list[float]:
        """2 E d(S, Y) − E d(Y, Y′): ged() would also ask how far an empty mask is from itself, which has no answer
        where classes that are in neither mask are skipped."""
        iou = pairwise_iou(mask, others, evaluated, PROTOCOLS[protocol].absent(evaluated))[0, 0]
        distance = 2 * ((1 - iou) * others.mass[0]).sum() - sample_diversity(everyone, **options)[0]
        if others is everyone:
            value = ged(mask, others, **options).item()
            assert np.isnan(value) or value == pytest.approx(distance.item(), abs=1e-6)
        return [distance.item(), matched_iou(mask, others, **options).item()]

    for b, anchors in enumerate(found):
        present = readers.mass[b].nonzero().flatten().tolist()
        everyone = _one(readers, b, present)
        masks: dict[AnchorKey, torch.Tensor] = {"empty": torch.zeros(5, 6), "constant": constant}
        masks["consensus"] = everyone.marginal_probs(classes)[0].argmax(0)
        for key, mask in masks.items():
            expected = single(MaskDistribution(mask.long()[None, None]), everyone, everyone)
            assert anchors.scores[key] == pytest.approx(expected, nan_ok=True, abs=1e-6), key
        others = [[j for j in present if j != m] for m in present]
        alone = [
            single(_one(readers, b, [m]), _one(readers, b, js), everyone) for m, js in zip(present, others, strict=True)
        ]
        expected = (np.array(alone) * readers.mass[b, present].double().numpy()[:, None]).sum(0)
        assert anchors.scores["reader"] == pytest.approx(expected, nan_ok=True, abs=1e-6)


def test_best_of_one_is_the_best_match_of_the_rectangular_protocol():
    readers = MaskDistribution(torch.tensor([[[[1, 1, 0, 0]], [[1, 1, 1, 0]], [[0, 0, 0, 1]]]]))
    (found,) = anchor_scores(readers, 2, (1,), "rectangular")
    assert found.scores["consensus"][1] == matched_iou(torch.tensor([[[[1, 1, 0, 0]]]]), readers, (1,), "rectangular")
    assert found.scores["reader"][1] == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)


def test_an_image_of_one_reader_or_without_pixels_has_no_value():
    alone = anchor_scores(MaskDistribution(torch.ones(1, 1, 2, 2).long()), 2, (1,), "mose")[0]
    assert np.isnan([alone.perfect(16), *alone.scores["reader"]]).all()
    assert alone.scores["consensus"] == (0, 1)
    assert alone.scores["empty"] == (2, 0)
    void = MaskDistribution(torch.ones(1, 2, 2, 2).long(), valid=torch.zeros(1, 2, 2, dtype=torch.bool))
    (nothing,) = anchor_scores(void, 2, (1,), "mose", constant=np.zeros((2, 2), int))
    assert np.isnan([nothing.perfect(16), *(x for pair in nothing.scores.values() for x in pair)]).all()


def test_no_empty_mask_where_the_background_is_evaluated():
    assert "empty" not in anchor_scores(_readers(0), 2, (0, 1), "mose")[0].scores


def _drawn(support: torch.Tensor, chance: torch.Tensor, images: int, count: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return support[torch.multinomial(chance.expand(images, -1), count, replacement=True, generator=g)]


@pytest.mark.parametrize(("M", "N"), [(2, 3), (4, 16)])
def test_perfect_sampler_by_simulation(M, N):
    """Readers and samples of one distribution, 3,000 times: the published GED is what is promised, and the one that
    is unbiased on both sides is 0."""
    support = torch.randint(2, (5, 4, 4), generator=torch.Generator().manual_seed(0))
    support[0] = 0
    chance = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1])
    readers, samples = (_drawn(support, chance, 3000, count, seed) for count, seed in ((M, 1), (N, 2)))
    promised = np.array([one.perfect(N) for one in anchor_scores(MaskDistribution(readers), 2, (1,), "mose")])
    plain = ged(samples, readers).numpy()
    both = ged(samples, readers, unbiased="both").numpy()
    predictions = ged(samples, readers, unbiased=True).numpy()
    for values in (plain - promised, both):
        assert abs(values.mean()) < 4 * values.std() / 3000**0.5
    assert predictions.mean() > 10 * predictions.std() / 3000**0.5  # the readers' part is still in it
    assert plain.mean() > 10 * plain.std() / 3000**0.5


@pytest.mark.parametrize("M", [2, 3, 7])
def test_a_reader_scores_like_a_model_that_draws_one_perfect_mask(M):
    """Else a model would beat a single reader of two by a quarter, only because it is compared with more readers."""
    readers = MaskDistribution(torch.randint(2, (4, M, 5, 5), generator=torch.Generator().manual_seed(M)))
    for one in anchor_scores(readers, 2, (1,), "mose"):
        assert one.scores["reader"][0] == pytest.approx(one.perfect(1))


def test_perfect_sampler_of_known_modes_by_simulation():
    support = torch.randint(3, (4, 4, 4), generator=torch.Generator().manual_seed(5))
    chance, N = torch.tensor([0.5, 0.25, 0.15, 0.1]), 6
    modes = MaskDistribution(support[None], chance[None])
    (anchors,) = anchor_scores(modes, 3, (1, 2), "mose", known=True)
    samples = _drawn(support, chance, 3000, N, 3)
    many = MaskDistribution(support.expand(3000, -1, -1, -1), chance.expand(3000, -1))
    values = ged(samples, many, (1, 2)).numpy()
    assert abs(values.mean() - anchors.perfect(N)) < 4 * values.std() / 3000**0.5
    assert anchors.own == 0
    single = [ged(support[None, m : m + 1], modes, (1, 2)).item() for m in range(4)]
    assert anchors.scores["reader"][0] == pytest.approx((np.array(single) * chance.numpy()).sum())


def test_iou_on_regions_is_iou_on_pixels():
    g = torch.Generator().manual_seed(7)
    masks, others = torch.randint(4, (1, 3, 6, 6), generator=g), torch.randint(3, (1, 2, 6, 6), generator=g)
    index = (others[0, 0] * 3 + others[0, 1]).flatten()
    labels = np.stack([np.arange(9) // 3, np.arange(9) % 3], 1)
    size = np.bincount(index, minlength=9).astype(float)
    counts = np.array([[np.bincount(index[m == c], minlength=9) for c in range(4)] for m in masks[0].flatten(1)])
    for classes, absent in [((1,), "agree"), ((1, 2), "skip"), ((3,), "skip"), ((0, 1, 3), "agree")]:
        expected = pairwise_iou(masks, others, classes, absent)[0]  # type: ignore[arg-type]
        found = region_iou(counts.astype(float), labels, size, classes, absent)  # type: ignore[arg-type]
        assert found == pytest.approx(expected.numpy(), nan_ok=True)


# -- one mask for all images ------------------------------------------------------------------------------------------


class _Cases(Cases):
    classes, evaluated = ("ground", "thing"), (1,)

    def __init__(self, labels: list[np.ndarray], valid: list[np.ndarray | None] | None = None) -> None:
        self.labels, self.valid = labels, valid or [None] * len(labels)
        self.names = [str(i) for i in range(len(labels))]

    def __getitem__(self, index: int) -> Case:
        labels = self.labels[index]
        return Case.of(np.zeros((1, *labels.shape[1:])), labels, name=str(index), valid=self.valid[index])


def test_constant_mask_is_the_majority_of_all_annotations():
    cases = _Cases([np.array([[[1, 1, 0, 0]], [[1, 0, 0, 0]]]), np.array([[[1, 0, 0, 1]]]), np.array([[[0, 1, 0, 1]]])])
    found = constant_mask(cases, [0, 1, 2], Window())
    assert found is not None
    assert found.tolist() == [[1, 0, 0, 1]]  # shares 2, 1.5 (a tie is background), 0, 2 of 3
    assert constant_mask(cases, [], Window()) is None


def test_constant_mask_in_relative_coordinates_and_in_the_middle():
    small, large = np.array([[[0, 1], [0, 1]]]), np.repeat(np.repeat(np.array([[[0, 1], [0, 1]]]), 3, 1), 3, 2)
    found = constant_mask(_Cases([small, large, small]), [0, 1, 2], Window())
    assert found is not None
    assert found.tolist() == small[0].tolist()
    middle = constant_mask(_Cases([large, large]), [0, 1], Window((2, 4)))
    assert middle is not None
    assert middle.tolist() == [[0, 0, 1, 1]] * 2
    valid = np.ones((2, 2), bool)
    valid[0] = False
    void = constant_mask(_Cases([small], [valid]), [0], Window())
    assert void is not None
    assert void.tolist() == [[0, 0], [0, 1]]


# -- the verdict ------------------------------------------------------------------------------------------------------


def _verdict(model: list[float], constant: float, reader: float, empty: float = 1.9) -> str:
    scores = {"constant": (constant, 0.1), "reader": (reader, 0.5), "empty": (empty, 0.0)}
    scored = [AnchorScores(0.2, 0.25, scores) for _ in model]  # type: ignore[arg-type]
    groups = [str(i) for i in range(len(model))]
    anchors = anchors_of(scored, [16], "reader", False, lambda values: mean_of(list(values), groups))
    return verdict(mean_of(model, groups), model, scored, anchors, 16, groups)


def test_verdict_says_what_is_better_and_what_is_not():
    model = [0.10, 0.12, 0.14, 0.11, 0.12, 0.12]
    good = "Better than one constant mask (0.867) and a single reader (0.213); a perfect sampler would score 0.062"
    assert _verdict(model, 0.867, 0.213) == f"{good} with 16 masks."
    assert _verdict(model, 0.867, 0.12).startswith(
        "Better than one constant mask (0.867); not clearly better or worse than a single reader (0.120); a perfect"
    )
    assert _verdict(model, 0.05, 0.213, empty=0.02).startswith(
        "Better than a single reader (0.213); worse than one constant mask (0.050) and an empty mask (0.020); a"
    )
    assert _verdict(model[:5], 0.867, 0.213) == f"{good} with 16 masks. 5 patients are too few to be sure."
    assert _verdict([*model[:5], float("nan")], 0.867, 0.213).endswith(" 5 patients are too few to be sure.")
    one = _verdict([0.1], 0.9, 0.9)
    assert one.startswith("Not clearly better")
    assert one.endswith(" with 16 masks. 1 patient is too few to be sure.")
    nothing = Mean(mean=None, low=None, high=None, count=0)
    assert verdict(nothing, [], [], [], 16, []) == "No verdict: no image has a GED."


def test_anchors_are_explained_in_the_words_of_the_data():
    scored = anchor_scores(_readers(3), 2, (1,), "mose", known=True)
    groups = ["a", "b", "c"]
    found = anchors_of(scored, [4, 16], "mode", True, lambda values: mean_of(list(values), groups))
    assert [(one.key, one.samples) for one in found] == [
        ("perfect", 4), ("perfect", 16), ("reader", None), ("consensus", None), ("empty", None)
    ]  # fmt: skip
    text = " ".join(f"{one.title} {one.explanation}" for one in found)
    assert "reader" not in text
    assert "{" not in text
    assert found[0].ged.mean == pytest.approx(4 * (found[1].ged.mean or 0))

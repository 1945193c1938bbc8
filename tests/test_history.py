"""Which epoch of a run is the best."""

from __future__ import annotations

from ambiseg.history import best_row, read, selected_by, written

NEW = [
    {"epoch": 1.0, "loss": 1.0, "val_ged": 0.20, "val_ged_unbiased": 0.19, "val_masks": 16.0},
    {"epoch": 2.0, "loss": 1.0},  # not validated
    {"epoch": 3.0, "loss": 1.0, "val_ged": 0.23, "val_ged_unbiased": 0.17, "val_masks": 16.0},
    {"epoch": 4.0, "loss": 1.0, "val_ged": 0.22, "val_ged_unbiased": 0.17, "val_masks": 16.0},
]
OLD = [{key: value for key, value in row.items() if key != "val_masks"} for row in NEW]


def epoch(history: list[dict[str, float]]) -> float | None:
    best = best_row(history)
    return None if best is None else best["epoch"]


def test_the_smallest_unbiased_estimate_is_the_best():
    assert selected_by(NEW) == "val_ged_unbiased"
    assert epoch(NEW) == 3  # the first of two
    assert epoch(NEW[1:2]) is None
    assert epoch([]) is None


def test_runs_of_0_1_keep_the_epoch_that_they_kept():
    assert selected_by(OLD) == "val_ged"
    assert epoch(OLD) == 1
    assert epoch([*OLD[:1], *NEW[1:]]) == 1  # begun before, and resumed


def test_an_epoch_without_a_value_is_not_the_best():
    nothing = {"val_ged": float("nan"), "val_ged_unbiased": float("nan"), "val_masks": 16.0}
    history = [{"epoch": 1.0, "loss": 1.0, **nothing}, {**NEW[2], "epoch": 2.0}]
    assert epoch(history) == 2
    assert epoch(history[:1]) is None


def test_reading_changes_nothing(tmp_path):
    path = tmp_path / "metrics.csv"
    for history in (NEW, OLD, [*OLD[:1], *NEW[1:]]):
        path.write_text(written(history))
        assert read(path) == history
        assert epoch(read(path)) == epoch(history)

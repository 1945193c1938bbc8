from __future__ import annotations

import pytest

from ambiseg.methods.schedules import Linear, Plateau


def values(schedule, losses):
    found = []
    for loss in losses:
        found.append(schedule.value)
        schedule.update(loss)
    return found


def test_linear_waits_then_moves_in_equal_steps_then_stays():
    assert values(Linear(1.0, 0.9, epochs=2, warm_up=1), [0.0] * 5) == pytest.approx([1.0, 1.0, 0.95, 0.9, 0.9])


def test_plateau_takes_the_next_value_after_stale_epochs_and_counts_afresh():
    schedule = Plateau([1, 2, 3], patience=1)
    #                 best  best  stale stale→2  afresh stale stale→3  and there it stays
    losses = [5.0, 4.0, 4.0, 4.5, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0]
    assert values(schedule, losses) == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("make", [lambda: Linear(0, 1, 4), lambda: Plateau([1, 2, 3], 0)])
def test_a_checkpoint_goes_on_exactly(make):
    losses = [3.0, 3.0, 2.0, 2.0, 2.0, 1.0]
    whole = values(make(), losses)
    first, second = make(), make()
    begun = values(first, losses[:3])
    second.load_state_dict(first.state_dict())
    assert begun + values(second, losses[3:]) == whole


@pytest.mark.parametrize("make", [lambda: Linear(0, 1, 0), lambda: Plateau([], 1), lambda: Plateau([1], -1)])
def test_bad_schedules_are_refused(make):
    with pytest.raises(ValueError, match="expected at least one"):
        make()

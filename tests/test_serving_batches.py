"""Images that go through a network together get the masks that each gets alone, or are not taken together."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

from ambiseg._util.errors import DataError
from ambiseg.data.intensity import Intensity
from ambiseg.methods.predictive import part_of
from ambiseg.methods.symmetries import symmetric
from ambiseg.prediction import Options, Predictor
from ambiseg.prediction.inputs import array_source
from ambiseg.prediction.looking import Lookout
from ambiseg.runs import Card, TrainedModel
from ambiseg.serving import worker
from ambiseg.serving.tasks import Pixels, Task
from ambiseg.serving.wire import receive, send
from tests.test_methods import TESTED, build

SIDE = 16


def model_of(name: str) -> TrainedModel:
    method = build(name).eval()
    card = Card(("ground", "a", "b"), (1, 2), 2, Intensity(), "noise", method.stratum)
    return TrainedModel(method, card)


def images(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).normal(size=(count, 2, SIDE, SIDE)).astype(np.float32))


def tasks_of(count: int) -> list[Task]:
    sources = [array_source(image, f"{i}") for i, image in enumerate(images(count))]
    return [Task(i, 0, f"{i}", Options(samples=3), Pixels.of(source)) for i, source in enumerate(sources)]


def made_worker(model: TrainedModel) -> worker.Worker:
    found = worker.Worker(io.BytesIO(), io.BytesIO())
    found.models = [worker._Model(model, None, Lookout(model, None))]
    return found


@pytest.mark.parametrize("count", [2, 3, 4])  # 3 classes, 2 members, 4 experts: lengths that other tensors have as well
@pytest.mark.parametrize("name", TESTED)
def test_a_worker_gives_what_each_image_gets_alone(name, count):
    """For every method and every length of a batch, whether it can be computed together or not."""
    model, tasks = model_of(name), tasks_of(count)
    alone = [Predictor(model, tasks[0].options)(task.image.source(), task.name) for task in tasks]  # type: ignore[union-attr]
    made = made_worker(model)
    for _ in range(2):  # the first time is the one that compares
        answers = list(made._answers(tasks))
        assert [(kind, number) for kind, number, _ in answers] == [("done", task.number) for task in tasks]
        for (_, _, found), expected in zip(answers, alone, strict=True):
            prediction = found.prediction(expected.source)
            assert worker.same(prediction, expected)
            assert prediction.masks.labels.shape[2:] == expected.masks.labels.shape[2:]
            assert torch.allclose(prediction.masks.mass.sum(), torch.tensor(1.0))


def test_what_is_computed_together_is_one_pass(monkeypatch):
    model = model_of("mose")
    sizes, predict = list[int](), model.method.predict
    monkeypatch.setattr(model.method, "predict", lambda x: (sizes.append(len(x)), predict(x))[1])
    made = made_worker(model)
    list(made._answers(tasks_of(4)))
    assert sizes == [4, 1, 1]  # and twice alone, to compare
    sizes.clear()
    list(made._answers(tasks_of(4)))
    assert sizes == [4]


def test_a_method_whose_images_depend_on_each_other_is_not_taken_together(monkeypatch):
    model = model_of("unet")
    predict = model.method.predict
    monkeypatch.setattr(model.method, "predict", lambda images: predict(images + 9 * (len(images) - 1)))
    made = made_worker(model)
    answers = list(made._answers(tasks_of(3)))
    assert made.trusted == {(0, 1, 3): False}
    monkeypatch.undo()
    for (_, _, found), task in zip(answers, tasks_of(3), strict=True):
        source = task.image.source()  # type: ignore[union-attr]
        assert worker.same(found.prediction(source), Predictor(model, task.options)(source, task.name))


def test_one_bad_image_of_several_is_refused_alone():
    tasks, made = tasks_of(3), made_worker(model_of("unet"))
    pixels: Any = tasks[1].image
    pixels.pixels[:] = np.nan
    answers = {number: (kind, *rest) for kind, number, *rest in made._answers(tasks)}
    assert [answers[i][0] for i in range(3)] == ["done", "refused", "done"]
    assert "1: expected finite values" in answers[1][1]


def test_cancelled_ones_are_left_out():
    tasks, made = tasks_of(3), made_worker(model_of("unet"))
    made.cancelled.add(2)
    assert {number: kind for kind, number, *_ in made._answers(tasks)} == {0: "done", 1: "done", 2: "cancelled"}
    assert made.cancelled == set()


def test_together_is_for_images_of_one_size():
    predictor = Predictor(model_of("mose"))
    one, other = array_source(np.zeros((2, 8, 8)), "a"), array_source(np.zeros((2, 8, 9)), "b")
    with pytest.raises(DataError, match="b: expected one image of 8×8 as the others, found 8×9"):
        predictor.together([one, other], ["a", "b"])


@pytest.mark.parametrize("count", [1, 8])
def test_a_part_of_a_batch_has_its_weights(count):
    method = symmetric(model_of("mose").method, count)
    batch = method.predict(torch.randn(3, 2, SIDE, SIDE))
    for i in range(3):
        part: Any = part_of(batch, i, 3)
        assert torch.equal(part.weights, batch.weights[i : i + 1])  # type: ignore[attr-defined]


def test_messages_carry_arrays():
    stream = io.BytesIO()
    large, strided = np.arange(10**6, dtype=np.float32).reshape(10, -1), np.ones((2, 3))[:, ::2]
    messages: list[Any] = [("a", large), {"b": [np.zeros(0), strided]}]
    for message in messages:
        send(stream, message)
    stream.seek(0)
    first, second = receive(stream), receive(stream)
    assert np.array_equal(first[1], large)
    assert np.array_equal(second["b"][1], np.ones((2, 2)))
    first[1][0, 0] = 5  # it is the receiver's own
    with pytest.raises(EOFError):
        receive(stream)

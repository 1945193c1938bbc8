"""Exported graphs: every method as ONNX gives what the method gives, whatever the size; what is refused."""

from __future__ import annotations

import io
import json
import os
from typing import Any, cast

import numpy as np
import pytest
import torch

import ambiseg
from ambiseg._util.errors import ConfigError, DataError
from ambiseg.data.intensity import Intensity
from ambiseg.exporting import Graph, compared, export
from ambiseg.exporting.files import as_onnx, as_pt2, run_onnx, run_pt2
from ambiseg.exporting.graph import Inputs, described
from ambiseg.exporting.weights import kept_in
from ambiseg.methods import METHODS, Method, Stratified
from ambiseg.methods.predictive import Numbers
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.places import _erfinv
from ambiseg.runs import Card, TrainedModel
from tests.test_methods import KNOWN, TESTED

CLOSE = 1e-4
WRITTEN = tuple(METHODS) if os.environ.get("AMBISEG_ONNX") == "all" else ("mose", "ssn")
"""Methods that are written as ONNX, of seconds each: strata with normal numbers, and noise of places from seeds. Of all
others it is the graph that is compared, from which ONNX is made."""
UNITS = Intensity(-2.0, 3.0, (0.1, -0.2), 0.5)


def build(name: str) -> Method:
    """A small network: what a graph costs to make grows with its nodes."""
    torch.manual_seed(0)
    config = KNOWN[name].Config(method=name, **TESTED[name])
    return KNOWN[name].build(config, BackboneConfig(channels=[4, 8], convs=1), 2, 3)


def trained(method: Method, intensity: Intensity = UNITS) -> TrainedModel:
    """A method whose weights are no longer those of the start, some of which are 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in method.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    card = Card(("background", "a", "b"), (1, 2), 2, intensity, "test", method.stratum, "mm")
    return TrainedModel(method.eval(), card)


def apart(model: TrainedModel, runner: Any, images: int, draws: int, size: tuple[int, int]) -> float:
    """The largest difference of a graph from the method, of numbers that ambiseg itself draws."""
    generator = torch.Generator().manual_seed(images)
    raw = torch.randn(images, 2, *size, generator=generator)
    predictive = model.predict(model.card.prepare(raw))
    inputs = Inputs.of(model.method, 2)
    numbers = inputs.numbers(images, draws, generator)
    weights, probs = runner(raw, numbers)
    expected = predictive.probs(predictive.noise_of_numbers(Numbers(**numbers)))
    assert probs.shape == expected.shape
    largest = (probs - expected).abs().max().item()
    if isinstance(predictive, Stratified):
        assert weights.shape == predictive.weights.shape
        return max(largest, (weights - predictive.weights).abs().max().item())
    assert torch.equal(weights, torch.ones(images, 1))
    return largest


def _program(graph: Graph) -> Any:
    """A graph as ``torch.export`` has it, before it is written in any form."""
    module = graph.exported().module()
    return lambda image, numbers: module(image, **numbers)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in WRITTEN])
def test_graph_gives_what_the_method_gives(name):
    model = trained(build(name))
    runner = _program(Graph(model))
    for images, draws, size in ((2, 3, (21, 34)), (1, 1, (16, 16)), (3, 2, (7, 50))):
        with torch.no_grad():
            assert apart(model, runner, images, draws, size) < CLOSE


@pytest.mark.parametrize("name", WRITTEN)
def test_onnx_gives_what_the_method_gives(name):
    model = trained(build(name))
    graph = Graph(model)
    proto = as_onnx(graph, described(model, graph.inputs, "32"))
    runner = run_onnx(proto.SerializeToString())
    for images, draws, size in ((2, 3, (21, 34)), (1, 1, (16, 16)), (3, 2, (7, 50))):
        assert apart(model, runner, images, draws, size) < CLOSE
    axes = {one.name: [d.dim_param or d.dim_value for d in one.type.tensor_type.shape.dim] for one in proto.graph.input}
    assert axes.pop("image") == ["batch", 2, "height", "width"]
    assert tuple(axes) == graph.inputs.names
    assert all(one[:2] == ["batch", "draws"] for one in axes.values())


@pytest.mark.parametrize("name", METHODS)
def test_numbers_make_the_noise_that_the_method_draws(name):
    method = trained(build(name)).method
    predictive = method.predict(torch.randn(2, 2, 13, 10, generator=torch.Generator().manual_seed(0)))
    noise = predictive.noise(3, torch.Generator().manual_seed(1))
    normals = noise.codes if predictive.normals else None
    if name == "mose":  # whose codes are no standard normal numbers
        assert noise.strata is not None
        experts = cast(ambiseg.MoSE, method).experts
        normals = (noise.codes - experts.mean[noise.strata]) / experts.sigma[noise.strata]
    same = predictive.noise_of_numbers(Numbers(normals, noise.seeds, noise.strata))
    count = same.count  # a method without chance has one draw
    torch.testing.assert_close(predictive.probs(same), predictive.probs(noise)[:, :count], atol=1e-5, rtol=0)
    torch.testing.assert_close(predictive.soft(same), predictive.probs(same), atol=1e-6, rtol=0)
    assert (predictive.seeded, predictive.normals > 0) == (noise.seeds is not None, normals is not None)


def test_numbers_of_the_compact_form():
    predictive = trained(build("mose")).predict(torch.zeros(1, 2, 16, 16))
    assert isinstance(predictive, Stratified)
    noise = predictive.compact_noise(2, torch.Generator().manual_seed(5))
    normals = torch.randn(1, 8, 1, generator=torch.Generator().manual_seed(5))
    strata = torch.arange(4).repeat_interleave(2)[None]
    torch.testing.assert_close(predictive.noise_of_numbers(Numbers(normals, strata=strata)).codes, noise.codes)


def test_erfinv_of_every_number_that_places_have():
    x = (torch.arange(0, 2**23, 37) + 0.5) * 2.0**-22 - 1
    x = torch.cat([x, torch.tensor([1 - 2.0**-23, 2.0**-23 - 1])])
    torch.testing.assert_close(_erfinv(x).double(), torch.erfinv(x.double()), rtol=1e-6, atol=1e-7)


def test_pt2_gives_what_the_method_gives():
    model = trained(build("mose"))
    graph = Graph(model)
    content = as_pt2(graph, described(model, graph.inputs, "32"))
    runner = run_pt2(content)
    for images, draws, size in ((2, 3, (21, 34)), (1, 1, (8, 8))):
        assert apart(model, runner, images, draws, size) < CLOSE
    extra = {"ambiseg.json": ""}
    torch.export.load(io.BytesIO(content), extra_files=extra)
    assert json.loads(extra["ambiseg.json"])["strata"] == "4"
    assert b"/site-packages" not in content


def test_images_in_their_own_range_also_where_pixels_are_skipped():
    model = trained(build("unet"), Intensity(-1.0, 2.0, 0.5, 0.25, per_image=True))
    graph = Graph(model)
    runner = _program(graph)
    for size in ((13, 10), (400, 500)):  # 200,000 pixels: every third is looked at
        with torch.no_grad():
            assert apart(model, runner, 1, 1, size) < CLOSE


# -- torch.export without ambiseg.export ------------------------------------------------------------------------------


def test_mose_itself_goes_through_torch_export():
    model, image = build("mose").eval(), torch.rand(2, 2, 20, 24)
    axis = torch.export.Dim.DYNAMIC
    with torch.no_grad():
        program = torch.export.export(model, (image,), dynamic_shapes=({0: axis, 2: axis, 3: axis},))
        other = torch.rand(3, 2, 33, 18)
        found, expected = program.module()(other), cast(ambiseg.MoSE, model).predict(other)
    assert isinstance(found, ambiseg.methods.MoSEPredictive)
    torch.testing.assert_close(found.weights, expected.weights)
    noise = expected.compact_noise(2, torch.Generator().manual_seed(0))
    assert tuple(found.size) == (33, 18)
    torch.testing.assert_close(found.probs(noise), expected.probs(noise))


# -- the file and what is refused -------------------------------------------------------------------------------------


def test_file_says_what_it_is_and_where_it_was_made_is_not_in_it(demo_onnx):
    import onnx

    proto = onnx.load(demo_onnx)
    about = {one.key: one.value for one in proto.metadata_props}
    assert json.loads(about["classes"]) == ["background", "nodule"]
    assert json.loads(about["intensity"])["low"] == -1000
    assert (about["units"], about["stratum"], about["strata"], about["normals"]) == ("HU", "expert", "4", "1")
    assert (about["version"], about["run"], about["multiple"]) == (ambiseg.__version__, "demo", "1")
    assert "weights[k] / S" in about["draw"]
    assert b".py" not in demo_onnx.read_bytes()


def test_fewer_bits_make_smaller_files_that_say_about_the_same(demo_onnx):
    import onnx

    model = ambiseg.load("demo")
    graph, whole = Graph(model), demo_onnx.stat().st_size
    sizes, differences = [], []
    for precision in ("16", "8"):
        content = kept_in(onnx.load(demo_onnx), precision).SerializeToString()
        sizes.append(len(content) / whole)
        differences.append(compared(graph, run_onnx(content)))
    assert sizes[0] < 0.55
    assert sizes[1] < 0.32
    assert 0 < differences[0] < 0.02 < differences[1] < 0.5


def test_a_file_that_differs_is_not_left(tmp_path, monkeypatch):
    monkeypatch.setattr("ambiseg.exporting.as_pt2", lambda *_: b"")
    monkeypatch.setattr("ambiseg.exporting.run_pt2", lambda _: lambda image, numbers: (image, image))
    with pytest.raises(
        DataError, match=r"demo.pt2: expected a file that gives the model's probabilities to 0.0001, fo"
    ):
        export("demo", tmp_path / "demo.pt2", format="torch")
    assert not list(tmp_path.iterdir())


def test_differences_are_found_and_nan_is_one():
    graph = Graph(trained(build("probunet")))

    def off(by: float) -> float:
        def run(image, numbers):
            weights, probs = graph(image, **numbers)
            return weights, probs + by * (torch.arange(probs.numel()) == 5).view_as(probs)

        return compared(graph, run)

    assert off(0.0) < 1e-6
    assert off(3e-4) == pytest.approx(3e-4, rel=1e-2)
    assert np.isnan(off(float("nan")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": "a.pt2"}, "a.pt2: expected a file that ends in .onnx for format onnx"),
        ({"out": "no/a.onnx"}, "no/a.onnx: expected a file in a folder that exists, found no folder no"),
        ({"format": "onx"}, "format: expected one of onnx, torch, found 'onx'"),
        ({"precision": "64"}, "precision: expected one of 32, 16, 8, found '64'"),
        ({"precision": "8", "format": "torch"}, "precision: expected 32 with format torch, found 8"),
    ],
)
def test_refusals(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as refused:
        export("demo", **options)
    assert str(refused.value).startswith(message)


def test_methods_that_do_not_say_how_they_draw_are_refused():
    name = next(name for name in KNOWN if name not in METHODS)
    with pytest.raises(ConfigError, match="expected a method whose draws follow from numbers, found"):
        Graph(trained(build(name)))


def test_networks_that_torch_export_cannot_follow_are_refused_in_one_line():
    class Asking(torch.nn.Module):
        def forward(self, images):
            return images if images.sum() > 0 else -images

    model = trained(build("unet"))
    levels = model.method.backbone.down  # type: ignore[union-attr]
    levels[0] = torch.nn.Sequential(Asking(), levels[0])  # type: ignore[index,operator]
    graph = Graph(model)
    with pytest.raises(
        ConfigError, match=r"^model: expected a network that torch.export can follow .*UNetMethod"
    ) as no:
        graph.exported()
    assert "\n" not in str(no.value)

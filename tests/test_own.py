"""Networks and data sets of the user's own, named in a recipe: what can be named, and one line for what cannot."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ambiseg
from ambiseg._util import own
from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.extras import MissingExtra
from ambiseg.cli import main
from ambiseg.config import Config
from ambiseg.data.config import DataConfig, open_cases
from ambiseg.methods import METHODS
from ambiseg.nn.config import BackboneConfig
from tests.conftest import TINY
from tests.test_backbones import FakeUnet

NETS = """
import torch
from torch import nn
from ambiseg.nn import Adapter, Backbone, Features

class Plain(nn.Module):
    def __init__(self, in_channels, width=4):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, images):
        return self.norm(self.conv(images))

class Strict(Plain):
    def forward(self, images):
        assert images.shape[2] % 16 == images.shape[3] % 16 == 0, "sizes must be multiples of 16"
        return self.conv(images), nn.functional.avg_pool2d(self.conv(images), 16)

def adapter(in_channels):
    return Adapter(Plain(in_channels), dense=4, gate_from="conv")

class Wrong(Backbone):
    dense_channels, gate_channels = 5, 5

    def __init__(self, in_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 4, 1)

    def forward(self, images):
        return Features(self.conv(images), self.conv(images))

def classifier(in_channels):
    return nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def colour(in_channels):
    return nn.Conv2d(3, 4, 3)

def broken(in_channels):
    raise RuntimeError("no luck")

def number(in_channels):
    return 7

constant = 7
"""

CASES = '''
import numpy as np
from ambiseg.data import Case, Cases, Intensity

class Stripes(Cases):
    """Stripes of two readers."""

    def __init__(self, count=20, channels=1):
        self.title, self.classes, self.evaluated, self.channels = "stripes", ("ground", "stripe"), (1,), 1
        self.intensity = Intensity()
        self.names = self.patients = [f"s{i}" for i in range(count)]
        self.made = channels

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        labels = rng.integers(0, 2, (2, 16, 16), dtype=np.uint8)
        return Case.of(np.repeat(labels[:1].astype(np.float32), self.made, 0), labels, name=self.names[index])

class Rooted(Stripes):
    def __init__(self, root):
        super().__init__()
        self.root = root

class Untitled(Stripes):
    def __init__(self):
        pass

class Failing(Stripes):
    def __getitem__(self, index):
        return {}["image"]
'''


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Two modules in a folder that is on the path."""
    (tmp_path / "my_nets.py").write_text(NETS)
    (tmp_path / "my_cases.py").write_text(CASES)
    (tmp_path / "my_wreck.py").write_text("import torch\n1 / 0\n")
    (tmp_path / "my_needy.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("my_nets", "my_cases", "my_wreck", "my_needy"):
        sys.modules.pop(name, None)


# -- networks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "channels", "multiple"),
    [
        ("my_nets:Plain", {"width": 6}, (6, 6), 64),
        ("my_nets:Strict", {}, (4, 4), 16),
        ("my_nets:adapter", {}, (4, 4), 64),
    ],
)
def test_own_networks_are_backbones(modules, name, options, channels, multiple):
    backbone = BackboneConfig(name=name, options=options).build(in_channels=2)
    assert (backbone.dense_channels, backbone.gate_channels) == channels
    assert backbone.multiple == multiple
    images = torch.randn(2, 2, 21, 30)  # a size that no stride divides
    assert backbone(images).dense.shape == (2, channels[0], 21, 30)
    assert all(part.training for part in backbone.modules())  # as it was made
    buffers = dict(backbone.named_buffers())
    assert name != "my_nets:Plain" or int(buffers["network.norm.num_batches_tracked"]) == 1  # the check left no trace
    assert ambiseg.MoSE(2, 2, BackboneConfig(name=name).build(2)).predict(images).sample(3).labels.shape[1] == 3


def test_the_check_takes_no_random_numbers(modules):
    torch.manual_seed(1)
    first = BackboneConfig(name="my_nets:Plain").build(1).state_dict()["network.conv.weight"]
    after = torch.rand(1)
    torch.manual_seed(1)
    again = torch.nn.Conv2d(1, 4, 3, padding=1)
    assert torch.equal(first, again.weight)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("my_netz:Plain", {}, "backbone.name: expected my_netz:Plain, found no module my_netz "),
        ("my_nets:Plan", {}, "backbone.name: expected my_nets:Plan, found no Plan in my_nets; did you mean Plain?"),
        ("my_nets:constant", {}, "backbone.name: expected my_nets:constant to be a class or a function, found int"),
        ("my_wreck:Net", {}, "backbone.name: expected my_wreck:Net, found ZeroDivisionError: division by zero ("),
        ("my_needy:Net", {}, "backbone.name: expected my_needy:Net, found ModuleNotFoundError: No module named 'a_pac"),
        ("my_nets:Plain", {"widht": 3}, "backbone.options: expected options of my_nets:Plain (width), found 'widht'; "),
        ("my_nets:classifier", {}, "backbone.name: expected features [B, F, H, W] of my_nets:classifier, found [2, 4]"),
        ("my_nets:colour", {}, "backbone.name: expected my_nets:colour to take images [2, 1, 192, 320], found Runti"),
        ("my_nets:Wrong", {}, "backbone.name: expected dense features [B, dense_channels = 5, h, w] of my_nets:Wrong"),
        ("my_nets:broken", {}, "backbone.options: expected my_nets:broken to be made, found RuntimeError: no luck ("),
        ("my_nets:number", {}, "backbone.name: expected my_nets:number to return an nn.Module, found int"),
        ("collections:Counter.x", {}, "backbone.name: expected collections:Counter.x, found no x in collections"),
    ],
)
def test_networks_that_do_not_fit_are_one_line(modules, name, options, message):
    with pytest.raises(DataError) as caught:
        BackboneConfig(name=name, options=options).build(in_channels=1)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", METHODS)
def test_networks_that_stop_early_are_one_line_where_a_method_needs_the_last_features(name):
    """A U-Net by its own name, of which noise of MoSE enters in the middle of the way up."""
    backbone = BackboneConfig(name="ambiseg.nn.unet:UNet", options={"channels": [4, 8, 8], "inject_level": 0.5})
    method, images = METHODS[name], torch.rand(1, 1, 20, 20)
    if name in ("mose", "phiseg"):  # the first finishes them, the second has networks of its own
        built = method.build(method.Config(method=name), backbone, 1, 2)
        assert built.predict(images).sample(2).labels.shape == (1, 2, 20, 20)
        return
    with pytest.raises(ConfigError) as caught:
        method.build(method.Config(method=name), backbone, 1, 2)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("backbone.name: expected ")


def test_names_and_options_are_checked_before_anything_is_imported():
    for settings, message in (
        (
            {"backbone.name": "resnet"},
            "backbone.name: expected unet, unet-light, deeplabv3plus, smp:ARCHITECTURE or mod",
        ),
        ({"backbone.name": "unet-lite"}, "did you mean unet-light?"),
        ({"backbone.name": "a b:c"}, "found 'a b:c'"),
        ({"backbone.options": {"width": 3}}, "backbone.options: expected none with unet, found 'width'"),
        ({"backbone.name": "my:Net", "backbone.channels": [8, 16]}, "backbone.channels: expected null with my:Net"),
        ({"data.name": "nodule"}, "or module:Class, found 'nodule'; did you mean nodules?"),
        ({"epochs": 2}, "epochs: no such setting; did you mean trainer.epochs?"),
    ):
        with pytest.raises(DataError) as caught:
            Config.from_recipe("demo", settings)
        assert message in str(caught.value)
    # the recipe's channels are of its own network
    assert Config.from_recipe("demo", {"backbone.name": "my:Net"}).backbone.channels is None
    assert Config.from_recipe("demo", {"model.backbone": "my:Net"}).backbone.name == "my:Net"


# -- segmentation-models-pytorch, played by a stand-in -----------------------------------------------------------------


def test_encoders_of_smp_by_name(monkeypatch):
    asked = []

    class Unet(FakeUnet):
        def __init__(self, encoder_name, encoder_weights, in_channels):
            asked.append((encoder_name, encoder_weights))
            super().__init__("resnet18", None, in_channels)

    module = ModuleType("segmentation_models_pytorch")
    module.__dict__["Unet"] = Unet
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config = BackboneConfig(name="smp:Unet", options={"encoder_name": "resnet34", "encoder_weights": "imagenet"})
    assert config.build(3)(torch.zeros(1, 3, 9, 11)).dense.shape == (1, 6, 9, 11)
    config.without_weights().build(3)  # whose weights are about to be read from a run
    assert asked == [("resnet34", "imagenet"), ("resnet34", None)]
    with pytest.raises(DataError, match=r"backbone\.options: expected smp:Onet to be made, found ValueError: .*'Onet'"):
        BackboneConfig(name="smp:Onet").build(3)
    monkeypatch.setitem(sys.modules, module.__name__, None)
    with pytest.raises(MissingExtra, match="pip install segmentation-models-pytorch"):
        config.build(3)


# -- data sets ---------------------------------------------------------------------------------------------------------


def test_own_data_sets(modules):
    cases = open_cases(DataConfig(name="my_cases:Stripes", options={"count": 5}))
    assert len(cases) == 5
    assert open_cases(DataConfig(name="my_cases:Rooted", root="here")).root == "here"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "my_cases:Stripes", "root": "x"}, "data.root: my_cases:Stripes takes no root, found 'x'"),
        ({"name": "my_cases:Rooted"}, "data.root: expected where the data of my_cases:Rooted are, found none"),
        ({"name": "my_cases:Stripes", "options": {"cont": 1}}, "data.options: expected some of count, channels, found"),
        ({"name": "my_cases:Stripe"}, "data.name: expected my_cases:Stripe, found no Stripe in my_cases; did you mean"),
        ({"name": "my_cases:Untitled"}, "data.name: expected my_cases:Untitled to have the attribute title"),
        (
            {"name": "my_cases:Failing"},
            "data.name: expected the first case of my_cases:Failing, found KeyError: 'image",
        ),
        ({"name": "my_cases:Stripes", "options": {"channels": 2}}, "data.name: expected a Case of 1 channels as first"),
        ({"name": "collections:Counter"}, "data.name: expected collections:Counter to be a subclass of ambiseg.data.C"),
        ({"name": "nowhere:Cases"}, "data.name: expected nowhere:Cases, found no module nowhere"),
    ],
)
def test_data_sets_that_do_not_fit_are_one_line(modules, settings, message):
    with pytest.raises(DataError) as caught:
        open_cases(DataConfig(**settings))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# -- through the commands ----------------------------------------------------------------------------------------------


def test_a_run_of_own_parts_is_trained_from_python_and_loads_again(modules, tmp_path, capsys):
    settings = {
        "data.name": "my_cases:Stripes",
        "data.batch_size": 4,
        "data.split": "hash",
        "data.size": None,
        "data.eval_size": None,
        "data.augment": {"flip": "both"},
        "backbone.name": "my_nets:Plain",
        "backbone.options": {"width": 3},
        "model": {"samples": 1, "experts": 2, "capacity": 1},
        "trainer": {"epochs": 1, "threads": 1, "accelerator": "cpu"},
    }
    run = ambiseg.train("demo", tmp_path / "run", settings, quiet=True)
    assert run.config.backbone.name == "my_nets:Plain"
    assert "name: my_nets:Plain" in (tmp_path / "run" / "config.yaml").read_text()
    model = ambiseg.load(tmp_path / "run")
    assert model.predict(torch.zeros(1, 1, 16, 16)).sample(2).labels.shape == (1, 2, 16, 16)
    assert ambiseg.evaluate(tmp_path / "run", samples=(4,), quiet=True).images > 0
    (tmp_path / "my_nets.py").unlink()
    sys.modules.pop("my_nets")
    assert main(["evaluate", str(tmp_path / "run"), "--quiet"]) == 2
    assert capsys.readouterr().err.startswith("ambiseg: backbone.name: expected my_nets:Plain, found no module my_nets")


def test_a_command_finds_modules_in_the_current_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_own.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(own, "FOLDERS", [])
    arguments = ["--backbone.name", "my_own:colour", *(one for one in TINY if not one.startswith("--backbone"))]
    try:
        assert main(["train", "demo", "--out", "run", *arguments, "--quiet"]) == 2
    finally:
        sys.modules.pop("my_own", None)
    error = capsys.readouterr().err
    assert error.startswith("ambiseg: backbone.name: expected my_own:colour to take images")
    assert error.count("\n") == 1
    assert sys.path[-1] == str(tmp_path)  # last: a file there hides no package
    assert not Path("run").exists()


# -- ambiseg.train and Config.from_recipe ------------------------------------------------------------------------------


def test_recipes_from_python(tmp_path):
    config = Config.from_recipe("demo", {"trainer.epochs": 3, "model": {"experts": 6}, "optimizer.clip": None})
    assert (config.trainer.epochs, config.model.experts) == (3, 6)  # type: ignore[attr-defined]
    assert config.backbone.channels == ambiseg.config.parse([], "demo").backbone.channels
    assert config == ambiseg.config.parse(["--trainer.epochs=3", "--model.experts=6"], "demo")
    (tmp_path / "my.yaml").write_text("seed: 4\n")
    assert Config.from_recipe(tmp_path / "my.yaml").seed == 4
    again = config.with_settings({"seed": 5, "data.root": "007"})
    assert (again.seed, again.data.root, config.seed) == (5, "007", 0)  # a text stays a text
    for settings, message in (
        ({"trainer.epochs": "many"}, "trainer.epochs: expected a whole number, found 'many'"),
        ({"model": {"expert": 3}}, "model.expert: no such setting; did you mean model.experts?"),
        ({"samples": 3}, "samples: no such setting; did you mean model.samples or evaluation.samples?"),
    ):
        with pytest.raises(DataError) as caught:
            Config.from_recipe("demo", settings)
        assert str(caught.value) == message


def test_train_takes_what_is_there(tmp_path):
    with pytest.raises(DataError, match="found 'dmeo'; did you mean demo"):
        ambiseg.train("dmeo", tmp_path / "a")
    with pytest.raises(DataError, match=r"trainer\.epoch: no such setting"):
        ambiseg.train(Config(), tmp_path / "a", {"trainer.epoch": 1})
    assert list(tmp_path.iterdir()) == []

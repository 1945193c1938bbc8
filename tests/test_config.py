"""Configurations: what can be said, on the command line and in files, and one line for whatever cannot."""

from __future__ import annotations

import json

import pytest
import yaml

from ambiseg._util.errors import ConfigError
from ambiseg.cli import main, parse
from ambiseg.cli.options import SECTIONS
from ambiseg.cli.train import settings_text
from ambiseg.config import Config, dump, find_recipe, recipes, tables
from ambiseg.config import load as load_config
from ambiseg.config import parse as parse_config
from ambiseg.data.augment import Augment
from ambiseg.data.intensity import Intensity
from ambiseg.methods import METHODS, MoSEConfig
from ambiseg.methods.schedules import Schedule
from ambiseg.nn.config import BackboneConfig
from ambiseg.settings import keys
from tests.conftest import REPOSITORY
from tests.drop_ins import TwoHeads
from tests.tools import tool


def message(*arguments: str, recipe=None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(list(arguments), recipe)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 300, text
    return text


# -- what can be said --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "key", "expected"),
    [
        (["--model.experts", "8"], "model.experts", 8),
        (["--model.experts=8", "--model.experts", "9"], "model.experts", 9),  # the last one counts
        (["--model", "{experts: 3, cost: ce}"], "model", MoSEConfig(experts=3, cost="ce")),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 0.001),  # YAML alone would call this a text
        (["--optimizer.clip=null"], "optimizer.clip", None),
        (["--optimizer.clip", "2"], "optimizer.clip", 2.0),
        (["--data.root", "2024"], "data.root", "2024"),
        (["--data.root", "scans: old and new/"], "data.root", "scans: old and new/"),
        (["--data.size=[48, 64]"], "data.size", (48, 64)),
        (["--data.size", "64"], "data.size", 64),
        (["--data.annotations", "2"], "data.annotations", 2),
        (["--data.annotations", "once"], "data.annotations", "once"),
        (["--data.options.size", "32", "--data.options.count=7"], "data.options", {"size": 32, "count": 7}),
        (["--data.augment.scale=[0.8, 1.25]", "--data.size=9"], "data.augment", Augment(scale=(0.8, 1.25))),
        (["--data.intensity.low=-1000", "--data.intensity.high=400"], "data.intensity", Intensity(-1000.0, 400.0)),
        (["--data.intensity={mean: [1, 2, 3], std: 2}"], "data.intensity", Intensity(mean=(1.0, 2.0, 3.0), std=2.0)),
        (["--trainer.devices", "0,3"], "trainer.devices", "0,3"),
        (["--trainer.tensorboard", "true"], "trainer.tensorboard", True),
        (
            ["--model.capacity.kind=linear", "--model.capacity.values=[0.5, 1]"],
            "model.capacity",
            Schedule(kind="linear", values=[0.5, 1.0]),
        ),
        (
            ["--model.samples={kind: plateau, values: [1, 2], patience: 3}"],
            "model.samples",
            Schedule(kind="plateau", values=[1.0, 2.0], patience=3),
        ),
        (["--model.capacity", "0.5"], "model.capacity", 0.5),
        (["--backbone.channels", "[8, 16]"], "backbone.channels", [8, 16]),
        # as version 0.1 had them
        (["--model.backbone", "unet-light"], "backbone.name", "unet-light"),
        (["--schedules.annealing.values=[0, 1]"], "model.annealing", Schedule(values=[0.0, 1.0])),
        (["--seed", "5"], "seed", 5),
    ],
)
def test_settings_arrive_with_their_types(arguments, key, expected):
    found = parse_config(arguments)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == expected
    assert type(found) is type(expected)


def test_the_command_line_wins_over_the_recipe_and_that_over_the_defaults(tmp_path):
    recipe = tmp_path / "my recipe.yaml"
    recipe.write_text("model: {experts: 3, samples: 2}\ndata:\n  size: 9\n  augment: {rotate: 10}\n")
    found = parse_config(["--model.experts=5", "--data.augment.flip=none"], recipe)
    assert found.model == MoSEConfig(experts=5, samples=2)
    assert found.data.augment == Augment(flip="none", rotate=10.0)


def test_another_data_set_leaves_the_recipes_options_behind(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("data: {name: nodules, options: {size: 72}}\n")
    assert parse_config(["--data.options.spacing=1"], recipe).data.options == {"size": 72, "spacing": 1}
    assert parse_config(["--data.name=folder", "--data.root=x"], recipe).data.options == {}
    assert parse_config(["--data.name=shapes", "--data.options.count=3"], recipe).data.options == {"count": 3}


def test_json_is_yaml(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"model": {"experts": 6}, "seed": 2}))
    assert parse_config([], tmp_path / "c.json") == parse_config(["--model.experts=6", "--seed=2"])


# -- what cannot -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        # keys
        ("--model.expert=8", "--model.expert: no such setting; did you mean --model.experts?"),
        ("--modle.experts=8", "--modle.experts: no such setting; did you mean --model.experts?"),
        ("--data.augment.rotat=8", "--data.augment.rotat: no such setting; did you mean --data.augment.rotate?"),
        ("--model.capacity={kid: x}", "--model.capacity.kid: no such setting; did you mean --model.capacity.kind?"),
        ("--data.intensity={lo: 0}", "--data.intensity.lo: no such setting; did you mean --data.intensity.low?"),
        ("--config=x.yaml", "--config: no such setting"),
        ("--xyzzy", "--xyzzy: no such setting"),
        ("8", "expected settings as --section.key value, found '8'"),
        # types
        ("--model.experts=many", "--model.experts: expected a whole number, found 'many'"),
        ("--model.experts=2.5", "--model.experts: expected a whole number, found 2.5"),
        ("--model.experts=true", "--model.experts: expected a whole number, found true"),
        ("--model.experts", "--model.experts: expected a value, found none"),
        ("--model.experts=", "--model.experts: expected a whole number, found ''"),
        ("--model.cost=dice", "--model.cost: expected iou or ce, found 'dice'"),
        ("--backbone.channels=[8, x]", "--backbone.channels: expected a list of whole numbers or null, found [8, x]"),
        ("--model=8", "--model: expected a table of method, experts, samples, latent, cost …, found 8"),
        ("--optimizer.lr=fast", "--optimizer.lr: expected a number, found 'fast'"),
        ("--optimizer.lr=nan", "--optimizer.lr: expected a number, found 'nan'"),
        ("--optimizer.clip=big", "--optimizer.clip: expected a number or null, found 'big'"),
        ("--data.size=x", "--data.size: expected a whole number, two whole numbers or null, found 'x'"),
        ("--data.augment.scale=0.8", "--data.augment.scale: expected two numbers, found 0.8"),
        ("--data.augment.scale=[a, b]", "--data.augment.scale: expected two numbers, found [a, b]"),
        ("--data.augment.flip=up", "--data.augment.flip: expected none, horizontal, vertical or both, found 'up'"),
        (
            "--data.annotations=first",
            "--data.annotations: expected all, random, once, a whole number or null, found",
        ),
        ("--data.fractions={train: x}", "--data.fractions: expected a table of numbers, found {train: x}"),
        ("--model.capacity={kind: foo, values: [1]}", "--model.capacity.kind: expected linear or plateau, found 'foo'"),
        (
            "--model.capacity=high",
            "--model.capacity: expected a number or a table of kind, values, epochs, warm_up",
        ),
        ("--model.samples=few", "--model.samples: expected a whole number or a table of kind, values, epochs, warm_up"),
        ("--model.samples.kind=plateau", "--model.samples.values: expected a value, found none"),
        ("--trainer.tensorboard=maybe", "--trainer.tensorboard: expected true or false, found 'maybe'"),
        # values
        ("--model.capacity.values=[1]", "--model.capacity.values: expected two values for linear, found [1.0]"),
        ("--model.capacity.values=[]", "--model.capacity.values: expected at least 1 values, found []"),
        ("--model.capacity={values: [0, 1], epochs: 0}", "--model.capacity.epochs: expected at least 1, found 0"),
        ("--model.annealing=2", "--model.annealing: expected values from 0 to 1, found [2.0]"),
        ("--model.samples=0", "--model.samples: expected at least 1, found 0"),
        ("--model.capacity=0.01", "--model.capacity: expected at least 1/16, so that all annotations fit, found 0.01"),
        ("--data.augment.scale=[2, 1]", "--data.augment.scale: expected 0 < smallest ≤ largest, found 2 and 1"),
        ("--data.intensity={low: 3, high: 1}", "--data.intensity.low: expected low < high, found 3 and 1"),
        ("--data.name=nodule", "--data.name: expected one of nodules, "),
        ("--data.batch_size=0", "--data.batch_size: expected at least 1, found 0"),
        ("--data.augment.rotate=9", "--data.size: expected a window, which rotate and scale of data.augment need, "),
        (
            "--model.method=mosse",
            f"model.method: expected one of {', '.join(METHODS)}, found 'mosse'; did you mean mose?",
        ),
        ("--model.experts=0", "--model.experts: expected at least 1, found 0"),
        ("--model.gate_level=0", "--model.gate_level: expected more than 0 and at most 1, found 0"),
        ("--backbone.channels=[8]", "--backbone.channels: expected at least 2 values, found [8]"),
        ("--optimizer.lr=-1", "--optimizer.lr: expected more than 0, found -1"),
        ("--optimizer.average=1", "--optimizer.average: expected at least 0 and less than 1, found 1"),
        ("--trainer.epochs=0", "--trainer.epochs: expected at least 1, found 0"),
        ("--evaluation.protocol=mosse", "--evaluation.protocol: expected one of mose, kohl2018, "),
    ],
)
def test_what_cannot_be_is_one_line(argument, expected):
    assert message(argument).startswith(expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("model:\n  expert: 3\n", "model.expert: no such setting; did you mean model.experts?"),
        ("modle:\n  experts: 3\n", "modle.experts: no such setting; did you mean model.experts?"),
        ("data:\n  augment: {rotat: 3}\n", "data.augment.rotat: no such setting; did you mean data.augment.rotate?"),
        ("model:\n  capacity: {kid: x}\n", "model.capacity.kid: no such setting; did you mean model.capacity.kind?"),
        ("model:\n  experts: many\n", "model.experts: expected a whole number, found 'many'"),
        ("model:\n  samples: {values: [1]}\n", "model.samples.values: expected two values for linear, found [1.0]"),
        ("data: {batch_size: 0}\n", "data.batch_size: expected at least 1, found 0"),
        ("model:\n", "model: expected a table of method, experts, "),
        ("- a\n- b\n", "expected sections of settings, found a list"),
        ("hello\n", "expected sections of settings, found a text"),
        ("", "expected sections of settings, found an empty file"),
        ("model: {experts: 3\n", "expected YAML, found a mistake in line 2, column 1: "),
        ("model:\n\texperts: 3\n", "expected YAML, found a mistake in line 2, column 1: "),
        ("seed: 1\nmodel: {}\nseed: 2\n", "line 3: expected every key once, found 'seed' again"),
        ("model: !!python/object/apply:os.getcwd []\n", "expected YAML without tags, found "),
    ],
)
def test_a_file_that_cannot_be_is_named(tmp_path, content, expected):
    path = tmp_path / "my recipe.yaml"
    path.write_text(content)
    assert message(recipe=path).startswith(f"{path}: {expected}")


def test_a_file_of_other_bytes_is_named(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    assert message(recipe=tmp_path / "c.yaml") == f"{tmp_path / 'c.yaml'}: expected YAML in UTF-8, found byte 0xff"


def test_missing_files_and_recipes_are_named(tmp_path):
    assert message(recipe=tmp_path / "c.yaml") == f"{tmp_path / 'c.yaml'}: expected a recipe, found no such file"
    assert message(recipe="dmeo").endswith("or a YAML file, found 'dmeo'; did you mean demo?")
    for name in recipes():
        assert name in message(recipe="nothing like it")
    with pytest.raises(ConfigError, match=r"c\.yaml: expected a configuration, found no such file"):
        load_config(tmp_path / "c.yaml")


# -- as it is typed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train", "demo", "--model.expert", "8"], "--model.expert: no such setting; did you mean --model.experts?"),
        (["train", "--model.experts", "x", "demo"], "--model.experts: expected a whole number, found 'x'"),
        (["demo", "--trainer.epochs", "0"], "--trainer.epochs: expected at least 1, found 0"),
        (["train", "atuo"], f"recipe: expected one of auto, {', '.join(recipes())} or a YAML file, found 'atuo'; "),
        (["train"], f"train: expected a recipe (auto, {', '.join(recipes())}, "),
        (["train", "demo", "--resume", "x"], f"train: expected a recipe (auto, {', '.join(recipes())}, "),
        (["train", "--resume", "nowhere"], "nowhere: expected the folder of a run, found no config.yaml in it"),
        (["train", "--resume", "a", "--out", "b"], "train: expected --resume RUN or --out DIR, found both"),
    ],
)
def test_commands_refuse_in_one_line(arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"ambiseg: {line}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trian"], "ambiseg: COMMAND: expected one of demo, train, "),
        (["trian"], "found 'trian'; did you mean train?"),
        (["train", "demo", "--qiet"], "ambiseg train: unrecognized arguments: --qiet; did you mean --quiet?"),
        (["data", "split", "shapes", "--out", "x", "--sed", "3"], "ambiseg data split: unrecognized arguments: --sed"),
        (["predict", "demo"], "ambiseg predict: the following arguments are required: IMAGE; see ambiseg predict --h"),
    ],
)
def test_mistyped_commands_are_one_line(arguments, line, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert line in err


@pytest.mark.parametrize("arguments", [[], ["data"], ["--help"], ["train", "--help"], ["data", "check", "--help"]])
def test_nothing_to_do_is_help(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ambiseg")


def test_settings_may_stand_anywhere():
    chosen = parse(["train", "--trainer.epochs", "2", "--seed=4", "demo", "--out", "x", "--optimizer.clip", "-1"])
    assert (chosen.recipe, chosen.out) == ("demo", "x")
    assert chosen.settings_given == ["--trainer.epochs", "2", "--seed=4", "--optimizer.clip", "-1"]
    assert {*Config.model_fields, "schedules"} == set(SECTIONS)  # schedules are version 0.1's


@pytest.mark.parametrize("name", recipes())
def test_print_config_comes_back_as_it_was(name, tmp_path, capsys):
    arguments = [
        "--data.intensity={low: 0, high: 255, mean: [1, 2]}",
        "--model.samples={kind: plateau, values: [3, 4]}",
    ]
    assert main(["train", name, "--print_config", *arguments]) == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    again = load_config(tmp_path / "again.yaml")
    assert again == parse_config(arguments, name)
    assert dump(again) == (tmp_path / "again.yaml").read_text()


def test_recipes_are_listed_with_what_they_are_for(capsys):
    assert main(["train", "--recipes"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == recipes().keys()
    assert all(len(text) > 20 for text in lines.values())
    assert find_recipe("demo") == recipes()["demo"]


def test_every_setting_is_listed_with_its_meaning(capsys):
    assert main(["train", "--settings"]) == 0
    text = capsys.readouterr().out
    listed = {row.key for table in tables() for row in table.rows}
    for key in keys(Config, {"model": {}}):
        shared = key.count(".") > 1 and key.startswith("model.")  # told once, as SCHEDULE
        assert shared or key in listed or any(one.startswith(f"{key}.") for one in listed), key
    for table in tables():
        for row in table.rows:
            assert len(row.meaning) > 5, f"{row.key} has no description"
            assert f"{row.key} " in text
    for word in ("Union", "Literal", "None", "Pydantic", "``", "typing"):
        assert word not in text
    assert max(map(len, settings_text(80).splitlines())) <= 110


# -- methods and earlier versions --------------------------------------------------------------------------------------


def test_another_method_leaves_the_recipes_settings_of_the_model_behind(monkeypatch):
    monkeypatch.setitem(METHODS, "two-heads", TwoHeads)
    found = parse_config(["--model.method=two-heads", "--model.width=6"], "lidc71")
    assert isinstance(found.model, TwoHeads.Config)
    assert found.backbone.channels == [16, 32, 64, 96]  # the backbone is not the method's
    content = yaml.safe_load(dump(found))
    assert content["model"] == {"method": "two-heads", "width": 6, "sharpness": 1.0}
    assert parse_config(["--model.method=mose"], "lidc71").model == parse_config([], "lidc71").model
    assert message("--model.method=two-heads", "--model.experts=3").startswith("--model.experts: no such setting")
    assert any(table.title.startswith("model, method two-heads") for table in tables())


def test_configurations_of_version_0_1_arrive_where_their_settings_are_now(tmp_path):
    old = """
model: {method: mose, backbone: unet-light, channels: [8, 16], convs: 2, momentum: 0.1, experts: 3, samples: 2}
schedules:
  capacity: {kind: linear, values: [0.5, 1.0], epochs: 4, warm_up: 1, patience: 10}
  group_threshold: {kind: constant, values: [0.9], epochs: 1, warm_up: 0, patience: 10}
  annealing: {kind: constant, values: [1.0], epochs: 1, warm_up: 0, patience: 10}
  samples: null
data: {cache: temporary}
"""
    (tmp_path / "old.yaml").write_text(old)
    found = load_config(tmp_path / "old.yaml")
    assert found.backbone == BackboneConfig(name="unet-light", channels=[8, 16], convs=2, momentum=0.1)
    capacity = Schedule(values=[0.5, 1.0], epochs=4, warm_up=1)
    assert found.model == MoSEConfig(experts=3, samples=2, capacity=capacity, group_threshold=0.9)
    assert found.data == Config().data


def test_the_page_has_the_settings_that_the_code_has():
    page = (REPOSITORY / "docs" / "train.md").read_text(encoding="utf-8")
    assert page == tool("settings_table").updated(page), "run: python tools/settings_table.py"


def test_what_a_method_needs_of_other_sections_comes_after_recipes_and_arguments(monkeypatch, tmp_path):
    monkeypatch.setattr(METHODS["unet"], "defaults", {"optimizer.clip": 7.0, "optimizer.average": 0.5})
    assert parse_config([]).optimizer.clip is None
    assert parse_config(["--model.method=unet"]).optimizer.clip == 7
    assert parse_config(["--model.method=unet", "--optimizer.clip=null"]).optimizer.clip is None
    recipe = tmp_path / "own.yaml"
    recipe.write_text("optimizer: {average: 0.25}\n")
    of_recipe = parse_config(["--model.method=unet"], recipe).optimizer
    assert (of_recipe.clip, of_recipe.average) == (7, 0.25)
    again = parse_config(["--model.method=unet", "--optimizer.clip=3"])
    assert load_config(_written(again, tmp_path)).optimizer.clip == 3
    assert Config.model_validate({"model": {"method": "unet"}}).optimizer.clip == 7
    assert again.with_settings({"trainer.epochs": 3}).optimizer.clip == 3


def _written(config, folder):
    (folder / "config.yaml").write_text(dump(config))
    return folder / "config.yaml"

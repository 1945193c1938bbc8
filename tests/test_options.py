"""Extreme values of settings and options: each is used, or refused in one line; tools/options.py tries them all."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ambiseg import settings as bounds
from ambiseg._util.errors import ConfigError, DataError
from ambiseg._util.files import write_text
from ambiseg.cli import main, options
from ambiseg.config import Config, nested, parse
from ambiseg.data.config import DataConfig, open_cases
from ambiseg.data.module import DataModule
from ambiseg.methods import METHODS, MoSE
from ambiseg.nn.config import BackboneConfig
from ambiseg.nn.unet import unet_weights
from ambiseg.planning import warnings_of
from ambiseg.settings import keys, shown, validate

KEYS = keys(Config, {"model": {"capacity": {}, "samples": {}}})
VALUES = ["-1", "0", "1", "7", "1000000", "1000000000000000000", str(2**70), "9" * 5000, "0.5", "1e-320", "1e308",
          "-1e308", "nan", ".nan", "inf", "-.inf", "", "null", "true", "x", "[]", "[1, 2]", "[[1], {a: 2}]", "{}",
          "{a: 1}", "{values: [1, 2]}", "a\nb\x1b[2J\r", "\0", "é" * 5000, "[" * 300, f"[{', '.join(['1'] * 500)}]",
          "&a [*a]", "this:s", "no.such:Thing"]  # fmt: skip


def one_line(text: str) -> bool:
    return text.isprintable() and 0 < len(text) < 400


def refusal(call: Callable[[], Any]) -> str | None:
    """Why something is refused; nothing else than a ConfigError is a refusal."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


@settings(max_examples=300)
@given(st.sampled_from(KEYS), st.sampled_from(VALUES))
def test_any_value_of_any_setting_is_used_or_refused_in_one_line(key, value):
    said = refusal(lambda: parse([f"--{key}={value}"]))
    if said is not None:
        assert one_line(said), said
        assert key.split(".")[0] in said
    else:
        found = parse([f"--{key}={value}"])
        assert Config.model_validate(found.model_dump()) == found  # what is used can be saved and read again


@pytest.mark.parametrize("method", METHODS)
def test_settings_of_every_method_are_used_or_refused_in_one_line(method):
    chosen = METHODS[method]
    for key in chosen.Config.model_fields.keys() - {"method"}:
        for value in VALUES:
            settings = [f"--model.method={method}", f"--model.{key}={value}"]
            said = refusal(lambda settings=settings: parse(settings))
            if said is not None:
                assert one_line(said), (key, said)
                assert "model" in said, (key, said)
                continue
            found = parse(settings)
            assert Config.model_validate(found.model_dump()) == found, key
            with torch.device("meta"):  # whatever is accepted can be built, or is refused in one line
                why = refusal(lambda model=found.model: chosen.build(model, BackboneConfig(channels=[4, 8]), 1, 2))
            assert why is None or one_line(why), (key, why)


@settings(max_examples=200)
@given(
    st.sampled_from(KEYS),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    ),
)
def test_any_object_of_any_setting_is_used_or_refused_in_one_line(key, value):
    said = refusal(lambda: validate(Config, nested({key: value})))
    assert said is None or one_line(said), said


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--seed=-1"], "--seed: expected at least 0, found -1"),
        (
            ["--seed", str(2**70)],
            "--seed: expected at least 0 and at most 4,294,967,295, found '1180591620717411303424",
        ),
        (["--data.size=1000000"], "--data.size: expected at most 8,192, found 1000000"),
        (["--data.size=[0, 4]"], "--data.size: expected at least 1, found 0"),
        (["--data.fold=4/3"], "--data.fold: expected K/N such as 2/5, the second of five folds, found '4/3'"),
        (["--data.root="], "--data.root: expected a text, found an empty one"),
        (["--data.annotations=-1"], "--data.annotations: expected at least 0, found -1"),
        (["--data.fractions={train: 2}"], "--data.fractions: expected shares above 0 and at most 1, found 'train': 2"),
        (["--data.intensity.mean=1e308"], "--data.intensity.mean: expected at most 1e+30, found '1e308'"),
        (["--data.augment.scale=[1e-9, 1]"], "--data.augment.scale: expected from 0.1 to 10, found 1e-09 and 1"),
        (["--backbone.channels=[8, 1000000]"], "--backbone.channels: expected at most 4,096, found 1000000"),
        (
            ["--backbone.channels=[4096, 4096]", "--backbone.convs=9"],
            "--backbone.channels: expected at most 2.5e+08 wei",
        ),
        (
            ["--backbone.scale=64"],
            "--backbone.scale: expected images to be padded to a multiple of at most 1024, found",
        ),
        (["--model.samples=100000"], "--model.samples: expected at most 8,192 of all experts together, found 100000"),
        (["--model.expert_weights=[1, 1]"], "--model.expert_weights: expected 4 weights, one per expert, that are not"),
        (["--model.method=[1]"], f"model.method: expected one of {', '.join(METHODS)}, found [1]"),
        (
            ["--trainer.threads=1000000000000"],
            "--trainer.threads: expected at least 1 and at most 1,024, found 1000000",
        ),
    ],
)
def test_bounds_are_named(typed, said):
    with pytest.raises(ConfigError) as refused:
        parse(typed)
    assert str(refused.value).startswith(said)


RUN = ["evaluate", "nowhere"]
PREDICT = ["predict", "demo", "sample"]
SPLIT = ["data", "split", "shapes", "--set", "count=12", "--set", "size=16", "--out", "new.json"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ([*RUN, "--seed", "-1"], "--seed: expected at least 0, found -1"),
        ([*RUN, "--threads", "1" + "0" * 18], "--threads: expected at most 1,024, found 1000000000000000000"),
        ([*RUN, "--workers", "1000000"], "--workers: expected at most 256, found 1000000"),
        ([*RUN, "--samples", "0"], "--samples: expected at least 1, found 0"),
        ([*RUN, "--samples", *["2"] * 33], "--samples: expected at most 32 numbers, found 33"),
        ([*RUN, "--batch-size", "1" * 5000], "--batch-size: expected a whole number, found '111111"),
        ([*RUN, "--devices", "0"], "--devices: expected how many devices, or which, such as 2 or 0,3, found '0'"),
        ([*RUN, "--devices", "many"], "--devices: expected how many devices, or which, such as 2 or 0,3, found 'many'"),
        ([*RUN, "--out", ""], "--out: expected a path, found an empty text"),
        ([*RUN, "--out", "a\0b"], r"--out: expected a path, found 'a\x00b'"),
        ([*RUN, "--out", "/dev/null"], "/dev/null: expected a file to write, found a device or a pipe"),
        ([*RUN, "--json=none/x.json"], "none/x.json: expected a folder to write into, found none named none"),
        ([*RUN, "--out", "x" * 300], "x" * 300 + ": File name too long"),
        ([*PREDICT, "--seed", str(2**70)], "--seed: expected at most 4,294,967,295, found 1180591620717411303424"),
        ([*PREDICT, "--per-stratum", "0"], "--per-stratum: expected at least 1, found 0"),
        ([*PREDICT, "--window=-1"], "--window: expected at least 0, found -1"),
        ([*PREDICT, "--window", "64", "--overlap", "65"], "--overlap: expected 0 to 32, half of the window, found 65"),
        ([*PREDICT, "--assume-window", "nan", "1"], "--assume-window: expected a number, found 'nan'"),
        (["report", "demo", "--cases", "1000000000"], "--cases: expected at most 1,000, found 1000000000"),
        (["train", "auto", "--minutes", "nan"], "--minutes: expected a number, found 'nan'"),
        (["train", "auto", "--minutes", "0"], "--minutes: expected more than 0, found 0"),
        (
            ["train", "demo", "--device", "cpu:x\n"],
            r"--device: expected a kind and perhaps a number, such as cpu or cuda:1",
        ),
        (["data", "check", "x", "--classes", "1000000"], "--classes: expected at most 65,536, found 1000000"),
        (["data", "check", "x", "--void", "1" + "0" * 30], "--void: expected at most 4,294,967,295, found 1000000000"),
        ([*SPLIT, "--fractions", "train=nan"], "fractions of a split must be positive, found train nan"),
        (
            [*SPLIT, "--fractions", "train=0.5", "train=0.5"],
            "--fractions: expected every name once, found 'train' again",
        ),
        (
            [*SPLIT, "--fractions", "a/b=0.5", "test=0.5"],
            "fractions: expected names of parts such as train, found 'a/b'",
        ),
        ([*SPLIT, "--fold", "0/0"], "fold: expected K/N such as 2/5, the second of five folds, found '0/0'"),
        (
            ["data", "split", "shapes", "--set", "size=big", "--out", "x"],
            "--set size: expected a whole number, found 'big'",
        ),
        (["data", "export", "shapes", "--set", "size=1000000", "--out", "x"], "shapes: size must be from 16 to 4096, "),
        (
            ["data", "export", "shapes", "--set", "unknown=1", "--out", "x"],
            "data.options: expected some of count, size, ",
        ),
    ],
)
def test_commands_refuse_before_they_read_or_write(typed, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(typed) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ambiseg: {said}"), error
    assert error.count("\n") == 1
    assert error.rstrip("\n").isprintable()
    assert list(tmp_path.iterdir()) == []


def test_options_have_the_bounds_of_settings():
    for name in ("SEED", "SAMPLES", "SIDE", "CLASSES"):
        assert getattr(options, name) == getattr(bounds, name)
    limits = {
        "BATCH": DataConfig.model_fields["eval_batch_size"],
        "WORKERS": DataConfig.model_fields["workers"],
        "THREADS": Config().trainer.__class__.model_fields["threads"],
        "NODES": Config().trainer.__class__.model_fields["num_nodes"],
    }
    for name, field in limits.items():
        assert [part.le for part in field.metadata if hasattr(part, "le")] == [getattr(options, name)]


@pytest.mark.parametrize(
    "given", [{"size": "big"}, {"size": None}, {"size": [1]}, {"noise": float("nan")}, {"count": 10**18}, {"seed": -1},
              {"readers": 10_000, "size": 4096}, {"unknown": 1}, {"flips": 3}],
)  # fmt: skip
def test_options_of_data_sets_are_typed(given):
    with pytest.raises(DataError) as refused:
        open_cases(DataConfig(name="shapes", options=given))
    assert one_line(str(refused.value))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise SystemExit(3)", "found SystemExit: 3"),
        ("import sys; print('noise'); sys.exit()", "found SystemExit"),
        ("1 / 0", "found ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_exits_or_prints_is_one_line(body, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_exiting.py").write_text(f"{body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=said):
        open_cases(DataConfig(name="my_exiting:Thing"))
    sys.modules.pop("my_exiting", None)
    assert capsys.readouterr().out == ""


def test_devices_are_not_replaced_by_files():
    with pytest.raises(OSError, match="/dev/null: expected a file to write, found a device or a pipe"):
        write_text("/dev/null", "x")


def test_weights_of_the_default_network_are_far_from_the_limit():
    assert unet_weights(Config().backbone.levels, Config().backbone.convs) < 2e7


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"data.size": 7},
            "data.size: expected windows that fill at least 1/4 of what the network pads them to, 64×64",
        ),
        ({"data.size": 300}, "data.size: expected at most 128, 4 times the side of the largest image, found 300×300"),
        ({"data.eval_size": 300}, "data.eval_size: expected at most 128, 4 times the side of the largest image, found"),
        (
            {"data.batch_size": 1 << 16, "data.windows": 10_000, "backbone.channels": [2048, 8]},
            "data.batch_size: expected a step within ",
        ),
    ],
)
def test_what_cannot_be_trained_is_said_before_it_is_built(given, said):
    data = {"data.name": "shapes", "data.options": {"count": 12, "size": 32}, "data.cache": None}
    config = Config().with_settings({**data, "trainer.accelerator": "cpu", **given})
    module = DataModule(config.data)
    module.setup()
    with pytest.raises(ConfigError) as refused:
        warnings_of(config, module)
    assert str(refused.value).startswith(said)


def test_an_intensity_of_other_channels_is_said_before_training():
    config = DataConfig(name="shapes", options={"count": 4}, cache=None, intensity={"mean": [1, 2]})  # type: ignore
    with pytest.raises(DataError, match=r"data\.intensity\.mean: expected one number or 1, one per channel, found 2"):
        _ = DataModule(config).intensity


def test_errors_repeat_no_long_values():
    assert shown(10**5000) == "a number of 5001 digits"
    assert shown(list(range(1000))) == "a list of 1,000 values"
    assert len(shown("x" * 10**6)) < 100
    assert json.dumps(shown("a\nb")) == "\"'a\\\\nb'\""


def test_weights_that_are_no_numbers_are_one_line():
    """As images of 1e21 make them, in a validation whose loss before was finite."""
    model = MoSE(in_channels=1, classes=2, backbone="unet-light", experts=2)
    predictive = model.predict(torch.rand(1, 1, 16, 16)).reweighted(torch.tensor([[math.nan, 1.0]]))
    with pytest.raises(ConfigError, match="model: expected weights of its strata that are numbers, found nan"):
        predictive.sample(2)

"""What all commands have in common: names and forms of options, settings by the end of their key, JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from ambiseg._util.errors import ConfigError
from ambiseg.cli import demo, main, parse, parser, subparsers
from ambiseg.cli.options import known_settings, placed
from tests.conftest import TINY

# -- settings by the end of their key ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--epochs", "2"], ["--trainer.epochs", "2"]),
        (["--epochs=2"], ["--trainer.epochs=2"]),
        (["--lr", "1e-3"], ["--optimizer.lr", "1e-3"]),
        (["--batch-size", "4"], ["--data.batch_size", "4"]),
        (["--batch_size", "4"], ["--data.batch_size", "4"]),
        (["--root", "scans/"], ["--data.root", "scans/"]),
        (["--rotate", "10"], ["--data.augment.rotate", "10"]),
        (["--threads", "1", "--devices", "2", "--num-nodes=2"], ["--trainer.threads", "1", "--trainer.devices", "2",
          "--trainer.num_nodes=2"]),
        (["--seed", "3"], ["--seed", "3"]),  # data has a seed as well; this one is of no section
    ],
)  # fmt: skip
def test_the_end_of_a_key_is_enough(typed, meant):
    chosen = parse(["train", *typed, "demo", "--quiet"])
    assert chosen.settings_given == meant
    assert (chosen.recipe, chosen.quiet) == ("demo", True)
    assert len(chosen.notes) == sum(word not in typed for word in meant if word.startswith("--"))


def test_what_was_understood_is_said(capsys):
    assert main(["train", "demo", "--epochs", "2", "--print-config"]) == 0
    out, err = capsys.readouterr()
    assert err == "ambiseg: --epochs is --trainer.epochs\n"
    assert "epochs: 2\n" in out
    assert main(["train", "demo", "--epochs", "2", "--print_config", "--quiet"]) == 0  # as it was called before
    assert capsys.readouterr() == (out, "")


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("--samples", "ambiseg train: --samples: expected --model.samples or --evaluation.samples, found only the end"),
        ("--name", "ambiseg train: --name: expected --data.name or --backbone.name, found only the end of them"),
        ("--epoch", "ambiseg train: unrecognized arguments: --epoch 2; did you mean --epochs?"),
        ("--xyzzy", "ambiseg train: unrecognized arguments: --xyzzy 2; see ambiseg train --help"),
    ],
)
def test_ends_that_are_not_clear_are_answered_with_what_may_be_meant(typed, answer, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "demo", typed, "2"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(answer)
    assert error.count("\n") == 1


def test_no_option_hides_the_end_of_a_key_by_chance():
    """Options of train and demo are not ends of settings."""
    for name in ("train", "demo"):
        own = {option[2:].replace("-", "_") for option in subparsers(parser())[name]._option_string_actions}
        assert own & {key.rpartition(".")[2] for key in known_settings()} == set()


# -- options -----------------------------------------------------------------------------------------------------------


def every(of: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, below in subparsers(of).items():
        yield f"{path} {name}".strip(), below
        yield from every(below, f"{path} {name}".strip())


def test_options_have_one_name_and_one_form():
    forms: dict[str, set[Any]] = {}
    for path, command in every(parser()):
        leaf = not subparsers(command)
        for option, action in command._option_string_actions.items():
            assert "_" not in option, f"{path} {option}"
            # the same number of values, of the same type, under the same name
            forms.setdefault(option, set()).add((action.nargs, action.type, action.metavar))
        if leaf and path != "completion":
            assert "--json" in command._option_string_actions, path
            assert "--quiet" in command._option_string_actions or path == "data list", path
    several = {"--samples", "--form", "--out", "--split"}
    for option, found in forms.items():
        assert len(found) == 1 or option in several, f"{option}: {found}"


def test_device_is_what_lightning_takes():
    assert placed("cpu") == {"accelerator": "cpu"}
    assert placed("cuda:2") == {"accelerator": "cuda", "devices": "2,"}
    with pytest.raises(ConfigError, match=r"--device: expected .* found 'cuda:x'"):
        placed("cuda:x")


@pytest.mark.parametrize("option", ["--device", "--accelerator"])  # the second is the former name
def test_device_of_train_is_a_setting(option, capsys):
    assert main(["train", "demo", option, "cuda:1", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "accelerator: cuda\n" in printed
    assert "devices: 1,\n" in printed


# -- JSON --------------------------------------------------------------------------------------------------------------


def printed(capsys, *arguments: Any) -> Any:
    """What a command prints on stdout, which is JSON and nothing else."""
    assert main([str(argument) for argument in arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_train_prints_json(tmp_path, capsys):
    tiny = [*TINY, "--data.options={count: 20, size: 16}", "--data.eval_size=16", "--data.size=16"]
    found = printed(capsys, "train", "demo", *tiny, "--epochs=1", "--json", "--out", tmp_path / "run", "--quiet")
    assert found["run"] == str(tmp_path / "run")
    assert found["epochs"] == 1
    assert found["best"]["epoch"] == found["last"]["epoch"] == 1
    assert found["best"]["val_ged"] > 0


def test_demo_asks_the_checkpoint_whether_training_is_done(tiny_run, tmp_path):
    """A kill between metrics.csv and last.ckpt leaves the row of an epoch that has to be trained again."""
    run = shutil.copytree(tiny_run, tmp_path / "run")
    (run / ".ambiseg-lock").touch()
    assert [demo._trained(run, epochs) for epochs in (1, 2, 3)] == [True, True, False]
    assert not (run / ".ambiseg-lock").exists()
    (run / "last.ckpt").unlink()
    assert not demo._trained(run, 2)


def test_report_prints_json(tmp_path, capsys, monkeypatch):
    page, file = tmp_path / "report.html", tmp_path / "report.json"
    monkeypatch.setattr("ambiseg.reporting.report", lambda *arguments, **options: page)
    assert printed(capsys, "report", "--json", "runs/x") == {"report": str(page)}  # runs/x is the run, not a file
    assert main(["report", "runs/x", "--json", str(file)]) == 0  # a file as well as the text
    assert json.loads(file.read_text()) == {"report": str(page)}
    assert capsys.readouterr().out == f"the report is in {page}\n"


def test_data_commands_print_json(tmp_path, capsys):
    out, split = tmp_path / "out", tmp_path / "split.json"
    names = {row["name"]: row["root"] for row in printed(capsys, "data", "list", "--json")}
    assert names["folder"]
    assert not names["nodules"]
    small = ["--set", "count=20", "--set", "size=16"]
    assert printed(capsys, "data", "export", "shapes", *small, "--out", out, "--json") == {
        "folder": str(out), "cases": 20, "title": "shapes",
    }  # fmt: skip
    found = printed(capsys, "data", "split", "shapes", *small, "--out", split, "--json")
    assert found["split"] == str(split)
    assert sum(part["cases"] for part in found["parts"].values()) == 20
    assert printed(capsys, "data", "check", out, "--json")["problems"] == []
    assert {row["key"] for row in printed(capsys, "train", "--settings", "--json")} > {"trainer.epochs"}
    assert "demo" in printed(capsys, "train", "--recipes", "--json")


def test_a_file_that_cannot_be_written_is_named_before_anything_is_done(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (
        ["train", "demo"],
        ["report", "demo"],
        ["evaluate", "demo"],
        ["compare", "demo"],
        ["data", "export", "shapes", "--out", "e"],
    ):
        assert main([*command, "--json", "nowhere/found.json"]) == 2
        assert capsys.readouterr().err.startswith("ambiseg: nowhere/found.json: expected a folder to write into")
    assert list(tmp_path.iterdir()) == []

"""What a study is: its YAML, the configurations of its members, and which runs are the same."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import yaml

from ambiseg._util.errors import DataError
from ambiseg.cli import main
from ambiseg.config import Config, parse
from ambiseg.methods import METHODS
from ambiseg.studies.definition import RESERVED, Definition, column, find, studies
from ambiseg.studies.experiment import Study
from ambiseg.studies.fingerprint import canonical, changes, differing, fingerprint
from ambiseg.studies.members import Start, command_of, merged, resolve, start_of, typed
from tests.conftest import SHARED

NAMES = {
    *("zoo", "ablation", "samples", "one-label", "experts", "architecture", "labels-per-step", "train-size", "sizes"),
    *("gmm", "modes", "objective", "gates"),
}
PLAIN = {  # the least that a study is
    "title": "T",
    "question": "Q?",
    "base": {"small": {"recipe": "demo"}},
    "members": {"one": {}, "two": {"settings": {"model.latent": 2}}},
    "columns": ["ged@16"],
}


def written(folder: Path, name: str = "mine.yaml", **more) -> Path:
    content = {**PLAIN, **more}
    (folder / name).write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return folder / name


# -- the studies of the package ----------------------------------------------------------------------------------------


def test_all_studies_are_there():
    assert set(studies()) == NAMES
    assert not NAMES & set(RESERVED)


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_member_has_a_configuration_without_any_data(name, scale, tmp_path):
    study = Study(name, scale=scale, out=tmp_path, settings={"trainer.epochs": 4} if name == "zoo" else None)
    keys = [member.fingerprint for member in study.members.values() if member is not None]
    assert len(keys) == len(study.definition.rows) == len(set(keys))  # no row is trained twice under two names
    for member in study.members.values():
        assert member is not None
        assert member.config.trainer.threads == 1
        assert member.config.trainer.check_every == member.config.trainer.epochs  # validation at the end only
        words = command_of(member, 2)
        assert words is not None
        again = parse(words[1:], words[0])
        assert (differing(again, member.config), again.seed) == ([], 2)
    assert not any(tmp_path.iterdir())


def test_numbers_of_the_paper_have_their_table():
    for name in NAMES:
        for row in find(name)[1].paper:
            assert row.source.startswith("tab:")
            assert all(0 < number.mean < 200 for number in row.numbers.values())
    full = next(row for row in find("ablation")[1].paper if row.member == "full" and row.source == "tab:ablation")
    assert full.numbers[column("ged@16")] == (0.218, 0.003)


def test_the_zoo_has_every_method_and_its_needs():
    rows = find("zoo")[1].rows
    assert {row.settings["model.method"] for row in rows.values()} == {*METHODS}
    assert rows["car"].settings["model.disc_width"] == 8
    study = Study("zoo", out="nowhere", settings={"trainer.epochs": 4})
    configs = {name: member.config for name, member in study.members.items() if member}
    assert configs["probunet"].optimizer.clip == 1000  # of the method itself, not lost on the way
    assert configs["mose"].model.schedules["capacity"].warm_up == 2


def test_members_of_several_studies_are_trained_once():
    same = [
        ("ablation", "full"),
        ("samples", "mose"),
        ("gmm", "mose"),
        ("experts", "experts-4"),
        ("train-size", "full"),
    ]
    found = set()
    for study, member in [*same, ("labels-per-step", "all"), ("architecture", "default")]:
        one = Study(study).members[member]
        assert one is not None
        found.add(one.fingerprint)
    assert len(found) == 1


def test_a_run_of_the_plain_command_is_the_member():
    """As typed for `ambiseg train`, with the half of the training at γ = 1/2 written out."""
    member = Study("objective").members["transport"]
    typed_out = [
        "--trainer.epochs=20",
        "--trainer.check_every=20",
        "--model.capacity.warm_up=10",
        "--trainer.threads=1",
    ]
    assert member is not None
    config = parse([*typed_out, "--trainer.accelerator=cpu", "--seed=4"], "lidc71-paper")
    assert fingerprint(config) == member.fingerprint


# -- fingerprints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"seed": 5}, True),
        ({"data.workers": 3}, True),
        ({"data.cache": None}, True),
        ({"trainer.accelerator": "cpu"}, True),
        ({"trainer.tensorboard": True}, True),
        ({"trainer.look": False}, True),
        ({"trainer.threads": 1}, False),  # may change the last digits
        ({"trainer.epochs": 11}, False),
        ({"trainer.devices": 2}, False),
        ({"data.seed": 1}, False),
        ({"model.experts": 5}, False),
        ({"model.capacity.warm_up": 6}, False),
        ({"evaluation.protocol": "kohl2018"}, False),
    ],
)
def test_fingerprints(settings, same):
    plain = Config.from_recipe("demo")
    changed = plain.with_settings(settings)
    assert (fingerprint(plain) == fingerprint(changed)) is same
    assert (differing(plain, changed) == []) is same


def test_one_file_has_one_fingerprint(tmp_path, monkeypatch):
    (tmp_path / "d.npz").touch()
    (tmp_path / "link.npz").symlink_to(tmp_path / "d.npz")
    monkeypatch.chdir(tmp_path)
    roots = ["d.npz", str(tmp_path / "d.npz"), "link.npz", "./d.npz"]
    keys = {fingerprint(Config.from_recipe("lidc71", {"data.root": root})) for root in roots}
    assert len(keys) == 1
    assert fingerprint(Config.from_recipe("lidc71", {"data.root": "e.npz"})) not in keys


def test_a_setting_that_a_version_adds_changes_no_fingerprint():
    """Only what differs from the defaults counts; all else is compared when a run is used."""
    config = Config.from_recipe("lidc71")
    assert "model.latent" not in changes(config)
    assert "model.latent" in canonical(config)
    assert changes(config)["model.method"] == "mose"


# -- layers ------------------------------------------------------------------------------------------------------------


def test_later_layers_win_and_take_what_belongs_to_them():
    start = Start("lidc71", {"backbone.channels": [8, 16], "model.experts": 6, "trainer.epochs": 10})
    config, _ = resolve(start, [{"model.method": "probunet"}, {"backbone.name": "unet-light"}], {"optimizer.lr": 0.01})
    assert (config.model.method, config.optimizer.lr, config.trainer.epochs) == ("probunet", 0.01, 10)
    assert config.backbone.channels is None
    whole = merged([{"model.capacity.warm_up": 3}, {"model.capacity": 1}])
    assert whole == {"model.capacity": 1}


@pytest.mark.parametrize(
    ("base", "member", "last", "expected"),
    [
        ({}, {}, {}, (27, 1)),  # 54 epochs: as the recipe says
        ({"trainer.epochs": 20}, {}, {}, (10, 1)),
        ({"trainer.epochs": 10, "model.capacity.warm_up": 8}, {}, {}, (8, 1)),  # written for 10 epochs
        ({"trainer.epochs": 10, "model.capacity.warm_up": 8}, {}, {"trainer.epochs": 20}, (16, 2)),
        ({"trainer.epochs": 10}, {"trainer.epochs": 54}, {}, (27, 1)),
        ({"trainer.epochs": 10}, {}, {"model.capacity.warm_up": 9}, (9, 1)),  # what was typed stays
        ({"trainer.epochs": 10}, {}, {"trainer.epochs": 20, "model.capacity.warm_up": 9}, (9, 1)),
    ],
)
def test_schedules_keep_their_share_of_the_training(base, member, last, expected):
    config, _ = resolve(Start("lidc71", base), [member], last)
    schedule = config.model.schedules["capacity"]
    assert (schedule.warm_up, schedule.epochs) == expected


def test_typed_settings():
    assert typed(["--data.root", "a: b", "--model.capacity={values: [0.5, 1]}", "--data.size", "64"]) == {
        "data.root": "a: b",
        "model.capacity": {"values": [0.5, 1]},
        "data.size": 64,
    }


def test_data_of_another_kind_are_planned_for(tmp_path):
    base = find("ablation")[1].base["small"]
    (tmp_path / "mine.npz").touch()
    assert start_of(base, str(tmp_path / "mine.npz"), None).recipe == "lidc71-paper"
    assert start_of(base, None, None).settings == {"trainer.epochs": 10}
    (tmp_path / "scans").mkdir()
    folder = start_of(base, str(tmp_path / "scans"), None)
    assert (folder.recipe, folder.settings["data.name"]) == ("auto", "folder")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").touch()
    assert start_of(base, str(tmp_path / "store"), None).recipe == "auto"
    assert start_of(find("ablation")[1].base["paper"], str(tmp_path / "store"), None).recipe == "lidc"
    assert start_of(base, "nodules", None).recipe == "demo"
    assert start_of(base, str(tmp_path / "mine.npz"), "auto").recipe == "auto"
    assert start_of(find("modes")[1].base["small"], str(tmp_path / "mine.npz"), None).recipe == "camvid"
    with pytest.raises(DataError, match=r"expected a folder, an \.npz, a store or one of nodules, shapes"):
        start_of(base, "nowhere", None)


# -- what is no study --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"members": None}, "members: expected members or axes, found neither"),
        ({"columns": ["gedd@16"]}, "did you mean ged?"),
        ({"columns": ["ged"]}, "columns: expected ged@MASKS, found 'ged'"),
        ({"columns": ["ged@2000"]}, "columns: expected at most 1,024 masks"),
        ({"columns": []}, "columns: expected at least 1 values"),
        ({"colums": ["ged@16"]}, "colums: no such setting; did you mean columns?"),
        ({"base": {"large": {"recipe": "demo"}}}, "base: expected"),
        ({"base": {"paper": {"recipe": "demo"}}}, "base: expected small"),
        ({"base": {"small": {"recipe": "demoo"}}}, "did you mean demo?"),
        ({"members": {"../x": {}}}, "members: expected names of letters, digits"),
        ({"members": {"a": {"settings": {"model.expert": 3}}}}, "mine, member a: model.expert: no such setting"),
        ({"members": {"a": {"settings": {"model.experts": "x"}}}}, "member a: model.experts: expected a whole number"),
        ({"members": {"a": {"seeds": 0}}}, "mine.yaml: members.a.seeds: expected at least 1"),
        ({"members": {"a": 3}}, "members: expected"),
        ({"reference": {"member": "on"}}, "reference: expected the name of a member, found 'on'; did you mean one?"),
        ({"paper": [{"member": "one", "source": "t", "values": {"ged@16": "good"}}]}, "expected a number, or one as"),
        ({"paper": [{"member": "one", "source": "t", "values": {"ece@16": 1}}]}, "columns: expected ece@16"),
        ({"axes": {"model.latent": list(range(1, 60)), "model.experts": list(range(1, 60))}}, "at most 1,000 members"),
        ({"train": False}, "columns: expected parameters or megabytes without training"),
    ],
)
def test_what_is_no_study_is_one_line(more, message, tmp_path, capsys):
    path = written(tmp_path, **more)
    assert main(["study", str(path), "--table", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    "text", ["", "- 1\n", "a: &a [*a]\n", "title: [", "title: T\ntitle: U\n", "\0", "x" * 10_000_000]
)
def test_hostile_yaml_is_one_line(text, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["study", str(tmp_path / "mine.yaml")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "mine.yaml: " in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ablatoin"], "expected one of ablation, architecture, "),
        (["nowhere.yaml"], "nowhere.yaml: expected a study, found no such file"),
        (["ablation"], "study ablation: expected --data, where the arrays data are, found none"),
        (["ablation", "--data", "nowhere"], "nowhere: expected a folder"),
        (["ablation", "--seed", "3"], "--seed: expected --seeds N"),
        (["ablation", "--only", "ful"], "--only: expected some of iou-loss, uniform, deterministic, full, found 'ful'"),
        (["ablation", "--only", "full:x"], "--only: expected MEMBER or MEMBER:SEED, found 'full:x'"),
        (["ablation", "--trainer.epoch", "3"], "trainer.epoch: no such setting; did you mean trainer.epochs?"),
        (["ablation", "--base", "nothing", "--table"], "recipe: expected one of auto, "),
        (["zoo", "--scale", "large"], "expected one of small, paper, found 'large'"),
    ],
)
def test_what_cannot_be_run_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["study", *words])
    except SystemExit as stop:  # of the parser
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1
    assert message in error
    assert os.listdir(tmp_path) == [] or words[-1] == "--table"


def test_names_of_shared_folders_are_refused(tmp_path, capsys):
    path = written(tmp_path, "members.yaml")
    assert main(["study", str(path)]) == 2
    assert "expected a name of letters" in capsys.readouterr().err


# -- commands ----------------------------------------------------------------------------------------------------------


def test_studies_are_listed(capsys):
    assert main(["study"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(NAMES)


def test_one_command_per_member(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "it's mine.npz"
    data.touch()
    words = [
        "study",
        "ablation",
        "--data",
        str(data),
        "--seeds",
        "2",
        "--out",
        "my runs",
        "--model.latent",
        "2",
        "--list",
    ]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for line, member in zip(lines, find("ablation")[1].rows, strict=True):
        again = shlex.split(line)
        given = again[again.index("study") :]
        assert given == [*words[:-1][:4], "--seeds", "2", "--out", "my runs", "--model.latent", "2", "--only", member]
    assert not (tmp_path / "my runs").exists()


def test_sizes_need_no_data_and_no_training(tmp_path, capsys):
    assert main(["study", "sizes", "--out", str(tmp_path), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    table = (tmp_path / "sizes" / "table.md").read_text()
    assert "| Prob. U-Net | 19.04 | 76.15 | 76.15 |" in table
    page = (tmp_path / "sizes" / "index.html").read_text()
    assert "tab:model_size" in page
    assert "Counted, not trained" in page


def test_axes_are_members():
    rows = Definition(
        **{**PLAIN, "members": {}, "axes": {"model.latent": [1, 2], "model.stochastic": [True, False]}}
    ).rows
    assert list(rows) == [f"latent-{n}_stochastic-{b}" for n in (1, 2) for b in ("true", "false")]
    assert rows["latent-2_stochastic-false"].settings == {"model.latent": 2, "model.stochastic": False}


@pytest.mark.skipif(not (SHARED / "paper").is_dir(), reason="the paper's source is absent")
def test_typed_in_numbers_are_those_of_the_paper():
    """Every number of every row occurs in the table of that label."""
    text = next((SHARED / "paper").glob("*.tex")).read_text(encoding="utf-8")
    for name in NAMES:
        for row in find(name)[1].paper:
            place = text.index(f"\\label{{{row.source}}}")
            body = text[place : text.index("\\end{table}", place)]
            for given in row.values.values():
                for part in str(given).split("±"):
                    digits = part.strip().removeprefix("0").rstrip("0")
                    assert digits in body, (name, row.member, row.source, given)

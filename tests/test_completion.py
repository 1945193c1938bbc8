"""Tab completion: what the shells themselves answer, and that it knows what the code knows."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from ambiseg.cli import main, parser, subparsers
from ambiseg.cli.options import known_settings
from ambiseg.config import Config, recipes
from ambiseg.data.config import DATASETS
from ambiseg.metrics import PROTOCOLS
from ambiseg.nn.config import BACKBONES
from ambiseg.settings import keys
from tests.tools import tool

ASKED = {  # what is typed, the last word being completed -> what is offered
    "ambiseg ": {
        *("demo", "train", "ensemble", "evaluate", "compare", "predict", "prune", "report", "study", "methods", "data"),
        *("completion", "calibrate", "export", "look", "serve", "view"),
    },
    "ambiseg ev": {"evaluate"},
    "ambiseg train au": {"auto"},
    "ambiseg train lidc-": {"lidc-light", "lidc-one-label"},
    "ambiseg study abl": {"ablation"},
    "ambiseg study ablation --base lidc-": {"lidc-light", "lidc-one-label"},
    "ambiseg study ablation --trainer.epo": {"--trainer.epochs"},
    "ambiseg train demo --trainer.epo": {"--trainer.epochs"},
    "ambiseg demo --optimizer.l": {"--optimizer.lr"},
    "ambiseg train demo --data.name s": {"shapes", "store"},
    "ambiseg train demo --data.name=s": {"shapes", "store"},
    "ambiseg train demo --data.name=shapes --trainer.epo": {"--trainer.epochs"},
    "ambiseg train demo --trainer.deterministic ": {"true", "false"},
    "ambiseg train demo --prin": {"--print-config"},
    "ambiseg evaluate --protocol k": {"kohl2018"},
    "ambiseg evaluate --trainer.epo": set(),
    "ambiseg data ch": {"check"},
    "ambiseg data check --labels ": {"auto", "ids", "binary"},
    "ambiseg data prepare li": {"lidc"},
    "ambiseg data prepare lidc --al": {"--align"},
    "ambiseg data export no": {"nodules"},
    "ambiseg predict runs/x --dicom ": {"series", "files"},
    "ambiseg predict m": {"my folder"},
    "ambiseg train demo --data.root m": {"my folder"},
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    (folder / "here" / "my folder").mkdir(parents=True)
    for shell in ("bash", "zsh", "fish"):
        code = f"import sys; from ambiseg.cli import main; main(['completion', '{shell}'])"
        code += "; print('torch' in sys.modules, file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stderr == "False\n"  # a shell that starts does not wait for PyTorch
        (folder / shell).write_text(done.stdout)
    return folder


def answers(scripts, shell: str, program: list[str]) -> list[set[str]]:
    """What a shell prints for each of ``ASKED``, which the program separates by lines of ``==``."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    text = "\n".join([f"source '{scripts / shell}'", *program])
    options = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [shell, *options], input=text, capture_output=True, text=True, cwd=scripts / "here", timeout=60
    )
    assert done.stderr == ""
    return [set(part.split("\n")) - {""} for part in done.stdout.split("==\n")[:-1]]


def test_bash(scripts):
    program = []
    for asked in ASKED:
        words = asked.replace("=", " = ").split(" ")  # as bash divides them
        given = " ".join(f"'{word}'" for word in words)
        program.append(f"COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; _ambiseg 2>/dev/null")
        program.append(r"""printf '%s\n' "${COMPREPLY[@]}"; echo ==""")
    assert dict(zip(ASKED, answers(scripts, "bash", program), strict=True)) == ASKED
    last = answers(scripts, "bash", ["complete -p ambiseg", "echo =="])
    assert last == [{"complete -F _ambiseg ambiseg"}]


def test_zsh(scripts):
    """With stand-ins for what zsh's line editor provides; they choose by prefix, as it does."""
    program = [
        "compadd() { shift; for one in $@; [[ $one == $cur* ]] && print -r -- $one }",
        "_files() { print -rl -- $cur*(N) }",
        "compset() { }",
    ]
    (scripts / "zsh.plain").write_text("compdef() { }\n" + (scripts / "zsh").read_text())
    shutil.copy(scripts / "zsh.plain", scripts / "zsh")
    for asked in ASKED:
        given = [f"'{word}'" for word in asked.split(" ")]
        program.append(f"words=({' '.join(given)}); CURRENT={len(given)}; _ambiseg; echo '=='")
    assert dict(zip(ASKED, answers(scripts, "zsh", program), strict=True)) == ASKED


def test_fish(scripts):
    program = [f"complete -C '{asked}' | string replace -r '\\t.*' ''; echo ==" for asked in ASKED]
    found = dict(zip(ASKED, answers(scripts, "fish", program), strict=True))
    plain = {
        asked: {word.removeprefix("--data.name=").replace("\\", "").rstrip("/") for word in words}
        for asked, words in found.items()
    }
    assert plain == ASKED


def test_the_list_of_settings_is_that_of_the_code():
    listed = tool("settings_table").WORDS.read_text(encoding="utf-8")
    assert listed == tool("settings_table").words(), "run: python tools/settings_table.py"
    known = known_settings()
    assert {key for key in keys(Config, {"model": {}}) if key.count(".") == 1} - known.keys() <= {"data.augment"}
    assert known["data.name"] == [*DATASETS]
    assert known["backbone.name"] == [*BACKBONES]
    assert known["evaluation.protocol"] == [*PROTOCOLS]


def test_every_command_and_option_is_in_every_script(scripts):
    for shell in ("bash", "zsh", "fish"):
        text = (scripts / shell).read_text()
        for name, below in subparsers(parser()).items():
            assert name in text
            for option in below._option_string_actions:
                dashes, name = ("-l ", option[2:]) if option.startswith("--") else ("-s ", option[1:])
                assert (f"{dashes}{name} " if shell == "fish" else option) in text
        assert all(recipe in text for recipe in recipes())


def test_another_shell_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["completion", "tcsh"])
    assert stop.value.code == 2
    assert "expected one of bash, zsh, fish, found 'tcsh'" in capsys.readouterr().err

"""What a core installation can do, and the one line that says what to install for the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ambiseg._util.extras import _BRINGS
from tests.conftest import REPOSITORY

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no reader of TOML")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
WITH_TORCH = ("filelock", "jinja2")  # every installation has them
BLOCKED = [name for names in _BRINGS.values() for name in names if name not in WITH_TORCH]
BLOCK = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.split(".")[0] in BLOCKED else found(name, *more)
"""


def without_extras(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED!r}))\n"  # None: importing it fails
    return subprocess.run(
        [sys.executable, "-c", blocked + code], cwd=folder, capture_output=True, text=True, timeout=200
    )


def test_the_extras_of_the_project_are_those_that_messages_name():
    extras = PROJECT["optional-dependencies"]
    for extra, libraries in _BRINGS.items():
        named = {entry.split(">")[0].replace("pillow", "PIL").replace("-", "_") for entry in extras[extra]}
        assert set(libraries) <= named, extra
    assert not any("<" in entry for entry in PROJECT["dependencies"]), "users are not bound to a newest version"
    assert any(entry.startswith("torch==") for entry in (REPOSITORY / "constraints.txt").read_text().splitlines())


def test_metrics_losses_and_models_need_no_extra(tmp_path):
    code = """
import torch, ambiseg
model = ambiseg.MoSE(1, 2, backbone="unet-light")
readers = torch.randint(2, (1, 3, 32, 32))
model.loss(torch.rand(1, 1, 32, 32), readers)["total"].backward()
trained = ambiseg.load("demo")
masks = trained.predict(trained.card.prepare(torch.zeros(1, 1, 32, 32))).sample(4)
print(ambiseg.ged(masks, readers).shape, ambiseg.matched_iou(masks, readers).shape)
"""
    done = without_extras(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.Size([1]) torch.Size([1])"


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import ambiseg; ambiseg.train(ambiseg.Config(), 'run')", "train"),
        ("import ambiseg; ambiseg.streaming", "train"),
        ("import ambiseg; ambiseg.evaluate('demo')", "train"),
        ("import ambiseg; ambiseg.report('demo')", "train"),
        ("from ambiseg.cli import main; sys.exit(main(['train', 'demo', '--out', 'run']))", "train"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(tmp_path, code, extra):
    done = without_extras(code, tmp_path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(f"found none; install it with: pip install 'ambiseg[{extra}]'"), done.stderr
    if "main" in code:
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()

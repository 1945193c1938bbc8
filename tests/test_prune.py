"""Fewer strata: which draw alike, what merging does, how many are needed, and the folder of the new run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ambiseg import MoSE, familiarity
from ambiseg.cli import main
from ambiseg.familiarity import saved_familiarity
from ambiseg.methods.base import Method
from ambiseg.pruning import Trade, candidates, clustered_error, merge_order, pick, trade_offs
from ambiseg.runs import Run, load

RNG = np.random.default_rng(0)


def slow_cost(A: np.ndarray, w: np.ndarray, g: list[int], h: list[int]) -> float:
    """Ward's cost of joining two groups, by loops over pairs of strata."""

    def expected(one: list[int], other: list[int], weights: np.ndarray, apart: np.ndarray) -> float:
        total = sum(weights[i] * weights[j] for i in one for j in other)
        return sum(weights[i] * weights[j] * apart[i, j] for i in one for j in other) / total

    found = []
    for apart, weights in zip(A, w, strict=True):
        energy = 2 * expected(g, h, weights, apart) - expected(g, g, weights, apart) - expected(h, h, weights, apart)
        ours, theirs = weights[g].sum(), weights[h].sum()
        found.append(ours * theirs / (ours + theirs) * max(energy, 0))
    return float(np.mean(found))


def test_merges_are_those_of_a_slow_search():
    points = RNG.random((3, 6, 2))  # squared distances of points are of negative type, as 1 − IoU is
    A = np.square(points[:, :, None] - points[:, None]).sum(3)
    w = RNG.dirichlet(np.ones(6), 3)
    found = merge_order(A, w)
    groups = [[k] for k in range(6)]
    while len(groups) > 1:
        pairs = [(slow_cost(A, w, groups[i], groups[j]), i, j) for j in range(len(groups)) for i in range(j)]
        _, i, j = min(pairs)
        groups[i] = sorted(groups[i] + groups.pop(j))
        assert found[len(groups)] == groups


def test_a_stratum_without_weight_goes_first_and_alike_ones_next():
    A = np.array([[[0.0, 1.0, 0.9, 0.9], [1.0, 0.0, 0.8, 0.8], [0.9, 0.8, 0.1, 0.1], [0.9, 0.8, 0.1, 0.1]]])
    found = merge_order(A, np.array([[0.5, 0.0, 0.3, 0.2]]))
    assert sorted(map(len, found[3])) == [1, 1, 2]
    assert any(1 in group and len(group) == 2 for group in found[3]) or [2, 3] in found[3]
    assert found[4] == [[0], [1], [2], [3]]
    assert [2, 3] in [sorted(set(group) - {1}) for group in found[2]]
    assert found[1] == [[0, 1, 2, 3]]


def test_numbers_that_are_tried():
    assert candidates(1) == [1]
    assert candidates(4) == [4, 3, 2, 1]
    assert candidates(50)[:6] == [50, 40, 32, 26, 21, 17]
    assert all(a > b for a, b in zip(candidates(500), candidates(500)[1:], strict=False))


def test_the_fewest_within_one_standard_error_of_the_best_by_patient():
    patients = ["a", "a", "b", "b", "c", "c"]
    full = np.array([0.2, 0.2, 0.2, 0.2, 0.2, 0.2])
    alike = full + np.array([0.02, 0.02, -0.02, -0.02, 0.01, 0.01])
    worse = full + 0.05
    table = trade_offs(
        {3: (1, 0, full, [[0], [1], [2]]), 2: (0.9, 0.01, alike, [[0, 1], [2]]), 1: (0.5, 0.2, worse, [[0, 1, 2]])},
        patients,
    )
    assert [one.strata for one in table] == [3, 2, 1]
    assert table[1].groups == ((1, 2), (3,))
    difference = alike - full
    expected = np.std([difference[:2].mean(), difference[2:4].mean(), difference[4:].mean()], ddof=1) / np.sqrt(3)
    assert table[1].error == pytest.approx(expected)
    assert table[1].more == pytest.approx(difference.mean())
    assert pick(table) == 2
    assert table[2].more == pytest.approx(0.05)
    assert clustered_error(np.array([1.0, 2.0, 4.0]), ["a", "b", "c"]) == pytest.approx(
        np.std([1, 2, 4], ddof=1) / np.sqrt(3)
    )
    assert pick([Trade(1, 1, 0, 0.1, 0.0, 0.0, ())]) == 1


def test_merging_keeps_the_latent_of_the_most_used_and_sums_fixed_weights():
    model = MoSE(1, 2, "unet-light", experts=4, latent=2, expert_weights=[0.1, 0.2, 0.3, 0.4], capacity=0.3, samples=1)
    made = model.merged([[0, 2], [1, 3]], [0.1, 0.2, 0.3, 0.4])
    assert made.config.experts == 2
    assert made.config.samples == 2  # two experts of one sample could not hold all annotations at γ = 0.3
    assert torch.equal(made.experts.mean, model.experts.mean[[2, 3]])
    image = torch.rand(1, 1, 16, 16)
    assert made.predict(image).weights[0].tolist() == pytest.approx([0.4, 0.6])
    assert torch.equal(made.predict(image).features.dense, model.predict(image).features.dense)
    assert model.config.experts == 4  # the other is as it was
    assert len(model.experts.mean) == 4
    learned = MoSE(1, 2, "unet-light", experts=3)
    same = learned.merged([[0], [1], [2]], [0.2, 0.3, 0.5])
    assert torch.allclose(same.predict(image).weights, learned.predict(image).weights)
    assert torch.equal(same.predict(image).centres(), learned.predict(image).centres())


def test_methods_whose_strata_cannot_be_merged_say_so():
    from ambiseg.methods import METHODS

    assert {name for name, method in METHODS.items() if method.merged is not Method.merged} == {"mose"}


def test_prune_writes_a_run_that_every_command_takes(tiny_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(familiarity, "FEWEST", 2)  # the tiny set has few validation images
    out = tmp_path / "fewer"
    assert main(["prune", str(tiny_run), "--strata", "2", "--steps", "3", "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["chosen"] == 2
    assert [row["strata"] for row in said["table"]] == [4, 2]
    assert said["table"][0]["kept"] == pytest.approx(1)
    assert said["table"][0]["distance"] == pytest.approx(0, abs=0.05)  # of the full model to itself
    assert sorted(k for group in said["table"][1]["groups"] for k in group) == [1, 2, 3, 4]
    run = Run(out)
    assert run.config.model.model_dump()["experts"] == 2
    assert run.members[0]["best"] == Run(tiny_run).digest("best")
    assert json.loads((out / "prune.json").read_text())["chosen"] == 2
    assert saved_familiarity(run) is not None
    model = load(out)
    assert model.predict(torch.rand(1, 1, 32, 32)).weights.shape == (1, 2)  # type: ignore[attr-defined]
    full = load(tiny_run).method.state_dict()
    kept = model.method.state_dict()
    for name, tensor in full.items():
        if name.startswith("backbone.") or name.startswith("head."):
            assert torch.equal(kept[name], tensor), name  # only experts and gate are fitted
    assert main(["evaluate", str(out), "--quiet"]) == 0
    assert main(["train", "--resume", str(out)]) == 2


def test_faults_are_one_line(tiny_run, tmp_path, capsys):
    assert main(["prune", str(tiny_run), "--strata", "9", "--out", str(tmp_path / "new")]) == 2
    assert "--strata: expected auto or 1 to 4" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("")
    assert main(["prune", str(tiny_run), "--out", str(tmp_path / "there")]) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err
    assert list(Path(tmp_path / "there").iterdir()) == [tmp_path / "there" / "file"]

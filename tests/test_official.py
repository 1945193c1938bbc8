from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import ambiseg
from tests.conftest import SHARED

GOLDEN = SHARED / "golden"


@pytest.fixture(params=["lidc", "city"])
def released(request):
    """A checkpoint of the released code and what that code computed with it."""
    path = GOLDEN / f"official_{request.param}_small.pth"
    if not path.exists():
        pytest.skip(f"golden checkpoints absent: set AMBISEG_SHARED to the folder that holds golden/{path.name}")
    with np.load(GOLDEN / f"official_{request.param}_small_io.npz") as arrays:
        return path, {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def test_released_checkpoints_predict_the_released_numbers(released):
    path, io = released
    model = ambiseg.load_official(path)
    assert not model.training
    predictive = model.predict(io["image"])
    with torch.no_grad():
        for logits in (predictive.logits(io["latents"]), model.head(predictive.features.dense, io["latents"])):
            assert torch.allclose(logits, io["logits"], atol=1e-4, rtol=0)
    assert torch.allclose(predictive.features.gate, io["bottleneck"], atol=1e-4, rtol=0)
    assert torch.allclose(predictive.features.dense, io["dense"], atol=1e-4, rtol=0)
    assert torch.allclose(predictive.expert_weights, io["expert_probs"], atol=1e-5, rtol=0)


def synthetic(prefix: str = "") -> dict[str, torch.Tensor]:
    """A checkpoint with the released names, three levels, K=3, L=2, C=4: every tensor its own random numbers."""
    g = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}

    def put(name: str, *shape: int) -> None:
        state[prefix + name] = torch.rand(*shape, generator=g) + 0.1

    def block(name: str, first: int, inputs: int, outputs: int) -> None:
        for i in range(3):
            conv, norm = first + 3 * i, first + 3 * i + 1
            put(f"{name}.{conv}.weight", outputs, inputs if i == 0 else outputs, 3, 3)
            put(f"{name}.{conv}.bias", outputs)
            for part in ("weight", "bias", "running_mean", "running_var"):
                put(f"{name}.{norm}.{part}", outputs)

    channels, F, L, K, C = (4, 6, 8), 4, 2, 3, 4
    for i, width in enumerate(channels):
        block(f"backbone.contracting_path.{i}.layers", int(i > 0), 2 if i == 0 else channels[i - 1], width)
    block("backbone.upsampling_path.0.conv_block.layers", 0, 8 + 6, 6)
    block("backbone.upsampling_path.1.conv_block.layers", 0, 6 + 4, 4)
    put("mu", K, L)
    put("log_sigma", K, L)
    for i, outputs in ((0, 8), (2, 8), (4, K)):
        put(f"gating.fc_layer.{i}.weight", outputs, 8)
        if i < 4:
            put(f"gating.fc_layer.{i}.bias", outputs)
    for name in ("residual", "scale"):
        put(f"fuse.{name}.weight", F, L)
        put(f"fuse.{name}.bias", F)
    put("fuse.last_layer.weight", F + L, F, 1, 1)
    put("fuse.last_layer.bias", F + L)
    for i in range(3):
        put(f"layers.convolution.{i}.convolution.0.weight", F, F + L if i == 0 else F, 1, 1)
        put(f"layers.convolution.{i}.convolution.0.bias", F)
        for part in ("weight", "bias", "running_mean", "running_var"):
            put(f"layers.convolution.{i}.convolution.1.{part}", F)
    put("last_layer.weight", C, F, 1, 1)
    put("last_layer.bias", C)
    return state


@pytest.mark.parametrize("prefix", ["", "module."])
def test_everything_is_read_off_the_shapes(tmp_path, prefix):
    torch.save(synthetic(prefix), tmp_path / "model.pth")
    model = ambiseg.load_official(tmp_path / "model.pth")
    assert (model.classes, model.experts.count, model.experts.latent) == (4, 3, 2)
    images, latents = torch.randn(1, 2, 8, 8), torch.randn(1, 2, 2)
    predictive = model.predict(images)
    assert predictive.sample(3).labels.shape == (1, 3, 8, 8)

    # the head once more, from the names and the description of the released code
    w = synthetic()

    def conv(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"])

    x = predictive.features.dense
    for n in range(2):
        shift, scale = (w[f"fuse.{k}.weight"] @ latents[0, n] + w[f"fuse.{k}.bias"] for k in ("residual", "scale"))
        h = conv((x + shift[:, None, None]) * (scale[:, None, None] + 1e-5), "fuse.last_layer")
        for i in range(3):
            name = f"layers.convolution.{i}.convolution"
            mean, var, weight, bias = (
                w[f"{name}.1.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
            )
            h = torch.nn.functional.batch_norm(conv(h, f"{name}.0"), mean, var, weight, bias, eps=1e-3).relu()
        expected = conv(h, "last_layer")
        with torch.no_grad():
            found = predictive.logits(latents)[:, n]
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


class _Exploit:
    def __reduce__(self):
        return (print, ("code from the checkpoint ran",))


def test_other_files_are_named_and_nothing_in_them_runs(tmp_path, capsys):
    path = tmp_path / "model.pth"
    good = synthetic()
    short = {k: v for k, v in good.items() if k != "fuse.scale.bias"}
    cases = {
        "text": (lambda: path.write_text("hello"), "cannot be read as a checkpoint"),
        "cut short": (lambda: (torch.save(good, path), path.write_bytes(path.read_bytes()[:500])), "cannot be read"),
        "code": (lambda: path.write_bytes(pickle.dumps({"mu": _Exploit()})), "cannot be read as a checkpoint"),
        "a list": (lambda: torch.save([1], path), "expected a state dict of tensors"),
        "another method": (
            lambda: torch.save({"encoder.weight": torch.ones(1)}, path),
            "expected mu, .* found parts enc",
        ),
        "missing": (lambda: torch.save(short, path), "missing fuse.scale.bias"),
        "unknown": (lambda: torch.save({**good, "extra.weight": torch.ones(1)}, path), "unexpected extra.weight"),
        "wrong shape": (
            lambda: torch.save({**good, "fuse.scale.bias": torch.ones(9)}, path),
            r"\[9\], expected floats \[4\]",
        ),
    }
    first = "layers.convolution.0.convolution.0.weight"
    changes = {
        "transposed": ({first: good[first].transpose(0, 1)}, r"\[6, 4, 1, 1\], expected floats \[4, 6\]"),
        "a gate with a bias": ({"gating.fc_layer.4.bias": torch.ones(3)}, "unexpected gating.fc_layer.4.bias"),
        "flat mu": ({"mu": torch.ones(3)}, "mu must be 2-dimensional floats"),
        "complex mu": ({"mu": torch.ones(3, 2, dtype=torch.complex64)}, "found torch.complex64"),
        "no classes": ({"last_layer.weight": torch.tensor(1.0)}, "last_layer.weight must be 4-dimensional"),
    }
    for name, (change, message) in changes.items():
        cases[name] = (lambda change=change: torch.save({**good, **change}, path), message)
    for name, (write, message) in cases.items():
        write()
        with pytest.raises(ValueError, match=message) as caught:
            ambiseg.load_official(path)
        assert "model.pth" in str(caught.value), name
        assert "\n" not in str(caught.value), name
    assert "ran" not in capsys.readouterr().out
    with pytest.raises(FileNotFoundError):
        ambiseg.load_official(tmp_path / "absent.pth")

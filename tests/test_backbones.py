"""Every backbone passes the same tests; below them, what is particular to each."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ambiseg.nn.deeplab import DeepLabV3Plus, ResNet
from ambiseg.nn.features import Adapter, Backbone, pad_to_multiple
from ambiseg.nn.smp import smp_backbone
from ambiseg.nn.unet import FULL, LIGHT, BatchNorm, UNet, from_official
from tests.conftest import SHARED

SEVEN = (3, 4, 5, 6, 7, 8, 9)  # all different, so that a wrong width cannot go unnoticed
FOUR = (3, 4, 5, 6)


def foreign(in_channels: int) -> Adapter:
    """A network that knows nothing of ambiseg, whose features are half the image's size."""
    first = nn.Conv2d(in_channels, 6, 3, stride=2, padding=1)
    network = nn.Sequential(first, nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1))
    return Adapter(network, dense=4, gate=6, gate_from="0")


OURS: dict[str, Callable[[int], Backbone]] = {
    "unet": lambda c: UNet(c, SEVEN),
    "unet-phiseg": lambda c: UNet(c, SEVEN, decoder="phiseg", convs=2),
    "unet-4": lambda c: UNet(c, FOUR, gate_level=1 / 3),
    "unet-4-phiseg": lambda c: UNet(c, FOUR, decoder="phiseg", bias=True, inject_level=2 / 3),
    "unet-early": lambda c: UNet(c, SEVEN, inject_level=1 / 3, gate_level=2 / 3),
    "deeplab": lambda c: DeepLabV3Plus(c, depth=18, width=8),
}
EVERY = OURS | {"foreign": foreign}

every_backbone = pytest.mark.parametrize("build", EVERY.values(), ids=EVERY)
our_backbones = pytest.mark.parametrize("build", OURS.values(), ids=OURS)


def run(backbone: Backbone, images: Tensor) -> tuple[Tensor, Tensor]:
    """What the head and the gate read."""
    features = backbone(images)
    if not features.skips:
        return features.dense, features.gate
    return backbone.finish(features.dense, features, (images.shape[2], images.shape[3])), features.gate


def close(x: Tensor, y: Tensor) -> bool:
    """Equal up to rounding. Untrained networks have features of any scale, so the largest one sets it."""
    return x.shape == y.shape and bool((x - y).abs().max() <= 1e-4 * y.abs().max()) and bool(y.any())


# -- every backbone ------------------------------------------------------------------------------------------


@every_backbone
@pytest.mark.parametrize(("channels", "size"), [(1, (37, 53)), (2, (64, 16)), (3, (16, 65)), (4, (1, 1))])
def test_shapes(build, channels, size):
    backbone = build(channels).eval()
    images = torch.randn(2, channels, *size)
    features = backbone(images)
    assert features.dense.shape[:2] == (2, backbone.dense_channels)
    assert features.gate.shape[:2] == (2, backbone.gate_channels)
    if not features.skips:
        assert features.dense.shape[2:] == size
        assert backbone.head_channels == backbone.dense_channels
    head, _ = run(backbone, images)
    assert head.shape == (2, backbone.head_channels, *size)
    assert head.isfinite().all()


@every_backbone
def test_gradients_reach_every_parameter(build):
    backbone = build(2)
    outputs = run(backbone, torch.randn(3, 2, 70, 65))  # random weights below: a plain sum is constant under a norm
    torch.stack([(x * torch.randn_like(x)).sum() for x in outputs]).sum().backward()
    for name, weight in backbone.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.ndim < 4 or weight.grad.count_nonzero(), name


@every_backbone
def test_evaluation_is_deterministic_and_image_by_image(build):
    backbone = build(1).eval()
    images = torch.randn(3, 1, 33, 20)
    once, again, alone = run(backbone, images), run(backbone, images), run(backbone, images[1:2])
    for x, y, z in zip(once, again, alone, strict=True):
        assert torch.equal(x, y)
        assert close(x[1:2], z)


@every_backbone
def test_one_image_trains(build):
    backbone = build(1)
    optimiser = torch.optim.SGD(backbone.parameters(), lr=1e-3)
    before = {name: weight.clone() for name, weight in backbone.state_dict().items()}
    head, gate = run(backbone, torch.randn(1, 1, 16, 16))  # deeper than 4 levels, a single pixel is left of it
    ((head * torch.randn_like(head)).sum() + gate.square().sum()).backward()
    optimiser.step()
    assert all(weight.isfinite().all() for weight in backbone.state_dict().values())
    first = next(name for name in before if before[name].ndim == 4)
    assert not torch.equal(before[first], backbone.state_dict()[first])


@every_backbone
def test_state_dict_round_trip(build):
    one, other = build(1), build(1)
    images = torch.randn(2, 1, 20, 20)
    run(one, images)  # moves the running statistics, which must travel too
    one.eval()
    other.eval()
    assert not torch.equal(run(one, images)[0], run(other, images)[0])
    other.load_state_dict(one.state_dict())
    for x, y in zip(run(one, images), run(other, images), strict=True):
        assert torch.equal(x, y)


@our_backbones
def test_any_size_is_the_padded_image_cropped(build):
    backbone = build(2).eval()
    multiple = backbone.multiple
    assert multiple == (16 if isinstance(backbone, DeepLabV3Plus) else 2 ** len(backbone.up))
    images = torch.randn(1, 2, 37, 53)
    rows, columns = (torch.arange(-(-size // multiple) * multiple).clamp(max=size - 1) for size in (37, 53))
    padded = images[:, :, rows][:, :, :, columns]
    assert torch.equal(run(backbone, images)[0], run(backbone, padded)[0][:, :, :37, :53])
    assert pad_to_multiple(padded, multiple) is padded


@our_backbones
@pytest.mark.parametrize("shape", [(2, 1, 32, 32), (3, 32, 32), (2, 3, 0, 32)])
def test_wrong_images(build, shape):
    with pytest.raises(ValueError, match=r"expected images \[B, 3, H, W\], found \[" + ", ".join(map(str, shape))):
        build(3)(torch.zeros(shape))


@pytest.mark.filterwarnings("ignore")
def test_monai_unet():
    nets = pytest.importorskip("monai.networks.nets", reason="MONAI is not installed")
    network = nets.UNet(spatial_dims=2, in_channels=1, out_channels=8, channels=(8, 16, 32), strides=(2, 2))
    features = Adapter(network, dense=8, gate=32, gate_from="model.1.submodule.1.submodule")(torch.randn(2, 1, 32, 48))
    assert features.dense.shape == (2, 8, 32, 48)
    assert features.gate.shape == (2, 32, 8, 12)


# -- the U-Net -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "decoder", "megabytes"),
    [(FULL, "released", 36.97), (FULL, "phiseg", 41.26), (LIGHT, "released", 9.06)],
)
def test_published_sizes(channels, decoder, megabytes):
    with torch.device("meta"):
        unet = UNet(1, channels, decoder)
    assert round(sum(weight.numel() for weight in unet.parameters()) * 4 / 1e6, 2) == megabytes
    assert unet.dense_channels == (32 if decoder == "released" else 64)


@pytest.mark.parametrize(
    ("fraction", "step"), [(0.01, 1), (1 / 6, 1), (1 / 3, 2), (1 / 2, 3), (2 / 3, 4), (5 / 6, 5), (0.99, 6), (1, 6)]
)
def test_levels_of_gate_and_noise(fraction, step):
    unet = UNet(1, SEVEN, gate_level=fraction, inject_level=fraction).eval()
    features = unet(torch.zeros(1, 1, 128, 64))
    assert features.gate.shape == (1, SEVEN[step], 128 // 2**step, 64 // 2**step)
    level = 6 - step  # steps that are left
    assert features.dense.shape == (1, SEVEN[level], 128 // 2**level, 64 // 2**level)
    assert [skip.shape[1] for skip in features.skips] == list(reversed(SEVEN[:level]))
    assert (unet.dense_channels, unet.gate_channels, unet.head_channels) == (SEVEN[level], SEVEN[step], 3)


@pytest.mark.parametrize("decoder", ["released", "phiseg"])
@pytest.mark.parametrize("level", [1 / 3, 2 / 3])
def test_noise_may_enter_early(decoder, level):
    """Without noise the features are those of the same U-Net in one go; with it, each sample is its own."""
    whole, early = UNet(1, FOUR, decoder).eval(), UNet(1, FOUR, decoder, inject_level=level).eval()
    early.load_state_dict(whole.state_dict())
    images = torch.randn(2, 1, 19, 22)
    assert close(run(early, images)[0], run(whole, images)[0])

    features = early(images)
    noisy = features.dense.repeat_interleave(3, 0)
    noisy = noisy + torch.randn_like(noisy)
    together = early.finish(noisy, features, (19, 22))
    assert together.shape == (6, whole.dense_channels, 19, 22)
    for image in range(2):
        one = early(images[image : image + 1])
        for sample in range(3):
            i = 3 * image + sample
            assert close(early.finish(noisy[i : i + 1], one, (19, 22))[0], together[i])
    with pytest.raises(ValueError, match="for each of 2 images, found 5 maps"):
        early.finish(noisy[:5], features, (19, 22))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decoder": "phi"}, "decoder must be one of released, phiseg, found 'phi'"),
        ({"gate_level": 0}, "gate_level must be a fraction above 0 and at most 1, found 0"),
        ({"inject_level": 1.5}, "inject_level must be a fraction above 0 and at most 1, found 1.5"),
        ({"channels": (8,)}, r"at least two levels.*found.*channels=\(8,\)"),
        ({"convs": 0}, "one convolution in each, found.*convs=0"),
        ({"in_channels": 0}, "found in_channels=0"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        UNet(**{"in_channels": 1, **arguments})


def test_initial_weights():
    unet = UNet(1, (32, 64))
    conv = unet.up.get_submodule("0.0")
    assert isinstance(conv, nn.Conv2d)
    assert conv.bias is not None
    assert conv.weight.std().item() == pytest.approx((2 / (96 * 9)) ** 0.5, rel=0.02)
    assert 0 < conv.bias.abs().max() <= 0.002
    assert not any("0.bias" in name for name, _ in UNet(1, (4, 4), decoder="phiseg", convs=1).named_parameters())


def test_batch_norm_of_one_value():
    ours, theirs = BatchNorm(2, momentum=0.5), nn.BatchNorm2d(2, momentum=0.5)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    several = torch.randn(1, 2, 2, 3) + 5  # one image, but several values
    assert torch.equal(ours(several), theirs(several))  # both learn the statistics
    one = torch.randn(1, 2, 1, 1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        theirs(one)
    assert torch.equal(ours(one), theirs.eval()(one))
    assert torch.equal(ours.state_dict()["running_var"], theirs.state_dict()["running_var"])


# -- checkpoints of the released code ------------------------------------------------------------------------


def official(unet: UNet) -> dict[str, Tensor]:
    """A U-Net's weights under the released names: pooling is layer 0 of each level but the first."""
    state: dict[str, Tensor] = {}
    for i, block in enumerate(unet.down):
        for j, layer in enumerate(block.children(), start=1 if i else 0):
            for name, weight in layer.state_dict().items():
                state[f"backbone.contracting_path.{i}.layers.{j}.{name}"] = weight
    for i, block in enumerate(unet.up):
        for name, weight in block.state_dict().items():
            state[f"backbone.upsampling_path.{i}.conv_block.layers.{name}"] = weight
    return state


@pytest.mark.parametrize("name", ["lidc", "city"])
def test_the_released_code_computes_the_same(name):
    folder = SHARED / "golden"
    if not (folder / f"official_{name}_small.pth").exists():
        pytest.skip(f"released weights absent: set AMBISEG_SHARED to the folder that holds golden/official_{name}_*")
    state = torch.load(folder / f"official_{name}_small.pth", weights_only=True)
    state = {key.removeprefix("module."): weight for key, weight in state.items()}
    golden = {key: torch.from_numpy(x) for key, x in np.load(folder / f"official_{name}_small_io.npz").items()}
    unet = from_official({key: weight for key, weight in state.items() if key.startswith("backbone.")}).eval()
    features = unet(golden["image"])
    assert torch.allclose(features.gate, golden["bottleneck"], atol=1e-4)
    assert torch.allclose(features.dense, golden["dense"], atol=1e-4)


@pytest.mark.parametrize("counters", [True, False])
def test_from_official_takes_names_and_widths(counters):
    unet = UNet(2, (3, 5, 4, 6), convs=2)
    unet(torch.randn(2, 2, 16, 16))  # moves the running statistics
    state = {key: w for key, w in official(unet).items() if counters or not key.endswith("num_batches_tracked")}
    images = torch.randn(1, 2, 16, 24)
    loaded = from_official(state).eval()
    assert torch.equal(loaded(images).dense, unet.eval()(images).dense)


def test_from_official_names_what_is_wrong():
    def raises(message: str, state: dict[str, Tensor]) -> None:
        with pytest.raises(ValueError, match=message):
            from_official(state)

    state = official(UNet(1, (2, 3, 4)))
    key = "backbone.upsampling_path.0.conv_block.layers.0.weight"
    raises(f"^released U-Net: weights missing: {key}$", {k: weight for k, weight in state.items() if k != key})
    raises("weights unexpected: mu$", state | {"mu": torch.zeros(4, 1)})
    raises("unexpected: a, b, c and 2 more$", state | dict.fromkeys("abcde", torch.zeros(1)))
    raises(rf"of another shape: {key} \(expected \[3, 7, 3, 3\], found \[4\]\)$", state | {key: torch.zeros(4)})
    raises(r"key backbone\.contracting.*found mu, sigma$", {"mu": torch.zeros(1), "sigma": torch.zeros(1)})
    raises("found an empty one", {})
    # PHiSeg's decoder is wider than the released one.
    raises("weights of another shape: backbone.upsamp", official(UNet(1, (2, 3, 4), decoder="phiseg", bias=True)))


# -- DeepLabv3+ ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "weights", "keys"), [(18, 11_176_512, 120), (50, 23_508_032, 318), (101, 42_500_160, 624)]
)
def test_encoder_is_the_resnet_of_torchvision_without_its_classifier(depth, weights, keys):
    with torch.device("meta"):
        resnet = ResNet(3, depth)
    state = resnet.state_dict()
    assert sum(weight.numel() for weight in resnet.parameters()) == weights
    assert len(state) == keys
    assert {"conv1.weight", "bn1.running_var", "layer1.0.conv1.weight", "layer4.1.bn2.bias"} <= state.keys()
    assert {"layer2.0.downsample.0.weight", "layer4.0.downsample.1.running_mean"} <= state.keys()
    assert ("layer1.0.downsample.0.weight" in state) == (depth > 18)


@pytest.mark.parametrize("depth", [18, 50])
def test_dilation_refines_the_ordinary_network(depth):
    """At every other pixel, or every fourth, stands what the ordinary ResNet computes."""
    networks = {stride: ResNet(1, depth, stride).eval() for stride in (8, 16, 32)}
    for network in networks.values():
        network.load_state_dict(networks[32].state_dict())
    images = torch.randn(1, 1, 64, 96)
    deep = {stride: network(images)[1] for stride, network in networks.items()}
    assert deep[8].shape[2:] == (8, 12)
    assert close(deep[16][:, :, ::2, ::2], deep[32])
    assert close(deep[8][:, :, ::2, ::2], deep[16])


def test_other_strides_and_depths():
    deeplab = DeepLabV3Plus(1, 18, width=4, output_stride=8).eval()
    features = deeplab(torch.zeros(1, 1, 20, 33))
    assert features.gate.shape == (1, 256, 3, 5)
    assert features.dense.shape == (1, 4, 20, 33)
    dilations = [module.dilation for module in deeplab.pyramid.modules() if isinstance(module, nn.Conv2d)]
    assert [(rate, rate) for rate in (12, 24, 36)] == dilations[1:4]  # twice those of stride 16: 6, 12, 18
    with pytest.raises(ValueError, match="depth must be one of 18, 50, 101, found 34"):
        DeepLabV3Plus(3, depth=34)
    with pytest.raises(ValueError, match="output_stride must be one of 8, 16, 32, found 4"):
        DeepLabV3Plus(3, depth=18, output_stride=4)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_imagenet_weights(tmp_path, channels):
    resnet = ResNet(3, 18, output_stride=16)
    fc = {"fc.weight": torch.zeros(10, 512), "fc.bias": torch.zeros(10)}
    torch.save(resnet.state_dict() | fc, tmp_path / "resnet18.pth")
    deeplab = DeepLabV3Plus(channels, depth=18, width=4)
    deeplab.load_imagenet(tmp_path / "resnet18.pth")
    grey = torch.randn(1, 1, 32, 32)
    expected = resnet.eval()(grey.expand(-1, 3, -1, -1))
    found = deeplab.eval().encoder(grey.expand(-1, channels, -1, -1))
    for x, y in zip(expected, found, strict=True):
        assert close(y, x)
    colour = torch.randn(1, 3, 32, 32)
    assert channels != 3 or torch.equal(resnet(colour)[1], deeplab.encoder(colour)[1])


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("code in the file ran",))


def test_imagenet_files_that_are_not(tmp_path):
    deeplab = DeepLabV3Plus(3, depth=18, width=4)
    path = tmp_path / "weights.pth"
    for content, message in (
        ({"conv1.weight": torch.zeros(64, 3, 7, 7)}, r"weights\.pth: weights missing: bn1\.weight, .* and 96 more"),
        ({"state_dict": {}}, "expected a state dict"),
        ([torch.zeros(1)], "expected a state dict"),
        (Trap(), "expected a file of weights"),
    ):
        torch.save(content, path)
        with pytest.raises(ValueError, match=message):
            deeplab.load_imagenet(path)
    for rubbish in (b"", b"not a checkpoint", pickle.dumps({1: 2}, protocol=2)):
        path.write_bytes(rubbish)
        with pytest.raises(ValueError, match=r"weights\.pth: expected a"):
            deeplab.load_imagenet(path)
    with pytest.raises(FileNotFoundError):
        deeplab.load_imagenet(tmp_path / "absent.pth")


# -- segmentation-models-pytorch, played by a stand-in -------------------------------------------------------


class FakeEncoder(nn.Module):
    out_channels, output_stride = (2, 7), 4

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 7, 4, stride=4)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x, self.conv(x)]


class FakeUnet(nn.Module):
    def __init__(self, encoder_name, encoder_weights, in_channels, classes=1, aux_params=None):
        super().__init__()
        assert (encoder_name, encoder_weights) == ("resnet18", None)
        self.encoder = FakeEncoder(in_channels)
        self.decoder = nn.ConvTranspose2d(7, 6, 2, stride=2)
        self.segmentation_head = nn.Sequential(nn.Conv2d(6, classes, 3, padding=1), nn.Upsample(scale_factor=2))

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2] % 4 == x.shape[3] % 4 == 0  # as the real ones insist
        return self.segmentation_head(self.decoder(self.encoder(x)[-1]))


def test_smp(monkeypatch):
    module = ModuleType("segmentation_models_pytorch")
    module.__dict__.update(Unet=FakeUnet, Headless=nn.Identity, version="0")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    backbone = smp_backbone("Unet", "resnet18", in_channels=2, classes=3)
    assert isinstance(backbone, Adapter)
    features = backbone(torch.randn(2, 2, 37, 53))
    assert (backbone.dense_channels, backbone.gate_channels) == (6, 7)
    assert features.dense.shape == (2, 6, 37, 53)
    assert features.gate.shape == (2, 7, 10, 14)
    assert not any("head" in name for name, _ in backbone.named_parameters())
    with pytest.raises(ValueError, match=r"expected images \[B, 2, H, W\]"):
        backbone(torch.zeros(1, 3, 8, 8))
    for name in ("Onet", "version"):
        with pytest.raises(ValueError, match=f"no architecture '{name}'"):
            smp_backbone(name)
    with pytest.raises(ValueError, match="Headless has no segmentation_head"):
        smp_backbone("Headless")
    with pytest.raises(ValueError, match="aux_params"):
        smp_backbone("Unet", "resnet18", aux_params={"classes": 2})


def test_smp_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(ImportError, match=r"pip install segmentation-models-pytorch.*torchvision"):
        smp_backbone()

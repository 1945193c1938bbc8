"""Every format that is read, as an image and as a mask; and one line for every file that is not."""

from __future__ import annotations

import struct
from pathlib import Path

import nibabel
import numpy as np
import pytest
import tifffile
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ambiseg.io.errors import FileError
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions, Source
from tests.files import save, save_deep_png, save_dicom, save_nifti, save_series

MASK = ReadOptions(mask=True)
RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (6, 5), dtype=np.uint8)
DEEP = RNG.integers(0, 65536, (6, 5), dtype=np.uint16)
COLOUR = RNG.integers(0, 256, (6, 5, 3), dtype=np.uint8)
DEEP_COLOUR = RNG.integers(0, 65536, (6, 5, 3), dtype=np.uint16)
FLOATS = RNG.normal(0, 100, (6, 5)).astype(np.float32)
STACK = RNG.integers(0, 4000, (4, 6, 5), dtype=np.int16)


def read(path: Path, how: ReadOptions | None = None, k: int = 0) -> np.ndarray:
    """A slice, after a look that the header promised just that."""
    source = open_source(path, how)
    pixels = source.read(k)
    assert pixels.shape == (source.channels, *source.size)
    assert pixels.dtype == source.dtype
    assert pixels.dtype.isnative
    return pixels


def place(source: Source) -> np.ndarray:
    assert source.affine is not None
    return source.affine


def channels_first(pixels: np.ndarray) -> np.ndarray:
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def refusal(path: Path, how: ReadOptions | None = None, k: int = 0) -> str:
    with pytest.raises(FileError) as caught:
        open_source(path, how).read(k)
    assert caught.value.problem.file.startswith(str(path.parent))
    assert "\n" not in str(caught.value)
    return f"{caught.value.problem.code} {caught.value.problem.message}"


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pixels", [GREY, DEEP, COLOUR], ids=["8 bit", "16 bit", "colour"])
@pytest.mark.parametrize("suffix", [".png", ".PNG", ".tif", ".TIFF", ".bmp"])
def test_pictures_come_back_as_they_were_written(tmp_path, pixels, suffix):
    if suffix == ".bmp" and pixels.dtype != np.uint8:
        pytest.skip("BMP has no 16 bits")
    path = save(tmp_path / f"a b{suffix}", pixels)
    assert np.array_equal(read(path), channels_first(pixels))
    assert np.array_equal(read(path, MASK), channels_first(pixels))


def test_sixteen_bit_colour_keeps_all_sixteen(tmp_path):
    assert np.array_equal(read(save_deep_png(tmp_path / "a.png", DEEP_COLOUR)), channels_first(DEEP_COLOUR))
    opaque = np.concatenate([DEEP_COLOUR, np.full((6, 5, 1), 65535, np.uint16)], -1)
    assert np.array_equal(read(save_deep_png(tmp_path / "b.png", opaque)), channels_first(DEEP_COLOUR))
    clear = opaque.copy()
    clear[0, 0, 3] = 65534
    assert refusal(save_deep_png(tmp_path / "c.png", clear)) == "E203 expected opaque pixels, found 1 transparent pixel"


def test_one_bit_is_bool_in_a_mask_and_black_and_white_in_an_image(tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(GREY > 127).save(path)
    assert np.array_equal(read(path, MASK), (GREY > 127)[None])
    assert np.array_equal(read(path), ((GREY > 127) * np.uint8(255))[None])


def test_a_palette_is_ids_in_a_mask_and_colours_in_an_image(tmp_path):
    ids = RNG.integers(0, 3, (6, 5), dtype=np.uint8)
    table = np.array([[0, 0, 0], [255, 0, 0], [0, 200, 100]], np.uint8)
    picture = Image.fromarray(ids)
    picture.putpalette(table.flatten().tolist())
    picture.save(tmp_path / "a.png")
    picture.save(tmp_path / "a.tif")
    for name in ("a.png", "a.tif"):
        assert np.array_equal(read(tmp_path / name, MASK), ids[None])
        assert np.array_equal(read(tmp_path / name), channels_first(table[ids]))
        assert np.array_equal(read(tmp_path / name, ReadOptions(mask=True, coloured=True)), channels_first(table[ids]))


def test_opaque_alpha_is_dropped_and_glass_refused(tmp_path):
    opaque = np.concatenate([COLOUR, np.full((6, 5, 1), 255, np.uint8)], -1)
    for name in ("a.png", "a.tif"):
        assert np.array_equal(read(save(tmp_path / name, opaque)), channels_first(COLOUR))
    opaque[2:4, 1, 3] = 7
    for name in ("a.png", "a.tif"):
        assert refusal(save(tmp_path / name, opaque)) == "E203 expected opaque pixels, found 2 transparent pixels"


def test_a_photograph_is_turned_as_its_camera_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    flat = np.full((8, 16, 3), 128, np.uint8)
    flat[:, :8] = 20
    pixels = read(save(tmp_path / "a.jpg", flat, exif=exif, quality=100))
    assert pixels.shape == (3, 16, 8)
    assert pixels[0, :6].max() < 60
    assert pixels[0, 10:].min() > 90


@pytest.mark.parametrize("pixels", [FLOATS, STACK[0], DEEP_COLOUR, DEEP], ids=["float", "int16", "colour", "uint16"])
@pytest.mark.parametrize("options", [{}, {"compression": "zlib", "predictor": False}, {"byteorder": ">"}], ids=str)
def test_tiff_of_any_depth(tmp_path, pixels, options):
    tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="rgb" if pixels.ndim == 3 else "minisblack", **options)
    assert np.array_equal(read(tmp_path / "a.tif"), channels_first(pixels))


def test_tiff_with_pages_is_a_volume(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", STACK, photometric="minisblack")
    source = open_source(tmp_path / "a.tif")
    assert source.form == "4 slices of 6×5"
    for k, pixels in enumerate(STACK):
        assert np.array_equal(read(tmp_path / "a.tif", k=k), pixels[None])
    colours = RNG.integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "b.tif", colours, photometric="rgb")
    assert np.array_equal(read(tmp_path / "b.tif", k=2), channels_first(colours[2]))


def test_tiff_with_planes_of_colour(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", np.moveaxis(COLOUR, -1, 0), photometric="rgb", planarconfig="separate")
    assert np.array_equal(read(tmp_path / "a.tif"), channels_first(COLOUR))


def test_tiff_in_lzw_needs_no_further_package(tmp_path):
    for name, pixels in (("a", GREY), ("b", DEEP), ("c", COLOUR)):
        path = save(tmp_path / f"{name}.tif", pixels, compression="tiff_lzw")
        assert np.array_equal(read(path), channels_first(pixels))


def test_tiff_where_zero_is_white_is_turned_in_images_alone(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", GREY, photometric="miniswhite")
    assert np.array_equal(read(tmp_path / "a.tif"), (255 - GREY)[None])
    assert np.array_equal(read(tmp_path / "a.tif", MASK), GREY[None])


# -- arrays ------------------------------------------------------------------------------------------------------------

KINDS = ["bool", "uint8", "uint16", "int16", "int64", "float32", "float64", ">u2", ">f4"]


@given(st.sampled_from(KINDS), st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_arrays_come_back_in_native_order(tmp_path_factory, kind, height, width, seed):
    pixels = np.random.default_rng(seed).integers(0, 2, (height, width)).astype(kind)
    path = tmp_path_factory.mktemp("arrays") / "a.npy"
    np.save(path, pixels)
    assert np.array_equal(read(path), pixels[None])
    np.savez_compressed(path.with_suffix(".npz"), pixels)
    assert np.array_equal(read(path.with_suffix(".npz")), pixels[None])


@pytest.mark.parametrize("axes", ["HWC", "CHW", "DHW", "DHWC", "DCHW"])
def test_axes_are_as_declared(tmp_path, axes):
    lengths = {"D": 4, "C": 3, "H": 6, "W": 5}
    array = RNG.integers(0, 9, [lengths[a] for a in axes])
    np.save(tmp_path / "a.npy", array)
    source = open_source(tmp_path / "a.npy", ReadOptions(axes=axes))
    assert (source.slices, source.channels, source.size) == (lengths["D"] ** ("D" in axes), 3 ** ("C" in axes), (6, 5))
    ordered = np.moveaxis(array, [axes.index(a) for a in "DCHW" if a in axes], range(len(axes)))
    assert np.array_equal(
        read(tmp_path / "a.npy", ReadOptions(axes=axes)).squeeze(), (ordered[0] if "D" in axes else ordered)
    )


def test_a_mask_has_the_axes_of_its_image_without_the_channels(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 6, 5), np.uint8))
    assert open_source(tmp_path / "a.npy", ReadOptions(mask=True, axes="DHWC")).form == "4 slices of 6×5"
    np.save(tmp_path / "a.npy", np.zeros((6, 5), np.uint8))
    assert open_source(tmp_path / "a.npy", ReadOptions(mask=True, axes="HWC")).form == "6×5"


def test_archives_name_their_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", image=GREY, mask=GREY // 128, note=np.zeros(3))
    assert np.array_equal(read(tmp_path / "a.npz"), GREY[None])
    assert np.array_equal(read(tmp_path / "a.npz", MASK), (GREY // 128)[None])
    np.savez(tmp_path / "b.npz", left=GREY, right=GREY)
    assert refusal(tmp_path / "b.npz") == "E201 expected one array or one called 'image', found left, right"


def test_pickles_are_not_opened(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], object), allow_pickle=True)
    assert refusal(tmp_path / "a.npy") == "E201 expected numbers, found pickled objects, which are not opened"
    np.savez(tmp_path / "a.npz", np.array([{"a": 1}], object))
    assert refusal(tmp_path / "a.npz").startswith("E201 expected numbers, found pickled objects")


# -- NIfTI -------------------------------------------------------------------------------------------------------------

PLACE = np.array([[-0.8, 0, 0, 30], [0, 0.8, 0, -40], [0, 0, 2.5, 7], [0, 0, 0, 1.0]])


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_nifti_slices_are_seen_as_radiologists_see_them(tmp_path, suffix):
    """Stored left, front, up: the first row is the front, the first column the patient's right."""
    volume = RNG.integers(-1000, 1000, (5, 6, 4), dtype=np.int16)
    path = save_nifti(tmp_path / f"a{suffix}", volume, PLACE)
    source = open_source(path)
    assert (source.form, source.dtype) == ("4 slices of 6×5", np.int16)
    for k in range(4):
        assert np.array_equal(read(path, k=k)[0], volume[:, ::-1, k].T)
    assert open_source(path, ReadOptions(axis=0)).form == "5 slices of 4×6"
    assert np.array_equal(read(path, ReadOptions(axis=0), k=1)[0], volume[1, ::-1, ::-1].T)


@given(st.permutations(range(3)), st.tuples(*[st.sampled_from([1, -1])] * 3), st.sampled_from([0, 1, 2]), st.booleans())
def test_a_mask_in_any_voxel_order_lies_on_its_image(tmp_path_factory, order, flips, axis, packed):
    """The same mask written with its axes permuted and reversed (and its affine to match) is read the same."""
    folder = tmp_path_factory.mktemp("nifti")
    volume = np.random.default_rng(1).integers(0, 2, (3, 4, 5), dtype=np.uint8)
    image = open_source(save_nifti(folder / "image.nii", volume, PLACE), ReadOptions(axis=axis))
    turn = np.array([(place, flip) for place, flip in zip(order, flips, strict=True)])
    turned = nibabel.orientations.apply_orientation(volume, turn)
    affine = PLACE @ nibabel.orientations.inv_ornt_aff(turn, volume.shape)
    path = save_nifti(folder / ("mask.nii.gz" if packed else "mask.nii"), turned, affine)
    mask = open_source(path, ReadOptions(mask=True, axis=axis, like=image))
    assert mask.form == image.form
    assert np.allclose(place(mask), place(image))
    for k in range(image.slices):
        assert np.array_equal(mask.read(k), image.read(k))


def test_nifti_of_two_and_of_four_axes(tmp_path):
    flat = save_nifti(tmp_path / "a.nii", GREY)
    assert open_source(flat).form == "5×6"
    assert np.array_equal(read(flat)[0], GREY[::-1, ::-1].T)
    several = RNG.normal(size=(5, 6, 4, 3)).astype(np.float32)
    path = save_nifti(tmp_path / "b.nii.gz", several, PLACE)
    assert np.array_equal(read(path, k=2), np.moveaxis(several[:, ::-1, 2], -1, 0).swapaxes(1, 2))
    assert refusal(path, MASK) == "E201 expected three axes, found shape 5×6×4×3"


def test_nifti_scaling_is_applied(tmp_path):
    path = save_nifti(tmp_path / "a.nii", np.arange(8, dtype=np.int16).reshape(2, 2, 2), PLACE)
    content = bytearray(path.read_bytes())
    content[112:120] = struct.pack("<ff", 0.5, -3)  # slope and intercept
    path.write_bytes(bytes(content))
    found = np.stack([read(tmp_path / "a.nii", k=k)[0] for k in range(2)])
    assert found.dtype == np.float32
    assert sorted(found.flatten().tolist()) == [k / 2 - 3 for k in range(8)]


def test_a_compressed_volume_is_decoded_once(tmp_path, monkeypatch):
    path = save_nifti(tmp_path / "a.nii.gz", np.zeros((5, 6, 40), np.float64), PLACE)
    source = open_source(path, MASK)
    source.read(0)
    path.write_bytes(b"gone")
    assert source.read(39).dtype == np.uint8  # kept, and in the fewest bytes


# -- DICOM -------------------------------------------------------------------------------------------------------------


def test_dicom_in_hounsfield_units(tmp_path):
    raw = RNG.integers(0, 4096, (6, 5), dtype=np.uint16)
    path = save_dicom(tmp_path / "a.dcm", raw, BitsStored=12, RescaleSlope=1, RescaleIntercept=-1024)
    assert np.array_equal(read(path)[0], raw.astype(np.int16) - 1024)
    assert np.array_equal(read(path, MASK)[0], raw)  # class ids are no shades
    path = save_dicom(tmp_path / "b.dcm", raw, RescaleSlope=1, RescaleIntercept=-1024)
    assert read(path).dtype == np.int32  # 16 bits less 1024 do not fit into int16
    path = save_dicom(tmp_path / "c.dcm", raw, RescaleSlope=0.5, RescaleIntercept=1)
    assert np.array_equal(read(path)[0], (raw * 0.5 + 1).astype(np.float32))


def test_dicom_where_zero_is_white(tmp_path):
    raw = RNG.integers(0, 4096, (6, 5), dtype=np.uint16)
    path = save_dicom(tmp_path / "a.dcm", raw, BitsStored=12, PhotometricInterpretation="MONOCHROME1")
    assert np.array_equal(read(path)[0], 4095 - raw)
    assert np.array_equal(read(path, MASK)[0], raw)


def test_dicom_in_colour_and_in_frames(tmp_path):
    assert np.array_equal(read(save_dicom(tmp_path / "a.dcm", COLOUR)), channels_first(COLOUR))
    path = save_dicom(tmp_path / "b.dcm", STACK, NumberOfFrames=4)
    assert open_source(path).form == "4 slices of 6×5"
    assert np.array_equal(read(path, k=3)[0], STACK[3])


def test_a_series_is_sorted_by_position_not_by_name(tmp_path):
    folder = save_series(tmp_path / "series 1", STACK)
    source = open_source(folder)
    assert source.form == "4 slices of 6×5"
    assert not source.notes
    for k, pixels in enumerate(STACK):
        assert np.array_equal(read(folder, k=k)[0], pixels)
    assert np.allclose(place(source) @ [1, 2, 3, 1], [10 - 3 * 0.75, 20 - 2 * 0.5, 7, 1])


def test_a_nifti_mask_of_a_dicom_series(tmp_path):
    """As converters write it: columns first, rows from back to front, and an affine to the right, front and up."""
    image = open_source(save_series(tmp_path / "series", STACK))
    ids = RNG.integers(0, 2, STACK.shape, dtype=np.uint8)
    affine = np.array([[-0.75, 0, 0, 10], [0, 0.5, 0, 20 - 0.5 * 5], [0, 0, 2, 5], [0, 0, 0, 1]])
    path = save_nifti(tmp_path / "mask.nii.gz", ids.transpose(2, 1, 0)[:, ::-1], affine)
    mask = open_source(path, ReadOptions(mask=True, like=image))
    assert np.allclose(place(mask), place(image))
    assert np.array_equal(np.stack([mask.read(k)[0] for k in range(4)]), ids)


def test_a_series_with_a_gap_is_noted(tmp_path):
    folder = save_series(tmp_path / "s", np.concatenate([STACK, STACK]))
    (folder / "003.dcm").unlink()  # the first slice: no gap
    assert not open_source(folder).notes
    (folder / "000.dcm").unlink()
    (note,) = open_source(folder).notes
    assert (note.code, note.file) == ("W208", str(folder))
    assert note.message.startswith("expected steps of 2 between slices, found 4 between")


def test_series_that_are_none(tmp_path):
    folder = save_series(tmp_path / "two", STACK)
    save_dicom(folder / "x.dcm", STACK[0], SeriesInstanceUID="9.9")
    assert refusal(folder) == "E204 expected the slices of one series, found 2: 000.dcm, x.dcm"
    folder = save_series(tmp_path / "again", STACK, ImagePositionPatient=[0, 0, 0])
    assert refusal(folder).startswith("E204 expected one slice per position, found")
    folder = save_series(tmp_path / "nowhere", STACK, ImagePositionPatient=None, InstanceNumber=None)
    assert refusal(folder).startswith("E204 expected a position or an instance number to sort by, found neither")
    folder = save_series(tmp_path / "sizes", STACK)
    save_series(folder / "more", STACK[:1, :4])
    (folder / "more" / "000.dcm").rename(folder / "003.dcm")
    assert "expected 6×5 as" in refusal(folder) or "expected 4×5 as" in refusal(folder)


def test_dicom_objects_that_are_no_pictures(tmp_path):
    path = save_dicom(tmp_path / "a.dcm", GREY, Modality="SEG")
    assert refusal(path) == "E105 expected an image, found a DICOM SEG object"
    path = save_dicom(tmp_path / "b.dcm", GREY, Modality="SR", Rows=None)
    assert refusal(path) == "E204 expected an image, found SR without pixels"


@pytest.mark.parametrize("syntax", ["JPEGLSLossless", "MPEG2MPML"])
def test_dicom_in_a_compression_that_nothing_here_decodes(tmp_path, syntax):
    from pydicom import dcmread, uid

    path = save_dicom(tmp_path / "a.dcm", GREY)
    data = dcmread(path)
    data.file_meta.TransferSyntaxUID = getattr(uid, syntax)
    data["PixelData"].is_undefined_length = True
    data.PixelData = b"\xfe\xff\x00\xe0\x00\x00\x00\x00\xfe\xff\x00\xe0\x04\x00\x00\x00\x00\x00\x00\x00"
    data.save_as(path, enforce_file_format=True)
    with pytest.raises(FileError, match=r"found (JPEG-LS Lossless|MPEG2 Main)") as caught:
        open_source(path).read(0)
    assert caught.value.problem.code == "E202"
    assert "pip install" in caught.value.problem.remedy


def test_dicom_is_known_by_its_first_bytes_where_names_have_no_suffix(tmp_path):
    path = save_dicom(tmp_path / "IM000001", GREY)
    assert np.array_equal(read(path)[0], GREY)
    (tmp_path / "README").write_text("not a picture")
    assert refusal(tmp_path / "README").startswith("E105")

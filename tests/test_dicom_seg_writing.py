"""DICOM SEG of predictions: read back by highdicom and by the library, against the standard, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from pydicom import dcmread, uid
from pydicom.uid import ExplicitVRLittleEndian

import ambiseg
from ambiseg._util.errors import DataError
from ambiseg.cli import main
from ambiseg.io.open import open_source
from ambiseg.io.source import ReadOptions
from ambiseg.masks import MaskDistribution
from ambiseg.prediction import Draw, Options, Prediction, Strata, write
from ambiseg.prediction.exchange import Exchange
from tests.dicom_fakes import enhanced, file, put_pixels, series, sorted_slices
from tests.dicom_standard import problems
from tests.files import RNG, save

SIZE = (5, 7)  # 35 pixels: frames of one bit per pixel do not end at whole bytes
VOLUME = RNG.integers(-900, 300, (4, *SIZE)).astype(np.int16)
WEIGHTS = (0.5, 0.3, 0.2)
BOTH = Exchange("masks")


def prediction(path, classes=("background", "nodule"), empty=False, strata=2):
    """Three masks of random pixels; the last is empty."""
    source, generator = open_source(path), torch.Generator().manual_seed(0)
    spatial = source.size if source.slices == 1 else (source.slices, *source.size)
    labels = torch.randint(len(classes), (3, *spatial), generator=generator, dtype=torch.uint8)
    labels[2 if not empty else slice(None)] = 0
    marginal = torch.rand(1, len(classes), *spatial, generator=generator)
    marginal /= marginal.sum(1, keepdim=True)
    masks = MaskDistribution(labels[None], torch.tensor([WEIGHTS]), marginal=marginal)
    draws = tuple(Draw(i % strata if strata else None, weight, i) for i, weight in enumerate(WEIGHTS))
    found = Strata("way", torch.tensor([0.75, 0.25]), labels[:2], torch.tensor([[0.75, 0.25]])) if strata else None
    entropy = torch.zeros(spatial)
    return Prediction("scan", masks, draws, found, entropy, tuple(classes), source, "runs/mine", "best", Options())


def written(path, out, forms=BOTH, **options):
    made = prediction(path, **options)
    return made, write(made, out, overview=False, exchange=forms)


def segments(folder, name="masks"):
    from highdicom.seg import segread

    return segread(folder / f"{name}.seg.dcm")


@pytest.fixture
def scan(tmp_path):
    return series(tmp_path / "ct", VOLUME)


# -- what is written ---------------------------------------------------------------------------------------------------


def test_masks_of_a_series_read_back_by_highdicom(scan, tmp_path):
    made, folder = written(scan, tmp_path / "out")
    found, slices = segments(folder), sorted_slices(scan)
    pixels = found.get_pixels_by_source_instance(
        [one.SOPInstanceUID for one in slices], assert_missing_frames_are_empty=True
    )
    np.testing.assert_array_equal(np.moveaxis(pixels, -1, 0), made.masks.labels[0].numpy())
    assert (found.segmentation_type.value, found.SegmentsOverlap, found.number_of_segments) == ("BINARY", "YES", 3)
    assert found.FrameOfReferenceUID == "1.2.3.9"
    (referenced,) = found.ReferencedSeriesSequence
    assert referenced.SeriesInstanceUID == "1.2.3.5"
    uids = {one.ReferencedSOPInstanceUID for one in referenced.ReferencedInstanceSequence}
    assert uids == {one.SOPInstanceUID for one in slices}
    place = {one.SOPInstanceUID: one.ImagePositionPatient for one in slices}
    for group in found.PerFrameFunctionalGroupsSequence:  # every frame lies where the slice does that it names
        source = group.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID
        np.testing.assert_allclose(group.PlanePositionSequence[0].ImagePositionPatient, place[source])
    shared = found.SharedFunctionalGroupsSequence[0]
    assert shared.PixelMeasuresSequence[0].PixelSpacing == [0.5, 0.75]
    assert shared.PixelMeasuresSequence[0].SpacingBetweenSlices == 2
    assert shared.PlaneOrientationSequence[0].ImageOrientationPatient == [1, 0, 0, 0, 1, 0]


def test_the_probability_of_each_mask(scan, tmp_path):
    _, folder = written(scan, tmp_path / "out")
    described = segments(folder).SegmentSequence
    assert [one.SegmentLabel for one in described] == [f"nodule, mask {i}, p={w:.3f}" for i, w in enumerate(WEIGHTS)]
    assert described[1].SegmentDescription == "Mask 1 of 3 weighted masks: nodule. Probability 0.3."
    (algorithm,) = described[1].SegmentationAlgorithmIdentificationSequence
    assert algorithm.AlgorithmParameters == "probability=0.3,masks=mask 1,form=compact,seed=0"
    assert (algorithm.AlgorithmName, algorithm.AlgorithmVersion) == ("ambiseg runs/mine", ambiseg.__version__)
    assert described[0].SegmentedPropertyTypeCodeSequence[0].CodeMeaning == "nodule"
    assert len({one.TrackingUID for one in described}) == 3
    assert len({tuple(one.RecommendedDisplayCIELabValue) for one in described}) == 3
    about = json.loads((folder / "weights.json").read_text())
    assert about["dicom_seg"] == ["masks.seg.dcm", "marginal.seg.dcm"]


def test_the_marginal_is_a_fraction(scan, tmp_path):
    made, folder = written(scan, tmp_path / "out")
    found = segments(folder, "marginal")
    assert (found.SegmentationType, found.SegmentationFractionalType) == ("FRACTIONAL", "PROBABILITY")
    uids = [one.SOPInstanceUID for one in sorted_slices(scan)]
    pixels = found.get_pixels_by_source_instance(uids, assert_missing_frames_are_empty=True)[..., 0]
    assert made.masks.marginal is not None
    np.testing.assert_allclose(pixels, made.masks.marginal[0, 1].numpy(), atol=0.5 / 255 + 1e-6)


def test_a_segment_for_each_stratum(scan, tmp_path):
    made, folder = written(scan, tmp_path / "out", Exchange("strata"))
    found = segments(folder, "strata")
    uids = [one.SOPInstanceUID for one in sorted_slices(scan)]
    pixels = found.get_pixels_by_source_instance(uids, assert_missing_frames_are_empty=True)
    assert made.strata is not None
    np.testing.assert_array_equal(np.moveaxis(pixels, -1, 0), made.strata.centres.numpy())
    assert [one.SegmentLabel for one in found.SegmentSequence] == ["nodule, way 1, p=0.750", "nodule, way 2, p=0.250"]
    assert not (folder / "masks.seg.dcm").exists()


def test_a_segment_for_each_class(scan, tmp_path):
    made, folder = written(scan, tmp_path / "out", classes=("none", "liver", "Läsion"))
    found = segments(folder)
    assert [one.SegmentLabel for one in found.SegmentSequence][:2] == [
        "liver, mask 0, p=0.500",
        "Läsion, mask 0, p=0.500",
    ]
    uids = [one.SOPInstanceUID for one in sorted_slices(scan)]
    pixels = found.get_pixels_by_source_instance(uids, assert_missing_frames_are_empty=True)
    ids = pixels[..., 0::2] + 2 * pixels[..., 1::2]
    np.testing.assert_array_equal(np.moveaxis(ids, -1, 0), made.masks.labels[0].numpy())
    assert segments(folder, "marginal").number_of_segments == 2
    assert problems(folder / "masks.seg.dcm") == []


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_frames_of_one_file(tmp_path, order):
    path = enhanced(tmp_path / "e.dcm", VOLUME, order)
    made, folder = written(path, tmp_path / "out")
    found = segments(folder)
    pixels = found.get_pixels_by_source_frame(
        dcmread(path).SOPInstanceUID, [1, 2, 3, 4], assert_missing_frames_are_empty=True
    )
    np.testing.assert_array_equal(np.moveaxis(pixels, -1, 0), made.masks.labels[0].numpy())
    assert problems(folder / "masks.seg.dcm") == []


def test_one_slice_and_a_picture_without_a_place(tmp_path):
    secondary = tmp_path / "sc.dcm"
    data = file(secondary, uid.SecondaryCaptureImageStorage, Modality="OT", FrameOfReferenceUID=None)
    data.ConversionType, data.PositionReferenceIndicator = "WSD", ""
    put_pixels(data, VOLUME[0])
    data.save_as(secondary, enforce_file_format=True)
    for path in (series(tmp_path / "one", VOLUME[:1]), secondary):
        made, folder = written(path, tmp_path / path.stem / "out")
        first = dcmread(next(path.glob("*.dcm")) if path.is_dir() else path)
        pixels = segments(folder).get_pixels_by_source_instance(
            [first.SOPInstanceUID], assert_missing_frames_are_empty=True
        )
        np.testing.assert_array_equal(np.moveaxis(pixels[0], -1, 0), made.masks.labels[0].numpy())
        assert problems(folder / "masks.seg.dcm") == []
        assert problems(folder / "marginal.seg.dcm") == []


@pytest.mark.parametrize("orientation", [(0, 1, 0, 0, 0, -1), (0.8, 0.6, 0, 0, 0, -1)])
def test_the_library_reads_what_it_wrote(tmp_path, orientation):
    scan = series(tmp_path / "ct", VOLUME, orientation)
    made, folder = written(scan, tmp_path / "out")
    image = open_source(scan)
    for i in range(3):
        said = ReadOptions(mask=True, image=image, segments={str(i + 1): 1})
        mask = open_source(folder / "masks.seg.dcm", said)
        found = np.concatenate([mask.read(k) for k in range(4)])
        np.testing.assert_array_equal(found, made.masks.labels[0, i].numpy())
    mask = open_source(folder / "marginal.seg.dcm", ReadOptions(mask=True, image=image))
    assert made.masks.marginal is not None
    likely = np.round(made.masks.marginal[0, 1].numpy() * 255) >= 128
    np.testing.assert_array_equal(np.concatenate([mask.read(k) for k in range(4)]), likely)


@pytest.mark.parametrize("size", [(5, 7), (5, 8), (3, 3), (4, 8)])
def test_pixels_fill_an_even_number_of_bytes(tmp_path, size):
    """OHIF 3.13 never ends loading a SEG whose packed bits were padded with a byte."""
    scan = series(tmp_path / "ct", RNG.integers(-900, 300, (3, *size)).astype(np.int16))
    made, folder = written(scan, tmp_path / "out")
    found = segments(folder)
    bits = size[0] * size[1] * int(found.NumberOfFrames)
    assert len(found.PixelData) == -(-bits // 8)
    uids = [one.SOPInstanceUID for one in sorted_slices(scan)]
    pixels = found.get_pixels_by_source_instance(uids, assert_missing_frames_are_empty=True)
    np.testing.assert_array_equal(np.moveaxis(pixels, -1, 0), made.masks.labels[0].numpy())
    assert problems(folder / "masks.seg.dcm") == []


def test_predictions_without_any_mark(scan, tmp_path):
    made, folder = written(scan, tmp_path / "out", empty=True)
    found = segments(folder)
    assert (found.number_of_segments, found.NumberOfFrames) == (3, 3)  # on one slice, all zero
    assert not made.masks.labels.any()
    assert not found.pixel_array.any()


def test_probabilities_that_round_to_nothing(scan, tmp_path):
    made = prediction(scan)
    assert made.masks.marginal is not None
    made.masks.marginal[0, 1] *= 0.001
    folder = write(made, tmp_path / "out", overview=False, exchange=BOTH)
    assert not segments(folder, "marginal").pixel_array.any()


def test_the_standard_is_kept(scan, tmp_path):
    """As dicom-validator says, by highdicom's tables of modules and attributes. It finds what is missing."""
    for forms in (BOTH, Exchange("strata")):
        _, folder = written(scan, tmp_path / str(forms.dicom_seg), forms)
        for path in folder.glob("*.seg.dcm"):
            assert problems(path) == []
            data = dcmread(path)
            assert data.file_meta.TransferSyntaxUID == ExplicitVRLittleEndian
            del data.SegmentSequence[0].SegmentLabel, data.StudyInstanceUID
            data.save_as(tmp_path / "broken.dcm")
            assert len(problems(tmp_path / "broken.dcm")) == 2


def test_nothing_of_the_patient_but_what_a_seg_needs(scan, tmp_path):
    _, folder = written(scan, tmp_path / "out")
    for path in folder.iterdir():
        content = path.read_bytes()
        assert b"Secret" not in content
        assert (b"Doe^Jane" in content) == path.name.endswith(".seg.dcm")
    data = dcmread(folder / "masks.seg.dcm")
    assert (data.PatientID, data.StudyInstanceUID, data.AccessionNumber) == ("P-17", "1.2.3.4", "A1")
    assert "PatientAddress" not in data


def test_attributes_that_were_removed_and_names_of_other_alphabets(tmp_path):
    bare = dict.fromkeys(("PatientName", "PatientID", "PatientBirthDate", "StudyID", "StudyDate", "AccessionNumber"))
    scan = series(tmp_path / "ct", VOLUME, PatientSex="UNKNOWN", SpecificCharacterSet="ISO_IR 100", **bare)
    _, folder = written(scan, tmp_path / "out", classes=("a", "x\\y\n" * 30))
    assert problems(folder / "masks.seg.dcm") == []
    assert len(segments(folder).SegmentSequence[0].SegmentLabel) <= 64
    named = series(tmp_path / "named", VOLUME, PatientName="Müller^Ä", SpecificCharacterSet="ISO_IR 100")
    _, folder = written(named, tmp_path / "other")
    assert str(dcmread(folder / "masks.seg.dcm").PatientName) == "Müller^Ä"


# -- what is refused, and the command ----------------------------------------------------------------------------------


def test_what_has_no_segmentation(scan, tmp_path, monkeypatch):
    picture = save(tmp_path / "a.png", np.zeros((8, 8), np.uint8))
    with pytest.raises(DataError, match=r"a\.png: expected a DICOM file or series for DICOM SEG, found PNG"):
        ambiseg.predict("demo", picture, tmp_path / "out", dicom_seg=True)
    assert not (tmp_path / "out" / "a").exists()
    with pytest.raises(DataError, match="expected a DICOM file or series for DICOM SEG, found array"):
        ambiseg.predict("demo", np.zeros((8, 8), np.int16), tmp_path / "out", dicom_seg=True)
    with pytest.raises(DataError, match="dicom_seg: expected True, False, 'masks' or 'strata', found 'all'"):
        ambiseg.predict("demo", scan, tmp_path / "out", dicom_seg="all")
    nameless = series(tmp_path / "nameless", VOLUME, StudyInstanceUID=None)
    with pytest.raises(DataError, match="expected DICOM with StudyInstanceUID, which a SEG refers to, found none"):
        Exchange("masks").check(nameless)
    flat = series(tmp_path / "flat", VOLUME[:1], FrameOfReferenceUID=None)
    with pytest.raises(DataError, match="expected DICOM that a SEG can be made of, found ValueError: Source images"):
        written(flat, tmp_path / "out")
    assert not (tmp_path / "out" / "scan").exists()
    with pytest.raises(DataError, match="expected a method with strata"):
        written(scan, tmp_path / "out", Exchange("strata"), strata=0)
    monkeypatch.setenv("AMBISEG_MAX_PIXELS", "40")
    made = prediction(scan)
    with pytest.raises(DataError, match="expected segments of at most 1,280 bytes"):
        write(made, tmp_path / "out", overview=False, exchange=BOTH)


def test_the_command(scan, tmp_path, capsys):
    save(tmp_path / "both" / "a.png", np.zeros((8, 8), np.uint8))
    scan.rename(tmp_path / "both" / "ct")
    command = ["predict", "demo", str(tmp_path / "both"), "--out", str(tmp_path / "out"), "--samples", "3", "--quiet"]
    assert main([*command, "--no-overview", "--nifti-4d", "--dicom-seg"]) == 1
    told = capsys.readouterr().err
    assert "a.png: expected an image with a position in space for NIfTI with four axes, found PNG" in told
    folder = tmp_path / "out" / "ct"
    kept = MaskDistribution.load(folder / "masks.npz")
    assert segments(folder).number_of_segments == kept.count
    assert (folder / "labels.nii.gz").exists()
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--overwrite", "--dicom-seg", "--dicom-seg-strata"])


@pytest.mark.parametrize("given", [["--dicom-seg"], ["--dicom-seg-strata"], ["--consensus", "dice,iou"]])
def test_an_image_after_an_option_is_an_image(given, tmp_path, capsys, monkeypatch):
    """Whatever it is called."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "strata", np.zeros((8, 8), np.uint8), format="PNG")
    assert main(["predict", "demo", *given, "strata"]) == 2
    assert "strata: expected" in capsys.readouterr().err
    assert not (tmp_path / "predictions").exists()

"""Small DICOM series, segmentations and structure sets, for the tests of what reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import dcmread, uid
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.sr.coding import Code

AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
SPACING = (0.5, 0.75)  # between rows, between columns
CORNER = np.array([-10.0, -20.0, 5.0])
THICK = 2.0
CATEGORY = Code("49755003", "SCT", "Morphologically Abnormal Structure")
TYPE = Code("4147007", "SCT", "Mass")


def file(path: Path, kind: str, **attributes: Any) -> FileDataset:
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = uid.ExplicitVRLittleEndian, uid.UID(kind)
    meta.MediaStorageSOPInstanceUID = uid.generate_uid()
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    data.SOPClassUID, data.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    patient = {"PatientName": "Doe^Jane", "PatientID": "P-17", "PatientBirthDate": "19700101", "PatientSex": "F"}
    study = {"StudyInstanceUID": "1.2.3.4", "StudyID": "1", "StudyDate": "20260102", "StudyTime": "101112"}
    more = {"AccessionNumber": "A1", "ReferringPhysicianName": "", "FrameOfReferenceUID": "1.2.3.9"}
    more |= {"SeriesInstanceUID": "1.2.3.5", "SeriesNumber": 3, "Manufacturer": "maker", "InstanceNumber": 1}
    hidden = {"InstitutionName": "Secret Hospital", "PatientAddress": "Secret Street", "OperatorsName": "Secret^Op"}
    for name, value in {**patient, **study, **more, **hidden, "PositionReferenceIndicator": "", **attributes}.items():
        if value is not None:
            setattr(data, name, value)
    return data


def put_pixels(data: Dataset, pixels: np.ndarray) -> None:
    data.Rows, data.Columns = pixels.shape[-2:]
    data.SamplesPerPixel, data.PhotometricInterpretation, data.PixelRepresentation = 1, "MONOCHROME2", 1
    data.BitsAllocated, data.BitsStored, data.HighBit = 16, 16, 15
    data.PixelData = pixels.astype("<i2").tobytes()


def series(
    folder: Path, volume: np.ndarray, orientation: Sequence[float] = AXIAL, step: float = THICK, **attributes: Any
) -> Path:
    """A CT with a file for each slice of ``[D, H, W]``, named in another order than they lie."""
    normal = np.cross(orientation[:3], orientation[3:])
    for k, pixels in enumerate(volume):
        path = folder / f"IM{(7 * k + 3) % len(volume):03}.dcm"
        data = file(path, uid.CTImageStorage, **{"Modality": "CT", **attributes})
        data.InstanceNumber, data.ImageType = k + 1, ["ORIGINAL", "PRIMARY", "AXIAL"]
        if attributes.get("FrameOfReferenceUID", "given") is not None:
            data.ImagePositionPatient = [f"{x:.6f}" for x in CORNER + step * k * normal]
            data.ImageOrientationPatient, data.PixelSpacing = list(orientation), list(SPACING)
            data.SliceThickness = step
        data.RescaleIntercept, data.RescaleSlope, data.RescaleType = -1024, 1, "HU"
        put_pixels(data, pixels + 1024)
        data.save_as(path, enforce_file_format=True)
    return folder


def enhanced(path: Path, volume: np.ndarray, order: Sequence[int] | None = None, step: float = THICK) -> Path:
    """One CT file of all slices, which are stored in ``order``."""
    data = file(path, uid.EnhancedCTImageStorage, Modality="CT")
    data.ImageType, data.NumberOfFrames = ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"], len(volume)
    shared, frames = Dataset(), []
    for name, content in {
        "PixelMeasures": {"PixelSpacing": list(SPACING), "SliceThickness": step},
        "PlaneOrientation": {"ImageOrientationPatient": list(AXIAL)},
        "PixelValueTransformation": {"RescaleIntercept": -1024, "RescaleSlope": 1, "RescaleType": "HU"},
    }.items():
        setattr(shared, f"{name}Sequence", Items([_item(content)]))
    order = list(order or range(len(volume)))
    for k in order:
        group = Dataset()
        place = {"ImagePositionPatient": [f"{x:.6f}" for x in CORNER + np.array([0, 0, step * k])]}
        group.PlanePositionSequence = Items([_item(place)])
        group.FrameContentSequence = Items([_item({"StackID": "1", "InStackPositionNumber": k + 1})])
        frames.append(group)
    data.SharedFunctionalGroupsSequence, data.PerFrameFunctionalGroupsSequence = Items([shared]), Items(frames)
    put_pixels(data, volume[order] + 1024)
    data.save_as(path, enforce_file_format=True)
    return path


def _item(content: Mapping[str, Any]) -> Dataset:
    item = Dataset()
    for name, value in content.items():
        setattr(item, name, value)
    return item


def sorted_slices(folder: Path) -> list[Any]:
    """The files of a series as they lie, with pixels."""
    found: list[Any] = [dcmread(path) for path in folder.glob("*.dcm")]
    normal = np.cross(found[0].ImageOrientationPatient[:3], found[0].ImageOrientationPatient[3:])
    return sorted(found, key=lambda one: float(normal @ np.array(one.ImagePositionPatient, float)))


def seg(
    path: Path,
    sources: Sequence[Any],
    masks: np.ndarray,
    names: Sequence[str] = ("nodule",),
    kind: str = "BINARY",
    change: Any = None,
    **options: Any,
) -> Path:
    """A segmentation of ``[D, H, W]`` or ``[D, H, W, S]`` by highdicom; ``change`` may edit it before it is saved."""
    from highdicom.seg import Segmentation, SegmentDescription

    about = [SegmentDescription(i, name, CATEGORY, TYPE, "MANUAL") for i, name in enumerate(names, 1)]
    made: dict[str, Any] = {"series_instance_uid": uid.generate_uid(), "series_number": 9, "instance_number": 1}
    made |= {"sop_instance_uid": uid.generate_uid(), "manufacturer": "m", "manufacturer_model_name": "m"}
    made |= {"software_versions": "1", "device_serial_number": "1", **options}
    found = Segmentation(list(sources), masks, kind, about, **made)
    if change is not None:
        change(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save_as(path)
    return path


def rtstruct(
    path: Path,
    structures: Mapping[str, Sequence[tuple[np.ndarray, str]]],
    kind: str = "CLOSED_PLANAR",
    reference: str = "1.2.3.9",
) -> Path:
    """Contours ``[N, 3]`` in millimetres of each structure, each with the UID of its slice or ``""``."""
    data = file(path, uid.RTStructureSetStorage, Modality="RTSTRUCT", StructureSetLabel="drawn")
    data.StructureSetROISequence, data.ROIContourSequence = Items(), Items()
    for number, (name, contours) in enumerate(structures.items(), 1):
        roi = {"ROINumber": number, "ROIName": name, "ReferencedFrameOfReferenceUID": reference}
        data.StructureSetROISequence.append(_item(roi))
        drawn = Items()
        for points, instance in contours:
            contour = _item({"ContourGeometricType": kind, "NumberOfContourPoints": len(points)})
            contour.ContourData = [f"{x:.6g}" for x in np.asarray(points).reshape(-1)]
            if instance:
                of = {"ReferencedSOPClassUID": uid.CTImageStorage, "ReferencedSOPInstanceUID": instance}
                contour.ContourImageSequence = Items([_item(of)])
            drawn.append(contour)
        data.ROIContourSequence.append(_item({"ReferencedROINumber": number, "ContourSequence": drawn}))
    data.save_as(path, enforce_file_format=True)
    return path


def contour(pixels: Sequence[tuple[float, float]], k: float, step: float = THICK) -> np.ndarray:
    """(row, column) of an axial slice in millimetres; ``k`` may lie between slices."""
    points = np.array(pixels, float)
    return CORNER + np.stack([points[:, 1] * SPACING[1], points[:, 0] * SPACING[0], np.full(len(points), k * step)], 1)

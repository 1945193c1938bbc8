"""The v1 pickle of LIDC: every protocol is read, nothing in it is run, and what is wrong is named."""

from __future__ import annotations

import os
import pickle
import re
import time
import tracemalloc

import numpy as np
import pytest

from ambiseg._util.errors import DataError
from ambiseg.data.sets.lidc import Options, open_form, prepare, safe_pickle
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
        (lambda case: case.update(image="x"), "expected arrays of numbers as image and masks, found a str"),
        (
            lambda case: case.update(image=np.array([["x"]])),
            "expected arrays of numbers .*, found one of",
        ),
        (lambda case: case.update(image=case["image"].tolist()), "expected arrays of numbers .*, found a list"),
        (lambda case: case.update(image=None), "expected arrays of numbers .*, found a NoneType"),
        (lambda case: case.update(masks=[]), "expected 4 masks, found 0"),
        (lambda case: case.update(masks={}), "expected arrays of numbers .*, found a dictionary"),
        (lambda case: case.update(masks=[[mask] for mask in case["masks"]]), "found a list"),
        (lambda case: case.update(series_uid="x\ny"), r"a series_uid that can be printed, found 'x\\ny'"),
        (lambda case: case.update(series_uid="x" * 600), "expected a text as series_uid, found a long text"),
        (lambda case: case.update(image=case["image"][:0]), r"found \[0, 24\]"),
    ],
)
def test_pickles_of_something_else_are_named(tmp_path, change, message):
    data = crops(3)
    change(data["fake00_slice1"])
    found = refused(fakes.write_pickle(tmp_path / "data_lidc.pickle", data, 4))
    assert found.startswith(f"{tmp_path / 'data_lidc.pickle'}: case 'fake00_slice1': ")
    assert re.search(message, found), found
    assert "expected a dictionary of cases, found a list" in refused(fakes.write_pickle(tmp_path / "b.pkl", [1], 4))


# -- bombs ---------------------------------------------------------------------------------------------------

DEEP, KEY, LONG, STEPS = (
    "values in each other, deeper",
    "a key that is neither",
    "a line that is too long",
    "more steps",
)
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01"  # then shape, dtype …
U1 = b"cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R"


def _dtype(code: str) -> bytes:
    return b"cnumpy\ndtype\nX" + len(code).to_bytes(4, "little") + code.encode() + b"\x85R."


BOMBS = {
    "deep tuples as a key": (b"})" + b"\x85" * 300_000 + b"K\x01s.", DEEP),
    "deep tuples": (b"\x80\x04)" + b"\x85" * 300_000 + b".", DEEP),
    "deep lists": (b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".", DEEP),
    "deep dictionaries": (b"\x80\x04" + b"}K\x01" * 20_000 + b"Ns" + b"s" * 19_999 + b".", DEEP),
    "deep lists by marks": (b"\x80\x04" + b"(" * 100_000 + b"l" * 100_000 + b".", "marks in each other"),
    "a tuple as a key": (b"\x80\x04})Ns.", KEY),
    "a tuple as a key of DICT": (b"\x80\x04()Nd.", KEY),
    "a list as a key of OrderedDict": (b"\x80\x02ccollections\nOrderedDict\n]])aNaa\x85R.", KEY),
    "a number with a chosen hash as a key": (b"\x80\x04}G\x7f\xf0\x00\x00\x00\x00\x00\x00Ns.", KEY),
    "nested tuples as a module": (b")" + b"2\x86" * 16 + b"2\x93.", "a function whose name is no text"),
    "nested tuples, twice as many each time": (b")" + b"2\x86" * 280 + b".", DEEP),
    "a list in itself": (b"\x80\x04]q\x00(h\x00h\x00e.", "a list that grows in another"),
    "a list in itself by way of another": (b"]q\x00]q\x01h\x00a0h\x00h\x01a.", "a list that grows in another"),
    "a dictionary in itself": (b"}q\x00K\x01h\x00s.", "a dictionary that grows in another"),
    "a number of 2 GB": (b"\x80\x02\x8b\xff\xff\xff\x7f" + b"x" * 99, "a number that is too large"),
    "a number of -1 bytes": (b"\x80\x02\x8b\xff\xff\xff\xff" + b"x" * 99, "a number that is too large"),
    "a number of 255 bytes": (b"\x80\x02\x8a\xff" + b"x" * 255 + b".", "a number that is too large"),
    "a number of a million digits": (b"I" + b"9" * 1_000_000 + b"\n.", LONG),
    "a long of a million digits": (b"L" + b"9" * 1_000_000 + b"L\n.", LONG),
    "a fraction of a million digits": (b"F" + b"9" * 1_000_000 + b"\n.", LONG),
    "a value of a million digits": (b"Np" + b"9" * 1_000_000 + b"\n.", LONG),
    "a value of a large number": (b"Nr\xff\xff\xff\xff.", STEPS),
    "a value of a large number in digits": (b"Np999999999999\n.", STEPS),
    "a value of a negative number": (b"Np-1\n.", "a value of no number"),
    "a name of a million letters": (b"c" + b"a" * 1_000_000 + b"\nb\n.", LONG),
    "a text of -1 letters": (b"T\xff\xff\xff\xffabc.", "a negative length"),
    "a text of a quarter of a million escapes": (b"S" + b"(" * 250_000 + b"\n.", None),
    "more values than images": (b"\x80\x04" + b"N0" * 150_000 + b"N.", STEPS),
    "a list taken many times": (
        b"\x80\x02ccollections\nOrderedDict\nq\x00](" + b"]K\x01aNa" * 500 + b"eq\x010"
        b"" + b"h\x00h\x01\x85R0" * 2000 + b".",
        STEPS,
    ),
    "a set": (b"\x80\x04\x8f.", "an opcode that plain values do not need"),
    "a class of an extension": (b"\x80\x02\x82\x01.", "an opcode that plain values do not need"),
    "an object of another process": (b"Pid\n.", "an opcode that plain values do not need"),
    "a state of a list": (b"\x80\x02]}b.", "a state of its own"),
    "a call of a number": (b"\x80\x02K\x01)R.", "a call of something that is not a function"),
    "items in a number": (b"K\x01K\x02a.", "something that holds none"),
    "an array of objects": (_dtype("O"), "an array of 'O'"),
    "an array of records": (_dtype("u1,(1000000,1000000)f8"), "an array of 'u1,"),
    "an array of many in each": (_dtype("1000000000i8"), "an array of '1000"),
    "an array of long texts": (_dtype("U999999999"), "an array of 'U999"),
    "an array of an alias": (_dtype("datetime64[ns]"), "an array of 'date"),
    "a shape beyond the file": (ARRAY + b"J\xff\xff\xff\x7f2\x86" + U1 + b"\x89C\x04abcdtb.", "an array of shape"),
    "a shape whose product is zero by overflow": (
        ARRAY + b"\x8a\x05\x00\x00\x00\x00\x012\x86" + U1 + b"\x89C\x00tb.",
        "an array of shape",
    ),
    "a negative shape": (ARRAY + b"J\xff\xff\xff\xffJ\xfc\xff\xff\xff\x86" + U1 + b"\x89C\x04abcdtb.", "no shape"),
    "a shape of texts": (ARRAY + b"C\x01a\x85" + U1 + b"\x89C\x01atb.", "an array of no shape"),
    "a shape of many": (ARRAY + b"(" + b"K\x01" * 99 + b"t" + U1 + b"\x89C\x01atb.", "an array of no shape"),
    "an array of a list": (ARRAY + b"K\x01\x85" + U1 + b"\x89]tb.", "an array of Python objects"),
    "half of a character": (b"V\\ud800\n(d.", None),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused_at_once(tmp_path, bomb):
    path, (content, message) = tmp_path / "data_lidc.pickle", BOMBS[bomb]
    path.write_bytes(content)
    tracemalloc.start()
    start = time.process_time()
    try:
        found = refused(path)
        took, most = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) < 500
    assert found.isprintable()
    if message is not None:
        expected = "expected a pickle of NumPy arrays, found that byte"
        assert re.search(rf"{expected} [\d,]+ makes no sense .*{message}", found), found
    assert took < 3  # a tenth of it where nobody measures memory
    assert most < 64 << 20


def test_a_large_pickle_of_nothing_is_refused_at_once(tmp_path):
    for content in (b"\x80\x02\x8b\xff\xff\xff\xff", b"\x80\x02X\xff\xff\xff\xff", b"Np", b"S'", b"}", b"cos"):
        path = tmp_path / "data_lidc.pickle"
        path.write_bytes(content)
        os.truncate(path, 20 << 30)  # sparse
        start = time.process_time()
        assert "expected a pickle" in refused(path)
        assert time.process_time() - start < 3


def test_a_pickle_of_too_many_objects_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(safe_pickle, "_MOST", 1000)
    path = fakes.write_pickle(tmp_path / "data_lidc.pickle", crops(12), 4)
    assert "more steps than a data set of this size has" in refused(path)


def test_mutated_pickles_are_read_or_refused(tmp_path):
    rng, path = np.random.default_rng(12), tmp_path / "data_lidc.pickle"
    written = [pickle.dumps(crops(2, size=24), protocol) for protocol in range(6)]
    read, refusals = 0, []
    for _ in range(300):
        content = bytearray(written[rng.integers(6)])
        for _ in range(rng.integers(1, 4)):
            at, count = int(rng.integers(len(content))), int(rng.integers(1, 9))
            kinds = [rng.bytes(count), b"", content[at : at + count] * 2, pickle_opcodes(rng, count)]
            content[at : at + count] = kinds[rng.integers(4)]
        path.write_bytes(content)
        try:
            cases = open_form("pickle", path, Options())
            read += sum(case.image.size > 0 for case in cases)
        except DataError as error:
            refusals.append(str(error))
    assert read > 25  # most bytes are pixels
    assert not [text for text in refusals if not text.isprintable() or len(text) > 400]


def pickle_opcodes(rng: np.random.Generator, count: int) -> bytes:
    codes = b"".join(safe_pickle._STEPS) + b"."
    return bytes(codes[i] for i in rng.integers(len(codes), size=count))


def test_pixels_stay_in_the_file(tmp_path):
    data = crops(12, size=64)
    for protocol in range(6):
        found = safe_pickle.index(fakes.write_pickle(tmp_path / "data_lidc.pickle", data, protocol))
        arrays = [array for case in found.values() for array in (case["image"], *case["masks"])]
        assert len(arrays) == 60
        assert all(isinstance(array.content, safe_pickle.Span) for array in arrays)

"""Files within limits: plain values, or one line."""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from ambiseg._util import parsing, reading
from ambiseg._util.errors import ConfigError
from ambiseg._util.parsing import Mistake, check_plain, parse_json, parse_yaml, shown
from ambiseg._util.reading import Unreadable, validated
from ambiseg.settings import read_value

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inner, max_size=4),
)  # fmt: skip


def problem(read, *arguments) -> str:
    with pytest.raises((Mistake, Unreadable)) as caught:
        read(*arguments)
    message = str(caught.value)
    assert message.isprintable(), message
    assert len(message) < 400, message
    return message


@given(PLAIN)
def test_what_json_wrote_is_read_as_it_was(value):
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert repr(parse_json(text)) == repr(json.loads(text))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_every_bit(number):
    assert parse_json(repr(number)) == number
    assert parse_yaml(yaml.safe_dump([number])) == [number]


@given(PLAIN)
def test_what_yaml_wrote_is_read_as_it_was(value):
    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data):
            return True

    text = yaml.dump({"value": value}, Dumper=Dumper, allow_unicode=True)
    assert parse_yaml(text) == yaml.safe_load(text)


def test_numbers_that_are_not_finite_where_they_are_asked_for():
    assert str(parse_json("[NaN, -Infinity, 1e999, 1]", finite=False)) == "[nan, -inf, inf, 1]"
    assert "expected whole numbers" in problem(parse_json, "9" * 30, "JSON", False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected JSON, found a mistake: EOF"),
        ("[1,]", "expected JSON, found a mistake: trailing comma at line 1 column 4"),
        ('{"a": 1} x', "expected JSON, found a mistake: trailing characters"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 40 + "]" * 40, "expected at most 32 lists and tables in each other"),
        ('{"a":' * 40 + "1" + "}" * 40, "expected at most 32 lists and tables in each other"),
        ("9" * 100_000, "number out of range"),
        ("9" * 30, "expected whole numbers of at most 63 bits, found one of 100"),
        ("1e999999", "expected finite numbers, found inf"),
        ("[NaN]", "expected JSON, found a mistake"),
        ("-Infinity", "expected JSON, found a mistake"),
        ('{"a": {"b": 1, "b": 2}}', "expected every key once, found 'b' again"),
        (r'"\ud800"', "expected JSON, found a mistake"),
        (r'["a\u0000b"]', "expected text, found the character U+0000 in 'a\\x00b'"),
        (r'{"\u0000": 1}', "expected text, found the character U+0000"),
        ("\ud800", "expected JSON, found a mistake"),
    ],
)
def test_json_that_is_refused(text, expected):
    assert expected in problem(parse_json, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 100_000, "expected at most 32 lists and tables in each other, found more in line 1"),
        ("- " * 100_000, "expected at most 32 lists and tables in each other, found more in line 1"),
        ("{a: " * 50_000, "expected at most 32 lists and tables in each other, found more in line 1"),
        ("".join(" " * i + "a:\n" for i in range(60)), "expected at most 32 lists and tables in each other"),
        ("&a [*a]", "expected YAML without anchors and aliases, found &a in line 1"),
        ("a: &x 1\nb: *x", "expected YAML without anchors and aliases, found &x in line 1"),
        ("a: {b: 1}\nc:\n  <<: {d: 1}", "expected YAML without merged keys, found << in line 3"),
        ("a: !!binary aGFsbG8=", "expected YAML without tags"),
        ("!!set {a, b}", "expected YAML without tags"),
        ("!!python/object/apply:os.getcwd []", "expected YAML without tags"),
        ("? [1, 2]\n: 3", "expected texts as keys, found a list or a table in line 1"),
        ("1: a\n'1': b", "line 2: expected every key once, found '1' again"),
        ("a: .inf", "expected finite numbers, found inf"),
        ("a: .nan", "expected finite numbers, found nan"),
        ("a: " + "9" * 300, "expected whole numbers of at most 63 bits"),
        ("a: " + "9" * 100_000, "expected numbers of at most 400 digits"),
        ('"\\ud800"', "expected text, found the character U+D800"),
        ('"\\0"', "expected text, found the character U+0000"),
        ('"\\UFFFFFFFF"', "expected YAML, found a mistake"),
        ("a\0b", "expected YAML, found the character U+0000 at position 2"),
        ("%YAML " + "1" * 5000 + ".1\n--- a", "expected YAML, found a mistake"),
        ("--- a\n--- b", "expected one YAML document, found a second in line 2"),
        ("[a, b", "expected YAML, found a mistake in line 1, column 6: "),
        ("a" * 300_000, "expected YAML of at most 256 kB, found 292 kB"),
    ],
)
def test_yaml_that_is_refused(text, expected):
    assert expected in problem(parse_yaml, text)
    assert read_value(text) == text  # an argument is then the text that was typed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing", None),
        ("2024-01-31", "2024-01-31"),
        ("2024-01-31 10:00:00", "2024-01-31 10:00:00"),
        ("=", "="),
        ("0x_", "0x_"),
        ("{no: 1, 2.50: 2, ~: 3}", {"no": 1, "2.50": 2, "~": 3}),
        ("[0o7, 010, 0x1f, 1_000, 1e3, 1.5e+3]", ["0o7", 8, 31, 1000, "1e3", 1500.0]),
        ("a: |\n  b\n  c\n", {"a": "b\nc\n"}),
        ("a:\n- b: [c, {d: e}]\n- f\n", {"a": [{"b": ["c", {"d": "e"}]}, "f"]}),
        ("'<<': 1", {"<<": 1}),
    ],
)
def test_yaml_is_plain_values(text, value):
    assert parse_yaml(text) == value


@given(st.text(alphabet=st.sampled_from("[]{}:,-?!&*|>'\"%@`# \n\tab01.~<=\\xuU"), max_size=40))
def test_any_yaml_is_a_value_or_a_mistake(text):
    try:
        value = parse_yaml(text)
    except Mistake:
        return
    check_plain(value)
    json.dumps(value)


def test_only_regular_files_are_opened_and_nothing_is_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        monkeypatch.chdir(tmp_path)  # the name of a socket must be short
        bound.bind("socket")
    for name, found in [("pipe", "a pipe"), ("link", "a pipe"), (".", "a folder"), ("/dev/zero", "a device")]:
        path = tmp_path / name
        assert problem(reading.read_json, path) == f"{path}: expected a file, found {found}"
    with pytest.raises(OSError, match="socket"):
        reading.read_text(tmp_path / "socket")
    assert "expected the name of a file, found a null character in it" in problem(reading.read_text, "a\0b")
    with pytest.raises(FileNotFoundError):
        reading.read_json(tmp_path / "none")


def test_size_is_judged_before_anything_is_read(tmp_path):
    path = tmp_path / "large"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a hole
    assert problem(reading.read_json, path) == f"{path}: expected at most 256 MB, found 1,048,576 MB"
    assert problem(reading.read_yaml, path) == f"{path}: expected at most 256 kB, found 1,048,576 MB"
    with pytest.raises(Unreadable, match="expected at most 0 kB"):
        reading.read_bytes("/proc/self/status", limit=10)  # says that it has no byte


def test_more_values_than_memory_has_room_for(monkeypatch, tmp_path):
    monkeypatch.setattr(parsing, "CONTAINERS", 100)
    monkeypatch.setattr(parsing, "VALUES", 1000)
    assert "expected at most 100 lists and tables, found 102" in problem(parse_json, f"[{'[],' * 100}[]]")
    assert "expected at most 1,000 values, found 2,000" in problem(parse_json, f"[{'1,' * 1999}1]")
    path = tmp_path / "a.csv"
    path.write_text("a\n" * 101)
    assert "expected at most 100 lists and tables, found 101" in problem(reading.read_csv, path)
    path.write_text("[[" + "[]," * 200 + "[]]]")
    assert "line 1: expected at most 100 lists" in problem(lambda: list(reading.read_json_lines(path, list)))


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert reading.read_json(path) == {"a": 1}
    path.write_bytes(b"\xff\xfe")
    assert problem(reading.read_yaml, path) == f"{path}: expected YAML in UTF-8, found byte 0xff"
    path.write_bytes(b"a\nb\0")
    assert problem(reading.read_csv, path) == f"{path}: expected CSV, found a null character in line 2"


def test_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a ;"b ;c"\n\nd;e\n')
    assert reading.read_csv(path, lambda head: ";" if ";" in head else ",") == [["a", "b ;c"], [], ["d", "e"]]
    path.write_text("a," + "b" * 200_000)
    assert "expected CSV, found field larger than field limit" in problem(reading.read_csv, path)
    path.write_text('a,"b')
    assert "expected CSV, found unexpected end of data" in problem(reading.read_csv, path)


class Point(BaseModel, extra="forbid"):
    x: float = Field(ge=0, allow_inf_nan=False)
    tags: dict[str, int] = {}


def test_a_schema_names_the_key_the_expected_and_the_found(tmp_path):
    for content, expected in [
        ({"x": "far"}, "x: expected a number, found 'far'"),
        ({"x": -1}, "x: expected at least 0, found -1"),
        ({"x": 1, "tags": {"a\nb": None}}, "tags.a\\nb: expected a whole number, found null"),
        ({}, "x: expected a value in a point, found none"),
        ({"x": 1, "y": [2]}, "y: expected a key of a point, found [2]"),
        ([], "expected a point, found []"),
        ({"x": "9" * 1000}, f"x: expected a finite number, found '{'9' * 60}…'"),
    ]:
        assert problem(validated, Point, content, "p.json", "a point") == f"p.json: {expected}"
    error = Unreadable(Path("a"), "b")
    assert isinstance(error, ConfigError)
    assert str(pickle.loads(pickle.dumps(error))) == "a: b"


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"

    def read(text: str, interrupted: bool = False) -> list[float]:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return [point.x for point in reading.read_json_lines(path, Point, "a point", interrupted)]

    assert read('{"x": 1}\n{"x": 2}') == [1, 2]
    assert read('{"x": 1}\n{"x": 2}', interrupted=True) == [1]  # the line may go on: 20 is not 2
    for bad, expected in [
        ('{"x": ', "expected a point as JSON, found a mistake: EOF while parsing a value at line 1 column 5"),
        ('{"x": -1}', "x: expected at least 0, found -1"),
        ('{"x": 1, "tags": {"\\u0000": 1}}', "expected text, found the character U+0000 in '\\x00'"),
        ("[" * 10_000, "lists and tables nested too deeply"),
        ('{"x": NaN}', "x: expected a finite number, found nan"),
        ('{"x": "\ud800"}', "expected a point as JSON, found a mistake: "),
    ]:
        assert f"{path}: line 2: " in (message := problem(read, f'{{"x": 1}}\n{bad}\n'))
        assert expected in message
        assert read(f'{{"x": 1}}\n{bad}\n{{"x": 3}}\n', interrupted=True) == [1]


def test_values_in_errors_are_short_lines():
    for value in [
        "a" * 1000,
        "\x1b[31m\n\ud800",
        ["a" * 100] * 100,
        {"a": {"b": "\n"}},
        10**5000,
        math.nan,
        None,
        True,
    ]:
        assert shown(value).isprintable()
        assert len(shown(value)) < 400
    assert shown("\ud800") == "'\\ud800'"

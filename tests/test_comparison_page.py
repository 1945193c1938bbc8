"""The page of a comparison: what is on it, that names are escaped, and what the browser does with it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ambiseg.comparison import compare
from ambiseg.comparison.page import page
from ambiseg.comparison.record import Comparison
from tests.pages import Reader
from tests.test_comparison import entry, scored
from tests.test_comparison_command import HOSTILE, made_by_hand

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BASE: list[float | None] = [0.1, 0.2, 0.3, None, 0.5, 0.6, 0.7, 0.8]
OTHER: list[float | None] = [0.2, 0.1, 0.3, 0.4, 0.1, 0.65, 0.2, 0.9]


@pytest.fixture(scope="module")
def by_hand() -> tuple[Comparison, str]:
    """Two methods on eight cases, and their page without pictures."""
    base, other = entry("base", BASE), entry("other", OTHER)
    comparison = made_by_hand(base, other)
    return comparison, page(comparison, base.first, None)


def test_every_case_is_a_row(by_hand):
    comparison, text = by_hand
    found = Reader(text.replace("<!doctype html>", ""))
    rows = [attributes for attributes in found.all("tr") if "data-case" in attributes]
    assert [int(row["data-case"]) for row in rows] == list(range(8))
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    cases = json.loads(data[1])["cases"]
    assert [case["ged"] for case in cases] == [list(pair) for pair in zip(BASE, OTHER, strict=True)]
    assert [case["name"] for case in cases] == [case.name for case in comparison.cases]
    assert "−0.400" in found.text  # other − base of case 4
    assert not re.search(r'(?:src|href)="(?!#|data:)', text)  # nothing is fetched
    labels = {attributes["id"] for attributes in found.all("select", "input", "button") if "id" in attributes}
    assert labels == {"sort", "turn", "one", "other", "readers", "name", "pictured"}


def test_names_are_escaped():
    hostile = scored({"standard-16": BASE}, "a")
    cases = [case.model_copy(update={"name": f"{HOSTILE}{i}"}) for i, case in enumerate(hostile.cases)]
    first = entry("base", BASE).first.model_copy(update={"cases": cases, "data": HOSTILE})
    from ambiseg.comparison.scores import Entry

    comparison = made_by_hand(Entry(HOSTILE, (first,)))
    text = page(comparison, first, None)
    assert "<script>alert" not in text
    found = Reader(text.replace("<!doctype html>", ""))
    assert len(found.all("script")) == 2
    assert "alert(1)" in found.text


def test_pictures_are_side_by_side(tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "run")
    compare(
        {"one": tmp_path / "run", "two": tmp_path / "run"},
        samples=(4,), out=tmp_path / "out", cases=3, timing=False, quiet=True,
    )  # fmt: skip
    text = (tmp_path / "out" / "index.html").read_text()
    found = Reader(text.replace("<!doctype html>", ""))
    articles = found.all("article")
    assert len(articles) == 3
    shown = [attributes["alt"] for attributes in found.all("img")]
    name = next(re.match(r"(.*): the image", alt) for alt in shown if "the image" in alt)
    assert name is not None
    masks = {
        who: [alt for alt in shown if re.match(rf"{name[1]}: mask \d of {who}, prob", alt)] for who in ("one", "two")
    }
    assert 1 <= len(masks["one"]) <= 4
    assert [alt.replace("one", "two") for alt in masks["one"]] == masks["two"]  # the same weights, the same draws
    links = {attributes["href"] for attributes in found.all("a")}
    assert {f"#{attributes['id']}" for attributes in articles} <= links
    assert all(alt for alt in shown)
    assert len(text) < 1_500_000


ACTIONS = """
<script>
const rows = () => [...document.querySelectorAll("#table tbody tr")].filter((row) => !row.hidden);
const names = () => rows().map((row) => +row.cells[0].textContent.slice(5));
const set = (id, value) => {
  const part = document.getElementById(id);
  if (part.type === "checkbox") part.checked = value; else part.value = value;
  part.dispatchEvent(new Event("input"));
};
const head = (key) => document.querySelector(`th[data-sort=${key}]`);
const found = {};
found.start = names();
head("ged0").firstElementChild.click(); found.ged = names(); found.aria = head("ged0").ariaSort;
head("ged0").firstElementChild.click(); found.turned = names(); found.turnedAria = head("ged0").ariaSort;
set("sort", "size"); document.getElementById("turn").click(); found.size = names();
set("one", "0"); set("other", "1"); set("sort", "difference"); found.difference = names();
found.cells = rows().map((row) => row.lastElementChild.textContent);
set("sort", "name"); found.name = names();
set("readers", "3"); found.readers = names(); found.count = document.getElementById("count").textContent;
set("readers", ""); set("name", "CASE 2"); found.search = names();
set("name", ""); set("pictured", true); found.pictured = names();
set("pictured", false); set("sort", "disagreement"); found.disagreement = names();
found.focus = head("ged1").firstElementChild.tagName;
const out = document.createElement("pre"); out.id = "found"; out.textContent = JSON.stringify(found);
document.body.append(out);
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_browser_sorts_and_filters(by_hand, tmp_path):
    _, text = by_hand
    place: Path = tmp_path / "page.html"
    place.write_text(text.replace("</body>", f"{ACTIONS}</body>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    options.append(f"--user-data-dir={tmp_path / 'profile'}")
    done = subprocess.run([str(CHROMIUM), *options, place.as_uri()], capture_output=True, text=True, timeout=120)
    written = re.search(r'<pre id="found">(.*?)</pre>', done.stdout)
    assert written is not None, done.stderr[-2000:]
    found = json.loads(html.unescape(written[1]))
    assert found["start"] == list(range(8))
    assert found["ged"] == [7, 6, 5, 4, 2, 1, 0, 3]  # the one without a value is last
    assert found["aria"] == "descending"
    assert found["turned"] == [0, 1, 2, 4, 5, 6, 7, 3]
    assert found["turnedAria"] == "ascending"
    gaps = [None if a is None or b is None else a - b for a, b in zip(BASE, OTHER, strict=True)]
    known = [i for i in range(8) if gaps[i] is not None]
    sizes = {i: round(abs(gaps[i] or 0), 9) for i in known}
    assert [sizes[i] for i in found["size"][:-1]] == sorted(sizes.values(), reverse=True)
    assert found["size"][-1] == 3
    assert [round(gaps[i] or 0, 9) for i in found["difference"][:-1]] == sorted(
        (round(gaps[i] or 0, 9) for i in known), reverse=True
    )
    assert found["cells"][:2] == ["+0.500", "+0.400"]
    assert found["cells"][-1] == "–"
    assert found["name"] == list(range(8))
    assert found["readers"] == [1, 3, 5, 7]
    assert found["count"] == "4 of 8 cases"
    assert found["search"] == [2]
    assert found["pictured"] == []
    spread = [(7 * i % 10) / 10 for i in found["disagreement"]]
    assert spread == sorted(spread, reverse=True)
    assert found["focus"] == "BUTTON"  # reached and pressed by keyboard

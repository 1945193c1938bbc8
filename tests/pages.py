"""A reader of pages, and an evaluation made by hand, for the tests of the report."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from ambiseg.evaluation.results import FORMAT, Evaluation
from ambiseg.reporting import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOID = {"meta", "br", "img", "link", "input", "hr"}  # elements without an end


class Reader(HTMLParser):
    """Everything that a test asks of a page; raises where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.words.append(data)

    def all(self, *tags: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.found if tag in tags]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def mean(value: float, spread: float = 0.01) -> dict[str, Any]:
    return {"mean": value, "low": value - spread, "high": value + spread, "count": 24}  # of 24 images


def evaluation(names: list[str], **changes: Any) -> dict[str, Any]:
    """A hand-made evaluation of these cases as JSON has it, in which case i has a GED of i / 10."""
    settings = []
    ece = {"mean": 0.00041, "low": None, "high": None}
    for form, samples, ged in (("standard", 16, 0.2134), ("standard", 50, 0.1876), ("compact", 16, 0.1765)):
        metrics = {
            "ged": mean(ged),
            "ged_unbiased": mean(ged - 0.03),
            "ged_unbiased_both": mean(ged - 0.05),
            "matched_iou": mean(0.6543),
        }
        metrics |= {"diversity": mean(0.4321), "entropy": mean(0.0876), "empty_mass": mean(0.3)}
        curve = {"edges": [0, 0.5, 1], "confidence": [0.2, 0.8], "accuracy": [0.25, None], "weight": [0.9, 0.1]}
        buckets = [{"readers": r, "images": 12, "metrics": {"ged": mean(ged + r / 100)}, "ece": ece} for r in (1, 3)]
        setting = {
            "form": form,
            "samples": samples,
            "metrics": metrics,
            "ece": ece,
            "ece_share": 0.4,
            "reliability": curve,
        }
        settings.append({**setting, "empty": {"correlation": 0.61, "error": 0.1}, "buckets": buckets})
    weights = [0.4, 0.3, 0.2, 0.1]
    usage = [
        {"readers": r, "images": 12, "mean": weights, "empty_mass": mass, "empty_share": 1 - r / 4}
        for r, mass in ((1, 0.7), (3, 0.1))
    ]
    strata = {"name": "expert", "count": 4, "mean": weights, "low": weights, "high": weights, "setting": "compact-16"}
    cases = []
    for i, name in enumerate(names):
        scores = {
            "ged": i / 10,
            "ged_unbiased": i / 10,
            "ged_unbiased_both": i / 10,
            "matched_iou": 0.5,
            "diversity": 0.4,
            "entropy": 0.1,
        }
        scores |= {"ece": 0.01, "empty_mass": 0.3}
        case = {"name": name, "patient": f"p{i // 2}", "readers": 1 + 2 * (i % 2), "readers_total": 4}
        case |= {"empty_share": 0.5, "annotations": {"diversity": (7 * i % 10) / 10, "entropy": 0.1}}
        keys = [f"{s['form']}-{s['samples']}" for s in settings]
        cases.append({**case, "strata_weights": weights, "scores": dict.fromkeys(keys, scores)})
    content: dict[str, Any] = {
        "format": FORMAT,
        "run": "x",
        "split": "test",
        "protocol": "mose",
        "which": "best",
        "weights": "",
    }
    content |= {"seed": 0, "data": "shapes", "threads": 1, "batch_size": 8, "images": len(names), "patients": 7}
    content |= {"classes": ["ground", "shape"], "evaluated": [1], "settings": settings}
    content["annotations"] = {"diversity": mean(0.38), "entropy": mean(0.09), "empty_share": mean(0.5)}
    content |= {"strata": {**strata, "by_bucket": usage}, "modes": None, "cases": cases}
    return {**content, **changes}


def known_modes(**changes: Any) -> dict[str, Any]:
    """Two modes and two strata."""
    content: dict[str, Any] = {
        "setting": "compact-16",
        "images": 24,
        "names": ["plain", "flipped"],
        "probability": [0.75, 0.25],
    }
    content |= {"ratio": [0.7123, 0.2877], "distance": 0.0377, "strata_iou": [[0.9, 0.2], [0.1, 0.3]]}
    flip = {"name": "road", "to": "road2", "probability": 0.25, "truth": 0.47, "predicted": 0.4512}
    return {**content, "by_setting": {}, "flips": [flip], **changes}


def parsed(content: dict[str, Any]) -> Evaluation:
    """The evaluation of such JSON."""
    return Evaluation.model_validate({key: value for key, value in content.items() if key != "format"})


def without_figures(patch: pytest.MonkeyPatch) -> None:
    """Figures without content, for tests of the rest of the page: drawing them takes most of its time."""

    def file(self: figures.Figures, name: str, *_: Any, size: tuple[float, float] = figures.HALF) -> Figure:
        from matplotlib.figure import Figure

        self.save(made := Figure(size), name)
        return made

    patch.setattr(figures.Figures, "file", file)
    patch.setattr("ambiseg.reporting.page.save_cases", lambda *data: None)

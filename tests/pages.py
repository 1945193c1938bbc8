"""A reader of pages, and an evaluation made by hand, for the tests of the report."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from ambiseg.report.results import FORMAT

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
    return {"mean": value, "low": value - spread, "high": value + spread, "count": 4}


def evaluation(names: list[str], **changes: Any) -> dict[str, Any]:
    """A hand-made evaluation of these cases, in which case i has a GED of i / 10."""
    settings = []
    for form, samples, ged in (("standard", 16, 0.2134), ("standard", 50, 0.1876), ("compact", 16, 0.1765)):
        metrics = {"ged": mean(ged), "ged_unbiased": mean(ged - 0.03), "matched_iou": mean(0.6543)}
        metrics |= {"diversity": mean(0.4321), "entropy": mean(0.0876)}
        curve = {"edges": [0, 0.5, 1], "confidence": [0.2, 0.8], "accuracy": [0.25, None], "weight": [0.9, 0.1]}
        buckets = [{"readers": r, "images": 12, "metrics": {"ged": mean(ged + r / 100)}} for r in (3, 1)]
        setting = {"form": form, "samples": samples, "metrics": metrics, "ece": {"value": 0.00041}}
        settings.append({**setting, "reliability": curve, "buckets": buckets})
    weights = [0.4, 0.3, 0.2, 0.1]
    usage = [{"readers": r, "images": 12, "mean": weights, "empty_mass": mass} for r, mass in ((1, 0.7), (3, 0.1))]
    cases = []
    for i, name in enumerate(names):
        scores = {"ged": i / 10, "ged_unbiased": i / 10, "matched_iou": 0.5, "diversity": 0.4, "entropy": 0.1}
        case = {"name": name, "patient": f"p{i // 2}", "readers": 1 + 2 * (i % 2), "readers_total": 4}
        keys = [f"{s['form']}-{s['samples']}" for s in settings]
        cases.append({**case, "expert_weights": weights, "scores": dict.fromkeys(keys, scores)})
    content = {"format": FORMAT, "run": "x", "split": "test", "protocol": "mose", "which": "best", "seed": 0}
    content |= {"images": 24, "patients": 7, "classes": ["ground", "shape"], "evaluated": [1], "settings": settings}
    content |= {"experts": {"count": 4, "mean": weights, "by_bucket": usage}, "cases": cases}
    return {**content, **changes}

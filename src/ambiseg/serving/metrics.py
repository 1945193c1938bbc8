"""Numbers about the service, in the text format of Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping

_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Metrics:
    """What a service has done so far.

    >>> metrics = Metrics()
    >>> metrics.answered("GET", "/healthz", 200, 0.003)
    >>> print(*[line for line in metrics.text({}).splitlines() if "healthz" in line][:2], sep="\\n")
    ambiseg_requests_total{method="GET",path="/healthz",status="200"} 1
    ambiseg_request_seconds_bucket{path="/healthz",le="0.005"} 1
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._latencies: dict[str, list[int]] = {}
        self._seconds: Counter[str] = Counter()
        self._predictions: Counter[str] = Counter()
        self.lost = self.uploaded = 0

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a request by the pattern of its path, and how long it took."""
        with self._lock:
            self._requests[method, path, status] += 1
            buckets = self._latencies.setdefault(path, [0] * (len(_BOUNDS) + 1))
            buckets[sum(bound < seconds for bound in _BOUNDS)] += 1
            self._seconds[path] += seconds  # type: ignore[assignment]

    def ended(self, state: str) -> None:
        """Count a prediction by how it ended."""
        with self._lock:
            self._predictions[state] += 1

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """All of it; ``gauges`` are further numbers by name, each with what it means."""
        with self._lock:
            return "\n".join(self._lines(gauges)) + "\n"

    def _lines(self, gauges: Mapping[str, tuple[str, float]]) -> Iterator[str]:
        yield from _head("ambiseg_requests_total", "counter", "Requests that were answered.")
        for (method, path, status), number in sorted(self._requests.items()):
            labels = f'method="{_text(method)}",path="{_text(path)}",status="{status}"'
            yield f"ambiseg_requests_total{{{labels}}} {number}"
        yield from _head("ambiseg_request_seconds", "histogram", "Time from a request to the end of its answer.")
        for path, buckets in sorted(self._latencies.items()):
            total = 0
            for bound, number in zip((*_BOUNDS, "+Inf"), buckets, strict=True):
                total += number
                yield f'ambiseg_request_seconds_bucket{{path="{_text(path)}",le="{bound}"}} {total}'
            yield f'ambiseg_request_seconds_sum{{path="{_text(path)}"}} {self._seconds[path]:.6f}'
            yield f'ambiseg_request_seconds_count{{path="{_text(path)}"}} {total}'
        yield from _head("ambiseg_predictions_total", "counter", "Predictions by how they ended.")
        for state in ("done", "failed", "cancelled"):
            yield f'ambiseg_predictions_total{{state="{state}"}} {self._predictions[state]}'
        yield from _head("ambiseg_uploaded_bytes_total", "counter", "Bytes of bodies that were read.")
        yield f"ambiseg_uploaded_bytes_total {self.uploaded}"
        yield from _head("ambiseg_workers_lost_total", "counter", "Workers that ended in the middle of a prediction.")
        yield f"ambiseg_workers_lost_total {self.lost}"
        for name, (meaning, number) in gauges.items():
            yield from _head(name, "gauge", meaning)
            yield f"{name} {number:g}"


def _head(name: str, kind: str, meaning: str) -> tuple[str, str]:
    return f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"


def _text(value: str) -> str:
    return value.translate(_ESCAPED)

"""Fair measurements on a shared machine: CPU time of one thread, minimum of interleaved runs, peak memory in a fork."""

from __future__ import annotations

import gc
import json
import os
import resource
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One comparison. ``ratio`` is how many times cheaper ours is than the plain version."""

    case: str
    ours_ms: float
    plain_ms: float
    ours_mb: float
    plain_mb: float

    @property
    def ratio(self) -> float:
        return self.plain_ms / self.ours_ms


def cpu_seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def peak_mb(run: Callable[[], object]) -> float:
    """Memory that one run adds at its peak, measured in a forked child so that nothing earlier hides it."""
    gc.collect()
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            run()
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            os.write(writer, struct.pack("d", (after - before) / 1024))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.wait()
    return struct.unpack("d", answer)[0] if answer else float("nan")


def compare(case: str, ours: Callable[[], object], plain: Callable[[], object], repeats: int = 5) -> Row:
    """Both in turn, ``repeats`` times after one warm-up each; the minimum of each is what it costs."""
    print(f"  {case} …", end="", flush=True)
    memory = peak_mb(ours), peak_mb(plain)
    ours()
    plain()
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        for which, run in enumerate((ours, plain)):
            best[which] = min(best[which], cpu_seconds(run))
    row = Row(case, best[0] * 1e3, best[1] * 1e3, *memory)
    print(f" {row.ratio:.1f}×")
    return row


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    lines = [list(headers), *map(list, rows)]
    widths = [max(len(line[c]) for line in lines) for c in range(len(headers))]
    text = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    text.insert(1, "-|-".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" if "-|-" not in line else f"|-{line}-|" for line in text)


def publish(name: str, title: str, text: str, data: object) -> None:
    """Print a table and write it to ``results/`` as Markdown and JSON."""
    print(f"\n{title}\n\n{text}\n")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"# {title}\n\n{text}\n")
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1))


def publish_rows(name: str, title: str, rows: list[Row]) -> None:
    cells = [
        [r.case, f"{r.ratio:.1f}×", f"{r.ours_ms:.2f}", f"{r.plain_ms:.2f}", f"{r.ours_mb:.0f}", f"{r.plain_mb:.0f}"]
        for r in rows
    ]
    headers = ["case", "ratio", "ours, CPU ms", "plain, CPU ms", "ours, peak MB", "plain, peak MB"]
    publish(name, title, table(headers, cells), [{**asdict(r), "ratio": r.ratio} for r in rows])

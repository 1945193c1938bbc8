"""What does the service cost beside the Python API, and how long do requests wait under load?

CPU time of the service and of its worker, from /proc, per image, against a ``Predictor`` of the same run, which is what
``ambiseg.predict`` calls, of the same files, in turn; the least of each. Latencies are wall time of clients that send
one request after the other: they hold for this machine and whatever else runs on it.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch

from ambiseg.prediction import Predictor
from benchmarks.harness import cpu_seconds, publish, table

SIDES = (64, 128, 256)
IMAGES, ROUNDS = 16, 3
CLIENTS = (1, 8, 32)
REQUESTS = 64
_BOUNDARY = "ambiseg-benchmark"


def pictures(folder: Path, side: int, count: int) -> list[Path]:
    """TIFFs of smooth noise in Hounsfield units."""
    import tifffile
    from scipy.ndimage import gaussian_filter

    rng, paths = np.random.default_rng(0), []
    for i in range(count):
        pixels = gaussian_filter(rng.normal(size=(side, side)), 4) * 3000 - 700
        paths.append(folder / f"{side}-{i:03}.tif")
        tifffile.imwrite(paths[-1], pixels.clip(-1000, 400).astype(np.int16))
    return paths


def body_of(path: Path) -> bytes:
    """A form with an image."""
    file = io.BytesIO()
    head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="{path.name}"\r\n\r\n'
    file.write(head.encode() + path.read_bytes() + f"\r\n--{_BOUNDARY}--\r\n".encode())
    return file.getvalue()


class Running:
    """A service in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=600)

    def cpu(self) -> float:
        """Seconds of the service and of its worker so far."""
        pids, found = [self.process.pid], 0.0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
        for pid in pids:
            numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found += (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")
        return found


def ask(connection: http.client.HTTPConnection, body: bytes) -> bytes:
    """One prediction."""
    kind = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}
    connection.request("POST", "/v1/predict", body, kind)
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {content[:200]!r}")
    return content


@contextmanager
def service(*options: str) -> Iterator[Running]:
    """``ambiseg serve demo``, one thread, on a port that is free."""
    command = [sys.executable, "-m", "ambiseg", "serve", "demo", "--port", "0", "--threads", "1", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = ""
        while not told.rstrip().endswith("}") and (line := process.stdout.readline()):
            told += line
        try:
            yield Running(process, json.loads(told)["url"])
        finally:
            process.terminate()


def at_once(running: Running, bodies: Sequence[bytes], clients: int) -> list[float]:
    """Seconds that each request took, sent by so many clients."""
    left, found, lock = list(bodies), list[float](), threading.Lock()

    def client() -> None:
        connection = running.connect()
        while True:
            with lock:
                if not left:
                    return
                body = left.pop()
            start = time.perf_counter()
            ask(connection, body)
            took = time.perf_counter() - start
            with lock:
                found.append(took)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def costs(folder: Path) -> None:
    """CPU time per image, alone and with eight clients, against the Python API."""
    print("serving: CPU time per image against ambiseg.predict, one thread")
    predictor = Predictor("demo")  # as the service has it, with what the run knows of images unlike its own
    rows, data = [], {}
    with service() as running:
        for side in SIDES:
            paths = pictures(folder, side, IMAGES)
            bodies = [body_of(path) for path in paths]
            best = {"api": float("inf"), "one": float("inf"), "eight": float("inf")}
            at_once(running, bodies, 8)  # a batch of a length is compared with its images alone once
            for _ in range(ROUNDS):
                best["api"] = min(best["api"], cpu_seconds(lambda: _predict(predictor, paths)))  # noqa: B023
                for name, clients in (("one", 1), ("eight", 8)):
                    before = running.cpu()
                    at_once(running, bodies, clients)
                    best[name] = min(best[name], running.cpu() - before)
            each = {name: 1000 * seconds / len(paths) for name, seconds in best.items()}
            ratios = each["one"] / each["api"], each["eight"] / each["api"]
            rows.append([f"{side}²", *(f"{each[name]:.1f}" for name in best), *(f"{x:.2f}" for x in ratios)])
            data[f"{side}"] = each | {"ratio_one": ratios[0], "ratio_eight": ratios[1]}
            print(f"  {side}²: {ratios[0]:.2f}×, eight clients {ratios[1]:.2f}×", flush=True)
    headers = ["image", "ambiseg.predict, CPU ms", "one client", "eight clients", "ratio, one", "ratio, eight"]
    publish("serving", "The service against the Python API, per image", table(headers, rows), data)


def _predict(predictor: Predictor, paths: Sequence[Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in paths:
            predictor(path)


def load(folder: Path) -> None:
    """Latencies and throughput by number of clients."""
    print("serving: 128² images, clients that send one request after the other")
    bodies = [body_of(path) for path in pictures(folder, 128, IMAGES)]
    rows, data = [], {}
    with service("--queue", "128") as running:
        at_once(running, bodies[:16], 8)
        for clients in CLIENTS:
            some = [bodies[i % len(bodies)] for i in range(REQUESTS)]
            start, before = time.perf_counter(), running.cpu()
            found = at_once(running, some, clients)
            wall, cpu = time.perf_counter() - start, running.cpu() - before
            p50, p99 = np.percentile(found, (50, 99)) * 1000
            numbers = {"per_second": REQUESTS / wall, "p50_ms": p50, "p99_ms": p99, "cpu_ms": 1000 * cpu / REQUESTS}
            rows.append([str(clients), *(f"{x:.0f}" if x >= 20 else f"{x:.1f}" for x in numbers.values())])
            data[str(clients)] = {name: float(x) for name, x in numbers.items()}
            print(f"  {clients} clients: {', '.join(f'{name} {x:.0f}' for name, x in numbers.items())}", flush=True)
    headers = ["clients", "requests per second", "p50, ms", "p99, ms", "CPU ms per request"]
    publish("serving_load", "The service under load, 128² images", table(headers, rows), data)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        costs(Path(place))
        load(Path(place))


if __name__ == "__main__":
    main()

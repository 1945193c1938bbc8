"""What a service does about too much: bodies, requests, time, results; and about a worker that ends."""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ambiseg.io.source import Source
from ambiseg.prediction.inputs import array_source
from ambiseg.serving import Limits
from tests.services import Service, Stand, picture, serving, standing, until

FORM = {"Content-Type": "multipart/form-data; boundary=x"}
PART = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.tif"\r\n\r\n'


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[Service, Stand]]:
    with standing(Limits(upload=1 << 20, queue=8, kept=3, idle=1.0)) as found:
        yield found


def image(name: str = "a") -> Source:
    return array_source(np.zeros((1, 8, 8), np.int16), name)


def gone(service: Service) -> bool:
    """Whether no upload is left on the disk."""
    return list(service.app.state.root.iterdir()) == []


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_a_body_that_claims_too_much_is_refused_before_it_is_sent(small):
    service, _ = small
    connection = http.client.HTTPConnection("127.0.0.1", int(service.url.rsplit(":", 1)[1]), timeout=20)
    connection.putrequest("POST", "/v1/predict")
    for name, value in {**FORM, "Content-Length": str(5 << 30)}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read()) == {"error": "expected at most 1 MB, found 5,120 MB"}
    connection.close()
    assert gone(service)


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "application/json"])
def test_a_body_without_end_is_refused_at_the_limit(small, kind):
    """In chunks, whose number nobody has said; the client reads the answer while it still sends."""
    service, _ = small
    host, port = service.url.removeprefix("http://").split(":")
    head = f"POST /v1/predict HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head.encode() + b"%x\r\n" % len(PART) + PART + b"\r\n")
        chunk, sent, answer = b"%x\r\n" % (1 << 16) + bytes(1 << 16) + b"\r\n", 0, b""
        connection.setblocking(False)
        until_then = time.monotonic() + 20
        while b"}" not in answer and time.monotonic() < until_then and sent < 64 << 20:
            try:
                sent += connection.send(chunk[sent % len(chunk) :])
            except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                time.sleep(0.002)
            with suppress(BlockingIOError):
                answer += connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 413"), answer[:200]
    assert b'{"error":"expected at most 1 MB, found more"}' in answer
    until(lambda: gone(service))


def test_a_body_that_stops_is_not_waited_for(small):
    service, _ = small
    host, port = service.url.removeprefix("http://").split(":")
    head = "".join(f"{name}: {value}\r\n" for name, value in {**FORM, "Host": host, "Content-Length": "999"}.items())
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"POST /v1/predict HTTP/1.1\r\n{head}\r\n".encode() + PART)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408")
    until(lambda: gone(service))


def test_a_client_that_goes_away_leaves_nothing(small):
    service, _ = small
    host, port = service.url.removeprefix("http://").split(":")
    head = "".join(f"{name}: {value}\r\n" for name, value in {**FORM, "Host": host, "Content-Length": "999"}.items())
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"POST /v1/predict HTTP/1.1\r\n{head}\r\n".encode() + PART)
        until(lambda: not gone(service))
    until(lambda: gone(service))
    assert service.jobs.gauges["ambiseg_queue_reading"][1] == 0


@pytest.mark.parametrize(("count", "size", "status"), [(70, 1, 413), (1, 5000, 413), (60, 3, 422)])
def test_fields_are_few_and_short(small, count, size, status):
    service, _ = small
    data = {f"field{i}": "a" * size for i in range(count)}
    answer = service.client.post("/v1/predict", files={"image": ("a.tif", b"x")}, data=data)
    assert answer.status_code == status
    assert gone(service)


# -- requests ----------------------------------------------------------------------------------------------------------


def test_200_uploads_at_once(small):
    """As many as the queue takes are taken, all others are told to come again, and the service goes on."""
    service, stand = small
    content, before = picture(16), len(stand.asked)

    def post(number: int) -> httpx.Response:
        with httpx.Client(trust_env=False, timeout=60) as client:
            return client.post(f"{service.url}/v1/predict", files={"image": (f"{number}.tif", content)})

    with ThreadPoolExecutor(200) as pool:
        answers = [pool.submit(post, number) for number in range(200)]
        until(lambda: sum(answer.done() for answer in answers) >= 192)
        refused = [answer.result() for answer in answers if answer.done()]
        assert {answer.status_code for answer in refused} == {503}
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
        assert "at most 8 requests at a time" in refused[0].json()["error"]
        until(lambda: len(stand.asked) > before)
        done = 0
        while done < 8:
            for group in stand.asked[before:]:
                for task in group:
                    stand.answers.put(("refused", task.number, "no"))
                    done += 1
            before = len(stand.asked)
            until(lambda: done >= 8 or len(stand.asked) > before)  # noqa: B023
    assert sorted(answer.result().status_code for answer in answers) == [422] * 8 + [503] * 192
    assert service.client.get("/healthz").json() == {"status": "ok", "waiting": 0, "running": 0}
    assert gone(service)


def test_requests_of_one_kind_are_sent_together(small):
    service, stand = small
    groups = len(stand.asked)
    jobs = [service.jobs.submit(image(), "first")]
    stand.wait(groups + 1)
    jobs += [service.jobs.submit(image(), f"{i}") for i in range(3)]
    stand.answers.put(("cancelled", stand.asked[-1][0].number))
    found = stand.wait(groups + 2)
    assert [task.name for task in found] == ["0", "1", "2"]
    for task in found:
        stand.answers.put(("failed", task.number, "KeyError: 3"))
    for job in jobs:
        job.ended.result(20)
    assert [(job.state, job.status) for job in jobs] == [("cancelled", 409), *[("failed", 500)] * 3]


def test_a_client_that_does_not_wait_frees_its_place(small):
    service, stand = small
    groups = len(stand.asked)
    with pytest.raises(httpx.ReadTimeout):
        service.client.post("/v1/predict", files={"image": ("a.tif", picture(16))}, timeout=0.7)
    task = stand.wait(groups + 1)[0]
    until(lambda: task.number in stand.cancelled)
    stand.answers.put(("cancelled", task.number))
    until(lambda: service.jobs.health["running"] == 0)


def test_cancelling(small):
    service, stand = small
    groups, jobs = len(stand.asked), service.jobs
    running, waiting = jobs.submit(image(), "a"), jobs.submit(lambda: image("b"), "b")
    task = stand.wait(groups + 1)[0]
    stand.answers.put(("progress", task.number, 3, 9))
    until(lambda: running.done == 3)
    assert service.client.get(f"/v1/predictions/{running.id}").json()["total"] == 9
    assert service.client.get(f"/v1/predictions/{running.id}/slices/0").status_code == 409
    assert service.client.delete(f"/v1/predictions/{waiting.id}").status_code == 200
    assert service.client.delete(f"/v1/predictions/{running.id}").status_code == 200
    assert waiting.state == "cancelled"
    assert stand.cancelled[-1] == task.number
    starts = stand.starts
    running.ended.result(20)  # it does not listen, so its worker is ended
    assert running.state in ("failed", "cancelled")
    until(lambda: stand.starts == starts + 1)


# -- time, results, workers --------------------------------------------------------------------------------------------


def test_a_prediction_that_takes_too_long():
    with standing(Limits(seconds=0.3)) as (service, stand):
        answer = service.client.post("/v1/predict", files={"image": ("a.tif", picture(16))})
        assert answer.status_code == 504
        assert answer.json()["error"] == "the worker that computed this took longer than 0.3 seconds"
        until(lambda: stand.starts == 2)
        assert service.client.get("/healthz").json()["status"] == "ok"


def test_a_lost_worker_fails_one_request_and_no_other(small):
    """Of several that were computed together, each is tried alone."""
    service, stand = small
    groups, starts = len(stand.asked), stand.starts
    first = service.jobs.submit(image(), "first")
    stand.wait(groups + 1)
    jobs = [service.jobs.submit(image(), f"{i}") for i in range(2)]
    stand.answers.put(None)
    first.ended.result(20)
    assert (first.state, first.status) == ("failed", 503)
    assert "was ended by signal 9 (SIGKILL); a new one is started" in first.error
    assert len(stand.wait(groups + 2)) == 2
    stand.answers.put(None)
    for i in range(2):
        (task,) = stand.wait(groups + 3 + i)
        assert task.name == f"{i}"
        stand.answers.put(("refused", task.number, "no"))
    for job in jobs:
        assert job.ended.result(20).status == 422
    assert stand.starts == starts + 2
    assert service.jobs.metrics.lost >= 2


def test_a_worker_that_does_not_start_again():
    with standing() as (service, stand):
        stand.fails = "runs/mine/best.safetensors: expected the weights of a finished epoch, found no such file"
        stand.alive = False
        answer = service.client.post("/v1/predict", files={"image": ("a.tif", picture(16))})
        assert (answer.status_code, answer.json()["error"]) == (503, stand.fails)
        health = service.client.get("/healthz")
        assert (health.status_code, health.json()["status"]) == (503, "failing")


class Shown:
    """A scene of so many bytes."""

    slices = 1

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def summary(self) -> dict[str, Any]:
        return {}

    def slice(self, k: int) -> dict[str, np.ndarray]:
        return {"image": np.zeros((1, 2, 3), np.float32), "odd": np.zeros(5, np.uint8)}

    def header(self, k: int) -> dict[str, Any]:
        return {"readers": ["a"]}


def test_results_are_kept_within_limits(small):
    service, stand = small
    jobs = [service.jobs.add(f"{i}", Shown(10)) for i in range(5)]
    groups = len(stand.asked)
    passing = service.jobs.submit(image(), "of a client that waits", kept=False)
    stand.answers.put(("refused", stand.wait(groups + 1)[0].number, "no"))
    assert passing.ended.result(20).state == "failed"
    assert service.jobs.get(passing.id) is None
    kept = [service.jobs.get(job.id) is not None for job in jobs]
    assert kept == [False, False, True, True, True]
    content = service.client.get(f"/v1/predictions/{jobs[-1].id}/slices/0").content
    (length,) = struct.unpack("<I", content[4:8])
    assert json.loads(content[8 : 8 + length])["readers"] == ["a"]
    assert len(content) == 8 + length + 24 + 8
    huge = service.jobs.add("huge", Shown(1 << 40))
    assert service.jobs.get(jobs[-1].id) is None
    assert service.jobs.get(huge.id) is huge


# -- with a worker -----------------------------------------------------------------------------------------------------


def bomb(side: int) -> bytes:
    """A PNG of few bytes whose header claims so many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_a_worker_that_is_killed():
    with serving() as service:
        answer = service.client.post("/v1/predict", files={"image": ("huge.png", bomb(13_000))})
        assert answer.status_code == 422
        assert "huge.png: expected at most 67,108,864 pixels per slice" in answer.json()["error"]
        worker = service.jobs.supervisor.pid
        assert worker is not None
        fields = {"symmetries": "8", "samples": "256", "window": "64"}
        file = io.BytesIO()
        np.save(file, np.random.default_rng(0).integers(-1000, 400, (512, 512)).astype(np.int16))
        with ThreadPoolExecutor(1) as pool:
            large = {"image": ("a.npy", file.getvalue())}
            waiting = pool.submit(service.client.post, "/v1/predict", files=large, data=fields)
            until(lambda: service.jobs.health["running"])
            os.kill(worker, signal.SIGKILL)
            answer = waiting.result()
        assert answer.status_code == 503
        assert "was ended by signal 9 (SIGKILL)" in answer.json()["error"]
        answer = service.client.post("/v1/predict", files={"image": ("a.tif", picture(32))})
        assert answer.status_code == 200
        assert service.jobs.supervisor.pid not in (None, worker)
        assert gone(service)


def temporary(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith("ambiseg-serve-")}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_in_order(tmp_path, number, code):
    command = [sys.executable, "-m", "ambiseg", "serve", "demo", "--port", "0", "--threads", "1", "--json"]
    (tmp_path / "ambiseg-serve-4194304999-x").mkdir()  # of a process that cannot be
    environment = {**os.environ, "TMPDIR": str(tmp_path), "AMBISEG_TOKEN": "some-token-or-other"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment) as process, ExitStack() as afterwards:
        afterwards.callback(process.kill)  # a test that fails must not wait for it
        assert process.stdout is not None
        assert process.stderr is not None
        lines = ""
        while not lines.rstrip().endswith("}") and (line := process.stdout.readline()):
            lines += line
        about = json.loads(lines)
        assert about["models"] == ["demo"]
        assert httpx.get(f"{about['url']}/v1/models", trust_env=False).status_code == 401
        with httpx.Client(base_url=about["url"], headers={"Authorization": "Bearer some-token-or-other"}) as client:
            assert client.get("/v1/models").status_code == 200
            answers = list[Any]()
            body = {"array": [[-500, 0], [0, -500]], "samples": 4}
            thread = threading.Thread(target=lambda: answers.append(client.post("/v1/predict", json=body)))
            thread.start()
            thread.join()
            assert answers[0].status_code == 200
            assert [name for name in temporary(tmp_path) if str(process.pid) in name]
            assert len(temporary(tmp_path)) == 1  # what another had left is gone
            process.send_signal(number)
            assert process.wait(30) == code
        assert process.stderr.read() == "ambiseg: stopped\n"
    assert temporary(tmp_path) == set()

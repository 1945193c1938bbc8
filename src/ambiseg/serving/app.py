"""The application: what is answered at which path."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ambiseg import __version__
from ambiseg.serving.guard import Guard
from ambiseg.serving.jobs import Jobs, Refused
from ambiseg.serving.routes import router
from ambiseg.serving.settings import Limits, Served
from ambiseg.serving.supervisor import Supervisor
from ambiseg.serving.uploads import BadRequest

_LINGER = 2.0  # seconds that a client has to stop sending
FOLDER = "ambiseg-serve-"  # in the folder for temporary files; then the number of the process
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names of this machine for itself
DESCRIPTION = """\
Weighted masks of images: every plausible segmentation, and how likely each one is.

Errors are `{"error": "one line"}`. Where a token is asked for, send `Authorization: Bearer TOKEN`."""


def create_app(
    models: Sequence[Served],
    *,
    token: str | None = None,
    hosts: Sequence[str] = LOOPBACK,
    limits: Limits | None = None,
    extra: Sequence[APIRouter] = (),
    device: str = "cpu",
    threads: int | None = None,
    jobs: Jobs | None = None,
) -> FastAPI:
    """The service as an ASGI application.

    Args:
        models: that are served, at least one.
        token: that every request must bring; ``None``: none.
        hosts: names by which it may be called; ``"ip"``: every number of an address; ``"*"``: any name.
        limits: on what it takes.
        extra: further routes, which come before its own.
        device: to compute on.
        threads: of PyTorch, in the worker.
        jobs: a queue that was made, and perhaps started, before.

    ``app.state`` has ``jobs``, ``models``, ``limits``, ``metrics`` and ``root``, the folder of uploads.
    """
    limits = limits or Limits()
    if jobs is None:
        jobs = Jobs(Supervisor(models, device, threads), limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sweep()
        app.state.root = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
        try:
            await anyio.to_thread.run_sync(jobs.start)
            yield
        finally:
            await anyio.to_thread.run_sync(jobs.close)
            shutil.rmtree(app.state.root, ignore_errors=True)

    app = FastAPI(
        title="ambiseg",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.jobs, app.state.models, app.state.limits = jobs, list(models), limits
    app.state.metrics, app.state.receiving = jobs.metrics, 0
    for one in (*extra, router):
        app.include_router(one)
    _explain(app)
    app.add_middleware(Guard, token=token, hosts=tuple(hosts), metrics=jobs.metrics)
    return app


def sweep() -> None:
    """Remove what services that were killed have left of uploads."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*-*"):
        number = folder.name.removeprefix(FOLDER).partition("-")[0]
        with suppress(OSError):  # of another user
            if number.isdigit() and folder.is_dir() and not folder.is_symlink() and not _runs(int(number)):
                shutil.rmtree(folder)


def _runs(process: int) -> bool:
    if os.name != "posix":  # where a signal of 0 is none
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number that large
        return False
    except OSError:  # of another user
        return True
    return True


class Closing(JSONResponse):
    """An answer to a request whose body was not read to the end. The connection is closed after it; what still arrives
    is thrown away for a while, because a connection that is closed over unread bytes takes the answer with it."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers["Connection"] = "close"
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with anyio.move_on_after(_LINGER):
            while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _explain(app: FastAPI) -> None:
    """Every error is one line of JSON."""

    def answer(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": " ".join(message.split())}, status, headers)

    async def bad(_: Request, error: Any) -> JSONResponse:
        return Closing({"error": str(error)}, error.status) if error.unread else answer(error.status, str(error))

    async def refused(_: Request, error: Any) -> JSONResponse:
        return Closing({"error": str(error)}, 503, {"Retry-After": str(error.after)})

    async def usual(request: Request, error: Any) -> JSONResponse:
        said = {404: "expected a path of this service, found another", 405: "expected another method for this path"}
        return answer(error.status_code, said.get(error.status_code, str(error.detail)), error.headers)

    async def invalid(_: Request, error: Any) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        return answer(422, f"{place}: {first['msg']}, found {str(first.get('input'))[:60]!r}")

    async def fault(_: Request, error: Exception) -> JSONResponse:
        return answer(500, f"a fault of ambiseg's own: {type(error).__name__}: {str(error)[:200]}")

    handlers: Any = {BadRequest: bad, Refused: refused, HTTPException: usual, RequestValidationError: invalid}
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Exception, fault)

"""The paths of the service."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from ambiseg import __version__
from ambiseg.serving.answers import file_of, with_masks
from ambiseg.serving.asked import Asked, FileFormat, Read, read_request
from ambiseg.serving.jobs import Job, Jobs
from ambiseg.serving.openapi import BODY, PREDICTED, failures
from ambiseg.serving.scene import packed
from ambiseg.serving.uploads import BadRequest, Upload

router = APIRouter()
Identifier = Annotated[str, Path(max_length=64, description="what `POST /v1/predictions` answered")]


@router.get("/", include_in_schema=False)
async def root() -> JSONResponse:
    """What this is."""
    return JSONResponse({"service": "ambiseg", "version": __version__, "description": "/openapi.json"})


@router.get("/healthz", tags=["service"], summary="Whether predictions can be made", responses=failures(503))
async def healthz(request: Request) -> JSONResponse:
    """`ok`; `starting` while the models are loaded; `failing`, with status 503, if they cannot be."""
    health = request.app.state.jobs.health
    return JSONResponse(health, 503 if health["status"] == "failing" else 200)


@router.get("/metrics", tags=["service"], summary="Numbers for Prometheus", response_class=PlainTextResponse)
async def metrics(request: Request) -> PlainTextResponse:
    """Requests, their latencies, the queue, predictions and failures."""
    jobs: Jobs = request.app.state.jobs
    return PlainTextResponse(jobs.metrics.text(jobs.gauges), media_type="text/plain; version=0.0.4")


@router.get("/v1/models", tags=["models"], summary="The models that are served", responses=failures(401))
async def models(request: Request) -> JSONResponse:
    """What each model's numbers mean: its classes, the channels and units of its images."""
    return JSONResponse({"models": [one.about(index) for index, one in enumerate(request.app.state.models)]})


@router.post(
    "/v1/predict",
    tags=["predictions"],
    summary="Predict an image and wait for the masks",
    openapi_extra={"requestBody": BODY},
    responses=PREDICTED,
)
async def predict(request: Request) -> Response:
    """One image, or the DICOM files of one series, as a form or as JSON. Small images of one size that are asked for at
    the same time go through the network together."""
    job, asked = await _submitted(request, kept=False)
    jobs: Jobs = request.app.state.jobs
    try:
        await _ended(request, job)
    except BaseException:
        jobs.drop(job)
        raise
    if job.state != "done" or job.scene is None:
        raise BadRequest(job.status, job.error)
    if asked.format != "json":
        return await _file(request, job, asked.format)
    scene = job.scene

    def answer() -> Response:
        return JSONResponse(with_masks(scene.summary(), scene.prediction, asked.masks))

    return await asyncio.to_thread(answer)


@router.post(
    "/v1/predictions",
    tags=["predictions"],
    summary="Ask for a prediction",
    status_code=202,
    openapi_extra={"requestBody": BODY},
    responses=failures(400, 401, 413, 415, 422, 503),
)
async def begin(request: Request) -> JSONResponse:
    """The same as `/v1/predict`, without waiting: the answer has an `id` to look after it. `format` and `masks` have no
    meaning here."""
    job, _ = await _submitted(request)
    return JSONResponse({"id": job.id}, 202)


@router.get(
    "/v1/predictions/{id}", tags=["predictions"], summary="How a prediction is coming along", responses=failures(404)
)
async def look(request: Request, id: Identifier) -> JSONResponse:
    """Its state, `waiting`, `running`, `done`, `failed` or `cancelled`; how much of it is done; and the summary."""
    return JSONResponse(await asyncio.to_thread(_job(request, id).about))


@router.delete("/v1/predictions/{id}", tags=["predictions"], summary="Cancel or forget", responses=failures(404))
async def drop(request: Request, id: Identifier) -> JSONResponse:
    """Stop a prediction, or free the memory of one that is done."""
    job = _job(request, id)
    await asyncio.to_thread(request.app.state.jobs.drop, job)
    return JSONResponse({"id": job.id, "dropped": True})


@router.get(
    "/v1/predictions/{id}/slices/{k}",
    tags=["predictions"],
    summary="One slice, as arrays",
    response_class=Response,
    responses=failures(404, 409),
)
async def one_slice(
    request: Request,
    id: Identifier,
    k: Annotated[int, Path(ge=0, le=1 << 31, description="number of the slice, from 0")],
) -> Response:
    """The magic bytes `AMB1`, the length of a header as uint32, the header in JSON, then the arrays that it lists, all
    little endian. `offsets` count from the end of the header."""
    job = _finished(request, id)
    assert job.scene is not None
    if k >= job.scene.slices:
        raise BadRequest(404, f"expected a slice from 0 to {job.scene.slices - 1}, found {k}")
    zipped = "gzip" in request.headers.get("accept-encoding", "")

    def content() -> bytes:
        assert job.scene is not None
        found = packed(job.scene, k)
        return gzip.compress(found, 1) if zipped else found

    headers = {"Vary": "Accept-Encoding"} | ({"Content-Encoding": "gzip"} if zipped else {})
    return Response(await asyncio.to_thread(content), 200, headers, "application/octet-stream")


@router.get(
    "/v1/predictions/{id}/files",
    tags=["predictions"],
    summary="The files of `ambiseg predict`",
    response_class=Response,
    responses=failures(404, 409),
)
async def files(
    request: Request, id: Identifier, format: Annotated[FileFormat, Query(description="see `/v1/predict`")] = "files"
) -> Response:
    """As one file, or as a zip."""
    return await _file(request, _finished(request, id), format)


# -- inside -----------------------------------------------------------------------------------------------------------


async def _submitted(request: Request, kept: bool = True) -> tuple[Job, Asked]:
    """Read a request and put it into the queue; its place there is taken before its body is read."""
    state = request.app.state
    jobs: Jobs = state.jobs

    def count(number: int) -> None:
        jobs.metrics.uploaded += number

    with jobs.place():
        found: Read = await read_request(request, state.root, state.limits, count)
        try:
            options, model = found.asked.options(), found.asked.index(state.models)
            return jobs.submit(found.image, found.name, model, options, reserved=True, kept=kept), found.asked
        except BaseException:
            if isinstance(found.image, Upload):
                found.image.close()
            raise


async def _ended(request: Request, job: Job) -> None:
    """Wait until a job has ended, or its client is gone."""
    ended = asyncio.wrap_future(job.ended)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    if not ended.done():
        ended.cancel()
        raise BadRequest(400, "expected a client that waits, found that it is gone")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _job(request: Request, id: str) -> Job:
    job = request.app.state.jobs.get(id)
    if job is None:
        raise BadRequest(404, "expected the id of a prediction, found none that is kept")
    return job


def _finished(request: Request, id: str) -> Job:
    job = _job(request, id)
    if job.scene is None:
        raise BadRequest(409, f"expected a prediction that is done, found one that is {job.state}")
    return job


async def _file(request: Request, job: Job, form: str) -> Response:
    assert job.scene is not None
    made: Callable[..., Any] = file_of
    file = await asyncio.to_thread(made, job.scene.prediction, form, request.app.state.root)
    return Response(file.content, 200, file.headers, file.kind)

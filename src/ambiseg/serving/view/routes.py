"""What the page asks for beside predictions: itself, the list of cases, and opening one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from weakref import WeakKeyDictionary

import anyio.to_thread
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from ambiseg import __version__
from ambiseg._util.errors import DataError
from ambiseg._util.text import count
from ambiseg.io.formats import FORMATS
from ambiseg.serving.asked import Asked
from ambiseg.serving.jobs import Job
from ambiseg.serving.scene import Scene
from ambiseg.serving.settings import Served
from ambiseg.serving.uploads import BadRequest
from ambiseg.serving.view.deciding import Decisions
from ambiseg.serving.view.listing import Entry, columns_of
from ambiseg.serving.view.page import HEADERS, page, palette, static_files
from ambiseg.viz.colours import class_colours

Kind = Literal["models", "predictions", "data"]
Keep = Annotated[int, Query(ge=1, le=64, description="how many masks stand for all of them, at most")]
Class = Annotated[int, Query(ge=0, le=1 << 16, description="the class that is measured")]
_HINTS = {
    "models": "Drop an image here",
    "predictions": "Choose a prediction in the list",
    "data": "Choose a case in the list",
}
_LISTED = {"image": "Images", "case": "Cases", "readers": "Cases", "prediction": "Predictions"}


@dataclass(frozen=True)
class View:
    """What there is to look at.

    Args:
        kind: new images (``models``), saved ``predictions``, or annotated ``data`` alone.
        title: in the head of the page.
        models: that predict.
        entries: of the list.
        opened: the number of the entry to show at the start.
    """

    kind: Kind
    title: str
    models: Sequence[Served] = ()
    entries: Sequence[Entry] = field(default=())
    opened: int | None = None

    def page(self) -> str:
        """The HTML, with as much as is known already, so that nothing moves when the rest is."""
        first, listed = self.models[0] if self.models else None, bool(self.entries)
        columns = columns_of(self.entries)
        scored = any(column["key"] == "ged" for column in columns)
        kinds = {_LISTED[entry.kind]: None for entry in self.entries}
        hint = _HINTS[self.kind]
        if self.kind == "models" and listed:
            hint += f", or choose one in the list ({count(len(self.entries), 'entry', 'entries')})"
        formats = f"{' '.join(FORMATS)}; the files of one DICOM series together"
        stratum = first.card.stratum if first is not None else ""
        off = "hidden" if self.kind != "models" else ""
        values = {
            "title": self.title,
            "kind": self.kind,
            "runs": str(max(1, len(self.models))),
            "list": "auto" if listed else "none",  # open where there is room
            "columns": str(len(columns)),
            "nolist": "" if listed else "hidden",
            "listed": next(iter(kinds)) if len(kinds) == 1 else "Images",
            "hint": hint,
            "filter": "Filter, such as ged>0.5" if scored else "Filter by name",
            "formats": formats if self.kind == "models" else "",
            "nochoose": off,
            "noprediction": off,
            "draws": f"Masks per {stratum}" if stratum else "Masks",
            "usual": "4" if stratum else "16",
        }
        return page(values)

    def about(self) -> dict[str, Any]:
        """As ``/v1/view`` has it."""
        cards = [model.card for model in self.models]
        return {
            "version": __version__,
            "kind": self.kind,
            "title": self.title,
            "palette": palette(),
            "colours": [class_colours(card.classes, card.evaluated) for card in cards],
            "evaluated": list(cards[0].evaluated) if cards else [1],
            "open": self.opened,
        }

    def list(self) -> dict[str, Any]:
        """As ``/v1/cases`` has it."""
        cases = [
            {"index": i, "name": entry.name, "kind": entry.kind, "values": dict(entry.values)}
            for i, entry in enumerate(self.entries)
        ]
        return {"columns": columns_of(self.entries), "cases": cases}


def view_router(view: View) -> APIRouter:
    """The routes of a page."""
    router, files, text = APIRouter(), static_files(), view.page()
    made: WeakKeyDictionary[Job, Decisions] = WeakKeyDictionary()

    @router.get("/", include_in_schema=False)
    def index() -> Response:
        return HTMLResponse(text, headers=HEADERS)

    @router.get("/static/{name}", include_in_schema=False)
    def static(name: str) -> Response:
        if name not in files:
            raise BadRequest(404, "expected a file of the page, found none of that name")
        content, kind = files[name]
        return Response(content, media_type=kind, headers=HEADERS)

    @router.get("/v1/view", summary="What the page is for, and its colours")
    def about() -> dict[str, Any]:
        return view.about()

    @router.get("/v1/cases", summary="What can be opened, with what is known of it")
    def cases() -> dict[str, Any]:
        return view.list()

    @router.post("/v1/cases/{index}/open", status_code=202, summary="Open one of them: a job as of /v1/predictions")
    async def open_one(index: int, asked: Asked, request: Request) -> Response:
        if not 0 <= index < len(view.entries):
            raise BadRequest(404, f"expected a case from 0 to {len(view.entries) - 1}, found {index}")
        model = asked.index(view.models) if view.models else 0
        options, jobs = asked.options(), request.app.state.jobs
        try:
            job = await anyio.to_thread.run_sync(view.entries[index].open, jobs, model, options)
        except DataError as error:
            raise BadRequest(422, " ".join(str(error).split())) from None
        return JSONResponse({"id": job.id, "state": job.state}, 202)

    @router.get("/v1/predictions/{id}/profile", summary="Pixels of each class that are expected in each slice")
    async def profile(id: str, request: Request) -> dict[str, Any]:
        job = request.app.state.jobs.get(id)
        if job is None or job.scene is None:
            raise BadRequest(404, "expected the id of a prediction that is done, found none")
        return {"expected": await anyio.to_thread.run_sync(expected_pixels, job.scene)}

    def decisions(id: str, request: Request) -> Decisions:
        job = request.app.state.jobs.get(id)
        if job is None or job.scene is None:
            raise BadRequest(404, "expected the id of a prediction that is done, found none")
        if job not in made:
            evaluated = job.scene.summary().get("evaluated") or (view.models[job.model].card.evaluated)
            made[job] = Decisions(job.scene, evaluated)
        return made[job]

    @router.get("/v1/predictions/{id}/decisions", summary="One mask, fewer masks, measurements, guarantees")
    async def decided(id: str, request: Request, keep: Keep = 3, of: Class = 1) -> dict[str, Any]:
        found = await anyio.to_thread.run_sync(decisions, id, request)
        if of >= found.classes:
            raise BadRequest(422, f"of: expected a class from 0 to {found.classes - 1}, found {of}")
        return await anyio.to_thread.run_sync(found.about, keep, of)

    @router.get("/v1/predictions/{id}/decisions/{k}", summary="Their masks in one slice, as arrays")
    async def decided_slice(id: str, request: Request, k: Annotated[int, Path(ge=0)], keep: Keep = 3) -> Response:
        found = await anyio.to_thread.run_sync(decisions, id, request)
        if k >= found.scene.slices:
            raise BadRequest(404, f"expected a slice from 0 to {found.scene.slices - 1}, found {k}")
        return Response(await anyio.to_thread.run_sync(found.packed, k, keep), media_type="application/octet-stream")

    return router


def expected_pixels(scene: Scene) -> list[list[float]]:
    """``[D][C]``: the sum of each class's marginal over each slice."""
    return [(scene.slice(k)["marginal"].sum((1, 2)) / 255).round(1).tolist() for k in range(scene.slices)]

"""The workspace over HTTP: on 127.0.0.1 only, for browsers on this machine, and nothing is written."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from urllib.parse import urlencode

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from kvbench.common.errors import UsageError
from kvbench.common.ports import free_port
from kvbench.common.text import upper_first
from kvbench.report.page import PLOTLY_JS, template_file
from kvbench.report.side_by_side import groups_of, one_group
from kvbench.report.wording import say
from kvbench.view import pages
from kvbench.view.capacity import form
from kvbench.view.workspace import DAMAGED, Filter, Stamp, Workspace

HOST = "127.0.0.1"
_OWN_NAMES = ["127.0.0.1", "localhost"]  # a page of another name that resolves to us is answered with 400
_GRACE_S = 1
_KEPT_PAGES = 12  # reports of runs, about half a megabyte each
_HEADERS = {
    "content-security-policy": "default-src 'self' 'unsafe-inline' data: blob:; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
LINKS = pages.Links(
    runs="/",
    history="/history",
    plotly=f"/{PLOTLY_JS}",
    capacity="/capacity",
    run=lambda slug: f"/runs/{slug}",
    pair=lambda before, after: f"/compare?run={before}&run={after}",
)


def make_app(workspace: Workspace) -> FastAPI:
    """The pages of ``workspace``: list, runs, cells side by side, history, capacity."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=_OWN_NAMES, www_redirect=False)

    @lru_cache(_KEPT_PAGES)
    def run_page(slug: str, stamp: Stamp) -> str:
        """The report of a run while its files are those of ``stamp``."""
        return pages.run(_or_404(lambda: workspace.run(workspace.row(slug))), LINKS)

    @lru_cache(1)
    def history_page(stamps: tuple[tuple[str, Stamp], ...]) -> str:
        return pages.history(workspace, LINKS)

    @app.get("/", response_class=HTMLResponse)
    def runs(request: Request) -> str:
        return _runs_page(workspace, request)

    @app.get("/runs/{slug}", response_class=HTMLResponse)
    def run(slug: str) -> str:
        row = _or_404(lambda: workspace.row(slug))
        if row.state == DAMAGED:
            raise HTTPException(404, say("view.damaged", row=row))
        return run_page(slug, row.stamp)

    @app.get("/compare")
    def compare(request: Request) -> HTMLResponse:
        query = request.query_params
        chosen = query.getlist("cell")
        links = replace(LINKS, runs="/?" + urlencode([("cell", value) for value in chosen])) if chosen else LINKS
        try:
            if slugs := query.getlist("run"):
                groups = groups_of(*(workspace.run(workspace.row(slug)) for slug in slugs))
            else:
                groups = one_group(workspace.cells(chosen))
        except UsageError as error:
            return HTMLResponse(_runs_page(workspace, request, upper_first(f"{error}.")), status_code=400)
        return HTMLResponse(pages.compared(groups, links))

    @app.get("/history", response_class=HTMLResponse)
    def history() -> str:
        return history_page(tuple((row.slug, row.stamp) for row in workspace.rows()))

    @app.get("/capacity")
    def capacity(request: Request) -> HTMLResponse:
        filled = form(request.query_params)
        return HTMLResponse(pages.capacity(filled, LINKS), status_code=400 if filled.error else 200)

    @app.get(f"/{PLOTLY_JS}")
    def plotly() -> Response:
        headers = {"cache-control": "max-age=31536000, immutable"}  # its address has its version
        return Response(template_file(PLOTLY_JS), media_type="text/javascript", headers=headers)

    app.middleware("http")(_add_headers)
    app.add_exception_handler(HTTPException, _answer_error)
    return app


async def _add_headers(request: Request, answer: Callable) -> Response:
    try:
        response = await answer(request)
    except Exception as error:  # a defect of one page must not look like one of all
        response = HTMLResponse(pages.defect(error, LINKS), status_code=500)
    response.headers.update(_HEADERS)
    return response


def _runs_page(workspace: Workspace, request: Request, error: str = "") -> str:
    query = request.query_params
    shown = Filter(**{name: query.get(name, "") for name in ("text", "workload", "state", "machine")})
    return pages.runs(workspace, LINKS, query.getlist("cell"), shown, error)


def _or_404(find: Callable):
    """Returns what ``find`` does; its UsageError becomes an answer with status 404."""
    try:
        return find()
    except UsageError as error:
        raise HTTPException(404, str(error)) from None


async def _answer_error(request: Request, error: Exception) -> HTMLResponse:
    assert isinstance(error, HTTPException)
    headline = say("view.status", str(error.status_code))
    text = "" if error.detail in ("Not Found", "Method Not Allowed") else upper_first(f"{error.detail}.")
    return HTMLResponse(pages.message(headline, text, LINKS), status_code=error.status_code)


class WorkspaceServer(uvicorn.Server):
    """uvicorn's server; calls ``on_ready`` when it listens, and ends well on SIGINT and SIGTERM."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: uvicorn would raise the signal again after a clean stop."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: the caller stops us
                asyncio.get_running_loop().add_signal_handler(number, self.stop)
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    def stop(self) -> None:
        self.should_exit = True


def serve(workspace: Workspace, port: int, on_ready: Callable[[str], None]) -> int:
    """Serves until SIGINT or SIGTERM; returns 0. ``on_ready`` gets the URL. Raises UsageError for a taken port."""
    sock = socket.create_server((HOST, free_port(port, HOST)))
    url = f"http://{HOST}:{sock.getsockname()[1]}/"
    config = uvicorn.Config(
        make_app(workspace), ws="none", log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S
    )
    with sock:
        WorkspaceServer(config, lambda: on_ready(url)).run(sockets=[sock])
    return 0

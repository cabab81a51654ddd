"""``kvbench view``."""

from __future__ import annotations

import os
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from kvbench.common import errors
from kvbench.common.options import Options, Port, argument, option, switch, takes


@dataclass(frozen=True, kw_only=True)
class ViewRequest(Options):
    """The request of ``kvbench view``."""

    folders: tuple[Path, ...] = argument("FOLDERS", ())
    port: Port = option("Serve at this port; 0: a free one.", default=0)
    export_dir: Path | None = option("Write static pages into DIR, and end.", "--export", metavar="DIR")
    no_open: bool = switch("Do not open a browser.")


@takes(ViewRequest)
def view(request: ViewRequest) -> int:
    """Look at the runs in FOLDERS in a browser.

    Reports, cells side by side, history and capacity; FOLDERS is results/ by default.

    Serves http://127.0.0.1:PORT/ to browsers on this machine until Ctrl-C; runs are read again when their files change.
    Any two to six cells of any runs can be put side by side. Damaged runs are listed with what is wrong with them.

    \b
    Examples:
      kvbench view results/
      kvbench view results/ --export public/     # static pages, for artifacts of CI or a branch of pages
    \b
    No files are written, except those of --export: index.html, history.html, runs/, compare/ and plotly.js once; DIR
    is new, empty or holds an earlier export. The capacity form needs the server and is left out there.
    Exit codes: 0 stopped or written, 2 bad input or a port that is taken, 5 --export found no run.
    """
    from rich.console import Console

    from kvbench.common.console import status_line
    from kvbench.common.ports import free_port
    from kvbench.common.text import data_size, plural
    from kvbench.view.export import check_export_dir, export
    from kvbench.view.server import serve
    from kvbench.view.workspace import Workspace

    export_dir, port = request.export_dir, request.port
    workspace, console = Workspace(request.folders or (Path("results"),)), Console(stderr=True)
    if export_dir is None:
        free_port(port)  # before the reading, which takes a while
    else:
        check_export_dir(export_dir)
    with status_line(console, "reading runs") as update:
        runs = len(workspace.rows(lambda done, total: update(f"reading runs: {done} of {total}")))
    if export_dir is None:

        def on_ready(url: str) -> None:
            print(f"kvbench view: {url} ({plural(runs, 'run')}; Ctrl-C ends it)", flush=True)
            if not request.no_open and (
                os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
            ):  # no text browser here
                webbrowser.open(url)

        return serve(workspace, port, on_ready)
    if not runs:
        errors.say("there is no run to export: give a folder that holds runs, such as results/")
        return errors.EXIT_NOTHING
    with status_line(console, "writing pages") as update:
        files = export(workspace, export_dir, update)
    size = data_size(sum(path.stat().st_size for path in files))
    print(f"export: {export_dir / 'index.html'} ({plural(runs, 'run')}, {plural(len(files), 'file')}, {size})")
    return 0

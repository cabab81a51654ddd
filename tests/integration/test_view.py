"""The workspace as a reader meets it: in Chromium, without JavaScript, from the keyboard, as a process."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvicorn

from kvbench.view.export import export
from kvbench.view.server import make_app
from kvbench.view.workspace import Workspace
from tests.support.browser import LAPTOP, PHONE, Browser
from tests.support.loads import ROOT
from tests.support.synthetic_run import PAIR, make_run
from tests.support.toy_engine import Scenario

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that can be compared, one whose names are markup, and a damaged one."""
    folder = tmp_path_factory.mktemp("view") / "results"
    small = {"configs": PAIR, "num_requests": 24, "concurrencies": (6,)}
    for day, name in ((1, "before"), (2, "after"), (3, f"{EVIL[:-9]}<")):
        run = make_run(folder / "mixed" / f"{name}-run", Scenario(**small, workload_name=EVIL if day == 3 else "mixed"))
        manifest = json.loads((run / "manifest.json").read_text())
        manifest["started"] = f"2026-01-0{day}T10:00:00+00:00"
        manifest |= {"model": {"name": EVIL}, "cpu": {"model": EVIL, "cores": 2}} if day == 3 else {}
        (run / "manifest.json").write_text(json.dumps(manifest))
    (folder / "mixed" / "damaged").mkdir()
    (folder / "mixed" / "damaged" / "manifest.json").write_text("{")
    return folder


@pytest.fixture(scope="module")
def url(results: Path) -> Iterator[str]:
    """The served workspace of ``results``, without a slash at its end."""
    config = uvicorn.Config(make_app(Workspace([results])), host="127.0.0.1", port=0, log_level="warning")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.02)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(timeout=10)


@pytest.fixture(scope="module")
def public(results: Path) -> Path:
    """The static pages of ``results``."""
    export(Workspace([results]), results.parent / "public")
    return results.parent / "public"


@pytest.fixture(scope="module")
def compared(results: Path) -> str:
    """The address of three cells side by side, one of them of the run with markup in its names."""
    rows = Workspace([results]).rows()
    cells = [row.cells[-1].value for row in rows if row.cells]
    return "/compare?" + "&".join(f"cell={value}" for value in reversed(cells))


@pytest.mark.parametrize("width", [PHONE, pytest.param(LAPTOP, marks=pytest.mark.full)])
@pytest.mark.parametrize("page", ["/", "/compare", "/history", "/capacity?page_size=x"])
def test_every_page_is_well_in_a_browser(browser: Browser, url: str, compared: str, page: str, width: int) -> None:
    scheme = "dark" if width == PHONE else "light"
    with browser.open(url + (compared if page == "/compare" else page), width=width, scheme=scheme) as opened:
        found = [each for each in opened.problems() if "status of 40" not in each]  # Chromium tells 404 and 400 apart
        assert found == []
        assert page not in ("/", "/compare") or EVIL in opened.text()


@pytest.mark.full
def test_a_run_opens_from_the_list_and_everything_is_reached_from_the_keyboard(browser: Browser, url: str) -> None:
    with browser.open(url + "/") as opened:
        assert opened.unreached_by_tab() == []
        opened.page.get_by_role("link", name=EVIL).press("Enter")
        opened.page.wait_for_url("**/runs/*")
        opened.settle()
        assert opened.errors() == [] and EVIL in opened.text() and opened.page.locator(".main-svg").count()


@pytest.mark.full
def test_the_forms_need_no_javascript(browser: Browser, url: str) -> None:
    with browser.open(url + "/", scripts=False) as opened:
        page = opened.page
        page.get_by_label("text").fill("before-run")
        page.get_by_label("text").press("Enter")
        assert page.locator("article").count() == 1
        page.locator("summary").click()
        page.locator("input[type=checkbox]").first.check()
        page.get_by_label("text").fill("after-run")
        page.get_by_role("button", name="Filter").click()
        page.locator("summary").click()
        page.locator("article input[type=checkbox]").first.check()
        page.get_by_role("button", name="side by side").first.click()
        assert "/compare" in page.url and "against A" in page.inner_text("h1")
        page.get_by_role("link", name="Capacity").click()
        page.get_by_label("page size").fill("64")
        page.get_by_role("button", name="Work it out").click()
        assert "tokens held" in page.inner_text("table") and page.get_by_label("page size").input_value() == "64"


@pytest.mark.full
def test_an_export_opens_from_a_folder(browser: Browser, public: Path) -> None:
    for path in sorted(public.rglob("*.html")):
        with browser.open(path) as opened:
            assert (opened.errors() if path.parent.name == "runs" else opened.problems()) == [], path.name
            assert path.name == "index.html" or opened.page.locator(".main-svg").count(), path.name


@pytest.fixture
def process(results: Path) -> Iterator[subprocess.Popen]:
    """``kvbench view`` as a process."""
    command = [sys.executable, "-m", "kvbench", "view", str(results), "--no-open"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        yield started
        started.kill()


def test_the_command_serves_on_this_machine_only_and_ends_cleanly(process: subprocess.Popen, results: Path) -> None:
    line = process.stdout.readline()
    address = urlsplit(next(word for word in line.split() if word.startswith("http")))
    assert address.hostname == "127.0.0.1" and "4 runs" in line
    for path in ("/runs/../../../../etc/passwd", "//etc/passwd", str(results)):
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
        connection.request("GET", path)  # as it is: a browser would take the dots out
        answer = connection.getresponse()
        assert answer.status == 404 and b"root:" not in answer.read()
    taken = [sys.executable, "-m", "kvbench", "view", str(results), "--no-open", "--port", str(address.port)]
    refused = subprocess.run(taken, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2 and f"--port {address.port} cannot be used" in refused.stderr
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0 and "Traceback" not in process.stderr.read()

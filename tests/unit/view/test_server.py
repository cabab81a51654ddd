"""The workspace over HTTP: what each page shows, and what it must not do."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote_plus

import pytest
from fastapi.testclient import TestClient

from kvbench.view.server import make_app
from kvbench.view.workspace import Workspace
from tests.support import synthetic_run
from tests.support.synthetic_run import MACHINE, repeat

EVIL = "<script>alert(1)</script>"
BASE = "http://127.0.0.1:8000"
write_run = partial(synthetic_run.write_run, samples=False)
FAST = {"a-c3": [repeat(i, value) for i, value in enumerate((110.0, 111.0, 109.0), 1)]}
SLOW = {"a-c3": [repeat(i, value) for i, value in enumerate((100.0, 101.0, 99.0), 1)]}


def client(*folders: Path) -> TestClient:
    return TestClient(make_app(Workspace(folders)), base_url=BASE)


def visible(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", " ", re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)))


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder with its time and size."""
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in (folder, *folder.rglob("*"))}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that can be compared, one of another machine, one invalid, one damaged, and a load."""
    folder = tmp_path_factory.mktemp("view") / "results"
    write_run(folder, 0, SLOW, sha="a" * 40)
    write_run(folder, 1, FAST, sha="b" * 40)
    write_run(folder, 2, FAST, sha="c" * 40, cpu={"model": "other", "cores": 64})
    write_run(folder, 3, FAST, sha="d" * 40, invalid=["a-c3"])
    (write_run(folder, 4, FAST, sha="e" * 40) / "manifest.json").write_text("{")
    write_run(folder, 5, FAST, kind="load")
    return folder


@pytest.fixture(scope="module")
def served(results: Path) -> Iterator[TestClient]:
    with client(results) as made:
        yield made


@pytest.fixture(scope="module")
def cell(results: Path) -> Callable[[str], str]:
    """The address of the one cell of the run whose commit begins with a letter."""
    rows = Workspace([results]).rows()
    return lambda letter: f"{next(row.slug for row in rows if row.name.endswith(7 * letter))}/a-c3"


def test_the_list_has_every_run_with_verdict_validity_machine_and_date(served: TestClient) -> None:
    page = served.get("/")
    text = visible(page.text)
    assert page.status_code == 200 and "5 runs: 3 valid, 1 invalid and 1 damaged" in text
    for shown in ("2026-01-01 03:00", "other, 64 cores", "nothing to compare it with", "manifest.json is not JSON"):
        assert shown in text
    assert "`kvbench load`" in text
    assert page.text.count('href="/runs/') == 4 and page.text.count('name="cell"') == 4


@pytest.mark.parametrize(
    ("query", "found"),
    [("text=ddd", 1), ("machine=other%2C+64+cores", 1), ("workload=mixed&state=valid&text=2026-01-02", 1)],
)
def test_the_list_is_narrowed_by_a_form(served: TestClient, query: str, found: int) -> None:
    page = served.get(f"/?{query}").text
    assert page.count('<article class="run">') == found and f"{found} of 5 runs" in visible(page)
    name, value = query.split("&")[0].split("=")
    assert name == "text" or f'value="{unquote_plus(value)}" selected' in page


def test_what_was_chosen_stays_chosen_while_the_list_is_narrowed(served: TestClient, cell: Callable) -> None:
    page = served.get("/", params={"text": "2026-01-02", "cell": [cell("a"), cell("b"), "nothing/at all"]}).text
    assert page.count(" checked") == 2 and "Chosen, not in this list" in page


def test_a_run_is_its_report_and_a_damaged_one_says_what_is_wrong(served: TestClient, cell: Callable) -> None:
    slug = cell("a").split("/")[0]
    page = served.get(f"/runs/{slug}")
    assert page.status_code == 200 and "where it came from" in page.text and '<nav class="workspace"' in page.text
    (plotly,) = re.findall(r'<script src="(/plotly-[\w.-]+\.js)">', page.text)
    script = served.get(plotly)
    assert len(script.content) > 1_000_000 and "javascript" in script.headers["content-type"]
    damaged = served.get(f"/runs/{cell('a').split('/')[0].replace('a' * 7, 'e' * 7).replace('01T', '05T')}")
    assert damaged.status_code == 404 and "is damaged: manifest.json is not JSON" in visible(damaged.text)


def test_cells_of_two_runs_are_compared(served: TestClient, cell: Callable[[str], str]) -> None:
    page = served.get("/compare", params={"cell": [cell("a"), cell("b")]})
    text = visible(page.text)
    assert page.status_code == 200 and "1.10x (1.08–1.12)" in text and "Welch" in text
    assert text.index("What differs") < text.index("commit") < text.index("Effects")
    (back,) = re.findall(r'<a href="([^"]*)">Runs</a>', page.text)
    assert served.get(html.unescape(back)).text.count(" checked") == 2
    whole = served.get("/compare", params={"run": [cell(letter).split("/")[0] for letter in "ab"]})
    assert whole.status_code == 200 and "B 1.10x" in visible(whole.text)


@pytest.mark.parametrize(("letter", "reason"), [("c", "another machine"), ("d", "invalid measurement (timestamp lag)")])
def test_what_cannot_be_compared_is_said_and_has_no_ratio(
    served: TestClient, cell: Callable[[str], str], letter: str, reason: str
) -> None:
    text = visible(served.get("/compare", params={"cell": [cell("a"), cell(letter)]}).text)
    assert reason in text and not re.search(r"\d\.\d\dx", text)


@pytest.mark.parametrize("letters", ["a", "aa", "abcdabc", "ax"])
def test_a_choice_that_cannot_be_compared_comes_back_with_the_list(
    served: TestClient, cell: Callable[[str], str], letters: str
) -> None:
    chosen = [cell(letter) if letter != "x" else "../../etc/passwd" for letter in letters]
    page = served.get("/compare", params={"cell": chosen})
    assert page.status_code == 400 and 'role="alert"' in page.text and page.text.count("<article") == 5


def test_the_history_shows_every_metric_of_the_runs(served: TestClient) -> None:
    page = served.get("/history")
    assert page.status_code == 200 and '"p95_ttft_ms' in page.text.replace("g0-", "") and "<nav" in page.text
    assert page.text.count('<figure id="g') >= 6


def test_names_from_outside_are_text_on_every_page(tmp_path: Path) -> None:
    for day in range(2):
        write_run(tmp_path, day, {EVIL.replace("/", ""): SLOW["a-c3"]}, name=EVIL, model={"name": EVIL},
                  device=EVIL, cpu={"model": EVIL, "cores": 2})  # fmt: skip
    rows = Workspace([tmp_path / "<script>alert(1)<"]).rows()
    assert len(rows) == 2 and rows[0].workload == EVIL
    with client(tmp_path) as served:
        pages = ["/", f"/?text={quote(EVIL)}", f"/runs/{quote(EVIL)}", f"/runs/{rows[0].slug}", "/history",
                 f"/capacity?model={quote(EVIL)}&page_size={quote(EVIL)}",
                 "/compare?" + "&".join(f"cell={quote(row.cells[0].value)}" for row in rows),
                 f"/compare?cell={quote(EVIL)}&cell={quote(EVIL)}"]  # fmt: skip
        for address in pages:
            page = served.get(address).text
            assert "<script>alert" not in page, address
            assert "&lt;script&gt;" in page or "no such" in page, address


@pytest.mark.parametrize(
    "address",
    ["/runs/..%2f..%2f..%2fetc%2fpasswd", "/runs/%2fetc%2fpasswd", "/%2e%2e/%2e%2e/etc/passwd", "/runs/mixed",
     "/manifest.json", "/docs", "/openapi.json", "/runs/%00"],
)  # fmt: skip
def test_no_path_is_served(served: TestClient, address: str) -> None:
    page = served.get(address)
    assert page.status_code == 404 and "root:" not in page.text and "There is no such page here" in page.text


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:8000", 200), ("localhost", 200), ("evil.example", 400), ("127.0.0.1.evil.example", 400), ("", 400)],
)  # fmt: skip
def test_only_this_machines_own_names_are_answered(served: TestClient, host: str, status: int) -> None:
    for address in ("/", "/capacity"):
        page = served.get(address, headers={"host": host, "origin": "http://evil.example"})
        assert page.status_code == status
        assert not any(name.startswith("access-control") for name in page.headers)
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        assert status == 200 or "run" not in page.text


def test_nothing_can_be_sent_and_nothing_is_written(served: TestClient, results: Path, cell: Callable) -> None:
    before = listing(results)
    for address in ("/", "/history", "/capacity", f"/runs/{cell('a').split('/')[0]}"):
        served.get(address)
    served.get("/compare", params={"cell": [cell("a"), cell("b")]})
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert served.request(method, "/").status_code == 405
    assert listing(results) == before


def test_a_defect_of_one_page_is_a_sentence_and_the_others_stay(results, cell, monkeypatch) -> None:
    monkeypatch.setattr("kvbench.view.pages.run", lambda *_: 1 / 0)
    with client(results) as served:
        page = served.get(f"/runs/{cell('a').split('/')[0]}")
        assert page.status_code == 500 and "could not be made" in page.text and "Traceback" not in page.text
        assert served.get("/").status_code == 200


def test_a_run_that_changes_is_shown_as_it_is_now(tmp_path: Path) -> None:
    manifest = write_run(tmp_path, 0, SLOW) / "manifest.json"
    with client(tmp_path) as served:
        address = f"/runs/{Workspace([tmp_path]).rows()[0].slug}"
        assert "synthetic" in served.get(address).text
        manifest.write_text(manifest.read_text().replace('"synthetic"', '"renewed machine"'))
        assert "renewed machine" in served.get(address).text and "renewed machine" in served.get("/").text


def test_several_folders_are_one_list_and_an_empty_one_is_empty(tmp_path: Path) -> None:
    with client(tmp_path) as served:
        assert "There is no run here yet" in served.get("/").text
        assert "There is no history yet" in served.get("/history").text
    write_run(tmp_path / "a", 0, SLOW)
    write_run(tmp_path / "b", 0, SLOW, name="chat", **MACHINE)
    with client(tmp_path / "a", tmp_path / "b") as served:
        assert "2 runs: 2 valid" in served.get("/").text

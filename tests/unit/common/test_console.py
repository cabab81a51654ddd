"""Lines and tables on terminals that are too narrow for them, and where there is no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvbench.common.console import fit, make_table, print_table

HEADS = ("configuration", "tok/s", "of it\nscales", "a very long heading", "failed")
ROW = ("paged (page 16)", "1,234.5", "2,048", "1.82x (1.75–2.00)", "0 of 144")


def printed(width: int, terminal: bool = True, **options: object) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    print_table(console, make_table(HEADS, [ROW], tight=True, title="t"), **options)  # type: ignore[arg-type]
    return out.getvalue()


def test_what_fits_is_shown_whole_and_nothing_is_named() -> None:
    text = printed(100)
    assert all(entry in text for entry in ROW) and "not shown" not in text


def test_columns_that_do_not_fit_are_left_out_from_the_right_and_named() -> None:
    text = printed(40)
    assert max(map(len, text.splitlines()[:-1])) <= 40
    assert text.endswith("not shown at this width: a very long heading, failed\n")
    assert all(entry in text for entry in ROW[1:3]) and not any(entry in text for entry in ROW[3:])


def test_some_columns_go_first_and_the_first_two_never() -> None:
    first = printed(52, drop_first=("of it\nscales", "failed"))
    assert "not shown at this width: of it scales\n" in first and ROW[3] in first and ROW[4] in first
    tiny = printed(12)
    assert ROW[1] in tiny and "not shown at this width: of it scales, a very long heading, failed" in tiny


def test_without_a_terminal_the_table_is_as_wide_as_it_needs_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = printed(50, terminal=False)
    assert all(entry in text for entry in ROW) and "not shown" not in text
    monkeypatch.setenv("COLUMNS", "50")
    assert "not shown at this width" in printed(50, terminal=False)


@pytest.mark.parametrize(
    ("width", "line"),
    [(15, "cell, 3/8, 0:12"), (14, "cell, 3/8"), (9, "cell, 3/8"), (8, "cell"), (2, "cell")],
)
def test_a_line_loses_its_least_important_words(width: int, line: str) -> None:
    assert fit([("cell", 0), ("", 1), ("3/8", 2), ("0:12", 7)], width, ", ") == line


def test_words_of_rank_0_stay_however_narrow_it_is() -> None:
    assert fit([("[1/4", 0), (", 0:43 left", 3), ("] cell", 0), (": 3/8", 1)], 5) == "[1/4] cell"

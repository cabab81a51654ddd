"""Headless Chromium, to look at pages as a reader does: errors, figures that are not drawn, text that is cut.

    def test_page(browser, tmp_path):
        with browser.open(tmp_path / "report.html", width=400, scheme="dark") as page:
            assert page.problems() == []

``browser`` is a fixture of tests/conftest.py; its tests are skipped where there is no Chromium.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LAPTOP, PHONE = 1300, 400  # px
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPEN_WITHIN_S = 60.0  # of a busy machine
_TOLERANCE_PX = 2.0
_MOST_SHOWN = 8  # problems of a kind

_DRAWN = """() => [...document.querySelectorAll(".plot")].every(
  plot => plot.classList.contains("js-plotly-plot") && plot.querySelector(".main-svg"))"""

# Texts of a figure: those that lie over one another, those that leave the figure, and figures without traces.
_FIGURES = """(tolerance) => {
  const found = [];
  const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > tolerance
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > tolerance;
  const visible = element => element.checkVisibility({opacityProperty: true, visibilityProperty: true});
  for (const plot of document.querySelectorAll(".plot")) {
    if (!visible(plot)) continue;
    const name = plot.closest("figure")?.id || plot.dataset.figure;
    if (!plot.querySelector(".main-svg .trace, .main-svg .hm, .main-svg .slice"))
      found.push(`figure ${name}: nothing is drawn`);
    const frame = plot.getBoundingClientRect();
    const texts = [...plot.querySelectorAll("svg text")]
      .filter(text => text.textContent.trim() && !text.closest(".hoverlayer, .modebar") && visible(text))
      .map(text => ({text: text.textContent.trim().slice(0, 40), box: text.getBoundingClientRect()}))
      .filter(({box}) => box.width > 0.5 && box.height > 0.5);
    texts.forEach(({text, box}, index) => {
      if (box.left < frame.left - tolerance || box.right > frame.right + tolerance
          || box.top < frame.top - tolerance || box.bottom > frame.bottom + tolerance)
        found.push(`figure ${name}: "${text}" leaves the figure`);
      texts.slice(index + 1).filter(other => over(box, other.box))
        .forEach(other => found.push(`figure ${name}: "${text}" and "${other.text}" overlap`));
    });
  }
  return found;
}"""

# Lines of text outside of figures: those that lie over one another, and those that are cut or leave the page.
_TEXTS = """(tolerance) => {
  const found = [], lines = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width + 1)
    found.push(`the page is ${document.documentElement.scrollWidth} px wide in a window of ${width}`);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest("script, style, svg, .plot, option")) continue;
    if (!parent.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    range.selectNodeContents(node);
    const text = node.textContent.trim().replace(/\\s+/g, " ").slice(0, 40);
    let limits = [];
    for (let each = parent, scrolls = false; each && each !== document.body; each = each.parentElement) {
      const style = getComputedStyle(each).overflowX;
      if (style === "auto" || style === "scroll") scrolls = true;
      if (!scrolls && (style === "hidden" || style === "clip")) limits.push(each.getBoundingClientRect());
      if (!scrolls && each.matches("td, th, button")) limits.push(each.getBoundingClientRect());
      if (scrolls) break;
      if (each.parentElement === document.body) limits.push({left: 0, right: width});
    }
    for (const box of range.getClientRects()) {
      if (box.width < 1 || box.height < 1) continue;
      if (limits.some(limit => box.left < limit.left - tolerance || box.right > limit.right + tolerance))
        found.push(`"${text}" is cut`);
      lines.push({text, box});
    }
  }
  lines.sort((a, b) => a.box.top - b.box.top);
  lines.forEach(({text, box}, index) => {
    for (let i = index + 1; i < lines.length && lines[i].box.top < box.bottom - tolerance; i++) {
      const other = lines[i].box;
      if (Math.min(box.right, other.right) - Math.max(box.left, other.left) > tolerance
          && Math.min(box.bottom, other.bottom) - other.top > tolerance)
        found.push(`"${text}" and "${lines[i].text}" overlap`);
    }
  });
  return found;
}"""

# What a keyboard must reach: everything that can be pressed, chosen or filled in, and is seen.
_CONTROLS = """() => {
  const seen = [...document.querySelectorAll("a[href], button, input, select, textarea, summary")]
    .filter(each => !each.disabled && each.checkVisibility());
  window.kvbenchControls = new Set(seen);
  return seen.length;
}"""
_FOCUSED = """() => { window.kvbenchControls.delete(document.activeElement); return window.kvbenchControls.size; }"""
_UNREACHED = """() => [...window.kvbenchControls].map(each => each.outerHTML.slice(0, 80))"""


def find_browser() -> str | None:
    """The system's Chromium; ``KVBENCH_BROWSER`` names another."""
    return os.environ.get("KVBENCH_BROWSER") or next(filter(None, map(shutil.which, _NAMES)), None)


class OpenPage:
    """A page that is open and drawn. ``page``: Playwright's."""

    def __init__(self, page: Any, draw_within_s: float | None) -> None:
        self.page, self._draw_within_s = page, draw_within_s
        self._errors: list[str] = []
        page.on("console", self._read)
        page.on("pageerror", lambda error: self._note(f"error of a script: {error}"))
        page.on("requestfailed", lambda request: self._note(f"not loaded: {request.url}"))
        page.on("dialog", self._dismiss)

    def _note(self, text: str) -> None:
        self._errors.append(text)

    def _read(self, said: Any) -> None:
        if said.type == "error":
            self._note(f"on the console: {said.text} ({said.location.get('url')})")

    def _dismiss(self, dialog: Any) -> None:
        self._note(f"a dialog opened: {dialog.message}")
        dialog.dismiss()

    def load(self, address: str) -> None:
        self.page.goto(address, timeout=1000 * _OPEN_WITHIN_S, wait_until="load")
        self.settle()

    def settle(self) -> None:
        """Waits until every figure is drawn and two frames have passed; without JavaScript there is no such wait."""
        if self._draw_within_s is None:
            return
        with suppress(Exception):  # ``errors`` says if one is not
            self.page.wait_for_function(_DRAWN, timeout=1000 * self._draw_within_s)
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def errors(self) -> list[str]:
        """Errors of scripts and on the console, files that were not loaded, dialogs, figures that were not drawn."""
        return [*self._errors, *([] if self.page.evaluate(_DRAWN) else ["a figure was not drawn"])]

    def problems(self) -> list[str]:
        """``errors``, and text that is cut, lies over other text or leaves its figure; empty when the page is well."""
        return [*self.errors(), *(text for script in (_FIGURES, _TEXTS) for text in _some(self._evaluate(script)))]

    def _evaluate(self, script: str) -> list[str]:
        return self.page.evaluate(script, _TOLERANCE_PX)

    def unreached_by_tab(self) -> list[str]:
        """Controls that the Tab key does not reach; opens nothing, presses nothing."""
        left = count = self.page.evaluate(_CONTROLS)
        for _ in range(2 * count + 20):
            if not left:
                break
            self.page.keyboard.press("Tab")
            left = self.page.evaluate(_FOCUSED)
        return self.page.evaluate(_UNREACHED)

    def text(self) -> str:
        """What a reader sees of the page, figures aside."""
        return self.page.inner_text("body")

def _some(found: list[str]) -> list[str]:
    more = [f"and {len(found) - _MOST_SHOWN} more like these"] if len(found) > _MOST_SHOWN else []
    return found[:_MOST_SHOWN] + more


class Browser:
    """One Chromium. ``chromium``: Playwright's."""

    def __init__(self, chromium: Any) -> None:
        self.chromium = chromium

    @contextmanager
    def open(
        self,
        target: Path | str,
        width: int = LAPTOP,
        height: int = 900,
        scheme: str = "light",
        scripts: bool = True,
        draw_within_s: float = _OPEN_WITHIN_S,
    ) -> Iterator[OpenPage]:
        """Opens a file or a URL and waits until it is drawn. ``scheme``: light or dark; ``scripts``: JavaScript."""
        context = self.chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, java_script_enabled=scripts
        )
        try:
            opened = OpenPage(context.new_page(), draw_within_s if scripts else None)
            opened.load(target.resolve().as_uri() if isinstance(target, Path) else target)
            yield opened
        finally:
            context.close()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts the system's Chromium. Raises LookupError, with the reason, where it or Playwright is missing."""
    path = find_browser()
    if path is None:
        raise LookupError(f"no browser: none of {', '.join(_NAMES)} is on the PATH")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise LookupError(f"Playwright is not installed ({error})") from None
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--disable-dev-shm-usage"])
        try:
            yield Browser(started)
        finally:
            started.close()

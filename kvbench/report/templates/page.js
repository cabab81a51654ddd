"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = Array.from(document.querySelectorAll(".plot"));
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function theme(isDark) {
    const ink = isDark ? "#d5dce4" : "#333c47";
    return {
      "font.color": ink,
      "hoverlabel.bgcolor": isDark ? "#242d38" : "#ffffff",
      "hoverlabel.bordercolor": isDark ? "#47525f" : "#c5ccd4",
      "hoverlabel.font.color": ink,
    };
  }
  // A list of the browser in place of plotly's own menu, which no keyboard reaches.
  function addList(plot, layout) {
    const menu = (layout.updatemenus || [])[0];
    if (!menu) { return; }
    delete layout.updatemenus;
    const label = document.createElement("label"), select = document.createElement("select");
    const plain = (text) => new DOMParser().parseFromString(text, "text/html").documentElement.textContent;
    menu.buttons.forEach((button, i) => select.add(new Option(plain(button.label), i)));
    select.addEventListener("change", () => {
      const { method, args } = menu.buttons[select.value];
      Plotly[method](plot, ...args);
    });
    label.className = "choice";
    label.append("Show ", select);
    plot.closest(".scroll").before(label);
  }

  // Panels below each other where the page is narrow, as the figure says in layout.meta.narrow, and back.
  const phone = window.matchMedia("(max-width: 640px)");
  function fit(plot, layout, isNarrow) {
    const narrow = (layout.meta || {}).narrow;
    if (!narrow) { return null; }
    const wide = (path) => path.replace(/\[(\d+)\]/g, ".$1").split(".").reduce((part, name) => (part || {})[name], layout);
    const changes = {};
    Object.keys(narrow).forEach((path) => { changes[path] = isNarrow ? narrow[path] : wide(path); });
    plot.style.minHeight = `${changes.height}px`;
    return changes;
  }

  const drawn = new Set();
  function paint(isDark) { drawn.forEach((plot) => Plotly.relayout(plot, theme(isDark))); }

  function draw(plot) {
    const { data, layout } = figures[Number(plot.dataset.figure)];
    const ink = theme(dark.matches);
    layout.font = { ...layout.font, color: ink["font.color"] };
    layout.hoverlabel = {
      ...layout.hoverlabel, bgcolor: ink["hoverlabel.bgcolor"], bordercolor: ink["hoverlabel.bordercolor"],
      font: { ...(layout.hoverlabel || {}).font, color: ink["font.color"] },
    };
    drawn.add(plot);
    addList(plot, layout);
    const shape = JSON.parse(JSON.stringify(layout));
    Plotly.newPlot(plot, data, layout, {
      responsive: true, displayModeBar: "hover", displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
    });
    if (!fit(plot, shape, phone.matches)) { return; }
    if (phone.matches) { Plotly.relayout(plot, fit(plot, shape, true)); }
    phone.addEventListener("change", (event) => Plotly.relayout(plot, fit(plot, shape, event.matches)));
  }
  // The first screen at once, then one figure after the other, so that the page can be read meanwhile.
  const left = plots.slice();
  function drawNext(count) {
    left.splice(0, count).forEach(draw);
    if (left.length) { setTimeout(() => drawNext(1), 0); }
  }
  drawNext(2);

  if (plots.length) {
    dark.addEventListener("change", (event) => paint(event.matches));
    window.addEventListener("beforeprint", () => {
      document.querySelectorAll("details").forEach((part) => { part.open = true; });
      drawNext(left.length);
      paint(false);
    });
    window.addEventListener("afterprint", () => paint(dark.matches));
  }

  function compare(a, b) {
    if (a === "" || b === "") { return (a === "") - (b === ""); }
    const x = Number(a), y = Number(b);
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, { numeric: true }) : x - y;
  }
  document.querySelectorAll("table.sortable").forEach((table) => {
    const heads = Array.from(table.querySelectorAll("thead th"));
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0];
      const key = (row) => (row.cells[column] ? row.cells[column].dataset.sort || "" : "");
      Array.from(body.rows)
        .sort((a, b) => {
          const empty = (key(a) === "") - (key(b) === "");
          return empty || compare(key(a), key(b)) * (down ? -1 : 1);
        })
        .forEach((row) => body.appendChild(row));
      table.classList.add("sorted");
    }));
  });
})();

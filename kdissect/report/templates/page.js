// The page's own behaviour: theme, charts when they come into view, sorting, narrowing, details of
// rows, copying.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const drawn = new Map();

  // --- theme ---------------------------------------------------------------------------------
  const darkness = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : darkness.matches);
  const keep = (value) => { try { localStorage.setItem("kdissect-theme", value); } catch { /* no storage */ } };
  const kept = () => { try { return localStorage.getItem("kdissect-theme"); } catch { return null; } };
  const themeButton = document.getElementById("theme");
  const nameTheme = () => {
    themeButton.textContent = isDark() ? "Light theme" : "Dark theme";
    themeButton.hidden = false;
  };
  const saved = kept();
  if (saved === "dark" || saved === "light") root.dataset.theme = saved;
  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    keep(root.dataset.theme);
    nameTheme();
    redraw();
  });
  darkness.addEventListener("change", () => { nameTheme(); redraw(); });
  nameTheme();

  const PALETTE = {
    light: ["#0969a8", "#d98200", "#00835f", "#b3508c", "#5aa9d6", "#c0470c", "#7a7f85", "#9a8b00"],
    dark: ["#58a6e8", "#f0b04a", "#3ecf9d", "#e58fc0", "#9fd4f2", "#ff8a5c", "#a3a9b0", "#e0d24a"],
  };
  const HEAT = {
    light: ["#dcebfa", "#8cbde8", "#2f7fc1", "#0a3d73"],
    dark: ["#16324f", "#2565a3", "#58a6e8", "#d6ecff"],
  };
  const chartTheme = () => {
    const style = getComputedStyle(root);
    const get = (name) => style.getPropertyValue(name).trim();
    const which = isDark() ? "dark" : "light";
    const font = "system-ui, sans-serif";
    const label = { labelColor: get("--muted"), titleColor: get("--muted"), labelFont: font, titleFont: font,
      labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal" };
    return {
      range: { category: PALETTE[which], heatmap: HEAT[which], ramp: HEAT[which] },
      axis: { ...label, gridColor: get("--line"), domainColor: get("--line"), tickColor: get("--line"),
        labelOverlap: true, labelSeparation: 8, gridOpacity: .6 },
      legend: { ...label, disable: true, labelLimit: 220 },  // the page's own wrap on a phone
      title: { color: get("--text") },
    };
  };

  // --- tooltips: text only, never markup ------------------------------------------------------
  const tip = document.getElementById("tip");
  const showTip = (_, event, __, value) => {
    if (value === null || value === undefined || value === "") { tip.style.display = "none"; return; }
    tip.replaceChildren();
    const lines = typeof value === "object" ? Object.entries(value) : [["", value]];
    for (const [name, text] of lines) {
      if (text === null || text === "null" || text === "" || text === "undefined" || TIMES.has(name)) continue;
      const line = document.createElement("div");
      for (const part of [name, text]) {
        const span = document.createElement("span");
        span.textContent = String(part);
        line.append(span);
      }
      tip.append(line);
    }
    tip.style.display = "block";
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    const right = document.documentElement.clientWidth;
    let x = event.pageX + 14, y = event.pageY + 14;
    if (x + wide > scrollX + right - 4) x = Math.max(scrollX + 4, event.pageX - wide - 14);
    if (y + high > scrollY + innerHeight - 4) y = Math.max(scrollY + 4, event.pageY - high - 14);
    tip.style.left = `${x}px`;
    tip.style.top = `${y}px`;
  };

  // --- charts ---------------------------------------------------------------------------------
  const TIMES = new Set(["t", "t_end"]);
  const clock = (ms) => new Date(ms).toISOString().slice(0, 23).replace("T", " ");
  const rowsOf = (chart, only) => {
    const names = Object.keys(chart.data);
    const count = names.length ? chart.data[names[0]].length : 0;
    const rows = [];
    for (let i = 0; i < count; i++) {
      if (only && chart.data[chart.choose][i] !== only) continue;
      const row = {};
      for (const name of names) row[name] = chart.data[name][i];
      rows.push(row);
    }
    return rows;
  };
  const SIZE = { width: "container", autosize: { type: "fit-x", contains: "padding" }, background: null };
  const drawLegend = (figure, names) => {
    const list = figure.querySelector(".legend");
    const colors = PALETTE[isDark() ? "dark" : "light"];
    list.replaceChildren(...names.map(([name, index]) => {
      const item = document.createElement("li");
      item.textContent = name;
      item.style.setProperty("--c", typeof index === "string" ? index : colors[index % colors.length]);
      return item;
    }));
  };
  const draw = (figure) => {
    const id = figure.dataset.chart;
    const chart = charts[id];
    const place = figure.querySelector(".draw");
    const menu = figure.querySelector("select");
    drawLegend(figure, chart.legend);
    drawn.get(id)?.finalize();
    drawn.set(id, null);
    const spec = { ...chart.spec, ...SIZE, data: { name: "d", values: rowsOf(chart, menu?.value) } };
    // ast: expressions are interpreted, the page's policy lets nothing be evaluated
    return vegaEmbed(place, spec, {
      mode: "vega-lite", renderer: "svg", ast: true, actions: false, defaultStyle: false,
      config: chartTheme(), tooltip: showTip,
    }).then((embedded) => {
      drawn.set(id, embedded);
      // its words are the caption's and the data table's
      place.querySelector("svg")?.setAttribute("aria-hidden", "true");
      figure.dataset.drawn = "yes";
    });
  };
  const redraw = () => {
    for (const id of [...drawn.keys()]) draw(document.querySelector(`[data-chart="${CSS.escape(id)}"]`));
  };
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "300px" });
  for (const figure of document.querySelectorAll("[data-chart]")) {
    watcher.observe(figure);
    const chart = charts[figure.dataset.chart];
    const menu = figure.querySelector("select");
    if (menu) {
      const names = [...new Set(chart.data[chart.choose])].sort();
      menu.append(new Option("all", ""), ...names.map((name) => new Option(name, name)));
      menu.addEventListener("change", () => draw(figure));
    }
    figure.querySelector("details.alt").addEventListener("toggle", (event) => fillTable(event.target, chart), { once: true });
  }
  addEventListener("beforeprint", () => {
    for (const figure of document.querySelectorAll("[data-chart]:not([data-drawn])")) draw(figure);
  });

  const LISTED = 2000;
  const fillTable = (details, chart) => {
    const names = Object.keys(chart.data);
    const rows = rowsOf(chart).slice(0, LISTED);
    const table = document.createElement("table");
    table.createCaption().textContent = details.querySelector("summary").textContent;
    const head = table.createTHead().insertRow();
    for (const name of names) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.className = "plain";
      cell.textContent = chart.labels[name] ?? name;
      head.append(cell);
    }
    const body = table.createTBody();
    for (const row of rows) {
      const line = body.insertRow();
      for (const name of names) {
        const value = row[name], cell = line.insertCell();
        cell.className = typeof value === "number" && !TIMES.has(name) ? "number" : "";
        cell.textContent = value === null || value === undefined ? "–"
          : TIMES.has(name) ? clock(value)
          : typeof value === "number" ? value.toLocaleString("en") : value;
      }
    }
    const scroll = document.createElement("div");
    scroll.className = "scroll";
    scroll.tabIndex = 0;
    scroll.append(table);
    details.append(scroll);
    if (chart.data[names[0]].length > LISTED) {
      details.append(`The first ${LISTED} of ${chart.data[names[0]].length} rows.`);
    }
  };

  // --- tables: sort by a heading, narrow by a text ---------------------------------------------
  const sortKey = (row, index) => {
    const cell = row.cells[index], value = cell.dataset.v ?? cell.textContent;
    const number = Number(value);
    return value === "" ? null : Number.isNaN(number) ? value : number;
  };
  const PAPER = 640;  // pixels of a table on a sheet
  // columns that the window has no room for are in a row below, on request
  const closeDetails = (within) => {
    for (const row of within.querySelectorAll("tr.detail")) row.remove();
    for (const button of within.querySelectorAll(".more")) button.setAttribute("aria-expanded", "false");
  };
  const toggleDetails = (button) => {
    const row = button.closest("tr"), titles = row.closest("table").tHead.rows[0].cells;
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    if (isOpen) { row.nextElementSibling.remove(); return; }
    const list = document.createElement("dl");
    for (const cell of row.cells) {
      if (getComputedStyle(cell).display !== "none" || ["–", ""].includes(cell.textContent)) continue;
      const group = document.createElement("div"), term = document.createElement("dt"), value = document.createElement("dd");
      term.textContent = titles[cell.cellIndex].textContent;
      term.title = titles[cell.cellIndex].firstElementChild.title;
      value.append(...[...cell.childNodes].map((node) => node.cloneNode(true)));
      group.append(term, value);
      list.append(group);
    }
    const detail = document.createElement("tr"), cell = detail.insertCell();
    detail.className = "detail";
    cell.colSpan = [...row.cells].filter((other) => getComputedStyle(other).display !== "none").length;
    cell.append(list.childElementCount ? list : "No other column has a value.");
    row.after(detail);
  };
  // Columns stand in the order of importance: each is shown if there is room for it beside those before.
  const fit = (tables, paper = Infinity) => {
    for (const table of tables) {
      closeDetails(table);
      for (const cell of table.querySelectorAll("[hidden]:is(th, td)")) cell.hidden = false;
      table.classList.add("measured", "cut");
    }
    const rooms = tables.map((table) => Math.min(table.parentElement.clientWidth, paper));
    const widths = tables.map((table) => [...table.tHead.rows[0].cells].map((cell) => cell.offsetWidth));
    tables.forEach((table, number) => {
      let left = rooms[number];
      const shown = widths[number].map((width, place) => {
        const fits = place === 0 || width <= left;
        if (fits) left -= width;
        return fits;
      });
      const apply = () => {
        for (const row of table.rows) for (const cell of row.cells) cell.hidden = !shown[cell.cellIndex];
        table.classList.toggle("cut", shown.includes(false));
      };
      table.classList.remove("measured");
      apply();
      // a long word may exceed the width that a column of text has at most
      const frame = table.parentElement;
      for (let last; frame.scrollWidth > frame.clientWidth && (last = shown.lastIndexOf(true)) > 0;) {
        shown[last] = false;
        apply();
      }
    });
  };
  const listings = [...document.querySelectorAll(".scroll > table[id]")];
  let width = 0;
  new ResizeObserver(([entry]) => {
    if (entry.contentRect.width !== width) { width = entry.contentRect.width; fit(listings); }
  }).observe(document.getElementById("main"));
  document.addEventListener("toggle", (event) => {
    if (event.target.matches(".story")) fit([...event.target.querySelectorAll("table")]);
  }, true);
  addEventListener("beforeprint", () => fit(listings, PAPER));
  addEventListener("afterprint", () => fit(listings));
  document.addEventListener("click", (event) => {
    const heading = event.target.closest("thead button");
    if (heading) {
      const th = heading.parentElement, table = th.closest("table"), index = th.cellIndex;
      const down = th.getAttribute("aria-sort") ? th.getAttribute("aria-sort") === "ascending" : th.classList.contains("number");
      for (const other of th.parentElement.cells) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", down ? "descending" : "ascending");
      closeDetails(table);
      const rows = [...table.tBodies[0].rows].map((row) => [sortKey(row, index), row]);
      rows.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null);
        const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows.map(([, row]) => row));
      return;
    }
    const more = event.target.closest("button.more");
    if (more) toggleDetails(more);
    const packet = event.target.closest("button.packet");
    if (packet) copy(packet.textContent);
  });
  document.addEventListener("input", (event) => {
    if (!event.target.matches("input[data-table]")) return;
    const wanted = event.target.value.toLowerCase();
    const table = document.getElementById(event.target.dataset.table);
    let left = 0;
    closeDetails(table);
    for (const row of table.tBodies[0].rows) {
      row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
      left += !row.hidden;
    }
    say(`${left} rows`, false);
  });

  // --- copying a display filter ----------------------------------------------------------------
  const said = document.getElementById("said");
  let quiet = 0;
  const say = (text, shown = true) => {
    said.textContent = text;
    said.classList.toggle("on", shown);
    clearTimeout(quiet);
    quiet = setTimeout(() => said.classList.remove("on"), 1800);
  };
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    say(`Copied: ${text}`);
  };

  // --- where we are ----------------------------------------------------------------------------
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-15% 0px -75% 0px" });
  for (const section of document.querySelectorAll("main > section")) seen.observe(section);
  root.dataset.ready = String(Math.round(performance.now()));
})();

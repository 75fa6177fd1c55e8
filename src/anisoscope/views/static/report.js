"use strict";
(() => {
  const root = document.documentElement;
  const $ = (selector, inside = document) => inside.querySelector(selector);
  const $$ = (selector, inside = document) => Array.from(inside.querySelectorAll(selector));
  const dashes = ["solid", "dashed", "dotted", "dashed", "dashed"];
  const pageRows = 50;
  let program = null;
  let charts = [];

  // ---------------------------------------------------------------- unpacking
  async function unpack(id) {
    const holder = document.getElementById(id);
    if (!holder) return null;
    const bytes = Uint8Array.from(atob(holder.textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  // ---------------------------------------------------------------- theme
  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null; // nothing is stored: a file may be opened where storage is refused
  const theme = () => chosen || (preferred.matches ? "dark" : "light");
  const tones = {
    light: { ink: "#1b232c", soft: "#56616d", grid: "#e9edf0", line: "#b4bec8", panel: "#ffffff" },
    dark: { ink: "#e6ebf0", soft: "#a3afbb", grid: "#28313a", line: "#4a5662", panel: "#171d24" },
  };

  function between(a, b, share) {
    const part = (colour, i) => parseInt(colour.slice(i, i + 2), 16);
    return "#" + [1, 3, 5].map((i) => Math.round(part(a, i) + (part(b, i) - part(a, i)) * share).toString(16).padStart(2, "0")).join("");
  }
  function shade(share) {
    // On dark ground the darkest end is hard to see, on white the palest: either end is left out.
    const ramp = program.viridis;
    const at = (theme() === "dark" ? 0.3 + 0.7 * share : share) * (ramp.length - 1);
    const low = Math.min(Math.floor(at), ramp.length - 2);
    return between(ramp[low], ramp[low + 1], at - low);
  }
  const colour = (meta) => {
    const palette = program.palettes[theme()];
    return meta.shade === null || meta.shade === undefined ? palette[meta.role % palette.length] : shade(meta.shade);
  };
  const faint = (hex, opacity) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${opacity})`;

  function paint(panel) {
    const tone = tones[theme()];
    for (const trace of panel.data) {
      const meta = trace.meta;
      if (meta.part === "reference") trace.line.color = tone.soft;
      else if (meta.part === "heat") trace.colorbar.tickfont.color = tone.soft;
      else if (meta.part === "band") trace.fillcolor = faint(colour(meta), meta.shade === null ? 0.18 : 0.1);
      else {
        trace.line.color = trace.marker.color = colour(meta);
        if (trace.error_y) trace.error_y.color = colour(meta);
      }
    }
    const layout = panel.layout;
    layout.font.color = tone.ink;
    layout.font.family = getComputedStyle(document.body).fontFamily;
    layout.hoverlabel.bgcolor = tone.panel;
    layout.hoverlabel.bordercolor = tone.line;
    layout.hoverlabel.font.color = tone.ink;
    for (const axis of [layout.xaxis, layout.yaxis]) {
      axis.gridcolor = panel.data[0] && panel.data[0].meta.part === "heat" ? "rgba(0,0,0,0)" : tone.grid;
      axis.linecolor = tone.line;
      axis.tickfont = { color: tone.soft, size: 11 };
    }
    for (const note of layout.annotations) note.font.color = tone.soft;
  }

  function applyTheme() {
    root.dataset.theme = theme();
    $("#theme .theme-word").textContent = theme() === "dark" ? "Light" : "Dark";
    if (!program) return;
    const palette = program.palettes[theme()];
    for (const chip of $$(".chip")) {
      const swatch = $(".swatch", chip);
      if (!swatch) continue;
      if (chip.dataset.role) swatch.style.borderTopColor = palette[Number(chip.dataset.role) % palette.length];
      if (chip.dataset.dash) swatch.style.borderTopStyle = dashes[Number(chip.dataset.dash) % dashes.length];
    }
    const stops = [0, 0.25, 0.5, 0.75, 1].map(shade).join(",");
    for (const bar of $$(".ramp-bar")) bar.style.background = `linear-gradient(90deg,${stops})`;
    for (const chart of charts) redraw(chart);
  }

  // ---------------------------------------------------------------- figures
  const canHover = window.matchMedia("(hover: hover)").matches;
  const config = {
    displaylogo: false,
    responsive: true,
    scrollZoom: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
    toImageButtonOptions: { format: "svg" },
    displayModeBar: canHover ? "hover" : false,
  };

  // ---------------------------------------------------------------- hover
  // A tip of our own: plotly's lies inside the figure and would cover what it speaks of.
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;

  function textOf(point) {
    const data = point.data;
    if (data.meta.part === "heat") return data.text[point.pointNumber[0]][point.pointNumber[1]];
    return Array.isArray(data.hovertext) ? data.hovertext[point.pointNumber] : data.hovertext;
  }

  function showTip(event) {
    const point = event.points[0];
    const text = textOf(point);
    if (!text) return;
    tip.replaceChildren();
    for (const line of text.split("<br>")) {
      const row = document.createElement("div");
      row.textContent = line.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
      tip.append(row);
    }
    tip.style.borderColor = point.data.line && point.data.line.color ? point.data.line.color : "";
    tip.hidden = false;
    const gap = 16, box = tip.getBoundingClientRect(), at = event.event;
    const left = at.clientX + gap + box.width < root.clientWidth ? at.clientX + gap : at.clientX - gap - box.width;
    const top = at.clientY + gap + box.height < window.innerHeight ? at.clientY + gap : at.clientY - gap - box.height;
    tip.style.left = `${Math.max(6, Math.min(left, root.clientWidth - box.width - 6))}px`;
    tip.style.top = `${Math.max(6, top)}px`;
  }
  const hideTip = () => { tip.hidden = true; };

  function redraw(chart, width) {
    if (!chart.drawn) return undefined;
    paint(chart.panel);
    const layout = { ...chart.panel.layout };
    if (width) layout.width = width;
    return Plotly.react(chart.element, chart.panel.data, layout, config);
  }

  async function draw(chart) {
    if (chart.drawn || chart.element.closest("[hidden]")) return;
    const layout = chart.panel.layout;
    layout.height = chart.element.closest(".single") && window.innerWidth > 560 ? 380 : 250;
    // A finger that scrolls the page must not zoom a figure.
    layout.dragmode = canHover ? "zoom" : false;
    chart.drawn = true;
    paint(chart.panel);
    for (const trace of chart.panel.data) if (trace.hoverinfo === "text") trace.hoverinfo = "none";
    await Plotly.newPlot(chart.element, chart.panel.data, layout, config);
    chart.element.on("plotly_hover", showTip);
    chart.element.on("plotly_unhover", hideTip);
  }

  function shown(figure) {
    // The values switched on, by kind; kinds without a switch show everything.
    const on = {};
    for (const chip of $$(".chip", figure)) {
      on[chip.dataset.kind] = on[chip.dataset.kind] || new Set();
      if (chip.getAttribute("aria-pressed") === "true") on[chip.dataset.kind].add(chip.dataset.value);
    }
    return (tags) => Object.entries(on).every(([kind, values]) => !(kind in tags) || values.has(tags[kind]));
  }

  function applyToggles(figure) {
    const visible = shown(figure);
    for (const element of $$(".panel", figure)) {
      element.hidden = !visible(JSON.parse(element.dataset.tags));
    }
    for (const chart of charts.filter((one) => figure.contains(one.element))) {
      for (const trace of chart.panel.data) {
        if (trace.meta.tags && trace.meta.part !== "heat") trace.visible = visible(trace.meta.tags);
      }
      if (chart.drawn) redraw(chart);
      else draw(chart);
    }
  }

  function wireToggles() {
    for (const chip of $$(".chip")) {
      chip.addEventListener("click", () => {
        const on = chip.getAttribute("aria-pressed") === "true";
        chip.setAttribute("aria-pressed", String(!on));
        applyToggles(chip.closest("[data-figure]"));
      });
    }
  }

  function wirePrinting() {
    window.addEventListener("beforeprint", () => {
      chosen = chosen || theme();
      root.dataset.before = chosen;
      chosen = "light";
      applyTheme();
      for (const chart of charts) redraw(chart, chart.element.closest(".single") ? 640 : 310);
    });
    window.addEventListener("afterprint", () => {
      chosen = root.dataset.before;
      applyTheme();
    });
  }

  // ---------------------------------------------------------------- table
  const number = (value) => {
    if (value === null) return "";
    const size = Math.abs(value);
    const words = size !== 0 && (size < 1e-4 || size >= 1e7) ? value.toExponential(4) : String(Number(value.toPrecision(6)));
    return words.replace(/-/g, "\u2212"); // a true minus, as in every other number of the page
  };

  function wireTable() {
    const table = program.table;
    const words = (name) => (row) => table[name].words[table[name].at[row]];
    const interval = (row) =>
      table.half[row] === null ? "" : `${number(Number((table.value[row] - table.half[row]).toPrecision(5)))} … ${number(Number((table.value[row] + table.half[row]).toPrecision(5)))}`;
    const columns = [
      { name: "model", text: words("model"), key: (row) => table.model.at[row] },
      { name: "step", text: words("step"), key: (row) => Number(words("step")(row)), number: true },
      { name: "measure", text: words("measure"), key: words("measure") },
      { name: "site", text: words("site"), key: (row) => table.site.at[row] },
      { name: "slice", text: words("slice"), key: words("slice") },
      { name: "value", text: (row) => number(table.value[row]), key: (row) => table.value[row], number: true },
      { name: "± stderr", text: (row) => (table.stderr[row] === null ? "none" : number(Number(table.stderr[row].toPrecision(2)))), key: (row) => table.stderr[row], number: true },
      { name: "95 % interval", text: interval, key: (row) => table.half[row], number: true },
      { name: "n", text: (row) => (table.n[row] === null ? "" : table.n[row].toLocaleString("en")), key: (row) => table.n[row], number: true },
      { name: "over", text: words("over"), key: words("over") },
      { name: "method and notes", text: words("method"), key: words("method"), long: true },
    ].filter((column) => !["model", "step"].includes(column.name) || table[column.name].words.length > 1);

    const companions = $("#companions");
    const everyRow = () => Array.from({ length: table.length }, (_, row) => row).filter((row) => !table.part[row] || (companions && companions.checked));
    let rows = everyRow();
    let page = 0;
    let sorted = null;
    let rising = true;
    const everyWord = (row) => ["model", "step", "site", "measure", "slice", "over", "method"].map((name) => words(name)(row)).join(" ").toLowerCase();

    const head = $("#table thead tr");
    for (const column of columns) {
      const cell = document.createElement("th");
      cell.scope = "col";
      if (column.number) cell.className = "num";
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.textContent = column.name;
      button.addEventListener("click", () => {
        rising = sorted === column ? !rising : true;
        sorted = column;
        for (const other of head.children) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", rising ? "ascending" : "descending");
        refresh();
      });
      cell.append(button);
      head.append(cell);
    }

    function refresh() {
      const wanted = $("#filter").value.toLowerCase().split(/\s+/).filter(Boolean);
      rows = everyRow();
      if (wanted.length) rows = rows.filter((row) => { const all = everyWord(row); return wanted.every((word) => all.includes(word)); });
      if (sorted) {
        const sign = rising ? 1 : -1;
        rows.sort((a, b) => {
          const x = sorted.key(a), y = sorted.key(b);
          if (x === y) return a - b;
          if (x === null) return 1; // rows without a number stay at the end
          if (y === null) return -1;
          return x < y ? -sign : sign;
        });
      }
      page = 0;
      show();
    }

    function show() {
      const pages = Math.max(1, Math.ceil(rows.length / pageRows));
      const body = $("#table tbody");
      body.replaceChildren();
      for (const row of rows.slice(page * pageRows, (page + 1) * pageRows)) {
        const line = document.createElement("tr");
        for (const column of columns) {
          const cell = document.createElement("td");
          cell.textContent = column.text(row);
          if (column.number) cell.className = "num";
          if (column.long) { cell.className = "long"; cell.title = cell.textContent; }
          line.append(cell);
        }
        body.append(line);
      }
      $("#found").textContent = `${rows.length.toLocaleString("en")} of ${everyRow().length.toLocaleString("en")} rows`;
      $("#page").textContent = `page ${page + 1} of ${pages}`;
      $("#previous").disabled = page === 0;
      $("#next").disabled = page >= pages - 1;
    }

    function csv() {
      const names = ["model", "step", "site", "measure", "slice", "value", "stderr", "half", "n", "over", "method"];
      // A spreadsheet runs a cell that begins with one of these; a quote in front makes it text.
      const quote = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? "'" + text : text).replaceAll('"', '""')}"`;
      const cell = (name, row) => (Array.isArray(table[name]) ? (table[name][row] === null ? "" : String(table[name][row])) : quote(words(name)(row)));
      const lines = rows.map((row) => names.map((name) => cell(name, row)).join(","));
      const head = names.map((name) => (name === "half" ? "half_width_95" : name)).join(",");
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([head + "\n" + lines.join("\n") + "\n"], { type: "text/csv" }));
      link.download = "anisoscope.csv";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    }

    let waiting = null;
    $("#filter").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(refresh, 120); });
    $("#previous").addEventListener("click", () => { page -= 1; show(); });
    $("#next").addEventListener("click", () => { page += 1; show(); });
    $("#csv").addEventListener("click", csv);
    if (companions) companions.addEventListener("change", refresh);
    show();
  }

  // ---------------------------------------------------------------- contents
  function wireContents() {
    const links = $$(".toc a");
    const targets = links.map((link) => $(link.getAttribute("href")));
    const mark = () => {
      let current = 0;
      targets.forEach((target, i) => { if (target && target.getBoundingClientRect().top < window.innerHeight * 0.3) current = i; });
      links.forEach((link, i) => { if (i === current) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current"); });
    };
    document.addEventListener("scroll", mark, { passive: true });
    mark();
  }

  async function start() {
    applyTheme();
    $("#theme").addEventListener("click", () => { chosen = theme() === "dark" ? "light" : "dark"; applyTheme(); });
    preferred.addEventListener("change", applyTheme);
    wireContents();
    document.body.append(tip);
    document.addEventListener("scroll", hideTip, { passive: true });
    if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old: figures and table need one from 2023 or later");
    program = JSON.parse(await unpack("program"));
    wireTable();
    wireToggles();
    applyTheme();
    const source = await unpack("plotly");
    if (source) {
      const script = document.createElement("script");
      script.textContent = source;
      document.head.append(script);
      charts = $$("[data-panel]").map((element) => ({ element, panel: program.panels[Number(element.dataset.panel)], drawn: false }));
      wirePrinting();
      for (const chart of charts) {
        await draw(chart);
        await new Promise((resolve) => setTimeout(resolve)); // let the page breathe between figures
      }
    }
    root.dataset.ready = "yes";
  }

  start().catch((error) => {
    root.dataset.ready = "broken";
    for (const element of $$(".plot")) {
      element.textContent = `This figure could not be drawn: ${error.message}`;
      element.classList.add("broken");
    }
    throw error;
  });
})();

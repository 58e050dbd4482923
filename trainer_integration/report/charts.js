// Draws the charts of a report from the figures in the page: SVG in the page's own colours, redrawn at every width.
// One unit is one pixel. `page.runs[0]` is the run; a second one, where there is one, is drawn beside it.
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const AXES = { step: "step", tokens: "tokens trained on", seconds: "training time" };
  const LEFT = 58, RIGHT = 14, TOP = 22, BOTTOM = 36;
  let axis = new URLSearchParams(location.hash.slice(1)).get("x");
  if (!Object.hasOwn(AXES, axis)) axis = "step";

  const short = (value, unit, base) => {
    const letters = base === 1024 ? ["B", "KiB", "MiB", "GiB", "TiB"] : ["", "k", "M", "G", "T"];
    let place = 0, size = Math.abs(value);
    while (size >= base && place < letters.length - 1) { size /= base; place += 1; }
    const digits = size >= 100 || Number.isInteger(size) ? 0 : size >= 10 ? 1 : 2;
    const text = place ? size.toFixed(digits) : String(+value.toPrecision(4)).replace("-", "");
    return `${value < 0 ? "-" : ""}${text}${base === 1024 ? " " : ""}${letters[place]}${unit}`;
  };
  const clock = (seconds) => seconds < 120 ? `${+seconds.toPrecision(3)} s`
    : seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
  const FORMATS = {
    plain: (value) => value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)
      ? value.toExponential(2) : String(+value.toPrecision(5)),
    percent: (value) => `${+(100 * value).toPrecision(4)}%`,
    count: (value) => short(value, "", 1000),
    bytes: (value) => short(value, "", 1024),
    step: (value) => Number.isInteger(value) ? String(value) : "",
    tokens: (value) => short(value, "", 1000),
    seconds: clock,
  };

  const make = (name, attributes, parent, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };

  // Round values from low to high, some `wanted` of them.
  const ticks = (low, high, wanted, whole) => {
    const rough = (high - low || 1) / Math.max(wanted, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    let stride = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    if (whole) stride = Math.max(1, Math.round(stride));
    const found = [];
    for (let i = Math.ceil(low / stride); i * stride <= high + stride * 1e-9; i += 1) found.push(i * stride);
    return found;
  };

  const nearest = (values, wanted) => {
    let low = 0, high = values.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle; else high = middle;
    }
    return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
  };

  const span = (lists) => {
    let low = Infinity, high = -Infinity;
    for (const list of lists) for (const value of list) {
      if (value === null) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return low <= high ? [low, high] : [0, 1];
  };

  // What a chart shows of a run: where each line has its points. Steps of work that was lost stand over the step's
  // place in the work that stayed.
  const linesOf = (chart, run, second) => {
    const figures = run[chart.of] || run.figures;
    const own = chart.of === "memory" ? run.memory.seconds : run.x[axis];
    const lines = chart.lines.filter((line) => figures[line.key]).map((line) => ({
      ...line, x: own, y: figures[line.key], second,
      label: page.runs.length > 1 ? `${line.label}, ${run.name}` : line.label,
      colour: `var(--series-${second && chart.lines.length === 1 ? (line.colour + 3) % 8 + 1 : line.colour})`,
    }));
    for (const [i, part] of (chart.lost && !second ? run.lost : []).entries()) {
      lines.push({
        key: `lost-${i}`, label: "lost", colour: "var(--alarm)", pale: true, x: part.step.map((s) => own[nearest(run.x.step, s)]),
        y: part.loss, silent: true,
      });
    }
    return lines;
  };

  const domainOf = (chart, lines) => {
    let values = lines.map((line) => line.y);
    if (chart.quantile) {
      // A few steps, such as the first of an attempt, must not flatten the others.
      const all = values.flat().filter((value) => value !== null).sort((a, b) => a - b);
      const floor = chart.floor ?? 0;
      values = [[floor + (all[Math.floor(chart.quantile * (all.length - 1))] - floor) * 1.2]];
    }
    let [low, high] = span(values);
    if (chart.floor !== undefined) low = chart.quantile ? chart.floor : Math.min(chart.floor, low);
    for (const level of chart.levels || []) high = Math.max(high, level.value * 1.1);
    const air = (high - low || Math.abs(high) || 1) * 0.06;
    return [chart.floor === undefined ? low - air : low, high + air];
  };

  const path = (line, at, to) => {
    let text = "", open = false;
    for (let i = 0; i < line.x.length; i += 1) {
      const value = line.y[i], x = at(line.x[i]);
      if (value === null || x === null) { open &&= Boolean(line.sparse); continue; }
      text += `${open ? "L" : "M"}${x.toFixed(1)} ${to(value).toFixed(1)}`;
      open = true;
    }
    return text;
  };

  const draw = (chart, box) => {
    const width = Math.max(260, Math.floor(box.clientWidth)), height = chart.small ? 180 : 240;
    const lines = page.runs.flatMap((run, i) => linesOf(chart, run, i > 0));
    const kind = chart.of === "memory" ? "seconds" : axis;
    let [first, last] = span(lines.filter((line) => !line.silent).map((line) => line.x));
    if (first === last) { first -= 0.5; last += 0.5; }
    const [low, high] = domainOf(chart, lines);
    const at = (x) => LEFT + (x - first) / (last - first) * (width - LEFT - RIGHT);
    const to = (y) => height - BOTTOM - (Math.min(Math.max(y, low), high) - low) / (high - low) * (height - TOP - BOTTOM);

    box.querySelector("svg")?.remove();
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, tabindex: 0, "aria-hidden": "true" }, box);
    for (const value of ticks(low, high, height / 55)) {
      make("line", { x1: LEFT, x2: width - RIGHT, y1: to(value), y2: to(value), class: "grid" }, svg);
      make("text", { x: LEFT - 8, y: to(value) + 4, class: "tick", "text-anchor": "end" }, svg, FORMATS[chart.format](value));
    }
    for (const value of ticks(first, last, width / 100, kind === "step")) {
      const x = at(value), side = x > width - RIGHT - 24 ? "end" : "middle";
      make("text", { x, y: height - BOTTOM + 17, class: "tick", "text-anchor": side }, svg, FORMATS[kind](value));
    }
    make("text", { x: (LEFT + width - RIGHT) / 2, y: height - 4, class: "tick", "text-anchor": "middle" }, svg,
      chart.of === "memory" ? "time since launch" : AXES[axis]);

    const clip = `clip-${chart.id}`;
    make("rect", { x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: height - TOP - BOTTOM },
      make("clipPath", { id: clip }, make("defs", {}, svg)));
    for (const line of lines) {
      make("path", {
        d: path(line, at, to), class: line.pale ? "line pale" : line.second ? "line other" : "line", stroke: line.colour, "clip-path": `url(#${clip})`,
        "stroke-dasharray": line.dash || (line.second ? "6 3" : "none"),
      }, svg);
      if ((line.sparse || line.x.length <= 60) && !line.dash) line.x.forEach((x, i) => line.y[i] !== null &&
        make("circle", { cx: at(x), cy: to(line.y[i]), r: line.pale ? 4 : 2.5, fill: line.colour, class: line.pale ? "pale" : "" }, svg));
    }
    for (const level of chart.levels || []) {
      make("line", { x1: LEFT, x2: width - RIGHT, y1: to(level.value), y2: to(level.value), class: "level" }, svg);
      make("text", { x: width - RIGHT - 4, y: to(level.value) - 5, class: "note", "text-anchor": "end" }, svg, level.label);
    }
    const flags = chart.of === "memory" ? [] : flagsOf(svg, at, width, height);
    hover(chart, box, svg, lines.filter((line) => !line.silent), flags, { at, to, first, last, width, height, kind });
  };

  // Where an attempt ended, and where the mix was changed: a dashed line and a number. Numbers that would touch become one, such as 2–5.
  const flagsOf = (svg, at, width, height) => {
    const run = page.runs[0];
    return [...flagsOfKind("end", "", run.ends, TOP - 7), ...flagsOfKind("edit", "~", run.edits, TOP + 11)];

    function flagsOfKind(kind, sign, places, y) {
      const flags = [];
      for (const place of places) {
        const x = at(run.x[axis][nearest(run.x.step, place.step)]);
        make("line", { x1: x, x2: x, y1: TOP, y2: height - BOTTOM, class: kind }, svg);
        const before = flags.at(-1);
        if (before && x - before.x < 34) { before.last = place; before.texts.push(place.text); }
        else flags.push({ kind, x, first: place, last: place, texts: [place.text] });
      }
      for (const flag of flags) {
        const text = flag.first === flag.last ? `${flag.first.number}` : `${flag.first.number}–${flag.last.number}`;
        const side = flag.x > width - RIGHT - 16 ? "end" : flag.x < LEFT + 16 ? "start" : "middle";
        make("text", { x: flag.x, y, class: `flag of-${kind}`, "text-anchor": side }, svg, sign + text);
      }
      return flags;
    }
  };

  const hover = (chart, box, svg, lines, flags, frame) => {
    const tip = box.querySelector(".tip");
    const main = lines[0];
    if (!main) return;
    const mark = make("g", { class: "mark" }, svg);
    let place = main.x.length - 1;
    const show = (wanted) => {
      mark.replaceChildren();
      place = nearest(main.x, wanted);
      const x = frame.at(main.x[place]);
      make("line", { x1: x, x2: x, y1: TOP, y2: frame.height - BOTTOM, class: "cursor" }, mark);
      const head = frame.kind === "step" ? `step ${main.x[place]}` : `${FORMATS[frame.kind](main.x[place])}`;
      const own = chart.of !== "memory" && frame.kind !== "step" ? `, step ${page.runs[0].x.step[place]}` : "";
      tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: head + own }));
      for (const line of lines) {
        const i = nearest(line.x, main.x[place]), value = line.y[i];
        const row = document.createElement("span"), dot = document.createElement("i");
        dot.style.background = line.colour;
        row.append(dot, `${line.label} ${value === null || value === undefined ? "–" : FORMATS[chart.format](value)}`);
        tip.append(row);
        if (value !== null && value !== undefined) {
          make("circle", { cx: frame.at(line.x[i]), cy: frame.to(value), r: 4, fill: line.colour, class: "dot" }, mark);
        }
      }
      for (const flag of flags) if (Math.abs(flag.x - x) < 8) for (const text of flag.texts) {
        tip.append(Object.assign(document.createElement("em"), { textContent: text, className: `of-${flag.kind}` }));
      }
      tip.hidden = false;
      const left = x > frame.width / 2 ? x - tip.offsetWidth - 12 : x + 12;
      tip.style.left = `${Math.max(0, Math.min(left, frame.width - tip.offsetWidth))}px`;
    };
    const hide = () => { mark.replaceChildren(); tip.hidden = true; };
    svg.addEventListener("pointermove", (event) => {
      const x = event.clientX - svg.getBoundingClientRect().left;
      show(frame.first + (x - LEFT) / (frame.width - LEFT - RIGHT) * (frame.last - frame.first));
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      show(main.x[Math.min(Math.max(place + move, 0), main.x.length - 1)]);
    });
  };

  const boxes = page.charts.map((chart) => [chart, document.getElementById(chart.id)]);
  const drawAll = () => boxes.forEach(([chart, box]) => draw(chart, box));
  let width = 0;
  new ResizeObserver(() => requestAnimationFrame(() => {
    if (document.body.clientWidth !== width) { width = document.body.clientWidth; drawAll(); }
  })).observe(document.body);

  for (const button of document.querySelectorAll("[data-axis]")) {
    const press = () => document.querySelectorAll("[data-axis]").forEach((other) =>
      other.setAttribute("aria-pressed", String(other.dataset.axis === axis)));
    button.addEventListener("click", () => {
      axis = button.dataset.axis;
      history.replaceState(null, "", `#x=${axis}`);
      press();
      drawAll();
    });
    press();
  }

  // A file of the figures as the page holds them, made when it is asked for.
  const csv = () => page.runs.map((run) => {
    const { step, tokens, seconds } = run.x;
    const columns = { step, tokens_so_far: tokens, seconds_so_far: seconds, ...run.figures }, names = Object.keys(columns);
    const quoted = names.map((name) => `"${name.replaceAll('"', '""')}"`);
    const rows = run.x.step.map((_, i) => [JSON.stringify(run.name), ...names.map((name) => columns[name][i] ?? "")].join(","));
    return [["run", ...quoted].join(","), ...rows].join("\n");
  }).join("\n");
  const FILES = { csv: ["text/csv", csv], json: ["application/json", () => JSON.stringify(page.runs, null, 1)] };
  for (const link of document.querySelectorAll("a[data-file]")) {
    const [type, content] = FILES[link.dataset.file];
    link.addEventListener("click", () => {
      link.href = URL.createObjectURL(new Blob([content()], { type }));
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    });
  }

  if (page.reload_s) setTimeout(() => location.reload(), 1000 * page.reload_s);
})();

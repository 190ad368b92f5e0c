"use strict";
// Draws timelines on canvases from compact columns. Blocks are no elements of the page, so half a million of them are fine.
// All timelines of a page show the same interval of time.

const OPS = ["F", "B", "I", "W", "S", "T"];
const WAITS = ["wait for an activation", "wait for a gradient", "release an output (own send)", "release a gradient (own send)",
  "wait for the broadcast", "wait for the all-reduce", "wait for the reduction"];
const COPY_WAITS = ["release offloaded activations (their copy is done)", "wait for loaded activations", "wait for whole parameters", "wait for reduced gradients"];
const OF_STAGES = { gather: "all-gather of the parameters", scatter: "reduce-scatter of the gradients" };
const ROW = { block: 22, strip: 3, gap: 5 };
const CURVES = 70; // height of the memory chart
const AXIS = 22;
const LABEL = { largest: 11, stacked: 9.5, good: 7.5, smallest: 6, room: 3 }; // font sizes (``stacked``: of two lines), and the pixels around a label

const view = { from: 0, to: 1, end: 1, picked: -1 };
let charts = [];
let colours = {};
let names = {}; // operation: its name
let mostMemory = 0, memoryTicks = [];

async function unpack(id) {
  const text = document.getElementById(id).textContent.trim();
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

function column(buffer, at, Kind) {
  return new Kind(buffer, at[0], at[1]);
}

// ---- geometry

function laneHeight(chart) {
  return ROW.block + stripsOf(chart).length * (ROW.strip + 1) + 1 + ROW.gap;
}

// The thin bars below a lane's blocks. Each is [name of the lane's columns, colour].
function stripsOf(chart) {
  const sent = chart.hasTransfers ? [["activations", "activation"], ["gradients", "gradient"]] : [];
  if (chart.hasCopies) sent.push(["offloads", "offload"], ["loads", "load"]);
  if (chart.hasCollectives) sent.push(["gathers", "gather"], ["scatters", "scatter"]);
  return sent;
}

function lanesEnd(chart) {
  return AXIS + chart.lanes.length * laneHeight(chart);
}

function margin(chart) {
  return chart.margin;
}

function x(chart, time) {
  return margin(chart) + ((time - view.from) / (view.to - view.from)) * (chart.width - margin(chart) - 8);
}

function timeAt(chart, px) {
  return view.from + ((px - margin(chart)) / (chart.width - margin(chart) - 8)) * (view.to - view.from);
}

// ---- drawing

function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "ink", "soft", "rule", "idle", "wait", "memory", "memory_last", "activation", "gradient", "offload", "load", "gather", "scatter"]) {
    colours[name] = style.getPropertyValue("--" + name).trim();
  }
}

function firstEndingAfter(starts, lengths, tick) {
  let low = 0, high = starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[middle] + lengths[middle] < tick) low = middle + 1; else high = middle;
  }
  return low;
}

function draw(chart) {
  const ratio = window.devicePixelRatio || 1;
  const box = chart.canvas.getBoundingClientRect();
  chart.width = box.width;
  const height = lanesEnd(chart) + (mostMemory ? CURVES + 8 : 4);
  if (chart.canvas.width !== Math.round(box.width * ratio) || chart.canvas.height !== Math.round(height * ratio)) {
    chart.canvas.style.height = height + "px";
    chart.canvas.width = Math.round(box.width * ratio);
    chart.canvas.height = Math.round(height * ratio);
  }
  const pen = chart.canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.fillStyle = colours.paper;
  pen.fillRect(0, 0, chart.width, height);
  drawAxis(chart, pen, height);
  chart.labels = [];
  const top = chart.canvas.getBoundingClientRect().top;
  chart.lanes.forEach((lane, k) => {
    const y = AXIS + k * laneHeight(chart);
    if (top + y > window.innerHeight + 300 || top + y + laneHeight(chart) < -300) return; // off the screen
    drawLane(chart, pen, lane, y);
  });
  if (mostMemory) drawMemory(chart, pen, lanesEnd(chart) + CURVES);
}

function tickStep(span, most) {
  const raw = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * (1 - 1e-9));
}

function drawAxis(chart, pen, height) {
  const step = tickStep(view.to - view.from, (chart.width - margin(chart)) / 90);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  pen.fillStyle = colours.soft;
  pen.fillText(chart.unit, 4, AXIS / 2);
  for (let k = Math.ceil(view.from / step - 1e-9); k * step <= view.to + 1e-9 * step; k++) {
    const at = x(chart, k * step);
    pen.fillStyle = colours.rule;
    pen.fillRect(at, AXIS - 6, 1, height);
    pen.fillStyle = colours.soft;
    pen.fillText((k * step).toFixed(decimals), at + 3, AXIS / 2);
  }
}

function drawLane(chart, pen, lane, y) {
  const left = margin(chart), right = chart.width - 8;
  pen.fillStyle = colours.ink;
  pen.font = "12px system-ui, sans-serif";
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.fillText(lane.name, 4, y + ROW.block / 2);
  pen.save();
  pen.beginPath();
  pen.rect(left, y, right - left, laneHeight(chart));
  pen.clip();
  pen.fillStyle = colours.idle;
  pen.fillRect(x(chart, 0), y, x(chart, chart.end) - x(chart, 0), ROW.block);
  for (const waits of [lane.waits, lane.copyWaits]) drawStrip(chart, pen, waits, y + ROW.block / 2 - 2, 4, () => colours.wait);
  drawBlocks(chart, pen, lane, y);
  stripsOf(chart).forEach(([columns, colour], k) => {
    drawStrip(chart, pen, lane[columns], y + ROW.block + 2 + k * (ROW.strip + 1), ROW.strip, () => colours[colour]);
  });
  pen.restore();
}

function visible(chart, columns) {
  const first = firstEndingAfter(columns.starts, columns.lengths, view.from / chart.tick);
  return [first, view.to / chart.tick];
}

// The microbatch of a code. The low bits of a code count slices through all microbatches.
function microbatch(chart, code) {
  return Math.floor((code & 0xfffff) / chart.slices);
}

function sliceName(chart, code, before) {
  return chart.slices > 1 ? `${before}${(code & 0xfffff) % chart.slices}` : "";
}

function blockName(chart, code, chunks) {
  const name = `${microbatch(chart, code)}${sliceName(chart, code, "s")}`;
  return chunks > 1 ? `${OPS[code >>> 29]}${(code >>> 20) & 511}.${name}` : `${OPS[code >>> 29]}${name}`;
}

function setFont(pen, size) {
  pen.font = `${size}px system-ui, sans-serif`;
}

// How a chart's blocks are labelled, as in figures.py: the first form with a good font size, otherwise the last form.
function chooseLabels(chart, pen) {
  const room = x(chart, view.from + chart.shortBlock) - x(chart, view.from) - LABEL.room;
  const last = ((chart.chunks - 1) << 20) | (chart.microbatches * chart.slices - 1);
  const forms = [[chart.chunks, false], [chart.chunks, true], [1, true]].slice(0, chart.chunks > 1 ? 3 : 2);
  let form = {};
  setFont(pen, 100);
  for (const [chunks, stacked] of forms) {
    const lines = chart.ops.flatMap((op) => labelLines(chart, (op << 29) | last, chunks, stacked));
    const size = (100 * room) / Math.max(...lines.map((line) => pen.measureText(line).width));
    form = { chunks, stacked, size: Math.min(stacked ? LABEL.stacked : LABEL.largest, Math.max(LABEL.smallest, size)) };
    if (size >= LABEL.good) break;
  }
  return form;
}

function labelLines(chart, code, chunks, stacked) {
  const name = blockName(chart, code, chunks);
  return stacked ? [name[0], name.slice(1)] : [name];
}

function drawLabel(chart, pen, code, form, from, to, y) {
  if (to - from <= form.size / 2) return;
  const lines = labelLines(chart, code, form.chunks, form.stacked);
  const width = Math.max(...lines.map((line) => pen.measureText(line).width));
  if (to - from < width + 1) return;
  pen.fillStyle = chart.inks[code >>> 29][(code >>> 20) & 511];
  const middle = (from + to) / 2, first = y + ROW.block / 2 - ((lines.length - 1) * form.size) / 2;
  lines.forEach((line, k) => pen.fillText(line, middle, first + k * form.size + 0.5));
  chart.labels.push({ name: lines.join(""), left: middle - width / 2, right: middle + width / 2, y, size: form.size });
}

function drawBlocks(chart, pen, lane, y) {
  const { starts, lengths, codes } = lane.compute;
  const [first, last] = visible(chart, lane.compute);
  const form = chooseLabels(chart, pen);
  setFont(pen, form.size);
  pen.textAlign = "center";
  let pixel = -1, filled = [0, 0, 0, 0]; // of blocks thinner than a pixel: each operation's share of the pixel; drawn stacked
  const flush = () => {
    let top = y;
    for (const op of [0, 1, 2, 3]) {
      const height = Math.min(1, filled[op]) * ROW.block;
      pen.fillStyle = chart.shades[op][0];
      if (height > 0) pen.fillRect(pixel, top, 1, height);
      top += height;
    }
    filled = [0, 0, 0, 0];
  };
  for (let i = first; i < starts.length && starts[i] <= last; i++) {
    const a = x(chart, starts[i] * chart.tick), b = x(chart, (starts[i] + lengths[i]) * chart.tick);
    const op = codes[i] >>> 29;
    if (b - a < 1) {
      if (Math.floor(a) !== pixel) { flush(); pixel = Math.floor(a); }
      filled[op] += b - a;
      continue;
    }
    const chunk = (codes[i] >>> 20) & 511;
    const faded = view.picked >= 0 && view.picked !== microbatch(chart, codes[i]);
    pen.globalAlpha = faded ? 0.25 : 1;
    pen.fillStyle = chart.shades[op][chunk];
    pen.fillRect(a, y, b - a > 3 ? b - a - 0.6 : b - a, ROW.block);
    drawLabel(chart, pen, codes[i], form, Math.max(a, margin(chart)), Math.min(b, chart.width - 8), y);
    pen.globalAlpha = 1;
  }
  flush();
}

function drawStrip(chart, pen, columns, y, height, colour) {
  const { starts, lengths, codes } = columns;
  const [first, last] = visible(chart, columns);
  let drawnTo = -1;
  for (let i = first; i < starts.length && starts[i] <= last; i++) {
    const a = x(chart, starts[i] * chart.tick), b = Math.max(a + 0.7, x(chart, (starts[i] + lengths[i]) * chart.tick));
    if (b < drawnTo + 0.4) continue;
    pen.globalAlpha = view.picked >= 0 && view.picked !== microbatch(chart, codes[i]) ? 0.2 : 1;
    pen.fillStyle = colour();
    pen.fillRect(a, y, b - a, height);
    drawnTo = b;
  }
  pen.globalAlpha = 1;
}

function memoryHeight(value) {
  return (value / mostMemory) * (CURVES - 8);
}

function mixed(one, other, share) {
  const parts = [1, 3, 5].map((i) => [one, other].map((hex) => parseInt(hex.slice(i, i + 2), 16)));
  return `rgb(${parts.map(([a, b]) => Math.round(a + (b - a) * share)).join()})`;
}

// Draws a memory curve for each rank above ``floor``. All timelines have the same scale.
function drawMemory(chart, pen, floor) {
  setFont(pen, 10);
  pen.textAlign = "right";
  for (const [value, label] of memoryTicks) {
    pen.fillStyle = colours.rule;
    pen.fillRect(margin(chart), floor - memoryHeight(value), chart.width - 8 - margin(chart), 1);
    pen.fillStyle = colours.soft;
    pen.fillText(label, margin(chart) - 4, floor - memoryHeight(value));
  }
  pen.save();
  pen.beginPath();
  pen.rect(margin(chart), floor - CURVES, chart.width - 8 - margin(chart), CURVES + 2);
  pen.clip();
  pen.lineWidth = 1.4;
  const last = view.to / chart.tick;
  chart.lanes.forEach(({ memory: { times, values } }, k) => {
    pen.beginPath();
    for (let i = lastUpTo(times, view.from / chart.tick); i < times.length && times[i] <= last; i++) {
      const until = i + 1 < times.length ? times[i + 1] * chart.tick : chart.end;
      pen.lineTo(x(chart, times[i] * chart.tick), floor - memoryHeight(values[i]));
      pen.lineTo(x(chart, until), floor - memoryHeight(values[i]));
    }
    pen.strokeStyle = mixed(colours.memory, colours.memory_last, k / Math.max(1, chart.lanes.length - 1));
    pen.stroke();
  });
  pen.restore();
}

// ---- the text of the block, bar or curve under the pointer

function amount(chart, memory) {
  return chart.inBytes ? size(memory) : `${Number(memory.toPrecision(3))}`;
}

function size(bytes) {
  for (const [unit, one] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (bytes >= one) return `${(bytes / one).toPrecision(3)} ${unit}`;
  }
  return `${bytes.toFixed(0)} B`;
}

// The index of the last of the ascending ``times`` that is not after ``tick``; 0 if all are after it.
function lastUpTo(times, tick) {
  let low = 0, high = times.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (times[middle] <= tick) low = middle; else high = middle - 1;
  }
  return low;
}

function at(columns, tick) {
  const i = lastUpTo(columns.starts, tick);
  const inside = columns.starts.length && columns.starts[i] <= tick && tick <= columns.starts[i] + columns.lengths[i];
  return inside ? i : -1;
}

function span(chart, columns, i) {
  const start = columns.starts[i] * chart.tick, length = columns.lengths[i] * chart.tick;
  const n = (v) => Number(v.toPrecision(6)).toString();
  return `${n(start)} to ${n(start + length)} ${chart.unit} (${n(length)})`;
}

function ofChunk(chart, columns, i) {
  const code = columns.codes[i];
  return `chunk ${(code >>> 20) & 1023}, microbatch ${microbatch(chart, code)}${sliceName(chart, code, ", slice ")}\n${span(chart, columns, i)}`;
}

function ofStage(lane, columns, i, what) {
  const chunk = (columns.codes[i] >>> 20) & 511;
  return { mb: -1, text: `${lane.name}: ${what}\nof chunk ${chunk} (stage ${lane.stages[chunk]})` };
}

function describe(chart, px, py) {
  const k = Math.floor((py - AXIS) / laneHeight(chart));
  const lane = chart.lanes[k], tick = timeAt(chart, px) / chart.tick;
  if (px < margin(chart) || tick * chart.tick > chart.end) return null;
  if (mostMemory && py > lanesEnd(chart)) return describeMemory(chart, tick, lanesEnd(chart) + CURVES - py);
  if (!lane) return null;
  const y = py - AXIS - k * laneHeight(chart), slack = (view.to - view.from) / chart.tick / 600;
  if (y <= ROW.block) {
    const i = at(lane.compute, tick);
    if (i >= 0) {
      const code = lane.compute.codes[i], op = OPS[code >>> 29], chunk = (code >>> 20) & 511, mb = microbatch(chart, code);
      return { mb, text: `${blockName(chart, code, chart.chunks)}  ${lane.name}\n${names[op]} of chunk ${chunk}, microbatch ${mb}${sliceName(chart, code, ", slice ")} (stage ${lane.stages[chunk]})\n${span(chart, lane.compute, i)}` };
    }
    for (const [waits, what] of [[lane.waits, WAITS], [lane.copyWaits, COPY_WAITS]]) {
      const w = at(waits, tick);
      if (w >= 0 && what === COPY_WAITS && waits.codes[w] >>> 29 > 1) return ofStage(lane, waits, w, what[waits.codes[w] >>> 29]);
      if (w >= 0) return { mb: microbatch(chart, waits.codes[w]), text: `${lane.name}: ${what[waits.codes[w] >>> 29]}\n${ofChunk(chart, waits, w)}` };
    }
    return { mb: -1, text: `${lane.name}: idle` };
  }
  const strip = stripsOf(chart)[Math.floor((y - ROW.block - 1.5) / (ROW.strip + 1))];
  if (strip) {
    const columns = lane[strip[0]], kind = strip[1];
    let i = at(columns, tick);
    if (i < 0) i = at(columns, tick + slack);
    if (i < 0) return null;
    if (OF_STAGES[kind]) return ofStage(lane, columns, i, OF_STAGES[kind]);
    if (!columns.where) return { mb: microbatch(chart, columns.codes[i]), text: `${lane.name}: copy ${kind === "load" ? "back from" : "to"} host memory\n${ofChunk(chart, columns, i)}` };
    const where = columns.where[i], code = columns.codes[i], mb = microbatch(chart, code);
    return { mb, text: `${kind} of microbatch ${mb}${sliceName(chart, code, ", slice ")}, ${lane.name} to rank ${where >>> 20} (for stage ${where & 0xfffff})\n${span(chart, columns, i)}` };
  }
  return null;
}

// The ranks whose curve is nearest to ``height``.
function describeMemory(chart, tick, height) {
  const now = chart.lanes.map(({ memory }) => memory.values[lastUpTo(memory.times, tick)]);
  const nearest = now.reduce((a, b) => (Math.abs(memoryHeight(b) - height) < Math.abs(memoryHeight(a) - height) ? b : a));
  const lanes = chart.lanes.filter((_, k) => now[k] === nearest);
  const of = chart.inBytes ? "in use" : "microbatches kept";
  return { mb: -1, text: lanes.map((l) => `${l.name}: ${amount(chart, nearest)} ${of}, peak ${amount(chart, l.memory.peak)}`).join("\n") };
}

// ---- zooming and moving

function redraw() {
  requestAnimationFrame(() => charts.forEach(draw));
}

function zoom(factor, centre) {
  const middle = centre ?? (view.from + view.to) / 2;
  const least = view.end * 1e-6;
  let from = middle - (middle - view.from) * factor, to = middle + (view.to - middle) * factor;
  if (to - from < least) return;
  show(from, to);
}

function show(from, to) {
  const span = Math.min(to - from, view.end);
  view.from = Math.min(Math.max(0, from), view.end - span);
  view.to = view.from + span;
  redraw();
}

function listen(chart) {
  const tip = document.getElementById("tip");
  let dragged = null;
  chart.canvas.addEventListener("wheel", (event) => {
    const scrolls = document.documentElement.scrollHeight > window.innerHeight + 4;
    if (scrolls && !event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    const px = event.clientX - chart.canvas.getBoundingClientRect().left;
    if (event.shiftKey) {
      const by = ((event.deltaX || event.deltaY) / chart.width) * (view.to - view.from);
      show(view.from + by, view.to + by);
    } else {
      zoom(Math.exp(event.deltaY * 0.0015), timeAt(chart, px));
    }
  }, { passive: false });
  chart.canvas.addEventListener("pointerdown", (event) => {
    dragged = { px: event.clientX, from: view.from, to: view.to, moved: false };
    chart.canvas.setPointerCapture(event.pointerId);
  });
  chart.canvas.addEventListener("pointermove", (event) => {
    const box = chart.canvas.getBoundingClientRect();
    if (dragged) {
      const by = ((dragged.px - event.clientX) / (chart.width - margin(chart))) * (dragged.to - dragged.from);
      dragged.moved = dragged.moved || Math.abs(dragged.px - event.clientX) > 3;
      if (dragged.moved) show(dragged.from + by, dragged.to + by);
    }
    const found = describe(chart, event.clientX - box.left, event.clientY - box.top);
    tip.style.display = found ? "block" : "none";
    if (found) {
      tip.textContent = found.text;
      tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
      tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
    }
  });
  chart.canvas.addEventListener("pointerup", (event) => {
    const box = chart.canvas.getBoundingClientRect();
    if (dragged && !dragged.moved) {
      const found = describe(chart, event.clientX - box.left, event.clientY - box.top);
      view.picked = found && found.mb !== view.picked ? found.mb : -1;
      redraw();
    }
    dragged = null;
  });
  chart.canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  chart.canvas.addEventListener("dblclick", () => show(0, view.end));
}

function controls() {
  const by = (share) => { const d = (view.to - view.from) * share; show(view.from + d, view.to + d); };
  const actions = { in: () => zoom(0.5), out: () => zoom(2), fit: () => show(0, view.end), theme: toggleTheme };
  for (const [id, action] of Object.entries(actions)) document.getElementById(id).addEventListener("click", action);
  const keys = { "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.fit, ArrowLeft: () => by(-0.2), ArrowRight: () => by(0.2) };
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  window.addEventListener("resize", redraw);
  window.addEventListener("scroll", redraw, { passive: true });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); redraw(); });
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  readColours();
  redraw();
}

// ---- start

function columnsOf(buffer, at) {
  const columns = { starts: column(buffer, at.starts, Uint32Array), lengths: column(buffer, at.lengths, Uint32Array), codes: column(buffer, at.codes, Uint32Array) };
  if (at.where) columns.where = column(buffer, at.where, Uint32Array);
  return columns;
}

function laneOf(buffer, lane) {
  const values = column(buffer, lane.memory.values, Float32Array);
  return {
    name: lane.name,
    stages: lane.stages,
    compute: columnsOf(buffer, lane.compute),
    ...Object.fromEntries(["waits", "copyWaits", "activations", "gradients", "offloads", "loads", "gathers", "scatters"].map((name) => [name, columnsOf(buffer, lane[name])])),
    memory: { times: column(buffer, lane.memory.times, Uint32Array), values, peak: lane.memory.peak },
  };
}

async function start() {
  const head = JSON.parse(document.getElementById("head").textContent);
  const buffer = await unpack("columns");
  charts = head.timelines.map((t, k) => ({
    ...t,
    canvas: document.getElementById("chart" + k),
    lanes: t.lanes.map((lane) => laneOf(buffer, lane)),
    margin: Math.max(52, 8 + 7 * Math.max(...t.lanes.map((lane) => lane.name.length))),
  }));
  ({ names, mostMemory, memoryTicks } = head);
  view.end = view.to = Math.max(0, ...charts.map((c) => c.end)) || 1;
  readColours();
  charts.forEach(listen);
  controls();
  const window_ = /^#t=([\d.]+),([\d.]+)$/.exec(location.hash); // #t=from,to opens an interval of time
  if (window_) show(Number(window_[1]), Number(window_[2]));
  charts.forEach(draw);
  document.body.dataset.ready = String(charts.reduce((n, c) => n + c.lanes.reduce((m, l) => m + l.compute.starts.length, 0), 0));
}

start().catch((error) => { document.getElementById("problem").textContent = "This page could not be drawn: " + error; });

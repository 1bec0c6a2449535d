"use strict";
// Draws the page from the JSON inside it. Text of a run enters the page as text nodes only, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const number = (value, digits = 4) =>
  value === null || value === undefined ? "–" : Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(digits)));

/** An element with attributes (`onclick` and other functions become listeners) and children (strings become text). */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor((seconds % 3600) / 60)];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${Math.round(seconds % 60)} s` : `${number(seconds, 2)} s`;
}
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
const moment = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : "–");

// --- the look: light or dark, as the system has it until the button is used

const dark = matchMedia("(prefers-color-scheme: dark)");
const charts = []; // functions that draw a chart again, for another theme or smoothing
function setTheme(name) {
  root.dataset.theme = name;
  charts.forEach((draw) => draw());
}
root.dataset.theme = dark.matches ? "dark" : "light";
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const palette = () =>
  root.dataset.theme === "dark"
    ? ["#7aa5ff", "#f0b357", "#6fcf97", "#c59bf0", "#f2867c", "#6cc7d8", "#b8c0cc", "#d9c36a"]
    : ["#2f62d9", "#d98a1f", "#2f9e6a", "#8a57cf", "#d4574b", "#2a94ab", "#8792a3", "#a8922b"];

function layout(extra = {}) {
  const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true, exponentformat: "e", minexponent: 4 };
  return {
    margin: { l: 46, r: 12, t: 8, b: 30 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 11.5, color: colour("--quiet") },
    hovermode: "x unified",
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") }, namelength: -1 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11.5 }, bgcolor: "rgba(0,0,0,0)" },
    ...extra,
    xaxis: { ...axis, showgrid: false, zeroline: false, nticks: 6, tickformat: "d", dtick: data.steps <= 8 ? 1 : null, ...extra.xaxis },
    yaxis: { ...axis, nticks: 5, ...extra.yaxis },
  };
}
const plotOptions = { displayModeBar: false, responsive: true };

// --- curves

let smoothing = 0;
/** Exponential moving average, corrected for its start at zero; gaps stay gaps. */
function smooth(values) {
  let [average, weight] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    average = smoothing * average + (1 - smoothing) * value;
    weight = smoothing * weight + (1 - smoothing);
    return average / weight;
  });
}

function curveTraces(metrics, band) {
  const traces = [];
  const colours = palette();
  if (band) {
    const [low, high] = band.map((name) => data.curves[name]);
    const edge = { mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
    traces.push({ x: low[0], y: low[1], ...edge });
    traces.push({ x: high[0], y: high[1], ...edge, fill: "tonexty", fillcolor: colours[0] + "22" });
  }
  Object.entries(metrics).forEach(([name, label], index) => {
    const [x, y] = data.curves[name];
    const isSparse = x.length < 2 || (x.length <= 60 && name.startsWith("eval/"));
    const shown = { x, name: plain(label), mode: isSparse ? "lines+markers" : "lines", marker: { size: 6 } };
    const line = { color: colours[index % colours.length], width: 1.9 };
    if (smoothing && !isSparse) {
      traces.push({ ...shown, y, line: { ...line, width: 1 }, opacity: 0.3, showlegend: false, hoverinfo: "skip" });
      traces.push({ ...shown, y: smooth(y), line });
    } else traces.push({ ...shown, y, line });
  });
  return traces;
}
/** A name for plotly, which reads a few tags in names: none of them survives. */
const plain = (text) => text.replace(/[<>&]/g, "·");

const nearby = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries)
    if (isIntersecting) {
      nearby.unobserve(target);
      charts.push(target.draw);
      target.draw();
    }
}, { rootMargin: "600px" });

/** A card with a chart, drawn once it comes near the window. */
function chartCard(title, note, metrics, band, onStep) {
  const plot = el("div", { class: "plot" });
  plot.draw = () => {
    Plotly.react(plot, curveTraces(metrics, band), layout({ showlegend: Object.keys(metrics).length > 1 }), plotOptions).then(() => {
      if (onStep && !plot.listens) plot.on("plotly_click", (event) => onStep(event.points[0].x));
      plot.listens = true;
    });
  };
  nearby.observe(plot);
  const heading = el("h3", {}, title, note ? el("span", { class: "quiet small" }, `  ${note}`) : null);
  return el("div", { class: "card chart" }, heading, plot);
}

function section(title, aside, ...children) {
  return el("section", {}, el("div", { class: "section-head" }, el("h2", {}, title), aside), ...children);
}

function curvesSection() {
  if (!Object.keys(data.curves).length) return section("Curves", null, el("p", { class: "quiet" }, "No step has ended yet."));
  const slider = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0, oninput: () => {
    smoothing = Number(slider.value);
    charts.forEach((draw) => draw());
  } });
  const cards = data.overview.map((chart) => chartCard(chart.title, chart.note, chart.metrics, chart.band, showStep));
  const hint = data.samples.length ? el("span", { class: "quiet small" }, "Click a curve for the samples of that step") : null;
  return section("Curves", el("div", { class: "row" }, hint, el("label", {}, "Smoothing", slider)), el("div", { class: "charts" }, cards), allMetrics());
}

function allMetrics() {
  const search = el("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", oninput: () => {
    for (const group of groups) {
      const hits = group.cards.filter(({ name, node }) => !(node.hidden = !name.includes(search.value.trim()))).length;
      group.node.hidden = !hits;
      group.node.open = Boolean(search.value.trim()) && hits > 0;
    }
  } });
  const groups = Object.entries(data.groups).map(([prefix, names]) => {
    const cards = names.map((name) => ({ name, node: chartCard(name, null, { [name]: name }, null, showStep) }));
    const summary = el("summary", {}, prefix, el("span", { class: "quiet small" }, `  ${names.length}`));
    return { cards, node: el("details", {}, summary, el("div", { class: "charts small-charts" }, cards.map(({ node }) => node))) };
  });
  const count = Object.keys(data.curves).length;
  const title = el("h3", {}, "All metrics", el("span", { class: "quiet small" }, `  ${count}`));
  return el("div", { style: "margin-top: 26px" }, el("div", { class: "row spread" }, title, search), groups.map(({ node }) => node));
}

// --- header

function lastValue(name) {
  const values = (data.curves[name] || [[], []])[1].filter((value) => value !== null);
  return values.length ? { first: values[0], last: values.at(-1), best: Math.max(...values) } : null;
}

function tile(label, value, note) {
  return el("div", { class: "card tile" }, el("div", { class: "quiet small" }, label), el("div", { class: "value" }, value), el("div", { class: "quiet small" }, note || "\u00a0"));
}

function header() {
  document.title = `${data.name} · training run`;
  const theme = el("button", { type: "button", onclick: () => setTheme(root.dataset.theme === "dark" ? "light" : "dark") }, "Light / dark");
  const tiles = [tile("Steps", String(data.steps), data.steps ? `last at ${clock(data.updated)}` : ""), tile("Wall time", duration(data.seconds), data.started ? `since ${moment(data.started)}` : "")];
  for (const [label, name] of [["Evaluation reward", "eval/all/avg_score"], ["Training reward", "reward/avg_raw_reward"]]) {
    const value = lastValue(name);
    if (value) tiles.push(tile(label, number(value.last, 3), `from ${number(value.first, 3)} · best ${number(value.best, 3)}`));
  }
  const step = lastValue("timing/step");
  if (step) {
    const [, seconds] = data.curves["timing/step"];
    tiles.push(tile("Seconds a step", number(seconds.reduce((sum, value) => sum + (value || 0), 0) / seconds.length, 3), `last ${number(step.last, 3)}`));
  }
  const facts = el("dl", { class: "facts" }, data.summary.map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value))));
  const config = data.config ? el("details", { style: "margin-top: 12px" }, el("summary", {}, "Every setting"), el("pre", {}, data.config)) : null;
  document.getElementById("header").append(
    el("div", { class: "row spread" }, el("div", {}, el("h1", {}, data.name), el("div", { class: "quiet small" }, `${data.folder} · page written ${moment(data.written)}`)), theme),
    el("div", { class: "tiles" }, tiles),
    data.summary.length || config ? el("div", { class: "card" }, facts, config) : "",
  );
}

// --- timing

function timingSection() {
  if (!data.timing.length) return null;
  const total = data.curves["timing/step"];
  const sums = data.timing.map((name) => data.curves[name][1].reduce((sum, value) => sum + (value || 0), 0));
  const all = sums.reduce((sum, value) => sum + value, 0);
  const order = data.timing.map((_, index) => index).sort((a, b) => sums[b] - sums[a]);
  const short = (name) => name.replace("timing/", "").replaceAll("_", " ");
  const plot = el("div", { class: "plot tall" });
  plot.draw = () => {
    const colours = palette();
    const traces = order.map((index, rank) => {
      const [x, y] = data.curves[data.timing[index]];
      return { x, y, type: "bar", name: plain(short(data.timing[index])), marker: { color: colours[rank % colours.length], line: { width: 0 } } };
    });
    if (total) traces.push({ x: total[0], y: total[1], name: "whole step", mode: "lines", line: { color: colour("--ink"), width: 1.2, dash: "dot" } });
    Plotly.react(plot, traces, layout({ barmode: "stack", bargap: data.steps > 200 ? 0 : 0.15, showlegend: false, yaxis: { title: { text: "seconds" } } }), plotOptions);
    dots.forEach((dot, rank) => (dot.style.background = colours[rank % colours.length]));
  };
  const dots = order.map(() => el("span", { class: "dot" }));
  const rows = order.map((index, rank) => {
    const count = data.curves[data.timing[index]][1].length;
    return el("tr", {}, el("td", {}, dots[rank], short(data.timing[index])), el("td", { class: "number" }, `${number(sums[index] / count, 3)} s`), el("td", { class: "number" }, `${((100 * sums[index]) / (all || 1)).toFixed(1)} %`));
  });
  const head = el("tr", {}, el("th", {}, "Stage"), el("th", { class: "number" }, "each time"), el("th", { class: "number" }, "of all"));
  nearby.observe(plot);
  return section("Where the time goes", null, el("div", { class: "card timing" }, plot, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
}

// --- what ran when, in asynchronous training

/** The bars of a step's lanes, by what they say: [name, colour, bars], a bar being {lane, start, end, text}. */
function laneBars(lanes) {
  const [blue, orange, green, violet, red] = palette();
  const kinds = new Map([
    ["trainer waits for groups", [colour("--line"), []]],
    ["trainer trains", [blue, []]],
    ["trainer syncs weights", [violet, []]],
    ["trainer evaluates, saves", [colour("--quiet"), []]],
    ["group that this step trained", [green, []]],
    ["group of a later step", [orange, []]],
    ["group of an earlier step", [green + "66", []]],
    ["group that was not trained", [red, []]],
  ]);
  for (const [name, start, end] of lanes.phases) {
    const kind = kinds.get(`trainer ${name}`) || kinds.get("trainer evaluates, saves");
    kind[1].push({ lane: "trainer", start, end, text: `trainer ${name}, ${duration(end - start)}` });
  }
  for (const group of lanes.groups) {
    const lost = group.outcome !== "finished" && group.outcome !== "running";
    const name = lost ? "group that was not trained" : group.trained === lanes.step ? "group that this step trained" : group.trained !== null && group.trained < lanes.step ? "group of an earlier step" : "group of a later step";
    const end = group.end === null ? lanes.seconds : group.end;
    const fate = group.trained !== null ? `trained in step ${group.trained}` : group.outcome === "finished" ? "not trained yet" : group.outcome;
    const text = `group ${group.ticket}: ${duration(end - group.start)}${group.end === null ? " so far" : ""}, started with weights of version ${group.version}, ${fate}`;
    kinds.get(name)[1].push({ lane: `slot ${group.slot}`, start: group.start, end, text });
  }
  return [...kinds].map(([name, [shade, bars]]) => [name, shade, bars]);
}

function laneTraces(lanes) {
  return laneBars(lanes).filter(([, , bars]) => bars.length).map(([name, shade, bars]) => {
    // Bars are cut at the edges of the step: what lies outside belongs to its neighbours.
    const cut = bars.map(({ start, end }) => [Math.max(0, start), Math.min(lanes.seconds, end)]);
    return {
      type: "bar", orientation: "h", name,
      y: bars.map(({ lane }) => lane), base: cut.map(([start]) => start), x: cut.map(([start, end]) => Math.max(0, end - start)),
      hovertext: bars.map(({ text }) => text), hoverinfo: "text", marker: { color: shade, line: { color: colour("--card"), width: 1 } },
    };
  });
}

function lanesSection() {
  if (!data.lanes.length) return null;
  const choice = el("select", { "aria-label": "Step of the lanes", onchange: () => draw() }, data.lanes.map((lanes, index) => el("option", { value: index, selected: index === data.lanes.length >> 1 }, `step ${lanes.step}`)));
  const plot = el("div", { class: "plot" });
  const note = el("p", { class: "quiet small" });
  const body = el("tbody");
  const draw = () => {
    const lanes = data.lanes[choice.value];
    const slots = Math.max(0, ...lanes.groups.map((group) => group.slot + 1));
    const names = ["trainer", ...Array.from({ length: slots }, (_, slot) => `slot ${slot}`)];
    const shapes = lanes.phases.filter(([name]) => name === "syncs weights").map(([, x0, x1]) => ({ type: "rect", xref: "x", yref: "paper", x0, x1, y0: 0, y1: 1, line: { width: 0 }, fillcolor: palette()[3] + "33" }));
    plot.style.height = `${110 + 17 * names.length}px`;
    const yaxis = { categoryorder: "array", categoryarray: [...names].reverse(), range: [-0.6, names.length - 0.4], dtick: slots > 32 ? 4 : 1, showgrid: false };
    Plotly.react(plot, laneTraces(lanes), layout({ barmode: "overlay", bargap: 0.25, hovermode: "closest", shapes, xaxis: { range: [0, lanes.seconds], tickformat: "", dtick: null, ticksuffix: " s" }, yaxis }), plotOptions);
    const waited = lanes.phases.filter(([name]) => name === "waits for groups").reduce((sum, [, start, end]) => sum + end - start, 0);
    const hidden = lanes.num_slots > slots ? ` Slots 0 to ${slots - 1} of ${lanes.num_slots} are shown.` : "";
    note.textContent = `Step ${lanes.step}, from the end of the one before: ${duration(lanes.seconds)}, of which the trainer waited ${duration(waited)} for groups.${hidden}`;
    body.replaceChildren(...lanes.waits.map(([start, end, reason]) => el("tr", {}, el("td", { class: "number" }, `${start.toFixed(2)} s`), el("td", { class: "number" }, duration(end - start)), el("td", {}, reason))));
  };
  plot.draw = draw;
  nearby.observe(plot);
  const head = el("tr", {}, el("th", { class: "number" }, "At"), el("th", { class: "number" }, "For"), el("th", {}, "The trainer waited because"));
  const table = el("div", { style: "max-height: 260px; overflow: auto" }, el("table", {}, el("thead", {}, head), body));
  const made = section("What ran when", choice, el("div", { class: "card" }, note, plot, table));
  made.id = "lanes";
  return made;
}

// --- failures

function failuresSection() {
  const kinds = Object.entries(data.failure_counts);
  if (!kinds.length) return null;
  const from = `among ${data.num_read.toLocaleString()} trajectories of ${data.num_files_read} of ${data.num_files} files`;
  const badges = kinds.map(([kind, count]) => el("span", { class: "badge bad" }, `${kind}  ${count}`));
  const rows = data.failures.map((failure) => el("tr", {}, el("td", { class: "number" }, String(failure.step)), el("td", {}, failure.phase), el("td", {}, failure.kind), el("td", {}, failure.message), el("td", { class: "quiet" }, failure.uid)));
  const head = el("tr", {}, ["Step", "Phase", "What failed", "Message", "Prompt"].map((title, index) => el("th", { class: index ? null : "number" }, title)));
  const table = el("div", { style: "max-height: 320px; overflow: auto" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows)));
  return section("Failed rollouts", el("span", { class: "quiet small" }, from), el("div", { class: "card" }, el("div", { class: "row", style: "margin-bottom: 10px" }, badges), table));
}

// --- samples

const tip = document.getElementById("tip");
const list = el("div", { class: "card list", role: "listbox", tabindex: 0, "aria-label": "Samples" });
const detail = el("div", { class: "card" });
const filters = {
  phase: el("select", { "aria-label": "Phase" }, el("option", { value: "" }, "All phases"), ["train", "eval"].map((name) => el("option", { value: name }, name))),
  step: el("select", { "aria-label": "Step" }, el("option", { value: "" }, "All steps"), [...new Set(data.samples.map((sample) => sample.step))].map((step) => el("option", { value: step }, `step ${step}`))),
  kind: el("select", { "aria-label": "Outcome" }, [["", "All outcomes"], ["good", "reward > 0"], ["poor", "reward ≤ 0"], ["failed", "failed"]].map(([value, label]) => el("option", { value }, label))),
  search: el("input", { type: "search", placeholder: "Search text", "aria-label": "Search prompts and responses", style: "flex: 1; min-width: 140px" }),
};
const colouring = el("select", { "aria-label": "Colour tokens by" }, [["log_probs", "log-prob"], ["rewards", "reward"], ["versions", "weight version"], ["", "nothing"]].map(([value, label]) => el("option", { value }, label)));
let shown = [];
let current = null;

function matches(sample) {
  const query = filters.search.value.trim().toLowerCase();
  const outcome = { "": true, good: !sample.failure && sample.reward > 0, poor: !sample.failure && !(sample.reward > 0), failed: Boolean(sample.failure) };
  return (
    (!filters.phase.value || sample.phase === filters.phase.value) &&
    (!filters.step.value || sample.step === Number(filters.step.value)) &&
    outcome[filters.kind.value] &&
    (!query || `${sample.uid}\n${sample.prompt}\n${sample.text.join("")}`.toLowerCase().includes(query))
  );
}

function rewardBadge(sample) {
  if (sample.failure) return el("span", { class: "badge bad" }, `${sample.failure.kind} failed`);
  return el("span", { class: `badge ${sample.reward > 0 ? "good" : ""}` }, number(sample.reward, 3));
}

function listSamples() {
  shown = data.samples.filter(matches);
  const items = shown.map((sample) => {
    const line = el("span", { class: "row spread small" }, el("span", { class: "quiet" }, `step ${sample.step} · ${sample.phase} · ${sample.num_tokens} tokens`), rewardBadge(sample));
    const preview = sample.text.join("").trim().slice(0, 120) || sample.failure?.message || "(empty)";
    return el("button", { type: "button", class: "item", onclick: () => show(sample) }, line, el("span", { class: "preview" }, preview));
  });
  list.replaceChildren(...(items.length ? items : [el("p", { class: "quiet", style: "padding: 6px 10px" }, "No sample fits these filters.")]));
  count.textContent = `${shown.length} of ${data.samples.length}, out of ${data.num_read.toLocaleString()} in ${data.num_files_read} of ${data.num_files} files`;
  show(shown.includes(current) ? current : shown[0]);
}
const count = el("span", { class: "quiet small" });

/** To the sample `distance` further down the list. */
function move(distance) {
  const next = shown[Math.min(shown.length - 1, Math.max(0, shown.indexOf(current) + distance))];
  if (next) show(next);
  list.children[shown.indexOf(next)]?.scrollIntoView({ block: "nearest" });
}

function show(sample) {
  current = sample;
  [...list.children].forEach((item, index) => item.setAttribute("aria-current", String(shown[index] === sample)));
  if (!sample) return detail.replaceChildren();
  const facts = [`step ${sample.step}`, sample.phase, `prompt ${sample.uid}`, `sample ${sample.sample}`, `${sample.num_tokens} tokens`, sample.stop_reason];
  detail.replaceChildren(
    el("div", { class: "row spread" }, el("span", { class: "quiet small" }, facts.filter(Boolean).join(" · ")), rewardBadge(sample)),
    el("div", { class: "quiet small", style: "margin-top: 12px" }, "Prompt"),
    el("div", { class: "text prompt" }, sample.prompt),
    sample.failure ? el("div", { class: "failure" }, el("b", {}, `${sample.failure.kind}: `), sample.failure.message) : "",
    el("div", { class: "row spread" }, el("span", { class: "quiet small" }, "Response"), legend(sample)),
    el("div", { class: "text response", onmousemove: hover, onmouseleave: () => (tip.hidden = true) }, tokens(sample)),
  );
}

const LOWEST = -5; // log-probs below it look alike
function versionsOf(sample) {
  return [...new Set((sample.versions || []).filter((version) => version >= 0))].sort((a, b) => a - b);
}

function tint(sample, index) {
  const by = colouring.value;
  const value = by ? sample[by]?.[index] : null;
  if (value === null || value === undefined) return null;
  if (by === "log_probs") return `rgba(var(--heat), ${(0.75 * Math.min(1, value / LOWEST)).toFixed(3)})`;
  if (by === "rewards") {
    const largest = Math.max(...sample.rewards.map((reward) => Math.abs(reward ?? 0)));
    return value ? `rgba(var(${value > 0 ? "--good-heat" : "--bad-heat"}), ${(0.6 * Math.abs(value) / largest).toFixed(3)})` : null;
  }
  const rank = versionsOf(sample).indexOf(value);
  return rank < 0 ? null : `${palette()[rank % 8]}44`;
}

function tokens(sample) {
  const nodes = sample.text.map((text, index) => {
    const isMasked = !sample.mask[index];
    const background = isMasked && colouring.value !== "rewards" ? null : tint(sample, index);
    const node = el("span", { class: isMasked ? "token masked" : "token", "data-index": index });
    if (background) node.style.background = background;
    // Whitespace that would not be seen, and line ends, are marked.
    for (const part of text.split(/(\n)/)) if (part) node.append(part === "\n" ? el("span", { class: "invisible" }, "↵") : "", part);
    return node;
  });
  if (sample.gap) nodes.splice(sample.gap.at, 0, el("span", { class: "gap" }, ` … ${sample.gap.tokens.toLocaleString()} tokens left out … `));
  return nodes;
}

function legend(sample) {
  const by = colouring.value;
  const parts = [];
  if (by && !sample[by]) parts.push("not recorded");
  else if (by === "log_probs") {
    const scale = el("span", { class: "scale" });
    scale.style.background = "linear-gradient(90deg, rgba(var(--heat), 0.75), rgba(var(--heat), 0))";
    parts.push(`${LOWEST} or less`, scale, "0");
  } else if (by === "versions")
    versionsOf(sample).forEach((version, rank) => {
      const dot = el("span", { class: "dot", style: "margin: 0" });
      dot.style.background = palette()[rank % 8];
      parts.push(dot, `version ${version}`);
    });
  if (sample.mask.some((bit) => !bit)) parts.push(el("span", { class: "token masked" }, "not trained on"));
  return el("span", { class: "row small quiet" }, parts);
}

function hover(event) {
  const node = event.target.closest("[data-index]");
  tip.hidden = !node;
  if (!node) return;
  const index = Number(node.dataset.index);
  const log_prob = current.log_probs?.[index];
  const facts = [
    ["id", String(current.ids[index])],
    ["log-prob", log_prob === null || log_prob === undefined ? "–" : `${log_prob.toFixed(3)}  (p = ${number(Math.exp(log_prob), 3)})`],
    ["reward", number(current.rewards[index])],
    ["trained on", current.mask[index] ? "yes" : "no (mask 0)"],
    ["weight version", number(current.versions?.[index])],
  ];
  tip.replaceChildren(
    el("div", { class: "text" }, JSON.stringify(current.text[index])),
    el("table", {}, el("tbody", {}, facts.map(([label, value]) => el("tr", {}, el("td", {}, label), el("td", { class: "number" }, value))))),
  );
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - box.width - 8)}px`;
  tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18}px`;
}

function samplesSection() {
  if (!data.samples.length) return section("Samples", null, el("p", { class: "quiet" }, "This run has kept no trajectories yet."));
  for (const filter of Object.values(filters)) filter.addEventListener("input", listSamples);
  colouring.addEventListener("input", () => show(current));
  list.addEventListener("keydown", (event) => {
    const distance = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (distance) {
      event.preventDefault();
      move(distance);
    }
  });
  const bar = el("div", { class: "row", style: "margin-bottom: 12px" }, Object.values(filters), el("label", {}, "Colour by", colouring));
  const made = section("Samples", count, bar, el("div", { class: "samples" }, list, detail));
  made.id = "samples";
  return made;
}

/** To the samples nearest to a step that was clicked in a chart. */
function showStep(step) {
  const steps = [...new Set(data.samples.map((sample) => sample.step))];
  if (!steps.length) return;
  filters.step.value = steps.reduce((best, other) => (Math.abs(other - step) < Math.abs(best - step) ? other : best));
  listSamples();
  document.getElementById("samples").scrollIntoView({ behavior: "smooth" });
}

header();
document.getElementById("main").append(
  ...[curvesSection(), timingSection(), lanesSection(), failuresSection(), samplesSection()].filter(Boolean),
);
if (data.samples.length) listSamples();

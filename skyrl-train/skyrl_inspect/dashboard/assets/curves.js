// Curves of a run, and of several in one picture.
import { api, choice, duration, el, facts, number } from "./dom.js";
import { groupSeeds, shadeOf, titles } from "./identity.js";
import { chartCard } from "./plot.js";

export async function curvesPage({ run, query, head }, main, signal) {
  const others = query.with ? JSON.parse(query.with) : [];
  const runs = [run, ...others];
  const options = { smoothing: 0, log: false, time: false, seeds: false };
  const all = await api("runs").then(({ runs: rows }) => rows).catch(() => []);
  const compared = all.filter((row) => runs.includes(row.run));
  const [together, apart] = [titles(compared), titles(all)];
  const nameOf = (key) => together.get(key) ?? key;
  const seedGroups = groupSeeds(compared);
  const [own, ...foreign] = await Promise.all(runs.map((key) => api("metrics", { run: key })));
  let waiting = new Map(); // one request for all charts that are drawn at once
  let cache = new Map();

  function curve(key, name) {
    const id = JSON.stringify([key, name]);
    if (!cache.has(id)) cache.set(id, new Promise((resolve, reject) => {
      if (!waiting.size) setTimeout(fetchWaiting, 0);
      waiting.set(id, { key, name, resolve, reject });
    }));
    return cache.get(id);
  }
  function fetchWaiting() {
    const asked = [...waiting.values()];
    waiting = new Map();
    for (const key of new Set(asked.map((item) => item.key))) {
      const mine = asked.filter((item) => item.key === key);
      for (let first = 0; first < mine.length; first += 60) {
        const part = mine.slice(first, first + 60);
        api("curves", { run: key, name: part.map(({ name }) => name) }).then(
          ({ time, curves }) => part.forEach(({ name, resolve }) => resolve(placed(curves[name], time))),
          (error) => part.forEach(({ reject }) => reject(error)),
        );
      }
    }
  }
  /** Steps, seconds since the first logged step, and values of a curve. */
  function placed([steps, values], [timed, times]) {
    const at = new Map(timed.map((step, index) => [step, times[index]]));
    const start = times.find((value) => value !== null) ?? 0;
    return { steps, seconds: steps.map((step) => Math.round(10 * ((at.get(step) ?? start) - start)) / 10), values };
  }

  async function read(metrics, band) {
    const wanted = Object.entries(metrics).flatMap(([name, label]) => runs.map((key, index) => ({ key, name, index, label: runs.length > 1 ? (Object.keys(metrics).length > 1 ? `${nameOf(key)} · ${label}` : nameOf(key)) : label })));
    const found = await Promise.all(wanted.map(({ key, name }) => curve(key, name)));
    const single = Object.keys(metrics).length === 1;
    const shade = (index) => (runs.length > 1 && single ? shadeOf(wanted[index].key, all) : index);
    if (options.seeds && !options.time) return { ...overSeeds(wanted, found, single), options };
    const curves = found.map(({ steps, seconds, values }, index) => ({ label: wanted[index].label, shade: shade(index), x: options.time ? seconds : steps, y: values })).filter(({ x }) => x.length);
    if (!band || runs.length > 1) return { curves, options };
    const [low, high] = await Promise.all(band.map((name) => curve(run, name)));
    return { curves, options, band: { x: options.time ? low.seconds : low.steps, low: low.values, high: high.values } };
  }

  /** For runs that differ in their seed alone, the mean of each curve, and of a single one the range. */
  function overSeeds(wanted, found, single) {
    const made = seedGroups.flatMap((keys) => [...new Set(wanted.map(({ name }) => name))].map((name) => {
      const own = found.filter((_, index) => wanted[index].name === name && keys.includes(wanted[index].key));
      const at = new Map();
      for (const { steps, values } of own) steps.forEach((step, index) => values[index] !== null && at.set(step, [...(at.get(step) ?? []), values[index]]));
      const x = [...at.keys()].sort((a, b) => a - b);
      const y = x.map((step) => at.get(step).reduce((sum, value) => sum + value, 0) / at.get(step).length);
      const label = `${nameOf(keys[0]).replace(/ · seed=[^·]*/, "")}${single ? "" : ` · ${name.split("/").at(-1)}`} (${keys.length} seed${keys.length > 1 ? "s" : ""})`;
      return { curve: { label, shade: single ? shadeOf(keys[0], all) : undefined, x, y }, low: x.map((step) => Math.min(...at.get(step))), high: x.map((step) => Math.max(...at.get(step))) };
    })).filter(({ curve: { x } }) => x.length);
    return { curves: made.map(({ curve: each }) => each), band: made.length === 1 ? { x: made[0].curve.x, low: made[0].low, high: made[0].high } : undefined };
  }

  const cards = [];
  const card = (title, note, metrics, band, wide) => {
    const made = chartCard(title, note, () => read(metrics, band), signal, { wide, onStep: (step) => runs.length === 1 && (location.hash = `#/run/${encodeURIComponent(run)}/step?step=${step}`) });
    cards.push(made);
    return made.node;
  };
  const redraw = () => cards.forEach(({ draw }) => draw());

  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, oninput: () => { options.smoothing = Number(slider.value); redraw(); } });
  const log = el("input", { type: "checkbox", onchange: () => { options.log = log.checked; redraw(); } });
  const seeds = el("input", { type: "checkbox", onchange: () => { options.seeds = seeds.checked; redraw(); } });
  const axis = choice("Over", [["step", "steps"], ["time", "time"]], "step", (value) => { options.time = value === "time"; redraw(); });
  const add = choice("Compare with", [["", "…"], ...all.filter((row) => !runs.includes(row.run)).map((row) => [row.run, apart.get(row.run)])], "", (value) => value && go([...others, value]));
  const go = (list) => (location.hash = `#/run/${encodeURIComponent(run)}/curves${list.length ? `?${new URLSearchParams({ with: JSON.stringify(list) })}` : ""}`);
  const chosen = others.map((key) => el("button", { type: "button", class: "small", title: "Take it out of the picture", onclick: () => go(others.filter((other) => other !== key)) }, `${nameOf(key)} ×`));
  const bar = el("div", { class: "row", style: { marginBottom: "12px" } }, axis, el("label", {}, "Smoothing", slider), el("label", {}, log, "Log scale"), seedGroups.some((keys) => keys.length > 1) ? el("label", {}, seeds, "Mean over seeds") : null, add, chosen);

  const overview = el("div", { class: "charts" }, own.overview.map(({ title, note, metrics, band }) => card(title, note, metrics, band)));
  const groups = [];
  const lists = el("div");
  const search = el("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", oninput: find });
  function find() {
    const text = search.value.trim().toLowerCase();
    for (const { node, body, names } of groups) {
      const hits = names.filter((name) => name.toLowerCase().includes(text));
      node.hidden = !hits.length;
      if (text) node.open = hits.length > 0;
      if (node.open) fill(body, hits);
    }
  }
  function fill(body, names) {
    const kept = new Map([...body.children].map((child) => [child.dataset.name, child]));
    for (const name of names) if (!kept.has(name)) {
      const node = card(name, null, { [name]: name.split("/").at(-1) });
      node.dataset.name = name;
      body.append(node);
    }
    for (const child of body.children) child.hidden = !names.includes(child.dataset.name);
  }
  const merged = {};
  for (const { groups: found } of [own, ...foreign]) for (const [group, names] of Object.entries(found)) merged[group] = [...new Set([...(merged[group] ?? []), ...names])].sort();
  for (const [group, names] of Object.entries(merged).sort()) {
    const body = el("div", { class: "charts" });
    const node = el("details", { ontoggle: () => node.open && find() }, el("summary", {}, group, el("span", { class: "quiet small" }, `  ${names.length}`)), body);
    groups.push({ node, body, names });
    lists.append(node);
  }
  const count = new Set(Object.values(merged).flat()).size;
  const none = count ? null : el("p", { class: "quiet" }, "No step has ended yet.");
  const summary = el("div", { class: "card" }, facts([["Model", head.model], ["Environment", head.environment], ["Seed", head.seed], ["Seconds a step", head.step_seconds && number(head.step_seconds, 3)], ["Running for", head.started && duration(head.updated - head.started)]]));
  const diagnostics = el("div", { class: "diagnostics" });
  const drawDiagnostics = (found) => diagnostics.replaceChildren(...found.map(drawDiagnostic));
  drawDiagnostics(head.diagnostics);
  main.replaceChildren(
    el("section", {}, summary, diagnostics),
    el("section", {}, bar, overview, none),
    count ? el("section", {}, el("div", { class: "row spread" }, el("h2", {}, "All metrics", el("span", { class: "quiet small" }, `  ${count}`)), search), lists) : "",
  );
  const known = own.names.length;
  return async (now) => {
    drawDiagnostics(now.diagnostics);
    cache = new Map();
    const names = (await api("metrics", { run })).names;
    if (names.length !== known && !known) return void dispatchEvent(new Event("hashchange"));
    redraw();
  };
}

function drawDiagnostic({ name, onset, evidence, advice, settings, page }) {
  const causes = settings.map((text) => el("code", {}, text));
  return el("div", { class: "notice" },
    el("strong", {}, name), ` since step ${onset}: ${evidence} ${advice} `, ...causes.flatMap((code) => [code, " "]),
    el("span", { class: "small" }, page));
}

// The list of runs.
import { api, badge, duration, el, moment, number, svg, walkable } from "./dom.js";

const STATES = ["running", "finished", "failed", "stopped", "silent"];

function spark([steps, values]) {
  if (values.length < 2) return el("span", { class: "quiet small" }, values.length ? number(values[0], 3) : "–");
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [first, last] = [steps[0], steps.at(-1)];
  const points = values.map((value, index) => `${((100 * (steps[index] - first)) / (last - first || 1)).toFixed(1)},${(36 - (32 * (value - low)) / (high - low || 1)).toFixed(1)}`);
  return svg("svg", { class: "spark", viewBox: "0 0 100 38", preserveAspectRatio: "none", role: "img", "aria-label": `from ${number(values[0], 3)} to ${number(values.at(-1), 3)}` }, svg("path", { d: `M${points.join("L")}` }));
}

const short = (key) => key.split(".").at(-1);
function changes(run) {
  const shown = Object.entries(run.changed).filter(([key]) => !/(path|dir|directory|_data|run_name|model_name|project_name|logger)$/.test(key)).slice(0, 6);
  const chips = shown.map(([key, value]) => el("span", { class: "chip", title: `${key}=${JSON.stringify(value)}` }, `${short(key)}=${String(typeof value === "string" ? value : JSON.stringify(value)).slice(0, 28)}`));
  const rest = run.num_changed - shown.length;
  return el("div", { class: "chips" }, chips, rest > 0 ? el("span", { class: "quiet small" }, `${rest} more`) : null);
}

function row(run, picked, onPick) {
  const href = `#/run/${encodeURIComponent(run.run)}/curves`;
  const done = run.total ? Math.min(1, (run.step ?? 0) / run.total) : null;
  const box = el("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, onclick: (event) => event.stopPropagation(), onchange: (event) => onPick(run.run, event.target.checked) });
  box.checked = picked.has(run.run);
  const left = run.state === "running" && run.total && run.step_seconds ? (run.total - run.step) * run.step_seconds : null;
  return el("tr", { tabindex: 0, onclick: () => (location.hash = href) },
    el("td", {}, box),
    el("td", {}, el("a", { href, tabindex: -1 }, run.name), run.run !== run.name ? el("div", { class: "quiet small" }, run.run) : null, el("div", { class: "quiet small" }, [run.environment, run.model && String(run.model).split("/").at(-1)].filter(Boolean).join(" · "))),
    el("td", {}, badge(run.state, run.state), el("div", { class: "quiet small" }, `${run.state === "running" ? "" : "since "}${run.state === "running" ? (left ? `${duration(left)} left` : "") : moment(run.since)}`), run.message ? el("div", { class: "small quiet", title: run.message }, run.message.slice(0, 90)) : null,
      el("div", { class: "chips" }, run.diagnostics.map((name) => el("span", { class: "chip warn" }, name)))),
    el("td", {}, run.step === null ? el("span", { class: "quiet" }, "–") : el("span", { class: "number" }, run.total ? `${run.step} / ${run.total}` : String(run.step)), done === null ? null : el("div", { class: "bar" }, el("i", { style: { width: `${100 * done}%` } }))),
    el("td", { title: run.metric ?? "" }, spark(run.curve)),
    el("td", { class: "number" }, number(run.curve[1].at(-1), 3), el("div", { class: "quiet small" }, run.metric ? short(run.metric) : "")),
    el("td", {}, changes(run)),
  );
}

export async function runsPage(place, main) {
  const picked = new Set();
  const search = el("input", { type: "search", placeholder: "Find a run or setting", "aria-label": "Find a run or setting", oninput: () => draw() });
  const state = el("select", { "aria-label": "State", onchange: () => draw() }, el("option", { value: "" }, "All states"), STATES.map((name) => el("option", { value: name }, name)));
  const compare = el("button", { type: "button", onclick: () => {
    const [first, ...others] = picked;
    location.hash = `#/run/${encodeURIComponent(first)}/curves?${new URLSearchParams({ with: JSON.stringify(others) })}`;
  } });
  const count = el("span", { class: "quiet small" });
  const body = walkable(el("tbody"));
  let data = null;
  function draw() {
    const query = search.value.trim().toLowerCase();
    const rows = data.runs.filter((run) => (!state.value || run.state === state.value) && (!query || `${run.name} ${run.run} ${run.model} ${run.environment} ${run.diagnostics} ${JSON.stringify(run.changed)}`.toLowerCase().includes(query)));
    const focused = [...body.children].indexOf(document.activeElement);
    body.replaceChildren(...rows.map((run) => row(run, picked, pick)));
    if (focused >= 0) body.children[focused]?.focus();
    count.textContent = `${rows.length} of ${data.runs.length} in ${data.folder}`;
    table.hidden = !data.runs.length;
    none.hidden = !table.hidden;
    drawCompare();
  }
  function pick(name, isPicked) {
    isPicked ? picked.add(name) : picked.delete(name);
    drawCompare();
  }
  function drawCompare() {
    compare.disabled = picked.size < 2;
    compare.textContent = picked.size < 2 ? "Compare: pick two or more" : `Compare ${picked.size} runs`;
  }
  const head = el("tr", {}, ["", "Run", "State", "Progress", "Reward", "Last", "Settings that differ from the defaults"].map((title) => el("th", {}, title)));
  const table = el("div", { class: "card" }, el("table", { class: "stack" }, el("thead", {}, head), body));
  const none = el("p", { class: "quiet" }, "There is no run folder here yet: none with config.yaml, metrics.jsonl or trajectories.");
  data = await api("runs");
  draw();
  main.replaceChildren(el("section", {}, el("div", { class: "row spread", style: { marginBottom: "10px" } }, el("div", { class: "row" }, search, state, compare), count), table, none));
  return async () => {
    data = await api("runs");
    draw();
  };
}

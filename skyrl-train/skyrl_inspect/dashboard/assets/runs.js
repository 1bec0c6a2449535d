// The list of runs.
import { api, badge, duration, el, moment, number, palette, svg, walkable } from "./dom.js";
import { differing, settingOf, shadeOf, shortNames, valueText } from "./identity.js";

const STATES = ["running", "finished", "failed", "stopped", "silent"];

function spark([steps, values]) {
  if (values.length < 2) return el("span", { class: "quiet small" }, values.length ? number(values[0], 3) : "–");
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [first, last] = [steps[0], steps.at(-1)];
  const points = values.map((value, index) => `${((100 * (steps[index] - first)) / (last - first || 1)).toFixed(1)},${(36 - (32 * (value - low)) / (high - low || 1)).toFixed(1)}`);
  return svg("svg", { class: "spark", viewBox: "0 0 100 38", preserveAspectRatio: "none", role: "img", "aria-label": `from ${number(values[0], 3)} to ${number(values.at(-1), 3)}` }, svg("path", { d: `M${points.join("L")}` }));
}

const MAX_COLUMNS = 5; // settings with a column of their own; the others are in the last one
const short = (key) => key.split(".").at(-1);
function changes(run, keys) {
  const shown = keys.filter((key) => key in run.changed).slice(0, 6);
  const chips = shown.map((key) => el("span", { class: "chip", title: `${key}=${JSON.stringify(run.changed[key])}` }, `${short(key)}=${valueText(run, key).slice(0, 28)}`));
  const rest = run.num_changed - shown.length;
  return el("div", { class: "chips" }, chips, rest > 0 ? el("a", { class: "small", href: `#/run/${encodeURIComponent(run.run)}/settings`, onclick: (event) => event.stopPropagation() }, `${rest} more changed`) : null);
}

/** Whether a run has all words of a query: text, or `setting=value` with the end of the setting's name. */
function matches(run, query) {
  const text = `${run.name} ${run.run} ${run.model} ${run.environment} ${run.diagnostics} ${JSON.stringify(run.changed)}`.toLowerCase();
  return query.split(/\s+/).filter(Boolean).every((word) => {
    const [key, value] = word.split("=");
    if (value === undefined) return text.includes(word);
    const isEqual = (found) => found.toLowerCase() === value || (value !== "" && Number(found) === Number(value));
    return Object.keys(run.changed).some((name) => name.toLowerCase().endsWith(key) && isEqual(valueText(run, name)));
  });
}

const SORTS = {
  Run: (run) => run.name, State: (run) => run.state, Progress: (run) => run.step ?? -1, Last: (run) => run.curve[1].at(-1) ?? -Infinity,
};
function compareBy(sort, runs) {
  const value = SORTS[sort] ?? ((run) => settingOf(run, sort, runs) ?? -Infinity);
  return (a, b) => {
    const [x, y] = [value(a), value(b)];
    return typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true });
  };
}

function row(run, picked, onPick, columns, names, rest, all) {
  const href = `#/run/${encodeURIComponent(run.run)}/curves`;
  const done = run.total ? Math.min(1, (run.step ?? 0) / run.total) : null;
  const box = el("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, onclick: (event) => event.stopPropagation(), onchange: (event) => onPick(run.run, event.target.checked) });
  box.checked = picked.has(run.run);
  const left = run.state === "running" && run.total && run.step_seconds ? (run.total - run.step) * run.step_seconds : null;
  return el("tr", { tabindex: 0, onclick: () => (location.hash = href) },
    el("td", {}, box),
    el("td", {}, el("span", { class: "dot", style: { background: palette()[shadeOf(run.run, all)] } }), el("a", { href, tabindex: -1 }, run.name), run.run !== run.name ? el("div", { class: "quiet small" }, run.run) : null, el("div", { class: "quiet small" }, [run.environment, run.model && String(run.model).split("/").at(-1)].filter(Boolean).join(" · "))),
    el("td", {}, badge(run.state, run.state), el("div", { class: "quiet small" }, `${run.state === "running" ? "" : "since "}${run.state === "running" ? (left ? `${duration(left)} left` : "") : moment(run.since)}`), run.message ? el("div", { class: "small quiet", title: run.message }, run.message.slice(0, 90)) : null,
      el("div", { class: "chips" }, run.diagnostics.map((name) => el("span", { class: "chip warn" }, name)))),
    el("td", {}, run.step === null ? el("span", { class: "quiet" }, "–") : el("span", { class: "number" }, run.total ? `${run.step} / ${run.total}` : String(run.step)), done === null ? null : el("div", { class: "bar" }, el("i", { style: { width: `${100 * done}%` } }))),
    el("td", { title: run.metric ?? "" }, spark(run.curve)),
    el("td", { class: "number" }, number(run.curve[1].at(-1), 3), el("div", { class: "quiet small" }, run.metric ? short(run.metric) : "")),
    columns.map((key) => el("td", { class: "mono", title: key }, el("span", { class: "label" }, `${names.get(key)}=`), valueText(run, key, all).slice(0, 40))),
    el("td", {}, changes(run, rest)),
  );
}

export async function runsPage({ query }, main) {
  const picked = new Set();
  const view = { q: query.q ?? "", state: query.state ?? "", sort: query.sort ?? "", down: query.down ?? "" };
  const search = el("input", { type: "search", value: view.q, placeholder: "Text, or lr=1e-5", "aria-label": "Find runs by text or setting=value", oninput: () => keep({ q: search.value }) });
  const state = el("select", { "aria-label": "State", onchange: () => keep({ state: state.value }) }, el("option", { value: "" }, "All states"), STATES.map((name) => el("option", { value: name, selected: name === view.state }, name)));
  const compare = el("button", { type: "button", onclick: () => {
    const [first, ...others] = picked;
    location.hash = `#/run/${encodeURIComponent(first)}/curves?${new URLSearchParams({ with: JSON.stringify(others) })}`;
  } });
  const count = el("span", { class: "quiet small" });
  const [head, body] = [el("tr"), walkable(el("tbody"))];
  let data = null;
  /** Take over a change of the view and write it into the address: a view is saved as a bookmark. */
  function keep(change) {
    Object.assign(view, change);
    const said = new URLSearchParams(Object.entries(view).filter(([, value]) => value));
    history.replaceState(null, "", `#/${String(said) && `?${said}`}`);
    draw();
  }
  function title(name, sort, hint = "") {
    if (!sort) return el("th", {}, name);
    const arrow = view.sort === sort ? (view.down ? " ↓" : " ↑") : "";
    return el("th", { "aria-sort": arrow ? (view.down ? "descending" : "ascending") : null }, el("button", { type: "button", class: "plain", title: hint, onclick: () => keep({ sort, down: view.sort === sort && !view.down ? "1" : "" }) }, name + arrow));
  }
  function draw() {
    const rows = data.runs.filter((run) => (!view.state || run.state === view.state) && matches(run, view.q.trim().toLowerCase()));
    if (view.sort) rows.sort(compareBy(view.sort, data.runs));
    if (view.down) rows.reverse();
    const keys = differing(rows);
    const columns = rows.length < 2 ? [] : keys.slice(0, MAX_COLUMNS);
    const names = shortNames(columns);
    head.replaceChildren(title(""), title("Run", "Run"), title("State", "State"), title("Progress", "Progress"), title("Reward"), title("Last", "Last"), ...columns.map((key) => title(names.get(key), key, key)), title(rows.length < 2 ? "Settings that differ from the defaults" : "Other settings in which these runs differ"));
    const focused = [...body.children].indexOf(document.activeElement);
    body.replaceChildren(...rows.map((run) => row(run, picked, pick, columns, names, keys.slice(columns.length), data.runs)));
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
  const table = el("div", { class: "card scroll" }, el("table", { class: "stack" }, el("thead", {}, head), body));
  const none = el("p", { class: "quiet" }, "There is no run folder here yet: none with config.yaml, metrics.jsonl or trajectories.");
  data = await api("runs");
  draw();
  main.replaceChildren(el("section", {}, el("div", { class: "row spread", style: { marginBottom: "10px" } }, el("div", { class: "row" }, search, state, compare), count), table, none));
  return async () => {
    data = await api("runs");
    draw();
  };
}

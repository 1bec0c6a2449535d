// A step: what its trajectories earned, how long they are, how they ended; its groups, and the samples of one side by side.
import { address, api, badge, choice, el, number, section, textNodes, walkable } from "./dom.js";

const BINS = 24;
const GROUPS_SHOWN = 200;

function histogram(title, values, format = (value) => number(value, 3)) {
  const known = values.filter((value) => typeof value === "number");
  const card = el("div", { class: "card" }, el("h3", {}, title));
  if (!known.length) return card.append(el("p", { class: "quiet small" }, "none")), card;
  const [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const distinct = new Set(known).size;
  const bins = new Array(low === high ? 1 : Math.min(BINS, Math.max(2, distinct <= 12 ? distinct : BINS))).fill(0);
  for (const value of known) bins[Math.min(bins.length - 1, Math.floor(((value - low) / (high - low || 1)) * bins.length))]++;
  const most = Math.max(...bins);
  const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
  const edge = (index) => low + ((high - low) * index) / bins.length;
  card.append(
    el("div", { class: "hist", role: "img", "aria-label": `${known.length} values from ${format(low)} to ${format(high)}, mean ${format(mean)}` }, bins.map((count, index) => el("i", { class: count ? "some" : "", style: { height: `${(100 * count) / most}%` }, title: `${format(edge(index))} to ${format(edge(index + 1))}: ${count}` }))),
    el("div", { class: "axis" }, el("span", {}, format(low)), el("span", {}, `mean ${format(mean)}`), el("span", {}, format(high))),
  );
  return card;
}

function counts(title, values) {
  const found = new Map();
  for (const value of values) found.set(value, (found.get(value) ?? 0) + 1);
  const rows = [...found].sort((a, b) => b[1] - a[1]).slice(0, 8);
  const body = rows.map(([name, count]) => el("tr", {}, el("td", {}, name), el("td", {}, el("div", { class: "bar" }, el("i", { style: { width: `${(100 * count) / values.length}%` } }))), el("td", { class: "number" }, String(count))));
  return el("div", { class: "card" }, el("h3", {}, title), rows.length ? el("table", { class: "bars" }, el("tbody", {}, body)) : el("p", { class: "quiet small" }, "none"));
}

/** The groups of a step: samples of one prompt. A trajectory of several rows (turns) counts once, by its last. */
function groupsOf(rows) {
  const groups = new Map();
  for (const row of rows) {
    if (!groups.has(row.uid)) groups.set(row.uid, { uid: row.uid, prompt: row.prompt, rows: [], samples: new Map() });
    const group = groups.get(row.uid);
    group.rows.push(row);
    const before = group.samples.get(row.sample);
    group.samples.set(row.sample, { reward: row.reward === null ? (before?.reward ?? null) : (before?.reward ?? 0) + row.reward, tokens: (before?.tokens ?? 0) + row.tokens, failure: row.failure ?? before?.failure, stop: row.stop });
  }
  for (const group of groups.values()) {
    const samples = [...group.samples.values()];
    const rewards = samples.filter(({ failure, reward }) => !failure && reward !== null).map(({ reward }) => reward);
    const mean = rewards.reduce((sum, value) => sum + value, 0) / rewards.length;
    const spread = Math.sqrt(rewards.reduce((sum, value) => sum + (value - mean) ** 2, 0) / rewards.length);
    Object.assign(group, {
      mean: rewards.length ? mean : null,
      spread: rewards.length ? (spread < 1e-6 ? 0 : spread) : null, // the trainer's tolerance
      num: samples.length,
      failed: samples.filter(({ failure }) => failure).length,
      tokens: samples.reduce((sum, { tokens }) => sum + tokens, 0) / samples.length,
    });
  }
  return [...groups.values()];
}

export async function stepPage({ run, query, head }, main) {
  const steps = head.steps;
  const phase = query.phase ?? (steps.train.length ? "train" : "eval");
  const kept = steps[phase] ?? [];
  if (!kept.length) {
    main.replaceChildren(el("section", {}, el("p", { class: "quiet" }, "This run has kept no trajectories yet (trainer.dump_trajectories).")));
    return (now) => (now.steps.train.length || now.steps.eval.length) && dispatchEvent(new Event("hashchange"));
  }
  const asked = Number(query.step ?? kept.at(-1));
  const step = kept.reduce((best, other) => (Math.abs(other - asked) < Math.abs(best - asked) ? other : best));
  const go = (changes) => (location.hash = `#/run/${encodeURIComponent(run)}/step?${new URLSearchParams({ phase, step, ...(query.uid !== undefined ? { uid: query.uid } : {}), ...changes })}`);
  const at = kept.indexOf(step);
  const newest = el("span", { class: "quiet small" });
  const slider = el("input", { type: "range", min: 0, max: kept.length - 1, value: at, "aria-label": "Step", style: { flex: "1", minWidth: "120px" }, oninput: () => (shown.textContent = `step ${kept[slider.value]}`), onchange: () => go({ step: kept[slider.value] }) });
  const shown = el("b", {}, `step ${step}`);
  const button = (text, title, index) => el("button", { type: "button", title, "aria-label": title, disabled: !kept[index] && kept[index] !== 0, onclick: () => go({ step: kept[index] }) }, text);
  const phases = Object.keys(steps).filter((name) => steps[name].length).map((name) => [name, name === "train" ? "training" : "evaluation"]);
  const bar = el("div", { class: "row" }, choice("Of", phases, phase, (value) => (location.hash = `#/run/${encodeURIComponent(run)}/step?${new URLSearchParams({ phase: value, step })}`)), button("‹", "Step before", at - 1), button("›", "Step after", at + 1), button("»", "Last step", kept.length - 1), shown, slider, newest);

  const { rows: all, num_rows, torn_bytes } = await api("step", { run, phase, step });
  const rows = all.filter((row) => !row.is_broken);
  const notices = [];
  if (torn_bytes) notices.push(`The last line is incomplete (${torn_bytes.toLocaleString()} bytes): it was being written when the run ended, or is now.`);
  if (rows.length < all.length) notices.push(`${all.length - rows.length} lines cannot be read: line ${all.find((row) => row.is_broken).line + 1} is the first.`);
  if (num_rows > all.length) notices.push(`The first ${all.length.toLocaleString()} of ${num_rows.toLocaleString()} rows are shown.`);
  const groups = groupsOf(rows);
  const tiles = el("div", { class: "tiles" },
    histogram("Reward", groups.flatMap(({ samples }) => [...samples.values()].map(({ reward }) => reward))),
    histogram("Response length, tokens", rows.map(({ tokens }) => tokens), (value) => number(Math.round(value))),
    histogram("Mean log-prob of a response", rows.map(({ log_prob }) => log_prob)),
    counts("Stop reasons", rows.filter(({ is_last }) => is_last).map(({ stop }) => stop ?? "none")),
    counts("Failures", rows.filter(({ failure }) => failure).map(({ failure }) => failure.kind)),
  );
  const sampleHref = (row) => `#/run/${encodeURIComponent(run)}/sample?${new URLSearchParams({ phase, step, line: row.line })}`;

  // --- groups

  const equal = groups.filter(({ spread, num }) => spread === 0 && num > 1).length;
  let order = "order";
  const sorts = { order: () => 0, mean: (a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity), worst: (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity), spread: (a, b) => (b.spread ?? -1) - (a.spread ?? -1), tokens: (a, b) => b.tokens - a.tokens, failed: (a, b) => b.failed - a.failed };
  const body = walkable(el("tbody"));
  const search = el("input", { type: "search", placeholder: "Find in prompts and responses", "aria-label": "Find in prompts and responses", oninput: () => drawGroups() });
  function drawGroups() {
    const text = search.value.trim().toLowerCase();
    const hits = groups.filter((group) => !text || `${group.uid} ${group.prompt} ${group.rows.map((row) => row.preview).join(" ")}`.toLowerCase().includes(text)).sort(sorts[order]);
    body.replaceChildren(...hits.slice(0, GROUPS_SHOWN).map((group) => {
      const marks = [group.spread === 0 && group.num > 1 ? badge("all equal", "warn") : null, group.failed ? badge(`${group.failed} failed`, "bad") : null];
      return el("tr", { tabindex: 0, "aria-current": group.uid === query.uid ? "true" : null, onclick: () => go({ uid: group.uid }) },
        el("td", { class: "mono" }, group.uid.slice(0, 40)), el("td", { class: "number" }, String(group.num)), el("td", { class: "number" }, number(group.mean, 3)), el("td", { class: "number" }, number(group.spread, 3)), el("td", { class: "number" }, number(Math.round(group.tokens))), el("td", {}, el("span", { class: "chips" }, marks)), el("td", { class: "quiet small" }, group.prompt.slice(-90)));
    }));
    if (hits.length > GROUPS_SHOWN) body.append(el("tr", {}, el("td", { colspan: 7, class: "quiet" }, `${hits.length - GROUPS_SHOWN} more: search, or sort by something else.`)));
  }
  drawGroups();
  const head_ = el("tr", {}, [["Prompt"], ["Samples", 1], ["Mean reward", 1], ["Spread", 1], ["Tokens", 1], [""], ["End of the prompt"]].map(([title, isNumber]) => el("th", { class: isNumber ? "number" : null }, title)));
  const sorting = choice("Sort by", [["order", "order of the file"], ["mean", "best reward"], ["worst", "worst reward"], ["spread", "spread"], ["tokens", "length"], ["failed", "failures"]], order, (value) => { order = value; drawGroups(); });
  const note = el("span", { class: "quiet small" }, `${groups.length} prompts` + (groups.every(({ mean }) => mean === null) ? "" : `, ${equal} of them with all rewards equal: their samples teach nothing`));
  const table = section("Groups", el("div", { class: "row" }, sorting, search), note, el("div", { class: "card scroll", style: { maxHeight: "420px" } }, el("table", { class: "stack" }, el("thead", {}, head_), body)));

  // --- samples of a group side by side

  const group = groups.find(({ uid }) => uid === query.uid) ?? groups[0];
  const cards = group ? group.rows.slice(0, 64).map((row) => {
    const text = el("div", { class: "text" }, row.preview, row.preview.length >= 160 ? " …" : "");
    const whole = row.bytes < 2e6 ? () => fetch(address("sample", { run, phase, step, line: row.line })).then((answer) => answer.json()).then((found) => text.replaceChildren(...textNodes(String(found.response)))).catch(() => {}) : null;
    whole?.();
    return el("div", { class: "card" }, el("div", { class: "row spread" }, el("a", { href: sampleHref(row) }, `sample ${row.sample ?? "?"}${row.turn === null ? "" : `, row ${row.turn}`}`), row.failure ? badge(`${row.failure.kind} failed`, "bad") : badge(number(row.reward, 3), row.reward > 0 ? "good" : "")), el("div", { class: "quiet small" }, [`${row.tokens} tokens`, row.stop, row.versions && `version ${[...new Set(row.versions)].join(" to ")}`].filter(Boolean).join(" · ")), row.failure ? el("div", { class: "failure small" }, row.failure.message) : null, text);
  }) : [];
  const beside = group ? section(`Samples of ${group.uid.slice(0, 40)}`, el("span", { class: "quiet small" }, `${group.rows.length} rows`), el("div", { class: "beside", tabindex: 0, role: "region", "aria-label": "Samples side by side" }, cards)) : "";
  const failures = rows.filter(({ failure }) => failure).slice(0, 100);
  const failed = failures.length ? section("Failures", null, el("div", { class: "card scroll", style: { maxHeight: "320px" } }, el("table", {}, el("tbody", {}, failures.map((row) => el("tr", {}, el("td", {}, badge(row.failure.kind, "bad")), el("td", {}, el("a", { href: sampleHref(row) }, `${row.uid.slice(0, 30)} · ${row.sample}`)), el("td", {}, row.failure.message)))))) ) : "";
  main.replaceChildren(el("section", {}, bar, notices.map((text) => el("p", { class: "notice small" }, text))), tiles, table, beside, failed);
  return (now) => {
    const last = now.steps[phase].at(-1);
    newest.textContent = last > step ? `step ${last} is there` : "";
  };
}

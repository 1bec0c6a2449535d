// Resolved settings, and those that are not at their defaults.
import { api, el, section } from "./dom.js";

export async function settingsPage({ run }, main) {
  const { text, values, changes } = await api("settings", { run });
  if (!text) return void main.replaceChildren(el("section", {}, el("p", { class: "quiet" }, "This run has recorded no settings (config.yaml).")));
  const show = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const body = el("tbody");
  const changed = new Map(changes.map(([name, , usual]) => [name, usual]));
  const search = el("input", { type: "search", placeholder: "Find a setting or value", "aria-label": "Find a setting or value", oninput: draw });
  const all = el("input", { type: "checkbox", onchange: draw });
  all.checked = !changes.length;
  const count = el("span", { class: "quiet small" });
  function draw() {
    const query = search.value.trim().toLowerCase();
    const hits = Object.entries(values).filter(([name, value]) => (all.checked || changed.has(name)) && (!query || `${name}=${show(value)}`.toLowerCase().includes(query)));
    body.replaceChildren(...hits.map(([name, value]) => el("tr", {}, el("td", { class: "mono" }, name), el("td", { class: "mono" }, show(value)), el("td", { class: "mono quiet" }, changed.has(name) ? show(changed.get(name) ?? null) : ""))));
    count.textContent = `${hits.length} of ${Object.keys(values).length} settings`;
  }
  draw();
  const head = el("tr", {}, ["Setting", "Value", "Default, where it differs"].map((title) => el("th", {}, title)));
  main.replaceChildren(section("Settings", el("div", { class: "row" }, count, el("label", {}, all, "All settings"), search), el("div", { class: "card scroll" }, el("table", { class: "stack" }, el("thead", {}, head), body))),
    el("section", {}, el("details", {}, el("summary", {}, "config.yaml"), el("pre", { class: "card" }, text))));
  return null;
}

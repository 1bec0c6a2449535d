// Elements, numbers and requests. Text of a run enters the page as text nodes only, never as HTML.

/** An element. Functions become listeners (`onclick`), `style` is an object, strings among the children become text. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.flat());
  return node;
}

export const number = (value, digits = 4) =>
  typeof value !== "number" || !Number.isFinite(value) ? "–" : Number.isInteger(value) ? value.toLocaleString() : String(Number(value.toPrecision(digits)));

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const [days, hours, minutes] = [Math.floor(seconds / 86400), Math.floor((seconds % 86400) / 3600), Math.floor((seconds % 3600) / 60)];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${Math.round(seconds % 60)} s` : `${number(seconds, 2)} s`;
}
export const moment = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : "–");

/** Characters that would not be seen, or would turn the text around, by signs and codes. */
export const visible = (text) =>
  text
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, (sign) => `⟨U+${sign.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

const SHOWN_AT_ONCE = 20_000;

/** Text as nodes; of a very long one the beginning, and a button for more. */
export function textNodes(text) {
  if (text.length <= SHOWN_AT_ONCE) return [visible(text)];
  let shown = SHOWN_AT_ONCE;
  const node = document.createTextNode(visible(text.slice(0, shown)));
  const more = el("button", { type: "button", class: "small", onclick: () => {
    node.appendData(visible(text.slice(shown, shown + 10 * SHOWN_AT_ONCE)));
    shown += 10 * SHOWN_AT_ONCE;
    label();
  } });
  const label = () => {
    more.hidden = shown >= text.length;
    more.textContent = `… ${(text.length - shown).toLocaleString()} more characters`;
  };
  label();
  return [node, more];
}

/** The answer of the server to a query. */
export async function api(name, query = {}) {
  const answer = await fetch(address(name, query));
  if (answer.ok) return answer.json();
  let said = `status ${answer.status}`;
  try { said = (await answer.json()).error ?? said; } catch { /* no JSON: the status says it */ }
  throw new Error(said);
}
export function address(name, query) {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) for (const item of [value].flat()) if (item !== undefined && item !== null) search.append(key, item);
  return `/api/${name}?${search}`;
}

export function section(title, aside, ...children) {
  return el("section", {}, el("div", { class: "row spread", style: { marginBottom: "10px" } }, el("h2", {}, title), aside), ...children);
}
export const badge = (text, kind = "") => el("span", { class: `badge ${kind}` }, text);
export const facts = (pairs) => el("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined).map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value))));
export const choice = (label, options, value, onchange) =>
  el("label", {}, label, el("select", { "aria-label": label, onchange: (event) => onchange(event.target.value) }, options.map(([key, text]) => el("option", { value: key, selected: String(key) === String(value) }, text))));

/** Let a table's rows be walked through with the arrow keys and opened with Enter. */
export function walkable(body) {
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr[tabindex]");
    if (!row || event.target !== row) return;
    const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
    if (next) { event.preventDefault(); next.focus(); }
    if (event.key === "Enter") row.click();
  });
  return body;
}

export const root = document.documentElement;
export const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
export const isDark = () => root.dataset.theme === "dark";
export const palette = () =>
  isDark()
    ? ["#7aa5ff", "#f0b357", "#6fcf97", "#c59bf0", "#f2867c", "#6cc7d8", "#b8c0cc", "#d9c36a"]
    : ["#2f62d9", "#d98a1f", "#2f9e6a", "#8a57cf", "#d4574b", "#2a94ab", "#7a8595", "#a08a23"];

/** A note that follows the pointer. `find(event)` returns its nodes, or null. */
export function hoverTip(node, find) {
  const tip = document.getElementById("tip");
  node.addEventListener("pointermove", (event) => {
    const content = find(event);
    tip.hidden = !content;
    if (!content) return;
    tip.replaceChildren(...[content].flat());
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18}px`;
  });
  node.addEventListener("pointerleave", () => (tip.hidden = true));
}
export const tipTable = (pairs) => el("table", {}, el("tbody", {}, pairs.map(([label, value]) => el("tr", {}, el("td", {}, label), el("td", { class: "number" }, value)))));

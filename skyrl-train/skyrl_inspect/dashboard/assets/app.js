// Routes and the frame around the pages. A page is a function of (place, main, signal): it fills `main`, and returns a
// function that shows what has changed since, if it can. `signal` ends with the page.
import { address, api, badge, el, moment, root } from "./dom.js";
import { curvesPage } from "./curves.js";
import { logsPage } from "./logs.js";
import { runsPage } from "./runs.js";
import { samplePage } from "./sample.js";
import { settingsPage } from "./settings.js";
import { stepPage } from "./step.js";
import { timePage } from "./time.js";

const TABS = [["curves", "Curves", curvesPage], ["step", "Steps", stepPage], ["time", "Time", timePage], ["settings", "Settings", settingsPage], ["logs", "Logs", logsPage]];
const PAGES = { ...Object.fromEntries(TABS.map(([name, , page]) => [name, page])), sample: samplePage };
const main = document.getElementById("main");
const header = document.getElementById("header");
let leave = null; // ends the page that is shown

// --- the look: light or dark, as the system has it until the button is used

const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = (name) => {
  root.dataset.theme = name;
  dispatchEvent(new Event("theme"));
};
root.dataset.theme = localStorage.getItem("theme") || (dark.matches ? "dark" : "light");
dark.addEventListener("change", () => localStorage.getItem("theme") || theme(dark.matches ? "dark" : "light"));
const themeButton = () =>
  el("button", { type: "button", title: "Key: t", onclick: () => {
    const name = root.dataset.theme === "dark" ? "light" : "dark";
    localStorage.setItem("theme", name);
    theme(name);
  } }, "Light / dark");

// --- places: #/ and #/run/NAME/PAGE?key=value

export function placeOf(hash) {
  const [path, search] = hash.replace(/^#\/?/, "").split("?");
  const [kind, run, page] = path.split("/");
  const query = Object.fromEntries(new URLSearchParams(search || ""));
  return kind === "run" && run ? { run: decodeURIComponent(run), page: PAGES[page] ? page : "curves", query } : { run: null, page: "runs", query };
}

async function show() {
  leave?.();
  const place = placeOf(location.hash);
  const ending = new AbortController();
  let events = null;
  leave = () => {
    ending.abort();
    events?.close();
    document.getElementById("tip").hidden = true;
  };
  // Each page has an element of its own: one that was left while it read cannot draw over the next.
  const own = el("div", { class: "page" }, el("p", { class: "quiet" }, "Reading …"));
  main.replaceChildren(own);
  try {
    const head = place.run === null ? null : await api("run", { run: place.run });
    if (ending.signal.aborted) return;
    drawHeader(place, head);
    const update = await (place.run === null ? runsPage : PAGES[place.page])({ ...place, head }, own, ending.signal);
    if (ending.signal.aborted) return;
    events = new EventSource(address("live", place.run === null ? {} : { run: place.run }));
    // The first event tells of what the page was just made from; the list may have been made before the defaults were known.
    let isFirst = place.run !== null;
    events.addEventListener("change", async () => {
      if (isFirst) return void (isFirst = false);
      try {
        const now = place.run === null ? null : await api("run", { run: place.run });
        if (ending.signal.aborted) return;
        drawHeader(place, now);
        await update?.(now);
      } catch (error) {
        console.warn(error.message);
      }
    });
  } catch (error) {
    if (!ending.signal.aborted) {
      drawHeader(place, null);
      own.replaceChildren(el("section", {}, el("p", { class: "failure" }, `This cannot be shown: ${error.message}`), el("a", { href: "#/" }, "All runs")));
    }
  }
}

function drawHeader(place, head) {
  const name = head?.name ?? place.run;
  document.title = name ? `${name} · ${place.page}` : "Runs";
  if (place.run === null) {
    header.replaceChildren(el("div", { class: "row spread" }, el("h1", {}, "Runs"), themeButton()));
    return;
  }
  const title = el("div", {}, el("div", { class: "small" }, el("a", { href: "#/" }, "Runs"), el("span", { class: "quiet" }, " / ")), el("h1", {}, name));
  const progress = head && el("div", { class: "row small quiet" }, badge(head.state === "silent" ? `silent since ${moment(head.since)}` : head.state, head.state), el("span", {}, head.step !== null ? `step ${head.step}${head.total ? ` of ${head.total}` : ""}` : "no step yet"), el("span", {}, `changed ${moment(head.updated)}`));
  const current = place.page === "sample" ? "step" : place.page;
  const tabs = TABS.map(([key, label]) => el("a", { href: `#/run/${encodeURIComponent(place.run)}/${key}`, "aria-current": key === current ? "page" : null }, label));
  header.replaceChildren(el("div", { class: "row spread" }, title, el("div", { class: "row" }, progress, themeButton())), head?.message ? el("p", { class: "failure small" }, head.message) : "", resuming(head), el("nav", { class: "tabs", "aria-label": "Pages of the run" }, tabs));
}

/** The command that resumes a run which has ended before its last step. */
function resuming(head) {
  if (!head?.command || !["failed", "stopped", "silent"].includes(head.state)) return "";
  return el("p", { class: "small" }, "Resume: ", el("code", { class: "mono" }, head.command));
}

addEventListener("hashchange", show);
addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const place = placeOf(location.hash);
  const tab = TABS[Number(event.key) - 1];
  if (event.key === "t") header.querySelector("button")?.click();
  else if (event.key === "/") { event.preventDefault(); document.querySelector("input[type=search]")?.focus(); }
  else if (event.key === "u" || event.key === "Escape") location.hash = place.page === "sample" ? `#/run/${encodeURIComponent(place.run)}/step?phase=${place.query.phase}&step=${place.query.step}` : "#/";
  else if (tab && place.run) location.hash = `#/run/${encodeURIComponent(place.run)}/${tab[0]}`;
});
show();

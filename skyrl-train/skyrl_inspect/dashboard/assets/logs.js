// Log files of a run: the end of one, and search in it.
import { api, choice, el, section, visible } from "./dom.js";

/** Text without the escape sequences by which programs colour a terminal. */
const plain = (text) => visible(text.replace(/\u001b\[[0-9;?]*[A-Za-z]/g, "").replace(/\r\n/g, "\n"));

export async function logsPage({ run, query }, main, signal) {
  const { logs } = await api("logs", { run });
  if (!logs.length) return void main.replaceChildren(el("section", {}, el("p", { class: "quiet" }, "This run has no log files.")));
  const name = query.name ?? (logs.find(([file]) => file === "trainer.log") ?? logs[0])[0];
  const go = (changes) => (location.hash = `#/run/${encodeURIComponent(run)}/logs?${new URLSearchParams({ name, ...changes })}`);
  const search = el("input", { type: "search", placeholder: "Find in the whole file, Enter", "aria-label": "Find in the log", value: query.find ?? "", onkeydown: (event) => event.key === "Enter" && go(search.value ? { find: search.value } : {}) });
  const files = choice("File", logs.map(([file, size]) => [file, `${file} (${(size / 1024).toFixed(0)} KiB)`]), name, (file) => go({ name: file }));
  const box = el("div", { class: "card log", tabindex: 0, role: "region", "aria-label": "Log" });
  const note = el("p", { class: "quiet small" });
  async function draw() {
    if (query.find) {
      const { hits } = await api("log", { run, name, query: query.find });
      if (signal.aborted) return;
      note.textContent = hits.length ? `${hits.length} lines hold it (the last 200 are shown); click one for its surroundings` : "No line holds it.";
      box.replaceChildren(el("table", {}, el("tbody", {}, hits.map(([offset, line]) => el("tr", { tabindex: 0, onclick: () => go({ offset }), onkeydown: (event) => event.key === "Enter" && go({ offset }) }, el("td", { class: "mono" }, plain(line)))))));
      return;
    }
    const { start, size, text } = await api("log", { run, name, offset: query.offset });
    if (signal.aborted) return;
    const isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 30;
    note.textContent = start ? `from byte ${start.toLocaleString()} of ${size.toLocaleString()}` : "";
    const [before, after] = query.offset === undefined ? [text, null] : splitAt(text, Number(query.offset) - start);
    box.replaceChildren(el("pre", {}, plain(before), after === null ? "" : el("mark", {}, plain(after.split("\n")[0])), after === null ? "" : plain(after.slice(after.indexOf("\n")))));
    if (query.offset !== undefined) box.querySelector("mark").scrollIntoView({ block: "center" });
    else if (isAtEnd) box.scrollTop = box.scrollHeight;
  }
  /** Text before and after an offset in bytes. */
  function splitAt(text, bytes) {
    const encoded = new TextEncoder().encode(text);
    return [new TextDecoder().decode(encoded.slice(0, bytes)), new TextDecoder().decode(encoded.slice(bytes))];
  }
  main.replaceChildren(section("Logs", el("div", { class: "row" }, files, search, query.find || query.offset !== undefined ? el("button", { type: "button", onclick: () => go({}) }, "End of the file") : ""), note, box));
  await draw();
  box.scrollTop = query.find || query.offset !== undefined ? box.scrollTop : box.scrollHeight;
  return () => (query.find || query.offset !== undefined ? null : draw());
}

// What an agent did: its turns as messages, tools, sandbox, stages of the dispatcher, and the account of its tokens.
import { badge, duration, el, facts, hoverTip, number, palette, section, svg, textNodes, visible } from "./dom.js";

const MESSAGES = 400;
const ROWS = 200; // of the tree, and of trajectories in the time line
const STAGES = ["initialize", "generate", "evaluate"];
const list = (value) => (Array.isArray(value) ? value : []);

/** A line that unfolds to an output, if there is one. */
export function unfolded(line, output) {
  const text = String(output ?? "");
  return text ? el("details", {}, el("summary", {}, line), el("div", { class: "text long" }, textNodes(text))) : line;
}

/** Text of the model with its thoughts folded: what stands before `</think>`. */
export function withThoughts(text) {
  const end = text.indexOf("</think>");
  if (end < 0) return textNodes(text);
  const begin = text.indexOf("<think>");
  const thoughts = text.slice(begin >= 0 && begin < end ? begin + 7 : 0, end);
  const before = begin > 0 && begin < end ? textNodes(text.slice(0, begin)) : [];
  return [...before, unfolded(`thinking · ${thoughts.trim().length.toLocaleString()} characters`, thoughts.trim()), ...textNodes(text.slice(end + 8).trimStart())];
}

/** Text of a message's content: a text, or parts of which some have one. */
function contentText(content) {
  if (typeof content === "string") return content;
  return list(content).map((part) => (typeof part === "string" ? part : String(part?.text ?? `[${part?.type ?? "part"}]`))).join("\n");
}

function messageNode(message) {
  const role = String(message?.role ?? "message");
  const thoughts = message?.reasoning_content ?? message?.reasoning ?? message?.thinking;
  const calls = list(message?.tool_calls).map((call) => {
    const { name, arguments: given } = call?.function ?? call ?? {};
    return el("div", { class: "mono" }, badge(`calls ${String(name).slice(0, 80)}`), " ", visible((typeof given === "string" ? given : JSON.stringify(given ?? null)).slice(0, 4000)));
  });
  const name = role === "tool" && message?.name ? ` ${String(message.name).slice(0, 80)}` : "";
  return el("div", { class: `segment ${role === "assistant" ? "policy" : "context"}` }, el("h3", {}, visible(role + name)),
    typeof thoughts === "string" && thoughts ? unfolded(`thinking · ${thoughts.length.toLocaleString()} characters`, thoughts) : null,
    el("div", { class: role === "assistant" ? "text" : "text long" }, withThoughts(contentText(message?.content))), calls);
}

/** A command in the sandbox of an agent. */
function sandboxRow(entry) {
  const isBad = entry?.outcome !== "exited" || entry?.returncode !== 0;
  const end = entry?.outcome === "exited" ? `exit ${entry.returncode}` : String(entry?.outcome);
  const output = [entry?.stdout, entry?.stderr].filter(Boolean).join("\n");
  return el("tr", {}, el("td", { class: "quiet" }, String(entry?.stage)), el("td", {}, badge(end, isBad ? "bad" : "")), el("td", { class: "number" }, duration(entry?.seconds)), el("td", { class: "mono" }, unfolded(visible(String(entry?.command).slice(0, 2000)), output)));
}

/** A tool call with its output. */
function callRow(call) {
  return el("tr", {}, el("td", { class: "number" }, String(call?.step ?? "")), el("td", {}, badge(String(call?.name), call?.ok === false ? "bad" : "")), el("td", { class: "number" }, duration(call?.seconds)), el("td", { class: "mono" }, unfolded(visible(JSON.stringify(call?.arguments ?? null).slice(0, 2000)), call?.output)));
}

const scrolled = (rows) => el("div", { class: "card scroll", style: { maxHeight: "360px" } }, el("table", {}, el("tbody", {}, rows)));

/** The token certificate, and the tree of the trajectory's rows. `href(number)` leads to a row; null where there is no page. */
function certificateParts(row, href) {
  const certificate = row.certificate ?? {};
  const counts = (name) => Object.entries(certificate[name] ?? {}).map(([reason, count]) => `${number(count)} ${reason.replaceAll("_", " ")}`).join(", ") || null;
  const share = certificate.trained ? `${number(certificate.exact)} of ${number(certificate.trained)} (${((100 * certificate.exact) / certificate.trained).toFixed(1)} %)` : null;
  const said = row.certificate ? facts([["Trained tokens that are exactly those drawn", share], ["Tokens drawn", number(certificate.drawn)], ["Not trained", counts("not_trained")], ["New rows because", counts("new_rows")]]) : null;
  const branches = list(certificate.branches ?? row.branches).slice(0, ROWS);
  const depths = [];
  const tree = branches.length < 2 ? null : el("ul", { class: "tree", "aria-label": "Branches" }, branches.map((branch, index) => {
    const [parent, start] = list(branch);
    depths.push(parent !== null && parent < index ? depths[parent] + 1 : 0);
    const name = `row ${index}`;
    const place = href(index);
    const label = index === row.step ? el("b", {}, name) : place ? el("a", { href: place }, name) : name;
    return el("li", { style: { marginLeft: `${18 * Math.min(depths[index], 20)}px` } }, label, el("span", { class: "quiet" }, parent === null || parent === undefined ? " begins on its own" : ` branches off row ${parent} after ${number(start)} tokens`));
  }));
  return said || tree ? [said, tree] : null;
}

/** Spans of a trajectory's stages as bars. rows: {label, spans: [[name, begin, end], ...]}, Unix seconds. */
export function stageLanes(rows) {
  const spans = rows.flatMap((row) => row.spans);
  const [first, last] = [Math.min(...spans.map(([, begin]) => begin)), Math.max(...spans.map(([, , end]) => end))];
  const [left, height, width] = [150, 16, 1000];
  const x = (at) => left + ((width - left - 10) * (at - first)) / (last - first || 1);
  const shades = new Map(STAGES.map((stage, index) => [stage, palette()[index]]));
  const picture = svg("svg", { class: "lanes", viewBox: `0 0 ${width} ${rows.length * height + 24}`, role: "img", "aria-label": "Stages of the trajectories" });
  const text = (where, said) => svg("text", { ...where, fill: "currentColor", "font-size": 11 }, document.createTextNode(said));
  rows.forEach(({ label, spans }, row) => {
    picture.append(text({ x: 0, y: row * height + 12 }, visible(String(label)).slice(0, 22)));
    for (const [name, begin, end] of spans) picture.append(svg("rect", { x: x(begin), y: row * height + 2, width: Math.max(0.5, x(end) - x(begin)), height: height - 4, fill: shades.get(name) ?? "#8888", opacity: shades.has(name) ? 1 : 0.45, "data-text": `${label}: ${shades.has(name) ? name : `waits for ${name.replace("queue_", "")}`}, ${duration(end - begin)}` }));
  });
  picture.append(text({ x: left, y: rows.length * height + 18 }, "0 s"), svg("text", { x: width - 10, y: rows.length * height + 18, fill: "currentColor", "font-size": 11, "text-anchor": "end" }, document.createTextNode(duration(last - first))));
  const legend = el("div", { class: "legend" }, [...shades, ["waits", "#8888"]].map(([name, shade]) => el("span", {}, el("span", { class: "dot", style: { background: shade } }), name)));
  const node = el("div", { class: "card" }, legend, el("div", { class: "scroll" }, picture));
  hoverTip(picture, (event) => event.target.dataset?.text ?? null);
  return node;
}

/** Stages of all trajectories of a file of skyrl-agent, with a table of what each stage took. */
export function stagesSection(rows) {
  const known = rows.filter(({ stages }) => stages?.length).sort((a, b) => a.stages[0][1] - b.stages[0][1]);
  if (!known.length) return null;
  const names = STAGES.flatMap((stage) => [`queue_${stage}`, stage]);
  const all = known.flatMap(({ stages }) => stages);
  const table = names.map((name) => {
    const seconds = all.filter(([each]) => each === name).map(([, begin, end]) => end - begin).sort((a, b) => a - b);
    return seconds.length ? el("tr", {}, el("td", {}, name.replace("queue_", "waits for ")), el("td", { class: "number" }, duration(seconds[Math.floor(seconds.length / 2)])), el("td", { class: "number" }, duration(seconds.at(-1))), el("td", { class: "number" }, duration(seconds.reduce((sum, each) => sum + each, 0)))) : null;
  });
  const head = el("tr", {}, ["Stage of the dispatcher", "median", "longest", "sum"].map((title, index) => el("th", { class: index ? "number" : null }, title)));
  const note = known.length > ROWS ? el("p", { class: "quiet small" }, `The first ${ROWS} of ${known.length} trajectories are drawn.`) : null;
  const lanes = stageLanes(known.slice(0, ROWS).map(({ uid, sample, stages }) => ({ label: `${uid.slice(0, 16)} · ${sample ?? "?"}`, spans: stages })));
  return section("Stages of the dispatcher", null, note, lanes, el("div", { class: "card", style: { marginTop: "14px" } }, el("table", {}, el("thead", {}, head), el("tbody", {}, table))));
}

/** Sections of a sample's page that only agents have. */
export function agentSections(row, href) {
  const parts = [];
  const account = certificateParts(row, href);
  if (account) parts.push(section("Token certificate and branches", null, el("div", { class: "card" }, account)));
  if (typeof row.program_output === "string") parts.push(section("Output of the program", null, el("pre", { class: "card" }, visible(row.program_output) || "(nothing)")));
  const rewards = Object.entries(row.reward_parts ?? {});
  if (rewards.length) parts.push(section("Parts of the reward", null, el("div", { class: "card" }, facts(rewards.map(([name, value]) => [visible(name), number(value)])))));
  const stages = list(row.stages).filter((span) => Array.isArray(span) && typeof span[0] === "string" && Number.isFinite(span[1]) && Number.isFinite(span[2]));
  if (stages.length) parts.push(section("Stages of the dispatcher", null, stageLanes([{ label: `sample ${row.sample}`, spans: stages }])));
  const messages = list(row.messages);
  if (messages.length) parts.push(section("Turns", messages.length > MESSAGES ? `the first ${MESSAGES} of ${messages.length}` : null, el("div", { class: "card" }, messages.slice(0, MESSAGES).map(messageNode))));
  if (list(row.tool_calls).length) parts.push(section("Tool calls", null, scrolled(row.tool_calls.slice(0, 500).map(callRow))));
  if (list(row.sandbox).length) parts.push(section("Sandbox log", null, scrolled(row.sandbox.slice(0, 1000).map(sandboxRow))));
  return parts;
}

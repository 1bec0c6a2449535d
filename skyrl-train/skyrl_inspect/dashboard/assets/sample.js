// A trajectory: the conversation, and its tokens coloured by any quantity that the run records of each.
import { agentSections, withThoughts } from "./agent.js";
import { address, api, badge, choice, colour, duration, el, facts, hoverTip, isDark, number, palette, section, textNodes, tipTable, visible } from "./dom.js";

const NAMES = { log_probs: "engine log-prob", trainer_log_probs: "trainer log-prob", entropies: "entropy", advantages: "advantage", difference: "difference (trainer - engine)", rewards: "reward", loss_mask: "loss mask", trained: "trained on (after filters)", weight_versions: "weight version" };
const BLOCK = 400; // tokens that are drawn together
const TOKEN_TEXT = 4000; // characters of one token that are shown

/** Split text at the marks of chat templates: [role or null, text]. */
function messages(text) {
  const marks = /<\|im_start\|>(\w+)\n|<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*/g;
  const found = [...text.matchAll(marks)];
  if (!found.length) return [[null, text]];
  const parts = found.map((mark, index) => [mark[1] ?? mark[2], text.slice(mark.index + mark[0].length, found[index + 1]?.index).replace(/(<\|im_end\|>|<\|eot_id\|>)\s*$/, "")]);
  return found[0].index ? [[null, text.slice(0, found[0].index)], ...parts] : parts;
}

/** Names of the tools that a text calls, in the usual notations. */
function toolCalls(text) {
  const found = [...text.matchAll(/<tool_call>\s*(\{[\s\S]{0,20000}?\})\s*<\/tool_call>|<function=([\w.-]{1,80})>|<(search|sql|python|code|bash)>/g)];
  return found.slice(0, 20).map((match) => match[2] ?? match[3] ?? (/"name"\s*:\s*"([^"]{1,80})"/.exec(match[1])?.[1] || "tool call"));
}

/** A function that says of a token whether the engine generated it: a weight version, or else the loss mask, tells. */
const generatedBy = (tokens) => (index) => (tokens.weight_versions ? tokens.weight_versions[index] >= 0 : tokens.loss_mask?.[index] !== 0);

/** Turns of a response: tokens that the engine generated, or others. */
function turns(tokens) {
  const isGenerated = generatedBy(tokens);
  const found = [];
  tokens.text.forEach((_, index) => {
    if (!found.length || isGenerated(index) !== isGenerated(index - 1)) found.push({ start: index, end: index, isPolicy: isGenerated(index) });
    found.at(-1).end = index + 1;
  });
  return found;
}

function conversation(row, tokens) {
  const parts = messages(row.prompt).map(([role, text]) => el("div", { class: "segment context" }, el("h3", {}, role ?? "prompt"), el("div", { class: "text long" }, textNodes(text))));
  const found = turns(tokens);
  for (const { start, end, isPolicy } of found.slice(0, 200)) {
    const text = tokens.text.slice(start, end).join("");
    const calls = isPolicy ? toolCalls(text) : [];
    const title = isPolicy ? "policy" : "observation";
    parts.push(el("div", { class: `segment ${isPolicy ? "policy" : "context"}` }, el("h3", {}, `${title} · ${end - start} tokens`, calls.map((name) => [" ", badge(`calls ${name}`)])), el("div", { class: isPolicy ? "text" : "text long" }, isPolicy ? withThoughts(text) : textNodes(text))));
  }
  if (found.length > 200) parts.push(el("p", { class: "quiet" }, `${found.length - 200} further turns: see the tokens.`));
  return parts;
}

/** The quantities of a token that the row has: columns of numbers, as long as the response. */
function columnsOf(tokens) {
  const columns = {};
  for (const [name, values] of Object.entries(tokens)) if (!["text", "ids"].includes(name) && Array.isArray(values) && values.length === tokens.text.length) columns[name] = values;
  if (columns.log_probs && columns.trainer_log_probs) {
    const isGenerated = generatedBy(tokens);
    columns.difference = columns.trainer_log_probs.map((value, index) => (value === null || columns.log_probs[index] === null || !isGenerated(index) ? null : value - columns.log_probs[index]));
  }
  return columns;
}

/** Colour of a value, and the ends of its scale. */
function scaleOf(name, values) {
  if (!values) return { of: () => null, ends: null };
  if (name === "weight_versions") {
    const known = [...new Set(values.filter((value) => value >= 0))].sort((a, b) => a - b);
    return { of: (value) => (value >= 0 ? `${palette()[known.indexOf(value) % 8]}55` : null), classes: known.slice(0, 12).map((value) => [`version ${value}`, `${palette()[known.indexOf(value) % 8]}55`]) };
  }
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) if (typeof value === "number") [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (low > high) return { of: () => null, ends: null };
  const [warm, cool, bad] = isDark() ? ["245,158,11", "92,201,143", "240,133,122"] : ["217,119,6", "26,127,78", "192,57,43"];
  if (name.endsWith("log_probs")) { // unlikely tokens stand out; below -5 all look alike
    low = Math.max(-5, low);
    return { of: (value) => (value === null ? null : `rgba(${warm},${(0.75 * Math.min(1, Math.max(0, value / Math.min(low, -1e-9)))).toFixed(3)})`), ends: [number(low, 3), "0"], gradient: [`rgba(${warm},0.75)`, `rgba(${warm},0)`] };
  }
  if (low < 0 || ["rewards", "advantages", "difference"].includes(name)) {
    const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
    return { of: (value) => (value ? `rgba(${value > 0 ? cool : bad},${((0.65 * Math.abs(value)) / most).toFixed(3)})` : null), ends: [number(-most, 3), number(most, 3)], gradient: [`rgba(${bad},0.65)`, "transparent", `rgba(${cool},0.65)`] };
  }
  return { of: (value) => (value === null ? null : `rgba(${warm},${((0.7 * (value - low)) / (high - low || 1)).toFixed(3)})`), ends: [number(low, 3), number(high, 3)], gradient: ["transparent", `rgba(${warm},0.7)`] };
}

/** Tokens in blocks; only those near the window have nodes, the others are empty boxes as high as they were or will be. */
function viewer(tokens, columns, signal) {
  const node = el("div", { class: "card viewer text", tabindex: 0, role: "region", "aria-label": "Tokens" });
  const starts = new Map(turns(tokens).map((turn, index) => [turn.start, `${index + 1} · ${turn.isPolicy ? "policy" : "observation"}`]));
  const hasTurns = starts.size > 1;
  let scale = { of: () => null };
  let values = null;
  const masked = tokens.loss_mask;
  function token(index) {
    const text = String(tokens.text[index] ?? "");
    const background = values && scale.of(values[index]);
    const made = el("span", { class: masked && !masked[index] ? "token masked" : "token", "data-index": index });
    if (background) made.style.background = background;
    const shown = visible(text.slice(0, TOKEN_TEXT));
    for (const part of shown.split(/(\n)/)) if (part) made.append(part === "\n" ? el("span", { class: "invisible" }, "↵") : "", part);
    if (text.length > TOKEN_TEXT) made.append(el("span", { class: "quiet" }, ` … ${(text.length - TOKEN_TEXT).toLocaleString()} more characters in this token`));
    return hasTurns && starts.has(index) ? [el("span", { class: "turn" }, starts.get(index)), made] : [made];
  }
  const blocks = [];
  for (let start = 0; start < tokens.text.length; start += BLOCK) blocks.push({ start, end: Math.min(tokens.text.length, start + BLOCK), node: el("div"), isDrawn: false });
  const estimate = ({ start, end }) => {
    let [characters, lines] = [0, 1];
    for (let index = start; index < end; index++) {
      const text = String(tokens.text[index] ?? "");
      characters += Math.min(TOKEN_TEXT, text.length);
      for (let at = text.indexOf("\n"); at >= 0 && at < TOKEN_TEXT; at = text.indexOf("\n", at + 1)) lines++;
    }
    return Math.max(24, 23.6 * (lines * 0.6 + characters / Math.max(20, node.clientWidth / 8.2)));
  };
  const fill = (block) => {
    const parts = [];
    for (let index = block.start; index < block.end; index++) parts.push(...token(index));
    block.node.replaceChildren(...parts);
    block.node.style.height = "";
    block.isDrawn = true;
  };
  const clear = (block) => {
    block.node.style.height = `${block.node.offsetHeight}px`;
    block.node.replaceChildren();
    block.isDrawn = false;
  };
  const byNode = new Map(blocks.map((block) => [block.node, block]));
  const seen = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const block = byNode.get(target);
      if (isIntersecting && !block.isDrawn) fill(block);
      else if (!isIntersecting && block.isDrawn) clear(block);
    }
  }, { root: node, rootMargin: "1200px" });
  signal.addEventListener("abort", () => seen.disconnect());
  node.append(...blocks.map((block) => block.node));
  hoverTip(node, (event) => {
    const at = event.target.closest("[data-index]")?.dataset.index;
    if (at === undefined) return null;
    const index = Number(at);
    const pairs = [["token", `${index} (id ${tokens.ids?.[index] ?? "–"})`], ...Object.entries(columns).map(([name, list]) => [NAMES[name] ?? name, number(list[index])])];
    if (typeof columns.log_probs?.[index] === "number") pairs.push(["probability", number(Math.exp(columns.log_probs[index]), 3)]);
    return [el("div", { class: "mono" }, visible(JSON.stringify(String(tokens.text[index]).slice(0, 200)))), tipTable(pairs)];
  });
  return {
    node,
    start() { // when the node has its width
      for (const block of blocks) block.node.style.height = `${estimate(block)}px`;
      blocks.forEach((block) => seen.observe(block.node));
    },
    colourBy(name) {
      values = columns[name] ?? null;
      scale = scaleOf(name, values);
      blocks.filter(({ isDrawn }) => isDrawn).forEach(fill);
      return scale;
    },
    goTo(index) {
      const block = blocks[Math.floor(index / BLOCK)];
      fill(block);
      const found = block.node.querySelector(`[data-index="${index}"]`);
      found.scrollIntoView({ block: "center" });
      node.querySelector(".picked")?.classList.remove("picked");
      found.classList.add("picked");
    },
  };
}

export async function samplePage({ run, query, head }, main, signal) {
  const { phase = "train", step, line } = query;
  const [answer, training] = await Promise.all([fetch(address("sample", { run, phase, step, line })), api("columns", { run, phase, step, line }).catch(() => ({}))]);
  const text = await answer.text();
  const back = el("a", { href: `#/run/${encodeURIComponent(run)}/step?${new URLSearchParams({ phase, step })}` }, `‹ step ${step}`);
  const neighbour = (distance, sign, title) => (Number(line) + distance < 0 ? null : el("a", { title, "aria-label": title, href: `#/run/${encodeURIComponent(run)}/sample?${new URLSearchParams({ phase, step, line: Number(line) + distance })}` }, sign));
  const bar = el("div", { class: "row" }, back, neighbour(-1, "‹ row before", "Row before"), neighbour(1, "row after ›", "Row after"));
  let row = null;
  try { row = JSON.parse(text); } catch { /* shown as it is */ }
  if (!answer.ok || !row || typeof row !== "object") {
    main.replaceChildren(el("section", {}, bar, el("p", { class: "notice" }, answer.ok ? "This line is not JSON. It is shown as it is." : (row?.error ?? "not readable")), answer.ok ? el("div", { class: "card text long" }, textNodes(text)) : ""));
    return null;
  }
  const tokens = row.tokens && Array.isArray(row.tokens.text) ? row.tokens : { text: [String(row.response ?? "")] };
  if (training.columns && training.uid === String(row.uid)) Object.assign(tokens, training.columns);
  row.prompt = String(row.prompt ?? "");
  const columns = columnsOf(tokens);
  const summary = facts([["Prompt", String(row.uid)], ["Sample", row.sample], ["Row", row.step], ["Reward", number(row.reward)], ["Tokens", number(tokens.text.length)], ["Prompt tokens", row.prompt_ids && number(row.prompt_ids.length)], ["Stop reason", row.stop_reason]]);
  const failure = row.failure ? el("p", { class: "failure" }, el("b", {}, `${row.failure.kind}: `), String(row.failure.message)) : null;

  const view = viewer(tokens, columns, signal);
  const legend = el("span", { class: "row small quiet" });
  const side = el("div", { class: "card" });
  const colours = Object.keys(columns).map((name) => [name, NAMES[name] ?? name]);
  let current = columns.log_probs ? "log_probs" : (colours[0]?.[0] ?? "");
  function recolour(name) {
    current = name;
    const scale = view.colourBy(name);
    const strip = el("span", { class: "scale" });
    if (scale.gradient) strip.style.background = `linear-gradient(90deg, ${scale.gradient.join(",")})`;
    legend.replaceChildren(...(scale.classes ? scale.classes.map(([label, shade]) => el("span", {}, el("span", { class: "dot", style: { background: shade } }), label)) : scale.ends ? [scale.ends[0], strip, scale.ends[1]] : name ? ["nothing recorded"] : []));
  }
  const gaps = (columns.difference ?? []).map((value, index) => [Math.abs(value ?? 0), index]).filter(([gap]) => gap > 0).sort((a, b) => b[0] - a[0]);
  let gap = -1;
  const gapButton = gaps.length ? el("button", { type: "button", title: "Token whose log-probs of trainer and engine differ most; again for the next", onclick: () => { gap = (gap + 1) % gaps.length; colouring.querySelector("select").value = "difference"; recolour("difference"); view.goTo(gaps[gap][1]); } }, "Largest gap") : null;
  const extremes = columns.difference ? [["largest gap between trainer and engine", columns.difference, (value) => -Math.abs(value)]] : [];
  if (columns.log_probs) extremes.push(["least likely tokens", columns.log_probs, (value) => value]);
  if (columns.entropies) extremes.push(["highest entropy", columns.entropies, (value) => -value]);
  for (const [title, values, rank] of extremes) {
    const order = values.map((value, index) => [value, index]).filter(([value]) => typeof value === "number").sort((a, b) => rank(a[0]) - rank(b[0])).slice(0, 12);
    side.append(el("h3", {}, title[0].toUpperCase() + title.slice(1)), el("table", {}, el("tbody", {}, order.map(([value, index]) => el("tr", {}, el("td", {}, el("button", { type: "button", class: "mono pick", onclick: () => view.goTo(index) }, visible(JSON.stringify(String(tokens.text[index]).slice(0, 24))))), el("td", { class: "number" }, number(value, 4)), el("td", { class: "number quiet" }, `#${index}`))))));
  }
  const find = el("input", { type: "search", placeholder: "Find in the tokens, Enter for the next", "aria-label": "Find in the tokens", onkeydown: (event) => event.key === "Enter" && next() });
  let at = -1;
  function next() {
    if (!find.value) return;
    const count = tokens.text.length;
    for (let distance = 1; distance <= count; distance++) {
      const index = (at + distance + count) % count;
      // A text may begin in this token and go on in the next ones.
      const from = tokens.text.slice(index, index + find.value.length + 1).join("");
      const where = from.indexOf(find.value);
      if (where >= 0 && where < Math.max(1, String(tokens.text[index]).length)) {
        at = index;
        return view.goTo(index);
      }
    }
  }
  const rendered = el("div");
  const frame = address("rendered", { run, phase, step, line });
  fetch(frame, { signal }).then(({ status }) => status === 200 && rendered.append(section("As the environment shows it", null, el("iframe", { class: "rendered", sandbox: "", src: frame, title: "The trajectory as its environment shows it" })))).catch(() => {});
  const again = typeof row.sample === "number" && row.is_replayable !== false ? el("p", { class: "quiet small mono" }, `python -m skyrl_train.replay ${run === "." ? head.name : run} --sample ${String(row.uid).slice(0, 200)}_${row.sample} --step ${step}${phase === "eval" ? " --phase eval" : ""}`) : null;
  const colouring = choice("Colour by", [...colours, ["", "nothing"]], current, recolour);
  const sampleHref = (at) => `#/run/${encodeURIComponent(run)}/sample?${new URLSearchParams({ phase, step, line: at })}`;
  const first = Number(line) - (row.step ?? 0); // rows of a trajectory stand one after another
  const ofAgent = agentSections(row, typeof row.step === "number" ? (index) => sampleHref(first + index) : () => null);
  main.replaceChildren(
    el("section", {}, bar), el("div", { class: "card" }, summary, failure, again), rendered, ...ofAgent,
    section("Tokens", el("div", { class: "row" }, legend, colouring, gapButton, find), el("div", { class: extremes.length ? "split" : "" }, view.node, extremes.length ? side : "")),
    section("Conversation", null, el("div", { class: "card" }, conversation(row, tokens))),
  );
  recolour(current);
  view.start();
  addEventListener("theme", () => recolour(current), { signal });
  return null;
}

// Where the time goes: stages of the steps, swim lanes of one step of asynchronous training, a trace for Perfetto.
import { stagesSection } from "./agent.js";
import { address, api, choice, colour, duration, el, hoverTip, number, palette, section, svg } from "./dom.js";
import { chartCard } from "./plot.js";

const ROW = 18;

/** Lanes of the workers of models that computed in the step. */
const workersOf = (lanes) => [...new Set(lanes.workers.map(([worker]) => worker))];

/** Kinds of bars of a step's lanes: name -> [colour, bars]. */
function barsOf(lanes) {
  const [blue, orange, green, violet, red, cyan] = palette();
  const unit = lanes.unit;
  const kinds = new Map([["trainer waits for groups", [colour("--line"), []]], ["trainer generates", [colour("--line"), []]], ["trainer trains", [blue, []]], ["trainer syncs weights", [violet, []]], ["trainer evaluates, saves", [colour("--quiet"), []]], ["workers compute", [cyan, []]], [`${unit} that this step trained`, [green, []]], ["group of a later step", [orange, []]], ["group of an earlier step", [green + "66", []]], [`${unit} that was not trained`, [red, []]]]);
  for (const [name, start, end] of lanes.phases) (kinds.get(`trainer ${name}`) ?? kinds.get("trainer evaluates, saves"))[1].push({ lane: 0, start, end, text: `trainer ${name}, ${duration(end - start)}` });
  const below = 1 + workersOf(lanes).length;
  for (const [worker, what, start, end] of lanes.workers) kinds.get("workers compute")[1].push({ lane: 1 + workersOf(lanes).indexOf(worker), start, end, text: `${worker}: ${what}, ${duration(end - start)}` });
  for (const group of lanes.groups) {
    const isLost = group.outcome !== "finished" && group.outcome !== "running";
    const name = isLost ? `${unit} that was not trained` : group.trained === lanes.step ? `${unit} that this step trained` : group.trained !== null && group.trained < lanes.step ? "group of an earlier step" : "group of a later step";
    const end = group.end ?? lanes.seconds;
    const fate = group.trained !== null ? `trained in step ${group.trained}` : group.outcome === "finished" ? "not trained yet" : group.outcome;
    kinds.get(name)[1].push({ lane: group.slot + below, start: group.start, end, text: `${unit} ${group.ticket}: ${duration(end - group.start)}${group.end === null ? " so far" : ""}, started with weights of version ${group.version}, ${fate}` });
  }
  return [...kinds].filter(([, [, bars]]) => bars.length);
}

function drawLanes(lanes, width) {
  const kinds = barsOf(lanes);
  const workers = workersOf(lanes);
  const below = 1 + workers.length;
  const rows = below + Math.max(0, ...lanes.groups.map(({ slot }) => slot + 1));
  const [left, top, height] = [62, 6, rows * ROW + 34];
  const x = (seconds) => left + ((width - left - 10) * Math.min(lanes.seconds, Math.max(0, seconds))) / (lanes.seconds || 1);
  const picture = svg("svg", { class: "lanes", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Lanes of step ${lanes.step}` });
  const text = (where, said, anchor = "start") => svg("text", { ...where, fill: colour("--quiet"), "font-size": 11.5, "text-anchor": anchor }, document.createTextNode(said));
  for (const [name, start, end] of lanes.phases) if (name === "syncs weights") picture.append(svg("rect", { x: x(start), y: top, width: Math.max(1, x(end) - x(start)), height: rows * ROW, fill: palette()[3], opacity: 0.18 }));
  for (let row = 0; row < rows; row++) if (row < below || rows < 36 || (row - below) % 4 === 0) picture.append(text({ x: 0, y: top + row * ROW + 12 }, row >= below ? `slot ${row - below}` : row ? workers[row - 1] : "trainer"));
  for (const [, [shade, bars]] of kinds) for (const bar of bars) picture.append(svg("rect", { x: x(bar.start), y: top + bar.lane * ROW + 2, width: Math.max(1, x(bar.end) - x(bar.start) - 0.6), height: ROW - 4, rx: 2, fill: shade, "data-text": bar.text }));
  for (let tick = 0; tick <= 5; tick++) picture.append(text({ x: x((lanes.seconds * tick) / 5), y: top + rows * ROW + 18 }, `${number((lanes.seconds * tick) / 5, 3)} s`, tick === 5 ? "end" : tick ? "middle" : "start"));
  return [picture, kinds];
}

export async function timePage({ run, query, head }, main, signal) {
  const [{ timing, names }, found] = await Promise.all([api("metrics", { run }), api("lanes", { run, step: query.step })]);
  const parts = [];
  const perfetto = el("a", { href: address("perfetto", { run }), download: `${head.name}-trace.json` }, "Download the trace of the last 200 steps for Perfetto");

  // --- stages

  let chart = null;
  const table = el("tbody");
  if (timing.length) {
    const wanted = [...timing, ...(names.includes("timing/step") ? ["timing/step"] : [])].slice(0, 60);
    const read = async () => {
      const { curves } = await api("curves", { run, name: wanted });
      const rows = timing.filter((name) => curves[name]).map((name) => {
        const values = curves[name][1].filter((value) => value !== null);
        const sum = values.reduce((total, value) => total + value, 0);
        return { name, sum, each: sum / (values.length || 1), curve: curves[name] };
      }).sort((a, b) => b.sum - a.sum);
      const all = rows.reduce((total, { sum }) => total + sum, 0);
      const colours = palette();
      table.replaceChildren(...rows.map(({ name, sum, each }, index) => el("tr", {}, el("td", {}, el("span", { class: "dot", style: { background: index < 8 ? colours[index] : colour("--line") } }), name.replace("timing/", "").replaceAll("_", " ")), el("td", { class: "number" }, `${number(each, 3)} s`), el("td", { class: "number" }, `${((100 * sum) / (all || 1)).toFixed(1)} %`))));
      const curves_ = rows.slice(0, 8).map(({ name, curve: [x, y] }, index) => ({ label: name.replace("timing/", "").replaceAll("_", " "), x, y, shade: index }));
      return { curves: curves_, options: {} };
    };
    chart = chartCard("Seconds of each stage", "by step", read, signal, { wide: true });
    const header = el("tr", {}, el("th", {}, "Stage"), el("th", { class: "number" }, "each time"), el("th", { class: "number" }, "of all"));
    parts.push(section("Where the time goes", perfetto, chart.node, el("div", { class: "card", style: { marginTop: "14px" } }, el("table", {}, el("thead", {}, header), table))));
  }

  // --- lanes

  if (found.lanes) {
    const lanes = found.lanes;
    const canvas = el("div", { class: "scroll" });
    const legend = el("div", { class: "legend" });
    const draw = () => {
      const [picture, kinds] = drawLanes(lanes, Math.max(560, canvas.clientWidth || 560));
      canvas.replaceChildren(picture);
      legend.replaceChildren(...kinds.map(([name, [shade]]) => el("span", {}, el("span", { class: "dot", style: { background: shade } }), name)));
    };
    hoverTip(canvas, (event) => event.target.dataset?.text ?? null);
    const index = found.steps.indexOf(lanes.step);
    const go = (step) => (location.hash = `#/run/${encodeURIComponent(run)}/time?step=${step}`);
    const button = (sign, title, step) => el("button", { type: "button", title, "aria-label": title, disabled: step === undefined, onclick: () => go(step) }, sign);
    const steps = found.steps.length <= 2000 ? choice("Step", found.steps.map((step) => [step, String(step)]), lanes.step, go) : el("b", {}, `step ${lanes.step}`);
    const waited = lanes.phases.filter(([name]) => name === "waits for groups" || name === "generates").reduce((sum, [, start, end]) => sum + end - start, 0);
    const hidden = lanes.num_slots > 64 ? ` Slots 0 to 63 of ${lanes.num_slots} are shown.` : "";
    const note = el("p", { class: "quiet small" }, `Step ${lanes.step}, from the end of the one before: ${duration(lanes.seconds)}, of which the trainer waited ${duration(waited)} for ${lanes.unit}s.${hidden}`);
    const waits = lanes.waits.length ? el("div", { class: "scroll", style: { maxHeight: "260px" } }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { class: "number" }, "At"), el("th", { class: "number" }, "For"), el("th", {}, "The trainer waited because"))), el("tbody", {}, lanes.waits.map(([start, end, reason]) => el("tr", {}, el("td", { class: "number" }, `${start.toFixed(2)} s`), el("td", { class: "number" }, duration(end - start)), el("td", {}, reason)))))) : "";
    parts.push(section("What ran when", el("div", { class: "row" }, button("‹", "Step before", found.steps[index - 1]), button("›", "Step after", found.steps[index + 1]), steps), el("div", { class: "card" }, legend, note, canvas, waits)));
    const sized = new ResizeObserver(draw);
    queueMicrotask(() => sized.observe(canvas));
    signal.addEventListener("abort", () => sized.disconnect());
    addEventListener("theme", draw, { signal });
  } else if (timing.length) parts.push(el("p", { class: "quiet small" }, "This run has recorded no lanes (rollouts/timeline.jsonl, with trainer.dump_trajectories=true)."));
  if (head.steps?.eval?.includes(0)) { // trajectories of skyrl-agent are those of an evaluation at step 0
    const stages = stagesSection((await api("step", { run, phase: "eval", step: 0 })).rows);
    if (stages) parts.push(stages);
  }
  main.replaceChildren(...(parts.length ? parts : [el("section", {}, el("p", { class: "quiet" }, "No step has ended yet."))]));
  return () => chart?.draw();
}

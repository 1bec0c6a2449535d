// A chart of curves with uPlot: drawn when it comes near the window, again when theme or size change.
import { colour, duration, el, number, palette } from "./dom.js";

/** Exponential moving average, corrected for its start at zero; gaps stay gaps. */
export function smooth(values, weight) {
  let [average, total] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    average = weight * average + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return average / total;
  });
}

/** Put curves with x values of their own onto the union of them; what a curve lacks is undefined, which uPlot skips. */
export function align(curves) {
  const xs = [...new Set(curves.flatMap(({ x }) => x))].sort((a, b) => a - b);
  const at = new Map(xs.map((x, index) => [x, index]));
  return [xs, ...curves.map(({ x, y }) => {
    const row = new Array(xs.length).fill(undefined);
    x.forEach((value, index) => (row[at.get(value)] = y[index]));
    return row;
  })];
}

/**
 * A card with a chart.
 * `read()` gives {curves: [{label, x, y, shade?}], band?: {x, low, high}, options: {smoothing, log, time}}.
 */
export function chartCard(title, note, read, signal, { onStep, wide } = {}) {
  const plot = el("div", { class: "plot" });
  const legend = el("div", { class: "legend" });
  const node = el("div", { class: `card chart${wide ? " wide" : ""}` }, el("h3", {}, title, note ? el("span", { class: "quiet small" }, `  ${note}`) : null), legend, plot);
  let chart = null;
  let isNear = false;

  async function draw() {
    if (!isNear) return;
    const { curves, band, options } = await read();
    if (signal.aborted) return;
    const colours = palette();
    const shown = curves.map((curve, index) => ({ ...curve, shade: colours[(curve.shade ?? index) % colours.length] }));
    const lines = [];
    if (band) lines.push({ label: "", x: band.x, y: band.low, edge: true }, { label: "", x: band.x, y: band.high, edge: true });
    for (const curve of shown) {
      if (options.smoothing && curve.x.length > 2) lines.push({ ...curve, faint: true }, { ...curve, y: smooth(curve.y, options.smoothing) });
      else lines.push(curve);
    }
    const data = align(lines);
    const fits = (value) => value > 0 || value === null || value === undefined;
    const isLog = options.log && data.slice(1).every((row) => row.every(fits)) && data.length > 1;
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 }, font: "11.5px system-ui" };
    const series = lines.map(({ shade, faint, edge, x }) => edge
      ? { stroke: "transparent", points: { show: false } }
      : { stroke: faint ? shade + "55" : shade, width: faint ? 1 : 1.8, spanGaps: true, points: { show: x.length < 2 || (!faint && x.length < 40 && !options.smoothing), size: 5, stroke: shade, fill: shade } });
    const named = lines.map((curve, index) => [curve, index + 1]).filter(([curve]) => !curve.faint && !curve.edge);
    const drawLegend = (index) => legend.replaceChildren(...named.map(([curve, at]) => {
      const values = data[at];
      let value = index === null || index === undefined ? undefined : values[index];
      if (index === null || index === undefined) value = values.findLast((item) => item !== null && item !== undefined);
      const dot = el("span", { class: "dot", style: { background: curve.shade } });
      return el("span", {}, dot, curve.label, "  ", el("span", { class: "number" }, number(value)));
    }), index === null || index === undefined ? "" : el("span", {}, options.time ? `after ${duration(data[0][index])}` : `step ${data[0][index]}`));
    chart?.destroy();
    chart = new uPlot({
      width: Math.max(120, plot.clientWidth), height: plot.clientHeight,
      legend: { show: false },
      cursor: { drag: { x: true, y: false }, points: { size: 7 }, dataIdx: nearest },
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
      bands: band ? [{ series: [2, 1], fill: colours[0] + "22" }] : [],
      axes: [{ ...axis, grid: { show: false }, size: 28, space: options.time ? 96 : 50, values: (_, ticks) => ticks.map((tick) => (options.time ? duration(tick) : Number.isInteger(tick) ? String(tick) : "")) },
        { ...axis, size: (_, ticks) => Math.max(40, 16 + 6.6 * Math.max(0, ...(ticks ?? []).map((tick) => String(tick).length))), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, 3))) }],
      series: [{}, ...series],
      hooks: { setCursor: [(self) => drawLegend(self.cursor.idx)] },
    }, data, plot);
    if (onStep && !options.time) chart.over.addEventListener("click", () => chart.cursor.idx !== null && onStep(data[0][chart.cursor.idx]));
    drawLegend(null);
  }
  /** The point of a curve nearest to the cursor: curves over other steps have gaps. */
  const nearest = (self, index, at) => {
    const row = self.data[index];
    for (let distance = 0; distance < 40; distance++) for (const near of [at - distance, at + distance]) if (row[near] !== undefined && row[near] !== null) return near;
    return at;
  };

  const seen = new IntersectionObserver(([entry]) => {
    if (entry.isIntersecting && !isNear) { isNear = true; draw(); }
  }, { rootMargin: "500px" });
  seen.observe(node);
  let width = 0;
  const sized = new ResizeObserver(() => {
    if (chart && plot.clientWidth !== width) chart.setSize({ width: (width = plot.clientWidth), height: plot.clientHeight });
  });
  sized.observe(plot);
  addEventListener("theme", draw, { signal });
  signal.addEventListener("abort", () => { seen.disconnect(); sized.disconnect(); chart?.destroy(); });
  return { node, draw };
}

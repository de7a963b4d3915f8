// Charts: uPlot for series and scatters, SVG for the waterfall and the origins of a prompt.
import { h, s } from "./dom.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const HEIGHT = 190;

export class TimeChart {
  // series: [{label, colour, value(point)}]
  constructor(title, series, { unit = "", scale = {} } = {}) {
    this.title = title; this.series = series; this.unit = unit; this.scale = scale;
    this.holder = h("div", { role: "img", "aria-label": `${title}: no data yet` });
    this.note = h("p", { class: "empty" }, "No data yet.");
    this.element = h("figure", {}, h("figcaption", {}, title), this.note, this.holder);
    this.plot = null; this.width = 0; this.theme = "";
  }

  draw(points) {
    this.note.hidden = points.length > 0;
    if (!points.length) return;
    const data = [points.map((p) => p.at_s), ...this.series.map((each) => points.map((p) => each.value(p)))];
    const width = Math.max(240, this.element.clientWidth - 22), theme = document.documentElement.dataset.theme;
    if (!this.plot || theme !== this.theme) this.make(width, data);
    else {
      if (width !== this.width) this.plot.setSize({ width, height: HEIGHT });
      this.plot.setData(data);
    }
    this.width = width; this.theme = theme;
    const last = this.series.map((each) => {
      const value = each.value(points[points.length - 1]);
      return `${each.label} ${value === null || value === undefined ? "none" : Number(value.toFixed(2))}${this.unit}`;
    });
    this.holder.setAttribute("aria-label", `${this.title}, newest: ${last.join(", ")}`);
  }

  make(width, data) {
    if (this.plot) this.plot.destroy();
    const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") }, font: "12px system-ui, DejaVu Sans, sans-serif" };
    this.plot = new uPlot({
      width, height: HEIGHT, padding: [8, 30, 0, 0], cursor: { points: { show: false } },
      scales: { y: { range: (u, low, high) => [0, high > 0 ? high * 1.1 : 1], ...this.scale } },
      axes: [{ ...axis, values: (u, ticks) => ticks.map((t) => new Date(t * 1000).toLocaleTimeString("en-GB")), space: 90 },
        { ...axis, size: 74, values: (u, ticks) => ticks.map((t) => `${t}${this.unit}`) }],
      series: [{ value: (u, v) => (v === null || v === undefined ? "" : new Date(v * 1000).toLocaleTimeString("en-GB")) },
        ...this.series.map((each) => ({ label: each.label, stroke: colour(each.colour), width: 2, dash: each.dash, spanGaps: true, points: { show: data[0].length < 30, size: 5 },
          value: (u, v) => (v === null || v === undefined ? "–" : `${Number(v.toFixed(2))}${this.unit}`) }))],
    }, data, this.holder);
  }
}

export function scatter(title, pairs, unit) {
  const size = 320, edge = 64;
  const figure = h("figure", {}, h("figcaption", {}, title));
  if (!pairs.length) { figure.append(h("p", { class: "empty" }, "No request has ended with a prediction yet.")); return figure; }
  const errors = pairs.map(([guess, actual]) => Math.abs(guess / actual - 1)).sort((a, b) => a - b);
  const middle = errors[Math.floor(errors.length / 2)];
  const most = Math.max(...pairs.flat()) * 1.05 || 1;
  const at = (value) => edge + (size - edge - 8) * value / most;
  const text = `${pairs.length} requests, median error ${(100 * middle).toFixed(0)} %`;
  const svg = s("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": `${title}: ${text}`, width: "100%" });
  svg.append(s("line", { x1: at(0), y1: size - at(0), x2: at(most), y2: size - at(most), class: "axis", "stroke-dasharray": "4 4" }));
  svg.append(s("line", { x1: at(0), y1: size - at(0), x2: at(most), y2: size - at(0), class: "axis" }), s("line", { x1: at(0), y1: size - at(0), x2: at(0), y2: size - at(most), class: "axis" }));
  for (const share of [0, 0.5, 1]) {
    const value = most * share / 1.05, label = value >= 100 ? Math.round(value) : value.toFixed(1);
    const x = s("text", { x: at(value), y: size - 28, "text-anchor": "middle", class: "tick" }); x.textContent = label;
    const y = s("text", { x: edge - 6, y: size - at(value) + 4, "text-anchor": "end", class: "tick" }); y.textContent = label;
    svg.append(x, y);
  }
  for (const [guess, actual] of pairs) svg.append(s("circle", { cx: at(actual), cy: size - at(guess), r: 3, class: "fill-remote", "fill-opacity": 0.6 }));
  const x = s("text", { x: size / 2 + 20, y: size - 8, "text-anchor": "middle" }); x.textContent = `actual, ${unit}`;
  const y = s("text", { x: 12, y: size / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${size / 2})` }); y.textContent = `predicted, ${unit}`;
  svg.append(x, y);
  figure.append(svg, h("p", { class: "hint" }, `${text}. The dashed line is a perfect prediction.`));
  return figure;
}

// drawn in the width that there is, so that its words are as large as all others
export function waterfall(detail, width) {
  const spans = [...detail.spans].sort((a, b) => a.start_ms - b.start_ms);
  const most = Math.max(1, ...spans.map((each) => each.end_ms), ...detail.marks.map((each) => each.at_ms));
  const steps = width < 600 ? 2 : 4, left = width < 600 ? 132 : 170, row = 26, top = 22;
  const x = (value) => left + (width - left - 70) * value / most, height = top + row * Math.max(1, spans.length) + 8;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", width, height,
    "aria-label": "Waterfall: " + spans.map((e) => `${e.name} from ${Math.round(e.start_ms)} to ${Math.round(e.end_ms)} ms`).join("; ") });
  for (let i = 0; i <= steps; i += 1) {
    const value = most * i / steps;
    svg.append(s("line", { x1: x(value), y1: top - 4, x2: x(value), y2: top + row * spans.length, class: "axis" }));
    const label = s("text", { x: x(value), y: 12, "text-anchor": "middle", class: "tick" }); label.textContent = `${Math.round(value)} ms`;
    svg.append(label);
  }
  spans.forEach((span, i) => {
    const y = top + i * row, kind = span.name.startsWith("chunk") ? "compute" : span.name.replaceAll(" ", "-");
    const name = s("text", { x: left - 8, y: y + 16, "text-anchor": "end" });
    name.textContent = (span.attempt || 1) > 1 ? `${span.name}, try ${span.attempt}` : span.name;
    const box = s("rect", { x: x(span.start_ms), y: y + 3, width: Math.max(2, x(span.end_ms) - x(span.start_ms)), height: row - 8, rx: 3, class: `fill-${kind}` });
    const title = s("title"); title.textContent = `${span.name}: ${span.start_ms.toFixed(1)} to ${span.end_ms.toFixed(1)} ms${span.node ? ` on ${span.node}` : ""}`;
    box.append(title);
    const took = s("text", { x: x(span.end_ms) + 5, y: y + 16, class: "tick" });
    took.textContent = `${(span.end_ms - span.start_ms).toFixed(span.end_ms - span.start_ms < 10 ? 1 : 0)} ms`;
    svg.append(name, box, took);
  });
  for (const token of detail.token_ms.slice(0, 400)) {
    const index = spans.findIndex((each) => each.name === "tokens");
    if (index >= 0) svg.append(s("line", { x1: x(token), x2: x(token), y1: top + index * row + 3, y2: top + index * row + row - 5, stroke: "currentColor", "stroke-width": 1 }));
  }
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Timeline" }, svg);
}

export function origins(detail, width) {
  const total = detail.view.prompt_tokens || 1;
  const names = { computed: "computed", host: "DRAM of this host", remote: "DRAM of another node", ssd: "SSD" };
  const text = detail.origins.map((each) => `${each.start} to ${each.end} ${names[each.source]}${each.node ? ` (${each.node})` : ""}`).join("; ");
  const svg = s("svg", { viewBox: `0 0 ${width} 44`, width, height: 44, role: "img", "aria-label": `Origin of the prompt's KV by position: ${text || "not known"}` });
  for (const each of detail.origins) {
    const box = s("rect", { x: width * each.start / total, y: 0, width: Math.max(1, width * (each.end - each.start) / total - 1), height: 24, class: `fill-${each.source}` });
    const title = s("title"); title.textContent = `positions ${each.start} to ${each.end}: ${names[each.source]}${each.node ? ` at ${each.node}` : ""}`;
    box.append(title); svg.append(box);
  }
  const first = s("text", { x: 0, y: 40, class: "tick" }); first.textContent = "0";
  const last = s("text", { x: width, y: 40, "text-anchor": "end", class: "tick" }); last.textContent = `${total} tokens`;
  svg.append(first, last);
  return svg;
}

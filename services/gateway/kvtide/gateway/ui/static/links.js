// Links as a picture: where KV comes from, what for, and who takes it; as broad as the rate.
import { bytes, h, s } from "./dom.js";

const MOST = 8, BAR = 12, GAP = 8, TOP = 26;
const FILLS = { reuse: "host", handover: "remote", drain: "warn", replicate: "ssd" };

function add(map, key, value) { map.set(key, (map.get(key) || 0) + value); }

// Shared memory and RDMA have no second process that counts: the source is the host, or the path.
function parts(view, hosts) {
  const sources = new Map(), takers = new Map(), purposes = new Map(), served = new Map();
  for (const each of view.served) if (each.path === "tcp") add(served, each.purpose, each.bytes_per_s);
  for (const flow of view.flows) {
    add(purposes, flow.purpose, flow.bytes_per_s);
    add(takers, JSON.stringify([flow.purpose, flow.node]), flow.bytes_per_s);
    if (flow.path === "tcp" && served.has(flow.purpose)) continue;
    const host = (hosts.get(flow.node) || "").slice(0, 8);
    const from = flow.path === "tcp" ? "over TCP" : flow.path === "rdma" ? "over RDMA" : flow.path === "shm" ? `memory of ${host || "its host"}` : flow.path;
    add(sources, JSON.stringify([flow.purpose, from]), flow.bytes_per_s);
  }
  for (const each of view.served) if (each.path === "tcp" && purposes.has(each.purpose)) add(sources, JSON.stringify([each.purpose, each.node]), each.bytes_per_s);
  return { sources: few(sources), takers: few(takers), purposes: few(purposes, (key) => [key, key]) };
}

// [{purpose, end, rate}], the largest ends apart, the rest as one
function few(map, read = JSON.parse) {
  const ends = new Map();
  for (const [key, rate] of map) add(ends, read(key)[1], rate);
  const kept = new Set([...ends].sort((a, b) => b[1] - a[1]).slice(0, MOST).map(([end]) => end));
  const merged = new Map();
  for (const [key, rate] of map) {
    const [purpose, end] = read(key);
    add(merged, JSON.stringify([purpose, kept.has(end) ? end : `${ends.size - kept.size} others`]), rate);
  }
  return [...merged].map(([key, rate]) => { const [purpose, end] = JSON.parse(key); return { purpose, end, rate }; }).sort((a, b) => b.rate - a.rate);
}

// bars of one column, each as high as its rate, with room for its words
function column(items, scale, x) {
  const bars = new Map();
  for (const each of items) add(bars, each.end, each.rate);
  let y = TOP;
  return new Map([...bars].map(([end, rate]) => {
    const height = Math.max(2, rate * scale), bar = { x, y, height, rate, left: y, right: y };
    y += Math.max(height, 18) + GAP;
    return [end, bar];
  }));
}

function band(from, to, low, high, kind, words) {
  const middle = (from.x + BAR + to.x) / 2, start = from.right, end = to.left;
  from.right += low; to.left += high;
  const path = s("path", { d: `M${from.x + BAR} ${start} C${middle} ${start} ${middle} ${end} ${to.x} ${end} v${high} C${middle} ${end + high} ${middle} ${start + low} ${from.x + BAR} ${start + low} Z`, class: `fill-${kind}`, "fill-opacity": 0.45 });
  const title = s("title"); title.textContent = words;
  path.append(title);
  return path;
}

export function links(view, hosts, width) {
  const { sources, takers, purposes } = parts(view, hosts);
  const total = purposes.reduce((sum, each) => sum + each.rate, 0), scale = 160 / Math.max(total, sources.reduce((sum, each) => sum + each.rate, 0));
  const left = column(sources, scale, 0), middle = column(purposes, scale, (width - BAR) / 2), right = column(takers, scale, width - BAR);
  const height = Math.max(...[left, middle, right].flatMap((each) => [...each.values()].map((bar) => bar.y + Math.max(bar.height, 18)))) + 4;
  const words = takers.map((each) => `${each.end} takes ${bytes(each.rate)}/s for ${each.purpose}`).join("; ");
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Links: ${words}` });
  for (const [x, text, anchor] of [[0, "from", "start"], [width / 2, "for", "middle"], [width, "taken by", "end"]]) {
    const head = s("text", { x, y: 14, "text-anchor": anchor, class: "tick" }); head.textContent = text; svg.append(head);
  }
  const kind = (purpose) => FILLS[purpose] || "queue";
  for (const each of sources) svg.append(band(left.get(each.end), middle.get(each.purpose), each.rate * scale, each.rate * scale, kind(each.purpose), `${each.end}: ${bytes(each.rate)}/s for ${each.purpose}`));
  for (const each of takers) svg.append(band(middle.get(each.purpose), right.get(each.end), each.rate * scale, each.rate * scale, kind(each.purpose), `${each.end}: ${bytes(each.rate)}/s for ${each.purpose}`));
  for (const [bars, anchor, offset] of [[left, "start", BAR + 6], [middle, "middle", BAR / 2], [right, "end", -6]]) {
    for (const [end, bar] of bars) {
      const fill = bars === middle ? `fill-${kind(end)}` : "fill-bar";
      const text = s("text", { x: bar.x + offset, y: bar.y + Math.max(13, bar.height / 2 + 4), "text-anchor": anchor, class: "over" });
      text.textContent = width < 600 ? end : `${end}, ${bytes(bar.rate)}/s`;
      svg.append(s("rect", { x: bar.x, y: bar.y, width: BAR, height: bar.height, class: fill }), text);
    }
  }
  return h("figure", {}, svg);
}

// Nodes with their loads, the traffic between them, and what happened.
import { bytes, clock, count, h, ms, s, table, tiles } from "./dom.js";
import { get, live } from "./live.js";
import { links } from "./links.js";

const order = new Intl.Collator("en", { numeric: true });  // made once: that costs more than to compare
const SHOWN_ROWS = 40, GRID_FROM = 40, FIRST_RATES_MS = 4200;

function memory(used, total) {
  if (!total) return "–";
  return h("span", {}, h("meter", { min: 0, max: total, value: used, "aria-label": `${bytes(used)} of ${bytes(total)}` }), ` ${bytes(used)} of ${bytes(total)}`);
}

function loadOf(node) {
  const parts = [];
  if (node.roles.includes("prefill")) parts.push(`${count(node.queued || 0)} queued, ${ms(node.queue_ms || 0)}`);
  if (node.roles.includes("decode")) parts.push(`${count(node.running || 0)} running, ${count(node.waiting || 0)} waiting, step ${ms(node.step_ms || 0)}`);
  if (node.roles.includes("gateway")) parts.push(`${count(node.open_requests || 0)} open requests`);
  if (node.roles.includes("conductor")) parts.push(`${count(node.indexed_blocks || 0)} blocks in the index${node.exact === false ? ", catching up" : ""}`);
  if (node.roles.includes("store") && node.ssd_state && node.ssd_state !== "off") parts.push(`SSD ${node.ssd_state}${node.ssd_reason ? `: ${node.ssd_reason}` : ""}`);
  if (node.quarantined) parts.push(`${node.quarantined} slots in quarantine`);
  return parts.join("; ");
}

function row(node) {
  const kv = node.kv_capacity ? `${count(node.kv_used || 0)} of ${count(node.kv_capacity)} tokens` : "";
  const dram = node.dram_capacity ? memory(node.dram_used || 0, node.dram_capacity) : kv || "–";
  return { cells: [node.node, node.roles.join(", "), h("span", { class: `state-${node.state}` }, node.state),
    node.busy === undefined ? "–" : `${Math.round(100 * node.busy)} %`, loadOf(node), dram,
    node.ssd_total ? memory(node.ssd_used || 0, node.ssd_total) : "–", h("span", { title: node.host }, node.host.slice(0, 8)), String(node.epoch)] };
}

const columns = [{ title: "Node" }, { title: "Roles" }, { title: "State" }, { title: "Busy", num: true }, { title: "Load", wrap: true },
  { title: "DRAM or KV" }, { title: "SSD" }, { title: "Host" }, { title: "Epoch", num: true }];

// A cell a node: 1,000 of them cost a few milliseconds, where rows would cost a hundred.
function drawGrid(canvas, nodes) {
  const size = 18, gap = 3, width = canvas.parentElement.clientWidth, across = Math.max(1, Math.floor((width - gap) / (size + gap)));
  const height = Math.ceil(nodes.length / across) * (size + gap) + gap, ratio = devicePixelRatio || 1;
  canvas.width = width * ratio; canvas.height = height * ratio;
  const paper = canvas.getContext("2d");
  paper.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const [good, warn, soft] = ["--host", "--warn", "--line"].map((name) => style.getPropertyValue(name));
  nodes.forEach((node, i) => {
    paper.globalAlpha = 1;
    paper.fillStyle = node.state === "ready" ? soft : warn;
    const x = gap + (i % across) * (size + gap), y = gap + Math.floor(i / across) * (size + gap);
    paper.fillRect(x, y, size, size);
    const share = node.busy ?? (node.dram_capacity ? node.dram_used / node.dram_capacity : 0);
    paper.fillStyle = good;
    paper.fillRect(x, y + size * (1 - share), size, size * share);
  });
  canvas.setAttribute("aria-label", `${nodes.length} nodes, each cell filled by its load; the table below has the figures`);
}

export const cluster = {
  title: "Cluster",
  make(holder) {
    const top = h("div"), filter = h("input", { id: "node-filter", type: "search" }), grid = h("canvas", { class: "grid", role: "img" });
    const gridBox = h("div", { hidden: true }, grid), list = h("div", { id: "nodes" }), traffic = h("div", { id: "traffic" }), picture = h("div", { id: "links" }), news = h("div", { id: "happenings" });
    holder.append(top, h("div", { class: "bar" }, h("div", {}, h("label", { for: "node-filter" }, "Show nodes whose name, role or state has"), filter)),
      gridBox, list, h("h2", {}, "Traffic by purpose"), picture, traffic, h("h2", {}, "What happened"), news);
    let text = "", drawn = 0;
    const readTraffic = async () => {
      try {
        const view = await get("/admin/ui/traffic");
        const note = view.left_out ? ` ${view.left_out} nodes were not asked.` : "";
        const hosts = new Map([...live.nodes.values()].map((node) => [node.node, node.host]));
        picture.replaceChildren(...(view.flows.length ? [links(view, hosts, Math.max(300, picture.clientWidth - 22))] : []));
        traffic.replaceChildren(view.flows.length
          ? table(`Bytes a second over the last ${view.over_s.toFixed(0)} s, counted where they were asked for.${note}`,
            [{ title: "Node" }, { title: "Purpose" }, { title: "Path" }, { title: "Rate", num: true }],
            view.flows.slice(0, 40).map((flow) => ({ cells: [flow.node, flow.purpose, flow.path, `${bytes(flow.bytes_per_s)}/s`] })))
          : h("p", { class: "empty" }, view.over_s ? `No KV moved in the last ${view.over_s.toFixed(0)} s.${note}` : "Reading the nodes' counters.",
            view.silent.length ? ` No answer from ${view.silent.slice(0, 5).join(", ")}.` : ""));
      } catch (error) { traffic.replaceChildren(h("p", { class: "error" }, error.message)); }
    };
    readTraffic();
    setTimeout(readTraffic, FIRST_RATES_MS);
    const timer = setInterval(() => { if (!document.hidden) readTraffic(); }, 5000);
    const update = (live) => {
      const nodes = [...live.nodes.values()].sort((a, b) => order.compare(a.node, b.node));
      const role = (name) => nodes.filter((node) => node.roles.includes(name));
      const sum = (name) => nodes.reduce((total, node) => total + (node[name] || 0), 0);
      top.replaceChildren(tiles([["Nodes", count(nodes.length)], ["Prefill", count(role("prefill").length)], ["Decode", count(role("decode").length)],
        ["Stores", count(role("store").length)], ["Open requests", count(sum("open_requests"))], ["DRAM", `${bytes(sum("dram_used"))} of ${bytes(sum("dram_capacity"))}`],
        ["SSD", sum("ssd_total") ? `${bytes(sum("ssd_used"))} of ${bytes(sum("ssd_total"))}` : "none"]]));
      const found = text ? nodes.filter((node) => `${node.node} ${node.roles.join(" ")} ${node.state}`.includes(text)) : nodes;
      gridBox.hidden = found.length < GRID_FROM;
      if (!gridBox.hidden) drawGrid(grid, found);
      const more = found.length > SHOWN_ROWS ? ` The first ${SHOWN_ROWS} of ${found.length}: narrow them down above.` : "";
      // with many nodes the rows are drawn every third second: nobody reads faster
      if (found.length < GRID_FROM || drawn % 3 === 0) {
        list.replaceChildren(nodes.length ? table(`Live nodes.${more}`, columns, found.slice(0, SHOWN_ROWS).map(row)) : h("p", { class: "empty" }, "No node is live."));
        news.replaceChildren(live.happenings.length
          ? table("The newest first", [{ title: "Time" }, { title: "Node" }, { title: "What", wrap: true }],
            [...live.happenings].reverse().slice(0, 30).map((each) => ({ cells: [clock(each.at_s), each.node, h("span", { class: `kind-${each.kind}` }, `${each.kind}: ${each.text}`)] })))
          : h("p", { class: "empty" }, "Nothing yet."));
      }
      drawn += 1;
    };
    filter.addEventListener("input", () => { text = filter.value.trim(); drawn = 0; });
    return { update, close() { clearInterval(timer); } };
  },
};

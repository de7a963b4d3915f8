// Hit rates over time, the tree of hot prefixes, copies by node and tier, and what went.
import { bytes, count, h, percent, table, tiles } from "./dom.js";
import { TimeChart } from "./charts.js";
import { get } from "./live.js";

const COLOURS = ["accent", "computed", "host", "ssd", "warn", "bad"];

// a point a step, with each tenant's tokens by its name
function byTenant(view) {
  const points = new Map();
  for (const each of view.tenants) {
    if (!points.has(each.start_s)) points.set(each.start_s, { at_s: each.start_s });
    points.get(each.start_s)[each.tenant] = each;
  }
  return [...points.values()];
}

function tenantRows(view) {
  const sums = new Map();
  for (const each of view.tenants) {
    const sum = sums.get(each.tenant) || { requests: 0, prompt: 0, cached: 0 };
    sums.set(each.tenant, { requests: sum.requests + each.requests, prompt: sum.prompt + each.prompt_tokens, cached: sum.cached + each.cached_tokens });
  }
  return [...sums].sort((a, b) => b[1].prompt - a[1].prompt)
    .map(([tenant, sum]) => ({ cells: [tenant || "default", count(sum.requests), count(sum.prompt), count(sum.cached), percent(sum.cached, sum.prompt)] }));
}

function treeRows(view) {
  const level = [];
  return view.chains.map((chain, i) => {
    level[i] = chain.parent < 0 ? 0 : level[chain.parent] + 1;
    const copies = view.copies[i] || [];
    const size = copies.length ? bytes(copies[0].bytes * chain.blocks) : "–";
    return { cells: [`${"  ".repeat(level[i])}${chain.parent < 0 ? "" : "└ "}${chain.first_key.slice(0, 8)}`, count(chain.blocks), `${count(chain.depth_blocks)}`, chain.heat.toFixed(1), size,
      copies.map((copy) => `${copy.node} (${copy.tier})`).join(", ") || "not in the catalog yet", chain.tenant || "default"] };
  });
}

// a parent's children follow it, so that the indentation reads as a tree
function ordered(view) {
  const below = new Map();
  view.chains.forEach((chain, i) => below.set(chain.parent, [...(below.get(chain.parent) || []), i]));
  const order = [], walk = (parent) => { for (const i of below.get(parent) || []) { order.push(i); walk(i); } };
  walk(-1);
  const place = new Map(order.map((old, now) => [old, now]));
  return { ...view, chains: order.map((i) => ({ ...view.chains[i], parent: view.chains[i].parent < 0 ? -1 : place.get(view.chains[i].parent) })), copies: order.map((i) => view.copies[i] || []) };
}

export const cache = {
  title: "Cache",
  make(holder) {
    const minutes = h("select", { id: "cache-minutes" }, [["10", "10 minutes"], ["30", "30 minutes"], ["180", "3 hours"], ["1440", "a day"]].map(([value, name]) => h("option", { value, selected: value === "30" }, name)));
    const share = new TimeChart("Share of prompt tokens, by where they were planned to come from", [
      { label: "DRAM", colour: "host", value: (p) => (p.prompt_tokens ? 100 * p.dram_tokens / p.prompt_tokens : null) },
      { label: "SSD", colour: "ssd", value: (p) => (p.prompt_tokens ? 100 * p.ssd_tokens / p.prompt_tokens : null) },
      { label: "really cached", colour: "ink", dash: [6, 5], value: (p) => (p.prompt_tokens ? 100 * p.cached_tokens / p.prompt_tokens : null) }], { unit: " %" });
    const hits = new TimeChart("Requests, and those with any hit", [
      { label: "requests", colour: "soft", value: (p) => p.requests }, { label: "with a hit", colour: "host", value: (p) => p.hit_requests }]);
    const tenants = h("div", { id: "tenants" }), tenantBox = h("div");
    let tenantNames = "", tenantShare = null;
    const drawTenants = (view) => {
      const rows = tenantRows(view), names = [...new Set(view.tenants.map((each) => each.tenant))].sort();
      tenants.replaceChildren(rows.length ? table("The six tenants with the longest prompts", [{ title: "Tenant" }, { title: "Requests", num: true }, { title: "Prompt tokens", num: true }, { title: "Cached", num: true }, { title: "Share", num: true }], rows)
        : h("p", { class: "empty" }, "No request has ended in this time."));
      if (tenantShare === null || names.join("\n") !== tenantNames) {
        tenantNames = names.join("\n");
        tenantShare = new TimeChart("Share of prompt tokens that were cached, by tenant", names.map((name, i) => ({ label: name || "default", colour: COLOURS[i % COLOURS.length], value: (p) => (p[name] ? 100 * p[name].cached_tokens / p[name].prompt_tokens : null) })), { unit: " %" });
        tenantBox.replaceChildren(tenantShare.element);
      }
      tenantShare.draw(byTenant(view));
    };
    const top = h("div"), tree = h("div", { id: "tree" }), copies = h("div", { id: "copies" }), gone = h("div", { id: "gone" }), note = h("p", { class: "error" });
    holder.append(h("div", { class: "bar" }, h("div", {}, h("label", { for: "cache-minutes" }, "Over the last"), minutes)), note, top, h("div", { class: "charts" }, share.element, hits.element, tenantBox),
      h("h2", {}, "By tenant"), tenants,
      h("h2", {}, "The hottest prefixes"), h("p", { class: "hint" }, "Heat is the number of reuses, halved every ten minutes. A row is a run of blocks that are reused together; those below it go on from it."), tree,
      h("h2", {}, "What is kept where"), copies, h("h2", {}, "What went, and why"), gone);
    let busy = false;
    const load = async () => {
      if (busy) return;
      busy = true;
      try {
        const view = ordered(await get(`/admin/ui/cache?minutes=${minutes.value}`));
        note.textContent = view.missing;
        const points = view.hit_rates.map((rate) => ({ ...rate, at_s: rate.start_s }));
        const sum = (name) => view.hit_rates.reduce((total, rate) => total + rate[name], 0);
        top.replaceChildren(tiles([["Requests", count(sum("requests"))], ["With a hit", percent(sum("hit_requests"), sum("requests"))], ["Tokens cached", percent(sum("cached_tokens"), sum("prompt_tokens"))],
          ["Blocks kept", count(view.block_counts.reduce((total, each) => total + each.blocks, 0))], ["Bytes kept", bytes(view.block_counts.reduce((total, each) => total + each.bytes, 0))]]));
        share.draw(points); hits.draw(points); drawTenants(view);
        tree.replaceChildren(view.chains.length ? h("div", { class: "tree" }, table("Prefixes that were reused", [{ title: "First block" }, { title: "Blocks", num: true }, { title: "From block", num: true }, { title: "Heat", num: true }, { title: "Size", num: true }, { title: "Copies of its last block" }, { title: "Tenant" }], treeRows(view)))
          : h("p", { class: "empty" }, "No prefix has been reused since this gateway started. Ask the same thing twice on the Chat page."));
        copies.replaceChildren(view.block_counts.length ? table("Committed copies", [{ title: "Node" }, { title: "Tier" }, { title: "Blocks", num: true }, { title: "Bytes", num: true }], view.block_counts.map((each) => ({ cells: [each.node, each.tier, count(each.blocks), bytes(each.bytes)] }))) : h("p", { class: "empty" }, "No block is kept yet."));
        gone.replaceChildren(view.removals.length ? table("Copies that went", [{ title: "Node" }, { title: "Tier" }, { title: "Why" }, { title: "Blocks", num: true }, { title: "Bytes", num: true }], view.removals.map((each) => ({ cells: [each.node, each.tier, each.reason, count(each.blocks), bytes(each.bytes)] }))) : h("p", { class: "empty" }, "Nothing was evicted."));
      } catch (error) { note.textContent = error.message; } finally { busy = false; }
    };
    minutes.addEventListener("input", load);
    load();
    const timer = setInterval(() => { if (!document.hidden) load(); }, 3000);
    return { close() { clearInterval(timer); } };
  },
};

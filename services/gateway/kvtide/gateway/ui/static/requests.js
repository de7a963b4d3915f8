// Requests, running and recent; one of them with its time, its KV and the decision on it.
import { clock, count, h, legend, ms, percent, table, tiles } from "./dom.js";
import { get } from "./live.js";
import { origins, waterfall } from "./charts.js";

const columns = [{ title: "Arrived" }, { title: "Request" }, { title: "State" }, { title: "Prompt", num: true }, { title: "Cached", num: true }, { title: "Output", num: true },
  { title: "TTFT", num: true }, { title: "TBT", num: true }, { title: "Total", num: true }, { title: "Prefill" }, { title: "Decode" }, { title: "Attempts", num: true }, { title: "Tenant" }];

function row(view) {
  return { cells: [clock(view.arrived_s), h("a", { href: `#/requests/${encodeURIComponent(view.request)}` }, view.request),
    h("span", { class: `state-${view.state}` }, view.code ? `${view.state}: ${view.code}` : view.state),
    count(view.prompt_tokens), `${count(view.cached_tokens)} (${percent(view.cached_tokens, view.prompt_tokens)})`, count(view.output_tokens),
    ms(view.ttft_ms), ms(view.tbt_ms), ms(view.total_ms), view.prefill || "–", view.decode || "–", String(view.attempt), view.tenant || "default"] };
}

function makeList(holder) {
  const text = h("input", { id: "request-text", type: "search" });
  const state = h("select", { id: "request-state" }, ["", "running", "finished", "failed", "rejected", "cancelled"].map((name) => h("option", { value: name }, name || "any")));
  const list = h("div", { id: "request-list" });
  holder.append(h("div", { class: "bar" }, h("div", {}, h("label", { for: "request-text" }, "Name, tenant, worker or code has"), text), h("div", {}, h("label", { for: "request-state" }, "State"), state)), list);
  let busy = false, seen = "", last = 0;
  const load = async (event) => {
    if (busy || (event === undefined && Date.now() - last < 2000)) return;
    busy = true; last = Date.now();
    try {
      const query = new URLSearchParams({ text: text.value.trim(), state: state.value, limit: 50 });
      const views = await get(`/admin/ui/requests?${query}`);
      const now = JSON.stringify(views);
      // what is unchanged keeps its focus and its selection
      if (now !== seen && !list.contains(document.activeElement)) {
        seen = now;
        list.replaceChildren(views.length ? table("The newest first, at most 50", columns, views.map(row)) : h("p", { class: "empty" }, "No such request. Try one on the Chat page."));
      }
    } catch (error) { list.replaceChildren(h("p", { class: "error" }, error.message)); } finally { busy = false; }
  };
  text.addEventListener("input", load);
  state.addEventListener("input", load);
  return { update() { load(); } };
}

function decision(page) {
  const found = page.explanation;
  if (!found) return [h("p", { class: "empty" }, `No explanation: ${page.why_not}.`)];
  const actual = found.actual;
  const rows = found.candidates.map((each, i) => ({ class: i === 0 ? "chosen" : "", cells: [i === 0 ? "chosen" : String(i + 1), each.prefill, each.decode, count(each.hit_tokens), ms(each.queue_ms), ms(each.transfer_ms), ms(each.prefill_ms), ms(each.ttft_ms), ms(each.tbt_ms)] }));
  if (actual) rows.push({ cells: ["what came", "", "", count(actual.cached_tokens), "", "", "", ms(actual.ttft_ms), ms(actual.tbt_ms)] });
  const parts = [h("p", { id: "reason" }, found.reason), table(`The best of ${found.considered || found.candidates.length} candidates, and what came`,
    [{ title: "" }, { title: "Prefill on" }, { title: "Decode on" }, { title: "Hit tokens", num: true }, { title: "Queue", num: true }, { title: "Transfer", num: true }, { title: "Prefill", num: true }, { title: "TTFT", num: true }, { title: "TBT", num: true }], rows)];
  const others = found.others;
  if (others) parts.push(h("p", { class: "hint" }, `${others.candidates} others: TTFT from ${ms(others.least_ttft_ms)} over ${ms(others.median_ttft_ms)} to ${ms(others.most_ttft_ms)}.`));
  return parts;
}

function makeOne(holder, request) {
  const body = h("div", { id: "request" }, h("p", { class: "empty" }, "Reading."));
  holder.append(h("p", {}, h("a", { href: "#/requests" }, "All requests")), body);
  let busy = false, over = false;
  const load = async () => {
    if (busy || over) return;
    busy = true;
    try {
      const page = await get(`/admin/ui/requests/${encodeURIComponent(request)}`);
      const { detail } = page, { view } = detail;
      over = view.state !== "running" && Boolean(page.explanation && page.explanation.actual);
      const width = Math.max(320, body.clientWidth);
      body.replaceChildren(
        h("p", { class: "hint" }, view.request, view.gateway ? ` at ${view.gateway}` : ""),
        tiles([["State", view.state], ["Prompt", `${count(view.prompt_tokens)} tokens`], ["From the cache", `${count(view.cached_tokens)} (${percent(view.cached_tokens, view.prompt_tokens)})`], ["Output", `${count(view.output_tokens)} tokens`],
          ["TTFT", `${ms(view.ttft_ms)}`], ["Predicted TTFT", ms(view.predicted_ttft_ms)], ["TBT", ms(view.tbt_ms)], ["Total", ms(view.total_ms)]]),
        h("h2", {}, "Time"), detail.spans.length ? waterfall(detail, width) : h("p", { class: "empty" }, "Only the gateway that took a request knows its timeline; this one was taken elsewhere, or has just begun."),
        h("h2", {}, "Where the prompt's KV came from"), legend([["computed", "computed"], ["host", "DRAM of the same host"], ["remote", "DRAM of another node"], ["ssd", "SSD"]]),
        detail.origins.length ? origins(detail, width) : h("p", { class: "empty" }, "Not known here."),
        h("h2", {}, "Why it went there"), ...decision(page),
        h("h2", {}, "Marks"), table("In order", [{ title: "After", num: true }, { title: "What" }, { title: "Where" }, { title: "Words", wrap: true }],
          detail.marks.map((mark) => ({ cells: [ms(mark.at_ms), mark.kind.replaceAll("_", " "), mark.node || "", mark.text || ""] }))));
    } catch (error) { body.replaceChildren(h("p", { class: "error" }, error.message)); over = true; } finally { busy = false; }
  };
  return { update: load };
}

export const requests = {
  title: "Requests",
  make(holder, rest) { return rest.length ? makeOne(holder, rest[0]) : makeList(holder); },
};

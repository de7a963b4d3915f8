// TTFT and TBT against targets, what was admitted and refused, predictions against what came.
import { count, h, percent, table, tiles } from "./dom.js";
import { TimeChart, scatter } from "./charts.js";
import { get } from "./live.js";

export const targets = {
  title: "Targets",
  make(holder) {
    const ended = new TimeChart("Requests that ended, each second", [{ label: "met their targets", colour: "host", value: (p) => p.good }, { label: "late", colour: "warn", value: (p) => p.late },
      { label: "refused", colour: "remote", value: (p) => p.rejected }, { label: "failed", colour: "bad", value: (p) => p.failed }]);
    const ttft = new TimeChart("Median TTFT", [{ label: "TTFT", colour: "accent", value: (p) => p.ttft_ms }], { unit: " ms" });
    const tbt = new TimeChart("Median TBT", [{ label: "TBT", colour: "accent", value: (p) => p.tbt_ms }], { unit: " ms" });
    const open = new TimeChart("Open requests", [{ label: "open", colour: "soft", value: (p) => p.open_requests }]);
    const top = h("div"), pairs = h("div", { class: "charts", id: "pairs" }), why = h("div", { id: "verdicts" }), note = h("p", { class: "error" });
    holder.append(top, h("div", { class: "charts" }, ended.element, ttft.element, tbt.element, open.element), note, h("h2", {}, "Admitted and refused"), why, h("h2", {}, "Predicted against actual"), pairs);
    const load = async () => {
      try {
        const view = await get("/admin/ui/targets");
        note.textContent = view.missing;
        const rows = [...Object.entries(view.decisions), ...Object.entries(view.reasons).map(([name, n]) => [`refused: ${name}`, n])];
        why.replaceChildren(rows.length ? table("The last 500 decisions", [{ title: "Verdict" }, { title: "Decisions", num: true }], rows.map(([name, n]) => ({ cells: [name, count(n)] }))) : h("p", { class: "empty" }, "No decision is in the catalog yet."));
        pairs.replaceChildren(scatter("TTFT", view.ttft_pairs, "ms"), scatter("TBT", view.tbt_pairs, "ms"));
      } catch (error) { note.textContent = error.message; }
    };
    load();
    const timer = setInterval(() => { if (!document.hidden) load(); }, 5000);
    return {
      update(live) {
        const points = live.points, sum = (name) => points.reduce((total, point) => total + point[name], 0);
        const over_s = points.length > 1 ? points[points.length - 1].at_s - points[0].at_s : 0;
        top.replaceChildren(tiles([["Goodput", over_s ? `${(sum("good") / over_s).toFixed(2)} requests/s` : "–"], ["Met their targets", percent(sum("good"), sum("good") + sum("late") + sum("failed"))], ["Refused", count(sum("rejected"))], ["Failed", count(sum("failed"))],
          ["Over", `${Math.round(over_s)} s`]]));
        for (const chart of [ended, ttft, tbt, open]) chart.draw(points);
      },
      close() { clearInterval(timer); },
    };
  },
};

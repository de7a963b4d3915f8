// Reports of `kvtide plan` and `kvtide sim`, opened from disk. Nothing is uploaded.
import { h } from "./dom.js";

export const plan = {
  title: "Plan",
  make(holder) {
    const file = h("input", { id: "plan-file", type: "file", accept: ".html,.json,.md,.txt" }), shown = h("div", { id: "report" });
    let url = "";
    holder.append(h("p", {}, "Does a shared pool, and prefill apart from decode, pay for your workload? ", h("code", {}, "kvtide plan --help"), " says how to ask, with one of the shipped traces or with the gateway's own log; it writes a report that opens here or by itself."),
      h("div", { class: "bar" }, h("div", {}, h("label", { for: "plan-file" }, "A report on this computer"), file)), shown);
    file.addEventListener("change", async () => {
      const chosen = file.files[0];
      if (!chosen) return;
      if (url) URL.revokeObjectURL(url);
      if (chosen.name.endsWith(".html")) {
        url = URL.createObjectURL(chosen);
        shown.replaceChildren(h("iframe", { src: url, sandbox: "", title: `Report ${chosen.name}` }));
      } else {
        const text = await chosen.text();
        let pretty = text;
        try { pretty = JSON.stringify(JSON.parse(text), null, 2); } catch { /* shown as it is */ }
        shown.replaceChildren(h("h2", {}, chosen.name), h("pre", { class: "scroll", tabindex: "0" }, pretty));
      }
    });
    return { close() { if (url) URL.revokeObjectURL(url); } };
  },
};

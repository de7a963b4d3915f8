// Reports of `kvtide plan` and `kvtide sim`: made of the recent load here, or opened from disk.
import { count, h, table } from "./dom.js";
import { get, post } from "./live.js";

const SIDE_BY_SIDE = 8;

// a page of its own, in a sandbox: it may look as it likes, and do nothing
function framed(html, name) {
  const frame = h("iframe", { src: "report.html", sandbox: "allow-scripts", title: `Report ${name}` });
  addEventListener("message", function hand(event) {
    if (event.source !== frame.contentWindow) return;
    removeEventListener("message", hand);
    frame.contentWindow.postMessage(html, "*");
  });
  return frame;
}

function cell(value) {
  if (typeof value !== "number") return String(value ?? "–");
  if (Number.isInteger(value)) return count(value);
  return Math.abs(value) >= 100 ? count(value) : value.toPrecision(3);
}

// `kvtide sim run --json` and `hit-rates --json` are lists of rows with equal names; a few of
// them are read side by side
function figures(rows, name) {
  const names = Object.keys(rows[0]).filter((key) => typeof rows[0][key] !== "object" || rows[0][key] === null);
  const word = names.find((key) => typeof rows[0][key] === "string"), title = (key) => key.replaceAll("_", " ");
  if (rows.length > SIDE_BY_SIDE) {
    return [table(name, names.map((key) => ({ title: title(key), num: typeof rows[0][key] === "number" })), rows.map((row) => ({ cells: names.map((key) => cell(row[key])) })))];
  }
  const columns = rows.map((row, i) => ({ title: word ? row[word] : String(i + 1), num: true }));
  return [table(name, [{ title: "Figure" }, ...columns], names.filter((key) => key !== word).map((key) => ({ cells: [title(key), ...rows.map((row) => cell(row[key]))] })))];
}

function read(text, name) {
  if (name.endsWith(".html") || /^\s*<!doctype html/i.test(text)) return [framed(text, name)];
  try {
    const found = JSON.parse(text), rows = Array.isArray(found) ? found : Object.values(found).find((each) => Array.isArray(each));
    if (rows && rows.length && typeof rows[0] === "object" && rows[0] !== null && !Array.isArray(rows[0])) return figures(rows, name);
    return [h("pre", { class: "scroll", tabindex: "0" }, JSON.stringify(found, null, 2))];
  } catch { return [h("pre", { class: "scroll", tabindex: "0" }, text)]; }
}

function field(id, name, attributes) { return h("div", {}, h("label", { for: id }, name), h("input", { id, type: "number", required: true, ...attributes })); }

function makeForm(show) {
  const cluster = h("textarea", { id: "plan-cluster", class: "code", rows: 14, spellcheck: "false", required: true });
  const file = h("input", { id: "plan-cluster-file", type: "file", accept: ".toml" });
  const requests = field("plan-requests", "Newest requests", { min: 1, max: 2000, value: 500 }), rate = field("plan-rate", "Times as dense", { min: 0.01, max: 1000, step: "any", value: 1 });
  const ttft = field("plan-ttft", "TTFT target, ms", { min: 1, value: 30000 }), tbt = field("plan-tbt", "TBT target, ms", { min: 1, value: 200 });
  const run = h("button", { type: "submit" }, "Make a plan"), said = h("p", { id: "plan-said", role: "status" }), where = h("p", { class: "hint", id: "plan-log" }, "Reading.");
  const form = h("form", {}, where, h("div", { class: "bar" }, requests, rate, ttft, tbt),
    h("details", {}, h("summary", {}, "The cluster that would serve it"), h("div", { class: "bar" }, h("div", {}, h("label", { for: "plan-cluster-file" }, "From a file"), file)), h("label", { for: "plan-cluster" }, "In TOML"), cluster),
    h("p", {}, run), said);
  let limit_s = 0, timer = 0;
  get("/admin/ui/plan").then((start) => {
    cluster.value = start.cluster; limit_s = start.limit_s;
    where.textContent = start.log ? `The workload log is ${start.log}: times, lengths and salted ids of blocks, never text.${start.empty ? " Nothing is in it yet." : ""}`
      : "This gateway keeps no workload log. Give it the setting workload_log, the file to keep it in, and a plan can be made here.";
    run.disabled = !start.log;
  }).catch((error) => { where.textContent = error.message; where.className = "error"; });
  file.addEventListener("change", async () => { if (file.files[0]) cluster.value = await file.files[0].text(); });
  const value = (box) => Number(box.querySelector("input").value);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (run.disabled) return;
    run.disabled = true; said.className = "hint";
    const began = Date.now();
    said.textContent = `Making a plan; at most ${limit_s} s.`;
    timer = setInterval(() => { said.textContent = `Making a plan for ${Math.round((Date.now() - began) / 1000)} s; at most ${limit_s} s.`; }, 5000);
    try {
      const made = await post("/admin/ui/plan", { cluster: cluster.value, requests: value(requests), rate: value(rate), ttft_ms: value(ttft), tbt_ms: value(tbt) });
      said.textContent = `A plan of the newest ${count(made.requests)} requests:`;
      show([framed(made.html, "of the recent load")]);
    } catch (error) { said.textContent = error.message; said.className = "error"; } finally { clearInterval(timer); run.disabled = false; }
  });
  return { form, close() { clearInterval(timer); } };
}

export const plan = {
  title: "Plan",
  make(holder) {
    const file = h("input", { id: "plan-file", type: "file", accept: ".html,.json,.md,.txt" }), shown = h("div", { id: "report" });
    const show = (parts) => { shown.replaceChildren(...parts); shown.scrollIntoView(); };
    const made = makeForm(show);
    holder.append(h("p", {}, "Does a shared pool, and prefill apart from decode, pay for your workload?"),
      h("h2", {}, "Of what was served here"), made.form,
      h("h2", {}, "A report from this computer"), h("p", { class: "hint" }, "Of ", h("code", {}, "kvtide plan --html"), " or ", h("code", {}, "kvtide sim run --json"), "; nothing is uploaded."),
      h("div", { class: "bar" }, h("div", {}, h("label", { for: "plan-file" }, "Report"), file)), shown);
    file.addEventListener("change", async () => {
      const chosen = file.files[0];
      if (chosen) show([h("h2", {}, chosen.name), ...read(await chosen.text(), chosen.name)]);
    });
    return { close: made.close };
  },
};

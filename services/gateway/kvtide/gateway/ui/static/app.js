// Which page is shown, the theme, the key. A page is {title, make(holder, rest) → {update, close}}.
import { h } from "./dom.js";
import { followForEver, live, onKeyNeeded, onNews } from "./live.js";
import { cluster } from "./cluster.js";
import { requests } from "./requests.js";
import { cache } from "./cache.js";
import { targets } from "./targets.js";
import { chat } from "./chat.js";
import { plan } from "./plan.js";

const pages = { cluster, requests, cache, targets, chat, plan };
const main = document.getElementById("main");
let shown = { update() {}, close() {} };

function show() {
  const [, name = "cluster", ...rest] = location.hash.split("/");
  const page = pages[name] || pages.cluster;
  shown.close();
  main.replaceChildren(h("h1", {}, page.title));
  document.title = `${page.title} · kvtide`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${pages[name] ? name : "cluster"}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  shown = { update() {}, close() {}, ...page.make(main, rest.map(decodeURIComponent)) };
  shown.update(live);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
  try { localStorage.setItem("kvtide-theme", theme); } catch { /* private mode: not kept */ }
  shown.update(live);
}

function firstTheme() {
  try { const kept = localStorage.getItem("kvtide-theme"); if (kept) return kept; } catch { /* as below */ }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

onKeyNeeded(() => new Promise((done) => {
  const dialog = document.getElementById("key-dialog"), field = document.getElementById("key-field");
  field.value = "";
  dialog.addEventListener("close", () => done(field.value), { once: true });
  if (!dialog.open) dialog.showModal();
}));

onNews(() => {
  const status = document.getElementById("status");
  const text = live.state === "live" ? `live, ${live.nodes.size} nodes` : live.state;
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("bad", live.state !== "live");
  if (!document.hidden) shown.update(live);
});

document.getElementById("theme").addEventListener("click", () =>
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
addEventListener("hashchange", () => { show(); main.focus(); });
setTheme(firstTheme());
show();
followForEver();

// What the gateway says each second, folded into one picture that pages read.

const KEY = "kvtide-admin-key";
const KEPT_POINTS = 900, KEPT_HAPPENINGS = 200, SILENT_MS = 5000;

export const live = { nodes: new Map(), happenings: [], points: [], state: "connecting" };
const listeners = new Set();
let askForKey = async () => null;

export function onKeyNeeded(ask) { askForKey = ask; }
export function onNews(listener) { listeners.add(listener); return () => listeners.delete(listener); }
function tell() { for (const each of [...listeners]) each(live); }

export function headers(extra = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

export async function get(path) {
  const reply = await fetch(path, { headers: headers() });
  if (reply.status === 401 || reply.status === 403) { await needKey(); return get(path); }
  if (!reply.ok) throw new Error(await reason(reply));
  return reply.json();
}

export async function post(path, body) {
  const reply = await fetch(path, { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body) });
  if (reply.status === 401 || reply.status === 403) { await needKey(); return post(path, body); }
  if (!reply.ok) throw new Error(await reason(reply));
  return reply.json();
}

async function reason(reply) {
  try { return (await reply.json()).error.message; } catch { return `the gateway answered ${reply.status}`; }
}

async function needKey() {
  const key = await askForKey();
  if (!key) throw new Error("an admin key is needed");
  sessionStorage.setItem(KEY, key);
}

function fold(news) {
  const cluster = news.cluster;
  if (cluster.full) { live.nodes.clear(); live.happenings = []; }
  for (const node of cluster.gone) live.nodes.delete(node);
  for (const node of cluster.nodes) live.nodes.set(node.node, node);
  live.happenings = [...live.happenings, ...cluster.happenings].slice(-KEPT_HAPPENINGS);
  live.points = [...live.points, ...news.points].slice(-KEPT_POINTS);
}

async function follow() {
  const stop = new AbortController();
  let last = Date.now();
  const silent = new Error(`nothing heard for ${SILENT_MS / 1000} s; trying again`);
  const watchdog = setInterval(() => { if (Date.now() - last > SILENT_MS) stop.abort(silent); }, 1000);
  try {
    const reply = await fetch("/admin/ui/news", { headers: headers(), signal: stop.signal });
    if (reply.status === 401 || reply.status === 403) { await needKey(); return; }
    if (!reply.ok) throw new Error(await reason(reply));
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      last = Date.now();
      rest += value;
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) fold(JSON.parse(part.slice(6)));
      live.state = "live";
      tell();
    }
  } finally { clearInterval(watchdog); }
}

export async function followForEver() {
  for (;;) {
    try { await follow(); live.state = "reconnecting"; } catch (error) { live.state = `not connected: ${error.message}`; }
    tell();
    await new Promise((done) => setTimeout(done, 1000));
  }
}

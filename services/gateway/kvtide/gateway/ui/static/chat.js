// Try the system: each turn with its TTFT and how much of its prompt was in the cache.
import { h, ms, percent } from "./dom.js";
import { headers } from "./live.js";

const CLIENT_KEY = "kvtide-client-key";

function clientHeaders() {
  const key = sessionStorage.getItem(CLIENT_KEY);
  const all = { "content-type": "application/json" };
  return key ? { ...all, Authorization: `Bearer ${key}` } : headers(all);
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

async function ask(messages, most, onText) {
  const models = await (await fetch("/v1/models", { headers: clientHeaders() })).json();
  if (models.error) throw new Error(`${models.error.message} (a client key goes into the field above)`);
  const began = performance.now();
  const facts = { ttft_ms: null, usage: null, request: "", text: "" };
  const reply = await fetch("/v1/chat/completions", { method: "POST", headers: clientHeaders(),
    body: JSON.stringify({ model: models.data[0].id, messages, max_tokens: most, temperature: 0, stream: true, stream_options: { include_usage: true } }) });
  facts.request = reply.headers.get("x-request-id") || "";
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  for await (const event of events(reply)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) facts.usage = event.usage;
    const piece = event.choices && event.choices[0] && event.choices[0].delta.content;
    if (piece) {
      if (facts.ttft_ms === null) facts.ttft_ms = performance.now() - began;
      facts.text += piece;
      onText(facts.text);
    }
  }
  facts.total_ms = performance.now() - began;
  return facts;
}

export const chat = {
  title: "Chat",
  make(holder) {
    const messages = [];
    const turns = h("div", { class: "chat", id: "turns", "aria-live": "polite" });
    const text = h("textarea", { id: "chat-text", required: true }), most = h("input", { id: "chat-most", type: "number", min: 1, max: 4096, value: 64 });
    const key = h("input", { id: "chat-key", type: "password", autocomplete: "off", value: sessionStorage.getItem(CLIENT_KEY) || "" });
    const send = h("button", { type: "submit" }, "Send"), again = h("button", { type: "button", class: "quiet" }, "New conversation");
    const form = h("form", { class: "chat" }, h("div", {}, h("label", { for: "chat-text" }, "Your turn"), text),
      h("div", { class: "bar" }, h("div", {}, h("label", { for: "chat-most" }, "At most tokens"), most), h("div", {}, h("label", { for: "chat-key" }, "Client key, if one is needed"), key), send, again));
    holder.append(h("p", { class: "hint" }, "Each turn sends the whole conversation; what the pool has of it is not computed again. Compare the times of a long first turn and of the next one."), turns, form);
    key.addEventListener("change", () => { if (key.value) sessionStorage.setItem(CLIENT_KEY, key.value); else sessionStorage.removeItem(CLIENT_KEY); });
    again.addEventListener("click", () => { messages.length = 0; turns.replaceChildren(); text.focus(); });
    const turn = (who, words) => {
      const body = h("div", {}, words), facts = h("p", { class: "facts" });
      turns.append(h("section", { class: "turn", "aria-label": who }, h("h2", {}, who), body, facts));
      return { body, facts };
    };
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (!text.value.trim() || send.disabled) return;
      send.disabled = true;
      messages.push({ role: "user", content: text.value });
      turn("You", text.value);
      text.value = "";
      const mine = turn("Model", "…");
      try {
        const facts = await ask(messages, Number(most.value), (soFar) => { mine.body.textContent = soFar; });
        mine.body.textContent = facts.text;
        messages.push({ role: "assistant", content: facts.text });
        const cached = facts.usage && facts.usage.prompt_tokens_details ? facts.usage.prompt_tokens_details.cached_tokens : 0;
        const prompt = facts.usage ? facts.usage.prompt_tokens : 0;
        mine.facts.append(`TTFT ${ms(facts.ttft_ms)}, total ${ms(facts.total_ms)}; ${cached} of ${prompt} prompt tokens from the cache (${percent(cached, prompt)}). `,
          facts.request ? h("a", { href: `#/requests/${encodeURIComponent(facts.request)}` }, "Where and why") : "");
      } catch (error) {
        messages.pop();
        mine.body.replaceChildren(h("span", { class: "error" }, error.message));
      } finally { send.disabled = false; text.focus(); }
    });
    return {};
  },
};

// Small makers of elements. Text is always set as text, never parsed as HTML.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

export function table(caption, columns, rows) {
  const head = h("tr", {}, columns.map((c) => h("th", { scope: "col", class: c.num ? "num" : null }, c.title)));
  const body = rows.map((row) => h("tr", { class: row.class || null },
    row.cells.map((cell, i) => {
      const column = columns[i];
      const made = cell instanceof Node ? cell : document.createTextNode(cell === null || cell === undefined ? "" : String(cell));
      return h("td", { class: column.num ? "num" : column.wrap ? "wrap" : null }, made);
    })));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption), h("thead", {}, head), h("tbody", {}, body)));
}

export function tiles(pairs) {
  return h("dl", { class: "tiles" }, pairs.map(([name, value]) =>
    h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value))));
}

export function legend(names) {
  return h("ul", { class: "legend" }, names.map(([kind, text]) =>
    h("li", {}, h("span", { class: `swatch fill-${kind}`, "aria-hidden": "true" }), text)));
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count, unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 100 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`;
}

export function count(value) { return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"); }

export function percent(part, whole) { return whole ? `${(100 * part / whole).toFixed(1)} %` : "–"; }

export function clock(seconds) { return new Date(seconds * 1000).toLocaleTimeString("en-GB"); }

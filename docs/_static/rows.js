// A CSV that the page links to, as a table: filtered, sorted, summed up. Without this script the link is what there is.
"use strict";

const PAGE_ROWS = 100;
const SHORT = { "GiB": 2, "GB": 2, "MiB": 0, "tokens/s/GPU": 0, "s": 2 };
const COLUMNS = [
  { key: "run", title: "run", left: true },
  { key: "figure", title: "figure", left: true },
  { key: "published", title: "published", number: true },
  { key: "predicted", title: "predicted (range)", number: true },
  { key: "error", title: "error", number: true },
];
const FILTERS = ["figure", "stack", "kind", "hardware", "source", "round"];

function parse(text) {
  const rows = [];
  let row = [], cell = "", quoted = false;
  for (let i = 0; i < text.length; i++) {
    const c = text[i];
    if (quoted) {
      if (c === '"' && text[i + 1] === '"') { cell += '"'; i++; }
      else if (c === '"') quoted = false;
      else cell += c;
    } else if (c === '"') quoted = true;
    else if (c === "," || c === "\n") {
      row.push(cell);
      cell = "";
      if (c === "\n") { rows.push(row); row = []; }
    } else cell += c;
  }
  const [names, ...lines] = rows;
  return lines.map((line) => Object.fromEntries(names.map((name, i) => [name, line[i]])));
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

const percent = (share) => `${share < 0 ? "−" : "+"}${Math.abs(100 * share).toFixed(1)} %`;

function said(row, value) {
  return Number(value).toLocaleString("en", { maximumFractionDigits: SHORT[row.unit], minimumFractionDigits: SHORT[row.unit] });
}

function cells(row) {
  const about = [row.source, [row.stack, row.kind].filter(Boolean).join(", "), row.hardware].filter(Boolean).join(" · ");
  const run = element("td", { className: "left" }, element("div", {}, row.run), element("small", {}, about));
  const more = [row.model && `${row.model}, ${row.layout || "one rank"}`, row.first && `first answer ${said(row, row.first)}`, row.note, row.where];
  const notes = more.filter(Boolean).map((text) => element("p", {}, text));
  run.append(element("details", {}, element("summary", {}, "note"), ...notes));
  const range = row.low ? element("small", {}, `${said(row, row.low)} to ${said(row, row.high)}`) : "";
  const outside = row.inside === "no";
  return [
    run,
    element("td", { className: "left" }, row.figure),
    element("td", {}, said(row, row.published), element("small", {}, row.unit)),
    element("td", {}, row.predicted ? said(row, row.predicted) : "–", range),
    element("td", { className: outside ? "outside" : "", title: outside ? "outside the range" : "" }, Number.isNaN(row.error) ? "–" : percent(row.error)),
  ];
}

function show(place, rows) {
  let sort = { key: "error", down: true }, most = PAGE_ROWS;
  const search = element("input", { type: "search", placeholder: "search runs and notes", ariaLabel: "search runs and notes" });
  const selects = FILTERS.map((key) => {
    const values = [...new Set(rows.map((row) => row[key]))].filter(Boolean).sort();
    const options = values.map((value) => element("option", { value }, value));
    return [key, element("select", { ariaLabel: key }, element("option", { value: "" }, `every ${key}`), ...options)];
  });
  const outside = element("input", { type: "checkbox" });
  const counted = element("input", { type: "checkbox", checked: true });
  const summary = element("p", { className: "rows-summary", ariaLive: "polite" });
  const body = element("tbody");
  const more = element("button", { type: "button" }, "more rows");
  const heads = COLUMNS.map((column) => {
    const button = element("button", { type: "button" }, column.title);
    const head = element("th", { className: column.left ? "left" : "", scope: "col" }, button);
    button.addEventListener("click", () => {
      sort = { key: column.key, down: sort.key === column.key ? !sort.down : Boolean(column.number) };
      most = PAGE_ROWS;
      draw();
    });
    return head;
  });

  function chosen() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return rows.filter((row) =>
      selects.every(([key, select]) => !select.value || row[key] === select.value)
      && (!outside.checked || row.inside === "no")
      && (!counted.checked || row.residual)
      && words.every((word) => row.text.includes(word)));
  }

  function value(row) {
    if (sort.key === "error") return Math.abs(row.error);
    return COLUMNS.find((column) => column.key === sort.key).number ? Number(row[sort.key]) : row[sort.key];
  }

  function draw() {
    const found = chosen(), sign = sort.down ? -1 : 1;
    found.sort((one, other) => {
      const a = value(one), b = value(other);
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
      return a < b ? -sign : a > b ? sign : 0;
    });
    const errors = found.map((row) => Math.abs(row.error)).filter((error) => !Number.isNaN(error));
    const ranged = found.filter((row) => row.inside), inside = ranged.filter((row) => row.inside === "yes").length;
    const parts = [`${found.length.toLocaleString("en")} rows of ${new Set(found.map((row) => row.source)).size} publishers`];
    if (errors.length) parts.push(`median error ${(100 * median(errors)).toFixed(1)} %`, `worst ${(100 * Math.max(...errors)).toFixed(1)} %`);
    if (ranged.length) parts.push(`${inside} of ${ranged.length} inside their range`);
    summary.textContent = parts.join("; ");
    body.replaceChildren(...found.slice(0, most).map((row) => element("tr", {}, ...cells(row))));
    more.hidden = found.length <= most;
    heads.forEach((head, i) => {
      head.setAttribute("aria-sort", COLUMNS[i].key !== sort.key ? "none" : sort.down ? "descending" : "ascending");
    });
  }

  for (const control of [search, outside, counted, ...selects.map(([, select]) => select)]) {
    control.addEventListener("input", () => { most = PAGE_ROWS; draw(); });
  }
  more.addEventListener("click", () => { most += PAGE_ROWS; draw(); });
  place.append(
    element("div", { className: "rows-filters" }, search, ...selects.map(([, select]) => select),
      element("label", {}, outside, "outside their range"), element("label", {}, counted, "counted")),
    summary,
    element("div", { className: "rows-scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body)),
    more,
  );
  draw();
}

for (const place of document.querySelectorAll("[data-rows]")) {
  const link = document.querySelector(`a[href$="${place.dataset.rows}"]`);
  fetch(link.href).then((answer) => answer.text()).then((text) => {
    show(place, parse(text).map((row) => ({
      ...row,
      error: row.ratio ? Number(row.ratio) - 1 : NaN,
      text: [row.run, row.source, row.model, row.stack, row.note, row.where].join(" ").toLowerCase(),
    })));
  }).catch(() => place.append(element("p", {}, "The table needs a page that is served (python -m http.server), not a file.")));
}

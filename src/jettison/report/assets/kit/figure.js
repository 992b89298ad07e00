"use strict";
// A panel: title, controls, drawing, caption, table of the numbers, command line, and buttons that save.
J.figures = new Map(); // by id: {node, values(), svg()}, for those who save all of them
J.widths = new WeakMap(); // by what figures are in: asking each would lay out all figures before it

J.figure = ({ id, title, caption = "", controls = [], uses = [], draw, table = null, command = null, into = null }) => {
  const values = () => Object.fromEntries(controls.map((control) => [control.key, control.value()]));
  const drawing = J.el("div", { class: "drawing" });
  const notes = J.el("p", { class: "caption" });
  const heading = J.el("h2", { id: `${id}-title` }, title);
  const node = J.el("section", { class: "figure", id, "aria-labelledby": heading.id }, heading);
  if (controls.length) node.append(J.el("div", { class: "controls" }, controls.map((control) => control.node)));
  node.append(drawing, notes);

  const captionText = () => (typeof caption === "function" ? caption(values()) : caption);
  const svg = () => J.save.svg(drawing, title, captionText());
  const numbers = table && tableOf(id, title, () => table(values()));
  if (numbers) node.append(numbers.node);
  const line = command && commandOf(title);
  if (line) node.append(line.node);
  node.append(J.el(
    "div", { class: "buttons" },
    button("SVG", `Save ${title} as SVG`, () => J.save.download(`${id}.svg`, new Blob([svg()], { type: "image/svg+xml" }))),
    button("PNG", `Save ${title} as PNG`, async () => J.save.download(`${id}.png`, await J.save.pngBlob(svg()))),
    numbers && button("CSV", `Save the numbers of ${title} as CSV`, () => J.save.download(`${id}.csv`, new Blob([J.save.csv(table(values()))], { type: "text/csv" }))),
  ));

  let width = 0; // not yet drawn
  const redraw = () => {
    const now = values();
    J.width = Math.max(280, Math.floor(width ? drawing.clientWidth || width : J.widths.get(node.parentElement)));
    J.tip.hide();
    // who walks through a drawing by keyboard stays where they were when it is made anew
    const stops = [...drawing.querySelectorAll("[tabindex]")], place = stops.indexOf(document.activeElement);
    drawing.replaceChildren(draw(now, { width: J.width }));
    for (const svgNode of drawing.querySelectorAll("svg")) if (!svgNode.parentElement.closest("svg")) finish(svgNode, title);
    if (place >= 0) [...drawing.querySelectorAll("[tabindex]")][place]?.focus();
    notes.textContent = captionText();
    numbers?.show();
    line?.show(command(now));
  };

  (into ?? document.querySelector("main")).append(node);
  if (!J.widths.has(node.parentElement)) J.widths.set(node.parentElement, node.clientWidth || 640);
  const keys = new Set([...controls.map((control) => control.key), ...uses]);
  J.state.on((changed) => [...changed].some((key) => keys.has(key)) && redraw());
  redraw();
  width = J.width;
  new ResizeObserver(() => {
    const now = Math.max(280, Math.floor(drawing.clientWidth));
    if (drawing.clientWidth && now !== width) {
      width = now;
      redraw();
    }
  }).observe(drawing);
  J.figures.set(id, { node, values, svg, redraw });
  return node;

  function finish(svgNode, name) {
    J.marks.finish(svgNode);
    for (const group of svgNode.querySelectorAll("g[aria-label]:not([role])")) group.setAttribute("role", "group");
    if (svgNode.getAttribute("aria-hidden") === "true" || svgNode.querySelector("[tabindex]")) return;
    svgNode.setAttribute("role", "img");
    if (!svgNode.hasAttribute("aria-label")) svgNode.setAttribute("aria-label", `${name}; its numbers are in the table below`);
  }

  function button(text, label, act) {
    const made = J.el("button", { type: "button", "aria-label": label, onclick: async () => {
      try {
        await act();
      } catch (error) {
        made.textContent = `${text}: ${error.message}`;
      }
    } }, text);
    return made;
  }

  function tableOf(of, name, make) {
    const body = J.el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Numbers of ${name}` });
    const details = J.el("details", { ontoggle: () => show() }, J.el("summary", {}, "Numbers"), body);
    const show = () => {
      if (!details.open) return; // made when somebody looks
      body.replaceChildren(J.table(make()));
    };
    return { node: details, show };
  }

  function commandOf(name) {
    const code = J.el("code");
    const copy = J.el("button", { type: "button", "aria-label": `Copy the command line of ${name}`, onclick: async () => {
      copy.textContent = (await copied(code)) ? "copied" : "select and copy it";
      setTimeout(() => (copy.textContent = "copy"), 1500);
    } }, "copy");
    const row = J.el("div", { class: "command" }, J.el("span", { class: "prompt", "aria-hidden": "true" }, "$"), code, copy);
    return { node: row, show: (text) => {
      code.replaceChildren(...J.words(text ?? ""));
      row.hidden = !text;
    } };
  }

  async function copied(code) {
    try {
      await navigator.clipboard.writeText(code.textContent);
      return true;
    } catch {
      getSelection().selectAllChildren(code); // where a page may not write: it is selected at least
      return false;
    }
  }
};

// {columns: [name or {label, format}], rows}: numbers to the right, everything else to the left; no column without values.
J.table = ({ columns, rows }) => {
  const isUsed = columns.map((_, i) => i === 0 || !rows.length || rows.some((row) => ![null, undefined, ""].includes(row[i])));
  const heads = columns.map((column) => (typeof column === "string" ? { label: column } : column)), used = (list) => list.filter((_, i) => isUsed[i]);
  const right = heads.map((_, i) => rows.some((row) => typeof row[i] === "number"));
  const cell = (value, i) => {
    const text = value === null || value === undefined ? "" : (heads[i].format?.(value) ?? (typeof value === "number" && Number.isInteger(value) ? J.format.grouped(value) : String(value)));
    return J.el("td", { "data-head": heads[i].label, class: right[i] ? "number" : text.length > 40 ? "sentence" : text.length < 9 ? "short" : null }, text);
  };
  return J.el(
    "table", {},
    J.el("thead", {}, J.el("tr", {}, used(heads.map((head, i) => J.el(head.label ? "th" : "td", { scope: head.label ? "col" : null, class: right[i] ? "number" : null }, head.label))))),
    J.el("tbody", {}, rows.map((row) => J.el("tr", {}, used(row.map(cell))))),
  );
};

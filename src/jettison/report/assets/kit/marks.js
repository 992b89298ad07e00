"use strict";
// What tells series apart beside colour: dashes, symbols, hatches. Numbers start at 0 and go round.
J.color = (index) => `var(--c${(((index % 8) + 8) % 8) + 1})`;

J.marks = (() => {
  const dashes = ["none", "7 3", "2 2.5", "9 3 2 3", "4 2", "12 4", "1 4", "7 2 1 2 1 2"];
  const symbols = ["circle", "square", "triangle", "diamond2", "plus", "times", "star", "wye"];
  const kinds = ["solid", "diagonal", "dots", "cross", "horizontal", "back", "vertical", "grid"];
  const lines = {
    diagonal: "M-2,2l4,-4M0,8l8,-8M6,10l4,-4",
    back: "M-2,6l4,4M0,0l8,8M6,-2l4,4",
    cross: "M-2,2l4,-4M0,8l8,-8M6,10l4,-4M-2,6l4,4M0,0l8,8M6,-2l4,4",
    horizontal: "M0,2h8M0,6h8",
    vertical: "M2,0v8M6,0v8",
    grid: "M0,4h8M4,0v8",
  };
  const made = new Map(); // "kind|color" -> {kind, color}, by the number in its id
  const around = (list) => (index) => list[((index % list.length) + list.length) % list.length];

  // A fill, for an attribute or a range of a colour scale; the pattern comes into the drawing that uses it.
  const hatch = (kind, color) => {
    const name = typeof kind === "number" ? around(kinds)(kind) : kind;
    if (name === "solid") return color;
    const key = `${name}|${color}`;
    if (!made.has(key)) made.set(key, { id: `hatch-${made.size + 1}`, name, color });
    return `url(#${made.get(key).id})`;
  };
  const pattern = ({ name, color }, id) => {
    const ground = J.el("svg:rect", { width: 8, height: 8, fill: color, "fill-opacity": 0.28 });
    const drawn =
      name === "dots"
        ? [[2, 2], [6, 6]].map(([cx, cy]) => J.el("svg:circle", { cx, cy, r: 1.4, fill: color }))
        : [J.el("svg:path", { d: lines[name], stroke: color, "stroke-width": 1.6, fill: "none" })];
    return J.el("svg:pattern", { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" }, ground, drawn);
  };
  let uses = 0;
  // Put into each drawing the patterns that it refers to, under names that no other has.
  const finish = (svg) => {
    const here = new Map(), found = new Map([...made.values()].map((entry) => [`url(#${entry.id})`, entry]));
    for (const node of [svg, ...svg.querySelectorAll("*")]) {
      for (const name of ["fill", "stroke"]) {
        const entry = found.get(node.getAttribute(name));
        if (!entry) continue;
        if (!here.has(entry)) here.set(entry, `use-${(uses += 1)}-${entry.id}`);
        node.setAttribute(name, `url(#${here.get(entry)})`);
      }
    }
    if (here.size) svg.prepend(J.el("svg:defs", {}, [...here].map(([entry, id]) => pattern(entry, id))));
    return svg;
  };
  return { dashes, symbols, kinds, dash: around(dashes), symbol: around(symbols), hatch, finish };
})();

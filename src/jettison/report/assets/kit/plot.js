"use strict";
// Observable Plot with our defaults, and what it does not have: legends inside the drawing, and reading by keyboard.
J.width = 640; // of the panel that is being drawn

J.plot = (options) => {
  const width = options.width ?? J.width;
  const made = Plot.plot({
    width,
    height: Math.round(Math.min(420, Math.max(240, width * 0.52))),
    marginLeft: 64,
    marginRight: 20,
    marginTop: 28,
    marginBottom: 42,
    ...options,
    style: {
      background: "transparent", color: "var(--ink)", fontFamily: "var(--font)", fontSize: "12px", overflow: "visible",
      ...options.style,
    },
  });
  // Plot names its groups, which have no role that could carry a name
  for (const group of made.querySelectorAll("g[aria-label]:not([role])")) group.removeAttribute("aria-label");
  return made;
};

// Scale options of an axis of bytes from 0 to a maximum.
J.byteAxis = (label, most, count) => ({
  label, domain: [0, most], ticks: J.byteTicks(most, count), tickFormat: J.format.tick, grid: true,
});

// Names with what they look like: entries are {label, color, dash, symbol, hatch, line}. An SVG element, to stand above a drawing.
J.legend = (entries, { width = J.width } = {}) => {
  let x = 0, y = 12;
  const parts = [];
  for (const entry of entries) {
    const wide = 30 + entry.label.length * 7 + 14;
    if (x > 0 && x + wide > width) [x, y] = [0, y + 20];
    const color = entry.color ?? "currentColor";
    if (entry.line || entry.dash !== undefined) {
      const dash = entry.dash ?? "none";
      parts.push(J.el("svg:line", { x1: x, x2: x + 22, y1: y, y2: y, stroke: color, "stroke-width": 2, "stroke-dasharray": dash }));
    }
    if (entry.symbol) {
      const shape = d3.symbol(Plot[`symbol${entry.symbol}`] ?? d3[`symbol${entry.symbol[0].toUpperCase()}${entry.symbol.slice(1)}`] ?? d3.symbolCircle, 50);
      parts.push(J.el("svg:path", { d: shape(), transform: `translate(${x + 11},${y})`, fill: entry.fill ?? color, stroke: color }));
    }
    if (!entry.line && entry.dash === undefined && !entry.symbol) {
      const fill = entry.hatch === undefined ? color : J.marks.hatch(entry.hatch, color);
      parts.push(J.el("svg:rect", { x: x + 2, y: y - 7, width: 18, height: 14, fill, stroke: color }));
    }
    parts.push(J.el("svg:text", { x: x + 28, y, dy: "0.35em", fill: "currentColor" }, entry.label));
    x += wide;
  }
  return J.el("svg:svg", { class: "legend", width, height: y + 12, viewBox: `0 0 ${width} ${y + 12}`, "aria-hidden": "true" }, parts);
};

// One tab stop for many elements: arrow keys walk between them, Home and End to the first and last. Whatever has the
// focus or the pointer says what it is, in text(node).
J.rove = (container, nodes, text) => {
  if (!nodes.length) return container;
  const middle = (node) => {
    const box = node.getBoundingClientRect();
    return [box.x + box.width / 2, box.y + box.height / 2];
  };
  const beside = (from, key) => {
    const [x, y] = middle(from), across = key === "ArrowLeft" || key === "ArrowRight";
    const sign = key === "ArrowRight" || key === "ArrowDown" ? 1 : -1;
    let best = null, least = Infinity;
    for (const node of nodes) {
      const [u, v] = middle(node), ahead = sign * (across ? u - x : v - y), aside = Math.abs(across ? v - y : u - x);
      if (ahead > 0.5 && ahead + 4 * aside < least) [best, least] = [node, ahead + 4 * aside];
    }
    return best;
  };
  const hide = () => J.tip.hide();
  nodes.forEach((node, i) => {
    node.setAttribute("tabindex", i === 0 ? "0" : "-1");
    if (!node.hasAttribute("role")) node.setAttribute("role", "img");
    node.setAttribute("aria-label", text(node));
    node.addEventListener("focus", () => {
      for (const other of nodes) other.setAttribute("tabindex", other === node ? "0" : "-1");
      J.tip.show(node, text(node));
    });
    node.addEventListener("blur", hide);
    node.addEventListener("pointerenter", () => J.tip.show(node, text(node)));
    node.addEventListener("pointerleave", hide);
    node.addEventListener("keydown", (event) => {
      const next = { Home: nodes[0], End: nodes[nodes.length - 1] }[event.key] ?? (event.key.startsWith("Arrow") ? beside(node, event.key) : null);
      if (event.key === "Escape") hide();
      if (!next) return;
      event.preventDefault();
      next.focus();
    });
  });
  return container;
};

J.tip = (() => {
  let node = null;
  return {
    show(target, text) {
      node ??= document.body.appendChild(J.el("div", { class: "tip", "aria-hidden": "true" }));
      node.textContent = text;
      node.hidden = false;
      const box = target.getBoundingClientRect(), own = node.getBoundingClientRect();
      const left = Math.max(4, Math.min(box.x + box.width / 2 - own.width / 2, document.documentElement.clientWidth - own.width - 4));
      const above = box.y - own.height - 6;
      node.style.left = `${left + scrollX}px`;
      node.style.top = `${(above > 0 ? above : box.bottom + 6) + scrollY}px`;
    },
    hide() {
      if (node) node.hidden = true;
    },
  };
})();

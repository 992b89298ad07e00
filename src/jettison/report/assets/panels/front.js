"use strict";
// The front: step time against budget over exact plans; the plan at a budget as a grid; what flips, what a GiB is worth.
(() => {
  const data = J.data("front"), GIB = 2 ** 30;
  const names = data.models.map((m) => m.name);
  const model = J.select({ key: "front-model", label: "Model", options: names, value: names[0] });
  const way = J.select({ key: "front-way", label: "Tensors may be", options: data.models[0].ways.map((w, i) => ({ value: i, label: w.label })), value: 1 });
  const all = [...new Set(data.models.flatMap((m) => m.ways.flatMap((w) => w.points.map((p) => p.budget))))].sort((a, b) => a - b);
  const budget = J.slider({ key: "front-budget", label: "Budget", values: all, value: all[Math.floor(all.length / 3)], format: J.format.bytes });
  const PLACES = { k: { label: "kept", color: "var(--keep)", hatch: "solid" }, a: { label: "recomputed", color: "var(--again)", hatch: "diagonal" }, h: { label: "offloaded", color: "var(--host)", hatch: "dots" } };
  const find = (values) => {
    const m = data.models.find((one) => one.name === values["front-model"]), w = m.ways[values["front-way"]];
    const fitting = w.points.filter((p) => p.budget <= values["front-budget"]);
    const index = Math.max(0, fitting.length - 1);
    return { m, w, index, point: w.points[index], below: fitting.length === 0 };
  };
  const price = (w, index) => {
    const here = w.points[index], next = w.points[index + 1];
    return next ? (here.seconds - next.seconds) / ((next.budget - here.budget) / GIB) : 0;
  };
  const cells = (w, point) => point.grid.flatMap(([count, pattern]) => Array(count).fill(w.patterns[pattern]));
  J.frontPanel = { find, price };

  const draw = (values, { width }) => {
    const { m, w, point, index } = find(values);
    const lines = m.ways.flatMap((each, i) => each.points.map((p) => ({ ...p, i, way: each.label })));
    const [least, most] = d3.extent(lines, (p) => p.budget), near = m.available_bytes >= least && m.available_bytes < 2 * most;
    const chart = J.plot({
      width, height: Math.min(300, Math.max(230, width * 0.4)), marginLeft: 56,
      x: { label: "Budget (GiB) →", grid: true }, y: { label: "↑ Modelled step time of the busiest stage (s)", grid: true, nice: true },
      marks: [
        ...(near ? [
          Plot.ruleX([m.available_bytes / GIB], { stroke: "var(--limit)", strokeDasharray: "7 3" }),
          Plot.text([`${m.gpu} leaves ${J.format.bytes(m.available_bytes)}`], { x: m.available_bytes / GIB, frameAnchor: "top", textAnchor: "end", dx: -5, dy: 2, fill: "currentColor" }),
        ] : []),
        ...m.ways.map((each, i) => Plot.line(lines.filter((p) => p.i === i), { x: (p) => p.budget / GIB, y: "seconds", stroke: J.color(i ? 2 : 1), strokeWidth: 2, strokeDasharray: J.marks.dash(i ? 0 : 1), curve: "step-after" })),
        ...m.ways.map((each, i) => Plot.dot(lines.filter((p) => p.i === i), { x: (p) => p.budget / GIB, y: "seconds", symbol: i ? "circle" : "square", r: 3, fill: J.color(i ? 2 : 1), className: `front-dots-${i}` })),
        Plot.ruleX([point.budget / GIB], { stroke: "var(--ink)" }),
        Plot.dot([point], { x: (p) => p.budget / GIB, y: "seconds", r: 7, stroke: "var(--ink)", strokeWidth: 2 }),
      ],
    });
    const legend = J.legend(m.ways.map((each, i) => ({ label: each.label, color: J.color(i ? 2 : 1), dash: J.marks.dash(i ? 0 : 1), symbol: i ? "circle" : "square" })), { width });
    drag(chart, m, w);
    const nodes = [...chart.querySelectorAll("[class^=front-dots] circle, [class^=front-dots] path")];
    J.rove(chart, nodes, (node) => {
      const p = lines[nodes.indexOf(node)];
      return `${p.way}\nbudget ${J.format.exact(p.budget)}\nstep ${J.format.seconds(p.seconds)}, peak ${J.format.bytes(p.peak)}, offloaded ${J.format.bytes(p.host)}`;
    });
    nodes.forEach((node, i) => node.addEventListener("click", () => {
      J.state.set("front-way", lines[i].i);
      J.state.set("front-budget", lines[i].budget);
    }));
    return J.el("div", {}, legend, chart, said(w, index), grid(m, w, point, width));
  };

  // The budget is dragged in the drawing, too.
  function drag(chart, m, w) {
    const x = chart.scale("x"), svgNode = chart.tagName === "svg" ? chart : chart.querySelector("svg");
    svgNode.style.touchAction = "pan-y";
    svgNode.style.cursor = "ew-resize";
    const at = (event) => {
      const box = svgNode.getBoundingClientRect(), gib = x.invert((event.clientX - box.x) * (svgNode.viewBox.baseVal.width / box.width));
      const nearest = w.points.reduce((best, p) => (Math.abs(p.budget / GIB - gib) < Math.abs(best.budget / GIB - gib) ? p : best));
      J.state.set("front-budget", nearest.budget);
    };
    svgNode.addEventListener("pointerdown", (event) => {
      at(event);
      const move = (e) => at(e), up = () => {
        removeEventListener("pointermove", move);
        removeEventListener("pointerup", up);
        removeEventListener("pointercancel", up);
      };
      addEventListener("pointermove", move);
      addEventListener("pointerup", up);
      addEventListener("pointercancel", up);
    });
  }

  function said(w, index) {
    const point = w.points[index], worth = price(w, index);
    const words = point.flips.map(([tensor, before, after, layers, nbytes]) => `${tensor}: ${before} → ${after} in ${layers} layer${layers === 1 ? "" : "s"} (${J.format.bytes(nbytes)})`);
    if (point.more) words.push(`${point.more} more`);
    return J.el("div", { class: "caption" },
      J.el("p", { id: "front-price" }, `At ${J.format.bytes(point.budget)} a step takes ${J.format.seconds(point.seconds)} as modelled, of each micro-batch ${J.format.seconds(point.again)} of recomputation and ${J.format.seconds(point.stalled)} waiting for transfers; ${J.format.bytes(point.host)} offloaded to CPU. The next GiB is worth ${J.format.seconds(worth)} a step.`),
      J.el("p", {}, index ? `Changed from the next smaller budget (${J.format.bytes(w.points[index - 1].budget)}): ${words.join("; ") || "nothing"}.` : "The smallest budget that any plan fits."));
  }

  function grid(m, w, point, width) {
    const rows = cells(w, point), narrow = width < 620, left = narrow ? 108 : 190, top = 26, size = Math.min(28, (width - left - 4) / rows.length), high = 17;
    const height = top + w.tensors.length * high + 22;
    const node = J.el("svg:svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "The plan: layers by tensors" });
    const stops = [];
    w.tensors.forEach((tensor, t) => {
      const y = top + t * high;
      node.append(J.el("svg:text", { x: left - 6, y: y + 12, "text-anchor": "end", fill: "currentColor", "font-size": narrow ? 10 : 12 }, narrow ? tensor.name : `${tensor.name}, ${J.format.bytes(tensor.nbytes)}`));
      let from = 0; // neighbours that do the same are one cell with lines between the layers
      for (let l = 1; l <= rows.length; l += 1) {
        if (l < rows.length && rows[l][t] === rows[from][t]) continue;
        const place = PLACES[rows[from][t]];
        if (place) {
          const span = l - from === 1 ? m.layers[from] : `${m.layers[from]} to ${m.layers[l - 1]}`;
          const rect = J.el("svg:rect", { x: left + from * size, y, width: (l - from) * size, height: high - 2, fill: J.marks.hatch(place.hatch, place.color), stroke: place.color, "data-text": `${tensor.name}, ${J.format.exact(tensor.nbytes)} a layer\n${place.label} in ${span}` });
          node.append(rect);
          stops.push(rect);
        }
        from = l;
      }
    });
    const each = Math.max(1, Math.ceil(rows.length / Math.max(2, (width - left) / 40)));
    for (let l = 0; l < rows.length; l += each) node.append(J.el("svg:text", { x: left + (l + 0.5) * size, y: top - 4, "text-anchor": "middle", fill: "currentColor", "font-size": 10 }, String(l)));
    node.append(J.el("svg:text", { x: left - 6, y: 11, "text-anchor": "end", fill: "currentColor" }, "layer →"));
    const legend = J.legend(Object.values(PLACES).map((place) => ({ label: place.label, color: place.color, hatch: place.hatch })), { width });
    return J.el("div", {}, legend, J.rove(node, stops, (stop) => stop.dataset.text));
  }

  const table = (values) => {
    const { w } = find(values);
    return {
      columns: [{ label: "budget", format: J.format.exact }, { label: "peak", format: J.format.exact }, { label: "step", format: J.format.seconds }, { label: "recomputed, a micro-batch", format: J.format.seconds }, { label: "waiting for transfers", format: J.format.seconds }, { label: "offloaded", format: J.format.exact }, { label: "the next GiB saves", format: J.format.seconds }, { label: "gap", format: J.format.percent }],
      rows: w.points.map((p, i) => [p.budget, p.peak, p.seconds, p.again, p.stalled, p.host, price(w, i), p.gap]),
    };
  };
  J.figure({
    id: "front", title: "Pareto front: memory against step time", controls: [model, way, budget], draw, table,
    caption: (values) => {
      const { m, w, below } = find(values);
      return `${m.name} (${m.layout}) on ${m.gpu}, which leaves ${J.format.bytes(m.available_bytes)} for tensors. Each point is a plan. ${below ? `The budget is below the smallest feasible one, ${J.format.bytes(w.minimum_bytes)}, which is shown. ` : ""}Step time is as modelled: compute, recomputation and waiting for transfers on the busiest stage, without communication and bubbles. The command states the expected one, with its range.`;
    },
    command: (values) => {
      const { w, point } = find(values);
      return `${w.command} --budget ${point.budget}B`;
    },
  });
})();

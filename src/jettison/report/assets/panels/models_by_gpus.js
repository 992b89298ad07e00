"use strict";
// Models by GPUs under a layout, with the margin; a sign and a figure in every cell.
(() => {
  const data = J.data("fit");
  const layout = J.select({ key: "fit-layout", label: "Layout", options: data.layouts.map((l) => l.name), value: data.layouts[3].name });
  const mode = J.select({ key: "fit-mode", label: "Recompute", options: data.modes, value: data.modes[data.modes.length - 1] });
  const picked = J.select({ key: "fit-model", label: "Command line of", options: data.models, value: data.models[0] });
  const device = J.select({ key: "fit-gpu", label: "on", options: data.gpus.map((gpu) => gpu.name), value: data.gpus[data.gpus.length - 1].name });
  const find = (values) => data.layouts.find((l) => l.name === values["fit-layout"]);
  const SIGNS = { // the first three in the order of the verdicts of predict/ranges.py
    fits: { sign: "✓", label: "fits", color: "var(--host)", hatch: "solid" },
    close: { sign: "≈", label: "too close to call", color: "var(--c5)", hatch: "dots" },
    not: { sign: "✗", label: "does not fit", color: "var(--limit)", hatch: "diagonal" },
    never: { sign: "✗✗", label: "not even without activations", color: "var(--limit)", hatch: "cross" },
    none: { sign: "–", label: "does not divide", color: "var(--soft)", hatch: "horizontal" },
  };
  const judge = (peak, g, available) => {
    if (typeof peak === "string") return "none";
    const found = ["fits", "close", "not"][peak[3][g]];
    return found === "not" && peak[1] > available ? "never" : found;
  };
  const cellsOf = (values) => {
    const l = find(values), peaks = l.peaks[values["fit-mode"]];
    return data.models.flatMap((model, m) => data.gpus.map((gpu, g) => ({ model, m, gpu: gpu.name, g, peak: peaks[m], available: l.available[g], verdict: judge(peaks[m], g, l.available[g]) })));
  };
  const text = (cell) => (cell.verdict === "none"
    ? `${cell.model}: ${cell.peak}`
    : `${cell.model} on ${cell.gpu}: ${SIGNS[cell.verdict].label}\npeak ${J.format.exact(cell.peak[0])}\navailable ${J.format.exact(cell.available)}\nmargin ${J.format.bytes(cell.available - cell.peak[0])}`);
  const gib = (n) => (Math.abs(n) >= 99.5 * 2 ** 30 ? (n / 2 ** 30).toFixed(0) : (n / 2 ** 30).toFixed(1));

  const draw = (values, { width }) => {
    const cells = cellsOf(values), narrow = width < 620, left = narrow ? 84 : 120, top = narrow ? 96 : 40, high = narrow ? 42 : 40;
    const wide = (width - left) / data.gpus.length, height = top + data.models.length * high + 4;
    const node = J.el("svg:svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Models by GPUs" });
    data.gpus.forEach((gpu, g) => {
      const x = left + (g + 0.5) * wide, [name, size] = [gpu.name.replace(/-[^-]*$/, ""), gpu.name.split("-").at(-1).replace("gb", " GB")];
      node.append(narrow
        ? J.el("svg:text", { x: 0, y: 0, transform: `translate(${x + 4},${top - 6}) rotate(-90)`, fill: "currentColor", "font-size": 11 }, `${name} ${size}`)
        : J.el("svg:text", { x, y: top - 22, "text-anchor": "middle", fill: "currentColor" }, name, J.el("svg:tspan", { x, dy: 15, fill: "var(--soft)" }, size)));
    });
    data.models.forEach((model, m) => node.append(J.el("svg:text", { x: left - 8, y: top + (m + 0.5) * high, dy: "0.32em", "text-anchor": "end", fill: "currentColor", "font-size": narrow ? 11 : 12 }, model)));
    const stops = cells.map((cell) => {
      const look = SIGNS[cell.verdict], x = left + cell.g * wide, y = top + cell.m * high;
      const rect = J.el("svg:rect", { x: x + 1.5, y: y + 1.5, width: wide - 3, height: high - 3, rx: 3, fill: J.marks.hatch(look.hatch, look.color), "fill-opacity": look.hatch === "solid" ? 0.25 : 0.42, stroke: look.color });
      const margin = cell.verdict === "none" ? "" : `${cell.available - cell.peak[0] >= 0 ? "+" : "−"}${gib(Math.abs(cell.available - cell.peak[0]))}`;
      const over = { "text-anchor": "middle", fill: "var(--ink)", stroke: "var(--paper)", "stroke-width": 3.5, "paint-order": "stroke", "pointer-events": "none" };
      node.append(rect,
        J.el("svg:text", { ...over, x: x + wide / 2, y: y + (margin ? 16 : high / 2 + 4), "font-weight": 650 }, look.sign),
        J.el("svg:text", { ...over, x: x + wide / 2, y: y + 31, "font-size": narrow ? 10 : 12 }, margin));
      return rect;
    });
    const legend = J.legend(Object.values(SIGNS).map((look) => ({ label: `${look.sign} ${look.label}`, color: look.color, hatch: look.hatch })), { width });
    return J.el("div", {}, legend, J.rove(node, stops, (stop) => text(cells[stops.indexOf(stop)])));
  };
  const table = (values) => ({
    columns: ["model", "GPU", "verdict", { label: "peak", format: J.format.exact }, { label: "available", format: J.format.exact }, { label: "margin", format: J.format.exact }, "peak in"],
    rows: cellsOf(values).map((cell) => (cell.verdict === "none"
      ? [cell.model, cell.gpu, cell.peak, null, null, null, ""]
      : [cell.model, cell.gpu, SIGNS[cell.verdict].label, cell.peak[0], cell.available, cell.available - cell.peak[0], cell.peak[2]])),
  });
  J.figure({
    id: "fit", title: "Models by GPUs", controls: [layout, mode, picked, device], draw, table,
    caption: (values) => `Margins in GiB: memory for tensors (usable memory less context, communicators, workspace and fragments) less the peak of the worst rank. The sign is the verdict of the 80 % range of device memory. ${values["fit-layout"]}; one micro-batch of one sequence of each model's default length; recompute: ${values["fit-mode"]}.`,
    command: (values) => `${find(values).commands[data.models.indexOf(values["fit-model"])]} --gpu ${values["fit-gpu"]} --recompute ${values["fit-mode"]}`,
  });
})();

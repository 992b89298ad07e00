"use strict";
// The step: every stage's passes on one clock, its bytes below, the peak broken down, copies to and from the host.
(() => {
  const data = J.data("step"), names = data.layouts.map((layout) => layout.name);
  const layoutOf = J.select({ key: "step-layout", label: "Layout", options: names, value: names[0] });
  const first = J.select({ key: "step-number", label: "Step", options: [{ value: 1, label: "step 1 and later" }, { value: 0, label: "step 0, before optimizer state" }], value: 1 });
  const PARTS = [
    { name: "parameters", color: 7, hatch: "solid" },
    { name: "optimizer state", color: 5, hatch: "horizontal" },
    { name: "gradients", color: 4, hatch: "cross" },
    { name: "saved activations", color: 0, hatch: "diagonal" },
    { name: "transients", color: 1, hatch: "dots" },
  ];
  const fill = (part) => J.marks.hatch(part.hatch, J.color(part.color));
  const find = (values) => data.layouts.find((layout) => layout.name === values["step-layout"]);

  // All stretches of a stage: bytes that the planner's side laid down, put one beside the other.
  const known = new Map();
  const instants = (stage) => {
    if (known.has(stage)) return known.get(stage);
    const found = [];
    for (const [back, batch, chunk, start, end, profile, held, gradients] of stage.passes) {
      let before = 0;
      for (const [where, share, over, made, transient] of stage.profiles[profile].units) {
        found.push({ start: start + before * (end - start), end: start + share * (end - start), where, batch, chunk, phase: back ? "backward" : "forward", parts: [stage.fixed, stage.state, gradients + made, held + over, transient] });
        before = share;
      }
    }
    found.push({ start: stage.optimizer[0], end: stage.optimizer[1], where: "", batch: -1, chunk: 0, phase: "optimizer", parts: [stage.fixed, stage.state, stage.gradients, 0, stage.transient] });
    known.set(stage, found);
    return found;
  };
  const partsOf = (instant, step) => instant.parts.map((nbytes, i) => (i === 1 && step === 0 && instant.phase !== "optimizer" ? 0 : nbytes));
  const total = (parts) => parts.reduce((sum, n) => sum + n, 0);
  const peakOf = (stage, step) => instants(stage).reduce((best, i) => {
    const n = total(partsOf(i, step));
    return n > best.nbytes ? { instant: i, nbytes: n, parts: partsOf(i, step) } : best;
  }, { nbytes: -1 });
  const place = (i) => (i.phase === "optimizer" ? "optimizer step" : `${i.phase} of ${i.where}, micro-batch ${i.batch}`);
  J.stepPanel = { instants, partsOf, peakOf, find };

  const svg = (tag, attributes, ...children) => J.el(`svg:${tag}`, attributes, ...children);
  const LANE = 24, BYTES = 84, GAP = 12, LEFT = 62, HEAD = 14;

  const draw = (values, { width }) => {
    const layout = find(values), step = values["step-number"], moved = layout.stages.some((stage) => stage.copies.length);
    const x = d3.scaleLinear([0, layout.step_seconds], [LEFT, width - 8]);
    const most = Math.max(layout.usable_bytes * 1.04, ...layout.stages.map((stage) => peakOf(stage, step).nbytes * 1.04));
    const each = HEAD + LANE + BYTES + GAP + (moved ? 52 : 0);
    const height = layout.stages.length * each + 40;
    const node = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `Step of ${layout.name}` });
    const stops = [];
    layout.stages.forEach((stage, s) => {
      const top = s * each, lane = top + HEAD, peak = peakOf(stage, step);
      const y = d3.scaleLinear([0, most], [lane + LANE + 4 + BYTES, lane + LANE + 4]);
      node.append(svg("text", { x: 0, y: top + 10, fill: "currentColor", "font-weight": 600 }, `stage ${s}: ${width < 560 ? "" : "peak "}${J.format.bytes(peak.nbytes)}, ${width < 560 ? place(peak.instant).split(",")[0] : place(peak.instant)}`));
      drawLane(node, stops, stage, s, lane, x);
      drawBytes(node, stage, step, x, y, layout, peak, width);
      walkBytes(node, stops, stage, step, s, x, y, peak);
      if (moved) drawCopies(node, stops, stage, s, lane + LANE + BYTES + 10, x);
    });
    drawClock(node, x, layout, height, width);
    const legend = J.legend([
      { label: "forward", color: J.color(0) }, { label: "backward", color: J.color(2), hatch: "back" }, { label: "recomputed", color: "var(--again)", hatch: "vertical" }, { label: "optimizer", color: J.color(5), hatch: "grid" },
      ...PARTS.map((part) => ({ label: part.name, color: J.color(part.color), hatch: part.hatch })),
      { label: `memory of the GPU, ${J.format.bytes(layout.usable_bytes)}`, color: "var(--limit)", dash: "7 3" },
      ...(moved ? [{ label: "offload", color: "var(--host)" }, { label: "prefetch", color: "var(--host)", hatch: "diagonal" }] : []),
    ], { width });
    return J.el("div", {}, legend, J.rove(node, stops, (stop) => stop.dataset.text), apart(layout, step, width));
  };

  function drawLane(node, stops, stage, s, top, x) {
    node.append(svg("text", { x: LEFT - 6, y: top + LANE / 2, dy: "0.35em", "text-anchor": "end", fill: "currentColor" }, "passes"));
    const slice = (start, end, color, hatch, text, label) => {
      const rect = svg("rect", { x: x(start), y: top, width: Math.max(0.6, x(end) - x(start)), height: LANE - 2, fill: J.marks.hatch(hatch, color), stroke: color, "stroke-width": 0.8, "data-text": text });
      node.append(rect);
      stops.push(rect);
      if (label && x(end) - x(start) > 9 * label.length + 3) node.append(svg("text", { x: (x(start) + x(end)) / 2, y: top + LANE / 2, dy: "0.32em", "text-anchor": "middle", fill: "var(--ink)", stroke: "var(--paper)", "stroke-width": 3, "paint-order": "stroke", "pointer-events": "none", "font-size": 10 }, label));
    };
    for (const [back, batch, chunk, start, end, profile] of stage.passes) {
      const again = stage.profiles[profile].again, middle = start + again * (end - start);
      const of = `stage ${s}, micro-batch ${batch}${stage.passes.some((pass) => pass[2]) ? `, virtual stage ${chunk}` : ""}`;
      const span = (a, b) => `${J.format.seconds(b - a)}, from ${J.format.seconds(a)}`;
      if (again > 0 && back) slice(start, middle, "var(--again)", "vertical", `${of}: recomputed (drawn together; layers take turns)\n${span(start, middle)}`);
      slice(back ? middle : start, end, J.color(back ? 2 : 0), back ? "back" : "solid", `${of}: ${back ? "backward" : "forward"}\n${span(back ? middle : start, end)}`, String(batch));
    }
    slice(stage.optimizer[0], stage.optimizer[1], J.color(5), "grid", `stage ${s}: optimizer\n${J.format.seconds(stage.optimizer[1] - stage.optimizer[0])}`);
  }

  function drawBytes(node, stage, step, x, y, layout, peak, width) {
    const found = instants(stage), base = found.map(() => 0);
    PARTS.forEach((part, p) => {
      // each stretch has its height throughout; between passes what is held stays
      let path = "";
      let last = { end: 0 };
      found.forEach((instant, i) => {
        const n = partsOf(instant, step)[p], low = base[i], high = low + n;
        if (n > 0) path += `M${x(instant.start).toFixed(1)},${y(low).toFixed(1)}V${y(high).toFixed(1)}H${Math.max(x(instant.end), x(instant.start) + 0.5).toFixed(1)}V${y(low).toFixed(1)}Z`;
        if (instant.start - last.end > 1e-7 && p < 4) {
          const calm = p === 3 ? (instant.phase === "optimizer" ? 0 : passHeld(stage, instant)) : n;
          const under = p === 3 ? total(partsOf(instant, step).slice(0, 3)) : low;
          if (calm > 0) path += `M${x(last.end).toFixed(1)},${y(under).toFixed(1)}V${y(under + calm).toFixed(1)}H${x(instant.start).toFixed(1)}V${y(under).toFixed(1)}Z`;
        }
        base[i] = high;
        last = instant;
      });
      if (path) node.append(svg("path", { d: path, fill: fill(part), stroke: "none" }));
    });
    const [low, high] = y.range();
    for (const tick of J.byteTicks(y.domain()[1], 3)) {
      node.append(svg("text", { x: LEFT - 6, y: y(tick), dy: "0.32em", "text-anchor": "end", fill: "currentColor", "font-size": 10 }, J.format.tick(tick)));
      node.append(svg("line", { x1: LEFT, x2: width - 8, y1: y(tick), y2: y(tick), stroke: "var(--line)", "stroke-width": 0.7 }));
    }
    node.append(svg("line", { x1: LEFT, x2: LEFT, y1: high, y2: low, stroke: "currentColor" }));
    node.append(svg("line", { x1: LEFT, x2: width - 8, y1: y(layout.usable_bytes), y2: y(layout.usable_bytes), stroke: "var(--limit)", "stroke-width": 1.6, "stroke-dasharray": "7 3" }));
    const at = x((peak.instant.start + peak.instant.end) / 2);
    node.append(svg("path", { d: `M${at - 5},${y(peak.nbytes) - 9}h10l-5,8z`, fill: "var(--ink)" }));
  }
  const passHeld = (stage, instant) => stage.passes.find((pass) => pass[3] <= instant.start + 1e-12 && instant.start < pass[4])?.[6] ?? 0;

  // One stop for a pass: its highest moment.
  function walkBytes(node, stops, stage, step, s, x, y, peak) {
    const found = instants(stage);
    const groups = d3.groups(found, (i) => `${i.phase} ${i.batch} ${i.chunk}`);
    for (const [, own] of groups) {
      const high = own.reduce((a, b) => (total(partsOf(b, step)) > total(partsOf(a, step)) ? b : a));
      const parts = partsOf(high, step), lines = PARTS.map((part, p) => `${part.name} ${J.format.exact(parts[p])}`).join("\n");
      const left = x(own[0].start), right = Math.max(left + 1, x(own[own.length - 1].end));
      const rect = svg("rect", { x: left, y: y(total(parts)), width: right - left, height: Math.max(1, y(0) - y(total(parts))), fill: "transparent", "data-text": `stage ${s}, ${place(high)}${high === peak.instant ? " (the peak)" : ""}\n${J.format.exact(total(parts))}\n${lines}` });
      node.append(rect);
      stops.push(rect);
    }
  }

  function drawCopies(node, stops, stage, s, top, x) {
    const events = stage.copies.flatMap(([out, , , start, end, nbytes]) => [[out ? start : end, out ? nbytes : -nbytes]]).sort((a, b) => a[0] - b[0]);
    let level = 0, most = 0;
    const steps = events.map(([at, change]) => [at, (level += change), (most = Math.max(most, level))]);
    const y = d3.scaleLinear([0, Math.max(1, most)], [top + 44, top + 20]);
    let path = `M${LEFT},${y(0)}`;
    for (const [at, now] of steps) path += `H${x(at).toFixed(1)}V${y(now).toFixed(1)}`;
    node.append(svg("text", { x: LEFT - 6, y: top + 8, dy: "0.32em", "text-anchor": "end", fill: "currentColor" }, "link"));
    node.append(svg("text", { x: LEFT - 6, y: top + 34, dy: "0.32em", "text-anchor": "end", fill: "currentColor" }, "host"));
    for (const [out, where, batch, start, end, nbytes] of stage.copies) {
      const rect = svg("rect", { x: x(start), y: out ? top : top + 8, width: Math.max(0.8, x(end) - x(start)), height: 7, fill: J.marks.hatch(out ? "solid" : "diagonal", "var(--host)"), stroke: "var(--host)", "stroke-width": 0.5, "data-text": `stage ${s}: ${where} of micro-batch ${batch} ${out ? "offloaded" : "prefetched"}\n${J.format.exact(nbytes)} in ${J.format.seconds(end - start)}` });
      node.append(rect);
      stops.push(rect);
    }
    node.append(svg("path", { d: `${path}H${x.range()[1]}V${y(0)}H${LEFT}Z`, fill: J.marks.hatch("dots", "var(--host)"), stroke: "var(--host)", "data-text": "" }));
    node.append(svg("text", { x: x.range()[1], y: y(0) - 3, "text-anchor": "end", fill: "var(--ink)", stroke: "var(--paper)", "stroke-width": 3, "paint-order": "stroke", "font-size": 10 }, `up to ${J.format.bytes(most)} offloaded`));
  }

  function drawClock(node, x, layout, height, width) {
    const axis = svg("g", { transform: `translate(0,${height - 34})` });
    for (const tick of x.ticks(Math.max(3, Math.floor(width / 130)))) {
      axis.append(svg("line", { x1: x(tick), x2: x(tick), y1: 0, y2: 5, stroke: "currentColor" }), svg("text", { x: x(tick), y: 17, "text-anchor": "middle", fill: "currentColor" }, String(Number(tick.toPrecision(3)))));
    }
    axis.append(svg("line", { x1: LEFT, x2: width - 8, y1: 0, y2: 0, stroke: "currentColor" }));
    axis.append(svg("text", { x: width - 8, y: 31, "text-anchor": "end", fill: "currentColor" }, `Seconds since the step began, as modelled (of ${J.format.seconds(layout.step_seconds)}) →`));
    node.append(axis);
  }

  // The worst stage's peak as one bar, activations by what they are.
  function apart(layout, step, width) {
    const peaks = layout.stages.map((stage) => peakOf(stage, step)), worst = peaks.reduce((a, b, i) => (b.nbytes > peaks[a].nbytes ? i : a), 0);
    const rows = peakRows(layout, step), x = d3.scaleLinear([0, d3.max(rows, (row) => row[1])], [0, Math.max(60, width - 330)]);
    const narrow = width < 560, high = 20 + rows.length * (narrow ? 34 : 20);
    if (narrow) x.range([0, width - 16]);
    const node = svg("svg", { width, height: high, viewBox: `0 0 ${width} ${high}`, "aria-label": `Breakdown of the peak of stage ${worst}` });
    node.append(svg("text", { x: 0, y: 11, "font-weight": 600, fill: "currentColor" }, `Breakdown of the peak of stage ${worst}, ${J.format.bytes(peaks[worst].nbytes)}`));
    rows.forEach(([name, nbytes, part], i) => {
      const top = 18 + i * (narrow ? 34 : 20), text = `${J.format.bytes(nbytes)}, ${J.format.percent(nbytes / peaks[worst].nbytes)}`;
      node.append(svg("text", { x: narrow ? 0 : 182, y: top + 12, "text-anchor": narrow ? "start" : "end", fill: "currentColor" }, narrow ? `${name}: ${text}` : name));
      node.append(svg("rect", { x: narrow ? 0 : 190, y: narrow ? top + 17 : top + 2, width: Math.max(1, x(nbytes)), height: narrow ? 12 : 15, fill: fill(PARTS[part]), stroke: J.color(PARTS[part].color) }));
      if (!narrow) node.append(svg("text", { x: 196 + x(nbytes), y: top + 12, fill: "currentColor" }, text));
    });
    return node;
  }
  // [what, bytes, which part]
  function peakRows(layout, step) {
    const peaks = layout.stages.map((stage) => peakOf(stage, step)), worst = peaks.reduce((a, b, i) => (b.nbytes > peaks[a].nbytes ? i : a), 0);
    const { parts, instant } = peaks[worst], held = instant.phase === "optimizer" ? [] : layout.stages[worst].roles;
    return [
      ...[0, 1, 2].map((p) => [PARTS[p].name, parts[p], p]),
      ...held.map(([role, nbytes]) => [role, nbytes, 3]),
      [PARTS[4].name, parts[4], 4],
    ].filter((row) => row[1] > 0);
  }

  const table = (values) => {
    const layout = find(values), step = values["step-number"];
    return {
      columns: ["stage", "peak in", ...["peak", ...PARTS.map((p) => p.name), "peak by the ledger"].map((name) => ({ label: name, format: J.format.exact })), { label: "busy", format: J.format.seconds }],
      rows: [
        ...layout.stages.map((stage, s) => {
          const peak = peakOf(stage, step);
          return [`stage ${s}`, place(peak.instant), peak.nbytes, ...peak.parts, step ? stage.ledger_peak : null, stage.passes.reduce((sum, p) => sum + p[4] - p[3], 0)];
        }),
        ...peakRows(layout, step).map(([name, nbytes]) => [`the highest peak: ${name}`, "", nbytes, null, null, null, null, null, null, null]),
      ],
    };
  };
  J.figure({
    id: "step", title: "One step: schedule and memory of each stage", controls: [layoutOf, first], draw, table,
    caption: (values) => {
      const layout = find(values);
      return `${layout.name}, on ${layout.gpu}: ${J.format.bytes(layout.usable_bytes)} can be allocated, ${J.format.bytes(layout.available_bytes)} of it for tensors. The triangle marks the peak, the ledger's to the byte. Transients are gradients of activations, recomputed tensors, all-gathered parameters and workspace.`;
    },
    command: (values) => find(values).command,
  });
})();

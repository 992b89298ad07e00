"use strict";
// The figures of `jettison report`: each is there if the documents say enough for it.
(() => {
  const { subjects, command } = J.data("report");
  const F = J.format, several = subjects.length > 1;
  const figure = (options) => J.figure({ command: () => command, ...options });
  const sentence = (text) => text[0].toUpperCase() + text.slice(1);
  const letter = (i) => (several ? ` (${"AB"[i]})` : "");
  const SERIES = {
    baseline: { label: "plain autograd", color: "var(--c8)", dash: "2 2.5", symbol: "triangle", hatch: "dots", width: 1.5 },
    predicted: { label: "predicted", color: "var(--c1)", dash: "none", symbol: "circle", hatch: "solid", width: 2.5 },
    measured: { label: "measured", color: "var(--c2)", dash: "6 3", symbol: "square", hatch: "diagonal", width: 1.8 },
    host: { label: "offloaded", color: "var(--c3)", dash: "9 3 2 3", symbol: "diamond", hatch: "horizontal", width: 2 },
  };
  const AMOUNTS = {
    budget: { color: "var(--limit)", hatch: "back" },
    "smallest budget": { color: "var(--c8)", hatch: "vertical" },
    "predicted peak": { color: "var(--c1)", hatch: "solid" },
    "measured peak": { color: "var(--c2)", hatch: "diagonal" },
    "peak of plain autograd": { color: "var(--c8)", hatch: "dots" },
    offloaded: { color: "var(--c3)", hatch: "horizontal" },
  };
  const POLICIES = {
    kept: { letter: "K", color: "var(--keep)", hatch: "solid" },
    recomputed: { letter: "R", color: "var(--again)", hatch: "diagonal" },
    offloaded: { letter: "H", color: "var(--host)", hatch: "horizontal" },
    packed: { letter: "P", color: "var(--pack)", hatch: "cross" },
    shared: { letter: "S", color: "var(--c8)", hatch: "dots" },
  };
  const document_ = (key) => (several
    ? [J.select({ key, label: "document", options: subjects.map((s, i) => ({ value: i, label: `${"AB"[i]}: ${s.name}` })), value: 0 })]
    : []);
  const chosen = (values, key) => subjects[values[key] ?? 0];
  const stacked = (...parts) => J.el("div", {}, parts);
  const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const number = (layer) => /\.(\d+)$/.exec(layer)?.[1] ?? null;

  // what is said in words -------------------------------------------------------------------------------------------
  const about = (subject, i) => J.el(
    "div", {},
    several ? J.el("h2", {}, `${"AB"[i]}: ${subject.name}`) : null,
    subject.sentences.map((text, n) => J.el("p", { class: `verdict ${n > 0 || subject.holds === null ? "" : subject.holds ? "holds" : "fails"}` }, text)),
    J.el("dl", { class: "facts" }, subject.facts.flatMap(([name, value]) => [J.el("dt", {}, name), J.el("dd", {}, value)])),
  );
  document.querySelector("main").append(J.el("div", { class: "subjects" }, subjects.map(about)));

  // budget ----------------------------------------------------------------------------------------------------------
  const amounts = subjects.flatMap((s, i) => s.amounts.map((a) => ({ ...a, name: a.what + letter(i), subject: i })));
  if (amounts.length) {
    figure({
      id: "budget",
      title: "Budget and peaks",
      caption: () => sentence(subjects.map((s, i) => {
        const of = Object.fromEntries(s.amounts.map((a) => [a.what, a.nbytes]));
        const peak = of["measured peak"] ?? of["predicted peak"], left = of.budget - peak;
        if (!Number.isFinite(left)) return "";
        const which = of["measured peak"] === undefined ? "predicted" : "measured";
        return `${several ? `${"AB"[i]}: ` : ""}the ${which} peak leaves ${F.exact(left)} of the budget.`;
      }).join(" ") + " A peak is the largest number of bytes allocated at one moment of a training step, parameters, gradients and optimizer state included."),
      draw: (_, { width }) => {
        const most = d3.max(amounts, (a) => a.nbytes), narrow = width < 560;
        return J.plot({
          height: 46 + amounts.length * 30, marginLeft: narrow ? 132 : 176, marginRight: narrow ? 70 : 90, marginTop: 6,
          x: { ...J.byteAxis("bytes allocated at one moment of a step", most, narrow ? 3 : 6), domain: [0, most], grid: true },
          y: { label: null, domain: amounts.map((a) => a.name), tickFormat: (text) => (narrow ? short(text.replace("peak of plain", "plain"), 19) : text) },
          marks: [
            Plot.barX(amounts, { x: "nbytes", y: "name", insetTop: 3, insetBottom: 3, fill: (a) => J.marks.hatch(AMOUNTS[a.what]?.hatch ?? 0, AMOUNTS[a.what]?.color ?? J.color(7)), stroke: (a) => AMOUNTS[a.what]?.color ?? J.color(7) }),
            Plot.text(amounts, { x: "nbytes", y: "name", text: (a) => F.bytes(a.nbytes), dx: 6, textAnchor: "start", fill: "currentColor" }),
            Plot.ruleX([0]),
          ],
          color: { type: "identity" },
        });
      },
      table: () => ({ columns: ["", "bytes", "rounded"], rows: amounts.map((a) => [a.name, a.nbytes, F.bytes(a.nbytes)]) }),
    });
  }

  // the peak by role ------------------------------------------------------------------------------------------------
  const roles = subjects.flatMap((s, i) => s.peak_roles.map((r) => ({ ...r, subject: i, name: several ? "AB"[i] : "peak" })));
  if (roles.length) {
    const names = [...new Set(roles.map((r) => r.what))], of = (r) => names.indexOf(r.what), whole = (i) => d3.sum(subjects[i].peak_roles, (r) => r.nbytes);
    const share = (r) => `${((100 * r.nbytes) / whole(r.subject)).toFixed(1)} %`;
    figure({
      id: "roles",
      title: "What the peak is made of",
      caption: "Bytes allocated at the highest moment of a step after the first one, on the fullest pipeline stage; together they are the predicted peak.",
      draw: (_, { width }) => stacked(
        J.legend(names.map((label, n) => ({ label: `${label}: ${roles.filter((r) => r.what === label).map((r) => `${several ? `${r.name} ` : ""}${F.bytes(r.nbytes)}`).join(", ")}`, color: J.color(n), hatch: n }))),
        J.plot({
          height: 56 + 44 * subjects.length, marginLeft: 44, marginTop: 4,
          x: J.byteAxis("bytes allocated at the peak", d3.max(subjects, (_, i) => whole(i)), width < 560 ? 3 : 6),
          y: { label: null, domain: [...new Set(roles.map((r) => r.name))], tickSize: 0 },
          marks: [Plot.barX(roles, { x: "nbytes", y: "name", fill: (r) => J.marks.hatch(of(r), J.color(of(r))), stroke: (r) => J.color(of(r)) }), Plot.ruleX([0])],
          color: { type: "identity" },
        }),
      ),
      table: () => ({ columns: [...(several ? [""] : []), "role", { label: "bytes", format: F.exact }, "share"], rows: roles.map((r) => [...(several ? [r.name] : []), r.what, r.nbytes, share(r)]) }),
    });
  }

  // phases ----------------------------------------------------------------------------------------------------------
  const inPhases = subjects.flatMap((s, i) => s.phases.flatMap((row) => ["baseline", "predicted", "measured"]
    .filter((which) => row[`${which}_bytes`] !== null)
    .map((which) => ({ phase: row.phase, which, name: SERIES[which].label + letter(i), nbytes: row[`${which}_bytes`], subject: i }))));
  if (inPhases.length && (!roles.length || inPhases.some((row) => row.phase !== inPhases[0].phase))) { // one stage is the bar above
    const names = [...new Set(inPhases.map((row) => row.name))], phases = [...new Set(inPhases.map((row) => row.phase))];
    const style = (row) => SERIES[row.which];
    figure({
      id: "phases",
      title: phases[0].startsWith("stage") ? "Peak of each pipeline stage" : "Peak of each phase of a step",
      caption: () => subjects.map((s, i) => s.phases.filter((row) => row.predicted_bytes !== null && row.measured_bytes !== null)
        .map((row) => `${row.phase}${letter(i)}: measured ${F.exact(row.measured_bytes)}, predicted ${row.predicted_bytes === row.measured_bytes ? "the same to the byte" : `${F.exact(row.predicted_bytes - row.measured_bytes)} more`}`).join("; ")).filter(Boolean).map(sentence).join(". "),
      draw: (_, { width }) => stacked(
        J.legend([...new Map(inPhases.map((row) => [row.which, row])).values()].map((row) => ({ label: style(row).label, color: style(row).color, hatch: style(row).hatch }))),
        J.plot({
          marginBottom: 26,
          height: Math.min(320, Math.max(220, width * 0.4)),
          fx: { label: null, domain: phases, padding: 0.12 },
          x: { axis: several ? "bottom" : null, label: null, domain: names, tickFormat: (name) => (several ? name.slice(-2, -1) : ""), padding: 0.12, tickSize: 0 },
          y: J.byteAxis("peak of allocated bytes", d3.max(inPhases, (row) => row.nbytes)),
          marks: [
            Plot.barY(inPhases, { fx: "phase", x: "name", y: "nbytes", fill: (row) => J.marks.hatch(style(row).hatch, style(row).color), stroke: (row) => style(row).color }),
            Plot.ruleY([0]),
          ],
          color: { type: "identity" },
        }),
      ),
      table: () => ({ columns: ["phase", "", "bytes", "rounded"], rows: inPhases.map((row) => [row.phase, row.name, row.nbytes, F.bytes(row.nbytes)]) }),
    });
  }

  // the step as a timeline ------------------------------------------------------------------------------------------
  if (subjects.some((s) => Object.keys(s.levels).length)) {
    // phases side by side, as wide as the first of predicted, measured and plain that there is has levels in them
    const placed = (subject) => {
      const known = ["predicted", "measured", "baseline"].filter((which) => subject.levels[which]);
      if (!known.length) return { rows: [], bands: [] };
      let x = 0;
      const bands = subject.levels[known[0]].phases.map((p) => ({ phase: p.phase, from: x, to: (x += p.levels) }));
      for (const band of bands) [band.from, band.to] = [band.from / x, band.to / x];
      const rows = known.flatMap((which) => {
        const phases = subject.levels[which].phases, used = new Map();
        return phases.flatMap((p) => {
          const same = bands.filter((band) => band.phase === p.phase), n = used.get(p.phase) ?? 0;
          used.set(p.phase, n + 1);
          const band = same[n];
          if (!band) return [];
          const step = (band.to - band.from) / p.high_bytes.length;
          return p.high_bytes.flatMap((high, i) => {
            const at = { which, phase: p.phase, low: p.low_bytes[i], high };
            return [{ ...at, x: band.from + i * step, first: true }, { ...at, x: band.from + (i + 1) * step }];
          });
        });
      });
      return { rows, bands };
    };
    figure({
      id: "timeline",
      title: "Allocated bytes over a step",
      controls: document_("timeline"),
      caption: "From left to right: a step's allocations in the order in which they are made, each phase stretched to the same width for all curves. A curve shows the highest level in each short stretch, the shade below it how far down it went.",
      draw: (values, { width }) => {
        const subject = chosen(values, "timeline"), { rows, bands } = placed(subject);
        if (!rows.length) return J.el("p", {}, "This document says nothing about it.");
        const kinds = [...new Set(rows.map((row) => row.which))], budget = subject.amounts.find((a) => a.what === "budget")?.nbytes;
        const most = Math.max(d3.max(rows, (row) => row.high), budget ?? 0);
        const crowded = bands.some((band) => (band.to - band.from) * (width - 70) < 7 * band.phase.length);
        return stacked(
          J.legend([...kinds.map((which) => ({ ...SERIES[which], hatch: undefined, symbol: undefined, line: true })), ...(budget ? [{ label: "budget", color: "var(--limit)", dash: "12 4", line: true }] : [])]),
          J.plot({
            height: Math.min(400, Math.max(260, width * 0.42)), marginBottom: crowded ? 48 : 34,
            x: { domain: [0, 1], axis: null },
            y: J.byteAxis("allocated", most),
            marks: [
              bands.slice(1).map((band) => Plot.ruleX([band.from], { stroke: "var(--line)" })),
              kinds.map((which) => Plot.areaY(rows.filter((row) => row.which === which), { x: "x", y1: "low", y2: "high", fill: SERIES[which].color, fillOpacity: which === "predicted" ? 0.16 : 0.1 })),
              kinds.map((which) => Plot.lineY(rows.filter((row) => row.which === which), { x: "x", y: "high", stroke: SERIES[which].color, strokeDasharray: SERIES[which].dash, strokeWidth: SERIES[which].width })),
              budget ? [Plot.ruleY([budget], { stroke: "var(--limit)", strokeDasharray: "12 4", strokeWidth: 1.5 })] : [],
              [0, 1].map((odd) => Plot.text(bands.filter((_, i) => (crowded ? i % 2 : 0) === odd), { x: (band) => (band.from + band.to) / 2, text: "phase", frameAnchor: "bottom", dy: 18 + 13 * odd, fill: "currentColor" })),
              Plot.ruleY([0]),
            ].flat(2),
          }),
        );
      },
      table: (values) => ({
        columns: ["", "phase", "interval", "lowest", "highest"],
        rows: Object.entries(chosen(values, "timeline").levels).flatMap(([which, found]) => found.phases.flatMap((p) => p.high_bytes.map((high, i) => [SERIES[which].label, p.phase, i + 1, p.low_bytes[i], high]))),
      }),
    });
  }

  // layers ----------------------------------------------------------------------------------------------------------
  const ofLayers = subjects.flatMap((s, i) => s.layers.flatMap((row, at) => ["baseline", "predicted", "measured", "host"]
    .filter((which) => row[`${which}_bytes`] !== null && !(which === "host" && !s.layers.some((one) => one.host_bytes)))
    .map((which) => ({ ...row, which, nbytes: row[`${which}_bytes`], subject: i, at, name: SERIES[which].label + letter(i) }))));
  if (ofLayers.length) {
    const said = (row) => `${row.layer}${letter(row.subject)}: ${row.policy}\n${SERIES[row.which].label}: ${F.exact(row.nbytes)}${row.why ? `\n${row.why}` : ""}`;
    figure({
      id: "layers",
      title: "Bytes that each layer holds between forward and backward",
      controls: [
        ...document_("layers"),
        J.toggle({ key: "rest", label: "with embedding, head and loss", value: false }),
      ],
      caption: (values) => {
        const rows = chosen(values, "layers").layers.filter((row) => row.measured_bytes !== null && row.predicted_bytes !== null);
        if (!rows.length) return "";
        const off = rows.filter((row) => row.measured_bytes !== row.predicted_bytes).length;
        return off ? `${off} of ${rows.length} layers held other bytes than predicted.` : `All ${rows.length} layers held what was predicted, to the byte.`;
      },
      draw: (values, { width }) => {
        const subject = chosen(values, "layers"), at = subjects.indexOf(subject);
        const rows = ofLayers.filter((row) => row.subject === at && (values.rest || number(row.layer) !== null || subject.layers.length === 1));
        if (!rows.length) return J.el("p", {}, "This document says nothing about it.");
        const layers = [...new Set(rows.map((row) => row.layer))], kinds = [...new Set(rows.map((row) => row.which))];
        const every = Math.ceil(layers.length / Math.max(4, Math.floor((width - 90) / 30)));
        const svg = J.plot({
          height: Math.min(340, Math.max(240, width * 0.42)),
          x: { type: "point", domain: layers, label: "layer", padding: 0.5, ticks: layers.filter((_, i) => i % every === 0), tickFormat: (name) => number(name) ?? short(name, 9) },
          y: J.byteAxis("held by a layer", d3.max(rows, (row) => row.nbytes)),
          marks: [
            kinds.map((which) => Plot.lineY(rows.filter((row) => row.which === which), { x: "layer", y: "nbytes", stroke: SERIES[which].color, strokeDasharray: SERIES[which].dash, strokeWidth: SERIES[which].width })),
            kinds.map((which) => Plot.dot(rows.filter((row) => row.which === which), { x: "layer", y: "nbytes", symbol: SERIES[which].symbol, r: which === "predicted" ? 7 : 3.6, stroke: SERIES[which].color, fill: which === "predicted" ? "var(--paper)" : SERIES[which].color, className: `dots-${which}` })),
            Plot.ruleY([0]),
          ].flat(),
        });
        const groups = kinds.map((which) => svg.querySelector(`.dots-${which}`)); // its dots in the order of the rows
        const dots = kinds.flatMap((which, k) => {
          const mine = rows.filter((row) => row.which === which);
          return [...groups[k].children].map((node, i) => [node, mine[i]]);
        });
        const by = new Map(dots);
        J.rove(svg, dots.map(([node]) => node), (node) => said(by.get(node)));
        return stacked(J.legend(kinds.map((which) => ({ ...SERIES[which], hatch: undefined }))), svg);
      },
      table: (values) => ({
        columns: ["layer", "policy", "plain autograd", "predicted", "measured", "offloaded", { label: "recomputed FLOPs", format: F.flops }, "why"],
        rows: chosen(values, "layers").layers.map((row) => [row.layer, row.policy, row.baseline_bytes, row.predicted_bytes, row.measured_bytes, row.host_bytes, row.recompute_flops, row.why]),
      }),
    });
  }

  // layers and the next GiB in words --------------------------------------------------------------------------------
  const inWords = (id, title, about, columns, rows) => document.querySelector("main").append(J.el(
    "section", { class: "figure in-words", id, "aria-labelledby": `${id}-title` }, J.el("h2", { id: `${id}-title` }, title), about ? J.el("p", { class: "caption" }, about) : null,
    rows.length ? J.el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, as a table` }, J.table({ columns, rows })) : null,
  ));
  subjects.forEach((s, i) => {
    if (s.next_gib === undefined || !s.peak_roles.length) return; // a plan of a described run
    const runs = [], same = (a, b) => ["policy", "why", "predicted_bytes", "host_bytes", "recompute_flops"].every((key) => a[key] === b[key]);
    for (const row of s.layers) {
      if (runs.length && same(runs.at(-1)[0], row)) runs.at(-1).push(row);
      else runs.push([row]);
    }
    const named = (run) => (run.length === 1 ? run[0].layer : `${run[0].layer} to ${number(run.at(-1).layer) ?? run.at(-1).layer} (${run.length})`);
    inWords(`does-${i}`, `What each layer does with one micro-batch${letter(i)}`, "", ["layer", "policy", { label: "kept", format: F.bytes }, { label: "offloaded", format: (n) => (n ? F.bytes(n) : "") }, { label: "recomputed", format: (n) => (n ? F.flops(n) : "") }, "why"],
      runs.map((run) => [named(run), run[0].policy, run[0].predicted_bytes, run[0].host_bytes, run[0].recompute_flops, run[0].why]));
    inWords(`next-${i}`, `What each next GiB would change${letter(i)}`, s.next_gib === null ? "The plan was made without --what-if, which answers this." : !s.next_gib.length ? "Nothing is recomputed, and nothing is offloaded: more bytes change nothing." : s.next_gib.some((row) => row.saved_seconds > 1e-7) ? "" : "No time is saved: what is offloaded now is copied while kernels run.",
      ["budget", { label: "a step saves", format: F.seconds }, "tensors whose policy changes"], (s.next_gib ?? []).map((row) => [F.bytes(row.budget_bytes), row.saved_seconds, row.changes]));
  });

  // every tensor ----------------------------------------------------------------------------------------------------
  const pairs = subjects.flatMap((s, i) => s.grids.map((grid, n) => ({ grid, subject: i, label: `${several ? `${"AB"[i]}: ` : ""}${grid.title}`, key: `${i}-${n}` })));
  if (pairs.length) {
    const find = (key) => pairs.find((pair) => pair.key === key) ?? pairs[0];
    // what the other document does with the same tensor of the same layer
    const other = (pair) => {
      if (!several) return null;
      const grid = subjects[1 - pair.subject].grids.find((one) => one.title === pair.grid.title);
      if (!grid) return null;
      const id = (t) => [t.name, t.path, t.dtype, ...t.shape].join("|"), rows = d3.group(grid.tensors.map((t, i) => [id(t), i]), ([key]) => key), used = new Map();
      const row = pair.grid.tensors.map((t) => {
        const n = used.get(id(t)) ?? 0;
        used.set(id(t), n + 1);
        return rows.get(id(t))?.[n]?.[1];
      });
      const column = pair.grid.layers.map((layer) => grid.layers.indexOf(layer));
      return (i, j) => (row[i] === undefined || column[j] < 0 ? null : grid.policies[row[i]][column[j]]);
    };
    const words = (t) => `${t.name}${t.path ? ` of ${t.path}` : ""}`;
    const size = (t) => (t.dtype ? `${t.dtype}[${t.shape.join(", ")}], ${F.exact(t.nbytes)}` : "");
    const total = (grid, policy) => d3.sum(grid.tensors, (t, i) => t.nbytes * grid.policies[i].filter((f) => f === policy).length);
    figure({
      id: "tensors",
      title: "What happens to every saved tensor",
      controls: pairs.length > 1 ? [J.select({ key: "grid", label: "of", options: pairs.map((pair) => ({ value: pair.key, label: pair.label })), value: "0-0" })] : [],
      caption: (values) => {
        const pair = find(values.grid), { grid } = pair, compare = other(pair);
        const parts = Object.keys(POLICIES).map((policy) => [policy, d3.sum(grid.policies, (row) => row.filter((f) => f === policy).length)]).filter(([, n]) => n);
        const flipped = compare ? d3.sum(grid.policies, (row, i) => row.filter((f, j) => f && compare(i, j) && compare(i, j) !== f).length) : 0;
        const listed = parts.map(([policy, n]) => `${n} ${policy}${total(grid, policy) ? ` (${F.bytes(total(grid, policy))} as views)` : ""}`).join(", ");
        return `${sentence(listed)}. ${compare ? `${flipped} differ between the two documents: they are outlined. ` : ""}Arrow keys walk through the grid.`;
      },
      draw: (values, { width }) => {
        const pair = find(values.grid), { grid } = pair, compare = other(pair);
        const labels = width < 560 ? 132 : 376, cell = Math.max(4, Math.min(34, (width - labels - 8) / grid.layers.length)), high = 19, top = 40;
        const height = top + grid.tensors.length * high + 6, wide = labels + cell * grid.layers.length + 8;
        const svg = J.el("svg:svg", { width: Math.min(width, wide), height, viewBox: `0 0 ${Math.min(width, wide)} ${height}` });
        const by = new Map(), every = Math.ceil(24 / cell);
        grid.layers.forEach((layer, j) => {
          if (j % every === 0) svg.append(J.el("svg:text", { x: labels + cell * (j + 0.5), y: top - 6, "text-anchor": "middle", fill: "currentColor" }, number(layer) ?? (grid.layers.length > 1 ? short(layer, 4) : "")));
        });
        svg.append(J.el("svg:text", { x: labels, y: 14, fill: "currentColor" }, grid.layers.length > 1 ? "layer" : grid.title));
        grid.tensors.forEach((t, i) => {
          const wide = width >= 560 && t.nbytes > 0, y = top + high * i + high / 2;
          const label = (text, x) => J.el("svg:text", { x, y, dy: "0.35em", "text-anchor": "end", fill: "currentColor", "font-size": width < 560 ? 10.5 : null }, text);
          svg.append(label(short(words(t), width < 560 ? 19 : 46), labels - (wide ? 82 : 8)));
          if (wide) svg.append(label(F.bytes(t.nbytes), labels - 8));
          grid.policies[i].forEach((policy, j) => {
            if (!policy) return;
            const style = POLICIES[policy], x = labels + cell * j, y = top + high * i, before = compare?.(i, j);
            const flips = Boolean(before && before !== policy);
            const rect = J.el("svg:rect", {
              x: x + 0.5, y: y + 0.5, width: Math.max(1, cell - 1), height: high - 1, fill: J.marks.hatch(style.hatch, style.color),
              stroke: flips ? "var(--ink)" : style.color, "stroke-width": flips ? 2.5 : 0.6,
            });
            by.set(rect, `${words(t)} in ${grid.layers[j]}: ${policy}${flips ? ` (${before} in ${"AB"[1 - pair.subject]})` : ""}\n${size(t)}`);
            svg.append(rect);
            if (cell >= 15) svg.append(J.el("svg:text", { x: x + cell / 2, y: y + high / 2, dy: "0.36em", "text-anchor": "middle", "font-size": 11, "font-weight": 650, "pointer-events": "none", fill: style.hatch === "solid" ? "var(--paper)" : "var(--ink)", stroke: style.hatch === "solid" ? "none" : "var(--paper)", "stroke-width": 3, "paint-order": "stroke" }, style.letter));
          });
        });
        J.rove(svg, [...by.keys()], (node) => by.get(node));
        const used = Object.entries(POLICIES).filter(([policy]) => grid.policies.some((row) => row.includes(policy)));
        return stacked(J.legend(used.map(([policy, style]) => ({ label: `${style.letter} ${policy}`, color: style.color, hatch: style.hatch }))), svg);
      },
      table: (values) => {
        const { grid } = find(values.grid);
        return {
          columns: ["tensor", "module", "dtype", "shape", "bytes", ...grid.layers],
          rows: grid.tensors.map((t, i) => [t.name, t.path, t.dtype, t.shape.join(" × "), t.dtype ? t.nbytes : null, ...grid.policies[i].map((policy) => policy ?? "")]),
        };
      },
    });
  }

  // seconds ---------------------------------------------------------------------------------------------------------
  const ratios = subjects.map((s, i) => s.ratio && { ...s.ratio, name: several ? "AB"[i] : "this step" }).filter(Boolean);
  if (ratios.length) {
    figure({
      id: "time",
      title: "Step time, as a multiple of plain autograd's",
      caption: () => ratios.map((r) => `${several ? `${r.name}: ` : ""}${F.ratio(r.median)} of plain autograd's ${F.seconds(r.baseline_seconds)}, the median of ${r.rounds} rounds in which both ran in turn; quartiles ${r.low.toFixed(2)} and ${r.high.toFixed(2)} are the bar's ends.`).join(" "),
      draw: (_, { width }) => J.plot({
        height: 64 + 34 * ratios.length, marginLeft: 84, marginTop: 10,
        x: { label: "step time ÷ plain", domain: [Math.min(0.9, d3.min(ratios, (r) => r.low) - 0.05), Math.max(1.1, d3.max(ratios, (r) => r.high) + 0.05)], grid: true, ticks: width < 560 ? 4 : 8 },
        y: { label: null, domain: ratios.map((r) => r.name) },
        marks: [
          Plot.ruleX([1], { stroke: "var(--c8)", strokeDasharray: "2 2.5", strokeWidth: 2 }),
          Plot.ruleY(ratios, { y: "name", x1: "low", x2: "high", stroke: "var(--c2)", strokeWidth: 3 }),
          Plot.dot(ratios, { x: "median", y: "name", r: 6, fill: "var(--c2)", stroke: "var(--paper)" }),
          Plot.text(ratios, { x: "median", y: "name", text: (r) => F.ratio(r.median), dy: -14, fill: "currentColor" }),
        ],
      }),
      table: () => ({ columns: ["", "median", "lower quartile", "upper quartile", "seconds of plain autograd", "rounds"], rows: ratios.map((r) => [r.name, r.median, r.low, r.high, r.baseline_seconds, r.rounds]) }),
    });
  }

  const curve = (id, title, key, axis, format, caption) => {
    const rows = subjects.flatMap((s, i) => s.steps.filter((step) => step[key] !== null).map((step) => ({ step: step.step, value: step[key], subject: i, measured: step.measured })));
    if (!rows.length) return;
    const budgets = subjects.map((s) => s.amounts.find((a) => a.what === "budget")?.nbytes);
    figure({
      id, title, caption,
      draw: () => stacked(
        several ? J.legend(subjects.map((s, i) => ({ label: `${"AB"[i]}: ${short(s.name, 40)}`, color: J.color(i), dash: J.marks.dash(i), line: true }))) : "",
        J.plot({
          x: { label: "optimizer step", tickFormat: (n) => (Number.isInteger(n) ? F.grouped(n) : "") },
          y: axis(rows),
          marks: [
            subjects.map((_, i) => Plot.lineY(rows.filter((row) => row.subject === i), { x: "step", y: "value", stroke: J.color(i), strokeDasharray: J.marks.dash(i), strokeWidth: 2 })),
            rows.length < 80 ? subjects.map((_, i) => Plot.dot(rows.filter((row) => row.subject === i), { x: "step", y: "value", stroke: J.color(i), fill: (row) => (row.measured ? "var(--paper)" : J.color(i)), symbol: J.marks.symbol(i), r: 3 })) : [],
            key === "peak_bytes" ? budgets.map((b, i) => (b ? Plot.ruleY([b], { stroke: "var(--limit)", strokeDasharray: i ? "2 2.5" : "12 4" }) : null)) : [],
          ].flat(),
          color: { type: "identity" },
        }),
      ),
      table: () => ({ columns: [...(several ? [""] : []), "step", { label: title.toLowerCase(), format }], rows: rows.map((row) => [...(several ? ["AB"[row.subject]] : []), row.step, row.value]) }),
    });
  };
  curve("loss", "Loss", "loss", () => ({ label: "loss", grid: true }), (v) => v.toFixed(6), "The loss of each logged step.");
  curve("seconds", "Seconds of a step", "step_seconds", (rows) => ({ label: "seconds", grid: true, domain: [0, d3.max(rows, (row) => row.value)] }), F.seconds, "Hollow points are steps that were slowed down by measuring their memory.");
  curve("peaks", "Measured peak of each step", "peak_bytes", (rows) => J.byteAxis("peak of allocated bytes", d3.max([...rows.map((row) => row.value), ...subjects.map((s) => s.amounts.find((a) => a.what === "budget")?.nbytes ?? 0)])), F.bytes, "On a CPU the first steps are measured; the broken line is the budget.");

  // environment -----------------------------------------------------------------------------------------------------
  if (subjects.some((s) => s.environment.length)) {
    const names = [...new Set(subjects.flatMap((s) => s.environment.map(([name]) => name)))];
    const values = subjects.map((s) => Object.fromEntries(s.environment));
    document.querySelector("main").append(J.el(
      "section", { class: "figure", id: "environment" }, J.el("h2", {}, "Environment"),
      J.el("div", { class: "scroll" }, J.table({ columns: ["", ...subjects.map((_, i) => (several ? "AB"[i] : "value"))], rows: names.map((name) => [name, ...values.map((v) => v[name] ?? "")]) })),
    ));
  }
})();

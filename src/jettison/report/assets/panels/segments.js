"use strict";
// Checkpoints every k layers, in the first n layers, or in one layer in k: memory and FLOPs for every number.
(() => {
  const data = J.data("segments"), names = data.models.map((m) => m.name), GB = 1e9;
  const model = J.select({ key: "segments-model", label: "Model", options: names, value: names[0] });
  const KINDS = [
    { value: "every", label: "segments of k layers" },
    { value: "block", label: "first n layers checkpointed" },
    { value: "interval", label: "one layer in k checkpointed" },
  ];
  const kind = J.select({ key: "segments-kind", label: "Checkpoint", options: KINDS, value: "every" });
  const most = Math.max(...data.models.map((m) => m.layers));
  const number = J.slider({ key: "segments-number", label: "k or n", min: 1, max: most, value: 4 });
  const find = (values) => {
    const m = data.models.find((one) => one.name === values["segments-model"]), rows = m.kinds[values["segments-kind"]];
    const at = Math.min(values["segments-number"], m.layers);
    const knee = rows.reduce((best, row) => (row[1] + row[2] < best[1] + best[2] ? row : best));
    return { m, rows, at, row: rows[at - 1], knee };
  };

  const draw = (values, { width }) => {
    const { m, rows, at, row, knee } = find(values), every = values["segments-kind"] === "every";
    const points = rows.map(([k, held, open, , again]) => ({ k, held: held / GB, open: open / GB, both: (held + open) / GB, again: 100 * again }));
    // the lesson's own arithmetic: L/k inputs, and k more of the same size
    const lesson = rows.map(([k]) => ({ k, claimed: ((Math.max(1, Math.floor(m.layers / k)) + k) * m.input_bytes) / GB }));
    const x = { label: every || values["segments-kind"] === "interval" ? "k (layers) →" : "n (layers) →", domain: [1, m.layers], ...(every ? { type: "log", base: 2, tickFormat: (d) => String(d), ticks: [1, 2, 4, 8, 16, 32, 64, 128].filter((k) => k <= m.layers) } : {}), grid: true };
    const series = [
      { label: "total", y: "both", color: J.color(6), dash: 0, symbol: "circle" },
      { label: "saved between passes", y: "held", color: J.color(0), dash: 1, symbol: "square" },
      { label: "most in backward of a layer or segment", y: "open", color: J.color(1), dash: 2, symbol: "triangle" },
    ];
    const marked = points.filter((p) => p.k === at);
    const memory = J.plot({
      width, height: 290, marginLeft: 58, x, y: { label: "↑ Activation memory of the worst rank (GB)", grid: true, ...(every ? { type: "log", tickFormat: (d) => (/^[125]/.test(d.toExponential()) ? String(d) : ""), ticks: width < 560 ? 4 : 8 } : { zero: true }) },
      marks: [
        ...series.map((s) => Plot.line(points, { x: "k", y: s.y, stroke: s.color, strokeWidth: 2, strokeDasharray: J.marks.dash(s.dash) })),
        ...series.map((s) => Plot.dot(marked, { x: "k", y: s.y, fill: s.color, symbol: s.symbol, r: 5 })),
        ...(every ? [Plot.line(lesson, { x: "k", y: "claimed", stroke: "var(--soft)", strokeDasharray: J.marks.dash(6), strokeWidth: 1.8 }),
          Plot.ruleX([m.sqrt], { stroke: "var(--soft)", strokeDasharray: "2 3" }),
          Plot.text([`√L ≈ ${m.sqrt}`], { x: m.sqrt, frameAnchor: "top", dx: 4, dy: -12, textAnchor: "start", fill: "currentColor" })] : []),
        Plot.ruleX([knee[0]], { stroke: "var(--ink)" }),
        Plot.text([`minimum at ${knee[0]}`], { x: knee[0], frameAnchor: "top", dx: knee[0] > m.layers / 2 ? -4 : 4, dy: 4, textAnchor: knee[0] > m.layers / 2 ? "end" : "start", fill: "currentColor", stroke: "var(--paper)", strokeWidth: 4 }),
        Plot.ruleX([at], { stroke: "var(--soft)" }),
      ],
    });
    const flops = J.plot({
      width, height: 190, marginLeft: 58, x, y: { label: "↑ FLOPs added to a step (%)", domain: [0, 36], grid: true },
      marks: [
        Plot.ruleY([100 / 3], { stroke: "var(--soft)", strokeDasharray: "2 3" }),
        Plot.text(["a third: each layer recomputed once"], { x: m.layers, y: 100 / 3, dy: -7, textAnchor: "end", fill: "currentColor" }),
        Plot.line(points, { x: "k", y: "again", stroke: J.color(3), strokeWidth: 2 }),
        Plot.dot(marked, { x: "k", y: "again", fill: J.color(3), r: 5 }),
      ],
    });
    const legend = J.legend([...series.map((s) => ({ label: s.label, color: s.color, dash: J.marks.dash(s.dash), symbol: s.symbol })), ...(every ? [{ label: "(L/k + k) layer inputs, as in the lesson", color: "var(--soft)", dash: J.marks.dash(6) }] : [])], { width });
    const said = J.el("p", { class: "caption", id: "segments-said" }, `At ${at}: ${J.format.bytes(row[1])} saved between passes and up to ${J.format.bytes(row[2])} more in backward, in total ${J.format.bytes(row[1] + row[2])}; a peak of ${J.format.bytes(row[3])} with parameters, optimizer state and logits; and ${J.format.percent(row[4])} more FLOPs. Without checkpointing: ${J.format.bytes(m.none[0])} saved, a peak of ${J.format.bytes(m.none[2])}.`);
    return J.el("div", {}, legend, memory, flops, said, claims(values));
  };

  // A claimed table of intervals beside the ledger's numbers.
  function claims(values) {
    const { m, rows } = find(values);
    if (m.name !== data.claims.model || values["segments-kind"] !== "every") return "";
    const gb = (n) => (n === null ? null : `${(n / GB).toFixed(1)} GB`);
    const wrong = {
      1: "claimed for no checkpointing, but it is what remains when each layer is a checkpoint",
      4: "saved bytes fall by 4; the recomputed segment has all activations of four layers. Each layer is recomputed once",
      8: "a segment is recomputed once for all its layers, not once for each",
      80: "one segment: backward has all activations at once",
    };
    const table = J.table({
      columns: ["every N", "claimed", "saved", "segment", "claimed FLOPs", "FLOPs"],
      rows: data.claims.rows.map(([n, bytes, overhead]) => [String(n), gb(bytes) ?? "–", gb(rows[n - 1][1]), gb(rows[n - 1][2]), `+ ${J.format.percent(overhead, 0)}`, `+ ${J.format.percent(rows[n - 1][4])}`]),
    });
    return J.el("div", {},
      J.el("p", { class: "caption" }, "Intervals as training notes of unnamed authors claim them (docs/contradictions.md, Every Nth layer), and the ledger's numbers:"),
      J.el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Claimed intervals and those of the ledger" }, table),
      data.claims.rows.map(([n]) => J.el("p", { class: "caption" }, `N = ${n}: ${wrong[n]}.`)));
  }

  const table = (values) => {
    const { rows } = find(values);
    return {
      columns: ["k or n", { label: "saved between passes", format: J.format.exact }, { label: "most in backward", format: J.format.exact }, { label: "peak of a step", format: J.format.exact }, { label: "FLOPs added", format: J.format.percent }],
      rows,
    };
  };
  J.figure({
    id: "segments", title: "Checkpoint every k layers: the whole sweep", controls: [model, kind, number], draw, table,
    caption: (values) => {
      const { m, knee } = find(values), ratio = m.layer_bytes / m.input_bytes;
      return `${m.name}, ${m.layers} layers, one micro-batch. A layer saves ${J.format.bytes(m.layer_bytes)} without checkpointing, ${ratio.toFixed(1)} times its input, so the minimum is near √(L ÷ ${ratio.toFixed(1)}) = ${Math.sqrt(m.layers / ratio).toFixed(1)} and not at √L. Here it is ${knee[0]}.`;
    },
    command: (values) => {
      const { m, at } = find(values);
      return m.commands[values["segments-kind"]].replace("{number}", String(at));
    },
  });
})();

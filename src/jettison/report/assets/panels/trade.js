"use strict";
// Bytes saved against FLOPs added, by recompute mode, along the length of the sequence.
(() => {
  const { controls, data, words } = J.layers;
  const modes = data.document.modes.filter((mode) => mode !== "none");
  const counting = () => J.select({ key: "counting", label: "Recompute counts", value: "again", options: [{ value: "again", label: "only what backward needs" }, { value: "rerun", label: "all of attention core (the paper's)" }] });
  const lengths = data.sequences.filter((s) => s >= 512 && s <= 262144);
  const PASSES = 3n; // of a step: a forward, and a backward of twice its FLOPs (cost/flops.py)
  const point = (run, s, mode, count) => {
    const layer = J.layers.at({ ...run, s }), whole = layer.held("none");
    const saved = whole - layer.held(mode), again = layer[count](mode), step = layer.forward * PASSES;
    return { s, mode, saved, again, step, whole, percent: J.layers.share(saved, whole), more: J.layers.share(again, step) };
  };
  const look = (mode) => modes.indexOf(mode);

  J.figure({
    id: "trade",
    title: "Bytes against FLOPs",
    controls: [controls.layer(), controls.seq(), controls.batch(), controls.ranks(1, 64, 8), J.toggle({ key: "sp", label: "Sequence parallelism", value: false }), counting(), controls.attention(), controls.kernels(), controls.dropout()],
    draw(values, { width }) {
      const run = { ...J.layers.divided(values), layout: values.sp ? "sp" : "tp" };
      const points = modes.flatMap((mode) => lengths.map((s) => point(run, s, mode, values.counting)));
      const here = modes.map((mode) => point(run, run.s, mode, values.counting));
      const most = Math.max(0.02, ...points.map((p) => p.more), ...here.map((p) => p.more));
      const ends = ["selective"].flatMap((mode) => [lengths[0], lengths[lengths.length - 1]].map((s) => points.find((p) => p.mode === mode && p.s === s)));
      const drawing = J.plot({
        width, height: Math.round(Math.min(440, Math.max(320, width * 0.5))), marginLeft: 56, marginRight: 24,
        x: { label: "FLOPs added to a layer's step, %", domain: [0, most * 100 * 1.05], ticks: width < 500 ? 5 : 9, grid: true },
        y: { label: "bytes of a layer not kept, %", domain: [0, 104], ticks: [0, 20, 40, 60, 80, 100], grid: true },
        symbol: { type: "identity" },
        marks: [
          ...modes.map((mode) => Plot.line(points.filter((p) => p.mode === mode), { x: (p) => p.more * 100, y: (p) => p.percent * 100, stroke: J.color(look(mode)), strokeWidth: 2, strokeDasharray: J.marks.dash(look(mode)) })),
          Plot.dot(points, { x: (p) => p.more * 100, y: (p) => p.percent * 100, fill: (p) => J.color(look(p.mode)), r: 1.8 }),
          Plot.dot(here, { x: (p) => p.more * 100, y: (p) => p.percent * 100, symbol: (p) => J.marks.symbol(look(p.mode)), stroke: (p) => J.color(look(p.mode)), fill: "var(--panel)", strokeWidth: 2.4, r: 7 }),
          ...(width < 500 ? [] : [Plot.text(ends.filter((p) => p.saved > 0n), { x: (p) => p.more * 100, y: (p) => p.percent * 100, text: (p) => `${p.s >= 1024 ? `${p.s / 1024}K` : p.s}`, dx: 8, textAnchor: "start", fontSize: 11, fill: "var(--soft)" })]),
        ],
      });
      const legend = modes.map((mode) => ({ label: words[mode], color: J.color(look(mode)), dash: J.marks.dash(look(mode)), symbol: J.marks.symbol(look(mode)) }));
      return J.el("div", {}, J.legend(legend, { width }), drawing);
    },
    caption(values) {
      const run = { ...J.layers.divided(values), layout: values.sp ? "sp" : "tp" };
      const [selective, full] = ["selective", "full"].map((mode) => point(run, run.s, mode, values.counting));
      const forward = J.layers.share(selective.again * PASSES, selective.step);
      const text = selective.saved > 0n
        ? `At s = ${J.format.count(run.s)} selective recomputation drops ${J.format.percent(selective.percent)} of a layer's bytes for ${J.format.percent(selective.more, 2)} more FLOPs in a step (${J.format.percent(forward)} of a forward)`
        : "With fused attention there is nothing for selective recomputation to drop: the kernel itself recomputes the scores";
      return `${text}; full recomputation drops ${J.format.percent(full.percent)} for ${J.format.percent(full.more)}. Lines follow s from ${lengths[0]} to ${lengths[lengths.length - 1] / 1024}K; FLOPs are those of matmuls.${J.layers.note(values)}`;
    },
    table(values) {
      const run = { ...J.layers.divided(values), layout: values.sp ? "sp" : "tp" };
      const rows = [...new Set([...lengths, run.s])].sort((a, b) => a - b).flatMap((s) => modes.map((mode) => {
        const p = point(run, s, mode, values.counting);
        return [s, mode, J.layers.exact(p.whole - p.saved), J.layers.exact(p.saved), p.percent, J.layers.exact(p.again), p.more];
      }));
      return { columns: ["tokens", "recompute", "bytes kept", "bytes not kept", { label: "not kept", format: J.format.percent }, "recomputed FLOPs", { label: "of a step", format: (x) => J.format.percent(x, 2) }], rows };
    },
    command: (values) => J.layers.command({ ...J.layers.divided(values), layout: values.sp ? "sp" : "tp", recompute: "selective" }),
  });
})();

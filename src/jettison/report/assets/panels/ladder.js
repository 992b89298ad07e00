"use strict";
// Bytes of a layer as a percentage of the tensor-parallel baseline: the ladder from sharding to full recomputation.
(() => {
  const { controls, data } = J.layers;
  const rungs = [
    { name: "tensor parallelism (baseline)", layout: "tp", recompute: "none" },
    { name: "+ sequence parallelism", layout: "sp", recompute: "none" },
    { name: "+ selective recomputation", layout: "tp", recompute: "selective" },
    { name: "+ both", layout: "sp", recompute: "selective" },
    { name: "full recomputation", layout: "tp", recompute: "full" },
    { name: "full + sequence parallelism", layout: "sp", recompute: "full" },
  ];
  // as each model was trained; t as the slider says
  const run = (values, layer, rung) => ({ ...values, layer, s: layer.seq, b: layer.micro_batch, t: J.layers.ranksFor(layer, values.t), kernels: "megatron", layout: rung.layout });
  const bytesOf = (values, layer, rung) => J.layers.at(run(values, layer, rung)).held(rung.recompute);
  const shown = (layer) => `${layer.label}`;
  const all = (values) => data.layers.filter((layer) => J.layers.ranksFor(layer, values.t) > 1).flatMap((layer) => {
    const whole = bytesOf(values, layer, rungs[0]);
    return rungs.map((rung) => ({ layer, rung, bytes: bytesOf(values, layer, rung), whole, percent: J.layers.share(bytesOf(values, layer, rung), whole) * 100 }));
  });
  const color = (rung) => J.color([7, 0, 1, 2, 3, 5][rungs.indexOf(rung)]);
  const hatch = (rung) => [4, 1, 2, 0, 3, 6][rungs.indexOf(rung)];

  J.figure({
    id: "ladder",
    title: "The memory ladder",
    controls: [controls.ranks(2, 64, 8), controls.attention(), controls.dropout(), controls.layer()],
    draw(values, { width }) {
      const bars = all(values), names = [...new Set(bars.map((bar) => shown(bar.layer)))], wide = width >= 620;
      const marginLeft = wide ? Math.min(width * 0.36, 20 + 6.6 * Math.max(...names.map((name) => name.length))) : 8;
      const drawing = J.plot({
        width, height: 44 + names.length * (wide ? 108 : 126), marginLeft, marginRight: 64, marginTop: wide ? 8 : 20, marginBottom: 40,
        fy: { label: null, domain: names, padding: wide ? 0.12 : 0.24, axis: wide ? "left" : null },
        y: { axis: null, domain: rungs.map((rung) => rung.name), padding: 0.14 },
        x: { label: wide ? "bytes of a layer on one rank, % of the tensor-parallel baseline" : "bytes of a layer, % of the baseline", domain: [0, 100], grid: true },
        marks: [
          Plot.barX(bars, { fy: (bar) => shown(bar.layer), y: (bar) => bar.rung.name, x: "percent", fill: (bar) => J.marks.hatch(hatch(bar.rung), color(bar.rung)), stroke: (bar) => color(bar.rung) }),
          Plot.text(bars, { fy: (bar) => shown(bar.layer), y: (bar) => bar.rung.name, x: "percent", text: (bar) => `${bar.percent.toFixed(1)} %`, textAnchor: "start", dx: 5, fill: "currentColor" }),
          ...(wide ? [] : [Plot.text(names, { fy: (name) => name, text: (name) => name, frameAnchor: "top-left", dy: -14, lineWidth: (width - 16) / 15, textOverflow: "ellipsis", fontWeight: 600, fill: "currentColor" })]),
        ],
      });
      return J.el("div", {}, J.legend(rungs.map((rung) => ({ label: rung.name, color: color(rung), hatch: hatch(rung) })), { width }), drawing);
    },
    caption(values) {
      const layer = J.layers.chosen(values).layer, t = J.layers.ranksFor(layer, values.t);
      const lead = "Each model at the sequence length and micro-batch of its table row; by Megatron's kernels. ";
      if (t < 2) return `${lead}${layer.label} does not divide over several ranks.`;
      const [whole, , , both, full] = rungs.map((rung) => bytesOf(values, layer, rung));
      return `${lead}${layer.label} at t = ${t}: with both, a layer keeps ${J.format.percent(J.layers.share(both, whole))} of the baseline, ${J.layers.share(whole, both).toFixed(1)} times less; full recomputation ${J.format.percent(J.layers.share(full, whole))}.`;
    },
    table(values) {
      return {
        columns: ["model", "tokens", "micro-batch", "t", "technique", "bytes of a layer on one rank", { label: "of the baseline", format: J.format.percent }],
        rows: all(values).map((bar) => [shown(bar.layer), bar.layer.seq, bar.layer.micro_batch, J.layers.ranksFor(bar.layer, values.t), bar.rung.name, J.layers.exact(bar.bytes), bar.percent / 100]),
      };
    },
    command: (values) => J.layers.command({ ...run(values, J.layers.chosen(values).layer, rungs[3]), recompute: rungs[3].recompute }),
  });
})();

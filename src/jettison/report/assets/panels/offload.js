"use strict";
// Offload against recompute by the bandwidth of the link to the host, and what a mix of both buys.
(() => {
  const data = J.data("offload"), names = data.models.map((m) => m.name);
  const model = J.select({ key: "offload-model", label: "Model", options: names, value: names[0] });
  const rates = data.models[0].rows.map((row) => row.gigabytes);
  const rate = J.slider({ key: "offload-rate", label: "Link, one way", values: rates, value: 64, format: (g) => `${g} GB/s` });
  const find = (values) => {
    const m = data.models.find((one) => one.name === values["offload-model"]);
    return { m, row: m.rows.find((each) => each.gigabytes === values["offload-rate"]) };
  };
  const short = (name) => name.replace(" x16", "").replace(" shared by two (GB200)", ", half (GB200)").replace(" (GH200)", " (GH200)");

  const draw = (values, { width }) => {
    const { m, row } = find(values);
    const again = m.again.seconds;
    const series = [
      { label: "plan with recompute and offload", color: "var(--host)", dash: 0, symbol: "circle", points: m.rows.filter((r) => r.mix.seconds).map((r) => ({ x: r.gigabytes, y: r.mix.seconds, text: `plan with recompute and offload, ${r.gigabytes} GB/s\n${J.format.seconds(r.mix.seconds)} a step, ${J.format.bytes(r.mix.host)} offloaded to CPU` })) },
      { label: "offload all saved tensors", color: "var(--pack)", dash: 1, symbol: "triangle", points: m.rows.map((r) => ({ x: r.gigabytes, y: r.all_seconds, text: `offload all saved tensors, ${r.gigabytes} GB/s\n${J.format.seconds(r.all_seconds)} a step, peak ${J.format.bytes(r.all_peak)}` })) },
      ...(again ? [{ label: "plan with recompute only", color: "var(--again)", dash: 2, symbol: "square", points: m.rows.map((r) => ({ x: r.gigabytes, y: again, text: `plan with recompute only\n${J.format.seconds(again)} a step` })) }] : []),
    ];
    const highest = Math.min(Math.max(...series.flatMap((s) => s.points.map((p) => p.y))), 1.7 * (again ?? m.none_seconds));
    const inside = series.flatMap((s) => s.points.filter((p) => p.y <= highest * 1.001).map((p) => ({ ...p, s })));
    const chart = J.plot({
      width, height: 330, marginTop: width < 560 ? 80 : 52, marginLeft: 56,
      x: { type: "log", base: 2, label: "CPU to GPU link, one direction (GB/s) →", domain: [rates[0], rates[rates.length - 1]], ticks: rates, tickFormat: String, grid: true },
      y: { label: "↑ Modelled step time (s)", domain: [Math.min(m.none_seconds * 0.88, ...inside.map((p) => p.y)), highest * 1.02], grid: true },
      marks: [
        ...data.links.map((link) => Plot.ruleX([link.gigabytes], { stroke: "var(--soft)", strokeDasharray: "2 3" })),
        ...data.links.map((link, i) => Plot.text([short(link.name)], { x: link.gigabytes, frameAnchor: "top", textAnchor: i < 2 ? "middle" : "end", dx: i < 2 ? 0 : 14, dy: -8 - (width < 560 ? 14 * i : i > 2 ? 14 : 0), fill: "currentColor", fontSize: 11 })),
        Plot.ruleY([m.none_seconds], { stroke: "var(--ink)", strokeWidth: 0.8 }),
        Plot.text(["no recomputation, if it fitted"], { y: m.none_seconds, frameAnchor: "left", dx: 6, dy: 9, textAnchor: "start", fill: "currentColor" }),
        ...series.map((s) => Plot.line(s.points, { x: "x", y: "y", stroke: s.color, strokeWidth: 2, strokeDasharray: J.marks.dash(s.dash), clip: true })),
        ...series.map((s, i) => Plot.dot(s.points.filter((p) => p.y <= highest * 1.001), { x: "x", y: "y", fill: s.color, symbol: s.symbol, r: 4.5, className: `offload-dots-${i}` })),
        Plot.ruleX([row.gigabytes], { stroke: "var(--ink)" }),
      ],
    });
    const legend = J.legend(series.map((s) => ({ label: s.label, color: s.color, dash: J.marks.dash(s.dash), symbol: s.symbol })), { width });
    const nodes = [...chart.querySelectorAll("[class^=offload-dots] circle, [class^=offload-dots] path")];
    J.rove(chart, nodes, (node) => inside[nodes.indexOf(node)].text);
    return J.el("div", {}, legend, chart, said(m, row), even(m, row, width));
  };

  function said(m, row) {
    const { mix } = row, best = m.again.seconds;
    if (!mix.seconds) return J.el("p", { class: "caption" }, `Nothing fits: ${J.format.bytes(mix.minimum_bytes)} at least.`);
    const gain = best ? ` ${J.format.seconds(best - mix.seconds)} (${J.format.percent(1 - mix.seconds / best)}) less than with recompute only,` : " with recompute only nothing fits,";
    return J.el("p", { class: "caption", id: "offload-said" }, `Over ${row.gigabytes} GB/s the plan takes ${J.format.seconds(mix.seconds)} a step as modelled,${gain} ${J.format.seconds(row.all_seconds - mix.seconds)} less than with all saved tensors offloaded${row.all_peak > m.budget ? " (which does not fit either)" : ""}: ${J.format.bytes(mix.host)} offloaded to CPU; in a micro-batch ${J.format.seconds(mix.again)} of recomputation and ${J.format.seconds(mix.stalled)} waiting for transfers.`);
  }

  // Several of one name are numbered.
  const named = (m, role, i) => {
    const first = role.split(", ")[0], times = m.tensors.slice(0, i).filter((t) => t[0].split(", ")[0] === first).length;
    return times ? `${first} ${times + 1}` : first;
  };

  // Each tensor's break-even bandwidth: to the right of it offloading is faster than recomputing.
  function even(m, row, width) {
    const tensors = m.tensors.map(([role, nbytes, again, limit], i) => ({ role: named(m, role, i), nbytes, again, limit }));
    const priced = tensors.filter((t) => t.limit !== null), narrow = width < 560;
    const chart = J.plot({
      width, height: 46 + 20 * priced.length + 30, marginLeft: narrow ? 116 : 150, marginTop: 22,
      x: { type: "log", label: "Break-even link, one direction (GB/s) →", tickFormat: (d) => String(d), ticks: 4 },
      y: { domain: priced.map((t) => t.role), label: null, tickSize: 0 },
      marks: [
        Plot.ruleY(priced, { y: "role", x1: () => Math.min(row.reached, ...priced.map((u) => u.limit)) * 0.8, x2: "limit", stroke: "var(--line)" }),
        Plot.dot(priced, { x: "limit", y: "role", r: 5, symbol: (t) => (t.limit < row.reached ? "circle" : "square"), fill: (t) => (t.limit < row.reached ? "var(--host)" : "var(--again)") }),
        Plot.ruleX([row.reached], { stroke: "var(--ink)" }),
        Plot.text([`${row.gigabytes} GB/s, ${row.reached} reached`], { x: row.reached, frameAnchor: "top", dy: -14, textAnchor: row.reached > 200 ? "end" : "start", fill: "currentColor" }),
      ],
      symbol: { type: "identity" }, color: { type: "identity" },
    });
    return J.el("div", {}, J.legend([{ label: "faster to offload", symbol: "circle", color: "var(--host)" }, { label: "faster to recompute", symbol: "square", color: "var(--again)" }], { width }), chart);
  }

  const table = (values) => {
    const { m } = find(values);
    return {
      columns: ["link", { label: "plan with recompute and offload", format: J.format.seconds }, { label: "offload all saved tensors", format: J.format.seconds }, { label: "plan with recompute only", format: J.format.seconds }, { label: "peak of the plan", format: J.format.exact }, { label: "offloaded", format: J.format.exact }, { label: "recomputed, a micro-batch", format: J.format.seconds }, { label: "waiting, a micro-batch", format: J.format.seconds }, { label: "step of the command", format: J.format.seconds }],
      rows: [
        ...m.rows.map((r) => [`${r.gigabytes} GB/s`, r.mix.seconds, r.all_seconds, m.again.seconds, r.mix.peak ?? null, r.mix.host ?? null, r.mix.again ?? null, r.mix.stalled ?? null, r.mix.planned_seconds ?? null]),
        ...m.tensors.map(([role, nbytes, again, limit]) => [`${role}, ${J.format.exact(nbytes)}: ${again === null ? "may not be recomputed" : `recomputed in ${J.format.seconds(again)}`}${limit === null ? "" : `, break-even at ${limit} GB/s`}`, null, null, null, null, null, null, null, null]),
      ],
    };
  };
  J.figure({
    id: "offload", title: "Recompute or offload, by the link", controls: [model, rate], draw, table,
    caption: (values) => {
      const { m } = find(values);
      return `${m.name} (${m.layout}) on ${m.gpu}, whose own link has ${m.own} GB/s and which leaves ${J.format.bytes(m.budget)} for tensors; without recomputation the peak would be ${J.format.bytes(m.none_peak)}. Below, for each saved tensor of a layer: the link over which offloading it, unhidden, takes as long as recomputing it. The command states the expected step time, with its range.`;
    },
    command: (values) => find(values).row.mix.command,
  });
})();

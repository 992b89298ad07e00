"use strict";
// What one layer keeps, against the length of the sequence: a part that grows with s, and one that grows with s².
(() => {
  const { controls, data } = J.layers;
  const lengths = [];
  for (let power = 14; power <= 40; power += 1) lengths.push(Math.round(2 ** (power / 2) / 8) * 8);
  const [low, high] = [lengths[0], lengths[lengths.length - 1]];

  // The attention part is what selective recomputation drops; the structural part is all the rest.
  const parts = (run, s) => {
    const layer = J.layers.at({ ...run, s });
    const rest = layer.held("selective");
    return { s, rest, core: layer.held("none") - rest, whole: layer.held("none") };
  };
  // The shortest sequence at which attention keeps as much as everything else.
  const crossover = (run) => {
    const ahead = (s) => { const at = parts(run, s); return at.core > 0n && at.core >= at.rest; };
    let [below, above] = [1, high];
    if (!ahead(above)) return null;
    if (ahead(below)) return below;
    while (above - below > 1) {
      const middle = Math.floor((below + above) / 2);
      if (ahead(middle)) above = middle;
      else below = middle;
    }
    return above;
  };
  const run = (values) => J.layers.divided(values);
  const series = [
    { name: "total", of: "whole", dash: "none", symbol: "circle", color: J.color(7) },
    { name: "structural part, linear in s", of: "rest", dash: J.marks.dash(1), symbol: "square", color: J.color(2) },
    { name: "attention part, quadratic in s", of: "core", dash: J.marks.dash(2), symbol: "triangle", color: J.color(0) },
  ];

  J.figure({
    id: "budget",
    title: "The activation budget of one layer",
    controls: [controls.layer(), controls.seq(), controls.batch(), controls.ranks(1, 64, 1), controls.attention(), controls.kernels(), controls.precision(), controls.dropout()],
    draw(values, { width }) {
      const now = run(values), points = lengths.map((s) => parts(now, s)), here = parts(now, now.s), cross = crossover(now);
      const shown = series.filter((one) => points.some((p) => p[one.of] > 0n));
      const rows = shown.flatMap((one) => points.filter((p) => p[one.of] > 0n).map((p) => ({ s: p.s, bytes: Number(p[one.of]), of: one.name })));
      const bytes = rows.map((row) => row.bytes), [least, most] = [Math.min(...bytes), Math.max(...bytes)];
      const look = (of) => series.find((one) => one.name === of);
      const meets = cross === null || cross < low ? [] : [{ s: cross, bytes: Number(parts(now, cross).core) }];
      const left = meets.length && meets[0].s > (width < 500 ? 16384 : 131072); // the curves rise to the right: below them, or above near the edge
      const drawing = J.plot({
        width, height: Math.round(Math.min(440, Math.max(300, width * 0.5))), marginLeft: 72,
        x: { type: "log", base: 2, label: "sequence length s, tokens", domain: [low, high], ticks: width < 500 ? [128, 2048, 32768, 524288] : data.sequences.filter((_, i) => i % 2 === 0), tickFormat: (s) => (s >= 1024 ? `${s / 1024}K` : `${s}`) },
        y: { type: "log", base: 2, label: "bytes kept by one layer on one rank", domain: [least / 1.5, most * 1.5], ticks: J.layers.logTicks(least / 1.5, most * 1.5), tickFormat: J.format.tick, grid: true },
        marks: [
          Plot.ruleX([now.s], { stroke: "var(--soft)", strokeDasharray: "1 3" }),
          ...shown.map((one) => Plot.line(rows.filter((row) => row.of === one.name), { x: "s", y: "bytes", stroke: one.color, strokeWidth: 2.2, strokeDasharray: one.dash })),
          Plot.dot(shown.filter((one) => here[one.of] > 0n), { x: now.s, y: (one) => Number(here[one.of]), symbol: (one) => one.symbol, fill: (one) => one.color, r: 5 }),
          Plot.dot(meets, { x: "s", y: "bytes", r: 8, stroke: "currentColor", strokeWidth: 1.8 }),
          Plot.text(meets, { x: "s", y: "bytes", text: (m) => `crossover: s = ${J.format.count(m.s)}`, textAnchor: left ? "end" : "start", dx: left ? -4 : 13, dy: left ? -28 : 17, fontWeight: 600, stroke: "var(--panel)", strokeWidth: 4, fill: "currentColor" }),
        ],
        symbol: { type: "identity" },
      });
      return J.el("div", {}, J.legend(shown.map((one) => ({ label: look(one.name).name, color: one.color, dash: one.dash, symbol: one.symbol })), { width }), drawing);
    },
    caption(values) {
      const now = run(values), here = parts(now, now.s), cross = crossover(now), layer = J.layers.at(now);
      const half = `At s = ${J.format.count(now.s)} one layer of ${now.layer.label} keeps ${J.format.bytes(J.layers.exact(here.whole))} (${J.format.grouped(J.layers.exact(here.whole))} bytes) for its backward pass`;
      const core = here.core > 0n ? `, ${J.format.percent(J.layers.share(here.core, here.whole))} of it attention scores, probabilities and their mask. ` : ". Nothing of it grows with s²: a fused kernel never stores the scores. ";
      const meets = cross === null ? "" : `The two parts are equal at s = ${J.format.count(cross)}. `;
      return `${half}${core}${meets}In full: ${layer.formula("none")} bytes.${J.layers.note(values)}`;
    },
    table(values) {
      const now = run(values);
      return {
        columns: ["tokens", "total, bytes", "structural part", "attention part", { label: "attention", format: J.format.percent }],
        rows: [...new Set([...data.sequences, now.s])].sort((a, b) => a - b).map((s) => {
          const at = parts(now, s);
          return [s, J.layers.exact(at.whole), J.layers.exact(at.rest), J.layers.exact(at.core), J.layers.share(at.core, at.whole)];
        }),
      };
    },
    command: (values) => J.layers.command(run(values)),
  });
})();

"use strict";
// Iteration time: full recomputation, selective with sequence parallelism, the planner's choice; measured beside it.
(() => {
  const data = J.data("time"), ALL = "all, relative to full recomputation";
  const label = Object.fromEntries(data.ways.map((way) => [way.key, way.label]));
  const model = J.select({ key: "time-model", label: "Model", options: [ALL, ...data.models.map((m) => m.name)], value: ALL });
  const way = J.select({ key: "time-way", label: "Command line of", options: data.ways.map((w) => ({ value: w.key, label: w.label })), value: "auto" });
  const fills = data.parts.map((_, i) => J.marks.hatch(i, J.color(i)));
  const chosen = (values) => data.models.filter((m) => values["time-model"] === ALL || m.name === values["time-model"]);
  const text = (s) => (s < 1 ? J.format.seconds(s) : `${s.toFixed(2)} s`);
  const words = (row, narrow) => {
    if (row.seconds === null) return `does not fit: ${J.format.bytes(row.minimum_bytes)} at least`;
    const seconds = text(row.expected), range = row.range.map(text).join(" to "), fits = row.fits ? "" : ", does not fit";
    return narrow
      ? `${seconds} (${range}), MFU ${J.format.percent(row.mfu)}${fits}`
      : `${seconds} (${range}, 80 % range), MFU ${J.format.percent(row.mfu)}, HFU ${J.format.percent(row.hfu)}${fits}`;
  };

  const draw = (values, { width }) => {
    const models = chosen(values), relative = values["time-model"] === ALL, narrow = width < 560;
    const bars = [], marks = [], titles = [], order = [];
    for (const m of models) {
      const unit = relative ? m.rows.find((row) => row.way === "full").seconds ?? m.rows.find((row) => row.seconds)?.seconds ?? 1 : 1;
      for (const row of m.rows) {
        const key = `${m.name} ${row.way}`;
        order.push(key);
        titles.push({ key, text: `${relative ? `${m.name}, ` : ""}${label[row.way]}:${narrow ? "\n" : " "}${words(row, narrow)}` });
        let from = 0;
        (row.parts ?? []).forEach((seconds, i) => {
          bars.push({ key, part: data.parts[i], from: from / unit, to: (from + seconds) / unit, text: `${m.name}, ${label[row.way]}\n${data.parts[i]} ${J.format.seconds(seconds)} of ${J.format.seconds(row.seconds)}` });
          from += seconds;
        });
        if (row.published_seconds) marks.push({ key, at: row.published_seconds / unit });
      }
    }
    const size = (relative ? 40 : 56) + (narrow ? 18 : 0);
    const chart = J.plot({
      width, height: order.length * size + 60, marginLeft: 10, marginRight: 24, marginTop: 8,
      x: { label: relative ? "Step time ÷ full recomputation →" : "Step time (s) →", grid: true, domain: [0, Math.max(...bars.map((b) => b.to), ...marks.map((m) => m.at)) * 1.03] },
      y: { domain: order, axis: null, padding: 0 },
      color: { domain: data.parts, range: fills },
      marks: [
        Plot.rect(bars, { x1: "from", x2: "to", y: "key", fill: "part", stroke: (b) => J.color(data.parts.indexOf(b.part)), insetTop: narrow ? 38 : 20, insetBottom: 4, className: "bar" }),
        Plot.dot(marks, { x: "at", y: "key", symbol: "diamond2", r: 6, dy: narrow ? 17 : 8, fill: "var(--paper)", stroke: "var(--ink)", strokeWidth: 2 }),
        Plot.text(titles, { x: 0, y: "key", text: "text", textAnchor: "start", dy: 4 - size / 2, lineAnchor: "top", lineHeight: 1.3, fill: "currentColor" }),
        Plot.ruleX([0]),
      ],
    });
    const legend = J.legend([
      ...data.parts.map((part, i) => ({ label: part, color: J.color(i), hatch: i })),
      { label: "measured in the paper", symbol: "diamond2", color: "var(--ink)", fill: "var(--paper)" },
    ], { width });
    const nodes = [...chart.querySelectorAll(".bar rect")];
    return J.el("div", {}, legend, J.rove(chart, nodes, (node) => bars[nodes.indexOf(node)].text));
  };
  const table = (values) => ({
    columns: ["model", "recompute", { label: "as modelled", format: J.format.seconds }, { label: "expected", format: J.format.seconds }, { label: "from", format: J.format.seconds }, { label: "to", format: J.format.seconds }, { label: "measured", format: J.format.seconds }, { label: "error", format: J.format.percent },
      ...data.parts.map((part) => ({ label: part, format: J.format.seconds })),
      { label: "MFU", format: J.format.percent }, { label: "HFU", format: J.format.percent }, { label: "measured MFU", format: J.format.percent },
      { label: "peak", format: J.format.exact }, "fits"],
    rows: chosen(values).flatMap((m) => m.rows.map((row) => [
      m.name, label[row.way], row.seconds, row.expected ?? null, ...(row.range ?? [null, null]), row.published_seconds, row.published_seconds ? row.seconds / row.published_seconds - 1 : null,
      ...(row.parts ?? data.parts.map(() => null)), row.mfu ?? null, row.hfu ?? null, row.way === "selective" ? m.published_mfu : null,
      row.peak_bytes ?? null, row.fits ? "yes" : "no"])),
  });
  J.figure({
    id: "time", title: "Iteration time and where it goes", controls: [model, way], draw, table,
    caption: (values) => {
      const m = chosen(values)[0], own = chosen(values).length === 1;
      return `${own ? `${m.name} on ${m.gpus} × ${m.gpu} (${m.layout}). ` : "GPTs of arXiv 2205.05198 in its layouts on A100s. "}Full recomputation is without sequence parallelism, as in the paper. Above a bar is the expected step time with its range, in it the parts as modelled; diamonds are Table 5's measured ones.`;
    },
    command: (values) => {
      const m = chosen(values)[0];
      return m.rows.find((row) => row.way === values["time-way"]).command;
    },
  });
})();

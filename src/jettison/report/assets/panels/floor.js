"use strict";
// What t ranks cannot split: the bytes of a layer on one rank, tensor by tensor, under three ways of tensor parallelism.
(() => {
  const { controls, data } = J.layers;
  const ways = [
    { name: "tensor parallelism", short: "tensor parallelism", layout: "tp" },
    { name: "with sequence parallelism", short: "with sequence parallelism", layout: "sp" },
    { name: "stock DTensor, PyTorch's kernels", short: "stock DTensor", layout: "sp-gathered", kernels: "pytorch" },
  ];
  const mode = () => J.select({ key: "floor-mode", label: "Recompute", value: "none", options: ["none", "selective", "full"] });
  const run = (values, t, way) => ({ ...J.layers.chosen(values), t, layout: way.layout, kernels: way.kernels ?? "megatron" });

  // A tensor's name: where it is saved, and what it is. Those of one name are one row.
  const place = (e) => (e.path ? e.path.replaceAll("_", " ").replaceAll(".", " ") : e.part > 2 ? "after mlp" : e.part > 0 ? "after attention" : "");
  const nameOf = (e) => `${e.role}${place(e) ? `, ${place(e)}` : ""}`;
  // By name: bytes, and what kind of row. A tensor is of the floor if plain tensor parallelism copies it to every rank.
  const rowsOf = (values, t, way) => {
    const wanted = values["floor-mode"], plain = new Set();
    for (const e of J.layers.at(run(values, Math.max(t, 2), ways[0])).entries) if (e.split === "copy") plain.add(nameOf(e));
    const found = new Map();
    const layer = J.layers.at(run(values, t, way));
    const keep = layer.entries.filter((e) => e.stays(wanted));
    const last = Math.max(...layer.entries.map((e) => e.part));
    for (const e of keep) {
      const name = nameOf(t === 1 && !e.path ? { ...e, part: e.part || last } : e);
      const row = found.get(name) ?? { name, bytes: 0n, copied: false, floor: plain.has(name), core: false };
      row.bytes += e.bytes;
      row.copied ||= e.split === "copy" && t > 1;
      row.core ||= !e.stays("selective");
      found.set(name, row);
    }
    return [...found.values()];
  };
  const kinds = ["sharded: attention core", "sharded: the rest", "norm inputs", "inputs of matmuls", "dropout masks", "other floor"];
  const kindOf = (row) => {
    if (row.core) return kinds[0];
    if (!row.floor) return kinds[1];
    if (row.name.startsWith("norm input")) return kinds[2];
    if (row.name.startsWith("linear input")) return kinds[3];
    return row.name.startsWith("dropout mask") ? kinds[4] : kinds[5];
  };
  const look = (kind) => ({ color: J.color([7, 7, 1, 0, 2, 3][kinds.indexOf(kind)]), hatch: [6, 4, 0, 1, 2, 3][kinds.indexOf(kind)] });

  J.figure({
    id: "floor",
    title: "What tensor parallelism cannot split",
    controls: [controls.layer(), controls.seq(), controls.batch(), controls.ranks(2, 64, 8), mode(), controls.attention(), controls.dropout()],
    draw(values, { width }) {
      const layer = J.layers.chosen(values).layer, ranks = layer.ranks, bars = [];
      for (const way of ways) {
        for (const t of ranks) {
          const byKind = new Map();
          for (const row of rowsOf(values, t, way)) byKind.set(kindOf(row), (byKind.get(kindOf(row)) ?? 0n) + row.bytes);
          for (const kind of [...kinds].reverse()) if (byKind.get(kind)) bars.push({ way: way.short, t, kind, bytes: Number(byKind.get(kind)) });
        }
      }
      const floor = Number(J.layers.total(J.layers.at(run(values, Math.max(2, ...ranks), ways[0])).entries, (e) => e.split === "copy" && e.stays(values["floor-mode"])));
      const used = kinds.filter((kind) => bars.some((bar) => bar.kind === kind));
      const most = d3.max(d3.rollups(bars, (of) => d3.sum(of, (bar) => bar.bytes), (bar) => `${bar.way} ${bar.t}`), (pair) => pair[1]);
      const narrow = width < 620, t = J.layers.ranksFor(layer, values.t);
      const facet = narrow ? { fy: "way" } : { fx: "way" };
      const drawing = J.plot({
        width, height: narrow ? 760 : 400, marginLeft: 68, marginTop: narrow ? 34 : 50, marginRight: narrow ? 12 : 8, marginBottom: 44,
        fx: narrow ? undefined : { label: null, domain: ways.map((way) => way.short), padding: 0.06 },
        fy: narrow ? { axis: null, domain: ways.map((way) => way.short), padding: 0.22 } : undefined,
        x: { type: "band", domain: ranks, label: "tensor-parallel ranks t", tickFormat: String, padding: 0.16 },
        y: J.byteAxis("bytes kept by one layer on one rank", most * 1.12, narrow ? 4 : 6),
        marks: [
          Plot.barY(bars, { ...facet, x: "t", y: "bytes", order: kinds.slice().reverse(), fill: (bar) => J.marks.hatch(look(bar.kind).hatch, look(bar.kind).color), stroke: (bar) => look(bar.kind).color, strokeWidth: 0.7, inset: 0.3 }),
          Plot.ruleY(ways.slice(0, 1), { [narrow ? "fy" : "fx"]: "short", y: () => floor, stroke: "currentColor", strokeDasharray: "5 3", strokeWidth: 1.4 }),
          Plot.text(ways.slice(0, 1), { [narrow ? "fy" : "fx"]: "short", text: () => `dashed: the floor, ${J.format.tick(floor)}`, frameAnchor: "top-right", dy: narrow ? 18 : 4, fontWeight: 600, fill: "currentColor" }),
          Plot.dot(ways.filter((way) => t > 1 || way.layout === "tp"), { [narrow ? "fy" : "fx"]: "short", x: () => t, y: (way) => d3.sum(bars.filter((bar) => bar.way === way.short && bar.t === t), (bar) => bar.bytes), symbol: "triangle2", rotate: 180, r: 4, dy: -8, fill: "currentColor" }),
          ...(narrow ? [Plot.text(ways, { fy: "short", text: "short", frameAnchor: "top-right", dy: 2, fontWeight: 600, fill: "currentColor" })] : []),
        ],
      });
      const legend = used.map((kind) => ({ label: kind, color: look(kind).color, hatch: look(kind).hatch }));
      return J.el("div", {}, J.legend(legend, { width }), drawing);
    },
    caption(values) {
      const layer = J.layers.chosen(values).layer, t = J.layers.ranksFor(layer, Math.max(2, values.t)), wanted = values["floor-mode"];
      if (t < 2) return `${layer.label} does not divide over several ranks.`;
      const [plain, shared, stock] = ways.map((way) => J.layers.at(run(values, t, way)));
      const floor = J.layers.total(plain.entries, (e) => e.split === "copy" && e.stays(wanted));
      const text = (big) => J.format.bytes(Number(big));
      return `At t = ${t}, marked, a rank keeps ${text(plain.held(wanted))} of a layer, ${text(floor)} of it copies that each rank has: the floor (dashed). ` +
        `Sequence parallelism shards it along s: ${text(shared.held(wanted))}. Stock DTensor keeps all-gathered inputs of matmuls: ${text(stock.held(wanted))}.${J.layers.note({ ...values, t: Math.max(2, values.t) })}`;
    },
    table(values) {
      const t = J.layers.ranksFor(J.layers.chosen(values).layer, values.t);
      const columns = ["tensor", "kind", ...ways.map((way) => `${way.name}, bytes at t = ${t}`), "under tensor parallelism"];
      const all = ways.map((way) => rowsOf(values, t, way)), names = [...new Set(all.flat().map((row) => row.name))];
      const rows = names.map((name) => {
        const found = all.map((rows) => rows.find((row) => row.name === name)), any = found.find(Boolean);
        return [name, kindOf(any), ...found.map((row) => (row ? J.layers.exact(row.bytes) : 0)), found[0] ? (found[0].copied ? "a copy on each rank" : "sharded") : "not kept"];
      });
      rows.push(["total", "", ...all.map((of) => J.layers.exact(of.reduce((sum, row) => sum + row.bytes, 0n))), ""]);
      return { columns, rows };
    },
    command: (values) => J.layers.command({ ...run(values, J.layers.ranksFor(J.layers.chosen(values).layer, values.t), ways[0]), recompute: values["floor-mode"] }),
  });
})();

"use strict";
// One layer across t ranks: who has what of each part, and what ranks send each other between the parts.
(() => {
  const { controls } = J.layers;
  const letters = { all_gather_into_tensor: "all-gather", reduce_scatter_tensor: "reduce-scatter", all_reduce: "all-reduce" };
  const layout = () => J.toggle({ key: "sp", label: "Sequence parallelism", value: false });
  const run = (values) => {
    const now = J.layers.divided(values);
    return { ...now, layout: values.sp ? "sp" : "tp" };
  };
  const splitWords = { copy: "copies", sequence: "sequence shards", heads: "shards by head", width: "shards by width", rows: "shards by row" };
  // A part's split is that of most of its bytes; where nothing of it is kept, that of its neighbours' kind.
  const partsOf = (layer) => layer.parts.map((name, index) => {
    const entries = layer.entries.filter((e) => e.part === index && e.stays("none"));
    const bySplit = new Map();
    for (const e of entries) bySplit.set(e.split, (bySplit.get(e.split) ?? 0n) + e.bytes);
    const [split] = [...bySplit].sort((a, b) => (a[1] < b[1] ? 1 : -1))[0] ?? ["copy"];
    return { name, index, split, bytes: J.layers.total(entries), copied: J.layers.total(entries, (e) => e.split === "copy") };
  });
  // The paper's names: f and f-bar are the converters of tensor parallelism, g and g-bar those with sequence parallelism.
  const nameOf = (here) => {
    const forward = here.find((t) => !t.backward);
    if (!forward) return "f";
    return { all_gather_into_tensor: "g", reduce_scatter_tensor: "g-bar", all_reduce: "f-bar" }[forward.kind] ?? forward.kind;
  };

  J.figure({
    id: "ranks",
    title: "One layer across t ranks",
    controls: [controls.layer(), controls.seq(), controls.batch(), controls.ranks(2, 8, 4), layout(), controls.attention(), controls.dropout()],
    draw(values, { width }) {
      const now = run(values);
      if (now.t < 2) return J.el("p", {}, `${now.layer.label} does not divide over several ranks.`);
      const layer = J.layers.at(now), parts = partsOf(layer), transfers = layer.transfers;
      const narrow = width < 560, rowHeight = narrow ? 82 : 66, gap = 58, top = 22, cell = Math.min(210, ((width - 8) / now.t) * 0.84), height = top + parts.length * rowHeight + (parts.length - 1) * gap + 6;
      const left = (rank) => rank * ((width - 8) / now.t) + ((width - 8) / now.t - cell) / 2;
      const svg = J.el("svg:svg", { width, height, viewBox: `0 0 ${width} ${height}` });
      const text = (x, y, content, more = {}) => J.el("svg:text", { x, y, fill: "currentColor", ...more }, content);
      for (let rank = 0; rank < now.t; rank += 1) svg.append(text(left(rank) + cell / 2, 12, now.t > 4 && width < 500 ? `${rank}` : `rank ${rank}`, { "text-anchor": "middle", fill: "var(--soft)" }));
      const stops = [];
      parts.forEach((part, i) => {
        const y = top + i * (rowHeight + gap), color = J.color(part.split === "copy" ? 1 : 0);
        const group = J.el("svg:g", {});
        group.append(text(0, y + 11, part.name, { "font-weight": 600 }));
        group.append(text(narrow ? 0 : width, narrow ? y + 27 : y + 11, `${splitWords[part.split] ?? part.split}, ${J.format.bytes(Number(part.bytes))} each`, { "text-anchor": narrow ? "start" : "end" }));
        for (let rank = 0; rank < now.t; rank += 1) {
          const x = left(rank), h = 38, boxY = y + rowHeight - 46;
          group.append(J.el("svg:rect", { x, y: boxY, width: cell, height: h, fill: "none", stroke: "var(--line)" }));
          const box = { copy: [x, boxY, cell, h], sequence: [x, boxY + (h * rank) / now.t, cell, h / now.t] }[part.split] ?? [x + (cell * rank) / now.t, boxY, cell / now.t, h];
          group.append(J.el("svg:rect", { x: box[0], y: box[1], width: box[2], height: box[3], fill: J.marks.hatch(part.split === "copy" ? "diagonal" : "solid", color), "fill-opacity": 0.85, stroke: color }));
        }
        svg.append(group);
        stops.push([group, `${part.name}: ${J.format.exact(J.layers.exact(part.bytes))} on each rank, ${splitWords[part.split] ?? part.split}`]);
        if (i === parts.length - 1) return;
        const here = transfers.filter((t) => t.part === i + 1), middle = y + rowHeight + gap / 2;
        const band = J.el("svg:g", {}, J.el("svg:rect", { x: 0, y: middle - 20, width, height: 40, rx: 5, fill: "var(--faint)" }));
        const line = (backward) => {
          const of = here.filter((t) => t.backward === backward);
          if (!of.length) return `${backward ? "↑ backward" : "↓ forward"}: nothing is sent`;
          const sent = of.reduce((sum, t) => sum + t.wire, 0n);
          const kinds = of.map((t) => `${letters[t.kind] ?? t.kind}`).join(" and ");
          return `${backward ? "↑ backward" : "↓ forward"}: ${kinds}, ${J.format.bytes(Number(sent))} a rank`;
        };
        const name = nameOf(here);
        band.append(text(10, middle + 4, name.replace("-bar", "\u0305"), { "font-weight": 600, "font-style": "italic", "font-size": 15 }));
        band.append(text(narrow ? 50 : 64, middle - 5, line(false)), text(narrow ? 50 : 64, middle + 13, line(true)));
        svg.append(band);
        stops.push([band, `${name}, between ${part.name} and ${parts[i + 1].name}. ${line(false)}. ${line(true)}`]);
      });
      const said = new Map(stops);
      return J.rove(svg, stops.map(([node]) => node), (node) => said.get(node));
    },
    caption(values) {
      const now = run(values);
      if (now.t < 2) return "";
      const layer = J.layers.at(now), parts = partsOf(layer), other = J.layers.at({ ...now, layout: values.sp ? "tp" : "sp" });
      const sent = (of) => of.transfers.reduce((sum, t) => sum + t.wire, 0n);
      const copied = parts.reduce((sum, part) => sum + part.copied, 0n);
      const lead = `A box is a full tensor, filled where it is the rank's own. Each of ${now.t} ranks keeps ${J.format.bytes(Number(layer.held("none")))} of the layer, ${copied > 0n ? `${J.format.bytes(Number(copied))} of it copies that all ranks keep` : "and no copy of what another keeps"}. `;
      const named = values.sp
        ? "g all-gathers in forward and reduce-scatters in backward, g\u0305 the reverse"
        : "f is the identity in forward and an all-reduce in backward, f\u0305 the reverse";
      return `${lead}${named} (arXiv 2205.05198, figures ${values.sp ? "5 and 6" : "4 and 5"}). Over both passes a rank sends ${J.format.bytes(Number(sent(layer)))} in rings, ${values.sp ? "without" : "with"} sequence parallelism ${J.format.bytes(Number(sent(other)))}: Megatron all-gathers two inputs again in backward.${J.layers.note(values)}`;
    },
    table(values) {
      const now = run(values), layer = J.layers.at(now), parts = partsOf(layer);
      const rows = layer.entries.filter((e) => e.stays("none")).map((e) => [parts[e.part].name, e.role, splitWords[e.split] ?? e.split, J.layers.exact(e.bytes), e.formula]);
      for (const t of layer.transfers) rows.push([`before ${parts[t.part]?.name ?? "the end"}`, `${letters[t.kind] ?? t.kind}, ${t.backward ? "backward" : "forward"}`, "sent by a rank", J.layers.exact(t.wire), `of ${J.format.bytes(Number(t.bytes))}`]);
      return { columns: ["part", "tensor or transfer", "how ranks have it", "bytes on one rank", "formula"], rows };
    },
    command: (values) => J.layers.command(run(values)),
  });
})();

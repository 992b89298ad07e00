"use strict";
// A stretch of a timeline as a vector drawing, for files: what the canvas shows, with its legend, column by column.
J.timeline.svg = (data, view, groups, stretch, title) => {
  const WIDE = 900, PLACES = 2, scale = (stretch.to - stretch.from) / WIDE, seconds = stretch.axis === "time" ? 1e9 : 1;
  const { tops, low, picked } = view.columns(stretch, groups, WIDE);
  const at = (column) => (stretch.from + (column + 0.5) * scale) / seconds;
  const peak = (seconds > 1 ? data.time[data.peak_event] : data.peak_event) / seconds;
  const highest = Math.max(1, data.peak_bytes, data.reserves?.most ?? 0) * 1.04;
  // columns where one of two series changes, and those before them: steps need no others
  const turns = (...series) => d3.range(WIDE).filter((c) => c === 0 || c === WIDE - 1 || series.some((s) => s[c] !== s[c - 1] || s[c] !== s[c + 1]));
  const zero = new Float64Array(WIDE);
  const drawn = J.plot({
    width: 1080, height: 460, marginBottom: 44,
    x: { label: seconds > 1 ? "seconds" : "event", domain: [stretch.from / seconds, stretch.to / seconds], tickFormat: seconds > 1 ? J.format.seconds : J.format.grouped },
    y: J.byteAxis(data.reserves ? "bytes allocated; dashed: reserved" : "bytes allocated", highest, 5),
    marks: [
      groups.names.map((_, g) => {
        const below = g ? tops[g - 1] : zero;
        return Plot.areaY(turns(below, tops[g]), {
          x: at, y1: (c) => below[c], y2: (c) => tops[g][c], curve: "step", fill: J.marks.hatch(g, J.color(g)), stroke: J.color(g), strokeWidth: 0.6,
        });
      }),
      Plot.lineY(turns(low), { x: at, y: (c) => low[c], curve: "step", stroke: "currentColor", strokeWidth: 0.6 }),
      data.reserves ? Plot.lineY(d3.range(WIDE), { x: at, y: (c) => data.reserves.reserved(picked[c]), curve: "step", stroke: "currentColor", strokeDasharray: "6 3" }) : [],
      peak >= stretch.from / seconds && peak <= stretch.to / seconds
        ? [
            Plot.ruleX([peak], { stroke: "var(--limit)", strokeDasharray: "4 3" }),
            Plot.text([peak], { x: (v) => v, y: highest, text: () => `peak ${J.format.bytes(data.peak_bytes)}`, dy: -8, fill: "var(--limit)" }),
          ]
        : [],
    ].flat(),
    color: { type: "identity" },
  });
  for (const path of drawn.querySelectorAll("path[d]")) {
    path.setAttribute("d", path.getAttribute("d").replace(/\d+\.\d+/g, (n) => Number(Number(n).toFixed(PLACES))));
  }
  const legend = J.legend(groups.names.map((label, g) => ({ label, color: J.color(g), hatch: g })), { width: 1080 });
  // files are made of what is laid out: for a moment it is
  const drawing = J.el("div", { class: "drawing", "aria-hidden": "true", style: "position:absolute;left:-20000px;width:1080px" }, legend, drawn);
  document.body.append(drawing);
  for (const node of [legend, drawn]) J.marks.finish(node);
  const text = J.save.svg(drawing, title, `Bytes allocated, stacked; the highest moment of each column, and the lowest as a line.`);
  drawing.remove();
  return text;
};

"use strict";
// Draws a stretch of a timeline on a canvas, stacked by group. Work grows with the canvas's width, not with the events.
J.timeline.canvas = (canvas, data) => {
  const LEFT = 66, RIGHT = 10, TOP = 24, BOTTOM = 26, STRIP = 34, GAP = 8;
  const context = canvas.getContext("2d", { alpha: false }), HEIGHT = 400;
  let width = 640, height = HEIGHT, paints = null, overview = null, shown = null, image = null;

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // a colour and a hatch for each group: none is told by its colour alone
  const pattern = (index, color, ratio) => {
    const tile = J.el("canvas", { width: 8 * ratio, height: 8 * ratio }), pen = tile.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = style("--paper");
    pen.fillRect(0, 0, 8, 8);
    pen.globalAlpha = J.marks.kinds[index % 8] === "solid" ? 0.85 : 0.3;
    pen.fillStyle = color;
    pen.fillRect(0, 0, 8, 8);
    pen.globalAlpha = 1;
    pen.strokeStyle = color;
    pen.lineWidth = 1.4;
    const line = (...points) => {
      pen.beginPath();
      for (let i = 0; i < points.length; i += 4) {
        pen.moveTo(points[i], points[i + 1]);
        pen.lineTo(points[i + 2], points[i + 3]);
      }
      pen.stroke();
    };
    const rising = [-2, 2, 2, -2, 0, 8, 8, 0, 6, 10, 10, 6], falling = [-2, 6, 2, 10, 0, 0, 8, 8, 6, -2, 10, 2];
    const lines = {
      diagonal: rising, back: falling, cross: [...rising, ...falling], horizontal: [0, 2, 8, 2, 0, 6, 8, 6],
      vertical: [2, 0, 2, 8, 6, 0, 6, 8], grid: [0, 4, 8, 4, 4, 0, 4, 8],
    }[J.marks.kinds[index % 8]];
    if (lines) line(...lines);
    if (J.marks.kinds[index % 8] === "dots") for (const at of [2, 6]) pen.fillRect(at - 1, at - 1, 2.4, 2.4), (pen.fillStyle = color);
    return { tile, pixels: new Uint32Array(pen.getImageData(0, 0, 8 * ratio, 8 * ratio).data.buffer) };
  };
  const pixel = (color) => {
    const pen = J.el("canvas", { width: 1, height: 1 }).getContext("2d");
    pen.fillStyle = color;
    pen.fillRect(0, 0, 1, 1);
    return new Uint32Array(pen.getImageData(0, 0, 1, 1).data.buffer)[0];
  };
  const restyle = () => {
    const ratio = Math.max(1, Math.round(devicePixelRatio || 1));
    const colors = Array.from({ length: 8 }, (_, i) => style(`--c${i + 1}`));
    paints = {
      ratio, colors, fills: colors.map((color, i) => pattern(i, color, ratio)), ink: style("--ink"), soft: style("--soft"),
      line: style("--line"), paper: style("--paper"), pixels: ["--paper", "--line", "--ink"].map((n) => pixel(style(n))),
      solid: colors.map(pixel), font: `12px ${style("--font") || "sans-serif"}`, limit: style("--limit"),
    };
    overview = null;
  };
  const resize = (wide) => {
    width = Math.max(280, Math.floor(wide));
    height = width < 500 ? 330 : HEIGHT;
    if (!paints) restyle();
    canvas.width = width * paints.ratio;
    canvas.height = height * paints.ratio;
    canvas.style.height = `${height}px`;
    overview = null;
  };

  const plot = () => ({ x: LEFT, y: TOP, w: width - LEFT - RIGHT, h: height - TOP - BOTTOM - STRIP - GAP });
  const strip = () => ({ x: LEFT, y: height - STRIP - 2, w: width - LEFT - RIGHT, h: STRIP });
  const span = (axis) => (axis === "time" ? [0, Math.max(1, data.time[data.events - 1] ?? 1)] : [-1, Math.max(1, data.events)]);
  // events [from, to) of a column; a column without any shows the one before it
  const eventsOf = (axis, from, to) => {
    if (axis === "time") {
      const a = data.search(from), b = data.search(to);
      return b > a ? [a, b] : [a - 1, a];
    }
    const a = Math.floor(from);
    return [a, Math.max(a + 1, Math.floor(to))];
  };
  const most = (a, b) => (a < 0 ? (b > 0 && data.total[data.most(0, Math.min(b, data.events))] > data.start ? data.most(0, Math.min(b, data.events)) : -1) : data.most(a, Math.min(b, data.events)));
  const clampEvent = (event) => Math.max(-1, Math.min(data.events - 1, event));

  const columns = (view, groups, wide) => {
    const scale = (view.to - view.from) / wide, state = new Float64Array(groups.count);
    const tops = Array.from({ length: groups.count }, () => new Float64Array(wide)), low = new Float64Array(wide);
    const picked = new Int32Array(wide);
    let lastA = NaN, lastB = NaN;
    for (let x = 0; x < wide; x += 1) {
      const [a0, b0] = eventsOf(view.axis, view.from + x * scale, view.from + (x + 1) * scale);
      const a = clampEvent(a0), b = Math.max(a + 1, Math.min(data.events, b0));
      if (a === lastA && b === lastB) {
        for (let g = 0; g < groups.count; g += 1) tops[g][x] = tops[g][x - 1];
        [low[x], picked[x]] = [low[x - 1], picked[x - 1]];
        continue;
      }
      [lastA, lastB] = [a, b];
      const event = most(a, b);
      groups.levels(event, state);
      let sum = 0;
      for (let g = 0; g < groups.count; g += 1) tops[g][x] = sum += state[g];
      low[x] = a < 0 ? data.start : data.total[data.least(a, b)];
      picked[x] = event;
    }
    return { tops, low, picked };
  };

  const reserves = data.reserves ?? null, highest = Math.max(1, data.peak_bytes, reserves?.most ?? 0) * 1.04;
  const draw = (view, groups, { cursor = null, chosen = null } = {}) => {
    const box = plot(), { ratio } = paints, wide = Math.floor(box.w), found = columns(view, groups, wide);
    const y = (bytes) => box.y + box.h * (1 - bytes / highest);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = paints.paper;
    context.fillRect(0, 0, width, height);
    context.font = paints.font;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const tick of J.byteTicks(highest, 5)) {
      context.fillStyle = paints.soft;
      context.fillText(J.format.tick(tick), box.x - 7, y(tick));
    }
    raster(found, groups, box, wide);
    if (chosen !== null) outline(view, groups, chosen, box, y, wide, found);
    if (reserves) line(found, box, y, wide);
    axis(view, box);
    marks(view, box);
    if (cursor !== null) rule(position(view, cursor, box), box, paints.ink, [], "");
    rule(position(view, data.peak_event, box), box, paints.limit, [4, 3], `peak ${J.format.bytes(data.peak_bytes)}`);
    drawStrip(view);
    shown = { view, groups, found, box, wide };
  };

  // The stack, pixel by pixel: filling patterns along outlines of a thousand columns takes a canvas many times as long.
  const raster = (found, groups, box, wide) => {
    const { ratio, fills, solid, pixels: [paper, line, ink] } = paints;
    const w = wide * ratio, h = Math.round(box.h * ratio), size = 8 * ratio;
    if (!image || image.width !== w || image.height !== h) image = context.createImageData(w, h);
    const out = new Uint32Array(image.data.buffer), row = (bytes) => Math.max(0, h - 1 - Math.round((bytes / highest) * (h - 1)));
    out.fill(paper);
    for (const tick of J.byteTicks(highest, 5)) out.fill(line, row(tick) * w, (row(tick) + 1) * w);
    for (let x = 0; x < w; x += 1) {
      const column = Math.floor(x / ratio), across = x % size;
      let bottom = h;
      for (let g = 0; g < groups.count; g += 1) {
        const top = row(found.tops[g][column]), tile = fills[g % 8].pixels;
        if (top >= bottom) continue;
        for (let at = top * w + x, y = top; y < bottom; y += 1, at += w) out[at] = tile[(y % size) * size + across];
        out[top * w + x] = solid[g % 8];
        bottom = top;
      }
      const low = row(found.low[column]);
      if (low > bottom) out[low * w + x] = ink;
    }
    context.putImageData(image, box.x * ratio, box.y * ratio);
  };

  const position = (view, event, box) => {
    const at = view.axis === "time" ? (event < 0 ? 0 : data.time[event]) : event;
    return box.x + ((at - view.from) / (view.to - view.from)) * box.w;
  };
  const rule = (x, box, color, dash, text) => {
    if (x < box.x - 1 || x > box.x + box.w + 1) return;
    context.strokeStyle = context.fillStyle = color;
    context.lineWidth = 1.2;
    context.setLineDash(dash);
    context.beginPath();
    context.moveTo(x, box.y - 4);
    context.lineTo(x, box.y + box.h);
    context.stroke();
    context.setLineDash([]);
    const left = x > box.x + box.w - 130;
    context.textAlign = left ? "right" : "left";
    if (text) context.fillText(text, x + (left ? -5 : 5), box.y - 12);
  };
  const line = (found, box, y, wide) => {
    context.strokeStyle = paints.ink;
    context.lineWidth = 1.4;
    context.setLineDash([6, 3]);
    context.beginPath();
    for (let x = 0; x < wide; x += 1) context.lineTo(box.x + x, y(reserves.reserved(found.picked[x])));
    context.stroke();
    context.setLineDash([]);
  };
  const axis = (view, box) => {
    const count = Math.max(2, Math.floor(box.w / 110)), seconds = view.axis === "time";
    context.fillStyle = paints.ink;
    context.textAlign = "right";
    context.fillText("allocated", box.x - 7, box.y - 12);
    context.fillText(seconds ? "time" : "event", box.x - 7, box.y + box.h + 13);
    context.textAlign = "center";
    context.fillStyle = paints.soft;
    for (const tick of d3.ticks(view.from, view.to, count)) {
      if (!seconds && (tick < 0 || tick % 1)) continue;
      const x = box.x + ((tick - view.from) / (view.to - view.from)) * box.w;
      context.fillRect(x, box.y + box.h, 1, 4);
      context.fillText(seconds ? J.format.seconds(tick / 1e9) : J.format.grouped(tick), Math.min(x, width - 34), box.y + box.h + 13);
    }
  };
  const marks = (view, box) => {
    const taken = [], first = (text) => /^(step|out of memory)/.test(text); // these before phases
    context.textAlign = "left";
    for (const [event, text] of [...data.marks].sort((a, b) => first(b[1]) - first(a[1]) || a[0] - b[0])) {
      const x = position(view, Math.min(event, data.events - 1), box);
      if (x < box.x || x > box.x + box.w || taken.some((other) => Math.abs(other - x) < 70)) continue;
      taken.push(x);
      context.fillStyle = paints.soft;
      context.fillRect(x, box.y, 1, box.h);
      const peak = position(view, data.peak_event, box), from = peak > box.x + box.w - 130 ? peak - 130 : peak;
      const words = text.slice(0, 28), wide = context.measureText(words).width + 8;
      if (x + wide < from || x > from + 130) context.fillText(words, x + 3, box.y - 12);
    }
  };
  // an allocation within its group: what of the group was born before it, and is still there, lies below it
  const outline = (view, groups, chosen, box, y, wide, found) => {
    const group = groups.groupOf[data.labelOf[chosen]], below = new Float64Array(wide).fill(-1);
    const { born, died, which, isBirth, nbytes, labelOf } = data;
    let under = 0, x = 0;
    for (const number of groups.alive(born[chosen], group)) if (number < chosen) under += nbytes[number];
    for (let event = born[chosen]; event < died[chosen] && x < wide; event += 1) {
      const number = event < 0 ? -1 : which[event];
      if (number >= 0 && number < chosen && !isBirth[event] && groups.groupOf[labelOf[number]] === group) under -= nbytes[number];
      while (x < wide && found.picked[x] < event) x += 1;
      while (x < wide && found.picked[x] === event) {
        below[x] = under + (group ? found.tops[group - 1][x] : 0);
        x += 1;
      }
    }
    context.fillStyle = paints.ink;
    for (let c = 0; c < wide; c += 1) {
      if (below[c] < 0) continue;
      const bottom = y(below[c]), top = y(below[c] + nbytes[chosen]);
      context.fillRect(box.x + c, Math.min(top, bottom - 2), 1, Math.max(2, bottom - top));
    }
  };
  const drawStrip = (view) => {
    const box = strip(), [from, to] = span(view.axis), { ratio } = paints;
    if (!overview || overview.axis !== view.axis) {
      const tile = J.el("canvas", { width: Math.ceil(box.w * ratio), height: box.h * ratio }), pen = tile.getContext("2d");
      pen.scale(ratio, ratio);
      pen.fillStyle = paints.soft;
      for (let x = 0; x < box.w; x += 1) {
        const scale = (to - from) / box.w, [a, b] = eventsOf(view.axis, from + x * scale, from + (x + 1) * scale);
        const tall = (data.after(most(clampEvent(a), Math.max(0, b))) / Math.max(1, data.peak_bytes)) * box.h;
        pen.fillRect(x, box.h - tall, 1, tall);
      }
      overview = { tile, axis: view.axis };
    }
    context.globalAlpha = 0.45;
    context.drawImage(overview.tile, box.x, box.y, box.w, box.h);
    context.globalAlpha = 1;
    const a = ((view.from - from) / (to - from)) * box.w, b = ((view.to - from) / (to - from)) * box.w;
    context.strokeStyle = paints.ink;
    context.lineWidth = 1.5;
    context.strokeRect(box.x + Math.max(0, a) + 0.5, box.y + 0.5, Math.max(4, Math.min(box.w, b) - Math.max(0, a)) - 1, box.h - 1);
  };

  // what lies at a point of the canvas: {event, allocation}, or {overview: position}, or null
  const at = (px, py) => {
    const low = strip();
    if (!shown || px < LEFT || px > width - RIGHT) return null;
    if (py >= low.y - GAP) {
      const [from, to] = span(shown.view.axis);
      return { overview: from + ((px - low.x) / low.w) * (to - from) };
    }
    const { box, wide, found, groups } = shown, x = Math.max(0, Math.min(wide - 1, Math.floor(px - box.x)));
    const event = found.picked[x], bytes = (1 - (py - box.y) / box.h) * highest;
    const group = found.tops.findIndex((top) => bytes < top[x]);
    if (group < 0 || bytes < 0) return { event, allocation: null };
    let level = group ? found.tops[group - 1][x] : 0;
    for (const number of groups.alive(event, group)) {
      level += data.nbytes[number];
      if (bytes < level) return { event, allocation: number };
    }
    return { event, allocation: null };
  };
  const swatch = (tile, index) => {
    const pen = tile.getContext("2d");
    pen.fillStyle = pen.createPattern(paints.fills[index % 8].tile, "repeat");
    pen.fillRect(0, 0, tile.width, tile.height);
  };
  const fill = (pen, index) => pen.createPattern(paints.fills[index % 8].tile, "repeat");
  return { draw, columns, resize, restyle, at, span, swatch, fill, plot: () => plot() };
};

"use strict";
// Where allocations lie: their addresses and stacks, the segments at any event, and a map of them as rows.

// Segments at an event are those of the end with every later change undone; blocks are the allocations in them.
J.timeline.memory = (data) => {
  const { memory: packed, allocations, events, nbytes, which, isBirth, born, died } = data;
  if (!packed) return null;
  const GRAIN = 512, SMALL = 2 ** 20, { changes } = packed;
  const address = (number) => packed.addresses[number];
  const blockAtEnd = new Map();
  const atEnd = packed.segments.map(([at, size, stream, isPrivate, isExpandable, blocks]) => {
    let offset = at;
    const placed = blocks.map(([wide, number]) => {
      if (number >= 0) blockAtEnd.set(number, wide);
      offset += wide;
      return { at: offset - wide, size: wide, number };
    });
    return { at, size, stream, isPrivate, isExpandable, blocks: placed };
  });
  // [function, file, line, is it Python's], the innermost first
  const stack = (number) => {
    const found = [];
    for (let node = packed.ends[packed.stack_of[number]]; node >= 0; node = packed.nodes[node][0]) found.push(packed.frames[packed.nodes[node][1]]);
    return found;
  };

  const levels = new Float64Array(changes.length + 1); // reserved bytes before each change
  levels[changes.length] = d3.sum(atEnd, (segment) => segment.size);
  for (let i = changes.length - 1; i >= 0; i -= 1) levels[i] = levels[i + 1] - changes[i][2];
  const later = d3.bisector((change) => change[0]).right;
  const reserved = (event) => levels[later(changes, event)];

  const rangesAt = (event) => {
    const found = new Map(atEnd.map(({ blocks, ...range }) => [range.at, range]));
    const put = (range) => range.size > 0 && found.set(range.at, range);
    for (let i = changes.length - 1; i >= 0 && changes[i][0] > event; i -= 1) {
      const [, at, size, isExpandable, stream] = changes[i], around = (range) => range.at <= at && at + size <= range.at + range.size;
      if (size > 0) {
        const range = found.get(at)?.size === size ? found.get(at) : [...found.values()].find(around);
        if (!range) continue;
        found.delete(range.at);
        put({ ...range, size: at - range.at });
        put({ ...range, at: at + size, size: range.at + range.size - at - size });
      } else {
        let range = { at, size: -size, stream, isPrivate: 0, isExpandable };
        for (const other of isExpandable ? [...found.values()] : []) {
          if (other.isExpandable && other.stream === stream && (other.at + other.size === range.at || other.at === range.at + range.size)) {
            found.delete(other.at);
            range = { ...other, at: Math.min(other.at, range.at), size: other.size + range.size };
          }
        }
        put(range);
      }
    }
    return [...found.values()].sort((a, b) => a.at - b.at);
  };
  // Bytes of each allocation's block: rounded up, and with what is left of a large block where that is at most 1 MiB,
  // which the allocator does not split off. How much is left shows when the block is given out.
  let blockBytes = null;
  const measured = () => {
    const found = Float64Array.from(nbytes, (n) => Math.ceil(Math.max(1, n) / GRAIN) * GRAIN), { left, right } = d3.bisector((n) => n);
    const ranges = new Map(rangesAt(-1).filter((range) => !range.isExpandable).map((range) => [range.at, range.at + range.size]));
    const starts = [...ranges.keys()], taken = d3.range(allocations).filter((number) => born[number] < 0).map(address).sort(d3.ascending);
    const measure = (number) => {
      const at = address(number), start = starts[right(starts, at) - 1], to = Math.min(ranges.get(start) ?? 0, taken[right(taken, at)] ?? Infinity);
      const rest = to - at - found[number];
      if (nbytes[number] > SMALL && rest > 0 && rest <= SMALL) found[number] += rest;
    };
    for (let number = 0; number < allocations && born[number] < 0; number += 1) measure(number);
    for (let event = 0, change = 0; event < events; event += 1) {
      for (; change < changes.length && changes[change][0] <= event; change += 1) {
        const [, at, size, isMapped] = changes[change];
        if (isMapped) continue;
        if (size > 0 && !ranges.has(at)) starts.splice(left(starts, at), 0, at);
        if (size > 0) ranges.set(at, at + size);
        else if (ranges.delete(at)) starts.splice(left(starts, at), 1);
      }
      const number = which[event], at = address(number), place = left(taken, at);
      taken.splice(place, isBirth[event] ? 0 : 1, ...(isBirth[event] ? [at] : []));
      if (isBirth[event]) measure(number);
    }
    for (const [number, size] of blockAtEnd) found[number] = size;
    return found;
  };
  const blockOf = (number) => (blockBytes ??= measured())[number];

  const segmentsAt = (event) => {
    if (event >= events - 1) return atEnd;
    const alive = [];
    for (let i = 0; i < allocations && born[i] <= event; i += 1) if (died[i] > event) alive.push(i);
    alive.sort((a, b) => address(a) - address(b));
    let next = 0;
    return rangesAt(event).map((range) => {
      const blocks = [], end = range.at + range.size;
      let from = range.at;
      const gap = (to) => to > from && blocks.push({ at: from, size: to - from, number: -1 });
      while (next < alive.length && address(alive[next]) < range.at) next += 1;
      for (; next < alive.length && address(alive[next]) < end; next += 1) {
        const at = address(alive[next]);
        gap(at);
        blocks.push({ at, size: Math.min(blockOf(alive[next]), end - at), number: alive[next] });
        from = at + blocks.at(-1).size;
      }
      gap(end);
      return { ...range, blocks };
    });
  };

  // bytes of all segments by what they are, and what a request as large as the largest free piece could not use
  const summary = (segments) => {
    const found = { reserved: 0, allocated: 0, rounding: 0, pending: 0, split: 0, whole: 0, largest: 0, pieces: 0, unusable: 0, returnable: 0 };
    for (const { size, blocks, isPrivate } of segments) {
      const isUsed = blocks.some((block) => block.number !== -1);
      found.reserved += size;
      for (const { size: wide, number } of blocks) {
        if (number >= 0) {
          found.allocated += nbytes[number];
          found.rounding += wide - nbytes[number];
        } else if (number === -1) {
          found[isUsed ? "split" : "whole"] += wide;
          found.pieces += 1;
          if (!isPrivate) found.largest = Math.max(found.largest, wide);
        } else found.pending += wide;
      }
    }
    for (const { blocks, isPrivate, size: all } of segments) {
      for (const { size, number } of blocks) {
        if (number !== -1 || (size >= found.largest && !isPrivate)) continue;
        found.unusable += size;
        if (size === all) found.returnable += size;
      }
    }
    return found;
  };
  return { address, blockOf, stack, reserved, most: d3.max(levels), segmentsAt, summary };
};

// A map of segments, each a row: {node, show(event, chosen allocation), restyle()}. `choose` is told the allocation that is clicked.
J.timeline.map = ({ data, memory, view, groups, describe, choose, place, name }) => {
  const { el } = J, { bytes, exact, grouped, percent } = J.format, ROW = 20, LEFT = 76, TALL = 420, key = (text) => `${text}${place}`;
  const order = J.select({ key: key("rows"), label: "segments by", options: [{ value: "size", label: "size" }, { value: "free", label: "free bytes" }, { value: "address", label: "address" }], value: "size" });
  const scale = J.select({ key: key("scale"), label: "width", options: [{ value: "one", label: "one scale" }, { value: "own", label: "each segment whole" }], value: "one" });
  const canvas = el("canvas", {
    tabindex: "0", role: "application", "aria-roledescription": "map of segments",
    "aria-label": `Segments of ${name} and their blocks. Up and down choose a segment, left and right a block, Enter shows an allocation's stack`,
  });
  const spacer = el("div", {}, canvas), frame = el("div", { class: "rows" }, spacer), read = el("p", { class: "read caption" }), live = el("p", { class: "unseen", "aria-live": "polite" });
  const says = el("p", { class: "caption" }), legend = el("ul", { class: "legend" }), id = `map-${place}`, title = el("h2", { id: `${id}-title` }, `Segments and blocks: ${name}`);
  const node = el("section", { class: "figure timeline map", id, "aria-labelledby": title.id }, title, says, el("div", { class: "controls" }, order.node, scale.node), legend, frame, read, live);
  const pen = canvas.getContext("2d");
  let segments = [], widest = 1, chosen = null, focus = null, tall = 0, event = null;

  const style = (text) => getComputedStyle(document.documentElement).getPropertyValue(text).trim();
  const freeBytes = ({ blocks }) => d3.sum(blocks, (block) => (block.number === -1 ? block.size : 0));
  const isUsed = ({ blocks }) => blocks.some((block) => block.number !== -1);
  const across = (segment) => (frame.clientWidth - LEFT - 4) / (scale.value() === "own" ? segment.size : widest);
  const edges = { split: ["--limit", [], 0.14], whole: ["--soft", [3, 3], 0], pending: ["--ink", [1, 2], 0.3] };
  const kindOf = (segment, block) => (block.number === -2 ? "pending" : isUsed(segment) ? "split" : "whole");
  const box = (to, kind, x, y, w, h) => {
    const [color, dash, alpha] = edges[kind];
    to.strokeStyle = to.fillStyle = style(color);
    to.globalAlpha = alpha;
    to.fillRect(x, y, w, h);
    to.globalAlpha = 1;
    to.setLineDash(dash);
    to.lineWidth = 1;
    if (w > 2) to.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    else to.fillRect(x, y + h - 2, w, 2);
    to.setLineDash([]);
  };
  const draw = () => {
    const ratio = Math.max(1, Math.round(devicePixelRatio || 1)), wide = frame.clientWidth, top = frame.scrollTop;
    if (!wide) return;
    tall = Math.min(TALL, segments.length * ROW + 4);
    spacer.style.height = `${segments.length * ROW + 4}px`;
    [canvas.width, canvas.height] = [wide * ratio, tall * ratio];
    canvas.style.height = `${tall}px`;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = style("--paper");
    pen.fillRect(0, 0, wide, tall);
    pen.font = `12px ${style("--font")}`;
    pen.textBaseline = "middle";
    const fills = groups().names.map((_, group) => view.fill(pen, group));
    for (let row = Math.floor(top / ROW); row < segments.length && row * ROW - top < tall; row += 1) {
      const segment = segments[row], y = row * ROW - top + 3, each = across(segment);
      pen.fillStyle = style("--soft");
      pen.textAlign = "right";
      pen.fillText(bytes(segment.size), LEFT - 7, y + 8);
      for (const block of segment.blocks) {
        const x = LEFT + (block.at - segment.at) * each, w = block.size * each;
        if (block.number >= 0) {
          pen.fillStyle = fills[groups().groupOf[data.labelOf[block.number]]];
          pen.fillRect(x, y, w > 3 ? w - 0.5 : w, 16);
        } else box(pen, kindOf(segment, block), x, y, w, 16);
      }
      const mark = (block, line) => {
        pen.strokeStyle = style("--ink");
        pen.lineWidth = line;
        pen.strokeRect(LEFT + (block.at - segment.at) * each - 0.5, y - 1, Math.max(2, block.size * each) + 1, 18);
      };
      if (chosen !== null) segment.blocks.filter((block) => block.number === chosen).forEach((block) => mark(block, 2.5));
      if (focus?.row === row) mark(segment.blocks[focus.at], 1.5);
    }
  };
  const hex = (n) => `0x${n.toString(16)}`;
  const words = ({ row, at }) => {
    const segment = segments[row], block = segment.blocks[at], where = `at ${hex(block.at)}, in a segment of ${bytes(segment.size)}${segment.isPrivate ? " of a private pool" : ""}${segment.stream ? ` of stream ${hex(segment.stream)}` : ""}`;
    if (block.number >= 0) return `${describe(block.number)}; a block of ${exact(block.size)} ${where}`;
    const kind = { split: "Inactive split: a free piece of a segment in use", whole: "Free segment", pending: "Freed, and still in use by a stream" }[kindOf(segment, block)];
    return `${kind}, ${exact(block.size)} ${where}`;
  };
  const say = (text, aloud) => {
    read.textContent = text;
    if (aloud) live.textContent = text;
  };
  const hit = (event) => {
    const around = canvas.getBoundingClientRect(), row = Math.floor((event.clientY - around.y + frame.scrollTop) / ROW), segment = segments[row];
    if (!segment) return null;
    const place_ = (event.clientX - around.x - LEFT) / across(segment) + segment.at;
    const at = segment.blocks.findIndex((block) => place_ >= block.at && place_ < block.at + block.size);
    return at < 0 ? null : { row, at };
  };
  const pick = (found) => {
    if (!found) return;
    focus = found;
    const { number } = segments[found.row].blocks[found.at];
    if (number >= 0) choose(number);
    draw();
  };
  const go = (rows, blocks) => {
    if (!segments.length) return;
    const from = focus ?? { row: 0, at: 0 }, row = Math.max(0, Math.min(segments.length - 1, focus ? from.row + rows : 0));
    focus = { row, at: Math.max(0, Math.min(segments[row].blocks.length - 1, rows ? 0 : from.at + (focus ? blocks : 0))) };
    if (row * ROW < frame.scrollTop) frame.scrollTop = row * ROW;
    if ((row + 1) * ROW > frame.scrollTop + tall) frame.scrollTop = (row + 1) * ROW - tall + 4;
    say(words(focus), true);
    draw();
  };
  const keys = {
    ArrowUp: () => go(-1, 0), ArrowDown: () => go(1, 0), ArrowLeft: () => go(0, -1), ArrowRight: () => go(0, 1),
    Home: () => go(-segments.length, 0), End: () => go(segments.length, 0), Enter: () => pick(focus),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  canvas.addEventListener("pointermove", (event) => {
    const found = hit(event);
    if (found) say(words(found), false);
  });
  canvas.addEventListener("click", (event) => pick(hit(event)));
  frame.addEventListener("scroll", draw);
  const sort = () => {
    const by = { size: (a, b) => b.size - a.size || a.at - b.at, free: (a, b) => freeBytes(b) - freeBytes(a) || a.at - b.at, address: (a, b) => a.at - b.at };
    segments = [...segments].sort(by[order.value()]);
    [focus, widest] = [null, Math.max(1, ...segments.map((segment) => segment.size))];
    draw();
  };
  J.state.on((changed) => {
    if (changed.has(key("rows"))) sort();
    if (changed.has(key("scale"))) draw();
  });
  const explain = () => {
    const tile = (paint) => {
      const made = el("canvas", { width: 40, height: 28, "aria-hidden": "true" });
      paint(made);
      return made;
    };
    const free = { split: "inactive split: free in a segment in use", whole: "free segment", pending: "freed, in use by a stream" };
    legend.replaceChildren(
      ...groups().names.map((text, group) => el("li", {}, tile((made) => view.swatch(made, group)), text)),
      ...Object.entries(free).map(([kind, text]) => el("li", {}, tile((made) => box(made.getContext("2d"), kind, 0, 0, 40, 28)), text)),
    );
  };
  const show = (at, allocation) => {
    chosen = allocation;
    if (at === event) return draw();
    event = at;
    segments = memory.segmentsAt(at);
    const sums = memory.summary(segments), share = (n) => `${bytes(n)} (${percent(n / Math.max(1, sums.reserved))})`;
    const when = data.events === 0 || at >= data.events - 1 ? "At the end" : at === data.peak_event ? `At the peak, event ${grouped(at)}` : `After event ${grouped(at)}`;
    const largest = sums.largest ? ` The largest free piece is ${exact(sums.largest)}: a request of that size could not use ${share(sums.unusable)} of what is reserved${sums.returnable ? `, of which ${bytes(sums.returnable)} are free segments that torch.cuda.empty_cache returns to the driver` : ""}.` : "";
    says.textContent = `${when}: ${exact(sums.reserved)} reserved in ${grouped(segments.length)} segments: ${bytes(sums.allocated)} allocated, ${bytes(sums.rounding)} rounding, `
      + `${bytes(sums.split)} inactive split, ${bytes(sums.whole)} in free segments${sums.pending ? `, ${bytes(sums.pending)} in use by a stream` : ""}; ${grouped(sums.pieces)} free pieces.${largest}`;
    sort();
  };
  const refresh = () => {
    explain();
    draw();
  };
  new ResizeObserver(draw).observe(frame);
  return { node, show, refresh };
};

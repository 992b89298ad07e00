"use strict";
// A timeline of allocations out of what report/snapshot.py packed, and questions to it that take microseconds:
// the highest and lowest event of a stretch (a pyramid over cells of 64 events), and what each group has after an event.
J.timeline = {};

J.timeline.read = (packed) => {
  const CELL = 64, FAN = 4;
  const { events, allocations, before, order, labels } = packed;
  const time = Float64Array.from(packed.time), nbytes = Float64Array.from(packed.nbytes), labelOf = Int32Array.from(packed.label_of);
  const used = new Set(labelOf);
  const which = new Int32Array(events), isBirth = new Uint8Array(events);
  const born = new Int32Array(allocations).fill(-1), died = new Int32Array(allocations).fill(events);
  const total = new Float64Array(events);
  let start = 0, next = before, now = 0;
  for (let i = 0; i < before; i += 1) start += nbytes[i];
  for (let e = 0, level = start; e < events; e += 1) {
    now += time[e];
    time[e] = now;
    const birth = order[e] === 0, number = birth ? next : next - order[e];
    if (birth) next += 1;
    [which[e], isBirth[e]] = [number, birth ? 1 : 0];
    (birth ? born : died)[number] = e;
    level += birth ? nbytes[number] : -nbytes[number];
    total[e] = level;
  }

  const levelsOf = (better) => {
    const found = [];
    for (let size = events, below = null, step = CELL; size > 1 || !below; step = FAN) {
      const cells = Math.ceil(size / step), level = new Int32Array(cells);
      for (let c = 0; c < cells; c += 1) {
        let best = below ? below[c * step] : c * step;
        for (let i = c * step + 1; i < Math.min(size, (c + 1) * step); i += 1) {
          const e = below ? below[i] : i;
          if (better(total[e], total[best])) best = e;
        }
        level[c] = best;
      }
      found.push(level);
      [size, below] = [cells, level];
      if (!cells) break;
    }
    return found;
  };
  const more = (a, b) => a > b, less = (a, b) => a < b;
  const up = levelsOf(more), down = levelsOf(less);
  // of events a to b - 1, the one after which most, or least, is allocated
  const extreme = (levels, better) => (from, to) => {
    let a = from, b = to, best = from;
    const look = (e) => { if (better(total[e], total[best])) best = e; };
    while (a < b && a % CELL) look(a++);
    while (b > a && b % CELL) look(--b);
    for (let x = a / CELL, y = b / CELL, depth = 0; x < y; x /= FAN, y /= FAN, depth += 1) {
      const cells = levels[depth];
      while (x < y && x % FAN) look(cells[x++]);
      while (y > x && y % FAN) look(cells[--y]);
    }
    return best;
  };

  // groups of labels by any text, at most `limit`: the largest at the peak, and one for the others
  const grouped = (text, limit = 8) => {
    const names = [...new Set(labels.filter((_, i) => used.has(i)).map(text))], number = new Map(names.map((name, i) => [name, i]));
    const of = Int32Array.from(labels, (label) => number.get(text(label))), most = new Float64Array(names.length);
    for (let i = 0; i < allocations; i += 1) {
      if (born[i] <= packed.peak_event && died[i] > packed.peak_event) most[of[labelOf[i]]] += nbytes[i];
    }
    const sorted = names.map((_, i) => i).sort((a, b) => most[b] - most[a] || a - b);
    const kept = sorted.length > limit ? sorted.slice(0, limit - 1) : sorted;
    const rank = new Uint8Array(names.length).fill(kept.length);
    kept.forEach((group, place) => (rank[group] = place));
    const shown = kept.map((group) => names[group]);
    if (kept.length < names.length) shown.push(`${names.length - kept.length} others`);
    const groupOf = Uint8Array.from(labelOf, (label) => rank[of[label]]), count = Math.max(1, shown.length);
    const cells = Math.ceil(events / CELL) + 1, marks = new Float64Array(cells * count);
    const state = new Float64Array(count);
    for (let i = 0; i < before; i += 1) state[groupOf[i]] += nbytes[i];
    for (let e = 0; e <= events; e += 1) {
      if (e % CELL === 0) marks.set(state, (e / CELL) * count);
      if (e < events) state[groupOf[which[e]]] += isBirth[e] ? nbytes[which[e]] : -nbytes[which[e]];
    }
    // bytes of each group after an event, into `out`
    const levels = (event, out) => {
      const cell = Math.floor((event + 1) / CELL);
      for (let g = 0; g < count; g += 1) out[g] = marks[cell * count + g];
      for (let e = cell * CELL; e <= event; e += 1) {
        const number = which[e];
        out[groupOf[number]] += isBirth[e] ? nbytes[number] : -nbytes[number];
      }
      return out;
    };
    // allocations of a group that are there after an event, as they were born
    const alive = (event, group) => {
      const found = [];
      for (let i = 0; i < allocations && born[i] <= event; i += 1) if (died[i] > event && groupOf[i] === group) found.push(i);
      return found;
    };
    return { names: shown, count, groupOf, levels, alive };
  };

  const rows = (event) => {
    const sums = new Map();
    for (let i = 0; i < allocations && born[i] <= event; i += 1) {
      if (died[i] <= event) continue;
      const [module, role] = labels[labelOf[i]], key = `${module}\n${role}`, row = sums.get(key) ?? [module, role, 0, 0];
      row[2] += nbytes[i];
      row[3] += 1;
      sums.set(key, row);
    }
    return [...sums.values()].sort((a, b) => b[2] - a[2]);
  };
  const search = (at) => { // events up to a time
    let low = 0, high = events;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (time[middle] <= at) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  return {
    ...packed, order: null, labels, nbytes, which, isBirth, born, died, total, time, start, labelOf, grouped, rows, search,
    most: extreme(up, more), least: extreme(down, less), after: (event) => (event < 0 ? start : total[event]),
  };
};

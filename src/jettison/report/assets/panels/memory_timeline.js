"use strict";
// The page of memory snapshots and predicted steps: a timeline for each device, and how two snapshots differ.
(() => {
  const { el } = J, packed = J.data("timelines"), names = J.data("names"), changes = J.data("changes");

  const COLUMNS = ["module", "role", { label: "bytes", format: J.format.exact }, "allocations"];

  const describe = (data, number) => {
    if (number === null) return "";
    const [module, role, site] = data.labels[data.labelOf[number]], born = data.born[number], died = data.died[number];
    const when = (event) => `event ${J.format.grouped(event)} (${J.format.seconds(data.time[event] / 1e9)})`;
    const life = `${born < 0 ? "there before the first event" : `from ${when(born)}`}, ${died >= data.events ? "stays" : `until ${when(died)}`}`;
    return `${[module, role, site].filter(Boolean).join(", ") || "no stack"}: ${J.format.exact(data.nbytes[number])}; ${life}`;
  };

  const timeline = (source, place) => {
    const data = J.timeline.read(source), memory = J.timeline.memory(data);
    data.reserves = memory;
    const key = (name) => `${name}${place || ""}`;
    const by = J.select({ key: key("by"), label: "stacked by", options: ["role", "module"], value: "role" });
    const axis = J.select({ key: key("axis"), label: "across", options: [{ value: "event", label: "events" }, { value: "time", label: "time" }], value: "event" });
    const canvas = el("canvas", {
      class: "main", tabindex: "0", role: "application", "aria-roledescription": "timeline",
      "aria-label": `${source.name}: bytes allocated over time. Left and right move, plus and minus zoom, comma and full stop go to the event before and after, up and down choose an allocation, Enter goes to its stack, P goes to the peak, 0 shows everything`,
    });
    const view = J.timeline.canvas(canvas, data), read = el("p", { class: "read caption" });
    const live = el("p", { class: "unseen", "aria-live": "polite" });
    const legend = el("ul", { class: "legend" }), rows = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `What is allocated at one event of ${source.name}` });
    const id = `timeline-${place}`, title = el("h2", { id: `${id}-title` }, source.name);
    const button = (text, label, act) => el("button", { type: "button", "aria-label": label, onclick: act }, text);
    const one = el("div", { class: "allocation", tabindex: "-1", role: "region", "aria-label": `The chosen allocation of ${source.name}`, hidden: true });
    const details = el("details", { open: true }, el("summary", {}, ""), rows);
    const node = el(
      "section", { class: "figure timeline", id, "aria-labelledby": title.id }, title,
      el("div", { class: "controls" }, by.node, axis.node), legend, el("div", { class: "drawing" }, canvas),
      el("div", { class: "buttons" },
        button("◀", "Earlier", () => pan(-0.25)), button("▶", "Later", () => pan(0.25)),
        button("−", "Zoom out", () => zoom(2)), button("+", "Zoom in", () => zoom(0.5)),
        button("all", "Show everything", () => whole()), button("peak", "Go to the peak", () => toPeak()),
        button("end", "Go to the end", () => to_event(data.events - 1)),
        button("SVG", `Save ${source.name} as SVG`, () => J.save.download(`${id}.svg`, new Blob([svg()], { type: "image/svg+xml" }))),
        button("PNG", `Save ${source.name} as PNG`, async () => J.save.download(`${id}.png`, await J.save.pngBlob(svg()))),
        button("CSV", `Save what is allocated at the chosen event of ${source.name} as CSV`, () => J.save.download(`${id}.csv`, new Blob([J.save.csv({ columns: COLUMNS, rows: data.rows(cursor) })], { type: "text/csv" })))),
      read, live, one, details,
    );
    document.querySelector("main").append(node);
    const map = memory && J.timeline.map({
      data, memory, view, place, name: source.name, groups: () => groups(), describe: (number) => describe(data, number),
      choose: (number) => to_event(cursor, number),
    });
    if (map) node.after(map.node);

    const grouping = new Map();
    const groups = () => {
      const how = by.value();
      if (!grouping.has(how)) {
        const text = how === "role" ? ([, role]) => role : ([module]) => (module.split(".").slice(0, 2).join(".") || "no module");
        grouping.set(how, data.grouped(text));
      }
      return grouping.get(how);
    };
    let [from, to] = view.span(axis.value()), cursor = data.peak_event, chosen = null, pointed = null, frames = 0;
    const wanted = () => ({ axis: axis.value(), from, to });
    const svg = () => J.timeline.svg(data, view, groups(), wanted(), source.name);
    const draw = () => {
      const began = performance.now();
      view.draw(wanted(), groups(), { cursor, chosen: pointed ?? chosen });
      canvas.dataset.ms = (performance.now() - began).toFixed(1);
      canvas.dataset.draws = frames += 1;
    };
    let waiting = 0;
    const soon = () => { // one drawing a frame, however many events ask for it
      waiting ||= requestAnimationFrame(() => {
        waiting = 0;
        draw();
      });
    };
    const keep = () => {
      J.state.set(key("from"), Math.round(from));
      J.state.set(key("to"), Math.round(to));
      J.state.set(key("at"), cursor);
    };
    const move = (a, b) => {
      const [least, most] = view.span(axis.value()), wide = Math.min(most - least, Math.max(axis.value() === "time" ? 1000 : 8, b - a));
      const middle = (a + b) / 2;
      from = Math.max(least, Math.min(most - wide, middle - wide / 2));
      to = from + wide;
      keep();
      soon();
    };
    const pan = (share) => move(from + share * (to - from), to + share * (to - from));
    const zoom = (factor, share = 0.5) => {
      const at = from + share * (to - from), wide = (to - from) * factor;
      move(at - share * wide, at + (1 - share) * wide);
    };
    const whole = () => move(...view.span(axis.value()));
    const placeOf = (event) => (axis.value() === "time" ? (event < 0 ? 0 : data.time[event]) : event);
    const say = (text) => {
      read.textContent = text;
      live.textContent = text;
    };
    const moment = (event) => {
      const after = J.format.exact(data.after(event));
      if (event < 0) return `Before the first event: ${after}.`;
      const number = data.which[event], sign = data.isBirth[event] ? "+" : "−";
      const [module, role] = data.labels[data.labelOf[number]];
      return `Event ${J.format.grouped(event)}, ${J.format.seconds(data.time[event] / 1e9)}: ${sign}${J.format.bytes(data.nbytes[number])} ${[module, role].filter(Boolean).join(", ")}; then ${after}.`;
    };
    const tabulate = () => {
      const found = data.rows(cursor).map(([module, ...row]) => [module || "no stack", ...row]), rest = found.slice(100);
      details.firstChild.textContent = `Allocated after event ${J.format.grouped(cursor)}${cursor === data.peak_event ? ", the peak" : ""}: ${J.format.exact(data.after(cursor))}`;
      if (rest.length) found.splice(100, rest.length, [`${rest.length} more`, "", d3.sum(rest, (row) => row[2]), d3.sum(rest, (row) => row[3])]);
      rows.replaceChildren(J.table({ columns: COLUMNS, rows: found }));
    };
    const cpp = J.toggle({ key: key("cpp"), label: "C++ frames" });
    const show = () => { // all of one allocation, and its stack
      one.hidden = chosen === null;
      if (chosen === null) return;
      const born = data.born[chosen], died = data.died[chosen], [module, role, site] = data.labels[data.labelOf[chosen]];
      const when = (event) => `event ${J.format.grouped(event)}, ${J.format.seconds(data.time[event] / 1e9)}`;
      const facts = [
        ["allocation", [module, role].filter(Boolean).join(", ") || "no stack"], ["site", site === module ? "" : site], ["size", J.format.exact(data.nbytes[chosen])],
        ["allocated", born < 0 ? "before the first event" : when(born)],
        ["freed", died >= data.events ? "not before the end" : `${when(died)}${born < 0 ? "" : `: after ${J.format.seconds((data.time[died] - data.time[born]) / 1e9)}`}`],
      ];
      if (memory) {
        const from = memory.address(chosen);
        facts.splice(3, 0, ["addresses", `0x${from.toString(16)} to 0x${(from + memory.blockOf(chosen)).toString(16)}, a block of ${J.format.exact(memory.blockOf(chosen))}`]);
      }
      const stack = memory?.stack(chosen) ?? [], python = stack.filter((frame) => frame[3]), listed = cpp.value() || !python.length ? stack : python;
      one.replaceChildren(
        el("dl", { class: "facts" }, facts.filter(([, text]) => text).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])),
        ...(memory ? [
          el("div", { class: "controls" }, stack.length ? `Stack, the innermost frame first: ${python.length} of Python, ${stack.length - python.length} of C++` : "It has no stack.", python.length && python.length < stack.length ? cpp.node : null),
          el("ol", { class: "scroll stack", tabindex: "0", role: "list", "aria-label": "Stack" }, listed.map(([name, file, line, own]) => el("li", { class: own ? null : "cpp" }, own || line ? `${file}:${line} ` : "", el("code", {}, name)))),
        ].filter((part) => stack.length || part.tagName !== "OL") : []),
      );
    };
    const amounts = () => {
      const levels = groups().levels(cursor, new Float64Array(groups().count));
      legend.querySelectorAll("output").forEach((output, group) => (output.textContent = J.format.bytes(group < levels.length ? levels[group] : memory.reserved(cursor))));
    };
    const to_event = (event, allocation = null) => {
      cursor = Math.max(-1, Math.min(data.events - 1, event));
      chosen = allocation;
      const at = placeOf(cursor);
      if (at < from || at > to) move(at - (to - from) / 2, at + (to - from) / 2);
      say(allocation === null ? moment(cursor) : `${moment(cursor)} ${describe(data, allocation)}`);
      show();
      amounts();
      map?.show(cursor, chosen);
      tabulate();
      keep();
      soon();
    };
    const toPeak = () => {
      const wide = (to - from) / 4, at = placeOf(data.peak_event);
      move(at - wide / 2, at + wide / 2);
      to_event(data.peak_event);
    };
    const choose = (step) => { // through the stack at the cursor, from the bottom
      const all = [];
      for (let g = 0; g < groups().count; g += 1) all.push(...groups().alive(cursor, g));
      if (!all.length) return;
      const now = all.indexOf(chosen), next = now < 0 ? (step > 0 ? 0 : all.length - 1) : Math.max(0, Math.min(all.length - 1, now + step));
      to_event(cursor, all[next]);
    };
    const keys = {
      ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), PageUp: () => pan(-0.9), PageDown: () => pan(0.9),
      "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), 0: whole, p: toPeak, P: toPeak,
      Home: () => move(view.span(axis.value())[0], view.span(axis.value())[0] + to - from),
      End: () => move(view.span(axis.value())[1] - (to - from), view.span(axis.value())[1]),
      ",": () => to_event(cursor - 1), ".": () => to_event(cursor + 1), ArrowUp: () => choose(1), ArrowDown: () => choose(-1), Enter: () => one.focus(),
    };
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    const point = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.x, event.clientY - box.y];
    };
    const share = (x) => Math.max(0, Math.min(1, (x - view.plot().x) / view.plot().w));
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== canvas) return; // the page scrolls where nobody works here
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / 800);
      else zoom(1.0015 ** event.deltaY, share(point(event)[0]));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      const [x, y] = point(event), hit = view.at(x, y);
      drag = { x, from, to, moved: false, overview: hit && hit.overview !== undefined };
      if (drag.overview) move(hit.overview - (to - from) / 2, hit.overview + (to - from) / 2);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = point(event);
      if (!drag) {
        const hit = view.at(x, y);
        if (hit && hit.event !== undefined) read.textContent = hit.allocation === null ? moment(hit.event) : describe(data, hit.allocation);
        const before = pointed;
        pointed = hit?.allocation ?? null;
        if (before !== pointed) soon();
        return;
      }
      drag.moved ||= Math.abs(x - drag.x) > 3;
      if (drag.overview) {
        const hit = view.at(x, canvas.clientHeight - 4);
        if (hit) move(hit.overview - (to - from) / 2, hit.overview + (to - from) / 2);
      } else if (drag.moved) {
        canvas.classList.add("dragged");
        const by_ = ((drag.x - x) / view.plot().w) * (drag.to - drag.from);
        move(drag.from + by_, drag.to + by_);
      }
    });
    const drop = (event) => {
      if (drag && !drag.moved && !drag.overview) {
        const hit = view.at(...point(event));
        if (hit && hit.event !== undefined) to_event(hit.event, hit.allocation);
      }
      canvas.classList.remove("dragged");
      drag = null;
    };
    canvas.addEventListener("pointerup", drop);
    canvas.addEventListener("pointercancel", () => (drag = null));
    canvas.addEventListener("dblclick", (event) => zoom(0.4, share(point(event)[0])));

    const explain = () => {
      legend.replaceChildren(...groups().names.map((name, i) => {
        const tile = el("canvas", { width: 40, height: 28, "aria-hidden": "true" });
        view.swatch(tile, i);
        return el("li", {}, tile, name, el("output"));
      }), ...(memory ? [el("li", {}, el("span", { class: "dashed", "aria-hidden": "true" }), "reserved", el("output"))] : []));
      amounts();
      map?.refresh();
    };
    const fromState = () => {
      const [least, most] = view.span(axis.value());
      const a = J.state.get(key("from"), least), b = J.state.get(key("to"), most);
      if (a < b && a >= least && b <= most) [from, to] = [a, b];
      const at = J.state.get(key("at"), data.peak_event);
      if (Number.isInteger(at) && at >= -1 && at < data.events) cursor = at;
    };
    let last = axis.value();
    J.state.on((changed) => {
      if (changed.has(key("axis")) && axis.value() !== last) {
        last = axis.value();
        whole();
      }
      if (changed.has(key("by"))) explain();
      if (changed.has(key("cpp"))) show();
      if (changed.has(key("axis")) || changed.has(key("by"))) draw();
    });
    const fit = () => {
      view.resize(canvas.parentElement.clientWidth);
      draw();
    };
    fromState();
    view.resize(canvas.parentElement.clientWidth);
    explain();
    to_event(cursor);
    draw();
    J.figures.set(id, { node, values: wanted, svg, redraw: draw });
    let wide = canvas.parentElement.clientWidth;
    new ResizeObserver(() => {
      const now = canvas.parentElement.clientWidth;
      if (!now || now === wide) return;
      wide = now;
      fit();
    }).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      view.restyle();
      explain();
      fit();
    });
  };

  const difference = () => {
    const signed = (n) => (n > 0 ? `+${J.format.bytes(n)}` : J.format.bytes(n));
    const label = ([module, role]) => [module, role].filter(Boolean).join(", ") || "no stack";
    const differing = changes.filter((row) => row[6] !== "same");
    const roles = () => {
      const sums = new Map();
      for (const row of changes) {
        const sum = sums.get(row[1]) ?? ["", row[1], 0, 0, 0, 0, ""];
        for (let i = 2; i < 6; i += 1) sum[i] += row[i];
        sum[6] = !sum[4] ? "appeared" : !sum[5] ? "vanished" : sum[3] > sum[2] ? "grew" : sum[3] < sum[2] ? "shrank" : "same";
        sums.set(row[1], sum);
      }
      return [...sums.values()].filter((row) => row[3] !== row[2]).sort((a, b) => Math.abs(b[3] - b[2]) - Math.abs(a[3] - a[2]));
    };
    const chosen = J.select({ key: "changes", label: "by", options: [{ value: "role", label: "role" }, { value: "both", label: "module and role" }], value: "role" });
    J.figure({
      id: "difference",
      title: `From ${names[0]} to ${names[1]}: what changed at the peak`,
      caption: `${differing.length} of ${changes.length} pairs of module and role differ. Bars to the right are bytes that came, to the left bytes that went.`,
      controls: [chosen],
      draw: (values) => {
        const rows = values.changes === "role" ? roles() : differing;
        if (!rows.length) return el("p", {}, "At the peak both hold the same.");
        const top = rows.slice(0, 20), short = (text) => (text.length > 44 ? `${text.slice(0, 20)}…${text.slice(-22)}` : text);
        const wide = Math.max(...top.map((row) => short(label(row)).length)) * 6.4 + 14, most = Math.max(...top.map((row) => Math.abs(row[3] - row[2])));
        const came = (row) => row[3] - row[2], ticks = J.byteTicks(most, 3);
        const drawn = J.plot({
          height: 60 + 24 * top.length, marginLeft: Math.min(wide, J.width * 0.5), marginRight: 70,
          x: { label: "change in bytes", domain: [-most, most], ticks: [...ticks.slice(1).map((t) => -t).reverse(), ...ticks], tickFormat: signed, grid: true },
          y: { label: null, domain: top.map((_, i) => i), tickFormat: (i) => short(label(top[i])) },
          marks: [
            Plot.barX(top, { y: (_, i) => i, x: came, fill: (row) => (came(row) > 0 ? J.marks.hatch("diagonal", J.color(1)) : J.color(0)), stroke: "currentColor" }),
            Plot.text(top, { y: (_, i) => i, x: (row) => Math.max(0, came(row)), text: (row) => `${signed(came(row))}, ${row[6]}`, textAnchor: "start", dx: 4, fill: "currentColor" }),
            Plot.ruleX([0]),
          ],
        });
        for (const group of drawn.querySelectorAll("g[aria-label]")) group.removeAttribute("aria-label"); // a group has no role
        return drawn;
      },
      table: () => ({
        columns: ["module", "role", { label: "before", format: J.format.exact }, { label: "after", format: J.format.exact }, "allocations before", "after", "change"],
        rows: changes.slice(0, 500),
      }),
    });
  };

  if (names.length === 2) difference();
  packed.forEach(timeline);
})();

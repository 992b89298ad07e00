"use strict";
// Will it fit: a step's peak as one bar, what reserved and device bytes come to, and what the GPU has.
(() => {
  const data = J.data("will-it-fit");
  if (!data.models.length) return;
  const first = Math.max(0, data.models.findIndex((m) => m.asked), data.models.findIndex((m) => m.argument === "llama3-8b"));
  const powers = (list) => [...new Set(list)].sort((a, b) => a - b);
  const options = (list) => list.map((value) => ({ value, label: String(value) }));
  const usual = data.models[first];
  const stageCounts = powers(data.models.flatMap((m) => Object.keys(m.stages).map(Number)));
  const SPLITS = { "even": [0, 0], "1 less in the last": [0, 1], "2 less in the last": [0, 2], "1 less at both ends": [1, 1] };
  const controls = [
    J.select({ key: "run-model", label: "Model", value: first, options: data.models.map((m, i) => ({ value: i, label: m.label })) }),
    J.select({ key: "run-gpu", label: "GPU", value: "h100-80gb", options: data.gpus.map(([name]) => name) }),
    J.select({ key: "run-precision", label: "Precision", value: "bf16", options: Object.keys(data.precisions) }),
    J.slider({ key: "run-s", label: "Sequence s", values: data.sequences, value: usual.seq, format: (s) => `${J.format.count(s)} tokens` }),
    J.slider({ key: "run-b", label: "Micro-batch b", values: data.micro_batches, value: 1 }),
    J.slider({ key: "run-n", label: "Micro-batches", values: data.accumulated, value: 0, format: (n) => (n ? String(n) : "as PP") }),
    J.slider({ key: "run-tp", label: "TP", values: powers(data.models.flatMap((m) => m.ranks)), value: 1 }),
    J.slider({ key: "run-pp", label: "PP", values: stageCounts, value: 1 }),
    J.slider({ key: "run-dp", label: "DP", values: data.replicas, value: 8 }),
    J.slider({ key: "run-cp", label: "CP", values: data.contexts, value: 1 }),
    J.slider({ key: "run-ep", label: "EP", values: powers(data.models.flatMap((m) => m.expert_ranks)), value: 1 }),
    J.select({ key: "run-lora", label: "LoRA rank", value: 0, options: options(data.adapters).map((o) => (o.value ? o : { ...o, label: "none" })) }),
    J.select({ key: "run-split", label: "Stages", value: "even", options: Object.keys(SPLITS) }),
    J.select({ key: "run-zero", label: "ZeRO", value: 3, options: [{ value: 0, label: "0: replicas (DDP)" }, { value: 1, label: "1: optimizer" }, { value: 2, label: "2: and gradients" }, { value: 3, label: "3: and parameters (FSDP)" }] }),
    J.select({ key: "run-recompute", label: "Recompute", value: "none", options: data.modes }),
    J.select({ key: "run-optimizer", label: "Optimizer", value: "adamw", options: data.optimizers }),
    J.select({ key: "run-base", label: "LoRA base", value: "plain", options: data.bases }),
  ];
  const PARTS = [
    { name: "parameters", color: 7, hatch: "solid" },
    { name: "gradients", color: 4, hatch: "cross" },
    { name: "optimizer", color: 5, hatch: "horizontal" },
    { name: "activations", color: 0, hatch: "diagonal" },
    { name: "transients", color: 1, hatch: "dots" },
  ];
  const VERDICTS = {
    "fits": { sign: "✓", color: "var(--host)" },
    "too close to call": { sign: "≈", color: "var(--again)" },
    "does not fit": { sign: "✗", color: "var(--limit)" },
  };
  const GIB = 2 ** 30;

  // Layers of each stage, larger ones in the middle; null: a stage would have none.
  const countsOf = ({ layers: { length: layers }, stages }, pp, split) => {
    if (split === "even" && stages[pp]) return stages[pp];
    if (pp === 1) return [layers];
    const [less, lesser] = SPLITS[split], share = Math.floor((layers + less + lesser) / pp), last = share - lesser;
    const begin = pp > 2 ? share - less : layers - last, left = layers - begin - last, each = Math.floor(left / (pp - 2)), rest = left - each * (pp - 2);
    const before = Math.floor((pp - 2 - rest) / 2), inner = d3.range(pp - 2).map((i) => each + (i >= before && i < before + rest));
    const found = [begin, ...inner, last];
    return Math.min(...found) > 0 ? found : null;
  };

  // What is chosen, as far as the model allows it.
  const runOf = (values) => {
    const model = data.models[values["run-model"]];
    const most = (list, wanted) => Math.max(...list.filter((n) => n <= wanted));
    const rank = values["run-lora"], base = rank ? values["run-base"] : "plain", plain = rank > 0 && values["run-precision"] !== "bf16" && (base !== "plain" || values["run-precision"] === "fp8");
    const replicas = values["run-dp"] * values["run-cp"];
    const run = {
      model, gpu: values["run-gpu"], s: Math.min(values["run-s"], model.longest), b: values["run-b"], cp: values["run-cp"], dp: values["run-dp"],
      t: most(model.ranks, values["run-tp"]), pp: most(stageCounts.filter((pp) => countsOf(model, pp, values["run-split"])), values["run-pp"]),
      ep: rank ? 1 : most(model.expert_ranks.filter((ep) => replicas % ep === 0), values["run-ep"]), optimizer: values["run-optimizer"],
      zero: values["run-zero"], mode: values["run-recompute"], precision: plain ? "bf16" : values["run-precision"], rank, base,
    };
    const notes = [
      run.s < values["run-s"] && `${J.format.count(run.s)} tokens (its positions)`,
      run.t < values["run-tp"] && `TP ${run.t} (heads do not divide over ${values["run-tp"]} ranks)`,
      run.pp < values["run-pp"] && `PP ${run.pp} (${model.layers.length} layers are too few for ${values["run-pp"]} stages)`,
      run.ep < values["run-ep"] && `EP ${run.ep} (${rank ? "under LoRA" : `${values["run-ep"]} does not divide experts and DP × CP = ${replicas}`})`,
      plain && "bf16 (under LoRA)",
    ];
    return { ...run, many: values["run-n"] || run.pp, counts: countsOf(model, run.pp, values["run-split"]), notes: notes.filter(Boolean) };
  };

  // predict/ranges.py, `figures`: allocated, reserved and device bytes, and the verdict.
  const figuresOf = (run, { nbytes, cached, streams, updated }) => {
    const [bytes, fragments] = run.model.ranges[run.rank ? 1 : 0], scale = Math.sqrt(nbytes * GIB);
    const talking = [run.t, run.cp, run.ep, run.pp, run.dp].filter((n) => n > 1).length;
    const fixed = data.fixed.map((n, i) => n + talking * data.communicator[i] + (run.ep > 1 ? data.all_to_all[i] : 0));
    const usable = data.gpus.find(([name]) => name === run.gpu)[1];
    const beyond = Math.max(Math.min(cached, Math.floor(nbytes / 4)) + streams, updated - nbytes);
    const segments = nbytes + Math.min(beyond, Math.max(0, usable - fixed[1] - nbytes));
    const allocated = bytes.map((share) => nbytes * share), more = fragments.map((share) => segments + share * scale);
    const floor = allocated[0] * data.least_fragments, least = floor + fixed[0];
    const reserved = [Math.max(floor, more[0]), Math.max(floor, more[1]), Math.max(allocated[2], more[2])], device = reserved.map((n, i) => n + fixed[i]);
    const verdict = device[2] <= usable ? "fits" : least <= usable ? "too close to call" : "does not fit";
    return { allocated, reserved, device, usable, verdict };
  };

  const known = new Map();
  const answer = (values) => {
    const key = controls.map((control) => values[control.key]).join(" ");
    if (!known.has(key)) {
      if (known.size > 500) known.clear();
      const run = runOf(values), peak = J.stepBytes(data, run);
      known.set(key, { run, peak, ...(peak && figuresOf(run, peak)) });
    }
    return known.get(key);
  };
  const range = ([low, expected, high]) => `${J.format.bytes(Math.round(expected))} (${J.format.bytes(Math.round(low))} to ${J.format.bytes(Math.round(high))})`;
  const place = ({ phase, where, stage }, run) => {
    const at = where ? `${phase} of ${where}` : "optimizer step";
    return run.pp > 1 ? `${at}, stage ${stage}` : at;
  };

  const draw = (values, { width }) => {
    const { run, peak, verdict, usable, ...found } = answer(values);
    if (!peak) return J.el("p", {}, "This page has no sums for this setting: the command below answers it.");
    const rows = ["allocated", "reserved", "device"], HIGH = 46, ROW = 40, TOP = 26;
    const height = TOP + HIGH + 12 + rows.length * ROW + 26, bottom = height - 26;
    const most = Math.max(usable, found.device[2]) * 1.04, x = d3.scaleLinear([0, most], [1, width - 1]);
    const node = J.el("svg:svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "A step's peak and the GPU's memory" });
    const text = (x, y, content, more = {}) => J.el("svg:text", { x, y, fill: "currentColor", stroke: "var(--paper)", "stroke-width": 4, "paint-order": "stroke", ...more }, content);
    for (const tick of J.byteTicks(most, width < 560 ? 4 : 8)) {
      node.append(J.el("svg:line", { x1: x(tick), x2: x(tick), y1: TOP, y2: bottom, stroke: "var(--line)" }));
      node.append(text(x(tick), bottom + 16, J.format.tick(tick), { "text-anchor": tick ? (x(tick) > width - 30 ? "end" : "middle") : "start", fill: "var(--soft)" }));
    }
    const edge = J.el("svg:line", { x1: x(usable), x2: x(usable), y1: TOP - 8, y2: bottom, stroke: "var(--limit)", "stroke-width": 2, "stroke-dasharray": "7 3" });
    const stops = [];
    let from = 0;
    peak.parts.forEach((nbytes, i) => {
      const part = PARTS[i], rect = J.el("svg:rect", { x: x(from), y: TOP, width: Math.max(0, x(from + nbytes) - x(from)), height: HIGH, fill: J.marks.hatch(part.hatch, J.color(part.color)), stroke: J.color(part.color), "data-bytes": nbytes, "data-text": `${part.name}: ${J.format.exact(nbytes)}` });
      from += nbytes;
      if (nbytes > 0) stops.push(rect);
      node.append(rect);
    });
    node.append(edge);
    rows.forEach((name, i) => {
      const y = TOP + HIGH + 12 + i * ROW, [low, expected, high] = found[name], color = J.color(7);
      node.append(J.el("svg:line", { x1: x(low), x2: x(high), y1: y + 26, y2: y + 26, stroke: color, "stroke-width": 7, "stroke-opacity": 0.4 }));
      const mark = J.el("svg:line", { x1: x(expected), x2: x(expected), y1: y + 19, y2: y + 33, stroke: "var(--ink)", "stroke-width": 3, "data-text": `${name}: ${range(found[name])}` });
      stops.push(mark);
      node.append(mark, text(1, y + 13, `${name} ${range(found[name])}`));
    });
    const right = x(usable) > width * 0.55;
    node.append(text(x(usable) + (right ? -5 : 5), 13, `${run.gpu}: ${J.format.bytes(usable)}`, { "text-anchor": right ? "end" : "start", "font-weight": 600 }));
    const look = VERDICTS[verdict];
    const said = J.el("p", { class: "verdict", role: "status", style: `border-color: ${look.color}` }, J.el("strong", {}, `${look.sign} ${verdict}`), ` on ${run.gpu}: peak ${J.format.bytes(peak.nbytes)}, ${place(peak, run)}`);
    const legend = J.legend(PARTS.map((part, i) => ({ label: `${part.name} ${J.format.bytes(peak.parts[i])}`, color: J.color(part.color), hatch: part.hatch })), { width });
    return J.el("div", {}, said, legend, J.rove(node, stops, (stop) => stop.dataset.text));
  };

  J.figure({
    id: "will-it-fit", title: "Will it fit?", controls, draw,
    caption: (values) => {
      const { run } = answer(values), devices = run.t * run.pp * run.dp * run.cp;
      const notes = run.notes.length ? ` Shown is ${run.model.label} with ${run.notes.join(", ")}.` : "";
      const uneven = new Set(run.counts).size > 1 ? `, stages of ${run.counts.join(", ")} layers` : "";
      return `${J.format.grouped(devices)} GPU${devices > 1 ? "s" : ""}, ${run.many} micro-batch${run.many > 1 ? "es" : ""} a step${run.pp > 1 ? " (1F1B)" : ""}${uneven}; PyTorch's kernels, FlashAttention. Bars are 80 % ranges.${notes}`;
    },
    table: (values) => {
      const { run, peak, usable, verdict, ...found } = answer(values);
      if (!peak) return { columns: ["bytes"], rows: [] };
      const rows = PARTS.map((part, i) => [part.name, peak.parts[i], null, null]);
      rows.push(["peak", peak.nbytes, null, null]);
      for (const name of ["allocated", "reserved", "device"]) rows.push([name, ...[1, 0, 2].map((i) => Math.round(found[name][i]))]);
      rows.push([`usable, ${run.gpu}`, usable, null, null], [verdict, null, null, null]);
      return { columns: ["of the worst rank", "bytes", "from", "to"], rows };
    },
    command: (values) => {
      const { run } = answer(values), words = ["jettison ledger", run.model.argument, run.model.flags].filter(Boolean);
      words.push("--seq", run.s, "--micro-batch", run.b);
      for (const [flag, size] of [["tp", run.t], ["pp", run.pp], ["cp", run.cp], ["ep", run.ep], ["dp", run.dp]]) if (size > 1) words.push(`--${flag}`, size);
      if (String(run.counts) !== String(run.model.stages[run.pp])) words.push("--stage-layers", run.counts);
      if (run.many !== run.pp) words.push("--micro-batches", run.many);
      if (run.optimizer !== "adamw") words.push("--optimizer", run.optimizer);
      if (run.zero) words.push("--zero", run.zero);
      words.push("--precision", run.precision); // with adapters it is another one by default
      if (run.rank) words.push("--lora", run.rank);
      if (run.base !== "plain") words.push("--base", run.base);
      words.push("--recompute", run.mode, "--gpu", run.gpu);
      return words.join(" ");
    },
  });
  J.willItFit = answer;
})();

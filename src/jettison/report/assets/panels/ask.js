"use strict";
// "Ask the planner": a form over the server's questions, shown only where there is a server. What comes back is the
// document that the command line prints, shown as tables; what goes wrong is said in the server's own words.
(() => {
  if (!document.getElementById("data-serve")) return;
  const { models, gpus, kinds, limits, choices } = J.data("serve");
  const UPLOAD = "(a config.json)", TRAINER = "(a trainer's own files)", WATCH_MILLISECONDS = 400;
  const bytes = J.format.bytes, seconds = J.format.seconds, percent = J.format.percent;

  // fields -------------------------------------------------------------------------------------------------------------
  const LAYOUT = ["plan", "estimate", "ledger"], ALL = [...LAYOUT, "search"];
  const number = (key, label, of, more = {}) => ({ key, label, of, kind: "number", ...more });
  const MODES = ["", "none", "selective", "selective-op", "full"];
  const chosen = (key, label, of = ALL) => ({ key, label, of, kind: "select", options: ["", ...choices[key]] });
  const FIELDS = [
    { key: "budget", label: "Budget, such as 60GiB", of: ["plan", "ledger", "search"], kind: "text" },
    { key: "gpu", label: "GPU", of: ALL, kind: "select", options: ["", ...gpus], usual: "h100-80gb" },
    { key: "model", label: "Model of these files", of: [], kind: "select", options: ["", ...models], unset: "as they name it", ofFiles: true, stored: "files-model" },
    number("gpus", "Devices", ["search"], { least: 1, needed: true, ofFiles: true }),
    number("global_batch", "Global batch size", ["search"], { least: 1, needed: true }),
    number("seq", "Sequence, tokens", ALL, { least: 1 }),
    number("micro_batch", "Micro-batch size", LAYOUT, { least: 1 }),
    number("micro_batches", "Micro-batches", LAYOUT, { least: 1 }),
    number("tp", "Tensor parallel", LAYOUT, { least: 1 }),
    { key: "sp", label: "Sequence parallel", of: LAYOUT, kind: "select", options: ["", "on", "off"] },
    number("pp", "Pipeline stages", LAYOUT, { least: 1 }),
    number("virtual_stages", "Virtual stages", LAYOUT, { least: 1 }),
    number("cp", "Context parallel", LAYOUT, { least: 1 }),
    number("dp", "Data parallel", LAYOUT, { least: 1 }),
    number("ep", "Expert parallel", LAYOUT, { least: 1 }),
    number("zero", "ZeRO stage", LAYOUT, { least: 0, most: 3 }),
    { key: "recompute", label: "Recompute", of: ["estimate", "ledger"], kind: "select", options: [...MODES, "auto"] },
    { key: "compare", label: "Compare with", of: ["plan"], kind: "select", options: MODES, unset: "nothing", own: true }, // a second question
    { key: "fit", label: "What would fit", of: ["ledger"], kind: "select", options: ["", "on"] },
    chosen("precision", "Precision"),
    chosen("optimizer", "Optimizer"),
    { key: "lora", label: "LoRA rank", of: ALL, kind: "text" },
    chosen("base", "LoRA base"),
    { key: "offload", label: "Offload to CPU", of: ["plan"], kind: "select", options: ["", "on", "off"] },
  ];
  const SWITCHES = new Set(["sp", "offload", "fit"]);
  const WORDS = { plan: "What to keep under a budget (plan)", estimate: "How long a step takes (estimate)", ledger: "What a step needs (ledger)", search: "The fastest layout (search)" };

  const labelled = (id, label, input, more = "") => J.el("div", { class: `control ${more}` }, J.el("label", { for: id }, label), input);
  const stored = (key) => `ask-${key}`; // in the address

  const fields = FIELDS.map((field) => {
    const kept = field.stored ?? field.key, id = `ask-${kept}`;
    const change = (event) => J.state.set(stored(kept), event.target.value);
    const input = field.kind === "select"
      ? J.el("select", { id, onchange: change }, field.options.map((o) => J.el("option", { value: o }, o || (field.unset ?? "default"))))
      : J.el("input", { id, type: field.kind, min: field.least, max: field.most, maxlength: 40, size: 10, autocomplete: "off", placeholder: field.needed ? null : "default", required: field.needed, onchange: change });
    input.value = J.state.get(stored(kept), field.usual ?? "");
    if (field.kind === "select" && input.selectedIndex < 0) input.selectedIndex = 0;
    return { ...field, input, node: labelled(id, field.label, input) };
  });

  const choice = (key, label, options, fallback) => {
    const id = `ask-${key}`;
    const input = J.el("select", { id, onchange: () => { J.state.set(stored(key), input.value); show(); } },
      options.map(([value, text]) => J.el("option", { value }, text)));
    input.value = J.state.get(stored(key), fallback);
    if (input.selectedIndex < 0) input.value = fallback;
    return { input, node: labelled(id, label, input, "wide") };
  };
  const verb = choice("verb", "Question", Object.entries(WORDS), "plan");
  const model = choice("model", "Model", [[TRAINER, "a trainer's own files (paste or choose)"], [UPLOAD, "a config.json"], ...models.map((name) => [name, name])], "qwen3-1.7b");
  const file = J.el("input", { id: "ask-file", type: "file", accept: ".json,application/json", onchange: () => show() });
  const fileRow = labelled("ask-file", "config.json", file);
  const files = J.el("input", { id: "ask-files", type: "file", multiple: true, accept: kinds.join(","), onchange: () => show() });
  const pasted = J.el("textarea", { id: "ask-pasted", rows: 8, cols: 60, spellcheck: "false", autocomplete: "off", placeholder: "[training]\nseq_len = 8192" });
  const trainerRow = J.el("div", { class: "controls" },
    labelled("ask-files", `Files (${kinds.join(", ")}), the run's first`, files), labelled("ask-pasted", "or paste one: torchtitan's TOML, axolotl's YAML, a launch script", pasted));

  // the panel ----------------------------------------------------------------------------------------------------------
  const ask = J.el("button", { type: "submit" }, "Ask");
  const cancel = J.el("button", { type: "button", disabled: true, onclick: () => stop() }, "Cancel");
  const save = J.el("button", { type: "button", hidden: true, onclick: () => J.save.download(`${shown.schema.split(/[./]/)[1]}.json`, new Blob([text], { type: "application/json" })) }, "Save JSON");
  const download = J.el("button", { type: "button", hidden: true, onclick: () => written() }, "Download the file with this plan");
  const status = J.el("p", { class: "caption", role: "status" });
  const trouble = J.el("p", { class: "trouble", role: "alert" });
  const code = J.el("code");
  const copy = J.el("button", { type: "button", "aria-label": "Copy the command line of this question", onclick: async () => {
    try { await navigator.clipboard.writeText(code.textContent); copy.textContent = "copied"; } catch { getSelection().selectAllChildren(code); }
  } }, "copy");
  const command = J.el("div", { class: "command" }, J.el("span", { class: "prompt", "aria-hidden": "true" }, "$"), code, copy);
  const answer = J.el("div", { class: "answer" });
  const form = J.el("form", { novalidate: true, onsubmit: (event) => { event.preventDefault(); start(); }, oninput: () => show() },
    J.el("div", { class: "controls" }, verb.node, model.node, fileRow, fields.map((field) => field.node)), trainerRow,
    J.el("div", { class: "buttons" }, ask, cancel, save, download));
  const heading = J.el("h2", { id: "ask-title" }, "Ask the planner");
  document.querySelector("main").append(J.el("section", { class: "figure", id: "ask", "aria-labelledby": heading.id }, heading,
    J.el("p", { class: "caption" }, "Answered on this machine with the documents that the command line prints. Take a preset, a config.json or the files of your trainer as the model; empty fields have their defaults, or what the files say."),
    form, command, status, trouble, answer));

  let running = null, shown = null, text = "";
  show();

  function show() {
    fileRow.hidden = model.input.value !== UPLOAD;
    trainerRow.hidden = !ofTrainer();
    for (const field of fields) field.node.hidden = !applies(field);
    download.hidden = true;
    copy.textContent = "copy";
    code.replaceChildren(...J.words(commandLine()));
  }

  function ofTrainer() { return model.input.value === TRAINER; }

  function applies(field, asked = verb.input.value) { return field.of.includes(asked) || (field.ofFiles && ofTrainer()); }

  // the kind of a pasted text, which readers tell by the end of a name
  function nameOf(content) {
    if (/^\s*\{/.test(content)) return "pasted.json";
    if (/^(from|import|def|class)\s/m.test(content)) return "pasted.py";
    if (/^\s*\[+[\w."-]+\]+\s*(#.*)?$/m.test(content)) return "pasted.toml";
    return /^#!|\s--[a-z][\w-]+/m.test(content) ? "pasted.sh" : "pasted.yaml";
  }

  function given(asked) {
    const found = {};
    for (const field of fields) {
      const { key, kind, input } = field, value = input.value.trim();
      if (!applies(field, asked) || field.own || value === "" || input.closest("[hidden]")) continue;
      found[key] = SWITCHES.has(key) ? value === "on" : kind === "number" ? Number(value) : value;
    }
    return found;
  }

  function commandLine() {
    const name = model.input.value === UPLOAD ? file.files[0]?.name ?? "config.json" : model.input.value;
    const { model: preset, ...asked } = given();
    if (model.input.value === UPLOAD && verb.input.value === "plan") asked.tp ??= 1; // planned from its spec, not traced
    const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${String(word).replaceAll("'", "'\\''")}'`);
    const flags = Object.entries(asked).flatMap(([key, value]) => {
      const flag = key.replaceAll("_", "-");
      return typeof value === "boolean" ? [value ? `--${flag}` : `--no-${flag}`] : [`--${flag}`, quoted(String(value))];
    });
    const names = files.files.length ? [...files.files].map((one) => one.name) : [nameOf(pasted.value)];
    const run = ofTrainer() ? [...(preset ? [quoted(preset)] : []), ...names.flatMap((one) => ["--from", quoted(one)])] : [quoted(name)];
    return ["jettison", verb.input.value, ...run, ...flags].join(" ");
  }

  // asking -------------------------------------------------------------------------------------------------------------
  async function body(question) {
    if (ofTrainer()) {
      const chosen = [...files.files], cleaned = (name) => name.replace(/[^A-Za-z0-9._-]/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(-60);
      if (!chosen.length && !pasted.value.trim()) throw new Error("Choose a trainer's file, or paste one.");
      if (d3.sum(chosen, (one) => one.size) > limits.body_bytes) throw new Error(`The files are too large; at most ${bytes(limits.body_bytes)} can be sent.`);
      const sent = await Promise.all(chosen.map(async (one) => ({ name: cleaned(one.name), text: await one.text() })));
      if (!sent.length && nameOf(pasted.value) === "pasted.py") throw new Error("Python is read by the command line alone, which takes FILE.py:NAME after --from.");
      return { files: sent.length ? sent : [{ name: nameOf(pasted.value), text: pasted.value }], ...given(question) };
    }
    if (model.input.value !== UPLOAD) return { model: model.input.value, ...given(question) };
    const chosen = file.files[0];
    if (!chosen) throw new Error("Choose the config.json to ask about.");
    if (chosen.size > limits.body_bytes) throw new Error(`${chosen.name} has ${bytes(chosen.size)}; at most ${bytes(limits.body_bytes)} can be sent.`);
    let config;
    try { config = JSON.parse(await chosen.text()); } catch { throw new Error(`${chosen.name} is not JSON.`); }
    return { config, name: chosen.name.replace(/\.json$/, "").replace(/[^A-Za-z0-9._-]/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 60) || "uploaded", ...given(question) };
  }

  async function start() {
    if (running) return;
    const mine = running = { id: crypto.randomUUID(), abort: new AbortController() };
    [trouble.textContent, status.textContent] = ["", "asking"];
    [ask.disabled, cancel.disabled] = [true, false];
    answer.setAttribute("aria-busy", "true");
    const watching = setInterval(() => watch(mine), WATCH_MILLISECONDS);
    try {
      const asked = verb.input.value, beside = asked === "plan" && fields.find(({ key }) => key === "compare").input.value;
      const content = await posted(asked, { ...await body(), id: mine.id }, mine.abort.signal);
      [text, shown] = [content, JSON.parse(content)];
      const question = given().gpu ? "estimate" : "ledger"; // without a GPU there are bytes and no seconds
      const other = beside && JSON.parse(await posted(question, { ...await body(question), recompute: beside, id: mine.id }, mine.abort.signal));
      answer.replaceChildren(...notes(shown), ...TABLES[asked](shown).filter(Boolean), ...readings(shown.from), ...(other ? [compared(shown, beside, other)] : []));
      save.hidden = false;
      download.hidden = !(ofTrainer() && asked === "plan" && shown.feasible);
      status.textContent = "answered";
    } catch (error) {
      status.textContent = "";
      trouble.textContent = mine.abort.signal.aborted ? "Cancelled." : error instanceof TypeError ? "The server does not answer; is it still running?" : error.message;
    } finally {
      clearInterval(watching);
      running = null;
      [ask.disabled, cancel.disabled] = [false, true];
      answer.removeAttribute("aria-busy");
    }
  }

  async function posted(question, sent, signal) {
    const response = await fetch(`/api/${question}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(sent), signal });
    const content = await response.text();
    if (!response.ok) throw new Error(problem(response, content));
    return content;
  }

  // the first of the trainer's files again, with the plan's settings in it
  async function written() {
    trouble.textContent = "";
    try {
      const found = JSON.parse(await posted("write", await body()));
      status.replaceChildren(...markdown(found.changes.join("; ")));
      J.save.download(found.name, new Blob([found.text], { type: "text/plain" }));
    } catch (error) {
      trouble.textContent = error.message;
    }
  }

  function stop() {
    if (!running) return;
    fetch(`/api/requests/${running.id}`, { method: "DELETE" }).catch(() => {}); // closing the request ends it as well
    running.abort.abort();
  }

  async function watch(mine) {
    try {
      const response = await fetch(`/api/requests/${mine.id}`, { signal: mine.abort.signal });
      if (!response.ok || running !== mine) return;
      const { state, ahead, progress, seconds: passed } = await response.json();
      if (state === "unknown" || running !== mine) return; // it has not come yet, or is answered
      status.textContent = state === "waiting" ? `waiting, ${ahead} requests ahead` : `${progress || "working"} (${passed.toFixed(0)} s)`;
    } catch { /* the answer's own request says what is wrong */ }
  }

  function problem(response, content) {
    let detail = response.statusText;
    try { detail = JSON.parse(content).detail ?? detail; } catch { /* not ours */ }
    const again = response.headers.get("Retry-After");
    return again ? `${detail} (in ${again} s)` : detail;
  }

  // `code` and **strong** of notes and explanations
  function markdown(words) {
    return words.split(/(`[^`]+`|\*\*[^*]+\*\*)/).filter(Boolean).flatMap((part) => (part.startsWith("`") ? [J.el("code", {}, part.slice(1, -1))]
      : part.startsWith("**") ? [J.el("strong", {}, part.slice(2, -2))] : J.words(part)));
  }

  // the peak by role beside the budget
  function bar({ peak_roles: roles, budget_bytes: budget }) {
    const rows = Object.entries(roles ?? {}).map(([what, nbytes], n) => ({ what, nbytes, n }));
    if (!rows.length) return null;
    const most = Math.max(budget, d3.sum(rows, (row) => row.nbytes)), width = Math.max(260, answer.clientWidth || 600);
    const drawn = [
      J.legend([...rows.map((row) => ({ label: `${row.what}: ${bytes(row.nbytes)}`, color: J.color(row.n), hatch: row.n })), { label: `budget: ${bytes(budget)}`, color: "var(--limit)", dash: "12 4", line: true }], { width }),
      J.plot({
        width, height: 88, marginLeft: 12, marginRight: 24, marginTop: 6,
        x: J.byteAxis("bytes allocated at the peak", most, width < 560 ? 3 : 6), color: { type: "identity" },
        marks: [Plot.barX(rows, { x: "nbytes", fill: (row) => J.marks.hatch(row.n, J.color(row.n)), stroke: (row) => J.color(row.n) }), Plot.ruleX([budget], { stroke: "var(--limit)", strokeDasharray: "12 4", strokeWidth: 2 })],
      }),
    ];
    drawn[1].setAttribute("role", "img");
    drawn[1].setAttribute("aria-label", `The peak by role: ${rows.map((row) => `${row.what} ${bytes(row.nbytes)}`).join(", ")}; the budget is ${bytes(budget)}`);
    return J.el("figure", {}, drawn.map(J.marks.finish));
  }

  // answers as tables --------------------------------------------------------------------------------------------------
  function facts(rows) {
    return J.el("dl", { class: "facts" }, rows.filter(([, value]) => value !== null).flatMap(([name, value]) => [J.el("dt", {}, name), J.el("dd", {}, value)]));
  }

  function table(title, columns, rows) {
    const node = J.table({ columns, rows });
    node.prepend(J.el("caption", {}, title));
    return J.el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, node);
  }

  // neighbours that differ in nothing but their name become one row
  function merged(layers, keys) {
    const runs = [];
    for (const layer of layers) {
      const last = runs.at(-1);
      if (last && keys.every((key) => last.first[key] === layer[key])) [last.last, last.count] = [layer, last.count + 1];
      else runs.push({ first: layer, last: layer, count: 1 });
    }
    return runs.map(({ first, last, count }) => [count > 1 ? `${first.layer} to ${last.layer.split(".").at(-1)}` : first.layer, count, ...keys.map((key) => first[key])]);
  }

  const range = ([low, high], sure) => `${seconds(low)} to ${seconds(high)}: ` +
    `${sure.own_class ? "" : "no run of this class was compared; "}80 % range by ${sure.runs} published runs of ${sure.sources} sources (${sure.kind})`;

  // what is expected, and its range: figures of a run by name
  const expected = (figures) => ["allocated", "reserved", "device"].map((name) => {
    const found = figures?.[`${name}_bytes`];
    return [name, found ? `${bytes(found.expected)} (${bytes(found.low)} to ${bytes(found.high)})` : null];
  });
  const some = (n) => n || null; // no column of zeros
  const unbroken = (text) => J.el("span", { style: "white-space: nowrap" }, text);

  const notes = ({ warnings, from }) => [...(warnings ?? []), ...(from?.notes ?? [])].map((words) => J.el("p", { class: "caption" }, "Note: ", markdown(words)));

  // what the trainer's files became
  const readings = (read) => (read ? [J.el("details", {}, J.el("summary", {}, `What was read from ${read.path} (${read.framework})`),
    J.el("p", { class: "caption" }, "The same as ", J.el("code", {}, J.words(read.command))),
    table("Keys that count", ["key", "value", "became"], read.used.map(({ key, value, became }) => [key, value, became])))] : []);

  const asBytes = (label) => ({ label, format: bytes }), asSeconds = (label) => ({ label, format: seconds });

  // what would fit: the edge of each size, and settings with their cost
  const RULES = { surely: "surely fits", expected: "is expected to fit", may: "may fit", budget: "fits" };
  function fitting({ micro_batch, seq, tp, zero, changes }) {
    const edges = Object.entries({ "largest micro-batch": micro_batch, "longest sequence": seq, "smallest --tp": tp, "smallest --zero": zero });
    const more = (share) => (share === null ? "" : `${share < 0 ? "−" : "+"}${percent(Math.abs(share))}`);
    const settings = changes.map((c) => [c.flags, c.peak_bytes, c.step_seconds ?? "", more(c.added_fraction), RULES[c.rule]]);
    const step = { label: "a step", format: (found) => (found === "" ? "" : seconds(found)) };
    return [
      table("What fits, one thing changed at a time", ["change", "fits", "may fit", "how surely"],
        edges.map(([name, { value, may, rule }]) => [name, value ?? "none", may ?? value ?? "none", value === null ? "" : RULES[rule]])),
      ...(changes.length ? [table("Settings with which it fits, the fastest first", ["change", asBytes("peak"), step, "of a step", "how surely"], settings)] : []),
    ];
  }

  // the plan, and one setting of recompute for all layers
  function compared({ feasible, figures, predicted, budget_bytes: budget }, mode, other) {
    const row = (name, peak, of) => [name, peak, of?.step_seconds ? seconds(of.step_seconds.expected) : "n/a", peak <= budget ? "yes" : "no"];
    const rows = [row(`${mode}, for all layers`, other.peak_bytes, other.figures)];
    if (feasible) rows.unshift(row("as planned", predicted.peak_bytes, figures));
    return table("The plan and one recompute setting", ["recompute", asBytes("allocated"), "step", "within the budget"], rows);
  }

  const TABLES = {
    plan(found) {
      const budget = `${bytes(found.budget_bytes)} (${found.budget_bytes}B)`, least = `${bytes(found.minimum_budget_bytes)} (${found.minimum_budget_bytes}B)`;
      if (!found.feasible) return [facts([["verdict", `does not fit: no plan fits ${budget}`], ["smallest feasible budget", least], ["why", found.reason ? markdown(found.reason) : null]])];
      const { peak_bytes: peak, step_seconds: step, overhead_fraction: overhead, host_bytes: host } = found.predicted;
      return [
        bar(found),
        facts([["verdict", found.verdict ?? "fits"], ["predicted peak", J.format.exact(peak)], ...expected(found.figures), ["budget", budget], ["smallest feasible budget", least],
          ["step", step === null ? null : `${found.figures?.step_seconds ? `${seconds(found.figures.step_seconds.expected)} (${seconds(found.figures.step_seconds.low)} to ${seconds(found.figures.step_seconds.high)})` : seconds(step)}, recompute adds ${percent(overhead)} to one without`], ["hardware", found.hardware], ["offloaded to CPU", host ? bytes(host) : null]]),
        table("What each layer does, of one micro-batch on one rank", ["layers", "count", "stage", "policy", asBytes("kept"), asBytes("offloaded"), { label: "recomputed", format: J.format.flops }],
          merged(found.layers, ["stage", "policy", "kept_bytes", "offloaded_bytes", "recompute_flops"]).map((row) => [...row.slice(0, 5), ...row.slice(5).map(some)])),
      ];
    },
    estimate(found) {
      const times = found.prediction_error.expected; // a step's seconds as modelled and as expected
      return [
        facts([["step", seconds(times * found.step_seconds)], ["range", range(found.step_range_seconds, found.prediction_error)], ["tokens a second on each GPU", J.format.count(found.tokens_per_second_per_gpu / times)], ["MFU, HFU", `${percent(found.mfu / times)}, ${percent(found.hfu / times)}`],
          ["peak", J.format.exact(found.peak_bytes)], ...expected(found.figures), ["verdict", `${found.verdict}: ${bytes(found.available_bytes)} for tensors`]]),
        table(`Where the time goes: ${seconds(found.step_seconds)} as modelled`, ["part", asSeconds("time"), { label: "share", format: percent }],
          Object.entries(found.breakdown).map(([name, time]) => [name.replace("_seconds", ""), time, time / found.step_seconds])),
      ];
    },
    ledger(found) {
      return [
        facts([["verdict", found.verdict && `${found.verdict}${found.usable_bytes ? `: ${bytes(found.usable_bytes)} usable on ${found.gpu}` : ""}`], ["peak of a step", J.format.exact(found.peak_bytes)], ...expected(found.figures), ["on stage", String(found.worst_stage)], ["parameters", J.format.count(found.parameters)]]),
        table("Pipeline stages, on one rank", ["stage", "micro-batches in flight", asBytes("activations"), asBytes("parameters"), asBytes("gradients"), asBytes("optimizer"), asBytes("peak")],
          found.stages.map((s) => [s.stage, s.in_flight, s.activation_bytes, s.parameter_bytes, s.gradient_bytes, s.optimizer_bytes, s.peak_bytes])),
        table("Saved for backward, by one micro-batch on one rank", ["layers", "count", "stage", "policy", "tensors", asBytes("bytes")],
          merged(found.layers, ["stage", "policy", "tensors", "bytes"])),
        ...(found.fit ? fitting(found.fit) : []),
      ];
    },
    search(found) {
      const times = found.prediction_error?.expected;
      const row = (c) => [times * c.step_seconds, c.mfu / times, c.peak_bytes, c.verdict, c.flags]; // numbers first: flags are wider than a phone
      const flags = (text) => J.el("code", { style: "white-space: nowrap" }, text); // a hyphen is no place to break
      const columns = [asSeconds("step"), { label: "MFU", format: percent }, asBytes("allocated"), { label: "verdict", format: unbroken }, { label: "layout, batch and recompute", format: flags }];
      if (!found.feasible) return [facts([["verdict", "does not fit"], ["closest", found.closest.flags], ["it lacks", J.format.exact(found.over_budget_bytes)]])];
      return [
        facts([["range of the fastest", range(found.candidates[0].step_range_seconds, found.prediction_error)]]),
        table("The fastest", columns, found.candidates.map(row)),
        J.el("ul", {}, found.explanation.map((sentence) => J.el("li", {}, markdown(sentence)))),
        table("Pareto front: memory against step time", columns, found.front.map(row)),
      ];
    },
  };
})();

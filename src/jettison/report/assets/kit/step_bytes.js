// Bytes of a training step of a described run: the sums of report/explorer_fit.py, folded as memory/step.py,
// predict/stage_units.py and predict/fsdp.py fold them for PyTorch's kernels and 1F1B. Whole bytes; tests hold them to Python's.
"use strict";
(function () {
  const J = (globalThis.J = globalThis.J || {});
  const EMBEDDING = "embedding", LAYER = "layer", HEAD = "head";
  const none = { gathered: 0, reduced: 0, gradients: 0 };

  // {model, s, b, t, cp, ep, dp, pp, counts: layers of each stage, many: micro-batches, zero, precision, optimizer, rank, base, mode} -> {embedding, head, layers: by kind, first: over a frozen
  // embedding}, each with its passes and weights at these sizes; null: this page has no sums for them.
  function regionsOf(data, run) {
    const key = [run.precision, run.t > 1 && "tp", run.cp > 1 && "cp", run.ep > 1 && "ep", run.rank > 0 && "lora", run.base !== "plain" && run.base, run.rank > 0 && run.mode !== "none" && "recompute"].filter(Boolean).join(" ");
    const tables = run.model.kinds.map(({ form, sizes }) => {
      const total = J.ledger.evaluator(data.document, { ...sizes, s: run.s, b: run.b, t: run.t, cp: run.cp, ep: run.ep, R: run.rank || 1 });
      const sum = (index) => Number(total(index)), highest = (list) => (list.length ? Math.max(...list.map(sum)) : 0);
      const found = (data.document.forms[form][key] ?? []).map((i) => data.document.tables[i]).find((each) => J.ledger.holds(each, total));
      return found?.regions.map((region, place) => {
        const kind = [EMBEDDING, LAYER, HEAD, LAYER][place];
        const [resident, forward, backward, adding, opening, phases] = region.modes[kind === LAYER ? run.mode : "none"];
        return {
          kind, output: sum(region.output), grad: Boolean(region.grad), resident: sum(resident), opening: sum(opening),
          forward: forward.map(highest), backward: backward.map(highest), adding: adding.map(highest),
          phases: phases ? [...phases.slice(0, 3).map(highest), sum(phases[3])] : null,
          weights: region.weights.map(([numel, ways, frozen, tied, wide, table, expert, own, packed]) => ({ numel: sum(numel), ways, frozen, tied, wide, table, expert, own: frozen && sum(own), packed })),
        };
      });
    });
    if (!tables.every(Boolean)) return null;
    const [[embedding, , head, first]] = tables;
    return { embedding, head, first: first ?? null, layers: tables.map((regions) => regions[1]) };
  }

  // formula/model_states.py, `state_bytes`: an optimizer's moments for n elements.
  const STATES = {
    "adamw": (n, moment) => 2 * moment * n,
    "adamw-bf16": (n) => 4 * n,
    "adam8bit": (n) => (n < 4096 ? 8 * n : 2 * (n + 4 * Math.ceil(n / 256))),
    "sgd-momentum": (n, moment) => moment * n,
    "sgd": () => 0,
  };

  // formula/model_states.py, `model_states`: what a rank has of some weights for all of training.
  function staticOf(weights, held, { zero, shards, expertShards, optimizer }) {
    const found = { parameters: 0, gradients: 0, state: 0, gathered: 0, reduced: 0 };
    for (const w of weights) {
      const ranks = w.expert ? expertShards : shards, wrapped = ranks > 1 || (w.expert && shards > 1);
      const owned = Math.ceil(w.numel / ranks), at = (stage) => (zero >= stage ? owned : w.numel), whole = w.numel * held.compute;
      if (w.frozen) {
        const shared = zero === 3 && ranks > 1;
        found.parameters += shared ? Math.ceil(w.own / ranks) : w.own;
        found.gathered += !shared ? 0 : w.packed ? w.own : whole;
        continue;
      }
      const own = w.wide ? { parameter: 4, gradient: 4, master: 0, moment: 4 } : held;
      found.parameters += at(3) * own.parameter;
      found.gradients += (zero >= 2 ? at(2) : w.numel * w.ways) * own.gradient;
      found.state += at(1) * own.master + STATES[optimizer](at(1), own.moment);
      if (zero === 3 && wrapped) found.gathered += whole;
      if (zero >= 2 && (ranks > 1 || (zero === 3 && wrapped))) found.reduced += w.numel * w.ways * held.gradient;
    }
    return found;
  }

  const trained = (region) => region.weights.filter((w) => !w.frozen);
  const tiedBytes = (region, each) => trained(region).reduce((n, w) => n + (w.tied ? w.numel : 0), 0) * each;

  // predict/stage_units.py, `_unit`: a region's passes without shards.
  function unitOf(region, held, tied, comesWhole) {
    const top = (pair) => Math.max(...pair), passes = { forward: top(region.forward), backward: top(region.backward) };
    const adding = comesWhole ? passes.backward : top(region.adding);
    const unit = { resident: region.resident, forward: passes.forward, backward: passes.backward, adding, gradient: region.static.gradients, pending: 0, passes };
    if (tied && region.kind === HEAD) {
      unit.pending = tiedBytes(region, held.gradient);
      unit.gradient += unit.pending;
    }
    if (tied && region.kind === EMBEDDING) { // the head's backward made the table's; the sum of both is a third tensor
      const own = trained(region), tables = own.filter((w) => w.table);
      const table = Math.max(0, ...(tables.length ? tables : own).map((w) => w.numel)) * held.gradient;
      const others = own.reduce((n, w) => n + w.numel, 0) * held.gradient - table;
      unit.gradient -= table;
      unit.backward = Math.max(adding, others + 2 * table);
      unit.adding = Math.max(adding, 2 * table);
    }
    return unit;
  }

  // predict/fsdp.py, `FsdpGroups`: which regions one group all-gathers, and what the outermost one has beside.
  function groupsOf(parts, held, run) {
    if (run.pp > 1 || !run.model.tied) return { parts, outer: 0, late: 0, lateShards: 0, last: 0, tied: 0, first: null };
    const head = parts.at(-1), first = parts[0], ends = {};
    for (const name of ["gathered", "reduced", "gradients"]) ends[name] = first.static[name] + head.static[name];
    const both = { ...first, static: { ...first.static, ...ends } }, tied = tiedBytes(head, held.compute);
    const end = { ...head, static: { ...head.static, gathered: 0, reduced: 0 } };
    return {
      parts: [both, ...parts.slice(1, -1), end], first: both, outer: ends.gathered, lateShards: head.static.gradients,
      late: (head.static.reduced / held.gradient) * held.compute + tied, last: lastGradient(head, run), tied: 2 * tied,
    };
  }

  const lastGradient = (part, run) => (part.kind === LAYER ? 0 : trained(part).filter((w) => run.pp > 1 || !w.tied).at(-1)?.numel ?? 0);

  // predict/fsdp.py, `_rise_of_experts`: the peak of a layer's backward whose experts are a group of their own.
  function riseOfExperts({ experts, phases }, held, { alone, there, ahead, waiting }) {
    const [until, within, after, live] = phases, change = experts.reduced + experts.gradients - (experts.reduced / held.gradient) * held.compute;
    const left = there - experts.gathered + ahead, done = live + left;
    return Math.max(until + there + waiting, within + there + ahead + waiting, done + experts.reduced, done + change + (alone ? experts.reduced : 0), after + left + change);
  }

  // predict/fsdp.py, `_Sharded`: a unit with what is all-gathered and reduced beside it.
  function sharded(unit, at, groups, held, run) {
    const part = groups.parts[at], before = groups.parts[at - 1], behind = groups.parts[at + 1], isHead = part.kind === HEAD;
    if (run.zero < 3) return { ...unit, backward: unit.backward + (behind ?? { static: none }).static.reduced, adding: unit.adding + (behind ?? { static: none }).static.reduced };
    const stays = groups.first && part === groups.first ? part.static.gathered : 0;
    const again = (of) => (of && of !== groups.first ? of.static.gathered : 0);
    const { gathered } = part.static, there = gathered - stays, own = part.experts, alone = run.dp * run.cp === run.ep;
    const ahead = again(before) && again(before) - before.experts.gathered, waiting = behind ? behind.static.reduced - behind.experts.reduced : 0;
    const [forward, loss] = isHead ? part.forward : [unit.passes.forward, 0];
    const [backward, differentiated] = isHead ? part.backward : [unit.passes.backward, 0];
    const freed = isHead ? groups.outer : 0, lingering = isHead && groups.outer && before ? before.static.gathered : 0;
    const entering = 2 * gathered + (before ? before.output + before.static.gathered : 0);
    const late = isHead ? 0 : groups.late, atEnd = groups.outer > 0 && part.kind === EMBEDDING;
    const rise = own.gathered ? riseOfExperts(part, held, { alone, there, ahead, waiting }) : waiting + Math.max(
      backward + there + ahead, part.grad ? part.opening + 2 * there + freed : 0, differentiated - freed, atEnd ? there + groups.tied : 0, 0,
    );
    const named = (groups.outer && part.kind !== LAYER ? groups.last : lastGradient(part, run)) * held.compute;
    const given = before && before.grad ? before.output : 0;
    const buffer = part.static.reduced - own.reduced, shards = part.static.gradients - own.gradients;
    const most = Math.max((buffer / held.gradient) * held.compute, named + shards);
    const closing = (part.static.reduced ? given + own.gradients + buffer + most : 0) + ahead - unit.resident - (run.pp === 1 ? stays : 0);
    const twice = gathered + (own.gathered ? Math.max(gathered - own.gathered, alone ? 0 : own.gathered) : gathered);
    const moved = [unit.forward - unit.passes.forward, unit.backward - unit.passes.backward];
    const peak = Math.max(rise + late + moved[1], atEnd ? closing : closing + late);
    return {
      ...unit, resident: unit.resident + (run.pp === 1 ? stays : 0),
      forward: Math.max(forward + twice + lingering, loss + stays - freed, entering) + moved[0],
      backward: peak - (isHead ? 0 : groups.lateShards), adding: peak + unit.adding - unit.backward,
    };
  }

  // The units of one stage, in order, and what its rank has for all of training.
  function stageOf(regions, run, held, index) {
    const shards = run.dp * run.cp, setting = { zero: run.zero, shards, expertShards: shards / run.ep, optimizer: run.optimizer }, { counts } = run;
    const begin = counts.slice(0, index).reduce((n, count) => n + count, 0), known = new Map();
    const own = Array.from({ length: counts[index] }, (_, i) => ({ number: begin + i, region: begin + i === 0 && regions.first ? regions.first : regions.layers[run.model.layers[begin + i]] }));
    const places = [...(index === 0 ? [{ region: regions.embedding }] : []), ...own, ...(index === run.pp - 1 ? [{ region: regions.head }] : [])];
    const made = (region) => {
      if (!known.has(region)) {
        const weights = region.weights.filter((w) => !w.tied || region.kind === EMBEDDING || run.pp > 1), apart = run.ep > 1 && run.zero === 3;
        known.set(region, { ...region, static: staticOf(weights, held, setting), experts: apart ? staticOf(weights.filter((w) => w.expert), held, setting) : none });
      }
      return known.get(region);
    };
    const parts = places.map(({ region }) => made(region)), shares = run.zero === 3 && shards > 1;
    const tied = run.model.tied && run.pp === 1 && !shares;
    let units = parts.map((part) => unitOf(part, held, tied, shares));
    if (run.zero >= 2 && shards > 1) {
      const groups = shares ? groupsOf(parts, held, run) : { parts };
      units = units.map((unit, at) => sharded(unit, at, groups, held, run));
    }
    const sum = (name) => parts.reduce((n, part) => n + part.static[name], 0), largest = (kind, of) => Math.max(0, ...parts.filter((part) => part.kind === kind).map(of));
    const layer = largest(LAYER, (part) => Math.max(...part.forward) - part.resident + part.static.gathered), logits = largest(HEAD, (part) => Math.floor(Math.max(...part.forward) / 5));
    const gathered = Math.max(...parts.map((part) => part.static.gathered)), reduced = run.many === 1 ? sum("gradients") : 0;
    const updated = sum("parameters") + sum("state") + sum("gradients") + largest(HEAD, (part) => Math.max(...part.forward, part.resident + Math.max(...part.backward)));
    return { cached: [layer, logits, ...(shares ? [gathered, reduced] : [0, 0]), updated], units, parameters: sum("parameters"), state: sum("state"), index, names: places.map(({ region, number }) => (number === undefined ? region.kind : `layer ${number}`)) };
  }

  // memory/step.py: the passes of 1F1B, and the first of the highest moments from the second step on.
  function peakOf(stage, run) {
    const { units } = stage, many = Math.min(run.many, run.pp + 2), always = stage.parameters + stage.state;
    const held = units.reduce((n, u) => n + u.resident, 0), gradients = units.reduce((n, u) => n + u.gradient, 0);
    const warm = Math.min(run.pp - stage.index - 1, many), passes = Array(warm).fill("forward");
    for (let n = warm; n < many; n += 1) passes.push("forward", "backward");
    passes.push(...Array(warm).fill("backward"));
    let alive = 0, learned = 0, begun = false, best = { nbytes: -1 };
    const look = (phase, at, kept, made, rise) => {
      const nbytes = always + kept + made + rise;
      if (nbytes > best.nbytes) best = { nbytes, phase, where: stage.names[at] ?? "", parts: [stage.parameters, made, stage.state, kept, rise] };
    };
    for (const phase of passes) {
      let kept = alive, made = learned;
      if (phase === "forward") {
        units.forEach((unit, at) => {
          look(phase, at, kept, made, unit.forward);
          kept += unit.resident;
        });
        alive += held;
        continue;
      }
      const fresh = !begun;
      for (let at = units.length - 1; at >= 0; at -= 1) {
        const unit = units[at];
        look(phase, at, kept, made, fresh ? unit.backward : unit.adding);
        kept += (fresh ? 0 : unit.pending) - unit.resident;
        made += fresh ? unit.gradient : 0;
      }
      alive -= held;
      [learned, begun] = [gradients, true];
    }
    look("optimizer", null, 0, gradients, 0);
    return { ...best, stage: stage.index };
  }

  // The worst stage's highest moment: {nbytes, stage, phase, where, parts: [parameters, gradients, optimizer, activations,
  // transients], cached: predict/stages.py, `cached_segments`, streams: `other_streams`,
  // updated: predict/optimizer_step.py, `segments_after_update`}; null where the page has no sums for a run.
  J.stepBytes = (data, run) => {
    const regions = regionsOf(data, run), held = data.precisions[run.precision];
    if (!regions) return null;
    const stages = Array.from({ length: run.pp }, (_, index) => stageOf(regions, run, held, index)), most = (at) => Math.max(...stages.map((stage) => stage.cached[at]));
    const worst = stages.map((stage) => peakOf(stage, run)).reduce((worst, each) => (each.nbytes > worst.nbytes ? each : worst));
    return { ...worst, cached: most(0) + most(1), streams: most(2) + most(3), updated: most(4) };
  };
})();

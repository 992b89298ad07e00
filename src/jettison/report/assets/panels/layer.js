"use strict";
// What the closed-form panels share: the choice of a layer, its figures from the formulas, and the command that prints them.
J.layers = (() => {
  const data = J.data("closed-form");
  const words = {
    "megatron": "Megatron's", "pytorch": "PyTorch's",
    none: "no recomputation", selective: "selective", "selective-op": "selective, by op",
    "selective-op-alternate": "selective, every second matmul", full: "full",
  };
  const first = Math.max(0, data.layers.findIndex((layer) => layer.asked || layer.argument === "gpt-175b"));
  const controls = {
    layer: () => J.select({ key: "layer", label: "Model", value: first, options: data.layers.map((l, i) => ({ value: i, label: l.label })) }),
    seq: () => J.slider({ key: "s", label: "Sequence s", values: data.sequences, value: 2048, format: (s) => `${J.format.count(s)} tokens` }),
    batch: () => J.slider({ key: "b", label: "Micro-batch b", values: data.micro_batches, value: 1 }),
    ranks: (least = 1, most = 64, value = 8) => J.slider({ key: "t", label: "Tensor-parallel ranks t", values: data.ranks.filter((t) => t >= least && t <= most), value }),
    attention: () => J.select({ key: "attention", label: "Attention", value: "eager", options: [{ value: "eager", label: "eager: scores are tensors" }, { value: "flash", label: "fused (FlashAttention)" }] }),
    dropout: () => J.toggle({ key: "dropout", label: "Dropout, where the model has it", value: true }),
    precision: () => J.select({ key: "precision", label: "Precision", value: "bf16", options: data.precisions }),
    kernels: () => J.select({ key: "kernels", label: "Kernels", value: "megatron", options: [{ value: "megatron", label: "Megatron's (fused)" }, { value: "pytorch", label: "PyTorch's" }] }),
  };

  // The most ranks up to `wanted` over which a model divides.
  const ranksFor = (layer, wanted) => Math.max(...layer.ranks.filter((t) => t <= wanted));

  const known = new Map(); // a drawing, its caption and its table ask for the same
  // {layer, s, b, t, layout: "tp" | "sp" | "sp-gathered", kernels, attention, precision, dropout} -> figures of one layer.
  const at = ({ layer, s, b, t = 1, layout = "tp", kernels = "megatron", attention = "eager", precision = "bf16", dropout = true }) => {
    const key = [kernels, attention, precision, dropout && layer.drops ? "dropout" : "plain", t > 1 ? layout : "one"].join(" ");
    const name = `${layer.form} ${key} ${s} ${b} ${t} ${Object.values(layer.sizes)}`;
    if (!known.has(name)) {
      if (known.size > 2000) known.clear();
      known.set(name, J.ledger.layer(data.document, layer.form, key, { ...layer.sizes, s, b, t }));
    }
    return known.get(name);
  };

  // The command whose "bytes each" is the figure.
  const command = ({ layer, s, b, t = 1, layout = "tp", kernels = "megatron", attention = "eager", precision = "bf16", dropout = true, recompute = "none" }) => {
    const words = ["jettison ledger", layer.argument, "--kernels", kernels, "--attention", attention, "--seq", s, "--micro-batch", b];
    if (layer.positions !== null && s > layer.positions) words.push("--max-position-embeddings", s);
    if (t > 1) words.push("--tp", t, layout === "tp" ? "--no-sp" : "--sp");
    if (t > 1 && layout === "sp-gathered") words.push("--gathered-inputs");
    if (precision !== "bf16") words.push("--precision", precision);
    words.push("--dropout", dropout && layer.drops ? layer.dropout || 0.1 : 0, "--recompute", recompute);
    return words.join(" ");
  };

  const chosen = (values) => ({
    layer: data.layers[values.layer ?? first], s: values.s, b: values.b, t: values.t, attention: values.attention,
    kernels: values.kernels ?? "megatron", precision: values.precision ?? "bf16", dropout: values.dropout ?? true,
  });
  // The same with as many ranks as the model divides over.
  const divided = (values) => {
    const run = chosen(values);
    return { ...run, t: ranksFor(run.layer, values.t) };
  };
  const note = (values) => {
    const layer = data.layers[values.layer ?? first], t = ranksFor(layer, values.t);
    return t === values.t ? "" : ` ${layer.label} does not divide over ${values.t} ranks: this is t = ${t}.`;
  };

  // BigInt bytes as tables have them: the exact number where a Number holds it, and else its digits.
  const exact = (big) => (big <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(big) : big.toString());
  const total = (entries, pick = () => true) => entries.reduce((sum, e) => (pick(e) ? sum + e.bytes : sum), 0n);
  const share = (part, whole) => (whole === 0n ? 0 : Number(part) / Number(whole));
  // Powers of 32 between two numbers of bytes, for a logarithmic axis.
  const logTicks = (low, high) => {
    const ticks = [];
    for (let tick = 1; tick <= high; tick *= 32) if (tick >= low) ticks.push(tick);
    return ticks;
  };
  return { data, words, controls, at, command, chosen, divided, note, ranksFor, exact, total, share, logTicks };
})();

// Reads the closed form that Python wrote (report/explorer_closed_form.py): sums of products, exact to the byte.
// Nothing here knows a formula. All arithmetic is on BigInt: FLOPs of a long sequence leave what a Number holds exactly.
"use strict";
(function () {
  const J = (globalThis.J = globalThis.J || {});

  // Division rounded down, as Python's; BigInt's own goes towards zero.
  function floor(above, below) {
    const quotient = above / below;
    return above % below !== 0n && (above < 0n) !== (below < 0n) ? quotient - 1n : quotient;
  }

  // Values of a document's sums at some sizes; what sums share is worked out once.
  function evaluator(form, sizes) {
    const sums = new Map();
    const factors = new Map();

    function factor(index) {
      if (!factors.has(index)) {
        const made = form.factors[index];
        let value;
        if (typeof made === "string") {
          if (!(made in sizes)) throw new Error(`no value for the size ${made}`);
          if (!Number.isSafeInteger(sizes[made]) || sizes[made] < 1) {
            throw new Error(`${made} is ${sizes[made]}; expected a whole number of 1 or more`);
          }
          value = BigInt(sizes[made]);
        } else {
          const [word, above, below] = made;
          if (word === "positive") value = sum(above) > 0n ? sum(above) : 0n;
          else value = word === "ceil" ? -floor(-sum(above), sum(below)) : floor(sum(above), sum(below));
        }
        factors.set(index, value);
      }
      return factors.get(index);
    }

    function sum(index) {
      if (!sums.has(index)) {
        let total = 0n;
        for (const [count, ...of] of form.sums[index]) {
          total += of.reduce((product, each) => product * factor(each), BigInt(count));
        }
        sums.set(index, total);
      }
      return sums.get(index);
    }

    return sum;
  }

  function holds(table, sum) {
    return table.guards.every(([difference, zero, held]) => {
      const value = sum(difference);
      return (zero ? value === 0n : value > 0n) === Boolean(held);
    });
  }

  // One layer at these sizes: `of` is a form's number, `key` its choices ("megatron eager bf16 dropout sp").
  function layer(form, of, key, sizes) {
    const sum = evaluator(form, sizes);
    const found = (form.forms[of][key] || []).map((i) => form.tables[i]).find((table) => holds(table, sum));
    if (!found) throw new Error(`no table of "${key}" holds for these sizes`);
    const word = (index) => form.words[index];
    const mode = (name) => {
      const index = form.modes.indexOf(name);
      if (index < 0) throw new Error(`no recompute mode "${name}"`);
      return index;
    };
    let entries = null;
    return {
      parts: found.parts.map(word),
      get entries() {
        return (entries ??= found.entries.map((i) => {
          const [role, path, op, split, part, bytes, modes, reference] = form.entries[i];
          return {
            role: word(role), path: word(path), op: word(op), split: word(split), part, reference: word(reference),
            bytes: sum(bytes), stays: (name) => Boolean((modes >> mode(name)) & 1),
            get formula() { return text(form, bytes); },
          };
        }));
      },
      get transfers() {
        return found.transfers.map(([kind, part, backward, bytes, wire]) => (
          { kind: word(kind), part, backward: Boolean(backward), bytes: sum(bytes), wire: sum(wire) }
        ));
      },
      held: (name) => sum(found.held[mode(name)]),
      formula: (name) => text(form, found.held[mode(name)]),
      again: (name) => sum(found.again[mode(name)]),
      rerun: (name) => sum(found.rerun[mode(name)]),
      get forward() { return sum(found.forward); },
      get attention() { return sum(found.attention); },
      get parameters() { return sum(found.parameters); },
    };
  }

  // A sum as people write it: 2bsh + 5abs², ⌈s/t⌉ rounded up.
  function text(form, index) {
    const terms = form.sums[index].map(([count, ...of]) => {
      const times = new Map();
      for (const each of of) times.set(each, (times.get(each) || 0) + 1);
      const factors = [...times].map(([each, power]) => {
        const made = form.factors[each];
        const name = typeof made === "string" ? made : quotient(form, made);
        return power === 1 ? name : name + (power === 2 ? "²" : power === 3 ? "³" : `^${power}`);
      });
      const product = factors.join(factors.some((name) => name.length > 2) ? "·" : "");
      if (!product) return String(count);
      if (count === 1) return product;
      return count === -1 ? `−${product}` : String(count).replace("-", "−") + product;
    });
    return terms.join(" + ").replaceAll("+ −", "− ") || "0";
  }

  function quotient(form, [word, above, below]) {
    const inner = (index) => {
      const written = text(form, index);
      return form.sums[index].length > 1 ? `(${written})` : written;
    };
    if (word === "positive") return `max(0, ${text(form, above)})`;
    return word === "ceil" ? `⌈${inner(above)}/${inner(below)}⌉` : `⌊${inner(above)}/${inner(below)}⌋`;
  }

  J.ledger = { evaluator, holds, layer, text };
})();

"use strict";
// Labelled controls, each bound to one key of the state. A control is {key, node, value()}; value() is always one that
// the control could have set, whatever the URL says.
(() => {
  let count = 0;
  const bound = (key, node, value, show) => {
    J.state.on((keys) => keys.has(key) && show());
    show();
    return { key, node, value };
  };
  const field = (kind, id, label, ...rest) => // a long one has a row of its own on a phone
    J.el("div", { class: `control ${kind}${label.length > 14 ? " long" : ""}` }, J.el("label", { for: id }, label), ...rest);

  // Over min, max, step, or over a list of values (any numbers in ascending order).
  J.slider = ({ key, label, min, max, step = 1, values, value, format = String }) => {
    const id = `control-${(count += 1)}`;
    const within = (x) => Math.min(values[values.length - 1], Math.max(values[0], x));
    const nearest = (x) => values.reduce((best, v, i) => (Math.abs(v - within(x)) < Math.abs(values[best] - within(x)) ? i : best), 0);
    const clamp = (x) => Math.min(max, Math.max(min, min + Math.round((x - min) / step) * step));
    const current = () => {
      const wanted = J.state.get(key, value);
      return values ? values[nearest(wanted)] : Number(clamp(wanted).toPrecision(12));
    };
    const input = J.el("input", {
      type: "range", id, min: values ? 0 : min, max: values ? values.length - 1 : max, step: values ? 1 : step,
      oninput: () => J.state.set(key, values ? values[Number(input.value)] : Number(input.value)),
    });
    const output = J.el("output", { for: id });
    const long = label.length > 8 || format(values ? values[values.length - 1] : max).length > 5 ? "slider long" : "slider";
    return bound(key, field(long, id, label, input, output), current, () => {
      const now = current(), text = format(now);
      input.value = values ? nearest(now) : now;
      input.setAttribute("aria-valuetext", text);
      output.textContent = text;
    });
  };

  // Options are values, or {value, label}.
  J.select = ({ key, label, options, value }) => {
    const id = `control-${(count += 1)}`;
    const entries = options.map((o) => (typeof o === "object" ? o : { value: o, label: String(o) }));
    const current = () => {
      const text = String(J.state.get(key, String(value)));
      return (entries.find((o) => String(o.value) === text) ?? entries.find((o) => o.value === value) ?? entries[0]).value;
    };
    const input = J.el(
      "select", { id, onchange: () => J.state.set(key, entries[input.selectedIndex].value) },
      entries.map((o) => J.el("option", { value: String(o.value) }, o.label ?? String(o.value))),
    );
    return bound(key, field(label.length + Math.max(...entries.map((o) => (o.label ?? String(o.value)).length)) > 16 ? "select long" : "select", id, label, input), current, () => {
      input.selectedIndex = entries.findIndex((o) => o.value === current());
    });
  };

  J.toggle = ({ key, label, value = false }) => {
    const id = `control-${(count += 1)}`;
    const current = () => J.state.get(key, Boolean(value));
    const input = J.el("input", { type: "checkbox", id, onchange: () => J.state.set(key, input.checked) });
    const node = J.el("div", { class: `control toggle${label.length > 14 ? " long" : ""}` }, input, J.el("label", { for: id }, label));
    return bound(key, node, current, () => (input.checked = current()));
  };
})();

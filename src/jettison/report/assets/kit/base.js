"use strict";
// The one namespace of all pages: elements, data, and quantities as text.
globalThis.J = {};

// An element with attributes and children; text stays text, whatever is in it. Listeners are "on" + event.
J.el = (tag, attributes = {}, ...children) => {
  const [name, space] = tag.startsWith("svg:") ? [tag.slice(4), "http://www.w3.org/2000/svg"] : [tag, null];
  const node = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
};

// A text's words as nodes, those with hyphens whole: a line would end behind the hyphens of a flag.
J.words = (text) => text.split(" ").flatMap((word, i) => [i ? " " : "", word.includes("-") ? J.el("span", { class: "whole" }, word) : word]);

J.inflated = (text) => {
  const binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return new TextDecoder().decode(pako.inflate(bytes));
};
for (const packed of document.querySelectorAll('script[type="application/javascript+deflate"]')) { // d3 and Plot
  const script = J.el("script");
  script.textContent = J.inflated(packed.textContent);
  packed.replaceWith(script);
}

J.data = (() => {
  const read = new Map();
  return (name) => {
    if (!read.has(name)) {
      const node = document.getElementById(`data-${name}`);
      if (!node) throw new Error(`this page has no data called ${name}`);
      read.set(name, JSON.parse(node.type.endsWith("+deflate") ? J.inflated(node.textContent) : node.textContent));
    }
    return read.get(name);
  };
})();

// The same texts as jettison/core/units.py has, to the letter.
J.format = (() => {
  const scaled = (value, base, units, decimals = 2) => {
    let index = 0;
    while (index < units.length - 1 && Number(Math.abs(value).toFixed(decimals)) >= base) {
      value /= base;
      index += 1;
    }
    return `${value.toFixed(decimals)} ${units[index]}`;
  };
  const grouped = (n) => String(Math.round(n)).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
  const binary = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const words = ["million", "billion", "trillion", "quadrillion"];
  const flop = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP", "YFLOP"];
  const missing = (value) => value === null || value === undefined || Number.isNaN(value);
  const known = (format) => (value, ...rest) => (missing(value) ? "n/a" : format(value, ...rest));
  const bytes = known((n) => (Math.abs(n) < 1024 ? `${n} B` : scaled(n, 1024, binary)));
  return {
    bytes,
    exact: known((n) => `${bytes(n)} (${n}B)`),
    seconds: known((s) => {
      const size = Math.abs(s);
      if (size < 1e-3) return `${(s * 1e6).toFixed(1)} µs`;
      if (size < 1) return `${(s * 1e3).toFixed(1)} ms`;
      if (size < 60) return `${s.toFixed(2)} s`;
      const sign = s < 0 ? "-" : "", whole = Math.round(size), minutes = Math.floor(whole / 60);
      const two = (n) => String(n).padStart(2, "0");
      return minutes < 60 ? `${sign}${minutes} min ${two(whole % 60)} s` : `${sign}${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
    }),
    percent: known((fraction, decimals = 1) => `${(fraction * 100).toFixed(decimals)} %`),
    ratio: known((ratio) => `${ratio.toFixed(2)}×`),
    count: known((n) => (Math.abs(n) < 1e6 ? grouped(n) : scaled(n / 1e6, 1000, words))),
    flops: known((n) => (Math.abs(n) < 1000 ? `${n.toFixed(0)} FLOP` : scaled(n, 1000, flop))),
    grouped: known(grouped),
    // of an axis, whose ticks are round numbers: no more digits than they need
    tick: known((n) => {
      let value = n, index = 0;
      while (index < binary.length - 1 && Math.abs(value) >= 1024) [value, index] = [value / 1024, index + 1];
      return `${Number(value.toPrecision(3))} ${binary[index]}`;
    }),
  };
})();

// Round ticks for an axis of bytes from 0 to a maximum: steps of 1, 2, 5, 10, 20, 50, 100, 200 or 500 of a binary unit.
J.byteTicks = (most, count = 5) => {
  if (!(most > 0)) return [0];
  const unit = 1024 ** Math.floor(Math.log(Math.max(most, 1)) / Math.log(1024) + 1e-9);
  const step = [1 / 20, 1 / 10, 1 / 5, 1 / 2, 1, 2, 5, 10, 20, 50, 100, 200, 500].find((s) => most / (s * unit) <= count) ?? 1024;
  return Array.from({ length: Math.floor(most / (step * unit)) + 1 }, (_, i) => i * step * unit);
};

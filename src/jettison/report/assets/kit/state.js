"use strict";
// What is chosen on a page lies in the URL's hash, so that a view is a link. Whatever comes from there is text that
// anybody may have written: controls take a value only if it is one that they could have set.
J.state = (() => {
  const listeners = new Set();
  let values = new URLSearchParams(location.hash.slice(1)), waiting = 0, changed = new Set(), told = false;

  const tell = (key) => {
    changed.add(key);
    if (told) return;
    told = true;
    queueMicrotask(() => {
      const keys = changed;
      [changed, told] = [new Set(), false];
      for (const listener of [...listeners]) listener(keys);
    });
  };
  // browsers count changes of the URL, and stop a page that makes hundreds in a row
  const remember = () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => history.replaceState(null, "", `#${values}`), 200);
  };
  addEventListener("hashchange", () => {
    const before = values;
    values = new URLSearchParams(location.hash.slice(1));
    for (const key of new Set([...before.keys(), ...values.keys()])) if (before.get(key) !== values.get(key)) tell(key);
  });
  return {
    // as the type that the fallback has
    get(key, fallback) {
      const text = values.get(key);
      if (text === null) return fallback;
      if (typeof fallback === "boolean") return text === "1";
      if (typeof fallback !== "number") return text;
      const number = Number(text);
      return text.trim() !== "" && Number.isFinite(number) ? number : fallback;
    },
    set(key, value) {
      const text = typeof value === "boolean" ? (value ? "1" : "0") : String(value);
      if (values.get(key) === text) return;
      values.set(key, text);
      remember();
      tell(key);
    },
    // fn(keys that changed); returns what ends it
    on(fn) {
      listeners.add(fn);
      return () => listeners.delete(fn);
    },
    link: () => `${location.href.split("#")[0]}#${values}`,
  };
})();

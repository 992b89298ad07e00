"use strict";
// For those who want the figures without the page (report/page.py): with #save=figures each one, as SVG and PNG, is
// left in the page's own text. Runs after the panels.
(() => {
  if (J.state.get("save", "") !== "figures") return;
  const encode = (text) => {
    const bytes = new TextEncoder().encode(text), parts = [];
    for (let i = 0; i < bytes.length; i += 8192) parts.push(String.fromCharCode(...bytes.subarray(i, i + 8192)));
    return btoa(parts.join(""));
  };
  (async () => {
    const found = [];
    for (const [id, figure] of J.figures) {
      const svg = figure.svg();
      if (svg !== null) found.push({ id, svg, png: await J.save.png(svg) });
    }
    document.body.append(J.el("pre", { id: "saved-figures" }, encode(JSON.stringify(found))));
  })();
})();

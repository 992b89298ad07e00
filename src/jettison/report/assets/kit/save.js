"use strict";
// A drawing as one SVG file that needs no page around it, and as a PNG.
J.save = (() => {
  const COPIED = [
    "fill", "fill-opacity", "stroke", "stroke-opacity", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin",
    "opacity", "font-family", "font-size", "font-weight", "font-style", "text-anchor", "dominant-baseline", "paint-order",
    "font-variant-numeric", "visibility", "display",
  ];
  const SVG = "http://www.w3.org/2000/svg";

  // variables of the page become colours; what only the page can do goes
  const plain = (svg) => {
    const copy = svg.cloneNode(true), from = [svg, ...svg.querySelectorAll("*")], to = [copy, ...copy.querySelectorAll("*")];
    from.forEach((node, i) => {
      for (const name of ["tabindex", "role", "aria-label", "class", "style"]) to[i].removeAttribute(name);
      if (node.closest("defs") && !node.closest("pattern")) return;
      const style = getComputedStyle(node), parent = i > 0 && node.parentElement ? getComputedStyle(node.parentElement) : null;
      for (const name of COPIED) {
        const value = style.getPropertyValue(name);
        const said = node.hasAttribute(name) || !parent || parent.getPropertyValue(name) !== value;
        if (value && said) to[i].setAttribute(name, value);
      }
    });
    for (const style of copy.querySelectorAll("style")) style.remove();
    return copy;
  };

  const words = (root, origin, target) => {
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      if (!node.textContent.trim() || node.parentElement.closest("svg, .unseen")) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      const box = range.getBoundingClientRect(), style = getComputedStyle(node.parentElement);
      if (!box.width) continue;
      target.append(J.el("svg:text", {
        x: box.x - origin.x, y: box.y - origin.y + box.height / 2, dy: "0.35em", fill: style.color,
        "font-family": style.fontFamily, "font-size": style.fontSize, "font-weight": style.fontWeight,
      }, node.textContent.trim()));
    }
  };

  const svg = (drawing, title, caption) => {
    const origin = drawing.getBoundingClientRect();
    const tops = [drawing, ...drawing.querySelectorAll("svg")].filter((n) => n.localName === "svg" && !n.parentElement.closest("svg"));
    const size = { width: Math.ceil(origin.width), height: Math.ceil(origin.height) };
    const whole = J.el("svg:svg", { xmlns: SVG, ...size, viewBox: `0 0 ${size.width} ${size.height}` });
    whole.append(J.el("svg:title", {}, title), J.el("svg:desc", {}, caption));
    const paper = getComputedStyle(document.documentElement).getPropertyValue("--paper").trim();
    whole.append(J.el("svg:rect", { ...size, fill: paper || "white" }));
    for (const top of tops) {
      const box = top.getBoundingClientRect(), copy = plain(top);
      copy.setAttribute("x", box.x - origin.x);
      copy.setAttribute("y", box.y - origin.y);
      copy.setAttribute("overflow", "visible");
      whole.append(copy);
    }
    words(drawing, origin, whole);
    return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(whole)}\n`;
  };

  // as base64, at once: what a canvas writes by and by may come after a headless browser has left
  const png = async (text, scale = 2) => {
    const image = new Image();
    const loaded = new Promise((resolve, reject) => {
      image.onload = resolve;
      image.onerror = () => reject(new Error("the browser could not draw the figure"));
    });
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await loaded;
    const canvas = J.el("canvas", { width: image.width * scale, height: image.height * scale });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    return canvas.toDataURL("image/png").split(",")[1];
  };
  const pngBlob = async (text) => new Blob([Uint8Array.from(atob(await png(text)), (c) => c.charCodeAt(0))], { type: "image/png" });

  const download = (name, blob) => {
    const link = J.el("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  };

  const csv = ({ columns, rows }) => {
    const cell = (value) => {
      // a spreadsheet runs text that begins like a formula
      const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value ?? "");
      return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const names = columns.map((c) => (typeof c === "string" ? c : c.label));
    return [names, ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
  };
  return { svg, png, pngBlob, csv, download };
})();

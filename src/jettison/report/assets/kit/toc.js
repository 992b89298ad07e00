"use strict";
// The table of contents of a page: a link to each figure. Runs after the panels.
(() => {
  const links = [...document.querySelectorAll("main > section[id]")].map((section) => {
    const go = (event) => { // the address keeps what is chosen
      event.preventDefault();
      section.scrollIntoView();
      section.querySelector("h2").focus({ preventScroll: true });
    };
    section.querySelector("h2").setAttribute("tabindex", "-1");
    return J.el("li", {}, J.el("a", { href: `#${section.id}`, onclick: go }, section.querySelector("h2").textContent));
  });
  document.querySelector("header").append(J.el("nav", { class: "toc", "aria-label": "Figures" }, J.el("ol", {}, links)));
})();

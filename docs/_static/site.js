"use strict";
// Names, levels and keyboard stops that the theme's markup lacks.
for (const one of document.querySelectorAll('.caption[role="heading"]')) one.setAttribute("aria-level", "2");
for (const [where, name] of [[".sidebar-drawer", "Pages"], [".toc-drawer", "On this page"]]) {
  document.querySelector(where)?.setAttribute("aria-label", name);
}
for (const one of document.querySelectorAll(".content-icon-container")) {
  one.setAttribute("role", "region");
  one.setAttribute("aria-label", "This page");
}
for (const one of document.querySelectorAll("article pre, article .table-wrapper")) one.tabIndex = 0;

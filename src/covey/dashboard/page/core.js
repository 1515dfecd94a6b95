"use strict";
// Helpers for all pages: elements, number formats, colours, the tooltip.
window.covey = { views: {} };
(function (covey) {
  // Creates an element. Text is set as textContent, so the output of a model never becomes markup.
  covey.h = function (tag, attrs, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attrs || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (key === "text") node.textContent = value;
      else node.setAttribute(key, value === true ? "" : value);
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
    return node;
  };

  covey.number = function (value, digits = 3) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6) return value.toExponential(2);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    if (size < 1e-3) return value.toExponential(1);
    return String(Number(value.toPrecision(digits + (size >= 100 ? 1 : 0))));
  };

  covey.duration = function (seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 9.95) return seconds.toFixed(1) + "s";
    const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
    if (whole < 60) return whole + "s";
    if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 1440) return `${Math.floor(minutes / 60)}h${two(minutes % 60)}m`;
    const hours = Math.round(seconds / 3600);
    return `${Math.floor(hours / 24)}d${two(hours % 24)}h`;
  };

  covey.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const COLOURS = 8;
  covey.series = (index) => covey.colour("c" + (index % COLOURS));
  covey.isDashed = (index) => index >= COLOURS; // more runs than colours

  // The colour of a picked run in all lists and charts.
  const slots = new Map();
  covey.slot = (id) => slots.get(id);
  covey.assignSlots = function (ids) {
    for (const id of [...slots.keys()]) if (!ids.includes(id)) slots.delete(id);
    for (const id of ids) {
      let free = 0;
      while ([...slots.values()].includes(free)) free += 1;
      if (!slots.has(id)) slots.set(id, free);
    }
  };
  covey.mark = (id) => (slots.has(id)
    ? covey.h("i", { class: `mark c${slots.get(id) % COLOURS}${covey.isDashed(slots.get(id)) ? " dashed" : ""}`, "data-slot": slots.get(id) })
    : covey.h("i", { class: "mark none" }));

  const tip = () => document.getElementById("tip");
  covey.tip = function (text, x, y) {
    const box = tip();
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = Math.max(4, Math.min(x + 14, innerWidth - width - 6)) + "px";
    box.style.top = (y + 18 + height > innerHeight ? y - height - 10 : y + 18) + "px";
  };
  covey.untip = () => { tip().hidden = true; };

  covey.save = function (name, blob) {
    const link = covey.h("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  covey.last = (values) => { for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i]; return null; };

  // Debounces a function, for typed input.
  covey.later = function (work, wait = 160) {
    let timer = null;
    return (...args) => { clearTimeout(timer); timer = setTimeout(() => work(...args), wait); };
  };
})(window.covey);

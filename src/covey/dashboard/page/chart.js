"use strict";
// Charts on a canvas: lines with a band, stacked bars, dots. Each is a card with its legend, PNG and CSV.
(function (covey) {
  const { h, number } = covey;
  const PAD = { left: 64, right: 10, top: 8, bottom: 36 }, HEIGHT = 206;

  function ticks(low, high, count, least = 0) {
    const rough = Math.max(least, (high - low) / count) || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) || power;
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)));
    return found;
  }

  function logTicks(low, high) {
    const found = [];
    for (let p = Math.floor(low); p <= Math.ceil(high); p++) if (p >= low - 1e-9 && p <= high + 1e-9) found.push(p);
    return found.length > 1 ? found : ticks(low, high, 4);
  }

  // Exponential moving average with bias correction.
  covey.smooth = function (values, weight) {
    if (!weight) return values;
    let mean = 0, part = 1;
    return values.map((value) => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      part *= weight;
      return mean / (1 - part);
    });
  };

  class Chart {
    // options: title, about, ylabel, kind: lines | stack | dots, onpick(dot)
    constructor(options) {
      this.options = options;
      this.data = { series: [] };
      this.at = null;
      this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": options.title });
      this.legend = h("div", { class: "legend" });
      const act = (text, label, work) => h("button", { class: "act", "aria-label": `${label}: ${options.title}`, title: label, text, onclick: work });
      this.title = h("h2", { text: options.title });
      this.node = h("div", { class: "card" },
        h("div", {}, this.title, h("span", { class: "quiet", text: options.about || "" }), h("span", { class: "grow" }),
          act("PNG", "Save as picture", () => this.png()), act("CSV", "Save the numbers", () => this.csv())),
        this.canvas, this.legend, options.below || null);
      this.canvas.addEventListener("pointermove", (event) => this.hover(event));
      this.canvas.addEventListener("pointerleave", () => { this.at = null; covey.untip(); this.draw(); });
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      this.canvas.addEventListener("blur", () => { this.at = null; covey.untip(); this.draw(); });
      this.canvas.addEventListener("click", () => { if (this.near !== undefined && options.onpick) options.onpick(this.near); });
      new ResizeObserver(() => this.draw()).observe(this.canvas);
    }

    rename(title) { this.options.title = this.options.ylabel = title; this.title.textContent = title; }

    labels() { return { x: this.data.xlabel || "step", y: (this.data.ylabel || this.options.ylabel || "") + (this.data.log ? " (log scale)" : "") }; }

    // data: {series: [{label, x, y, raw?, exact?, lo?, hi?, band?, colour, dashed?, id?}], log, xlabel, ylabel, xformat}
    set(data) {
      this.data = data;
      const shown = data.series.map((one) => `${one.label} ${number(covey.last(one.y))}`).join(", ");
      const { x, y } = this.labels();
      this.canvas.setAttribute("aria-label", `${this.options.title}. ${y} over ${x}. ${shown || "no values"}`);
      this.legend.replaceChildren(...data.series.map((one) => {
        const mark = h("i", { class: one.dashed ? "dashed" : null });
        mark.style.backgroundColor = one.colour;
        return h("span", {}, mark, one.legend || one.label);
      }));
      this.draw();
    }

    bounds() {
      const { series, log } = this.data, stack = this.options.kind === "stack";
      let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
      const value = (v) => (log ? (v > 0 ? Math.log10(v) : null) : v);
      const totals = [];
      for (const one of series) {
        one.x.forEach((x, i) => {
          if (one.y[i] === null) return;
          x0 = Math.min(x0, x); x1 = Math.max(x1, x);
          if (stack) { totals[i] = (totals[i] || 0) + one.y[i]; return; }
          for (const column of [one.y, one.lo, one.hi, one.raw]) {
            const v = column && column[i] !== null && column[i] !== undefined ? value(column[i]) : null;
            if (v !== null) { y0 = Math.min(y0, v); y1 = Math.max(y1, v); }
          }
        });
      }
      if (stack) { y0 = 0; for (const total of totals) if (total > y1) y1 = total; }
      if (!Number.isFinite(x0) || !Number.isFinite(y1)) return null;
      if (stack && series.length) { const step = series[0].x.length > 1 ? series[0].x[1] - series[0].x[0] : 1; x1 += step; }
      if (!log && !stack && y0 >= 0 && y0 < 0.5 * y1) y0 = 0;
      if (y1 === y0) { const half = Math.abs(y1) * 0.05 || 0.5; y0 -= log ? 0.5 : half; y1 += log ? 0.5 : half; }
      if (x1 === x0) { x0 -= 0.5; x1 += 0.5; }
      if (this.options.kind === "dots") { const wide = (x1 - x0) * 0.04; x0 -= wide; x1 += wide; y0 -= (y1 - y0) * 0.06; }
      const room = stack || y0 === 0 ? 0 : (y1 - y0) * 0.05;
      return { x0, x1, y0: y0 - room, y1: y1 + (y1 - y0) * 0.05, value };
    }

    draw() {
      const width = this.canvas.clientWidth, scale = devicePixelRatio || 1;
      if (!width) return;
      if (this.canvas.width !== Math.round(width * scale)) { this.canvas.width = Math.round(width * scale); this.canvas.height = HEIGHT * scale; }
      const g = this.canvas.getContext("2d");
      g.setTransform(scale, 0, 0, scale, 0, 0);
      this.paint(g, width, HEIGHT);
    }

    paint(g, width, height) {
      g.clearRect(0, 0, width, height);
      g.font = "11px system-ui, sans-serif";
      const box = this.bounds();
      this.box = null;
      if (!box) { g.fillStyle = covey.colour("faint"); g.fillText("nothing recorded yet", PAD.left, height / 2); return; }
      const w = width - PAD.left - PAD.right, t = height - PAD.top - PAD.bottom;
      const X = (x) => PAD.left + ((x - box.x0) / (box.x1 - box.x0)) * w, Y = (y) => PAD.top + t - ((y - box.y0) / (box.y1 - box.y0)) * t;
      this.box = { ...box, X, Y, w };
      this.axes(g, box, X, Y, width, height);
      g.save();
      g.beginPath(); g.rect(PAD.left - 3, PAD.top - 3, w + 6, t + 6); g.clip();
      if (this.data.mark) { // the steps of a finding
        g.fillStyle = covey.colour("warn"); g.globalAlpha = 0.12;
        g.fillRect(X(this.data.mark[0]), PAD.top, Math.max(3, X(this.data.mark[1]) - X(this.data.mark[0])), t);
        g.globalAlpha = 1;
      }
      ({ stack: () => this.bars(g), dots: () => this.dots(g) }[this.options.kind] || (() => this.lines(g)))();
      g.restore();
      if (this.at !== null && this.options.kind !== "dots") this.cross(g, X, height);
    }

    axes(g, box, X, Y, width, height) {
      const { log } = this.data, form = this.data.xformat || number;
      g.strokeStyle = covey.colour("line"); g.fillStyle = covey.colour("faint"); g.lineWidth = 1;
      g.textAlign = "right"; g.textBaseline = "middle";
      for (const tick of log ? logTicks(box.y0, box.y1) : ticks(box.y0, box.y1, 4)) {
        const y = Math.round(Y(tick)) + 0.5;
        if (y < PAD.top - 1 || y > height - PAD.bottom + 1) continue;
        g.beginPath(); g.moveTo(PAD.left, y); g.lineTo(width - PAD.right, y); g.stroke();
        g.fillText(number(log ? 10 ** tick : tick), PAD.left - 6, y);
      }
      g.textBaseline = "top";
      const all = ticks(box.x0, box.x1, Math.max(2, Math.floor((width - 60) / 64)), this.data.whole ? 1 : 0);
      for (const tick of all) {
        g.textAlign = X(tick) > width - 40 ? "right" : "center";
        g.fillText(form(tick), Math.min(X(tick), width - PAD.right), height - PAD.bottom + 6);
      }
      this.nameAxes(g, width, height);
    }

    nameAxes(g, width, height) {
      const { x, y } = this.labels();
      g.fillStyle = covey.colour("soft"); g.textAlign = "center"; g.textBaseline = "bottom";
      g.fillText(x, (PAD.left + width - PAD.right) / 2, height - 1);
      g.save();
      g.translate(1, (PAD.top + height - PAD.bottom) / 2); g.rotate(-Math.PI / 2); g.textBaseline = "top";
      g.fillText(y, 0, 0, height - PAD.bottom);
      g.restore();
    }

    lines(g) {
      const { X, Y, value } = this.box;
      for (const one of this.data.series) {
        g.strokeStyle = one.colour; g.fillStyle = one.colour;
        if (one.lo) { g.globalAlpha = 0.16; this.area(g, one); }
        if (one.raw) { g.globalAlpha = 0.28; g.lineWidth = 1; this.line(g, one.x, one.raw); }
        g.globalAlpha = 1; g.lineWidth = 1.8; g.setLineDash(one.dashed ? [6, 4] : []); this.line(g, one.x, one.y);
        g.setLineDash([]);
        if (one.x.length <= 40) one.x.forEach((x, i) => {
          const y = one.y[i] === null ? null : value(one.y[i]);
          if (y !== null) { g.beginPath(); g.arc(X(x), Y(y), 2.4, 0, 7); g.fill(); }
        });
      }
    }

    line(g, xs, ys) {
      const { X, Y, value } = this.box;
      g.beginPath();
      let pen = false;
      for (let i = 0; i < xs.length; i++) {
        const y = ys[i] === null ? null : value(ys[i]);
        if (y === null) continue; // gaps of a metric that is not written in every step are bridged
        if (pen) g.lineTo(X(xs[i]), Y(y)); else g.moveTo(X(xs[i]), Y(y));
        pen = true;
      }
      g.stroke();
    }

    area(g, one) {
      const { X, Y, value, y0 } = this.box, there = one.x.map((_, i) => i).filter((i) => one.lo[i] !== null && one.hi[i] !== null);
      const height = (v) => { const found = value(v); return Y(found === null ? y0 : found); };
      g.beginPath();
      there.forEach((i) => g.lineTo(X(one.x[i]), height(one.hi[i])));
      there.reverse().forEach((i) => g.lineTo(X(one.x[i]), height(one.lo[i])));
      g.fill();
    }

    bars(g) {
      const { X, Y } = this.box, { series } = this.data;
      if (!series.length) return;
      const xs = series[0].x, step = xs.length > 1 ? xs[1] - xs[0] : 1;
      xs.forEach((x, i) => {
        let base = 0;
        const left = X(x), wide = Math.max(1, X(x + step) - left - (xs.length < 100 ? 1 : 0));
        for (const one of series) {
          const v = one.y[i] || 0;
          g.fillStyle = one.colour;
          g.fillRect(left, Y(base + v), wide, Y(base) - Y(base + v));
          base += v;
        }
      });
    }

    dots(g) {
      const { X, Y } = this.box;
      for (const one of this.data.series) {
        const many = one.x.length > 500;
        g.fillStyle = one.colour; g.globalAlpha = many ? 0.3 : 0.5;
        // Deterministic jitter, since rewards are often whole numbers.
        const aside = (i) => 7 * (((i * 0.618034) % 1) - 0.5), up = (i) => 7 * (((i * 0.754878) % 1) - 0.5);
        one.x.forEach((x, i) => { g.beginPath(); g.arc(X(x) + aside(i), Y(one.y[i]) + up(i), many ? 2 : 2.8, 0, 7); g.fill(); });
        if (this.near !== undefined && this.at !== null) {
          g.globalAlpha = 1; g.strokeStyle = covey.colour("ink"); g.beginPath(); g.arc(X(one.x[this.at]), Y(one.y[this.at]), 5, 0, 7); g.stroke();
        }
      }
      g.globalAlpha = 1;
    }

    cross(g, X, height) {
      g.strokeStyle = covey.colour("faint"); g.lineWidth = 1; g.beginPath();
      g.moveTo(X(this.at), PAD.top); g.lineTo(X(this.at), height - PAD.bottom); g.stroke();
    }

    hover(event) {
      if (!this.box) return;
      const place = this.canvas.getBoundingClientRect(), px = event.clientX - place.left, py = event.clientY - place.top;
      if (this.options.kind === "dots") return this.hoverDot(px, py, event);
      const x = this.box.x0 + ((px - PAD.left) / this.box.w) * (this.box.x1 - this.box.x0);
      this.show(x, event.clientX, event.clientY);
    }

    hoverDot(px, py, event) {
      const one = this.data.series[0];
      let best = 144;
      this.near = undefined; this.at = null;
      one.x.forEach((x, i) => {
        const far = (this.box.X(x) - px) ** 2 + (this.box.Y(one.y[i]) - py) ** 2;
        if (far < best) { best = far; this.at = i; this.near = one.id[i]; }
      });
      if (this.at === null) covey.untip();
      else covey.tip(`${this.data.xlabel} ${number(one.x[this.at])}\n${this.data.ylabel} ${number(one.y[this.at])}\nstep ${one.step[this.at]} · click to read`, event.clientX, event.clientY);
      this.draw();
    }

    // A tooltip with the values nearest to x.
    show(x, px, py) {
      const rows = [];
      let at = null;
      for (const one of this.data.series) {
        const i = nearest(one.x, one.y, x, this.options.kind === "stack");
        if (i < 0) continue;
        if (at === null || Math.abs(one.x[i] - x) < Math.abs(at - x)) at = one.x[i];
        const band = one.lo && one.lo[i] !== null ? `  ${number(one.lo[i])} to ${number(one.hi[i])}` : "";
        const plain = one.raw && one.raw[i] !== null ? `  (${number(one.raw[i], 4)})` : "";
        rows.push(`${one.label}  ${number(one.y[i], 4)}${plain}${band}`);
      }
      if (at === null) return;
      this.at = at;
      this.draw();
      covey.tip([`${this.data.xlabel || "step"} ${(this.data.xformat || number)(at)}`, ...rows].join("\n"), px, py);
    }

    // The arrow keys move through the values.
    key(event) {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way || !this.box || this.options.kind === "dots" || !this.data.series.length) return;
      const xs = this.data.series[0].x;
      const from = this.at === null ? (way > 0 ? -1 : xs.length) : nearest(xs, xs, this.at);
      const i = Math.max(0, Math.min(xs.length - 1, from + way)), place = this.canvas.getBoundingClientRect();
      this.show(xs[i], place.left + this.box.X(xs[i]), place.top + 40);
      event.preventDefault(); event.stopPropagation();
    }

    name() { return this.options.title.toLowerCase().replace(/[^a-z0-9]+/g, "-"); }

    png() {
      const out = h("canvas", { width: 1600, height: 760 }), g = out.getContext("2d");
      g.fillStyle = covey.colour("card"); g.fillRect(0, 0, 1600, 760);
      g.setTransform(2, 0, 0, 2, 0, 0);
      g.fillStyle = covey.colour("ink"); g.font = "600 14px system-ui, sans-serif"; g.textBaseline = "top";
      g.fillText(this.options.title, 14, 10);
      let x = 14;
      g.font = "11px system-ui, sans-serif";
      for (const one of this.data.series) { g.fillStyle = one.colour; g.fillText("■ " + one.label, x, 32); x += g.measureText("■ " + one.label).width + 16; }
      g.translate(0, 52); g.beginPath(); g.rect(0, 0, 800, 320); g.clip();
      const back = g.clearRect;
      g.clearRect = () => {};
      this.paint(g, 800, 320);
      g.clearRect = back;
      out.toBlob((blob) => covey.save(this.name() + ".png", blob), "image/png");
      this.draw();
    }

    csv() {
      const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
      const lines = [["series", this.data.xlabel || "step", "value", "low", "high"].join(",")];
      for (const one of this.data.series) {
        const ys = one.exact || one.raw || one.y;
        one.x.forEach((x, i) => { if (ys[i] !== null) lines.push([quote(one.label), x, ys[i], one.lo ? one.lo[i] : "", one.hi ? one.hi[i] : ""].join(",")); });
      }
      covey.save(this.name() + ".csv", new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
    }
  }

  // The index of the value nearest to x; with `floor` of the bar that contains x. -1: no values.
  function nearest(xs, ys, x, floor) {
    let low = 0, high = xs.length - 1;
    while (low < high) { const mid = (low + high + 1) >> 1; if (xs[mid] <= x) low = mid; else high = mid - 1; }
    if (!floor && low + 1 < xs.length && Math.abs(xs[low + 1] - x) < Math.abs(xs[low] - x)) low += 1;
    for (let away = 0; away < xs.length; away++) {
      if (low - away >= 0 && ys[low - away] !== null && ys[low - away] !== undefined) return low - away;
      if (low + away < xs.length && ys[low + away] !== null && ys[low + away] !== undefined) return low + away;
    }
    return -1;
  }

  covey.Chart = Chart;
})(window.covey);

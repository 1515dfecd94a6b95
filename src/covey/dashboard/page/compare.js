"use strict";
// Compare: curves of several runs in one chart, their differing settings, and their evaluations.
(function (covey) {
  const { h, number } = covey, state = covey.state;
  const MOST = 8, LISTED = 24;

  covey.views.compare = {
    title: "Compare",
    async mount(root) {
      this.root = root;
      if (!state.picked || !state.picked.length) state.picked = state.runs.slice(-MOST).map((run) => run.id).reverse();
      this.metric = this.metric || "";
      this.build();
      await this.update();
    },

    build() {
      const measures = [...new Set(state.runs.map((run) => run.curve.measure))], names = [...new Set(state.runs.map((run) => run.curve.name))];
      const measure = measures.length === 1 ? measures[0] : "score";
      this.charts = [["Reward", names.join(" or ")], [`Held-out ${measure}`, measure], ["Metric", ""]].map(([title, ylabel]) => new covey.Chart({ title, ylabel }));
      this.choice = h("select", { "aria-label": "Metric to compare", onchange: () => { this.metric = this.choice.value; this.update(); } });
      this.picker = h("div", { class: "picker", role: "group", "aria-label": "Runs to compare" });
      this.tables = h("div");
      this.root.replaceChildren(this.picker,
        h("div", { class: "tools" }, covey.toolbar(() => this.redraw()), h("label", {}, "metric", this.choice)),
        h("div", { class: "charts" }, this.charts.map((chart) => chart.node)), this.tables);
    },

    // The picked runs with their colours, and the newest others.
    list() {
      const newest = state.runs.map((run) => run.id).reverse(), others = newest.filter((id) => !state.picked.includes(id));
      const listed = new Set([...state.picked, ...others.slice(0, Math.max(0, LISTED - state.picked.length))]), more = state.runs.length - listed.size;
      const focused = document.activeElement.closest(".picker [data-run]");
      this.picker.replaceChildren(...newest.filter((id) => listed.has(id)).map((id) => {
        const run = state.runs[id], input = h("input", { type: "checkbox", "data-run": id, onchange: () => { this.pick(id, input.checked); } });
        input.checked = state.picked.includes(id);
        return h("label", { title: run.name }, input, covey.mark(id), ` ${run.label} `, covey.pill(run));
      }), more ? h("a", { href: "#runs", text: `${more} more in the table of runs` }) : "");
      const again = focused && this.picker.querySelector(`[data-run="${focused.dataset.run}"]`);
      if (again) again.focus();
    },

    pick(id, on) {
      state.picked = state.runs.map((run) => run.id).reverse().filter((other) => (other === id ? on : state.picked.includes(other)));
      this.update();
    },

    async update() {
      const ids = state.picked;
      covey.assignSlots(ids);
      this.list();
      if (!ids.length) { this.found = []; this.redraw(); this.tables.replaceChildren(h("p", { class: "quiet", text: "Pick runs above." })); return; }
      const whole = await Promise.all(ids.map((id) => covey.ask("run", { run: id })));
      const names = [...new Set(whole.flatMap((run) => [...run.names.step, ...run.names.eval]))].sort();
      this.metric = names.includes(this.metric) ? this.metric : names.includes("policy/entropy") ? "policy/entropy" : names[0];
      this.choice.replaceChildren(...names.map((name) => h("option", { value: name, text: name, selected: name === this.metric })));
      const found = await Promise.all(whole.map(async (run, i) => {
        const curve = run.state.curve, ask = (kind) => covey.ask("series", { run: ids[i], kind, names: [curve.key, curve.best, this.metric].join(",") });
        return { run: run.state, curve, steps: await ask("step"), evals: await ask("eval") };
      }));
      const compared = await covey.ask("compare", { runs: ids.join(",") });
      if (ids !== state.picked) return; // the selection has changed in the meantime
      this.found = found;
      this.redraw();
      this.fill(compared);
    },

    redraw() {
      const line = (pick) => (this.found || []).map((one) => {
        const [from, name, smooth] = pick(one), slot = covey.slot(one.run.id), drawn = covey.lineOf(from, name, one.run.label, covey.series(slot), smooth);
        return drawn && { ...drawn, dashed: covey.isDashed(slot) };
      }).filter(Boolean);
      const axis = { ...covey.axis(), mark: null };
      this.charts[0].set({ ...axis, series: line((one) => [one.steps, one.curve.key, true]) });
      this.charts[1].set({ ...axis, series: line((one) => [one.evals, one.curve.best, false]) });
      this.charts[2].rename(this.metric || "Metric");
      this.charts[2].set({ ...axis, series: line((one) => (one.steps.series[this.metric] ? [one.steps, this.metric, true] : [one.evals, this.metric, false])) });
    },

    fill(found) {
      const runs = this.found.map((one) => one.run), name = (id) => runs.find((run) => run.id === id).label;
      const table = (head, rows) => h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows)));
      const cell = (text) => h("td", { text }), marked = (run) => h("span", { title: run.name }, covey.mark(run.id), ` ${run.label}`);
      const results = table(["run", "status", "steps", "held-out, now", "held-out, best", "time"], runs.map((run) => h("tr", {},
        h("td", {}, marked(run)), cell(run.status), cell(`${run.done} of ${run.total}`), cell(run.last ? withInterval(run.last) : "–"),
        cell(run.best ? `${number(run.best.value)} after ${run.best.step}` : "–"), cell(covey.duration(run.seconds)))));
      const settings = found.settings.length
        ? table(["setting", ...runs.map(marked)], found.settings.map((row) => h("tr", {}, row.map((value, i) => h("td", { class: i ? "mono" : "", text: i ? setting(value) : value })))))
        : h("p", { class: "quiet", text: runs.length > 1 ? "No differing settings." : "Pick a second run to compare settings." });
      const unpaired = found.unpaired.map((one) => {
        const points = (v) => `${v >= 0 ? "+" : "−"}${Math.abs(100 * v).toFixed(1)}`;
        const sure = one.low > 0 || one.high < 0 ? "significant" : "not significant";
        return h("p", { text: `After ${[...new Set(one.steps.slice().reverse())].join(" against ")} updates ${name(one.second)} has ${points(one.b - one.a)} points against ${name(one.first)} (95 % interval ${points(one.low)} to ${points(one.high)}): ${sure}. Unpaired; covey eval compares task by task.` });
      });
      const paired = found.paired.map((one) => h("p", { class: "paired", text: one.sentence }));
      this.tables.replaceChildren(
        h("section", {}, h("h2", { text: "Results" }), results),
        h("section", {}, h("h2", { text: "Differing settings" }), settings),
        h("section", {}, h("h2", { text: "Evaluations" }), unpaired, paired,
          unpaired.length + paired.length ? null : h("p", { class: "quiet", text: "No evaluation in common. covey eval RUN RUN compares runs task by task; its result is shown here." })));
    },
  };

  // Small numbers in scientific notation: 1e-6, not 0.000001.
  const setting = (value) => (value === "–" ? value : typeof value === "number" && value && Math.abs(value) < 1e-3 ? value.toExponential() : JSON.stringify(value));
  const withInterval = (point) => number(point.value) + (point.low === undefined ? "" : `  (${number(point.low)} to ${number(point.high)})`);
})(window.covey);

"use strict";
// Rewards: each reward and its weight, and a scatter plot of any two values of episodes.
(function (covey) {
  const { h, number } = covey, state = covey.state;

  covey.views.rewards = {
    title: "Rewards", reads: "episodes",
    async mount(root) {
      this.root = root; this.x = "length"; this.y = "reward"; this.built = "";
      await this.update();
    },

    async update() {
      this.found = await covey.ask("run", { run: state.run });
      const names = this.found.names.step;
      this.means = names.filter((name) => /^reward\/.+\/mean$/.test(name) || name === "reward/mean");
      this.weights = names.filter((name) => /^dgdo\/.+\/weight$/.test(name));
      this.zero = names.filter((name) => /^gdpo\/.+\/frac_zero_std$/.test(name));
      const key = JSON.stringify([state.run, this.means, this.weights, this.zero]);
      if (key !== this.built) { this.built = key; this.build(); }
      this.top.replaceChildren(covey.findingCards(this.found, (name, span) => covey.evidence(name, span)), this.fixed());
      this.steps = await covey.ask("series", { run: state.run, kind: "step", names: [...this.means, ...this.weights, ...this.zero].join(",") });
      this.redraw();
      await this.scatter();
    },

    build() {
      this.top = h("div");
      const chart = (title, about, ylabel) => new covey.Chart({ title, about, ylabel });
      this.curves = [[chart("Rewards", "mean of each, and their weighted sum", "reward"), this.means]];
      if (this.weights.length) this.curves.push([chart("Weights", "in use, by DGDO", "weight"), this.weights]);
      if (this.zero.length) this.curves.push([chart("Groups with zero variance in a reward", "", "share of groups"), this.zero]);
      this.selects = ["x", "y"].map((axis) => h("select", { "aria-label": axis === "x" ? "Across" : "Up", onchange: (event) => { this[axis] = event.target.value; this.scatter(); } }));
      this.verdict = h("div", { class: "quiet" });
      const below = h("div", {}, h("div", { class: "tools" }, h("label", {}, "up", this.selects[1]), h("label", {}, "across", this.selects[0])), this.verdict);
      this.dots = new covey.Chart({ title: "Episodes", about: "recorded episodes, two values against each other", kind: "dots", below, onpick: (id) => covey.go({ tab: "episodes", id }) });
      this.root.replaceChildren(this.top, h("div", { class: "tools" }, covey.toolbar(() => this.redraw())),
        h("div", { class: "charts" }, this.curves.map(([one]) => one.node), this.dots.node));
    },

    // Constant weights, from the settings.
    fixed() {
      const start = "reward.weights.", found = Object.entries(this.found.config).filter(([key]) => key.startsWith(start));
      if (this.weights.length || !found.length) return h("p", { class: "quiet", text: `Rewards: ${(this.found.state.reward_names || []).join(", ") || "none"}. Held-out evaluations score ${this.found.state.trained_reward || "the loss"}.` });
      return h("p", { class: "quiet", text: "Weights: " + found.map(([key, value]) => `${key.slice(start.length)} × ${value}`).join(", ") });
    },

    redraw() {
      if (!this.steps) return;
      const short = (name) => name.replace(/^(reward|dgdo|gdpo)\//, "").replace(/\/(mean|weight|frac_zero_std)$/, "");
      for (const [chart, names] of this.curves) {
        chart.set({ ...covey.axis(), mark: null, series: names.map((name, i) => covey.lineOf(this.steps, name, name === "reward/mean" ? "total" : short(name), covey.series(i))).filter(Boolean) });
      }
    },

    async scatter() {
      const found = await covey.ask("scatter", { run: state.run, x: this.x, y: this.y });
      const label = (name) => (name === "reward" ? "total reward" : name.replace(/^reward:/, ""));
      this.selects.forEach((select, i) => select.replaceChildren(...found.names.map((name) => h("option", { value: name, text: label(name), selected: name === [this.x, this.y][i] }))));
      this.dots.set({ xlabel: label(this.x), ylabel: label(this.y), series: found.x.length ? [{ label: `${label(this.y)} against ${label(this.x)}`, colour: covey.series(0), x: found.x, y: found.y, id: found.id, step: found.step }] : [] });
      const r = found.correlation, strong = r !== null && Math.abs(r) >= 0.6;
      this.verdict.textContent = r === null ? "One of the two is constant." : `${found.total.toLocaleString("en")} episodes, correlation ${number(r, 2)}${strong ? ": a strong correlation. If the task does not explain it, read the episodes at both ends." : "."}`;
      this.verdict.className = strong ? "" : "quiet";
    },
  };
})(window.covey);

"use strict";
// Overview: progress of a run, its findings, and its curves.
(function (covey) {
  const { h, number, duration } = covey;
  const state = covey.state = { runs: [], run: 0, axis: "step", smooth: 0, log: false, mark: null, picked: null };
  const AXES = { step: ["updates", number], time: ["time", duration], tokens: ["tokens", number] };

  // Smoothing, log scale and axis of all charts.
  covey.toolbar = function (changed) {
    const smooth = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(state.smooth), "aria-label": "Smoothing", oninput: () => { state.smooth = +smooth.value; changed(); } });
    const log = h("input", { type: "checkbox", onchange: () => { state.log = log.checked; changed(); } });
    log.checked = state.log;
    const axis = h("select", { "aria-label": "Horizontal axis", onchange: () => { state.axis = axis.value; changed(); } },
      Object.entries(AXES).map(([key, [label]]) => h("option", { value: key, text: label, selected: key === state.axis })));
    return [h("label", {}, "smoothing", smooth), h("label", {}, log, "log scale"), h("label", {}, "over", axis)];
  };

  // One line of a chart, with the settings of the toolbar.
  covey.lineOf = function (found, name, label, colour, smoothed = true) {
    const one = found.series[name];
    if (!one) return null;
    // A metric that only varies by round-off is drawn at its level. Saved numbers stay as recorded.
    const flat = one.level !== undefined, weight = smoothed && !flat ? state.smooth : 0, band = !flat || one.band;
    const y = flat ? one.y.map((value) => (value === null ? null : one.level)) : covey.smooth(one.y, weight);
    return { label, colour, x: found.axes[state.axis], y, raw: weight ? one.y : null, exact: one.y, lo: band ? one.lo : null, hi: band ? one.hi : null, band: one.band };
  };
  covey.axis = () => ({ whole: state.axis !== "time", xlabel: AXES[state.axis][0], xformat: AXES[state.axis][1], log: state.log, mark: state.axis === "step" && state.mark ? state.mark.span : null });

  covey.findingCards = function ({ early, findings }, evidence) {
    if (early) return h("div", { class: "quiet early", text: early });
    if (!findings.length) return h("div", { class: "fine", text: "✓ No findings." });
    return h("div", { class: "findings" }, findings.map((finding) => h("div", { class: "finding", "data-finding": finding.name },
      h("h2", { text: finding.title }), h("p", { text: finding.sentence }),
      h("p", {}, finding.advice + " Settings: ", finding.settings.flatMap((key, i) => [i ? ", " : "", h("code", { text: key })]), "."),
      finding.metrics.map((name) => h("button", { text: `see ${name}`, onclick: () => evidence(name, [finding.first, finding.last]) })))));
  };

  covey.pill = (run) => h("span", { class: "pill " + (run.silent ? "silent" : run.status), text: run.silent ? `silent for ${duration(run.silent)}` : run.status });

  covey.tags = (run) => run.tags.map((tag) => h("span", { class: "tag", text: tag }));

  function panels(names, run) {
    const has = (list, kind = "step") => list.filter((name) => names[kind].includes(name));
    const like = (start) => names.step.filter((name) => name.startsWith(start));
    const modes = names.eval.filter((name) => run.trained_reward && name.startsWith("eval/") && name.endsWith("/" + run.trained_reward));
    const stages = names.step.filter((name) => name.startsWith("timing/") && !["timing/step", "timing/tools", "timing/slowest_episode"].includes(name));
    const sft = run.kind === "sft";
    return [
      { title: sft ? "Loss" : "Reward", about: sft ? "−log π per demonstrated token" : "mean reward of a step's episodes", unit: run.curve.name, names: [run.curve.key] },
      { title: `Held-out ${run.curve.measure}`, about: "validation tasks" + (run.curve.measure === "accuracy" ? ", with 95 % intervals" : ""), kind: "eval", unit: run.curve.measure, names: modes.length ? modes : [run.curve.best] },
      { title: "KL", about: "to the reference, or to the sampling policy", unit: "nats per token", names: has(["kl/reference", "kl/samples", "gvpo/mean_log_ratio", "policy/kl_old"]).slice(0, 2) },
      { title: "Pull of the anchor", about: "β · std of the log-ratio, beside the std of the rewards; means over groups", unit: "standard deviation", names: has(["gvpo/pull", "gvpo/reward_spread"]) },
      { title: "Entropy", about: "per token; near 0: no exploration", unit: "nats per token", names: ["policy/entropy"] },
      { title: "Distillation", about: "reverse KL to the teacher, per token that it scored", unit: "nats per token", names: has(["distill/kl"]) },
      { title: "Roles", about: "mean reward of each role", unit: "reward", names: like("role/").filter((name) => name.endsWith("/reward")) },
      { title: "Opponents", about: "updates of the policy that plays them, and how many fewer than the current one's", unit: "updates", names: has(["opponent/version", "opponent/age"]) },
      { title: "Length", about: "tokens per answer", unit: "tokens", names: has(["response/length_mean", "response/length_max", "sft/tokens"]) },
      { title: "Truncated answers, zero-variance groups", about: "share", unit: "share", names: has(["response/truncated", "groups/flat"]) },
      { title: "Tasks by observed success", about: "share of the tasks observed so far; coverage: of all tasks", unit: "share", names: has(["curriculum/solved", "curriculum/in_band", "curriculum/unsolved", "curriculum/coverage"]) },
      { title: "Effective tasks", about: "1 / Σ p² of the draws", unit: "tasks", names: has(["curriculum/effective_tasks"]) },
      { title: "Throughput", about: "tokens per second", unit: "tokens per second", names: ["perf/tokens_per_second"] },
      { title: "Time per stage", about: "seconds of a step", unit: "seconds", stack: true, names: stages },
      { title: "Memory", about: "GiB of the main process, of its GPU", unit: "GiB", names: has(["perf/memory_gib", "perf/gpu_memory_gib"]) },
      { title: "Gradient norm", about: "before clipping", unit: "norm", names: ["grad/norm"] },
      { title: "Policy age", about: "updates between sampling and learning", unit: "updates", names: has(["policy/age", "policy/age_max"]) },
      { title: "Failures by cause", about: "episodes that failed in the infrastructure", unit: "episodes", names: like("episodes/failed/") },
      { title: "Tools", about: "calls per episode; share with errors", unit: "calls, share", names: has(["agent/tool_calls", "agent/tool_errors"]) },
    ].filter((panel) => panel.names.some((name) => names[panel.kind || "step"].includes(name)));
  }

  covey.views.overview = {
    title: "Overview",
    async mount(root) {
      this.root = root; this.charts = []; this.built = "";
      await this.update();
    },

    async update() {
      const found = this.found = await covey.ask("run", { run: state.run });
      const key = JSON.stringify([state.run, found.names]);
      if (key !== this.built) { this.built = key; this.build(found); }
      this.fill(found);
      const ask = (kind) => covey.ask("series", { run: state.run, kind, names: this.wanted(kind).join(",") });
      [this.steps, this.evals] = await Promise.all([ask("step"), ask("eval")]);
      this.redraw();
    },

    wanted(kind) {
      return [...new Set(this.charts.filter((c) => (c.panel.kind || "step") === kind).flatMap((c) => c.panel.names))];
    },

    build(found) {
      this.top = h("div");
      const all = [...new Set([...found.names.step, ...found.names.eval])].sort();
      this.any = h("select", { "aria-label": "Any metric", onchange: () => { if (this.any.value) this.add(this.any.value); this.any.value = ""; } },
        h("option", { value: "", text: "add a metric…" }), all.map((name) => h("option", { value: name, text: name })));
      const csv = h("button", { text: "All numbers as CSV", onclick: () => this.csv() });
      this.grid = h("div", { class: "charts" });
      this.charts = panels(found.names, found.state).map((panel) => this.card(panel));
      this.root.replaceChildren(this.top, h("div", { class: "tools" }, covey.toolbar(() => this.redraw()), this.any, covey.offline ? null : csv), this.grid);
      if (state.mark && !this.charts.some((c) => c.panel.names.includes(state.mark.name))) this.charts.unshift(this.card(this.panelOf(state.mark.name), true));
    },

    card(panel, first) {
      const chart = new covey.Chart({ title: panel.title, about: panel.about, ylabel: panel.unit, kind: panel.stack ? "stack" : "lines" });
      this.grid[first ? "prepend" : "append"](chart.node);
      return { panel, chart };
    },

    panelOf(name) { return { title: name, about: "", unit: name, kind: this.found.names.step.includes(name) ? "step" : "eval", names: [name] }; },

    async add(name) { this.charts.unshift(this.card(this.panelOf(name), true)); await this.update(); },

    // Text above the charts.
    fill(found) {
      const run = found.state, shown = covey.views.overview.tiles(found);
      const bar = h("i");
      bar.style.width = `${(100 * run.done) / Math.max(1, run.total)}%`;
      this.top.replaceChildren(
        h("div", { class: "head" }, h("h1", { text: run.title }), covey.pill(run),
          h("span", { class: "quiet", text: `${run.algorithm} trains ${run.model} on ${run.task}` }), covey.tags(run), h("span", { class: "grow" }),
          h("span", { text: `step ${run.done.toLocaleString("en")} of ${run.total.toLocaleString("en")}` }),
          h("span", { class: "quiet", text: `${duration(run.seconds)} so far` + (run.eta !== null ? `, ${duration(run.eta)} left` : "") })),
        h("div", { class: "bar", role: "progressbar", "aria-valuenow": run.done, "aria-valuemax": run.total, "aria-label": "Steps done" }, bar),
        run.notes ? h("p", { class: "notes", text: run.notes }) : "",
        covey.findingCards(found, (name, span) => covey.evidence(name, span)),
        shown);
    },

    tiles(found) {
      const run = found.state, tile = (label, value, note) => h("div", { class: "tile" }, h("span", { text: label }), h("b", { text: value }), h("small", { text: note || "" }));
      const point = (p) => (p.low === undefined ? `after ${p.step}` : `${number(p.low)}–${number(p.high)}`);
      const stage = Object.entries(found.stages)[0], all = Object.values(found.stages).reduce((a, b) => a + b, 0);
      const failed = Object.values(found.failures).reduce((a, b) => a + b, 0);
      this.live = h("div", { class: "tiles" });
      this.fixed = [
        run.last ? tile("held-out, now", number(run.last.value), point(run.last)) : null,
        run.best ? tile("held-out, best", number(run.best.value), `after ${run.best.step}`) : null,
        stage && all ? tile("most time in", stage[0], `${Math.round((100 * stage[1]) / all)} %`) : null,
        tile("failed episodes", String(failed), Object.keys(found.failures).join(", ")),
      ];
      return this.live;
    },

    redraw() {
      if (!this.steps) return;
      const now = (name) => (this.steps.series[name] ? covey.last(this.steps.series[name].y) : null);
      const tile = (label, name) => (now(name) === null ? null : h("div", { class: "tile" }, h("span", { text: label }), h("b", { text: number(now(name)) })));
      const run = this.found.state;
      this.live.replaceChildren(...[tile(run.curve.name, run.curve.key), ...this.fixed, tile("entropy", "policy/entropy"), tile("tokens/s", "perf/tokens_per_second")].filter(Boolean));
      for (const { panel, chart } of this.charts) {
        const from = panel.kind === "eval" ? this.evals : this.steps;
        const short = (name) => (panel.names.length > 1 ? name.replace(/^(response|timing|episodes\/failed|agent|eval)\//, "") : name);
        const marked = state.mark && panel.names.includes(state.mark.name);
        chart.node.classList.toggle("marked", Boolean(marked));
        const axis = covey.axis();
        if (!marked) axis.mark = null;
        if (panel.stack) chart.set({ ...axis, log: false, series: stacked(from, panel.names, this.found.stages) });
        else chart.set({ ...axis, series: panel.names.map((name, i) => covey.lineOf(from, name, short(name), covey.series(i), panel.kind !== "eval")).filter(Boolean) });
      }
    },

    csv() { h("a", { href: `api/csv?run=${state.run}`, download: "metrics.csv" }).click(); },
  };

  // At most 60 bars: means of neighbouring steps.
  function stacked(found, names, totals) {
    const xs = found.axes[state.axis], size = Math.max(1, Math.ceil(xs.length / 60)), all = Object.values(totals).reduce((a, b) => a + b, 0);
    return names.map((name, i) => {
      const x = [], y = [], values = found.series[name] ? found.series[name].y : [];
      for (let at = 0; at < xs.length; at += size) {
        const part = values.slice(at, at + size).map((v) => v || 0);
        x.push(xs[at]); y.push(part.reduce((a, b) => a + b, 0) / Math.max(1, part.length));
      }
      const stage = name.slice(7), share = all ? ` ${Math.round((100 * totals[stage]) / all)} %` : "";
      return { label: stage, legend: stage + share, colour: covey.series(i), x, y };
    });
  }
})(window.covey);

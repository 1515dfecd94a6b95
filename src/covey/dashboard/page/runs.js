"use strict";
// Runs: a table to sort, filter, open and select runs for comparison.
(function (covey) {
  const { h, number } = covey, state = covey.state;

  // key: for sorting; of(run): the value; class: n for numbers, small or medium: shown from that page width on.
  const COLUMNS = [
    { key: "status", title: "status", of: (run) => (run.silent ? "silent" : run.status), cell: (run) => covey.pill(run) },
    { key: "label", title: "run", of: (run) => run.label, cell: (run) => named(run) },
    { key: "algorithm", title: "algorithm", of: (run) => run.algorithm, class: "small" },
    { key: "model", title: "model", of: (run) => run.model, cell: (run) => h("span", { title: run.model, text: tail(run.model) }), class: "medium" },
    { key: "task", title: "task", of: (run) => run.task, class: "medium" },
    { key: "done", title: "steps", of: (run) => run.done, cell: (run) => `${run.done.toLocaleString("en")}/${run.total.toLocaleString("en")}`, class: "n" },
    { key: "best", title: "best score", of: (run) => (run.best ? run.best.value : null), cell: (run) => best(run), class: "n" },
    { key: "started", title: "started", of: (run) => String(run.started || ""), cell: (run) => String(run.started || "–").replace("T", " ").slice(0, 16), class: "small" },
    { key: "seconds", title: "duration", of: (run) => run.seconds, cell: (run) => covey.duration(run.seconds), class: "n small" },
    { key: "tags", title: "tags", of: (run) => run.tags.join(" "), cell: (run) => covey.tags(run), class: "small" },
    { key: "notes", title: "notes", of: (run) => run.notes, class: "medium notes" },
  ];

  const tail = (name) => { const parts = name.split("/"), last = parts.length > 1 && parts.at(-1) === "model" ? 2 : 1; return parts.slice(-last).join("/"); };
  const named = (run) => [
    h("a", { href: `#overview?run=${run.id}`, "data-what": "open", text: run.label }),
    h("small", { class: "quiet", text: run.name }),
  ];
  const best = (run) => (run.best ? h("span", { title: `${run.curve.measure} after ${run.best.step} updates`, text: number(run.best.value) }) : "–");

  const searched = (run) => [run.label, run.name, run.title, run.status, run.algorithm, run.model, run.task, run.notes, ...run.tags].join(" ").toLowerCase();

  covey.filterRuns = function (runs, words) {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    return runs.filter((run) => { const text = searched(run); return wanted.every((word) => text.includes(word)); });
  };

  // Missing values come last in either order; among equal values the newest run is first.
  covey.sortRuns = function (runs, key, down) {
    const { of } = COLUMNS.find((column) => column.key === key) || COLUMNS[0], sign = down ? -1 : 1;
    const none = (value) => value === null || value === undefined || value === "";
    const order = (a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    return [...runs].sort((one, other) => {
      const a = of(one), b = of(other);
      return none(a) - none(b) || (none(a) ? 0 : sign * order(a, b)) || other.id - one.id;
    });
  };

  covey.views.runs = {
    title: "Runs",
    async mount(root) {
      this.root = root; this.rows = new Map();
      this.sort = covey.route.sort || "started"; this.down = covey.route.order !== "up"; this.words = covey.route.filter || "";
      this.build();
      this.update();
    },

    build() {
      const typed = covey.later(() => { this.words = this.filter.value; this.note(); this.update(); }, 100);
      this.filter = h("input", { type: "search", "aria-label": "Filter runs", placeholder: "filter by any word  /", value: this.words, oninput: typed });
      this.count = h("span", { class: "quiet", role: "status" });
      this.compare = h("button", { onclick: () => covey.go({ tab: "compare" }) });
      this.clear = h("button", { text: "Clear selection", onclick: () => { state.picked = []; this.update(); } });
      this.all = h("input", { type: "checkbox", "aria-label": "Select all shown runs", onchange: () => this.pickAll(this.all.checked) });
      this.heads = COLUMNS.map((column) => h("th", { scope: "col", class: column.class },
        h("button", { "data-what": column.key, onclick: () => this.by(column.key) }, column.title, h("span", { "aria-hidden": "true" }))));
      this.body = h("tbody");
      this.root.replaceChildren(
        h("div", { class: "tools" }, this.filter, this.count, h("span", { class: "grow" }), this.compare, this.clear),
        h("div", { class: "scroll" }, h("table", { class: "runs" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, this.all), this.heads)), this.body)),
        h("p", { class: "quiet hint", text: "Keys: j and k move through the rows, x selects, c compares, / filters." }));
    },

    by(key) {
      this.down = key === this.sort ? !this.down : ["done", "best", "started", "seconds"].includes(key);
      this.sort = key;
      this.note();
      this.update();
    },

    note() { covey.note({ sort: this.sort, order: this.down ? "down" : "up", filter: this.words || undefined }); },

    pick(id, on) {
      const others = (state.picked || []).filter((other) => other !== id);
      state.picked = on ? [...others, id].sort((a, b) => b - a) : others;
      this.update();
    },

    pickAll(on) {
      const shown = this.shown.map((run) => run.id), others = (state.picked || []).filter((id) => !shown.includes(id));
      state.picked = (on ? [...others, ...shown] : others).sort((a, b) => b - a);
      this.update();
    },

    update() {
      const picked = state.picked || [];
      covey.assignSlots(picked);
      this.shown = covey.sortRuns(covey.filterRuns(state.runs, this.words), this.sort, this.down);
      this.count.textContent = `${this.shown.length} of ${state.runs.length} runs`;
      this.compare.textContent = picked.length ? `Compare ${picked.length} selected` : "Compare the newest";
      this.clear.hidden = !picked.length;
      const chosen = this.shown.filter((run) => picked.includes(run.id)).length;
      this.all.checked = chosen > 0 && chosen === this.shown.length;
      this.all.indeterminate = chosen > 0 && chosen < this.shown.length;
      this.heads.forEach((head, i) => {
        const here = COLUMNS[i].key === this.sort;
        head.setAttribute("aria-sort", here ? (this.down ? "descending" : "ascending") : "none");
        head.querySelector("span").textContent = here ? (this.down ? " ▾" : " ▴") : "";
      });
      this.place(this.shown.map((run) => this.row(run)));
    },

    // Only changed rows are rebuilt, and the focus is kept.
    row(run) {
      const on = (state.picked || []).includes(run.id), key = JSON.stringify([run, on, covey.slot(run.id)]), kept = this.rows.get(run.id);
      if (kept && kept.key === key) return kept.node;
      const box = h("input", { type: "checkbox", "data-what": "pick", "aria-label": `Compare ${run.label}`, onchange: () => this.pick(run.id, box.checked) });
      box.checked = on;
      const cells = COLUMNS.map((column) => h("td", { class: column.class }, column.cell ? column.cell(run) : String(column.of(run) || "–")));
      const node = h("tr", { "data-run": run.id, class: on ? "picked" : null }, h("td", {}, h("label", { class: "check" }, box, on ? covey.mark(run.id) : null)), cells);
      this.rows.set(run.id, { key, node });
      return node;
    },

    place(rows) {
      const same = rows.length === this.body.children.length && rows.every((row, i) => row === this.body.children[i]);
      if (same) return;
      const active = document.activeElement, at = active.closest("tr[data-run]");
      this.body.replaceChildren(...rows);
      if (!at || document.activeElement === active) return;
      const again = this.body.querySelector(`tr[data-run="${at.dataset.run}"] [data-what="${active.dataset.what}"]`);
      if (again) again.focus();
    },

    key(event) {
      if (event.key === "/") { this.filter.focus(); return true; }
      if (event.key === "c") { covey.go({ tab: "compare" }); return true; }
      const rows = [...this.body.children], at = rows.findIndex((row) => row.contains(document.activeElement));
      const way = { j: 1, k: -1 }[event.key];
      if (way && rows.length) { rows[at < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, at + way))].querySelector("a").focus(); return true; }
      if (event.key !== "x" || at < 0) return false;
      const id = Number(rows[at].dataset.run);
      this.pick(id, !(state.picked || []).includes(id));
      return true;
    },
  };
})(window.covey);

"use strict";
// Episodes: a virtualised list with filters, and the reader.
(function (covey) {
  const { h, number } = covey, state = covey.state;
  const LINE = 30, BLOCK = 200, KEPT = 12; // pixels of a line; lines fetched at a time; blocks kept in memory
  const COLUMNS = [["step", "step", "n"], ["task", null, "wide"], ["reply", null], ["reward", "reward", "n"], ["length", "length", "n"], ["stop", null], ["err", "tool_errors", "n wide"]];

  covey.views.episodes = {
    title: "Episodes", reads: "episodes",
    async mount(root) {
      this.root = root;
      root.classList.add("split");
      this.sort = "step"; this.order = "down"; this.total = 0; this.blocks = new Map(); this.place = -1; this.ticket = 0;
      this.filters = this.controls();
      this.count = h("div", { class: "count", "aria-live": "polite" });
      this.heads = h("div", { class: "columns-head" });
      this.inner = h("div");
      this.list = h("div", { class: "list", tabindex: "0", role: "listbox", "aria-label": "Episodes" }, this.inner);
      this.right = h("div", { class: "right", tabindex: "0" }, h("p", { class: "quiet", text: "Pick an episode: j and k move through the list, / searches." }));
      this.reader = new covey.Reader(this.right, () => { root.classList.remove("reading"); this.list.focus(); });
      root.replaceChildren(h("div", { class: "left" }, this.filters, this.count, this.heads, this.list), this.right);
      this.list.addEventListener("scroll", () => this.draw(), { passive: true });
      new ResizeObserver(() => this.draw()).observe(this.list);
      this.head();
      await this.reload();
      if (covey.route.id !== undefined) await this.open(+covey.route.id); else if (this.total && innerWidth > 760) await this.pick(0);
    },

    unmount() { this.root.classList.remove("split", "reading"); },

    controls() {
      const again = covey.later(() => this.reload());
      const input = (name, type, hint, label) => h("input", { type, name, placeholder: hint, "aria-label": label || hint, oninput: again, step: type === "number" ? "any" : null });
      const between = (what, low, high) => h("label", {}, what, input(low, "number", "from", `${what} from`), input(high, "number", "to", `${what} to`));
      const box = (name, label) => h("label", {}, h("input", { type: "checkbox", name, onchange: again }), label);
      this.stops = h("select", { name: "stop", "aria-label": "Stop reason", onchange: again }, h("option", { value: "", text: "any stop" }));
      return h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
        input("task", "search", "task or question  /"), input("text", "search", "text of the episode"),
        between("reward", "min_reward", "max_reward"), between("length", "min_length", "max_length"), between("step", "first_step", "last_step"), this.stops, box("tool_errors", "tool errors"), box("failed", "failed"));
    },

    query() {
      const found = { run: state.run, sort: this.sort, order: this.order };
      for (const field of this.filters.elements) if (field.name) found[field.name] = field.type === "checkbox" ? field.checked : field.value;
      return found;
    },

    head() {
      this.heads.replaceChildren(...COLUMNS.map(([label, key, wide]) => {
        const arrow = key === this.sort ? (this.order === "down" ? " ↓" : " ↑") : "";
        return key ? h("button", { class: wide, text: label + arrow, "aria-label": `Sort by ${label}`, onclick: () => this.resort(key) }) : h("span", { class: wide, text: label });
      }));
    },

    resort(key) {
      this.order = key === this.sort && this.order === "down" ? "up" : "down";
      this.sort = key;
      this.head(); this.reload();
    },

    // Starts over after a change of filters or order.
    async reload() {
      this.ticket += 1;
      this.blocks.clear();
      await this.fetch(0);
      this.list.scrollTop = 0;
      this.draw();
    },

    async fetch(block) {
      const ticket = this.ticket;
      if (this.blocks.has(block)) return;
      this.blocks.set(block, null);
      const found = await covey.ask("episodes", { ...this.query(), offset: block * BLOCK, limit: BLOCK });
      if (ticket !== this.ticket) return; // the filters have changed in the meantime
      this.blocks.set(block, found.rows);
      for (const old of this.blocks.keys()) { if (this.blocks.size <= KEPT) break; if (Math.abs(old - block) > 2) this.blocks.delete(old); }
      this.total = found.total;
      const known = [...this.stops.options].map((option) => option.value);
      for (const stop of found.stops) if (!known.includes(stop)) this.stops.append(h("option", { value: stop, text: stop }));
      const reading = found.indexed < 0.9999 ? `, reading the file: ${Math.floor(100 * found.indexed)} %` : "";
      const kept = found.kept !== undefined && found.kept < found.recorded ? `; this file contains ${found.kept} of them` : "";
      this.count.textContent = `${found.total.toLocaleString("en")} of ${found.recorded.toLocaleString("en")} recorded episodes${kept}${reading}`;
      this.inner.style.height = `${this.total * LINE}px`;
      this.draw();
    },

    row(place) {
      const block = this.blocks.get(Math.floor(place / BLOCK));
      return block ? block[place % BLOCK] : null;
    },

    draw() {
      const first = Math.max(0, Math.floor(this.list.scrollTop / LINE) - 6), last = Math.min(this.total, Math.ceil((this.list.scrollTop + this.list.clientHeight) / LINE) + 6);
      const lines = [];
      for (let place = first; place < last; place++) {
        const row = this.row(place);
        if (!row) { this.fetch(Math.floor(place / BLOCK)); continue; }
        lines.push(this.line(row, place));
      }
      this.inner.replaceChildren(...lines);
    },

    line(row, place) {
      const cell = (text, kind) => h("span", { class: kind, text, title: kind === "said" ? text : null });
      const node = h("div", { class: "row", role: "option", id: `row-${row.id}`, "aria-selected": String(row.id === this.open_id), onclick: () => this.pick(place) },
        cell(row.step, "n"), cell(row.task, "wide"), cell(row.failed ? "(failed)" : row.reply || row.question, "said"),
        cell(number(row.reward), "n" + (row.advantage > 0 ? " good" : row.advantage < 0 ? " bad" : "")), cell(row.length, "n"), cell(row.stop), cell(row.tool_errors || "", "n wide bad"));
      node.style.top = `${place * LINE}px`;
      return node;
    },

    async pick(place) {
      this.place = Math.max(0, Math.min(this.total - 1, place));
      const at = this.place * LINE;
      if (at < this.list.scrollTop) this.list.scrollTop = at;
      if (at + LINE > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = at + LINE - this.list.clientHeight;
      await this.fetch(Math.floor(this.place / BLOCK));
      const row = this.row(this.place);
      if (row) await this.open(row.id);
    },

    async open(id) {
      this.open_id = id;
      this.root.classList.add("reading");
      covey.note({ id });
      this.draw();
      await this.reader.open(id);
    },

    key(event) {
      const move = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[event.key];
      if (move && (event.key.length === 1 || document.activeElement === this.list)) { this.pick(this.place + move); return true; }
      if (event.key === "/") { this.root.classList.remove("reading"); this.filters.elements.task.focus(); return true; }
      if (event.key === "g" && this.reader.id !== undefined) { this.reader.look("group"); return true; }
      if (event.key === "s" && this.reader.id !== undefined) { this.reader.look("task"); return true; }
      if (event.key === "Escape") { this.root.classList.remove("reading"); this.list.focus(); return true; }
      return false;
    },

    // New episodes are shown at once at the top of the list; further down only the count changes.
    async update() {
      const top = this.list.scrollTop < LINE;
      this.ticket += 1;
      this.blocks.clear();
      await this.fetch(top ? 0 : Math.floor(this.list.scrollTop / LINE / BLOCK));
    },

    async routed() { if (covey.route.id !== undefined && +covey.route.id !== this.open_id) await this.open(+covey.route.id); },
  };
})(window.covey);

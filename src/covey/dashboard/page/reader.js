"use strict";
// One episode: its turns, and its tokens coloured by a value of the learner.
(function (covey) {
  const { h, number } = covey, state = covey.state;
  const MOST_TOKENS = 6000, MOST_COLUMNS = 16;
  const RED = [214, 69, 56], GREEN = [34, 150, 94], BLUE = [62, 126, 204], PURPLE = [140, 82, 196], GREY = [128, 136, 150];
  const paint = (rgb, share) => `rgba(${rgb},${Math.max(0, Math.min(0.75, 0.75 * share)).toFixed(3)})`;

  // Colour modes: the value of a token, its range, and the colour scale.
  const MODES = {
    mask: { label: "source", of: (row, i) => row.mask[i], colour: (v) => (v ? paint(BLUE, 0.35) : paint(GREY, 0.2)), scale: ["given", "sampled"], ends: [paint(GREY, 0.2), paint(BLUE, 0.35)] },
    logprobs: { label: "log-prob", of: (row, i) => row.logprobs[i], size: () => 6, colour: (v, size) => paint(RED, -v / size), scale: ["likely", "unlikely"], ends: [paint(RED, 0), paint(RED, 1)] },
    advantage: { label: "advantage", of: (row, i) => row.advantage[i], size: (values) => Math.max(1e-6, ...values.map(Math.abs)), colour: (v, size) => paint(v < 0 ? RED : GREEN, Math.abs(v) / size), scale: ["below", "above the baseline"], ends: [paint(RED, 1), paint(GREEN, 1)] },
    ratio: { label: "ratio", of: (row, i) => row.ratio[i], size: () => 1, colour: (v, size) => paint(v < 1 ? RED : GREEN, Math.abs(Math.log2(Math.max(v, 1e-6))) / size), scale: ["halved", "doubled"], ends: [paint(RED, 1), paint(GREEN, 1)] },
    entropy: { label: "entropy", of: (row, i) => row.entropy[i], size: (values) => Math.max(0.5, ...values), colour: (v, size) => paint(PURPLE, v / size), scale: ["certain", "uncertain"], ends: [paint(PURPLE, 0), paint(PURPLE, 1)] },
    versions: { label: "policy age", of: (row, i) => Math.max(...row.versions) - row.versions[i], size: (values) => Math.max(1, ...values), colour: (v, size) => paint(PURPLE, v / size), scale: ["newest", "oldest"], ends: [paint(PURPLE, 0), paint(PURPLE, 1)] },
  };
  covey.modes = MODES;

  const values = (row, i) => `${JSON.stringify(row.text[i])}  token ${row.response_ids[i]}\n` + (row.mask[i]
    ? `log-prob ${number(row.logprobs[i], 4)} (p ${number(row.logprobs[i] === null ? null : Math.exp(row.logprobs[i]), 3)})\nadvantage ${number(row.advantage[i], 4)}\nratio ${number(row.ratio[i], 4)}\nentropy ${number(row.entropy[i], 4)}\nsampled after ${row.versions[i]} updates`
    : "given, not sampled: not trained on");

  // The tokens of a row, with values on hover or with the arrow keys.
  function tokens(row, mode, say) {
    const how = MODES[mode], shown = Math.min(row.text.length, MOST_TOKENS);
    const sampled = row.text.map((_, i) => (row.mask[i] ? how.of(row, i) : null)).filter((v) => v !== null);
    const size = how.size ? how.size(sampled) : 1;
    const box = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": `${row.text.length} tokens coloured by ${how.label}; move with the arrow keys` });
    for (let i = 0; i < shown; i++) {
      const value = how.of(row, i), node = h("span", { class: row.mask[i] ? null : "given", "data-i": i, text: row.text[i].replaceAll("\n", "↵\n") });
      if ((row.mask[i] || mode === "mask") && value !== null) node.style.backgroundColor = how.colour(value, size);
      box.append(node);
    }
    if (shown < row.text.length) box.append(h("em", { class: "quiet", text: ` … and ${row.text.length - shown} more tokens` }));
    box.addEventListener("pointerover", (event) => {
      const at = event.target.dataset.i;
      if (at !== undefined) covey.tip(values(row, +at), event.clientX, event.clientY); else covey.untip();
    });
    box.addEventListener("pointerleave", covey.untip);
    let here = -1;
    box.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way || !shown) return;
      if (here >= 0) box.children[here].classList.remove("here");
      here = Math.max(0, Math.min(shown - 1, here + way));
      box.children[here].classList.add("here");
      box.children[here].scrollIntoView({ block: "nearest" });
      if (say) say.textContent = values(row, here).replaceAll("\n", "   ");
      event.preventDefault(); event.stopPropagation();
    });
    return box;
  }

  const plain = (content) => (typeof content === "string" ? content : content === null || content === undefined ? "" : JSON.stringify(content, null, 1));

  // A picture of a message, with the place of the action that follows.
  function picture(name, action) {
    const url = covey.image(name);
    if (!url) return h("p", { class: "quiet", text: `[image ${name}]` });
    const box = h("div", { class: "shot" }, h("img", { src: url, alt: action ? `screenshot before ${action.label}` : "image" }));
    for (const at of action && action.size ? [action.at, action.to] : []) {
      if (!at) continue;
      const dot = h("i");
      dot.style.left = `${(100 * at[0]) / action.size[0]}%`; dot.style.top = `${(100 * at[1]) / action.size[1]}%`;
      box.append(dot);
    }
    return box;
  }

  const parts = (content, action) => (Array.isArray(content) && content.some((part) => part && part.type === "image")
    ? content.map((part) => (part.type === "image" ? picture(part.image, action) : h("pre", { text: plain(part.text) })))
    : h("pre", { text: plain(content) }));

  function turn(message, i, all) {
    const calls = (message.tool_calls || []).map((call) => {
      const made = call.function || call;
      return h("div", { class: "call mono", text: `${made.name}(${plain(made.arguments)})` });
    });
    const name = message.role === "tool" ? `tool ${message.name || ""} returned` : message.role;
    return h("div", { class: "turn " + message.role }, h("span", { text: name }), parts(message.content, all[i + 1] && all[i + 1].action),
      message.action ? h("div", { class: "call mono", text: message.action.label }) : null, calls);
  }

  const fact = (label, value) => h("span", {}, label + " ", h("b", { text: value }));
  const facts = (episode, length) => h("div", { class: "facts" },
    fact("step", episode.step), fact("group", episode.group), fact("attempt", episode.attempt), fact("reward", number(episode.total_reward)), fact("advantage", number(episode.advantage)),
    fact("tokens", length), fact("stop", episode.stop || "none"), Object.entries(episode.rewards).map(([name, value]) => fact(name, number(value))),
    (episode.turns || []).some((turn) => turn.reward !== null) ? fact("reward per turn", episode.turns.map((turn) => turn.reward === null ? "–" : number(turn.reward)).join(", ")) : null,
    (episode.tools || []).length ? fact("tool calls", episode.tools.map((use) => use.tool + (use.error ? ` (${use.error})` : "")).join(", ")) : null);
  const brief = (episode, length) => h("div", { class: "facts" }, fact("step", episode.step), fact("attempt", episode.attempt), fact("reward", number(episode.total_reward)),
    fact("advantage", number(episode.advantage)), fact("tokens", length), fact("stop", episode.stop || "none"));
  const sampledTokens = (episode) => episode.rows.reduce((sum, row) => sum + row.mask.reduce((a, b) => a + b, 0), 0);

  covey.Reader = class {
    constructor(root, onback) {
      this.root = root; this.mode = "logprobs"; this.view = "one"; this.onback = onback;
    }

    async open(id) {
      this.id = id;
      this.episode = await covey.ask("episode", { run: state.run, id });
      await this.draw();
    }

    choose(mode) { this.mode = mode; this.draw(); }

    async look(view) { this.view = this.view === view ? "one" : view; await this.draw(); }

    async draw() {
      const { episode } = this, how = MODES[this.mode], bar = h("i");
      bar.style.background = how.ends.length === 2 && how.ends[0] !== how.ends[1] ? `linear-gradient(90deg, ${how.ends[0]}, transparent, ${how.ends[1]})` : how.ends[0];
      if (["logprobs", "entropy", "versions"].includes(this.mode)) bar.style.background = `linear-gradient(90deg, ${how.ends[0]}, ${how.ends[1]})`;
      const select = h("select", { id: "mode", "aria-label": "Colour tokens by", onchange: () => this.choose(select.value) },
        Object.entries(MODES).map(([key, mode]) => h("option", { value: key, text: mode.label, selected: key === this.mode })));
      const toggle = (view, text) => h("button", { "aria-pressed": String(this.view === view), text, onclick: () => this.look(view) });
      const head = [
        h("div", { class: "head" }, h("button", { class: "back", text: "← list", onclick: this.onback }), h("h1", { text: episode.task_id }),
          episode.failure ? h("span", { class: "pill failed", text: `failed: ${episode.failure.cause}` }) : null),
        facts(episode, sampledTokens(episode)),
        h("div", { class: "tools" }, h("label", {}, "colour by", select), h("span", { class: "scale" }, how.scale[0], bar, how.scale[1]), toggle("group", "Whole group (g)"), toggle("task", "Across steps (s)")),
      ];
      const body = this.view === "one" ? this.one() : await this.beside();
      this.root.replaceChildren(...head, ...body);
    }

    one() {
      const { episode } = this;
      const said = episode.rows.flatMap((row, i) => {
        const say = h("div", { class: "say", "aria-live": "polite" });
        return [
          h("details", {}, h("summary", { text: `prompt, ${row.prompt_ids.length} tokens` }), h("div", { class: "tokens", text: row.prompt_text })),
          h("h2", { text: episode.rows.length > 1 ? `Tokens, branch ${i + 1}` : "Tokens" }), tokens(row, this.mode, say), say,
        ];
      });
      const failure = episode.failure ? [h("p", { class: "bad", text: episode.failure.message })] : [];
      const answer = episode.answer === null ? [] : [h("p", {}, "reference answer ", h("b", { text: plain(episode.answer) }))];
      return [...failure, ...said, h("h2", { text: "Conversation" }), ...episode.messages.map(turn), ...answer];
    }

    // The attempts of the group, or the same task at other steps, side by side.
    async beside() {
      const found = await covey.ask("related", { run: state.run, id: this.id, kind: this.view });
      const every = Math.max(1, Math.ceil(found.rows.length / MOST_COLUMNS)), rows = found.rows.filter((_, i) => i % every === 0);
      const whole = await Promise.all(rows.map((row) => covey.ask("episode", { run: state.run, id: row.id })));
      const column = (episode) => h("div", {}, brief(episode, sampledTokens(episode)), episode.rows.map((row) => tokens(row, this.mode)), h("button", { text: "read", onclick: () => { this.view = "one"; covey.go({ id: episode.id }); } }));
      const parts = [h("p", { class: "quiet", text: this.view === "group" ? `${found.total} recorded attempts of this group` : `${found.total} recorded attempts at this task, by step` })];
      if (this.view === "task") {
        const chart = new covey.Chart({ title: "Reward at this task", kind: "dots", onpick: (id) => { this.view = "one"; covey.go({ id }); } });
        const kept = found.rows.filter((row) => row.reward !== null);
        parts.push(chart.node);
        chart.set({ xlabel: "step", ylabel: "reward", series: [{ label: "reward", colour: covey.series(0), x: kept.map((r) => r.step), y: kept.map((r) => r.reward), id: kept.map((r) => r.id), step: kept.map((r) => r.step) }] });
      }
      return [...parts, h("div", { class: "side" }, whole.map(column))];
    }
  };
})(window.covey);

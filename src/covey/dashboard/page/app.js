"use strict";
// The frame: routing, keyboard shortcuts, and polling for updates.
(function (covey) {
  const { h } = covey, state = covey.state, TABS = ["runs", "overview", "compare", "episodes", "rewards"], POLL = 2000; // milliseconds
  const root = document.getElementById("view"), tabs = document.getElementById("tabs"), runs = document.getElementById("run");
  let tab = null, version = "";

  // The URL fragment holds the page and its parameters, so bookmarks and the back button work.
  function read() {
    const [name, params] = location.hash.slice(1).split("?");
    covey.route = Object.fromEntries(new URLSearchParams(params || ""));
    return TABS.includes(name) ? name : state.runs.length > 1 ? "runs" : "overview";
  }
  const write = (name, params) => `#${name}?${new URLSearchParams(Object.entries(params).filter(([, v]) => v !== undefined))}`;
  covey.go = (to) => { location.hash = write(to.tab || tab, { run: state.run, id: to.id }); };
  covey.note = (params) => { history.replaceState(null, "", write(tab, { run: state.run, ...params })); covey.route = { run: state.run, ...params }; };
  covey.evidence = async (name, span) => {
    state.mark = { name, span };
    if (tab !== "overview") { covey.go({ tab: "overview" }); return; }
    covey.views.overview.built = "";
    await guarded(() => covey.views.overview.update());
    const card = document.querySelector(".card.marked");
    if (card) card.scrollIntoView({ block: "center" });
  };

  // Errors are shown on the page.
  async function guarded(work) {
    try { await work(); } catch (error) {
      root.querySelectorAll(".broken").forEach((node) => node.remove());
      root.prepend(h("p", { class: "broken bad", role: "alert", text: `Error: ${error.message}` }));
    }
  }

  async function show() {
    const wanted = read(), run = Number(covey.route.run ?? state.runs.length - 1), same = wanted === tab && run === state.run;
    if (same && covey.views[tab].routed) return guarded(() => covey.views[tab].routed());
    if (same) return undefined;
    if (tab && covey.views[tab].unmount) covey.views[tab].unmount();
    if (run !== state.run && tab) state.mark = null;
    tab = wanted;
    state.run = Math.max(0, Math.min(run, state.runs.length - 1));
    runs.value = String(state.run);
    for (const button of tabs.children) {
      button.setAttribute("aria-selected", String(button.dataset.tab === tab));
      button.tabIndex = button.dataset.tab === tab ? 0 : -1;
    }
    version = currentVersion();
    root.className = tab === "episodes" ? "split" : "";
    root.replaceChildren();
    root.scrollTop = 0;
    await guarded(() => covey.views[tab].mount(root));
    const card = tab === "overview" && state.mark && document.querySelector(".card.marked");
    if (card) card.scrollIntoView({ block: "center" });
    return undefined;
  }

  function list(found) {
    const text = (run) => `${run.label}  (${run.name})`, names = (all) => all.map(text).join("\n");
    if (names(found) !== names(state.runs) || !runs.children.length) {
      runs.replaceChildren(...found.map((run) => h("option", { value: run.id, text: text(run) })).reverse());
      runs.value = String(state.run);
    }
    state.runs = found;
  }

  // Changes when the data behind the current page changes.
  function currentVersion() {
    const run = state.runs[state.run];
    if (tab === "runs") return JSON.stringify(state.runs);
    if (tab === "compare") return state.runs.map((other) => other.version).join();
    return covey.views[tab].reads === "episodes" ? `${run.version}.${run.episodes}` : run.version;
  }

  async function poll() {
    if (document.hidden) return;
    await guarded(async () => {
      list((await covey.ask("runs")).runs);
      const now = currentVersion();
      if (now !== version) { version = now; await covey.views[tab].update(); }
    });
  }

  function theme(name) {
    document.documentElement.dataset.theme = name;
    try { localStorage.setItem("covey-theme", name); } catch { /* no storage for a local file */ }
    if (tab && covey.views[tab].redraw) covey.views[tab].redraw();
  }

  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName) && document.activeElement.type !== "checkbox";
    if (typing) { if (event.key === "Escape") document.activeElement.blur(); return; }
    if (TABS[+event.key - 1]) { covey.go({ tab: TABS[+event.key - 1] }); event.preventDefault(); return; }
    if (event.key === "t") { flip(); return; }
    const view = covey.views[tab];
    if (view.key && view.key(event)) event.preventDefault();
  }
  const flip = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

  async function start() {
    let kept = null;
    try { kept = localStorage.getItem("covey-theme"); } catch { /* as above */ }
    theme(kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
    tabs.append(...TABS.map((name, i) => h("button", { role: "tab", "data-tab": name, onclick: () => covey.go({ tab: name }) }, covey.views[name].title, h("kbd", { text: String(i + 1), "aria-hidden": "true" }))));
    runs.addEventListener("change", () => { location.hash = write(tab === "runs" ? "overview" : tab, { run: runs.value }); });
    document.getElementById("theme").addEventListener("click", flip);
    document.addEventListener("keydown", key);
    addEventListener("hashchange", show);
    const found = (await covey.ask("runs")).runs;
    state.run = found.length - 1;
    list(found);
    tab = null;
    await show();
    document.documentElement.dataset.ready = "1";
    if (!covey.offline) setInterval(poll, POLL);
  }
  guarded(start);
})(window.covey);

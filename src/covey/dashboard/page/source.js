"use strict";
// The data source: the server, or the data inside a report file.
(function (covey) {
  const inline = document.getElementById("inline");

  async function ask(name, params = {}) {
    const kept = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
    const words = new URLSearchParams(kept.map(([key, value]) => [key, value === true ? "1" : String(value)]));
    const reply = await fetch(`api/${name}?${words}`, { credentials: "same-origin" });
    if (!reply.ok) throw new Error(await reply.text());
    return reply.json();
  }

  // The address of an image of an episode; null in a report file, which has no images.
  covey.image = (name) => (inline ? null : `api/image?${new URLSearchParams({ run: String(covey.state.run ?? 0), name })}`);

  function fits(row, q) {
    const within = (value, low, high) =>
      (low === "" || low === undefined || (value !== null && value >= +low)) && (high === "" || high === undefined || (value !== null && value <= +high));
    const part = (q.task || "").toLowerCase();
    return within(row.reward, q.min_reward, q.max_reward) && within(row.length, q.min_length, q.max_length) && within(row.step, q.first_step, q.last_step)
      && (!part || row.task.toLowerCase().includes(part) || row.question.toLowerCase().includes(part))
      && (!q.stop || row.stop === q.stop) && (!q.tool_errors || row.tool_errors > 0) && (!q.failed || row.failed)
      && (!q.text || row.said.includes(q.text));
  }

  // The part of the comparison of all runs that is about some of them.
  function compared(data, ids) {
    const places = ids.map((id) => 1 + data.runs.findIndex((run) => run.run.state.id === id));
    const settings = data.compare.settings.map((row) => [row[0], ...places.map((place) => row[place])]);
    return {
      settings: settings.filter((row) => row.slice(2).some((value) => JSON.stringify(value) !== JSON.stringify(row[1]))),
      unpaired: data.compare.unpaired.filter((one) => ids.includes(one.first) && ids.includes(one.second)),
      paired: data.compare.paired,
    };
  }

  // Answers the requests of the API from the data in the file.
  function fromFile(data) {
    for (const run of data.runs) {
      for (const row of run.rows) row.said = JSON.stringify(run.episodes[row.id].messages.map((m) => m.content));
    }
    const of = (q) => data.runs[q.run || 0];
    const answers = {
      runs: () => ({ runs: data.runs.map((run) => run.run.state) }),
      run: (q) => of(q).run,
      series: (q) => of(q).series[q.kind || "step"],
      episode: (q) => of(q).episodes[q.id],
      compare: (q) => compared(data, String(q.runs).split(",").map(Number)),
      scatter: (q) => of(q).scatter[`${q.x}|${q.y}`] || of(q).scatter["length|reward"],
      episodes: (q) => {
        const run = of(q), rows = run.rows.filter((row) => fits(row, q)), key = q.sort || "step", sign = q.order === "up" ? 1 : -1;
        rows.sort((a, b) => (a[key] === null) - (b[key] === null) || sign * (a[key] - b[key]));
        return { total: rows.length, recorded: run.recorded, kept: run.rows.length, indexed: 1, stops: run.stops, rows: rows.slice(q.offset, q.offset + q.limit) };
      },
      related: (q) => {
        const run = of(q), me = run.rows.find((row) => row.id === +q.id);
        const rows = run.rows.filter((row) => row.task === me.task && (q.kind === "task" || (row.step === me.step && row.group === me.group)));
        rows.sort((a, b) => a.id - b.id);
        return { total: rows.length, rows };
      },
    };
    return async (name, params = {}) => answers[name](params);
  }

  covey.offline = inline !== null;
  covey.ask = inline ? fromFile(JSON.parse(inline.textContent)) : ask;
})(window.covey);

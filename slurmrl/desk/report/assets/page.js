"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLORS = ["#3b7dd8", "#e07b24", "#2f9e5b", "#c9416a", "#8658c9", "#1a9ba8", "#a58a16", "#7a6a5d"];
  const CAUSES = { finished: "#2f9e5b", running: "#3b7dd8", time_limit: "#8a94a3", preemption: "#8a94a3",
    interrupt: "#8a94a3", cancelled: "#a58a16" };
  const FAILED = "#c9416a";
  const FIRST = ["reward", "eval/reward", "accuracy", "eval/accuracy", "loss", "eval/loss", "kl", "entropy", "response_length"];
  const PAGE = 20;
  const trials = data.trials.map((trial, i) => ({ ...trial, color: COLORS[i % COLORS.length] }));
  const several = trials.length > 1;

  // -- elements: text is only ever set as text ------------------------------------------------

  function el(tag, options = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(options)) {
      if (key === "style") Object.assign(node.style, value);
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node[key] = value;
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  function table(headings, rows) {
    const cell = (value) => value instanceof Node ? value : document.createTextNode(value ?? "");
    return el("div", { className: "table" }, el("table", {},
      el("thead", {}, el("tr", {}, ...headings.map((text) => el("th", { textContent: text })))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((value) =>
        value instanceof HTMLTableCellElement ? value : el("td", {}, cell(value))))))));
  }

  const text = (value) => el("td", { className: "text", textContent: value ?? "" });
  const key = (value) => el("td", { className: "key", textContent: value });
  const swatch = (color) => el("span", { className: "swatch", style: { background: color } });
  const clock = (seconds) => new Date(seconds * 1000).toLocaleString();

  function number(value) {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(2);
    return value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) >= 1e4 ? 7 : 4 });
  }

  function span(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds === 0) return "0 s";
    for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]])
      if (seconds >= 2 * size) return `${number(seconds / size)} ${unit}`;
    return seconds < 1 ? `${number(seconds * 1000)} ms` : `${number(seconds)} s`;
  }

  function size(bytes) {
    if (bytes === null) return "–";
    let value = bytes;
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (value < 1000) return `${value.toPrecision(3)} ${unit}`;
      value /= 1000;
    }
    return `${value.toPrecision(3)} TB`;
  }

  const main = document.getElementById("main"), nav = document.getElementById("nav");

  function section(id, title, ...children) {
    nav.append(el("a", { href: `#${id}`, textContent: title }));
    main.append(el("section", { id }, el("h2", { textContent: title }), ...children));
  }

  const heading = (trial) => several ? el("h3", {}, swatch(trial.color), trial.name) : null;

  // -- head -----------------------------------------------------------------------------------

  document.title = `slurmrl: ${trials.map((trial) => trial.name).join(", ")}`;
  document.getElementById("head").append(
    el("h1", { textContent: several ? `${trials.length} trials` : trials[0].name }),
    el("div", { className: "cards" }, ...trials.map((trial) => {
      const status = trial.status;
      return el("div", { className: "card" },
        el("div", {}, swatch(trial.color), el("span", { className: "name", textContent: trial.name }),
          el("span", { className: `state ${status.state}`, textContent: status.state })),
        el("div", { textContent: `step ${status.step} of ${status.total_steps ?? "?"}` }),
        el("div", { className: "dim", textContent: status.diagnosis }));
    })));
  document.getElementById("foot").textContent =
    `Written ${clock(data.written)} by slurmrl ${data.version}. The file holds all of its data and loads nothing.`;

  // -- curves ---------------------------------------------------------------------------------

  const view = { smooth: 0, log: false, filter: "" };
  const charts = new Map(); // place in the page -> chart or null
  const names = [...new Set(trials.flatMap((trial) => Object.keys(trial.curves)))];
  const has = new Set(names);
  const isBound = (name) => /\/(low|high)$/.test(name) && has.has(name.replace(/\/(low|high)$/, ""));

  function groupOf(name) {
    if (FIRST.includes(name)) return "main";
    return name.includes("/") ? name.split("/")[0] : "training";
  }

  function smoothed(values) {
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      weight = view.smooth * weight + (1 - view.smooth); // without a bias towards 0 of the first values
      return mean += (value - mean) * ((1 - view.smooth) / weight); // exact for constants
    });
  }

  // Ticks that differ have labels that differ: as many decimals as their distance needs.
  function tickLabels(ticks) {
    const known = ticks.filter((tick) => tick !== null), most = Math.max(...known.map(Math.abs), 0);
    const step = known.length > 1 && !view.log ? Math.abs(known[1] - known[0]) : 0;
    if (!step || most >= 1e7 || most < 1e-3) return ticks.map((tick) => tick === null ? "" : tick === 0 ? "0" : number(tick));
    const isWhole = (value) => value > 0.5 && Math.abs(value - Math.round(value)) < 1e-4;
    let decimals = 0; // 2 for a distance of 0.25
    while (decimals < 12 && !isWhole(step * 10 ** decimals)) decimals += 1;
    return ticks.map((tick) => tick === null ? "" : tick.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }));
  }

  // A constant gets room above and below it, and so does what rounding alone makes of one.
  function valueRange(u, low, high) {
    if (low === null || high === null) return [0, 1];
    const middle = (low + high) / 2, room = Math.max(Math.abs(middle) * 1e-5, Number.MIN_VALUE);
    if (high - low < 2 * room) return middle === 0 ? [-1, 1] : [middle - Math.abs(middle) / 10, middle + Math.abs(middle) / 10];
    return uPlot.rangeNum(low, high, 0.1, true);
  }

  const stepRange = (u, low, high) => low === high ? [low - 1, high + 1] : [low, high];
  const WHOLE_STEPS = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
  const labelWidth = (u, labels) => 24 + 7 * Math.max(...(labels ?? []).map((label) => label.length), 3);

  const usable = (values) => view.log ? values.map((value) => value > 0 ? value : null) : values;

  function style(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function parts(name) {
    const tables = [], series = [{}], bands = [], told = [];
    for (const trial of trials) {
      const curve = trial.curves[name];
      if (!curve) continue;
      const points = { show: curve.x.length <= 40, size: 5 };
      const add = (one, options) => {
        tables.push([one.x, usable(options.smooth ? smoothed(one.y) : one.y)]);
        series.push({ points: { show: false }, ...options });
        return series.length - 1;
      };
      const low = trial.curves[`${name}/low`], high = trial.curves[`${name}/high`];
      if (low && high) {
        const edge = { stroke: "transparent", width: 0 };
        bands.push({ series: [add(high, edge), add(low, edge)], fill: `${trial.color}2e` });
      }
      if (view.smooth) add(curve, { stroke: `${trial.color}50`, width: 1 });
      const place = add(curve, { stroke: trial.color, width: 1.8, points, smooth: view.smooth > 0, spanGaps: false });
      told.push({ trial, place });
    }
    return { tables, series, bands, told };
  }

  function draw(box, name) {
    const { tables, series, bands, told } = parts(name);
    const host = box.querySelector(".plot"), values = box.querySelector(".values");
    host.replaceChildren();
    const aligned = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const dim = style("--dim"), grid = { stroke: style("--grid"), width: 1 };
    const axis = { stroke: dim, grid, ticks: grid, font: "12px system-ui, sans-serif" };
    const starts = several ? [] : trials[0].status.incarnations.slice(1).map((one) => one.from_step);
    const say = (u) => {
      const at = u.cursor.idx;
      values.replaceChildren(...told.map(({ trial, place }) => {
        const column = u.data[place];
        let i = at ?? column.length - 1;
        while (i > 0 && (column[i] === undefined || (at === null && column[i] === null))) i -= 1;
        const step = several && at === null ? "" : `step ${u.data[0][i]}: `;
        return el("span", {}, swatch(trial.color), `${step}${number(column[i])}`);
      }));
    };
    const marks = (u) => {
      u.ctx.save();
      u.ctx.strokeStyle = dim;
      u.ctx.setLineDash([4, 4]);
      for (const step of starts) {
        const x = u.valToPos(step, "x", true);
        if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
        u.ctx.beginPath();
        u.ctx.moveTo(x, u.bbox.top);
        u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
        u.ctx.stroke();
      }
      u.ctx.restore();
    };
    charts.get(box)?.destroy();
    charts.set(box, new uPlot({
      width: Math.max(box.clientWidth - 18, 200), height: 215, series, bands,
      scales: { x: { time: false, range: stepRange }, y: view.log ? { distr: 3 } : { range: valueRange } },
      axes: [{ ...axis, size: 30, incrs: WHOLE_STEPS }, { ...axis, size: labelWidth, values: (u, ticks) => tickLabels(ticks) }],
      cursor: { sync: { key: "steps" }, points: { size: 6 } },
      legend: { show: false },
      hooks: { setCursor: [say], ready: [say], drawClear: [marks] },
    }, aligned, host));
  }

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries)
      if (entry.isIntersecting && charts.get(entry.target) === null) draw(entry.target, entry.target.dataset.name);
  }, { rootMargin: "300px" });

  function redraw() {
    for (const [box, chart] of charts) {
      chart?.destroy();
      charts.set(box, null);
      seen.unobserve(box);
      seen.observe(box);
    }
  }

  function curveSection() {
    const groups = new Map();
    for (const name of names.filter((one) => !isBound(one))) {
      const group = groupOf(name);
      groups.set(group, [...(groups.get(group) ?? []), name]);
    }
    groups.get("main")?.sort((a, b) => FIRST.indexOf(a) - FIRST.indexOf(b));
    const order = [...groups.keys()].sort((a, b) => (b === "main") - (a === "main") || (b === "training") - (a === "training"));
    const boxes = [];
    const blocks = order.map((group) => {
      const own = groups.get(group).map((name) => {
        const box = el("div", { className: "chart" },
          el("div", { className: "title", textContent: name }), el("div", { className: "plot" }), el("div", { className: "values" }));
        box.dataset.name = name;
        charts.set(box, null);
        seen.observe(box);
        boxes.push(box);
        return box;
      });
      return el("details", { open: group === "main" || group === "training" || group === "eval" || order.length <= 3 },
        el("summary", { textContent: `${group} (${own.length})` }), el("div", { className: "charts" }, ...own));
    });
    const shown = el("span", { className: "dim" });
    const smooth = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, id: "smooth" });
    const level = el("span", { textContent: "0" });
    smooth.addEventListener("input", () => { view.smooth = Number(smooth.value); level.textContent = smooth.value; redraw(); });
    const find = el("input", { type: "search", placeholder: "metrics, such as kl or eval", id: "metrics" });
    find.addEventListener("input", () => {
      const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const box of boxes) box.hidden = !words.every((word) => box.dataset.name.toLowerCase().includes(word));
      for (const block of blocks) {
        const left = [...block.querySelectorAll(".chart")].some((box) => !box.hidden);
        block.hidden = !left;
        if (words.length && left) block.open = true;
      }
    });
    const log = el("input", { type: "checkbox", id: "log", onchange: (event) => { view.log = event.target.checked; redraw(); } });
    const open = el("button", { textContent: "Open all", onclick: () => blocks.forEach((block) => { block.open = true; }) });
    const close = el("button", { textContent: "Close all", onclick: () => blocks.forEach((block) => { block.open = false; }) });
    const most = Math.max(...trials.map((trial) => trial.lines), 0);
    shown.textContent = `${most.toLocaleString("en")} steps at most. Drag to zoom, double-click to zoom out.`;
    section("curves", "Curves",
      el("div", { className: "tools" }, find, el("label", {}, "smoothing", smooth, level), el("label", {}, log, "logarithmic"), open, close, shown),
      ...(blocks.length ? blocks : [el("p", { className: "dim", textContent: "No metrics yet." })]));
    let width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  }

  // -- incarnations ---------------------------------------------------------------------------

  function lanes(rows, begin, end, show = span) {
    const whole = Math.max(end - begin, 1e-9), at = (time) => `${100 * (time - begin) / whole}%`;
    return el("div", {}, ...rows.map(({ label, bars, marks = [] }) => el("div", { className: "lane" },
      el("div", { className: "label", textContent: label, title: label }),
      el("div", { className: "track" },
        ...bars.map((bar) => el("div", { className: "bar", title: bar.title, textContent: bar.text,
          style: { left: at(bar.from), width: `${100 * (bar.to - bar.from) / whole}%`, background: bar.color } })),
        ...marks.map((mark) => el("div", { className: "mark", title: mark.title, style: { left: at(mark.at) } }))))),
      el("div", { className: "axis" }, ...[0, 0.25, 0.5, 0.75, 1].map((part) => el("span", { textContent: show(part * whole) }))));
  }

  function facts(trial) {
    const { status } = trial, timing = status.timing ?? {};
    const ratio = timing.effective_ratio;
    const rows = [
      ["state", `${status.state}: ${status.diagnosis}`],
      ["useful time", ratio === null || ratio === undefined ? "–" : `${(100 * ratio).toFixed(0)} %; the rest: queue, start-up, lost steps`],
      ["a step", span(timing.step_s)],
      ["start-up", span(timing.start_s)],
      ["newest commits", timing.commit_s === null || timing.commit_s === undefined ? "–" : `${span(timing.commit_s)}, training waited ${span(timing.commit_stall_s)}`],
      ["run directory", status.run],
      ...(status.export ? [["exported model", status.export]] : []),
      ...(status.reason ? [["reason", status.reason]] : []),
    ];
    return table(["", ""], rows.map(([name, value]) => [name, text(value)]));
  }

  function incarnationsOf(trial) {
    const told = trial.status.incarnations;
    if (!told.length) return [heading(trial), facts(trial), el("p", { className: "dim", textContent: "No incarnation has begun." })];
    const last = told[told.length - 1], begin = told[0].began;
    const end = Math.max(...told.map((one) => one.began + one.seconds));
    const bars = told.map((one) => ({ from: one.began, to: one.began + one.seconds, text: `#${one.number}`,
      color: CAUSES[one.cause] ?? FAILED, title: `incarnation ${one.number}: ${one.how}` }));
    const marks = trial.commits.filter((one) => one.time >= begin && one.time <= end)
      .map((one) => ({ at: one.time, title: `commit of step ${one.step}` }));
    const rows = told.map((one, i) => {
      const before = told[i - 1];
      const idle = before ? Math.max(one.began - before.began - before.seconds, 0) : null;
      const lost = one === last && one.cause === "running" ? 0 : Math.max(one.to_step - Math.max(one.commit ?? one.from_step, one.from_step), 0);
      const until = one.began + one.seconds, kept = trial.commits.map((commit) => commit.time).filter((at) => at >= one.began && at <= until);
      return [one.number, one.job_id ?? "–", one.link ?? "–", one.hosts.join(", "), one.to_step > one.from_step ? `${one.from_step + 1} to ${one.to_step}` : "–",
        one.commit ?? "–", idle === null ? "–" : span(idle), span(one.seconds),
        lost ? `${lost} ${lost === 1 ? "step" : "steps"}, ${span(until - Math.max(one.began, ...kept))}` : "–", text(one.how)];
    });
    return [heading(trial), facts(trial),
      el("p", { className: "dim", textContent: `${clock(begin)} to ${clock(end)}; lines mark commits` }),
      lanes([{ label: "incarnations", bars, marks }], begin, end),
      table(["#", "job", "link", "hosts", "steps", "commit", "waited before", "took", "lost", "how it ended"], rows),
      trial.status.traceback ? el("pre", { textContent: trial.status.traceback }) : null];
  }

  // -- time -----------------------------------------------------------------------------------

  function timeOf(trial) {
    const found = [heading(trial)];
    if (trial.calls.length) {
      const longest = Math.max(trial.step_s ?? 0, ...trial.calls.map((call) => call.seconds));
      const ranks = (call) => call.ranks.length ? ` on ${call.ranks.length > 8 ? `${call.ranks.length} ranks` : `rank ${call.ranks.join(", ")}`}` : "";
      found.push(
        el("p", { className: "dim", textContent: "Mean seconds of each call in the newest 50 steps, below the seconds of the whole step. Calls of different ranks may run at the same time." }),
        lanes([...(trial.step_s === null ? [] : [{ label: "the step", bars: [{ from: 0, to: trial.step_s, text: span(trial.step_s), color: "#7a8594", title: "the whole step" }] }]),
          ...trial.calls.map((call, i) => ({ label: call.name, bars: [{ from: 0, to: call.seconds, text: `${span(call.seconds)}${ranks(call)}`,
            color: COLORS[i % COLORS.length], title: `${call.name}${ranks(call)}: ${span(call.seconds)}` }] }))], 0, longest));
      found.push(...throughputOf(trial));
    } else found.push(el("p", { className: "dim", textContent: "No times of calls yet." }));
    found.push(...timelineOf(trial), ...memoryOf(trial));
    if (trial.tasks.length) {
      const begin = Math.min(...trial.tasks.map((task) => task.began));
      const ends = trial.tasks.map((task) => task.ended ?? data.written), end = Math.max(...ends);
      const rows = new Map();
      trial.tasks.forEach((task, i) => rows.set(task.task, [...(rows.get(task.task) ?? []), { from: task.began, to: ends[i],
        text: `${task.attempt}${task.host ? ` on ${task.host}` : ""}`, color: task.ended === null ? CAUSES.running : "#8a94a3",
        title: `attempt ${task.attempt}${task.how ? `: ${task.how}` : ""}` }]));
      found.push(el("h3", { textContent: "Rollout tasks" }), lanes([...rows].map(([label, bars]) => ({ label, bars })), begin, end));
    }
    return [...found, ...(trial.rollouts ? groupsOfTasks(trial.rollouts) : [])];
  }

  function throughputOf(trial) {
    const tera = (call) => call.flops === null ? "–" : number(call.flops / call.seconds / Math.max(call.ranks.length, 1) / 1e12);
    const known = trial.calls.some((call) => call.predicted_s !== null);
    if (!trial.calls.some((call) => call.flops !== null)) return [];
    return [table(["call", "measured", "TFLOP/s of a rank", ...(known ? ["predicted", "predicted of measured"] : [])], trial.calls.map((call) => [call.name, span(call.seconds), tera(call),
      ...(known ? [span(call.predicted_s), call.predicted_s ? `${number(100 * call.predicted_s / call.seconds)} %` : "–"] : [])])),
    el("p", { className: "dim", textContent: `${trial.tokens_per_s === null ? "" : `${number(trial.tokens_per_s)} tokens/s. `}TFLOP/s counts the operations of the plan, scaled to the tokens of these steps. ${known ? "Predictions are for the mean lengths of these steps, with" : "No seconds were predicted:"} ${trial.predictions}.` })];
  }

  function timelineOf(trial) {
    if (!trial.timeline.length) return [];
    const box = el("div");
    const calls = [...new Set(trial.timeline.flatMap((step) => step.calls.map((call) => call.name)))];
    const color = (name) => COLORS[calls.indexOf(name) % COLORS.length];
    const pick = el("select", { className: "steps" }, el("option", { value: "", textContent: `the newest ${trial.timeline.length} steps` }),
      ...trial.timeline.map((step) => el("option", { value: step.step, textContent: `step ${step.step}` })));
    pick.value = trial.timeline[trial.timeline.length - 1].step;
    function show() {
      const rows = new Map();
      for (const step of trial.timeline.filter((one) => pick.value === "" || String(one.step) === pick.value))
        for (const call of step.calls) for (const [rank, from, seconds] of call.ranks)
          rows.set(rank, [...(rows.get(rank) ?? []), { from, to: from + seconds, text: call.name, color: color(call.name),
            title: `${call.name} of step ${step.step} on rank ${rank}: ${span(seconds)}` }]);
      const bars = [...rows.values()].flat();
      if (!bars.length) { box.replaceChildren(el("p", { className: "dim", textContent: "No rank took part." })); return; }
      const begin = Math.min(...bars.map((bar) => bar.from)), end = Math.max(...bars.map((bar) => bar.to));
      box.replaceChildren(lanes([...rows].sort((a, b) => a[0] - b[0]).map(([rank, own]) => ({ label: `rank ${rank}`, bars: own })), begin, end));
    }
    pick.addEventListener("input", show);
    show();
    return [el("h3", { textContent: "Calls on each rank" }),
      el("div", { className: "tools" }, pick, ...calls.map((name) => el("span", {}, swatch(color(name)), name))), box,
      el("p", { className: "dim", textContent: "The times come from the clocks of the hosts. Between calls, a rank waits for other ranks or reads its batch." })];
  }

  function memoryOf(trial) {
    if (!trial.peaks.length) return [];
    const plan = trial.planned.memory ?? {}, planned = plan.bytes ?? null, gpus = trial.planned.gpus > 0;
    const whole = gpus ? plan.gpu_bytes ?? null : null;
    const most = Math.max(1, planned ?? 0, whole ?? 0, ...trial.peaks.map(([, bytes]) => bytes));
    const bar = (bytes, color, title) => [{ from: 0, to: bytes, text: size(bytes), color, title: `${title}: ${size(bytes)}` }];
    return [el("h3", { textContent: gpus ? "Memory of each GPU" : "Memory of each process" }),
      lanes([...(planned === null ? [] : [{ label: `plan, rank ${plan.fullest_gpu ?? 0}`, bars: bar(planned, "#7a8594", "the plan's estimate of the fullest") }]),
        ...trial.peaks.map(([rank, bytes]) => ({ label: `rank ${rank}`, bars: bar(bytes, whole !== null && bytes > whole ? FAILED : COLORS[1], "maximum") }))], 0, most, size),
      el("p", { className: "dim", textContent: (gpus ? "Maximum memory that torch held on the GPU" : "Maximum memory of the process, with code and libraries")
        + (planned === null ? "." : ", and the plan's estimate of models and activations on the fullest rank.") }),
    ];
  }

  function groupsOfTasks(said) {
    const ages = (counts) => Object.entries(counts).map(([age, count]) => [Number(age), count]).sort((a, b) => a[0] - b[0]);
    const old = (age) => age === 1 ? "1 step" : `${age} steps`;
    const taken = ages(said.trained), all = taken.reduce((sum, [, count]) => sum + count, 0);
    const most = Math.max(1, ...taken.map(([, count]) => count)), share = (count) => `${number(100 * count / all)} %`;
    const reasons = (what, counts) => Object.entries(counts).map(([why, count]) => [what, why, number(count)]);
    const again = [["damaged", "samples could not be read"], ["aborted", "would have been too stale"], ["given_back", "given back"], ["lost", "task lost or retired"]]
      .filter(([name]) => said[name]).map(([name, why]) => ["generated again", why, number(said[name])]);
    const rows = [...ages(said.finished).map(([age, count]) => ["wait for a step", `${old(age)} old`, number(count)]),
      ...reasons("dropped", said.dropped), ...reasons("result rejected", said.refused), ...again];
    return [
      el("h3", { textContent: "Staleness of groups" }),
      el("p", { className: "dim", textContent: taken.length ? "Groups that steps took, by the age of their oldest weights in steps, since the last incarnation began."
        : "No step has taken a group since the last incarnation began." }),
      taken.length ? lanes(taken.map(([age, count]) => ({ label: old(age), bars: [{ from: 0, to: count,
        text: `${number(count)}, ${share(count)}`, color: COLORS[0], title: `${count} groups with weights ${old(age)} old` }] })), 0, most, number) : null,
      rows.length ? table(["groups", "reason", "count"], rows) : null,
      said.tasks.length ? el("p", { className: "dim", textContent: "State of the rollout tasks in the last report of the master." }) : null,
      said.tasks.length ? table(["task", "attempt", "host", "weights", "groups in work"],
        said.tasks.map((task) => [task.task, task.attempt, task.host || "–", task.version || "none yet", task.leased])) : null].filter(Boolean);
  }

  // -- checkpoints ----------------------------------------------------------------------------

  function commitsOf(trial) {
    if (!trial.commits.length) return [heading(trial), el("p", { className: "dim", textContent: "No checkpoints yet." })];
    const kept = trial.commits.filter((one) => !one.deleted).length;
    return [heading(trial), el("p", { className: "dim", textContent: `${trial.commits.length} commits, ${kept} kept` }),
      table(["step", "incarnation", "time", "size", "took", "training waited", "directory", ""],
        trial.commits.slice().reverse().slice(0, 200).map((one) => [one.step, one.incarnation, clock(one.time), size(one.bytes),
          span(one.seconds), span(one.stall_s), key(one.directory), [one.deleted ? "deleted" : "", one.exported ? "exported" : ""].filter(Boolean).join(", ")]))];
  }

  // -- samples --------------------------------------------------------------------------------

  function groupsOf() {
    const groups = new Map();
    for (const trial of trials) for (const row of trial.samples.rows) {
      const evaluation = row.evaluation === true, name = `${trial.name}\n${evaluation}\n${row.suite ?? ""}\n${row.step}\n${row.id ?? groups.size}`;
      if (!groups.has(name)) groups.set(name, { trial, evaluation, suite: row.suite, step: row.step, id: row.id, prompt: row.rendered ?? row.prompt, answer: row.answer, rows: [] });
      groups.get(name).rows.push(row);
    }
    for (const group of groups.values()) {
      const rewards = group.rows.map((row) => row.reward).filter((reward) => typeof reward === "number");
      group.mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
      group.spread = rewards.length ? Math.max(...rewards) - Math.min(...rewards) : null;
      group.text = group.rows.map((row) => row.completion).concat(group.prompt, String(group.id)).join("\n").toLowerCase();
    }
    return [...groups.values()];
  }

  const TINTS = { advantages: "advantage", logprobs: "log-probability", versions: "version", "": "no color" };

  function tokensOf(row, tint, scale) {
    const { masked = [], advantages = [], logprobs = [] } = row.values ?? {}, texts = row.tokens, left = row.left_out;
    const { names = [], drawn_by: drawn = [] } = row.versions ?? {};
    const version = (i) => names[drawn[i]] ?? null;
    const strength = (value, most) => Math.min(Math.abs(value) / (most || 1), 1) * 0.6;
    const COLOR = {
      advantages: (i) => advantages[i] ? `rgba(${advantages[i] > 0 ? "47, 158, 91" : "201, 65, 106"}, ${strength(advantages[i], scale)})` : "",
      logprobs: (i) => typeof logprobs[i] === "number" ? `rgba(224, 123, 36, ${strength(logprobs[i], 5)})` : "",
      versions: (i) => version(i) === null ? "" : `${COLORS[drawn[i] % COLORS.length]}55`,
      "": () => "",
    }[tint];
    return el("div", { className: "said" }, ...texts.map((words, i) => el("span", { textContent: words, className: masked[i] ? "tok masked" : "tok",
      style: { background: masked[i] && tint !== "versions" ? "" : COLOR(i) },
      title: [masked[i] ? "masked: not in the loss" : "", advantages[i] === undefined ? "" : `advantage ${number(advantages[i])}`,
        logprobs[i] === undefined ? "" : `log-probability ${number(logprobs[i])}`, version(i) === null ? "" : `version ${version(i)}`].filter(Boolean).join(", ") })),
    left ? el("span", { className: "dim", textContent: ` … ${number(left)} more tokens` }) : null);
  }

  function completion(row, low, high, tint, scale) {
    const share = typeof row.reward === "number" && high > low ? (row.reward - low) / (high - low) : null;
    const color = share === null ? "var(--line)" : `hsl(${Math.round(120 * share)} 60% 45%)`;
    const plain = (row.turns ?? [{ wrote: row.completion }]).map((turn) => turn.read !== undefined
      ? el("div", { className: "said read", textContent: turn.read, title: "read, not written by the policy: masked in training" })
      : el("div", { className: "said", textContent: turn.wrote, title: turn.reward ? `this turn earned ${number(turn.reward)}` : "" }));
    const valued = row.tokens?.length && (row.values || row.versions);
    const said = !valued ? plain : [tokensOf(row, tint, scale),
      row.left_out || row.turns ? el("details", {}, el("summary", { textContent: "whole text" }), ...plain) : null];
    const known = ["step", "id", "index", "prompt", "rendered", "completion", "answer", "reward", "finished", "turns", "parts", "tokens", "left_out", "values", "versions"];
    const more = Object.entries(row).filter(([name, value]) => !known.includes(name) && (typeof value === "number" || typeof value === "string"));
    return el("div", { className: "one", style: { borderTopColor: color } },
      el("div", { className: "facts" }, typeof row.reward !== "number" ? null : el("span", {}, "reward ", el("b", { textContent: number(row.reward) })),
        ...Object.entries(row.parts ?? {}).map(([name, value]) => el("span", { textContent: `${name} ${number(value)}`, title: "a part of the reward, before its weight" })),
        row.finished === false ? el("span", { className: "warn", textContent: "cut off" }) : null,
        ...more.map(([name, value]) => el("span", { textContent: `${name} ${number(value)}` }))), ...said);
  }

  function sampleSection() {
    const groups = groupsOf();
    if (!groups.length) {
      section("samples", "Samples", el("p", { className: "dim", textContent: "No samples are kept; logging.samples sets how many." }));
      return;
    }
    const rewards = groups.flatMap((group) => group.rows.map((row) => row.reward)).filter((one) => typeof one === "number");
    const low = rewards.reduce((a, b) => Math.min(a, b), Infinity), high = rewards.reduce((a, b) => Math.max(a, b), -Infinity);
    const state = { page: 0 };
    const find = el("input", { type: "search", placeholder: "text of prompt or completion", id: "find" });
    const least = el("input", { type: "number", step: "any", placeholder: "from", id: "least" });
    const most = el("input", { type: "number", step: "any", placeholder: "to", id: "most" });
    const from = el("input", { type: "number", placeholder: "from", id: "from" });
    const to = el("input", { type: "number", placeholder: "to", id: "to" });
    const cut = el("input", { type: "checkbox", id: "cut" });
    const order = el("select", { id: "order" }, ...[["newest", "newest first"], ["oldest", "oldest first"], ["best", "highest reward"],
      ["worst", "lowest reward"], ["spread", "largest difference in a group"]].map(([value, words]) => el("option", { value, textContent: words })));
    const which = several ? el("select", { id: "trial" }, el("option", { value: "", textContent: "all trials" }),
      ...trials.map((trial) => el("option", { value: trial.name, textContent: trial.name }))) : null;
    const both = groups.some((group) => group.evaluation) && groups.some((group) => !group.evaluation);
    const phase = both ? el("select", { id: "phase" }, ...[["", "training and evaluation"], ["training", "training"], ["evaluation", "evaluation"]]
      .map(([value, words]) => el("option", { value, textContent: words }))) : null;
    const valued = groups.some((group) => group.rows.some((row) => row.tokens && (row.values || row.versions)));
    const tint = el("select", { id: "tint" }, ...Object.entries(TINTS).map(([value, words]) => el("option", { value, textContent: words })));
    const scaleOf = (group) => Math.max(...group.rows.flatMap((row) => (row.values?.advantages ?? []).map((one) => Math.abs(one ?? 0))), 0);
    const list = el("div", { id: "groups" }), count = el("span", { className: "dim", id: "count" });
    const back = el("button", { textContent: "Previous", onclick: () => { state.page -= 1; show(); } });
    const next = el("button", { textContent: "Next", id: "next", onclick: () => { state.page += 1; show(); } });
    const ORDERS = { newest: (a, b) => b.step - a.step, oldest: (a, b) => a.step - b.step, best: (a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity),
      worst: (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity), spread: (a, b) => (b.spread ?? -1) - (a.spread ?? -1) };
    const within = (value, low, high) => (low.value === "" || value >= Number(low.value)) && (high.value === "" || value <= Number(high.value));

    function show() {
      const words = find.value.toLowerCase();
      const chosen = groups.filter((group) => group.text.includes(words) && (!which?.value || group.trial.name === which.value)
        && (!phase?.value || group.evaluation === (phase.value === "evaluation")) && within(group.step, from, to) && group.rows.some((row) => within(row.reward ?? NaN, least, most) || (least.value === "" && most.value === ""))
        && (!cut.checked || group.rows.some((row) => row.finished === false))).sort(ORDERS[order.value]);
      const pages = Math.max(Math.ceil(chosen.length / PAGE), 1);
      state.page = Math.min(Math.max(state.page, 0), pages - 1);
      back.disabled = state.page === 0;
      next.disabled = state.page >= pages - 1;
      count.textContent = `${chosen.length.toLocaleString("en")} prompts, page ${state.page + 1} of ${pages.toLocaleString("en")}`;
      list.replaceChildren(...chosen.slice(state.page * PAGE, (state.page + 1) * PAGE).map((group) => el("div", { className: "group" },
        el("div", { className: "facts" }, several ? el("span", {}, swatch(group.trial.color), group.trial.name) : null,
          el("span", { textContent: group.evaluation ? `evaluation${group.suite ? ` of ${group.suite}` : ""} at step ${group.step}` : `step ${group.step}` }), el("span", { textContent: `id ${group.id ?? "–"}` }),
          group.mean === null ? null : el("span", { textContent: `mean reward ${number(group.mean)}` }),
          group.answer === undefined || group.answer === null ? null : el("span", { textContent: `answer: ${String(group.answer).slice(0, 300)}` })),
        el("div", { className: "said prompt", textContent: group.prompt }),
        el("div", { className: "side" }, ...group.rows.map((row) => completion(row, low, high, tint.value, scaleOf(group)))))));
    }

    for (const input of [find, least, most, from, to, cut, order, which, phase, tint]) input?.addEventListener("input", () => { state.page = 0; show(); });
    const left = trials.filter((trial) => trial.samples.shown < trial.samples.steps)
      .map((trial) => `${trial.name}: ${trial.samples.shown} of ${trial.samples.steps} steps are shown`);
    section("samples", "Samples",
      el("div", { className: "tools" }, find, which, phase, el("label", {}, "reward", least, most), el("label", {}, "step", from, to),
        el("label", {}, cut, "cut off"), el("label", {}, "sort", order), valued ? el("label", {}, "tokens by", tint) : null),
      el("div", { className: "tools" }, back, next, count),
      left.length ? el("p", { className: "dim", textContent: left.join("; ") }) : null, list);
    show();
  }

  // -- settings and environment ---------------------------------------------------------------

  const value = (one) => one === null || one === undefined ? "–" : typeof one === "string" ? one : JSON.stringify(one);

  function settingSection() {
    const different = Object.entries(data.differences);
    section("settings", "Settings",
      several ? el("h3", { textContent: `Differences (${different.length})` }) : null,
      several ? (different.length ? table(["setting", ...trials.map((trial) => trial.name)],
        different.map(([name, values]) => [key(name), ...values.map((one) => text(value(one)))]))
        : el("p", { className: "dim", textContent: "All settings are the same." })) : null,
      ...trials.map((trial) => el("details", {}, el("summary", { textContent: several ? `Configuration of ${trial.name}` : "Configuration" }),
        el("pre", { textContent: trial.config || "not readable" }))));
  }

  function diff(words) {
    return el("pre", {}, ...words.split("\n").map((line) => el("div", { textContent: line || " ",
      className: line.startsWith("+") ? "add" : line.startsWith("-") ? "cut" : "" })));
  }

  function environmentOf(trial) {
    const { packages = {}, environment = {}, git = {}, command = [], ...rest } = trial.environment;
    const plain = Object.entries(rest).filter(([, one]) => one !== null && !(Array.isArray(one) && !one.length));
    const rows = [["command", command.join(" ")], ...plain.map(([name, one]) => [name, name === "time" ? clock(one) : value(one)]),
      ...Object.entries(git).map(([name, one]) => [`git, ${name}`, value(one)])];
    const details = (title, child) => el("details", {}, el("summary", { textContent: title }), child);
    return [heading(trial), Object.keys(trial.environment).length ? table(["", ""], rows.map(([name, one]) => [name, text(one)])) :
      el("p", { className: "dim", textContent: "Nothing is recorded." }),
    ...Object.entries(trial.diffs).map(([name, words]) => details(`Uncommitted code, ${name}`, diff(words))),
    Object.keys(packages).length ? details(`Packages (${Object.keys(packages).length})`,
      el("pre", { textContent: Array.isArray(packages) ? packages.join("\n") : Object.entries(packages).map(([name, one]) => `${name} ${value(one)}`).join("\n") })) : null,
    Object.keys(environment).length ? details("Environment variables",
      table(["", ""], Object.entries(environment).map(([name, one]) => [key(name), text(one)]))) : null];
  }

  // -- the page -------------------------------------------------------------------------------

  const dark = matchMedia("(prefers-color-scheme: dark)");
  function theme(name) {
    document.documentElement.dataset.theme = name;
    redraw();
  }

  curveSection();
  section("incarnations", "Incarnations", ...trials.flatMap(incarnationsOf).filter(Boolean));
  section("time", "Time", ...trials.flatMap(timeOf).filter(Boolean));
  section("checkpoints", "Checkpoints", ...trials.flatMap(commitsOf).filter(Boolean));
  sampleSection();
  settingSection();
  section("environment", "Environment", ...trials.flatMap(environmentOf).filter(Boolean));
  nav.append(el("button", { id: "theme", textContent: "Light or dark",
    onclick: () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark") }));
  theme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
})();

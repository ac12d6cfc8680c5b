// The page over a run. Always true: text of models and programs reaches the document through text nodes and attributes of our own
// choosing, never as markup; what is shown is asked for when it is shown, and a long conversation has only its visible tokens built.
"use strict";

// ---- where things come from: the server, or the page itself when it was written as one file

const inside = document.getElementById("run");
const embedded = inside ? JSON.parse(inside.textContent) : null;
const PAGE = 50;

async function ask(path, query = {}) {
  if (embedded) return answer(path, query);
  const given = Object.entries(query).filter(([, value]) => value !== "" && value != null);
  const response = await fetch(`api/${path}?${new URLSearchParams(given)}`);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error || response.statusText);
  return body;
}

function answer(path, query) {
  if (path === "overview") return embedded.overview;
  if (path === "rollouts") return listedHere(query);
  const [, number, tokens] = path.split("/");
  const rollout = embedded.rollouts[number];
  if (!rollout) throw new Error(`rollout ${number} is not in this file; it holds ${embedded.rows.length} of the run's rollouts`);
  if (!tokens) return rollout;
  const path_ = pathTo(rollout.calls, query.call ?? rollout.calls.length - 1);
  return { segments: path_.flatMap((call) => rollout.segments[call]), pieces: embedded.pieces };
}

function listedHere(query) {
  const wanted = (query.search || "").toLowerCase();
  const outcomes = {
    solved: (row) => row.success === 1, unsolved: (row) => row.success !== 1 && row.failed == null,
    failed: (row) => row.failed != null, limited: (row) => row.limit != null,
  };
  const rows = embedded.rows.filter((row) =>
    (!query.phase || row.phase === query.phase) && (!query.env || row.env === query.env) &&
    (!query.group || row.group === query.group) && (!query.step || row.step === Number(query.step)) &&
    (!query.min_reward || (row.reward != null && row.reward >= Number(query.min_reward))) &&
    (!query.max_reward || (row.reward != null && row.reward <= Number(query.max_reward))) &&
    (!query.outcome || outcomes[query.outcome](row)) && (!query.forked || row.branches > 1) &&
    (!wanted || JSON.stringify(embedded.rollouts[row.number]).toLowerCase().includes(wanted)));
  const key = query.sort || "number", sign = query.up ? 1 : -1;
  rows.sort((a, b) => (a[key] == null) - (b[key] == null) || (a[key] < b[key] ? -sign : a[key] > b[key] ? sign : b.number - a.number));
  const page = Number(query.page || 0);
  return { total: rows.length, page, pages: Math.max(1, Math.ceil(rows.length / PAGE)), rows: rows.slice(page * PAGE, (page + 1) * PAGE) };
}

// ---- small tools

const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = ["svg", "path", "line", "circle", "rect", "text", "g", "title"].includes(name)
    ? document.createElementNS(SVG, name) : document.createElement(name);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child != null).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

const count = (value) => (value == null ? "–" : Number(value).toLocaleString("en-US"));
const short = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(1)}B` : value >= 1e6 ? `${(value / 1e6).toFixed(1)}M` : value >= 1e4 ? `${(value / 1e3).toFixed(0)}k` : count(value));
const fixed = (value, digits = 2) => (value == null ? "–" : Number(value).toFixed(digits).replace(/^-(0\.?0*)$/, "$1").replace("-", "−"));
const percent = (value) => (value == null ? "–" : `${Math.round(value * 100)}%`);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function span(seconds) {
  if (seconds == null) return "–";
  return seconds < 90 ? `${seconds.toFixed(seconds < 10 ? 1 : 0)} s` : seconds < 5400 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function outcome(row) {
  if (row.failed) return make("span.bad", {}, "failed");
  const words = [row.success == null ? null : row.success ? make("span.good", {}, "solved") : make("span.soft", {}, "not solved")];
  if (row.limit) words.push(make("span.warn", {}, ` · out of ${row.limit}`));
  return make("span.outcome", {}, words);
}

function plainly(value) {
  if (Array.isArray(value) && value.every((inner) => typeof inner !== "object")) return value.join(", ");
  return typeof value === "string" ? value : JSON.stringify(value);
}

function taskLine(text) {
  try {
    const task = JSON.parse(text);
    if (task && typeof task === "object" && !Array.isArray(task)) return Object.entries(task).map(([key, value]) => `${key}: ${plainly(value)}`).join(" · ");
  } catch { /* cut off on its way here */ }
  return text;
}

// ---- routes

const main = document.getElementById("main");
let visit = { keys: {}, ends: [], over: false };  // what the view that is shown, or on its way, answers to and ends with

function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean), query: Object.fromEntries(new URLSearchParams(query || "")) };
}

function go(parts, query = {}, { replace = false } = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value != null && value !== false);
  const hash = `#/${parts.join("/")}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
  if (!replace) location.hash = hash;
  else if (hash !== location.hash) { history.replaceState(null, "", hash); }
}

// What has the focus is rebuilt with the view: it is known again by what it is called.
const called = (element) => `${element.tagName}|${element.id || element.getAttribute("aria-label") || (element.closest("label") ?? element).textContent.replace(/ [↑↓]$/, "")}`;

let before = "";

async function show() {
  const focused = main.contains(document.activeElement) ? called(document.activeElement) : null, top = scrollY;
  visit.over = true;
  for (const end of visit.ends) end();
  const mine = visit = { keys: {}, ends: [], over: false };  // a view that answers late knows its own visit only
  const { parts, query } = place(), hash = location.hash;
  const [name = "overview"] = parts;
  const view = { overview, rollouts: table, rollout: one, compare }[name] || overview;
  for (const link of document.querySelectorAll("nav a")) {
    const current = link.dataset.view === name || (link.dataset.view === "rollouts" && ["rollout", "compare"].includes(name));
    if (current) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  try {
    const [built] = await Promise.all([view(parts, query, mine), latest ?? whole()]);
    if (mine.over) return;
    main.replaceChildren(...[built].flat());
    if (focused) [...main.querySelectorAll("button, input, select, a, [tabindex]")].find((element) => called(element) === focused)?.focus({ preventScroll: true });
    scrollTo(0, parts.join("/") === before ? top : 0);
    before = parts.join("/");
    main.dataset.shown = hash;
    main.dispatchEvent(new CustomEvent("shown"));
  } catch (error) {
    if (mine.over) return;
    main.replaceChildren(make("p.notice", { role: "alert" }, error.message));
    main.dataset.shown = hash;
  }
}

// ---- the first screen

let latest = null;

async function whole() {  // the overview is asked for again only when the run has changed
  const fresh = await ask("overview", { known: latest?.state });
  if (!fresh.same) latest = fresh;
  name(latest);
  return latest;
}

async function overview(parts, query, visit) {
  const body = make("div", {});
  let drawn = null, timer = 0;
  const refresh = async () => {
    const data = await whole();
    if (data !== drawn) draw(body, (drawn = data));
    again(2000);
  };
  const again = (wait) => { if (!embedded && !visit.over) timer = setTimeout(() => refresh().catch(lost), wait); };
  const lost = () => { document.getElementById("live").textContent = "the server is gone"; again(5000); };
  visit.ends.push(() => clearTimeout(timer));
  await refresh();
  return body;
}

function draw(body, data) {
  const train = data.series.filter((row) => row.phase === "train");
  const all = data.series;
  const sum = (rows, key) => rows.reduce((total, row) => total + (row[key] || 0), 0);
  const last = (key) => (data.metrics[key] || []).at(-1)?.[1];
  const steps = data.about.config?.steps, done = Math.max(0, ...train.map((row) => row.step));
  const mean = (key) => byStep(all, key)[0]?.[1];
  const facts = evaluates(data) ? [
    [percent(mean("success")), "success"],
    [fixed(mean("reward"), 2), "reward"],
    [short(sum(all, "n")), "rollouts"],
    [short(sum(all, "tokens")), "tokens in all"],
    [count(sum(all, "failed")), "failed"],
  ] : [
    [steps ? `${count(done)} / ${count(steps)}` : count(done), "steps"],
    [fixed(last("reward"), 2), "reward, last step"],
    [percent(last("success")), "success, last step"],
    [short(sum(all, "n")), "rollouts"],
    [short(sum(all, "sampled")), "tokens sampled"],
    [short(sum(all, "tokens")), "tokens in all"],
    [count(sum(all, "failed")), "failed"],
  ];
  const envs = [...new Set(train.map((row) => row.env))].sort();
  const lines = (key) => [
    { name: "all", color: "c0", points: data.metrics[key] ? data.metrics[key] : byStep(train, key) },
    ...(envs.length > 1 ? envs.map((env, index) => ({ name: env, color: `c${1 + (index % 5)}`, points: byStep(train.filter((row) => row.env === env), key) })) : []),
  ];
  const time = (key) => data.metrics[key] || [];
  const split = time("step_time").map(([step, whole]) => {
    const rollout = time("time/rollout").find((row) => row[0] === step)?.[1] ?? 0;
    const training = time("time/training").find((row) => row[0] === step)?.[1] ?? 0;
    return { step, parts: [rollout, training, Math.max(0, whole - rollout - training)] };
  });
  const tokens = [...new Set(train.map((row) => row.step))].map((step) => {
    const rows = train.filter((row) => row.step === step), sampled = sum(rows, "sampled");
    return { step, parts: [sampled, sum(rows, "tokens") - sampled] };
  });
  const cards = evaluates(data) ? [evaluation(data), hardest(data), failures(data)].filter(Boolean) : [
    card("Reward", lineChart("Reward", lines("reward"), fixed)),
    card("Success", lineChart("Success", lines("success"), percent, [0, 1])),
    card("Time of a step", barChart("Time of a step", split, ["rollouts", "training", "other"], ["rollout", "training", "other"], span)),
    card("Tokens of a step", barChart("Tokens of a step", tokens, ["sampled", "read"], ["c4", "other"], short)),
    failures(data),
    heldout(data),
    anyMetric(data),
  ].filter(Boolean);
  const list = make("ul.facts", { "aria-label": "The run in figures" }, facts.map(([value, label]) => make("li", {}, make("b", {}, value), make("span", {}, label))));
  const focused = document.activeElement?.id;
  body.replaceChildren(make("h1.hidden", {}, "Overview"), list, train.length || all.length ? make("div.cards", {}, cards) : make("p.notice", {}, "No rollout has ended yet."), about(data));
  if (focused) document.getElementById(focused)?.focus();
}

function name(data) {
  document.title = `${data.name} · longrein`;
  document.getElementById("name").textContent = data.name;
  const live = document.getElementById("live"), doing = !data.live ? "" : evaluates(data) ? "● playing" : "● training";
  if (live.textContent !== doing) live.textContent = doing;
}

function evaluates(data) {
  return data.series.length > 0 && data.series.every((row) => row.phase === "eval");
}

function evaluation(data) {
  const envs = [...new Set(data.series.map((row) => row.env))].sort();
  const within = (estimate, show) => (estimate?.low == null ? null : make("span.soft", {}, ` ${show(estimate.low)} to ${show(estimate.high)}`));
  const row = (label, rows, told) => {
    const sum = (key) => rows.reduce((total, one) => total + (one[key] || 0), 0);
    const mean = (key) => byStep(rows, key)[0]?.[1];
    return make("tr", {}, make("td", {}, label), make("td.number", {}, count(sum("n"))),
      make("td.number", {}, percent(told?.success?.value ?? mean("success")), within(told?.success, percent)),
      make("td.number", {}, fixed(told?.reward?.value ?? mean("reward")), within(told?.reward, fixed)),
      make("td.number", {}, fixed(sum("turns") / sum("n"), 1)));
  };
  const told = data.evaluated, passed = Object.entries(told?.overall.pass_at_k ?? {});
  const head = ["environment", "rollouts", "success, 95%", "reward, 95%", "turns"];
  return card("By environment", make("div", {},
    make("table", {}, make("thead", {}, make("tr", {}, head.map((text, index) => make(index ? "th.number" : "th", { scope: "col" }, text)))),
      make("tbody", {}, envs.map((env) => row(env, data.series.filter((one) => one.env === env), told?.by_env[env])), envs.length > 1 ? row("all", data.series, told?.overall) : null)),
    passed.length > 1 ? make("p.soft", {}, passed.map(([k, estimate]) => `pass@${k} ${percent(estimate.value)}`).join(" · ")) : null), null, true);
}

function hardest(data) {
  if (!data.hardest.length) return null;
  return card("Tasks solved least", make("table", {},
    make("thead", {}, make("tr", {}, ["task", "solved", "reward"].map((text, index) => make(index ? "th.number" : "th", { scope: "col" }, text)))),
    make("tbody", {}, data.hardest.map((row) => make("tr", {}, make("td.task", {}, make("a", { href: `#/rollouts?${new URLSearchParams({ group: row.group })}` }, taskLine(row.task))),
      make("td.number", {}, `${row.solved} of ${row.n}`), make("td.number", {}, fixed(row.reward)))))));
}

function byStep(rows, key) {
  const steps = new Map();
  for (const row of rows) {
    if (row[key] == null) continue;
    const [total, n] = steps.get(row.step) || [0, 0];
    const weight = row.n - row.failed || 1;
    steps.set(row.step, [total + row[key] * weight, n + weight]);
  }
  return [...steps].map(([step, [total, n]]) => [step, total / n]).sort((a, b) => a[0] - b[0]);
}

function card(title, content, extra, wide) {
  return make(`section.card${wide ? ".wide" : ""}`, { "aria-label": title }, make("header", {}, make("h2", {}, title), extra), content);
}

function failures(data) {
  if (!data.failures.length && !data.limits.length) return null;
  const rows = [
    ...data.failures.map((row) => [row.cause, row.n, "bad", { outcome: "failed", search: row.cause.split("\n")[0].slice(0, 120) }]),
    ...data.limits.map((row) => [`ran out of ${row.limit}`, row.n, "warn", { outcome: "limited" }]),
  ];
  return card("Failures and limits", make("table", {}, make("tbody", {}, rows.map(([cause, n, kind, query]) => make("tr", {},
    make("td", {}, make(`a.${kind}`, { href: `#/rollouts?${new URLSearchParams(query)}` }, cause)), make("td.number", {}, count(n)))))));
}

function heldout(data) {
  const rows = data.series.filter((row) => ["before", "after"].includes(row.phase));
  if (!rows.length) return null;
  const envs = [...new Set(rows.map((row) => row.env))].sort();
  const cell = (env, phase, key, show) => show(rows.find((row) => row.env === env && row.phase === phase)?.[key]);
  return card("Held-out tasks", make("table", {},
    make("thead", {}, make("tr", {}, ["environment", "solved before", "after", "reward before", "after"].map((text, index) => make(index ? "th.number" : "th", { scope: "col" }, text)))),
    make("tbody", {}, envs.map((env) => make("tr", {}, make("td", {}, env),
      make("td.number", {}, cell(env, "before", "success", percent)), make("td.number", {}, cell(env, "after", "success", percent)),
      make("td.number", {}, cell(env, "before", "reward", fixed)), make("td.number", {}, cell(env, "after", "reward", fixed)))))));
}

let chosenMetric = "";

function anyMetric(data) {
  const names = Object.keys(data.metrics).filter((key) => data.metrics[key].some(([, value]) => value != null));
  if (!names.length) return null;
  if (!names.includes(chosenMetric)) chosenMetric = names.includes("entropy") ? "entropy" : names[0];
  const holder = make("div", {});
  const fill = () => holder.replaceChildren(lineChart(chosenMetric, [{ name: chosenMetric, color: "c1", points: data.metrics[chosenMetric] }], (value) => (value == null ? "–" : Number(value.toPrecision(3)).toString())));
  const select = make("select", { id: "metric", "aria-label": "Metric", onchange: (event) => { chosenMetric = event.target.value; fill(); } },
    names.map((key) => make("option", { value: key, selected: key === chosenMetric }, key)));
  fill();
  return card("Any metric", holder, select);
}

function about(data) {
  const { run, config, summary } = data.about;
  return make("details.plain", {}, make("summary", {}, "Configuration, versions, seed, git revision"), make("pre", {}, JSON.stringify({ config, sessions: run?.sessions, summary }, null, 2)));
}

// ---- charts

const W = 560, H = 190, L = 44, R = 10, T = 8, B = 22;

function nice(value) {  // the next round number above
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((round) => round >= value * 0.9999);
}

function frame(low, high, first, last, show, told, pad = 0) {
  const svg = make("svg.chart", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": told });
  const y = (value) => T + (H - T - B) * (1 - (value - low) / (high - low || 1));
  const x = (step) => (last === first ? (L + W - R) / 2 : L + pad + ((W - L - R - 2 * pad) * (step - first)) / (last - first));
  const round = (value) => Math.abs(Number(value.toPrecision(1)) - value) < value * 1e-9;
  const parts = [4, 5, 3].find((n) => round((high - low) / n)) ?? 4;  // a scale whose numbers need no rounding
  for (let index = 0; index <= parts; index++) {
    const value = low + ((high - low) * index) / parts;
    svg.append(make("line.grid", { x1: L, x2: W - R, y1: y(value), y2: y(value) }), make("text", { x: L - 6, y: y(value) + 4, "text-anchor": "end" }, show(value)));
  }
  const stride = Math.max(1, Math.ceil((last - first) / 8));
  for (let step = Math.ceil(first); step <= last; step += stride) {
    svg.append(make("text", { x: x(step), y: H - 6, "text-anchor": "middle" }, count(step)));
  }
  return { svg, x, y };
}

function lineChart(title, lines, show, range) {
  lines = lines.map((line) => ({ ...line, points: line.points.filter(([, value]) => value != null) })).filter((line) => line.points.length);
  const points = lines.flatMap((line) => line.points);
  if (!points.length) return make("p.soft", {}, "nothing yet");
  const values = points.map((point) => point[1]), steps = points.map((point) => point[0]);
  let low = range ? range[0] : values.reduce((a, b) => Math.min(a, b)), high = range ? range[1] : values.reduce((a, b) => Math.max(a, b));
  if (low === high) { low -= 0.5; high += 0.5; }
  if (!range && low >= 0 && low < high / 2) [low, high] = [0, nice(high)];
  const told = `${title} over steps: ${lines.map((line) => `${line.name} from ${show(line.points[0][1])} to ${show(line.points.at(-1)[1])}`).join(", ")}`;
  const first = steps.reduce((a, b) => Math.min(a, b)), last = steps.reduce((a, b) => Math.max(a, b));
  const { svg, x, y } = frame(low, high, first, last, show, told);
  for (const line of [...lines].reverse()) {
    const d = line.points.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const path = make("path", { d });
    path.style.stroke = `var(--${line.color})`;
    if (line.color === "c0") path.style.strokeWidth = "2.4";
    svg.append(path);
    if (line.points.length === 1) { const dot = make("circle", { cx: x(line.points[0][0]), cy: y(line.points[0][1]), r: 3 }); dot.style.fill = `var(--${line.color})`; svg.append(dot); }
  }
  const maps = lines.map((line) => new Map(line.points));
  const at = (step) => lines.map((line, index) => [line.name, line.color, show(maps[index].get(step))]);
  return watched(svg, x, [...new Set(steps)].sort((a, b) => a - b), last, at);
}

function barChart(title, bars, names, colors, show) {
  if (!bars.length) return make("p.soft", {}, "nothing yet");
  const high = nice(bars.reduce((most, bar) => Math.max(most, bar.parts.reduce((a, b) => a + b, 0)), 0));
  const totals = names.map((_, index) => bars.reduce((total, bar) => total + bar.parts[index], 0));
  const whole = totals.reduce((a, b) => a + b, 0) || 1;
  const told = `${title}: ${names.map((name, index) => `${name} ${percent(totals[index] / whole)}`).join(", ")}`;
  const first = bars[0].step, last = bars.at(-1).step;
  const width = Math.max(1, Math.min(26, ((W - L - R) / (last - first + 1)) * 0.72));
  const { svg, x, y } = frame(0, high, first, last, show, told, width / 2 + 1);
  const paths = names.map(() => "");
  for (const bar of bars) {
    let below = 0;
    bar.parts.forEach((part, index) => {
      paths[index] += `M${(x(bar.step) - width / 2).toFixed(1)} ${y(below).toFixed(1)}V${y(below + part).toFixed(1)}h${width.toFixed(1)}V${y(below).toFixed(1)}Z`;
      below += part;
    });
  }
  paths.forEach((d, index) => { const path = make("path", { d }); path.style.fill = `var(--${colors[index]})`; svg.append(path); });
  const map = new Map(bars.map((bar) => [bar.step, bar.parts]));
  const at = (step) => names.map((name, index) => [name, colors[index], show(map.get(step)?.[index])]);
  return watched(svg, x, bars.map((bar) => bar.step), last, at);
}

function watched(svg, x, steps, last, at) {
  const cursor = make("line.cursor", { y1: T, y2: H - B });
  svg.append(cursor);
  const legend = make("div.legend", {});
  const tell = (step) => legend.replaceChildren(make("span", {}, `step ${count(step)}`), ...at(step).map(([name, key, value]) => {
    const mark = make("i", {});
    mark.style.background = `var(--${key})`;
    return make("span", {}, mark, `${name} `, make("b", {}, value));
  }));
  tell(last);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), at = ((event.clientX - box.left) / box.width) * W;
    const nearest = steps.reduce((best, step) => (Math.abs(x(step) - at) < Math.abs(x(best) - at) ? step : best));
    cursor.setAttribute("x1", x(nearest)); cursor.setAttribute("x2", x(nearest)); cursor.style.visibility = "visible";
    tell(nearest);
  });
  svg.addEventListener("pointerleave", () => { cursor.style.visibility = "hidden"; tell(last); });
  return make("div", {}, svg, legend);
}

// ---- the table of rollouts

const COLUMNS = [["number", "#", true], ["step", "step", true], ["phase", "phase"], ["env", "environment"], [null, "task"], ["reward", "reward", true], [null, "outcome"], ["turns", "turns", true], ["branches", "branches", true], ["tokens", "tokens", true], ["advantage", "advantage", true]];

async function table(parts, query, visit) {
  const [data, run] = await Promise.all([ask("rollouts", query), whole()]);
  const set = (changes) => go(["rollouts"], { ...query, page: "", ...changes });
  const options = (values, current, all) => [make("option", { value: "" }, all), ...values.map(([value, text]) => make("option", { value, selected: value === (current || "") }, text))];
  const choose = (label, key, values, all) => make("label", {}, label, make("select", { onchange: (event) => set({ [key]: event.target.value }) }, options(values, query[key], all)));
  const type = (label, key, kind, more = {}) => make("label", {}, label, make("input", { type: kind, value: query[key] || "", onchange: (event) => set({ [key]: event.target.value }), ...more }));
  const unique = (key) => [...new Set(run.series.map((row) => row[key]))].sort().map((value) => [value, value]);
  const filters = make("form.filters", { role: "search", "aria-label": "Filter rollouts", onsubmit: (event) => { event.preventDefault(); document.activeElement?.blur(); } },
    type("search in task and conversation", "search", "search", { id: "search" }),
    choose("environment", "env", unique("env"), "all"),
    choose("phase", "phase", unique("phase"), "all"),
    choose("outcome", "outcome", [["solved", "solved"], ["unsolved", "not solved"], ["failed", "failed"], ["limited", "ran into a limit"]], "any"),
    type("step", "step", "number", { min: 0 }),
    type("reward from", "min_reward", "number", { step: "any" }),
    type("to", "max_reward", "number", { step: "any" }),
    make("label.check", {}, make("input", { type: "checkbox", checked: Boolean(query.forked), onchange: (event) => set({ forked: event.target.checked ? 1 : "" }) }), "with branches"),
    Object.keys(query).some((key) => !["page", "sort", "up"].includes(key)) ? make("button", { type: "button", onclick: () => go(["rollouts"]) }, "clear") : null);
  const sort = query.sort || "number";
  const head = make("tr", {}, COLUMNS.map(([key, text, right]) => make(right ? "th.number" : "th", { scope: "col", "aria-sort": key === sort ? (query.up ? "ascending" : "descending") : null },
    key && key !== "phase" ? make("button", { type: "button", onclick: () => set({ sort: key, up: key === sort && !query.up ? 1 : "" }) }, text + (key === sort ? (query.up ? " ↑" : " ↓") : "")) : text)));
  const body = make("tbody", {}, data.rows.map((row) => make("tr", { onclick: (event) => { if (!event.target.closest("a")) go(["rollout", row.number]); } },
    make("td.number", {}, make("a", { href: `#/rollout/${row.number}`, "aria-label": `Rollout ${row.number}` }, row.number)),
    make("td.number", {}, row.step), make("td", {}, row.phase), make("td", {}, row.env), make("td.task", { title: row.task }, row.failed || taskLine(row.task)),
    make("td.number", {}, fixed(row.reward)), make("td", {}, outcome(row)), make("td.number", {}, row.turns), make("td.number", {}, row.branches),
    make("td.number", {}, count(row.tokens)), make("td.number", {}, fixed(row.advantage)))));
  const page = Number(query.page || 0);
  const turn = (to) => go(["rollouts"], { ...query, page: to || "" });
  const pager = make("div.pager", {}, make("button", { type: "button", disabled: page === 0, onclick: () => turn(page - 1) }, "‹ previous"),
    make("span.soft", { role: "status" }, `${count(data.total)} rollouts · page ${page + 1} of ${data.pages}`),
    make("button", { type: "button", disabled: page + 1 >= data.pages, onclick: () => turn(page + 1) }, "next ›"));
  const step = (by) => {
    const links = [...body.querySelectorAll("a")];
    links[Math.min(links.length - 1, Math.max(0, links.indexOf(document.activeElement) + by))]?.focus();
  };
  visit.keys = { j: () => step(1), k: () => step(-1), "]": () => page + 1 < data.pages && turn(page + 1), "[": () => page > 0 && turn(page - 1) };
  return [make("h1.hidden", {}, "Rollouts"), filters, make("div.table", {}, make("table", {}, make("thead", {}, head), body)),
    data.rows.length ? pager : make("p.notice", {}, "No rollout fits.")];
}

// ---- one rollout

const MODES = ["origin", "log-probability", "advantage", "reason"];

function pathTo(calls, tip) {
  const path = [];
  for (let at = Number(tip); at != null; at = calls[at].parent) path.push(at);
  return path.reverse();
}

async function one(parts, query, visit) {
  const number = Number(parts[1]);
  const rollout = await ask(`rollouts/${number}`);
  const calls = rollout.calls, leaf = query.call != null && calls[query.call] ? Number(query.call) : calls.length - 1;
  const asTokens = query.view === "tokens";
  const set = (changes) => go(["rollout", number], { ...query, ...changes });
  const tokens = asTokens && calls.length ? await ask(`rollouts/${number}/tokens`, { call: leaf }) : null;
  const head = make("div.head", {}, make("h1", {}, `Rollout ${number}`), make("span.soft", {}, `${rollout.env} · ${rollout.phase}, step ${rollout.step}`), make("span.spring", {}),
    make("button", { type: "button", disabled: rollout.previous == null, onclick: () => go(["rollout", rollout.previous], { view: query.view, color: query.color }), "aria-label": "Previous rollout" }, "‹"),
    make("button", { type: "button", disabled: rollout.next == null, onclick: () => go(["rollout", rollout.next], { view: query.view, color: query.color }), "aria-label": "Next rollout" }, "›"));
  const mark = (label, value) => make("span", {}, `${label} `, make("b", {}, value));
  const marks = make("div.marks", {}, outcome(rollout), mark("reward", fixed(rollout.reward, 3)), mark("advantage", fixed(rollout.advantage, 3)), mark("calls", rollout.turns),
    mark("branches", rollout.branches), mark("tokens", count(rollout.tokens)), mark("sampled", count(rollout.sampled)), mark("seed", rollout.seed));
  const notes = [
    rollout.failed ? make("p.bad.text", { role: "note" }, rollout.failed) : null,
    make("div.notes", {}, make("details.plain", {}, make("summary", {}, "Task and info"), make("pre", {}, JSON.stringify({ id: rollout.id, group: rollout.group, task: rollout.task, info: rollout.info }, null, 2))),
      rollout.tools.length ? make("details.plain", {}, make("summary", {}, `Tools: ${rollout.tools.flat().map((tool) => tool?.function?.name ?? "?").join(", ")}`), make("pre", {}, JSON.stringify(rollout.tools, null, 2))) : null),
  ];
  const siblings = rollout.siblings.length > 1 ? make("div.siblings", { role: "group", "aria-label": "Rollouts of this group" }, make("span.soft", {}, "group"),
    rollout.siblings.map((row) => make("a", { href: `#/rollout/${row.number}${asTokens ? "?view=tokens" : ""}`, "aria-current": row.number === number ? "true" : null, "aria-label": `Rollout ${row.number}, reward ${fixed(row.reward)}` }, row.failed ? "failed" : fixed(row.reward))),
    make("label", {}, make("span.hidden", {}, "Compare with"), make("select", { onchange: (event) => event.target.value && go(["compare", number, event.target.value], { view: query.view }) },
      make("option", { value: "" }, "compare with…"), rollout.siblings.filter((row) => row.number !== number).map((row) => make("option", { value: row.number }, `rollout ${row.number}, reward ${fixed(row.reward)}`))))) : null;
  const inspect = make("div.inspect", { "aria-live": "polite" });
  const bar = make("div.tools", {}, switcher("View", [["", "Conversation"], ["tokens", "Tokens"]], query.view || "", (value) => set({ view: value })),
    asTokens ? switcher("Colour", MODES.map((mode) => [mode === "origin" ? "" : mode, mode]), query.color || "", (value) => set({ color: value })) : null, asTokens ? inspect : null);
  const tree = calls.length > 1 ? treeOf(calls, leaf, (call) => set({ call: call === calls.length - 1 ? "" : call })) : null;
  let content = make("p.notice", {}, "No model call was made.");
  if (calls.length) content = asTokens ? tokenView(tokens, query.color || "origin", inspect, visit) : conversation(rollout, leaf);
  visit.keys = {
    "]": () => rollout.next != null && go(["rollout", rollout.next], { view: query.view, color: query.color }),
    "[": () => rollout.previous != null && go(["rollout", rollout.previous], { view: query.view, color: query.color }),
    t: () => set({ view: asTokens ? "" : "tokens" }),
    c: () => asTokens && set({ color: MODES[(MODES.indexOf(query.color || "origin") + 1) % MODES.length].replace(/^origin$/, "") }),
    u: () => go(["rollouts"], { step: rollout.step, phase: rollout.phase }),
  };
  return [head, marks, siblings, ...notes, tree, bar, content].filter(Boolean);
}

function switcher(label, choices, current, choose) {
  return make("div.group", { role: "group", "aria-label": label }, choices.map(([value, text]) => make("button", { type: "button", "aria-pressed": value === current ? "true" : "false", onclick: () => choose(value) }, text)));
}

function treeOf(calls, leaf, choose) {
  const on = new Set(pathTo(calls, leaf)), children = calls.map(() => []), roots = [];
  calls.forEach((call, index) => (call.parent == null ? roots : children[call.parent]).push(index));
  const spots = new Map();
  let lane = 0;
  const stack = roots.map((root) => [root, 0]).reverse();
  while (stack.length) {  // a child goes on in its parent's lane, its later siblings open lanes below
    const [call, depth] = stack.pop();
    const parent = calls[call].parent;
    const straight = parent != null && children[parent][0] === call;
    spots.set(call, [depth, straight ? spots.get(parent)[1] : lane++]);
    stack.push(...children[call].map((child) => [child, depth + 1]).reverse());
  }
  const D = 22, x = (call) => 14 + spots.get(call)[0] * D, y = (call) => 14 + spots.get(call)[1] * D;
  const most = Math.max(...[...spots.values()].map((spot) => spot[0]));
  const svg = make("svg", { width: 28 + most * D, height: 28 + (lane - 1) * D, role: "tree", "aria-label": `${calls.length} calls in ${lane} ${lane === 1 ? "branch" : "branches"}` });
  calls.forEach((call, index) => {
    if (call.parent == null) return;
    const [x1, y1, x2, y2] = [x(call.parent), y(call.parent), x(index), y(index)];
    svg.append(make(on.has(index) && on.has(call.parent) ? "path.on" : "path", { d: y1 === y2 ? `M${x1} ${y1}H${x2}` : `M${x1} ${y1}C${x1 + 12} ${y1} ${x1 + 4} ${y2} ${x2} ${y2}` }));
  });
  const nodes = calls.map((call, index) => {
    const label = `call ${index + 1}: read ${call.read}, sampled ${call.sampled} tokens, ${call.finish_reason}${call.reason ? `, not trained: ${call.reason}` : ""}${call.reward != null ? `, reward ${fixed(call.reward)}` : ""}`;
    const node = make(`g${call.reason ? ".left" : ""}${index === leaf ? ".at" : ""}`, { role: "treeitem", tabindex: index === leaf ? 0 : -1, "aria-label": label, "aria-selected": index === leaf ? "true" : "false", onclick: () => choose(index) },
      make("title", {}, label), make("circle", { cx: x(index), cy: y(index), r: 6 }));
    node.addEventListener("keydown", (event) => {
      const beside = call.parent == null ? roots : children[call.parent], at = beside.indexOf(index);
      const to = { ArrowLeft: call.parent, ArrowRight: children[index][0], ArrowUp: beside[at - 1], ArrowDown: beside[at + 1] }[event.key];
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(index); }
      else if (event.key.startsWith("Arrow")) { event.preventDefault(); if (to != null) nodes[to].focus(); }
    });
    return node;
  });
  svg.append(...nodes);
  const holder = make("div.tree", {}, svg);
  main.addEventListener("shown", () => holder.scrollTo(Math.max(0, x(leaf) - holder.clientWidth / 2), Math.max(0, y(leaf) - holder.clientHeight / 2)), { once: true });
  return holder;
}

// ---- a conversation as people read it

const LONG = 3000;

function conversation(rollout, leaf, parting = null) {
  const talk = make("div.talk", {});
  let index = 0;
  for (const number of pathTo(rollout.calls, leaf)) {
    const call = rollout.calls[number];
    for (const message of call.messages) {
      if (index++ === parting) talk.append(make("div.parting", {}, "here they part"));
      talk.append(messageOf(message));
    }
    if (index++ === parting) talk.append(make("div.parting", {}, "here they part"));
    talk.append(messageOf(call.reply, call, number));
  }
  return talk;
}

function messageOf(message, call, number) {
  const role = String(message.role ?? "assistant");
  const notes = call ? [`call ${number + 1}`, `${call.sampled} tokens`, call.finish_reason === "stop" ? null : call.finish_reason, call.reward == null ? null : `reward ${fixed(call.reward)}`, `policy ${call.policy_version}`] : [message.name, message.tool_call_id];
  const body = make(`article.message${call ? ".assistant" : ""}${call?.reason ? ".left-out" : ""}`, { "aria-label": call ? `${role}, call ${number + 1}` : role },
    make("header", {}, make("b", {}, role), notes.filter(Boolean).map((note) => make("span", {}, note)), call?.reason ? make("span.warn", {}, `not trained: ${call.reason}`) : null));
  if (message.reasoning_content) body.append(make("details", {}, make("summary", {}, `reasoning, ${count(String(message.reasoning_content).length)} characters`), long(String(message.reasoning_content), "thought")));
  const content = contentOf(message.content);
  if (role === "tool" && content.length > 600) body.append(make("details", {}, make("summary", {}, `result, ${count(content.length)} characters: ${content.slice(0, 80)}…`), long(content, "text.mono")));
  else if (content) body.append(long(content, role === "tool" ? "text.mono" : "text"));
  for (const made of message.tool_calls ?? []) {
    const asked = made?.function ?? made ?? {}, given = typeof asked.arguments === "string" ? asked.arguments : JSON.stringify(asked.arguments ?? {});
    body.append(make("details", {}, make("summary", {}, "calls ", make("code", {}, `${asked.name}(${given.length > 120 ? `${given.slice(0, 120)}…` : given})`)), make("pre", {}, pretty(given))));
  }
  return body;
}

function contentOf(content) {
  if (content == null) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((part) => (typeof part === "string" ? part : typeof part?.text === "string" ? part.text : JSON.stringify(part))).join("");
  return JSON.stringify(content);
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

function long(text, kind) {
  const shown = make(`div.${kind}`, {}, text.length > LONG * 1.3 ? `${text.slice(0, LONG)}…` : text);
  if (text.length <= LONG * 1.3) return shown;
  const more = make("button", { type: "button", onclick: () => { shown.textContent = text; more.remove(); } }, `show all ${count(text.length)} characters`);
  return make("div", {}, shown, more);
}

// ---- tokens as the model saw them

const BLOCK = 400;
const REASONS = ["undelivered", "truncated", "stale", "auxiliary", "rewritten", "failed"];

function painter(mode, segments) {
  const mix = (name, part) => `color-mix(in srgb, var(--${name}) ${Math.round(part)}%, transparent)`;
  if (mode === "log-probability") return [(t) => (t.sampled && t.logprob != null ? mix("c2", 8 + Math.min(1, -t.logprob / 5) * 60) : ""), [["read", "transparent"], ["sampled, certain", mix("c2", 8)], ["−1", mix("c2", 20)], ["−2.5", mix("c2", 38)], ["−5 and less", mix("c2", 68)]]];
  if (mode === "advantage") {
    const most = segments.reduce((high, segment) => (segment.advantages ?? []).reduce((a, b) => Math.max(a, Math.abs(b)), high), 0) || 1;
    return [(t) => (t.advantage == null ? "" : mix(t.advantage >= 0 ? "c1" : "c2", (Math.abs(t.advantage) / most) * 55)), [[`−${fixed(most)}`, mix("c2", 55)], ["0, or none", "transparent"], [`+${fixed(most)}`, mix("c1", 55)]]];
  }
  if (mode === "reason") {
    const hue = (reason) => mix(`c${1 + (REASONS.indexOf(reason) % 5)}`, reason === "failed" ? 55 : 40);
    const here = [...new Set(segments.filter((segment) => segment.sampled && segment.reason).map((segment) => segment.reason))];
    return [(t) => (!t.sampled ? "" : t.reason ? hue(t.reason) : "var(--trained)"), [["read", "transparent"], ["trained", "var(--trained)"], ...here.map((reason) => [`not trained: ${reason}`, hue(reason)])]];
  }
  return [(t) => (!t.sampled ? "" : t.reason ? "var(--untrained)" : "var(--trained)"), [["read", "transparent"], ["sampled and trained", "var(--trained)"], ["sampled, not trained", "var(--untrained)"]]];
}

function tokenView(data, mode, inspect, visit, { parting = null, label = "Tokens" } = {}) {
  const [paint, legend] = painter(mode, data.segments);
  const blocks = [];
  let start = 0;
  for (const segment of data.segments) {
    for (let from = 0; from < segment.ids.length; from += BLOCK) blocks.push({ segment, from, to: Math.min(segment.ids.length, from + BLOCK), start: start + from });
    start += segment.ids.length;
  }
  const total = start;
  const token = (position) => {
    const block = blocks[find(blocks, position)], at = block.from + position - block.start, segment = block.segment;
    return { position, id: segment.ids[at], piece: data.pieces[segment.ids[at]] ?? `⟨${segment.ids[at]}⟩`, sampled: segment.sampled, logprob: segment.logprobs?.[at], advantage: segment.advantages?.[at], reason: segment.reason, version: segment.versions?.[at] ?? segment.policy_version, call: segment.call };
  };
  const view = make("div.tokens", { tabindex: 0, role: "document", "aria-label": `${label}: ${count(total)}. Arrow keys move from token to token.` });
  const divs = blocks.map((block, index) => {
    const div = make("div.block", { "data-index": index });
    div.style.minHeight = `${Math.ceil((block.to - block.from) / 14) * 24}px`;
    return div;
  });
  const fill = (index) => {
    const div = divs[index], block = blocks[index];
    if (div.firstChild) return;
    const spans = [];
    for (let position = block.start; position < block.start + block.to - block.from; position++) {
      const t = token(position), piece = make("span.token", { "data-at": position });
      const background = paint(t);
      if (background) piece.style.background = background;
      if (parting != null && position < parting) piece.classList.add("shared");
      if (position === parting) spans.push(make("div.parting", {}, "here they part"));
      piece.append(...visible(t.piece));
      spans.push(piece);
    }
    const segment = block.segment;
    if (block.from === 0) div.append(make("h3", {}, segment.sampled ? `call ${segment.call + 1} · sampled ${count(segment.ids.length)}${segment.reason ? ` · not trained: ${segment.reason}` : ""}` : `call ${segment.call + 1} · read ${count(segment.ids.length)}`));
    div.append(...spans);
    div.style.minHeight = "";
  };
  const empty = (index) => {
    const div = divs[index];
    if (!div.firstChild || div.querySelector(".at")) return;
    div.style.minHeight = `${div.offsetHeight}px`;
    div.replaceChildren();
  };
  const seen = new IntersectionObserver((entries) => { for (const entry of entries) (entry.isIntersecting ? fill : empty)(Number(entry.target.dataset.index)); }, { rootMargin: "1200px 0px" });
  divs.forEach((div) => seen.observe(div));
  view.append(...divs);
  let current = -1;
  const tell = (position) => {
    const t = token(position), facts = [["token", count(position)], ["id", t.id], ["text", JSON.stringify(t.piece)], ["", t.sampled ? "sampled" : "read"], ["call", t.call + 1]];
    if (t.sampled) facts.push(["log-probability", fixed(t.logprob, 4)], ["probability", t.logprob == null ? "–" : `${(Math.exp(t.logprob) * 100).toFixed(1)}%`], ["advantage", fixed(t.advantage, 4)], ["", t.reason ? `not trained: ${t.reason}` : "trained"], ["policy", t.version]);
    inspect.replaceChildren(...facts.map(([key, value]) => make("span", {}, key ? `${key} ` : "", make("b", {}, value), " ")));
  };
  const move = (position) => {
    current = Math.min(total - 1, Math.max(0, position));
    view.querySelector(".token.at")?.classList.remove("at");
    const index = find(blocks, current);
    fill(index);
    const piece = divs[index].querySelector(`[data-at="${current}"]`);
    piece.classList.add("at");
    piece.scrollIntoView({ block: "nearest" });
    tell(current);
  };
  view.addEventListener("pointerover", (event) => { const piece = event.target.closest(".token"); if (piece) tell(Number(piece.dataset.at)); });
  view.addEventListener("click", (event) => { const piece = event.target.closest(".token"); if (piece) move(Number(piece.dataset.at)); });
  view.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20, PageDown: 400, PageUp: -400 }[event.key];
    if (by) { event.preventDefault(); move(current + by); }
    else if (event.key === "Home" || event.key === "End") { event.preventDefault(); move(event.key === "Home" ? 0 : total - 1); }
  });
  visit.ends.push(() => seen.disconnect());
  inspect.textContent = `${count(total)} tokens; point at one, or use the arrow keys`;
  const colours = make("div.legend", { "aria-label": "Colours" }, legend.map(([text, background]) => { const mark = make("i", {}); mark.style.background = background; return make("span", {}, mark, text); }));
  const holder = make("div", {}, colours, view);
  holder.reveal = (position) => { fill(find(blocks, position)); divs[find(blocks, position)].querySelector(`[data-at="${position}"]`)?.scrollIntoView({ block: "center" }); };
  return holder;
}

function find(blocks, position) {
  let low = 0, high = blocks.length - 1;
  while (low < high) { const middle = (low + high + 1) >> 1; if (blocks[middle].start <= position) low = middle; else high = middle - 1; }
  return low;
}

function visible(piece) {
  const parts = [];
  for (const part of piece.split(/(\n|\t)/)) {
    if (part === "\n") parts.push(make("span.mark", {}, "↵"), "\n");
    else if (part === "\t") parts.push(make("span.mark", {}, "→"), "\t");
    else if (part) parts.push(part);
  }
  return parts.length ? parts : [make("span.mark", {}, "∅")];
}

// ---- two rollouts of a group

async function compare(parts, query, visit) {
  const numbers = [Number(parts[1]), Number(parts[2])];
  const rollouts = await Promise.all(numbers.map((number) => ask(`rollouts/${number}`)));
  const tokens = await Promise.all(numbers.map((number) => ask(`rollouts/${number}/tokens`)));
  const asTokens = query.view === "tokens";
  const set = (changes) => go(["compare", ...numbers], { ...query, ...changes });
  const [left, right] = tokens.map((data) => data.segments.flatMap((segment) => segment.ids));
  let parting = 0;
  while (parting < left.length && parting < right.length && left[parting] === right[parting]) parting++;
  const same = parting === left.length && parting === right.length;
  const talks = rollouts.map((rollout) => pathTo(rollout.calls, rollout.calls.length - 1).flatMap((call) => [...rollout.calls[call].messages, rollout.calls[call].reply]));
  const words = talks.map((talk) => talk.map((message) => JSON.stringify([message.role, contentOf(message.content), (message.tool_calls ?? []).map((call) => call.function ?? call), message.reasoning_content])));
  let message = 0;
  while (message < words[0].length && message < words[1].length && words[0][message] === words[1][message]) message++;
  const inspect = make("div.inspect", { "aria-live": "polite" });
  const columns = rollouts.map((rollout, index) => {
    const content = !rollout.calls.length ? make("p.notice", {}, "No model call was made.")
      : asTokens ? tokenView(tokens[index], query.color || "origin", inspect, visit, { parting: same ? null : parting, label: `Tokens of rollout ${rollout.number}` })
      : conversation(rollout, rollout.calls.length - 1, same ? null : message);
    return [make("section", { "aria-label": `Rollout ${rollout.number}` }, make("div.head", {}, make("h2", {}, make("a", { href: `#/rollout/${rollout.number}` }, `Rollout ${rollout.number}`)), outcome(rollout), make("span.soft", {}, `reward ${fixed(rollout.reward, 3)} · ${count(rollout.tokens)} tokens`)), content), content];
  });
  const jump = make("button", { type: "button", disabled: same, onclick: () => { for (const [, content] of columns) content.reveal?.(Math.max(0, parting - 1)); document.querySelector(".parting")?.scrollIntoView({ block: "center" }); } }, "go to where they part");
  visit.keys = { t: () => set({ view: asTokens ? "" : "tokens" }), p: () => jump.click() };
  return [make("div.head", {}, make("h1", {}, `Rollouts ${numbers.join(" and ")}`), make("span.soft", { role: "status" }, same ? "the same tokens" : `the first ${count(parting)} tokens are the same`)),
    make("div.tools", {}, switcher("View", [["", "Conversation"], ["tokens", "Tokens"]], query.view || "", (value) => set({ view: value })),
      asTokens ? switcher("Colour", MODES.map((mode) => [mode === "origin" ? "" : mode, mode]), query.color || "", (value) => set({ color: value })) : null, jump, asTokens ? inspect : null),
    make("div.pair", {}, columns.map(([section]) => section))];
}

// ---- keys and theme

const HELP = [["1, 2", "overview, rollouts"], ["/", "search"], ["j, k", "down and up the table"], ["[, ]", "page, or rollout, before and after"], ["t", "conversation or tokens"], ["c", "next colour of the tokens"], ["p", "where two rollouts part"], ["u", "up, to the step's rollouts"], ["← →", "from token to token, from call to call"], ["?", "this list"]];

function help() {
  const dialog = document.getElementById("keys");
  dialog.replaceChildren(make("h2", { id: "keys-title" }, "Keyboard"), make("dl", {}, HELP.flatMap(([key, text]) => [make("dt", {}, key), make("dd", {}, text)])), make("form", { method: "dialog" }, make("button", {}, "close")));
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const common = {
    1: () => go([]), 2: () => go(["rollouts"]), "?": help,
    "/": () => { if (place().parts[0] !== "rollouts") { go(["rollouts"]); main.addEventListener("shown", () => document.getElementById("search")?.focus(), { once: true }); } else document.getElementById("search")?.focus(); },
  };
  const act = visit.keys[event.key] || common[event.key];
  if (act) { event.preventDefault(); act(); }
});

function kept(value) {
  try { if (value === undefined) return localStorage.getItem("longrein-theme"); localStorage.setItem("longrein-theme", value); } catch { /* a file may have no storage */ }
  return null;
}

function theme(value) {
  if (value) document.documentElement.dataset.theme = value;
}

document.getElementById("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  theme(dark ? "light" : "dark");
  kept(dark ? "light" : "dark");
});
document.getElementById("help").addEventListener("click", help);
theme(kept());
addEventListener("hashchange", show);
show();

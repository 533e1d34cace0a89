// Small multiples of the metrics. A click on a step filters the table to it, and a drag zooms all curves.

const MAIN = [
  "rollout/reward_mean", "eval/accuracy", "eval/reward_mean", "policy/masked_share", "policy/divergence_mean", "mismatch/kl",
  "train/entropy", "train/grad_norm", "rollout/response_tokens_mean", "rollout/truncated_share", "environment/turns_mean",
  "rollout/staleness_mean", "rollout/groups_without_signal", "time/step_s",
];
const MORE_MAIN = /^eval\/[^/]+\/avg@\d+$|^environment\/.*(call|error)/;
const LEAST_SHARE = 0.01; // the smallest range of an axis, so that a share of 0.1 % does not look like one of 90 %

const valuesOfMetric = (data, name) => Array.from(data["m:" + name] || [], (value, i) => [data.steps[i], value]).filter(([, value]) => Number.isFinite(value));

function isShare(heads, name) {
  const head = heads.find(({ metrics }) => Object.hasOwn(metrics, name));
  return head ? head.metrics[name][0] === "share" : /^eval\/.*((avg|pass|maj)@|_share$)/.test(name);
}

// An accuracy of 0 says nothing if answers have graded rewards.
function isDead(runs, name) {
  const some = (metric) => runs.some((data) => valuesOfMetric(data, metric).some(([, value]) => value));
  return name === "eval/accuracy" && !some(name) && some("eval/reward_mean");
}

// `runs`: the steps and metrics of each run as loaded. All runs share one plot.
function showCurves(heads, runs, onSteps) {
  const names = [...new Set(runs.flatMap((data) => Object.keys(data)))].filter((key) => key.startsWith("m:")).map((key) => key.slice(2)).sort();
  if (!names.length) return byId("curves-section").remove();
  const main = [...MAIN, ...names.filter((name) => MORE_MAIN.test(name))].filter((name) => names.includes(name) && !isDead(runs, name));
  const [filter, smooth, log, zoom] = ["curves-filter", "smooth", "log", "zoom"].map(byId);
  [filter.value, smooth.value, log.checked] = [address.get("curves") || "", address.get("smooth") || "1", address.has("log")];
  const draw = () => {
    const part = filter.value.trim(), chosen = part ? names.filter((name) => name.includes(part)) : main;
    keep("curves", part);
    keep("smooth", smooth.value > 1 ? smooth.value : "");
    keep("log", log.checked ? "1" : "");
    zoom.hidden = !address.has("steps");
    zoom.textContent = `steps ${address.get("steps")}: show all`;
    byId("curves").replaceChildren(...(chosen.length ? chosen.map((name) => curve(name, runs, heads, go)) : [make("p", "quiet", `No metric contains "${part}".`)]));
    byId("curves-count").textContent = `${chosen.length} of ${names.length}`;
  };
  const go = (first, last) => {
    onSteps(first === last ? String(first) : `${first}..${last}`);
    if (first === last) return;
    keep("steps", `${first}..${last}`);
    draw();
  };
  zoom.addEventListener("click", () => { keep("steps", ""); onSteps(""); draw(); });
  for (const input of [filter, smooth, log]) input.addEventListener("input", draw);
  draw();
}

// Round numbers between two limits, about `count` of them.
function roundNumbers(low, high, count, least = 0) {
  const rough = Math.max((high - low) / count, least), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9), numbers = Math.floor(high / step + 1e-9) - first + 1;
  return { step, numbers: Array.from({ length: Math.max(0, numbers) }, (_, i) => Number(((first + i) * step).toPrecision(9))) };
}

const limits = (numbers) => numbers.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);

// {ticks, at}: the labelled values of an axis, and value -> its place, 0 at the bottom and 1 at the top.
function axisOf(values, log, share) {
  let [low, high] = limits(values);
  if (log) {
    [low, high] = [low * (1 + 1e-6), high * (1 - 1e-6)]; // fp32 may be a bit beyond a round number
    const first = Math.floor(Math.log10(low)), decades = Math.ceil(Math.log10(high)) - first + 1, step = Math.ceil(decades / 4);
    const parts = Array.from({ length: decades }, (_, i) => (decades > 3 ? [1] : [1, 2, 5]).map((part) => Number(`${part}e${first + i}`))).flat();
    const [from, to] = [parts.findLastIndex((v) => v <= low), Math.max(1, parts.findIndex((v) => v >= high))];
    const ticks = parts.slice(from, Math.max(to, from + 1) + 1);
    const at = (v) => Math.log(v / ticks[0]) / Math.log(ticks.at(-1) / ticks[0]);
    return { ticks: ticks.filter((v, i) => decades <= 3 || i % step === 0), at };
  }
  if (low >= 0 && (share || low < high / 2)) low = 0;
  const least = share ? LEAST_SHARE : high === low ? Math.abs(high) || 1 : 0;
  if (high - low < least) high = low + least;
  const { step } = roundNumbers(low, high, 3);
  [low, high] = [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
  return { ticks: roundNumbers(low, high, 3).numbers, at: (v) => (v - low) / (high - low) };
}

// The mean of each value and those of up to count - 1 steps before it.
function smoothed(points, count) {
  let sum = 0, first = 0;
  return points.map(([step, v], i) => {
    for (sum += v; points[first][0] <= step - count; first++) sum -= points[first][1];
    return [step, sum / (i + 1 - first)];
  });
}

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, of] of Object.entries(attributes)) made.setAttribute(key, of);
  return made;
}

function curve(name, runs, heads, go) {
  const share = isShare(heads, name), count = +address.get("smooth") || 1;
  const [from, to] = (address.get("steps") || "-Infinity..Infinity").split("..").map(Number);
  let raw = runs.map((data) => valuesOfMetric(data, name).filter(([step]) => step >= from && step <= to));
  const log = address.has("log") && raw.flat().some(([, v]) => v > 0);
  if (log) raw = raw.map((points) => points.filter(([, v]) => v > 0));
  const points = raw.map((of) => (count > 1 ? smoothed(of, count) : of)), steps = [...new Set(raw.flat().map(([step]) => step))].sort((p, q) => p - q);
  const [unit, meaning] = heads.map(({ metrics }) => (Object.hasOwn(metrics, name) ? metrics[name] : null)).find(Boolean) || ["", ""];
  const title = make("div", "name", name), value = make("div", "quiet value", "no value");
  title.title = meaning ? `${meaning} (${unit})` : name;
  const element = make("div", "curve", title, value);
  element.dataset.metric = name;
  if (!steps.length) return element;
  const { ticks, at } = axisOf(raw.flat().map(([, v]) => v), log, share), [first, last] = limits(steps);
  const x = (step) => (100 * (step - first)) / Math.max(1, last - first), y = (v) => 100 - 100 * at(v);
  const drawing = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", tabindex: 0, role: "slider", "aria-label": name, "aria-valuemin": first, "aria-valuemax": last });
  const area = svg("rect", { y: 0, height: 100, x: 0, width: 0 }), cursor = svg("line", { class: "cursor", y1: 0, y2: 100 });
  drawing.append(area, ...ticks.map((v) => svg("line", { class: "grid", x1: 0, x2: 100, y1: y(v), y2: y(v) })));
  const line = (of, kind) => {
    const path = of.map(([step, v], n) => `${n ? "L" : "M"}${x(step).toFixed(2)} ${y(v).toFixed(2)}`).join("");
    return svg("path", { class: kind, d: of.length > 1 ? path : of.length ? `${path}m-1.5 0h3` : "" });
  };
  drawing.append(...(count > 1 ? raw.map((of, run) => line(of, `run-${run} raw`)) : []), ...points.map((of, run) => line(of, `run-${run}`)), cursor);
  let chosen = last, dragged = null;
  const point = (step, place) => {
    chosen = step;
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, place);
    cursor.style.display = place < 0 ? "none" : "";
    const said = points.map((of) => shown((of.findLast(([s]) => s <= step) || [0, NaN])[1], share));
    value.replaceChildren(`step ${step}: `, ...said.map((text, run) => make("span", `run-${run}`, run ? "  " : "", text)), address.has("log") && !log ? " (not on a log axis)" : "");
    drawing.setAttribute("aria-valuenow", step);
    drawing.setAttribute("aria-valuetext", `step ${step}: ${said.map((text, run) => (runs.length > 1 ? `${heads[run].title} ${text}` : text)).join(", ")}`);
  };
  const nearest = (event) => {
    const box = drawing.getBoundingClientRect(), wanted = (100 * (event.clientX - box.left)) / box.width;
    return steps.reduce((best, step) => (Math.abs(x(step) - wanted) < Math.abs(x(best) - wanted) ? step : best));
  };
  drawing.addEventListener("pointermove", (event) => {
    const step = nearest(event);
    point(step, x(step));
    if (dragged === null) return;
    area.setAttribute("x", Math.min(x(step), x(dragged)));
    area.setAttribute("width", Math.abs(x(step) - x(dragged)));
  });
  drawing.addEventListener("pointerleave", () => { if (dragged === null) point(last, -9); });
  drawing.addEventListener("pointerdown", (event) => { dragged = nearest(event); drawing.setPointerCapture(event.pointerId); });
  drawing.addEventListener("pointercancel", () => { dragged = null; area.setAttribute("width", 0); });
  drawing.addEventListener("pointerup", (event) => {
    if (dragged !== null) go(...[dragged, nearest(event)].sort((p, q) => p - q));
    dragged = null;
  });
  drawing.addEventListener("keydown", (event) => {
    const next = steps[steps.indexOf(chosen) + ({ ArrowRight: 1, ArrowLeft: -1 }[event.key] || 0)];
    if (event.key === "Enter") go(chosen, chosen);
    else if (!event.key.startsWith("Arrow")) return;
    else if (next !== undefined) point(next, x(next));
    event.preventDefault();
  });
  point(last, -9);
  const label = (name, side, place, text) => {
    const made = make("span", name, text);
    made.style[side] = `${place}%`;
    return made;
  };
  const onX = roundNumbers(first, last, 3, 1).numbers;
  element.append(make("div", "plot", drawing, ...ticks.map((v) => label("tick-y", "top", y(v), shown(v, share))), ...(onX.length ? onX : [first]).map((step) => label("tick-x", "left", x(step), step))));
  return element;
}

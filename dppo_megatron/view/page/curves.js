// Small multiples of the run's metrics. A click on a step filters the table to it.

const MAIN = [
  "rollout/reward_mean", "eval/accuracy", "policy/masked_share", "policy/divergence_mean", "mismatch/kl",
  "train/entropy", "train/grad_norm", "rollout/response_tokens_mean", "rollout/truncated_share",
  "rollout/staleness_mean", "rollout/groups_without_signal", "time/step_s",
];

// `runs`: of one run or two, which are laid over each other, their steps and metrics as loaded.
function showCurves(head, runs, onStep) {
  const names = [...new Set(runs.flatMap((data) => Object.keys(data)))].filter((key) => key.startsWith("m:")).map((key) => key.slice(2)).sort();
  if (!names.length) return document.getElementById("curves-section").remove();
  const main = new Set([...MAIN, ...names.filter((name) => /^eval\/[^/]+\/avg@\d+$/.test(name))]);
  const place = document.getElementById("curves"), recorded = new Set(names);
  const filter = document.getElementById("curves-filter");
  const draw = () => {
    const part = filter.value.trim();
    const chosen = part ? names.filter((name) => name.includes(part)) : MAIN.concat(names).filter(
      (name, i, all) => main.has(name) && recorded.has(name) && all.indexOf(name) === i);
    place.replaceChildren(...chosen.map((name) => curve(name, runs, head, onStep)));
    document.getElementById("curves-count").textContent = `${chosen.length} of ${names.length}`;
  };
  filter.addEventListener("input", draw);
  draw();
}

function curve(name, runs, head, onStep) {
  const points = runs.map((data) => Array.from(data["m:" + name] || [], (value, i) => [data.steps[i], value]).filter(([, value]) => Number.isFinite(value)));
  const [unit, meaning] = Object.hasOwn(head.metrics, name) ? head.metrics[name] : ["", ""];
  const title = make("span", "", name);
  title.title = meaning ? `${name}: ${meaning} (${unit})` : name;
  const value = make("span", "quiet");
  const element = make("div", "curve", make("div", "name", title, value));
  element.dataset.metric = name;
  const all = points.flat(), steps = all.map(([step]) => step).sort((p, q) => p - q);
  if (!all.length) return value.append("no value"), element;
  const range = (numbers) => numbers.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
  const [low, high] = range(all.map(([, v]) => v)), [first, last] = range(steps);
  const x = (step) => (100 * (step - first)) / Math.max(1, last - first);
  const y = (v) => (high === low ? 50 : 97 - (94 * (v - low)) / (high - low));
  const svg = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, of] of Object.entries(attributes)) made.setAttribute(key, of);
    return made;
  };
  const drawing = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none" });
  const cursor = svg("line", { y1: 0, y2: 100, x1: -9, x2: -9 });
  points.forEach((of, run) => {
    const path = of.map(([step, v], n) => `${n ? "L" : "M"}${x(step).toFixed(2)} ${y(v).toFixed(2)}`).join("");
    drawing.append(svg("path", { class: `run-${run}`, d: of.length > 1 ? path : of.length ? `${path}m-1.5 0h3` : "" }));
  });
  drawing.append(cursor);
  const say = (step) => {
    const said = points.map((of) => shown((of.findLast(([s]) => s <= step) || [0, NaN])[1]));
    value.replaceChildren(`step ${step}: `, ...said.map((text, run) => make("span", `run-${run}`, run ? " " : "", text)));
  };
  const nearest = (event) => {
    const box = drawing.getBoundingClientRect(), wanted = (100 * (event.clientX - box.left)) / box.width;
    return steps.reduce((best, step) => (Math.abs(x(step) - wanted) < Math.abs(x(best) - wanted) ? step : best));
  };
  const point = (at, step) => {
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    say(step);
  };
  drawing.addEventListener("mousemove", (event) => point(x(nearest(event)), nearest(event)));
  drawing.addEventListener("mouseleave", () => point(-9, last));
  drawing.addEventListener("click", (event) => onStep(nearest(event)));
  say(last);
  element.append(drawing, make("div", "range", make("span", "", `${shown(low)} to ${shown(high)}`), make("span", "", `steps ${first} to ${last}`)));
  return element;
}

// Small multiples of the run's metrics. A click on a step filters the table to it.

const MAIN = [
  "rollout/reward_mean", "eval/accuracy", "policy/masked_share", "policy/divergence_mean", "mismatch/kl",
  "train/entropy", "train/grad_norm", "rollout/response_tokens_mean", "rollout/truncated_share",
  "rollout/staleness_mean", "rollout/groups_without_signal", "time/step_s",
];

function showCurves(head, data, onStep) {
  const names = Object.keys(data).filter((key) => key.startsWith("m:")).map((key) => key.slice(2));
  if (!names.length) return document.getElementById("curves-section").remove();
  const main = new Set([...MAIN, ...names.filter((name) => /^eval\/[^/]+\/avg@\d+$/.test(name))]);
  const place = document.getElementById("curves");
  const filter = document.getElementById("curves-filter");
  const draw = () => {
    const part = filter.value.trim();
    const chosen = part ? names.filter((name) => name.includes(part)) : MAIN.concat(names).filter(
      (name, i, all) => main.has(name) && name in head.recorded && all.indexOf(name) === i);
    place.replaceChildren(...chosen.map((name) => curve(name, data.steps, data["m:" + name], head, onStep)));
    document.getElementById("curves-count").textContent = `${chosen.length} of ${names.length}`;
  };
  head.recorded = Object.fromEntries(names.map((name) => [name, true]));
  filter.addEventListener("input", draw);
  draw();
}

function curve(name, steps, values, head, onStep) {
  const at = [];
  let low = Infinity, high = -Infinity;
  values.forEach((value, i) => {
    if (!Number.isFinite(value)) return;
    at.push(i);
    low = Math.min(low, value);
    high = Math.max(high, value);
  });
  const [unit, meaning] = head.metrics[name] || ["", ""];
  const title = make("span", "", name);
  title.title = meaning ? `${name}: ${meaning} (${unit})` : name;
  const value = make("span", "quiet");
  const element = make("div", "curve", make("div", "name", title, value));
  element.dataset.metric = name;
  const last = at[at.length - 1];
  const say = (i) => { value.textContent = i === undefined ? "no value" : `step ${steps[i]}: ${shown(values[i])}`; };
  say(last);
  if (!at.length) return element;
  const first = steps[at[0]], width = Math.max(1, steps[last] - first), height = high - low || 1;
  const x = (i) => (100 * (steps[i] - first)) / width;
  const y = (i) => (high === low ? 50 : 97 - (94 * (values[i] - low)) / height);
  const svg = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, of] of Object.entries(attributes)) made.setAttribute(key, of);
    return made;
  };
  const path = at.map((i, n) => `${n ? "L" : "M"}${x(i).toFixed(2)} ${y(i).toFixed(2)}`).join("");
  const drawing = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none" });
  const cursor = svg("line", { y1: 0, y2: 100, x1: -9, x2: -9 });
  drawing.append(svg("path", { d: at.length > 1 ? path : `M0 50L100 50` }), cursor);
  const nearest = (event) => {
    const box = drawing.getBoundingClientRect();
    const wanted = (100 * (event.clientX - box.left)) / box.width;
    return at.reduce((best, i) => (Math.abs(x(i) - wanted) < Math.abs(x(best) - wanted) ? i : best), at[0]);
  };
  drawing.addEventListener("mousemove", (event) => {
    const i = nearest(event);
    cursor.setAttribute("x1", x(i));
    cursor.setAttribute("x2", x(i));
    say(i);
  });
  drawing.addEventListener("mouseleave", () => {
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
    say(last);
  });
  drawing.addEventListener("click", (event) => onStep(steps[nearest(event)]));
  const range = make("div", "range", make("span", "", `${shown(low)} to ${shown(high)}`), make("span", "", `steps ${first} to ${steps[last]}`));
  element.append(drawing, range);
  return element;
}

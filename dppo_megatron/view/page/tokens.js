// One rollout with every token coloured by a quantity, its group side by side, and what the engine listed at each token.

const [POLICY, ENVIRONMENT, INHERITED] = [0, 1, 2];
const VERSION_COLOURS = ["#cfe3ff", "#ffe0b8", "#d3f2d0", "#f6d0dd", "#e3d6f7", "#fff3ad", "#cdeef0", "#e8e0d8"];

// Of a group: what can be coloured. `of(r)` is the value of sampled token r of the group; `good` the end without colour.
function quantitiesOf(group) {
  const k = group.k;
  const mass = (r) => {
    let sum = 0;
    for (let j = r * k; j < (r + 1) * k; j++) if (group.topk_ids[j] >= 0) sum += Math.exp(group.topk_logprob[j]);
    return sum;
  };
  const entropy = (r) => {
    let sum = 0, left = 1;
    for (let j = r * k; j < (r + 1) * k; j++) {
      const p = group.topk_ids[j] >= 0 ? Math.exp(group.topk_logprob[j]) : 0;
      if (p > 0) sum -= p * group.topk_logprob[j];
      left -= p;
    }
    return left > 1e-7 ? sum - left * Math.log(left) : sum;
  };
  // Of some sequences alone the trainer stores its numbers; the others have NaN.
  const stored = (values, of = (r) => values[r]) => values && values.some((value) => !Number.isNaN(value)) && of;
  const all = [
    ["ratio", "ln r (trainer − engine)", "diverging", stored(group.trainer_logprob, (r) => group.trainer_logprob[r] - group.logprob[r])],
    ["divergence", "divergence", "high", stored(group.trainer_divergence)],
    ["masked", "masked", "flag", stored(group.trainer_masked)],
    ["trainer_entropy", "entropy (trainer)", "high", stored(group.trainer_entropy)],
    ["logprob", "log-prob (engine)", "low", (r) => group.logprob[r]],
    ["version", "version", "category", (r) => group.versions[r]],
    ["mass", `mass of the top ${k}`, "low", k && mass],
    ["entropy", "entropy of the list", "high", k && entropy],
    ["kept", "tokens left to draw from", "high", group.kept && ((r) => group.kept[r])],
  ];
  return all.filter(([, , , of]) => of).map(([key, title, kind, of]) => ({ key, title, kind, of }));
}

// Typed arrays of a whole group -> its samples, each with where its tokens begin.
function unpack(group) {
  group.k = group.topk_ids && group.logprob.length ? group.topk_ids.length / group.logprob.length : 0;
  group.samples = [];
  let token = 0, own = 0, span = 0;
  for (let i = 0; i < group.counts.length / 3; i++) {
    const [tokens, sampled, spans] = group.counts.subarray(3 * i, 3 * i + 3);
    const of = [];
    for (let j = span; j < span + spans; j++) of.push(group.spans.subarray(3 * j, 3 * j + 3));
    group.samples.push({ number: i, token, own, tokens, spans: of });
    token += tokens;
    own += sampled;
    span += spans;
  }
  return group;
}

// Value -> CSS colour, and an element that explains it. The scale is the group's, so that its samples compare.
function scaleOf(quantity, group) {
  const values = Array.from({ length: group.logprob.length }, (_, r) => quantity.of(r)).filter(Number.isFinite).sort((a, b) => a - b);
  const at = (share) => (values.length ? values[Math.round(share * (values.length - 1))] : 0);
  const red = (t) => `rgba(220, 60, 40, ${(0.75 * Math.min(1, Math.max(0, t))).toFixed(3)})`;
  const blue = (t) => `rgba(40, 100, 220, ${(0.75 * Math.min(1, Math.max(0, t))).toFixed(3)})`;
  const ramp = (from, to, ...stops) => {
    const bar = make("span", "ramp");
    bar.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
    return make("span", "scale", shown(from), bar, shown(to));
  };
  if (quantity.kind === "category") {
    const kinds = [...new Set(values)];
    const colour = (v) => VERSION_COLOURS[((v % 8) + 8) % 8];
    const chips = kinds.slice(0, 12).map((kind) => {
      const chip = make("span", "chip");
      chip.style.background = colour(kind);
      return make("span", "scale", chip, String(kind));
    });
    return { colour, legend: make("span", "scale", ...chips, kinds.length > 12 ? "…" : "") };
  }
  if (quantity.kind === "flag") {
    const share = values.length ? values.filter((v) => v > 0).length / values.length : 0;
    return { colour: (v) => (v > 0 ? red(1) : ""), legend: make("span", "scale", `${shown(100 * share)} % of the group's tokens`) };
  }
  if (quantity.kind === "diverging") {
    const top = Math.max(Math.abs(at(0.01)), Math.abs(at(0.99))) || 1;
    return { colour: (v) => (Number.isFinite(v) ? (v > 0 ? red(v / top) : blue(-v / top)) : ""), legend: ramp(-top, top, blue(1), red(0), red(1)) };
  }
  const low = quantity.kind === "low";
  const [none, full] = low ? [at(1), at(0.01)] : [at(0), at(0.99)];
  const width = full - none || 1;
  return { colour: (v) => (Number.isFinite(v) ? red((v - none) / width) : ""), legend: ramp(none, full, red(0), red(1)) };
}

function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0))).replace(/\t/g, "→\t").replace(/\n/g, "⏎\n");
}

function tokenText(texts, id) {
  const text = texts[id];
  return text === undefined || text === "" ? `⟨${id}⟩` : text;
}

// The tokens of one sample as elements; each knows its place by data-s, data-t.
function tokensOf(group, sample, texts, quantity, scale) {
  const place = make("div", "tokens");
  let token = sample.token, own = sample.own, turn = -1;
  for (const [origin, count, number] of sample.spans) {
    if (number !== turn && sample.spans.length > 1) place.append(make("span", "turn", `turn ${number + 1}`));
    turn = number;
    for (let i = 0; i < count; i++, token++) {
      const element = make("i", ["", "environment", "inherited"][origin], visible(tokenText(texts, group.ids[token])));
      element.dataset.t = token;
      if (origin === POLICY) {
        element.dataset.r = own;
        const colour = scale.colour(quantity.of(own));
        if (colour) element.style.background = colour;
        if (group.trainer_masked && group.trainer_masked[own] > 0) element.classList.add("masked");
        own++;
      }
      place.append(element);
    }
  }
  return place;
}

function tipOf(group, element, texts, quantities) {
  const t = +element.dataset.t, parts = [make("div", "", `${JSON.stringify(tokenText(texts, group.ids[t]))}  id ${group.ids[t]}`)];
  if (element.dataset.r === undefined) {
    const why = element.className.startsWith("environment") ? "environment: put in from outside" : "inherited: sampled in an earlier branch";
    return [...parts, make("div", "quiet", `${why}; no loss here`)];
  }
  const r = +element.dataset.r;
  const facts = make("table");
  for (const { title, kind, of } of quantities) {
    const value = of(r);
    const said = kind === "flag" ? ["no", "yes"][value] || "–" : shown(value);
    facts.append(make("tr", "", make("td", "", title), make("td", "n", said)));
  }
  parts.push(facts);
  if (group.k) {
    const list = make("table", "list", make("tr", "quiet", make("td", "", "engine's list"), make("td", "n", "log-prob"), make("td", "n", "prob")));
    for (let j = r * group.k; j < (r + 1) * group.k; j++) {
      const id = group.topk_ids[j];
      if (id < 0) continue;
      list.append(make("tr", id === group.ids[t] ? "drawn" : "", make("td", "", JSON.stringify(tokenText(texts, id))),
        make("td", "n", group.topk_logprob[j].toFixed(3)), make("td", "n", Math.exp(group.topk_logprob[j]).toPrecision(3))));
    }
    parts.push(list);
  }
  return parts;
}

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
    ["teacher", "ln μ (engine) − ln teacher", "diverging", group.teacher_logprob && ((r) => group.logprob[r] - group.teacher_logprob[r])],
    ["kept", "tokens left to draw from", "high", group.kept && ((r) => group.kept[r])],
  ];
  return all.filter(([, , , of]) => of).map(([key, title, kind, of]) => ({ key, title, kind, of }));
}

function valuesOf(group, key) {
  return (quantitiesOf(group).find((quantity) => quantity.key === key) || { of: () => NaN }).of;
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

// Value -> CSS colour, and an element that explains it. All samples on the page have one scale.
function scaleOf(quantity, groups) {
  const of = (group) => valuesOf(group, quantity.key);
  const values = groups.flatMap((group) => Array.from(group.logprob, (_, r) => of(group)(r))).filter(Number.isFinite).sort((a, b) => a - b);
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
    return { colour: (v) => (v > 0 ? red(1) : ""), legend: make("span", "scale", `${shown(100 * share)} % of these tokens`) };
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

// Where chat templates begin a message (its role) or begin and end a call of a tool or its result.
const MARKS = /<\|im_start\|>\s*(\w+)|<\|start_header_id\|>\s*(\w+)\s*<\|end_header_id\|>|<[|｜](user|assistant|system|observation)[|｜]>|<(\/?)tool_(call|response)>/gi;

// Text -> its blocks {begin, label} in order. Marks without content belong to the block before them.
function blocksOf(text, label) {
  const found = [{ begin: 0, label }];
  for (const [mark, ...m] of [...text.matchAll(MARKS)].map((m) => [m, m[1] || m[2] || m[3], m[4], m[5]])) {
    if (!m[2]) found.push({ begin: mark.index, label: label = m[0].toLowerCase() });
    else if (m[1]) found.push({ begin: mark.index + mark[0].length, label });
    else {
      const name = /"name"\s*:\s*"([^"]*)"/.exec(text.slice(mark.index).split("</tool_call>")[0]);
      found.push({ begin: mark.index, label: m[2].toLowerCase() === "call" ? `tool call${name ? " " + name[1] : ""}` : "tool result" });
    }
  }
  const full = found.filter(({ begin }, i) => text.slice(begin, found[i + 1]?.begin).replace(MARKS, "").replace(/<[|｜][^<>]*>/g, "").trim());
  if (!full.length) return [found[0]];
  full[0].begin = 0;
  return full;
}

// The tokens of one sample as blocks of a conversation; each token knows its place by data-t and data-r.
function tokensOf(group, sample, texts, quantity, scale) {
  const place = make("div", `tokens ${quantity.kind}`), value = valuesOf(group, quantity.key);
  let token = sample.token, own = sample.own, turn = -1;
  for (const [origin, count, number] of sample.spans) {
    const said = Array.from({ length: count }, (_, i) => tokenText(texts, group.ids[token + i]));
    const blocks = blocksOf(said.join(""), origin === POLICY ? "assistant" : origin === ENVIRONMENT ? "environment" : "earlier");
    const plain = sample.spans.length === 1 && blocks.length === 1;
    let at = 0, block = null;
    for (let i = 0; i < count; i++, token++) {
      while (blocks.length && at + said[i].length > blocks[0].begin) {
        const { label } = blocks.shift();
        const by = ["sampled by the policy", "from the environment", "from an earlier branch"][origin];
        block = make("div", "block" + (/^tool/.test(label) ? " tool" : ""), plain ? null : make("div", "role",
          number !== turn ? make("span", "turn", `turn ${number + 1}`) : null, make("b", "", label), ` ${by}`));
        turn = number;
        place.append(block);
      }
      at += said[i].length;
      const element = make("i", ["", "environment", "inherited"][origin], visible(said[i]));
      element.dataset.t = token;
      if (origin === POLICY) {
        element.dataset.r = own;
        const colour = scale.colour(value(own));
        if (colour) element.style.background = colour;
        if (group.trainer_masked && group.trainer_masked[own] > 0) element.classList.add("masked");
        own++;
      }
      block.append(element);
    }
  }
  return place;
}

// Plain text as blocks of class `name`, each with its role.
function textOf(text, label, name) {
  const blocks = blocksOf(text, label);
  return blocks.map(({ begin, label }, i) => make("div", name, make("b", "", label), text.slice(begin, blocks[i + 1]?.begin)));
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

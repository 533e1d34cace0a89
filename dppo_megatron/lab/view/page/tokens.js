// One rollout: its tokens colored by a quantity, and what the engine listed at each token.

const [POLICY, ENVIRONMENT, INHERITED] = [0, 1, 2];
const VERSION_COLORS = ["#cfe3ff", "#ffe0b8", "#d3f2d0", "#f6d0dd", "#e3d6f7", "#fff3ad", "#cdeef0", "#e8e0d8"];

// Of a group: what can be colored. `of(r)` is the value of sampled token r of the group. `full` is the value of full color,
// the same in every rollout, and `none` the value without color. `delta` is the threshold of the run's trust region.
function quantitiesOf(group, delta) {
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
    ["ratio", "ln r (trainer − engine)", "diverging", stored(group.trainer_logprob, (r) => group.trainer_logprob[r] - group.logprob[r]), 0.2],
    ["divergence", `divergence${delta ? `, threshold ${delta}` : ""}`, "ramp", stored(group.trainer_divergence), delta ? 2 * delta : 0.3],
    ["masked", "masked", "flag", stored(group.trainer_masked)],
    ["trainer_entropy", "entropy (trainer)", "ramp", stored(group.trainer_entropy), 3],
    ["logprob", "log-prob (engine)", "ramp", (r) => group.logprob[r], -5],
    ["version", "version", "category", (r) => group.versions[r]],
    ["mass", `mass of the top ${k}`, "ramp", k && mass, 0.5, 1],
    ["entropy", "entropy of the list", "ramp", k && entropy, 3],
    ["teacher", "ln μ (engine) − ln teacher", "diverging", group.teacher_logprob && ((r) => group.logprob[r] - group.teacher_logprob[r]), 2],
    ["kept", "tokens left to draw from", "ramp", group.kept && ((r) => group.kept[r]), 50, 1],
  ];
  return all.filter(([, , , of]) => of).map(([key, title, kind, of, full, none = 0]) => ({ key, title, kind, of, full, none }));
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

// Value -> CSS color, and an element that explains it.
function scaleOf({ key, kind, full, none }, groups) {
  const values = groups.flatMap((group) => { // of a quantity without a ramp
    const { of } = kind !== "ramp" && kind !== "diverging" && quantitiesOf(group).find((quantity) => quantity.key === key) || {};
    return of ? Array.from(group.logprob, (_, r) => of(r)).filter(Number.isFinite) : [];
  });
  const tint = (rgb) => (t) => `rgba(${rgb}, ${(0.75 * Math.min(1, Math.max(0, t))).toFixed(3)})`;
  const red = tint("220, 60, 40"), blue = tint("40, 100, 220");
  const ramp = (from, to, ...stops) => {
    const bar = make("span", "ramp");
    bar.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
    return make("span", "scale", from, bar, to);
  };
  if (kind === "category") {
    const kinds = [...new Set(values)].sort((p, q) => p - q);
    const color = (v) => VERSION_COLORS[((v % 8) + 8) % 8];
    const chips = kinds.slice(0, 12).map((one) => {
      const chip = make("span", "chip");
      chip.style.background = color(one);
      return make("span", "scale", chip, String(one));
    });
    return { color, legend: make("span", "scale", ...chips, kinds.length > 12 ? "…" : "") };
  }
  if (kind === "flag") {
    const share = values.length ? values.filter((v) => v > 0).length / values.length : 0;
    return { color: (v) => (v > 0 ? red(1) : ""), legend: make("span", "scale", `${shown(share, true)} of these tokens`) };
  }
  if (kind === "diverging") {
    const color = (v) => (Number.isFinite(v) ? (v > 0 ? red(v / full) : blue(-v / full)) : "");
    return { color, legend: ramp(`${-full} and below`, `${full} and above`, blue(1), red(0), red(1)) };
  }
  const color = (v) => (Number.isFinite(v) ? red((v - none) / (full - none)) : "");
  return { color, legend: ramp(shown(none), `${shown(full)} and ${full < none ? "below" : "above"}`, red(0), red(0.5), red(1)) };
}

function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)));
}

function tokenText(texts, id) {
  const text = texts[id];
  return text === undefined || text === "" ? `⟨${id}⟩` : text;
}

// Marks of chat templates: the begin of a message with its role, of a tool call, of a tool's result and of reasoning, and
// their ends. Other marks have no meaning here and are hidden in the text.
const MARKS = new RegExp([
  /(?<open><\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<[|｜](?=(?:user|assistant|system|observation)[|｜]>))\s*(?<role>\w*)(?:[|｜]>|\s*<\|end_header_id\|>)?/,
  /(?<call><tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>|<[|｜]tool[▁_]call[▁_]begin[|｜]>)/,
  /(?<result><tool_response>|<[|｜]tool[▁_]output[▁_]begin[|｜]>)/,
  /(?<think><think>|\[THINK\])/,
  /(?<end><\/(?:tool_call|tool_response|think)>|\[\/THINK\]|<[|｜]tool[▁_](?:call|output)[▁_]end[|｜]>)/,
].map(({ source }) => source).join("|"), "gi");
const OTHER_MARKS = /<[|｜][^<>|｜\n]{1,40}[|｜]>|<\/s>|<(?:start|end)_of_turn>/g;
const MESSAGE_ENDS = /(?:^|<\|(?:im_end|eot_id|eom_id|end_of_text|endoftext|begin_of_text)\|>|<end_of_turn>|<\/s>|<bos>|<s>)$/;
const RESULT_ROLES = ["tool", "ipython", "observation"];

// The beginning of a text in the table, without marks; of a prompt only the last message.
function plain(text) {
  return text.split(/<\|im_end\|>|<\|eot_id\|>|<end_of_turn>/)[0].trim() || text;
}

function indented(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === "object" ? JSON.stringify(value, null, 2) : text;
  } catch {
    return text;
  }
}

// A tool call without its marks -> its label, and its text with arguments indented or the problem.
function readCall(text) {
  const named = text.match(/^(?:function)?[^\w{]{0,20}(?:functions\.)?([\w.-]+?)(?::\d+)?(?:\[ARGS\])?\s*(?:```json)?\s*(\{[\s\S]*\})\s*(?:```)?$/);
  const tagged = /<function=|<arg_key>/.test(text) && text.match(/^(?:<function=)?\s*([\w.-]+)/);
  if (tagged) return { label: `tool call ${tagged[1]}`, text };
  try {
    const calls = [named ? { name: named[1], arguments: JSON.parse(named[2]) } : JSON.parse(text)].flat();
    if (!calls.every((call) => call && typeof call.name === "string")) return { label: "tool call", text: indented(text), problem: "without a name" };
    return { label: `tool call ${calls.map(({ name }) => name).join(", ")}`, text: calls.map((call) => JSON.stringify(call.arguments ?? call.parameters ?? {}, null, 2)).join("\n") };
  } catch {
    return { label: "tool call", text, problem: "not JSON" };
  }
}

// The problem that a tool's result reports, by the form of our environments or a common one.
function problemOf(result) {
  if (/^error: ValueError: no tool /.test(result)) return "unknown tool";
  return /^(\{\s*"error"|\w*(error|exception)\s*:|traceback \(most recent)/i.test(result) ? "tool error" : "";
}

// Text -> its blocks {begin, end, label, kind, text, problem} in order. A role is never taken from text that the policy
// sampled: there, and inside a message that has not ended, a mark of a role makes a malformed block. Marks without content
// belong to the block before them.
function blocksOf(text, label, sampled) {
  const bare = text.replace(OTHER_MARKS, "").trim(); // Llama 3 marks no call
  const isCall = sampled && bare.startsWith("{") && /"(parameters|arguments)"\s*:/.test(bare) && !readCall(bare).problem;
  const cuts = [{ begin: 0, from: 0, label, kind: isCall ? "call" : "" }];
  for (const { index, 0: mark, groups: { open, role, call, result, think, end } } of text.matchAll(MARKS)) {
    const last = cuts.at(-1), from = index + mark.length, thought = end && /think/i.test(end);
    const cut = (kind, rest) => cuts.push({ begin: index, from, label, kind, ...rest });
    const unended = () => open.length > 2 && !MESSAGE_ENDS.test(text.slice(0, index).trimEnd()) && text.slice(last.from, index).trim();
    if ((open || result) && (sampled || (open && unended()))) {
      cut("malformed", { label: "malformed", from: index, problem: `${open ? "role" : "result"} ${sampled ? "sampled by the policy" : "inside a message"}` });
    } else if (open) {
      label = role.toLowerCase() || label;
      cut(RESULT_ROLES.includes(label) ? "result" : "");
    } else if (last.kind === "think" ? thought : end && ["call", "result"].includes(last.kind)) {
      last.to = index;
      cut("", { begin: from });
    } else if (thought && sampled) { // the prompt opened the reasoning
      for (const before of cuts) if (before.kind !== "malformed") before.kind = "think";
      last.to = index;
      cut("", { begin: from });
    } else if (last.kind !== "think" && (result || (label === "assistant" && (call || think)))) {
      cut(call ? "call" : result ? "result" : "think"); // calls in reasoning are not executed, and others are examples
    }
  }
  const blocks = cuts.map((cut, i) => {
    const inside = text.slice(cut.from, cut.to ?? cuts[i + 1]?.begin), clean = (cut.kind === "malformed" ? inside : inside.replace(OTHER_MARKS, "")).trim();
    const read = { call: readCall, result: (of) => ({ label: "tool result", text: indented(of), problem: problemOf(of) }), think: () => ({ label: "reasoning" }) }[cut.kind];
    return { text: clean, problem: "", ...cut, ...(clean && read ? read(clean) : {}) };
  }).filter((block) => block.text);
  const full = blocks.length ? blocks : [{ ...cuts[0], text: "", problem: "" }];
  return full.map((block, i) => ({ ...block, begin: i ? block.begin : 0, end: full[i + 1]?.begin ?? text.length }));
}

function blockElement({ label, kind, problem }, by, turn, heading, name, ...content) {
  const role = heading || problem ? make("div", "role", turn, make("b", "", label), by ? ` ${by} ` : " ", problem ? make("span", "badge", problem) : null) : null;
  return make("div", `${name} ${kind === "result" ? "call" : kind}${problem ? " bad" : ""}`, role, ...content);
}

// Of a sample: its spans {origin, turn, token, own, said, blocks}; token and own are where its tokens and sampled tokens begin.
function spansOf(group, sample, texts) {
  let { token, own } = sample;
  return sample.spans.map(([origin, count, turn]) => {
    const said = Array.from({ length: count }, (_, i) => tokenText(texts, group.ids[token + i]));
    const span = { origin, turn, token, own, said, blocks: blocksOf(said.join(""), origin === ENVIRONMENT ? "environment" : "assistant", origin !== ENVIRONMENT) };
    token += count;
    if (origin === POLICY) own += count;
    return span;
  });
}

// The blocks of a sample's spans as a conversation; `content(span, block)` makes what is in a block.
function conversation(spans, name, content) {
  const by = ["sampled by the policy", "from the environment", "from an earlier branch"];
  let turn = -1;
  return make("div", name, ...spans.flatMap((span) => span.blocks.map((block) => {
    const begins = span.turn !== turn ? make("span", "turn", `turn ${span.turn + 1}`) : null;
    turn = span.turn;
    return blockElement(block, by[span.origin], begins, spans.length > 1 || span.blocks.length > 1 || block.kind, "block", ...content(span, block));
  })));
}

// Each token knows its place by data-t and data-r.
function tokensOf(group, spans, { kind, of: value }, scale) {
  let token = spans[0]?.token, own = spans[0]?.own;
  const place = conversation(spans, `tokens ${kind}`, ({ origin, token: first, said }, block) => {
    const elements = [];
    for (let at = said.slice(0, token - first).join("").length; token - first < said.length && at < block.end; token++) {
      const text = said[token - first], element = make("i", ["", "environment", "inherited"][origin], visible(text).replace(/\t/g, "→\t").replace(/\n/g, "⏎\n"));
      at += text.length;
      element.dataset.t = token;
      if (origin === POLICY) {
        element.dataset.r = own;
        element.style.background = scale.color(value(own));
        if (group.trainer_masked && group.trainer_masked[own] > 0) element.classList.add("masked");
        own++;
      }
      elements.push(element);
    }
    return elements;
  });
  place.tabIndex = 0;
  place.setAttribute("role", "group");
  place.setAttribute("aria-label", "Tokens; ← and → show the values of one");
  return place;
}

const asText = (spans) => conversation(spans, "prose", (_, block) => [make("div", "", visible(block.text))]);

// A text of no tokens, as blocks of class `name`.
function textBlocks(text, label, name, raw, sampled) {
  const blocks = blocksOf(text, label, sampled);
  return blocks.map((block) => blockElement(block, "", null, name === "box" || blocks.length > 1, name, raw ? text.slice(block.begin, block.end) : block.text));
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

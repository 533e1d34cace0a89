// Puts the page together. What is chosen (quantity, text or tokens, side by side) stays from rollout to rollout.

// Of each tile the metrics in order of preference, of which the first recorded one is shown.
const TILES = [
  [["rollout/reward_mean", "reward"], ["train/loss", "loss"]],
  [["eval/accuracy", "held-out accuracy"], ["eval/reward_mean", "held-out reward"]],
  [["policy/masked_share", "masked tokens"], ["train/entropy", "entropy"]],
  [["mismatch/kl", "mismatch KL"], ["train/grad_norm", "gradient norm"]],
  [["throughput/tokens_per_s", "tokens/s"]],
];

const RELOAD_S = 30; // as often as `view --follow` writes

function showHead(heads) {
  document.body.classList.toggle("compare", heads.length > 1);
  const named = (title, text) => (heads.length > 1 ? `${title}: ${text}` : text);
  byId("title").replaceChildren(...heads.map(({ title }, run) => make("span", `run-${run}`, run ? " and " : "", title)));
  byId("path").replaceChildren(...heads.map(({ path }) => make("div", "", path)), make("div", "", `dppo-megatron ${heads[0].version}   `, make("code", "", `dppo-megatron view ${heads.map(({ path }) => path).join(" ")}`)));
  byId("notes").replaceChildren(...heads.flatMap(({ title, notes }) => notes.map((note) => make("li", "", named(title, note)))));
  const names = new Set(heads.flatMap(({ summary }) => Object.keys(summary)));
  const of = ({ summary }, name) => (Object.hasOwn(summary, name) && !/^[-, ]*$/.test(summary[name]) ? summary[name] : "");
  names.delete("state");
  if (!heads.some((head) => of(head, "MFU"))) names.delete("TFLOP/s per GPU"); // no known GPU
  byId("summary").replaceChildren(...[...names].map((name) => {
    const values = heads.map((head) => of(head, name)), equal = heads.length > 1 && new Set(values).size === 1;
    if (!values.some(Boolean)) return "";
    return make("div", equal ? "equal" : "", make("dt", "", name.trim()), ...(equal ? [make("dd", "", values[0])] : values.map((value, run) => make("dd", `run-${run}`, value || "–"))));
  }));
  byId("more").hidden = !names.size;
  if (heads.length > 1) byId("more").firstElementChild.append(" (gray: equal in all runs)");
  byId("more").open = address.has("more");
  byId("more").addEventListener("toggle", () => keep("more", byId("more").open ? "1" : ""));
  if (!heads.some(({ summary }) => /^(queued|starting|running|waiting)/.test(summary.state))) return;
  const box = make("input");
  Object.assign(box, { type: "checkbox", id: "reload", checked: address.has("reload") });
  box.addEventListener("change", () => keep("reload", box.checked ? "1" : ""));
  byId("path").append(make("label", "", box, ` reload every ${RELOAD_S} s, as \`dppo-megatron view --follow\` writes this file again`));
  setInterval(() => {
    if (!box.checked || document.activeElement.matches("input:not([type])")) return; // while a filter is typed
    saveAddress({ y: scrollY });
    location.reload();
  }, 1000 * RELOAD_S);
}

// Six key figures of each run, with the change since the start: means of as many steps as in `dppo-megatron report`.
function showTiles(heads, runs) {
  const tile = (title, ...values) => {
    const made = make("div", "tile", make("div", "quiet", title), ...values);
    made.setAttribute("role", "listitem");
    return made;
  };
  const recorded = (name) => runs.some((data) => valuesOfMetric(data, name).length) && !isDead(runs, name);
  const sets = [...new Set(runs.flatMap((data) => Object.keys(data)))].filter((key) => /^m:eval\/[^/]+\/avg@\d+$/.test(key)).map((key) => [key.slice(2), key.slice(7)]);
  const tiles = TILES.map((choices, i) => {
    const [name, title] = [...choices, ...(i === 1 ? sets : [])].find(([metric]) => recorded(metric)) || choices[0];
    const all = runs.map((data) => valuesOfMetric(data, name).map(([, value]) => value)), share = isShare(heads, name);
    const few = name.startsWith("eval/") ? 1 : Math.max(1, Math.min(10, ...all.map(({ length }) => Math.floor(length / 4))));
    return tile(title, ...all.map((values, run) => {
      const mean = (of) => of.reduce((sum, value) => sum + value, 0) / of.length;
      const [first, last] = [mean(values.slice(0, few)), mean(values.slice(-few))];
      const note = values.length < 2 ? "" : `${last > first ? "▲" : last < first ? "▼" : "="} from ${shown(first, share)}`;
      const made = make("div", "figure", make("span", `number run-${run}`, shown(last, share)), make("span", "quiet", note));
      made.title = `${name}${few > 1 ? `, means of the first and last ${few} steps` : ""}`;
      return made;
    }));
  });
  const dates = (...times) => {
    const [[day, begin], [lastDay, end]] = times.map((seconds) => new Date(1000 * seconds).toLocaleString("sv").slice(0, 16).split(" "));
    return `${day} ${begin} to ${day === lastDay ? "" : `${lastDay} `}${end}`;
  };
  const states = heads.map(({ summary, times }, run) => {
    const [kind, ...why] = (summary.state || "bank").split(": ");
    return make("div", "figure", make("span", `number run-${run}`, kind), make("span", "quiet", [...why, times.length ? dates(...times) : ""].filter(Boolean).join("; ")));
  });
  byId("tiles").replaceChildren(...(runs.some((data) => data.steps.length) ? tiles : []), tile("state", ...states));
}

// Rows of the same group or evaluated prompt, in order of their samples; then in each other run those of the same set,
// line and text of the prompt file in the nearest step.
function together(data, heads, row, excerptOf) {
  const all = Array.from(data.set, (_, i) => i), runOf = (i) => (data.run ? data.run[i] : 0);
  const group = (of) => all.filter((i) => runOf(i) === runOf(of) && ["set", "source", "item"].every((key) => data[key][i] === data[key][of]));
  const set = (i) => [!data.set[i], heads[runOf(i)].sets[data.set[i]]].join(); // each run numbers its own
  const same = data.run ? all.filter((i) => runOf(i) !== runOf(row) && set(i) === set(row) && data.row[i] === data.row[row] && excerptOf(i, 0) === excerptOf(row, 0)) : [];
  const away = (i) => Math.abs(data.step[i] - data.step[row]);
  const others = [...new Set(same.map(runOf))].map((run) => same.filter((i) => runOf(i) === run).reduce((p, q) => (away(q) < away(p) ? q : p)));
  return [row, ...others].map(group);
}

const ENDINGS = { length: "truncated", max_turns: "out of turns", abort: "aborted" };

// `parts`: of each run the rows, and their group and texts, their record of answers, or why there are no tokens.
function showRollout(place, heads, data, row, parts, open) {
  const { group, record } = parts[0], groups = parts.map((part) => part.group).filter(Boolean);
  const runOf = (of) => (data.run ? data.run[of] : 0), { delta } = heads[runOf(row)];
  const quantities = groups.length ? quantitiesOf(groups[0], delta) : [];
  const rows = parts[0].rows, count = parts.reduce((sum, part) => sum + part.rows.length, 0);
  const branches = ({ trajectory }, sample) => trajectory.filter((t) => t === trajectory[sample]).length;
  const name = (of, sample) => {
    const t = of.trajectory[sample];
    return branches(of, sample) > 1 ? `${t}, branch ${of.trajectory.slice(0, sample + 1).filter((u) => u === t).length}` : String(t);
  };
  const set = (key, value) => { keep(key, value); draw(); };
  const draw = () => {
    const many = address.has("many") && count > 1, raw = address.has("tokens");
    const quantity = quantities.find(({ key }) => key === address.get("color")) || quantities[0];
    const scale = quantity && scaleOf(quantity, groups);
    const select = make("select", "", ...quantities.map(({ key, title }) => {
      const option = make("option", "", title);
      option.value = key;
      option.selected = key === quantity.key;
      return option;
    }));
    select.id = "quantity";
    select.addEventListener("change", () => set("color", select.value));
    const column = (part, other) => {
      const number = data.sample[other], ended = part.group ? part.group.of.finish[number] : part.record ? part.record.samples[number].finish : "";
      const values = [["reward", data.reward], ["advantage", data.advantage], ["tokens", data.tokens], ["masked", data.masked]];
      const said = make("div", "facts"), say = (...parts) => said.append(make("span", "", ...parts), " ");
      if (data.run) say(make("b", `run-${runOf(other)}`, heads[runOf(other)].title), ` step ${data.step[other]}`);
      say(`sample ${number}`);
      for (const [key, of] of values) if (of && !Number.isNaN(of[other])) say(`${key} `, make("b", "", shown(of[other])));
      const badges = [data.failed[other] ? "no reward" : "", ENDINGS[ended] || (data.truncated[other] ? ENDINGS.length : "")].filter(Boolean);
      for (const text of badges) say(make("span", "badge", text));
      if (!badges.length) say(ended);
      if (part.record) {
        const { text, final } = part.record.samples[number];
        if (final !== null && final !== undefined) say(`final answer ${final}`);
        return make("div", "sample", said, make("div", raw ? "tokens" : "prose", ...textBlocks(text, "assistant", "block", raw, !text.startsWith(part.record.prompt))));
      }
      if (!part.group) return make("div", "sample", said, make("p", "quiet why", part.why));
      const { of, samples } = part.group, turns = of.turn_rewards, spans = spansOf(part.group, samples[number], part.texts);
      const blocks = spans.flatMap((span) => span.blocks), calls = blocks.filter(({ kind }) => kind === "call").length, problems = blocks.filter(({ problem }) => problem).length;
      if (calls) say(`${calls} tool call${calls > 1 ? "s" : ""}`);
      if (problems) say(make("span", "badge", `${problems} problem${problems > 1 ? "s" : ""}`));
      if (branches(of, number) > 1) say(`trajectory ${name(of, number)} of ${branches(of, number)}`);
      if (turns) say(`rewards of turns ${turns[of.trajectory[number]].map((value) => shown(value)).join(", ")}`);
      const text = raw ? tokensOf(part.group, spans, quantity, scale) : asText(spans);
      text.shows = part;
      return make("div", "sample", said, text, ENDINGS[ended] ? make("div", "ending", `✂ ${ENDINGS[ended]}`) : null);
    };
    const where = data.set[row] ? `policy ${data.step[row]}` : `step ${data.step[row]}`, of = group ? group.of : record;
    const buttons = rows.length > 1 ? rows.map((other) => makeButton(group ? name(group.of, data.sample[other]) : String(data.sample[other]), !many && other === row, () => { keep("many", ""); open(other); })) : [];
    const toggle = makeButton(many ? "one sample" : `${count} samples side by side`, many, () => set("many", many ? "" : "1"));
    toggle.id = "many";
    const pairs = new Map(); // sample number -> the samples of all runs
    for (const part of parts) for (const other of part.rows) pairs.set(data.sample[other], [...(pairs.get(data.sample[other]) || []), column(part, other)]);
    const samples = !many ? [column(parts[0], row)] : data.run ? [...pairs.values()].map((pair) => make("div", "pair", ...pair)) : [...pairs.values()].flat();
    const title = `${heads[runOf(row)].sets[data.set[row]]}, ${where}, prompt ${data.prompt[row]}`;
    place.replaceChildren(
      make("div", "bar", make("h2", "", title), ...buttons, count > 1 ? toggle : "",
        make("span", "toggle", makeButton("text", !raw, () => set("tokens", "")), makeButton("tokens", raw, () => set("tokens", "1")))),
      quantity && raw ? make("div", "bar", make("label", "", "color ", select), scale.legend) : "",
      ...(of ? textBlocks(of.prompt, "prompt", "box", raw) : []), of && of.answer ? make("div", "box", make("div", "role", make("b", "", "answer")), of.answer) : "",
      make("div", `samples${many ? " many" : ""}${many && data.run ? " pairs" : ""}`, ...samples));
    hover(place, groups.length && ((element) => {
      const part = element.closest(".tokens").shows;
      return part && tipOf(part.group, element, part.texts, quantitiesOf(part.group, delta));
    }));
  };
  draw();
}

// The tip of the token under the pointer, or of the one that the arrow keys chose.
function hover(place, tip) {
  const box = byId("tip");
  let chosen = null;
  const show = (element) => {
    const said = element && tip && tip(element);
    if (chosen) chosen.classList.remove("at");
    chosen = said ? element : null;
    box.hidden = !said;
    if (!said) return;
    element.classList.add("at");
    box.replaceChildren(...said);
    const at = element.getBoundingClientRect(), size = box.getBoundingClientRect();
    const under = at.bottom + 6 + size.height < innerHeight, right = at.left < innerWidth / 2;
    // Without room under the token it stands aside, so that it covers neither the token nor the head of its sample.
    box.style.top = `${under ? at.bottom + 6 : Math.max(4, innerHeight - size.height - 6)}px`;
    box.style.left = `${under ? Math.max(4, Math.min(at.left, innerWidth - size.width - 8)) : right ? innerWidth - size.width - 8 : 4}px`;
  };
  show(null);
  place.onmouseover = (event) => show(event.target.closest(".tokens i"));
  place.onmouseleave = () => show(null);
  place.onkeydown = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !event.target.matches(".tokens")) return;
    const all = [...event.target.querySelectorAll("i")];
    const next = all[Math.min(all.length - 1, Math.max(0, all.indexOf(chosen) + by))];
    event.preventDefault();
    if (next) next.scrollIntoView({ block: "nearest" });
    show(next);
  };
}

async function start() {
  const { y } = history.state || {};
  const head = await loadJson("head");
  const heads = [head, ...head.others];
  showHead(heads);
  const [data, excerpts] = [await loadTensors("table"), await loadJson("excerpts")];
  if (heads.length < 2) data.run = null;
  const runOf = (row) => (data.run ? data.run[row] : 0), blobOf = (run) => (run ? `${run}-` : "");
  const why = (row) => heads[runOf(row)].missing[data.source[row]] || "not in this file";
  const excerptOf = (row, i) => {
    const { groups, files } = excerpts[runOf(row)], source = data.source[row];
    return data.set[row] ? files[source][data.item[row]][i] : groups[source] ? groups[source][i] : i ? why(row) : "";
  };
  const part = async (rows) => {
    const [row] = rows, blob = blobOf(runOf(row)), source = data.source[row];
    if (data.set[row]) return { rows, record: (await loadJson(`${blob}answers-${source}`))[data.item[row]] };
    if (!data.detail[row]) return { rows, why: `No tokens: ${why(row)}.` };
    return { rows, group: unpack(await loadTensors(`${blob}group-${source}`)), texts: await loadJson(`${blob}texts`) };
  };
  const place = byId("rollout"), nameOf = (row) => [runOf(row), heads[runOf(row)].sets[data.set[row]], data.step[row], data.prompt[row], data.sample[row]].join(" ");
  let asked = 0;
  const close = () => {
    asked++;
    hover(place, null);
    place.replaceChildren();
  };
  const open = async (row) => {
    keep("row", nameOf(row));
    const mine = ++asked, parts = await Promise.all(together(data, heads, row, excerptOf).map(part));
    if (mine === asked) showRollout(place, heads, data, row, parts, show);
  };
  const wanted = address.get("row");
  const table = showTable(byId("table"), data, heads, excerptOf, open, close);
  const show = (row) => table.show(row);
  requestAnimationFrame(() => setTimeout(() => performance.mark("table-shown")));
  const curves = await Promise.all(heads.map((_, run) => loadTensors(`${blobOf(run)}curves`)));
  showTiles(heads, curves);
  showCurves(heads, curves, (steps) => table.filter("step", steps));
  const linked = wanted ? data.set.findIndex((_, row) => nameOf(row) === wanted) : -1;
  if (table.order.length && !asked) show(linked < 0 ? table.first() : linked);
  if (y) setTimeout(scrollTo, 100, 0, y); // as before the reload
  document.documentElement.dataset.shown = "";
}

addEventListener("hashchange", () => location.reload()); // another link to this page
start().catch((error) => {
  byId("notes").append(make("li", "", `This page cannot be shown: ${error}`));
  throw error;
});

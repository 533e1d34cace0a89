// Puts the page together. What is chosen (quantity, side by side) stays from rollout to rollout.

const chosen = { quantity: "", many: false };

function showHead(heads) {
  const named = (title, text) => (heads.length > 1 ? `${title}: ${text}` : text);
  document.getElementById("title").replaceChildren(...heads.map(({ title }, run) => make("span", `run-${run}`, run ? " and " : "", title)));
  document.getElementById("path").replaceChildren(...heads.map(({ path }) => make("div", "", path)));
  document.getElementById("notes").replaceChildren(...heads.flatMap(({ title, notes }) => notes.map((note) => make("li", "", named(title, note)))));
  const names = new Set(heads.flatMap(({ summary }) => Object.keys(summary)));
  document.getElementById("summary").replaceChildren(...[...names].map((name) => {
    const values = heads.map(({ summary }) => (Object.hasOwn(summary, name) ? summary[name] : "")).map((value) => (/^[-, ]*$/.test(value) ? "" : value));
    return values.some(Boolean) ? make("div", "", make("dt", "", name.trim()), ...values.map((value, run) => make("dd", `run-${run}`, value || "–"))) : "";
  }));
}

function facts(data, row) {
  const parts = [["reward", data.reward], ["advantage", data.advantage], ["tokens", data.tokens], ["masked", data.masked]];
  const said = parts.filter(([, values]) => values && !Number.isNaN(values[row])).flatMap(([name, values]) => [`${name} `, make("b", "", shown(values[row])), "   "]);
  return make("div", "facts", `sample ${data.sample[row]}   `, ...said, data.failed[row] ? "no reward" : data.truncated[row] ? "truncated" : "");
}

// Rows of the same group or evaluated prompt, in order of their samples; for each run of two, in the other run those of
// the same set, line and text of the prompt file in the nearest step.
function together(data, heads, row, excerptOf) {
  const all = Array.from(data.set, (_, i) => i);
  const group = (of) => all.filter((i) => (!data.run || data.run[i] === data.run[of]) && ["set", "source", "item"].every((key) => data[key][i] === data[key][of]));
  if (!data.run) return [group(row)];
  const set = (i) => [!data.set[i], heads[data.run[i]].sets[data.set[i]]].join(); // each run numbers its own
  const same = all.filter((i) => data.run[i] !== data.run[row] && set(i) === set(row) && data.row[i] === data.row[row] && excerptOf(i, 0) === excerptOf(row, 0));
  const away = (i) => Math.abs(data.step[i] - data.step[row]);
  return [group(row), ...(same.length ? [group(same.reduce((p, q) => (away(q) < away(p) ? q : p)))] : [])];
}

// `parts`: of each run the rows, and their group and texts, their record of answers, or why there are no tokens.
function showRollout(place, heads, data, row, parts, open) {
  const { group, record } = parts[0], groups = parts.map((part) => part.group).filter(Boolean);
  const quantities = groups.length ? quantitiesOf(groups[0]) : [];
  const rows = parts[0].rows, count = parts.reduce((sum, part) => sum + part.rows.length, 0);
  const branches = ({ trajectory }, sample) => trajectory.filter((t) => t === trajectory[sample]).length;
  const name = (of, sample) => {
    const t = of.trajectory[sample];
    return branches(of, sample) > 1 ? `${t}, branch ${of.trajectory.slice(0, sample + 1).filter((u) => u === t).length}` : String(t);
  };
  const button = (label, on, act) => {
    const made = make("button", on ? "on" : "", label);
    made.setAttribute("aria-pressed", on);
    made.addEventListener("click", act);
    return made;
  };
  const draw = () => {
    const quantity = quantities.find(({ key }) => key === chosen.quantity) || quantities[0];
    const scale = quantity && scaleOf(quantity, groups);
    const select = make("select", "", ...quantities.map(({ key, title }) => {
      const option = make("option", "", title);
      option.value = key;
      option.selected = key === quantity.key;
      return option;
    }));
    select.id = "quantity";
    select.addEventListener("change", () => { chosen.quantity = select.value; draw(); });
    const column = (part, other) => {
      const number = data.sample[other], said = facts(data, other);
      if (data.run) said.prepend(make("b", `run-${data.run[other]}`, heads[data.run[other]].title), ` step ${data.step[other]}   `);
      if (part.record) {
        const { text, final, finish } = part.record.samples[number];
        said.append(` ${finish}`, final === null || final === undefined ? "" : `   final answer ${safe(String(final))}`);
        return make("div", "sample", said, make("div", "tokens", ...(blocksOf(text, "").length > 1 ? textOf(text, "assistant", "block") : [text])));
      }
      if (!part.group) return make("div", "sample", said, make("p", "quiet why", part.why));
      const { of, samples } = part.group, turns = of.turn_rewards;
      said.append(` ${of.finish[number]}`);
      if (branches(of, number) > 1) said.append(`   trajectory ${name(of, number)} of ${branches(of, number)}`);
      if (turns) said.append(`   rewards of turns ${turns[of.trajectory[number]].map(shown).join(", ")}`);
      const tokens = tokensOf(part.group, samples[number], part.texts, quantity, scale);
      tokens.shows = part;
      return make("div", "sample", said, tokens);
    };
    const many = button(`${count} samples side by side`, chosen.many, () => { chosen.many = !chosen.many; draw(); });
    many.id = "many";
    const where = data.set[row] ? `policy ${data.step[row]}` : `step ${data.step[row]}`;
    const buttons = rows.length > 1 && !chosen.many ? rows.map((other) => button(group ? name(group.of, data.sample[other]) : String(data.sample[other]), other === row, () => open(other))) : [];
    const pairs = chosen.many ? parts.flatMap((part) => part.rows.map((other) => [part, other])).sort(([, p], [, q]) => data.sample[p] - data.sample[q]) : [[parts[0], row]];
    const of = group ? group.of : record;
    const title = `${heads[data.run ? data.run[row] : 0].sets[data.set[row]]}, ${where}, prompt ${data.prompt[row]}`;
    place.replaceChildren(
      make("div", "bar", make("h2", "", title), ...buttons, count > 1 ? many : ""),
      quantity ? make("div", "bar", make("label", "", "colour ", select), scale.legend) : "",
      ...(of ? textOf(of.prompt, "prompt", "box") : []), of && of.answer ? make("div", "box", make("b", "", "answer"), safe(of.answer)) : "",
      make("div", chosen.many ? "samples many" : "samples", ...pairs.map(([part, other]) => column(part, other))));
    hover(place, groups.length && ((element) => {
      const part = element.closest(".tokens").shows;
      return part && tipOf(part.group, element, part.texts, quantitiesOf(part.group));
    }));
  };
  draw();
}

function hover(place, tip) {
  const box = document.getElementById("tip");
  box.hidden = true;
  place.onmouseover = (event) => {
    const element = event.target.closest(".tokens i");
    const said = element && tip && tip(element);
    box.hidden = !said;
    if (!said) return;
    box.replaceChildren(...said);
    const at = element.getBoundingClientRect(), size = box.getBoundingClientRect();
    const under = at.bottom + 6 + size.height < innerHeight;
    box.style.top = `${Math.max(4, under ? at.bottom + 6 : at.top - size.height - 6)}px`;
    box.style.left = `${Math.max(4, Math.min(at.left, innerWidth - size.width - 8))}px`;
  };
  place.onmouseleave = () => { box.hidden = true; };
}

async function start() {
  const head = await loadJson("head");
  const heads = [head, head.other].filter(Boolean);
  showHead(heads);
  const [data, excerpts] = [await loadTensors("table"), await loadJson("excerpts")];
  const runOf = (row) => (data.run ? data.run[row] : 0), of = (row) => ["", "b-"][runOf(row)];
  const why = (row) => heads[runOf(row)].missing[data.source[row]] || "not in this file";
  const excerptOf = (row, i) => {
    const { groups, files } = excerpts[runOf(row)], source = data.source[row];
    return data.set[row] ? files[source][data.item[row]][i] : groups[source] ? groups[source][i] : i ? why(row) : "";
  };
  const part = async (rows) => {
    const [row] = rows, blob = of(row), source = data.source[row];
    if (data.set[row]) return { rows, record: (await loadJson(`${blob}answers-${source}`))[data.item[row]] };
    if (!data.detail[row]) return { rows, why: `No tokens: ${why(row)}.` };
    return { rows, group: unpack(await loadTensors(`${blob}group-${source}`)), texts: await loadJson(`${blob}texts`) };
  };
  const place = document.getElementById("rollout");
  let asked = 0;
  const open = async (row) => {
    const mine = ++asked, parts = await Promise.all(together(data, heads, row, excerptOf).map(part));
    if (mine === asked) showRollout(place, heads, data, row, parts, show);
  };
  const table = showTable(document.getElementById("table"), data, heads, excerptOf, open);
  const show = (row) => table.show(row);
  requestAnimationFrame(() => setTimeout(() => performance.mark("table-shown")));
  showCurves(head, await Promise.all(heads.map((_, run) => loadTensors(`${["", "b-"][run]}curves`))), (step) => table.filter("step", String(step)));
  if (data.set.length && !asked) show(table.first());
}

start().catch((error) => {
  document.getElementById("notes").append(make("li", "", `This page cannot be shown: ${error}`));
  throw error;
});

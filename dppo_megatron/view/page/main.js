// Puts the page together. What is chosen (quantity, side by side) stays from rollout to rollout.

const chosen = { quantity: "", many: false };

function showHead(head) {
  document.getElementById("title").textContent = head.title;
  document.getElementById("path").textContent = head.path;
  document.getElementById("notes").replaceChildren(...head.notes.map((note) => make("li", "", note)));
  document.getElementById("summary").replaceChildren(
    ...Object.entries(head.summary).filter(([, value]) => !/^[-, ]*$/.test(value)).map(([name, value]) => make("div", "", make("dt", "", name.trim()), make("dd", "", value))));
}

function facts(data, row) {
  const parts = [["reward", data.reward], ["advantage", data.advantage], ["tokens", data.tokens], ["masked", data.masked]];
  const said = parts.filter(([, values]) => values && !Number.isNaN(values[row])).flatMap(([name, values]) => [`${name} `, make("b", "", shown(values[row])), "   "]);
  return make("div", "facts", `sample ${data.sample[row]}   `, ...said, data.failed[row] ? "no reward" : data.truncated[row] ? "truncated" : "");
}

// Rows of the same group or the same evaluated prompt, in order of their samples.
function together(data, row) {
  const found = [];
  for (let i = 0; i < data.set.length; i++)
    if (data.set[i] === data.set[row] && data.source[i] === data.source[row] && data.item[i] === data.item[row]) found.push(i);
  return found;
}

function heading(head, data, row, ...more) {
  const where = data.set[row] ? `policy ${data.step[row]}` : `step ${data.step[row]}`;
  return make("div", "bar", make("h2", "", `${head.sets[data.set[row]]}, ${where}, prompt ${data.prompt[row]}`), ...more);
}

function prompts(prompt, answer) {
  return [make("div", "box", make("b", "", "prompt"), prompt), answer ? make("div", "box", make("b", "", "answer"), answer) : null];
}

function sideBySide(draw) {
  const button = make("button", chosen.many ? "on" : "", "side by side");
  button.id = "many";
  button.addEventListener("click", () => { chosen.many = !chosen.many; draw(); });
  return button;
}

function sampleButtons(data, rows, row, open, name) {
  return rows.length > 1 && !chosen.many ? rows.map((other) => {
    const button = make("button", other === row ? "on" : "", name(other));
    button.addEventListener("click", () => open(other));
    return button;
  }) : [];
}

function showGroup(place, head, data, row, group, texts, open) {
  const quantities = quantitiesOf(group);
  const rows = together(data, row);
  const draw = () => {
    const quantity = quantities.find(({ key }) => key === chosen.quantity) || quantities[0];
    const scale = scaleOf(quantity, group);
    const select = make("select", "", ...quantities.map(({ key, title }) => {
      const option = make("option", "", title);
      option.value = key;
      option.selected = key === quantity.key;
      return option;
    }));
    select.id = "quantity";
    select.addEventListener("change", () => { chosen.quantity = select.value; draw(); });
    const { trajectory, finish, turn_rewards: turns } = group.of;
    const branches = (sample) => trajectory.filter((t) => t === trajectory[sample]).length;
    const name = (other) => {
      const sample = data.sample[other];
      const branch = trajectory.slice(0, sample + 1).filter((t) => t === trajectory[sample]).length;
      return branches(sample) > 1 ? `${trajectory[sample]}, branch ${branch}` : String(trajectory[sample]);
    };
    const columns = (chosen.many ? rows : [row]).map((other) => {
      const sample = group.samples[data.sample[other]];
      const said = facts(data, other);
      said.append(` ${finish[sample.number]}`);
      if (branches(sample.number) > 1) said.append(`   trajectory ${name(other)} of ${branches(sample.number)}`);
      if (turns) said.append(`   rewards of turns ${turns[trajectory[sample.number]].map(shown).join(", ")}`);
      return make("div", "sample", said, tokensOf(group, sample, texts, quantity, scale));
    });
    place.replaceChildren(
      heading(head, data, row, ...sampleButtons(data, rows, row, open, name), sideBySide(draw)),
      make("div", "bar", make("label", "", "colour ", select), scale.legend),
      ...prompts(group.of.prompt, group.of.answer).filter(Boolean),
      make("div", chosen.many ? "samples many" : "samples", ...columns));
    hover(place, (element) => tipOf(group, element, texts, quantities));
  };
  draw();
}

function showAnswers(place, head, data, row, record, open) {
  const rows = together(data, row);
  const draw = () => {
    const columns = (chosen.many ? rows : [row]).map((other) => {
      const { text, final, finish } = record.samples[data.sample[other]];
      const said = facts(data, other);
      said.append(` ${finish}`, final === null || final === undefined ? "" : `   final answer ${final}`);
      return make("div", "sample", said, make("div", "tokens", text));
    });
    place.replaceChildren(
      heading(head, data, row, ...sampleButtons(data, rows, row, open, (other) => String(data.sample[other])), sideBySide(draw)),
      ...prompts(record.prompt, record.answer).filter(Boolean),
      make("div", chosen.many ? "samples many" : "samples", ...columns));
    hover(place, null);
  };
  draw();
}

function hover(place, tip) {
  const box = document.getElementById("tip");
  box.hidden = true;
  place.onmouseover = (event) => {
    const element = event.target.closest(".tokens i");
    box.hidden = !(element && tip);
    if (box.hidden) return;
    box.replaceChildren(...tip(element));
    const at = element.getBoundingClientRect(), size = box.getBoundingClientRect();
    const under = at.bottom + 6 + size.height < innerHeight;
    box.style.top = `${Math.max(4, under ? at.bottom + 6 : at.top - size.height - 6)}px`;
    box.style.left = `${Math.max(4, Math.min(at.left, innerWidth - size.width - 8))}px`;
  };
  place.onmouseleave = () => { box.hidden = true; };
}

async function start() {
  const head = await loadJson("head");
  showHead(head);
  const data = await loadTensors("table");
  const place = document.getElementById("rollout");
  let asked = 0;
  const open = async (row) => {
    const mine = ++asked;
    if (data.set[row]) {
      const records = await loadJson(`answers-${data.source[row]}`);
      if (mine === asked) showAnswers(place, head, data, row, records[data.item[row]], show);
    } else if (data.detail[row]) {
      const [group, texts] = await Promise.all([loadTensors(`group-${data.source[row]}`), loadJson("texts")]);
      if (mine === asked) showGroup(place, head, data, row, unpack(group), texts, show);
    } else {
      place.replaceChildren(heading(head, data, row), facts(data, row), make("p", "quiet", "Its tokens are not in this file: see the notes above."));
      hover(place, null);
    }
  };
  const table = showTable(document.getElementById("table"), data, head.sets, open);
  const show = (row) => table.show(row);
  requestAnimationFrame(() => setTimeout(() => performance.mark("table-shown")));
  showCurves(head, await loadTensors("curves"), (step) => table.filter("step", String(step)));
}

start().catch((error) => {
  document.getElementById("notes").append(make("li", "", `This page cannot be shown: ${error}`));
  throw error;
});

// The table of rollouts: sorted and filtered as arrays; only the rows in sight are elements.

const ROW = 22;

// [key, heading, width, what it means]; a text column has a function row -> text.
function columnsOf(data, heads, excerptOf) {
  const of = (row) => heads[data.run ? data.run[row] : 0];
  const end = ["", "truncated", "no reward"];
  const all = [
    ["detail", "", "22px", "● all tokens are in this file", (row) => (data.detail[row] ? "●" : "")],
    ["run", "run", "80px", "directory of the run", data.run && ((row) => of(row).title)],
    ["set", "set", "62px", "training, or the evaluation's set", (row) => of(row).sets[data.set[row]]],
    ["step", "step", "48px", "of training; of an evaluation the policy's version"],
    ["prompt", "prompt", "60px", "place in the prompt order"],
    ["sample", "sample", "60px", "number in its group"],
    ["text", "prompt text", "minmax(120px, 2fr)", "beginning of the prompt", (row) => excerptOf(row, 0)],
    ["response", "response", "minmax(200px, 3fr)", "beginning of the response; or why it is not here", (row) => excerptOf(row, data.sample[row] + 1)],
    ["reward", "reward", "62px", "by the verifier; – where it gave none"],
    ["advantage", "advantage", "84px", "by the run's own settings"],
    ["tokens", "tokens", "56px", "that the policy sampled"],
    ["masked", "masked", "64px", "share of the tokens that the trust region masked, where it was stored"],
    ["staleness", "stale", "48px", "policy versions between the group's oldest token and training"],
    ["version", "version", "60px", "oldest policy version in the group"],
    ["end", "end", "68px", "how it ended", (row) => end[data.failed[row] ? 2 : data.truncated[row]]],
  ];
  return all
    .filter(([key, , , , text]) => text || (data[key] && data[key].some((value) => !Number.isNaN(value))))
    .map(([key, heading, width, meaning, text]) => ({ key, heading, width, meaning, text, values: data[key] }));
}

// A filter as it is typed -> value or text -> bool; null where it says nothing, false where it cannot be understood.
function parseFilter(typed, isText) {
  const wanted = typed.trim().toLowerCase();
  if (!wanted) return null;
  if (isText) return (text) => text.toLowerCase().includes(wanted);
  const number = "(-?[0-9.]+(?:e[-+]?[0-9]+)?)";
  let m;
  if ((m = wanted.match(`^${number}\\.\\.${number}$`))) return (v) => v >= +m[1] && v <= +m[2];
  if ((m = wanted.match(`^(>=|<=|>|<|=)?\\s*${number}$`))) {
    const limit = +m[2];
    return { ">": (v) => v > limit, "<": (v) => v < limit, ">=": (v) => v >= limit, "<=": (v) => v <= limit }[m[1]]
      || ((v) => Math.fround(v) === Math.fround(limit));
  }
  return false;
}

function showTable(place, data, runs, excerptOf, onOpen) {
  const columns = columnsOf(data, runs, excerptOf);
  const grid = columns.map((column) => column.width).join(" ");
  const total = data.set.length;
  const table = { columns, order: Uint32Array.from({ length: total }, (_, i) => i), open: -1 };
  let sorted = columns[0], downwards = true; // rows with tokens come first

  const line = (name, cells) => {
    const made = make("div", name, ...cells);
    made.style.gridTemplateColumns = grid;
    return made;
  };
  const inputs = columns.map((column) => {
    const input = make("input");
    input.dataset.filter = column.key;
    input.setAttribute("aria-label", `filter ${column.heading || "●"}`);
    input.addEventListener("input", update);
    return input;
  });
  const heads = columns.map((column) => {
    const head = make("div", column.text ? "text" : "", column.heading);
    head.title = column.meaning;
    head.dataset.sort = column.key;
    head.tabIndex = 0;
    head.setAttribute("role", "button");
    head.setAttribute("aria-label", `sort by ${column.heading || "●"}`);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") head.click(); });
    head.addEventListener("click", () => {
      downwards = sorted === column ? !downwards : !column.text;
      sorted = column;
      heads.forEach((other, i) => {
        other.textContent = columns[i].heading + (columns[i] === sorted ? (downwards ? " ↓" : " ↑") : "");
      });
      update();
    });
    return head;
  });
  const space = make("div", "space");
  place.replaceChildren(
    make("div", "heads", line("line", heads), line("line filters", inputs.map((input) => make("div", "", input)))), space);

  function update() {
    let rows = Uint32Array.from({ length: total }, (_, i) => i);
    columns.forEach((column, i) => {
      const keep = parseFilter(inputs[i].value, column.text);
      inputs[i].style.borderColor = keep === false ? "var(--bad)" : "";
      if (keep) rows = rows.filter(column.text ? (row) => keep(column.text(row)) : (row) => keep(column.values[row]));
    });
    if (sorted) {
      const sign = downwards ? -1 : 1;
      const key = sorted.text
        ? Array.from({ length: total }, (_, row) => sorted.text(row)) : sorted.values;
      rows.sort((a, b) => {
        const p = key[a], q = key[b];
        if (p !== p || q !== q) return (p !== p) - (q !== q) || a - b; // NaN comes last
        return p < q ? -sign : p > q ? sign : a - b;
      });
    }
    table.order = rows;
    space.style.height = `${rows.length * ROW}px`;
    document.getElementById("count").textContent =
      rows.length === total ? total.toLocaleString("en") : `${rows.length.toLocaleString("en")} of ${total.toLocaleString("en")}`;
    place.scrollTop = 0;
    draw();
  }

  function draw() {
    const first = Math.max(0, Math.floor(place.scrollTop / ROW) - 4);
    const last = Math.min(table.order.length, first + Math.ceil(place.clientHeight / ROW) + 8);
    const rows = [];
    for (let at = first; at < last; at++) {
      const row = table.order[at];
      const made = line("line row" + (row === table.open ? " open" : ""), columns.map((column) =>
        column.text ? make("div", "text" + (column.key === "response" && !data.detail[row] ? " quiet" : ""), column.text(row)) : make("div", "", shown(column.values[row]))));
      made.style.top = `${at * ROW}px`;
      made.dataset.row = row;
      rows.push(made);
    }
    space.replaceChildren(...rows);
  }

  function open(row) {
    table.open = row;
    draw();
    onOpen(row);
  }

  place.addEventListener("scroll", () => requestAnimationFrame(draw));
  space.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) open(+row.dataset.row);
  });
  place.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by || event.target.tagName === "INPUT") return;
    event.preventDefault();
    const at = Math.min(table.order.length - 1, Math.max(0, table.order.indexOf(table.open) + by));
    if (!table.order.length) return;
    const top = at * ROW, below = top + 3 * ROW - place.clientHeight;
    if (place.scrollTop > top) place.scrollTop = top;
    if (place.scrollTop < below + ROW) place.scrollTop = below + ROW;
    open(table.order[at]);
  });
  new ResizeObserver(draw).observe(place);
  update();
  table.filter = (key, value) => {
    const i = columns.findIndex((column) => column.key === key);
    if (i < 0) return;
    inputs[i].value = value;
    update();
  };
  table.show = open;
  table.first = () => table.order[0];
  return table;
}

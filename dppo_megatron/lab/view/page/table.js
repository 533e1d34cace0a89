// The table of rollouts: sorted and filtered as arrays; only the rows in sight are elements.

const ROW = 22;

// Columns in order: [key, heading, least width in pixels, flexible share, rank, meaning]; a text column has a function
// row -> text. If the page is narrow, columns of high rank are left out.
function columnsOf(data, heads, excerptOf) {
  const of = (row) => heads[data.run ? data.run[row] : 0];
  const end = ["stop", "truncated", "no reward"];
  const stored = (row) => data.detail[row] && data.masked && !Number.isNaN(data.masked[row]);
  const all = [
    ["detail", "", 22, 0, 0, "★ with the trainer's values of every token; ● all tokens are in this file", (row) => (stored(row) ? "★" : data.detail[row] ? "●" : "")],
    ["run", "run", 70, 0, 4, "directory of the run", data.run && ((row) => of(row).title)],
    ["set", "set", 62, 0, 10, "training, or the evaluation's set", (row) => of(row).sets[data.set[row]]],
    ["step", "step", 48, 0, 1, "of training; of an evaluation the policy's version"],
    ["prompt", "no.", 50, 0, 7, "place in the prompt order"],
    ["sample", "sample", 66, 0, 8, "number in its group"],
    ["text", "prompt", 120, 2, 6, "beginning of the prompt, or of its last user message", (row) => plain(excerptOf(row, 0))],
    ["response", "response", 130, 3, 3, "beginning of the response; or why it is not here", (row) => plain(excerptOf(row, data.sample[row] + 1))],
    ["reward", "reward", 64, 0, 2, "by the verifier; – where it gave none"],
    ["advantage", "advantage", 88, 0, 9, "by the run's own settings"],
    ["tokens", "tokens", 62, 0, 11, "that the policy sampled"],
    ["masked", "masked", 68, 0, 12, "share of the tokens that the trust region masked, where it was stored"],
    ["staleness", "stale", 54, 0, 13, "policy versions between the group's oldest token and training"],
    ["version", "version", 68, 0, 14, "oldest policy version in the group"],
    ["end", "end", 76, 0, 5, "stop, truncated at the token limit, or no reward", (row) => end[data.failed[row] ? 2 : data.truncated[row]]],
  ];
  return all
    .filter(([key, , , , , , text]) => text || (data[key] && data[key].some((value) => !Number.isNaN(value))))
    .map(([key, heading, width, share, rank, meaning, text]) => ({ key, heading, width, share, rank, meaning, text, values: data[key], said: heading || "tokens in this file" }));
}

// A filter as it is typed -> value or text -> bool; null where it says nothing, false where it cannot be understood.
function parseFilter(typed, isText) {
  const wanted = typed.trim().toLowerCase();
  if (!wanted) return null;
  if (isText) {
    const pattern = typed.trim().match(/^\/(.+)\/$/);
    try {
      const found = pattern && new RegExp(pattern[1], "iu");
      return found ? (text) => found.test(text) : (text) => text.toLowerCase().includes(wanted);
    } catch {
      return false;
    }
  }
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

function makeRole(role, name, ...children) {
  const made = make("div", name, ...children);
  made.setAttribute("role", role);
  return made;
}

function showTable(place, data, runs, excerptOf, onOpen, onNone) {
  const columns = columnsOf(data, runs, excerptOf);
  const total = data.set.length;
  const table = { order: Uint32Array.from({ length: total }, (_, i) => i), open: -1 };
  const [order, direction] = (address.get("sort") || "").split(" ");
  let sorted = columns.find(({ key }) => key === order) || columns[0], downwards = direction !== "up"; // rows with tokens come first
  let sight = columns, all = false;

  const inputs = columns.map((column) => {
    const input = make("input");
    input.dataset.filter = column.key;
    input.value = address.get(`f.${column.key}`) || "";
    input.setAttribute("aria-label", `filter ${column.said}`);
    input.addEventListener("input", update);
    return input;
  });
  const heads = columns.map((column) => {
    const button = make("button", "", column.heading || "●");
    const head = makeRole("columnheader", column.text ? "text" : "", button);
    button.title = column.meaning;
    button.setAttribute("aria-label", `sort by ${column.said}`);
    head.dataset.sort = column.key;
    head.addEventListener("click", () => {
      downwards = sorted === column ? !downwards : !column.text;
      sorted = column;
      keep("sort", `${column.key} ${downwards ? "down" : "up"}`);
      update();
    });
    return head;
  });
  const cells = inputs.map((input) => makeRole("gridcell", "", input));
  const lines = [makeRole("row", "line", ...heads), makeRole("row", "line filters", ...cells)];
  const space = makeRole("rowgroup", "space");
  const none = make("div", "none", total ? "No rollout fits the filters. " : "There are no rollouts yet.", total ? makeButton("clear filters", false, clear) : null);
  place.replaceChildren(makeRole("rowgroup", "heads", ...lines), space, none);
  byId("clear").addEventListener("click", clear);
  byId("columns").addEventListener("click", () => { all = !all; layout(); });
  const [stars, stored] = [byId("stored"), Array.from({ length: total }, (_, row) => columns[0].text(row)).filter((text) => text === "★").length];
  stars.hidden = !stored || stored === total;
  stars.textContent = `★ ${stored.toLocaleString("en")} with the trainer's values`;
  stars.addEventListener("click", () => table.filter("detail", "★"));

  function clear() {
    for (const input of inputs) input.value = "";
    update();
  }

  // Choose the columns that fit, first those with a filter.
  function layout() {
    let left = place.clientWidth - 4;
    const rank = (column) => (inputs[columns.indexOf(column)].value ? -1 : column.rank);
    const chosen = new Set([...columns].sort((p, q) => rank(p) - rank(q)).filter(({ width }) => (left -= width) >= 0));
    byId("columns").hidden = chosen.size === columns.length;
    byId("columns").setAttribute("aria-pressed", all);
    sight = all ? columns : columns.filter((column) => chosen.has(column));
    columns.forEach((column, i) => { heads[i].hidden = cells[i].hidden = !sight.includes(column); });
    place.style.setProperty("--columns", sight.map(({ width, share }) => (share ? `minmax(${width}px, ${share}fr)` : `${width}px`)).join(" "));
    place.style.setProperty("--least", `${sight.reduce((sum, { width }) => sum + width, 0)}px`);
    draw();
  }

  function update() {
    let rows = Uint32Array.from({ length: total }, (_, i) => i);
    columns.forEach((column, i) => {
      const keeps = parseFilter(inputs[i].value, column.text);
      inputs[i].setAttribute("aria-invalid", keeps === false);
      keep(`f.${column.key}`, inputs[i].value);
      if (keeps) rows = rows.filter(column.text ? (row) => keeps(column.text(row)) : (row) => keeps(column.values[row]));
    });
    const sign = downwards ? -1 : 1;
    const key = sorted.text ? Array.from({ length: total }, (_, row) => sorted.text(row)) : sorted.values;
    rows.sort((a, b) => {
      const p = key[a], q = key[b];
      if (p !== p || q !== q) return (p !== p) - (q !== q) || a - b; // NaN comes last
      return p < q ? -sign : p > q ? sign : a - b;
    });
    heads.forEach((head, i) => {
      const on = columns[i] === sorted && address.has("sort");
      head.firstChild.textContent = (columns[i].heading || (on ? "" : "●")) + (on ? (downwards ? " ↓" : " ↑") : "");
      head.setAttribute("aria-sort", columns[i] !== sorted ? "none" : downwards ? "descending" : "ascending");
    });
    table.order = rows;
    space.style.height = `${rows.length * ROW}px`;
    none.hidden = rows.length > 0;
    byId("clear").hidden = inputs.every((input) => !input.value);
    place.setAttribute("aria-rowcount", rows.length + lines.length);
    byId("count").textContent =
      rows.length === total ? total.toLocaleString("en") : `${rows.length.toLocaleString("en")} of ${total.toLocaleString("en")}`;
    if (!rows.length) {
      table.open = -1;
      onNone();
    }
    place.scrollTop = 0;
    layout();
  }

  function draw() {
    const first = Math.max(0, Math.floor(place.scrollTop / ROW) - 4);
    const last = Math.min(table.order.length, first + Math.ceil(place.clientHeight / ROW) + 8);
    const rows = [];
    for (let at = first; at < last; at++) {
      const row = table.order[at];
      const made = makeRole("row", "line row" + (row === table.open ? " open" : ""), ...sight.map((column) => makeRole("gridcell",
        column.text ? "text" + (column.key === "response" && !data.detail[row] ? " quiet" : "") : "", column.text ? column.text(row) : shown(column.values[row]))));
      made.style.top = `${at * ROW}px`;
      made.dataset.row = row;
      made.id = `row-${row}`;
      made.setAttribute("aria-rowindex", at + 1 + lines.length);
      made.setAttribute("aria-selected", row === table.open);
      rows.push(made);
    }
    space.replaceChildren(...rows);
    place.setAttribute("aria-activedescendant", table.open < 0 ? "" : `row-${table.open}`);
  }

  function open(row) {
    table.open = row;
    const top = table.order.indexOf(row) * ROW, below = top + 4 * ROW - place.clientHeight;
    if (top >= 0 && place.scrollTop > top) place.scrollTop = top;
    if (place.scrollTop < below) place.scrollTop = below;
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
    if (!by || event.target.tagName === "INPUT" || !table.order.length) return;
    event.preventDefault();
    open(table.order[Math.min(table.order.length - 1, Math.max(0, table.order.indexOf(table.open) + by))]);
  });
  update();
  new ResizeObserver(layout).observe(place);
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

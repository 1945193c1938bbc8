"use strict";
(() => {
  const { cases } = JSON.parse(document.getElementById("data").textContent);
  const get = (id) => document.getElementById(id);
  const [sort, turn, one, other, readers, name, pictured] = ["sort", "turn", "one", "other", "readers", "name", "pictured"].map(get);
  const body = get("table").tBodies[0], pictures = get("pictures");
  const rows = [...body.rows], shown = new Map([...pictures.children].map((part) => [+part.dataset.case, part]));
  let largest = true;

  const difference = (c) => {
    const [a, b] = [c.ged[one.value], c.ged[other.value]];
    return a === null || b === null ? null : a - b;
  };
  const text = (value) => {
    if (value === null) return "–";
    const digits = Math.abs(value).toFixed(3);
    return (+digits === 0 ? "" : value < 0 ? "−" : "+") + digits;
  };
  const keyOf = (c, i) => {
    const by = sort.value;
    if (by === "order") return -i;
    if (by === "name") return c.name;
    if (by === "readers" || by === "disagreement") return c[by];
    if (by === "difference") return difference(c);
    if (by === "size") return difference(c) === null ? null : Math.abs(difference(c));
    return c.ged[+by.slice(3)];
  };

  function update() {
    const keys = cases.map(keyOf), words = name.value.toLowerCase();
    const order = [...cases.keys()].sort((a, b) => {
      const [x, y] = [keys[a], keys[b]];
      if (x === null || y === null) return (x === null) - (y === null) || a - b;  // what has no value comes last
      const by = typeof x === "string" ? y.localeCompare(x, undefined, { numeric: true }) : x - y;
      return (largest ? -by : by) || a - b;
    });
    let left = 0;
    for (const i of order) {
      const c = cases[i], row = rows[i], part = shown.get(i);
      const out = (readers.value !== "" && c.readers !== +readers.value) || !c.name.toLowerCase().includes(words)
        || (pictured.checked && !part);
      row.lastElementChild.textContent = text(difference(c));
      row.hidden = out;
      body.append(row);
      if (part) {
        part.hidden = out;
        pictures.append(part);
      }
      left += !out;
    }
    get("count").textContent = `${left} of ${cases.length} cases`;
    const first = sort.value === "name" ? ["A first", "Z first"] : sort.value === "order" ? ["in this order", "in reverse"] : ["largest first", "smallest first"];
    turn.textContent = first[largest ? 0 : 1];
    turn.setAttribute("aria-pressed", String(largest));
    for (const cell of get("table").tHead.rows[0].cells) {
      const here = cell.dataset.sort === sort.value;
      const down = sort.value === "name" ? !largest : largest;
      cell.setAttribute("aria-sort", here ? (down ? "descending" : "ascending") : "none");
    }
  }

  for (const cell of get("table").tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    button.addEventListener("click", () => {
      largest = sort.value === cell.dataset.sort ? !largest : true;
      sort.value = cell.dataset.sort;
      update();
    });
    cell.append(button);
  }
  turn.addEventListener("click", () => { largest = !largest; update(); });
  for (const part of [sort, one, other, readers, name, pictured]) part.addEventListener("input", update);
  get("controls").addEventListener("submit", (event) => event.preventDefault());
  get("controls").hidden = false;
  update();
})();

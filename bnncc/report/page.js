"use strict";
// Sort a table by the column whose heading is clicked; again, the other way round.
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.querySelectorAll("th")];
  const body = table.tBodies[0];
  heads.forEach((head, column) => {
    if (body.rows[0]?.cells[column].classList.contains("number")) head.classList.add("number");
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      const key = (row) => {
        const cell = row.cells[column];
        return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
      };
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (typeof x === "number" && typeof y === "number") return x - y;
        return String(x).localeCompare(String(y), "en", { numeric: true });
      };
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...[...body.rows].sort((a, b) => (down ? -order(a, b) : order(a, b))));
    });
  });
}

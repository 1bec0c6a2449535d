// Long names in tables break after dots and underscores only.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll("td code"))
    if (!code.children.length) code.innerHTML = code.innerHTML.replace(/[._](?=\w)/g, "$&<wbr>");
});

// A field above the tables of a page: only rows that contain all its words are shown, and only sections that have such rows.
document.addEventListener("DOMContentLoaded", () => {
  const place = document.querySelector("[data-filter]");
  if (!place) return;
  const input = document.createElement("input");
  input.type = "search";
  input.placeholder = "Filter: " + place.dataset.filter;
  input.setAttribute("aria-label", input.placeholder);
  place.append(input);
  const sections = [];
  for (const element of place.parentElement.children) {
    if (element.tagName === "H2") sections.push({ elements: [], rows: [] });
    if (!sections.length) continue;
    const section = sections[sections.length - 1];
    section.elements.push(element);
    for (const row of element.querySelectorAll("tbody tr"))
      section.rows.push({ row, text: row.textContent.toLowerCase() });
  }
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const section of sections) {
      let shown = 0;
      for (const { row, text } of section.rows) {
        row.hidden = !words.every((word) => text.includes(word));
        if (!row.hidden) shown += 1;
      }
      for (const element of section.elements) element.hidden = words.length > 0 && shown === 0;
    }
  });
});

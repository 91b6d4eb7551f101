// What a page owes to those who do not see it, or not well. Returns what is wrong, as sentences.
() => {
  const wrong = [];
  const shown = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  const named = (element) => `<${element.localName} class="${element.className?.baseVal ?? element.className}"> ${(element.textContent || "").trim().slice(0, 40)}`;

  function nameOf(element) {
    const by = element.getAttribute("aria-labelledby");
    if (by) return by.split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join(" ").trim();
    return (element.getAttribute("aria-label") || [...(element.labels ?? [])].map((label) => label.textContent).join(" ") || element.textContent || "").trim();
  }

  if (document.querySelectorAll("main").length !== 1) wrong.push("not exactly one main");
  if (document.querySelectorAll("h1").length !== 1) wrong.push("not exactly one h1");
  if (!document.title || !document.documentElement.lang) wrong.push("no title or language");
  if (!document.querySelector("a.skip[href='#main']")) wrong.push("no skip link");
  let level = 1;
  for (const heading of document.querySelectorAll("h1, h2, h3")) {
    const own = Number(heading.localName[1]);
    if (own > level + 1) wrong.push(`a heading skips a level: ${named(heading)}`);
    level = own;
  }
  for (const element of document.querySelectorAll("a[href], button, input:not([type=hidden]), select, textarea, [role=region], nav, section")) {
    if (shown(element) && !nameOf(element)) wrong.push(`no name: ${named(element)}`);
  }
  for (const input of document.querySelectorAll("input:not([type=hidden]), select")) {
    if (!input.labels?.length && !input.getAttribute("aria-label")) wrong.push(`no label: ${input.name}`);
  }
  for (const cell of document.querySelectorAll("th")) if (!cell.scope) wrong.push(`no scope: ${named(cell)}`);
  for (const image of document.querySelectorAll("svg")) {
    const inner = image.parentElement.closest("svg");
    if (!inner && image.getAttribute("aria-hidden") !== "true" && !(image.getAttribute("role") === "img" && nameOf(image))) wrong.push("an svg says nothing");
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of ids) if (ids.filter((other) => other === id).length > 1) wrong.push(`two have the id ${id}`);
  if (document.querySelector("[style], style, script:not([src]), [onclick], [onerror], [onload]")) wrong.push("inline style or script");

  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const known = new Map();
  function parts(colour) {
    if (!known.has(colour)) {
      context.clearRect(0, 0, 1, 1);
      context.fillStyle = colour;
      context.fillRect(0, 0, 1, 1);
      const [red, green, blue, alpha] = context.getImageData(0, 0, 1, 1).data;
      known.set(colour, [red, green, blue, alpha / 255]);
    }
    return known.get(colour);
  }
  function over(front, back) {
    return [0, 1, 2].map((index) => front[index] * front[3] + back[index] * (1 - front[3])).concat(1);
  }
  function ground(element) {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parts(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
  }
  function light(colour) {
    const [red, green, blue] = colour.map((value) => { const part = value / 255; return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  }
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || seen.has(element) || !shown(element) || element.closest("title, desc, .aloud, option, script")) continue;
    seen.add(element);
    const style = getComputedStyle(element);
    const back = ground(element);
    const front = over(parts(element.closest("svg") ? style.fill : style.color), back);
    const [high, low] = [light(front), light(back)].sort((one, other) => other - one);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) wrong.push(`contrast ${contrast.toFixed(2)}: ${named(element)}`);
  }
  return [...new Set(wrong)];
}

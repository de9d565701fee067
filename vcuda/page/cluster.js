// The extender's page: all nodes in one small answer (docs/extender.md, "The page"), names of pods only where one looks.
const CORES = 100;
const CARD_WIDTH = 68; // a card and the gap beside it, as in the style
const CARD_HEIGHT = 42;
let cluster = null;
let shown = []; // nodes that the filter lets through, in order
let tops = [0]; // where each begins, in pixels
let chosen = 0;

const tiles = el("section", { className: "tiles", "aria-label": "figures" });
const waiting = el("section", { "aria-label": "waiting pods" });
const quotas = el("details", { hidden: true });
const verdict = el("p", { role: "status", className: "soft" });
const counted = el("span", { className: "soft" });
const find = el("input", { type: "search", className: "grow", placeholder: "node, model or problem", "aria-label": "filter nodes" });
const order = el("select", { "aria-label": "order of nodes" },
  ...[["problem", "problems first"], ["name", "by name"], ["free", "most free first"], ["full", "fullest first"]].map(
    ([value, text]) => el("option", { value }, text)));
const fitCores = el("input", { type: "number", min: 0, max: 1600, value: 60, "aria-label": "cores" });
const fitBlocks = el("input", { type: "number", min: 0, value: 20, "aria-label": "blocks of 256 MiB" });
const fitOnly = el("input", { type: "checkbox", id: "only" });
const bare = el("input", { type: "checkbox", id: "bare" });
const bareCount = el("span", {});
const list = el("div", { className: "nodes", tabIndex: 0, role: "listbox", "aria-label": "nodes" });

function parsed(data) {
  const nodes = data.nodes.map(([name, problem, groups, text]) => {
    const node = { name, problem: data.problems[problem], models: [], cards: [], cores: 0, blocks: 0, total: 0, sick: 0, over: 0 };
    const texts = text.split("|");
    let at = 0;
    for (const [model, blocks, count] of groups) {
      node.models.push(data.models[model]);
      for (let end = at + count; at < end; at += 1) {
        const well = !texts[at].startsWith("!");
        const numbers = well ? texts[at] : texts[at].slice(1);
        const shares = numbers === "" ? [] : numbers.split(" ").map((number) => data.kinds[number]);
        const card = { well, total: blocks, shares, cores: 0, blocks: 0 };
        for (const [cores, some] of shares) { card.cores += cores; card.blocks += some; }
        node.cores += card.cores;
        node.blocks += card.blocks;
        node.total += blocks;
        if (!well) node.sick += 1;
        if (card.cores > CORES || card.blocks > blocks) node.over += 1;
        node.cards.push(card);
      }
    }
    node.text = `${name} ${node.models.join(" ")} ${node.problem} ${node.sick ? "unhealthy" : ""} ${node.over ? "overbooked" : ""}`.toLowerCase();
    return node;
  });
  return { ...data, nodes };
}

// --- would it fit ---

function wanted() {
  const cores = Math.max(0, Math.floor(Number(fitCores.value) || 0));
  const blocks = Math.max(0, Math.floor(Number(fitBlocks.value) || 0));
  return { cores, blocks, whole: cores >= CORES };
}

const takes = (card, want) => card.well && (want.whole
  ? card.shares.length === 0
  : CORES - card.cores >= want.cores && card.total - card.blocks >= want.blocks);

function fitting(node, want) {
  if (node.problem !== "" || want.cores === 0) return 0;
  const cards = node.cards.filter((card) => takes(card, want)).length;
  return want.whole && cards < Math.floor(want.cores / CORES) ? 0 : cards;
}

function judge() {
  const want = wanted();
  const what = want.whole ? many(want.cores / CORES, "whole card") : `${many(want.cores, "core")} and ${many(want.blocks, "block")}`;
  if (want.cores === 0 || (want.whole && want.cores % CORES) || (!want.whole && want.blocks === 0)) {
    verdict.textContent = "A share asks for 1 to 99 cores and for blocks of 256 MiB; whole cards are multiples of 100 cores.";
    return;
  }
  let nodes = 0;
  let cards = 0;
  let first = "";
  for (const node of cluster.nodes) {
    const here = fitting(node, want);
    if (here) { nodes += 1; cards += here; first = first || node.name; }
  }
  verdict.textContent = nodes
    ? `Yes: ${what} would fit now on ${many(cards, "card")} of ${many(nodes, "node")}, ${first} first by name.`
    : `No: no healthy card has ${what} free now.`;
}

// --- the parts above the nodes ---

function tile(name, figure, more, drawn, bad) {
  return el("div", { className: bad ? "tile bad" : "tile" }, el("div", { className: "name" }, name),
    el("div", { className: "figure" }, figure), more ? el("div", { className: "more" }, more) : null, drawn || null);
}

function drawTiles() {
  const { nodes, history } = cluster;
  const sums = { nodes: 0, cards: 0, sick: 0, blocks: 0, total: 0, shut: 0, over: 0 };
  for (const node of nodes) {
    sums.cards += node.cards.length;
    sums.sick += node.sick;
    sums.over += node.over;
    sums.nodes += node.cards.length ? 1 : 0;
    sums.shut += node.cards.length && node.problem ? 1 : 0;
    for (const card of node.cards) if (card.well) { sums.blocks += Math.min(card.blocks, card.total); sums.total += card.total; }
  }
  bareCount.textContent = ` also ${many(nodes.length - sums.nodes, "node")} without cards`;
  bare.parentElement.hidden = nodes.length === sums.nodes;
  const past = (at) => history.map((look) => look[at]);
  const some = (count, what) => count ? `${count.toLocaleString("en")} ${what}` : "";
  tiles.replaceChildren(
    tile("nodes with cards", sums.nodes.toLocaleString("en"), some(sums.shut, "take no shares") || "all take shares", null, sums.shut > 0),
    tile("cards", sums.cards.toLocaleString("en"), [some(sums.sick, "unhealthy"), some(sums.over, "overbooked")].filter(Boolean).join(", ") || "all healthy",
      null, sums.sick + sums.over > 0),
    tile("cores booked", percent(cluster.allocated), "of healthy cards", spark(past(1), 1, "cores booked in the last hour")),
    tile("memory booked", percent(sums.total ? sums.blocks / sums.total : 0), `of ${bytes(sums.total * cluster.block_bytes)}`),
    tile("free, but in useless parts", percent(cluster.fragmented), "of all cards, for usual pods", spark(past(2), 0.2, "fragmentation in the last hour")),
    tile("waiting pods", cluster.waiting.count.toLocaleString("en"), cluster.waiting.count ? "see below" : "none", spark(past(3), 1, "waiting pods in the last hour"),
      cluster.waiting.count > 0));
}

const ways = new Map(); // what was found out for a waiting pod: by namespace/name
const MOST_WAYS = 200;
let allWaiting = false;

async function waysOut(pod, cell) {
  const key = `${pod.namespace}/${pod.name}`;
  let lines;
  try {
    const found = await asked(`explain/${encodeURIComponent(pod.namespace)}/${encodeURIComponent(pod.name)}`);
    lines = (found.would_fit || []).map((way) => way.text);
    if (!lines.length) lines = [found.summary];
  } catch (problem) { lines = [`no way out could be asked for: ${problem.message}`]; }
  if (ways.size >= MOST_WAYS) ways.clear();
  ways.set(key, lines);
  if (cell.isConnected) drawWaiting();
}

function drawWaiting() {
  const { pods, count } = cluster.waiting;
  const open = new Set(pods.map((pod) => `${pod.namespace}/${pod.name}`));
  for (const key of ways.keys()) if (!open.has(key)) ways.delete(key);
  const some = allWaiting ? pods : pods.slice(0, 3);
  const rows = some.map((pod) => {
    const known = ways.get(`${pod.namespace}/${pod.name}`);
    const said = [pod.asks && `asks ${pod.asks}`, pod.created && ago(pod.created) && `since ${ago(pod.created)}`].filter(Boolean).join(", ");
    const row = el("div", { className: "pod" }, el("b", {}, `${pod.namespace}/${pod.name}`), el("span", { className: "soft" }, said), el("div", {}, pod.why));
    if (known) row.append(el("ul", { className: "ways" }, ...known.map((line) => el("li", {}, line))));
    else {
      const button = el("button", { type: "button", on: { click: () => { button.disabled = true; waysOut(pod, row); } } }, "Ways out");
      row.lastChild.append(" ", button);
    }
    return row;
  });
  waiting.replaceChildren();
  if (!count) return;
  waiting.append(el("h2", {}, `Waiting pods: ${count.toLocaleString("en")}`), ...rows);
  if (pods.length > some.length || allWaiting) {
    const text = allWaiting ? "Show fewer" : `Show ${count > pods.length ? `the first ${pods.length}` : "all"}`;
    waiting.append(el("button", { type: "button", on: { click: () => { allWaiting = !allWaiting; drawWaiting(); draw(); } } }, text));
  }
}

function drawQuotas() {
  const names = ["cores", "blocks", "cards"];
  let most = 0;
  const rows = cluster.quotas.map((quota) => [
    quota.namespace + (quota.scope ? ` on ${quota.scope}` : ""),
    ...names.map((name, at) => {
      const [held, limit] = [quota.held[at], quota.limits[at]];
      if (limit === null) return el("span", { className: "soft" }, `${held}, no limit`);
      const part = limit ? held / limit : Number(held > 0);
      most = Math.max(most, part);
      return el("div", {}, `${held} of ${limit}`, bar(part));
    }),
  ]);
  quotas.hidden = !rows.length;
  quotas.replaceChildren(el("summary", {}, `Quotas: ${rows.length}, the fullest holds ${percent(most)}`),
    table([["namespace", "text"], ...names.map((name) => [name])], rows));
}

// --- nodes: only those rows are made that are seen ---

function drawCard(card, want, kind) {
  const made = el("div", { className: `card ${kind || ""}` });
  if (!card.well) made.classList.add("sick");
  if (card.cores > CORES || card.blocks > card.total) made.classList.add("over");
  let left = 0;
  let low = 0;
  for (const [cores, blocks] of card.shares) {
    // As stairs: what is above and to the right of the last step is what is free of both.
    const height = card.total ? 100 * blocks / card.total : 100;
    made.append(el("span", { className: cores >= CORES ? "whole" : "", at: { left: `${left}%`, bottom: `${low}%`, width: `${cores}%`, height: `${height}%` } }));
    left += cores;
    low += height;
  }
  if (want && takes(card, want)) {
    made.classList.add("fits");
    const height = want.whole ? 100 : 100 * want.blocks / card.total;
    made.append(el("b", { at: { left: `${left}%`, bottom: `${low}%`, width: `${Math.min(100, want.cores)}%`, height: `${height}%` } }));
  }
  made.title = `${card.cores} of ${CORES} cores, ${card.blocks} of ${card.total} blocks, ${many(card.shares.length, "share")}${card.well ? "" : ", unhealthy"}`;
  return made;
}

function drawRow(node, at, want) {
  const models = [...new Set(node.models)].join(", ");
  const trouble = [node.problem, node.sick ? `${node.sick} unhealthy` : "", node.over ? `${node.over} overbooked` : ""].filter(Boolean).join(", ");
  const full = node.cards.length * CORES;
  const row = el("div", { className: "row", id: `node-${at}`, role: "option", at: { top: `${tops[at]}px`, height: `${tops[at + 1] - tops[at]}px` },
    "aria-selected": String(at === chosen), "aria-label": `${node.name}, ${many(node.cards.length, "card")}, ${node.cores} of ${full} cores booked ${trouble}`,
    on: { click: () => { chosen = at; draw(); detail(node); } } },
  el("div", { className: "who" }, el("div", { title: node.name }, node.name),
    trouble ? el("div", { className: "sub problem", title: trouble }, trouble)
      : el("div", { className: "sub", title: models }, `${full ? percent(node.cores / full) : "–"} · ${models}`)),
  el("div", { className: "cards" }, ...node.cards.map((card) => drawCard(card, fitting(node, want) ? want : null))));
  return row;
}

const narrow = matchMedia("(max-width: 640px)");

function place() {
  const wide = list.clientWidth - 8 - (narrow.matches ? 0 : 242);
  const perLine = Math.max(1, Math.floor((wide + 6) / CARD_WIDTH));
  tops = new Array(shown.length + 1);
  tops[0] = 0;
  for (let at = 0; at < shown.length; at += 1) {
    const rows = Math.max(1, Math.ceil(shown[at].cards.length / perLine));
    tops[at + 1] = tops[at] + 8 + rows * CARD_HEIGHT + (narrow.matches ? 21 : 0);
  }
  list.style.height = `${tops[shown.length]}px`;
  draw();
}

function firstBelow(pixel) {
  let low = 0;
  let high = shown.length;
  while (low < high) { const middle = (low + high) >> 1; if (tops[middle + 1] <= pixel) low = middle + 1; else high = middle; }
  return low;
}

function draw() {
  const top = -list.getBoundingClientRect().top;
  const want = wanted();
  const rows = [];
  for (let at = firstBelow(top - 200); at < shown.length && tops[at] < top + innerHeight + 200; at += 1) rows.push(drawRow(shown[at], at, want));
  list.replaceChildren(...rows);
  list.setAttribute("aria-activedescendant", `node-${chosen}`);
}

function arrange() {
  const words = find.value.toLowerCase().trim();
  const want = wanted();
  shown = cluster.nodes.filter((node) => (node.cards.length > 0 || bare.checked)
    && (!words || node.text.includes(words)) && (!fitOnly.checked || fitting(node, want) > 0));
  const free = (node) => node.problem ? -1 : node.cards.reduce((sum, card) => sum + (card.well ? Math.max(0, CORES - card.cores) : 0), 0);
  const trouble = (node) => (node.problem ? 2 : 0) + (node.sick || node.over ? 1 : 0);
  if (order.value === "problem") shown.sort((one, two) => trouble(two) - trouble(one));
  if (order.value === "free") shown.sort((one, two) => free(two) - free(one));
  if (order.value === "full") shown.sort((one, two) => free(one) - free(two));
  chosen = Math.max(0, Math.min(chosen, shown.length - 1));
  counted.textContent = shown.length === cluster.nodes.length ? many(shown.length, "node") : `${shown.length} of ${many(cluster.nodes.length, "node")}`;
  place();
}

function move(steps) {
  if (!shown.length) return;
  chosen = Math.max(0, Math.min(shown.length - 1, chosen + steps));
  list.focus({ preventScroll: true });
  const at = list.getBoundingClientRect().top;
  if (at + tops[chosen] < 0) scrollBy(0, at + tops[chosen] - 8);
  else if (at + tops[chosen + 1] > innerHeight) scrollBy(0, at + tops[chosen + 1] - innerHeight + 8);
  draw();
}

async function detail(node) {
  opened(node.name, el("p", { className: "soft" }, "…"));
  let found;
  try { found = await asked(`cluster?node=${encodeURIComponent(node.name)}`); } catch (problem) {
    if (parts.dialog.open) opened(node.name, el("p", { className: "problem" }, problem.message));
    return;
  }
  if (!parts.dialog.open) return;
  const cards = found.cards.map((card) => {
    const drawn = { well: card.healthy, total: card.blocks, cores: 0, blocks: 0, shares: card.shares.map((share) => [share.cores, share.blocks]) };
    for (const share of card.shares) { drawn.cores += share.cores; drawn.blocks += share.blocks; }
    const rows = card.shares.map((share) => [`${share.namespace}/${share.name}`, String(share.cores), bytes(share.blocks * cluster.block_bytes),
      share.leaving ? "leaving" : share.state === "confirmed" ? "running" : share.state]);
    return el("div", { className: "block" },
      el("h3", {}, `card ${card.minor} · ${card.model} · ${bytes(card.memory_bytes)}${card.numa === null ? "" : ` · NUMA node ${card.numa}`}`),
      el("div", { className: "soft" }, card.uuid),
      card.healthy ? null : el("div", { className: "problem" }, `unhealthy: ${card.why || "the daemon's log and /graph on that node say why"}`),
      el("div", { className: "pair" }, drawCard(drawn, null, "large"),
        el("div", {}, rows.length ? table([["pod", "text"], ["cores", "number"], ["memory", "number"], ["state"]], rows) : "no shares")));
  });
  opened(node.name, found.problem ? el("p", { className: "problem" }, found.problem) : null, ...cards, cards.length ? null : el("p", {}, "no cards are known"));
}

async function look() {
  cluster = parsed(await asked("cluster"));
  parts.said.textContent = `as of ${new Date(1000 * cluster.at).toLocaleTimeString([], { hour12: false })}`;
  drawTiles();
  drawWaiting();
  drawQuotas();
  nodes.hidden = false; // before it is measured how many cards have room in a line
  judge();
  arrange();
  const none = !cluster.nodes.some((node) => node.cards.length);
  nothing.textContent = none ? "No cards are known. gpu-manager publishes those of nodes with its label: kubectl label node NODE nvidia-device-enable=enable" : "";
}

const changed = () => { if (cluster) { judge(); arrange(); } };
for (const field of [fitCores, fitBlocks, fitOnly, bare, find, order]) field.addEventListener("input", changed);
find.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === "ArrowDown") { event.preventDefault(); chosen = 0; move(0); } });
list.addEventListener("focus", draw);
let frameAsked = false;
const later = (does) => () => { if (!frameAsked) { frameAsked = true; requestAnimationFrame(() => { frameAsked = false; does(); }); } };
addEventListener("scroll", later(() => cluster && draw()), { passive: true });
addEventListener("resize", later(() => cluster && place()));

const sample = (shares, name, well = true) => el("span", {}, drawCard({ well, total: 10, cores: 0, blocks: 0, shares }, null), name);
const nothing = el("p", {});
const nodes = el("section", { hidden: true, "aria-label": "nodes and their cards" }, el("h2", {}, "Nodes"),
  el("form", { className: "tools", on: { submit: (event) => event.preventDefault() } }, "Would", fitCores, "cores and", fitBlocks, "blocks of 256 MiB fit?",
    el("label", { for: "only" }, fitOnly, " only such nodes")), verdict,
  el("div", { className: "tools" }, find, order, el("label", { for: "bare", hidden: true }, bare, bareCount), counted),
  el("p", { className: "legend" }, "A card: cores to the right, memory upwards, one step for each share.",
    sample([[30, 3], [30, 4]], "two shares"), sample([[100, 10]], "whole card"), sample([], "free"), sample([], "unhealthy", false)),
  nothing, list);

frame("vcuda · cluster", {
  "/": ["filter nodes", () => find.focus()],
  "f": ["would it fit?", () => fitCores.focus()],
  "j": ["next node", () => move(1)], "ArrowDown": ["next node", () => move(1)],
  "k": ["node before", () => move(-1)], "ArrowUp": ["node before", () => move(-1)],
  "PageDown": ["ten nodes on", () => move(10)], "PageUp": ["ten nodes back", () => move(-10)],
  "Enter": ["the node's pods", () => shown[chosen] && detail(shown[chosen])],
  "Escape": ["leave a field, close", () => parts.dialog.close()],
}, [tiles, waiting, quotas, nodes]);
repeat(10, look);

// The daemon's page: its cards with live bars, from two readings of /usage.
const MINUTE = 30; // readings
let before = null;
const past = new Map(); // by share: the last minute's cores

const cards = el("section", { "aria-label": "cards" });

function used(report) {
  const seconds = before && report.at_s > before.at_s ? report.at_s - before.at_s : 0;
  const old = new Map();
  for (const at of before ? before.containers : []) for (const share of at.cards) old.set(keyOf(at, share), share);
  const found = new Map();
  for (const at of report.containers) {
    for (const share of at.cards) {
      const key = keyOf(at, share);
      const one = old.get(key);
      const rate = (name) => seconds && one && one[name] !== null && share[name] !== null && share[name] >= one[name]
        ? (share[name] - one[name]) / (1e9 * seconds) : null;
      const time = rate("gpu_time_ns");
      const cores = share.gpu_time_ns === null ? share.card_percent : time === null ? null : 100 * time;
      found.set(key, { cores, waited: rate("waited_ns") });
      if (cores !== null) past.set(key, [...(past.get(key) || []), cores].slice(-MINUTE));
    }
  }
  for (const key of past.keys()) if (!found.has(key)) past.delete(key);
  return found;
}

const keyOf = (at, share) => `${at.pod_uid}/${at.container}/${share.uuid}`;

function drawShare(report, at, share, now) {
  const minute = past.get(keyOf(at, share)) || [];
  const memory = share.memory_limit_bytes ? share.memory_used_bytes / share.memory_limit_bytes : 0;
  const limit = share.core_limit > share.cores ? `${share.cores} to ${share.core_limit}` : `${share.cores}`;
  const cores = now.cores === null ? "?" : Math.round(now.cores);
  const notes = [
    share.held_by === "none" ? "nobody holds its memory: it is past our library" : "",
    share.refusals ? `${share.refusals} refused` : "",
    at.lost_devices.length ? `lost ${at.lost_devices.join(", ")}` : "",
    share.bypassing_processes ? `${many(share.bypassing_processes, "process")} past our library` : "",
  ].filter(Boolean).join("; ");
  return [
    el("div", {}, `${at.namespace}/${at.pod_name}/${at.container}`, notes ? el("div", { className: "problem" }, notes) : null),
    el("div", {}, `${cores} of ${limit}`, bar((now.cores || 0) / 100, null, [share.cores / 100, share.core_limit / 100], `${cores} of ${limit} hundredths of the card`)),
    spark(minute, Math.max(share.core_limit, 1), "cores in the last minute") || "",
    el("div", {}, `${bytes(share.memory_used_bytes)} of ${bytes(share.memory_limit_bytes)}`,
      bar(memory, null, share.memory_limit_bytes ? [share.memory_peak_bytes / share.memory_limit_bytes] : [], `${percent(memory)}, at most ${bytes(share.memory_peak_bytes)}`)),
    now.waited === null ? "" : percent(now.waited),
    String(at.processes),
  ];
}

function drawCardOf(report, card, now) {
  const rows = [];
  for (const at of report.containers) {
    for (const share of at.cards) if (share.uuid === card.uuid) rows.push(drawShare(report, at, share, now.get(keyOf(at, share))));
  }
  const memory = card.memory_used_bytes === null ? null : card.memory_used_bytes / card.memory_bytes;
  const figure = (name, text, drawn) => el("div", { className: "tile" }, el("div", { className: "name" }, name), el("div", {}, text), drawn);
  return el("div", { className: "block" },
    el("h3", {}, `card ${card.minor} · ${card.model} · ${bytes(card.memory_bytes)}${card.numa_node === null ? "" : ` · NUMA node ${card.numa_node}`}`),
    el("div", { className: "soft" }, card.uuid),
    card.healthy ? null : el("div", { className: "problem" }, `unhealthy: ${card.problem || "no reason is known"}`),
    el("div", { className: "tiles" },
      figure("busy", card.gpu_percent === null ? "?" : `${card.gpu_percent} %`, bar((card.gpu_percent || 0) / 100)),
      figure("memory in use", memory === null ? "?" : `${bytes(card.memory_used_bytes)}`, bar(memory || 0)),
      figure("cores booked", `${card.booked_cores} of 100`, bar(card.booked_cores / 100)),
      figure("memory booked", bytes(card.booked_memory_bytes), bar(card.booked_memory_bytes / card.memory_bytes)),
      card.other_memory_bytes ? figure("memory of others", bytes(card.other_memory_bytes), bar(card.other_memory_bytes / card.memory_bytes)) : null),
    rows.length ? table([["container", "text"], ["cores"], ["last minute"], ["memory"], ["waited", "number"], ["processes", "number"]], rows)
      : el("p", { className: "soft" }, "no shares"));
}

async function look() {
  const report = await asked("usage");
  if (before && report.at_s === before.at_s) return;
  const now = used(report);
  before = report;
  document.title = `vcuda: ${report.node}`;
  parts.title.textContent = `vcuda · node ${report.node}`;
  parts.said.textContent = `driver ${report.driver_version || "none"}, ${new Date().toLocaleTimeString([], { hour12: false })}`;
  cards.replaceChildren(
    ...[report.problem].filter(Boolean).map((text) => el("div", { className: "banner" }, text)),
    ...report.cards.map((card) => drawCardOf(report, card, now)),
    report.cards.length ? "" : el("p", {}, "no cards"));
}

frame("vcuda · node", {}, [cards]);
repeat(2, look);

// What both pages share. Text that comes from the cluster is only ever put into text nodes and properties that are text.
const TOKEN_HEADER = "X-Vcuda-Token";

function el(tag, given, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(given || {})) {
    if (key === "on") for (const [name, does] of Object.entries(value)) made.addEventListener(name, does);
    else if (key === "at") Object.assign(made.style, value);
    else if (key.includes("-") || key === "role" || key === "for") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const percent = (part) => `${Math.round(100 * part)} %`;
const many = (count, thing) => `${count.toLocaleString("en")} ${thing}${count === 1 ? "" : "s"}`;

function bytes(count) {
  if (count === null || count === undefined) return "?";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(count) >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${at < 2 || count >= 100 ? Math.round(count) : Number(count.toFixed(1))} ${units[at]}`;
}

function ago(text) {
  const seconds = (Date.now() - Date.parse(text)) / 1000;
  if (!(seconds >= 0)) return "";
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

function bar(part, more, marks, label) {
  const clip = (value) => `${100 * Math.min(1, Math.max(0, value))}%`;
  const spans = [];
  if (more !== undefined && more !== null) spans.push(el("span", { className: "more", at: { width: clip(more) } }));
  spans.push(el("span", { className: part > 1 ? "over" : "", at: { width: clip(part) } }));
  for (const mark of marks || []) spans.push(el("i", { at: { left: clip(mark) } }));
  return el("div", { className: "bar", role: "img", "aria-label": label || percent(part), title: label || percent(part) }, ...spans);
}

function spark(values, most, label) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const top = Math.max(most || 0, ...values, 1e-9);
  const width = Math.max(values.length - 1, 1);
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", `0 0 ${width} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  const line = document.createElementNS(space, "polyline");
  line.setAttribute("points", values.map((value, at) => `${at},${(19 - 18 * Math.max(0, value) / top).toFixed(1)}`).join(" "));
  svg.append(line);
  return values.length > 1 ? svg : null;
}

function table(heads, rows) {
  const cell = (tag, kind, what) => el(tag, { className: kind || "" }, what);
  return el("div", { className: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...heads.map(([name, kind]) => cell("th", kind, name)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((what, at) => cell("td", heads[at][1], what)))))));
}

// --- what is asked for, and with whose right ---

const kept = {
  read(key) { try { return sessionStorage.getItem(key) || ""; } catch { return ""; } },
  write(key, value) { try { sessionStorage.setItem(key, value); } catch { /* then it is asked for again */ } },
};

class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

async function asked(where) {
  const token = kept.read("vcuda-token");
  const answer = await fetch(where, { headers: token ? { [TOKEN_HEADER]: token } : {}, credentials: "same-origin", cache: "no-store" });
  const text = await answer.text();
  let data = null;
  try { data = JSON.parse(text); } catch { /* a refusal in plain text */ }
  if (answer.ok && data !== null) return data;
  throw new Refused(answer.status, (data && (data.Error || data.message)) || text.trim().slice(0, 300) || `status ${answer.status}`);
}

function needsToken(problem, again) {
  const field = el("input", { type: "password", autocomplete: "off", placeholder: "token", "aria-label": "token" });
  const send = (event) => { event.preventDefault(); kept.write("vcuda-token", field.value.trim()); again(); };
  const why = problem.status === 403 ? "This token's owner may not see what tenants use." : "What tenants use is shown to whom Kubernetes allows it.";
  return el("div", {}, `${why} A token that may: `, el("code", {}, "kubectl -n vcuda-system create token vcuda-reader"),
    el("form", { on: { submit: send } }, field, el("button", { type: "submit" }, "Show")));
}

// --- the frame ---

const parts = {
  title: el("h1"),
  banner: el("div", { role: "alert" }),
  said: el("span", { className: "said", role: "status" }),
  dialog: el("dialog", { "aria-label": "details" }),
  main: el("main", {}),
};

function banner(problem, again) {
  parts.banner.replaceChildren();
  if (!problem) return;
  const text = problem instanceof Refused ? `${problem.message}` : `no answer: ${problem.message}`;
  const more = problem.status === 401 || problem.status === 403 ? needsToken(problem, again) : null;
  parts.banner.append(el("div", { className: "banner" }, text, more));
}

function opened(title, ...children) {
  const close = el("button", { type: "button", on: { click: () => parts.dialog.close() } }, "Close");
  parts.dialog.replaceChildren(el("div", { className: "top" }, el("h2", {}, title), close), ...children.filter(Boolean));
  if (!parts.dialog.open) parts.dialog.showModal();
}

function nextTheme() {
  const root = document.documentElement;
  const order = ["", "dark", "light"];
  root.dataset.theme = order[(order.indexOf(root.dataset.theme || "") + 1) % order.length];
  try { localStorage.setItem("vcuda-theme", root.dataset.theme); } catch { /* it lasts as long as the page */ }
  themes.textContent = `Theme: ${root.dataset.theme || "system"}`;
}
try { document.documentElement.dataset.theme = localStorage.getItem("vcuda-theme") || ""; } catch { /* the system's */ }
const themes = el("button", { type: "button", on: { click: nextTheme } }, `Theme: ${document.documentElement.dataset.theme || "system"}`);

function frame(title, keys, children) {
  parts.title.textContent = title;
  const help = () => opened("Keys", table([["Key"], ["What"]], Object.entries(keys).map(([key, [what]]) => [el("kbd", {}, key), what])));
  keys["t"] = ["another theme", nextTheme];
  keys["?"] = ["these keys", help];
  parts.main.append(...children);
  document.body.append(
    el("header", {}, parts.title, parts.said, themes, el("button", { type: "button", on: { click: help } }, "Keys")),
    parts.banner, parts.main, parts.dialog);
  document.addEventListener("keydown", (event) => {
    const typing = event.target instanceof HTMLElement && event.target.closest("input, select, dialog");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing) { if (event.key === "Escape") event.target.blur(); return; }
    const found = keys[event.key];
    if (found) { event.preventDefault(); found[1](); }
  });
}

function repeat(seconds, look) {
  let timer = 0;
  let busy = false;
  let shut = false; // a token is being typed: what is typed must not be wiped
  const now = async () => {
    clearTimeout(timer);
    if (busy) return;
    busy = true;
    try {
      await look();
      banner(null);
      parts.said.classList.remove("problem");
      shut = false;
    } catch (problem) {
      banner(problem, now);
      parts.said.classList.add("problem");
      shut = problem.status === 401 || problem.status === 403;
    }
    busy = false;
    clearTimeout(timer);
    if (!document.hidden && !shut) timer = setTimeout(now, 1000 * seconds);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !shut) now(); });
  now();
}

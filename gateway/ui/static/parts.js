// What pages are built of: figures, tables, charts, states, filters.
import { useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { html } from "./shown.js";
import { amend, link } from "./api.js";

// -- figures -----------------------------------------------------------------------------------

/** @type {[number, string][]} */
const UNITS = [[1e3, "k"], [1e6, "M"], [1e9, "G"], [1e12, "T"]];

/** @param {number | null | undefined} value @param {number} [digits] */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e4) {
    const [unit, name] = UNITS.find(([unit]) => Number((size / unit).toPrecision(3)) < 1000) ?? [1e12, "T"];
    return `${(value / unit).toPrecision(3)} ${name}`;
  }
  if (Number.isInteger(value)) return String(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

/** A share; one below a tenth of a percent is a word. @param {number | null | undefined} value */
export const percent = (value) =>
  value === null || value === undefined ? "–" : value > 0 && value < 1e-3 ? "nearly none" : `${number(value * 100, 2)} %`;

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let n = value, unit = 0;
  while (n >= 1000 && unit < units.length - 1) (n /= 1000), unit++;
  return `${number(n)} ${units[unit]}`;
}

/** @param {number | null | undefined} seconds */
export function seconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${number(seconds * 1000, 2)} ms`;
  if (seconds < 120) return `${number(seconds, 3)} s`;
  if (seconds < 7200) return `${number(seconds / 60, 3)} min`;
  return `${number(seconds / 3600, 3)} h`;
}

// -- small parts -------------------------------------------------------------------------------

/** @param {{ title?: any, children?: any, class?: string, aside?: any }} props */
export const Card = ({ title, children, class: name = "", aside }) => html`
  <section class=${`card ${name}`}>
    ${title && html`<header><h2>${title}</h2>${aside}</header>`} ${children}
  </section>
`;

const KINDS = /** @type {Record<string, string>} */ ({
  open: "info", ready: "good", held: "warn", leased: "accent", complete: "good", aborted: "bad",
  dropped: "bad", acked: "good", trained: "accent", returned: "warn", scored: "plain",
  up: "good", down: "bad", behind: "warn", ailing: "warn",
  serve: "good", wait: "info", hold: "warn", drop: "bad",
});

/** @param {{ of: string | null | undefined, kind?: string, title?: string }} props */
export const Chip = ({ of, kind, title }) =>
  of ? html`<span class=${`chip ${kind ?? KINDS[of] ?? "plain"}`} title=${title}>${of}</span>` : null;

/** @param {{ label: string, value: any, hint?: any }} props */
export const Stat = ({ label, value, hint }) => html`
  <div class="stat"><dt>${label}</dt><dd>${value}${hint && html`<small>${hint}</small>`}</dd></div>
`;

/** @param {{ error: Error | null | undefined }} props */
export const Failure = ({ error }) =>
  error ? html`<p class="notice bad" role="alert">${error.message}</p>` : null;

/** @param {{ children?: any }} props */
export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

export const Loading = () => html`<p class="empty" role="status">Loading…</p>`;

/** A link to a trajectory or group, whatever its name is. @param {Row} props */
export const Uid = ({ page, uid, ...params }) => {
  const name = page === "group" ? "prompt_uid" : "uid";
  return html`<a class="uid" title=${uid} href=${link(page, { [name]: uid, ...params })}>${uid}</a>`;
};

/** The orders of a column of `Said`. @type {[string, string][]} */
export const SAID = [["First message", "first"], ["Last reply", "last"]];

/** What was said first in a trajectory or group, or why that is not there. @param {Row} row */
export const firstSaid = (row) => row.first ?? ((row.n_steps ?? row.turns) === 0 ? "no turn yet" : "no text was kept");

/** What was said first and last, as the link of a row. @param {Row} props */
export const Said = ({ row, href }) => html`<a class="talk" href=${href}>
  <span>${firstSaid(row)}</span><span>${row.last ?? ""}</span></a>`;

const typing = (/** @type {KeyboardEvent} */ event) =>
  ["INPUT", "SELECT", "TEXTAREA"].includes(/** @type {HTMLElement} */ (event.target).tagName) || event.ctrlKey || event.metaKey || event.altKey;
const way = (/** @type {KeyboardEvent} */ event) =>
  typing(event) ? 0 : /** @type {Row} */ ({ n: 1, j: 1, p: -1, k: -1 })[event.key] ?? 0;

/** @type {string[]} */
let listed = [];
const talks = () => [...document.querySelectorAll("a.talk")].map((each) => /** @type {HTMLAnchorElement} */ (each));
/** What is so many places after this page in the list that was seen last. @param {number} by */
const beside = (by) => {
  const at = listed.indexOf(location.hash.replace(/&(view|at|colour)=[^&]*/g, ""));
  return at < 0 ? undefined : listed[at + by];
};

/** Keys n and p, or j and k, choose the next and the previous row of a list; Enter opens it, where the same keys go
 * on to its neighbours. @param {KeyboardEvent} event */
export function walk(event) {
  const by = way(event);
  if (!by) return;
  const all = talks();
  const now = all.findIndex((each) => each === document.activeElement);
  const to = all.length ? undefined : beside(by);
  if (to) location.hash = to;
  else all[Math.max(0, Math.min(all.length - 1, now + by))]?.focus();
}

/** A list whose rows keys go through, and on to their neighbours. @param {Row[]} rows */
export function useKeys(rows) {
  useEffect(() => {
    if (rows.length) listed = [...new Set(talks().map((each) => each.hash))]; // a step that came late has its trajectory's
  }, [rows]);
}

/** Links to what is before and after this page in the list that was seen last. */
export function Neighbours() {
  const [before, after] = [beside(-1), beside(1)];
  if (!before && !after) return null;
  return html`<nav class="tabs" aria-label="Neighbours in the list">
    ${before ? html`<a href=${before} title="Previous in the list (p)">Previous</a>` : html`<span>Previous</span>`}
    ${after ? html`<a href=${after} title="Next in the list (n)">Next</a>` : html`<span>Next</span>`}</nav>`;
}

/** A time of today, or a date with it. @param {number | null} time */
export function when(time) {
  if (!time) return "–";
  const at = new Date(time * 1000);
  return at.toDateString() === new Date().toDateString() ? at.toLocaleTimeString() : at.toLocaleString();
}

/** @param {{ marks: Row | null | undefined }} props */
export const MarksShown = ({ marks }) =>
  marks
    ? html`${marks.trainable === false && html`<${Chip} of="not trainable" kind="bad" />`}
        ${marks.trainable === true && html`<${Chip} of="trainable" kind="good" />`}
        ${(marks.tags ?? []).map((/** @type {string} */ tag) => html`<${Chip} of=${tag} kind="tag" />`)}
        ${marks.note && html`<span class="note" title=${marks.note}>✎</span>`}`
    : null;

/** The order of a list, as the address has it. @param {Row} params @param {string} [first] the order of an address without one */
export const ordered = ({ order, ascending }, first = "time") => ({ by: order || first, ascending: Boolean(ascending), first });

/** Rows that are all here, in order of a field; those that have none come last. @param {Row[]} rows @param {Row} order */
export function inOrder(rows, { by, ascending }) {
  const known = rows.filter((row) => row[by] !== null && row[by] !== undefined);
  const compared = (/** @type {any} */ a, /** @type {any} */ b) => (a < b ? -1 : a > b ? 1 : 0);
  known.sort((one, other) => (ascending ? 1 : -1) * compared(one[by], other[by]));
  return by ? [...known, ...rows.filter((row) => !known.includes(row))] : rows;
}

/** Said where only the newest were looked through. @param {{ looked: number | null | undefined }} props */
export const Looked = ({ looked }) =>
  looked ? html`<p class="fine">The first of the ${number(looked)} newest that pass; filters narrow them down.</p>` : null;

/** @param {{ name: string, by: string, order: Row }} props */
const Sorted = ({ name, by, order }) => {
  const is = order.by === by;
  const next = is && !order.ascending ? { order: by, ascending: 1 } : { order: by === order.first ? "" : by, ascending: "" };
  return html`<button class="sort" title=${`Sort by ${name.toLowerCase()}`} onClick=${() => amend(next)}>${name}<span aria-hidden="true">${is ? (order.ascending ? " ↑" : " ↓") : ""}</span></button>`;
};

/** The orders that a column's head sorts by, with their names. @param {Column} column @returns {[string, string][]} */
const ordersOf = ([name, , , by]) => (typeof by === "string" ? [[name, by]] : (by ?? []));

/**
 * @param {{ label: string, columns: Column[], rows: Row[],
 *   empty?: any, more?: (() => void) | null, busy?: boolean, failed?: Error | null, order?: Row }} props
 */
export const Table = ({ label, columns, rows, empty, more, busy, failed, order }) => html`
  <div class="scroll" tabindex="0" role="region" aria-label=${label}>
    <table>
      <thead>
        <tr>${columns.map((column) => {
          const [name, , kind] = column;
          const by = order ? ordersOf(column) : [];
          return html`<th scope="col" class=${kind ?? ""}
            aria-sort=${by.some((each) => each[1] === order?.by) ? (order?.ascending ? "ascending" : "descending") : undefined}>
            ${by.length ? by.map(([text, each]) => html`<${Sorted} name=${text} by=${each} order=${order} /> `) : name}</th>`;
        })}</tr>
      </thead>
      <tbody>
        ${rows.map((row) => html`<tr>${columns.map(([, cell, kind]) => html`<td class=${kind ?? ""}>${cell(row)}</td>`)}</tr>`)}
      </tbody>
    </table>
    ${rows.length === 0 && !failed && (busy ? html`<${Loading} />` : html`<${Empty}>${more ? "Nothing found yet; there is more to look through." : (empty ?? "Nothing here.")}<//>`)}
    ${more && html`<button class="more" disabled=${busy} onClick=${more}>${busy ? "Loading…" : "Look for more"}</button>`}
  </div>
`;

/** A field of a filter, told when it is left or Enter is pressed; what is typed so far outlives the page's ticks. @param {Row} props */
export function Field({ label, value, onChange, type = "text", placeholder = "", wide = false }) {
  const [typed, keep] = useState(value ?? "");
  useEffect(() => keep(value ?? ""), [value]);
  return html`<label class=${wide ? "field wide" : "field"}><span>${label}</span>
    <input type=${type} step="any" value=${typed} placeholder=${placeholder} onInput=${(/** @type {any} */ e) => keep(e.target.value)}
      onChange=${(/** @type {any} */ e) => onChange(e.target.value)} />
  </label>`;
}

/** Options with their texts; the value is one in any case. @param {(string | [string, string])[]} options @param {string} value @returns {[string, string][]} */
function known(options, value) {
  const found = options.map((option) => /** @type {[string, string]} */ (Array.isArray(option) ? option : [option, option]));
  return found.some(([name]) => name === value) ? found : [[value, value], ...found];
}

/** @param {{ label: string, value: string, options: (string | [string, string])[], onChange: (value: string) => void }} props */
export const Select = ({ label, value, options, onChange }) => html`
  <label class="field"><span>${label}</span>
    <select value=${value} onChange=${(/** @type {any} */ e) => onChange(e.target.value)}>
      ${known(options, value).map(([name, text]) => {
        return html`<option value=${name} selected=${name === value}>${text}</option>`;
      })}
    </select>
  </label>
`;

/** @param {{ label: string, options: [string, string][], value: string, onChange: (value: string) => void }} props */
export const Tabs = ({ label, options, value, onChange }) => html`
  <div class="tabs" role="group" aria-label=${label}>
    ${options.map(([name, text]) => html`
      <button aria-pressed=${name === value} onClick=${() => onChange(name)}>${text}</button>`)}
  </div>
`;

// -- charts ------------------------------------------------------------------------------------

const colour = (/** @type {string} */ name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Distances of two marks on an axis of whole numbers. */
const STEPS = Array.from({ length: 33 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));

/**
 * Curves over optimizer steps, tokens or seconds.
 * @param {{ label: string, x: number[], lines: { name: string, values: (number | null)[], colour: string,
 *   points?: boolean }[], height?: number, range?: [number, number] }} props
 */
export function Chart({ label, x, lines, height = 170, range }) {
  const target = useRef(/** @type {HTMLElement | null} */ (null));
  const [theme, setTheme] = useState(0);
  const shown = lines.filter((line) => line.values?.some((v) => v !== null && v !== undefined));
  const key = shown.map((line) => line.name).join("|");
  useEffect(() => {
    const change = () => setTheme((n) => n + 1);
    addEventListener("theme", change);
    return () => removeEventListener("theme", change);
  }, []);
  const data = useMemo(() => [x, ...shown.map((line) => line.values)], [x, key, ...shown.map((l) => l.values)]);
  const plot = useRef(/** @type {uPlot | null} */ (null));
  useEffect(() => {
    const at = target.current;
    if (at === null || shown.length === 0) return;
    const axis = {
      stroke: colour("muted"), font: "11px system-ui", ticks: { show: false },
      grid: { stroke: colour("line"), width: 1 },
    };
    const made = new uPlot(
      {
        width: at.clientWidth, height, legend: { show: true, live: false }, cursor: { y: false },
        scales: { x: { time: false }, y: range ? { range } : {} },
        axes: [{ ...axis, size: 28, incrs: STEPS }, { ...axis, size: 48 }],
        series: [
          { label: "step" },
          ...shown.map((line) => ({
            label: line.name, stroke: colour(line.colour), width: 2, spanGaps: true,
            points: { show: line.points ?? false, size: 7, fill: colour(line.colour) },
          })),
        ],
      },
      data, at,
    );
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize({ width: at.clientWidth, height }));
    observer.observe(at);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [key, theme, height]);
  useEffect(() => plot.current?.setData(data), [data]);
  if (shown.length === 0) return html`<${Empty}>No figures yet.<//>`;
  const last = shown.map((line) => `${line.name} ${number(line.values.findLast((v) => v !== null))}`);
  return html`<div class="chart" role="img" aria-label=${`${label}; now ${last.join(", ")}`} ref=${target}></div>`;
}

/** Bars with their share. @param {{ label: string, bars: { name: string, value: number, colour?: string, text?: string }[], most?: number }} props */
export function Bars({ label, bars, most }) {
  const top = most ?? Math.max(...bars.map((bar) => bar.value), 1e-9);
  return html`<ul class="bars" aria-label=${label}>
    ${bars.map((bar) => html`<li>
      <span>${bar.name}</span>
      <div class="track"><div class=${`bar ${bar.colour ?? "accent"}`} style=${{ width: `${Math.min(100, (100 * bar.value) / top)}%` }}></div></div>
      <b>${bar.text ?? number(bar.value)}</b>
    </li>`)}
  </ul>`;
}

/** @param {{ values: (number | null)[], label: string }} props */
export function Spark({ values, label }) {
  const known = values.map((v) => v ?? 0);
  const top = Math.max(...known, 1e-9);
  const points = known.map((v, i) => `${(100 * i) / Math.max(1, known.length - 1)},${24 - (22 * v) / top}`).join(" ");
  return html`<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label=${label}>
    <polyline points=${points} vector-effect="non-scaling-stroke" />
  </svg>`;
}

/** Parts of `text` that match `sought` are marked; everything is text. @param {{ text: string, sought: string }} props */
export function Found({ text, sought }) {
  if (!sought) return text;
  const parts = [];
  // Not of the text in lower case, which may be longer: that of İ is two characters.
  const wanted = new RegExp(sought.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"), "giu");
  let from = 0;
  for (const { 0: found, index } of text.matchAll(wanted)) {
    parts.push(text.slice(from, index), html`<mark>${found}</mark>`);
    from = index + found.length;
  }
  return [...parts, text.slice(from)];
}

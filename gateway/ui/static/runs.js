// Several runs on one page: the same curves of each, by optimizer step, tokens or time.
import { html } from "./shown.js";
import { amend, query, useApi } from "./api.js";
import { Card, Chart, Empty, Failure, Loading, Select, Table, number, seconds } from "./parts.js";

const COLOURS = ["accent", "second", "info", "bad", "good", "warn", "cold", "muted"];
const SHOWN = ["reward/mean", "val/score", "staleness/mean", "tokens_per_s"];
/** @type {[string, string][]} */
const AXES = [["step", "optimizer steps"], ["tokens", "trained tokens"], ["seconds", "training time, s"]];
/** @type {[string, string][]} */
const SMOOTHING = [["0", "none"], ["0.6", "some"], ["0.9", "much"], ["0.97", "most"]];

/**
 * Exponential mean of the values so far, without the pull to the first one.
 * @param {number[]} values @param {number} by
 */
export function smooth(values, by) {
  let [mean, weight] = [0, 0];
  return values.map((value) => {
    [mean, weight] = [by * mean + (1 - by) * value, by * weight + (1 - by)];
    return mean / weight;
  });
}

/**
 * The curves of one figure on one axis: a chart has one x for all lines.
 * @param {Row[]} runs @param {string} key @param {string} axis @param {number} by
 */
export function together(runs, key, axis, by) {
  const curves = runs.map((run) => run.curves[key] ?? { [axis]: [], value: [] });
  const x = [...new Set(curves.flatMap((curve) => curve[axis]))].sort((a, b) => a - b);
  const lines = curves.map((curve, i) => {
    const values = smooth(curve.value, by);
    const at = new Map(curve[axis].map((/** @type {number} */ place, /** @type {number} */ k) => [place, values[k]]));
    return {
      name: runs[i].name, values: x.map((place) => at.get(place) ?? null),
      colour: COLOURS[i % COLOURS.length], points: key.startsWith("val/"),
    };
  });
  return { x, lines };
}

/** @param {{ about: Row, params: Row }} props */
export function Runs({ about, params }) {
  const { data: known, error: unknown } = useApi("runs");
  const names = params.runs ? params.runs.split("/") : known ? [known.this] : [];
  const [axis, by, any] = [params.x ?? "step", params.smooth ?? "0", params.key ?? "loss"];
  const keys = [...new Set([...SHOWN, any])];
  const { data, error } = useApi(known && names.length ? "compare" : null, { run: names, key: keys });
  if (unknown) return html`<${Failure} error=${unknown} />`;
  if (!known) return html`<${Loading} />`;
  if (!known.this) return html`<${Empty}>This gateway knows no run's folder, and so no runs beside it.<//>`;
  const set = (/** @type {string[]} */ chosen) => amend({ runs: chosen.join("/") });
  const runs = data?.runs ?? [];
  const card = (/** @type {string} */ title, /** @type {string} */ key, /** @type {any} */ aside) => {
    const { x, lines } = together(runs, key, axis, Number(by));
    return html`<${Card} title=${title} aside=${aside}><${Chart} key=${`${key} ${axis}`} label=${`${title} by ${axis}`} x=${x} lines=${lines} height=${230} /><//>`;
  };
  const last = (/** @type {Row} */ run, /** @type {string} */ key, /** @type {string} */ column) => run.curves[key]?.[column]?.at(-1);
  return html`
    <div class="head"><h1>Runs</h1>
      <${Select} label="By" value=${axis} options=${AXES} onChange=${(/** @type {string} */ x) => amend({ x })} />
      <${Select} label="Smoothing" value=${by} options=${SMOOTHING} onChange=${(/** @type {string} */ s) => amend({ smooth: s })} />
      <a class="button" href=${`/ui/api/compare.csv?${query({ run: names, key: keys })}`} download="runs.csv">CSV</a>
    </div>
    <fieldset class="choice"><legend>Folders beside <code>${about.run.name ?? known.this}</code></legend>
      ${[...new Set([...known.runs, ...names])].map((/** @type {string} */ name) => html`<label><input type="checkbox" checked=${names.includes(name)}
        disabled=${!names.includes(name) && names.length >= known.most}
        onChange=${() => set(names.includes(name) ? names.filter((/** @type {string} */ n) => n !== name) : [...names, name])} /> ${name}</label>`)}
    </fieldset>
    <${Failure} error=${error} />
    <div class="grid">
      ${card("Reward", "reward/mean", null)}
      ${card("Evaluation", "val/score", null)}
      ${card("Lag, in versions", "staleness/mean", null)}
      ${card("Tokens per second", "tokens_per_s", null)}
      ${card(any, any, html`<${Select} label="Metric" value=${any} options=${data?.keys?.length ? data.keys : [any]} onChange=${(/** @type {string} */ key) => amend({ key })} />`)}
    </div>
    <${Card} title="So far"><${Table} label="The runs so far" rows=${runs} columns=${[
      ["Run", (r) => r.name],
      ["Steps", (r) => number(last(r, "reward/mean", "step")), "num"],
      ["Tokens", (r) => number(last(r, "reward/mean", "tokens")), "num"],
      ["Time", (r) => seconds(last(r, "reward/mean", "seconds")), "num"],
      ["Reward", (r) => number(last(r, "reward/mean", "value")), "num"],
      ["Evaluation", (r) => number(last(r, "val/score", "value")), "num"],
    ]} /><//>`;
}

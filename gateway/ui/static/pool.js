// The pool: where every group and step is, leases, the journal, and what happens now.
import { useEffect, useState } from "./vendor/preact.js";
import { html } from "./shown.js";
import { amend, useApi, useTicks } from "./api.js";
import { Card, Chip, Empty, Failure, Loading, Select, Stat, Table, Uid, bytes, number, seconds, when } from "./parts.js";

/** @param {{ name: string, channel: Row }} props */
const Channel = ({ name, channel: c }) => html`<${Card} title=${name} aside=${html`<small>version ${c.policy_version}</small>`}>
  <div class="scroll" tabindex="0" role="region" aria-label=${`Where all of ${name} is`}><table class="sums"><thead><tr><th></th><th class="num">submitted</th><th class="num">open</th><th class="num">ready</th><th class="num">leased</th><th class="num">acked</th><th class="num">dropped</th></tr></thead>
    <tbody>
      <tr><th scope="row">groups</th>${["submitted", "open", "ready", "leased", "acked", "dropped"].map((k) => html`<td class="num">${number(c.groups[k])}</td>`)}</tr>
      <tr><th scope="row">trajectories</th>${["submitted", "open", "complete", "", "acked", "dropped"].map((k) => html`<td class="num">${k && number(c.trajectories[k])}</td>`)}</tr>
      <tr><th scope="row">steps</th>${["submitted", "", "stored", "", "acked", "dropped"].map((k) => html`<td class="num">${k && number(c.steps[k])}</td>`)}</tr>
    </tbody></table></div>
  <dl class="stats">
    <${Stat} label="Held" value=${c.groups.held} />
    <${Stat} label="Tokens" value=${number(c.tokens.stored)} />
    <${Stat} label="Memory" value=${bytes(c.memory_bytes)} />
    <${Stat} label="Late · duplicate" value=${`${c.steps.late} · ${c.steps.duplicate}`} />
    <${Stat} label="Consumers · producers waiting" value=${`${c.waiting?.consumers ?? 0} · ${c.waiting?.producers ?? 0}`} />
    ${c.leases && html`<${Stat} label="Leases active" value=${c.leases.active} />
      ${Object.entries(c.leases).filter(([k, v]) => k !== "active" && typeof v === "number").map(([k, v]) => html`<${Stat} label=${`leases ${k}`} value=${v} />`)}`}
  </dl>
  ${c.oldest_open?.length > 0 && html`<h3>Oldest open groups</h3><${Table} label=${`Oldest open groups of ${name}`} rows=${c.oldest_open} columns=${[
    ["Prompt", (g) => html`<${Uid} page="group" uid=${g.prompt_uid} channel=${name} />`],
    ["Age", (g) => seconds(g.age_s), "num"],
    ["Why it is open", (g) => g.why],
  ]} />`}
<//>`;

/** @param {{ params: Row }} props */
export function Pool({ params }) {
  const ticks = useTicks();
  const tick = ticks.at(-1);
  if (!tick) return html`<${Loading} />`;
  if (!tick.pool) return html`<${Failure} error=${new Error(/** @type {Row} */ (tick).pool_error ?? "the pool does not answer")} />`;
  const shards = tick.shards?.shards ?? (tick.shards ? [tick.shards] : []);
  return html`
    <div class="head"><h1>Pool</h1></div>
    <div class="grid two">${Object.entries(tick.pool).map(([name, channel]) => html`<${Channel} name=${name} channel=${channel} />`)}</div>
    <div class="grid two">
      <${Card} title="Shards"><${Table} label="Shards" rows=${shards} empty="This run is over: its journal is only read." columns=${[
        ["Shard", (s) => s.shard, "num"],
        ["Process", (s) => s.pid, "num"],
        ["Memory", (s) => bytes(s.memory_bytes), "num"],
        ["Journal", (s) => (s.journal ? bytes(s.journal.file_bytes) : "none"), "num"],
        ["Rows", (s) => number(s.journal?.rows_stored), "num"],
        ["Rows a commit", (s) => number(s.journal?.rows_per_commit), "num"],
        ["Survives", (s) => (s.journal ? s.durability : "nothing")],
        ["Last error", (s) => s.journal?.last_error],
      ]} /><//>
      <${Events} params=${params} ticks=${ticks} />
    </div>`;
}

/** @param {{ params: Row, ticks: Tick[] }} props */
function Events({ params, ticks }) {
  const kind = params.kind ?? "";
  const { data, error } = useApi("events", { kinds: kind });
  const [rows, set] = useState(/** @type {Row[]} */ ([]));
  useEffect(() => data && set(data.items.slice(0, 100)), [data]);
  useEffect(() => {
    const news = (ticks.at(-1)?.events ?? []).filter((e) => !kind || e.kind === kind);
    if (news.length) {
      set((before) => {
        const known = new Set(before.map((e) => `${e.number}${e.time}`));
        return [...news.filter((e) => !known.has(`${e.number}${e.time}`)).reverse(), ...before].slice(0, 100);
      });
    }
  }, [ticks]);
  return html`<${Card} title="What happens" aside=${html`<${Select} label="Kind" value=${kind} onChange=${(/** @type {string} */ v) => amend({ kind: v })}
      options=${[["", "all"], "ready", "leased", "returned", "acked", "dropped", "aborted", "scored"]} />`}>
    <${Failure} error=${error} />
    <div class="tall"><${Table} label="Events" rows=${rows} empty="Nothing has happened yet." columns=${[
      ["When", (e) => when(e.time)],
      ["What", (e) => html`<${Chip} of=${e.kind} />`],
      ["Channel", (e) => e.channel],
      ["Of", (e) => (e.trajectory_uid ? html`<${Uid} page="trajectory" uid=${e.trajectory_uid} channel=${e.channel} />` : html`<${Uid} page="group" uid=${e.prompt_uid} channel=${e.channel} />`)],
      ["", (e) => html`<small>${e.data.reason ?? (e.data.reward !== undefined ? `reward ${number(e.data.reward)}` : e.data.size ? `${e.data.size} rollouts` : "")}</small>`],
    ]} /></div>
  <//>`;
}

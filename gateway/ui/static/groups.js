// Groups and trajectories: listings with filters, and one group with its rollouts side by side.
import { html } from "./shown.js";
import { amend, link, useApi, usePages } from "./api.js";
import { Bars, Card, Chip, Empty, Failure, Field, Loading, Looked, MarksShown, Neighbours, SAID, Said, Select, Stat, Table, Tabs, Uid, firstSaid, number, ordered, percent, seconds, useKeys, when } from "./parts.js";
import { Marks } from "./curation.js";

const NONE = /** @type {Row[]} */ ([]);

/** @param {{ about: Row, params: Row, states: string[], extra?: any }} props */
const Filters = ({ about, params, states, extra }) => html`
  <form class="filters" aria-label="Filters" onSubmit=${(/** @type {Event} */ e) => e.preventDefault()}>
    <${Select} label="Channel" value=${params.channel ?? "train"} options=${about.channels} onChange=${(v) => amend({ channel: v })} />
    <${Select} label="State" value=${params.state ?? ""} options=${[["", "any"], ...states]} onChange=${(v) => amend({ state: v })} />
    <${Field} label="Reward from" type="number" value=${params.min_reward} onChange=${(v) => amend({ min_reward: v })} />
    <${Field} label="to" type="number" value=${params.max_reward} onChange=${(v) => amend({ max_reward: v })} />
    <${Field} label="Version from" type="number" value=${params.min_version} onChange=${(v) => amend({ min_version: v })} />
    <${Field} label="to" type="number" value=${params.max_version} onChange=${(v) => amend({ max_version: v })} />
    <${Field} label="Tag" value=${params.tag} onChange=${(v) => amend({ tag: v })} />
    ${extra}
  </form>`;

/** @param {{ params: Row }} props */
const Search = ({ params }) => html`
  <form class="filters" aria-label="Search" onSubmit=${(/** @type {Event} */ e) => e.preventDefault()}>
    <${Field} label="Search first messages and last replies" type="search" wide=${true} value=${params.search} onChange=${(/** @type {string} */ v) => amend({ search: v })} />
  </form>`;

const FILTERS = ["channel", "state", "min_reward", "max_reward", "min_version", "max_version", "tag", "prompt_uid"];
/** The filters of a list that the address has. @param {Row} params @param {string[]} more its own ones */
const chosen = (params, ...more) => Object.fromEntries([...FILTERS, ...more].map((name) => [name, params[name]]));

const versions = (/** @type {Row} */ row) =>
  row.oldest_version === null ? "–" : row.oldest_version === row.newest_version ? row.oldest_version : `${row.oldest_version}–${row.newest_version}`;

/** @param {{ about: Row, params: Row }} props */
export function Groups({ about, params }) {
  const view = params.view ?? "pool";
  return html`
    <div class="head"><h1>Groups</h1>
      <${Tabs} label="Which groups" value=${view} onChange=${(v) => amend({ view: v, order: "", ascending: "" })} options=${[["pool", "In the pool"], ["gone", "Recently gone"]]} />
    </div>
    ${view === "gone" ? html`<${Gone} about=${about} params=${params} />` : html`<${Live} about=${about} params=${params} />`}`;
}

/** @param {{ about: Row, params: Row }} props */
function Live({ about, params }) {
  const { search, order, ascending } = params;
  const pages = usePages("groups", { channel: "train", ...chosen(params), search, order, ascending });
  const channel = params.channel ?? "train";
  useKeys(pages.items);
  return html`
    <${Search} params=${params} />
    <${Filters} about=${about} params=${params} states=${["open", "ready", "held", "leased"]}
      extra=${html`<${Field} label="Prompt id" value=${params.prompt_uid} onChange=${(v) => amend({ prompt_uid: v })} />
        <button type="button" onClick=${pages.reload}>Refresh</button>`} />
    <${Failure} error=${pages.error} />
    <${Looked} looked=${pages.looked} />
    <${Card}><${Table} label="Groups; n and p choose the next and the previous" rows=${pages.items} more=${pages.more} busy=${pages.busy} failed=${pages.error} order=${ordered(params)}
      empty="No group of this kind is in the pool. Groups that were trained on are under Batches, dropped ones under Recently gone."
      columns=${[
        ["First message", (g) => html`<a class="talk" href=${link("group", { prompt_uid: g.prompt_uid, channel })}><span>${firstSaid(g)}</span></a>`, "", "first"],
        ["State", (g) => html`<${Chip} of=${g.state} title=${g.reason} />`, "", "state"],
        ["Rollouts", (g) => `${g.n_complete}${g.n_rollouts ? ` of ${g.n_rollouts}` : ""}${g.n_running ? `, ${g.n_running} running` : ""}${g.n_aborted ? `, ${g.n_aborted} aborted` : ""}`, "", "rollouts"],
        ["Reward", (g) => number(g.reward_mean), "num", "reward"],
        ["±", (g) => number(g.reward_std), "num", "spread"],
        ["Versions", versions, "num", "version"],
        ["Steps", (g) => number(g.n_steps), "num", "turns"],
        ["Tokens, call by call", (g) => number(g.n_tokens), "num", "tokens"],
        ["Opened", (g) => html`<small>${when(g.opened_at)}</small>`, "", "time"],
        ["Delivery", (g) => g.delivery, "num", "delivery"],
        ["Marks", (g) => html`<${MarksShown} marks=${g.marks} />`, "", "marks"],
        ["Why", (g) => html`<small>${g.reason}</small>`, "", "why"],
        ["Prompt", (g) => html`<${Uid} page="group" uid=${g.prompt_uid} channel=${channel} />`, "", "prompt"],
      ]} /><//>`;
}

/** @param {{ about: Row, params: Row }} props */
function Gone({ about, params }) {
  const kind = params.kind ?? "dropped";
  const { data, error, reload } = useApi("events", { channel: params.channel ?? "train", kinds: kind, reason: params.reason, order: params.order, ascending: params.ascending });
  useKeys(data?.items ?? NONE);
  return html`
    <form class="filters" aria-label="Filters" onSubmit=${(/** @type {Event} */ e) => e.preventDefault()}>
      <${Select} label="Channel" value=${params.channel ?? "train"} options=${about.channels} onChange=${(v) => amend({ channel: v })} />
      <${Select} label="How" value=${kind} options=${["dropped", "acked", "aborted"]} onChange=${(v) => amend({ kind: v, reason: "" })} />
      <${Select} label="Reason" value=${params.reason ?? ""} options=${[["", "any"], ...(data?.reasons ?? [])]} onChange=${(v) => amend({ reason: v })} />
      <button type="button" onClick=${reload}>Refresh</button>
    </form>
    <${Failure} error=${error} />
    <${Looked} looked=${data?.looked} />
    <${Card} aside=${data && html`<small>${data.total}</small>`}><${Table} label="Groups that left the pool" rows=${data?.items ?? []} busy=${!data && !error} failed=${error} order=${ordered(params)}
      empty="Since it was started the pool remembers no such event; what left it before is under Archive." columns=${[
        ["When", (e) => when(e.time), "", "time"],
        ["First message", (e) => html`<a class="talk" href=${link("group", { prompt_uid: e.prompt_uid, channel: e.channel })}><span>${e.first ?? "no text yet, or none was kept"}</span></a>`, "", "first"],
        ["Trajectory", (e) => e.trajectory_uid && html`<${Uid} page="trajectory" uid=${e.trajectory_uid} channel=${e.channel} />`, "", "uid"],
        ["How", (e) => html`<${Chip} of=${e.kind} />`, "", "kind"],
        ["Reason", (e) => e.data.reason, "", "reason"],
        ["Complete", (e) => e.data.complete, "num", "complete"],
        ["Issued again", (e) => (e.data.returned ? "yes" : ""), "", "returned"],
        ["Prompt", (e) => html`<${Uid} page="group" uid=${e.prompt_uid} channel=${e.channel} />`, "", "prompt"],
      ]} /><//>`;
}

/** @param {{ about: Row, params: Row }} props */
export function Trajectories({ about, params }) {
  const { search, order, ascending } = params;
  const pages = usePages("trajectories", { channel: "train", ...chosen(params, "trajectory_uid", "reason"), search, order, ascending });
  useKeys(pages.items);
  return html`
    <div class="head"><h1>Trajectories</h1></div>
    <${Search} params=${params} />
    <${Filters} about=${about} params=${params} states=${["open", "complete", "aborted"]}
      extra=${html`<${Field} label="Trajectory id" value=${params.trajectory_uid} onChange=${(v) => amend({ trajectory_uid: v })} />
        <${Field} label="Abort reason" value=${params.reason} onChange=${(v) => amend({ reason: v })} />
        <button type="button" onClick=${pages.reload}>Refresh</button>`} />
    <${Failure} error=${pages.error} />
    <${Looked} looked=${pages.looked} />
    <${Card}><${Table} label="Trajectories; n and p choose the next and the previous" rows=${pages.items} more=${pages.more} busy=${pages.busy} failed=${pages.error}
      empty="No trajectory of this kind is in the pool; what left it is under Archive." columns=${columns(params.channel ?? "train")} order=${ordered(params)} /><//>`;
}

/** @param {string} channel @returns {Column[]} */
const columns = (channel) => [
  ["First message, last reply", (t) => html`<${Said} row=${t} href=${link("trajectory", { uid: t.trajectory_uid, channel })} />`, "", SAID],
  ["Reward", (t) => number(t.reward), "num", "reward"],
  ["Turns", (t) => number(t.n_steps), "num", "turns"],
  ["Tokens", (t) => html`<span title=${`${number(t.n_tokens)} call by call`}>${number(t.n_unique_tokens)}</span>`, "num", "tokens"],
  ["Versions", versions, "num", "version"],
  ["State", (t) => html`<${Chip} of=${t.state} title=${t.reason} />`, "", "state"],
  ["Group", (t) => html`<${Chip} of=${t.group_state} />`, "", "group"],
  ["Opened", (t) => html`<small>${when(t.opened_at)}</small>`, "", "time"],
  ["Attempt", (t) => t.attempt, "num", "attempt"],
  ["Marks", (t) => html`<${MarksShown} marks=${t.marks} />`, "", "marks"],
  ["Trajectory", (t) => html`<${Uid} page="trajectory" uid=${t.trajectory_uid} channel=${channel} />`, "", "uid"],
  ["Prompt", (t) => html`<${Uid} page="group" uid=${t.prompt_uid} channel=${channel} />`, "", "prompt"],
];

// -- one group -----------------------------------------------------------------------------------

/** @param {{ node: Row, step: number | null, channel: string }} props */
const Prefix = ({ node, step, channel }) => html`
  <li>
    <div class="prefix">
      <span class="weight" title=${`computed once in place of ${node.shared} times`}>${number(node.n)} tokens × ${node.shared}</span>
      <code>${node.text}${node.n > 24 ? " …" : ""}</code>
      ${node.ends.map((/** @type {Row} */ end) => html`<a class="chip tag" href=${link("trajectory", { uid: end.trajectory_uid, step, channel })}>reward ${number(end.reward)}</a>`)}
    </div>
    ${node.children.length > 0 && html`<ul>${node.children.map((/** @type {Row} */ child) => html`<${Prefix} node=${child} step=${step} channel=${channel} />`)}</ul>`}
  </li>`;

/** @param {{ about: Row, params: Row }} props */
export function Group({ about, params }) {
  const channel = params.channel ?? "train";
  const { data, error, reload } = useApi("group", { channel, prompt_uid: params.prompt_uid, step: params.step });
  const view = params.view ?? "rollouts";
  if (error) return html`<${Failure} error=${error} />`;
  if (!data) return html`<${Loading} />`;
  const { group, trajectories: rows, prefixes: tree, step, last } = data;
  const rewards = rows.map((/** @type {Row} */ t) => t.reward).filter((/** @type {number | null} */ r) => r !== null);
  const mean = rewards.length ? rewards.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0) / rewards.length : null;
  const saved = tree.calls ? 1 - tree.tree / tree.calls : 0;
  const most = Math.max(...rewards.map(Math.abs), 1e-9);
  return html`
    <div class="head"><h1><small>Group</small> <span class="uid">${params.prompt_uid}</span></h1>
      <${Neighbours} />
      <${Tabs} label="View" value=${view} onChange=${(v) => amend({ view: v })} options=${[["rollouts", "Rollouts"], ["prefixes", "Prefix tree"]]} />
    </div>
    <div class="chips">
      ${group ? html`<${Chip} of=${group.state} title=${group.reason} /> <small>${group.reason}</small>` : data.archived ? html`<${Chip} of=${rows[0].left} /> <small>${rows[0].fate}</small>` : html`<a href=${link("batch", { step })}><${Chip} of="trained" /> at optimizer step ${step}</a>`}
      <${MarksShown} marks=${group?.marks} />
    </div>
    <dl class="stats">
      <${Stat} label="Rollouts" value=${group ? `${group.n_complete} of ${group.n_rollouts ?? "?"}` : rows.length} />
      <${Stat} label="Reward, mean" value=${number(mean)} />
      <${Stat} label="Tokens, call by call" value=${number(tree.calls)} />
      <${Stat} label="as a prefix tree" value=${number(tree.tree)} />
      <${Stat} label="Saved" value=${percent(saved)} />
    </dl>
    ${view === "rollouts"
      ? html`<div class="rollouts">
          ${rows.length === 0 && html`<${Empty}>No trajectory has begun.<//>`}
          ${rows.map((/** @type {Row} */ t) => html`<a class="card rollout" href=${link("trajectory", { uid: t.trajectory_uid, step, channel })}>
              <span class="uid">${t.trajectory_uid}</span>
              <span class="chips"><${Chip} of=${t.state ?? "trained"} title=${t.reason} /><${MarksShown} marks=${t.marks} /></span>
              <b class="reward">${number(t.reward)} <small>reward</small></b>
              <div class="track"><div class=${`bar ${(t.reward ?? 0) < (mean ?? 0) ? "bad" : "accent"}`} style=${{ width: `${(100 * Math.abs(t.reward ?? 0)) / most}%` }}></div></div>
              ${last[t.trajectory_uid] && html`<p class="ended">… ${last[t.trajectory_uid]}</p>`}
              <dl>
                ${t.advantage !== undefined
                  ? html`<${Stat} label="advantage" value=${number(t.advantage)} />`
                  : html`<${Stat} label="to the mean" value=${t.reward === null || mean === null ? "–" : number(t.reward - mean)} />`}
                <${Stat} label="steps" value=${t.n_steps} />
                <${Stat} label=${t.advantage === undefined ? "tokens" : "sampled tokens"} value=${number(t.n_unique_tokens ?? t.n_tokens)} />
                <${Stat} label="versions" value=${versions(t)} />
              </dl>
            </a>`)}
        </div>`
      : html`<${Card} title="Tokens that the rollouts share" aside=${tree.partial && html`<small>the first rollouts only</small>`}>
          <${Bars} label="Tokens to compute" bars=${[
            { name: "each call in full", value: tree.calls, colour: "warn" },
            { name: "one row per branch", value: tree.branches, colour: "second" },
            { name: "each prefix once", value: tree.tree, colour: "accent" },
          ]} />
          <ul class="tree">${tree.roots.map((/** @type {Row} */ root) => html`<${Prefix} node=${root} step=${step} channel=${channel} />`)}</ul>
        <//>`}
    ${group && html`<${Card} title="Curation of the whole group"><${Marks} about=${about} channel=${channel} prompt_uid=${params.prompt_uid} marks=${group.marks} done=${reload} /><//>`}
    ${group && Object.keys(group.metadata).length > 0 && html`<${Card} title="Metadata"><pre class="json" tabindex="0">${JSON.stringify(group.metadata, null, 2)}</pre><//>`}
    ${group?.deadline && html`<p class="fine">Deadline of the group: ${seconds(group.deadline - group.opened_at)} after it was opened.</p>`}`;
}

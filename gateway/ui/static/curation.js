// What people say of data: trainable or not, tags, notes, rewards; all of it can be undone.
import { useEffect, useState } from "./vendor/preact.js";
import { html, safe } from "./shown.js";
import { amend, link, post, query, usePages } from "./api.js";
import { Bars, Card, Chip, Empty, Failure, Field, Select, Table, Tabs, Uid, inOrder, number, ordered } from "./parts.js";

// -- what was done -------------------------------------------------------------------------------

/** @type {{ id: number, text: string, undo: (() => Promise<void>) | null, error?: string }[]} */
let done = [];
let ids = 0;
const changed = () => dispatchEvent(new Event("done"));

/** @param {string} text @param {(() => Promise<void>) | null} undo */
function did(text, undo) {
  done = [{ id: ++ids, text, undo }, ...done].slice(0, 50);
  changed();
}

function useDone() {
  const [, again] = useState(0);
  useEffect(() => {
    const read = () => again((n) => n + 1);
    addEventListener("done", read);
    return () => removeEventListener("done", read);
  }, []);
  return done;
}

/** @param {typeof done[0]} each */
async function undo(each) {
  try {
    await each.undo?.();
    done = done.filter((other) => other !== each);
  } catch (e) {
    each.error = /** @type {Error} */ (e).message;
  }
  changed();
}

/** The last action, for some seconds. */
export function Done() {
  const last = useDone()[0];
  const [hidden, hide] = useState(0);
  useEffect(() => {
    if (!last) return;
    const timer = setTimeout(() => hide(last.id), 12000);
    return () => clearTimeout(timer);
  }, [last?.id]);
  if (!last || last.id === hidden) return html`<div class="toast" role="status"></div>`;
  return html`<div class="toast on" role="status">${last.error ?? last.text}
    ${last.undo && !last.error && html`<button onClick=${() => undo(last)}>Undo</button>`}
    <button class="icon" aria-label="Hide" onClick=${() => hide(last.id)}>✕</button></div>`;
}

// -- marks -----------------------------------------------------------------------------------------

/** Tags that somebody wrote, between commas; those that are there stay whole, which may have some in them: labels of
 * feedback are tags. @param {string} text @param {string[]} known @returns {string[]} */
function tagsOf(text, known) {
  const whole = known.filter((tag) => tag.includes(",") && text.includes(tag));
  const rest = whole.reduce((left, tag) => left.replace(tag, ","), text);
  return [...whole, ...rest.split(",").map((tag) => tag.trim()).filter(Boolean)];
}

/** @param {{ about: Row, channel: string, trajectory_uid?: string, prompt_uid?: string, marks: Row, done: () => void }} props */
export function Marks({ about, channel, trajectory_uid, prompt_uid, marks, done: reload }) {
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const what = { channel, trajectory_uid, prompt_uid };
  const name = trajectory_uid ?? prompt_uid;
  const mark = async (/** @type {Row} */ update, /** @type {string} */ text) => {
    setError(null);
    try {
      const { before } = await post("mark", { ...what, marks: update });
      const old = Object.fromEntries(Object.keys(update).map((key) => [key, before?.[key] ?? null]));
      did(`${name}: ${text}`, async () => {
        await post("mark", { ...what, marks: old });
        reload();
      });
      reload();
    } catch (e) {
      setError(/** @type {Error} */ (e));
    }
  };
  const trainable = marks.trainable === true ? "yes" : marks.trainable === false ? "no" : "unset";
  if (about.read_only) return html`<${Empty}>This run is over: its data can be read, not marked.<//>`;
  return html`<div class="filters">
      <div class="field"><span>Trainable</span>
        <${Tabs} label="Trainable" value=${trainable} options=${[["unset", "nobody said"], ["yes", "yes"], ["no", "no"]]}
          onChange=${(v) => mark({ trainable: /** @type {Row} */ ({ yes: true, no: false, unset: null })[v] }, v === "no" ? "not trainable" : v === "yes" ? "trainable" : "unmarked")} /></div>
      <${Field} label="Quality" type="number" value=${marks.quality} onChange=${(v) => mark({ quality: v === "" ? null : Number(v) }, `quality ${v}`)} />
      <${Field} label="Tags, with commas" value=${(marks.tags ?? []).join(", ")} onChange=${(v) => mark({ tags: tagsOf(v, marks.tags ?? []) }, `tags ${v}`)} />
      <${Field} label="Note" value=${marks.note} onChange=${(v) => mark({ note: v }, "note")} />
    </div>
    <${Failure} error=${error} />`;
}

/** @param {{ about: Row, channel: string, uid: string, row: Row, done: () => void }} props */
export function Reward({ about, channel, uid, row, done: reload }) {
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const set = async (/** @type {string} */ text) => {
    if (text === "") return;
    setError(null);
    try {
      const { before, outcome } = await post("reward", { channel, trajectory_uid: uid, reward: Number(text) });
      if (outcome !== "accepted") throw new Error(`The group has gone on: the reward is ${outcome} and changes nothing.`);
      const back = async () => {
        await post("reward", { channel, trajectory_uid: uid, reward: before });
        reload();
      };
      did(`${uid}: reward ${text}`, before === null ? null : back);
      reload();
    } catch (e) {
      setError(/** @type {Error} */ (e));
    }
  };
  if (about.read_only) return null;
  return html`<div class="filters"><${Field} label="Outcome reward, corrected" type="number" value=${row.outcome} onChange=${set} />
    <small>total now ${number(row.reward)}; counts until the group is leased</small></div><${Failure} error=${error} />`;
}

/** @param {{ uid: string }} props */
export function Removal({ uid }) {
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const remove = async () => {
    if (!confirm(`Delete ${safe(uid)} with its group, from the pool, its journal and the archive? This cannot be undone.`)) return;
    setError(null);
    try {
      const { deleted, leased } = await post("delete", { trajectory_uid: uid });
      did(`${deleted.length} trajectories deleted${leased.length ? `, ${leased.length} of them leased` : ""}`, null);
      location.hash = link("trajectories");
    } catch (e) {
      setError(/** @type {Error} */ (e));
    }
  };
  return html`<button class="danger" onClick=${remove}>Delete this trajectory with its group…</button><${Failure} error=${error} />`;
}

// -- the page --------------------------------------------------------------------------------------

const ARGUMENT = /** @type {Record<string, string>} */ ({ all_correct: "1.0", all_wrong: "0.0" });

/** @param {{ about: Row, params: Row }} props */
export function Curation({ about, params }) {
  const channel = params.channel ?? "train";
  return html`
    <div class="head"><h1>Curation</h1>
      <${Select} label="Channel" value=${channel} options=${about.channels} onChange=${(v) => amend({ channel: v })} /></div>
    <${DryRun} about=${about} channel=${channel} order=${ordered(params, "")} />
    <div class="grid"><${Tagged} tag=${params.tag} channel=${channel} /><${Export} channel=${channel} /><${History} /></div>`;
}

/** @param {{ about: Row, channel: string, order: Row }} props */
function DryRun({ about, channel, order: sorted }) {
  const [own, setOwn] = useState("own");
  const [order, setOrder] = useState("fifo");
  const [filters, setFilters] = useState(/** @type {string[]} */ ([]));
  const [size, setSize] = useState("8");
  const [run, setRun] = useState(/** @type {Row | null} */ (null));
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const start = async () => {
    const selection = own === "own" ? undefined : { order, filters: filters.map((f) => (ARGUMENT[f] ? `${f}(${ARGUMENT[f]})` : f)) };
    setError(null);
    await post("dry_run", { channel, batch_size: Number(size) || 1, selection }).then((answer) => setRun({ ...answer, channel }), setError);
  };
  const toggle = (/** @type {string} */ name) => setFilters((now) => (now.includes(name) ? now.filter((f) => f !== name) : [...now, name]));
  return html`<${Card} title="Dry run: what the trainer would be given now" aside=${html`<small>nothing is leased or dropped</small>`}>
    <div class="filters">
      <div class="field"><span>Rules</span><${Tabs} label="Rules" value=${own} onChange=${setOwn} options=${[["own", "of the channel"], ["other", "others"]]} /></div>
      <${Field} label="Groups in the batch" type="number" value=${size} onChange=${setSize} />
      ${own === "other" && html`<${Select} label="Order" value=${order} options=${about.orders} onChange=${setOrder} />
        <fieldset><legend>Filters</legend>${about.filters.map((/** @type {string} */ name) => html`<label class="check"><input type="checkbox" checked=${filters.includes(name)} onChange=${() => toggle(name)} />${name}${ARGUMENT[name] ? `(${ARGUMENT[name]})` : ""}</label>`)}</fieldset>`}
      <button class="primary" onClick=${start}>Try</button>
    </div>
    <${Failure} error=${error} />
    ${run?.channel === channel && html`<${Bars} label="Groups by decision" bars=${Object.entries(run.counts).flatMap(([what, reasons]) => Object.entries(reasons).map(([why, n]) => ({ name: `${what}: ${why}`, value: n, colour: /** @type {Row} */ ({ serve: "good", wait: "accent", hold: "warn", drop: "bad" })[what] })))} />
      <${Table} label="Decisions" rows=${inOrder(run.decisions, sorted)} order=${sorted} empty="No group is ready." columns=${[
        ["Prompt", (d) => html`<${Uid} page="group" uid=${d.prompt_uid} channel=${channel} />`, "", "prompt_uid"],
        ["Decision", (d) => html`<${Chip} of=${d.decision} />`, "", "decision"],
        ["Reason", (d) => d.reason, "", "reason"],
        ["Place", (d) => d.rank, "num", "rank"],
        ["Reward", (d) => number(d.reward_mean), "num", "reward_mean"],
        ["±", (d) => number(d.reward_std), "num", "reward_std"],
        ["Trajectories", (d) => d.n_trajectories, "num", "n_trajectories"],
        ["Withheld", (d) => d.n_withheld || "", "num", "n_withheld"],
      ]} />`}
  <//>`;
}

/** @param {{ tag: string | undefined, channel: string }} props */
function Tagged({ tag, channel }) {
  return html`<${Card} title="Find by tag">
    <div class="filters"><${Field} label="Tag" value=${tag} onChange=${(/** @type {string} */ v) => amend({ tag: v })} /></div>
    ${tag && html`<${WithTag} channel=${channel} tag=${tag} />`}
  <//>`;
}

/** @param {{ channel: string, tag: string }} props */
function WithTag({ channel, tag }) {
  const pages = usePages("trajectories", { channel, tag });
  return html`<${Failure} error=${pages.error} />
    <${Table} label="Trajectories with this tag" rows=${pages.items} more=${pages.more} busy=${pages.busy} failed=${pages.error} empty="Nothing has this tag." columns=${[
      ["Trajectory", (t) => html`<${Uid} page="trajectory" uid=${t.trajectory_uid} channel=${channel} />`],
      ["Reward", (t) => number(t.reward), "num"],
      ["Note", (t) => t.marks.note],
    ]} />`;
}

/** @param {{ channel: string }} props */
function Export({ channel }) {
  const [format, setFormat] = useState("jsonl");
  const [state, setState] = useState("complete");
  const [least, setLeast] = useState("");
  const [tag, setTag] = useState("");
  const href = `/ui/api/export?${query({ channel, format, state, min_reward: least, tag })}`;
  return html`<${Card} title="Export">
    <div class="filters">
      <${Select} label="Format" value=${format} options=${["jsonl", "parquet"]} onChange=${setFormat} />
      <${Select} label="State" value=${state} options=${[["", "any"], "open", "complete"]} onChange=${setState} />
      <${Field} label="Reward from" type="number" value=${least} onChange=${setLeast} />
      <${Field} label="Tag" value=${tag} onChange=${setTag} />
      <a class="button" href=${href} download>Download</a>
    </div>
    <p class="fine">As <code>datasets.load_dataset</code> reads it: one row per branch, with token ids, log-probs and messages.</p>
  <//>`;
}

function History() {
  const all = useDone();
  return html`<${Card} title="Done here">
    ${all.length === 0 && html`<${Empty}>What you mark stands here, with its undoing.<//>`}
    <ul class="plain">${all.map((each) => html`<li>${each.text} ${each.error && html`<small>${each.error}</small>`}
      ${each.undo && html`<button onClick=${() => undo(each)}>Undo</button>`}</li>`)}</ul>
  <//>`;
}

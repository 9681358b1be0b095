// What left the pool: a list that is searched, filtered and sorted; prompts over all their tries; where a uid leads.
import { useEffect, useState } from "./vendor/preact.js";
import { html } from "./shown.js";
import { amend, get, link, usePages } from "./api.js";
import { Card, Chip, Empty, Failure, Field, Loading, SAID, Said, Select, Table, Tabs, Uid, inOrder, number, ordered, useKeys, when } from "./parts.js";

const NONE = /** @type {Row[]} */ ([]);
/** Uids that are listed of those that begin alike. */
const LISTED = 20;
const submitted = (/** @type {Event} */ event) => event.preventDefault();

const COLUMNS = /** @type {Column[]} */ ([
  ["First message, last reply", (t) => html`<${Said} row=${t} href=${link("trajectory", { uid: t.uid })} />`, "", SAID],
  ["Reward", (t) => number(t.reward), "num", "reward"],
  ["Turns", (t) => number(t.turns), "num", "turns"],
  ["Tokens", (t) => number(t.tokens), "num", "tokens"],
  ["Version", (t) => t.version ?? "–", "num", "version"],
  ["Left", (t) => html`<span title=${t.fate}><${Chip} of=${t.state === "complete" ? t.left : t.state} /> <small>${t.drop_reason ?? t.reason}</small></span>`, "", "state"],
  ["When", (t) => html`<small>${when(t.time)}</small>`, "", "time"],
  ["Trajectory", (t) => html`<${Uid} page="trajectory" uid=${t.uid} />`, "", "uid"],
]);

/** @param {{ about: Row, params: Row }} props */
export function Archive({ about, params }) {
  const view = params.view ?? "trajectories";
  return html`
    <div class="head"><h1>Archive</h1>
      <${Tabs} label="What" value=${view} onChange=${(v) => amend({ view: v, order: "", ascending: "" })}
        options=${[["trajectories", "Trajectories"], ["prompts", "Prompts"]]} />
    </div>
    ${!about.has_archive
      ? html`<${Empty}>This run has no archive (pool.archive.enabled is false).<//>`
      : view === "prompts" ? html`<${Prompts} params=${params} />` : html`<${Listed} params=${params} />`}`;
}

/** @param {{ params: Row }} props */
function Listed({ params }) {
  const { query, search, order, ascending } = params;
  const pages = usePages("archive", { query, search, order, ascending });
  useKeys(pages.items);
  return html`
    <form class="filters" aria-label="Filters" onSubmit=${submitted}>
      <${Field} label="Search what was said" type="search" wide=${true} value=${search} onChange=${(v) => amend({ search: v, order: "" })} />
      <${Field} label="Query" wide=${true} value=${query} placeholder="reward < 0.2 and version >= 10" onChange=${(v) => amend({ query: v })} />
      ${search && html`<${Select} label="Order" value=${order === "relevance" ? order : ""} options=${[["", "of the columns"], ["relevance", "by relevance"]]}
        onChange=${(v) => amend({ order: v, ascending: "" })} />`}
      <button type="button" onClick=${pages.reload}>Refresh</button>
    </form>
    <${Failure} error=${pages.error} />
    <${Card}><${Table} label="Trajectories that left the pool; n and p choose the next and the previous" rows=${pages.items} more=${pages.more} busy=${pages.busy} failed=${pages.error}
      empty="Nothing that left the pool passes." columns=${COLUMNS} order=${ordered(params)} /><//>`;
}

/** @param {{ params: Row }} props */
function Prompts({ params }) {
  const which = params.which ?? "never";
  const { order, ascending } = params;
  const pages = usePages("prompts", { which: which === "all" ? "" : which, order, ascending });
  useKeys(pages.items);
  return html`
    <form class="filters" aria-label="Filters" onSubmit=${submitted}>
      <${Select} label="Prompts" value=${which} options=${[["never", "that never got a reward"], ["always", "that always got one"], ["all", "all"]]}
        onChange=${(v) => amend({ which: v })} />
      <button type="button" onClick=${pages.reload}>Refresh</button>
    </form>
    <${Failure} error=${pages.error} />
    <${Card}><${Table} label="Prompts; n and p choose the next and the previous" rows=${pages.items} more=${pages.more} busy=${pages.busy} failed=${pages.error}
      empty="There is no such prompt." order=${ordered(params)} columns=${[
      ["Prompt", (p) => html`<a class="talk" href=${link("archive", { query: `prompt_key == '${p.prompt}'` })}><span>${p.first ?? p.instance}</span></a>`, "", "first"],
      ["Rewarded", (p) => html`<${Chip} of=${p.kind} />`, "", "rewarded"],
      ["Tries", (p) => number(p.tries), "num", "tries"],
      ["Mean", (p) => number(p.mean), "num", "mean"],
      ["Best", (p) => number(p.best), "num", "best"],
      ["Solved at", (p) => (p.solved_version === null ? "–" : `version ${p.solved_version}`), "num", "solved"],
      ["Data", (p) => p.data_source, "", "source"],
      ["Last try", (p) => html`<small>${when(p.newest)}</small>`, "", "time"],
    ]} /><//>`;
}

// -- a uid -----------------------------------------------------------------------------------------

/** A field that goes where a uid leads. */
export function Finder() {
  const [uid, set] = useState("");
  const go = (/** @type {Event} */ event) => {
    event.preventDefault();
    if (uid.trim()) location.hash = link("find", { uid: uid.trim() });
  };
  return html`<form class="finder" role="search" onSubmit=${go}>
    <input type="search" aria-label="Find a uid, or its beginning" placeholder="Find a uid" value=${uid} onInput=${(/** @type {any} */ e) => set(e.target.value)} />
  </form>`;
}

/** @param {{ params: Row }} props */
export function Find({ params }) {
  const uid = params.uid ?? "";
  const order = ordered(params, "");
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const [found, show] = useState(/** @type {Row | null} */ (null));
  useEffect(() => {
    let current = true; // who has gone to another page stays there
    setError(null);
    get("find", { uid }).then(
      (answer) => current && (answer.page ? location.replace(link(answer.page, answer.params)) : show(answer)),
      (e) => current && setError(e),
    );
    return () => {
      current = false;
    };
  }, [uid]);
  useKeys(found?.items ?? NONE);
  if (error) return html`<${Failure} error=${error} />`;
  if (!found) return html`<${Loading} />`;
  if (found.deleted && !found.items.length) return html`<p class="notice warn">${found.deleted.uid} was deleted at ${when(found.deleted.at)}; nothing of it is kept.</p>`;
  return html`<div class="head"><h1><small>Begins with</small> <span class="uid">${uid}</span></h1></div>
    <${Card}><${Table} label="Trajectories whose uid begins so" rows=${inOrder(found.items, order)} columns=${COLUMNS} order=${order} empty="Nothing begins so." /><//>
    ${found.items.length >= LISTED && html`<p class="fine">Perhaps more begin so: give more of the uid.</p>`}`;
}

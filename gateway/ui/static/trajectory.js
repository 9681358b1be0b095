// One trajectory: its turn tree, messages as the agent saw them, tokens as the model saw them, timing.
import { useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { html } from "./shown.js";
import { amend, get, link, useApi, useTicks } from "./api.js";
import { Card, Chip, Empty, Failure, Found, Loading, MarksShown, Neighbours, Select, Stat, Tabs, Uid, number, seconds } from "./parts.js";
import { Marks, Removal, Reward } from "./curation.js";

/** Seconds after which one that goes on is read again, with the tick that comes then. */
const EVERY_S = 1.5;

/** @param {{ about: Row, params: Row }} props */
export function Trajectory({ about, params }) {
  const { uid, channel, step } = params;
  const asked = { trajectory_uid: uid, channel, step };
  const { data, error, reload } = useApi("trajectory", asked);
  const [last, keep] = useState(/** @type {Shown | null} */ (null));
  const ticks = useTicks();
  const shown = /** @type {Shown | null} */ (data ?? (last?.trajectory_uid === uid ? last : null));
  useEffect(() => data && keep(data), [data]);
  const running = !about.read_only && shown?.row?.state === "open" && shown.step === null;
  const at = ticks[ticks.length - 1]?.at ?? 0;
  const readAt = useRef(0);
  useEffect(() => {
    if (!running || at < readAt.current + EVERY_S) return;
    readAt.current = at;
    reload();
  }, [at]);
  if (!shown) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
  const view = params.view ?? "conversation";
  const index = params.at === undefined ? shown.steps[shown.steps.length - 1]?.index : Number(params.at);
  const path = shown.branches.find((branch) => branch.includes(index)) ?? [];
  const views = { conversation: Conversation, tokens: TokenView, timing: Timing, details: Details };
  const View = views[/** @type {keyof views} */ (view)] ?? Conversation;
  const archived = shown.archived;
  const state = shown.row ?? (shown.step === null && archived ? { state: archived.state, reason: archived.reason } : { state: "trained" });
  return html`
    <div class="head"><h1><small>Trajectory</small> <span class="uid">${uid}</span></h1>
      <${Neighbours} />
      <${Tabs} label="View" value=${view} onChange=${(v) => amend({ view: v })}
        options=${[["conversation", "Conversation"], ["tokens", "Tokens"], ["timing", "Timing"], ["details", "Details"]]} />
    </div>
    <${Failure} error=${error} />
    <div class="chips">
      <${Chip} of=${state.state} title=${state.reason} />
      ${shown.step !== null && html`<a href=${link("batch", { step: shown.step })}>at optimizer step ${shown.step}</a>`}
      ${shown.running > 0 && html`<${Chip} of=${`${shown.running} call${shown.running > 1 ? "s" : ""} running`} kind="info" />`}
      ${archived?.left && html`<${Chip} of=${archived.left} />`}
      ${archived ? html`<b>${archived.fate}</b>` : state.reason && html`<small>${state.reason}</small>`}
      <${MarksShown} marks=${shown.row?.marks} />
      <span>of <${Uid} page="group" uid=${shown.prompt_uid} channel=${shown.channel} step=${shown.step} /></span>
    </div>
    <dl class="stats">
      <${Stat} label="Reward" value=${number(shown.reward ?? shown.row?.reward)} />
      <${Stat} label="Turns" value=${shown.steps.length} hint=${shown.branches.length > 1 ? ` in ${shown.branches.length} branches` : ""} />
      <${Stat} label="Sampled tokens" value=${number(shown.steps.reduce((n, s) => n + s.n_response, 0))} />
      <${Stat} label="Channel" value=${shown.channel} />
      <${Stat} label="Attempt" value=${shown.attempt} />
    </dl>
    ${(archived?.feedback ?? []).map((/** @type {Row} */ late) => html`<p class="notice warn">Reward ${number(late.reward)} came too late: ${late.why}.</p>`)}
    ${shown.steps.length === 0
      ? html`<${Empty}>${state.state === "aborted" ? "No step of this trajectory is kept: none was stored, or the pool has no journal." : "No turn is stored yet."}<//>`
      : html`<div class="split">
          <nav class="card turns" aria-label="Turns" tabindex="0"><${Tree} shown=${shown} index=${index} path=${path} /></nav>
          <div><${View} shown=${shown} index=${index} path=${path} asked=${asked} colour=${params.colour} /></div>
        </div>`}
    ${shown.row && html`<${Card} title="Curation">
      <${Marks} about=${about} channel=${shown.channel} trajectory_uid=${uid} marks=${shown.row.marks} done=${reload} />
      <${Reward} about=${about} channel=${shown.channel} uid=${uid} row=${shown.row} done=${reload} />
      ${!about.read_only && html`<${Removal} uid=${uid} />`}
    <//>`}
    ${!shown.row && archived && !about.read_only && html`<${Card} title="Deletion"><${Removal} uid=${uid} /><//>`}`;
}

// -- the tree --------------------------------------------------------------------------------------

/** A list, or an empty one for what is none: agents submit messages of any shape. @param {any} value @returns {any[]} */
const list = (value) => (Array.isArray(value) ? value : []);

/** The turn's first words. @param {Spans} step */
function words(step) {
  const said = step.messages?.[step.messages.length - 1];
  const calls = list(said?.tool_calls).map((call) => call?.function?.name).filter(Boolean);
  if (calls.length) return `calls ${calls.join(", ")}`;
  return typeof said?.content === "string" ? said.content.slice(0, 80).replace(/[\ud800-\udbff]$/, "") : "";
}

/** @param {{ shown: Shown, index: number, path: number[] }} props */
function Tree({ shown, index, path }) {
  /** @type {Map<number, number>} */
  const lane = new Map();
  const byAge = [...shown.branches].sort((a, b) => a[0] - b[0] || a[a.length - 1] - b[b.length - 1]);
  byAge.forEach((branch, i) => branch.forEach((step) => lane.has(step) || lane.set(step, i)));
  return html`<h2>Turns</h2><ol>
    ${shown.steps.map((step) => html`<li class=${`lane${Math.min(6, lane.get(step.index) ?? 0)}`}>
      <button class=${path.includes(step.index) ? "turn on" : "turn"} aria-current=${step.index === index ? "step" : undefined}
        onClick=${() => amend({ at: step.index })}>
        <b>${step.index}</b>
        <span class="words">${words(step) || "…"}</span>
        <small>${step.parent === null ? (step.index ? "new root" : "root") : `after ${step.parent}`} · ${number(step.n_response)} tokens · v${[...new Set(step.versions.map(([v]) => v))].join(",")}</small>
        ${step.branch && html`<${Chip} of=${`branch: ${step.branch}`} kind="warn" />`}
        ${step.finish_reason === "length" && html`<${Chip} of="cut off" kind="warn" />`}
        ${step.reward !== null && html`<small>reward ${number(step.reward)}</small>`}
      </button></li>`)}
  </ol>`;
}

// -- messages --------------------------------------------------------------------------------------

/** A picture; a text that says there was one is shown as a text. @param {any} part */
const isPicture = (part) => part?.type === "image" && typeof part.digest === "string" && part.text === undefined;

/** What a message says, as text. @param {any} content @returns {string} */
function plain(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.filter((part) => !isPicture(part)).map((part) => part?.text ?? plain(part)).join("\n");
  return JSON.stringify(content, null, 2);
}

/** The pictures of a message, or of a turn's prompt. @param {{ parts: any, of: Params }} props */
const Pictures = ({ parts, of }) => list(parts).filter(isPicture).map((part) => html`
  <img class="picture" loading="lazy" width=${part.width} height=${part.height} alt=${`Picture of ${part.width} × ${part.height} pixels, ${part.n_tokens} tokens`}
    src=${`/ui/api/picture?${new URLSearchParams({ channel: String(of.channel), trajectory_uid: String(of.uid), digest: part.digest })}`} />`);

/** @param {{ message: Row, sought: string, of: Params }} props */
const Message = ({ message, sought, of }) => html`
  <article class=${`message ${["user", "assistant", "tool", "system"].includes(message.role) ? message.role : "other"}`}>
    <h3>${message.role}${message.name ? ` · ${message.name}` : ""}</h3>
    ${message.reasoning_content && html`<details open=${sought !== ""}><summary>reasoning</summary><div class="text"><${Found} text=${plain(message.reasoning_content)} sought=${sought} /></div></details>`}
    ${plain(message.content) && html`<div class="text"><${Found} text=${plain(message.content)} sought=${sought} /></div>`}
    <${Pictures} parts=${message.content} of=${of} />
    ${list(message.tool_calls).map((call) => html`<div class="call">
      <b>${call?.function?.name ?? call?.name ?? "call"}</b><pre class="text"><${Found} text=${plain(call?.function?.arguments ?? call?.arguments)} sought=${sought} /></pre></div>`)}
  </article>`;

/** The prompt of a turn that begins anew, as text: its tools stand nowhere else. @param {{ step: Spans, asked: Params }} props */
function Tools({ step, asked }) {
  const [text, show] = useState("");
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const load = async (/** @type {any} */ event) => {
    if (!event.target.open || text) return;
    let read = "";
    try {
      for (let start = 0; start < step.n_prompt; ) {
        const tokens = await get("tokens", { ...asked, index: step.index, start });
        read += tokens.texts.slice(0, step.n_prompt - start).join("");
        start += tokens.texts.length;
        show(read);
      }
    } catch (e) {
      setError(/** @type {Error} */ (e));
    }
  };
  return html`<details onToggle=${load}><summary>Tools of this call, in its prompt as the model read it</summary>
    ${error ? html`<${Failure} error=${error} />` : text ? html`<pre class="text" tabindex="0">${text}</pre>` : html`<${Loading} />`}</details>`;
}

/** @param {{ shown: Shown, path: number[], asked: Params }} props */
function Conversation({ shown, path, asked }) {
  const [sought, seek] = useState("");
  const of = { uid: shown.trajectory_uid, channel: shown.channel };
  const [later, setLater] = useState(/** @type {Record<number, Row[]>} */ ({}));
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const steps = shown.steps.filter((step) => path.includes(step.index));
  const corrections = shown.row?.marks.corrections ?? {};
  const last = shown.steps[shown.steps.length - 1].index;
  const correction = (/** @type {Spans} */ step) => corrections[step.index] ?? (step.index === last ? corrections.last : null);
  const missing = steps.find((step) => !step.messages && !later[step.index]);
  const load = async () => {
    setError(null);
    try {
      for (const step of steps.filter((s) => !s.messages && !later[s.index]).slice(0, 20)) {
        const { messages } = await get("tokens", { ...asked, index: step.index });
        setLater((before) => ({ ...before, [step.index]: messages }));
      }
    } catch (e) {
      setError(/** @type {Error} */ (e));
    }
  };
  return html`<${Card} title="As the agent saw it" aside=${html`<input type="search" placeholder="Search in this branch" aria-label="Search in this branch" value=${sought}
      onInput=${(/** @type {any} */ e) => seek(e.target.value)} />`}>
    ${steps.map((step) => html`<section key=${step.index} class="said" aria-label=${`Turn ${step.index}`}>
      <p class="rule"><span>turn ${step.index}</span></p>
      ${step.parent === null && step.tool_calls !== null && html`<${Tools} step=${step} asked=${asked} />`}
      ${(step.messages ?? later[step.index] ?? []).map((message) => html`<${Message} message=${message ?? {}} sought=${sought} of=${of} />`)}
      ${correction(step) && html`<${Message} message=${{ role: "correction by a person", content: correction(step) }} sought=${sought} of=${of} />`}
    </section>`)}
    <${Failure} error=${error} />
    ${missing && html`<button class="more" onClick=${load}>Load more turns</button>`}
  <//>`;
}

// -- tokens ----------------------------------------------------------------------------------------

/** @type {Record<string, { text: string, of: (t: Tokens, i: number) => number | null | undefined, range?: [number, number], categories?: boolean }>} */
const COLOURS = {
  none: { text: "nothing", of: () => null, categories: true },
  mask: { text: "trained or not", of: (t, i) => t.columns.mask?.[i] ?? (t.start + i < t.n_prompt ? 0 : 1), range: [0, 1] },
  log_probs: { text: "log-prob of the rollout", of: (t, i) => t.columns.log_probs?.[i], range: [-4, 0] },
  version: { text: "policy version", of: (t, i) => t.versions[i], categories: true },
  difference: { text: "trainer minus rollout, log-prob", of: (t, i) => {
    const [a, b] = [t.columns.prox_log_probs?.[i], t.columns.log_probs?.[i]];
    return a === null || a === undefined || b === null || b === undefined ? null : a - b;
  }, range: [-0.5, 0.5] },
  weights: { text: "importance weight", of: (t, i) => t.columns.weights?.[i], range: [0, 1] },
  advantages: { text: "advantage", of: (t, i) => t.columns.advantages?.[i], range: [-2, 2] },
};

/** A shade of a number: cold below the middle of the range, warm above. @param {number} value @param {[number, number]} range */
function shade(value, [low, high]) {
  const at = Math.max(-1, Math.min(1, ((value - low) / (high - low)) * 2 - 1));
  const strength = Math.round(Math.abs(at) * 42);
  return `color-mix(in srgb, var(${at < 0 ? "--cold" : "--warm"}) ${strength}%, transparent)`;
}

const visible = (/** @type {string} */ text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");

/** @param {{ shown: Shown, index: number, asked: Params, colour: string | undefined }} props */
function TokenView({ shown, index, asked, colour: chosenColour }) {
  const by = chosenColour && chosenColour in COLOURS ? chosenColour : "none";
  const [start, begin] = useState(/** @type {number | null} */ (null));
  const [chosen, choose] = useState(/** @type {number | null} */ (null));
  useEffect(() => (begin(null), choose(null)), [index]);
  const { data, error } = useApi("tokens", { ...asked, index, start });
  const tokens = /** @type {Tokens | null} */ (data);
  const colour = COLOURS[by];
  const drawn = useMemo(() => {
    if (!tokens) return [];
    const seen = [...new Set(tokens.versions.filter((v) => v !== null))];
    /** Of a picture's placeholders the first one says what it is. @type {Map<number, string>} */
    const placeholders = new Map();
    for (const { width, height, at, n_tokens } of tokens.pictures) {
      for (let i = 0; i < n_tokens; i++) placeholders.set(at + i - tokens.start, i ? "▫" : `▣ ${width} × ${height} `);
    }
    return tokens.texts.map((text, i) => {
      const value = colour.of(tokens, i);
      const own = tokens.start + i >= tokens.n_prompt;
      const background = value === null || value === undefined ? undefined
        : colour.categories ? `color-mix(in srgb, var(--series${seen.indexOf(value) % 4}) 35%, transparent)`
        : shade(value, colour.range ?? [0, 1]);
      return html`<span class=${own ? "token own" : "token"} data-i=${i} style=${{ background }}
        title=${`${tokens.ids[i]}${value === null || value === undefined ? "" : ` · ${colour.text} ${number(value, 4)}`}`}>${placeholders.get(i) ?? visible(text)}</span>`;
    });
  }, [tokens, by]);
  const target = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    target.current?.querySelector(".chosen")?.classList.remove("chosen");
    const at = target.current?.children[chosen ?? -1];
    at?.classList.add("chosen");
    at?.scrollIntoView({ block: "nearest" });
  }, [chosen, drawn]);
  if (error) return html`<${Failure} error=${error} />`;
  if (!tokens) return html`<${Loading} />`;
  const end = tokens.start + tokens.ids.length;
  const i = chosen ?? -1;
  const pick = (/** @type {any} */ event) => {
    const at = event.target.dataset?.i;
    if (at !== undefined) choose(Number(at));
  };
  const move = (/** @type {KeyboardEvent} */ event) => {
    const by = /** @type {Row} */ ({ ArrowRight: 1, ArrowLeft: -1 })[event.key];
    if (!by) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(tokens.ids.length - 1, i + by)));
  };
  const turn = (/** @type {number} */ to) => (begin(to), choose(null)); // the one that was chosen is not there
  const lacking = !tokens.columns.advantages && ["difference", "weights", "advantages"].includes(by);
  return html`<${Card} title=${`Turn ${index} as the model saw it`} aside=${html`<${Select} label="Colour" value=${by} onChange=${(/** @type {string} */ v) => amend({ colour: v })}
      options=${Object.entries(COLOURS).map(([name, { text }]) => /** @type {[string, string]} */ ([name, text]))} />`}>
    ${lacking && html`<p class="notice warn">The trainer has not written this trajectory: what it computes per token is kept for a sample of each optimizer step, under <a href=${link("batches")}>Batches</a>.</p>`}
    <p class="legend"><span class="token">prompt</span> <span class="token own">sampled</span>
      ${!colour.categories && html`<span class="ramp" aria-hidden="true"></span> <small>${number((colour.range ?? [0, 1])[0])} to ${number((colour.range ?? [0, 1])[1])}</small>`}
      <small>tokens ${number(tokens.start)}–${number(end)} of ${number(tokens.total)}${tokens.n_known ? `; the first ${number(tokens.n_known)} are of the turn before` : ""}</small>
    </p>
    <div class="pager">
      ${tokens.start > 0 && html`<button onClick=${() => turn(Math.max(0, tokens.start - 8192))}>Earlier tokens</button>`}
      ${end < tokens.total && html`<button onClick=${() => turn(end)}>Later tokens</button>`}
    </div>
    <div class="tokens text" ref=${target} tabindex="0" role="application" aria-label="Tokens; arrow keys move, the figures of the chosen one are below" onClick=${pick} onKeyDown=${move}>${drawn}</div>
    <div class="chosen-token" aria-live="polite">
      ${i < 0
        ? html`<small>Choose a token with the mouse or the arrow keys.</small>`
        : html`<dl class="stats"><${Stat} label="Token" value=${html`<code>${visible(tokens.texts[i])}</code>`} hint=${` id ${tokens.ids[i]}, at ${tokens.start + i}`} />
            <${Stat} label="Version" value=${tokens.versions[i] ?? "prompt"} />
            ${Object.entries(tokens.columns).map(([name, values]) => html`<${Stat} label=${name.replaceAll("_", " ")} value=${number(values[i], 5)} />`)}</dl>`}
    </div>
  <//>`;
}

// -- timing ----------------------------------------------------------------------------------------

/** @param {{ shown: Shown }} props */
function Timing({ shown }) {
  const timed = shown.steps.filter((step) => step.timing);
  if (timed.length === 0) return html`<${Card} title="Timing"><${Empty}>These steps carry no times: they were not made by a gateway.<//><//>`;
  const time = (/** @type {Spans} */ s) => /** @type {NonNullable<Spans["timing"]>} */ (s.timing);
  const first = Math.min(...timed.map((s) => time(s).began));
  const last = Math.max(...timed.map((s) => time(s).began + time(s).waited_s + time(s).engine_s));
  const all = Math.max(last - first, 1e-6);
  const engine = timed.reduce((sum, s) => sum + time(s).engine_s, 0);
  const at = (/** @type {number} */ t) => `${(100 * t) / all}%`;
  return html`<${Card} title="Timing" aside=${html`<small>${seconds(all)} in all, ${seconds(engine)} in the engine; what is blank is the agent and its tools</small>`}>
    <ol class="waterfall">
      ${timed.map((step) => {
        const { began, waited_s, engine_s } = time(step);
        const text = `turn ${step.index}: begins at ${seconds(began - first)}, waits ${seconds(waited_s)}, engine ${seconds(engine_s)}`;
        return html`<li title=${text}><span>${step.index}</span>
          <div class="lane" role="img" aria-label=${text}>
            <i class="wait" style=${{ left: at(began - first), width: at(waited_s) }}></i>
            <i class="engine" style=${{ left: at(began - first + waited_s), width: at(engine_s) }}></i>
          </div><small>${seconds(engine_s)} · ${number(step.n_response / Math.max(engine_s, 1e-6), 3)} tokens/s</small></li>`;
      })}
    </ol>
    <p class="legend"><i class="key wait"></i> render and queue <i class="key engine"></i> engine</p>
  <//>`;
}

// -- details ---------------------------------------------------------------------------------------

/** @param {{ shown: Shown, index: number }} props */
function Details({ shown, index }) {
  const step = shown.steps.find((each) => each.index === index);
  if (!step) return null;
  const { messages, ...rest } = step;
  return html`<${Card} title=${`Turn ${index}`}><pre class="json" tabindex="0">${JSON.stringify(rest, null, 2)}</pre><//>
    <${Card} title="Metadata of the trajectory"><pre class="json" tabindex="0">${JSON.stringify(shown.metadata, null, 2)}</pre><//>`;
}

// The whole run on one page: what flows where, who waits for whom, what is wrong.
import { useMemo } from "./vendor/preact.js";
import { html } from "./shown.js";
import { link, rate, useApi, useTicks } from "./api.js";
import { Bars, Card, Chart, Chip, Empty, Failure, Spark, Stat, bytes, number, percent, seconds, when } from "./parts.js";

const CURVES = [
  "reward/mean", "val/score", "val/score_low", "val/score_high", "val/step", "val/version", "val/rollouts",
  "val/pooled/score", "val/pooled/low", "val/pooled/high", "val/pooled/rollouts", "val/pooled/oldest_version", "staleness/mean", "staleness/max", "tokens_per_s", "time/step_s",
  "wait/trainer_starved", "wait/generation_saturated", "off_policy/kl_k1", "off_policy/ess", "log_prob_gap",
  "grad_norm", "policy/entropy", "loss",
];

/** Over the channels that are trained on. @param {Row | null} pool @param {(channel: Row) => number} count */
const total = (pool, count) =>
  Object.entries(pool ?? {}).reduce((sum, [name, channel]) => (name === "val" ? sum : sum + count(channel)), 0);

/** Evaluations in order; of live traffic each is of the last versions together, and has no score of too few.
 * @param {Record<string, any[]>} series @returns {Row[]} */
function evaluations(series) {
  const at = (/** @type {string} */ key, /** @type {number} */ i) => series[`val/${key}`]?.[i] ?? null;
  return (series["val/step"] ?? []).flatMap((step, i) => {
    if (step === null) return [];
    const pooled = at("pooled/rollouts", i) !== null;
    const of = (/** @type {string} */ key, /** @type {string} */ own) => at(pooled ? `pooled/${key}` : own, i);
    const version = at("version", i);
    return [{ step, version, oldest: pooled ? at("pooled/oldest_version", i) ?? version : version, n: of("rollouts", "rollouts"),
      score: of("score", "score"), low: of("low", "score_low"), high: of("high", "score_high") }];
  });
}

/** @param {{ of: Row | undefined }} props */
const Evaluated = ({ of }) => of ? html`<p class="fine">Evaluation at step ${of.step}: ${of.score === null
  ? `${of.n} rollouts, too few to say`
  : `${number(of.score)}${of.low === null ? "" : ` (95 %: ${number(of.low, 2)} to ${number(of.high, 2)})`}${of.n === null ? "" : `, ${of.n} rollouts`}`}${
  of.version === null ? "" : ` of ${of.oldest === of.version ? `version ${of.version}` : `versions ${of.oldest} to ${of.version}`}`}.</p>` : null;

/** Scores at the steps whose weights they are of, beside the rewards. @param {Record<string, any[]>} series */
function scored(series) {
  const [steps, rewards] = [series.step ?? [], series["reward/mean"] ?? []];
  const reward = new Map(steps.map((step, i) => [step, rewards[i]]));
  const score = new Map();
  evaluations(series).forEach((each) => each.score !== null && score.set(each.step, each.score));
  const x = [...new Set([...steps, ...score.keys()])].sort((a, b) => a - b);
  return { x, rewards: x.map((step) => reward.get(step) ?? null), scores: x.map((step) => score.get(step) ?? null) };
}

/** @param {{ alerts: Tick["alerts"], about: Row }} props */
const Alerts = ({ alerts, about }) =>
  alerts.length === 0
    ? html`<p class="notice good" role="status">${about.read_only ? "This run is over; its last step was well." : "Nothing is wrong with engines, pool and trainer."}</p>`
    : html`<ul class="alerts" aria-label="Alerts">
        ${alerts.map((alert) => html`<li class=${`notice ${alert.severity === "error" ? "bad" : "warn"}`}>
          <b>${alert.title}</b> <span>${alert.why}</span>${" "}
          <small>seen since ${when(alert.since)}${alert.page !== "overview" && html` · <a href=${link(alert.page, alert.params)}>evidence</a>`}</small></li>`)}
      </ul>`;

/** @param {{ title: string, href?: string, main: any, unit: string, children?: any, spark?: (number | null)[] }} props */
const Node = ({ title, href, main, unit, children, spark }) => html`
  <section class="node">
    <h2>${href ? html`<a href=${href}>${title}</a>` : title}</h2>
    <p class="main">${main} <small>${unit}</small></p>
    ${spark && html`<${Spark} values=${spark} label=${`${title}: the last minutes`} />`}
    <dl>${children}</dl>
  </section>
`;

/** @param {{ text: string, label: string }} props */
const Arrow = ({ text, label }) => html`<div class="arrow" title=${label}><span>${text}</span></div>`;

/** @param {{ ticks: Tick[] }} props */
function Flow({ ticks }) {
  const tick = ticks[ticks.length - 1];
  const { gateway, pool, metrics } = tick;
  const per = (/** @type {(tick: Tick) => number | undefined} */ count, unit = "/s") => {
    const now = rate(count, ticks);
    return now === null ? "…" : `${number(now, 2)} ${unit}`;
  };
  const engines = gateway.engine?.engines ?? [];
  const up = engines.filter((/** @type {Row} */ e) => e.state === "up").length;
  const groups = (/** @type {string} */ state) => total(pool, (c) => c.groups[state]);
  const served = (/** @type {Tick} */ t) => total(t.pool, (c) => c.groups.acked + c.groups.leased);
  return html`<div class="flow" role="region" tabindex="0" aria-label="From agent to engine">
    <${Node} title="Agents" href=${link("trajectories", { state: "open" })} main=${gateway.open_trajectories} unit="running"
      spark=${ticks.map((t) => t.gateway.open_trajectories)}>
      <${Stat} label="completed" value=${per((t) => total(t.pool, (c) => c.trajectories.complete + c.trajectories.acked))} />
      <${Stat} label="aborted" value=${number(total(pool, (c) => c.trajectories.aborted))} />
    <//>
    <${Arrow} text=${per((t) => t.gateway.calls?.stored ?? 0)} label="calls stored" />
    <${Node} title="Gateway" main=${gateway.limits.running} unit="calls" spark=${ticks.map((t) => t.gateway.limits.running)}>
      ${gateway.replicas?.length > 1 && html`<${Stat} label="replica" value=${`${gateway.replica + 1} of ${gateway.replicas.length}`} />`}
      <${Stat} label="waiting" value=${gateway.limits.waiting} />
      <${Stat} label="added, p50" value=${seconds(gateway.added_latency.p50_ms === null ? null : gateway.added_latency.p50_ms / 1000)} />
    <//>
    <${Arrow} text=${per((t) => total(t.pool, (c) => c.steps.accepted))} label="steps accepted" />
    <${Node} title="Pool" href=${link("pool")} main=${groups("ready")} unit="groups ready" spark=${ticks.map((t) => total(t.pool, (c) => c.groups.ready))}>
      <${Stat} label="open · leased" value=${`${groups("open")} · ${groups("leased")}`} />
      <${Stat} label="in memory" value=${bytes(total(pool, (c) => c.memory_bytes))} />
    <//>
    <${Arrow} text=${per(served)} label="groups leased or acked" />
    <${Node} title="Trainer" href=${link("batches")} main=${metrics ? metrics.step : "–"} unit="optimizer steps"
      spark=${ticks.map((t) => t.metrics?.tokens_per_s ?? 0)}>
      <${Stat} label="step time" value=${seconds(metrics?.["time/step_s"])} />
      <${Stat} label="tokens" value=${metrics ? `${number(metrics.tokens_per_s)} /s` : "–"} />
    <//>
    <${Arrow} text=${`version ${Math.max(gateway.engine?.version ?? 0, pool?.train?.policy_version ?? 0)}`} label="newest weights" />
    <${Node} title="Engines" main=${`${up}/${engines.length}`} unit="up" spark=${ticks.map((t) => (t.gateway.engine?.engines ?? []).reduce((/** @type {number} */ n, /** @type {Row} */ e) => n + e.in_flight, 0))}>
      <${Stat} label="in flight" value=${engines.reduce((/** @type {number} */ n, /** @type {Row} */ e) => n + e.in_flight, 0)} />
      <${Stat} label="tokens" value=${per((t) => t.gateway.calls?.response_tokens ?? 0)} />
    <//>
  </div>`;
}

/** @param {{ ticks: Tick[] }} props */
function Waits({ ticks }) {
  const tick = ticks[ticks.length - 1];
  const metrics = tick.metrics ?? {};
  const waiting = (/** @type {string} */ who) => total(tick.pool, (c) => c.waiting?.[who] ?? 0);
  return html`
    <${Bars} label="Shares of the last optimizer step" most=${1} bars=${[
      { name: "trainer waits for groups", value: metrics["wait/trainer_starved"] ?? 0, colour: "warn", text: percent(metrics["wait/trainer_starved"]) },
      { name: "generation waits for the trainer", value: metrics["wait/generation_saturated"] ?? 0, colour: "warn", text: percent(metrics["wait/generation_saturated"]) },
    ]} />
    <p class="fine">Now ${waiting("consumers")} consumers wait for groups, and ${waiting("producers")} producers for room.</p>
    <${Bars} label="Time of the last optimizer step" bars=${Object.entries(metrics)
      .filter(([key]) => key.startsWith("time/") && key !== "time/step_s")
      .map(([key, value]) => ({ name: key.slice(5, -2), value, text: seconds(value) }))} />`;
}

/** @param {{ pool: Record<string, Row> | null }} props */
function Drops({ pool }) {
  const reasons = Object.entries(pool ?? {}).flatMap(([channel, counts]) =>
    Object.entries(counts.groups.drop_reasons).map(([reason, n]) => ({ name: `${reason} (${channel})`, value: n, colour: "bad" })));
  if (reasons.length === 0) return html`<${Empty}>No group was dropped.<//>`;
  return html`<${Bars} label="Dropped groups by reason" bars=${reasons} />
    <p class="fine"><a href=${link("groups", { view: "gone" })}>Which groups they were</a></p>`;
}

/** @param {{ about: Row }} props */
export function Overview({ about }) {
  const ticks = useTicks();
  const tick = ticks[ticks.length - 1];
  const { data, error } = useApi("metrics", { key: CURVES }, tick?.optimizer_steps);
  const series = data?.series ?? {};
  const x = series.step ?? [];
  const curve = useMemo(() => scored(series), [data]);
  /** @param {string} label @param {[string, string, string][]} lines */
  const chart = (label, lines) => html`
    <${Chart} label=${label} x=${x} lines=${lines.map(([key, name, hue]) => ({ name, values: series[key] ?? [], colour: hue, points: key.startsWith("val/") }))} />`;
  return html`
    <h1 class="hidden">Overview</h1>
    <${Failure} error=${error} />
    ${tick && html`<${Alerts} alerts=${tick.alerts} about=${about} /><${Flow} ticks=${ticks} />`}
    <div class="grid">
      <${Card} title="Reward and evaluation" class="wide">
        <${Chart} label="Reward" x=${curve.x} height=${230} lines=${[{ name: "reward, training", values: curve.rewards, colour: "accent" }, { name: "score, evaluation", values: curve.scores, colour: "second", points: true }]} />
        <${Evaluated} of=${evaluations(series).at(-1)} /><//>
      <${Card} title="Who waits for whom">${tick && html`<${Waits} ticks=${ticks} />`}<//>
      <${Card} title="How old the tokens were" aside=${html`<small>last 20 steps, in versions</small>`}>
        ${data?.lag?.length ? html`<${Bars} label="Tokens by lag in versions" bars=${data.lag.map(([name, n]) => ({ name: `lag ${name}`, value: n }))} />` : html`<${Empty}>No figures yet.<//>`}
        ${chart("Staleness", [["staleness/mean", "mean", "accent"], ["staleness/max", "max", "second"]])}
      <//>
      <${Card} title="Throughput">${chart("Tokens per second", [["tokens_per_s", "tokens/s", "accent"]])}<//>
      <${Card} title="Engine against trainer">${chart("Off-policy", [["log_prob_gap", "log-prob gap", "bad"], ["off_policy/kl_k1", "KL", "accent"]])}<//>
      <${Card} title="Optimizer">${chart("Gradient norm and entropy", [["grad_norm", "gradient norm", "accent"], ["policy/entropy", "entropy", "second"]])}<//>
      <${Card} title="Dropped data">${tick && html`<${Drops} pool=${tick.pool} />`}<//>
      <${Card} title="Run">
        <dl class="facts">
          ${Object.entries({ name: about.run.name, model: about.run.model, backend: about.run.backend, started: about.run.started_at, commit: about.run.git?.slice(0, 10), ...about.run.versions })
            .filter(([, value]) => value)
            .map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}
        </dl>
        ${(tick?.gateway?.engine?.engines ?? []).map((/** @type {Row} */ e) => html`<p class="fine"><${Chip} of=${e.state} /> ${e.url}, version ${e.version ?? "–"}</p>`)}
      <//>
    </div>`;
}

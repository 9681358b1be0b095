// Optimizer steps: what each was trained on, which weights it led to, and how long engines paused.
import { html } from "./shown.js";
import { amend, link, useApi, usePages, useTicks } from "./api.js";
import { Card, Chart, Chip, Empty, Failure, Loading, Looked, Select, Stat, Table, Uid, inOrder, number, ordered, percent, seconds } from "./parts.js";

const HISTORY = ["policy_version", "publish/seconds", "time/publish_s"];

/** @param {{ params: Row }} props */
export function Batches({ params }) {
  const steps = useTicks().at(-1)?.optimizer_steps ?? 0;
  const { order, ascending, key = "reward/mean" } = params;
  const pages = usePages("batches", { order, ascending }, steps);
  const { data } = useApi("metrics", { key: [...HISTORY, key] }, steps);
  const series = data?.series ?? {};
  return html`
    <div class="head"><h1>Batches</h1></div>
    <div class="grid">
      <${Card} title="Weights"><${Chart} label="Policy version by optimizer step" x=${series.step ?? []} lines=${[{ name: "policy version", values: series.policy_version ?? [], colour: "accent" }]} /><//>
      <${Card} title="Pause of a publication" aside=${html`<small>seconds</small>`}><${Chart} label="Seconds of each publication" x=${series.step ?? []} lines=${[{ name: "engines", values: series["publish/seconds"] ?? [], colour: "accent" }, { name: "trainer", values: series["time/publish_s"] ?? [], colour: "second" }]} /><//>
      <${Card} title="Any metric" aside=${html`<${Select} label="Metric" value=${key} options=${data?.keys?.length ? data.keys : [key]} onChange=${(/** @type {string} */ v) => amend({ key: v })} />`}>
        <${Chart} label=${key} x=${series.step ?? []} lines=${[{ name: key, values: series[key] ?? [], colour: "accent", points: key.startsWith("val/") }]} /><//>
    </div>
    <${Failure} error=${pages.error} />
    <${Looked} looked=${pages.looked} />
    <${Card} title="Optimizer steps"><${Table} label="Optimizer steps" rows=${pages.items} more=${pages.more} busy=${pages.busy} failed=${pages.error} order=${ordered(params, "step")}
      empty="No optimizer step is recorded: the trainer has not begun, or this gateway knows no run's folder."
      columns=${[
        ["Step", (r) => html`<a href=${link("batch", { step: r.step })}>${r.step}</a>`, "num", "step"],
        ["Reward", (r) => number(r["reward/mean"]), "num", "reward/mean"],
        ["Groups", (r) => r.groups, "num", "groups"],
        ["Trajectories", (r) => r.trajectories, "num", "trajectories"],
        ["Tokens", (r) => number(r.tokens), "num", "tokens"],
        ["Loss", (r) => number(r.loss), "num", "loss"],
        ["Gradient", (r) => number(r.grad_norm), "num", "grad_norm"],
        ["Staleness", (r) => number(r["staleness/mean"]), "num", "staleness/mean"],
        ["Weight", (r) => number(r["off_policy/weight_mean"]), "num", "off_policy/weight_mean"],
        ["No signal", (r) => percent(r["groups/no_signal"]), "num", "groups/no_signal"],
        ["Time", (r) => seconds(r["time/step_s"]), "num", "time/step_s"],
        ["Version", (r) => r.policy_version, "num", "policy_version"],
        ["Trained on", (r) => (r.sampled ? html`<a href=${link("batch", { step: r.step })}>tokens kept</a>` : ""), "", "sampled"],
      ]} /><//>`;
}

/** @param {{ params: Row }} props */
export function Batch({ params }) {
  const { data, error } = useApi("batch", { step: params.step });
  const order = ordered(params, "");
  if (error) return html`<${Failure} error=${error} />`;
  if (!data) return html`<${Loading} />`;
  const { step, record, sample } = data;
  /** @type {Record<string, [string, any][]>} */
  const kinds = {};
  for (const [key, value] of Object.entries(record ?? {})) {
    const [kind, ...rest] = key.split("/");
    (kinds[rest.length ? kind : "step"] ??= []).push([rest.length ? rest.join("/") : key, value]);
  }
  return html`
    <div class="head"><h1><small>Optimizer step</small> ${step}</h1>
      <div class="tabs"><a href=${link("batch", { step: step - 1 })}>Earlier</a><a href=${link("batch", { step: step + 1 })}>Later</a></div></div>
    ${record && html`<dl class="stats">
      <${Stat} label="Reward" value=${number(record["reward/mean"])} />
      <${Stat} label="Groups" value=${record.groups} />
      <${Stat} label="Tokens" value=${number(record.tokens)} />
      <${Stat} label="Staleness" value=${number(record["staleness/mean"])} hint=${` max ${number(record["staleness/max"])}`} />
      <${Stat} label="Mean weight" value=${number(record["off_policy/weight_mean"])} />
      <${Stat} label="Time" value=${seconds(record["time/step_s"])} />
    </dl>`}
    <${Card} title="What it was trained on" aside=${sample && html`<small>a sample of ${sample.groups ?? "its"} groups, token by token</small>`}>
      ${sample
        ? html`<${Table} label="Trajectories of the sample" rows=${inOrder(sample.trajectories, order)} order=${order} columns=${[
            ["Trajectory", (t) => html`<${Uid} page="trajectory" uid=${t.trajectory_uid} step=${step} view="tokens" />`, "", "trajectory_uid"],
            ["Group", (t) => html`<${Uid} page="group" uid=${t.prompt_uid} step=${step} />`, "", "prompt_uid"],
            ["Reward", (t) => number(t.reward), "num", "reward"],
            ["Advantage", (t) => html`<${Chip} of=${number(t.advantage)} kind=${t.advantage > 0 ? "good" : t.advantage < 0 ? "bad" : "plain"} />`, "num", "advantage"],
            ["Weight", (t) => number(t.weight), "num", "weight"],
            ["Turns", (t) => t.n_steps, "num", "n_steps"],
            ["Sampled tokens", (t) => number(t.n_tokens), "num", "n_tokens"],
          ]} />`
        : html`<${Empty}>No tokens are kept of this step: the newest are (trainer.sample_mb), of trainer.sample_groups groups each.<//>`}
    <//>
    <div class="columns">
      ${Object.entries(kinds).map(([kind, values]) => html`<${Card} title=${kind.replaceAll("_", " ")}>
        <dl class="facts">${values.map(([name, value]) => html`<dt>${name}</dt><dd>${typeof value === "number" ? number(value, 4) : String(value)}</dd>`)}</dl><//>`)}
    </div>`;
}

// Optimizer steps: what each was trained on, which weights it led to, and how long engines paused.
import { useState } from "./vendor/preact.js";
import { html } from "./shown.js";
import { link, useApi, usePages, useTicks } from "./api.js";
import { Card, Chart, Chip, Empty, Failure, Loading, Select, Stat, Table, Uid, number, percent, seconds } from "./parts.js";

const HISTORY = ["policy_version", "publish/seconds", "time/publish_s"];

export function Batches() {
  const steps = useTicks().at(-1)?.optimizer_steps ?? 0;
  const pages = usePages("batches", { at: steps });
  const [key, choose] = useState("reward/mean");
  const { data } = useApi("metrics", { key: [...HISTORY, key], at: steps });
  const series = data?.series ?? {};
  return html`
    <div class="head"><h1>Batches</h1></div>
    <div class="grid">
      <${Card} title="Weights"><${Chart} label="Policy version by optimizer step" x=${series.step ?? []} lines=${[{ name: "policy version", values: series.policy_version ?? [], colour: "accent" }]} /><//>
      <${Card} title="Pause of a publication" aside=${html`<small>seconds</small>`}><${Chart} label="Seconds of each publication" x=${series.step ?? []} lines=${[{ name: "engines", values: series["publish/seconds"] ?? [], colour: "accent" }, { name: "trainer", values: series["time/publish_s"] ?? [], colour: "second" }]} /><//>
      <${Card} title="Any metric" aside=${html`<${Select} label="Metric" value=${key} options=${data?.keys?.length ? data.keys : [key]} onChange=${choose} />`}>
        <${Chart} label=${key} x=${series.step ?? []} lines=${[{ name: key, values: series[key] ?? [], colour: "accent", points: key.startsWith("val/") }]} /><//>
    </div>
    <${Failure} error=${pages.error} />
    <${Card} title="Optimizer steps"><${Table} label="Optimizer steps" rows=${pages.items} more=${pages.more} busy=${pages.busy}
      empty="No optimizer step is recorded: the trainer has not begun, or this gateway knows no run's folder."
      columns=${[
        ["Step", (r) => html`<a href=${link("batch", { step: r.step })}>${r.step}</a>`, "num"],
        ["Reward", (r) => number(r["reward/mean"]), "num"],
        ["Groups", (r) => r.groups, "num"],
        ["Trajectories", (r) => r.trajectories, "num"],
        ["Tokens", (r) => number(r.tokens), "num"],
        ["Loss", (r) => number(r.loss), "num"],
        ["Gradient", (r) => number(r.grad_norm), "num"],
        ["Staleness", (r) => number(r["staleness/mean"]), "num"],
        ["Weight", (r) => number(r["off_policy/weight_mean"]), "num"],
        ["No signal", (r) => percent(r["groups/no_signal"]), "num"],
        ["Time", (r) => seconds(r["time/step_s"]), "num"],
        ["Version", (r) => r.policy_version, "num"],
        ["Trained on", (r) => (r.sampled ? html`<a href=${link("batch", { step: r.step })}>tokens kept</a>` : "")],
      ]} /><//>`;
}

/** @param {{ params: Row }} props */
export function Batch({ params }) {
  const { data, error } = useApi("batch", { step: params.step });
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
        ? html`<${Table} label="Trajectories of the sample" rows=${sample.trajectories} columns=${[
            ["Trajectory", (t) => html`<${Uid} page="trajectory" uid=${t.trajectory_uid} step=${step} view="tokens" />`],
            ["Group", (t) => html`<${Uid} page="group" uid=${t.prompt_uid} step=${step} />`],
            ["Reward", (t) => number(t.reward), "num"],
            ["Advantage", (t) => html`<${Chip} of=${number(t.advantage)} kind=${t.advantage > 0 ? "good" : t.advantage < 0 ? "bad" : "plain"} />`, "num"],
            ["Weight", (t) => number(t.weight), "num"],
            ["Turns", (t) => t.n_steps, "num"],
            ["Sampled tokens", (t) => number(t.n_tokens), "num"],
          ]} />`
        : html`<${Empty}>No tokens are kept of this step: the newest are (trainer.sample_mb), of trainer.sample_groups groups each.<//>`}
    <//>
    <div class="columns">
      ${Object.entries(kinds).map(([kind, values]) => html`<${Card} title=${kind.replaceAll("_", " ")}>
        <dl class="facts">${values.map(([name, value]) => html`<dt>${name}</dt><dd>${typeof value === "number" ? number(value, 4) : String(value)}</dd>`)}</dl><//>`)}
    </div>`;
}

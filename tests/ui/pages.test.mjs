// What pages show when answers are slow, wrong or overtaken, without a browser: `make check-ui` runs it.
import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { asked, question, root, settled, went, withText } from "./dom.mjs";
const { html } = await import("../../gateway/ui/static/shown.js");
const { render } = await import("../../gateway/ui/static/vendor/preact.js");
const { follow, useApi, usePages } = await import("../../gateway/ui/static/api.js");
const { Found, number, Select, walk } = await import("../../gateway/ui/static/parts.js");
const { Archive, Find } = await import("../../gateway/ui/static/archive.js");
const { Groups } = await import("../../gateway/ui/static/groups.js");
const { Curation, Marks } = await import("../../gateway/ui/static/curation.js");
const { Trajectory } = await import("../../gateway/ui/static/trajectory.js");
const { Overview } = await import("../../gateway/ui/static/overview.js");

/** A new element to render into; what was rendered before is no longer there. */
function fresh() {
  if (last) render(null, last);
  return (last = root());
}
let last = null;

const about = { channels: ["train", "val"], read_only: false, run: {}, filters: [], orders: ["fifo"] };

// -- answers ---------------------------------------------------------------------------------------

function Listed({ search, at }) {
  const pages = usePages("archive", { search }, at);
  return html`<p>${pages.busy ? "busy" : "done"} ${pages.error?.message} ${pages.items.map((row) => row.uid).join(" ")}</p>
    ${pages.more && html`<button onClick=${pages.more}>more</button>`}`;
}

const rows = (...uids) => ({ items: uids.map((uid) => ({ uid })), cursor: null });

test("an error that comes late of another search neither stands in a list nor holds it up", async () => {
  const at = fresh();
  render(html`<${Listed} search="slow" />`, at);
  const slow = await question("archive");
  render(html`<${Listed} search="quick" />`, at);
  (await question("archive")).answer(rows("a", "b"));
  await settled();
  slow.refuse(503, "the pool did not answer");
  await settled();
  assert.equal(at.textContent.trim().replace(/\s+/g, " "), "done a b");
});

test("a list that is read again stays as it is, and as long as it was, until it is there", async () => {
  const at = fresh();
  const many = (from) => Array.from({ length: 60 }, (_, i) => ({ uid: `${from}${i}` }));
  render(html`<${Listed} at=${1} />`, at);
  (await question("archive")).answer({ items: many("a"), cursor: "second" });
  await settled();
  withText(at, "button", "more").tell("click");
  (await question("archive")).answer({ items: many("b"), cursor: "third" });
  await settled();
  render(html`<${Listed} at=${2} />`, at);
  const first = await question("archive");
  assert.ok(at.textContent.includes("b59"), "nothing is gone while it is read");
  render(html`<${Listed} at=${3} />`, at);
  await settled();
  assert.equal(asked.length, 0, "one is read at a time");
  first.answer({ items: many("c"), cursor: "second" });
  (await question("archive")).answer({ items: many("d"), cursor: "third" });
  const again = await question("archive");
  assert.ok(at.textContent.includes("c0") && at.textContent.includes("d59"));
  again.answer({ items: many("e"), cursor: "second" });
  (await question("archive")).answer({ items: many("f"), cursor: "third" });
  await settled();
  assert.ok(at.textContent.includes("done") && at.textContent.includes("f59"));
});

function Asked({ at }) {
  const { data, error, reload } = useApi("about", {}, at);
  return html`<p>${data?.n} ${error?.message}</p><button onClick=${reload}>again</button>`;
}

test("answers that take longer than the time between two questions are shown, and do not pile up", async () => {
  const at = fresh();
  render(html`<${Asked} />`, at);
  (await question("about")).answer({ n: 1 });
  await settled();
  for (const n of [2, 3]) {
    withText(at, "button", "again").tell("click");
    const slow = await question("about");
    withText(at, "button", "again").tell("click");
    withText(at, "button", "again").tell("click");
    await settled();
    assert.equal(asked.length, 0);
    slow.answer({ n });
    (await question("about")).answer({ n: n + 0.5 }); // what was asked for meanwhile
    await settled();
    assert.equal(at.textContent.trim(), `${n + 0.5} again`);
  }
});

test("figures stay while newer ones are asked for", async () => {
  const at = fresh();
  render(html`<${Asked} at=${1} />`, at);
  (await question("about")).answer({ n: 1 });
  await settled();
  render(html`<${Asked} at=${2} />`, at);
  const newer = await question("about");
  assert.ok(at.textContent.startsWith("1"));
  newer.refuse(500, "metrics.jsonl is damaged");
  await settled();
  assert.ok(at.textContent.startsWith("1 metrics.jsonl is damaged"));
});

test("the overview says why there are no figures", async () => {
  const at = fresh();
  render(html`<${Overview} about=${about} />`, at);
  (await question("metrics")).refuse(500, "metrics.jsonl is damaged");
  await settled();
  assert.ok(withText(at, "p", "metrics.jsonl is damaged"));
});

test("keys go on behind a trajectory that is listed again for a step that came late", async () => {
  const at = fresh();
  render(html`<${Archive} about=${{ ...about, has_archive: true }} params=${{}} />`, at);
  (await question("archive")).answer(rows("a", "a", "b"));
  await settled();
  render(html`<p>the page of one</p>`, at);
  location.hash = "#/trajectory?uid=a";
  for (const [key, uid] of [["n", "b"], ["p", "a"]]) {
    walk({ key, target: { tagName: "BODY" } });
    assert.equal(location.hash, `#/trajectory?uid=${uid}`);
  }
});

test("a list that cannot be read is not said to be empty, or to be on its way", async () => {
  for (const [page, params, name] of [[Archive, {}, "archive"], [Groups, { view: "gone" }, "events"]]) {
    const at = fresh();
    render(html`<${page} about=${{ ...about, has_archive: true }} params=${params} />`, at);
    (await question(name)).refuse(400, "there is no such column");
    await settled();
    assert.ok(at.textContent.includes("there is no such column"));
    assert.doesNotMatch(at.textContent, /Nothing that left|remembers no such event|Loading/);
  }
});

test("who left the search for a uid is not brought to it", async () => {
  const at = fresh();
  render(html`<${Find} params=${{ uid: "slow" }} />`, at);
  const slow = await question("find");
  render(html`<p>elsewhere</p>`, at);
  await settled();
  slow.answer({ page: "trajectory", params: { uid: "slow" } });
  await settled();
  assert.deepEqual(went, []);
});

const opened = [];
globalThis.EventSource = class {
  static CLOSED = 2;
  constructor(path) {
    opened.push(this);
    this.path = path;
    this.readyState = 0;
  }
  close() {
    this.readyState = 2;
  }
};

test("the stream is opened again after an answer that was none", async () => {
  opened.length = 0;
  fresh();
  mock.timers.enable({ apis: ["setTimeout"] });
  const end = follow();
  opened[0].onerror(); // the connection broke: the browser tries again itself
  mock.timers.tick(60_000);
  assert.deepEqual([opened.length, asked.length], [1, 0]);
  opened[0].readyState = 2; // 503, as of a gateway that starts
  opened[0].onerror();
  mock.timers.tick(60_000);
  mock.timers.reset();
  (await question("about")).answer({});
  await settled();
  assert.equal(opened.length, 2);
  end();
});

// -- pages -----------------------------------------------------------------------------------------

const step = (index, more = {}) => ({
  index, parent: null, n_prompt: 3, n_known: 0, n_response: 2, reward: null, versions: [[1, 0, 2]], branch: null,
  finish_reason: "stop", tool_calls: 0, timing: null, messages: [{ role: "user", content: `said in ${index}` }], ...more,
});
const shown = (steps, branches) => ({
  trajectory_uid: "t", prompt_uid: "p", channel: "train", attempt: 0, metadata: {}, reward: 1, running: 0, step: null,
  row: { state: "complete", reason: null, reward: 1, outcome: null, marks: { trainable: null, tags: [], note: "" } },
  archived: null, steps, branches,
});
const tokens = (start, n, total) => ({
  start, total, n_prompt: 3, n_known: 0, ids: Array(n).fill(7), texts: Array(n).fill("x"), versions: Array(n).fill(1),
  columns: {}, pictures: [],
});

async function trajectory(params, data) {
  const at = fresh();
  const draw = (more, of) => render(html`<${Trajectory} about=${{ ...about, ...of }} params=${{ uid: "t", ...params, ...more }} />`, at);
  draw({});
  (await question("trajectory")).answer(data);
  await settled();
  return { at, draw };
}

test("a trajectory that goes on is read again, but not of a run that is over", async () => {
  opened.length = 0;
  const end = follow();
  const going = shown([step(0)], [[0]]);
  going.row.state = "open";
  for (const [n, read_only] of [[1, false], [2, true]]) {
    const at = fresh();
    render(html`<${Trajectory} about=${{ ...about, read_only }} params=${{ uid: "t" }} />`, at);
    (await question("trajectory")).answer(going);
    await settled();
    opened[0].onmessage({ data: JSON.stringify({ at: 100 * n }) });
    await settled();
    assert.deepEqual(asked.map((each) => each.name), read_only ? [] : ["trajectory"]);
  }
  end();
});

test("the tools of one call do not stand at another one", async () => {
  const { at, draw } = await trajectory({ at: "0" }, shown([step(0), step(1)], [[0], [1]]));
  const details = withText(at, "details", "Tools of this call");
  details.tell("toggle", { open: true });
  (await question("tokens")).answer({ ...tokens(0, 3, 5), texts: ["tools ", "of ", "call 0"] });
  await settled();
  assert.ok(withText(at, "details", "tools of call 0"));
  draw({ at: "1" });
  await settled();
  assert.ok(at.textContent.includes("said in 1"));
  assert.ok(!at.textContent.includes("tools of call 0"));
});

test("a token that was chosen is none among the next ones", async () => {
  const { at } = await trajectory({ view: "tokens", at: "0" }, shown([step(0)], [[0]]));
  (await question("tokens")).answer(tokens(0, 8192, 8194));
  await settled();
  const span = { dataset: { i: "8000" } };
  at.all.find((each) => each.attributes.role === "application").tell("click", span);
  await settled();
  assert.ok(at.textContent.includes("id 7, at 8000"));
  withText(at, "button", "Later tokens").tell("click");
  (await question("tokens")).answer(tokens(8192, 2, 8194));
  await settled();
  assert.ok(at.textContent.includes("Choose a token"));
});

test("a turn that cannot be loaded says why", async () => {
  const { at } = await trajectory({}, shown([step(0), step(1, { parent: 0, messages: undefined })], [[0, 1]]));
  withText(at, "button", "Load more turns").tell("click");
  (await question("tokens")).refuse(503, "the pool did not answer");
  await settled();
  assert.ok(withText(at, "p", "the pool did not answer"));
});

test("messages of any shape have a page", async () => {
  const messages = [null, 5, "text", { role: "assistant", content: "Two.", tool_calls: 5 }, { tool_calls: [null] }];
  for (const last of messages) {
    const { at } = await trajectory({}, shown([step(0, { messages: [...messages, last] })], [[0]]));
    assert.ok(at.textContent.includes("Two."));
  }
});

test("a deletion that fails says so", async () => {
  const { at } = await trajectory({}, shown([step(0)], [[0]]));
  withText(at, "button", "Delete this trajectory").tell("click");
  (await question("delete")).refuse(503, "the archive may still hold it");
  await settled();
  assert.ok(withText(at, "p", "the archive may still hold it"));
});

test("what has left the pool can be deleted, too, but not of a run that is over", async () => {
  const archived = { fate: "its group was dropped", left: "dropped", state: "complete", reason: null, feedback: [] };
  const gone = { ...shown([step(0)], [[0]]), row: null, archived };
  const { at, draw } = await trajectory({}, gone);
  withText(at, "button", "Delete this trajectory").tell("click");
  assert.deepEqual(JSON.parse((await question("delete")).body), { trajectory_uid: "t" });
  draw({}, { read_only: true });
  await settled();
  assert.ok(!at.textContent.includes("Delete this trajectory"));
});

test("the first words of a turn end with a whole character", async () => {
  const content = `${"x".repeat(79)}😀 and so on`;
  const { at } = await trajectory({}, shown([step(0, { messages: [{ role: "user", content }] })], [[0]]));
  assert.equal(withText(at, "span", "xxx").textContent, "x".repeat(79));
});

test("a dry run stands under the channel that it is of", async () => {
  const at = fresh();
  render(html`<${Curation} about=${about} params=${{}} />`, at);
  await settled();
  withText(at, "button", "Try").tell("click");
  const decision = { prompt_uid: "of train", decision: "serve", reason: "in_order", rank: 1, n_trajectories: 4 };
  (await question("dry_run")).answer({ counts: { serve: { in_order: 1 } }, decisions: [decision] });
  await settled();
  assert.ok(at.textContent.includes("of train"));
  render(html`<${Curation} about=${about} params=${{ channel: "val" }} />`, at);
  await settled();
  assert.ok(!at.textContent.includes("of train"));
});

test("a tag that has a comma in it stays one when another is added", async () => {
  const at = fresh();
  const props = { about, channel: "train", trajectory_uid: "t", done: () => {} };
  render(html`<${Marks} ...${props} marks=${{ tags: ["slow", "wrong, off topic"] }} />`, at);
  await settled();
  const field = withText(at, "label", "Tags").all.find((each) => each.localName === "input");
  field.tell("change", { value: "slow, wrong, off topic, seen" });
  const { tags } = JSON.parse((await question("mark")).body).marks;
  assert.deepEqual(tags.sort(), ["seen", "slow", "wrong, off topic"]);
});

test("a reason that groups left for filters no groups that are there", async () => {
  render(html`<${Groups} about=${about} params=${{ reason: "zero_variance", tag: "kept" }} />`, fresh());
  assert.deepEqual((await question("groups")).params, { tag: "kept" });
});

test("what is sought is marked where it is, whatever stands before it", () => {
  for (const [text, sought, marked] of [["İİİ a Big one, big", "big", ["Big", "big"]], ["a.b|c (x) axb", "a.b|c (", ["a.b|c ("]]]) {
    const at = fresh();
    render(html`<p><${Found} text=${text} sought=${sought} /></p>`, at);
    assert.equal(at.textContent, text);
    assert.deepEqual(at.all.filter((each) => each.localName === "mark").map((each) => each.textContent), marked);
  }
});

test("a choice that is none of the options is shown as it is", async () => {
  const at = fresh();
  render(html`<${Select} label="Metric" value="val/score" options=${["loss"]} onChange=${() => {}} />`, at);
  assert.deepEqual(at.all.filter((each) => each.localName === "option").map((each) => each.textContent), ["val/score", "loss"]);
});

test("a number that is rounded up has the next unit", () => {
  assert.deepEqual([9_999, 12_345, 999_499, 999_600, -999_999, 999_999_999, 2e12].map((n) => number(n)),
    ["9999", "12.3 k", "999 k", "1.00 M", "-1.00 M", "1.00 G", "2.00 T"]);
});

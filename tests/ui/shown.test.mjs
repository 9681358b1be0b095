// What pages do with hostile text, without a browser: `make check-ui` runs it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { html, safe } from "../../gateway/ui/static/shown.js";
import { firstSaid, percent } from "../../gateway/ui/static/parts.js";
import { smooth, together } from "../../gateway/ui/static/runs.js";

test("what reorders, hides or ends a text is an escape, as on the terminal", () => {
  assert.equal(safe("a\u202eb\u0000c\u2066\u0085\u{e0001}\ud800"), "a\\u202eb\\x00c\\u2066\\x85\\U000e0001\\ud800");
  assert.equal(safe("two\nlines\tand 東京 é"), "two\nlines\tand 東京 é");
});

test("texts and titles of a page are safe, at any depth; values and links are as they were", () => {
  const evil = "x\u202ey";
  const tree = html`<p title=${evil}><b>${[evil, html`<i>${evil}</i>`]}</b>
    <input value=${evil} /><img alt=${evil} /><a href=${evil}>${evil}</a></p>`;
  const told = JSON.stringify(tree, (key, value) => (key.startsWith("__") ? undefined : value));
  assert.equal(told.split("x\\\\u202ey").length - 1, 5);
  assert.equal(told.split(evil).length - 1, 2);
});

test("smoothing begins at the first value and forgets; none changes nothing", () => {
  assert.deepEqual(smooth([1, 2, 4], 0), [1, 2, 4]);
  const [first, second] = smooth([1, 2], 0.5);
  assert.equal(first, 1);
  assert.ok(Math.abs(second - 5 / 3) < 1e-12);
});

test("runs with other steps share an axis; where one has no value there is none", () => {
  const run = (name, tokens, value) => ({ name, curves: { loss: { tokens, value } } });
  const { x, lines } = together([run("a", [10, 30], [1, 2]), run("b", [20, 30], [3, 4])], "loss", "tokens", 0);
  assert.deepEqual(x, [10, 20, 30]);
  assert.deepEqual(lines.map((line) => line.values), [[1, null, 2], [null, 3, 4]]);
});

test("a share below a tenth of a percent is a word", () => {
  assert.deepEqual([null, 0, 1 / 3000, 0.001, 0.256, 1].map(percent), ["–", "0 %", "nearly none", "0.1 %", "26 %", "100 %"]);
});

test("a list says of a conversation without a turn that there is none, not that its text was dropped", () => {
  const said = [{ first: "Hi", n_steps: 2 }, { first: null, n_steps: 0 }, { first: null, n_steps: 2 }, { first: null, turns: 0 }];
  assert.deepEqual(said.map(firstSaid), ["Hi", "no turn yet", "no text was kept", "no turn yet"]);
});

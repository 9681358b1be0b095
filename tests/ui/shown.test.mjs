// What pages do with hostile text, without a browser: `make check-ui` runs it.
import assert from "node:assert/strict";
import { test } from "node:test";
import { html, safe } from "../../gateway/ui/static/shown.js";

test("what reorders, hides or ends a text is an escape, as on the terminal", () => {
  assert.equal(safe("a\u202eb\u0000c\u2066\u0085\u{e0001}\ud800"), "a\\u202eb\\x00c\\u2066\\x85\\U000e0001\\ud800");
  assert.equal(safe("two\nlines\tand 東京 é"), "two\nlines\tand 東京 é");
});

test("texts and titles of a page are safe, at any depth; values and links are as they were", () => {
  const evil = "x\u202ey";
  const tree = html`<p title=${evil}><b>${[evil, html`<i>${evil}</i>`]}</b>
    <input value=${evil} /><a href=${evil}>${evil}</a></p>`;
  const told = JSON.stringify(tree, (key, value) => (key.startsWith("__") ? undefined : value));
  assert.equal(told.split("x\\\\u202ey").length - 1, 4);
  assert.equal(told.split(evil).length - 1, 2);
});

// Text as pages show it: what would reorder, hide or end a text is written as an escape, as
// stepwell/track/console.py does on the terminal. Values of fields stay as they are.
import { html as plain } from "./vendor/preact.js";

const UNSAFE = /[\p{Cc}\p{Cf}\p{Cs}]/gu;
const KEPT = "\n\t";
const TOLD = ["title", "aria-label", "placeholder", "alt"];

/** @param {string} character */
function escaped(character) {
  if (KEPT.includes(character)) return character;
  const code = /** @type {number} */ (character.codePointAt(0));
  const [sign, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
  return `\\${sign}${code.toString(16).padStart(Number(digits), "0")}`;
}

/** @param {string} text */
export const safe = (text) => text.replace(UNSAFE, escaped);

const seen = new WeakSet();

/** A tree with its texts made safe. @param {any} node @returns {any} */
function shown(node) {
  if (typeof node === "string") return safe(node);
  if (Array.isArray(node)) return node.map(shown);
  const props = node?.props;
  if (!props || seen.has(node)) return node;
  seen.add(node);
  if (props.children !== undefined && typeof props.children !== "function") props.children = shown(props.children);
  if (typeof node.type === "string") {
    for (const name of TOLD) if (typeof props[name] === "string") props[name] = safe(props[name]);
  }
  return node;
}

/** @param {TemplateStringsArray} strings @param {any[]} values */
export const html = (strings, ...values) => shown(plain(strings, ...values));

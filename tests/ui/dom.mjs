// As much of a browser as the dashboard's modules need to be rendered by Node: elements, the address, answers of a
// gateway. Nothing is laid out or drawn.

class Node {
  childNodes = [];
  parentNode = null;
  get firstChild() {
    return this.childNodes[0] ?? null;
  }
  get nextSibling() {
    const all = this.parentNode?.childNodes ?? [];
    return all[all.indexOf(this) + 1] ?? null;
  }
  insertBefore(node, before) {
    node.parentNode?.removeChild(node);
    const at = before ? this.childNodes.indexOf(before) : this.childNodes.length;
    this.childNodes.splice(at, 0, node);
    node.parentNode = this;
    return node;
  }
  appendChild(node) {
    return this.insertBefore(node, null);
  }
  removeChild(node) {
    this.childNodes.splice(this.childNodes.indexOf(node), 1);
    node.parentNode = null;
    return node;
  }
}

class Text extends Node {
  nodeType = 3;
  constructor(data) {
    super();
    this.data = data;
  }
  get textContent() {
    return String(this.data);
  }
}

class Element extends Node {
  nodeType = 1;
  attributes = {};
  listeners = {};
  style = { setProperty() {} };
  classList = { add() {}, remove() {} };
  onclick = null;
  onchange = null;
  oninput = null;
  onsubmit = null;
  ontoggle = null;
  onkeydown = null;
  constructor(name) {
    super();
    this.localName = name;
  }
  get children() {
    return this.childNodes.filter((node) => node.nodeType === 1);
  }
  get textContent() {
    return this.childNodes.map((node) => node.textContent).join("");
  }
  get hash() {
    return this.attributes.href;
  }
  get all() {
    return this.children.flatMap((node) => [node, ...node.all]);
  }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
  }
  removeAttribute(name) {
    delete this.attributes[name];
  }
  addEventListener(kind, listener) {
    this.listeners[kind] = listener;
  }
  removeEventListener(kind) {
    delete this.listeners[kind];
  }
  querySelector() {
    return null;
  }
  scrollIntoView() {}
  /** Have its listeners told of an event. */
  tell(kind, target = this) {
    this.listeners[kind]?.call(this, { type: kind, target, preventDefault() {} });
  }
}

const listening = new EventTarget();
const { setTimeout: inTime } = globalThis;

/** Addresses that a page went to. */
export const went = [];

Object.assign(globalThis, {
  document: {
    hidden: false,
    documentElement: new Element("html"),
    createElement: (name) => new Element(name),
    createElementNS: (_, name) => new Element(name),
    createTextNode: (data) => new Text(data),
    querySelectorAll: (which) => (which === "a.talk" ? page.all.filter((each) => each.attributes.class === "talk") : []),
    addEventListener() {},
    removeEventListener() {},
  },
  location: { hash: "", replace: (to) => went.push(to) },
  addEventListener: (...how) => listening.addEventListener(...how),
  removeEventListener: (...how) => listening.removeEventListener(...how),
  dispatchEvent: (event) => listening.dispatchEvent(event),
  requestAnimationFrame: (next) => setImmediate(next),
  setTimeout: (next, ms, ...more) => (ms ? inTime(next, ms, ...more) : setImmediate(next, ...more)),
  cancelAnimationFrame: clearImmediate,
  confirm: () => true,
});

/** Questions that wait for their answers, in order: name, parameters, and `answer` and `refuse`. */
export const asked = [];

globalThis.fetch = (path, how) =>
  new Promise((resolve) => {
    const [name, search] = path.replace("/ui/api/", "").split("?");
    const told = (status, body) => resolve({ ok: status === 200, status, json: async () => body });
    asked.push({
      name,
      params: Object.fromEntries(new URLSearchParams(search)),
      body: how.body,
      answer: (body) => told(200, body),
      refuse: (status, message) => told(status, { error: { message } }),
    });
  });

/** Let everything that is due be done: what is rendered, its effects, and what they do. */
export async function settled() {
  for (let i = 0; i < 20; i++) await new Promise((next) => setImmediate(next));
}

/** A question that waits, once it is asked; it waits no longer for another one to take it. */
export async function question(name) {
  await settled();
  const at = asked.findIndex((each) => each.name === name);
  if (at < 0) throw new Error(`nobody asks ${name}; waiting: ${asked.map((each) => each.name)}`);
  return asked.splice(at, 1)[0];
}

let page = new Element("main");

/** A new page to render into. */
export function root() {
  asked.length = went.length = 0;
  page = new Element("main");
  return page;
}

/** The element below with this text. */
export function withText(element, name, text) {
  const found = element.all.find((each) => each.localName === name && each.textContent.includes(text));
  if (!found) throw new Error(`no <${name}> has ${text}: ${element.textContent}`);
  return found;
}

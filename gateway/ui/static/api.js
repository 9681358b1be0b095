// Questions to the gateway, the stream of ticks, and the page's address.
import { useEffect, useRef, useState } from "./vendor/preact.js";

export class ApiError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** @param {Params} params */
export function query(params) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (Array.isArray(value)) value.forEach((each) => search.append(name, each));
    else if (value !== null && value !== undefined && value !== "") search.set(name, String(value));
  }
  return search.toString();
}

/** @param {string} path @param {RequestInit} [how] @returns {Promise<any>} */
async function ask(path, how) {
  const answer = await fetch(`/ui/api/${path}`, { credentials: "same-origin", ...how });
  const body = await answer.json().catch(() => null);
  if (answer.ok) return body;
  if (answer.status === 401 && !path.startsWith("login")) needsKey(true);
  throw new ApiError(answer.status, body?.error?.message ?? `the gateway answered ${answer.status}`);
}

/** @param {string} name @param {Params} [params] */
export const get = (name, params = {}) => ask(`${name}?${query(params)}`);

/** @param {string} name @param {Row} body */
export const post = (name, body) =>
  ask(name, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });

/**
 * An answer as a page uses it; asked again when the question changes, when `at` does, or by `reload`. The answer before
 * stays until then. One is asked for at a time: what would be asked again meanwhile is, once that one is here.
 * @param {string | null} name null asks nothing
 * @param {Params} [params]
 * @param {number} [at] changes when the answer may have
 */
export function useApi(name, params = {}, at = 0) {
  const key = name === null ? null : `${name}?${query(params)}`;
  const [state, set] = useState(/** @type {Row} */ ({ data: null, error: null, key: null }));
  const [turn, again] = useState(0);
  const asked = useRef(/** @type {{ key: string, again: boolean } | null} */ (null));
  useEffect(() => {
    if (name === null || key === null) {
      asked.current = null;
    } else if (asked.current?.key === key) {
      asked.current.again = true;
    } else {
      const own = { key, again: true };
      asked.current = own;
      const answered = async () => {
        while (own.again) {
          own.again = false;
          const answer = await get(name, params).then((data) => ({ data, error: null }), (error) => ({ error }));
          if (asked.current !== own) return;
          set((before) => ({ data: before.key === key ? before.data : null, ...answer, key }));
        }
        asked.current = null;
      };
      answered();
    }
  }, [key, turn, at]);
  useEffect(() => () => void (asked.current = null), []);
  const same = state.key === key;
  return {
    data: same ? state.data : null,
    error: same ? /** @type {ApiError | null} */ (state.error) : null,
    reload: () => again((n) => n + 1),
  };
}

const NOTHING = /** @type {Row[]} */ ([]);
const ENOUGH = 50;
const SEARCH_MS = 2500;

/**
 * Pages of a listing, one after the other. A page may be empty and not the last: what is filtered
 * out was looked at. So it is searched on until there is enough, or for some seconds. Read again, when `at` changes or
 * by `reload`, the list stays as it is until it is there anew, as long as it was.
 * @param {string} name @param {Params} params @param {number} [at] changes when the list may have
 */
export function usePages(name, params, at = 0) {
  const key = query(params);
  const [state, set] = useState(/** @type {Row} */ ({ key: null, items: [], cursor: null, looked: null, busy: true }));
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const now = useRef(state);
  const put = (/** @type {Row} */ next) => set((now.current = next));
  /** The load that counts: of a list, up to so many rows, and whether one follows it. */
  const loading = useRef(/** @type {Row} */ ({ key: null, wanted: ENOUGH, busy: false, again: false }));
  const load = async (/** @type {Row[]} */ before, /** @type {string | null} */ from, /** @type {number} */ wanted) => {
    const own = (loading.current = { key, wanted, busy: true, again: false });
    const until = performance.now() + SEARCH_MS;
    let [items, cursor, looked] = [before, from, null];
    const least = now.current.key === key ? now.current.items.length : 0;
    setError(null);
    put(now.current.key === key ? { ...now.current, busy: true } : { key, items, cursor, looked, busy: true });
    try {
      for (let busy = true; busy; ) {
        const answer = await get(name, { ...params, cursor });
        if (loading.current !== own) return; // a later load has begun
        items = [...items, ...answer.items];
        [cursor, looked] = [answer.cursor, answer.looked];
        busy = cursor !== null && items.length < wanted && performance.now() < until;
        if (!busy || items.length >= least) put({ key, items, cursor, looked, busy });
      }
    } catch (e) {
      if (loading.current !== own) return;
      setError(/** @type {Error} */ (e));
      put({ ...now.current, busy: false });
    }
    own.busy = false;
    if (own.again) load([], null, wanted);
  };
  const reload = () => load([], null, loading.current.key === key ? loading.current.wanted : ENOUGH);
  useEffect(() => {
    if (loading.current.key === key && loading.current.busy) loading.current.again = true;
    else reload();
  }, [key, at]);
  useEffect(() => () => void (loading.current = {}), []);
  const same = state.key === key;
  return {
    items: /** @type {Row[]} */ (same ? state.items : NOTHING),
    looked: same ? state.looked : null,
    busy: !same || state.busy,
    error,
    more: same && state.cursor !== null ? () => load(state.items, state.cursor, state.items.length + ENOUGH) : null,
    reload,
  };
}

// -- stores ------------------------------------------------------------------------------------

/** @template T @param {T} first */
function store(first) {
  let value = first;
  /** @type {Set<(value: T) => void>} */
  const readers = new Set();
  return {
    get: () => value,
    set: (/** @type {T} */ next) => {
      value = next;
      readers.forEach((tell) => tell(next));
    },
    use: () => {
      const [, tell] = useState(0);
      useEffect(() => {
        const read = () => tell((n) => n + 1);
        readers.add(read);
        read();
        return () => void readers.delete(read);
      }, []);
      return value;
    },
  };
}

const keyNeeded = store(false);
const needsKey = (/** @type {boolean} */ value) => {
  if (keyNeeded.get() !== value) keyNeeded.set(value);
};
export const useKeyNeeded = keyNeeded.use;

/** @param {string} key */
export async function login(key) {
  await post("login", { key });
  needsKey(false);
}

const HISTORY = 90;
const RETRY_MS = 5000;
const ticks = store(/** @type {Tick[]} */ ([]));
const connected = store(false);
/** The last ticks, oldest first. */
export const useTicks = ticks.use;
export const useConnected = connected.use;

/** Follow the run; a page that nobody sees asks nothing. */
export function follow() {
  /** @type {EventSource | null} */
  let source = null;
  /** @type {any} */
  let later;
  let over = false;
  const open = () => {
    clearTimeout(later);
    source?.close();
    source = null;
    if (over || document.hidden || keyNeeded.get()) return;
    const own = (source = new EventSource("/ui/api/live"));
    source.onopen = () => connected.set(true);
    source.onerror = () => {
      connected.set(false);
      // A browser goes on where a connection broke, but not after an answer that is no stream: of a gateway that
      // starts, or one that wants the key again, which this question finds out.
      if (own === source && own.readyState === EventSource.CLOSED) {
        clearTimeout(later);
        later = setTimeout(() => get("about").catch(() => null).then(open), RETRY_MS);
      }
    };
    source.onmessage = (event) => ticks.set([...ticks.get(), JSON.parse(event.data)].slice(-HISTORY));
  };
  document.addEventListener("visibilitychange", open);
  open();
  return () => {
    over = true;
    document.removeEventListener("visibilitychange", open);
    clearTimeout(later);
    source?.close();
  };
}

/** Per second, between the last ticks; null: not known yet. @param {(tick: Tick) => number | undefined} count */
export function rate(count, /** @type {Tick[]} */ of, span = 10) {
  const [last, first] = [of[of.length - 1], of[Math.max(0, of.length - 1 - span)]];
  if (!last || !first || last.at <= first.at) return null;
  const [now, before] = [count(last), count(first)];
  if (now === undefined || before === undefined) return null;
  return Math.max(0, (now - before) / (last.at - first.at));
}

// -- the address -------------------------------------------------------------------------------

function address() {
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: path || "overview", params: Object.fromEntries(new URLSearchParams(search ?? "")) };
}

/** @param {string} page @param {Params} [params] */
export function link(page, params = {}) {
  const search = query(params);
  return `#/${page}${search ? `?${search}` : ""}`;
}

export function useAddress() {
  const [now, set] = useState(address);
  useEffect(() => {
    const change = () => set(address());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  return now;
}

/** Change parameters of this page; the address stays a permalink. @param {Params} params */
export function amend(params) {
  const { page, params: before } = address();
  location.replace(link(page, { ...before, ...params }));
}

// The frame around every page: navigation, the key, the theme, what was done and its undoing.
import { render, useEffect, useErrorBoundary, useState } from "./vendor/preact.js";
import { html } from "./shown.js";
import { follow, link, login, useAddress, useApi, useConnected, useKeyNeeded, useTicks } from "./api.js";
import { Failure, Loading, walk } from "./parts.js";
import { Overview } from "./overview.js";
import { Group, Groups, Trajectories } from "./groups.js";
import { Trajectory } from "./trajectory.js";
import { Archive, Find, Finder } from "./archive.js";
import { Batch, Batches } from "./batches.js";
import { Curation, Done } from "./curation.js";
import { Pool } from "./pool.js";
import { Runs } from "./runs.js";

/** @type {Record<string, [string, any]>} */
const PAGES = {
  overview: ["Overview", Overview],
  groups: ["Groups", Groups],
  trajectories: ["Trajectories", Trajectories],
  archive: ["Archive", Archive],
  batches: ["Batches", Batches],
  curation: ["Curation", Curation],
  pool: ["Pool", Pool],
  runs: ["Runs", Runs],
};
/** @type {Record<string, [string, any]>} */
const DETAILS = {
  group: ["groups", Group],
  trajectory: ["trajectories", Trajectory],
  find: ["archive", Find],
  batch: ["batches", Batch],
};

function Theme() {
  const [theme, set] = useState(() => localStorage.getItem("theme") ?? "auto");
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    localStorage.setItem("theme", theme);
    dispatchEvent(new Event("theme"));
  }, [theme]);
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)");
    const change = () => dispatchEvent(new Event("theme"));
    media.addEventListener("change", change);
    return () => media.removeEventListener("change", change);
  }, []);
  const next = /** @type {Row} */ ({ auto: "light", light: "dark", dark: "auto" })[theme];
  const sign = /** @type {Row} */ ({ auto: "◐", light: "☀", dark: "☾" })[theme];
  return html`<button class="icon" onClick=${() => set(next)} aria-label=${`Theme: ${theme}. Change to ${next}`}
    title=${`Theme: ${theme}`}>${sign}</button>`;
}

function Login() {
  const [key, set] = useState("");
  const [error, setError] = useState(/** @type {Error | null} */ (null));
  const enter = async (/** @type {Event} */ event) => {
    event.preventDefault();
    await login(key).then(() => location.reload(), setError);
  };
  return html`<main class="login">
    <form class="card" onSubmit=${enter}>
      <h1>Stepwell</h1>
      <p>This gateway needs an admin key. The run's own is in the file <code>gateway_key</code> of
        its folder.</p>
      <label class="field"><span>Admin key</span>
        <input type="password" autocomplete="current-password" required value=${key}
          onInput=${(/** @type {any} */ e) => set(e.target.value)} />
      </label>
      <${Failure} error=${error} />
      <button class="primary">Open the dashboard</button>
    </form>
  </main>`;
}

/** @param {{ of: any, about: Row, params: Row }} props */
function Shown({ of: Page, about, params }) {
  const [error, reset] = useErrorBoundary();
  if (error) {
    return html`<${Failure} error=${error} /><button onClick=${reset}>Try again</button>`;
  }
  return html`<${Page} about=${about} params=${params} />`;
}

function Frame() {
  const { page, params } = useAddress();
  const { data: about, error, reload } = useApi("about");
  const keyNeeded = useKeyNeeded();
  const connected = useConnected();
  const ticks = useTicks();
  useEffect(() => (about ? follow() : undefined), [about !== null]);
  const [parent, Page] = DETAILS[page] ?? [page in PAGES ? page : "overview", (PAGES[page] ?? PAGES.overview)[1]];
  const name = about?.run?.name;
  useEffect(() => {
    document.title = `${PAGES[parent][0]} · ${name ?? "Stepwell"}`;
    window.scrollTo(0, 0);
  }, [page, params.uid, name]);
  if (keyNeeded) return html`<${Login} />`;
  if (about === null) {
    return html`<main>${error ? html`<${Failure} error=${error} /><button onClick=${reload}>Try again</button>` : html`<${Loading} />`}</main>`;
  }
  const alerts = ticks[ticks.length - 1]?.alerts?.length ?? 0;
  return html`
    <a class="skip" href="#main" onClick=${(/** @type {Event} */ e) => {
      e.preventDefault();
      document.getElementById("main")?.focus();
    }}>Skip to the page</a>
    <header class="top">
      <a class="brand" href=${link("overview")}><img src="/ui/icon.svg" alt="" width="24" height="24" />Stepwell</a>
      ${name && html`<span class="run" title=${about.run.model ?? ""}>${name}</span>`}
      <nav aria-label="Pages">
        ${Object.entries(PAGES).map(([id, [title]]) => html`
          <a href=${link(id)} aria-current=${id === parent ? "page" : undefined}>${title}
            ${id === "overview" && alerts > 0 && html`<span class="count" aria-label=${`${alerts} alerts`}>${alerts}</span>`}
          </a>`)}
      </nav>
      <${Finder} />
      <span class=${`state ${about.read_only ? "over" : connected ? "on" : "off"}`} role="status">
        ${about.read_only ? "finished run" : connected ? "live" : "not connected"}
      </span>
      <${Theme} />
    </header>
    <main id="main" tabindex="-1"><${Shown} key=${`${page} ${params.uid ?? ""}`} of=${Page} about=${about} params=${params} /></main>
    <${Done} />
  `;
}

addEventListener("keydown", walk); // once for all pages: between two of them no key is lost
render(html`<${Frame} />`, /** @type {Element} */ (document.getElementById("app")));

// What the vendored libraries and the API give, for `make check-ui` only: browsers load no types.

/** Head, cell, class, and the order that the head sorts by, or several with their names. */
type Column = [string, (row: Row) => any, string?, (string | [string, string][])?];
type Row = Record<string, any>;
type Params = Record<string, string | number | string[] | null | undefined>;

declare class uPlot {
  constructor(options: Row, data: (number | null)[][], target: HTMLElement);
  destroy(): void;
  setData(data: (number | null)[][]): void;
  setSize(size: { width: number; height: number }): void;
}

interface Spans {
  index: number;
  parent: number | null;
  n_prompt: number;
  n_known: number;
  n_response: number;
  reward: number | null;
  versions: [number, number, number][];
  finish_reason: string | null;
  log_prob: number | null;
  branch: string | null;
  dialect: string | null;
  tool_calls: number | null;
  timing: { began: number; waited_s: number; engine_s: number } | null;
  advantages: number | null;
  weights: number | null;
  messages?: Row[];
}

interface Shown {
  trajectory_uid: string;
  prompt_uid: string;
  channel: string;
  attempt: number;
  metadata: Row;
  reward: number | null;
  running: number;
  step: number | null;
  row: Row | null;
  archived: Row | null;
  steps: Spans[];
  branches: number[][];
}

interface Tokens {
  start: number;
  total: number;
  n_prompt: number;
  n_known: number;
  ids: number[];
  texts: string[];
  versions: (number | null)[];
  columns: Record<string, (number | null)[]>;
  pictures: { digest: string; width: number; height: number; at: number; n_tokens: number }[];
}

interface Tick {
  at: number;
  gateway: Row;
  pool: Record<string, Row> | null;
  events: Row[];
  metrics?: Row | null;
  optimizer_steps?: number;
  alerts: { key: string; severity: string; title: string; why: string; since: number; page: string; params: Params }[];
  shards?: Row;
}

// The server's live figures, from its Prometheus page.

import { call } from "./api.js";
import { byId } from "./dom.js";

const POLL_MS = 2000;
const MAX_POLL_MS = 30000;

/** Sum of the samples of each name, in Prometheus' text format. */
export function parseMetrics(text) {
  const sums = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)/.exec(line);
    if (match) {
      sums.set(match[1], (sums.get(match[1]) ?? 0) + Number(match[2]));
    }
  }
  return sums;
}

/** Asks every few seconds while the page is seen, and more seldom while nobody answers. */
export class LiveFigures {
  #timer = 0;
  #failures = 0;
  #last = null;

  start() {
    document.addEventListener("visibilitychange", () => this.#restart());
    this.#restart();
  }

  #restart() {
    clearTimeout(this.#timer);
    this.#last = null; // a rate over the time unseen would say nothing
    if (!document.hidden) {
      this.#poll();
    }
  }

  async #poll() {
    clearTimeout(this.#timer);
    try {
      this.#show(parseMetrics(await (await call("metrics")).text()));
      this.#failures = 0;
    } catch {
      this.#failures += 1;
      this.#last = null;
      this.#clear();
    }
    if (!document.hidden) {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#poll(), Math.min(MAX_POLL_MS, POLL_MS * 2 ** this.#failures));
    }
  }

  #show(sums) {
    const now = performance.now();
    const figure = (name) => sums.get(`vllm:${name}`) ?? sums.get(`canter:${name}`) ?? 0; // as --metrics-prefix has it
    const tokens = figure("generation_tokens_total");
    const cache = figure("kv_cache_usage_perc");
    const speed = this.#last && tokens >= this.#last.tokens ? (1000 * (tokens - this.#last.tokens)) / (now - this.#last.now) : 0;
    this.#last = { now, tokens };
    setFigure("running", figure("num_requests_running"));
    setFigure("waiting", figure("num_requests_waiting"));
    setFigure("cache", `${(100 * cache).toFixed(cache && cache < 0.1 ? 1 : 0)} %`);
    setFigure("speed", speed.toFixed(speed && speed < 10 ? 1 : 0));
    byId("live").querySelector("meter").value = cache;
  }

  #clear() {
    for (const name of ["running", "waiting", "cache", "speed"]) {
      setFigure(name, "–");
    }
  }
}

function setFigure(name, value) {
  byId("live").querySelector(`[data-figure=${name}]`).textContent = String(value);
}

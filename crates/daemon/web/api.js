// Requests to the daemon: the token, problems (RFC 9457), and the stream of events.
//
// A request that is answered with 401 waits for a token and is sent again. EventSource cannot send headers, so the stream
// is read from a fetch.

const TOKEN = "freestone-token";
const PREFIX = "/v1";
const REQUEST_TIMEOUT_MS = 30_000; // a daemon that is busy for longer is unusable
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15_000;

let askForToken = async () => { throw new Error("a token is required"); };
let asking = null;

/** An answer that is an error, or none at all (status 0). */
export class ApiError extends Error {
  constructor(status, kind, text) {
    super(text);
    this.status = status;
    this.kind = kind;
  }
}

/** Set the function that asks the user for a token: it gets whether one was refused, and returns the new one. */
export function onTokenNeeded(ask) {
  askForToken = ask;
}

/** Take the token from the address `#token=…` and remove it there, so that no history or copied address has it. */
export function takeTokenFromAddress() {
  const match = /^#token=([^&]+)/.exec(location.hash);
  if (!match) return;
  sessionStorage.setItem(TOKEN, decodeURIComponent(match[1]));
  history.replaceState(null, "", `${location.pathname}${location.search}#/`);
}

/** Whether the tab has a token; a listener without tokens takes none. */
export const hasToken = () => sessionStorage.getItem(TOKEN) !== null;

/** Forget the token, and all that the page has read with it. */
export function forgetToken() {
  sessionStorage.removeItem(TOKEN);
  location.reload();
}

function headers(token, body) {
  const all = { Accept: "application/json" };
  if (token) all.Authorization = `Bearer ${token}`;
  if (body !== undefined) {
    all["Content-Type"] = "application/json";
    all.Prefer = "respond-async"; // a long request becomes a job
  }
  return all;
}

async function problem(response) {
  let detail = `the daemon answered ${response.status}`;
  let kind = "";
  try {
    const said = await response.json();
    detail = said.detail || said.title || detail;
    kind = said.type || "";
  } catch { /* no problem document: the status must do */ }
  if (response.status === 403) detail = `The role of your token does not allow this. ${detail}`;
  return new ApiError(response.status, kind, detail);
}

async function renewToken(refused) {
  // Another request may have got a new one in the meantime.
  if (sessionStorage.getItem(TOKEN) !== refused) return;
  asking ??= askForToken(refused !== null).then((token) => sessionStorage.setItem(TOKEN, token)).finally(() => { asking = null; });
  await asking;
}

async function send(method, address, body, accept, signal) {
  for (;;) {
    const token = sessionStorage.getItem(TOKEN);
    let response;
    try {
      response = await fetch(address, {
        method, signal, headers: { ...headers(token, body), ...(accept && { Accept: accept }) }, cache: "no-store",
        body: body === undefined ? undefined : JSON.stringify(body),
      });
    } catch (error) {
      if (signal?.aborted && signal.reason?.name !== "TimeoutError") throw error;
      throw new ApiError(0, "unreachable", "The daemon is unreachable.");
    }
    if (response.status !== 401) {
      if (!response.ok) throw await problem(response);
      return response;
    }
    await renewToken(token);
    // The user's time does not count for the request.
    if (signal?.aborted) signal = AbortSignal.timeout(REQUEST_TIMEOUT_MS);
  }
}

/** Send a request; returns the answer's JSON, or nothing where it has none. Throws an ApiError. */
export async function request(method, path, body) {
  const response = await send(method, PREFIX + path, body, undefined, AbortSignal.timeout(REQUEST_TIMEOUT_MS));
  try {
    const text = await response.text();
    return text ? JSON.parse(text) : null;
  } catch {
    throw new ApiError(0, "unreachable", "The daemon's answer is incomplete.");
  }
}

/** The answer's text, so that an unchanged one need not be parsed. */
export async function requestText(path) {
  const response = await send("GET", PREFIX + path, undefined, undefined, AbortSignal.timeout(REQUEST_TIMEOUT_MS));
  try {
    return await response.text();
  } catch {
    throw new ApiError(0, "unreachable", "The daemon's answer is incomplete.");
  }
}

/** Show an answer in a tab of its own. A link could not: it sends no token. */
export async function openInTab(address) {
  const tab = open("", "_blank"); // at once: a browser blocks tabs that do not come from a click
  if (!tab) throw new ApiError(0, "blocked", "The browser blocks new tabs of this page.");
  try {
    const response = await send("GET", address, undefined, "*/*", AbortSignal.timeout(REQUEST_TIMEOUT_MS));
    const type = response.headers.get("Content-Type").startsWith("application/json") ? "application/json" : "text/plain;charset=utf-8";
    const url = URL.createObjectURL(new Blob([await response.text()], { type }));
    tab.location = url;
    setTimeout(() => URL.revokeObjectURL(url), REQUEST_TIMEOUT_MS); // the tab has read it
  } catch (error) {
    tab.close();
    throw error;
  }
}

export const get = (path) => request("GET", path);
export const post = (path, body) => request("POST", path, body);
export const put = (path, body) => request("PUT", path, body);
export const patch = (path, body) => request("PATCH", path, body);
export const remove = (path) => request("DELETE", path);
/** A name within a path. */
export const segment = (name) => encodeURIComponent(name);

/** Call `each` with the data of every message of the text/event-stream. Returns when the stream ends. */
export async function readStream(body, each) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "" && data.length > 0) {
        each(data.join("\n"));
        data = [];
      } else if (line.startsWith("data:")) {
        data.push(line.slice(5).replace(/^ /, ""));
      }
    }
  }
}

const sleep = (ms, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, ms);
  signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
});

/**
 * Follow the stream of events for as long as the page lives: `onOpen` each time it is connected, `onEvent` with each event,
 * `onLost` each time it has ended. Returns a function that reconnects at once.
 */
export function followEvents({ onOpen, onEvent, onLost }) {
  let current = new AbortController();
  let pause_ms = FIRST_PAUSE_MS;
  const follow = async () => {
    for (;;) {
      current = new AbortController();
      try {
        const response = await send("GET", `${PREFIX}/events/stream`, undefined, "text/event-stream", current.signal);
        pause_ms = FIRST_PAUSE_MS;
        onOpen();
        await readStream(response.body, (data) => onEvent(JSON.parse(data)));
      } catch { /* lost: what follows is the same as for an end */ }
      onLost();
      const pause = new AbortController();
      current = pause;
      // Pages that lost the same daemon reconnect at different times.
      await sleep(pause_ms * (0.75 + Math.random() / 2), pause.signal);
      pause_ms = Math.min(pause_ms * 2, LONGEST_PAUSE_MS);
    }
  };
  follow();
  return () => current.abort();
}

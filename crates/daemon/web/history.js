// The last two minutes of every volume and member: rates and mean latencies from the differences of cumulative counters.
//
// One ring of times for all, and a ring of numbers for each series. NaN is "not known": no sample, or no request that a
// latency could be of.

/** Seconds that are kept and drawn. */
const SECONDS = 120;
const SLOTS = SECONDS + 4; // samples come a little early or late
const LONGEST_GAP_NS = 5e9; // a rate over more than this is no rate of now

/** The numbers of a series, in this order. */
export const METRICS = ["readIops", "writeIops", "readBandwidth", "writeBandwidth", "readLatency", "writeLatency", "requestTime", "waits", "groupWaits"];
const WIDTH = METRICS.length;
const COUNTERS = ["reads", "writes", "read_bytes", "written_bytes", "read_sum_ns", "write_sum_ns", "reads_timed", "writes_timed", "throttled_ns", "group_throttled_ns"];
const LIMITED_S = 60; // of the share of waits for limits

/** The key of all volumes together; no volume can have an empty name. */
export const ALL = "";

class Series {
  constructor() {
    this.values = new Float64Array(SLOTS * WIDTH).fill(NaN);
    this.before = null;
    this.in_flight = 0;
    this.errors = 0;
  }

  put(slot, differences, seconds) {
    const at = slot * WIDTH;
    const values = this.values;
    if (differences === null || differences.some((difference) => difference < 0)) {
      values.fill(NaN, at, at + WIDTH);
      return;
    }
    const [reads, writes, read_bytes, written_bytes, read_ns, write_ns, reads_timed, writes_timed, waits_ns, group_waits_ns] = differences;
    values[at] = reads / seconds;
    values[at + 1] = writes / seconds;
    values[at + 2] = read_bytes / seconds;
    values[at + 3] = written_bytes / seconds;
    values[at + 4] = reads_timed > 0 ? read_ns / reads_timed : NaN;
    values[at + 5] = writes_timed > 0 ? write_ns / writes_timed : NaN;
    values[at + 6] = read_ns + write_ns;
    values[at + 7] = waits_ns;
    values[at + 8] = group_waits_ns;
  }
}

export class History {
  seconds = SECONDS;
  said = "in the last two minutes";
  ticks = ["2 min ago", "1 min ago", "now"];

  constructor() {
    this.times = new Float64Array(SLOTS).fill(NaN);
    this.newest = 0;
    this.volumes = new Map();
    this.members = new Map();
  }

  /** Take an answer of /v1/samples. Returns whether it is a new one. */
  add(sample) {
    const before_ns = this.times[this.newest];
    if (sample.at_ns === before_ns) return false;
    const elapsed_ns = sample.at_ns - before_ns;
    this.newest = (this.newest + 1) % SLOTS;
    this.times[this.newest] = sample.at_ns;
    const isRate = elapsed_ns > 0 && elapsed_ns < LONGEST_GAP_NS;
    const total = this.addAll(this.volumes, sample.volumes, elapsed_ns / 1e9, isRate);
    this.addTotal(total, sample.volumes, elapsed_ns / 1e9, isRate);
    this.addAll(this.members, sample.members ?? {}, elapsed_ns / 1e9, isRate);
    return true;
  }

  addAll(all, counters, seconds, isRate) {
    const total = new Array(COUNTERS.length).fill(0);
    for (const key of all.keys()) if (key !== ALL && !(key in counters)) all.delete(key);
    for (const [key, now] of Object.entries(counters)) {
      let series = all.get(key);
      if (!series) all.set(key, series = new Series());
      const before = series.before;
      const differences = before && isRate ? COUNTERS.map((name) => now[name] - before[name]) : null;
      series.put(this.newest, differences, seconds);
      if (differences?.every((difference) => difference >= 0)) differences.forEach((difference, i) => { total[i] += difference; });
      series.before = now;
      series.in_flight = now.in_flight;
      series.errors = now.errors;
    }
    return total;
  }

  addTotal(differences, counters, seconds, isRate) {
    let series = this.volumes.get(ALL);
    if (!series) this.volumes.set(ALL, series = new Series());
    series.put(this.newest, isRate ? differences : null, seconds);
    series.in_flight = 0;
    series.errors = 0;
    for (const now of Object.values(counters)) {
      series.in_flight += now.in_flight;
      series.errors += now.errors;
    }
  }

  /** The newest number of a series; NaN when there is none. */
  now(series, metric) {
    return series ? series.values[this.newest * WIDTH + metric] : NaN;
  }

  /** The newest numbers of reads and of writes together: of `metric` and the one behind it. */
  together(series, metric) {
    const [reads, writes] = [this.now(series, metric), this.now(series, metric + 1)];
    return Number.isNaN(reads) ? writes : Number.isNaN(writes) ? reads : reads + writes;
  }

  /** The mean latency of the newest reads and writes of all these series; NaN without a request. */
  meanLatency(all) {
    let requests = 0;
    let time = 0;
    for (const series of all) {
      for (const kind of [0, 1]) {
        const rate = this.now(series, kind);
        const latency = this.now(series, kind + 4);
        if (!(rate > 0) || Number.isNaN(latency)) continue;
        requests += rate;
        time += rate * latency;
      }
    }
    return requests > 0 ? time / requests : NaN;
  }

  /** The part of the request time of the last minute that was waiting for limits, and the part for those of a group; NaN without a request. */
  limited(series) {
    const [time, waits, ofGroup] = [6, 7, 8].map((metric) => {
      let sum = 0;
      this.forEach(series, metric, (age_s, value) => { if (age_s < LIMITED_S && !Number.isNaN(value)) sum += value; });
      return sum;
    });
    // A wait counts when it ends, the time of its request when that ends.
    const part = (ns) => (time > 0 || ns > 0 ? Math.min(ns / time, 1) : NaN);
    return { all: part(waits), ofGroup: part(ofGroup) };
  }

  /** Call `each(age in seconds, value)` from the oldest to the newest number of the last two minutes. */
  forEach(series, metric, each) {
    const newest_ns = this.times[this.newest];
    for (let i = 1; i <= SLOTS; i += 1) {
      const slot = (this.newest + i) % SLOTS;
      const age_s = (newest_ns - this.times[slot]) / 1e9;
      if (age_s <= SECONDS) each(age_s, series ? series.values[slot * WIDTH + metric] : NaN);
    }
  }
}

const SHORTEST_MS = 2_000; // answers that events cause come close to each other

/** Requests and bytes a second of each export, from the counters of two answers of /v1/exports. */
export class ExportRates {
  constructor() {
    this.counters = new Map(); // of the last answer that counts
    this.at_ms = NaN;
    this.rates = new Map();
  }

  add(exports, now_ms) {
    const elapsed_s = (now_ms - this.at_ms) / 1e3;
    if (elapsed_s * 1e3 < SHORTEST_MS) return;
    const before = this.counters;
    this.counters = new Map();
    this.rates = new Map();
    this.at_ms = now_ms;
    for (const { name, traffic } of exports) {
      if (!traffic) continue;
      const now = [traffic.reads + traffic.writes, traffic.read_bytes + traffic.written_bytes];
      this.counters.set(name, now);
      const [requests, bytes] = now.map((number, i) => number - (before.get(name)?.[i] ?? NaN));
      // An export that was started again counts from 0.
      if (requests >= 0 && bytes >= 0) this.rates.set(name, { iops: requests / elapsed_s, bytes_per_s: bytes / elapsed_s });
    }
  }

  /** The rates of an export; NaN while they are not known. */
  of(name) {
    return this.rates.get(name) ?? { iops: NaN, bytes_per_s: NaN };
  }
}

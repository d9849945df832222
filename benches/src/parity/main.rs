//! Speed of parity, compared with ISA-L, a plain loop, and the read speed of this machine.
//!
//! Each round measures every contender once, so that a drift of the machine affects all equally.
//! Prints gigabytes of data per second of one core's time: the median of the rounds with its
//! spread, and ratios within each round.

mod isal;
#[cfg(test)]
mod tests;

use benches::memory::{self, Memory, cpu_seconds};
use clap::Parser;
use isal::{Isal, Tables};
use raid::parity::Decoder;
use raid::{Code, Matrix};
use std::collections::BTreeMap;

/// More than any cache of a core or its neighbours.
const POOL_BYTES: usize = 512 << 20;
/// Bytes between two readings of the clock.
const CLOCK_BYTES: usize = 1 << 20;
const GEOMETRIES: [(usize, usize); 7] = [(4, 1), (8, 1), (23, 1), (8, 2), (22, 2), (8, 3), (21, 3)];
/// Geometries that lose as many data strips as they have parities.
const RECOVERED: [(usize, usize); 3] = [(8, 2), (22, 2), (21, 3)];
const SIZES: [(usize, bool, &str); 3] =
    [(4 << 10, false, "4K hot"), (64 << 10, false, "64K hot"), (1 << 20, true, "1M cold")];

const OURS: &str = "freestone";
const ISAL: &str = "ISA-L";
const PLAIN: &str = "plain loop";
const READ: &str = "read";

/// Command line.
#[derive(Parser)]
struct Args {
    /// Print a line of JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Number of rounds.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Milliseconds for each contender and round.
    #[arg(long, default_value_t = 15)]
    ms: u32,
    /// Only this geometry, such as 8+2.
    #[arg(long)]
    only: Option<String>,
    /// Only this size: 4K, 64K or 1M.
    #[arg(long)]
    size: Option<String>,
    /// Instructions to use instead of the processor's best; with avx2, ISA-L uses AVX2 too.
    #[arg(long)]
    instructions: Option<String>,
}

/// A geometry with its prepared code. With a decoder, the sources are the decoder's and the targets
/// are the first data strips, which are lost.
struct Shape {
    data: usize,
    parity: usize,
    code: Code,
    decoder: Option<Decoder>,
    tables: Option<Tables>,
}

/// The strips of a stripe in the form that each contender needs.
struct Strips<'a> {
    all: Vec<*mut u8>,
    sources: Vec<&'a [u8]>,
    targets: Vec<&'a mut [u8]>,
}

/// Gigabytes of data per second in each round, by contender.
type Speeds = BTreeMap<&'static str, Vec<f64>>;

fn main() {
    let args = Args::parse();
    if let Some(name) = args.instructions.as_ref().filter(|name| !raid::parity::use_instructions(name)) {
        eprintln!("parity: processor without {name}");
        std::process::exit(1);
    }
    let isal = Isal::load(raid::parity::instructions() == "avx2");
    if isal.is_none() {
        eprintln!("parity: no ISA-L to compare with: install libisal2 (tests/lab/setup does)");
    }
    let pool = Memory::new(POOL_BYTES);
    let mut cases = Vec::new();
    let encoded = GEOMETRIES.map(|shape| (shape, false));
    let recovered = RECOVERED.map(|shape| (shape, true));
    for ((data, parity), is_lost) in encoded.into_iter().chain(recovered) {
        let shape = Shape::new(data, parity, is_lost, isal);
        let name = format!("{data}+{parity}{}", if is_lost { " recover" } else { "" });
        if args.only.as_ref().is_some_and(|only| *only != name) {
            continue;
        }
        for (len, is_cold, size) in SIZES {
            if args.size.as_ref().is_some_and(|only| !size.starts_with(only.as_str())) {
                continue;
            }
            cases.push((name.clone(), size, measure(&shape, isal, &pool, (len, is_cold), &args)));
        }
    }
    if args.json { print_json(&cases) } else { print_table(&cases) }
}

/// Measures every contender in turn, for the requested number of rounds.
fn measure(
    shape: &Shape,
    isal: Option<Isal>,
    pool: &Memory,
    (len, is_cold): (usize, bool),
    args: &Args,
) -> Speeds {
    let stripe_bytes = (shape.data + shape.parity) * len;
    let contenders =
        [Some(OURS), isal.map(|_| ISAL), (shape.parity == 1).then_some(PLAIN), is_cold.then_some(READ)];
    let seconds = f64::from(args.ms) / 1e3;
    let mut speeds = Speeds::new();
    let strips = shape.data + shape.parity;
    let mut at = 0;
    for _ in 0..args.rounds {
        for contender in contenders.into_iter().flatten() {
            let mut speed = |work: &dyn Fn(&mut Strips<'_>)| {
                let mut stripe = Strips::new(shape, pool.strips(at, strips, len), len);
                work(&mut stripe);
                let (start, mut bytes) = (cpu_seconds(), 0);
                let mut now = start;
                while now - start < seconds {
                    for _ in 0..CLOCK_BYTES.div_ceil(stripe_bytes) {
                        if is_cold {
                            at = if at + 2 * stripe_bytes > POOL_BYTES { 0 } else { at + stripe_bytes };
                            stripe = Strips::new(shape, pool.strips(at, strips, len), len);
                        }
                        work(&mut stripe);
                        bytes += shape.data * len;
                    }
                    now = cpu_seconds();
                }
                bytes as f64 / (now - start) / 1e9
            };
            let found = match (contender, isal) {
                (ISAL, Some(isal)) => speed(&|stripe| run_isal(shape, isal, &mut stripe.all, len)),
                (PLAIN, _) => speed(&|stripe| memory::plain_sum(&stripe.sources, stripe.targets[0])),
                (READ, _) => [1, 4]
                    .map(|at_once| speed(&|stripe| memory::read(&stripe.sources, at_once)))
                    .into_iter()
                    .fold(0.0, f64::max),
                _ => speed(&|stripe| shape.run(stripe)),
            };
            speeds.entry(contender).or_default().push(found);
        }
    }
    speeds
}

impl Shape {
    fn new(data: usize, parity: usize, is_lost: bool, isal: Option<Isal>) -> Shape {
        let code = Code::new(Matrix::Powers, data, parity).expect("a code of three parities at most");
        let lost: Vec<usize> = (0..parity).collect();
        let decoder = is_lost.then(|| code.decoder(&lost, u64::MAX).expect("as many as there are parities"));
        let cell = |target, source| match &decoder {
            Some(decoder) => decoder.coefficient(target, source),
            None => code.coefficient(target, source),
        };
        let rows: Vec<u8> = (0..parity * data).map(|n| cell(n / data, n % data)).collect();
        Shape { data, parity, tables: isal.map(|isal| isal.tables(&rows, data)), decoder, code }
    }

    fn run(&self, stripe: &mut Strips<'_>) {
        match &self.decoder {
            Some(decoder) => decoder.decode(&stripe.sources, &mut stripe.targets),
            None => self.code.encode(&stripe.sources, &mut stripe.targets),
        }
    }
}

impl Strips<'_> {
    fn new(shape: &Shape, all: Vec<*mut u8>, len: usize) -> Self {
        let (data, parity) = all.split_at(shape.data);
        // SAFETY: strips do not overlap and lie in the pool, which outlives the measurement; one
        // contender uses them at a time.
        let (sources, targets) = unsafe {
            (
                data.iter().map(|strip| std::slice::from_raw_parts(strip.cast_const(), len)).collect(),
                parity.iter().map(|strip| std::slice::from_raw_parts_mut(*strip, len)).collect(),
            )
        };
        Strips { all, sources, targets }
    }
}

fn run_isal(shape: &Shape, isal: Isal, strips: &mut [*mut u8], len: usize) {
    // SAFETY: strips of the pool, as in `Strips`.
    unsafe {
        match &shape.tables {
            Some(tables) if shape.parity == 3 || shape.decoder.is_some() => {
                let (sources, targets) = strips.split_at_mut(shape.data);
                isal.encode(tables, sources, targets, len);
            }
            _ => isal.generate(strips, shape.parity, len),
        }
    }
}

fn print_json(cases: &[(String, &str, Speeds)]) {
    let cases: Vec<_> = cases
        .iter()
        .map(|(shape, size, speeds)| serde_json::json!({"shape": shape, "size": size, "gb_s": speeds}))
        .collect();
    println!("{}", serde_json::json!({"instructions": raid::parity::instructions(), "cases": cases}));
}

fn print_table(cases: &[(String, &str, Speeds)]) {
    println!("Parity by {}, GB of data a second: median (lowest..highest)\n", raid::parity::instructions());
    println!("| shape | size | {OURS} | {ISAL} | {PLAIN} | {READ} | / ISA-L | / plain | / read |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for (shape, size, speeds) in cases {
        let median = |name| speeds.get(name).map_or_else(String::new, |values| spread(values, 1));
        let ratio = |name| {
            let ratios = speeds.get(name).map(|theirs| {
                speeds[OURS].iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect::<Vec<f64>>()
            });
            ratios.map_or_else(String::new, |ratios| spread(&ratios, 2))
        };
        let speeds = [OURS, ISAL, PLAIN, READ].map(median).join(" | ");
        println!("| {shape} | {size} | {speeds} | {} |", [ISAL, PLAIN, READ].map(ratio).join(" | "));
    }
}

/// The median of the values and how far they lie apart.
fn spread(values: &[f64], digits: usize) -> String {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let (lowest, highest) = (values[0], values[values.len() - 1]);
    format!("{:.digits$} ({lowest:.digits$}..{highest:.digits$})", values[values.len() / 2])
}

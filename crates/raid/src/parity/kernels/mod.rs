//! The loops over bytes that make parity, in the best instructions that this processor has.
//!
//! ```text
//!   Job (any sources, any targets, any length)
//!     └ blocks of 2 KiB: every sum stays in the L1 cache until it is whole
//!         └ groups of targets: plain sum | powers of 2 by doubling | products by tables
//!             └ Pass: a few sources at a time, whole cache lines          pass.rs, over the vectors of avx2.rs, …
//! ```
//!
//! A wide stripe read line by line from all members at once loses to the cache: strips are aligned to 4 KiB, so their
//! lines share one set of the 8-way L1. Hence few sources a pass, and a block small enough for the sums to stay.
//!
//! Nothing here is shared but tables that never change: any number of cores may work at once.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod gfni;
#[cfg(target_arch = "aarch64")]
mod neon;
mod pass;
mod portable;
#[cfg(test)]
mod tests;

use arrayvec::ArrayVec;
use pass::{MAX_SOURCES, MAX_TARGETS, Pass};
use std::mem::MaybeUninit;
use std::sync::OnceLock;

/// Bytes of each strip that are worked on until their sums are whole.
const BLOCK_BYTES: usize = 2048;
/// Data from which targets are written past the caches: more than a core's own cache holds.
const STREAM_BYTES: usize = 4 << 20;
/// Most strips on either side of a job: those of a stripe.
const MAX_STRIPS: usize = 64;
/// The longest step of any kernels.
const MAX_STEP: usize = 128;

/// A loop over whole steps. To be called as [`Pass`] says.
type Loop = unsafe fn(&Pass<'_>);

/// The loops in one set of instructions.
pub(super) struct Kernels {
    /// The instructions.
    pub name: &'static str,
    /// Bytes that every loop works in.
    step: usize,
    sum: Loop,
    powers2: Loop,
    powers3: Loop,
    products: Loop,
    sum_and_products: Loop,
}

/// Defines `KERNELS` of a vector type: each loop as a function with the instructions enabled.
macro_rules! kernels {
    ($vector:ty, $name:literal, $($features:literal,)? step $step:literal:
        sum $sum:literal, powers $powers:literal, products $products:literal) => {
        pub(super) static KERNELS: Kernels = {
            use super::pass::{self, Pass};
            $(#[target_feature(enable = $features)])?
            unsafe fn sum(pass: &Pass<'_>) {
                // SAFETY: the caller keeps the contract of `Pass`; so in the others.
                unsafe { pass::sum::<$vector, $sum>(pass) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn powers2(pass: &Pass<'_>) {
                // SAFETY: as above.
                unsafe { pass::powers2::<$vector, $powers>(pass) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn powers3(pass: &Pass<'_>) {
                // SAFETY: as above.
                unsafe { pass::powers3::<$vector, $powers>(pass) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn products(pass: &Pass<'_>) {
                // SAFETY: as above.
                unsafe { pass::products_of_any::<$vector, $products, false>(pass) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn sum_and_products(pass: &Pass<'_>) {
                // SAFETY: as above.
                unsafe { pass::products_of_any::<$vector, $products, true>(pass) }
            }
            const BYTES: usize = <$vector as super::pass::Vector>::BYTES;
            const { assert!($step % ($sum * BYTES) == 0 && $step % ($powers * BYTES) == 0) };
            const { assert!($step % ($products * BYTES) == 0 && $step <= super::MAX_STEP) };
            Kernels { name: $name, step: $step, sum, powers2, powers3, products, sum_and_products }
        };
    };
}
use kernels;

/// Sums to be made: each target is set to, or increased by, its row of coefficients times the sources.
pub(super) struct Job<'a> {
    /// Row by row: target `t` of source `s` at `t * sources + s`.
    pub coefficients: &'a [u8],
    /// The rows are 1, 2^s, 4^s (as many as there are targets), or at least begin so.
    pub is_powers: bool,
    /// Targets are added to, not set.
    pub is_added: bool,
}

/// What makes a group of targets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Sum,
    Powers,
    Products,
    SumAndProducts,
}

/// The strips of a job by their addresses.
struct Strips<'a> {
    sources: &'a [*const u8],
    targets: &'a [*mut u8],
    len: usize,
}

impl Kernels {
    /// The best that this processor has.
    pub fn best() -> &'static Kernels {
        static BEST: OnceLock<&'static Kernels> = OnceLock::new();
        BEST.get_or_init(|| Kernels::available()[0])
    }

    /// All that this processor has, best first.
    pub fn available() -> ArrayVec<&'static Kernels, 4> {
        let mut found = ArrayVec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let has_avx512 = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
            if has_avx512 && is_x86_feature_detected!("gfni") {
                found.push(&gfni::KERNELS);
            }
            if has_avx512 {
                found.push(&avx512::KERNELS);
            }
            if is_x86_feature_detected!("avx2") {
                found.push(&avx2::KERNELS);
            }
        }
        #[cfg(target_arch = "aarch64")]
        found.push(&neon::KERNELS);
        found.push(&portable::KERNELS);
        found
    }

    /// Does a job. Sources and targets come in the order of the coefficients.
    ///
    /// # Panics
    /// When lengths differ, or there are more strips than a stripe has, or not as many as coefficients.
    pub fn run<'s, 't>(
        &self,
        job: &Job<'_>,
        sources: impl Iterator<Item = &'s [u8]>,
        targets: impl Iterator<Item = &'t mut [u8]>,
    ) {
        let mut len = None;
        let mut check = |bytes: usize| assert_eq!(*len.get_or_insert(bytes), bytes, "strips of one length");
        let sources: ArrayVec<*const u8, MAX_STRIPS> =
            sources.inspect(|bytes| check(bytes.len())).map(<[u8]>::as_ptr).collect();
        let targets: ArrayVec<*mut u8, MAX_STRIPS> =
            targets.inspect(|bytes| check(bytes.len())).map(<[u8]>::as_mut_ptr).collect();
        assert_eq!(sources.len() * targets.len(), job.coefficients.len(), "a coefficient for each pair");
        let strips = Strips { sources: &sources, targets: &targets, len: len.unwrap_or(0) };
        if !sources.is_empty() {
            // SAFETY: the slices are valid for `len` bytes, and the borrow checker keeps targets apart.
            unsafe { self.run_all(job, &strips) }
        } else if !job.is_added {
            // SAFETY: as above.
            targets.iter().for_each(|target| unsafe { target.write_bytes(0, strips.len) });
        }
    }

    /// # Safety
    /// Every pointer is valid for `len` bytes and targets overlap nothing.
    unsafe fn run_all(&self, job: &Job<'_>, strips: &Strips<'_>) {
        let groups = group(job, strips.sources.len(), strips.targets.len());
        let is_large = (strips.sources.len() + strips.targets.len()) * strips.len >= STREAM_BYTES;
        let is_streamed =
            is_large && !job.is_added && strips.targets.iter().all(|target| target.addr() % 64 == 0);
        let is_one_pass = groups.len() == 1 && strips.sources.len() <= MAX_SOURCES;
        let block = if is_one_pass { strips.len.max(1) } else { BLOCK_BYTES };
        for at in (0..strips.len).step_by(block) {
            let len = block.min(strips.len - at);
            let mut first = 0;
            for (kind, count) in &groups {
                // SAFETY: the block lies in the strips.
                unsafe { self.run_group(job, strips, (*kind, first, *count), (at, len), is_streamed) };
                first += count;
            }
        }
    }

    /// One block of one group of targets, in as few passes as are allowed, of like size. From the last source down, as
    /// powers need.
    ///
    /// # Safety
    /// As for [`Kernels::run_all`]; the block lies in the strips, and is a whole strip or at most [`BLOCK_BYTES`].
    unsafe fn run_group(
        &self,
        job: &Job<'_>,
        strips: &Strips<'_>,
        (kind, first, count): (Kind, usize, usize),
        (at, len): (usize, usize),
        is_streamed: bool,
    ) {
        let sources = strips.sources.len();
        let passes = sources.div_ceil(MAX_SOURCES);
        // SAFETY: the block lies in the strips.
        let targets: ArrayVec<*mut u8, MAX_TARGETS> =
            strips.targets[first..first + count].iter().map(|target| unsafe { target.add(at) }).collect();
        // Lines that are streamed cannot be read back from the cache: sums wait here until they are whole.
        let mut scratch = MaybeUninit::<Scratch>::uninit();
        let sums: ArrayVec<*mut u8, MAX_TARGETS> = if is_streamed && passes > 1 {
            // SAFETY: `count` is at most MAX_TARGETS.
            (0..count).map(|t| unsafe { scratch.as_mut_ptr().cast::<u8>().add(t * BLOCK_BYTES) }).collect()
        } else {
            targets.clone()
        };
        let begun: ArrayVec<*const u8, MAX_TARGETS> = sums.iter().map(|sum| sum.cast_const()).collect();
        for pass in (0..passes).rev() {
            let (from, to) = (sources * pass / passes, sources * (pass + 1) / passes);
            let (is_first, is_last) = (pass + 1 == passes, pass == 0);
            // SAFETY: the block lies in the strips.
            let read: ArrayVec<*const u8, MAX_SOURCES> =
                strips.sources[from..to].iter().map(|source| unsafe { source.add(at) }).collect();
            let pass = Pass {
                sources: &read,
                targets: if is_last { &targets } else { &sums },
                sums: if is_first && !job.is_added { &[] } else { &begun },
                coefficients: &job.coefficients[first * sources + from..],
                stride: sources,
                len,
                is_streamed: is_last && is_streamed,
            };
            // SAFETY: everything that `Pass` asks for but the length, which `run_pass` sees to.
            unsafe { self.run_pass(kind, &pass) };
        }
    }

    /// A pass of any length: what is left after whole steps is worked on in copies.
    ///
    /// # Safety
    /// As for [`Pass`], but for its length.
    unsafe fn run_pass(&self, kind: Kind, pass: &Pass<'_>) {
        let run = match kind {
            Kind::Sum => self.sum,
            Kind::Powers if pass.targets.len() == 2 => self.powers2,
            Kind::Powers => self.powers3,
            Kind::Products => self.products,
            Kind::SumAndProducts => self.sum_and_products,
        };
        let rest = pass.len % self.step;
        let whole = pass.len - rest;
        if whole > 0 {
            // SAFETY: the contract of `Pass`.
            unsafe { run(&Pass { len: whole, ..*pass }) };
        }
        if rest == 0 {
            return;
        }
        let (mut from, mut to) = ([[0u8; MAX_STEP]; MAX_SOURCES], [[0u8; MAX_STEP]; MAX_TARGETS]);
        for (copy, source) in from.iter_mut().zip(pass.sources) {
            // SAFETY: the bytes from `whole` on are the last of the source, fewer than a step.
            unsafe { source.add(whole).copy_to_nonoverlapping(copy.as_mut_ptr(), rest) };
        }
        for (copy, sum) in to.iter_mut().zip(pass.sums) {
            // SAFETY: as above.
            unsafe { sum.add(whole).copy_to_nonoverlapping(copy.as_mut_ptr(), rest) };
        }
        let sources: ArrayVec<*const u8, MAX_SOURCES> = from.iter().map(|copy| copy.as_ptr()).collect();
        let targets: ArrayVec<*mut u8, MAX_TARGETS> = to.iter_mut().map(|copy| copy.as_mut_ptr()).collect();
        let sums: ArrayVec<*const u8, MAX_TARGETS> = targets.iter().map(|copy| copy.cast_const()).collect();
        let copied = Pass {
            sources: &sources[..pass.sources.len()],
            targets: &targets[..pass.targets.len()],
            sums: if pass.sums.is_empty() { &[] } else { &sums },
            len: self.step,
            is_streamed: false,
            ..*pass
        };
        // SAFETY: the copies are as long as a step.
        unsafe { run(&copied) };
        for (copy, target) in to.iter().zip(pass.targets) {
            // SAFETY: as above.
            unsafe { copy.as_ptr().copy_to_nonoverlapping(target.add(whole), rest) };
        }
    }
}

/// Room for the sums of a block.
#[repr(align(64))]
#[expect(dead_code, reason = "reached by address")]
struct Scratch([[u8; BLOCK_BYTES]; MAX_TARGETS]);

/// How targets are made together: the kind and the number of targets of each group, in order.
fn group(job: &Job<'_>, sources: usize, targets: usize) -> ArrayVec<(Kind, usize), MAX_STRIPS> {
    let mut groups = ArrayVec::new();
    // Horner's rule would multiply what is added to.
    if job.is_powers && !job.is_added && (2..=3).contains(&targets) {
        groups.push((Kind::Powers, targets));
        return groups;
    }
    let is_sum = |t: usize| job.coefficients[t * sources..][..sources].iter().all(|c| *c == 1);
    let mut first = 0;
    while first < targets {
        let products = (first + 1..targets).take_while(|t| !is_sum(*t)).take(MAX_TARGETS - 1).count();
        groups.push(match (is_sum(first), products) {
            (true, 0) => (Kind::Sum, 1),
            (true, _) => (Kind::SumAndProducts, 1 + products),
            (false, _) => (Kind::Products, 1 + products),
        });
        first += groups.last().map_or(1, |group| group.1);
    }
    groups
}

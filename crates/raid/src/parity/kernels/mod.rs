//! The loops over bytes that compute parity, in the best instructions of this processor.
//!
//! ```text
//!   Job (any sources, any targets, any length)
//!     └ blocks of 2 KiB: every sum stays in the L1 cache until it is complete
//!         └ groups of targets: plain sum | powers of 2 by doubling | products by tables
//!             └ Pass: a few sources at a time, whole cache lines (pass.rs, vectors of avx2.rs, …)
//! ```
//!
//! A wide stripe read line by line from all members at once would thrash the cache. Strips are
//! aligned to 4 KiB, so their lines share one set of the 8-way L1. Hence a pass reads few sources,
//! and a block is small enough for the sums to stay.
//!
//! Kernels share only constant tables: any number of cores may work at once.

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

/// Bytes of each strip that are processed until their sums are complete.
const BLOCK_BYTES: usize = 2048;
/// Least bytes of a job whose targets are written past the caches: more than a core's cache holds.
const STREAM_BYTES: usize = 4 << 20;
/// Least bytes of a job whose products prefetch their sources. Plain sums of cached strips would
/// only lose time.
const FETCH_BYTES: usize = 1 << 20;
/// Distance of the prefetch.
const AHEAD_BYTES: usize = 1024;
/// Most strips on either side of a job: those of a stripe.
const MAX_STRIPS: usize = 64;
/// The longest step of any kernels.
const MAX_STEP: usize = 256;

static CHOSEN: OnceLock<&'static Kernels> = OnceLock::new();

/// A loop over whole steps, with the contract of [`Pass`].
type Loop = unsafe fn(&Pass<'_>);

/// The loops in one set of instructions.
pub(super) struct Kernels {
    /// The instructions.
    pub name: &'static str,
    /// The unit of bytes of every loop.
    step: usize,
    /// Most sources of a single pass. More sources are read `some_sources` at a time.
    most_sources: usize,
    some_sources: usize,
    sum: Loop,
    powers2: Loop,
    powers3: Loop,
    products: Loop,
    sum_and_products: Loop,
}

/// Defines `KERNELS` of a vector type: each loop as a function with the instructions enabled.
macro_rules! kernels {
    ($vector:ty, $name:literal, $($features:literal,)? step $step:literal, sources $most:literal / $some:literal:
        sum $sum:literal, powers2 $powers2:literal, powers3 $powers3:literal, products $products:literal) => {
        pub(super) static KERNELS: Kernels = {
            use super::pass::{self, Pass};
            $(#[target_feature(enable = $features)])?
            unsafe fn sum(pass: &Pass<'_>) {
                // SAFETY: the caller keeps the contract of `Pass`, as in the other functions.
                unsafe { pass::sum::<$vector, $sum>(pass) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn powers2(pass: &Pass<'_>) {
                // SAFETY: as above.
                unsafe { pass::powers2::<$vector, $powers2>(pass) }
            }
            $(#[target_feature(enable = $features)])?
            unsafe fn powers3(pass: &Pass<'_>) {
                // SAFETY: as above.
                unsafe { pass::powers3::<$vector, $powers3>(pass) }
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
            const { assert!($step % ($sum * BYTES) == 0 && $step % ($products * BYTES) == 0) };
            const { assert!($step % ($powers2 * BYTES) == 0 && $step % ($powers3 * BYTES) == 0) };
            const { assert!(($step as usize).is_power_of_two() && $step <= super::MAX_STEP) };
            Kernels {
                name: $name,
                step: $step,
                most_sources: $most,
                some_sources: $some,
                sum,
                powers2,
                powers3,
                products,
                sum_and_products,
            }
        };
    };
}
use kernels;

/// A set of sums: each target is set to, or increased by, its row of coefficients times the
/// sources.
pub(super) struct Job<'a> {
    /// Row by row: target `t` of source `s` at `t * sources + s`.
    pub coefficients: &'a [u8],
    /// The rows are, or at least begin with, 1, 2^s, 4^s (one for each target).
    pub is_powers: bool,
    /// Targets are increased, not set.
    pub is_added: bool,
}

/// The computation of a group of targets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Sum,
    Powers,
    Products,
    SumAndProducts,
}

/// Targets that are computed together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Group {
    kind: Kind,
    first: u8,
    count: u8,
}

impl Group {
    fn end(&self) -> usize {
        usize::from(self.first + self.count)
    }
}

/// The addresses of a job's strips.
struct Strips<'a> {
    sources: &'a [*const u8],
    targets: &'a [*mut u8],
    len: usize,
}

impl Strips<'_> {
    /// Total bytes of all strips.
    fn bytes(&self) -> usize {
        (self.sources.len() + self.targets.len()) * self.len
    }

    /// Distance at which sources are prefetched.
    fn ahead(&self, kind: Kind) -> usize {
        let least = if kind == Kind::Sum { STREAM_BYTES } else { FETCH_BYTES };
        if self.bytes() >= least { AHEAD_BYTES } else { 0 }
    }
}

impl Kernels {
    /// The kernels in use: the best of this processor, unless others were chosen.
    pub fn chosen() -> &'static Kernels {
        CHOSEN.get_or_init(|| Kernels::available()[0])
    }

    /// Selects the kernels with this name, if this processor has them and no others are in use.
    pub fn choose(name: &str) -> bool {
        let wanted = Kernels::available().into_iter().find(|kernels| kernels.name == name);
        wanted.is_some_and(|kernels| std::ptr::eq(*CHOSEN.get_or_init(|| kernels), kernels))
    }

    /// All kernels of this processor, best first.
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

    /// Runs a job. Sources and targets have the order of the coefficients.
    ///
    /// # Panics
    /// If lengths differ, there are more strips than a stripe has, or their number does not match
    /// the coefficients.
    pub fn run<'s, 't>(
        &self,
        job: &Job<'_>,
        sources: impl Iterator<Item = &'s [u8]>,
        targets: impl Iterator<Item = &'t mut [u8]>,
    ) {
        let mut to = ArrayVec::<*mut u8, MAX_STRIPS>::new();
        let mut len = 0;
        for bytes in targets {
            assert!(to.is_empty() || len == bytes.len(), "strips of one length");
            len = bytes.len();
            to.push(bytes.as_mut_ptr());
        }
        let mut from = ArrayVec::<*const u8, MAX_STRIPS>::new();
        for bytes in sources {
            assert!(to.is_empty() || len == bytes.len(), "strips of one length");
            from.push(bytes.as_ptr());
        }
        assert_eq!(from.len() * to.len(), job.coefficients.len(), "a coefficient for each pair");
        let strips = Strips { sources: &from, targets: &to, len };
        if !from.is_empty() {
            // SAFETY: the slices are valid for `len` bytes, and the borrow checker ensures that
            // targets do not overlap.
            unsafe { self.run_all(job, &strips) }
        } else if !job.is_added {
            // SAFETY: as above.
            to.iter().for_each(|target| unsafe { target.write_bytes(0, len) });
        }
    }

    /// # Safety
    /// Every pointer is valid for `len` bytes and targets overlap nothing.
    unsafe fn run_all(&self, job: &Job<'_>, strips: &Strips<'_>) {
        let (sources, targets) = (strips.sources.len(), strips.targets.len());
        let is_aligned = || strips.targets.iter().all(|target| target.addr().is_multiple_of(64));
        let is_streamed = strips.bytes() >= STREAM_BYTES && !job.is_added && is_aligned();
        let Some(group) = next_group(job, sources, targets, 0) else { return };
        if group.end() < targets || self.passes(sources) > 1 {
            // SAFETY: as here.
            return unsafe { self.run_blocks(job, strips, is_streamed) };
        }
        let pass = Pass {
            sources: strips.sources,
            targets: strips.targets,
            sums: if job.is_added { strips.targets } else { &[] },
            coefficients: job.coefficients,
            stride: sources,
            start: 0,
            end: strips.len,
            ahead: strips.ahead(group.kind),
            is_streamed,
        };
        // SAFETY: the contract of `Pass` holds except for the length, which `run_pass` handles.
        unsafe { self.run_pass(group.kind, &pass) }
    }

    /// Runs all groups of targets, block by block.
    ///
    /// # Safety
    /// As for [`Kernels::run_all`].
    #[inline(never)]
    unsafe fn run_blocks(&self, job: &Job<'_>, strips: &Strips<'_>, is_streamed: bool) {
        let (sources, targets) = (strips.sources.len(), strips.targets.len());
        let mut groups = ArrayVec::<Group, MAX_STRIPS>::new();
        while let Some(group) = next_group(job, sources, targets, groups.last().map_or(0, Group::end)) {
            groups.push(group);
        }
        // Streamed lines cannot be read back from the cache: sums are kept here until they are
        // complete.
        let mut aside = MaybeUninit::<Aside>::uninit();
        let aside = aside.as_mut_ptr().cast::<u8>();
        for start in (0..strips.len).step_by(BLOCK_BYTES) {
            let end = strips.len.min(start + BLOCK_BYTES);
            let aside: [*mut u8; MAX_TARGETS] =
                std::array::from_fn(|t| aside.wrapping_add(t * BLOCK_BYTES).wrapping_sub(start));
            for group in &groups {
                let targets = &strips.targets[usize::from(group.first)..group.end()];
                let sums = if is_streamed { &aside[..targets.len()] } else { targets };
                // SAFETY: the block lies in the strips.
                unsafe { self.run_group(job, strips, group, (start, end), is_streamed, sums) };
            }
        }
    }

    /// Number of passes for `sources` sources.
    fn passes(&self, sources: usize) -> usize {
        if sources <= self.most_sources { 1 } else { sources.div_ceil(self.some_sources) }
    }

    /// Runs one block of one group of targets, in the fewest passes, of similar size, and from the
    /// last source down, as powers need.
    ///
    /// # Safety
    /// As for [`Kernels::run_all`]; the block lies in the strips, and `sums` has room for it for
    /// each target.
    #[inline]
    unsafe fn run_group(
        &self,
        job: &Job<'_>,
        strips: &Strips<'_>,
        group: &Group,
        (start, end): (usize, usize),
        is_streamed: bool,
        sums: &[*mut u8],
    ) {
        let (sources, first) = (strips.sources.len(), usize::from(group.first));
        let passes = self.passes(sources);
        let targets = &strips.targets[first..group.end()];
        for pass in (0..passes).rev() {
            let (from, to) = (sources * pass / passes, sources * (pass + 1) / passes);
            let (is_first, is_last) = (pass + 1 == passes, pass == 0);
            let pass = Pass {
                sources: &strips.sources[from..to],
                targets: if is_last { targets } else { sums },
                sums: if is_first && !job.is_added { &[] } else { sums },
                coefficients: &job.coefficients[first * sources + from..],
                stride: sources,
                start,
                end,
                ahead: strips.ahead(group.kind),
                is_streamed: is_last && is_streamed,
            };
            // SAFETY: the contract of `Pass` holds except for the length, which `run_pass` handles.
            unsafe { self.run_pass(group.kind, &pass) };
        }
    }

    /// Runs a pass of any length: the rest after whole steps is processed in copies.
    ///
    /// # Safety
    /// As for [`Pass`], but for its length.
    #[inline]
    unsafe fn run_pass(&self, kind: Kind, pass: &Pass<'_>) {
        let run = match kind {
            Kind::Sum => self.sum,
            Kind::Powers if pass.targets.len() == 2 => self.powers2,
            Kind::Powers => self.powers3,
            Kind::Products => self.products,
            Kind::SumAndProducts => self.sum_and_products,
        };
        // A step is a power of two: no division.
        let rest = (pass.end - pass.start) & (self.step - 1);
        let end = pass.end - rest;
        if end > pass.start {
            // SAFETY: the contract of `Pass`.
            unsafe { run(&Pass { end, ..*pass }) };
        }
        if rest > 0 {
            // SAFETY: the contract of `Pass`; less than a step is left.
            unsafe { self.run_rest(run, &Pass { start: end, ..*pass }) };
        }
    }

    /// Runs a pass of less than a step.
    ///
    /// # Safety
    /// As for [`Pass`], but for its length.
    #[cold]
    unsafe fn run_rest(&self, run: Loop, pass: &Pass<'_>) {
        type Step = [u8; MAX_STEP];
        let (at, rest) = (pass.start, pass.end - pass.start);
        let copy = |strip: *const u8| {
            let mut step: Step = [0; MAX_STEP];
            // SAFETY: the contract of `Pass`.
            unsafe { strip.wrapping_add(at).copy_to_nonoverlapping(step.as_mut_ptr(), rest) };
            step
        };
        let from: ArrayVec<Step, MAX_SOURCES> = pass.sources.iter().map(|source| copy(*source)).collect();
        let mut to: [Step; MAX_TARGETS] =
            std::array::from_fn(|t| pass.sums.get(t).map_or([0; MAX_STEP], |sum| copy(*sum)));
        let sources: ArrayVec<*const u8, MAX_SOURCES> = from.iter().map(|step| step.as_ptr()).collect();
        let targets: [*mut u8; MAX_TARGETS] = to.each_mut().map(|step| step.as_mut_ptr());
        let copied = Pass {
            sources: &sources,
            targets: &targets[..pass.targets.len()],
            sums: &targets[..pass.sums.len()],
            start: 0,
            end: self.step,
            is_streamed: false,
            ahead: 0,
            ..*pass
        };
        // SAFETY: the copies are as long as a step.
        unsafe { run(&copied) };
        for (step, target) in to.iter().zip(pass.targets) {
            // SAFETY: the contract of `Pass`.
            unsafe { step.as_ptr().copy_to_nonoverlapping(target.wrapping_add(at), rest) };
        }
    }
}

/// Room for the sums of a block.
#[repr(align(64))]
#[expect(dead_code, reason = "reached by address")]
struct Aside([[u8; BLOCK_BYTES]; MAX_TARGETS]);

/// The next group of targets, from target `first` on.
fn next_group(job: &Job<'_>, sources: usize, targets: usize, first: usize) -> Option<Group> {
    let group = |kind, count: usize| Some(Group { kind, first: first as u8, count: count as u8 });
    // Horner's rule would also multiply the old content of the targets.
    if job.is_powers && !job.is_added && first == 0 && (1..=3).contains(&targets) {
        return group(if targets == 1 { Kind::Sum } else { Kind::Powers }, targets);
    }
    let is_sum = |t: usize| job.coefficients[t * sources..][..sources].iter().all(|c| *c == 1);
    if first == targets {
        return None;
    }
    let products = (first + 1..targets).take_while(|t| !is_sum(*t)).take(MAX_TARGETS - 1).count();
    match (is_sum(first), products) {
        (true, 0) => group(Kind::Sum, 1),
        (true, _) => group(Kind::SumAndProducts, 1 + products),
        (false, _) => group(Kind::Products, 1 + products),
    }
}

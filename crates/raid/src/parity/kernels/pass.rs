//! The inner loops, written once for the vectors of every set of instructions.
//!
//! Each loop reads a few source streams and computes whole cache lines of each target, with the
//! sums in registers. All functions are inlined into functions that enable the instructions
//! ([`kernels!`](super::kernels)).

// The safety of every loop is the contract of `Pass`.
#![allow(clippy::missing_safety_doc, clippy::undocumented_unsafe_blocks)]

/// Most sources of a pass.
pub(super) const MAX_SOURCES: usize = 64;
/// Most targets of a pass, limited by the registers for sums.
pub(super) const MAX_TARGETS: usize = 4;

/// One walk over a few sources that computes a few targets.
///
/// The caller of a loop ensures:
///
/// - Bytes `start..end` behind every pointer are valid.
/// - Targets overlap nothing but their own `sums`.
/// - There are at most [`MAX_SOURCES`] and [`MAX_TARGETS`].
/// - `end - start` is a multiple of the kernels' step.
/// - Streamed targets are aligned to 64 bytes at `start`.
/// - The processor has the instructions.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    pub sources: &'a [*const u8],
    pub targets: &'a [*mut u8],
    /// Initial values: one for each target, or none to begin with zero.
    pub sums: &'a [*mut u8],
    /// The coefficient of source `s` in target `t` at `t * stride + s`; for products only.
    pub coefficients: &'a [u8],
    pub stride: usize,
    pub start: usize,
    pub end: usize,
    /// Whether stores bypass the caches.
    pub is_streamed: bool,
    /// Bytes ahead of the loop that sources are prefetched; 0 for cached sources.
    pub ahead: usize,
}

/// A vector of bytes over GF(2^8).
pub(super) trait Vector: Copy {
    const BYTES: usize;
    /// A vector, prepared for the multiplication with several coefficients.
    type Split: Copy;
    /// A coefficient, prepared for the multiplication of vectors.
    type Factor: Copy;

    unsafe fn zero() -> Self;
    unsafe fn load(from: *const u8) -> Self;
    unsafe fn store(self, to: *mut u8);
    /// Stores past the caches; `to` is aligned to the vector.
    unsafe fn stream(self, to: *mut u8);
    /// Orders streamed stores before later ones.
    unsafe fn fence();
    /// Prefetches a line into the cache; any address is allowed.
    unsafe fn prefetch(from: *const u8);
    unsafe fn xor(self, other: Self) -> Self;
    unsafe fn xor3(self, a: Self, b: Self) -> Self;
    /// `2 · self + other`
    unsafe fn double_add(self, other: Self) -> Self;
    /// `4 · self + other`
    unsafe fn quadruple_add(self, other: Self) -> Self;
    unsafe fn split(self) -> Self::Split;
    unsafe fn factor(coefficient: u8) -> Self::Factor;
    /// `self + factor · other`
    unsafe fn multiply_add(self, factor: Self::Factor, other: Self::Split) -> Self;
}

/// Writes the vectors of one target.
#[inline(always)]
unsafe fn put<V: Vector, const U: usize>(pass: &Pass<'_>, target: usize, at: usize, values: [V; U]) {
    let to = unsafe { pass.targets.get_unchecked(target).wrapping_add(at) };
    for (u, value) in values.into_iter().enumerate() {
        unsafe {
            if pass.is_streamed {
                value.stream(to.add(u * V::BYTES))
            } else {
                value.store(to.add(u * V::BYTES))
            }
        }
    }
}

/// The initial vectors of a target.
#[inline(always)]
unsafe fn begin<V: Vector, const U: usize>(pass: &Pass<'_>, target: usize, at: usize) -> [V; U] {
    let mut values = unsafe { [V::zero(); U] };
    if !pass.sums.is_empty() {
        let from = unsafe { pass.sums.get_unchecked(target).wrapping_add(at) };
        for (u, value) in values.iter_mut().enumerate() {
            *value = unsafe { V::load(from.add(u * V::BYTES)) };
        }
    }
    values
}

#[inline(always)]
unsafe fn load<V: Vector, const U: usize>(source: *const u8, at: usize) -> [V; U] {
    let mut values = unsafe { [V::zero(); U] };
    for (u, value) in values.iter_mut().enumerate() {
        *value = unsafe { V::load(source.wrapping_add(at).add(u * V::BYTES)) };
    }
    values
}

/// Fetches the lines of a source that a later step needs.
#[inline(always)]
unsafe fn fetch<V: Vector, const U: usize>(pass: &Pass<'_>, source: *const u8, at: usize) {
    if pass.ahead > 0 {
        for line in (0..U * V::BYTES).step_by(64) {
            unsafe { V::prefetch(source.wrapping_add(at + pass.ahead + line)) }
        }
    }
}

#[inline(always)]
unsafe fn finish<V: Vector>(pass: &Pass<'_>) {
    if pass.is_streamed {
        unsafe { V::fence() }
    }
}

/// One target: the plain sum.
#[inline(always)]
pub(super) unsafe fn sum<V: Vector, const U: usize>(pass: &Pass<'_>) {
    unsafe {
        match (pass.sources.len(), pass.sums.len()) {
            (1, 0) => sum_of::<V, U, 1>(pass, [pass.sources[0]]),
            (2, 0) => sum_of::<V, U, 2>(pass, first(pass, [])),
            (3, 0) => sum_of::<V, U, 3>(pass, first(pass, [])),
            (4, 0) => sum_of::<V, U, 4>(pass, first(pass, [])),
            (5, 0) => sum_of::<V, U, 5>(pass, first(pass, [])),
            (6, 0) => sum_of::<V, U, 6>(pass, first(pass, [])),
            (7, 0) => sum_of::<V, U, 7>(pass, first(pass, [])),
            (8, 0) => sum_of::<V, U, 8>(pass, first(pass, [])),
            (1, _) => sum_of::<V, U, 2>(pass, first(pass, [pass.sums[0].cast_const()])),
            (2, _) => sum_of::<V, U, 3>(pass, first(pass, [pass.sums[0].cast_const()])),
            (3, _) => sum_of::<V, U, 4>(pass, first(pass, [pass.sums[0].cast_const()])),
            (4, _) => sum_of::<V, U, 5>(pass, first(pass, [pass.sums[0].cast_const()])),
            (5, _) => sum_of::<V, U, 6>(pass, first(pass, [pass.sums[0].cast_const()])),
            (6, _) => sum_of::<V, U, 7>(pass, first(pass, [pass.sums[0].cast_const()])),
            (7, _) => sum_of::<V, U, 8>(pass, first(pass, [pass.sums[0].cast_const()])),
            (8, _) => sum_of::<V, U, 9>(pass, first(pass, [pass.sums[0].cast_const()])),
            _ => sum_of_many::<V, U>(pass),
        }
        finish::<V>(pass);
    }
}

/// The sum of more sources than there are registers for their addresses.
#[inline(always)]
unsafe fn sum_of_many<V: Vector, const U: usize>(pass: &Pass<'_>) {
    let (pairs, odd) = pass.sources.as_chunks::<2>();
    let mut at = pass.start;
    while at < pass.end {
        unsafe {
            let mut values: [V; U] = begin(pass, 0, at);
            for [a, b] in pairs {
                fetch::<V, U>(pass, *a, at);
                fetch::<V, U>(pass, *b, at);
                let (a, b): ([V; U], [V; U]) = (load(*a, at), load(*b, at));
                for u in 0..U {
                    values[u] = values[u].xor3(a[u], b[u]);
                }
            }
            for a in odd {
                fetch::<V, U>(pass, *a, at);
                let a: [V; U] = load(*a, at);
                for u in 0..U {
                    values[u] = values[u].xor(a[u]);
                }
            }
            put(pass, 0, at, values);
        }
        at += U * V::BYTES;
    }
}

/// The `H` addresses in `head`, then sources, `N` in total.
#[inline(always)]
fn first<const H: usize, const N: usize>(pass: &Pass<'_>, head: [*const u8; H]) -> [*const u8; N] {
    let mut all = [std::ptr::null(); N];
    all[..H].copy_from_slice(&head);
    all[H..].copy_from_slice(&pass.sources[..N - H]);
    all
}

#[inline(always)]
unsafe fn sum_of<V: Vector, const U: usize, const N: usize>(pass: &Pass<'_>, sources: [*const u8; N]) {
    let mut at = pass.start;
    while at < pass.end {
        unsafe {
            if pass.ahead > 0 {
                for source in sources {
                    fetch::<V, U>(pass, source, at);
                }
            }
            let mut values: [V; U] = load(sources[0], at);
            let mut n = 1;
            while n + 1 < N {
                let (a, b): ([V; U], [V; U]) = (load(sources[n], at), load(sources[n + 1], at));
                for u in 0..U {
                    values[u] = values[u].xor3(a[u], b[u]);
                }
                n += 2;
            }
            if n < N {
                let a: [V; U] = load(sources[n], at);
                for u in 0..U {
                    values[u] = values[u].xor(a[u]);
                }
            }
            put(pass, 0, at, values);
        }
        at += U * V::BYTES;
    }
}

/// Two targets: `P += Σ D_i` and `Q = 2^n · Q + Σ 2^i · D_i`, by Horner's rule from the last source
/// down.
#[inline(always)]
pub(super) unsafe fn powers2<V: Vector, const U: usize>(pass: &Pass<'_>) {
    let mut at = pass.start;
    while at < pass.end {
        unsafe {
            let mut p: [V; U] = begin(pass, 0, at);
            let mut q: [V; U] = begin(pass, 1, at);
            for source in pass.sources.iter().rev() {
                fetch::<V, U>(pass, *source, at);
                let data: [V; U] = load(*source, at);
                for u in 0..U {
                    p[u] = p[u].xor(data[u]);
                    q[u] = q[u].double_add(data[u]);
                }
            }
            put(pass, 0, at, p);
            put(pass, 1, at, q);
        }
        at += U * V::BYTES;
    }
    unsafe { finish::<V>(pass) }
}

/// Three targets: P and Q as [`powers2`], and `R = 4^n · R + Σ 4^i · D_i`.
#[inline(always)]
pub(super) unsafe fn powers3<V: Vector, const U: usize>(pass: &Pass<'_>) {
    let mut at = pass.start;
    while at < pass.end {
        unsafe {
            let mut p: [V; U] = begin(pass, 0, at);
            let mut q: [V; U] = begin(pass, 1, at);
            let mut r: [V; U] = begin(pass, 2, at);
            for source in pass.sources.iter().rev() {
                fetch::<V, U>(pass, *source, at);
                let data: [V; U] = load(*source, at);
                for u in 0..U {
                    p[u] = p[u].xor(data[u]);
                    q[u] = q[u].double_add(data[u]);
                    r[u] = r[u].quadruple_add(data[u]);
                }
            }
            put(pass, 0, at, p);
            put(pass, 1, at, q);
            put(pass, 2, at, r);
        }
        at += U * V::BYTES;
    }
    unsafe { finish::<V>(pass) }
}

/// `T` targets by their coefficients; the first is a plain sum if `IS_SUM`. Two sources with the
/// same coefficients (the old and the new bytes of a strip) are summed before they are multiplied.
#[inline(always)]
pub(super) unsafe fn products<V: Vector, const U: usize, const T: usize, const IS_SUM: bool>(
    pass: &Pass<'_>,
) {
    let row = |t: usize| &pass.coefficients[t * pass.stride..][..2];
    let is_difference = pass.sources.len() == 2 && (0..T).all(|t| row(t)[0] == row(t)[1]);
    let multiplied = if is_difference { &pass.sources[..1] } else { pass.sources };
    let mut at = pass.start;
    while at < pass.end {
        unsafe {
            let mut sums = [[V::zero(); U]; T];
            for (t, sum) in sums.iter_mut().enumerate() {
                *sum = begin(pass, t, at);
            }
            for (s, source) in multiplied.iter().enumerate() {
                fetch::<V, U>(pass, *source, at);
                let mut data: [V; U] = load(*source, at);
                if is_difference {
                    let other: [V; U] = load(pass.sources[1], at);
                    for u in 0..U {
                        data[u] = data[u].xor(other[u]);
                    }
                }
                let mut t = 0;
                if IS_SUM {
                    for u in 0..U {
                        sums[0][u] = sums[0][u].xor(data[u]);
                    }
                    t = 1;
                }
                let mut halves = [data[0].split(); U];
                for u in 1..U {
                    halves[u] = data[u].split();
                }
                while t < T {
                    let factor = V::factor(*pass.coefficients.get_unchecked(t * pass.stride + s));
                    for u in 0..U {
                        sums[t][u] = sums[t][u].multiply_add(factor, halves[u]);
                    }
                    t += 1;
                }
            }
            for (t, sum) in sums.into_iter().enumerate() {
                put(pass, t, at, sum);
            }
        }
        at += U * V::BYTES;
    }
    unsafe { finish::<V>(pass) }
}

/// [`products`] for any number of targets of the pass.
#[inline(always)]
pub(super) unsafe fn products_of_any<V: Vector, const U: usize, const IS_SUM: bool>(pass: &Pass<'_>) {
    unsafe {
        match pass.targets.len() {
            1 => products::<V, U, 1, IS_SUM>(pass),
            2 => products::<V, U, 2, IS_SUM>(pass),
            3 => products::<V, U, 3, IS_SUM>(pass),
            4 => products::<V, U, 4, IS_SUM>(pass),
            targets => unreachable!("{targets} targets in a pass"),
        }
    }
}

//! Memory for measurements, in huge pages, and plain loops for comparison.

/// A mapping filled with random bytes.
pub struct Memory {
    start: *mut u8,
    bytes: usize,
}

impl Memory {
    /// A mapping of `bytes` bytes, a multiple of 2 MiB.
    pub fn new(bytes: usize) -> Memory {
        const HUGE: usize = 2 << 20;
        // SAFETY: a new mapping; the part before its first huge page is unused.
        let start = unsafe {
            let (protection, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let mapping = libc::mmap(std::ptr::null_mut(), bytes + HUGE, protection, flags, -1, 0);
            assert_ne!(
                mapping,
                libc::MAP_FAILED,
                "{bytes} bytes of memory: {}",
                std::io::Error::last_os_error()
            );
            let start = mapping.cast::<u8>().add(mapping.align_offset(HUGE));
            libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE);
            start
        };
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        for word in 0..bytes / 8 {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            // SAFETY: the word lies in the mapping.
            unsafe { start.cast::<u64>().add(word).write(state) };
        }
        Memory { start, bytes }
    }

    /// `count` adjacent strips at byte `at`.
    pub fn strips(&self, at: usize, count: usize, len: usize) -> Vec<*mut u8> {
        assert!(at + count * len <= self.bytes);
        // SAFETY: the strips lie in the mapping.
        (0..count).map(|n| unsafe { self.start.add(at + n * len) }).collect()
    }
}

/// CPU time of this thread in seconds, which excludes time taken by other programs.
pub fn cpu_seconds() -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is valid.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    assert_eq!(failed, 0, "a thread has a clock");
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// Calls a function compiled for AVX2 if the processor has it, so that the compiler may vectorise
/// it.
macro_rules! with_avx2 {
    ($function:ident($($argument:ident: $type:ty),*)) => {{
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            #[target_feature(enable = "avx2")]
            unsafe fn vectorised($($argument: $type),*) {
                $function($($argument),*)
            }
            // SAFETY: the processor has AVX2.
            return unsafe { vectorised($($argument),*) };
        }
        $function($($argument),*)
    }};
}

/// The sum of strips in plain Rust: four at a time, as in Linux's xor_blocks.
pub fn plain_sum(sources: &[&[u8]], target: &mut [u8]) {
    with_avx2!(plain_sum_loop(sources: &[&[u8]], target: &mut [u8]))
}

#[inline(always)]
fn plain_sum_loop(sources: &[&[u8]], target: &mut [u8]) {
    let zip = |target: &mut [u8], few: &[&[u8]]| match *few {
        [a, b, c, d] => {
            let sources = a.iter().zip(b).zip(c).zip(d);
            target.iter_mut().zip(sources).for_each(|(t, (((a, b), c), d))| *t ^= a ^ b ^ c ^ d);
        }
        [a, b, c] => {
            let sources = a.iter().zip(b).zip(c);
            target.iter_mut().zip(sources).for_each(|(t, ((a, b), c))| *t ^= a ^ b ^ c);
        }
        [a, b] => target.iter_mut().zip(a.iter().zip(b)).for_each(|(t, (a, b))| *t ^= a ^ b),
        [a] => target.iter_mut().zip(a).for_each(|(t, a)| *t ^= a),
        _ => unreachable!("one to four sources"),
    };
    match *sources {
        [a, b, c, d, ref rest @ ..] => {
            let sources = a.iter().zip(b).zip(c).zip(d);
            target.iter_mut().zip(sources).for_each(|(t, (((a, b), c), d))| *t = a ^ b ^ c ^ d);
            rest.chunks(4).for_each(|few| zip(target, few));
        }
        ref few => {
            target.fill(0);
            few.chunks(4).for_each(|few| zip(target, few));
        }
    }
}

/// Reads strips, `at_once` of them in parallel: the upper limit for parity of cold data.
pub fn read(strips: &[&[u8]], at_once: usize) {
    with_avx2!(read_loop(strips: &[&[u8]], at_once: usize))
}

#[inline(always)]
fn read_loop(strips: &[&[u8]], at_once: usize) {
    const LINES: usize = 256;
    let mut sum = [0u64; LINES / 8];
    for few in strips.chunks(at_once) {
        for at in (0..few[0].len()).step_by(LINES) {
            for strip in few {
                for (sum, word) in sum.iter_mut().zip(strip[at..at + LINES].chunks_exact(8)) {
                    *sum ^= u64::from_le_bytes(word.try_into().expect("eight bytes"));
                }
            }
        }
    }
    std::hint::black_box(sum);
}

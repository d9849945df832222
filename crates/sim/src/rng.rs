//! The simulator's randomness: everything is decided by one number.

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// An independent generator for one purpose, so that more draws for one thing do not change another.
    #[must_use]
    pub fn fork(&self, purpose: u64) -> Rng {
        Rng(mix(self.0 ^ mix(purpose.wrapping_add(0x5851_f42d_4c95_7f2d))))
    }

    /// The next 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in `low..high`.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of `choices`.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// A number up to `most` whose logarithm is uniform: small ones are frequent.
    pub fn log_uniform(&mut self, most: u64) -> u64 {
        let bits = 64 - u64::from(most.leading_zeros());
        let bits = self.below(bits + 1);
        self.below(1u64.checked_shl(bits as u32).unwrap_or(u64::MAX)).min(most)
    }
}

/// SplitMix64's output function: a good 64-bit hash of 64 bits.
pub fn mix(state: u64) -> u64 {
    let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

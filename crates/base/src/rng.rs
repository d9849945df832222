//! Random numbers that a seed reproduces.

/// A generator of random numbers, the same on every machine for a seed: SplitMix64 (Steele, Lea,
/// Flood 2014). Every seed is good. Not for secrets.
///
/// The simulator's regressions are seeds: the numbers of a seed never change.
///
/// ```
/// use base::Rng;
///
/// let mut rng = Rng::new(7);
/// let rolls: Vec<u64> = (0..6).map(|_| rng.range(1, 7)).collect();
/// assert!(rolls.iter().all(|roll| (1..=6).contains(roll)));
/// let mut again = Rng::new(7);
/// assert!(rolls.iter().all(|roll| *roll == again.range(1, 7)));
/// ```
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The generator of a seed.
    pub const fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// An independent generator for one purpose, so that additional draws for one purpose do not
    /// affect another.
    #[must_use]
    pub fn fork(&self, purpose: u64) -> Rng {
        Rng(mix(self.0 ^ mix(purpose.wrapping_add(0x5851_f42d_4c95_7f2d))))
    }

    /// The next 64 bits.
    #[inline]
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `bound`, which is not 0.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        // The product keeps the high bits and needs no division.
        ((u128::from(self.draw()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in `low..high`, which is not empty.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low)
    }

    /// Returns true once in `n` calls on average.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns one of `choices`.
    ///
    /// # Panics
    /// If there is none.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// A number up to `most` with a uniform logarithm: small ones are frequent.
    pub fn log_uniform(&mut self, most: u64) -> u64 {
        let bits = 64 - u64::from(most.leading_zeros());
        let bits = self.below(bits + 1);
        self.below(1u64.checked_shl(bits as u32).unwrap_or(u64::MAX)).min(most)
    }
}

/// SplitMix64's output function: a good 64-bit hash of 64 bits.
#[inline]
pub const fn mix(state: u64) -> u64 {
    let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first<const N: usize>(mut rng: Rng, mut draw: impl FnMut(&mut Rng) -> u64) -> [u64; N] {
        std::array::from_fn(|_| draw(&mut rng))
    }

    /// From the authors' own program, and from a second one.
    #[test]
    fn the_numbers_of_a_seed_never_change() {
        let reference = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431];
        assert_eq!(first(Rng::new(1234567), Rng::draw), reference);
        assert_eq!(
            first(Rng::new(0), Rng::draw),
            [0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, 0x06c45d188009454f]
        );
        assert_eq!(first(Rng::new(7).fork(3), Rng::draw), [0xc4c3e065495d6e29, 0x71f7d834d767d46b]);
        let rng = || Rng::new(42);
        assert_eq!(first(rng(), |rng| rng.below(100)), [74, 15, 27, 34, 3, 86, 21, 80]);
        assert_eq!(first(rng(), |rng| rng.range(10, 20)), [17, 11, 12, 13]);
        assert_eq!(first(rng(), |rng| rng.pick(&[2, 3, 5])), [5, 2, 2, 3]);
        assert_eq!(first(rng(), |rng| rng.one_in(3).into()), [0, 1, 1, 0]);
        assert_eq!(first(rng(), |rng| rng.log_uniform(1000)), [40, 2, 0, 3, 4, 1, 16, 26]);
        assert_eq!(first(rng(), |rng| rng.log_uniform(u64::MAX)), [45010774110822, 90227, 3]);
    }

    #[test]
    fn numbers_below_a_bound_are_equally_frequent() {
        let mut rng = Rng::new(1);
        let mut seen = [0u32; 10];
        (0..10_000).for_each(|_| seen[rng.below(10) as usize] += 1);
        assert!(seen.iter().all(|n| (800..1200).contains(n)), "{seen:?}");
        assert_eq!(rng.below(1), 0);
    }

    #[test]
    fn forks_for_two_purposes_differ_and_leave_the_generator_as_it_is() {
        let rng = Rng::new(9);
        let [one, other] = [1, 2].map(|purpose| rng.fork(purpose).draw());
        assert_ne!(one, other);
        assert_eq!((rng.fork(1).draw(), rng.clone().draw()), (one, Rng::new(9).draw()));
    }
}

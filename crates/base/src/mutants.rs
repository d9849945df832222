//! The choice of a broken variant, for crates that the simulator breaks on purpose.

/// Defines `choose` and `is` for the broken rules of a crate: an enum whose numbers are not 0.
///
/// The code that keeps a rule asks `is` whether to break it. At most one rule is broken in the
/// whole process. Without the feature `mutants` of the calling crate, `is` is a constant `false`
/// and costs nothing.
#[macro_export]
macro_rules! choice_of_mutant {
    ($mutant:ty) => {
        #[cfg(feature = "mutants")]
        static CHOSEN: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);

        /// Chooses the broken rule of the whole process; `None` breaks none.
        #[cfg(feature = "mutants")]
        pub fn choose(mutant: Option<$mutant>) {
            CHOSEN.store(mutant.map_or(0, |mutant| mutant as u8), std::sync::atomic::Ordering::Relaxed);
        }

        /// Does nothing: without the feature `mutants` no rule can be broken.
        #[cfg(not(feature = "mutants"))]
        pub fn choose(_: Option<$mutant>) {}

        /// Whether the rule is broken.
        #[cfg(feature = "mutants")]
        #[inline]
        pub fn is(mutant: $mutant) -> bool {
            CHOSEN.load(std::sync::atomic::Ordering::Relaxed) == mutant as u8
        }

        /// Whether the rule is broken: never without the feature `mutants`.
        #[cfg(not(feature = "mutants"))]
        #[inline(always)]
        pub const fn is(_: $mutant) -> bool {
            false
        }
    };
}

//! Compares our codes with those of ISA-L, if it is installed.

use super::*;

fn isal() -> Option<Isal> {
    let isal = Isal::load(false);
    if isal.is_none() {
        eprintln!("skipped: ISA-L is not installed (Debian: libisal2; tests/lab/setup gets it)");
    }
    isal
}

/// Strips of random bytes, aligned for ISA-L, with the parity of the code.
struct Stripe {
    memory: Memory,
    len: usize,
}

impl Stripe {
    fn new(code: &Code, (data, parity): (usize, usize), len: usize) -> Stripe {
        let stripe = Stripe { memory: Memory::new(2 << 20), len };
        let strips = stripe.strips(data + parity);
        let (sources, targets) = strips.split_at(data);
        let sources: Vec<&[u8]> = sources.iter().map(|strip| stripe.bytes(*strip)).collect();
        // SAFETY: targets do not overlap the sources.
        let mut targets: Vec<&mut [u8]> =
            targets.iter().map(|strip| unsafe { std::slice::from_raw_parts_mut(*strip, len) }).collect();
        code.encode(&sources, &mut targets);
        stripe
    }

    /// Addresses of the first strips; room for twice a stripe.
    fn strips(&self, count: usize) -> Vec<*mut u8> {
        self.memory.strips(0, count, 8192)
    }

    fn bytes(&self, strip: *mut u8) -> &[u8] {
        // SAFETY: a strip of the memory.
        unsafe { std::slice::from_raw_parts(strip, self.len) }
    }
}

fn rows(code: &Code, data: usize, parity: usize) -> Vec<u8> {
    (0..parity * data).map(|n| code.coefficient(n / data, n % data)).collect()
}

#[test]
fn p_and_q_are_those_of_isa_l() {
    let Some(isal) = isal() else { return };
    for parity in 1..=2 {
        for data in 2..=61 {
            let code = Code::new(Matrix::Powers, data, parity).unwrap();
            let stripe = Stripe::new(&code, (data, parity), 4096);
            let mut strips = stripe.strips(data + 2 * parity);
            strips.drain(data..data + parity);
            // SAFETY: ISA-L's parity follows ours.
            unsafe { isal.generate(&mut strips, parity, stripe.len) };
            let ours = stripe.strips(data + parity);
            for j in 0..parity {
                let is_same = stripe.bytes(strips[data + j]) == stripe.bytes(ours[data + j]);
                assert!(is_same, "parity {j} of {data}+{parity}");
            }
        }
    }
}

#[test]
fn parity_of_any_matrix_is_that_of_isa_l() {
    let Some(isal) = isal() else { return };
    let powers = [1, 2, 8, 21, 61].map(|k| (Matrix::Powers, k, 3));
    let cauchy = [(4, 4), (10, 4), (16, 8), (48, 16), (5, 7)].map(|(k, m)| (Matrix::Cauchy, k, m));
    for (matrix, data, parity) in powers.into_iter().chain(cauchy) {
        for len in [64, 100, 1000, 4096] {
            let code = Code::new(matrix, data, parity).unwrap();
            let stripe = Stripe::new(&code, (data, parity), len);
            let mut strips = stripe.strips(data + 2 * parity);
            let tables = isal.tables(&rows(&code, data, parity), data);
            let (sources, targets) = strips.split_at_mut(data + parity);
            // SAFETY: ISA-L's parity follows ours.
            unsafe { isal.encode(&tables, &mut sources[..data], targets, len) };
            for j in data..data + parity {
                assert!(
                    stripe.bytes(strips[j]) == stripe.bytes(strips[j + parity]),
                    "{matrix:?} {data}+{parity}"
                );
            }
        }
    }
}

/// Removes strips and lets both reconstruct them, ISA-L by the inverse of the remaining identity
/// and parity rows.
fn lose(isal: Isal, code: &Code, (data, parity): (usize, usize), lost: &[usize]) {
    let stripe = Stripe::new(code, (data, parity), 512);
    let strips = stripe.strips(data + parity);
    let left: Vec<usize> = (0..data + parity).filter(|s| !lost.contains(s)).take(data).collect();
    let cell = |s: usize, i: usize| if s < data { u8::from(s == i) } else { code.coefficient(s - data, i) };
    let square = left.iter().flat_map(|s| (0..data).map(move |i| cell(*s, i))).collect();
    let inverse = isal.invert(square, data).expect("any strips may be lost");
    let tables = isal.tables(&inverse, data);
    let mut sources: Vec<*mut u8> = left.iter().map(|s| strips[*s]).collect();
    let mut theirs: Vec<*mut u8> = stripe.strips(2 * data + parity).split_off(data + parity);
    // SAFETY: ISA-L's data follows the stripe.
    unsafe { isal.encode(&tables, &mut sources, &mut theirs, stripe.len) };

    let available = (u64::MAX >> (64 - data - parity)) & !lost.iter().fold(0, |mask, s| mask | 1 << s);
    let decoder = code.decoder(lost, available).unwrap();
    let sources: Vec<&[u8]> = decoder.sources().iter().map(|s| stripe.bytes(strips[*s])).collect();
    let mut ours = vec![vec![0u8; stripe.len]; lost.len()];
    decoder.decode(&sources, &mut ours.iter_mut().map(|o| &mut o[..]).collect::<Vec<_>>());
    for (strip, ours) in lost.iter().zip(&ours) {
        assert!(ours == stripe.bytes(strips[*strip]));
        assert!(*strip >= data || ours == stripe.bytes(theirs[*strip]), "{data}+{parity} without {lost:?}");
    }
}

#[test]
fn lost_strips_are_those_that_isa_l_finds() {
    let Some(isal) = isal() else { return };
    for (matrix, data, parity) in
        [(Matrix::Powers, 4, 1), (Matrix::Powers, 8, 2), (Matrix::Powers, 21, 3), (Matrix::Cauchy, 10, 4)]
    {
        let code = Code::new(matrix, data, parity).unwrap();
        for first in 0..data + parity {
            let step = |n: usize| (first + n * (n + 1)) % (data + parity);
            let mut lost: Vec<usize> = (0..parity).map(step).collect();
            lost.sort_unstable();
            lost.dedup();
            lose(isal, &code, (data, parity), &lost);
        }
    }
}

#[test]
fn the_plain_loop_makes_the_same_sum() {
    for data in 1..=24 {
        let strips: Vec<Vec<u8>> =
            (0..data).map(|i| (0..777).map(|n| (n * (i + 3) * 7) as u8).collect()).collect();
        let sources: Vec<&[u8]> = strips.iter().map(|s| &s[..]).collect();
        let (mut plain, mut ours) = (vec![1; 777], vec![2; 777]);
        memory::plain_sum(&sources, &mut plain);
        Code::new(Matrix::Powers, data, 1).unwrap().encode(&sources, &mut [&mut ours]);
        assert_eq!(plain, ours);
    }
}

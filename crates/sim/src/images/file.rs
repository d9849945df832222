//! The bytes of a new image whose refcounts have 16 bits.

/// The big-endian number at byte `at`.
pub fn word(image: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(image[at as usize..][..8].try_into().expect("8 bytes"))
}

/// The refcount block of a cluster of an image whose refcounts have 16 bits; 0 if there is none.
fn refcount_block(image: &[u8], cluster: u64, number: u64) -> u64 {
    let block = number / (cluster / 2);
    if block < cluster / 8 { word(image, word(image, 48) + block * 8) } else { 0 }
}

/// Adds a reference to a cluster that a refcount block counts.
pub fn refer(image: &mut [u8], cluster: u64, number: u64) {
    let at = (refcount_block(image, cluster, number) + number % (cluster / 2) * 2) as usize;
    let count = u16::from_be_bytes([image[at], image[at + 1]]) + 1;
    image[at..at + 2].copy_from_slice(&count.to_be_bytes());
}

/// Adds clusters of zeroes behind the last one, if refcount blocks count them. Returns the first
/// byte.
pub fn append(image: &mut Vec<u8>, cluster: u64, count: u64) -> Option<u64> {
    let start = image.len() as u64;
    let numbers = start / cluster..start / cluster + count;
    if numbers.clone().any(|number| refcount_block(image, cluster, number) == 0) {
        return None;
    }
    image.resize((start + count * cluster) as usize, 0);
    numbers.for_each(|number| refer(image, cluster, number));
    Some(start)
}

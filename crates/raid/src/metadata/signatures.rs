//! Finds known formats on a device before an array uses it. The crate `signatures` has the formats.

use super::io;
use block::{Channel, IoError, Limits};
use signatures::Findings;

/// Looks for signatures of other formats and of Freestone.
///
/// # Errors
/// If the device fails. Single unreadable blocks are findings.
pub async fn probe(channel: &dyn Channel, limits: &Limits) -> Result<Findings, IoError> {
    let read = async |offset: u64, len: usize| io::read_long(channel, offset, len).await;
    signatures::probe(limits.capacity, limits.block_size, read).await
}

#[cfg(test)]
mod tests {
    use super::super::layout::Layout;
    use super::super::superblock::MAGIC;

    #[test]
    fn every_superblock_of_a_member_is_a_signature() {
        assert_eq!(&MAGIC, signatures::FREESTONE_ARRAY);
        for capacity in [1u64 << 20, (300 << 20) + 512, 5 << 30] {
            for offset in Layout::superblocks_at(capacity).unwrap() {
                let read = async move |at: u64, len: usize| {
                    let mut bytes = vec![0; len];
                    if let Some(start) = offset.checked_sub(at).filter(|start| start + 8 <= len as u64) {
                        bytes[start as usize..][..8].copy_from_slice(&MAGIC);
                    }
                    Ok(bytes)
                };
                let (sender, receiver) = std::sync::mpsc::channel();
                reactor::run_simulated(1, move |_| async move {
                    sender.send(signatures::probe(capacity, 512, read).await.unwrap()).unwrap();
                });
                let findings = receiver.recv().expect("sent");
                assert_eq!(findings.to_string(), format!("Freestone array at byte {offset}"));
            }
        }
    }
}

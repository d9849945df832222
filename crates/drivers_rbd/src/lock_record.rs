//! The file that remembers who has an image's exclusive lock.
//!
//! Ceph keeps the lock of a killed client until it misses the client, 30 s by default. A successor
//! on the same host need not wait: it finds the address of its predecessor in this file. That
//! process is dead, because the kernel would otherwise refuse the lock of the file.

use super::error::OpenError;
use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::Path;

/// Longest address that is read.
const MAX_ADDRESS: u64 = 1024;

/// The open file. It is locked until it is dropped or the process ends.
pub(super) struct LockRecord {
    file: File,
    /// The address that a predecessor wrote; empty if there was none.
    predecessor: String,
}

impl LockRecord {
    /// Opens the file, or creates it.
    ///
    /// # Errors
    /// When it cannot be opened, or an open image uses it.
    pub(super) fn open(path: &Path) -> Result<LockRecord, OpenError> {
        let fail = |error: io::Error| OpenError::Refused(format!("lock-file={}: {error}", path.display()));
        let mut options = File::options();
        let mut file =
            options.read(true).write(true).create(true).truncate(false).open(path).map_err(fail)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let reason = "in use by another open image";
                return Err(OpenError::Refused(format!("lock-file={}: {reason}", path.display())));
            }
            Err(TryLockError::Error(error)) => return Err(fail(error)),
        }
        let mut bytes = Vec::new();
        (&mut file).take(MAX_ADDRESS).read_to_end(&mut bytes).map_err(fail)?;
        let predecessor = String::from_utf8_lossy(&bytes).trim().to_owned();
        Ok(LockRecord { file, predecessor })
    }

    /// Whether the client at `address` is the dead predecessor.
    pub(super) fn is_predecessor(&self, address: &str) -> bool {
        !address.is_empty() && address == self.predecessor
    }

    /// Remembers the address of this process's own client.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn write(&mut self, address: &str) -> io::Result<()> {
        self.file.rewind()?;
        self.file.set_len(0)?;
        writeln!(self.file, "{address}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_predecessors_once_its_file_is_free() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vm1.lock");
        let mut record = LockRecord::open(&path).unwrap();
        assert!(!record.is_predecessor("") && !record.is_predecessor("10.0.0.1:0/1"));
        record.write("10.0.0.1:0/12345").unwrap();
        record.write("10.0.0.1:0/7").unwrap();
        let error = LockRecord::open(&path).err().unwrap().to_string();
        assert_eq!(error, format!("lock-file={}: in use by another open image", path.display()));
        drop(record);
        let record = LockRecord::open(&path).unwrap();
        assert!(record.is_predecessor("10.0.0.1:0/7") && !record.is_predecessor("10.0.0.1:0/12345"));
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_refused_by_its_name() {
        let error = LockRecord::open(Path::new("/no/such/file")).err().unwrap().to_string();
        assert!(error.starts_with("lock-file=/no/such/file: No such file"), "{error}");
    }
}

//! Locks of an image file that is opened for writing, in the byte ranges that QEMU locks.
//!
//! QEMU has a permission protocol over locks of single bytes (`block/file-posix.c`,
//! `raw_apply_lock_bytes` and `raw_check_lock_bytes`). Programs that use permission N lock byte
//! `100 + N`; programs that refuse it to others lock byte `200 + N`. All locks are shared, so
//! compatible programs hold them together. After locking, each program checks whether a lock of
//! another contradicts its own. So a program that only reads and lets others write (`-U` of QEMU's
//! tools) may run next to a writer. A second writer is refused.
//!
//! Freestone also locks one more byte exclusively: of two servers that start at the same moment one
//! wins. The locks belong to the open file (`F_OFD_SETLK`), not to the process. So a second device
//! of this process is refused, too.
//!
//! Closing a descriptor does not end the locks while another process has a copy of it, as every
//! child has between `fork` and `exec`. So [`ImageFile`] ends them itself.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::AsRawFd;

/// First byte of the used permissions.
const USED: i64 = 100;
/// First byte of the refused permissions.
const REFUSED: i64 = 200;
/// Locked exclusively by every Freestone writer.
const OWN: i64 = 1000;

/// Reads of consistent data: bit 0 in QEMU.
const CONSISTENT_READ: i64 = 0;
/// Writes: bit 1.
const WRITE: i64 = 1;
/// Writes of existing data: bit 2.
const WRITE_UNCHANGED: i64 = 2;
/// Changes of the size: bit 3.
const RESIZE: i64 = 3;

/// Permissions that a writer uses.
const WRITER_USES: [i64; 2] = [CONSISTENT_READ, WRITE];
/// Permissions that a writer refuses to others.
const WRITER_REFUSES: [i64; 3] = [WRITE, WRITE_UNCHANGED, RESIZE];

/// Permissions that a reader of constant content refuses to others.
const READER_REFUSES: [i64; 2] = [WRITE, RESIZE];

/// The reason why a file cannot be locked.
#[derive(Debug)]
pub(super) enum Conflict {
    /// Another program writes to it or changes its size.
    Writer(io::Error),
    /// Another program reads it and refuses writers.
    Reader(io::Error),
}

/// An open file, and the image locks on it. The drop ends both.
#[derive(Debug)]
pub struct ImageFile {
    file: File,
    is_locked: bool,
}

impl ImageFile {
    /// A file that is used without image locks.
    pub(super) fn unlocked(file: File) -> ImageFile {
        ImageFile { file, is_locked: false }
    }

    /// Claims `file` for writing. Does nothing on a file system without locks.
    ///
    /// # Errors
    /// When another program's locks contradict that.
    pub(super) fn lock(file: File) -> Result<ImageFile, Conflict> {
        let file = ImageFile { file, is_locked: true };
        lock(&file).map(|()| file)
    }

    /// Keeps writers out of `file`, which is only read. Does nothing on a file system without
    /// locks.
    ///
    /// # Errors
    /// When another program writes to it.
    pub(super) fn lock_content(file: File) -> Result<ImageFile, Conflict> {
        let file = ImageFile { file, is_locked: true };
        lock_content(&file).map(|()| file)
    }

    /// Lets other open files of the image be written, until [`ImageFile::refuse_writers`].
    pub(super) fn allow_writers(&self) {
        READER_REFUSES.iter().for_each(|permission| unlock(&self.file, REFUSED + permission));
    }

    /// Keeps writers out again.
    ///
    /// # Errors
    /// As [`ImageFile::lock_content`].
    pub(super) fn refuse_writers(&self) -> Result<(), Conflict> {
        lock_content(&self.file)
    }

    /// Claims `file` for writing, before a program replaces its content. Does nothing on a file
    /// system without locks.
    ///
    /// # Errors
    /// When another program, or this one, has the file open and does not allow that.
    pub fn claim(file: File) -> io::Result<ImageFile> {
        ImageFile::lock(file).map_err(|conflict| {
            let why = match conflict {
                Conflict::Writer(_) => "it is open for writing elsewhere",
                Conflict::Reader(_) => "it is read by a program that allows no writer",
            };
            io::Error::new(io::ErrorKind::ResourceBusy, why)
        })
    }
}

impl Deref for ImageFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for ImageFile {
    fn drop(&mut self) {
        if self.is_locked {
            // 0 bytes are all up to the end.
            set_lock(&self.file, &mut byte_range(0, 0, libc::F_UNLCK));
        }
    }
}

fn lock(file: &File) -> Result<(), Conflict> {
    let writer = || Conflict::Writer(io::Error::from_raw_os_error(libc::EAGAIN));
    if !try_lock(file, OWN, libc::F_WRLCK) {
        return Err(writer());
    }
    let used = WRITER_USES.map(|permission| USED + permission);
    let refused = WRITER_REFUSES.map(|permission| REFUSED + permission);
    // Shared locks: refused only if another program holds an exclusive lock.
    if !used.iter().chain(&refused).all(|byte| try_lock(file, *byte, libc::F_RDLCK)) {
        return Err(writer());
    }
    if WRITER_REFUSES.iter().any(|permission| is_locked(file, USED + permission)) {
        return Err(writer());
    }
    if WRITER_USES.iter().any(|permission| is_locked(file, REFUSED + permission)) {
        return Err(Conflict::Reader(io::Error::from_raw_os_error(libc::EAGAIN)));
    }
    Ok(())
}

fn lock_content(file: &File) -> Result<(), Conflict> {
    let conflict = || io::Error::from_raw_os_error(libc::EAGAIN);
    let bytes = READER_REFUSES.map(|permission| REFUSED + permission);
    if ![USED + CONSISTENT_READ].iter().chain(&bytes).all(|byte| try_lock(file, *byte, libc::F_RDLCK))
        || READER_REFUSES.iter().any(|permission| is_locked(file, USED + permission))
    {
        return Err(Conflict::Writer(conflict()));
    }
    match is_locked(file, REFUSED + CONSISTENT_READ) {
        true => Err(Conflict::Reader(conflict())),
        false => Ok(()),
    }
}

/// Locks a byte. Returns `false` when another open file has a conflicting lock.
fn try_lock(file: &File, byte: i64, kind: libc::c_int) -> bool {
    if set_lock(file, &mut byte_range(byte, 1, kind)) {
        return true;
    }
    let error = io::Error::last_os_error();
    if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) {
        return false;
    }
    tracing::debug!(%error, byte, "file system without locks");
    true
}

/// Ends the lock of a byte.
fn unlock(file: &File, byte: i64) {
    set_lock(file, &mut byte_range(byte, 1, libc::F_UNLCK));
}

/// Sets or ends a lock. Returns `false` with an error in `errno`.
fn set_lock(file: &File, lock: &mut libc::flock) -> bool {
    // SAFETY: the structure is valid and lives through the call.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut *lock) == 0 }
}

/// Whether another open file has any lock on a byte.
fn is_locked(file: &File, byte: i64) -> bool {
    let mut lock = byte_range(byte, 1, libc::F_WRLCK);
    // SAFETY: as above; the kernel writes its result into the structure.
    let is_known = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } == 0;
    is_known && i32::from(lock.l_type) != libc::F_UNLCK
}

fn byte_range(start: i64, length: i64, kind: libc::c_int) -> libc::flock {
    // SAFETY: a plain structure of numbers, valid when zeroed.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = start as libc::off_t;
    lock.l_len = length as libc::off_t;
    lock
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(path: &std::path::Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    /// A file whose locks the test sets.
    fn held(file: File) -> ImageFile {
        ImageFile { file, is_locked: true }
    }

    fn claim(path: &std::path::Path) -> Result<ImageFile, Conflict> {
        ImageFile::lock(open(path))
    }

    /// Opens the file like QEMU, which uses and refuses these permissions. Returns `None` if QEMU
    /// would fail.
    fn as_qemu(path: &std::path::Path, uses: &[i64], refuses: &[i64]) -> Option<ImageFile> {
        let file = held(open(path));
        let bytes = uses.iter().map(|bit| USED + bit).chain(refuses.iter().map(|bit| REFUSED + bit));
        for byte in bytes {
            // QEMU reports "Failed to lock byte" here.
            try_lock(&file, byte, libc::F_RDLCK).then_some(())?;
        }
        let is_free = !refuses.iter().any(|bit| is_locked(&file, USED + bit))
            && !uses.iter().any(|bit| is_locked(&file, REFUSED + bit));
        is_free.then_some(file)
    }

    #[test]
    fn a_writer_locks_the_bytes_that_qemu_knows() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let file = claim(image.path()).unwrap();
        let other = held(open(image.path()));
        let locked: Vec<i64> = (0..1100).filter(|byte| is_locked(&other, *byte)).collect();
        assert_eq!(locked, [100, 101, 201, 202, 203, 1000]);
        let exclusive: Vec<i64> = (0..1100).filter(|byte| !try_lock(&other, *byte, libc::F_RDLCK)).collect();
        assert_eq!(exclusive, [1000]);
        drop((file, other));
        assert!(!(0..1100).any(|byte| is_locked(&open(image.path()), byte)));
    }

    #[test]
    fn readers_of_qemu_that_allow_writers_get_in_and_others_do_not() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let path = image.path();
        let server = claim(path).unwrap();
        assert!(as_qemu(path, &[CONSISTENT_READ], &[]).is_some(), "qemu-img compare -U");
        assert!(as_qemu(path, &[CONSISTENT_READ], &[WRITE, RESIZE]).is_none(), "qemu-img compare");
        assert!(as_qemu(path, &[CONSISTENT_READ, WRITE, RESIZE], &[WRITE, RESIZE]).is_none(), "a guest");
        assert!(as_qemu(path, &[CONSISTENT_READ, WRITE], &[]).is_none(), "a guest with share-rw");
        assert!(matches!(claim(path), Err(Conflict::Writer(_))), "another server");
        // Refused attempts leave no lock behind.
        drop(server);
        claim(path).unwrap();
    }

    #[test]
    fn readers_of_constant_content_share_a_file_and_keep_writers_out() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let path = image.path();
        let share = || ImageFile::lock_content(File::open(path).unwrap());
        let readers = [share().unwrap(), share().unwrap()];
        assert!(as_qemu(path, &[CONSISTENT_READ], &[WRITE, RESIZE]).is_some(), "qemu-img compare");
        assert!(as_qemu(path, &[CONSISTENT_READ, WRITE, RESIZE], &[WRITE, RESIZE]).is_none(), "a guest");
        assert!(matches!(claim(path), Err(Conflict::Reader(_))), "a server");
        drop(readers);
        let server = claim(path).unwrap();
        assert!(matches!(share(), Err(Conflict::Writer(_))));
        drop(server);
        let guest = as_qemu(path, &[CONSISTENT_READ, WRITE, RESIZE], &[WRITE, RESIZE]).unwrap();
        assert!(matches!(share(), Err(Conflict::Writer(_))));
        drop(guest);
        share().unwrap();
    }

    #[test]
    fn locks_end_with_the_device_while_a_child_still_has_its_descriptor() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let server = claim(image.path()).unwrap();
        let copy_of_a_child = server.try_clone().unwrap();
        let refused = claim(image.path()).unwrap_err();
        assert!(matches!(refused, Conflict::Writer(_)));
        drop(server);
        claim(image.path()).unwrap();
        drop(copy_of_a_child);
    }

    #[test]
    fn a_writer_gets_in_beside_readers_that_allow_it_only() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let path = image.path();
        let reader = as_qemu(path, &[CONSISTENT_READ], &[]).unwrap();
        claim(path).unwrap();
        drop(reader);
        let reader = as_qemu(path, &[CONSISTENT_READ], &[WRITE, RESIZE]).unwrap();
        assert!(matches!(claim(path), Err(Conflict::Reader(_))));
        drop(reader);
        let guest = as_qemu(path, &[CONSISTENT_READ, WRITE, RESIZE], &[WRITE, RESIZE]).unwrap();
        assert!(matches!(claim(path), Err(Conflict::Writer(_))));
        drop(guest);
        // A program that locks the whole file, as early versions of Freestone did.
        let whole = held(open(path));
        assert!(set_lock(&whole, &mut byte_range(0, 0, libc::F_WRLCK)));
        assert!(matches!(claim(path), Err(Conflict::Writer(_))));
    }
}

//! The exclusive lock of an image.
//!
//! librbd breaks the lock of a client by itself if this client does not watch the image any more,
//! and has the cluster blocklist it. A client that lives refuses to give its lock away.

use super::error::{OpenError, check};
use super::image::ImageHandle;
use super::library::{FEATURE_EXCLUSIVE_LOCK, ImageWatcher, LOCK_MODE_EXCLUSIVE};
use super::lock_record::LockRecord;
use super::options::Options;
use std::ffi::{CStr, CString, c_char};
use std::io;
use std::ptr::null_mut;
use std::sync::PoisonError;

/// Maximum owners of a lock that the driver reads; an exclusive lock has one.
const MAX_OWNERS: usize = 16;
/// Maximum clients with the image open that the driver reads.
const MAX_WATCHERS: usize = 256;

impl ImageHandle {
    /// Opens the record of the lock. Returns whether the image is to be locked.
    ///
    /// # Errors
    /// When the options require a lock that the image does not have, or another open image uses the
    /// record.
    pub(super) fn prepare_lock(&self, options: &Options) -> Result<bool, OpenError> {
        if options.is_read_only() || options.exclusive == Some(false) {
            return Ok(false);
        }
        let mut features = 0;
        // SAFETY: an open image; the number is ours.
        let result = unsafe { (self.library().rbd_get_features)(self.raw, &raw mut features) };
        check(result, || "read the features of the image".into())?;
        if features & FEATURE_EXCLUSIVE_LOCK == 0 {
            let option = match (options.standby, options.exclusive) {
                (true, _) => "standby=on",
                (false, Some(_)) => "exclusive=on",
                (false, None) => return Ok(false),
            };
            return Err(OpenError::Refused(format!("{option}: the image lacks the feature exclusive-lock")));
        }
        let record = options.lock_file.as_deref().map(LockRecord::open).transpose()?;
        *self.record.lock().unwrap_or_else(PoisonError::into_inner) = record;
        Ok(true)
    }

    /// Takes the exclusive lock. Breaks that of a dead predecessor of this host, or of any client
    /// with force.
    ///
    /// # Errors
    /// When another client has the lock, or the cluster refuses it.
    pub(super) fn take_lock(&self, options: &Options) -> Result<(), OpenError> {
        self.break_locks(options)?;
        let action = || "take the exclusive lock of the image".into();
        // SAFETY: an open image.
        let result = unsafe { (self.library().rbd_lock_acquire)(self.raw, LOCK_MODE_EXCLUSIVE) };
        let owner = self.owners().first().map(|owner| owner.to_string_lossy().into_owned());
        if let (Err(_), Some(owner)) = (check(result, action), &owner) {
            let held = format!("the client at {owner} has it; force=on breaks its lock");
            let error = io::Error::new(io::ErrorKind::ResourceBusy, held);
            return Err(OpenError::Call { action: action(), error });
        }
        check(result, action)?;
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let written = record.as_mut().map(|record| record.write(owner.as_deref().unwrap_or_default()));
        let fail = |error| OpenError::Refused(format!("lock-file: cannot be written: {error}"));
        written.transpose().map_err(fail).map(drop)
    }

    /// As [`ImageHandle::take_lock`], unless the owner of the lock lives. Returns whether the lock
    /// was taken.
    ///
    /// # Errors
    /// When the cluster does not answer, or refuses the lock.
    pub(super) fn take_free_lock(&self, options: &Options) -> Result<bool, OpenError> {
        let owners = self.break_locks(options)?;
        if !owners.is_empty() {
            let watchers = self.watchers()?;
            if owners.iter().any(|owner| watchers.contains(owner)) {
                return Ok(false);
            }
        }
        match self.take_lock(options) {
            // Another standby was faster.
            Err(OpenError::Call { error, .. }) if error.kind() == io::ErrorKind::ResourceBusy => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Breaks the locks that the options permit to break. Returns the owners of others.
    fn break_locks(&self, options: &Options) -> Result<Vec<CString>, OpenError> {
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let is_predecessor =
            |owner: &CStr| record.as_ref().is_some_and(|r| r.is_predecessor(&owner.to_string_lossy()));
        let may_break = |owner: &CString| options.force || is_predecessor(owner);
        let (broken, others): (Vec<_>, _) = self.owners().into_iter().partition(may_break);
        broken.iter().try_for_each(|owner| self.break_lock(owner))?;
        Ok(others)
    }

    /// Breaks the lock of another client, which the cluster then blocklists.
    fn break_lock(&self, owner: &CStr) -> Result<(), OpenError> {
        // SAFETY: an open image and a C string.
        let result =
            unsafe { (self.library().rbd_lock_break)(self.raw, LOCK_MODE_EXCLUSIVE, owner.as_ptr()) };
        // The owner may have released its lock meanwhile.
        if result == -libc::ENOENT {
            return Ok(());
        }
        let owner = owner.to_string_lossy();
        check(result, || format!("break the exclusive lock of the client at {owner}"))?;
        tracing::warn!(%owner, "the exclusive lock of an RBD image was broken");
        Ok(())
    }

    /// The addresses of the clients that have the lock; none if they cannot be read.
    fn owners(&self) -> Vec<CString> {
        let library = self.library();
        let mut owners: [*mut c_char; MAX_OWNERS] = [null_mut(); MAX_OWNERS];
        let (mut mode, mut count) = (0, MAX_OWNERS);
        // SAFETY: an open image, and a list with room for `count` addresses.
        let result = unsafe {
            (library.rbd_lock_get_owners)(self.raw, &raw mut mode, owners.as_mut_ptr(), &raw mut count)
        };
        if result < 0 || count == 0 {
            return Vec::new();
        }
        let present = &owners[..count.min(MAX_OWNERS)];
        // SAFETY: the library has filled in `count` C strings.
        let addresses = present.iter().map(|owner| unsafe { CStr::from_ptr(*owner) }.to_owned()).collect();
        // SAFETY: the list as the library returned it.
        unsafe { (library.rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count) };
        addresses
    }

    /// The addresses of the clients that have the image open for writing. A dead client is among
    /// them until its watch expires.
    fn watchers(&self) -> Result<Vec<CString>, OpenError> {
        let library = self.library();
        let empty = || ImageWatcher { address: null_mut(), id: 0, cookie: 0 };
        let mut list: Vec<_> = (0..MAX_WATCHERS).map(|_| empty()).collect();
        let mut count = MAX_WATCHERS;
        // SAFETY: an open image, and a list with room for `count` watchers.
        let result = unsafe { (library.rbd_watchers_list)(self.raw, list.as_mut_ptr(), &raw mut count) };
        check(result, || "read the clients of the image".into())?;
        let present = &list[..count.min(MAX_WATCHERS)];
        // SAFETY: the library has filled in `count` addresses.
        let addresses = present.iter().map(|w| unsafe { CStr::from_ptr(w.address) }.to_owned()).collect();
        // SAFETY: the list as the library returned it.
        unsafe { (library.rbd_watchers_list_cleanup)(list.as_mut_ptr(), count) };
        Ok(addresses)
    }
}

//! The folder of the state file: what a loss of power leaves of it is whatever POSIX allows.
//!
//! A file's content survives once it was synced, else any prefix of it does. Changes of names
//! survive once the names were synced; of the others any may survive, each as a whole.

use crate::machine::Machine;
use atomic_file::Folder;
use base::Rng;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::Arc;

#[derive(Clone, Default)]
struct Inode {
    content: Vec<u8>,
    is_synced: bool,
}

enum Change {
    Name(String, usize),
    Rename(String, String, usize),
    Remove(String),
}

#[derive(Default)]
struct Files {
    inodes: Vec<Inode>,
    /// The inodes of names now.
    names: BTreeMap<String, usize>,
    /// The inodes of names after a loss of power, at least.
    durable: BTreeMap<String, usize>,
    /// Changes of names since they were synced.
    changes: Vec<Change>,
}

fn apply(names: &mut BTreeMap<String, usize>, change: &Change) {
    match change {
        Change::Name(name, inode) => drop(names.insert(name.clone(), *inode)),
        Change::Rename(from, to, inode) => {
            names.remove(from);
            names.insert(to.clone(), *inode);
        }
        Change::Remove(name) => drop(names.remove(name)),
    }
}

/// See the module.
pub struct SimFolder {
    machine: Arc<Machine>,
    files: RefCell<Files>,
    /// Calls until power goes, and until one fails; 0 for never.
    until_crash: Cell<u64>,
    until_failure: Cell<u64>,
    has_failed: Cell<bool>,
}

impl SimFolder {
    /// An empty folder.
    pub fn new(machine: &Arc<Machine>) -> SimFolder {
        SimFolder {
            machine: machine.clone(),
            files: RefCell::default(),
            until_crash: Cell::default(),
            until_failure: Cell::default(),
            has_failed: Cell::default(),
        }
    }

    /// Power goes at the `number`th call from now on; 0: at none.
    pub fn crash_at(&self, number: u64) {
        self.until_crash.set(number);
    }

    /// The `number`th call from now on fails.
    pub fn fail_at(&self, number: u64) {
        self.until_failure.set(number);
    }

    /// Whether a call has failed since this was last asked.
    pub fn take_failure(&self) -> bool {
        self.has_failed.take()
    }

    /// Returns the content of a file.
    pub fn content(&self, name: &str) -> Option<Vec<u8>> {
        let files = self.files.borrow();
        files.names.get(name).map(|inode| files.inodes[*inode].content.clone())
    }

    /// Replaces the content of a file if it exists.
    pub fn damage(&self, name: &str, content: Vec<u8>) {
        let mut files = self.files.borrow_mut();
        if let Some(inode) = files.names.get(name).copied() {
            files.inodes[inode].content = content;
        }
    }

    /// Power has gone.
    pub fn lose_power(&self, rng: &mut Rng) {
        let mut files = self.files.borrow_mut();
        let mut names = files.durable.clone();
        let all = rng.below(4);
        for change in &files.changes {
            if all == 0 || all > 1 && rng.one_in(2) {
                apply(&mut names, change);
            }
        }
        for inode in files.inodes.iter_mut().filter(|inode| !inode.is_synced) {
            let len = rng.below(inode.content.len() as u64 + 1);
            inode.content.truncate(len as usize);
            inode.is_synced = true;
        }
        (files.names, files.durable) = (names.clone(), names);
        files.changes.clear();
        self.until_crash.set(0);
        self.until_failure.set(0);
        self.has_failed.set(false);
    }

    fn call(&self) -> io::Result<()> {
        let is_due = |count: &Cell<u64>| count.replace(count.get().saturating_sub(1)) == 1;
        if is_due(&self.until_crash) {
            self.machine.power_off();
        }
        if !self.machine.is_on() {
            return Err(io::Error::other("power is lost"));
        }
        if is_due(&self.until_failure) {
            self.has_failed.set(true);
            return Err(io::Error::other("the system refuses it"));
        }
        Ok(())
    }

    fn change(&self, change: Change) {
        let files = &mut *self.files.borrow_mut();
        apply(&mut files.names, &change);
        files.changes.push(change);
    }

    fn inode(&self, name: &str) -> io::Result<usize> {
        self.files.borrow().names.get(name).copied().ok_or(ErrorKind::NotFound.into())
    }
}

impl Folder for SimFolder {
    fn read(&self, name: &str, most: u64) -> io::Result<Option<Vec<u8>>> {
        let content = self.content(name);
        Ok(content.map(|bytes| bytes[..bytes.len().min(most as usize)].to_vec()))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.call()?;
        let new = Inode { content: bytes.to_vec(), is_synced: false };
        match self.inode(name) {
            Ok(inode) => self.files.borrow_mut().inodes[inode] = new,
            Err(_) => {
                let inode = self.files.borrow().inodes.len();
                self.files.borrow_mut().inodes.push(new);
                self.change(Change::Name(name.into(), inode));
            }
        }
        Ok(())
    }

    fn sync(&self, name: &str) -> io::Result<()> {
        self.call()?;
        let inode = self.inode(name)?;
        self.files.borrow_mut().inodes[inode].is_synced = true;
        Ok(())
    }

    fn link(&self, from: &str, to: &str) -> io::Result<()> {
        self.call()?;
        let inode = self.inode(from)?;
        if self.inode(to).is_ok() {
            return Err(ErrorKind::AlreadyExists.into());
        }
        self.change(Change::Name(to.into(), inode));
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.call()?;
        let inode = self.inode(from)?;
        if self.inode(to).ok() != Some(inode) {
            self.change(Change::Rename(from.into(), to.into(), inode));
        }
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.call()?;
        self.inode(name)?;
        self.change(Change::Remove(name.into()));
        Ok(())
    }

    fn sync_names(&self) -> io::Result<()> {
        self.call()?;
        let files = &mut *self.files.borrow_mut();
        files.durable = files.names.clone();
        files.changes.clear();
        Ok(())
    }
}

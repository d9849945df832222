//! Crashes at every system call, with whatever was not synced lost in every way.

use super::*;
use proptest::prelude::*;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// A file: what is in it, and what of that is sure to outlive a loss of power.
#[derive(Clone, Debug, Default)]
struct Inode {
    content: Vec<u8>,
    is_synced: bool,
}

#[derive(Clone, Debug)]
enum Change {
    Name(String, usize),
    Rename(String, String),
    Remove(String),
}

#[derive(Clone, Debug, Default)]
struct Disk {
    inodes: Vec<Inode>,
    /// Inode of each name, as the program sees it.
    names: BTreeMap<String, usize>,
    /// Inode of each name that a power loss cannot undo.
    durable: BTreeMap<String, usize>,
    /// Changes of names since they were synced.
    changes: Vec<Change>,
}

/// A folder that stops working after so many calls.
struct Crashing {
    disk: RefCell<Disk>,
    calls_left: Cell<usize>,
}

fn apply(names: &mut BTreeMap<String, usize>, change: &Change) {
    match change {
        Change::Name(name, inode) => drop(names.insert(name.clone(), *inode)),
        Change::Rename(from, to) => {
            // One whose source never became durable has nothing to rename.
            if let Some(inode) = names.remove(from) {
                names.insert(to.clone(), inode);
            }
        }
        Change::Remove(name) => drop(names.remove(name)),
    }
}

impl Crashing {
    fn call(&self) -> io::Result<()> {
        match self.calls_left.get() {
            0 => Err(io::Error::other("power is lost")),
            left => {
                self.calls_left.set(left - 1);
                Ok(())
            }
        }
    }

    fn change(&self, change: Change) {
        let mut disk = self.disk.borrow_mut();
        apply(&mut disk.names, &change);
        disk.changes.push(change);
    }

    fn inode(&self, name: &str) -> io::Result<usize> {
        self.disk.borrow().names.get(name).copied().ok_or(ErrorKind::NotFound.into())
    }
}

impl Folder for Crashing {
    fn read(&self, name: &str, most: u64) -> io::Result<Option<Vec<u8>>> {
        let content = self.disk.borrow().read(name);
        Ok(content.map(|bytes| bytes[..bytes.len().min(most as usize)].to_vec()))
    }

    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.call()?;
        let content = bytes.to_vec();
        match self.inode(name) {
            Ok(inode) => self.disk.borrow_mut().inodes[inode] = Inode { content, is_synced: false },
            Err(_) => {
                let inode = self.disk.borrow().inodes.len();
                self.disk.borrow_mut().inodes.push(Inode { content, is_synced: false });
                self.change(Change::Name(name.into(), inode));
            }
        }
        Ok(())
    }

    fn sync(&self, name: &str) -> io::Result<()> {
        self.call()?;
        let inode = self.inode(name)?;
        self.disk.borrow_mut().inodes[inode].is_synced = true;
        Ok(())
    }

    fn link(&self, from: &str, to: &str) -> io::Result<()> {
        self.call()?;
        let inode = self.inode(from)?;
        assert!(self.inode(to).is_err(), "{to} is there");
        self.change(Change::Name(to.into(), inode));
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.call()?;
        let inode = self.inode(from)?;
        if self.inode(to).ok() != Some(inode) {
            self.change(Change::Rename(from.into(), to.into()));
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
        let mut disk = self.disk.borrow_mut();
        disk.durable = disk.names.clone();
        disk.changes.clear();
        Ok(())
    }
}

impl Disk {
    /// Returns the files after a power loss in which only the name changes in the bit mask `kept`
    /// reached the disk.
    fn after_loss(&self, kept: u64) -> BTreeMap<String, Vec<u8>> {
        let mut names = self.durable.clone();
        for (number, change) in self.changes.iter().enumerate() {
            if kept & 1 << number != 0 {
                apply(&mut names, change);
            }
        }
        let content = |inode: &Inode| if inode.is_synced { inode.content.clone() } else { b"torn".to_vec() };
        names.into_iter().map(|(name, inode)| (name, content(&self.inodes[inode]))).collect()
    }

    /// Returns the files after a kill of the program.
    fn after_kill(&self) -> BTreeMap<String, Vec<u8>> {
        self.names.iter().map(|(name, inode)| (name.clone(), self.inodes[*inode].content.clone())).collect()
    }

    /// The disk as the next start of the program finds it.
    fn restarted(&self, kept: Option<u64>) -> Disk {
        let files = kept.map_or_else(|| self.after_kill(), |kept| self.after_loss(kept));
        let mut disk = Disk::default();
        for (name, content) in files {
            disk.names.insert(name, disk.inodes.len());
            disk.inodes.push(Inode { content, is_synced: true });
        }
        disk.durable = disk.names.clone();
        disk
    }

    fn read(&self, name: &str) -> Option<Vec<u8>> {
        self.names.get(name).map(|inode| self.inodes[*inode].content.clone())
    }
}

fn run(disk: Disk, calls: usize, work: impl FnOnce(&Crashing) -> io::Result<()>) -> (Disk, io::Result<()>) {
    let folder = Crashing { disk: RefCell::new(disk), calls_left: Cell::new(calls) };
    let result = work(&folder);
    (folder.disk.into_inner(), result)
}

proptest! {
    #[test]
    fn after_any_crashes_there_is_the_old_content_or_the_new_and_the_backup_is_whole(
        crashes in prop::collection::vec((0..12usize, any::<Option<u64>>()), 1..20),
    ) {
        let mut disk = Disk::default();
        let mut current: Option<Vec<u8>> = None;
        let mut known: Vec<Option<Vec<u8>>> = vec![None];
        for (number, (calls, kept)) in crashes.into_iter().enumerate() {
            let new = format!("state {number}").into_bytes();
            let (after, result) =
                run(disk, calls, |folder| replace(folder, "state", &new, Some("state.previous")));
            let shares = |names: &BTreeMap<String, usize>| {
                names.contains_key("state") && names.get("state") == names.get("state.previous")
            };
            prop_assert!(!shares(&after.names), "one bad sector is in both files");
            disk = after.restarted(kept);
            let found = disk.read("state");
            match result {
                Ok(()) => prop_assert_eq!(&found, &Some(new.clone()), "what was acknowledged is gone"),
                Err(_) => prop_assert!(found == current || found == Some(new.clone()), "{:?}", found),
            }
            current = found;
            known.push(Some(new));
            // The backup is the one before, or an older one: never anything torn.
            let backup = disk.read("state.previous");
            prop_assert!(known.contains(&backup), "{:?}", backup);
        }
    }

    #[test]
    fn a_damaged_file_gets_its_backups_content_whenever_power_goes(
        crashes in prop::collection::vec((0..12usize, any::<Option<u64>>()), 0..6),
    ) {
        let names = ["state", "state.previous", "state.damaged"];
        let decode = |bytes: &[u8]| match bytes {
            b"torn" | b"rotten" => Meaning::Damaged("it is rotten".into()),
            bytes => Meaning::Value(bytes.to_vec()),
        };
        let mut disk = Disk::default();
        for content in ["one", "two"] {
            let write = |folder: &Crashing| replace(folder, "state", content.as_bytes(), Some("state.previous"));
            disk = run(disk, 12, write).0.restarted(None);
        }
        let state = disk.names["state"];
        disk.inodes[state].content = b"rotten".to_vec();
        let mut is_mended = false;
        for (calls, kept) in crashes.into_iter().chain([(12, None)]) {
            let mut found = None;
            let (after, _) = run(disk, calls, |folder| {
                found = Some(recover(folder, names, 6, decode));
                Ok(())
            });
            disk = after.restarted(kept);
            prop_assert_eq!(disk.read("state.previous"), Some(b"one".to_vec()));
            match found {
                Some(Ok(Recovered::Current(value) | Recovered::Previous { value, .. })) => {
                    prop_assert_eq!(value, b"one".to_vec());
                    is_mended = true;
                }
                Some(Err(RecoverError::Io(..))) => prop_assert!(!is_mended, "it was whole"),
                found => prop_assert!(false, "{:?}", found),
            }
        }
        prop_assert_eq!((disk.read("state"), disk.read("state.damaged")), (Some(b"one".to_vec()), Some(b"rotten".to_vec())));
    }

    #[test]
    fn a_removed_file_stays_removed(calls in 0..4usize, kept in any::<Option<u64>>()) {
        let (disk, _) = run(Disk::default(), 9, |folder| replace(folder, "state", b"old", None));
        let (after, result) = run(disk, calls, |folder| remove(folder, "state"));
        let found = after.restarted(kept).read("state");
        prop_assert!(found.is_none() || result.is_err() && found == Some(b"old".to_vec()));
    }
}

#[test]
fn a_file_of_the_system_is_replaced_and_the_one_before_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let system = SystemFolder::new(folder.path(), 0o640);
    for content in ["one", "two", "three"] {
        replace(&system, "state", content.as_bytes(), Some("state.previous")).unwrap();
    }
    let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    assert_eq!((read("state"), read("state.previous")), ("three".into(), "two".into()));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left over");
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &fs::metadata(folder.path().join("state")).unwrap().permissions(),
    );
    assert_eq!(mode & 0o777, 0o640);
    let former = fs::metadata(folder.path().join("state")).unwrap();
    replace(&SystemFolder::new(folder.path(), 0o600).like(&former), "state", b"four", None).unwrap();
    let like = fs::metadata(folder.path().join("state")).unwrap();
    assert_eq!((read("state"), like.mode(), like.uid()), ("four".into(), former.mode(), former.uid()));
    remove(&system, "state").unwrap();
    remove(&system, "state").unwrap();
    assert!(!folder.path().join("state").exists());
}

#[test]
fn a_link_under_the_name_of_the_new_file_is_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let [victim, new, state] = ["victim", "state.new", "state"].map(|name| folder.path().join(name));
    std::fs::write(&victim, "kept").unwrap();
    std::os::unix::fs::symlink(&victim, &new).unwrap();
    replace(&SystemFolder::new(folder.path(), 0o600), "state", b"one", None).unwrap_err();
    assert_eq!(std::fs::read(&victim).unwrap(), b"kept");
    assert!(!state.exists());
}

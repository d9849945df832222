//! Entries that a core has the home set together.
//!
//! ```text
//!   a core                               home
//!   writes of one turn: data is there
//!   batch of their entries ────────────► compares, logs and sets those that need no wait
//!   the others ask again, one by one ──► Home::commit_alone
//! ```
//!
//! A message and its answer cost about as much as the change of an entry, or far more when one of
//! the cores sleeps. So writes whose data is there in the same turn of a core share them. No write
//! waits for what another one of its batch needs: the home answers at once, and says which entries
//! it has set.

use super::home::{Entries, Home, home, lock};
use crate::entry::{Entry, OFFSET};
use crate::mutant::{self, Mutant};
use block::IoError;
use mapping::Unlocked;
use std::cell::RefCell;
use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::task::{Poll, Waker};

/// Most entries of a batch. With more requests in flight, the core works on some while the home
/// sets the entries of others.
const MOST: usize = 8;

/// The end of a write to one cluster of the disk, whose data is in its place.
#[derive(Clone)]
pub(super) struct Commit {
    pub cluster: u64,
    /// The entry that the cluster had when the write began.
    pub old: Entry,
    pub target: Target,
    /// The bytes of the cluster that were written.
    pub range: Range<u64>,
}

/// The place of a write's data.
#[derive(Clone, Copy)]
pub(super) enum Target {
    /// A cluster that the core had, to which the entry will point.
    New(u64),
    /// The cluster that the entry points to. The write was to whole subclusters that had neither
    /// data nor zeroes.
    Kept {
        /// Changes that had failed when the write began.
        failed: u64,
    },
}

/// The batches of one core.
pub(super) struct Batches {
    view: Entries,
    /// The last one, which more writes may join until it is sent.
    last: RefCell<Option<Rc<Batch>>>,
}

/// Writes of one turn.
#[derive(Default)]
struct Batch {
    /// `None` once they were sent.
    commits: RefCell<Option<Vec<Commit>>>,
    /// For each of them, whether its entry was set.
    answer: RefCell<Option<Result<Vec<bool>, IoError>>>,
    waiting: RefCell<Vec<Waker>>,
}

impl Batches {
    pub(super) fn new(view: &Entries) -> Batches {
        Batches { view: view.clone(), last: RefCell::default() }
    }

    /// Has the home set the entry of a write. Returns whether it has: if not, nothing has changed,
    /// and the home must be asked with [`Home::commit_alone`].
    ///
    /// # Errors
    /// [`IoError::DeviceGone`] if the home has ended.
    pub(super) async fn commit(&self, commit: Commit) -> Result<bool, IoError> {
        let (batch, number) = self.join(commit);
        batch.ended(number).await
    }

    /// Adds a write to the batch of this turn. Returns the batch, and the write's place in it.
    fn join(&self, commit: Commit) -> (Rc<Batch>, usize) {
        let mut last = self.last.borrow_mut();
        let open = last.as_ref().filter(|batch| batch.has_room()).cloned();
        let batch = open.unwrap_or_else(|| {
            let batch = Rc::new(Batch { commits: RefCell::new(Some(Vec::new())), ..Batch::default() });
            // Its first turn comes when all tasks that are ready now have run.
            reactor::current().spawn(batch.clone().send(self.view.clone()));
            last.insert(batch).clone()
        });
        let mut commits = batch.commits.borrow_mut();
        let commits = commits.get_or_insert_default();
        commits.push(commit);
        let number = commits.len() - 1;
        (batch.clone(), number)
    }
}

impl Batch {
    /// Whether it was not sent, and more writes may join it.
    fn has_room(&self) -> bool {
        self.commits.borrow().as_ref().is_some_and(|commits| commits.len() < MOST)
    }

    /// Sends the batch to the home, and passes the answer on.
    async fn send(self: Rc<Self>, view: Entries) {
        let commits = self.commits.take().unwrap_or_default();
        let answer = view.at_owner_at_once(0, move |view| home(view).commit_batch(view, &commits)).await;
        *self.answer.borrow_mut() = Some(answer);
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    /// Waits for the answer to a write.
    async fn ended(&self, number: usize) -> Result<bool, IoError> {
        poll_fn(|cx| match &*self.answer.borrow() {
            Some(answer) => {
                let answer = answer.as_ref().map(|set| set.get(number).copied().unwrap_or(false));
                Poll::Ready(answer.map_err(|error| *error))
            }
            None => {
                self.waiting.borrow_mut().push(cx.waker().clone());
                Poll::Pending
            }
        })
        .await
    }
}

/// An entry of a batch that is about to be set.
struct Change {
    /// Number of the write in the batch.
    number: usize,
    slot: Unlocked,
    new: Entry,
}

impl Home {
    /// Ends writes that need not wait. An entry is set if it is in memory, still the same, and
    /// locked by no task, and if the table and the log have room. Nothing has changed for the other
    /// writes. Returns for each write whether its entry was set.
    fn commit_batch(&self, view: &Entries, commits: &[Commit]) -> Vec<bool> {
        // All of them change at once, and the log has them before.
        let mut changes: Vec<Change> = Vec::with_capacity(commits.len());
        for (number, commit) in commits.iter().enumerate() {
            // The entry of one cluster changes once, as the second new one would lack the first.
            let is_other = |change: &Change| commits[change.number].cluster != commit.cluster;
            if changes.iter().all(is_other) {
                changes.extend(self.change_of(view, number, commit));
            }
        }
        let mut are_set = vec![false; commits.len()];
        let entries: Vec<_> =
            changes.iter().map(|change| (commits[change.number].cluster, change.new)).collect();
        if self.log.get().is_some_and(|log| !log.note_at_once(&entries)) {
            return are_set;
        }
        for Change { number, slot, new } in changes {
            self.note_setting(view, new);
            match view.format().geometry.has_extended_l2 {
                true => slot.set_pair(new.word, new.bitmap),
                false => slot.set(new.word),
            }
            self.note_end(view, &commits[number]);
            are_set[number] = true;
        }
        self.tidy(view);
        are_set
    }

    /// The change of a write's entry, if that needs no wait.
    fn change_of(&self, view: &Entries, number: usize, commit: &Commit) -> Option<Change> {
        let geometry = view.format().geometry;
        let index = (commit.cluster / geometry.l2_entries()) as usize;
        let slot = view.unlocked(commit.cluster * geometry.entry_words())?;
        let bitmap = if geometry.has_extended_l2 { slot.next() } else { 0 };
        let now = Entry { word: slot.entry(), bitmap };
        let is_valid = geometry.place(now, commit.cluster * geometry.cluster_size(), 0).is_ok();
        let has_table = self.has_table(view, index) == Ok(true);
        let new = self.written(view, commit, now).filter(|_| is_valid && has_table)?;
        Some(Change { number, slot, new })
    }

    /// Ends a write, whatever it has to wait for: as [`Home::commit_batch`] otherwise. When the
    /// entry is another one, or with an error, the cluster that the core had is free. Returns
    /// whether the entry was set.
    ///
    /// # Errors
    /// As [`Home::begin`].
    pub(super) async fn commit_alone(&self, view: &Entries, commit: Commit) -> Result<bool, IoError> {
        let set = async {
            let mut locked = lock(view, commit.cluster).await?;
            let Some(new) = self.written(view, &commit, locked.entry) else { return Ok(false) };
            self.reserve_tables(view, commit.cluster..commit.cluster + 1).await?;
            self.set(view, &mut locked, new).await?;
            self.note_end(view, &commit);
            Ok(true)
        };
        let is_set = set.await;
        match (is_set, commit.target) {
            (Ok(true), _) => self.tidy(view),
            (_, Target::New(place)) => self.take_back(view, vec![place]).await,
            (_, Target::Kept { .. }) => {}
        }
        is_set
    }

    /// The entry for the data of a write, if the cluster's entry `now` is still the one that the
    /// write has begun with. Of a write to subclusters, others may have got data meanwhile, but no
    /// change may have failed: it may have written to the same subclusters.
    fn written(&self, view: &Entries, commit: &Commit, now: Entry) -> Option<Entry> {
        let geometry = view.format().geometry;
        let mask = geometry.subclusters_in(0, &commit.range);
        let (old, place, is_same) = match commit.target {
            Target::New(place) => {
                let is_same = now == commit.old || mutant::is(Mutant::CommitWithoutCompare);
                (commit.old, place * geometry.cluster_size(), is_same)
            }
            Target::Kept { failed } => {
                let is_same = now.word == commit.old.word && now.has_neither(mask)
                    || mutant::is(Mutant::SubclustersWithoutCompare);
                let is_intact = view.format().failed.load(Ordering::Acquire) == failed;
                (now, commit.old.word & OFFSET, is_same && is_intact)
            }
        };
        (is_same && !view.format().is_corrupt()).then(|| geometry.written(old, place, mask))
    }

    /// Notes that the entry of a write was set: the cluster that the core had is in use, and what
    /// the old entry referred to is not.
    fn note_end(&self, view: &Entries, commit: &Commit) {
        if let Target::New(place) = commit.target {
            self.lent.borrow_mut().remove(&place);
            self.drop_place(view, commit.old);
        }
    }
}

//! The users of a table: each is a task on one core.

use super::toy::{Toy, pause};
use super::world::{BLOCKS, Content, World};
use base::Rng;
use mapping::{Table, View};
use std::rc::Rc;

/// The bit of an entry whose cluster is not changed in place: another reference needs it.
const SHARED: u64 = 1 << 63;

/// The cluster of an entry that is not 0.
fn cluster(entry: u64) -> usize {
    ((entry & !SHARED) - 1) as usize
}

/// Whether a block can be written in place.
fn is_own(entry: u64) -> bool {
    entry != 0 && entry & SHARED == 0
}

/// A user on one core.
struct User {
    world: Rc<World>,
    table: Rc<Table<Toy>>,
    view: Rc<View<Toy>>,
    rng: Rng,
}

/// A snapshot: its clusters, and what they held when it was made.
struct Snapshot {
    clusters: Vec<Option<usize>>,
    values: Vec<Content>,
}

/// A task that makes `steps` random steps.
pub async fn work(world: Rc<World>, table: Rc<Table<Toy>>, rng: Rng, steps: u64) {
    let view = table.view().expect("a toy opens");
    let mut user = User { world, table, view, rng };
    for _ in 0..steps {
        if user.world.has_failed() {
            return;
        }
        user.step().await;
        user.world.count();
    }
}

/// A task that saves the whole table.
pub async fn save(world: Rc<World>, table: Rc<Table<Toy>>) {
    let view = table.view().expect("a toy opens");
    flush(&world, &view).await;
}

/// A task that reads the whole table.
pub async fn verify(world: Rc<World>, table: Rc<Table<Toy>>) {
    let view = table.view().expect("a toy opens");
    let rng = Rng::new(1);
    let user = User { world, table, view, rng };
    for block in 0..BLOCKS {
        for half in 0..2 {
            user.read(block, half, "at the end").await;
        }
    }
}

/// Flushes until that succeeds, and checks the disk.
async fn flush(world: &World, view: &Rc<View<Toy>>) {
    loop {
        let least = world.set_entries();
        if view.flush().await.is_ok() {
            return world.check_disk(&least);
        }
    }
}

impl User {
    async fn step(&mut self) {
        let block = self.rng.below(BLOCKS as u64) as usize;
        let half = self.rng.below(2) as usize;
        match self.rng.below(40) {
            0..16 => self.read(block, half, "a read of").await,
            16..30 => self.write(block, half).await,
            30..34 => self.discard(block).await,
            34..37 => self.relocate(block).await,
            37 => flush(&self.world, &self.view).await,
            38 => self.snapshot().await,
            _ => pause(200_000).await,
        }
    }

    async fn read(&self, block: usize, half: usize, what: &str) {
        let least = self.world.acked(block, half);
        let _running = self.view.begin();
        let entry = self.view.fetch(self.world.index(block)).await.expect("a toy loads");
        pause(30_000).await;
        let value = if entry == 0 { 0 } else { self.world.content(cluster(entry))[half] };
        pause(5000).await;
        self.world.judge(block, half, least, value, what);
    }

    async fn write(&self, block: usize, half: usize) {
        let world = &self.world;
        world.writer(block, half).acquire(1).await;
        let running = self.view.begin_change().await;
        let version = world.begin_version(block, half, false);
        let value = world.value(block, half, version);
        let index = world.index(block);
        let mut entry = self.view.fetch(index).await.expect("a toy loads");
        if !is_own(entry) {
            entry = self.write_elsewhere(block, half, value).await;
        }
        if is_own(entry) {
            pause(30_000).await;
            world.set_half(cluster(entry), half, value);
            pause(5000).await;
        }
        world.end_version(block, half);
        drop(running);
        world.writer(block, half).release(1);
    }

    /// Copies a block to a new cluster, with the new half. Returns an entry to write in place, if
    /// another user has copied it meanwhile, else 0.
    async fn write_elsewhere(&self, block: usize, half: usize, value: u64) -> u64 {
        let world = &self.world;
        let mut slot = self.view.lock(world.index(block)).await.expect("a toy loads");
        let old = slot.entry();
        if is_own(old) {
            return old;
        }
        let Some(new) = world.allocate() else {
            world.fail("all clusters are in use".into());
            return 0;
        };
        pause(20_000).await;
        let mut content = if old == 0 { [0, 0] } else { world.content(cluster(old)) };
        content[half] = value;
        pause(20_000).await;
        world.set_half(new, 0, content[0]);
        world.set_half(new, 1, content[1]);
        self.set(&mut slot, block, new as u64 + 1).await;
        if old != 0 {
            self.drop_reference(cluster(old));
        }
        0
    }

    async fn set(&self, slot: &mut mapping::Slot<Toy>, block: usize, entry: u64) {
        self.world.note_setting(block, entry);
        slot.set(entry).await.expect("no core ends");
        self.world.note_set(block);
    }

    async fn discard(&self, block: usize) {
        let world = &self.world;
        for half in 0..2 {
            world.writer(block, half).acquire(1).await;
        }
        let running = self.view.begin_change().await;
        for half in 0..2 {
            world.begin_version(block, half, true);
        }
        let index = world.index(block);
        if let Some(slot) = self.view.unlocked(index) {
            let old = slot.entry();
            if old != 0 {
                world.note_setting(block, 0);
                slot.set(0);
                world.note_set(block);
                self.drop_reference(cluster(old));
            }
        } else {
            let mut slot = self.view.lock(index).await.expect("a toy loads");
            let old = slot.entry();
            if old != 0 {
                self.set(&mut slot, block, 0).await;
                self.drop_reference(cluster(old));
            }
        }
        for half in 0..2 {
            world.end_version(block, half);
        }
        drop(running);
        for half in 0..2 {
            world.writer(block, half).release(1);
        }
    }

    /// Moves a block to another cluster: marks it while no write changes it in place, and copies
    /// it. No task waits for a grace period with a slot locked.
    async fn relocate(&self, block: usize) {
        let world = &self.world;
        let index = world.index(block);
        let held = self.view.hold().await;
        self.view.grace().await;
        let mut slot = self.view.lock(index).await.expect("a toy loads");
        let own = slot.entry();
        if !is_own(own) {
            return;
        }
        self.set(&mut slot, block, own | SHARED).await;
        drop(slot);
        drop(held);
        let mut slot = self.view.lock(index).await.expect("a toy loads");
        if slot.entry() != own | SHARED {
            return; // a write has moved it
        }
        let Some(new) = world.allocate() else { return };
        pause(20_000).await;
        let content = world.content(cluster(own));
        pause(20_000).await;
        world.set_half(new, 0, content[0]);
        world.set_half(new, 1, content[1]);
        self.set(&mut slot, block, new as u64 + 1).await;
        self.drop_reference(cluster(own));
    }

    /// Removes a reference. After the last one, and when the change is durable and earlier requests
    /// have ended, the cluster is free.
    fn drop_reference(&self, cluster: usize) {
        if !self.world.remove_reference(cluster) {
            return;
        }
        let (world, view, table) = (self.world.clone(), self.view.clone(), self.table.clone());
        world.begin();
        reactor::current().spawn(async move {
            flush(&world, &view).await;
            view.grace().await;
            world.release(cluster);
            drop(table);
            world.end();
        });
    }

    /// Makes a snapshot, lets time pass, checks it and deletes it.
    async fn snapshot(&self) {
        let world = &self.world;
        if !world.snapshot.try_acquire(1) {
            return;
        }
        let held = self.view.hold().await;
        self.view.grace().await;
        let values = world.values();
        let mut clusters = Vec::new();
        for block in 0..BLOCKS {
            let mut slot = self.view.lock(world.index(block)).await.expect("a toy loads");
            let entry = slot.entry();
            clusters.push((entry != 0).then(|| cluster(entry)));
            if entry != 0 {
                world.add_reference(cluster(entry));
                self.set(&mut slot, block, entry | SHARED).await;
            }
        }
        drop(held);
        let snapshot = Snapshot { clusters, values };
        pause(500_000).await;
        for (block, cluster) in snapshot.clusters.iter().enumerate() {
            let content = cluster.map_or([0, 0], |cluster| world.content(cluster));
            if content != snapshot.values[block] {
                let expected = snapshot.values[block];
                world.fail(format!("block {block} of a snapshot: {content:x?}; was {expected:x?}"));
            }
        }
        snapshot.clusters.iter().flatten().for_each(|cluster| self.drop_reference(*cluster));
        world.snapshot.release(1);
    }
}

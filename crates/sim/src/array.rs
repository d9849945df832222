//! The RAID engine as a subject: `raid::Array` on simulated disks.

use crate::commands::{self, Command, Said};
use crate::creation;
use crate::disk::SimDisk;
use crate::kept::Kept;
use crate::plan::{Next, Shape};
use crate::subject::{Local, Refusal, Running, Scrubbed, Subject};
use block::{Device, Flags, IoError, Op};
use raid::admin::check::{self, CheckError};
use raid::admin::edit::{self, EditError};
use raid::admin::open::{self as admin, Candidate, OpenError, Selection};
use raid::admin::report::ArrayReport;
use raid::admin::verify::{Difference, Observer};
use raid::array::members::{Attached, SlotState};
use raid::array::{Array, Before, SlotStatus, Start, Wanted};
use raid::jobs;
use raid::metadata::create::Identities;
use raid::metadata::intent_bitmap::{NEED_SYNC, WRITTEN};
use raid::metadata::{
    self, AddOptions, AssembleOptions, EpochId, Found, Goal, Label, Layout, Member, Store, Table, Target,
    read_superblock,
};
use raid::{ArrayConfig, Consistency, Geometry, Uuid};
use reactor::Core;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Nanoseconds since 1970 at which simulated arrays are made and started.
pub(crate) const WALL_NS: u64 = 1_700_000_000_000_000_000;
/// Stripes between two checkpoints of a rebuild.
const CHECKPOINT_STRIPES: u64 = 4;
/// Nanoseconds between two looks whether another task has moved a window.
const LOOK_NS: u64 = 20_000;

/// Makes and assembles `raid::Array`.
#[derive(Default)]
pub struct ArraySubject;

fn random_bytes() -> [u8; 16] {
    let core = reactor::current();
    (u128::from(core.random_u64()) << 64 | u128::from(core.random_u64())).to_le_bytes()
}

fn random_uuid() -> Uuid {
    Uuid::from_random(random_bytes())
}

/// The configuration of an array of that shape.
pub(crate) fn config(shape: &Shape, uuid: Uuid) -> ArrayConfig {
    let has_log = shape.consistency != Consistency::None;
    ArrayConfig {
        uuid,
        name: "sim".into(),
        level: shape.level,
        geometry: shape.geometry,
        matrix: shape.matrix,
        consistency: shape.consistency,
        block_size: shape.block_size,
        region_bytes: shape.region_strips * u64::from(shape.geometry.strip_bytes),
        lanes: if has_log { shape.lanes } else { 0 },
        lane_bytes: if has_log { shape.lane_bytes } else { 0 },
    }
}

/// Creates the array as the command does, unless an earlier try has.
async fn create(shape: &Shape, disks: &[SimDisk]) -> Result<(), String> {
    let Some(creation) = &shape.creation else { return make(shape, disks, "sim").await };
    let array = Some("sim".to_owned());
    let wanted = admin::Wanted { array, ..admin::Wanted::default() };
    match admin::select(candidates(disks, false), &wanted).await {
        Ok(_) => return Ok(()),
        Err(
            OpenError::NotFound { .. }
            | OpenError::Refused { refusal: metadata::Refusal::Creating { .. }, .. },
        ) => {}
        Err(error) => return Err(error.to_string()),
    }
    let devices: Vec<Arc<dyn Device>> =
        disks.iter().map(|disk| Arc::new(disk.clone()) as Arc<dyn Device>).collect();
    let planned = metadata::plan_creation(&devices, &[], &creation::options(shape, creation)).await;
    let created = planned.map_err(|error| error.to_string())?.commit().await;
    created.map(drop).map_err(|error| error.to_string())
}

/// Leaves an array on the disks, in another order, to which something was written.
async fn soil(shape: &Shape, disks: &[SimDisk]) -> Result<(), String> {
    let Some(rotated) = shape.creation.as_ref().and_then(|creation| creation.former) else { return Ok(()) };
    let mut disks = disks.to_vec();
    disks.rotate_left(rotated);
    make(&Shape { is_unsynced: false, ..shape.clone() }, &disks, "former").await?;
    let selection = select(&disks, false, false, false).await.map_err(|refusal| format!("{refusal:?}"))?;
    let array = Array::start(start_of(selection)).await.map_err(|error| error.to_string())?;
    let channel = array.open_channel().map_err(|error| error.to_string())?;
    let core = reactor::current();
    for _ in 0..core.random_u64() % 8 {
        let offset = core.random_u64() % (array.limits().capacity / 4096) * 4096;
        let buffer = core.buffers().take(4096).await;
        let (_, written) = buffer.transfer(&*channel, Op::Write, Flags::FUA, offset).await;
        written.map_err(text("write"))?;
    }
    match core.random_u64().is_multiple_of(2) {
        true => array.stop().await.map_err(text("stop")),
        false => Ok(()),
    }
}

/// Writes the superblocks of an array.
async fn make(shape: &Shape, disks: &[SimDisk], name: &str) -> Result<(), String> {
    let config = ArrayConfig { name: name.into(), ..config(shape, random_uuid()) };
    config.check().map_err(|error| error.to_string())?;
    let mut targets = Vec::new();
    for (slot, disk) in disks.iter().enumerate() {
        let layout = Layout::new(disk.limits().capacity, &config).map_err(|error| error.to_string())?;
        let channel = disk.open_channel().map_err(|error| error.to_string())?;
        if shape.creation.is_some() {
            disk.poke(0, &vec![0; layout.data_offset as usize]); // the disk holds garbage
        }
        if shape.is_unsynced {
            let core = reactor::current();
            let garbage = (0..layout.data_bytes / 8).flat_map(|_| core.random_u64().to_le_bytes());
            disk.poke(layout.data_offset, &garbage.collect::<Vec<u8>>());
        }
        targets.push(Target { slot, channel, layout });
    }
    let members = (0..disks.len()).map(|_| Member::live(random_uuid())).collect();
    let table = Table {
        is_logging: config.consistency == Consistency::Ppl,
        config,
        generation: 1,
        settled: 0,
        epoch: 1,
        served_epoch: 1,
        history: vec![EpochId { epoch: 1, id: reactor::current().random_u64() }],
        nonce: random_bytes(),
        is_clean: true,
        is_creating: false,
        initial_region: if shape.is_unsynced { WRITTEN | NEED_SYNC } else { 0 },
        members,
        resync_cursor: None,
        scrub_cursor: None,
        scrub_repairs: false,
        scrub_is_scheduled: false,
        scrub_cancelled_s: 0,
        maintenance: raid::metadata::Maintenance::default(),
        scrubbed_ns: 0,
        reshape: None,
        owner: String::new(),
        created_ns: WALL_NS,
        updated_ns: WALL_NS,
    };
    let store = Store::new(disks.len());
    for (slot, result) in store.commit(&targets, &table).await {
        result.map_err(|error| format!("slot {slot}: {error}"))?;
    }
    Ok(())
}

/// The superblocks of those disks that have one.
async fn find(disks: &[SimDisk]) -> Result<Vec<Found>, String> {
    let mut found: Vec<Found> = Vec::new();
    for disk in disks {
        let channel = disk.open_channel().map_err(|error| error.to_string())?;
        match read_superblock(disk.name(), &*channel, disk.limits().capacity).await {
            Ok(superblock) => found.push(superblock),
            // A blank disk, or one whose first superblock was torn.
            Err(metadata::ReadError::None { .. } | metadata::ReadError::Bad { .. }) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(found)
}

async fn extend(shape: &Shape, own: &[SimDisk], new: &[SimDisk]) -> Result<Geometry, String> {
    let found = find(own).await?;
    let assembly =
        metadata::assemble(found, &AssembleOptions::default()).map_err(|refusal| refusal.to_string())?;
    let mut targets = Vec::new();
    for (slot, found) in assembly.members.iter().enumerate() {
        let Some(found) = found else { continue };
        let Label::Member(superblock) = &found.label else { continue };
        let Some(disk) = own.iter().find(|disk| disk.name() == found.name) else { continue };
        let channel = disk.open_channel().map_err(|error| error.to_string())?;
        targets.push(Target { slot, channel, layout: superblock.layout });
    }
    let devices: Vec<Arc<dyn Device>> =
        new.iter().map(|disk| Arc::new(disk.clone()) as Arc<dyn Device>).collect();
    let options = AddOptions { force: true, now_ns: WALL_NS, identities: Identities::Core };
    let table = match shape.next {
        None => {
            let added = metadata::add_groups(&assembly, &targets, &devices, &options).await;
            added.map_err(|error| error.to_string())?
        }
        Some(Next { level, data, parity }) => {
            let goal = Goal { level: Some(level), members: Some(data + parity) };
            let begun = metadata::begin_restripe(&assembly, &targets, &devices, goal, &options).await;
            begun.map_err(|error| error.to_string())?
        }
    };
    Ok(table.config.geometry)
}

fn candidates(disks: &[SimDisk], is_named: bool) -> Vec<Candidate> {
    let candidate = |disk: &SimDisk| {
        let device: Arc<dyn Device> = Arc::new(disk.clone());
        Candidate { name: disk.name().to_owned(), device: Ok(device), is_named }
    };
    disks.iter().map(candidate).collect()
}

/// Picks the array's members among disks as the commands do, which scan a directory or get the
/// names of all members.
async fn select(
    disks: &[SimDisk],
    force: bool,
    read_only: bool,
    is_named: bool,
) -> Result<Selection, Refusal> {
    let wanted = admin::Wanted { array: None, run: true, force, read_only };
    let selected = admin::select(candidates(disks, is_named), &wanted).await;
    selected.map_err(|error| match error {
        OpenError::Refused { refusal: metadata::Refusal::DirtyDegraded { .. }, .. } => Refusal::DirtyDegraded,
        OpenError::Refused {
            refusal: metadata::Refusal::TooFew { .. } | metadata::Refusal::Nothing, ..
        } => Refusal::TooFew,
        OpenError::Refused { refusal: refusal @ metadata::Refusal::SplitBrain { .. }, .. } => {
            Refusal::SplitBrain(refusal.to_string())
        }
        error => Refusal::Other(error.to_string()),
    })
}

/// Returns the input to the start of an array. As [`Selection::start`], but for the randomness.
fn start_of(selection: Selection) -> Start {
    let Selection { assembly, found, .. } = selection;
    Start::new(assembly, WALL_NS, true, |member| found.get(&member.name).cloned())
}

async fn assemble(
    shape: &Shape,
    disks: &[SimDisk],
    cores: &[Core],
    force: bool,
) -> Result<Rc<dyn Running>, Refusal> {
    let other = |error: String| Refusal::Other(error);
    let selection = select(disks, force, false, false).await?;
    // Only worlds with operations follow a disk that the keeper takes for another slot.
    let spares = if shape.operations.is_some() { selection.spares() } else { Vec::new() };
    let array = Array::start(start_of(selection)).await.map_err(|error| match error {
        raid::array::StartError::TooFew { .. } => Refusal::TooFew,
        raid::array::StartError::DirtyDegraded { .. } => Refusal::DirtyDegraded,
        error => other(error.to_string()),
    })?;
    let array = RunningArray::new(array);
    if !shape.has_keeper {
        return Ok(Rc::new(array));
    }
    if let Some(operations) = shape.operations {
        array.array.set_deadlines(operations.deadlines);
    }
    let core = cores.last().expect("a machine has a core");
    let kept =
        core.with_current(|| Kept::new(array, shape, &spares)).map_err(|error| other(error.to_string()))?;
    Ok(Rc::new(kept))
}

async fn look(disks: &[SimDisk]) -> Result<Option<Rc<dyn Running>>, Refusal> {
    let selection = select(disks, false, true, false).await?;
    match Array::start_read_only(start_of(selection)).await {
        Ok(array) => Ok(Some(Rc::new(RunningArray::new(array)))),
        Err(raid::array::StartError::ReadOnly { .. }) => Ok(None),
        Err(error) => Err(Refusal::Other(error.to_string())),
    }
}

/// Does a command.
async fn do_command(disks: &[SimDisk], command: Command, named: Option<String>) -> Said {
    let selection = match select(disks, false, !command.is_modifying(), false).await {
        Ok(selection) => selection,
        Err(Refusal::Other(error)) => return Said::Failed(error),
        Err(_) => return Said::Nothing,
    };
    let edited = match command {
        Command::Fail(slot) => edit::fail_members(&selection, &[slot.to_string()], WALL_NS).await.map(drop),
        Command::RemoveFailed => {
            edit::remove_members(&selection, &[edit::FAILED.into()], WALL_NS).await.map(drop)
        }
        Command::RemoveSpare(_) => match named {
            Some(spare) => edit::remove_members(&selection, &[spare], WALL_NS).await.map(drop),
            None => return Said::Nothing,
        },
        Command::AddSpare => return add_spare(&selection, disks).await,
        Command::ReAdd(_) => return re_add(selection, &named.unwrap_or_default()).await,
        Command::SetReadErrors(value) => {
            edit::set_maintenance(&selection, &commands::budget(value), WALL_NS).await.map(drop)
        }
        Command::Examine => return examine(&selection).await,
        Command::Check => return check(&selection).await,
    };
    match edited {
        Ok(()) => Said::Done,
        Err(EditError::NotClean) => Said::NotClean,
        Err(EditError::Needed { .. } | EditError::Missing { .. }) => Said::Needed,
        Err(EditError::Out { .. } | EditError::Unknown { .. }) => Said::Nothing,
        Err(error) => Said::Failed(error.to_string()),
    }
}

/// Makes the last disk a spare of the array.
async fn add_spare(selection: &Selection, disks: &[SimDisk]) -> Said {
    let Some(disk) = disks.last() else { return Said::Nothing };
    let device: Arc<dyn Device> = Arc::new(disk.clone());
    let config = &selection.assembly.table.config;
    if let Err(error) = jobs::fit(&device, config) {
        return Said::Failed(error.to_string());
    }
    match jobs::label_spare(&device, random_uuid(), Some(config), WALL_NS).await {
        Ok(()) => Said::Done,
        Err(error) => Said::Failed(error.to_string()),
    }
}

/// Starts the array, rebuilds a former member, and stops the array.
async fn re_add(selection: Selection, name: &str) -> Said {
    let Some(device) = selection.found.get(name).cloned() else { return Said::Nothing };
    let array = match Array::start(start_of(selection)).await {
        Ok(array) => array,
        Err(error) => return Said::Failed(error.to_string()),
    };
    let jobs = match array.keep(jobs::Options::default()) {
        Ok(jobs) => jobs,
        Err(error) => return Said::Failed(error.to_string()),
    };
    let added = jobs.re_add(device).await;
    jobs.idle().await;
    let is_it = |slot: &SlotStatus| slot.device.as_deref() == Some(name) && slot.filled.is_none();
    let is_back = array.slots().iter().any(|slot| slot.state == SlotState::Live && is_it(slot));
    jobs.stop().await;
    let stopped = array.stop().await;
    match (added, stopped) {
        (Ok(_), Ok(())) if is_back => Said::Done,
        (Ok(_), Ok(())) => Said::Failed(format!("{name} is no member")),
        (Err(error), _) => Said::Failed(error.to_string()),
        (_, Err(error)) => Said::Failed(error.to_string()),
    }
}

async fn examine(selection: &Selection) -> Said {
    let report = ArrayReport::of_table(&selection.assembly.table);
    match check::pending(selection).await {
        Ok(_) if report.members.len() == selection.devices.len() => Said::Done,
        Ok(_) => Said::Wrong(format!("{} members are reported", report.members.len())),
        Err(error) => Said::Failed(error.to_string()),
    }
}

async fn check(selection: &Selection) -> Said {
    match check::check(selection, false, &mut Unheard).await {
        Ok(checked) if checked.parity.rows_different > 0 => Said::Wrong(format!("a check found {checked:?}")),
        Ok(_) => Said::Done,
        Err(CheckError::NotClean { .. }) => Said::NotClean,
        Err(error) => Said::Failed(error.to_string()),
    }
}

/// Does not listen to a check.
struct Unheard;

impl Observer for Unheard {
    fn progress(&mut self, _: u64, _: u64) {}
    fn difference(&mut self, _: &Difference) {}
}

impl Subject for ArraySubject {
    fn capacity(&self, shape: &Shape) -> u64 {
        if let Some(next) = shape.next {
            return next.geometry(shape).capacity();
        }
        let (groups, group_stripes) = (shape.most_groups, shape.most_stripes);
        Geometry { groups, group_stripes, ..shape.geometry }.capacity()
    }

    fn create<'a>(&'a self, shape: &'a Shape, disks: &'a [SimDisk]) -> Local<'a, Result<(), String>> {
        Box::pin(create(shape, disks))
    }

    fn soil<'a>(&'a self, shape: &'a Shape, disks: &'a [SimDisk]) -> Local<'a, Result<(), String>> {
        Box::pin(soil(shape, disks))
    }

    fn extend<'a>(
        &'a self,
        shape: &'a Shape,
        own: &'a [SimDisk],
        new: &'a [SimDisk],
    ) -> Local<'a, Result<Geometry, String>> {
        Box::pin(extend(shape, own, new))
    }

    fn assemble<'a>(
        &'a self,
        shape: &'a Shape,
        disks: &'a [SimDisk],
        cores: &'a [Core],
        force: bool,
    ) -> Local<'a, Result<Rc<dyn Running>, Refusal>> {
        Box::pin(assemble(shape, disks, cores, force))
    }

    fn command<'a>(
        &'a self,
        disks: &'a [SimDisk],
        command: Command,
        named: Option<String>,
    ) -> Local<'a, Said> {
        Box::pin(do_command(disks, command, named))
    }

    fn look<'a>(&'a self, disks: &'a [SimDisk]) -> Local<'a, Result<Option<Rc<dyn Running>>, Refusal>> {
        Box::pin(look(disks))
    }
}

/// An array whose stripes the simulator fills, syncs and scrubs one by one.
pub(crate) struct RunningArray {
    pub(crate) array: Arc<Array>,
    /// A task moves a window, or fills a slot during a reshape.
    is_moving: Cell<bool>,
}

pub(crate) fn text(what: &str) -> impl Fn(IoError) -> String {
    let what = what.to_owned();
    move |error| format!("{what}: {error}")
}

impl RunningArray {
    fn new(array: Arc<Array>) -> RunningArray {
        RunningArray { array, is_moving: Cell::new(false) }
    }

    /// Moves windows of some strips, one task at a time.
    async fn move_all(&self) -> Result<(), String> {
        while self.array.is_reshaping() {
            self.take_turn().await;
            let result = self.move_some().await;
            self.is_moving.set(false);
            result?;
        }
        Ok(())
    }

    async fn take_turn(&self) {
        while self.is_moving.replace(true) {
            reactor::current().sleep(LOOK_NS).await;
        }
    }

    /// Moves a window, or fills a slot whose filling a loss of power interrupted.
    async fn move_some(&self) -> Result<(), String> {
        if !self.array.is_reshaping() {
            return Ok(()); // it ended before this turn
        }
        let slots = self.array.slots();
        if let Some(slot) = slots.iter().find(|slot| slot.filled.is_some()) {
            let result = self.walk(slot.slot, self.array.table().members[slot.slot].uuid).await;
            let is_gone = self.array.slots()[slot.slot].filled.is_none();
            return if is_gone { Ok(()) } else { result };
        }
        let strip_bytes = u64::from(self.array.config().geometry.strip_bytes);
        let bytes = (1 + reactor::current().random_u64() % 12) * strip_bytes;
        let result = match self.array.move_window(bytes).await {
            Ok(false) => self.array.end_reshape().await,
            result => result.map(drop),
        };
        result.map_err(text("reshape"))
    }

    /// Fills a slot; continues if the disk fills it already.
    async fn fill(&self, slot: usize, disk: &SimDisk) -> Result<(), String> {
        let array = &self.array;
        let config = ArrayConfig { lanes: array.log_lanes(), ..ArrayConfig::clone(array.config()) };
        let uuid = match array.slots()[slot].filled {
            Some(_) => array.table().members[slot].uuid,
            None => {
                let uuid = random_uuid();
                let layout =
                    Layout::new(disk.limits().capacity, &config).map_err(|error| error.to_string())?;
                let incoming = Attached { device: Arc::new(disk.clone()), layout };
                array.start_filling(slot, uuid, incoming).await.map_err(text("start of filling"))?;
                uuid
            }
        };
        self.walk(slot, uuid).await
    }

    /// Fills a slot to its end.
    async fn walk(&self, slot: usize, uuid: Uuid) -> Result<(), String> {
        let array = &self.array;
        let (geometry, steps) = (array.config().geometry, array.fill_steps());
        loop {
            let Some(cursor) = array.slots()[slot].filled else {
                return Err("no disk fills the slot".into());
            };
            if cursor >= steps {
                break;
            }
            let is_ours = geometry.group(geometry.stripe_at_step(cursor)) == slot / geometry.group_members();
            if is_ours {
                let wanted = vec![Wanted { slot, before: Before::Anything }];
                let filled = array.fill_step(cursor, wanted).await.map_err(text("filling"))?;
                filled.into_iter().try_for_each(|(_, filled)| filled.map(drop)).map_err(text("filling"))?;
            }
            array.advance(slot, cursor + 1);
            if (cursor + 1).is_multiple_of(CHECKPOINT_STRIPES) {
                array.checkpoint(slot).await.map_err(text("checkpoint"))?;
            }
        }
        array.finish_filling(slot, uuid).await.map_err(text("end of filling"))
    }

    /// Whether the slot's member is that disk.
    fn holds(&self, slot: usize, disk: &SimDisk) -> bool {
        let [own, _] = self.array.members().attached(slot);
        own.is_some_and(|own| own.device.name() == disk.name())
    }

    async fn resync_all(&self) -> Result<(), String> {
        let config = self.array.config().clone();
        let is_open = |stripe: u64| self.array.region_bits(stripe) & NEED_SYNC != 0;
        let stripes = 0..config.geometry.stripes();
        let regions: BTreeSet<u64> =
            stripes.clone().filter(|s| is_open(*s)).map(|s| config.region_of(s)).collect();
        if self.live().contains(&false) {
            return Ok(());
        }
        for region in regions {
            for stripe in stripes.clone().filter(|stripe| config.region_of(*stripe) == region) {
                let result = self.array.scrub_stripe(stripe, true).await.map_err(text("resync"))?;
                if result.is_incomplete {
                    return Err(format!("resync: stripe {stripe} lacks data"));
                }
            }
            self.array.clear_region(region, NEED_SYNC);
        }
        self.array.settle_regions().await.map_err(text("settling the write-intent bitmap"))
    }

    async fn scrub_all(&self, is_repairing: bool) -> Result<Scrubbed, String> {
        let geometry = self.array.config().geometry;
        let mut scrubbed = Scrubbed::default();
        for stripe in 0..geometry.stripes() {
            let result = self.array.scrub_stripe(stripe, is_repairing).await.map_err(text("scrub"))?;
            scrubbed.stripes += u64::from(result.mismatches != 0);
            let is_named = |strip: &usize| result.named >> strip & 1 == 1;
            let strips = (0..geometry.group_members()).filter(is_named);
            scrubbed.named.extend(strips.map(|strip| geometry.member(stripe, strip)));
        }
        Ok(scrubbed)
    }
}

impl Running for RunningArray {
    fn device(&self) -> Arc<dyn Device> {
        self.array.clone()
    }

    fn geometry(&self) -> Option<Geometry> {
        Some(self.array.config().geometry)
    }

    fn live(&self) -> Vec<bool> {
        self.array.slots().iter().map(|slot| slot.state == SlotState::Live).collect()
    }

    fn fail(&self, slot: usize) -> Local<'_, Result<(), String>> {
        Box::pin(async move { self.array.fail(slot).await.map_err(text("fail")) })
    }

    fn add<'a>(&'a self, slot: usize, disk: &'a SimDisk) -> Local<'a, Result<(), String>> {
        Box::pin(async move {
            if self.array.is_reshaping() && reactor::current().random_u64().is_multiple_of(2) {
                self.take_turn().await;
                let is_there = self.live()[slot] && self.holds(slot, disk);
                let result = if is_there { Ok(()) } else { self.fill(slot, disk).await };
                self.is_moving.set(false);
                if result.is_ok() && self.holds(slot, disk) {
                    return result;
                }
            }
            self.move_all().await?;
            if self.live()[slot] && self.holds(slot, disk) {
                return Ok(()); // a loss of power interrupted its filling
            }
            let geometry = self.array.config().geometry;
            let was_filling = self.array.slots()[slot].filled.is_some();
            match self.fill(slot, disk).await {
                // Another disk filled the slot and is gone: the array has detached it now.
                Err(_) if was_filling && self.array.slots()[slot].filled.is_none() => {
                    self.fill(slot, disk).await
                }
                // The array has grown since the disk was laid out.
                Err(_) if self.array.config().geometry != geometry => self.fill(slot, disk).await,
                // So it was, and nothing of it was missing any more.
                Ok(()) if was_filling && !self.holds(slot, disk) => self.fill(slot, disk).await,
                result => result,
            }
        })
    }

    fn scrub(&self, repair: bool) -> Local<'_, Result<Scrubbed, String>> {
        Box::pin(self.scrub_all(repair))
    }

    fn strips_at(&self, slot: usize) -> Option<Range<u64>> {
        let [own, _] = self.array.members().attached(slot);
        let start = own?.layout.data_offset;
        Some(
            start
                ..start
                    + self.array.config().geometry.group_stripes
                        * u64::from(self.array.config().geometry.strip_bytes),
        )
    }

    fn resync(&self) -> Local<'_, Result<(), String>> {
        Box::pin(self.resync_all())
    }

    fn grow(&self) -> Local<'_, Result<(), String>> {
        Box::pin(async move { self.array.grow(None).await.map(drop).map_err(|error| error.to_string()) })
    }

    fn is_reshaping(&self) -> bool {
        self.array.is_reshaping()
    }

    fn reshape(&self) -> Local<'_, Result<(), String>> {
        Box::pin(self.move_all())
    }

    fn stop(&self) -> Local<'_, Result<(), String>> {
        Box::pin(async move { self.array.stop().await.map_err(text("stop")) })
    }
}

//! Creation of an array: checks the devices, clears their content, writes the superblocks last.
//!
//! The first table says "being created" and is written to all devices. Only then the second table
//! is written, which can be assembled. So after a crash there is no array or a complete one.

use super::create_error::CreateError;
use super::intent_bitmap::{NEED_SYNC, WRITTEN};
use super::io::{self, Target};
use super::layout::Layout;
use super::shape::Shape;
use super::signatures::probe;
use super::store::{Store, write_label, zero_superblock};
use super::superblock::{EpochId, FIRST_GENERATION, Label, Member, Spare, Table};
use crate::config::ROW_BYTES;
use crate::mutant::{self, Mutant};
use crate::{ArrayConfig, Consistency, Uuid};
use block::{Channel, Device, IoError, Limits};
use std::rc::Rc;
use std::sync::Arc;

/// Bytes cleared at a member's end, where other formats keep second copies of their signatures.
const TAIL_BYTES: u64 = 1 << 20;

/// Options of a creation.
#[derive(Clone, Debug)]
pub struct CreateOptions {
    /// The array to create.
    pub shape: Shape,
    /// Whether to overwrite devices with known content.
    pub force: bool,
    /// Whether to zero the data area if the devices can do that without a transfer of zeroes. If
    /// not, or if one cannot, a later sync computes parity (every region is marked [`NEED_SYNC`]).
    pub zeroes: bool,
    /// The host that creates the array.
    pub owner: String,
    /// Nanoseconds since 1970.
    pub now_ns: u64,
    /// Source of identities.
    pub identities: Identities,
}

/// Source of random identities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identities {
    /// The system's randomness.
    System,
    /// The core's randomness: the same in every run of a simulation.
    Core,
}

impl Identities {
    /// 128 random bits.
    pub fn bits(self) -> [u8; 16] {
        match self {
            Identities::System => Uuid::random().expect("the system's randomness").0,
            Identities::Core => {
                let core = reactor::current();
                let bits = u128::from(core.random_u64()) << 64 | u128::from(core.random_u64());
                bits.to_le_bytes()
            }
        }
    }

    /// A random number that distinguishes an epoch from one of another line with the same number.
    pub fn epoch_id(self) -> u64 {
        u128::from_le_bytes(self.bits()) as u64
    }

    /// A new UUID.
    pub fn uuid(self) -> Uuid {
        Uuid::from_random(self.bits())
    }
}

/// A device that is to become a member.
pub(super) struct Candidate {
    pub name: String,
    pub channel: Rc<dyn Channel>,
    pub limits: Limits,
}

impl Candidate {
    pub fn open(device: &Arc<dyn Device>) -> Result<Candidate, CreateError> {
        let limits = device.limits();
        let unfit = |why: String| Err(CreateError::Unfit { device: device.name().to_owned(), why });
        if limits.read_only {
            return unfit("read-only device".into());
        }
        if limits.block_size > ROW_BYTES {
            return unfit(format!(
                "block size {} bytes: at most {ROW_BYTES} is supported",
                limits.block_size
            ));
        }
        Ok(Candidate { name: device.name().to_owned(), channel: device.open_channel()?, limits })
    }

    pub fn failed(&self, doing: &'static str) -> impl Fn(IoError) -> CreateError {
        let device = self.name.clone();
        move |error| CreateError::Io { device: device.clone(), doing, error }
    }
}

/// Creates an array of `devices`, slot by slot in their order, and returns its first table. Must
/// run on a core.
///
/// # Errors
/// See [`CreateError`]. All errors but [`CreateError::Io`] mean that nothing was written.
pub async fn create(devices: &[Arc<dyn Device>], options: &CreateOptions) -> Result<Table, CreateError> {
    create_of(&candidates(devices, &[])?, &[], options).await
}

async fn create_of(
    members: &[Candidate],
    spares: &[Candidate],
    options: &CreateOptions,
) -> Result<Table, CreateError> {
    let config = look(members, spares, options).await?;
    write(members, spares, options, config).await
}

/// An array whose devices passed every check. Nothing is written yet.
pub struct PlannedCreation {
    devices: Vec<Arc<dyn Device>>,
    spares: Vec<Arc<dyn Device>>,
    options: CreateOptions,
    config: ArrayConfig,
}

/// First step of the creation of an array of `devices` with `spares`: all checks. Spares are
/// checked and refused like members. Nothing is written. Must run on a core.
///
/// # Errors
/// See [`CreateError`].
pub async fn plan_creation(
    devices: &[Arc<dyn Device>],
    spares: &[Arc<dyn Device>],
    options: &CreateOptions,
) -> Result<PlannedCreation, CreateError> {
    let candidates = candidates(devices, spares)?;
    let (members, others) = candidates.split_at(devices.len());
    let config = look(members, others, options).await?;
    let (devices, spares, options) = (devices.to_vec(), spares.to_vec(), options.clone());
    Ok(PlannedCreation { devices, spares, options, config })
}

impl PlannedCreation {
    /// The array's identity.
    pub fn uuid(&self) -> Uuid {
        self.config.uuid
    }

    /// Second step: clears the devices and writes the superblocks. Must run on a core.
    ///
    /// # Errors
    /// [`CreateError::Io`] or [`CreateError::Open`] if a device fails. Then the devices' content
    /// may be lost, and superblocks of the array may remain.
    pub async fn commit(self) -> Result<Table, CreateError> {
        let PlannedCreation { devices, spares, options, config } = self;
        let candidates = candidates(&devices, &spares)?;
        let (members, spares) = candidates.split_at(devices.len());
        write(members, spares, &options, config).await
    }
}

/// Runs all checks; returns the configuration that the devices allow.
async fn look(
    members: &[Candidate],
    spares: &[Candidate],
    options: &CreateOptions,
) -> Result<ArrayConfig, CreateError> {
    let config = plan(members, options)?;
    layouts(members, spares, options, &config)?;
    if !options.force {
        refuse_used(members.iter().chain(spares)).await?;
    }
    Ok(config)
}

/// Does all writes.
async fn write(
    members: &[Candidate],
    spares: &[Candidate],
    options: &CreateOptions,
    config: ArrayConfig,
) -> Result<Table, CreateError> {
    let (own, spare_layouts) = layouts(members, spares, options, &config)?;
    let cleared = members.iter().zip(&own).map(|(candidate, layout)| clear(candidate, layout));
    first_error(io::all(cleared).await)?;
    let is_zero = options.zeroes && zero_data(members, &own).await?;
    let target = |(slot, (candidate, layout)): (usize, (&Candidate, &Layout))| Target {
        slot,
        channel: candidate.channel.clone(),
        layout: *layout,
    };
    let targets: Vec<Target> = members.iter().zip(&own).enumerate().map(target).collect();
    let creating = first_table(config, is_zero, options);
    let mut created = creating.next(options.now_ns);
    created.is_creating = false;
    let store = Store::new(targets.len());
    let skipped = usize::from(mutant::is(Mutant::CreatedInOneStep));
    for table in [&creating, &created].into_iter().skip(skipped) {
        for (slot, result) in store.commit(&targets, table).await {
            result.map_err(members[slot].failed("cannot write the superblock"))?;
        }
    }
    for (spare, layout) in spares.iter().zip(&spare_layouts) {
        clear(spare, layout).await?;
        label(spare, &created.config, options).await?;
    }
    Ok(created)
}

fn candidates(
    devices: &[Arc<dyn Device>],
    spares: &[Arc<dyn Device>],
) -> Result<Vec<Candidate>, CreateError> {
    let candidates: Vec<Candidate> =
        devices.iter().chain(spares).map(Candidate::open).collect::<Result<_, _>>()?;
    refuse_twice(&candidates)?;
    Ok(candidates)
}

/// The layouts of members and spares.
fn layouts(
    members: &[Candidate],
    spares: &[Candidate],
    options: &CreateOptions,
    config: &ArrayConfig,
) -> Result<(Vec<Layout>, Vec<Layout>), CreateError> {
    let of_members = members.iter().map(|member| layout(member, options, config));
    let of_members: Vec<Layout> = of_members.collect::<Result<_, _>>()?;
    let of_spares = spares.iter().map(|spare| fit(spare, config, "a spare"));
    Ok((of_members, of_spares.collect::<Result<_, _>>()?))
}

/// The layout of a device for an existing array, if the device is suitable as `role`.
pub(super) fn fit(spare: &Candidate, config: &ArrayConfig, role: &str) -> Result<Layout, CreateError> {
    let unfit = |why: String| CreateError::Unfit { device: spare.name.clone(), why };
    let Limits { block_size, max_transfer, capacity, .. } = spare.limits;
    if block_size > config.block_size {
        return Err(unfit(format!("block size {block_size} bytes: the array has {}", config.block_size)));
    }
    let strip = config.geometry.strip_bytes;
    if max_transfer < strip {
        return Err(unfit(format!("largest transfer {max_transfer} bytes: a strip has {strip}")));
    }
    Layout::new(capacity, config).map_err(|error| unfit(format!("too small for {role}: {error}")))
}

/// Makes a device a spare of the array.
async fn label(spare: &Candidate, config: &ArrayConfig, options: &CreateOptions) -> Result<(), CreateError> {
    let label = Label::Spare(Spare {
        member: options.identities.uuid(),
        array: Some(config.uuid),
        array_name: config.name.clone(),
        member_bytes: spare.limits.capacity,
        created_ns: options.now_ns,
        owner: options.owner.clone(),
    });
    let written = write_label(&*spare.channel, spare.limits.capacity, &label).await;
    written.map_err(spare.failed("cannot write the superblock"))
}

/// Refuses a device that occurs twice: both members would fail together.
pub(super) fn refuse_twice(candidates: &[Candidate]) -> Result<(), CreateError> {
    for (i, candidate) in candidates.iter().enumerate() {
        if candidates[..i].iter().any(|other| other.name == candidate.name) {
            let why = "device is given twice".to_owned();
            return Err(CreateError::Unfit { device: candidate.name.clone(), why });
        }
    }
    Ok(())
}

/// The configuration that the devices allow.
fn plan(candidates: &[Candidate], options: &CreateOptions) -> Result<ArrayConfig, CreateError> {
    let capacity = candidates.iter().map(|candidate| candidate.limits.capacity).min().unwrap_or(0);
    let block_size = candidates.iter().map(|candidate| candidate.limits.block_size).max().unwrap_or(512);
    options.shape.config(options.identities.uuid(), candidates.len(), capacity, block_size)
}

/// The layout of a device.
fn layout(
    candidate: &Candidate,
    options: &CreateOptions,
    config: &ArrayConfig,
) -> Result<Layout, CreateError> {
    let capacity = options
        .shape
        .member_bytes
        .map_or(candidate.limits.capacity, |most| most.min(candidate.limits.capacity));
    Layout::new(capacity, config)
        .map_err(|error| CreateError::Unfit { device: candidate.name.clone(), why: error.to_string() })
}

pub(super) async fn refuse_used(
    candidates: impl Iterator<Item = &Candidate> + Clone,
) -> Result<(), CreateError> {
    let found = io::all(candidates.clone().map(|c| probe(&*c.channel, &c.limits))).await;
    let mut in_use = Vec::new();
    for (candidate, found) in candidates.zip(found) {
        let findings = found.map_err(candidate.failed("cannot be read"))?;
        if !findings.is_empty() {
            in_use.push((candidate.name.clone(), findings));
        }
    }
    if in_use.is_empty() { Ok(()) } else { Err(CreateError::InUse(in_use)) }
}

/// Clears old superblocks first, then the whole area before the data and the device's end.
pub(super) async fn clear(candidate: &Candidate, layout: &Layout) -> Result<(), CreateError> {
    let Candidate { channel, limits, .. } = candidate;
    let failed = candidate.failed("cannot be cleared");
    zero_superblock(&**channel, limits.capacity).await.map_err(&failed)?;
    if mutant::is(Mutant::OldAreasKept) {
        return Ok(());
    }
    io::zero(&**channel, limits, 0, layout.data_offset).await.map_err(&failed)?;
    let tail_at = limits.capacity.saturating_sub(TAIL_BYTES).max(layout.data_offset) & !4095;
    io::zero(&**channel, limits, tail_at, limits.capacity - tail_at).await.map_err(&failed)
}

/// Makes all members' data read as zeroes, if every member can do that without a transfer.
pub(super) async fn zero_data(candidates: &[Candidate], layouts: &[Layout]) -> Result<bool, CreateError> {
    let zero = |(candidate, layout): (&'_ Candidate, &'_ Layout)| {
        let (channel, limits) = (candidate.channel.clone(), candidate.limits.clone());
        let (offset, len) = (layout.data_offset, layout.data_bytes);
        async move { io::zero_cheaply(&*channel, &limits, offset, len).await }
    };
    let mut is_zero = true;
    let results = io::all(candidates.iter().zip(layouts).map(zero)).await;
    for (candidate, result) in candidates.iter().zip(results) {
        match result {
            Ok(()) => {}
            Err(IoError::Unsupported) => is_zero = false,
            Err(error) => return Err(candidate.failed("cannot be zeroed")(error)),
        }
    }
    Ok(is_zero)
}

fn first_error(results: Vec<Result<(), CreateError>>) -> Result<(), CreateError> {
    results.into_iter().collect()
}

fn first_table(config: ArrayConfig, is_zero: bool, options: &CreateOptions) -> Table {
    let identities = options.identities;
    let initial_region = match (is_zero, config.geometry.parity) {
        (true, _) => 0,
        (false, 0) => WRITTEN,
        (false, _) => WRITTEN | NEED_SYNC,
    };
    let id = identities.epoch_id();
    Table {
        generation: FIRST_GENERATION,
        settled: 0,
        epoch: 1,
        served_epoch: 1,
        history: vec![EpochId { epoch: 1, id }],
        nonce: identities.bits(),
        is_clean: true,
        is_creating: true,
        is_logging: config.consistency == Consistency::Ppl,
        initial_region,
        members: (0..config.geometry.members()).map(|_| Member::live(identities.uuid())).collect(),
        resync_cursor: None,
        scrub_cursor: None,
        scrub_repairs: false,
        scrub_is_scheduled: false,
        scrub_cancelled_s: 0,
        maintenance: options.shape.maintenance,
        scrubbed_ns: 0,
        reshape: None,
        owner: options.owner.clone(),
        created_ns: options.now_ns,
        updated_ns: options.now_ns,
        config,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::testing::{Disk, disks};
    use crate::metadata::{AssembleOptions, Refusal, assemble, read_superblock};
    use crate::{Consistency, Level};
    use reactor::run_simulated;

    fn options(level: Level) -> CreateOptions {
        let shape = Shape {
            strip_bytes: Some(4096),
            lanes: Some((2, 32 << 10)),
            region_bytes: Some(16 << 10),
            ..Shape::new("vm", level)
        };
        let owner = "host".to_owned();
        CreateOptions { shape, force: false, zeroes: true, owner, now_ns: 5, identities: Identities::Core }
    }

    fn candidates(disks: &[Disk]) -> Vec<Candidate> {
        let candidate = |(i, disk): (usize, &Disk)| Candidate {
            name: format!("disk{i}"),
            channel: disk.channel(),
            limits: Limits::new(disk.capacity()),
        };
        disks.iter().enumerate().map(candidate).collect()
    }

    async fn found(disks: &[Disk]) -> Vec<crate::metadata::Found> {
        let mut all = Vec::new();
        for (i, disk) in disks.iter().enumerate() {
            all.extend(read_superblock(&format!("disk{i}"), &*disk.channel(), disk.capacity()).await);
        }
        all
    }

    #[test]
    fn every_level_is_made_and_assembles() {
        run_simulated(1, |_| async {
            for level in Level::ALL {
                let (disks, _) = disks(10);
                disks.iter().for_each(|disk| disk.edit(|bytes| bytes.fill(0xab)));
                let mut options = options(level);
                (options.shape.data, options.shape.parity) = (Some(6), Some(4));
                let table = create_of(&candidates(&disks), &[], &options).await.unwrap();
                assert_eq!(table.initial_region, 0);
                let assembly = assemble(found(&disks).await, &AssembleOptions::default()).unwrap();
                assert_eq!(assembly.table, table, "{level:?}");
                assert!(assembly.members.iter().all(Option::is_some) && assembly.missing.is_empty());
                disks[9].edit(|bytes| {
                    let layout = Layout::new(1 << 20, &table.config).unwrap();
                    let range =
                        layout.data_offset as usize..(layout.data_offset + layout.data_bytes) as usize;
                    assert!(bytes[range].iter().all(|byte| *byte == 0));
                });
            }
        });
    }

    #[test]
    fn members_that_are_not_zeroed_need_a_sync() {
        run_simulated(2, |_| async {
            let (disks, _) = disks(3);
            disks[1].refuse_zeroes();
            let table = create_of(&candidates(&disks), &[], &options(Level::Raid5)).await.unwrap();
            assert_eq!(table.initial_region, WRITTEN | NEED_SYNC);
            assert!(assemble(found(&disks).await, &AssembleOptions::default()).is_ok());
        });
    }

    #[test]
    fn a_device_that_holds_something_is_named_and_untouched_until_forced() {
        run_simulated(3, |_| async {
            let (disks, _) = disks(3);
            disks[2].edit(|bytes| bytes[1080..1082].copy_from_slice(b"\x53\xef"));
            let mut options = options(Level::Raid5);
            let error = create_of(&candidates(&disks), &[], &options).await.unwrap_err().to_string();
            assert_eq!(error, "disk2 holds ext2/3/4 at byte 1080; --force overwrites them");
            assert!(disks.iter().all(|disk| disk.writes() == 0));
            options.force = true;
            create_of(&candidates(&disks), &[], &options).await.unwrap();
            options.force = false;
            let error = create_of(&candidates(&disks), &[], &options).await.unwrap_err().to_string();
            assert!(error.contains("disk0 holds Freestone array at byte 4096; disk1 holds"), "{error}");
        });
    }

    #[test]
    fn a_disk_image_is_refused() {
        run_simulated(7, |_| async {
            let images: [&[u8]; 6] =
                [b"QFI\xfb", b"KDMV", b"vhdxfile", b"hsqs", b"# Disk DescriptorFile", b"LUKS\xba\xbe"];
            for magic in images {
                let (disks, _) = disks(3);
                disks[1].edit(|bytes| bytes[..magic.len()].copy_from_slice(magic));
                let refusal = create_of(&candidates(&disks), &[], &options(Level::Raid5)).await.unwrap_err();
                assert!(matches!(&refusal, CreateError::InUse(found) if found.len() == 1), "{refusal}");
                assert!(disks.iter().all(|disk| disk.writes() == 0));
            }
        });
    }

    #[test]
    fn an_unreadable_block_where_a_signature_could_be_is_refused_until_forced() {
        use layers::fault::{Action, Fault, Rule};
        run_simulated(8, |_| async {
            let memory =
                |_| Arc::new(drivers::mem::MemDevice::new(&drivers::mem::Options::new(8 << 20)).unwrap());
            let faults: Vec<Arc<Fault>> = (0..3).map(|slot| Arc::new(Fault::new(memory(slot)))).collect();
            let bad = Rule::new(Action::Error(IoError::Medium)).on(&[block::Op::Read]);
            faults[1].add(bad.within(64 << 10..(64 << 10) + 512));
            let candidate = |fault: &Arc<Fault>| Candidate {
                name: "disk".into(),
                channel: fault.open_channel().unwrap(),
                limits: fault.limits(),
            };
            let candidates: Vec<Candidate> = faults.iter().map(candidate).collect();
            let mut options = options(Level::Raid5);
            let error = create_of(&candidates, &[], &options).await.unwrap_err().to_string();
            assert_eq!(error, "disk holds an unreadable block at byte 65536; --force overwrites them");
            options.force = true;
            create_of(&candidates, &[], &options).await.unwrap();
        });
    }

    #[test]
    fn spares_are_looked_at_like_members_and_labelled_for_the_array() {
        run_simulated(6, |_| async {
            let (disks, _) = disks(4);
            let all = candidates(&disks);
            let mut options = options(Level::Raid5);
            disks[3].edit(|bytes| bytes[1080..1082].copy_from_slice(b"\x53\xef"));
            let error = create_of(&all[..3], &all[3..], &options).await.unwrap_err().to_string();
            assert!(error.starts_with("disk3 holds ext2/3/4"), "{error}");
            assert!(disks.iter().all(|disk| disk.writes() == 0));
            options.force = true;
            let small = Candidate { limits: Limits::new(256 << 10), ..candidates(&disks).remove(3) };
            let error = create_of(&all[..3], &[small], &options).await.unwrap_err().to_string();
            assert!(error.starts_with("disk3: too small for a spare"), "{error}");
            assert!(disks.iter().all(|disk| disk.writes() == 0));
            let table = create_of(&all[..3], &all[3..], &options).await.unwrap();
            let assembly = assemble(found(&disks).await, &AssembleOptions::default()).unwrap();
            assert_eq!((&assembly.table, assembly.spares.len()), (&table, 1));
            let Label::Spare(spare) = &assembly.spares[0].label else { panic!("a spare") };
            assert_eq!((spare.array, &*spare.array_name), (Some(table.config.uuid), "vm"));
        });
    }

    #[test]
    fn power_may_go_at_any_sector_and_leaves_the_whole_array_or_none() {
        run_simulated(4, |_| async {
            let mut options = options(Level::Raid6);
            options.force = true;
            let (mut made, mut refused) = (0, 0);
            let sectors = {
                let (disks, power) = disks(4);
                disks.iter().for_each(Disk::refuse_zeroes);
                create_of(&candidates(&disks), &[], &options).await.unwrap();
                power.fail_after(1 << 20);
                create_of(&candidates(&disks), &[], &options).await.unwrap();
                (1 << 20) - power.left()
            };
            for cut in (1..sectors).step_by(97).chain(sectors - 150..sectors) {
                let (disks, power) = disks(4);
                disks.iter().for_each(Disk::refuse_zeroes);
                create_of(&candidates(&disks), &[], &options).await.unwrap();
                let old = found(&disks).await;
                power.fail_after(cut);
                let result = create_of(&candidates(&disks), &[], &options).await;
                power.restore();
                let new = found(&disks).await;
                match assemble(new.clone(), &AssembleOptions { run: true, ..Default::default() }) {
                    // Every copy of some old superblocks may still exist.
                    Ok(assembly) if old.iter().any(|old| new.contains(old)) => {
                        assert!(assembly.table.generation == 2);
                    }
                    Ok(assembly) => {
                        assert!(assembly.missing.is_empty(), "{cut}: {:?}", assembly.missing);
                        made += 1;
                    }
                    Err(refusal) => {
                        assert!(result.is_err(), "{cut}: {refusal}");
                        let is_right = matches!(
                            refusal,
                            Refusal::Nothing
                                | Refusal::Creating { .. }
                                | Refusal::TooFew { .. }
                                | Refusal::Foreign { .. }
                        );
                        assert!(is_right, "{cut}: {refusal}");
                        refused += 1;
                    }
                }
            }
            assert!(refused > 50 && made > 20, "{made} {refused}");
        });
    }

    #[test]
    fn a_device_given_twice_or_read_only_is_refused() {
        let memory = |read_only| -> Arc<dyn Device> {
            let options = drivers::mem::Options { read_only, ..drivers::mem::Options::new(8 << 20) };
            Arc::new(drivers::mem::MemDevice::new(&options).unwrap())
        };
        run_simulated(5, move |_| async move {
            let mut options = options(Level::Raid1);
            options.shape.consistency = Some(Consistency::Bitmap);
            let error = create(&[memory(false), memory(false)], &options).await.unwrap_err().to_string();
            assert_eq!(error, "mem: device is given twice");
            let error = create(&[memory(true), memory(false)], &options).await.unwrap_err().to_string();
            assert_eq!(error, "mem: read-only device");
        });
    }
}

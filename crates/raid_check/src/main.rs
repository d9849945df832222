//! `raid-check MEMBER…`: verifies what stands on the members of an array, and on a pool, and writes
//! nothing.
//!
//! Written by `docs/on-disk-formats.md`: it shares no code with the engine, so that an error of the
//! engine, or of the document, is not repeated here. One line a finding: member, structure, offset,
//! value. Exit code 0: clean; 1: findings; 2: cannot read.

#![forbid(unsafe_code)]

mod device;
mod log;
mod maps;
mod math;
mod parity;
mod pool;
mod superblock;

use device::Device;
use parity::Array;
use std::process::ExitCode;
use superblock::Superblock;

/// Count of findings.
#[derive(Default)]
pub struct Findings {
    count: u64,
}

impl Findings {
    /// Prints a finding.
    pub fn add(&mut self, member: &str, structure: &str, offset: u64, value: String) {
        self.add_some(member, structure, offset, value, u64::MAX);
    }

    /// Prints a finding if there are fewer than `most`.
    pub fn add_some(&mut self, member: &str, structure: &str, offset: u64, value: String, most: u64) {
        self.count += 1;
        if self.count <= most {
            println!("{member}: {structure}: offset {offset}: {value}");
        }
    }
}

/// A device with a superblock of an array.
pub struct Member {
    name: String,
    device: Device,
    block: Superblock,
}

fn main() -> ExitCode {
    let names: Vec<String> = std::env::args().skip(1).collect();
    if names.is_empty() || names.iter().any(|name| name.starts_with('-')) {
        eprintln!(
            "usage: raid-check DEVICE…\nVerifies the members of arrays, and pools of volumes. Writes nothing."
        );
        return ExitCode::from(2);
    }
    let (mut findings, mut members) = (Findings::default(), Vec::new());
    for name in names {
        let device = match Device::open(&name) {
            Ok(device) => device,
            Err(error) => {
                eprintln!("raid-check: {name}: {error}");
                return ExitCode::from(2);
            }
        };
        match superblock::read(&name, &device, &mut findings) {
            Some(block) if block.is_spare() => println!("{name}: a spare"),
            Some(block) => members.push(Member { name, device, block }),
            None if pool::check(&name, &device, &mut findings) => println!("{name}: a pool of volumes"),
            None => findings.add(&name, "superblock", 4096, "no valid copy".into()),
        }
    }
    while let Some(member) = members.first() {
        let array = member.block.array().to_vec();
        let (own, others) = members.into_iter().partition(|member| member.block.array() == array);
        check_array(own, &mut findings);
        members = others;
    }
    println!("{} findings", findings.count);
    ExitCode::from(u8::from(findings.count > 0))
}

/// Checks an array by the newest table of its members. A table that is being created counts only
/// when all of them are.
fn check_array(members: Vec<Member>, findings: &mut Findings) {
    let order = |member: &&Member| (!member.block.is_creating(), member.block.generation());
    let newest = members.iter().max_by_key(order).expect("a member");
    let (table, name) = (newest.block.clone(), table_name(&newest.block));
    let mut slots: Vec<Option<&Member>> = vec![None; table.members()];
    for member in &members {
        let slot = member.block.slot();
        let is_known = slot < slots.len() && table.member(slot) == &member.block.0[176..192];
        if !is_known {
            match member.block.is_creating() {
                true => println!("{}: no member of {name} yet", member.name),
                false => println!("{}: no member of {name} any more", member.name),
            }
            continue;
        }
        let generation = member.block.generation();
        if table.state(slot) == 0 && table.is_clean() && member.block.common() != table.common() {
            let why =
                format!("generation {generation} differs from {} of {}", table.generation(), newest.name);
            findings.add(&member.name, "superblock", 4096, why);
        }
        match table.state(slot) {
            0 if slots[slot].is_some() => {
                findings.add(&member.name, "superblock", 4096, "slot stands twice".into())
            }
            0 => slots[slot] = Some(member),
            _ => println!("{}: slot {slot} is not live", member.name),
        }
    }
    for slot in (0..slots.len()).filter(|slot| table.state(*slot) == 0 && slots[*slot].is_none()) {
        findings.add(&name, "superblock", 4096, format!("slot {slot} is live and not among the devices"));
    }
    if table.is_reshaping() || !table.is_clean() {
        let why = if table.is_reshaping() { "is being reshaped" } else { "was not stopped cleanly" };
        println!("{name}: {why}: only superblocks are checked");
        return;
    }
    let live: Vec<&Member> = slots.iter().flatten().copied().collect();
    let regions = maps::regions(&live, findings);
    let bad = maps::bad_stripes(&live, findings);
    log::check(&live, findings);
    let array = Array { name: name.clone(), table: &table, members: slots.clone() };
    let compared = array.check(&regions, &bad, findings);
    let has_pool = pool::check(&name, &array, findings);
    let pool = if has_pool { ", a pool of volumes" } else { "" };
    println!(
        "{name}: {} members, {} bad stripes, parity of {compared} stripes compared{pool}",
        live.len(),
        bad.len()
    );
}

fn table_name(table: &Superblock) -> String {
    format!("array {}", table.name())
}

//! What the RAID engine costs on members that cost nothing, and how much of modelled drives it gets.
//!
//! Prints a line of JSON for each case: its name, the requests a second of every round, and what theory allows.

mod load;
mod member;

use block::{Device, Op};
use clap::Parser;
use load::Load;
use member::{Ceiling, Member};
use raid::array::{Array, Start, StartMember};
use raid::metadata::{EpochId, Label, Layout, Store, Table, Target, read_superblock};
use raid::{ArrayConfig, Consistency, Geometry, Level, Matrix, Uuid};
use serde_json::json;
use std::sync::Arc;

/// The command line.
#[derive(Parser)]
struct Args {
    /// Seconds that a case is measured for, each round.
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Rounds.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Only cases whose names contain this.
    #[arg(long, default_value = "")]
    only: String,
}

/// A case.
struct Case {
    name: &'static str,
    shape: Shape,
    load: Load,
    ceiling: Ceiling,
    /// Requests a second that the members' ceilings allow; 0 without.
    theory: f64,
}

/// An array to be measured.
#[derive(Clone, Copy)]
struct Shape {
    groups: usize,
    data: usize,
    parity: usize,
    strip_bytes: u32,
    consistency: Consistency,
}

const RAID5: Shape =
    Shape { groups: 1, data: 4, parity: 1, strip_bytes: 64 << 10, consistency: Consistency::Ppl };
const WIDE: Shape = Shape { data: 23, strip_bytes: 32 << 10, ..RAID5 };
const TWICE: Shape = Shape { groups: 2, data: 11, strip_bytes: 64 << 10, ..RAID5 };
/// A modelled drive. What 24 of them do together stays well below what one core can.
const DRIVE: Ceiling = Ceiling { iops: 5_000, bandwidth: 200 << 20 };
const MEMBER_BYTES: u64 = 4 << 30;

fn cases() -> Vec<Case> {
    let bitmap = |shape| Shape { consistency: Consistency::Bitmap, ..shape };
    let load = |op, len, depth, cores| Load { op, len, is_sequential: false, depth, cores };
    let engine = |name, shape, load| Case { name, shape, load, ceiling: Ceiling::default(), theory: 0.0 };
    let mut cases = vec![
        engine("read 4K, 4+1", RAID5, load(Op::Read, 4096, 32, 1)),
        engine("write 4K, 4+1, ppl", RAID5, load(Op::Write, 4096, 32, 1)),
        engine("write 4K, 4+1, bitmap", bitmap(RAID5), load(Op::Write, 4096, 32, 1)),
        engine("write full stripe, 4+1, ppl", RAID5, load(Op::Write, 256 << 10, 8, 1)),
        engine("write full stripe, 4+1, bitmap", bitmap(RAID5), load(Op::Write, 256 << 10, 8, 1)),
        engine("read 4K, 4+1, two cores", RAID5, load(Op::Read, 4096, 32, 2)),
        engine("write 4K, 4+1, ppl, two cores", RAID5, load(Op::Write, 4096, 32, 2)),
    ];
    let drives = 24.0;
    let (iops, bandwidth) = (DRIVE.iops as f64, DRIVE.bandwidth as f64);
    for (shape, names) in [
        (
            WIDE,
            [
                "drives 23+1: read 4K",
                "drives 23+1: write 4K, ppl",
                "drives 23+1: write 4K, bitmap",
                "drives 23+1: read 1M in sequence",
                "drives 23+1: write 1M in sequence, ppl",
            ],
        ),
        (
            TWICE,
            [
                "drives 2 x 11+1: read 4K",
                "drives 2 x 11+1: write 4K, ppl",
                "drives 2 x 11+1: write 4K, bitmap",
                "drives 2 x 11+1: read 1M in sequence",
                "drives 2 x 11+1: write 1M in sequence, ppl",
            ],
        ),
    ] {
        let mut add = |name, shape: Shape, op, len, is_sequential, depth, theory| {
            let load = Load { op, len, is_sequential, depth, cores: 1 };
            cases.push(Case { name, shape, load, ceiling: DRIVE, theory });
        };
        let data_share = shape.data as f64 / (shape.data + shape.parity) as f64;
        let mebibyte = (1 << 20) as f64;
        add(names[0], shape, Op::Read, 4096, false, 512, drives * iops);
        add(names[1], shape, Op::Write, 4096, false, 512, drives * iops / 5.0);
        add(names[2], bitmap(shape), Op::Write, 4096, false, 512, drives * iops / 4.0);
        add(names[3], shape, Op::Read, 1 << 20, true, 32, drives * bandwidth / mebibyte);
        add(names[4], shape, Op::Write, 1 << 20, true, 32, drives * bandwidth * data_share / mebibyte);
    }
    cases
}

fn main() {
    let args = Args::parse();
    for case in cases().into_iter().filter(|case| case.name.contains(&args.only)) {
        let (shape, ceiling) = (case.shape, case.ceiling);
        let array: Arc<dyn Device> = reactor::run(async move { start(shape, ceiling).await });
        let rounds: Vec<f64> = (0..args.rounds).map(|_| load::run(&array, case.load, args.seconds)).collect();
        println!(
            "{}",
            json!({ "name": case.name, "len": case.load.len, "rounds": rounds, "theory": case.theory })
        );
    }
}

async fn start(shape: Shape, ceiling: Ceiling) -> Arc<Array> {
    let Shape { groups, data, parity, strip_bytes, consistency } = shape;
    let mut config = ArrayConfig {
        uuid: Uuid::random(),
        name: "bench".into(),
        level: Level::NPlusM,
        geometry: Geometry { groups, data, parity, strip_bytes, group_stripes: 1 },
        matrix: Matrix::Powers,
        consistency,
        block_size: 512,
        region_bytes: 64 << 20,
        lanes: 16,
        lane_bytes: 1 << 20,
    };
    config.geometry.group_stripes = Layout::most_group_stripes(MEMBER_BYTES, &config);
    let layout = Layout::new(MEMBER_BYTES, &config).expect("it fits");
    let hollow = layout.log_offset..layout.data_offset + layout.data_bytes;
    let devices: Vec<Arc<Member>> = (0..config.geometry.members())
        .map(|_| Member::new(MEMBER_BYTES, hollow.clone(), ceiling).expect("a member"))
        .collect();
    let member = |_| raid::metadata::Member::live(Uuid::random());
    let table = Table {
        generation: 1,
        settled: 1,
        epoch: 1,
        history: vec![EpochId { epoch: 1, id: 1 }],
        nonce: [0; 16],
        is_clean: true,
        is_creating: false,
        is_logging: consistency == Consistency::Ppl,
        initial_region: 0,
        members: (0..config.geometry.members()).map(member).collect(),
        resync_cursor: None,
        scrub_cursor: None,
        scrubbed_ns: 0,
        reshape: None,
        owner: "bench".into(),
        created_ns: 1,
        updated_ns: 1,
        config,
    };
    let store = Store::new(devices.len());
    let target = |(slot, device): (usize, &Arc<Member>)| Target {
        slot,
        channel: device.open_channel().expect("a channel"),
        layout,
    };
    let targets: Vec<Target> = devices.iter().enumerate().map(target).collect();
    assert!(store.commit(&targets, &table).await.iter().all(|(_, result)| result.is_ok()));
    let mut members = Vec::new();
    for (target, device) in targets.iter().zip(devices) {
        let found = read_superblock("member", &*target.channel, MEMBER_BYTES).await.expect("just written");
        assert!(matches!(found.label, Label::Member(_)));
        members.push(Some(StartMember { device, found, layout }));
    }
    let table = table.retry(1);
    Array::start(Start { table, members, wall_ns: 1, is_simulated: false, needs_sync: false })
        .await
        .expect("it starts")
}

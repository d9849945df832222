//! The log of a core over members in memory.

use super::*;
use block::{Channel, IoError, IoFuture, Request, StatusReport};
use reactor::{current, run_simulated};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// A member that delays each write and records it.
struct Disk {
    content: RefCell<Vec<u8>>,
    /// Offset and length of each write, in order of submission.
    writes: RefCell<Vec<(u64, u64)>>,
    fails: Cell<bool>,
}

impl Channel for Disk {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        IoFuture::new(async move {
            self.writes.borrow_mut().push((offset, req.len));
            current().sleep(10_000).await;
            if self.fails.get() {
                return Err(IoError::TimedOut);
            }
            let at = offset as usize;
            req.data.copy_to(&mut self.content.borrow_mut()[at..at + req.data.len()]);
            Ok(())
        })
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, _: u64, len: u64) -> IoFuture<'a> {
        report.answer_data(len)
    }
}

/// A log of one lane of 64 KiB over 3 data and 2 parity members.
struct Setup {
    log: Rc<Log>,
    config: Arc<crate::ArrayConfig>,
    disks: Vec<Rc<Disk>>,
    channels: Vec<Rc<dyn Channel>>,
}

/// A payload with one partial for every parity.
struct Bytes<'a> {
    partial: &'a [u8],
    redo: &'a [&'a [u8]],
}

impl Payload for Bytes<'_> {
    fn partial(&self, _parity: usize) -> &[u8] {
        self.partial
    }

    fn redo(&self) -> Redo<'_> {
        self.redo.iter().copied().collect()
    }
}

const NONCE: Nonce = Nonce([3; 16]);
const LOG_AT: u64 = 8192;
const LANE: u64 = 64 << 10;

impl Setup {
    fn new() -> Rc<Setup> {
        let config = Arc::new(test_array(3, 2, 8192, 1));
        let disk = |_| {
            let content = RefCell::new(vec![0; (LOG_AT + LANE) as usize + (1 << 20)]);
            Rc::new(Disk { content, writes: RefCell::default(), fails: Cell::new(false) })
        };
        let disks: Vec<Rc<Disk>> = (0..5).map(disk).collect();
        let channels = disks.iter().map(|disk| disk.clone() as Rc<dyn Channel>).collect();
        Rc::new(Setup { log: Rc::new(Log::new(config.clone(), NONCE, 1)), config, disks, channels })
    }

    /// Appends an entry of one strip, 4 KiB of it, for the stripe's parities in the mask.
    async fn append(&self, stripe: u64, parities: u8) -> Result<Ticket, AppendError> {
        let partial = [0x11; 4096];
        let target = |parity: usize| {
            let slot = self.config.geometry.member(stripe, 3 + parity);
            Target { parity, slot, channel: self.channels[slot].clone(), log_offset: LOG_AT }
        };
        let targets: Vec<Target> = (0..2).filter(|j| parities >> j & 1 == 1).map(target).collect();
        let entry = Entry {
            stripe,
            offset: 0,
            len: 4096,
            modified: 0b10,
            checksums: &[],
            targets: &targets,
            payload: &Bytes { partial: &partial, redo: &[] },
        };
        self.log.append(&entry).await
    }

    fn writes(&self) -> Vec<Vec<(u64, u64)>> {
        self.disks.iter().map(|disk| disk.writes.take()).collect()
    }
}

#[test]
fn appends_that_come_while_a_write_is_in_flight_go_out_together() {
    run_simulated(1, |_| async {
        let setup = Setup::new();
        let done = Rc::new(Cell::new(0));
        for _ in 0..5 {
            let (setup, done) = (setup.clone(), done.clone());
            current().spawn(async move {
                let ticket = setup.append(0, 0b11).await.unwrap();
                done.set(done.get() + 1);
                setup.log.retire(ticket);
            });
            current().sleep(1_000).await;
        }
        current().sleep(8_000).await;
        assert_eq!(done.get(), 1, "the first append waits for no other");
        current().sleep(10_000).await;
        assert_eq!((done.get(), setup.log.outstanding()), (5, 0));
        // Stripe 0: P on member 4, Q on member 0.
        let expected = vec![(LOG_AT, 8192), (LOG_AT + 8192, 4 * 8192)];
        assert_eq!(setup.writes(), [expected.clone(), vec![], vec![], vec![], expected]);
    });
}

#[test]
fn an_entry_runs_over_the_end_of_its_lane_and_is_found_there() {
    run_simulated(2, |_| async {
        let setup = Setup::new();
        for i in 0..100 {
            let ticket = setup.append(0, 0b01).await.unwrap();
            assert_eq!(ticket.sequence(), i);
            // One marker, of half an entry, shifts the entries behind it.
            setup.log.retire(ticket);
        }
        let writes = setup.writes();
        assert!(writes[4].iter().all(|(at, len)| *at >= LOG_AT && at + len <= LOG_AT + LANE));
        // Entries with 4 KiB more, so that some wrap at the end of the lane.
        let partial = [0; 8192];
        for _ in 0..20 {
            let targets =
                [Target { parity: 0, slot: 4, channel: setup.channels[4].clone(), log_offset: LOG_AT }];
            let entry = Entry {
                stripe: 0,
                offset: 0,
                len: 8192,
                modified: 1,
                checksums: &[],
                targets: &targets,
                payload: &Bytes { partial: &partial, redo: &[] },
            };
            let ticket = setup.log.append(&entry).await.unwrap();
            setup.log.retire(ticket);
        }
        let wrapped = setup.writes()[4].windows(2).filter(|pair| pair[1].0 == LOG_AT).count();
        assert!(wrapped >= 2);
        let report = recover_all(&setup).await.unwrap();
        assert_eq!((report.highest_sequence, report.replayed), (119, 1));
        assert!(report.entries >= 4, "{report:?}");
    });
}

#[test]
fn an_entry_of_a_later_version_ends_recovery_unless_it_is_of_another_log() {
    run_simulated(3, |_| async {
        let setup = Setup::new();
        let _in_flight = setup.append(1, 0b11).await.unwrap();
        let slot = setup.config.geometry.member(1, 3);
        let change = |at: usize, value: u8| {
            let mut content = setup.disks[slot].content.borrow_mut();
            let header = &mut content[LOG_AT as usize..][..entry::HEADER_BYTES];
            header[at] = value;
            let crc = crc32c::crc32c(&header[..508]);
            header[508..].copy_from_slice(&crc.to_le_bytes());
        };
        change(8, 2);
        let refused = recover_all(&setup).await.unwrap_err();
        assert_eq!(refused, RecoverError::Version { slot, found: 2 });
        let words = format!("log of member {slot}: an entry has version 2; supported is version 1");
        assert_eq!(refused.to_string(), words);
        change(16, !NONCE.0[0]);
        assert_eq!(recover_all(&setup).await.unwrap().incomplete, 1);
    });
}

async fn recover_all(setup: &Rc<Setup>) -> Result<Report, RecoverError> {
    Crashed::new(setup.clone(), &[], &[]).recover(&[]).await
}

#[test]
fn a_full_lane_lets_appends_wait_in_line_until_operations_retire() {
    run_simulated(3, |_| async {
        let setup = Setup::new();
        let mut held = Vec::new();
        for _ in 0..7 {
            held.push(setup.append(0, 0b01).await.unwrap());
        }
        let order = Rc::new(RefCell::new(Vec::new()));
        for i in 0..3 {
            let (setup, order) = (setup.clone(), order.clone());
            current().spawn(async move {
                let ticket = setup.append(0, 0b01).await.unwrap();
                order.borrow_mut().push(i);
                setup.log.retire(ticket);
            });
        }
        current().sleep(1_000_000).await;
        assert!(order.borrow().is_empty(), "seven entries and room for a marker fill the lane");
        setup.log.retire(held.remove(1));
        current().sleep(1_000_000).await;
        assert!(order.borrow().is_empty(), "the oldest is still needed");
        held.into_iter().for_each(|ticket| setup.log.retire(ticket));
        current().sleep(1_000_000).await;
        assert_eq!(*order.borrow(), [0, 1, 2]);
    });
}

#[test]
fn a_member_that_fails_is_named_and_the_lane_goes_on_without_it() {
    run_simulated(4, |_| async {
        let setup = Setup::new();
        setup.disks[0].fails.set(true);
        let failed = AppendError::Members(vec![(0, IoError::TimedOut)]);
        assert_eq!(setup.append(0, 0b11).await.err(), Some(failed.clone()));
        assert_eq!(setup.log.outstanding(), 0, "no entry is outstanding");
        setup.disks[0].fails.set(false);
        assert_eq!(setup.append(0, 0b11).await.err(), Some(failed), "the content of the member is unknown");
        assert_eq!(setup.writes()[0].len(), 1);
        for _ in 0..50 {
            let ticket = setup.append(0, 0b01).await.unwrap();
            setup.log.retire(ticket);
        }
        setup.log.reset(Nonce([4; 16]), 2).await;
        let ticket = setup.append(0, 0b11).await.unwrap();
        assert_eq!(ticket.sequence(), 0);
        setup.log.retire(ticket);
    });
}

#[test]
fn operations_that_are_given_up_keep_their_entries_and_say_so_when_the_lane_is_full() {
    run_simulated(5, |_| async {
        let setup = Setup::new();
        drop(setup.append(0, 0b01).await.unwrap());
        assert_eq!(setup.log.abandoned(), 1);
        for _ in 0..6 {
            let ticket = setup.append(0, 0b01).await.unwrap();
            setup.log.retire(ticket);
        }
        assert_eq!(setup.append(0, 0b01).await.err(), Some(AppendError::Stuck(0)));
        assert_eq!(recover_all(&setup).await.unwrap().superseded, 6, "the newest entry of the rows counts");
    });
}

#[test]
fn an_append_that_is_dropped_leaves_nothing_behind() {
    run_simulated(6, |_| async {
        let setup = Setup::new();
        let mut append = Box::pin(setup.append(0, 0b11));
        let is_pending =
            std::future::poll_fn(|cx| std::task::Poll::Ready(append.as_mut().poll(cx).is_pending())).await;
        assert!(is_pending && setup.log.outstanding() == 1);
        drop(append);
        current().sleep(100_000).await;
        assert_eq!((setup.log.outstanding(), setup.log.abandoned()), (0, 0));
    });
}

#[test]
fn an_entry_that_no_lane_can_hold_is_refused_and_max_len_says_what_fits() {
    let config = test_array(3, 2, 128 << 10, 1);
    assert_eq!(max_len(&config, 0), (32 << 10) - 512);
    assert_eq!(max_len(&config, 3), (32 << 10) / 4 - 512);
    let small = crate::ArrayConfig { lane_bytes: 4096, ..config };
    assert_eq!(max_len(&small, 0), 0);
    run_simulated(7, |_| async {
        let setup = Setup::new();
        let (new, partial) = ([0; 8192], [0; 8192]);
        let targets = [Target { parity: 0, slot: 4, channel: setup.channels[4].clone(), log_offset: LOG_AT }];
        let redo: [&[u8]; 2] = [&new, &new];
        let entry = Entry {
            stripe: 0,
            offset: 0,
            len: 8192,
            modified: 3,
            checksums: &[],
            targets: &targets,
            payload: &Bytes { partial: &partial, redo: &redo },
        };
        let ticket = setup.log.append(&entry).await.unwrap();
        setup.log.retire(ticket);
        let long = vec![0; 12 << 10];
        let payload = Bytes { partial: &long, redo: &[&long, &long] };
        let entry = Entry { len: 12 << 10, payload: &payload, ..entry };
        assert_eq!(setup.log.append(&entry).await.err(), Some(AppendError::TooLarge(40 << 10)));
    });
}

#[test]
fn a_damaged_log_is_read_without_a_panic_and_brings_nothing_wrong() {
    for seed in 0..40 {
        run_simulated(seed + 1, |_| async {
            let setup = Setup::new();
            for stripe in 0..20 {
                let ticket = setup.append(stripe, 0b11).await.unwrap();
                setup.log.retire(ticket);
            }
            for disk in &setup.disks {
                let mut content = disk.content.borrow_mut();
                for _ in 0..current().random_u64() % 200 {
                    let at = LOG_AT + current().random_u64() % LANE;
                    content[at as usize] ^= 1 << (current().random_u64() % 8);
                }
            }
            let report = recover_all(&setup).await.unwrap();
            assert!(report.bad.is_empty() && report.lost == 0);
        });
    }
}

/// A member that also supports reads. One sector may be unreadable until it is written.
struct Scratched {
    disk: Rc<Disk>,
    /// The byte at which the sector begins.
    sector: Cell<Option<u64>>,
}

impl Channel for Scratched {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let len = req.data.len();
        let is_hit = self.sector.get().is_some_and(|at| at < offset + len as u64 && offset < at + 512);
        if req.op == block::Op::Read {
            if is_hit {
                return IoFuture::ready(Err(IoError::Medium));
            }
            let at = offset as usize;
            req.data.copy_from(&self.disk.content.borrow()[at..at + len]);
            return IoFuture::ready(Ok(()));
        }
        if is_hit {
            self.sector.set(None);
        }
        self.disk.submit(req, offset)
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.disk.block_status(report, offset, len)
    }
}

/// The members of a setup after a crash. `scratched`: strips of stripe 0, each with a sector that
/// is unreadable. The members of the strips `missing` are missing.
struct Crashed {
    setup: Rc<Setup>,
    members: Vec<Option<RecoveryMember>>,
}

const DATA_AT: usize = (LOG_AT + LANE) as usize;

impl Crashed {
    fn new(setup: Rc<Setup>, scratched: &[(usize, usize)], missing: &[usize]) -> Crashed {
        let slot_of = |strip| setup.config.geometry.member(0, strip);
        let member = |(slot, disk): (usize, &Rc<Disk>)| {
            let scratched = scratched.iter().find(|(strip, _)| slot == slot_of(*strip));
            let sector = Cell::new(scratched.map(|(_, sector)| (DATA_AT + 512 * sector) as u64));
            let channel = Rc::new(Scratched { disk: disk.clone(), sector });
            let is_out = missing.iter().any(|strip| slot == slot_of(*strip));
            let data_offset = DATA_AT as u64;
            (!is_out).then_some(RecoveryMember { channel, log_offset: LOG_AT, data_offset })
        };
        let members = setup.disks.iter().enumerate().map(member).collect();
        Crashed { setup, members }
    }

    async fn recover(&self, noted: &[BadRange]) -> Result<Report, RecoverError> {
        let context = Recovery {
            config: &self.setup.config,
            nonce: NONCE,
            members: &self.members,
            is_live: &|_, _| true,
            first_stripe: 0,
            noted,
        };
        recover(&context).await
    }

    /// A strip of stripe 0.
    fn strip(&self, strip: usize) -> Vec<u8> {
        let slot = self.setup.config.geometry.member(0, strip);
        self.setup.disks[slot].content.borrow()[DATA_AT..][..8192].to_vec()
    }

    fn fill(&self, strip: usize, byte: impl Fn(usize) -> u8) {
        let slot = self.setup.config.geometry.member(0, strip);
        let mut content = self.setup.disks[slot].content.borrow_mut();
        content[DATA_AT..][..8192].iter_mut().enumerate().for_each(|(i, to)| *to = byte(i));
    }
}

/// The block of strip 1 that replay may report as bad.
fn bad_block(sector: usize) -> BadRange {
    BadRange { stripe: 0, strip: 1, offset: 512 * sector as u32, len: 512 }
}

#[test]
fn a_full_stripe_that_was_cut_off_loses_only_the_sector_that_cannot_be_read_and_that_is_noted_first() {
    run_simulated(5, |_| async {
        let setup = Setup::new();
        let target = |parity: usize| {
            let slot = setup.config.geometry.member(0, 3 + parity);
            Target { parity, slot, channel: setup.channels[slot].clone(), log_offset: LOG_AT }
        };
        let sums = [1, 2, 3];
        let targets = [target(0), target(1)];
        let payload = &Bytes { partial: &[], redo: &[] };
        let (modified, checksums, targets) = (0b111, &sums[..], &targets[..]);
        let entry = Entry { stripe: 0, offset: 0, len: 8192, modified, checksums, targets, payload };
        let _in_flight = setup.log.append(&entry).await.unwrap();

        let crashed = Crashed::new(setup, &[(1, 13)], &[]);
        // The power failed while the strips were half written, and before parity was.
        for strip in 0..3 {
            crashed.fill(strip, |i| if i < 5120 { 0xa0 + strip as u8 } else { strip as u8 });
        }
        let was: Vec<Vec<u8>> = (0..5).map(|strip| crashed.strip(strip)).collect();
        let not_noted = RecoverError::NotNoted { ranges: vec![bad_block(13)] };
        assert_eq!(crashed.recover(&[]).await, Err(not_noted.clone()));
        assert_eq!(
            crashed.recover(&[]).await,
            Err(not_noted),
            "the power may fail before the block is noted"
        );
        for (strip, was) in was.iter().enumerate().take(3) {
            assert_eq!(&crashed.strip(strip), was, "strip {strip} was written");
        }
        let report = crashed.recover(&[bad_block(13)]).await.unwrap();
        assert_eq!((report.replayed, report.bad), (1, vec![bad_block(13)]));
        for (strip, mut expected) in was.into_iter().enumerate().take(3) {
            if strip == 1 {
                expected[512 * 13..][..512].fill(0);
            }
            assert_eq!(crashed.strip(strip), expected, "strip {strip}");
        }
        let strips: Vec<Vec<u8>> = (0..3).map(|strip| crashed.strip(strip)).collect();
        let data: Vec<(usize, &[u8])> = strips.iter().map(|strip| &strip[..]).enumerate().collect();
        for parity in 0..2 {
            let mut expected = vec![0; 8192];
            crashed.setup.config.code().encode_some(&data, &mut [(parity, &mut expected)]);
            assert!(crashed.strip(3 + parity) == expected, "parity {parity} does not fit the data");
        }
    });
}

#[test]
fn a_full_stripe_that_was_written_keeps_sectors_that_are_unreadable_in_different_rows() {
    for missing in [&[][..], &[2]] {
        run_simulated(8, move |_| async move {
            let setup = Setup::new();
            let target = |parity: usize| {
                let slot = setup.config.geometry.member(0, 3 + parity);
                Target { parity, slot, channel: setup.channels[slot].clone(), log_offset: LOG_AT }
            };
            let mut strips: Vec<Vec<u8>> =
                (0..5).map(|strip| (0..8192).map(|i| (i / 3 + strip) as u8).collect()).collect();
            let (data, parities) = strips.split_at_mut(3);
            let data: Vec<(usize, &[u8])> = data.iter().map(|strip| &strip[..]).enumerate().collect();
            for (parity, strip) in parities.iter_mut().enumerate() {
                setup.config.code().encode_some(&data, &mut [(parity, &mut strip[..])]);
            }
            let key = checksum::Key::new(&NONCE);
            let sums: Vec<u32> = data.iter().map(|(_, strip)| checksum::Checksum::of(&key, strip)).collect();
            let targets = [target(0), target(1)];
            let payload = &Bytes { partial: &[], redo: &[] };
            let (modified, checksums, targets) = (0b111, &sums[..], &targets[..]);
            let entry = Entry { stripe: 0, offset: 0, len: 8192, modified, checksums, targets, payload };
            let _in_flight = setup.log.append(&entry).await.unwrap();

            let scratched = [(0, 2), (1, 13), (3, 5)];
            let crashed = Crashed::new(setup, &scratched, missing);
            for (strip, bytes) in strips.iter().enumerate() {
                let is_bad = |i: usize| scratched.contains(&(strip, i / 512));
                crashed.fill(strip, |i| if is_bad(i) { 0xff } else { bytes[i] });
            }
            let report = crashed.recover(&[]).await.unwrap();
            assert_eq!((report.replayed, report.bad), (1, vec![]));
            for (strip, bytes) in strips.iter().enumerate().filter(|(strip, _)| !missing.contains(strip)) {
                assert!(crashed.strip(strip) == *bytes, "strip {strip}");
            }
        });
    }
}

/// A member that cannot read its log at the second attempt.
struct Flaky {
    member: Rc<dyn Channel>,
    reads: Cell<u32>,
}

impl Channel for Flaky {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if req.op == block::Op::Read && offset < DATA_AT as u64 {
            self.reads.set(self.reads.get() + 1);
            if self.reads.get() == 2 {
                return IoFuture::ready(Err(IoError::Medium));
            }
        }
        self.member.submit(req, offset)
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.member.block_status(report, offset, len)
    }
}

#[test]
fn an_entry_that_cannot_be_read_once_more_costs_no_strip() {
    run_simulated(7, |_| async {
        let setup = Setup::new();
        let _in_flight = setup.append(0, 0b01).await.unwrap();
        let mut crashed = Crashed::new(setup, &[], &[1, 4]);
        let slot = crashed.setup.config.geometry.member(0, 3);
        let member = crashed.members[slot].as_mut().unwrap();
        member.channel = Rc::new(Flaky { member: member.channel.clone(), reads: Cell::new(0) });
        let error = IoError::Medium;
        assert_eq!(crashed.recover(&[]).await, Err(RecoverError::Log { slot, error }));
        let report = crashed.recover(&[]).await.unwrap();
        assert_eq!((report.replayed, report.bad), (1, vec![]));
    });
}

#[test]
fn a_strip_that_is_missing_loses_only_the_block_whose_parity_cannot_be_read() {
    run_simulated(6, |_| async {
        let setup = Setup::new();
        let _in_flight = setup.append(0, 0b01).await.unwrap();
        let crashed = Crashed::new(setup, &[(3, 3)], &[1, 4]);
        crashed.fill(3, |i| i as u8);
        let was = crashed.strip(3);
        let not_noted = RecoverError::NotNoted { ranges: vec![bad_block(3)] };
        assert_eq!(crashed.recover(&[]).await, Err(not_noted));
        assert_eq!(crashed.strip(3), was, "the missing strip is computed from this parity");
        assert_eq!(crashed.recover(&[bad_block(3)]).await.unwrap().bad, [bad_block(3)]);
        let mut expected = was;
        expected[512 * 3..][..512].fill(0x11); // the sum of the other strips, with zeroes for the lost block
        assert!(crashed.strip(3) == expected);
    });
}

//! Reservations on the wire: what hosts ask for, and what they are told (Base 7.2 to 7.5, 8.19).

use crate::command::{Command, opcode};
use crate::wire::{array_at, put, u16_at, u32_at, u64_at};

/// Bytes of the keys that a register or an acquire carries.
pub const KEYS_BYTES: usize = 16;
/// Bytes of the key that a release carries.
pub const KEY_BYTES: usize = 8;
/// Bytes of a report before its first entry, and of each entry, with identifiers of hosts of 128 bits.
pub const REPORT_BYTES: usize = 64;
/// Bytes of a notification: the log page.
pub const NOTIFICATION_BYTES: usize = 64;
/// The controller of a registrant that has none at the moment.
pub const NO_CONTROLLER: u16 = 0xffff;
/// RESCAP of a namespace: all six types, keys ignored as since revision 1.3; without persistence.
pub const CAPABILITIES: u8 = 0xfe;
/// RESCAP: reservations outlive a loss of power.
pub const CAPABILITY_PERSISTS: u8 = 1;

/// IEKEY, in dword 10: the current key does not matter.
const IGNORE_KEY: u32 = 1 << 3;
/// EDS, in dword 11 of a report: identifiers of hosts have 128 bits.
const EXTENDED: u32 = 1;

/// What a reservation keeps from whoever does not hold it (Base 8.19, figure "Reservation Types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ReservationType {
    /// One host writes.
    WriteExclusive = 1,
    /// One host reads and writes.
    ExclusiveAccess = 2,
    /// One host holds it, those that are registered write.
    WriteExclusiveRegistrantsOnly = 3,
    /// One host holds it, those that are registered read and write.
    ExclusiveAccessRegistrantsOnly = 4,
    /// All that are registered hold it, and write.
    WriteExclusiveAllRegistrants = 5,
    /// All that are registered hold it, and read and write.
    ExclusiveAccessAllRegistrants = 6,
}

impl ReservationType {
    /// Every type, by number.
    pub const ALL: [ReservationType; 6] = [
        ReservationType::WriteExclusive,
        ReservationType::ExclusiveAccess,
        ReservationType::WriteExclusiveRegistrantsOnly,
        ReservationType::ExclusiveAccessRegistrantsOnly,
        ReservationType::WriteExclusiveAllRegistrants,
        ReservationType::ExclusiveAccessAllRegistrants,
    ];

    /// The type with this number.
    pub fn parse(number: u8) -> Option<ReservationType> {
        ReservationType::ALL.into_iter().find(|kind| *kind as u8 == number)
    }

    /// Whether others may not read either.
    pub const fn excludes_readers(self) -> bool {
        (self as u8).is_multiple_of(2)
    }

    /// Whether those that are registered may do what the holder may.
    pub const fn admits_registrants(self) -> bool {
        self as u8 >= ReservationType::WriteExclusiveRegistrantsOnly as u8
    }

    /// Whether all that are registered hold it.
    pub const fn is_held_by_all(self) -> bool {
        self as u8 >= ReservationType::WriteExclusiveAllRegistrants as u8
    }
}

/// What a register does: RREGA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RegisterAction {
    /// The host becomes a registrant.
    Register = 0,
    /// It is one no longer.
    Unregister = 1,
    /// It has another key.
    Replace = 2,
}

/// Reservation Register (Base 7.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register {
    /// What to do.
    pub action: RegisterAction,
    /// The current key does not matter.
    pub ignores_key: bool,
    /// Whether registrations and reservation outlive a loss of power from now on; none: as before (CPTPL).
    pub persists: Option<bool>,
    /// CRKEY.
    pub current: u64,
    /// NRKEY.
    pub new: u64,
}

impl Register {
    /// Reads the dwords and the data; `None` when they make no sense.
    pub fn parse(cdw: &[u32; 6], keys: &[u8; KEYS_BYTES]) -> Option<Register> {
        let action = match cdw[0] & 7 {
            0 => RegisterAction::Register,
            1 => RegisterAction::Unregister,
            2 => RegisterAction::Replace,
            _ => return None,
        };
        let persists = match cdw[0] >> 30 {
            0 => None,
            2 => Some(false),
            3 => Some(true),
            _ => return None,
        };
        let ignores_key = cdw[0] & IGNORE_KEY != 0;
        Some(Register { action, ignores_key, persists, current: u64_at(keys, 0), new: u64_at(keys, 8) })
    }

    /// The command for a namespace, and its data.
    pub fn command(&self, nsid: u32) -> (Command, [u8; KEYS_BYTES]) {
        let persists = self.persists.map_or(0, |persists| 2 | u32::from(persists));
        let dword = self.action as u32 | flag(self.ignores_key) | persists << 30;
        (command(opcode::RESERVATION_REGISTER, nsid, dword), keys(self.current, self.new))
    }
}

/// What an acquire does: RACQA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AcquireAction {
    /// The host takes a reservation that nobody has.
    Acquire = 0,
    /// It takes that of another, whose registration goes.
    Preempt = 1,
    /// And what that one still has on its way is ended.
    PreemptAndAbort = 2,
}

/// Reservation Acquire (Base 7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acquire {
    /// What to do.
    pub action: AcquireAction,
    /// Of which type the reservation shall be.
    pub kind: ReservationType,
    /// CRKEY.
    pub current: u64,
    /// PRKEY: whose registrations go.
    pub preempted: u64,
}

impl Acquire {
    /// Reads the dwords and the data; `None` when they make no sense, as IEKEY does not here.
    pub fn parse(cdw: &[u32; 6], keys: &[u8; KEYS_BYTES]) -> Option<Acquire> {
        let action = match cdw[0] & 7 {
            0 => AcquireAction::Acquire,
            1 => AcquireAction::Preempt,
            2 => AcquireAction::PreemptAndAbort,
            _ => return None,
        };
        let kind = ReservationType::parse((cdw[0] >> 8) as u8)?;
        let (current, preempted) = (u64_at(keys, 0), u64_at(keys, 8));
        (cdw[0] & IGNORE_KEY == 0).then_some(Acquire { action, kind, current, preempted })
    }

    /// The command for a namespace, and its data.
    pub fn command(&self, nsid: u32) -> (Command, [u8; KEYS_BYTES]) {
        let dword = self.action as u32 | (self.kind as u32) << 8;
        (command(opcode::RESERVATION_ACQUIRE, nsid, dword), keys(self.current, self.preempted))
    }
}

/// What a release does: RRELA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseAction {
    /// The host gives up a reservation of this type.
    Release(ReservationType),
    /// Reservation and registrations go.
    Clear,
}

/// Reservation Release (Base 7.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// What to do.
    pub action: ReleaseAction,
    /// CRKEY.
    pub current: u64,
}

impl Release {
    /// Reads the dwords and the data; `None` when they make no sense, as IEKEY does not here.
    pub fn parse(cdw: &[u32; 6], key: &[u8; KEY_BYTES]) -> Option<Release> {
        let action = match cdw[0] & 7 {
            0 => ReleaseAction::Release(ReservationType::parse((cdw[0] >> 8) as u8)?),
            1 => ReleaseAction::Clear,
            _ => return None,
        };
        let current = u64::from_le_bytes(*key);
        (cdw[0] & IGNORE_KEY == 0).then_some(Release { action, current })
    }

    /// The command for a namespace, and its data.
    pub fn command(&self, nsid: u32) -> (Command, [u8; KEY_BYTES]) {
        let dword = match self.action {
            ReleaseAction::Release(kind) => (kind as u32) << 8,
            ReleaseAction::Clear => 1,
        };
        (command(opcode::RESERVATION_RELEASE, nsid, dword), self.current.to_le_bytes())
    }
}

fn flag(ignores_key: bool) -> u32 {
    if ignores_key { IGNORE_KEY } else { 0 }
}

fn command(opcode: u8, nsid: u32, dword: u32) -> Command {
    Command { opcode, nsid, cdw: [dword, 0, 0, 0, 0, 0] }
}

fn keys(first: u64, second: u64) -> [u8; KEYS_BYTES] {
    let mut bytes = [0; KEYS_BYTES];
    put(&mut bytes, 0, first.to_le_bytes());
    put(&mut bytes, 8, second.to_le_bytes());
    bytes
}

/// A controller of a host that is registered, or such a host without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registrant {
    /// The controller, or [`NO_CONTROLLER`].
    pub controller: u16,
    /// The host holds the reservation.
    pub is_holder: bool,
    /// Its key.
    pub key: u64,
    /// Who it is.
    pub host_id: [u8; 16],
}

/// What Reservation Report returns (Base 7.5), with identifiers of hosts of 128 bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Counts what changed registrations.
    pub generation: u32,
    /// The reservation, if there is one.
    pub kind: Option<ReservationType>,
    /// It outlives a loss of power.
    pub persists: bool,
    /// Who is registered.
    pub registrants: Vec<Registrant>,
}

impl Report {
    /// Asks for `bytes` (a multiple of 4) of the report.
    pub const fn command(nsid: u32, bytes: u32) -> Command {
        Command { opcode: opcode::RESERVATION_REPORT, nsid, cdw: [bytes / 4 - 1, EXTENDED, 0, 0, 0, 0] }
    }

    /// What such a command says: how many bytes it wants, and whether identifiers of hosts have 128 bits.
    pub const fn parse_command(cdw: &[u32; 6]) -> (u64, bool) {
        ((cdw[0] as u64 + 1) * 4, cdw[1] & EXTENDED != 0)
    }

    /// The data.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = vec![0; REPORT_BYTES * (1 + self.registrants.len())];
        put(&mut data, 0, self.generation.to_le_bytes());
        data[4] = self.kind.map_or(0, |kind| kind as u8);
        put(&mut data, 5, (self.registrants.len() as u16).to_le_bytes());
        data[9] = self.persists.into();
        for (entry, registrant) in data.chunks_exact_mut(REPORT_BYTES).skip(1).zip(&self.registrants) {
            put(entry, 0, registrant.controller.to_le_bytes());
            entry[2] = registrant.is_holder.into();
            put(entry, 8, registrant.key.to_le_bytes());
            put(entry, 16, registrant.host_id);
        }
        data
    }

    /// Reads the data; what there was no room for is left out. `None` when it makes no sense.
    pub fn parse(data: &[u8]) -> Option<Report> {
        let (header, entries) = data.split_at_checked(REPORT_BYTES)?;
        let registrant = |entry: &[u8]| Registrant {
            controller: u16_at(entry, 0),
            is_holder: entry[2] & 1 != 0,
            key: u64_at(entry, 8),
            host_id: array_at(entry, 16),
        };
        let count = usize::from(u16_at(header, 5));
        let kind = match header[4] {
            0 => None,
            number => Some(ReservationType::parse(number)?),
        };
        Some(Report {
            generation: u32_at(header, 0),
            kind,
            persists: header[9] & 1 != 0,
            registrants: entries.chunks_exact(REPORT_BYTES).take(count).map(registrant).collect(),
        })
    }
}

/// What happened to a registration or a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Happening {
    /// The host is registered no longer.
    RegistrationPreempted = 1,
    /// Those that are registered have no reservation now, or one of another type.
    ReservationReleased = 2,
    /// Registrations and reservation are gone.
    ReservationPreempted = 3,
}

impl Happening {
    /// Its bit in the mask of those that are not reported (Base 5.27.1.26).
    pub const fn mask(self) -> u32 {
        1 << self as u8
    }

    /// Every bit of that mask.
    pub const MASKS: u32 = 0b1110;
}

/// What a host is told: an entry of the log (Base 5.16.1.18).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notification {
    /// Counts them, from 1 on; a gap: some were lost.
    pub count: u64,
    /// What happened.
    pub what: Happening,
    /// Where.
    pub nsid: u32,
}

impl Notification {
    /// The log page, when `left` others wait behind this one.
    pub fn encode(&self, left: usize) -> [u8; NOTIFICATION_BYTES] {
        let mut page = [0; NOTIFICATION_BYTES];
        put(&mut page, 0, self.count.to_le_bytes());
        page[8] = self.what as u8;
        page[9] = left.min(255) as u8;
        put(&mut page, 12, self.nsid.to_le_bytes());
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_lie_where_the_specification_has_them() {
        let register = Register {
            action: RegisterAction::Replace,
            ignores_key: true,
            persists: Some(true),
            current: 1,
            new: 0x0203,
        };
        let (command, data) = register.command(5);
        assert_eq!((command.opcode, command.nsid, command.cdw[0]), (0x0d, 5, 0xc000_000a));
        assert_eq!(data, [1, 0, 0, 0, 0, 0, 0, 0, 3, 2, 0, 0, 0, 0, 0, 0]);
        let kind = ReservationType::ExclusiveAccessAllRegistrants;
        let acquire = Acquire { action: AcquireAction::PreemptAndAbort, kind, current: 1, preempted: 2 };
        let (command, data) = acquire.command(1);
        assert_eq!((command.opcode, command.cdw[0], data[8]), (0x11, 0x602, 2));
        let (command, data) = Release { action: ReleaseAction::Clear, current: 9 }.command(1);
        assert_eq!((command.opcode, command.cdw[0], data[0]), (0x15, 1, 9));
        assert_eq!(Report::command(1, 128).cdw, [31, 1, 0, 0, 0, 0]);
        let notification = Notification { count: 2, what: Happening::ReservationReleased, nsid: 7 };
        let page = notification.encode(300);
        assert_eq!((page[0], page[8], page[9], page[12]), (2, 2, 255, 7));
    }

    #[test]
    fn what_makes_no_sense_is_not_read() {
        let register = |dword| Register::parse(&[dword, 0, 0, 0, 0, 0], &[0; 16]);
        let acquire = |dword| Acquire::parse(&[dword, 0, 0, 0, 0, 0], &[0; 16]);
        let release = |dword| Release::parse(&[dword, 0, 0, 0, 0, 0], &[0; 8]);
        assert!(register(3).is_none() && register(1 << 30).is_none() && register(0).is_some());
        assert!(acquire(0x100).is_some() && acquire(0x103).is_none() && acquire(0x108).is_none());
        assert!(acquire(0).is_none() && acquire(0x700).is_none());
        assert!(
            release(0).is_none() && release(1).is_some() && release(0x109).is_none() && release(2).is_none()
        );
        assert!(Report::parse(&[0; 63]).is_none());
    }

    #[test]
    fn types_say_who_may_do_what() {
        let facts = ReservationType::ALL
            .map(|kind| (kind.excludes_readers(), kind.admits_registrants(), kind.is_held_by_all()));
        let (no, yes) = (false, true);
        assert_eq!(
            facts,
            [(no, no, no), (yes, no, no), (no, yes, no), (yes, yes, no), (no, yes, yes), (yes, yes, yes)]
        );
    }

    proptest! {
        #[test]
        fn commands_and_reports_are_read_as_they_were_written(
            action in 0..3u32, kind in 1..7u32, bits in any::<[bool; 2]>(), persists in any::<Option<bool>>(),
            current: u64, other: u64, registrants in prop::collection::vec(any::<(u16, bool, u64, [u8; 16])>(), 0..4),
        ) {
            let dword = action | flag(bits[0]) | persists.map_or(0, |it| 2 | u32::from(it)) << 30;
            let register = Register::parse(&[dword, 0, 0, 0, 0, 0], &keys(current, other)).unwrap();
            let (command, data) = register.command(1);
            prop_assert_eq!((command.cdw[0], data), (dword, keys(current, other)));
            let acquire = Acquire::parse(&[action | kind << 8, 0, 0, 0, 0, 0], &keys(current, other)).unwrap();
            let (command, data) = acquire.command(1);
            prop_assert_eq!(Acquire::parse(&command.cdw, &data), Some(acquire));
            let release = Release { action: ReleaseAction::Release(acquire.kind), current };
            let (command, data) = release.command(1);
            prop_assert_eq!(Release::parse(&command.cdw, &data), Some(release));
            let entry = |(controller, is_holder, key, host_id)| Registrant { controller, is_holder, key, host_id };
            let report = Report {
                generation: current as u32,
                kind: bits[1].then_some(acquire.kind),
                persists: bits[0],
                registrants: registrants.into_iter().map(entry).collect(),
            };
            prop_assert_eq!(Report::parse(&report.encode()), Some(report));
        }
    }
}

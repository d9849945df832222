//! Wire formats of reservations: commands, reports and notifications (Base 7.2 to 7.5, 8.19).

use crate::command::{Command, opcode};
use crate::wire::{array_at, put, u16_at, u32_at, u64_at};

/// Bytes of the keys that a register or an acquire carries.
pub const KEYS_BYTES: usize = 16;
/// Bytes of the key that a release carries.
pub const KEY_BYTES: usize = 8;
/// Bytes of a report before its first entry, and of each entry, with identifiers of hosts of 128
/// bits.
pub const REPORT_BYTES: usize = 64;
/// Bytes of a notification: the log page.
pub const NOTIFICATION_BYTES: usize = 64;
/// The controller of a registrant that has none at present.
pub const NO_CONTROLLER: u16 = 0xffff;
/// RESCAP of a namespace: all six types, IEKEY as since revision 1.3; without persistence.
pub const CAPABILITIES: u8 = 0xfe;
/// RESCAP: reservations survive power loss.
pub const CAPABILITY_PERSISTS: u8 = 1;

/// IEKEY, in dword 10: the current key is ignored.
const IGNORE_KEY: u32 = 1 << 3;
/// EDS, in dword 11 of a report: identifiers of hosts have 128 bits.
const EXTENDED: u32 = 1;

/// The access that a reservation denies to other hosts (Base 8.19, figure "Reservation Types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ReservationType {
    /// Only the holder writes.
    WriteExclusive = 1,
    /// Only the holder reads and writes.
    ExclusiveAccess = 2,
    /// One host holds it; only registrants write.
    WriteExclusiveRegistrantsOnly = 3,
    /// One host holds it; only registrants read and write.
    ExclusiveAccessRegistrantsOnly = 4,
    /// All registrants hold it; only they write.
    WriteExclusiveAllRegistrants = 5,
    /// All registrants hold it; only they read and write.
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

    /// Whether it also denies reads.
    pub const fn excludes_readers(self) -> bool {
        (self as u8).is_multiple_of(2)
    }

    /// Whether registrants have the access of the holder.
    pub const fn admits_registrants(self) -> bool {
        self as u8 >= ReservationType::WriteExclusiveRegistrantsOnly as u8
    }

    /// Whether all registrants hold it.
    pub const fn is_held_by_all(self) -> bool {
        self as u8 >= ReservationType::WriteExclusiveAllRegistrants as u8
    }
}

/// The action of a register: RREGA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RegisterAction {
    /// The host becomes a registrant.
    Register = 0,
    /// The host ceases to be a registrant.
    Unregister = 1,
    /// The host replaces its key.
    Replace = 2,
}

/// Reservation Register (Base 7.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Register {
    /// The action.
    pub action: RegisterAction,
    /// The current key is ignored.
    pub ignores_key: bool,
    /// Whether registrations and reservation survive power loss from now on; `None`: unchanged
    /// (CPTPL).
    pub persists: Option<bool>,
    /// CRKEY.
    pub current: u64,
    /// NRKEY.
    pub new: u64,
}

impl Register {
    /// Parses the dwords and the data; `None` if they are invalid.
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

/// The action of an acquire: RACQA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AcquireAction {
    /// The host takes a free reservation.
    Acquire = 0,
    /// The host takes the reservation of another host and removes its registration.
    Preempt = 1,
    /// As `Preempt`, and aborts the other host's commands in flight.
    PreemptAndAbort = 2,
}

/// Reservation Acquire (Base 7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acquire {
    /// The action.
    pub action: AcquireAction,
    /// The type of the reservation.
    pub kind: ReservationType,
    /// CRKEY.
    pub current: u64,
    /// PRKEY: the key whose registrations are removed.
    pub preempted: u64,
}

impl Acquire {
    /// Parses the dwords and the data; `None` if they are invalid. IEKEY is invalid here.
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

/// The action of a release: RRELA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseAction {
    /// The host releases its reservation of this type.
    Release(ReservationType),
    /// Removes reservation and registrations.
    Clear,
}

/// Reservation Release (Base 7.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// The action.
    pub action: ReleaseAction,
    /// CRKEY.
    pub current: u64,
}

impl Release {
    /// Parses the dwords and the data; `None` if they are invalid. IEKEY is invalid here.
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

/// A controller of a registered host, or a registered host without a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registrant {
    /// The controller, or [`NO_CONTROLLER`].
    pub controller: u16,
    /// The host holds the reservation.
    pub is_holder: bool,
    /// Its key.
    pub key: u64,
    /// Its identifier.
    pub host_id: [u8; 16],
}

/// The data of Reservation Report (Base 7.5), with identifiers of hosts of 128 bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Counts changes of registrations.
    pub generation: u32,
    /// The type of the reservation, if any.
    pub kind: Option<ReservationType>,
    /// The reservation survives power loss.
    pub persists: bool,
    /// The registrants.
    pub registrants: Vec<Registrant>,
}

impl Report {
    /// The command that reads `bytes` (a multiple of 4) of the report.
    pub const fn command(nsid: u32, bytes: u32) -> Command {
        Command { opcode: opcode::RESERVATION_REPORT, nsid, cdw: [bytes / 4 - 1, EXTENDED, 0, 0, 0, 0] }
    }

    /// Parses such a command: the number of bytes, and whether identifiers of hosts have 128 bits.
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

    /// Parses the data, which may be truncated after any registrant. `None` if it is invalid.
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

/// A change of a registration or a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Happening {
    /// Another host has removed the host's registration.
    RegistrationPreempted = 1,
    /// The reservation was released, or has another type.
    ReservationReleased = 2,
    /// Registrations and reservation were removed.
    ReservationPreempted = 3,
}

impl Happening {
    /// Its bit in the mask of changes that are not reported (Base 5.27.1.26).
    pub const fn mask(self) -> u32 {
        1 << self as u8
    }

    /// All bits of that mask.
    pub const MASKS: u32 = 0b1110;
}

/// A notification of a host: an entry of the log (Base 5.16.1.18).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notification {
    /// Number of the notification, from 1 on; a gap means that some were lost.
    pub count: u64,
    /// The change.
    pub what: Happening,
    /// The namespace.
    pub nsid: u32,
}

impl Notification {
    /// The log page, if `left` further notifications wait.
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
    fn invalid_commands_and_reports_are_refused() {
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

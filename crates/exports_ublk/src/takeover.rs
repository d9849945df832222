//! Decides how a device number is used: create the device, take it over, wait, or refuse. Without
//! side effects.

use super::config::{Begin, MAX_IO, Recovery};
use super::control::DeviceInfo;
use super::identity;
use super::uapi::{DeviceState, Params, attribute, feature};

/// The existing device with the requested number.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) device: DeviceInfo,
    /// Whether the process that served it last exists (or another one with its number).
    pub(super) is_server_alive: bool,
    /// Whether `/dev/ublkcN` is open, as it is in every server.
    pub(super) is_held: bool,
}

/// The requested device.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) begin: Begin,
    pub(super) params: Params,
    /// See [`identity::mark`].
    pub(super) mark: u64,
    /// The name behind the mark, for messages.
    pub(super) name: String,
}

/// The next action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Create the device.
    Add,
    /// Delete a device whose server died without recovery, or before it had started. Then create
    /// the device.
    Replace,
    /// Take the device over.
    Recover,
    /// Check again soon: the kernel has not noticed the server's death yet. On timeout this is the
    /// reason.
    Wait(String),
    /// Refuse, for this reason.
    Refuse(String),
}

/// Returns the next action.
pub(super) fn next_step(found: Option<&Found>, wanted: &Wanted) -> Step {
    let Some(found) = found else {
        return match wanted.begin {
            Begin::Recover => Step::Refuse("the device does not exist".into()),
            Begin::Add | Begin::AddOrRecover => Step::Add,
        };
    };
    let info = &found.device.info;
    let state = info.device_state();
    if state == DeviceState::Live && found.is_server_alive {
        return Step::Refuse(format!("process {} serves it", info.ublksrv_pid));
    }
    if wanted.begin == Begin::Add {
        return Step::Refuse(format!("it already exists, {}", state.name()));
    }
    if !identity::is_ours(info.ublksrv_flags) {
        return Step::Refuse(format!("another program created it; it is {}", state.name()));
    }
    match state {
        DeviceState::Dead if found.is_held => {
            Step::Refuse("another process is about to start or end it".into())
        }
        DeviceState::Dead if wanted.begin == Begin::Recover => {
            Step::Refuse("it is dead: there is no disk to take over".into())
        }
        DeviceState::Dead => Step::Replace,
        DeviceState::Live => Step::Wait(format!("its server, process {}, has ended", info.ublksrv_pid)),
        DeviceState::Quiesced | DeviceState::FailIo => match misfit(&found.device, wanted) {
            Some(reason) => Step::Refuse(reason),
            None => Step::Recover,
        },
        DeviceState::Unknown(state) => Step::Refuse(format!("unknown state {state}")),
    }
}

/// The reason why the disk cannot continue over the device: it would break a promise to the disk's
/// users.
fn misfit(device: &DeviceInfo, wanted: &Wanted) -> Option<String> {
    let (info, had, has) = (&device.info, &device.params, &wanted.params);
    if info.ublksrv_flags != wanted.mark {
        return Some(format!("it was not served from {}", wanted.name));
    }
    if info.flags & (feature::NEED_GET_DATA | feature::AUTO_BUF_REG) == 0
        || Recovery::of_flags(info.flags) == Recovery::Off
    {
        return Some(format!("it was created with other features (flags {:#x})", info.flags));
    }
    if info.max_io_buf_bytes > MAX_IO {
        return Some(format!(
            "its requests have up to {} bytes, more than the supported {MAX_IO}",
            info.max_io_buf_bytes
        ));
    }
    if had.capacity() > has.capacity() {
        return Some(format!("it has {} bytes, but the device only {}", had.capacity(), has.capacity()));
    }
    if had.basic.logical_bs_shift != has.basic.logical_bs_shift {
        let bytes = |shift: u8| 1u64.checked_shl(shift.into()).unwrap_or(0);
        let (had, has) = (bytes(had.basic.logical_bs_shift), bytes(has.basic.logical_bs_shift));
        return Some(format!("its block size is {had} bytes, that of the device {has}"));
    }
    let gained = |bit: u32| has.basic.attrs & bit != 0 && had.basic.attrs & bit == 0;
    if gained(attribute::READ_ONLY) {
        return Some("it accepts writes, but the device is read-only".into());
    }
    if gained(attribute::VOLATILE_CACHE) {
        return Some("it was served without a volatile cache, but the device has one".into());
    }
    if had.discard.max_discard_sectors > has.discard.max_discard_sectors
        || had.discard.max_write_zeroes_sectors > has.discard.max_write_zeroes_sectors
    {
        return Some("it was served with longer discards or write zeroes than the device supports".into());
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uapi::DevInfo;
    use crate::{Config, params};
    use block::Limits;

    fn wanted() -> Wanted {
        let limits = Limits { volatile_cache: true, ..Limits::new(1 << 30) };
        Wanted {
            begin: Begin::AddOrRecover,
            params: params::of(&limits, &Config::default(), 512 << 10, false),
            mark: identity::mark("mem"),
            name: "mem".into(),
        }
    }

    fn found(state: u16) -> Found {
        let Wanted { params, mark, .. } = wanted();
        let info = DevInfo {
            state,
            ublksrv_pid: 77,
            max_io_buf_bytes: 512 << 10,
            flags: feature::NEED_GET_DATA | Recovery::Reissue.flags(),
            ublksrv_flags: mark,
            ..DevInfo::default()
        };
        Found { device: DeviceInfo { info, params }, is_server_alive: false, is_held: false }
    }

    fn refusal(found: &Found, wanted: &Wanted) -> String {
        match next_step(Some(found), wanted) {
            Step::Refuse(reason) => reason,
            step => panic!("{step:?}"),
        }
    }

    const DEAD: u16 = 0;
    const LIVE: u16 = 1;
    const QUIESCED: u16 = 2;
    const FAIL_IO: u16 = 3;

    #[test]
    fn a_number_that_is_free_is_made_unless_only_recovery_is_wanted() {
        for (begin, step) in [(Begin::AddOrRecover, Step::Add), (Begin::Add, Step::Add)] {
            assert_eq!(next_step(None, &Wanted { begin, ..wanted() }), step);
        }
        let only = Wanted { begin: Begin::Recover, ..wanted() };
        assert_eq!(next_step(None, &only), Step::Refuse("the device does not exist".into()));
    }

    #[test]
    fn a_disk_whose_server_died_is_taken_over() {
        for state in [QUIESCED, FAIL_IO] {
            assert_eq!(next_step(Some(&found(state)), &wanted()), Step::Recover);
            // Another process may have the number of the dead server by now.
            let reused = Found { is_server_alive: true, ..found(state) };
            assert_eq!(next_step(Some(&reused), &wanted()), Step::Recover);
        }
        assert!(matches!(next_step(Some(&found(LIVE)), &wanted()), Step::Wait(_)));
        let only_new = Wanted { begin: Begin::Add, ..wanted() };
        assert_eq!(refusal(&found(QUIESCED), &only_new), "it already exists, quiesced");
    }

    #[test]
    fn a_disk_that_is_served_or_not_ours_is_left_alone() {
        let served = Found { is_server_alive: true, ..found(LIVE) };
        assert_eq!(refusal(&served, &wanted()), "process 77 serves it");
        for state in [DEAD, LIVE, QUIESCED, FAIL_IO] {
            let mut foreign = found(state);
            foreign.device.info.ublksrv_flags = 0;
            assert!(refusal(&foreign, &wanted()).starts_with("another program created it"));
        }
        assert!(refusal(&found(9), &wanted()).contains("state 9"));
    }

    #[test]
    fn a_dead_device_is_replaced_unless_a_process_has_it() {
        assert_eq!(next_step(Some(&found(DEAD)), &wanted()), Step::Replace);
        let held = Found { is_held: true, ..found(DEAD) };
        assert!(refusal(&held, &wanted()).contains("another process"));
        let only = Wanted { begin: Begin::Recover, ..wanted() };
        assert!(refusal(&found(DEAD), &only).contains("it is dead"));
    }

    #[test]
    fn a_disk_does_not_go_on_over_a_device_that_promises_less() {
        let refuse = |change: &dyn Fn(&mut Found)| {
            let mut found = found(QUIESCED);
            change(&mut found);
            refusal(&found, &wanted())
        };
        assert_eq!(
            refuse(&|f| f.device.info.ublksrv_flags = identity::mark("other")),
            "it was not served from mem"
        );
        assert!(refuse(&|f| f.device.info.flags = Recovery::Reissue.flags()).contains("other features"));
        assert!(refuse(&|f| f.device.info.max_io_buf_bytes = 32 << 20).contains("33554432"));
        let larger = refuse(&|f| f.device.params.basic.dev_sectors += 1);
        assert_eq!(larger, "it has 1073742336 bytes, but the device only 1073741824");
        assert!(refuse(&|f| f.device.params.basic.logical_bs_shift = 12).contains("block size is 4096"));
        assert!(refuse(&|f| f.device.params.basic.attrs = 0).contains("volatile cache"));
        assert!(
            refuse(&|f| f.device.params.discard.max_discard_sectors = u32::MAX).contains("longer discards")
        );
        let mut read_only = wanted();
        read_only.params.basic.attrs |= attribute::READ_ONLY;
        assert!(refusal(&found(QUIESCED), &read_only).contains("read-only"));
    }

    #[test]
    fn a_disk_goes_on_with_either_way_of_its_data() {
        let mut registered = found(QUIESCED);
        registered.device.info.flags = feature::USER_COPY | feature::AUTO_BUF_REG | Recovery::Reissue.flags();
        assert_eq!(next_step(Some(&registered), &wanted()), Step::Recover);
    }

    #[test]
    fn a_device_that_grew_or_became_safer_is_no_obstacle() {
        let mut smaller = found(QUIESCED);
        smaller.device.params.basic.dev_sectors -= 8;
        smaller.device.params.basic.attrs |= attribute::READ_ONLY;
        assert_eq!(next_step(Some(&smaller), &wanted()), Step::Recover);
    }
}

//! Configuration of a ublk export.

use super::uapi::{self, feature};
use exports::{Error, check_cores};
use reactor::MAX_BUFFER;

/// Maximum queues of one export; the kernel uses no more than the machine has processors.
pub const MAX_QUEUES: u16 = 64;
/// Longest read or write that can be configured: the size of a core's buffer.
pub const MAX_IO: u32 = MAX_BUFFER as u32;
/// Shortest value: a page, which every Linux disk supports.
pub const MIN_IO: u32 = 4096;

/// How requests are handled while the disk has no server because it was killed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recovery {
    /// Requests wait for the next server. Those that the dead server had are repeated.
    #[default]
    Reissue,
    /// Requests wait for the next server. Those that the dead server had fail.
    Plain,
    /// Requests fail until there is another server (Linux 6.14).
    Fail,
    /// The disk is removed with its server.
    Off,
}

impl Recovery {
    /// Every choice.
    pub const ALL: [Recovery; 4] = [Recovery::Reissue, Recovery::Plain, Recovery::Fail, Recovery::Off];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Recovery::Reissue => "reissue",
            Recovery::Plain => "plain",
            Recovery::Fail => "fail",
            Recovery::Off => "off",
        }
    }

    /// The device flags.
    pub(super) fn flags(self) -> u64 {
        match self {
            Recovery::Reissue => feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE,
            Recovery::Plain => feature::USER_RECOVERY,
            Recovery::Fail => feature::USER_RECOVERY | feature::USER_RECOVERY_FAIL_IO,
            Recovery::Off => 0,
        }
    }

    /// The choice that a device with these flags was created with.
    pub(super) fn of_flags(flags: u64) -> Recovery {
        match flags {
            _ if flags & feature::USER_RECOVERY == 0 => Recovery::Off,
            _ if flags & feature::USER_RECOVERY_FAIL_IO != 0 => Recovery::Fail,
            _ if flags & feature::USER_RECOVERY_REISSUE != 0 => Recovery::Reissue,
            _ => Recovery::Plain,
        }
    }
}

/// How the bytes of a disk's requests reach its device. The first two depend on the features
/// that the disk was created with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPath {
    /// The kernel copies them from and to a buffer, as part of its queue commands.
    Copy,
    /// The server copies them by system calls. Only for a disk that was created for
    /// [`DataPath::Registered`], and whose device cannot use the kernel's buffers.
    UserCopy,
    /// The device uses the kernel's own buffers.
    Registered,
}

/// How an existing device is handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Begin {
    /// Take it over if its server died, otherwise create it.
    #[default]
    AddOrRecover,
    /// Create it; it must not exist.
    Add,
    /// Take it over; it must exist.
    Recover,
}

/// Configuration of a ublk export.
#[derive(Clone, Debug)]
pub struct Config {
    /// The number of the disk, `/dev/ublkbN`. `None`: any free one.
    pub id: Option<u32>,
    /// Queues, up to [`MAX_QUEUES`]. A disk that is taken over keeps its number of queues, queue
    /// size and longest request.
    pub num_queues: u16,
    /// Maximum requests in flight in each queue, up to 4096.
    pub queue_size: u16,
    /// Longest read or write in bytes, from [`MIN_IO`] to [`MAX_IO`].
    pub max_io: u32,
    /// Refuse writes even if the device accepts them.
    pub read_only: bool,
    /// How requests are handled when the server is killed.
    pub recovery: Recovery,
    /// How an existing disk with this number is handled.
    pub begin: Begin,
    /// Let the device use the kernel's buffers, if device and kernel can (Linux 6.16).
    pub zero_copy: bool,
    /// The core of each queue (index into the list given to [`super::Ublk::start`]); further queues
    /// repeat the list. Empty: every core in turn.
    pub core_map: Vec<usize>,
}

impl Default for Config {
    /// Any number, one queue of 128 requests of up to 512 KiB.
    fn default() -> Config {
        Config {
            id: None,
            num_queues: 1,
            queue_size: 128,
            max_io: 512 << 10,
            read_only: false,
            recovery: Recovery::default(),
            begin: Begin::default(),
            zero_copy: true,
            core_map: Vec::new(),
        }
    }
}

impl Config {
    pub(super) fn check(&self, cores: usize) -> Result<(), Error> {
        let fault = if let Some(id) = self.id.filter(|id| *id >= uapi::MAX_DEVICES) {
            format!("id {id}: want 0 to {}", uapi::MAX_DEVICES - 1)
        } else if !(1..=MAX_QUEUES).contains(&self.num_queues) {
            format!("{} queues: want 1 to {MAX_QUEUES}", self.num_queues)
        } else if !(1..=uapi::MAX_QUEUE_DEPTH).contains(&self.queue_size) {
            format!("queue size {}: want 1 to {}", self.queue_size, uapi::MAX_QUEUE_DEPTH)
        } else if !(MIN_IO..=MAX_IO).contains(&self.max_io) || !self.max_io.is_multiple_of(MIN_IO) {
            format!("longest request {}: want a multiple of {MIN_IO}, up to {MAX_IO}", self.max_io)
        } else {
            return check_cores(&self.core_map, cores);
        };
        Err(Error::Config(fault))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impossible_configuration_names_the_value() {
        let refused = |config: Config| config.check(2).expect_err("impossible").to_string();
        assert!(refused(Config { id: Some(1 << 20), ..Config::default() }).contains("id 1048576"));
        assert!(refused(Config { num_queues: 65, ..Config::default() }).contains("65 queues"));
        assert!(refused(Config { queue_size: 0, ..Config::default() }).contains("queue size 0"));
        assert!(refused(Config { queue_size: 4097, ..Config::default() }).contains("4097"));
        assert!(refused(Config { max_io: 2 << 20, ..Config::default() }).contains("2097152"));
        assert!(refused(Config { max_io: 4097, ..Config::default() }).contains("4097"));
        assert!(refused(Config { core_map: vec![0, 2], ..Config::default() }).contains("core 2"));
        Config::default().check(1).unwrap();
    }

    #[test]
    fn a_choice_of_recovery_is_told_by_its_flags() {
        for recovery in Recovery::ALL {
            assert_eq!(Recovery::of_flags(recovery.flags()), recovery);
        }
        assert_eq!(Recovery::Reissue.flags(), 0b11000);
    }
}

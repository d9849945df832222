//! The system calls that a server makes once it runs, and those that no server makes.
//!
//! The list comes from traces of the servers of the tests and from reading the code. Tests keep it
//! complete: a refused call leaves a line in the server's log, which fails them. A call that is in
//! neither list fails with `EPERM`.
//!
//! A call is allowed with any arguments unless its arguments decide its purpose. The kernel then
//! answers from its cache of calls that are always allowed, without running the filter. The cache
//! keeps the filter off the data path.

use crate::profile::Profile;
use libc::c_long;

/// Condition of an argument of an allowed call; its upper 32 bits are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Argument {
    /// Exactly this value.
    Is(u32),
    /// Any other value.
    IsNot(u32),
    /// None of these bits.
    Lacks(u32),
}

/// Conditions that hold together: the argument's index, and its condition.
pub(crate) type Conditions = Vec<(u8, Argument)>;

/// A call that is allowed: with any arguments if there are no conditions, otherwise if one set of
/// them holds.
pub(crate) type Allowed = (c_long, Vec<Conditions>);

/// Calls that are allowed with any arguments.
const ALWAYS: &[c_long] = &[
    // Files and descriptors.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_ftruncate, // of shared memory that is made here, and a journal
    libc::SYS_memfd_create,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat, // within an open directory
    libc::SYS_renameat2,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    SYS_FCHMODAT2,
    libc::SYS_pipe2,
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_msync,
    libc::SYS_membarrier,
    // Threads, processors, signals to oneself.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_getcpu,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    libc::SYS_restart_syscall,
    libc::SYS_getrusage,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getrandom,
    // Clocks.
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    // Waiting.
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_eventfd2,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    // Sockets.
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_setsockopt,
    libc::SYS_getsockopt,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
];

/// Older equivalents that only this architecture has.
#[cfg(target_arch = "x86_64")]
const OLDER: &[c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_dup2,
    libc::SYS_mkdir,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_chmod,
    libc::SYS_pipe,
    libc::SYS_eventfd,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_time,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[c_long] = &[];

/// Calls that change a file's owner or group.
#[cfg(target_arch = "x86_64")]
const CHANGE_OWNERS: &[c_long] = &[libc::SYS_chown, libc::SYS_fchownat];
#[cfg(not(target_arch = "x86_64"))]
const CHANGE_OWNERS: &[c_long] = &[libc::SYS_fchownat];

/// The `libc` crate lacks this name on some architectures.
const SYS_FCHMODAT2: c_long = 452;

/// `clone` flags that make a namespace.
const NEW_NAMESPACE: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32;

/// `ioctl` commands that insert characters into a terminal's input.
const TYPES: [u32; 2] = [libc::TIOCSTI as u32, libc::TIOCLINUX as u32];

/// `prctl` operations that name threads and memory.
const NAMES: [u32; 2] = [libc::PR_SET_NAME as u32, libc::PR_SET_VMA as u32];

/// `keyctl` operations that find and read keys, and the keyring of the thread, to which a keyring
/// is linked meanwhile.
const READ_KEYS: [u32; 3] = [libc::KEYCTL_GET_KEYRING_ID, libc::KEYCTL_DESCRIBE, libc::KEYCTL_READ];
const LINK_KEYS: [u32; 2] = [libc::KEYCTL_LINK, libc::KEYCTL_UNLINK];
const OWN_KEYRING: u32 = libc::KEY_SPEC_THREAD_KEYRING as u32;

/// Calls that no server makes: they indicate an attack, and the process ends. `keyctl` is not among
/// them: an option that is refused later, for a member of an array for example, may cause it.
pub(crate) const DEADLY: &[c_long] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsmount,
    libc::SYS_fsconfig,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_open_by_handle_at,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_clock_settime,
    libc::SYS_settimeofday,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
];

/// A call whose arguments lie in memory, where no filter can look. The filter reports it as
/// missing, and the C library falls back to [`libc::SYS_clone`].
pub(crate) const ABSENT: &[c_long] = &[libc::SYS_clone3];

/// Returns every call that is allowed.
pub(crate) fn allowed(profile: &Profile) -> Vec<Allowed> {
    let mut calls: Vec<Allowed> =
        ALWAYS.iter().chain(OLDER).chain(ABSENT).map(|call| (*call, vec![])).collect();
    let only = |place: u8, values: &[u32]| -> Vec<Conditions> {
        values.iter().map(|value| vec![(place, Argument::Is(*value))]).collect()
    };
    // Memory is writable or executable, not both. Libraries that the resolver loads need neither.
    let (write, execute) = (libc::PROT_WRITE as u32, libc::PROT_EXEC as u32);
    let not_both = [write, execute].map(|bit| vec![(2, Argument::Lacks(bit))]).to_vec();
    let families: &[libc::c_int] = match profile.has_network {
        // Netlink: the resolver asks for the addresses of this machine.
        true => &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK],
        false => &[libc::AF_UNIX],
    };
    let families: Vec<u32> = families.iter().map(|family| *family as u32).collect();
    calls.extend([
        (libc::SYS_mmap, not_both),
        (libc::SYS_mprotect, vec![vec![(2, Argument::Lacks(execute))]]),
        (libc::SYS_clone, vec![vec![(0, Argument::Lacks(NEW_NAMESPACE))]]),
        (libc::SYS_ioctl, vec![TYPES.map(|command| (1, Argument::IsNot(command))).to_vec()]),
        (libc::SYS_prctl, only(0, &NAMES)),
        (libc::SYS_kill, only(1, &[0])), // whether a predecessor is gone: no signal is sent
        (libc::SYS_prlimit64, only(0, &[0])), // of oneself: the C library asks how large a stack may be
        (libc::SYS_socket, only(0, &families)),
    ]);
    if profile.changes_groups {
        calls.extend(CHANGE_OWNERS.iter().map(|call| (*call, vec![])));
    }
    if profile.reads_keyrings {
        let link = |operation: u32| vec![(0, Argument::Is(operation)), (2, Argument::Is(OWN_KEYRING))];
        let operations = only(0, &READ_KEYS).into_iter().chain(LINK_KEYS.map(link));
        calls.push((libc::SYS_keyctl, operations.collect()));
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn no_call_is_in_two_lists() {
        let mut reading = Profile::default();
        reading.read_keyrings();
        for (profile, reads) in [(Profile::default(), false), (reading, true)] {
            let allowed = allowed(&profile);
            let names: BTreeSet<c_long> = allowed.iter().map(|(call, _)| *call).collect();
            assert_eq!(names.len(), allowed.len());
            assert!(DEADLY.iter().all(|call| !names.contains(call)));
            assert_eq!(names.contains(&libc::SYS_keyctl), reads);
        }
    }

    #[test]
    fn the_calls_of_the_data_path_are_allowed_whatever_their_arguments() {
        let allowed = allowed(&Profile::default());
        for call in
            [libc::SYS_io_uring_enter, libc::SYS_write, libc::SYS_read, libc::SYS_recvmsg, libc::SYS_sendmsg]
        {
            assert!(allowed.contains(&(call, vec![])), "{call}");
        }
    }

    #[test]
    fn there_is_a_network_only_where_something_uses_it() {
        let families = |profile: &Profile| {
            allowed(profile).into_iter().find(|(call, _)| *call == libc::SYS_socket).unwrap().1.len()
        };
        let mut profile = Profile::default();
        assert_eq!(families(&profile), 1);
        profile.connect(1);
        assert_eq!(families(&profile), 4);
    }
}

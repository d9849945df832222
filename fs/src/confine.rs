//! Limits and sandbox of the process, which the library of virtiofsd sets up.

use crate::args::{Args, Cache};
use crate::capabilities;
use nix::unistd::{dup2_stdin, geteuid};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use vhost::vhost_user::Listener;
use virtiofsd::limits;
use virtiofsd::passthrough::{Config, NegotiationMode};
use virtiofsd::sandbox::Sandbox;
use virtiofsd::seccomp::{SeccompAction, enable_seccomp};

/// Open files of this program without queues: vhost-user-backend takes 509 regions of memory.
const FILES: u64 = 509 + 100;
/// Open files of a queue: three eventfds of the monitor, two of the thread, its epoll, and one on
/// its way to the guest's account.
const FILES_PER_QUEUE: u64 = 8;

/// The listening socket, which no longer is standard input then. Else it would stay open, and a
/// second client would wait for ever.
///
/// # Errors
/// When standard input is no listening socket, or the system refuses.
pub fn listener() -> Result<Listener, String> {
    let failed = |error: io::Error| format!("standard input: {error}");
    let socket = UnixListener::from(io::stdin().as_fd().try_clone_to_owned().map_err(failed)?);
    socket.local_addr().map_err(failed)?;
    dup2_stdin(File::open("/dev/null").map_err(failed)?).map_err(|errno| failed(errno.into()))?;
    Ok(Listener::from(socket))
}

/// Sets the limit of open files; returns how many of them the guest may have.
///
/// # Errors
/// When the limit is invalid, too small for the queues, or refused.
pub fn limit_files(args: &Args) -> Result<u64, String> {
    let limit = limits::setup_rlimit_nofile(args.rlimit_nofile)
        .map_err(|error| format!("limit of open files: {error}"))?;
    files_of_guest(limit, args.queues)
}

fn files_of_guest(limit: u64, queues: u16) -> Result<u64, String> {
    let own = FILES + FILES_PER_QUEUE * (u64::from(queues) + 1);
    match limit.checked_sub(own) {
        Some(left) if left > 0 => Ok(left),
        _ => Err(format!("limit of open files: {limit}: {queues} queues take {own}: want more")),
    }
}

/// Enters the sandbox; returns the configuration of the file system, as seen from there.
///
/// In the sandbox `namespace` a child returns from here; its parent waits, and ends with it.
///
/// # Errors
/// When a part of the sandbox cannot be set up.
pub fn enter(args: &Args, listener: Listener, guest_fd_limit: u64) -> Result<(Listener, Config), String> {
    let mut sandbox = Sandbox::new(args.shared_dir.clone(), args.sandbox, Vec::new(), Vec::new());
    let mountinfo_prefix =
        sandbox.get_mountinfo_prefix().map_err(|error| format!("directory {}: {error}", args.shared_dir))?;
    let listener = sandbox.enter(listener).map_err(|error| format!("Error entering sandbox: {error}"))?;
    let config = Config {
        entry_timeout: args.cache.timeout(),
        attr_timeout: args.cache.timeout(),
        cache_policy: args.cache.policy(),
        writeback: args.writeback,
        root_dir: sandbox.get_root_dir(),
        mountinfo_prefix,
        xattr: args.xattr || args.posix_acl != NegotiationMode::Never,
        proc_sfd_rawfd: sandbox.get_proc_self_fd(),
        proc_mountinfo_rawfd: sandbox.get_mountinfo_fd(),
        announce_submounts: args.announce_submounts,
        inode_file_handles: args.inode_file_handles,
        readdirplus: !args.no_readdirplus && args.cache != Cache::Never,
        allow_direct_io: args.allow_direct_io,
        killpriv_v2: args.killpriv_v2,
        posix_acl: args.posix_acl,
        clean_noatime: !args.preserve_noatime,
        allow_mmap: args.allow_mmap,
        guest_fd_limit,
        ..Config::default()
    };
    if !matches!(args.seccomp, SeccompAction::Allow) {
        enable_seccomp(args.seccomp, false).map_err(|error| format!("filter of system calls: {error}"))?;
    }
    if geteuid().is_root() {
        capabilities::drop_others(args.inode_file_handles, &args.modcaps)?;
    }
    Ok((listener, config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_take_their_files_from_the_limit() {
        assert_eq!(files_of_guest(1024, 4), Ok(1024 - 609 - 40));
        let text = files_of_guest(1024, 63).unwrap_err();
        assert_eq!(text, "limit of open files: 1024: 63 queues take 1121: want more");
    }
}

//! Profiles: the flags of the server for a kind of use, each with its reason.

use clap::ValueEnum;
use rustix::process::{Resource, getrlimit};

/// A kind of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Profile {
    /// Large files on fast storage, or on storage that serves requests in parallel
    Throughput,
    /// Many small files, as in builds
    Latency,
    /// One guest that owns the tree: nothing else changes it
    Cache,
    /// Hundreds of guests of one host, on trees that nothing else changes
    Dense,
}

/// A flag of virtiofsd, and why it is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flag {
    /// The flag with its value.
    pub text: String,
    /// Its reason.
    pub why: &'static str,
}

/// Threads of the profile `throughput` for a guest with fewer processors.
const MIN_THREADS: u16 = 4;
/// Open files of a daemon under the profile `dense`, 610 of which virtiofsd keeps for itself.
const DENSE_FILES: u64 = 32768;

impl Profile {
    /// Its name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().expect("no profile is hidden").get_name().to_owned()
    }

    /// Its flags for a guest with `vcpus` processors and `queues` request queues. `files` replaces
    /// the limit of open files.
    pub fn flags(self, vcpus: Option<u16>, files: Option<u64>, queues: u16) -> Vec<Flag> {
        let flag = |name: &str, value: String, why| Flag { text: format!("--{name}={value}"), why };
        let threads = |count: u16, why| flag("thread-pool-size", count.to_string(), why);
        let cache = |policy: &str, why| flag("cache", policy.to_owned(), why);
        let handles = || {
            let why = "a handle for each file that the guest knows, rather than an open file; needs root, else \
                       virtiofsd opens files";
            flag("inode-file-handles", "prefer".into(), why)
        };
        let threads = match self {
            _ if queues > 1 => flag(
                "queues",
                queues.to_string(),
                "request queues, each with a thread of its own: the guest spreads its processors over them",
            ),
            Profile::Throughput => threads(
                vcpus.unwrap_or(0).max(MIN_THREADS),
                "requests that wait for storage do so side by side: a thread for each processor of the guest, \
                 at least 4",
            ),
            _ => threads(0, "one thread answers a small request sooner than a pool, which hands it over"),
        };
        let mut flags = vec![threads];
        flags.extend(match self {
            Profile::Throughput => vec![
                cache("never", "the guest keeps no copy of data, and sees changes by others at once"),
                Flag {
                    text: "--allow-direct-io".into(),
                    why: "O_DIRECT of programs in the guest reaches the file system of the host",
                },
                handles(),
            ],
            Profile::Latency => vec![
                cache(
                    "auto",
                    "the guest keeps names and attributes for a second, and data until the file changes",
                ),
            ],
            Profile::Cache => vec![
                cache(
                    "always",
                    "the guest keeps names, attributes and data: nothing else may change the tree",
                ),
                Flag {
                    text: "--writeback".into(),
                    why: "the guest collects writes, and sends them on fsync or when it needs the memory",
                },
            ],
            Profile::Dense => vec![
                cache(
                    "metadata",
                    "the guest keeps names and attributes, and data is in the host's memory once for all guests: \
                     nothing else may change the tree",
                ),
                handles(),
            ],
        });
        let limit = files.or_else(|| (self == Profile::Dense).then(dense_files));
        let why = "bounds the memory of the host that a guest takes by opening files";
        flags.extend(limit.map(|limit| flag("rlimit-nofile", limit.to_string(), why)));
        flags
    }
}

/// The limit of open files under `dense`: no more than this process may allow.
fn dense_files() -> u64 {
    getrlimit(Resource::Nofile).maximum.map_or(DENSE_FILES, |hard| hard.min(DENSE_FILES))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(profile: Profile, vcpus: Option<u16>, files: Option<u64>) -> String {
        texts_of(profile.flags(vcpus, files, 1))
    }

    fn texts_of(flags: Vec<Flag>) -> String {
        assert!(flags.iter().all(|flag| !flag.why.is_empty()));
        flags.into_iter().map(|flag| flag.text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn each_profile_has_its_flags() {
        let rest = "--cache=never --allow-direct-io --inode-file-handles=prefer";
        for (vcpus, threads) in [(None, 4), (Some(2), 4), (Some(16), 16)] {
            let expected = format!("--thread-pool-size={threads} {rest}");
            assert_eq!(texts(Profile::Throughput, vcpus, None), expected);
        }
        assert_eq!(texts(Profile::Latency, Some(8), None), "--thread-pool-size=0 --cache=auto");
        assert_eq!(texts(Profile::Cache, None, None), "--thread-pool-size=0 --cache=always --writeback");
        let dense = texts(Profile::Dense, None, Some(5000));
        assert_eq!(
            dense,
            "--thread-pool-size=0 --cache=metadata --inode-file-handles=prefer --rlimit-nofile=5000"
        );
    }

    #[test]
    fn several_queues_take_the_place_of_a_pool() {
        let expected = "--queues=4 --cache=never --allow-direct-io --inode-file-handles=prefer";
        assert_eq!(texts_of(Profile::Throughput.flags(Some(16), None, 4)), expected);
        assert_eq!(texts_of(Profile::Latency.flags(None, None, 2)), "--queues=2 --cache=auto");
    }

    #[test]
    fn a_limit_of_open_files_is_that_of_the_caller_or_of_the_profile() {
        assert!(texts(Profile::Latency, None, Some(2048)).ends_with(" --rlimit-nofile=2048"));
        let limit = format!("--rlimit-nofile={}", dense_files());
        assert!(dense_files() <= DENSE_FILES && texts(Profile::Dense, None, None).ends_with(&limit));
    }
}

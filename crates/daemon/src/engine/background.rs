//! Reads of drives on threads of their own. A drive that does not answer keeps its thread, and
//! nothing waits for that thread.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most threads that wait for drives. Further drives are not read until one has ended.
const MAX_THREADS: usize = 64;

/// The answer of a drive.
pub trait Answer: Clone + Send + 'static {
    /// Name of the threads that read.
    const THREAD: &'static str;
    /// Between an answer and the next read.
    const PERIOD: Duration;
    /// A drive that has not answered for so long is late.
    const LIMIT: Duration;
    /// Most reads at a time of drives that are not late.
    const MAX_READS: usize;

    /// The answer in place of one that there is not.
    fn unknown(reason: String) -> Self;

    /// The answer of a drive that is late, by its last answer.
    fn late(last: Option<Self>, reason: String) -> Self;
}

/// Drives that are read, and their answers.
pub struct Reads<K, A>(Mutex<BTreeMap<K, Known<A>>>);

impl<K, A> Default for Reads<K, A> {
    fn default() -> Reads<K, A> {
        Reads(Mutex::default())
    }
}

/// A drive that is read.
struct Known<A> {
    /// `None` before its first answer.
    answer: Option<A>,
    next_read: Instant,
    reading: Option<Reading<A>>,
}

struct Reading<A> {
    began: Instant,
    answer: Receiver<A>,
}

impl<A: Answer> Reading<A> {
    fn is_late(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.began) >= A::LIMIT
    }
}

impl<A: Answer> Known<A> {
    /// Takes the answer of the drive if there is one.
    fn look(&mut self, now: Instant) {
        let Some(reading) = &self.reading else { return };
        let answer = match reading.answer.try_recv() {
            Ok(answer) => answer,
            Err(TryRecvError::Disconnected) => A::unknown("the read of the drive failed".into()),
            Err(TryRecvError::Empty) if reading.is_late(now) => {
                let reason = format!("the drive has not answered for {} s", A::LIMIT.as_secs());
                self.answer = Some(A::late(self.answer.take(), reason));
                return;
            }
            Err(TryRecvError::Empty) => return,
        };
        *self = Known { answer: Some(answer), next_read: now + A::PERIOD, reading: None };
    }

    /// Whether its answer is of the last period, or it is late.
    fn is_current(&self, now: Instant) -> bool {
        match &self.reading {
            Some(reading) => reading.is_late(now) && self.answer.is_some(),
            None => self.next_read > now,
        }
    }
}

impl<K: Ord + Clone + Send + 'static, A: Answer> Reads<K, A> {
    /// Returns the last answer of a drive. `None` before its first one.
    pub fn of(&self, drive: &K) -> Option<A> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(drive)?.answer.clone()
    }

    /// Returns the answer of a drive within the last period. `None` while it is read.
    pub fn current(&self, drive: &K, now: Instant) -> Option<A> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(drive).filter(|drive| drive.is_current(now))?.answer.clone()
    }

    /// Takes answers, and begins to read those of `drives` that are due by `read`.
    pub fn look(&self, drives: &BTreeSet<K>, now: Instant, read: fn(K) -> A) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.values_mut().for_each(|drive| drive.look(now));
        // A drive that does not answer is remembered: it has a thread already.
        known.retain(|drive, state| state.reading.is_some() || drives.contains(drive));
        for drive in drives {
            if !known.contains_key(drive) {
                known.insert(drive.clone(), Known { answer: None, next_read: now, reading: None });
            }
        }
        let readings = || known.values().filter_map(|drive| drive.reading.as_ref());
        let mut threads = readings().count();
        let mut reads = readings().filter(|reading| !reading.is_late(now)).count();
        for (drive, state) in known.iter_mut() {
            if reads == A::MAX_READS || threads >= MAX_THREADS {
                return;
            }
            if state.reading.is_some() || state.next_read > now || !drives.contains(drive) {
                continue;
            }
            match begin(drive.clone(), now, read) {
                Ok(reading) => {
                    state.reading = Some(reading);
                    (reads, threads) = (reads + 1, threads + 1);
                }
                Err(error) => {
                    state.next_read = now + A::PERIOD;
                    tracing::warn!(thread = A::THREAD, %error, "no thread to read the drive");
                }
            }
        }
    }
}

/// Reads a drive on a thread of its own.
fn begin<K: Send + 'static, A: Answer>(drive: K, now: Instant, read: fn(K) -> A) -> io::Result<Reading<A>> {
    let (send, answer) = channel();
    reactor::spawn_thread(A::THREAD, move || drop(send.send(read(drive))))?;
    Ok(Reading { began: now, answer })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// An answer in a word.
    #[derive(Clone, Debug, PartialEq)]
    struct Word(String);

    impl Answer for Word {
        const THREAD: &'static str = "word";
        const PERIOD: Duration = Duration::from_secs(60);
        const LIMIT: Duration = Duration::from_secs(10);
        const MAX_READS: usize = 4;

        fn unknown(reason: String) -> Word {
            Word(reason)
        }

        fn late(_last: Option<Word>, reason: String) -> Word {
            Word(reason)
        }
    }

    type Words = Reads<String, Word>;

    fn set(drives: &[&str]) -> BTreeSet<String> {
        drives.iter().map(|drive| (*drive).to_owned()).collect()
    }

    /// Looks until `is_done`.
    fn look_until(
        words: &Words,
        drives: &[&str],
        now: Instant,
        read: fn(String) -> Word,
        is_done: impl Fn() -> bool,
    ) {
        let limit = Instant::now() + Duration::from_secs(120);
        while !is_done() {
            assert!(Instant::now() < limit, "no answer");
            words.look(&set(drives), now, read);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn word(words: &Words, drive: &str) -> Option<String> {
        words.of(&drive.to_owned()).map(|Word(word)| word)
    }

    fn current(words: &Words, drive: &str, now: Instant) -> Option<String> {
        words.current(&drive.to_owned(), now).map(|Word(word)| word)
    }

    #[test]
    fn a_drive_is_read_again_after_a_period_and_forgotten_with_its_user() {
        static READS: AtomicUsize = AtomicUsize::new(0);
        fn read(drive: String) -> Word {
            Word(format!("{drive} {}", READS.fetch_add(1, Ordering::SeqCst)))
        }
        let (words, now) = (Words::default(), Instant::now());
        assert_eq!(word(&words, "a"), None);
        look_until(&words, &["a"], now, read, || word(&words, "a").is_some());
        for late_s in [0, 59] {
            words.look(&set(&["a"]), now + Duration::from_secs(late_s), read);
        }
        assert_eq!((READS.load(Ordering::SeqCst), word(&words, "a")), (1, Some("a 0".into())));
        let later = now + Word::PERIOD;
        assert_eq!(current(&words, "a", later - Duration::from_secs(1)), Some("a 0".into()));
        assert_eq!(current(&words, "a", later), None, "a period has passed");
        look_until(&words, &["a"], later, read, || word(&words, "a") == Some("a 1".into()));
        words.look(&set(&[]), later, read);
        assert_eq!(word(&words, "a"), None);
    }

    #[test]
    fn a_drive_that_hangs_delays_no_other_and_takes_one_thread() {
        static HUNG: AtomicUsize = AtomicUsize::new(0);
        fn read(drive: String) -> Word {
            if drive.starts_with("hung") {
                HUNG.fetch_add(1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_secs(3600));
            }
            Word(drive)
        }
        let (words, now) = (Words::default(), Instant::now());
        let drives = ["hung1", "hung2", "hung3", "hung4", "ready"];
        look_until(&words, &drives, now, read, || HUNG.load(Ordering::SeqCst) == Word::MAX_READS);
        assert_eq!(word(&words, "ready"), None, "so many reads are under way");
        assert_eq!(current(&words, "hung1", now), None);
        let late = now + Word::LIMIT;
        look_until(&words, &drives, late, read, || word(&words, "ready").is_some());
        assert_eq!(current(&words, "hung1", late), Some("the drive has not answered for 10 s".into()));
        // Neither with time nor with a drive that is gone and returns.
        for drives in [&drives[..], &["ready"], &drives] {
            words.look(&set(drives), late + 2 * Word::PERIOD, read);
        }
        assert_eq!(HUNG.load(Ordering::SeqCst), Word::MAX_READS);
        assert!(word(&words, "hung4").is_some());
    }

    #[test]
    fn a_read_that_fails_is_reported() {
        let (words, now) = (Words::default(), Instant::now());
        look_until(&words, &["a"], now, |_| panic!("on purpose"), || word(&words, "a").is_some());
        assert_eq!(word(&words, "a"), Some("the read of the drive failed".into()));
    }
}

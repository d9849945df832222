//! Files that one process reads for another, which has no way to them.
//!
//! The first runs the code that reads files within [`noting`]. The second runs the same code within
//! [`from_passed`], with the content that the first has noted. Both count for their thread alone.

use crate::Error;
use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// A file that was read.
#[derive(Clone)]
pub struct ReadFile {
    /// The path, as the reader named it.
    pub path: PathBuf,
    /// All of its content.
    pub content: Zeroizing<Vec<u8>>,
}

enum Source {
    Files,
    /// Files, whose content is noted.
    Noted(Vec<ReadFile>),
    Passed(Vec<ReadFile>),
}

thread_local! {
    static SOURCE: RefCell<Source> = const { RefCell::new(Source::Files) };
}

/// Restores the source of a thread, also after a panic.
struct Restore(Option<Source>);

impl Restore {
    fn after(source: Source) -> Restore {
        Restore(Some(SOURCE.replace(source)))
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(|before| SOURCE.set(before));
    }
}

/// Runs `work`, and returns the files that it read without an error.
pub fn noting<T>(work: impl FnOnce() -> T) -> (T, Vec<ReadFile>) {
    let restore = Restore::after(Source::Noted(Vec::new()));
    let result = work();
    let noted = SOURCE.replace(Source::Files);
    drop(restore);
    match noted {
        Source::Noted(files) => (result, files),
        Source::Files | Source::Passed(_) => (result, Vec::new()),
    }
}

/// Runs `work`, which finds these files and no others. Their permissions were checked by the
/// process that read them.
pub fn from_passed<T>(files: Vec<ReadFile>, work: impl FnOnce() -> T) -> T {
    let _restore = Restore::after(Source::Passed(files));
    work()
}

/// The passed content of a file; `None` if the thread reads files.
pub(crate) fn find(path: &Path, limit: u64) -> Option<Result<Zeroizing<Vec<u8>>, Error>> {
    SOURCE.with_borrow(|source| {
        let Source::Passed(files) = source else { return None };
        let found = files.iter().find(|file| file.path == path);
        Some(match found {
            Some(file) if file.content.len() as u64 > limit => {
                Err(Error::TooLong { path: path.to_owned(), limit })
            }
            Some(file) => Ok(file.content.clone()),
            None => Err(Error::Read { path: path.to_owned(), source: io::ErrorKind::NotFound.into() }),
        })
    })
}

/// Notes the content of a file, if the thread does.
pub(crate) fn note(path: &Path, content: &Zeroizing<Vec<u8>>) {
    SOURCE.with_borrow_mut(|source| {
        if let Source::Noted(files) = source {
            files.push(ReadFile { path: path.to_owned(), content: content.clone() });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{read, read_public, read_text, write};

    #[test]
    fn files_that_were_noted_are_found_without_the_file_system() {
        let folder = tempfile::tempdir().unwrap();
        let [key, certificate, other] = ["key", "certificate", "other"].map(|name| folder.path().join(name));
        write(&key, "secret").unwrap();
        write(&certificate, "public").unwrap();
        write(&other, "x").unwrap();
        let (read_both, files) =
            noting(|| (read_text(&key, 9).is_ok(), read_public(&certificate, 9).is_ok()));
        assert_eq!(read_both, (true, true));
        assert_eq!(files.iter().map(|file| &file.path).collect::<Vec<_>>(), [&key, &certificate]);
        std::fs::remove_file(&key).unwrap();
        from_passed(files, || {
            assert_eq!(&**read_text(&key, 9).unwrap(), "secret");
            assert!(read(&key, 5).unwrap_err().to_string().ends_with("/key: longer than 5 bytes"));
            assert!(matches!(read(&other, 9), Err(Error::Read { .. })), "it was not passed");
        });
        assert!(read(&key, 9).is_err() && read(&other, 9).is_ok(), "files are read again");
        assert!(noting(|| read(&key, 9).is_err()).1.is_empty());
    }
}

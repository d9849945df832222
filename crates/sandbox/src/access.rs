//! Operations on paths, and the rights of Landlock that they stand for.

use landlock::{AccessFs, BitFlags, make_bitflags};

/// The operations on a path, and on all paths below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Access {
    /// Open for reading; list.
    Read,
    /// Open existing files for reading and writing; list.
    ReadWrite,
    /// As [`Access::ReadWrite`], and change the length of files.
    Resize,
    /// Make sockets, and remove files.
    Sockets,
    /// Make, read, write and remove regular files; make directories.
    Files,
}

/// Returns the rights that an access stands for.
pub(crate) fn rights(access: Access) -> BitFlags<AccessFs> {
    match access {
        Access::Read => make_bitflags!(AccessFs::{ReadFile | ReadDir | IoctlDev}),
        // No right to truncate: images and members keep their length.
        Access::ReadWrite => make_bitflags!(AccessFs::{ReadFile | ReadDir | WriteFile | IoctlDev}),
        Access::Resize => rights(Access::ReadWrite) | AccessFs::Truncate,
        Access::Sockets => make_bitflags!(AccessFs::{MakeSock | RemoveFile}),
        Access::Files => {
            make_bitflags!(AccessFs::{
                ReadFile | ReadDir | WriteFile | MakeReg | MakeDir | RemoveFile | Truncate
            })
        }
    }
}

//! A request to a device: operation, flags, length and memory.

use crate::Data;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Fills the request's memory from the device.
    Read,
    /// Writes the request's memory to the device.
    Write,
    /// Makes the range read as zeroes. Carries no memory.
    WriteZeroes,
    /// Tells the device that the range is not used; its content is undefined afterwards. Carries no
    /// memory.
    Discard,
    /// Makes all writes durable that completed before this request was submitted. Offset and length
    /// are 0.
    Flush,
}

impl Op {
    /// Every operation, for tests and tables.
    pub const ALL: [Op; 5] = [Op::Read, Op::Write, Op::WriteZeroes, Op::Discard, Op::Flush];

    /// Whether the operation changes the content of the device.
    pub const fn is_modifying(self) -> bool {
        matches!(self, Op::Write | Op::WriteZeroes | Op::Discard)
    }

    /// Whether the operation carries memory.
    pub const fn has_data(self) -> bool {
        matches!(self, Op::Read | Op::Write)
    }

    /// The operation's name as logs and metrics print it.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Read => "read",
            Op::Write => "write",
            Op::WriteZeroes => "write_zeroes",
            Op::Discard => "discard",
            Op::Flush => "flush",
        }
    }
}

/// Modifiers of an operation: a small set, empty by default.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Flags(u8);

impl Flags {
    /// No flag.
    pub const NONE: Flags = Flags(0);
    /// Force unit access: the write (or zeroing) is durable when it completes.
    pub const FUA: Flags = Flags(1);
    /// Write-zeroes must keep the range allocated: no deallocation, no hole.
    pub const NO_UNMAP: Flags = Flags(2);
    /// Write-zeroes must fail with [`crate::IoError::Unsupported`] instead of writing buffers of
    /// zeroes.
    pub const NO_FALLBACK: Flags = Flags(4);

    /// Whether every flag of `other` is set here.
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// These flags and those of `other`.
    pub const fn with(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }

    /// These flags without those of `other`.
    pub const fn without(self, other: Flags) -> Flags {
        Flags(self.0 & !other.0)
    }
}

impl std::fmt::Debug for Flags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut list = f.debug_list();
        for (flag, name) in
            [(Flags::FUA, "FUA"), (Flags::NO_UNMAP, "NO_UNMAP"), (Flags::NO_FALLBACK, "NO_FALLBACK")]
        {
            if self.contains(flag) {
                list.entry(&format_args!("{name}"));
            }
        }
        list.finish()
    }
}

/// An operation and its memory. Immutable: layers forward it, share it or take parts of it. The
/// offset is a separate argument, so a layer that only remaps submits the same request to its
/// child.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The operation.
    pub op: Op,
    /// Modifiers; see [`crate::Limits::flags_of`].
    pub flags: Flags,
    /// Length of the range on the device in bytes. Equals `data.len()` for reads and writes; 0 for
    /// a flush.
    pub len: u64,
    /// The caller's memory; [`Data::none`] for operations without data.
    pub data: Data<'a>,
}

impl<'a> Request<'a> {
    /// A read into `data`.
    pub fn read(data: Data<'a>) -> Self {
        Request { op: Op::Read, flags: Flags::NONE, len: data.len() as u64, data }
    }

    /// A write of `data`.
    pub fn write(data: Data<'a>, flags: Flags) -> Self {
        Request { op: Op::Write, flags, len: data.len() as u64, data }
    }

    /// A write of `len` bytes of zeroes.
    pub fn write_zeroes(len: u64, flags: Flags) -> Request<'static> {
        Request { op: Op::WriteZeroes, flags, len, data: Data::none() }
    }

    /// A discard of `len` bytes.
    pub fn discard(len: u64) -> Request<'static> {
        Request { op: Op::Discard, flags: Flags::NONE, len, data: Data::none() }
    }

    /// A flush of the whole device.
    pub fn flush() -> Request<'static> {
        Request { op: Op::Flush, flags: Flags::NONE, len: 0, data: Data::none() }
    }

    /// The part of this request that starts `from` bytes into it and is `len` bytes long.
    ///
    /// # Panics
    /// If the part does not lie inside the request.
    pub fn part(&self, from: u64, len: u64) -> Self {
        assert!(
            from.checked_add(len).is_some_and(|end| end <= self.len),
            "part {from}+{len} of {}",
            self.len
        );
        let data = if self.op.has_data() { self.data.part(from as usize, len as usize) } else { self.data };
        Request { len, data, ..*self }
    }

    /// The same request with another operation, e.g. to write back the data of a read.
    pub fn with_op(&self, op: Op) -> Self {
        Request { op, ..*self }
    }

    /// The same request with other flags.
    pub fn with_flags(&self, flags: Flags) -> Self {
        Request { flags, ..*self }
    }

    /// Whether the request must be durable when it completes.
    pub fn is_fua(&self) -> bool {
        self.flags.contains(Flags::FUA)
    }
}

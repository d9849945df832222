//! Parts of a child that its users hold, and that its copy does not have.

use block::{DeviceError, DirtyBitmap, KernelBacking, KernelExtent};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Counts parts of one kind that users hold.
#[derive(Default)]
pub(super) struct Loans(Arc<()>);

impl Loans {
    /// Whether a user holds one.
    pub fn any(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// A part that a user holds.
pub(super) struct Lent<T: ?Sized> {
    part: Arc<T>,
    _loan: Arc<()>,
}

impl<T: ?Sized> Lent<T> {
    /// `part`, counted until this is dropped.
    pub fn new(part: Arc<T>, loans: &Loans) -> Lent<T> {
        Lent { part, _loan: loans.0.clone() }
    }
}

impl KernelBacking for Lent<dyn KernelBacking> {
    fn fd(&self) -> BorrowedFd<'_> {
        self.part.fd()
    }

    fn extent(&self) -> KernelExtent {
        self.part.extent()
    }

    fn lend(&self) -> Result<(), DeviceError> {
        self.part.lend()
    }

    fn take_back(&self) -> Result<(), DeviceError> {
        self.part.take_back()
    }
}

impl DirtyBitmap for Lent<dyn DirtyBitmap> {
    fn name(&self) -> &str {
        self.part.name()
    }

    fn granularity(&self) -> u64 {
        self.part.granularity()
    }

    fn run(&self, offset: u64, len: u64) -> (bool, u64) {
        self.part.run(offset, len)
    }
}

//! Dirty bitmaps: which granules of a device have changed since the bitmap was made.

/// A dirty bitmap of a device, kept by the format below it. Reads of it need no I/O, and any thread
/// may make them.
pub trait DirtyBitmap: Send + Sync {
    /// The name, unique in the device.
    fn name(&self) -> &str;

    /// Bytes of a granule, a power of two: one bit.
    fn granularity(&self) -> u64;

    /// Whether the byte at `offset` is in a dirty granule, and for how many bytes from there, at
    /// least one and at most `len`, that is so. The answer may be for fewer bytes than possible.
    /// The caller has checked that the range is inside the device, and not empty.
    fn run(&self, offset: u64, len: u64) -> (bool, u64);
}

//! The memory of a request, as the rules check it and the rings take it.

use block::Segment;

/// The memory of a request.
#[derive(Clone, Copy)]
pub enum Memory {
    /// None.
    None,
    /// One segment.
    One(Segment),
    /// A list of segments and its length.
    List(*const Segment, usize),
}

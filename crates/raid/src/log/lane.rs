//! The bookkeeping of one lane.

//! A device that grew while a channel was open.

use crate::client::pattern;
use crate::{Subject, check};
use block::IoError;
use reactor::CoreRef;

pub(crate) fn run(core: &CoreRef, subject: &Subject, mut grow: Box<dyn FnMut() + Send>) {
    check(core, subject, "a device that grew", move |client| async move {
        let (block, before) = (client.block_size(), client.limits.capacity);
        assert_eq!(client.try_read(before, block as usize).await, Err(IoError::OutOfRange), "before it grew");
        grow();
        let limits = client.device.refresh().unwrap_or_else(|e| panic!("refresh: {e}"));
        assert!(limits.capacity > before, "capacity {} after {before} grew", limits.capacity);
        assert_eq!(client.device.limits(), limits, "limits after a refresh");
        let last = limits.capacity - block;
        let bytes = pattern(last, block as usize, 1);
        client.write(last, &bytes).await;
        client.expect(last, &bytes, "in the part that is new").await;
        let beyond = client.try_read(limits.capacity, block as usize).await;
        assert_eq!(beyond, Err(IoError::OutOfRange), "beyond the new end");
    });
}

//! The conformance suite on a new image of a Ceph cluster, which grows meanwhile.
//!
//! ```text
//! driver_check rbd POOL IMAGE [cache]
//! ```
//!
//! The cluster is the one that `CEPH_CONF` names.

use conformance::{MIN_CAPACITY, Suite};
use drivers_rbd::{Options, RbdDevice};
use std::error::Error;
use std::sync::Arc;

pub fn run(words: &[&str]) -> Result<(), Box<dyn Error>> {
    let (pool, image, cache) = match *words {
        [pool, image] => (pool, image, false),
        [pool, image, "cache"] => (pool, image, true),
        _ => return Err("usage: driver_check rbd POOL IMAGE [cache]".into()),
    };
    let options = Options { cache, ..Options::new(pool, image) };
    drivers_rbd::create(&options, MIN_CAPACITY)?;
    let device = RbdDevice::open(&options)?;
    let grow = move || drivers_rbd::grow(&options, MIN_CAPACITY + (1 << 20)).expect("the image grows");
    Suite::new(Arc::new(device)).on_grow(grow).run();
    Ok(())
}

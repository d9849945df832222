//! Volumes: named devices that are carved out of one, the pool.
//!
//! ```text
//!   pool    │ table, four copies            │ unit │ unit │ unit │ unit │ unit │ unit │ …
//!                                              └ v1 ───────┘ └ v2 ┘        └ v1, grown ┘
//! ```
//!
//! A volume is made of whole units of the pool, in as few extents as there are holes for; what it
//! is made of never moves. A request that stays inside one extent goes to the pool's device as it
//! is and costs no future of its own.
//!
//! | module | purpose |
//! |---|---|
//! | [`table`] | which volumes there are and where: bytes and rules, without I/O |
//! | [`extents`] | finding room |
//! | [`store`] | the table on the device: four copies, of which two are current |
//! | [`pool`] | making, growing, renaming and removing volumes |
//! | [`device`] | a volume as a [`block::Device`] |

//!
//! ```
//! use block::{Device, Flags, Op};
//! use drivers::mem::{MemDevice, Options};
//! use reactor::{CoreConfig, Cores};
//! use volume::{Name, Pool};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let cores = Cores::start(&[CoreConfig::default()])?;
//! let device = std::sync::Arc::new(MemDevice::new(&Options::new(64 << 20))?);
//! let pool = Pool::create(device, Name::new("pool")?, cores.get(0))?;
//! pool.create_volume(Name::new("data")?, 16 << 20)?;
//! let volume = pool.open_volume("data")?;
//! pool.grow_volume("data", 24 << 20)?;
//! assert_eq!((pool.volumes().len(), volume.limits().capacity), (1, 24 << 20));
//! cores.get(0).block_on(move |core| async move {
//!     let channel = volume.open_channel().unwrap();
//!     let mut buffer = core.buffers().take(4096).await;
//!     buffer.as_mut_slice().fill(7);
//!     let (mut buffer, written) = buffer.transfer(&*channel, Op::Write, Flags::NONE, 8192).await;
//!     buffer.as_mut_slice().fill(0);
//!     let (buffer, read) = buffer.transfer(&*channel, Op::Read, Flags::NONE, 8192).await;
//!     assert_eq!((written, read, buffer.as_slice()), (Ok(()), Ok(()), &[7; 4096][..]));
//! })?;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod device;
pub mod extents;
pub mod mutant;
pub mod name;
pub mod pool;
pub mod store;
pub mod table;

pub use base::Uuid;
pub use device::Volume;
pub use name::{Name, NameError};
pub use pool::{Info, Pool, PoolError, Reservation};

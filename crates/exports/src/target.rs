//! The device under an export, on one of the cores that serve it.

use crate::Error;
use block::{Channel, Device, Flags, IoError, IoFuture, IoResult, Request};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

thread_local! {
    /// Channels that this core has open, by device: queues of one device on one core share a channel, so that
    /// their requests go down in one batch.
    static CHANNELS: RefCell<HashMap<usize, Weak<dyn Channel>>> = RefCell::default();
}

/// A device that is open on the calling core.
pub(crate) struct Target {
    channel: Rc<dyn Channel>,
    /// The channel's, kept as long as the channel.
    _device: Arc<dyn Device>,
    is_read_only: bool,
    has_volatile_cache: bool,
}

impl Target {
    /// Opens the device on the calling core, or shares what is open there. Writes are refused if the device or
    /// `is_read_only` says so.
    pub(crate) fn open(device: Arc<dyn Device>, is_read_only: bool) -> Result<Target, Error> {
        let key = Arc::as_ptr(&device).addr();
        // A channel found here is used by a target, and that keeps the device: the address is not another's.
        let open = CHANNELS.with_borrow(|channels| channels.get(&key).and_then(Weak::upgrade));
        let channel = match open {
            Some(channel) => channel,
            None => device.open_channel()?,
        };
        CHANNELS.with_borrow_mut(|channels| {
            channels.retain(|_, channel| channel.strong_count() > 0);
            channels.insert(key, Rc::downgrade(&channel));
        });
        let limits = device.limits();
        Ok(Target {
            channel,
            _device: device,
            is_read_only: is_read_only || limits.read_only,
            has_volatile_cache: limits.volatile_cache,
        })
    }

    /// Hands a request that changes nothing to the device.
    #[inline]
    pub(crate) fn submit<'a>(&'a self, request: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        self.channel.submit(request, offset)
    }

    /// Hands a request that changes something to the device, if that is allowed.
    #[inline]
    pub(crate) fn modify<'a>(&'a self, request: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if self.is_read_only {
            return IoFuture::ready(Err(IoError::ReadOnly));
        }
        self.channel.submit(request, offset)
    }

    /// Makes durable what has been written; done at once where nothing is cached.
    pub(crate) async fn flush(&self) -> IoResult {
        if !self.has_volatile_cache {
            return Ok(());
        }
        self.channel.submit(&Request::flush(), 0).await
    }

    /// How a write is marked that must be durable when it completes.
    #[inline]
    pub(crate) fn durable(&self) -> Flags {
        if self.has_volatile_cache { Flags::FUA } else { Flags::NONE }
    }
}

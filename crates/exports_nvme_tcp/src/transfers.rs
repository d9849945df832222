//! Data that was requested from the host (R2T) and has not arrived yet.

use exports::DataMemory;
use exports::stream::Memory;
use nvme::tcp::{Fatal, FatalStatus, H2cData};
use std::task::{Context, Poll, Waker};

/// The result of a transfer.
pub(crate) enum Ended {
    /// Complete; `is_intact`: the data matches its digests.
    Whole { memory: Memory, is_intact: bool },
    /// The stream ended.
    GivenUp,
}

struct Transfer {
    command_id: u16,
    /// With the reader while data is being received.
    memory: Option<Memory>,
    len: usize,
    received: usize,
    is_intact: bool,
    waker: Option<Waker>,
}

/// The transfers of one connection, by tag.
#[derive(Default)]
pub(crate) struct Transfers {
    list: Vec<Option<Transfer>>,
    is_over: bool,
}

impl Transfers {
    /// Starts a transfer that fills `memory`. Returns its tag.
    pub(crate) fn begin(&mut self, command_id: u16, memory: Memory) -> u16 {
        let len = memory.len();
        let transfer =
            Transfer { command_id, memory: Some(memory), len, received: 0, is_intact: true, waker: None };
        let place = self.list.iter().position(Option::is_none).unwrap_or_else(|| {
            self.list.push(None);
            self.list.len() - 1
        });
        self.list[place] = Some(transfer);
        place as u16 // at most the number of commands of a queue
    }

    /// Data arrives, in the requested order. Returns the memory for it.
    ///
    /// # Errors
    /// When the data was not requested.
    pub(crate) fn expect(&mut self, data: &H2cData) -> Result<Memory, Fatal> {
        let transfer = self.list.get_mut(usize::from(data.tag)).and_then(Option::as_mut);
        let transfer = transfer.ok_or(Fatal::field(10))?;
        if transfer.command_id != data.command_id {
            return Err(Fatal::field(8));
        }
        let end = data.offset as usize + data.len as usize;
        if data.offset as usize != transfer.received || end > transfer.len {
            return Err(Fatal::new(FatalStatus::DataOutOfRange));
        }
        transfer.memory.take().ok_or(Fatal::new(FatalStatus::Sequence))
    }

    /// Counts `len` received bytes.
    pub(crate) fn arrive(&mut self, tag: u16, memory: Memory, len: usize, is_intact: bool) {
        if let Some(transfer) = &mut self.list[usize::from(tag)] {
            transfer.memory = Some(memory);
            transfer.received += len;
            transfer.is_intact &= is_intact;
            if transfer.received == transfer.len {
                transfer.waker.take().into_iter().for_each(Waker::wake);
            }
        }
    }

    /// Returns the memory of incomplete data.
    pub(crate) fn give_back(&mut self, tag: u16, memory: Memory) {
        if let Some(transfer) = &mut self.list[usize::from(tag)] {
            transfer.memory = Some(memory);
        }
    }

    /// The stream has ended: all transfers end.
    pub(crate) fn end(&mut self) {
        self.is_over = true;
        for transfer in self.list.iter_mut().flatten() {
            transfer.waker.take().into_iter().for_each(Waker::wake);
        }
    }

    /// Waits for the end of a transfer, and removes it.
    pub(crate) fn poll(&mut self, tag: u16, context: &Context<'_>) -> Poll<Ended> {
        let place = &mut self.list[usize::from(tag)];
        let transfer = place.as_mut().expect("polled until it ends");
        let is_whole = transfer.received == transfer.len;
        if !is_whole && !self.is_over {
            transfer.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        let Transfer { memory, is_intact, .. } = place.take().expect("just seen");
        let memory = memory.expect("the reader has given it back");
        Poll::Ready(if is_whole { Ended::Whole { memory, is_intact } } else { Ended::GivenUp })
    }
}

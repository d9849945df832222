//! One queue of a controller: from a command to its completion.

use crate::MAX_TRANSFER;
use crate::controller::Controller;
use crate::failure::Failure;
use crate::reservations::Gate;
use crate::subsystem::{Admission, Membership};
use crate::transport::{Answer, Command, Connection, Transport};
use exports::{DataMemory, Error, Target};
use nvme::{CompletionEntry, Sgl, Status, SubmissionEntry};
use reactor::current;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::{Arc, Weak};

/// One queue of a controller, on the core that serves it.
pub struct Queue {
    /// Devices, in the order of the namespaces; empty for an admin queue.
    targets: Vec<Target>,
    /// The write counters of the namespaces.
    gates: Vec<Rc<Gate>>,
    id: u16,
    entries: u16,
    /// The head of the submission queue.
    head: Cell<u16>,
    has_flow_control: bool,
    membership: Membership,
}

/// The result of a successful command.
pub(crate) struct Reply<M> {
    /// Dwords 0 and 1 of the completion.
    pub(crate) result: u64,
    /// Data for the host.
    pub(crate) data: Option<M>,
}

impl<M> Default for Reply<M> {
    fn default() -> Reply<M> {
        Reply { result: 0, data: None }
    }
}

impl Queue {
    /// Opens the queue of an admitted host, with its devices, on the calling core. `head` is that
    /// of the submission queue, after the commands that the transport has answered.
    ///
    /// # Errors
    /// When a device has no channel for this core.
    pub fn open(admission: Admission, head: u16, connection: &Weak<dyn Connection>) -> Result<Queue, Error> {
        let controller = &admission.membership.controller;
        let (mut targets, mut gates) = (Vec::new(), Vec::new());
        if admission.queue_id != 0 {
            for namespace in &controller.subsystem.namespaces {
                targets.push(Target::open(namespace.device.clone(), namespace.is_read_only)?);
                gates.push(namespace.reserved.gate());
            }
        } else {
            current().spawn(listen(Arc::downgrade(controller), connection.clone()));
        }
        Ok(Queue {
            targets,
            gates,
            id: admission.queue_id,
            entries: admission.entries,
            head: Cell::new(head),
            has_flow_control: admission.has_flow_control,
            membership: admission.membership,
        })
    }

    /// The identifier; 0 for the admin queue.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Whether the host uses the head of the submission queue. If not, a transport may leave out
    /// the completion of a command with data that succeeded with result 0.
    #[inline]
    pub fn has_flow_control(&self) -> bool {
        self.has_flow_control
    }

    /// Records that the host has sent a command: its keep-alive timeout starts again.
    #[inline]
    pub fn hear(&self) {
        if self.id == 0 {
            self.controller().hear();
        }
    }

    /// The stream of commands has ended: event requests, which may be in flight for ever, end
    /// without an answer.
    pub fn end(&self) {
        if self.id == 0 {
            self.controller().end_events();
        }
    }

    /// Executes a command. Returns `None` when no answer can be sent: the connection is broken.
    #[inline]
    pub async fn execute<T: Transport>(
        &self,
        command: Command<T::Memory>,
        transport: &T,
    ) -> Option<Answer<T::Memory>> {
        let command_id = command.entry.command_id;
        let result = match self.id {
            0 => self.admin(command, transport).await,
            _ => self.io(command, transport).await,
        };
        let (status, result) = match result {
            Ok(Reply { result, data }) => {
                return Some(Answer { completion: self.complete(command_id, Status::SUCCESS, result), data });
            }
            Err(Failure::Status(status)) => (status, 0),
            Err(Failure::Detailed { status, result }) => (status, result),
            Err(Failure::Gone) => return None,
        };
        transport.stats().count_failure();
        Some(Answer { completion: self.complete(command_id, status, result), data: None })
    }

    /// The completion of a command, which is answered next.
    #[inline]
    fn complete(&self, command_id: u16, status: Status, result: u64) -> CompletionEntry {
        let sq_head = match self.has_flow_control {
            true => {
                self.head.set((self.head.get() + 1) % self.entries);
                self.head.get()
            }
            false => 0xffff,
        };
        CompletionEntry { result, sq_head, sq_id: self.id, ..CompletionEntry::new(command_id, status) }
    }

    #[inline]
    pub(crate) fn controller(&self) -> &Arc<Controller> {
        &self.membership.controller
    }

    /// The devices, in the order of their namespaces.
    #[inline]
    pub(crate) fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// The write counter of a namespace.
    #[inline]
    pub(crate) fn gate(&self, nsid: u32) -> &Gate {
        &self.gates[nsid as usize - 1]
    }

    /// Waits for the `len` bytes of a command's data, and fetches them if they were not in the
    /// capsule.
    #[inline]
    pub(crate) async fn incoming<T: Transport>(
        &self,
        command: &mut Command<T::Memory>,
        len: usize,
        transport: &T,
    ) -> Result<T::Memory, Failure> {
        if len > MAX_TRANSFER as usize {
            return Err(Status::INVALID_FIELD.into());
        }
        match command.entry.sgl {
            Sgl::InCapsule { offset: 1.., .. } => Err(Status::INVALID_SGL_OFFSET.into()),
            Sgl::InCapsule { len: said, .. } if said as usize == len => {
                let memory = command.data.take().filter(|memory| memory.len() == len);
                let memory = memory.ok_or(Status::INVALID_SGL_LENGTH)?;
                match command.is_intact {
                    true => Ok(memory),
                    false => Err(Status::TRANSIENT_TRANSPORT_ERROR.into()),
                }
            }
            Sgl::Transport { len: said } if said as usize == len => {
                transport.fetch(command.entry.command_id, len).await
            }
            Sgl::InCapsule { .. } | Sgl::Transport { .. } => Err(Status::INVALID_SGL_LENGTH.into()),
            Sgl::None | Sgl::Other { .. } => Err(Status::INVALID_SGL_TYPE.into()),
        }
    }

    /// A reply with all of `bytes`, which the host's buffer must take.
    pub(crate) async fn reply_with_all<T: Transport>(
        &self,
        entry: &SubmissionEntry,
        bytes: &[u8],
        transport: &T,
    ) -> Result<Reply<T::Memory>, Failure> {
        if room(entry)? < bytes.len() {
            return Err(Status::INVALID_SGL_LENGTH.into());
        }
        self.reply_with(entry, bytes, transport).await
    }

    /// A reply with as much of `bytes` as the host's buffer takes.
    pub(crate) async fn reply_with<T: Transport>(
        &self,
        entry: &SubmissionEntry,
        bytes: &[u8],
        transport: &T,
    ) -> Result<Reply<T::Memory>, Failure> {
        let len = room(entry)?.min(bytes.len());
        if len == 0 {
            return Err(Status::INVALID_SGL_LENGTH.into());
        }
        let mut memory = transport.memory(len).await;
        memory.fill(0, &bytes[..len]);
        Ok(Reply { data: Some(memory), ..Reply::default() })
    }
}

/// The size of the host's buffer in bytes.
#[inline]
pub(crate) fn room(entry: &SubmissionEntry) -> Result<usize, Failure> {
    match entry.sgl {
        Sgl::Transport { len } => Ok(len as usize),
        Sgl::None => Ok(0),
        Sgl::InCapsule { .. } | Sgl::Other { .. } => Err(Status::INVALID_SGL_TYPE.into()),
    }
}

/// Disconnects a controller whose keep-alive timeout has expired. `connection` is that of its admin
/// queue. While it sleeps it keeps neither, nor the devices of an export that has ended.
async fn listen(controller: Weak<Controller>, connection: Weak<dyn Connection>) {
    /// Interval of the check when there is no keep-alive timeout.
    const IDLE_NS: u64 = 1_000_000_000;
    let core = current();
    let mut silent_since = core.now_ns();
    let limit_of = |controller: Arc<Controller>| u64::from(controller.keep_alive_ms()) * 1_000_000;
    while connection.strong_count() > 0 {
        let Some(limit_ns) = controller.upgrade().map(limit_of) else { return };
        core.sleep(if limit_ns == 0 { IDLE_NS } else { (limit_ns / 4).clamp(1_000_000, IDLE_NS) }).await;
        let now = core.now_ns();
        let Some(controller) = controller.upgrade() else { return };
        if controller.take_heard() || limit_ns == 0 {
            silent_since = now;
        } else if now - silent_since > limit_ns {
            let (export, host) = (&*controller.subsystem.export, controller.host.nqn.as_str());
            tracing::warn!(export, host, controller = controller.id, "host disconnected: keep-alive timeout");
            return controller.end();
        }
    }
}

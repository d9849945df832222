//! Finds, enables and queries a controller over its admin queue.

use super::connect::{self, Purpose};
use super::error::OpenError;
use super::facts::{Facts, Structures};
use super::identity::Identity;
use super::link::Link;
use super::options::{MAX_QUEUES, Options};
use drivers::stream::Deadline;
use nvme::command::{Command, cns, event, feature, log_page};
use nvme::fabrics::property::{
    Capabilities, Configuration, ControllerStatus, PropertyGet, PropertySet, offset,
};
use nvme::fabrics::{ANY_CONTROLLER, MIN_ADMIN_ENTRIES};
use nvme::identify::ControllerData;
use nvme::identify::lists::parse_namespaces;
use nvme::{IDENTIFY_BYTES, IdentifyData, Sgl, Status, SubmissionEntry};
use std::time::Duration;

/// Poll interval while the controller becomes ready.
const READY_POLL: Duration = Duration::from_millis(5);
/// The fraction of the keep-alive timeout between two keep-alive commands: 1/2.
const KEEP_ALIVE_PART: u32 = 2;

/// A ready controller, through its admin queue.
pub(super) struct Controller {
    link: Link,
    pub(super) id: u16,
    /// I/O queues granted by the controller.
    pub(super) queues: u32,
    has_events: bool,
    capabilities: Capabilities,
}

impl Controller {
    /// Connects, enables the controller, and queries the namespace.
    pub(super) fn connect(
        host: &Identity,
        deadline: &Deadline<'_>,
    ) -> Result<(Controller, Facts), OpenError> {
        let options = &host.options;
        let mut controller = Controller::reach(host, deadline)?;
        let facts = controller.learn(options.nsid, deadline)?;
        controller.agree_on_queues(options, deadline)?;
        controller.ask_for_events(deadline)?;
        Ok((controller, facts))
    }

    /// Connects and enables the controller.
    pub(super) fn reach(host: &Identity, deadline: &Deadline<'_>) -> Result<Controller, OpenError> {
        let purpose = Purpose {
            queue_id: 0,
            entries: MIN_ADMIN_ENTRIES.into(),
            keep_alive_ms: host.options.keep_alive_s * 1000,
            controller_id: ANY_CONTROLLER,
        };
        let (mut link, id) = connect::connect(host, &purpose, deadline)?;
        let get = PropertyGet { bytes: 8, offset: offset::CAP };
        let capabilities = link.succeed("to tell its capabilities", |id| get.entry(id), &mut [], deadline)?;
        let capabilities = Capabilities::parse(capabilities.result);
        let mut controller = Controller { link, id, queues: 0, has_events: false, capabilities };
        controller.enable(deadline)?;
        Ok(controller)
    }

    /// Queries namespace `nsid`, or the first one.
    pub(super) fn learn(&mut self, nsid: Option<u32>, deadline: &Deadline<'_>) -> Result<Facts, OpenError> {
        let nsid = match nsid {
            Some(nsid) => nsid,
            None => {
                let list = self.identify(0, cns::ACTIVE_NAMESPACES, deadline)?;
                parse_namespaces(&list).next().ok_or(OpenError::NoNamespace(String::new()))?
            }
        };
        let controller = self.identify(0, cns::CONTROLLER, deadline)?;
        let namespace = match self.identify(nsid, cns::NAMESPACE, deadline) {
            Err(OpenError::Refused { status: Status::INVALID_NAMESPACE, .. }) => {
                return Err(OpenError::NoNamespace(format!(" {nsid}")));
            }
            other => other?,
        };
        let descriptors = self.identify_if_it_can(nsid, cns::DESCRIPTORS, deadline)?;
        let limits = self.identify_if_it_can(0, cns::COMMAND_SET_CONTROLLER, deadline)?;
        let data = ControllerData::parse(&controller);
        self.has_events = data.async_events & event::CONFIG_NAMESPACE_ATTRIBUTES != 0;
        Facts::new(&Structures {
            capabilities: self.capabilities,
            controller: &controller,
            nsid,
            namespace: &namespace,
            descriptors: &descriptors,
            limits: &limits,
        })
    }

    /// Sends a keep-alive command; `Ok` means that the controller is alive.
    pub(super) fn keep_alive(&mut self, deadline: &Deadline<'_>) -> Result<(), OpenError> {
        self.admin("to stay alive", &Command::keep_alive(), &mut [], deadline).map(|_| ())
    }

    /// The interval of [`Controller::keep_alive`]; `None` for never.
    pub(super) fn keep_alive_interval(options: &Options) -> Option<Duration> {
        let timeout = Duration::from_secs(options.keep_alive_s.into());
        (!timeout.is_zero()).then_some(timeout / KEEP_ALIVE_PART)
    }

    /// Processes received PDUs of the admin queue, without waiting for more than a PDU that has
    /// begun. Returns `true` if the namespace may have changed.
    pub(super) fn listen(&mut self, deadline: &Deadline<'_>) -> Result<bool, OpenError> {
        self.link.listen(deadline)?;
        self.take_event(deadline)
    }

    /// Processes an event that arrived meanwhile, and requests the next.
    pub(super) fn take_event(&mut self, deadline: &Deadline<'_>) -> Result<bool, OpenError> {
        let Some(dword) = self.link.take_event() else { return Ok(false) };
        let event = event::Event::parse(dword);
        tracing::debug!(?event, "asynchronous event");
        let is_change = event == event::Event::NAMESPACE_ATTRIBUTES;
        if is_change {
            // The controller reports the same event again only after the log was read. The content
            // is ignored, since the namespace is queried anyway.
            let log = Command::get_log_page(u32::MAX, log_page::CHANGED_NAMESPACES, 0, IDENTIFY_BYTES as u32);
            self.admin("to tell what changed", &log, &mut [0; IDENTIFY_BYTES], deadline)?;
        }
        self.link.request_event(deadline)?;
        Ok(is_change)
    }

    /// The socket, to wait for events.
    pub(super) fn fd(&self) -> std::os::fd::RawFd {
        self.link.fd()
    }

    /// Whether PDUs have arrived that the socket does not report.
    pub(super) fn has_unread(&mut self) -> bool {
        self.link.has_unread()
    }

    /// Shuts the controller down.
    pub(super) fn shut_down(&mut self, deadline: &Deadline<'_>) -> Result<(), OpenError> {
        let normal = Configuration { shutdown: 1, ..Configuration::ENABLED };
        self.set(offset::CC, normal.encode(), deadline)
    }

    fn enable(&mut self, deadline: &Deadline<'_>) -> Result<(), OpenError> {
        self.set(offset::CC, Configuration::ENABLED.encode(), deadline)?;
        loop {
            let get = PropertyGet { bytes: 4, offset: offset::CSTS };
            let entry = |id| get.entry(id);
            let status = self.link.succeed("to tell its status", entry, &mut [], deadline)?;
            let status = ControllerStatus::parse(status.result as u32);
            if status.is_fatal {
                return Err(OpenError::Unusable("the controller reports a fatal status".into()));
            }
            if status.is_ready {
                return Ok(());
            }
            deadline.pause(READY_POLL)?;
        }
    }

    fn set(&mut self, offset: u32, value: u32, deadline: &Deadline<'_>) -> Result<(), OpenError> {
        let set = PropertySet { bytes: 4, offset, value: value.into() };
        self.link.succeed("to be configured", |id| set.entry(id), &mut [], deadline).map(|_| ())
    }

    fn agree_on_queues(&mut self, options: &Options, deadline: &Deadline<'_>) -> Result<(), OpenError> {
        let wanted = if options.queues == 0 { MAX_QUEUES } else { options.queues };
        let value = (wanted - 1) | (wanted - 1) << 16;
        let command = Command::set_features(feature::NUMBER_OF_QUEUES, value);
        let granted = self.admin("to grant queues", &command, &mut [], deadline)?;
        let granted = (granted.result as u32 & 0xffff).min((granted.result >> 16) as u32 & 0xffff) + 1;
        self.queues = granted.min(wanted);
        Ok(())
    }

    fn ask_for_events(&mut self, deadline: &Deadline<'_>) -> Result<(), OpenError> {
        if self.has_events {
            let wanted = event::CONFIG_NAMESPACE_ATTRIBUTES;
            let command = Command::set_features(feature::ASYNC_EVENT_CONFIGURATION, wanted);
            self.admin("to report events", &command, &mut [], deadline)?;
            self.link.request_event(deadline)?;
        }
        Ok(())
    }

    fn identify(
        &mut self,
        nsid: u32,
        cns: u8,
        deadline: &Deadline<'_>,
    ) -> Result<Box<IdentifyData>, OpenError> {
        let mut data = Box::new([0; IDENTIFY_BYTES]);
        self.admin("to identify itself", &Command::identify(nsid, cns, 0), &mut *data, deadline)?;
        Ok(data)
    }

    /// All zeroes if the controller does not support this structure, as before the version that
    /// added it.
    fn identify_if_it_can(
        &mut self,
        nsid: u32,
        cns: u8,
        deadline: &Deadline<'_>,
    ) -> Result<Box<IdentifyData>, OpenError> {
        match self.identify(nsid, cns, deadline) {
            Err(OpenError::Refused { .. }) => Ok(Box::new([0; IDENTIFY_BYTES])),
            other => other,
        }
    }

    /// Executes an admin command, which fills `to`; `what` is the requested action, for the error
    /// message.
    pub(super) fn admin(
        &mut self,
        what: &'static str,
        command: &Command,
        to: &mut [u8],
        deadline: &Deadline<'_>,
    ) -> Result<nvme::CompletionEntry, OpenError> {
        let sgl = Sgl::Transport { len: to.len() as u32 };
        self.link.succeed(what, |id| SubmissionEntry::new(command, id, sgl), to, deadline)
    }
}

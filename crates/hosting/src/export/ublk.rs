//! `--export ublk:…`.

use super::{CORES, DEVICE, ExportConfig, RequestMemory};
use crate::text::count;
use base::Size;
use block::Device;
use exports::{Error, Export};
use exports_ublk::{Begin, Config, DataPath, Recovery, Ublk};
use reactor::CoreRef;
use sandbox::{Access, Capability, Profile};
use serde_json::{Map, json};
use spec::{Kind, READ_ONLY, Spec, SpecError, Value, key};
use std::sync::{Arc, OnceLock};

pub(super) static KIND: Kind = Kind {
    name: "ublk",
    about: "a disk of this machine's kernel, /dev/ublkbN",
    keys: &[
        key("id", "N|auto", "the disk's number [auto: a free one]"),
        DEVICE,
        key("queues", "N", "queues, 1 to 64; at most one for each processor is used [1]"),
        key("queue-size", "N", "requests in flight in each queue, 1 to 4096 [128]"),
        key("max-io", "SIZE", "longest read or write, 4K to 1M [512K]"),
        READ_ONLY,
        key(
            "recovery",
            "HOW",
            "after a kill of the server: requests wait and are repeated (reissue); requests wait, those in flight fail (plain); all requests fail (fail); the disk ends (off) [reissue]",
        ),
        key(
            "begin",
            "HOW",
            "create the disk (add), take over one whose server was killed (recover), or either [either]",
        ),
        key(
            "zero-copy",
            "auto|off",
            "let devices that look at no bytes use the kernel's buffers, on Linux 6.16 [auto]",
        ),
        CORES,
    ],
};

/// An export over ublk.
#[derive(Debug)]
struct UblkConfig {
    config: Config,
    /// The device that was named, if one was: tells exports apart that choose no number.
    device: Option<String>,
    /// The disk that the kernel has made.
    started: OnceLock<Started>,
}

#[derive(Debug)]
struct Started {
    id: u32,
    is_recovered: bool,
    queues: u16,
    queue_size: u16,
    max_io: u32,
    is_zero_copy: bool,
}

/// The export that `spec` describes.
pub(super) fn parse(spec: &Spec) -> Result<Box<dyn ExportConfig>, SpecError> {
    let default = Config::default();
    let config = Config {
        id: spec.get_or("id", Id(None))?.0,
        num_queues: spec.get_or("queues", default.num_queues)?,
        queue_size: spec.get_or("queue-size", default.queue_size)?,
        max_io: max_io(spec)?.unwrap_or(default.max_io),
        read_only: spec.is_on("readonly")?,
        recovery: spec.get_or("recovery", RecoveryWord(default.recovery))?.0,
        begin: spec.get_or("begin", BeginWord(default.begin))?.0,
        zero_copy: spec.get_or("zero-copy", ZeroCopyWord(default.zero_copy))?.0,
        core_map: Vec::new(),
    };
    if config.begin == Begin::Recover && config.id.is_none() {
        return Err(spec.refuse("begin=recover: say with id= which disk"));
    }
    Ok(Box::new(UblkConfig { config, device: spec.get("device")?, started: OnceLock::new() }))
}

fn max_io(spec: &Spec) -> Result<Option<u32>, SpecError> {
    let Some(Size(bytes)) = spec.get("max-io")? else { return Ok(None) };
    // The export says what is allowed; here it only has to fit.
    Ok(Some(u32::try_from(bytes).unwrap_or(u32::MAX)))
}

/// Adds what every disk needs.
pub(super) fn keep_any(profile: &mut Profile) {
    // The nodes of a disk, and of its partitions, are there when it is made.
    profile.allow("/dev", Access::ReadWrite);
    // To make a disk, to end it, and to look for its partitions.
    profile.keep(Capability::CAP_SYS_ADMIN);
}

impl ExportConfig for UblkConfig {
    fn name(&self) -> String {
        match (self.config.id, &self.device) {
            (Some(id), _) => format!("ublk:{id}"),
            (None, Some(device)) => format!("ublk:auto of {device}"),
            (None, None) => "ublk:auto".into(),
        }
    }

    fn memory(&self) -> RequestMemory {
        RequestMemory::Own
    }

    fn complete(&mut self, _: &str, cores: Vec<usize>) {
        self.config.core_map = cores;
    }

    fn start(&self, devices: &[Arc<dyn Device>], cores: &[CoreRef]) -> Result<Box<dyn Export>, Error> {
        let ublk = Ublk::start(devices[0].clone(), cores, self.config.clone())?;
        let info = ublk.info();
        let _ = self.started.set(Started {
            id: ublk.id(),
            is_recovered: ublk.is_recovered(),
            queues: info.queues(),
            queue_size: info.queue_size(),
            max_io: info.max_io(),
            is_zero_copy: ublk.data_path() == DataPath::Registered,
        }); // an export is started once
        Ok(Box::new(ublk))
    }

    fn keep(&self, profile: &mut Profile) {
        keep_any(profile);
    }

    fn line(&self, device_id: &str) -> String {
        let Some(started) = self.started.get() else { return self.name() };
        let verb = if started.is_recovered { "taken over as" } else { "is" };
        let queues = count(started.queues.into(), "queue");
        let how = if started.is_zero_copy { ", zero copy" } else { "" };
        format!("ublk: {queues} of {device_id}, {verb} /dev/ublkb{}{how}", started.id)
    }

    fn fields(&self) -> Map<String, serde_json::Value> {
        let started = self.started.get();
        let fields = json!({
            "kind": KIND.name,
            "id": started.map(|started| started.id),
            "path": started.map(|started| format!("/dev/ublkb{}", started.id)),
            "queues": started.map_or(self.config.num_queues, |started| started.queues),
            "queue_size": started.map_or(self.config.queue_size, |started| started.queue_size),
            "max_io": started.map_or(self.config.max_io, |started| started.max_io),
            "recovery": self.config.recovery.name(),
            "zero_copy": started.is_some_and(|started| started.is_zero_copy),
            "recovered": started.is_some_and(|started| started.is_recovered),
        });
        fields.as_object().expect("an object").clone()
    }

    fn is_read_only(&self) -> bool {
        self.config.read_only
    }

    fn cores(&self) -> &[usize] {
        &self.config.core_map
    }
}

struct Id(Option<u32>);

impl Value for Id {
    fn expected() -> String {
        "a number or auto".into()
    }

    fn parse(text: &str) -> Option<Self> {
        if text == "auto" { Some(Id(None)) } else { u32::parse(text).map(|id| Id(Some(id))) }
    }
}

struct RecoveryWord(Recovery);

impl Value for RecoveryWord {
    fn expected() -> String {
        "reissue, plain, fail or off".into()
    }

    fn parse(text: &str) -> Option<Self> {
        Recovery::ALL.into_iter().find(|recovery| recovery.name() == text).map(RecoveryWord)
    }
}

struct ZeroCopyWord(bool);

impl Value for ZeroCopyWord {
    fn expected() -> String {
        "auto or off".into()
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(ZeroCopyWord(true)),
            "off" => Some(ZeroCopyWord(false)),
            _ => None,
        }
    }
}

struct BeginWord(Begin);

impl Value for BeginWord {
    fn expected() -> String {
        "add, recover or either".into()
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "add" => Some(BeginWord(Begin::Add)),
            "recover" => Some(BeginWord(Begin::Recover)),
            "either" => Some(BeginWord(Begin::AddOrRecover)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ExportPlan;

    fn parse(text: &str) -> Result<ExportPlan, String> {
        ExportPlan::parse(text).map_err(|error| error.to_string())
    }

    #[test]
    fn exports_are_told_apart_by_number_or_device() {
        let name = |text: &str| parse(text).unwrap().config.name();
        assert_eq!(name("ublk:id=3"), "ublk:3");
        assert_eq!(name("ublk:id=auto,device=a"), "ublk:auto of a");
        assert_eq!(name("ublk"), "ublk:auto");
    }

    #[test]
    fn invalid_options_are_refused_by_key_and_value() {
        let refusal = |text: &str| parse(text).map(|_| ()).unwrap_err();
        assert_eq!(refusal("ublk:id=x"), "export ublk:id=x: id=x: expected a number or auto");
        assert!(refusal("ublk:recovery=on").ends_with("expected reissue, plain, fail or off"));
        assert!(refusal("ublk:begin=later").ends_with("expected add, recover or either"));
        assert!(refusal("ublk:zero-copy=on").ends_with("expected auto or off"));
        assert!(refusal("ublk:begin=recover").contains("say with id= which disk"));
    }

    #[test]
    fn options_set_the_configuration() {
        let plan = parse("ublk:queues=2,queue-size=64,max-io=64K,recovery=plain,readonly").unwrap();
        let fields = plan.config.fields();
        assert_eq!((&fields["queues"], &fields["queue_size"]), (&2.into(), &64.into()));
        assert_eq!((&fields["max_io"], &fields["recovery"]), (&65536.into(), &"plain".into()));
        assert!(fields["id"].is_null() && plan.config.is_read_only());
    }
}

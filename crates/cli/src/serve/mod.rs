//! `freestone serve`: devices, layers and exports in one process, until a signal ends it.

mod confinement;
mod server;
pub mod signals;

use crate::error::Error;
use crate::output::Output;
use crate::parse::{self, CommonArgs, PollUs};
use crate::stack_args::StackArgs;
use base::Size;
use clap::ArgMatches;
use confinement::SandboxArgs;
use exports::{MIN_MEMORY, MemoryBudget};
use exports_virtio::contain_truncation;
use hosting::export::{ExportConfig, ExportPlan, RequestMemory};
use reactor::CoreConfig;
use server::Server;
use signals::{Signal, Signals};
use spec::CpuList;
use stack::{DevicePlan, StackPlan};
use std::path::PathBuf;

/// The arguments of `freestone serve`.
#[derive(clap::Args, Debug)]
pub struct ServeArgs {
    #[command(flatten)]
    stack: StackArgs,
    /// An export; may be repeated
    #[arg(long = "export", value_name = "KIND:KEY=VALUE,…", required = true)]
    export: Vec<String>,
    #[command(flatten)]
    options: ServeOptions,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

/// Options of every server.
#[derive(clap::Args, Debug)]
pub struct ServeOptions {
    /// Processors to serve from, such as 0,1 or 0-3 [default: one unbound thread]
    #[arg(long, value_name = "CPUS", value_parser = parse::value::<CpuList>)]
    cores: Option<CpuList>,
    /// Longest time that a core polls without work before it sleeps, in microseconds; adapts to the
    /// load
    #[arg(long, value_name = "N|always|never", default_value = "50", value_parser = parse::value::<PollUs>)]
    poll_us: PollUs,
    /// Memory for data of network clients (NBD, NVMe/TCP), such as 2G [default: a quarter of the
    /// machine's]
    #[arg(long, value_name = "SIZE", value_parser = parse::value::<Size>)]
    memory: Option<Size>,
    /// Control socket for freestone array [default: one socket per array, named after its UUID]
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    #[command(flatten)]
    sandbox: SandboxArgs,
}

impl ServeArgs {
    /// Those of a command that serves one export.
    pub fn new(stack: StackArgs, export: String, options: ServeOptions, common: CommonArgs) -> ServeArgs {
        ServeArgs { stack, export: vec![export], options, common }
    }
}

/// The objects to serve: everything that can be checked without opening has been checked.
pub struct ServePlan {
    stack: StackPlan,
    /// Each with the places of its devices: one at least.
    exports: Vec<(ExportPlan, Vec<usize>)>,
    cores: Vec<CoreConfig>,
}

impl ServePlan {
    fn parse(args: &ServeArgs, matches: &ArgMatches) -> Result<ServePlan, Error> {
        let stack = args.stack.plan(matches)?;
        if let (Some(path), false) =
            (&args.options.control, stack.devices().iter().any(DevicePlan::has_array))
        {
            let path = path.display();
            return Err(Error::Usage(format!("--control {path}: no array is served that it could control")));
        }
        let cores = parse::core_configs(args.options.cores.as_ref(), args.options.poll_us.0);
        let mut exports: Vec<(ExportPlan, Vec<usize>)> = Vec::new();
        for text in &args.export {
            let refuse = |fault: String| Error::Usage(format!("--export {text}: {fault}"));
            let mut export = ExportPlan::parse(text)?;
            let chosen = export.devices.iter().map(|id| stack.position(id));
            let mut devices = chosen.collect::<Result<Vec<usize>, _>>().map_err(refuse)?;
            if devices.is_empty() {
                devices.push(0);
            }
            if let Some(portal) = export.config.portal() {
                return Err(refuse(format!(
                    "portal={portal}: only freestoned has portals; exports with the same listen= share a listener"
                )));
            }
            devices.iter().try_for_each(|at| {
                check_memory(export.config.memory(), &stack.devices()[*at]).map_err(refuse)
            })?;
            let map = core_map(export.cores.as_deref(), &cores).map_err(refuse)?;
            export.config.complete(&stack.devices()[devices[0]].id, map);
            exports
                .iter()
                .try_for_each(|(other, _)| check_both(&*other.config, &*export.config))
                .map_err(refuse)?;
            exports.push((export, devices));
        }
        Ok(ServePlan { stack, exports, cores })
    }

    /// Whether a vhost-user server has to reach the buffers of the cores: those of an array, or of
    /// an export.
    fn shares_buffers(&self) -> bool {
        let maps_memory = |device: &DevicePlan| device.any_leaf(&|leaf| leaf.maps_memory());
        let of_array = self.stack.devices().iter().any(|device| device.has_array() && maps_memory(device));
        let is_own = |export: &ExportPlan| export.config.memory() == RequestMemory::Own;
        let mut places = self.exports.iter().filter(|(export, _)| is_own(export)).flat_map(|(_, at)| at);
        of_array || places.any(|at| maps_memory(&self.stack.devices()[*at]))
    }
}

/// Refuses an export whose memory the device cannot reach.
fn check_memory(memory: RequestMemory, device: &DevicePlan) -> Result<(), String> {
    if memory == RequestMemory::Own && device.any_leaf(&|leaf| leaf.pins_all_memory()) {
        let id = &device.id;
        return Err(format!("device {id}: it can only use registered memory, and this export has its own"));
    }
    Ok(())
}

/// Refuses two exports with one name, or with one listener and other options of it.
fn check_both(one: &dyn ExportConfig, other: &dyn ExportConfig) -> Result<(), String> {
    let (name, name_of_other) = match (one.own_listener(), other.own_listener()) {
        (Some(one), Some(other)) if one.is_same(&other) => {
            if let Some(option) = one.difference(&other) {
                return Err(format!(
                    "{option}: {} has the same listener, and so the same {option}",
                    one.name
                ));
            }
            (one.name, other.name)
        }
        _ => (one.name(), other.name()),
    };
    match name == name_of_other {
        true => Err(format!("export {name} exists already")),
        false => Ok(()),
    }
}

/// Places of the chosen processors among those of the cores.
fn core_map(chosen: Option<&[usize]>, cores: &[CoreConfig]) -> Result<Vec<usize>, String> {
    let place_of = |cpu: &usize| {
        cores.iter().position(|core| core.cpu == Some(*cpu)).ok_or_else(|| {
            let known: Vec<String> =
                cores.iter().filter_map(|core| core.cpu).map(|c| c.to_string()).collect();
            match &*known {
                [] => format!("cores: processor {cpu} is not served from: give --cores"),
                known => format!("cores: processor {cpu} is not among --cores {}", known.join(",")),
            }
        })
    };
    chosen.unwrap_or_default().iter().map(place_of).collect()
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// When something cannot be opened or started, or not flushed at the end.
pub fn run(args: &ServeArgs, matches: &ArgMatches) -> Result<(), Error> {
    set_memory(args.options.memory)?;
    let mut plan = ServePlan::parse(args, matches)?;
    let output = Output::new(args.common.json);
    let control = args.options.control.as_deref();
    let mut sandbox = confinement::plan(&plan, &args.options.sandbox, control)?;
    sandbox.confine()?;
    if plan.shares_buffers() {
        hosting::share_buffers(plan.cores.len()).map_err(Error::Runtime)?;
    }
    let stacks = Server::open(&plan)?;
    sandbox.switch_user()?;
    let server = Server::start(&plan, stacks)?;
    contain_truncation().map_err(|e| Error::Runtime(format!("cannot handle SIGBUS: {e}")))?;
    // From here on a signal is an orderly end; until here it just ends the program, as nothing is
    // served yet.
    let signals = Signals::install()?;
    sandbox.seal()?;
    let mut server = server.start_exports(&mut plan)?;
    let requests = signals.requests();
    server.start_controls(&requests, control, &sandbox.permits())?;
    hosting::sandbox_log::announce(&sandbox);
    server.announce(output, confinement::json(&sandbox));
    server.follow_roles(&requests.refresh);
    notify_service_manager(sd_notify::NotifyState::Ready);
    let served = loop {
        let signal = signals.wait();
        match signal {
            Signal::Refresh | Signal::Reload => {
                if signal == Signal::Reload {
                    server.reload_keys(output);
                }
                if let Err(error) = server.refresh(output) {
                    break Err(error);
                }
            }
            Signal::Report => {
                server.report(output);
                hosting::sandbox_log::announce_refused();
            }
            Signal::Stop => break Ok(()),
        }
    };
    notify_service_manager(sd_notify::NotifyState::Stopping);
    output.event("stopping", "stopping: finishing what is in flight", serde_json::json!({}));
    let stopped = server.stop();
    hosting::sandbox_log::announce_refused();
    served.and(stopped)?;
    output.event("stopped", "stopped", serde_json::json!({}));
    Ok(())
}

/// Bounds the memory of network clients, before there are exports.
fn set_memory(memory: Option<Size>) -> Result<(), Error> {
    let Some(Size(bytes)) = memory else { return Ok(()) };
    if bytes < MIN_MEMORY as u64 {
        return Err(Error::Usage(format!("--memory {bytes}: want at least {MIN_MEMORY} bytes (16M)")));
    }
    MemoryBudget::set_process(usize::try_from(bytes).unwrap_or(usize::MAX));
    Ok(())
}

/// Tells systemd, if it is the one who started us.
pub fn notify_service_manager(state: sd_notify::NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command, command};
    use clap::FromArgMatches;
    use serde_json::json;

    pub(super) fn plan(args: &str) -> Result<ServePlan, Error> {
        let words = ["freestone", "serve"].into_iter().chain(args.split_whitespace());
        let matches = command().try_get_matches_from(words).expect("clap takes it");
        let Ok(Cli { command: Command::Serve(serve), .. }) = Cli::from_arg_matches(&matches) else {
            panic!()
        };
        ServePlan::parse(&serve, matches.subcommand().unwrap().1)
    }

    fn refusal(args: &str) -> String {
        plan(args).err().expect("refused").to_string()
    }

    #[test]
    fn layers_stand_on_the_devices_before_them_or_on_the_one_they_name() {
        let plan = plan(
            "--device mem:size=1M,id=a --layer stats --device null:id=b --layer linear:len=4K \
             --layer linear:device=a,len=8K --export vhost-user-blk:socket=s",
        )
        .unwrap();
        let layers: Vec<usize> = plan.stack.devices().iter().map(|device| device.layers.len()).collect();
        assert_eq!(layers, [3, 1]);
    }

    #[test]
    fn memory_for_network_clients_has_a_minimum() {
        assert!(set_memory(None).is_ok());
        let said = set_memory(Some(Size(1 << 20))).unwrap_err().to_string();
        assert_eq!(said, "--memory 1048576: want at least 16777216 bytes (16M)");
    }

    #[test]
    fn exports_choose_their_device_and_cores() {
        let plan = plan(
            "--device null:id=a --device null --cores 4,7 --export vhost-user-blk:socket=1 \
             --export vhost-user-blk:socket=2,device=device1,cores=7",
        )
        .unwrap();
        assert_eq!(plan.exports.iter().map(|(_, devices)| devices[0]).collect::<Vec<_>>(), [0, 1]);
        let config = |i: usize| &plan.exports[i].0.config;
        assert_eq!((config(0).cores(), config(1).cores()), (&[][..], &[1][..]));
        assert_eq!(
            (&config(0).fields()["serial"], &config(1).fields()["serial"]),
            (&json!("a"), &json!("device1"))
        );
    }

    #[test]
    fn devices_that_reach_registered_memory_alone_get_buffers_where_exports_use_them() {
        let of_guests = "--device virtio-blk-vhost-user:path=/s,id=v --export vhost-user-blk:socket=s";
        let nbd = "--export nbd:socket=n";
        let shares = |args: &str| plan(args).unwrap().shares_buffers();
        assert!(!shares(of_guests) && !shares(&format!("--device null {nbd}")));
        assert!(shares(&format!("{of_guests} {nbd}")) && shares(&format!("{of_guests} --export ublk")));
        let array = "--device null:id=w --device raid:members=v+w,id=a";
        assert!(shares(&of_guests.replace(" --export", &format!(" {array} --export"))));
        let text = "device v: it can only use registered memory, and this export has its own";
        let pinned =
            of_guests.replace("vhost-user:path=/s", "vfio-pci:path=/sys/bus/pci/devices/0000:01:00.0");
        assert!(!shares(&pinned));
        assert_eq!(refusal(&format!("{pinned} {nbd}")), format!("{nbd}: {text}"));
    }

    #[test]
    fn conflicting_options_are_refused_before_a_device_is_opened() {
        let export = "--export vhost-user-blk:socket=s";
        assert_eq!(
            refusal(&format!("--device null {export},device=b")),
            r#"--export vhost-user-blk:socket=s,device=b: no device "b"; there are device0"#
        );
        assert_eq!(
            refusal(&format!("--device null:id=a --device mem:size=1M,id=a {export}")),
            r#"--device mem:size=1M,id=a: device "a" exists already"#
        );
        assert_eq!(
            refusal(&format!("--layer stats --device null {export}")),
            "--layer stats: no device is given before it"
        );
        assert_eq!(
            refusal(&format!("--device null {export} {export}")),
            "--export vhost-user-blk:socket=s: export vhost-user-blk:s exists already"
        );
        let subsystem = |nqn: &str| format!("--export nvme-tcp:listen=127.0.0.1:4420,nqn={nqn}");
        let (one, other) = (subsystem("nqn.a"), subsystem("nqn.b"));
        assert_eq!(plan(&format!("--device null {one} {other}")).unwrap().exports.len(), 2);
        let said = refusal(&format!("--device null {one} {other} {one}"));
        assert!(said.ends_with("export nvme-tcp:127.0.0.1:4420:nqn.a exists already"), "{said}");
        let said =
            refusal(&format!("--device null {one} --export nvme-tcp:listen=127.0.0.1:4420+l:1,nqn=nqn.b"));
        assert!(said.ends_with("export nvme-tcp:127.0.0.1:4420 exists already"), "{said}");
        let named = |options: &str| format!("--export nbd:listen=127.0.0.1:10809,{options}");
        let (one, other) = (named("name=a"), named("name=b"));
        assert_eq!(plan(&format!("--device null {one} {other}")).unwrap().exports.len(), 2);
        let said = refusal(&format!("--device null {one} {other} {one}"));
        assert!(said.ends_with("export nbd:127.0.0.1:10809:a exists already"), "{said}");
        let said = refusal(&format!("--device null {} {}", named("cores=0"), named("clients=2")));
        assert!(said.contains("processor 0 is not served from"), "{said}");
        let said = refusal(&format!("--device null {0} {0}", named("clients=2")));
        assert!(said.ends_with("export nbd:127.0.0.1:10809:device0 exists already"), "{said}");
        let said = refusal(&format!("--device null {one} {}", named("name=b,tls=off")));
        assert!(
            said.ends_with("tls: nbd:127.0.0.1:10809:a has the same listener, and so the same tls"),
            "{said}"
        );
        let said = refusal("--device null --export nvme-tcp:portal=p,nqn=nqn.a");
        assert!(said.contains("portal=p: only freestoned has portals"), "{said}");
        assert_eq!(
            refusal(&format!("--device null --cores 0,1 {export},cores=2")),
            "--export vhost-user-blk:socket=s,cores=2: cores: processor 2 is not among --cores 0,1"
        );
        assert_eq!(
            refusal(&format!("--device null {export},mode=both")),
            "--export vhost-user-blk:socket=s,mode=both: mode=both: expected server or client"
        );
    }
}

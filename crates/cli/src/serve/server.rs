//! The open objects of `serve` (cores, devices, exports), their start and their end.

use super::ServePlan;
use crate::error::Error;
use crate::output::Output;
use crate::stats;
use base::Size;
use block::{HostRole, Op};
use exports::{Export, QueueStats, Stats};
use hosting::arrays::{self, Kept, Requests};
use hosting::control::server::ControlSocket;
use hosting::export::{ExportConfig, ExportPlan, OpenPortal};
use hosting::text::count;
use reactor::Cores;
use sandbox::Permits;
use serde_json::{Value, json};
use stack::Stack;
use std::path::Path;
use std::sync::Arc;

/// A running server. Fields are dropped in this order: control sockets and exports, then devices,
/// then the cores they ran on.
pub struct Server {
    controls: Vec<ControlSocket>,
    exports: Vec<Running>,
    /// Listeners that several exports share, with the places of these.
    portals: Vec<(OpenPortal, Vec<usize>)>,
    arrays: Vec<Kept>,
    stacks: Vec<Stack>,
    /// The announced role of this host for each stack that other hosts serve too.
    roles: Vec<Option<HostRole>>,
    cores: Cores,
    cpus: Vec<Option<usize>>,
}

/// A running export.
struct Running {
    name: String,
    /// As the command line has it.
    text: String,
    line: String,
    json: Value,
    /// Places of its devices.
    devices: Vec<usize>,
    export: Box<dyn Export>,
}

impl Server {
    /// Opens the devices.
    pub fn open(plan: &ServePlan) -> Result<Vec<Stack>, Error> {
        Ok(plan.stack.devices().iter().map(|device| device.open()).collect::<Result<_, _>>()?)
    }

    /// Starts the cores, and keeps the arrays.
    pub fn start(plan: &ServePlan, stacks: Vec<Stack>) -> Result<Server, Error> {
        let cores =
            Cores::start(&plan.cores).map_err(|e| Error::Runtime(format!("cannot start cores: {e}")))?;
        let cpus = plan.cores.iter().map(|core| core.cpu).collect();
        let arrays = arrays::keep(&stacks, &cores.get(0))?;
        let roles = stacks.iter().map(role_of).collect();
        let (controls, exports, portals) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Server { controls, exports, portals, arrays, stacks, roles, cores, cpus })
    }

    /// Has `refresh` called when the role of this host for a device changes.
    pub fn follow_roles(&self, refresh: &Arc<dyn Fn() + Send + Sync>) {
        for role in self.stacks.iter().flat_map(|stack| &stack.roles) {
            let refresh = refresh.clone();
            role.on_change(move || refresh());
        }
        let is_announced = |(stack, announced): (&Stack, &Option<HostRole>)| role_of(stack) == *announced;
        if !self.stacks.iter().zip(&self.roles).all(is_announced) {
            refresh();
        }
    }

    /// Listens for commands to the arrays; `requests` reaches the server, and members are opened
    /// where it `permits` that.
    ///
    /// # Errors
    /// When the `control` socket cannot be made.
    pub fn start_controls(
        &mut self,
        requests: &Requests,
        control: Option<&Path>,
        permits: &Permits,
    ) -> Result<(), Error> {
        let core = self.cores.get(0);
        self.controls = arrays::listen(&self.arrays, &self.stacks, &core, requests, control, permits)?;
        Ok(())
    }

    /// Starts the exports: clients may connect from now on.
    pub fn start_exports(mut self, plan: &mut ServePlan) -> Result<Server, Error> {
        self.share_listeners(plan)?;
        for (plan, places) in &plan.exports {
            let config = &*plan.config;
            let stacks: Vec<&Stack> = places.iter().map(|place| &self.stacks[*place]).collect();
            let devices: Vec<_> = stacks.iter().map(|stack| stack.device.clone()).collect();
            let roles: Vec<_> = stacks.iter().flat_map(|stack| &stack.roles).collect();
            let running = match &roles[..] {
                [] => config.start(&devices, self.cores.all()),
                [role] => config.start_with_role(role, &devices, self.cores.all()),
                _ => Err(exports::Error::Config("standby=on: one such device for each export".into())),
            };
            let running = running.map_err(|source| Error::Export { name: config.name(), source })?;
            let ids: Vec<&str> = stacks.iter().map(|stack| stack.id.as_str()).collect();
            self.exports.push(Running {
                name: config.name(),
                text: plan.text.clone(),
                line: format!("export {}", config.line(&ids.join("+"))),
                json: self.export_json(config, &stacks),
                devices: places.clone(),
                export: running,
            });
        }
        // Last: no host is refused an export that is about to start.
        for (portal, _) in &self.portals {
            let name = format!("{}:{}", portal.kind(), portal.name());
            portal.accept().map_err(|source| Error::Export { name, source })?;
        }
        Ok(self)
    }

    /// Opens a portal for each set of exports that have the same listener.
    fn share_listeners(&mut self, plan: &mut ServePlan) -> Result<(), Error> {
        for place in 0..plan.exports.len() {
            let Some(listener) = plan.exports[place].0.config.own_listener() else { continue };
            let shares = |(other, _): &(ExportPlan, Vec<usize>)| {
                other.config.own_listener().is_some_and(|other| other.is_same(&listener))
            };
            // Those before have their portal already.
            let sharing: Vec<usize> =
                (place..plan.exports.len()).filter(|other| shares(&plan.exports[*other])).collect();
            if sharing.len() < 2 {
                continue;
            }
            let name = plan.exports[place].0.config.name();
            let portal = listener.portal.open(self.cores.all());
            let portal = portal.map_err(|source| Error::Export { name, source })?;
            for other in &sharing {
                let config = &mut plan.exports[*other].0.config;
                config.use_portal(portal.clone()).map_err(Error::Runtime)?;
            }
            self.portals.push((portal, sharing));
        }
        Ok(())
    }

    /// Says what is served; the last line is `ready: …`.
    pub fn announce(&self, output: Output, sandbox: Value) {
        let devices: Vec<Value> = self.stacks.iter().map(device_json).collect();
        for (stack, json) in self.stacks.iter().zip(&devices) {
            output.event("device", device_line(stack), json.clone());
        }
        let exports: Vec<&Value> = self.exports.iter().map(|export| &export.json).collect();
        for Running { line, json, .. } in &self.exports {
            output.event("export", line, json.clone());
        }
        let ready = format!("ready: {}, {}", count(exports.len(), "export"), self.cores_line());
        let fields = json!({
            "pid": std::process::id(),
            "cores": self.cpus,
            "devices": devices,
            "exports": exports,
            "sandbox": sandbox,
            "controls": self.controls.iter().map(ControlSocket::path).collect::<Vec<_>>(),
        });
        output.event("ready", ready, fields);
    }

    /// Announces changes of this host's role, asks every device for its size again, and tells
    /// clients.
    ///
    /// # Errors
    /// When another host has shut this one out of a device.
    pub fn refresh(&mut self, output: Output) -> Result<(), Error> {
        for (place, (stack, announced)) in self.stacks.iter().zip(&mut self.roles).enumerate() {
            let role = role_of(stack);
            if let Some(role) = role.filter(|role| Some(*role) != *announced) {
                // Before the size is read, which may wait for the storage.
                for export in self.exports.iter().filter(|export| export.devices.contains(&place)) {
                    export.export.notify_resize();
                }
                let human = format!("device {}: this host is {}", stack.id, role.name());
                output.event("role", human, json!({ "id": stack.id, "role": role.name() }));
            }
            *announced = role;
        }
        self.refresh_sizes(output);
        let is_fenced = |(_, role): &(&Stack, &Option<HostRole>)| **role == Some(HostRole::Fenced);
        match self.stacks.iter().zip(&self.roles).find(is_fenced) {
            Some((stack, _)) => {
                let id = &stack.id;
                Err(Error::Runtime(format!(
                    "device {id}: another host has taken it over: restart this server as its standby"
                )))
            }
            None => Ok(()),
        }
    }

    /// Reads the keys and certificates of exports again. Those in use stay where a file is invalid.
    pub fn reload_keys(&self, output: Output) {
        for (place, Running { name, text, export, .. }) in self.exports.iter().enumerate() {
            let portal = self.portals.iter().find(|(_, sharing)| sharing.contains(&place));
            match hosting::export::reload(text, &**export, portal.map(|(portal, _)| portal)) {
                Ok(true) => {
                    let human = format!("export {name}: keys and certificates reloaded");
                    output.event("reloaded", human, json!({ "export": name }));
                }
                Ok(false) => {}
                Err(error) => {
                    tracing::error!(export = name, %error, "keys and certificates not reloaded: those in use stay");
                }
            }
        }
    }

    fn refresh_sizes(&self, output: Output) {
        // A standby reads the size when it takes over.
        let is_read = |(_, stack): &(usize, &Stack)| role_of(stack) != Some(HostRole::Standby);
        for (place, stack) in self.stacks.iter().enumerate().filter(is_read) {
            let before = stack.device.limits().capacity;
            let capacity = match stack.device.refresh() {
                Ok(limits) => limits.capacity,
                Err(error) => {
                    tracing::error!(%error, "cannot refresh a device");
                    continue;
                }
            };
            for export in self.exports.iter().filter(|export| export.devices.contains(&place)) {
                export.export.notify_resize();
            }
            let human = format!(
                "refreshed {}: {} bytes, {}",
                stack.id,
                capacity,
                if capacity == before { "as before".into() } else { format!("{before} before") }
            );
            output.event(
                "refreshed",
                human,
                json!({ "id": stack.id, "capacity": capacity, "before": before }),
            );
        }
    }

    /// Says what stats layers and exports have counted.
    pub fn report(&self, output: Output) {
        for stack in &self.stacks {
            for stats in &stack.stats {
                let (human, json) = stats::of_layer(stats);
                output.event(
                    "stats",
                    format!("stats of device {}\n{human}", stack.id),
                    json!({ "device": stack.id, "stats": json }),
                );
            }
        }
        for Running { name, export, .. } in &self.exports {
            let (human, json) = export_stats(export.stats());
            output.event(
                "export_stats",
                format!("stats of export {name}\n{human}"),
                json!({ "export": name, "stats": json }),
            );
        }
    }

    /// Ends everything in order: clients, requests in flight, caches, sockets, cores.
    pub fn stop(mut self) -> Result<(), Error> {
        self.portals.iter().for_each(|(portal, _)| portal.close());
        self.exports.clear();
        self.portals.clear();
        let core = self.cores.get(0);
        let mut result = Ok(());
        for stack in &self.stacks {
            if let Err(error) = hosting::flush(&stack.device, &core) {
                tracing::error!(%error, "a device was not flushed");
                result = result.and(Err(error));
            }
        }
        let result = result.and(arrays::stop(&self.arrays, &core));
        // Clients of the sockets see them close when nothing is left to be done. The command that
        // stops the server may not have been answered yet.
        for control in self.controls.drain(..) {
            control.end_after_answers();
        }
        Ok(result?)
    }

    fn cores_line(&self) -> String {
        let cpus: Vec<String> = self.cpus.iter().flatten().map(usize::to_string).collect();
        match cpus.len() {
            0 => "served from one thread on any processor".into(),
            1 => format!("served from processor {}", cpus[0]),
            _ => format!("served from processors {}", cpus.join(",")),
        }
    }

    /// The export's fields; those of its device, or a list of them where it may have several.
    fn export_json(&self, config: &dyn ExportConfig, stacks: &[&Stack]) -> Value {
        let mut fields = config.fields();
        let of_device = |stack: &&Stack| {
            let limits = stack.device.limits();
            json!({
                "device": stack.id,
                "capacity": limits.capacity,
                "block_size": limits.block_size,
                "read_only": config.is_read_only() || limits.read_only,
            })
        };
        let devices: Vec<Value> = stacks.iter().map(of_device).collect();
        match (config.takes_many(), &devices[..]) {
            (false, [Value::Object(device)]) => fields.extend(device.clone()),
            _ => drop(fields.insert("devices".into(), devices.into())),
        }
        let cpus: Vec<_> = config.cores().iter().map(|place| self.cpus[*place]).collect();
        fields.insert("cores".into(), json!(cpus));
        Value::Object(fields)
    }
}

/// The role of this host for a stack; `None` if no other host serves it.
fn role_of(stack: &Stack) -> Option<HostRole> {
    stack.roles.first().map(|role| role.get())
}

fn device_line(stack: &Stack) -> String {
    let limits = stack.device.limits();
    let mode = if limits.read_only { ", read-only" } else { "" };
    let role = role_of(stack).map(|role| format!(", {}", role.name())).unwrap_or_default();
    format!(
        "device {}: {}, {} ({} bytes), {}-byte blocks{mode}{role}",
        stack.id,
        stack.device.name(),
        Size(limits.capacity),
        limits.capacity,
        limits.block_size
    )
}

fn device_json(stack: &Stack) -> Value {
    crate::info::json_of(stack, &stack.device.limits())
}

fn export_stats(stats: &Stats) -> (String, Value) {
    let sum = |of: &dyn Fn(&QueueStats) -> u64| stats.queues.iter().map(|q| of(q)).sum::<u64>();
    let mut fields = serde_json::Map::new();
    for op in Op::ALL {
        fields.insert(op.name().into(), sum(&|queue| queue.requests(op)).into());
    }
    fields.insert("bytes_read".into(), sum(&|queue| queue.bytes_read()).into());
    fields.insert("bytes_written".into(), sum(&|queue| queue.bytes_written()).into());
    fields.insert("failed".into(), sum(&|queue| queue.failed()).into());
    fields.insert("interrupts".into(), sum(&|queue| queue.interrupts()).into());
    fields.insert("connections".into(), stats.connections().into());
    fields.insert("connected".into(), stats.is_connected().into());
    let human: Vec<String> = fields.iter().map(|(name, value)| format!("  {name:<14}{value}")).collect();
    (human.join("\n"), Value::Object(fields))
}

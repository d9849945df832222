//! Devices with layers on them: planned, then opened.

use crate::array::Opened;
use crate::kinds::device::{self, DeviceConfig, OUT_OF_REACH};
use crate::kinds::layer::{self, JoinConfig, JoinSpec, LayerConfig, LayerSpec, checked};
use crate::kinds::member::member_at;
use crate::kinds::raid::{RAID, RaidConfig, RaidSpec};
use crate::retry::retry_while;
use block::{Device, DeviceError, SharedRole};
use layers::stats::Stats;
use raid::admin::open::Candidate;
use spec::{Role, SpecError};
use std::error::Error;
use std::io;
use std::sync::Arc;

/// Most layers from the top of a device to its leaves. Each is a call inside a call, on a thread's
/// stack.
pub const MAX_DEPTH: usize = 64;

/// Most leaves of a plan. Each may cost file descriptors, on every core.
pub const MAX_DEVICES: usize = 1024;

/// Devices to open: everything that can be checked without opening has been checked.
#[derive(Debug, Default)]
pub struct StackPlan {
    devices: Vec<DevicePlan>,
    /// Leaves added so far.
    leaves: usize,
}

/// One device with its layers.
#[derive(Debug)]
pub struct DevicePlan {
    /// Its name among the devices of the plan.
    pub id: String,
    /// The device below the layers.
    pub base: Base,
    /// The layers above it, the lowest first.
    pub layers: Vec<Arc<dyn LayerConfig>>,
}

/// The base below the lowest layer of a device.
#[derive(Debug)]
pub enum Base {
    /// A leaf.
    Leaf(Box<dyn DeviceConfig>),
    /// Several devices as one.
    Join(Arc<dyn JoinConfig>, Vec<DevicePlan>),
    /// An array over members.
    Array(RaidConfig, Vec<DevicePlan>),
}

/// A device with its layers, open.
pub struct Stack {
    /// Its name among the devices of the plan.
    pub id: String,
    /// The topmost device.
    pub device: Arc<dyn Device>,
    /// The stats layers on the way down.
    pub stats: Vec<Arc<Stats>>,
    /// The arrays on the way down, with the spares that were found for them.
    pub arrays: Vec<Opened>,
    /// The roles of this host for devices below that other hosts serve too.
    pub roles: Vec<Arc<SharedRole>>,
}

/// The objects of a stack, collected from top to bottom.
#[derive(Default)]
struct Inside {
    stats: Vec<Arc<Stats>>,
    arrays: Vec<Opened>,
    roles: Vec<Arc<SharedRole>>,
}

impl StackPlan {
    /// The devices on which nothing else stands, in the order in which they were added.
    pub fn devices(&self) -> &[DevicePlan] {
        &self.devices
    }

    /// As [`StackPlan::devices`], for whoever opens or keeps them.
    pub fn into_devices(self) -> Vec<DevicePlan> {
        self.devices
    }

    /// Adds the device that `text` describes. Without `id=` it is called after its place:
    /// `device0`.
    ///
    /// # Errors
    /// When the text is invalid, the id is taken, or there are [`MAX_DEVICES`].
    pub fn add_device(&mut self, text: &str) -> Result<(), SpecError> {
        let refused = |message| SpecError::refused(Role::Device, text, message);
        if text.split(':').next() == Some(RAID.name) {
            return self.add_array(RaidSpec::parse(text)?).map_err(refused);
        }
        let (config, id) = device::parse(text)?;
        let id = id.unwrap_or_else(|| format!("device{}", self.leaves));
        self.check_is_new(&id).map_err(refused)?;
        if self.leaves == MAX_DEVICES {
            return Err(refused(format!("too many devices: at most {MAX_DEVICES}")));
        }
        self.leaves += 1;
        self.devices.push(DevicePlan { id, base: Base::Leaf(config), layers: Vec::new() });
        Ok(())
    }

    /// Adds an array: members that have been given before are removed from the plan, paths become
    /// leaves.
    fn add_array(&mut self, spec: RaidSpec) -> Result<(), String> {
        let RaidSpec { config, members, id } = spec;
        let paths = members.iter().filter(|member| self.position(member).is_err()).count();
        if self.leaves + paths > MAX_DEVICES {
            return Err(format!("too many devices: at most {MAX_DEVICES}"));
        }
        let given = || self.devices.iter().filter(|device| members.contains(&device.id));
        check_depth(given().map(DevicePlan::depth).max().unwrap_or(0) + 1)?;
        if let Some(device) = given().find(|device| device.any_leaf(&|leaf| leaf.pins_all_memory())) {
            return Err(format!("member {}: {OUT_OF_REACH}", device.id));
        }
        if let Some(device) = given().find(|device| device.any_leaf(&|leaf| leaf.is_standby())) {
            return Err(format!("member {}: standby=on: an array needs its members at once", device.id));
        }
        let id = id.or_else(|| config.name.clone()).unwrap_or_else(|| format!("device{}", self.leaves));
        if !members.contains(&id) {
            self.check_is_new(&id)?;
        }
        self.leaves += paths;
        let take = |member: &String| match self.position(member) {
            Ok(at) => self.devices.remove(at),
            Err(_) => DevicePlan {
                id: member.clone(),
                base: Base::Leaf(member_at(member, config.direct, config.read_only)),
                layers: Vec::new(),
            },
        };
        let mut children: Vec<DevicePlan> = members.iter().map(take).collect();
        if config.read_only {
            children.iter_mut().for_each(DevicePlan::make_read_only);
        }
        self.devices.push(DevicePlan { id, base: Base::Array(config, children), layers: Vec::new() });
        Ok(())
    }

    /// Puts the layer that `text` describes on every device added so far, or on those that it
    /// names.
    ///
    /// # Errors
    /// When the text is invalid, there is no such device, or a device gets more than [`MAX_DEPTH`]
    /// layers.
    pub fn add_layer(&mut self, text: &str) -> Result<(), SpecError> {
        let spec = layer::parse(text)?;
        let refused = |message| SpecError::refused(Role::Layer, text, message);
        if self.devices.is_empty() {
            return Err(refused("no device is given before it".into()));
        }
        match spec {
            LayerSpec::Over(config, None) => {
                self.devices.iter_mut().try_for_each(|device| device.put(config.clone()))
            }
            LayerSpec::Over(config, Some(id)) => {
                self.position(&id).and_then(|at| self.devices[at].put(config))
            }
            LayerSpec::Join(spec) => self.join(spec),
        }
        .map_err(refused)
    }

    /// The place of the device with this id; an error lists those that there are.
    ///
    /// # Errors
    /// When there is none.
    pub fn position(&self, id: &str) -> Result<usize, String> {
        let known = || self.devices.iter().map(|device| device.id.as_str()).collect::<Vec<_>>().join(", ");
        self.devices
            .iter()
            .position(|device| device.id == id)
            .ok_or_else(|| format!("no device {id:?}; there are {}", known()))
    }

    fn check_is_new(&self, id: &str) -> Result<(), String> {
        match self.devices.iter().any(|device| device.id == id) {
            true => Err(format!("device {id:?} exists already")),
            false => Ok(()),
        }
    }

    /// Takes devices out of the plan and adds what they are together.
    fn join(&mut self, spec: JoinSpec) -> Result<(), String> {
        let ids =
            spec.devices.unwrap_or_else(|| self.devices.iter().map(|device| device.id.clone()).collect());
        // All are looked for before any is taken: a plan that refuses a layer is as it was.
        ids.iter().try_for_each(|id| self.position(id).map(drop))?;
        let deepest =
            self.devices.iter().filter(|device| ids.contains(&device.id)).map(DevicePlan::depth).max();
        check_depth(deepest.unwrap_or(0) + 1)?;
        let id = spec.id.unwrap_or_else(|| ids.join("+"));
        if !ids.contains(&id) {
            self.check_is_new(&id)?;
        }
        let take = |id: &String| self.position(id).map(|at| self.devices.remove(at));
        let children = ids.iter().map(take).collect::<Result<_, _>>()?;
        self.devices.push(DevicePlan { id, base: Base::Join(spec.config, children), layers: Vec::new() });
        Ok(())
    }
}

impl DevicePlan {
    /// Opens the device and puts its layers on it. A leaf that is in use is waited for; an array
    /// waits for its members itself, for all of them together.
    ///
    /// # Errors
    /// Errors of drivers and layers.
    pub fn open(&self) -> Result<Stack, DeviceError> {
        retry_while(is_in_use, || {
            let mut inside = Inside::default();
            let device = self.open_inside(&mut inside)?;
            let Inside { stats, arrays, roles } = inside;
            Ok(Stack { id: self.id.clone(), device, stats, arrays, roles })
        })
    }

    /// Whether what `has` asks holds for one of the leaves.
    pub fn any_leaf(&self, has: &dyn Fn(&dyn DeviceConfig) -> bool) -> bool {
        match &self.base {
            Base::Leaf(config) => has(&**config),
            Base::Join(_, children) | Base::Array(_, children) => {
                children.iter().any(|child| child.any_leaf(has))
            }
        }
    }

    /// Calls `look` with what the device stands on, and what that stands on, down to the leaves.
    pub fn visit(&self, look: &mut dyn FnMut(&Base)) {
        look(&self.base);
        match &self.base {
            Base::Leaf(_) => {}
            Base::Join(_, children) | Base::Array(_, children) => {
                children.iter().for_each(|child| child.visit(look));
            }
        }
    }

    /// Whether there is an array on the way down.
    pub fn has_array(&self) -> bool {
        match &self.base {
            Base::Leaf(_) => false,
            Base::Join(_, children) => children.iter().any(DevicePlan::has_array),
            Base::Array(..) => true,
        }
    }

    /// Has every leaf opened for reading only, as far as its kind can.
    pub fn make_read_only(&mut self) {
        match &mut self.base {
            Base::Leaf(config) => config.make_read_only(),
            Base::Join(_, children) => children.iter_mut().for_each(DevicePlan::make_read_only),
            Base::Array(config, children) => {
                config.read_only = true;
                children.iter_mut().for_each(DevicePlan::make_read_only);
            }
        }
    }

    /// Has images keep no restart log where none is asked for: the client ends with this process.
    pub fn drop_restart_logs(&mut self) {
        match &mut self.base {
            Base::Leaf(config) => config.drop_restart_log(),
            Base::Join(_, children) | Base::Array(_, children) => {
                children.iter_mut().for_each(DevicePlan::drop_restart_logs);
            }
        }
    }

    fn open_inside(&self, inside: &mut Inside) -> Result<Arc<dyn Device>, DeviceError> {
        let base: Arc<dyn Device> = match &self.base {
            Base::Leaf(config) => {
                let (device, role) = config.open_with_role()?;
                inside.roles.extend(role);
                device::share_buffers(&**config, &*device)?;
                device
            }
            Base::Join(config, children) => {
                let open = |child: &DevicePlan| child.open_inside(inside).map(checked);
                config.join(children.iter().map(open).collect::<Result<_, _>>()?)?
            }
            Base::Array(config, children) => {
                let is_out_of_reach = |child: &&DevicePlan| child.any_leaf(&device::lacks_buffers);
                if let Some(child) = children.iter().find(is_out_of_reach) {
                    return Err(DeviceError::new(child.id.as_str(), OUT_OF_REACH));
                }
                let mut below = Inside::default();
                let opened = crate::array::open(config, || {
                    below = Inside::default();
                    children.iter().map(|child| child.as_candidate(&mut below)).collect()
                })?;
                inside.stats.append(&mut below.stats);
                inside.arrays.append(&mut below.arrays);
                let array = opened.array.clone();
                inside.arrays.push(opened);
                array
            }
        };
        self.layers.iter().try_fold(base, |device, layer| layer.wrap(checked(device), &mut inside.stats))
    }

    fn as_candidate(&self, inside: &mut Inside) -> Candidate {
        Candidate { name: self.id.clone(), device: self.open_inside(inside), is_named: true }
    }

    /// Layers on the longest way to a leaf.
    fn depth(&self) -> usize {
        let below = match &self.base {
            Base::Leaf(_) => 0,
            Base::Join(_, children) | Base::Array(_, children) => {
                1 + children.iter().map(DevicePlan::depth).max().unwrap_or(0)
            }
        };
        below + self.layers.len()
    }

    fn put(&mut self, layer: Arc<dyn LayerConfig>) -> Result<(), String> {
        check_depth(self.depth() + 1)?;
        self.layers.push(layer);
        Ok(())
    }
}

fn check_depth(depth: usize) -> Result<(), String> {
    if depth > MAX_DEPTH {
        Err(format!("too many layers: at most {MAX_DEPTH} on each other"))
    } else {
        Ok(())
    }
}

/// Whether a device cannot be opened because another process has it: a file's lock, the claim of a
/// block device.
pub fn is_in_use(error: &DeviceError) -> bool {
    let cause = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    cause.is_some_and(|cause| matches!(cause.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(devices: &[&str], layers: &[&str]) -> Result<StackPlan, SpecError> {
        let mut plan = StackPlan::default();
        devices.iter().try_for_each(|text| plan.add_device(text))?;
        layers.iter().try_for_each(|text| plan.add_layer(text))?;
        Ok(plan)
    }

    fn refusal(devices: &[&str], layers: &[&str]) -> String {
        plan(devices, layers).expect_err("refused").to_string()
    }

    #[test]
    fn joined_devices_are_one_in_the_order_that_is_asked_for() {
        let devices = ["mem:size=1M,id=a", "mem:size=2M,id=b", "mem:size=4M,id=c"];
        let plan = plan(&devices, &["stats:device=a", "concat:devices=c+a", "stats:device=c+a"]).unwrap();
        let ids: Vec<_> = plan.devices().iter().map(|device| device.id.as_str()).collect();
        assert_eq!(ids, ["b", "c+a"]);
        let joined = plan.devices()[1].open().unwrap();
        assert_eq!((joined.device.limits().capacity, joined.stats.len()), (5 << 20, 2));
        assert_eq!(joined.device.name(), "stats(concat(mem, stats(mem)))");
    }

    #[test]
    fn invalid_layers_are_refused_by_name() {
        let two = ["null:id=a", "null:id=b"];
        assert_eq!(
            refusal(&two, &["concat:devices=a+c"]),
            r#"layer concat:devices=a+c: no device "c"; there are a, b"#
        );
        assert_eq!(
            refusal(&two, &["concat:devices=a+a"]),
            "layer concat:devices=a+a: devices=a+a: expected ids joined by +, each once"
        );
        assert_eq!(
            refusal(&["null:id=a", "null:id=b", "null:id=c"], &["concat:devices=a+b,id=c"]),
            r#"layer concat:devices=a+b,id=c: device "c" exists already"#
        );
        assert_eq!(refusal(&[], &["concat"]), "layer concat: no device is given before it");
    }

    #[test]
    fn an_array_takes_the_devices_it_names_and_opens_the_paths() {
        let devices = ["mem:size=1M,id=a", "null:id=b", "mem:size=1M,id=c", "raid:members=c+/x/y+a,id=r"];
        let plan = plan(&devices, &["stats:device=r"]).unwrap();
        let ids: Vec<_> = plan.devices().iter().map(|device| device.id.as_str()).collect();
        assert_eq!(ids, ["b", "r"]);
        let Base::Array(_, members) = &plan.devices()[1].base else { panic!() };
        let ids: Vec<_> = members.iter().map(|device| device.id.as_str()).collect();
        assert_eq!(ids, ["c", "/x/y", "a"]);
        assert_eq!((plan.devices()[1].depth(), plan.leaves), (2, 4));
    }

    #[test]
    fn members_that_map_memory_need_shared_buffers() {
        let texts = ["virtio-blk-vhost-user:path=/does/not/exist,id=v", "raid:members=v+/b,id=a"];
        let error = plan(&texts, &[]).unwrap().devices()[0].open().err().unwrap().to_string();
        assert!(error.contains(&format!("v: {OUT_OF_REACH}")), "{error}");
    }

    #[test]
    fn an_array_that_makes_no_sense_is_refused() {
        let message = |text| plan(&["null:id=a", text], &[]).unwrap_err().to_string();
        assert_eq!(message("raid"), "device raid: one of members= and scan= is needed");
        assert_eq!(message("raid:scan=/dev"), "device raid:scan=/dev: scan= needs name=NAME");
        assert_eq!(
            message("raid:members=a,scan=/dev,name=x"),
            "device raid:members=a,scan=/dev,name=x: members= and scan= both say what the members are"
        );
        assert_eq!(
            message("raid:members=a+a"),
            "device raid:members=a+a: members=a+a: expected ids or paths joined by +, each once"
        );
        assert_eq!(
            message("raid:members=/b,id=a"),
            r#"device raid:members=/b,id=a: device "a" exists already"#
        );
        let text = "virtio-blk-vfio-pci:path=/sys/bus/pci/devices/0000:01:00.0,id=v";
        let error = plan(&[text, "raid:members=v+/b"], &[]).unwrap_err().to_string();
        assert!(error.contains(&format!("member v: {OUT_OF_REACH}")), "{error}");
        let standby = "rbd:pool=p,image=i,standby=on,id=v";
        let error = plan(&[standby, "raid:members=v+/b"], &[]).unwrap_err().to_string();
        assert!(error.contains("member v: standby=on: an array needs"), "{error}");
    }

    #[test]
    fn depth_and_number_of_devices_have_a_limit() {
        let deepest = plan(&["null"], &["stats"; MAX_DEPTH]).unwrap();
        assert_eq!(deepest.devices()[0].depth(), MAX_DEPTH);
        assert_eq!(
            refusal(&["null"], &["stats"; MAX_DEPTH + 1]),
            "layer stats: too many layers: at most 64 on each other"
        );
        assert_eq!(
            refusal(&["null"], &["concat:id=a"; MAX_DEPTH + 1]),
            "layer concat:id=a: too many layers: at most 64 on each other"
        );
        assert!(plan(&["null"; MAX_DEVICES], &[]).is_ok());
        assert_eq!(refusal(&["null"; MAX_DEVICES + 1], &[]), "device null: too many devices: at most 1024");
    }
}

//! Features of a controller: Get Features and Set Features.
//!
//! Values last until the host disables the controller. No value changes how commands are executed,
//! unless this says so: there is one queue of commands for each connection, no power state, and no
//! sensor.
//!
//! Source: Base Specification 2.0, 5.15 and 5.27; NVM Command Set Specification 1.0, 4.1.3.

use crate::failure::Failure;
use crate::queue::{Queue, Reply};
use crate::reservations::{self, Change};
use crate::transport::{Command, Transport};
use exports::DataMemory;
use nvme::command::feature::{self, HOST_BEHAVIOR_BYTES};
use nvme::reservation::Happening;
use nvme::{Status, SubmissionEntry};
use std::collections::BTreeMap;

/// SEL of Get Features: the default value of a feature, rather than the current one.
const SELECT_DEFAULT: u32 = 1;
/// SV of Set Features.
const SAVE: u32 = 1 << 31;
/// The intervals between reports and between polls of potentially unrecoverable blocks: any. The
/// controller has nothing to report.
const LBA_STATUS_INTERVALS: u32 = 0;
/// Number of the first bit of TMPSEL, which selects a sensor; the composite temperature is 0, and a
/// threshold for all is 15.
const SENSOR: u32 = 16;
const ALL_SENSORS: u32 = 15;
/// Number of the first bit of THSEL, which selects a threshold: 0 for too hot, 1 for too cold.
const THRESHOLD: u32 = 20;
/// DULBE of Error Recovery: reads of deallocated blocks fail.
const DEALLOCATED_BLOCKS_FAIL: u32 = 1 << 16;

/// The values that a host has set, by feature and the part of dword 11 that selects a value.
#[derive(Debug, Default)]
pub(crate) struct Features {
    values: BTreeMap<(u8, u32), u32>,
    /// The first bytes of Host Behavior Support, which the host has set: 0 or 1 each.
    behavior: [u8; feature::HOST_BEHAVIORS],
}

impl Features {
    /// The part of dword 11 that selects one of several values of a feature.
    ///
    /// # Errors
    /// When there is no such value.
    fn selector(id: u8, dword: u32) -> Result<u32, Status> {
        let (sensor, threshold) = (dword >> SENSOR & 15, dword >> THRESHOLD & 3);
        match id {
            feature::TEMPERATURE_THRESHOLD if sensor != 0 || threshold > 1 => Err(Status::INVALID_FIELD),
            feature::TEMPERATURE_THRESHOLD => Ok(threshold),
            _ => Ok(0),
        }
    }

    /// The value before the host sets one; `None` for a feature that is not one of these.
    fn default_of(id: u8, selector: u32) -> Option<u32> {
        match id {
            // Any number of commands at a time from each queue.
            feature::ARBITRATION => Some(7),
            // The highest temperature is never reached.
            feature::TEMPERATURE_THRESHOLD if selector == 0 => Some(0xffff),
            feature::POWER_MANAGEMENT
            | feature::TEMPERATURE_THRESHOLD
            | feature::ERROR_RECOVERY
            | feature::WRITE_ATOMICITY => Some(0),
            _ => None,
        }
    }

    fn get(&self, id: u8, dword: u32, is_default: bool) -> Result<Option<u32>, Status> {
        let selector = Features::selector(id, dword)?;
        let Some(default) = Features::default_of(id, selector) else { return Ok(None) };
        let set = self.values.get(&(id, selector)).filter(|_| !is_default);
        Ok(Some(set.copied().unwrap_or(default)))
    }

    /// Sets a value. Returns `false` for a feature that is not one of these.
    ///
    /// # Errors
    /// When the controller does not support the value.
    fn set(&mut self, id: u8, dword: u32) -> Result<bool, Status> {
        let value = match id {
            // There is one power state.
            feature::POWER_MANAGEMENT if dword & 0x1f != 0 => return Err(Status::INVALID_FIELD),
            feature::ERROR_RECOVERY if dword & DEALLOCATED_BLOCKS_FAIL != 0 => {
                return Err(Status::INVALID_FIELD);
            }
            feature::TEMPERATURE_THRESHOLD => dword & 0xffff,
            feature::WRITE_ATOMICITY => dword & 1,
            _ => dword,
        };
        let is_of_all = id == feature::TEMPERATURE_THRESHOLD && dword >> SENSOR & 15 == ALL_SENSORS;
        let selector = Features::selector(id, if is_of_all { dword & !(15 << SENSOR) } else { dword })?;
        let is_one = Features::default_of(id, selector).is_some();
        if is_one {
            self.values.insert((id, selector), value);
        }
        Ok(is_one)
    }
}

impl Queue {
    pub(crate) async fn get_features<T: Transport>(
        &self,
        entry: &SubmissionEntry,
        transport: &T,
    ) -> Result<Reply<T::Memory>, Failure> {
        let controller = self.controller();
        let id = entry.cdw[0] as u8;
        let is_default = entry.cdw[0] >> 8 & 7 == SELECT_DEFAULT;
        let value = match id {
            feature::KEEP_ALIVE_TIMER => controller.keep_alive_ms(),
            feature::ASYNC_EVENT_CONFIGURATION if is_default => 0,
            feature::ASYNC_EVENT_CONFIGURATION => controller.event_config(),
            _ if controller.is_discovery => return Err(Status::INVALID_FIELD.into()),
            feature::NUMBER_OF_QUEUES => self.queues(),
            feature::VOLATILE_WRITE_CACHE => {
                controller.subsystem.namespaces.iter().any(|n| n.limits.volatile_cache).into()
            }
            feature::LBA_STATUS_INFORMATION => LBA_STATUS_INTERVALS,
            feature::HOST_IDENTIFIER => {
                return self.reply_with_all(entry, &controller.host.id, transport).await;
            }
            feature::HOST_BEHAVIOR_SUPPORT => {
                let mut bytes = [0; HOST_BEHAVIOR_BYTES];
                if !is_default {
                    let behavior = controller.features(|features| features.behavior);
                    bytes[..behavior.len()].copy_from_slice(&behavior);
                }
                return self.reply_with_all(entry, &bytes, transport).await;
            }
            feature::RESERVATION_NOTIFICATION_MASK | feature::RESERVATION_PERSISTENCE
                if controller.subsystem.has_reservations() =>
            {
                let namespace =
                    controller.subsystem.namespace(entry.nsid).ok_or(Status::INVALID_NAMESPACE)?;
                match id {
                    _ if is_default => 0,
                    feature::RESERVATION_PERSISTENCE => namespace.reserved.persists().into(),
                    _ => controller.notification_mask(namespace.id),
                }
            }
            _ => {
                let found = controller.features(|features| features.get(id, entry.cdw[1], is_default))?;
                found.ok_or(Status::INVALID_FIELD)?
            }
        };
        Ok(Reply { result: value.into(), ..Reply::default() })
    }

    pub(crate) async fn set_features<T: Transport>(
        &self,
        command: &mut Command<T::Memory>,
        transport: &T,
    ) -> Result<Reply<T::Memory>, Failure> {
        let (controller, entry) = (self.controller(), command.entry);
        let (id, value) = (entry.cdw[0] as u8, entry.cdw[1]);
        if entry.cdw[0] & SAVE != 0 {
            return Err(Status::FEATURE_NOT_SAVEABLE.into());
        }
        let result = match id {
            feature::KEEP_ALIVE_TIMER => {
                controller.set_keep_alive(value);
                0
            }
            feature::ASYNC_EVENT_CONFIGURATION => {
                controller.set_event_config(value);
                0
            }
            _ if controller.is_discovery => return Err(Status::INVALID_FIELD.into()),
            feature::NUMBER_OF_QUEUES if value as u16 == 0xffff || value >> 16 == 0xffff => {
                return Err(Status::INVALID_FIELD.into());
            }
            feature::NUMBER_OF_QUEUES if controller.has_io_queues() => {
                return Err(Status::COMMAND_SEQUENCE_ERROR.into());
            }
            // The host gets the maximum, for any requested number.
            feature::NUMBER_OF_QUEUES => self.queues().into(),
            // The host gets the only supported value, for any requested one.
            feature::LBA_STATUS_INFORMATION => LBA_STATUS_INTERVALS.into(),
            feature::HOST_BEHAVIOR_SUPPORT => {
                self.set_host_behavior(command, transport).await?;
                0
            }
            feature::RESERVATION_NOTIFICATION_MASK | feature::RESERVATION_PERSISTENCE
                if !controller.subsystem.has_reservations() =>
            {
                return Err(Status::INVALID_FIELD.into());
            }
            feature::RESERVATION_NOTIFICATION_MASK if value & !Happening::MASKS != 0 => {
                return Err(Status::INVALID_FIELD.into());
            }
            feature::RESERVATION_NOTIFICATION_MASK => {
                let meant = self.meant(entry.nsid)?;
                meant.for_each(|nsid| controller.set_notification_mask(nsid, value));
                0
            }
            feature::RESERVATION_PERSISTENCE => {
                for nsid in self.meant(entry.nsid)? {
                    let change = Change::Persist(value & 1 != 0);
                    reservations::change(controller, nsid, change).await?;
                }
                0
            }
            feature::VOLATILE_WRITE_CACHE | feature::HOST_IDENTIFIER => {
                return Err(Status::FEATURE_NOT_CHANGEABLE.into());
            }
            _ if controller.features(|features| features.set(id, value))? => 0,
            _ => return Err(Status::INVALID_FIELD.into()),
        };
        Ok(Reply { result, ..Reply::default() })
    }

    /// Keeps what the host supports. The controller reports none of it, and so needs none of it.
    async fn set_host_behavior<T: Transport>(
        &self,
        command: &mut Command<T::Memory>,
        transport: &T,
    ) -> Result<(), Failure> {
        let mut incoming = self.incoming(command, HOST_BEHAVIOR_BYTES, transport).await?;
        let mut behavior = [0; feature::HOST_BEHAVIORS];
        incoming.copy_to(&mut behavior);
        drop(incoming);
        if behavior.iter().any(|supported| *supported > 1) {
            return Err(Status::INVALID_FIELD.into());
        }
        self.controller().features(|features| features.behavior = behavior);
        Ok(())
    }

    /// The maximum number of I/O queues as the feature encodes it: submission and completion
    /// queues, 0-based.
    fn queues(&self) -> u32 {
        let count = u32::from(self.controller().subsystem.max_queues) - 1;
        count | count << 16
    }
}

//! The state machine of registrations and reservations, without side effects. A refused command
//! changes nothing.
//!
//! Source: Base Specification 2.0, 8.19 and 7.2 to 7.5.

use crate::host::Host;
use nvme::Status;
use nvme::reservation::{
    Acquire, AcquireAction, Happening, Register, RegisterAction, Release, ReleaseAction, ReservationType,
};
use std::collections::BTreeMap;

/// Maximum registrants of a namespace.
pub(super) const MAX_REGISTRANTS: usize = 1024;

/// A host's access to a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
    pub(crate) read: bool,
    pub(crate) write: bool,
}

impl Rights {
    /// The rights when nothing is reserved.
    pub(crate) const ALL: Rights = Rights { read: true, write: true };
}

/// A reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) kind: ReservationType,
    /// The holder; if all registrants hold it, the host that acquired it.
    pub(super) holder: Host,
}

/// A reservation command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Register(Register),
    Acquire(Acquire),
    Release(Release),
    /// The Reservation Persistence feature.
    Persist(bool),
}

/// Notifications, with their hosts.
pub(super) type News = Vec<(Host, Happening)>;

/// The registrations and the reservation of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reservations {
    /// Counts changes of registrations.
    pub(super) generation: u32,
    /// Registered hosts and their keys.
    pub(super) keys: BTreeMap<Host, u64>,
    pub(super) held: Option<Held>,
    /// Whether the state persists through power loss.
    pub(super) persists: bool,
}

impl Reservations {
    /// The rights of a host (Base 8.19, figure "Command Behavior in the Presence of a
    /// Reservation").
    pub(super) fn rights(&self, host: &Host) -> Rights {
        let Some(Held { kind, .. }) = self.held else { return Rights::ALL };
        let is_registrant = kind.admits_registrants() && self.keys.contains_key(host);
        match is_registrant || self.is_holder(host) {
            true => Rights::ALL,
            false => Rights { read: !kind.excludes_readers(), write: false },
        }
    }

    /// Whether a host holds the reservation.
    pub(super) fn is_holder(&self, host: &Host) -> bool {
        self.held.as_ref().is_some_and(|held| match held.kind.is_held_by_all() {
            true => self.keys.contains_key(host),
            false => held.holder == *host,
        })
    }

    /// Applies a command of `host`. Returns the notifications to send.
    ///
    /// # Errors
    /// The status of the command; nothing has changed.
    pub(super) fn apply(&mut self, host: &Host, change: &Change) -> Result<News, Status> {
        match change {
            Change::Register(register) => self.register(host, register),
            Change::Acquire(acquire) => self.acquire(host, acquire),
            Change::Release(release) => self.release(host, release),
            Change::Persist(persists) => {
                self.persists = *persists;
                Ok(News::new())
            }
        }
    }

    fn register(&mut self, host: &Host, register: &Register) -> Result<News, Status> {
        let known = self.keys.get(host).copied();
        // With IEKEY a host may replace its own key without proof, and need not be registered
        // before.
        let is_right = register.ignores_key || known == Some(register.current);
        let mut news = News::new();
        match register.action {
            RegisterAction::Register | RegisterAction::Replace if register.new == 0 => {
                return Err(Status::INVALID_FIELD);
            }
            RegisterAction::Register if known.is_some_and(|key| key != register.new) => {
                return Err(Status::RESERVATION_CONFLICT);
            }
            RegisterAction::Unregister if known.is_none() => return Err(Status::RESERVATION_CONFLICT),
            RegisterAction::Unregister | RegisterAction::Replace if !is_right => {
                return Err(Status::RESERVATION_CONFLICT);
            }
            RegisterAction::Register | RegisterAction::Replace => {
                if known.is_none() && self.keys.len() >= MAX_REGISTRANTS {
                    return Err(Status::INTERNAL_ERROR);
                }
                self.keys.insert(host.clone(), register.new);
            }
            RegisterAction::Unregister => self.unregister(host, &mut news),
        }
        self.generation = self.generation.wrapping_add(1);
        self.persists = register.persists.unwrap_or(self.persists);
        Ok(news)
    }

    /// Removes a registration, and the reservation that depends on it. Registrants that relied on
    /// the reservation are notified.
    fn unregister(&mut self, host: &Host, news: &mut News) {
        self.keys.remove(host);
        let Some(Held { kind, holder }) = &self.held else { return };
        let is_over = match kind.is_held_by_all() {
            true => self.keys.is_empty(),
            false => holder == host,
        };
        if is_over {
            let kind = *kind;
            self.give_up(kind, host, news);
        }
    }

    /// Ends the reservation, and notifies the registrants that it admitted.
    fn give_up(&mut self, kind: ReservationType, host: &Host, news: &mut News) {
        self.held = None;
        if kind.admits_registrants() {
            self.tell_others(host, Happening::ReservationReleased, news);
        }
    }

    /// Notifies all registrants but `host`.
    fn tell_others(&self, host: &Host, what: Happening, news: &mut News) {
        let others = self.keys.keys().filter(|other| *other != host);
        news.extend(others.map(|other| (other.clone(), what)));
    }

    /// Checks that the host is registered with this key.
    fn check_key(&self, host: &Host, key: u64) -> Result<(), Status> {
        (self.keys.get(host) == Some(&key)).then_some(()).ok_or(Status::RESERVATION_CONFLICT)
    }

    fn acquire(&mut self, host: &Host, acquire: &Acquire) -> Result<News, Status> {
        self.check_key(host, acquire.current)?;
        match acquire.action {
            AcquireAction::Acquire => {
                match &self.held {
                    None => self.hold(acquire.kind, host),
                    Some(held) if held.kind == acquire.kind && self.is_holder(host) => {}
                    Some(_) => return Err(Status::RESERVATION_CONFLICT),
                }
                Ok(News::new())
            }
            AcquireAction::Preempt | AcquireAction::PreemptAndAbort => {
                let news = self.preempt(host, acquire)?;
                self.generation = self.generation.wrapping_add(1);
                Ok(news)
            }
        }
    }

    fn hold(&mut self, kind: ReservationType, host: &Host) {
        self.held = Some(Held { kind, holder: host.clone() });
    }

    /// Base 8.19.7.
    fn preempt(&mut self, host: &Host, acquire: &Acquire) -> Result<News, Status> {
        let key = acquire.preempted;
        let Some(Held { kind, holder }) = self.held.clone() else {
            return self.expel(host, key);
        };
        let mut news = News::new();
        if kind.is_held_by_all() {
            if key != 0 {
                return self.expel(host, key);
            }
            self.hold(acquire.kind, host);
            self.expel_others(host, |_| true, &mut news);
        } else if self.keys.get(&holder) == Some(&key) {
            // A holder may preempt itself to change the type.
            self.hold(acquire.kind, host);
            self.expel_others(host, |other| other == key, &mut news);
        } else if key != 0 {
            return self.expel(host, key);
        } else {
            return Err(Status::INVALID_FIELD);
        }
        if kind != acquire.kind {
            self.tell_others(host, Happening::ReservationReleased, &mut news);
        }
        Ok(news)
    }

    /// Removes every registration with a key.
    fn expel(&mut self, by: &Host, key: u64) -> Result<News, Status> {
        let mut news = News::new();
        if !self.keys.values().any(|known| *known == key) {
            return Err(Status::RESERVATION_CONFLICT);
        }
        self.expel_others(by, |other| other == key, &mut news);
        if self.keys.get(by) == Some(&key) {
            self.unregister(by, &mut news);
        }
        Ok(news)
    }

    /// Removes other hosts' registrations with matching keys, and notifies them.
    fn expel_others(&mut self, by: &Host, is_meant: impl Fn(u64) -> bool, news: &mut News) {
        let meant = self.keys.iter().filter(|(host, key)| *host != by && is_meant(**key));
        for host in meant.map(|(host, _)| host.clone()).collect::<Vec<_>>() {
            news.push((host.clone(), Happening::RegistrationPreempted));
            self.unregister(&host, news);
        }
    }

    fn release(&mut self, host: &Host, release: &Release) -> Result<News, Status> {
        self.check_key(host, release.current)?;
        let mut news = News::new();
        match release.action {
            ReleaseAction::Release(kind) => {
                // A host that does not hold the reservation releases nothing, which is not an
                // error.
                if self.is_holder(host) {
                    if self.held.as_ref().is_some_and(|held| held.kind != kind) {
                        return Err(Status::INVALID_FIELD);
                    }
                    self.give_up(kind, host, &mut news);
                }
            }
            ReleaseAction::Clear => {
                self.tell_others(host, Happening::ReservationPreempted, &mut news);
                self.keys.clear();
                self.held = None;
                self.generation = self.generation.wrapping_add(1);
            }
        }
        Ok(news)
    }
}

#[cfg(test)]
mod tests;

//! The rules, one by one and under any sequence of commands.

use super::*;
use nvme::fabrics::Nqn;
use nvme::reservation::ReservationType::*;
use proptest::prelude::*;

const HOSTS: usize = 3;

fn host(number: usize) -> Host {
    Host { nqn: Nqn::new(&format!("nqn.2014-08.org.example:host{number}")).unwrap(), id: [number as u8; 16] }
}

fn register(action: RegisterAction, current: u64, new: u64) -> Change {
    Change::Register(Register { action, ignores_key: false, persists: None, current, new })
}

fn acquire(kind: ReservationType, current: u64) -> Change {
    Change::Acquire(Acquire { action: AcquireAction::Acquire, kind, current, preempted: 0 })
}

fn preempt(kind: ReservationType, current: u64, preempted: u64) -> Change {
    Change::Acquire(Acquire { action: AcquireAction::Preempt, kind, current, preempted })
}

fn release(kind: ReservationType, current: u64) -> Change {
    Change::Release(Release { action: ReleaseAction::Release(kind), current })
}

/// Hosts 0, 1 and so on, registered with keys 10, 11 and so on.
fn registered(hosts: usize) -> Reservations {
    let mut state = Reservations::default();
    for number in 0..hosts {
        let change = register(RegisterAction::Register, 0, 10 + number as u64);
        assert_eq!(state.apply(&host(number), &change), Ok(vec![]));
    }
    state
}

/// Host 0 has acquired a reservation.
fn held(kind: ReservationType, hosts: usize) -> Reservations {
    let mut state = registered(hosts);
    assert_eq!(state.apply(&host(0), &acquire(kind, 10)), Ok(vec![]));
    state
}

#[test]
fn each_type_gives_holder_registrants_and_others_what_the_specification_has() {
    let rights = |read, write| Rights { read, write };
    let (all, read, none) = (Rights::ALL, rights(true, false), rights(false, false));
    for (kind, registrant, stranger) in [
        (WriteExclusive, read, read),
        (ExclusiveAccess, none, none),
        (WriteExclusiveRegistrantsOnly, all, read),
        (ExclusiveAccessRegistrantsOnly, all, none),
        (WriteExclusiveAllRegistrants, all, read),
        (ExclusiveAccessAllRegistrants, all, none),
    ] {
        let state = held(kind, 2);
        let found = [0, 1, 2].map(|number| state.rights(&host(number)));
        assert_eq!(found, [all, registrant, stranger], "{kind:?}");
        assert_eq!(state.is_holder(&host(1)), kind.is_held_by_all());
        assert_eq!(registered(1).rights(&host(2)), all, "registrations alone exclude no host");
    }
}

#[test]
fn keys_are_asked_for() {
    let mut state = registered(2);
    let conflict = Err(Status::RESERVATION_CONFLICT);
    let (one, stranger) = (host(1), host(2));
    assert_eq!(state.apply(&one, &register(RegisterAction::Register, 0, 12)), conflict, "another key");
    assert_eq!(state.apply(&one, &register(RegisterAction::Register, 0, 11)), Ok(vec![]));
    assert_eq!(state.apply(&stranger, &register(RegisterAction::Register, 0, 0)), Err(Status::INVALID_FIELD));
    assert_eq!(state.apply(&one, &register(RegisterAction::Replace, 12, 13)), conflict);
    assert_eq!(state.apply(&one, &register(RegisterAction::Replace, 11, 13)), Ok(vec![]));
    assert_eq!(state.apply(&one, &register(RegisterAction::Unregister, 11, 0)), conflict);
    assert_eq!(state.apply(&one, &acquire(WriteExclusive, 11)), conflict);
    assert_eq!(state.apply(&stranger, &acquire(WriteExclusive, 10)), conflict);
    assert_eq!(state.apply(&stranger, &register(RegisterAction::Unregister, 0, 0)), conflict);
    let ignoring = |action| Register { action, ignores_key: true, persists: Some(true), current: 0, new: 14 };
    let replace = Change::Register(ignoring(RegisterAction::Replace));
    assert_eq!(state.apply(&stranger, &replace), Ok(vec![]), "whatever it had, if only nothing");
    assert!(state.persists);
    assert_eq!(state.apply(&stranger, &Change::Register(ignoring(RegisterAction::Unregister))), Ok(vec![]));
    assert_eq!((state.generation, state.keys.len()), (6, 2));
}

#[test]
fn a_reservation_is_taken_once_and_given_up_by_its_holder() {
    let mut state = held(WriteExclusive, 2);
    let generation = state.generation;
    let conflict = Err(Status::RESERVATION_CONFLICT);
    assert_eq!(state.apply(&host(0), &acquire(WriteExclusive, 10)), Ok(vec![]), "it has it");
    assert_eq!(state.apply(&host(0), &acquire(ExclusiveAccess, 10)), conflict);
    assert_eq!(state.apply(&host(1), &acquire(WriteExclusive, 11)), conflict);
    assert_eq!(state.apply(&host(1), &release(WriteExclusive, 11)), Ok(vec![]), "it has none");
    assert_eq!(state.apply(&host(0), &release(ExclusiveAccess, 10)), Err(Status::INVALID_FIELD));
    assert!(state.held.is_some());
    assert_eq!(state.apply(&host(0), &release(WriteExclusive, 10)), Ok(vec![]), "no registrant relied on it");
    assert_eq!((state.held.clone(), state.generation), (None, generation));
    state.apply(&host(1), &acquire(ExclusiveAccessRegistrantsOnly, 11)).unwrap();
    let news = state.apply(&host(1), &release(ExclusiveAccessRegistrantsOnly, 11)).unwrap();
    assert_eq!(news, [(host(0), Happening::ReservationReleased)]);
    let clear = Change::Release(Release { action: ReleaseAction::Clear, current: 10 });
    let news = state.apply(&host(0), &clear).unwrap();
    assert_eq!(news, [(host(1), Happening::ReservationPreempted)]);
    assert!(state.keys.is_empty() && state.generation == generation + 1);
}

#[test]
fn an_unregistering_holder_ends_the_reservation() {
    let unregister = |number: u64| register(RegisterAction::Unregister, 10 + number, 0);
    for kind in ReservationType::ALL {
        let mut state = held(kind, 2);
        let news = state.apply(&host(0), &unregister(0)).unwrap();
        let is_told = kind.admits_registrants() && !kind.is_held_by_all();
        assert_eq!(news.len(), usize::from(is_told), "{kind:?}");
        assert_eq!(state.held.is_some(), kind.is_held_by_all());
        assert_eq!(state.apply(&host(1), &unregister(1)), Ok(vec![]));
        assert_eq!(state.held, None);
    }
}

#[test]
fn a_preempted_host_is_unregistered_and_notified() {
    let gone = |number| (host(number), Happening::RegistrationPreempted);
    let mut state = held(WriteExclusive, 3);
    let news = state.apply(&host(1), &preempt(WriteExclusiveRegistrantsOnly, 11, 10)).unwrap();
    assert_eq!(news, [gone(0), (host(2), Happening::ReservationReleased)]);
    assert_eq!([0, 1, 2].map(|number| state.rights(&host(number)).write), [false, true, true]);
    // Registrants that do not hold the reservation.
    assert_eq!(state.apply(&host(1), &preempt(WriteExclusive, 11, 12)), Ok(vec![gone(2)]));
    assert_eq!(state.held.as_ref().unwrap().kind, WriteExclusiveRegistrantsOnly, "as it was");
    assert_eq!(state.apply(&host(1), &preempt(WriteExclusive, 11, 12)), Err(Status::RESERVATION_CONFLICT));
    assert_eq!(state.apply(&host(1), &preempt(WriteExclusive, 11, 0)), Err(Status::INVALID_FIELD));
    // The host itself.
    assert_eq!(state.apply(&host(1), &preempt(ExclusiveAccess, 11, 11)), Ok(vec![]));
    assert_eq!(state.held.as_ref().unwrap().kind, ExclusiveAccess);
    // All registrants hold it together.
    let mut state = held(WriteExclusiveAllRegistrants, 3);
    let news = state.apply(&host(2), &preempt(WriteExclusive, 12, 0)).unwrap();
    assert_eq!(news, [gone(0), gone(1)]);
    assert_eq!(state.held.as_ref().unwrap().holder, host(2));
    // Without a reservation only registrations are removed.
    let mut state = registered(2);
    assert_eq!(state.apply(&host(0), &preempt(WriteExclusive, 10, 11)), Ok(vec![gone(1)]));
    assert_eq!((&state.held, state.generation), (&None, 3));
}

#[test]
fn there_is_room_for_so_many_and_no_more() {
    let mut state = registered(MAX_REGISTRANTS);
    let change = register(RegisterAction::Register, 0, 1);
    assert_eq!(state.apply(&host(MAX_REGISTRANTS), &change), Err(Status::INTERNAL_ERROR));
    assert_eq!(state.apply(&host(0), &register(RegisterAction::Replace, 10, 1)), Ok(vec![]));
}

fn change() -> impl Strategy<Value = Change> {
    let (key, kind) = (0..4u64, (1..7u8).prop_map(|number| ReservationType::parse(number).unwrap()));
    let register =
        (0..3u32, any::<bool>(), key.clone(), key.clone()).prop_map(|(action, ignores_key, current, new)| {
            let action = [RegisterAction::Register, RegisterAction::Unregister, RegisterAction::Replace]
                [action as usize];
            Change::Register(Register { action, ignores_key, persists: None, current, new })
        });
    let acquire =
        (0..3usize, kind.clone(), key.clone(), key.clone()).prop_map(|(action, kind, current, preempted)| {
            let actions = [AcquireAction::Acquire, AcquireAction::Preempt, AcquireAction::PreemptAndAbort];
            Change::Acquire(Acquire { action: actions[action], kind, current, preempted })
        });
    let release = (any::<bool>(), kind, key).prop_map(|(clears, kind, current)| {
        let action = if clears { ReleaseAction::Clear } else { ReleaseAction::Release(kind) };
        Change::Release(Release { action, current })
    });
    prop_oneof![4 => register, 4 => acquire, 1 => release]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn whatever_is_asked_for_in_whatever_order(changes in prop::collection::vec((0..HOSTS, change()), 1..40)) {
        let mut state = Reservations::default();
        for (number, change) in changes {
            let (by, before) = (host(number), state.clone());
            let result = state.apply(&by, &change);
            // The holder of a reservation is registered.
            if let Some(held) = &state.held {
                let is_held = if held.kind.is_held_by_all() { !state.keys.is_empty() } else { state.keys.contains_key(&held.holder) };
                prop_assert!(is_held);
            }
            prop_assert!(state.keys.values().all(|key| *key != 0));
            let Ok(news) = result else {
                prop_assert_eq!(&state, &before, "refused, and yet something has changed");
                continue;
            };
            // A host that is not registered can only register.
            prop_assert!(before.keys.contains_key(&by) || matches!(change, Change::Register(_)));
            // Every change of registrations changes the count, and a host whose registration
            // another removes is notified.
            prop_assert!(before.keys == state.keys || before.generation != state.generation);
            for gone in before.keys.keys().filter(|host| !state.keys.contains_key(host) && **host != by) {
                let is_told = |(host, what): &(Host, Happening)| host == gone && *what != Happening::ReservationReleased;
                prop_assert!(news.iter().any(is_told));
            }
            // The host that sent the command gets only its completion.
            prop_assert!(news.iter().all(|(host, _)| *host != by));
            // A host loses write access only through a reservation.
            let is_kept_off = |state: &Reservations| (0..=HOSTS).any(|number| !state.rights(&host(number)).write);
            prop_assert!(state.held.is_some() || !is_kept_off(&state));
            if let Some(Held { kind: WriteExclusive | ExclusiveAccess, holder }) = &state.held {
                let writers = (0..=HOSTS).filter(|number| state.rights(&host(*number)).write);
                prop_assert_eq!(writers.map(host).collect::<Vec<_>>(), vec![holder.clone()]);
            }
        }
    }
}

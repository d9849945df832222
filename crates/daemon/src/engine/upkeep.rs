//! Upkeep: the daemon opens the missing objects of its state as they appear, and reports the events
//! of arrays.

use super::Engine;
use super::bases::Base;
use super::health::members_out;
use crate::api_error::ApiError;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Between two looks at what happens to arrays.
const LOOK: Duration = Duration::from_millis(250);
/// Between two tries to bring about what is missing; longer where a try takes long, since nothing
/// else can be changed meanwhile.
const RETRY: Duration = Duration::from_secs(2);
/// So many times as long as a try takes it takes until the next one.
const RETRY_FACTOR: u32 = 10;

/// Starts the thread that looks after the engine for as long as it lives.
///
/// # Errors
/// When the system refuses a thread.
pub fn start(engine: &Arc<Engine>) -> io::Result<()> {
    let engine = Arc::downgrade(engine);
    reactor::spawn_thread("upkeep", move || look_after(&engine))?;
    Ok(())
}

fn look_after(engine: &Weak<Engine>) {
    let mut seen = Seen::default();
    let mut next_try = Instant::now() + RETRY;
    loop {
        std::thread::sleep(LOOK);
        let Some(engine) = engine.upgrade() else { return };
        if engine.has_ended.load(Ordering::SeqCst) {
            return;
        }
        engine.tell(&mut seen);
        if engine.wants_refresh.load(Ordering::SeqCst) {
            let _alone = engine.change();
            engine.wants_refresh.store(false, Ordering::SeqCst);
            engine.refresh();
        }
        let began = Instant::now();
        if began >= next_try {
            engine.bring_about();
            engine.health(); // notes when problems begin
            next_try = Instant::now() + RETRY.max(began.elapsed() * RETRY_FACTOR);
        }
    }
}

/// The last report of each array: its state, and the time of its last event.
#[derive(Default)]
struct Seen(BTreeMap<String, (&'static str, u64)>);

impl Engine {
    /// Opens and starts what the state says and is not there.
    pub(super) fn bring_about(&self) {
        let _alone = self.change();
        if self.has_ended() {
            return;
        }
        let state = self.live().state.clone();
        for record in &state.devices {
            if self.is_missing(&record.name) {
                let opened = self.open_device(record);
                self.note_base(&record.name, "device", opened);
            }
        }
        let may_be_degraded = self.is_member_timeout_over();
        for record in &state.arrays {
            if self.is_missing(&record.name) {
                match self.run_array(record, may_be_degraded) {
                    Ok(()) => self.events.emit("array", &record.name, "started", "it runs"),
                    Err(error) => self.note_base(&record.name, "array", Err(error)),
                }
            }
        }
        self.go_on_with_moves();
        self.go_on_with_copies();
        self.go_on_with_streams();
        self.go_on_with_commits();
        self.open_portals();
        // Pivots may have changed their targets.
        let exports = self.live().state.exports.clone();
        for record in &exports {
            if matches!(self.live().exports.get(&record.name), Some(Ok(_))) {
                continue;
            }
            let started = self.start_export(record);
            let emit = |what: &str, text: String| {
                self.events.emit_labelled("export", &record.name, &record.labels, what, text);
            };
            match &started {
                Ok(_) => emit("started", "clients may connect".into()),
                Err(error) if self.is_news_of_export(&record.name, error) => {
                    emit("waiting", error.to_string());
                }
                Err(_) => {}
            }
            self.live_mut().exports.insert(record.name.clone(), started);
        }
        self.accept_at_portals();
    }

    fn is_missing(&self, base: &str) -> bool {
        !matches!(self.live().bases.get(base), Some(Ok(_)))
    }

    fn is_member_timeout_over(&self) -> bool {
        let waited = stack::array::wall_ns().saturating_sub(self.started_ns);
        u128::from(waited) >= self.options.member_timeout.as_nanos()
    }

    fn note_base(&self, name: &str, kind: &str, opened: Result<Base, ApiError>) {
        let mut live = self.live_mut();
        let is_news = match (&opened, live.bases.get(name)) {
            (Ok(_), _) | (Err(_), None) => true,
            (Err(error), Some(before)) => before.as_ref().err() != Some(error),
        };
        match &opened {
            Ok(_) => self.events.emit(kind, name, "opened", "available"),
            Err(error) if is_news => self.events.emit(kind, name, "missing", error.to_string()),
            Err(_) => {}
        }
        live.bases.insert(name.into(), opened);
    }

    fn is_news_of_export(&self, name: &str, error: &ApiError) -> bool {
        !matches!(self.live().exports.get(name), Some(Err(before)) if before == error)
    }

    /// Says what has happened to arrays since the last look.
    fn tell(&self, seen: &mut Seen) {
        let live = self.live();
        for (name, array) in &live.arrays {
            let (report, status) = (array.report(), array.status());
            let state = report.state.name();
            let is_new = !seen.0.contains_key(name);
            let (last_state, last_ns) = seen.0.entry(name.clone()).or_insert(("optimal", 0));
            if *last_state != state {
                let text = members_out(&report).unwrap_or_else(|| "every member is in sync".into());
                self.events.emit("array", name, state, text);
                *last_state = state;
            }
            for event in status.events.iter().filter(|event| event.at_ns > *last_ns && !is_new) {
                self.events.emit("array", name, event.what, &*event.text);
            }
            *last_ns = status.events.last().map_or(*last_ns, |event| event.at_ns);
        }
        seen.0.retain(|name, _| live.arrays.contains_key(name));
    }
}

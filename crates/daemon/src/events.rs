//! The last events, and the channels of clients that listen to new ones.

use api::{Event, Labels};
use stack::array::wall_ns;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use tokio::sync::broadcast;

/// Events that are remembered, and that a listener may be behind.
const REMEMBERED: usize = 1024;

/// The events since the daemon was started.
#[derive(Debug)]
pub struct Events {
    past: Mutex<VecDeque<Event>>,
    sender: broadcast::Sender<Event>,
}

impl Default for Events {
    fn default() -> Events {
        Events { past: Mutex::default(), sender: broadcast::channel(REMEMBERED).0 }
    }
}

impl Events {
    /// Something has happened to the `kind` of thing called `name`: `what`, in a word, and in a
    /// sentence.
    pub fn emit(&self, kind: &str, name: &str, what: &str, text: impl Into<String>) {
        self.emit_labelled(kind, name, &Labels::new(), what, text);
    }

    /// As [`Events::emit`], of something with labels.
    pub fn emit_labelled(
        &self,
        kind: &str,
        name: &str,
        labels: &Labels,
        what: &str,
        text: impl Into<String>,
    ) {
        let text = text.into();
        tracing::info!(target: "events", kind, name, what, "{text}");
        let mut past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        let id = past.back().map_or(0, |event| event.id) + 1;
        let (at_ns, labels) = (wall_ns(), labels.clone());
        let event =
            Event { id, at_ns, kind: kind.into(), name: name.into(), what: what.into(), text, labels };
        if past.len() == REMEMBERED {
            past.pop_front();
        }
        past.push_back(event.clone());
        // Within the lock, so that listeners see them in order. There may be no listener.
        let _ = self.sender.send(event);
    }

    /// The events after the one with this id, and whatever comes next.
    pub fn listen(&self, after: u64) -> (Vec<Event>, broadcast::Receiver<Event>) {
        let past = self.past.lock().unwrap_or_else(PoisonError::into_inner);
        let missed = past.iter().filter(|event| event.id > after).cloned().collect();
        (missed, self.sender.subscribe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_gets_what_it_has_missed_and_what_comes_then() {
        let events = Events::default();
        for number in 0..REMEMBERED + 5 {
            events.emit("volume", "v", "changed", number.to_string());
        }
        assert_eq!(events.listen(0).0.len(), REMEMBERED);
        let (missed, mut next) = events.listen(REMEMBERED as u64 + 3);
        let ids: Vec<u64> = missed.iter().map(|event| event.id).collect();
        assert_eq!(ids, [REMEMBERED as u64 + 4, REMEMBERED as u64 + 5]);
        events.emit("array", "a", "degraded", "slot 1 failed");
        assert_eq!(next.try_recv().unwrap().text, "slot 1 failed");
    }
}

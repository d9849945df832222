//! Where the memory of a queue's requests lives until they have ended and their users have fetched
//! it.
//!
//! ```text
//!   insert ─► in flight ─► end ─► ended ─► claim / next_listed ─► free
//!                 └─ abandon ────► end ─► free
//! ```

use super::request::Memory;
use crate::{Error, Result, raw};
use block::Segment;
use std::collections::VecDeque;
use std::task::Waker;

/// Names a request until its completion was fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token {
    pub(super) slot: u32,
    generation: u32,
}

impl From<Token> for u64 {
    /// A number that no other request of the queue has at the same time.
    fn from(token: Token) -> u64 {
        u64::from(token.generation) << 32 | u64::from(token.slot)
    }
}

/// Receives the end of a request.
pub(super) enum Owner {
    /// The next caller that asks for completions.
    List,
    /// The holder of the token; woken if it waits.
    Claimant(Option<Waker>),
    /// A scope, and the holder of the token.
    Scope,
    /// No holder is left: the end frees the memory.
    None,
}

enum Stage {
    Free,
    InFlight(Owner),
    Ended { result: Result<()>, is_scoped: bool },
}

struct Slot {
    generation: u32,
    stage: Stage,
    memory: Memory,
    /// The list that a raw queue reads during a vectored request; kept for the next one.
    segments: Vec<Segment>,
}

/// The requests of a queue.
#[derive(Default)]
pub(super) struct Slots {
    all: Vec<Slot>,
    free: Vec<u32>,
    /// Ended requests of [`Owner::List`].
    listed: VecDeque<u32>,
    in_flight: usize,
    listed_in_flight: usize,
}

// SAFETY: the segments describe memory of requests, which is bound to no thread.
unsafe impl Send for Slots {}

impl Slots {
    /// Keeps memory for a request that is about to start.
    pub fn insert(&mut self, memory: Memory, owner: Owner) -> Token {
        self.in_flight += 1;
        self.listed_in_flight += usize::from(matches!(owner, Owner::List));
        let slot = self.free.pop().unwrap_or_else(|| {
            self.all.push(Slot {
                generation: 0,
                stage: Stage::Free,
                memory: Memory::None,
                segments: Vec::new(),
            });
            u32::try_from(self.all.len() - 1).expect("memory ends before numbers of requests do")
        });
        let place = &mut self.all[slot as usize];
        place.stage = Stage::InFlight(owner);
        place.memory = memory;
        Token { slot, generation: place.generation }
    }

    /// The memory of a read or write as a raw queue takes it. It stays where it is until
    /// [`Slots::end`].
    pub fn transfer_memory(&mut self, token: Token) -> raw::Memory {
        let place = &mut self.all[token.slot as usize];
        match &place.memory {
            Memory::One(buffer) => raw::Memory::One(buffer.segment()),
            Memory::Many(buffers) => {
                place.segments.clear();
                place.segments.extend(buffers.iter().map(super::Buffer::segment));
                raw::Memory::List(place.segments.as_ptr(), place.segments.len())
            }
            Memory::None | Memory::Zones(_) => raw::Memory::None,
        }
    }

    /// As [`Slots::transfer_memory`], of a request that borrows its memory.
    pub fn borrowed_memory(
        &mut self,
        token: Token,
        segments: impl IntoIterator<Item = Segment>,
    ) -> raw::Memory {
        let list = &mut self.all[token.slot as usize].segments;
        list.clear();
        list.extend(segments);
        raw::Memory::List(list.as_ptr(), list.len())
    }

    /// Where a report of zones goes, and how many have room. It stays there until [`Slots::end`].
    pub fn zone_memory(&mut self, token: Token) -> (*mut crate::Zone, u32) {
        match &mut self.all[token.slot as usize].memory {
            Memory::Zones(zones) => (zones.as_mut_ptr(), zones.len() as u32),
            _ => (std::ptr::null_mut(), 0),
        }
    }

    /// Notes the end of a request: the number of zones reported, or an error. Returns who is to be
    /// woken.
    pub fn end(&mut self, slot: u32, result: Result<u32>) -> Option<Waker> {
        let place = &mut self.all[slot as usize];
        let Stage::InFlight(owner) = std::mem::replace(&mut place.stage, Stage::Free) else {
            panic!("the request in slot {slot} ended twice");
        };
        self.in_flight -= 1;
        if let (Memory::Zones(zones), Ok(count)) = (&mut place.memory, &result) {
            zones.truncate(*count as usize);
        }
        let is_scoped = matches!(owner, Owner::Scope);
        place.stage = Stage::Ended { result: result.map(drop), is_scoped };
        match owner {
            Owner::List => {
                self.listed_in_flight -= 1;
                self.listed.push_back(slot);
                None
            }
            Owner::Claimant(waker) => waker,
            Owner::Scope => None,
            Owner::None => {
                drop(self.release(slot));
                None
            }
        }
    }

    /// Ends everything in flight with `error`, which no device can do any more. Returns who is to
    /// be woken.
    pub fn end_all(&mut self, error: &Error) -> Vec<Waker> {
        let in_flight = |slot: &u32| matches!(self.all[*slot as usize].stage, Stage::InFlight(_));
        let slots: Vec<u32> = (0..self.all.len() as u32).filter(in_flight).collect();
        slots.into_iter().filter_map(|slot| self.end(slot, Err(error.clone()))).collect()
    }

    /// The result and memory of a request that has ended, whose token is used up.
    pub fn claim(&mut self, token: Token) -> Option<(Result<()>, Memory)> {
        let place = self.all.get_mut(token.slot as usize)?;
        if place.generation != token.generation || !matches!(place.stage, Stage::Ended { .. }) {
            return None;
        }
        Some(self.release(token.slot))
    }

    /// Whether the request is still in flight; then its end wakes `waker`.
    pub fn wake_at_end(&mut self, token: Token, waker: &Waker) -> bool {
        match self.all.get_mut(token.slot as usize) {
            Some(Slot { generation, stage: Stage::InFlight(Owner::Claimant(place)), .. })
                if *generation == token.generation =>
            {
                match place {
                    Some(known) => known.clone_from(waker),
                    None => *place = Some(waker.clone()),
                }
                true
            }
            _ => false,
        }
    }

    /// The user of the token has gone. Memory of a request in flight stays until its end.
    pub fn abandon(&mut self, token: Token) -> Option<Memory> {
        if let Some((_, memory)) = self.claim(token) {
            return Some(memory);
        }
        if let Some(place) = self.all.get_mut(token.slot as usize)
            && place.generation == token.generation
            && let Stage::InFlight(owner @ Owner::Claimant(_)) = &mut place.stage
        {
            *owner = Owner::None;
        }
        None
    }

    /// The next ended request of [`Owner::List`].
    pub fn next_listed(&mut self) -> Option<(Token, Result<()>, Memory)> {
        let slot = self.listed.pop_front()?;
        let token = Token { slot, generation: self.all[slot as usize].generation };
        let (result, memory) = self.release(slot);
        Some((token, result, memory))
    }

    /// Gives the slots of a scope back, all of whose requests have ended; the first error among
    /// them.
    pub fn end_scope(&mut self) -> Result<()> {
        let mut first = Ok(());
        for slot in 0..self.all.len() as u32 {
            if matches!(self.all[slot as usize].stage, Stage::Ended { is_scoped: true, .. }) {
                let (result, _) = self.release(slot);
                first = first.and(result);
            }
        }
        first
    }

    /// Whether a request of a scope is in flight.
    pub fn has_scoped(&self) -> bool {
        self.in_flight > 0 && self.all.iter().any(|slot| matches!(slot.stage, Stage::InFlight(Owner::Scope)))
    }

    /// Whether the token's request has ended.
    pub fn has_ended(&self, token: Token) -> bool {
        let place = &self.all[token.slot as usize];
        place.generation != token.generation || matches!(place.stage, Stage::Ended { .. })
    }

    /// How many requests have not ended.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// How many requests of [`Owner::List`] have not ended.
    pub fn listed_in_flight(&self) -> usize {
        self.listed_in_flight
    }

    /// How many requests of [`Owner::List`] have ended.
    pub fn listed(&self) -> usize {
        self.listed.len()
    }

    fn release(&mut self, slot: u32) -> (Result<()>, Memory) {
        let place = &mut self.all[slot as usize];
        place.generation = place.generation.wrapping_add(1);
        self.free.push(slot);
        match std::mem::replace(&mut place.stage, Stage::Free) {
            Stage::Ended { result, .. } => (result, std::mem::take(&mut place.memory)),
            _ => panic!("slot {slot} is released before its request has ended"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_good_for_one_request() {
        let mut slots = Slots::default();
        let first = slots.insert(Memory::None, Owner::Claimant(None));
        assert!(slots.claim(first).is_none());
        slots.end(first.slot, Ok(0));
        assert!(slots.claim(first).is_some());
        let second = slots.insert(Memory::None, Owner::Claimant(None));
        assert_eq!(second.slot, first.slot);
        slots.end(second.slot, Ok(0));
        assert!(slots.claim(first).is_none());
        assert!(slots.abandon(first).is_none());
        assert!(slots.claim(second).is_some());
    }

    #[test]
    fn an_abandoned_request_keeps_its_memory_until_its_end() {
        let mut slots = Slots::default();
        let token = slots.insert(Memory::Zones(vec![crate::Zone::default(); 3]), Owner::Claimant(None));
        assert!(slots.abandon(token).is_none());
        assert_eq!((slots.in_flight(), slots.zone_memory(token).1), (1, 3));
        slots.end(token.slot, Ok(3));
        assert_eq!((slots.in_flight(), slots.free.len()), (0, 1));
        assert!(matches!(slots.all[0].memory, Memory::None));
    }

    #[test]
    fn listed_requests_come_back_in_the_order_of_their_end() {
        let mut slots = Slots::default();
        let [a, b] = [(); 2].map(|()| slots.insert(Memory::None, Owner::List));
        slots.end(b.slot, Err(Error::new(libc::EIO, "x")));
        slots.end(a.slot, Ok(0));
        let (token, result, _) = slots.next_listed().unwrap();
        assert_eq!((token, result.unwrap_err().errno()), (b, libc::EIO));
        assert_eq!(slots.next_listed().unwrap().0, a);
        assert!(slots.next_listed().is_none());
    }
}

//! Memory limits of stream clients: one budget for the process, one account for each connection.
//!
//! ```text
//!   budget ─┬─ half: minimums, reserved with a connection's slot (without one: refused)
//!           └─ half: the pool, which connections borrow from as their requests need it
//! ```
//!
//! A connection may borrow up to as much as is left in the pool. So one connection has at most half
//! of the pool, and `n` greedy ones share `n / (n + 1)` of it. Some of the pool is always left for
//! the next connection. A connection that may not borrow waits for its own requests, and is not
//! read from meanwhile. A connection without requests proceeds with its minimum. No connection ever
//! waits for another one.
//!
//! Source of the rule: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory
//! packet switches" (1998).

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

/// The smallest budget, in bytes: the minimums of a few connections.
pub const MIN_MEMORY: usize = 16 << 20;
/// Bytes that one connection has at most: one request of the longest kind, or 256 of 128 KiB.
const MOST: usize = 32 << 20;
/// Longest fragment of a request that is served from the connection's minimum, in bytes.
pub const FRAGMENT: usize = 128 << 10;

/// Memory for the data of network clients. Clones share it.
#[derive(Clone)]
pub struct MemoryBudget(Arc<Budget>);

struct Budget {
    bytes: usize,
    /// Reserved for minimums.
    reserved: AtomicUsize,
    /// Taken from the pool.
    borrowed: AtomicUsize,
}

static OF_PROCESS: OnceLock<MemoryBudget> = OnceLock::new();

impl MemoryBudget {
    /// A budget of `bytes`, at least [`MIN_MEMORY`].
    pub fn new(bytes: usize) -> MemoryBudget {
        let bytes = bytes.max(MIN_MEMORY);
        MemoryBudget(Arc::new(Budget { bytes, reserved: AtomicUsize::new(0), borrowed: AtomicUsize::new(0) }))
    }

    /// The budget of the process: a quarter of the machine's memory, unless
    /// [`MemoryBudget::set_process`] was called first.
    pub fn process() -> MemoryBudget {
        OF_PROCESS.get_or_init(|| MemoryBudget::new(physical_memory() / 4)).clone()
    }

    /// Sets the budget of the process, in bytes. Returns `false`, and changes nothing, when exports
    /// have been configured already.
    pub fn set_process(bytes: usize) -> bool {
        OF_PROCESS.set(MemoryBudget::new(bytes)).is_ok()
    }

    /// The size of the budget, in bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Bytes in use: reserved minimums and borrowed memory.
    pub fn in_use(&self) -> usize {
        self.0.reserved.load(Ordering::Relaxed) + self.0.borrowed.load(Ordering::Relaxed)
    }

    /// Reserves the minimum of a connection. Returns `None` when half of the budget is reserved.
    pub fn reserve(&self, minimum: Minimum) -> Option<Reserved> {
        let (total, most) = (minimum.total(), self.0.bytes - self.pool());
        let next = |reserved: usize| (reserved + total <= most).then_some(reserved + total);
        self.0.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        Some(Reserved { budget: self.clone(), minimum })
    }

    fn pool(&self) -> usize {
        self.0.bytes / 2
    }

    /// Borrows `bytes` for a connection that has already borrowed `own`. Returns whether it could.
    #[inline]
    fn borrow(&self, own: usize, bytes: usize) -> bool {
        let next = |borrowed: usize| {
            (own + bytes <= self.pool().saturating_sub(borrowed)).then_some(borrowed + bytes)
        };
        bytes == 0 || self.0.borrowed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }

    #[inline]
    fn give_back(&self, bytes: usize) {
        if bytes > 0 {
            self.0.borrowed.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Whether more than half of the pool is borrowed: free memory should go back to the system.
    #[inline]
    pub fn is_tight(&self) -> bool {
        self.0.borrowed.load(Ordering::Relaxed) > self.pool() / 2
    }
}

impl fmt::Debug for MemoryBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryBudget({} of {} bytes)", self.in_use(), self.bytes())
    }
}

/// The machine's physical memory, in bytes.
fn physical_memory() -> usize {
    // SAFETY: plain questions without pointers.
    let (pages, page) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    usize::try_from(pages).unwrap_or(0).saturating_mul(usize::try_from(page).unwrap_or(0))
}

/// The memory guaranteed to a connection, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Minimum {
    /// For requests.
    pub requests: usize,
    /// For data that arrives with a command, before the rest of the stream can be parsed.
    pub capsules: usize,
    /// For memory that is not tied to requests: stream buffers and fragments.
    pub fixed: usize,
}

impl Minimum {
    fn total(&self) -> usize {
        self.requests + self.capsules + self.fixed
    }
}

/// The minimum of one connection; given back when dropped.
pub struct Reserved {
    budget: MemoryBudget,
    minimum: Minimum,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.budget.0.reserved.fetch_sub(self.minimum.total(), Ordering::Relaxed);
    }
}

/// Bytes in use by a connection for one purpose.
struct Purse {
    /// The part of the minimum: no need to borrow.
    free: usize,
    used: Cell<usize>,
}

impl Purse {
    fn new(free: usize) -> Purse {
        Purse { free, used: Cell::new(0) }
    }

    fn borrowed(&self, used: usize) -> usize {
        used.saturating_sub(self.free)
    }

    fn take(&self, budget: &MemoryBudget, cost: usize) -> bool {
        let (old, new) = (self.used.get(), self.used.get() + cost);
        let own = self.borrowed(old);
        let is_possible = new <= MOST && budget.borrow(own, self.borrowed(new) - own);
        if is_possible {
            self.used.set(new);
        }
        is_possible
    }

    #[inline]
    fn give_back(&self, budget: &MemoryBudget, cost: usize) {
        let (old, new) = (self.used.get(), self.used.get() - cost);
        self.used.set(new);
        budget.give_back(self.borrowed(old) - self.borrowed(new));
    }
}

/// The memory account of one connection, on its core.
pub struct Account {
    reserved: Reserved,
    requests: Purse,
    capsules: Purse,
    /// Whether a fragment of a long incoming write, and of a long outgoing read, is in use.
    has_fragment: [Cell<bool>; 2],
    /// The task that waits for memory.
    waiter: RefCell<Option<Waker>>,
}

/// The purpose of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Request,
    Capsule,
    FragmentIn,
    FragmentOut,
}

/// The result of [`Account::charge`].
#[derive(Debug)]
pub enum Room {
    Yes(Charge),
    /// Refused now; granted once another request of this connection ends.
    Later,
    /// Refused: no request of this connection can release memory.
    Never,
}

impl Account {
    pub fn new(reserved: Reserved) -> Rc<Account> {
        let Minimum { requests, capsules, .. } = reserved.minimum;
        Rc::new(Account {
            reserved,
            requests: Purse::new(requests),
            capsules: Purse::new(capsules),
            has_fragment: Default::default(),
            waiter: RefCell::default(),
        })
    }

    pub fn budget(&self) -> &MemoryBudget {
        &self.reserved.budget
    }

    /// Charges `cost` bytes.
    #[inline]
    pub fn charge(self: &Rc<Self>, purpose: Purpose, cost: usize) -> Room {
        let (is_taken, is_idle) = match purpose {
            Purpose::Request => {
                let is_idle = self.requests.used.get() == 0;
                (self.requests.take(self.budget(), cost), is_idle)
            }
            Purpose::Capsule => (self.capsules.take(self.budget(), cost), false),
            Purpose::FragmentIn | Purpose::FragmentOut => (!self.fragment(purpose).replace(true), false),
        };
        match (is_taken, is_idle) {
            (true, _) => Room::Yes(Charge { account: self.clone(), purpose, cost }),
            (false, true) => Room::Never,
            (false, false) => Room::Later,
        }
    }

    /// Waits until the charge succeeds, or until it returns [`Room::Never`]. At most one task may
    /// wait.
    #[inline]
    pub fn poll_charge(self: &Rc<Self>, purpose: Purpose, cost: usize, cx: &Context<'_>) -> Poll<Room> {
        match self.charge(purpose, cost) {
            Room::Later => {
                let mut waiter = self.waiter.borrow_mut();
                if !waiter.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                    *waiter = Some(cx.waker().clone());
                }
                Poll::Pending
            }
            room => Poll::Ready(room),
        }
    }

    fn fragment(&self, purpose: Purpose) -> &Cell<bool> {
        &self.has_fragment[usize::from(purpose == Purpose::FragmentOut)]
    }
}

/// Memory in use; returned when dropped.
pub struct Charge {
    account: Rc<Account>,
    purpose: Purpose,
    cost: usize,
}

impl Charge {
    /// Whether free memory should go back to the system.
    pub(super) fn is_tight(&self) -> bool {
        self.account.budget().is_tight()
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes for {:?}", self.cost, self.purpose)
    }
}

impl Drop for Charge {
    #[inline]
    fn drop(&mut self) {
        let account = &*self.account;
        match self.purpose {
            Purpose::Request => account.requests.give_back(account.budget(), self.cost),
            Purpose::Capsule => account.capsules.give_back(account.budget(), self.cost),
            Purpose::FragmentIn | Purpose::FragmentOut => account.fragment(self.purpose).set(false),
        }
        let waiter = account.waiter.borrow_mut().take();
        waiter.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn account(budget: &MemoryBudget) -> Rc<Account> {
        let minimum = Minimum { requests: MIB, capsules: 0, fixed: 0 };
        Account::new(budget.reserve(minimum).expect("there is room"))
    }

    /// Charges requests of 1 MiB until the account refuses.
    fn fill(account: &Rc<Account>) -> Vec<Charge> {
        let mut taken = Vec::new();
        while let Room::Yes(charge) = account.charge(Purpose::Request, MIB) {
            taken.push(charge);
        }
        taken
    }

    #[test]
    fn greedy_connections_share_the_pool_and_leave_something_to_the_next() {
        let budget = MemoryBudget::new(128 * MIB);
        let accounts: Vec<_> = (0..9).map(|_| account(&budget)).collect();
        let mut held: Vec<_> = accounts.iter().map(fill).collect();
        let counts: Vec<_> = held.iter().map(Vec::len).collect();
        // The minimum, then as much as is left: the first has its maximum of 32, the next half of
        // the rest, and so on.
        assert_eq!(counts[..4], [32, 18, 9, 5]);
        assert!(counts.iter().all(|count| *count >= 1) && budget.in_use() <= budget.bytes());
        // While others wait, the first ones cannot get back the memory that they release.
        drop(held.remove(0));
        assert_eq!(fill(&accounts[0]).len(), 17);
        drop(accounts);
    }

    #[test]
    fn everything_comes_back_and_a_connection_that_holds_nothing_is_told_that_nothing_will() {
        let budget = MemoryBudget::new(MIN_MEMORY);
        let (one, other) = (account(&budget), account(&budget));
        let held = fill(&one);
        assert_eq!(held.len(), 5, "1 MiB, and half of 8");
        assert!(matches!(one.charge(Purpose::Request, MIB), Room::Later));
        assert!(matches!(other.charge(Purpose::Request, 6 * MIB), Room::Never));
        assert!(matches!(other.charge(Purpose::Request, MIB), Room::Yes(_)), "its minimum");
        drop((held, one, other));
        assert_eq!(budget.in_use(), 0);
    }

    #[test]
    fn connections_without_a_minimum_are_refused() {
        let budget = MemoryBudget::new(MIN_MEMORY);
        let all: Vec<_> = (0..8).map(|_| account(&budget)).collect();
        assert!(budget.reserve(Minimum { requests: 1, ..Minimum::default() }).is_none());
        drop(all);
        assert!(budget.reserve(Minimum { requests: MIB, ..Minimum::default() }).is_some());
    }

    #[test]
    fn there_is_one_fragment_in_each_direction() {
        let account = account(&MemoryBudget::new(MIN_MEMORY));
        let Room::Yes(fragment) = account.charge(Purpose::FragmentIn, FRAGMENT) else {
            panic!("no fragment")
        };
        assert!(matches!(account.charge(Purpose::FragmentIn, FRAGMENT), Room::Later));
        assert!(matches!(account.charge(Purpose::FragmentOut, FRAGMENT), Room::Yes(_)));
        drop(fragment);
        assert!(matches!(account.charge(Purpose::FragmentIn, FRAGMENT), Room::Yes(_)));
    }
}

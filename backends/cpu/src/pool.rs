//! Threads that run one job after another, with a fork-join cost below a microsecond.
//!
//! A job is a number of items. They are shared out in contiguous parts, one for each thread; a thread takes the items of its
//! own part in order and then those that the others have left (`shares.rs`). So a thread that is slow, parked or
//! without a core costs the item it has begun and no more. The caller is one of the threads; it goes on until no item is left
//! and then waits for those that others have begun.
//!
//! A job is published by raising an epoch. Workers spin on it for about half a millisecond, which spans the gaps inside a
//! token, then park. Between jobs a worker offers its core to other processes now and then: a neighbour that is let in there
//! does not take the core in the middle of an item, where everybody would wait for it. Where much time goes into such waits all
//! the same, fewer threads take part for a while. Who runs an item changes nothing in its result.
#![allow(unsafe_code, reason = "a job borrows its caller's stack; `run_items` returns when every item is done")]

use crate::error::CpuError;
use crate::shares::Shares;
use npuhal_core::error::RunError;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// `pause` instructions before a worker parks.
const SPINS_BEFORE_PARK: u32 = 20_000;
/// `pause` instructions after which a thread without work offers its core to others, and again after as many more.
const SPINS_BEFORE_YIELD: u32 = 500;
/// How long a worker runs jobs before it offers its core to others: less than the time slices of schedulers, so that it does
/// not lose the core otherwise.
const YIELD_AFTER: Duration = Duration::from_micros(500);

/// Time inside jobs after which the part of it spent waiting for threads without a core is looked at: several time slices of a
/// scheduler, so that a neighbour process shows.
const LOOK: Duration = Duration::from_millis(16);
/// Part of that time, in percent, from which a thread less is faster: two threads gain a half or more on an idle machine, and
/// lose it again when a third of the time goes.
const STALLED_PERCENT: u32 = 35;
/// A wait that is no longer than this, and than two items take, is for a thread that runs.
const USUAL_WAIT: Duration = Duration::from_micros(50);
/// How long a thread is then left out. Doubles each time the next look finds the same again, because each costs a part of
/// [`LOOK`], and starts anew when one does not.
const LEFT_OUT: Duration = Duration::from_millis(100);
/// Longest time that a thread is left out: a neighbour that has left is noticed this late.
const LEFT_OUT_MAX: Duration = Duration::from_millis(1600);

/// A job that panicked on some thread. Its results are incomplete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobPanicked;

impl From<JobPanicked> for RunError {
    fn from(_: JobPanicked) -> Self {
        Self::Failed {
            run: None,
            state: "PANICKED".to_owned(),
            detail: "a CPU worker thread panicked; this is a defect of npuhal".to_owned(),
        }
    }
}

type Job = *const (dyn Fn(usize, usize) + Sync);

/// Alone in its cache line, and in the one that is fetched with it.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Apart<T>(T);

struct State {
    /// Raised when there are items.
    epoch: Apart<AtomicU32>,
    /// Items of the present job that are not done.
    open: Apart<AtomicUsize>,
    /// When a worker last ran out of items, in nanoseconds since `start`.
    ended_ns: Apart<AtomicU64>,
    job: UnsafeCell<Option<Job>>,
    shares: Shares,
    /// Threads that take part, the caller included.
    active: AtomicUsize,
    /// By worker, whether it sleeps or is about to.
    asleep: Vec<Apart<AtomicBool>>,
    start: Instant,
    panicked: AtomicBool,
    stop: AtomicBool,
}

// SAFETY: `job` is written only by `run_items`, under its lock and while no item is taken or left (`open` is 0), and read only
// by who has taken an item; items are shared out after the write, with release, and taken with acquire.
unsafe impl Sync for State {}
// SAFETY: the job pointer is only dereferenced by who has an item of the job, and `run_items` does not end before all are done.
unsafe impl Send for State {}

/// Watches whether the threads wait for one that has no core.
struct Pace {
    threads: usize,
    /// Threads that take part.
    active: usize,
    /// Time inside jobs of several threads since the last look, and what of it was waiting.
    spent: Duration,
    stalled: Duration,
    /// When one thread more takes part, and how long one is left out the next time.
    more_at: Option<Instant>,
    left_out: Duration,
}

impl Pace {
    const fn new(threads: usize) -> Self {
        let (spent, stalled) = (Duration::ZERO, Duration::ZERO);
        Self { threads, active: threads, spent, stalled, more_at: None, left_out: LEFT_OUT }
    }

    /// Threads that take part in a job that begins now.
    fn active(&mut self, now: Instant) -> usize {
        if self.more_at.is_some_and(|at| at <= now) {
            self.active += 1;
            self.more_at = if self.active < self.threads { now.checked_add(self.left_out) } else { None };
            (self.spent, self.stalled) = (Duration::ZERO, Duration::ZERO);
        }
        self.active
    }

    /// Counts a job of several threads that ends now and took `spent`, of which `stalled` waiting.
    fn count(&mut self, now: Instant, spent: Duration, stalled: Duration) {
        self.spent += spent;
        self.stalled += stalled;
        if self.spent < LOOK {
            return;
        }
        if self.stalled * 100 > self.spent * STALLED_PERCENT {
            self.active = (self.active - 1).max(1);
            self.more_at = now.checked_add(self.left_out);
            self.left_out = (self.left_out * 2).min(LEFT_OUT_MAX);
        } else if self.active == self.threads {
            self.left_out = LEFT_OUT;
        }
        (self.spent, self.stalled) = (Duration::ZERO, Duration::ZERO);
    }
}

/// The worker threads of one or more segments.
pub struct Pool {
    state: Arc<State>,
    workers: Vec<JoinHandle<()>>,
    turn: Mutex<Pace>,
}

impl Pool {
    /// A pool that runs jobs on `threads` threads, the caller's included; 0 counts as 1.
    ///
    /// # Errors
    /// [`CpuError::Thread`].
    pub fn new(threads: usize) -> Result<Self, CpuError> {
        let threads = threads.max(1);
        let state = Arc::new(State {
            epoch: Apart::default(),
            open: Apart::default(),
            ended_ns: Apart::default(),
            job: UnsafeCell::new(None),
            shares: Shares::new(threads),
            active: AtomicUsize::new(threads),
            asleep: (1..threads).map(|_| Apart::default()).collect(),
            start: Instant::now(),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let mut pool = Self { state, workers: Vec::new(), turn: Mutex::new(Pace::new(threads)) };
        for index in 1..threads {
            let state = Arc::clone(&pool.state);
            let worker = std::thread::Builder::new()
                .name(format!("npuhal-cpu-{index}"))
                .spawn(move || work(&state, index))
                .map_err(|source| CpuError::Thread { index, wanted: threads, source })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads that run a job, the caller's included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `job(share)` once for each share, numbered from 0 to the number of threads, as [`Pool::run_items`] runs items.
    ///
    /// # Errors
    /// [`JobPanicked`].
    pub fn run(&self, job: &(dyn Fn(usize) + Sync)) -> Result<(), JobPanicked> {
        self.run_items(self.threads(), &|_, share| job(share))
    }

    /// Runs `job(thread, item)` once for each item, numbered from 0, and returns when all are done. `thread` is the number of
    /// the thread that runs it, 0 for the caller: no two items of a job run under the same number at a time. Items near each
    /// other mostly run on the same thread in order, but any thread may run any item, one after the other. Denormals are
    /// flushed meanwhile ([`FlushDenormals`]). Jobs of one pool take turns. A job that is run by an item of another one is done
    /// by that item's thread alone.
    ///
    /// # Errors
    /// [`JobPanicked`]; items that no thread had begun by then may be left out.
    pub fn run_items(&self, items: usize, job: &(dyn Fn(usize, usize) + Sync)) -> Result<(), JobPanicked> {
        let Ok(count) = u32::try_from(items) else { return run_alone(items, job) };
        if self.workers.is_empty() || count < 2 || IN_ITEM.get() {
            return run_alone(items, job);
        }
        let mut pace = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &*self.state;
        let begin = Instant::now();
        let active = pace.active(begin);
        if active == 1 {
            return run_alone(items, job);
        }
        let _flush = FlushDenormals::new();
        // SAFETY: no item is left or under way, so nobody reads the cell. Erasing the lifetime is sound because this function
        // does not return (nor unwind) before every item is done.
        unsafe {
            *state.job.get() = Some(std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync + '_), Job>(job));
        }
        state.open.0.store(items, Ordering::Relaxed);
        state.active.store(active, Ordering::Relaxed);
        state.shares.reset(count, active);
        state.epoch.0.fetch_add(1, Ordering::SeqCst);
        for (asleep, worker) in state.asleep.iter().zip(&self.workers).take(active - 1) {
            if asleep.0.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let own = state.run_share(0);
        let own_end = Instant::now();
        let end = if state.wait() { Instant::now() } else { own_end };
        // Either side may have waited for the other: a neighbour takes the core of any thread. Workers that had no part in
        // the job were not waited for.
        let ended = state.start + Duration::from_nanos(state.ended_ns.0.load(Ordering::Relaxed));
        let others_waited = if ended > begin { own_end.saturating_duration_since(ended) } else { Duration::ZERO };
        let usual = USUAL_WAIT + 2 * (own_end - begin) / own.max(1);
        let stalled = (end - own_end).max(others_waited).saturating_sub(usual);
        pace.count(end, end - begin, stalled);
        if state.panicked.swap(false, Ordering::Relaxed) { Err(JobPanicked) } else { Ok(()) }
    }
}

thread_local! {
    /// Whether this thread runs an item.
    static IN_ITEM: Cell<bool> = const { Cell::new(false) };
}

/// Runs all items on the calling thread.
fn run_alone(items: usize, job: &(dyn Fn(usize, usize) + Sync)) -> Result<(), JobPanicked> {
    let _flush = FlushDenormals::new();
    let before = IN_ITEM.replace(true);
    let result = catch_unwind(AssertUnwindSafe(|| (0..items).for_each(|item| job(0, item))));
    IN_ITEM.set(before);
    result.map_err(|_| JobPanicked)
}

impl State {
    /// Runs items of the present job as long as there are any; returns how many.
    fn run_share(&self, thread: usize) -> u32 {
        let Some(mut item) = self.shares.take(thread) else { return 0 };
        // SAFETY: an item was taken, so the cell holds its job, and `run_items` keeps that alive until the item is done, which
        // is counted below.
        let job = unsafe { (*self.job.get()).map(|job| &*job) };
        let mut done = 1;
        IN_ITEM.set(true);
        let result = catch_unwind(AssertUnwindSafe(|| {
            let Some(job) = job else { return };
            loop {
                job(thread, item);
                let Some(next) = self.shares.take(thread) else { return };
                (item, done) = (next, done + 1);
            }
        }));
        IN_ITEM.set(false);
        if result.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
            // The results are incomplete whatever becomes of the rest.
            while self.shares.take(thread).is_some() {
                done += 1;
            }
        }
        self.open.0.fetch_sub(done as usize, Ordering::Release);
        done
    }

    /// Waits until every item is done; whether that took any time.
    fn wait(&self) -> bool {
        let mut spins = 0u32;
        while self.open.0.load(Ordering::Acquire) > 0 {
            spins = spins.wrapping_add(1);
            pause(spins);
        }
        spins > 0
    }

    /// Whether `worker` has something to look at that came after epoch `seen`.
    fn calls(&self, worker: usize, seen: u32) -> bool {
        let raised = self.epoch.0.load(Ordering::SeqCst) != seen;
        raised && (worker < self.active.load(Ordering::Relaxed) || self.stop.load(Ordering::Relaxed))
    }

    /// Waits until the epoch differs from `seen`; returns it.
    fn next_epoch(&self, worker: usize, seen: u32) -> u32 {
        for spins in 1..=SPINS_BEFORE_PARK {
            let epoch = self.epoch.0.load(Ordering::Acquire);
            if epoch != seen {
                if self.calls(worker, seen) {
                    return epoch;
                }
                // Left out.
                break;
            }
            pause(spins);
        }
        let asleep = &self.asleep[worker - 1].0;
        asleep.store(true, Ordering::SeqCst);
        while !self.calls(worker, seen) {
            std::thread::park();
        }
        asleep.store(false, Ordering::Relaxed);
        self.epoch.0.load(Ordering::Acquire)
    }
}

/// One turn of a waiting loop.
fn pause(spins: u32) {
    if spins.is_multiple_of(SPINS_BEFORE_YIELD) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        self.state.epoch.0.fetch_add(1, Ordering::SeqCst);
        self.workers.iter().map(JoinHandle::thread).for_each(Thread::unpark);
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its jobs, so this cannot fail; there is nothing to do if it does.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

fn work(state: &State, worker: usize) {
    let _flush = FlushDenormals::new();
    let (mut seen, mut ran, mut yielded) = (0, Instant::now(), Instant::now());
    loop {
        seen = state.next_epoch(worker, seen);
        if state.stop.load(Ordering::Relaxed) {
            return;
        }
        if ran - yielded > YIELD_AFTER {
            std::thread::yield_now();
            yielded = ran;
        }
        if state.run_share(worker) > 0 {
            ran = Instant::now();
            // 2^64 nanoseconds are 584 years.
            state.ended_ns.0.store((ran - state.start).as_nanos() as u64, Ordering::Relaxed);
        }
    }
}

/// While it lives, this thread's f32 arithmetic flushes denormals to zero (x86-64: FTZ and DAZ; elsewhere no effect).
/// Denormal products of scales cost a factor of two and more otherwise.
#[derive(Debug)]
pub struct FlushDenormals {
    #[cfg(target_arch = "x86_64")]
    before: u32,
    _thread: std::marker::PhantomData<*const ()>,
}

impl FlushDenormals {
    /// Switches it on.
    #[must_use]
    pub fn new() -> Self {
        #[cfg(target_arch = "x86_64")]
        let before = mxcsr::get();
        #[cfg(target_arch = "x86_64")]
        mxcsr::set(before | mxcsr::FTZ_DAZ);
        Self {
            #[cfg(target_arch = "x86_64")]
            before,
            _thread: std::marker::PhantomData,
        }
    }
}

impl Default for FlushDenormals {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for FlushDenormals {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        mxcsr::set(self.before);
    }
}

#[cfg(target_arch = "x86_64")]
mod mxcsr {
    use std::arch::asm;

    pub(super) const FTZ_DAZ: u32 = 0x8040;

    pub(super) fn get() -> u32 {
        let mut value = 0u32;
        // SAFETY: stores the control register to a local.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
        value
    }

    pub(super) fn set(value: u32) {
        // SAFETY: only the denormal bits ever differ from what `get` returned; rounding and exception masks stay.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, preserves_flags)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn counters(len: usize) -> Vec<AtomicUsize> {
        (0..len).map(|_| AtomicUsize::new(0)).collect()
    }

    fn all_are(counts: &[AtomicUsize], wanted: usize) -> bool {
        counts.iter().all(|count| count.load(Ordering::Relaxed) == wanted)
    }

    #[test]
    fn every_share_of_every_job_runs_once() {
        for threads in [1, 2, 3, 5] {
            let pool = Pool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            let counts = counters(threads);
            for _ in 0..2000 {
                pool.run(&|share| {
                    counts[share].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
            }
            assert!(all_are(&counts, 2000));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(50))]

        /// Jobs of any sizes follow each other; each writes what the next one reads.
        #[test]
        fn every_item_of_every_job_runs_once(
            threads in 1..6usize,
            left_out in 0..6usize,
            jobs in prop::collection::vec(prop_oneof![0..4usize, 0..300usize], 1..200),
        ) {
            let pool = Pool::new(threads).unwrap();
            pool.turn.lock().unwrap().active = threads.saturating_sub(left_out).max(1);
            let mut before = 0;
            for items in jobs {
                let counts = counters(items);
                let sum = AtomicUsize::new(before);
                let busy: Vec<AtomicBool> = (0..threads).map(|_| AtomicBool::new(false)).collect();
                pool.run_items(items, &|thread, item| {
                    assert!(!busy[thread].swap(true, Ordering::Relaxed), "one item of a thread at a time");
                    counts[item].fetch_add(1, Ordering::Relaxed);
                    sum.fetch_add(item, Ordering::Relaxed);
                    busy[thread].store(false, Ordering::Relaxed);
                })
                .unwrap();
                prop_assert!(all_are(&counts, 1));
                let after = sum.into_inner();
                prop_assert_eq!(after, before + items * items.saturating_sub(1) / 2);
                before = after;
            }
        }
    }

    #[test]
    fn the_caller_goes_on_with_what_nobody_began() {
        let pool = Pool::new(2).unwrap();
        let (done, held) = (AtomicUsize::new(0), AtomicBool::new(false));
        // Once the worker has an item it has no core until all the others are done.
        pool.run_items(1000, &|thread, _| {
            if thread == 1 {
                held.store(true, Ordering::Release);
                while done.load(Ordering::Acquire) < 999 {
                    std::thread::yield_now();
                }
            } else {
                // The caller leaves some for the worker.
                while done.load(Ordering::Relaxed) == 500 && !held.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
            }
            done.fetch_add(1, Ordering::Release);
        })
        .unwrap();
        assert_eq!(done.into_inner(), 1000);
    }

    #[test]
    fn items_of_one_thread_are_in_order() {
        let pool = Pool::new(1).unwrap();
        let order = Mutex::new(Vec::new());
        pool.run_items(100, &|thread, item| {
            assert_eq!(thread, 0);
            order.lock().unwrap().push(item);
        })
        .unwrap();
        assert!(order.into_inner().unwrap().into_iter().eq(0..100));
    }

    #[test]
    fn long_waits_leave_a_thread_out_for_a_while() {
        let mut pace = Pace::new(3);
        let mut now = Instant::now();
        for left_out in [LEFT_OUT, 2 * LEFT_OUT, 4 * LEFT_OUT] {
            assert_eq!(pace.active(now), 3);
            pace.count(now, LOOK / 2, LOOK / 2);
            assert_eq!(pace.active(now), 3, "not long enough to tell");
            pace.count(now, LOOK / 2, LOOK / 2);
            assert_eq!(pace.active(now), 2);
            pace.count(now, LOOK, Duration::ZERO);
            assert_eq!(pace.active(now + left_out - LOOK), 2);
            now += left_out;
        }
        for _ in 0..10 {
            assert_eq!(pace.active(now), 3);
            pace.count(now, LOOK, LOOK / 10);
        }
        pace.count(now, LOOK, LOOK);
        pace.count(now, LOOK, LOOK);
        pace.count(now, LOOK, LOOK);
        assert_eq!(pace.active(now), 1, "one after the other, and never the caller");
        for wanted in [2, 3] {
            now += LEFT_OUT_MAX;
            assert_eq!(pace.active(now), wanted, "they come back one after the other");
        }
        pace.count(now, LOOK, Duration::ZERO);
        pace.count(now, LOOK, LOOK);
        assert_eq!((pace.active(now), pace.active(now + LEFT_OUT)), (2, 3), "one look without waits starts anew");
    }

    #[test]
    fn a_job_done_alone_has_all_its_shares() {
        let pool = Pool::new(3).unwrap();
        pool.turn.lock().unwrap().active = 1;
        let caller = std::thread::current().id();
        let shares = Mutex::new(Vec::new());
        pool.run(&|share| {
            assert_eq!(std::thread::current().id(), caller);
            shares.lock().unwrap().push(share);
        })
        .unwrap();
        assert_eq!(*shares.lock().unwrap(), [0, 1, 2]);
        assert_eq!(pool.run(&|share| assert!(share != 1)), Err(JobPanicked));
    }

    #[test]
    fn a_thread_that_is_left_out_sleeps() {
        let pool = Pool::new(3).unwrap();
        {
            let mut pace = pool.turn.lock().unwrap();
            (pace.active, pace.more_at) = (2, Instant::now().checked_add(Duration::from_secs(3600)));
        }
        let is_asleep = |worker: usize| pool.state.asleep[worker - 1].0.load(Ordering::SeqCst);
        let until = Instant::now() + Duration::from_secs(60);
        while !is_asleep(2) && Instant::now() < until {
            pool.run_items(100, &|thread, _| assert!(thread < 2)).unwrap();
        }
        assert!(is_asleep(2));
        for _ in 0..1000 {
            pool.run_items(100, &|thread, _| assert!(thread < 2)).unwrap();
        }
        pool.turn.lock().unwrap().more_at = Some(Instant::now());
        // Nobody can leave before all three are there.
        let there = counters(3);
        pool.run_items(3, &|thread, _| {
            there[thread].fetch_add(1, Ordering::Relaxed);
            while there.iter().any(|count| count.load(Ordering::Relaxed) == 0) {
                std::thread::yield_now();
            }
        })
        .unwrap();
        assert!(all_are(&there, 1));
    }

    #[test]
    fn parked_workers_wake_up() {
        let pool = Pool::new(2).unwrap();
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(30));
            let there = counters(2);
            pool.run_items(2, &|thread, _| {
                there[thread].fetch_add(1, Ordering::Relaxed);
                while there.iter().any(|count| count.load(Ordering::Relaxed) == 0) {
                    std::thread::yield_now();
                }
            })
            .unwrap();
            assert!(all_are(&there, 1));
        }
    }

    #[test]
    fn a_panic_on_any_thread_is_an_error_and_the_pool_lives_on() {
        let pool = Pool::new(3).unwrap();
        for bad in 0..3 {
            assert_eq!(pool.run(&|share| assert!(share != bad)), Err(JobPanicked));
            assert_eq!(pool.run(&|_| ()), Ok(()));
        }
        for bad in [0, 1, 50, 98, 99] {
            assert_eq!(pool.run_items(100, &|_, item| assert!(item != bad)), Err(JobPanicked));
            let counts = counters(100);
            let count = |_: usize, item: usize| {
                counts[item].fetch_add(1, Ordering::Relaxed);
            };
            assert_eq!(pool.run_items(100, &count), Ok(()));
            assert!(all_are(&counts, 1));
        }
        assert_eq!(pool.run_items(100, &|_, _| panic!("every item")), Err(JobPanicked));
        assert_eq!(pool.run_items(100, &|_, _| ()), Ok(()));
    }

    #[test]
    fn a_job_inside_an_item_is_done_there() {
        let (pool, other) = (Pool::new(3).unwrap(), Pool::new(2).unwrap());
        let counts = counters(10);
        let inner = |_: usize, item: usize| {
            counts[item].fetch_add(1, Ordering::Relaxed);
        };
        pool.run_items(100, &|_, item| {
            let runner = std::thread::current().id();
            let pool = if item % 2 == 0 { &pool } else { &other };
            pool.run_items(10, &|thread, item| {
                assert_eq!((thread, std::thread::current().id()), (0, runner));
                inner(thread, item);
            })
            .unwrap();
        })
        .unwrap();
        assert!(all_are(&counts, 100));
        let nested = pool.run_items(4, &|_, _| assert_eq!(pool.run(&|_| panic!("inside")), Err(JobPanicked)));
        assert_eq!(nested, Ok(()), "and its panics stay there");
    }

    #[test]
    fn callers_of_one_pool_take_turns() {
        let pool = Pool::new(3).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for items in 0..500 {
                        let counts = counters(items);
                        pool.run_items(items, &|_, item| {
                            counts[item].fetch_add(1, Ordering::Relaxed);
                        })
                        .unwrap();
                        assert!(all_are(&counts, 1));
                    }
                });
            }
        });
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn denormals_are_flushed_inside_jobs_only() {
        let pool = Pool::new(2).unwrap();
        let before = mxcsr::get();
        pool.run(&|_| assert_eq!(mxcsr::get() & mxcsr::FTZ_DAZ, mxcsr::FTZ_DAZ)).unwrap();
        assert_eq!(mxcsr::get(), before);
    }
}

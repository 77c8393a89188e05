//! Threads that run one job after another, with a fork-join cost below a microsecond.
//!
//! A job is published by raising an epoch. Workers spin on it for about half a millisecond, which spans the gaps inside a
//! token, then park. A job has one share for each thread. The caller does its own share, then every share that its thread
//! has not begun (it is parked, or another process has its core), then waits for the rest. Where much of the time goes into
//! that wait, a neighbour process has a core: the caller then does whole jobs alone for a while before it tries again.
//! Who runs a share changes nothing in its result.
#![allow(unsafe_code, reason = "a job borrows the caller's stack; `run` does not return before every worker is done")]

use crate::error::CpuError;
use npuhal_core::error::RunError;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// `pause` instructions before a worker parks.
const SPINS_BEFORE_PARK: u32 = 20_000;
/// `pause` instructions before a waiting caller lets others have its core; the thread it waits for may be among them.
const SPINS_BEFORE_YIELD: u32 = 2_000;

/// Time inside jobs after which the share of it spent waiting is looked at: longer than a scheduler's time slice, so that a
/// neighbour process shows.
const LOOK: Duration = Duration::from_millis(8);
/// Part of the time spent waiting, in percent, from which working alone is faster: two threads gain a quarter or more on an
/// idle machine, and lose it again when they wait this long for each other.
const WAITING_PERCENT: u32 = 20;
/// How long the caller then works alone. Doubles with every look that finds the same again, because each costs up to twice
/// [`LOOK`], and starts anew when a look does not.
const ALONE: Duration = Duration::from_millis(100);
/// Longest time alone: a neighbour that has left is noticed this late.
const ALONE_MAX: Duration = Duration::from_millis(1600);

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

type Job = *const (dyn Fn(usize) + Sync);

struct State {
    epoch: AtomicU32,
    job: UnsafeCell<Option<Job>>,
    /// Epoch in which share `i + 1` was last begun.
    begun: Vec<AtomicU32>,
    /// Shares of the present job that are not done, the caller's own apart.
    running: AtomicUsize,
    /// When a worker last ended a share, in nanoseconds since `start`.
    ended_ns: AtomicU64,
    start: Instant,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    panicked: AtomicBool,
    stop: AtomicBool,
}

// SAFETY: `job` is written only by `run`, under its lock and while no share is under way (`running` is 0), and read only by
// who began a share of the present epoch, which was raised after the write.
unsafe impl Sync for State {}
// SAFETY: the job pointer is only dereferenced between its publication and the end of `run`, while its referent lives.
unsafe impl Send for State {}

/// Who runs a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Runner {
    Caller,
    Worker,
}

/// Watches whether the threads wait for each other too long.
struct Pace {
    /// Time inside jobs of all threads since the last look, and what of it was waiting.
    spent: Duration,
    waited: Duration,
    /// Until when the caller works alone, and for how long it will the next time.
    alone_until: Option<Instant>,
    alone_for: Duration,
}

impl Pace {
    const fn new() -> Self {
        Self { spent: Duration::ZERO, waited: Duration::ZERO, alone_until: None, alone_for: ALONE }
    }

    /// Whether the caller does the job that begins now alone.
    fn alone(&mut self, now: Instant) -> bool {
        let alone = self.alone_until.is_some_and(|until| now < until);
        if !alone {
            self.alone_until = None;
        }
        alone
    }

    /// Counts a job of all threads that ends now and took `spent`, of which `waited` at its end.
    fn count(&mut self, now: Instant, spent: Duration, waited: Duration) {
        self.spent += spent;
        self.waited += waited;
        if self.spent < LOOK {
            return;
        }
        if self.waited * 100 > self.spent * WAITING_PERCENT {
            self.alone_until = now.checked_add(self.alone_for);
            self.alone_for = (self.alone_for * 2).min(ALONE_MAX);
        } else {
            self.alone_for = ALONE;
        }
        (self.spent, self.waited) = (Duration::ZERO, Duration::ZERO);
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
        let state = Arc::new(State {
            epoch: AtomicU32::new(0),
            job: UnsafeCell::new(None),
            begun: (1..threads.max(1)).map(|_| AtomicU32::new(0)).collect(),
            running: AtomicUsize::new(0),
            ended_ns: AtomicU64::new(0),
            start: Instant::now(),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let mut pool = Self { state, workers: Vec::new(), turn: Mutex::new(Pace::new()) };
        for index in 1..threads.max(1) {
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

    /// Runs `job(share)` once for each share, numbered from 0 to the number of threads, and returns when all are done. Shares
    /// may run on any thread and one after the other. Denormals are flushed meanwhile ([`FlushDenormals`]). Jobs of one
    /// pool take turns; a job must not run another one.
    ///
    /// # Errors
    /// [`JobPanicked`].
    pub fn run(&self, job: &(dyn Fn(usize) + Sync)) -> Result<(), JobPanicked> {
        let mut pace = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let _flush = FlushDenormals::new();
        let state = &*self.state;
        if self.workers.is_empty() {
            let shares = AssertUnwindSafe(|| (0..self.threads()).for_each(job));
            return catch_unwind(shares).map_err(|_| JobPanicked);
        }
        let begin = Instant::now();
        if pace.alone(begin) {
            let shares = AssertUnwindSafe(|| (0..self.threads()).for_each(job));
            return catch_unwind(shares).map_err(|_| JobPanicked);
        }
        // SAFETY: no share is under way, so nobody reads the cell. Erasing the lifetime is sound because this function does
        // not return (nor unwind) before every share is done.
        unsafe {
            *state.job.get() = Some(std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(job));
        }
        state.running.store(self.workers.len(), Ordering::Relaxed);
        let epoch = state.epoch.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        if state.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = state.lock.lock().unwrap_or_else(PoisonError::into_inner);
            state.wake.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        for share in 1..self.threads() {
            state.run_share(epoch, share, Runner::Caller);
        }
        let own_end = Instant::now();
        state.wait();
        let end = Instant::now();
        // Either side may have waited for the other: a neighbour takes the core of any thread.
        let ended = state.start + Duration::from_nanos(state.ended_ns.load(Ordering::Relaxed));
        let waited = (end - own_end).max(own_end.saturating_duration_since(ended.max(begin)));
        pace.count(end, end - begin, waited);
        let others = state.panicked.swap(false, Ordering::Relaxed);
        if own.is_err() || others { Err(JobPanicked) } else { Ok(()) }
    }
}

impl State {
    /// Waits until every share is done.
    fn wait(&self) {
        let mut spins = 0u32;
        while self.running.load(Ordering::Acquire) > 0 {
            if spins < SPINS_BEFORE_YIELD {
                spins += 1;
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Runs share `share` (from 1) of the job of `epoch`, unless somebody has begun it.
    fn run_share(&self, epoch: u32, share: usize, runner: Runner) {
        let begun = &self.begun[share - 1];
        if begun.compare_exchange(epoch.wrapping_sub(1), epoch, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        // SAFETY: every share is begun once in each epoch, so this one belongs to the job that was published with `epoch`;
        // `run` keeps it alive until `running` is 0, which needs this share.
        let result = unsafe { (*self.job.get()).map(|job| catch_unwind(AssertUnwindSafe(|| (*job)(share)))) };
        if matches!(result, Some(Err(_))) {
            self.panicked.store(true, Ordering::Relaxed);
        }
        if runner == Runner::Worker {
            // 2^64 nanoseconds are 584 years.
            self.ended_ns.store(self.start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        self.running.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        self.state.epoch.fetch_add(1, Ordering::SeqCst);
        {
            let _guard = self.state.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.state.wake.notify_all();
        }
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

fn work(state: &State, index: usize) {
    let _flush = FlushDenormals::new();
    let mut seen = 0;
    loop {
        seen = next_epoch(state, seen);
        if state.stop.load(Ordering::Relaxed) {
            return;
        }
        state.run_share(seen, index, Runner::Worker);
    }
}

/// Waits until the epoch differs from `seen`; returns it.
fn next_epoch(state: &State, seen: u32) -> u32 {
    for _ in 0..SPINS_BEFORE_PARK {
        let epoch = state.epoch.load(Ordering::Acquire);
        if epoch != seen {
            return epoch;
        }
        std::hint::spin_loop();
    }
    let mut guard = state.lock.lock().unwrap_or_else(PoisonError::into_inner);
    state.sleepers.fetch_add(1, Ordering::SeqCst);
    let epoch = loop {
        let epoch = state.epoch.load(Ordering::SeqCst);
        if epoch != seen {
            break epoch;
        }
        guard = state.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
    };
    state.sleepers.fetch_sub(1, Ordering::SeqCst);
    drop(guard);
    epoch
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

    #[test]
    fn every_share_of_every_job_runs_once() {
        for threads in [1, 2, 3, 5] {
            let pool = Pool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            let counts: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..2000 {
                pool.run(&|thread| {
                    counts[thread].fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
            }
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 2000));
        }
    }

    #[test]
    fn long_waits_make_the_caller_work_alone_for_a_while() {
        let mut pace = Pace::new();
        let mut now = Instant::now();
        for alone_for in [ALONE, 2 * ALONE, 4 * ALONE] {
            assert!(!pace.alone(now));
            pace.count(now, LOOK / 2, LOOK / 2);
            assert!(!pace.alone(now), "not long enough to tell");
            pace.count(now, LOOK / 2, LOOK / 2);
            assert!(pace.alone(now) && pace.alone(now + alone_for - LOOK));
            now += alone_for;
        }
        for _ in 0..10 {
            pace.count(now, LOOK, LOOK / 10);
            assert!(!pace.alone(now), "short waits do not count");
        }
        pace.count(now, LOOK, LOOK);
        assert!(pace.alone(now) && !pace.alone(now + ALONE), "and one look without them starts anew");
        for _ in 0..20 {
            pace.count(now, LOOK, LOOK);
        }
        assert!(!pace.alone(now + ALONE_MAX));
    }

    #[test]
    fn a_job_done_alone_has_all_its_shares() {
        let pool = Pool::new(3).unwrap();
        pool.turn.lock().unwrap().alone_until = Instant::now().checked_add(Duration::from_secs(3600));
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
    fn parked_workers_wake_up() {
        let pool = Pool::new(2).unwrap();
        let count = AtomicUsize::new(0);
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(30));
            pool.run(&|_| {
                count.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        }
        assert_eq!(count.load(Ordering::Relaxed), 6);
    }

    #[test]
    fn a_panic_on_any_thread_is_an_error_and_the_pool_lives_on() {
        let pool = Pool::new(3).unwrap();
        for bad in 0..3 {
            assert_eq!(pool.run(&|thread| assert!(thread != bad)), Err(JobPanicked));
            assert_eq!(pool.run(&|_| ()), Ok(()));
        }
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

//! Where the thread of the HTTP process may run: not on the core of the thread that wakes it.
//!
//! Linux takes a process that is woken by a message over a socket for one that its sender is about to wait for, and runs it in
//! the sender's place. The sender here is the thread that leads all others of a worker: while it does not run, none of them has
//! anything to do. On any other core the woken process costs that core's part alone.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The cores that a thread may run on. Threads and processes that it starts may run on the same, so it takes all before; its
/// runtime starts no threads for blocking work.
#[derive(Debug, Clone)]
pub(crate) struct Cores {
    /// `None` where that is not to be had: nothing is changed then.
    allowed: Option<CpuSet>,
    /// Whether one was left. As long as none was, what the system gives or takes holds.
    left: Arc<AtomicBool>,
}

impl Cores {
    /// Those of this thread as it is.
    pub(crate) fn of_this_thread() -> Self {
        Self { allowed: sched_getaffinity(None).ok(), left: Arc::default() }
    }

    /// This thread leaves `core`, if there is another one.
    pub(crate) fn leave(&self, core: usize) {
        let Some(mut cores) = self.allowed else { return };
        if core >= CpuSet::MAX_CPU {
            return;
        }
        cores.unset(core);
        if cores.count() > 0 {
            self.left.store(true, Ordering::Relaxed);
            Self::set(&cores);
        }
    }

    /// This thread may run on all again.
    pub(crate) fn take_all(&self) {
        if let (Some(cores), true) = (&self.allowed, self.left.swap(false, Ordering::Relaxed)) {
            Self::set(cores);
        }
    }

    fn set(cores: &CpuSet) {
        // Refused only where the cores have been taken from the process meanwhile; it runs where it is let then.
        if let Err(error) = sched_setaffinity(None, cores) {
            tracing::debug!(%error, "the cores of the server's thread stay as they are");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_is_left_and_taken_again() {
        // On a thread of its own: others of the test keep their cores.
        std::thread::spawn(|| {
            let cores = Cores::of_this_thread();
            let all = sched_getaffinity(None).unwrap();
            let first = (0..CpuSet::MAX_CPU).find(|&core| all.is_set(core)).unwrap();
            cores.leave(first);
            let left = sched_getaffinity(None).unwrap();
            assert_eq!(left.is_set(first), all.count() == 1, "the only one stays");
            assert_eq!(left.count(), (all.count() - 1).max(1));
            cores.leave(CpuSet::MAX_CPU + 7);
            cores.take_all();
            assert_eq!(sched_getaffinity(None).unwrap(), all);
        })
        .join()
        .unwrap();
    }
}

//! Items of a parallel region, shared out in contiguous parts.

use std::sync::atomic::{AtomicU64, Ordering};

/// A thread takes items from the front of its own part, so that it reads one sequential stream; with none left there, from
/// the back of the others' parts, so that no thread waits for a slow one longer than an item takes.
#[derive(Debug)]
pub(crate) struct Shares {
    /// First item left, and in the high half the end.
    parts: Vec<Part>,
}

/// Alone in its cache line, and in the one that is fetched with it.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Part(AtomicU64);

impl Shares {
    /// For `threads`; without items.
    pub(crate) fn new(threads: usize) -> Self {
        Self { parts: (0..threads).map(|_| Part::default()).collect() }
    }

    /// Shares out `items` to the first `threads` threads, each as many as the others. Call it when no item is left. What was
    /// written before is seen by whoever takes an item.
    pub(crate) fn reset(&self, items: u32, threads: usize) {
        let at = |thread: usize| u64::from(items) * thread.min(threads) as u64 / threads as u64;
        for (thread, part) in self.parts.iter().enumerate() {
            part.0.store(at(thread + 1) << 32 | at(thread), Ordering::Release);
        }
    }

    /// An item for `thread`, each once; `None` when none is left.
    pub(crate) fn take(&self, thread: usize) -> Option<usize> {
        let threads = self.parts.len();
        let own = change(&self.parts[thread].0, |first, end| ((first + 1, end), first));
        own.or_else(|| {
            let mut others = (thread + 1..threads).chain(0..thread);
            others.find_map(|other| change(&self.parts[other].0, |first, end| ((first, end - 1), end - 1)))
        })
    }
}

/// Applies `take` to a part that is not empty; it gives what is left and the item taken.
///
/// That a part holds the same numbers again after all its items were taken and others shared out does no harm: what is taken
/// is an item of the present ones, once.
fn change(part: &AtomicU64, take: impl Fn(u64, u64) -> ((u64, u64), u64)) -> Option<usize> {
    let mut found = part.load(Ordering::Relaxed);
    loop {
        let (first, end) = (found & 0xFFFF_FFFF, found >> 32);
        if first >= end {
            return None;
        }
        let ((first, end), item) = take(first, end);
        match part.compare_exchange_weak(found, end << 32 | first, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => return Some(item as usize),
            Err(now) => found = now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_taken_once_own_ones_in_order() {
        for (items, threads) in [(0, 1), (1, 3), (7, 2), (100, 3)] {
            let shares = Shares::new(threads);
            shares.reset(items, threads);
            let mut taken: Vec<usize> = std::iter::from_fn(|| shares.take(0)).collect();
            let own = items as usize / threads;
            assert!(taken[..own].iter().copied().eq(0..own));
            taken.sort_unstable();
            assert!(taken.into_iter().eq(0..items as usize), "{items} items, {threads} threads");
            assert!((0..threads).all(|thread| shares.take(thread).is_none()));
        }
    }

    #[test]
    fn fewer_threads_have_larger_parts() {
        let shares = Shares::new(3);
        shares.reset(10, 1);
        assert!(std::iter::from_fn(|| shares.take(0)).eq(0..10), "all in order");
        shares.reset(10, 2);
        assert_eq!(shares.take(1), Some(5));
        assert_eq!(shares.take(2), Some(4), "a thread without a part takes from the back of the others'");
        assert_eq!(std::iter::from_fn(|| shares.take(0)).count(), 8);
    }

    #[test]
    fn threads_share_all_items() {
        let shares = &Shares::new(4);
        shares.reset(10_000, 4);
        let taken: Vec<usize> = std::thread::scope(|scope| {
            let work = |thread| scope.spawn(move || std::iter::from_fn(|| shares.take(thread)).collect::<Vec<_>>());
            let threads: Vec<_> = (0..4).map(work).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let mut sorted = taken;
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..10_000));
    }
}

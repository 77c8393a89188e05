//! Causal attention of rows over the KV cache.
//!
//! Positions are worked on by pages of 256: for each page the exact softmax over its scores, then the weighted sum of its
//! values; pages are merged in ascending order. What a page contributes to a row, and the order of merging, depend on
//! nothing but the row's position, so the result's bits do not depend on threads or on the other rows of a call.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
pub(crate) mod portable;

use crate::elementwise::{exp, exp_shifted};
use crate::kv::{KvShape, PAGE_POSITIONS, Page};
use crate::memory::{Scratch, Shared};
use crate::pool::{JobPanicked, Pool};
use crate::table::KernelTable;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows that share a pass over a page in prefill.
const ROWS_PER_ITEM: usize = 16;

/// All query heads of one KV head over one page.
#[derive(Debug)]
pub struct ChunkJob {
    /// Query heads × head dim, scaled by `1 / sqrt(head dim)`.
    pub(crate) q: *const f32,
    pub(crate) heads: usize,
    pub(crate) shape: KvShape,
    /// The KV head's keys in the page.
    pub(crate) keys: *const u16,
    /// The KV head's values in the page.
    pub(crate) values: *const u16,
    /// Positions of the page up to the row's own, 1 to 256.
    pub(crate) len: usize,
    /// Of these the first that counts; below `len`.
    pub(crate) first: usize,
    /// Room for 256 scores a head.
    pub(crate) scores: *mut f32,
    /// Largest score of each head.
    pub(crate) max: *mut f32,
    /// Sum of `exp(score - max)` of each head.
    pub(crate) sum: *mut f32,
    /// Weighted sums of values: heads × padded head dim.
    pub(crate) acc: *mut f32,
}

/// Turns scores into weights `exp(score - max)`; returns maximum and sum. Those before `first` do not count: their weight is 0.
#[inline(always)]
pub(crate) fn soften(scores: &mut [f32], first: usize) -> (f32, f32) {
    scores[..first].fill(f32::NEG_INFINITY);
    const LANES: usize = 16;
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = scores.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(chunk[lane], lanes[lane]);
        }
    }
    for (lane, &score) in rest.iter().enumerate() {
        lanes[lane] = larger(score, lanes[lane]);
    }
    let max = lanes.iter().fold(f32::NEG_INFINITY, |max, &lane| larger(lane, max));
    (max, exp_shifted(scores, max))
}

/// A row's view of the cache in one layer.
#[derive(Debug, Clone, Copy)]
pub struct RowPages<'a> {
    /// Pages of its sequence.
    pub pages: &'a [Page],
    /// Its position: it attends to positions up to and including it.
    pub position: usize,
    /// The first position it attends to: 0 without a window.
    pub first: usize,
}

impl RowPages<'_> {
    /// The first page it attends to.
    fn first_page(&self) -> usize {
        self.first / PAGE_POSITIONS
    }
}

/// Softmax state of the query heads of one KV head: where a [`Scratch`] keeps it.
#[derive(Debug, Clone, Copy)]
struct State {
    max: *mut f32,
    sum: *mut f32,
    acc: *mut f32,
}

/// Attention of a segment; keeps its scratch from call to call.
#[derive(Debug, Default)]
pub struct Attention {
    threads: Vec<Scratch>,
    partial: Scratch,
}

/// Sizes of one layer's attention.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    shape: KvShape,
    /// Query heads of a KV head.
    group: usize,
}

impl Sizes {
    /// Elements of a state: maxima, sums, accumulators.
    fn state(self) -> usize {
        self.group * (2 + self.shape.padded_dim())
    }

    fn scores(self) -> usize {
        self.group * PAGE_POSITIONS
    }

    fn q_width(self) -> usize {
        self.shape.kv_heads * self.group * self.shape.head_dim
    }
}

impl Attention {
    /// Without scratch yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Attends `q` (rows × query heads × head dim, scaled) to the cache; writes `out` of the same shape.
    ///
    /// # Errors
    /// [`JobPanicked`].
    ///
    /// # Panics
    /// When `q` and `out` are not rows × a multiple of the KV heads × head dim long, a row's pages end before its position, or
    /// its first position is behind it.
    pub fn run(
        &mut self,
        pool: &Pool,
        table: &KernelTable,
        shape: KvShape,
        rows: &[RowPages<'_>],
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), JobPanicked> {
        if rows.is_empty() {
            return Ok(());
        }
        let sizes = Sizes { shape, group: q.len() / rows.len() / (shape.kv_heads * shape.head_dim) };
        assert!(q.len() == rows.len() * sizes.q_width() && out.len() == q.len());
        assert!(rows.iter().all(|row| row.pages.len() > row.position / PAGE_POSITIONS && row.first <= row.position));
        let scratch_len = sizes.scores() + sizes.state() * (ROWS_PER_ITEM + 1);
        self.threads.resize_with(pool.threads().max(self.threads.len()), Scratch::new);
        self.threads.iter_mut().for_each(|scratch| scratch.reserve::<f32>(scratch_len));
        // The choice changes who does what, not what is done.
        if rows.len() * shape.kv_heads < 8 * pool.threads() {
            self.by_page(pool, table, sizes, rows, q, out)
        } else {
            self.by_rows(pool, table, sizes, rows, q, out)
        }
    }

    /// Few rows: an item is one KV head of one row over one page; the caller merges.
    #[allow(unsafe_code, reason = "threads write disjoint states")]
    fn by_page(
        &mut self,
        pool: &Pool,
        table: &KernelTable,
        sizes: Sizes,
        rows: &[RowPages<'_>],
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), JobPanicked> {
        let pages = rows.iter().map(|row| row.position / PAGE_POSITIONS + 1).max().unwrap_or(0);
        let kv_heads = sizes.shape.kv_heads;
        let items = rows.len() * kv_heads * pages;
        self.partial.reserve::<f32>(items * sizes.state());
        let partial = Shared::new(self.partial.get_mut::<f32>(items * sizes.state()));
        let threads = Shared::new(&mut self.threads);
        let next = AtomicUsize::new(0);
        let work = |thread: usize| {
            // SAFETY: one scratch a thread.
            let scores = unsafe { &mut threads.slice(thread, 1)[0] }.get_mut::<f32>(sizes.scores());
            loop {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    return;
                }
                let (row, head, page) = (item / (kv_heads * pages), item / pages % kv_heads, item % pages);
                // SAFETY: the item's own state; `run` checked lengths and pages.
                unsafe {
                    let state = state_at(partial.ptr().add(item * sizes.state()), sizes);
                    attend_page(table, sizes, rows[row], &q[row * sizes.q_width()..], head, page, scores, state);
                }
            }
        };
        if items == 1 || rows.iter().all(|row| row.position < 32) {
            // Less work than waking the others.
            single(&work);
        } else {
            pool.run(&work)?;
        }
        for (row, view) in rows.iter().enumerate() {
            for head in 0..kv_heads {
                let item = (row * kv_heads + head) * pages;
                let first = view.first_page();
                // SAFETY: the states were written above; nobody else holds them now.
                unsafe {
                    let total = state_at(partial.ptr().add((item + first) * sizes.state()), sizes);
                    for page in first + 1..=view.position / PAGE_POSITIONS {
                        merge(sizes, total, state_at(partial.ptr().add((item + page) * sizes.state()), sizes));
                    }
                    finish(sizes, total, head, &mut out[row * sizes.q_width()..(row + 1) * sizes.q_width()]);
                }
            }
        }
        Ok(())
    }

    /// Many rows: an item is one KV head of some rows over all their pages.
    #[allow(unsafe_code, reason = "threads write disjoint rows and heads")]
    fn by_rows(
        &mut self,
        pool: &Pool,
        table: &KernelTable,
        sizes: Sizes,
        rows: &[RowPages<'_>],
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), JobPanicked> {
        let kv_heads = sizes.shape.kv_heads;
        let blocks = rows.len().div_ceil(ROWS_PER_ITEM);
        let out = Shared::new(out);
        let threads = Shared::new(&mut self.threads);
        let next = AtomicUsize::new(0);
        pool.run(&|thread| {
            // SAFETY: one scratch a thread.
            let scratch = unsafe { &mut threads.slice(thread, 1)[0] };
            let scratch = scratch.get_mut::<f32>(sizes.scores() + sizes.state() * (ROWS_PER_ITEM + 1));
            let (scores, states) = scratch.split_at_mut(sizes.scores());
            let states = states.as_mut_ptr();
            loop {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= blocks * kv_heads {
                    return;
                }
                // The last rows see the most positions: they go first.
                let (block, head) = (blocks - 1 - item / kv_heads, item % kv_heads);
                let first = block * ROWS_PER_ITEM;
                let views = &rows[first..rows.len().min(first + ROWS_PER_ITEM)];
                let state = |index: usize| {
                    // SAFETY: one state for each row of an item, and one for the page at hand.
                    unsafe { state_at(states.add(index * sizes.state()), sizes) }
                };
                let pages = views.iter().map(|view| view.position / PAGE_POSITIONS + 1).max().unwrap_or(0);
                let from = views.iter().map(RowPages::first_page).min().unwrap_or(0);
                for page in from..pages {
                    for (index, view) in views.iter().enumerate() {
                        if page > view.position / PAGE_POSITIONS || page < view.first_page() {
                            continue;
                        }
                        let is_first = page == view.first_page();
                        let into = if is_first { state(index) } else { state(ROWS_PER_ITEM) };
                        let q = &q[(first + index) * sizes.q_width()..];
                        // SAFETY: this thread's own states; `run` checked lengths and pages.
                        unsafe {
                            attend_page(table, sizes, *view, q, head, page, scores, into);
                            if !is_first {
                                merge(sizes, state(index), into);
                            }
                        }
                    }
                }
                for index in 0..views.len() {
                    let heads = sizes.group * sizes.shape.head_dim;
                    // SAFETY: the results of this KV head's query heads in this row are this item's own.
                    unsafe {
                        let out = out.slice((first + index) * sizes.q_width() + head * heads, heads);
                        finish(sizes, state(index), 0, out);
                    }
                }
            }
        })
    }
}

/// Runs the whole of a job on the calling thread, in its floating-point mode.
fn single(work: &dyn Fn(usize)) {
    let _flush = crate::pool::FlushDenormals::new();
    work(0);
}

/// # Safety
/// `at` points to [`Sizes::state`] elements.
#[allow(unsafe_code, reason = "parts of a scratch")]
unsafe fn state_at(at: *mut f32, sizes: Sizes) -> State {
    // SAFETY: inside the state's elements.
    unsafe { State { max: at, sum: at.add(sizes.group), acc: at.add(2 * sizes.group) } }
}

/// # Safety
/// `into` and `scores` are this thread's own; `q` starts at the row; the row's pages reach its position.
#[allow(unsafe_code, reason = "calls a kernel of the detected instruction set")]
unsafe fn attend_page(
    table: &KernelTable,
    sizes: Sizes,
    row: RowPages<'_>,
    q: &[f32],
    head: usize,
    page: usize,
    scores: &mut [f32],
    into: State,
) {
    let first = page * PAGE_POSITIONS;
    if first > row.position || page < row.first_page() {
        return;
    }
    let elements = row.pages[page].elements(sizes.shape);
    let job = ChunkJob {
        q: q[head * sizes.group * sizes.shape.head_dim..].as_ptr(),
        heads: sizes.group,
        shape: sizes.shape,
        keys: elements[sizes.shape.keys_at(head)..].as_ptr(),
        values: elements[sizes.shape.values_at(head)..].as_ptr(),
        len: (row.position + 1 - first).min(PAGE_POSITIONS),
        first: row.first.saturating_sub(first),
        scores: scores.as_mut_ptr(),
        max: into.max,
        sum: into.sum,
        acc: into.acc,
    };
    // SAFETY: the caller's promise.
    unsafe { (table.chunk)(&job) };
}

/// Merges the state of a later page into `total`.
///
/// # Safety
/// Both are states that nobody else holds.
#[allow(unsafe_code, reason = "states are parts of a scratch")]
unsafe fn merge(sizes: Sizes, total: State, page: State) {
    let dim = sizes.shape.padded_dim();
    for head in 0..sizes.group {
        // SAFETY: head `head` of both states.
        unsafe {
            let (a, b) = (*total.max.add(head), *page.max.add(head));
            let max = if a > b { a } else { b };
            let (keep, take) = (exp(a - max), exp(b - max));
            *total.max.add(head) = max;
            *total.sum.add(head) = *total.sum.add(head) * keep + *page.sum.add(head) * take;
            let into = std::slice::from_raw_parts_mut(total.acc.add(head * dim), dim);
            let from = std::slice::from_raw_parts(page.acc.add(head * dim), dim);
            for (into, from) in into.iter_mut().zip(from) {
                *into = *into * keep + from * take;
            }
        }
    }
}

/// Writes the heads' results, from KV head `head` of `out` on.
///
/// # Safety
/// `state` is a state that nobody else holds.
#[allow(unsafe_code, reason = "states are parts of a scratch")]
unsafe fn finish(sizes: Sizes, state: State, head: usize, out: &mut [f32]) {
    let dim = sizes.shape.head_dim;
    let out = &mut out[head * sizes.group * dim..(head + 1) * sizes.group * dim];
    for (index, out) in out.chunks_exact_mut(dim).enumerate() {
        // SAFETY: head `index` of the state.
        let (sum, acc) = unsafe {
            let acc = state.acc.add(index * sizes.shape.padded_dim());
            (*state.sum.add(index), std::slice::from_raw_parts(acc, dim))
        };
        let scale = 1.0 / sum;
        for (out, acc) in out.iter_mut().zip(acc) {
            *out = acc * scale;
        }
    }
}

#[cfg(test)]
mod tests;

//! The order in which a panel job is worked on: part after part of the input features, and in each the input rows in tiles.
#![allow(unsafe_code, reason = "raw pointers of a job")]

use super::{PANEL_ROWS, PART_BLOCKS, PanelJob, scratch_bytes};
use crate::activations::BLOCK;
use crate::packed::group_bytes;
use std::arch::x86_64::*;

/// Blocks of 32 input features that are unpacked together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) first: usize,
    pub(crate) count: usize,
}

impl Part {
    /// Bytes of a group before the part.
    pub(crate) fn offset_bytes(self, job: &PanelJob<'_>) -> usize {
        group_bytes(job.weight_type, self.first * BLOCK)
    }

    /// Blocks of the weights' type, which spans `len` input features.
    pub(crate) fn blocks_of(self, len: usize) -> usize {
        self.count * BLOCK / len
    }
}

/// Up to three input rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tile {
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// Sixteen sums for each of its rows, which go on from the part before.
    pub(crate) sums: *mut f32,
}

/// Parts and tiles of a job: [`Tiles::part`], then [`Tiles::next`] until there is none, again; [`Tiles::store`] at the end.
#[derive(Debug)]
pub(crate) struct Tiles<'a> {
    job: &'a PanelJob<'a>,
    blocks: usize,
    part: Part,
    tile: Tile,
    /// Where a part is unpacked to.
    pub(crate) panel: *mut u8,
    /// Sixteen for each input row.
    sums: *mut f32,
    fetched: usize,
}

impl<'a> Tiles<'a> {
    /// Starts with sums of zero. They lie in `scratch`, and behind them the part.
    ///
    /// # Panics
    /// When the scratch is too short or not aligned to cache lines.
    pub(crate) fn new(job: &'a PanelJob<'a>, scratch: &'a mut [u8]) -> Self {
        let blocks = job.cols / BLOCK;
        let sums_bytes = job.tokens * PANEL_ROWS * size_of::<f32>();
        assert!(blocks > 0 && scratch.len() >= scratch_bytes(job.cols, job.tokens));
        assert!(scratch.as_ptr().addr().is_multiple_of(64));
        let (sums, panel) = scratch.split_at_mut(sums_bytes);
        sums.fill(0);
        Self {
            job,
            blocks,
            part: Part { first: 0, count: 0 },
            tile: Tile { first: 0, count: 0, sums: std::ptr::null_mut() },
            panel: panel.as_mut_ptr(),
            sums: sums.as_mut_ptr().cast(),
            fetched: 0,
        }
    }

    /// The next part to unpack.
    #[inline(always)]
    pub(crate) fn part(&mut self) -> Option<Part> {
        self.part.first += self.part.count;
        self.part.count = PART_BLOCKS.min(self.blocks - self.part.first);
        (self.tile.first, self.tile.count) = (0, 0);
        (self.part.count > 0).then_some(self.part)
    }

    /// The next input rows to run against the part: three at a time; four are left as two and two. Asks for as much of the
    /// next panel as the work done, so that it comes to the cache while this one is worked on.
    #[inline(always)]
    pub(crate) fn next(&mut self) -> Option<Tile> {
        self.tile.first += self.tile.count;
        let (job, done) = (self.job, self.part.first * self.job.tokens + self.part.count * self.tile.first);
        let wanted = job.following.len() * done / (self.blocks * job.tokens.max(1));
        for at in (self.fetched..wanted).step_by(64) {
            // SAFETY: a hint of the architecture's baseline; the address is that of a byte.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(job.following[at..].as_ptr().cast()) };
        }
        self.fetched = self.fetched.max(wanted.next_multiple_of(64));
        let left = job.tokens - self.tile.first;
        self.tile.count = if left == 4 { 2 } else { left.min(3) };
        // SAFETY: the sums of the tile's rows, or the end of all.
        self.tile.sums = unsafe { self.sums.add(self.tile.first * PANEL_ROWS) };
        (left > 0).then_some(self.tile)
    }

    /// Stores the sums of all rows.
    #[inline(always)]
    pub(crate) fn store(self) {
        let job = self.job;
        for token in 0..job.tokens {
            // SAFETY: the sums of an input row, and the results of the panel's rows for it, which the job's pointers cover.
            unsafe {
                let (sums, out) = (self.sums.add(token * PANEL_ROWS), job.out.add(token * job.stride));
                if job.rows == PANEL_ROWS {
                    std::ptr::copy_nonoverlapping(sums, out, PANEL_ROWS);
                } else {
                    std::ptr::copy_nonoverlapping(sums, out, job.rows);
                }
            }
        }
    }
}

/// Runs a panel job: unpacks part after part, and multiplies each with three, two or one input rows of the form `$form` at a time.
/// `$more` are further arguments of the tiles. A macro, so that it has the instructions of the kernel that it stands in, and tiles
/// may be inlined there.
///
/// The kernel promises that the job's pointers cover the groups of its rows, its input rows and its results.
macro_rules! run_tiles {
    ($job:ident, $scratch:ident, $form:ident, $unpack:path, [$tile3:expr, $tile2:expr, $tile1:expr] $(, $more:expr)?) => {{
        let blocks = $job.cols / $crate::activations::BLOCK;
        let mut tiles = $crate::gemm::tiles::Tiles::new($job, $scratch);
        while let Some(part) = tiles.part() {
            // SAFETY: the kernel's promise; the scratch holds a part.
            unsafe { $unpack($job, part, tiles.panel) };
            while let Some(tile) = tiles.next() {
                // SAFETY: the tile's input rows; the part is unpacked.
                unsafe {
                    let (panel, input) = (tiles.panel, $job.$form.add(tile.first * blocks + part.first));
                    match tile.count {
                        3 => $tile3(panel, input, blocks, part.count, tile.sums $(, $more)?),
                        2 => $tile2(panel, input, blocks, part.count, tile.sums $(, $more)?),
                        _ => $tile1(panel, input, blocks, part.count, tile.sums $(, $more)?),
                    }
                }
            }
        }
        tiles.store();
    }};
}
pub(crate) use run_tiles;

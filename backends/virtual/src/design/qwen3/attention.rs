//! Attention over the KV cache, 16 rows at a time.

use super::{BLOCK_ROWS, Dimensions, HEAD_DIM, math, ports};
use crate::array::program::Streams;

/// Attention of one token in progress.
#[derive(Debug)]
pub(super) struct Attention {
    context: usize,
    blocks: usize,
    /// Query heads of a KV head.
    queries_of_kv: usize,
    kv_heads_of_half: usize,
    scale: f32,
    /// Rotated query heads, bf16's values.
    query: Vec<f32>,
    heads: Vec<Head>,
    /// Blocks taken of each half, and whether the next are values.
    halves: [Half; 2],
    block: Vec<u8>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Half {
    blocks: usize,
    has_scores: bool,
}

/// A query head: softmax and sum so far, relative to the largest score so far.
#[derive(Debug, Clone)]
struct Head {
    scores: [f32; BLOCK_ROWS],
    largest: f32,
    weight: f32,
    sum: [f32; HEAD_DIM],
}

impl Attention {
    /// Attention of `query` over `context` positions.
    pub(super) fn new(dimensions: &Dimensions, context: u32, query: Vec<f32>) -> Self {
        let context = context as usize;
        let head = Head { scores: [0.0; BLOCK_ROWS], largest: f32::NEG_INFINITY, weight: 0.0, sum: [0.0; HEAD_DIM] };
        Self {
            context,
            blocks: context.div_ceil(BLOCK_ROWS),
            queries_of_kv: dimensions.heads / dimensions.kv_heads,
            kv_heads_of_half: dimensions.kv_heads / 2,
            scale: 1.0 / (HEAD_DIM as f32).sqrt(),
            query,
            heads: vec![head; dimensions.heads],
            halves: [Half::default(); 2],
            block: vec![0; BLOCK_ROWS * dimensions.cache_row_bytes()],
        }
    }

    /// Takes one block of keys or values that has arrived; `false` when none has.
    pub(super) fn step(&mut self, streams: &mut Streams<'_>) -> bool {
        for half in 0..2 {
            let Half { blocks, has_scores } = self.halves[half];
            let input = if has_scores { ports::values(half) } else { ports::keys(half) };
            if blocks == self.blocks || !streams.read(input, &mut self.block) {
                continue;
            }
            // Rows beyond the context are whatever the cache held before.
            let rows = (self.context - blocks * BLOCK_ROWS).min(BLOCK_ROWS);
            match has_scores {
                true => self.add_values(half, rows),
                false => self.score(half, rows),
            }
            self.halves[half] = Half { blocks: blocks + usize::from(has_scores), has_scores: !has_scores };
            return true;
        }
        false
    }

    pub(super) fn is_done(&self) -> bool {
        self.halves.iter().all(|half| half.blocks == self.blocks)
    }

    pub(super) fn progress(&self) -> String {
        let [first, second] = self.halves.map(|half| half.blocks);
        format!("{first} and {second} of {} blocks of the cache for a context of {}", self.blocks, self.context)
    }

    /// The weighted sums of all heads, rounded to bf16.
    pub(super) fn output(&self) -> Vec<f32> {
        self.heads.iter().flat_map(|head| head.sum.iter().map(|sum| math::rounded(sum / head.weight))).collect()
    }

    /// Query heads of a half, and the index of their KV head within the row.
    fn heads_of(&self, half: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (queries, kv_heads) = (self.queries_of_kv, self.kv_heads_of_half);
        let first = half * kv_heads * queries;
        (0..kv_heads * queries).map(move |index| (first + index, index / queries))
    }

    /// A head of a row of the block that has arrived.
    fn row(&self, row: usize, kv_head: usize) -> &[[u8; 2]] {
        let at = (row * self.kv_heads_of_half + kv_head) * 2 * HEAD_DIM;
        self.block[at..at + 2 * HEAD_DIM].as_chunks().0
    }

    fn score(&mut self, half: usize, rows: usize) {
        for (head, kv_head) in self.heads_of(half) {
            let query = &self.query[head * HEAD_DIM..(head + 1) * HEAD_DIM];
            let mut scores = [f32::NEG_INFINITY; BLOCK_ROWS];
            for (row, score) in scores.iter_mut().enumerate().take(rows) {
                let key = self.row(row, kv_head).iter().zip(query);
                *score = key.map(|(key, query)| math::from_bf16(*key) * query).sum::<f32>() * self.scale;
            }
            self.heads[head].scores = scores;
        }
    }

    fn add_values(&mut self, half: usize, rows: usize) {
        for (head, kv_head) in self.heads_of(half) {
            let mut state = self.heads[head].clone();
            let largest = state.scores.iter().fold(state.largest, |largest, score| largest.max(*score));
            let shrink = (state.largest - largest).exp();
            state.largest = largest;
            state.weight *= shrink;
            state.sum.iter_mut().for_each(|sum| *sum *= shrink);
            for row in 0..rows {
                let weight = (state.scores[row] - largest).exp();
                state.weight += weight;
                for (sum, value) in state.sum.iter_mut().zip(self.row(row, kv_head)) {
                    *sum += weight * math::from_bf16(*value);
                }
            }
            self.heads[head] = state;
        }
    }
}

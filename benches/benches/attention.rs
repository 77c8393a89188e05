//! Attention over the f16 cache: multiply-accumulates a second for one row (decode) and many (prefill), beside a loop that
//! only multiplies.

mod common;

use common::{Case, Random, compare, thread_counts};
use npuhal_core::stage::{Row, SequenceId};
use npuhal_cpu::attention::{Attention, RowPages};
use npuhal_cpu::features::Features;
use npuhal_cpu::kv::{KvCache, KvShape};
use npuhal_cpu::limits::{self, MULTIPLIES, Multiply};
use npuhal_cpu::pool::Pool;
use std::hint::black_box;

const DEPTH: usize = 512;

fn main() {
    let features = Features::detect();
    let table = features.table();
    // Query and KV heads of two small models, and of a larger one.
    for (heads, kv_heads, head_dim) in [(9, 3, 64), (14, 2, 64), (32, 8, 128)] {
        let shape = KvShape { kv_heads, head_dim };
        let mut cache = KvCache::new(shape, 1, DEPTH, 1);
        let rows: Vec<Row> =
            (0..DEPTH as u32).map(|position| Row { sequence: SequenceId(0), token: 0, position }).collect();
        cache.admit(&rows).expect("room");
        for threads in thread_counts() {
            let pool = Pool::new(threads).expect("threads");
            let (pool, cache) = (&pool, &cache);
            let mut cases = vec![Case::new("limit of f32", threads * MULTIPLIES, || {
                limits::multiply(pool, features, Multiply::Floats).expect("no panic");
            })];
            for count in [1, 128] {
                let views: Vec<RowPages<'_>> = rows[DEPTH - count..]
                    .iter()
                    .map(|row| RowPages {
                        pages: cache.pages(0, row.sequence),
                        position: row.position as usize,
                        first: 0,
                    })
                    .collect();
                let positions: usize = views.iter().map(|view| view.position + 1).sum();
                let mut random = Random(1);
                let q: Vec<f32> = (0..count * heads * head_dim).map(|_| random.unit()).collect();
                let mut out = vec![0.0; q.len()];
                let mut attention = Attention::new();
                cases.push(Case::new(format!("{count} rows"), 2 * positions * heads * head_dim, move || {
                    attention.run(pool, table, shape, &views, &q, black_box(&mut out)).expect("no panic");
                }));
            }
            compare(&format!("attention/{heads}-{kv_heads}x{head_dim}/{threads}T"), "GMAC/s", cases);
        }
    }
}

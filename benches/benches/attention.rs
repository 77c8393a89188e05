//! Attention over the f16 cache: multiply-accumulates a second, for one row (decode) and many (prefill).

mod common;

use common::{Random, thread_counts};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use npuhal_core::stage::{Row, SequenceId};
use npuhal_cpu::attention::{Attention, RowPages};
use npuhal_cpu::features::Features;
use npuhal_cpu::kv::{KvCache, KvShape};
use npuhal_cpu::pool::Pool;
use std::hint::black_box;

const DEPTH: usize = 512;

fn attention(criterion: &mut Criterion) {
    let table = Features::detect().table();
    // Query and KV heads of two small models, and of a larger one.
    for (heads, kv_heads, head_dim) in [(9, 3, 64), (14, 2, 64), (32, 8, 128)] {
        let shape = KvShape { kv_heads, head_dim };
        let mut cache = KvCache::new(shape, 1, DEPTH, 1);
        let rows: Vec<Row> =
            (0..DEPTH as u32).map(|position| Row { sequence: SequenceId(0), token: 0, position }).collect();
        cache.admit(&rows).expect("room");
        for threads in thread_counts() {
            let pool = Pool::new(threads).expect("threads");
            let mut group = criterion.benchmark_group(format!("attention/{heads}-{kv_heads}x{head_dim}/{threads}T"));
            group.sample_size(20);
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
                group.throughput(Throughput::Elements((2 * positions * heads * head_dim) as u64));
                group.bench_function(BenchmarkId::new("rows", count), |bencher| {
                    bencher.iter(|| attention.run(&pool, table, shape, &views, &q, black_box(&mut out)));
                });
            }
            group.finish();
        }
    }
}

criterion_group!(benches, attention);
criterion_main!(benches);

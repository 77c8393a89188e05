//! Prefill products: multiply-accumulates a second, by input rows.

mod common;

use common::{Random, matrix, thread_counts};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use npuhal_cpu::activations::Activations;
use npuhal_cpu::features::Features;
use npuhal_cpu::gemm::{self, Panels};
use npuhal_cpu::pool::Pool;
use npuhal_models::WeightType;
use std::hint::black_box;

fn gemm(criterion: &mut Criterion) {
    let table = Features::detect().table();
    let (rows, cols) = (1536, 768);
    for threads in thread_counts() {
        let pool = Pool::new(threads).expect("threads");
        for tokens in [2, 8, 32, 128] {
            let mut group = criterion.benchmark_group(format!("gemm/{tokens} rows/{threads}T"));
            group.sample_size(20);
            group.throughput(Throughput::Elements((rows * cols * tokens) as u64));
            for weight_type in WeightType::ALL {
                let matrix = matrix(weight_type, rows, cols, &pool);
                let mut random = Random(1);
                let x: Vec<f32> = (0..tokens * cols).map(|_| random.unit()).collect();
                let mut input = Activations::new();
                input.reset(tokens, cols, gemm::forms(weight_type));
                input.fill(table, &x);
                let mut out = vec![0.0; tokens * rows];
                let mut panels = Panels::new();
                group.bench_function(BenchmarkId::from_parameter(weight_type.name()), |bencher| {
                    bencher.iter(|| gemm::run(&pool, table, [&matrix], &input, [black_box(&mut out)], &mut panels));
                });
            }
            group.finish();
        }
    }
}

criterion_group!(benches, gemm);
criterion_main!(benches);

//! Decode products: bytes of weights a second, beside a loop that only reads the same bytes.

mod common;

use common::{Random, matrix, read, thread_counts};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use npuhal_cpu::activations::Activations;
use npuhal_cpu::features::Features;
use npuhal_cpu::gemv;
use npuhal_cpu::pool::Pool;
use npuhal_models::WeightType;
use std::hint::black_box;

fn gemv(criterion: &mut Criterion) {
    let table = Features::detect().table();
    // In cache, and far beyond it.
    for (place, rows, cols) in [("L2", 768, 768), ("DRAM", 98_304, 1024)] {
        for threads in thread_counts() {
            let pool = Pool::new(threads).expect("threads");
            let mut group = criterion.benchmark_group(format!("gemv/{place}/{threads}T"));
            group.sample_size(20);
            for weight_type in WeightType::ALL {
                if weight_type == WeightType::F32 && place == "DRAM" {
                    continue;
                }
                let matrix = matrix(weight_type, rows, cols, &pool);
                let mut random = Random(1);
                let x: Vec<f32> = (0..cols).map(|_| random.unit()).collect();
                let mut input = Activations::new();
                input.reset(1, cols, gemv::forms(weight_type));
                input.fill(table, &x);
                let mut out = vec![0.0; rows];
                group.throughput(Throughput::Bytes(matrix.bytes().len() as u64));
                group.bench_function(BenchmarkId::new("product", weight_type.name()), |bencher| {
                    bencher.iter(|| gemv::run(&pool, table, [&matrix], &input, [black_box(&mut out)]));
                });
                group.bench_function(BenchmarkId::new("read only", weight_type.name()), |bencher| {
                    bencher.iter(|| black_box(read(&pool, matrix.bytes())));
                });
            }
            group.finish();
        }
    }
}

criterion_group!(benches, gemv);
criterion_main!(benches);

//! Packing a model of Qwen3-0.6B's shape, beside a plain copy of the bytes it writes. Both end on the disk (fsync).

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use npuhal_core::stage::Control;
use npuhal_models::q4nx::verify::verify;
use npuhal_models::q4nx::{PackOptions, pack};
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use std::fs::{self, File};
use std::time::Duration;

fn packing(criterion: &mut Criterion) {
    for (name, weights) in [("Q4_K_M", Weights::LikeQ4KM), ("mixed", Weights::Mixed)] {
        let mut spec = ModelSpec::small(Architecture::Qwen3, weights);
        (spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.intermediate) = (1024, 16, 8, 128, 3072);
        (spec.layers, spec.spare_tokens) = (28, 151_936 - 266);
        let folder = tempfile::tempdir().expect("a temporary folder");
        let gguf = folder.path().join("model.gguf");
        spec.build().write(&gguf).expect("room for the model");
        let (packed, again) = (folder.path().join("packed"), folder.path().join("again"));
        let options = PackOptions::default();
        let report = pack(&gguf, &packed, &options, &Control::new(), &mut |_| {}).expect("a packed model");
        let model = packed.join("model.q4nx");

        let mut group = criterion.benchmark_group(format!("pack/{name}"));
        group.sample_size(10).warm_up_time(Duration::from_millis(1)).throughput(Throughput::Bytes(report.model_bytes));
        group.bench_function("pack", |bencher| {
            bencher.iter_batched(
                || drop(fs::remove_dir_all(&again)),
                |()| pack(&gguf, &again, &options, &Control::new(), &mut |_| {}).expect("a packed model"),
                BatchSize::PerIteration,
            );
        });
        let copy = folder.path().join("copy");
        group.bench_function("plain copy", |bencher| {
            bencher.iter_batched(
                || drop(fs::remove_file(&copy)),
                |()| {
                    fs::copy(&model, &copy).expect("room for a copy");
                    File::open(&copy).and_then(|file| file.sync_all()).expect("a copy on the disk");
                },
                BatchSize::PerIteration,
            );
        });
        group.bench_function("verify", |bencher| {
            bencher.iter(|| verify(&gguf, &packed, None, &Control::new(), &mut |_, _| {}).expect("a report"));
        });
        group.finish();
    }
}

criterion_group!(benches, packing);
criterion_main!(benches);

//! What a token of the SmolLM engine costs the host: header, submission and wait on a virtual NPU that does no work, new keys
//! and values; and the head that
//! follows on the CPU, beside a loop that only reads its weights.
//!
//! `NPUHAL_XDNA1_PACKAGE` names a SmolLM package; without it one of 30 layers with random weights is made first.

mod common;

use common::{Random, matrix, thread_counts};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use npuhal_amdxdna::NpuDevice;
use npuhal_core::card::DeviceCard;
use npuhal_core::device::{
    Arg, BufferRef, BufferSpec, Completion, Context, ContextState, Deadline, Device, Kernel, Program, RunIndex,
    Runlist, Submission,
};
use npuhal_core::error::{DeviceError, RunError};
use npuhal_core::stage::{Control, HiddenRows, Row, Segment, SequenceId, Want};
use npuhal_cpu::activations::{Activations, Precision};
use npuhal_cpu::features::Features;
use npuhal_cpu::gemv;
use npuhal_cpu::limits;
use npuhal_cpu::pool::Pool;
use npuhal_models::WeightType;
use npuhal_models::package::{Family, OpenOptions, Package};
use npuhal_tests::kit::package::SmallPackage;
use npuhal_virtual::kit::{Xdna1Design, Xdna1Kit, Xdna1Model};
use npuhal_virtual::{VirtualDevice, VirtualSpec};
use npuhal_xdna1::PackageWeights;
use npuhal_xdna1::kit::Kit;
use npuhal_xdna1::segment::{DISPATCH_TIMEOUT, Engine, SegmentOptions};
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A virtual NPU that looks at no control code (`array=skip`). The outputs that no core writes are written here, in time that is
/// counted apart.
struct Skipping(NpuDevice);

static OUTPUT_NS: AtomicU64 = AtomicU64::new(0);

impl Device for Skipping {
    fn card(&self) -> &DeviceCard {
        self.0.card()
    }

    fn allocate(&self, spec: &BufferSpec) -> Result<BufferRef, DeviceError> {
        self.0.allocate(spec)
    }

    fn open_context(&self, boot: &Program<'_>) -> Result<Box<dyn Context>, DeviceError> {
        Ok(Box::new(SkippingContext(self.0.open_context(boot)?)))
    }
}

struct SkippingContext(Box<dyn Context>);

impl Context for SkippingContext {
    fn load(&mut self, program: &Program<'_>) -> Result<Box<dyn Kernel>, DeviceError> {
        self.0.load(program)
    }

    fn runlist(&mut self) -> Box<dyn Runlist> {
        Box::new(SkippingList { list: self.0.runlist(), outputs: Vec::new() })
    }

    fn state(&self) -> ContextState {
        self.0.state()
    }
}

struct SkippingList {
    list: Box<dyn Runlist>,
    /// New keys and values, and the hidden row.
    outputs: Vec<BufferRef>,
}

impl Runlist for SkippingList {
    fn push(&mut self, kernel: &dyn Kernel, args: &[Arg]) -> Result<RunIndex, DeviceError> {
        let buffer = |arg: &Arg| if let Arg::Buffer(buffer) = arg { Some(buffer.clone()) } else { None };
        self.outputs = args.iter().filter_map(buffer).skip(2).collect();
        self.list.push(kernel, args)
    }

    fn rebind(&mut self, run: RunIndex, kernel: &dyn Kernel) -> Result<(), DeviceError> {
        self.list.rebind(run, kernel)
    }

    fn set_arg(&mut self, run: RunIndex, index: usize, arg: &Arg) -> Result<(), DeviceError> {
        self.list.set_arg(run, index, arg)
    }

    fn len(&self) -> usize {
        self.list.len()
    }

    fn submit(&mut self) -> Result<Box<dyn Submission>, DeviceError> {
        Ok(Box::new(SkippingSubmission { submission: self.list.submit()?, outputs: self.outputs.clone() }))
    }
}

struct SkippingSubmission {
    submission: Box<dyn Submission>,
    outputs: Vec<BufferRef>,
}

impl Submission for SkippingSubmission {
    fn wait(self: Box<Self>, deadline: Deadline) -> Result<Completion, RunError> {
        let completion = self.submission.wait(deadline)?;
        let started = Instant::now();
        for buffer in &self.outputs {
            buffer.fill(&mut |bytes| bytes.fill(1))?;
        }
        OUTPUT_NS.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(completion)
    }
}

fn engine(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = std::env::var_os("NPUHAL_XDNA1_PACKAGE").map_or_else(
        || SmallPackage { family: Family::Llama, layers: 30, vocab_size: 64, seed: 1 }.write(folder.path(), "p", &[]),
        PathBuf::from,
    );
    let options = OpenOptions { verify: false, control: &Control::new(), progress: &mut |_, _| () };
    let package = Package::open(&path, options).expect("a package");
    let shape = package.metadata().shape;
    let model = Xdna1Model {
        hidden: shape.hidden_size,
        intermediate: shape.intermediate_size,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        layers: shape.layers,
        vocab: shape.vocab_size,
    };
    for (name, contents) in Xdna1Kit::of(&model, &[Xdna1Design::SmolLmEngine]).expect("a kit").files {
        std::fs::write(folder.path().join(name), contents).expect("a file of the kit");
    }
    let kit = Kit::read(folder.path()).expect("a kit");
    let spec: VirtualSpec = "virtual:npu1?array=skip".parse().expect("a device");
    let hardware = VirtualDevice::new(&spec);
    let device = NpuDevice::open(hardware.connect(), &hardware.identity()).expect("a device");
    let options = SegmentOptions::new(64, DISPATCH_TIMEOUT);
    let weights = PackageWeights::new(&package).expect("weights");
    let mut engine = Engine::load(Arc::new(Skipping(device)), weights, 1e5, &kit, options).expect("an engine");
    engine.begin().expect("a generation");
    let mut hidden = HiddenRows::new();
    let mut position = 0;
    criterion.bench_function("xdna1 engine/host time a token", |bencher| {
        bencher.iter_custom(|tokens| {
            OUTPUT_NS.store(0, Ordering::Relaxed);
            let started = Instant::now();
            for _ in 0..tokens {
                let row = Row { sequence: SequenceId(0), token: 7, position };
                engine.forward(&[row], &mut hidden, Want::Last, &Control::new()).expect("a token");
                position = (position + 1) % 64;
                if position == 0 {
                    engine.truncate(SequenceId(0), 0);
                }
            }
            started.elapsed() - Duration::from_nanos(OUTPUT_NS.load(Ordering::Relaxed))
        });
    });
}

/// 49,152 rows of 576, as the head of every SmolLM model.
fn head(criterion: &mut Criterion) {
    let table = Features::detect().table();
    for threads in thread_counts() {
        let pool = Pool::new(threads).expect("threads");
        let matrix = matrix(WeightType::Bf16, 49_152, 576, &pool);
        let mut random = Random(1);
        let x: Vec<f32> = (0..576).map(|_| random.unit()).collect();
        let mut input = Activations::new();
        input.reset(1, 576, Precision::Bits15, gemv::forms(WeightType::Bf16, Precision::Bits15));
        input.fill(table, &x);
        let mut out = vec![0.0; 49_152];
        let mut group = criterion.benchmark_group(format!("xdna1 head/{threads}T"));
        group.sample_size(20).throughput(Throughput::Bytes(matrix.bytes().len() as u64));
        group.bench_function(BenchmarkId::from_parameter("product"), |bencher| {
            bencher.iter(|| gemv::run(&pool, table, [&matrix], &input, [black_box(&mut out)]));
        });
        group.bench_function(BenchmarkId::from_parameter("read only"), |bencher| {
            bencher.iter(|| black_box(limits::read(&pool, matrix.bytes())));
        });
        group.finish();
    }
}

criterion_group!(benches, head, engine);
criterion_main!(benches);

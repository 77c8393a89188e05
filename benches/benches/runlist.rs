//! What the driver client costs the host: a list of 29 full-ELF runs on a virtual NPU that completes every well-formed command
//! without looking at its code. Goals: 60 µs for an unchanged list, 300 µs for a list that is bound to another context length.

#[path = "../../backends/xdna2/tests/common/kernels.rs"]
#[allow(dead_code, reason = "the tests of the backend use the rest")]
mod kernels;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use kernels::{instruction_elf, layer_stream, qwen3_0_6b_config};
use npuhal_amdxdna::NpuDevice;
use npuhal_core::device::{Arg, BufferSpec, Context, Deadline, Device, Kernel, Program, RunIndex, Runlist};
use npuhal_virtual::{VirtualDevice, VirtualSpec};
use npuhal_xdna2::context_map::ContextMap;
use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::layer_images::{LayerImages, kernel_name};
use std::time::Duration;

const RUNS: u32 = 29;
/// Buffers of a layer: activations, weights, norms, rotation, KV cache. Their contents stay untouched, so a page each will do.
const ARGUMENTS: usize = 5;
const BUFFER_BYTES: u64 = 4096;
const CONTEXTS: u32 = 4096;
const DEVICE: &str = "virtual:npu5?array=skip";

/// Layer kernels of the dimensions of Qwen3-0.6B: about 34 KB of control code, a handful of words differ from one context
/// length to the next.
fn layer_images() -> LayerImages {
    let config = qwen3_0_6b_config();
    let dimensions = Dimensions::of(&config).expect("dimensions of the lane");
    let files = [1, 2, 17].map(|context| instruction_elf(&layer_stream(&dimensions, CONTEXTS, context)));
    let map = ContextMap::derive(&files[0], &files[1], &files[2]).expect("rules");
    LayerImages::new(map, CONTEXTS).expect("images")
}

/// A kernel file: image and kernel name.
struct File {
    image: Vec<u8>,
    kernel: String,
}

impl File {
    fn of(images: &LayerImages, context: u32) -> Self {
        Self { image: images.image(context).expect("an image"), kernel: kernel_name(context) }
    }

    fn program(&self) -> Program<'_> {
        Program::FullElf { image: &self.image, kernel: &self.kernel }
    }
}

fn open() -> NpuDevice {
    let spec: VirtualSpec = DEVICE.parse().expect("a virtual device");
    let hardware = VirtualDevice::new(&spec);
    NpuDevice::open(hardware.connect(), &hardware.identity()).expect("a device")
}

fn arguments(npu: &NpuDevice) -> Vec<Vec<Arg>> {
    let buffer = || Arg::Buffer(npu.allocate(&BufferSpec::tensor(BUFFER_BYTES, "bench")).expect("a buffer"));
    (0..RUNS).map(|_| (0..ARGUMENTS).map(|_| buffer()).collect()).collect()
}

fn list_of(context: &mut dyn Context, kernel: &dyn Kernel, arguments: &[Vec<Arg>]) -> Box<dyn Runlist> {
    let mut list = context.runlist();
    for run in arguments {
        list.push(kernel, run).expect("a run");
    }
    list
}

fn run(list: &mut dyn Runlist) {
    let completion = list.submit().expect("a submission").wait(Deadline::within(Duration::from_secs(10)));
    assert_eq!(completion.expect("a completion").runs, RUNS);
}

fn rebind(list: &mut dyn Runlist, kernel: &dyn Kernel) {
    (0..RUNS).try_for_each(|index| list.rebind(RunIndex(index), kernel)).expect("a kernel of the same signature");
}

fn runlists(criterion: &mut Criterion) {
    let images = layer_images();
    let files: Vec<File> = (100..164).map(|context| File::of(&images, context)).collect();
    let npu = open();
    let arguments = arguments(&npu);
    let mut context = npu.open_context(&files[0].program()).expect("a context");
    let kernels: Vec<_> = files.iter().map(|file| context.load(&file.program()).expect("a kernel")).collect();
    let mut list = list_of(&mut *context, &*kernels[0], &arguments);
    run(&mut *list);

    let changes = images.changes(100, 101).expect("changes");
    let words = changes.code.len() + changes.addends.len();
    let mut group = criterion.benchmark_group(format!("runlist/{RUNS} runs, {words} words differ"));
    group.bench_function("unchanged: submit and wait", |bencher| bencher.iter(|| run(&mut *list)));
    let mut number = 0;
    let mut next = || {
        number = (number + 1) % files.len();
        number
    };
    group.bench_function("rebind to the next context length", |bencher| {
        bencher.iter(|| rebind(&mut *list, &*kernels[next()]));
    });
    group.bench_function("rebind, submit and wait", |bencher| {
        bencher.iter(|| {
            rebind(&mut *list, &*kernels[next()]);
            run(&mut *list);
        });
    });
    // What a lane does for a token: the file of the next context length is parsed, loaded and bound.
    let mut cursor = images.cursor();
    let mut length = 200;
    group.bench_function("load a new context length, rebind, submit and wait", |bencher| {
        bencher.iter(|| {
            length = if length == CONTEXTS { 200 } else { length + 1 };
            let (image, name) = (images.seek(&mut cursor, length).expect("an image"), kernel_name(length));
            let kernel = context.load(&Program::FullElf { image, kernel: &name }).expect("a kernel");
            rebind(&mut *list, &*kernel);
            run(&mut *list);
        });
    });
    drop((list, kernels, context));
    group.sample_size(20);
    group.bench_function("cold: context, parse, patch 29 runs, submit and wait", |bencher| {
        bencher.iter_batched(
            // Nothing is known to a device that has just been opened.
            || {
                let npu = open();
                let arguments = self::arguments(&npu);
                (npu, arguments)
            },
            |(npu, arguments)| {
                let mut context = npu.open_context(&files[0].program()).expect("a context");
                let kernel = context.load(&files[0].program()).expect("a kernel");
                let mut list = list_of(&mut *context, &*kernel, &arguments);
                run(&mut *list);
                (list, kernel, context, npu, arguments)
            },
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

criterion_group!(benches, runlists);
criterion_main!(benches);

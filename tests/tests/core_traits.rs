//! The two levels of traits, exercised on devices without hardware.

use npuhal_core::RunError;
use npuhal_core::device::{
    Arg, ArgKind, BufferRef, BufferSpec, Completion, Context, ContextState, Deadline, Device, Direction, Kernel,
    LengthUnit, Program, RunIndex, Runlist, Submission,
};
use npuhal_core::error::DeviceError;
use npuhal_core::pipeline::Pipeline;
use npuhal_core::stage::{
    Control, HiddenRows, Row, Segment, SegmentCapacity, SequenceId, Stepper, Takes, Tap, TapSink, Want, Yields,
};
use npuhal_tests::kit::devices::{Call, NullDevice, RecordingDevice};
use std::future::Future;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

const LAYERS: usize = 28;
const BUFFER: ArgKind = ArgKind::Buffer { direction: Direction::InOut, min_bytes: 16 };
const SOON: Deadline = Deadline::within(Duration::from_secs(5));

#[test]
fn a_lane_keeps_two_runlists_of_29_runs_in_flight() {
    let device = RecordingDevice::new("npu5");
    (1..=3).for_each(|length| device.define(&format!("fl{length:05}"), &[BUFFER; 5]));
    device.define("flhead", &[BUFFER; 4]);
    let mut lane = Lane::open(&device).unwrap();

    let first = lane.slots[0].submit().unwrap();
    let second = lane.slots[1].submit().unwrap();
    assert!(matches!(lane.slots[0].submit(), Err(DeviceError::Misuse { .. })), "in flight");
    assert!(matches!(lane.slots[0].rebind(RunIndex(0), lane.layer[2].as_ref()), Err(DeviceError::Misuse { .. })));
    assert!(matches!(lane.logits.read(0, &mut [0; 4]), Err(DeviceError::Busy)), "held by both");
    assert_eq!(first.wait(SOON).unwrap(), Completion { runs: 29, device_time: None });
    assert!(matches!(lane.logits.read(0, &mut [0; 4]), Err(DeviceError::Busy)), "held by the second");

    // The next length while the other list runs: the same arguments, another kernel.
    device.take_calls();
    for run in 0..LAYERS {
        lane.slots[0].rebind(RunIndex(run as u32), lane.layer[2].as_ref()).unwrap();
    }
    assert_eq!(second.wait(SOON).unwrap().runs, 29);
    lane.logits.read(0, &mut [0; 4]).unwrap();
    lane.slots[0].submit().unwrap().wait(SOON).unwrap();
    let calls = device.take_calls();
    assert_eq!(
        calls.iter().filter(|call| matches!(call, Call::Rebind(0, _, kernel) if kernel == "fl00003")).count(),
        28
    );
    let submitted = calls.iter().find_map(|call| match call {
        Call::Submit(0, _, kernels) => Some(kernels.clone()),
        _ => None,
    });
    let wanted: Vec<String> = std::iter::repeat_n("fl00003", 28).chain(["flhead"]).map(str::to_owned).collect();
    assert_eq!(submitted, Some(wanted));

    let head = lane.head.as_ref();
    assert!(
        matches!(lane.slots[0].rebind(RunIndex(0), head), Err(DeviceError::BadArgument { .. })),
        "another signature"
    );
    assert!(matches!(lane.slots[0].rebind(RunIndex(29), head), Err(DeviceError::Misuse { .. })), "no such run");
    let other = device.allocate(&BufferSpec::tensor(64, "other activations")).unwrap();
    lane.slots[0].set_arg(RunIndex(0), 0, &Arg::Buffer(other.clone())).unwrap();
    let short = other.slice(0..8).unwrap();
    assert!(matches!(
        lane.slots[0].set_arg(RunIndex(0), 0, &Arg::Buffer(short)),
        Err(DeviceError::BadArgument { index: 0, .. })
    ));
}

#[test]
fn the_same_lane_runs_on_a_device_that_does_nothing() {
    let mut lane = Lane::open(&NullDevice::default()).unwrap();
    let first = lane.slots[0].submit().unwrap();
    let second = lane.slots[1].submit().unwrap();
    assert_eq!((first.wait(SOON).unwrap().runs, second.wait(SOON).unwrap().runs), (29, 29));
    lane.slots[0].rebind(RunIndex(3), lane.layer[1].as_ref()).unwrap();
    let mut logits = [1u8; 4];
    lane.logits.read(0, &mut logits).unwrap();
    assert_eq!(logits, [0; 4]);
}

#[test]
fn a_whole_decoder_is_one_dispatch() {
    let device = RecordingDevice::new("npu1");
    device.define("MLIR_AIE", &[BUFFER, BUFFER, BUFFER, BUFFER, ArgKind::U32]);
    let mut context = device.open_context(&Program::Xclbin { image: &[0; 128] }).unwrap();
    let stream = [0u8; 64];
    let program = Program::Instructions { unit: "MLIR_AIE", stream: &stream, length_unit: LengthUnit::Words };
    let kernel = context.load(&program).unwrap();
    assert_eq!((kernel.name(), kernel.signature().len()), ("MLIR_AIE", 5), "instructions are no argument");
    let buffers = ["weights", "cache and header", "input", "output"]
        .map(|label| device.allocate(&BufferSpec::tensor(256, label)).unwrap());
    buffers[0].fill(&mut |bytes| bytes.fill(0x5A)).unwrap();
    let mut args: Vec<Arg> = buffers.iter().cloned().map(Arg::Buffer).collect();
    args.push(Arg::U32(0));
    let mut list = context.runlist();
    let run = list.push(kernel.as_ref(), &args).unwrap();
    for position in 0..3u32 {
        buffers[1].slice(0..64).unwrap().write(0, &position.to_le_bytes()).unwrap();
        list.set_arg(run, 4, &Arg::U32(position)).unwrap();
        assert_eq!(list.submit().unwrap().wait(SOON).unwrap().runs, 1);
        buffers[3].read(0, &mut [0; 128]).unwrap();
    }
    let submissions = device.calls().iter().filter(|call| matches!(call, Call::Submit(..))).count();
    assert_eq!(submissions, 3);
}

#[test]
fn a_lost_context_stays_lost_and_buffers_live_on() {
    let device = RecordingDevice::new("npu1");
    device.define("step", &[BUFFER]);
    let cache = device.allocate(&BufferSpec::tensor(64, "KV cache")).unwrap();
    cache.write(8, &[1, 2, 3, 4]).unwrap();
    let boot = Program::Builtin { name: "step" };
    let mut context = device.open_context(&boot).unwrap();
    let kernel = context.load(&boot).unwrap();
    let (mut list, mut other) = (context.runlist(), context.runlist());
    for list in [&mut list, &mut other] {
        list.push(kernel.as_ref(), &[Arg::Buffer(cache.clone())]).unwrap();
    }

    device.lose_next_at(RunIndex(0));
    let in_flight = other.submit().unwrap();
    let error = list.submit().unwrap().wait(SOON).unwrap_err();
    assert!(matches!(error, RunError::TimedOut { run: Some(RunIndex(0)), .. }) && error.loses_context());
    let error = in_flight.wait(SOON).unwrap_err();
    assert!(error.loses_context(), "the other list is lost with the context: {error}");
    for _ in 0..2 {
        assert!(matches!(context.state(), ContextState::Lost(_)));
        assert!(matches!(list.submit(), Err(DeviceError::ContextLost { .. })));
        assert!(matches!(context.load(&boot), Err(DeviceError::ContextLost { .. })));
    }

    let mut bytes = [0; 4];
    cache.read(8, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 3, 4]);
    let mut fresh = device.open_context(&boot).unwrap();
    assert!(matches!(fresh.runlist().push(kernel.as_ref(), &[]), Err(DeviceError::Misuse { .. })), "a foreign kernel");
    let kernel = fresh.load(&boot).unwrap();
    drop((list, other, context));
    let mut list = fresh.runlist();
    list.push(kernel.as_ref(), &[Arg::Buffer(cache)]).unwrap();
    list.submit().unwrap().wait(SOON).unwrap();
    assert_eq!(fresh.state(), ContextState::Ready);
}

#[test]
fn a_submission_that_nobody_waits_for_gives_its_buffers_back() {
    let device = RecordingDevice::new("npu1");
    device.define("step", &[BUFFER]);
    let buffer = device.allocate(&BufferSpec::tensor(64, "x")).unwrap();
    let mut context = device.open_context(&Program::Builtin { name: "step" }).unwrap();
    let kernel = context.load(&Program::Builtin { name: "step" }).unwrap();
    let mut list = context.runlist();
    list.push(kernel.as_ref(), &[Arg::Buffer(buffer.clone())]).unwrap();
    drop(list.submit().unwrap());
    buffer.write(0, &[1]).unwrap();
    list.submit().unwrap().wait(SOON).unwrap();
    assert!(device.calls().contains(&Call::Abandon(0)));
    assert!(matches!(device.allocate(&BufferSpec::tensor(0, "none")), Err(DeviceError::Misuse { .. })));
}

#[test]
fn submissions_can_be_awaited() {
    let device = RecordingDevice::new("npu5");
    (1..=3).for_each(|length| device.define(&format!("fl{length:05}"), &[BUFFER; 5]));
    device.define("flhead", &[BUFFER; 4]);
    let mut lane = Lane::open(&device).unwrap();
    let (first, second) = (lane.slots[0].submit().unwrap(), lane.slots[1].submit().unwrap());
    let both = async { (first.completed(SOON).await, second.completed(SOON).await) };
    let (first, second) = block_on(both);
    assert_eq!((first.unwrap().runs, second.unwrap().runs), (29, 29));
    device.lose_next_at(RunIndex(7));
    let lost = lane.slots[0].submit().unwrap();
    assert!(matches!(block_on(lost.completed(SOON)), Err(RunError::TimedOut { run: Some(RunIndex(7)), .. })));

    struct Panics;
    impl Submission for Panics {
        fn wait(self: Box<Self>, _: Deadline) -> Result<Completion, RunError> {
            panic!("a backend that breaks its contract")
        }
    }
    let error = block_on((Box::new(Panics) as Box<dyn Submission>).completed(SOON)).unwrap_err();
    assert!(matches!(error, RunError::Failed { .. }), "an answer, not a wait for ever: {error}");
}

#[test]
fn an_npu_and_a_cpu_share_a_model() {
    let (npu, cpu) = (RecordingDevice::new("npu1"), RecordingDevice::new("cpu"));
    let segments: Vec<Box<dyn Segment>> = vec![
        Box::new(Stage::new(&npu, 0..3, Takes::Tokens, Yields::Hidden, 1)),
        Box::new(Stage::new(&cpu, 3..5, Takes::Hidden, Yields::Logits, 64)),
    ];
    let mut pipeline = Pipeline::new(segments, 5).unwrap();
    let devices: Vec<String> = pipeline.placement().into_iter().map(|place| place.device).collect();
    assert_eq!(devices, ["npu1", "cpu"]);
    assert_eq!(pipeline.capacity(), SegmentCapacity { positions: 16, rows_per_call: 1, sequences: 1 });

    let rows: Vec<Row> =
        (0..4).map(|position| Row { sequence: SequenceId(0), token: 10 + position, position }).collect();
    let mut logits = HiddenRows::new();
    pipeline.begin().unwrap();
    pipeline.step(&rows, Want::Last, &mut logits, &Control::new()).unwrap();
    pipeline.end();
    assert_eq!((logits.rows(), logits.row(0)), (1, &[18.0, 18.0, 18.0, 18.0][..]), "token 13 and one for each layer");
    assert_eq!(submissions(&npu), 4);
    assert_eq!(submissions(&cpu), 4, "one row a call on the NPU makes one row a call on the CPU");

    // The NPU's context is lost in the middle of a prompt: the positions go, the next generation works.
    pipeline.begin().unwrap();
    npu.lose_next_at(RunIndex(2));
    let next = [Row { sequence: SequenceId(0), token: 3, position: 4 }];
    let error = pipeline.step(&next, Want::All, &mut logits, &Control::new()).unwrap_err();
    assert!(error.loses_context());
    pipeline.end();
    assert_eq!(pipeline.truncate(SequenceId(0), 4), 4);
    pipeline.begin().unwrap();
    pipeline.step(&next, Want::All, &mut logits, &Control::new()).unwrap();
    pipeline.end();
    assert_eq!(logits.row(0), [8.0; 4]);
    for device in [&npu, &cpu] {
        let opened = device.calls().iter().filter(|call| matches!(call, Call::Open(..))).count();
        let closed = device.calls().iter().filter(|call| matches!(call, Call::Close(..))).count();
        assert_eq!((opened, closed), (3, 3), "a context for each generation");
        let allocated = device.calls().iter().filter(|call| matches!(call, Call::Allocate(_))).count();
        assert_eq!(allocated, 1, "buffers outlive contexts");
    }
}

/// A layer kernel for each context length, a head kernel, two slots.
struct Lane {
    layer: Vec<Box<dyn Kernel>>,
    head: Box<dyn Kernel>,
    slots: [Box<dyn Runlist>; 2],
    logits: BufferRef,
    _context: Box<dyn Context>,
}

impl Lane {
    fn open(device: &dyn Device) -> Result<Self, DeviceError> {
        let image = [0u8; 64];
        let mut context = device.open_context(&Program::FullElf { image: &image, kernel: "flinit" })?;
        let mut load = |kernel: &str| context.load(&Program::FullElf { image: &image, kernel });
        let layer = (1..=3).map(|length| load(&format!("fl{length:05}"))).collect::<Result<Vec<_>, _>>()?;
        let head = load("flhead")?;
        let buffer = |label: &str| device.allocate(&BufferSpec::tensor(64, label)).map(Arg::Buffer);
        let (act, head_weights, norm, logits) = (buffer("act")?, buffer("head")?, buffer("norm")?, buffer("logits")?);
        let Arg::Buffer(logits_buffer) = &logits else { unreachable!("a buffer") };
        let logits_buffer = logits_buffer.clone();
        let mut slot = |slot: usize| {
            let mut list = context.runlist();
            for index in 0..LAYERS {
                let args = [
                    act.clone(),
                    buffer(&format!("layer {index} weights"))?,
                    buffer(&format!("layer {index} constants"))?,
                    buffer(&format!("layer {index} slot {slot} angles"))?,
                    buffer(&format!("layer {index} KV cache"))?,
                ];
                list.push(layer[slot].as_ref(), &args)?;
            }
            list.push(head.as_ref(), &[logits.clone(), head_weights.clone(), act.clone(), norm.clone()])?;
            assert_eq!(list.len(), LAYERS + 1);
            Ok::<_, DeviceError>(list)
        };
        let slots = [slot(0)?, slot(1)?];
        Ok(Self { layer, head, slots, logits: logits_buffer, _context: context })
    }
}

/// Layers that add one to every element, run as a list of one run a layer.
struct Stage {
    device: RecordingDevice,
    layers: Range<usize>,
    takes: Takes,
    yields: Yields,
    rows_per_call: u32,
    stream: BufferRef,
    open: Option<(Box<dyn Context>, Box<dyn Runlist>)>,
    held: usize,
}

impl Stage {
    fn new(device: &RecordingDevice, layers: Range<usize>, takes: Takes, yields: Yields, rows_per_call: u32) -> Self {
        device.define("layer", &[BUFFER]);
        let stream = device.allocate(&BufferSpec::tensor(16, "residual stream")).unwrap();
        Self { device: device.clone(), layers, takes, yields, rows_per_call, stream, open: None, held: 0 }
    }
}

impl Segment for Stage {
    fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    fn takes(&self) -> Takes {
        self.takes
    }

    fn yields(&self) -> Yields {
        self.yields
    }

    fn width(&self) -> usize {
        4
    }

    fn capacity(&self) -> SegmentCapacity {
        SegmentCapacity { positions: 16, rows_per_call: self.rows_per_call, sequences: 1 }
    }

    fn device(&self) -> &str {
        &self.device.card().id
    }

    fn begin(&mut self) -> Result<(), RunError> {
        let program = Program::Builtin { name: "layer" };
        let mut context = self.device.open_context(&program)?;
        let kernel = context.load(&program)?;
        let mut list = context.runlist();
        for _ in self.layers.clone() {
            list.push(kernel.as_ref(), &[Arg::Buffer(self.stream.clone())])?;
        }
        self.open = Some((context, list));
        Ok(())
    }

    fn end(&mut self) {
        self.open = None;
    }

    fn forward(&mut self, rows: &[Row], hidden: &mut HiddenRows, want: Want<'_>, _: &Control) -> Result<(), RunError> {
        let mut results = Vec::new();
        for (index, row) in rows.iter().enumerate() {
            if row.position as usize != self.held {
                let reason = format!("wanted position {}, found {}", self.held, row.position);
                return Err(RunError::BadRows { reason });
            }
            let input =
                if self.takes == Takes::Tokens { [row.token as f32; 4].to_vec() } else { hidden.row(index).to_vec() };
            self.held += 1;
            self.stream.write(0, &input.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())?;
            let (_, list) = self.open.as_mut().expect("begun");
            list.submit()?.wait(SOON)?;
            let mut bytes = [0; 16];
            self.stream.read(0, &mut bytes)?;
            if want.selects(index, rows.len()) {
                let added = self.layers.len() as f32;
                results.push(
                    bytes
                        .chunks_exact(4)
                        .map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]]) + added)
                        .collect::<Vec<_>>(),
                );
            }
        }
        hidden.reset(results.len(), 4);
        for (index, result) in results.iter().enumerate() {
            hidden.row_mut(index).copy_from_slice(result);
        }
        Ok(())
    }

    fn truncate(&mut self, _: SequenceId, len: usize) -> usize {
        self.held = self.held.min(len);
        self.held
    }

    fn taps(&self) -> &[Tap] {
        &[]
    }

    fn observe(&mut self, _: Option<Box<dyn TapSink>>) {}
}

fn submissions(device: &RecordingDevice) -> usize {
    device.calls().iter().filter(|call| matches!(call, Call::Submit(..))).count()
}

fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park_timeout(Duration::from_secs(10)),
        }
    }
}

//! Recorded dialogues, replayed scenario by scenario through level 1 against a device that answers from the recording.

mod client;
mod compare;
mod recorded;
mod trace;

#[path = "../common/mod.rs"]
mod common;

use compare::{Difference, Differences};
use npuhal_amdxdna::silicon::Silicon;
use npuhal_amdxdna::{NpuDevice, NpuIdentity};
use npuhal_core::device::{
    Arg, BufferRef, BufferSpec, BufferUse, Context, Deadline, Device, Program, RunIndex, Runlist,
};
use npuhal_core::{DeviceError, RunError};
use recorded::{Event, Recorded};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use trace::Trace;

/// A device that answers from a recording.
struct Replay {
    recorded: Arc<Recorded>,
    device: NpuDevice,
    differences: Differences,
}

impl Replay {
    fn of(name: &str) -> Self {
        Self::open(&common::data(&format!("driver/{name}.json")))
    }

    fn open(path: &Path) -> Self {
        Self::try_on(&Recorded::new(Trace::load(path))).unwrap()
    }

    fn try_on(recorded: &Arc<Recorded>) -> Result<Self, DeviceError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = &recorded.trace().name;
        let silicon = Silicon::ALL.into_iter().find(|part| name.starts_with(part.name())).unwrap();
        let identity = NpuIdentity {
            id: silicon.to_string(),
            name: silicon.to_string(),
            silicon,
            is_virtual: true,
            address: format!("replay {}", NUMBER.fetch_add(1, Ordering::Relaxed)),
        };
        let driver: Arc<dyn npuhal_amdxdna::driver::Driver> = recorded.clone();
        let device = NpuDevice::open(driver, &identity)?;
        Ok(Self { recorded: Arc::clone(recorded), device, differences: Differences::default() })
    }

    fn tensor(&self, len_bytes: u64) -> BufferRef {
        self.device.allocate(&BufferSpec::tensor(len_bytes, "tensor")).unwrap()
    }

    /// Closes the device; then everything but the listed submissions must be as recorded.
    fn finish(self, rebuilt: &[usize]) -> Differences {
        let Self { recorded, device, mut differences } = self;
        drop(device);
        let execs = recorded.execs();
        assert_eq!(execs.len(), recorded.trace().execs.len(), "{}: submissions", recorded.trace().name);
        for executed in &execs {
            compare::exec(&recorded, executed, rebuilt.contains(&executed.index), &mut differences);
        }
        compare::allocations(&recorded, &mut differences);
        compare::order(&recorded, &mut differences);
        assert!(recorded.open_bos().is_empty(), "{}: leaked {:?}", recorded.trace().name, recorded.open_bos());
        differences
    }
}

fn input(name: &str) -> Vec<u8> {
    common::unhex(common::json(common::data("inputs.json"))[name]["hex"].as_str().unwrap())
}

fn buffers(buffers: &[&BufferRef]) -> Vec<Arg> {
    buffers.iter().map(|buffer| Arg::Buffer((*buffer).clone())).collect()
}

fn run_once(list: &mut Box<dyn Runlist>) -> Result<(), RunError> {
    list.submit()?.wait(Deadline::never()).map(|_| ())
}

/// Full ELFs with every kind of relocation: arguments, then the same rotated by one.
fn relocations(name: &str, elf: &str) -> Differences {
    let mut replay = Replay::of(name);
    let image = input(elf);
    // The recorded client keeps a pool of eight control-packet buffers and uses the last.
    if elf != "reloc_plain.elf" {
        replay.recorded.withhold(&[2, 3, 4, 5, 6, 7, 8]);
        replay.differences.note(Difference::ControlPacketPool);
    }
    let boot = Program::FullElf { image: &image, kernel: "rt:a" };
    let mut context = replay.device.open_context(&boot).unwrap();
    let kernel = context.load(&boot).unwrap();
    let args: Vec<_> = (0..4).map(|_| replay.tensor(16384)).collect();
    let mut list = context.runlist();
    let run = list.push(&*kernel, &buffers(&args.iter().collect::<Vec<_>>())).unwrap();
    run_once(&mut list).unwrap();
    for i in 0..4 {
        list.set_arg(run, i, &Arg::Buffer(args[(i + 1) % 4].clone())).unwrap();
    }
    run_once(&mut list).unwrap();
    drop((list, kernel, context, args));
    replay.finish(&[])
}

#[test]
fn relocations_of_full_elfs() {
    relocations("npu4-reloc-all", "reloc_all.elf");
    relocations("npu5-reloc-all.oot-sync", "reloc_all.elf");
    relocations("npu4-reloc-nopdi", "reloc_nopdi.elf");
}

/// The instruction stream of the recordings: 56 bytes.
fn stream() -> Vec<u8> {
    common::unhex(
        "00010306040100000200000038000000000000000000000004d20100000000000000008018000000800000001000000000000000\
         00010100",
    )
}

fn instructions<'a>(unit: &'a str, stream: &'a [u8]) -> Program<'a> {
    Program::Instructions { unit, stream, length_unit: npuhal_core::device::LengthUnit::Words }
}

/// An open context of an xclbin with one kernel.
fn open_units(replay: &Replay, xclbin: &str) -> Box<dyn Context> {
    replay.device.open_context(&Program::Xclbin { image: &input(xclbin) }).unwrap()
}

/// One kernel: run, restart, another argument, a second run object with a time limit.
fn runs(name: &str, xclbin: &str) -> Differences {
    let replay = Replay::of(name);
    let mut context = open_units(&replay, xclbin);
    let kernel = context.load(&instructions("MLIR_AIE", &stream())).unwrap();
    let tensors: Vec<_> = (1..=4).map(|i| replay.tensor(4096 * i)).collect();
    let args = buffers(&tensors.iter().collect::<Vec<_>>());
    let mut list = context.runlist();
    let run = list.push(&*kernel, &args).unwrap();
    run_once(&mut list).unwrap();
    run_once(&mut list).unwrap();
    list.set_arg(run, 0, &args[3]).unwrap();
    run_once(&mut list).unwrap();
    let mut second = context.runlist();
    second.push(&*kernel, &args).unwrap();
    second.submit().unwrap().wait(Deadline::within(Duration::from_millis(2000))).unwrap();
    assert_waits(&replay);
    drop((list, second, kernel, context, tensors, args));
    replay.finish(&[])
}

/// One wait for each recorded one, on the same point, with the same limit.
fn assert_waits(replay: &Replay) {
    let ours = replay.recorded.log().into_iter().filter_map(|event| match event {
        Event::Wait { point, timeout } => Some((point, timeout.map(|timeout| timeout.as_millis() as u64))),
        _ => None,
    });
    let ours: Vec<_> = ours.collect();
    let trace = replay.recorded.trace();
    let theirs = trace.calls("SYNCOBJ_TIMELINE_WAIT").map(|call| {
        let dec = &call["dec"];
        (dec["point"].as_u64().unwrap(), dec.get("relative_ms").map(|limit| limit.as_u64().unwrap()))
    });
    assert_eq!(ours, theirs.collect::<Vec<_>>(), "{}: waits", trace.name);
}

#[test]
fn single_runs_of_a_compute_unit() {
    runs("npu1-run", "npu1.xclbin");
    runs("npu1-run-col1", "npu1_col1.xclbin");
    runs("npu4-run", "npu4.xclbin");
    runs("npu5-run.oot-sync", "npu4.xclbin");
}

#[test]
fn two_compute_units_with_a_configuration_each() {
    let replay = Replay::of("npu1-two-kernels");
    let mut context = open_units(&replay, "npu1_2cu.xclbin");
    for unit in ["KB", "KA"] {
        let kernel = context.load(&instructions(unit, &stream())).unwrap();
        assert_eq!(kernel.signature().len(), 1);
        let tensor = replay.tensor(4096);
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&tensor])).unwrap();
        run_once(&mut list).unwrap();
    }
    drop(context);
    let trace = replay.recorded.trace();
    let configured = replay.recorded.log().into_iter().find_map(|event| match event {
        Event::ConfigCus { units, contents } => Some((units, contents)),
        _ => None,
    });
    let (units, contents) = configured.unwrap();
    let recorded = trace.calls("CONFIG_HWCTX").next().unwrap()["dec"]["cus"].as_array().unwrap().clone();
    assert_eq!(recorded.len(), 2);
    for (i, cu) in recorded.iter().enumerate() {
        assert_eq!(units[i], trace::handle_of(cu["bo"].as_str().unwrap()));
        let content = trace.sha256_of(cu["pdi"].as_str().unwrap());
        assert_eq!(compare::sha256(&contents[i][..content.size]), content.sha256);
    }
    replay.finish(&[]);
}

/// Three runs of one chain, executed twice.
fn runlist(name: &str, xclbin: &str) -> Differences {
    let replay = Replay::of(name);
    let mut context = open_units(&replay, xclbin);
    let kernel = context.load(&instructions("MLIR_AIE", &stream())).unwrap();
    let tensors: Vec<_> = (0..4).map(|_| replay.tensor(4096)).collect();
    let mut list = context.runlist();
    for run in 0..3 {
        let rotated: Vec<_> = (0..4).map(|i| &tensors[(i + run) % 4]).collect();
        assert_eq!(list.push(&*kernel, &buffers(&rotated)).unwrap(), RunIndex(run as u32));
    }
    run_once(&mut list).unwrap();
    list.submit().unwrap().wait(Deadline::within(Duration::from_millis(2000))).unwrap();
    assert_waits(&replay);
    drop((list, kernel, context, tensors));
    replay.finish(&[])
}

#[test]
fn chains_of_runs() {
    runlist("npu1-runlist", "npu1.xclbin");
    runlist("npu5-runlist", "npu4.xclbin");
}

#[test]
fn wishes_about_scheduling() {
    let replay = Replay::of("npu1-qos");
    let image = input("npu1.xclbin");
    let qos = npuhal_amdxdna::driver::Qos {
        gops: 10,
        fps: 30,
        dma_bandwidth: 1000,
        latency_ms: 20,
        frame_exec_time_ms: 5,
        priority: 0x180,
    };
    for qos in [qos, npuhal_amdxdna::driver::Qos::default()] {
        drop(replay.device.open_context_with(&Program::Xclbin { image: &image }, qos).unwrap());
    }
    let created = replay.recorded.log().into_iter().filter_map(|event| match event {
        Event::CreateContext { spec, .. } => Some(spec),
        _ => None,
    });
    let created: Vec<_> = created.collect();
    let recorded: Vec<_> = replay.recorded.trace().calls("CREATE_HWCTX").cloned().collect();
    assert_eq!(created.len(), recorded.len());
    for (spec, call) in created.iter().zip(&recorded) {
        let qos = spec.qos;
        let words = [qos.gops, qos.fps, qos.dma_bandwidth, qos.latency_ms, qos.frame_exec_time_ms, qos.priority, 0, 0];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(bytes, trace::hex(&call["qos"]));
        assert_eq!(u64::from(spec.num_tiles), call["dec"]["num_tiles"].as_u64().unwrap());
        assert_eq!(u64::from(spec.max_opc), call["dec"]["max_opc"].as_u64().unwrap());
    }
    replay.finish(&[]);
}

/// Everything that goes wrong, and what the client says about it.
fn errors(name: &str) -> Differences {
    let mut replay = Replay::of(name);
    let tensors: Vec<_> = (0..4).map(|_| replay.tensor(4096)).collect();
    let args = buffers(&tensors.iter().collect::<Vec<_>>());
    let never = Deadline::never();
    // Runs `count` runs in a fresh context; `also` in the same one afterwards.
    let attempt = |count: usize, deadline: Deadline| {
        let mut context = open_units(&replay, "npu1.xclbin");
        let kernel = context.load(&instructions("MLIR_AIE", &stream())).unwrap();
        let mut list = context.runlist();
        for _ in 0..count {
            list.push(&*kernel, &args).unwrap();
        }
        let result = list.submit().map_err(RunError::from).and_then(|submission| submission.wait(deadline));
        let is_lost = matches!(context.state(), npuhal_core::device::ContextState::Lost(_));
        let wants_loss = result.as_ref().is_err_and(RunError::loses_context);
        assert_eq!(is_lost, wants_loss, "{result:?}");
        if is_lost {
            assert!(matches!(list.submit(), Err(DeviceError::ContextLost { .. })));
        }
        result
    };
    let failed = |result: Result<_, RunError>, wanted: &str, at: Option<u32>| match result {
        Err(RunError::Failed { run, state, .. }) => assert_eq!((state.as_str(), run), (wanted, at.map(RunIndex))),
        other => panic!("{other:?}"),
    };
    let timed_out = |result: Result<_, RunError>, at: Option<u32>, has_record: bool| match result {
        Err(RunError::TimedOut { run, detail, .. }) => {
            assert_eq!(run, at.map(RunIndex));
            assert_eq!(detail.contains("operation 17, context pc 0x22334455"), has_record, "{detail}");
        }
        other => panic!("{other:?}"),
    };
    failed(attempt(1, never), "ERROR", Some(0));
    failed(attempt(1, never), "ABORT", Some(0));
    timed_out(attempt(1, never), Some(0), true);
    timed_out(attempt(1, never), Some(0), false);
    failed(attempt(1, never), "NORESPONSE", Some(0));
    timed_out(attempt(1, never), Some(0), true);
    assert_eq!(attempt(1, never).unwrap().runs, 1);
    timed_out(attempt(1, Deadline::within(Duration::from_millis(50))), Some(0), false);
    timed_out(attempt(2, Deadline::within(Duration::from_millis(50))), None, false);
    match attempt(1, never) {
        Err(RunError::Device(DeviceError::Driver { code, meaning, .. })) => {
            assert_eq!(code, "EINVAL");
            assert!(meaning.contains("refuses the command"), "{meaning}");
        }
        other => panic!("{other:?}"),
    }
    failed(attempt(3, never), "ERROR", Some(1));
    assert_eq!(attempt(3, never).unwrap().runs, 3);
    timed_out(attempt(3, never), Some(2), true);
    failed(attempt(29, never), "ABORT", Some(27));
    // Buffers are free again, whatever happened.
    for tensor in &tensors {
        tensor.write(0, &[1]).unwrap();
    }
    drop((args, tensors));
    replay.differences.note(Difference::ContextAfterFailure);
    let all: Vec<usize> = (0..replay.recorded.trace().execs.len()).collect();
    replay.finish(&all)
}

#[test]
fn failures_are_typed_and_name_the_run() {
    errors("npu1-errors");
    errors("npu1-errors.oot");
}

#[test]
fn lent_exported_and_imported_buffers() {
    use std::os::fd::AsFd;
    let mut replay = Replay::of("npu1-import");
    let device = &replay.device;
    for len in [8192, 5000] {
        let pages = npuhal_amdxdna::host_pages(8192).unwrap();
        let lent = device.adopt(pages.clone(), len).unwrap();
        assert_eq!((lent.len_bytes(), device.device_address(&lent)), (len, Some(pages.address())));
        lent.write(100, b"lent").unwrap();
        let mut back = [0; 4];
        pages.read(100, &mut back).unwrap();
        assert_eq!(&back, b"lent");
        assert!(matches!(device.adopt(pages, 8193), Err(DeviceError::OutOfRange { .. })));
    }
    let own = replay.tensor(8192);
    let exported = device.export(&own).unwrap();
    let again = device.import(exported.as_fd()).unwrap();
    own.write(0, b"same").unwrap();
    let mut back = [0; 4];
    again.read(0, &mut back).unwrap();
    assert_eq!(&back, b"same");
    drop(own);
    again.write(0, b"lives").unwrap();
    drop(again);
    let foreign = tempfile::tempfile().unwrap();
    foreign.set_len(12288).unwrap();
    let imported = device.import(foreign.as_fd()).unwrap();
    assert_eq!(imported.len_bytes(), 12288);
    drop(imported);
    let code = BufferSpec { len_bytes: 4096, usage: BufferUse::DeviceLocal, label: "code".to_owned() };
    let refused = device.export(&device.allocate(&code).unwrap()).unwrap_err();
    assert!(refused.to_string().contains("device memory cannot be exported"), "{refused}");

    let log = replay.recorded.log();
    let maps = log.iter().filter(|event| matches!(event, Event::Map { bo: 4, .. })).count();
    let closes = log.iter().filter(|event| **event == Event::Close(4)).count();
    assert_eq!((maps, closes), (1, 1));
    let user = log.iter().filter(|event| matches!(event, Event::CreateBo { is_user: true, size: 0, .. })).count();
    assert_eq!(user, 2);
    assert!(!log.iter().any(|event| matches!(event, Event::Map { bo: 2 | 3, .. })), "lent memory is not mapped again");
    replay.differences.note(Difference::ImportWithoutSecondMapping);
    replay.finish(&[]);
}

/// The device heap runs full: an error, or another chunk where the driver asks for one.
fn heap(name: &str) {
    let replay = Replay::of(name);
    let refusal = replay.recorded.trace().events.iter().find_map(|event| event.get("errno")?.as_i64()).unwrap();
    let spec = BufferSpec { len_bytes: 30 << 20, usage: BufferUse::DeviceLocal, label: "code".to_owned() };
    let first = replay.device.allocate(&spec).unwrap();
    let second = replay.device.allocate(&spec).unwrap();
    replay.recorded.fail_next("create_bo", npuhal_amdxdna::errno::Errno::from_raw(refusal as i32));
    match (refusal, replay.device.allocate(&spec)) {
        (28, Err(DeviceError::OutOfMemory { memory: "device heap", wanted_bytes, .. })) => {
            assert_eq!(wanted_bytes, 30 << 20)
        }
        (11, Ok(third)) => {
            // The third lies on the border of two chunks.
            let border = 0x0800_0000 - 0x07C0_0000;
            third.write(border - 3, b"across").unwrap();
            let mut back = [0; 6];
            third.read(border - 3, &mut back).unwrap();
            assert_eq!(&back, b"across");
            third.slice(border - 2..border + 2).unwrap().fill(&mut |bytes| bytes.fill(b'-')).unwrap();
            third.read(border - 3, &mut back).unwrap();
            assert_eq!(&back, b"a----s");
            assert_eq!(replay.device.usage().heap_bytes, 128 << 20);
        }
        (_, other) => panic!("{other:?}"),
    }
    drop((first, second));
    replay.device.allocate(&spec).unwrap();

    let ours = replay.recorded.log().into_iter().filter_map(|event| match event {
        Event::CreateBo { kind, size, .. } => Some((format!("{kind:?}"), size, 0)),
        Event::Refused { kind, errno } => Some((format!("{kind:?}"), 30 << 20, i64::from(errno.raw()))),
        _ => None,
    });
    let theirs = replay.recorded.trace().events.iter().filter(|event| event["ioctl"] == "CREATE_BO").map(|event| {
        let kind = if event["dec"]["type"] == "DEV" { "Dev" } else { "DevHeap" };
        (kind.to_owned(), event["dec"]["size"].as_u64().unwrap(), event.get("errno").map_or(0, |n| n.as_i64().unwrap()))
    });
    assert_eq!(ours.collect::<Vec<_>>(), theirs.collect::<Vec<_>>(), "{name}");
    replay.finish(&[]);
}

#[test]
fn a_full_device_heap() {
    heap("npu1-heap");
    heap("npu1-heap.oot");
    heap("npu4-heap");
}

#[test]
fn opening_makes_the_heap_and_closing_gives_it_back() {
    for name in ["npu1-open", "npu4-open", "npu5-open"] {
        let replay = Replay::of(name);
        let card = replay.device.card();
        let columns = if name == "npu1-open" { 4 } else { 8 };
        assert_eq!((card.columns, card.core_rows), (columns, 4));
        replay.finish(&[]);
    }
}

/// Extents of all flushes: buffers whole when they are new, then what was written and read.
#[test]
fn buffers_and_what_is_flushed() {
    let mut replay = Replay::of("npu5-bo.oot-sync");
    let device_local = |len_bytes| BufferSpec { len_bytes, usage: BufferUse::DeviceLocal, label: "code".to_owned() };
    let tensor = replay.tensor(8192);
    tensor.write(0, &[1; 8192]).unwrap();
    tensor.read(0, &mut [0; 8192]).unwrap();
    let odd = replay.tensor(100);
    let code = replay.device.allocate(&device_local(4096)).unwrap();
    code.write(0, &[2; 4096]).unwrap();
    code.read(0, &mut [0; 4096]).unwrap();
    let large = replay.device.allocate(&device_local(40000)).unwrap();
    tensor.slice(4096..8192).unwrap().write(0, &[3; 4096]).unwrap();
    let last = replay.tensor(16384);
    assert!(matches!(odd.read(99, &mut [0; 2]), Err(DeviceError::OutOfRange { .. })));
    assert!(matches!(replay.device.allocate(&BufferSpec::tensor(0, "none")), Err(DeviceError::Misuse { .. })));

    let trace = replay.recorded.trace();
    let in_heap = |bo: u32, at: u64| {
        if bo != 1 {
            return (bo, at);
        }
        let address = 0x0400_0000 + at;
        let holds = |bo: &&trace::RecordedBo| {
            bo.xdna.is_some_and(|xdna| bo.kind == "DEV" && (xdna..xdna + bo.size.unwrap()).contains(&address))
        };
        let holder = trace.bos.values().find(holds).unwrap();
        (holder.handle, address - holder.xdna.unwrap())
    };
    let extent = |bo, direction: &str, range: &std::ops::Range<u64>| {
        let (bo, at) = in_heap(bo, range.start);
        (bo, direction.to_owned(), at, range.end - range.start)
    };
    let ours = replay.recorded.log().into_iter().flat_map(|event| match event {
        Event::Flush { bo, ranges } => ranges.iter().map(|range| extent(bo, "to_device", range)).collect(),
        Event::Invalidate { bo, range } => vec![extent(bo, "from_device", &range)],
        _ => Vec::new(),
    });
    let ours: Vec<_> = ours.collect();
    let theirs = trace.calls("SYNC_BO").map(|call| {
        let dec = &call["dec"];
        let number = |name: &str| dec[name].as_u64().unwrap();
        let bo = trace::handle_of(dec["bo"].as_str().unwrap());
        (bo, dec["dir"].as_str().unwrap().to_owned(), number("offset"), number("size"))
    });
    let mut theirs: Vec<_> = theirs.collect();
    // The recorded client flushes the last buffer twice.
    assert_eq!(theirs[theirs.len() - 1], theirs[theirs.len() - 2]);
    theirs.pop();
    assert_eq!(ours, theirs);
    drop((tensor, odd, code, large, last));
    replay.differences.note(Difference::FreshTensorFlushedOnce);
    replay.finish(&[]);
}

#[test]
fn buffers_of_the_first_generation() {
    let replay = Replay::of("npu1-bo");
    let device_local = |len_bytes| BufferSpec { len_bytes, usage: BufferUse::DeviceLocal, label: "code".to_owned() };
    let tensors = [replay.tensor(8192), replay.tensor(100)];
    let code = [4096, 40000].map(|len| replay.device.allocate(&device_local(len)).unwrap());
    let last = replay.tensor(16384);
    assert_eq!(replay.device.usage().buffer_objects, 5);
    for (buffer, handle) in tensors.iter().chain(&code).chain([&last]).zip(2..) {
        assert_eq!(replay.device.device_address(buffer), Some(replay.recorded.address_of(handle)));
    }
    drop((tensors, code, last));
    replay.finish(&[]);
}

/// Neither configuration nor preemption: START_NPU, with the payload that belongs to it.
#[test]
fn a_full_elf_without_configuration() {
    let mut replay = Replay::of("npu4-reloc-plain");
    let image = input("reloc_plain.elf");
    let boot = Program::FullElf { image: &image, kernel: "rt" };
    let mut context = replay.device.open_context(&boot).unwrap();
    let kernel = context.load(&boot).unwrap();
    let args: Vec<_> = (0..4).map(|_| replay.tensor(16384)).collect();
    let mut list = context.runlist();
    let run = list.push(&*kernel, &buffers(&args.iter().collect::<Vec<_>>())).unwrap();
    run_once(&mut list).unwrap();
    for i in 0..4 {
        list.set_arg(run, i, &Arg::Buffer(args[(i + 1) % 4].clone())).unwrap();
    }
    run_once(&mut list).unwrap();
    drop((list, kernel, context, args));
    for executed in replay.recorded.execs() {
        let recorded = &replay.recorded.trace().execs[executed.index];
        let first = replay.recorded.address_of([2, 3][executed.index]);
        let code = replay.recorded.address_of(6) as u32;
        assert_eq!(executed.packet, [0x3A00_7001, 0, code, 0, 512, 0, first as u32, (first >> 32) as u32]);
        let content = replay.recorded.trace().sha256_of(&recorded.code["bo6"]);
        assert_eq!(compare::sha256(&executed.held[&6][..512]), content.sha256);
    }
    replay.differences.note(Difference::NpuPayload);
    compare::order(&replay.recorded, &mut replay.differences);
    compare::allocations(&replay.recorded, &mut replay.differences);
}

#[test]
fn what_the_first_generation_cannot_run_is_refused() {
    let replay = Replay::of("npu1-open");
    let image = input("npu1.xclbin");
    let full = input("reloc_all.elf");
    let mut context = replay.device.open_context(&Program::Xclbin { image: &image }).unwrap();
    let wrong = Program::FullElf { image: &full, kernel: "rt:a" };
    assert!(matches!(context.load(&wrong), Err(DeviceError::Misuse { .. })));
    let unknown = context.load(&instructions("OTHER", &stream())).err().unwrap();
    assert!(unknown.to_string().contains("MLIR_AIE:MLIRAIE"), "{unknown}");
    assert!(matches!(replay.device.open_context(&wrong), Err(DeviceError::BadProgram { .. })), "8 columns of 4");
    assert!(context.load(&instructions("MLIRAIE", &[0; 6])).is_err());
}

/// Files that are not part of this repository.
fn derived(test: &str) -> Option<(std::path::PathBuf, std::path::PathBuf)> {
    Some((common::shared_golden(test, "driver")?, common::shared_golden(test, "xdna2/derived")?))
}

/// An instruction ELF on a compute unit.
#[test]
fn partial_elfs() {
    let Some((_, files)) = derived("partial_elfs") else { return };
    let image = common::read(files.join("layer_ctx1.elf"));
    for (name, xclbin) in [("npu1-partial-elf", "npu1.xclbin"), ("npu4-partial-elf", "npu4.xclbin")] {
        let replay = Replay::of(name);
        let mut context = open_units(&replay, xclbin);
        let kernel = context.load(&Program::PartialElf { unit: "MLIR_AIE", image: &image }).unwrap();
        let tensors: Vec<_> = (0..5).map(|_| replay.tensor(4096)).collect();
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&tensors.iter().collect::<Vec<_>>())).unwrap();
        run_once(&mut list).unwrap();
        assert_waits(&replay);
        let few = list.push(&*kernel, &buffers(&[&tensors[0]])).unwrap_err();
        assert!(matches!(few, DeviceError::BadArgument { .. }), "{few}");
        drop((list, kernel, context, tensors));
        replay.finish(&[]);
    }
}

/// A full ELF with a configuration: restart, other arguments, a second run, a part of a buffer.
#[test]
fn full_elf_runs() {
    let Some((traces, files)) = derived("full_elf_runs") else { return };
    let image = common::read(files.join("full_load_ctx1.elf"));
    for name in ["npu5-elf-run", "npu5-elf-run.oot-sync"] {
        let replay = Replay::open(&traces.join(format!("{name}.json")));
        let boot = Program::FullElf { image: &image, kernel: "fl00001:sequence" };
        let mut context = replay.device.open_context(&boot).unwrap();
        let kernel = context.load(&boot).unwrap();
        let tensors = [4096, 16384, 4096, 4096, 32768].map(|len| replay.tensor(len));
        let args = buffers(&tensors.iter().collect::<Vec<_>>());
        let mut list = context.runlist();
        let run = list.push(&*kernel, &args).unwrap();
        run_once(&mut list).unwrap();
        let flushes = replay.recorded.log().len();
        run_once(&mut list).unwrap();
        let again = &replay.recorded.log()[flushes..];
        assert!(
            !again.iter().any(|event| matches!(event, Event::Flush { .. })),
            "an unchanged restart flushes nothing"
        );
        let others = [replay.tensor(16384), replay.tensor(32768)];
        list.set_arg(run, 1, &Arg::Buffer(others[0].clone())).unwrap();
        list.set_arg(run, 4, &Arg::Buffer(others[1].clone())).unwrap();
        run_once(&mut list).unwrap();
        let mut second = context.runlist();
        second.push(&*kernel, &args).unwrap();
        run_once(&mut second).unwrap();
        list.set_arg(run, 0, &Arg::Buffer(tensors[4].slice(4096..8192).unwrap())).unwrap();
        run_once(&mut list).unwrap();
        assert_waits(&replay);
        drop((list, second, kernel, context, tensors, args, others));
        replay.finish(&[]);
    }
}

/// 29 runs over two kernels, one more kernel, the list again.
#[test]
fn full_elf_runlists() {
    let Some((traces, files)) = derived("full_elf_runlists") else { return };
    let [init, one, seventeen] = ["full_init_ctx1", "full_none_ctx1", "full_none_ctx17"]
        .map(|name| common::read(files.join(format!("{name}.elf"))));
    let mut replay = Replay::open(&traces.join("npu5-elf-runlist.json"));
    let boot = Program::FullElf { image: &init, kernel: "flinit" };
    let mut context = replay.device.open_context(&boot).unwrap();
    let first = context.load(&boot).unwrap();
    let layer = context.load(&Program::FullElf { image: &one, kernel: "fl00001" }).unwrap();
    let shared = [replay.tensor(4096), replay.tensor(4096)];
    let layers: Vec<_> = (0..28).map(|_| [replay.tensor(4096), replay.tensor(4096), replay.tensor(4096)]).collect();
    let args = |layer: &[BufferRef; 3]| buffers(&[&shared[0], &layer[0], &shared[1], &layer[1], &layer[2]]);
    let mut list = context.runlist();
    list.push(&*first, &args(&layers[0])[..first.signature().len()]).unwrap();
    for tensors in &layers {
        list.push(&*layer, &args(tensors)).unwrap();
    }
    assert_eq!(list.len(), 29);
    run_once(&mut list).unwrap();
    let longer = context.load(&Program::FullElf { image: &seventeen, kernel: "fl00017" }).unwrap();
    let mut single = context.runlist();
    single.push(&*longer, &args(&layers[0])).unwrap();
    run_once(&mut single).unwrap();
    context.load(&Program::FullElf { image: &one, kernel: "fl00001" }).unwrap();
    replay.differences.note(Difference::KernelNamesMayRepeat);
    list.submit().unwrap().wait(Deadline::within(Duration::from_millis(2000))).unwrap();
    assert_waits(&replay);
    drop((list, single, first, layer, longer, context, shared, layers));
    replay.finish(&[]);
}

/// The next context length: a run that goes there and back holds what a fresh run of that length holds.
#[test]
fn rebinding_to_another_context_length() {
    let Some((_, files)) = derived("rebinding_to_another_context_length") else { return };
    let images = ["full_none_ctx1", "full_none_ctx17"].map(|name| common::read(files.join(format!("{name}.elf"))));
    let recorded = Recorded::new(Trace::empty("npu5", 0));
    let replay = Replay::try_on(&recorded).unwrap();
    let programs = [0, 1].map(|i| Program::FullElf { image: &images[i], kernel: ["fl00001", "fl00017"][i] });
    let mut context = replay.device.open_context(&programs[0]).unwrap();
    let kernels = programs.map(|program| context.load(&program).unwrap());
    let tensors: Vec<_> = (0..5).map(|_| replay.tensor(4096)).collect();
    let args = buffers(&tensors.iter().collect::<Vec<_>>());
    let mut list = context.runlist();
    let code = || {
        let created = recorded.log().into_iter().rev().find_map(|event| match event {
            Event::CreateBo { bo, kind: npuhal_amdxdna::driver::BoKind::Dev, .. } => Some(bo),
            _ => None,
        });
        created.unwrap()
    };
    let fresh = [0, 1].map(|i| {
        list.push(&*kernels[i], &args).unwrap();
        code()
    });
    list.push(&*kernels[0], &args).unwrap();
    let rebound = code();
    let view = |bo| recorded.device_view(bo).unwrap();
    let before = replay.device.usage();
    for i in [1, 0, 1] {
        list.rebind(RunIndex(2), &*kernels[i]).unwrap();
        assert_eq!(view(rebound), view(fresh[i]));
    }
    let now = replay.device.usage();
    let [one, seventeen] = fresh.map(view);
    let differ: Vec<usize> =
        (0..one.len()).step_by(4).filter(|at| one[*at..at + 4] != seventeen[*at..at + 4]).collect();
    let lines: std::collections::BTreeSet<usize> = differ.iter().map(|at| at / 64).collect();
    assert!(differ.len() < 30, "{}", differ.len());
    assert_eq!(now.patched_bytes - before.patched_bytes, 3 * 4 * differ.len() as u64);
    assert_eq!(now.flushed_code_lines - before.flushed_code_lines, 3 * lines.len() as u64);
}

/// Two contexts at once that share their buffers.
#[test]
fn two_full_elf_contexts() {
    let Some((traces, files)) = derived("two_full_elf_contexts") else { return };
    let [load, none] =
        ["full_load_ctx1", "full_none_ctx17"].map(|name| common::read(files.join(format!("{name}.elf"))));
    let replay = Replay::open(&traces.join("npu5-elf-two-contexts.json"));
    let boots =
        [Program::FullElf { image: &load, kernel: "fl00001" }, Program::FullElf { image: &none, kernel: "fl00017" }];
    let mut contexts = boots.map(|boot| replay.device.open_context(&boot).unwrap());
    let tensors: Vec<_> = (0..5).map(|_| replay.tensor(4096)).collect();
    let args = buffers(&tensors.iter().collect::<Vec<_>>());
    let mut lists: Vec<_> = contexts
        .iter_mut()
        .zip(boots)
        .map(|(context, boot)| {
            let kernel = context.load(&boot).unwrap();
            let mut list = context.runlist();
            list.push(&*kernel, &args).unwrap();
            list
        })
        .collect();
    let in_flight: Vec<_> = lists.iter_mut().map(|list| list.submit().unwrap()).collect();
    assert!(matches!(tensors[0].write(0, &[0]), Err(DeviceError::Busy)));
    for submission in in_flight {
        submission.wait(Deadline::never()).unwrap();
    }
    run_once(&mut lists[0]).unwrap();
    lists[1].submit().unwrap().wait(Deadline::within(Duration::from_millis(2000))).unwrap();
    tensors[0].write(0, &[0]).unwrap();
    assert_waits(&replay);
    drop((lists, contexts, tensors, args));
    replay.finish(&[]);
}

/// The second client: fewer registers, one argument word, a type in the header of chains; otherwise the same commands.
#[test]
fn a_client_of_another_make() {
    let mut replay = Replay::of("npu1-iree-kmq");
    // That client sends registers up to the last argument it sets: four buffers.
    let image = client::xclbin_with_buffers(4);
    let stream = stream();
    let partial = npuhal_amdxdna::format::elf::PartialElfSpec {
        code: stream.clone(),
        symbols: Vec::new(),
        patches: Vec::new(),
        uid: [0; 16],
    };
    let partial = partial.build().unwrap().to_bytes().unwrap();
    let tensors: Vec<_> = (1..=4).map(|i| replay.tensor(4096 * i)).collect();
    let args = buffers(&tensors.iter().collect::<Vec<_>>());
    let mut context = replay.device.open_context(&Program::Xclbin { image: &image }).unwrap();
    let kernel = context.load(&instructions("MLIR_AIE", &stream)).unwrap();
    let npu = context.load(&Program::PartialElf { unit: "MLIR_AIE", image: &partial }).unwrap();
    let mut list = context.runlist();
    list.push(&*kernel, &args).unwrap();
    run_once(&mut list).unwrap();
    let mut other = context.runlist();
    other.push(&*npu, &args[..1]).unwrap();
    run_once(&mut other).unwrap();
    list.push(&*kernel, &args).unwrap();
    list.push(&*kernel, &args).unwrap();
    run_once(&mut list).unwrap();
    let mut last = context.runlist();
    last.push(&*kernel, &args).unwrap();
    assert!(matches!(run_once(&mut last), Err(RunError::Failed { state, .. }) if state == "ERROR"));
    drop((list, other, last, kernel, npu, context));

    let execs = replay.recorded.execs();
    let trace = replay.recorded.trace();
    for at in [0, 3] {
        compare::exec(&replay.recorded, &execs[at], false, &mut replay.differences);
    }
    let words = |packet: &trace::RecordedPacket| -> Vec<u32> {
        packet.bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    };
    let theirs = words(trace.execs[1].packet.as_ref().unwrap());
    let ours = &execs[1].packet;
    let count = |header: u32| header >> 12 & 0x7FF;
    assert_eq!((count(ours[0]), count(theirs[0])), (7, 6));
    assert_eq!((ours[0] & !0x007F_F000, ours[1]), (theirs[0] & !0x007F_F000, theirs[1]));
    assert_eq!((ours[3..7].to_vec(), ours[7]), (theirs[3..7].to_vec(), 0));
    let theirs = words(trace.execs[2].packet.as_ref().unwrap());
    let ours = &execs[2].packet;
    assert_eq!((ours[0] | 3 << 28, &ours[1..7], ours.len()), (theirs[0], &theirs[1..7], theirs.len()));
    let first = &execs[0].packet;
    for sub in &execs[2].sub {
        let code = [4, 5];
        let same = (0..first.len()).all(|i| code.contains(&i) || first[i] == sub[i]);
        assert!(same, "{sub:08x?}");
    }
    replay.differences.note(Difference::OtherClient);
}

/// Every entry of the table is needed.
#[test]
fn the_table_of_differences_is_closed() {
    relocations_of_full_elfs();
    a_full_elf_without_configuration();
    single_runs_of_a_compute_unit();
    chains_of_runs();
    failures_are_typed_and_name_the_run();
    lent_exported_and_imported_buffers();
    buffers_and_what_is_flushed();
    a_client_of_another_make();
    full_elf_runs();
    full_elf_runlists();
    let seen = compare::SEEN.lock().unwrap();
    let needs_files = [Difference::SharedPdi, Difference::KernelNamesMayRepeat];
    let has_files = common::shared_golden("the_table_of_differences_is_closed", "driver").is_some();
    for (difference, reason) in compare::ALLOWED {
        assert!(
            seen.contains(difference) || (!has_files && needs_files.contains(difference)),
            "unused: {difference:?}"
        );
        assert!(!reason.is_empty());
    }
}

//! The client by itself: faults, limits, incremental patching, life and loss of contexts.

use crate::recorded::{Event, Recorded};
use crate::trace::Trace;
use crate::{Replay, buffers, input, instructions, run_once, stream};
use npuhal_amdxdna::driver::BoKind;
use npuhal_amdxdna::errno::Errno;
use npuhal_amdxdna::format::elf::FullElfSpec;
use npuhal_amdxdna::format::xclbin::{AddressQualifier, Design, DesignSpec, KernelArgument};
use npuhal_core::device::{Arg, Context, ContextState, Deadline, Device, Kernel, Program, RunIndex, Runlist};
use npuhal_core::{DeviceError, RunError};
use std::sync::Arc;
use std::time::Duration;

fn device(part: &str, submissions: usize) -> (Arc<Recorded>, Replay) {
    let recorded = Recorded::new(Trace::empty(part, submissions));
    let replay = Replay::try_on(&recorded).unwrap();
    (recorded, replay)
}

/// A context of the full ELF `file` with its kernel.
fn full_elf(replay: &Replay, file: &str) -> (Box<dyn Context>, Box<dyn Kernel>) {
    let image = input(file);
    let boot = Program::FullElf { image: &image, kernel: "rt:a" };
    let mut context = replay.device.open_context(&boot).unwrap();
    let kernel = context.load(&boot).unwrap();
    (context, kernel)
}

/// Everything once: device, context, kernel, buffers, a list of two chains, an argument exchanged, the list again.
fn everything(recorded: &Arc<Recorded>, part: &str) -> Result<(), RunError> {
    let replay = Replay::try_on(recorded)?;
    let image = input(if part == "npu1" { "npu1.xclbin" } else { "reloc_all.elf" });
    let boot = match part {
        "npu1" => Program::Xclbin { image: &image },
        _ => Program::FullElf { image: &image, kernel: "rt:a" },
    };
    let mut context = replay.device.open_context(&boot)?;
    let stream = stream();
    let kernel = match part {
        "npu1" => context.load(&instructions("MLIR_AIE", &stream))?,
        _ => context.load(&boot)?,
    };
    let spec = npuhal_core::device::BufferSpec::tensor(4096, "tensor");
    let tensors = (0..4).map(|_| replay.device.allocate(&spec)).collect::<Result<Vec<_>, _>>()?;
    tensors[0].write(5, &[1; 100])?;
    let args = buffers(&tensors.iter().collect::<Vec<_>>());
    let mut list = context.runlist();
    for _ in 0..26 {
        list.push(&*kernel, &args)?;
    }
    list.submit()?.wait(Deadline::never())?;
    list.set_arg(RunIndex(3), 0, &args[1])?;
    list.submit()?.wait(Deadline::never())?;
    tensors[3].read(0, &mut [0; 64])?;
    Ok(())
}

/// Calls of [`everything`], by name.
const CALLS: [&str; 9] =
    ["version", "get_info", "create_bo", "bo_info", "map", "create_context", "config_cus", "exec", "wait"];

#[test]
fn every_call_may_be_interrupted() {
    for part in ["npu1", "npu4"] {
        for call in CALLS.into_iter().chain(["close_bo", "destroy_syncobj", "destroy_context"]) {
            let recorded = Recorded::new(Trace::empty(part, 8));
            recorded.fail_after(call, 0, Errno::EINTR);
            recorded.fail_after(call, 0, Errno::EINTR);
            everything(&recorded, part).unwrap_or_else(|error| panic!("{part} {call}: {error}"));
            assert!(recorded.open_bos().is_empty(), "{part} {call}");
            assert!(recorded.faults_are_spent() || call == "config_cus");
        }
    }
}

#[test]
fn whatever_call_fails_nothing_is_leaked_and_the_error_has_a_meaning() {
    for part in ["npu1", "npu4"] {
        for call in CALLS {
            for errno in [Errno::ENOMEM, Errno::EINVAL, Errno::ENODEV, Errno::ENOSPC, Errno::EAGAIN, Errno::EFAULT] {
                for calls in 0..200 {
                    let recorded = Recorded::new(Trace::empty(part, 8));
                    recorded.fail_after(call, calls, errno);
                    let result = everything(&recorded, part);
                    let (what, is_spent) = (format!("{part} {call} {errno} {calls}"), recorded.faults_are_spent());
                    assert!(recorded.open_bos().is_empty(), "{what}: leaked {:?}", recorded.open_bos());
                    assert_contexts_are_destroyed(&recorded, &what);
                    if !is_spent {
                        result.unwrap_or_else(|error| panic!("{what}: {error}"));
                        break;
                    }
                    if let Err(error) = result {
                        assert!(error.to_string().len() > 20, "{what}: {error}");
                    }
                }
            }
        }
    }
}

fn assert_contexts_are_destroyed(recorded: &Recorded, what: &str) {
    let log = recorded.log();
    let count = |is: fn(&Event) -> bool| log.iter().filter(|event| is(event)).count();
    let created = count(|event| matches!(event, Event::CreateContext { .. }));
    assert_eq!(count(|event| matches!(event, Event::DestroySyncobj(_))), created, "{what}");
    assert_eq!(count(|event| matches!(event, Event::DestroyContext(_))), created, "{what}");
}

#[test]
fn submitting_again_unchanged_writes_and_flushes_no_code() {
    let (recorded, replay) = device("npu4", 10);
    let (mut context, kernel) = full_elf(&replay, "reloc_all.elf");
    let tensors: Vec<_> = (0..4).map(|_| replay.tensor(16384)).collect();
    let mut list = context.runlist();
    for _ in 0..29 {
        list.push(&*kernel, &buffers(&tensors.iter().collect::<Vec<_>>())).unwrap();
    }
    run_once(&mut list).unwrap();
    let before = recorded.log().len();
    for _ in 0..3 {
        run_once(&mut list).unwrap();
    }
    let later = recorded.log().split_off(before);
    assert!(later.iter().all(|event| matches!(event, Event::Exec(_) | Event::Wait { .. })), "{later:?}");
    assert_eq!(later.len(), 3 * 3, "two chains and one wait each");
}

#[test]
fn another_kernel_rewrites_the_words_that_differ_and_flushes_their_lines() {
    let (recorded, replay) = device("npu4", 0);
    // One ELF, and the same with one word of its code changed.
    let image = input("reloc_all.elf");
    let text = npuhal_amdxdna::format::elf::Program::parse(&image).unwrap();
    let (_, section) = text.elf().find(".ctrltext.0").unwrap();
    let word = section.offset as usize + 0x1C0;
    let mut changed = image.clone();
    changed[word] ^= 0xFF;
    let boot = Program::FullElf { image: &image, kernel: "rt:a" };
    let mut context = replay.device.open_context(&boot).unwrap();
    let kernels = [&image, &changed].map(|image| context.load(&Program::FullElf { image, kernel: "rt:a" }).unwrap());
    let tensors: Vec<_> = (0..4).map(|_| replay.tensor(16384)).collect();
    let mut list = context.runlist();
    let run = list.push(&*kernels[0], &buffers(&tensors.iter().collect::<Vec<_>>())).unwrap();
    let objects = replay.device.usage().buffer_objects;
    let before = recorded.log().len();
    let counts = replay.device.usage();
    list.rebind(run, &*kernels[1]).unwrap();
    let now = replay.device.usage();
    assert_eq!((now.patched_bytes, now.flushed_code_lines), (counts.patched_bytes + 4, counts.flushed_code_lines + 1));
    let later = recorded.log().split_off(before);
    let [Event::Flush { ranges, .. }] = &later[..] else { panic!("{later:?}") };
    assert_eq!(ranges.len(), 1);
    assert_eq!(ranges[0].end - ranges[0].start, 64);
    assert_eq!(ranges[0].start % 0x8000, 0x1C0);

    // The same kernel again: nothing. There and back a hundred times: no more memory.
    let before = recorded.log().len();
    list.rebind(run, &*kernels[1]).unwrap();
    assert_eq!(recorded.log().len(), before);
    for i in 0..100 {
        list.rebind(run, &*kernels[i % 2]).unwrap();
    }
    assert_eq!(replay.device.usage().buffer_objects, objects);
    assert!(replay.device.usage().program_cache_bytes > 0);
}

#[test]
fn rebinding_to_a_kernel_of_other_sections_makes_the_code_of_a_fresh_run() {
    let (recorded, replay) = device("npu4", 0);
    let [all, without] = ["reloc_all.elf", "reloc_nopdi.elf"].map(input);
    let boot = Program::FullElf { image: &all, kernel: "rt:a" };
    let mut context = replay.device.open_context(&boot).unwrap();
    let tensors: Vec<_> = (0..4).map(|_| replay.tensor(16384)).collect();
    let args = buffers(&tensors.iter().collect::<Vec<_>>());
    let kernels = [&all, &without].map(|image| context.load(&Program::FullElf { image, kernel: "rt:a" }).unwrap());
    let mut list = context.runlist();
    let run = list.push(&*kernels[0], &args).unwrap();
    let code = |from: usize| -> Vec<_> {
        let events = recorded.log().split_off(from);
        let created = events.into_iter().filter_map(|event| match event {
            Event::CreateBo { bo, kind: BoKind::Dev, size: 32768, .. } => Some(bo),
            _ => None,
        });
        created.collect()
    };
    let own = code(0);
    let initial: Vec<_> = own.iter().map(|bo| recorded.device_view(*bo).unwrap()).collect();
    list.rebind(run, &*kernels[1]).unwrap();
    let rebound: Vec<_> = own.iter().map(|bo| recorded.device_view(*bo).unwrap()).collect();
    list.rebind(run, &*kernels[0]).unwrap();
    let back: Vec<_> = own.iter().map(|bo| recorded.device_view(*bo).unwrap()).collect();
    assert_eq!(rebound.len(), 3, "instructions, save, restore");
    assert_ne!(rebound[0], back[0]);
    assert_eq!(back, initial);
    let other = context.runlist().push(&*kernels[0], &args[..3]).unwrap_err();
    assert!(matches!(other, DeviceError::BadArgument { .. }), "{other}");
}

#[test]
fn a_binding_that_fails_changes_nothing_and_the_next_one_is_whole() {
    let (recorded, replay) = device("npu4", 0);
    let image = input("reloc_all.elf");
    let program = npuhal_amdxdna::format::elf::Program::parse(&image).unwrap();
    let (_, section) = program.elf().find(".ctrltext.0").unwrap();
    let start = section.offset as usize;
    let mut context = replay.device.open_context(&Program::FullElf { image: &image, kernel: "rt:a" }).unwrap();
    let mut load = |image: &[u8]| context.load(&Program::FullElf { image, kernel: "rt:a" });
    let mut changed = image.clone();
    changed[start + 0x1C0] ^= 0xFF;
    let [first, second] = [&image, &changed].map(|image| load(image).unwrap());
    // An address so high that no buffer fits behind it: somewhere in the code is the word that makes one.
    let candidates: Vec<_> = (0..section.data.len())
        .step_by(4)
        .filter_map(|at| {
            let mut image = image.clone();
            image[start + at..start + at + 4].fill(0xFF);
            load(&image).ok()
        })
        .collect();
    let tensors: Vec<_> = (0..4).map(|_| replay.tensor(16384)).collect();
    let args = buffers(&tensors.iter().collect::<Vec<_>>());
    let mut list = context.runlist();
    let run = list.push(&*first, &args).unwrap();
    let code: Vec<_> = recorded
        .log()
        .into_iter()
        .filter_map(|event| match event {
            Event::CreateBo { bo, kind: BoKind::Dev, size: 32768, .. } => Some(bo),
            _ => None,
        })
        .collect();
    let views = || code.iter().map(|bo| recorded.device_view(*bo).unwrap()).collect::<Vec<_>>();
    let before = views();
    list.rebind(run, &*second).unwrap();
    let wanted = views();
    list.rebind(run, &*first).unwrap();
    assert_eq!(views(), before);
    let mut probe = context.runlist();
    let mut cannot_be_bound = |kernel: &dyn Kernel| probe.push(kernel, &args).is_err();
    let bad = candidates.iter().find(|kernel| cannot_be_bound(&***kernel)).expect("a kernel that cannot be bound");
    let error = list.rebind(run, &**bad).unwrap_err();
    assert!(matches!(error, DeviceError::BadProgram { .. }), "{error}");
    assert_eq!(views(), before);
    list.rebind(run, &*second).unwrap();
    assert_eq!(views(), wanted);
}

#[test]
fn buffers_are_busy_while_a_list_is_in_flight() {
    let (_, replay) = device("npu1", 4);
    let mut context = replay.device.open_context(&Program::Xclbin { image: &input("npu1.xclbin") }).unwrap();
    let kernel = context.load(&instructions("MLIR_AIE", &stream())).unwrap();
    let tensor = replay.tensor(4096);
    let mut list = context.runlist();
    let run = list.push(&*kernel, &buffers(&[&tensor])).unwrap();
    let submission = list.submit().unwrap();
    assert!(matches!(tensor.write(0, &[1]), Err(DeviceError::Busy)));
    assert!(matches!(tensor.read(0, &mut [1]), Err(DeviceError::Busy)));
    assert!(matches!(tensor.fill(&mut |_| ()), Err(DeviceError::Busy)));
    assert!(matches!(list.submit(), Err(DeviceError::Misuse { .. })));
    assert!(matches!(list.push(&*kernel, &[]), Err(DeviceError::Misuse { .. })));
    assert!(matches!(list.rebind(run, &*kernel), Err(DeviceError::Misuse { .. })));
    assert_eq!(submission.wait(Deadline::never()).unwrap().runs, 1);
    tensor.write(0, &[1]).unwrap();
    // A submission that nobody waits for is waited for when it is dropped.
    drop(list.submit().unwrap());
    tensor.write(0, &[1]).unwrap();
    assert_eq!(context.state(), ContextState::Ready);
    // It also keeps the context open.
    let submission = list.submit().unwrap();
    drop(context);
    submission.wait(Deadline::never()).unwrap();
    assert!(matches!(list.submit(), Err(DeviceError::ContextLost { .. })));
}

#[test]
fn contexts_stop_below_the_limit_and_go_together_on_the_first_generation() {
    let image = input("npu1.xclbin");
    let boot = Program::Xclbin { image: &image };
    let (_, first) = device("npu1", 0);
    let mut contexts: Vec<_> = (0..5).map(|_| first.device.open_context(&boot).unwrap()).collect();
    assert!(matches!(first.device.open_context(&boot), Err(DeviceError::ContextLimit { open: 5, limit: 5, .. })));
    contexts.pop();
    for context in &contexts {
        assert!(matches!(context.state(), ContextState::Lost(reason) if reason.contains("go together")));
    }
    assert_eq!(first.device.open_context(&boot).unwrap().state(), ContextState::Ready);

    let image = input("npu4.xclbin");
    let boot = Program::Xclbin { image: &image };
    let (_, second) = device("npu4", 0);
    let mut contexts: Vec<_> = (0..15).map(|_| second.device.open_context(&boot).unwrap()).collect();
    assert!(matches!(second.device.open_context(&boot), Err(DeviceError::ContextLimit { limit: 15, .. })));
    contexts.pop();
    assert!(contexts.iter().all(|context| context.state() == ContextState::Ready));
}

#[test]
fn a_context_that_the_driver_forgot_is_lost() {
    let (recorded, replay) = device("npu4", 4);
    let (mut context, kernel) = full_elf(&replay, "reloc_all.elf");
    let tensor = replay.tensor(16384);
    let mut list = context.runlist();
    list.push(&*kernel, &buffers(&[&tensor; 4])).unwrap();
    recorded.fail_next("exec", Errno::ENOENT);
    assert!(matches!(list.submit(), Err(DeviceError::ContextLost { .. })));
    assert!(matches!(context.state(), ContextState::Lost(_)));
    tensor.write(0, &[1]).unwrap();
    let (mut context, kernel) = full_elf(&replay, "reloc_all.elf");
    let mut list = context.runlist();
    list.push(&*kernel, &buffers(&[&tensor; 4])).unwrap();
    run_once(&mut list).unwrap();
}

#[test]
fn a_list_of_which_a_part_was_refused_loses_the_context_and_frees_the_buffers() {
    let (recorded, replay) = device("npu4", 4);
    let (mut context, kernel) = full_elf(&replay, "reloc_all.elf");
    let tensor = replay.tensor(16384);
    let mut list = context.runlist();
    for _ in 0..30 {
        list.push(&*kernel, &buffers(&[&tensor; 4])).unwrap();
    }
    recorded.fail_after("exec", 1, Errno::EINVAL);
    assert!(matches!(list.submit(), Err(DeviceError::Driver { .. })));
    assert!(matches!(context.state(), ContextState::Lost(_)));
    tensor.write(0, &[1]).unwrap();
}

#[test]
fn the_first_command_of_a_context_may_be_signalled_early() {
    for (times, is_refused) in [(1, false), (50, false), (1_000_000, true)] {
        let (recorded, replay) = device("npu4", 4);
        recorded.signal_early(times);
        let (mut context, kernel) = full_elf(&replay, "reloc_all.elf");
        let tensor = replay.tensor(16384);
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&tensor; 4])).unwrap();
        match run_once(&mut list) {
            Ok(()) => assert!(!is_refused),
            Err(RunError::Failed { state, detail, run }) => {
                assert!(is_refused && state == "NEW" && run == Some(RunIndex(0)), "{state}");
                assert!(detail.contains("refused by the driver when it was to run"), "{detail}");
            }
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn many_runs_keep_memory_and_handles_flat() {
    let (recorded, replay) = device("npu1", 3000);
    let mut context = replay.device.open_context(&Program::Xclbin { image: &input("npu1.xclbin") }).unwrap();
    let kernel = context.load(&instructions("MLIR_AIE", &stream())).unwrap();
    let tensor = replay.tensor(4096);
    let mut list = context.runlist();
    let run = list.push(&*kernel, &buffers(&[&tensor, &tensor])).unwrap();
    run_once(&mut list).unwrap();
    let usage = || {
        let usage = replay.device.usage();
        (usage.buffer_objects, usage.heap_bytes, usage.program_cache_bytes, recorded.open_bos().len())
    };
    let before = usage();
    for i in 0..1000 {
        list.set_arg(run, i % 2, &Arg::Buffer(tensor.slice(64..128).unwrap())).unwrap();
        run_once(&mut list).unwrap();
        let mut short = context.runlist();
        short.push(&*kernel, &buffers(&[&tensor])).unwrap();
        run_once(&mut short).unwrap();
    }
    assert_eq!(usage(), before);
}

#[test]
fn arguments_are_checked_when_they_are_given() {
    let (_, replay) = device("npu4", 0);
    let (_, other) = device("npu4", 0);
    let (mut context, kernel) = full_elf(&replay, "reloc_all.elf");
    let tensor = replay.tensor(16384);
    let mut list = context.runlist();
    let wrong = |result: Result<RunIndex, DeviceError>, wanted: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, DeviceError::BadArgument { .. }), "{error}");
        assert!(error.to_string().contains(wanted), "{error}");
    };
    wrong(list.push(&*kernel, &buffers(&[&tensor; 5])), "wanted 4 arguments, found 5");
    wrong(list.push(&*kernel, &buffers(&[&tensor; 3])), "wanted 4 arguments, found 3");
    let mut args = buffers(&[&tensor; 4]);
    args[2] = Arg::U32(7);
    wrong(list.push(&*kernel, &args), "argument 2: wanted a buffer, found a 32-bit number");
    args[2] = Arg::Buffer(other.tensor(4096));
    wrong(list.push(&*kernel, &args), "a buffer of the same device");
    args[2] = Arg::Buffer(tensor.slice(2..100).unwrap());
    wrong(list.push(&*kernel, &args), "a multiple of 4");
    assert!(list.is_empty());
    assert!(matches!(list.submit(), Err(DeviceError::Misuse { .. })));
    let (mut second, foreign) = full_elf(&replay, "reloc_all.elf");
    assert!(matches!(list.push(&*foreign, &buffers(&[&tensor; 4])), Err(DeviceError::Misuse { .. })));
    assert!(matches!(second.runlist().rebind(RunIndex(0), &*foreign), Err(DeviceError::Misuse { .. })));
    assert!(matches!(second.load(&Program::Builtin { name: "copy" }), Err(DeviceError::BadProgram { .. })));
    assert!(matches!(
        replay.device.open_context(&Program::Builtin { name: "copy" }),
        Err(DeviceError::Unsupported { .. })
    ));
}

/// The xclbin of the recordings with `count` buffers declared.
pub(crate) fn xclbin_with_buffers(count: u32) -> Vec<u8> {
    let design = Design::parse(&input("npu1.xclbin")).unwrap();
    let mut metadata = design.metadata.clone();
    metadata.kernels[0].arguments.truncate(3);
    for i in 0..count {
        metadata.kernels[0].arguments.push(KernelArgument {
            name: format!("bo{i}"),
            id: 3 + i,
            qualifier: AddressQualifier::Global,
            size_bytes: 8,
            offset_bytes: 0x14 + 8 * i,
            host_size_bytes: 8,
            ..KernelArgument::default()
        });
    }
    DesignSpec { uuid: design.uuid, partition: design.partition, metadata }.build().unwrap().to_bytes()
}

#[test]
fn a_register_map_too_long_for_a_single_slot_goes_as_a_chain_of_one() {
    for (buffers_declared, opcode, words) in [(7, 0, 19), (8, 19, 8)] {
        let (recorded, replay) = device("npu1", 1);
        let image = xclbin_with_buffers(buffers_declared);
        let mut context = replay.device.open_context(&Program::Xclbin { image: &image }).unwrap();
        let kernel = context.load(&instructions("MLIR_AIE", &stream())).unwrap();
        assert_eq!(kernel.signature().len(), buffers_declared as usize);
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&replay.tensor(64)])).unwrap();
        run_once(&mut list).unwrap();
        let executed = recorded.execs().remove(0);
        let header = executed.packet[0];
        assert_eq!((header >> 23 & 0x1F, header >> 12 & 0x7FF), (opcode, words + u32::from(opcode == 0)));
    }
}

#[test]
fn opcodes_that_a_part_lacks_are_refused_at_loading() {
    let spec = FullElfSpec {
        kernel: "k".to_owned(),
        instance: "i".to_owned(),
        arguments: 1,
        columns: 4,
        pdi: vec![1; 64],
        code: stream(),
        symbols: Vec::new(),
        patches: Vec::new(),
        uid: (0, [0; 16]),
    };
    let image = spec.build().unwrap().to_bytes().unwrap();
    let (_, replay) = device("npu1", 0);
    let boot = Program::FullElf { image: &image, kernel: "k:i" };
    let mut context = replay.device.open_context(&boot).unwrap();
    let refused = context.load(&boot).err().unwrap();
    assert!(matches!(refused, DeviceError::Unsupported { .. }), "{refused}");
    assert!(refused.to_string().contains("START_NPU_PREEMPT_ELF"), "{refused}");
}

#[test]
fn a_cached_program_does_not_slip_into_a_context_of_another_shape() {
    let (_, replay) = device("npu4", 0);
    let spec = |columns| FullElfSpec {
        kernel: "k".to_owned(),
        instance: "i".to_owned(),
        arguments: 1,
        columns,
        pdi: vec![1; 64],
        code: stream(),
        symbols: Vec::new(),
        patches: Vec::new(),
        uid: (0, [0; 16]),
    };
    let [narrow, wide] = [4, 8].map(|columns| spec(columns).build().unwrap().to_bytes().unwrap());
    let [narrow, wide] = [&narrow, &wide].map(|image| Program::FullElf { image, kernel: "k" });
    let mut context = replay.device.open_context(&narrow).unwrap();
    context.load(&narrow).unwrap();
    let mut other = replay.device.open_context(&wide).unwrap();
    let refused = other.load(&narrow).err().unwrap();
    assert!(refused.to_string().contains("wanted 8 columns, as the context has, found 4"), "{refused}");
    other.load(&wide).unwrap();
}

#[test]
fn instruction_streams_must_be_transactions() {
    let (_, replay) = device("npu1", 0);
    let mut context = replay.device.open_context(&Program::Xclbin { image: &input("npu1.xclbin") }).unwrap();
    for stream in [&[][..], &[1, 2, 3], &[0xFF; 32], &stream()[..52]] {
        let refused = context.load(&instructions("MLIR_AIE", stream)).err().unwrap();
        assert!(matches!(refused, DeviceError::BadProgram { .. }), "{refused}");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(300))]

    /// Damaged containers are refused or loaded; nothing panics and nothing is leaked.
    #[test]
    fn damaged_containers_do_no_harm(
        is_elf in proptest::bool::ANY,
        damage in proptest::collection::vec((0_usize..6000, proptest::num::u8::ANY), 1..6),
    ) {
        static DEVICE: std::sync::LazyLock<(Arc<Recorded>, Replay)> = std::sync::LazyLock::new(|| device("npu4", 0));
        let (recorded, replay) = &*DEVICE;
        let mut image = input(if is_elf { "reloc_all.elf" } else { "npu4.xclbin" });
        let len = image.len();
        for (at, byte) in damage {
            image[at % len] = byte;
        }
        let (boot, program, stream);
        if is_elf {
            boot = Program::FullElf { image: &image, kernel: "rt:a" };
            program = boot;
        } else {
            stream = crate::stream();
            boot = Program::Xclbin { image: &image };
            program = instructions("MLIR_AIE", &stream);
        }
        let open = recorded.open_bos().len();
        let loaded = replay.device.open_context(&boot).and_then(|mut context| {
            let kernel = context.load(&program)?;
            let tensor = replay.tensor(4096);
            let count = kernel.signature().len().min(40);
            context.runlist().push(&*kernel, &buffers(&vec![&tensor; count]))
        });
        drop(loaded);
        proptest::prop_assert_eq!(recorded.open_bos().len(), open);
    }
}

#[test]
fn waiting_for_an_async_host() {
    let (_, replay) = device("npu4", 2);
    let (mut context, kernel) = full_elf(&replay, "reloc_all.elf");
    let mut list: Box<dyn Runlist> = context.runlist();
    list.push(&*kernel, &buffers(&[&replay.tensor(16384); 4])).unwrap();
    let submission = list.submit().unwrap();
    let future = submission.completed(Deadline::within(Duration::from_secs(5)));
    assert_eq!(block_on(future).unwrap().runs, 1);
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Thread(std::thread::Thread);
    impl std::task::Wake for Thread {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Thread(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(value) => return value,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

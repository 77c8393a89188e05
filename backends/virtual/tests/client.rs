//! The client of the driver crate on the virtual NPU, through level 1.

mod common;

use common::{
    Bench, COPY_WORDS, Flow, SCALE_ELEMENTS, buffers, combinations, copy_kit, patience, pattern, read_words, scale_kit,
    submit, version_of,
};
use npuhal_amdxdna::format::elf::{Elf, Program as ElfProgram, Section, code};
use npuhal_amdxdna::format::registers::{Direction, TokenWait};
use npuhal_amdxdna::format::txn::OpKind;
use npuhal_amdxdna::silicon::Silicon;
use npuhal_core::RunError;
use npuhal_core::card::Claim;
use npuhal_core::device::{BufferRef, Deadline, Device, LengthUnit, Program, RunIndex};
use npuhal_virtual::{DiagnosisKind, VirtualSpec, kit};
use std::time::Duration;

#[test]
fn single_runs_give_the_right_answer_everywhere() {
    for (spec, flow) in combinations() {
        let bench = Bench::new(&spec);
        let what = format!("{spec} {flow:?}");
        assert!(bench.npu.card().is_virtual);

        let input = pattern(COPY_WORDS, 5);
        let (source, target) = (bench.buffer(&input).unwrap(), bench.empty(COPY_WORDS).unwrap());
        let (mut context, kernel) = bench.load(&copy_kit(spec.silicon, flow), flow).unwrap();
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&source, &target])).unwrap();
        let completion = submit(&mut *list).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(completion.runs, 1);
        assert_eq!(completion.device_time.unwrap().claim, Claim::Modelled, "{what}");
        assert_eq!(read_words(&target).unwrap(), input, "{what}");
        drop((list, kernel, context));

        let input = pattern(SCALE_ELEMENTS, 9);
        let (vector, result) = (bench.buffer(&input).unwrap(), bench.empty(SCALE_ELEMENTS).unwrap());
        let factor = bench.buffer(&[7]).unwrap();
        let (mut context, kernel) = bench.load(&scale_kit(spec.silicon, flow), flow).unwrap();
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&vector, &factor, &result])).unwrap();
        for factor_value in [7_u32, 11] {
            factor.write(0, &factor_value.to_le_bytes()).unwrap();
            submit(&mut *list).unwrap_or_else(|error| panic!("{what}: {error}"));
            let wanted: Vec<u32> = input.iter().map(|x| x.wrapping_mul(factor_value)).collect();
            assert_eq!(read_words(&result).unwrap(), wanted, "{what}");
        }
        bench.assert_clean(&what);
    }
}

#[test]
fn only_configurations_that_the_code_names_are_expanded() {
    let bench = Bench::new(&VirtualSpec::new(Silicon::Npu5));
    let kit = copy_kit(Silicon::Npu5, Flow::FullElf);
    let bytes = kit.full_elf(true).unwrap();
    let mut elf = Elf::parse(&bytes).unwrap();
    // Another configuration, of the same name, that cannot be expanded.
    let (_, used) = elf.find(".pdi.1").unwrap();
    let mut extra = Section::new(".pdi.1", used.kind, code::SHF_COMPRESSED, 4, vec![0xff; 64]);
    extra.name_at = used.name_at;
    extra.offset = bytes.len().next_multiple_of(16) as u32;
    extra.size = 64;
    elf.header.sections_at = extra.offset + 64;
    elf.sections.push(extra);
    let image = elf.to_bytes().unwrap();
    assert_eq!(ElfProgram::parse(&image).unwrap().pdi_sections().count(), 2);
    let program = Program::FullElf { image: &image, kernel: &kit.name };
    let mut context = bench.npu.open_context(&program).unwrap();
    context.load(&program).unwrap();
}

#[test]
fn a_runlist_of_29_runs_in_order() {
    for (spec, flow) in combinations() {
        let bench = Bench::new(&spec);
        let kit = kit::copy(spec.silicon, version_of(flow), 128, 2, 32).unwrap();
        let (mut context, kernel) = bench.load(&kit, flow).unwrap();
        let first = pattern(128, 3);
        let chain: Vec<BufferRef> =
            (0..30).map(|i| if i == 0 { bench.buffer(&first).unwrap() } else { bench.empty(128).unwrap() }).collect();
        let mut list = context.runlist();
        for pair in chain.windows(2) {
            list.push(&*kernel, &buffers(&[&pair[0], &pair[1]])).unwrap();
        }
        for seed in 0..3 {
            let first = pattern(128, seed);
            chain[0].write(0, &common::to_bytes(&first)).unwrap();
            assert_eq!(submit(&mut *list).unwrap().runs, 29);
            assert_eq!(read_words(&chain[29]).unwrap(), first, "{spec} {flow:?}");
        }
        // One load: the configuration stays resident.
        assert_eq!(bench.hardware.statistics().pdi_loads, 1, "{spec} {flow:?}");
        assert_eq!(bench.hardware.statistics().runs, 87);
        bench.assert_clean(&format!("{spec} {flow:?}"));
    }
}

#[test]
fn two_lists_are_in_flight_at_once() {
    for (spec, flow) in combinations() {
        let bench = Bench::new(&spec);
        let kit = kit::copy(spec.silicon, version_of(flow), 128, 1, 32).unwrap();
        let (mut context, kernel) = bench.load(&kit, flow).unwrap();
        let (a, b, c) = (bench.buffer(&pattern(128, 1)).unwrap(), bench.empty(128).unwrap(), bench.empty(128).unwrap());
        let (mut first, mut second) = (context.runlist(), context.runlist());
        first.push(&*kernel, &buffers(&[&a, &b])).unwrap();
        second.push(&*kernel, &buffers(&[&b, &c])).unwrap();
        let mut in_flight = vec![first.submit().unwrap()];
        for i in 0..20 {
            in_flight.push(if i % 2 == 0 { second.submit().unwrap() } else { first.submit().unwrap() });
            assert_eq!(in_flight.remove(0).wait(patience()).unwrap().runs, 1);
        }
        in_flight.remove(0).wait(patience()).unwrap();
        assert_eq!(read_words(&c).unwrap(), pattern(128, 1));
        bench.assert_clean(&format!("{spec} {flow:?}"));
    }
}

#[test]
fn two_contexts_have_their_own_programs() {
    for (silicon, flow) in [(Silicon::Npu1, Flow::Xclbin), (Silicon::Npu5, Flow::FullElf)] {
        let bench = Bench::new(&VirtualSpec::new(silicon));
        let (mut copying, copy) = bench.load(&copy_kit(silicon, flow), flow).unwrap();
        let (mut scaling, scale) = bench.load(&scale_kit(silicon, flow), flow).unwrap();
        let input = pattern(SCALE_ELEMENTS, 1);
        let (vector, result) = (bench.buffer(&input).unwrap(), bench.empty(SCALE_ELEMENTS).unwrap());
        let (factor, copied) = (bench.buffer(&[3]).unwrap(), bench.empty(COPY_WORDS).unwrap());
        let (mut first, mut second) = (scaling.runlist(), copying.runlist());
        first.push(&*scale, &buffers(&[&vector, &factor, &result])).unwrap();
        second.push(&*copy, &buffers(&[&result, &copied])).unwrap();
        submit(&mut *first).unwrap();
        submit(&mut *second).unwrap();
        let wanted: Vec<u32> = input[..COPY_WORDS].iter().map(|x| x.wrapping_mul(3)).collect();
        assert_eq!(read_words(&copied).unwrap(), wanted, "{silicon}");
        bench.assert_clean(silicon.name());
    }
}

/// Two compute units of one xclbin take turns: each turn loads the unit's configuration.
#[test]
fn compute_units_load_their_own_configuration() {
    for silicon in [Silicon::Npu1, Silicon::Npu4] {
        let bench = Bench::new(&VirtualSpec::new(silicon));
        let (copy, scale) = (copy_kit(silicon, Flow::Xclbin), scale_kit(silicon, Flow::Xclbin));
        let image = kit::xclbin(&[&copy, &scale]).unwrap();
        let mut context = bench.npu.open_context(&Program::Xclbin { image: &image }).unwrap();
        let (copy_stream, scale_stream) = (copy.instructions().unwrap(), scale.instructions().unwrap());
        let mut load = |unit, stream| {
            context.load(&Program::Instructions { unit, stream, length_unit: LengthUnit::Words }).unwrap()
        };
        let (copying, scaling) = (load(&copy.name, &copy_stream), load(&scale.name, &scale_stream));
        let input = pattern(SCALE_ELEMENTS, 1);
        let (vector, result) = (bench.buffer(&input).unwrap(), bench.empty(SCALE_ELEMENTS).unwrap());
        let (factor, copied) = (bench.buffer(&[3]).unwrap(), bench.empty(COPY_WORDS).unwrap());
        let mut list = context.runlist();
        list.push(&*scaling, &buffers(&[&vector, &factor, &result])).unwrap();
        list.push(&*copying, &buffers(&[&result, &copied])).unwrap();
        for _ in 0..3 {
            submit(&mut *list).unwrap();
        }
        let wanted: Vec<u32> = input[..COPY_WORDS].iter().map(|x| x.wrapping_mul(3)).collect();
        assert_eq!(read_words(&copied).unwrap(), wanted, "{silicon}");
        assert_eq!(bench.hardware.statistics().pdi_loads, 6);
        bench.assert_clean(silicon.name());
    }
}

#[test]
fn kernels_without_an_image_use_the_one_that_is_resident() {
    let spec = VirtualSpec::new(Silicon::Npu5);
    let bench = Bench::new(&spec);
    let kit = copy_kit(spec.silicon, Flow::FullElf);
    let (mut context, first) = bench.load(&kit, Flow::FullElf).unwrap();
    let mut follower = kit.clone();
    follower.name = "follower".to_owned();
    let elf = follower.full_elf(false).unwrap();
    let program = Program::FullElf { image: &elf, kernel: "follower" };
    let second = context.load(&program).unwrap();
    let (a, b, c) = (
        bench.buffer(&pattern(COPY_WORDS, 1)).unwrap(),
        bench.empty(COPY_WORDS).unwrap(),
        bench.empty(COPY_WORDS).unwrap(),
    );
    let mut list = context.runlist();
    list.push(&*first, &buffers(&[&a, &b])).unwrap();
    list.push(&*second, &buffers(&[&b, &c])).unwrap();
    submit(&mut *list).unwrap();
    assert_eq!(read_words(&c).unwrap(), pattern(COPY_WORDS, 1));
    bench.assert_clean("follower");

    // Alone it finds no configuration: nothing moves, and the watch-dog ends the run.
    let (mut context, _) = bench.load(&kit, Flow::FullElf).unwrap();
    let second = context.load(&program).unwrap();
    let mut list = context.runlist();
    list.push(&*second, &buffers(&[&a, &b])).unwrap();
    let error = submit(&mut *list).unwrap_err();
    assert!(matches!(error, RunError::TimedOut { .. } | RunError::Failed { .. }), "{error}");
}

#[test]
fn rebinding_and_new_arguments_reach_the_device() {
    for (silicon, flow) in [(Silicon::Npu1, Flow::Xclbin), (Silicon::Npu5, Flow::FullElf)] {
        let bench = Bench::new(&VirtualSpec::new(silicon));
        let whole = kit::copy(silicon, version_of(flow), 128, 1, 32).unwrap();
        let mut half = kit::copy(silicon, version_of(flow), 64, 1, 32).unwrap();
        half.image = whole.image.clone();
        let (mut context, long) = bench.load(&whole, flow).unwrap();
        let (stream, elf) = (half.instructions().unwrap(), half.full_elf(true).unwrap());
        let program = match flow {
            Flow::FullElf => Program::FullElf { image: &elf, kernel: "copy" },
            _ => Program::Instructions { unit: "copy", stream: &stream, length_unit: LengthUnit::Words },
        };
        let short = context.load(&program).unwrap();
        let (a, b) = (bench.buffer(&pattern(128, 1)).unwrap(), bench.buffer(&[0; 128]).unwrap());
        let other = bench.buffer(&pattern(128, 2)).unwrap();
        let mut list = context.runlist();
        list.push(&*short, &buffers(&[&a, &b])).unwrap();
        submit(&mut *list).unwrap();
        let mut wanted = pattern(128, 1);
        wanted[64..].fill(0);
        assert_eq!(read_words(&b).unwrap(), wanted, "{silicon}");
        list.rebind(RunIndex(0), &*long).unwrap();
        submit(&mut *list).unwrap();
        assert_eq!(read_words(&b).unwrap(), pattern(128, 1), "{silicon}");
        list.set_arg(RunIndex(0), 0, &buffers(&[&other])[0]).unwrap();
        submit(&mut *list).unwrap();
        assert_eq!(read_words(&b).unwrap(), pattern(128, 2), "{silicon}");
        bench.assert_clean(silicon.name());
    }
}

#[test]
fn a_deadline_of_the_caller_is_kept_in_virtual_time() {
    for flow in [Flow::Xclbin, Flow::FullElf] {
        let silicon = if flow == Flow::Xclbin { Silicon::Npu1 } else { Silicon::Npu5 };
        // The second run is late, so that the rule for point 0 plays no part.
        let spec: VirtualSpec = format!("virtual:{silicon}?fault=late@1:900").parse().unwrap();
        let bench = Bench::new(&spec);
        let (mut context, kernel) = bench.load(&copy_kit(silicon, flow), flow).unwrap();
        let (a, b) = (bench.buffer(&pattern(COPY_WORDS, 1)).unwrap(), bench.empty(COPY_WORDS).unwrap());
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&a, &b])).unwrap();
        submit(&mut *list).unwrap();
        let error = list.submit().unwrap().wait(Deadline::within(Duration::from_millis(100))).unwrap_err();
        assert!(
            matches!(error, RunError::TimedOut { run: Some(RunIndex(0)), waited, .. } if waited.as_millis() == 100),
            "{error}"
        );
        assert!(list.submit().is_err(), "the context is lost");
    }
}

/// A wait that nothing satisfies ends in the watch-dog; the record names the operation where there is one.
#[test]
fn a_hanging_run_names_its_operation() {
    for (spec, flow) in combinations() {
        let mut kit = copy_kit(spec.silicon, flow);
        let op = kit.code.ops.len() - 1;
        let wait =
            TokenWait { direction: Direction::Mm2s, row: 0, column: 0, row_count: 1, column_count: 1, channel: 0 };
        let (word, config) = wait.encode();
        kit.code.ops[op].kind = OpKind::Tct { word, config };
        // A full ELF starts with the load of its image.
        let op = op + usize::from(flow == Flow::FullElf);
        let bench = Bench::new(&spec);
        let (mut context, kernel) = bench.load(&kit, flow).unwrap();
        let (a, b) = (bench.buffer(&pattern(COPY_WORDS, 1)).unwrap(), bench.empty(COPY_WORDS).unwrap());
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&a, &b])).unwrap();
        let error = submit(&mut *list).unwrap_err();
        match &error {
            RunError::TimedOut { run: Some(RunIndex(0)), detail, .. } => {
                assert_eq!(detail.contains(&format!("operation {op},")), spec.has_health_record(), "{spec}: {detail}");
            }
            other => panic!("{spec} {flow:?}: {other}"),
        }
        let diagnosis = bench.hardware.take_diagnoses().remove(0);
        assert_eq!((diagnosis.kind, diagnosis.op), (DiagnosisKind::WaitNeverSatisfied, Some(op as u32)));
        assert_eq!(diagnosis.run, Some(0));
        drop((list, kernel, context));
        let (mut context, kernel) = bench.load(&copy_kit(spec.silicon, flow), flow).unwrap();
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&a, &b])).unwrap();
        submit(&mut *list).unwrap_or_else(|error| panic!("{spec} {flow:?}: a fresh context: {error}"));
        assert_eq!(read_words(&b).unwrap(), pattern(COPY_WORDS, 1));
        bench.assert_clean(&format!("{spec} {flow:?}"));
    }
}

#[test]
fn a_suspended_machine_aborts_what_is_in_flight_and_nothing_else() {
    for (silicon, flow) in [(Silicon::Npu1, Flow::Xclbin), (Silicon::Npu5, Flow::FullElf)] {
        let bench = Bench::new(&VirtualSpec::new(silicon));
        let (mut context, kernel) = bench.load(&copy_kit(silicon, flow), flow).unwrap();
        let (a, b) = (bench.buffer(&pattern(COPY_WORDS, 1)).unwrap(), bench.empty(COPY_WORDS).unwrap());
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&a, &b])).unwrap();
        submit(&mut *list).unwrap();
        // Idle contexts survive and get their configuration again.
        bench.hardware.suspend_and_resume();
        submit(&mut *list).unwrap();
        assert_eq!(bench.hardware.statistics().pdi_loads, 2);
        let in_flight = list.submit().unwrap();
        bench.hardware.suspend_and_resume();
        let error = in_flight.wait(patience()).unwrap_err();
        assert!(matches!(&error, RunError::Failed { state, .. } if state == "ABORT"), "{error}");
        bench.assert_clean(silicon.name());
    }
}

#[test]
fn threads_share_a_device() {
    let bench = Bench::new(&VirtualSpec::new(Silicon::Npu5));
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let bench = &bench;
            scope.spawn(move || {
                let (mut context, kernel) = bench.load(&copy_kit(Silicon::Npu5, Flow::FullElf), Flow::FullElf).unwrap();
                let (a, b) = (bench.empty(COPY_WORDS).unwrap(), bench.empty(COPY_WORDS).unwrap());
                let mut list = context.runlist();
                list.push(&*kernel, &buffers(&[&a, &b])).unwrap();
                for round in 0..30 {
                    let input = pattern(COPY_WORDS, 100 * seed + round);
                    a.write(0, &common::to_bytes(&input)).unwrap();
                    submit(&mut *list).unwrap();
                    assert_eq!(read_words(&b).unwrap(), input);
                }
            });
        }
    });
    bench.assert_clean("four threads");
    assert_eq!(bench.hardware.statistics().contexts, 0);
}

/// Modelled times of 16 MiB over 1, 2, 4 and 8 streams.
#[test]
fn modelled_time_follows_the_published_bandwidths() {
    let spec = VirtualSpec::new(Silicon::Npu1);
    for (streams, gigabytes_a_second) in [(1_u8, 6.8), (2, 13.1), (4, 22.4), (8, 32.5)] {
        let bench = Bench::new(&spec);
        let words = 4 << 20;
        let kit = kit::copy(spec.silicon, version_of(Flow::Xclbin), words, streams, 8192).unwrap();
        let (mut context, kernel) = bench.load(&kit, Flow::Xclbin).unwrap();
        let (a, b) = (bench.empty(words as usize).unwrap(), bench.empty(words as usize).unwrap());
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&a, &b])).unwrap();
        let time = submit(&mut *list).unwrap().device_time.unwrap();
        let wanted = 140e3 + 4.0 * f64::from(words) / gigabytes_a_second;
        let found = time.elapsed.as_nanos() as f64;
        assert!((found - wanted).abs() < 2.0, "{streams} streams: {found} ns, wanted {wanted}");
    }
}

/// Many runs with flat handles and memory: 100,000, but for unoptimised builds without `NPUHAL_SOAK=1`.
#[test]
fn many_runs_keep_handles_and_memory_flat() {
    let is_short = cfg!(debug_assertions) && std::env::var_os("NPUHAL_SOAK").is_none();
    let runs = if is_short { 4_000 } else { 100_000 };
    for (silicon, flow) in [(Silicon::Npu1, Flow::Xclbin), (Silicon::Npu5, Flow::FullElf)] {
        let bench = Bench::new(&VirtualSpec::new(silicon));
        let kit = kit::copy(silicon, version_of(flow), 64, 2, 32).unwrap();
        let (mut context, kernel) = bench.load(&kit, flow).unwrap();
        let (a, b) = (bench.buffer(&pattern(64, 1)).unwrap(), bench.empty(64).unwrap());
        let mut list = context.runlist();
        for _ in 0..25 {
            list.push(&*kernel, &buffers(&[&a, &b])).unwrap();
        }
        let mut counts = None;
        for round in 0..runs / 25 {
            let first = pattern(64, round);
            a.write(0, &common::to_bytes(&first)).unwrap();
            submit(&mut *list).unwrap();
            assert_eq!(read_words(&b).unwrap(), first);
            if round == 10 {
                counts = Some((bench.hardware.statistics(), resident_bytes()));
            }
        }
        let (before, resident) = counts.unwrap();
        let after = bench.hardware.statistics();
        assert_eq!(after.runs, u64::from(runs));
        assert_eq!(
            (after.buffer_objects, after.heap_used_bytes, after.contexts, after.syncobjs, after.pdi_loads),
            (before.buffer_objects, before.heap_used_bytes, before.contexts, before.syncobjs, before.pdi_loads)
        );
        // Other tests run in the same process: only growth with the number of runs would show.
        let grown = resident_bytes().saturating_sub(resident);
        assert!(runs < 100_000 || grown < 64 << 20, "resident memory grew by {grown} bytes");
        bench.assert_clean(silicon.name());
    }
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

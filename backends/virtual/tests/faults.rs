//! Every fault, through the client: a typed error, no hang, nothing left behind, and a fresh context works.

mod common;

use common::{Bench, COPY_WORDS, Flow, buffers, combinations, copy_kit, patience, pattern, read_words, submit};
use npuhal_amdxdna::NpuDevice;
use npuhal_amdxdna::silicon::Silicon;
use npuhal_core::card::DeviceCard;
use npuhal_core::device::{Completion, ContextState, Deadline, Device, RunIndex, Runlist};
use npuhal_core::{DeviceError, RunError};
use npuhal_virtual::{DiagnosisKind, Fault, FaultPlan, Profile, RunFault, Statistics, VirtualDevice, VirtualSpec};
use std::time::Duration;

/// What the client has to make of a fault of run 1 in a list of three.
fn is_right(fault: RunFault, spec: &VirtualSpec, result: &Result<Completion, RunError>) -> bool {
    let at = |run: &Option<RunIndex>, index| *run == Some(RunIndex(index));
    match (fault, result) {
        (RunFault::Late(_), Ok(completion)) => completion.runs == 3,
        (RunFault::Timeout, Err(RunError::TimedOut { run, detail, .. })) => {
            at(run, 1) && detail.contains("operation 17") == spec.has_health_record()
        }
        (RunFault::CorruptHealth, Err(RunError::TimedOut { run, detail, .. })) => at(run, 1) && detail.is_empty(),
        (RunFault::Error, Err(RunError::Failed { run, state, .. })) => at(run, 1) && state == "ERROR",
        // The driver does not trust the firmware's index and says 0.
        (RunFault::BadIndex, Err(RunError::Failed { run, state, .. })) => at(run, 0) && state == "ERROR",
        (RunFault::Abort, Err(RunError::Failed { run, state, .. })) => at(run, 1) && state == "ABORT",
        (RunFault::NoResponse, Err(RunError::Failed { run, state, .. })) => at(run, 1) && state == "NORESPONSE",
        (RunFault::Reject, Err(RunError::Failed { run: None, state, .. })) => state == "NEW",
        (RunFault::Suspend | RunFault::Remove, Err(RunError::Failed { state, .. })) => state == "ABORT",
        (RunFault::Remove, Err(RunError::Device(_))) => true,
        _ => false,
    }
}

#[test]
fn faults_of_runs_are_typed_and_leave_nothing_behind() {
    for (spec, flow) in combinations() {
        for fault in RunFault::ALL {
            let spec = spec.clone().with_faults(FaultPlan::one(Fault::Run { run: 1, fault }));
            let what = format!("{spec} {flow:?}");
            let bench = Bench::new(&spec);
            let clean = bench.hardware.statistics();
            let result = run_three(&bench, flow, &what);
            assert!(is_right(fault, &spec, &result), "{what}: {result:?}");
            if fault == RunFault::Remove {
                drop(bench.npu);
                assert_empty(bench.hardware.statistics(), &what);
                continue;
            }
            assert_eq!(footprint(bench.hardware.statistics()), footprint(clean), "{what}");
            assert_eq!(run_three(&bench, flow, &what).unwrap().runs, 3, "{what}: a fresh context");
            let injected = bench.hardware.diagnoses().into_iter().filter(|d| d.kind != DiagnosisKind::Injected);
            let injected: Vec<_> =
                injected.filter(|d| !(fault == RunFault::Reject && d.kind == DiagnosisKind::BadPacket)).collect();
            assert!(injected.is_empty(), "{what}: {injected:#?}");
        }
    }
}

/// Three copies in a row; a failure loses the context, and every buffer lives on.
fn run_three(bench: &Bench, flow: Flow, what: &str) -> Result<Completion, RunError> {
    let (mut context, kernel) = bench.load(&copy_kit(bench.npu.silicon(), flow), flow)?;
    let input = pattern(COPY_WORDS, 4);
    let chain = [bench.buffer(&input)?, bench.empty(COPY_WORDS)?, bench.empty(COPY_WORDS)?, bench.empty(COPY_WORDS)?];
    let mut list = context.runlist();
    for pair in chain.windows(2) {
        list.push(&*kernel, &buffers(&[&pair[0], &pair[1]]))?;
    }
    let result = list.submit()?.wait(patience());
    match &result {
        Ok(_) => assert_eq!(read_words(&chain[3])?, input, "{what}"),
        Err(_) => {
            assert!(matches!(context.state(), ContextState::Lost(_)), "{what}: a failed context is lost");
            assert!(matches!(list.submit(), Err(DeviceError::ContextLost { .. })), "{what}");
            assert!(context.load(&npuhal_core::device::Program::Builtin { name: "copy" }).is_err());
        }
    }
    result
}

/// Destroying the context that could not be configured leaves the others of npu1 unusable: they are told at once, and not by the
/// next submission.
#[test]
fn a_context_that_cannot_be_configured_takes_the_others_along_where_they_go_together() {
    for (silicon, flow, are_together) in [(Silicon::Npu1, Flow::Xclbin, true), (Silicon::Npu4, Flow::Xclbin, false)] {
        let spec: VirtualSpec = format!("virtual:{silicon}?fault=EINVAL@config:1").parse().unwrap();
        let bench = Bench::new(&spec);
        let kit = copy_kit(bench.npu.silicon(), flow);
        let (mut context, kernel) = bench.load(&kit, flow).unwrap();
        assert!(bench.load(&kit, flow).is_err(), "the second configuration fails");
        let (input, output) = (bench.buffer(&pattern(COPY_WORDS, 9)).unwrap(), bench.empty(COPY_WORDS).unwrap());
        if are_together {
            let ContextState::Lost(reason) = context.state() else { panic!("{spec}: the other context is lost") };
            assert!(reason.contains("all go together"), "{spec}: {reason}");
            drop((kernel, context));
            run_three(&bench, flow, "a fresh context").unwrap();
            continue;
        }
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&input, &output])).unwrap();
        assert_eq!(submit(&mut *list).unwrap().runs, 1, "{spec}");
    }
}

/// What must be the same after a failure as before it.
fn footprint(statistics: Statistics) -> (usize, usize, u64, usize, usize) {
    let Statistics { files, buffer_objects, heap_used_bytes, contexts, syncobjs, .. } = statistics;
    (files, buffer_objects, heap_used_bytes, contexts, syncobjs)
}

fn assert_empty(statistics: Statistics, what: &str) {
    assert_eq!(footprint(statistics), (0, 0, 0, 0, 0), "{what}");
}

/// One call after the other fails with each error number that it may have; the whole life of a client is played.
#[test]
fn every_call_may_fail() {
    for (silicon, flow) in [(Silicon::Npu1, Flow::Xclbin), (Silicon::Npu5, Flow::FullElf)] {
        for profile in Profile::ALL {
            for (call, errnos) in [
                ("version", &["ENODEV"][..]),
                ("info", &["EINVAL", "ENODEV"]),
                ("heap", &["ENOMEM", "EINTR", "EBUSY"]),
                ("dev", &["ENOSPC", "EAGAIN", "ENOMEM", "EINTR"]),
                ("share", &["ENOMEM", "EPERM", "EINTR"]),
                ("bo-info", &["ENOENT"]),
                ("map", &["ENOMEM", "EAGAIN", "EINVAL"]),
                ("context", &["ENODEV", "ENOSPC", "EINVAL", "EINTR", "ENOMEM", "ETIMEDOUT"]),
                ("config", &["EINVAL", "EINTR"]),
                ("exec", &["EINVAL", "ENOENT", "ENOMEM", "EINTR"]),
                ("wait", &["EINTR", "EINVAL", "ENODEV"]),
                ("syncobj", &["EINVAL"]),
                ("destroy", &["EINTR"]),
            ] {
                for errno in errnos {
                    every_place(silicon, flow, profile, call, errno);
                }
            }
        }
    }
}

fn every_place(silicon: Silicon, flow: Flow, profile: Profile, call: &str, errno: &str) {
    let mut has_mattered = false;
    for place in [0, 1, 2, 3, 5] {
        let text = format!("virtual:{silicon}?profile={profile}&fault={errno}@{call}:{place}");
        let spec: VirtualSpec = text.parse().unwrap();
        let hardware = VirtualDevice::new(&spec);
        let opened = NpuDevice::open(hardware.connect(), &hardware.identity());
        let bench = match opened {
            Ok(npu) => Bench { hardware, npu },
            Err(error) => {
                has_mattered = true;
                assert_typed(&error, errno, &text);
                assert_empty(hardware.statistics(), &text);
                continue;
            }
        };
        let clean = footprint(bench.hardware.statistics());
        // The place decides which round it hits: that one fails, and no other.
        let mut failures = 0;
        for round in 0..3 {
            let result = run_three(&bench, flow, &text);
            let left = footprint(bench.hardware.statistics());
            // A synchronisation object that could not be destroyed stays until the file is closed.
            let left = if call == "syncobj" { (left.0, left.1, left.2, left.3, clean.4) } else { left };
            // The answer to EAGAIN is another chunk of the heap, which stays.
            let has_grown = errno == "EAGAIN" && call == "dev" && left.1 == clean.1 + 1;
            let left = if has_grown { (left.0, clean.1, left.2, left.3, left.4) } else { left };
            assert_eq!(left, clean, "{text}, round {round}");
            match result {
                Ok(_) => {}
                Err(RunError::Device(error)) => {
                    failures += 1;
                    assert_typed(&error, errno, &text);
                }
                Err(other) => panic!("{text}, round {round}: {other:?}"),
            }
        }
        assert!(failures <= 1, "{text}: {failures} rounds failed");
        has_mattered |= failures > 0;
    }
    // Interruptions are repeated, and cleaning up has nobody to tell.
    let is_silent = errno == "EINTR" || matches!(call, "syncobj" | "destroy") || (call == "info" && errno == "EINVAL");
    let is_absent = (call == "config" && flow == Flow::FullElf) || (errno == "EAGAIN");
    assert!(has_mattered || is_silent || is_absent, "{errno}@{call} on {silicon} {profile} changed nothing");
}

/// Wanted, found, what to do: the error number by name with its meaning, or a kind of its own.
fn assert_typed(error: &DeviceError, errno: &str, text: &str) {
    let message = error.to_string();
    match error {
        DeviceError::Driver { code, meaning, .. } => {
            assert_eq!(code, errno, "{text}: {message}");
            assert!(!meaning.is_empty(), "{text}");
        }
        DeviceError::OutOfMemory { .. }
        | DeviceError::Unavailable { .. }
        | DeviceError::Unsupported { .. }
        | DeviceError::ContextLimit { .. }
        | DeviceError::ContextLost { .. } => {}
        other => panic!("{text}: {other:?}"),
    }
}

/// The fence of a context's first command says nothing: its header does, until the driver's watch-dog has passed.
#[test]
fn a_first_command_that_hangs_times_out_under_every_driver() {
    for (spec, flow) in combinations() {
        let first =
            |fault: &str| -> VirtualSpec { format!("virtual:{}?fault={fault}@0", spec.silicon).parse().unwrap() };
        let run = |fault: &str, patience: Deadline| {
            let spec = first(fault).with_profile(spec.profile);
            let bench = Bench::new(&spec);
            let (mut context, kernel) = bench.load(&copy_kit(spec.silicon, flow), flow).unwrap();
            let (a, b) = (bench.empty(COPY_WORDS).unwrap(), bench.empty(COPY_WORDS).unwrap());
            a.write(0, &[0; 4 * COPY_WORDS]).unwrap();
            let mut list = context.runlist();
            list.push(&*kernel, &buffers(&[&a, &b])).unwrap();
            list.submit().unwrap().wait(patience).unwrap_err()
        };
        let what = format!("{spec} {flow:?}");
        let hang = run("timeout", patience());
        let RunError::TimedOut { run: Some(RunIndex(0)), waited, .. } = hang else { panic!("{what}: {hang:?}") };
        assert!(
            (spec.profile.watchdog()..spec.profile.watchdog() + Duration::from_secs(1)).contains(&waited),
            "{what}"
        );
        // The caller's deadline comes first.
        let hang = run("timeout", Deadline::within(Duration::from_millis(700)));
        let RunError::TimedOut { run: Some(RunIndex(0)), waited, .. } = hang else { panic!("{what}: {hang:?}") };
        assert_eq!(waited.as_millis(), 700, "{what}");
        // What is refused ends without a final state: that is known once no watch-dog can be running any more.
        let refused = run("reject", patience());
        assert!(matches!(&refused, RunError::Failed { state, .. } if state == "NEW"), "{what}: {refused:?}");
    }
}

#[test]
fn storms_of_interruptions_change_nothing() {
    for seed in 0..20 {
        let text = format!("virtual:npu5?fault=storm@{seed}:300");
        let spec: VirtualSpec = text.parse().unwrap();
        let bench = Bench::new(&spec);
        assert_eq!(run_three(&bench, Flow::FullElf, &text).unwrap().runs, 3);
    }
}

#[test]
fn seeded_plans_end_well_or_typed() {
    for seed in 0..60 {
        let text = format!("virtual:npu1?profile=out-of-tree&fault=seed@{seed}");
        let spec: VirtualSpec = text.parse().unwrap();
        let bench = Bench::new(&spec);
        let card: &DeviceCard = bench.npu.card();
        assert_eq!(card.columns, 4);
        let clean = footprint(bench.hardware.statistics());
        let results: Vec<_> = (0..12).map(|_| run_three(&bench, Flow::Xclbin, &text)).collect();
        let failures = results.iter().filter(|result| result.is_err()).count();
        let is_removed = text.contains("seed") && spec.faults.to_string().starts_with("remove");
        assert!(failures <= 1 || is_removed, "{spec}: {results:?}");
        if !is_removed {
            assert_eq!(footprint(bench.hardware.statistics()), clean, "{spec}");
        }
    }
}

#[test]
fn a_seventh_context_is_a_typed_error() {
    let spec = VirtualSpec::new(Silicon::Npu1);
    let bench = Bench::new(&spec);
    let kit = copy_kit(Silicon::Npu1, Flow::Xclbin);
    let held: Vec<_> = (0..16).map_while(|_| bench.load(&kit, Flow::Xclbin).ok()).collect();
    assert!((1..=6).contains(&held.len()), "{}", held.len());
    let Err(error) = bench.load(&kit, Flow::Xclbin) else { panic!("one context too many") };
    assert!(matches!(error, DeviceError::ContextLimit { .. }), "{error:?}");
    drop(held);
    assert!(bench.load(&kit, Flow::Xclbin).is_ok());
}

#[test]
fn failed_runs_are_rebuilt_before_they_are_submitted_again() {
    // The recent mainline driver fills the packet with ones: a fresh context with the same arguments must not care.
    for profile in Profile::ALL {
        let spec: VirtualSpec = format!("virtual:npu5?profile={profile}&fault=error@0,timeout@2").parse().unwrap();
        let bench = Bench::new(&spec);
        let (a, b) = (bench.buffer(&pattern(COPY_WORDS, 1)).unwrap(), bench.empty(COPY_WORDS).unwrap());
        let mut ends = Vec::new();
        for _ in 0..3 {
            let (mut context, kernel) = bench.load(&copy_kit(Silicon::Npu5, Flow::FullElf), Flow::FullElf).unwrap();
            let mut list = context.runlist();
            list.push(&*kernel, &buffers(&[&a, &b])).unwrap();
            let first = submit(&mut *list).is_ok();
            ends.push(first && submit(&mut *list).is_ok());
        }
        assert_eq!(ends, [false, false, true], "{profile}");
        assert_eq!(read_words(&b).unwrap(), pattern(COPY_WORDS, 1));
    }
}

#[test]
fn an_idle_device_sleeps_and_contexts_load_their_images_again() {
    let delay = VirtualDevice::autosuspend_delay();
    for (silicon, flow) in [(Silicon::Npu1, Flow::Xclbin), (Silicon::Npu5, Flow::FullElf)] {
        let bench = Bench::new(&VirtualSpec::new(silicon));
        let (mut context, kernel) = bench.load(&copy_kit(silicon, flow), flow).unwrap();
        let (a, b) = (bench.buffer(&pattern(COPY_WORDS, 1)).unwrap(), bench.empty(COPY_WORDS).unwrap());
        let mut list = context.runlist();
        list.push(&*kernel, &buffers(&[&a, &b])).unwrap();
        let loads = |list: &mut dyn Runlist| {
            submit(list).unwrap();
            let statistics = bench.hardware.statistics();
            (statistics.pdi_loads, statistics.suspensions)
        };
        assert_eq!(loads(&mut *list), (1, 0));
        bench.hardware.idle(delay);
        assert_eq!(loads(&mut *list), (1, 0), "not longer than the delay");
        bench.hardware.idle(delay + Duration::from_millis(1));
        assert_eq!(loads(&mut *list), (2, 1));
        // What is in flight keeps the device awake.
        bench.hardware.inject(0, RunFault::Late(10 * delay));
        let in_flight = list.submit().unwrap();
        bench.hardware.idle(delay);
        in_flight.wait(Deadline::never()).unwrap();
        assert_eq!(loads(&mut *list), (2, 1));
        let diagnoses = bench.hardware.diagnoses();
        assert!(diagnoses.iter().all(|diagnosis| diagnosis.kind == DiagnosisKind::Injected), "{diagnoses:?}");
    }
}

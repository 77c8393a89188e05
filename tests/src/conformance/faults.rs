//! Cases on a device that hangs or fails: what is busy, what is lost, what lives on.

use super::rig::{PATIENCE, Rig, args, complete, contents, ensure, expect, ok, refused, wait};
use super::{CaseFn, TestFault, TestProgram};
use npuhal_core::RunError;
use npuhal_core::device::{BufferRef, Context, ContextState, Deadline, RunIndex};
use npuhal_core::error::DeviceError;
use std::time::{Duration, Instant};

pub(super) const CASES: &[(&str, CaseFn)] = &[
    ("buffers_are_busy_in_flight", buffers_are_busy_in_flight),
    ("lists_are_closed_in_flight", lists_are_closed_in_flight),
    ("a_timeout_loses_the_context", a_timeout_loses_the_context),
    ("a_timeout_names_its_run", a_timeout_names_its_run),
    ("an_awaited_timeout_loses_the_context", an_awaited_timeout_loses_the_context),
    ("a_failed_run_loses_the_context", a_failed_run_loses_the_context),
    ("a_lost_context_fails_what_is_queued", a_lost_context_fails_what_is_queued),
    ("a_dropped_submission_frees_its_buffers", a_dropped_submission_frees_its_buffers),
];

/// Long enough for a loaded machine to reach the stalled run, short enough to be waited for.
const SHORT: Deadline = Deadline::within(Duration::from_millis(500));

/// Tries until the device has let go of what it held.
fn when_free<T>(mut attempt: impl FnMut() -> Result<T, DeviceError>) -> Result<T, String> {
    let start = Instant::now();
    loop {
        match attempt() {
            Err(DeviceError::Busy) if start.elapsed() < Duration::from_secs(10) => {
                std::thread::sleep(Duration::from_millis(1));
            }
            result => return ok("after the device has let go", result),
        }
    }
}

fn free_contents(buffer: &BufferRef) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; buffer.len_bytes() as usize];
    when_free(|| buffer.read(0, &mut bytes))?;
    Ok(bytes)
}

fn ensure_lost(rig: &Rig<'_>, context: &mut dyn Context) -> Result<(), String> {
    ensure(matches!(context.state(), ContextState::Lost(reason) if !reason.is_empty()), || {
        "the context's state is not Lost with a reason".to_owned()
    })?;
    let error = refused("load", context.load(&rig.program(TestProgram::Copy)))?;
    ensure(matches!(error, DeviceError::ContextLost { .. }), || format!("load: wanted ContextLost, found {error:?}"))
}

/// A fresh context works, on buffers that lived through the loss of another.
fn ensure_new_context_works(rig: &Rig<'_>, from: &BufferRef, to: &BufferRef) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let mut list = context.runlist();
    ok("push", list.push(&*copy, &args([from, to])))?;
    complete(&mut *list)?;
    expect("copy in a new context", &contents(to)?, &contents(from)?)
}

fn buffers_are_busy_in_flight(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (from, to, other) = (rig.filled(&rig.vector(1))?, rig.empty()?, rig.empty()?);
    let mut list = context.runlist();
    ok("push", list.push(&*copy, &args([&from, &to])))?;
    rig.inject(TestFault::Stall(0));
    let submission = ok("submit", list.submit())?;
    let errors = [
        refused("read", to.read(0, &mut [0; 4])),
        refused("write", from.write(0, &[0; 4])),
        refused("fill", from.fill(&mut |bytes| bytes.fill(0))),
    ];
    let free = other.write(0, &[1; 4]);
    rig.subject().release();
    wait(submission)?;
    for error in errors {
        let error = error?;
        ensure(matches!(error, DeviceError::Busy), || format!("wanted Busy, found {error:?}"))?;
    }
    ok("write to a buffer that is not in flight", free)?;
    expect("copy", &contents(&to)?, &rig.vector(1))?;
    ok("write after completion", from.write(0, &[0; 4]))
}

fn lists_are_closed_in_flight(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (from, to) = (rig.filled(&rig.vector(1))?, rig.empty()?);
    let mut list = context.runlist();
    let run = ok("push", list.push(&*copy, &args([&from, &to])))?;
    rig.inject(TestFault::Stall(0));
    let submission = ok("submit", list.submit())?;
    let arguments = args([&from, &to]);
    let errors = [
        refused("push", list.push(&*copy, &arguments)),
        refused("rebind", list.rebind(run, &*copy)),
        refused("set_arg", list.set_arg(run, 0, &arguments[0])),
        refused("submit", list.submit()),
    ];
    rig.subject().release();
    wait(submission)?;
    for error in errors {
        let error = error?;
        ensure(matches!(error, DeviceError::Misuse { .. }), || format!("wanted Misuse, found {error:?}"))?;
    }
    ok("push after completion", list.push(&*copy, &arguments))?;
    complete(&mut *list).map(|_| ())
}

fn a_timeout_loses_the_context(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (from, to, last) = (rig.filled(&rig.vector(1))?, rig.empty()?, rig.empty()?);
    let mut list = context.runlist();
    ok("push", list.push(&*copy, &args([&from, &to])))?;
    ok("push", list.push(&*copy, &args([&to, &last])))?;
    rig.inject(TestFault::Stall(1));
    let submission = ok("submit", list.submit())?;
    let start = Instant::now();
    let error = refused("wait", submission.wait(SHORT))?;
    ensure(start.elapsed() < Duration::from_secs(10), || "the deadline was not honoured".to_owned())?;
    ensure(matches!(error, RunError::TimedOut { .. }), || format!("wanted TimedOut, found {error:?}"))?;
    ensure(error.loses_context(), || format!("{error:?} does not lose the context"))?;
    ensure_lost(rig, &mut *context)?;
    let error = refused("submit", list.submit())?;
    ensure(matches!(error, DeviceError::ContextLost { .. }), || {
        format!("submit: wanted ContextLost, found {error:?}")
    })?;
    drop((list, context));
    expect("the run that completed", &free_contents(&to)?, &rig.vector(1))?;
    expect("the run that did not", &free_contents(&last)?, &vec![0; rig.vector_bytes() as usize])?;
    ensure_new_context_works(rig, &to, &last)
}

fn a_timeout_names_its_run(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (from, to, last) = (rig.filled(&rig.vector(1))?, rig.empty()?, rig.empty()?);
    let mut list = context.runlist();
    ok("push", list.push(&*copy, &args([&from, &to])))?;
    ok("push", list.push(&*copy, &args([&to, &last])))?;
    rig.inject(TestFault::Stall(1));
    let error = refused("wait", ok("submit", list.submit())?.wait(SHORT))?;
    ensure(matches!(error, RunError::TimedOut { run: Some(RunIndex(1)), .. }), || {
        format!("wanted TimedOut at run 1, found {error:?}")
    })
}

fn an_awaited_timeout_loses_the_context(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (from, to) = (rig.filled(&rig.vector(1))?, rig.empty()?);
    let mut list = context.runlist();
    ok("push", list.push(&*copy, &args([&from, &to])))?;
    rig.inject(TestFault::Stall(0));
    let submission = ok("submit", list.submit())?;
    let error = refused("completed", super::cases::block_on(submission.completed(SHORT)))?;
    ensure(matches!(error, RunError::TimedOut { .. }), || format!("wanted TimedOut, found {error:?}"))?;
    ensure_lost(rig, &mut *context)?;
    free_contents(&to).map(|_| ())
}

fn a_failed_run_loses_the_context(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (from, to, last) = (rig.filled(&rig.vector(1))?, rig.empty()?, rig.empty()?);
    let mut list = context.runlist();
    ok("push", list.push(&*copy, &args([&from, &to])))?;
    ok("push", list.push(&*copy, &args([&to, &last])))?;
    rig.inject(TestFault::Fail(1));
    let error = refused("wait", ok("submit", list.submit())?.wait(PATIENCE))?;
    ensure(matches!(&error, RunError::Failed { run: Some(RunIndex(1)), state, .. } if !state.is_empty()), || {
        format!("wanted Failed at run 1 with its state, found {error:?}")
    })?;
    ensure_lost(rig, &mut *context)?;
    expect("the run before", &free_contents(&to)?, &rig.vector(1))?;
    expect("the failed run", &free_contents(&last)?, &vec![0; rig.vector_bytes() as usize])?;
    ensure_new_context_works(rig, &from, &last)
}

fn a_lost_context_fails_what_is_queued(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (from, to, last) = (rig.filled(&rig.vector(1))?, rig.empty()?, rig.empty()?);
    let (mut one, mut two) = (context.runlist(), context.runlist());
    ok("push", one.push(&*copy, &args([&from, &to])))?;
    ok("push", two.push(&*copy, &args([&from, &last])))?;
    rig.inject(TestFault::Stall(0));
    let (stalled, queued) = (ok("submit", one.submit())?, ok("submit", two.submit())?);
    refused("wait for the stalled list", stalled.wait(SHORT))?;
    let error = refused("wait for the queued list", queued.wait(PATIENCE))?;
    ensure(error.loses_context(), || format!("wanted a loss of the context, found {error:?}"))?;
    expect("nothing was run", &free_contents(&last)?, &vec![0; rig.vector_bytes() as usize])
}

fn a_dropped_submission_frees_its_buffers(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (from, to) = (rig.filled(&rig.vector(1))?, rig.empty()?);
    let mut list = context.runlist();
    ok("push", list.push(&*copy, &args([&from, &to])))?;
    drop(ok("submit", list.submit())?);
    expect("copy", &free_contents(&to)?, &rig.vector(1))?;
    when_free(|| from.write(0, &rig.vector(9)))?;
    complete(&mut *list)?;
    expect("the list goes on", &contents(&to)?, &rig.vector(9))
}

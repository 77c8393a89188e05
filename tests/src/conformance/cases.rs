//! Cases that a healthy device must pass.

use super::rig::{PATIENCE, Rig, args, complete, contents, ensure, expect, ok, refused, wait};
use super::{CaseFn, TestProgram};
use npuhal_core::device::{
    Arg, ArgKind, BufferObject, BufferRef, BufferSpec, ContextState, Kernel, Program, RunIndex, Runlist,
};
use npuhal_core::error::DeviceError;
use std::any::Any;
use std::future::Future;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Wake, Waker};

pub(super) const CASES: &[(&str, CaseFn)] = &[
    ("card_names_the_device", card_names_the_device),
    ("buffers_keep_what_is_written", buffers_keep_what_is_written),
    ("out_of_range_is_refused", out_of_range_is_refused),
    ("empty_buffers_are_refused", empty_buffers_are_refused),
    ("too_large_buffers_are_refused", too_large_buffers_are_refused),
    ("unknown_programs_are_refused", unknown_programs_are_refused),
    ("copy_moves_a_vector", copy_moves_a_vector),
    ("scale_multiplies_a_vector", scale_multiplies_a_vector),
    ("slices_are_arguments", slices_are_arguments),
    ("a_runlist_of_29_runs_in_order", a_runlist_of_29_runs_in_order),
    ("two_lists_in_flight_keep_their_order", two_lists_in_flight_keep_their_order),
    ("a_list_is_submitted_again", a_list_is_submitted_again),
    ("rebind_exchanges_the_kernel", rebind_exchanges_the_kernel),
    ("rebind_refuses_what_does_not_fit", rebind_refuses_what_does_not_fit),
    ("set_arg_exchanges_one_argument", set_arg_exchanges_one_argument),
    ("wrong_arguments_are_refused", wrong_arguments_are_refused),
    ("missing_arguments_are_refused", missing_arguments_are_refused),
    ("small_buffers_are_refused", small_buffers_are_refused),
    ("kernels_of_another_context_are_refused", kernels_of_another_context_are_refused),
    ("empty_lists_are_refused", empty_lists_are_refused),
    ("buffers_outlive_their_context", buffers_outlive_their_context),
    ("completion_can_be_awaited", completion_can_be_awaited),
];

fn card_names_the_device(rig: &Rig<'_>) -> Result<(), String> {
    let card = rig.subject().device().card();
    ensure(!card.id.is_empty() && !card.name.is_empty(), || format!("card without id or name: {card:?}"))?;
    ensure(card.columns > 0 && card.core_rows > 0, || format!("card without columns or rows: {card:?}"))?;
    ensure(card == rig.subject().device().card(), || "the card changes from call to call".to_owned())
}

fn buffers_keep_what_is_written(rig: &Rig<'_>) -> Result<(), String> {
    let buffer = rig.filled(&rig.vector(3))?;
    expect("whole", &contents(&buffer)?, &rig.vector(3))?;
    ok("write", buffer.write(5, &[1, 2, 3]))?;
    let mut bytes = [0; 4];
    ok("read", buffer.read(4, &mut bytes))?;
    expect("written in the middle", &bytes[1..], &[1, 2, 3])?;
    let part = ok("slice", buffer.slice(8..16))?;
    ok("fill", part.fill(&mut |bytes| bytes.fill(7)))?;
    let whole = contents(&buffer)?;
    expect("filled", &whole[8..16], &[7; 8])?;
    expect("beside the filled part", &whole[16..20], &rig.vector(3)[16..20])?;
    ensure(part.clone().offset_bytes() == 8, || "a clone of a slice moved".to_owned())
}

fn out_of_range_is_refused(rig: &Rig<'_>) -> Result<(), String> {
    let buffer = rig.empty()?;
    let len = buffer.len_bytes();
    let object = Arc::clone(buffer.object());
    let errors = [
        refused("write past the end", buffer.write(len - 1, &[0; 2]))?,
        refused("read past the end", buffer.read(len, &mut [0; 1]))?,
        refused("write at the end of numbers", object.write(u64::MAX, &[0; 1]))?,
        refused("read at the end of numbers", object.read(u64::MAX - 1, &mut [0; 8]))?,
        refused("fill past the end", object.fill_with(0..len + 1, &mut |_| ()))?,
        refused("slice past the end", buffer.slice(1..len + 1))?,
        refused("slice backwards", buffer.slice(Range { start: 2, end: 1 }))?,
        refused("fill backwards", object.fill_with(Range { start: 2, end: 1 }, &mut |_| ()))?,
    ];
    let wrong = errors.iter().find(|error| !matches!(error, DeviceError::OutOfRange { .. }));
    ensure(wrong.is_none(), || format!("wanted OutOfRange, found {wrong:?}"))?;
    expect("contents afterwards", &contents(&buffer)?, &vec![0; len as usize])
}

fn empty_buffers_are_refused(rig: &Rig<'_>) -> Result<(), String> {
    let error = refused("allocate 0 bytes", rig.subject().device().allocate(&BufferSpec::tensor(0, "nothing")))?;
    ensure(matches!(error, DeviceError::Misuse { .. }), || format!("wanted Misuse, found {error:?}"))
}

fn too_large_buffers_are_refused(rig: &Rig<'_>) -> Result<(), String> {
    let spec = BufferSpec::tensor(1 << 60, "everything");
    let error = refused("allocate 2^60 bytes", rig.subject().device().allocate(&spec))?;
    let fits = matches!(error, DeviceError::OutOfMemory { wanted_bytes, .. } if wanted_bytes == 1 << 60);
    ensure(fits, || format!("wanted OutOfMemory of 2^60 bytes, found {error:?}"))?;
    rig.empty().map(|_| ())
}

fn unknown_programs_are_refused(rig: &Rig<'_>) -> Result<(), String> {
    let program = Program::Builtin { name: "no-such-kernel" };
    let fits = |error: &DeviceError| {
        matches!(error, DeviceError::BadProgram { .. } | DeviceError::Unsupported { .. })
            && !error.to_string().is_empty()
    };
    let error = refused("open_context", rig.subject().device().open_context(&program))?;
    ensure(fits(&error), || format!("open_context: wanted BadProgram or Unsupported, found {error:?}"))?;
    let mut context = rig.context()?;
    let error = refused("load", context.load(&program))?;
    ensure(fits(&error), || format!("load: wanted BadProgram or Unsupported, found {error:?}"))?;
    ensure(context.state() == ContextState::Ready, || "a refused program lost the context".to_owned())
}

fn copy_moves_a_vector(rig: &Rig<'_>) -> Result<(), String> {
    let (from, to) = (rig.filled(&rig.vector(1))?, rig.empty()?);
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let mut list = context.runlist();
    let index = ok("push", list.push(&*copy, &args([&from, &to])))?;
    ensure(index == RunIndex(0) && list.len() == 1, || format!("first run has index {index:?}"))?;
    let completion = complete(&mut *list)?;
    ensure(completion.runs == 1, || format!("{} runs completed, wanted 1", completion.runs))?;
    expect("copy", &contents(&to)?, &rig.vector(1))?;
    expect("source", &contents(&from)?, &rig.vector(1))
}

fn scale_multiplies_a_vector(rig: &Rig<'_>) -> Result<(), String> {
    let (from, factor, to) = (rig.filled(&rig.vector(2))?, rig.filled(&rig.element(-3))?, rig.empty()?);
    let mut context = rig.context()?;
    let scale = rig.kernel(&mut *context, TestProgram::Scale)?;
    let buffers = scale.signature().iter().filter(|spec| matches!(spec.kind, ArgKind::Buffer { .. })).count();
    ensure(buffers == 3, || format!("the signature has {buffers} buffers, wanted 3"))?;
    let mut list = context.runlist();
    ok("push", list.push(&*scale, &args([&from, &factor, &to])))?;
    complete(&mut *list)?;
    expect("product", &contents(&to)?, &rig.scaled(&rig.vector(2), -3))
}

fn slices_are_arguments(rig: &Rig<'_>) -> Result<(), String> {
    let len = rig.vector_bytes();
    let whole = rig.buffer(3 * len)?;
    ok("write", whole.write(0, &[rig.vector(4), rig.vector(5), rig.vector(6)].concat()))?;
    let (middle, last) = (ok("slice", whole.slice(len..2 * len))?, ok("slice", whole.slice(2 * len..3 * len))?);
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let mut list = context.runlist();
    ok("push", list.push(&*copy, &args([&middle, &last])))?;
    complete(&mut *list)?;
    expect("one object", &contents(&whole)?, &[rig.vector(4), rig.vector(5), rig.vector(5)].concat())
}

fn a_runlist_of_29_runs_in_order(rig: &Rig<'_>) -> Result<(), String> {
    const RUNS: usize = 29;
    // Every run reads what the run before wrote.
    let mut context = rig.context()?;
    let scale = rig.kernel(&mut *context, TestProgram::Scale)?;
    let negate = rig.kernel(&mut *context, TestProgram::Negate)?;
    let factor = rig.filled(&rig.element(2))?;
    let buffers = (0..=RUNS).map(|_| rig.empty()).collect::<Result<Vec<_>, _>>()?;
    ok("write", buffers[0].write(0, &rig.vector(1)))?;
    let mut list = context.runlist();
    let mut wanted = rig.vector(1);
    for run in 0..RUNS {
        let (from, to) = (&buffers[run], &buffers[run + 1]);
        let index = if run % 3 == 2 {
            wanted = rig.scaled(&wanted, -1);
            ok("push", list.push(&*negate, &args([from, to])))?
        } else {
            wanted = rig.scaled(&wanted, 2);
            ok("push", list.push(&*scale, &args([from, &factor, to])))?
        };
        ensure(index == RunIndex(run as u32), || format!("run {run} has index {index:?}"))?;
    }
    let completion = complete(&mut *list)?;
    ensure(completion.runs == RUNS as u32, || format!("{} runs completed, wanted {RUNS}", completion.runs))?;
    expect("result of 29 runs", &contents(&buffers[RUNS])?, &wanted)
}

fn two_lists_in_flight_keep_their_order(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let negate = rig.kernel(&mut *context, TestProgram::Negate)?;
    let (first, second, third) = (rig.filled(&rig.vector(8))?, rig.empty()?, rig.empty()?);
    let (mut one, mut two) = (context.runlist(), context.runlist());
    ok("push", one.push(&*negate, &args([&first, &second])))?;
    ok("push", two.push(&*negate, &args([&second, &third])))?;
    for _ in 0..3 {
        ok("write", third.write(0, &vec![0; rig.vector_bytes() as usize]))?;
        let submitted = (ok("submit the first", one.submit())?, ok("submit the second", two.submit())?);
        wait(submitted.0)?;
        wait(submitted.1)?;
        expect("negated twice", &contents(&third)?, &rig.vector(8))?;
    }
    expect("negated once", &contents(&second)?, &rig.scaled(&rig.vector(8), -1))
}

fn a_list_is_submitted_again(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (from, to) = (rig.empty()?, rig.empty()?);
    let mut list = context.runlist();
    ok("push", list.push(&*copy, &args([&from, &to])))?;
    for seed in 0..4 {
        ok("write", from.write(0, &rig.vector(seed)))?;
        complete(&mut *list)?;
        expect("copy", &contents(&to)?, &rig.vector(seed))?;
    }
    Ok(())
}

fn rebind_exchanges_the_kernel(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let negate = rig.kernel(&mut *context, TestProgram::Negate)?;
    let (from, to, last) = (rig.filled(&rig.vector(2))?, rig.empty()?, rig.empty()?);
    let mut list = context.runlist();
    let run = ok("push", list.push(&*copy, &args([&from, &to])))?;
    ok("push", list.push(&*copy, &args([&to, &last])))?;
    complete(&mut *list)?;
    ok("rebind", list.rebind(run, &*negate))?;
    complete(&mut *list)?;
    expect("rebound run", &contents(&to)?, &rig.scaled(&rig.vector(2), -1))?;
    expect("the other run", &contents(&last)?, &rig.scaled(&rig.vector(2), -1))?;
    ensure(list.len() == 2, || format!("the list has {} runs, wanted 2", list.len()))
}

fn rebind_refuses_what_does_not_fit(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let scale = rig.kernel(&mut *context, TestProgram::Scale)?;
    let (from, to) = (rig.filled(&rig.vector(2))?, rig.empty()?);
    let mut list = context.runlist();
    let run = ok("push", list.push(&*copy, &args([&from, &to])))?;
    let signature = refused("rebind to another signature", list.rebind(run, &*scale))?;
    let fits = matches!(signature, DeviceError::Misuse { .. } | DeviceError::BadArgument { .. });
    ensure(fits, || format!("wanted Misuse or BadArgument, found {signature:?}"))?;
    let unknown = refused("rebind an unknown run", list.rebind(RunIndex(9), &*copy))?;
    ensure(matches!(unknown, DeviceError::Misuse { .. }), || format!("wanted Misuse, found {unknown:?}"))?;
    complete(&mut *list)?;
    expect("the list as it was", &contents(&to)?, &rig.vector(2))
}

fn set_arg_exchanges_one_argument(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (from, to, other) = (rig.filled(&rig.vector(2))?, rig.empty()?, rig.empty()?);
    let mut list = context.runlist();
    let run = ok("push", list.push(&*copy, &args([&from, &to])))?;
    ok("set_arg", list.set_arg(run, 1, &Arg::Buffer(other.clone())))?;
    complete(&mut *list)?;
    expect("the new target", &contents(&other)?, &rig.vector(2))?;
    expect("the old target", &contents(&to)?, &vec![0; rig.vector_bytes() as usize])?;
    let index = refused("set_arg past the last argument", list.set_arg(run, 99, &Arg::Buffer(other.clone())))?;
    ensure(matches!(index, DeviceError::BadArgument { .. }), || format!("wanted BadArgument, found {index:?}"))?;
    let kind = refused("set_arg of another kind", list.set_arg(run, 0, &Arg::U32(1)))?;
    ensure(matches!(kind, DeviceError::BadArgument { .. }), || format!("wanted BadArgument, found {kind:?}"))?;
    let unknown = refused("set_arg of an unknown run", list.set_arg(RunIndex(9), 0, &Arg::Buffer(other)))?;
    ensure(matches!(unknown, DeviceError::Misuse { .. }), || format!("wanted Misuse, found {unknown:?}"))
}

/// A buffer of nobody's device.
struct ForeignBuffer(u64);

impl BufferObject for ForeignBuffer {
    fn len_bytes(&self) -> u64 {
        self.0
    }
    fn write(&self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }
    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), DeviceError> {
        Ok(())
    }
    fn fill_with(&self, _: Range<u64>, _: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError> {
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn wrong_arguments_are_refused(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (from, to) = (rig.filled(&rig.vector(2))?, rig.empty()?);
    let foreign = BufferRef::whole(Arc::new(ForeignBuffer(rig.vector_bytes())));
    let mut list = context.runlist();
    let from = Arg::Buffer(from);
    let wrong = [
        ("too many", vec![from.clone(), Arg::Buffer(to.clone()), Arg::Buffer(to.clone())]),
        ("a scalar for a buffer", vec![from.clone(), Arg::U64(1)]),
        ("a foreign buffer", vec![from.clone(), Arg::Buffer(foreign)]),
    ];
    for (what, args) in wrong {
        refuse_arguments(&mut *list, &*copy, what, &args)?;
    }
    ensure(list.is_empty(), || "a refused run was appended".to_owned())?;
    ok("push", list.push(&*copy, &[from, Arg::Buffer(to)]))?;
    complete(&mut *list).map(|_| ())
}

fn refuse_arguments(list: &mut dyn Runlist, kernel: &dyn Kernel, what: &str, args: &[Arg]) -> Result<(), String> {
    let error = refused(what, list.push(kernel, args))?;
    let fits = matches!(&error, DeviceError::BadArgument { wanted, found, .. } if wanted != found);
    ensure(fits, || format!("{what}: wanted BadArgument, found {error:?}"))
}

fn missing_arguments_are_refused(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (mut list, from) = (context.runlist(), rig.filled(&rig.vector(2))?);
    refuse_arguments(&mut *list, &*copy, "no argument", &[])?;
    refuse_arguments(&mut *list, &*copy, "too few", &args([&from]))?;
    ensure(list.is_empty(), || "a refused run was appended".to_owned())
}

fn small_buffers_are_refused(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (from, to) = (rig.filled(&rig.vector(2))?, rig.empty()?);
    let small = ok("slice", to.slice(0..rig.vector_bytes() / 2))?;
    let mut list = context.runlist();
    refuse_arguments(&mut *list, &*copy, "a small buffer", &args([&from, &small]))?;
    ensure(list.is_empty(), || "a refused run was appended".to_owned())
}

fn kernels_of_another_context_are_refused(rig: &Rig<'_>) -> Result<(), String> {
    let (mut one, mut two) = (rig.context()?, rig.context()?);
    let foreign = rig.kernel(&mut *two, TestProgram::Copy)?;
    let own = rig.kernel(&mut *one, TestProgram::Copy)?;
    let (from, to) = (rig.empty()?, rig.empty()?);
    let mut list = one.runlist();
    let error = refused("push", list.push(&*foreign, &args([&from, &to])))?;
    ensure(matches!(error, DeviceError::Misuse { .. }), || format!("push: wanted Misuse, found {error:?}"))?;
    let run = ok("push", list.push(&*own, &args([&from, &to])))?;
    let error = refused("rebind", list.rebind(run, &*foreign))?;
    ensure(matches!(error, DeviceError::Misuse { .. }), || format!("rebind: wanted Misuse, found {error:?}"))
}

fn empty_lists_are_refused(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let mut list = context.runlist();
    ensure(list.is_empty(), || "a new list is not empty".to_owned())?;
    let error = refused("submit an empty list", list.submit())?;
    ensure(matches!(error, DeviceError::Misuse { .. }), || format!("wanted Misuse, found {error:?}"))
}

fn buffers_outlive_their_context(rig: &Rig<'_>) -> Result<(), String> {
    let (from, to, last) = (rig.filled(&rig.vector(7))?, rig.empty()?, rig.empty()?);
    for (source, target) in [(&from, &to), (&to, &last)] {
        let mut context = rig.context()?;
        let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
        let mut list = context.runlist();
        ok("push", list.push(&*copy, &args([source, target])))?;
        complete(&mut *list)?;
    }
    expect("through two contexts", &contents(&last)?, &rig.vector(7))
}

/// Wakes the thread that polls.
struct ThreadWaker(std::thread::Thread);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

pub(super) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(ThreadWaker(std::thread::current())));
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut TaskContext::from_waker(&waker)) {
            return value;
        }
        std::thread::park();
    }
}

fn completion_can_be_awaited(rig: &Rig<'_>) -> Result<(), String> {
    let mut context = rig.context()?;
    let copy = rig.kernel(&mut *context, TestProgram::Copy)?;
    let (from, to) = (rig.filled(&rig.vector(6))?, rig.empty()?);
    let mut list = context.runlist();
    ok("push", list.push(&*copy, &args([&from, &to])))?;
    let submission = ok("submit", list.submit())?;
    let completion = ok("completed", block_on(submission.completed(PATIENCE)))?;
    ensure(completion.runs == 1, || format!("{} runs completed, wanted 1", completion.runs))?;
    expect("copy", &contents(&to)?, &rig.vector(6))
}

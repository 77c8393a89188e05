//! Open sessions as tables.

use super::{borrow, guarded, write};
use npuhal_addon_abi as abi;
use npuhal_core::RunError;
use npuhal_core::stage::{Generator, GeneratorRequest, HiddenRows, Row, SequenceId, Session, Stepper, Want};
use std::ffi::c_void;
use std::mem::size_of;

static STEPPER: abi::StepperTable = abi::StepperTable {
    size_bytes: size_of::<abi::StepperTable>() as u32,
    reserved: 0,
    begin: Some(begin),
    end: Some(end),
    step: Some(step),
    truncate: Some(truncate),
};

static GENERATOR: abi::GeneratorTable =
    abi::GeneratorTable { size_bytes: size_of::<abi::GeneratorTable>() as u32, reserved: 0, generate: Some(generate) };

struct StepperState {
    stepper: Box<dyn Stepper>,
    logits: HiddenRows,
}

struct GeneratorState {
    generator: Box<dyn Generator>,
}

/// Hands `session` over: the host closes it.
pub(super) fn export(session: Session, describe: abi::TextSink) -> abi::Session {
    match session {
        Session::Stepper(stepper) => {
            let capacity = stepper.capacity();
            abi::Session {
                kind: abi::session_kind::STEPPER,
                vocab_size: u32::try_from(stepper.vocab_size()).unwrap_or(u32::MAX),
                positions: capacity.positions,
                rows_per_call: capacity.rows_per_call,
                sequences: capacity.sequences,
                state: Box::into_raw(Box::new(StepperState { stepper, logits: HiddenRows::new() })).cast(),
                stepper: &raw const STEPPER,
                close: Some(close::<StepperState>),
                ..abi::Session::default()
            }
        }
        Session::Generator(generator) => {
            write(describe, &generator.describe());
            abi::Session {
                kind: abi::session_kind::GENERATOR,
                positions: generator.max_context(),
                default_repetition_penalty: generator.default_repetition_penalty(),
                opens_think: u32::from(generator.opens_think()),
                state: Box::into_raw(Box::new(GeneratorState { generator })).cast(),
                generator: &raw const GENERATOR,
                close: Some(close::<GeneratorState>),
                ..abi::Session::default()
            }
        }
    }
}

unsafe extern "C" fn close<T>(state: *mut c_void) {
    // SAFETY: the state is a box of this type that `export` gave away, and this is its last use. Where a call of it has panicked,
    // the unwinding ended in `guarded`: its values are whole, if of no use.
    let state = unsafe { Box::from_raw(state.cast::<T>()) };
    // A panic while it is dropped ends here: there is nobody to tell.
    let _ = guarded(|| drop(state));
}

/// The status of a result; the reason goes into `error`.
fn status(result: Result<Result<(), RunError>, String>, error: abi::TextSink) -> i32 {
    let failure = match result {
        Ok(Ok(())) => return abi::status::OK,
        Err(panic) => {
            write(error, &panic);
            return abi::status::PANICKED;
        }
        Ok(Err(failure)) => failure,
    };
    write(error, &failure.to_string());
    match failure {
        RunError::Cancelled => abi::status::CANCELLED,
        RunError::DeadlinePassed => abi::status::DEADLINE_PASSED,
        other if other.loses_context() => abi::status::LOST,
        _ => abi::status::FAILED,
    }
}

unsafe extern "C" fn begin(state: *mut c_void, error: abi::TextSink) -> i32 {
    // SAFETY: the state is one of `export`, and the host calls one function of it at a time.
    let state = unsafe { &mut *state.cast::<StepperState>() };
    status(guarded(|| state.stepper.begin()), error)
}

unsafe extern "C" fn end(state: *mut c_void) {
    // SAFETY: as in `begin`.
    let state = unsafe { &mut *state.cast::<StepperState>() };
    // The host learns of a panic at the next call, which fails by itself or finds sound state.
    let _ = guarded(|| state.stepper.end());
}

unsafe extern "C" fn step(
    state: *mut c_void,
    rows: *const abi::Row,
    wanted: *const u8,
    rows_len: usize,
    logits: *mut f32,
    logits_len: usize,
    control: *const abi::Control,
    error: abi::TextSink,
) -> i32 {
    // SAFETY: as in `begin`; the lists are valid during the call.
    let (state, rows, wanted) =
        unsafe { (&mut *state.cast::<StepperState>(), borrow::list(rows, rows_len), borrow::list(wanted, rows_len)) };
    let work = || {
        let rows: Vec<Row> = rows
            .iter()
            .map(|row| Row { sequence: SequenceId(row.sequence), token: row.token, position: row.position })
            .collect();
        let flags: Vec<bool> = wanted.iter().map(|&flag| flag == 1).collect();
        let want = if flags.contains(&true) { Want::Each(&flags) } else { Want::Nothing };
        // SAFETY: the control is valid during the call.
        unsafe {
            borrow::with_control(control, |control| state.stepper.step(&rows, want, &mut state.logits, control))
        }?;
        let made = state.logits.as_slice();
        if made.len() != logits_len {
            let reason = format!("wanted {logits_len} logits, found {}", made.len());
            return Err(RunError::BadRows { reason });
        }
        if logits_len > 0 {
            // SAFETY: the host's buffer has room for `logits_len` numbers, and the stepper's rows are not in it.
            unsafe { std::ptr::copy_nonoverlapping(made.as_ptr(), logits, logits_len) };
        }
        Ok(())
    };
    status(guarded(work), error)
}

unsafe extern "C" fn truncate(state: *mut c_void, sequence: u32, len: u64) -> u64 {
    // SAFETY: as in `begin`.
    let state = unsafe { &mut *state.cast::<StepperState>() };
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    // After a panic an impossible answer: the host does not call the session again.
    guarded(|| state.stepper.truncate(SequenceId(sequence), len) as u64).unwrap_or(u64::MAX)
}

unsafe extern "C" fn generate(
    state: *mut c_void,
    request: *const abi::GenerateRequest,
    outcome: *mut abi::GenerateOutcome,
) -> i32 {
    // SAFETY: as in `begin`; request and outcome are valid during the call.
    let (state, request, outcome) = unsafe { (&mut *state.cast::<GeneratorState>(), &*request, &mut *outcome) };
    let work = || {
        let asked = GeneratorRequest {
            // SAFETY: as above.
            prompt: unsafe { borrow::list(request.prompt, request.prompt_len) },
            max_tokens: request.max_tokens,
            repetition_penalty: request.repetition_penalty,
            penalty_window: request.penalty_window,
        };
        let mut on_token = |token: u32| match request.on_token {
            // SAFETY: the host's own function and state, on the thread of the call.
            Some(on_token) => unsafe { on_token(request.on_token_state, token) != 0 },
            None => true,
        };
        // SAFETY: the control is valid during the call.
        let made = unsafe {
            borrow::with_control(request.control, |control| state.generator.generate(&asked, &mut on_token, control))
        }?;
        *outcome = abi::GenerateOutcome {
            prefill_ms: made.prefill_ms,
            decode_ms: made.decode_ms,
            stopped_at_eos: u32::from(made.stopped_at_eos),
            reused: made.reused,
        };
        Ok(())
    };
    status(guarded(work), request.error)
}

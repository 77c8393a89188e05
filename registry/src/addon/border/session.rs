//! Sessions of a library.

use super::read::{self, Fault, flag, function};
use super::sink::Collector;
use super::{Owner, State};
use crate::route::Service;
use npuhal_addon_abi as abi;
use npuhal_core::stage::{
    Control, Generator, GeneratorOutcome, GeneratorRequest, HiddenRows, Placement, Row, SegmentCapacity, SequenceId,
    Session, Stepper, TokenId, Want,
};
use npuhal_core::{DeviceError, RunError};
use npuhal_models::source::Format;
use npuhal_models::{ModelSource, Tensor};
use std::any::Any;
use std::ffi::c_void;
use std::mem::size_of;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Takes over a session that a library has just opened. A session that is not as it should be is closed.
///
/// # Safety
/// The session is the library's own, and nobody else will close it. What it points at is as the interface says.
pub(super) unsafe fn adopt(
    session: abi::Session,
    model: &ModelSource,
    service: &Service,
    owner: &Owner,
    describe: String,
) -> Result<Session, Fault> {
    let held = Held {
        state: State(session.state),
        close: session.close,
        owner: owner.clone(),
        broken: None,
        _tensors: model.tensors().map(|(_, tensor)| tensor.clone()).collect(),
    };
    let positions = at_least_one(session.positions, "positions")?;
    // Of a model that npuhal did not read the add-on alone knows how many tokens there are.
    let vocab_size = match model.format() {
        Format::Unread if session.vocab_size > 0 => session.vocab_size as usize,
        Format::Unread => model.vocabulary().tokens.len(),
        _ => model.config().vocab_size,
    };
    match session.kind {
        abi::session_kind::STEPPER => {
            // SAFETY: the caller's promise; null and alignment are checked.
            let table = unsafe { read::array(session.stepper, 1, 1, "stepper")? }[0];
            read::size(table.size_bytes, size_of::<abi::StepperTable>(), "stepper, size")?;
            if session.vocab_size as usize != vocab_size {
                let reason = format!("{} logits a row; the model has {vocab_size} tokens", session.vocab_size);
                return Err(Fault::new("vocab_size", reason));
            }
            let capacity = SegmentCapacity {
                positions,
                rows_per_call: at_least_one(session.rows_per_call, "rows_per_call")?,
                sequences: at_least_one(session.sequences, "sequences")?,
            };
            Ok(Session::Stepper(Box::new(LoadedStepper {
                step: function(table.step, "stepper, step")?,
                truncate: function(table.truncate, "stepper, truncate")?,
                begin: table.begin,
                end: table.end,
                vocab_size,
                capacity,
                placement: service.placement.clone(),
                held,
            })))
        }
        abi::session_kind::GENERATOR => {
            // SAFETY: the caller's promise; null and alignment are checked.
            let table = unsafe { read::array(session.generator, 1, 1, "generator")? }[0];
            read::size(table.size_bytes, size_of::<abi::GeneratorTable>(), "generator, size")?;
            let penalty = session.default_repetition_penalty;
            if !penalty.is_finite() || penalty < 0.0 {
                let reason = format!("{penalty}; wanted a positive number, or 0 for none");
                return Err(Fault::new("default_repetition_penalty", reason));
            }
            Ok(Session::Generator(Box::new(LoadedGenerator {
                generate: function(table.generate, "generator, generate")?,
                max_context: positions,
                vocab_size,
                default_repetition_penalty: if penalty == 0.0 { 1.0 } else { penalty },
                opens_think: flag(session.opens_think, "opens_think")?,
                describe,
                held,
            })))
        }
        other => Err(Fault::new("kind", format!("{other}; wanted 1 (stepper) or 2 (generator)"))),
    }
}

fn at_least_one(value: u32, field: &str) -> Result<u32, Fault> {
    if value == 0 { Err(Fault::new(field, "0; wanted at least 1")) } else { Ok(value) }
}

/// A session's state, closed when it is dropped.
struct Held {
    state: State,
    close: Option<unsafe extern "C" fn(*mut c_void)>,
    owner: Owner,
    /// Why the session is not called any more, but to close it.
    broken: Option<String>,
    /// What [`super::lent::tensor`] lends: the library may read names and data as long as the session is open.
    _tensors: Vec<Tensor>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(close) = self.close {
            // SAFETY: the library's own function and state; this is the last call with it. The interface says that a session
            // that broke is closed too.
            unsafe { close(self.state.0) };
        }
    }
}

impl Held {
    fn usable(&self) -> Result<(), RunError> {
        match &self.broken {
            None => Ok(()),
            Some(reason) => Err(self.failed("a call", &format!("the session is broken since {reason}"))),
        }
    }

    fn failed(&self, call: &str, reason: &str) -> RunError {
        DeviceError::Driver {
            operation: format!("{call} of {} of the add-on {}", self.owner.what, self.owner.file.display()),
            code: "in the add-on".to_owned(),
            meaning: reason.to_owned(),
            remedy: String::new(),
        }
        .into()
    }

    /// What a status means.
    fn check(&mut self, call: &str, status: i32, error: &Collector, control: &Control) -> Result<(), RunError> {
        match status {
            abi::status::OK => Ok(()),
            abi::status::CANCELLED | abi::status::DEADLINE_PASSED => {
                control.check()?;
                Err(self.failed(call, "it says that it was told to stop, but it was not"))
            }
            abi::status::LOST => {
                let reason = format!("{}: {}", self.owner.what, error.reason());
                Err(DeviceError::ContextLost { reason }.into())
            }
            abi::status::PANICKED => {
                self.broken = Some(format!("{call} panicked: {}", error.reason()));
                Err(self.failed(call, &format!("it panicked: {}", error.reason())))
            }
            abi::status::FAILED => Err(self.failed(call, &error.reason())),
            other => Err(self.failed(call, &format!("it ended with status {other}; wanted 0 to 5"))),
        }
    }
}

fn lend(control: &Control) -> abi::Control {
    abi::Control { state: (&raw const *control).cast::<c_void>(), check: Some(check_control) }
}

unsafe extern "C" fn check_control(state: *const c_void) -> i32 {
    // SAFETY: the state is the control of a call that has not ended.
    let Some(control) = (unsafe { state.cast::<Control>().as_ref() }) else { return abi::status::CANCELLED };
    match catch_unwind(AssertUnwindSafe(|| control.check())) {
        Ok(Ok(())) => abi::status::OK,
        Ok(Err(RunError::DeadlinePassed)) => abi::status::DEADLINE_PASSED,
        _ => abi::status::CANCELLED,
    }
}

type StepFunction = unsafe extern "C" fn(
    *mut c_void,
    *const abi::Row,
    *const u8,
    usize,
    *mut f32,
    usize,
    *const abi::Control,
    abi::TextSink,
) -> i32;

/// A session of a library that yields logits.
struct LoadedStepper {
    begin: Option<unsafe extern "C" fn(*mut c_void, abi::TextSink) -> i32>,
    end: Option<unsafe extern "C" fn(*mut c_void)>,
    step: StepFunction,
    truncate: unsafe extern "C" fn(*mut c_void, u32, u64) -> u64,
    vocab_size: usize,
    capacity: SegmentCapacity,
    placement: Vec<Placement>,
    held: Held,
}

impl LoadedStepper {
    fn check_rows(&self, rows: &[Row]) -> Result<(), RunError> {
        for row in rows {
            let limits = [
                ("sequence", u64::from(row.sequence.0) + 1, u64::from(self.capacity.sequences)),
                ("position", u64::from(row.position) + 1, u64::from(self.capacity.positions)),
                ("token", u64::from(row.token) + 1, self.vocab_size as u64),
            ];
            for (what, found, limit) in limits {
                if found > limit {
                    return Err(RunError::Capacity { what, found, limit });
                }
            }
        }
        Ok(())
    }

    /// At most `rows_per_call` rows; `logits` has a row for each flag that is set.
    fn call(&mut self, rows: &[Row], wanted: &[u8], logits: &mut [f32], control: &Control) -> Result<(), RunError> {
        let lent: Vec<abi::Row> = rows
            .iter()
            .map(|row| abi::Row { sequence: row.sequence.0, token: row.token, position: row.position })
            .collect();
        // What the library leaves out stays no number, and is found.
        logits.fill(f32::NAN);
        let (hold, mut error) = (lend(control), Collector::default());
        // SAFETY: the library's own function and state; all pointers are valid for the call.
        let status = unsafe {
            (self.step)(
                self.held.state.0,
                lent.as_ptr(),
                wanted.as_ptr(),
                lent.len(),
                logits.as_mut_ptr(),
                logits.len(),
                &raw const hold,
                error.sink(),
            )
        };
        self.held.check("a step", status, &error, control)?;
        match logits.iter().position(|logit| !logit.is_finite()) {
            None => Ok(()),
            Some(index) => {
                let (row, token, what) = (index / self.vocab_size, index % self.vocab_size, &self.held.owner.what);
                let file = self.held.owner.file.display();
                let what = format!("logit of token {token} in row {row} of {what} of the add-on {file}");
                Err(RunError::NotFinite { what })
            }
        }
    }
}

impl Stepper for LoadedStepper {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn capacity(&self) -> SegmentCapacity {
        self.capacity
    }

    fn placement(&self) -> Vec<Placement> {
        self.placement.clone()
    }

    fn begin(&mut self) -> Result<(), RunError> {
        self.held.usable()?;
        let Some(begin) = self.begin else { return Ok(()) };
        let mut error = Collector::default();
        // SAFETY: the library's own function and state.
        let status = unsafe { begin(self.held.state.0, error.sink()) };
        self.held.check("the beginning", status, &error, &Control::new())
    }

    fn end(&mut self) {
        if let Some(end) = self.end.filter(|_| self.held.broken.is_none()) {
            // SAFETY: the library's own function and state.
            unsafe { end(self.held.state.0) };
        }
    }

    fn step(
        &mut self,
        rows: &[Row],
        want: Want<'_>,
        logits: &mut HiddenRows,
        control: &Control,
    ) -> Result<(), RunError> {
        self.held.usable()?;
        self.check_rows(rows)?;
        let wanted: Vec<u8> = (0..rows.len()).map(|index| u8::from(want.selects(index, rows.len()))).collect();
        let width = self.vocab_size;
        logits.reset(wanted.iter().filter(|&&flag| flag == 1).count(), width);
        let mut rest = logits.as_mut_slice();
        let chunk = self.capacity.rows_per_call as usize;
        for (rows, wanted) in rows.chunks(chunk).zip(wanted.chunks(chunk)) {
            control.check()?;
            let count = wanted.iter().filter(|&&flag| flag == 1).count();
            let (now, later) = rest.split_at_mut(count * width);
            rest = later;
            self.call(rows, wanted, now, control)?;
        }
        Ok(())
    }

    fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        if self.held.broken.is_some() {
            return 0;
        }
        // SAFETY: the library's own function and state.
        let remaining = unsafe { (self.truncate)(self.held.state.0, sequence.0, len as u64) };
        match usize::try_from(remaining) {
            Ok(remaining) if remaining <= len => remaining,
            _ => {
                self.held.broken = Some(format!("it kept {remaining} positions where {len} were to remain"));
                0
            }
        }
    }
}

type GenerateFunction =
    unsafe extern "C" fn(*mut c_void, *const abi::GenerateRequest, *mut abi::GenerateOutcome) -> i32;

/// A session of a library that yields tokens.
struct LoadedGenerator {
    generate: GenerateFunction,
    max_context: u32,
    vocab_size: usize,
    default_repetition_penalty: f32,
    opens_think: bool,
    describe: String,
    held: Held,
}

/// The host's side of `on_token`.
struct Receiver<'a> {
    on_token: &'a mut dyn FnMut(TokenId) -> bool,
    vocab_size: usize,
    max_tokens: usize,
    tokens: Vec<TokenId>,
    is_stopped: bool,
    fault: Option<String>,
    panic: Option<Box<dyn Any + Send>>,
}

impl Receiver<'_> {
    fn take(&mut self, token: TokenId) -> bool {
        if self.is_stopped {
            return false;
        }
        let fault = if token as usize >= self.vocab_size {
            Some(format!("it gave the token {token}; the model has {}", self.vocab_size))
        } else if self.tokens.len() >= self.max_tokens {
            Some(format!("it gave more than {} tokens, as many as were asked for", self.max_tokens))
        } else {
            None
        };
        if fault.is_none() {
            self.tokens.push(token);
            match catch_unwind(AssertUnwindSafe(|| (self.on_token)(token))) {
                Ok(goes_on) => self.is_stopped = !goes_on,
                // Nothing may unwind into the library: it goes on behind the call.
                Err(panic) => {
                    self.panic = Some(panic);
                    self.is_stopped = true;
                }
            }
        } else {
            self.fault = fault;
            self.is_stopped = true;
        }
        !self.is_stopped
    }
}

unsafe extern "C" fn take_token(state: *mut c_void, token: u32) -> i32 {
    // SAFETY: the state is the receiver of a call that has not ended, on the thread of the call.
    let receiver = unsafe { state.cast::<Receiver<'_>>().as_mut() };
    receiver.map_or(0, |receiver| i32::from(receiver.take(token)))
}

impl Generator for LoadedGenerator {
    fn max_context(&self) -> u32 {
        self.max_context
    }

    fn default_repetition_penalty(&self) -> f32 {
        self.default_repetition_penalty
    }

    fn opens_think(&self) -> bool {
        self.opens_think
    }

    fn describe(&self) -> String {
        self.describe.clone()
    }

    fn generate(
        &mut self,
        request: &GeneratorRequest<'_>,
        on_token: &mut dyn FnMut(TokenId) -> bool,
        control: &Control,
    ) -> Result<GeneratorOutcome, RunError> {
        const CALL: &str = "a generation";
        self.held.usable()?;
        control.check()?;
        let mut receiver = Receiver {
            on_token,
            vocab_size: self.vocab_size,
            max_tokens: request.max_tokens as usize,
            tokens: Vec::new(),
            is_stopped: false,
            fault: None,
            panic: None,
        };
        let (hold, mut error, mut outcome) = (lend(control), Collector::default(), abi::GenerateOutcome::default());
        let asked = abi::GenerateRequest {
            size_bytes: size_of::<abi::GenerateRequest>() as u32,
            max_tokens: request.max_tokens,
            prompt: request.prompt.as_ptr(),
            prompt_len: request.prompt.len(),
            repetition_penalty: request.repetition_penalty,
            penalty_window: request.penalty_window,
            on_token_state: (&raw mut receiver).cast::<c_void>(),
            on_token: Some(take_token),
            control: &raw const hold,
            error: error.sink(),
        };
        // SAFETY: the library's own function and state; all pointers are valid for the call.
        let status = unsafe { (self.generate)(self.held.state.0, &raw const asked, &raw mut outcome) };
        let Receiver { tokens, fault, panic, .. } = receiver;
        // First what became of the session: one that panicked as well is not called or closed any more.
        let checked = self.held.check(CALL, status, &error, control);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
        checked?;
        if let Some(fault) = fault {
            return Err(self.held.failed(CALL, &fault));
        }
        for (what, ms) in [("prefill_ms", outcome.prefill_ms), ("decode_ms", outcome.decode_ms)] {
            if !ms.is_finite() || ms < 0.0 {
                return Err(self.held.failed(CALL, &format!("{what} is {ms}; wanted a number from 0")));
            }
        }
        if outcome.reused as usize > request.prompt.len() {
            let reason = format!("it reused {} positions of a prompt of {}", outcome.reused, request.prompt.len());
            return Err(self.held.failed(CALL, &reason));
        }
        let stopped_at_eos = flag(outcome.stopped_at_eos, "stopped_at_eos")
            .map_err(|fault| self.held.failed(CALL, &format!("{}: {}", fault.field, fault.reason)))?;
        Ok(GeneratorOutcome {
            tokens,
            prefill_ms: outcome.prefill_ms,
            decode_ms: outcome.decode_ms,
            stopped_at_eos,
            reused: outcome.reused,
        })
    }
}

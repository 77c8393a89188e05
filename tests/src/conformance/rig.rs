//! What the cases share: vectors, buffers, contexts of the subject.

use super::{Element, Subject, TestFault, TestProgram};
use npuhal_core::device::{
    Arg, BufferRef, BufferSpec, Completion, Context, Deadline, Kernel, Program, Runlist, Submission,
};
use std::fmt::Display;
use std::time::Duration;

/// A subject with the means to use it.
pub struct Rig<'a> {
    subject: &'a dyn Subject,
}

/// Long enough for any run of the suite that is to end well.
pub(super) const PATIENCE: Deadline = Deadline::within(Duration::from_secs(30));

impl<'a> Rig<'a> {
    /// A rig for `subject`.
    #[must_use]
    pub fn new(subject: &'a dyn Subject) -> Self {
        Self { subject }
    }

    pub(super) fn subject(&self) -> &dyn Subject {
        self.subject
    }

    pub(super) fn vector_bytes(&self) -> u64 {
        self.subject.vector_bytes()
    }

    /// A vector of small whole numbers that differ from `seed` to `seed`.
    pub(super) fn vector(&self, seed: i32) -> Vec<u8> {
        let elements = (self.vector_bytes() / 4) as i32;
        (0..elements).flat_map(|index| self.element(seed + index % 5 - 2)).collect()
    }

    /// `value` as an element.
    pub(super) fn element(&self, value: i32) -> [u8; 4] {
        match self.subject.element() {
            Element::F32 => (value as f32).to_le_bytes(),
            Element::I32 => value.to_le_bytes(),
        }
    }

    /// `vector × factor`, element by element.
    pub(super) fn scaled(&self, vector: &[u8], factor: i32) -> Vec<u8> {
        let scale = |bytes: &[u8; 4]| match self.subject.element() {
            Element::F32 => (f32::from_le_bytes(*bytes) * factor as f32).to_le_bytes(),
            Element::I32 => i32::from_le_bytes(*bytes).wrapping_mul(factor).to_le_bytes(),
        };
        vector.as_chunks::<4>().0.iter().flat_map(scale).collect()
    }

    pub(super) fn buffer(&self, len_bytes: u64) -> Result<BufferRef, String> {
        ok("allocate", self.subject.device().allocate(&BufferSpec::tensor(len_bytes, "conformance")))
    }

    /// A buffer of a vector's size with the given contents.
    pub(super) fn filled(&self, contents: &[u8]) -> Result<BufferRef, String> {
        let buffer = self.buffer(contents.len() as u64)?;
        ok("write", buffer.write(0, contents))?;
        Ok(buffer)
    }

    /// A buffer of a vector's size, all zero.
    pub(super) fn empty(&self) -> Result<BufferRef, String> {
        self.filled(&vec![0; self.vector_bytes() as usize])
    }

    pub(super) fn context(&self) -> Result<Box<dyn Context>, String> {
        ok("open_context", self.subject.device().open_context(&self.subject.boot()))
    }

    pub(super) fn program(&self, program: TestProgram) -> Program<'_> {
        self.subject.program(program)
    }

    pub(super) fn kernel(&self, context: &mut dyn Context, program: TestProgram) -> Result<Box<dyn Kernel>, String> {
        ok("load", context.load(&self.subject.program(program)))
    }

    pub(super) fn inject(&self, fault: TestFault) {
        self.subject.inject(fault);
    }
}

/// The value, or the operation's error as text.
pub(super) fn ok<T, E: Display>(operation: &str, result: Result<T, E>) -> Result<T, String> {
    result.map_err(|error| format!("{operation}: {error}"))
}

/// The error, or a complaint that there is none.
pub(super) fn refused<T, E>(operation: &str, result: Result<T, E>) -> Result<E, String> {
    match result {
        Ok(_) => Err(format!("{operation} succeeded, wanted an error")),
        Err(error) => Ok(error),
    }
}

/// Says `message` unless `condition` holds.
pub(super) fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(message()) }
}

pub(super) fn contents(buffer: &BufferRef) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; buffer.len_bytes() as usize];
    ok("read", buffer.read(0, &mut bytes))?;
    Ok(bytes)
}

/// Compares contents without printing all of them.
pub(super) fn expect(what: &str, found: &[u8], wanted: &[u8]) -> Result<(), String> {
    match found.iter().zip(wanted).position(|(found, wanted)| found != wanted) {
        Some(at) => Err(format!("{what}: byte {at} is {}, wanted {}", found[at], wanted[at])),
        None => {
            ensure(found.len() == wanted.len(), || format!("{what}: {} bytes, wanted {}", found.len(), wanted.len()))
        }
    }
}

pub(super) fn args<const N: usize>(buffers: [&BufferRef; N]) -> [Arg; N] {
    buffers.map(|buffer| Arg::Buffer(buffer.clone()))
}

/// Submits and waits.
pub(super) fn complete(list: &mut dyn Runlist) -> Result<Completion, String> {
    wait(ok("submit", list.submit())?)
}

pub(super) fn wait(submission: Box<dyn Submission>) -> Result<Completion, String> {
    ok("wait", submission.wait(PATIENCE))
}

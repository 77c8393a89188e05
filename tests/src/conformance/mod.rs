//! The suite of the level-1 traits: what every device must do, written once.
//!
//! A backend brings a [`Subject`]: its device, programs that copy, negate and scale a vector, and two lists: cases it does not
//! support and cases it is known to fail, each with a reason. An unexpected pass fails, and so does a name that no case has.

mod cases;
mod faults;
mod rig;

pub use rig::Rig;

use npuhal_core::device::{Device, Program};

/// A program that the suite needs. Arguments are buffers of [`Subject::vector_bytes`] unless said otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TestProgram {
    /// `(in, out)`: `out = in`.
    Copy,
    /// `(in, out)`: `out = -in`; the signature of [`TestProgram::Copy`].
    Negate,
    /// `(in, factor, out)`: `out = in × factor`; `factor` is a buffer of one element.
    Scale,
}

/// A failure that the suite asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TestFault {
    /// The run at this position does not end until [`Subject::release`] or until its context is lost.
    Stall(u32),
    /// The run at this position ends in an error.
    Fail(u32),
}

/// Element type of the vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// IEEE binary32.
    F32,
    /// Signed 32-bit integer.
    I32,
}

/// Names and reasons.
pub type Exceptions = &'static [(&'static str, &'static str)];

/// A backend under test.
pub trait Subject {
    /// Its name, for messages.
    fn name(&self) -> &str;

    /// Its device.
    fn device(&self) -> &dyn Device;

    /// What a context boots from.
    fn boot(&self) -> Program<'_>;

    /// A program of the suite.
    fn program(&self, program: TestProgram) -> Program<'_>;

    /// Element type of the programs' vectors.
    fn element(&self) -> Element;

    /// Bytes of the programs' vectors.
    fn vector_bytes(&self) -> u64;

    /// Lets the next submission meet `fault`.
    fn inject(&self, fault: TestFault);

    /// Lets stalled runs go on.
    fn release(&self);

    /// Cases that the backend cannot run at all.
    fn unsupported(&self) -> Exceptions {
        &[]
    }

    /// Cases that the backend runs and fails.
    fn expected_failures(&self) -> Exceptions {
        &[]
    }
}

/// A case: `Err` says what was wrong.
pub type CaseFn = fn(&Rig<'_>) -> Result<(), String>;

/// All cases by name.
#[must_use]
pub fn cases() -> Vec<(&'static str, CaseFn)> {
    [cases::CASES, faults::CASES].concat()
}

/// What became of a suite.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Cases that passed.
    pub passed: Vec<String>,
    /// Cases left out, with reason.
    pub unsupported: Vec<String>,
    /// Cases that failed as expected, with reason.
    pub failed_as_expected: Vec<String>,
    /// What is wrong: failures, unexpected passes, stale list entries.
    pub wrong: Vec<String>,
}

/// Runs all cases on `subject`.
#[must_use]
pub fn run(subject: &dyn Subject) -> Outcome {
    run_cases(subject, &cases())
}

fn run_cases(subject: &dyn Subject, cases: &[(&'static str, CaseFn)]) -> Outcome {
    let mut outcome = Outcome::default();
    for (list, exceptions) in [("unsupported", subject.unsupported()), ("expected", subject.expected_failures())] {
        for (name, reason) in exceptions {
            if !cases.iter().any(|(case, _)| case == name) {
                outcome.wrong.push(format!("{name} is listed as {list}, but there is no such case"));
            }
            if reason.is_empty() {
                outcome.wrong.push(format!("{name} is listed as {list} without a reason"));
            }
        }
    }
    for (name, case) in cases {
        let find = |list: Exceptions| list.iter().find(|(listed, _)| listed == name).map(|(_, reason)| *reason);
        if let Some(reason) = find(subject.unsupported()) {
            outcome.unsupported.push(format!("{name}: {reason}"));
            continue;
        }
        let expected = find(subject.expected_failures());
        match (case(&Rig::new(subject)), expected) {
            (Ok(()), None) => outcome.passed.push((*name).to_owned()),
            (Ok(()), Some(reason)) => outcome.wrong.push(format!("{name} passed, but a failure is expected: {reason}")),
            (Err(error), None) => outcome.wrong.push(format!("{name}: {error}")),
            (Err(error), Some(reason)) => outcome.failed_as_expected.push(format!("{name}: {reason} ({error})")),
        }
    }
    outcome
}

/// Runs all cases on `subject` and panics if anything is wrong.
///
/// # Panics
/// With everything that is wrong.
pub fn assert_conforms(subject: &dyn Subject) {
    let outcome = run(subject);
    report(subject.name(), &outcome);
    assert!(outcome.wrong.is_empty(), "{}:\n{}", subject.name(), outcome.wrong.join("\n"));
}

#[allow(clippy::print_stderr, reason = "what was left out belongs into the test's output")]
fn report(name: &str, outcome: &Outcome) {
    eprintln!("{name}: {} cases passed", outcome.passed.len());
    outcome.unsupported.iter().for_each(|case| eprintln!("{name}: unsupported: {case}"));
    outcome.failed_as_expected.iter().for_each(|case| eprintln!("{name}: failed as expected: {case}"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use npuhal_cpu::CpuDevice;

    struct Listed {
        device: CpuDevice,
        unsupported: Exceptions,
        expected: Exceptions,
    }

    impl Subject for Listed {
        fn name(&self) -> &str {
            "listed"
        }
        fn device(&self) -> &dyn Device {
            &self.device
        }
        fn boot(&self) -> Program<'_> {
            Program::Builtin { name: "copy" }
        }
        fn program(&self, _: TestProgram) -> Program<'_> {
            Program::Builtin { name: "copy" }
        }
        fn element(&self) -> Element {
            Element::F32
        }
        fn vector_bytes(&self) -> u64 {
            64
        }
        fn inject(&self, _: TestFault) {}
        fn release(&self) {}
        fn unsupported(&self) -> Exceptions {
            self.unsupported
        }
        fn expected_failures(&self) -> Exceptions {
            self.expected
        }
    }

    fn outcome(unsupported: Exceptions, expected: Exceptions) -> Outcome {
        let subject = Listed { device: CpuDevice::new(None), unsupported, expected };
        run_cases(&subject, &[("good", |_| Ok(())), ("bad", |_| Err("broken".to_owned()))])
    }

    #[test]
    fn failures_and_unexpected_passes_are_wrong() {
        assert_eq!(outcome(&[], &[]).wrong, ["bad: broken"]);
        assert_eq!(outcome(&[], &[("bad", "known")]).wrong, [""; 0]);
        assert_eq!(outcome(&[("bad", "not here")], &[]).unsupported, ["bad: not here"]);
        let passed = outcome(&[], &[("good", "once broken"), ("bad", "known")]);
        assert_eq!(passed.wrong, ["good passed, but a failure is expected: once broken"]);
    }

    #[test]
    fn stale_entries_and_missing_reasons_are_wrong() {
        let stale = outcome(&[("gone", "why")], &[("bad", "")]);
        assert_eq!(
            stale.wrong,
            ["gone is listed as unsupported, but there is no such case", "bad is listed as expected without a reason"]
        );
    }

    #[test]
    fn a_device_that_only_copies_and_never_fails_is_found_out() {
        let outcome = run(&Listed { device: CpuDevice::new(Some(1 << 30)), unsupported: &[], expected: &[] });
        let is_wrong = |case: &str| outcome.wrong.iter().any(|line| line.starts_with(case));
        for case in [
            "scale_multiplies_a_vector",
            "a_runlist_of_29_runs_in_order",
            "two_lists_in_flight_keep_their_order",
            "rebind_exchanges_the_kernel",
            "rebind_refuses_what_does_not_fit",
            "a_timeout_loses_the_context",
            "a_failed_run_loses_the_context",
        ] {
            assert!(is_wrong(case), "{case} passed");
        }
        assert!(outcome.passed.contains(&"copy_moves_a_vector".to_owned()), "{:?}", outcome.wrong);
    }
}

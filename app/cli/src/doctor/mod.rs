//! What `npuhal doctor` examines, and what it concludes.
//!
//! A check has a status and, where it is not OK, issues (wanted, found) and remedies. What could not be examined is no check
//! with a friendly face: it is listed as not tried. A device that is listed is no proof that it runs commands, so a device
//! that is found is opened, and a context is made on it.

mod hardware;
mod kernel_log;
mod kernels;
pub(crate) mod machine;
mod program;
mod render;
mod trial;

use crate::error::CliError;
use machine::Machine;
use npuhal_registry::DeviceUri;
use std::path::Path;

/// What to examine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Target {
    /// The machine and every NPU on it.
    Machine,
    /// One NPU of the machine; it has to be there.
    Npu(DeviceUri),
    /// A virtual NPU; the machine does not matter.
    Virtual(DeviceUri),
}

/// Result of a check. Ascending: the report's status is the worst one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Status {
    Ok,
    /// Usable, but something is missing or will go wrong.
    Warn,
    /// Something that is here cannot be used.
    Fail,
}

impl Status {
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Warn => 1,
            Self::Fail => 2,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Warn => "WARN",
            Self::Fail => "FAIL",
        }
    }
}

/// What mends an issue.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Remedy {
    text: String,
    /// What to type first, where there is one thing to type.
    command: Option<String>,
}

impl Remedy {
    fn advice(text: impl Into<String>) -> Self {
        Self { text: text.into(), command: None }
    }

    /// Advice with a command to start with; it is put behind the text where the text does not hold it.
    fn command(text: impl Into<String>, command: impl Into<String>) -> Self {
        let (text, command) = (text.into(), command.into());
        let text = if text.contains(&command) { text } else { format!("{text}; start with: {command}") };
        Self { text, command: Some(command) }
    }
}

/// One line of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Check {
    name: &'static str,
    status: Status,
    /// Facts.
    found: Vec<String>,
    /// What is wrong: wanted and found.
    issues: Vec<String>,
    remedies: Vec<Remedy>,
}

impl Check {
    fn new(name: &'static str) -> Self {
        Self { name, status: Status::Ok, found: Vec::new(), issues: Vec::new(), remedies: Vec::new() }
    }

    fn found(mut self, fact: impl Into<String>) -> Self {
        self.found.push(fact.into());
        self
    }

    fn with_issue(
        mut self,
        status: Status,
        issue: impl Into<String>,
        remedies: impl IntoIterator<Item = Remedy>,
    ) -> Self {
        self.add_issue(status, issue, remedies);
        self
    }

    fn add_issue(&mut self, status: Status, issue: impl Into<String>, remedies: impl IntoIterator<Item = Remedy>) {
        self.status = self.status.max(status);
        self.issues.push(issue.into());
        for remedy in remedies {
            if !self.remedies.contains(&remedy) {
                self.remedies.push(remedy);
            }
        }
    }
}

/// The whole list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Report {
    checks: Vec<Check>,
    /// What could not be examined, each with the reason and how to.
    not_tried: Vec<String>,
    verdict: String,
    next_command: String,
}

impl Report {
    pub(crate) fn overall(&self) -> Status {
        worst(&self.checks)
    }
}

/// Examines.
///
/// # Errors
/// Usage: a kernel log that cannot be read, a virtual device that cannot be.
pub(crate) fn examine(
    machine: &Machine,
    target: &Target,
    kernel_log: Option<&Path>,
    models_dir: Option<&Path>,
) -> Result<Report, CliError> {
    let mut list = List::default();
    list.checks.push(program::system(machine));
    let subject = match target {
        Target::Virtual(uri) => trial::examine_virtual(&mut list, uri)?,
        Target::Machine => hardware::examine(&mut list, machine, None, kernel_log)?,
        Target::Npu(uri) => hardware::examine(&mut list, machine, Some(uri), kernel_log)?,
    };
    program::examine(&mut list, machine, models_dir);
    let (verdict, next_command) = conclude(&list, &subject, machine);
    Ok(Report { checks: list.checks, not_tried: list.not_tried, verdict, next_command })
}

/// Checks so far.
#[derive(Debug, Default)]
struct List {
    checks: Vec<Check>,
    not_tried: Vec<String>,
    /// A model that is here.
    model: Option<String>,
}

/// What the verdict is about.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Subject {
    /// No NPU that is served.
    NoNpu,
    /// NPUs, by id.
    Npus(Vec<String>),
    /// A virtual NPU.
    Virtual(String),
}

/// Parts that the full-ELF lane serves.
const LANE_PARTS: [&str; 3] = ["npu4", "npu5", "npu6"];
/// Checks from cause to consequence: the verdict names the first of them that failed.
const CAUSES: [&str; 14] = [
    "system",
    "memory_sharing",
    "access",
    "firmware",
    "kernel_log",
    "driver",
    "npu",
    "device",
    "context",
    "command",
    "locked_memory",
    "kernels",
    "models",
    "port",
];

fn conclude(list: &List, subject: &Subject, machine: &Machine) -> (String, String) {
    let overall = worst(&list.checks);
    let rank = |check: &&Check| CAUSES.iter().position(|name| *name == check.name).unwrap_or(CAUSES.len());
    let of_status = |status| list.checks.iter().filter(move |check| check.status == status);
    let cause = of_status(overall).min_by_key(rank);
    let issue = cause.and_then(|check| check.issues.first()).cloned().unwrap_or_default();
    let verdict = match (overall, subject) {
        (Status::Fail, Subject::NoNpu) => format!("Something has to be mended: {issue}."),
        (Status::Fail, Subject::Npus(ids)) if ids.len() > 1 => {
            format!("Not all of the NPUs {} can be used: {issue}. npuhal runs on the CPU.", ids.join(", "))
        }
        (Status::Fail, Subject::Npus(ids)) => {
            format!("The NPU {} cannot be used: {issue}. npuhal runs on the CPU.", ids.join(", "))
        }
        (Status::Fail, Subject::Virtual(id)) => format!("{id} does not work: {issue}."),
        (_, Subject::NoNpu) => format!("{}; npuhal runs on the CPU.", capitalized(&npu_issue(list))),
        (status, Subject::Npus(ids)) => {
            let is_alone = ids.len() == 1;
            let (npus, are, on) = if is_alone { ("NPU", "is", "it") } else { ("NPUs", "are", "them") };
            let tried = if machine.is_this() {
                if is_alone { "a context can be made on it" } else { "a context can be made on each" }
            } else {
                "nothing in this tree speaks against it; whether it runs commands was not tried"
            };
            let but = if status == Status::Warn { format!(" To note: {issue}.") } else { String::new() };
            let runs = match ids.iter().any(|id| LANE_PARTS.iter().any(|part| id.starts_with(part))) {
                true => "Packed qwen3 models run on npu4 to npu6 with kernels compiled for them (docs/xdna2.md), which nobody \
                         has tried yet; all others run on the CPU."
                    .to_owned(),
                false => format!(
                    "This version of npuhal has no route that runs a model on {on}, so models run on the CPU."
                ),
            };
            format!("The {npus} {} {are} ready as far as examined: {tried}. {runs}{but}", ids.join(" and "))
        }
        (status, Subject::Virtual(id)) => {
            let but = if status == Status::Warn { format!(" To note: {issue}.") } else { String::new() };
            format!(
                "{id} made a context and ran a command with the right result. All of it is virtual: it says nothing about hardware.{but}"
            )
        }
    };
    // The cause's own command first, then those of the other checks that are as bad.
    let command = |check: &Check| check.remedies.iter().find_map(|remedy| remedy.command.clone());
    let next = cause
        .and_then(command)
        .or_else(|| of_status(Status::Fail).find_map(command))
        .or_else(|| of_status(Status::Warn).find_map(command));
    let run = || match &list.model {
        Some(model) => format!("npuhal run -m {model} \"What is the capital of France?\""),
        None => "npuhal run \"What is the capital of France?\"".to_owned(),
    };
    (verdict, next.unwrap_or_else(run))
}

fn npu_issue(list: &List) -> String {
    let npu = list.checks.iter().find(|check| check.name == "npu");
    npu.and_then(|check| check.issues.first()).cloned().unwrap_or_else(|| "no NPU found".to_owned())
}

fn worst(checks: &[Check]) -> Status {
    checks.iter().map(|check| check.status).max().unwrap_or(Status::Ok)
}

fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

//! Parity of routes with an arithmetic of the CPU, on small random models: models × routes, written once.
//!
//! A route under test has two lists, as in [`crate::conformance`]: models it does not take and models on which it is known to be
//! out of tolerance, each with a reason. A model of the first list that it takes after all is wrong, and so is an unexpected pass.

use crate::conformance::{Exceptions, Outcome};
use crate::kit::model::{Architecture, ModelSpec, Weights};
use npuhal_core::stage::{Control, Session, Stepper};
use npuhal_models::{ModelSource, WeightType};
use npuhal_registry::parity::{ParityReport, ParityRequest, Side, hold, seeded_ids};
use npuhal_registry::{Options, Registry, Target, Tolerance};
use std::path::Path;

/// The usual reference.
pub const REFERENCE: &str = "cpu:exact";
/// Positions that are compared.
pub const POSITIONS: usize = 12;

/// A route under test, by the target that chooses it.
pub struct ParitySubject {
    /// Target, e.g. `cpu:fast`.
    pub target: &'static str,
    /// What it is held against, e.g. [`REFERENCE`], or the twin of an NPU's lane.
    pub against: &'static str,
    /// What is still parity; `None` is what the two routes state.
    pub tolerance: Option<Tolerance>,
    /// Beginnings of the names of taps that only one side shows; any other that one side lacks is wrong.
    pub unseen: &'static [&'static str],
    /// Models that it does not take.
    pub unsupported: Exceptions,
    /// Models on which it is out of tolerance.
    pub expected_failures: Exceptions,
}

/// The models by name. All have heads of 64 elements, which every lane of the first generation has.
#[must_use]
pub fn models() -> Vec<(&'static str, ModelSpec)> {
    let spec = |architecture, weights| ModelSpec {
        hidden: 256,
        layers: 3,
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
        intermediate: 512,
        ..ModelSpec::small(architecture, weights)
    };
    vec![
        ("llama-f32", spec(Architecture::Llama, Weights::Uniform(WeightType::F32))),
        ("llama-bf16", spec(Architecture::Llama, Weights::Uniform(WeightType::Bf16))),
        ("llama-q4_1", spec(Architecture::Llama, Weights::Uniform(WeightType::Q4_1))),
        ("qwen2-bf16", spec(Architecture::Qwen2, Weights::Uniform(WeightType::Bf16))),
        ("qwen2-q8_0", spec(Architecture::Qwen2, Weights::Uniform(WeightType::Q8_0))),
        ("qwen3-q4_k_m", spec(Architecture::Qwen3, Weights::LikeQ4KM)),
    ]
}

impl ParitySubject {
    /// `target` held against [`REFERENCE`] with the tolerances of both, without exceptions.
    #[must_use]
    pub const fn new(target: &'static str) -> Self {
        Self { target, against: REFERENCE, tolerance: None, unseen: &[], unsupported: &[], expected_failures: &[] }
    }
}

/// The models of [`models`], written below `folder`.
///
/// # Panics
/// Where a model of the kit cannot be written or opened.
#[must_use]
pub fn written(folder: &Path) -> Vec<(&'static str, ModelSource)> {
    models().into_iter().map(|(name, spec)| (name, write(&spec, folder, name))).collect()
}

/// Runs `models` through `subject`.
#[must_use]
pub fn run(registry: &Registry, subject: &ParitySubject, models: &[(&str, ModelSource)]) -> Outcome {
    let mut outcome = Outcome::default();
    for (list, exceptions) in [("unsupported", subject.unsupported), ("expected", subject.expected_failures)] {
        for (name, reason) in exceptions {
            if !models.iter().any(|(model, _)| model == name) {
                outcome.wrong.push(format!("{name} is listed as {list}, but there is no such model"));
            }
            if reason.is_empty() {
                outcome.wrong.push(format!("{name} is listed as {list} without a reason"));
            }
        }
    }
    for (name, model) in models {
        let find = |list: Exceptions| list.iter().find(|(listed, _)| listed == name).map(|(_, reason)| *reason);
        let opened = open(registry, model, subject.target);
        match (opened, find(subject.unsupported)) {
            (Ok(_), Some(reason)) => {
                outcome.wrong.push(format!("{name} is taken, but is listed as unsupported: {reason}"));
            }
            (Err(_), Some(reason)) => outcome.unsupported.push(format!("{name}: {reason}")),
            (Err(error), None) => outcome.wrong.push(format!("{name}: {error}")),
            (Ok(found), None) => {
                let result = compare(registry, subject, model, found);
                match (result, find(subject.expected_failures)) {
                    (Ok(figures), None) => outcome.passed.push(format!("{name}: {figures}")),
                    (Ok(_), Some(reason)) => {
                        outcome.wrong.push(format!("{name} passed, but a failure is expected: {reason}"));
                    }
                    (Err(error), None) => outcome.wrong.push(format!("{name}: {error}")),
                    (Err(error), Some(reason)) => {
                        outcome.failed_as_expected.push(format!("{name}: {reason} ({error})"));
                    }
                }
            }
        }
    }
    outcome
}

/// A session with what is still parity for its route.
pub struct Opened {
    /// The session.
    pub stepper: Box<dyn Stepper>,
    /// Tolerance of its route.
    pub tolerance: Tolerance,
}

/// Opens `model` on `target`.
///
/// # Errors
/// Why it cannot be run there.
pub fn open(registry: &Registry, model: &ModelSource, target: &str) -> Result<Opened, String> {
    let base = Options { context_positions: Some(64), ..Options::default() };
    let target = Target::parse(target, &base, &registry.option_keys()).map_err(|error| error.to_string())?;
    let choice = target.choose(registry, model).map_err(|error| error.to_string())?;
    let tolerance = choice.route.tolerance(model, &target.options);
    match choice.open(registry, model, &target.options).map_err(|error| error.to_string())? {
        Session::Stepper(stepper) => Ok(Opened { stepper, tolerance }),
        Session::Generator(_) => Err("the route yields no logits".to_owned()),
    }
}

/// Compares two sessions over drawn ids.
///
/// # Errors
/// What kept them from running.
pub fn report(reference: &mut Opened, found: &mut Opened, tolerance: Tolerance) -> Result<ParityReport, String> {
    let ids = seeded_ids(POSITIONS, reference.stepper.vocab_size(), 5);
    let request = ParityRequest { ids, top_k: 5, tolerance };
    let side = |name: &str, stepper| Side { name: name.to_owned(), stepper };
    hold(
        side("reference", reference.stepper.as_mut()),
        side("found", found.stepper.as_mut()),
        &request,
        &Control::new(),
    )
    .map_err(|error| error.to_string())
}

/// The largest distances where they are within the tolerance.
fn compare(
    registry: &Registry,
    subject: &ParitySubject,
    model: &ModelSource,
    mut found: Opened,
) -> Result<String, String> {
    let mut reference = open(registry, model, subject.against)?;
    let tolerance = subject.tolerance.unwrap_or(reference.tolerance.with(found.tolerance));
    let report = report(&mut reference, &mut found, tolerance)?;
    let is_wrong = |tap: &&String| !subject.unseen.iter().any(|name| tap.starts_with(name));
    let one_sided: Vec<&str> = report.not_compared.iter().filter(is_wrong).map(String::as_str).collect();
    if !one_sided.is_empty() {
        return Err(format!("seen on one side only: {}", one_sided.join(", ")));
    }
    if !report.passed {
        return Err(npuhal_registry::parity::text(&report));
    }
    let cosine = report.taps.iter().map(|tap| tap.min_cosine).fold(1.0, f64::min);
    let error = report.taps.iter().map(|tap| tap.max_relative_error).fold(0.0, f64::max);
    Ok(format!("cosine {cosine:.6}, error {error:.4} of the root mean square"))
}

/// Writes a model of the kit below `folder` and opens it.
///
/// # Panics
/// Where that is not possible.
#[must_use]
pub fn write(spec: &ModelSpec, folder: &Path, name: &str) -> ModelSource {
    let path = folder.join(format!("{name}.gguf"));
    spec.build().write(&path).expect("the model is written");
    ModelSource::open(&path).expect("the model is one")
}

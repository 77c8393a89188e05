//! Real placements of a model: every one is fed the same ids, twice, and has to prove where it ran.

use super::scenario::{HarnessError, Rows, check};
use super::{AgreementReport, Candidate};
use crate::registry::Registry;
use crate::route::RouteError;
use crate::selection::SelectionError;
use crate::target::Target;
use crate::witness::{Testimony, Witness};
use npuhal_core::RunError;
use npuhal_core::stage::{Control, HiddenRows, Row, SequenceId, Session, Stepper, TokenId, Want};
use npuhal_models::ModelSource;
use npuhal_models::logprobs::token_logprob;
use npuhal_models::sampling::greedy;
use serde::Serialize;
use std::sync::Arc;
use thiserror::Error;

/// What is asked of the placements.
#[derive(Debug, Clone)]
pub struct LiveTrial {
    /// Name of the trial in its report.
    pub name: String,
    /// Ids every placement starts with; at least one.
    pub prompt: Vec<TokenId>,
    /// Positions in all: the prompt, and what the reference goes on with, choosing its likeliest token.
    pub positions: usize,
    /// Candidates at each.
    pub top_k: usize,
    /// From which margin of the reference on a difference fails.
    pub margin_threshold: f64,
}

/// Agreement of real placements, with the proof of where each ran.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LiveReport {
    /// The agreement. Its failures include `PLACEMENT_nondeterministic` and `PLACEMENT_wrong_backend`.
    #[serde(flatten)]
    pub agreement: AgreementReport,
    /// Ids that every placement was fed, by position.
    pub ids: Vec<TokenId>,
    /// What was seen of each placement, in the order they were given.
    pub evidence: Vec<Evidence>,
}

/// What was seen of a placement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// The placement.
    pub placement: String,
    /// The route that ran it.
    pub route: String,
    /// Where its stages ran, as the session says: device and layers.
    pub stages: Vec<String>,
    /// What devices completed during the first run, as seen where the session meets them.
    pub devices: Vec<Testimony>,
    /// Whether a second run gave the same bits.
    pub repeats: bool,
}

/// A trial that could not be held.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LiveError {
    /// Parameters.
    #[error(transparent)]
    Parameters(#[from] HarnessError),
    /// No placement, or no prompt.
    #[error("{what} is missing; give at least one")]
    Missing {
        /// What.
        what: &'static str,
    },
    /// A placement that cannot be chosen.
    #[error("placement {placement}: {source}")]
    Selection {
        /// The placement.
        placement: String,
        /// Why.
        source: Box<SelectionError>,
    },
    /// A placement that cannot be opened.
    #[error("placement {placement}: {source}")]
    Route {
        /// The placement.
        placement: String,
        /// Why.
        source: RouteError,
    },
    /// A placement that chooses tokens itself.
    #[error(
        "placement {placement}: the route {route} gives tokens, not logits; only routes with logits can be compared"
    )]
    NoLogits {
        /// The placement.
        placement: String,
        /// Its route.
        route: String,
    },
    /// More positions than a placement has.
    #[error("placement {placement} has {window} positions; the trial needs {needed}")]
    Window {
        /// The placement.
        placement: String,
        /// What it has.
        window: u32,
        /// What is needed.
        needed: usize,
    },
    /// A run that failed.
    #[error("placement {placement}: {source}")]
    Run {
        /// The placement.
        placement: String,
        /// Why.
        source: RunError,
    },
}

/// Holds `trial` on `targets`, of which the first is the reference.
///
/// # Errors
/// [`LiveError`]. Disagreement, runs that do not repeat and a backend that cannot be proved are no errors: the report says so.
pub fn hold(
    registry: &Registry,
    model: &ModelSource,
    targets: &[(String, Target)],
    trial: &LiveTrial,
    control: &Control,
) -> Result<LiveReport, LiveError> {
    check(trial.positions, trial.top_k, trial.margin_threshold)?;
    if trial.prompt.is_empty() {
        return Err(LiveError::Missing { what: "a prompt" });
    }
    if targets.is_empty() {
        return Err(LiveError::Missing { what: "a placement" });
    }
    let mut ids = trial.prompt.clone();
    ids.truncate(trial.positions);
    let (mut rows, mut evidence, mut failures) = (Vec::new(), Vec::new(), Vec::new());
    for (index, (name, target)) in targets.iter().enumerate() {
        let named = |source| LiveError::Run { placement: name.clone(), source };
        let mut opened = open(registry, model, name, target, trial.positions)?;
        let stepper = opened.stepper.as_mut();
        if index == 0 {
            ids = greedy_ids(stepper, &ids, trial.positions, control).map_err(named)?;
            opened.witness.reset();
        }
        let first = candidates(stepper, &ids, trial.top_k, control).map_err(named)?;
        let devices = opened.witness.testimonies();
        let second = candidates(stepper, &ids, trial.top_k, control).map_err(named)?;
        let stages = stepper.placement();
        if first != second {
            failures.push(format!("{name}_nondeterministic"));
        }
        let wanted = opened.devices.iter().all(|device| {
            stages.iter().any(|stage| stage.device == *device && !stage.layers.is_empty())
                && (device == "cpu" || has_worked(&devices, device, ids.len()))
        });
        if !wanted {
            failures.push(format!("{name}_wrong_backend"));
        }
        let stage = |stage: &npuhal_core::stage::Placement| {
            format!("{}: layers {}..{}", stage.device, stage.layers.start, stage.layers.end)
        };
        evidence.push(Evidence {
            placement: name.clone(),
            route: opened.route,
            stages: stages.iter().map(stage).collect(),
            devices,
            repeats: first == second,
        });
        rows.push((name.clone(), first));
    }
    let mut agreement = AgreementReport::new(&trial.name, &rows, trial.margin_threshold);
    failures.into_iter().for_each(|failure| agreement.fail(failure));
    Ok(LiveReport { agreement, ids, evidence })
}

/// At least one completed run for each position.
fn has_worked(devices: &[Testimony], device: &str, positions: usize) -> bool {
    devices.iter().any(|testimony| testimony.device == device && testimony.completed_runs >= positions as u64)
}

struct Opened {
    route: String,
    stepper: Box<dyn Stepper>,
    witness: Arc<Witness>,
    /// Devices that have to be seen at work.
    devices: Vec<String>,
}

fn open(
    registry: &Registry,
    model: &ModelSource,
    name: &str,
    target: &Target,
    positions: usize,
) -> Result<Opened, LiveError> {
    let placement = || name.to_owned();
    let mut target = target.clone();
    let context = &mut target.options.context_positions;
    let needed = u32::try_from(positions).unwrap_or(u32::MAX);
    *context = context.map(|asked| asked.max(needed));
    let choice = target
        .choose(registry, model)
        .map_err(|source| LiveError::Selection { placement: placement(), source: Box::new(source) })?;
    if choice.service.window < needed {
        return Err(LiveError::Window { placement: placement(), window: choice.service.window, needed: positions });
    }
    let witness = Arc::new(Witness::new());
    let session = choice
        .open_witnessed(registry, model, &target.options, &witness)
        .map_err(|source| LiveError::Route { placement: placement(), source })?;
    let route = choice.route.name().to_owned();
    match session {
        Session::Stepper(stepper) => {
            let devices = target.devices().unwrap_or_else(|| vec![choice.service.device.clone()]);
            Ok(Opened { route, stepper, witness, devices })
        }
        Session::Generator(_) => Err(LiveError::NoLogits { placement: placement(), route }),
    }
}

/// Runs `work` as one generation from an empty cache.
fn generation<T>(
    stepper: &mut dyn Stepper,
    work: impl FnOnce(&mut dyn Stepper) -> Result<T, RunError>,
) -> Result<T, RunError> {
    stepper.begin()?;
    stepper.truncate(SequenceId(0), 0);
    let result = work(stepper);
    stepper.end();
    result
}

fn rows(ids: &[TokenId], from: usize) -> Vec<Row> {
    let row = |(index, &token): (usize, &TokenId)| Row {
        sequence: SequenceId(0),
        token,
        position: u32::try_from(from + index).unwrap_or(u32::MAX),
    };
    ids.iter().enumerate().map(row).collect()
}

/// `prompt`, and what follows it by the likeliest token, `positions` ids in all.
fn greedy_ids(
    stepper: &mut dyn Stepper,
    prompt: &[TokenId],
    positions: usize,
    control: &Control,
) -> Result<Vec<TokenId>, RunError> {
    let mut ids = prompt.to_vec();
    if ids.len() == positions {
        return Ok(ids);
    }
    generation(stepper, |stepper| {
        let (mut logits, mut done) = (HiddenRows::new(), 0);
        while ids.len() < positions {
            stepper.step(&rows(&ids[done..], done), Want::Last, &mut logits, control)?;
            done = ids.len();
            ids.push(greedy(logits.row(0))?);
        }
        Ok(ids)
    })
}

/// The likeliest tokens behind each of `ids`, which are fed one after the other.
fn candidates(stepper: &mut dyn Stepper, ids: &[TokenId], top_k: usize, control: &Control) -> Result<Rows, RunError> {
    generation(stepper, |stepper| {
        let mut logits = HiddenRows::new();
        let mut found = Vec::with_capacity(ids.len());
        for row in rows(ids, 0) {
            stepper.step(&[row], Want::Last, &mut logits, control)?;
            let top = token_logprob(logits.row(0), greedy(logits.row(0))?, top_k, |_| Vec::new())?.top;
            found.push(top.into_iter().map(|token| Candidate { id: token.id, logprob: token.logprob }).collect());
        }
        Ok(found)
    })
}

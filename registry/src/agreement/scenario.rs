//! Synthetic placements, for trying the gate itself: no model, no device.

use super::mersenne::Mersenne;
use super::{AgreementReport, Candidate, four_decimals};
use npuhal_core::stage::TokenId;
use std::str::FromStr;
use thiserror::Error;

/// Candidates of a placement by position, best first where the placement sorts them.
pub type Rows = Vec<Vec<Candidate>>;

/// The synthetic placements; the first is the reference.
pub const PLACEMENTS: [&str; 3] = ["cpu_only", "gpu_only", "xdna_only"];

/// What the placements differ in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scenario {
    /// The others swap their first two tokens at near-ties: passes.
    Pass,
    /// As [`Scenario::Pass`], and the last placement also where the reference is sure: fails.
    FailConfident,
    /// In nothing: passes.
    Exact,
}

/// A scenario that there is not.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("there is no scenario '{found}'; known: pass, fail_confident, exact")]
pub struct UnknownScenario {
    /// What was asked for.
    pub found: String,
}

impl Scenario {
    /// All scenarios.
    pub const ALL: [Self; 3] = [Self::Pass, Self::FailConfident, Self::Exact];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::FailConfident => "fail_confident",
            Self::Exact => "exact",
        }
    }

    /// Whether the gate did with `report` what it is there for.
    ///
    /// # Errors
    /// What it did instead.
    pub fn is_as_expected(self, report: &AgreementReport) -> Result<(), String> {
        match (self, report.passed) {
            (Self::FailConfident, true) => Err(format!("scenario {} was to fail and passed", self.name())),
            (Self::Pass | Self::Exact, false) => {
                Err(format!("scenario {} was to pass and failed: {}", self.name(), report.gate_failures.join(", ")))
            }
            _ => Ok(()),
        }
    }
}

impl FromStr for Scenario {
    type Err = UnknownScenario;

    fn from_str(text: &str) -> Result<Self, UnknownScenario> {
        let found = Self::ALL.into_iter().find(|scenario| scenario.name() == text);
        found.ok_or_else(|| UnknownScenario { found: text.to_owned() })
    }
}

/// Parameters of the synthetic placements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Harness {
    /// Positions.
    pub positions: usize,
    /// Candidates at each.
    pub top_k: usize,
    /// From which margin of the reference on a difference fails.
    pub margin_threshold: f64,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for Harness {
    fn default() -> Self {
        Self { positions: 16, top_k: 5, margin_threshold: 1.0, seed: 42 }
    }
}

/// Parameters that mean nothing.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum HarnessError {
    /// A count outside its range.
    #[error("{what} is {found}; wanted {least} to {most}")]
    Count {
        /// The parameter.
        what: &'static str,
        /// What was given.
        found: usize,
        /// Smallest.
        least: usize,
        /// Largest.
        most: usize,
    },
    /// A threshold that is no positive number.
    #[error("margin-threshold is {found}; wanted a finite number above 0")]
    Threshold {
        /// What was given.
        found: f64,
    },
}

/// A million positions of a thousand candidates are as far as a trial of a gate needs to go.
const MOST_POSITIONS: usize = 1_000_000;
const MOST_CANDIDATES: usize = 1000;

/// Checks the parameters that the synthetic and the live form have in common.
///
/// # Errors
/// [`HarnessError`] with the first one out of range.
pub(super) fn check(positions: usize, top_k: usize, margin_threshold: f64) -> Result<(), HarnessError> {
    for (what, found, least, most) in
        [("positions", positions, 1, MOST_POSITIONS), ("top-k", top_k, 2, MOST_CANDIDATES)]
    {
        if !(least..=most).contains(&found) {
            return Err(HarnessError::Count { what, found, least, most });
        }
    }
    if !margin_threshold.is_finite() || margin_threshold <= 0.0 {
        return Err(HarnessError::Threshold { found: margin_threshold });
    }
    Ok(())
}

impl Harness {
    /// The candidates of every placement.
    ///
    /// # Errors
    /// [`HarnessError`].
    pub fn rows(&self, scenario: Scenario) -> Result<Vec<(String, Rows)>, HarnessError> {
        check(self.positions, self.top_k, self.margin_threshold)?;
        let reference = self.reference();
        let of_placement = |(index, name): (usize, &&str)| {
            let is_last = index + 1 == PLACEMENTS.len();
            let swaps = |position: usize| match scenario {
                _ if index == 0 => false,
                Scenario::Exact => false,
                Scenario::Pass => is_ambiguous(position),
                Scenario::FailConfident => is_ambiguous(position) || (is_last && position == 0),
            };
            let rows = reference.iter().enumerate();
            let rows = rows.map(|(position, row)| if swaps(position) { swapped(row) } else { row.clone() });
            ((*name).to_owned(), rows.collect())
        };
        Ok(PLACEMENTS.iter().enumerate().map(of_placement).collect())
    }

    /// What the gate says about them.
    ///
    /// # Errors
    /// [`HarnessError`].
    pub fn report(&self, scenario: Scenario) -> Result<AgreementReport, HarnessError> {
        Ok(AgreementReport::new(scenario.name(), &self.rows(scenario)?, self.margin_threshold))
    }

    /// Even positions are sure, odd ones near-ties.
    fn reference(&self) -> Rows {
        let mut draws = Mersenne::seeded(self.seed);
        let mut row = |position: usize| {
            let first = TokenId::try_from(100 + 10 * position).unwrap_or(TokenId::MAX);
            let (best, gap) = if is_ambiguous(position) {
                (-0.6, draws.uniform(0.0, 0.4 * self.margin_threshold))
            } else {
                (-0.1, self.margin_threshold + draws.uniform(0.5, 2.0))
            };
            let second = best - gap;
            let further = (0..self.top_k - 2).map(|index| second - draws.uniform(0.5, 2.0) * (index as f64 + 1.0));
            let logprobs = [best, second].into_iter().chain(further);
            (first..)
                .zip(logprobs)
                .map(|(id, logprob)| Candidate { id, logprob: four_decimals(logprob) })
                .collect::<Vec<_>>()
        };
        (0..self.positions).map(&mut row).collect()
    }
}

fn is_ambiguous(position: usize) -> bool {
    position % 2 == 1
}

/// The tokens of the two best scores exchanged, scores falling.
fn swapped(row: &[Candidate]) -> Vec<Candidate> {
    let mut row = row.to_vec();
    row.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
    if let [first, second, ..] = row.as_mut_slice() {
        std::mem::swap(&mut first.id, &mut second.id);
    }
    row
}

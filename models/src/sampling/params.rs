//! The parameters of sampling and their ranges.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

/// A sampling parameter that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// Not a number at all.
    #[error("{field} must be a number; found {found}")]
    NotANumber {
        /// Name of the parameter.
        field: &'static str,
        /// What was given, as JSON.
        found: String,
    },
    /// A number where an integer is needed, or no number.
    #[error("{field} must be an integer; found {found}")]
    NotAnInteger {
        /// Name of the parameter.
        field: &'static str,
        /// What was given, as JSON.
        found: String,
    },
    /// Infinite or not a number.
    #[error("{field} must be finite; found {found}")]
    NotFinite {
        /// Name of the parameter.
        field: &'static str,
        /// What was given.
        found: String,
    },
    /// A negative number where there can be none.
    #[error("{field} cannot be negative; found {found}")]
    Negative {
        /// Name of the parameter.
        field: &'static str,
        /// What was given.
        found: String,
    },
    /// Outside the range.
    #[error("{field} must be between {range}; found {found}")]
    OutOfRange {
        /// Name of the parameter.
        field: &'static str,
        /// The two ends, e.g. `0 (exclusive) and 1 (inclusive)`.
        range: &'static str,
        /// What was given.
        found: String,
    },
}

/// How the repetition penalty is understood.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PenaltyRule {
    /// Any value other than 1 applies.
    #[default]
    AnyValue,
    /// Only values above 1 apply, as in the published XDNA2 lane; its plain argmax orders by bit pattern, so that +0 is above
    /// -0.
    AboveOne,
}

/// How tokens are chosen. The default is greedy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingParams {
    /// Divisor of the logits, 0 to 2; 0 takes the best.
    pub temperature: f64,
    /// Cumulative probability to keep, above 0 and up to 1; 1 is off.
    pub top_p: f64,
    /// Scores to keep; 0 is off.
    pub top_k: u64,
    /// Smallest probability relative to the best, 0 to 1; 0 is off. Applied after `top_p`.
    pub min_p: f64,
    /// Factor on logits of ids that occurred, 0.1 to 2; 1 is off.
    pub repetition_penalty: f64,
    /// Subtracted from logits of ids that occurred, -2 to 2; 0 is off.
    pub presence_penalty: f64,
    /// Subtracted once for each occurrence, -2 to 2; 0 is off.
    pub frequency_penalty: f64,
    /// Seed of the draws, 0 to 2⁶³ - 1; without one a random seed is taken and reported.
    pub seed: Option<u64>,
    /// Latest ids of prompt and output that penalties look at; `None` is all.
    pub penalty_window: Option<u32>,
    /// How the repetition penalty is understood.
    pub penalty_rule: PenaltyRule,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            penalty_window: None,
            penalty_rule: PenaltyRule::AnyValue,
        }
    }
}

impl SamplingParams {
    /// The published XDNA2 lane's choice: argmax, with a repetition penalty over the last 64 ids where it is above 1.
    #[must_use]
    pub fn lane(repetition_penalty: f64) -> Self {
        Self { repetition_penalty, penalty_window: Some(64), penalty_rule: PenaltyRule::AboveOne, ..Self::default() }
    }

    /// Reads the parameters of a request body. Absent and null fields keep their defaults; other fields are ignored.
    ///
    /// # Errors
    /// The first field that is no number (booleans are none) or out of range.
    pub fn from_json(body: &serde_json::Map<String, Value>) -> Result<Self, SamplingError> {
        let mut params = Self::default();
        for (field, slot) in [
            (TEMPERATURE, &mut params.temperature),
            (TOP_P, &mut params.top_p),
            (MIN_P, &mut params.min_p),
            (REPETITION, &mut params.repetition_penalty),
            (PRESENCE, &mut params.presence_penalty),
            (FREQUENCY, &mut params.frequency_penalty),
        ] {
            if let Some(value) = given(body, field) {
                *slot = value.as_f64().ok_or_else(|| SamplingError::NotANumber { field, found: value.to_string() })?;
            }
        }
        if let Some(value) = given(body, TOP_K) {
            params.top_k =
                integer(TOP_K, value, || SamplingError::Negative { field: TOP_K, found: value.to_string() })?;
        }
        if let Some(value) = given(body, SEED) {
            params.seed = Some(integer(SEED, value, || seed_out_of_range(value.to_string()))?);
        }
        params.validate()?;
        Ok(params)
    }

    /// Checks every range.
    ///
    /// # Errors
    /// The first field out of range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        check(TEMPERATURE, self.temperature, "0 (inclusive) and 2 (inclusive)", |x| (0.0..=2.0).contains(&x))?;
        check(TOP_P, self.top_p, "0 (exclusive) and 1 (inclusive)", |x| x > 0.0 && x <= 1.0)?;
        check(MIN_P, self.min_p, "0 (inclusive) and 1 (inclusive)", |x| (0.0..=1.0).contains(&x))?;
        check(REPETITION, self.repetition_penalty, "0.1 (inclusive) and 2 (inclusive)", |x| (0.1..=2.0).contains(&x))?;
        check(PRESENCE, self.presence_penalty, "-2 (inclusive) and 2 (inclusive)", |x| (-2.0..=2.0).contains(&x))?;
        check(FREQUENCY, self.frequency_penalty, "-2 (inclusive) and 2 (inclusive)", |x| (-2.0..=2.0).contains(&x))?;
        match (self.seed, self.penalty_window) {
            (Some(seed), _) if seed > MAX_SEED => Err(seed_out_of_range(seed.to_string())),
            (_, Some(0)) => Err(SamplingError::OutOfRange {
                field: "penalty_window",
                range: "1 (inclusive) and 4294967295 (inclusive)",
                found: "0".to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// Whether a penalty differs from neutral.
    #[must_use]
    pub fn penalizes(&self) -> bool {
        self.repetition() != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether the choice is the plain argmax.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        !self.penalizes() && (self.temperature == 0.0 || self.top_k == 1)
    }

    /// Whether a second run gives the same tokens.
    #[must_use]
    pub fn is_deterministic(&self) -> bool {
        !self.draws() || self.seed.is_some()
    }

    /// Whether tokens are drawn at random.
    #[must_use]
    pub fn draws(&self) -> bool {
        self.temperature != 0.0 && !self.is_greedy()
    }

    /// The repetition penalty in effect.
    pub(super) fn repetition(&self) -> f64 {
        match self.penalty_rule {
            PenaltyRule::AboveOne if self.repetition_penalty <= 1.0 => 1.0,
            _ => self.repetition_penalty,
        }
    }
}

fn given<'a>(body: &'a serde_json::Map<String, Value>, field: &str) -> Option<&'a Value> {
    body.get(field).filter(|value| !value.is_null())
}

fn integer(field: &'static str, value: &Value, outside: impl Fn() -> SamplingError) -> Result<u64, SamplingError> {
    match (value.as_u64(), value.as_i64()) {
        (Some(number), _) => Ok(number),
        (None, Some(_)) => Err(outside()),
        (None, None) => Err(SamplingError::NotAnInteger { field, found: value.to_string() }),
    }
}

fn check(
    field: &'static str,
    value: f64,
    range: &'static str,
    fits: impl Fn(f64) -> bool,
) -> Result<(), SamplingError> {
    let found = || value.to_string();
    match value {
        _ if !value.is_finite() => Err(SamplingError::NotFinite { field, found: found() }),
        _ if !fits(value) => Err(SamplingError::OutOfRange { field, range, found: found() }),
        _ => Ok(()),
    }
}

fn seed_out_of_range(found: String) -> SamplingError {
    SamplingError::OutOfRange { field: SEED, range: "0 (inclusive) and 9223372036854775807 (inclusive)", found }
}

const TEMPERATURE: &str = "temperature";
const TOP_P: &str = "top_p";
const TOP_K: &str = "top_k";
const MIN_P: &str = "min_p";
const REPETITION: &str = "repetition_penalty";
const PRESENCE: &str = "presence_penalty";
const FREQUENCY: &str = "frequency_penalty";
const SEED: &str = "seed";
pub(super) const MAX_SEED: u64 = i64::MAX as u64;

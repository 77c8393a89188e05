//! The parameters of sampling and their ranges.

use crate::json_keys::short;
use npuhal_core::stage::TokenId;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
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
    /// Not an object of token ids and numbers.
    #[error("logit_bias must be an object of token ids and numbers; found {found}")]
    NotBiases {
        /// What was given, as JSON.
        found: String,
    },
    /// More biases than a request may have.
    #[error("logit_bias accepts at most {limit} tokens; found {found}")]
    TooManyBiases {
        /// How many were given.
        found: usize,
        /// [`MAX_BIASES`].
        limit: usize,
    },
}

/// Biases of one request at most.
pub const MAX_BIASES: usize = 1024;

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
    /// Added to the logits of these ids before all else, -100 to 100.
    pub logit_bias: BTreeMap<TokenId, f64>,
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
            logit_bias: BTreeMap::new(),
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
                *slot = value.as_f64().ok_or_else(|| SamplingError::NotANumber { field, found: short(value) })?;
            }
        }
        // The name that llama.cpp has for it, and user interfaces from it.
        if let (None, Some(value)) = (given(body, REPETITION), given(body, REPEAT)) {
            let not_a_number = || SamplingError::NotANumber { field: REPEAT, found: short(value) };
            params.repetition_penalty = value.as_f64().ok_or_else(not_a_number)?;
            check_repetition(REPEAT, params.repetition_penalty)?;
        }
        if let Some(value) = given(body, TOP_K) {
            params.top_k = integer(TOP_K, value, || SamplingError::Negative { field: TOP_K, found: short(value) })?;
        }
        if let Some(value) = given(body, SEED) {
            params.seed = Some(integer(SEED, value, || seed_out_of_range(short(value)))?);
        }
        if let Some(value) = given(body, LOGIT_BIAS) {
            let not_biases = || SamplingError::NotBiases { found: short(value) };
            for (id, bias) in value.as_object().ok_or_else(not_biases)? {
                let (id, bias) = (id.parse().ok(), bias.as_f64());
                let (Some(id), Some(bias)) = (id, bias) else { return Err(not_biases()) };
                params.logit_bias.insert(id, bias);
            }
        }
        params.validate()?;
        Ok(params)
    }

    /// The parameters of choice `index` of several to one request, counted from 0: its seed is [`choice_seed`].
    #[must_use]
    pub fn for_choice(&self, index: u32) -> Self {
        Self { seed: self.seed.map(|seed| choice_seed(seed, index)), ..self.clone() }
    }

    /// Checks every range.
    ///
    /// # Errors
    /// The first field out of range.
    pub fn validate(&self) -> Result<(), SamplingError> {
        check(TEMPERATURE, self.temperature, "0 (inclusive) and 2 (inclusive)", |x| (0.0..=2.0).contains(&x))?;
        check(TOP_P, self.top_p, "0 (exclusive) and 1 (inclusive)", |x| x > 0.0 && x <= 1.0)?;
        check(MIN_P, self.min_p, "0 (inclusive) and 1 (inclusive)", |x| (0.0..=1.0).contains(&x))?;
        check_repetition(REPETITION, self.repetition_penalty)?;
        check(PRESENCE, self.presence_penalty, "-2 (inclusive) and 2 (inclusive)", |x| (-2.0..=2.0).contains(&x))?;
        check(FREQUENCY, self.frequency_penalty, "-2 (inclusive) and 2 (inclusive)", |x| (-2.0..=2.0).contains(&x))?;
        for bias in self.logit_bias.values() {
            check(LOGIT_BIAS, *bias, "-100 (inclusive) and 100 (inclusive)", |x| (-100.0..=100.0).contains(&x))?;
        }
        if self.logit_bias.len() > MAX_BIASES {
            return Err(SamplingError::TooManyBiases { found: self.logit_bias.len(), limit: MAX_BIASES });
        }
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
        !self.penalizes() && self.logit_bias.is_empty() && (self.temperature == 0.0 || self.top_k == 1)
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

/// The seed of choice `index` of a request with the seed `seed`: of the first one the seed itself, of another the first 53
/// bits of `SplitMix64` in the state `seed + index × 0x9E3779B97F4A7C15`.
#[must_use]
pub fn choice_seed(seed: u64, index: u32) -> u64 {
    if index == 0 {
        return seed;
    }
    let mut z = seed.wrapping_add(u64::from(index).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)) >> (u64::BITS - SEED_BITS)
}

fn given<'a>(body: &'a serde_json::Map<String, Value>, field: &str) -> Option<&'a Value> {
    body.get(field).filter(|value| !value.is_null())
}

fn integer(field: &'static str, value: &Value, outside: impl Fn() -> SamplingError) -> Result<u64, SamplingError> {
    match (value.as_u64(), value.as_i64()) {
        (Some(number), _) => Ok(number),
        (None, Some(_)) => Err(outside()),
        (None, None) => Err(SamplingError::NotAnInteger { field, found: short(value) }),
    }
}

fn check_repetition(field: &'static str, value: f64) -> Result<(), SamplingError> {
    check(field, value, "0.1 (inclusive) and 2 (inclusive)", |x| (0.1..=2.0).contains(&x))
}

fn check(
    field: &'static str,
    value: f64,
    range: &'static str,
    fits: impl Fn(f64) -> bool,
) -> Result<(), SamplingError> {
    let found = || short(&value);
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
const REPEAT: &str = "repeat_penalty";
const PRESENCE: &str = "presence_penalty";
const FREQUENCY: &str = "frequency_penalty";
const SEED: &str = "seed";
const LOGIT_BIAS: &str = "logit_bias";
pub(super) const MAX_SEED: u64 = i64::MAX as u64;
/// Bits of a seed that is not given: readers of JSON keep as many.
pub(super) const SEED_BITS: u32 = f64::MANTISSA_DIGITS;

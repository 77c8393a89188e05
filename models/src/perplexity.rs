//! Teacher-forced perplexity of a text, and how far the logits of several numerics are from those of a reference.
//!
//! The text's ids are cut into windows that are computed independently of each other, each behind the id that begins a text
//! where the model has one. In a window every token with at least one before it is scored: its loss is the negative natural
//! logarithm of its probability, from the f32 logits in f64. Perplexity is the exponential of the mean loss.
//!
//! The price of a numerics is told by the same rows: the Kullback-Leibler divergence of its distribution from the
//! reference's, D(reference ‖ it), in nats; the differences of the logits; and how often both prefer the same token.

use crate::logprobs::log_sum_exp;
use npuhal_core::RunError;
use npuhal_core::stage::{Control, HiddenRows, Row, SequenceId, Stepper, TokenId, Want};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A text that cannot be scored.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PerplexityError {
    /// Nothing could be scored.
    #[error("the text has {tokens} tokens; wanted at least 2, one to begin with and one to score")]
    TooShort {
        /// Tokens of the text.
        tokens: usize,
    },
    /// No room for a token and its predecessor.
    #[error("a window of {found} positions; wanted 2 to {positions}, what the session holds")]
    BadWindow {
        /// What was asked for.
        found: usize,
        /// Positions of the session.
        positions: usize,
    },
    /// Sessions of different models.
    #[error("the sessions do not belong together: one has {first} logits a row, another {other}")]
    OtherVocabulary {
        /// Ids of the first.
        first: usize,
        /// Ids of the other.
        other: usize,
    },
    /// A session failed.
    #[error(transparent)]
    Run(#[from] RunError),
}

/// A text to score.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScoredText {
    /// Its ids.
    pub ids: Vec<TokenId>,
    /// What begins a text; every window starts with it.
    pub bos: Option<TokenId>,
    /// Positions of a window at most.
    pub window: usize,
    /// Ids from this one on are padding and count for nothing ([`crate::Tokenizer::usable_ids`]).
    pub usable_ids: usize,
}

/// How well a model foretells a text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Quality {
    /// Tokens that were scored.
    pub scored_tokens: usize,
    /// Mean loss of a token in nats.
    pub loss: f64,
    /// Its exponential.
    pub perplexity: f64,
    /// How far it is from the reference; nothing for the reference itself.
    pub difference: Option<Difference>,
}

/// How far logits are from those of a reference, over the same rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Kullback-Leibler divergence from the reference in nats, mean over rows.
    pub kl_mean: f64,
    /// The largest of a row.
    pub kl_max: f64,
    /// Absolute difference of a logit, mean.
    pub logit_mean: f64,
    /// Root of the mean squared difference of a logit.
    pub logit_rms: f64,
    /// Largest absolute difference of a logit.
    pub logit_max: f64,
    /// Share of rows with the same likeliest token.
    pub same_top: f64,
}

/// Scores `text` with every one of `steppers` (sequence 0 of each). The first one is the reference of the others.
///
/// `progress` is told scored tokens and their total.
///
/// # Errors
/// [`PerplexityError`]; nothing is known of any session's cache afterwards.
pub fn measure(
    steppers: &mut [Box<dyn Stepper>],
    text: &ScoredText,
    progress: &mut dyn FnMut(usize, usize),
    control: &Control,
) -> Result<Vec<Quality>, PerplexityError> {
    let Some(first) = steppers.first() else { return Ok(Vec::new()) };
    let vocab_size = first.vocab_size();
    for stepper in steppers.iter() {
        let positions = stepper.capacity().positions as usize;
        if !(2..=positions).contains(&text.window) {
            return Err(PerplexityError::BadWindow { found: text.window, positions });
        }
        if stepper.vocab_size() != vocab_size {
            return Err(PerplexityError::OtherVocabulary { first: vocab_size, other: stepper.vocab_size() });
        }
    }
    let windows = windows(text);
    let total: usize = windows.iter().map(|window| window.len() - 1).sum();
    if total == 0 {
        return Err(PerplexityError::TooShort { tokens: text.ids.len() });
    }
    let usable = vocab_size.min(text.usable_ids);
    let mut sums = vec![Sums::default(); steppers.len()];
    let mut begun = 0;
    let mut outcome = Ok(());
    for stepper in steppers.iter_mut() {
        outcome = stepper.begin();
        if outcome.is_err() {
            break;
        }
        begun += 1;
    }
    if outcome.is_ok() {
        outcome = run(steppers, &windows, usable, &mut sums, &mut |done| progress(done, total), control);
    }
    steppers[..begun].iter_mut().for_each(|stepper| stepper.end());
    outcome?;
    Ok(sums.iter().enumerate().map(|(index, sums)| sums.quality(index > 0, usable)).collect())
}

/// The ids of each window; one of a single id has nothing to score and is left out.
fn windows(text: &ScoredText) -> Vec<Vec<TokenId>> {
    let begins = usize::from(text.bos.is_some());
    let parts = text.ids.chunks(text.window - begins);
    parts.map(|part| text.bos.iter().chain(part).copied().collect()).filter(|ids: &Vec<_>| ids.len() > 1).collect()
}

fn run(
    steppers: &mut [Box<dyn Stepper>],
    windows: &[Vec<TokenId>],
    usable: usize,
    sums: &mut [Sums],
    progress: &mut dyn FnMut(usize),
    control: &Control,
) -> Result<(), RunError> {
    let sequence = SequenceId(0);
    let mut logits: Vec<HiddenRows> = steppers.iter().map(|_| HiddenRows::new()).collect();
    let mut done = 0;
    for ids in windows {
        steppers.iter_mut().for_each(|stepper| {
            stepper.truncate(sequence, 0);
        });
        // The last id of a window is scored and never fed.
        let fed = &ids[..ids.len() - 1];
        for from in (0..fed.len()).step_by(ROWS) {
            let part = &fed[from..fed.len().min(from + ROWS)];
            let rows = (from as u32..).zip(part);
            let rows: Vec<Row> = rows.map(|(position, &token)| Row { sequence, token, position }).collect();
            for (stepper, logits) in steppers.iter_mut().zip(&mut logits) {
                control.check()?;
                stepper.step(&rows, Want::All, logits, control)?;
                if logits.rows() != rows.len() {
                    let reason = format!("wanted {} rows of logits, found {}", rows.len(), logits.rows());
                    return Err(RunError::BadRows { reason });
                }
            }
            for row in 0..rows.len() {
                score(&logits, row, usable, ids[from + row + 1], sums)?;
            }
            done += rows.len();
            progress(done);
        }
    }
    Ok(())
}

/// Adds one row of every session.
fn score(logits: &[HiddenRows], row: usize, usable: usize, target: TokenId, sums: &mut [Sums]) -> Result<(), RunError> {
    let reference = &logits[0].row(row)[..usable];
    let reference_norm = log_sum_exp(reference)?;
    let best = |logits: &[f32]| crate::sampling::greedy(logits);
    let reference_best = best(reference)?;
    for (index, (logits, sums)) in logits.iter().zip(sums).enumerate() {
        let logits = &logits.row(row)[..usable];
        let norm = if index == 0 { reference_norm } else { log_sum_exp(logits)? };
        let logit = *logits
            .get(target as usize)
            .ok_or_else(|| RunError::BadRows { reason: format!("token {target} has no logit among {usable}") })?;
        sums.rows += 1;
        sums.loss += norm - f64::from(logit);
        if index > 0 {
            sums.add_difference(reference, reference_norm, logits, norm);
            sums.same_top += usize::from(best(logits)? == reference_best);
        }
    }
    Ok(())
}

#[derive(Debug, Clone, Default)]
struct Sums {
    rows: usize,
    loss: f64,
    kl: f64,
    kl_max: f64,
    absolute: f64,
    squared: f64,
    logit_max: f64,
    same_top: usize,
}

impl Sums {
    fn add_difference(&mut self, reference: &[f32], reference_norm: f64, logits: &[f32], norm: f64) {
        let (mut kl, mut absolute, mut squared, mut largest) = (0.0, 0.0, 0.0, 0.0f64);
        for (&wanted, &found) in reference.iter().zip(logits) {
            let (wanted, found) = (f64::from(wanted), f64::from(found));
            let log_wanted = wanted - reference_norm;
            kl += log_wanted.exp() * (log_wanted - (found - norm));
            let difference = (wanted - found).abs();
            absolute += difference;
            squared += difference * difference;
            largest = largest.max(difference);
        }
        // Rounding can leave a divergence of nothing a hair below it.
        let kl = kl.max(0.0);
        self.kl += kl;
        self.kl_max = self.kl_max.max(kl);
        self.absolute += absolute;
        self.squared += squared;
        self.logit_max = self.logit_max.max(largest);
    }

    fn quality(&self, is_compared: bool, usable: usize) -> Quality {
        let rows = self.rows as f64;
        let elements = rows * usable as f64;
        let loss = self.loss / rows;
        let difference = Difference {
            kl_mean: self.kl / rows,
            kl_max: self.kl_max,
            logit_mean: self.absolute / elements,
            logit_rms: (self.squared / elements).sqrt(),
            logit_max: self.logit_max,
            same_top: self.same_top as f64 / rows,
        };
        Quality {
            scored_tokens: self.rows,
            loss,
            perplexity: loss.exp(),
            difference: is_compared.then_some(difference),
        }
    }
}

/// Rows of a step: what the logits of all of them take in memory stays small.
const ROWS: usize = 64;

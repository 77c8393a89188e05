//! Parity: the same ids through two sessions, and what each shows on its way compared.
//!
//! Both sessions are fed one id at a time; at every position the taps that both have ([`Tap`]) and the logits are compared.
//! What is out of tolerance first, by position and then by place in the computation, is where to look: an error made in a layer
//! shows in that layer's keys, values or output, and before it nothing differs.

mod measure;
mod render;

pub use measure::{Tolerance, bf16_distance};
pub use render::{markdown, text};

use measure::{Comparison, TopComparison, compare, compare_tops};
use npuhal_core::RunError;
use npuhal_core::stage::{Control, HiddenRows, Row, SequenceId, SharedTapSink, Stepper, Tap, TapSink, TokenId, Want};
use npuhal_models::pcg::Pcg64;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A session under comparison.
pub struct Side<'a> {
    /// Name in the report.
    pub name: String,
    /// The session.
    pub stepper: &'a mut dyn Stepper,
}

/// What is compared, and how strictly.
#[derive(Debug, Clone)]
pub struct ParityRequest {
    /// Ids, one a position; both sessions are fed these, whatever they would have chosen.
    pub ids: Vec<TokenId>,
    /// Likeliest tokens whose overlap is counted.
    pub top_k: usize,
    /// What is still parity.
    pub tolerance: Tolerance,
}

/// A tap over all positions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TapReport {
    /// Name: `K(3)`, `LayerOut(3)`, `Logits`.
    pub tap: String,
    /// Layer, where it is of one.
    pub layer: Option<u32>,
    /// Positions compared.
    pub positions: usize,
    /// Smallest cosine of a row with its counterpart.
    pub min_cosine: f64,
    /// Mean of the same.
    pub mean_cosine: f64,
    /// Largest absolute error of an element.
    pub max_abs_error: f64,
    /// Position of the largest absolute error.
    pub max_abs_error_position: u32,
    /// Largest absolute error as a share of the root mean square of its reference row.
    pub max_relative_error: f64,
    /// Largest distance of an element in bf16 steps.
    pub max_bf16_ulp: u32,
    /// Share of elements at most one bf16 step apart.
    pub within_one_bf16_ulp: f64,
    /// Positions out of tolerance.
    pub out_of_tolerance: usize,
}

/// Choice of the next token over all positions.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TopReport {
    /// Positions with the same likeliest token.
    pub argmax_matches: usize,
    /// Positions.
    pub positions: usize,
    /// Positions with another one although the reference was sure.
    pub violations: Vec<TopViolation>,
    /// Likeliest tokens looked at.
    pub top_k: usize,
    /// Fewest of them that both have.
    pub min_overlap: usize,
    /// Mean of the same.
    pub mean_overlap: f64,
}

/// Another likeliest token although the reference was sure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TopViolation {
    /// Position.
    pub position: u32,
    /// The reference's token.
    pub reference: TokenId,
    /// The other's.
    pub found: TokenId,
    /// Difference of the reference's two highest logits.
    pub margin: f64,
}

/// The first thing out of tolerance.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Divergence {
    /// Position.
    pub position: u32,
    /// Tap.
    pub tap: String,
    /// Layer, where it is of one.
    pub layer: Option<u32>,
    /// Cosine of the row with its counterpart.
    pub cosine: f64,
    /// Largest absolute error as a share of the root mean square of the reference row.
    pub relative_error: f64,
    /// Element with the largest error.
    pub element: usize,
}

/// How far two sessions agree.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ParityReport {
    /// The reference.
    pub against: String,
    /// What is compared with it.
    pub device: String,
    /// Ids that both were fed.
    pub ids: Vec<TokenId>,
    /// What was still parity.
    pub tolerance: Tolerance,
    /// By tap, in the order of the computation.
    pub taps: Vec<TapReport>,
    /// Taps that only one of the two has.
    pub not_compared: Vec<String>,
    /// Choice of the next token.
    pub tops: TopReport,
    /// The first thing out of tolerance.
    pub first_divergence: Option<Divergence>,
    /// Why the comparison ended early: a session whose results were no numbers any more.
    pub ended_early: Option<String>,
    /// Whether everything is within tolerance.
    pub passed: bool,
}

/// `count` ids below `vocab_size`, drawn by `seed`: as `numpy.random.default_rng(seed).random()` scaled and cut.
#[must_use]
pub fn seeded_ids(count: usize, vocab_size: usize, seed: u64) -> Vec<TokenId> {
    let mut draws = Pcg64::seeded(seed);
    (0..count).map(|_| (draws.next_f64() * vocab_size as f64) as TokenId).collect()
}

/// Compares `found` with `reference`.
///
/// # Errors
/// Whatever keeps a session from running; [`RunError::BadRows`] where the two have vocabularies of different size, or one shows
/// a tap with another number of elements.
pub fn hold(
    reference: Side<'_>,
    found: Side<'_>,
    request: &ParityRequest,
    control: &Control,
) -> Result<ParityReport, RunError> {
    let vocab = [reference.stepper.vocab_size(), found.stepper.vocab_size()];
    if vocab[0] != vocab[1] {
        return Err(bad(format!("{} has {} logits, {} has {}", reference.name, vocab[0], found.name, vocab[1])));
    }
    let mut taps: BTreeMap<Place, TapSum> = BTreeMap::new();
    let mut tops = TopSum::default();
    let (mut first, mut ended_early) = (None, None);
    let names = (reference.name, found.name);
    let (mut one, mut other) = (Observed::begin(reference.stepper)?, Observed::begin(found.stepper)?);
    let not_compared = differing_taps(&one, &other);
    for (position, &token) in (0u32..).zip(&request.ids) {
        let row = Row { sequence: SequenceId(0), token, position };
        let (wanted, seen) = (one.step(row, control)?, other.step(row, control)?);
        let lost = [(&names.0, &wanted.lost), (&names.1, &seen.lost)];
        ended_early = lost.into_iter().find_map(|(name, lost)| Some(format!("{name}: {}", lost.as_ref()?)));
        let (wanted, seen) = (wanted.taps, seen.taps);
        for (place, reference) in &wanted {
            let Some(values) = seen.get(place) else { continue };
            if values.len() != reference.len() {
                let (name, found) = (place.name(), values.len());
                return Err(bad(format!(
                    "{name} has {} elements on one side and {found} on the other",
                    reference.len()
                )));
            }
            let comparison = compare(reference, values);
            let is_within = request.tolerance.admits(&comparison);
            if !is_within && first.is_none() {
                first = Some(Divergence {
                    position,
                    tap: place.name(),
                    layer: place.layer(),
                    cosine: comparison.cosine,
                    relative_error: comparison.relative_error,
                    element: comparison.worst_element,
                });
            }
            taps.entry(*place).or_default().add(position, &comparison, is_within);
        }
        if let (Some(wanted), Some(seen)) = (wanted.get(&Place::LOGITS), seen.get(&Place::LOGITS)) {
            let comparison = compare_tops(wanted, seen, request.top_k);
            tops.add(position, &comparison, request.tolerance.near_tie);
        }
        if ended_early.is_some() {
            break;
        }
    }
    drop((one, other));
    let taps: Vec<TapReport> = taps.iter().map(|(place, sum)| sum.report(place)).collect();
    let tops = tops.report(request.top_k);
    Ok(ParityReport {
        against: names.0,
        device: names.1,
        ids: request.ids.clone(),
        tolerance: request.tolerance,
        passed: first.is_none() && tops.violations.is_empty() && ended_early.is_none(),
        ended_early,
        taps,
        not_compared,
        tops,
        first_divergence: first,
    })
}

fn bad(reason: String) -> RunError {
    RunError::BadRows { reason }
}

/// A tap in the order of the computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place(u32, u8);

impl Place {
    const LOGITS: Self = Self(u32::MAX, 4);

    fn of(tap: Tap) -> Option<Self> {
        Some(match tap {
            Tap::K(layer) => Self(layer, 0),
            Tap::V(layer) => Self(layer, 1),
            Tap::LayerOut(layer) => Self(layer, 2),
            Tap::Normed => Self(u32::MAX, 3),
            Tap::Logits => Self::LOGITS,
            _ => return None,
        })
    }

    fn layer(self) -> Option<u32> {
        (self.0 != u32::MAX).then_some(self.0)
    }

    fn name(self) -> String {
        match self.1 {
            0 => format!("K({})", self.0),
            1 => format!("V({})", self.0),
            2 => format!("LayerOut({})", self.0),
            3 => "Normed".to_owned(),
            _ => "Logits".to_owned(),
        }
    }
}

/// What was seen of a position.
struct Step {
    taps: BTreeMap<Place, Vec<f32>>,
    /// Why there are no logits.
    lost: Option<String>,
}

/// A session under observation; at the end it is as it was before.
struct Observed<'a> {
    stepper: &'a mut dyn Stepper,
    seen: Arc<Mutex<Seen>>,
    logits: HiddenRows,
}

#[derive(Default)]
struct Seen(BTreeMap<Place, Vec<f32>>);

impl TapSink for Seen {
    fn observe(&mut self, tap: Tap, _: Row, values: &[f32]) {
        if let Some(place) = Place::of(tap) {
            self.0.insert(place, values.to_vec());
        }
    }
}

impl<'a> Observed<'a> {
    fn begin(stepper: &'a mut dyn Stepper) -> Result<Self, RunError> {
        stepper.begin()?;
        stepper.truncate(SequenceId(0), 0);
        let seen = Arc::new(Mutex::new(Seen::default()));
        let sink: SharedTapSink = Arc::clone(&seen) as SharedTapSink;
        stepper.observe(Some(sink));
        Ok(Self { stepper, seen, logits: HiddenRows::new() })
    }

    /// Everything that is seen of `row`. The logits are those the session hands out; of a session that refuses to, since they
    /// are no numbers, the taps still tell where that began.
    fn step(&mut self, row: Row, control: &Control) -> Result<Step, RunError> {
        let result = self.stepper.step(&[row], Want::Last, &mut self.logits, control);
        let mut taps = std::mem::take(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner).0);
        let lost = match result {
            Ok(()) => {
                taps.insert(Place::LOGITS, self.logits.row(0).to_vec());
                None
            }
            Err(error @ RunError::NotFinite { .. }) => {
                taps.insert(Place::LOGITS, vec![f32::NAN; self.stepper.vocab_size()]);
                Some(error.to_string())
            }
            Err(error) => return Err(error),
        };
        Ok(Step { taps, lost })
    }

    fn places(&self) -> Vec<Place> {
        let mut places: Vec<Place> = self.stepper.taps().into_iter().filter_map(Place::of).collect();
        places.push(Place::LOGITS);
        places
    }
}

impl Drop for Observed<'_> {
    fn drop(&mut self) {
        self.stepper.observe(None);
        self.stepper.end();
    }
}

fn differing_taps(one: &Observed<'_>, other: &Observed<'_>) -> Vec<String> {
    let (one, other) = (one.places(), other.places());
    let mut only: Vec<Place> = one.iter().filter(|place| !other.contains(place)).copied().collect();
    only.extend(other.iter().filter(|place| !one.contains(place)));
    only.sort_unstable();
    only.into_iter().map(Place::name).collect()
}

/// Comparisons of a tap, added up.
#[derive(Default)]
struct TapSum {
    positions: usize,
    cosines: f64,
    min_cosine: Option<f64>,
    max_abs_error: f64,
    max_abs_error_position: u32,
    max_relative_error: f64,
    max_bf16_ulp: u32,
    elements: usize,
    close_elements: usize,
    out_of_tolerance: usize,
}

impl TapSum {
    fn add(&mut self, position: u32, comparison: &Comparison, is_within: bool) {
        self.positions += 1;
        self.cosines += comparison.cosine;
        let is_less = |cosine: f64| comparison.cosine < cosine || comparison.cosine.is_nan();
        if self.min_cosine.is_none_or(is_less) {
            self.min_cosine = Some(comparison.cosine);
        }
        if exceeds(comparison.abs_error, self.max_abs_error) {
            (self.max_abs_error, self.max_abs_error_position) = (comparison.abs_error, position);
        }
        if exceeds(comparison.relative_error, self.max_relative_error) {
            self.max_relative_error = comparison.relative_error;
        }
        self.max_bf16_ulp = self.max_bf16_ulp.max(comparison.bf16_ulp);
        self.elements += comparison.elements;
        self.close_elements += comparison.close_elements;
        self.out_of_tolerance += usize::from(!is_within);
    }

    fn report(&self, place: &Place) -> TapReport {
        TapReport {
            tap: place.name(),
            layer: place.layer(),
            positions: self.positions,
            min_cosine: self.min_cosine.unwrap_or(1.0),
            mean_cosine: self.cosines / self.positions.max(1) as f64,
            max_abs_error: self.max_abs_error,
            max_abs_error_position: self.max_abs_error_position,
            max_relative_error: self.max_relative_error,
            max_bf16_ulp: self.max_bf16_ulp,
            within_one_bf16_ulp: self.close_elements as f64 / self.elements.max(1) as f64,
            out_of_tolerance: self.out_of_tolerance,
        }
    }
}

/// Whether `value` is larger than `known`; what is not a number is larger than every number.
fn exceeds(value: f64, known: f64) -> bool {
    value > known || (value.is_nan() && !known.is_nan())
}

/// Choices of the next token, added up.
#[derive(Default)]
struct TopSum {
    matches: usize,
    violations: Vec<TopViolation>,
    overlaps: Vec<usize>,
}

impl TopSum {
    fn add(&mut self, position: u32, comparison: &TopComparison, near_tie: f64) {
        let TopComparison { reference, found, margin, overlap } = *comparison;
        self.overlaps.push(overlap);
        if reference == found {
            self.matches += 1;
        } else if margin >= near_tie {
            self.violations.push(TopViolation { position, reference, found, margin });
        }
    }

    fn report(self, top_k: usize) -> TopReport {
        TopReport {
            argmax_matches: self.matches,
            positions: self.overlaps.len(),
            violations: self.violations,
            top_k,
            min_overlap: self.overlaps.iter().copied().min().unwrap_or(0),
            mean_overlap: self.overlaps.iter().sum::<usize>() as f64 / self.overlaps.len().max(1) as f64,
        }
    }
}

#[cfg(test)]
mod tests;

//! From logits to a token: biases → penalties → temperature → `top_k` → `top_p` → `min_p` → draw.
//!
//! * **Greedy** is the argmax, lowest id on ties, taken where nothing is biased, no penalty differs from neutral and the
//!   temperature is 0 or `top_k` is 1. It allocates nothing and keeps no history.
//! * **Penalties** look at the distinct ids of prompt and output: a positive logit is divided by the repetition penalty, any
//!   other multiplied by it; then frequency × count is subtracted, then presence. Temperature 0 with penalties is the argmax
//!   after penalties.
//! * **`top_k`** keeps the scores that are not below the k-th highest, ties included. **`top_p`** keeps, in falling order,
//!   what has less than `p` before it; the first always stays. **`min_p`** then keeps what has at least `min_p` times the
//!   probability of the best.
//! * **Draw**: one uniform number for each emitted token, from the request's own [`Pcg64`]; the token is the first, by id,
//!   whose cumulative probability exceeds it.

mod params;
mod suggested;

pub use params::{MAX_BIASES, PenaltyRule, SamplingError, SamplingParams, choice_seed};
pub use suggested::SuggestedSampling;

use crate::pcg::Pcg64;
use npuhal_core::RunError;
use npuhal_core::stage::TokenId;
use params::SEED_BITS;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};

/// Chooses the tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    seed: Option<u64>,
    draws: Option<Pcg64>,
    history: History,
    scores: Vec<f32>,
    ranked: Vec<f32>,
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// A sampler with an empty history.
    ///
    /// # Errors
    /// As [`SamplingParams::validate`].
    pub fn new(params: SamplingParams) -> Result<Self, SamplingError> {
        params.validate()?;
        let seed = params.draws().then(|| params.seed.unwrap_or_else(random_seed));
        Ok(Self {
            draws: seed.map(Pcg64::seeded),
            seed,
            history: History::new(params.penalty_window),
            params,
            scores: Vec::new(),
            ranked: Vec::new(),
            candidates: Vec::new(),
        })
    }

    /// The parameters.
    #[must_use]
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// The seed of the draws, given or random; `None` where nothing is drawn.
    #[must_use]
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// Tells of a token of the prompt, or of one that was emitted, in order.
    pub fn accept(&mut self, token: TokenId) {
        if self.params.penalizes() {
            self.history.push(token);
        }
    }

    /// Chooses a token. The caller passes it to [`Sampler::accept`] if it keeps it.
    ///
    /// # Errors
    /// [`RunError::NotFinite`] where a logit is infinite or not a number, [`RunError::BadRows`] where there is none.
    pub fn select(&mut self, logits: &[f32]) -> Result<TokenId, RunError> {
        let best = best_finite(logits)?;
        if self.params.is_greedy() {
            let by_bits = self.params.penalty_rule == PenaltyRule::AboveOne;
            return Ok(first_of(logits, best, by_bits));
        }
        self.scores.clear();
        self.scores.extend_from_slice(logits);
        for (&id, &bias) in &self.params.logit_bias {
            if let Some(score) = self.scores.get_mut(id as usize) {
                *score += bias as f32;
            }
        }
        self.history.penalize(&self.params, &mut self.scores);
        if self.params.temperature == 0.0 {
            return Ok(argmax(&self.scores));
        }
        let u = self.draws.as_mut().map_or(0.0, Pcg64::next_f64);
        if !self.keep_top_k() {
            return Ok(argmax(&self.scores));
        }
        self.keep_top_p();
        self.keep_min_p();
        Ok(self.draw(u))
    }

    /// Fills `candidates`, by ascending id, with what `top_k` leaves and the relative probabilities at the temperature.
    /// False where a score overflows, so that only the best is left.
    fn keep_top_k(&mut self) -> bool {
        let temperature = self.params.temperature as f32;
        let best = self.scores.iter().fold(f32::NEG_INFINITY, |best, &score| best.max(score / temperature));
        if !best.is_finite() {
            return false;
        }
        let threshold = match usize::try_from(self.params.top_k) {
            Ok(k) if k > 0 && k < self.scores.len() => kth_highest(&self.scores, k, &mut self.ranked),
            _ => f32::NEG_INFINITY,
        };
        self.candidates.clear();
        self.candidates.extend(
            self.scores
                .iter()
                .enumerate()
                .filter(|(_, score)| **score >= threshold)
                .map(|(id, score)| Candidate { id: id as TokenId, weight: (score / temperature - best).exp() }),
        );
        true
    }

    /// Keeps what `top_p` leaves. Ranks only as many candidates as are needed.
    fn keep_top_p(&mut self) {
        let top_p = self.params.top_p;
        if top_p >= 1.0 {
            return;
        }
        let total = total_weight(&self.candidates);
        // All candidates below this weight have less than 1 - top_p together, so the kept ones are among the others. The
        // margin covers rounding.
        let least = 0.99 * (1.0 - top_p) * total / self.candidates.len() as f64;
        self.candidates.retain(|candidate| f64::from(candidate.weight) >= least);
        let kept = self.rank_until(top_p * total);
        self.candidates.truncate(kept);
        self.candidates.sort_unstable_by_key(|candidate| candidate.id);
    }

    /// Brings candidates into falling order until those in order weigh `wanted`; returns how many that takes.
    fn rank_until(&mut self, wanted: f64) -> usize {
        let mut before = 0.0;
        let mut ranked = 0;
        let mut step = 128;
        while ranked < self.candidates.len() {
            let rest = &mut self.candidates[ranked..];
            let count = step.min(rest.len());
            if count < rest.len() {
                rest.select_nth_unstable_by_key(count, Candidate::falling);
            }
            rest[..count].sort_unstable_by_key(Candidate::falling);
            for index in ranked..ranked + count {
                if index > 0 && before >= wanted {
                    return index;
                }
                before += f64::from(self.candidates[index].weight);
            }
            ranked += count;
            step *= 4;
        }
        ranked
    }

    fn keep_min_p(&mut self) {
        if self.params.min_p > 0.0 {
            let best = self.candidates.iter().fold(0.0f32, |best, candidate| best.max(candidate.weight));
            let least = self.params.min_p * f64::from(best);
            self.candidates.retain(|candidate| f64::from(candidate.weight) >= least);
        }
    }

    /// The first candidate whose cumulative probability exceeds `u`.
    fn draw(&self, u: f64) -> TokenId {
        let wanted = u * total_weight(&self.candidates);
        let mut cumulative = 0.0;
        let drawn = self.candidates.iter().find(|candidate| {
            cumulative += f64::from(candidate.weight);
            cumulative > wanted
        });
        // Rounding can leave the product at the total itself; then it is the last that has any weight.
        let last = || self.candidates.iter().rfind(|candidate| candidate.weight > 0.0);
        drawn.or_else(last).map_or_else(|| argmax(&self.scores), |candidate| candidate.id)
    }
}

/// A token that filters left, with its probability relative to the best.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: TokenId,
    weight: f32,
}

impl Candidate {
    /// Orders by falling weight, then by rising id: weights are not negative, so their bits order as they do.
    fn falling(&self) -> u64 {
        (u64::from(!self.weight.to_bits()) << 32) | u64::from(self.id)
    }
}

/// How often each id occurred in the window.
#[derive(Debug, Clone)]
struct History {
    window: Option<usize>,
    latest: VecDeque<TokenId>,
    counts: HashMap<TokenId, u32>,
}

impl History {
    fn new(window: Option<u32>) -> Self {
        Self { window: window.map(|window| window as usize), latest: VecDeque::new(), counts: HashMap::new() }
    }

    fn push(&mut self, token: TokenId) {
        *self.counts.entry(token).or_insert(0) += 1;
        let Some(window) = self.window else { return };
        self.latest.push_back(token);
        if self.latest.len() > window
            && let Some(oldest) = self.latest.pop_front()
            && let Some(count) = self.counts.get_mut(&oldest)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&oldest);
            }
        }
    }

    fn penalize(&self, params: &SamplingParams, scores: &mut [f32]) {
        let repetition = params.repetition() as f32;
        let frequency = params.frequency_penalty as f32;
        let presence = params.presence_penalty as f32;
        for (&id, &count) in &self.counts {
            let Some(score) = scores.get_mut(id as usize) else { continue };
            *score = if *score > 0.0 { *score / repetition } else { *score * repetition };
            *score -= frequency * count as f32;
            *score -= presence;
        }
    }
}

/// The lowest id with the highest logit.
///
/// # Errors
/// As [`Sampler::select`].
pub fn greedy(logits: &[f32]) -> Result<TokenId, RunError> {
    Ok(first_of(logits, best_finite(logits)?, false))
}

/// Refuses logits that are infinite or not numbers.
///
/// # Errors
/// [`RunError::NotFinite`], [`RunError::BadRows`] for an empty row.
pub fn check_logits(logits: &[f32]) -> Result<(), RunError> {
    best_finite(logits).map(|_| ())
}

/// The highest logit; one pass in independent lanes, so that the compiler can vectorize it.
fn best_finite(logits: &[f32]) -> Result<f32, RunError> {
    const LANES: usize = 16;
    if logits.is_empty() {
        return Err(RunError::BadRows { reason: "a row of logits is empty".to_owned() });
    }
    let mut best = [f32::NEG_INFINITY; LANES];
    let mut odd = [0u32; LANES];
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for lane in 0..LANES {
            best[lane] = if chunk[lane] > best[lane] { chunk[lane] } else { best[lane] };
            odd[lane] |= u32::from(chunk[lane].to_bits() & EXPONENT == EXPONENT);
        }
    }
    for (lane, &logit) in rest.iter().enumerate() {
        best[lane] = if logit > best[lane] { logit } else { best[lane] };
        odd[lane] |= u32::from(!logit.is_finite());
    }
    if odd.iter().any(|&odd| odd != 0) {
        let id = logits.iter().position(|logit| !logit.is_finite()).unwrap_or(0);
        return Err(RunError::NotFinite { what: format!("the logit of token {id} ({})", logits[id]) });
    }
    Ok(best.into_iter().fold(f32::NEG_INFINITY, f32::max))
}

fn first_of(logits: &[f32], best: f32, by_bits: bool) -> TokenId {
    let exact = by_bits && best == 0.0;
    let positive_zero = || logits.iter().position(|logit| logit.to_bits() == 0);
    let found = if exact { positive_zero() } else { None };
    found.or_else(|| logits.iter().position(|&logit| logit == best)).unwrap_or(0) as TokenId
}

/// The lowest id of the highest score; infinite scores are in order.
fn argmax(scores: &[f32]) -> TokenId {
    let mut best = 0;
    for (id, score) in scores.iter().enumerate() {
        if *score > scores[best] {
            best = id;
        }
    }
    best as TokenId
}

/// The `k`-th highest score; `k` is above 0 and below their number.
fn kth_highest(scores: &[f32], k: usize, scratch: &mut Vec<f32>) -> f32 {
    const FEW: usize = 128;
    scratch.clear();
    if k > FEW {
        scratch.extend_from_slice(scores);
        return *scratch.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1;
    }
    for &score in scores {
        if scratch.len() < k || scratch.last().is_some_and(|&least| score > least) {
            let at = scratch.partition_point(|&held| held >= score);
            scratch.insert(at, score);
            scratch.truncate(k);
        }
    }
    scratch.last().copied().unwrap_or(f32::NEG_INFINITY)
}

fn total_weight(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| f64::from(candidate.weight)).sum()
}

/// A seed where none was given, from the keys that the standard library draws for its hash maps: 53 bits, which readers of JSON
/// keep.
pub fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> (u64::BITS - SEED_BITS)
}

const EXPONENT: u32 = 0x7F80_0000;

#[cfg(test)]
mod tests {
    use super::params::MAX_SEED;
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    fn golden() -> Value {
        serde_json::from_str(include_str!("../tests/data/sampling_vectors.json")).unwrap()
    }

    fn floats(value: &Value) -> Vec<f32> {
        value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
    }

    fn ids(value: &Value) -> Vec<TokenId> {
        // A negative id becomes one far outside any vocabulary.
        value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as TokenId).collect()
    }

    fn params(value: &Value) -> SamplingParams {
        SamplingParams::from_json(value.as_object().unwrap()).unwrap()
    }

    #[test]
    fn golden_penalties() {
        let golden = golden();
        let cases = golden["penalties"].as_array().unwrap();
        assert_eq!(cases.len(), 5);
        for case in cases {
            let params = params(case);
            let mut sampler = Sampler::new(params.clone()).unwrap();
            ids(&case["history"]).into_iter().for_each(|id| sampler.accept(id));
            let mut scores = floats(&golden["logits"]);
            sampler.history.penalize(&params, &mut scores);
            assert_eq!(scores, floats(&case["logits"]), "{case}");
            let best = sampler.select(&floats(&golden["logits"])).unwrap();
            assert_eq!(u64::from(best), case["argmax"].as_u64().unwrap(), "{case}");
        }
    }

    #[test]
    fn golden_filters() {
        let golden = golden();
        let kept = |logits: &[f32], top_k: u64, top_p: f64| {
            let params = SamplingParams { temperature: 1.0, top_k, top_p, seed: Some(1), ..SamplingParams::default() };
            let mut sampler = Sampler::new(params).unwrap();
            sampler.scores = logits.to_vec();
            assert!(sampler.keep_top_k());
            sampler.keep_top_p();
            sampler.candidates.iter().map(|candidate| candidate.id).collect::<Vec<_>>()
        };
        let logits = floats(&golden["logits"]);
        for case in golden["filters"]["top_k"].as_array().unwrap() {
            assert_eq!(kept(&logits, case["k"].as_u64().unwrap(), 1.0), ids(&case["kept"]), "{case}");
        }
        for case in golden["filters"]["top_p"].as_array().unwrap() {
            assert_eq!(kept(&logits, 0, case["p"].as_f64().unwrap()), ids(&case["kept"]), "{case}");
        }
        let ties = &golden["filters"]["top_k_ties"];
        assert_eq!(kept(&floats(&ties["logits"]), ties["k"].as_u64().unwrap(), 1.0), ids(&ties["kept"]));
    }

    #[test]
    fn golden_flags() {
        for case in golden()["greedy_flags"].as_array().unwrap() {
            let params = params(&case["params"]);
            assert_eq!(params.is_greedy(), case["greedy"].as_bool().unwrap(), "{case}");
            assert_eq!(params.is_deterministic(), case["deterministic"].as_bool().unwrap(), "{case}");
        }
    }

    #[test]
    fn golden_ranges() {
        let golden = golden();
        for case in golden["rejected"].as_array().unwrap() {
            let fields = case.as_object().unwrap();
            let error = SamplingParams::from_json(fields).unwrap_err().to_string();
            assert!(fields.keys().all(|field| error.starts_with(field)), "{case}: {error}");
        }
        for case in golden["accepted"].as_array().unwrap() {
            let params = params(case);
            if case.as_object().unwrap().values().all(Value::is_null) {
                assert_eq!(params, SamplingParams::default());
            }
        }
    }

    #[test]
    fn golden_draws() {
        let golden = golden();
        for case in golden["seeded_draws_reference_rng"].as_array().unwrap() {
            let mut sampler = Sampler::new(params(case)).unwrap();
            let wanted = ids(&case["draws"]);
            let drawn: Vec<_> = wanted.iter().map(|_| sampler.select(&floats(&golden["logits"])).unwrap()).collect();
            assert_eq!(drawn, wanted, "{case}");
        }
        for (seed, case) in golden["reference_rng"]["first_doubles"].as_object().unwrap() {
            let mut pcg = Pcg64::seeded(seed.parse().unwrap());
            for wanted in case["doubles"].as_array().unwrap() {
                // The JSON reader may be off by one unit in the last place; the generator's own tests are exact.
                approx::assert_abs_diff_eq!(pcg.next_f64(), wanted.as_f64().unwrap(), epsilon = f64::EPSILON / 2.0);
            }
        }
    }

    #[test]
    fn greedy_takes_the_lowest_id_on_ties() {
        assert_eq!(greedy(&[1.0, 3.0, 3.0, 2.0]).unwrap(), 1);
        assert_eq!(greedy(&[-0.0, 0.0]).unwrap(), 0);
        let mut long = vec![-5.0; 40];
        long[39] = -1.0;
        long[17] = -1.0;
        assert_eq!(greedy(&long).unwrap(), 17);
        assert!(matches!(greedy(&[]), Err(RunError::BadRows { .. })));
    }

    #[test]
    fn logits_that_are_not_finite_are_refused() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 15, 16, 20] {
                let mut logits = vec![0.5; 21];
                logits[at] = odd;
                for params in [
                    SamplingParams::default(),
                    SamplingParams { temperature: 1.0, seed: Some(1), ..SamplingParams::default() },
                ] {
                    let error = Sampler::new(params).unwrap().select(&logits).unwrap_err();
                    assert!(matches!(&error, RunError::NotFinite { what } if what.contains(&format!("token {at} "))));
                }
            }
        }
    }

    #[test]
    fn the_lane_rule_ignores_penalties_up_to_one_and_looks_back_64() {
        let logits = [1.0, 2.0, -1.0];
        let mut off = Sampler::new(SamplingParams::lane(0.5)).unwrap();
        off.accept(0);
        assert_eq!(off.select(&logits).unwrap(), 1);
        let mut on = Sampler::new(SamplingParams::lane(2.0)).unwrap();
        on.accept(1);
        assert_eq!(on.select(&[1.5, 2.0, -1.0]).unwrap(), 0);
        (0..63).for_each(|_| on.accept(2));
        assert_eq!(on.select(&[1.5, 2.0, -1.0]).unwrap(), 0, "the 64th id back still counts");
        on.accept(2);
        assert_eq!(on.select(&[1.5, 2.0, -1.0]).unwrap(), 1, "the 65th does not");
        assert_eq!(Sampler::new(SamplingParams::lane(1.0)).unwrap().select(&[-0.0, 0.0]).unwrap(), 1);
    }

    #[test]
    fn overflowing_scores_leave_the_best() {
        let params = SamplingParams { temperature: 1e-40, seed: Some(1), ..SamplingParams::default() };
        assert_eq!(Sampler::new(params).unwrap().select(&[1.0, 5.0, 4.0]).unwrap(), 1);
        let params = SamplingParams { temperature: 2.0, seed: Some(1), ..SamplingParams::default() };
        assert_eq!(Sampler::new(params).unwrap().select(&[-f32::MAX, f32::MAX]).unwrap(), 1);
    }

    #[test]
    fn an_unseeded_sampler_reports_the_seed_that_repeats_it() {
        let params = SamplingParams { temperature: 1.5, ..SamplingParams::default() };
        let logits: Vec<f32> = (0..50).map(|id| (id as f32 * 0.7).sin()).collect();
        let mut first = Sampler::new(params.clone()).unwrap();
        let seed = first.seed();
        assert!(seed.is_some_and(|seed| seed < 1 << 53), "a reader of JSON keeps it: {seed:?}");
        let mut second = Sampler::new(SamplingParams { seed, ..params.clone() }).unwrap();
        for _ in 0..40 {
            assert_eq!(first.select(&logits).unwrap(), second.select(&logits).unwrap());
        }
        assert_ne!(Sampler::new(params).unwrap().seed(), seed);
        assert_eq!(Sampler::new(SamplingParams::default()).unwrap().seed(), None);
    }

    #[test]
    fn biases_come_before_penalties_and_change_greedy_choices() {
        let biased = |pairs: &[(TokenId, f64)]| SamplingParams {
            logit_bias: pairs.iter().copied().collect(),
            ..SamplingParams::default()
        };
        let logits = [1.0, 3.0, 2.0];
        let select = |params| Sampler::new(params).unwrap().select(&logits).unwrap();
        assert_eq!(select(biased(&[(1, -100.0)])), 2);
        assert_eq!(select(biased(&[(0, 2.5), (9, 100.0)])), 0, "ids without logits are passed over");
        assert!(!biased(&[(0, 1.0)]).is_greedy() && !biased(&[(0, 1.0)]).draws());
        // 1 - 2 is negative, so that the penalty multiplies.
        let mut sampler = Sampler::new(SamplingParams { repetition_penalty: 2.0, ..biased(&[(0, -2.0)]) }).unwrap();
        sampler.accept(0);
        assert_eq!(sampler.select(&[1.0, -1.5]).unwrap(), 1);
        for (json, part) in [
            (r#"{"logit_bias": [1]}"#, "object of token ids"),
            (r#"{"logit_bias": {"x": 1}}"#, "object of token ids"),
            (r#"{"logit_bias": {"1": true}}"#, "object of token ids"),
            (r#"{"logit_bias": {"1": 101}}"#, "between -100"),
            (r#"{"temperature": 1e300}"#, "…"),
        ] {
            let body: serde_json::Map<String, Value> = serde_json::from_str(json).unwrap();
            let error = SamplingParams::from_json(&body).unwrap_err().to_string();
            assert!(error.contains(part) && error.len() < 200, "{json}: {error}");
        }
        let many = SamplingParams { logit_bias: (0..1025).map(|id| (id, 1.0)).collect(), ..SamplingParams::default() };
        assert!(many.validate().unwrap_err().to_string().contains("at most 1024 tokens; found 1025"));
        let body: serde_json::Map<String, Value> = serde_json::from_str(r#"{"logit_bias": {"7": -3.5}}"#).unwrap();
        assert_eq!(SamplingParams::from_json(&body).unwrap().logit_bias, [(7, -3.5)].into());
    }

    #[test]
    fn choices_have_seeds_of_their_own() {
        assert_eq!(choice_seed(42, 0), 42);
        // From another implementation of SplitMix64: its first output from state 0 is E220A8397B1DCDAF.
        assert_eq!(choice_seed(0, 1), 0xE220_A839_7B1D_CDAF >> 11);
        let seeds: std::collections::BTreeSet<_> = (0..8).map(|index| choice_seed(MAX_SEED, index)).collect();
        assert_eq!(seeds.len(), 8);
        assert!(
            seeds.iter().filter(|&&seed| seed < 1 << 53).count() == 7,
            "readers of JSON keep those that were made: {seeds:?}"
        );
        let unseeded = SamplingParams::default().for_choice(3);
        assert_eq!(unseeded.seed, None);
    }

    #[test]
    fn min_p_is_relative_to_the_best() {
        let params = SamplingParams { temperature: 1.0, min_p: 0.5, seed: Some(3), ..SamplingParams::default() };
        let mut sampler = Sampler::new(params).unwrap();
        let logits = [0.0, 1.0, 0.5, -2.0];
        let drawn: std::collections::BTreeSet<_> = (0..200).map(|_| sampler.select(&logits).unwrap()).collect();
        assert_eq!(drawn.into_iter().collect::<Vec<_>>(), [1, 2]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Partial ranking leaves the same ids as sorting everything.
        #[test]
        fn top_p_and_top_k_agree_with_full_sorts(
            logits in prop::collection::vec(-6.0f32..6.0, 1..900),
            top_p in 0.01f64..1.0,
            top_k in prop_oneof![0u64..40, 120u64..400],
        ) {
            // Coarse values make ties.
            let logits: Vec<f32> = logits.iter().map(|logit| (logit * 8.0).round() / 8.0).collect();
            let params = SamplingParams { temperature: 1.0, top_p, top_k, seed: Some(1), ..SamplingParams::default() };
            let mut sampler = Sampler::new(params).unwrap();
            sampler.scores = logits.clone();
            prop_assert!(sampler.keep_top_k());
            sampler.keep_top_p();
            let found: Vec<TokenId> = sampler.candidates.iter().map(|candidate| candidate.id).collect();
            prop_assert_eq!(found, kept_by_sorting(&logits, top_p, top_k as usize));
        }

        #[test]
        fn draws_are_reproducible(seed in 0u64..=MAX_SEED, temperature in 0.1f64..2.0, top_p in 0.1f64..=1.0) {
            let logits: Vec<f32> = (0..300).map(|id| (id as f32 * 1.3).cos() * 3.0).collect();
            let params = SamplingParams { temperature, top_p, seed: Some(seed), ..SamplingParams::default() };
            let run = || {
                let mut sampler = Sampler::new(params.clone()).unwrap();
                (0..12).map(|_| sampler.select(&logits).unwrap()).collect::<Vec<_>>()
            };
            prop_assert_eq!(run(), run());
        }
    }

    fn kept_by_sorting(logits: &[f32], top_p: f64, top_k: usize) -> Vec<TokenId> {
        let mut ids: Vec<usize> = (0..logits.len()).collect();
        ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        if top_k > 0 && top_k < ids.len() {
            let least = logits[ids[top_k - 1]];
            ids.retain(|&id| logits[id] >= least);
        }
        let best = logits[ids[0]];
        let weight = |id: usize| f64::from((logits[id] - best).exp());
        let total: f64 = {
            let mut by_id = ids.clone();
            by_id.sort_unstable();
            by_id.iter().map(|&id| weight(id)).sum()
        };
        let mut before = 0.0;
        let mut kept = Vec::new();
        for &id in &ids {
            if !kept.is_empty() && before >= top_p * total {
                break;
            }
            before += weight(id);
            kept.push(id as TokenId);
        }
        kept.sort_unstable();
        kept
    }
}

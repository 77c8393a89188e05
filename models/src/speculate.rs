//! Guessing ahead without a second model.
//!
//! Where the last tokens occurred before, in the prompt or in the answer, what followed them then is drafted as what follows
//! now, and one forward pass computes the drafted rows along with the known one. Tokens are chosen from those logits exactly
//! as without drafts, one after the other, until one differs from its draft. A row's bits do not depend on the batch it is
//! in, so the output is bit-identical to plain decoding, greedy and drawn.
//!
//! How many tokens are drafted follows from what was measured in the same generation: how often drafts of such a match came
//! true, and what a pass of so many rows costs. Where that promises no gain nothing is drafted; what would have been is still
//! held against what comes, which costs nothing. More rows than were tried are taken to cost little more each, and are tried
//! by doubling: what a row more costs differs from processor to processor and from one number of rows to the next.

use npuhal_core::stage::TokenId;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;
use thiserror::Error;

/// Tokens drafted for one step at most.
pub const MAX_DRAFT: usize = 31;
/// Tokens drafted where nothing else is said.
pub const DEFAULT_DRAFT: usize = 15;

/// How tokens are guessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Speculation {
    /// From earlier occurrences of the last tokens.
    PromptLookup {
        /// Tokens drafted for one step at most, 1 to [`MAX_DRAFT`].
        max_draft: usize,
        /// Whether measurements decide how many are drafted; otherwise as many as there are, for tests of the rest.
        adaptive: bool,
    },
}

impl Default for Speculation {
    fn default() -> Self {
        Self::PromptLookup { max_draft: DEFAULT_DRAFT, adaptive: true }
    }
}

/// A name of a kind of speculation that is none.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "speculation cannot be '{found}'; allowed: prompt-lookup, or prompt-lookup:N with N from 1 to {MAX_DRAFT} tokens"
)]
pub struct SpeculationError {
    /// What was given.
    pub found: String,
}

impl FromStr for Speculation {
    type Err = SpeculationError;

    fn from_str(text: &str) -> Result<Self, SpeculationError> {
        let error = || SpeculationError { found: text.to_owned() };
        let (name, draft) = text.split_once(':').map_or((text, None), |(name, draft)| (name, Some(draft)));
        let max_draft = draft.map_or(Ok(DEFAULT_DRAFT), str::parse).map_err(|_| error())?;
        if name != "prompt-lookup" || !(1..=MAX_DRAFT).contains(&max_draft) {
            return Err(error());
        }
        Ok(Self::PromptLookup { max_draft, adaptive: true })
    }
}

/// What guessing ahead came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpeculationStats {
    /// Forward passes with drafts.
    pub steps: usize,
    /// Tokens drafted.
    pub drafted: usize,
    /// Drafted tokens that came true.
    pub accepted: usize,
}

impl SpeculationStats {
    /// Share of drafted tokens that came true. `None` where nothing was drafted.
    #[must_use]
    pub fn acceptance(&self) -> Option<f64> {
        (self.drafted > 0).then(|| self.accepted as f64 / self.drafted as f64)
    }
}

impl fmt::Display for SpeculationStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { steps, drafted, accepted } = self;
        match self.acceptance() {
            Some(share) => {
                write!(f, "drafted {drafted} in {steps} steps, accepted {accepted} ({:.0} %)", share * 100.0)
            }
            None => f.write_str("nothing drafted"),
        }
    }
}

/// Drafts the tokens of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct Speculator {
    max_draft: usize,
    policy: Option<Policy>,
    stats: SpeculationStats,
    /// Length of the match behind the drafts under way.
    matched: usize,
    /// A token that was not drafted, and its place.
    unspoken: Option<(usize, TokenId)>,
}

impl Speculator {
    pub(crate) fn new(speculation: Speculation) -> Self {
        let Speculation::PromptLookup { max_draft, adaptive } = speculation;
        let max_draft = max_draft.clamp(1, MAX_DRAFT);
        let policy = adaptive.then(Policy::new);
        Self { max_draft, policy, stats: SpeculationStats::default(), matched: 0, unspoken: None }
    }

    /// Fills `drafts` with at most `limit` tokens that may follow `tokens`.
    pub(crate) fn draft(&mut self, tokens: &[TokenId], limit: usize, drafts: &mut Vec<TokenId>) {
        drafts.clear();
        if let (Some(policy), Some((place, token))) = (&mut self.policy, self.unspoken.take())
            && let Some(&found) = tokens.get(place)
        {
            policy.learn(self.matched, usize::from(found == token), usize::from(found != token));
        }
        let limit = limit.min(self.max_draft);
        if limit == 0 {
            return;
        }
        let Some((from, matched)) = earlier_match(tokens) else { return };
        let count = self.policy.as_ref().map_or(limit, |policy| policy.draft_len(matched, limit));
        self.matched = matched;
        if count == 0 {
            self.unspoken = Some((tokens.len(), tokens[from]));
        }
        for index in 0..count {
            // Behind the end the draft continues itself: a period goes on.
            let at = from + index;
            drafts.push(tokens.get(at).copied().unwrap_or_else(|| drafts[at - tokens.len()]));
        }
    }

    /// A pass over one known row and `drafted` ones took `took`; `accepted` of these came true.
    pub(crate) fn observe(&mut self, drafted: usize, accepted: usize, took: Duration) {
        if let Some(policy) = &mut self.policy {
            policy.observe(self.matched, drafted, accepted, took);
        }
        if drafted > 0 {
            self.stats.steps += 1;
            self.stats.drafted += drafted;
            self.stats.accepted += accepted;
        }
    }

    pub(crate) fn stats(&self) -> SpeculationStats {
        self.stats
    }
}

/// Where the longest earlier occurrence of the last tokens ends, the latest on ties, and how long it is.
fn earlier_match(tokens: &[TokenId]) -> Option<(usize, usize)> {
    let (&last, before) = tokens.split_last()?;
    let mut best = None;
    for end in (MIN_MATCH..tokens.len()).rev() {
        if tokens[end - 1] != last {
            continue;
        }
        let pairs = tokens[..end - 1].iter().rev().zip(before.iter().rev());
        let len = 1 + pairs.take(MAX_MATCH - 1).take_while(|(a, b)| a == b).count();
        if len >= MIN_MATCH && best.is_none_or(|(_, longest)| len > longest) {
            best = Some((end, len));
            if len == MAX_MATCH {
                break;
            }
        }
    }
    best
}

/// Decides how many tokens are drafted.
#[derive(Debug, Clone)]
struct Policy {
    step: u32,
    outcomes: [Outcomes; CLASSES],
    /// By rows of a pass, from 1: mean seconds, and the step it was last seen in.
    costs: Vec<Option<(f64, u32)>>,
}

/// How drafts of one class of matches came out, the latest weighing most.
#[derive(Debug, Clone, Copy, Default)]
struct Outcomes {
    came_true: f64,
    failed: f64,
}

impl Outcomes {
    fn probability(self) -> f64 {
        (self.came_true + 1.0) / (self.came_true + self.failed + 2.0)
    }

    fn fade(&mut self, factor: f64) {
        self.came_true *= factor;
        self.failed *= factor;
    }
}

impl Policy {
    fn new() -> Self {
        Self { step: 0, outcomes: [Outcomes::default(); CLASSES], costs: vec![None; MAX_DRAFT + 1] }
    }

    /// The number of drafts with the most expected tokens a second.
    fn draft_len(&self, matched: usize, limit: usize) -> usize {
        // Without the cost of a plain step there is nothing to compare with.
        let Some(plain) = self.known_cost(1) else { return 0 };
        let tried = (1..=self.costs.len()).rev().find(|&rows| self.known_cost(rows).is_some()).unwrap_or(1);
        let probability = self.outcomes[class_of(matched)].probability();
        let mut best = (0, MARGIN / plain);
        let (mut expected, mut reach) = (1.0, 1.0);
        for drafts in 1..=limit.min(2 * tried - 1) {
            reach *= probability;
            expected += reach;
            let rate = expected / self.cost(drafts + 1, plain);
            if rate > best.1 {
                best = (drafts, rate);
            }
        }
        best.0
    }

    fn observe(&mut self, matched: usize, drafted: usize, accepted: usize, took: Duration) {
        self.step += 1;
        self.outcomes.iter_mut().for_each(|outcomes| outcomes.fade(FADE_OF_STEP));
        if drafted > 0 {
            self.learn(matched, accepted, usize::from(accepted < drafted));
        }
        let seconds = took.as_secs_f64();
        let (mean, step) = (self.known_cost(drafted + 1), self.step);
        if let Some(cost) = self.costs.get_mut(drafted) {
            // A disturbance must not weigh more than a doubled time.
            let mean = mean.map_or(seconds, |mean| mean + COST_WEIGHT * (seconds.min(2.0 * mean) - mean));
            *cost = Some((mean, step));
        }
    }

    fn learn(&mut self, matched: usize, came_true: usize, failed: usize) {
        let outcomes = &mut self.outcomes[class_of(matched)];
        outcomes.fade(FADE_OF_OUTCOME);
        outcomes.came_true += came_true as f64;
        outcomes.failed += failed as f64;
    }

    /// The mean of what was seen not too long ago. Plain steps do not age: they are what all is compared with.
    fn known_cost(&self, rows: usize) -> Option<f64> {
        let (seconds, seen) = (*self.costs.get(rows - 1)?)?;
        (rows == 1 || self.step - seen <= MEMORY_STEPS).then_some(seconds)
    }

    /// Seconds of a pass of `rows` rows; between what is known along straight lines, beyond it along one that is not steeper than
    /// [`FIRST_SLOPE`].
    fn cost(&self, rows: usize, plain: f64) -> f64 {
        if let Some(known) = self.known_cost(rows) {
            return known;
        }
        let known = |rows: usize| self.known_cost(rows).map(|seconds| (rows, seconds));
        let (below, at_below) = (1..rows).rev().find_map(known).unwrap_or((1, plain));
        let slope = match (rows + 1..=self.costs.len()).find_map(known) {
            Some((above, at_above)) => (at_above - at_below) / (above - below) as f64,
            None if below > 1 => ((at_below - plain) / (below - 1) as f64).min(FIRST_SLOPE * plain),
            None => FIRST_SLOPE * plain,
        };
        at_below + slope.max(0.0) * (rows - below) as f64
    }
}

/// Matches are told apart by length: longer ones come true more often.
fn class_of(matched: usize) -> usize {
    match matched {
        0..=2 => 0,
        3 => 1,
        4..=5 => 2,
        6..=8 => 3,
        _ => 4,
    }
}

/// Shortest match that is followed.
const MIN_MATCH: usize = 2;
/// A match this long is not told from longer ones.
const MAX_MATCH: usize = 12;
const CLASSES: usize = 5;
/// Cost of a further row at most, as a share of a plain step, until it is known.
const FIRST_SLOPE: f64 = 0.3;
/// A promised gain must be above this.
const MARGIN: f64 = 1.05;
/// What earlier outcomes keep when one is added.
const FADE_OF_OUTCOME: f64 = 0.9;
/// What outcomes keep at each step, so that drafts that failed are tried again some day.
const FADE_OF_STEP: f64 = 0.997;
/// Weight of a new measurement.
const COST_WEIGHT: f64 = 0.2;
/// Steps after which the cost of a number of rows counts as unknown.
const MEMORY_STEPS: u32 = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_read() {
        assert_eq!("prompt-lookup".parse(), Ok(Speculation::default()));
        assert_eq!("prompt-lookup:4".parse(), Ok(Speculation::PromptLookup { max_draft: 4, adaptive: true }));
        for bad in ["", "prompt-lookup:", "prompt-lookup:0", "prompt-lookup:32", "draft-model", "prompt-lookup:-1"] {
            let error = bad.parse::<Speculation>().unwrap_err().to_string();
            assert!(error.contains(&format!("'{bad}'")) && error.contains("1 to 31"), "{error}");
        }
    }

    #[test]
    fn the_longest_and_then_the_latest_match_is_followed() {
        let drafted = |tokens: &[TokenId], limit| {
            let mut drafts = vec![99];
            Speculator::new(Speculation::PromptLookup { max_draft: 8, adaptive: false }).draft(
                tokens,
                limit,
                &mut drafts,
            );
            drafts
        };
        assert_eq!(drafted(&[1, 2, 3, 4, 9, 2, 3], 2), [4, 9]);
        assert_eq!(drafted(&[7, 2, 3, 4, 2, 3, 5, 7, 2, 3], 3), [4, 2, 3], "three tokens match, then two");
        assert_eq!(drafted(&[2, 3, 4, 2, 3, 5, 9, 2, 3], 1), [5], "the later of two");
        assert_eq!(drafted(&[1, 2, 1, 2, 1, 2], 5), [1, 2, 1, 2, 1], "a period goes on");
        assert_eq!(drafted(&[5, 5, 5], 3), [5, 5, 5]);
        for (tokens, limit) in [(&[1, 2, 3][..], 4), (&[1, 2, 1], 4), (&[], 4), (&[1], 4), (&[1, 2, 1, 2], 0)] {
            assert!(drafted(tokens, limit).is_empty(), "{tokens:?}");
        }
    }

    /// Seconds of `steps` steps, relative to as many plain tokens, where a draft comes true with `probability` and a pass
    /// of `rows` rows costs `cost(rows)`.
    fn relative_time(probability: f64, cost: impl Fn(usize) -> f64, tokens: usize) -> f64 {
        let mut policy = Policy::new();
        let (mut seconds, mut done, mut state) = (0.0, 0, 7u64);
        let mut draw = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f64 / f64::from(1u32 << 31)
        };
        while done < tokens {
            let matched = 2 + done % 9;
            let drafted = policy.draft_len(matched, 15);
            let accepted = (0..drafted).take_while(|_| draw() < probability).count();
            let took = cost(drafted + 1);
            if drafted == 0 {
                let came_true = draw() < probability;
                policy.learn(matched, usize::from(came_true), usize::from(!came_true));
            }
            policy.observe(matched, drafted, accepted, Duration::from_secs_f64(took));
            seconds += took;
            done += 1 + accepted;
        }
        seconds / (done as f64 * cost(1))
    }

    #[test]
    fn drafts_that_fail_cost_next_to_nothing_and_those_that_come_true_pay() {
        let line = |slope: f64| move |rows: usize| 0.01 * (1.0 + slope * (rows - 1) as f64);
        for slope in [0.1, 0.2, 0.3, 0.6, 1.0] {
            let lost = relative_time(0.0, line(slope), 600);
            assert!(lost < 1.03, "a slope of {slope}: {lost}");
            let lost = relative_time(0.2, line(slope), 600);
            assert!(lost < 1.03, "a slope of {slope}: {lost}");
        }
        for (slope, bound) in [(0.1, 0.35), (0.2, 0.5), (0.3, 0.6)] {
            let won = relative_time(0.95, line(slope), 600);
            assert!(won < bound, "a slope of {slope}: {won}");
        }
        // A device that takes its rows one by one.
        let lost = relative_time(0.9, line(1.0), 600);
        assert!(lost < 1.03, "{lost}");
        // One that reads its weights once: the second row costs nearly as much as the first, the later ones little.
        let once = |rows: usize| 0.01 * if rows == 1 { 1.0 } else { 1.75 + 0.22 * (rows - 2) as f64 };
        let won = relative_time(0.97, once, 600);
        assert!(won < 0.6, "{won}");
        let lost = relative_time(0.2, once, 600);
        assert!(lost < 1.03, "{lost}");
    }

    /// What was not drafted is held against what came: a text that repeats itself is followed although the first tries did not pay.
    #[test]
    fn tokens_that_were_not_drafted_teach_as_well() {
        let tokens: Vec<TokenId> = (0..64).map(|at| at % 8).collect();
        let mut speculator = Speculator::new(Speculation::default());
        let mut drafts = Vec::new();
        // Without the cost of a plain step nothing is drafted.
        for len in 20..40 {
            speculator.draft(&tokens[..len], 8, &mut drafts);
            assert!(drafts.is_empty());
        }
        let probability = |of: &Speculator| of.policy.as_ref().unwrap().outcomes[class_of(MAX_MATCH)].probability();
        let sure = probability(&speculator);
        assert!(sure > 0.85, "{sure}");
        let mut wrong = tokens[..39].to_vec();
        wrong.push(100);
        speculator.draft(&wrong, 8, &mut drafts);
        assert!(probability(&speculator) < sure);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        /// A match is one, no longer one exists, and drafts are what followed it.
        #[test]
        fn a_match_is_the_longest_there_is(tokens in prop::collection::vec(0u32..4, 0..40), limit in 0usize..8) {
            let suffix = |end: usize| (1..=end).rev().find(|&len| tokens[..end].ends_with(&tokens[tokens.len() - len..]));
            let longest = (1..tokens.len()).filter_map(suffix).max().unwrap_or(0).min(MAX_MATCH);
            let found = earlier_match(&tokens);
            prop_assert_eq!(found.map_or(0, |(_, len)| len), if longest < MIN_MATCH { 0 } else { longest });
            let mut drafts = Vec::new();
            Speculator::new(Speculation::PromptLookup { max_draft: 8, adaptive: false }).draft(&tokens, limit, &mut drafts);
            prop_assert_eq!(drafts.len(), if found.is_some() { limit } else { 0 });
            if let Some((end, _)) = found {
                let all = [&tokens[..], &drafts].concat();
                prop_assert_eq!(&all[tokens.len()..], &all[end..end + drafts.len()]);
            }
        }
    }
}

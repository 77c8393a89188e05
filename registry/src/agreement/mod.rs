//! Whether placements of a model agree with a reference placement, token by token.
//!
//! Each placement gives its likeliest tokens at every position of the same text. Where the likeliest token differs from the
//! reference's, the reference's margin decides: a near-tie is tolerated, a difference where the reference was sure fails the
//! gate. The metric and the synthetic scenarios are those of the public repository `c8dhjp4tyv-bit/hawkpoint-npu-llm`
//! (`tests/placement_agreement.py`, `tests/offline_benchmark_harness.py`); [`live`] asks real placements.

pub mod live;
mod mersenne;
mod render;
mod scenario;

pub use render::{markdown, text};
pub use scenario::{Harness, HarnessError, PLACEMENTS, Rows, Scenario};

use npuhal_core::stage::TokenId;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// A token and how likely a placement takes it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Candidate {
    /// The token.
    pub id: TokenId,
    /// Natural logarithm of its probability.
    pub logprob: f64,
}

/// A position at which a placement would have gone on with another token.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Mismatch {
    /// The position.
    pub position: usize,
    /// The reference's token.
    pub reference_top1: TokenId,
    /// The placement's token.
    pub placement_top1: TokenId,
    /// By how much the reference prefers its first token to its second, in natural logarithms, to four decimals.
    pub reference_margin: f64,
}

/// How far a placement agrees with the reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlacementAgreement {
    /// Positions with the same first token.
    pub top1_matches: usize,
    /// Positions.
    pub top1_total: usize,
    /// Differences at near-ties.
    pub tolerated_mismatches: Vec<Mismatch>,
    /// Differences where the reference was sure.
    pub high_margin_violations: Vec<Mismatch>,
    /// Fewest tokens that both have among their candidates.
    pub min_topk_overlap: usize,
    /// Mean of the same.
    pub mean_topk_overlap: f64,
}

/// Agreement of all placements with the first one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AgreementReport {
    /// Name of the reference.
    pub reference: String,
    /// From which margin of the reference on a difference fails.
    pub margin_threshold: f64,
    /// Positions.
    pub positions: usize,
    /// By placement, in the order they were given.
    #[serde(serialize_with = "as_map")]
    pub placements: Vec<(String, PlacementAgreement)>,
    /// What was looked at.
    pub scenario: String,
    /// What failed, each as `PLACEMENT_top1_divergence` or another word of the run.
    pub gate_failures: Vec<String>,
    /// Whether nothing failed.
    pub passed: bool,
}

fn as_map<S: serde::Serializer>(placements: &[(String, PlacementAgreement)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(placements.iter().map(|(name, agreement)| (name, agreement)))
}

impl AgreementReport {
    /// Compares the candidates of every placement with those of the first, position by position. Candidates are best first;
    /// positions that one of the two has not are left out.
    #[must_use]
    pub fn new(scenario: &str, placements: &[(String, Rows)], margin_threshold: f64) -> Self {
        let nothing = (String::new(), Rows::new());
        let (reference, wanted) = placements.first().unwrap_or(&nothing);
        let compared: Vec<(String, PlacementAgreement)> =
            placements.iter().map(|(name, found)| (name.clone(), compare(wanted, found, margin_threshold))).collect();
        let failed = compared.iter().filter(|(_, agreement)| !agreement.high_margin_violations.is_empty());
        let gate_failures: Vec<String> = failed.map(|(name, _)| format!("{name}_top1_divergence")).collect();
        Self {
            reference: reference.clone(),
            margin_threshold,
            positions: wanted.len(),
            placements: compared,
            scenario: scenario.to_owned(),
            passed: gate_failures.is_empty(),
            gate_failures,
        }
    }

    /// Adds what else went wrong in getting the candidates.
    pub fn fail(&mut self, failure: impl Into<String>) {
        self.gate_failures.push(failure.into());
        self.passed = false;
    }

    /// The report of each placement, by name.
    #[must_use]
    pub fn by_name(&self) -> BTreeMap<&str, &PlacementAgreement> {
        self.placements.iter().map(|(name, agreement)| (name.as_str(), agreement)).collect()
    }
}

fn compare(wanted: &[Vec<Candidate>], found: &[Vec<Candidate>], margin_threshold: f64) -> PlacementAgreement {
    let mut agreement = PlacementAgreement {
        top1_matches: 0,
        top1_total: 0,
        tolerated_mismatches: Vec::new(),
        high_margin_violations: Vec::new(),
        min_topk_overlap: 0,
        mean_topk_overlap: 0.0,
    };
    let mut overlaps = Vec::new();
    for (position, (wanted, found)) in wanted.iter().zip(found).enumerate() {
        let (Some(reference), Some(placement)) = (wanted.first(), found.first()) else { continue };
        agreement.top1_total += 1;
        let ids: BTreeSet<TokenId> = wanted.iter().map(|candidate| candidate.id).collect();
        overlaps.push(found.iter().filter(|candidate| ids.contains(&candidate.id)).count());
        if reference.id == placement.id {
            agreement.top1_matches += 1;
            continue;
        }
        let margin = wanted.get(1).map_or(f64::INFINITY, |second| reference.logprob - second.logprob);
        let mismatch = Mismatch {
            position,
            reference_top1: reference.id,
            placement_top1: placement.id,
            reference_margin: four_decimals(margin),
        };
        if margin >= margin_threshold {
            agreement.high_margin_violations.push(mismatch);
        } else {
            agreement.tolerated_mismatches.push(mismatch);
        }
    }
    agreement.min_topk_overlap = overlaps.iter().copied().min().unwrap_or(0);
    agreement.mean_topk_overlap = overlaps.iter().sum::<usize>() as f64 / overlaps.len().max(1) as f64;
    agreement
}

/// The nearest number with four decimals, by the exact value, as Python's `round`.
fn four_decimals(value: f64) -> f64 {
    format!("{value:.4}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn golden() -> Value {
        serde_json::from_str(include_str!("../../tests/data/agreement_harness_seed42.json")).unwrap()
    }

    #[test]
    fn the_harness_gives_the_published_rows_and_reports() {
        let golden = golden();
        let harness = Harness::default();
        let defaults = json!({
            "positions": harness.positions, "top_k": harness.top_k, "margin_threshold": harness.margin_threshold,
            "seed": harness.seed,
        });
        assert_eq!(golden["defaults"], defaults);
        for scenario in Scenario::ALL {
            let wanted = &golden["scenarios"][scenario.name()];
            let rows = harness.rows(scenario).unwrap();
            if wanted["rows"].is_object() {
                let rows: serde_json::Map<String, Value> =
                    rows.iter().map(|(name, rows)| (name.clone(), json!(rows))).collect();
                assert_eq!(wanted["rows"], Value::Object(rows), "{}", scenario.name());
            } else {
                let cpu = &golden["scenarios"]["pass"]["rows"]["cpu_only"];
                assert!(rows.iter().all(|(_, rows)| json!(rows) == *cpu), "the CPU's rows in all placements");
            }
            let report = harness.report(scenario).unwrap();
            assert_eq!(wanted["report"], json!(report), "{}", scenario.name());
            assert_eq!(scenario.is_as_expected(&report), Ok(()));
        }
    }

    #[test]
    fn parameters_that_mean_nothing_are_refused() {
        let refused = |change: fn(&mut Harness)| {
            let mut harness = Harness::default();
            change(&mut harness);
            harness.rows(Scenario::Pass).unwrap_err().to_string()
        };
        assert_eq!(refused(|harness| harness.positions = 0), "positions is 0; wanted 1 to 1000000");
        assert_eq!(refused(|harness| harness.top_k = 1), "top-k is 1; wanted 2 to 1000");
        for threshold in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let harness = Harness { margin_threshold: threshold, ..Harness::default() };
            assert!(matches!(harness.rows(Scenario::Exact), Err(HarnessError::Threshold { .. })), "{threshold}");
        }
    }

    #[test]
    fn a_report_that_is_not_as_the_scenario_has_it_is_said() {
        let mut report = Harness::default().report(Scenario::FailConfident).unwrap();
        assert!(Scenario::Pass.is_as_expected(&report).unwrap_err().contains("xdna_only_top1_divergence"));
        report = Harness::default().report(Scenario::Exact).unwrap();
        assert!(Scenario::FailConfident.is_as_expected(&report).unwrap_err().contains("was to fail"));
    }

    #[test]
    fn a_difference_is_judged_by_the_references_margin() {
        let row = |ids: [TokenId; 2], second: f64| {
            vec![Candidate { id: ids[0], logprob: -0.25 }, Candidate { id: ids[1], logprob: second }]
        };
        let reference = ("a".to_owned(), vec![row([1, 2], -1.25), row([1, 2], -1.2), row([1, 2], -9.0)]);
        let other = ("b".to_owned(), vec![row([2, 1], -0.5), row([2, 3], -0.5), row([1, 4], -0.5)]);
        let report = AgreementReport::new("live", &[reference, other], 1.0);
        let found = report.by_name()["b"];
        assert_eq!((found.top1_matches, found.top1_total), (1, 3));
        assert_eq!(found.high_margin_violations.len(), 1, "a margin of exactly the threshold is a violation");
        assert_eq!(found.tolerated_mismatches[0].reference_margin, 0.95);
        assert_eq!((found.min_topk_overlap, found.mean_topk_overlap), (1, 4.0 / 3.0));
        assert_eq!(report.gate_failures, ["b_top1_divergence"]);
        assert!(!report.passed);
        assert!(AgreementReport::new("live", &[], 1.0).passed, "nothing to disagree about");
    }

    #[test]
    fn tables_have_the_stated_columns() {
        let reports: Vec<AgreementReport> =
            Scenario::ALL.iter().map(|&scenario| Harness::default().report(scenario).unwrap()).collect();
        let table = markdown(&reports);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines[0],
            "| Scenario | Placement | Top-1 Agreement | Tolerated Near-Ties | High-Margin Violations | Mean Top-k Overlap | \
             Gate Status |"
        );
        assert_eq!(lines[3], "| pass | gpu_only | 8/16 (50.0%) | 8 | 0 | 5.00 | PASS |");
        assert_eq!(lines[7], "| fail_confident | xdna_only | 7/16 (43.8%) | 8 | 1 | 5.00 | FAIL |");
        assert_eq!(lines.len(), 2 + 9);
        let text = text(&reports);
        assert!(text.contains("xdna_only_top1_divergence"), "{text}");
        assert!(text.contains("position 0: the reference takes 100, the placement 101, margin 2.4591"), "{text}");
    }
}

//! Reports for people.

use super::{AgreementReport, Mismatch, PlacementAgreement};
use std::fmt::Write;

/// A Markdown table of everything that was compared with a reference.
#[must_use]
pub fn markdown(reports: &[AgreementReport]) -> String {
    let mut table = String::from(
        "| Scenario | Placement | Top-1 Agreement | Tolerated Near-Ties | High-Margin Violations | Mean Top-k Overlap | \
         Gate Status |\n|---|---|---|---|---|---|---|\n",
    );
    for report in reports {
        for (name, agreement) in &report.placements {
            let status = if has_failed(report, name) { "FAIL" } else { "PASS" };
            let _ = writeln!(
                table,
                "| {} | {name} | {} | {} | {} | {:.2} | {status} |",
                report.scenario,
                share(agreement),
                agreement.tolerated_mismatches.len(),
                agreement.high_margin_violations.len(),
                agreement.mean_topk_overlap,
            );
        }
    }
    table
}

/// Everything in lines.
#[must_use]
pub fn text(reports: &[AgreementReport]) -> String {
    let mut text = String::new();
    for report in reports {
        let _ = writeln!(
            text,
            "{}: {} ({} positions, reference {}, margin {})",
            report.scenario,
            if report.passed { "PASS" } else { "FAIL" },
            report.positions,
            report.reference,
            report.margin_threshold
        );
        for (name, agreement) in &report.placements {
            let _ = writeln!(
                text,
                "  {name}: top-1 {}, {} tolerated near-ties, {} high-margin violations, top-k overlap {:.2} (least {})",
                share(agreement),
                agreement.tolerated_mismatches.len(),
                agreement.high_margin_violations.len(),
                agreement.mean_topk_overlap,
                agreement.min_topk_overlap
            );
            agreement.high_margin_violations.iter().for_each(|mismatch| text.push_str(&line(mismatch)));
        }
        if !report.gate_failures.is_empty() {
            let _ = writeln!(text, "  failed: {}", report.gate_failures.join(", "));
        }
    }
    text
}

fn line(mismatch: &Mismatch) -> String {
    format!(
        "    position {}: the reference takes {}, the placement {}, margin {}\n",
        mismatch.position, mismatch.reference_top1, mismatch.placement_top1, mismatch.reference_margin
    )
}

fn share(agreement: &PlacementAgreement) -> String {
    let (matches, total) = (agreement.top1_matches, agreement.top1_total);
    format!("{matches}/{total} ({:.1}%)", 100.0 * matches as f64 / total.max(1) as f64)
}

/// Whether a failure of the gate is of this placement.
fn has_failed(report: &AgreementReport, name: &str) -> bool {
    report.gate_failures.iter().any(|failure| failure.strip_prefix(name).is_some_and(|rest| rest.starts_with('_')))
}

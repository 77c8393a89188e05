//! Reports for people.

use super::{ParityReport, TapReport};
use std::fmt::Write;

const COLUMNS: [&str; 7] = ["tap", "min cosine", "mean cosine", "max |error|", "of rms", "bf16 ulp", "≤ 1 ulp"];

fn cells(tap: &TapReport) -> [String; 7] {
    [
        tap.tap.clone(),
        format!("{:.6}", tap.min_cosine),
        format!("{:.6}", tap.mean_cosine),
        format!("{:.3e}", tap.max_abs_error),
        format!("{:.4}", tap.max_relative_error),
        if tap.max_bf16_ulp == u32::MAX { "NaN".to_owned() } else { tap.max_bf16_ulp.to_string() },
        format!("{:.1}%", 100.0 * tap.within_one_bf16_ulp),
    ]
}

/// The report as a table and a verdict, for a terminal.
#[must_use]
pub fn text(report: &ParityReport) -> String {
    let rows: Vec<[String; 7]> = report.taps.iter().map(cells).collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([COLUMNS[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..COLUMNS.len()).map(width).collect();
    let mut text = format!("{} against {}, {} positions\n", report.device, report.against, report.tops.positions);
    let mut line = |cells: Vec<&str>, mark: &str| {
        let _ = write!(text, "{:<width$}", cells[0], width = widths[0]);
        for (cell, width) in cells.iter().zip(&widths).skip(1) {
            let _ = write!(text, "  {cell:>width$}");
        }
        let _ = writeln!(text, "{mark}");
    };
    line(COLUMNS.to_vec(), "");
    for (row, tap) in rows.iter().zip(&report.taps) {
        line(
            row.iter().map(String::as_str).collect(),
            if tap.out_of_tolerance == 0 { "" } else { "  out of tolerance" },
        );
    }
    verdict(report).into_iter().for_each(|line| {
        text.push_str(&line);
        text.push('\n');
    });
    text
}

/// The report as Markdown.
#[must_use]
pub fn markdown(report: &ParityReport) -> String {
    let mut text = format!("### {} against {}\n\n| {} | |\n", report.device, report.against, COLUMNS.join(" | "));
    text.push_str(&"|---".repeat(COLUMNS.len() + 1));
    text.push_str("|\n");
    for tap in &report.taps {
        let mark = if tap.out_of_tolerance == 0 { "" } else { "out of tolerance" };
        let _ = writeln!(text, "| {} | {mark} |", cells(tap).join(" | "));
    }
    text.push('\n');
    verdict(report).iter().for_each(|line| {
        let _ = writeln!(text, "* {line}");
    });
    text
}

fn verdict(report: &ParityReport) -> Vec<String> {
    let (tops, tolerance) = (&report.tops, &report.tolerance);
    let mut lines = vec![format!(
        "likeliest token: {}/{} the same; of the top {} {:.2} are common (least {})",
        tops.argmax_matches, tops.positions, tops.top_k, tops.mean_overlap, tops.min_overlap
    )];
    lines.extend(tops.violations.iter().map(|violation| {
        let super::TopViolation { position, reference, found, margin } = violation;
        format!("position {position}: the reference takes {reference}, sure by {margin:.3} logits; found {found}")
    }));
    if !report.not_compared.is_empty() {
        lines.push(format!("seen on one side only: {}", report.not_compared.join(", ")));
    }
    lines.extend(report.ended_early.iter().map(|reason| format!("ended early: {reason}")));
    lines.push(match &report.first_divergence {
        None => "first divergence: none".to_owned(),
        Some(first) => format!(
            "first divergence: position {}, {} (cosine {:.6}, error {:.4} of rms at element {})",
            first.position, first.tap, first.cosine, first.relative_error, first.element
        ),
    });
    lines.push(format!(
        "{}: tolerance cosine {}, error {} of rms, near ties below {} logits",
        if report.passed { "PASS" } else { "FAIL" },
        tolerance.cosine,
        tolerance.relative_error,
        tolerance.near_tie
    ));
    lines
}

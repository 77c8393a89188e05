//! What a run of requests amounts to, and how it is shown.

use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// What is asked.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Configuration {
    pub(super) url: String,
    pub(super) model: String,
    pub(super) endpoint: String,
    pub(super) requests: u32,
    pub(super) concurrency: u32,
    pub(super) max_tokens: u32,
    pub(super) prompt: String,
    pub(super) stream: bool,
}

/// What came of one request.
#[derive(Debug, Clone, Default)]
pub(super) struct Outcome {
    pub(super) index: usize,
    pub(super) status: Option<u16>,
    pub(super) latency: Duration,
    pub(super) first_token: Option<Duration>,
    /// Tokens of the answer, as the server counts them.
    pub(super) tokens: Option<u64>,
    pub(super) finish_reason: Option<String>,
    /// Why it failed.
    pub(super) error: Option<String>,
}

impl Outcome {
    /// Tokens a second of this request, from its beginning to its end.
    fn tokens_per_second(&self) -> Option<f64> {
        let tokens = self.tokens.filter(|_| self.error.is_none())?;
        (!self.latency.is_zero()).then(|| tokens as f64 / self.latency.as_secs_f64())
    }

    fn json(&self) -> Value {
        json!({
            "index": self.index,
            "success": self.error.is_none(),
            "status": self.status,
            "latency_seconds": self.latency.as_secs_f64(),
            "ttft_seconds": self.first_token.map(|time| time.as_secs_f64()),
            "generated_tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second(),
            "finish_reason": self.finish_reason,
            "error": self.error,
        })
    }
}

/// A whole run.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) configuration: Configuration,
    pub(super) outcomes: Vec<Outcome>,
    pub(super) wall: Duration,
    /// What grew of what the server counts; `None` where it does not tell.
    pub(super) metrics: Option<BTreeMap<String, f64>>,
}

impl Run {
    fn succeeded(&self) -> impl Iterator<Item = &Outcome> {
        self.outcomes.iter().filter(|outcome| outcome.error.is_none())
    }

    fn generated_tokens(&self) -> u64 {
        self.succeeded().filter_map(|outcome| outcome.tokens).sum()
    }

    /// Tokens of all answers together a second.
    pub(super) fn tokens_per_second(&self) -> f64 {
        self.generated_tokens() as f64 / self.wall.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// The report as data.
    pub(super) fn report(&self) -> Value {
        let (total, successful) = (self.outcomes.len(), self.succeeded().count());
        let seconds = |time: Duration| time.as_secs_f64();
        json!({
            "configuration": self.configuration,
            "summary": {
                "total": total,
                "successful": successful,
                "failed": total - successful,
                "success_rate_percent": 100.0 * successful as f64 / total.max(1) as f64,
                "wall_time_seconds": self.wall.as_secs_f64(),
                "total_generated_tokens": self.generated_tokens(),
                "unknown_token_count_requests": self.succeeded().filter(|outcome| outcome.tokens.is_none()).count(),
                "aggregate_tokens_per_second": self.tokens_per_second(),
            },
            "latency_seconds": distribution(self.succeeded().map(|outcome| seconds(outcome.latency))),
            "ttft_seconds": distribution(self.succeeded().filter_map(|outcome| outcome.first_token.map(seconds))),
            "tokens_per_second": distribution(self.succeeded().filter_map(Outcome::tokens_per_second)),
            "metrics_diff": self.metrics,
            "individual_results": self.outcomes.iter().map(Outcome::json).collect::<Vec<_>>(),
        })
    }
}

/// Least, greatest, mean and percentiles; `null` of nothing.
fn distribution(values: impl Iterator<Item = f64>) -> Value {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let (Some(min), Some(max)) = (values.first(), values.last()) else { return Value::Null };
    json!({
        "min": min,
        "p50": percentile(&values, 50.0),
        "p95": percentile(&values, 95.0),
        "p99": percentile(&values, 99.0),
        "max": max,
        "mean": values.iter().sum::<f64>() / values.len() as f64,
    })
}

/// The percentile `p` of values in rising order, interpolated between the nearest two.
fn percentile(sorted: &[f64], p: f64) -> f64 {
    let place = p / 100.0 * sorted.len().saturating_sub(1) as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    match (sorted.get(below), sorted.get(above)) {
        (Some(low), Some(high)) => low + (high - low) * place.fract(),
        _ => f64::NAN,
    }
}

const COLUMNS: [&str; 6] = ["min", "p50", "p95", "p99", "max", "mean"];
/// Name, field, factor and decimals of the rows of figures.
const ROWS: [(&str, &str, f64, usize); 3] = [
    ("latency, ms", "latency_seconds", 1e3, 1),
    ("first token, ms", "ttft_seconds", 1e3, 1),
    ("tokens/s of a request", "tokens_per_second", 1.0, 2),
];

fn rows(report: &Value) -> Vec<Vec<String>> {
    let head = std::iter::once(String::new()).chain(COLUMNS.map(str::to_owned)).collect();
    let row = |(name, field, factor, decimals): (&str, &str, f64, usize)| {
        let cell = |column: &str| match report[field][column].as_f64() {
            Some(value) => format!("{:.decimals$}", value * factor),
            None => "-".to_owned(),
        };
        std::iter::once(name.to_owned()).chain(COLUMNS.map(cell)).collect()
    };
    std::iter::once(head).chain(ROWS.map(row)).collect()
}

fn sentences(report: &Value) -> Vec<String> {
    let summary = &report["summary"];
    let number = |field: &str| summary[field].as_f64().unwrap_or(0.0);
    let mut sentences = vec![format!(
        "{} of {} requests succeeded ({:.1} %) in {:.2} s; {} tokens, {:.2} tok/s together",
        summary["successful"],
        summary["total"],
        number("success_rate_percent"),
        number("wall_time_seconds"),
        summary["total_generated_tokens"],
        number("aggregate_tokens_per_second"),
    )];
    let unknown = &summary["unknown_token_count_requests"];
    if unknown.as_u64() != Some(0) {
        sentences.push(format!("the server did not count the tokens of {unknown} answers; they count as 0"));
    }
    let failures =
        report["individual_results"].as_array().into_iter().flatten().filter_map(|one| one["error"].as_str());
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    failures.for_each(|failure| *counts.entry(failure).or_default() += 1);
    sentences.extend(counts.into_iter().map(|(failure, count)| format!("failed, {count} times: {failure}")));
    sentences
}

fn heading(report: &Value) -> String {
    let configuration = &report["configuration"];
    let word = |field: &str| configuration[field].as_str().unwrap_or_default();
    format!(
        "{} at {}{}: {} requests, {} at a time, {} tokens at most{}",
        word("model"),
        word("url"),
        word("endpoint"),
        configuration["requests"],
        configuration["concurrency"],
        configuration["max_tokens"],
        if configuration["stream"] == true { ", streamed" } else { "" },
    )
}

/// A report for people: plain lines.
pub(super) fn text(report: &Value) -> String {
    let mut text = format!("{}\n", heading(report));
    let rows = rows(report);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    for row in &rows {
        let mut line = format!("{:1$}", row[0], width(0));
        for (column, cell) in row.iter().enumerate().skip(1) {
            line.push_str(&format!("  {cell:>0$}", width(column)));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    sentences(report).iter().for_each(|sentence| text.push_str(&format!("{sentence}\n")));
    text
}

/// The same as Markdown.
pub(super) fn markdown(report: &Value) -> String {
    let mut text = format!("## HTTP benchmark\n\n{}.\n\n", heading(report));
    for (index, row) in rows(report).iter().enumerate() {
        text.push_str(&format!("| {} |\n", row.join(" | ")));
        if index == 0 {
            text.push_str(&format!("|{}\n", " --- |".repeat(row.len())));
        }
    }
    text.push('\n');
    sentences(report).iter().for_each(|sentence| text.push_str(&format!("- {sentence}\n")));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_interpolated() {
        let values: Vec<f64> = (1..=5).map(f64::from).collect();
        assert_eq!(percentile(&values, 50.0), 3.0);
        assert!((percentile(&values, 95.0) - 4.8).abs() < 1e-12);
        assert!((percentile(&values, 99.0) - 4.96).abs() < 1e-12);
        assert_eq!(percentile(&[7.0], 99.0), 7.0);
        assert_eq!(distribution(std::iter::empty()), Value::Null);
    }

    #[test]
    fn a_report_counts_what_failed_and_what_was_not_counted() {
        let outcome = |index, tokens, error: Option<&str>| Outcome {
            index,
            status: Some(if error.is_some() { 429 } else { 200 }),
            latency: Duration::from_millis(500),
            first_token: Some(Duration::from_millis(100)),
            tokens,
            finish_reason: None,
            error: error.map(str::to_owned),
        };
        let configuration = Configuration {
            url: "http://127.0.0.1:8000".to_owned(),
            model: "m".to_owned(),
            endpoint: "/v1/completions".to_owned(),
            requests: 3,
            concurrency: 2,
            max_tokens: 32,
            prompt: "p".to_owned(),
            stream: true,
        };
        let outcomes = vec![outcome(0, Some(10), None), outcome(1, None, None), outcome(2, Some(7), Some("busy"))];
        let report = Run { configuration, outcomes, wall: Duration::from_secs(2), metrics: None }.report();
        let summary = &report["summary"];
        assert_eq!((&summary["successful"], &summary["failed"]), (&json!(2), &json!(1)));
        assert_eq!(summary["unknown_token_count_requests"], 1);
        assert_eq!(
            (&summary["total_generated_tokens"], &summary["aggregate_tokens_per_second"]),
            (&json!(10), &json!(5.0))
        );
        assert_eq!(report["tokens_per_second"]["p50"], 20.0);
        assert_eq!(report["metrics_diff"], Value::Null);
        let text = text(&report);
        assert!(
            text.contains("2 of 3 requests succeeded (66.7 %) in 2.00 s; 10 tokens, 5.00 tok/s together"),
            "{text}"
        );
        assert!(text.contains("failed, 1 times: busy") && text.contains("tokens of 1 answers"), "{text}");
        assert!(markdown(&report).contains("| first token, ms | 100.0 |"), "{}", markdown(&report));
    }
}

//! What an evaluation amounts to, and how it is shown.

use super::dataset::Item;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// What came of one item.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Answer {
    pub(super) text: String,
    /// Log probabilities of the generated tokens, as far as they are valid; `None` where none were given.
    pub(super) logprobs: Option<Vec<f64>>,
    pub(super) generated_tokens: usize,
    pub(super) seconds: f64,
}

/// An item with its answer, scored.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Outcome {
    pub(super) item: Item,
    pub(super) answer: Answer,
    pub(super) is_match: bool,
}

impl Outcome {
    pub(super) fn new(item: Item, answer: Answer) -> Self {
        let is_match = answer.text.to_lowercase().contains(&item.expected.to_lowercase());
        Self { item, answer, is_match }
    }
}

/// Sums over items.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Totals {
    pub(super) items: usize,
    pub(super) matches: usize,
    pub(super) scored_tokens: usize,
    loss_sum: f64,
    pub(super) generated_tokens: usize,
    pub(super) seconds: f64,
}

impl Totals {
    pub(super) fn of<'o>(outcomes: impl IntoIterator<Item = &'o Outcome>) -> Self {
        let mut totals = Self::default();
        for outcome in outcomes {
            let logprobs = outcome.answer.logprobs.as_deref().unwrap_or_default();
            totals.items += 1;
            totals.matches += usize::from(outcome.is_match);
            totals.scored_tokens += logprobs.len();
            totals.loss_sum -= logprobs.iter().sum::<f64>();
            totals.generated_tokens += outcome.answer.generated_tokens;
            totals.seconds += outcome.answer.seconds;
        }
        totals
    }

    pub(super) fn accuracy(&self) -> f64 {
        self.matches as f64 / self.items.max(1) as f64
    }

    /// Mean loss of a scored token; `None` where none was scored.
    pub(super) fn loss(&self) -> Option<f64> {
        (self.scored_tokens > 0).then(|| self.loss_sum / self.scored_tokens as f64)
    }

    pub(super) fn perplexity(&self) -> Option<f64> {
        self.loss().map(|loss| loss.clamp(0.0, MAX_LOSS).exp())
    }

    pub(super) fn seconds_per_token(&self) -> Option<f64> {
        (self.generated_tokens > 0).then(|| self.seconds / self.generated_tokens as f64)
    }

    pub(super) fn tokens_per_second(&self) -> f64 {
        if self.seconds > 0.0 { self.generated_tokens as f64 / self.seconds } else { 0.0 }
    }

    fn json(&self) -> Value {
        json!({
            "items": self.items,
            "matches": self.matches,
            "accuracy": self.accuracy(),
            "scored_tokens": self.scored_tokens,
            "loss": self.loss(),
            "perplexity": self.perplexity(),
            "generated_tokens": self.generated_tokens,
            "seconds": self.seconds,
            "seconds_per_token": self.seconds_per_token(),
            "tokens_per_second": self.tokens_per_second(),
        })
    }
}

/// What must be reached.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Limits {
    pub(super) max_perplexity: Option<f64>,
    pub(super) min_accuracy: Option<f64>,
    pub(super) min_tps: Option<f64>,
}

impl Limits {
    /// What was not reached, as sentences.
    pub(super) fn broken(&self, totals: &Totals) -> Vec<String> {
        let mut broken = Vec::new();
        if let Some(limit) = self.max_perplexity {
            match totals.perplexity() {
                Some(found) if found <= limit => {}
                Some(found) => broken.push(format!("the perplexity is {found:.4}; wanted at most {limit}")),
                None => broken.push(format!("there are no log probabilities; wanted a perplexity of at most {limit}")),
            }
        }
        if let Some(limit) = self.min_accuracy
            && totals.accuracy() < limit
        {
            broken.push(format!("the accuracy is {:.4}; wanted at least {limit}", totals.accuracy()));
        }
        if let Some(limit) = self.min_tps
            && totals.tokens_per_second() < limit
        {
            broken.push(format!("the rate is {:.2} tok/s; wanted at least {limit}", totals.tokens_per_second()));
        }
        broken
    }
}

/// The report of an evaluation of `model` at `source`.
pub(super) fn report(source: &str, model: &str, outcomes: &[Outcome], limits: Limits) -> Value {
    let totals = Totals::of(outcomes);
    let mut categories: BTreeMap<&str, Vec<&Outcome>> = BTreeMap::new();
    for outcome in outcomes {
        categories.entry(&outcome.item.category).or_default().push(outcome);
    }
    let categories: Map<String, Value> =
        categories.into_iter().map(|(name, outcomes)| (name.to_owned(), Totals::of(outcomes).json())).collect();
    let result = |outcome: &Outcome| {
        let own = Totals::of([outcome]);
        json!({
            "id": outcome.item.id,
            "category": outcome.item.category,
            "prompt": outcome.item.prompt,
            "expected": outcome.item.expected,
            "text": outcome.answer.text,
            "match": outcome.is_match,
            "scored_tokens": own.scored_tokens,
            "loss": own.loss(),
            "perplexity": own.perplexity(),
            "generated_tokens": own.generated_tokens,
            "seconds": own.seconds,
            "seconds_per_token": own.seconds_per_token(),
        })
    };
    let broken = limits.broken(&totals);
    json!({
        "source": source,
        "model": model,
        "total": totals.json(),
        "categories": categories,
        "results": outcomes.iter().map(result).collect::<Vec<_>>(),
        "limits": {
            "max_perplexity": limits.max_perplexity,
            "min_accuracy": limits.min_accuracy,
            "min_tps": limits.min_tps,
            "broken": broken,
        },
        "passed": broken.is_empty(),
    })
}

/// A report for people: plain lines.
pub(super) fn text(report: &Value) -> String {
    let mut text = format!("{} on {}\n", word(&report["model"]), word(&report["source"]));
    let rows = rows(report);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..COLUMNS.len()).map(width).collect();
    for row in &rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    for line in sentences(report) {
        text.push_str(&format!("{line}\n"));
    }
    text
}

/// The same as Markdown.
pub(super) fn markdown(report: &Value) -> String {
    let mut text = format!("## Evaluation of `{}`\n\nOn {}.\n\n", word(&report["model"]), word(&report["source"]));
    for (index, row) in rows(report).iter().enumerate() {
        let cells: Vec<String> = row.iter().map(|cell| cell.replace('|', "\\|")).collect();
        text.push_str(&format!("| {} |\n", cells.join(" | ")));
        if index == 0 {
            text.push_str(&format!("|{}\n", " --- |".repeat(row.len())));
        }
    }
    text.push('\n');
    for line in sentences(report) {
        text.push_str(&format!("- {line}\n"));
    }
    text
}

/// Heading, one row an item, one a category, the sum.
fn rows(report: &Value) -> Vec<Vec<String>> {
    let numbers = |entry: &Value| {
        let number = |field: &str, digits: usize| {
            entry[field].as_f64().map_or_else(|| "N/A".to_owned(), |number| format!("{number:.digits$}"))
        };
        let per_token = entry["seconds_per_token"].as_f64();
        [
            number("loss", 4),
            number("perplexity", 4),
            entry["scored_tokens"].to_string(),
            per_token.map_or_else(|| "N/A".to_owned(), |seconds| format!("{:.1}", seconds * 1e3)),
        ]
    };
    let mut rows = vec![COLUMNS.map(str::to_owned).to_vec()];
    for result in report["results"].as_array().into_iter().flatten() {
        let verdict = if result["match"] == true { "yes" } else { "no" }.to_owned();
        rows.push([vec![word(&result["id"]).to_owned(), verdict], numbers(result).to_vec()].concat());
    }
    let matches = |entry: &Value| format!("{}/{}", entry["matches"], entry["items"]);
    for (name, entry) in report["categories"].as_object().into_iter().flatten() {
        rows.push([vec![format!("all of {name}"), matches(entry)], numbers(entry).to_vec()].concat());
    }
    let total = &report["total"];
    rows.push([vec!["all".to_owned(), matches(total)], numbers(total).to_vec()].concat());
    rows
}

fn sentences(report: &Value) -> Vec<String> {
    let total = &report["total"];
    let rate = total["tokens_per_second"].as_f64().unwrap_or(0.0);
    let seconds = total["seconds"].as_f64().unwrap_or(0.0);
    let mut lines = vec![format!("{} tokens in {seconds:.2} s: {rate:.1} tok/s", total["generated_tokens"])];
    let broken = report["limits"]["broken"].as_array().into_iter().flatten();
    lines.extend(broken.map(|broken| format!("limit broken: {}", word(broken))));
    lines
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// What a logarithm must be to count: a finite number that is not above zero.
pub(super) fn valid_logprob(value: &Value) -> Option<f64> {
    value.as_f64().filter(|logprob| logprob.is_finite() && *logprob <= 0.0)
}

/// Losses above this count as this, so that a perplexity is a number.
const MAX_LOSS: f64 = 100.0;
const COLUMNS: [&str; 6] = ["ITEM", "MATCH", "LOSS", "PERPLEXITY", "TOKENS", "MS/TOKEN"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::eval::dataset::built_in;

    fn outcome(index: usize, text: &str, logprobs: Option<Vec<f64>>) -> Outcome {
        let generated_tokens = logprobs.as_ref().map_or(2, Vec::len);
        let answer = Answer { text: text.to_owned(), logprobs, generated_tokens, seconds: 0.5 };
        Outcome::new(built_in().remove(index), answer)
    }

    #[test]
    fn sums_are_weighted_by_scored_tokens() {
        let outcomes = [
            outcome(0, " PARIS!", Some(vec![-1.0, -3.0])),
            outcome(1, "helium", Some(vec![-0.5])),
            outcome(2, "5", None),
        ];
        let totals = Totals::of(&outcomes);
        assert_eq!((totals.items, totals.matches, totals.scored_tokens, totals.generated_tokens), (3, 2, 3, 5));
        assert_eq!((totals.loss(), totals.perplexity()), (Some(1.5), Some(1.5f64.exp())));
        assert_eq!((totals.seconds_per_token(), totals.tokens_per_second()), (Some(0.3), 5.0 / 1.5));
        let none = Totals::of(&outcomes[2..]);
        assert_eq!((none.loss(), none.perplexity()), (None, None));
        let huge = Totals::of(&[outcome(0, "", Some(vec![-1e9]))]);
        assert_eq!(huge.perplexity(), Some(100f64.exp()));
    }

    #[test]
    fn limits_are_told_when_broken_also_without_logprobs() {
        let good = Totals::of(&[outcome(0, "Paris", Some(vec![-0.5; 4]))]);
        let blind = Totals::of(&[outcome(0, "Rome", None)]);
        let limits = Limits { max_perplexity: Some(2.0), min_accuracy: Some(1.0), min_tps: Some(8.0) };
        assert_eq!(limits.broken(&good), Vec::<String>::new());
        let broken = limits.broken(&blind);
        assert_eq!(broken.len(), 3, "{broken:?}");
        assert!(broken[0].contains("no log probabilities"));
    }

    #[test]
    fn the_three_forms_show_the_same() {
        let outcomes = [outcome(0, "Paris", Some(vec![-0.5])), outcome(3, "?", None)];
        let limits = Limits { min_accuracy: Some(0.9), ..Limits::default() };
        let report = report("cpu", "m", &outcomes, limits);
        assert_eq!((report["passed"].as_bool(), report["total"]["accuracy"].as_f64()), (Some(false), Some(0.5)));
        assert_eq!(report["categories"]["reasoning"]["perplexity"], Value::Null);
        let (text, markdown) = (text(&report), markdown(&report));
        for part in ["fact-capital", "1.6487", "N/A", "1/2", "limit broken: the accuracy is 0.5000", "all of reasoning"]
        {
            assert!(text.contains(part) && markdown.contains(part), "{part}: {text}{markdown}");
        }
    }

    #[test]
    fn only_logarithms_of_probabilities_count() {
        let valid: Vec<f64> = [json!(-1.5), json!(0), json!(0.1), json!(true), Value::Null, json!("-1")]
            .iter()
            .filter_map(valid_logprob)
            .collect();
        assert_eq!(valid, [-1.5, 0.0]);
    }
}

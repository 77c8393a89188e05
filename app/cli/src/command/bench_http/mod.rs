//! `npuhal bench --url`: how fast a server with the OpenAI interface answers.

mod report;

use crate::Host;
use crate::args::ReportFormat;
use crate::client::{ApiError, Client, connect};
use crate::environment::Setting;
use crate::error::CliError;
use crate::output::write;
use crate::terminal::complain;
use clap::{Args, ValueHint};
use npuhal_core::stage::Control;
use report::{Configuration, Outcome, Run};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
/// How long a server may be silent.
const PATIENCE: Duration = Duration::from_secs(300);
/// Flags of the tests of this machine.
const LOCAL_TESTS: [&str; 9] = ["calibrate", "pp", "tg", "depths", "parallel", "rounds", "jsonl", "ttft", "ttft_text"];

/// Flags of `npuhal bench --url`.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Of a server")]
pub(crate) struct HttpBenchArgs {
    /// Measure a server with the OpenAI interface instead, e.g. http://127.0.0.1:8000
    #[arg(long, value_name = "URL", conflicts_with_all = LOCAL_TESTS)]
    pub(crate) url: Option<String>,

    /// Key of the server; sent encrypted, or to this machine [default: NPUHAL_API_KEY]
    #[arg(long, value_name = "KEY", requires = "url")]
    api_key: Option<String>,

    /// Path that is asked
    #[arg(long, value_name = "PATH", default_value = CHAT, requires = "url", value_parser = [CHAT, TEXT])]
    endpoint: String,

    /// Requests
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10, requires = "url", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    requests: u32,

    /// Requests at a time
    #[arg(long, value_name = "N", default_value_t = 1, requires = "url", value_parser = clap::value_parser!(u32).range(1..=256))]
    concurrency: u32,

    /// Tokens of each answer at most
    #[arg(long, value_name = "N", default_value_t = 32, requires = "url", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,

    /// What is asked
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "Explain why the sky appears blue during the day.",
        requires = "url"
    )]
    prompt: String,

    /// Ask for whole answers instead of streams; then there is no time to first token
    #[arg(long, requires = "url")]
    no_stream: bool,

    /// Form of the report
    #[arg(long, value_name = "FORM", default_value = "text", requires = "url")]
    format: ReportFormat,

    /// Write the report to a file
    #[arg(short, long, value_name = "FILE", requires = "url", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,

    /// Lowest rate of all answers together that passes, in tokens a second
    #[arg(long, value_name = "X", requires = "url")]
    min_tps: Option<f64>,
}

/// Measures the server at `url` and reports.
pub(crate) fn bench(host: &Host, args: &HttpBenchArgs, url: &str, model: Option<&OsStr>) -> Result<(), CliError> {
    if args.min_tps.is_some_and(|limit| !limit.is_finite() || limit < 0.0) {
        return Err(CliError::Usage("--min-tps is a number that is not negative".to_owned()));
    }
    let url = Setting { value: url.to_owned(), source: "--url" };
    let client = connect(&url, args.api_key.as_deref(), PATIENCE)?;
    let model = match model {
        Some(model) => model.to_string_lossy().into_owned(),
        None => client.first_model()?,
    };
    let configuration = Configuration {
        url: client.base().to_owned(),
        model,
        endpoint: args.endpoint.clone(),
        requests: args.requests,
        concurrency: args.concurrency,
        max_tokens: args.tokens,
        prompt: args.prompt.clone(),
        stream: !args.no_stream,
    };
    let before = counters(&client);
    let started = Instant::now();
    let outcomes = ask_all(host, &client, &configuration)?;
    let wall = started.elapsed();
    let metrics = before.zip(counters(&client)).map(|(before, after)| difference(&before, &after));
    let run = Run { configuration, outcomes, wall, metrics };
    let report = run.report();
    let text = match args.format {
        ReportFormat::Text => report::text(&report),
        ReportFormat::Json => format!("{report:#}\n"),
        ReportFormat::Markdown => report::markdown(&report),
    };
    write(&text, args.output.as_deref())?;
    let rate = run.tokens_per_second();
    if let Some(limit) = args.min_tps.filter(|limit| rate < *limit) {
        complain(format_args!("npuhal: the rate is {rate:.2} tok/s; wanted at least {limit}"));
        return Err(CliError::Verdict(2));
    }
    match run.outcomes.iter().filter(|outcome| outcome.error.is_some()).count() {
        0 => Ok(()),
        failed => {
            complain(format_args!("npuhal: {failed} of {} requests failed", run.outcomes.len()));
            Err(CliError::Verdict(1))
        }
    }
}

/// Sends all requests, so many at a time, each as soon as one before it has ended.
fn ask_all(host: &Host, client: &Client, configuration: &Configuration) -> Result<Vec<Outcome>, CliError> {
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::new());
    let requests = configuration.requests as usize;
    let bar = host.voice.counter(requests as u64, "requests");
    std::thread::scope(|scope| {
        for _ in 0..configuration.concurrency.min(configuration.requests) {
            scope.spawn(|| {
                while host.control.check().is_ok() {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= requests {
                        break;
                    }
                    let outcome = ask(client, configuration, index, &host.control);
                    outcomes.lock().unwrap_or_else(PoisonError::into_inner).push(outcome);
                    bar.inc(1);
                }
            });
        }
    });
    bar.finish_and_clear();
    host.control.check().map_err(|_| CliError::Interrupted)?;
    let mut outcomes = outcomes.into_inner().unwrap_or_else(PoisonError::into_inner);
    outcomes.sort_by_key(|outcome| outcome.index);
    Ok(outcomes)
}

/// One request to the end of its answer.
fn ask(client: &Client, configuration: &Configuration, index: usize, control: &Control) -> Outcome {
    let mut body = json!({
        "model": configuration.model,
        "max_tokens": configuration.max_tokens,
        "temperature": 0,
    });
    if configuration.endpoint == CHAT {
        body["messages"] = json!([{"role": "user", "content": configuration.prompt}]);
    } else {
        body["prompt"] = json!(configuration.prompt);
    }
    if configuration.stream {
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
    }
    let started = Instant::now();
    let mut outcome = Outcome { index, ..Outcome::default() };
    let answered = if configuration.stream {
        client.stream(&configuration.endpoint, &body).and_then(|events| {
            for event in events {
                outcome.note(&event?, started);
                // The rest is not waited for; the whole run has failed then.
                if control.check().is_err() {
                    break;
                }
            }
            Ok(())
        })
    } else {
        client.post(&configuration.endpoint, &body).map(|answer| outcome.note(&answer, started))
    };
    outcome.latency = started.elapsed();
    if let Err(error) = answered {
        if let ApiError::Status { status, .. } = error {
            outcome.status = Some(status);
        }
        outcome.error = Some(error.to_string());
    }
    if !configuration.stream {
        outcome.first_token = None;
    }
    outcome
}

/// What the server counts, where it tells: totals, and counts and sums of histograms.
fn counters(client: &Client) -> Option<BTreeMap<String, f64>> {
    let text = client.text("/metrics").ok()?;
    let sample = |line: &str| {
        let (name, value) = line.rsplit_once(' ')?;
        let is_counted =
            ["_total", "_count", "_sum"].iter().any(|end| name.split('{').next().unwrap_or(name).ends_with(end));
        Some((name.to_owned(), value.parse::<f64>().ok().filter(|_| is_counted)?))
    };
    Some(text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect())
}

/// What has grown.
fn difference(before: &BTreeMap<String, f64>, after: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let grown = |(name, value): (&String, &f64)| (name.clone(), value - before.get(name).copied().unwrap_or(0.0));
    after.iter().map(grown).filter(|(_, growth)| *growth != 0.0).collect()
}

impl Outcome {
    /// Notes what an event or a whole answer tells.
    fn note(&mut self, event: &Value, started: Instant) {
        let choice = &event["choices"][0];
        let is_text = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
        let texts = [&choice["delta"]["content"], &choice["delta"]["reasoning_content"], &choice["text"]];
        if self.first_token.is_none() && texts.into_iter().any(is_text) {
            self.first_token = Some(started.elapsed());
        }
        if let Some(tokens) = event["usage"]["completion_tokens"].as_u64() {
            self.tokens = Some(tokens);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
        self.status = Some(200);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_has_grown_is_reported() {
        let map = |pairs: &[(&str, f64)]| pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let before: BTreeMap<String, f64> = map(&[("a_total", 1.0), ("b_total{x=\"1\"}", 2.0)]);
        let after: BTreeMap<String, f64> = map(&[("a_total", 1.0), ("b_total{x=\"1\"}", 5.0), ("c_sum", 0.5)]);
        assert_eq!(difference(&before, &after), map(&[("b_total{x=\"1\"}", 3.0), ("c_sum", 0.5)]));
    }
}

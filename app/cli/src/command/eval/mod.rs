//! `npuhal eval`: how well a model answers or foretells a text, here or on a server.

mod args;
mod dataset;
mod perplexity;
mod report;
mod self_test;

use crate::args::ReportFormat;
pub(crate) use args::EvalArgs;

use crate::Host;
use crate::args::{ModelArgs, default_model};
use crate::client::{ApiError, Client, connect, server};
use crate::error::CliError;
use crate::output::write;
use crate::session::prepare;
use crate::terminal::complain;
use dataset::Item;
use npuhal_core::RunError;
use npuhal_models::Specials;
use npuhal_models::generate::{GenerateError, TextGenerator};
use npuhal_models::prompter::text_ids;
use npuhal_models::sequence::{GenerationRequest, Piece};
use npuhal_models::window::Overflow;
use report::{Answer, Limits, Outcome, Totals, valid_logprob};
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// How long a server may take for an answer.
const PATIENCE: Duration = Duration::from_secs(300);
const COMPLETIONS: &str = "/v1/completions";

pub(crate) fn eval(host: &Host, args: &EvalArgs) -> Result<(), CliError> {
    check_limits(args)?;
    if let Some(file) = &args.perplexity {
        return perplexity::run(host, args, file);
    }
    if args.session.numerics.contains(',') || args.models.len() > 1 {
        let message = "items are answered by one model in one numerics; --perplexity takes several".to_owned();
        return Err(CliError::Usage(message));
    }
    let is_here = !args.session.is_unset();
    if args.self_test {
        if is_here {
            let message = "--self-test runs no model; leave out what is said of how one runs";
            return Err(CliError::Usage(message.to_owned()));
        }
        return self_test::run(host, args);
    }
    let server = server(args.api_url.as_deref(), is_here)?;
    let items = args.dataset.as_deref().map_or_else(|| Ok(dataset::built_in()), dataset::read)?;
    let (source, model, outcomes) = match server {
        Some(url) => {
            let client = connect(&url, args.api_key.as_deref(), PATIENCE)?;
            let model = match args.models.first() {
                Some(model) => model.to_string_lossy().into_owned(),
                None => client.first_model()?,
            };
            let outcomes = ask(host, &client, &model, items)?;
            (client.base().to_owned(), model, outcomes)
        }
        None => local(host, args, items)?,
    };
    conclude(args, &source, &model, &outcomes)
}

fn check_limits(args: &EvalArgs) -> Result<(), CliError> {
    let accuracy = args.min_accuracy.is_none_or(|limit| (0.0..=1.0).contains(&limit));
    let others = [args.max_perplexity, args.min_tps].into_iter().flatten();
    if accuracy && others.into_iter().all(|limit| limit.is_finite() && limit >= 0.0) {
        return Ok(());
    }
    Err(CliError::Usage("limits are numbers that are not negative, and --min-accuracy is at most 1".to_owned()))
}

/// Shows the report; broken limits are told and end the program with 1.
fn conclude(args: &EvalArgs, source: &str, model: &str, outcomes: &[Outcome]) -> Result<(), CliError> {
    let limits = Limits { max_perplexity: args.max_perplexity, min_accuracy: args.min_accuracy, min_tps: args.min_tps };
    let report = report::report(source, model, outcomes, limits);
    let text = match args.format {
        ReportFormat::Text => report::text(&report),
        ReportFormat::Json => format!("{report:#}\n"),
        ReportFormat::Markdown => report::markdown(&report),
    };
    write(&text, args.output.as_deref())?;
    verdict(&limits.broken(&Totals::of(outcomes)))
}

/// Exit code 1 where something is `broken`.
fn verdict(broken: &[String]) -> Result<(), CliError> {
    broken.iter().for_each(|broken| complain(format_args!("npuhal: {broken}")));
    if broken.is_empty() { Ok(()) } else { Err(CliError::Verdict(1)) }
}

/// The answers of a model that runs here.
fn local(host: &Host, args: &EvalArgs, items: Vec<Item>) -> Result<(String, String, Vec<Outcome>), CliError> {
    let model = args.models.first().cloned().unwrap_or_else(|| default_model().into());
    let name = model.to_string_lossy().into_owned();
    let prepared = prepare(host, &ModelArgs { model: Some(model), session: args.session.clone(), verify: false })?;
    let tokenizer = prepared.tokenizer(host)?;
    let prompts: Vec<Vec<u32>> =
        items.iter().map(|item| text_ids(&tokenizer, &item.prompt, Specials::Plain)).collect::<Result<_, _>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let answer_tokens = items.iter().map(|item| item.max_tokens).max().unwrap_or(0);
    let plan = prepared.choose_for(host, longest, u32::try_from(answer_tokens).unwrap_or(u32::MAX), Overflow::Error)?;
    let source = plan.choice.decision.line();
    let mut generator = TextGenerator::new(plan.open()?);
    // A route that chooses tokens itself has none to give.
    let logprobs = matches!(generator, TextGenerator::Stepper(_)).then_some(0);
    let mut outcomes = Vec::with_capacity(items.len());
    for (item, prompt) in items.into_iter().zip(prompts) {
        let request = GenerationRequest { logprobs, ..GenerationRequest::greedy(prompt, item.max_tokens) };
        let mut found = Vec::new();
        let mut receiver = |piece: &Piece| {
            found.extend(piece.logprobs.iter().map(|entry| entry.chosen.logprob));
            ControlFlow::Continue(())
        };
        let started = Instant::now();
        let answer =
            generator.generate(&request, &tokenizer, &mut receiver, &host.control).map_err(|error| match error {
                GenerateError::Run(RunError::Cancelled) => CliError::Interrupted,
                other => other.into(),
            })?;
        let seconds = started.elapsed().as_secs_f64();
        let generated_tokens = answer.tokens.len();
        outcomes.push(Outcome::new(
            item,
            Answer { text: answer.text, logprobs: logprobs.map(|_| found), generated_tokens, seconds },
        ));
    }
    Ok((source, name, outcomes))
}

/// The answers of a server.
fn ask(host: &Host, client: &Client, model: &str, items: Vec<Item>) -> Result<Vec<Outcome>, CliError> {
    let mut outcomes = Vec::with_capacity(items.len());
    for item in items {
        host.control.check().map_err(|_| CliError::Interrupted)?;
        let body = json!({
            "model": model,
            "prompt": item.prompt,
            "max_tokens": item.max_tokens,
            "temperature": 0,
            "logprobs": true,
        });
        let started = Instant::now();
        let answer = client.post(COMPLETIONS, &body)?;
        let seconds = started.elapsed().as_secs_f64();
        let answer = read_answer(client, &answer, seconds)?;
        outcomes.push(Outcome::new(item, answer));
    }
    Ok(outcomes)
}

fn read_answer(client: &Client, answer: &Value, seconds: f64) -> Result<Answer, ApiError> {
    let choice = &answer["choices"][0];
    let text = choice["text"].as_str().ok_or_else(|| client.bad_answer(COMPLETIONS, "it has no choices[0].text"))?;
    let listed = choice["logprobs"]["token_logprobs"].as_array();
    let logprobs = listed.map(|list| list.iter().filter_map(valid_logprob).collect::<Vec<f64>>());
    let counted = answer["usage"]["completion_tokens"].as_u64().and_then(|count| usize::try_from(count).ok());
    Ok(Answer {
        text: text.to_owned(),
        generated_tokens: counted.or(listed.map(Vec::len)).unwrap_or(0),
        logprobs,
        seconds,
    })
}

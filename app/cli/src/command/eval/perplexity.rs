//! `npuhal eval --perplexity`: every token of a text scored by several numerics of several models.

use super::{DEFAULT_MODEL, EvalArgs, verdict, write};
use crate::Host;
use crate::args::ReportFormat;
use crate::args::{ModelArgs, SessionArgs};
use crate::error::CliError;
use crate::session::{Plan, prepare};
use npuhal_core::RunError;
use npuhal_core::stage::{Session, Stepper};
use npuhal_models::Specials;
use npuhal_models::perplexity::{PerplexityError, Quality, ScoredText, measure};
use serde_json::{Value, json};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::path::Path;

const FILE_LIMIT_BYTES: u64 = 64 << 20;

/// One line of the table.
struct Line {
    model: String,
    numerics: String,
    /// Where it ran.
    detail: String,
    quality: Quality,
    is_reference: bool,
}

pub(super) fn run(host: &Host, args: &EvalArgs, file: &Path) -> Result<(), CliError> {
    let text = read(file)?;
    let default = [OsString::from(DEFAULT_MODEL)];
    let models: &[OsString] = if args.models.is_empty() { &default } else { &args.models };
    let mut lines = Vec::new();
    for model in models {
        lines.extend(of_model(host, args, model, &text)?);
    }
    let report = report(args, file, &text, &lines);
    let shown = match args.format {
        ReportFormat::Text => table(&lines, "  ", ""),
        ReportFormat::Json => format!("{report:#}\n"),
        ReportFormat::Markdown => markdown(args, file, &text, &lines),
    };
    write(&shown, args.output.as_deref())?;
    let above = |line: &&Line| args.max_perplexity.is_some_and(|limit| line.quality.perplexity > limit);
    let broken = lines.iter().filter(above).map(|line| {
        let limit = args.max_perplexity.unwrap_or_default();
        let Line { model, numerics, quality, .. } = line;
        format!("{model} {numerics}: the perplexity is {:.4}; wanted at most {limit}", quality.perplexity)
    });
    verdict(&broken.collect::<Vec<_>>())
}

fn read(file: &Path) -> Result<String, CliError> {
    let bad = |reason: String| CliError::Dataset { path: file.display().to_string(), reason };
    let mut bytes = Vec::new();
    let opened = File::open(file).map_err(|error| bad(error.to_string()))?;
    opened.take(FILE_LIMIT_BYTES + 1).read_to_end(&mut bytes).map_err(|error| bad(error.to_string()))?;
    if bytes.len() as u64 > FILE_LIMIT_BYTES {
        return Err(bad(format!("it is longer than {FILE_LIMIT_BYTES} bytes")));
    }
    String::from_utf8(bytes).map_err(|error| bad(format!("it is not UTF-8 text: {}", error.utf8_error())))
}

/// All numerics of one model over the same rows.
fn of_model(host: &Host, args: &EvalArgs, model: &OsStr, text: &str) -> Result<Vec<Line>, CliError> {
    let asked: Vec<&str> = args.session.numerics.split(',').map(str::trim).collect();
    let reference = args.reference.as_deref();
    let mut wanted: Vec<(&OsStr, &str, bool)> = Vec::new();
    if let Some(numerics) = reference {
        wanted.push((args.reference_model.as_deref().unwrap_or(model), numerics, true));
    }
    let is_apart = args.reference_model.is_some();
    wanted.extend(
        asked
            .iter()
            .filter(|numerics| is_apart || reference != Some(**numerics))
            .map(|numerics| (model, *numerics, false)),
    );
    let mut steppers: Vec<Box<dyn Stepper>> = Vec::new();
    let mut details = Vec::new();
    let mut scored = None;
    for (model, numerics, _) in &wanted {
        let session = SessionArgs {
            numerics: (*numerics).to_owned(),
            context: Some(args.session.context.unwrap_or(0).max(args.window)),
            ..args.session.clone()
        };
        let prepared = prepare(host, &ModelArgs { model: Some((*model).to_owned()), session, verify: false })?;
        let tokenizer = prepared.tokenizer(host)?;
        let plan = prepared.choose_for(host, args.window as usize, 0)?;
        let mut ids = tokenizer.encode(text, Specials::Plain)?;
        let bos = tokenizer.bos().filter(|_| tokenizer.add_bos());
        ids.truncate(args.tokens.unwrap_or(usize::MAX));
        let next = ScoredText { ids, bos, window: args.window as usize, usable_ids: tokenizer.usable_ids() };
        if scored.as_ref().is_some_and(|first: &ScoredText| first.ids != next.ids) {
            let message =
                "the reference model cuts the text into other tokens; logits can be compared only where they agree";
            return Err(CliError::Usage(message.to_owned()));
        }
        scored = Some(next);
        details.push(plan.choice.service.detail.clone());
        steppers.push(stepper(&plan)?);
    }
    let Some(scored) = scored else { return Ok(Vec::new()) };
    let bar = host.voice.counter(0, &model.to_string_lossy());
    let mut progress = |done: usize, total: usize| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    };
    let qualities = measure(&mut steppers, &scored, &mut progress, &host.control);
    bar.finish_and_clear();
    let qualities = qualities.map_err(|error| match error {
        PerplexityError::Run(RunError::Cancelled) => CliError::Interrupted,
        other => other.into(),
    })?;
    let has_reference = reference.is_some();
    let lines =
        wanted.iter().zip(details).zip(qualities).map(|(((model, numerics, is_reference), detail), quality)| Line {
            model: Path::new(model).file_name().unwrap_or(model).to_string_lossy().into_owned(),
            numerics: (*numerics).to_owned(),
            detail,
            // Without a reference the first one is none either.
            quality: if has_reference { quality } else { Quality { difference: None, ..quality } },
            is_reference: *is_reference,
        });
    Ok(lines.collect())
}

fn stepper(plan: &Plan) -> Result<Box<dyn Stepper>, CliError> {
    match plan.open()? {
        Session::Stepper(stepper) => Ok(stepper),
        Session::Generator(_) => Err(CliError::Usage(
            "this route chooses tokens itself; a text is scored on routes that yield logits".to_owned(),
        )),
    }
}

fn report(args: &EvalArgs, file: &Path, text: &str, lines: &[Line]) -> Value {
    let line = |line: &Line| {
        json!({
            "model": line.model,
            "numerics": line.numerics,
            "detail": line.detail,
            "is_reference": line.is_reference,
            "scored_tokens": line.quality.scored_tokens,
            "loss": line.quality.loss,
            "perplexity": line.quality.perplexity,
            "difference": line.quality.difference,
        })
    };
    json!({
        "text": file.to_string_lossy(),
        "characters": text.chars().count(),
        "window": args.window,
        "results": lines.iter().map(line).collect::<Vec<_>>(),
    })
}

const COLUMNS: [&str; 10] =
    ["model", "numerics", "tokens", "loss", "perplexity", "KL mean", "KL max", "logit RMS", "logit max", "same top"];

fn cells(line: &Line) -> [String; 10] {
    let Quality { scored_tokens, loss, perplexity, difference } = line.quality;
    let none = if line.is_reference { "reference" } else { "-" };
    let [kl_mean, kl_max, rms, max, same_top] = match difference {
        Some(by) => [
            format!("{:.2e}", by.kl_mean),
            format!("{:.2e}", by.kl_max),
            format!("{:.2e}", by.logit_rms),
            format!("{:.2e}", by.logit_max),
            format!("{:.2} %", by.same_top * 100.0),
        ],
        None => [none, "-", "-", "-", "-"].map(str::to_owned),
    };
    let numbers = [scored_tokens.to_string(), format!("{loss:.5}"), format!("{perplexity:.4}")];
    let [tokens, loss, perplexity] = numbers;
    [line.model.clone(), line.numerics.clone(), tokens, loss, perplexity, kl_mean, kl_max, rms, max, same_top]
}

/// The lines below their heading, cells apart by `between`, each line within `edge`.
fn table(lines: &[Line], between: &str, edge: &str) -> String {
    let mut rows = vec![COLUMNS.map(str::to_owned)];
    rows.extend(lines.iter().map(cells));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 10] = std::array::from_fn(width);
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let padded: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        let line = format!("{edge} {} {edge}", padded.join(between));
        text.push_str(line.trim());
        text.push('\n');
        if index == 0 && !edge.is_empty() {
            text.push_str(&format!("|{}\n", "---|".repeat(COLUMNS.len())));
        }
    }
    text
}

fn markdown(args: &EvalArgs, file: &Path, text: &str, lines: &[Line]) -> String {
    let models: Vec<String> = args.models.iter().map(|model| model.to_string_lossy().into_owned()).collect();
    let models = if models.is_empty() { DEFAULT_MODEL.to_owned() } else { models.join(",") };
    let mut command =
        format!("npuhal eval --perplexity {} -m {models} --numerics {}", file.display(), args.session.numerics);
    if let Some(reference) = &args.reference {
        command.push_str(&format!(" --reference {reference}"));
    }
    if let Some(model) = &args.reference_model {
        command.push_str(&format!(" --reference-model {}", model.to_string_lossy()));
    }
    command.push_str(" --format markdown");
    if let Some(output) = &args.output {
        command.push_str(&format!(" -o {}", output.display()));
    }
    let details: Vec<&str> = lines.iter().map(|line| line.detail.as_str()).collect();
    let mut details = details;
    details.dedup();
    format!(
        "# Quality: what a numerics costs\n\n\
         Made by one command, with npuhal {}; do not edit by hand:\n\n```\n{command}\n```\n\n\
         The text is `{}` ({} characters). It is cut into windows of {} positions, computed independently of each other; every\n\
         token with one before it in its window is scored. *Loss* is the mean negative natural logarithm of a token's\n\
         probability, *perplexity* its exponential. Against the reference, over the same rows: *KL* is D(reference ‖ numerics)\n\
         of the next token's distribution in nats, mean and worst row; *logit RMS* and *logit max* are differences of raw\n\
         logits; *same top* is the share of rows with the same likeliest token. See `numerics.md` for what each numerics does.\n\n\
         {}\nRan on: {}.\n",
        env!("CARGO_PKG_VERSION"),
        file.display(),
        text.chars().count(),
        args.window,
        table(lines, " | ", "|"),
        details.join("; "),
    )
}

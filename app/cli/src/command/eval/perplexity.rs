//! `npuhal eval --perplexity`: every token of a text scored by several numerics of several models.

use super::args::DEFAULT_WINDOW;
use super::{EvalArgs, verdict};
use crate::Host;
use crate::args::{ModelArgs, ReportFormat, SessionArgs, default_model};
use crate::error::CliError;
use crate::output::write;
use crate::session::{Plan, prepare};
use npuhal_core::RunError;
use npuhal_core::stage::{Session, Stepper};
use npuhal_models::perplexity::{PerplexityError, Quality, ScoredText, measure};
use npuhal_models::prompter::text_start;
use npuhal_models::template::strftime_utc;
use npuhal_models::window::Overflow;
use npuhal_models::{Catalogue, Specials};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::SystemTime;

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
    let default = [OsString::from(default_model())];
    let asked: &[OsString] = if args.models.is_empty() { &default } else { &args.models };
    let mut lines = Vec::new();
    for model in asked {
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
        let plan = prepared.choose_for(host, args.window as usize, 0, Overflow::Error)?;
        let mut ids = tokenizer.encode(text, Specials::Plain)?;
        ids.truncate(args.tokens.unwrap_or(usize::MAX));
        let next = ScoredText {
            ids,
            bos: text_start(&tokenizer),
            window: args.window as usize,
            usable_ids: tokenizer.usable_ids(),
        };
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
    let models = models(args);
    let file_of = |name: &str| {
        let entry = Catalogue::builtin().find(name)?;
        Some(json!({ "file": entry.file, "sha256": entry.sha256.to_string(), "licence": entry.licence.id }))
    };
    json!({
        "npuhal": env!("CARGO_PKG_VERSION"),
        "date": strftime_utc(SystemTime::now(), DATE),
        "notes": args.note,
        "text": file.to_string_lossy(),
        "text_sha256": sha256(text),
        "characters": text.chars().count(),
        "window": args.window,
        "models": models.iter().map(|name| (name.clone(), json!(file_of(name)))).collect::<Map<_, _>>(),
        "results": lines.iter().map(line).collect::<Vec<_>>(),
    })
}

/// The models as they were asked for.
fn models(args: &EvalArgs) -> Vec<String> {
    let asked = args.models.iter().map(|model| model.to_string_lossy().into_owned());
    let mut models: Vec<String> = asked.collect();
    if models.is_empty() {
        models.push(default_model().to_owned());
    }
    models
}

fn sha256(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
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
    let models = models(args);
    let mut command = format!(
        "npuhal eval --perplexity {} -m {} --numerics {}",
        quoted(&file.to_string_lossy()),
        quoted(&models.join(",")),
        args.session.numerics
    );
    if let Some(reference) = &args.reference {
        command.push_str(&format!(" --reference {reference}"));
    }
    if let Some(model) = &args.reference_model {
        command.push_str(&format!(" --reference-model {}", quoted(&model.to_string_lossy())));
    }
    if args.window != DEFAULT_WINDOW {
        command.push_str(&format!(" --window {}", args.window));
    }
    if let Some(tokens) = args.tokens {
        command.push_str(&format!(" --tokens {tokens}"));
    }
    for note in &args.note {
        command.push_str(&format!(" \\\n  --note {}", quoted(note)));
    }
    command.push_str(" --format markdown");
    if let Some(output) = &args.output {
        command.push_str(&format!(" -o {}", quoted(&output.to_string_lossy())));
    }
    let mut facts = vec![
        format!("npuhal {}, {}", env!("CARGO_PKG_VERSION"), strftime_utc(SystemTime::now(), DATE)),
        format!("text: `{}`, {} characters, SHA-256 `{}`", file.display(), text.chars().count(), sha256(text)),
    ];
    facts.extend(args.note.iter().cloned());
    facts.extend(models.iter().map(|name| match Catalogue::builtin().find(name) {
        Some(entry) => format!(
            "model `{name}`: {}, `{}`, SHA-256 `{}`, licence {}",
            entry.display_name, entry.file, entry.sha256, entry.licence.id
        ),
        None => format!("model `{name}`"),
    }));
    let mut details: Vec<&str> = lines.iter().map(|line| line.detail.as_str()).collect();
    details.dedup();
    facts.push(format!("ran on: {}", details.join("; ")));
    let facts: String = facts.iter().map(|fact| format!("* {fact}\n")).collect();
    format!(
        "# Quality: what a numerics costs\n\n\
         Made by one command; do not edit by hand:\n\n```\n{command}\n```\n\n{facts}\n\
         The text is cut into windows of {} positions, computed independently of each other; every token with one before it in\n\
         its window is scored. *Loss* is the mean negative natural logarithm of a token's probability, *perplexity* its\n\
         exponential. Against the reference, over the same rows: *KL* is D(reference ‖ numerics) of the next token's\n\
         distribution in nats, mean and worst row; *logit RMS* and *logit max* are differences of raw logits; *same top* is the\n\
         share of rows with the same likeliest token. For one instruction set the numbers depend neither on the machine nor on the\n\
         number of threads. See [numerics.md](numerics.md) for what each numerics does.\n\n{}",
        args.window,
        table(lines, " | ", "|"),
    )
}

/// `text` as one word of a shell.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:=+@".contains(c);
    match !text.is_empty() && text.chars().all(is_plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

const DATE: &str = "%Y-%m-%d";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_command_can_be_given_to_a_shell_again() {
        assert_eq!(quoted("tests/data/quality.txt"), "tests/data/quality.txt");
        assert_eq!(quoted("commit 12ab"), "'commit 12ab'");
        assert_eq!(quoted("it's"), "'it'\\''s'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn checksums_are_those_of_the_text() {
        assert!(sha256("abc").starts_with("ba7816bf8f01cfea"));
    }
}

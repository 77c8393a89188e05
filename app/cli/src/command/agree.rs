//! `npuhal agree`: whether placements choose the same tokens; without a model, a trial of the gate itself.

use crate::Host;
use crate::args::{AgreeArgs, ReportFormat};
use crate::error::CliError;
use crate::output::write;
use crate::session::{compared_options, message_ids, open_model, registry, tokenizer};
use npuhal_core::stage::TokenId;
use npuhal_core::{DeviceCard, Generation};
use npuhal_models::ModelSource;
use npuhal_registry::agreement::live::{LiveReport, LiveTrial, hold};
use npuhal_registry::agreement::{AgreementReport, Harness, Scenario, markdown, text};
use npuhal_registry::parity::seeded_ids;
use npuhal_registry::{DeviceCheck, DeviceChoice, Options, Registry, Target, survey_devices};
use serde_json::json;
use std::fmt::Write;

/// Positions that are compared unless told otherwise, behind a prompt that is given.
const USUAL_POSITIONS: usize = 16;

pub(crate) fn agree(host: &Host, args: &AgreeArgs) -> Result<(), CliError> {
    let (report, passed) = if args.model.is_some() { live(host, args)? } else { offline(args)? };
    write(&report, args.output.as_deref())?;
    if passed { Ok(()) } else { Err(CliError::Verdict(1)) }
}

/// Synthetic placements: fails where the gate does not do what the scenario is there for.
fn offline(args: &AgreeArgs) -> Result<(String, bool), CliError> {
    let harness = Harness {
        positions: args.positions.unwrap_or(USUAL_POSITIONS),
        top_k: args.top_k,
        margin_threshold: args.margin_threshold,
        seed: args.seed,
    };
    let scenarios = match args.scenario.as_str() {
        "all" => Scenario::ALL.to_vec(),
        name => vec![name.parse().map_err(|error| CliError::Usage(format!("--scenario: {error}, all")))?],
    };
    let mut reports = Vec::new();
    let mut wrong = Vec::new();
    for scenario in scenarios {
        let report = harness.report(scenario).map_err(|error| CliError::Usage(format!("--{error}")))?;
        wrong.extend(scenario.is_as_expected(&report).err());
        reports.push(report);
    }
    let passed = wrong.is_empty();
    let rendered = match args.format {
        ReportFormat::Text => {
            let verdict =
                if passed { "the gate does what it is there for\n".to_owned() } else { wrong.join("\n") + "\n" };
            text(&reports) + &verdict
        }
        ReportFormat::Markdown => markdown(&reports),
        ReportFormat::Json => {
            let by_name: serde_json::Map<_, _> =
                reports.iter().map(|report| (report.scenario.clone(), json!(report))).collect();
            format!("{:#}\n", json!({ "scenarios": by_name, "passed": passed }))
        }
    };
    Ok((rendered, passed))
}

/// Real placements of a model.
fn live(host: &Host, args: &AgreeArgs) -> Result<(String, bool), CliError> {
    let registry = registry(host)?;
    let Some(spec) = &args.model else { return Err(CliError::Usage("-m is missing".to_owned())) };
    let model = open_model(host, &registry, spec, false)?;
    let options = compared_options(&registry, &args.session)?;
    let targets = targets(&registry, &model, args, &options)?;
    let prompt = prompt(host, &model, args)?;
    let positions = positions(args, &prompt)?;
    let trial = LiveTrial {
        name: model.path().file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        prompt,
        positions,
        top_k: args.top_k,
        margin_threshold: args.margin_threshold,
    };
    let report = hold(&registry, &model, &targets, &trial, &host.control)?;
    let passed = report.agreement.passed;
    let reports = [report.agreement.clone()];
    let rendered = match args.format {
        ReportFormat::Text => text(&reports) + &evidence_text(&report),
        ReportFormat::Markdown => markdown(&reports),
        ReportFormat::Json => format!("{:#}\n", json!(report)),
    };
    Ok((rendered, passed))
}

/// The placements that were named, the reference in front; else the CPU in both of its arithmetics, and every NPU that runs the
/// model.
fn targets(
    registry: &Registry,
    model: &ModelSource,
    args: &AgreeArgs,
    options: &Options,
) -> Result<Vec<(String, Target)>, CliError> {
    let keys = registry.option_keys();
    let read = |flag: &str, text: &str| {
        let target = Target::parse(text, options, &keys);
        target.map(|target| (text.to_owned(), target)).map_err(|error| CliError::Usage(format!("--{flag}: {error}")))
    };
    let mut texts = vec![("reference", args.reference.clone())];
    let named = (args.session.device != "auto").then_some(&args.session.device);
    if args.placement.is_empty() && named.is_none() {
        texts.push(("placement", "cpu:exact".to_owned()));
        let (_, devices) = survey_devices(registry, &DeviceChoice::Auto);
        let is_npu = |card: &DeviceCard| card.generation != Generation::Cpu && !card.is_virtual;
        let usable = devices.iter().filter(|report| report.check == DeviceCheck::Usable && is_npu(&report.card));
        let serves = |id: &str| read("placement", id).is_ok_and(|(_, target)| target.choose(registry, model).is_ok());
        let ids = usable.map(|report| report.card.id.clone()).filter(|id| serves(id));
        texts.extend(ids.map(|id| ("placement", id)));
    }
    texts.extend(named.map(|text| ("device", text.clone())));
    texts.extend(args.placement.iter().map(|text| ("placement", text.clone())));
    texts.iter().map(|(flag, text)| read(flag, text)).collect()
}

/// Positions in all. A prompt is not cut, and is gone on from unless told otherwise.
fn positions(args: &AgreeArgs, prompt: &[TokenId]) -> Result<usize, CliError> {
    let needed = if args.prompt.is_some() { prompt.len() } else { 0 };
    match args.positions {
        None => Ok(needed + USUAL_POSITIONS),
        Some(positions) if positions < needed => Err(CliError::Usage(format!(
            "--positions {positions}: the prompt alone has {needed}; give more, or leave it out for {}",
            needed + USUAL_POSITIONS
        ))),
        Some(positions) => Ok(positions),
    }
}

/// The prompt's ids in the model's template, or drawn ones.
fn prompt(host: &Host, model: &ModelSource, args: &AgreeArgs) -> Result<Vec<TokenId>, CliError> {
    let Some(prompt) = &args.prompt else {
        // More than the model has positions for are refused later.
        let drawn = args.positions.unwrap_or(USUAL_POSITIONS).div_ceil(2).min(model.config().context_length.max(1));
        return Ok(seeded_ids(drawn, model.config().vocab_size, args.seed));
    };
    message_ids(model, &tokenizer(host, model)?, prompt)
}

fn evidence_text(report: &LiveReport) -> String {
    let mut text = String::from("proof of the backend:\n");
    for evidence in &report.evidence {
        let repeats = if evidence.repeats { "the second run gave the same bits" } else { "THE SECOND RUN DIFFERED" };
        let _ = writeln!(
            text,
            "  {}: route {}, {}; {repeats}",
            evidence.placement,
            evidence.route,
            evidence.stages.join(", ")
        );
        for device in &evidence.devices {
            let kind = if device.is_virtual { " (virtual)" } else { "" };
            let _ = writeln!(
                text,
                "    {}{kind}: {} contexts, {} submissions, {} runs completed",
                device.device, device.contexts, device.submissions, device.completed_runs
            );
        }
    }
    let AgreementReport { gate_failures, .. } = &report.agreement;
    if gate_failures.is_empty() { text } else { text + &format!("failed: {}\n", gate_failures.join(", ")) }
}

//! `npuhal parity`: what one device computes, held against another, tap by tap.

use crate::Host;
use crate::args::{ParityArgs, ReportFormat};
use crate::error::CliError;
use crate::output::write;
use crate::session::{compared_options, message_ids, open_model, registry, tokenizer};
use npuhal_core::stage::{Session, Stepper, TokenId};
use npuhal_models::ModelSource;
use npuhal_registry::parity::{ParityRequest, Side, hold, markdown, seeded_ids, text};
use npuhal_registry::{Choice, Registry, Target, Tolerance};

/// Where both sides share a window, this many of its positions are compared unless told otherwise.
const USUAL_POSITIONS: usize = 16;

pub(crate) fn parity(host: &Host, args: &ParityArgs) -> Result<(), CliError> {
    let registry = registry(host)?;
    let options = compared_options(&registry, &args.session)?;
    let keys = registry.option_keys();
    let read = |flag: &str, text: &str| {
        Target::parse(text, &options, &keys).map_err(|error| CliError::Usage(format!("--{flag}: {error}")))
    };
    let (found, reference) = (read("device", &args.session.device)?, read("against", &args.against)?);
    let model = open_model(host, &registry, &args.model, false)?;
    let other_model = args.against_model.as_ref().map(|spec| open_model(host, &registry, spec, false)).transpose()?;
    let against = Compared::new(&registry, other_model.as_ref().unwrap_or(&model), reference)?;
    let device = Compared::new(&registry, &model, found)?;
    let window = against.choice.service.window.min(device.choice.service.window) as usize;
    let ids = ids(host, &model, args, window)?;
    let tolerance = tolerance(args, &against, &device);
    let (mut one, mut other) = (against.open(&registry)?, device.open(&registry)?);
    let request = ParityRequest { ids, top_k: args.top_k, tolerance };
    let sides = (against.side(one.as_mut()), device.side(other.as_mut()));
    let report = hold(sides.0, sides.1, &request, &host.control)?;
    let rendered = match args.format {
        ReportFormat::Text => text(&report),
        ReportFormat::Markdown => markdown(&report),
        ReportFormat::Json => format!("{:#}\n", serde_json::json!(report)),
    };
    write(&rendered, args.output.as_deref())?;
    if report.passed { Ok(()) } else { Err(CliError::Verdict(1)) }
}

/// A target with its model.
struct Compared<'a> {
    model: &'a ModelSource,
    target: Target,
    choice: Choice,
}

impl<'a> Compared<'a> {
    fn new(registry: &Registry, model: &'a ModelSource, target: Target) -> Result<Self, CliError> {
        let choice = target.choose(registry, model)?;
        Ok(Self { model, target, choice })
    }

    fn open(&self, registry: &Registry) -> Result<Box<dyn Stepper>, CliError> {
        match self.choice.open(registry, self.model, &self.target.options)? {
            Session::Stepper(stepper) => Ok(stepper),
            Session::Generator(_) => Err(CliError::Usage(format!(
                "{}: route {} chooses tokens itself; parity compares routes that yield logits",
                self.target,
                self.choice.route.name()
            ))),
        }
    }

    fn side<'s>(&self, stepper: &'s mut dyn Stepper) -> Side<'s> {
        Side { name: format!("{} (route {})", self.target, self.choice.route.name()), stepper }
    }

    fn tolerance(&self) -> Tolerance {
        self.choice.route.tolerance(self.model, &self.target.options)
    }

    /// Where `other` is its twin on the CPU, whole.
    fn twin_tolerance(&self, other: &Self) -> Option<Tolerance> {
        let numerics = other.target.options.numerics;
        let is_cpu = other.choice.route.name() == npuhal_cpu::route::NAME;
        is_cpu.then(|| self.choice.route.twin_tolerance(self.model, &self.target.options, numerics)).flatten()
    }
}

fn tolerance(args: &ParityArgs, against: &Compared<'_>, device: &Compared<'_>) -> Tolerance {
    let of_twins = device.twin_tolerance(against).or_else(|| against.twin_tolerance(device));
    let stated = of_twins.unwrap_or_else(|| against.tolerance().with(device.tolerance()));
    Tolerance {
        cosine: args.min_cosine.unwrap_or(stated.cosine),
        relative_error: args.max_error.unwrap_or(stated.relative_error),
        near_tie: args.near_tie.unwrap_or(stated.near_tie),
    }
}

fn ids(host: &Host, model: &ModelSource, args: &ParityArgs, window: usize) -> Result<Vec<TokenId>, CliError> {
    let ids = match &args.prompt {
        None => seeded_ids(args.tokens.unwrap_or(USUAL_POSITIONS), model.config().vocab_size, args.seed),
        Some(prompt) => {
            let mut ids = message_ids(model, &tokenizer(host, model)?, prompt)?;
            ids.truncate(args.tokens.unwrap_or(ids.len()));
            ids
        }
    };
    if ids.len() > window {
        return Err(CliError::Usage(format!(
            "{} positions are to be compared; both sides have {window}; give fewer with --tokens",
            ids.len()
        )));
    }
    Ok(ids)
}

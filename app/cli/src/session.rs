//! From a model's name to an open session: find or fetch the file, choose route and device, load.

use crate::Host;
use crate::args::{GenerationArgs, ModelArgs};
use crate::command::pull::fetch;
use crate::error::CliError;
use npuhal_core::stage::Session;
use npuhal_models::sampling::SamplingParams;
use npuhal_models::sequence::GenerationRequest;
use npuhal_models::stop::StopStrings;
use npuhal_models::store::Located;
use npuhal_models::{Catalogue, ModelSource, Store, Tokenizer};
use npuhal_registry::{Choice, DeviceChoice, Options, Registry, Request, select};
use std::ffi::OsStr;
use std::num::NonZeroUsize;
use std::path::PathBuf;

// The crates that submit built-in routes and devices must be named, or they submit nothing.
use npuhal_cpu as _;

/// Packages whose routes and devices are part of the program.
const BUILT_IN: [&str; 2] = ["npuhal-cpu", env!("CARGO_PKG_NAME")];

/// A model, chosen and located but not loaded.
pub(crate) struct Plan {
    pub(crate) model: ModelSource,
    pub(crate) registry: Registry,
    pub(crate) choice: Choice,
    pub(crate) options: Options,
}

/// The routes and devices of this program.
pub(crate) fn registry() -> Result<Registry, CliError> {
    Ok(Registry::collect(&BUILT_IN)?)
}

/// The file or directory of the model called `spec`, fetched if the catalogue has it and it is not here.
pub(crate) fn locate(host: &Host, spec: &OsStr) -> Result<PathBuf, CliError> {
    let store = Store::locate(host.global.models_dir.as_deref())?;
    match store.resolve(Catalogue::builtin(), spec)? {
        Located::File(path) | Located::Directory(path) => Ok(path),
        Located::Catalogued(entry) => fetch(host, &store, entry),
        other => Err(CliError::Usage(format!("{}: cannot be opened: {other:?}", spec.display()))),
    }
}

/// Chooses where `args.model` runs, and says so in one line.
pub(crate) fn plan(host: &Host, args: &ModelArgs) -> Result<Plan, CliError> {
    let device: DeviceChoice = args.device.parse().map_err(|error| CliError::Usage(format!("--device: {error}")))?;
    let numerics = args.numerics.parse().map_err(|error| CliError::Usage(format!("--numerics: {error}")))?;
    let registry = registry()?;
    let path = locate(host, &args.model)?;
    let model = ModelSource::open(&path)?;
    let options = Options {
        numerics,
        threads: args.threads.and_then(|threads| NonZeroUsize::new(threads as usize)),
        context_positions: args.context,
        ..Options::default()
    };
    let request = Request { device, options: options.clone(), ..Request::default() };
    let choice = select(&registry, &model, &request)?;
    host.voice.note(choice.decision.line());
    for trade_off in &choice.decision.trade_offs {
        host.voice.note(trade_off);
    }
    Ok(Plan { model, registry, choice, options })
}

impl Plan {
    /// Loads the model on its device.
    pub(crate) fn open(&self) -> Result<Session, CliError> {
        Ok(self.choice.open(&self.registry, &self.model, &self.options)?)
    }

    /// The model's tokenizer.
    pub(crate) fn tokenizer(&self, host: &Host) -> Result<Tokenizer, CliError> {
        let tokenizer = Tokenizer::from_vocabulary(self.model.vocabulary())?;
        if let Some(note) = tokenizer.note() {
            host.voice.note(format_args!("{}: {note}", self.model.path().display()));
        }
        Ok(tokenizer)
    }
}

impl GenerationArgs {
    /// Finds out usage errors before a model is fetched or loaded.
    pub(crate) fn check(&self) -> Result<(), CliError> {
        self.request(Vec::new(), 1).map(drop)
    }

    /// A request for the answer to `prompt`; `positions` is the context.
    pub(crate) fn request(&self, prompt: Vec<u32>, positions: usize) -> Result<GenerationRequest, CliError> {
        let sampling = SamplingParams {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: u64::from(self.top_k),
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
            ..SamplingParams::default()
        };
        sampling.validate().map_err(|error| CliError::Usage(error.to_string()))?;
        let stop = StopStrings::new(self.stop.iter().cloned()).map_err(|error| CliError::Usage(error.to_string()))?;
        let max_tokens = self.max_tokens.map_or(positions, |tokens| tokens as usize);
        Ok(GenerationRequest { sampling, stop, ..GenerationRequest::greedy(prompt, max_tokens) })
    }
}

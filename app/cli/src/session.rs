//! From a model's name to an open session: find or fetch the file, choose route and device, load.

use crate::Host;
use crate::args::{Cli, GenerationArgs, ModelArgs, SessionArgs};
use crate::command::pull::fetch;
use crate::environment::Setting;
use crate::error::CliError;
use crate::packed;
use crate::planner::settle;
use crate::terminal::complain;
use clap::CommandFactory;
use npuhal_core::stage::{Session, TokenId};
use npuhal_cpu::features::Features;
use npuhal_models::package::OpenOptions;
use npuhal_models::prompter::Prompter;
use npuhal_models::sampling::SamplingParams;
use npuhal_models::sequence::GenerationRequest;
use npuhal_models::stop::StopStrings;
use npuhal_models::store::Located;
use npuhal_models::template::{ChatInput, ChatMessage};
use npuhal_models::window::Overflow;
use npuhal_models::{Catalogue, ModelError, ModelSource, Store, Tokenizer};
use npuhal_registry::private::{open_for_addons, private_route_missing, stated_model_type};
use npuhal_registry::target::{Place, Target};
use npuhal_registry::{
    AddonSources, Choice, NpuLayers, Options, Prefer, Registry, Request, SelectionError, SelectionProblem, select,
};
use std::ffi::OsStr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

// The crates that submit built-in routes and devices must be named, or they submit nothing.
use npuhal_cpu as _;
use npuhal_xdna1 as _;
use npuhal_xdna2 as _;

/// Packages whose routes and devices are part of the program.
const BUILT_IN: [&str; 4] = ["npuhal-cpu", "npuhal-xdna1", "npuhal-xdna2", env!("CARGO_PKG_NAME")];

/// A model, chosen and located but not loaded.
pub(crate) struct Plan {
    pub(crate) model: ModelSource,
    pub(crate) registry: Registry,
    pub(crate) choice: Choice,
    pub(crate) options: Options,
}

/// The routes and devices of this program, with those of the add-ons that can be loaded. One that cannot is told.
pub(crate) fn registry(host: &Host) -> Result<Registry, CliError> {
    let mut registry = Registry::collect(&BUILT_IN)?;
    registry.reserve_commands(Cli::command().get_subcommands().map(|command| command.get_name().to_owned()))?;
    let (files, folder_error) = AddonSources::of_process(host.global.addon.clone()).files();
    let errors = registry.load_addons(&files);
    for error in folder_error.iter().chain(&errors) {
        complain(format_args!("npuhal: {error}"));
    }
    Ok(registry)
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

/// The ids of a conversation of one message, as `run` feeds them.
pub(crate) fn message_ids(model: &ModelSource, tokenizer: &Tokenizer, text: &str) -> Result<Vec<TokenId>, CliError> {
    let input = ChatInput::new(vec![ChatMessage::new("user", text)]);
    Ok(Prompter::new(model, tokenizer)?.whole(&input)?)
}

/// What `args` ask of the choice of a route.
pub(crate) fn request(registry: &Registry, args: &SessionArgs) -> Result<Request, CliError> {
    let prefer = args.prefer.as_deref().map(str::parse).transpose();
    let prefer: Option<Prefer> = prefer.map_err(|error| CliError::Usage(format!("--prefer: {error}")))?;
    let base = options(registry, args)?;
    let Target { place, options, .. } = Target::parse(&args.device, &base, &registry.option_keys())
        .map_err(|error| CliError::Usage(format!("--device: {error}")))?;
    match place {
        Place::Device(device) => Ok(Request { device, prefer, options, ..Request::default() }),
        Place::Split(_) if prefer.is_some() || options.npu_layers.is_some() => Err(CliError::Usage(format!(
            "--device {}: the device of every layer is named; leave out --prefer, --npu-layers and --npu-percent",
            args.device
        ))),
        Place::Split(split) => Ok(Request { split: Some(split), options, ..Request::default() }),
    }
}

/// The same for commands that compare sessions, each of which is named.
pub(crate) fn compared_options(registry: &Registry, args: &SessionArgs) -> Result<Options, CliError> {
    match &args.prefer {
        Some(_) => Err(CliError::Usage("--prefer is for one choice; here every device is named".to_owned())),
        None => options(registry, args),
    }
}

/// What `args` ask of a session, whatever the device.
fn options(registry: &Registry, args: &SessionArgs) -> Result<Options, CliError> {
    let numerics = args.numerics.parse().map_err(|error| CliError::Usage(format!("--numerics: {error}")))?;
    let mut options = Options {
        numerics,
        threads: args.threads.and_then(|threads| NonZeroUsize::new(threads as usize)),
        cpu_features: cpu_features(args)?,
        context_positions: args.context,
        npu_layers: npu_layers(args)?,
        kernels: kernels_folder(args)?,
        sequences: args.sequences,
        ..Options::default()
    };
    for pair in &args.npu_opt {
        options
            .set_route_pair(pair, &registry.option_keys())
            .map_err(|error| CliError::Usage(format!("--npu-opt: {error}")))?;
    }
    Ok(options)
}

/// An instruction set that this machine has.
fn cpu_features(args: &SessionArgs) -> Result<Option<String>, CliError> {
    let asked = Setting::of("--cpu-features", args.cpu_features.as_deref(), "NPUHAL_CPU_FEATURES")?;
    let Some(Setting { value, source }) = asked else { return Ok(None) };
    Features::named(&value).map_err(|error| CliError::Usage(format!("{source}: {error}")))?;
    Ok(Some(value))
}

/// Layers on the NPU, as one of the two flags says.
fn npu_layers(args: &SessionArgs) -> Result<Option<NpuLayers>, CliError> {
    if let Some(percent) = args.npu_percent {
        return Ok(Some(NpuLayers::Percent(percent)));
    }
    let Some(text) = &args.npu_layers else { return Ok(None) };
    if text == "auto" {
        return Ok(Some(NpuLayers::Auto));
    }
    let wanted = || CliError::Usage(format!("--npu-layers {text}: give a number of layers, or auto"));
    Ok(Some(NpuLayers::Count(text.parse().map_err(|_| wanted())?)))
}

/// The folder of kernels is looked at before a model is fetched or packed.
fn kernels_folder(args: &SessionArgs) -> Result<Option<PathBuf>, CliError> {
    match &args.kernels {
        Some(folder) if !folder.is_dir() => {
            Err(CliError::Usage(format!("--kernels {}: wanted a folder, found none", folder.display())))
        }
        given => Ok(given.clone()),
    }
}

/// The model at `path`. A package's files are hashed where they have changed, or where `verify` wants it, under a progress bar.
fn open_source(host: &Host, path: &Path, verify: bool) -> Result<ModelSource, ModelError> {
    let mut bar = None;
    let mut progress = |bytes: u64, total_bytes: u64| {
        bar.get_or_insert_with(|| host.voice.bar(total_bytes, "verifying")).inc(bytes);
    };
    let opened = ModelSource::open_with(path, OpenOptions { verify, control: &host.control, progress: &mut progress });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    opened
}

/// The model called `spec`, packed where the device that is asked for takes it only so; `verify` as in [`open_source`].
pub(crate) fn open_model_for(
    host: &Host,
    registry: &Registry,
    spec: &OsStr,
    request: &mut Request,
    verify: bool,
) -> Result<ModelSource, CliError> {
    let model = open_model(host, registry, spec, verify)?;
    packed::for_device(host, registry, model, request)
}

/// The model called `spec`; `verify` as in [`open_source`]. One that cannot be opened is handed to an add-on that names the type it
/// states; where there is none and only an add-on runs the type, that is said.
pub(crate) fn open_model(
    host: &Host,
    registry: &Registry,
    spec: &OsStr,
    verify: bool,
) -> Result<ModelSource, CliError> {
    let private = |path: &Path| {
        let missing = private_route_missing(registry, &stated_model_type(path)?)?;
        Some(CliError::PrivateRoute { model: path.display().to_string(), missing })
    };
    let for_addons = |path: &Path| match open_for_addons(registry, path) {
        Some(model) => Some(Ok(model)),
        None => private(path).map(Err),
    };
    // A folder need not be one of the models that are known by their files: its configuration may state such a type.
    let folder = Path::new(spec);
    if folder.is_dir() {
        let opened = open_source(host, folder, verify);
        if let Some(model) = opened.map(Ok).ok().or_else(|| for_addons(folder)) {
            return model;
        }
    }
    let path = locate(host, spec)?;
    open_source(host, &path, verify).or_else(|error| for_addons(&path).unwrap_or(Err(error.into())))
}

/// A model that was found, before it is chosen where it runs.
pub(crate) struct Prepared {
    pub(crate) model: ModelSource,
    registry: Registry,
    request: Request,
}

/// Finds the model and reads what is asked of it.
pub(crate) fn prepare(host: &Host, args: &ModelArgs) -> Result<Prepared, CliError> {
    let registry = registry(host)?;
    let mut request = request(&registry, &args.session)?;
    let model = open_model_for(host, &registry, args.name(), &mut request, args.verify)?;
    settle(host, &registry, &model, &mut request)?;
    Ok(Prepared { model, registry, request })
}

/// The same for a model that was located before.
pub(crate) fn prepare_at(host: &Host, path: &Path, args: &SessionArgs) -> Result<Prepared, CliError> {
    let registry = registry(host)?;
    let mut request = request(&registry, args)?;
    let model = open_model_for(host, &registry, path.as_os_str(), &mut request, false)?;
    settle(host, &registry, &model, &mut request)?;
    Ok(Prepared { model, registry, request })
}

/// Chooses where the model of `args` runs, and says so in one line.
pub(crate) fn plan(host: &Host, args: &ModelArgs) -> Result<Plan, CliError> {
    prepare(host, args)?.choose(host)
}

impl Prepared {
    /// Chooses a route whose window holds `prompt` positions and an answer: `answer` positions of it if there is such a route,
    /// else at least one. Where none holds the prompt, and it may be cut, the one with the largest window.
    pub(crate) fn choose_for(
        mut self,
        host: &Host,
        prompt: usize,
        answer: u32,
        overflow: Overflow,
    ) -> Result<Plan, CliError> {
        let prompt = u32::try_from(prompt).unwrap_or(u32::MAX);
        let mut largest = 0;
        for answer in [answer, 1] {
            self.request.needed_positions = prompt.saturating_add(answer);
            match self.largest_window() {
                Some(window) => largest = window,
                None => return self.choose(host),
            }
        }
        if overflow == Overflow::Truncate {
            self.request.needed_positions = largest;
        }
        self.choose(host)
    }

    /// The largest window, if none holds the request.
    fn largest_window(&self) -> Option<u32> {
        match select(&self.registry, &self.model, &self.request) {
            Err(SelectionError { problem: SelectionProblem::WindowTooSmall { window, .. }, .. }) => Some(window),
            _ => None,
        }
    }

    /// Chooses a route whatever its window.
    pub(crate) fn choose_any(self, host: &Host) -> Result<Plan, CliError> {
        self.choose(host)
    }

    fn choose(self, host: &Host) -> Result<Plan, CliError> {
        let Self { model, registry, request } = self;
        let choice = select(&registry, &model, &request)?;
        host.voice.note(choice.decision.line());
        for trade_off in &choice.decision.trade_offs {
            host.voice.note(trade_off);
        }
        Ok(Plan { model, registry, choice, options: request.options })
    }

    /// The model's tokenizer.
    pub(crate) fn tokenizer(&self, host: &Host) -> Result<Tokenizer, CliError> {
        tokenizer(host, &self.model)
    }
}

impl Plan {
    /// Loads the model on its device.
    pub(crate) fn open(&self) -> Result<Session, CliError> {
        Ok(self.choice.open(&self.registry, &self.model, &self.options)?)
    }

    /// The model's tokenizer.
    pub(crate) fn tokenizer(&self, host: &Host) -> Result<Tokenizer, CliError> {
        tokenizer(host, &self.model)
    }
}

/// The tokenizer of `model`; what it leaves out is told.
pub(crate) fn tokenizer(host: &Host, model: &ModelSource) -> Result<Tokenizer, CliError> {
    let tokenizer = Tokenizer::from_vocabulary(model.vocabulary())?;
    if let Some(note) = tokenizer.note() {
        host.voice.note(format_args!("{}: {note}", model.path().display()));
    }
    Ok(tokenizer)
}

impl GenerationArgs {
    /// Finds out usage errors before a model is fetched or loaded.
    pub(crate) fn check(&self) -> Result<(), CliError> {
        self.request(Vec::new(), 1, &SamplingParams::default()).map(drop)
    }

    /// How tokens are chosen where `suggested` is what the user does not say.
    pub(crate) fn sampling(&self, suggested: &SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(suggested.temperature),
            top_p: self.top_p.unwrap_or(suggested.top_p),
            top_k: self.top_k.map_or(suggested.top_k, u64::from),
            min_p: self.min_p.unwrap_or(suggested.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(suggested.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.iter().copied().collect(),
            seed: self.seed,
            ..suggested.clone()
        }
    }

    /// A request for the answer to `prompt`; `positions` is the context, `suggested` as in [`GenerationArgs::sampling`].
    pub(crate) fn request(
        &self,
        prompt: Vec<u32>,
        positions: usize,
        suggested: &SamplingParams,
    ) -> Result<GenerationRequest, CliError> {
        let sampling = self.sampling(suggested);
        sampling.validate().map_err(|error| CliError::Usage(error.to_string()))?;
        let stop = StopStrings::new(self.stop.iter().cloned()).map_err(|error| CliError::Usage(error.to_string()))?;
        let max_tokens = self.max_tokens.map_or(positions, |tokens| tokens as usize);
        let speculation = self.speculate;
        Ok(GenerationRequest { sampling, stop, speculation, ..GenerationRequest::greedy(prompt, max_tokens) })
    }
}

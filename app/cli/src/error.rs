//! The program's errors and its exit codes: 1 for a failure, 2 for a usage error. Commands that judge have codes of their own
//! ([`CliError::Verdict`]).

use crate::client::ApiError;
use npuhal_core::RunError;
use npuhal_models::generate::GenerateError;
use npuhal_models::package::PackageError;
use npuhal_models::perplexity::PerplexityError;
use npuhal_models::prompter::PromptError;
use npuhal_models::pull::PullError;
use npuhal_models::q4nx::PackError;
use npuhal_models::staging::StagingError;
use npuhal_models::store::StoreError;
use npuhal_models::window::WindowError;
use npuhal_models::{ModelError, TextError};
use npuhal_registry::agreement::live::LiveError;
use npuhal_registry::cost::CalibrationError;
use npuhal_registry::{ExtensionError, RegistryError, RouteError, SelectionError};
use npuhal_server::ServeError;
use npuhal_server::worker::WorkerError;
use npuhal_xdna1::kit::KitError;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum CliError {
    /// The command line asks for something that cannot be.
    #[error("{0}")]
    Usage(String),
    /// Input that cannot be used.
    #[error("{0}")]
    Unusable(String),
    #[error("writing the output: {0}")]
    Output(#[from] io::Error),
    #[error("reading the input: {0}")]
    Input(io::Error),
    #[error("127.0.0.1: no port to listen on: {0}")]
    Listen(io::Error),
    #[error("the terminal: {0}")]
    Terminal(String),
    #[error("this program's own file: {0}")]
    Program(io::Error),
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error("interrupted")]
    Interrupted,
    /// A file of items or of text.
    #[error("{path}: {reason}")]
    Dataset { path: String, reason: String },
    #[error("{}: the report cannot be written: {source}", path.display())]
    Report { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    Perplexity(#[from] PerplexityError),
    /// Everything was said on stdout; this is the exit code.
    #[error("exit code {0}")]
    Verdict(u8),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Pull(#[from] PullError),
    #[error(transparent)]
    Package(#[from] PackageError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Pack(PackError),
    /// A packed directory that is not what its GGUF file says.
    #[error("{0}")]
    Different(String),
    /// Kernels that cannot be written.
    #[error("{0}")]
    Kernels(String),
    #[error(transparent)]
    Text(#[from] TextError),
    /// A prompt that the context cannot hold.
    #[error(transparent)]
    Window(#[from] WindowError),
    #[error(transparent)]
    Kit(#[from] KitError),
    #[error(transparent)]
    Run(RunError),
    #[error(transparent)]
    Generate(#[from] GenerateError),
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Selection(#[from] SelectionError),
    #[error(transparent)]
    Route(#[from] RouteError),
    #[error(transparent)]
    Addon(#[from] ExtensionError),
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Live(Box<LiveError>),
    #[error(transparent)]
    Calibration(#[from] CalibrationError),
    /// Add-ons that cannot even be loaded without a crash.
    #[error("loading the add-ons crashed ({status}): {files}; start again without the faulty one")]
    AddonsCrashed { status: String, files: String },
    /// The model is one that only an add-on runs, which is not here.
    #[error("{model}: {missing}")]
    PrivateRoute { model: String, missing: String },
}

impl From<PromptError> for CliError {
    fn from(error: PromptError) -> Self {
        match error {
            PromptError::Package(error) => Self::Package(*error),
            PromptError::Window(error) => Self::Window(error),
            other => Self::Unusable(other.to_string()),
        }
    }
}

impl From<StagingError> for CliError {
    fn from(error: StagingError) -> Self {
        PackError::from(error).into()
    }
}

impl From<RunError> for CliError {
    fn from(error: RunError) -> Self {
        match error {
            RunError::Cancelled => Self::Interrupted,
            other => Self::Run(other),
        }
    }
}

impl From<PackError> for CliError {
    fn from(error: PackError) -> Self {
        match error {
            PackError::Stopped(RunError::Cancelled) => Self::Interrupted,
            other => Self::Pack(other),
        }
    }
}

impl CliError {
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Verdict(code) => *code,
            Self::Live(error) if matches!(**error, LiveError::Parameters(_)) => 2,
            Self::Usage(_)
            | Self::Api(ApiError::BadUrl { .. } | ApiError::KeyInTheOpen { .. } | ApiError::BadKey)
            | Self::Store(StoreError::UnknownModel { .. })
            | Self::Package(PackageError::BadId { .. } | PackageError::ReservedId { .. }) => 2,
            _ => 1,
        }
    }

    pub(crate) fn is_broken_pipe(&self) -> bool {
        match self {
            Self::Output(error) | Self::Addon(ExtensionError::Output(error)) => {
                error.kind() == io::ErrorKind::BrokenPipe
            }
            _ => false,
        }
    }
}

impl From<LiveError> for CliError {
    fn from(error: LiveError) -> Self {
        match error {
            LiveError::Run { source: RunError::Cancelled, .. } => Self::Interrupted,
            other => Self::Live(Box::new(other)),
        }
    }
}

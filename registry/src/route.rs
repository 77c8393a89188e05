//! Routes: ways to run a model.

use crate::cost::DeviceCost;
use crate::options::{Numerics, Options};
use crate::parity::Tolerance;
use crate::span::{SegmentSpan, SpanError};
use crate::uri::DeviceUri;
use npuhal_core::card::{Claim, DeviceCard};
use npuhal_core::device::Device;
use npuhal_core::error::DeviceError;
use npuhal_core::pipeline::PipelineError;
use npuhal_core::stage::{Placement, Segment, Session};
use npuhal_models::{ModelError, ModelSource};
use std::error::Error;
use std::fmt;
use thiserror::Error;

/// In [`Route::model_types`]: the route looks at the configuration, not at the name.
pub const ANY_MODEL_TYPE: &str = "*";

/// A way to run a model: on one device, or spread over several.
pub trait Route: Send + Sync {
    /// Name, unique among the routes of one origin, e.g. `cpu`.
    fn name(&self) -> &str;

    /// Model types it is asked about; [`ANY_MODEL_TYPE`] for all.
    fn model_types(&self) -> &[&str];

    /// Keys of [`Options::route_options`] that it takes.
    fn option_keys(&self) -> &[&str] {
        &[]
    }

    /// Whether and how it would run `model` on some of `devices`, which have passed their check. Cheap: no weights are read.
    fn fitness(&self, model: &ModelSource, devices: &[DeviceCard], options: &Options) -> Fitness;

    /// Opens a part of a model, for hybrids and heads.
    ///
    /// # Errors
    /// [`RouteError::NoSegments`] where the route runs whole models only.
    fn segment(&self, request: SegmentRequest<'_>) -> Result<Box<dyn Segment>, RouteError> {
        Err(RouteError::NoSegments { route: self.name().to_owned(), span: request.span })
    }

    /// Opens a part of a model on `device` (an address with its parameters), for sessions spread over devices. By default
    /// [`Route::segment`], as routes have it that open no device.
    ///
    /// # Errors
    /// As [`Route::segment`], and whatever keeps the device from being opened.
    fn segment_on(
        &self,
        request: SegmentRequest<'_>,
        device: &str,
        host: &dyn Host,
    ) -> Result<Box<dyn Segment>, RouteError> {
        let _ = (device, host);
        self.segment(request)
    }

    /// How it would run the part `span` alone on `device`, with the options of [`Route::segment_on`]; `None` where a part runs as
    /// [`Route::fitness`] says of the whole.
    fn part_service(
        &self,
        model: &ModelSource,
        span: &SegmentSpan,
        device: &DeviceCard,
        options: &Options,
    ) -> Option<Service> {
        let _ = (model, span, device, options);
        None
    }

    /// How far its results may be from those of exact arithmetic, for parity.
    fn tolerance(&self, model: &ModelSource, options: &Options) -> Tolerance {
        let _ = (model, options);
        Tolerance::default()
    }

    /// How near its results are to those of `twin`, the CPU's arithmetic that rounds where it rounds; `None` where `twin` is not
    /// its twin, or is that of another form of it.
    fn twin_tolerance(&self, model: &ModelSource, options: &Options, twin: Numerics) -> Option<Tolerance> {
        let _ = (model, options, twin);
        None
    }

    /// What a decoded token would cost on `device`, for the planner of hybrid placements; `None` where nothing is known.
    fn cost(&self, model: &ModelSource, device: &DeviceCard, options: &Options) -> Option<DeviceCost> {
        let _ = (model, device, options);
        None
    }

    /// Opens a whole model, as its [`Route::fitness`] said.
    ///
    /// # Errors
    /// Whatever keeps the model from being loaded.
    fn open(&self, request: OpenRequest<'_>) -> Result<Session, RouteError>;
}

/// A reason, for people: what was wanted, what was found, what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reason(pub String);

impl Reason {
    /// A reason from text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a route does not run a model, and what follows from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decline {
    /// Not this route's kind of model. Silent.
    NotMine,
    /// The route could not improve on the others here; they take over. Silent.
    Optional(Reason),
    /// The route would run the model but cannot now; the others take over, and the user is told.
    Unavailable(Reason),
    /// The model cannot be run without this route: an error, unless a route of a later origin serves.
    Required(Reason),
}

impl Decline {
    /// Whether the user is told without asking.
    #[must_use]
    pub fn is_told(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::Required(_))
    }

    /// The reason, where there is one.
    #[must_use]
    pub fn reason(&self) -> Option<&Reason> {
        match self {
            Self::NotMine => None,
            Self::Optional(reason) | Self::Unavailable(reason) | Self::Required(reason) => Some(reason),
        }
    }
}

/// Expected speed of decoding, in classes: enough to rank routes that have no measured figure. Ascending.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum SpeedClass {
    /// Made for exactness or as a twin, not for speed.
    Reference,
    /// The host processor.
    Cpu,
    /// Layers on an NPU and on the host.
    Hybrid,
    /// One dispatch of a whole decoder a token.
    Engine,
    /// One runlist a token.
    Lane,
}

impl fmt::Display for SpeedClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reference => "reference",
            Self::Cpu => "cpu",
            Self::Hybrid => "hybrid",
            Self::Engine => "engine",
            Self::Lane => "lane",
        })
    }
}

/// A decode speed, and how it is known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpectedSpeed {
    /// Tokens a second.
    pub tokens_per_second: f64,
    /// How the figure is known.
    pub claim: Claim,
}

/// A kernel that a service runs, and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelOrigin {
    /// The kernel, e.g. `smollm-engine (30 layers)`.
    pub kernel: String,
    /// Where it comes from, e.g. `built in`, or who made it and the folder it lies in.
    pub origin: String,
}

impl KernelOrigin {
    const BUILT_IN: &'static str = "built in";

    /// A kernel that is part of the program.
    #[must_use]
    pub fn built_in(kernel: impl Into<String>) -> Self {
        Self { kernel: kernel.into(), origin: Self::BUILT_IN.to_owned() }
    }

    /// Whether it is part of the program.
    #[must_use]
    pub fn is_built_in(&self) -> bool {
        self.origin == Self::BUILT_IN
    }
}

/// How a route would run a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Service {
    /// Id of the device that does the main part.
    pub device: String,
    /// Positions of a sequence: prompt and answer together.
    pub window: u32,
    /// Where each part would run.
    pub placement: Vec<Placement>,
    /// Expected class of speed.
    pub speed: SpeedClass,
    /// Expected decode speed, where known.
    pub expected: Option<ExpectedSpeed>,
    /// Memory for weights and KV cache, in bytes, where known.
    pub memory_bytes: Option<u64>,
    /// Kernels it would run, each with its origin; empty where the route does not say.
    pub kernels: Vec<KernelOrigin>,
    /// What is worth saying beside the device's name, e.g. `AVX2, 2 threads, numerics fast`; may be empty.
    pub detail: String,
}

/// A route's answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Fitness {
    /// It would run the model like this.
    Serves(Service),
    /// It would not.
    Declines(Decline),
}

/// A part of a model to open.
pub struct SegmentRequest<'a> {
    /// The model.
    pub model: &'a ModelSource,
    /// The part.
    pub span: SegmentSpan,
    /// Options of the whole session.
    pub options: &'a Options,
    /// Positions of each sequence; `None` as [`Options::context_positions`].
    pub positions: Option<u32>,
}

/// A whole model to open.
pub struct OpenRequest<'a> {
    /// The model.
    pub model: &'a ModelSource,
    /// What [`Route::fitness`] promised.
    pub service: &'a Service,
    /// Usable devices, as [`Route::fitness`] was shown them.
    pub devices: &'a [DeviceCard],
    /// Options.
    pub options: &'a Options,
    /// Devices and foreign segments.
    pub host: &'a dyn Host,
}

/// What a route may ask of its host while it opens a session. A backend never imports another: what it needs of one comes
/// from here.
pub trait Host {
    /// Opens the device with the id `id`, with the parameters the user gave for it.
    ///
    /// # Errors
    /// [`RouteError::NoDevice`], [`RouteError::Device`].
    fn open_device(&self, id: &str) -> Result<Box<dyn Device>, RouteError>;

    /// Opens a part of a model through the route called `route`.
    ///
    /// # Errors
    /// [`RouteError::NoRoute`], and whatever [`Route::segment`] returns.
    fn open_segment(&self, route: &str, request: SegmentRequest<'_>) -> Result<Box<dyn Segment>, RouteError>;

    /// The pinned device's address with its parameters, if the user pinned one.
    fn pinned(&self) -> Option<&DeviceUri>;
}

/// A route could not open what it was asked for.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RouteError {
    /// The route opens whole models only.
    #[error("route {route} runs whole models only; asked for layers {}..{}", span.layers.start, span.layers.end)]
    NoSegments {
        /// The route.
        route: String,
        /// What was asked for.
        span: SegmentSpan,
    },
    /// No such route.
    #[error("there is no route '{route}'; known routes: {known}")]
    NoRoute {
        /// What was asked for.
        route: String,
        /// Names, separated by commas.
        known: String,
    },
    /// No such device.
    #[error("there is no device '{device}'; found: {known}")]
    NoDevice {
        /// What was asked for.
        device: String,
        /// Ids, separated by commas.
        known: String,
    },
    /// The route does not run this model after all.
    #[error("route {route} cannot run this model: {reason}")]
    Declined {
        /// The route.
        route: String,
        /// Why.
        reason: Reason,
    },
    /// The model's files.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The span.
    #[error(transparent)]
    Span(#[from] SpanError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The segments do not form a model.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// An error of the backend's own.
    #[error("route {route}: {source}")]
    Backend {
        /// The route.
        route: String,
        /// The backend's error.
        source: Box<dyn Error + Send + Sync>,
    },
}

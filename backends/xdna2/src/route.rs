//! The lane's route: packed Qwen3 models on second-generation NPUs.

use crate::dimensions::{Dimensions, LaneDecline};
use crate::kernels::{HEAD_FILE, KernelError, KernelFiles, KernelTarget, Kernels, LAYER_FILES, PDI_FILE};
use crate::lane::{Lane, LaneError, LaneOptions};
use crate::source::{PackedModel, check_tensors};
use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::pipeline::Pipeline;
use npuhal_core::stage::{Placement, Segment, Session, Yields};
use npuhal_models::ModelSource;
use npuhal_models::q4nx::directory;
use npuhal_models::source::Format;
use npuhal_registry::{
    Decline, Fitness, KernelOrigin, Numerics, OpenRequest, Options, Reason, Route, RouteError, Service, SpeedClass,
    Tolerance,
};
use std::path::PathBuf;

/// Name of the route.
pub const NAME: &str = "xdna2-lane";
/// The lane runs `qwen3`. Directories of `qwen2` can be packed, and are told why they do not run.
const MODEL_TYPES: [&str; 2] = ["qwen3", "qwen2"];

/// Four times what `npuhal parity` measures between the lane on the virtual NPU and its twin, with random weights in Qwen3-0.6B's
/// shape and 4 drawn ids: 1 - cosine is at most 6.7e-5 (the small models in the tests need 0.001) and the error 0.059 of the root mean
/// square. The likeliest token was the same everywhere; the bound of near ties is that of the small models.
const TWIN_TOLERANCE: Tolerance = Tolerance { cosine: 0.999, relative_error: 0.25, near_tie: 0.25 };

/// Runs packed Qwen3 models with one kernel a layer and one runlist a token.
///
/// | It declines | where |
/// |---|---|
/// | [`Decline::NotMine`] | a file is not packed, and of another type than `qwen3` |
/// | [`Decline::Optional`] | there is no NPU for it; a file that is not packed does not fit the lane: others run it |
/// | [`Decline::Unavailable`] | a packed model does not fit the lane; there are no kernels, or others; the model has to be packed first |
/// | [`Decline::Required`] | kernels that the user has named cannot be used |
pub struct LaneRoute;

impl Route for LaneRoute {
    fn name(&self) -> &str {
        NAME
    }

    fn model_types(&self) -> &[&str] {
        &MODEL_TYPES
    }

    fn fitness(&self, model: &ModelSource, devices: &[DeviceCard], options: &Options) -> Fitness {
        match survey(model, devices, options) {
            Err(decline) => Fitness::Declines(decline),
            Ok(_) if !is_packed(model) => Fitness::Declines(Decline::Unavailable(Reason::new(
                "it is not packed; a device that is named (--device npu5) has it packed into the cache",
            ))),
            Ok(survey) => Fitness::Serves(survey.service()),
        }
    }

    fn twin_tolerance(&self, _: &ModelSource, _: &Options, twin: Numerics) -> Option<Tolerance> {
        (twin == Numerics::Xdna2).then_some(TWIN_TOLERANCE)
    }

    fn open(&self, request: OpenRequest<'_>) -> Result<Session, RouteError> {
        let OpenRequest { model, service, devices, options, host } = request;
        let survey = survey(model, devices, options).map_err(|decline| RouteError::Declined {
            route: NAME.to_owned(),
            reason: decline.reason().cloned().unwrap_or_else(|| Reason::new("it is of another type")),
        })?;
        let source = PackedModel::new(model.clone()).map_err(|decline| backend(decline.into()))?;
        let defaults = LaneOptions::default();
        let lane_options = LaneOptions {
            positions: Some(service.window),
            threads: options.threads.unwrap_or(defaults.threads),
            ..defaults
        };
        let device = host.open_device(&service.device)?;
        let lane = Lane::load(device, Box::new(source), &survey.files, lane_options).map_err(backend)?;
        let segments: Vec<Box<dyn Segment>> = vec![Box::new(lane)];
        Ok(Session::Stepper(Box::new(Pipeline::new(segments, model.config().layers)?)))
    }
}

impl LaneRoute {
    /// What [`Route::fitness`] would say once the model is packed.
    #[must_use]
    pub fn fitness_once_packed(&self, model: &ModelSource, devices: &[DeviceCard], options: &Options) -> Fitness {
        match survey(model, devices, options) {
            Err(decline) => Fitness::Declines(decline),
            Ok(survey) => Fitness::Serves(survey.service()),
        }
    }
}

fn backend(error: LaneError) -> RouteError {
    RouteError::Backend { route: NAME.to_owned(), source: error.into() }
}

fn is_packed(model: &ModelSource) -> bool {
    model.format() == Format::Q4nx
}

/// Everything that is known before weights are read.
struct Survey<'a> {
    card: &'a DeviceCard,
    folder: PathBuf,
    files: KernelFiles,
    dimensions: Dimensions,
    kernels: Kernels,
    window: u32,
}

fn survey<'a>(model: &ModelSource, devices: &'a [DeviceCard], options: &Options) -> Result<Survey<'a>, Decline> {
    if !is_packed(model) && (model.format() != Format::Gguf || model.config().model_type != MODEL_TYPES[0]) {
        return Err(Decline::NotMine);
    }
    let Some(card) = devices.iter().find(|card| card.generation == Generation::Xdna2) else {
        let reason = "no second-generation NPU (npu4, npu5, npu6) is among the usable devices";
        return Err(Decline::Optional(Reason::new(reason)));
    };
    let of_model = |decline: LaneDecline| {
        let reason = Reason::new(decline.to_string());
        if is_packed(model) { Decline::Unavailable(reason) } else { Decline::Optional(reason) }
    };
    let dimensions = Dimensions::of(model.config()).map_err(of_model)?;
    if is_packed(model) {
        check_tensors(model).map_err(of_model)?;
    }
    let named = options.kernels.clone();
    let is_named = named.is_some();
    let of_kernels = |reason: String| {
        let reason = Reason::new(reason);
        if is_named { Decline::Required(reason) } else { Decline::Unavailable(reason) }
    };
    let Some(folder) = named.or_else(|| is_packed(model).then(|| model.path().join(directory::KERNELS))) else {
        return Err(of_kernels(format!("no kernels are known for it; {}", where_to_get(model, card))));
    };
    let files = KernelFiles::read(&folder).map_err(|error| {
        of_kernels(match error {
            KernelError::Declined(missing @ LaneDecline::MissingFile { .. }) => {
                format!("{missing}; {}", where_to_get(model, card))
            }
            other => other.to_string(),
        })
    })?;
    match (KernelTarget::of(&folder, &files), card.is_virtual) {
        (KernelTarget::Virtual, false) => {
            return Err(of_kernels(LaneDecline::VirtualKernels { folder }.to_string()));
        }
        (KernelTarget::Hardware, true) => {
            return Err(of_kernels(LaneDecline::CompiledKernels { folder }.to_string()));
        }
        _ => {}
    }
    let kernels = Kernels::new(&files, &dimensions).map_err(|error| of_kernels(error.to_string()))?;
    let window = window(model, &kernels, options).map_err(of_model)?;
    Ok(Survey { card, folder, files, dimensions, kernels, window })
}

/// What a user without kernels can do.
fn where_to_get(model: &ModelSource, card: &DeviceCard) -> String {
    match card.is_virtual {
        true => format!("`npuhal kit xdna2 --model {}` writes them for the virtual NPU", model.path().display()),
        false => "name the folder that has them with --kernels DIR".to_owned(),
    }
}

/// Positions: what was asked for, or all that both kernels and model have.
fn window(model: &ModelSource, kernels: &Kernels, options: &Options) -> Result<u32, LaneDecline> {
    let trained = u32::try_from(model.config().context_length).unwrap_or(u32::MAX);
    let most = trained.min(kernels.positions());
    match options.context_positions {
        None => Ok(most),
        Some(asked) if (1..=most).contains(&asked) => Ok(asked),
        Some(asked) => Err(LaneDecline::Positions { asked, kernels: kernels.positions(), trained }),
    }
}

impl Survey<'_> {
    fn service(&self) -> Service {
        let Self { card, folder, dimensions, kernels, window, .. } = self;
        let whose = if card.is_virtual { "kernels of the virtual NPU" } else { "kernels" };
        Service {
            device: card.id.clone(),
            window: *window,
            placement: vec![Placement {
                layers: 0..dimensions.layers,
                device: card.id.clone(),
                yields: Yields::Logits,
            }],
            // The virtual NPU is made to be right, not to be fast.
            speed: if card.is_virtual { SpeedClass::Reference } else { SpeedClass::Lane },
            expected: None,
            memory_bytes: Some(Lane::memory_bytes(dimensions, kernels)),
            kernels: self.kernel_origins(),
            detail: format!("{whose} in {}", folder.display()),
        }
    }

    /// The files, by what they are. What they were made for is checked by then.
    fn kernel_origins(&self) -> Vec<KernelOrigin> {
        let made = if self.card.is_virtual { "written for the virtual NPU" } else { "compiled elsewhere" };
        let origin = format!("{made}, in {}", self.folder.display());
        let head = KernelFiles::find(&self.folder).ok().and_then(|paths| Some(paths.head.file_name()?.to_owned()));
        let head = head.map_or_else(|| HEAD_FILE.to_owned(), |name| name.to_string_lossy().into_owned());
        let kernel = |kernel: String| KernelOrigin { kernel, origin: origin.clone() };
        vec![
            kernel(format!("layer ({})", LAYER_FILES.join(", "))),
            kernel(format!("head ({head})")),
            kernel(format!("array configuration ({PDI_FILE})")),
        ]
    }
}

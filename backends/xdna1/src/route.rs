//! The route of the lane: where an xdna1 package runs on a first-generation NPU, and how.
//!
//! One route, four placements. All layers on the NPU go through the single-dispatch engine, or through chunked graphs where the
//! user or the kit wants it so; leading layers on the NPU go through chunked graphs, the rest runs on the CPU; no layer on the
//! NPU is the CPU alone. What the CPU does comes as segments from the host.

use crate::chunk::{ChunkFormat, LAYERS_PER_DISPATCH};
use crate::error::LaneError;
use crate::kit::{Design, KIT_FILE, KIT_FOLDER, Kit, KitError, KitOrigin};
use crate::layout::{POSITIONS, check_widths};
use crate::placement::LayerPlacement;
use crate::segment::{
    ChunkPlan, Chunked, DISPATCH_TIMEOUT, Engine, NpuHead, SegmentError, SegmentOptions, Timed,
    VIRTUAL_DISPATCH_TIMEOUT,
};
use crate::settings::{KEYS, Settings};
use crate::weights::PackageWeights;
use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::device::Device;
use npuhal_core::pipeline::Pipeline;
use npuhal_core::stage::{Control, Placement, Segment, Session, Takes, Yields};
use npuhal_models::package::{Family, OpenOptions, Package, PackageError, Shape};
use npuhal_models::source::Format;
use npuhal_models::{ModelConfig, ModelError, ModelSource};
use npuhal_registry::{
    CostSource, Decline, DeviceCost, Fitness, Host, KernelOrigin, NpuLayers, Numerics, OpenRequest, Options, Reason,
    Route, RouteError, SegmentRequest, SegmentSpan, Service, SpeedClass, Tolerance,
};
use std::error::Error;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use thiserror::Error;

/// Name of the route.
pub const NAME: &str = "xdna1";
/// Wall time of a dispatch that does next to nothing, as published.
const DISPATCH_SECONDS: f64 = 0.38e-3;
/// Route that the CPU's parts come from.
const CPU_ROUTE: &str = "cpu";

/// With weights of 8 bits, as [`Tolerance::default`] was found: 1 - cosine is at most 0.0374, the error 4.28 of the root mean square,
/// and the two highest logits 0.279 apart.
const W8_TOLERANCE: Tolerance = Tolerance { cosine: 0.925, relative_error: 8.6, near_tie: 0.6 };
/// Four times what `npuhal parity` measures between an engine on the virtual NPU and its twin: with Qwen2.5-Coder-0.5B (from its
/// Q4_K_M file) and a prompt of 37, 1 - cosine is at most 2.0e-4 and the error 0.114 of the root mean square; with SmolLM2-135M and a
/// prompt of 40 all taps but the logits have the same bits. The likeliest token was the same everywhere; the bound of near ties is
/// that of the small models in the tests.
const TWIN_TOLERANCE: Tolerance = Tolerance { cosine: 0.999, relative_error: 0.45, near_tie: 0.25 };

/// Runs xdna1 packages on first-generation NPUs.
pub struct Xdna1Route;

impl Route for Xdna1Route {
    fn name(&self) -> &str {
        NAME
    }

    fn model_types(&self) -> &[&str] {
        &["llama", "qwen2"]
    }

    fn option_keys(&self) -> &[&str] {
        &KEYS
    }

    fn fitness(&self, model: &ModelSource, devices: &[DeviceCard], options: &Options) -> Fitness {
        let unavailable = |reason: String| Fitness::Declines(Decline::Unavailable(Reason::new(reason)));
        let Some(card) = devices.iter().find(|card| card.generation == Generation::Xdna1) else {
            // The user is told only where an NPU was asked for.
            let reason = Reason::new("no first-generation NPU is among the usable devices");
            let is_asked = options.npu_layers.is_some();
            return Fitness::Declines(if is_asked { Decline::Unavailable(reason) } else { Decline::Optional(reason) });
        };
        if model.format() != Format::Xdna1Package {
            // A model of another size can never be converted.
            return match template(model) {
                Some(_) => unavailable("make an xdna1 package of the model first, with `npuhal convert`".to_owned()),
                None => Fitness::Declines(Decline::NotMine),
            };
        }
        match Plan::new(model, options).and_then(|plan| plan.for_device(card)) {
            Ok(plan) => Fitness::Serves(plan.service(card, model)),
            Err(Problem::Kit(KitError::Missing { path })) if card.is_virtual => unavailable(format!(
                "{}: no kit is there; `npuhal kit xdna1 -m {}` writes one for the virtual NPU",
                path.display(),
                model.path().display()
            )),
            Err(problem) => unavailable(problem.to_string()),
        }
    }

    fn segment_on(
        &self,
        request: SegmentRequest<'_>,
        device: &str,
        host: &dyn Host,
    ) -> Result<Box<dyn Segment>, RouteError> {
        let SegmentRequest { model, span, options, positions } = request;
        if span.takes == Takes::Normed || span.layers.is_empty() {
            return Err(RouteError::NoSegments { route: NAME.to_owned(), span });
        }
        // The graphs hand on the residual stream.
        if span.yields != Yields::Hidden {
            let layers = span.layers.end;
            let reason =
                format!("its graphs have no norm and no head; end the parts with {layers}..@cpu, which has no layers");
            return Err(RouteError::Declined { route: NAME.to_owned(), reason: Reason::new(reason) });
        }
        let mut options = part_options(&span, options);
        options.context_positions = positions.or(options.context_positions);
        let plan = Plan::new(model, &options).map_err(declined)?;
        let device: Arc<dyn Device> = Arc::from(host.open_device(device)?);
        let plan = plan.for_device(device.card()).map_err(declined)?;
        let service = plan.service(device.card(), model);
        let opening = Opening { model, options: &options, host, service: &service, plan: &plan };
        opening.chunks_from(span.layers.start, device)
    }

    fn part_service(
        &self,
        model: &ModelSource,
        span: &SegmentSpan,
        device: &DeviceCard,
        options: &Options,
    ) -> Option<Service> {
        let plan = Plan::new(model, &part_options(span, options)).ok()?;
        Some(plan.part_service(device, model))
    }

    fn tolerance(&self, _: &ModelSource, options: &Options) -> Tolerance {
        match Settings::of(&options.route_options) {
            Ok(settings) if settings.w8 => W8_TOLERANCE,
            _ => Tolerance::default(),
        }
    }

    fn twin_tolerance(&self, model: &ModelSource, options: &Options, twin: Numerics) -> Option<Tolerance> {
        let plan = Plan::new(model, options).ok()?;
        let twin_of_engine = match plan.family {
            Family::Llama => Numerics::Xdna1SmolLm,
            Family::Qwen2 => Numerics::Xdna1Qwen,
        };
        (plan.form == Form::Engine && twin == twin_of_engine).then_some(TWIN_TOLERANCE)
    }

    fn cost(&self, model: &ModelSource, device: &DeviceCard, _: &Options) -> Option<DeviceCost> {
        if model.format() != Format::Xdna1Package || device.generation != Generation::Xdna1 {
            return None;
        }
        let family = Family::from_model_type(&model.config().model_type).ok()?;
        // Published by whom `source` names: time on the NPU of a token's chunked dispatches, and the engine's decode rate.
        let (format, chunked_seconds, engine_rate) = match family {
            Family::Llama => (ChunkFormat::SmolLmBf16, 50e-3, 74.61),
            Family::Qwen2 => (ChunkFormat::QwenBf16, 590e-3, 28.83),
        };
        let (layers, per_dispatch) = (family.shape().layers, LAYERS_PER_DISPATCH);
        let fixed_seconds = DISPATCH_SECONDS * layers.div_ceil(per_dispatch) as f64;
        let layer_bytes = format.layer_bytes() as u64;
        Some(DeviceCost {
            layer_bytes,
            bytes_per_second: layer_bytes as f64 * layers as f64 / (chunked_seconds - fixed_seconds),
            dispatch_seconds: DISPATCH_SECONDS,
            layers_per_dispatch: per_dispatch,
            head_seconds: None,
            whole_seconds: (model.config().layers == layers).then_some(1.0 / engine_rate),
            source: CostSource::Published("c8dhjp4tyv-bit/hawkpoint-npu-llm".to_owned()),
        })
    }

    fn open(&self, request: OpenRequest<'_>) -> Result<Session, RouteError> {
        let OpenRequest { model, service, devices, options, host } = request;
        let mut plan = Plan::new(model, options).map_err(declined)?;
        if let Some(card) = devices.iter().find(|card| card.id == service.device) {
            plan = plan.for_device(card).map_err(declined)?;
        }
        let opening = Opening { model, options, host, service, plan: &plan };
        let segments = opening.segments()?;
        Ok(Session::Stepper(Box::new(Pipeline::new(segments, model.config().layers)?)))
    }
}

fn declined(problem: Problem) -> RouteError {
    RouteError::Declined { route: NAME.to_owned(), reason: Reason::new(problem.to_string()) }
}

/// The family whose graphs could run the model once it is a package.
fn template(model: &ModelSource) -> Option<Family> {
    let config = model.config();
    Family::from_model_type(&config.model_type)
        .ok()
        .filter(|family| shape_of(config) == family.shape() && config.rms_norm_eps == family.norm_epsilon())
}

fn shape_of(config: &ModelConfig) -> Shape {
    Shape {
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        heads: config.heads,
        kv_heads: config.kv_heads,
        layers: config.layers,
        vocab_size: config.vocab_size,
    }
}

/// Options of layers alone: chunked graphs run them, which are the same wherever in the model they are.
fn part_options(span: &SegmentSpan, options: &Options) -> Options {
    let count = u32::try_from(span.layers.len()).unwrap_or(u32::MAX);
    let mut options = Options { npu_layers: Some(NpuLayers::Count(count)), ..options.clone() };
    options.route_options.insert("engine".to_owned(), "off".to_owned());
    options
}

/// Why a model cannot be placed.
#[derive(Debug, Error)]
enum Problem {
    #[error("{0}")]
    Setting(String),
    #[error(
        "RMSNorm adds {found:e} to the mean of squares in this model; the {} designs have {:e} compiled in; \
         run it on the CPU (--npu-layers 0)",
        family.name(), family.norm_epsilon()
    )]
    NormEpsilon { family: Family, found: f32 },
    #[error(transparent)]
    Placement(#[from] crate::PlacementError),
    #[error(transparent)]
    Kit(#[from] KitError),
    #[error(transparent)]
    Lane(#[from] LaneError),
    #[error(transparent)]
    Package(#[from] PackageError),
}

/// How the layers run on the NPU.
#[derive(Debug, Clone, PartialEq)]
enum Form {
    /// None does.
    None,
    /// All, in one dispatch.
    Engine,
    /// In chunks.
    Chunks { format: ChunkFormat, plan: ChunkPlan },
}

/// A placement that the kit can serve.
#[derive(Debug, Clone)]
struct Plan {
    family: Family,
    shape: Shape,
    settings: Settings,
    layers: LayerPlacement,
    form: Form,
    /// The kit, where a layer runs on the NPU.
    kit: Option<Kit>,
    /// Why the engine is not used although it could be.
    note: &'static str,
    /// Arithmetic of a head that the CPU runs alone.
    head_numerics: Numerics,
    window: u32,
}

impl Plan {
    fn new(model: &ModelSource, options: &Options) -> Result<Self, Problem> {
        let settings = Settings::of(&options.route_options).map_err(Problem::Setting)?;
        let shape = shape_of(model.config());
        let family = Family::from_model_type(&model.config().model_type)?;
        check_widths(NAME, family, family, shape)?;
        let window = window(options)?;
        let layers = layers(shape.layers, options.npu_layers)?;
        check_settings(&settings, family, layers)?;
        let mut plan = Self {
            family,
            shape,
            settings,
            layers,
            form: Form::None,
            kit: None,
            note: "",
            head_numerics: options.numerics,
            window,
        };
        if !layers.npu().is_empty() {
            let found = model.config().rms_norm_eps;
            if found != family.norm_epsilon() {
                return Err(Problem::NormEpsilon { family, found });
            }
            let kit = Kit::read(&kernels_folder(model, options))?;
            (plan.form, plan.note) = form(&kit, &settings, family, shape, layers)?;
            if plan.has_npu_head() {
                kit.find(Design::W8Projection, shape.layers, shape)?;
            }
            plan.kit = Some(kit);
        }
        plan.check_final_norm()?;
        Ok(plan)
    }

    /// The same for `card`: the virtual NPU executes no compiled code, and its own designs do nothing on hardware.
    fn for_device(self, card: &DeviceCard) -> Result<Self, Problem> {
        let Some(kit) = &self.kit else { return Ok(self) };
        let reason = match (kit.manifest().origin, card.is_virtual) {
            (KitOrigin::Virtual, true) | (KitOrigin::Imported, false) => return Ok(self),
            (KitOrigin::Virtual, false) => {
                "wanted compiled designs, found those of the virtual NPU, which do nothing on hardware; make a kit of compiled \
                 ones with `npuhal kit import`, or name its folder with --kernels"
            }
            (KitOrigin::Imported, true) => {
                "wanted designs of the virtual NPU, which executes no compiled code, found imported ones; write them with \
                 `npuhal kit xdna1 --out DIR` and name DIR with --kernels"
            }
        };
        let (path, field) = (kit.folder().join(KIT_FILE), "origin".to_owned());
        Err(KitError::Manifest { path, field, reason: reason.to_owned() }.into())
    }

    /// Whether the final norm is where it was asked for.
    fn check_final_norm(&self) -> Result<(), Problem> {
        let reason = match (self.settings.cpu_final_norm, &self.form) {
            (Some(true), Form::Engine) => {
                "cpu_final_norm=on: the engine has the final norm inside; with engine=off it runs on the CPU"
            }
            (Some(false), Form::Chunks { .. }) => {
                "cpu_final_norm=off: no design computes the final norm alone; only the engine has it"
            }
            (Some(false), Form::None) => "cpu_final_norm=off: no layer runs on the NPU",
            _ => return Ok(()),
        };
        Err(Problem::Setting(reason.to_owned()))
    }

    /// Kernels of the kit and of the CPU that the plan runs.
    fn kernels(&self) -> Vec<KernelOrigin> {
        let on_cpu = |numerics: Numerics| KernelOrigin::built_in(format!("cpu {numerics}"));
        let Some(kit) = &self.kit else { return vec![on_cpu(self.settings.cpu_stage)] };
        let manifest = kit.manifest();
        let made = match manifest.origin {
            KitOrigin::Virtual => "written for the virtual NPU",
            KitOrigin::Imported => "compiled elsewhere",
        };
        let tools: Vec<String> = manifest.toolchain.iter().map(|(name, version)| format!("{name} {version}")).collect();
        let tools = if tools.is_empty() { String::new() } else { format!(" with {}", tools.join(", ")) };
        let origin = format!("{made}{tools}, in {}", kit.folder().display());
        let mut kernels = Vec::new();
        let mut add = |design: Design, layers: usize| {
            let of_layers = match (design, layers) {
                (Design::W8Projection, _) => String::new(),
                (_, 1) => " (1 layer)".to_owned(),
                _ => format!(" ({layers} layers)"),
            };
            let kernel = KernelOrigin { kernel: format!("{design}{of_layers}"), origin: origin.clone() };
            if !kernels.contains(&kernel) {
                kernels.push(kernel);
            }
        };
        match &self.form {
            Form::None => {}
            Form::Engine => {
                add(Design::engine(self.family), self.shape.layers);
                if self.family == Family::Qwen2 && kit.kernels_of(Design::QwenEnginePrefill).next().is_some() {
                    add(Design::QwenEnginePrefill, self.shape.layers);
                }
            }
            Form::Chunks { format, plan } => {
                plan.chunks.iter().for_each(|chunk| add(Design::of_chunk(*format), chunk.len()));
            }
        }
        if self.has_npu_head() {
            add(Design::W8Projection, self.shape.layers);
        }
        let has_stage = matches!(self.form, Form::Chunks { .. });
        let has_head = if has_stage { !self.has_npu_head() } else { self.family == Family::Llama };
        kernels.extend(has_stage.then(|| on_cpu(self.settings.cpu_stage)));
        if has_head && !(has_stage && self.head_numerics == self.settings.cpu_stage) {
            kernels.push(on_cpu(self.head_numerics));
        }
        kernels
    }

    /// Whether the int8 projection runs the head.
    fn has_npu_head(&self) -> bool {
        self.settings.npu_head && self.family == Family::Llama && self.layers.cpu().is_empty()
    }

    fn service(&self, card: &DeviceCard, model: &ModelSource) -> Service {
        let cpu = self.settings.cpu_stage;
        let detail = match &self.form {
            Form::None => format!("no layer on the NPU; CPU numerics {cpu}"),
            Form::Engine if self.family == Family::Qwen2 => {
                "one dispatch a token, final norm and head in it".to_owned()
            }
            Form::Engine => "one dispatch a token, final norm in it, head on the CPU".to_owned(),
            Form::Chunks { format, plan } => {
                let rest = match self.layers.cpu().len() {
                    0 => "final norm".to_owned(),
                    count => format!("{count} layers and final norm"),
                };
                let head = if self.has_npu_head() { "int8 head on the NPU" } else { "head on the CPU" };
                format!("{}, {rest} on the CPU ({cpu}), {head}{}", dispatches(*format, plan), self.note)
            }
        };
        Service {
            device: card.id.clone(),
            window: self.window,
            placement: self.placement(&card.id),
            speed: match self.form {
                Form::None => SpeedClass::Reference,
                Form::Engine => SpeedClass::Engine,
                Form::Chunks { .. } => SpeedClass::Hybrid,
            },
            expected: None,
            memory_bytes: Some(self.npu_bytes() + self.cpu_bytes(model)),
            kernels: self.kernels(),
            detail,
        }
    }

    /// The layers on the NPU alone.
    fn part_service(&self, card: &DeviceCard, model: &ModelSource) -> Service {
        let mut service = self.service(card, model);
        service.placement.retain(|part| part.device == card.id && part.yields == Yields::Hidden);
        service.kernels.retain(|kernel| !kernel.is_built_in());
        service.memory_bytes = Some(self.npu_bytes());
        if let Form::Chunks { format, plan } = &self.form {
            service.detail = dispatches(*format, plan);
        }
        service
    }

    /// Bytes of the device buffers.
    fn npu_bytes(&self) -> u64 {
        let buffers = |design: Design, layers: usize| {
            let arguments = design.arguments(self.shape, layers).unwrap_or_default();
            arguments.iter().map(|argument| argument.bytes).sum::<u64>()
        };
        let layers = match &self.form {
            Form::None => 0,
            Form::Engine => buffers(Design::engine(self.family), self.shape.layers),
            Form::Chunks { format, plan } => {
                plan.chunks.iter().map(|chunk| buffers(Design::of_chunk(*format), chunk.len())).sum()
            }
        };
        layers + if self.has_npu_head() { buffers(Design::W8Projection, self.shape.layers) } else { 0 }
    }

    /// Bytes of the weights that the CPU reads.
    fn cpu_bytes(&self, model: &ModelSource) -> u64 {
        let has_head = !(self.has_npu_head() || self.form == Form::Engine && self.family == Family::Qwen2);
        let head = model.head().map_or(0, |head| head.bytes().len() as u64);
        let layers = model.tensors().filter_map(|(role, tensor)| match role {
            npuhal_models::TensorRole::Layer(layer, _) if self.layers.cpu().contains(&layer) => {
                Some(tensor.bytes().len() as u64)
            }
            _ => None,
        });
        layers.sum::<u64>() + if has_head { head } else { 0 }
    }

    fn placement(&self, device: &str) -> Vec<Placement> {
        let place =
            |layers: Range<usize>, device: &str, yields| Placement { layers, device: device.to_owned(), yields };
        let (npu, end) = (self.layers.npu(), self.shape.layers);
        match self.form {
            Form::None => vec![place(0..end, CPU_ROUTE, Yields::Logits)],
            Form::Engine if self.family == Family::Qwen2 => vec![place(npu, device, Yields::Logits)],
            Form::Engine => vec![place(npu, device, Yields::Normed), place(end..end, CPU_ROUTE, Yields::Logits)],
            Form::Chunks { .. } => {
                let head = if self.has_npu_head() { device } else { CPU_ROUTE };
                vec![
                    place(npu, device, Yields::Hidden),
                    place(self.layers.cpu(), CPU_ROUTE, Yields::Normed),
                    place(end..end, head, Yields::Logits),
                ]
            }
        }
    }
}

fn dispatches(format: ChunkFormat, plan: &ChunkPlan) -> String {
    let weights = if format == ChunkFormat::SmolLmW8 { ", int8 weights" } else { "" };
    match plan.chunks.len() {
        1 => format!("1 dispatch a token{weights}"),
        count => format!("{count} dispatches a token{weights}"),
    }
}

fn window(options: &Options) -> Result<u32, Problem> {
    let most = POSITIONS as u32;
    match options.context_positions {
        None => Ok(most),
        Some(positions) if (1..=most).contains(&positions) => Ok(positions),
        Some(positions) => {
            Err(Problem::Setting(format!("a context of {positions} positions was asked for; the designs have {most}")))
        }
    }
}

fn layers(count: usize, asked: Option<NpuLayers>) -> Result<LayerPlacement, Problem> {
    Ok(match asked {
        None => LayerPlacement::new(count, None, None)?,
        Some(NpuLayers::Count(layers)) => LayerPlacement::new(count, Some(layers as usize), None)?,
        Some(NpuLayers::Percent(percent)) => LayerPlacement::new(count, None, Some(percent))?,
        Some(other) => {
            return Err(Problem::Setting(format!("layers on the NPU cannot be {other:?} here; give a number")));
        }
    })
}

/// Settings that cannot be together.
fn check_settings(settings: &Settings, family: Family, layers: LayerPlacement) -> Result<(), Problem> {
    let bad = |reason: &str| Err(Problem::Setting(reason.to_owned()));
    if settings.w8 && family == Family::Qwen2 {
        return bad("w8=on: only the SmolLM graphs have int8 weights");
    }
    if settings.npu_head && family == Family::Qwen2 && !settings.engine {
        return bad("npu_head=on: the Qwen head runs on the NPU inside the engine only; leave engine on");
    }
    if settings.npu_head && !layers.cpu().is_empty() {
        return bad("npu_head=on: the head follows the last layer, which runs on the CPU");
    }
    Ok(())
}

/// The engine where it can be, else chunks.
fn form(
    kit: &Kit,
    settings: &Settings,
    family: Family,
    shape: Shape,
    layers: LayerPlacement,
) -> Result<(Form, &'static str), Problem> {
    let wants_engine =
        settings.engine && layers.cpu().is_empty() && (family == Family::Qwen2 || !settings.w8 && !settings.npu_head);
    let design = Design::engine(family);
    let mut note = "";
    if wants_engine {
        let has_engine = kit.kernels_of(design).next().is_some();
        let has_chunks = kit.kernels_of(chunk_design(settings, family)).next().is_some();
        // A kernel that is there but does not fit is an error, not a reason for the slower form.
        if has_engine || !has_chunks {
            kit.find(design, shape.layers, shape)?;
            return Ok((Form::Engine, note));
        }
        note = "; the kit has no engine";
    }
    let format = chunk_format(settings, family);
    let plan = ChunkPlan::new(kit, format, shape, layers.npu().len(), settings.chunk)?;
    Ok((Form::Chunks { format, plan }, note))
}

fn chunk_format(settings: &Settings, family: Family) -> ChunkFormat {
    match family {
        Family::Llama if settings.w8 => ChunkFormat::SmolLmW8,
        Family::Llama => ChunkFormat::SmolLmBf16,
        Family::Qwen2 => ChunkFormat::QwenBf16,
    }
}

fn chunk_design(settings: &Settings, family: Family) -> Design {
    Design::of_chunk(chunk_format(settings, family))
}

fn kernels_folder(model: &ModelSource, options: &Options) -> PathBuf {
    options.kernels.clone().unwrap_or_else(|| model.path().join(KIT_FOLDER))
}

/// A session that is being opened.
struct Opening<'a> {
    model: &'a ModelSource,
    options: &'a Options,
    host: &'a dyn Host,
    service: &'a Service,
    plan: &'a Plan,
}

impl Opening<'_> {
    fn segments(&self) -> Result<Vec<Box<dyn Segment>>, RouteError> {
        let Plan { layers, form, kit, .. } = self.plan;
        let end = self.model.config().layers;
        let Some(kit) = kit else {
            // No device is opened for what does not run on it.
            return Ok(vec![self.cpu(0..end, Takes::Tokens, Yields::Logits, "cpu_decoder")?]);
        };
        let device: Arc<dyn Device> = Arc::from(self.host.open_device(&self.service.device)?);
        let options = self.segment_options(&device);
        let package = self.package()?;
        let theta = package.metadata().rope_theta;
        let weights = PackageWeights::new(&package).map_err(|error| backend(error.into()))?;
        let mut segments: Vec<Box<dyn Segment>> = Vec::new();
        if let Form::Chunks { format, plan } = form {
            let chunked = Chunked::load(Arc::clone(&device), weights.clone(), theta, kit, *format, plan, options);
            segments.push(Box::new(chunked.map_err(of_segment)?));
            segments.push(self.cpu(layers.cpu(), Takes::Hidden, Yields::Normed, "cpu_decoder")?);
            segments.push(if self.plan.has_npu_head() {
                Box::new(NpuHead::load(device, &weights, kit, options).map_err(of_segment)?)
            } else {
                self.cpu(end..end, Takes::Normed, Yields::Logits, "cpu_lm_head")?
            });
        } else {
            let engine = Engine::load(device, weights, theta, kit, options).map_err(of_segment)?;
            let has_head = engine.yields() == Yields::Logits;
            segments.push(Box::new(engine));
            if !has_head {
                segments.push(self.cpu(end..end, Takes::Normed, Yields::Logits, "cpu_lm_head")?);
            }
        }
        Ok(segments)
    }

    /// As many layers as the plan has on the NPU, from layer `first` on, alone and in chunks.
    fn chunks_from(&self, first: usize, device: Arc<dyn Device>) -> Result<Box<dyn Segment>, RouteError> {
        let (Form::Chunks { format, plan }, Some(kit)) = (&self.plan.form, &self.plan.kit) else {
            let reason = Reason::new("its kit has no chunked graphs, which run a part of a model's layers");
            return Err(RouteError::Declined { route: NAME.to_owned(), reason });
        };
        let options = self.segment_options(&device);
        let package = self.package()?;
        let theta = package.metadata().rope_theta;
        let weights = PackageWeights::new(&package).map_err(|error| backend(error.into()))?;
        let plan = plan.moved_to(first);
        let chunked = Chunked::load(device, weights, theta, kit, *format, &plan, options).map_err(of_segment)?;
        Ok(Box::new(chunked))
    }

    fn segment_options(&self, device: &Arc<dyn Device>) -> SegmentOptions {
        let settings = &self.plan.settings;
        let mut options = SegmentOptions::new(self.service.window, self.timeout(device.card()));
        options.keeps_prefix = settings.prefix_cache;
        options.profiles = settings.profile;
        if let Some(threads) = self.options.threads {
            options.threads = threads;
        }
        options
    }

    /// A part on the CPU: layers and norms in the arithmetic of the lane's CPU stage, a head alone in that of the session.
    fn cpu(
        &self,
        layers: Range<usize>,
        takes: Takes,
        yields: Yields,
        name: &'static str,
    ) -> Result<Box<dyn Segment>, RouteError> {
        let Settings { cpu_stage, profile, .. } = self.plan.settings;
        let numerics: Numerics = if takes == Takes::Normed { self.options.numerics } else { cpu_stage };
        let options = Options { numerics, npu_layers: None, ..self.options.clone() };
        let request = SegmentRequest {
            model: self.model,
            span: SegmentSpan { layers, takes, yields },
            options: &options,
            positions: Some(self.service.window),
        };
        let segment = self.host.open_segment(CPU_ROUTE, request)?;
        Ok(if profile { Box::new(Timed::new(segment, name)) } else { segment })
    }

    /// The package itself: the model as the host sees it has no int8 codes. Its files were verified when the model was opened.
    fn package(&self) -> Result<Package, RouteError> {
        let options = OpenOptions { verify: false, control: &Control::new(), progress: &mut |_, _| () };
        Package::open(self.model.path(), options).map_err(|error| RouteError::Model(ModelError::from(error)))
    }

    fn timeout(&self, card: &DeviceCard) -> std::time::Duration {
        let usual = if card.is_virtual { VIRTUAL_DISPATCH_TIMEOUT } else { DISPATCH_TIMEOUT };
        self.plan.settings.timeout.unwrap_or(usual)
    }
}

fn of_segment(error: SegmentError) -> RouteError {
    match error {
        SegmentError::Device(error) => RouteError::Device(error),
        other => backend(other.into()),
    }
}

fn backend(source: Box<dyn Error + Send + Sync>) -> RouteError {
    RouteError::Backend { route: NAME.to_owned(), source }
}

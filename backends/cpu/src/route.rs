//! The CPU's route and device factory.

use crate::activations::Precision;
use crate::config::check_config;
use crate::device::{CpuDevice, DEVICE_ID, cpu_card};
use crate::exact::{ExactOptions, ExactSegment};
use crate::fast::{CpuOptions, FastSegment};
use crate::features::Features;
use crate::kv::cache_bytes;
use crate::twin::{self, Lane, TwinOptions, TwinSegment, XDNA2_POSITIONS, Xdna2Options, Xdna2Segment};
use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::device::Device;
use npuhal_core::error::DeviceError;
use npuhal_core::pipeline::Pipeline;
use npuhal_core::stage::{Placement, Segment, Session};
use npuhal_models::package::CONTEXT_POSITIONS;
use npuhal_models::{ModelConfig, ModelSource, TensorRole};
use npuhal_registry::{
    ANY_MODEL_TYPE, CostSource, Decline, DeviceAddress, DeviceCost, DeviceFactory, DeviceUri, Fitness, KernelOrigin,
    Numerics, OpenRequest, Options, Reason, Route, RouteError, SegmentRequest, SegmentSpan, Service, SpeedClass,
    Tolerance, Unavailable,
};
use std::num::NonZeroUsize;

/// Name of the route and of the factory.
pub const NAME: &str = "cpu";

/// Until the machine is calibrated: the head of SmolLM2-135M, 49,152 × 576 elements of f32, takes about 5 ms on the CPU of a Phoenix
/// or Hawk Point machine.
const PUBLISHED_BYTES_PER_SECOND: f64 = 49_152.0 * 576.0 * 4.0 / 5e-3;
const PUBLISHED_BY: &str = "c8dhjp4tyv-bit/hawkpoint-npu-llm, CPU head of SmolLM2-135M";

/// Four times what `npuhal parity` measures against `exact` on SmolLM2-135M (Q4_1) and Qwen2.5-Coder-0.5B (Q4_K_M), with 24 drawn
/// ids of the seeds 0 and 1 and a prompt of 45: 1 - cosine is at most 2.4e-5 and the error 0.111 of the root mean square. The
/// largest error of a logit is 0.076, so twice that may turn two of them round; four times is allowed.
const FAST_TOLERANCE: Tolerance = Tolerance { cosine: 0.9999, relative_error: 0.45, near_tie: 0.3 };
/// The same for inputs of 8 bits: 1 - cosine is at most 0.0129 and the error 2.44, both on SmolLM2, whose second layer has a few
/// elements much larger than the others. Where SmolLM2 finds another token likeliest (seeds 0 to 3), the two highest logits are at
/// most 0.161 apart; four times is allowed.
const INT8_TOLERANCE: Tolerance = Tolerance { cosine: 0.95, relative_error: 10.0, near_tie: 0.65 };

/// Runs any model on the host processor.
pub struct CpuRoute;

impl Route for CpuRoute {
    fn name(&self) -> &str {
        NAME
    }

    fn model_types(&self) -> &[&str] {
        &[ANY_MODEL_TYPE]
    }

    fn fitness(&self, model: &ModelSource, devices: &[DeviceCard], options: &Options) -> Fitness {
        let Some(card) = devices.iter().find(|card| card.generation == Generation::Cpu) else {
            return Fitness::Declines(Decline::Optional(Reason::new("the CPU is not among the usable devices")));
        };
        let window = check_config(model.config())
            .map_err(|error| error.to_string())
            .and_then(|()| check_numerics(model, options.numerics))
            .and_then(|()| positions(model, None, options));
        let numerics = offer(options);
        match (window, numerics) {
            (Err(reason), _) | (_, Err(reason)) => Fitness::Declines(Decline::Unavailable(Reason::new(reason))),
            (Ok(window), Ok(numerics)) => Fitness::Serves(service(model, card, options, window, &numerics)),
        }
    }

    fn segment(&self, request: SegmentRequest<'_>) -> Result<Box<dyn Segment>, RouteError> {
        open_segment(request)
    }

    fn tolerance(&self, _: &ModelSource, options: &Options) -> Tolerance {
        match options.numerics {
            Numerics::Exact => Tolerance::EXACT,
            Numerics::Fast => FAST_TOLERANCE,
            Numerics::Int8 => INT8_TOLERANCE,
            // A bf16 residual stream.
            _ => Tolerance::default(),
        }
    }

    fn cost(&self, model: &ModelSource, device: &DeviceCard, _: &Options) -> Option<DeviceCost> {
        if device.generation != Generation::Cpu {
            return None;
        }
        let config = model.config();
        let bytes = |is_it: fn(TensorRole) -> bool| {
            let tensors = model.tensors().filter(|(role, _)| is_it(*role));
            tensors.map(|(_, tensor)| tensor.bytes().len() as u64).sum::<u64>()
        };
        let layers = bytes(|role| matches!(role, TensorRole::Layer(..)));
        let head = model.head().ok()?.bytes().len() as u64;
        Some(DeviceCost {
            layer_bytes: layers / u64::try_from(config.layers).ok().filter(|layers| *layers > 0)?,
            bytes_per_second: PUBLISHED_BYTES_PER_SECOND,
            dispatch_seconds: 0.0,
            layers_per_dispatch: 0,
            head_seconds: Some(head as f64 / PUBLISHED_BYTES_PER_SECOND),
            whole_seconds: None,
            source: CostSource::Published(PUBLISHED_BY.to_owned()),
        })
    }

    fn open(&self, request: OpenRequest<'_>) -> Result<Session, RouteError> {
        let OpenRequest { model, options, service, .. } = request;
        let span = SegmentSpan::whole(model.config());
        let segment = open_segment(SegmentRequest { model, span, options, positions: Some(service.window) })?;
        Ok(Session::Stepper(Box::new(Pipeline::new(vec![segment], model.config().layers)?)))
    }
}

/// Checks that `model` is one that `numerics` computes.
fn check_numerics(model: &ModelSource, numerics: Numerics) -> Result<(), String> {
    if numerics == Numerics::Xdna2 {
        return twin::check_xdna2(model).map_err(|error| error.to_string());
    }
    check_rows(model, numerics)?;
    match lane(numerics) {
        Some(lane) => twin::check_config(model.config(), lane).map_err(|error| error.to_string()),
        None => Ok(()),
    }
}

/// The kernels take weights as rows; a matrix of tiles is for other devices, their twin, and the reference.
fn check_rows(model: &ModelSource, numerics: Numerics) -> Result<(), String> {
    match model.tiled_tensors().next().filter(|_| numerics != Numerics::Exact) {
        None => Ok(()),
        Some((_, tensor)) => Err(format!(
            "{} is stored as {}, which the CPU computes with in the numerics exact and xdna2 only; use the GGUF file the \
             directory was made from",
            tensor.name(),
            tensor.kind().name()
        )),
    }
}

/// What a numerics means for the choice of a route.
struct Offer {
    speed: SpeedClass,
    /// Bytes of the KV cache of a sequence of so many positions.
    kv_bytes: fn(&ModelConfig, usize) -> u64,
    /// Instruction set in use; empty where it makes no difference.
    instructions: &'static str,
}

fn offer(options: &Options) -> Result<Offer, String> {
    match options.numerics {
        Numerics::Xdna1SmolLm
        | Numerics::Xdna1SmolLmChunk
        | Numerics::Xdna1Qwen
        | Numerics::Xdna1Cpu
        | Numerics::Xdna2 => {
            let kv_bytes = |config: &ModelConfig, positions| config.kv_bytes(positions, size_of::<f32>());
            Ok(Offer { speed: SpeedClass::Reference, kv_bytes, instructions: "" })
        }
        Numerics::Exact => {
            let kv_bytes = |config: &ModelConfig, positions| config.kv_bytes(positions, size_of::<f64>());
            Ok(Offer { speed: SpeedClass::Reference, kv_bytes, instructions: "" })
        }
        Numerics::Fast | Numerics::Int8 => {
            let kv_bytes = |config: &ModelConfig, positions| cache_bytes(config, 0..config.layers, positions);
            Ok(Offer { speed: SpeedClass::Cpu, kv_bytes, instructions: features(options)?.name() })
        }
        other => Err(format!("numerics {other} is not one of this backend; available: {}", Numerics::ALLOWED)),
    }
}

fn service(model: &ModelSource, card: &DeviceCard, options: &Options, window: u32, offer: &Offer) -> Service {
    let config = model.config();
    let span = SegmentSpan::whole(config);
    let sequences = u64::from(options.sequences.unwrap_or(1));
    let rows = model.tensors().map(|(_, tensor)| tensor.bytes().len() as u64).sum::<u64>();
    let tiles = model.tiled_tensors().map(|(_, tensor)| tensor.len_bytes() as u64).sum::<u64>();
    let kv = (offer.kv_bytes)(config, window as usize).saturating_mul(sequences);
    let threads = threads(options);
    let threads = if threads.get() == 1 { "1 thread".to_owned() } else { format!("{threads} threads") };
    let detail = [offer.instructions, &threads, &format!("numerics {}", options.numerics)];
    let kernels = match offer.instructions {
        "" => format!("cpu {}", options.numerics),
        instructions => format!("cpu {} ({instructions})", options.numerics),
    };
    Service {
        device: card.id.clone(),
        window,
        placement: vec![Placement { layers: span.layers, device: card.id.clone(), yields: span.yields }],
        speed: offer.speed,
        expected: None,
        memory_bytes: Some(rows.saturating_add(tiles).saturating_add(kv)),
        kernels: vec![KernelOrigin::built_in(kernels)],
        detail: detail.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", "),
    }
}

/// The instruction set that was asked for, or the best.
fn features(options: &Options) -> Result<Features, String> {
    Features::named(options.cpu_features.as_deref().unwrap_or("auto")).map_err(|error| error.to_string())
}

/// The part of the xdna1 lane whose twin a numerics is.
fn lane(numerics: Numerics) -> Option<Lane> {
    match numerics {
        Numerics::Xdna1SmolLm => Some(Lane::SmolLm),
        Numerics::Xdna1SmolLmChunk => Some(Lane::SmolLmChunk),
        Numerics::Xdna1Qwen => Some(Lane::Qwen),
        Numerics::Xdna1Cpu => Some(Lane::Cpu),
        _ => None,
    }
}

/// Positions that the lane has whose twin `numerics` is.
fn lane_positions(numerics: Numerics) -> Option<u32> {
    match numerics {
        Numerics::Xdna2 => Some(XDNA2_POSITIONS),
        other => lane(other).map(|_| CONTEXT_POSITIONS),
    }
}

/// Positions of a sequence: what was asked for, or all the model was trained for, or all the lane has.
fn positions(model: &ModelSource, asked: Option<u32>, options: &Options) -> Result<u32, String> {
    let trained = u32::try_from(model.config().context_length).unwrap_or(u32::MAX);
    let numerics = options.numerics;
    if let Some(held) = lane_positions(numerics) {
        let most = trained.min(held);
        return match asked.or(options.context_positions) {
            None => Ok(most),
            Some(0) => Err("a context of 0 positions was asked for; wanted at least 1".to_owned()),
            Some(positions) if positions > most => {
                Err(format!("a context of {positions} positions was asked for; numerics {numerics} has {most}"))
            }
            Some(positions) => Ok(positions),
        };
    }
    match asked.or(options.context_positions) {
        None => Ok(trained),
        Some(0) => Err("a context of 0 positions was asked for; wanted at least 1".to_owned()),
        Some(positions) if positions > trained => {
            Err(format!("a context of {positions} positions was asked for; the model was trained for {trained}"))
        }
        Some(positions) => Ok(positions),
    }
}

fn threads(options: &Options) -> NonZeroUsize {
    options.threads.or_else(|| std::thread::available_parallelism().ok()).unwrap_or(NonZeroUsize::MIN)
}

fn open_segment(request: SegmentRequest<'_>) -> Result<Box<dyn Segment>, RouteError> {
    let SegmentRequest { model, span, options, positions: asked } = request;
    let declined = |reason| RouteError::Declined { route: NAME.to_owned(), reason: Reason::new(reason) };
    let positions = positions(model, asked, options).map_err(declined)?;
    let sequences = options.sequences.unwrap_or(1);
    let backend = |source| RouteError::Backend { route: NAME.to_owned(), source };
    if let Some(lane) = lane(options.numerics) {
        let twin = TwinOptions { lane, positions, sequences, threads: threads(options) };
        let segment = TwinSegment::open(model, span, twin);
        return Ok(Box::new(segment.map_err(|error| backend(error.into()))?));
    }
    match options.numerics {
        Numerics::Exact => {
            let exact = ExactOptions { sequences, ..ExactOptions::new(positions, threads(options)) };
            let segment = ExactSegment::open(model, span, exact);
            Ok(Box::new(segment.map_err(|error| backend(error.into()))?))
        }
        Numerics::Fast | Numerics::Int8 => {
            let precision = if options.numerics == Numerics::Int8 { Precision::Bits8 } else { Precision::Bits15 };
            let features = features(options).map_err(declined)?;
            let fast =
                CpuOptions { sequences, precision, features, ..CpuOptions::new(positions, threads(options).get()) };
            let segment = FastSegment::load(model, span, fast);
            Ok(Box::new(segment.map_err(|error| backend(error.into()))?))
        }
        Numerics::Xdna2 => {
            let twin = Xdna2Options { positions, sequences, threads: threads(options) };
            let segment = Xdna2Segment::open(model, span, twin);
            Ok(Box::new(segment.map_err(|error| backend(error.into()))?))
        }
        other => Err(declined(offer(options).err().unwrap_or_else(|| format!("numerics {other} cannot be opened")))),
    }
}

/// Finds the host processor: it is always there.
pub struct CpuFactory;

impl DeviceFactory for CpuFactory {
    fn name(&self) -> &str {
        NAME
    }

    fn generations(&self) -> &[Generation] {
        &[Generation::Cpu]
    }

    fn enumerate(&self) -> Vec<DeviceCard> {
        vec![cpu_card()]
    }

    fn check(&self, _: &DeviceCard) -> Result<(), Unavailable> {
        Ok(())
    }

    /// Takes the parameter `memory_bytes`: what all buffers of the device may take together.
    fn open(&self, uri: &DeviceUri) -> Result<Box<dyn Device>, DeviceError> {
        let unsupported = |feature: String| DeviceError::Unsupported {
            device: DEVICE_ID.to_owned(),
            feature,
            remedy: "cpu takes memory_bytes=NUMBER".to_owned(),
        };
        if uri.address != DeviceAddress::Cpu {
            return Err(unsupported(format!("the address '{uri}'")));
        }
        let mut memory_bytes = None;
        for (key, value) in &uri.parameters {
            match (key.as_str(), value.parse::<u64>()) {
                ("memory_bytes", Ok(bytes)) => memory_bytes = Some(bytes),
                _ => return Err(unsupported(format!("the device parameter {key}={value}"))),
            }
        }
        Ok(Box::new(CpuDevice::new(memory_bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exact::tests::random_model;
    use npuhal_core::stage::{Control, HiddenRows, Row, SequenceId, Want};
    use npuhal_registry::{DeviceChoice, Registry, Request, SelectionProblem, select};

    fn request(pairs: &[&str]) -> Request {
        let mut request = Request::default();
        pairs.iter().for_each(|pair| request.options.set_pair(pair, &[]).unwrap());
        request
    }

    fn registry() -> Registry {
        Registry::collect(&["npuhal-cpu"]).unwrap()
    }

    #[test]
    fn the_crate_submits_its_route_and_factory() {
        let registry = registry();
        let routes: Vec<&str> = registry.routes().iter().map(|known| known.route.name()).collect();
        let factories: Vec<&str> = registry.factories().iter().map(|known| known.factory.name()).collect();
        assert_eq!((routes, factories), (vec!["cpu"], vec!["cpu"]));
    }

    #[test]
    fn a_model_is_chosen_opened_and_stepped() {
        let (_file, model) = random_model(|_| ());
        let registry = registry();
        let request = request(&["numerics=exact", "threads=2", "context=16"]);
        let choice = select(&registry, &model, &request).unwrap();
        assert_eq!(choice.decision.line(), "this build has no NPU backend; using the CPU (2 threads, numerics exact)");
        assert_eq!((choice.service.window, choice.service.speed), (16, SpeedClass::Reference));
        assert_eq!(choice.service.placement[0].layers, 0..model.config().layers);
        let Ok(Session::Stepper(mut stepper)) = choice.open(&registry, &model, &request.options) else {
            panic!("the CPU opens steppers")
        };
        assert_eq!((stepper.capacity().positions, stepper.vocab_size()), (16, model.config().vocab_size));
        let row = Row { sequence: SequenceId(0), token: 1, position: 0 };
        let mut logits = HiddenRows::new();
        stepper.step(&[row], Want::Last, &mut logits, &Control::new()).unwrap();
        assert_eq!((logits.rows(), logits.width()), (1, model.config().vocab_size));
    }

    #[test]
    fn what_cannot_be_served_is_said() {
        let (_file, model) = random_model(|_| ());
        let problem = |pairs: &[&str]| select(&registry(), &model, &request(pairs)).unwrap_err().to_string();
        let message = problem(&["numerics=exact", "context=1000000"]);
        assert!(
            message.contains("a context of 1000000 positions was asked for; the model was trained for 64"),
            "{message}"
        );
        let pinned = Request { device: "npu5".parse::<DeviceChoice>().unwrap(), ..request(&["numerics=exact"]) };
        let error = select(&registry(), &model, &pinned).unwrap_err();
        assert!(matches!(error.problem, SelectionProblem::NoSuchDevice { .. }), "{error}");
    }

    #[test]
    fn a_configuration_that_cannot_run_is_declined_with_its_field() {
        let (_file, model) = random_model(|_| ());
        let mut config = model.config().clone();
        config.kv_heads = 3;
        let error = check_config(&config).unwrap_err();
        assert!(error.to_string().contains("kv_heads is 3 for 4 query heads"), "{error}");
    }

    #[test]
    fn the_instruction_set_can_be_chosen() {
        let (_file, model) = random_model(|_| ());
        let ask = |name: &str| {
            let request = request(&["numerics=int8", "threads=1", &format!("cpu-features={name}")]);
            select(&registry(), &model, &request).map(|choice| choice.decision.line())
        };
        let line = ask("portable").unwrap();
        assert!(line.contains("portable, 1 thread, numerics int8"), "{line}");
        let error = ask("mmx").unwrap_err().to_string();
        assert!(error.contains("the instruction set 'mmx' cannot be used here"), "{error}");
    }

    #[test]
    fn parameters_of_the_device_are_checked() {
        let open = |text: &str| CpuFactory.open(&text.parse().unwrap());
        assert_eq!(open("cpu?memory_bytes=4096").unwrap().card().memory_bytes, Some(4096));
        for text in ["cpu?memory_bytes=lots", "cpu?colour=red", "npu1"] {
            let error = open(text).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains("cpu takes memory_bytes=NUMBER"), "{text}: {error}");
        }
    }
}

//! A model spread over any devices that open parts of models.

use crate::options::Options;
use crate::parity::Tolerance;
use crate::registry::{RegisteredRoute, Registry};
use crate::route::{
    ANY_MODEL_TYPE, Decline, Fitness, Host, KernelOrigin, OpenRequest, Reason, Route, RouteError, SegmentRequest,
    Service, SpeedClass,
};
use crate::selection::{Request, RouteOutcome, select};
use crate::span::SegmentSpan;
use crate::uri::{DeviceAddress, DeviceChoice, DeviceUri};
use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::pipeline::Pipeline;
use npuhal_core::stage::{Placement, Segment, Session, Takes, Yields};
use npuhal_models::ModelSource;
use std::ops::Range;

/// Name of [`SplitRoute`].
pub const NAME: &str = "split";

/// Layers, `4..12`; a side that is left out is an end of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSpan {
    start: Option<usize>,
    end: Option<usize>,
}

impl LayerSpan {
    /// Reads `START..END`, `START..`, `..END` or `..`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (start, end) = text.split_once("..")?;
        let bound = |text: &str| if text.is_empty() { Some(None) } else { text.parse().ok().map(Some) };
        Some(Self { start: bound(start)?, end: bound(end)? })
    }

    /// The layers in a model of `layers` layers; they may lie outside it.
    #[must_use]
    pub fn resolve(self, layers: usize) -> Range<usize> {
        self.start.unwrap_or(0)..self.end.unwrap_or(layers)
    }
}

impl From<Range<usize>> for LayerSpan {
    fn from(range: Range<usize>) -> Self {
        Self { start: Some(range.start), end: Some(range.end) }
    }
}

/// Layers on one device.
#[derive(Debug, Clone, PartialEq)]
pub struct SplitPart {
    /// The layers.
    pub layers: LayerSpan,
    /// The device.
    pub device: DeviceUri,
    /// Options of this part.
    pub options: Options,
}

/// Layers by device, in order. The embedding goes with the first part, the final norm and the head with the last.
#[derive(Debug, Clone, PartialEq)]
pub struct Split {
    /// The parts.
    pub parts: Vec<SplitPart>,
}

impl Split {
    /// The device that counts as the session's own: the first that is not the CPU, or else the first.
    #[must_use]
    pub fn main_device(&self) -> DeviceChoice {
        let main = self.parts.iter().find(|part| part.device.address != DeviceAddress::Cpu).or(self.parts.first());
        main.map_or(DeviceChoice::Auto, |part| DeviceChoice::Pinned(part.device.clone()))
    }

    /// What each part covers of a model of `layers` layers.
    ///
    /// # Errors
    /// The first joint that does not fit, for people.
    pub fn spans(&self, layers: usize) -> Result<Vec<SegmentSpan>, String> {
        let mut next = 0;
        let mut spans = Vec::new();
        for (index, part) in self.parts.iter().enumerate() {
            let range = part.layers.resolve(layers);
            let is_last = index + 1 == self.parts.len();
            if range.start != next || range.end < range.start || range.end > layers {
                return Err(format!(
                    "layers {}..{} on {} after layer {next} of {layers}; parts follow each other without a gap",
                    range.start, range.end, part.device
                ));
            }
            if range.is_empty() && !is_last {
                return Err(format!("no layers on {}; only the last part may have none, for the head", part.device));
            }
            next = range.end;
            spans.push(SegmentSpan {
                takes: if index == 0 { Takes::Tokens } else { Takes::Hidden },
                yields: if is_last { Yields::Logits } else { Yields::Hidden },
                layers: range,
            });
        }
        if next != layers || spans.is_empty() {
            return Err(format!("the parts end at layer {next} of {layers}"));
        }
        Ok(spans)
    }
}

/// The route of a split: every part by the best route of its device that opens parts of models.
pub struct SplitRoute {
    registry: Registry,
    split: Split,
}

/// A part with the routes that may open it, best first.
struct PlannedPart<'a> {
    part: &'a SplitPart,
    span: SegmentSpan,
    routes: Vec<(RegisteredRoute, Service)>,
    generation: Generation,
}

impl SplitRoute {
    /// Spreads models as `split` says, over the routes and devices of `registry`.
    #[must_use]
    pub fn new(registry: Registry, split: Split) -> Self {
        Self { registry, split }
    }

    fn plan(&self, model: &ModelSource) -> Result<Vec<PlannedPart<'_>>, String> {
        let spans = self.split.spans(model.config().layers)?;
        let planned = |(part, span)| self.plan_part(model, part, span);
        self.split.parts.iter().zip(spans).map(planned).collect()
    }

    fn plan_part<'a>(
        &self,
        model: &ModelSource,
        part: &'a SplitPart,
        span: SegmentSpan,
    ) -> Result<PlannedPart<'a>, String> {
        let device = DeviceChoice::Pinned(part.device.clone());
        let request = Request { device, options: part.options.clone(), ..Request::default() };
        let choice = select(&self.registry, model, &request).map_err(|error| format!("{}: {error}", part.device))?;
        let id = part.device.id();
        let card = choice.decision.devices.iter().find(|report| report.card.id == id);
        let generation = card.map_or(Generation::Cpu, |report| report.card.generation);
        let winner = choice.decision.winner;
        let mut reports: Vec<_> = choice.decision.routes.iter().enumerate().collect();
        reports.sort_by_key(|(index, _)| Some(*index) != winner);
        let routes = reports.into_iter().filter_map(|(_, report)| {
            let RouteOutcome::Serves(service) = &report.outcome else { return None };
            let is_it = |known: &&RegisteredRoute| known.route.name() == report.name && known.origin == report.origin;
            let known = self.registry.routes().iter().find(is_it)?.clone();
            let options = part.options.limited_to(known.route.option_keys());
            let alone = card.and_then(|device| known.route.part_service(model, &span, &device.card, &options));
            Some((known, alone.unwrap_or_else(|| service.clone())))
        });
        let routes = routes.collect();
        Ok(PlannedPart { part, span, routes, generation })
    }
}

impl PlannedPart<'_> {
    fn window(&self) -> u32 {
        self.routes.first().map_or(0, |(_, service)| service.window)
    }

    fn open(&self, model: &ModelSource, window: u32, host: &dyn Host) -> Result<Box<dyn Segment>, RouteError> {
        let mut refused = None;
        for (known, _) in &self.routes {
            let options = self.part.options.limited_to(known.route.option_keys());
            let request = SegmentRequest { model, span: self.span.clone(), options: &options, positions: Some(window) };
            match known.route.segment_on(request, &self.part.device.to_string(), host) {
                Err(error @ RouteError::NoSegments { .. }) => refused = Some(error),
                other => return other,
            }
        }
        Err(refused.unwrap_or_else(|| RouteError::NoSegments { route: NAME.to_owned(), span: self.span.clone() }))
    }
}

impl Route for SplitRoute {
    fn name(&self) -> &str {
        NAME
    }

    fn model_types(&self) -> &[&str] {
        &[ANY_MODEL_TYPE]
    }

    fn option_keys(&self) -> &[&str] {
        &[]
    }

    fn fitness(&self, model: &ModelSource, _: &[DeviceCard], _: &Options) -> Fitness {
        let parts = match self.plan(model) {
            Ok(parts) => parts,
            Err(reason) => return Fitness::Declines(Decline::Unavailable(Reason::new(reason))),
        };
        let main = parts.iter().find(|part| part.generation != Generation::Cpu).or(parts.first());
        let speed = if parts.iter().all(|part| part.generation == Generation::Cpu) {
            parts.iter().filter_map(|part| part.routes.first()).map(|(_, service)| service.speed).min()
        } else {
            Some(SpeedClass::Hybrid)
        };
        let describe = |part: &PlannedPart<'_>| {
            let (route, service) = part.routes.first().map(|(known, service)| (known.route.name(), service)).unzip();
            let detail = service.map_or("", |service| service.detail.as_str());
            let layers = &part.span.layers;
            let detail = if detail.is_empty() { String::new() } else { format!(" ({detail})") };
            format!("{}..{} by {}{detail}", layers.start, layers.end, route.unwrap_or_default())
        };
        Fitness::Serves(Service {
            device: main.map_or_else(String::new, |part| part.part.device.id()),
            window: parts.iter().map(PlannedPart::window).min().unwrap_or(0),
            placement: parts
                .iter()
                .map(|part| Placement {
                    layers: part.span.layers.clone(),
                    device: part.part.device.id(),
                    yields: part.span.yields,
                })
                .collect(),
            speed: speed.unwrap_or(SpeedClass::Cpu),
            expected: None,
            memory_bytes: None,
            kernels: kernels(&parts),
            detail: parts.iter().map(describe).collect::<Vec<_>>().join(", "),
        })
    }

    /// That of the coarsest part.
    fn tolerance(&self, model: &ModelSource, _: &Options) -> Tolerance {
        let parts = self.plan(model).unwrap_or_default();
        let of_part = |part: &PlannedPart<'_>| {
            let (known, _) = part.routes.first()?;
            Some(known.route.tolerance(model, &part.part.options))
        };
        parts.iter().filter_map(of_part).reduce(Tolerance::with).unwrap_or_default()
    }

    fn open(&self, request: OpenRequest<'_>) -> Result<Session, RouteError> {
        let OpenRequest { model, service, host, .. } = request;
        let declined = |reason| RouteError::Declined { route: NAME.to_owned(), reason: Reason::new(reason) };
        let parts = self.plan(model).map_err(declined)?;
        let segments =
            parts.iter().map(|part| part.open(model, service.window, host)).collect::<Result<Vec<_>, _>>()?;
        Ok(Session::Stepper(Box::new(Pipeline::new(segments, model.config().layers)?)))
    }
}

/// Kernels of all parts, each once.
fn kernels(parts: &[PlannedPart<'_>]) -> Vec<KernelOrigin> {
    let mut kernels = Vec::new();
    for kernel in parts.iter().filter_map(|part| part.routes.first()).flat_map(|(_, service)| &service.kernels) {
        if !kernels.contains(kernel) {
            kernels.push(kernel.clone());
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(parts: &[&str]) -> Split {
        let part = |text: &&str| SplitPart {
            layers: LayerSpan::parse(text).unwrap(),
            device: "cpu".parse().unwrap(),
            options: Options::default(),
        };
        Split { parts: parts.iter().map(part).collect() }
    }

    #[test]
    fn parts_cover_the_model() {
        let spans = split(&["0..2", "2..3", "3.."]).spans(5).unwrap();
        let layers: Vec<Range<usize>> = spans.iter().map(|span| span.layers.clone()).collect();
        assert_eq!(layers, [0..2, 2..3, 3..5]);
        assert_eq!((spans[0].takes, spans[0].yields), (Takes::Tokens, Yields::Hidden));
        assert_eq!((spans[1].takes, spans[1].yields), (Takes::Hidden, Yields::Hidden));
        assert_eq!((spans[2].takes, spans[2].yields), (Takes::Hidden, Yields::Logits));
        assert_eq!(split(&[".."]).spans(5).unwrap()[0].layers, 0..5);
        assert_eq!(split(&["..5", "5.."]).spans(5).unwrap()[1].layers, 5..5, "norm and head alone");
    }

    #[test]
    fn gaps_are_said() {
        let message = |parts: &[&str]| split(parts).spans(5).unwrap_err();
        assert_eq!(
            message(&["0..2", "3.."]),
            "layers 3..5 on cpu after layer 2 of 5; parts follow each other without a gap"
        );
        assert_eq!(message(&["0..2"]), "the parts end at layer 2 of 5");
        assert_eq!(message(&[]), "the parts end at layer 0 of 5");
        assert!(message(&["0..9"]).contains("layers 0..9"));
        assert!(message(&["0..0", "0.."]).contains("no layers on cpu"));
        for text in ["2", "a..b", "..x", "-1..2"] {
            assert_eq!(LayerSpan::parse(text), None, "{text}");
        }
    }
}

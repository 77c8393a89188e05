//! What the server counts, in OpenMetrics text.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use std::sync::{Mutex, PoisonError};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RequestLabels {
    pub(crate) endpoint: &'static str,
    pub(crate) status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ModelLabels {
    pub(crate) model: String,
    pub(crate) route: String,
    pub(crate) device: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OutcomeLabels {
    pub(crate) model: String,
    pub(crate) outcome: &'static str,
}

type Times = Family<ModelLabels, Histogram, fn() -> Histogram>;

pub(crate) struct Metrics {
    registry: Mutex<Registry>,
    pub(crate) requests: Family<RequestLabels, Counter>,
    pub(crate) active: Gauge,
    pub(crate) waiting: Gauge,
    pub(crate) worker_restarts: Counter,
    pub(crate) streams: Family<OutcomeLabels, Counter>,
    pub(crate) prompt_tokens: Family<ModelLabels, Counter>,
    pub(crate) cached_tokens: Family<ModelLabels, Counter>,
    pub(crate) prefix_hits: Family<ModelLabels, Counter>,
    pub(crate) generated_tokens: Family<ModelLabels, Counter>,
    pub(crate) duration: Times,
    pub(crate) first_token: Times,
    pub(crate) inter_token: Times,
    pub(crate) device_timeouts: Family<ModelLabels, Counter>,
    pub(crate) device_failures: Family<ModelLabels, Counter>,
    pub(crate) context_rebuilds: Family<ModelLabels, Counter>,
}

fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 18))
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("npuhal");
        let times = || Times::new_with_constructor(seconds);
        let metrics = Self {
            requests: Family::default(),
            active: Gauge::default(),
            waiting: Gauge::default(),
            worker_restarts: Counter::default(),
            streams: Family::default(),
            prompt_tokens: Family::default(),
            cached_tokens: Family::default(),
            prefix_hits: Family::default(),
            generated_tokens: Family::default(),
            duration: times(),
            first_token: times(),
            inter_token: times(),
            device_timeouts: Family::default(),
            device_failures: Family::default(),
            context_rebuilds: Family::default(),
            registry: Mutex::default(),
        };
        registry.register("api_requests", "Answered requests by endpoint and status", metrics.requests.clone());
        registry.register("api_active_requests", "Admitted requests that run or wait", metrics.active.clone());
        registry.register("api_queue_depth", "Admitted requests that wait", metrics.waiting.clone());
        registry.register("worker_restarts", "Workers that died and were replaced", metrics.worker_restarts.clone());
        registry.register("generations", "Generations by how they ended", metrics.streams.clone());
        registry.register("prompt_tokens", "Tokens of prompts, summed over choices", metrics.prompt_tokens.clone());
        let cached = metrics.cached_tokens.clone();
        registry.register("cached_prompt_tokens", "Prompt tokens taken from the KV cache", cached);
        let hits = metrics.prefix_hits.clone();
        registry.register("prefix_cache_hits", "Generations that began from a cached prefix", hits);
        registry.register("tokens_generated", "Tokens generated", metrics.generated_tokens.clone());
        let unit = || Unit::Seconds;
        let duration = metrics.duration.clone();
        registry.register_with_unit("inference_duration", "From arrival to the last event", unit(), duration);
        let first = metrics.first_token.clone();
        registry.register_with_unit("time_to_first_token", "From arrival to the first piece", unit(), first);
        let inter = metrics.inter_token.clone();
        registry.register_with_unit("inter_token", "Between two pieces of an answer", unit(), inter);
        let timeouts = metrics.device_timeouts.clone();
        registry.register(
            "device_timeouts",
            "Runs that a device did not end in time; each loses its context",
            timeouts,
        );
        let failures = metrics.device_failures.clone();
        registry.register("device_failures", "Generations that a device failed otherwise", failures);
        let rebuilds = metrics.context_rebuilds.clone();
        registry.register("context_rebuilds", "Device contexts made anew after one was lost", rebuilds);
        Self { registry: Mutex::new(registry), ..metrics }
    }

    /// The text of `/metrics`.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &registry);
        text
    }
}

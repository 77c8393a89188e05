//! What a decoded token costs on a device, and which split of a model's layers is the fastest.
//!
//! A token streams the weights of its layers once. Layers on a device therefore cost `bytes ÷ streaming rate`, and each dispatch
//! a fixed time on top; the head is counted apart. Figures are *measured* on this machine ([`calibration`]) where it has been
//! calibrated, else *published* by somebody who is named. What follows from them for a split is *modelled*; only a split that was
//! run as a whole is *measured*.

pub mod calibration;

pub use calibration::{Calibration, CalibrationError, CalibrationKey, Calibrations};

use crate::options::Options;
use crate::registry::Registry;
use crate::route::ANY_MODEL_TYPE;
use npuhal_core::card::{Claim, DeviceCard};
use npuhal_models::ModelSource;
use std::fmt::Write;

/// Where the figures of a cost come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CostSource {
    /// Published, by whom.
    Published(String),
    /// Measured on this machine with this model.
    Measured,
    /// Measured on this machine with another model, named.
    MeasuredWith(String),
    /// The time of the whole model was measured on this machine; the other figures, or some of them, come from there.
    WholeMeasured(Box<CostSource>),
}

impl std::fmt::Display for CostSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Published(by) => write!(f, "published by {by}"),
            Self::Measured => f.write_str("measured on this machine"),
            Self::MeasuredWith(model) => write!(f, "measured on this machine with {model}"),
            Self::WholeMeasured(others) => write!(f, "{others}; the model as a whole measured on this machine"),
        }
    }
}

/// What a decoded token costs on a device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceCost {
    /// Bytes of weights a token streams for one layer; their mean where layers differ.
    pub layer_bytes: u64,
    /// Rate at which they stream.
    pub bytes_per_second: f64,
    /// Fixed time of a dispatch.
    pub dispatch_seconds: f64,
    /// Layers of one dispatch at most; 0 is any number.
    pub layers_per_dispatch: usize,
    /// Time of final norm and head; `None` where the device does not do them.
    pub head_seconds: Option<f64>,
    /// Time of the whole model in the device's fastest form, head included, where that is another than the sum of its layers.
    pub whole_seconds: Option<f64>,
    /// Where the figures come from.
    pub source: CostSource,
}

impl DeviceCost {
    /// Time of `layers` layers without a head.
    #[must_use]
    pub fn layers_seconds(&self, layers: usize) -> f64 {
        let dispatches = self.dispatches(layers) as f64;
        self.layer_bytes as f64 * layers as f64 / self.bytes_per_second + self.dispatch_seconds * dispatches
    }

    /// Dispatches of `layers` layers.
    fn dispatches(&self, layers: usize) -> usize {
        match self.layers_per_dispatch {
            0 => usize::from(layers > 0),
            most => layers.div_ceil(most),
        }
    }

    /// Time of all `layers` layers with the head, where the device does them.
    fn all_seconds(&self, layers: usize) -> Option<f64> {
        self.whole_seconds.or_else(|| Some(self.layers_seconds(layers) + self.head_seconds?))
    }

    fn claim_of_whole(&self) -> Claim {
        match self.source {
            CostSource::Measured | CostSource::WholeMeasured(_) if self.whole_seconds.is_some() => Claim::Measured,
            _ => Claim::Modelled,
        }
    }
}

/// A split, and how fast it would decode.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prediction {
    /// Leading layers on the NPU; the others, the final norm and the head follow on the CPU.
    pub npu_layers: usize,
    /// Tokens a second.
    pub tokens_per_second: f64,
    /// [`Claim::Modelled`], or [`Claim::Measured`] where this very split was run.
    pub claim: Claim,
}

/// What a token costs on `device`, by the first route that states it, in order of precedence; measured figures replace stated ones.
#[must_use]
pub fn cost_on(
    registry: &Registry,
    model: &ModelSource,
    device: &DeviceCard,
    options: &Options,
    calibrations: &Calibrations,
) -> Option<DeviceCost> {
    registry.routes().iter().find_map(|known| {
        let route = &known.route;
        let types = route.model_types();
        let is_asked = types.contains(&model.config().model_type.as_str()) || types.contains(&ANY_MODEL_TYPE);
        let options = options.limited_to(route.option_keys());
        let cost = is_asked.then(|| route.cost(model, device, &options)).flatten()?;
        Some(calibrations.apply(cost, &CalibrationKey::new(&device.id, route.name(), &options), model))
    })
}

/// Every split of a model of `layers` layers over an NPU and a CPU, by number of layers on the NPU. Splits that the costs say
/// nothing of are left out.
#[must_use]
pub fn predict(layers: usize, npu: &DeviceCost, cpu: &DeviceCost) -> Vec<Prediction> {
    let split = |npu_layers: usize| {
        let (seconds, claim) = if npu_layers == 0 {
            (cpu.all_seconds(layers)?, cpu.claim_of_whole())
        } else if npu_layers == layers && npu.all_seconds(layers).is_some() {
            (npu.all_seconds(layers)?, npu.claim_of_whole())
        } else {
            let rest = cpu.layers_seconds(layers - npu_layers) + cpu.head_seconds?;
            (npu.layers_seconds(npu_layers) + rest, Claim::Modelled)
        };
        (seconds.is_finite() && seconds > 0.0).then(|| Prediction {
            npu_layers,
            tokens_per_second: 1.0 / seconds,
            claim,
        })
    };
    (0..=layers).filter_map(split).collect()
}

/// The fastest split; of equal ones the one with the most layers on the NPU.
#[must_use]
pub fn fastest(predictions: &[Prediction]) -> Option<Prediction> {
    predictions.iter().copied().max_by(|a, b| {
        a.tokens_per_second.total_cmp(&b.tokens_per_second).then_with(|| a.npu_layers.cmp(&b.npu_layers))
    })
}

/// The predictions as a table for people, the fastest one marked.
#[must_use]
pub fn table(predictions: &[Prediction], npu: (&str, &DeviceCost), cpu: (&str, &DeviceCost)) -> String {
    let best = fastest(predictions);
    let mut table = String::new();
    for (device, cost) in [npu, cpu] {
        let _ = writeln!(
            table,
            "{device}: {:.2} MB a layer at {:.2} GB/s, {:.3} ms a dispatch ({})",
            cost.layer_bytes as f64 / 1e6,
            cost.bytes_per_second / 1e9,
            cost.dispatch_seconds * 1e3,
            cost.source
        );
    }
    for prediction in predictions {
        let mark = if best == Some(*prediction) { '*' } else { ' ' };
        let _ = writeln!(
            table,
            "{mark} {:>3} layers on {}: {:>8.2} tok/s {}",
            prediction.npu_layers,
            npu.0,
            prediction.tokens_per_second,
            word(prediction.claim)
        );
    }
    table
}

/// The word for a split's figure.
#[must_use]
pub fn word(claim: Claim) -> &'static str {
    match claim {
        Claim::Measured => "measured",
        _ => "modelled",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(bytes_per_second: f64, dispatch_seconds: f64, head_seconds: Option<f64>) -> DeviceCost {
        DeviceCost {
            layer_bytes: 1_000_000,
            bytes_per_second,
            dispatch_seconds,
            layers_per_dispatch: 2,
            head_seconds,
            whole_seconds: None,
            source: CostSource::Published("somebody".to_owned()),
        }
    }

    #[test]
    fn layers_cost_their_bytes_and_their_dispatches() {
        let cost = cost(1e9, 0.5e-3, None);
        assert_eq!(cost.layers_seconds(0), 0.0);
        assert!((cost.layers_seconds(3) - (3e-3 + 1e-3)).abs() < 1e-12, "two dispatches");
        let one = DeviceCost { layers_per_dispatch: 0, ..cost };
        assert!((one.layers_seconds(30) - (30e-3 + 0.5e-3)).abs() < 1e-12);
    }

    #[test]
    fn the_faster_device_gets_the_layers() {
        let (fast, slow) = (cost(4e9, 0.0, Some(1e-3)), cost(1e9, 0.0, Some(2e-3)));
        let predictions = predict(4, &fast, &slow);
        assert_eq!(predictions.len(), 5);
        assert_eq!(fastest(&predictions).unwrap().npu_layers, 4);
        assert!((predictions[4].tokens_per_second - 1.0 / (4e-3 / 4.0 + 1e-3)).abs() < 1e-6, "with its own head");
        assert_eq!(fastest(&predict(4, &slow, &fast)).unwrap().npu_layers, 0);
        assert!(predictions.iter().all(|prediction| prediction.claim == Claim::Modelled));
    }

    #[test]
    fn a_device_without_a_head_leaves_it_to_the_cpu() {
        let (npu, cpu) = (cost(4e9, 0.0, None), cost(1e9, 0.0, Some(2e-3)));
        let all = predict(4, &npu, &cpu)[4];
        assert!((all.tokens_per_second - 1.0 / (1e-3 + 2e-3)).abs() < 1e-6);
        let nobody = DeviceCost { head_seconds: None, ..cpu };
        assert!(predict(4, &npu, &nobody).is_empty(), "nobody does the head");
    }

    #[test]
    fn only_a_split_that_was_run_is_measured() {
        let npu = cost(4e9, 0.0, None);
        let cpu = DeviceCost { whole_seconds: Some(7e-3), source: CostSource::Measured, ..cost(1e9, 0.0, Some(2e-3)) };
        let predictions = predict(4, &npu, &cpu);
        assert_eq!(predictions[0].claim, Claim::Measured);
        assert!(predictions[1..].iter().all(|prediction| prediction.claim == Claim::Modelled));
        let table = table(&predictions, ("npu1", &npu), ("cpu", &cpu));
        assert!(table.contains("npu1: 1.00 MB a layer at 4.00 GB/s, 0.000 ms a dispatch (published by somebody)"));
        assert!(table.contains("    0 layers on npu1:   142.86 tok/s measured\n"), "{table}");
        assert!(table.contains("*   4 layers on npu1:   333.33 tok/s modelled\n"), "{table}");
    }

    #[test]
    fn figures_that_are_none_give_no_prediction() {
        let broken = cost(0.0, 0.0, Some(1e-3));
        let (cpu, layers) = (cost(1e9, 0.0, Some(1e-3)), 4);
        assert_eq!(predict(layers, &broken, &cpu).len(), 1, "only the CPU alone");
    }
}

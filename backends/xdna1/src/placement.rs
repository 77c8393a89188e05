//! Which layers run on the NPU: the leading ones; the rest, the final norm and the head follow on the CPU.

use std::ops::Range;
use thiserror::Error;

/// A placement that cannot be.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// Both flags were given.
    #[error("--npu-layers and --npu-percent exclude each other; give one of them")]
    Both,
    /// More layers than the model has.
    #[error("--npu-layers {found}: the model has {layers} layers; give 0 to {layers}")]
    Layers {
        /// Layers asked for.
        found: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// No percentage.
    #[error("--npu-percent {found}: give a number from 0 to 100")]
    Percent {
        /// What was given.
        found: f64,
    },
}

/// Layers by device. Each side owns the KV cache of its layers; one hidden vector crosses for each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerPlacement {
    layers: usize,
    npu_layers: usize,
}

impl LayerPlacement {
    /// The placement of a model of `layers` layers by at most one of the two flags; without any, all layers run on the NPU.
    ///
    /// # Errors
    /// [`PlacementError`].
    pub fn new(layers: usize, npu_layers: Option<usize>, npu_percent: Option<f64>) -> Result<Self, PlacementError> {
        let npu_layers = match (npu_layers, npu_percent) {
            (Some(_), Some(_)) => return Err(PlacementError::Both),
            (Some(found), None) if found > layers => return Err(PlacementError::Layers { found, layers }),
            (Some(count), None) => count,
            (None, Some(percent)) => layers_of_percent(layers, percent)?,
            (None, None) => layers,
        };
        Ok(Self { layers, npu_layers })
    }

    /// Layers on the NPU.
    #[must_use]
    pub fn npu(self) -> Range<usize> {
        0..self.npu_layers
    }

    /// Layers on the CPU.
    #[must_use]
    pub fn cpu(self) -> Range<usize> {
        self.npu_layers..self.layers
    }

    /// Whether both have layers.
    #[must_use]
    pub fn is_hybrid(self) -> bool {
        !self.npu().is_empty() && !self.cpu().is_empty()
    }
}

/// `layers · percent / 100`, half to even.
fn layers_of_percent(layers: usize, percent: f64) -> Result<usize, PlacementError> {
    if !(0.0..=100.0).contains(&percent) {
        return Err(PlacementError::Percent { found: percent });
    }
    Ok((layers as f64 * percent / 100.0).round_ties_even() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn percentages_round_as_published() {
        let golden: Value = serde_json::from_str(include_str!("../tests/data/offload_rounding.json")).unwrap();
        let cases = golden["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 40);
        for case in cases {
            let layers = case["layers"].as_u64().unwrap() as usize;
            let placement = LayerPlacement::new(layers, None, case["percent"].as_f64()).unwrap();
            assert_eq!(placement.npu(), 0..case["npu_layers"].as_u64().unwrap() as usize, "{case}");
            assert_eq!(placement.cpu(), placement.npu().end..layers);
        }
    }

    #[test]
    fn flags_exclude_each_other_and_are_bounded() {
        let place = |count, percent| LayerPlacement::new(30, count, percent);
        assert_eq!(place(None, None).unwrap().npu(), 0..30);
        assert!(place(Some(1), None).unwrap().is_hybrid() && !place(Some(0), None).unwrap().is_hybrid());
        assert_eq!(place(Some(1), Some(50.0)), Err(PlacementError::Both));
        let error = place(Some(31), None).unwrap_err().to_string();
        assert_eq!(error, "--npu-layers 31: the model has 30 layers; give 0 to 30");
        for percent in [-0.1, 100.5, f64::NAN, f64::INFINITY] {
            assert!(matches!(place(None, Some(percent)), Err(PlacementError::Percent { .. })));
        }
    }
}

//! The sampling that a model's authors suggest.

use super::SamplingParams;
use std::fmt;

/// Suggestions of a model file: `generation_config.json` of a directory, `general.sampling.*` of a GGUF file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SuggestedSampling {
    /// The parameters; those that nobody suggests are neutral.
    pub params: SamplingParams,
    /// What is suggested and not done here, as `key = value`.
    pub left_out: Vec<String>,
}

impl SuggestedSampling {
    /// `None` where nothing is suggested.
    #[must_use]
    pub fn found(self) -> Option<Self> {
        Some(self).filter(|suggested| *suggested != Self::default())
    }
}

/// What differs from the neutral parameters, for people: `temperature 0.6, top-p 0.95`.
impl fmt::Display for SuggestedSampling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let neutral = SamplingParams::default();
        let SamplingParams { temperature, top_p, top_k, min_p, repetition_penalty, penalty_window, .. } = self.params;
        let mut parts = Vec::new();
        let mut part = |name: &str, value: f64, neutral: f64| {
            if value != neutral {
                parts.push(format!("{name} {value}"));
            }
        };
        part("temperature", temperature, neutral.temperature);
        part("top-p", top_p, neutral.top_p);
        part("top-k", top_k as f64, neutral.top_k as f64);
        part("min-p", min_p, neutral.min_p);
        part("repetition penalty", repetition_penalty, neutral.repetition_penalty);
        if let Some(window) = penalty_window {
            parts.push(format!("over the last {window} tokens"));
        }
        f.write_str(if parts.is_empty() { "greedy" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

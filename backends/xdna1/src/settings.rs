//! What a session asks of the lane: the options of the route.

use crate::chunk::LAYERS_PER_DISPATCH;
use npuhal_registry::Numerics;
use std::collections::BTreeMap;
use std::time::Duration;

/// Keys of the route's options.
pub const KEYS: [&str; 9] =
    ["engine", "w8", "npu_head", "cpu_final_norm", "chunk", "prefix_cache", "profile", "timeout_ms", "cpu_stage"];

/// The options, read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// `engine`: one dispatch a token where all layers are on the NPU; off for chunked graphs.
    pub engine: bool,
    /// `w8`: int8 weights in the SmolLM chunked graphs.
    pub w8: bool,
    /// `npu_head`: the head of a SmolLM model on the NPU, by the int8 projection.
    pub npu_head: bool,
    /// `cpu_final_norm`: where the final norm is asked for, on the CPU or not. The engine has it inside; behind chunked graphs
    /// it runs on the CPU, since no design computes it alone.
    pub cpu_final_norm: Option<bool>,
    /// `chunk`: layers of a dispatch of the chunked graphs at most.
    pub chunk: usize,
    /// `prefix_cache`: whether a sequence's valid positions are used again.
    pub prefix_cache: bool,
    /// `profile`: whether the session says where the time went.
    pub profile: bool,
    /// `timeout_ms`: what a dispatch may take.
    pub timeout: Option<Duration>,
    /// `cpu_stage`: arithmetic of layers and norms on the CPU.
    pub cpu_stage: Numerics,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            engine: true,
            w8: false,
            npu_head: false,
            cpu_final_norm: None,
            chunk: LAYERS_PER_DISPATCH,
            prefix_cache: true,
            profile: false,
            timeout: None,
            cpu_stage: Numerics::Xdna1Cpu,
        }
    }
}

impl Settings {
    /// Reads the options; keys of other routes are passed over.
    ///
    /// # Errors
    /// The option, what was given and what can be given.
    pub fn of(options: &BTreeMap<String, String>) -> Result<Self, String> {
        let mut settings = Self::default();
        for (key, value) in options {
            let bad = |allowed: &str| format!("{key} cannot be '{value}'; allowed: {allowed}");
            let switch = || match value.as_str() {
                "on" | "1" => Ok(true),
                "off" | "0" => Ok(false),
                _ => Err(bad("on, off")),
            };
            match key.as_str() {
                "engine" => settings.engine = switch()?,
                "w8" => settings.w8 = switch()?,
                "npu_head" => settings.npu_head = switch()?,
                "cpu_final_norm" => settings.cpu_final_norm = Some(switch()?),
                "prefix_cache" => settings.prefix_cache = switch()?,
                "profile" => settings.profile = switch()?,
                "chunk" => {
                    let count = value.parse().ok().filter(|count| *count > 0);
                    settings.chunk = count.ok_or_else(|| bad("a whole number from 1"))?;
                }
                "timeout_ms" => {
                    let ms = value.parse().ok().filter(|ms| *ms > 0).ok_or_else(|| bad("a whole number from 1"))?;
                    settings.timeout = Some(Duration::from_millis(ms));
                }
                "cpu_stage" => {
                    settings.cpu_stage = match value.as_str() {
                        "xdna1-cpu" => Numerics::Xdna1Cpu,
                        "fast" => Numerics::Fast,
                        "exact" => Numerics::Exact,
                        _ => return Err(bad("xdna1-cpu, fast, exact")),
                    };
                }
                _ => {}
            }
        }
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Result<Settings, String> {
        Settings::of(&pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn every_key_is_read() {
        assert_eq!(of(&[]), Ok(Settings::default()));
        let pairs = [
            ("engine", "off"),
            ("w8", "on"),
            ("npu_head", "1"),
            ("cpu_final_norm", "0"),
            ("chunk", "1"),
            ("prefix_cache", "off"),
            ("profile", "on"),
            ("timeout_ms", "1500"),
            ("cpu_stage", "fast"),
        ];
        assert_eq!(pairs.map(|(key, _)| key), KEYS);
        let wanted = Settings {
            engine: false,
            w8: true,
            npu_head: true,
            cpu_final_norm: Some(false),
            chunk: 1,
            prefix_cache: false,
            profile: true,
            timeout: Some(Duration::from_millis(1500)),
            cpu_stage: Numerics::Fast,
        };
        assert_eq!(of(&pairs), Ok(wanted));
        assert_eq!(of(&[("log", "x")]), Ok(Settings::default()), "another route's");
    }

    #[test]
    fn wrong_values_are_named() {
        assert_eq!(of(&[("w8", "yes")]), Err("w8 cannot be 'yes'; allowed: on, off".to_owned()));
        assert!(of(&[("chunk", "0")]).unwrap_err().contains("a whole number from 1"));
        assert!(of(&[("cpu_stage", "xdna1-qwen")]).unwrap_err().contains("xdna1-cpu, fast, exact"));
    }
}

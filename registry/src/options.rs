//! What a caller may ask of a route, independent of the device.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use thiserror::Error;

/// An option that cannot be taken.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum OptionError {
    /// No such option.
    #[error("unknown option '{key}'; known options: {known}")]
    UnknownKey {
        /// What was given.
        key: String,
        /// Known keys, separated by commas.
        known: String,
    },
    /// A value that the option does not know.
    #[error("{key} cannot be '{value}'; allowed: {allowed}")]
    BadValue {
        /// The option.
        key: &'static str,
        /// What was given.
        value: String,
        /// What can be given.
        allowed: &'static str,
    },
    /// Not of the form KEY=VALUE.
    #[error("an option is given as KEY=VALUE, not '{text}'")]
    NotAPair {
        /// What was given.
        text: String,
    },
}

/// Arithmetic of the CPU backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Numerics {
    /// f64 over dequantized weights: the oracle.
    Exact,
    /// Integer kernels over packed weights, inputs of 15 bits.
    #[default]
    Fast,
    /// As `Fast`, inputs of 8 bits.
    Int8,
    /// That of the xdna1 lane's SmolLM engine, on the CPU.
    Xdna1SmolLm,
    /// That of the xdna1 lane's chunked SmolLM graphs, on the CPU.
    Xdna1SmolLmChunk,
    /// That of the xdna1 lane's Qwen engine, on the CPU.
    Xdna1Qwen,
    /// That of the xdna1 lane's CPU stage.
    Xdna1Cpu,
    /// That of the xdna2 lane's kernels, on the CPU.
    Xdna2,
}

impl Numerics {
    /// All values.
    pub const ALL: [Self; 8] = [
        Self::Exact,
        Self::Fast,
        Self::Int8,
        Self::Xdna1SmolLm,
        Self::Xdna1SmolLmChunk,
        Self::Xdna1Qwen,
        Self::Xdna1Cpu,
        Self::Xdna2,
    ];
    /// All values, for messages.
    pub const ALLOWED: &'static str =
        "exact, fast, int8, xdna1-smollm, xdna1-smollm-chunk, xdna1-qwen, xdna1-cpu, xdna2";

    /// Name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Fast => "fast",
            Self::Int8 => "int8",
            Self::Xdna1SmolLm => "xdna1-smollm",
            Self::Xdna1SmolLmChunk => "xdna1-smollm-chunk",
            Self::Xdna1Qwen => "xdna1-qwen",
            Self::Xdna1Cpu => "xdna1-cpu",
            Self::Xdna2 => "xdna2",
        }
    }
}

impl fmt::Display for Numerics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Numerics {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        let found = Self::ALL.into_iter().find(|numerics| numerics.name() == text);
        found.ok_or_else(|| OptionError::BadValue { key: "numerics", value: text.to_owned(), allowed: Self::ALLOWED })
    }
}

/// What matters most to the caller when `auto` chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Prefer {
    /// An NPU, even where its window is smaller than the request; older turns are then left out.
    Npu,
    /// The highest expected decode speed.
    Speed,
    /// The largest window.
    Context,
}

impl Prefer {
    /// All values, for messages.
    pub const ALLOWED: &'static str = "npu, speed, context";
}

impl fmt::Display for Prefer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Npu => "npu",
            Self::Speed => "speed",
            Self::Context => "context",
        })
    }
}

impl FromStr for Prefer {
    type Err = OptionError;

    fn from_str(text: &str) -> Result<Self, OptionError> {
        match text {
            "npu" => Ok(Self::Npu),
            "speed" => Ok(Self::Speed),
            "context" => Ok(Self::Context),
            _ => Err(OptionError::BadValue { key: "prefer", value: text.to_owned(), allowed: Self::ALLOWED }),
        }
    }
}

/// Which of a model's layers run on the NPU: the leading ones. The rest, the final norm and the head follow on the CPU.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum NpuLayers {
    /// This many.
    Count(u32),
    /// This share of all layers, 0 to 100, rounded half to even.
    Percent(f64),
    /// As many as are worth it.
    Auto,
}

/// What a session is opened with. [`Options::default`] leaves everything to the route.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Options {
    /// Arithmetic of CPU segments.
    pub numerics: Numerics,
    /// Threads of CPU segments; `None` is one for each processor the process may use.
    pub threads: Option<NonZeroUsize>,
    /// Name of the instruction set of CPU segments; `None` is the best there is. The CPU backend checks it.
    pub cpu_features: Option<String>,
    /// Positions of a sequence; `None` is the route's own default.
    pub context_positions: Option<u32>,
    /// Sequences held side by side; `None` is 1.
    pub sequences: Option<u32>,
    /// Layers on the NPU; `None` leaves it to the route.
    pub npu_layers: Option<NpuLayers>,
    /// Folder of compiled kernels; `None` is the model's own.
    pub kernels: Option<PathBuf>,
    /// Options declared by a route ([`crate::Route::option_keys`]), by key. The route checks the values.
    pub route_options: BTreeMap<String, String>,
}

impl Options {
    /// Keys that [`Options::set`] takes for every route.
    pub const KEYS: [&'static str; 6] = ["numerics", "threads", "cpu-features", "context", "sequences", "npu-layers"];

    /// Sets one option from text. `declared` are the further keys that routes have declared.
    ///
    /// # Errors
    /// [`OptionError::UnknownKey`] listing the known ones; [`OptionError::BadValue`] listing what is allowed.
    pub fn set(&mut self, key: &str, value: &str, declared: &[&str]) -> Result<(), OptionError> {
        match key {
            "numerics" => self.numerics = value.parse()?,
            "threads" => self.threads = Some(parse_count("threads", value)?),
            "cpu-features" => self.cpu_features = Some(value.to_owned()),
            "context" => self.context_positions = Some(parse_positive("context", value)?),
            "sequences" => self.sequences = Some(parse_positive("sequences", value)?),
            "npu-layers" => self.npu_layers = Some(parse_npu_layers(value)?),
            _ if declared.contains(&key) => {
                self.route_options.insert(key.to_owned(), value.to_owned());
            }
            _ => {
                let known = Self::KEYS.iter().chain(declared).copied().collect::<Vec<_>>().join(", ");
                return Err(OptionError::UnknownKey { key: key.to_owned(), known });
            }
        }
        Ok(())
    }

    /// Sets one option from `KEY=VALUE`, split at the first `=`; the value may be empty, a later value wins.
    ///
    /// # Errors
    /// [`OptionError::NotAPair`], and as [`Options::set`].
    pub fn set_pair(&mut self, text: &str, declared: &[&str]) -> Result<(), OptionError> {
        match text.split_once('=') {
            Some((key, value)) if !key.is_empty() => self.set(key, value, declared),
            _ => Err(OptionError::NotAPair { text: text.to_owned() }),
        }
    }

    /// Sets one option that a route has declared, from `KEY=VALUE` as in [`Options::set_pair`].
    ///
    /// # Errors
    /// [`OptionError::NotAPair`]; [`OptionError::UnknownKey`] listing `declared`.
    pub fn set_route_pair(&mut self, text: &str, declared: &[&str]) -> Result<(), OptionError> {
        let pair = text.split_once('=').filter(|(key, _)| !key.is_empty());
        let (key, value) = pair.ok_or_else(|| OptionError::NotAPair { text: text.to_owned() })?;
        if !declared.contains(&key) {
            let known = if declared.is_empty() { "none".to_owned() } else { declared.join(", ") };
            return Err(OptionError::UnknownKey { key: key.to_owned(), known });
        }
        self.route_options.insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    /// The same without the route options that are not in `declared`: what the route that declared these is shown.
    #[must_use]
    pub fn limited_to(&self, declared: &[&str]) -> Self {
        let mut limited = self.clone();
        limited.route_options.retain(|key, _| declared.contains(&key.as_str()));
        limited
    }
}

const A_COUNT: &str = "a whole number from 1";

fn parse_count(key: &'static str, value: &str) -> Result<NonZeroUsize, OptionError> {
    value.parse().map_err(|_| OptionError::BadValue { key, value: value.to_owned(), allowed: A_COUNT })
}

fn parse_npu_layers(value: &str) -> Result<NpuLayers, OptionError> {
    let (key, allowed) = ("npu-layers", "a whole number of layers, or a share of them as 0% to 100%");
    let bad = || OptionError::BadValue { key, value: value.to_owned(), allowed };
    match value.strip_suffix('%') {
        Some(percent) => percent.parse().map(NpuLayers::Percent).map_err(|_| bad()),
        None => value.parse().map(NpuLayers::Count).map_err(|_| bad()),
    }
}

fn parse_positive(key: &'static str, value: &str) -> Result<u32, OptionError> {
    match value.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err(OptionError::BadValue { key, value: value.to_owned(), allowed: A_COUNT }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_options_are_set() {
        let mut options = Options::default();
        for pair in ["numerics=exact", "threads=3", "context=512", "sequences=2", "sequences=4", "fw-dir=/a=b"] {
            options.set_pair(pair, &["fw-dir"]).unwrap();
        }
        options.set_pair("npu-layers=60%", &[]).unwrap();
        assert_eq!(options.npu_layers, Some(NpuLayers::Percent(60.0)));
        options.set_pair("npu-layers=8", &[]).unwrap();
        assert_eq!(options.npu_layers, Some(NpuLayers::Count(8)));
        assert_eq!(options.numerics, Numerics::Exact);
        assert_eq!(options.threads.map(NonZeroUsize::get), Some(3));
        assert_eq!((options.context_positions, options.sequences), (Some(512), Some(4)), "the later value wins");
        assert_eq!(options.route_options["fw-dir"], "/a=b", "split at the first equals sign");
    }

    #[test]
    fn wrong_options_name_what_is_allowed() {
        let mut options = Options::default();
        let message = |result: Result<(), OptionError>| result.unwrap_err().to_string();
        let allowed = "numerics cannot be 'fp8'; allowed: exact, fast, int8, xdna1-smollm, xdna1-smollm-chunk, xdna1-qwen, \
                       xdna1-cpu, xdna2";
        assert_eq!(message(options.set("numerics", "fp8", &[])), allowed);
        assert_eq!(Numerics::ALL.map(Numerics::name).join(", "), Numerics::ALLOWED);
        assert_eq!(
            message(options.set("colour", "red", &["fw-dir"])),
            "unknown option 'colour'; known options: numerics, threads, cpu-features, context, sequences, npu-layers, fw-dir"
        );
        assert!(message(options.set("threads", "0", &[])).contains("a whole number from 1"));
        assert!(message(options.set("context", "-1", &[])).contains("context cannot be '-1'"));
        assert_eq!(message(options.set_pair("threads", &[])), "an option is given as KEY=VALUE, not 'threads'");
        assert!(matches!(options.set_pair("=3", &[]), Err(OptionError::NotAPair { .. })));
        assert_eq!(
            "fastest".parse::<Prefer>().unwrap_err().to_string(),
            "prefer cannot be 'fastest'; allowed: npu, speed, context"
        );
        assert_eq!(
            message(options.set_route_pair("threads=3", &["fw-dir", "log"])),
            "unknown option 'threads'; known options: fw-dir, log"
        );
        assert_eq!(message(options.set_route_pair("a=3", &[])), "unknown option 'a'; known options: none");
        assert_eq!(message(options.set_route_pair("=3", &["a"])), "an option is given as KEY=VALUE, not '=3'");
        assert_eq!(options, Options::default(), "a refused option changes nothing");
    }
}

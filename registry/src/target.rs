//! Where and how a session runs, in one word, for commands that compare several.
//!
//! | Text | Meaning |
//! |---|---|
//! | `cpu`, `npu5`, `virtual:npu1`, `auto` | a device, with the options of the command |
//! | `cpu:exact` | the CPU with another arithmetic |
//! | `cpu?numerics=exact&threads=1` | options of the session and parameters of the device behind a question mark |
//! | `0..16@virtual:npu1,16..@cpu:exact` | layers spread over devices |

use crate::options::{OptionError, Options};
use crate::registry::Registry;
use crate::selection::{Choice, Request, SelectionError, select};
use crate::split::{LayerSpan, Split, SplitPart};
use crate::uri::{DeviceAddress, DeviceChoice, DeviceUri, UriError};
use npuhal_models::ModelSource;
use std::fmt;
use thiserror::Error;

/// A target that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TargetError {
    /// The device.
    #[error(transparent)]
    Device(#[from] UriError),
    /// An option behind the question mark.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// A part of a split without its layers.
    #[error("'{part}': wanted LAYERS@DEVICE, e.g. 0..16@npu1 or 16..@cpu")]
    NoLayers {
        /// The part.
        part: String,
    },
    /// A device of a split that is no device.
    #[error("'{part}': layers need a device of their own; auto is a choice for whole models")]
    AutoPart {
        /// The part.
        part: String,
    },
}

/// Where a session runs.
#[derive(Debug, Clone, PartialEq)]
pub enum Place {
    /// One device, or the best one.
    Device(DeviceChoice),
    /// Layers spread over devices.
    Split(Split),
}

/// Where and how a session runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    text: String,
    /// Where.
    pub place: Place,
    /// How.
    pub options: Options,
}

impl Target {
    /// Reads `text`; what it does not say is as in `base`. `declared` are option keys that routes have declared.
    ///
    /// # Errors
    /// [`TargetError`].
    pub fn parse(text: &str, base: &Options, declared: &[&str]) -> Result<Self, TargetError> {
        let named = |place, options| Self { text: text.to_owned(), place, options };
        // A device may have an at sign in its parameters, so layers have to stand before it.
        let is_split = text.split_once('@').is_some_and(|(layers, _)| LayerSpan::parse(layers).is_some());
        if !is_split {
            let (device, options) = parse_device(text, base, declared)?;
            return Ok(named(Place::Device(device), options));
        }
        let part = |part: &str| {
            let no_layers = || TargetError::NoLayers { part: part.to_owned() };
            let (layers, device) = part.split_once('@').ok_or_else(no_layers)?;
            let layers = LayerSpan::parse(layers).ok_or_else(no_layers)?;
            match parse_device(device, base, declared)? {
                (DeviceChoice::Auto, _) => Err(TargetError::AutoPart { part: part.to_owned() }),
                (DeviceChoice::Pinned(device), options) => Ok(SplitPart { layers, device, options }),
            }
        };
        let parts = text.split(',').map(part).collect::<Result<_, TargetError>>()?;
        Ok(named(Place::Split(Split { parts }), base.clone()))
    }

    /// Chooses a route for `model`, or spreads it as asked.
    ///
    /// # Errors
    /// As [`select`].
    pub fn choose(&self, registry: &Registry, model: &ModelSource) -> Result<Choice, SelectionError> {
        let request = Request { options: self.options.clone(), ..Request::default() };
        match &self.place {
            Place::Device(device) => select(registry, model, &Request { device: device.clone(), ..request }),
            Place::Split(split) => select(registry, model, &Request { split: Some(split.clone()), ..request }),
        }
    }

    /// Ids of the devices that are named.
    #[must_use]
    pub fn devices(&self) -> Option<Vec<String>> {
        match &self.place {
            Place::Device(DeviceChoice::Auto) => None,
            Place::Device(DeviceChoice::Pinned(uri)) => Some(vec![uri.id()]),
            Place::Split(split) => Some(split.parts.iter().map(|part| part.device.id()).collect()),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A device, and the options among its parameters.
fn parse_device(text: &str, base: &Options, declared: &[&str]) -> Result<(DeviceChoice, Options), TargetError> {
    let mut options = base.clone();
    let (address, parameters) = text.split_once('?').map_or((text, ""), |(address, rest)| (address, rest));
    // `cpu:exact` is no scheme with a path: the CPU has an arithmetic, and no paths.
    let text = match address.strip_prefix("cpu:") {
        None => text.to_owned(),
        Some(numerics) => {
            options.set("numerics", numerics, declared)?;
            if parameters.is_empty() { "cpu".to_owned() } else { format!("cpu?{parameters}") }
        }
    };
    let DeviceChoice::Pinned(mut uri) = text.parse::<DeviceChoice>()? else { return Ok((DeviceChoice::Auto, options)) };
    let is_option = |key: &str| Options::KEYS.contains(&key) || declared.contains(&key);
    for (key, value) in std::mem::take(&mut uri.parameters) {
        if is_option(&key) {
            options.set(&key, &value, declared)?;
        } else {
            uri.parameters.insert(key, value);
        }
    }
    Ok((DeviceChoice::Pinned(uri), options))
}

impl From<DeviceAddress> for Target {
    /// The device, with the default options.
    fn from(address: DeviceAddress) -> Self {
        let uri = DeviceUri::from(address);
        Self { text: uri.to_string(), place: Place::Device(DeviceChoice::Pinned(uri)), options: Options::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Numerics;

    fn parse(text: &str) -> Result<Target, TargetError> {
        Target::parse(text, &Options { context_positions: Some(32), ..Options::default() }, &["fw-dir"])
    }

    #[test]
    fn devices_carry_options_and_parameters() {
        let target = parse("cpu:exact?threads=2&memory_bytes=4096&fw-dir=x").unwrap();
        assert_eq!(target.options.numerics, Numerics::Exact);
        assert_eq!(target.options.threads.map(usize::from), Some(2));
        assert_eq!(target.options.context_positions, Some(32), "what is not said is as it was");
        assert_eq!(target.options.route_options["fw-dir"], "x");
        let Place::Device(device) = &target.place else { panic!("{target:?}") };
        assert_eq!(device.to_string(), "cpu?memory_bytes=4096");
        assert_eq!(target.devices(), Some(vec!["cpu".to_owned()]));
        assert_eq!(target.to_string(), "cpu:exact?threads=2&memory_bytes=4096&fw-dir=x");
        let same = parse("cpu?numerics=exact").unwrap();
        assert_eq!(same.options, parse("cpu:exact").unwrap().options);
        assert_eq!(parse("auto").unwrap().devices(), None);
        let faulty = parse("virtual:npu5?fault=timeout@3").unwrap();
        assert_eq!(faulty.place, Place::Device("virtual:npu5?fault=timeout@3".parse().unwrap()));
    }

    #[test]
    fn splits_have_layers_and_devices() {
        let target = parse("0..2@virtual:npu1?threads=1,2..@cpu:exact").unwrap();
        let Place::Split(split) = &target.place else { panic!("{target:?}") };
        assert_eq!(split.parts.len(), 2);
        assert_eq!(split.parts[0].device.to_string(), "virtual:npu1");
        assert_eq!(split.parts[0].options.threads.map(usize::from), Some(1));
        assert_eq!(split.parts[1].options.numerics, Numerics::Exact);
        assert_eq!(target.devices(), Some(vec!["virtual:npu1".to_owned(), "cpu".to_owned()]));
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        let message = |text: &str| parse(text).unwrap_err().to_string();
        assert!(message("cpu:fp8").starts_with("numerics cannot be 'fp8'"), "{}", message("cpu:fp8"));
        assert!(message("gpu").contains("unknown device 'gpu'"));
        assert_eq!(message("0..2@cpu,cpu"), "'cpu': wanted LAYERS@DEVICE, e.g. 0..16@npu1 or 16..@cpu");
        assert!(message("two@cpu").contains("unknown device 'two@cpu'"));
        assert!(message("0..@auto").contains("auto is a choice for whole models"));
        assert!(message("cpu?threads=0").contains("a whole number from 1"));
    }
}

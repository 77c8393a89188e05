//! Addresses of devices, as people write them.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// What may be written for a device.
const ALLOWED: &str =
    "auto, cpu, npu1, npu2, npu4, npu5, npu6, virtual:npu1, virtual:npu4, virtual:npu5, or SCHEME:PATH";

/// A device address that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum UriError {
    /// No device is called so.
    #[error("unknown device '{text}'; allowed: {ALLOWED}, each with ?KEY=VALUE&KEY=VALUE behind it")]
    Unknown {
        /// What was given.
        text: String,
    },
    /// The virtual NPU has no such model.
    #[error("there is no virtual device '{model}'; allowed: virtual:npu1, virtual:npu4, virtual:npu5")]
    UnknownVirtual {
        /// What was given.
        model: String,
    },
    /// The part before the colon is no scheme.
    #[error(
        "'{scheme}' in '{text}' is no device scheme; wanted a lower-case letter followed by letters, digits, '+', '-' or '.'"
    )]
    BadScheme {
        /// What was given as scheme.
        scheme: String,
        /// The whole.
        text: String,
    },
    /// Nothing behind the colon.
    #[error("'{text}' names no path; wanted SCHEME:PATH")]
    NoPath {
        /// The whole.
        text: String,
    },
    /// A parameter is not of the form KEY=VALUE.
    #[error("device parameter '{parameter}' in '{text}': wanted KEY=VALUE")]
    BadParameter {
        /// What was given.
        parameter: String,
        /// The whole.
        text: String,
    },
    /// A parameter is given twice.
    #[error("device parameter '{key}' is given twice in '{text}'")]
    RepeatedParameter {
        /// The parameter.
        key: String,
        /// The whole.
        text: String,
    },
    /// `auto` is a choice and has no parameters.
    #[error("'{text}': auto takes no parameters; name the device they are for")]
    AutoWithParameters {
        /// The whole.
        text: String,
    },
}

/// Model of an NPU, by the firmware's and the driver's numbering.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum NpuModel {
    /// Phoenix, Hawk Point.
    Npu1,
    /// Early Strix; only in older drivers.
    Npu2,
    /// Strix Point.
    Npu4,
    /// Strix Halo.
    Npu5,
    /// Krackan Point.
    Npu6,
}

impl NpuModel {
    const ALL: [Self; 5] = [Self::Npu1, Self::Npu2, Self::Npu4, Self::Npu5, Self::Npu6];

    fn find(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|model| model.to_string() == text)
    }
}

impl fmt::Display for NpuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Npu1 => "npu1",
            Self::Npu2 => "npu2",
            Self::Npu4 => "npu4",
            Self::Npu5 => "npu5",
            Self::Npu6 => "npu6",
        })
    }
}

/// Which device, without parameters.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceAddress {
    /// The host processor.
    Cpu,
    /// The first NPU of a model.
    Npu(NpuModel),
    /// The in-process twin of an NPU.
    Virtual(NpuModel),
    /// Anything a factory knows by its own scheme, e.g. a device node.
    Path {
        /// Scheme; names the factory.
        scheme: String,
        /// Path; the factory reads it.
        path: String,
    },
}

impl fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Npu(model) => model.fmt(f),
            Self::Virtual(model) => write!(f, "virtual:{model}"),
            Self::Path { scheme, path } => write!(f, "{scheme}:{path}"),
        }
    }
}

/// A device with the parameters it is opened with: `npu5`, `virtual:npu1?fault=timeout`, `amdxdna:/dev/accel/accel1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceUri {
    /// The device.
    pub address: DeviceAddress,
    /// Parameters by key; the factory checks them.
    pub parameters: BTreeMap<String, String>,
}

impl DeviceUri {
    /// The device without parameters: the id of its card.
    #[must_use]
    pub fn id(&self) -> String {
        self.address.to_string()
    }
}

impl From<DeviceAddress> for DeviceUri {
    fn from(address: DeviceAddress) -> Self {
        Self { address, parameters: BTreeMap::new() }
    }
}

impl fmt::Display for DeviceUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)?;
        for (index, (key, value)) in self.parameters.iter().enumerate() {
            write!(f, "{}{key}={value}", if index == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

impl FromStr for DeviceUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        let (address, parameters) = match text.split_once('?') {
            Some((address, parameters)) => (address, parse_parameters(parameters, text)?),
            None => (text, BTreeMap::new()),
        };
        Ok(Self { address: parse_address(address, text)?, parameters })
    }
}

/// What `--device` says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The best device that serves the model.
    #[default]
    Auto,
    /// This device or none.
    Pinned(DeviceUri),
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Pinned(uri) => uri.fmt(f),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        match text.split_once('?') {
            None if text == "auto" => Ok(Self::Auto),
            Some(("auto", _)) => Err(UriError::AutoWithParameters { text: text.to_owned() }),
            _ => text.parse().map(Self::Pinned),
        }
    }
}

fn parse_address(address: &str, text: &str) -> Result<DeviceAddress, UriError> {
    let Some((scheme, path)) = address.split_once(':') else {
        return match address {
            "cpu" => Ok(DeviceAddress::Cpu),
            _ => NpuModel::find(address)
                .map(DeviceAddress::Npu)
                .ok_or_else(|| UriError::Unknown { text: text.to_owned() }),
        };
    };
    if scheme == "virtual" {
        return match NpuModel::find(path) {
            Some(model @ (NpuModel::Npu1 | NpuModel::Npu4 | NpuModel::Npu5)) => Ok(DeviceAddress::Virtual(model)),
            _ => Err(UriError::UnknownVirtual { model: path.to_owned() }),
        };
    }
    if !is_scheme(scheme) {
        return Err(UriError::BadScheme { scheme: scheme.to_owned(), text: text.to_owned() });
    }
    if path.is_empty() {
        return Err(UriError::NoPath { text: text.to_owned() });
    }
    Ok(DeviceAddress::Path { scheme: scheme.to_owned(), path: path.to_owned() })
}

fn is_scheme(scheme: &str) -> bool {
    scheme.starts_with(|first: char| first.is_ascii_lowercase())
        && scheme.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"+-.".contains(&byte))
}

fn parse_parameters(parameters: &str, text: &str) -> Result<BTreeMap<String, String>, UriError> {
    let mut parsed = BTreeMap::new();
    for parameter in parameters.split('&') {
        let Some((key, value)) = parameter.split_once('=').filter(|(key, _)| !key.is_empty()) else {
            return Err(UriError::BadParameter { parameter: parameter.to_owned(), text: text.to_owned() });
        };
        if parsed.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(UriError::RepeatedParameter { key: key.to_owned(), text: text.to_owned() });
        }
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_reads_and_prints_the_same() {
        for text in [
            "auto",
            "cpu",
            "npu1",
            "npu2",
            "npu4",
            "npu5",
            "npu6",
            "virtual:npu1",
            "virtual:npu4",
            "virtual:npu5?fault=timeout&run=3",
            "amdxdna:/dev/accel/accel1",
            "amdxdna:/dev/accel/accel1?contexts=2",
        ] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        let uri: DeviceUri = "virtual:npu5?a=1&b=".parse().unwrap();
        assert_eq!(uri.id(), "virtual:npu5");
        assert_eq!((uri.parameters["a"].as_str(), uri.parameters["b"].as_str()), ("1", ""));
    }

    #[test]
    fn everything_else_is_refused_with_what_is_allowed() {
        let error = |text: &str| text.parse::<DeviceChoice>().unwrap_err();
        assert!(error("gpu").to_string().contains("allowed: auto, cpu, npu1"));
        assert!(matches!(error(""), UriError::Unknown { .. }));
        assert!(matches!(error("npu3"), UriError::Unknown { .. }));
        assert_eq!(
            error("virtual:npu6").to_string(),
            "there is no virtual device 'npu6'; allowed: virtual:npu1, virtual:npu4, virtual:npu5"
        );
        assert!(matches!(error("Amd:x"), UriError::BadScheme { .. }));
        assert!(matches!(error(":x"), UriError::BadScheme { .. }));
        assert!(matches!(error("amdxdna:"), UriError::NoPath { .. }));
        assert!(matches!(error("cpu?"), UriError::BadParameter { .. }));
        assert!(matches!(error("cpu?threads"), UriError::BadParameter { .. }));
        assert!(matches!(error("cpu?=1"), UriError::BadParameter { .. }));
        assert!(matches!(error("cpu?a=1&a=2"), UriError::RepeatedParameter { .. }));
        assert!(matches!(error("auto?a=1"), UriError::AutoWithParameters { .. }));
    }
}

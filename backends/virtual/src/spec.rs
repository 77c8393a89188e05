//! Which virtual device to make: part, driver profile, faults.

use crate::fault::{FaultPlan, FaultSyntaxError};
use npuhal_amdxdna::silicon::Silicon;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Driver whose behaviour is imitated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Profile {
    /// The mainline driver as first released (Linux 6.14 to 6.18): version 0.1.
    MainlineOld,
    /// The mainline driver of 2026: version 0.16.
    #[default]
    MainlineNew,
    /// The out-of-tree driver: version 1.0.
    OutOfTree,
}

impl Profile {
    /// Every profile.
    pub const ALL: [Self; 3] = [Self::MainlineOld, Self::MainlineNew, Self::OutOfTree];

    /// Name, as in `profile=mainline-old`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MainlineOld => "mainline-old",
            Self::MainlineNew => "mainline-new",
            Self::OutOfTree => "out-of-tree",
        }
    }

    /// Major and minor version of the interface.
    #[must_use]
    pub const fn version(self) -> (i32, i32) {
        match self {
            Self::MainlineOld => (0, 1),
            Self::MainlineNew => (0, 16),
            Self::OutOfTree => (1, 0),
        }
    }

    /// Time without progress after which the driver ends a command.
    #[must_use]
    pub const fn watchdog(self) -> Duration {
        match self {
            Self::MainlineOld => Duration::from_secs(60),
            Self::MainlineNew | Self::OutOfTree => Duration::from_secs(2),
        }
    }

    /// Whether the driver belongs to the Linux kernel.
    #[must_use]
    pub const fn is_mainline(self) -> bool {
        matches!(self, Self::MainlineOld | Self::MainlineNew)
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Age of the firmware, which gates features on second-generation parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Firmware {
    /// Before protocol 6.18: no health record, no growth of the device heap.
    Old,
    /// Protocol 6.18 or later.
    #[default]
    New,
}

/// A virtual device: `virtual:<part>[?<option>[&<option>…]]`.
///
/// | Option | Values | Default |
/// |---|---|---|
/// | part | `npu1`, `npu4`, `npu5` | |
/// | `profile` | `mainline-old`, `mainline-new`, `out-of-tree` | `mainline-new` |
/// | `firmware` | `old`, `new` | `new` |
/// | `array` | `run` interprets control code; `skip` completes every well-formed command without looking at its code | `run` |
/// | `fault` | a [`FaultPlan`]; may be given several times | none |
///
/// ```
/// use npuhal_virtual::{Profile, VirtualSpec};
///
/// let spec: VirtualSpec = "virtual:npu5?profile=mainline-old&fault=timeout@3,EINTR@wait:0".parse()?;
/// assert_eq!(spec.profile, Profile::MainlineOld);
/// assert_eq!(spec.to_string(), "virtual:npu5?profile=mainline-old&fault=timeout@3,EINTR@wait:0");
/// # Ok::<(), npuhal_virtual::SpecError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualSpec {
    /// Part.
    pub silicon: Silicon,
    /// Driver.
    pub profile: Profile,
    /// Firmware.
    pub firmware: Firmware,
    /// Whether control code is interpreted. `false` leaves the array out, to measure what the host does.
    pub runs_array: bool,
    /// Faults.
    pub faults: FaultPlan,
}

impl VirtualSpec {
    /// `silicon` behind the newest driver and firmware, without faults.
    #[must_use]
    pub fn new(silicon: Silicon) -> Self {
        Self {
            silicon,
            profile: Profile::default(),
            firmware: Firmware::default(),
            runs_array: true,
            faults: FaultPlan::default(),
        }
    }

    /// The same behind another driver.
    #[must_use]
    pub fn with_profile(mut self, profile: Profile) -> Self {
        self.profile = profile;
        self
    }

    /// The same with faults.
    #[must_use]
    pub fn with_faults(mut self, faults: FaultPlan) -> Self {
        self.faults = faults;
        self
    }

    /// Whether timed-out commands carry a health record: newer firmware of second-generation parts behind a driver that
    /// hands it on.
    #[must_use]
    pub fn has_health_record(&self) -> bool {
        self.silicon.facts().is_preemptible && self.firmware == Firmware::New && self.profile != Profile::MainlineOld
    }

    /// Whether the device heap can grow beyond its first chunk.
    #[must_use]
    pub fn heap_grows(&self) -> bool {
        self.silicon.facts().is_preemptible && self.firmware == Firmware::New && self.profile == Profile::MainlineNew
    }
}

/// A text that describes no virtual device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// Another scheme.
    #[error("{found:?} is not a virtual device; wanted virtual:npu1, virtual:npu4 or virtual:npu5")]
    Scheme {
        /// The text.
        found: String,
    },
    /// A part without a twin.
    #[error("no virtual {found:?}; there are npu1, npu4 and npu5")]
    Part {
        /// The part.
        found: String,
    },
    /// An option that does not exist, or has another value.
    #[error("option {name}: found {found:?}, wanted {wanted}")]
    Option {
        /// Name of the option.
        name: String,
        /// Its value.
        found: String,
        /// Values accepted.
        wanted: &'static str,
    },
    /// A fault plan.
    #[error(transparent)]
    Fault(#[from] FaultSyntaxError),
}

impl FromStr for VirtualSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let rest = text.strip_prefix("virtual:").ok_or_else(|| SpecError::Scheme { found: text.to_owned() })?;
        let (part, options) = rest.split_once('?').unwrap_or((rest, ""));
        let silicon = [Silicon::Npu1, Silicon::Npu4, Silicon::Npu5]
            .into_iter()
            .find(|silicon| silicon.name() == part)
            .ok_or_else(|| SpecError::Part { found: part.to_owned() })?;
        let mut spec = Self::new(silicon);
        for option in options.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            spec.set(name, value)?;
        }
        Ok(spec)
    }
}

impl VirtualSpec {
    fn set(&mut self, name: &str, value: &str) -> Result<(), SpecError> {
        let refused = |wanted| SpecError::Option { name: name.to_owned(), found: value.to_owned(), wanted };
        match name {
            "profile" => {
                self.profile = Profile::ALL
                    .into_iter()
                    .find(|profile| profile.name() == value)
                    .ok_or_else(|| refused("mainline-old, mainline-new or out-of-tree"))?;
            }
            "firmware" => {
                self.firmware = match value {
                    "old" => Firmware::Old,
                    "new" => Firmware::New,
                    _ => return Err(refused("old or new")),
                };
            }
            "array" => {
                self.runs_array = match value {
                    "run" => true,
                    "skip" => false,
                    _ => return Err(refused("run or skip")),
                };
            }
            "fault" => self.faults.merge(value.parse()?),
            _ => return Err(refused("one of the options profile, firmware, array, fault")),
        }
        Ok(())
    }
}

impl fmt::Display for VirtualSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "virtual:{}", self.silicon)?;
        let mut options = Vec::new();
        if self.profile != Profile::default() {
            options.push(format!("profile={}", self.profile));
        }
        if self.firmware == Firmware::Old {
            options.push("firmware=old".to_owned());
        }
        if !self.runs_array {
            options.push("array=skip".to_owned());
        }
        if !self.faults.is_empty() {
            options.push(format!("fault={}", self.faults));
        }
        if options.is_empty() { Ok(()) } else { write!(f, "?{}", options.join("&")) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Profile, SpecError, VirtualSpec};
    use npuhal_amdxdna::silicon::Silicon;

    #[test]
    fn uris_round_trip() {
        for text in [
            "virtual:npu1",
            "virtual:npu4?profile=out-of-tree",
            "virtual:npu5?profile=mainline-old&firmware=old&array=skip&fault=late@2:1500,remove@9",
        ] {
            let spec: VirtualSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
            assert_eq!(spec.to_string().parse::<VirtualSpec>().unwrap(), spec);
        }
        let spec: VirtualSpec = "virtual:npu5?fault=timeout@1&fault=error@2".parse().unwrap();
        assert_eq!(spec.to_string(), "virtual:npu5?fault=timeout@1,error@2");
    }

    #[test]
    fn what_is_not_a_virtual_device_is_refused_by_name() {
        for (text, wanted) in [
            ("npu1", "\"npu1\" is not a virtual device; wanted virtual:npu1, virtual:npu4 or virtual:npu5"),
            ("virtual:npu2", "no virtual \"npu2\"; there are npu1, npu4 and npu5"),
            (
                "virtual:npu1?profile=new",
                "option profile: found \"new\", wanted mainline-old, mainline-new or out-of-tree",
            ),
            (
                "virtual:npu1?speed=9",
                "option speed: found \"9\", wanted one of the options profile, firmware, array, fault",
            ),
        ] {
            assert_eq!(text.parse::<VirtualSpec>().unwrap_err().to_string(), wanted);
        }
        assert!(matches!("virtual:npu1?fault=explode@1".parse::<VirtualSpec>(), Err(SpecError::Fault(_))));
    }

    #[test]
    fn features_follow_part_firmware_and_driver() {
        let new = VirtualSpec::new(Silicon::Npu5);
        assert!(new.has_health_record() && new.heap_grows());
        assert!(!VirtualSpec::new(Silicon::Npu1).has_health_record());
        assert!(!new.clone().with_profile(Profile::MainlineOld).has_health_record());
        assert!(!new.clone().with_profile(Profile::OutOfTree).heap_grows());
        assert!(!"virtual:npu5?firmware=old".parse::<VirtualSpec>().unwrap().has_health_record());
    }
}

//! What is known about firmware versions. The only place with such knowledge.

use crate::silicon::Silicon;
use npuhal_core::Generation;
use std::fmt;
use std::str::FromStr;

/// A firmware version as the driver's `fw_version` attribute shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FirmwareVersion(pub [u32; 4]);

impl FromStr for FirmwareVersion {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = [0; 4];
        let mut numbers = text.trim().split('.');
        for part in &mut parts {
            *part = numbers.next().ok_or(())?.parse().map_err(|_| ())?;
        }
        if numbers.next().is_some() { Err(()) } else { Ok(Self(parts)) }
    }
}

impl fmt::Display for FirmwareVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch, build] = self.0;
        write!(f, "{major}.{minor}.{patch}.{build}")
    }
}

/// What a firmware version means for npuhal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FirmwareVerdict {
    /// Nothing is known against it.
    Fine,
    /// Something npuhal uses needs a newer one.
    TooOld {
        /// Oldest version that has it.
        wanted: FirmwareVersion,
        /// What is missing.
        missing: &'static str,
    },
    /// Known to be broken.
    Denied {
        /// Who says so, and what is wrong.
        reason: &'static str,
    },
}

/// Judges `version` on `silicon`.
#[must_use]
pub fn judge(silicon: Silicon, version: FirmwareVersion) -> FirmwareVerdict {
    match silicon.generation() {
        // amd/xdna-driver, pull request 196: "The .323 firmware of NPU1 is buggy".
        Generation::Xdna1 if version.0[3] == 323 => {
            FirmwareVerdict::Denied { reason: "build 323 was withdrawn by the driver's authors as buggy" }
        }
        // Releases up to 1.0.20.31 speak protocol 6.12 (amd/xdna-driver, issue 1074); START_NPU_PREEMPT_ELF needs 6.15 or 7.
        Generation::Xdna2 if version < FirmwareVersion([1, 1, 0, 0]) => FirmwareVerdict::TooOld {
            wanted: FirmwareVersion([1, 1, 0, 0]),
            missing: "running full ELFs (opcode START_NPU_PREEMPT_ELF)",
        },
        _ => FirmwareVerdict::Fine,
    }
}

#[cfg(test)]
mod tests {
    use super::{FirmwareVerdict, FirmwareVersion, judge};
    use crate::silicon::Silicon;

    #[test]
    fn versions_are_read_compared_and_judged() {
        let version = |text: &str| text.parse::<FirmwareVersion>();
        assert_eq!(version("1.5.5.391\n"), Ok(FirmwareVersion([1, 5, 5, 391])));
        assert!(version("1.5.5").is_err() && version("1.5.5.391.2").is_err() && version("a.b.c.d").is_err());
        assert!(version("1.0.20.31").unwrap() < version("1.1.0.0").unwrap());
        assert_eq!(judge(Silicon::Npu1, version("1.5.5.391").unwrap()), FirmwareVerdict::Fine);
        assert!(matches!(judge(Silicon::Npu1, version("1.5.2.323").unwrap()), FirmwareVerdict::Denied { .. }));
        assert!(matches!(judge(Silicon::Npu5, version("1.0.20.31").unwrap()), FirmwareVerdict::TooOld { .. }));
        assert_eq!(judge(Silicon::Npu5, version("1.1.2.64").unwrap()), FirmwareVerdict::Fine);
        assert_eq!(version("255.0.4.33").unwrap().to_string(), "255.0.4.33");
    }
}

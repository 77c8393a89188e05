//! What a device is, as far as it can be said without opening a context on it.

use std::fmt;

/// The kind of processor behind a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Generation {
    /// The host processor.
    Cpu,
    /// First-generation XDNA (AIE2): Phoenix and Hawk Point.
    Xdna1,
    /// Second-generation XDNA (AIE2P): Strix, Strix Halo, Krackan.
    Xdna2,
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Xdna1 => "xdna1",
            Self::Xdna2 => "xdna2",
        })
    }
}

/// How a statement about an NPU is known. Every figure that npuhal prints about an NPU carries one of these words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Claim {
    /// Stated by somebody else, who is named beside the figure.
    Published,
    /// Ran on the virtual NPU.
    Virtual,
    /// Computed from a stated model.
    Modelled,
    /// Measured on hardware.
    Measured,
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Published => "published",
            Self::Virtual => "virtual",
            Self::Modelled => "modelled",
            Self::Measured => "measured on hardware",
        })
    }
}

/// The driver behind a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverCard {
    /// Name as the driver reports it, e.g. `amdxdna_accel_driver`.
    pub name: String,
    /// Interface version, e.g. `0.16`.
    pub version: String,
    /// Firmware version, where there is firmware and it could be read.
    pub firmware: Option<String>,
}

/// Static facts of one device. Listing a card is no promise that the device can be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceCard {
    /// Address of the device: `cpu`, `npu1`, `npu5`, `virtual:npu1`, …; unique among the cards of a process.
    pub id: String,
    /// Name for people.
    pub name: String,
    /// Kind of processor.
    pub generation: Generation,
    /// True for the in-process twin of the hardware; its results carry [`Claim::Virtual`].
    pub is_virtual: bool,
    /// Usable columns of the array (NPU) or worker threads (CPU).
    pub columns: u32,
    /// Core rows of the array; 1 for a CPU.
    pub core_rows: u32,
    /// Memory a model may take, in bytes, where known.
    pub memory_bytes: Option<u64>,
    /// Driver, where there is one.
    pub driver: Option<DriverCard>,
    /// Hardware contexts that may be open at the same time; `None` where there is no limit.
    pub context_limit: Option<u32>,
    /// Capabilities worth showing, e.g. instruction-set names.
    pub features: Vec<String>,
}

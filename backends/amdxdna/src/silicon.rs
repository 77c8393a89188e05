//! The parts that this driver serves, and what is fixed about each.

use npuhal_core::Generation;
use std::fmt;

/// PCI vendor of all of them.
pub const PCI_VENDOR: u16 = 0x1022;

/// One part, as the driver names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Silicon {
    /// Phoenix and Hawk Point.
    Npu1,
    /// Early Strix; only in older drivers.
    Npu2,
    /// Strix Point.
    Npu4,
    /// Strix Halo.
    Npu5,
    /// Krackan.
    Npu6,
}

/// Facts of a part that no query reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SiliconFacts {
    /// Name of the part, for people.
    pub product: &'static str,
    /// PCI device id.
    pub pci_device: u16,
    /// PCI revision.
    pub pci_revision: u8,
    /// Columns of the array. A driver that is open reports the true number.
    pub columns: u32,
    /// Core rows of the array.
    pub core_rows: u32,
    /// Columns at the start of the array that cannot be used.
    pub unusable_columns: u32,
    /// Hardware contexts that may be open at the same time.
    pub context_limit: u32,
    /// Whether the opcodes with code to save and restore the array exist.
    pub is_preemptible: bool,
    /// Whether destroying one context leaves the others of the process unusable.
    pub evicts_together: bool,
}

impl Silicon {
    /// Every part.
    pub const ALL: [Self; 5] = [Self::Npu1, Self::Npu2, Self::Npu4, Self::Npu5, Self::Npu6];

    /// The part with these PCI numbers.
    #[must_use]
    pub fn of_pci(device: u16, revision: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|part| {
            let facts = part.facts();
            (facts.pci_device, facts.pci_revision) == (device, revision)
        })
    }

    /// Kind of processor.
    #[must_use]
    pub const fn generation(self) -> Generation {
        match self {
            Self::Npu1 => Generation::Xdna1,
            Self::Npu2 | Self::Npu4 | Self::Npu5 | Self::Npu6 => Generation::Xdna2,
        }
    }

    /// Facts.
    #[must_use]
    pub const fn facts(self) -> SiliconFacts {
        let xdna2 = SiliconFacts {
            product: "Strix Point",
            pci_device: 0x17F0,
            pci_revision: 0x10,
            columns: 8,
            core_rows: 4,
            unusable_columns: 0,
            context_limit: 16,
            is_preemptible: true,
            evicts_together: false,
        };
        match self {
            Self::Npu1 => SiliconFacts {
                product: "Phoenix or Hawk Point",
                pci_device: 0x1502,
                pci_revision: 0x00,
                columns: 5,
                core_rows: 4,
                unusable_columns: 1,
                context_limit: 6,
                is_preemptible: false,
                evicts_together: true,
            },
            Self::Npu2 => SiliconFacts { product: "early Strix", pci_revision: 0x00, ..xdna2 },
            Self::Npu4 => xdna2,
            Self::Npu5 => SiliconFacts { product: "Strix Halo", pci_revision: 0x11, ..xdna2 },
            Self::Npu6 => SiliconFacts { product: "Krackan", pci_revision: 0x20, ..xdna2 },
        }
    }

    /// Name, as in `npu5`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Npu1 => "npu1",
            Self::Npu2 => "npu2",
            Self::Npu4 => "npu4",
            Self::Npu5 => "npu5",
            Self::Npu6 => "npu6",
        }
    }
}

impl fmt::Display for Silicon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Later parts with another queue model; they are recognised and declined.
#[must_use]
pub const fn is_later_part(pci_device: u16) -> bool {
    matches!(pci_device, 0x17F1 | 0x17F2 | 0x17F3 | 0x1B0A | 0x1B0B | 0x1B0C)
}

#[cfg(test)]
mod tests {
    use super::{Silicon, is_later_part};
    use npuhal_core::Generation;

    #[test]
    fn parts_are_told_by_id_and_revision() {
        assert_eq!(Silicon::of_pci(0x1502, 0), Some(Silicon::Npu1));
        assert_eq!(Silicon::of_pci(0x17F0, 0x00), Some(Silicon::Npu2));
        assert_eq!(Silicon::of_pci(0x17F0, 0x10), Some(Silicon::Npu4));
        assert_eq!(Silicon::of_pci(0x17F0, 0x11), Some(Silicon::Npu5));
        assert_eq!(Silicon::of_pci(0x17F0, 0x20), Some(Silicon::Npu6));
        assert_eq!(Silicon::of_pci(0x17F0, 0x30), None);
        assert_eq!(Silicon::of_pci(0x1502, 1), None);
        assert_eq!(Silicon::Npu1.generation(), Generation::Xdna1);
        assert_eq!(Silicon::Npu6.generation(), Generation::Xdna2);
        assert!(is_later_part(0x17F1) && is_later_part(0x1B0C) && !is_later_part(0x17F0));
    }
}

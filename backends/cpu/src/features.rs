//! Which instruction set the kernels use.

use crate::table::{self, KernelTable};

/// The kernels a process uses. Results are bit-identical for a fixed value, and nearly so between values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Features {
    isa: Isa,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Features {
    /// The best that this processor has.
    #[must_use]
    pub fn detect() -> Self {
        Self::avx2().unwrap_or_else(Self::portable)
    }

    /// No instructions beyond the compiler's baseline.
    #[must_use]
    pub const fn portable() -> Self {
        Self { isa: Isa::Portable }
    }

    /// AVX2 with FMA and F16C, where the processor has them.
    #[must_use]
    pub fn avx2() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            return Some(Self { isa: Isa::Avx2 });
        }
        None
    }

    /// Name for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.table().name
    }

    /// The kernels.
    #[must_use]
    pub const fn table(self) -> &'static KernelTable {
        match self.isa {
            Isa::Portable => &table::PORTABLE,
            // `Isa::Avx2` exists only after detection.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &table::AVX2,
        }
    }
}

impl Default for Features {
    fn default() -> Self {
        Self::detect()
    }
}

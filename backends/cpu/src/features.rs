//! Which instruction set the kernels use.

use crate::table::{self, KernelTable};
use thiserror::Error;

/// The kernels a process uses. Results are bit-identical for a fixed value, and nearly so between values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Features {
    isa: Isa,
}

/// In ascending order of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Isa {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
}

/// An instruction set that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the instruction set '{wanted}' cannot be used here; this processor and build have: {available}")]
pub struct FeaturesError {
    /// What was asked for.
    pub wanted: String,
    /// What there is, separated by commas.
    pub available: String,
}

impl Features {
    /// The best that this processor has.
    #[must_use]
    pub fn detect() -> Self {
        Self::available().last().copied().unwrap_or_else(Self::portable)
    }

    /// Everything that this processor has, the best last.
    #[must_use]
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut, reason = "only some architectures have more")]
        let mut all = vec![Self::portable()];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            all.push(Self { isa: Isa::Avx2 });
            if is_x86_feature_detected!("avxvnni") {
                all.push(Self { isa: Isa::AvxVnni });
            }
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
            {
                all.push(Self { isa: Isa::Avx512Vnni });
            }
        }
        all
    }

    /// The instruction set called `name`, or the best for `auto`.
    ///
    /// # Errors
    /// When this processor or build does not have it.
    pub fn named(name: &str) -> Result<Self, FeaturesError> {
        let available = Self::available();
        if name == "auto" {
            return Ok(Self::detect());
        }
        available.iter().copied().find(|features| features.name() == name).ok_or_else(|| FeaturesError {
            wanted: name.to_owned(),
            available: available.iter().map(|features| features.name()).collect::<Vec<_>>().join(", "),
        })
    }

    /// No instructions beyond the compiler's baseline.
    #[must_use]
    pub const fn portable() -> Self {
        Self { isa: Isa::Portable }
    }

    /// AVX2 with FMA and F16C, where the processor has them.
    #[must_use]
    pub fn avx2() -> Option<Self> {
        Self::named("avx2").ok()
    }

    /// Name for people, and for [`Features::named`].
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.table().name
    }

    /// The kernels.
    #[must_use]
    pub const fn table(self) -> &'static KernelTable {
        match self.isa {
            Isa::Portable => &table::PORTABLE,
            // The others exist only after detection.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &table::AVX2,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => &table::AVX_VNNI,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => &table::AVX512_VNNI,
        }
    }
}

impl Default for Features {
    fn default() -> Self {
        Self::detect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_sets_are_found_by_name() {
        for features in Features::available() {
            assert_eq!(Features::named(features.name()), Ok(features));
        }
        assert_eq!(Features::named("auto"), Ok(Features::detect()));
        let error = Features::named("mmx").unwrap_err().to_string();
        assert!(error.contains("'mmx'") && error.contains("have: portable"), "{error}");
    }
}

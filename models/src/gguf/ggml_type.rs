//! Type numbers of tensors.

use crate::tensor::WeightType;
use std::fmt;

/// Type number of a tensor in a GGUF file, supported or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GgmlType(pub u32);

impl GgmlType {
    /// The weight type, where it is one of those this program computes with.
    #[must_use]
    pub const fn weight_type(self) -> Option<WeightType> {
        Some(match self.0 {
            0 => WeightType::F32,
            1 => WeightType::F16,
            2 => WeightType::Q4_0,
            3 => WeightType::Q4_1,
            6 => WeightType::Q5_0,
            7 => WeightType::Q5_1,
            8 => WeightType::Q8_0,
            10 => WeightType::Q2K,
            11 => WeightType::Q3K,
            12 => WeightType::Q4K,
            13 => WeightType::Q5K,
            14 => WeightType::Q6K,
            20 => WeightType::Iq4Nl,
            23 => WeightType::Iq4Xs,
            30 => WeightType::Bf16,
            39 => WeightType::Mxfp4,
            _ => return None,
        })
    }

    /// Name of a number that GGML has given out, also of those it has withdrawn.
    #[must_use]
    pub const fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            4 => "Q4_2",
            5 => "Q4_3",
            9 => "Q8_1",
            15 => "Q8_K",
            16 => "IQ2_XXS",
            17 => "IQ2_XS",
            18 => "IQ3_XXS",
            19 => "IQ1_S",
            21 => "IQ3_S",
            22 => "IQ2_S",
            24 => "I8",
            25 => "I16",
            26 => "I32",
            27 => "I64",
            28 => "F64",
            29 => "IQ1_M",
            31 => "Q4_0_4_4",
            32 => "Q4_0_4_8",
            33 => "Q4_0_8_8",
            34 => "TQ1_0",
            35 => "TQ2_0",
            36 => "IQ4_NL_4_4",
            37 => "IQ4_NL_4_8",
            38 => "IQ4_NL_8_8",
            40 => "NVFP4",
            41 => "Q1_0",
            _ => match self.weight_type() {
                Some(weight_type) => weight_type.name(),
                None => return None,
            },
        })
    }
}

impl From<WeightType> for GgmlType {
    fn from(weight_type: WeightType) -> Self {
        Self(match weight_type {
            WeightType::F32 => 0,
            WeightType::F16 => 1,
            WeightType::Q4_0 => 2,
            WeightType::Q4_1 => 3,
            WeightType::Q5_0 => 6,
            WeightType::Q5_1 => 7,
            WeightType::Q8_0 => 8,
            WeightType::Q2K => 10,
            WeightType::Q3K => 11,
            WeightType::Q4K => 12,
            WeightType::Q5K => 13,
            WeightType::Q6K => 14,
            WeightType::Iq4Nl => 20,
            WeightType::Iq4Xs => 23,
            WeightType::Bf16 => 30,
            WeightType::Mxfp4 => 39,
        })
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "number {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_weight_types_agree_both_ways() {
        for weight_type in WeightType::ALL {
            assert_eq!(GgmlType::from(weight_type).weight_type(), Some(weight_type));
            assert_eq!(GgmlType::from(weight_type).to_string(), weight_type.name());
        }
        assert_eq!((0..200).filter(|&id| GgmlType(id).weight_type().is_some()).count(), WeightType::ALL.len());
        assert_eq!(GgmlType(28).to_string(), "F64");
        assert_eq!(GgmlType(99).to_string(), "number 99");
    }
}

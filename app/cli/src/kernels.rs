//! What the kernels beside a packed model are good for.

use npuhal_models::ModelSource;
use npuhal_models::q4nx::directory::KERNELS;
use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::kernels::{KernelError, KernelFiles, KernelTarget, Kernels};
use std::fmt;
use std::path::Path;

/// Kernels of the lane in a folder, as far as the host can tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KernelState {
    /// There is no such folder.
    Absent,
    /// They cannot be used with the model.
    Unusable(String),
    /// They fit the model.
    Fits {
        /// What they run on.
        target: KernelTarget,
        /// Positions of their KV cache.
        positions: u32,
    },
}

impl KernelState {
    /// Kernels in the `npu` of `directory`, a packed `model`.
    pub(crate) fn of(directory: &Path, model: &ModelSource) -> Self {
        let folder = directory.join(KERNELS);
        if !folder.is_dir() {
            return Self::Absent;
        }
        let fits = || -> Result<Self, KernelError> {
            let dimensions = Dimensions::of(model.config())?;
            let files = KernelFiles::read(&folder)?;
            let positions = Kernels::new(&files, &dimensions)?.positions();
            Ok(Self::Fits { target: KernelTarget::of(&folder, &files), positions })
        };
        fits().unwrap_or_else(|error| Self::Unusable(error.to_string()))
    }
}

impl fmt::Display for KernelState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("none"),
            Self::Unusable(reason) => write!(f, "npu/ cannot be used: {reason}"),
            Self::Fits { target: KernelTarget::Virtual, positions } => {
                write!(f, "npu/, for the virtual NPU only, {positions} positions")
            }
            Self::Fits { target: KernelTarget::Hardware, positions } => {
                write!(f, "npu/, compiled for hardware, {positions} positions")
            }
        }
    }
}

//! `kit.json`.

use npuhal_core::device::LengthUnit;
use npuhal_models::package::Shape;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Name of the file.
pub const KIT_FILE: &str = "kit.json";
/// Folder of a package that holds its kit.
pub const KIT_FOLDER: &str = "npu";
/// `format` of the file.
pub const KIT_FORMAT: &str = "npuhal-xdna1-kit-v1";
/// Version of the streams, headers and arguments of this program.
pub const LAYOUT_VERSION: u32 = 1;

/// Who made the designs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KitOrigin {
    /// Written for the core programs of the virtual NPU.
    Virtual,
    /// Compiled elsewhere.
    Imported,
}

/// Unit of a kernel's instruction-length argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SizeUnit {
    /// Bytes.
    Bytes,
    /// 32-bit words.
    Words,
}

impl From<SizeUnit> for LengthUnit {
    fn from(unit: SizeUnit) -> Self {
        match unit {
            SizeUnit::Bytes => Self::Bytes,
            SizeUnit::Words => Self::Words,
        }
    }
}

/// Shape of a kernel's models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KitShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward block.
    pub intermediate: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Layers of the model.
    pub layers: usize,
    /// Rows of the embedding.
    pub vocab: usize,
}

impl From<Shape> for KitShape {
    fn from(shape: Shape) -> Self {
        let Shape { hidden_size: hidden, intermediate_size: intermediate, heads, kv_heads, layers, vocab_size: vocab } =
            shape;
        Self { hidden, intermediate, heads, kv_heads, layers, vocab }
    }
}

impl From<KitShape> for Shape {
    fn from(shape: KitShape) -> Self {
        let KitShape {
            hidden: hidden_size,
            intermediate: intermediate_size,
            heads,
            kv_heads,
            layers,
            vocab: vocab_size,
        } = shape;
        Self { hidden_size, intermediate_size, heads, kv_heads, layers, vocab_size }
    }
}

/// A buffer argument.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KitArgument {
    /// What is in it.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

/// SHA-256 of a kernel's files, 64 lower-case hexadecimal digits each.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KitDigests {
    /// Of the xclbin.
    pub xclbin: String,
    /// Of the instruction stream.
    pub instructions: String,
}

/// A kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KitKernel {
    /// Name of its design.
    pub design: String,
    /// Layers of a dispatch.
    pub layers: usize,
    /// Version of its streams, headers and arguments.
    pub layout_version: u32,
    /// Shape of its models.
    pub shape: KitShape,
    /// Name of the kernel inside the xclbin.
    pub kernel: String,
    /// File of the container.
    pub xclbin: String,
    /// File of the instruction stream.
    pub instructions: String,
    /// Unit of the instruction-length argument.
    pub instruction_size_unit: SizeUnit,
    /// Buffer arguments in order.
    pub arguments: Vec<KitArgument>,
    /// Checksums of both files.
    pub sha256: KitDigests,
}

/// The whole file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KitManifest {
    /// [`KIT_FORMAT`].
    pub format: String,
    /// Who made the designs.
    pub origin: KitOrigin,
    /// What they were made with: names and versions.
    #[serde(default)]
    pub toolchain: BTreeMap<String, String>,
    /// The kernels.
    pub kernels: Vec<KitKernel>,
}

//! Kernels of the virtual NPU for small models.

use npuhal_models::ModelConfig;
use npuhal_models::package::Shape;
use npuhal_virtual::design::qwen3;
use npuhal_virtual::kit::{self, Xdna1Kit, Xdna1Model};
use npuhal_xdna2::kernels::{KernelTarget, MARK_FILE};
use std::fs;
use std::path::Path;

/// Names and contents of a model's kernel files.
pub type KernelFileList = Vec<(String, Vec<u8>)>;

/// Kernels of the xdna2 lane for contexts up to `positions`; the last file is the mark that tells them from compiled ones.
///
/// # Panics
/// For a model that the designs do not compute.
#[must_use]
pub fn lane_kernels(config: &ModelConfig, positions: u32) -> KernelFileList {
    let dimensions = qwen3::Dimensions {
        hidden: config.hidden_size,
        heads: config.heads,
        kv_heads: config.kv_heads,
        intermediate: config.intermediate_size,
        vocab: config.vocab_size,
        norm_epsilon: config.rms_norm_eps,
    };
    let kernels = kit::qwen3(&dimensions, positions).expect("kernels for a model of these dimensions");
    let mark = (MARK_FILE.to_owned(), KernelTarget::mark(&kernels.image, "a test").into_bytes());
    let files = kernels.files().into_iter().map(|(name, contents)| (name.to_owned(), contents.to_vec()));
    files.chain([mark]).collect()
}

/// Kernels of the xdna1 lane: all that the routes of a model may want.
///
/// # Panics
/// For a model that no design computes.
#[must_use]
pub fn xdna1_kernels(shape: Shape) -> KernelFileList {
    let Shape { hidden_size: hidden, intermediate_size: intermediate, heads, kv_heads, layers, vocab_size: vocab } =
        shape;
    let model = Xdna1Model { hidden, intermediate, heads, kv_heads, layers, vocab };
    Xdna1Kit::complete(&model).expect("a kit for a model of this shape").files
}

/// Writes `files` into `folder`, which is made where it is not there.
///
/// # Panics
/// Where the folder cannot be written.
pub fn write_kernels(folder: &Path, files: &[(String, Vec<u8>)]) {
    fs::create_dir_all(folder).expect("a folder");
    for (name, contents) in files {
        fs::write(folder.join(name), contents).expect("a kernel file");
    }
}

//! Kits: the compiled designs of the lane, beside a model or in a folder of their own.
//!
//! A kit is a folder with `kit.json` and, for each kernel, an xclbin and an instruction stream. [`Kit::read`] looks at
//! `kit.json` alone; [`Kit::find`] compares a kernel's statements with a model; [`Kit::load`] reads the files and compares them
//! with their checksums and with the layout. A kernel that differs in anything is refused before a byte of it is loaded.

mod design;
mod error;
mod image;
mod import;
mod manifest;
mod moves;

pub use design::{Design, DesignArgument, chunk_cache_bytes};
pub use error::KitError;
pub use image::KernelImage;
pub use import::{ImportRequest, import};
pub use manifest::{
    KIT_FILE, KIT_FOLDER, KIT_FORMAT, KitArgument, KitDigests, KitKernel, KitManifest, KitOrigin, KitShape,
    LAYOUT_VERSION, SizeUnit,
};

use image::{check_instructions, check_xclbin};
use npuhal_models::hexadecimal;
use npuhal_models::package::Shape;
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Largest `kit.json`; one kernel takes about 1 KiB.
const MAX_MANIFEST_BYTES: u64 = 1 << 20;
/// Largest file of a kernel; compiled designs have some 100 KiB.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// A kit, opened: its statements are sound, its files were not looked at.
#[derive(Debug, Clone)]
pub struct Kit {
    folder: PathBuf,
    manifest: KitManifest,
}

impl Kit {
    /// Reads `kit.json` of `folder`.
    ///
    /// # Errors
    /// [`KitError::Missing`], [`KitError::Io`], [`KitError::TooLarge`], [`KitError::Manifest`].
    pub fn read(folder: &Path) -> Result<Self, KitError> {
        let path = folder.join(KIT_FILE);
        let bytes = match read_file(&path, MAX_MANIFEST_BYTES) {
            Err(KitError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                return Err(KitError::Missing { path });
            }
            read => read?,
        };
        let bad =
            |field: &str, reason: String| KitError::Manifest { path: path.clone(), field: field.to_owned(), reason };
        let value: serde_json::Value =
            serde_json::from_slice(&bytes).map_err(|error| bad("contents", error.to_string()))?;
        // Another version may have other fields: it is told first.
        let format = value.get("format").and_then(serde_json::Value::as_str).unwrap_or("none");
        if format != KIT_FORMAT {
            return Err(bad("format", format!("wanted {KIT_FORMAT}, found {format}; make the kit again")));
        }
        let manifest: KitManifest =
            serde_json::from_value(value).map_err(|error| bad("contents", error.to_string()))?;
        for kernel in &manifest.kernels {
            for name in [&kernel.xclbin, &kernel.instructions] {
                if !is_plain_name(name) {
                    return Err(bad("kernels", format!("wanted plain names of files in the kit, found {name:?}")));
                }
            }
        }
        Ok(Self { folder: folder.to_owned(), manifest })
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What it says about itself.
    #[must_use]
    pub fn manifest(&self) -> &KitManifest {
        &self.manifest
    }

    /// The kernels of a design, whatever model they are for.
    pub fn kernels_of(&self, design: Design) -> impl Iterator<Item = &KitKernel> {
        self.manifest.kernels.iter().filter(move |kernel| kernel.design == design.name())
    }

    /// Layer counts that the kit has kernels of a chunked design for, for models of `shape`, ascending.
    #[must_use]
    pub fn chunk_sizes(&self, design: Design, shape: Shape) -> Vec<usize> {
        let kernels = self.kernels_of(design).filter(|kernel| Shape::from(kernel.shape) == shape);
        let mut sizes: Vec<usize> = kernels.map(|kernel| kernel.layers).filter(|layers| *layers > 0).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Whether the statements of every kernel agree with the layout for models of `shape`.
    ///
    /// # Errors
    /// [`KitError::Manifest`] for a design that is not known; as [`Kit::find`] for the first kernel that does not fit.
    pub fn check(&self, shape: Shape) -> Result<(), KitError> {
        for kernel in &self.manifest.kernels {
            let path = || self.folder.join(KIT_FILE);
            let unknown = |reason| KitError::Manifest { path: path(), field: "design".to_owned(), reason };
            let design: Design = kernel.design.parse().map_err(unknown)?;
            self.find(design, kernel.layers, shape)?;
        }
        Ok(())
    }

    /// The kernel of `design` for `layers` layers of a model of `shape`: its statements agree with the layout.
    ///
    /// # Errors
    /// [`KitError::NoKernel`], [`KitError::Layout`], [`KitError::OtherModel`], [`KitError::Manifest`],
    /// [`KitError::ArgumentCount`], [`KitError::Argument`], [`KitError::Lane`].
    pub fn find(&self, design: Design, layers: usize, shape: Shape) -> Result<&KitKernel, KitError> {
        let is_it = |kernel: &&KitKernel| Shape::from(kernel.shape) == shape && kernel.layers == layers;
        let Some(kernel) = self.kernels_of(design).find(is_it).or_else(|| self.kernels_of(design).next()) else {
            return Err(self.no_kernel(design, layers, self.designs()));
        };
        let name = design.name();
        if kernel.layout_version != LAYOUT_VERSION {
            let (wanted, found) = (LAYOUT_VERSION, kernel.layout_version);
            return Err(KitError::Layout { design: name, wanted, found });
        }
        if Shape::from(kernel.shape) != shape {
            return Err(KitError::OtherModel { design: name, wanted: shape, found: kernel.shape.into() });
        }
        if kernel.layers != layers {
            let sizes: Vec<String> = self.kernels_of(design).map(|kernel| kernel.layers.to_string()).collect();
            return Err(self.no_kernel(design, layers, format!("kernels for {} layers", sizes.join(", "))));
        }
        // Before anything is multiplied by it: a model's own number of layers is sound.
        if layers > shape.layers {
            let reason = format!("{name}: wanted at most {} layers, as the model has, found {layers}", shape.layers);
            let (path, field) = (self.folder.join(KIT_FILE), "layers".to_owned());
            return Err(KitError::Manifest { path, field, reason });
        }
        let arguments = design.arguments(shape, layers)?;
        if kernel.arguments.len() != arguments.len() {
            let (wanted, found, place) = (arguments.len(), kernel.arguments.len(), "in kit.json");
            return Err(KitError::ArgumentCount { design: name, wanted, found, place });
        }
        for (index, (wanted, found)) in arguments.iter().zip(&kernel.arguments).enumerate() {
            if found.name != wanted.name || !(wanted.least_bytes..=wanted.bytes).contains(&found.bytes) {
                return Err(KitError::Argument {
                    design: name,
                    index,
                    wanted: format!("{} of {} bytes", wanted.name, wanted.bytes),
                    found: format!("{} of {} bytes", found.name, found.bytes),
                });
            }
        }
        Ok(kernel)
    }

    /// Reads and checks the files of the kernel that [`Kit::find`] finds.
    ///
    /// # Errors
    /// As [`Kit::find`]; [`KitError::Io`], [`KitError::TooLarge`], [`KitError::Checksum`], [`KitError::Xclbin`],
    /// [`KitError::Instructions`].
    pub fn load(&self, design: Design, layers: usize, shape: Shape) -> Result<KernelImage, KitError> {
        let kernel = self.find(design, layers, shape)?;
        let arguments = design.arguments(shape, layers)?;
        let (xclbin_path, instructions_path) =
            (self.folder.join(&kernel.xclbin), self.folder.join(&kernel.instructions));
        let xclbin = read_checked(&xclbin_path, &kernel.sha256.xclbin)?;
        let instructions = read_checked(&instructions_path, &kernel.sha256.instructions)?;
        check_xclbin(&xclbin_path, &xclbin, &kernel.kernel, design, arguments.len())?;
        check_instructions(&instructions_path, &instructions, design, &arguments)?;
        Ok(KernelImage {
            design,
            layers,
            unit: kernel.kernel.clone(),
            xclbin: xclbin.into(),
            xclbin_sha256: kernel.sha256.xclbin.clone(),
            instructions: instructions.into(),
            length_unit: kernel.instruction_size_unit.into(),
        })
    }

    fn no_kernel(&self, design: Design, layers: usize, found: String) -> KitError {
        KitError::NoKernel { path: self.folder.clone(), design: design.name(), layers, found }
    }

    /// What the kit has, for a message.
    fn designs(&self) -> String {
        let kernels = self.manifest.kernels.iter();
        let names: Vec<String> =
            kernels.map(|kernel| format!("{} ({} layers)", kernel.design, kernel.layers)).collect();
        if names.is_empty() { "no kernel at all".to_owned() } else { names.join(", ") }
    }
}

fn read_checked(path: &Path, wanted: &str) -> Result<Vec<u8>, KitError> {
    let bytes = read_file(path, MAX_FILE_BYTES)?;
    let found = hexadecimal(&Sha256::digest(&bytes));
    if found != wanted {
        return Err(KitError::Checksum { path: path.to_owned(), wanted: wanted.to_owned(), found });
    }
    Ok(bytes)
}

fn read_file(path: &Path, limit_bytes: u64) -> Result<Vec<u8>, KitError> {
    let io = |source| KitError::Io { path: path.to_owned(), action: "read", source };
    let mut bytes = Vec::new();
    // One byte more than is accepted, so that a file that grows is seen as well.
    File::open(path).map_err(io)?.take(limit_bytes + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit_bytes {
        return Err(KitError::TooLarge { path: path.to_owned(), limit_bytes });
    }
    Ok(bytes)
}

fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

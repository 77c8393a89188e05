//! Arrays of a package, written row by row.

use super::error::{PackageError, io_error};
use super::metadata::METADATA_FILE;
use super::plan::{Array, Storage};
use super::source::{Checkpoint, SourceRows};
use crate::hexadecimal;
use npuhal_core::dtype::{bf16_bits, f16_bits};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Elements between two reports of progress.
const STEP_ELEMENTS: usize = 1 << 18;
const BUFFER_BYTES: usize = 1 << 18;
/// Largest finite float16.
const F16_MAX: f32 = 65504.0;
/// From here on float16 rounds to infinity.
const F16_OVERFLOW: f32 = 65520.0;

/// A file of the manifest: its name, SHA-256 in hexadecimal and size in bytes.
#[derive(Debug, Clone)]
pub(super) struct Listed {
    pub(super) name: String,
    pub(super) sha256: String,
    pub(super) size_bytes: u64,
}

/// One written array: its entry of `metadata.json` and its files.
pub(super) struct Written {
    pub(super) entry: Value,
    pub(super) files: Vec<Listed>,
}

/// Writes the files of `array` into `directory`. `progress` gets the bytes written since the last call and may stop the work.
pub(super) fn write_array(
    array: &Array,
    checkpoint: &Checkpoint,
    directory: &Path,
    progress: &mut dyn FnMut(u64) -> Result<(), PackageError>,
) -> Result<Written, PackageError> {
    let mut rows = Rows::new(array, checkpoint)?;
    match array.storage {
        Storage::Raw => write_raw(array, &mut rows, directory, progress),
        Storage::Quantized => write_quantized(array, &mut rows, directory, progress),
    }
}

/// Writes a file as it is.
pub(super) fn write_companion(name: &str, contents: &[u8], directory: &Path) -> Result<Listed, PackageError> {
    debug_assert_ne!(name, METADATA_FILE);
    let mut file = HashedFile::create(directory, name.to_owned())?;
    file.write(contents)?;
    file.finish()
}

/// Codes and scale of a row: `scale` is the largest magnitude over 127, and at least the smallest normal number; a code is
/// `weight / scale`, rounded half to even and held within ±127. All in f32.
///
/// # Panics
/// When `codes` is shorter than `row`.
#[must_use]
pub fn quantize_row(row: &[f32], codes: &mut [i8]) -> f32 {
    let largest = row.iter().fold(0.0f32, |largest, weight| largest.max(weight.abs()));
    let scale = (largest / 127.0).max(f32::MIN_POSITIVE);
    assert!(codes.len() >= row.len(), "{} codes for {} weights", codes.len(), row.len());
    for (code, weight) in codes.iter_mut().zip(row) {
        *code = (weight / scale).round_ties_even().clamp(-127.0, 127.0) as i8;
    }
    scale
}

fn write_raw(
    array: &Array,
    rows: &mut Rows,
    directory: &Path,
    progress: &mut dyn FnMut(u64) -> Result<(), PackageError>,
) -> Result<Written, PackageError> {
    let name = format!("{}.float16.bin", array.name);
    let mut file = HashedFile::create(directory, name.clone())?;
    let mut values = vec![0.0; array.cols];
    let mut bytes = Vec::with_capacity(2 * array.cols);
    let mut done = 0;
    for row in 0..array.rows {
        rows.read(row, F16_OVERFLOW, &mut values)?;
        bytes.clear();
        bytes.extend(values.iter().flat_map(|value| f16_bits(*value).to_le_bytes()));
        file.write(&bytes)?;
        done += bytes.len();
        if done >= 2 * STEP_ELEMENTS {
            progress(std::mem::take(&mut done) as u64)?;
        }
    }
    progress(done as u64)?;
    let entry = json!({ "file": name, "shape": array.shape(), "dtype": "float16" });
    Ok(Written { entry, files: vec![file.finish()?] })
}

fn write_quantized(
    array: &Array,
    rows: &mut Rows,
    directory: &Path,
    progress: &mut dyn FnMut(u64) -> Result<(), PackageError>,
) -> Result<Written, PackageError> {
    let name = |suffix: &str| format!("{}.{suffix}", array.name);
    let mut codes_file = HashedFile::create(directory, name("w8.bin"))?;
    let mut scale_file = HashedFile::create(directory, name("scale.f32.bin"))?;
    let mut bf16_file = HashedFile::create(directory, name("bf16.bin"))?;
    let mut values = vec![0.0; array.cols];
    let mut codes = vec![0i8; array.cols];
    let mut bytes = Vec::with_capacity(2 * array.cols);
    let mut done = 0;
    for row in 0..array.rows {
        rows.read(row, f32::INFINITY, &mut values)?;
        let scale = quantize_row(&values, &mut codes);
        scale_file.write(&scale.to_le_bytes())?;
        bytes.clear();
        bytes.extend(codes.iter().map(|code| code.cast_unsigned()));
        codes_file.write(&bytes)?;
        bytes.clear();
        bytes.extend(values.iter().flat_map(|value| bf16_bits(*value).to_le_bytes()));
        bf16_file.write(&bytes)?;
        done += 3 * array.cols + 4;
        if done >= 3 * STEP_ELEMENTS {
            progress(std::mem::take(&mut done) as u64)?;
        }
    }
    progress(done as u64)?;
    let entry = json!({
        "weight": codes_file.name,
        "scale": scale_file.name,
        "shape": array.shape(),
        "layout": "row_major",
        "weight_dtype": "int8",
        "scale_dtype": "float32",
        "quantization": "symmetric_per_output_channel",
        "bf16_file": bf16_file.name,
        "bf16_dtype": "bfloat16",
    });
    Ok(Written { entry, files: vec![codes_file.finish()?, scale_file.finish()?, bf16_file.finish()?] })
}

/// Rows of an array out of the source's tensors.
struct Rows {
    is_vector: bool,
    /// Each with its rows, or columns of a vector.
    parts: Vec<(Option<SourceRows>, usize)>,
    scratch: Vec<f32>,
}

impl Rows {
    fn new(array: &Array, checkpoint: &Checkpoint) -> Result<Self, PackageError> {
        let is_vector = array.is_vector();
        let open = |&(part, count): &(_, usize)| {
            let (rows, cols) = if is_vector { (1, count) } else { (count, array.cols) };
            Ok((checkpoint.part(part, rows, cols)?, count))
        };
        let parts = array.parts.iter().map(open).collect::<Result<_, PackageError>>()?;
        Ok(Self { is_vector, parts, scratch: Vec::new() })
    }

    /// Fills `out` with row `row`; every magnitude is below `limit`.
    fn read(&mut self, row: usize, limit: f32, out: &mut [f32]) -> Result<(), PackageError> {
        if self.is_vector {
            return self.read_vector(limit, out);
        }
        let mut start = 0;
        for (source, rows) in &self.parts {
            if row < start + rows {
                return match source {
                    Some(source) => read_row(source, source.stored(row - start), limit, out),
                    None => {
                        out.fill(0.0);
                        Ok(())
                    }
                };
            }
            start += rows;
        }
        Ok(())
    }

    fn read_vector(&mut self, limit: f32, out: &mut [f32]) -> Result<(), PackageError> {
        let mut rest = out;
        for (source, cols) in &self.parts {
            let (now, later) = rest.split_at_mut((*cols).min(rest.len()));
            rest = later;
            now.fill(0.0);
            if let Some(source) = source {
                self.scratch.resize(*cols, 0.0);
                read_row(source, 0, limit, &mut self.scratch)?;
                for (at, value) in now.iter_mut().enumerate() {
                    *value = self.scratch[source.stored(at)];
                }
            }
        }
        Ok(())
    }
}

fn read_row(source: &SourceRows, row: usize, limit: f32, out: &mut [f32]) -> Result<(), PackageError> {
    let tensor = &source.tensor;
    let bad = |value| PackageError::Value {
        tensor: tensor.name().to_owned(),
        row,
        value,
        limit: if limit.is_finite() { F16_MAX } else { 0.0 },
    };
    // The row exists and has this length: the part's shape was compared with the tensor's.
    tensor.dequantize_row(row, out).map_err(|_| bad(f32::NAN))?;
    match out.iter().find(|value| value.is_nan() || value.abs() >= limit) {
        Some(value) => Err(bad(*value)),
        None => Ok(()),
    }
}

/// A new file whose contents are hashed on their way.
struct HashedFile {
    name: String,
    path: std::path::PathBuf,
    file: BufWriter<File>,
    hash: Sha256,
    size_bytes: u64,
}

impl HashedFile {
    fn create(directory: &Path, name: String) -> Result<Self, PackageError> {
        let path = directory.join(&name);
        let file = File::create_new(&path).map_err(io_error(&path, "create"))?;
        let file = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(Self { name, path, file, hash: Sha256::new(), size_bytes: 0 })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), PackageError> {
        self.hash.update(bytes);
        self.size_bytes += bytes.len() as u64;
        self.file.write_all(bytes).map_err(io_error(&self.path, "write"))
    }

    fn finish(mut self) -> Result<Listed, PackageError> {
        self.file.flush().map_err(io_error(&self.path, "write"))?;
        Ok(Listed { name: self.name, sha256: hexadecimal(&self.hash.finalize()), size_bytes: self.size_bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_quantized_as_published() {
        let golden: Value =
            serde_json::from_str(include_str!("../../tests/data/xdna1/quantize_per_channel.json")).unwrap();
        let weights: Vec<Vec<f32>> = serde_json::from_value(golden["weights"].clone()).unwrap();
        let scales: Vec<u32> = serde_json::from_value(golden["scales_f32_bits"].clone()).unwrap();
        let wanted: Vec<Vec<i8>> = serde_json::from_value(golden["q"].clone()).unwrap();
        assert_eq!(weights.len(), 5);
        for ((row, scale), wanted) in weights.iter().zip(scales).zip(wanted) {
            let mut codes = vec![0; row.len()];
            assert_eq!(quantize_row(row, &mut codes).to_bits(), scale);
            assert_eq!(codes, wanted);
        }
    }

    #[test]
    fn bf16_is_rounded_as_published() {
        let golden: Value = serde_json::from_str(include_str!("../../tests/data/xdna1/bf16_rounding.json")).unwrap();
        let cases = golden["cases"].as_array().unwrap();
        assert_eq!(cases.len(), 15);
        for case in cases {
            let bits = |key: &str| u32::try_from(case[key].as_u64().unwrap()).unwrap();
            assert_eq!(u32::from(bf16_bits(f32::from_bits(bits("f32_bits")))), bits("bf16_bits"), "{case}");
        }
    }
}

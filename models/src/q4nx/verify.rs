//! A Q4NX directory held against the GGUF file it was made from: every written element against the source's, in f64.
//!
//! | source | an element passes | the tensor passes |
//! |---|---|---|
//! | Q4_0, Q4_1, Q4_K (codes kept) | `err ≤ code · |bf16(scale) - scale| + |bf16(zero) - zero| + ulp(ref)` | all elements do |
//! | others (quantized anew) | `err ≤ |s|/2 + |z - min| + 15 · |s - (max - min)/15| + ulp(ref)`, with `s`, `z` the bf16 scale and zero of its group | all elements do, and cosine > 0.99 |
//! | written as bf16 | `err ≤ |ref| · 2^-8 + 1e-30` | all elements do |
//!
//! `ulp` is a unit in the last place of f32. The reference comes from the blocks of the source, not from what packing computes.

use super::config::{config_json, read_json};
use super::container::{Q4nxFile, TensorEntry};
use super::convert::Conversion;
use super::directory::MODEL_FILE;
use super::error::PackError;
use super::guard::{self, ScaleProblem};
use super::pack::{Form, Item, items, read_model};
use super::tile::{GROUP_COLS, Q4_1_BYTES, TILE_COLS, TILE_ELEMENTS, TILE_ROWS, TileDecoder, TileKind};
use crate::gguf::GgufFile;
use crate::quant::blocks::{Q4_0Block, Q4_1Block, Q4KBlock};
use crate::quant::dequantize_row;
use crate::tensor::{Tensor, WeightType};
use half::bf16;
use npuhal_core::dtype::round_bf16;
use npuhal_core::stage::Control;
use std::collections::HashSet;
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// A requantized tensor passes above this cosine.
pub const COSINE: f64 = 0.99;
/// Elements that a thread compares between two looks at the queue.
const UNIT_ELEMENTS: usize = 1 << 20;
const LOOK: Duration = Duration::from_millis(100);

/// What was found about a tensor.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// Codes kept.
    Exact {
        /// Largest error as a share of its bound.
        worst: f64,
    },
    /// Quantized anew.
    Requantized {
        /// Cosine of the angle between written and source elements.
        cosine: f64,
        /// Root of the mean squared error, as a share of that of the source elements.
        relative_rms: f64,
    },
    /// Written as bf16.
    Plain {
        /// Largest error as a share of its bound.
        worst: f64,
    },
    /// There is nothing to compare.
    Absent {
        /// What is wrong with the entry.
        reason: String,
    },
}

/// A tensor's report.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorReport {
    /// Name in the directory.
    pub name: String,
    /// Type in the GGUF file; `None` for a tensor that is not in it.
    pub source: Option<WeightType>,
    /// What was found.
    pub outcome: Outcome,
    /// Elements over their bound.
    pub over: u64,
}

impl TensorReport {
    /// Whether the tensor passes.
    #[must_use]
    pub fn is_good(&self) -> bool {
        match self.outcome {
            Outcome::Exact { .. } | Outcome::Plain { .. } => self.over == 0,
            Outcome::Requantized { cosine, .. } => self.over == 0 && cosine > COSINE,
            Outcome::Absent { .. } => false,
        }
    }

    /// Whether it belongs to layer 0 or to no layer: what is shown unless everything is asked for.
    #[must_use]
    pub fn is_sample(&self) -> bool {
        self.name.strip_prefix("model.layers.").is_none_or(|rest| rest.starts_with("0."))
    }
}

impl fmt::Display for TensorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = self.source.map_or("-", WeightType::name);
        write!(f, "{:3}  {}  {source}  ", if self.is_good() { "ok" } else { "BAD" }, self.name)?;
        match &self.outcome {
            Outcome::Exact { worst } => {
                write!(f, "exact, {} over the bound, largest error {worst:.4} of it", self.over)
            }
            Outcome::Requantized { cosine, relative_rms } => {
                write!(
                    f,
                    "requantized, cosine {cosine:.6}, relative RMS {relative_rms:.4}, {} over half a step",
                    self.over
                )
            }
            Outcome::Plain { worst } => write!(f, "bf16, {} over the bound, largest error {worst:.4} of it", self.over),
            Outcome::Absent { reason } => f.write_str(reason),
        }
    }
}

/// A directory's report.
#[derive(Debug, Clone, PartialEq)]
pub struct VerifyReport {
    /// Every tensor of the GGUF file in its order, then those that only the directory has.
    pub tensors: Vec<TensorReport>,
    /// Declared scales that `config.json` lacks or changes.
    pub scales: Vec<ScaleProblem>,
    /// Values of `config.json` that are not those of the GGUF file.
    pub config: Vec<String>,
}

impl VerifyReport {
    /// Tensors that pass.
    #[must_use]
    pub fn good(&self) -> usize {
        self.tensors.iter().filter(|tensor| tensor.is_good()).count()
    }

    /// Whether everything does.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.good() == self.tensors.len() && self.scales.is_empty() && self.config.is_empty()
    }
}

/// Compares `directory` with the GGUF file at `gguf`. `progress` gets elements compared and their total, on this thread.
///
/// # Errors
/// [`PackError`] where one of them cannot be read or is of another architecture, and when `control` stops the work. A
/// difference is no error: it is in the report.
pub fn verify(
    gguf: &Path,
    directory: &Path,
    threads: Option<NonZeroUsize>,
    control: &Control,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<VerifyReport, PackError> {
    let source = GgufFile::open(gguf)?;
    let (model, scales) = read_model(&source)?;
    let items = items(&source)?;
    let packed = Q4nxFile::open(&directory.join(MODEL_FILE))?;
    let found = read_json(directory).unwrap_or_default();
    let wanted = config_json(&model, "", &[]);
    let pairs: Vec<_> = items.iter().map(|item| (item, entry_of(item, &packed))).collect();
    let sums = compare(&packed, &pairs, threads, control, progress)?;
    let mut tensors: Vec<_> = pairs.iter().zip(sums).map(|((item, entry), sum)| report(item, entry, &sum)).collect();
    let known: HashSet<&str> = items.iter().map(|item| item.name.as_str()).collect();
    let strangers = packed.tensors().iter().filter(|entry| !known.contains(entry.name()));
    tensors.extend(strangers.map(|entry| TensorReport {
        name: entry.name().to_owned(),
        source: None,
        outcome: Outcome::Absent { reason: "the GGUF file has no such tensor".to_owned() },
        over: 0,
    }));
    Ok(VerifyReport { tensors, scales: guard::problems(&scales, &found), config: config_problems(&wanted, &found) })
}

/// Keys whose values decide the result.
const CONFIG_KEYS: [&str; 9] = [
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
];

type Json = serde_json::Map<String, serde_json::Value>;

fn config_problems(wanted: &Json, found: &Json) -> Vec<String> {
    let problem = |key: &&str| {
        let (wanted, found) = (wanted.get(*key)?, found.get(*key));
        let same = match (wanted.as_f64(), found.and_then(serde_json::Value::as_f64)) {
            // Written with seven digits or with all of them.
            (Some(wanted), Some(found)) => (wanted - found).abs() <= wanted.abs() * 1e-6,
            _ => found == Some(wanted),
        };
        let found = found.map_or_else(|| "nothing".to_owned(), ToString::to_string);
        (!same).then(|| format!("config.json: {key}: wanted {wanted}, found {found}"))
    };
    CONFIG_KEYS.iter().filter_map(problem).collect()
}

/// The entry of `item`, or why there is none to compare with.
fn entry_of<'a>(item: &Item, packed: &'a Q4nxFile) -> Result<&'a TensorEntry, String> {
    let entry = packed.tensor(&item.name).ok_or("missing from the directory")?;
    let (rows, cols) = (item.tensor.rows(), item.tensor.cols());
    match item.form {
        Form::Plain => {
            let elements = entry.shape().iter().try_fold(1_i64, |product, dim| product.checked_mul(*dim));
            let same = entry.dtype() == "BF16"
                && elements == i64::try_from(rows * cols).ok()
                && entry.shape().last() == Some(&(cols as i64))
                && entry.bytes() == 2 * rows * cols;
            if !same {
                let (dtype, shape, bytes) = (entry.dtype(), entry.shape(), entry.bytes());
                return Err(format!("wanted BF16 of {rows} × {cols}, found {dtype} {shape:?} in {bytes} bytes"));
            }
        }
        Form::Tiles => {
            let wanted = rows / TILE_ROWS * (cols / TILE_COLS);
            let (kind, tiles) = entry.tiles()?;
            if kind != TileKind::Q4_1 || tiles != wanted || entry.bytes() < wanted * Q4_1_BYTES {
                let (kind, bytes) = (kind.name(), entry.bytes());
                return Err(format!("wanted {wanted} q4_1 tiles, found {tiles} {kind} in {bytes} bytes"));
            }
        }
    }
    Ok(entry)
}

/// Sums over some elements of a tensor.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    over: u64,
    worst: f64,
    dot: f64,
    source: f64,
    written: f64,
    error: f64,
}

impl Sums {
    fn take(&mut self, source: f64, written: f64, bound: f64) {
        let error = (written - source).abs();
        if error.is_nan() || bound.is_nan() || error > bound {
            self.over += 1;
        }
        if error > self.worst * bound {
            self.worst = error / bound;
        }
        self.dot += source * written;
        self.source += source * source;
        self.written += written * written;
        self.error += error * error;
    }

    fn add(&mut self, other: &Self) {
        self.over += other.over;
        self.worst = self.worst.max(other.worst);
        self.dot += other.dot;
        self.source += other.source;
        self.written += other.written;
        self.error += other.error;
    }
}

fn report(item: &Item, entry: &Result<&TensorEntry, String>, sums: &Sums) -> TensorReport {
    let weight_type = item.tensor.weight_type();
    let outcome = match (entry, item.form, Conversion::of(weight_type)) {
        (Err(reason), ..) => Outcome::Absent { reason: reason.clone() },
        (_, Form::Plain, _) => Outcome::Plain { worst: sums.worst },
        (_, Form::Tiles, Conversion::Exact) => Outcome::Exact { worst: sums.worst },
        (_, Form::Tiles, Conversion::Requantized) => {
            // Nothing but zeros, kept, is no difference.
            let zeros = sums.source == 0.0 && sums.written == 0.0;
            let cosine = if zeros { 1.0 } else { sums.dot / (sums.source.sqrt() * sums.written.sqrt()) };
            let relative_rms = if zeros { 0.0 } else { (sums.error / sums.source).sqrt() };
            Outcome::Requantized { cosine, relative_rms }
        }
    };
    TensorReport { name: item.name.clone(), source: Some(weight_type), outcome, over: sums.over }
}

type Pair<'a> = (&'a Item, Result<&'a TensorEntry, String>);

/// Part of a tensor that one thread compares at a time: rows of a plain one, tiles of the others.
struct Unit {
    pair: usize,
    range: Range<usize>,
}

/// The sums of each pair, added in the order of the units, so that they do not depend on the number of threads.
fn compare(
    packed: &Q4nxFile,
    pairs: &[Pair<'_>],
    threads: Option<NonZeroUsize>,
    control: &Control,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Sums>, PackError> {
    let mut units = Vec::new();
    let mut total = 0;
    for (pair, (item, entry)) in pairs.iter().enumerate() {
        let (rows, cols) = (item.tensor.rows(), item.tensor.cols());
        if entry.is_ok() {
            total += (rows * cols) as u64;
            let (count, each) = match item.form {
                Form::Plain => (rows, cols),
                Form::Tiles => (rows / TILE_ROWS * (cols / TILE_COLS), TILE_ELEMENTS),
            };
            let step = (UNIT_ELEMENTS / each.max(1)).max(1);
            units.extend((0..count).step_by(step).map(|start| Unit { pair, range: start..count.min(start + step) }));
        }
    }
    let threads = threads.or_else(|| std::thread::available_parallelism().ok()).unwrap_or(NonZeroUsize::MIN);
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    let mut found = vec![Sums::default(); units.len()];
    std::thread::scope(|scope| {
        for _ in 0..threads.get().min(units.len()) {
            let (sender, units, next, stop) = (sender.clone(), &units, &next, &stop);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(unit) = units.get(index).filter(|_| !stop.load(Ordering::Relaxed)) else { break };
                    let (item, entry) = &pairs[unit.pair];
                    let Ok(entry) = entry else { continue };
                    let (sums, elements) = match item.form {
                        Form::Plain => plain(packed, &item.tensor, entry, &unit.range),
                        Form::Tiles => tiles(packed, &item.tensor, entry, &unit.range),
                    };
                    // The receiver outlives the threads.
                    let _ = sender.send((index, sums, elements));
                }
            });
        }
        drop(sender);
        let mut done = 0;
        loop {
            if let Err(stopped) = control.check() {
                stop.store(true, Ordering::Relaxed);
                return Err(stopped);
            }
            match receiver.recv_timeout(LOOK) {
                Ok((index, sums, elements)) => {
                    found[index] = sums;
                    done += elements as u64;
                    progress(done, total);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    })?;
    let mut sums = vec![Sums::default(); pairs.len()];
    for (unit, found) in units.iter().zip(&found) {
        sums[unit.pair].add(found);
    }
    Ok(sums)
}

/// Compares rows of a tensor written as bf16; the number of elements with the sums.
fn plain(packed: &Q4nxFile, tensor: &Tensor, entry: &TensorEntry, rows: &Range<usize>) -> (Sums, usize) {
    let cols = tensor.cols();
    let mut values = vec![0.0; cols];
    let mut sums = Sums::default();
    let start = entry.range().start;
    for row in rows.clone() {
        // The row exists and has this length.
        if tensor.dequantize_row(row, &mut values).is_err() {
            values.fill(f32::NAN);
        }
        let written = &packed.map()[start + 2 * row * cols..start + 2 * (row + 1) * cols];
        for (value, written) in values.iter().zip(written.as_chunks::<2>().0) {
            let source = f64::from(*value);
            sums.take(source, bf16::from_le_bytes(*written).to_f64(), source.abs() / 256.0 + 1e-30);
        }
    }
    let place = tensor.range().start;
    tensor.file().release(place + rows.start * tensor.row_bytes()..place + rows.end * tensor.row_bytes());
    packed.map().release(start + 2 * rows.start * cols..start + 2 * rows.end * cols);
    (sums, rows.len() * cols)
}

/// Compares tiles; the number of elements with the sums.
fn tiles(packed: &Q4nxFile, tensor: &Tensor, entry: &TensorEntry, tiles: &Range<usize>) -> (Sums, usize) {
    let across = tensor.cols() / TILE_COLS;
    let weight_type = tensor.weight_type();
    let len = TILE_COLS / weight_type.block_len() * weight_type.block_bytes();
    let mut sums = Sums::default();
    let mut written = vec![0.0; TILE_ELEMENTS];
    let start = entry.range().start;
    for index in tiles.clone() {
        let tile = &packed.map()[start + index * Q4_1_BYTES..start + (index + 1) * Q4_1_BYTES];
        let Some(written) = written.first_chunk_mut::<TILE_ELEMENTS>() else { continue };
        if TileDecoder::Q4_1.decode(tile, written).is_err() {
            written.fill(f32::NAN);
        }
        let (tile_row, tile_col) = (index / across, index % across);
        for (r, written) in written.as_chunks::<TILE_COLS>().0.iter().enumerate() {
            let bytes = &tensor.row(TILE_ROWS * tile_row + r)[tile_col * len..(tile_col + 1) * len];
            let reference = Reference::of(weight_type, bytes);
            for c in 0..TILE_COLS {
                sums.take(reference.elements[c], f64::from(written[c]), reference.bounds[c]);
            }
        }
    }
    let place = tensor.range().start;
    let rows = tiles.start / across * TILE_ROWS..tiles.end.div_ceil(across) * TILE_ROWS;
    tensor.file().release(place + rows.start * tensor.row_bytes()..place + rows.end * tensor.row_bytes());
    packed.map().release(start + tiles.start * Q4_1_BYTES..start + tiles.end * Q4_1_BYTES);
    (sums, tiles.len() * TILE_ELEMENTS)
}

/// 256 elements of the source and how far a written one may be from each.
struct Reference {
    elements: [f64; TILE_COLS],
    bounds: [f64; TILE_COLS],
}

impl Reference {
    fn of(weight_type: WeightType, bytes: &[u8]) -> Self {
        let mut reference = Self { elements: [f64::NAN; TILE_COLS], bounds: [0.0; TILE_COLS] };
        match weight_type {
            WeightType::Q4_0 => {
                for (g, block) in bytes.as_chunks::<18>().0.iter().enumerate() {
                    let block = Q4_0Block(block);
                    let scale = block.scale().to_f64();
                    reference.coded(g, &block.codes(), scale, -8.0 * scale);
                }
            }
            WeightType::Q4_1 => {
                for (g, block) in bytes.as_chunks::<20>().0.iter().enumerate() {
                    let block = Q4_1Block(block);
                    reference.coded(g, &block.codes(), block.scale().to_f64(), block.min().to_f64());
                }
            }
            WeightType::Q4K => {
                if let Some(block) = bytes.first_chunk::<144>().map(Q4KBlock) {
                    let (scale, min_scale) = (block.scale().to_f64(), block.min_scale().to_f64());
                    for (g, codes) in block.codes().as_chunks::<GROUP_COLS>().0.iter().enumerate() {
                        let (sc, mn) = block.scale_min(g);
                        reference.coded(g, codes, scale * f64::from(sc), -(min_scale * f64::from(mn)));
                    }
                }
            }
            _ => {
                let mut values = [0.0; TILE_COLS];
                if dequantize_row(weight_type, bytes, &mut values).is_ok() {
                    for (g, values) in values.as_chunks::<GROUP_COLS>().0.iter().enumerate() {
                        reference.requantized(g, values);
                    }
                }
            }
        }
        reference
    }

    /// Scale and zero are exact in f32 for every type whose codes are kept.
    fn coded(&mut self, g: usize, codes: &[u8; GROUP_COLS], scale: f64, zero: f64) {
        let off = |x: f64| (f64::from(round_bf16(x as f32)) - x).abs();
        let (scale_off, zero_off) = (off(scale), off(zero));
        for (c, code) in codes.iter().enumerate() {
            let element = f64::from(*code) * scale + zero;
            self.elements[GROUP_COLS * g + c] = element;
            self.bounds[GROUP_COLS * g + c] = f64::from(*code) * scale_off + zero_off + ulp(element);
        }
    }

    fn requantized(&mut self, g: usize, values: &[f32; GROUP_COLS]) {
        let min = f64::from(values.iter().copied().fold(f32::INFINITY, f32::min));
        let max = f64::from(values.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let step = (max - min) / 15.0;
        let (scale, zero) = (f64::from(round_bf16(step as f32)), f64::from(round_bf16(min as f32)));
        let constants = (zero - min).abs() + 15.0 * (scale - step).abs();
        for (c, value) in values.iter().enumerate() {
            let element = f64::from(*value);
            self.elements[GROUP_COLS * g + c] = element;
            // The quotient is rounded to f32 before it is rounded to a code: a few of its last places.
            self.bounds[GROUP_COLS * g + c] =
                0.500_01 * scale.abs() + constants + 2.0 * ulp(element.abs().max(min.abs()));
        }
    }
}

/// A unit in the last place of the f32 nearest to `x`.
fn ulp(x: f64) -> f64 {
    let power_of_two = f32::from_bits((x.abs() as f32).to_bits() & 0x7F80_0000);
    (f64::from(power_of_two) * f64::from(f32::EPSILON)).max(f64::from(f32::from_bits(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_in_the_last_place() {
        for x in [0.0, 1.0, -1.5, 1e-40, 3e38, 0.1, 2.0] {
            let near = (x as f32).abs();
            assert_eq!(ulp(x), f64::from(near.next_up()) - f64::from(near), "{x}");
        }
    }

    #[test]
    fn what_is_not_a_number_is_over_every_bound() {
        let mut sums = Sums::default();
        for (source, written, bound) in [
            (f64::NAN, 1.0, 1.0),
            (1.0, f64::NAN, 1.0),
            (1.0, f64::INFINITY, 1.0),
            (1.0, 1.0, f64::NAN),
            (1.0, 3.0, 1.0),
        ] {
            sums.take(source, written, bound);
        }
        assert_eq!(sums.over, 5);
    }
}

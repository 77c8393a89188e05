//! From a GGUF file to a Q4NX directory.

use super::config::{self, config_json};
use super::convert::{Conversion, write_bf16, write_tile};
use super::directory::{KERNELS, MODEL_FILE};
use super::error::{PackError, io_error};
use super::guard::{self, DeclaredScale};
use super::layout::{Layout, PlannedTensor};
use super::names::{is_plain, q4nx_name, role_of_gguf};
use super::stamp::{self, CONVERTER, FileState, Stamp, StampState};
use super::tile::{Q4_1_BYTES, TILE_COLS, TILE_ROWS, TileCodes};
use super::tokenizer;
use crate::catalogue::Digest;
use crate::config::RopeScaling;
use crate::error::ModelError;
use crate::gguf::GgufFile;
use crate::source::{ModelSource, TensorRole};
use crate::staging::{Staging, StagingError};
use crate::tensor::Tensor;
use npuhal_core::error::RunError;
use npuhal_core::stage::Control;
use std::fs::{self, File};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Architectures that can be packed.
pub const ARCHITECTURES: [&str; 2] = ["qwen3", "qwen2"];
/// Bytes that a thread makes before it writes them.
const UNIT_BYTES: usize = 1 << 20;
/// Bytes after which what is made is sent to the disk, while more is being made.
const FLUSH_BYTES: u64 = 64 << 20;
/// How often the caller's [`Control`] is looked at while nothing is finished.
const LOOK: Duration = Duration::from_millis(100);

/// How a model is packed.
#[derive(Debug, Clone, Default)]
pub struct PackOptions {
    /// Directory whose `tokenizer.json` and `tokenizer_config.json` are copied; without one they are made from the GGUF file.
    pub tokenizer: Option<PathBuf>,
    /// Take the place of a directory that this program has packed. Its kernels stay.
    pub replace: bool,
    /// Threads; `None` is one for each processor the process may use.
    pub threads: Option<NonZeroUsize>,
}

/// What packing is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackProgress {
    /// Bytes of the packed file that are made.
    pub done_bytes: u64,
    /// All of them.
    pub total_bytes: u64,
    /// Everything is made and on its way to the disk.
    pub flushing: bool,
}

/// A packed model.
#[derive(Debug, Clone, PartialEq)]
pub struct PackReport {
    /// Tensors written.
    pub tensors: usize,
    /// Of these, matrices that kept their codes.
    pub exact: usize,
    /// Of these, matrices quantized anew.
    pub requantized: usize,
    /// Length of `model.q4nx`.
    pub model_bytes: u64,
    /// Length of the GGUF file.
    pub source_bytes: u64,
    /// Declared scales of no critical name that the directory does not carry.
    pub warnings: Vec<DeclaredScale>,
}

/// How a tensor is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// bf16 rows.
    Plain,
    /// q4_1 tiles.
    Tiles,
}

/// A tensor that is to be written.
#[derive(Debug, Clone)]
pub(super) struct Item {
    pub(super) name: String,
    pub(super) tensor: Tensor,
    pub(super) form: Form,
}

impl Item {
    fn planned(&self) -> PlannedTensor {
        let (rows, cols) = (self.tensor.rows() as u64, self.tensor.cols() as u64);
        // Cannot overflow: the elements fit in a file.
        let (dtype, shape, bytes) = match self.form {
            Form::Plain if rows == 1 => ("BF16", vec![cols], 2 * cols),
            Form::Plain => ("BF16", vec![rows, cols], 2 * rows * cols),
            Form::Tiles => {
                let tiles = rows / TILE_ROWS as u64 * (cols / TILE_COLS as u64);
                ("I8", vec![tiles, Q4_1_BYTES as u64], tiles * Q4_1_BYTES as u64)
            }
        };
        PlannedTensor { name: self.name.clone(), dtype, shape, bytes }
    }
}

/// Packs the GGUF file at `gguf` into the directory `out`, which does not exist yet, or is empty. Memory is bounded: each
/// thread holds about a megabyte, the file is read through its mapping. `progress` is called on this thread. When anything
/// fails, or `control` stops the work, nothing is left behind.
///
/// # Errors
/// [`PackError`].
pub fn pack(
    gguf: &Path,
    out: &Path,
    options: &PackOptions,
    control: &Control,
    progress: &mut dyn FnMut(PackProgress),
) -> Result<PackReport, PackError> {
    check_place(out, options.replace)?;
    let source_state = state(gguf)?;
    let file = GgufFile::open(gguf)?;
    let (model, scales) = read_model(&file)?;
    let neutral: Vec<_> = scales.iter().filter(|s| s.is_critical() && s.is_neutral()).cloned().collect();
    let source_name = gguf.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let config = config_json(&model, &source_name, &neutral);
    check_scales(gguf, &scales, &config)?;
    let items = items(&file)?;
    let planned: Vec<_> = items.iter().map(Item::planned).collect();
    let layout = Layout::new(&planned, &source_name, CONVERTER).ok_or_else(|| too_large(gguf))?;
    let tokenizer = Tokenizers::new(gguf, &model, options.tokenizer.as_deref())?;

    let staging = Staging::new(out)?;
    let writer = Writer { path: gguf, target: &staging.path(MODEL_FILE), items: &items, layout: &layout };
    let sha256 = writer.run(options.threads, control, progress)?;
    if state(gguf)? != source_state {
        let source = std::io::Error::other("the file was changed while it was packed");
        return Err(io_error(gguf, "pack")(source));
    }
    let mut config_text = serde_json::to_string_pretty(&config).unwrap_or_default();
    config_text.push('\n');
    staging.write(config::FILE, config_text.as_bytes())?;
    tokenizer.write(&staging)?;
    let stamp = Stamp::new(&model.config().model_type, &source_name, source_state, sha256, layout.len_bytes());
    staging.write(stamp::FILE, stamp.text().as_bytes())?;
    control.check()?;
    if options.replace {
        staging.keep(KERNELS)?;
    }
    staging.publish(options.replace)?;
    let tiles = |wanted| {
        let of = |item: &&Item| item.form == Form::Tiles && Conversion::of(item.tensor.weight_type()) == wanted;
        items.iter().filter(of).count()
    };
    Ok(PackReport {
        tensors: items.len(),
        exact: tiles(Conversion::Exact),
        requantized: tiles(Conversion::Requantized),
        model_bytes: layout.len_bytes(),
        source_bytes: source_state.size_bytes,
        warnings: guard::warnings(&scales, &config),
    })
}

/// The model in `file` and the scales it declares, where it is one that can be packed.
pub(super) fn read_model(file: &GgufFile) -> Result<(ModelSource, Vec<DeclaredScale>), PackError> {
    let path = file.path();
    let arch = file.string("general.architecture")?.unwrap_or("none");
    if !ARCHITECTURES.contains(&arch) {
        let found: String = arch.chars().take(60).collect();
        return Err(PackError::Architecture { path: path.to_owned(), found });
    }
    let scales = guard::declared(file);
    let lost: Vec<_> = scales.iter().filter(|scale| scale.is_critical() && !scale.is_neutral()).cloned().collect();
    check_scales(path, &lost, &serde_json::Map::new())?;
    let model = file.model()?;
    let rope = &model.config().rope;
    if rope.scaling != RopeScaling::None || rope.dims != model.config().head_dim {
        return Err(PackError::Model(ModelError::Unsupported {
            path: path.to_owned(),
            feature: format!("packing RoPE of {} dimensions with scaling {:?}", rope.dims, rope.scaling),
            supported: "RoPE over whole heads without scaling".to_owned(),
        }));
    }
    Ok((model, scales))
}

fn check_scales(
    gguf: &Path,
    scales: &[DeclaredScale],
    config: &serde_json::Map<String, serde_json::Value>,
) -> Result<(), PackError> {
    let problems = guard::problems(scales, config);
    if problems.is_empty() { Ok(()) } else { Err(PackError::DeclaredScale { path: gguf.to_owned(), problems }) }
}

/// What is to be written, in the order of the GGUF file; the tiles of a tied head come last.
pub(super) fn items(file: &GgufFile) -> Result<Vec<Item>, PackError> {
    let mut items = Vec::with_capacity(file.tensors().len() + 1);
    let mut embedding = None;
    for info in file.tensors() {
        let named = role_of_gguf(info.name()).and_then(|role| Some((role, q4nx_name(role)?)));
        let Some((role, name)) = named else {
            let (path, name) = (file.path().to_owned(), info.name().to_owned());
            return Err(PackError::UnknownTensor { path, name });
        };
        let tensor = file.tensor(info)?;
        if role == TensorRole::TokenEmbedding {
            embedding = Some(tensor.clone());
        }
        items.push(Item { name, tensor, form: if is_plain(role) { Form::Plain } else { Form::Tiles } });
    }
    if let Some(tensor) = embedding
        && file.tensor_info("output.weight").is_none()
    {
        let name = q4nx_name(TensorRole::Head).unwrap_or_default();
        items.push(Item { name, tensor, form: Form::Tiles });
    }
    for Item { tensor, form, .. } in &items {
        let (rows, cols) = (tensor.rows(), tensor.cols());
        if *form == Form::Tiles && !(rows.is_multiple_of(TILE_ROWS) && cols.is_multiple_of(TILE_COLS)) {
            let (path, name) = (file.path().to_owned(), tensor.name().to_owned());
            return Err(PackError::NotWholeTiles { path, name, rows, cols });
        }
    }
    Ok(items)
}

fn too_large(gguf: &Path) -> PackError {
    io_error(gguf, "pack")(std::io::Error::new(
        std::io::ErrorKind::FileTooLarge,
        "the packed file would pass 2^63 bytes",
    ))
}

fn state(path: &Path) -> Result<FileState, PackError> {
    Ok(FileState::new(&fs::metadata(path).map_err(io_error(path, "inspect"))?))
}

/// Whether the directory may be made at `out`.
fn check_place(out: &Path, replace: bool) -> Result<(), PackError> {
    let exists = |found: &str, remedy| PackError::Exists { path: out.to_owned(), found: found.to_owned(), remedy };
    let metadata = match fs::symlink_metadata(out) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(io_error(out, "inspect"))?,
    };
    if !metadata.is_dir() {
        return Err(exists("something that is no directory", "name a new directory"));
    }
    let entries = fs::read_dir(out).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(io_error(out, "list"))?;
    if entries.is_empty() {
        return Ok(());
    }
    if !replace {
        return Err(exists("a directory with files", "name a new directory, or replace a packed one with --force"));
    }
    // Kernels stay.
    let ours = [MODEL_FILE, config::FILE, tokenizer::FILE, tokenizer::CONFIG_FILE, stamp::FILE, KERNELS];
    let foreign = entries.iter().find(|entry| !ours.iter().any(|file| entry.file_name() == *file));
    if let Some(entry) = foreign {
        let found = format!("{}, which was not packed by this program,", entry.path().display());
        return Err(exists(&found, "name a new directory, or move it away"));
    }
    match Stamp::look(out) {
        StampState::Found(stamp) if stamp.converter == CONVERTER => Ok(()),
        _ => Err(exists("a directory without a stamp of this program", "name a new directory, or move it away")),
    }
}

/// Where the tokenizer's files come from.
struct Tokenizers(Vec<(&'static str, Vec<u8>)>);

impl Tokenizers {
    fn new(gguf: &Path, model: &ModelSource, directory: Option<&Path>) -> Result<Self, PackError> {
        let vocabulary = model.vocabulary();
        let Some(directory) = directory else {
            let text = tokenizer::tokenizer_json(vocabulary);
            let text = text.map_err(|reason| PackError::Tokenizer { path: gguf.to_owned(), reason })?;
            let config = tokenizer::tokenizer_config_json(vocabulary);
            return Ok(Self(vec![(tokenizer::FILE, text.into_bytes()), (tokenizer::CONFIG_FILE, config.into_bytes())]));
        };
        let mut files = Vec::new();
        for file in [tokenizer::FILE, tokenizer::CONFIG_FILE] {
            let path = directory.join(file);
            if path.is_file() {
                files.push((file, fs::read(&path).map_err(io_error(&path, "read"))?));
            }
        }
        if files.first().is_none_or(|(file, _)| *file != tokenizer::FILE) {
            let reason = format!("there is no {}", tokenizer::FILE);
            return Err(PackError::Tokenizer { path: directory.to_owned(), reason });
        }
        Ok(Self(files))
    }

    fn write(&self, staging: &Staging) -> Result<(), StagingError> {
        self.0.iter().try_for_each(|(file, contents)| staging.write(file, contents))
    }
}

/// Part of a tensor that one thread makes at a time.
#[derive(Debug)]
struct Unit {
    item: usize,
    /// Rows of a plain tensor, tiles of the others.
    range: Range<usize>,
}

/// Makes `model.q4nx`.
struct Writer<'a> {
    path: &'a Path,
    target: &'a Path,
    items: &'a [Item],
    layout: &'a Layout,
}

/// A thread's room to work in.
#[derive(Default)]
struct Room {
    parts: TileCodes,
    values: Vec<f32>,
    bytes: Vec<u8>,
}

impl Writer<'_> {
    /// Writes everything, on `threads`, one more that takes the source's checksum, which is returned, and one that waits for the
    /// disk.
    fn run(
        &self,
        threads: Option<NonZeroUsize>,
        control: &Control,
        progress: &mut dyn FnMut(PackProgress),
    ) -> Result<Digest, PackError> {
        control.check()?;
        let file = File::create_new(self.target).map_err(io_error(self.target, "make"))?;
        self.reserve(&file)?;
        file.write_all_at(self.layout.head(), 0).map_err(io_error(self.target, "write"))?;
        let units = self.units();
        let threads = threads.or_else(|| std::thread::available_parallelism().ok()).unwrap_or(NonZeroUsize::MIN);
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let (sender, receiver) = mpsc::channel();
        let (flush, flushes) = mpsc::channel();
        let sha256 = std::thread::scope(|scope| {
            let checksum = scope.spawn(|| {
                let go_on = || {
                    control.check()?;
                    if stop.load(Ordering::Relaxed) { Err(RunError::Cancelled.into()) } else { Ok(()) }
                };
                stamp::sha256(self.path, &go_on)
            });
            let flusher = scope.spawn(|| {
                let flushed = self.flush(&file, flushes);
                if flushed.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
                flushed
            });
            for _ in 0..threads.get().min(units.len()) {
                let sender = sender.clone();
                let (units, next, stop, file) = (&units, &next, &stop, &file);
                scope.spawn(move || {
                    let mut room = Room::default();
                    while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed))
                        && !stop.load(Ordering::Relaxed)
                    {
                        let made = self.make(unit, file, &mut room);
                        if made.is_err() {
                            stop.store(true, Ordering::Relaxed);
                        }
                        // The receiver outlives the threads.
                        let _ = sender.send(made);
                    }
                });
            }
            drop(sender);
            let watched = self.watch(&receiver, &flush, control, progress);
            drop(flush);
            if watched.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            let sha256 = checksum.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let flushed = flusher.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            watched.and(flushed).and(sha256)
        })?;
        let total_bytes = self.layout.len_bytes();
        progress(PackProgress { done_bytes: total_bytes, total_bytes, flushing: true });
        file.sync_all().map_err(io_error(self.target, "write"))?;
        Ok(sha256)
    }

    /// Sends to the disk what the file holds, whenever something comes through `flushes`.
    fn flush(&self, file: &File, flushes: mpsc::Receiver<()>) -> Result<(), PackError> {
        while flushes.recv().is_ok() {
            // What came meanwhile is flushed with it.
            while flushes.try_recv().is_ok() {}
            file.sync_data().map_err(io_error(self.target, "write"))?;
        }
        Ok(())
    }

    /// Collects what the threads have made, until they are through or something stops them.
    fn watch(
        &self,
        receiver: &mpsc::Receiver<Result<usize, PackError>>,
        flush: &mpsc::Sender<()>,
        control: &Control,
        progress: &mut dyn FnMut(PackProgress),
    ) -> Result<(), PackError> {
        let total_bytes = self.layout.len_bytes();
        let (mut done_bytes, mut flushed_bytes) = (0, 0);
        loop {
            control.check()?;
            match receiver.recv_timeout(LOOK) {
                Ok(made) => {
                    done_bytes += made? as u64;
                    if done_bytes - flushed_bytes >= FLUSH_BYTES {
                        flushed_bytes = done_bytes;
                        // Nobody listens where the disk has failed, which stops the threads.
                        let _ = flush.send(());
                    }
                    progress(PackProgress { done_bytes, total_bytes, flushing: false });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Gives the file its length, on file systems that can do so with its disk space: a full disk is seen at once.
    fn reserve(&self, file: &File) -> Result<(), PackError> {
        let len = self.layout.len_bytes();
        match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, len) {
            Err(error @ (rustix::io::Errno::NOSPC | rustix::io::Errno::FBIG | rustix::io::Errno::DQUOT)) => {
                let source = std::io::Error::other(format!("{len} bytes are needed: {}", std::io::Error::from(error)));
                Err(io_error(self.target, "write")(source))
            }
            _ => file.set_len(len).map_err(io_error(self.target, "write")),
        }
    }

    fn units(&self) -> Vec<Unit> {
        let mut units = Vec::new();
        for (item, Item { tensor, form, .. }) in self.items.iter().enumerate() {
            let (count, each) = match form {
                Form::Plain => (tensor.rows(), 2 * tensor.cols()),
                Form::Tiles => (tensor.rows() / TILE_ROWS * (tensor.cols() / TILE_COLS), Q4_1_BYTES),
            };
            let step = (UNIT_BYTES / each.max(1)).max(1);
            units.extend(
                (0..count)
                    .step_by(step)
                    .map(|start| Unit { item, range: start..count.min(start.saturating_add(step)) }),
            );
        }
        units
    }

    /// Makes and writes one unit; its bytes.
    fn make(&self, unit: &Unit, file: &File, room: &mut Room) -> Result<usize, PackError> {
        let Item { tensor, form, .. } = &self.items[unit.item];
        let (rows, each) = match form {
            Form::Plain => (self.plain(tensor, &unit.range, room)?, 2 * tensor.cols()),
            Form::Tiles => (self.tiles(tensor, &unit.range, room)?, Q4_1_BYTES),
        };
        let at = self.layout.start(unit.item) + unit.range.start as u64 * each as u64;
        file.write_all_at(&room.bytes, at).map_err(io_error(self.target, "write"))?;
        let start = tensor.range().start;
        tensor.file().release(start + rows.start * tensor.row_bytes()..start + rows.end * tensor.row_bytes());
        Ok(room.bytes.len())
    }

    /// The rows `range` as bf16 in the room's bytes.
    fn plain(&self, tensor: &Tensor, range: &Range<usize>, room: &mut Room) -> Result<Range<usize>, PackError> {
        let cols = tensor.cols();
        room.values.resize(cols, 0.0);
        room.bytes.resize(range.len() * 2 * cols, 0);
        for (row, out) in range.clone().zip(room.bytes.chunks_exact_mut(2 * cols)) {
            // The row exists and has this length.
            let read = tensor.dequantize_row(row, &mut room.values);
            if read.is_err() || !write_bf16(&room.values, out) {
                return Err(self.not_finite(tensor, row));
            }
        }
        Ok(range.clone())
    }

    /// The tiles `range` in the room's bytes; the rows they come from.
    fn tiles(&self, tensor: &Tensor, range: &Range<usize>, room: &mut Room) -> Result<Range<usize>, PackError> {
        let across = tensor.cols() / TILE_COLS;
        room.bytes.resize(range.len() * Q4_1_BYTES, 0);
        for (tile, out) in range.clone().zip(room.bytes.as_chunks_mut::<Q4_1_BYTES>().0) {
            if !write_tile(tensor, tile / across, tile % across, &mut room.parts, out) {
                return Err(self.not_finite(tensor, tile / across * TILE_ROWS));
            }
        }
        Ok(range.start / across * TILE_ROWS..range.end.div_ceil(across) * TILE_ROWS)
    }

    fn not_finite(&self, tensor: &Tensor, row: usize) -> PackError {
        PackError::NotFinite {
            path: self.path.to_owned(),
            name: tensor.name().to_owned(),
            weight_type: tensor.weight_type(),
            row,
        }
    }
}

//! What the host lends for a call, as the types of the traits.

use super::models::{self, Purpose};
use npuhal_addon_abi as abi;
use npuhal_core::RunError;
use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::stage::Control;
use npuhal_models::ModelSource;
use npuhal_registry::Options;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The elements at `data`.
///
/// # Safety
/// The host promises `len` elements there, unchanged during `'a`.
pub(super) unsafe fn list<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if data.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(data, len) }
}

/// `text`, copied.
///
/// # Safety
/// The host promises `text.len` bytes of UTF-8 there.
pub(super) unsafe fn text(text: abi::Str) -> String {
    // SAFETY: the caller's promise.
    String::from_utf8_lossy(unsafe { list(text.data, text.len) }).into_owned()
}

/// The model, opened here by its path. One that was asked about is kept until it is opened, or until another one is asked about.
///
/// # Safety
/// The host promises that its model is valid during the call.
pub(super) unsafe fn model(lent: *const abi::Model, purpose: Purpose) -> Result<Arc<ModelSource>, String> {
    // SAFETY: the caller's promise.
    let (path, model_type, is_unread) = match unsafe { lent.as_ref() } {
        // SAFETY: as above.
        Some(lent) => unsafe { (text(lent.path), text(lent.model_type), lent.layers == 0) },
        None => return Err("the host passed no model".to_owned()),
    };
    if is_unread {
        return Ok(Arc::new(ModelSource::unread(PathBuf::from(path), &model_type)));
    }
    let model = models::open(Path::new(&path), purpose)?;
    let found = &model.config().model_type;
    if *found != model_type {
        return Err(format!("the host says that {path} is of type {model_type}, but it is of type {found}"));
    }
    Ok(model)
}

/// The devices.
///
/// # Safety
/// The host promises that they are valid during the call.
pub(super) unsafe fn devices(data: *const abi::Device, len: usize) -> Vec<DeviceCard> {
    // SAFETY: the caller's promise, here and below.
    let lent = unsafe { list(data, len) };
    lent.iter()
        .map(|device| DeviceCard {
            // SAFETY: as above.
            id: unsafe { text(device.id) },
            // SAFETY: as above.
            name: unsafe { text(device.name) },
            generation: match device.generation {
                abi::generation::XDNA1 => Generation::Xdna1,
                abi::generation::XDNA2 => Generation::Xdna2,
                _ => Generation::Cpu,
            },
            is_virtual: device.is_virtual != 0,
            columns: device.columns,
            core_rows: device.core_rows,
            memory_bytes: (device.memory_bytes != 0).then_some(device.memory_bytes),
            driver: None,
            context_limit: None,
            // SAFETY: as above.
            features: unsafe { list(device.features, device.features_len) }
                .iter()
                // SAFETY: as above.
                .map(|&feature| unsafe { text(feature) })
                .collect(),
        })
        .collect()
}

/// The options.
///
/// # Safety
/// The host promises that they are valid during the call.
pub(super) unsafe fn options(lent: *const abi::Options) -> Result<Options, String> {
    // SAFETY: the caller's promise, here and below.
    let Some(lent) = (unsafe { lent.as_ref() }) else { return Ok(Options::default()) };
    // SAFETY: as above.
    let numerics = unsafe { text(lent.numerics) };
    // SAFETY: as above.
    let pairs = unsafe { list(lent.pairs, lent.pairs_len) };
    Ok(Options {
        numerics: numerics.parse().map_err(|error: npuhal_registry::OptionError| error.to_string())?,
        threads: NonZeroUsize::new(lent.threads as usize),
        context_positions: (lent.context_positions != 0).then_some(lent.context_positions),
        sequences: (lent.sequences != 0).then_some(lent.sequences),
        // SAFETY: as above.
        route_options: pairs.iter().map(|pair| unsafe { (text(pair.key), text(pair.value)) }).collect(),
        // Layers on an NPU and folders of kernels do not cross the border.
        ..Options::default()
    })
}

/// The host's hold on a call, for as long as the call lasts.
struct Hold(Mutex<Option<abi::Control>>);

// SAFETY: the interface says that the check may be called from any thread during the call; afterwards it is gone from here.
unsafe impl Send for Hold {}
// SAFETY: as for Send.
unsafe impl Sync for Hold {}

impl Hold {
    fn check(&self) -> Result<(), RunError> {
        let held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(abi::Control { state, check: Some(check) }) = *held else { return Ok(()) };
        // SAFETY: the call has not ended: its end takes the control away under this lock.
        match unsafe { check(state) } {
            abi::status::OK => Ok(()),
            abi::status::DEADLINE_PASSED => Err(RunError::DeadlinePassed),
            _ => Err(RunError::Cancelled),
        }
    }
}

/// Calls `work` with the host's control, which afterwards is not asked any more, whoever still holds a copy.
///
/// # Safety
/// The host promises that its control is valid during the call.
pub(super) unsafe fn with_control<T>(lent: *const abi::Control, work: impl FnOnce(&Control) -> T) -> T {
    struct Ends(Arc<Hold>);
    impl Drop for Ends {
        fn drop(&mut self) {
            *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
    // SAFETY: the caller's promise.
    let hold = Arc::new(Hold(Mutex::new(unsafe { lent.as_ref() }.copied())));
    let _ends = Ends(Arc::clone(&hold));
    work(&Control::asking(move || hold.check()))
}

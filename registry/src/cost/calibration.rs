//! Costs that were measured on this machine, kept between runs.

use super::{CostSource, DeviceCost};
use crate::options::Options;
use crate::route::{Host, Route, RouteError, SegmentRequest};
use crate::selection::Choice;
use crate::span::SegmentSpan;
use npuhal_core::RunError;
use npuhal_core::file::write_whole;
use npuhal_core::stage::{Control, HiddenRows, Row, Segment, SequenceId, Session, Takes, Want, Yields};
use npuhal_models::ModelSource;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Version of the file; one of another version is not read.
const VERSION: u32 = 1;
/// A file of this size would hold thousands of entries.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Steps that are not timed, then steps that are.
const WARM_UP_STEPS: u32 = 4;
const TIMED_STEPS: u32 = 24;

/// What a calibration is of: figures of another route, arithmetic or number of threads say nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CalibrationKey {
    /// Id of the device.
    pub device: String,
    /// The route.
    pub route: String,
    /// Arithmetic.
    pub numerics: String,
    /// Threads; 0 where the route chose.
    pub threads: usize,
}

/// The model that was run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CalibratedModel {
    /// Name for people.
    pub name: String,
    /// Model type.
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Layers.
    pub layers: usize,
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Bytes of weights of a layer in the device's form.
    pub layer_bytes: u64,
}

/// Figures of one device with one model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// What was calibrated.
    #[serde(flatten)]
    pub key: CalibrationKey,
    /// With which model.
    pub model: CalibratedModel,
    /// Rate at which weights stream; `None` where the route opens whole models only.
    pub bytes_per_second: Option<f64>,
    /// Fixed time of a pass through layers.
    pub dispatch_seconds: Option<f64>,
    /// Time of final norm and head.
    pub head_seconds: Option<f64>,
    /// Time of a decoded token through the whole model.
    pub whole_seconds: f64,
}

/// Calibrations that cannot be measured or kept.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// No folder to keep them in.
    #[error("no cache folder: neither XDG_CACHE_HOME nor HOME is set; name one with XDG_CACHE_HOME")]
    NoCache,
    /// The file.
    #[error("{}: {operation}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        operation: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The file is not one of calibrations.
    #[error("{}: {reason}; remove it and calibrate anew with `npuhal bench --calibrate`", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A device that has no speed.
    #[error("{device} is virtual: its speed is that of this program, not of an NPU; calibrate cpu or an NPU")]
    Virtual {
        /// The device.
        device: String,
    },
    /// Nothing is known of the weights' size on this device.
    #[error("route {route} states no cost on {device}; it cannot be calibrated")]
    NoCost {
        /// The route.
        route: String,
        /// The device.
        device: String,
    },
    /// A window too small to measure in.
    #[error("route {route} has {window} positions; calibrating takes {needed}")]
    Window {
        /// The route.
        route: String,
        /// What it has.
        window: u32,
        /// What is needed.
        needed: u32,
    },
    /// A session that gives no logits.
    #[error("route {route} chooses tokens itself; calibrating needs one that gives logits")]
    NoLogits {
        /// The route.
        route: String,
    },
    /// A part that cannot be opened.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// A run that failed.
    #[error(transparent)]
    Run(#[from] RunError),
}

impl CalibrationKey {
    /// The key of a route on a device with these options.
    #[must_use]
    pub fn new(device: &str, route: &str, options: &Options) -> Self {
        Self {
            device: device.to_owned(),
            route: route.to_owned(),
            numerics: options.numerics.to_string(),
            threads: options.threads.map_or(0, usize::from),
        }
    }
}

/// The calibrations of this machine.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Calibrations {
    version: u32,
    entries: Vec<Calibration>,
}

impl Default for Calibrations {
    fn default() -> Self {
        Self { version: VERSION, entries: Vec::new() }
    }
}

impl Calibrations {
    /// Where they are kept: `$XDG_CACHE_HOME/npuhal/calibration.json`, else below `$HOME/.cache`. `variable` reads the
    /// environment.
    ///
    /// # Errors
    /// [`CalibrationError::NoCache`].
    pub fn path(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, CalibrationError> {
        let folder = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let cache = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")));
        Ok(cache.ok_or(CalibrationError::NoCache)?.join("npuhal").join("calibration.json"))
    }

    /// Reads the file at `path`; one that is not there holds none.
    ///
    /// # Errors
    /// [`CalibrationError::Io`], [`CalibrationError::Malformed`].
    pub fn read(path: &Path) -> Result<Self, CalibrationError> {
        let io_error =
            |source| CalibrationError::Io { path: path.to_owned(), operation: "reading the calibrations", source };
        let malformed = |reason: String| CalibrationError::Malformed { path: path.to_owned(), reason };
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            other => other.map_err(io_error)?,
        };
        let mut text = String::new();
        file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(io_error)?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(malformed(format!("wanted at most {MAX_FILE_BYTES} bytes, found more")));
        }
        let read: Self = serde_json::from_str(&text).map_err(|error| malformed(format!("no calibrations: {error}")))?;
        if read.version != VERSION {
            return Err(malformed(format!("wanted version {VERSION}, found {}", read.version)));
        }
        let is_sound = |seconds: f64| seconds.is_finite() && seconds >= 0.0;
        for entry in &read.entries {
            let figures =
                [entry.bytes_per_second, entry.dispatch_seconds, entry.head_seconds, Some(entry.whole_seconds)];
            if !figures.into_iter().flatten().all(is_sound) {
                return Err(malformed(format!("the figures of {} are no times and rates", entry.key.device)));
            }
        }
        Ok(read)
    }

    /// Writes them to `path` at once: the file is the old one or the new one at any time.
    ///
    /// # Errors
    /// [`CalibrationError::Io`].
    pub fn write(&self, path: &Path) -> Result<(), CalibrationError> {
        let io_error = |operation| move |source| CalibrationError::Io { path: path.to_owned(), operation, source };
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(io_error("making the folder"))?;
        let text = serde_json::to_string_pretty(self).map_err(io::Error::other);
        let written = text.and_then(|text| write_whole(path, format!("{text}\n").as_bytes()));
        written.map_err(io_error("writing the calibrations"))
    }

    /// Adds `calibration`, in place of an earlier one of the same key and model.
    pub fn put(&mut self, calibration: Calibration) {
        self.entries.retain(|held| (&held.key, &held.model) != (&calibration.key, &calibration.model));
        self.entries.push(calibration);
    }

    /// `cost` with the figures that were measured, where there are any: with this very model, else with the last other one.
    #[must_use]
    pub fn apply(&self, cost: DeviceCost, key: &CalibrationKey, model: &ModelSource) -> DeviceCost {
        let wanted = describe(model, cost.layer_bytes);
        let is_same = |held: &CalibratedModel| CalibratedModel { name: wanted.name.clone(), ..held.clone() } == wanted;
        let mut entries = self.entries.iter().filter(|entry| entry.key == *key).rev();
        if let Some(entry) = entries.clone().find(|entry| is_same(&entry.model)) {
            // Figures that were stated are not measured because another one was.
            let is_whole_alone =
                entry.bytes_per_second.is_none() || entry.head_seconds.is_none() && cost.head_seconds.is_some();
            let source = if is_whole_alone {
                CostSource::WholeMeasured(Box::new(cost.source.clone()))
            } else {
                CostSource::Measured
            };
            return DeviceCost {
                bytes_per_second: entry.bytes_per_second.unwrap_or(cost.bytes_per_second),
                dispatch_seconds: entry.dispatch_seconds.unwrap_or(cost.dispatch_seconds),
                head_seconds: entry.head_seconds.or(cost.head_seconds),
                whole_seconds: Some(entry.whole_seconds),
                source,
                ..cost
            };
        }
        let Some((entry, rate)) = entries.find_map(|entry| Some((entry, entry.bytes_per_second?))) else { return cost };
        DeviceCost {
            head_seconds: cost.head_seconds.map(|seconds| seconds * cost.bytes_per_second / rate),
            bytes_per_second: rate,
            dispatch_seconds: entry.dispatch_seconds.unwrap_or(cost.dispatch_seconds),
            whole_seconds: None,
            source: CostSource::MeasuredWith(entry.model.name.clone()),
            ..cost
        }
    }
}

fn describe(model: &ModelSource, layer_bytes: u64) -> CalibratedModel {
    let config = model.config();
    let file = model.path().file_name().map(|name| name.to_string_lossy().into_owned());
    CalibratedModel {
        name: if config.name.is_empty() { file.unwrap_or_default() } else { config.name.clone() },
        model_type: config.model_type.clone(),
        hidden_size: config.hidden_size,
        layers: config.layers,
        vocab_size: config.vocab_size,
        layer_bytes,
    }
}

/// Measures the choice `choice` with `model`: one layer, all layers, the head, and the whole model, each decoding token by token.
/// `cost` is what the route states; its bytes are taken from there.
///
/// # Errors
/// [`CalibrationError`].
pub fn measure(
    choice: &Choice,
    cost: &DeviceCost,
    model: &ModelSource,
    options: &Options,
    host: &dyn Host,
    open: impl FnOnce() -> Result<Session, RouteError>,
    control: &Control,
) -> Result<Calibration, CalibrationError> {
    let (route, device) = (choice.route.as_ref(), choice.service.device.as_str());
    let needed = WARM_UP_STEPS + TIMED_STEPS;
    if choice.service.window < needed {
        let (route, window) = (route.name().to_owned(), choice.service.window);
        return Err(CalibrationError::Window { route, window, needed });
    }
    let layers = model.config().layers;
    let part = |span: SegmentSpan| {
        let request = SegmentRequest { model, span, options, positions: Some(needed) };
        time_part(route, request, device, host, control)
    };
    let span = |end| SegmentSpan { layers: 0..end, takes: Takes::Tokens, yields: Yields::Hidden };
    let one = part(span(1.min(layers)))?;
    let all = if layers > 1 { part(span(layers))? } else { None };
    let head = part(SegmentSpan { layers: layers..layers, takes: Takes::Hidden, yields: Yields::Logits })?;
    let fit = one.zip(all).and_then(|(one, all)| fit(one, all, layers, cost));
    let Session::Stepper(mut stepper) = open()? else {
        return Err(CalibrationError::NoLogits { route: route.name().to_owned() });
    };
    let mut logits = HiddenRows::new();
    stepper.begin()?;
    let whole = time_steps(control, |row, control| stepper.step(&[row], Want::Last, &mut logits, control));
    stepper.end();
    Ok(Calibration {
        key: CalibrationKey::new(device, route.name(), options),
        model: describe(model, cost.layer_bytes),
        bytes_per_second: fit.map(|(rate, _)| rate),
        dispatch_seconds: fit.map(|(_, dispatch)| dispatch),
        head_seconds: head.map(|head| head.as_secs_f64()),
        whole_seconds: whole?.as_secs_f64(),
    })
}

/// Streaming rate and fixed time of a dispatch from the times of one layer, `t + d`, and of all layers, `layers · t +
/// dispatches · d`. Where each layer is a dispatch the two cannot be told apart; then all of it counts as streaming.
fn fit(one: Duration, all: Duration, layers: usize, cost: &DeviceCost) -> Option<(f64, f64)> {
    let (one, all, dispatches) = (one.as_secs_f64(), all.as_secs_f64(), cost.dispatches(layers));
    let per_layer = if dispatches < layers {
        (all - dispatches as f64 * one) / (layers - dispatches) as f64
    } else {
        all / layers as f64
    };
    let dispatch = if dispatches < layers { (one - per_layer).max(0.0) } else { 0.0 };
    let rate = cost.layer_bytes as f64 / per_layer;
    (per_layer > 0.0 && rate.is_finite()).then_some((rate, dispatch))
}

/// Median time of a row through a part; `None` where the route does not run that part alone: it opens whole models only, or
/// what it needs for the part is not there.
fn time_part(
    route: &dyn Route,
    request: SegmentRequest<'_>,
    device: &str,
    host: &dyn Host,
    control: &Control,
) -> Result<Option<Duration>, CalibrationError> {
    let width = request.model.config().hidden_size;
    let mut segment: Box<dyn Segment> = match route.segment_on(request, device, host) {
        Err(RouteError::NoSegments { .. } | RouteError::Declined { .. }) => return Ok(None),
        other => other?,
    };
    let mut hidden = HiddenRows::new();
    segment.begin()?;
    let time = time_steps(control, |row, control| {
        hidden.reset(1, width);
        hidden.as_mut_slice().iter_mut().enumerate().for_each(|(index, value)| *value = (index % 7) as f32 - 3.0);
        segment.forward(&[row], &mut hidden, Want::All, control)
    });
    segment.end();
    Ok(Some(time?))
}

fn time_steps(
    control: &Control,
    mut step: impl FnMut(Row, &Control) -> Result<(), RunError>,
) -> Result<Duration, RunError> {
    let mut times = Vec::new();
    for position in 0..WARM_UP_STEPS + TIMED_STEPS {
        let started = Instant::now();
        step(Row { sequence: SequenceId(0), token: 1 + position % 2, position }, control)?;
        if position >= WARM_UP_STEPS {
            times.push(started.elapsed());
        }
    }
    times.sort_unstable();
    Ok(times.get(times.len() / 2).copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::{Decline, Fitness, OpenRequest, Reason};
    use crate::tests::model;
    use crate::uri::DeviceUri;
    use npuhal_core::card::DeviceCard;
    use npuhal_core::device::Device;

    fn entry(name: &str, layers: usize, rate: Option<f64>) -> Calibration {
        let mut model = describe(&model("llama"), 1000);
        (model.name, model.layers) = (name.to_owned(), layers);
        Calibration {
            key: CalibrationKey::new("cpu", "cpu", &Options::default()),
            model,
            bytes_per_second: rate,
            dispatch_seconds: rate.map(|_| 1e-5),
            head_seconds: Some(2e-3),
            whole_seconds: 5e-3,
        }
    }

    fn published() -> DeviceCost {
        DeviceCost {
            layer_bytes: 1000,
            bytes_per_second: 1e6,
            dispatch_seconds: 0.0,
            layers_per_dispatch: 0,
            head_seconds: Some(4e-3),
            whole_seconds: None,
            source: CostSource::Published("somebody".to_owned()),
        }
    }

    #[test]
    fn they_are_kept_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("npuhal/calibration.json");
        assert_eq!(Calibrations::read(&path).unwrap(), Calibrations::default());
        let mut held = Calibrations::default();
        held.put(entry("a", 4, Some(2e6)));
        held.put(entry("a", 4, Some(3e6)));
        held.put(entry("b", 8, None));
        assert_eq!(held.entries.len(), 2, "the later one of the same model stands");
        held.write(&path).unwrap();
        assert_eq!(Calibrations::read(&path).unwrap(), held);
        let names: Vec<_> =
            fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["calibration.json"], "nothing is left beside");
    }

    #[test]
    fn the_place_follows_the_environment() {
        let path = |values: &[(&str, &str)]| {
            let find =
                |name: &str| values.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value));
            Calibrations::path(find)
        };
        assert_eq!(path(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")]).unwrap(), Path::new("/x/npuhal/calibration.json"));
        assert_eq!(
            path(&[("XDG_CACHE_HOME", "x"), ("HOME", "/h")]).unwrap(),
            Path::new("/h/.cache/npuhal/calibration.json")
        );
        assert!(matches!(path(&[]), Err(CalibrationError::NoCache)));
    }

    #[test]
    fn a_file_that_is_none_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("calibration.json");
        let read = |text: &str| {
            fs::write(&path, text).unwrap();
            Calibrations::read(&path).unwrap_err().to_string()
        };
        assert!(read("[").contains("no calibrations"));
        assert!(read(r#"{"version": 9, "entries": []}"#).contains("wanted version 1, found 9"));
        let negative = serde_json::to_string(&Calibrations { version: 1, entries: vec![entry("a", 4, Some(-1.0))] });
        assert!(read(&negative.unwrap()).contains("no times and rates"));
    }

    #[test]
    fn measured_figures_replace_published_ones() {
        let (key, model) = (CalibrationKey::new("cpu", "cpu", &Options::default()), model("llama"));
        let held = |entries: Vec<Calibration>| Calibrations { version: 1, entries };
        assert_eq!(held(vec![]).apply(published(), &key, &model), published());
        let same = held(vec![entry("a", 4, Some(2e6))]).apply(published(), &key, &model);
        assert_eq!((same.bytes_per_second, same.whole_seconds, &same.source), (2e6, Some(5e-3), &CostSource::Measured));
        let other = held(vec![entry("b", 8, Some(2e6))]).apply(published(), &key, &model);
        assert_eq!((other.bytes_per_second, other.whole_seconds), (2e6, None), "the time of a whole model is its own");
        assert_eq!(other.head_seconds, Some(2e-3), "the same bytes at the measured rate");
        assert_eq!(other.source, CostSource::MeasuredWith("b".to_owned()));
        let published_by = || Box::new(published().source);
        let whole = held(vec![entry("a", 4, None)]).apply(published(), &key, &model);
        assert_eq!(
            (whole.bytes_per_second, whole.whole_seconds, &whole.source),
            (1e6, Some(5e-3), &CostSource::WholeMeasured(published_by())),
            "a published rate stays a published one"
        );
        assert_eq!(whole.source.to_string(), "published by somebody; the model as a whole measured on this machine");
        let no_head = Calibration { head_seconds: None, ..entry("a", 4, Some(2e6)) };
        let source = held(vec![no_head]).apply(published(), &key, &model).source;
        assert_eq!(source, CostSource::WholeMeasured(published_by()));
        let elsewhere = CalibrationKey { threads: 9, ..key };
        assert_eq!(held(vec![entry("a", 4, Some(2e6))]).apply(published(), &elsewhere, &model), published());
    }

    #[test]
    fn rates_come_from_the_difference_of_two_times() {
        let ms = Duration::from_millis;
        let cost =
            |per_dispatch| DeviceCost { layer_bytes: 1_000_000, layers_per_dispatch: per_dispatch, ..published() };
        let (rate, dispatch) = fit(ms(3), ms(12), 10, &cost(0)).unwrap();
        assert!((rate - 1e9).abs() < 1.0 && (dispatch - 2e-3).abs() < 1e-9, "{rate} {dispatch}");
        assert_eq!(fit(ms(12), ms(3), 10, &cost(0)), None, "noise is no rate");
        assert_eq!(fit(ms(3), ms(3), 10, &cost(0)), None);
    }

    #[test]
    fn a_fit_counts_the_dispatches_of_all_layers() {
        for per_dispatch in [0, 2, 4, 30] {
            // 2 ms a layer, 0.5 ms a dispatch.
            let known = DeviceCost {
                layer_bytes: 1_000_000,
                bytes_per_second: 5e8,
                dispatch_seconds: 5e-4,
                layers_per_dispatch: per_dispatch,
                ..published()
            };
            let time = |layers| Duration::from_secs_f64(known.layers_seconds(layers));
            let (rate, dispatch) = fit(time(1), time(30), 30, &known).unwrap();
            assert!((rate - 5e8).abs() < 1e3 && (dispatch - 5e-4).abs() < 1e-8, "{per_dispatch}: {rate} {dispatch}");
        }
        let single = DeviceCost { layer_bytes: 1_000_000, layers_per_dispatch: 1, ..published() };
        let (rate, dispatch) = fit(Duration::from_millis(4), Duration::from_millis(40), 10, &single).unwrap();
        assert!((rate - 2.5e8).abs() < 1.0 && dispatch == 0.0, "{rate} {dispatch}");
    }

    #[test]
    fn a_route_that_declines_a_part_is_calibrated_as_a_whole() {
        struct Declining;
        impl Route for Declining {
            fn name(&self) -> &str {
                "declining"
            }
            fn model_types(&self) -> &[&str] {
                &["llama"]
            }
            fn fitness(&self, _: &ModelSource, _: &[DeviceCard], _: &Options) -> Fitness {
                Fitness::Declines(Decline::NotMine)
            }
            fn segment(&self, _: SegmentRequest<'_>) -> Result<Box<dyn Segment>, RouteError> {
                Err(RouteError::Declined { route: "declining".to_owned(), reason: Reason::new("no head") })
            }
            fn open(&self, _: OpenRequest<'_>) -> Result<Session, RouteError> {
                Err(RouteError::Declined { route: "declining".to_owned(), reason: Reason::new("not here") })
            }
        }
        struct Nothing;
        impl Host for Nothing {
            fn open_device(&self, id: &str) -> Result<Box<dyn Device>, RouteError> {
                Err(RouteError::Declined { route: id.to_owned(), reason: Reason::new("not here") })
            }
            fn open_segment(&self, route: &str, _: SegmentRequest<'_>) -> Result<Box<dyn Segment>, RouteError> {
                Err(RouteError::Declined { route: route.to_owned(), reason: Reason::new("not here") })
            }
            fn pinned(&self) -> Option<&DeviceUri> {
                None
            }
        }
        let (model, options) = (model("llama"), Options::default());
        let span = SegmentSpan { layers: 4..4, takes: Takes::Hidden, yields: Yields::Logits };
        let request = SegmentRequest { model: &model, span, options: &options, positions: None };
        assert_eq!(time_part(&Declining, request, "npu1", &Nothing, &Control::new()).unwrap(), None);
    }
}

//! `--npu-layers auto`: which split of the layers is the fastest, by what is known of the devices.

use crate::Host;
use crate::error::CliError;
use npuhal_core::Generation;
use npuhal_core::card::DeviceCard;
use npuhal_models::ModelSource;
use npuhal_registry::cost::{Calibrations, DeviceCost, Prediction, cost_on, fastest, predict, table, word};
use npuhal_registry::{DeviceCheck, DeviceChoice, NpuLayers, Registry, Request, survey_devices};

/// Splits of a model over an NPU and the CPU.
pub(crate) struct Splits {
    npu: (String, DeviceCost),
    cpu: (String, DeviceCost),
    predictions: Vec<Prediction>,
}

impl Splits {
    /// The table of all of them.
    pub(crate) fn table(&self) -> String {
        table(&self.predictions, (&self.npu.0, &self.npu.1), (&self.cpu.0, &self.cpu.1))
    }
}

/// Puts the number of layers in place of `auto`, and says what it was chosen by.
pub(crate) fn settle(
    host: &Host,
    registry: &Registry,
    model: &ModelSource,
    request: &mut Request,
) -> Result<(), CliError> {
    if request.options.npu_layers != Some(NpuLayers::Auto) {
        return Ok(());
    }
    let Some(splits) = splits(registry, model, request)? else {
        host.voice.note(
            "--npu-layers auto: no NPU here whose cost is known for this model; the choice is left to the routes",
        );
        request.options.npu_layers = None;
        return Ok(());
    };
    splits.table().lines().for_each(|line| host.voice.note(line));
    if let Some(best) = fastest(&splits.predictions) {
        host.voice.note(format_args!(
            "--npu-layers auto: {} of {} layers on {}, {:.2} tok/s {}",
            best.npu_layers,
            model.config().layers,
            splits.npu.0,
            best.tokens_per_second,
            word(best.claim)
        ));
        request.options.npu_layers = Some(NpuLayers::Count(u32::try_from(best.npu_layers).unwrap_or(u32::MAX)));
    }
    Ok(())
}

/// The splits over the pinned NPU, or over the first one that can be used.
fn splits(registry: &Registry, model: &ModelSource, request: &Request) -> Result<Option<Splits>, CliError> {
    let calibrations = match Calibrations::path(|name| std::env::var_os(name)) {
        Ok(path) => Calibrations::read(&path)?,
        // Without a folder nothing can have been measured.
        Err(_) => Calibrations::default(),
    };
    let (_, devices) = survey_devices(registry, &request.device);
    let usable = |wanted: fn(&DeviceCard) -> bool| {
        let pinned = match &request.device {
            DeviceChoice::Pinned(uri) => Some(uri.id()),
            DeviceChoice::Auto => None,
        };
        let usable = devices.iter().filter(|report| report.check == DeviceCheck::Usable && wanted(&report.card));
        let mut fits = usable.filter(|report| {
            report.card.generation == Generation::Cpu || pinned.as_ref().is_none_or(|id| *id == report.card.id)
        });
        fits.find_map(|report| {
            let cost = cost_on(registry, model, &report.card, &request.options, &calibrations)?;
            Some((report.card.id.clone(), cost))
        })
    };
    let npu = usable(|card| card.generation != Generation::Cpu);
    let cpu = usable(|card| card.generation == Generation::Cpu);
    let (Some(npu), Some(cpu)) = (npu, cpu) else { return Ok(None) };
    let predictions = predict(model.config().layers, &npu.1, &cpu.1);
    Ok(Some(Splits { npu, cpu, predictions }))
}

//! `npuhal bench --calibrate`: what a device costs a token, kept for the planner of hybrid placements.

use crate::Host;
use crate::args::BenchArgs;
use crate::error::CliError;
use crate::session::{Plan, plan};
use crate::terminal::say;
use npuhal_registry::cost::{Calibration, CalibrationError, Calibrations, calibration};
use npuhal_registry::{DeviceChoice, RegistryHost};

pub(crate) fn calibrate(host: &Host, args: &BenchArgs) -> Result<(), CliError> {
    let Plan { model, registry, choice, options } = plan(host, &args.model)?;
    let device = choice.service.device.clone();
    let card = choice.decision.devices.iter().map(|report| &report.card).find(|card| card.id == device);
    let route = choice.route.name().to_owned();
    let cost = match card {
        Some(card) if card.is_virtual => return Err(CalibrationError::Virtual { device }.into()),
        Some(card) => choice.route.cost(&model, card, &options),
        None => None,
    };
    let cost = cost.ok_or(CalibrationError::NoCost { route, device })?;
    let path = Calibrations::path(|name| std::env::var_os(name))?;
    let mut kept = Calibrations::read(&path)?;
    let pinned = match &choice.decision.device {
        DeviceChoice::Pinned(uri) => Some(uri),
        _ => None,
    };
    let lender = RegistryHost::new(&registry, pinned);
    let open = || choice.open(&registry, &model, &options);
    let found = calibration::measure(&choice, &cost, &model, &options, &lender, open, &host.control)?;
    say(&table(&found))?;
    kept.put(found);
    kept.write(&path)?;
    host.voice.note(format_args!("kept in {}", path.display()));
    Ok(())
}

fn table(found: &Calibration) -> String {
    let ms =
        |seconds: Option<f64>| seconds.map_or_else(|| "-".to_owned(), |seconds| format!("{:.3} ms", seconds * 1e3));
    let rate = found.bytes_per_second.map_or_else(|| "-".to_owned(), |rate| format!("{:.2} GB/s", rate / 1e9));
    let (key, model) = (&found.key, &found.model);
    format!(
        "{} by {} with {} ({} layers of {:.2} MB)\n  streaming   {rate}\n  dispatch    {}\n  head        {}\n  whole model {} ({:.1} tok/s)\n",
        key.device,
        key.route,
        model.name,
        model.layers,
        model.layer_bytes as f64 / 1e6,
        ms(found.dispatch_seconds),
        ms(found.head_seconds),
        ms(Some(found.whole_seconds)),
        1.0 / found.whole_seconds
    )
}

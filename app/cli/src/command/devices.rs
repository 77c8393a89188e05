//! `npuhal devices`: the devices and whether each can be used.

use crate::Host;
use crate::args::DevicesArgs;
use crate::error::CliError;
use crate::npu;
use crate::session::registry;
use crate::terminal::{bytes_text, say};
use npuhal_amdxdna::discovery::{Finding, FoundNpu};
use npuhal_core::card::Generation;
use npuhal_registry::selection::FactoryReport;
use npuhal_registry::{DeviceCheck, DeviceChoice, DeviceReport, survey_devices};
use serde_json::json;

pub(crate) fn devices(host: &Host, args: &DevicesArgs) -> Result<(), CliError> {
    let registry = registry(host)?;
    let (factories, devices) = survey_devices(&registry, &DeviceChoice::Auto);
    let unserved = npu::enumerate_unserved();
    let npu = npu_text(&factories, &devices);
    let text = if args.json {
        let list: Vec<_> = devices.iter().map(json_card).chain(unserved.iter().map(json_unserved)).collect();
        format!("{:#}\n", json!({ "devices": list, "npu": npu }))
    } else {
        let width = devices.iter().map(|report| report.card.id.len()).max().unwrap_or(0);
        let mut text: String = devices.iter().map(|report| card_text(report, width)).collect();
        text.extend(unserved.iter().map(|(npu, finding)| format!("{:width$} cannot be used: {finding}\n", npu.id)));
        text.push_str(&format!("\n{npu}\n"));
        text
    };
    Ok(say(&text)?)
}

/// One sentence about the NPU of this machine.
fn npu_text(factories: &[FactoryReport], devices: &[DeviceReport]) -> String {
    let npus = devices.iter().filter(|report| report.card.generation != Generation::Cpu && !report.card.is_virtual);
    let npus: Vec<&DeviceReport> = npus.collect();
    if let Some(usable) = npus.iter().find(|report| report.check == DeviceCheck::Usable) {
        let id = &usable.card.id;
        return format!("NPU {id}: nothing speaks against using it; `npuhal doctor --device {id}` tries it");
    }
    if let Some(report) = npus.first() {
        return format!("NPU {}: {}; `npuhal doctor` says more", report.card.id, check_text(report));
    }
    let looked = factories.iter().filter(|factory| factory.looked_for_npus());
    let absences: Vec<&str> = looked.map(|factory| factory.absence.as_str()).collect();
    format!("no NPU found ({})", absences.join("; "))
}

fn card_text(report: &DeviceReport, width: usize) -> String {
    let card = &report.card;
    let mut line = format!("{:width$} {}", card.id, card.name);
    let mut facts = Vec::new();
    if card.generation != Generation::Cpu {
        facts.push(format!("{}, {} columns × {} core rows", card.generation, card.columns, card.core_rows));
    }
    facts.extend(card.driver.iter().filter_map(|driver| Some(format!("firmware {}", driver.firmware.as_deref()?))));
    if !card.features.is_empty() {
        facts.push(card.features.join(" "));
    }
    facts.extend(card.memory_bytes.map(|bytes| format!("{} of memory", bytes_text(bytes))));
    if !facts.is_empty() {
        line.push_str(&format!(" ({})", facts.join("; ")));
    }
    line.push_str(": ");
    line.push_str(&check_text(report));
    line.push('\n');
    line
}

fn check_text(report: &DeviceReport) -> String {
    match &report.check {
        DeviceCheck::Usable => "usable".to_owned(),
        DeviceCheck::NotAsked if report.card.is_virtual => "used only where --device names it".to_owned(),
        DeviceCheck::NotAsked => "not checked".to_owned(),
        DeviceCheck::Unavailable(unavailable) => format!("cannot be used: {unavailable}"),
    }
}

fn json_card(report: &DeviceReport) -> serde_json::Value {
    let card = &report.card;
    json!({
        "id": card.id,
        "name": card.name,
        "generation": card.generation.to_string(),
        "virtual": card.is_virtual,
        "columns": card.columns,
        "core_rows": card.core_rows,
        "memory_bytes": card.memory_bytes,
        "features": card.features,
        "context_limit": card.context_limit,
        "firmware": card.driver.as_ref().and_then(|driver| driver.firmware.as_deref()),
        "usable": report.check == DeviceCheck::Usable || card.is_virtual,
        "check": check_text(report),
    })
}

fn json_unserved((npu, finding): &(FoundNpu, Finding)) -> serde_json::Value {
    json!({
        "id": npu.id,
        "name": npu.display_name,
        "pci_device": format!("{:04x}", npu.pci_device),
        "virtual": false,
        "usable": false,
        "check": format!("cannot be used: {finding}"),
    })
}

//! `npuhal devices`: the devices and whether each can be used.

use crate::Host;
use crate::args::DevicesArgs;
use crate::error::CliError;
use crate::presence;
use crate::session::registry;
use crate::terminal::{bytes_text, say};
use npuhal_registry::{DeviceCheck, DeviceChoice, DeviceReport, NpuPresence, survey_devices};
use serde_json::json;
use std::path::Path;

pub(crate) fn devices(host: &Host, args: &DevicesArgs) -> Result<(), CliError> {
    let registry = registry(host)?;
    let (_, devices) = survey_devices(&registry, &DeviceChoice::Auto);
    let npu = match presence::look(Path::new("/")) {
        NpuPresence::Present { evidence } => {
            format!("an NPU is here ({evidence}), but this version of npuhal has no driver for it")
        }
        NpuPresence::Absent { evidence } => format!("no NPU found ({evidence})"),
        NpuPresence::NotChecked => "not looked for an NPU".to_owned(),
    };
    let text = if args.json {
        let list: Vec<_> = devices.iter().map(json_card).collect();
        format!("{:#}\n", json!({ "devices": list, "npu": npu }))
    } else {
        let mut text: String = devices.iter().map(card_text).collect();
        text.push_str(&format!("npu   {npu}\n"));
        text
    };
    Ok(say(&text)?)
}

fn card_text(report: &DeviceReport) -> String {
    let card = &report.card;
    let mut line = format!("{:5} {}", card.id, card.name);
    let mut facts = Vec::new();
    if !card.features.is_empty() {
        facts.push(card.features.join(" "));
    }
    facts.extend(card.memory_bytes.map(|bytes| format!("{} of memory", bytes_text(bytes))));
    if !facts.is_empty() {
        line.push_str(&format!(" ({})", facts.join("; ")));
    }
    line.push_str(": ");
    line.push_str(&check_text(&report.check));
    line.push('\n');
    line
}

fn check_text(check: &DeviceCheck) -> String {
    match check {
        DeviceCheck::Usable => "usable".to_owned(),
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
        "usable": report.check == DeviceCheck::Usable,
        "check": check_text(&report.check),
    })
}

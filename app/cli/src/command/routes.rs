//! `npuhal routes`: which route runs a model where, and why; without a model, everything that is registered.

use crate::Host;
use crate::args::RoutesArgs;
use crate::error::CliError;
use crate::planner::settle;
use crate::session::{open_model_for, registry, request};
use crate::terminal::{bytes_text, say};
use npuhal_core::stage::Placement;
use npuhal_models::ModelSource;
use npuhal_models::source::Format;
use npuhal_registry::selection::{FactoryReport, RouteOutcome, RouteReport};
use npuhal_registry::{
    AddonReport, Decision, Decline, DeviceCheck, DeviceReport, KernelOrigin, Options, Origin, Registry, SelectionError,
    Service, select, survey_devices,
};
use serde_json::{Value, json};

/// Contexts whose memory is shown, as far as the route reaches.
const CONTEXTS: [u32; 5] = [512, 2048, 8192, 32_768, 131_072];

pub(crate) fn routes(host: &Host, args: &RoutesArgs) -> Result<(), CliError> {
    let registry = registry(host)?;
    let mut request = request(&registry, &args.session)?;
    request.needed_positions = args.needs;
    let Some(spec) = &args.model else {
        let (factories, devices) = survey_devices(&registry, &request.device);
        let report = json!({
            "factories": factories.iter().map(json_factory).collect::<Vec<_>>(),
            "devices": devices.iter().map(json_device).collect::<Vec<_>>(),
            "routes": registry.routes().iter().map(|known| json!({
                "name": known.route.name(),
                "origin": known.origin.to_string(),
                "model_types": known.route.model_types(),
                "options": known.route.option_keys(),
            })).collect::<Vec<_>>(),
            "commands": registry.commands().iter().map(|known| json!({
                "name": known.command.name(),
                "help": known.command.help(),
                "origin": known.origin.to_string(),
            })).collect::<Vec<_>>(),
            "encoders": registry.encoders().iter().map(|known| json!({
                "name": known.encoder.name(),
                "dims": known.encoder.dims(),
                "origin": known.origin.to_string(),
            })).collect::<Vec<_>>(),
            "addons": registry.addons().iter().map(json_addon).collect::<Vec<_>>(),
        });
        return Ok(say(&if args.json { format!("{report:#}\n") } else { inventory_text(&report) })?);
    };
    let model = open_model_for(host, &registry, spec, &mut request, false)?;
    settle(host, &registry, &model, &mut request)?;
    let (decision, error) = match select(&registry, &model, &request) {
        Ok(choice) => (choice.decision, None),
        Err(SelectionError { problem, decision }) => (*decision, Some(problem)),
    };
    let report = json!({
        "model": json_model(&model),
        "device": args.session.device,
        "prefer": decision.prefer.map(|prefer| prefer.to_string()),
        "needed_positions": decision.needed_positions,
        "factories": decision.factories.iter().map(json_factory).collect::<Vec<_>>(),
        "devices": decision.devices.iter().map(json_device).collect::<Vec<_>>(),
        "routes": json_routes(&registry, &model, &decision, &request.options),
        "addons": registry.addons().iter().map(json_addon).collect::<Vec<_>>(),
        "winner": decision.winning().map(|(report, _)| report.name.clone()),
        "trade_offs": decision.trade_offs,
        "summary": error.as_ref().map_or_else(|| decision.line(), ToString::to_string),
    });
    say(&if args.json { format!("{report:#}\n") } else { decision_text(&report) })?;
    match error {
        None => Ok(()),
        Some(problem) => Err(SelectionError { problem, decision: Box::new(decision) }.into()),
    }
}

fn json_model(model: &ModelSource) -> Value {
    let config = model.config();
    if model.format() == Format::Unread {
        return json!({ "path": model.path(), "type": config.model_type, "is_read": false });
    }
    json!({
        "path": model.path(),
        "type": config.model_type,
        "name": config.name,
        "layers": config.layers,
        "context_length": config.context_length,
    })
}

fn json_factory(factory: &FactoryReport) -> Value {
    json!({
        "name": factory.name,
        "origin": factory.origin.to_string(),
        "looks_for": factory.generations.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "looks_for_hardware": factory.looks_for_hardware,
        "found": factory.found,
        "absence": factory.absence,
    })
}

fn json_device(report: &DeviceReport) -> Value {
    let check = match &report.check {
        DeviceCheck::Usable => "usable".to_owned(),
        DeviceCheck::NotAsked => "not asked".to_owned(),
        DeviceCheck::Unavailable(unavailable) => format!("cannot be used: {unavailable}"),
    };
    json!({ "id": report.card.id, "name": report.card.name, "factory": report.factory, "check": check })
}

fn json_addon(addon: &AddonReport) -> Value {
    let names = |pairs: &[(String, String)]| pairs.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    json!({
        "file": addon.file,
        "sha256": addon.sha256,
        "name": addon.name,
        "version": addon.version,
        "routes": addon.routes,
        "options": names(&addon.options),
        "commands": names(&addon.commands),
        "encoders": addon.encoders.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>(),
        "error": addon.error.as_ref().map(ToString::to_string),
    })
}

fn json_routes(registry: &Registry, model: &ModelSource, decision: &Decision, options: &Options) -> Vec<Value> {
    let row = |(index, report): (usize, &RouteReport)| {
        let (state, reason, service) = outcome(&report.outcome);
        let mut row = json!({
            "name": report.name,
            "origin": report.origin.to_string(),
            "addon": addon_digest(registry, &report.origin),
            "wins": decision.winner == Some(index),
            "outcome": state,
            "reason": reason,
        });
        if let (Some(service), Some(object)) = (service, row.as_object_mut()) {
            let memory = memory_by_context(registry, model, decision, report, options, service);
            object.extend([
                ("device".to_owned(), json!(service.device)),
                ("window".to_owned(), json!(service.window)),
                ("speed".to_owned(), json!(service.speed.to_string())),
                (
                    "expected".to_owned(),
                    json!(
                        service
                            .expected
                            .map(|expected| format!("{:.1} tok/s ({})", expected.tokens_per_second, expected.claim))
                    ),
                ),
                ("detail".to_owned(), json!(service.detail)),
                ("kernels".to_owned(), service.kernels.iter().map(json_kernel).collect()),
                ("placement".to_owned(), service.placement.iter().map(json_placement).collect()),
                ("memory_bytes_by_context".to_owned(), memory),
            ]);
        }
        row
    };
    decision.routes.iter().enumerate().map(row).collect()
}

/// What became of a route: its state, the reason, and how it serves.
pub(super) fn outcome(outcome: &RouteOutcome) -> (&'static str, Option<String>, Option<&Service>) {
    let reason = |decline: &Decline| decline.reason().map(ToString::to_string);
    match outcome {
        RouteOutcome::Shadowed { by } => ("shadowed", Some(format!("by the {by}")), None),
        RouteOutcome::OtherModel => ("other model types", None, None),
        RouteOutcome::Declined(decline) => {
            let kind = match decline {
                Decline::NotMine => "declines: not its kind of model",
                Decline::Optional(_) => "declines",
                Decline::Unavailable(_) => "not available",
                Decline::Required(_) => "required, but not available",
            };
            (kind, reason(decline), None)
        }
        RouteOutcome::OtherDevice(service) => ("serves on another device than the pinned one", None, Some(service)),
        RouteOutcome::WindowTooSmall(service) => ("window too small for the request", None, Some(service)),
        RouteOutcome::Serves(service) => ("serves", None, Some(service)),
    }
}

fn addon_digest(registry: &Registry, origin: &Origin) -> Value {
    let Origin::LoadedAddOn { file, .. } = origin else { return Value::Null };
    let report = registry.addons().iter().find(|addon| addon.file == *file);
    json!({ "file": file, "sha256": report.and_then(|report| report.sha256.clone()) })
}

fn json_kernel(kernel: &KernelOrigin) -> Value {
    json!({ "kernel": kernel.kernel, "origin": kernel.origin })
}

fn json_placement(part: &Placement) -> Value {
    json!({
        "layers": format!("{}..{}", part.layers.start, part.layers.end),
        "device": part.device,
        "yields": format!("{:?}", part.yields).to_lowercase(),
    })
}

/// Bytes by positions, for contexts up to the route's window and for the window itself.
fn memory_by_context(
    registry: &Registry,
    model: &ModelSource,
    decision: &Decision,
    report: &RouteReport,
    options: &Options,
    service: &Service,
) -> Value {
    let contexts = CONTEXTS.into_iter().filter(|&positions| positions < service.window);
    let mut memory = serde_json::Map::new();
    for positions in contexts {
        if let Some(bytes) = decision.memory_at(registry, model, report, options, positions) {
            memory.insert(positions.to_string(), json!(bytes));
        }
    }
    if let Some(bytes) = service.memory_bytes {
        memory.insert(service.window.to_string(), json!(bytes));
    }
    Value::Object(memory)
}

/// The text of a key of an object; empty where there is none.
fn word<'v>(value: &'v Value, key: &str) -> &'v str {
    value[key].as_str().unwrap_or_default()
}

fn entries<'v>(value: &'v Value, key: &str) -> &'v [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

fn joined(value: &Value, key: &str) -> String {
    entries(value, key).iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", ")
}

fn inventory_text(report: &Value) -> String {
    let mut text = String::from("routes, highest precedence first:\n");
    for route in entries(report, "routes") {
        text.push_str(&format!(
            "  {} ({}): models {}",
            word(route, "name"),
            word(route, "origin"),
            joined(route, "model_types")
        ));
        let options = joined(route, "options");
        text.push_str(&if options.is_empty() { "\n".to_owned() } else { format!("; options {options}\n") });
    }
    text.push_str("device factories:\n");
    for factory in entries(report, "factories") {
        let (name, origin) = (word(factory, "name"), word(factory, "origin"));
        text.push_str(&format!("  {name} ({origin}): {}", joined(factory, "looks_for")));
        text.push_str(&match word(factory, "absence") {
            "" => format!(", {} found\n", factory["found"]),
            absence => format!(", none found ({absence})\n"),
        });
    }
    text.push_str(&devices_text(report));
    for (key, title) in [("commands", "commands of add-ons:\n"), ("encoders", "encoders:\n")] {
        if !entries(report, key).is_empty() {
            text.push_str(title);
        }
        for entry in entries(report, key) {
            let about =
                if key == "commands" { word(entry, "help").to_owned() } else { format!("{} elements", entry["dims"]) };
            text.push_str(&format!("  {} ({}): {about}\n", word(entry, "name"), word(entry, "origin")));
        }
    }
    text + &addons_text(report)
}

fn devices_text(report: &Value) -> String {
    let mut text = String::from("devices:\n");
    for device in entries(report, "devices") {
        text.push_str(&format!("  {}: {}: {}\n", word(device, "id"), word(device, "name"), word(device, "check")));
    }
    text
}

fn addons_text(report: &Value) -> String {
    let addons = entries(report, "addons");
    let mut text = if addons.is_empty() { String::new() } else { "loaded add-ons, in load order:\n".to_owned() };
    for addon in addons {
        let file = word(addon, "file");
        match addon["error"].as_str() {
            Some(error) => text.push_str(&format!("  {file}: not loaded: {error}\n")),
            None => text.push_str(&format!("  {file}: {} {}\n", word(addon, "name"), word(addon, "version"))),
        }
        if let Some(sha256) = addon["sha256"].as_str() {
            text.push_str(&format!("    sha256 {sha256}\n"));
        }
    }
    text
}

fn decision_text(report: &Value) -> String {
    let model = &report["model"];
    let about = if model["is_read"] == json!(false) {
        "as its files state; left to an add-on".to_owned()
    } else {
        format!("{} layers, trained for {} positions", model["layers"], model["context_length"])
    };
    let mut text = format!("model: {} (type {}, {about})\n", word(model, "path"), word(model, "type"));
    text.push_str(&format!("asked for: device {}", word(report, "device")));
    if let Some(prefer) = report["prefer"].as_str() {
        text.push_str(&format!(", preferring {prefer}"));
    }
    if report["needed_positions"] != json!(0) {
        text.push_str(&format!(", {} positions", report["needed_positions"]));
    }
    text.push('\n');
    text.push_str(&devices_text(report));
    text.push_str("routes, highest precedence first (* is taken):\n");
    entries(report, "routes").iter().for_each(|route| text.push_str(&route_text(route)));
    text.push_str(&addons_text(report));
    for trade_off in entries(report, "trade_offs").iter().filter_map(Value::as_str) {
        text.push_str(&format!("note: {trade_off}\n"));
    }
    text + &format!("result: {}\n", word(report, "summary"))
}

fn route_text(route: &Value) -> String {
    let mark = if route["wins"] == json!(true) { '*' } else { ' ' };
    let mut text = format!("{mark} {} ({}): {}", word(route, "name"), word(route, "origin"), word(route, "outcome"));
    if let Some(reason) = route["reason"].as_str() {
        text.push_str(&format!(": {reason}"));
    }
    if route["device"].is_null() {
        return text + "\n";
    }
    text.push_str(&format!(", window {}, class {}", route["window"], word(route, "speed")));
    for extra in [word(route, "expected"), word(route, "detail")].into_iter().filter(|extra| !extra.is_empty()) {
        text.push_str(&format!(", {extra}"));
    }
    text.push('\n');
    for part in entries(route, "placement") {
        let (layers, device, yields) = (word(part, "layers"), word(part, "device"), word(part, "yields"));
        let what = match layers.split_once("..") {
            Some((start, end)) if start == end => "head".to_owned(),
            _ => format!("layers {layers}"),
        };
        text.push_str(&format!("    {what} on {device}, yielding {yields}\n"));
    }
    for kernel in entries(route, "kernels") {
        text.push_str(&format!("    kernel {}: {}\n", word(kernel, "kernel"), word(kernel, "origin")));
    }
    let memory = route["memory_bytes_by_context"].as_object().into_iter().flatten();
    let memory: Vec<String> = memory
        .map(|(positions, bytes)| format!("{} at {positions}", bytes_text(bytes.as_u64().unwrap_or(0))))
        .collect();
    if !memory.is_empty() {
        text.push_str(&format!("    memory {}\n", memory.join(", ")));
    }
    text
}

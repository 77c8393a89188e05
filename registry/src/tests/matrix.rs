//! The whole matrix of choices: machines × models × lengths × pins × preferences, compared with a stored table, and rules that
//! hold everywhere in it.

use super::{ask, machine, winner};
use crate::options::Prefer;
use crate::registry::Registry;
use std::fmt::Write;
use std::path::Path;

const PINS: [&str; 6] = ["auto", "cpu", "npu1", "npu5", "virtual:npu1", "virtual:npu5"];
const PREFERENCES: [Option<Prefer>; 4] = [None, Some(Prefer::Npu), Some(Prefer::Speed), Some(Prefer::Context)];
const MODELS: [&str; 3] = ["llama", "qwen3", "mamba"];
const NEEDS: [u32; 3] = [32, 1000, 9000];

/// Name, NPUs, those of them that fail their check.
const MACHINES: [(&str, &[&str], &[&str]); 5] = [
    ("no NPU", &[], &[]),
    ("npu1", &["npu1"], &[]),
    ("npu5", &["npu5"], &[]),
    ("npu1 and npu5", &["npu1", "npu5"], &[]),
    ("npu1, and npu5 failing its check", &["npu1", "npu5"], &["npu5"]),
];

fn cells() -> impl Iterator<Item = (&'static str, Registry, &'static str, u32, &'static str)> {
    let models = || MODELS.into_iter().flat_map(|model| NEEDS.into_iter().map(move |needed| (model, needed)));
    MACHINES.into_iter().flat_map(move |(name, npus, broken)| {
        models().flat_map(move |(model, needed)| {
            PINS.into_iter().map(move |pin| (name, machine(npus, broken), model, needed, pin))
        })
    })
}

#[test]
fn the_matrix_is_as_stored() {
    let mut found = String::from("machine | model, positions | pin | no preference | npu | speed | context\n");
    for (name, registry, model, needed, pin) in cells() {
        let winners = PREFERENCES.map(|prefer| winner(&registry, model, pin, prefer, needed));
        writeln!(found, "{name} | {model}, {needed} | {pin} | {}", winners.join(" | ")).unwrap();
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/tests/matrix.txt");
    if std::env::var_os("NPUHAL_STORE").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap();
    for (found, stored) in found.lines().zip(stored.lines()) {
        assert_eq!(found, stored);
    }
    assert_eq!(found.lines().count(), stored.lines().count());
}

#[test]
fn the_rules_hold_in_every_cell() {
    for (name, registry, model, needed, pin) in cells() {
        for prefer in PREFERENCES {
            let cell = format!("{name}, {model}, {needed}, {pin}, {prefer:?}");
            let Ok(choice) = ask(&registry, model, pin, prefer, needed) else { continue };
            let service = &choice.service;
            if pin == "auto" {
                assert!(!service.device.starts_with("virtual:"), "{cell}: a virtual device without being named");
                let is_small = service.window < needed;
                assert!(!is_small || prefer == Some(Prefer::Npu), "{cell}: a window of {}", service.window);
                assert!(!is_small || !choice.decision.trade_offs.is_empty(), "{cell}: the price is not told");
            } else {
                assert_eq!(service.device, pin, "{cell}");
            }
            assert!(!(name.contains("failing") && service.device == "npu5"), "{cell}: a device that failed its check");
            let window = |other: &crate::selection::RouteReport| match &other.outcome {
                crate::selection::RouteOutcome::Serves(service) => service.window,
                _ => 0,
            };
            if prefer == Some(Prefer::Context) {
                assert_eq!(choice.decision.routes.iter().map(window).max(), Some(service.window), "{cell}");
            }
        }
    }
}

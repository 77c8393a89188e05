//! Requests in bytes against what recorded clients sent, and what can be tried without a device.

use super::{
    KernelDriver, bo_request, context_request, encode_units, exec_request, export_request, qos_info, text,
    units_request, user_memory_table, wait_request,
};
use crate::driver::{BoHandle, BoKind, ContextHandle, ContextSpec, CuConfig, Driver, ExecCommand, Qos};
use crate::errno::Errno;
use crate::uapi;
use bytemuck::bytes_of;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// The recorded `ioctl` calls of one client.
fn calls(path: &Path) -> Vec<Value> {
    let json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    json["events"].as_array().unwrap().iter().filter(|event| event.get("ioctl").is_some()).cloned().collect()
}

fn hex(value: &Value) -> Vec<u8> {
    let text = value.as_str().unwrap();
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn handle(value: &Value) -> u32 {
    value.as_str().unwrap().trim_start_matches("bo").parse().unwrap()
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Our request for the same thing: code and bytes, pointers zero as in the recordings. `None` for calls that are not made.
fn ours(call: &Value) -> Option<(u32, Vec<u8>)> {
    let dec = &call["dec"];
    let number = |name: &str| dec[name].as_u64().unwrap() as u32;
    let with = |request: u32, bytes: &[u8]| Some((request, bytes.to_vec()));
    match call["ioctl"].as_str().unwrap() {
        "CREATE_BO" => {
            let kind = match dec["type"].as_str().unwrap() {
                "SHARE" => BoKind::Share,
                "DEV_HEAP" => BoKind::DevHeap,
                "DEV" => BoKind::Dev,
                _ => BoKind::Cmd,
            };
            if let Some(table) = call.get("va_tbl") {
                let recorded = hex(table);
                let long = |at: usize| u64::from(word(&recorded, at)) | u64::from(word(&recorded, at + 4)) << 32;
                assert_eq!(bytes_of(&user_memory_table(long(8), long(16))), recorded);
            }
            with(uapi::CREATE_BO, bytes_of(&bo_request(kind, dec["size"].as_u64().unwrap())))
        }
        "GET_BO_INFO" => {
            with(uapi::GET_BO_INFO, bytes_of(&uapi::GetBoInfo { handle: handle(&dec["bo"]), ..Default::default() }))
        }
        "GEM_CLOSE" => with(uapi::GEM_CLOSE, bytes_of(&uapi::GemClose { handle: handle(&dec["bo"]), pad: 0 })),
        "CREATE_HWCTX" => {
            let spec = ContextSpec { num_tiles: number("num_tiles"), max_opc: number("max_opc"), qos: Qos::default() };
            let qos = hex(&call["qos"]);
            let value = |i: usize| word(&qos, 4 * i);
            let wishes = Qos {
                gops: value(0),
                fps: value(1),
                dma_bandwidth: value(2),
                latency_ms: value(3),
                frame_exec_time_ms: value(4),
                priority: value(5),
            };
            assert_eq!(bytes_of(&qos_info(&wishes)), qos);
            with(uapi::CREATE_HWCTX, bytes_of(&context_request(&spec)))
        }
        "CONFIG_HWCTX" => {
            let cus = dec["cus"].as_array().unwrap().iter();
            let units: Vec<_> = cus.map(|cu| CuConfig { bo: BoHandle(handle(&cu["bo"])), function: 0 }).collect();
            let value = encode_units(&units).unwrap();
            assert_eq!(value, hex(&call["config_cu"]));
            with(uapi::CONFIG_HWCTX, bytes_of(&units_request(ContextHandle(number("ctx")), value.len() as u32)))
        }
        "EXEC_CMD" => {
            let args: Vec<_> = dec["args"].as_array()?.iter().map(|arg| BoHandle(handle(arg))).collect();
            let command = BoHandle(handle(&dec["cmd_bo"]));
            let command = ExecCommand { context: ContextHandle(number("ctx")), command, args: &args };
            with(uapi::EXEC_CMD, bytes_of(&exec_request(&command)))
        }
        "SYNCOBJ_TIMELINE_WAIT" => {
            // Finite deadlines are shown as 0.
            let deadline = (dec["deadline"] != "max").then_some(Duration::ZERO);
            with(uapi::SYNCOBJ_TIMELINE_WAIT, bytes_of(&wait_request(deadline)))
        }
        "SYNCOBJ_DESTROY" => {
            let destroy = uapi::SyncobjDestroy { handle: word(&hex(&call["in"]), 0), pad: 0 };
            with(uapi::SYNCOBJ_DESTROY, bytes_of(&destroy))
        }
        "DESTROY_HWCTX" => {
            let destroy = uapi::DestroyHwctx { handle: word(&hex(&call["in"]), 0), pad: 0 };
            with(uapi::DESTROY_HWCTX, bytes_of(&destroy))
        }
        "GET_INFO" => {
            let buffer_size = word(&hex(&call["in"]), 4);
            with(uapi::GET_INFO, bytes_of(&uapi::GetInfo { param: number("param"), buffer_size, buffer: 0 }))
        }
        "GET_ARRAY" => {
            let (element_size, num_element) = (number("element_size"), number("num_element"));
            let array = uapi::GetArray { param: number("param"), element_size, num_element, ..Default::default() };
            with(uapi::GET_ARRAY, bytes_of(&array))
        }
        "PRIME_HANDLE_TO_FD" => {
            // The descriptor is an answer; the recordings show it as 0.
            let export = uapi::PrimeHandle { fd: 0, ..export_request(BoHandle(handle(&dec["bo"]))) };
            with(uapi::PRIME_HANDLE_TO_FD, bytes_of(&export))
        }
        "PRIME_FD_TO_HANDLE" => with(uapi::PRIME_FD_TO_HANDLE, bytes_of(&uapi::PrimeHandle::default())),
        _ => None,
    }
}

#[test]
fn requests_are_byte_for_byte_those_of_recorded_clients() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/driver");
    let mut compared: BTreeMap<String, u32> = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let is_older_client = path.to_str().unwrap().contains("iree");
        for call in calls(&path) {
            let name = call["ioctl"].as_str().unwrap();
            // That client's create request is 8 bytes longer, it configures units with 8 bytes too many, and it waits
            // without the flag that waits for the submission.
            if is_older_client && ["CREATE_HWCTX", "CONFIG_HWCTX", "SYNCOBJ_TIMELINE_WAIT"].contains(&name) {
                continue;
            }
            let Some((request, bytes)) = ours(&call) else { continue };
            let recorded = u32::from_str_radix(call["req"].as_str().unwrap().trim_start_matches("0x"), 16).unwrap();
            assert_eq!(request, recorded, "{}: {name}", path.display());
            assert_eq!(bytes, hex(&call["in"]), "{}: {call}", path.display());
            *compared.entry(name.to_owned()).or_default() += 1;
        }
    }
    assert_eq!(compared.len(), 13, "{compared:?}");
    assert!(compared.values().sum::<u32>() > 500, "{compared:?}");
}

#[test]
fn counts_of_units_are_checked() {
    let unit = CuConfig { bo: BoHandle(2), function: 0 };
    assert_eq!(encode_units(&[]), Err(Errno::EINVAL));
    assert_eq!(encode_units(&[unit; 33]), Err(Errno::EINVAL));
    assert_eq!(encode_units(&[unit; 512]), Err(Errno::E2BIG));
}

#[test]
fn a_node_that_is_not_there_or_not_a_device_is_an_error() {
    assert_eq!(KernelDriver::open(Path::new("/nonexistent/accel0")).unwrap_err(), Errno::ENOENT);
    let driver = KernelDriver::open(Path::new("/dev/null")).unwrap();
    assert_eq!(driver.version(), Err(Errno::ENOTTY));
    let before = driver.now();
    assert!(driver.now() >= before);
}

#[test]
fn texts_end_at_their_length() {
    assert_eq!(text(b"amdxdna\0\0", 7), "amdxdna");
    assert_eq!(text(b"amdxdna\0\0", 1 << 40), "amdxdna");
}

//! Recorded dialogues of existing clients with a device.

use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

pub(crate) struct Trace {
    pub(crate) name: String,
    pub(crate) is_out_of_tree: bool,
    pub(crate) bos: BTreeMap<u32, RecordedBo>,
    pub(crate) contents: HashMap<String, Content>,
    pub(crate) execs: Vec<RecordedExec>,
    pub(crate) events: Vec<Value>,
    pub(crate) metadata: Option<Vec<u8>>,
}

#[derive(Debug, Clone)]
pub(crate) struct RecordedBo {
    pub(crate) handle: u32,
    pub(crate) kind: String,
    pub(crate) size: Option<u64>,
    pub(crate) va: Option<u64>,
    pub(crate) xdna: Option<u64>,
    pub(crate) is_user: bool,
    pub(crate) is_imported: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Content {
    pub(crate) size: usize,
    pub sha256: String,
}

#[derive(Debug, Clone)]
pub(crate) struct RecordedPacket {
    pub(crate) bytes: Vec<u8>,
    /// Byte offset of an 8-byte value, and what it stands for.
    pub(crate) fix: Vec<(usize, String)>,
}

#[derive(Debug, Clone)]
pub(crate) struct RecordedExec {
    pub(crate) errno: Option<i32>,
    pub(crate) packet: Option<RecordedPacket>,
    pub(crate) sub: Vec<RecordedPacket>,
    /// Contents of the buffers that the packets point to.
    pub(crate) code: HashMap<String, String>,
    pub(crate) args: Vec<String>,
    pub(crate) outcome: Option<Outcome>,
    /// The device ended it before anybody waited.
    pub(crate) ends_at_once: bool,
    /// The first wait for it ran into its deadline.
    pub(crate) first_wait_times_out: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    pub(crate) state: u32,
    pub(crate) error_index: u32,
    pub(crate) has_record: bool,
}

impl Trace {
    /// No recording: a device of which every submission ends well, at the first wait.
    pub(crate) fn empty(part: &str, submissions: usize) -> Self {
        let outcome = Some(Outcome { state: 4, error_index: 0, has_record: false });
        let exec = RecordedExec {
            errno: None,
            packet: None,
            sub: Vec::new(),
            code: HashMap::new(),
            args: Vec::new(),
            outcome,
            ends_at_once: false,
            first_wait_times_out: false,
        };
        Self {
            name: part.to_owned(),
            is_out_of_tree: false,
            bos: BTreeMap::new(),
            contents: HashMap::new(),
            execs: vec![exec; submissions],
            events: Vec::new(),
            metadata: None,
        }
    }

    pub(crate) fn load(path: &Path) -> Self {
        let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let json: Value = serde_json::from_str(&text).unwrap();
        let events = json["events"].as_array().unwrap().clone();
        let bos = json["bos"].as_object().unwrap().values().map(bo).map(|bo| (bo.handle, bo)).collect();
        let contents = json["contents"].as_array().into_iter().flatten().map(content).collect();
        let metadata = events.iter().find(|e| e["ioctl"] == "GET_INFO" && e["dec"]["param"] == 1);
        Self {
            name: path.file_stem().unwrap().to_str().unwrap().to_owned(),
            is_out_of_tree: json["profile"] == "oot",
            bos,
            contents,
            execs: execs(&events),
            metadata: metadata.map(|e| hex(&e["data"])),
            events,
        }
    }

    /// Recorded calls named `ioctl` that succeeded.
    pub(crate) fn calls<'a>(&'a self, ioctl: &'a str) -> impl Iterator<Item = &'a Value> {
        self.events.iter().filter(move |event| event["ioctl"] == ioctl && event.get("errno").is_none())
    }

    pub(crate) fn sha256_of(&self, content: &str) -> &Content {
        &self.contents[content]
    }
}

fn bo(value: &Value) -> RecordedBo {
    RecordedBo {
        handle: value["handle"].as_u64().unwrap() as u32,
        kind: value["type"].as_str().unwrap().to_owned(),
        size: value["size"].as_u64(),
        va: value.get("va").map(number),
        xdna: value.get("xdna").map(number),
        is_user: value.get("userptr").is_some(),
        is_imported: value.get("imported").is_some(),
    }
}

fn content(value: &Value) -> (String, Content) {
    let content = Content {
        size: value["size"].as_u64().unwrap() as usize,
        sha256: value["sha256"].as_str().unwrap().to_owned(),
    };
    (value["id"].as_str().unwrap().to_owned(), content)
}

fn execs(events: &[Value]) -> Vec<RecordedExec> {
    let positions = events.iter().enumerate().filter(|(_, event)| event["ioctl"] == "EXEC_CMD");
    positions.map(|(at, event)| exec(event, &events[at + 1..])).collect()
}

fn exec(event: &Value, later: &[Value]) -> RecordedExec {
    let (ctx, seq) = (&event["dec"]["ctx"], &event["dec"]["seq"]);
    let errno = event.get("errno").map(|errno| errno.as_i64().unwrap() as i32);
    let end = later.iter().position(|e| {
        let device = &e["device"];
        errno.is_none() && device["ctx"] == *ctx && device["seq"] == *seq && device["cmd"] == event["dec"]["cmd_bo"]
    });
    let is_wait = |e: &&Value| e["ioctl"] == "SYNCOBJ_TIMELINE_WAIT";
    let first_wait = later[..end.unwrap_or(0)].iter().find(is_wait);
    let next_wait = later.iter().find(is_wait);
    RecordedExec {
        errno,
        packet: event.get("cmd").map(packet),
        sub: event["sub"].as_array().into_iter().flatten().map(packet).collect(),
        code: event["code"].as_object().into_iter().flatten().map(|(k, v)| (k.clone(), text(v))).collect(),
        args: event["dec"]["args"].as_array().into_iter().flatten().map(text).collect(),
        outcome: end.map(|at| outcome(&later[at]["device"])),
        ends_at_once: end.is_some() && first_wait.is_none(),
        first_wait_times_out: next_wait.is_some_and(|wait| wait["errno"] == 62),
    }
}

fn outcome(device: &Value) -> Outcome {
    let state = match device["state"].as_str().unwrap() {
        "COMPLETED" => 4,
        "ERROR" => 5,
        "ABORT" => 6,
        "TIMEOUT" => 8,
        "NORESPONSE" => 9,
        other => panic!("state {other}"),
    };
    Outcome {
        state,
        error_index: device["error_index"].as_u64().unwrap_or(0) as u32,
        has_record: device["health"].as_u64() == Some(1),
    }
}

fn packet(value: &Value) -> RecordedPacket {
    let fix = value["fix"].as_array().unwrap().iter();
    RecordedPacket {
        bytes: hex(&value["hex"]),
        fix: fix.map(|pair| (pair[0].as_u64().unwrap() as usize, text(&pair[1]))).collect(),
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

fn number(value: &Value) -> u64 {
    u64::from_str_radix(value.as_str().unwrap().trim_start_matches("0x"), 16).unwrap()
}

pub(crate) fn hex(value: &Value) -> Vec<u8> {
    let text = value.as_str().unwrap().as_bytes();
    text.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// `bo7` → 7.
pub(crate) fn handle_of(name: &str) -> u32 {
    name.trim_start_matches("bo").parse().unwrap()
}

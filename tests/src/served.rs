//! A server under test, started as a user starts it, and a client for it.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Ten times what anything here takes.
const HANG_GUARD: Duration = Duration::from_secs(120);

/// `npuhal serve`, or the same of a program of one's own. Ended when it is dropped.
pub struct Served {
    child: Child,
    address: SocketAddr,
    log: Arc<Mutex<String>>,
}

impl Served {
    /// Starts `command` on a port that is free and waits until its model is ready. Its arguments begin with `serve`.
    ///
    /// # Panics
    /// Where it ends instead, with what it said.
    #[must_use]
    pub fn start(command: &mut Command) -> Self {
        command.args(["--port", "0"]).env_remove("NPUHAL_API_KEY");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        let mut lines = BufReader::new(child.stderr.take().expect("its messages are piped"));
        let mut said = String::new();
        let address = loop {
            let start = said.len();
            assert!(lines.read_line(&mut said).expect("a line") > 0, "the server ended: {said}");
            if let Some((_, rest)) = said[start..].split_once("API: http://") {
                break rest.trim_end().trim_end_matches("/v1").parse().expect("an address");
            }
        };
        let log = Arc::new(Mutex::new(said));
        let kept = Arc::clone(&log);
        // Read to the end, so that the server never waits for its own messages.
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                kept.lock().unwrap_or_else(PoisonError::into_inner).push_str(&(line + "\n"));
            }
        });
        let server = Self { child, address, log };
        server.wait_until_ready();
        server
    }

    fn wait_until_ready(&self) {
        let started = Instant::now();
        while self.get("/ready").status != 200 {
            assert!(started.elapsed() < HANG_GUARD, "{:?}\n{}", self.get("/ready"), self.log());
            sleep(Duration::from_millis(20));
        }
    }

    /// What it has said so far.
    pub fn log(&self) -> MutexGuard<'_, String> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer to a request without a body.
    #[must_use]
    pub fn get(&self, path: &str) -> Answer {
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    }

    /// The answer to a JSON body.
    #[must_use]
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        let body = body.to_string();
        let head = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: ";
        self.ask(&format!("POST {path} HTTP/1.1\r\n{head}{}\r\n\r\n{body}", body.len()))
    }

    fn ask(&self, request: &str) -> Answer {
        let mut socket = TcpStream::connect(self.address).expect("the server listens");
        socket.set_read_timeout(Some(HANG_GUARD)).expect("a limit");
        socket.write_all(request.as_bytes()).expect("the server reads");
        let mut bytes = Vec::new();
        socket.read_to_end(&mut bytes).expect("the server answers");
        Answer::new(&bytes)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Its workers end with it: their socket is closed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An answer over HTTP.
#[derive(Debug)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Body, put together again where it came in chunks.
    pub body: String,
}

impl Answer {
    fn new(bytes: &[u8]) -> Self {
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
        let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
        let body = &bytes[end + 4..];
        let body = if head.contains("transfer-encoding: chunked") { joined(body) } else { body.to_vec() };
        Self { status, body: String::from_utf8_lossy(&body).into_owned() }
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// Where it is none.
    #[must_use]
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The data of its server-sent events.
    #[must_use]
    pub fn events(&self) -> Vec<&str> {
        self.body.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect()
    }
}

/// The chunks of a body; one that was broken off ends where it was.
fn joined(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|window| window == b"\r\n") {
        let length = std::str::from_utf8(&bytes[..end]).ok().and_then(|text| usize::from_str_radix(text, 16).ok());
        let rest = &bytes[end + 2..];
        let Some(chunk) = length.filter(|length| *length > 0).and_then(|length| rest.get(..length)) else { break };
        body.extend_from_slice(chunk);
        bytes = rest.get(chunk.len() + 2..).unwrap_or_default();
    }
    body
}
